//! The messages between the two hosts: one JSON object per line. `docs/move.md` has the sequence.
//!
//! The source host sends messages, and the destination host answers each with one line, except [`Message::State`].
//! [`VERSION`] covers messages and answers.

use super::DestinationReport;
use super::stopped_state::StoppedState;
use crate::credential_paths::CredentialPaths;
use crate::recipe::Recipe;
use rekindle_pages::PageRun;
use rekindle_store::StoreUrl;
use rekindle_vm::definition::Name;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Version of the protocol.
pub(super) const VERSION: u32 = 4;
/// Maximum length of a line in bytes.
pub(super) const MAX_LINE_BYTES: usize = 4 << 20;

/// A message of the source host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Message {
    /// Announces a VM. Answered by [`Answer::Ready`] if the VM could run on the destination host.
    Hello(Box<Hello>),
    /// A checkpoint is in the store: start a destination QEMU. Answered by [`Answer::Prepared`].
    Prepare {},
    /// The guest is about to be stopped: read the data of its newest checkpoint that a load needs. Answered by
    /// [`Answer::NewestRead`].
    #[serde(rename = "look")]
    ReadNewest {},
    /// The guest is stopped, and its last checkpoint is being committed: load the guest, and wait for [`Message::Go`].
    /// Has no answer: the answer to [`Message::Go`] covers both.
    State(StoppedState),
    /// The guest is stopped, and its last checkpoint is committed: resume the guest. Answered by [`Answer::Running`] or
    /// [`Answer::Failed`].
    Go(Go),
    /// Queries a VM's status. Sent instead of [`Message::Hello`], and answered by [`Answer::Found`].
    #[serde(rename = "ask")]
    QueryStatus { version: u32, name: Name },
}

/// The description of a VM that is to be moved.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub version: u32,
    pub name: Name,
    pub recipe: Recipe,
    /// URL of the VM's store.
    pub store: StoreUrl,
    /// When the store was created, in µs since 1970, if it exists: both hosts must reach the same store by its URL.
    #[serde(rename = "created_us")]
    pub store_created_us: Option<u64>,
    /// Files on the destination host with its credentials for the store.
    #[serde(rename = "identity")]
    pub credentials: Option<CredentialPaths>,
    /// A definition file on the destination host that replaces the recipe's.
    pub definition: Option<PathBuf>,
    /// Path of a QEMU on the destination host, to use instead of the definition's.
    pub qemu: Option<PathBuf>,
    /// The guest's network output is held until a checkpoint is committed. The destination host must hold it, too.
    #[serde(default)]
    pub hold_output: bool,
    /// Set for a domain, which libvirt runs on the destination host as well.
    pub domain: Option<MovingDomain>,
}

/// A domain that libvirt runs.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MovingDomain {
    /// Connection URI of libvirt on the destination host; none: libvirt chooses.
    pub connect: Option<String>,
    /// Files of its disks, which both hosts must have.
    pub images: Vec<PathBuf>,
}

/// Content of [`Message::Go`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Go {
    /// The owner epoch that committed the guest's last checkpoint. Only the next owner after it may resume the guest.
    pub epoch: u64,
    /// The number of that checkpoint.
    pub checkpoint: u64,
}

/// An answer of the destination host.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Answer {
    /// The VM could run on the destination host.
    Ready { version: u32, host: String },
    /// The VM cannot run on the destination host, or the message is not acceptable. The destination host keeps nothing
    /// of the VM.
    Refused { why: String },
    /// A destination QEMU waits for the guest, or libvirt can start one.
    Prepared {
        /// The checkpoint from whose recipe the QEMU was started.
        checkpoint: u64,
        /// None for a domain, whose QEMU libvirt starts when the guest is stopped.
        pid: Option<u32>,
    },
    /// The data of the newest checkpoint that a load needs was read.
    #[serde(rename = "looked")]
    NewestRead {
        /// Number of the checkpoint that was read; none if it must be read again when the guest is stopped.
        checkpoint: Option<u64>,
        /// The pages that were read.
        pages: Vec<PageRun>,
    },
    /// The guest was resumed on the destination host.
    Running(Running),
    /// The guest was not resumed.
    Failed {
        why: String,
        /// The guest may have run for a moment. If false, the destination host has not run the guest and never will.
        #[serde(rename = "begun")]
        resumed: bool,
        /// The owner epoch of the destination host, if it has become the owner of the store.
        claimed: Option<u64>,
    },
    /// The status of a VM.
    Found {
        /// The VM's guest runs.
        runs: bool,
        /// The VM's status, as `rekindle status` prints it; `absent` if the VM does not exist.
        status: String,
    },
}

/// Report of a guest that was resumed on the destination host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Running {
    #[serde(flatten)]
    pub report: DestinationReport,
    /// Time from the guest's resume until this answer was sent, in µs.
    #[serde(rename = "since_us")]
    pub answered_after_us: u64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn lines_are_as_documented() {
        let line = |message: &Message| serde_json::to_string(message).unwrap();
        assert_eq!(line(&Message::Prepare {}), r#"{"prepare":{}}"#);
        assert_eq!(line(&Message::Go(Go { epoch: 7, checkpoint: 3 })), r#"{"go":{"epoch":7,"checkpoint":3}}"#);
        let failed = Answer::Failed { why: "no room".into(), resumed: false, claimed: Some(8) };
        assert_eq!(
            serde_json::to_string(&failed).unwrap(),
            r#"{"failed":{"why":"no room","begun":false,"claimed":8}}"#
        );
        let running =
            r#"{"running":{"pid":3,"us":5,"prepared":true,"ahead":false,"unused":null,"clock":"set","since_us":9}}"#;
        assert_eq!(serde_json::to_string(&serde_json::from_str::<Answer>(running).unwrap()).unwrap(), running);
        let query = Message::QueryStatus { version: VERSION, name: "web".parse().unwrap() };
        assert_eq!(line(&query), r#"{"ask":{"version":4,"name":"web"}}"#);
        assert_eq!(line(&Message::ReadNewest {}), r#"{"look":{}}"#);
        assert!(serde_json::from_str::<Message>(r#"{"jump":{}}"#).is_err());
    }
}
