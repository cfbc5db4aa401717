//! Address of a store: a directory, a name on a server, or a prefix in an object store.

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
    /// A store on a server: `tls://HOST:PORT/NAME`.
    Remote(Remote),
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

/// Address of a store on a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// Host name or IP address of the server; an IPv6 address without its brackets.
    pub host: String,
    pub port: u16,
    /// Name of the store on the server.
    pub name: ImageName,
}

/// Name of a store on a server: 1 to 64 characters of `a-z`, `0-9`, `.`, `_` and `-`, beginning with a letter or digit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct ImageName(String);

/// Fault of a text that is not a valid address of a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("empty; write a directory, s3://BUCKET/PREFIX, or tls://HOST:PORT/NAME")]
    Empty,
    /// The text is a path on another host, in the notation of `scp` and NFS.
    #[error(
        "`{text}` is taken for a directory of host {host}, which cannot be opened directly: mount it and write the path of the mount, or run \
         `rekindle store serve` on {host} and write tls://{host}:PORT/NAME; for a directory here of that name write ./{text}"
    )]
    OfHost {
        text: String,
        /// The part before the colon, without the user name.
        host: String,
    },
    /// The scheme is none of `tls`, `s3` and `file`.
    #[error(
        "`{scheme}://` is not known; write a directory, file:///DIRECTORY, s3://BUCKET/PREFIX, or tls://HOST:PORT/NAME"
    )]
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
    /// The text after `tls://` is not `HOST:PORT/NAME`.
    #[error("`{url}` is not tls://HOST:PORT/NAME: {what}")]
    Remote { url: String, what: &'static str },
    /// The text after `s3://` is not `BUCKET/PREFIX`.
    #[error("`{url}` is not s3://BUCKET/PREFIX: {what}")]
    Objects { url: String, what: &'static str },
    #[error(
        "`{name}` cannot be the name of a store on a server; use 1 to 64 of a-z, 0-9, `.`, `_` and `-`, beginning with a letter or digit"
    )]
    Name { name: String },
}

impl ImageName {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ImageName {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let good = text.starts_with(plain)
            && text.len() <= 64
            && text.chars().all(|c| plain(c) || ['.', '_', '-'].contains(&c));
        if good { Ok(Self(text.to_owned())) } else { Err(UrlError::Name { name: text.to_owned() }) }
    }
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
            "tls" => remote(text, rest).map(Self::Remote),
            "s3" => objects(text, rest).map(Self::Objects),
            // A relative path may contain `://`.
            _ if scheme.contains(['/', '.']) => Ok(Self::Directory(PathBuf::from(text))),
            _ => Err(UrlError::Scheme { scheme: scheme.into() }),
        }
    }
}

fn remote(url: &str, rest: &str) -> Result<Remote, UrlError> {
    let wrong = |what| UrlError::Remote { url: url.to_owned(), what };
    let (authority, name) = rest.split_once('/').ok_or_else(|| wrong("it has no name of a store"))?;
    let (host, port) = authority.rsplit_once(':').ok_or_else(|| wrong("it has no port"))?;
    let host = match host.strip_prefix('[') {
        Some(inner) => inner.strip_suffix(']').ok_or_else(|| wrong("a bracket is not closed"))?,
        None if host.contains(':') => return Err(wrong("an IPv6 address belongs into brackets")),
        None => host,
    };
    if host.is_empty() {
        return Err(wrong("it has no host"));
    }
    if host.contains(['[', ']']) {
        return Err(wrong("a bracket is where none belongs"));
    }
    let port =
        port.parse().ok().filter(|port| *port != 0).ok_or_else(|| wrong("its port is not a number from 1 to 65535"))?;
    Ok(Remote { host: host.to_owned(), port, name: name.parse()? })
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

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, name } = self;
        if host.contains(':') {
            write!(f, "tls://[{host}]:{port}/{}", name.0)
        } else {
            write!(f, "tls://{host}:{port}/{}", name.0)
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Remote(remote) => remote.fmt(f),
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

impl From<ImageName> for String {
    fn from(name: ImageName) -> Self {
        name.0
    }
}

impl TryFrom<String> for ImageName {
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
    fn directories_and_servers() {
        let directory = |path: &str| StoreUrl::Directory(path.into());
        assert_eq!("web".parse(), Ok(directory("web")));
        assert_eq!("/a b/ü".parse(), Ok(directory("/a b/ü")));
        assert_eq!("file:///a/b".parse(), Ok(directory("/a/b")));
        assert_eq!("./odd://name".parse(), Ok(directory("./odd://name")));
        assert_eq!("./host2:x".parse(), Ok(directory("./host2:x")));
        assert_eq!("/srv/a:b".parse(), Ok(directory("/srv/a:b")));
        assert_eq!("srv/a:b".parse(), Ok(directory("srv/a:b")));
        let remote =
            |host: &str| StoreUrl::Remote(Remote { host: host.into(), port: 7000, name: "web".parse().unwrap() });
        for (text, host) in [("tls://backup:7000/web", "backup"), ("tls://[fd00::1]:7000/web", "fd00::1")] {
            let url: StoreUrl = text.parse().unwrap();
            assert_eq!(url, remote(host));
            assert_eq!(url.to_string(), text);
        }
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
            ("host2:/srv/x", "tls://host2:PORT/NAME"),
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
            ("tls://host/web", "no port"),
            ("tls://host:0/web", "port"),
            ("tls://host:70000/web", "port"),
            ("tls://host:7000", "no name"),
            ("tls://:7000/web", "no host"),
            ("tls://fd00::1:7000/web", "brackets"),
            ("tls://[fd00::1:7000/web", "bracket"),
            ("tls://[[]:7000/web", "bracket"),
            ("tls://host]:7000/web", "bracket"),
            ("tls://host:7000/", "cannot be the name"),
            ("tls://host:7000/../etc", "cannot be the name"),
            ("tls://host:7000/a/b", "cannot be the name"),
            ("tls://host:7000/.hidden", "cannot be the name"),
        ] {
            let e = text.parse::<StoreUrl>().unwrap_err().to_string();
            assert!(e.contains(word), "{text}: {e}");
        }
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic_and_a_printed_url_is_parsed_again(text in "\\PC{0,40}|s3://[a-z.]{0,4}/?[a-z./]{0,9}|tls://[a-z:\\[\\]]{0,8}:[0-9]{1,6}/[a-z.]{0,70}") {
            if let Ok(url) = text.parse::<StoreUrl>() {
                prop_assert_eq!(url.to_string().parse::<StoreUrl>(), Ok(url));
            }
        }
    }
}
