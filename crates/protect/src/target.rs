//! The guest to be protected: where it is, who it is.

use crate::recipe::Recipe;
use rekindle_kernel::process::Process;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::types::Vm;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Step};
use rekindle_vm::life::LifeError;
use rekindle_vm::lock::{LockError, RunState};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::{State, format_of};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// How long a reboot may be in the way of a checkpoint.
const REBOOT: Duration = Duration::from_secs(60);

/// Why a guest cannot be had for a checkpoint now.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// There is no such VM, or it does not run.
    #[error(transparent)]
    Life(#[from] LifeError),
    /// The VM's identity is not known.
    #[error("VM {name} was started by an older Rekindle and has no UUID: rekindle stop {name}, then rekindle run")]
    NoUuid {
        /// Its name.
        name: String,
    },
    /// Its run directory cannot be read.
    #[error("{}", path.display())]
    RunDir {
        /// What.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Somebody else keeps it stopped.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// Another QEMU runs it now.
    #[error("another QEMU runs {name} now")]
    Moved {
        /// Its name.
        name: String,
    },
}

/// A VM of Rekindle's.
#[derive(Debug, Clone)]
pub struct Target {
    rundir: RunDir,
    state: State,
    vmm: Vmm,
    uuid: uuid::Uuid,
}

impl Target {
    /// VM `name` of this host, which runs.
    ///
    /// # Errors
    /// [`TargetError`].
    pub fn of(host: &Host, name: &str) -> Result<Self, TargetError> {
        let rundir = RunDir::new(&host.root, name);
        let unknown = || LifeError::Unknown { name: name.into() };
        let state = read(&rundir)?.ok_or_else(unknown)?;
        let ended = || LifeError::Ended {
            name: name.into(),
            log: rekindle_qemu::vmm::log_tail(&rundir.vmm(state.generation), 10),
        };
        state.refuse_prepared()?;
        let vmm = state.vmm.clone().filter(Vmm::is_alive).ok_or_else(ended)?;
        let uuid = state.hardware.uuid.ok_or_else(|| TargetError::NoUuid { name: name.into() })?;
        Ok(Self { rundir, state, vmm, uuid })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.rundir.name()
    }

    /// Its run directory.
    #[must_use]
    pub fn rundir(&self) -> &RunDir {
        &self.rundir
    }

    /// What its run directory says.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The QEMU that runs it.
    #[must_use]
    pub fn vmm(&self) -> &Vmm {
        &self.vmm
    }

    /// Its QEMU's process.
    #[must_use]
    pub fn process(&self) -> Process {
        self.vmm.process()
    }

    /// Who it is to a store.
    #[must_use]
    pub fn identity(&self) -> Vm {
        Vm { uuid: self.uuid, name: self.name().into() }
    }

    /// How to build it again.
    #[must_use]
    pub fn recipe(&self) -> Recipe {
        let (definition, hardware) = (self.state.definition.clone(), self.state.hardware.clone());
        Recipe { format: format_of(&hardware), definition, hardware }
    }

    /// From here on nobody else stops the guest or lets it go on, and this QEMU is the one that runs it.
    ///
    /// # Errors
    /// [`TargetError::Moved`] when another one does; [`TargetError::Life`] when an operation was cut off.
    pub fn hold_run_state(&self) -> Result<RunState, TargetError> {
        let held = RunState::acquire(&self.rundir, REBOOT)?;
        let failed = |source| TargetError::RunDir { path: self.rundir.file("operation.json"), source };
        if let Some(Journal { operation, .. }) = Journal::left_behind(&self.rundir).map_err(failed)?
            && operation.step >= Step::Suspend
        {
            let (name, kind, step) = (self.name().into(), operation.kind, operation.step);
            return Err(LifeError::NeedsRecovery { name, kind, step }.into());
        }
        match read(&self.rundir)?.and_then(|state| state.vmm) {
            Some(vmm) if vmm == self.vmm => Ok(held),
            Some(_) => Err(TargetError::Moved { name: self.name().into() }),
            None => Err(LifeError::Unknown { name: self.name().into() }.into()),
        }
    }
}

fn read(rundir: &RunDir) -> Result<Option<State>, TargetError> {
    State::read(rundir).map_err(|source| TargetError::RunDir { path: rundir.file("state.json"), source })
}
