//! The keeper under a model checker: its threads, a guest's, a protector's and an operator's run one at a time, in an order that
//! [`shuttle`] chooses, and every lock, wait and step of a file is a place where another one may continue.
//!
//! The keeper, the log, its directory and merging are the code that a server runs. The engine is a stand-in, which does with a log
//! what the real one does: a write has a place, is under way, and has ended; a request that was planned may begin after the log has
//! changed. Files are in memory.
//!
//! `REKINDLE_MODEL_ROUNDS` sets how many interleavings are explored, `REKINDLE_TEST_SEED` which ones (`docs/disk-epochs.md`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod files;

use super::merging::Merger;
use super::threads::{Monitor, Threads};
use super::{At, Keeper, Opened, Tasks};
use crate::engine::command::Refused;
use crate::engine::logged::Logged;
use crate::engine::visit::{Reach, VisitEngine};
use crate::redo::files::{Files, LogFile, Synced};
use crate::redo::format::{PAGE, What};
use crate::redo::index::Source;
use crate::redo::log::Placed;
use crate::redo::merge::Target;
use crate::redo::recover::{self, Wanted};
use crate::redo::state::Home;
use files::{StepFile, StepFiles};
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
const GROWN: u64 = 6;
/// Writes and reads of each guest thread; what the protector and the operator do.
const REQUESTS: u32 = 6;
const CHECKPOINTS: u32 = 3;
const ORDERS: u32 = 3;
/// A log that is full after some writes, and one that never is.
const LIMITS: [u64; 2] = [PAGE + 5 * 2 * PAGE, 1 << 30];

/// Threads of the checker.
#[derive(Debug)]
struct Checked;

#[derive(Debug)]
struct CheckedMonitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T: Send + 'static> Monitor<T> for CheckedMonitor<T> {
    fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    fn with<R>(&self, run: impl FnOnce(&mut T) -> R) -> R {
        let given = run(&mut self.value.lock().unwrap());
        self.changed.notify_all();
        given
    }

    fn wait<R>(&self, mut until: impl FnMut(&mut T) -> Option<R>) -> R {
        let mut value = self.value.lock().unwrap();
        loop {
            if let Some(given) = until(&mut value) {
                return given;
            }
            value = self.changed.wait(value).unwrap();
        }
    }

    fn wait_timeout<R>(&self, _patience: Duration, mut until: impl FnMut(&mut T) -> Option<R>) -> Option<R> {
        thread::yield_now();
        until(&mut self.value.lock().unwrap())
    }
}

impl Threads for Checked {
    type Monitor<T: Send + 'static> = CheckedMonitor<T>;
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

/// What the engine has.
#[derive(Debug)]
struct EngineState {
    logged: Option<Logged<StepFile>>,
    image: StepFile,
    sectors: u64,
    /// The guest's queue is being stopped, and does not run.
    is_stopping: bool,
    is_stopped: bool,
    /// Requests of the guest.
    under_way: usize,
    has_ended: bool,
}

/// The engine's stand-in.
#[derive(Debug, Clone)]
struct ModelEngine(Arc<CheckedMonitor<EngineState>>);

impl VisitEngine for ModelEngine {
    type File = StepFile;

    fn visit<T: Send + 'static>(
        &self,
        visit: impl FnOnce(&mut Reach<'_, StepFile>) -> Result<T, Refused> + Send + 'static,
    ) -> Result<T, Refused> {
        self.0.with(|state| {
            if state.has_ended {
                return Err(Refused("the disk's engine has ended".into()));
            }
            let is_running = !state.is_stopped || state.under_way > 0;
            visit(&mut Reach { logged: &mut state.logged, is_running, ended: None })
        })
    }
}

fn sector_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(SECTOR as usize / 8)
}

fn value_of(sector: &[u8]) -> u64 {
    assert!(sector[8..] == sector[..sector.len() - 8], "a torn sector");
    u64::from_le_bytes(sector[..8].try_into().unwrap())
}

impl ModelEngine {
    fn new(image: StepFile, logged: Option<Logged<StepFile>>) -> Self {
        let (sectors, under_way) = (SECTORS, 0);
        let state =
            EngineState { logged, image, sectors, is_stopping: false, is_stopped: false, under_way, has_ended: false };
        Self(Arc::new(Monitor::new(state)))
    }

    /// A request begins, when the guest runs.
    fn admit(&self) {
        self.0.wait(|state| (!state.is_stopping && !state.is_stopped).then(|| state.under_way += 1));
    }

