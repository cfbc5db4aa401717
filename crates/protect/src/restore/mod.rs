//! Resumes a guest from a checkpoint; its pages load on demand (HydraVM, sections IV-A and IV-B).
//!
//! | module | contents |
//! |---|---|
//! | `checkpoint` | reads the part of a checkpoint that is needed before the guest runs |
//! | [`prepare`] | a destination QEMU that waits with empty RAM |
//! | `concurrent` | a load that runs concurrently with the commit of its checkpoint |
//! | `load` | loads, resumes and settles: from a waiting QEMU to a running guest |
//! | [`on_demand`] | the RAM of a destination whose missing pages are in a checkpoint |
//! | [`recover`] | finishes or undoes an interrupted restore |
//!
//! `docs/protect.md` has the sequence.

pub(crate) mod checkpoint;
pub(crate) mod concurrent;
pub(crate) mod load;
pub mod on_demand;
pub mod prepare;
pub mod recover;

pub use on_demand::start_pager;
pub use rekindle_handover::aftermath::Clock;

use crate::owned::OwnError;
use crate::pager::FillError;
use crate::recipe::RecipeError;
use crate::target::TargetError;
use checkpoint::ChosenCheckpoint;
use load::EmptyDestination;
use prepare::PrimedQemu;
use rekindle_handover::{Handover, HandoverError, OwnRunDir};
use rekindle_kernel::inject::InjectError;
use rekindle_memory::missing::PagerError;
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_qemu::command::{Disk, Hardware};
use rekindle_qemu::cpu;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::stream::StreamError;
use rekindle_qemu::transfer::TransferError;
use rekindle_qemu::vmm::VmmError;
use rekindle_store::remote::{Identity, SpareConnections};
use rekindle_store::{StoreError, StoreUrl};
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::disks::Epochs;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind};
use rekindle_vm::slot::{IdleSlot, Plan, SlotResources, VmSlot};
use rekindle_vm::timeline::Recorder;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::Instant;

/// Maximum number of attempts of a restore, which starts again if another checkpoint was committed meanwhile.
const TRIES: usize = 3;

/// Parameters of a restore.
#[derive(Debug, Clone)]
pub struct Request {
    pub store: StoreUrl,
    /// This host's identity for a store on a server.
    pub identity: Option<Identity>,
    /// Number of the checkpoint to restore; none: the newest.
    pub at: Option<u64>,
    /// Load all memory before the guest resumes.
    pub eager: bool,
    /// The definition to use instead of the recipe's, if the VM's files have other paths on this host.
    pub definition: Option<Definition>,
    /// Path of the QEMU to use instead of the definition's.
    pub qemu: Option<PathBuf>,
    /// Hold network output from the guest's first instruction on. A protector with output commit adopts the hold.
    pub hold_output: bool,
    /// Set for a move: the restore succeeds only if this host becomes the next owner of the store, because the source
    /// host may resume the guest.
    pub move_claim: Option<Arc<MoveClaim>>,
}

/// A destination host's claim on a guest that the source host has stopped. The source host resumes the guest if this
/// host certainly cannot have it.
#[derive(Debug, Default)]
pub struct MoveClaim {
    /// The owner epoch of the source host; once this host has claimed the store, the owner epoch of that claim. If the
    /// store has another owner, nothing is restored.
    pub after: AtomicU64,
    /// The guest may have been resumed.
    pub may_run: AtomicBool,
    /// Existing connections to the store.
    pub spare: SpareConnections,
}

