//! The keeper under a model checker. Its threads and those of a guest, a protector and an operator run one at a time,
//! in an order that [`shuttle`] chooses. Another thread may continue at every lock, wait and file operation.
//!
//! The keeper, the log, its directory and merging are the code that a server runs. The engine is a replacement that
//! uses a log like the real engine: it allocates an entry, writes it, and reports the result. A planned request may
//! start after the log has changed. Files are in memory.
//!
//! `REKINDLE_MODEL_ROUNDS` sets how many interleavings are explored, `REKINDLE_TEST_SEED` which ones
//! (`docs/disk-epochs.md`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod files;

use super::merging::Merger;
use super::threads::{Monitor, Threads};
use super::{EpochId, Keeper, OpenedLog, Tasks};
use crate::engine::redo_log::EngineLog;
use crate::engine::refusal::Refusal;
use crate::engine::visit::{EngineView, VisitEngine};
use crate::redo::directory::LogDirectory;
use crate::redo::files::{LogFiles, Synced};
use crate::redo::format::{EntryKind, PAGE_BYTES};
use crate::redo::index::Source;
use crate::redo::log::{Log, LogEntry, SpaceLimit};
use crate::redo::merge::MergeTarget;
use crate::redo::recover::{self, DiskVersion};
use files::{StepFile, StepFiles};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_kernel::uring::Buffer;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::{Condvar, Mutex};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner, thread};
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

const SECTOR: u64 = 512;
/// Sectors of the disk at first, and after it has grown.
const SECTORS: u64 = 4;
const GROWN_SECTORS: u64 = 6;
/// Number of requests of each guest thread, of checkpoints, and of the operator's commands.
const REQUESTS: u32 = 6;
const CHECKPOINTS: u32 = 3;
const COMMANDS: u32 = 3;
/// The limit of a log that is full after some writes, and of a log that is never full.
const LIMITS: [u64; 2] = [PAGE_BYTES + 5 * 2 * PAGE_BYTES, 1 << 30];

/// The threads of the model checker.
#[derive(Debug)]
struct ModelThreads;

#[derive(Debug)]
struct ModelMonitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T: Send + 'static> Monitor<T> for ModelMonitor<T> {
    fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    fn with<R>(&self, run: impl FnOnce(&mut T) -> R) -> R {
        let result = run(&mut self.value.lock().unwrap());
        self.changed.notify_all();
        result
    }

    fn wait<R>(&self, mut until: impl FnMut(&mut T) -> Option<R>) -> R {
        let mut value = self.value.lock().unwrap();
        loop {
            if let Some(result) = until(&mut value) {
                return result;
            }
            value = self.changed.wait(value).unwrap();
        }
    }

    fn wait_timeout<R>(&self, _timeout: Duration, mut until: impl FnMut(&mut T) -> Option<R>) -> Option<R> {
        thread::yield_now();
        until(&mut self.value.lock().unwrap())
    }
}

impl Threads for ModelThreads {
    type Monitor<T: Send + 'static> = ModelMonitor<T>;
    type Thread = thread::JoinHandle<()>;

    fn spawn(run: impl FnOnce() + Send + 'static) -> Self::Thread {
        thread::spawn(run)
    }

    fn join(thread: Self::Thread) {
        thread.join().unwrap();
    }

    fn elapsed(_since: Instant) -> Duration {
        if thread_rng().gen_ratio(1, 4) { Duration::from_secs(1) } else { Duration::ZERO }
    }
}

#[derive(Debug)]
struct ModelEngineState {
    engine_log: Option<EngineLog<StepFile>>,
    image: StepFile,
    sectors: u64,
    /// The guest's queue is being stopped. `is_stopped`: it is stopped.
    is_stopping: bool,
    is_stopped: bool,
    /// Number of requests in progress.
    pending: usize,
    has_ended: bool,
}

