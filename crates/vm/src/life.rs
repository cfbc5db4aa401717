//! The life of a VM outside a reboot: status, locking for an operation, stop.

use crate::cleanup::clean_up;
use crate::disks;
use crate::error::LifeError;
use crate::helpers;
use crate::host::Host;
use crate::journal::{Journal, Kind, Operation, Step};
use crate::lock::{self, Lock, LockError, RunState};
use crate::phases;
use crate::rundir::RunDir;
use crate::shutdown::{Ended, has_shut_down, shut_down};
use crate::state::{PreparedError, State};
use rekindle_qemu::guest::run_state;
use rekindle_qemu::vmm::{self, Vmm};
use serde::{Deserialize, Serialize};
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// How long an operation waits while a phase is saved: all of the guest's used memory is written.
const SAVED: Duration = Duration::from_secs(120);
/// How long to wait for the lock holder to name its operation.
const NAMED: Duration = Duration::from_secs(1);
/// Interval between two attempts to take the lock.
const RETRY: Duration = Duration::from_millis(5);

/// The state of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The guest runs.
    Running,
    /// QEMU runs but the guest does not; QEMU's name of the run state.
    Stopped(String),
    /// QEMU waits with empty RAM for a checkpoint.
    Prepared,
    /// QEMU runs, but a helper is missing. The text names it and whether it is being restarted.
    Degraded(String),
    /// QEMU does not answer on its second QMP socket.
    Silent,
    /// A protector uses the QEMU's only monitor, so its run state is not known. The guest runs except for the pauses
    /// of checkpoints, unless its owner has stopped it.
    Protected,
    /// QEMU has ended.
    Ended,
    /// An operation runs, and at this moment no QEMU is recorded as running the guest. The text names the operation.
    Busy(String),
    /// The VM was suspended for a reboot of the host, and waits to be resumed.
    Suspended,
    /// An operation was interrupted.
    NeedsRecovery,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Running => f.pad("running"),
            Self::Stopped(why) => f.pad(&format!("stopped ({why})")),
            Self::Prepared => f.pad("prepared"),
            Self::Degraded(why) => f.pad(&format!("degraded ({why})")),
            Self::Silent => f.pad("silent"),
            Self::Protected => f.pad("protected"),
            Self::Ended => f.pad("ended"),
            Self::Busy(operation) => f.pad(&format!("busy ({operation})")),
            Self::Suspended => f.pad("suspended"),
            Self::NeedsRecovery => f.pad("needs recovery"),
        }
    }
}

/// Returns the status of a VM, without disturbing an operation on it.
///
/// # Errors
/// When the run directory cannot be read.
pub fn status(rundir: &RunDir) -> io::Result<Status> {
    loop {
        // Read the journal first: an operation that ends in between removes its journal before it releases the lock.
        let left_behind = Journal::left_behind(rundir)?.is_some();
        if left_behind
            && lock::holder(rundir).is_none()
            && let Some(journal) = Journal::left_behind(rundir)?
        {
            let alive = journal.operation.from.as_ref().is_some_and(Vmm::is_alive);
            let suspended = matches!(journal.operation.kind, Kind::HostWarm | Kind::HostSaved);
            let suspended = suspended && journal.operation.step == Step::Saved && !alive;
            return Ok(if suspended { Status::Suspended } else { Status::NeedsRecovery });
        }
        let state = State::read(rundir)?;
        if state.as_ref().and_then(|state| state.prepared.as_ref()).is_some_and(|prepared| prepared.vmm.is_alive()) {
            return Ok(lock::holder(rundir).map_or(Status::Prepared, Status::Busy));
        }
        let recorded = state.and_then(|state| state.vmm);
        let status = observe(rundir, recorded.as_ref());
        // A QEMU that has ended may be the previous one, if an operation ended in the meantime.
        let gone = matches!(status, Status::Ended | Status::Silent);
        if !gone || State::read(rundir)?.and_then(|state| state.vmm) == recorded {
            return with_helpers(rundir, status);
        }
    }
}

/// Adds missing helpers to a status. A QEMU that does not answer may wait for data from a missing helper.
fn with_helpers(rundir: &RunDir, status: Status) -> io::Result<Status> {
    Ok(match status {
        Status::Running => helpers::degraded(rundir)?.map_or(Status::Running, Status::Degraded),
        Status::Silent => match helpers::degraded(rundir)? {
            Some(why) => Status::Degraded(format!("{why}; QEMU does not answer")),
            None => Status::Silent,
        },
        other => other,
    })
}

