//! Warm: the guest's RAM stays in a file that both QEMUs map.
//!
//! While the source QEMU runs the guest, the destination is started, compared with it, and loaded with the guest memory
//! that it cannot map (firmware, ACPI tables, video memory): the *carried* RAM blocks. Then the guest is stopped, the
//! device state is streamed from the source through this process into the destination, and the guest resumes in the
//! destination. This is RootHammer's on-memory suspend and resume (section 4.2) for QEMU.

use super::preflight::{compare_blocks, compare_cpus, compare_queues};
use super::verify::MemoryDigests;
use super::vm_generation_id::VmGenerationId;
use super::{MemoryComparison, RebootReport, Replacement, stop};
use crate::error::{Failure, RebootError};
use rekindle_handover::destination::{STAGED_RESUME_TIMEOUT, end_failed_load};
use rekindle_handover::ram::{Ram, SharedRam};
use rekindle_handover::saved_state::{DISK_TIMEOUT, StreamWriter, read_stream};
use rekindle_handover::source_state::{SourceState, StateSink, StreamForm};
use rekindle_handover::takeover::{TapTakeover, Taps};
use rekindle_handover::written_disks;
use rekindle_handover::{
    Destination, Handover, HandoverError, LoadedStage, OwnRunDir, PreparedStage, RunningStage, priority,
};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::packet::Capture;
use rekindle_memory::carried::CarriedBlocks;
use rekindle_memory::digest;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::{Hardware, Start};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::{self, RamBlock};
use rekindle_qemu::stream;
use rekindle_qemu::vhost;
use rekindle_qemu::vmm::{self, Vmm, log_tail};
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::journal::{Kind, SavedState, Step};
use rekindle_vm::timeline::Phase;
use std::path::Path;
use std::time::Duration;

/// How long the threads of an unresponsive destination QEMU may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// A destination QEMU that waits for the guest, while the source still runs it.
pub(crate) struct PreparedHandover {
    replacement: Replacement,
    handover: Handover,
    /// Dropped only when the guest runs again, in either QEMU: the kernel takes many milliseconds to close the
    /// captures.
    taps: TapTakeover,
    parts: HandoverParts,
}

struct HandoverParts {
    source_qmp: Qmp,
    destination: Destination<PreparedStage<SharedRam>>,
    source_state: SourceState,
    /// File that receives a copy of everything that is sent to the destination.
    stream: StreamWriter,
    /// Injects system calls into the destination QEMU.
    injector: Injector,
    vm_generation_id: Option<VmGenerationId>,
    resume_time: ResumeTime,
}

/// Moment at which the destination QEMU gets the command that resumes the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResumeTime {
    /// The command is staged before the load and sent during it.
    DuringLoad,
    AfterLoad,
}

impl PreparedHandover {
    /// Starts the destination QEMU and prepares as much as possible while the source runs the guest.
    ///
    /// *On failure:* the destination QEMU has ended, and the guest runs in the source as before.
    pub(crate) fn new(mut replacement: Replacement) -> Result<Self, Failure> {
        let mut handover = replacement.begin_handover(Kind::VmmWarm).map_err(Failure::unchanged)?;
        handover.pass("warm.prepare.journalled");
        match prepare_destination(&replacement, &mut handover) {
            Ok(PreparedParts { taps, parts }) => Ok(Self { replacement, handover, taps, parts }),
            Err(error) => {
                let error = with_log(&handover, "prepare", error);
                let (guest, error) = handover.abandon(error);
                Err(Failure::new(guest, error))
            }
        }
    }

    /// Stops the guest in the source QEMU and resumes it in the destination.
    pub(crate) fn hand_over(self) -> Result<CompletedHandover, Failure> {
        let Self { mut replacement, mut handover, mut taps, parts } = self;
        taps.discard_captured();
        let destination_qemu = parts.destination.vmm.clone();
        let boost = priority::boost_hand_over(Some(&replacement.source_qemu), &destination_qemu);
        // This call ends both connections to the source: QEMU serves one client at a time, and returning the guest to
        // the source opens another connection.
        let transferred = transfer_guest(&mut replacement, &mut handover, &mut taps, parts);
        drop(boost);
        match transferred {
            Ok(TransferredGuest { running, times }) => {
                let sent_captures = taps.send_again(times.stopped_host_us);
                Ok(CompletedHandover { replacement, handover, running, taps, times, _sent_captures: sent_captures })
            }
            Err(error) => {
                let error = with_log(&handover, "load the guest", error);
                let failure = fail(&replacement, handover, &destination_qemu, error);
                taps.send_again_to_source();
                Err(failure)
            }
        }
    }
}

