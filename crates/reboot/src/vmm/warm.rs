//! Warm: the guest's RAM stays where it is, in a file that both QEMUs map.
//!
//! While the old QEMU runs the guest, a new one is started, compared, and already fed with what of the guest's memory
//! it cannot map (firmware, ACPI tables, video memory). Then: stop, save the device state through this process into
//! the new QEMU as it comes, continue there. RootHammer's on-memory suspend and resume (section 4.2) for QEMU.

use super::generation::Generation;
use super::handover::Keeper;
use super::preflight::compare_cpus;
use super::verify::Snapshot;
use super::{
    Change, Failure, Left, Memory, Problem, RebootError, Report, handover, resume, stop, switch, wait_resumed,
};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory::populate_heap;
use rekindle_kernel::packet::Capture;
use rekindle_kernel::sched::{self, PriorityBoost, Rank};
use rekindle_kernel::stand_in::StandIn;
use rekindle_memory::carried::Carried;
use rekindle_memory::digest;
use rekindle_qemu::command::Start;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::ramblock::{self, MAIN_RAM, RamBlock};
use rekindle_qemu::stream::{self, RamSection};
use rekindle_qemu::transfer::{self, Feed, wait_loaded};
use rekindle_qemu::vmm::{self, Vmm, log_tail};
use rekindle_vm::fault;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::life::LifeError;
use rekindle_vm::timeline::Phase;
use rekindle_vm::{disks, network};
use serde_json::Value;
use std::io;
use std::time::Duration;

/// How long the new QEMU may take from `cont` to its `RESUME`: it may still load.
const RESUMED: Duration = Duration::from_secs(60);
/// How long its threads may take to stop when it does not answer.
const STOPPED: Duration = Duration::from_secs(2);

/// A new QEMU that waits for the guest, beside the old one that still runs it.
pub(crate) struct Prepared {
    change: Change,
    journal: Journal,
    ready: Ready,
}

struct Ready {
    old_qmp: Qmp,
    new: Vmm,
    new_qmp: Qmp,
    link: Link,
    /// See [`network::captures`].
    captures: Vec<Capture>,
    /// See [`network::Duplicates::stand_ins`].
    stand_ins: Vec<StandIn>,
}

/// The way of the state from the old QEMU to the new one.
struct Link {
    tap: transfer::Tap,
    /// A second connection to the old QEMU, on which the command to save is staged; none if somebody else has it.
    save_qmp: Option<Qmp>,
    feed: Feed,
    /// What the feed is given is kept as well.
    keeper: Keeper,
    source: Source,
    /// Whether `cont` is staged in the new QEMU.
    staged_cont: bool,
    /// Into the new QEMU.
    injector: Injector,
    generation: Option<Generation>,
}

/// Where the RAM blocks come from that are not shared.
enum Source {
    /// Out of the old QEMU's memory. `ahead` was sent while the guest ran.
    Memory { blocks: Vec<RamBlock>, ahead: Carried, section: RamSection },
    /// They are in the stream that the old QEMU writes.
    Stream,
}

/// What was handed over, and when.
struct Handed {
    stopped: u64,
    resumed: u64,
    memory: Option<Memory>,
}

impl Prepared {
    /// Start the new QEMU and bring it as far as it gets while the old one runs.
    ///
    /// *On failure:* the new QEMU is gone and the old one was not touched.
    pub(crate) fn new(mut change: Change) -> Result<Self, Failure> {
        let file = change.file_error("operation.json");
        let as_it_was = |error| Failure::new(Left::AsItWas, error);
        let generation = change.held.state.generation + 1;
        let mut journal = change.open_journal(Kind::VmmWarm).map_err(as_it_was)?;
        fault::point("warm.prepare.journalled", Some(&change.old), None);
        match get_ready(&mut change, &mut journal) {
            Ok(ready) => Ok(Self { change, journal, ready }),
            Err(error) => {
                let rundir = &change.held.rundir;
                let error = explain(rundir.name(), "get ready", error, &log_tail(&rundir.vmm(generation), 10));
                if !change.old.is_alive() {
                    return Err(switch::give_up(rundir, &change.old, journal, change.running, error));
                }
                let undone = switch::end_generation(rundir, generation).and_then(|()| {
                    let _ = std::fs::remove_dir_all(rundir.vmm(generation).0);
                    handover::forget(rundir);
                    journal.close().map_err(&file)
                });
                match undone {
                    Ok(()) => Err(as_it_was(error)),
                    Err(undoing) => {
                        tracing::error!("undoing the preparation failed: {undoing}");
                        Err(Failure::new(Left::NeedsRecovery, error))
                    }
                }
            }
        }
    }

