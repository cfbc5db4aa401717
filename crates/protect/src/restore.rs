//! A guest goes on from a checkpoint; its pages come on demand (HydraVM, sections IV-A and IV-B).

use crate::pager::{Fill, FillError, Source};
use crate::recipe::{Recipe, RecipeError};
use rekindle_kernel::inject::{InjectError, Injector};
use rekindle_kernel::spawn::detach;
use rekindle_memory::missing::{Pager, PagerError};
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_qemu::command::Start;
use rekindle_qemu::cpu;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::stream::{self, RamSection, StreamError};
use rekindle_qemu::transfer::{Capabilities, Feed, TransferError, wait_loaded};
use rekindle_qemu::vmm::{self, Vmm, VmmError, log_tail};
use rekindle_store::remote::Identity;
use rekindle_store::{Image, StoreError, StoreUrl, Which, admin};
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Kind, Step};
use rekindle_vm::life::LifeError;
use rekindle_vm::place::{Made, Place};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::timeline::{Phase, Recorder, host_us};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// What a QEMU that gets its devices, and its RAM by a pager, is set to: `x-ignore-shared`, since its RAM is a file that is
/// mapped shared; `late-block-activate`, so that disks are taken at the resume only.
const CAPABILITIES: Capabilities<'static> =
    &[("events", true), ("x-ignore-shared", true), ("late-block-activate", true)];
/// How long a load may take: it waits for the pages that the devices need.
const LOAD: Duration = Duration::from_secs(600);
/// How long an eager restore may take.
const EAGER: Duration = Duration::from_secs(24 * 3600);

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
}

/// Why a guest was not restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// How to build its VM is not known.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
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
}

/// Let the guest of a checkpoint go on as VM `name`.
///
/// *Needs:* the store; room for its RAM; no VM of that name that runs; a QEMU that knows its machine; what its definition names.
/// *On success:* the guest runs; what of its memory is not there yet is brought by a pager.
/// *On failure:* nothing is left behind; the checkpoint is where it was.
///
/// # Errors
/// [`RestoreError`].
pub fn restore(host: &Host, name: Name, request: &Request) -> Result<Restored, RestoreError> {
    let began = Instant::now();
    let mut recorder = Recorder::new(name.as_str(), "restore");
    let which = Which { at: request.at, identity: request.identity.clone(), ..Which::default() };
    let image = Image::open(&request.store, &which)?;
    let recipe = Recipe::read(&image.definition()?)?;
    recorder.step("open the store");
    let definition = Definition { name, ..request.definition.clone().unwrap_or_else(|| recipe.definition.clone()) };
    let place = Place::take(host, definition, request.qemu.as_deref(), "restore", |hardware| {
        recipe.fit(hardware, request.definition.is_some())
    })?;
    match fence(&image, request, &which, &place).and_then(|image| fill(&place, &image, request, &mut recorder, began)) {
        Ok(restored) => {
            recorder.write(&place.rundir);
            Ok(restored)
        }
        Err(e) => {
            place.undo();
            Err(e)
        }
    }
}

/// Become the store's owner: a host that was declared dead and is not can commit nothing any more. What it has committed
/// until then counts.
fn fence(image: &Image, request: &Request, which: &Which, place: &Place<'_>) -> Result<Image, RestoreError> {
    admin::fence(&request.store, image.vm(), &format!("restore {}", place.rundir.name()), request.identity.as_ref())?;
    Ok(Image::open(&request.store, which)?)
}

