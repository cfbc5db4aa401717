//! Loads the pages of a restored guest. The pages that the guest waits for are first, then the pages that were written
//! last before the checkpoint, then the rest.
//!
//! The pager is a separate process, `rekindle pager NAME`. It can be killed and restarted at any time: QEMU holds the
//! userfaultfd, so access to a missing page blocks. Its parameters are in `fill.json` ([`crate::fill`]), which it
//! removes when the fill is complete.

use crate::fill::{Fill, FillError, FillStage, is_served, lock_pager};
use crate::fill_files::FillFiles;
use crate::fill_progress::FillProgressFile;
use crate::pager_confinement::{GrantedFiles, confinement, versions};
use rekindle_kernel::inject::Injector;
use rekindle_memory::missing::{Completion, Content, Need, PageSource, Pager, Progress};
use rekindle_memory::ram::GuestRam;
use rekindle_pages::{BlockId, Page, PageId, PageNo, ZERO_PAGE};
use rekindle_store::{Image, StoreError, wait_as};
use rekindle_vm::fault;
use rekindle_vm::rundir::RunDir;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

/// Delay before a failed read of a page is retried.
const READ_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Pages whose order in the fill is determined in advance.
const KNOWN_IN_ADVANCE: usize = 4096;
/// Delay between two checks whether another pager has ended.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(1);

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
                "all memory is loaded: {demanded} pages on demand (the longest wait {worst_us} µs), {filled} in the \
                 background, {zero} zero"
            ),
            Self::Ended { left } => {
                write!(f, "stopped; {left} pages are still missing, and the guest blocks where it needs one")
            }
        }
    }
}

/// Serves the VM of `rundir` until its memory is complete or `stop` is set.
///
/// *Needs:* a restore that still fills, and no other pager.
/// *On success:* all of the guest's memory is loaded, or `stop` was set.
/// *On failure:* access to a missing page blocks; the pager can be started again.
pub fn serve(
    rundir: &RunDir,
    confine: bool,
    stop: &AtomicBool,
    on_event: &mut dyn FnMut(&PagerEvent),
) -> Result<Progress, FillError> {
    let _pager_lock = lock_pager(rundir)?;
    let fill = read_fill(rundir)?;
    let memory = MissingMemory::take_over(rundir, &fill, confine)?;
    let image = Arc::new(fill.open_checkpoint()?);
    memory.load(&fill, &image, stop, on_event)
}

/// Replaces a process that supplies the pages now, and then does the same as [`serve`]. First does the slow
/// preparations, calls `on_ready`, and waits until the other process has released the lock.
pub fn serve_after(
    rundir: &RunDir,
    confine: bool,
    on_ready: impl FnOnce(),
    stop: &AtomicBool,
    on_event: &mut dyn FnMut(&PagerEvent),
) -> Result<Progress, FillError> {
    let fill = read_fill(rundir)?;
    let memory = MissingMemory::take_over(rundir, &fill, confine)?;
    let image = Arc::new(fill.open_checkpoint()?);
    on_ready();
    let _pager_lock = loop {
        match memory.files.lock_pager() {
            Err(FillError::AlreadyServed { .. }) if !stop.load(Ordering::Relaxed) => thread::sleep(LOCK_POLL_INTERVAL),
            locked => break locked?,
        }
    };
    // Another restore of the VM may have started in the meantime.
    if !memory.files.is_current()? {
        return Err(FillError::NothingToFill { name: rundir.name().into() });
    }
    memory.load(&fill, &image, stop, on_event)
}

/// Waits until no pager serves the VM of `rundir`, whose QEMU has ended: the pager notices that end a moment later.
///
/// # Errors
/// [`FillError::AlreadyServed`]: a pager still serves the VM after `timeout`.
pub fn wait_ended(rundir: &RunDir, timeout: Duration) -> Result<(), FillError> {
    let deadline = Instant::now() + timeout;
    while is_served(rundir)? {
        if Instant::now() > deadline {
            return Err(FillError::AlreadyServed { name: rundir.name().into() });
        }
        thread::sleep(LOCK_POLL_INTERVAL);
    }
    Ok(())
}

/// Waits while a pager loads the memory of the VM of `rundir`, at most for `timeout`.
///
/// # Errors
/// [`FillError::File`].
pub fn wait_filled(rundir: &RunDir, timeout: Duration) -> Result<(), FillError> {
    let deadline = Instant::now() + timeout;
    while rundir.fill().exists() && is_served(rundir)? && Instant::now() < deadline {
        thread::sleep(LOCK_POLL_INTERVAL);
    }
    Ok(())
}

fn read_fill(rundir: &RunDir) -> Result<Fill, FillError> {
    Fill::read(rundir)?.ok_or_else(|| FillError::NothingToFill { name: rundir.name().into() })
}

/// The memory of a QEMU whose pages are missing.
struct MissingMemory {
    ram: GuestRam,
    /// `None`: the previous pager was killed after the fill was complete.
    pager: Option<Pager>,
    files: FillFiles,
    /// If one of them changes, this process cannot use it any more.
    granted: GrantedFiles,
    progress_file: Option<FillProgressFile>,
}

