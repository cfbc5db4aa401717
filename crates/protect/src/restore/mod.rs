//! A guest goes on from a checkpoint; its pages come on demand (HydraVM, sections IV-A and IV-B).
//!
//! | module | what it is for |
//! |---|---|
//! | `checkpoint` | what is read of the store before the guest runs |
//! | [`prepare`] | a QEMU that waits with empty RAM |
//! | `ahead` | a load beside the commit of what is loaded |
//! | `go` | from a QEMU that waits to a guest that runs |
//!
//! `docs/protect.md` has the sequence.

pub(crate) mod ahead;
pub(crate) mod checkpoint;
pub(crate) mod go;
pub mod prepare;

pub use go::{Clock, start_pager};

use crate::owned::OwnError;
use crate::pager::FillError;
use crate::recipe::RecipeError;
use crate::target::TargetError;
use checkpoint::Chosen;
use go::Waiting;
use prepare::Early;
use rekindle_kernel::inject::InjectError;
use rekindle_memory::missing::PagerError;
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_qemu::command::{Disk, Hardware};
use rekindle_qemu::cpu;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::stream::StreamError;
use rekindle_qemu::transfer::{Capabilities, TransferError};
use rekindle_qemu::vmm::VmmError;
use rekindle_store::remote::{Identity, SpareConnections};
use rekindle_store::{StoreError, StoreUrl};
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::disks::Epochs;
use rekindle_vm::fault;
use rekindle_vm::host::Host;
use rekindle_vm::journal::Kind;
use rekindle_vm::life::LifeError;
use rekindle_vm::place::{Plan, Site, VmSlot};
use rekindle_vm::timeline::Recorder;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::Instant;

/// What a QEMU that gets its devices, and its RAM by a pager, is set to: `x-ignore-shared`, since its RAM is a file that is
/// mapped shared; `late-block-activate`, so that disks are taken at the resume only.
const CAPABILITIES: Capabilities<'static> =
    &[("events", true), ("x-ignore-shared", true), ("late-block-activate", true)];
/// How often a restore is begun anew because the store has got a checkpoint of another machine meanwhile.
const TRIES: usize = 3;

/// What is wanted.
#[derive(Debug, Clone)]
pub struct Request {
    /// Where the checkpoint is.
    pub store: StoreUrl,
    /// Who we are to a store on a server.
    pub identity: Option<Identity>,
    /// Its number; none: the newest.
    pub at: Option<u64>,
    /// Bring all memory before the guest goes on.
    pub eager: bool,
    /// How the VM is to be built here, where its files are elsewhere than on the host of the checkpoint.
    pub definition: Option<Definition>,
    /// The QEMU to use instead of the definition's.
    pub qemu: Option<PathBuf>,
    /// Hold what the guest sends, from its first instruction on, until somebody protects it with output commit.
    pub hold_output: bool,
    /// Only as the next owner of the store, for a guest that may have to go on where it was: see [`TakeOver`].
    pub take_over: Option<Arc<TakeOver>>,
}

/// A guest that another host has stopped, and lets go on if this one cannot have it for certain.
#[derive(Debug, Default)]
pub struct TakeOver {
    /// The owner epoch of that host; if it is not the store's any more, nothing is restored. Then that of the restore.
    pub after: AtomicU64,
    /// The guest has been let go, or may have been.
    pub begun: AtomicBool,
    /// Lines to the store that are there already.
    pub spare: SpareConnections,
}

