//! Why something could not be done with a VM.

use crate::disks::DisksError;
use crate::journal::{Kind, Step};
use crate::lock::LockError;
use crate::network::NetworkError;
use crate::state::PreparedError;
use rekindle_memory::directory::RamError;
use rekindle_qemu::binary::BinaryError;
use rekindle_qemu::qmp::QmpError;
use rekindle_qemu::vmm::VmmError;
use std::io;

/// Why something could not be done with a VM.
#[derive(Debug, thiserror::Error)]
pub enum LifeError {
    /// There is no such VM.
    #[error("there is no VM {name}; `rekindle ls` lists them")]
    Unknown {
        /// Its name.
        name: String,
    },
    /// It runs already.
    #[error("VM {name} runs already (QEMU process {pid}); stop it first: rekindle stop {name}")]
    Running {
        /// Its name.
        name: String,
        /// The QEMU.
        pid: u32,
    },
    /// A VM of that name was there, and may be wanted again.
    #[error(
        "there is a VM {name} already, whose QEMU has ended; choose another name, or remove that VM: rekindle stop {name}"
    )]
    NameTaken {
        /// Its name.
        name: String,
    },
    /// Its QEMU waits for a checkpoint.
    #[error(transparent)]
    Prepared(#[from] PreparedError),
    /// Its QEMU has ended.
    #[error("VM {name} does not run: its QEMU has ended; its log ends with:\n{log}\nstart it again: rekindle run FILE")]
    Ended {
        /// Its name.
        name: String,
        /// The end of the log.
        log: String,
    },
    /// An operation was interrupted.
    #[error("VM {name}: `rekindle {kind}` was interrupted {step}; finish or undo it first: rekindle recover {name}")]
    NeedsRecovery {
        /// Its name.
        name: String,
        /// What it was.
        kind: Kind,
        /// How far it got.
        step: Step,
    },
    /// Rekindle has not started its QEMU.
    #[error(
        "VM {name} was attached to, and not started by Rekindle ({starter}): use the program that started it for {what}; \
         rekindle detach {name} releases it"
    )]
    Attached {
        /// Its name.
        name: String,
        /// The program that started it.
        starter: String,
        /// What was requested.
        what: &'static str,
    },
    /// It was restored from one that Rekindle had not started.
    #[error(
        "VM {name} has the hardware of one that Rekindle had not started, whose command line it does not know well enough to give \
         the guest to another QEMU; to upgrade its QEMU: rekindle protect {name} --store DIR --create-store --count 1, rekindle \
         stop {name}, rekindle restore {name} --store DIR --qemu PATH"
    )]
    Foreign {
        /// Its name.
        name: String,
    },
    /// The definition asks for what this host or this QEMU does not have.
    #[error("VM {name} cannot run here:\n{}", list(.problems))]
    Unfit {
        /// Its name.
        name: String,
        /// What is missing.
        problems: Vec<String>,
    },
    /// A process of it was killed, and does not end: it may still run, or wait in the kernel.
    #[error(
        "VM {name}: {what} (process {pid}) was killed and does not end: it may hang in the kernel, on a disk or a share that is away"
    )]
    Stuck {
        /// Its name.
        name: String,
        /// Which program.
        what: &'static str,
        /// Which process.
        pid: u32,
    },
    /// Another operation runs.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The QEMU binary is not usable.
    #[error(transparent)]
    Binary(#[from] BinaryError),
    /// The RAM is unavailable.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The network cannot be set up.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// A disk cannot be served.
    #[error(transparent)]
    Disks(#[from] DisksError),
    /// QEMU does not start.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// QEMU rejects a command.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The run directory fails.
    #[error("run directory of VM {name}")]
    RunDir {
        /// Its name.
        name: String,
        /// Why.
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
        let steps = [Step::Prepare, Step::Suspend, Step::Saved, Step::Resume, Step::Settle];
        for (kind, step) in kinds.into_iter().flat_map(|kind| steps.map(|step| (kind, step))) {
            let e = LifeError::NeedsRecovery { name: "web".into(), kind, step }.to_string();
            assert!(e.starts_with("VM web: `rekindle ") && e.ends_with("rekindle recover web"), "{e}");
            assert!(!e.contains(&format!("{kind:?}")) && !e.contains(&format!("{step:?}")), "{e}");
        }
    }
}
