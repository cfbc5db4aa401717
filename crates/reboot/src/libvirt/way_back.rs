//! The way back to the source after a failure: no QEMU but the source runs the guest, and libvirt manages it again.

use super::journal::operation;
use super::preflight::DESTINATION_GENERATION;
use super::{DomainError, daemon, record_copy};
use crate::error::{Failure, RebootError};
use rekindle_handover::{Handover, evidence};
use rekindle_kernel::inject::Injector;
use rekindle_memory::tracker::close_leftovers;
use rekindle_qemu::vmm::{START_TIMEOUT, log_tail};
use rekindle_qemu::{devices, guest, userfaultfd};
use rekindle_vm::journal::{Absence, Step};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the threads of a destination may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

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
    if handover.live_source().is_none() {
        if let Err(e) = end_without_guest(handover) {
            tracing::error!("{name}: {e}");
        }
        return Failure::needs_recovery(DomainError::Lost { name });
    }
    match undo(handover) {
        Ok(()) => Failure::unchanged(error),
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
    let Some(destination) = handover.destination().cloned() else { return Failure::needs_recovery(error) };
    let process = destination.process();
    // A process that has stopped writes no more.
    let is_still = !process.is_alive() || process.stop_fully(STOP_TIMEOUT).unwrap_or(false) || !process.is_alive();
    if !is_still || !is_untouched() || destination.kill().is_err() {
        let _ = process.resume();
        return Failure::needs_recovery(error);
    }
    match handover.advance(Step::Saved) {
        Ok(()) => abandon(handover, error),
        Err(e) => Failure::needs_recovery(e),
    }
}

/// Returns the guest to its source QEMU and to libvirt, and ends the operation. Can be repeated.
///
/// *Needs:* the source lives; the guest has not run in the destination.
pub(super) fn undo(handover: Handover) -> Result<(), RebootError> {
    handover.end_destination()?;
    let Some(source) = handover.live_source().cloned() else { return end_without_guest(handover) };
    let untraceable = RebootError::file(Path::new(&format!("/proc/{}/mem", source.pid)));
    let injector = Injector::new(source.process()).map_err(|e| untraceable(e.into()))?;
    close_leftovers(injector).map_err(|e| untraceable(io::Error::other(e)))?;
    let absence = handover.journal.operation.libvirt.as_ref().map_or(Absence::Present, |libvirt| libvirt.absence);
    if absence != Absence::Present {
        daemon::stop(&operation(&handover)?.daemon)?;
        let mut qmp = source.connect(START_TIMEOUT)?;
        if handover.journal.operation.step >= Step::Suspend && guest::run_state(&mut qmp)? != "running" {
            guest::resume_after_save(&mut qmp)?;
        }
        devices::remove_descriptor_sets(&mut qmp, devices::DescriptorSets::All)?;
        userfaultfd::take_back(&mut qmp)?;
    }
    return_to_libvirt(&handover)
}

/// Ends an operation whose guest is lost: libvirt finds that the domain's QEMU has ended. Can be repeated.
pub(super) fn end_without_guest(handover: Handover) -> Result<(), RebootError> {
    handover.end_destination()?;
    if let Some(source) = handover.live_source() {
        source.kill().map_err(handover.file_error("qemu"))?;
    }
    return_to_libvirt(&handover)
}

fn return_to_libvirt(handover: &Handover) -> Result<(), RebootError> {
    if let Some(libvirt) = &handover.journal.operation.libvirt
        && libvirt.absence != Absence::Present
    {
        if handover.live_source().is_some() {
            record_copy::restore_if_missing(&handover.rundir, libvirt)?;
        }
        daemon::start_if_absent(&libvirt.daemon)?;
    }
    handover.rundir.remove().map_err(RebootError::file(handover.rundir.path()))
}
