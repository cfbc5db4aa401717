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

/// Recovers a VM that no operation has left behind.
pub(super) fn recover_idle(
    host: &Host,
    locked_vm: &LockedVm,
    policy: SilentQemuPolicy,
) -> Result<Recovered, RebootError> {
    if let Ok(vmm) = locked_vm.vmm()
        && locked_vm.state.hardware.disks.iter().any(|disk| disk.server)
    {
        if has_guest_ended(vmm, policy.wait) {
            return boot_ended_guest(locked_vm, vmm);
        }
        // QEMU may have been about to end when it was queried.
        vmm.wait_released().map_err(RebootError::file(locked_vm.rundir.path()))?;
    }
    match locked_vm.vmm() {
        Ok(vmm) => {
            remove_saved_state(host, locked_vm);
            // Start the disk servers first: the guest waits for its disks, and QEMU may not answer until they serve.
            let started_servers =
                disks::start(&locked_vm.rundir, &locked_vm.state.hardware).map_err(LifeError::from)?;
            // The protector may use the only monitor of an adopted QEMU.
            if locked_vm.state.attached.is_none() && !wait_for_answer(locked_vm.rundir.name(), vmm, policy)? {
                return boot_after_qemu_died(locked_vm);
            }
            match end_pause(locked_vm, vmm)? {
                Recovered::Nothing if started_servers > 0 => Ok(Recovered::Served),
                recovered => Ok(recovered),
            }
        }
        // Rekindle does not know how an adopted QEMU was started.
        Err(_) if locked_vm.state.attached.is_some() => {
            locked_vm.refuse_attached("starting it again, as its QEMU has ended")?;
            Ok(Recovered::Nothing)
        }
        Err(LifeError::Prepared { .. }) => Ok(Recovered::Nothing),
        // A start was interrupted before it opened its journal, or a QEMU that waited for a restore has ended.
        Err(_) if locked_vm.state.vmm.is_none() => {
            clean_up(host, &locked_vm.rundir, &locked_vm.state)?;
            Ok(Recovered::Removed)
        }
        Err(_) => boot_after_qemu_died(locked_vm),
    }
}

/// Boots a guest whose memory was lost with its QEMU.
fn boot_after_qemu_died(locked_vm: &LockedVm) -> Result<Recovered, RebootError> {
    boot_after_loss(continue_interrupted(locked_vm, open_journal(locked_vm, Kind::VmmCold)?), None)
}

/// Returns whether QEMU has stopped, as configured, because its guest rebooted itself, powered off or panicked. If so,
/// the `rekindle watch` that would have handled this has died.
fn has_guest_ended(vmm: &Vmm, wait: Duration) -> bool {
    let run_state = vmm.connect(wait).map_err(RebootError::from).and_then(|mut qmp| Ok(run_state(&mut qmp)?));
    run_state.is_ok_and(|run_state| ENDED_RUN_STATES.contains(&run_state.as_str()))
}

/// Ends the QEMU of a guest that has ended, and boots the guest again.
fn boot_ended_guest(locked_vm: &LockedVm, vmm: &Vmm) -> Result<Recovered, RebootError> {
    let mut handover = continue_interrupted(locked_vm, open_journal(locked_vm, Kind::OsWarmCache)?);
    handover.advance(Step::Suspend)?;
    shut_down(vmm, locked_vm.state.definition.shutdown_timeout.as_duration())?;
    boot_after_shutdown(handover, None)
}

fn open_journal(locked_vm: &LockedVm, kind: Kind) -> Result<Journal, RebootError> {
    let opened = Journal::open(&locked_vm.rundir, kind, locked_vm.state.vmm.clone(), locked_vm.state.generation + 1);
    opened.map_err(RebootError::file(&locked_vm.rundir.file("operation.json")))
}

/// Removes the VM's saved state, which is not needed while the guest runs. The file is found by its path: an
/// interrupted operation or recovery can leave a saved state that no journal names.
pub(super) fn remove_saved_state(host: &Host, locked_vm: &LockedVm) {
    let _ = fs::remove_file(saved_path(host, &locked_vm.rundir, &locked_vm.state.definition));
}