fn observe(rundir: &RunDir, recorded: Option<&Vmm>) -> Status {
    let Some(vmm) = recorded.filter(|vmm| vmm.is_alive()) else {
        // There is no recorded QEMU between the end of the old one and the record of the new one.
        return lock::holder(rundir).map_or(Status::Ended, Status::Busy);
    };
    if vmm.monitor.is_some() && lock::protector(rundir).is_some() {
        return Status::Protected;
    }
    let answer = vmm.connect_watcher(Duration::from_secs(2)).and_then(|mut qmp| run_state(&mut qmp));
    match answer {
        Ok(state) if state == "running" => Status::Running,
        Ok(state) => Status::Stopped(state),
        Err(_) => Status::Silent,
    }
}

/// A VM that is locked for an operation.
#[derive(Debug)]
pub struct Held {
    /// Run directory of the VM.
    pub rundir: RunDir,
    /// Content of the state file when the lock was taken.
    pub state: State,
    _lock: Lock,
}

impl Held {
    /// Locks VM `name` for `operation` and reads its state.
    ///
    /// # Errors
    /// [`LifeError::Unknown`]; [`LifeError::Lock`] when the VM is busy; [`LifeError::NeedsRecovery`].
    pub fn take(host: &Host, name: &str, operation: &str) -> Result<Self, LifeError> {
        let (held, left_behind) = Self::take_anyhow(host, name, operation)?;
        match left_behind {
            Some(Journal { operation: Operation { kind, step, .. }, .. }) => {
                Err(LifeError::NeedsRecovery { name: name.into(), kind, step })
            }
            None => Ok(held),
        }
    }

    /// As [`Held::take`], but waits while a phase of the guest's boot is being saved: no user has requested that at
    /// this moment.
    ///
    /// # Errors
    /// As for [`Held::take`]; [`LockError::Late`] when that takes too long.
    pub fn take_once_saved(host: &Host, name: &str, operation: &str) -> Result<Self, LifeError> {
        Self::take_patiently(host, name, operation, SAVED)
    }

    fn take_patiently(host: &Host, name: &str, operation: &str, saved: Duration) -> Result<Self, LifeError> {
        let started = Instant::now();
        loop {
            let (name, holder, theirs) = match Self::take(host, name, operation) {
                Err(LifeError::Lock(LockError::Held { name, holder, operation })) => (name, holder, operation),
                other => return other,
            };
            let patience = match theirs.as_deref() {
                Some(phases::SAVING) => saved,
                // The lock holder has not named its operation yet.
                None => NAMED,
                Some(_) => return Err(LockError::Held { name, holder, operation: theirs }.into()),
            };
            if started.elapsed() > patience {
                return Err(LockError::Late { name, holder, patience }.into());
            }
            thread::sleep(RETRY);
        }
    }

    /// As [`Held::take`], but returns the journal of an interrupted operation instead of an error. If a QEMU of the
    /// VM was ending, it has ended completely when this returns.
    ///
    /// # Errors
    /// [`LifeError::Unknown`]; [`LifeError::Lock`] when the VM is busy.
    pub fn take_anyhow(host: &Host, name: &str, operation: &str) -> Result<(Self, Option<Journal>), LifeError> {
        let rundir = RunDir::new(&host.root, name);
        let unknown = || LifeError::Unknown { name: name.into() };
        let failed = |source| LifeError::RunDir { name: name.into(), source };
        if !rundir.exists() {
            return Err(unknown());
        }
        let lock = Lock::acquire(&rundir, operation)?;
        let state = State::read(&rundir).map_err(failed)?.ok_or_else(unknown)?;
        let journal = Journal::left_behind(&rundir).map_err(failed)?;
        let (from, to) = journal.as_ref().map_or((&None, &None), |left| (&left.operation.from, &left.operation.to));
        let waits = state.prepared.as_ref().map(|prepared| &prepared.vmm);
        for vmm in [state.vmm.as_ref(), waits, from.as_ref(), to.as_ref()].into_iter().flatten() {
            vmm.wait_released().map_err(failed)?;
        }
        Ok((Self { rundir, state, _lock: lock }, journal))
    }

