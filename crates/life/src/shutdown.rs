//! Ending a guest: through its agent, otherwise by the ACPI power button, otherwise by powering it off. On request
//! its file systems are frozen, and it is powered off.

use rekindle_qemu::agent;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::{self, Vmm, VmmError};
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::fault;
use rekindle_vm::lock::{self, LockError, OperationLock};
use rekindle_vm::qemu::{ENDED_RUN_STATES, OFF, end_all_qemus};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Limit for a running operation to end after its QEMU was killed.
const OPERATION_END_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Limit for a killed process to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit for QEMU to end after `quit`, before it is killed.
const QUIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit for a QEMU's greeting before `quit`.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit for the agent to accept the request to shut down. A busy guest takes seconds.
const AGENT_TIMEOUT: Duration = Duration::from_secs(10);

/// How a guest is to be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndMethod {
    /// The guest shuts itself down: services stop cleanly, file systems are unmounted.
    #[default]
    Shutdown,
    /// The agent flushes and freezes the guest's file systems, and the guest is powered off. All that programs have
    /// written to files is on the disks, but the programs are not asked to end.
    Freeze,
}

/// The way in which a guest ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// The guest shut itself down after a request through the agent.
    ByAgent,
    /// The guest shut itself down after a press of the ACPI power button.
    ByAcpi,
    /// The guest's file systems were frozen, as requested, and it was powered off.
    Frozen,
    /// The guest did not shut down, or no time was given, and it was powered off.
    PoweredOff,
    /// The guest had ended before: it rebooted itself, panicked or powered itself off; or its QEMU had ended.
    Before,
    /// There was no guest: a QEMU waited for a checkpoint.
    Prepared,
}

