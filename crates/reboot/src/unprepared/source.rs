//! The source QEMU of a replacement.
//!
//! It is *frozen* (`SIGSTOP`) before the decision for the destination, and remains so until it is ended. So it cannot
//! run the guest a second time, whatever its manager or an administrator sends to its monitor. If the guest returns
//! to the source instead, the source continues first.

use crate::error::RebootError;
use crate::interrupted::{SilentQemuPolicy, wait_for_answer};
use rekindle_handover::Handover;
use rekindle_kernel::process::Process;
use rekindle_libvirt::daemon;
use rekindle_qemu::guest;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::{START_TIMEOUT, Vmm};
use rekindle_vm::journal::Step;
use std::io;
use std::time::Duration;

/// How long the threads of the source may take to stop.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(10);
/// Run states in which a replacement leaves a guest that ran before. In every other state the guest or QEMU itself has
/// stopped it: it has shut down or crashed, or a disk has failed.
const RESUMABLE_STATES: [&str; 4] = ["paused", "finish-migrate", "postmigrate", "save-vm"];

/// Freezes the source unless it has ended. Can be repeated.
///
/// # Errors
/// [`RebootError::File`]: a thread of it does not stop.
pub(crate) fn freeze(handover: &Handover) -> Result<(), RebootError> {
    let Some(source) = handover.live_source() else { return Ok(()) };
    let failed = RebootError::file(&source.directory);
    if source.process().stop_fully(FREEZE_TIMEOUT).map_err(&failed)? || !source.is_alive() {
        return Ok(());
    }
    Err(failed(io::Error::other(format!("the threads of QEMU (process {}) do not stop", source.pid))))
}

/// Returns the source if it runs the guest although the decision is made for the destination: an administrator has
/// continued the frozen process and resumed its guest. Otherwise the source is frozen afterwards.
///
/// # Errors
/// [`RebootError`], e.g. because the source does not answer.
pub(crate) fn running_again(handover: &Handover, policy: SilentQemuPolicy) -> Result<Option<Process>, RebootError> {
    let Some(source) = handover.live_source() else { return Ok(None) };
    if !source.process().is_stopped() {
        let Some(mut qmp) = connect(handover, source, policy)? else { return Ok(None) };
        if guest::run_state(&mut qmp)? == "running" {
            return Ok(Some(source.process()));
        }
        // As long as the connection is open, no other client can resume the guest.
        freeze(handover)?;
    }
    Ok(None)
}

/// Resumes the guest in the source if this operation has stopped it. Returns a connection; `None` if the source has
/// ended, or was killed because of [`SilentQemuPolicy::force`].
///
/// *Needs:* the guest has not run in the destination, which has ended.
///
/// # Errors
/// [`RebootError`]: the guest is stopped.
pub(crate) fn resume(handover: &Handover, source: &Vmm, policy: SilentQemuPolicy) -> Result<Option<Qmp>, RebootError> {
    let may_be_stopped = handover.journal.operation.step >= Step::Suspend;
    if may_be_stopped {
        source.process().resume().map_err(RebootError::file(&source.directory))?;
    }
    let Some(mut qmp) = connect(handover, source, policy)? else { return Ok(None) };
    if may_be_stopped && RESUMABLE_STATES.contains(&guest::run_state(&mut qmp)?.as_str()) {
        guest::resume_after_save(&mut qmp)?;
    }
    Ok(Some(qmp))
}

/// Connects to the source's monitor. `None` if the source has ended.
fn connect(handover: &Handover, source: &Vmm, policy: SilentQemuPolicy) -> Result<Option<Qmp>, RebootError> {
    // libvirt's daemon holds the monitor, and could resume the guest. An administrator may have started it.
    if let Some(libvirt) = &handover.journal.operation.libvirt {
        daemon::stop(&libvirt.daemon)?;
    }
    if wait_for_answer(handover.name(), source, policy)? { Ok(Some(source.connect(START_TIMEOUT)?)) } else { Ok(None) }
}