    /// Stop the guest in the old QEMU and let it go on in the new one.
    pub(crate) fn hand_over(self) -> Result<Switched, Failure> {
        let Self { mut change, mut journal, ready } = self;
        let Ready { mut old_qmp, new, mut new_qmp, link, captures, stand_ins } = ready;
        for capture in &captures {
            // What has passed until here is of no interest.
            let _ = capture.frames();
        }
        let first = go_first(&change.old, &new);
        let handed = hand_over(&mut change, &mut journal, link, &stand_ins, &mut old_qmp, &new, &mut new_qmp);
        drop(first);
        // QEMU serves one client at a time, and going back connects anew.
        drop(old_qmp);
        match handed {
            Ok(handed) => {
                fault::point("warm.resume.resumed", Some(&change.old), Some(&new));
                let (spent, waiting) =
                    captures.into_iter().partition(|capture| network::send_again(capture, handed.stopped));
                Ok(Switched { change, journal, new, new_qmp, handed, waiting, _spent: spent, _stand_ins: stand_ins })
            }
            Err(error) => {
                let rundir = &change.held.rundir;
                let error = explain(rundir.name(), "take the guest over", error, &log_tail(&new.directory(), 10));
                Err(if journal.operation.step < Step::Resume {
                    switch::give_up(rundir, &change.old, journal, change.running, error)
                } else {
                    failed_at_resume(&change, journal, &new, error)
                })
            }
        }
    }
}

/// The new QEMU runs the guest; the old one is still there, stopped.
pub(crate) struct Switched {
    change: Change,
    journal: Journal,
    new: Vmm,
    new_qmp: Qmp,
    handed: Handed,
    /// Those into which nothing has come yet: the old QEMU may still take the first frame that does.
    waiting: Vec<Capture>,
    /// The others. Closing one takes the kernel many milliseconds, in which the next guest could be handed over.
    _spent: Vec<Capture>,
    _stand_ins: Vec<StandIn>,
}

impl Switched {
    /// The old QEMU goes, the new one is recorded.
    pub(crate) fn settle(self) -> Result<Report, Failure> {
        let Self { mut change, journal, new, new_qmp, handed, waiting, .. } = self;
        settle(&mut change, journal, &new, new_qmp, handed, &waiting)
            .map_err(|error| Failure::new(Left::NeedsRecovery, error))
    }
}

/// Put a new QEMU's failure beside what it said.
fn explain(name: &str, doing: &'static str, error: RebootError, said: &str) -> RebootError {
    match error {
        RebootError::Qmp(_) | RebootError::Transfer(_) if !said.is_empty() => {
            RebootError::NewFailed { name: name.into(), doing, said: said.into(), source: Box::new(error) }
        }
        other => other,
    }
}

