//! Address of a store: a directory, or a prefix in an object store.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Address of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum StoreUrl {
    /// A directory: `/var/lib/rekindle/web`, `./web`, `file:///var/lib/rekindle/web`.
    Directory(PathBuf),
    /// A store in an object store: `s3://BUCKET/PREFIX`.
    Objects(ObjectAddress),
}

/// Address of a store in an object store. Which server it is, the environment determines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectAddress {
    pub bucket: String,
    /// Beginning of the names of all objects, without slashes at its ends; may be empty.
    pub prefix: String,
}

/// Fault of a text that is not a valid address of a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("empty; write a directory, or s3://BUCKET/PREFIX")]
    Empty,
    /// The text is a path on another host, in the notation of `scp` and NFS.
    #[error(
        "`{text}` is taken for a directory of host {host}, which cannot be opened directly: mount it and write the path of the mount, or \
         use an object store, s3://BUCKET/PREFIX; for a directory here of that name write ./{text}"
    )]
    OfHost {
        text: String,
        /// The part before the colon, without the user name.
        host: String,
    },
    /// The scheme is neither `s3` nor `file`.
    #[error("`{scheme}://` is not known; write a directory, file:///DIRECTORY, or s3://BUCKET/PREFIX")]
    Scheme {
        /// The part before `://`.
        scheme: String,
    },
    /// The file URL has a host, or no absolute path.
    #[error("`{url}` does not name a directory from / on; write file:///DIRECTORY with three slashes")]
    File { url: String },
    /// The file URL has percent-encoded characters, which are not supported.
    #[error("`{url}` has a `%`; write the path as it is, without file://")]
    Escaped { url: String },
    /// The scheme is `tls`, which records of earlier versions may have.
    #[error(
        "`{url}`: a store is not reached over a server of Rekindle; mount the directory of the store and write the path of the mount, or \
         use an object store, s3://BUCKET/PREFIX; see docs/protect.md, `A store on another host`"
    )]
    Tls { url: String },
    /// The text after `s3://` is not `BUCKET/PREFIX`.
    #[error("`{url}` is not s3://BUCKET/PREFIX: {what}")]
    Objects { url: String, what: &'static str },
}

impl FromStr for StoreUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        if text.is_empty() {
            return Err(UrlError::Empty);
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            let first = text.split('/').next().unwrap_or_default();
            return match first.split_once(':') {
                Some((host, _)) => {
                    let host = host.rsplit('@').next().unwrap_or(host).to_owned();
                    Err(UrlError::OfHost { text: text.into(), host })
                }
                None => Ok(Self::Directory(PathBuf::from(text))),
            };
        };
        match scheme {
            "file" if rest.contains('%') => Err(UrlError::Escaped { url: text.into() }),
            "file" if rest.starts_with('/') => Ok(Self::Directory(PathBuf::from(rest))),
            "file" => Err(UrlError::File { url: text.into() }),
            "tls" => Err(UrlError::Tls { url: text.into() }),
            "s3" => objects(text, rest).map(Self::Objects),
            // A relative path may contain `://`.
            _ if scheme.contains(['/', '.']) => Ok(Self::Directory(PathBuf::from(text))),
            _ => Err(UrlError::Scheme { scheme: scheme.into() }),
        }
    }
}

