//! Errors of replacing the QEMU of a *domain*: a guest that libvirt manages.

use rekindle_handover::copied_ram::CopyError;
use rekindle_kernel::surroundings::EnvironmentError;
use rekindle_libvirt::daemon::DaemonError;
use rekindle_libvirt::status_file::StatusFileError;
use rekindle_qemu::adopt::AdoptError;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why a domain's QEMU cannot be replaced, or not be given back to libvirt.
#[derive(Debug, thiserror::Error)]
pub enum DomainError {
    #[error("libvirt has not connected to the new QEMU of {name}: {why}; see the log of libvirt's daemon")]
    NotReconnected { name: String, why: String },
    #[error("{name} has changed while its replacement was prepared: {what}; try again")]
    Changed { name: String, what: String },
    #[error("{name}: the host's kernel still serves the network cards of the stopped guest (vhost-net: {cards})")]
    VhostRuns { name: String, cards: String },
    #[error(
        "the QEMU of {name} died while its guest was handed over, so the guest's memory is lost; libvirt shows the \
         domain as shut off: virsh start {name}"
    )]
    Lost { name: String },
    #[error("{name} has shut down, or its QEMU has ended, before it was handed over; see: virsh domstate {name}")]
    Ended { name: String },
    #[error(
        "{name}: the previous QEMU (process {source_pid}) runs the guest again, although the guest was handed over to \
         another QEMU (process {destination_pid}); both were left as they are. Only one of them may continue: end the \
         other with kill -KILL, then: rekindle recover {name}"
    )]
    SourceRuns { name: String, source_pid: u32, destination_pid: u32 },
    #[error("{name}: the thread that replaced its QEMU panicked")]
    Panicked { name: String },
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    StatusFile(#[from] StatusFileError),
    /// Of all domains that are replaced in one absence of the daemon.
    #[error(transparent)]
    Daemon(Arc<DaemonError>),
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Adopt(#[from] AdoptError),
}

impl From<DaemonError> for DomainError {
    fn from(error: DaemonError) -> Self {
        Self::Daemon(Arc::new(error))
    }
}

impl DomainError {
    /// Returns whether `rekindle recover` must finish the operation.
    pub(crate) fn needs_recovery(&self) -> bool {
        match self {
            Self::Daemon(e) => e.leaves_it_stopped(),
            Self::NotReconnected { .. } | Self::SourceRuns { .. } | Self::Panicked { .. } => true,
            _ => false,
        }
    }
}
