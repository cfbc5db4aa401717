//! One QEMU being protected: its monitors, its memory, and what of it was written.

mod compare;

use crate::event::Done;
use crate::pause::{Laps, Monitors, PauseError, Paused};
use crate::policy::Policy;
use crate::protector::{Disks, Failure, ProtectError};
use crate::target::{Target, TargetError};
use rekindle_kernel::inject::{InjectError, Injector};
use rekindle_memory::pages;
use rekindle_memory::ram::{Block, GuestRam, GuestRamError};
use rekindle_memory::tracker::{self, Asynchronous, Dirty, Synchronous, TrackError, Tracker};
use rekindle_qemu::adopt::{AdoptError, adopt};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::stopped::Stopped;
use rekindle_store::types::{self, PAGE_SIZE, Page};
use rekindle_store::{Checkpoint, StoreError, Writer};
use rekindle_vm::timeline::host_us;
use serde_json::{Value, json};
use std::ops::Range;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that are read from the guest at a time.
const BATCH: u64 = 1 << 20;
/// Pre-copy goes over dirty pages at most so often before the guest is stopped.
const PASSES: u32 = 3;
/// Fewer dirty bytes than these are copied while the guest is stopped: it takes less than a millisecond.
const FEW: u64 = 1 << 20;
/// How long QEMU may take to greet.
const GREETING: Duration = Duration::from_secs(5);
const ZEROES: Page = [0; PAGE_SIZE];

/// Why a session or a checkpoint failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error(transparent)]
    Pause(#[from] PauseError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    #[error(transparent)]
    Track(#[from] TrackError),
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A restore is still bringing its memory.
    #[error("its memory is still being brought from a checkpoint")]
    Filling,
    /// The store has not been opened again yet.
    #[error("the store is closed")]
    NoWriter,
    /// The owner's command for the disks failed.
    #[error("the disk hook `{command}` failed: {why}")]
    Hook { command: String, why: String },
    /// A RAM block came, went or was resized.
    #[error("the guest's memory has another shape: {0}")]
    Reshaped(String),
    /// A page that the guest was about to change could not be copied.
    #[error("a page could not be copied before the guest changed it")]
    Void(#[source] GuestRamError),
}

/// How a guest is to be protected, after it was looked at.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) policy: Policy,
    hook: Option<String>,
    control: Qmp,
    /// The guest has a device through which it gives memory back.
    gives_back: bool,
}

impl Plan {
    /// Look at the guest.
    pub(crate) fn of(target: &Target, wanted: Option<Policy>, disks: &Disks) -> Result<Self, Failure> {
        let name = || target.name().to_owned();
        let found = adopt(&target.vmm().directory().protect(), GREETING);
        let (adopted, mut control) = found.map_err(SessionError::from)?;
        if !adopted.obstacles.is_empty() {
            return Err(ProtectError::Obstacles { name: name(), obstacles: adopted.obstacles }.into());
        }
        let images = images(&mut control).map_err(SessionError::from)?;
        let hook = match disks {
            Disks::Refuse => {
                if let Some(disk) = images.iter().find(|image| image.writable) {
                    return Err(ProtectError::Disk { name: name(), disk: disk.file.clone() }.into());
                }
                None
            }
            Disks::CrashConsistent => None,
            Disks::Hook(command) => Some(command.clone()),
        };
        let direct = images.iter().find(|image| image.direct);
        let policy = match (wanted, direct) {
            (Some(Policy::Precopy), Some(disk)) => {
                return Err(ProtectError::Direct { name: name(), disk: disk.file.clone() }.into());
            }
            (Some(policy), _) => policy,
            (None, Some(_)) => Policy::Cow,
            (None, None) => Policy::Precopy,
        };
        Ok(Self { policy, hook, control, gives_back: adopted.gives_back })
    }
}

/// A disk image that QEMU has open for its guest.
struct Image {
    file: String,
    writable: bool,
    /// Opened with `O_DIRECT`: the kernel reads it into guest memory past QEMU's page tables.
    direct: bool,
}

fn images(qmp: &mut Qmp) -> Result<Vec<Image>, QmpError> {
    let devices: Vec<Value> = qmp.execute("query-block", ())?;
    let image = |device: &Value| {
        let inserted = device.get("inserted")?;
        Some(Image {
            file: inserted.get("file").and_then(Value::as_str).unwrap_or("a disk").to_owned(),
            writable: inserted.get("ro").and_then(Value::as_bool) != Some(true),
            direct: inserted.pointer("/cache/direct").and_then(Value::as_bool) != Some(false),
        })
    };
    Ok(devices.iter().filter_map(image).collect())
}

/// Pages copied because the guest wanted to write them.
#[derive(Debug, Default)]
struct Copies {
    pages: Vec<(usize, u64, Vec<u8>)>,
    failed: Option<GuestRamError>,
}

fn lock(copies: &Mutex<Copies>) -> MutexGuard<'_, Copies> {
    copies.lock().unwrap_or_else(PoisonError::into_inner)
}

