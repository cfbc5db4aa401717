//! What a command needs to reach a store, other than its address.

use crate::environment_file::EnvironmentFile;
use crate::keys::KeySource;
use std::path::PathBuf;

/// PEM files with the local certificate, its key, and the authority that must have signed the peer's certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Local certificate, with intermediate certificates.
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Certificate of the authority that signs the peer's certificate.
    pub ca: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Credentials {
    /// Certificates for a store on a server.
    pub tls: Option<Identity>,
    /// Where the keys for an encrypted store are.
    pub keys: Option<KeySource>,
    /// Variables of an object store, in addition to those of the environment.
    pub environment_file: Option<EnvironmentFile>,
    pub retries: Retries,
}

/// Whether the client of an object store repeats requests that have failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Retries {
    /// For some seconds.
    #[default]
    Usual,
    /// Never: for a caller that repeats its work until a deadline of its own.
    Never,
}

impl Credentials {
    pub(crate) fn tls_of(credentials: Option<&Self>) -> Option<&Identity> {
        credentials.and_then(|credentials| credentials.tls.as_ref())
    }
}

impl From<Identity> for Credentials {
    fn from(identity: Identity) -> Self {
        Self { tls: Some(identity), ..Self::default() }
    }
}
