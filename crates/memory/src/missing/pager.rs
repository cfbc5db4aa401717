//! The pager's start, take-over and end. [`super::serve`] has its work in between.

use super::paged::PagedBlock;
use super::source::{Content, PageSource};
use crate::ram::{GuestRam, GuestRamError};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory;
use rekindle_kernel::pagemap::{Categories, Query, ScanError, Scanner};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::remote::{self, Existing, Remote, RemoteError};
use rekindle_kernel::userfault::{Features, Mode, UserfaultError, supported};
use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageNo, PageRuns};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Features of a pager's userfaultfd. They also identify it: QEMU itself never requests events of removed pages.
const PLAIN: Features = Features::MISSING_SHMEM
    .union(Features::MISSING_HUGETLBFS)
    .union(Features::EVENT_REMOVE)
    .union(Features::EXACT_ADDRESS);
/// Features of a pager's userfaultfd where the kernel can record writes during the fill (Linux 6.7), for
/// [`crate::tracker::Filling`].
const RECORDING: Features = PLAIN
    .union(Features::PAGEFAULT_FLAG_WP)
    .union(Features::WP_HUGETLBFS_SHMEM)
    .union(Features::WP_UNPOPULATED)
    .union(Features::WP_ASYNC);

/// Finds the userfaultfd of a pager in QEMU. Returns it with a flag: whether it records writes.
pub(crate) fn existing_pager(process: Process) -> Result<Option<(Existing, bool)>, RemoteError> {
    let ours = |existing: Existing| match existing.features {
        RECORDING => Some((existing, true)),
        PLAIN => Some((existing, false)),
        _ => None,
    };
    Ok(remote::existing(process)?.into_iter().find_map(ours))
}

/// The reason why a guest's RAM cannot be filled.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// No userfaultfd could be created in QEMU or taken from it.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The blocks cannot be read.
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    /// A block cannot be registered, or a page cannot be put into it.
    #[error("cannot fill RAM block {id}")]
    Block {
        id: String,
        #[source]
        source: UserfaultError,
    },
    /// The present pages cannot be determined or overwritten.
    #[error("cannot find or overwrite the present pages of RAM block {id}")]
    Present {
        id: String,
        #[source]
        source: io::Error,
    },
    /// The page tables cannot be read.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// A page could not be fetched, and the source does not permit another attempt.
    #[error(
        "cannot fetch page {page} of RAM block {block}; a guest that needs it waits until another pager takes over"
    )]
    Source {
        block: String,
        page: PageNo,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// QEMU has ended.
    #[error("QEMU (process {pid}) has ended before all of its memory was filled")]
    QemuEnded { pid: u32 },
    /// `poll(2)` on the userfaultfd failed.
    #[error("cannot wait for faults")]
    Wait {
        #[source]
        source: io::Error,
    },
}

/// Progress of a pager, in host pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Faults of threads that blocked.
    pub faults: u64,
    /// Threads' faults on missing pages.
    pub demanded: u64,
    /// Pages supplied because of a fault.
    pub filled: u64,
    /// Zero pages, which are not filled.
    pub zero: u64,
    /// Pages that the guest gave back during the fill.
    pub given_back: u64,
    /// Pages still missing.
    pub left: u64,
    /// The longest time from reading a fault to supplying its page, in nanoseconds, including failed attempts.
    pub worst_ns: u64,
    /// Whether all pages are present and the registration has ended.
    pub complete: bool,
}

/// The action on the registration when all pages are present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// End the registration, and with it the record of writes.
    Release,
    /// Keep the registration and call `completion` again later, because a tracker still needs the record. Meanwhile the
    /// pager handles faults on zero pages that were not filled, and pages given back.
    Wait,
    /// Close only the pager's descriptor: a tracker has registered the memory with its own descriptor.
    HandedOver,
}

/// A fault on a page that has not been supplied yet.
#[derive(Debug)]
pub(super) struct PendingFault {
    pub(super) since: Instant,
    pub(super) attempts: u32,
    /// Time of the next attempt.
    pub(super) due: Instant,
}

/// Fills the missing pages of a QEMU. If the pager is dropped or killed, QEMU keeps its own descriptor and blocked
/// threads wait for the next pager.
#[derive(Debug)]
pub struct Pager {
    pub(super) process: Process,
    pub(super) remote: Option<Remote>,
    pub(super) blocks: Vec<PagedBlock>,
    /// The key is block and page.
    pub(super) pending: BTreeMap<(usize, u64), PendingFault>,
    pub(super) progress: Progress,
    /// Stack of the neighbours of faulted pages, which are likely to be needed next.
    pub(super) neighbours: Vec<(usize, Range<u64>)>,
    /// Failed attempts of the current background batch, and the time of the next attempt.
    pub(super) background: (u32, Instant),
    pub(super) buffer: Vec<u8>,
    /// Whether pages are filled write-protected, so that writes to them are recorded.
    pub(super) recording: bool,
}

