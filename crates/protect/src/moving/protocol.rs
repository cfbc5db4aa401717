//! What the two hosts say to each other: one JSON object a line. `docs/move.md` has the sequence.
//!
//! The host of the guest asks, the other one answers each line with one. What neither knows is refused by its version.

use crate::recipe::Recipe;
use crate::restore::Clock;
use rekindle_store::StoreUrl;
use rekindle_vm::definition::Name;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The version of this.
pub(super) const VERSION: u32 = 1;
/// Bytes of a line at most.
pub(super) const LONGEST: u64 = 4 << 20;

/// What the guest's host says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Say {
    /// A VM that is to come. Answered by [`Answer::Ready`] if it could run there.
    Hello(Box<Hello>),
    /// A checkpoint of it is in the store: have a QEMU wait. Answered by [`Answer::Prepared`].
    Prepare {},
    /// Its guest is stopped, and its last checkpoint in the store. Answered by [`Answer::Running`] or [`Answer::Failed`].
    Go(Go),
    /// Instead of a hello: what is to be seen of a VM. Answered by [`Answer::Found`].
    Ask {
        /// The version.
        version: u32,
        /// The VM.
        name: Name,
    },
}

/// A VM that is to come.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// The version.
    pub version: u32,
    /// The VM.
    pub name: Name,
    /// How to build it.
    pub recipe: Recipe,
    /// Where its checkpoints are.
    pub store: StoreUrl,
    /// When that store was made, if it is there already: both hosts have to mean the same one.
    pub created_us: Option<u64>,
    /// Certificate, key and authority there, for a store on a server.
    pub identity: Option<[PathBuf; 3]>,
    /// A file there that says how the VM is to be built there.
    pub definition: Option<PathBuf>,
    /// The QEMU there to use instead of the definition's.
    pub qemu: Option<PathBuf>,
    /// What it sends is held until a checkpoint counts, and is to be held there.
    #[serde(default)]
    pub hold_output: bool,
}

/// Its guest is stopped.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Go {
    /// The store's owner epoch, in which its last checkpoint was committed. Only who becomes the owner after it may let the guest go on.
    pub epoch: u64,
}

/// What the other host answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Answer {
    /// The VM could run there.
    Ready {
        /// The version.
        version: u32,
        /// That host.
        host: String,
    },
    /// It cannot. Nothing of it is there, and nothing was done.
    Refused {
        /// Why.
        why: String,
    },
    /// A QEMU waits.
    Prepared {
        /// The checkpoint whose machine it has.
        checkpoint: u64,
        /// The QEMU.
        pid: u32,
    },
    /// The guest runs there.
    Running(Running),
    /// It does not.
    Failed {
        /// Why.
        why: String,
        /// The guest may have run for a moment. If it has not, it never will.
        begun: bool,
        /// The owner epoch of that host, if it had become the owner of the store.
        claimed: Option<u64>,
    },
    /// What is to be seen of the VM.
    Found {
        /// Whether its guest runs.
        runs: bool,
        /// Its status, as `rekindle ls` says it; `absent` if there is none.
        status: String,
    },
}

/// The guest runs there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Running {
    /// From the word to the guest's running, in µs.
    pub us: u64,
    /// From then until this was said, in µs.
    pub since_us: u64,
    /// Its QEMU.
    pub pid: u32,
    /// Whether it went into the QEMU that had waited.
    pub prepared: bool,
    /// Why that one was of no use.
    pub unused: Option<String>,
    /// What became of its clock.
    pub clock: Clock,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn lines_are_what_the_document_says() {
        let line = |say: &Say| serde_json::to_string(say).unwrap();
        assert_eq!(line(&Say::Prepare {}), r#"{"prepare":{}}"#);
        assert_eq!(line(&Say::Go(Go { epoch: 7 })), r#"{"go":{"epoch":7}}"#);
        let failed = Answer::Failed { why: "no room".into(), begun: false, claimed: Some(8) };
        assert_eq!(
            serde_json::to_string(&failed).unwrap(),
            r#"{"failed":{"why":"no room","begun":false,"claimed":8}}"#
        );
        assert!(serde_json::from_str::<Say>(r#"{"jump":{}}"#).is_err());
    }
}