/// A hand-over whose destination QEMU runs the guest. The source QEMU still exists; the guest is stopped in it.
pub(crate) struct CompletedHandover {
    replacement: Replacement,
    handover: Handover,
    running: Destination<RunningStage<SharedRam>>,
    /// Keeps the captures that have no frame yet: the source QEMU may still receive the first one.
    taps: TapTakeover,
    times: StopTimes,
    /// Captures that have sent their frames. Closing one takes the kernel many milliseconds, in which the next guest
    /// could be handed over.
    _sent_captures: Vec<Capture>,
}

struct StopTimes {
    stopped_host_us: u64,
    memory: Option<MemoryComparison>,
}

impl CompletedHandover {
    /// Ends the source QEMU and records the destination.
    pub(crate) fn settle(self) -> Result<RebootReport, Failure> {
        let Self { replacement, handover, running, mut taps, times, .. } = self;
        let settled = running.settle(handover, "end the old QEMU");
        let settled = settled.map_err(Failure::needs_recovery)?;
        taps.send_again(times.stopped_host_us);
        settled.recorder.write(&replacement.locked_vm.rundir);
        let report = replacement.report(&settled, times.stopped_host_us);
        Ok(RebootReport { memory: times.memory, ..report })
    }
}

/// Adds the end of the destination QEMU's log to an error of the hand-over.
fn with_log(handover: &Handover, doing: &'static str, error: RebootError) -> RebootError {
    match error {
        RebootError::Handover(error) => {
            let directory = handover.rundir.vmm(handover.journal.operation.generation);
            error.with_log(handover.name(), doing, log_tail(&directory, 10)).into()
        }
        other => other,
    }
}

/// Result of [`prepare_destination`].
struct PreparedParts {
    taps: TapTakeover,
    parts: HandoverParts,
}

/// Prepares the hand-over as far as possible while the source QEMU runs the guest: starts the destination, compares it
/// with the source, and loads the memory that it cannot map.
fn prepare_destination(replacement: &Replacement, handover: &mut Handover) -> Result<PreparedParts, RebootError> {
    let hardware = &replacement.locked_vm.state.hardware;
    let source_qemu = &replacement.source_qemu;
    disks::start(&handover.rundir, hardware).map_err(LifeError::from)?;
    let (start_taps, mut taps) = TapTakeover::prepare(hardware.tap_slots(), source_qemu.process())?;
    if hardware.has_vhost() {
        taps.expect_vhost();
    }
    taps.capture()?;
    let mut destination = Destination::spawn(handover, &replacement.environment(), Start::Incoming, start_taps)?;
    handover.recorder.step("start the new QEMU");

    let mut source_qmp = source_qemu.connect(vmm::START_TIMEOUT)?;
    if taps.has_vhost() {
        // A QEMU that cannot report it is rejected now, not in the pause.
        vhost::served_cards(&mut source_qmp)?;
    }
    let source_blocks = compare_qemus(handover.name(), &mut source_qmp, &mut destination.qmp)?;
    let mut destination = destination.prepare(SharedRam { path: hardware.ram.path.clone() })?;
    let carried = destination.stage.ram.carried_blocks(source_blocks);
    let mut stream = StreamWriter::begin(&handover.rundir)?;
    let mut sink = StateSink { feed: Some(&mut destination.stage.feed), file: Some(&mut stream) };
    let mut source_state = SourceState::prepare(source_qemu, &mut source_qmp, carried, StreamForm::Own, &mut sink)?;
    source_state.stage()?;
    // With a memory comparison, the destination gets further commands before the one that resumes the guest.
    let is_early = source_state.is_resumable_during_load() && replacement.running && !replacement.options.verify_memory;
    let resume_time = if is_early { ResumeTime::DuringLoad } else { ResumeTime::AfterLoad };
    match resume_time {
        ResumeTime::DuringLoad => destination.stage_resume()?,
        ResumeTime::AfterLoad => destination.qmp.drop_events(),
    }
    handover.recorder.step("send ahead");
    handover.pass("warm.prepare.ready");
    let process = destination.vmm.process();
    let untraceable = RebootError::file(Path::new(&format!("/proc/{}/maps", process.pid)));
    let injector = Injector::new(process).map_err(|e| untraceable(e.into()))?;
    destination.populate_heap(injector);
    let vm_generation_id = match resume_time {
        // The decision is journalled during the load.
        ResumeTime::DuringLoad => VmGenerationId::new(hardware, process).map_err(untraceable)?,
        ResumeTime::AfterLoad => None,
    };
    let parts =
        HandoverParts { source_qmp, destination, source_state, stream, injector, vm_generation_id, resume_time };
    Ok(PreparedParts { taps, parts })
}

