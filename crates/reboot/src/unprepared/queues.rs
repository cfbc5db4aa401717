//! Queues of taps that the hand-over detaches ([`rekindle_handover::takeover`]), and that are attached again if the guest
//! returns to the source.

use super::passed;
use crate::error::RebootError;
use rekindle_handover::Handover;
use rekindle_handover::takeover::TapTakeover;
use rekindle_kernel::{descriptor, tap};
use rekindle_qemu::vmm::Vmm;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::path::Path;

/// Records which queues the hand-over will detach. The next step of the journal writes it.
///
/// # Errors
/// [`RebootError::Handover`]: it cannot be read whether a queue is attached.
pub(crate) fn record(handover: &mut Handover, taps: &TapTakeover) -> Result<(), RebootError> {
    let detached_queues = taps.queues_to_detach()?;
    if let Some(passed) = &mut handover.journal.operation.passed {
        passed.detached_queues = detached_queues;
    }
    Ok(())
}

/// Attaches the recorded queues for the source, as far as they are detached. Can be repeated.
///
/// A queue that the guest itself has turned off between the record and its stop is attached, too: frames in it are lost
/// until the guest changes the number of its queues.
///
/// # Errors
/// [`RebootError::File`]: a queue cannot be attached.
pub(crate) fn attach_again(handover: &Handover, source: &Vmm) -> Result<(), RebootError> {
    let attach = |number: &RawFd| -> io::Result<()> {
        let queue = descriptor::take(source.process(), *number)?;
        if tap::queue(queue.as_fd())?.is_detached { tap::attach(queue.as_fd()) } else { Ok(()) }
    };
    let failed = RebootError::file(Path::new(&format!("/proc/{}/fd", source.pid)));
    passed(handover)?.detached_queues.iter().try_for_each(attach).map_err(failed)
}