    /// The guest writes a sector and has its answer.
    fn write(&self, sector: u64, value: u64) {
        self.admit();
        let (mut asked, data) = (None, sector_of(value));
        let placed: Result<(Placed, StepFile, Buffer), StepFile> = self.0.wait(|state| {
            let limited = !state.is_stopping;
            let Some(logged) = &mut state.logged else { return Some(Err(state.image.clone())) };
            if logged.closing {
                return None;
            }
            match logged.log.place(sector * SECTOR, SECTOR, What::Data, limited) {
                Ok(placed) => {
                    let mut entry = Buffer::new(placed.length() as usize);
                    entry[..PAGE as usize].copy_from_slice(&logged.log.header(&placed, &data));
                    entry[PAGE as usize..][..data.len()].copy_from_slice(&data);
                    Some(Ok((placed, logged.log.file(placed.epoch).unwrap(), entry)))
                }
                // The real engine asks again and again; what it gets does not depend on that.
                Err(wait) if asked == Some(wait) => None,
                Err(wait) => {
                    asked = Some(wait);
                    logged.want(wait);
                    None
                }
            }
        });
        match placed {
            Ok((placed, file, entry)) => {
                file.write_at(&entry, placed.offset).unwrap();
                self.0.with(|state| {
                    state.logged.as_mut().expect("the log has gone under a write").written(&placed);
                    state.under_way -= 1;
                });
            }
            Err(image) => {
                image.write_at(&data, sector * SECTOR).unwrap();
                self.0.with(|state| state.under_way -= 1);
            }
        }
    }

    /// The guest reads a sector.
    fn read(&self, sector: u64) -> u64 {
        self.admit();
        let source = self.0.with(|state| {
            let pieces = state.logged.as_ref().map(|logged| logged.log.look_up(sector * SECTOR, SECTOR));
            pieces.and_then(|pieces| pieces[0].2)
        });
        // It was planned, and begins later.
        let (file, at) = self.0.with(|state| {
            let segment = match source {
                Some(Source::Data { epoch, at }) => {
                    state.logged.as_ref().and_then(|logged| logged.log.file(epoch)).map(|file| (file, at))
                }
                _ => None,
            };
            segment.unwrap_or_else(|| (state.image.clone(), sector * SECTOR))
        });
        let mut bytes = Buffer::new(SECTOR as usize);
        file.read_at(&mut bytes[..SECTOR as usize], at).unwrap();
        self.0.with(|state| state.under_way -= 1);
        value_of(&bytes[..SECTOR as usize])
    }

    fn stop(&self) {
        self.0.with(|state| state.is_stopping = true);
        self.0.wait(|state| (state.under_way == 0).then(|| (state.is_stopping, state.is_stopped) = (false, true)));
    }

    fn resume(&self) {
        self.0.with(|state| state.is_stopped = false);
    }
}

type ModelKeeper = Keeper<StepFiles, Checked>;