#[derive(Debug, Clone)]
struct ModelEngine(Arc<ModelMonitor<ModelEngineState>>);

impl VisitEngine for ModelEngine {
    type File = StepFile;

    fn visit<T: Send + 'static>(
        &self,
        visit: impl FnOnce(&mut EngineView<'_, StepFile>) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.0.with(|state| {
            if state.has_ended {
                return Err(Refusal("the disk's engine has ended".into()));
            }
            let is_running = !state.is_stopped || state.pending > 0;
            visit(&mut EngineView { log: &mut state.engine_log, is_running, ended: None })
        })
    }
}

/// A write into the log.
struct PlacedWrite {
    entry: LogEntry,
    /// The segment.
    file: StepFile,
    /// Header and data of the entry.
    bytes: Buffer,
}

/// Returns the content of a sector that is filled with a value.
fn sector_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(SECTOR as usize / 8)
}

/// Returns the value that fills a sector.
fn value_of(sector: &[u8]) -> u64 {
    assert!(sector[8..] == sector[..sector.len() - 8], "a torn sector");
    u64::from_le_bytes(sector[..8].try_into().unwrap())
}

impl ModelEngine {
    fn new(image: StepFile, engine_log: Option<EngineLog<StepFile>>) -> Self {
        let state = ModelEngineState {
            engine_log,
            image,
            sectors: SECTORS,
            is_stopping: false,
            is_stopped: false,
            pending: 0,
            has_ended: false,
        };
        Self(Arc::new(Monitor::new(state)))
    }

    /// Waits until the guest runs, and counts a new request.
    fn admit(&self) {
        self.0.wait(|state| (!state.is_stopping && !state.is_stopped).then(|| state.pending += 1));
    }

    /// Writes a sector as the guest, and waits for the answer.
    fn write(&self, sector: u64, value: u64) {
        self.admit();
        let (mut requested, data) = (None, sector_of(value));
        // `Err`: the disk has no log, and the image is written.
        let placed: Result<PlacedWrite, StepFile> = self.0.wait(|state| {
            let limit = if state.is_stopping { SpaceLimit::MayBeExceeded } else { SpaceLimit::Enforced };
            let Some(engine_log) = &mut state.engine_log else { return Some(Err(state.image.clone())) };
            if engine_log.is_closing {
                return None;
            }
            match engine_log.log.allocate(sector * SECTOR, SECTOR, EntryKind::Data, limit) {
                Ok(entry) => {
                    let mut bytes = Buffer::new(entry.length() as usize);
                    bytes[..PAGE_BYTES as usize].copy_from_slice(&engine_log.log.entry_header(&entry, &data));
                    bytes[PAGE_BYTES as usize..][..data.len()].copy_from_slice(&data);
                    let file = engine_log.log.segment_file(entry.epoch).unwrap();
                    Some(Ok(PlacedWrite { entry, file, bytes }))
                }
                // The real engine retries, which does not change the result.
                Err(missing) if requested == Some(missing) => None,
                Err(missing) => {
                    requested = Some(missing);
                    engine_log.request_space(missing);
                    None
                }
            }
        });
        match placed {
            Ok(PlacedWrite { entry, file, bytes }) => {
                file.write_at(&bytes, entry.offset).unwrap();
                self.0.with(|state| {
                    state.engine_log.as_mut().expect("the log ended during a write").complete_write(&entry);
                    state.pending -= 1;
                });
            }
            Err(image) => {
                image.write_at(&data, sector * SECTOR).unwrap();
                self.0.with(|state| state.pending -= 1);
            }
        }
    }

