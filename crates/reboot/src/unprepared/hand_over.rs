//! The hand-over: the guest moves from the source to the destination, while no other program can use the source's monitor.

use super::recheck::Baseline;
use super::start::WaitingTaps;
use super::{UnpreparedError, source};
use crate::error::RebootError;
use rekindle_handover::ram::Ram;
use rekindle_handover::ram_transfer_error::RamTransferError;
use rekindle_handover::source_state::{SourceState, StateSink, StreamForm};
use rekindle_handover::unprepared_ram::UnpreparedRam;
use rekindle_handover::{Destination, Handover, PreparedStage, RunningStage, priority, written_disks};
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::guest;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::stream;
use rekindle_vm::journal::Step;
use rekindle_vm::timeline::Phase;
use std::time::Duration;

/// How long the destination may take to load the devices, in the pause. It usually takes milliseconds.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The guest runs in the destination. The source is stopped.
pub(crate) struct Transferred {
    pub running: Destination<RunningStage<UnpreparedRam>>,
    pub stopped_host_us: u64,
}

/// A source that is still the guest's QEMU as it was inspected. Its guest runs. Little of its RAM is left to copy, unless it
/// is moved in place.
pub(crate) struct Approached {
    qmp: Qmp,
    state: SourceState,
}

/// Does what must wait until no other program can use the source's monitor, `source_qmp`, and can be done while the guest runs.
pub(crate) fn approach(
    handover: &mut Handover,
    baseline: &Baseline,
    mut source_qmp: Qmp,
    destination: &mut Destination<PreparedStage<UnpreparedRam>>,
    taps: &mut WaitingTaps,
) -> Result<Approached, RebootError> {
    let lost = || UnpreparedError::Ended { name: handover.name().into() };
    let source = handover.source().cloned().ok_or_else(lost)?;
    baseline.check_unchanged(&mut source_qmp)?;
    handover.recorder.step("check the source");
    written_disks::write_back(source.process());
    handover.recorder.step("write disks back");
    let ram = &mut destination.stage.ram;
    ram.copy_while_running(&mut source_qmp).map_err(UnpreparedError::from)?;
    // The next step of the journal writes it.
    ram.note_blocks(&mut handover.journal.operation);
    // Not earlier: every frame that is captured costs time and memory.
    taps.takeover.capture()?;
    handover.journal.operation.detached_queues = taps.takeover.queues_to_detach()?;
    // Not from QEMU's own list: QEMU 7.2 does not report the addresses of its blocks.
    let blocks = GuestRam::of(&mut source_qmp, source.process())
        .map_err(RamTransferError::from)
        .map_err(UnpreparedError::from)?;
    let carried = ram.carried_blocks(blocks.blocks().iter().map(|block| block.info.clone()).collect());
    // No file: without the source's private RAM, the state of the devices is useless.
    let mut sink = StateSink { feed: Some(&mut destination.stage.feed), file: None };
    let form = StreamForm::Foreign { machine: baseline.adopted.machine.clone() };
    let state = SourceState::prepare(&source, &mut source_qmp, carried, form, &mut sink)?;
    handover.recorder.step("copy memory");
    Ok(Approached { qmp: source_qmp, state })
}

/// Moves the guest from the source to the destination.
pub(crate) fn hand_over(
    handover: &mut Handover,
    source: Approached,
    mut destination: Destination<PreparedStage<UnpreparedRam>>,
    taps: &mut WaitingTaps,
) -> Result<Transferred, RebootError> {
    let Approached { qmp: mut source_qmp, state: mut source_state } = source;
    handover.advance(Step::Suspend)?;
    handover.pass("replace.suspend.journalled");
    handover.recorder.phase(Phase::Suspend);
    let stopped_host_us = {
        let _boost = priority::boost_stopping_processors(handover.source());
        guest::stop(&mut source_qmp)?
    };
    handover.pass("replace.suspend.stopped");
    handover.recorder.step("stop");
    if taps.takeover.has_vhost() {
        taps.takeover.check_vhost_stopped(handover.name(), &mut source_qmp)?;
        handover.recorder.step("check vhost-net");
    }
    source_state.begin(&mut source_qmp)?;
    // No QEMU runs the guest. When it loads the devices, the destination sets up its taps.
    taps.takeover.give(taps.injector)?;
    handover.pass("replace.suspend.taps");
    let mut sink = StateSink { feed: Some(&mut destination.stage.feed), file: None };
    source_state.send_blocks(&mut sink)?;
    let devices = source_state.send_devices(&mut source_qmp, None)?.bytes;
    handover.recorder.step("save devices");
    // The last of the guest's requests to its disks ended when it was stopped, so its RAM does not change any more.
    let resumed = |_| UnpreparedError::Changed { name: handover.name().into(), what: "its guest was resumed".into() };
    let mut stopped = Stopped::check(&mut source_qmp).map_err(resumed)?;
    let source = handover.source().cloned().ok_or_else(|| UnpreparedError::Ended { name: handover.name().into() })?;
    destination.stage.ram.complete(&source, &mut stopped).map_err(UnpreparedError::from)?;
    handover.recorder.step("copy the rest");
    // Not earlier: a destination that loads a virtio device compares its state with the rings in RAM.
    destination.stage.feed.write(&devices)?;
    destination.stage.feed.write(&stream::EMPTY_DESCRIPTION)?;
    handover.pass("replace.suspend.copied");
    let loading = destination.finish_feed();
    // The source is not needed any more, so it is frozen while the destination loads.
    source::freeze(handover)?;
    handover.recorder.step("freeze");
    handover.pass("replace.suspend.frozen");
    let mut loaded = loading.wait(handover, LOAD_TIMEOUT)?;
    handover.recorder.step("load");
    handover.pass("replace.suspend.loaded");
    if handover.journal.operation.moved_ram.is_some() {
        // A destination that ends after the decision cannot be shown not to have run the guest.
        guest::run_state(&mut loaded.qmp)?;
    }
    let running = loaded.commit(handover, "resume")?;
    // The source is frozen, so that it has received all that it will ever receive.
    taps.takeover.send_again(stopped_host_us);
    handover.pass("replace.resume.resumed");
    Ok(Transferred { running, stopped_host_us })
}