/// One of two threads of the guest, which has every other sector. Gives what is in each of its sectors then.
fn guest(engine: &ModelEngine, number: u64) -> Vec<(u64, u64)> {
    let mut now: Vec<(u64, u64)> = (number..GROWN).step_by(2).map(|sector| (sector, 1000 + sector)).collect();
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

/// Checkpoints, with the guest stopped for each mark.
fn protect(keeper: &ModelKeeper, engine: &ModelEngine) {
    for _ in 0..CHECKPOINTS {
        if keeper.begin(engine).is_err() {
            continue;
        }
        engine.stop();
        let marked = keeper.mark(engine);
        engine.resume();
        let Ok(At { epoch, .. }) = marked else { continue };
        if keeper.seal(engine, epoch).is_ok() && thread_rng().gen_ratio(3, 4) {
            // It may have ended since.
            let _ = keeper.committed(epoch);
        }
    }
}

/// An operator: merges the log, begins another one, lets the disk grow.
fn operate(keeper: &ModelKeeper, engine: &ModelEngine) {
    for _ in 0..ORDERS {
        match thread_rng().gen_range(0..4) {
            0 | 1 => keeper.end(),
            2 => drop(keeper.begin(engine)),
            _ => engine.0.with(|state| state.sectors = GROWN),
        }
    }
}

/// Ends the log and waits until it has ended.
fn end(keeper: &ModelKeeper) {
    keeper.end();
    let failed = keeper.tasks.wait(|tasks: &mut Tasks| (!tasks.is_end_wanted).then(|| tasks.failed.clone()));
    assert_eq!(failed, None);
    // Until then the directory and the engine's log go.
    keeper.home.with(|kept| assert!(kept.home.is_none()));
}

fn open(files: &StepFiles, wanted: Wanted, limit: u64) -> Opened<StepFiles, Checked> {
    let found = recover::open(files.clone(), GROWN * SECTOR, wanted, limit).unwrap();
    let image = Synced::new(files.image(Some(0)), Arc::default());
    Opened::new(files.clone(), found, image, GROWN * SECTOR, limit)
}

/// Puts a log with a sealed epoch there, as a restore finds it.
fn leave_log(files: &StepFiles) -> Uuid {
    let mut home = Home::create(files.clone(), GROWN * SECTOR, None).unwrap();
    let segment = home.prepare(1).unwrap();
    let mut log = crate::redo::log::Log::new(home.state().disk, 1, 0, 0, LIMITS[1]);
    log.provide(segment);
    let placed = log.place(0, SECTOR, What::Data, true).unwrap();
    let data = sector_of(1000);
    let mut entry = Buffer::new(placed.length() as usize);
    entry[..PAGE as usize].copy_from_slice(&log.header(&placed, &data));
    entry[PAGE as usize..][..data.len()].copy_from_slice(&data);
    log.file(1).unwrap().write_at(&entry, placed.offset).unwrap();
    home.record(|state| state.sealed = 1).unwrap();
    home.state().disk
}

/// Adds a thread that merges what is committed, as a server before did it: while another one may end the log.
fn add_merge(keeper: &Arc<ModelKeeper>, engine: &ModelEngine, files: &StepFiles) {
    let target = Target::new(Synced::new(files.image(Some(1)), Arc::default()));
    let mut merger = Merger::new(Arc::clone(keeper), engine.clone(), target);
    let tasks = Arc::clone(&keeper.tasks);
    let next = |tasks: &mut Tasks| {
        let is_wanted = std::mem::take(&mut tasks.is_merge_wanted);
        (tasks.stop || is_wanted).then_some((!tasks.stop).then_some(tasks.committed))
    };
    let merge = Checked::spawn(move || {
        while let Some(upto) = tasks.wait(next) {
            drop(merger.merge_to(upto));
        }
    });
    keeper.threads.with(|threads| threads.push(merge));
}

fn image() -> Vec<u8> {
    (0..GROWN).flat_map(|sector| sector_of(1000 + sector)).collect()
}

/// One story of a server. `mergers`: 1, or 2 to see that the checker finds what comes of that.
fn story(mergers: u32) {
    let files = StepFiles::new(image(), mergers == 1);
    let limit = LIMITS[thread_rng().gen_range(0..LIMITS.len())];
    if thread_rng().gen_ratio(1, 4) {
        leave_log(&files);
    }
    let mut opened = open(&files, Wanted::Newest, limit);
    let engine = ModelEngine::new(files.image(None), opened.logged.take());
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
        engine.0.with(|state| assert!(state.logged.is_none()));
    }
    engine.0.with(|state| state.has_ended = true);
    keeper.release();
    drop(engine.0.with(|state| state.logged.take()));
    if is_restarted {
        // The next server repeats what was interrupted.
        *files.watch.merging.lock().unwrap() = None;
        let mut opened = open(&files, Wanted::Newest, limit);
        let engine = ModelEngine::new(files.image(None), opened.logged.take());
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
    Runner::new(scheduler, config).run(move || story(mergers))
}

#[test]
fn no_interleaving_loses_a_write_or_merges_twice_at_once() {
    let rounds = setting("REKINDLE_MODEL_ROUNDS", 600) as usize;
    let explored = explore(RandomScheduler::new_from_seed(seed(), rounds - rounds / 3), 1)
        + explore(PctScheduler::new_from_seed(seed() + 1, 4, rounds / 3), 1);
    eprintln!("{explored} interleavings");
    assert_eq!(explored, rounds);
}

#[test]
fn the_checker_finds_the_older_sectors_that_two_merges_at_once_leave() {
    let found = catch_unwind(AssertUnwindSafe(|| explore(RandomScheduler::new_from_seed(seed(), 20_000), 2)));
    let panic = found.expect_err("two merges at once do no harm in this model, so it shows nothing");
    let why = panic.downcast_ref::<String>().expect("a message");
    assert!(why.contains("an older content than"), "{why}");
}

#[test]
fn a_begin_without_room_removes_no_log_that_was_there() {
    shuttle::check_random(
        || {
            let files = StepFiles::new(image(), true);
            let disk = leave_log(&files);
            // Restored at an older epoch, and nothing is written yet: the newer one is still to be had.
            let mut opened = open(&files, Wanted::Epoch { epoch: 0, disk }, LIMITS[1]);
            let engine = ModelEngine::new(files.image(None), opened.logged.take());
            let keeper = opened.start(&engine);
            files.memory.refuse(0, libc::ENOSPC);
            keeper.begin(&engine).unwrap_err();
            files.memory.relent();
            assert!(engine.0.with(|state| state.logged.is_some()));
            assert!(files.list().unwrap().contains(&"1.log".into()));
            engine.0.with(|state| state.has_ended = true);
            keeper.release();
        },
        50,
    );
}
