//! Brings the pages of a restored guest: who waits comes first, then what was written last, then the rest.
//!
//! A process of its own, `rekindle pager NAME`, that can be killed and started again at any time: QEMU holds the userfaultfd,
//! so whoever touches a missing page waits. `fill.json` in the run directory says what it needs; it goes when all is there.

use crate::filling;
use rekindle_kernel::inject::{InjectError, Injector};
use rekindle_memory::missing::{Completion, Content, Page, PageSource, Pager, PagerError, Progress};
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_qemu::ramblock::{MAIN_RAM, RamBlock};
use rekindle_qemu::vmm::Vmm;
use rekindle_store::remote::Identity;
use rekindle_store::types::{CheckpointInfo, PAGE_SIZE};
use rekindle_store::{Image, ReadOptions, StoreError, StoreUrl};
use rekindle_vm::rundir::{RunDir, write_json};
use rekindle_vm::{disks, fault};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long until a page that could not be had is asked for again.
const AGAIN: Duration = Duration::from_secs(1);
/// How long somebody may look whether there is a pager. It takes microseconds.
const LOOKED_AT: Duration = Duration::from_millis(100);
/// The format that this Rekindle writes.
const FORMAT: u32 = 1;
const ZERO: Page = [0; PAGE_SIZE];

/// Why a pager cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum FillError {
    /// There is nothing to bring.
    #[error("all of the memory of {name} is there; there is nothing for a pager to do")]
    Nothing {
        /// The VM.
        name: String,
    },
    /// Another one serves it.
    #[error("another pager serves {name} already")]
    Busy {
        /// The VM.
        name: String,
    },
    /// A file of the run directory.
    #[error("{}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The checkpoint cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// QEMU cannot be reached.
    #[error(transparent)]
    Inject(#[from] InjectError),
    /// Its memory cannot be looked at.
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    /// Pages cannot be brought.
    #[error(transparent)]
    Pager(#[from] PagerError),
}

/// `fill.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    format: u32,
    /// Where the checkpoint is.
    pub store: StoreUrl,
    /// Certificate, key and authority for a store on a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    identity: Option<[PathBuf; 3]>,
    /// Its number.
    pub number: u64,
    /// The QEMU whose memory it becomes.
    pub vmm: Vmm,
    /// The RAM blocks of that QEMU.
    blocks: Vec<RamBlock>,
    /// The names of those that are brought.
    #[serde(default = "main_only")]
    pub(crate) paged: Vec<String>,
    /// The owner epoch that committed the checkpoint.
    #[serde(default)]
    pub(crate) epoch: Option<u64>,
    /// How far it is.
    #[serde(default)]
    pub stage: Stage,
}

/// How far a restore is that fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Pages are missing.
    #[default]
    Filling,
    /// All is there. A protector still goes by the pager's record of what was written, so the pager serves on.
    Filled,
    /// A protector has taken the memory over. The pager only closes its descriptor.
    HandedOver,
}

/// What an older Rekindle meant.
fn main_only() -> Vec<String> {
    vec![MAIN_RAM.to_owned()]
}

impl Fill {
    /// The checkpoint `info` of `store` becomes the memory of `vmm`, as far as it is in the blocks that `paged` names.
    pub(crate) fn new(
        store: StoreUrl,
        identity: Option<&Identity>,
        info: &CheckpointInfo,
        vmm: Vmm,
        ram: &GuestRam,
        paged: Vec<String>,
    ) -> Self {
        let blocks = ram.blocks().iter().map(|block| block.info.clone()).collect();
        // The pager may be started from elsewhere.
        let full = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let identity = identity.map(|Identity { cert, key, ca }| [cert, key, ca].map(full));
        let (number, epoch, stage) = (info.number, Some(info.epoch), Stage::Filling);
        Self { format: FORMAT, store, identity, number, vmm, blocks, paged, epoch, stage }
    }

    fn which(&self) -> ReadOptions {
        let identity = self.identity.clone().map(|[cert, key, ca]| Identity { cert, key, ca });
        ReadOptions { at: Some(self.number), identity, ..ReadOptions::default() }
    }

    pub(crate) fn write(&self, rundir: &RunDir) -> Result<(), FillError> {
        write_json(&rundir.fill(), self).map_err(|source| FillError::File { path: rundir.fill(), source })
    }

    /// What is being brought to the VM of `rundir`, if anything is.
    ///
    /// # Errors
    /// [`FillError::File`].
    pub fn read(rundir: &RunDir) -> Result<Option<Self>, FillError> {
        let failed = |source| FillError::File { path: rundir.fill(), source };
        match fs::read(rundir.fill()) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| failed(e.into())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// The same, so far.
    pub(crate) fn at(&self, stage: Stage) -> Self {
        Self { stage, ..self.clone() }
    }

    /// Whether a pager serves the VM of `rundir` just now.
    pub(crate) fn is_served(rundir: &RunDir) -> Result<bool, FillError> {
        let (path, file) = lock_file(rundir)?;
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(false),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
            Err(e) => Err(FillError::File { path, source: e.into() }),
        }
    }
}

