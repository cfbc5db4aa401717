//! Moves a guest to another host that reaches the same store. RootHammer (section 6.2) compares such moves with live
//! and non-live migration.
//!
//! | module | contents |
//! |---|---|
//! | [`source`] | the source host: checkpoints, the final pause, the decision |
//! | [`target`] | the destination host |
//! | `domain` | what differs if the guest is a domain of libvirt |
//! | `protocol` | the messages between them |
//! | `remote` | the connection between them, by ssh |
//! | `stopped_state` | the state of the stopped guest, as it is sent |
//! | `record` | `move.json`: the data that recovery needs of an interrupted move |
//! | [`settle`] | decides which host has a guest that was stopped for a move |
//!
//! `docs/move.md` has the sequence, and why no two QEMUs can run the guest.

mod domain;
mod protocol;
mod record;
mod remote;
pub mod settle;
pub mod source;
mod stopped_state;
pub mod target;

pub use remote::{ConnectionError, RemoteHost};

use crate::protector::ProtectError;
use crate::restore::ClockOutcome;
use crate::target::TargetError;
use rekindle_life::attach::AttachError;
use rekindle_store::StoreError;
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
    /// The VM does not run.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The VM's protector does not end.
    #[error(transparent)]
    Protected(#[from] AttachError),
    #[error(transparent)]
    Protect(#[from] ProtectError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The destination host must not run a command that this host names.
    #[error("a move cannot use a key command (--key-command): give both hosts a key file, and use --key-file FILE")]
    KeyCommand,
    /// QEMU itself writes one of the disks.
    #[error(
        "{name}: disk {disk} is written by QEMU itself, which would have it open on two hosts: let Rekindle serve it \
         (server = true), or make it read-only"
    )]
    Disk { name: String, disk: String },
    /// Only libvirt can give the guest to its destination host.
    #[error(
        "VM {name} is an attached QEMU without libvirt, and cannot be moved: its host's programs manage it. To continue the \
         guest on another host: end it here, and there: rekindle restore {name} --store URL"
    )]
    BareQemu { name: String },
    #[error(
        "VM {name} was attached by an older Rekindle: rekindle detach {name}, then rekindle attach {name} --libvirt"
    )]
    OldAttachment { name: String },
    #[error("{name} is a domain of libvirt; moves of domains are new, with the limits in docs/move.md: --preview")]
    Preview { name: String },
    #[error("{name} is a domain of libvirt, which defines it on the other host as here: move it without {option}")]
    DomainOption { name: String, option: &'static str },
    #[error("{name} is no domain of libvirt: move it without --connect")]
    NoDomain { name: String },
    #[error("libvirt's description of {name} cannot be read: {why}")]
    Domain { name: String, why: String },
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
    /// The destination host has not resumed the guest. The guest was stopped and resumed on this host.
    #[error("{host} has not taken {name}, which was resumed here: {why}")]
    ResumedHere { name: String, host: String, why: String },
    /// The guest was stopped and cannot be resumed.
    #[error("{name} is stopped here and could not be resumed: rekindle recover {name}")]
    Stuck {
        name: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The guest runs on the destination host, and could not be removed from this host.
    #[error("{name} runs on {host}, but could not be removed here completely: rekindle recover {name}")]
    Left {
        name: String,
        host: String,
        #[source]
        source: Box<MoveError>,
    },
    /// The store does not answer, so it is unknown which host has the guest.
    #[error(
        "cannot determine whether {host} has taken {name}, since its store does not answer ({why}); it stays stopped \
         here. When the store answers again: rekindle recover {name}"
    )]
    Unknown { name: String, host: String, why: String },
    /// The destination host owns the store, but the guest does not run on it or its status is unknown.
    #[error(
        "{host} has taken {name}, and nothing of it is left here; but its status there is: {status}. On that host: \
         rekindle recover {name}. If it does not run there, or that host is certainly off, its last checkpoint is \
         complete: rekindle restore {name} --store {store} (with --into-libvirt --preview if it is a domain of libvirt)"
    )]
    Taken {
        name: String,
        host: String,
        /// The VM's status on the destination host.
        status: String,
        /// The VM's store.
        store: String,
    },
}