impl MissingMemory {
    /// Takes over the descriptors of QEMU, then confines this process, which has read nothing of the store yet. The
    /// previous pager may still serve.
    fn take_over(rundir: &RunDir, fill: &Fill, confine: bool) -> Result<Self, FillError> {
        let process = fill.vmm.process();
        let ram = GuestRam::from_blocks(process, fill.blocks.clone())?;
        let mut pager = Pager::take_over(Injector::new(process)?, &ram, |id| fill.is_paged(id))?;
        let progress_file = pager.as_ref().and_then(|pager| {
            let created = FillProgressFile::create(rundir, pager.total_bytes(), pager.missing_bytes());
            created.inspect_err(|e| tracing::debug!("the progress of the fill is not recorded: {e}")).ok()
        });
        let mut files = FillFiles::new(rundir, fill);
        if confine {
            files = files.through_broker(pager.as_ref().and_then(Pager::registration))?;
        }
        if let (Some(pager), Some(close)) = (&mut pager, files.close_through()) {
            pager.close_through(close);
        }
        // After the broker was started, which needs no secrets.
        // Before they are read, so that no change is missed.
        let secrets = versions(fill.secret_files());
        fill.read_secrets()?;
        let confinement = confinement(fill);
        let granted = GrantedFiles::of(&confinement, secrets);
        if confine {
            confinement.enter()?;
            files.end_process_with_broker().map_err(|source| FillError::File { path: rundir.fill(), source })?;
        }
        Ok(Self { ram, pager, files, granted, progress_file })
    }

    /// Loads pages until none is missing or `stop` is set. The caller holds the pager's lock.
    fn load(
        self,
        fill: &Fill,
        image: &Arc<Image>,
        stop: &AtomicBool,
        on_event: &mut dyn FnMut(&PagerEvent),
    ) -> Result<Progress, FillError> {
        let Self { ram, pager, files, granted, progress_file } = self;
        // While this lock is held, a protector cannot mistake the VM for one that still fills.
        let _write_record_lock;
        let progress = match pager {
            Some(mut pager) => {
                // The previous pager has ended.
                pager.wake_blocked()?;
                on_event(&PagerEvent::Serving { checkpoint: fill.number });
                let mut end_of_fill = EndOfFill { files: &files, write_record_lock: None };
                let mut pages = CheckpointPages::new(image, &ram, Some(&mut *on_event));
                pages.granted = granted;
                pages.progress_file = progress_file;
                let progress = if image.has_latency() {
                    let order = recently_written_pages_later(image.clone(), fill.clone());
                    pager.run_in_order(&mut pages, order, stop, || end_of_fill.decide())?
                } else {
                    let order = recently_written_pages(image, fill);
                    pager.run_until(&mut pages, order, stop, || end_of_fill.decide())?
                };
                _write_record_lock = end_of_fill.write_record_lock;
                progress
            }
            // The previous pager was killed after the fill was complete.
            None => {
                _write_record_lock = None;
                Progress { complete: true, ..Progress::default() }
            }
        };
        if progress.complete {
            fault::point("fill.end.closed", None, None);
            files.notify_filled();
            files.remove()?;
            let Progress { demanded, filled, zero, worst_ns, .. } = progress;
            on_event(&PagerEvent::Filled { demanded, filled, zero, worst_us: worst_ns / 1000 });
        } else {
            on_event(&PagerEvent::Ended { left: progress.left });
        }
        Ok(progress)
    }
}

/// Returns the pages that were written last before the checkpoint, as byte ranges in the blocks that the pager fills.
fn recently_written_pages<'a>(image: &'a Image, fill: &Fill) -> impl Iterator<Item = (usize, Range<u64>)> + use<'a> {
    // The pager numbers only the blocks that it fills. The checkpoint has other blocks, too.
    let filled_blocks = fill.blocks.iter().map(|block| &block.id).filter(|id| fill.is_paged(id));
    let block_ids: Vec<_> = filled_blocks.map(|id| image.block(id)).collect();
    // If the rest of the list cannot be read, its pages load in the order of memory.
    image.hot().map_while(Result::ok).filter_map(move |(block, page)| {
        let filled_block = block_ids.iter().position(|id| *id == Some(block))?;
        Some((filled_block, page.offset()..page.next().offset()))
    })
}

/// Returns the items of [`recently_written_pages`], which another thread determines. An item is `None` while the next one is
/// not known yet.
fn recently_written_pages_later(
    image: Arc<Image>,
    fill: Fill,
) -> impl Iterator<Item = Option<(usize, Range<u64>)>> + use<> {
    let (sender, receiver) = mpsc::sync_channel(KNOWN_IN_ADVANCE);
    let send_all = move || {
        // The guest's pages come first, although this thread waits for what it reads.
        wait_as(rekindle_store::Need::Background);
        let sent = recently_written_pages(&image, &fill).map(|run| sender.send(run));
        sent.take_while(Result::is_ok).for_each(drop);
    };
    // It ends with the process, or after the receiver. It is not joined, since it may wait for a server.
    if let Err(e) = thread::Builder::new().name("fill order".into()).spawn(send_all) {
        tracing::debug!("the pages load in the order of memory: {e}");
    }
    std::iter::from_fn(move || match receiver.try_recv() {
        Ok(run) => Some(Some(run)),
        Err(TryRecvError::Empty) => Some(None),
        Err(TryRecvError::Disconnected) => None,
    })
}