    /// Reads a sector as the guest.
    fn read(&self, sector: u64) -> u64 {
        self.admit();
        let source = self.0.with(|state| {
            let pieces = state.engine_log.as_ref().map(|engine_log| engine_log.log.look_up(sector * SECTOR, SECTOR));
            pieces.and_then(|pieces| pieces[0].source)
        });
        // The log may change between planning a request and starting it.
        let (file, offset) = self.0.with(|state| {
            let segment = match source {
                Some(Source::Data { epoch, offset }) => state
                    .engine_log
                    .as_ref()
                    .and_then(|engine_log| engine_log.log.segment_file(epoch))
                    .map(|file| (file, offset)),
                _ => None,
            };
            segment.unwrap_or_else(|| (state.image.clone(), sector * SECTOR))
        });
        let mut bytes = Buffer::new(SECTOR as usize);
        file.read_at(&mut bytes[..SECTOR as usize], offset).unwrap();
        self.0.with(|state| state.pending -= 1);
        value_of(&bytes[..SECTOR as usize])
    }

    fn stop(&self) {
        self.0.with(|state| state.is_stopping = true);
        self.0.wait(|state| (state.pending == 0).then(|| (state.is_stopping, state.is_stopped) = (false, true)));
    }

    fn resume(&self) {
        self.0.with(|state| state.is_stopped = false);
    }
}

type ModelKeeper = Keeper<StepFiles, ModelThreads>;

/// Runs one of two threads of the guest, which uses every second sector. Returns the final content of its sectors.
fn guest(engine: &ModelEngine, number: u64) -> Vec<(u64, u64)> {
    let mut now: Vec<(u64, u64)> = (number..GROWN_SECTORS).step_by(2).map(|sector| (sector, 1000 + sector)).collect();
    for request in 0..REQUESTS {
        let sectors = engine.0.with(|state| state.sectors);
        let known = now.iter().filter(|(sector, _)| *sector < sectors).count();
        let (sector, value) = &mut now[thread_rng().gen_range(0..known)];
        if thread_rng().gen_ratio(2, 3) {
            *value = u64::from(request) * 10 + number + 1;
            engine.write(*sector, *value);
        } else {
            let read = engine.read(*sector);
            assert!(read == *value, "sector {sector} is read as {read}, an older content than {value}");
        }
    }
    now
}

/// Takes checkpoints, with the guest stopped for each mark.
fn protect(keeper: &ModelKeeper, engine: &ModelEngine) {
    for _ in 0..CHECKPOINTS {
        if keeper.begin(engine).is_err() {
            continue;
        }
        engine.stop();
        let marked = keeper.mark(engine);
        engine.resume();
        let Ok(EpochId { epoch, .. }) = marked else { continue };
        if keeper.seal(engine, epoch).is_ok() && thread_rng().gen_ratio(3, 4) {
            // The log may have ended since.
            let _ = keeper.committed(epoch);
        }
    }
}

/// Acts as an operator: merges the log, begins another one, grows the disk.
fn operate(keeper: &ModelKeeper, engine: &ModelEngine) {
    for _ in 0..COMMANDS {
        match thread_rng().gen_range(0..4) {
            0 | 1 => keeper.end(),
            2 => drop(keeper.begin(engine)),
            _ => engine.0.with(|state| state.sectors = GROWN_SECTORS),
        }
    }
}

/// Ends the log and waits until it has ended.
fn end(keeper: &ModelKeeper) {
    keeper.end();
    let failed = keeper.tasks.wait(|tasks: &mut Tasks| (!tasks.is_end_wanted).then(|| tasks.why_failed.clone()));
    assert_eq!(failed, None);
    // The directory and the engine's log have been removed before.
    keeper.current.with(|current| assert!(current.log_dir.is_none()));
}

fn open(files: &StepFiles, version: DiskVersion, limit: u64) -> OpenedLog<StepFiles, ModelThreads> {
    let found = recover::open(files.clone(), GROWN_SECTORS * SECTOR, version, limit).unwrap();
    let image = Synced::new(files.image(Some(0)), Arc::default());
    OpenedLog::new(files.clone(), found, image, GROWN_SECTORS * SECTOR, limit)
}