impl MoveError {
    /// Returns whether the guest is not in the state that it had before the move.
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

/// A checkpoint of a move, taken while the guest runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    pub checkpoint: u64,
    /// Bytes of pages that may have changed since the previous checkpoint.
    pub dirty_bytes: u64,
    /// Bytes written to the store.
    pub bytes: u64,
    /// How long the guest was stopped, in µs.
    pub stopped_us: u64,
    /// How long the checkpoint took, in µs.
    pub took_us: u64,
}

/// The steps of the final pause, in µs by the source host's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MovePause {
    /// Until the guest's state was read.
    pub read: u64,
    /// Until the guest's last checkpoint was committed.
    pub commit: u64,
    /// Until the source host had released the guest's disks, and could notify the destination host.
    #[serde(rename = "let_go")]
    pub release: u64,
    /// Until the guest ran on the destination host.
    #[serde(rename = "there")]
    pub resume: u64,
}

/// The result of a move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveReport {
    pub name: String,
    /// The destination host.
    pub host: String,
    /// The checkpoint from which the guest resumed.
    pub checkpoint: u64,
    /// The checkpoints that were taken while the guest ran.
    pub rounds: Vec<Round>,
    /// Bytes that were copied during the final pause.
    pub last_bytes: u64,
    /// How long the guest was stopped, in µs: from the source QEMU's `STOP` to the destination QEMU's `RESUME`, plus
    /// the time of one message.
    pub stopped_us: u64,
    /// The steps of `stopped_us`.
    pub pause: MovePause,
    /// Time from the command to the guest's resume on the destination host, in µs.
    #[serde(rename = "us")]
    pub resumed_after_us: u64,
    /// The destination host's report; none if its answer was lost, and a second connection found the guest running.
    #[serde(rename = "there")]
    pub destination: Option<DestinationReport>,
    /// The pid of the protector that was stopped on the source host, if there was one. A protector must be started on
    /// the destination host.
    pub protector: Option<u32>,
}

/// The destination host's report of a guest that it has resumed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DestinationReport {
    /// Pid of the destination QEMU.
    pub pid: u32,
    /// Time from the `go` message to the guest's resume, in µs.
    #[serde(rename = "us")]
    pub resumed_after_us: u64,
    /// A prepared QEMU was used.
    pub prepared: bool,
    /// The guest was loaded while its last checkpoint was being committed.
    #[serde(rename = "ahead")]
    pub loaded_before_commit: bool,
    /// Why the prepared QEMU was not used.
    #[serde(rename = "unused")]
    pub unused_reason: Option<String>,
    /// State of the guest's clock.
    pub clock: ClockOutcome,
}

/// An event of a move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum MoveEvent {
    /// The destination host can take the VM.
    Ready {
        /// The destination host's own host name.
        host: String,
    },
    /// The VM's protector was stopped.
    ProtectorEnded { pid: u32 },
    /// The guest was just restored, and no checkpoint can be taken until its pager has ended.
    Waits { why: String },
    /// A checkpoint was taken while the guest ran.
    Round(Round),
    /// A destination QEMU waits for the guest.
    Prepared {
        /// Pid of the destination QEMU.
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
            Self::Waits { why } => write!(f, "the move waits: {why}"),
            Self::Round(Round { checkpoint, dirty_bytes, stopped_us, .. }) => {
                let (mib, ms) = (mib(*dirty_bytes), *stopped_us as f64 / 1e3);
                write!(f, "checkpoint {checkpoint}: {mib:.1} MiB, stopped {ms:.1} ms")
            }
            Self::Prepared { pid } => write!(f, "a QEMU waits for it there (process {pid})"),
        }
    }
}