impl Pager {
    /// Registers the blocks of `ram` that `chosen` selects. QEMU must wait for its device state, and its guest must not
    /// have run. Pages that QEMU itself has written are overwritten from `source`.
    ///
    /// `device` is QEMU's descriptor of `/dev/userfaultfd`, if QEMU may not open a userfaultfd itself.
    ///
    /// # Errors
    /// [`PagerError`]; nothing is registered then.
    pub fn begin(
        injector: Injector,
        ram: &GuestRam,
        chosen: impl Fn(&str) -> bool,
        source: &mut impl PageSource,
        device: Option<RawFd>,
    ) -> Result<Self, PagerError> {
        let mut pager = Self::register(injector, ram, chosen, device)?;
        match pager.overwrite(ram, source) {
            Ok(()) => Ok(pager),
            Err(e) => {
                pager.release()?;
                Err(e)
            }
        }
    }

    /// Does the first half of [`Pager::begin`], which needs no data of the guest. The second half is
    /// [`Pager::overwrite`].
    ///
    /// # Errors
    /// As for [`Pager::begin`].
    pub fn register(
        injector: Injector,
        ram: &GuestRam,
        chosen: impl Fn(&str) -> bool,
        device: Option<RawFd>,
    ) -> Result<Self, PagerError> {
        let blocks = paged_blocks(ram, chosen);
        let (features, mode) = match supported().is_ok_and(|kernel| kernel.contains(RECORDING)) {
            true => (RECORDING, Mode::MISSING | Mode::WRITE_PROTECT),
            false => (PLAIN, Mode::MISSING),
        };
        let remote = Remote::open(injector, features, device)?;
        let registered = blocks.iter().try_for_each(|block| {
            remote
                .userfault
                .register(block.range.clone(), mode)
                .map_err(|source| PagerError::Block { id: block.name.clone(), source })
        });
        if let Err(e) = registered {
            remote.close()?;
            return Err(e);
        }
        Ok(Self::with(injector.process(), remote, blocks))
    }

    /// Returns whether a pager has registered memory of a QEMU.
    ///
    /// # Errors
    /// [`PagerError`].
    pub fn is_registered_in(process: Process) -> Result<bool, PagerError> {
        Ok(existing_pager(process)?.is_some())
    }

    /// Continues the work of a previous pager. Returns `None` if there is no registration, so that all pages are
    /// present.
    ///
    /// # Errors
    /// [`PagerError`].
    pub fn take_over(
        injector: Injector,
        ram: &GuestRam,
        chosen: impl Fn(&str) -> bool,
    ) -> Result<Option<Self>, PagerError> {
        let Some((existing, _)) = existing_pager(injector.process())? else { return Ok(None) };
        let remote = Remote::take(injector, existing)?;
        let mut pager = Self::with(injector.process(), remote, paged_blocks(ram, chosen));
        pager.mark_present(ram)?;
        // Faults that the previous pager had read but not served are reported again only after a wake-up.
        for block in &pager.blocks {
            if let Some(remote) = &pager.remote {
                let woken = remote.userfault.wake(block.range.clone());
                woken.map_err(|source| PagerError::Block { id: block.name.clone(), source })?;
            }
        }
        Ok(Some(pager))
    }

