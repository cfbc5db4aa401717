//! Boot snapshots ("candidates"): each has its own store, from which a VM's next guest can resume.
//!
//! A candidate is a checkpoint whose disks have no epochs: [`rekindle_vm::phases`] checks whether the disks are still
//! as the guest knows them. The guest is stopped while the whole candidate is written. That is acceptable during boot:
//! little memory is in use, and the guest has no clients yet.

use crate::error::CheckpointError;
use crate::load_pages;
use crate::pause::{Monitors, PauseError, PauseMarks, Paused};
use crate::recipe::Recipe;
use crate::restore::RestoreError;
use crate::restore::checkpoint;
use crate::restore::load::{self, BoostedDestination, CheckpointSource, EmptyDestination};
use crate::restore::on_demand::OnDemandRam;
use crate::runs::{block_table, send_from_guest};
use crate::target::{Target, TargetError};
use rekindle_handover::takeover::Taps;
use rekindle_handover::{Destination, Handover, OwnRunDir, PreparedStage, RunningStage};
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_pages::BlockId;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::qmp::QmpError;
use rekindle_qemu::vmm::{self, Vmm, VmmError};
use rekindle_store::{Image, Options, ReadOptions, StoreError, StoreUrl, Writer, admin};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use std::thread;

/// The key of a candidate's description in a checkpoint's metadata.
const METADATA_KEY: &str = "candidate";

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
    /// The guest's memory is incomplete: missing pages would be saved as zeros.
    #[error("its memory is still being loaded from a checkpoint")]
    Filling,
    /// The guest could not be stopped, or its memory could not be read.
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
    /// How long the guest was stopped, in µs.
    pub stopped_us: u64,
    /// Size of the candidate, in bytes.
    pub bytes: u64,
}

/// A candidate in a store.
#[derive(Debug, Clone)]
pub struct StoredCandidate {
    /// When the candidate was taken, in µs since 1970.
    pub taken_us: u64,
    /// Size of the store, in bytes.
    pub bytes: u64,
    /// The description that `about` of [`take`] has returned.
    pub about: Value,
    /// The machine that the candidate's guest sees.
    pub hardware: Hardware,
}

/// Saves a candidate of `target` in a new store. `about` is called while the guest is stopped; its result is stored as
/// the candidate's description.
///
/// *Needs:* no other process works on the VM; all of its memory is loaded.
/// *On success:* the candidate is durable; the guest continues to run.
/// *On failure:* the guest continues to run; the store is unusable.
pub fn take<E: std::error::Error + Send + Sync + 'static>(
    target: &Target,
    store: &StoreUrl,
    about: impl FnOnce() -> Result<Value, E>,
) -> Result<SavedCandidate, CandidateError> {
    let rundir = target.rundir();
    if rundir.fill().exists() {
        return Err(CandidateError::Filling);
    }
    let options = Options { keep: 1, create: true, ..Options::new(target.identity(), "phase") };
    let mut writer = Writer::open(store, &options)?;
    let control = target.vmm().connect(vmm::START_TIMEOUT)?;
    let mut monitors = Monitors::new(target.process(), control, None, PauseMarks::of(rundir))?;
    let ram = GuestRam::of(monitors.control(), target.process())?;
    let pages_for_load = load_pages::locate(monitors.control(), &ram);
    let run_state = target.hold_run_state()?;
    let mut checkpoint = writer.begin(&block_table(&ram))?;
    let paused: Result<Paused<Value>, CandidateError> = monitors.pause(|_, _| {
        let about = about().map_err(|e| CandidateError::Snapshot(Box::new(e)))?;
        for (index, block) in ram.blocks().iter().enumerate() {
            send_from_guest(&mut checkpoint, BlockId(index), &ram.populated(block)?, &ram, block)?;
        }
        Ok(about)
    });
    drop(run_state);
    let paused = paused?;
    let stopped_us = paused.stopped_us();
    let definition = serde_json::to_value(target.recipe()).unwrap_or(Value::Null);
    let metadata = json!({ (METADATA_KEY): paused.result, (load_pages::KEY): pages_for_load });
    let committed = checkpoint.commit(&definition, &metadata, &paused.devices)?;
    writer.settle()?;
    Ok(SavedCandidate { stopped_us, bytes: committed.bytes })
}

/// Reads the description of the candidate in a store.
///
/// # Errors
/// [`RestoreError`]: the store has no committed candidate, or it cannot be read.
pub fn describe(store: &StoreUrl) -> Result<StoredCandidate, RestoreError> {
    let (image, recipe) = open_newest(store)?;
    let about = image.metadata()?.get(METADATA_KEY).cloned().unwrap_or_default();
    let bytes = admin::listing(store, None).map_or(image.info().bytes, |listing| listing.disk);
    Ok(StoredCandidate { taken_us: image.info().time_us, bytes, about, hardware: recipe.into_hardware() })
}

/// Opens the newest checkpoint of the store. Its recipe starts nothing: a candidate is loaded into the VM's own machine.
fn open_newest(store: &StoreUrl) -> Result<(Image, Recipe), RestoreError> {
    let image = Image::open(store, &ReadOptions { lazy: true, ..ReadOptions::default() })?;
    let recipe = Recipe::read(&image.definition()?)?;
    Ok((image, recipe))
}

/// A destination QEMU that waits to load the devices of a candidate's guest. Another QEMU of the VM may still run.
pub struct PreparedCandidate<'a> {
    store: &'a StoreUrl,
    number: u64,
    pub destination: Destination<PreparedStage<OnDemandRam>>,
}

/// Starts a destination QEMU with empty RAM for the candidate in `store`, and registers its memory. `on_started` is
/// called after the QEMU has started and before its memory is registered.
///
/// *Needs:* an empty RAM file.
/// *On failure:* a QEMU may remain. It has not run the guest.
pub fn prepare<'a>(
    store: &'a StoreUrl,
    handover: &mut Handover,
    environment: OwnRunDir<'_>,
    taps: Taps,
    on_started: impl FnOnce(&Vmm),
) -> Result<PreparedCandidate<'a>, RestoreError> {
    // Reads the candidate while QEMU starts.
    let (input, empty) = thread::scope(|scope| {
        let input = scope.spawn(|| {
            let (image, recipe) = open_newest(store)?;
            checkpoint::read(image, recipe.ram_ids())
        });
        let empty = EmptyDestination::start(handover, &environment, taps);
        (input.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), empty)
    });
    let (input, empty) = (Arc::new(input?), empty?);
    handover.recorder.step("start the new QEMU");
    on_started(&empty.destination.vmm);
    let destination = load::prepare(empty, &input, environment.hardware, handover)?;
    Ok(PreparedCandidate { store, number: input.number, destination })
}

impl PreparedCandidate<'_> {
    /// Loads the devices and resumes the guest; its memory loads on demand.
    ///
    /// *Needs:* no other QEMU of the VM and no pager; disks as the guest knows them.
    /// *On failure:* a QEMU may remain. It has not run the guest unless the journal is at
    /// [`Step::Resume`](rekindle_vm::journal::Step).
    pub fn resume(self, handover: &mut Handover) -> Result<Destination<RunningStage<OnDemandRam>>, RestoreError> {
        let source = CheckpointSource { store: self.store, credentials: None, number: self.number };
        let BoostedDestination { loaded, boost } = load::load_devices(self.destination, source, handover)?;
        let running = loaded.commit(handover, "resume")?;
        drop(boost);
        Ok(running)
    }
}
