//! Bringing a guest to its end: through its agent, else by the power button, else by pulling the plug.

use crate::disks;
use crate::life::{LifeError, processes_of, run_state};
use crate::lock::{Lock, LockError};
use crate::rundir::RunDir;
use crate::state::State;
use rekindle_qemu::agent;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::{self, Vmm, VmmError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long an operation in hand may go on when the plug is pulled under it.
const BUSY: Duration = Duration::from_secs(10);
/// How long until it is looked again whether it has ended.
const LOOK: Duration = Duration::from_millis(50);
/// How long a process may take to end.
const END: Duration = Duration::from_secs(10);
/// How long an agent may take to answer at all.
const ANSWER: Duration = Duration::from_secs(1);

/// How a guest came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// It shut itself down, asked through the guest agent.
    ByAgent,
    /// It shut itself down, asked through the ACPI power button.
    ByAcpi,
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
            Self::PoweredOff => "powered off",
            Self::Before | Self::Prepared => "at its end already",
        }
    }
}

/// QEMU's run states of a guest that has come to its end by itself: there is nothing to be asked.
pub const SHUT_DOWN: &[&str] = &["shutdown", PANICKED];
/// That of one whose kernel has panicked.
pub const PANICKED: &str = "guest-panicked";

/// Shut a guest down: through its agent; by the ACPI power button where no agent answers, or where the guest has not obeyed it in half
/// of `patience`; after `patience` by pulling the plug, as a reset does. `patience` zero: at once.
///
/// On success: its QEMU has ended. [`Ended`] says what was asked last.
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
        let asked = agent::shut_down(&vmm.directory().agent(), ANSWER.min(patience));
        if asked.is_ok() && gone(patience / 2) {
            return Ok(Ended::ByAgent);
        }
        let pressed = vmm.connect(vmm::START).map(|mut qmp| qmp.execute::<Value>("system_powerdown", ()));
        if matches!(pressed, Ok(Ok(_))) && gone(deadline.saturating_duration_since(Instant::now())) {
            return Ok(Ended::ByAcpi);
        }
    }
    // `quit` closes images in order; a QEMU that does not obey is killed.
    if let Ok(mut qmp) = Qmp::connect(&vmm.directory().qmp(), Duration::from_secs(5)) {
        let _ = qmp.execute::<Value>("quit", ());
    }
    if !gone(Duration::from_secs(10)) {
        vmm.kill().map_err(|source| VmmError::Spawn { path: vmm.binary.clone(), source })?;
    }
    Ok(ended)
}

/// Whether its guest has come to its end by itself; else its QEMU is told to end with it, whatever it was told before.
fn is_shut_down(vmm: &Vmm) -> bool {
    let Ok(mut qmp) = vmm.connect(vmm::START) else { return false };
    if run_state(&mut qmp).is_ok_and(|state| SHUT_DOWN.contains(&state.as_str())) {
        return true;
    }
    // One that does not know it was not told otherwise.
    let _ = qmp.execute::<Value>("set-action", json!({"shutdown": "poweroff"}));
    false
}

/// End every QEMU of a VM at once, and the servers of its disks, whoever is at work on it. The run directory stays, and so do the redo
/// logs of its disks: nothing of them is merged. Where there is no VM, nothing is done.
///
/// # Errors
/// [`LifeError`]: what could not be ended, or an operation that goes on regardless.
pub fn pull_the_plug(rundir: &RunDir) -> Result<(), LifeError> {
    let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
    let deadline = Instant::now() + BUSY;
    while let Some(state) = State::read(rundir).map_err(failed)? {
        let held = match Lock::acquire(rundir, "ending it") {
            Err(LockError::Held { .. }) if Instant::now() < deadline => None,
            other => Some(other?),
        };
        // Under an operation in hand too: it may not begin anything new once this has the lock.
        end_qemus(rundir, &state)?;
        // One that somebody else has started has nothing of the run directory among its arguments.
        if let Some(vmm) = state.vmm.as_ref().filter(|vmm| vmm.is_alive()) {
            vmm.kill().map_err(|source| VmmError::Spawn { path: vmm.binary.clone(), source })?;
        }
        if held.is_some() {
            return Ok(disks::end(rundir, &state.hardware)?);
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// End every QEMU of a VM at once.
pub(crate) fn end_qemus(rundir: &RunDir, state: &State) -> Result<(), LifeError> {
    let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
    for generation in 1..=state.generation + 1 {
        for process in processes_of(&rundir.vmm(generation)).map_err(failed)? {
            process.kill().map_err(failed)?;
            process.wait_end(END).map_err(failed)?;
        }
    }
    Ok(())
}
