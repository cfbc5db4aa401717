//! Loads the pages of a restored guest. The pages that the guest waits for are first, then the pages that were written
//! last before the checkpoint, then the rest.
//!
//! The pager is a separate process, `rekindle pager NAME`. It can be killed and restarted at any time: QEMU holds the
//! userfaultfd, so access to a missing page blocks. `fill.json` in the run directory has the pager's parameters; it is
//! removed when the fill is complete.

use crate::filling;
use rekindle_kernel::inject::{InjectError, Injector};
use rekindle_memory::missing::{Completion, Content, PageSource, Pager, PagerError, Progress};
use rekindle_memory::ram::{GuestRam, GuestRamError};
use rekindle_pages::{BlockId, Page, PageNo, ZERO_PAGE};
use rekindle_qemu::ramblock::{MAIN_RAM, RamBlock};
use rekindle_qemu::vmm::Vmm;
use rekindle_store::remote::Identity;
use rekindle_store::types::CheckpointInfo;
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

/// Delay before a failed read of a page is retried.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// How long to wait for another process that checks whether there is a pager. It holds the lock for microseconds.
const LOCK_PATIENCE: Duration = Duration::from_millis(100);
/// Format of `fill.json` that this version of Rekindle writes.
const FORMAT: u32 = 1;

/// Why a pager cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum FillError {
    #[error("all memory of {name} is loaded; a pager has nothing to do")]
    Nothing { name: String },
    #[error("another pager already serves {name}")]
    Busy { name: String },
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    #[error(transparent)]
    Pager(#[from] PagerError),
}

/// Content of `fill.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    format: u32,
    pub store: StoreUrl,
    /// Certificate, key and authority for a store on a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    identity: Option<[PathBuf; 3]>,
    pub number: u64,
    /// The QEMU whose memory is filled.
    pub vmm: Vmm,
    blocks: Vec<RamBlock>,
    /// Ids of the blocks that the pager fills.
    #[serde(default = "main_ram_only")]
    pub(crate) paged: Vec<String>,
    /// The owner epoch that committed the checkpoint.
    #[serde(default)]
    pub(crate) epoch: Option<u64>,
    #[serde(default)]
    pub stage: Stage,
}

/// Progress of a fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Pages are missing.
    #[default]
    Filling,
    /// All pages are loaded. A protector still relies on the pager's write record, so the pager continues to serve.
    Filled,
    /// A protector tracks the memory itself. The pager only has to close its descriptor.
    HandedOver,
}

/// Returns the value of `paged` for records of earlier versions.
fn main_ram_only() -> Vec<String> {
    vec![MAIN_RAM.to_owned()]
}

impl Fill {
    /// Describes the fill of the blocks `paged` of `vmm` from checkpoint `info` of `store`.
    pub(crate) fn new(
        store: StoreUrl,
        identity: Option<&Identity>,
        info: &CheckpointInfo,
        vmm: Vmm,
        ram: &GuestRam,
        paged: Vec<String>,
    ) -> Self {
        let blocks = ram.blocks().iter().map(|block| block.info.clone()).collect();
        // The pager may be started from another directory.
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

    /// Reads the description of the unfinished fill of the VM of `rundir`. `None`: no fill is unfinished.
    ///
    /// # Errors
    /// [`FillError::File`]: `fill.json` cannot be read.
    pub fn read(rundir: &RunDir) -> Result<Option<Self>, FillError> {
        let failed = |source| FillError::File { path: rundir.fill(), source };
        match fs::read(rundir.fill()) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| failed(e.into())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// Returns this fill with another stage.
    pub(crate) fn with_stage(&self, stage: Stage) -> Self {
        Self { stage, ..self.clone() }
    }

    /// Returns whether a pager serves the VM of `rundir` now.
    pub(crate) fn is_served(rundir: &RunDir) -> Result<bool, FillError> {
        let (path, file) = lock_file(rundir)?;
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(false),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
            Err(e) => Err(FillError::File { path, source: e.into() }),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum PagerEvent {
    Serving {
        checkpoint: u64,
    },
    /// A page cannot be read, so access to it blocks.
    Waiting {
        error: String,
    },
    Filled {
        /// Number of pages that the guest waited for.
        demanded: u64,
        /// Number of pages that were loaded in the background.
        filled: u64,
        zero: u64,
        /// The guest's longest wait for a page, in µs.
        worst_us: u64,
    },
    /// Stopped by signal while pages are missing.
    Ended {
        /// Number of missing pages.
        left: u64,
    },
}

impl std::fmt::Display for PagerEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Serving { checkpoint } => write!(f, "loading the memory of checkpoint {checkpoint}"),
            Self::Waiting { error } => {
                write!(f, "a page cannot be read, and the guest blocks where it needs it: {error}")
            }
            Self::Filled { demanded, filled, zero, worst_us } => write!(
                f,
                "all memory is loaded: {demanded} pages on demand (the longest wait {worst_us} µs), {filled} in the background, {zero} zero"
            ),
            Self::Ended { left } => {
                write!(f, "stopped; {left} pages are still missing, and the guest blocks where it needs one")
            }
        }
    }
}

/// Pages of a checkpoint, for a guest whose RAM blocks may have other positions than in the checkpoint.
pub(crate) struct CheckpointPages<'a> {
    image: &'a Image,
    /// For each RAM block of the guest, its position in the checkpoint.
    positions: Vec<Option<BlockId>>,
    on_event: &'a mut dyn FnMut(&PagerEvent),
    /// The error that was reported last, so that each error is reported once.
    last_error: Option<String>,
}

