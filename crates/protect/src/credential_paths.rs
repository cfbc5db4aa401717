//! This host's credentials for a store, as records in run directories and messages of a move have them. They name files
//! and commands; no secret is in them.

use rekindle_store::keys::KeySource;
use rekindle_store::remote::Identity;
use rekindle_store::{Credentials, EnvironmentFile};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The paths of certificate, key and authority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TlsPaths(PathBuf, PathBuf, PathBuf);

impl TlsPaths {
    fn of(identity: &Identity) -> Self {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let Identity { cert, key, ca } = identity;
        Self(absolute(cert), absolute(key), absolute(ca))
    }

    fn identity(&self) -> Identity {
        let Self(cert, key, ca) = self.clone();
        Identity { cert, key, ca }
    }
}

/// Credentials as paths. In JSON, those with TLS paths only are an array of these, as in earlier versions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum CredentialPaths {
    Tls(TlsPaths),
    // Before `WithKeys`, which would be read from its fields, too.
    WithFile { tls: Option<TlsPaths>, keys: Option<KeySource>, environment_file: PathBuf },
    WithKeys { tls: Option<TlsPaths>, keys: KeySource },
}

impl CredentialPaths {
    /// Returns the paths, independent of the working directory: other processes use them, in other directories. `None` for
    /// empty credentials.
    pub(crate) fn of(credentials: &Credentials) -> Option<Self> {
        let tls = credentials.tls.as_ref().map(TlsPaths::of);
        let keys = credentials.keys.as_ref().map(KeySource::absolute);
        match (&credentials.environment_file, keys) {
            (Some(file), keys) => Some(Self::WithFile { tls, keys, environment_file: file.path().to_owned() }),
            (None, Some(keys)) => Some(Self::WithKeys { tls, keys }),
            (None, None) => tls.map(Self::Tls),
        }
    }

    pub(crate) fn credentials(&self) -> Credentials {
        let (tls, keys, file) = match self {
            Self::Tls(tls) => (Some(tls), None, None),
            Self::WithKeys { tls, keys } => (tls.as_ref(), Some(keys), None),
            Self::WithFile { tls, keys, environment_file } => (tls.as_ref(), keys.as_ref(), Some(environment_file)),
        };
        Credentials {
            tls: tls.map(TlsPaths::identity),
            keys: keys.cloned(),
            environment_file: file.map(|path| EnvironmentFile::new(path)),
            ..Credentials::default()
        }
    }

    /// Returns whether a command prints the keys. A host must not run it if another host names it.
    pub(crate) fn has_key_command(&self) -> bool {
        matches!(self.credentials().keys, Some(KeySource::Command(_)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_read_back_from_json() {
        let tls = Some(Identity { cert: "/cert".into(), key: "/key".into(), ca: "/ca".into() });
        let file = Some(KeySource::File("/keys".into()));
        let command = Some(KeySource::Command("print".into()));
        let environment = Some(EnvironmentFile::new("/s3.env".as_ref()));
        for (tls, keys, environment_file, expected) in [
            (tls.clone(), None, None, r#"["/cert","/key","/ca"]"#),
            (None, file.clone(), None, r#"{"tls":null,"keys":{"file":"/keys"}}"#),
            (tls, command, None, r#"{"tls":["/cert","/key","/ca"],"keys":{"command":"print"}}"#),
            (None, None, environment.clone(), r#"{"tls":null,"keys":null,"environment_file":"/s3.env"}"#),
            (None, file, environment, r#"{"tls":null,"keys":{"file":"/keys"},"environment_file":"/s3.env"}"#),
        ] {
            let credentials = Credentials { tls, keys, environment_file, ..Credentials::default() };
            let paths = CredentialPaths::of(&credentials).unwrap();
            let json = serde_json::to_string(&paths).unwrap();
            assert_eq!(json, expected);
            assert_eq!(serde_json::from_str::<CredentialPaths>(&json).unwrap().credentials(), credentials);
        }
        assert_eq!(CredentialPaths::of(&Credentials::default()), None);
        let relative = Credentials { keys: Some(KeySource::File("keys".into())), ..Credentials::default() };
        let keys = CredentialPaths::of(&relative).unwrap().credentials().keys.unwrap();
        assert_eq!(keys, KeySource::File(std::env::current_dir().unwrap().join("keys")));
    }
}
