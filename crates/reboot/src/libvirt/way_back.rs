//! The way back to the source after a failure: no QEMU but the source runs the guest, and libvirt manages it again.

use super::journal::operation;
use super::{DomainError, record_copy};
use crate::error::{Failure, RebootError};
use crate::interrupted::{Recovered, SilentQemuPolicy};
use crate::unprepared::{UnpreparedError, way_back};
use rekindle_handover::Handover;
use rekindle_vm::journal::Absence;
use std::fs::File;

/// A guest that is in its source again, or has ended. The operation is still open: libvirt's daemon may be stopped.
pub(super) struct Returned {
    handover: Handover,
    recovered: Recovered,
}

impl Returned {
    /// Ends the operation.
    ///
    /// *Needs:* libvirt's daemon runs.
    pub(super) fn close(self) -> Result<Recovered, RebootError> {
        self.handover.rundir.remove().map_err(RebootError::file(self.handover.rundir.path()))?;
        Ok(self.recovered)
    }
}

/// A failure before the decision, with what has become of the guest.
pub(super) struct Abandoned {
    name: String,
    error: RebootError,
    returned: Result<Returned, RebootError>,
    was_daemon_stopped: bool,
}

impl Abandoned {
    /// Ends the operation. `daemon`: whether libvirt's daemon runs again.
    pub(super) fn end(self, daemon: Result<(), DomainError>) -> Failure {
        let Self { name, error, returned, was_daemon_stopped } = self;
        let ended = returned.and_then(|returned| {
            daemon?;
            returned.close()
        });
        match ended {
            Ok(Recovered::ShutOff) if was_daemon_stopped => Failure::needs_recovery(DomainError::Lost { name }),
            Ok(Recovered::ShutOff) => Failure::unchanged(UnpreparedError::Ended { name }),
            Ok(_) => Failure::unchanged(error),
            Err(e) => {
                tracing::error!("{name}: cannot return the guest to its QEMU and to libvirt: {e}");
                Failure::needs_recovery(error)
            }
        }
    }
}

/// Handles a failure before the decision: the guest continues in the source.
pub(super) fn abandon(handover: Handover, error: RebootError) -> Abandoned {
    let name = handover.name().to_owned();
    let error = way_back::with_log(&handover, error);
    let was_daemon_stopped = is_daemon_stopped(&handover);
    Abandoned { name, error, returned: return_to_source(handover, way_back::SILENT_SOURCE), was_daemon_stopped }
}

/// Handles a failure after the decision: if the RAM shows that the destination has not run the guest, it continues in
/// the source.
pub(super) fn fail_after_decision(
    mut handover: Handover,
    ram_files: &[File],
    error: RebootError,
) -> Result<Abandoned, Failure> {
    if way_back::can_return(&mut handover, ram_files) {
        Ok(abandon(handover, error))
    } else {
        Err(Failure::needs_recovery(error))
    }
}

/// Returns the guest to its source QEMU. Can be repeated.
///
/// *Needs:* the guest has not run in the destination.
/// *On success:* [`Recovered::Undone`], or [`Recovered::ShutOff`] if the source has ended. libvirt's daemon can be
/// started.
pub(super) fn return_to_source(handover: Handover, policy: SilentQemuPolicy) -> Result<Returned, RebootError> {
    // While libvirt's daemon has not been stopped, the guest has not been stopped either.
    let recovered = way_back::return_guest(&handover, is_daemon_stopped(&handover), policy);
    // Also after a failure: libvirt's other guests need the daemon, which must not forget this one.
    let restored = restore_record(&handover);
    let recovered = recovered?;
    restored?;
    Ok(Returned { handover, recovered })
}

/// Ends the QEMUs of a guest that is lost: libvirt finds that the domain's QEMU has ended. Can be repeated.
pub(super) fn end_without_guest(handover: Handover) -> Result<Returned, RebootError> {
    way_back::end_without_guest(&handover)?;
    Ok(Returned { handover, recovered: Recovered::ShutOff })
}

fn is_daemon_stopped(handover: &Handover) -> bool {
    operation(handover).is_ok_and(|libvirt| libvirt.absence != Absence::Present)
}

/// Restores libvirt's record of a domain whose source lives, before the daemon is started.
fn restore_record(handover: &Handover) -> Result<(), RebootError> {
    if is_daemon_stopped(handover) && handover.live_source().is_some() {
        record_copy::restore_if_missing(&handover.rundir, operation(handover)?)?;
    }
    Ok(())
}
