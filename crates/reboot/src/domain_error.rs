//! Errors of replacing the QEMU of a *domain*: a guest that libvirt manages.

use rekindle_libvirt::daemon::DaemonError;
use rekindle_libvirt::status_file::StatusFileError;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Why a domain's QEMU cannot be replaced, or not be given back to libvirt.
#[derive(Debug, thiserror::Error)]
pub enum DomainError {
    #[error("libvirt has not connected to the new QEMU of {name}: {why}; see the log of libvirt's daemon")]
    NotReconnected { name: String, why: String },
    #[error(
        "the QEMU of {name} died while its guest was handed over, so the guest's memory is lost; libvirt shows the \
         domain as shut off: virsh start {name}"
    )]
    Lost { name: String },
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
            Self::NotReconnected { .. } | Self::Panicked { .. } => true,
            _ => false,
        }
    }
}