/// Everything that can be done while the old QEMU runs the guest.
fn get_ready(change: &mut Change, journal: &mut Journal) -> Result<Ready, RebootError> {
    let file = change.file_error("operation.json");
    let rundir = change.held.rundir.clone();
    let hardware = &change.held.state.hardware;
    let old = change.old.clone();
    disks::start(&rundir, hardware).map_err(LifeError::from)?;
    let directory = rundir.create_vmm(journal.operation.generation).map_err(&file)?;
    let taps = network::duplicate(hardware, old.process())?;
    let captures = network::captures(hardware)?;
    let arguments = hardware.arguments(&directory, &rundir.console_log(), Start::Incoming, change.binary.syntax);
    let new = Vmm::spawn(&change.binary.path, &arguments, &directory, taps.fds)?;
    fault::point("warm.prepare.spawned", Some(&old), Some(&new));
    journal.operation.to = Some(new.clone());
    journal.write().map_err(&file)?;
    fault::point("warm.prepare.recorded", Some(&old), Some(&new));
    let mut new_qmp = new.connect(vmm::START)?;
    change.recorder.step("start the new QEMU");

    let mut old_qmp = old.connect(vmm::START)?;
    let mut problems = compare_cpus(&mut old_qmp, &mut new_qmp)?;
    let blocks = ramblock::list(&mut old_qmp)?;
    let new_blocks = ramblock::list(&mut new_qmp)?;
    problems.extend(compare_blocks(&blocks, &new_blocks));
    problems.extend(compare_ram(&blocks, &new_blocks));
    if !problems.is_empty() {
        return Err(RebootError::Preflight { name: rundir.name().into(), problems });
    }
    let commands: Vec<Value> = old_qmp.execute("query-commands", ())?;
    let in_one = commands.iter().any(|command| command["name"] == "xen-save-devices-state");
    let readable = blocks.iter().all(|block| block.address.is_some());

    let mut feed = Feed::open(&mut new_qmp, handover::WARM)?;
    let mut keeper = Keeper::begin(&rundir)?;
    let (tap, source) = if in_one && readable {
        let ahead = Carried::read(old.process(), &blocks).map_err(|source| unreadable(&old, source))?;
        let mut part = stream::HEADER.to_vec();
        let section = put_blocks(&mut part, &ahead);
        feed.write(&part)?;
        keeper.write(&part)?;
        (transfer::Tap::devices(&old.directory())?, Source::Memory { blocks, ahead, section })
    } else {
        (transfer::Tap::migration(&mut old_qmp)?, Source::Stream)
    };
    let mut save_qmp = match source {
        Source::Memory { .. } => Qmp::connect(&old.directory().watch(), Duration::from_millis(100)).ok(),
        // A descriptor that was handed to one monitor is not known to another.
        Source::Stream => None,
    };
    if let Some(qmp) = &mut save_qmp {
        tap.stage(qmp)?;
    }
    new_qmp.drop_events();
    // Not with a stream of `migrate`: it says that the guest was stopped, which overrules a `cont` during the load. And a
    // comparison of the memory asks the new QEMU more before that.
    let early = matches!(source, Source::Memory { .. }) && !change.options.verify_memory;
    let staged_cont = early && change.running;
    if staged_cont {
        new_qmp.stage("cont", ())?;
    }
    change.recorder.step("send ahead");
    fault::point("warm.prepare.ready", Some(&old), Some(&new));
    let unready = |source| RebootError::File { path: format!("/proc/{}/maps", new.pid).into(), source };
    let injector = Injector::new(new.process()).map_err(|e| unready(e.into()))?;
    // QEMU has given the freed pages of its heap back to the kernel, and would get each of them by a fault of its own
    // while it loads.
    if let Err(e) = populate_heap(injector) {
        tracing::debug!("the new QEMU takes its memory page by page: {e}");
    }
    // Only where it loads while it is decided.
    let generation = if staged_cont { Generation::new(hardware, new.process()).map_err(unready)? } else { None };
    let link = Link { tap, save_qmp, feed, keeper, source, staged_cont, injector, generation };
    Ok(Ready { old_qmp, new, new_qmp, link, captures, stand_ins: taps.stand_ins })
}

fn unreadable(old: &Vmm, source: io::Error) -> RebootError {
    RebootError::File { path: format!("/proc/{}/mem", old.pid).into(), source }
}

/// The same blocks must be there on both sides; their sizes may differ where QEMU can resize them, and then it does.
fn compare_blocks(old: &[RamBlock], new: &[RamBlock]) -> Vec<Problem> {
    let lacks = |these: &[RamBlock], id: &str| !these.iter().any(|block| block.id == id);
    let gone = old.iter().filter(|block| lacks(new, &block.id));
    let come = new.iter().filter(|block| lacks(old, &block.id));
    gone.map(|block| Problem(format!("the new QEMU has no RAM block {}: it is not the same machine", block.id)))
        .chain(
            come.map(|block| {
                Problem(format!("the old QEMU has no RAM block {}: it is not the same machine", block.id))
            }),
        )
        .collect()
}

/// Other blocks can be resized; the main RAM, which both map, must be of one size.
fn compare_ram(old: &[RamBlock], new: &[RamBlock]) -> Option<Problem> {
    let size = |blocks: &[RamBlock]| blocks.iter().find(|block| block.id == MAIN_RAM).map(|block| block.used);
    let (old, new) = (size(old)?, size(new)?);
    (old != new)
        .then(|| Problem(format!("the new QEMU has {new} bytes of RAM, the guest {old}: it is not the same machine")))
}

pub(crate) fn put_blocks(out: &mut Vec<u8>, carried: &Carried) -> RamSection {
    let mut section = RamSection::start(out, carried.sizes());
    for block in &carried.blocks {
        for (offset, page) in block.pages() {
            section.page(out, &block.id, offset, page);
        }
    }
    section
}