fn fill(
    place: &Place<'_>,
    image: &Image,
    request: &Request,
    recorder: &mut Recorder,
    began: Instant,
) -> Result<Restored, RestoreError> {
    let info = image.info();
    let name = place.rundir.name().to_owned();
    let Made { mut journal, directory, fds } = place.make(Kind::Restore)?;
    let path = place.rundir.file("operation.json");
    let journalled = |source| RestoreError::Journal { path: path.clone(), source };
    recorder.step("make its place");
    let arguments = place.state.hardware.arguments(&directory, &place.rundir.console_log(), Start::Incoming);
    let vmm = Vmm::spawn(&place.state.definition.qemu, &arguments, &directory, fds)?;
    journal.operation.to = Some(vmm.clone());
    journal.write().map_err(journalled)?;
    let paged = place.state.hardware.ram_ids();
    let ahead = small_blocks(image, &paged)?;
    let mut qmp = vmm.connect(vmm::START)?;
    if let Some(foreign) = &place.state.hardware.foreign {
        let words = cpu::differences(&foreign.cpu, &cpu::features(&mut qmp)?);
        if !words.is_empty() {
            return Err(RestoreError::Cpu { number: info.number, words });
        }
    }
    recorder.step("start QEMU");
    let ram = GuestRam::of(&mut qmp, vmm.process())?;
    same_blocks(&ram, &info.blocks, info.number, &paged)?;
    // From here on whoever touches a missing page waits.
    let mut silent = |_: &_| {};
    let chosen = |id: &str| paged.iter().any(|paged| paged == id);
    let pager = Pager::begin(Injector::new(vmm.process())?, &ram, chosen, &mut Source::new(image, &mut silent), None)?;
    drop(pager);
    Fill::new(request.store.clone(), request.identity.as_ref(), info, vmm.clone(), &ram, paged.clone())
        .write(&place.rundir)?;
    start_pager(&place.rundir)?;
    recorder.step("register its memory");

    recorder.phase(Phase::Renew);
    let devices = image.devices()?;
    let devices = stream::check(&devices)?;
    let load = |qmp: &mut Qmp| {
        let mut feed = Feed::open(qmp, CAPABILITIES)?;
        feed.write(&ahead)?;
        feed.write(devices)?;
        drop(feed);
        wait_loaded(qmp, LOAD)
    };
    let failed = |source| {
        let said = log_tail(&directory, 10);
        RestoreError::Load { name: name.clone(), number: info.number, said, source }
    };
    load(&mut qmp).map_err(failed)?;
    recorder.step("load its devices");
    if request.eager {
        wait_filled(&place.rundir, &vmm)?;
        recorder.step("bring its memory");
    }
    recorder.phase(Phase::Resume);
    journal.advance(Step::Resume).map_err(journalled)?;
    qmp.drop_events();
    qmp.execute::<Value>("cont", ())?;
    let resumed = qmp.wait_event("RESUME", Duration::from_secs(10), |e| (e.name == "RESUME").then_some(e.host_us))?;
    let us = (began.elapsed().as_micros() as u64).saturating_sub(host_us().saturating_sub(resumed));
    recorder.step("resume");
    recorder.phase(Phase::Settle);
    // Switches and neighbours learn where it is now.
    let rounds = json!({"initial": 50, "max": 550, "rounds": 5, "step": 100});
    if let Err(e) = qmp.execute::<Value>("announce-self", rounds) {
        tracing::debug!("{name}: its network cards were not announced: {e}");
    }
    let pid = vmm.pid;
    place.settle(journal, vmm, qmp.version().clone())?;
    recorder.step("record");
    let (checkpoint, taken_us) = (info.number, info.time_us);
    Ok(Restored { name, checkpoint, taken_us, us, pid, filled: !place.rundir.fill().exists() })
}

/// What of the stream comes before the devices: all blocks but those that are brought on demand.
fn small_blocks(image: &Image, paged: &[String]) -> Result<Vec<u8>, RestoreError> {
    let blocks = &image.info().blocks;
    let small: Vec<_> = blocks.iter().enumerate().filter(|(_, block)| !paged.contains(&block.id)).collect();
    let mut part = stream::HEADER.to_vec();
    let mut section = RamSection::start(&mut part, small.iter().map(|(_, block)| (block.id.as_str(), block.used)));
    for (index, block) in small {
        let pages: Vec<_> = (0..block.pages()).map(|page| (index, page)).collect();
        image.read_many(&pages, |(_, page), content| {
            // QEMU's own copy of a block starts as zeroes or as what its firmware file holds: so zeroes are sent, too.
            section.page(&mut part, &block.id, page * stream::PAGE as u64, content);
        })?;
    }
    section.end(&mut part);
    Ok(part)
}

/// The same blocks on both sides; their sizes may differ where QEMU can resize them, and then it does.
fn same_blocks(
    ram: &GuestRam,
    theirs: &[rekindle_store::types::Block],
    number: u64,
    paged: &[String],
) -> Result<(), RestoreError> {
    let differ = |what: String| RestoreError::Blocks { number, what };
    let ours: Vec<_> = ram.blocks().iter().map(|block| &block.told).collect();
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

/// Start the process that brings the VM's memory.
///
/// # Errors
/// [`RestoreError::Start`].
pub fn start_pager(rundir: &RunDir) -> Result<(), RestoreError> {
    let failed = |source| RestoreError::Start { name: rundir.name().into(), source };
    let open = || OpenOptions::new().create(true).append(true).mode(0o600).open(log(rundir));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(["pager", rundir.name()]).stdout(open().map_err(failed)?).stderr(open().map_err(failed)?);
    if let Some(root) = rundir.path().parent() {
        command.env("REKINDLE_RUN_DIR", root);
    }
    detach(&mut command).spawn().map(drop).map_err(failed)
}

fn log(rundir: &RunDir) -> PathBuf {
    rundir.file("pager.log")
}

fn wait_filled(rundir: &RunDir, vmm: &Vmm) -> Result<(), RestoreError> {
    let deadline = Instant::now() + EAGER;
    while rundir.fill().exists() {
        if !vmm.is_alive() || Instant::now() > deadline {
            let said = std::fs::read_to_string(log(rundir)).unwrap_or_default();
            return Err(RestoreError::NotFilled { name: rundir.name().into(), said });
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
