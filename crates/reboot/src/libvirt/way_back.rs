//! The way back to the source after a failure: no QEMU but the source runs the guest, and libvirt manages it again.

use super::journal::operation;
use super::preflight::DESTINATION_GENERATION;
use super::{DomainError, daemon, record_copy, source};
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

/// Handles a failure before the decision: the guest continues in the source, and libvirt gets it back.
pub(super) fn abandon(handover: Handover, error: RebootError) -> Failure {
    let name = handover.name().to_owned();
    let error = match error {
        RebootError::Handover(error) => {
            let directory = handover.rundir.vmm(DESTINATION_GENERATION);
            error.with_log(&name, "load the guest", log_tail(&directory, 10)).into()
        }
        other => other,
    };
    let was_daemon_stopped = is_daemon_stopped(&handover);
    match undo(handover, SILENT_SOURCE) {
        Ok(Recovered::ShutOff) if was_daemon_stopped => Failure::needs_recovery(DomainError::Lost { name }),
        Ok(Recovered::ShutOff) => Failure::unchanged(DomainError::Ended { name }),
        Ok(_) => Failure::unchanged(error),
        Err(e) => {
            tracing::error!("{name}: cannot return the guest to its QEMU and to libvirt: {e}");
            Failure::needs_recovery(error)
        }
    }
}

/// Handles a failure after the decision: if the RAM shows that the destination has not run the guest, it continues in
/// the source.
pub(super) fn fail_after_decision(mut handover: Handover, ram_files: &[File], error: RebootError) -> Failure {
    let mark = handover.journal.operation.untouched_since_ns;
    let is_untouched = || {
        let path = |file: &File| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        ram_files.iter().all(|file| evidence::is_untouched(&path(file), mark))
    };
    let Some(destination) = handover.destination() else { return Failure::needs_recovery(error) };
    let process = destination.process();
    // A process that has stopped writes no more.
    let is_still = !process.is_alive() || process.stop_fully(STOP_TIMEOUT).unwrap_or(false) || !process.is_alive();
    // The new decision is journalled before the destination is ended: if this process is killed then, the guest
    // continues in the source.
    if is_still && is_untouched() && handover.advance(Step::Saved).is_ok() {
        return abandon(handover, error);
    }
    let _ = process.resume();
    Failure::needs_recovery(error)
}

/// Returns the guest to its source QEMU and to libvirt, and ends the operation. Can be repeated.
///
/// *Needs:* the guest has not run in the destination.
/// *On success:* [`Recovered::Undone`], or [`Recovered::ShutOff`] if the source has ended.
pub(super) fn undo(handover: Handover, policy: SilentQemuPolicy) -> Result<Recovered, RebootError> {
    let returned = return_guest(&handover, policy);
    // Also after a failure: libvirt's other guests need the daemon.
    let started = start_daemon(&handover);
    let recovered = returned?;
    started?;
    remove_run_directory(&handover)?;
    Ok(recovered)
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

/// Ends an operation whose guest is lost: libvirt finds that the domain's QEMU has ended. Can be repeated.
pub(super) fn end_without_guest(handover: &Handover) -> Result<Recovered, RebootError> {
    handover.end_destination()?;
    if let Some(source) = handover.live_source() {
        source.kill().map_err(handover.file_error("qemu"))?;
    }
    start_daemon(handover)?;
    remove_run_directory(handover)?;
    Ok(Recovered::ShutOff)
}

fn is_daemon_stopped(handover: &Handover) -> bool {
    operation(handover).is_ok_and(|libvirt| libvirt.absence != Absence::Present)
}

fn start_daemon(handover: &Handover) -> Result<(), RebootError> {
    if is_daemon_stopped(handover) {
        let libvirt = operation(handover)?;
        if handover.live_source().is_some() {
            record_copy::restore_if_missing(&handover.rundir, libvirt)?;
        }
        daemon::start_if_absent(&libvirt.daemon)?;
    }
    Ok(())
}

fn remove_run_directory(handover: &Handover) -> Result<(), RebootError> {
    handover.rundir.remove().map_err(RebootError::file(handover.rundir.path()))
}
