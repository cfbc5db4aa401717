//! A guest moves to another host that shares its store. RootHammer (section 6.2) compares this with live and non-live
//! migration.
//!
//! | module | contents |
//! |---|---|
//! | [`source`] | the source host: checkpoints, the final pause, the decision |
//! | [`target`] | the destination host |
//! | `protocol` | the messages between them |
//! | `remote` | the connection between them, by ssh |
//! | `record` | `move.json`: what must be known of a move that is interrupted |
//! | [`settle`] | which host has a guest that was stopped for a move |
//!
//! `docs/move.md` has the sequence, and why no two QEMUs can run the guest.

mod protocol;
mod record;
mod remote;
pub mod settle;
pub mod source;
pub mod target;

pub use remote::{ConnectionError, RemoteHost};

use crate::protector::ProtectError;
use crate::restore::Clock;
use crate::target::TargetError;
use rekindle_store::StoreError;
use rekindle_vm::attach::AttachError;
use rekindle_vm::disks::DisksError;
use rekindle_vm::error::LifeError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a guest was not moved.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    #[error(transparent)]
    Life(#[from] LifeError),
    /// It does not run.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// Its protector does not end.
    #[error(transparent)]
    Protected(#[from] AttachError),
    #[error(transparent)]
    Protect(#[from] ProtectError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A disk that QEMU itself writes.
    #[error(
        "{name}: disk {disk} is written by QEMU itself, which would have it open on two hosts: let Rekindle serve it (server = true), or \
         make it read-only"
    )]
    Disk { name: String, disk: String },
    /// A checkpoint failed.
    #[error("no checkpoint can be taken of {name}")]
    Checkpoint {
        name: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    #[error("{host} cannot take {name}: {why}")]
    Refused { name: String, host: String, why: String },
    /// Stopped by signal.
    #[error("interrupted; {name} continues to run here")]
    Interrupted { name: String },
    /// The destination host has not resumed it. It was stopped here, and is resumed here.
    #[error("{host} has not taken {name}, which was resumed here: {why}")]
    ResumedHere { name: String, host: String, why: String },
    /// It was stopped, and cannot be resumed.
    #[error("{name} is stopped here and could not be resumed: rekindle recover {name}")]
    Stuck {
        name: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It runs on the destination host, and could not be removed here.
    #[error("{name} runs on {host}, but could not be removed here completely: rekindle recover {name}")]
    Left {
        name: String,
        host: String,
        #[source]
        source: Box<MoveError>,
    },
    /// Its store does not answer which host has it.
    #[error(
        "cannot determine whether {host} has taken {name}, since its store does not answer ({why}); it stays stopped here. When the store \
         answers again: rekindle recover {name}"
    )]
    Unknown { name: String, host: String, why: String },
    /// The destination host owns the store, and its guest does not run or its status is not known.
    #[error(
        "{host} has taken {name}, and nothing of it is left here; but its status there is: {status}. On that host: rekindle recover {name}. If it \
         does not run there, or that host is certainly off, its last checkpoint is complete: rekindle restore {name} --store {store}"
    )]
    Taken {
        name: String,
        host: String,
        /// Its status there.
        status: String,
        /// Its store.
        store: String,
    },
}

impl MoveError {
    /// Whether the guest is not in the state that it was in before the move.
    #[must_use]
    pub fn needs_recovery(&self) -> bool {
        matches!(self, Self::Stuck { .. } | Self::Left { .. } | Self::Unknown { .. } | Self::Taken { .. })
    }
}

impl From<DisksError> for MoveError {
    fn from(e: DisksError) -> Self {
        Self::Life(e.into())
    }
}

/// One checkpoint of a move, taken while the guest runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    pub checkpoint: u64,
    /// Bytes of pages that may have changed since the previous one.
    pub dirty_bytes: u64,
    /// Bytes written to the store.
    pub bytes: u64,
    /// How long the guest was stopped for it.
    pub stopped_us: u64,
    /// How long it took.
    pub took_us: u64,
}

/// The steps of the final pause, in µs by the source host's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MovePause {
    /// Until its state was read.
    pub read: u64,
    /// Until its last checkpoint was committed.
    pub commit: u64,
    /// Until its disks were released here, and the destination host could be notified.
    #[serde(rename = "let_go")]
    pub release: u64,
    /// Until it ran on the destination host.
    pub there: u64,
}

/// A guest that was moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveReport {
    pub name: String,
    /// The destination host.
    pub host: String,
    /// The checkpoint that it resumed from.
    pub checkpoint: u64,
    /// The checkpoints taken while it ran.
    pub rounds: Vec<Round>,
    /// Bytes that were left for the pause.
    pub last_bytes: u64,
    /// How long it was stopped: from the source QEMU's `STOP` to the destination QEMU's `RESUME`, and the time of one
    /// message.
    pub stopped_us: u64,
    /// The steps of that time.
    pub pause: MovePause,
    /// From the command to the guest's resume there, in µs.
    pub us: u64,
    /// The destination host's report; none if its answer was lost, and a second connection found the guest running.
    pub there: Option<DestinationReport>,
    /// The pid of the protector that was stopped here, if there was one. It must be started there.
    pub protector: Option<u32>,
}

/// The destination host's report of a guest that it has resumed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DestinationReport {
    /// The destination QEMU.
    pub pid: u32,
    /// From the `go` message to the guest's resume, in µs.
    pub us: u64,
    /// Whether a prepared QEMU was used.
    pub prepared: bool,
    /// Whether it was loaded while its last checkpoint was being committed.
    pub ahead: bool,
    /// Why the prepared QEMU was not used.
    pub unused: Option<String>,
    /// Whether its clock was set.
    pub clock: Clock,
}

/// An event of a move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum MoveEvent {
    /// The destination host can take it.
    Ready {
        /// That host's name for itself.
        host: String,
    },
    /// Its protector was stopped.
    ProtectorEnded { pid: u32 },
    /// A checkpoint was taken while it ran.
    Round(Round),
    /// A destination QEMU waits for it.
    Prepared {
        /// That QEMU.
        pid: u32,
    },
}

impl fmt::Display for MoveEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        match self {
            Self::Ready { host } => write!(f, "{host} can take it"),
            Self::ProtectorEnded { pid } => {
                write!(
                    f,
                    "its protector (process {pid}) was stopped; start one on the destination host when it runs there"
                )
            }
            Self::Round(Round { checkpoint, dirty_bytes, stopped_us, .. }) => {
                let (mib, ms) = (mib(*dirty_bytes), *stopped_us as f64 / 1e3);
                write!(f, "checkpoint {checkpoint}: {mib:.1} MiB, stopped {ms:.1} ms")
            }
            Self::Prepared { pid } => write!(f, "a QEMU waits for it there (process {pid})"),
        }
    }
}