/// Rejects a destination QEMU that is a different machine. Returns the RAM blocks of the source.
fn compare_qemus(name: &str, source: &mut Qmp, destination: &mut Qmp) -> Result<Vec<RamBlock>, RebootError> {
    let mut problems = compare_cpus(source, destination)?;
    problems.extend(compare_queues(source, destination)?);
    let source_blocks = ramblock::list(source)?;
    problems.extend(compare_blocks(&source_blocks, &ramblock::list(destination)?));
    if problems.is_empty() {
        return Ok(source_blocks);
    }
    Err(RebootError::Preflight { name: name.into(), problems })
}

struct TransferredGuest {
    running: Destination<RunningStage<SharedRam>>,
    times: StopTimes,
}

/// Transfers the guest: from the stop in the source QEMU to the resume in the destination.
fn transfer_guest(
    replacement: &mut Replacement,
    handover: &mut Handover,
    taps: &mut TapTakeover,
    parts: HandoverParts,
) -> Result<TransferredGuest, RebootError> {
    let HandoverParts {
        mut source_qmp,
        mut destination,
        mut source_state,
        mut stream,
        injector,
        vm_generation_id,
        resume_time,
    } = parts;
    let hardware = replacement.locked_vm.state.hardware.clone();
    // The next step of the journal writes it.
    handover.journal.operation.detached_queues = taps.queues_to_detach()?;
    let stopped_host_us = stop_guest(replacement, handover, &mut source_qmp)?;
    taps.check_vhost_stopped(handover.name(), &mut source_qmp)?;
    let ram_digests = match replacement.options.verify_memory {
        true => Some(digest_ram(handover, &hardware.ram.path)?),
        false => None,
    };
    // The source computes its state in the meantime.
    source_state.begin(&mut source_qmp)?;
    // No QEMU runs the guest, so the destination may get the taps. It gets them now, while it is idle; during the load
    // it is busy.
    taps.give(injector)?;
    handover.pass("warm.suspend.taps");
    let mut sink = StateSink { feed: Some(&mut destination.stage.feed), file: Some(&mut stream) };
    let small_blocks = source_state.send_blocks(&mut sink)?;
    handover.recorder.step("read blocks");
    let devices = source_state.send_devices(&mut source_qmp, Some(&mut destination.stage.feed))?;
    handover.freeze_reader_of_queues()?;
    let loading = destination.finish_feed();
    if let Some(vm_generation_id) = vm_generation_id {
        vm_generation_id.write(&devices.bytes);
    }
    handover.recorder.step("save devices");
    handover.pass("warm.suspend.saved");
    // While the destination loads, make the state durable, in case both QEMUs die.
    let saved = keep_state(handover, stream, &devices.bytes)?;

    let mut memory = None;
    let loaded = match resume_time {
        // The destination has received everything, so the decision can be made while it still loads.
        ResumeTime::DuringLoad => loading.resume_when_loaded(),
        ResumeTime::AfterLoad => {
            handover.recorder.phase(Phase::Renew);
            let mut loaded = loading.wait(handover, DISK_TIMEOUT)?;
            handover.recorder.step("load");
            if let Some(ram_digests) = ram_digests {
                let before = digest_source(handover.name(), ram_digests, small_blocks, &saved)?;
                memory = Some(before.compare(&digest_destination(&mut loaded, &hardware.ram.path)?));
                handover.recorder.step("compare memory");
            }
            loaded
        }
    };
    let step = if resume_time == ResumeTime::DuringLoad { "load and resume" } else { "resume" };
    let running = loaded.commit(handover, step)?;
    Ok(TransferredGuest { running, times: StopTimes { stopped_host_us, memory } })
}

/// Stops the guest in the source QEMU. Returns the time of the stop, in µs since 1970.
fn stop_guest(
    replacement: &mut Replacement,
    handover: &mut Handover,
    source_qmp: &mut Qmp,
) -> Result<u64, RebootError> {
    written_disks::write_back(replacement.source_qemu.process());
    replacement.hold_run_state()?;
    replacement.refuse_stopped_disk_servers()?;
    handover.advance(Step::Suspend)?;
    handover.pass("warm.suspend.journalled");
    handover.recorder.phase(Phase::Suspend);
    let boost = priority::boost_stopping_processors(Some(&replacement.source_qemu));
    let stopped_host_us = stop(source_qmp, replacement.running)?;
    drop(boost);
    handover.recorder.step("stop");
    handover.pass("warm.suspend.stopped");
    Ok(stopped_host_us)
}

