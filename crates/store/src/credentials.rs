//! What a command needs to reach a store, other than its address.

use crate::environment_file::EnvironmentFile;
use crate::keys::KeySource;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Credentials {
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
