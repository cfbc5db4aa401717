//! Cold: the guest is shut down and booted in a new QEMU. Its disk cache may be retained for the next boot.

use super::{ColdReboot, Replacement};
use crate::error::{Failure, RebootError};
use rekindle_handover::boot::{Booted, PreviousCache, boot};
use rekindle_handover::{GuestStatus, Handover};
use rekindle_life::shutdown::EndMethod;
use rekindle_life::shutdown::Ended;
use rekindle_life::shutdown::end_guest;
use rekindle_vm::journal::{Kind, Step};
use rekindle_vm::timeline::{Phase, host_us};

/// When and how a guest ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shutdown {
    /// When the guest ended, in µs since 1970.
    pub(crate) host_us: u64,
    pub(crate) ended: Ended,
}

/// Ends the guest as `end` states and boots it in a new QEMU.
pub(crate) fn reboot(mut replacement: Replacement, kind: Kind, end: EndMethod) -> Result<ColdReboot, Failure> {
    let handover = replacement.begin_handover(kind);
    let mut handover = handover.map_err(|error| Failure::new(GuestStatus::Unchanged, error))?;
    let rebooted = shut_down(&mut replacement, &mut handover, end)
        .and_then(|shutdown| boot_again(&replacement, handover, shutdown));
    rebooted.map_err(|error| Failure::new(GuestStatus::NeedsRecovery, error))
}

/// Journals the suspend, then ends the guest as `end` states.
pub(crate) fn shut_down(
    replacement: &mut Replacement,
    handover: &mut Handover,
    end: EndMethod,
) -> Result<Shutdown, RebootError> {
    replacement.hold_run_state()?;
    handover.advance(Step::Suspend)?;
    handover.pass("cold.suspend.journalled");
    handover.recorder.phase(Phase::Suspend);
    let timeout = replacement.held.state.definition.shutdown_timeout.as_duration();
    let ended = end_guest(&replacement.source_qemu, end, timeout)?;
    let shutdown = Shutdown { host_us: host_us(), ended };
    handover.recorder.step(ended.step());
    handover.pass("cold.suspend.off");
    Ok(shutdown)
}

/// Boots the guest again. Retains the previous guest's cache only for [`Kind::OsWarmCache`].
pub(crate) fn boot_again(
    replacement: &Replacement,
    handover: Handover,
    shutdown: Shutdown,
) -> Result<ColdReboot, RebootError> {
    let cache = match handover.journal.operation.kind {
        Kind::OsWarmCache => PreviousCache::Retain,
        _ => PreviousCache::Discard,
    };
    let Booted { settled, retained } = boot(handover, &replacement.binary, cache, None)?;
    settled.recorder.write(&replacement.held.rundir);
    Ok(ColdReboot { report: replacement.report(&settled, shutdown.host_us), retained, ended: shutdown.ended })
}
