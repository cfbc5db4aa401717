//! Warm: the guest's RAM stays in a file that both QEMUs map.
//!
//! While the source QEMU runs the guest, the destination is started, compared with it, and loaded with the guest memory
//! that it cannot map (firmware, ACPI tables, video memory). Then the guest is stopped, the device state is streamed
//! from the source through this process into the destination, and the guest resumes there. This is RootHammer's
//! on-memory suspend and resume (section 4.2) for QEMU.

use super::handover::StreamWriter;
use super::preflight::compare_cpus;
use super::verify::MemoryDigests;
use super::vm_generation_id::VmGenerationId;
use super::{
    Failure, GuestStatus, MemoryComparison, Problem, RebootError, RebootReport, Replacement, handover, resume, stop,
    switch, wait_resumed,
};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory::populate_heap;
use rekindle_kernel::packet::Capture;
use rekindle_kernel::sched::{self, PriorityBoost, Rank};
use rekindle_kernel::stand_in::StandIn;
use rekindle_memory::carried::CarriedBlocks;
use rekindle_memory::digest;
use rekindle_qemu::command::Start;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::ramblock::{self, MAIN_RAM, RamBlock};
use rekindle_qemu::stream::{self, RamSection};
use rekindle_qemu::transfer::{self, Feed, wait_loaded};
use rekindle_qemu::vmm::{self, Vmm, log_tail};
use rekindle_vm::error::LifeError;
use rekindle_vm::fault;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::timeline::Phase;
use rekindle_vm::{disks, network};
use serde_json::Value;
use std::io;
use std::time::Duration;

/// How long the destination QEMU may take from `cont` to its `RESUME`: it may still be loading.
const RESUME_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the threads of an unresponsive destination may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// A destination QEMU that waits for the guest, while the source still runs it.
pub(crate) struct PreparedHandover {
    replacement: Replacement,
    journal: Journal,
    parts: HandoverParts,
}

struct HandoverParts {
    source_qmp: Qmp,
    destination_qemu: Vmm,
    destination_qmp: Qmp,
    transfer: StateTransfer,
    /// See [`network::captures`].
    captures: Vec<Capture>,
    /// See [`network::Duplicates::stand_ins`].
    stand_ins: Vec<StandIn>,
}

/// The path of the device state from the source QEMU to the destination.
struct StateTransfer {
    tap: transfer::Tap,
    /// A second connection to the source QEMU, on which the save command is staged. `None` if another client has it.
    save_qmp: Option<Qmp>,
    feed: Feed,
    /// Receives a copy of everything that the feed is given.
    kept: StreamWriter,
    source: BlockSource,
    /// Whether `cont` is staged in the destination QEMU.
    staged_cont: bool,
    /// Of the destination QEMU.
    injector: Injector,
    generation: Option<VmGenerationId>,
}

/// Where the RAM blocks come from that the two QEMUs do not share.
enum BlockSource {
    /// They are read from the source QEMU's memory. `ahead` was sent while the guest ran.
    QemuMemory { blocks: Vec<RamBlock>, ahead: CarriedBlocks, section: RamSection },
    /// They are part of the stream that the source QEMU writes.
    Stream,
}

/// When the guest was stopped and resumed (host clock, µs), and the result of the memory comparison.
struct HandoverTimes {
    stopped: u64,
    resumed: u64,
    memory: Option<MemoryComparison>,
}

