//! The pager's start, take-over and end. [`super::serve`] has its work in between.

use super::paged::PagedBlock;
use super::source::{Content, Need, PageSource};
use crate::ram::{GuestRam, GuestRamError};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory;
use rekindle_kernel::pagemap::{Categories, Query, ScanError, Scanner};
use rekindle_kernel::process::{Process, has_ended};
use rekindle_kernel::userfault::remote::{self, Existing, Registration, Remote, RemoteError};
use rekindle_kernel::userfault::{Features, Mode, UserfaultError, supported};
use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageNo, PageRuns};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};
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

/// The userfaultfd of a pager in QEMU.
pub(crate) struct ExistingPager {
    pub(crate) userfaultfd: Existing,
    pub(crate) records_writes: bool,
}

/// Finds the userfaultfd of a pager in QEMU.
pub(crate) fn existing_pager(process: Process) -> Result<Option<ExistingPager>, RemoteError> {
    let userfaultfds = remote::existing(process)?;
    let of_pager = userfaultfds.into_iter().find(|existing| [RECORDING, PLAIN].contains(&existing.features));
    Ok(of_pager.map(|userfaultfd| ExistingPager { userfaultfd, records_writes: userfaultfd.features == RECORDING }))
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
    /// The process that closes the descriptor in QEMU has ended, or could not close it.
    #[error("cannot close the userfaultfd in QEMU")]
    Close {
        #[source]
        source: io::Error,
    },
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

/// A page of one of the pager's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BlockPage {
    /// Index of the block in [`Pager::blocks`].
    pub(super) block: usize,
    /// Number of the host page.
    pub(super) page: u64,
}

/// A fault on a page that has not been supplied yet.
#[derive(Debug)]
pub(super) struct PendingFault {
    pub(super) since: Instant,
    pub(super) attempts: u32,
    /// Time of the next attempt.
    pub(super) due: Instant,
    /// The page is on its way.
    pub(super) is_in_flight: bool,
}

/// The next attempt to fill pages in the background.
#[derive(Debug)]
pub(super) struct BackgroundAttempt {
    /// Failed attempts of the current batch.
    pub(super) failures: u32,
    pub(super) due: Instant,
    /// The next page is on its way.
    pub(super) is_in_flight: bool,
    /// As `due`, for the neighbours of faulted pages.
    pub(super) neighbours_due: Instant,
    /// The next neighbour is on its way.
    pub(super) are_neighbours_in_flight: bool,
    /// Number of the next runs that were announced to the source.
    pub(super) announced: usize,
    /// Number of pages to fill before runs are announced again, because the source had no room for more.
    pub(super) fills_before_announcement: usize,
}

impl BackgroundAttempt {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            failures: 0,
            due: now,
            is_in_flight: false,
            neighbours_due: now,
            are_neighbours_in_flight: false,
            announced: 0,
            fills_before_announcement: 0,
        }
    }
}

/// Fills the missing pages of a QEMU. If the pager is dropped or killed, QEMU keeps its own descriptor and blocked
/// threads wait for the next pager.
#[derive(Debug)]
pub struct Pager {
    pub(super) process: Process,
    /// Shows the end of the process, also to a process that may not read `/proc`.
    pub(super) pidfd: OwnedFd,
    closer: Closer,
    pub(super) remote: Option<Remote>,
    pub(super) blocks: Vec<PagedBlock>,
    pub(super) pending: BTreeMap<BlockPage, PendingFault>,
    pub(super) progress: Progress,
    /// Stack of the neighbours of faulted pages, which are likely to be needed next: block and run of page numbers.
    pub(super) neighbours: Vec<(usize, Range<u64>)>,
    pub(super) background: BackgroundAttempt,
    /// Content of the pages that were fetched last.
    pub(super) buffer: Vec<u8>,
    /// Whether pages are filled write-protected, so that writes to them are recorded.
    pub(super) recording: bool,
}

/// How the descriptor in QEMU is closed. `None`: by this process.
struct Closer(Option<Box<dyn Fn() -> io::Result<()> + Send>>);

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Closer(another process)" } else { "Closer(this process)" })
    }
}