    fn with(process: Process, remote: Remote, blocks: Vec<PagedBlock>) -> Self {
        let progress = Progress::default();
        let background = (0, Instant::now());
        let recording = remote.userfault.features() == RECORDING;
        let (remote, pending) = (Some(remote), BTreeMap::new());
        let (neighbours, buffer) = (Vec::new(), Vec::new());
        Self { process, remote, blocks, pending, progress, neighbours, background, buffer, recording }
    }

    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress { left: self.blocks.iter().map(PagedBlock::left).sum(), ..self.progress }
    }

    /// Marks pages as done that are present, or that are no longer registered (given back).
    fn mark_present(&mut self, ram: &GuestRam) -> Result<(), PagerError> {
        let registered = remote::registered(self.process, Mode::MISSING);
        let registered = registered.map_err(|source| PagerError::Present { id: "all".into(), source })?;
        for paged in &mut self.blocks {
            let Range { start, end } = paged.range;
            let inside = registered.iter().map(|range| range.start.max(start)..range.end.min(end));
            let inside = inside.collect::<PageRuns>().relative_to(start);
            let present = present(self.process, ram, paged)?;
            for run in present.iter().chain(&inside.complement(end - start)) {
                paged.touched(run).for_each(|page| paged.set_done(page));
            }
        }
        Ok(())
    }

    /// Fills a page of a RAM block before it is needed. Does nothing if the page is done or is part of a larger host
    /// page, or if the pager does not fill the block.
    ///
    /// # Errors
    /// [`PagerError`]; the page is unchanged.
    pub fn prefill_page(&mut self, id: BlockId, page: PageNo, content: &Page) -> Result<(), PagerError> {
        let block = self.blocks.iter().position(|paged| paged.id == id && paged.page == PAGE_SIZE as u64);
        let PageNo(page) = page;
        let Some(block) = block.filter(|block| self.blocks.get(*block).is_some_and(|paged| !paged.is_done(page)))
        else {
            return Ok(());
        };
        self.buffer.clear();
        self.buffer.extend_from_slice(content);
        if self.put(block, page..page + 1, Content::Data)? {
            self.progress.filled += 1;
        }
        Ok(())
    }

    /// Overwrites, from `source`, the pages that QEMU itself has written before its guest ran.
    ///
    /// # Errors
    /// [`PagerError`]; then the guest must not run.
    pub fn overwrite(&mut self, ram: &GuestRam, source: &mut impl PageSource) -> Result<(), PagerError> {
        for index in 0..self.blocks.len() {
            let Some(paged) = self.blocks.get(index) else { continue };
            let pages: Vec<_> = present(self.process, ram, paged)?.iter().flat_map(|run| paged.touched(run)).collect();
            for page in pages {
                let content = self.fetch_with_retries(index, page, source)?;
                let Some(paged) = self.blocks.get_mut(index) else { continue };
                if content == Content::Zero {
                    self.buffer.fill(0);
                }
                let address = paged.addresses(&(page..page + 1)).start;
                memory::write(self.process, address, &self.buffer)
                    .map_err(|source| PagerError::Present { id: paged.name.clone(), source })?;
                paged.set_done(page);
            }
        }
        Ok(())
    }

    fn fetch_with_retries<S: PageSource>(
        &mut self,
        block: usize,
        page: u64,
        source: &mut S,
    ) -> Result<Content, PagerError> {
        let mut attempts = 0;
        loop {
            match self.fetch(block, page..page + 1, source) {
                Ok(contents) => return Ok(contents.first().copied().unwrap_or(Content::Zero)),
                Err((at, e)) => {
                    attempts += 1;
                    std::thread::sleep(self.retry_delay(block, at, e, attempts, source)?);
                }
            }
        }
    }

    /// Fetches consecutive host pages into the buffer. The error contains the number of the 4-KiB page that failed.
    pub(super) fn fetch<S: PageSource>(
        &mut self,
        block: usize,
        pages: Range<u64>,
        source: &mut S,
    ) -> Result<Vec<Content>, (PageNo, S::Error)> {
        let Some(paged) = self.blocks.get(block) else { return Ok(Vec::new()) };
        let small_per_page = paged.page as usize / PAGE_SIZE;
        self.buffer.resize((pages.end - pages.start) as usize * paged.page as usize, 0);
        let mut contents = Vec::new();
        for (page, huge) in pages.zip(self.buffer.chunks_exact_mut(paged.page as usize)) {
            let mut content = Content::Zero;
            let (small, _) = huge.as_chunks_mut::<PAGE_SIZE>();
            for (small, at) in small.iter_mut().zip((page * small_per_page as u64..).map(PageNo)) {
                match source.page(paged.id, at, small).map_err(|e| (at, e))? {
                    Content::Data => content = Content::Data,
                    Content::Zero => small.fill(0),
                }
            }
            contents.push(content);
        }
        Ok(contents)
    }

    /// Returns how long to wait before the next attempt, or the error with which the pager must end.
    pub(super) fn retry_delay<S: PageSource>(
        &self,
        block: usize,
        page: PageNo,
        error: S::Error,
        attempts: u32,
        source: &mut S,
    ) -> Result<Duration, PagerError> {
        match source.retry(&error, attempts) {
            Some(wait) => Ok(wait),
            None => {
                let block = self.blocks.get(block).map(|block| block.name.clone()).unwrap_or_default();
                Err(PagerError::Source { block, page, source: Box::new(error) })
            }
        }
    }

    /// Ends the registration, then closes the descriptors, when all pages are present. Blocked threads continue.
    pub(super) fn release(&mut self) -> Result<(), PagerError> {
        let Some(remote) = self.remote.take() else { return Ok(()) };
        for block in &self.blocks {
            // Fails for parts that are unregistered already, and for a block that was unplugged.
            if let Err(e) = remote.userfault.unregister(block.range.clone()) {
                tracing::debug!("{e}: {:?}", std::error::Error::source(&e));
            }
        }
        Ok(remote.close()?)
    }
}

impl Pager {
    /// Closes the descriptors when a tracker has registered the memory.
    pub(super) fn close(&mut self) -> Result<(), PagerError> {
        match self.remote.take() {
            Some(remote) => Ok(remote.close()?),
            None => Ok(()),
        }
    }
}

fn paged_blocks(ram: &GuestRam, chosen: impl Fn(&str) -> bool) -> Vec<PagedBlock> {
    let blocks = ram.blocks().iter().zip((0..).map(BlockId)).filter(|(block, _)| chosen(&block.info.id));
    blocks.map(|(block, id)| PagedBlock::new(id, block)).collect()
}

/// Finds the runs (offsets) of a block whose pages are present.
fn present(process: Process, ram: &GuestRam, paged: &PagedBlock) -> Result<PageRuns, PagerError> {
    let block = ram.block(paged.id);
    // hugetlbfs does not report holes, so mapped pages count as present.
    match block.filter(|_| paged.page == PAGE_SIZE as u64) {
        Some(block) => Ok(ram.populated(block)?),
        None => {
            let runs = Scanner::open(process)?.matching(paged.range.clone(), Query::all(Categories::PRESENT))?;
            Ok(runs.relative_to(paged.range.start))
        }
    }
}
