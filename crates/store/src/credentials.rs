//! What a command needs to reach a store, other than its address.

use crate::keys::KeySource;
use crate::remote::Identity;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Credentials {
    /// Certificates for a store on a server.
    pub tls: Option<Identity>,
    /// Where the keys for an encrypted store are.
    pub keys: Option<KeySource>,
}

impl Credentials {
    pub(crate) fn tls_of(credentials: Option<&Self>) -> Option<&Identity> {
        credentials.and_then(|credentials| credentials.tls.as_ref())
    }
}

impl From<Identity> for Credentials {
    fn from(identity: Identity) -> Self {
        Self { tls: Some(identity), keys: None }
    }
}