impl PreparedHandover {
    /// Starts the destination QEMU and prepares as much as possible while the source runs the guest.
    ///
    /// *On failure:* the destination QEMU has ended and the source is untouched.
    pub(crate) fn new(mut replacement: Replacement) -> Result<Self, Failure> {
        let file = replacement.file_error("operation.json");
        let unchanged = |error| Failure::new(GuestStatus::Unchanged, error);
        let generation = replacement.held.state.generation + 1;
        let mut journal = replacement.open_journal(Kind::VmmWarm).map_err(unchanged)?;
        fault::point("warm.prepare.journalled", Some(&replacement.source_qemu), None);
        match prepare_destination(&mut replacement, &mut journal) {
            Ok(parts) => Ok(Self { replacement, journal, parts }),
            Err(error) => {
                let rundir = &replacement.held.rundir;
                let error = with_log(rundir.name(), "prepare", error, &log_tail(&rundir.vmm(generation), 10));
                if !replacement.source_qemu.is_alive() {
                    return Err(switch::abandon(rundir, &replacement.source_qemu, journal, replacement.running, error));
                }
                let undone = switch::end_generation(rundir, generation).and_then(|()| {
                    let _ = std::fs::remove_dir_all(rundir.vmm(generation).0);
                    handover::remove_stream(rundir);
                    journal.close().map_err(&file)
                });
                match undone {
                    Ok(()) => Err(unchanged(error)),
                    Err(undoing) => {
                        tracing::error!("cannot undo the preparation of the destination QEMU: {undoing}");
                        Err(Failure::new(GuestStatus::NeedsRecovery, error))
                    }
                }
            }
        }
    }

    /// Stops the guest in the source QEMU and resumes it in the destination.
    pub(crate) fn hand_over(self) -> Result<CompletedHandover, Failure> {
        let Self { mut replacement, mut journal, parts } = self;
        let HandoverParts { mut source_qmp, destination_qemu, mut destination_qmp, transfer, captures, stand_ins } =
            parts;
        for capture in &captures {
            // Discard frames captured before the hand-over.
            let _ = capture.frames();
        }
        let boost = raise_priority(&replacement.source_qemu, &destination_qemu);
        let times = hand_over(
            &mut replacement,
            &mut journal,
            transfer,
            &stand_ins,
            &mut source_qmp,
            &destination_qemu,
            &mut destination_qmp,
        );
        drop(boost);
        // QEMU serves one client at a time, and a return to the source connects anew.
        drop(source_qmp);
        match times {
            Ok(times) => {
                fault::point("warm.resume.resumed", Some(&replacement.source_qemu), Some(&destination_qemu));
                let (spent, waiting) =
                    captures.into_iter().partition(|capture| network::send_again(capture, times.stopped));
                Ok(CompletedHandover {
                    replacement,
                    journal,
                    destination_qemu,
                    destination_qmp,
                    times,
                    waiting,
                    _spent: spent,
                    _stand_ins: stand_ins,
                })
            }
            Err(error) => {
                let rundir = &replacement.held.rundir;
                let error =
                    with_log(rundir.name(), "load the guest", error, &log_tail(&destination_qemu.directory(), 10));
                Err(if journal.operation.step < Step::Resume {
                    switch::abandon(rundir, &replacement.source_qemu, journal, replacement.running, error)
                } else {
                    failed_at_resume(&replacement, journal, &destination_qemu, error)
                })
            }
        }
    }
}

/// A hand-over whose destination QEMU runs the guest; the source is still there, stopped.
pub(crate) struct CompletedHandover {
    replacement: Replacement,
    journal: Journal,
    destination_qemu: Vmm,
    destination_qmp: Qmp,
    times: HandoverTimes,
    /// Captures that have no frame yet: the source QEMU may still receive the first one.
    waiting: Vec<Capture>,
    /// The other captures. Closing one takes the kernel many milliseconds, in which the next guest could be handed
    /// over.
    _spent: Vec<Capture>,
    _stand_ins: Vec<StandIn>,
}

impl CompletedHandover {
    /// Ends the source QEMU and records the destination.
    pub(crate) fn settle(self) -> Result<RebootReport, Failure> {
        let Self { mut replacement, journal, destination_qemu, destination_qmp, times, waiting, .. } = self;
        settle(&mut replacement, journal, &destination_qemu, destination_qmp, times, &waiting)
            .map_err(|error| Failure::new(GuestStatus::NeedsRecovery, error))
    }
}

/// Adds the end of the destination's log to its failure.
fn with_log(name: &str, doing: &'static str, error: RebootError, log: &str) -> RebootError {
    match error {
        RebootError::Qmp(_) | RebootError::Transfer(_) if !log.is_empty() => {
            RebootError::DestinationFailed { name: name.into(), doing, log: log.into(), source: Box::new(error) }
        }
        other => other,
    }
}

