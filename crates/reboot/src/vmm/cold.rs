//! Cold: the guest is shut down and booted in a new QEMU. Its disk cache may be retained for the next boot.

use super::{RebootReport, Replacement};
use crate::error::{Failure, RebootError};
use rekindle_handover::Handover;
use rekindle_handover::boot::{Booted, PreviousCache, boot};
use rekindle_life::shutdown::{EndMethod, Ended, end_guest};
use rekindle_vm::disks::RetainedCache;
use rekindle_vm::journal::{Kind, Step};
use rekindle_vm::timeline::{Phase, host_us};

/// Result of shutting a guest down and booting it.
pub(crate) struct ColdReboot {
    pub(crate) report: RebootReport,
    /// `None` if no cache was retained.
    pub(crate) retained: Option<RetainedCache>,
    /// How the previous guest ended.
    pub(crate) ended: Ended,
}

/// When and how a guest ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shutdown {
    /// When the guest ended, in µs since 1970.
    pub(crate) host_us: u64,
    pub(crate) ended: Ended,
}

/// Ends the guest as `end` states and boots it in a new QEMU.
pub(crate) fn reboot(mut replacement: Replacement, kind: Kind, end: EndMethod) -> Result<ColdReboot, Failure> {
    let mut handover = replacement.begin_handover(kind).map_err(Failure::unchanged)?;
    let shutdown = shut_down(&mut replacement, &mut handover, end).map_err(Failure::needs_recovery)?;
    boot_again(&replacement, handover, shutdown).map_err(Failure::needs_recovery)
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
    let timeout = replacement.locked_vm.state.definition.shutdown_timeout.as_duration();
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
    settled.recorder.write(&replacement.locked_vm.rundir);
    Ok(ColdReboot { report: replacement.report(&settled, shutdown.host_us), retained, ended: shutdown.ended })
}