/// Why a guest was not restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store's owner epoch cannot be noted.
    #[error(transparent)]
    RunDir(TargetError),
    /// Its guest was told to resume, and something failed after that.
    #[error(
        "{name}: its guest was resumed in QEMU (process {pid}), which runs, but the restore failed after that; nothing was undone: \
         rekindle recover {name}"
    )]
    MayRun {
        /// The VM.
        name: String,
        /// The QEMU.
        pid: u32,
        /// What failed.
        #[source]
        source: Box<RestoreError>,
    },
    /// How to build its VM is not known.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The store has got a checkpoint of another machine while it was being read.
    #[error(
        "checkpoint {number} of {name} is of another machine, or of other disks, than the one before it, and came just now; try \
         again"
    )]
    Changed {
        /// The VM.
        name: String,
        /// The checkpoint.
        number: u64,
    },
    /// The store has got a newer checkpoint while one was being loaded.
    #[error("checkpoint {newest} of {name} came while the one before it was being loaded; try again")]
    Newer {
        /// The VM.
        name: String,
        /// The newest one.
        newest: u64,
    },
    /// A checkpoint that was loaded beside its commit does not count.
    #[error("checkpoint {number} was not committed by the host that had the guest")]
    NotCommitted {
        /// The checkpoint.
        number: u64,
    },
    /// It is not what that host had said.
    #[error("checkpoint {number} is not what was said of it before it was committed: {what}")]
    Otherwise {
        /// The checkpoint.
        number: u64,
        /// What differs.
        what: String,
    },
    /// It cannot run here.
    #[error(transparent)]
    Life(#[from] LifeError),
    /// QEMU does not start.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// QEMU does not do as it is told.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU could not load the state.
    #[error("QEMU could not load checkpoint {number} of {name}; it said:\n{said}")]
    Load {
        /// The VM.
        name: String,
        /// The checkpoint.
        number: u64,
        /// The end of QEMU's log.
        said: String,
        /// Why.
        #[source]
        source: TransferError,
    },
    /// QEMU takes no state.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The device state is none.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// QEMU's memory cannot be found.
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    /// QEMU has other RAM blocks than the guest of the checkpoint.
    #[error("QEMU has other RAM blocks than the guest of checkpoint {number}: {what}")]
    Blocks {
        /// The checkpoint.
        number: u64,
        /// What differs.
        what: String,
    },
    /// The guest would see other processors.
    #[error(
        "the guest of checkpoint {number} would see other processors here: {}; restore with a --qemu, or on a host, like those that it \
         ran on", listed(.words)
    )]
    Cpu {
        /// The checkpoint.
        number: u64,
        /// Name of the feature word, what it was, what it would be.
        words: Vec<(String, u64, u64)>,
    },
    /// QEMU cannot be made to wait for its pages.
    #[error(transparent)]
    Inject(#[from] InjectError),
    /// Its pages cannot be brought.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// The record for the pager.
    #[error(transparent)]
    Fill(#[from] FillError),
    /// The pager cannot be started.
    #[error("cannot start the pager of {name}")]
    Start {
        /// The VM.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An eager restore did not end.
    #[error("not all memory of {name} has come; its pager said:\n{said}")]
    NotFilled {
        /// The VM.
        name: String,
        /// The end of its log.
        said: String,
    },
    /// What had to be done before it could go on.
    #[error(transparent)]
    Before(Box<dyn std::error::Error + Send + Sync>),
    /// It runs, and that cannot be recorded.
    #[error("the guest runs, but that cannot be recorded")]
    Record(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The journal cannot be written.
    #[error("{}", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// Why.
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

fn listed(words: &[(String, u64, u64)]) -> String {
    let one = |(name, was, now): &(String, u64, u64)| format!("{name} was {was:#x} and is {now:#x}");
    words.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// A guest that goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// The VM.
    pub name: String,
    /// The checkpoint.
    pub checkpoint: u64,
    /// When it was taken, in µs since 1970 by that host's clock.
    pub taken_us: u64,
    /// From the command to the guest's running, in µs.
    pub us: u64,
    /// Its QEMU.
    pub pid: u32,
    /// Whether all of its memory is there.
    pub filled: bool,
    /// Whether it went into a QEMU that had been prepared.
    pub prepared: bool,
    /// Why the one that had been prepared was of no use.
    pub unused: Option<String>,
    /// What became of the guest's clock.
    pub clock: Clock,
}

/// Let the guest of a checkpoint go on as VM `name`, in the QEMU that was prepared for it if there is one that fits.
///
/// *Needs:* the store; room for its RAM; no VM of that name that runs; a QEMU that knows its machine; what its definition names.
/// *On success:* the guest runs; what of its memory is not there yet is brought by a pager.
/// *On failure:* nothing is left behind; the checkpoint is where it was. A QEMU that was prepared waits on, unless the state had
/// been given to it already.
///
/// # Errors
/// [`RestoreError`].
pub fn restore(host: &Host, name: &Name, request: &Request) -> Result<Restored, RestoreError> {
    restore_in(host, name, request, None)
}

/// As [`restore`], into the QEMU that was prepared for it if `early` is that one.
pub(crate) fn restore_in(
    host: &Host,
    name: &Name,
    request: &Request,
    mut early: Option<Early>,
) -> Result<Restored, RestoreError> {
    let began = Instant::now();
    let mut late = None;
    for _ in 1..TRIES {
        match once(host, name, request, &mut early, began) {
            Err(RestoreError::Changed { .. }) => {}
            // It had been given to the QEMU that was prepared.
            Err(e @ RestoreError::Newer { .. }) => late = Some(e.to_string()),
            other => return other.map(|restored| told(restored, late)),
        }
    }
    once(host, name, request, &mut early, began).map(|restored| told(restored, late))
}

/// With why what was prepared was of no use.
fn told(restored: Restored, late: Option<String>) -> Restored {
    let unused = restored.unused.or(late);
    Restored { unused, ..restored }
}

fn once(
    host: &Host,
    name: &Name,
    request: &Request,
    early: &mut Option<Early>,
    began: Instant,
) -> Result<Restored, RestoreError> {
    let mut recorder = Recorder::new(name.as_str(), "restore");
    let chosen = Chosen::open(request)?;
    recorder.step("open the store");
    let mut site = Site::take(host, name.as_str(), "restore")?;
    let (plan, unused) = match plan(&site, name, request, &chosen) {
        Ok(planned) => planned,
        Err(e) => {
            site.leave();
            return Err(e);
        }
    };
    let waits = site.prepared().map(|(_, prepared)| prepared.clone()).filter(|_| unused.is_none());
    let mut unused = unused.unwrap_or_default();
    recorder.step("see what it needs");
    if let Some(prepared) = waits {
        match prepare::Ready::of(&prepared, &site.rundir, &plan.state.hardware, early.take()) {
            Ok(ready) => return prepare::resume_in(site, plan, chosen, &prepared, ready, request, recorder, began),
            Err(why) => unused = Some(why),
        }
    }
    if let Some(why) = &unused {
        tracing::warn!("what was prepared for {name} is of no use, and another QEMU is started: {why}");
        site.clear()?;
    }
    let place = site.place(plan)?.at_epochs(chosen.epochs.clone());
    match fresh(&place, chosen, request, &mut recorder, began) {
        Ok(restored) => {
            recorder.write(&place.rundir);
            Ok(Restored { unused, ..restored })
        }
        Err(e) => Err(undo(place, e)),
    }
}

/// Undoes a restore that failed with `e`. A QEMU that may run the guest is left for `recover`: ending it would lose what the guest has done since.
fn undo(place: VmSlot<'_>, e: RestoreError) -> RestoreError {
    match place.may_run() {
        Some(vmm) => RestoreError::MayRun { name: place.rundir.name().into(), pid: vmm.pid, source: Box::new(e) },
        None => {
            place.undo();
            e
        }
    }
}

/// How the VM is to be had here, and what speaks against the QEMU that was prepared: none if nothing does, or there is none.
type Planned = (Plan, Option<Option<String>>);

fn plan(site: &Site<'_>, name: &Name, request: &Request, chosen: &Chosen) -> Result<Planned, RestoreError> {
    let prepared = site.prepared().map(|(_, prepared)| prepared).or(site.lost());
    let given = prepared.and_then(|prepared| prepared.given.clone());
    let qemu = prepared.and_then(|prepared| prepared.qemu.clone());
    let given = request.definition.clone().or(given);
    let is_given = given.is_some();
    let definition = given.unwrap_or_else(|| chosen.recipe.definition.clone());
    let definition = Definition { name: name.clone(), ..definition };
    let qemu = request.qemu.clone().or(qemu);
    let mut plan = site.plan(definition, qemu.as_deref(), |hardware| {
        chosen.recipe.fit(hardware, is_given)?;
        without_epoch(hardware, &chosen.epochs)
    })?;
    let unused = match site.prepared() {
        Some((state, prepared)) => prepare::fits(state, prepared, &mut plan).err().map(Some),
        None => Some(site.lost().and_then(|prepared| prepared.check().err())),
    };
    Ok((plan, unused))
}

/// Disks that are newer than the checkpoint knows, or may be.
fn without_epoch(hardware: &Hardware, epochs: &Epochs) -> Result<(), Vec<String>> {
    let lacks = |disk: &&Disk| disk.server && !disk.readonly && !epochs.contains_key(&disk.id);
    let lacking: Vec<_> = hardware.disks.iter().filter(lacks).map(|disk| {
        format!("disk {}: the checkpoint does not say which epoch of it belongs to its memory, so the disk may be newer", disk.id)
    }).collect();
    if lacking.is_empty() { Ok(()) } else { Err(lacking) }
}

/// Start a QEMU while the store is being read.
fn fresh(
    place: &VmSlot<'_>,
    chosen: Chosen,
    request: &Request,
    recorder: &mut Recorder,
    began: Instant,
) -> Result<Restored, RestoreError> {
    // What may be refused comes before the store is claimed: whoever protects the VM is to go on then.
    let made = place.make(Kind::Restore)?;
    fault::point("restore.prepare.journalled", None, None);
    recorder.step("make its place");
    thread::scope(|scope| {
        let ahead = scope.spawn(|| checkpoint::fetch(chosen, request, &place.rundir));
        let waiting = Waiting::start(&place.rundir, &place.binary, made, &place.state.hardware)?;
        fault::point("restore.prepare.spawned", None, Some(&waiting.vmm));
        recorder.step("start QEMU");
        let ahead = ahead.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        recorder.step("read its devices");
        go::go_in(place, waiting, &ahead, None, request, recorder, began)
    })
}

/// The processors that the guest of an attached QEMU has seen: their model alone does not say it all.
fn same_processors(qmp: &mut Qmp, hardware: &Hardware, number: u64) -> Result<(), RestoreError> {
    let Some(foreign) = &hardware.foreign else { return Ok(()) };
    let words = cpu::differences(&foreign.cpu, &cpu::features(qmp)?);
    if words.is_empty() { Ok(()) } else { Err(RestoreError::Cpu { number, words }) }
}

/// The same blocks on both sides; their sizes may differ where QEMU can resize them, and then it does.
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