impl Closer {
    /// Closes both descriptors.
    fn close(&self, remote: Remote) -> Result<(), PagerError> {
        match &self.0 {
            None => Ok(remote.close()?),
            Some(close) => close().map_err(|source| PagerError::Close { source }),
        }
    }
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
        is_paged: impl Fn(&str) -> bool,
        source: &mut impl PageSource,
        device: Option<RawFd>,
    ) -> Result<Self, PagerError> {
        let mut pager = Self::register(injector, ram, is_paged, device)?;
        match pager.overwrite_present_pages(ram, source) {
            Ok(()) => Ok(pager),
            Err(e) => {
                pager.release()?;
                Err(e)
            }
        }
    }

    /// Does the first half of [`Pager::begin`], which needs no data of the guest. The second half is
    /// [`Pager::overwrite_present_pages`].
    ///
    /// # Errors
    /// As for [`Pager::begin`].
    pub fn register(
        injector: Injector,
        ram: &GuestRam,
        is_paged: impl Fn(&str) -> bool,
        device: Option<RawFd>,
    ) -> Result<Self, PagerError> {
        let blocks = paged_blocks(ram, is_paged);
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
        Self::from_remote(injector.process(), remote, blocks)
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
        is_paged: impl Fn(&str) -> bool,
    ) -> Result<Option<Self>, PagerError> {
        let Some(existing) = existing_pager(injector.process())? else { return Ok(None) };
        let remote = Remote::take(injector, existing.userfaultfd)?;
        let mut pager = Self::from_remote(injector.process(), remote, paged_blocks(ram, is_paged))?;
        pager.mark_present(ram)?;
        pager.wake_blocked()?;
        Ok(Some(pager))
    }

    /// Wakes the threads that wait for a page. Faults that a previous pager had read but not served are reported again
    /// only then, so a pager that has taken over before the previous one ended must call this after that end.
    ///
    /// # Errors
    /// [`PagerError::Block`].
    pub fn wake_blocked(&self) -> Result<(), PagerError> {
        for block in &self.blocks {
            if let Some(remote) = &self.remote {
                let woken = remote.userfault.wake(block.range.clone());
                woken.map_err(|source| PagerError::Block { id: block.name.clone(), source })?;
            }
        }
        Ok(())
    }

    /// Returns what another process needs to close the descriptor in QEMU: [`Pager::close_through`].
    #[must_use]
    pub fn registration(&self) -> Option<Registration> {
        self.remote.as_ref().and_then(Remote::registration)
    }

    /// Lets `close` close the descriptor in QEMU, for a process that may not do it itself.
    pub fn close_through(&mut self, close: impl Fn() -> io::Result<()> + Send + 'static) {
        self.closer = Closer(Some(Box::new(close)));
    }

    fn from_remote(process: Process, remote: Remote, blocks: Vec<PagedBlock>) -> Result<Self, PagerError> {
        let pid = process.pid;
        let pidfd = process.pidfd().map_err(|source| RemoteError::Take { pid, source })?;
        Ok(Self {
            process,
            pidfd,
            closer: Closer(None),
            recording: remote.userfault.features() == RECORDING,
            remote: Some(remote),
            blocks,
            pending: BTreeMap::new(),
            progress: Progress::default(),
            neighbours: Vec::new(),
            background: BackgroundAttempt::new(),
            buffer: Vec::new(),
        })
    }

    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress { left: self.blocks.iter().map(PagedBlock::missing_pages).sum(), ..self.progress }
    }

    /// Returns the bytes of all blocks that this pager fills.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.pages() * block.page_bytes).sum()
    }

    /// Returns the bytes of pages that are still missing.
    #[must_use]
    pub fn missing_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.missing_pages() * block.page_bytes).sum()
    }

    /// Removes pages from the missing ones that are present, or that are no longer registered (given back).
    fn mark_present(&mut self, ram: &GuestRam) -> Result<(), PagerError> {
        let registered = remote::registered(self.process, Mode::MISSING);
        let registered = registered.map_err(|source| PagerError::Present { id: "all".into(), source })?;
        for paged in &mut self.blocks {
            let Range { start, end } = paged.range;
            let registered_parts = registered.iter().map(|range| range.start.max(start)..range.end.min(end));
            let given_back = registered_parts.collect::<PageRuns>().relative_to(start).complement(end - start);
            let present = present(self.process, ram, paged)?;
            for run in present.iter().chain(&given_back) {
                paged.pages_overlapping(run).for_each(|page| paged.remove_missing(page));
            }
        }
        Ok(())
    }

    /// Fills a page of a RAM block before it is needed. Does nothing if the page is not missing or is part of a larger
    /// host page, or if the pager does not fill the block.
    ///
    /// # Errors
    /// [`PagerError`]; the page is unchanged.
    pub fn prefill_page(&mut self, id: BlockId, page: PageNo, content: &Page) -> Result<(), PagerError> {
        let PageNo(page) = page;
        let wants_page =
            |paged: &PagedBlock| paged.id == id && paged.page_bytes == PAGE_SIZE as u64 && paged.is_missing(page);
        let Some(block) = self.blocks.iter().position(wants_page) else { return Ok(()) };
        self.buffer.clear();
        self.buffer.extend_from_slice(content);
        if self.fill_from_buffer(block, page..page + 1, Content::Data)? {
            self.progress.filled += 1;
        }
        Ok(())
    }

    /// Overwrites, from `source`, the pages that QEMU itself has written before its guest ran.
    ///
    /// # Errors
    /// [`PagerError`]; then the guest must not run.
    pub fn overwrite_present_pages(&mut self, ram: &GuestRam, source: &mut impl PageSource) -> Result<(), PagerError> {
        for index in 0..self.blocks.len() {
            let Some(paged) = self.blocks.get(index) else { continue };
            let pages: Vec<_> =
                present(self.process, ram, paged)?.iter().flat_map(|run| paged.pages_overlapping(run)).collect();
            for page in pages {
                let content = self.fetch_with_retries(index, page, source)?;
                let Some(paged) = self.blocks.get_mut(index) else { continue };
                if content == Content::Zero {
                    self.buffer.fill(0);
                }
                let address = paged.addresses(&(page..page + 1)).start;
                memory::write(self.process, address, &self.buffer)
                    .map_err(|source| PagerError::Present { id: paged.name.clone(), source })?;
                paged.remove_missing(page);
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
            match self.fetch(block, page..page + 1, None, source) {
                Ok(contents) => return Ok(contents.first().copied().unwrap_or(Content::Zero)),
                Err((failed_page, e)) => {
                    attempts += 1;
                    std::thread::sleep(self.retry_delay(block, failed_page, e, attempts, source)?);
                }
            }
        }
    }

    /// Fetches consecutive host pages into the buffer. With a `need`, does not wait for them: returns those before the first
    /// page that is still on its way, and starts to fetch the others. The error contains the number of the 4-KiB page that
    /// failed.
    pub(super) fn fetch<S: PageSource>(
        &mut self,
        block: usize,
        pages: Range<u64>,
        need: Option<Need>,
        source: &mut S,
    ) -> Result<Vec<Content>, (PageNo, S::Error)> {
        let Some(paged) = self.blocks.get(block) else { return Ok(Vec::new()) };
        let page_bytes = paged.page_bytes as usize;
        // The parts of a larger host page may not fit into a source's cache together: an attempt that does not wait might
        // never find all of them.
        let need = need.filter(|_| page_bytes == PAGE_SIZE);
        // A host page consists of one or more pages of 4 KiB, which the source has.
        let small_pages_per_page = page_bytes / PAGE_SIZE;
        self.buffer.resize((pages.end - pages.start) as usize * page_bytes, 0);
        let mut contents = Vec::new();
        let mut are_all_ready = true;
        for (page, host_page) in pages.zip(self.buffer.chunks_exact_mut(page_bytes)) {
            let mut content = Content::Zero;
            let (small_pages, _) = host_page.as_chunks_mut::<PAGE_SIZE>();
            let numbers = (page * small_pages_per_page as u64..).map(PageNo);
            for (small_page, number) in small_pages.iter_mut().zip(numbers) {
                let fetched = match need {
                    Some(need) => source.page_if_ready(paged.id, number, small_page, need),
                    None => source.page(paged.id, number, small_page).map(Some),
                };
                match fetched {
                    Ok(Some(Content::Data)) => content = Content::Data,
                    Ok(Some(Content::Zero)) => small_page.fill(0),
                    Ok(None) => are_all_ready = false,
                    // Pages before it need not be fetched again. The next attempt returns the error.
                    Err(_) if !contents.is_empty() => return Ok(contents),
                    Err(e) => return Err((number, e)),
                }
            }
            if are_all_ready {
                contents.push(content);
            }
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
            Some(delay) => Ok(delay),
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
        self.closer.close(remote)
    }

    /// Closes the descriptors when a tracker has registered the memory.
    pub(super) fn close(&mut self) -> Result<(), PagerError> {
        match self.remote.take() {
            Some(remote) => self.closer.close(remote),
            None => Ok(()),
        }
    }
}

/// Returns whether the process of a pidfd still runs.
pub(super) fn is_alive(pidfd: &OwnedFd) -> bool {
    !matches!(has_ended(pidfd), Ok(true))
}

fn paged_blocks(ram: &GuestRam, is_paged: impl Fn(&str) -> bool) -> Vec<PagedBlock> {
    let blocks = ram.blocks().iter().zip((0..).map(BlockId)).filter(|(block, _)| is_paged(&block.info.id));
    blocks.map(|(block, id)| PagedBlock::new(id, block)).collect()
}

/// Finds the runs (offsets) of a block whose pages are present.
fn present(process: Process, ram: &GuestRam, paged: &PagedBlock) -> Result<PageRuns, PagerError> {
    let block = ram.block(paged.id);
    // hugetlbfs does not report holes, so mapped pages count as present.
    match block.filter(|_| paged.page_bytes == PAGE_SIZE as u64) {
        Some(block) => Ok(ram.populated(block)?),
        None => {
            let runs = Scanner::open(process)?.matching(paged.range.clone(), Query::all(Categories::PRESENT))?;
            Ok(runs.relative_to(paged.range.start))
        }
    }
}