/// Creates a log with a sealed epoch, as a restore finds it.
fn leave_log(files: &StepFiles) -> Uuid {
    let mut log_dir = LogDirectory::create(files.clone(), GROWN_SECTORS * SECTOR, None).unwrap();
    let segment = log_dir.create_segment(1).unwrap();
    let mut log = Log::new(log_dir.state().disk, 1, 0, 0, LIMITS[1]);
    log.add_ready(segment);
    let entry = log.allocate(0, SECTOR, EntryKind::Data, SpaceLimit::Enforced).unwrap();
    let data = sector_of(1000);
    let mut bytes = Buffer::new(entry.length() as usize);
    bytes[..PAGE_BYTES as usize].copy_from_slice(&log.entry_header(&entry, &data));
    bytes[PAGE_BYTES as usize..][..data.len()].copy_from_slice(&data);
    log.segment_file(1).unwrap().write_at(&bytes, entry.offset).unwrap();
    log_dir.record(|state| state.sealed = 1).unwrap();
    log_dir.state().disk
}

/// Adds a thread that merges committed epochs while another one may end the log, as an earlier server did.
fn add_merge(keeper: &Arc<ModelKeeper>, engine: &ModelEngine, files: &StepFiles) {
    let target = MergeTarget::new(Synced::new(files.image(Some(1)), Arc::default()));
    let mut merger = Merger::new(Arc::clone(keeper), engine.clone(), target);
    let tasks = Arc::clone(&keeper.tasks);
    let next = |tasks: &mut Tasks| {
        let is_wanted = std::mem::take(&mut tasks.is_merge_wanted);
        (tasks.is_stopping || is_wanted).then_some((!tasks.is_stopping).then_some(tasks.committed_epoch))
    };
    let merge = ModelThreads::spawn(move || {
        while let Some(upto) = tasks.wait(next) {
            drop(merger.merge_to(upto));
        }
    });
    keeper.threads.with(|threads| threads.push(merge));
}

fn image() -> Vec<u8> {
    (0..GROWN_SECTORS).flat_map(|sector| sector_of(1000 + sector)).collect()
}

/// Runs one server from start to end. `mergers`: 1, or 2 to check that the checker finds the defect.
fn run_server(mergers: u32) {
    let files = StepFiles::new(image(), mergers == 1);
    let limit = LIMITS[thread_rng().gen_range(0..LIMITS.len())];
    if thread_rng().gen_ratio(1, 4) {
        leave_log(&files);
    }
    let mut opened = open(&files, DiskVersion::Newest, limit);
    let engine = ModelEngine::new(files.image(None), opened.engine_log.take());
    let keeper = opened.start(&engine);
    if mergers == 2 {
        add_merge(&keeper, &engine, &files);
    }
    let guests = [0, 1].map(|number| {
        let engine = engine.clone();
        thread::spawn(move || guest(&engine, number))
    });
    let spawn = |act: fn(&ModelKeeper, &ModelEngine)| {
        let (keeper, engine) = (Arc::clone(&keeper), engine.clone());
        thread::spawn(move || act(&keeper, &engine))
    };
    let others = [spawn(protect), spawn(operate)];
    others.into_iter().for_each(|thread| thread.join().unwrap());
    // A full log waits for a commit or an end.
    if limit == LIMITS[0] {
        end(&keeper);
    }
    let now: Vec<(u64, u64)> = guests.into_iter().flat_map(|guest| guest.join().unwrap()).collect();
    let is_restarted = thread_rng().gen_ratio(1, 4);
    if !is_restarted {
        end(&keeper);
        engine.0.with(|state| assert!(state.engine_log.is_none()));
    }
    engine.0.with(|state| state.has_ended = true);
    keeper.release();
    drop(engine.0.with(|state| state.engine_log.take()));
    if is_restarted {
        // The next server repeats the interrupted merge.
        *files.checks.merging.lock().unwrap() = None;
        let mut opened = open(&files, DiskVersion::Newest, limit);
        let engine = ModelEngine::new(files.image(None), opened.engine_log.take());
        let keeper = opened.start(&engine);
        end(&keeper);
        engine.0.with(|state| state.has_ended = true);
        keeper.release();
    }
    assert_eq!(files.list().unwrap(), Vec::<String>::new(), "the log has ended");
    let image = files.memory.image();
    for (sector, value) in now {
        let mut bytes = [0; SECTOR as usize];
        image.read_at(&mut bytes, sector * SECTOR).unwrap();
        let found = value_of(&bytes);
        assert!(found == value, "sector {sector} of the image is {found}, an older content than {value}");
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect(name))
}