enum Tracking {
    Asynchronous(Asynchronous),
    Synchronous(Synchronous, Arc<Mutex<Copies>>),
}

/// Pages (offsets) of each block.
type Runs = Vec<Vec<Range<u64>>>;

/// What was copied while the guest was stopped.
struct Copied {
    block: usize,
    runs: Vec<Range<u64>>,
    bytes: Vec<u8>,
}

pub(crate) struct Session {
    pub(crate) target: Target,
    policy: Policy,
    /// The owner's command that snapshots disks.
    hook: Option<String>,
    monitors: Monitors,
    ram: Arc<GuestRam>,
    tracking: Tracking,
    /// What has been collected since the last commit.
    owed: Dirty,
    /// Everything is owed.
    full: bool,
    /// Whether tracking was found as an earlier protector left it.
    pub(crate) resumed: bool,
    buffer: Vec<u8>,
    /// When the guest was stopped for the checkpoint before.
    stopped_host_us: Option<u64>,
}

impl Session {
    /// Begin to track the memory of `target`. `resume`: what an earlier protector collected has all arrived, so its tracking
    /// may be gone on with.
    pub(crate) fn attach(target: Target, plan: Plan, resume: bool) -> Result<Self, SessionError> {
        let Plan { policy, hook, control, gives_back } = plan;
        let save = Qmp::connect(&target.vmm().directory().save(), GREETING)?;
        let mark = target.rundir().paused();
        let mut monitors = Monitors::new(target.process(), control, Some(save), mark)?;
        let ram = GuestRam::of(monitors.control(), target.process())?;
        let ram = Arc::new(if gives_back { ram } else { ram.never_shrinking() });
        let injector = Injector::new(target.process())?;
        let copies = Arc::<Mutex<Copies>>::default();
        if !resume || policy == Policy::Cow {
            tracker::sweep(injector).map_err(TrackError::from)?;
        }
        let paused: Paused<(Tracking, bool)> = monitors.pause(|stopped, laps| {
            let attached = match policy {
                Policy::Cow => {
                    let before = before_write(Arc::clone(&copies));
                    let tracker = Synchronous::attach(injector, Arc::clone(&ram), stopped, before, None)?;
                    (Tracking::Synchronous(tracker, copies), false)
                }
                Policy::Basic | Policy::Precopy => {
                    let found = if resume { Asynchronous::resume(injector, Arc::clone(&ram), stopped)? } else { None };
                    if resume && found.is_none() {
                        tracker::sweep(injector).map_err(TrackError::from)?;
                    }
                    let resumed = found.is_some();
                    let tracker = match found {
                        Some(tracker) => tracker,
                        None => Asynchronous::attach(injector, Arc::clone(&ram), stopped, None)?,
                    };
                    (Tracking::Asynchronous(tracker), resumed)
                }
            };
            laps.steps.collect = laps.lap();
            Ok::<_, SessionError>(attached)
        })?;
        let (tracking, resumed) = paused.result;
        let owed = if resumed { nothing(&ram) } else { Dirty::everything(&ram)? };
        Ok(Self {
            target,
            policy,
            hook,
            monitors,
            ram,
            tracking,
            owed,
            full: !resumed,
            resumed,
            buffer: Vec::new(),
            stopped_host_us: None,
        })
    }

    /// What is copied when.
    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    /// Bytes of all RAM blocks.
    pub(crate) fn ram_bytes(&self) -> u64 {
        self.ram.blocks().iter().map(|block| block.told.used).sum()
    }

    /// The RAM blocks as a store wants them.
    fn table(&self) -> Vec<types::Block> {
        let one = |block: &Block| types::Block {
            id: block.told.id.clone(),
            used: block.told.used,
            max: block.told.total,
            page_size: block.told.page_size,
        };
        self.ram.blocks().iter().map(one).collect()
    }