/// An event that a pager reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum PagerEvent {
    /// It serves.
    Serving {
        /// The checkpoint.
        checkpoint: u64,
    },
    /// A page cannot be had; whoever needs it waits.
    Waiting {
        /// Why.
        error: String,
    },
    /// All of the guest's memory is there.
    Filled {
        /// Pages that somebody waited for.
        demanded: u64,
        /// Pages brought behind.
        filled: u64,
        /// Pages that are zero.
        zero: u64,
        /// The longest that somebody waited, in µs.
        worst_us: u64,
    },
    /// It was told to end, and QEMU still misses pages.
    Ended {
        /// How many.
        left: u64,
    },
}

impl std::fmt::Display for PagerEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Serving { checkpoint } => write!(f, "bringing the memory of checkpoint {checkpoint}"),
            Self::Waiting { error } => write!(f, "a page cannot be had, whoever needs it waits: {error}"),
            Self::Filled { demanded, filled, zero, worst_us } => write!(
                f,
                "all memory is there: {demanded} pages on demand (the longest wait {worst_us} µs), {filled} behind, {zero} zero"
            ),
            Self::Ended { left } => write!(f, "ended; {left} pages are still missing, and whoever needs one waits"),
        }
    }
}

/// Pages out of a checkpoint, by names of blocks.
pub(crate) struct Source<'a> {
    image: &'a Image,
    blocks: Vec<String>,
    tell: &'a mut dyn FnMut(&PagerEvent),
    /// What was told last, so that it is told once.
    told: Option<String>,
}

impl<'a> Source<'a> {
    pub(crate) fn new(image: &'a Image, tell: &'a mut dyn FnMut(&PagerEvent)) -> Self {
        let blocks = image.info().blocks.iter().map(|block| block.id.clone()).collect();
        Self { image, blocks, tell, told: None }
    }
}

impl PageSource for Source<'_> {
    type Error = StoreError;

    fn page(&mut self, block: &str, page: u64, buffer: &mut Page) -> Result<Content, StoreError> {
        // A page beyond the block's end at the checkpoint is asked for as one that is not there: by name, never zero.
        let position = self.blocks.iter().position(|id| id == block).unwrap_or(usize::MAX);
        self.image.read_page(position, page, buffer)?;
        self.told = None;
        Ok(if *buffer == ZERO { Content::Zero } else { Content::Data })
    }

    fn retry(&mut self, error: &StoreError, _attempt: u32) -> Option<Duration> {
        let text = error.to_string();
        if self.told.as_ref() != Some(&text) {
            (self.tell)(&PagerEvent::Waiting { error: text.clone() });
            self.told = Some(text);
        }
        Some(AGAIN)
    }
}

/// Serve the VM of `rundir` until all is there or `end` is set.
///
/// *Needs:* a restore that is still filling, and no other pager.
/// *On success:* all of the guest's memory is there, or `end` was set.
/// *On failure:* whoever needs a missing page waits; it can be started again.
///
/// # Errors
/// [`FillError`].
pub fn serve(rundir: &RunDir, end: &AtomicBool, tell: &mut dyn FnMut(&PagerEvent)) -> Result<Progress, FillError> {
    let _lock = lock(rundir)?;
    let (fill, image) = open(rundir)?;
    bring(rundir, &fill, &image, end, tell)
}

/// As [`serve`], in the place of a process that brings pages now: what takes time is done first, then `ready` is called, and
/// then it is waited until the other one has let go.
///
/// # Errors
/// [`FillError`].
pub fn serve_after(
    rundir: &RunDir,
    ready: impl FnOnce(),
    end: &AtomicBool,
    tell: &mut dyn FnMut(&PagerEvent),
) -> Result<Progress, FillError> {
    let (fill, image) = open(rundir)?;
    ready();
    let _lock = loop {
        match lock(rundir) {
            Err(FillError::Busy { .. }) if !end.load(Ordering::Relaxed) => thread::sleep(Duration::from_millis(1)),
            other => break other?,
        }
    };
    // Another restore of the VM may have begun since.
    match Fill::read(rundir)? {
        Some(now) if now == fill => bring(rundir, &fill, &image, end, tell),
        _ => Err(FillError::Nothing { name: rundir.name().into() }),
    }
}

fn open(rundir: &RunDir) -> Result<(Fill, Image), FillError> {
    let fill = Fill::read(rundir)?.ok_or_else(|| FillError::Nothing { name: rundir.name().into() })?;
    let image = Image::open(&fill.store, &fill.which())?;
    Ok((fill, image))
}

