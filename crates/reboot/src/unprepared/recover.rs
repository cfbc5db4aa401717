//! Where the guest of an interrupted replacement continues.
//!
//! | step | the destination lives | it does not |
//! |---|---|---|
//! | before the decision | it is ended; the guest continues in the source | the guest continues in the source |
//! | after the decision | it continues, and the manager gets the guest | the guest may have run there: memory is lost |
//!
//! An administrator may have continued the frozen source after the decision, and resumed the guest in it. Then the
//! source has the guest if the destination has ended; if both live, the administrator must choose.

use super::{UnpreparedError, source};
use crate::error::RebootError;
use crate::interrupted::{SilentQemuPolicy, live_qemu_of_generation, wait_for_answer};
use crate::vmm::recover::live_destination;
use rekindle_handover::{Destination, Handover, SpawnedStage};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::journal::Step;

/// The QEMU in which the guest continues.
pub(crate) enum GuestPlace {
    Source,
    Destination(Box<Destination<SpawnedStage>>),
    /// None: its memory is lost.
    Lost,
}

/// Returns where the guest continues. Nothing is changed, except that a source which does not run the guest is frozen.
///
/// # Errors
/// [`UnpreparedError::SourceRuns`]; other errors if a QEMU does not answer.
pub(crate) fn place(handover: &Handover, policy: SilentQemuPolicy) -> Result<GuestPlace, RebootError> {
    let step = handover.journal.operation.step;
    if step < Step::Resume {
        return Ok(GuestPlace::Source);
    }
    let running_source = if step == Step::Resume { source::running_again(handover, policy)? } else { None };
    match (answering_destination(handover, policy)?, running_source) {
        (Some(destination), None) => Ok(GuestPlace::Destination(Box::new(destination))),
        (Some(Destination { vmm, .. }), Some(source)) => {
            let name = handover.name().to_owned();
            Err(UnpreparedError::SourceRuns { name, source_pid: source.pid, destination_pid: vmm.pid }.into())
        }
        (None, Some(_)) => Ok(GuestPlace::Source),
        (None, None) => Ok(GuestPlace::Lost),
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

/// Resumes the guest in the destination, unless it runs there.
pub(crate) fn resume_destination(
    handover: &mut Handover,
    destination: Destination<SpawnedStage>,
) -> Result<(Vmm, Qmp), RebootError> {
    match handover.journal.operation.step {
        Step::GiveBack | Step::Settle => Ok((destination.vmm, destination.qmp)),
        Step::Prepare | Step::Suspend | Step::Saved | Step::Resume => {
            let running = destination.wait_for_interrupted_load()?.commit(handover, "resume")?;
            running.begin_give_back(handover)?;
            Ok((running.vmm, running.qmp))
        }
    }
}
