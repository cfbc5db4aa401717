//! Ends an interrupted replacement of a domain's QEMU.
//!
//! | step | the destination lives | it does not |
//! |---|---|---|
//! | before the decision | it is ended; the guest continues in the source | the guest continues in the source |
//! | after the decision | it continues, and libvirt gets the domain | the guest may have run there: memory is lost |
//!
//! An administrator may have continued the frozen source after the decision, and resumed the guest in it. Then the
//! source has the guest if the destination has ended; if both live, the administrator must choose.
//!
//! In each case libvirt's daemon runs at the end. If no QEMU has the guest, libvirt shows the domain as shut off.

use super::daemon_guard::DaemonGuard;
use super::give_back::{give_back, settle};
use super::journal::operation;
use super::way_back::{end_without_guest, undo};
use super::{DomainError, source};
use crate::error::RebootError;
use crate::interrupted::{Recovered, SilentQemuPolicy, continue_interrupted, live_qemu_of_generation, wait_for_answer};
use crate::vmm::recover::live_destination;
use rekindle_handover::{Destination, Handover, SpawnedStage};
use rekindle_libvirt::daemon::lock::DaemonLock;
use rekindle_vm::journal::{Journal, Step};
use rekindle_vm::locked_vm::LockedVm;

/// Ends an interrupted replacement. Can be repeated.
pub(crate) fn recover_replacement(
    locked_vm: &LockedVm,
    journal: Journal,
    policy: SilentQemuPolicy,
) -> Result<Recovered, RebootError> {
    let _daemon_lock = DaemonLock::acquire()?;
    let handover = continue_interrupted(locked_vm, journal);
    let _guard = DaemonGuard::of_interrupted(operation(&handover)?);
    let step = handover.journal.operation.step;
    if step < Step::Resume {
        return undo(handover, policy);
    }
    let running_source = if step == Step::Resume { source::running_again(&handover, policy)? } else { None };
    match (answering_destination(&handover, policy)?, running_source) {
        (Some(destination), None) => finish(handover, destination),
        (Some(Destination { vmm, .. }), Some(source)) => {
            let name = handover.name().to_owned();
            Err(DomainError::SourceRuns { name, source_pid: source.pid, destination_pid: vmm.pid }.into())
        }
        (None, Some(_)) => undo(handover, policy),
        (None, None) => end_without_guest(&handover),
    }
}

/// Returns the destination, connected. `None` if it has ended, or was killed because of [`SilentQemuPolicy::force`].
fn answering_destination(
    handover: &Handover,
    policy: SilentQemuPolicy,
) -> Result<Option<Destination<SpawnedStage>>, RebootError> {
    let generation = handover.journal.operation.generation;
    if let Some(vmm) = live_qemu_of_generation(&handover.rundir, &handover.state, generation)?
        && !wait_for_answer(handover.name(), &vmm, policy)?
    {
        return Ok(None);
    }
    live_destination(handover)
}

/// Resumes the guest in the destination unless it runs there, and gives the domain back to libvirt.
fn finish(mut handover: Handover, mut destination: Destination<SpawnedStage>) -> Result<Recovered, RebootError> {
    let vmm = destination.vmm.clone();
    match handover.journal.operation.step {
        Step::Settle => settle(handover, &vmm, &mut destination.qmp)?,
        Step::GiveBack => {
            give_back(&mut handover, vmm.process(), &mut destination.qmp)?;
            settle(handover, &vmm, &mut destination.qmp)?;
        }
        Step::Prepare | Step::Suspend | Step::Saved | Step::Resume => {
            let mut running = destination.wait_for_interrupted_load()?.commit(&mut handover, "resume")?;
            running.begin_give_back(&mut handover)?;
            give_back(&mut handover, vmm.process(), &mut running.qmp)?;
            settle(handover, &vmm, &mut running.qmp)?;
        }
    }
    Ok(Recovered::Finished)
}