    /// Take one checkpoint and commit it.
    ///
    /// On failure what was collected is owed to the next one.
    pub(crate) fn checkpoint(&mut self, writer: &mut Writer, every: Duration) -> Result<Done, SessionError> {
        let began = Instant::now();
        let changes = self.ram.changes(self.monitors.control())?;
        if let Some(change) = changes.first() {
            return Err(SessionError::Reshaped(format!("{change:?}")));
        }
        // A store that has never had a checkpoint holds zeroes everywhere.
        let fresh = writer.next_number() == 1;
        let mut checkpoint = writer.begin(&self.table())?;
        let taken = self.take(&mut checkpoint, fresh);
        let taken = match taken {
            Ok(taken) => taken,
            Err(e) => {
                self.give_up_flight();
                return Err(e);
            }
        };
        let Taken { paused, dirty_bytes, copied_stopped_bytes, copied_for_writes } = taken;
        let definition = serde_json::to_value(self.target.recipe()).unwrap_or(Value::Null);
        let metadata = json!({
            "policy": self.policy, "stopped_us": paused.resumed_host_us.saturating_sub(paused.stopped_host_us),
            "stopped_host_us": paused.stopped_host_us, "dirty_bytes": dirty_bytes,
        });
        let committed = checkpoint.commit(&definition, &metadata, &paused.devices)?;
        let now = host_us();
        let full = std::mem::replace(&mut self.full, false);
        self.owed = nothing(&self.ram);
        let interval = self.stopped_host_us.map(|at| paused.stopped_host_us.saturating_sub(at) / 1000);
        self.stopped_host_us = Some(paused.stopped_host_us);
        Ok(Done {
            number: committed.number,
            full,
            stopped_host_us: paused.stopped_host_us,
            stopped_us: paused.resumed_host_us.saturating_sub(paused.stopped_host_us),
            interval_ms: interval,
            every_ms: every.as_millis() as u64,
            dirty_bytes,
            copied_stopped_bytes,
            copied_for_writes,
            pages_stored: committed.pages.stored,
            pages_zero: committed.pages.zero,
            pages_unchanged: committed.pages.unchanged,
            compressed_bytes: committed.pages.compressed,
            bytes: committed.bytes,
            devices_bytes: paused.devices.len() as u64,
            commit_us: now.saturating_sub(paused.resumed_host_us),
            took_us: began.elapsed().as_micros() as u64,
            steps: paused.steps,
        })
    }

    /// Everything but the commit.
    fn take(&mut self, checkpoint: &mut Checkpoint<'_>, fresh: bool) -> Result<Taken, SessionError> {
        let mut sent = 0;
        if self.policy != Policy::Cow && (self.full || self.policy == Policy::Precopy) {
            sent = self.send_ahead(checkpoint, fresh)?;
        }
        let run_state = self.target.hold_run_state()?;
        let (ram, owed) = (Arc::clone(&self.ram), &mut self.owed);
        let (hook, name, number) = (self.hook.as_deref(), self.target.name(), checkpoint.number());
        let ahead = sent > 0;
        let tracking = &mut self.tracking;
        let paused = self.monitors.pause(|stopped, laps: &mut Laps| {
            if let Some(command) = hook {
                run_hook(command, name, number)?;
            }
            match tracking {
                Tracking::Asynchronous(tracker) => {
                    let dirty = tracker.collect(stopped)?;
                    laps.steps.collect = laps.lap();
                    // What went ahead has arrived; it was not written since, or it is in `dirty`.
                    let copy = if ahead { dirty.clone() } else { merged(owed, &dirty) };
                    *owed = merged(owed, &dirty);
                    let copied = copy_all(&ram, &copy.written)?;
                    laps.steps.copy = laps.lap();
                    Ok((copy, copied))
                }
                Tracking::Synchronous(tracker, _) => {
                    let dirty = tracker.collect(stopped)?;
                    *owed = merged(owed, &dirty);
                    laps.steps.collect = laps.lap();
                    tracker.begin(&owed.written, stopped)?;
                    laps.steps.copy = laps.lap();
                    Ok::<_, SessionError>((owed.clone(), Vec::new()))
                }
            }
        })?;
        drop(run_state);
        let Paused { result: (dirty, copied), devices, stopped_host_us, resumed_host_us, steps } = paused;
        let copied_stopped_bytes = copied.iter().map(|part| part.bytes.len() as u64).sum();
        for part in &copied {
            send(checkpoint, part.block, &part.runs, &part.bytes)?;
        }
        let mut copied_for_writes = 0;
        if let Tracking::Synchronous(tracker, copies) = &self.tracking {
            while let Some(claim) = tracker.claim(BATCH) {
                let Some(block) = self.ram.blocks().get(claim.block) else { continue };
                read(&self.ram, block, &claim.runs, &mut self.buffer)?;
                let (number, runs) = (claim.block, claim.runs.clone());
                // The guest may write them from here on.
                drop(claim);
                send(checkpoint, number, &runs, &self.buffer)?;
            }
            tracker.landed().or_else(|_| wait_landed(tracker))?;
            let copies = std::mem::take(&mut *lock(copies));
            if let Some(e) = copies.failed {
                return Err(SessionError::Void(e));
            }
            copied_for_writes = copies.pages.len() as u64;
            for (block, at, bytes) in &copies.pages {
                let run = *at..*at + bytes.len() as u64;
                send(checkpoint, *block, std::slice::from_ref(&run), bytes)?;
            }
        }
        // The first `cow` checkpoint of a store has sent nothing yet that could have to be zero now.
        if !(fresh && self.full && self.policy == Policy::Cow) {
            send_zeroes(checkpoint, &dirty.zero)?;
        }
        let paused = Paused { result: (), devices, stopped_host_us, resumed_host_us, steps };
        let dirty_bytes = if self.policy == Policy::Cow { dirty.bytes() } else { sent.max(dirty.bytes()) };
        Ok(Taken { paused, dirty_bytes, copied_stopped_bytes, copied_for_writes })
    }

