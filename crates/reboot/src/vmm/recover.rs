//! Recovery of replacements of a QEMU, and of all other operations that boot a guest again.

use super::{saved, warm};
use crate::error::RebootError;
use crate::interrupted::{Recovered, live_qemu_of_generation};
use rekindle_handover::boot::{PreviousCache, boot};
use rekindle_handover::ram::Ram;
use rekindle_handover::takeover::Taps;
use rekindle_handover::{Destination, Handover, HandoverError, LoadedStage, SpawnedStage};
use rekindle_life::shutdown::shut_down;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::journal::{End, Kind, SavedState, Step};
use rekindle_vm::{network, ram};
use std::fs;
use std::time::Duration;

/// Recovers a warm or saved reboot.
pub(crate) fn recover_handover(handover: Handover) -> Result<Recovered, RebootError> {
    // The decision for the destination QEMU was journalled, so it may run the guest.
    if handover.journal.operation.step >= Step::Resume
        && let Some(destination) = live_destination(&handover)?
    {
        return finish(handover, destination, Recovered::Finished);
    }
    handover.end_destination()?;
    if !handover.has_not_run() {
        return boot_after_loss(handover, None);
    }
    match (handover.live_source(), handover.journal.operation.saved.clone()) {
        (Some(_), _) => {
            handover.return_to_source()?;
            Ok(Recovered::Undone)
        }
        (None, Some(saved)) => resume_from_state(handover, &saved),
        (None, None) => boot_after_loss(handover, None),
    }
}

/// Loads the saved state into a new QEMU and resumes the guest.
fn resume_from_state(mut handover: Handover, saved: &SavedState) -> Result<Recovered, RebootError> {
    let hardware = handover.state.hardware.clone();
    // The guest has not run, and another QEMU is to load it. If this recovery is interrupted, the next one must not
    // assume that the new QEMU may run the guest.
    handover.advance(Step::Saved)?;
    if saved.without_ram {
        let loaded = with_either_binary(&mut handover, |handover, binary| {
            warm::load(handover, &hardware, binary, saved, network::reopen(&hardware)?)
        })?;
        commit_and_settle(handover, loaded, Recovered::FromState)
    } else {
        let loaded = with_either_binary(&mut handover, |handover, binary| {
            saved::load(handover, &hardware, binary, saved, network::reopen(&hardware)?)
        })?;
        commit_and_settle(handover, loaded, Recovered::FromState)
    }
}

/// Calls `load` with the destination's binary. If that QEMU fails, retries with the source's binary, which has run this
/// guest.
fn with_either_binary<T>(
    handover: &mut Handover,
    load: impl Fn(&mut Handover, &Binary) -> Result<T, HandoverError>,
) -> Result<T, RebootError> {
    let binary_of = |vmm: Option<&Vmm>| vmm.map(|vmm| vmm.binary.clone());
    let source_binary = binary_of(handover.source()).unwrap_or_else(|| handover.state.definition.qemu.clone());
    let destination_binary = binary_of(handover.destination()).unwrap_or_else(|| source_binary.clone());
    let binary = handover.rundir.binary(&destination_binary)?;
    match load(handover, &binary) {
        Err(error @ (HandoverError::DestinationFailed { .. } | HandoverError::Vmm(_)))
            if destination_binary != source_binary =>
        {
            tracing::warn!("{error}; trying {}", source_binary.display());
            let binary = handover.rundir.binary(&source_binary)?;
            Ok(load(handover, &binary)?)
        }
        loaded => Ok(loaded?),
    }
}

