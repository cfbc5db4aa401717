//! Shutting a guest down: through its agent, else by the power button, else by powering it off; or, on request, by
//! freezing its file systems before powering it off.

use crate::disks;
use crate::error::LifeError;
use crate::fault;
use crate::lock::{self, Lock, LockError};
use crate::qemu::{OFF, SHUT_DOWN, end_all};
use crate::rundir::RunDir;
use crate::state::State;
use rekindle_qemu::agent;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::{self, Vmm, VmmError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long an operation in hand may continue after its QEMU was killed.
const BUSY: Duration = Duration::from_secs(10);
/// Time between two attempts to take the lock.
const RETRY: Duration = Duration::from_millis(50);
/// How long a process may take to end.
const END: Duration = Duration::from_secs(10);
/// How long an agent may take to answer at all.
const ANSWER: Duration = Duration::from_secs(1);

/// How to end a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// It shuts itself down: its services stop cleanly, its file systems are unmounted.
    #[default]
    Shutdown,
    /// Its agent writes its file systems out and freezes them, and it is powered off: whatever programs have written
    /// to files is there, but they are not asked to end.
    Freeze,
}

/// How a guest ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// It shut itself down, asked through the guest agent.
    ByAgent,
    /// It shut itself down, asked through the ACPI power button.
    ByAcpi,
    /// Its agent had frozen its file systems, as was wanted, and it was powered off.
    Frozen,
    /// It did not, and was powered off.
    PoweredOff,
    /// It had ended before: it rebooted itself, panicked or powered itself off.
    Before,
    /// None ran: a QEMU waited for a checkpoint.
    Prepared,
}

impl Ended {
    /// What was done, as a step of an operation.
    #[must_use]
    pub fn step(self) -> &'static str {
        match self {
            Self::ByAgent => "shut down by the agent",
            Self::ByAcpi => "shut down by ACPI",
            Self::Frozen => "frozen by the agent and powered off",
            Self::PoweredOff => "powered off",
            Self::Before | Self::Prepared => "at its end already",
        }
    }
}

/// Ends a guest in the given way. One whose file systems cannot be frozen is shut down.
///
/// On success: its QEMU has ended.
///
/// # Errors
/// As for [`shut_down`].
pub fn end(vmm: &Vmm, how: End, patience: Duration) -> Result<Ended, LifeError> {
    if how == End::Freeze && !patience.is_zero() && !has_ended(vmm) {
        match agent::freeze(&vmm.directory().agent(), patience / 2) {
            Ok(count) => {
                tracing::debug!("{count} file systems are frozen");
                fault::point("cold.suspend.frozen", Some(vmm), None);
                return power_off(vmm).map(|()| Ended::Frozen);
            }
            Err(e) => {
                let why = std::error::Error::source(&e).map(|why| format!(": {why}")).unwrap_or_default();
                tracing::warn!("{e}{why}; it is shut down instead");
            }
        }
    }
    shut_down(vmm, patience)
}

/// Shuts a guest down: through its agent; by the ACPI power button where no agent answers, or where the guest has not
/// obeyed it in half of `patience`; after `patience` by powering it off, as a reset does. `patience` zero:
/// immediately.
///
/// On success: its QEMU has ended. [`Ended`] is the method that worked.
///
/// # Errors
/// When QEMU can neither be talked to nor killed.
pub fn shut_down(vmm: &Vmm, patience: Duration) -> Result<Ended, LifeError> {
    let process = vmm.process();
    let gone = |patience| process.wait_end(patience).unwrap_or(false);
    let mut ended = Ended::PoweredOff;
    if patience.is_zero() {
        // Nothing is asked, not even QEMU.
    } else if is_shut_down(vmm) {
        ended = Ended::Before;
    } else {
        let deadline = Instant::now() + patience;
        // If no program has the agent's port open, there is no answer to wait for.
        let listens = vmm.connect(vmm::START).is_ok_and(|mut qmp| agent::listens(&mut qmp).unwrap_or(true));
        let asked = listens && agent::shut_down(&vmm.directory().agent(), ANSWER.min(patience)).is_ok();
        if asked && gone(patience / 2) {
            return Ok(Ended::ByAgent);
        }
        let pressed = vmm.connect(vmm::START).map(|mut qmp| qmp.execute::<Value>("system_powerdown", ()));
        if matches!(pressed, Ok(Ok(_))) && gone(deadline.saturating_duration_since(Instant::now())) {
            return Ok(Ended::ByAcpi);
        }
    }
    power_off(vmm).map(|()| ended)
}