/// Does everything that can be done while the source QEMU runs the guest.
fn prepare_destination(replacement: &mut Replacement, journal: &mut Journal) -> Result<HandoverParts, RebootError> {
    let file = replacement.file_error("operation.json");
    let rundir = replacement.held.rundir.clone();
    let hardware = &replacement.held.state.hardware;
    let source_qemu = replacement.source_qemu.clone();
    disks::start(&rundir, hardware).map_err(LifeError::from)?;
    let directory = rundir.create_vmm(journal.operation.generation).map_err(&file)?;
    let taps = network::duplicate(hardware, source_qemu.process())?;
    let captures = network::captures(hardware)?;
    let arguments = hardware.arguments(&directory, &rundir.console_log(), Start::Incoming, replacement.binary.syntax);
    let destination_qemu = Vmm::spawn(&replacement.binary.path, &arguments, &directory, taps.fds)?;
    fault::point("warm.prepare.spawned", Some(&source_qemu), Some(&destination_qemu));
    journal.operation.to = Some(destination_qemu.clone());
    journal.write().map_err(&file)?;
    fault::point("warm.prepare.recorded", Some(&source_qemu), Some(&destination_qemu));
    let mut destination_qmp = destination_qemu.connect(vmm::START)?;
    replacement.recorder.step("start the new QEMU");

    let mut source_qmp = source_qemu.connect(vmm::START)?;
    let mut problems = compare_cpus(&mut source_qmp, &mut destination_qmp)?;
    let blocks = ramblock::list(&mut source_qmp)?;
    let destination_blocks = ramblock::list(&mut destination_qmp)?;
    problems.extend(compare_blocks(&blocks, &destination_blocks));
    problems.extend(compare_ram(&blocks, &destination_blocks));
    if !problems.is_empty() {
        return Err(RebootError::Preflight { name: rundir.name().into(), problems });
    }
    let commands: Vec<Value> = source_qmp.execute("query-commands", ())?;
    let in_one = commands.iter().any(|command| command["name"] == "xen-save-devices-state");
    let readable = blocks.iter().all(|block| block.address.is_some());

    let mut feed = Feed::open(&mut destination_qmp, handover::WARM_CAPABILITIES)?;
    let mut kept = StreamWriter::begin(&rundir)?;
    let (tap, source) = if in_one && readable {
        let ahead =
            CarriedBlocks::read(source_qemu.process(), &blocks).map_err(|source| unreadable(&source_qemu, source))?;
        let mut part = stream::HEADER.to_vec();
        let section = put_blocks(&mut part, &ahead);
        feed.write(&part)?;
        kept.write(&part)?;
        (transfer::Tap::devices(&source_qemu.directory())?, BlockSource::QemuMemory { blocks, ahead, section })
    } else {
        (transfer::Tap::migration(&mut source_qmp)?, BlockSource::Stream)
    };
    let mut save_qmp = match source {
        BlockSource::QemuMemory { .. } => {
            Qmp::connect(&source_qemu.directory().watch(), Duration::from_millis(100)).ok()
        }
        // A descriptor that was passed to one monitor is unknown to the other.
        BlockSource::Stream => None,
    };
    if let Some(qmp) = &mut save_qmp {
        tap.stage(qmp)?;
    }
    destination_qmp.drop_events();
    // Not with a stream of `migrate`: it states that the guest was stopped, which overrides a `cont` during the load.
    // Not with a memory comparison either, which sends further commands to the destination before `cont`.
    let early = matches!(source, BlockSource::QemuMemory { .. }) && !replacement.options.verify_memory;
    let staged_cont = early && replacement.running;
    if staged_cont {
        destination_qmp.stage("cont", ())?;
    }
    replacement.recorder.step("send ahead");
    fault::point("warm.prepare.ready", Some(&source_qemu), Some(&destination_qemu));
    let unready = |source| RebootError::File { path: format!("/proc/{}/maps", destination_qemu.pid).into(), source };
    let injector = Injector::new(destination_qemu.process()).map_err(|e| unready(e.into()))?;
    // QEMU has returned the freed pages of its heap to the kernel; each would cost a page fault during the load.
    if let Err(e) = populate_heap(injector) {
        tracing::debug!("cannot populate the destination QEMU's heap in advance: {e}");
    }
    // Only needed if the decision is journalled during the load.
    let generation =
        if staged_cont { VmGenerationId::new(hardware, destination_qemu.process()).map_err(unready)? } else { None };
    let transfer = StateTransfer { tap, save_qmp, feed, kept, source, staged_cont, injector, generation };
    Ok(HandoverParts { source_qmp, destination_qemu, destination_qmp, transfer, captures, stand_ins: taps.stand_ins })
}

