//! Errors of operations on a VM.

use crate::disks::DisksError;
use crate::journal::{Kind, Step};
use crate::lock::LockError;
use crate::network::NetworkError;
use crate::qemu_user::QemuUserError;
use crate::state::PreparedError;
use rekindle_memory::directory::RamError;
use rekindle_qemu::binary::BinaryError;
use rekindle_qemu::qmp::QmpError;
use rekindle_qemu::vmm::VmmError;
use std::io;

/// Why an operation on a VM failed.
#[derive(Debug, thiserror::Error)]
pub enum LifeError {
    /// There is no VM of this name.
    #[error("there is no VM {name}; `rekindle status` lists them")]
    Unknown {
        /// Name of the VM.
        name: String,
    },
    /// The VM runs already.
    #[error("VM {name} runs already (QEMU process {pid}); stop it first: rekindle stop {name}")]
    Running {
        /// Name of the VM.
        name: String,
        /// QEMU's process number.
        pid: u32,
    },
    /// A VM of this name exists already, and the user may want to run it again.
    #[error(
        "there is a VM {name} already, whose QEMU has ended; choose another name, or remove that VM: rekindle stop {name}"
    )]
    NameTaken {
        /// Name of the VM.
        name: String,
    },
    /// The VM's QEMU waits for a checkpoint.
    #[error(transparent)]
    Prepared(#[from] PreparedError),
    /// The VM's QEMU has ended.
    #[error("VM {name} does not run: its QEMU has ended; its log ends with:\n{log}\nstart it again: rekindle run FILE")]
    Ended {
        /// Name of the VM.
        name: String,
        /// The end of QEMU's log.
        log: String,
    },
    /// An operation was interrupted.
    #[error("VM {name}: `rekindle {kind}` was interrupted {step}; finish or undo it first: rekindle recover {name}")]
    NeedsRecovery {
        /// Name of the VM.
        name: String,
        /// The interrupted operation.
        kind: Kind,
        /// The last step in the journal.
        step: Step,
    },
    /// Rekindle did not start the VM's QEMU.
    #[error(
        "VM {name} was attached to, and not started by Rekindle ({starter}): use the program that started it for {action}; \
         rekindle detach {name} releases it"
    )]
    Attached {
        /// Name of the VM.
        name: String,
        /// Description of the program that started QEMU.
        starter: String,
        /// The rejected action.
        action: &'static str,
    },
    /// The VM was restored from a VM that Rekindle had not started.
    #[error(
        "VM {name} has the hardware of one that Rekindle had not started, whose command line it does not know well enough to give \
         the guest to another QEMU; to upgrade its QEMU: rekindle protect {name} --store DIR --create-store --count 1, rekindle \
         stop {name}, rekindle restore {name} --store DIR --qemu PATH"
    )]
    Foreign {
        /// Name of the VM.
        name: String,
    },
    /// The definition requires something that this host or this QEMU does not have.
    #[error("VM {name} cannot run here:\n{}", list(.problems))]
    Unfit {
        /// Name of the VM.
        name: String,
        /// The missing features or the problems.
        problems: Vec<String>,
    },
    /// A process of the VM was killed but does not end: it may still run, or wait in the kernel.
    #[error(
        "VM {name}: {program} (process {pid}) was killed and does not end: it may hang in the kernel, on a disk or a share that is away"
    )]
    Stuck {
        /// Name of the VM.
        name: String,
        /// Name of the program.
        program: &'static str,
        /// Process number.
        pid: u32,
    },
    /// libvirt has not answered the request to start the VM's domain.
    #[error(
        "{name}: libvirt has not answered the request to start domain {domain}, and may still start it: this fails until \
         libvirt's daemon answers"
    )]
    MayStart {
        /// Name of the VM.
        name: String,
        /// libvirt's name of the domain.
        domain: String,
    },
    /// Another operation runs on the VM.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The QEMU binary cannot be used.
    #[error(transparent)]
    Binary(#[from] BinaryError),
    /// The RAM directory cannot be used, or there is not enough memory.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The network cannot be set up.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// A disk cannot be served.
    #[error(transparent)]
    Disks(#[from] DisksError),
    /// The user of the VM's QEMU is unknown.
    #[error(transparent)]
    QemuUser(#[from] QemuUserError),
    /// QEMU does not start or does not answer.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// QEMU rejects a command or does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// A file of the run directory cannot be used.
    #[error("run directory of VM {name}")]
    RunDir {
        /// Name of the VM.
        name: String,
        /// The error of reading or writing it.
        #[source]
        source: io::Error,
    },
}

impl LifeError {
    /// Returns whether a process of the VM gave no answer, as opposed to an error or its end.
    #[must_use]
    pub fn is_silence(&self) -> bool {
        match self {
            Self::Vmm(e) => e.is_silence(),
            Self::Qmp(e) => e.is_silence(),
            Self::Disks(e) => matches!(e, DisksError::Silent { .. }),
            _ => false,
        }
    }
}

fn list(problems: &[String]) -> String {
    problems.iter().map(|problem| format!("  - {problem}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_operation_is_called_as_its_command() {
        let kinds = [Kind::Run, Kind::Prepare, Kind::Restore, Kind::Move, Kind::Stop, Kind::VmmWarm, Kind::OsWarmCache];
        let steps = [Step::Prepare, Step::Suspend, Step::Saved, Step::Resume, Step::GiveBack, Step::Settle];
        for (kind, step) in kinds.into_iter().flat_map(|kind| steps.map(|step| (kind, step))) {
            let e = LifeError::NeedsRecovery { name: "web".into(), kind, step }.to_string();
            assert!(e.starts_with("VM web: `rekindle ") && e.ends_with("rekindle recover web"), "{e}");
            assert!(!e.contains(&format!("{kind:?}")) && !e.contains(&format!("{step:?}")), "{e}");
        }
    }
}
