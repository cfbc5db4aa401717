//! A snapshot of a phase of a guest's boot, in a store of its own, and a VM's next guest that goes on from there.
//!
//! It is a checkpoint like any other, but that its disks have no epochs: whether they are still what the guest knew is asked of
//! who has them ([`rekindle_vm::phases`]). All of it is written while the guest is stopped. It is at its beginning then, with little
//! memory in use, and nobody is its client yet.

use crate::first;
use crate::pause::{Monitors, PauseError, Paused};
use crate::restore::RestoreError;
use crate::restore::checkpoint::{self, Chosen};
use crate::restore::go::{self, Clock, Load, Seat, Waiting};
pub use crate::restore::go::{Moment, Ready};
use crate::runs::send_from;
use crate::session::SessionError;
use crate::target::{Target, TargetError};
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_qemu::binary::Binary;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::{self, Vmm, VmmError};
use rekindle_store::{Image, Options, ReadOptions, StoreError, StoreUrl, Writer, admin, types};
use rekindle_vm::journal::Journal;
use rekindle_vm::place::Made;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::timeline::Recorder;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::thread;
use std::time::Instant;

/// Where a checkpoint's metadata says what a candidate is.
const KEY: &str = "candidate";

/// Why a candidate was not taken.
#[derive(Debug, thiserror::Error)]
pub enum CandidateError {
    /// The VM.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// Its QEMU.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its memory.
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    /// Its memory is not there yet: what is missing would be saved as zeroes.
    #[error("its memory is still being brought")]
    Filling,
    /// It could not be stopped, or its memory not be read.
    #[error("it cannot be saved")]
    Snapshot(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl From<PauseError> for CandidateError {
    fn from(e: PauseError) -> Self {
        Self::Snapshot(Box::new(e))
    }
}

impl From<SessionError> for CandidateError {
    fn from(e: SessionError) -> Self {
        match e {
            SessionError::Store(e) => Self::Store(e),
            e => Self::Snapshot(Box::new(e)),
        }
    }
}

impl From<QmpError> for CandidateError {
    fn from(e: QmpError) -> Self {
        Self::Vmm(e.into())
    }
}

/// A candidate that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// How long the guest was stopped for it.
    pub stopped_us: u64,
    /// Bytes that it takes.
    pub bytes: u64,
}

/// A candidate as it is found.
#[derive(Debug, Clone)]
pub struct Found {
    /// When it was taken, in µs since 1970.
    pub taken_us: u64,
    /// Bytes that it takes.
    pub bytes: u64,
    /// What was said of it when it was taken.
    pub about: Value,
    /// The machine of its guest.
    pub hardware: Hardware,
}

/// Take one of `target` into a new store at `store`. `about` is called while the guest is stopped; what it gives is kept with the
/// candidate.
///
/// *Needs:* that nobody else works on the VM; that all of its memory is there.
/// *On success:* the candidate is durable; the guest runs on.
/// *On failure:* the guest runs on; the store is of no use.
///
/// # Errors
/// [`CandidateError`].
pub fn take<E: std::error::Error + Send + Sync + 'static>(
    target: &Target,
    store: &StoreUrl,
    about: impl FnOnce() -> Result<Value, E>,
) -> Result<Taken, CandidateError> {
    let rundir = target.rundir();
    if rundir.fill().exists() {
        return Err(CandidateError::Filling);
    }
    let mut options = Options::new(target.identity(), "phase");
    (options.keep, options.create) = (1, true);
    let mut writer = Writer::open(store, &options)?;
    let control = target.vmm().connect(vmm::START)?;
    let mut monitors = Monitors::new(target.process(), control, None, rundir.paused())?;
    let ram = GuestRam::of(monitors.control(), target.process())?;
    let table: Vec<_> = ram.blocks().iter().map(block).collect();
    let first = first::of(monitors.control(), &ram);
    let run_state = target.hold_run_state()?;
    let mut checkpoint = writer.begin(&table)?;
    let paused: Result<Paused<Value>, CandidateError> = monitors.pause(|_, _| {
        let about = about().map_err(|e| CandidateError::Snapshot(Box::new(e)))?;
        for (index, block) in ram.blocks().iter().enumerate() {
            send_from(&mut checkpoint, index, &ram.populated(block)?, &ram, block)?;
        }
        Ok(about)
    });
    drop(run_state);
    let Paused { result: about, devices, stopped_host_us, resumed_host_us, .. } = paused?;
    let definition = serde_json::to_value(target.recipe()).unwrap_or(Value::Null);
    let metadata = json!({ (KEY): about, (first::KEY): first });
    let committed = checkpoint.commit(&definition, &metadata, &devices)?;
    writer.settle()?;
    Ok(Taken { stopped_us: resumed_host_us.saturating_sub(stopped_host_us), bytes: committed.bytes })
}