impl<'a> CheckpointPages<'a> {
    pub(crate) fn new(image: &'a Image, ram: &GuestRam, on_event: &'a mut dyn FnMut(&PagerEvent)) -> Self {
        let positions = ram.blocks().iter().map(|block| image.block(&block.info.id)).collect();
        Self { image, positions, on_event, last_error: None }
    }
}

impl PageSource for CheckpointPages<'_> {
    type Error = StoreError;

    fn page(&mut self, block: BlockId, page: PageNo, buffer: &mut Page) -> Result<Content, StoreError> {
        // A page that the checkpoint does not have is an error that names it, never zeros.
        let position = self.positions.get(block.0).copied().flatten().unwrap_or(BlockId(usize::MAX));
        self.image.read_page((position, page), buffer)?;
        self.last_error = None;
        Ok(if *buffer == ZERO_PAGE { Content::Zero } else { Content::Data })
    }

    fn retry(&mut self, error: &StoreError, _attempt: u32) -> Option<Duration> {
        let text = error.to_string();
        if self.last_error.as_ref() != Some(&text) {
            (self.on_event)(&PagerEvent::Waiting { error: text.clone() });
            self.last_error = Some(text);
        }
        Some(RETRY_DELAY)
    }
}

/// Serves the VM of `rundir` until its memory is complete or `end` is set.
///
/// *Needs:* a restore that still fills, and no other pager.
/// *On success:* all of the guest's memory is loaded, or `end` was set.
/// *On failure:* access to a missing page blocks; the pager can be started again.
pub fn serve(rundir: &RunDir, end: &AtomicBool, on_event: &mut dyn FnMut(&PagerEvent)) -> Result<Progress, FillError> {
    let _lock = lock(rundir)?;
    let (fill, image) = open(rundir)?;
    run(rundir, &fill, &image, end, on_event)
}

/// Replaces a process that supplies the pages now, and then does the same as [`serve`]. First does the slow
/// preparations, calls `ready`, and waits until the other process has released the lock.
pub fn serve_after(
    rundir: &RunDir,
    ready: impl FnOnce(),
    end: &AtomicBool,
    on_event: &mut dyn FnMut(&PagerEvent),
) -> Result<Progress, FillError> {
    let (fill, image) = open(rundir)?;
    ready();
    let _lock = loop {
        match lock(rundir) {
            Err(FillError::Busy { .. }) if !end.load(Ordering::Relaxed) => thread::sleep(Duration::from_millis(1)),
            other => break other?,
        }
    };
    // Another restore of the VM may have started in the meantime.
    match Fill::read(rundir)? {
        Some(now) if now == fill => run(rundir, &fill, &image, end, on_event),
        _ => Err(FillError::Nothing { name: rundir.name().into() }),
    }
}