fn unreadable(source_qemu: &Vmm, source: io::Error) -> RebootError {
    RebootError::File { path: format!("/proc/{}/mem", source_qemu.pid).into(), source }
}

/// Reports RAM blocks that only one side has. Sizes may differ: QEMU resizes blocks that can be resized.
fn compare_blocks(source: &[RamBlock], destination: &[RamBlock]) -> Vec<Problem> {
    let is_missing = |these: &[RamBlock], id: &str| !these.iter().any(|block| block.id == id);
    let removed = source.iter().filter(|block| is_missing(destination, &block.id));
    let added = destination.iter().filter(|block| is_missing(source, &block.id));
    removed
        .map(|block| Problem(format!("the destination QEMU has no RAM block {}: it is a different machine", block.id)))
        .chain(
            added.map(|block| {
                Problem(format!("the source QEMU has no RAM block {}: it is a different machine", block.id))
            }),
        )
        .collect()
}

/// Reports a different size of the main RAM, which both map. Other blocks can be resized.
fn compare_ram(source: &[RamBlock], destination: &[RamBlock]) -> Option<Problem> {
    let size = |blocks: &[RamBlock]| blocks.iter().find(|block| block.id == MAIN_RAM).map(|block| block.used);
    let (source, destination) = (size(source)?, size(destination)?);
    (source != destination).then(|| {
        Problem(format!(
            "the destination QEMU has {destination} bytes of RAM, but the source has {source}: it is a different machine"
        ))
    })
}

pub(crate) fn put_blocks(out: &mut Vec<u8>, carried: &CarriedBlocks) -> RamSection {
    let mut section = RamSection::start(out, carried.sizes());
    for block in &carried.blocks {
        for (offset, page) in block.pages() {
            section.page(out, &block.id, offset, page);
        }
    }
    section
}

/// Raises the priority of the threads that the stopped guest waits for: the main and monitor threads of both QEMUs and,
/// to a lower rank, the destination's virtual processors, which load their registers. Without it they would wait for
/// other guests, and for other work of the two QEMUs.
fn raise_priority(source_qemu: &Vmm, destination_qemu: &Vmm) -> PriorityBoost {
    let mut boost = PriorityBoost::default();
    let rank = |name: &str| [sched::MAIN, "IO mon_iothread"].contains(&name).then_some(Rank::First);
    let destination_rank = |name: &str| rank(name).or_else(|| is_processor(name).then_some(Rank::Third));
    let asked = boost
        .threads_of(source_qemu.process(), rank)
        .and_then(|()| boost.threads_of(destination_qemu.process(), destination_rank));
    if let Err(e) = asked {
        tracing::debug!("cannot raise the priority of the hand-over: {e}");
    }
    boost
}

/// Returns whether a thread of this name is a virtual processor.
fn is_processor(name: &str) -> bool {
    name.starts_with("CPU ")
}