    /// Rejects the action `what` for a VM that Rekindle did not start.
    ///
    /// # Errors
    /// [`LifeError::Attached`].
    pub fn refuse_attached(&self, what: &'static str) -> Result<(), LifeError> {
        match &self.state.attached {
            None => Ok(()),
            Some(attached) => {
                Err(LifeError::Attached { name: self.rundir.name().into(), starter: attached.starter.clone(), what })
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
        let ended = || LifeError::Ended { name: self.rundir.name().into(), log: vmm::log_tail(&directory, 10) };
        self.state.vmm.as_ref().filter(|vmm| vmm.is_alive()).ok_or_else(ended)
    }
}

/// Shuts a VM down and removes everything that Rekindle keeps of it. If `patience` is zero, the VM is powered off
/// immediately.
///
/// *Needs:* no other operation on the VM. *On success:* only the VM's disks are left. *On failure:* the error names
/// what could not be removed; the same command can be repeated.
///
/// # Errors
/// [`LifeError`]; also [`LifeError::Attached`] for a running VM that Rekindle did not start.
pub fn stop(host: &Host, name: &str, patience: Option<Duration>) -> Result<Ended, LifeError> {
    stop_with(host, name, patience, |_, _| true)
}

/// As [`stop`]. `may_merge` is called after a clean shutdown of the guest. If it returns false, or the shutdown was
/// not clean, the redo logs of the VM's disks stay as they are.
///
/// # Errors
/// As for [`stop`].
pub fn stop_with(
    host: &Host,
    name: &str,
    patience: Option<Duration>,
    may_merge: impl FnOnce(&RunDir, &State) -> bool,
) -> Result<Ended, LifeError> {
    let held = take_to_stop(host, name)?;
    let journal = Journal::open(&held.rundir, Kind::Stop, held.state.vmm.clone(), held.state.generation)
        .map_err(|source| LifeError::RunDir { name: name.into(), source })?;
    let _run_state = RunState::acquire(&held.rundir, Duration::from_secs(30))?;
    let patience = patience.unwrap_or_else(|| held.state.definition.shutdown_timeout.as_duration());
    let mut is_clean = false;
    let ended = match held.state.vmm.as_ref().filter(|vmm| vmm.is_alive()) {
        Some(vmm) => {
            is_clean = !patience.is_zero() && has_shut_down(vmm);
            shut_down(vmm, patience)?
        }
        None if held.vmm().is_err_and(|e| matches!(e, LifeError::Prepared { .. })) => Ended::Prepared,
        None => Ended::Before,
    };
    drop(journal);
    // After a clean shutdown the newest version of the disks counts. Otherwise that of the last checkpoint may be
    // wanted.
    is_clean |= matches!(ended, Ended::ByAgent | Ended::ByAcpi);
    if is_clean && may_merge(&held.rundir, &held.state) {
        disks::end_epochs(&held.rundir, &held.state.hardware);
    }
    clean_up(host, &held.rundir, &held.state)?;
    Ok(ended)
}

/// The object that [`stop`] would stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stoppable {
    /// A guest; the process number is its QEMU's.
    Guest(u32),
    /// A QEMU that waits for a checkpoint, by its process number.
    Prepared(u32),
    /// Files of a VM whose QEMU has ended.
    Files,
}

/// Returns what [`stop`] would stop. Nothing is changed.
///
/// # Errors
/// As [`stop`], before it has stopped anything.
pub fn stoppable(host: &Host, name: &str) -> Result<Stoppable, LifeError> {
    let held = take_to_stop(host, name)?;
    Ok(match held.vmm() {
        Ok(vmm) => Stoppable::Guest(vmm.pid),
        Err(LifeError::Prepared(PreparedError { pid, .. })) => Stoppable::Prepared(pid),
        Err(_) => Stoppable::Files,
    })
}

fn take_to_stop(host: &Host, name: &str) -> Result<Held, LifeError> {
    // An interrupted operation no longer matters: all of its QEMUs are ended.
    let (held, _left_behind) = Held::take_anyhow(host, name, "stop")?;
    if held.vmm().is_ok() {
        held.refuse_attached("shutting it down")?;
    }
    Ok(held)
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
        let lock = Lock::acquire(&rundir, "stop").unwrap();
        let e = Held::take_once_saved(&host, "web", "reboot os").unwrap_err().to_string();
        assert!(e.contains("`stop`") && !e.contains("not done within"), "{e}");
        drop(lock);
        let lock = Lock::acquire(&rundir, phases::SAVING).unwrap();
        let e = Held::take_patiently(&host, "web", "reboot os", Duration::from_millis(20)).unwrap_err().to_string();
        assert!(e.contains("saving a phase") && e.contains("was not done within 0 s"), "{e}");
        thread::scope(|scope| {
            let next = scope.spawn(|| Held::take_once_saved(&host, "web", "reboot os").map(drop));
            drop(lock);
            // The lock is free, so the next error is that there is no VM.
            assert!(matches!(next.join().unwrap(), Err(LifeError::Unknown { .. })));
        });
    }
}
