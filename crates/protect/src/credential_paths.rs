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
        let Identity { cert, key, ca } = identity.clone();
        Self(cert, key, ca)
    }

    /// Makes the paths independent of the working directory.
    fn absolute(self) -> Self {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        Self(absolute(self.0), absolute(self.1), absolute(self.2))
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
    /// Returns `None` for empty credentials.
    pub(crate) fn of(credentials: &Credentials) -> Option<Self> {
        let tls = credentials.tls.as_ref().map(TlsPaths::of);
        match &credentials.keys {
            Some(keys) => Some(Self::WithKeys { tls, keys: keys.clone() }),
            None => tls.map(Self::Tls),
        }
    }

    /// Makes the paths independent of the working directory.
    pub(crate) fn absolute(credentials: &Credentials) -> Option<Self> {
        Some(match Self::of(credentials)? {
            Self::Tls(tls) => Self::Tls(tls.absolute()),
            Self::WithKeys { tls, keys } => Self::WithKeys { tls: tls.map(TlsPaths::absolute), keys: keys.absolute() },
        })
    }

    pub(crate) fn credentials(&self) -> Credentials {
        match self {
            Self::Tls(tls) => Credentials { tls: Some(tls.identity()), keys: None },
            Self::WithKeys { tls, keys } => {
                Credentials { tls: tls.as_ref().map(TlsPaths::identity), keys: Some(keys.clone()) }
            }
        }
    }

    /// Returns the key command, which a host must not run if another host names it.
    pub(crate) fn key_command(&self) -> Option<&str> {
        match self {
            Self::WithKeys { keys: KeySource::Command(command), .. } => Some(command),
            _ => None,
        }
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
    }
}
