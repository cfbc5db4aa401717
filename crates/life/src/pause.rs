//! `rekindle pause` and `rekindle resume`: a pause by the owner of a VM.
//!
//! It is QEMU's run state `paused` without the file that marks the pause of a checkpoint. Checkpoints and hand-overs leave
//! such a guest paused.

use rekindle_qemu::guest::{self, run_state};
use rekindle_qemu::qmp::Qmp;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::locked_vm::LockedVm;
use std::time::Duration;

/// How long to wait for the end of a checkpoint.
const CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(30);
/// Limit for QEMU to accept the connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a guest could not be paused or resumed.
#[derive(Debug, thiserror::Error)]
pub enum PauseError {
    /// The VM cannot be used.
    #[error(transparent)]
    Life(#[from] LifeError),
    /// A checkpoint was interrupted while the guest was stopped.
    #[error("VM {name}: an interrupted checkpoint has left its guest stopped; resume it: rekindle recover {name}")]
    InterruptedCheckpoint {
        /// Name of the VM.
        name: String,
    },
    /// The guest is in neither of the two run states.
    #[error(
        "VM {name}: its guest neither runs nor is paused, QEMU reports `{state}`; the cause may be in its log: rekindle show {name}"
    )]
    OtherState {
        /// Name of the VM.
        name: String,
        /// QEMU's run state.
        state: String,
    },
}

/// Whether the guest's state was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It was changed.
    Made,
    /// It was as requested before.
    NotNeeded,
}

/// Pauses the guest of a VM.
///
/// *Needs:* no other operation on the VM. *On success:* the guest is paused. *On failure:* it continues to run.
///
/// # Errors
/// [`PauseError`]; also [`LifeError::Attached`] for a VM that Rekindle did not start.
pub fn pause(host: &Host, name: &str) -> Result<Change, PauseError> {
    change(host, name, "pause", |qmp, state| match state {
        "running" => guest::stop(qmp).map(|_| Some(Change::Made)).map_err(LifeError::from),
        "paused" => Ok(Some(Change::NotNeeded)),
        _ => Ok(None),
    })
}

/// Resumes the guest of a VM after [`pause`].
///
/// *Needs:* no other operation on the VM. *On success:* the guest runs. *On failure:* it is unchanged.
///
/// # Errors
/// As for [`pause`].
pub fn resume(host: &Host, name: &str) -> Result<Change, PauseError> {
    change(host, name, "resume", |qmp, state| match state {
        "paused" => guest::resume(qmp).map(|_| Some(Change::Made)).map_err(LifeError::from),
        "running" => Ok(Some(Change::NotNeeded)),
        _ => Ok(None),
    })
}

/// Locks the VM and calls `act` with QEMU's run state. `None` from `act`: the guest is in another state.
fn change(
    host: &Host,
    name: &str,
    action: &'static str,
    act: impl FnOnce(&mut Qmp, &str) -> Result<Option<Change>, LifeError>,
) -> Result<Change, PauseError> {
    let vm = LockedVm::lock_after_phase_save(host, name, action)?;
    vm.refuse_attached(if action == "pause" { "pausing it" } else { "resuming it" })?;
    let vmm = vm.vmm()?;
    let _run_state = RunStateLock::acquire(&vm.rundir, CHECKPOINT_TIMEOUT).map_err(LifeError::from)?;
    let mut qmp = vmm.connect(CONNECT_TIMEOUT).map_err(LifeError::from)?;
    let state = run_state(&mut qmp).map_err(LifeError::from)?;
    // This process holds the lock of the run state, so no checkpoint keeps the guest stopped at this moment.
    if state == "paused" && vm.rundir.paused().exists() {
        return Err(PauseError::InterruptedCheckpoint { name: name.into() });
    }
    act(&mut qmp, &state)?.ok_or_else(|| PauseError::OtherState { name: name.into(), state })
}
