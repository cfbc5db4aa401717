//! The way back to the source after a failure: no QEMU but the source runs the guest, and libvirt manages it again.

use super::journal::operation;
use super::preflight::DESTINATION_GENERATION;
use super::{DomainError, record_copy, source};
use crate::error::{Failure, RebootError};
use crate::interrupted::{Recovered, SilentQemuPolicy};
use rekindle_handover::{Handover, evidence};
use rekindle_kernel::inject::Injector;
use rekindle_memory::tracker::close_leftovers;
use rekindle_qemu::vmm::log_tail;
use rekindle_qemu::{devices, userfaultfd};
use rekindle_vm::journal::{Absence, Step};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the threads of a destination may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// How a replacement that has failed treats a source that does not answer. libvirt's daemon is stopped meanwhile.
const SILENT_SOURCE: SilentQemuPolicy = SilentQemuPolicy { wait: Duration::from_secs(10), force: false };

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
            Ok(Recovered::ShutOff) => Failure::unchanged(DomainError::Ended { name }),
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
    let error = match error {
        RebootError::Handover(error) => {
            let directory = handover.rundir.vmm(DESTINATION_GENERATION);
            error.with_log(&name, "load the guest", log_tail(&directory, 10)).into()
        }
        other => other,
    };
    let was_daemon_stopped = is_daemon_stopped(&handover);
    Abandoned { name, error, returned: return_to_source(handover, SILENT_SOURCE), was_daemon_stopped }
}

/// Handles a failure after the decision: if the RAM shows that the destination has not run the guest, it continues in
/// the source.
pub(super) fn fail_after_decision(
    mut handover: Handover,
    ram_files: &[File],
    error: RebootError,
) -> Result<Abandoned, Failure> {
    let mark = handover.journal.operation.untouched_since_ns;
    let is_untouched = || {
        let path = |file: &File| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        ram_files.iter().all(|file| evidence::is_untouched(&path(file), mark))
    };
    let Some(destination) = handover.destination() else { return Err(Failure::needs_recovery(error)) };
    let process = destination.process();
    // A process that has stopped writes no more.
    let is_still = !process.is_alive() || process.stop_fully(STOP_TIMEOUT).unwrap_or(false) || !process.is_alive();
    // The new decision is journalled before the destination is ended: if this process is killed then, the guest
    // continues in the source.
    if is_still && is_untouched() && handover.advance(Step::Saved).is_ok() {
        return Ok(abandon(handover, error));
    }
    let _ = process.resume();
    Err(Failure::needs_recovery(error))
}

/// Returns the guest to its source QEMU. Can be repeated.
///
/// *Needs:* the guest has not run in the destination.
/// *On success:* [`Recovered::Undone`], or [`Recovered::ShutOff`] if the source has ended. libvirt's daemon can be
/// started.
pub(super) fn return_to_source(handover: Handover, policy: SilentQemuPolicy) -> Result<Returned, RebootError> {
    let recovered = return_guest(&handover, policy);
    // Also after a failure: libvirt's other guests need the daemon, which must not forget this one.
    let restored = restore_record(&handover);
    let recovered = recovered?;
    restored?;
    Ok(Returned { handover, recovered })
}

fn return_guest(handover: &Handover, policy: SilentQemuPolicy) -> Result<Recovered, RebootError> {
    handover.end_destination()?;
    let Some(source) = handover.live_source() else { return Ok(Recovered::ShutOff) };
    // While libvirt's daemon has not been stopped, the guest has not been stopped either.
    if is_daemon_stopped(handover) {
        let Some(mut qmp) = source::resume(handover, source, policy)? else { return Ok(Recovered::ShutOff) };
        devices::remove_descriptor_sets(&mut qmp, devices::DescriptorSets::All)?;
        userfaultfd::take_back(&mut qmp)?;
    }
    let untraceable = RebootError::file(Path::new(&format!("/proc/{}/mem", source.pid)));
    let injector = Injector::new(source.process()).map_err(|e| untraceable(e.into()))?;
    close_leftovers(injector).map_err(|e| untraceable(io::Error::other(e)))?;
    Ok(Recovered::Undone)
}

/// Ends the QEMUs of a guest that is lost: libvirt finds that the domain's QEMU has ended. Can be repeated.
pub(super) fn end_without_guest(handover: Handover) -> Result<Returned, RebootError> {
    handover.end_destination()?;
    if let Some(source) = handover.live_source() {
        source.kill().map_err(handover.file_error("qemu"))?;
    }
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