fn seed() -> u64 {
    let seed = setting("REKINDLE_TEST_SEED", 20);
    eprintln!("REKINDLE_TEST_SEED={seed}");
    seed
}

fn explore(scheduler: impl Scheduler + 'static, mergers: u32) -> usize {
    let mut config = Config::new();
    config.failure_persistence = FailurePersistence::Print;
    config.stack_size = 1 << 18;
    config.max_steps = MaxSteps::FailAfter(1_000_000);
    Runner::new(scheduler, config).run(move || run_server(mergers))
}

#[test]
fn no_interleaving_loses_a_write_or_runs_two_merges() {
    let rounds = setting("REKINDLE_MODEL_ROUNDS", 600) as usize;
    let explored = explore(RandomScheduler::new_from_seed(seed(), rounds - rounds / 3), 1)
        + explore(PctScheduler::new_from_seed(seed() + 1, 4, rounds / 3), 1);
    eprintln!("{explored} interleavings");
    assert_eq!(explored, rounds);
}

#[test]
fn the_checker_finds_old_sectors_after_two_concurrent_merges() {
    let found = catch_unwind(AssertUnwindSafe(|| explore(RandomScheduler::new_from_seed(seed(), 20_000), 2)));
    let panic = found.expect_err("two concurrent merges do no harm in this model, so the model is wrong");
    let why = panic.downcast_ref::<String>().expect("a message");
    assert!(why.contains("an older content than"), "{why}");
}

#[test]
fn a_begin_without_space_removes_no_existing_log() {
    shuttle::check_random(
        || {
            let files = StepFiles::new(image(), true);
            let disk = leave_log(&files);
            // The disk is opened at an older epoch, and not written yet: the newer epoch is still available.
            let mut opened = open(&files, DiskVersion::Epoch { epoch: 0, disk }, LIMITS[1]);
            let engine = ModelEngine::new(files.image(None), opened.engine_log.take());
            let keeper = opened.start(&engine);
            files.memory.fail_after(0, libc::ENOSPC);
            keeper.begin(&engine).unwrap_err();
            files.memory.stop_failing();
            assert!(engine.0.with(|state| state.engine_log.is_some()));
            assert!(files.list().unwrap().contains(&"1.log".into()));
            engine.0.with(|state| state.has_ended = true);
            keeper.release();
        },
        50,
    );
}

#[test]
fn a_full_file_system_is_emptied_by_a_seal_and_a_merge() {
    shuttle::check_random(
        || {
            let files = StepFiles::new(image(), true);
            let mut opened = open(&files, DiskVersion::Newest, LIMITS[1]);
            let engine = ModelEngine::new(files.image(None), opened.engine_log.take());
            let keeper = opened.start(&engine);
            keeper.begin(&engine).unwrap();
            engine.write(0, 7);
            engine.stop();
            let EpochId { epoch, .. } = keeper.mark(&engine).unwrap();
            engine.resume();
            files.memory.leave_room(thread_rng().gen_range(0..2));
            keeper.seal(&engine, epoch).unwrap();
            keeper.committed(epoch).unwrap();
            end(&keeper);
            assert_eq!(engine.read(0), 7);
            engine.0.with(|state| state.has_ended = true);
            keeper.release();
        },
        50,
    );
}
