//! This host's credentials for a store, as records in run directories and messages of a move have them. They name files
//! and commands; no secret is in them.

use rekindle_store::keys::KeySource;
use rekindle_store::{Credentials, EnvironmentFile};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Credentials as paths.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CredentialPaths {
    keys: Option<KeySource>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    environment_file: Option<PathBuf>,
}

impl CredentialPaths {
    /// Returns the paths, independent of the working directory: other processes use them, in other directories. `None` for
    /// empty credentials.
    pub(crate) fn of(credentials: &Credentials) -> Option<Self> {
        let keys = credentials.keys.as_ref().map(KeySource::absolute);
        let environment_file = credentials.environment_file.as_ref().map(|file| file.path().to_owned());
        (keys.is_some() || environment_file.is_some()).then_some(Self { keys, environment_file })
    }

    pub(crate) fn credentials(&self) -> Credentials {
        Credentials {
            keys: self.keys.clone(),
            environment_file: self.environment_file.as_deref().map(EnvironmentFile::new),
            ..Credentials::default()
        }
    }

    /// Returns whether a command prints the keys. A host must not run it if another host names it.
    pub(crate) fn has_key_command(&self) -> bool {
        matches!(self.keys, Some(KeySource::Command(_)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_read_back_from_json() {
        let file = Some(KeySource::File("/keys".into()));
        let command = Some(KeySource::Command("print".into()));
        let environment = Some(EnvironmentFile::new("/s3.env".as_ref()));
        for (keys, environment_file, expected) in [
            (file.clone(), None, r#"{"keys":{"file":"/keys"}}"#),
            (command, None, r#"{"keys":{"command":"print"}}"#),
            (None, environment.clone(), r#"{"keys":null,"environment_file":"/s3.env"}"#),
            (file, environment, r#"{"keys":{"file":"/keys"},"environment_file":"/s3.env"}"#),
        ] {
            let credentials = Credentials { keys, environment_file, ..Credentials::default() };
            let paths = CredentialPaths::of(&credentials).unwrap();
            let json = serde_json::to_string(&paths).unwrap();
            assert_eq!(json, expected);
            // Records of earlier versions have one field more.
            for text in [json.clone(), json.replacen('{', r#"{"tls":null,"#, 1)] {
                assert_eq!(
                    serde_json::from_str::<CredentialPaths>(&text).unwrap().credentials(),
                    credentials,
                    "{text}"
                );
            }
        }
        assert_eq!(CredentialPaths::of(&Credentials::default()), None);
        let relative = Credentials { keys: Some(KeySource::File("keys".into())), ..Credentials::default() };
        let keys = CredentialPaths::of(&relative).unwrap().credentials().keys.unwrap();
        assert_eq!(keys, KeySource::File(std::env::current_dir().unwrap().join("keys")));
    }
}
