//! Boot snapshots ("candidates"): each in a store of its own, from which a VM's next guest can resume.
//!
//! A candidate is a checkpoint whose disks have no epochs: [`rekindle_vm::phases`] checks whether the disks are still as the guest
//! knows them. All of it is written while the guest is stopped, which is acceptable during boot: little memory is in use, and the
//! guest has no clients yet.

use crate::load_pages;
use crate::pause::{Monitors, PauseError, Paused};
use crate::restore::RestoreError;
use crate::restore::checkpoint::{self, ChosenCheckpoint};
use crate::restore::load::{self, Clock, DestinationQemu, LoadOptions, LoadTarget};
pub use crate::restore::load::{BeforeLoad, OnReady};
use crate::runs::send_from;
use crate::session::CheckpointError;
use crate::target::{Target, TargetError};
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_pages::BlockId;
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

/// The key of a candidate's description in a checkpoint's metadata.
const KEY: &str = "candidate";

/// Why a candidate was not taken.
#[derive(Debug, thiserror::Error)]
pub enum CandidateError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Vmm(#[from] VmmError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    /// Its memory is incomplete: missing pages would be saved as zeros.
    #[error("its memory is still being loaded from a checkpoint")]
    Filling,
    /// It could not be stopped, or its memory could not be read.
    #[error("it cannot be saved")]
    Snapshot(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl From<PauseError> for CandidateError {
    fn from(e: PauseError) -> Self {
        Self::Snapshot(Box::new(e))
    }
}

impl From<CheckpointError> for CandidateError {
    fn from(e: CheckpointError) -> Self {
        match e {
            CheckpointError::Store(e) => Self::Store(e),
            e => Self::Snapshot(Box::new(e)),
        }
    }
}

impl From<QmpError> for CandidateError {
    fn from(e: QmpError) -> Self {
        Self::Vmm(e.into())
    }
}

/// The result of [`take`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedCandidate {
    /// How long the guest was stopped for it.
    pub stopped_us: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// A candidate in a store.
#[derive(Debug, Clone)]
pub struct StoredCandidate {
    /// When it was taken, in µs since 1970.
    pub taken_us: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Its description.
    pub about: Value,
    /// The machine of its guest.
    pub hardware: Hardware,
}

/// Takes a candidate of `target` into a new store. `about` is called while the guest is stopped; its result is stored as the
/// candidate's description.
///
/// *Needs:* no other process works on the VM; all of its memory is loaded.
/// *On success:* the candidate is durable; the guest continues to run.
/// *On failure:* the guest continues to run; the store is unusable.
///
/// # Errors
/// [`CandidateError`].
pub fn take<E: std::error::Error + Send + Sync + 'static>(
    target: &Target,
    store: &StoreUrl,
    about: impl FnOnce() -> Result<Value, E>,
) -> Result<SavedCandidate, CandidateError> {
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
    let first = load_pages::locate(monitors.control(), &ram);
    let run_state = target.hold_run_state()?;
    let mut checkpoint = writer.begin(&table)?;
    let paused: Result<Paused<Value>, CandidateError> = monitors.pause(|_, _| {
        let about = about().map_err(|e| CandidateError::Snapshot(Box::new(e)))?;
        for (index, block) in ram.blocks().iter().enumerate() {
            send_from(&mut checkpoint, BlockId(index), &ram.populated(block)?, &ram, block)?;
        }
        Ok(about)
    });
    drop(run_state);
    let Paused { result: about, devices, stopped_host_us, resumed_host_us, .. } = paused?;
    let definition = serde_json::to_value(target.recipe()).unwrap_or(Value::Null);
    let metadata = json!({ (KEY): about, (load_pages::KEY): first });
    let committed = checkpoint.commit(&definition, &metadata, &devices)?;
    writer.settle()?;
    Ok(SavedCandidate { stopped_us: resumed_host_us.saturating_sub(stopped_host_us), bytes: committed.bytes })
}

fn block(block: &rekindle_memory::ram::Block) -> types::Block {
    let info = &block.info;
    types::Block { id: info.id.clone(), used: info.used, max: info.total, page_size: info.page_size }
}

/// Reads the description of the candidate in a store.
///
/// # Errors
/// [`RestoreError`]: there is no committed one, or it cannot be read.
pub fn describe(store: &StoreUrl) -> Result<StoredCandidate, RestoreError> {
    let chosen = open(store)?;
    let about = chosen.image.metadata()?.get(KEY).cloned().unwrap_or_default();
    let bytes = admin::listing(store, None).map_or(chosen.image.info().bytes, |listing| listing.disk);
    Ok(StoredCandidate { taken_us: chosen.image.info().time_us, bytes, about, hardware: chosen.recipe.hardware })
}

fn open(store: &StoreUrl) -> Result<ChosenCheckpoint, RestoreError> {
    let image = Image::open(store, &ReadOptions { lazy: true, ..ReadOptions::default() })?;
    let recipe = crate::recipe::Recipe::read(&image.definition()?)?;
    Ok(ChosenCheckpoint { image, recipe, epochs: rekindle_vm::disks::Epochs::new() })
}

/// The VM that a candidate's guest is loaded into, and the callbacks of the load.
pub struct CandidateLoad<'a> {
    pub rundir: &'a RunDir,
    /// Its machine: that of the candidate, except for the VM generation ID.
    pub hardware: &'a Hardware,
    pub binary: &'a Binary,
    /// Its directory, its taps, and the operation's journal.
    pub made: Made,
    /// Called with the destination QEMU before anything is loaded.
    pub started: &'a dyn Fn(&Vmm),
    /// Called when only the load of the devices and the resume are left. It ends all users of the VM's RAM, disks and taps.
    pub ready: &'a mut OnReady<'a>,
    /// Called as soon as the guest runs.
    pub resumed: &'a dyn Fn(),
    /// Whether the guest was notified of the time and sets its clock itself.
    pub clock_notified: &'a dyn Fn() -> bool,
    /// Records the QEMU that runs the guest, and ends the operation.
    pub settle: &'a dyn Fn(Journal, Vmm, &Qmp) -> Result<(), RestoreError>,
}

