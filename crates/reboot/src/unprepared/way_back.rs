//! The way back to the source after a failure: no QEMU but the source runs the guest.

use super::{DESTINATION_GENERATION, passed, source, stand_in, tpm};
use crate::error::RebootError;
use crate::interrupted::{Recovered, SilentQemuPolicy};
use rekindle_handover::{Handover, evidence};
use rekindle_kernel::inject::Injector;
use rekindle_memory::tracker::close_leftovers;
use rekindle_qemu::vmm::log_tail;
use rekindle_qemu::{devices, userfaultfd};
use rekindle_vm::causes::with_causes;
use rekindle_vm::journal::Step;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the threads of a destination may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// How a replacement that has failed treats a source that does not answer.
pub(crate) const SILENT_SOURCE: SilentQemuPolicy = SilentQemuPolicy { wait: Duration::from_secs(10), force: false };

/// Adds the end of the destination's log to an error of the hand-over.
pub(crate) fn with_log(handover: &Handover, error: RebootError) -> RebootError {
    match error {
        RebootError::Handover(error) => {
            let directory = handover.rundir.vmm(DESTINATION_GENERATION);
            error.with_log(handover.name(), "load the guest", log_tail(&directory, 10)).into()
        }
        other => other,
    }
}

/// After a failure behind the decision: returns whether the RAM shows that the destination has not run the guest. Then
/// that is the new decision, which is journalled: the guest can return to the source.
pub(crate) fn can_return(handover: &mut Handover, ram_files: &[File]) -> bool {
    let mark = handover.journal.operation.untouched_since_ns;
    let is_untouched = || {
        let path = |file: &File| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        ram_files.iter().all(|file| evidence::is_untouched(&path(file), mark))
    };
    let Some(destination) = handover.destination() else { return false };
    let process = destination.process();
    // A process that has stopped writes no more.
    let is_still = !process.is_alive() || process.stop_fully(STOP_TIMEOUT).unwrap_or(false) || !process.is_alive();
    // The new decision is journalled before the destination is ended: if this process is killed then, the guest
    // continues in the source.
    if is_still && is_untouched() && handover.advance(Step::Saved).is_ok() {
        return true;
    }
    let _ = process.resume();
    false
}

/// Returns the guest to its source QEMU. Can be repeated. `may_be_stopped`: whether the hand-over has started.
///
/// *Needs:* the guest has not run in the destination.
/// *On success:* [`Recovered::Undone`], or [`Recovered::ShutOff`] if the source has ended.
pub(crate) fn return_guest(
    handover: &Handover,
    may_be_stopped: bool,
    policy: SilentQemuPolicy,
) -> Result<Recovered, RebootError> {
    end_destination(handover)?;
    let Some(source) = handover.live_source() else { return Ok(Recovered::ShutOff) };
    if may_be_stopped {
        handover.attach_queues(source)?;
        let Some(mut qmp) = source::resume(handover, source, policy)? else { return Ok(Recovered::ShutOff) };
        devices::remove_descriptor_sets(&mut qmp, devices::DescriptorSets::All)?;
        userfaultfd::take_back(&mut qmp)?;
    }
    let untraceable = RebootError::file(Path::new(&format!("/proc/{}/mem", source.pid)));
    let injector = Injector::new(source.process()).map_err(|e| untraceable(e.into()))?;
    close_leftovers(injector).map_err(|e| untraceable(io::Error::other(e)))?;
    Ok(Recovered::Undone)
}

/// Ends the QEMUs of a guest that is lost. Can be repeated.
pub(crate) fn end_without_guest(handover: &Handover) -> Result<(), RebootError> {
    // When its QEMU ends, it would write its state, which is older than the disks.
    tpm::end_source(passed(handover)?)?;
    end_destination(handover)?;
    if let Some(source) = handover.live_source() {
        source.kill().map_err(handover.file_error("qemu"))?;
    }
    Ok(())
}

/// Ends the destination, and removes what it has made outside of its own directory.
fn end_destination(handover: &Handover) -> Result<(), RebootError> {
    handover.end_destination()?;
    let passed = passed(handover)?;
    // The guest must not wait for it.
    if let Err(e) = tpm::end_successor(passed) {
        tracing::error!("{}: the second emulator of its TPM cannot be removed: {}", handover.name(), with_causes(&e));
    }
    stand_in::remove_all(passed)
}
