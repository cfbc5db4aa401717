//! A guest goes on on another host, which shares its store. RootHammer (section 6.2) compares with moving by live and non-live migration.
//!
//! | module | what it is for |
//! |---|---|
//! | [`source`] | the host that has the guest: checkpoints, the pause, the decision |
//! | [`target`] | the host that gets it |
//! | `protocol` | what the two say to each other |
//! | `far` | the line between them, by ssh |
//! | `record` | `move.json`: what a move that is cut off leaves to be known |
//! | [`settle`] | back, or away: what comes of a guest that was stopped for a move |
//!
//! `docs/move.md` has the sequence, and why no two QEMUs can run the guest.

mod far;
mod protocol;
mod record;
pub mod settle;
pub mod source;
pub mod target;

pub use far::{Far, LineError};

use crate::protector::ProtectError;
use crate::restore::Clock;
use crate::target::TargetError;
use rekindle_store::StoreError;
use rekindle_vm::attach::AttachError;
use rekindle_vm::disks::DisksError;
use rekindle_vm::life::LifeError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a guest was not moved.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// The VM, here.
    #[error(transparent)]
    Life(#[from] LifeError),
    /// It does not run.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// Who takes checkpoints of it does not end.
    #[error(transparent)]
    Protected(#[from] AttachError),
    /// No checkpoint can be taken of it.
    #[error(transparent)]
    Protect(#[from] ProtectError),
    /// Its store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A disk that QEMU itself writes.
    #[error(
        "{name}: disk {disk} is written by QEMU itself, which would have it open on two hosts: let Rekindle serve it (server = true), or \
         make it read-only"
    )]
    Disk {
        /// The VM.
        name: String,
        /// The disk.
        disk: String,
    },
    /// A checkpoint failed.
    #[error("no checkpoint can be taken of {name}")]
    Checkpoint {
        /// The VM.
        name: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file of the run directory.
    #[error("{}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The other host cannot be asked.
    #[error(transparent)]
    Line(#[from] LineError),
    /// The other host cannot have it.
    #[error("{host} cannot take {name}: {why}")]
    Refused {
        /// The VM.
        name: String,
        /// The host.
        host: String,
        /// Why.
        why: String,
    },
    /// Somebody has interrupted it.
    #[error("interrupted; {name} goes on here")]
    Interrupted {
        /// The VM.
        name: String,
    },
    /// The other host has not let it go on. It was stopped here, and goes on here.
    #[error("{host} has not taken {name}, which goes on here after all: {why}")]
    Back {
        /// The VM.
        name: String,
        /// The host.
        host: String,
        /// Why.
        why: String,
    },
    /// It was stopped, and cannot be let go on.
    #[error("{name} is stopped here and could not be let go on; rekindle recover {name}")]
    Stuck {
        /// The VM.
        name: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It runs there, and something of it is still here.
    #[error("{name} runs on {host}, but what is left of it here could not be removed: rekindle recover {name}")]
    Left {
        /// The VM.
        name: String,
        /// The host.
        host: String,
        /// Why.
        #[source]
        source: Box<MoveError>,
    },
    /// Its store cannot be asked who has it.
    #[error(
        "it cannot be known whether {host} has taken {name}, since its store does not answer ({why}); it stays stopped here. When the store \
         is there again: rekindle recover {name}"
    )]
    Unknown {
        /// The VM.
        name: String,
        /// The host.
        host: String,
        /// Why.
        why: String,
    },
    /// The other host has become the owner of the store, and what it has of the guest is not known, or not good.
    #[error(
        "{host} has taken {name}, and nothing of it is left here; but there it is {status}. Look there: rekindle recover {name}. If it \
         does not run there, or the host is off for certain, its last checkpoint is whole: rekindle restore {name} --store {store}"
    )]
    Taken {
        /// The VM.
        name: String,
        /// The host.
        host: String,
        /// What is to be seen of it there.
        status: String,
        /// Where its checkpoints are.
        store: String,
    },
}

impl MoveError {
    /// Whether the guest is not as it was before.
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

/// One pass of a move over the guest's memory while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    /// The checkpoint.
    pub checkpoint: u64,
    /// Bytes of pages that may have changed since the one before.
    pub dirty_bytes: u64,
    /// Bytes that went to the store.
    pub bytes: u64,
    /// How long the guest was stopped for it.
    pub stopped_us: u64,
    /// How long it took.
    pub took_us: u64,
}

/// What a guest is stopped for, in µs, by this host's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pause {
    /// Until its state was read.
    pub read: u64,
    /// Until its last checkpoint counted.
    pub commit: u64,
    /// Until nobody had its disks here, and the other host could be told.
    pub let_go: u64,
    /// Until it ran there.
    pub there: u64,
}

/// A guest that goes on elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// The VM.
    pub name: String,
    /// Where it runs now.
    pub host: String,
    /// The checkpoint that it went on from.
    pub checkpoint: u64,
    /// What went while it ran.
    pub rounds: Vec<Round>,
    /// Bytes that were left for the pause.
    pub last_bytes: u64,
    /// How long it was stopped: from QEMU's `STOP` here to its `RESUME` there, and the time that one message took.
    pub stopped_us: u64,
    /// Its parts.
    pub pause: Pause,
    /// From the command to the guest's running there, in µs.
    pub us: u64,
    /// What that host tells of it; nothing if its answer was lost, and it was seen to run by asking again.
    pub there: Option<There>,
    /// The protector that was ended for it here, if there was one. It has to be started there.
    pub protector: Option<u32>,
}

/// What the other host tells of a guest that it has let go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct There {
    /// Its QEMU.
    pub pid: u32,
    /// From the word to the guest's running, in µs.
    pub us: u64,
    /// Whether it went into a QEMU that had waited.
    pub prepared: bool,
    /// Whether it was loaded beside the commit of its last checkpoint.
    pub ahead: bool,
    /// Why that one was of no use.
    pub unused: Option<String>,
    /// What became of its clock.
    pub clock: Clock,
}

/// What a move tells while it is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The other host could have it.
    Ready {
        /// That host, as it calls itself.
        host: String,
    },
    /// Who took checkpoints of it was ended.
    ProtectorEnded {
        /// Its process.
        pid: u32,
    },
    /// A pass over its memory.
    Round(Round),
    /// A QEMU waits for it there.
    Prepared {
        /// It.
        pid: u32,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        match self {
            Self::Ready { host } => write!(f, "{host} can take it"),
            Self::ProtectorEnded { pid } => {
                write!(f, "who took checkpoints of it (process {pid}) was ended; protect it there when it runs")
            }
            Self::Round(Round { checkpoint, dirty_bytes, stopped_us, .. }) => {
                let (mib, ms) = (mib(*dirty_bytes), *stopped_us as f64 / 1e3);
                write!(f, "checkpoint {checkpoint}: {mib:.1} MiB, stopped {ms:.1} ms")
            }
            Self::Prepared { pid } => write!(f, "a QEMU waits for it there (process {pid})"),
        }
    }
}