/// A guest that was resumed from a candidate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedCandidate {
    /// From `began` to the guest's resume, in µs, without the time that [`CandidateLoad::ready`] returns.
    pub us: u64,
    /// The pid of its QEMU.
    pub pid: u32,
    /// Whether its clock was set.
    pub clock: Clock,
}

/// Starts a destination QEMU and resumes the guest of the candidate in `store` there; its memory loads on demand.
///
/// *Needs:* an empty RAM file; from [`CandidateLoad::ready`] on, no other QEMU of the VM and no pager; disks as the guest knows them.
/// *On success:* the guest runs; a pager loads the missing rest of its memory.
/// *On failure:* a QEMU may remain, which has not run the guest unless the journal is at its resume.
///
/// # Errors
/// [`RestoreError`].
pub fn load(
    store: &StoreUrl,
    next: CandidateLoad<'_>,
    recorder: &mut Recorder,
    began: Instant,
) -> Result<LoadedCandidate, RestoreError> {
    // Read while QEMU starts.
    let (input, waiting) = thread::scope(|scope| {
        let input = scope.spawn(|| checkpoint::read(open(store)?));
        let waiting = DestinationQemu::start(next.rundir, next.binary, next.made, next.hardware);
        (input.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), waiting)
    });
    let (input, waiting) = (input?, waiting?);
    recorder.step("start the new QEMU");
    (next.started)(&waiting.vmm);
    let CandidateLoad { rundir, hardware, ready, resumed, clock_notified, settle, .. } = next;
    let target_vm = LoadTarget { rundir, hardware, ready, resumed, clock_notified, settle };
    let load = LoadOptions { store, identity: None, eager: false, began, hold: false, may_run: None };
    let restored = load::load_and_resume(target_vm, waiting, &input, None, &load, recorder)?;
    Ok(LoadedCandidate { us: restored.us, pid: restored.pid, clock: restored.clock })
}
