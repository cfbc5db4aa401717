//! What the destination gets when the source is frozen: the listening sockets, also those of its VNC and SPICE servers. And
//! the end of the source.

use super::{UnpreparedError, forwards, passed, source, spice, tpm, vnc};
use crate::error::RebootError;
use rekindle_handover::moved_ram::{MoveReport, RamMove};
use rekindle_handover::ram_transfer_error::RamTransferError;
use rekindle_handover::{Handover, HandoverError};
use rekindle_kernel::descriptor;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::process::Process;
use rekindle_libvirt::graphics_password::GraphicsPassword;
use rekindle_memory::missing::Pager;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::transfer::set_capabilities;
use rekindle_qemu::vmm::{Vmm, log_tail};
use rekindle_vm::journal::Step;
use std::path::Path;

/// Passwords that QEMU does not report, and its manager has recorded.
#[derive(Debug, Default)]
pub(crate) struct Passwords {
    pub vnc: Option<GraphicsPassword>,
    pub spice: Option<GraphicsPassword>,
}

/// Freezes the source, and gives the destination its listening sockets. Can be repeated.
///
/// # Errors
/// [`RebootError`]: the guest runs; `rekindle recover` repeats this.
pub(crate) fn give(
    handover: &Handover,
    destination: Process,
    qmp: &mut Qmp,
    passwords: &Passwords,
) -> Result<(), RebootError> {
    let passed = passed(handover)?;
    source::freeze(handover)?;
    handover.pass("replace.give-back.frozen");
    // Before the guest's manager is back: it may end the guest, and its TPM.
    tpm::pass(passed)?;
    handover.pass("replace.give-back.tpm-passed");
    // In the place of the destination's stand-ins: two QEMUs that accept connections of one socket would steal each
    // other's clients.
    let untraceable = RebootError::file(Path::new(&format!("/proc/{}/fd", destination.pid)));
    let injector = Injector::new(destination).map_err(|e| untraceable(e.into()))?;
    let pairs: Vec<_> = passed.listeners.iter().map(|listener| (listener.spare, listener.destination)).collect();
    descriptor::replace(injector, &pairs).map_err(untraceable)?;
    vnc::pass(handover.name(), passed, passwords.vnc.as_ref(), destination, qmp)?;
    spice::pass(handover.name(), passed, passwords.spice.as_ref(), destination, qmp)?;
    handover.pass("replace.give-back.graphics-passed");
    // The guest's manager does not know these capabilities, and its own migrations must not use them.
    set_capabilities(qmp, &[("x-ignore-shared", false), ("late-block-activate", false)])?;
    Ok(())
}

/// Waits until all RAM that is moved in place is in the destination.
///
/// # Errors
/// [`UnpreparedError::NotMoved`]: the guest waits where it needs a page that is missing; `rekindle recover` repeats this.
/// [`UnpreparedError::LostInMove`], [`HandoverError::DiedRunning`]: the guest is lost.
pub(crate) fn finish_move(
    handover: &mut Handover,
    ram_move: Option<RamMove>,
) -> Result<Option<MoveReport>, RebootError> {
    let Some(ram_move) = ram_move else { return Ok(None) };
    match ram_move.finish(handover) {
        Ok(report) => {
            handover.recorder.step("move memory");
            Ok(Some(report))
        }
        Err(source) => Err(failed_move(handover, source)),
    }
}

fn failed_move(handover: &Handover, source: RamTransferError) -> RebootError {
    let name = handover.name().to_owned();
    match handover.destination() {
        Some(destination) if !destination.is_alive() => died(handover, destination),
        _ if handover.live_source().is_none() => UnpreparedError::LostInMove { name }.into(),
        _ => UnpreparedError::NotMoved { name, source }.into(),
    }
}

fn died(handover: &Handover, destination: &Vmm) -> RebootError {
    let log = log_tail(&destination.directory(), 10);
    HandoverError::DiedRunning { name: handover.name().into(), log }.into()
}

/// Ends the source. The guest's manager has the destination, which has all RAM. Can be repeated.
///
/// # Errors
/// [`RebootError`]: the guest runs, unless the destination has ended; `rekindle recover` repeats this.
pub(crate) fn end_source(handover: &mut Handover, destination: &Vmm, qmp: &mut Qmp) -> Result<(), RebootError> {
    if !destination.is_alive() {
        return Err(died(handover, destination));
    }
    if handover.journal.operation.moved_ram.is_some()
        && Pager::is_registered_in(destination.process())
            .map_err(RamTransferError::from)
            .map_err(UnpreparedError::from)?
    {
        return Err(
            UnpreparedError::NotMoved { name: handover.name().into(), source: RamTransferError::NotMoved }.into()
        );
    }
    handover.advance(Step::Settle)?;
    handover.pass("replace.settle.journalled");
    if let Some(source) = handover.live_source() {
        source.kill().map_err(handover.file_error("qemu"))?;
    }
    handover.pass("replace.settle.source-gone");
    forwards::add(qmp, &passed(handover)?.forwards)?;
    Ok(())
}