fn bring(
    rundir: &RunDir,
    fill: &Fill,
    image: &Image,
    end: &AtomicBool,
    tell: &mut dyn FnMut(&PagerEvent),
) -> Result<Progress, FillError> {
    let process = fill.vmm.process();
    let ram = GuestRam::from_blocks(process, fill.blocks.clone())?;
    let chosen = |id: &str| fill.paged.iter().any(|paged| paged == id);
    let _letting;
    let progress = match Pager::take_over(Injector::new(process)?, &ram, chosen)? {
        Some(mut pager) => {
            tell(&PagerEvent::Serving { checkpoint: fill.number });
            let order = working_set(image, fill);
            let mut last = Letting { rundir, fill, lock: None };
            let progress = pager.run_until(&mut Source::new(image, tell), order, end, || last.go())?;
            // Until the end of this, no protector can take it for a restore that fills.
            _letting = last.lock;
            progress
        }
        // The one before was killed when all was there already.
        None => {
            _letting = None;
            Progress { complete: true, ..Progress::default() }
        }
    };
    if progress.complete {
        fault::point("fill.end.closed", None, None);
        disks::filled(rundir);
        fs::remove_file(rundir.fill()).map_err(|source| FillError::File { path: rundir.fill(), source })?;
        let Progress { demanded, filled, zero, worst_ns, .. } = progress;
        tell(&PagerEvent::Filled { demanded, filled, zero, worst_us: worst_ns / 1000 });
    } else {
        tell(&PagerEvent::Ended { left: progress.left });
    }
    Ok(progress)
}

/// Who decides what becomes of the pager's record when all is there.
struct Letting<'a> {
    rundir: &'a RunDir,
    fill: &'a Fill,
    /// Once it is ours, no protector goes by the record any more.
    lock: Option<File>,
}

impl Letting<'_> {
    fn go(&mut self) -> Completion {
        match filling::lock(self.rundir) {
            Ok(Some(lock)) => {
                self.lock = Some(lock);
                fault::point("fill.end.locked", None, None);
                match Fill::read(self.rundir) {
                    Ok(Some(Fill { stage: Stage::HandedOver, .. })) => Completion::HandedOver,
                    _ => Completion::Release,
                }
            }
            Ok(None) => {
                let now = Fill::read(self.rundir).ok().flatten().map(|fill| fill.stage);
                if now == Some(Stage::Filling)
                    && let Err(e) = self.fill.at(Stage::Filled).write(self.rundir)
                {
                    tracing::debug!("the protector cannot be told that all is there: {e}");
                }
                Completion::Wait
            }
            Err(e) => {
                tracing::debug!("whether a protector goes by the record cannot be told: {e}");
                Completion::Wait
            }
        }
    }
}

fn lock_file(rundir: &RunDir) -> Result<(PathBuf, File), FillError> {
    let path = rundir.pager_lock();
    let mut options = OpenOptions::new();
    let opened = options.write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = opened.map_err(|source| FillError::File { path: path.clone(), source })?;
    Ok((path, file))
}

/// One pager at a time.
pub(crate) fn lock(rundir: &RunDir) -> Result<File, FillError> {
    let (path, file) = lock_file(rundir)?;
    let deadline = Instant::now() + LOOKED_AT;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            // A protector that looks whether there is a pager has it for a moment.
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(Duration::from_millis(1)),
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(FillError::Busy { name: rundir.name().into() }),
            Err(e) => return Err(FillError::File { path, source: e.into() }),
        }
    }
}

/// Wait until no pager serves the VM of `rundir`, whose QEMU has ended: it sees that a moment later.
///
/// # Errors
/// [`FillError::Busy`] after `patience`.
pub fn wait_ended(rundir: &RunDir, patience: Duration) -> Result<(), FillError> {
    let deadline = Instant::now() + patience;
    while Fill::is_served(rundir)? {
        if Instant::now() > deadline {
            return Err(FillError::Busy { name: rundir.name().into() });
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The pages that were written last, as runs in the blocks that are brought.
fn working_set<'a>(image: &'a Image, fill: &Fill) -> impl Iterator<Item = (usize, Range<u64>)> + use<'a> {
    // The pager counts the blocks that it brings; the checkpoint has others beside them.
    let brought = fill.blocks.iter().map(|block| &block.id).filter(|id| fill.paged.contains(id));
    let places: Vec<_> = brought.map(|id| image.block(id)).collect();
    let page = PAGE_SIZE as u64;
    // Where the list cannot be read on, the rest comes in the order of memory.
    image.hot().map_while(Result::ok).filter_map(move |(block, n)| {
        let place = places.iter().position(|place| *place == Some(block))?;
        Some((place, n * page..(n + 1) * page))
    })
}
