//! Why a hand-over failed.

use crate::ram_transfer_error::RamTransferError;
use rekindle_memory::directory::RamError;
use rekindle_qemu::binary::BinaryError;
use rekindle_qemu::qmp::QmpError;
use rekindle_qemu::transfer::TransferError;
use rekindle_qemu::vmm::VmmError;
use rekindle_vm::error::LifeError;
use rekindle_vm::network::NetworkError;
use rekindle_vm::qemu_user::QemuUserError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    #[error(
        "the source QEMU of {name} died before its guest's state was saved, so the guest's memory is lost; to boot \
         the guest from its disks: rekindle recover {name}"
    )]
    Lost { name: String },
    #[error(
        "the new QEMU of {name} died after it had run the guest, so the guest's memory is lost. Continue with: rekindle \
         recover {name}. It boots a VM of Rekindle from its disks; a guest of another program is then started as usual. \
         End of the QEMU's log:\n{log}"
    )]
    DiedRunning { name: String, log: String },
    #[error(
        "{name}: QEMU (process {pid}) runs but has not answered within {} s; it may run the guest, so nothing was \
         changed. If it is stopped, resume it: kill -CONT {pid}; if another program is connected to its QMP sockets, \
         end that one; then: rekindle recover {name}. To kill it, with what its guest has not written to disk: \
         rekindle recover {name} --force",
        waited.as_secs()
    )]
    Silent {
        name: String,
        pid: u32,
        /// How long the QEMU had to answer.
        waited: Duration,
    },
    #[error(
        "{name}: QEMU (process {pid}) does not answer, because it waits for a disk: {problem}; then run the command again"
    )]
    WaitsForServer {
        name: String,
        pid: u32,
        /// Text that names the disk's server, its state, and how it continues.
        problem: String,
    },
    #[error("the destination QEMU of {name} failed to {doing}; end of its log:\n{log}")]
    DestinationFailed {
        name: String,
        /// The step that failed, as a verb phrase.
        doing: &'static str,
        log: String,
        #[source]
        source: Box<HandoverError>,
    },
    #[error(
        "the saved state {} of {name} is damaged ({what}) and was not loaded; no QEMU runs the guest; to discard it: \
         rekindle stop {name}",
        path.display()
    )]
    Damaged { name: String, path: PathBuf, what: String },
    #[error(
        "the guest of {name} runs, but that cannot be recorded in {}; free some space there, then: rekindle recover {name}",
        path.display()
    )]
    NotRecorded {
        name: String,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{name}: the host's kernel still serves network cards of the stopped guest (vhost-net: {cards}), so it was not handed \
         over; try again"
    )]
    VhostRuns { name: String, cards: String },
    #[error(transparent)]
    Life(#[from] LifeError),
    #[error(transparent)]
    Binary(#[from] BinaryError),
    #[error(transparent)]
    Vmm(#[from] VmmError),
    #[error(transparent)]
    QemuUser(#[from] QemuUserError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The destination's memory cannot be registered, for RAM that is moved in place.
    #[error(transparent)]
    Move(Box<RamTransferError>),
}

impl HandoverError {
    /// Adds the end of the destination's log to an error of its connections. Other errors stay unchanged.
    #[must_use]
    pub fn with_log(self, name: &str, doing: &'static str, log: String) -> Self {
        match self {
            Self::Qmp(_) | Self::Transfer(_) if !log.is_empty() => {
                Self::DestinationFailed { name: name.into(), doing, log, source: Box::new(self) }
            }
            other => other,
        }
    }

    /// Returns whether QEMU gave no answer, as opposed to an error or a closed socket.
    #[must_use]
    pub fn is_silence(&self) -> bool {
        match self {
            Self::DestinationFailed { source, .. } => source.is_silence(),
            Self::Qmp(e) => e.is_silence(),
            _ => false,
        }
    }

    /// Returns whether a recovery that failed for this reason must be repeated.
    #[must_use]
    pub fn needs_recovery(&self) -> bool {
        match self {
            Self::Silent { .. } => true,
            Self::NotRecorded { .. } | Self::WaitsForServer { .. } => true,
            Self::Vmm(e) => e.is_silence(),
            Self::Qmp(e) => e.is_silence(),
            Self::Life(e) => e.is_silence(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_that_sends_too_much_has_not_answered() {
        let error = HandoverError::Qmp(QmpError::TooLong { during: "query-status".into() });
        assert!(error.needs_recovery() && error.is_silence());
    }
}