/// Recovers a cold reboot, a reboot by phase, or a boot after the loss of the guest's memory.
pub(crate) fn recover_cold(handover: Handover) -> Result<Recovered, RebootError> {
    let is_lost = handover.journal.operation.lost;
    if handover.journal.operation.step >= Step::Resume
        && let Some(destination) = live_destination(&handover)?
    {
        let recovered = if is_lost { Recovered::Booted } else { Recovered::Started };
        return finish(handover, destination, recovered);
    }
    handover.end_destination()?;
    if is_lost {
        return boot_after_loss(handover, None);
    }
    if let Some(source_qemu) = handover.live_source() {
        if handover.journal.operation.step == Step::Prepare {
            // In a reboot by phase, a destination QEMU may have waited with RAM of its own.
            ram::remove_waiting(&handover.state.hardware)?;
            handover.discard_destination()?;
            let failed = handover.file_error("operation.json");
            handover.journal.close(End::Undone).map_err(failed)?;
            return Ok(Recovered::Undone);
        }
        // The guest may already be shutting down.
        shut_down(source_qemu, handover.state.definition.shutdown_timeout.as_duration())?;
    }
    // Nothing is lost: the guest has shut down.
    boot_after_shutdown(handover, None)
}

/// Returns the destination QEMU, connected. `None` if that QEMU has ended.
pub(crate) fn live_destination(handover: &Handover) -> Result<Option<Destination<SpawnedStage>>, RebootError> {
    let generation = handover.journal.operation.generation;
    let Some(vmm) = live_qemu_of_generation(&handover.rundir, &handover.state, generation)? else { return Ok(None) };
    let has_ended = |vmm: &Vmm| vmm.process().wait_end(Duration::ZERO).map_err(handover.file_error("qemu"));
    match vmm.connect(vmm::START_TIMEOUT) {
        Ok(qmp) => Ok(Some(Destination::adopt(vmm, qmp)?)),
        Err(_) if has_ended(&vmm)? => Ok(None),
        Err(_) => {
            Err(HandoverError::Silent { name: handover.name().into(), pid: vmm.pid, waited: vmm::START_TIMEOUT }.into())
        }
    }
}

/// Finishes the operation with a destination QEMU that was found alive: resumes the guest in it if necessary.
fn finish(
    handover: Handover,
    destination: Destination<SpawnedStage>,
    recovered: Recovered,
) -> Result<Recovered, RebootError> {
    commit_and_settle(handover, destination.wait_for_interrupted_load()?, recovered)
}

fn commit_and_settle<R: Ram>(
    mut handover: Handover,
    loaded: Destination<LoadedStage<R>>,
    recovered: Recovered,
) -> Result<Recovered, RebootError> {
    loaded.commit(&mut handover, "resume")?.settle(handover, "record")?;
    Ok(recovered)
}

/// Boots a guest whose memory is lost. If `taps` is `None`, opens the VM's taps again. The loss is journalled first, so
/// that the next recovery reports it if this one is interrupted.
pub(crate) fn boot_after_loss(mut handover: Handover, taps: Option<Taps>) -> Result<Recovered, RebootError> {
    if let Some(source_qemu) = handover.live_source() {
        source_qemu.kill().map_err(handover.file_error("qemu"))?;
    }
    let operation = &mut handover.journal.operation;
    if let Some(saved) = operation.saved.take() {
        let _ = fs::remove_file(saved.path);
    }
    (operation.kind, operation.lost, operation.running) = (Kind::VmmCold, true, true);
    handover.advance(Step::Suspend)?;
    boot_from_disks(handover, Recovered::Booted, taps)
}

/// Boots a guest that has ended. If `taps` is `None`, opens the VM's taps again.
pub(crate) fn boot_after_shutdown(handover: Handover, taps: Option<Taps>) -> Result<Recovered, RebootError> {
    boot_from_disks(handover, Recovered::Started, taps)
}

fn boot_from_disks(handover: Handover, recovered: Recovered, taps: Option<Taps>) -> Result<Recovered, RebootError> {
    let last_binary = handover.state.vmm.as_ref().map_or(&handover.state.definition.qemu, |vmm| &vmm.binary);
    let binary = handover.rundir.binary(last_binary)?;
    // Retain the cache however the guest ended: the disk servers compare each retained block with the disk before they
    // serve it.
    boot(handover, &binary, PreviousCache::Retain, taps)?;
    Ok(recovered)
}