/// Powers it off. `quit` closes images cleanly; a QEMU that does not obey is killed.
fn power_off(vmm: &Vmm) -> Result<(), LifeError> {
    if let Ok(mut qmp) = Qmp::connect(&vmm.directory().qmp(), Duration::from_secs(5)) {
        let _ = qmp.execute::<Value>("quit", ());
    }
    if !vmm.process().wait_end(Duration::from_secs(10)).unwrap_or(false) {
        vmm.kill().map_err(|source| VmmError::Spawn { path: vmm.binary.clone(), source })?;
    }
    Ok(())
}

/// Whether its guest has ended by itself.
fn has_ended(vmm: &Vmm) -> bool {
    let state = vmm.connect(vmm::START).map(|mut qmp| run_state(&mut qmp));
    matches!(state, Ok(Ok(state)) if SHUT_DOWN.contains(&state.as_str()))
}

/// Whether its guest has shut itself down, and its QEMU has stayed.
pub(crate) fn has_shut_down(vmm: &Vmm) -> bool {
    vmm.connect(vmm::START).is_ok_and(|mut qmp| run_state(&mut qmp).is_ok_and(|state| state == OFF))
}

/// Whether its guest has ended by itself; if not, sets its QEMU to end with the guest, whatever was set before.
fn is_shut_down(vmm: &Vmm) -> bool {
    let Ok(mut qmp) = vmm.connect(vmm::START) else { return false };
    if run_state(&mut qmp).is_ok_and(|state| SHUT_DOWN.contains(&state.as_str())) {
        return true;
    }
    // A QEMU without this command ends with its guest anyway.
    let _ = qmp.execute::<Value>("set-action", json!({"shutdown": "poweroff"}));
    false
}

/// Ends every QEMU of a VM immediately, and the servers of its disks, even during another operation. The run
/// directory stays, and so do the redo logs of its disks: nothing of them is merged. If there is no VM, nothing is
/// done.
///
/// # Errors
/// [`LifeError`]: what could not be ended, or an operation that does not end.
pub fn pull_the_plug(rundir: &RunDir) -> Result<(), LifeError> {
    let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
    let deadline = Instant::now() + BUSY;
    while let Some(state) = State::read(rundir).map_err(failed)? {
        let (lock, alone) = match Lock::acquire(rundir, "ending it") {
            // The operation in hand is our own, and ends by this.
            Err(LockError::Held { .. }) if lock::is_ours(rundir) => (None, true),
            Err(LockError::Held { .. }) if Instant::now() < deadline => (None, false),
            other => (Some(other?), true),
        };
        // Under an operation in hand too: it may not begin anything new once this has the lock.
        end_all(rundir, &state)?;
        // One that Rekindle did not start has nothing of the run directory among its arguments.
        if let Some(vmm) = state.vmm.as_ref().filter(|vmm| vmm.is_alive()) {
            vmm.kill().map_err(|source| VmmError::Spawn { path: vmm.binary.clone(), source })?;
        }
        if alone {
            disks::end(rundir, &state.hardware)?;
            drop(lock);
            return Ok(());
        }
        std::thread::sleep(RETRY);
    }
    Ok(())
}

/// Ends the process that works on a VM, if that is another one: it may be stopped, or wait for ever. Its operation is
/// interrupted, as by any kill.
///
/// # Errors
/// [`LifeError`]: it does not end.
pub fn end_operation(rundir: &RunDir) -> Result<(), LifeError> {
    let Some(process) = lock::other(rundir) else { return Ok(()) };
    let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
    tracing::warn!("{}: process {}, which is at work on it, is killed", rundir.name(), process.pid);
    process.kill().map_err(failed)?;
    if process.wait_end(END).map_err(failed)? {
        Ok(())
    } else {
        Err(LifeError::Stuck { name: rundir.name().into(), what: "rekindle", pid: process.pid })
    }
}