/// Decides what happens to the pager's write record when the fill is complete.
struct EndOfFill<'a> {
    files: &'a FillFiles,
    /// Set when no protector uses the record any more; keeps protectors from using it.
    write_record_lock: Option<Arc<File>>,
}

impl EndOfFill<'_> {
    fn decide(&mut self) -> Completion {
        match self.files.try_lock_write_record() {
            Ok(Some(lock)) => {
                self.write_record_lock = Some(lock);
                fault::point("fill.end.locked", None, None);
                match self.files.read_stage() {
                    Ok(Some(FillStage::HandedOver)) => Completion::HandedOver,
                    _ => Completion::Release,
                }
            }
            Ok(None) => {
                let stage = self.files.read_stage().ok().flatten();
                if stage == Some(FillStage::Filling)
                    && let Err(e) = self.files.record_filled()
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

/// Pages of a checkpoint, for a guest whose RAM blocks may have other positions than in the checkpoint.
pub(crate) struct CheckpointPages<'a> {
    image: &'a Image,
    /// For each RAM block of the guest, its position in the checkpoint.
    positions: Vec<Option<BlockId>>,
    /// Gets an event for each error.
    on_event: Option<&'a mut dyn FnMut(&PagerEvent)>,
    /// The error that was reported last, so that each error is reported once.
    last_error: Option<String>,
    /// If one of them was replaced, a failed read is not retried: this process may not use the new one, but another
    /// pager can.
    granted: GrantedFiles,
    progress_file: Option<FillProgressFile>,
}

impl<'a> CheckpointPages<'a> {
    pub(crate) fn new(image: &'a Image, ram: &GuestRam, on_event: Option<&'a mut dyn FnMut(&PagerEvent)>) -> Self {
        let positions = ram.blocks().iter().map(|block| image.block(&block.info.id)).collect();
        Self { image, positions, on_event, last_error: None, granted: GrantedFiles::default(), progress_file: None }
    }

    /// Returns the position in the checkpoint of a RAM block of the guest.
    fn position(&self, block: BlockId) -> Option<BlockId> {
        self.positions.get(block.0).copied().flatten()
    }
}

fn content_of(page: &Page) -> Content {
    if *page == ZERO_PAGE { Content::Zero } else { Content::Data }
}

impl PageSource for CheckpointPages<'_> {
    type Error = StoreError;

    fn page(&mut self, block: BlockId, page: PageNo, buffer: &mut Page) -> Result<Content, StoreError> {
        // A page that the checkpoint does not have is an error that names it, never zeros.
        let position = self.position(block).unwrap_or(BlockId(usize::MAX));
        self.image.read_page((position, page), buffer)?;
        self.last_error = None;
        Ok(content_of(buffer))
    }

    fn page_if_ready(
        &mut self,
        block: BlockId,
        page: PageNo,
        buffer: &mut Page,
        need: Need,
    ) -> Result<Option<Content>, StoreError> {
        let position = self.position(block).unwrap_or(BlockId(usize::MAX));
        let need = match need {
            Need::Fault => rekindle_store::Need::Guest,
            Need::Background => rekindle_store::Need::Background,
        };
        if !self.image.read_page_if_ready((position, page), buffer, need)? {
            return Ok(None);
        }
        self.last_error = None;
        Ok(Some(content_of(buffer)))
    }

    fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        self.image.arrivals()
    }

    fn fetches_ahead(&self) -> bool {
        self.image.has_latency()
    }

    fn will_fetch(&mut self, pages: &[PageId]) -> usize {
        // Reading a page that the checkpoint does not have is an error, and a hint only then.
        let stored = pages.iter().map(|(block, page)| (self.position(*block).unwrap_or(BlockId(usize::MAX)), *page));
        self.image.start_reads(&stored.collect::<Vec<_>>())
    }

    fn retry(&mut self, error: &StoreError, _attempt: u32) -> Option<Duration> {
        if self.granted.is_any_replaced() {
            return None;
        }
        let text = error.to_string();
        if self.last_error.as_ref() != Some(&text) {
            if let Some(on_event) = &mut self.on_event {
                on_event(&PagerEvent::Waiting { error: text.clone() });
            }
            self.last_error = Some(text);
        }
        Some(READ_RETRY_DELAY)
    }

    fn supplied(&mut self, _block: BlockId, offsets: Range<u64>) {
        if let Some(file) = &mut self.progress_file {
            file.note_loaded(offsets.end - offsets.start);
        }
    }
}
