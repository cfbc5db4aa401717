//! This host's credentials for a store, as records in run directories and messages of a move have them. They name files
//! and commands; no secret is in them.

use rekindle_store::Credentials;
use rekindle_store::keys::KeySource;
use rekindle_store::remote::Identity;
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

/// Credentials as paths. In JSON, credentials without keys are an array of the TLS paths, as in earlier versions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum CredentialPaths {
    Tls(TlsPaths),
    WithKeys { tls: Option<TlsPaths>, keys: KeySource },
}

impl CredentialPaths {
    /// Returns the paths, independent of the working directory: other processes use them, in other directories. `None` for
    /// empty credentials.
    pub(crate) fn of(credentials: &Credentials) -> Option<Self> {
        let tls = credentials.tls.as_ref().map(TlsPaths::of);
        match &credentials.keys {
            Some(keys) => Some(Self::WithKeys { tls, keys: keys.absolute() }),
            None => tls.map(Self::Tls),
        }
    }

    pub(crate) fn credentials(&self) -> Credentials {
        match self {
            Self::Tls(tls) => Credentials { tls: Some(tls.identity()), keys: None },
            Self::WithKeys { tls, keys } => {
                Credentials { tls: tls.as_ref().map(TlsPaths::identity), keys: Some(keys.clone()) }
            }
        }
    }

    /// Returns whether a command prints the keys. A host must not run it if another host names it.
    pub(crate) fn has_key_command(&self) -> bool {
        matches!(self, Self::WithKeys { keys: KeySource::Command(_), .. })
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
        for (tls, keys, expected) in [
            (tls.clone(), None, r#"["/cert","/key","/ca"]"#),
            (None, file, r#"{"tls":null,"keys":{"file":"/keys"}}"#),
            (tls, command, r#"{"tls":["/cert","/key","/ca"],"keys":{"command":"print"}}"#),
        ] {
            let credentials = Credentials { tls, keys };
            let paths = CredentialPaths::of(&credentials).unwrap();
            let json = serde_json::to_string(&paths).unwrap();
            assert_eq!(json, expected);
            assert_eq!(serde_json::from_str::<CredentialPaths>(&json).unwrap().credentials(), credentials);
        }
        assert_eq!(CredentialPaths::of(&Credentials::default()), None);
        let relative = Credentials { tls: None, keys: Some(KeySource::File("keys".into())) };
        let keys = CredentialPaths::of(&relative).unwrap().credentials().keys.unwrap();
        assert_eq!(keys, KeySource::File(std::env::current_dir().unwrap().join("keys")));
    }
}
