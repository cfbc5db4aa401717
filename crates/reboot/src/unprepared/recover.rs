//! Where the guest of an interrupted replacement continues.
//!
//! | step | the destination lives | it does not |
//! |---|---|---|
//! | before the decision | it is ended; the guest continues in the source | the guest continues in the source |
//! | after the decision | it continues, and the manager gets the guest | the guest may have run there: memory is lost |
//!
//! RAM that is moved in place: from the decision on, recovery continues the move, and the guest is lost if the source has
//! ended with pages that only it had.
//!
//! An administrator may have continued the frozen source after the decision, and resumed the guest in it. Then the
//! source has the guest if the destination has ended; if both live, the administrator must choose.

use super::{UnpreparedError, source};
use crate::error::RebootError;
use crate::interrupted::{SilentQemuPolicy, live_qemu_of_generation, wait_for_answer};
use crate::vmm::recover::live_destination;
use rekindle_handover::moved_ram::{InterruptedMove, RamMove};
use rekindle_handover::{Destination, Handover, SpawnedStage};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::journal::Step;

/// The QEMU in which the guest continues.
pub(crate) enum GuestPlace {
    Source,
    Destination(Box<PlacedInDestination>),
    /// None: its memory is lost.
    Lost,
}

/// A destination in which the guest continues.
pub(crate) struct PlacedInDestination {
    destination: Destination<SpawnedStage>,
    /// Set while RAM is missing that is moved in place.
    ram_move: Option<RamMove>,
}

/// A destination that runs the guest.
pub(crate) struct ResumedDestination {
    pub vmm: Vmm,
    pub qmp: Qmp,
    /// As in [`PlacedInDestination`].
    pub ram_move: Option<RamMove>,
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
    // Before any request to the destination: it may wait for a page.
    let ram_move = match InterruptedMove::of(handover).map_err(UnpreparedError::from)? {
        InterruptedMove::Complete => None,
        InterruptedMove::Continues(ram_move) => Some(ram_move),
        InterruptedMove::Lost => {
            tracing::error!(
                "{}: its previous QEMU has ended before all of the guest's RAM was moved to the new one",
                handover.name()
            );
            return Ok(GuestPlace::Lost);
        }
    };
    let running_source = if step == Step::Resume { source::running_again(handover, policy)? } else { None };
    match (answering_destination(handover, policy)?, running_source) {
        (Some(destination), None) => {
            Ok(GuestPlace::Destination(Box::new(PlacedInDestination { destination, ram_move })))
        }
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
    placed: PlacedInDestination,
) -> Result<ResumedDestination, RebootError> {
    let PlacedInDestination { destination, ram_move } = placed;
    let (vmm, qmp) = match handover.journal.operation.step {
        Step::GiveBack | Step::Settle => (destination.vmm, destination.qmp),
        Step::Prepare | Step::Suspend | Step::Saved | Step::Resume => {
            let running = destination.wait_for_interrupted_load()?.commit(handover, "resume")?;
            running.begin_give_back(handover)?;
            (running.vmm, running.qmp)
        }
    };
    if let Some(ram_move) = &ram_move {
        ram_move.move_all(handover);
    }
    Ok(ResumedDestination { vmm, qmp, ram_move })
}
