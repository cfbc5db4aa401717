//! Ends an interrupted replacement of a domain's QEMU.
//!
//! | step | the destination lives | it does not |
//! |---|---|---|
//! | before the decision | it is ended; the guest continues in the source | the guest continues in the source |
//! | after the decision | it continues, and libvirt gets the domain | the guest may have run there: memory is lost |
//!
//! In each case libvirt's daemon runs at the end. If no QEMU has the guest, libvirt shows the domain as shut off.

use super::give_back::{give_back, settle};
use super::way_back::{end_without_guest, undo};
use crate::error::RebootError;
use crate::interrupted::{Recovered, continue_interrupted};
use crate::vmm::recover::live_destination;
use rekindle_libvirt::daemon::lock::DaemonLock;
use rekindle_vm::journal::{Journal, Step};
use rekindle_vm::locked_vm::LockedVm;

/// Ends an interrupted replacement. Can be repeated.
pub(crate) fn recover_replacement(locked_vm: &LockedVm, journal: Journal) -> Result<Recovered, RebootError> {
    let _daemon_lock = DaemonLock::acquire()?;
    let mut handover = continue_interrupted(locked_vm, journal);
    let step = handover.journal.operation.step;
    if step < Step::Resume {
        let is_alive = handover.live_source().is_some();
        undo(handover)?;
        return Ok(if is_alive { Recovered::Undone } else { Recovered::ShutOff });
    }
    let Some(mut destination) = live_destination(&handover)? else {
        end_without_guest(handover)?;
        return Ok(Recovered::ShutOff);
    };
    let vmm = destination.vmm.clone();
    if step == Step::Resume {
        let mut running = destination.wait_for_interrupted_load()?.commit(&mut handover, "resume")?;
        running.begin_give_back(&mut handover)?;
        give_back(&mut handover, vmm.process(), &mut running.qmp)?;
        settle(handover, &vmm, &mut running.qmp)?;
    } else {
        if step == Step::GiveBack {
            give_back(&mut handover, vmm.process(), &mut destination.qmp)?;
        }
        settle(handover, &vmm, &mut destination.qmp)?;
    }
    Ok(Recovered::Finished)
}