fn objects(url: &str, rest: &str) -> Result<ObjectAddress, UrlError> {
    let wrong = |what| UrlError::Objects { url: url.to_owned(), what };
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    // The rule of S3 for names of buckets, except for the length: the server checks that.
    let in_bucket = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ['.', '-'].contains(&c);
    if bucket.is_empty() {
        return Err(wrong("it has no bucket"));
    }
    if !bucket.chars().all(in_bucket) || !bucket.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Err(wrong("the name of a bucket has only a-z, 0-9, `.` and `-`"));
    }
    // Other characters would be encoded, so that the names of the objects differ from what the user reads.
    let in_prefix = |c: char| c.is_ascii_alphanumeric() || ['.', '_', '-', '='].contains(&c);
    let is_good = |part: &str| !part.is_empty() && part != "." && part != ".." && part.chars().all(in_prefix);
    if !prefix.is_empty() && !prefix.split('/').all(is_good) {
        return Err(wrong("the parts of its prefix have only letters, digits, `.`, `_`, `-` and `=`"));
    }
    Ok(ObjectAddress { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
}

impl fmt::Display for ObjectAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bucket, prefix } = self;
        if prefix.is_empty() { write!(f, "s3://{bucket}") } else { write!(f, "s3://{bucket}/{prefix}") }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Objects(objects) => objects.fmt(f),
        }
    }
}

impl From<StoreUrl> for String {
    fn from(url: StoreUrl) -> Self {
        url.to_string()
    }
}

impl TryFrom<String> for StoreUrl {
    type Error = UrlError;

    fn try_from(text: String) -> Result<Self, UrlError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn directories_and_object_stores() {
        let directory = |path: &str| StoreUrl::Directory(path.into());
        assert_eq!("web".parse(), Ok(directory("web")));
        assert_eq!("/a b/ü".parse(), Ok(directory("/a b/ü")));
        assert_eq!("file:///a/b".parse(), Ok(directory("/a/b")));
        assert_eq!("./odd://name".parse(), Ok(directory("./odd://name")));
        assert_eq!("./host2:x".parse(), Ok(directory("./host2:x")));
        assert_eq!("/srv/a:b".parse(), Ok(directory("/srv/a:b")));
        assert_eq!("srv/a:b".parse(), Ok(directory("srv/a:b")));
        let objects = |bucket: &str, prefix: &str| {
            StoreUrl::Objects(ObjectAddress { bucket: bucket.into(), prefix: prefix.into() })
        };
        for (text, bucket, prefix) in [
            ("s3://checkpoints", "checkpoints", ""),
            ("s3://a.b-1/web", "a.b-1", "web"),
            ("s3://checkpoints/Site_1/web", "checkpoints", "Site_1/web"),
        ] {
            assert_eq!(text.parse(), Ok(objects(bucket, prefix)));
            assert_eq!(format!("{text}/").parse(), Ok(objects(bucket, prefix)));
            assert_eq!(objects(bucket, prefix).to_string(), text);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, word) in [
            ("", "empty"),
            ("http://x/y", "`http://`"),
            ("host2:/srv/x", "mount it"),
            ("host2:/srv/x", "s3://BUCKET/PREFIX"),
            ("root@host2:srv/x", "directory of host host2"),
            ("[fd00::1]:/srv/x", "mount it"),
            ("tls:/host/web", "./tls:/host/web"),
            ("file://host/x", "three slashes"),
            ("file:///a%20b", "`%`"),
            ("s3://", "no bucket"),
            ("s3:///web", "no bucket"),
            ("s3://Checkpoints/web", "name of a bucket"),
            ("s3://user@checkpoints/web", "name of a bucket"),
            ("s3://checkpoints//web", "parts of its prefix"),
            ("s3://checkpoints/../web", "parts of its prefix"),
            ("s3://checkpoints/a b", "parts of its prefix"),
            ("tls://host:7000/web", "mount the directory of the store"),
            ("tls://", "s3://BUCKET/PREFIX"),
        ] {
            let e = text.parse::<StoreUrl>().unwrap_err().to_string();
            assert!(e.contains(word), "{text}: {e}");
        }
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic_and_a_printed_url_is_parsed_again(text in "\\PC{0,40}|s3://[a-z.]{0,4}/?[a-z./]{0,9}|(tls|file)://[a-z:/]{0,8}") {
            if let Ok(url) = text.parse::<StoreUrl>() {
                prop_assert_eq!(url.to_string().parse::<StoreUrl>(), Ok(url));
            }
        }
    }
}
