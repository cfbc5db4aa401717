//! Recovery of a VM without an interrupted operation: an interrupted checkpoint may have left the guest stopped, and
//! disk servers or QEMU may have ended.

use crate::error::RebootError;
use crate::interrupted::{Recovered, SilentQemuPolicy, continue_interrupted, end_pause, wait_for_answer};
use crate::vmm::recover::{boot_after_loss, boot_after_shutdown};
use rekindle_life::shutdown::shut_down;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::cleanup::clean_up;
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::names::saved_path;
use rekindle_vm::qemu::ENDED_RUN_STATES;
use std::fs;
use std::time::Duration;

pub(super) fn recover_idle(host: &Host, held: &LockedVm, policy: SilentQemuPolicy) -> Result<Recovered, RebootError> {
    if let Ok(vmm) = held.vmm()
        && held.state.hardware.disks.iter().any(|disk| disk.server)
    {
        if guest_has_ended(vmm, policy.wait) {
            return boot_ended(held, vmm);
        }
        // QEMU may have been about to end when it was queried.
        vmm.wait_released().map_err(|source| RebootError::File { path: held.rundir.path().to_owned(), source })?;
    }
    match held.vmm() {
        Ok(vmm) => {
            forget_saved(host, held);
            // Start the disk servers first: the guest waits for its disks, and QEMU may not answer until they serve.
            let served = disks::start(&held.rundir, &held.state.hardware).map_err(LifeError::from)?;
            // The protector may use the only monitor of an adopted QEMU.
            if held.state.attached.is_none() && !wait_for_answer(held.rundir.name(), vmm, policy)? {
                return boot_lost(held);
            }
            match end_pause(held, vmm)? {
                Recovered::Nothing if served > 0 => Ok(Recovered::Served),
                recovered => Ok(recovered),
            }
        }
        // Rekindle does not know how an adopted QEMU was started.
        Err(_) if held.state.attached.is_some() => {
            held.refuse_attached("starting it again, as its QEMU has ended")?;
            Ok(Recovered::Nothing)
        }
        Err(LifeError::Prepared { .. }) => Ok(Recovered::Nothing),
        // A start was interrupted before it opened its journal, or a QEMU that waited for a restore has ended.
        Err(_) if held.state.vmm.is_none() => {
            clean_up(host, &held.rundir, &held.state)?;
            Ok(Recovered::Removed)
        }
        Err(_) => boot_lost(held),
    }
}

/// Boots a guest whose memory was lost with its QEMU.
fn boot_lost(held: &LockedVm) -> Result<Recovered, RebootError> {
    boot_after_loss(continue_interrupted(held, open_journal(held, Kind::VmmCold)?), None)
}

/// Returns whether QEMU has stopped, as configured, because its guest rebooted itself, powered off or panicked. If so,
/// the `rekindle watch` that would have handled this has died.
fn guest_has_ended(vmm: &Vmm, wait: Duration) -> bool {
    let state = vmm.connect(wait).map_err(RebootError::from).and_then(|mut qmp| Ok(run_state(&mut qmp)?));
    state.is_ok_and(|state| ENDED_RUN_STATES.contains(&state.as_str()))
}

fn boot_ended(held: &LockedVm, vmm: &Vmm) -> Result<Recovered, RebootError> {
    let mut handover = continue_interrupted(held, open_journal(held, Kind::OsWarmCache)?);
    handover.advance(Step::Suspend)?;
    shut_down(vmm, held.state.definition.shutdown_timeout.as_duration())?;
    boot_after_shutdown(handover, None)
}

fn open_journal(held: &LockedVm, kind: Kind) -> Result<Journal, RebootError> {
    let opened = Journal::open(&held.rundir, kind, held.state.vmm.clone(), held.state.generation + 1);
    opened.map_err(|source| RebootError::File { path: held.rundir.file("operation.json"), source })
}

/// Removes the VM's saved state, which is not needed while the guest runs. The file is found by its path: an
/// interrupted operation or recovery can leave a saved state that no journal names.
pub(super) fn forget_saved(host: &Host, held: &LockedVm) {
    let _ = fs::remove_file(saved_path(host, &held.rundir, &held.state.definition));
}