impl Ended {
    /// Returns the description of the way, as a step of an operation.
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

/// Ends a guest in the given way. A guest whose file systems cannot be frozen is shut down.
///
/// On success: the guest's QEMU has ended.
///
/// # Errors
/// As for [`shut_down`].
pub fn end_guest(vmm: &Vmm, method: EndMethod, patience: Duration) -> Result<Ended, LifeError> {
    if method == EndMethod::Freeze && !patience.is_zero() && !has_ended(vmm) && has_frozen(vmm, patience / 2) {
        fault::point("cold.suspend.frozen", Some(vmm), None);
        return power_off(vmm).map(|()| Ended::Frozen);
    }
    shut_down(vmm, patience)
}

/// Makes the agent freeze the guest's file systems; returns whether it has done so.
fn has_frozen(vmm: &Vmm, patience: Duration) -> bool {
    match agent::freeze(&vmm.directory().agent(), patience) {
        Ok(count) => {
            tracing::debug!("{count} file systems are frozen");
            true
        }
        Err(e) => {
            let cause = std::error::Error::source(&e).map(|cause| format!(": {cause}")).unwrap_or_default();
            tracing::warn!("{e}{cause}; it is shut down instead");
            false
        }
    }
}

/// Shuts a guest down: through its agent; by the ACPI power button if no agent answers, or if the guest has not ended
/// in half of `patience`; by powering it off, as a reset does, after `patience`. If `patience` is zero, it is powered
/// off immediately.
///
/// On success: the guest's QEMU has ended. The returned [`Ended`] is the way that worked.
///
/// # Errors
/// When QEMU neither accepts `quit` nor can be killed.
pub fn shut_down(vmm: &Vmm, patience: Duration) -> Result<Ended, LifeError> {
    if patience.is_zero() {
        return power_off(vmm).map(|()| Ended::PoweredOff);
    }
    if has_ended_or_will_end_qemu(vmm) {
        return power_off(vmm).map(|()| Ended::Before);
    }
    let deadline = Instant::now() + patience;
    if request_by_agent(vmm, patience) && has_gone_within(vmm, patience / 2) {
        return Ok(Ended::ByAgent);
    }
    if press_power_button(vmm) && has_gone_within(vmm, deadline.saturating_duration_since(Instant::now())) {
        return Ok(Ended::ByAcpi);
    }
    power_off(vmm).map(|()| Ended::PoweredOff)
}

/// Returns whether an agent in the guest has accepted the request to shut down.
fn request_by_agent(vmm: &Vmm, patience: Duration) -> bool {
    // If no program in the guest has opened the agent's port, there is no answer to wait for.
    let listens = vmm.connect(vmm::START_TIMEOUT).is_ok_and(|mut qmp| agent::is_listening(&mut qmp).unwrap_or(true));
    listens && agent::shut_down(&vmm.directory().agent(), AGENT_TIMEOUT.min(patience / 2)).is_ok()
}

/// Returns whether QEMU has pressed the guest's ACPI power button.
fn press_power_button(vmm: &Vmm) -> bool {
    vmm.connect(vmm::START_TIMEOUT).is_ok_and(|mut qmp| qmp.execute::<Value>("system_powerdown", ()).is_ok())
}

fn has_gone_within(vmm: &Vmm, patience: Duration) -> bool {
    vmm.process().wait_end(patience).unwrap_or(false)
}

/// Powers a guest off. `quit` closes images cleanly; a QEMU that does not end is killed.
fn power_off(vmm: &Vmm) -> Result<(), LifeError> {
    if let Ok(mut qmp) = Qmp::connect(&vmm.directory().qmp(), GREETING_TIMEOUT) {
        let _ = qmp.execute::<Value>("quit", ());
    }
    if !has_gone_within(vmm, QUIT_TIMEOUT) {
        kill(vmm)?;
    }
    Ok(())
}

fn kill(vmm: &Vmm) -> Result<(), LifeError> {
    Ok(vmm.kill().map_err(|source| VmmError::Kill { pid: vmm.pid, source })?)
}

/// Returns whether the guest has ended by itself.
fn has_ended(vmm: &Vmm) -> bool {
    let state = vmm.connect(vmm::START_TIMEOUT).map(|mut qmp| run_state(&mut qmp));
    matches!(state, Ok(Ok(state)) if ENDED_RUN_STATES.contains(&state.as_str()))
}

/// Returns whether the guest has shut itself down while its QEMU still runs.
pub fn has_shut_down(vmm: &Vmm) -> bool {
    vmm.connect(vmm::START_TIMEOUT).is_ok_and(|mut qmp| run_state(&mut qmp).is_ok_and(|state| state == OFF))
}

/// Returns whether the guest has ended by itself. If not, makes QEMU end with the guest, whatever its action was
/// before.
fn has_ended_or_will_end_qemu(vmm: &Vmm) -> bool {
    let Ok(mut qmp) = vmm.connect(vmm::START_TIMEOUT) else { return false };
    if run_state(&mut qmp).is_ok_and(|state| ENDED_RUN_STATES.contains(&state.as_str())) {
        return true;
    }
    // A QEMU without this command ends with its guest by default.
    let _ = qmp.execute::<Value>("set-action", json!({"shutdown": "poweroff"}));
    false
}

/// Ends every QEMU of a VM and the servers of its disks immediately, even during another operation. The run directory
/// stays, and so do the redo logs of the disks: nothing of them is merged. If there is no VM, nothing is done.
///
/// # Errors
/// [`LifeError`], for a process or an operation that does not end.
pub fn pull_the_plug(rundir: &RunDir) -> Result<(), LifeError> {
    let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
    let deadline = Instant::now() + OPERATION_END_TIMEOUT;
    while let Some(state) = State::read(rundir).map_err(failed)? {
        let acquired = OperationLock::acquire(rundir, "ending it");
        let is_held = matches!(acquired, Err(LockError::Held { .. }));
        // If the running operation is our own, this call is its end.
        let must_wait = is_held && !lock::is_ours(rundir);
        let is_late = Instant::now() >= deadline;
        let _lock = match acquired {
            Err(_) if is_held && !(must_wait && is_late) => None,
            acquired => Some(acquired?),
        };
        // Also during another operation: it must not start anything new after we have the lock.
        end_all_qemus(rundir, &state)?;
        // The QEMU of an attached VM does not hold the lock of a directory in the run directory.
        if let Some(vmm) = state.vmm.as_ref().filter(|vmm| vmm.is_alive()) {
            kill(vmm)?;
        }
        if !must_wait {
            return Ok(disks::end(rundir, &state.hardware)?);
        }
        std::thread::sleep(LOCK_RETRY_INTERVAL);
    }
    Ok(())
}

/// Kills the process that runs an operation on a VM, unless it is this process: it may be stopped, or wait without
/// end. The operation is then interrupted, as by any kill.
///
/// # Errors
/// [`LifeError::Stuck`] when the process does not end.
pub fn end_operation(rundir: &RunDir) -> Result<(), LifeError> {
    let Some(process) = lock::other_holder(rundir) else { return Ok(()) };
    let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
    tracing::warn!("{}: process {}, which is at work on it, is killed", rundir.name(), process.pid);
    process.kill().map_err(failed)?;
    if process.wait_end(KILL_TIMEOUT).map_err(failed)? {
        Ok(())
    } else {
        Err(LifeError::Stuck { name: rundir.name().into(), program: "rekindle", pid: process.pid })
    }
}