/// Hands the guest over: from the stop in the source QEMU to the resume in the destination.
fn hand_over(
    replacement: &mut Replacement,
    journal: &mut Journal,
    transfer: StateTransfer,
    stand_ins: &[StandIn],
    source_qmp: &mut Qmp,
    destination_qemu: &Vmm,
    destination_qmp: &mut Qmp,
) -> Result<HandoverTimes, RebootError> {
    let StateTransfer { tap, mut save_qmp, mut feed, mut kept, source, staged_cont, injector, generation } = transfer;
    let file = replacement.file_error("operation.json");
    let source_qemu = replacement.source_qemu.clone();
    let ram = replacement.held.state.hardware.ram.path.clone();
    let points = |name| fault::point(name, Some(&source_qemu), Some(destination_qemu));
    let ram_error = |source| RebootError::File { path: ram.clone(), source };

    replacement.hold_run_state()?;
    journal.advance(Step::Suspend).map_err(&file)?;
    points("warm.suspend.journalled");
    replacement.recorder.phase(Phase::Suspend);
    // The guest's virtual processors must be scheduled on host processors to be stopped. Only for that moment: if this
    // process were killed during it, they would preempt all other threads until `recover`.
    let mut processor_priority = PriorityBoost::default();
    let _ = processor_priority.threads_of(source_qemu.process(), |name| is_processor(name).then_some(Rank::Second));
    let stopped = stop(source_qmp, replacement.running)?;
    drop(processor_priority);
    replacement.recorder.step("stop");
    points("warm.suspend.stopped");

    let mut before = None;
    if replacement.options.verify_memory {
        before = Some(digest::file_pages(&ram).map_err(ram_error)?);
        replacement.recorder.step("digest memory");
    }

    // The source QEMU computes its state in the meantime.
    let staged = save_qmp.is_some();
    let save_qmp = save_qmp.as_mut().unwrap_or(source_qmp);
    tap.begin(save_qmp, staged)?;
    // No QEMU runs the guest: the destination may have the taps. It is idle now, and is not during the load.
    let failed = |source| RebootError::File { path: format!("/proc/{}/fd", destination_qemu.pid).into(), source };
    network::replace_stand_ins(injector, &replacement.held.state.hardware, stand_ins).map_err(failed)?;
    points("warm.suspend.taps");
    let mut devices = Vec::with_capacity(1 << 20);
    let mut carried = None;
    if let BlockSource::QemuMemory { blocks, ahead, mut section } = source {
        let now =
            CarriedBlocks::read(source_qemu.process(), &blocks).map_err(|source| unreadable(&source_qemu, source))?;
        let moved = || {
            unreadable(&source_qemu, io::Error::other("a RAM block changed its size during the hand-over; try again"))
        };
        let mut part = Vec::new();
        for (block, offset, page) in now.changes_since(&ahead).ok_or_else(moved)? {
            section.page(&mut part, block, offset, page);
        }
        section.end(&mut part);
        feed.write(&part)?;
        kept.write(&part)?;
        carried = Some(now);
    }
    replacement.recorder.step("read blocks");
    // If blocks were sent in advance, the destination has received a header already.
    let mut skip = if carried.is_some() { stream::HEADER.len() } else { 0 };
    tap.drain(save_qmp, |part| {
        let skipped = skip.min(part.len());
        skip -= skipped;
        let part = part.get(skipped..).unwrap_or_default();
        devices.extend(part);
        feed.write(part)
    })?;
    drop(feed);
    if let Some(generation) = generation {
        generation.write(&devices);
    }
    replacement.recorder.step("save devices");
    points("warm.suspend.saved");
    // While the destination loads, its state is made durable, in case both QEMUs die.
    if devices.last() != Some(&stream::END_OF_STREAM) {
        return Err(unreadable(&source_qemu, io::Error::other("the saved device state is truncated")));
    }
    kept.write(&devices)?;
    let saved = kept.finish()?;
    journal.operation.saved = Some(saved.clone());
    journal.advance(Step::Saved).map_err(&file)?;
    replacement.recorder.step("keep the state");
    points("warm.suspend.written");

    let mut memory = None;
    if !staged_cont {
        replacement.recorder.phase(Phase::Renew);
        wait_loaded(destination_qmp, handover::LOAD_TIMEOUT)?;
        replacement.recorder.step("load");
        if let Some(pages) = before {
            if carried.is_none() {
                let whole = handover::read_stream(replacement.name(), &saved)?;
                carried = stream::ram_blocks(&whole).ok().map(CarriedBlocks::from_stream);
            }
            let before = MemoryDigests::new(pages, carried.as_ref());
            let blocks = ramblock::list(destination_qmp)?;
            let carried = CarriedBlocks::read(destination_qemu.process(), &blocks).ok();
            let after = MemoryDigests::new(digest::file_pages(&ram).map_err(ram_error)?, carried.as_ref());
            memory = Some(before.compare(&after));
            replacement.recorder.step("compare memory");
        }
    }

    // The destination has everything, so the decision can be made while it still loads: a staged `cont` resumes the
    // guest at the end of a successful load, and a failed load ends the destination before it has run the guest.
    replacement.recorder.phase(Phase::Resume);
    journal.operation.untouched_since_ns = handover::mark_ram(&ram);
    journal.advance(Step::Resume).map_err(&file)?;
    replacement.recorder.step("decide");
    points("warm.resume.journalled");
    let resumed = if staged_cont {
        destination_qmp.fire("cont")?;
        destination_qmp.reply::<Value>("cont")?;
        wait_resumed(destination_qmp, RESUME_TIMEOUT)?
    } else {
        resume(destination_qmp, replacement.running)?
    };
    replacement.recorder.step(if staged_cont { "load and resume" } else { "resume" });
    Ok(HandoverTimes { stopped, resumed, memory })
}

