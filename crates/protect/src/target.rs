//! A running VM to protect: its run directory, its QEMU, its identity.

use crate::recipe::Recipe;
use rekindle_kernel::process::Process;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::types::Vm;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{JOURNAL_FILE, Journal, Step};
use rekindle_vm::lock::{LockError, RunStateLock};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// How long a reboot of the VM may delay a checkpoint.
const REBOOT_TIMEOUT: Duration = Duration::from_secs(60);

/// Why no checkpoint of a guest can be taken now.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The VM does not exist or does not run.
    #[error(transparent)]
    Life(#[from] LifeError),
    #[error("VM {name} was started by an older Rekindle and has no UUID: rekindle stop {name}, then rekindle run")]
    NoUuid { name: String },
    #[error("{}", path.display())]
    RunDir {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Another process keeps the guest stopped.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// Another QEMU runs the guest now.
    #[error("another QEMU runs {name} now")]
    Moved { name: String },
}

/// A running VM of this host.
#[derive(Debug, Clone)]
pub struct Target {
    rundir: RunDir,
    state: State,
    vmm: Vmm,
    uuid: uuid::Uuid,
}

impl Target {
    /// Finds the running VM `name` of this host.
    ///
    /// # Errors
    /// [`TargetError`]: the VM does not exist, does not run, or has no UUID.
    pub fn of(host: &Host, name: &str) -> Result<Self, TargetError> {
        let rundir = RunDir::new(&host.root, name);
        let state = read_state(&rundir)?.ok_or_else(|| LifeError::Unknown { name: name.into() })?;
        let qemu_ended = || LifeError::Ended {
            name: name.into(),
            log: rekindle_qemu::vmm::log_tail(&rundir.vmm(state.generation), 10),
        };
        state.refuse_prepared().map_err(LifeError::from)?;
        let vmm = state.vmm.clone().filter(Vmm::is_alive).ok_or_else(qemu_ended)?;
        let uuid = state.hardware.uuid.ok_or_else(|| TargetError::NoUuid { name: name.into() })?;
        Ok(Self { rundir, state, vmm, uuid })
    }

    #[must_use]
    pub fn name(&self) -> &str {
        self.rundir.name()
    }

    #[must_use]
    pub fn rundir(&self) -> &RunDir {
        &self.rundir
    }

    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    #[must_use]
    pub fn vmm(&self) -> &Vmm {
        &self.vmm
    }

    #[must_use]
    pub fn process(&self) -> Process {
        self.vmm.process()
    }

    /// Returns the VM's identity in a store.
    #[must_use]
    pub fn identity(&self) -> Vm {
        Vm { uuid: self.uuid, name: self.name().into() }
    }

    #[must_use]
    pub fn recipe(&self) -> Recipe {
        Recipe::new(self.state.definition.clone(), self.state.hardware.clone())
    }

    /// Locks the guest's run state, so that no other process stops or resumes it, and checks that this QEMU still
    /// runs it.
    ///
    /// # Errors
    /// [`TargetError::Moved`]: another QEMU runs the guest. [`TargetError::Life`]: an operation was interrupted.
    pub fn hold_run_state(&self) -> Result<RunStateLock, TargetError> {
        let run_state = RunStateLock::acquire(&self.rundir, REBOOT_TIMEOUT)?;
        let failed = |source| TargetError::RunDir { path: self.rundir.file(JOURNAL_FILE), source };
        if let Some(Journal { operation, .. }) = Journal::read(&self.rundir).map_err(failed)?
            && operation.step >= Step::Suspend
        {
            let (name, kind, step) = (self.name().into(), operation.kind, operation.step);
            return Err(LifeError::NeedsRecovery { name, kind, step }.into());
        }
        match read_state(&self.rundir)?.and_then(|state| state.vmm) {
            Some(vmm) if vmm == self.vmm => Ok(run_state),
            Some(_) => Err(TargetError::Moved { name: self.name().into() }),
            None => Err(LifeError::Unknown { name: self.name().into() }.into()),
        }
    }
}

fn read_state(rundir: &RunDir) -> Result<Option<State>, TargetError> {
    State::read(rundir).map_err(|source| TargetError::RunDir { path: rundir.file("state.json"), source })
}