fn digest_ram(handover: &mut Handover, ram: &Path) -> Result<Vec<u64>, RebootError> {
    let digests = digest::file_pages(ram).map_err(RebootError::file(ram))?;
    handover.recorder.step("digest memory");
    Ok(digests)
}

/// Makes the state of the stopped guest durable and journals it.
fn keep_state(handover: &mut Handover, mut stream: StreamWriter, devices: &[u8]) -> Result<SavedState, RebootError> {
    stream.write(devices)?;
    let saved = stream.finish()?;
    handover.journal.operation.saved = Some(saved.clone());
    handover.advance(Step::Saved)?;
    handover.recorder.step("keep the state");
    handover.pass("warm.suspend.written");
    Ok(saved)
}

/// Combines the digests of the source's RAM with those of its small blocks, as they were read or else as they were
/// `saved`.
fn digest_source(
    name: &str,
    ram_digests: Vec<u64>,
    small_blocks: Option<CarriedBlocks>,
    saved: &SavedState,
) -> Result<MemoryDigests, HandoverError> {
    let small_blocks = match small_blocks {
        Some(blocks) => Some(blocks),
        None => stream::ram_blocks(&read_stream(name, saved)?).ok().map(CarriedBlocks::from_stream),
    };
    Ok(MemoryDigests::new(ram_digests, small_blocks.as_ref()))
}

fn digest_destination(
    loaded: &mut Destination<LoadedStage<SharedRam>>,
    ram: &Path,
) -> Result<MemoryDigests, RebootError> {
    let blocks = loaded.stage.ram.carried_blocks(ramblock::list(&mut loaded.qmp)?);
    let small_blocks = CarriedBlocks::read(loaded.vmm.process(), &blocks).ok();
    let ram_digests = digest::file_pages(ram).map_err(RebootError::file(ram))?;
    Ok(MemoryDigests::new(ram_digests, small_blocks.as_ref()))
}

/// Starts a destination QEMU and loads a saved stream into it. The RAM file must be in place, and no other QEMU may run
/// the guest.
pub(crate) fn load(
    handover: &mut Handover,
    hardware: &Hardware,
    binary: &Binary,
    saved: &SavedState,
    taps: Taps,
) -> Result<Destination<LoadedStage<SharedRam>>, HandoverError> {
    let rundir = handover.rundir.clone();
    let stream = read_stream(rundir.name(), saved)?;
    disks::start(&rundir, hardware).map_err(LifeError::from)?;
    let environment = OwnRunDir { rundir: &rundir, hardware, binary };
    let spawned = Destination::spawn(handover, &environment, Start::Incoming, taps);
    let destination = spawned.map_err(|e| end_failed_load(handover, e))?;
    destination.load_stream(handover, &stream, SharedRam { path: hardware.ram.path.clone() })
}

/// Handles a failure of the hand-over. Resumes the guest in the source if it cannot have run in the destination: before
/// the decision for the destination, and after it if the destination has not written to the guest's RAM.
fn fail(replacement: &Replacement, handover: Handover, destination_qemu: &Vmm, error: RebootError) -> Failure {
    let name = replacement.name();
    if handover.journal.operation.step >= Step::Resume {
        let log = log_tail(&destination_qemu.directory(), 10);
        let is_silent = matches!(&error, RebootError::Handover(error) if error.is_silence());
        if is_silent && destination_qemu.is_alive() && !stop_unstarted(&handover, destination_qemu) {
            tracing::warn!("{name}: {error}");
            let (pid, waited) = (destination_qemu.pid, STAGED_RESUME_TIMEOUT);
            return Failure::needs_recovery(HandoverError::Silent { name: name.into(), pid, waited });
        }
        let is_killed = destination_qemu.kill().is_ok();
        if !is_killed || !handover.has_not_run() {
            return Failure::needs_recovery(HandoverError::DiedRunning { name: name.into(), log });
        }
    }
    let (guest, error) = handover.abandon(error);
    Failure::new(guest, error)
}

/// Stops the threads of a silent destination QEMU: from then on the RAM file shows whether it has run the guest.
/// Returns
/// `true` if it has not. Otherwise lets it continue, because it may run the guest.
fn stop_unstarted(handover: &Handover, destination_qemu: &Vmm) -> bool {
    let process = destination_qemu.process();
    if process.stop_fully(STOP_TIMEOUT).is_ok_and(|is_stopped| is_stopped && handover.has_not_run()) {
        return true;
    }
    let _ = process.resume();
    false
}