    /// Send what is dirty while the guest runs, until little is left. Gives the bytes that were sent, at least 1.
    fn send_ahead(&mut self, checkpoint: &mut Checkpoint<'_>, fresh: bool) -> Result<u64, SessionError> {
        let Tracking::Asynchronous(tracker) = &mut self.tracking else { return Ok(0) };
        let mut sent = 1;
        let mut now = self.owed.clone();
        for pass in 0..PASSES {
            for (index, runs) in now.written.iter().enumerate() {
                let Some(block) = self.ram.blocks().get(index) else { continue };
                for batch in batches(runs) {
                    read(&self.ram, block, &batch, &mut self.buffer)?;
                    send(checkpoint, index, &batch, &self.buffer)?;
                    sent += self.buffer.len() as u64;
                }
            }
            if !fresh {
                send_zeroes(checkpoint, &now.zero)?;
            }
            if self.policy != Policy::Precopy || pass + 1 == PASSES {
                break;
            }
            // Right only because no I/O of QEMU's writes past its page tables: `docs/protect.md`.
            now = tracker.collect(&mut Stopped::vouched())?;
            self.owed = merged(&self.owed, &now);
            if now.bytes() < FEW {
                // Few, but they count as unwritten now: they go too.
                for (index, runs) in now.written.iter().enumerate() {
                    let Some(block) = self.ram.blocks().get(index) else { continue };
                    read(&self.ram, block, runs, &mut self.buffer)?;
                    send(checkpoint, index, runs, &self.buffer)?;
                    sent += self.buffer.len() as u64;
                }
                if !fresh {
                    send_zeroes(checkpoint, &now.zero)?;
                }
                break;
            }
        }
        Ok(sent)
    }

    /// After a failure: let all writers go on; what they would have kept waiting for is owed.
    fn give_up_flight(&mut self) {
        if let Tracking::Synchronous(tracker, copies) = &self.tracking {
            while let Some(claim) = tracker.claim(u64::MAX) {
                drop(claim);
            }
            let _ = wait_landed(tracker);
            *lock(copies) = Copies::default();
        }
    }

    /// Leave no trace in QEMU.
    pub(crate) fn detach(self) -> Result<(), SessionError> {
        match self.tracking {
            Tracking::Asynchronous(tracker) => tracker.detach()?,
            Tracking::Synchronous(tracker, _) => tracker.detach()?,
        }
        Ok(())
    }
}

struct Taken {
    paused: Paused<()>,
    dirty_bytes: u64,
    copied_stopped_bytes: u64,
    copied_for_writes: u64,
}