/// Why a guest was not restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store's owner epoch cannot be recorded.
    #[error(transparent)]
    RunDir(TargetError),
    /// The guest was resumed, and a later step failed.
    #[error(
        "{name}: its guest was resumed in QEMU (process {pid}), which runs, but the restore failed after that; nothing was undone: \
         rekindle recover {name}"
    )]
    MayRun {
        name: String,
        pid: u32,
        /// The step that failed.
        #[source]
        source: Box<RestoreError>,
    },
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// A checkpoint with another machine or other disks was committed meanwhile.
    #[error(
        "checkpoint {number} of {name}, which was just committed, has another machine or other disks than the one before it; try \
         again"
    )]
    Changed { name: String, number: u64 },
    /// A newer checkpoint was committed during the load.
    #[error("checkpoint {newest} of {name} was committed while the one before it was being loaded; try again")]
    Newer { name: String, newest: u64 },
    /// A checkpoint that was being loaded was not committed.
    #[error("checkpoint {number} was not committed by the source host")]
    NotCommitted { number: u64 },
    /// The committed checkpoint differs from the announced one.
    #[error("checkpoint {number} differs from what the source host sent before it was committed: {what}")]
    Otherwise {
        number: u64,
        /// The differing part, as a noun phrase.
        what: String,
    },
    /// The VM cannot run on this host.
    #[error(transparent)]
    Life(#[from] LifeError),
    #[error(transparent)]
    Vmm(#[from] VmmError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("QEMU could not load checkpoint {number} of {name}; it printed:\n{log}")]
    Load {
        name: String,
        number: u64,
        /// The end of QEMU's log.
        log: String,
        #[source]
        source: TransferError,
    },
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The device state is malformed.
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    #[error("QEMU has other RAM blocks than the guest of checkpoint {number}: {what}")]
    Blocks { number: u64, what: String },
    #[error(
        "the guest of checkpoint {number} would see other processors here: {}; restore with a --qemu, or on a host, like those that it \
         ran on", listed(.words)
    )]
    Cpu {
        number: u64,
        /// Name of each feature word, its value on the checkpoint's host, and its value on this host.
        words: Vec<(String, u64, u64)>,
    },
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// `fill.json` cannot be written.
    #[error(transparent)]
    Fill(#[from] FillError),
    #[error("cannot start the pager of {name}")]
    Start {
        name: String,
        #[source]
        source: io::Error,
    },
    /// An eager restore was not completed.
    #[error("not all memory of {name} was loaded; its pager printed:\n{log}")]
    NotFilled {
        name: String,
        /// The end of the pager's log.
        log: String,
    },
    /// QEMU died immediately after the resume.
    #[error(
        "the QEMU of {name} died just after it had resumed the guest; the checkpoint is unchanged, and can be restored again; end \
         of the QEMU's log:\n{log}"
    )]
    DiedResumed { name: String, log: String },
    /// A step of the hand-over failed.
    #[error(transparent)]
    Handover(HandoverError),
    #[error("{}", path.display())]
    Journal {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl From<OwnError> for RestoreError {
    fn from(e: OwnError) -> Self {
        match e {
            OwnError::Store(e) => Self::Store(e),
            OwnError::RunDir(e) => Self::RunDir(e),
        }
    }
}

impl RestoreError {
    /// Returns whether a recovery that failed for this reason must be repeated.
    #[must_use]
    pub fn needs_recovery(&self) -> bool {
        match self {
            Self::MayRun { .. } => true,
            Self::Handover(e) => e.needs_recovery(),
            Self::Qmp(e) => e.is_silence(),
            Self::Vmm(e) => e.is_silence(),
            Self::Life(e) => e.is_silence(),
            _ => false,
        }
    }
}

impl From<HandoverError> for RestoreError {
    fn from(e: HandoverError) -> Self {
        match e {
            HandoverError::Life(e) => Self::Life(e),
            HandoverError::Vmm(e) => Self::Vmm(e),
            HandoverError::Qmp(e) => Self::Qmp(e),
            HandoverError::Transfer(e) => Self::Transfer(e),
            HandoverError::File { path, source } => Self::Journal { path, source },
            HandoverError::DiedRunning { name, log } => Self::DiedResumed { name, log },
            e => Self::Handover(e),
        }
    }
}

fn listed(words: &[(String, u64, u64)]) -> String {
    let one = |(name, was, now): &(String, u64, u64)| format!("{name} was {was:#x} and is {now:#x}");
    words.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// A guest that was restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    pub name: String,
    pub checkpoint: u64,
    /// When the checkpoint was taken, in µs since 1970, by its host's clock.
    pub taken_us: u64,
    /// Time from the command to the guest's resume, in µs.
    pub us: u64,
    /// Pid of the QEMU.
    pub pid: u32,
    /// All of the guest's memory is loaded.
    pub filled: bool,
    /// A prepared QEMU was used.
    pub prepared: bool,
    /// Why the prepared QEMU was not used.
    pub unused: Option<String>,
    /// State of the guest's clock.
    pub clock: Clock,
}

/// Restores the guest of a checkpoint as VM `name`. Uses the QEMU that was prepared for the VM, if it is suitable.
///
/// *Needs:* the store; room for the guest's RAM; no running VM of that name; a QEMU that supports the guest's machine;
/// the files that the definition names.
/// *On success:* the guest runs; a pager loads the rest of its memory.
/// *On failure:* nothing is left behind, and the checkpoint is unchanged. A prepared QEMU continues to wait, unless it
/// had already been given the state. Exception: after [`RestoreError::MayRun`], the guest may run.
pub fn restore(host: &Host, name: &Name, request: &Request) -> Result<Restored, RestoreError> {
    restore_in(host, name, request, None)
}

/// Does the same as [`restore`], in the prepared QEMU `early` if that is still the current one.
pub(crate) fn restore_in(
    host: &Host,
    name: &Name,
    request: &Request,
    mut early: Option<PrimedQemu>,
) -> Result<Restored, RestoreError> {
    let began = Instant::now();
    let mut late = None;
    for _ in 1..TRIES {
        match attempt(host, name, request, &mut early, began) {
            Err(RestoreError::Changed { .. }) => {}
            // The prepared QEMU had already been given the state.
            Err(e @ RestoreError::Newer { .. }) => late = Some(e.to_string()),
            other => return other.map(|restored| with_unused(restored, late)),
        }
    }
    attempt(host, name, request, &mut early, began).map(|restored| with_unused(restored, late))
}

/// Adds the reason why the prepared QEMU was not used.
fn with_unused(restored: Restored, late: Option<String>) -> Restored {
    let unused = restored.unused.or(late);
    Restored { unused, ..restored }
}

fn attempt(
    host: &Host,
    name: &Name,
    request: &Request,
    early: &mut Option<PrimedQemu>,
    began: Instant,
) -> Result<Restored, RestoreError> {
    let mut recorder = Recorder::new(name.as_str(), "restore");
    let chosen = ChosenCheckpoint::open(request)?;
    recorder.step("open the store");
    let mut idle_slot = IdleSlot::lock(host, name.as_str(), "restore")?;
    let (plan, unused) = match plan(&idle_slot, name, request, &chosen) {
        Ok(planned) => planned,
        Err(e) => {
            idle_slot.release();
            return Err(e);
        }
    };
    let waits = idle_slot.prepared().map(|(_, prepared)| prepared.clone()).filter(|_| unused.is_none());
    let mut unused = unused.unwrap_or_default();
    recorder.step("check what it needs");
    if let Some(prepared) = waits {
        match prepare::WaitingQemu::of(&prepared, &idle_slot.rundir, &plan.state.hardware, early.take()) {
            Ok(ready) => {
                return prepare::resume_in(idle_slot, plan, chosen, &prepared, ready, request, recorder, began);
            }
            Err(why) => unused = Some(why),
        }
    }
    if let Some(why) = &unused {
        tracing::warn!("the QEMU that was prepared for {name} cannot be used, starting another one: {why}");
        idle_slot.clear()?;
    }
    let place = idle_slot.into_slot(plan)?.at_epochs(chosen.epochs.clone());
    match fresh(&place, chosen, request, recorder, began) {
        Ok(restored) => Ok(Restored { unused, ..restored }),
        Err(e) => Err(undo(place, e)),
    }
}

/// Undoes a restore that failed with `e`. A QEMU that may run the guest is left for `rekindle recover`: ending it would
/// lose the guest's work since the resume.
fn undo(place: VmSlot<'_>, e: RestoreError) -> RestoreError {
    match place.qemu_that_may_run() {
        Some(vmm) => RestoreError::MayRun { name: place.rundir.name().into(), pid: vmm.pid, source: Box::new(e) },
        None => {
            place.undo();
            e
        }
    }
}

/// The plan for building the VM on this host, and the reason against the prepared QEMU. Outer `None`: the prepared QEMU
/// is suitable. Inner `None`: there is no prepared QEMU.
type Planned = (Plan, Option<Option<String>>);

fn plan(
    idle_slot: &IdleSlot<'_>,
    name: &Name,
    request: &Request,
    chosen: &ChosenCheckpoint,
) -> Result<Planned, RestoreError> {
    let prepared = idle_slot.prepared().map(|(_, prepared)| prepared).or(idle_slot.ended_prepared());
    let given = prepared.and_then(|prepared| prepared.given.clone());
    let qemu = prepared.and_then(|prepared| prepared.qemu.clone());
    let given = request.definition.clone().or(given);
    let is_given = given.is_some();
    let definition = given.unwrap_or_else(|| chosen.recipe.definition.clone());
    let definition = Definition { name: name.clone(), ..definition };
    let qemu = request.qemu.clone().or(qemu);
    let mut plan = idle_slot.plan(definition, qemu.as_deref(), &chosen.epochs, |hardware| {
        chosen.recipe.fit(hardware, is_given)?;
        without_epoch(hardware, &chosen.epochs)
    })?;
    let unused = match idle_slot.prepared() {
        Some((state, prepared)) => prepare::fits(state, prepared, &mut plan).err().map(Some),
        None => Some(idle_slot.ended_prepared().and_then(|prepared| prepared.check().err())),
    };
    Ok((plan, unused))
}

/// Rejects disks that may be newer than the checkpoint. Returns one message for each.
fn without_epoch(hardware: &Hardware, epochs: &Epochs) -> Result<(), Vec<String>> {
    let has_none = |disk: &&Disk| disk.server && !disk.readonly && !epochs.contains_key(&disk.id);
    let problems: Vec<_> = hardware
        .disks
        .iter()
        .filter(has_none)
        .map(|disk| {
            format!(
                "disk {}: the checkpoint does not record its epoch, so the disk may be newer than the guest's memory",
                disk.id
            )
        })
        .collect();
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// Restores into a new destination QEMU, which is started while the store is being read.
fn fresh(
    place: &VmSlot<'_>,
    chosen: ChosenCheckpoint,
    request: &Request,
    recorder: Recorder,
    began: Instant,
) -> Result<Restored, RestoreError> {
    // All checks precede the claim of the store: if one fails, a protector of the VM can continue.
    let SlotResources { journal, fds } = place.make(Kind::Restore)?;
    let mut handover = handover_into(place, journal, recorder);
    handover.pass("restore.prepare.journalled");
    handover.recorder.step("make its place");
    let environment = OwnRunDir { rundir: &place.rundir, hardware: &place.state.hardware, binary: &place.binary };
    let (input, empty) = thread::scope(|scope| {
        let input = scope.spawn(|| checkpoint::fetch(chosen, request, &place.rundir));
        let empty = EmptyDestination::start(&mut handover, &environment, fds)?;
        handover.recorder.step("start QEMU");
        let input = input.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok::<_, RestoreError>((Arc::new(input), empty))
    })?;
    handover.recorder.step("read its devices");
    load::load_and_resume(handover, empty, &input, None, request, began)
}

/// Returns the hand-over of a restore into `place`. It has no source.
fn handover_into(place: &VmSlot<'_>, journal: Journal, recorder: Recorder) -> Handover {
    Handover { rundir: place.rundir.clone(), state: place.state.clone(), journal, recorder }
}

/// Rejects a QEMU whose processor features differ from those that the guest of an attached QEMU has seen: the CPU model
/// alone does not determine them.
fn same_processors(qmp: &mut Qmp, hardware: &Hardware, number: u64) -> Result<(), RestoreError> {
    let Some(foreign) = &hardware.foreign else { return Ok(()) };
    let words = cpu::differences(&foreign.cpu, &cpu::features(qmp)?);
    if words.is_empty() { Ok(()) } else { Err(RestoreError::Cpu { number, words }) }
}

/// Rejects a QEMU whose RAM blocks differ from the checkpoint's. The sizes of blocks may differ, except of those in
/// `paged`.
fn same_blocks(
    ram: &GuestRam,
    theirs: &[rekindle_store::types::Block],
    number: u64,
    paged: &[String],
) -> Result<(), RestoreError> {
    let differ = |what: String| RestoreError::Blocks { number, what };
    let ours: Vec<_> = ram.blocks().iter().map(|block| &block.info).collect();
    for block in theirs {
        match ours.iter().find(|ours| ours.id == block.id) {
            None => return Err(differ(format!("it has no block {}", block.id))),
            Some(ours) if paged.contains(&block.id) && ours.used != block.used => {
                let (id, ours, theirs) = (&block.id, ours.used, block.used);
                return Err(differ(format!("its {id} has {ours} bytes, the guest's {theirs}")));
            }
            Some(_) => {}
        }
    }
    match ours.iter().find(|ours| !theirs.iter().any(|block| block.id == ours.id)) {
        Some(block) => Err(differ(format!("the guest has no block {}", block.id))),
        None => Ok(()),
    }
}