fn open(rundir: &RunDir) -> Result<(Fill, Image), FillError> {
    let fill = Fill::read(rundir)?.ok_or_else(|| FillError::Nothing { name: rundir.name().into() })?;
    let image = Image::open(&fill.store, &fill.which())?;
    Ok((fill, image))
}

fn run(
    rundir: &RunDir,
    fill: &Fill,
    image: &Image,
    end: &AtomicBool,
    on_event: &mut dyn FnMut(&PagerEvent),
) -> Result<Progress, FillError> {
    let process = fill.vmm.process();
    let ram = GuestRam::from_blocks(process, fill.blocks.clone())?;
    let chosen = |id: &str| fill.paged.iter().any(|paged| paged == id);
    let _record_lock;
    let progress = match Pager::take_over(Injector::new(process)?, &ram, chosen)? {
        Some(mut pager) => {
            on_event(&PagerEvent::Serving { checkpoint: fill.number });
            let order = working_set(image, fill);
            let mut decision = RecordDecision { rundir, fill, lock: None };
            let progress =
                pager.run_until(&mut CheckpointPages::new(image, &ram, on_event), order, end, || decision.decide())?;
            // While this lock is held, a protector cannot mistake the VM for one that still fills.
            _record_lock = decision.lock;
            progress
        }
        // The previous pager was killed after the fill was complete.
        None => {
            _record_lock = None;
            Progress { complete: true, ..Progress::default() }
        }
    };
    if progress.complete {
        fault::point("fill.end.closed", None, None);
        disks::notify_filled(rundir);
        fs::remove_file(rundir.fill()).map_err(|source| FillError::File { path: rundir.fill(), source })?;
        let Progress { demanded, filled, zero, worst_ns, .. } = progress;
        on_event(&PagerEvent::Filled { demanded, filled, zero, worst_us: worst_ns / 1000 });
    } else {
        on_event(&PagerEvent::Ended { left: progress.left });
    }
    Ok(progress)
}

/// Decides what happens to the pager's write record when the fill is complete.
struct RecordDecision<'a> {
    rundir: &'a RunDir,
    fill: &'a Fill,
    /// Set when no protector uses the record any more; keeps others out.
    lock: Option<File>,
}

impl RecordDecision<'_> {
    fn decide(&mut self) -> Completion {
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
                    && let Err(e) = self.fill.with_stage(Stage::Filled).write(self.rundir)
                {
                    tracing::debug!("cannot notify the protector that the fill is complete: {e}");
                }
                Completion::Wait
            }
            Err(e) => {
                tracing::debug!("cannot determine whether a protector uses the write record: {e}");
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

/// Takes the pager's lock, which locks out other pagers.
pub(crate) fn lock(rundir: &RunDir) -> Result<File, FillError> {
    let (path, file) = lock_file(rundir)?;
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            // A protector that checks for a pager holds the lock for a moment.
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(Duration::from_millis(1)),
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(FillError::Busy { name: rundir.name().into() }),
            Err(e) => return Err(FillError::File { path, source: e.into() }),
        }
    }
}

/// Waits until no pager serves the VM of `rundir`, whose QEMU has ended: the pager notices that end a moment later.
///
/// # Errors
/// [`FillError::Busy`]: a pager still serves the VM after `patience`.
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

/// Returns the pages that were written last before the checkpoint, as byte ranges in the blocks that the pager fills.
fn working_set<'a>(image: &'a Image, fill: &Fill) -> impl Iterator<Item = (usize, Range<u64>)> + use<'a> {
    // The pager numbers only the blocks that it fills. The checkpoint has other blocks, too.
    let filled_blocks = fill.blocks.iter().map(|block| &block.id).filter(|id| fill.paged.contains(id));
    let positions: Vec<_> = filled_blocks.map(|id| image.block(id)).collect();
    // If the rest of the list cannot be read, its pages load in the order of memory.
    image.hot().map_while(Result::ok).filter_map(move |(block, page)| {
        let position = positions.iter().position(|position| *position == Some(block))?;
        Some((position, page.offset()..page.next().offset()))
    })
}
