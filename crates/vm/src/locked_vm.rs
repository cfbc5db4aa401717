//! A VM that is locked for an operation.

use crate::error::LifeError;
use crate::host::Host;
use crate::journal::{Journal, Operation};
use crate::lock::{LockError, OperationLock};
use crate::phases;
use crate::rundir::RunDir;
use crate::state::State;
use rekindle_qemu::vmm::{self, Vmm};
use std::thread;
use std::time::{Duration, Instant};

/// How long an operation waits while a phase is saved: all of the guest's used memory is written.
const PHASE_SAVE_TIMEOUT: Duration = Duration::from_secs(120);
/// How long to wait for the lock holder to name its operation.
const NAMING_TIMEOUT: Duration = Duration::from_secs(1);
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Lines of QEMU's log in an error.
const LOG_TAIL_LINES: usize = 10;

/// A VM that is locked for an operation.
#[derive(Debug)]
pub struct LockedVm {
    /// Run directory of the VM.
    pub rundir: RunDir,
    /// Content of the state file when the lock was taken.
    pub state: State,
    _lock: OperationLock,
}

impl LockedVm {
    /// Locks VM `name` for `operation` and reads its state.
    ///
    /// # Errors
    /// [`LifeError::Unknown`]; [`LifeError::Lock`] when the VM is busy; [`LifeError::NeedsRecovery`].
    pub fn lock(host: &Host, name: &str, operation: &str) -> Result<Self, LifeError> {
        let (vm, interrupted) = Self::lock_even_if_interrupted(host, name, operation)?;
        match interrupted {
            Some(Journal { operation: Operation { kind, step, .. }, .. }) => {
                Err(LifeError::NeedsRecovery { name: name.into(), kind, step })
            }
            None => Ok(vm),
        }
    }

    /// As [`LockedVm::lock`], but waits while a phase of the guest's boot is being saved: no user has requested that
    /// at this moment.
    ///
    /// # Errors
    /// As for [`LockedVm::lock`]; [`LockError::Late`] when that takes too long.
    pub fn lock_after_phase_save(host: &Host, name: &str, operation: &str) -> Result<Self, LifeError> {
        Self::lock_within(host, name, operation, PHASE_SAVE_TIMEOUT)
    }

    fn lock_within(host: &Host, name: &str, operation: &str, save_timeout: Duration) -> Result<Self, LifeError> {
        let started = Instant::now();
        loop {
            let (name, holder, their_operation) = match Self::lock(host, name, operation) {
                Err(LifeError::Lock(LockError::Held { name, holder, operation })) => (name, holder, operation),
                locked_or_failed => return locked_or_failed,
            };
            let patience = match their_operation.as_deref() {
                Some(phases::SAVING) => save_timeout,
                // The lock holder has not named its operation yet.
                None => NAMING_TIMEOUT,
                Some(_) => return Err(LockError::Held { name, holder, operation: their_operation }.into()),
            };
            if started.elapsed() > patience {
                return Err(LockError::Late { name, holder, patience }.into());
            }
            thread::sleep(LOCK_RETRY_INTERVAL);
        }
    }

    /// As [`LockedVm::lock`], but returns the journal of an interrupted operation instead of an error. If a QEMU of
    /// the VM was ending, it has ended completely when this returns.
    ///
    /// # Errors
    /// [`LifeError::Unknown`]; [`LifeError::Lock`] when the VM is busy.
    pub fn lock_even_if_interrupted(
        host: &Host,
        name: &str,
        operation: &str,
    ) -> Result<(Self, Option<Journal>), LifeError> {
        let rundir = RunDir::new(&host.root, name);
        let unknown = || LifeError::Unknown { name: name.into() };
        let failed = |source| LifeError::RunDir { name: name.into(), source };
        if !rundir.exists() {
            return Err(unknown());
        }
        let lock = OperationLock::acquire(&rundir, operation)?;
        let state = State::read(&rundir).map_err(failed)?.ok_or_else(unknown)?;
        let interrupted = Journal::read(&rundir).map_err(failed)?;
        let mut qemus: Vec<&Vmm> = state.qemus().collect();
        if let Some(Journal { operation, .. }) = &interrupted {
            qemus.extend(operation.from.iter().chain(&operation.to));
        }
        for vmm in qemus {
            vmm.wait_released().map_err(failed)?;
        }
        Ok((Self { rundir, state, _lock: lock }, interrupted))
    }

    /// Rejects `action` for a VM that Rekindle did not start.
    ///
    /// # Errors
    /// [`LifeError::Attached`].
    pub fn refuse_attached(&self, action: &'static str) -> Result<(), LifeError> {
        match &self.state.attached {
            None => Ok(()),
            Some(attached) => {
                Err(LifeError::Attached { name: self.rundir.name().into(), starter: attached.starter.clone(), action })
            }
        }
    }

    /// Returns the QEMU that runs the guest, if it is alive.
    ///
    /// # Errors
    /// [`LifeError::Ended`] with the end of QEMU's log; [`LifeError::Prepared`].
    pub fn vmm(&self) -> Result<&Vmm, LifeError> {
        self.state.refuse_prepared()?;
        let directory = self.rundir.vmm(self.state.generation);
        let ended =
            || LifeError::Ended { name: self.rundir.name().into(), log: vmm::log_tail(&directory, LOG_TAIL_LINES) };
        self.state.vmm.as_ref().filter(|vmm| vmm.is_alive()).ok_or_else(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_that_is_being_saved_is_waited_for_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let lock = OperationLock::acquire(&rundir, "stop").unwrap();
        let e = LockedVm::lock_after_phase_save(&host, "web", "reboot").unwrap_err().to_string();
        assert!(e.contains("`stop`") && !e.contains("not done within"), "{e}");
        drop(lock);
        let lock = OperationLock::acquire(&rundir, phases::SAVING).unwrap();
        let e = LockedVm::lock_within(&host, "web", "reboot", Duration::from_millis(20)).unwrap_err().to_string();
        assert!(e.contains("saving a phase") && e.contains("was not done within 0 s"), "{e}");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| LockedVm::lock_after_phase_save(&host, "web", "reboot").map(drop));
            drop(lock);
            // The lock is free, so the next error is that there is no VM.
            assert!(matches!(waiting.join().unwrap(), Err(LifeError::Unknown { .. })));
        });
    }
}