/// Let the owner snapshot disks, with the guest stopped.
fn run_hook(command: &str, name: &str, checkpoint: u64) -> Result<(), SessionError> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).env("REKINDLE_VM", name).env("REKINDLE_CHECKPOINT", checkpoint.to_string());
    let failed = |why| SessionError::Hook { command: command.into(), why };
    let output = shell.stdin(Stdio::null()).output().map_err(|e| failed(e.to_string()))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(failed(format!("{}; it said: {said}", output.status))) }
}

fn before_write(copies: Arc<Mutex<Copies>>) -> impl FnMut(&GuestRam, usize, Range<u64>) + Send + 'static {
    move |ram, index, page| {
        let Some(block) = ram.blocks().get(index) else { return };
        let mut bytes = Vec::new();
        match read(ram, block, std::slice::from_ref(&page), &mut bytes) {
            Ok(()) => lock(&copies).pages.push((index, page.start, bytes)),
            Err(e) => {
                lock(&copies).failed.get_or_insert(e);
            }
        }
    }
}

/// A fault that is being served counts as in flight for some microseconds after the last claim.
fn wait_landed(tracker: &Synchronous) -> Result<(), TrackError> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match tracker.landed() {
            Err(TrackError::InFlight { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_micros(50));
            }
            other => return other,
        }
    }
}

fn nothing(ram: &GuestRam) -> Dirty {
    let none: Runs = ram.blocks().iter().map(|_| Vec::new()).collect();
    Dirty { written: none.clone(), zero: none }
}

/// What `older` and `newer` tell together: where both name a page, the newer one is right.
fn merged(older: &Dirty, newer: &Dirty) -> Dirty {
    let blocks = older.written.len().max(newer.written.len());
    let get = |all: &Runs, n: usize| all.get(n).cloned().unwrap_or_default();
    let (mut written, mut zero) = (Runs::new(), Runs::new());
    for n in 0..blocks {
        let (new_written, new_zero) = (get(&newer.written, n), get(&newer.zero, n));
        written.push(pages::union(&pages::difference(&get(&older.written, n), &new_zero), &new_written));
        zero.push(pages::union(&pages::difference(&get(&older.zero, n), &new_written), &new_zero));
    }
    Dirty { written, zero }
}

/// `runs` in parts of at most [`BATCH`] bytes.
fn batches(runs: &[Range<u64>]) -> Vec<Vec<Range<u64>>> {
    let mut all = vec![Vec::new()];
    let mut room = BATCH;
    for run in runs {
        let mut at = run.start;
        while at < run.end {
            if room == 0 {
                all.push(Vec::new());
                room = BATCH;
            }
            let end = run.end.min(at + room);
            if let Some(last) = all.last_mut() {
                last.push(at..end);
            }
            room -= end - at;
            at = end;
        }
    }
    all.retain(|batch| !batch.is_empty());
    all
}

fn read(ram: &GuestRam, block: &Block, runs: &[Range<u64>], buffer: &mut Vec<u8>) -> Result<(), GuestRamError> {
    buffer.resize(pages::bytes(runs) as usize, 0);
    ram.read(block, runs, buffer)
}

fn copy_all(ram: &GuestRam, written: &Runs) -> Result<Vec<Copied>, GuestRamError> {
    let mut all = Vec::new();
    for (index, runs) in written.iter().enumerate().filter(|(_, runs)| !runs.is_empty()) {
        let Some(block) = ram.blocks().get(index) else { continue };
        let mut bytes = Vec::new();
        read(ram, block, runs, &mut bytes)?;
        all.push(Copied { block: index, runs: runs.clone(), bytes });
    }
    Ok(all)
}

/// Numbers of the pages in `runs`.
fn numbers(runs: &[Range<u64>]) -> impl Iterator<Item = u64> + '_ {
    runs.iter().flat_map(|run| run.start / PAGE_SIZE as u64..run.end / PAGE_SIZE as u64)
}

fn send(checkpoint: &mut Checkpoint<'_>, block: usize, runs: &[Range<u64>], bytes: &[u8]) -> Result<(), StoreError> {
    let (pages, _) = bytes.as_chunks::<PAGE_SIZE>();
    checkpoint.pages(block, numbers(runs).zip(pages))
}

fn send_zeroes(checkpoint: &mut Checkpoint<'_>, zero: &Runs) -> Result<(), StoreError> {
    for (block, runs) in zero.iter().enumerate() {
        checkpoint.pages(block, numbers(runs).map(|number| (number, &ZEROES)))?;
    }
    Ok(())
}