/// Let those threads go before all others that the stopped guest waits for: each QEMU's main thread and the one that
/// reads its monitor, and somewhat the guest's processors in the new QEMU, which take over their registers. Without it
/// they wait for other guests, and for what the two QEMUs do besides.
fn go_first(old: &Vmm, new: &Vmm) -> PriorityBoost {
    let mut first = PriorityBoost::default();
    let rank = |name: &str| [sched::MAIN, "IO mon_iothread"].contains(&name).then_some(Rank::First);
    let rank_new = |name: &str| rank(name).or_else(|| is_processor(name).then_some(Rank::Third));
    let asked = first.threads_of(old.process(), rank).and_then(|()| first.threads_of(new.process(), rank_new));
    if let Err(e) = asked {
        tracing::debug!("the hand-over is scheduled as everything else: {e}");
    }
    first
}

/// Whether a thread of this name is a processor of a guest.
fn is_processor(name: &str) -> bool {
    name.starts_with("CPU ")
}

/// From the last moment of the old QEMU to the first of the new one.
fn hand_over(
    change: &mut Change,
    journal: &mut Journal,
    link: Link,
    stand_ins: &[StandIn],
    old_qmp: &mut Qmp,
    new: &Vmm,
    new_qmp: &mut Qmp,
) -> Result<Handed, RebootError> {
    let Link { tap, mut save_qmp, mut feed, mut keeper, source, staged_cont, injector, generation } = link;
    let file = change.file_error("operation.json");
    let old = change.old.clone();
    let ram = change.held.state.hardware.ram.path.clone();
    let points = |name| fault::point(name, Some(&old), Some(new));
    let ram_error = |source| RebootError::File { path: ram.clone(), source };

    change.hold_run_state()?;
    journal.advance(Step::Suspend).map_err(&file)?;
    points("warm.suspend.journalled");
    change.recorder.phase(Phase::Suspend);
    // To be stopped, the guest's processors have to be on some of the host's. Only for that moment: were this process
    // killed within it, they would keep all others away until `recover`.
    let mut at_once = PriorityBoost::default();
    let _ = at_once.threads_of(old.process(), |name| is_processor(name).then_some(Rank::Second));
    let stopped = stop(old_qmp, change.running)?;
    drop(at_once);
    change.recorder.step("stop");
    points("warm.suspend.stopped");

    let mut before = None;
    if change.options.verify_memory {
        before = Some(digest::file_pages(&ram).map_err(ram_error)?);
        change.recorder.step("digest memory");
    }

    // QEMU computes its state meanwhile.
    let staged = save_qmp.is_some();
    let save_qmp = save_qmp.as_mut().unwrap_or(old_qmp);
    tap.begin(save_qmp, staged)?;
    // Nobody runs the guest: the new QEMU may have the taps. It idles now, and would not while it loads.
    let failed = |source| RebootError::File { path: format!("/proc/{}/fd", new.pid).into(), source };
    network::replace_stand_ins(injector, &change.held.state.hardware, stand_ins).map_err(failed)?;
    points("warm.suspend.taps");
    let mut devices = Vec::with_capacity(1 << 20);
    let mut carried = None;
    if let Source::Memory { blocks, ahead, mut section } = source {
        let now = Carried::read(old.process(), &blocks).map_err(|source| unreadable(&old, source))?;
        let moved = || unreadable(&old, io::Error::other("a RAM block changed its size meanwhile; try again"));
        let mut part = Vec::new();
        for (block, offset, page) in now.changes_since(&ahead).ok_or_else(moved)? {
            section.page(&mut part, block, offset, page);
        }
        section.end(&mut part);
        feed.write(&part)?;
        keeper.write(&part)?;
        carried = Some(now);
    }
    change.recorder.step("read blocks");
    // The new QEMU has had a header already where the blocks went ahead.
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
    change.recorder.step("save devices");
    points("warm.suspend.saved");
    // While the new QEMU loads, the same state is kept for the case that both QEMUs die.
    if devices.last() != Some(&stream::END_OF_STREAM) {
        return Err(unreadable(&old, io::Error::other("the device state that it saved is cut short")));
    }
    keeper.write(&devices)?;
    let saved = keeper.finish()?;
    journal.operation.saved = Some(saved.clone());
    journal.advance(Step::Saved).map_err(&file)?;
    change.recorder.step("keep the state");
    points("warm.suspend.written");

    let mut memory = None;
    if !staged_cont {
        change.recorder.phase(Phase::Renew);
        wait_loaded(new_qmp, handover::LOAD)?;
        change.recorder.step("load");
        if let Some(pages) = before {
            if carried.is_none() {
                let whole = handover::read(change.name(), &saved)?;
                carried = stream::ram_blocks(&whole).ok().map(Carried::from_stream);
            }
            let before = Snapshot::new(pages, carried.as_ref());
            let blocks = ramblock::list(new_qmp)?;
            let carried = Carried::read(new.process(), &blocks).ok();
            let after = Snapshot::new(digest::file_pages(&ram).map_err(ram_error)?, carried.as_ref());
            memory = Some(before.compare(&after));
            change.recorder.step("compare memory");
        }
    }

    // The new QEMU has been given everything, so this can be decided while it still loads: told to go on, it does so
    // at the end of a load that succeeds, and a load that fails ends it before it has run the guest.
    change.recorder.phase(Phase::Resume);
    journal.operation.untouched_since_ns = handover::mark(&ram);
    journal.advance(Step::Resume).map_err(&file)?;
    change.recorder.step("decide");
    points("warm.resume.journalled");
    let resumed = if staged_cont {
        new_qmp.fire("cont")?;
        new_qmp.reply::<Value>("cont")?;
        wait_resumed(new_qmp, RESUMED)?
    } else {
        resume(new_qmp, change.running)?
    };
    change.recorder.step(if staged_cont { "load and resume" } else { "resume" });
    Ok(Handed { stopped, resumed, memory })
}

