//! Errors of rebooting or recovering a guest or its QEMU, and their consequence for the guest.

use crate::domain_error::DomainError;
use crate::unprepared_error::UnpreparedError;
use rekindle_handover::{GuestStatus, HandoverError};
use rekindle_libvirt::daemon::DaemonError;
use rekindle_libvirt::status_file::StatusFileError;
use rekindle_memory::directory::RamError;
use rekindle_protect::moving::MoveError;
use rekindle_protect::restore::RestoreError;
use rekindle_qemu::binary::BinaryError;
use rekindle_qemu::qmp::QmpError;
use rekindle_qemu::transfer::TransferError;
use rekindle_qemu::vmm::VmmError;
use rekindle_vm::error::LifeError;
use rekindle_vm::network::NetworkError;
use serde::Serialize;
use std::io;
use std::path::{Path, PathBuf};

/// A reason not to replace a QEMU: a sentence that names the problem and its remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Problem(pub String);

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// An error of a reboot or a recovery.
#[derive(Debug, thiserror::Error)]
pub enum RebootError {
    /// The preflight found problems. Nothing was stopped.
    #[error("cannot replace the QEMU of {name}; nothing was stopped:\n{}", bulleted(.problems))]
    Preflight { name: String, problems: Vec<Problem> },
    /// A problem prevents a reboot of the guest.
    #[error("{name} was not rebooted: {problem}")]
    Prevented { name: String, problem: Problem },
    /// The guest got the request to start another kernel, but the host does not see that kernel run.
    #[error("{name}: {what}")]
    Kexec {
        name: String,
        /// Text that states the problem and the remedy.
        what: String,
    },
    /// The boot snapshot cannot be loaded.
    #[error("cannot load the boot snapshot")]
    Candidate(#[source] Box<RestoreError>),
    /// An interrupted restore cannot be finished or undone.
    #[error(transparent)]
    Restore(Box<RestoreError>),
    /// An interrupted move to another host cannot be settled.
    #[error(transparent)]
    Move(MoveError),
    /// A rollback was requested, but the VM has run no other QEMU binary.
    #[error("cannot roll back VM {name}: it has run no other QEMU binary")]
    NoRollback { name: String },
    /// The destination QEMU died while it waited to resume the guest of a boot snapshot.
    #[error("the destination QEMU of {name} died before its guest resumed; end of its log:\n{log}")]
    DiedWaiting { name: String, log: String },
    /// The record of a suspended guest cannot be read or written.
    #[error("{name}: {why}")]
    Record { name: String, why: String },
    /// The kernel or QEMU that would resume the guest offers fewer processor features.
    #[error(
        "{name} stays suspended: processor features that it uses are missing ({words}); boot the previous kernel, or \
         discard the guest's memory: rekindle stop {name}"
    )]
    FewerFeatures { name: String, words: String },
    /// A file of an operation cannot be written or read.
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A domain of libvirt.
    #[error(transparent)]
    Domain(Box<DomainError>),
    /// A guest that Rekindle did not start.
    #[error(transparent)]
    Unprepared(Box<UnpreparedError>),
    /// A step of the hand-over failed.
    #[error(transparent)]
    Handover(HandoverError),
}

/// Errors of the layers below reach the user through the hand-over's error, which classifies them.
macro_rules! from_lower_layers {
    ($($error:ty),* $(,)?) => {
        $(impl From<$error> for RebootError {
            fn from(error: $error) -> Self {
                Self::Handover(error.into())
            }
        })*
    };
}

from_lower_layers!(HandoverError, LifeError, BinaryError, VmmError, QmpError, TransferError, NetworkError, RamError,);

impl From<DomainError> for RebootError {
    fn from(error: DomainError) -> Self {
        Self::Domain(Box::new(error))
    }
}

impl From<UnpreparedError> for RebootError {
    fn from(error: UnpreparedError) -> Self {
        Self::Unprepared(Box::new(error))
    }
}

impl From<StatusFileError> for RebootError {
    fn from(error: StatusFileError) -> Self {
        DomainError::from(error).into()
    }
}

impl From<DaemonError> for RebootError {
    fn from(error: DaemonError) -> Self {
        DomainError::from(error).into()
    }
}

impl From<RestoreError> for RebootError {
    fn from(error: RestoreError) -> Self {
        Self::Restore(Box::new(error))
    }
}

impl RebootError {
    /// Returns a function that adds the path of a file to an I/O error.
    pub(crate) fn file(path: &Path) -> impl Fn(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::File { path: path.clone(), source }
    }

    /// Returns whether a recovery that failed for this reason must be repeated.
    #[must_use]
    pub fn needs_recovery(&self) -> bool {
        match self {
            Self::Kexec { .. } => true,
            Self::Domain(e) => e.needs_recovery(),
            Self::Unprepared(e) => e.needs_recovery(),
            Self::Move(e) => e.needs_recovery(),
            Self::Handover(e) => e.needs_recovery(),
            Self::Restore(e) => e.needs_recovery(),
            _ => false,
        }
    }
}

fn bulleted(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("  - {problem}")).collect::<Vec<_>>().join("\n")
}

/// A failed reboot, and the state of the guest after it.
#[derive(Debug, thiserror::Error)]
#[error("{}", match (guest, &**error) {
    // With these errors, no guest ran before the reboot.
    (
        GuestStatus::Unchanged,
        RebootError::Handover(HandoverError::Life(
            LifeError::Unknown { .. } | LifeError::Ended { .. } | LifeError::Prepared { .. },
        )),
    ) => "not rebooted",
    (_, RebootError::Unprepared(error)) if matches!(**error, UnpreparedError::Ended { .. }) => "not replaced",
    (_, RebootError::Domain(error)) if matches!(**error, DomainError::Lost { .. }) => "the guest is lost",
    (_, RebootError::Unprepared(error))
        if matches!(**error, UnpreparedError::Lost { .. } | UnpreparedError::LostInMove { .. }) =>
    {
        "the guest is lost"
    }
    (GuestStatus::Unchanged, _) => "the reboot failed; the guest runs as before",
    (GuestStatus::NeedsRecovery, _) => "the reboot failed; the guest needs `rekindle recover`",
})]
pub struct Failure {
    pub guest: GuestStatus,
    #[source]
    pub error: Box<RebootError>,
}

impl Failure {
    pub(crate) fn new(guest: GuestStatus, error: RebootError) -> Self {
        Self { guest, error: Box::new(error) }
    }

    pub(crate) fn unchanged(error: impl Into<RebootError>) -> Self {
        Self::new(GuestStatus::Unchanged, error.into())
    }

    pub(crate) fn needs_recovery(error: impl Into<RebootError>) -> Self {
        Self::new(GuestStatus::NeedsRecovery, error.into())
    }
}