/// After the resume: ends the source QEMU and records the destination.
fn settle(
    replacement: &mut Replacement,
    mut journal: Journal,
    destination_qemu: &Vmm,
    mut destination_qmp: Qmp,
    times: HandoverTimes,
    waiting: &[Capture],
) -> Result<RebootReport, RebootError> {
    let rundir = replacement.held.rundir.clone();
    replacement.recorder.phase(Phase::Settle);
    // The guest was seen to resume: from here on its old state is obsolete, whatever the RAM file's mark shows.
    journal.operation.untouched_since_ns = None;
    journal.advance(Step::Settle).map_err(replacement.file_error("operation.json"))?;
    fault::point("warm.settle.journalled", Some(&replacement.source_qemu), Some(destination_qemu));
    if !destination_qemu.is_alive() {
        let log = log_tail(&destination_qemu.directory(), 10);
        return Err(RebootError::DiedRunning { name: rundir.name().into(), log });
    }
    let state = replacement.held.state.clone();
    let faults = Some(("warm.settle.old-gone", "warm.settle.recorded"));
    let state = switch::settle(
        &rundir,
        state,
        Some(&replacement.source_qemu),
        destination_qemu,
        &destination_qmp,
        journal,
        faults,
    )?;
    for capture in waiting {
        network::send_again(capture, times.stopped);
    }
    network::forward_ports(&mut destination_qmp, &state.hardware);
    replacement.recorder.step("end the old QEMU");
    replacement.recorder.write(&rundir);
    Ok(replacement.report(destination_qemu, &state, (times.stopped, times.resumed), times.memory))
}

/// Handles a failure of the destination between the decision and its `RESUME`, which was not seen. If it has not
/// written to the guest's RAM either, the guest has not run in it, and resumes in the source.
fn failed_at_resume(
    replacement: &Replacement,
    journal: Journal,
    destination_qemu: &Vmm,
    error: RebootError,
) -> Failure {
    let rundir = &replacement.held.rundir;
    let log = log_tail(&destination_qemu.directory(), 10);
    let untouched =
        || handover::is_untouched(&replacement.held.state.hardware.ram.path, journal.operation.untouched_since_ns);
    if is_silent(&error) && destination_qemu.is_alive() {
        // It may run the guest. Once its threads are stopped, the RAM file shows whether it has.
        let process = destination_qemu.process();
        if !process.stop_fully(STOP_TIMEOUT).is_ok_and(|stopped| stopped && untouched()) {
            let _ = process.resume();
            tracing::warn!("{}: {error}", rundir.name());
            let error =
                RebootError::Silent { name: rundir.name().into(), pid: destination_qemu.pid, waited: RESUME_TIMEOUT };
            return Failure::new(GuestStatus::NeedsRecovery, error);
        }
    }
    let ended = destination_qemu.kill();
    if ended.is_ok() && untouched() {
        return switch::abandon(rundir, &replacement.source_qemu, journal, replacement.running, error);
    }
    let error = RebootError::DiedRunning { name: rundir.name().into(), log };
    Failure::new(GuestStatus::NeedsRecovery, error)
}

/// Returns whether QEMU gave no answer, as opposed to an error or a closed socket.
fn is_silent(error: &RebootError) -> bool {
    let error = match error {
        RebootError::DestinationFailed { source, .. } => source,
        other => other,
    };
    matches!(error, RebootError::Qmp(QmpError::Timeout { .. } | QmpError::NoGreeting { .. } | QmpError::TooLong { .. }))
}