/// After the resume: the old QEMU goes, the new one is recorded.
fn settle(
    change: &mut Change,
    mut journal: Journal,
    new: &Vmm,
    mut new_qmp: Qmp,
    handed: Handed,
    waiting: &[Capture],
) -> Result<Report, RebootError> {
    let rundir = change.held.rundir.clone();
    change.recorder.phase(Phase::Settle);
    // The guest was seen to go on: from here on the old state is of no use, whatever the RAM file's mark says.
    journal.operation.untouched_since_ns = None;
    journal.advance(Step::Settle).map_err(change.file_error("operation.json"))?;
    fault::point("warm.settle.journalled", Some(&change.old), Some(new));
    if !new.is_alive() {
        let said = log_tail(&new.directory(), 10);
        return Err(RebootError::DiedRunning { name: rundir.name().into(), said });
    }
    let state = change.held.state.clone();
    let faults = Some(("warm.settle.old-gone", "warm.settle.recorded"));
    let state = switch::settle(&rundir, state, Some(&change.old), new, &new_qmp, journal, faults)?;
    for capture in waiting {
        network::send_again(capture, handed.stopped);
    }
    network::forward_ports(&mut new_qmp, &state.hardware);
    change.recorder.step("end the old QEMU");
    change.recorder.write(&rundir);
    Ok(change.report(new, &state, (handed.stopped, handed.resumed), handed.memory))
}

/// The new QEMU failed between the decision and its `RESUME`, which was not seen: if it has not written to the guest's
/// RAM either, the guest has not run in it, and the old one goes on.
fn failed_at_resume(change: &Change, journal: Journal, new: &Vmm, error: RebootError) -> Failure {
    let rundir = &change.held.rundir;
    let said = log_tail(&new.directory(), 10);
    let untouched = || handover::untouched(&change.held.state.hardware.ram.path, journal.operation.untouched_since_ns);
    if is_silent(&error) && new.is_alive() {
        // It may run the guest. Once it is stopped, the RAM file tells.
        let process = new.process();
        if !process.stop_fully(STOPPED).is_ok_and(|stopped| stopped && untouched()) {
            let _ = process.resume();
            tracing::warn!("{}: {error}", rundir.name());
            let error = RebootError::Silent { name: rundir.name().into(), pid: new.pid, waited: RESUMED };
            return Failure::new(Left::NeedsRecovery, error);
        }
    }
    let ended = new.kill();
    if ended.is_ok() && untouched() {
        return switch::give_up(rundir, &change.old, journal, change.running, error);
    }
    let error = RebootError::DiedRunning { name: rundir.name().into(), said };
    Failure::new(Left::NeedsRecovery, error)
}

/// Whether QEMU has not answered, as opposed to having answered with an error or having closed its socket.
fn is_silent(error: &RebootError) -> bool {
    let error = match error {
        RebootError::NewFailed { source, .. } => source,
        other => other,
    };
    matches!(error, RebootError::Qmp(QmpError::Timeout { .. } | QmpError::NoGreeting { .. } | QmpError::TooLong { .. }))
}