fn block(block: &rekindle_memory::ram::Block) -> types::Block {
    let info = &block.info;
    types::Block { id: info.id.clone(), used: info.used, max: info.total, page_size: info.page_size }
}

/// Look at the candidate in a store.
///
/// # Errors
/// [`RestoreError`]: there is none that counts, or it cannot be understood.
pub fn look(store: &StoreUrl) -> Result<Found, RestoreError> {
    let chosen = open(store)?;
    let about = chosen.image.metadata()?.get(KEY).cloned().unwrap_or_default();
    let bytes = admin::listing(store, None).map_or(chosen.image.info().bytes, |listing| listing.disk);
    Ok(Found { taken_us: chosen.image.info().time_us, bytes, about, hardware: chosen.recipe.hardware })
}

fn open(store: &StoreUrl) -> Result<Chosen, RestoreError> {
    let image = Image::open(store, &ReadOptions { lazy: true, ..ReadOptions::default() })?;
    let recipe = crate::recipe::Recipe::read(&image.definition()?)?;
    Ok(Chosen { image, recipe, epochs: rekindle_vm::disks::Epochs::new() })
}

/// What a VM's next guest is loaded into, and by whom it is recorded.
pub struct Next<'a> {
    /// The VM's.
    pub rundir: &'a RunDir,
    /// Its machine; the one that the candidate knows, but for what tells it that it was set back.
    pub hardware: &'a Hardware,
    /// The QEMU.
    pub binary: &'a Binary,
    /// Its directory, its taps, and the operation's journal.
    pub made: Made,
    /// Called with the new QEMU before anything is loaded.
    pub started: &'a dyn Fn(&Vmm),
    /// Called when nothing is left but to load its devices and to let it go on. What uses the VM's RAM, disks or taps is ended there.
    pub ready: &'a mut Ready<'a>,
    /// Called as soon as the guest runs.
    pub resumed: &'a dyn Fn(),
    /// Whether the guest has been told the time, and sets it itself.
    pub told: &'a dyn Fn() -> bool,
    /// Records the QEMU that runs it, and ends the operation.
    pub settle: &'a dyn Fn(Journal, Vmm, &Qmp) -> Result<(), RestoreError>,
}

/// A guest that goes on from a candidate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loaded {
    /// From `began` to the guest's running, in µs, without what [`Next::ready`] says.
    pub us: u64,
    /// Its QEMU's process.
    pub pid: u32,
    /// What became of its clock.
    pub clock: Clock,
}

/// Start a QEMU and let the guest of the candidate in `store` go on in it; its memory is brought on demand.
///
/// *Needs:* an empty RAM file; from [`Next::ready`] on, that no other QEMU of the VM runs, and no pager; disks that are what the guest knew.
/// *On success:* the guest runs; a pager brings what of its memory is missing.
/// *On failure:* a QEMU may be left, which has not run the guest unless the journal is at its resume.
///
/// # Errors
/// [`RestoreError`].
pub fn load(store: &StoreUrl, next: Next<'_>, recorder: &mut Recorder, began: Instant) -> Result<Loaded, RestoreError> {
    // What is to be loaded is read while the QEMU starts.
    let (ahead, waiting) = thread::scope(|scope| {
        let ahead = scope.spawn(|| checkpoint::read(open(store)?));
        let waiting = Waiting::start(next.rundir, next.binary, next.made, next.hardware);
        (ahead.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), waiting)
    });
    let (ahead, waiting) = (ahead?, waiting?);
    recorder.step("start the new QEMU");
    (next.started)(&waiting.vmm);
    let Next { rundir, hardware, ready, resumed, told, settle, .. } = next;
    let seat = Seat { rundir, hardware, ready, resumed, told, settle };
    let load = Load { store, identity: None, eager: false, began, hold: false, begun: None };
    let restored = go::go(seat, waiting, &ahead, None, &load, recorder)?;
    Ok(Loaded { us: restored.us, pid: restored.pid, clock: restored.clock })
}
