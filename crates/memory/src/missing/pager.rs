//! The pager: how it begins, takes over, and ends. What it does in between is in [`super::serve`].

use super::paged::Paged;
use super::source::{Content, Page, PageSource};
use crate::pages;
use crate::ram::{GuestRam, GuestRamError};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory::{self, PAGE_SIZE};
use rekindle_kernel::pagemap::{Categories, Query, ScanError, Scanner};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::remote::{self, Existing, Remote, RemoteError};
use rekindle_kernel::userfault::{Features, Mode, UserfaultError, supported};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// What a pager's userfaultfd is asked for. QEMU itself asks for no events of removed pages: so it is also how it is known.
const PLAIN: Features = Features::MISSING_SHMEM
    .union(Features::MISSING_HUGETLBFS)
    .union(Features::EVENT_REMOVE)
    .union(Features::EXACT_ADDRESS);
/// The same, where the kernel can also record what is written meanwhile (Linux 6.7): for [`crate::tracker::Filling`].
const RECORDING: Features = PLAIN
    .union(Features::PAGEFAULT_FLAG_WP)
    .union(Features::WP_HUGETLBFS_SHMEM)
    .union(Features::WP_UNPOPULATED)
    .union(Features::WP_ASYNC);

/// The userfaultfd of a pager in QEMU, and whether it records what is written.
pub(crate) fn left(process: Process) -> Result<Option<(Existing, bool)>, RemoteError> {
    let ours = |existing: Existing| match existing.features {
        RECORDING => Some((existing, true)),
        PLAIN => Some((existing, false)),
        _ => None,
    };
    Ok(remote::existing(process)?.into_iter().find_map(ours))
}

/// Why pages cannot be brought.
#[derive(Debug, thiserror::Error)]
pub enum PagerError {
    /// No userfaultfd in QEMU.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The blocks cannot be looked at.
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    /// A block cannot be registered, or a page not be put into it.
    #[error("cannot bring the pages of RAM block {id}")]
    Block {
        /// The block.
        id: String,
        /// Why.
        #[source]
        source: UserfaultError,
    },
    /// What is there cannot be told, or overwritten.
    #[error("cannot tell or write the pages of RAM block {id} that are there")]
    There {
        /// The block.
        id: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The page tables cannot be read.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// The source has given up.
    #[error("page {page} of RAM block {block} cannot be had; whoever needs it waits until another pager takes over")]
    Source {
        /// The block.
        block: String,
        /// The page, in units of 4 KiB.
        page: u64,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// QEMU has ended.
    #[error("QEMU (process {pid}) has ended before all of its memory was there")]
    Gone {
        /// QEMU.
        pid: u32,
    },
    /// Waiting failed.
    #[error("cannot wait for faults")]
    Wait {
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// How far a pager has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Faults that somebody waited for.
    pub faults: u64,
    /// Pages of the host brought because of them.
    pub demanded: u64,
    /// Pages brought behind.
    pub filled: u64,
    /// Pages that are zero and were left out.
    pub zero: u64,
    /// Pages that the guest gave back meanwhile.
    pub given_back: u64,
    /// Pages still missing.
    pub left: u64,
    /// The longest time from reading a fault to its page, in nanoseconds. A page that had to be tried again counts.
    pub worst_ns: u64,
    /// All is there; the registration is gone.
    pub complete: bool,
}

/// What is to become of the registration when all is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Last {
    /// It goes, and with it the record of what was written.
    Release,
    /// Not yet: a tracker still needs the record. It is asked for again; who touches a zero page that was left out, or gives
    /// pages back, is served meanwhile.
    Wait,
    /// A tracker has taken the memory over by a descriptor of its own: only ours is closed.
    HandedOver,
}

/// A page that somebody waits for.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) since: Instant,
    pub(super) attempts: u32,
    /// When to try (again).
    pub(super) due: Instant,
}

/// Brings the missing pages of a QEMU. Dropped or killed, QEMU keeps its descriptor: see [the module](super).
#[derive(Debug)]
pub struct Pager {
    pub(super) process: Process,
    pub(super) remote: Option<Remote>,
    pub(super) blocks: Vec<Paged>,
    /// By block and page.
    pub(super) wanted: BTreeMap<(usize, u64), Wanted>,
    pub(super) progress: Progress,
    /// Neighbours of pages that somebody waited for, the next ones last: what is beside them is wanted next.
    pub(super) around: Vec<(usize, Range<u64>)>,
    /// Attempts for the batch behind, and when to try again.
    pub(super) behind: (u32, Instant),
    pub(super) buffer: Vec<u8>,
    /// Pages come write-protected, so that what is written afterwards is known.
    pub(super) recording: bool,
}

impl Pager {
    /// Register those blocks of `ram` that `chosen` names, in a QEMU that waits for its state and whose guest has not
    /// run. What QEMU has put there itself is overwritten from `source`.
    ///
    /// `device`: the number at which QEMU has `/dev/userfaultfd`, where it may not open a userfaultfd by itself.
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

    /// The first half of [`Pager::begin`], for which nothing needs to be known of the guest. [`Pager::overwrite`] is the other one.
    ///
    /// # Errors
    /// As [`Pager::begin`].
    pub fn register(
        injector: Injector,
        ram: &GuestRam,
        chosen: impl Fn(&str) -> bool,
        device: Option<RawFd>,
    ) -> Result<Self, PagerError> {
        let blocks = paged(ram, chosen);
        let (features, mode) = match supported().is_ok_and(|kernel| kernel.contains(RECORDING)) {
            true => (RECORDING, Mode::MISSING | Mode::WRITE_PROTECT),
            false => (PLAIN, Mode::MISSING),
        };
        let remote = Remote::open(injector, features, device)?;
        let registered = blocks.iter().try_for_each(|block| {
            remote
                .userfault
                .register(block.range.clone(), mode)
                .map_err(|source| PagerError::Block { id: block.id.clone(), source })
        });
        if let Err(e) = registered {
            remote.close()?;
            return Err(e);
        }
        Ok(Self::with(injector.process(), remote, blocks))
    }

    /// Whether a pager has registered memory of a QEMU.
    ///
    /// # Errors
    /// [`PagerError`].
    pub fn is_begun(process: Process) -> Result<bool, PagerError> {
        Ok(left(process)?.is_some())
    }

    /// Go on where a pager before has ended. `None`: none has left anything, so all is there.
    ///
    /// # Errors
    /// [`PagerError`].
    pub fn take_over(
        injector: Injector,
        ram: &GuestRam,
        chosen: impl Fn(&str) -> bool,
    ) -> Result<Option<Self>, PagerError> {
        let Some((ours, _)) = left(injector.process())? else { return Ok(None) };
        let remote = Remote::take(injector, ours)?;
        let mut pager = Self::with(injector.process(), remote, paged(ram, chosen));
        pager.look(ram)?;
        // Faults that the other one had read, but not served, are told again to none but who wakes them.
        for block in &pager.blocks {
            if let Some(remote) = &pager.remote {
                let woken = remote.userfault.wake(block.range.clone());
                woken.map_err(|source| PagerError::Block { id: block.id.clone(), source })?;
            }
        }
        Ok(Some(pager))
    }

    fn with(process: Process, remote: Remote, blocks: Vec<Paged>) -> Self {
        let progress = Progress::default();
        let behind = (0, Instant::now());
        let recording = remote.userfault.features() == RECORDING;
        let (remote, wanted) = (Some(remote), BTreeMap::new());
        let (around, buffer) = (Vec::new(), Vec::new());
        Self { process, remote, blocks, wanted, progress, around, behind, buffer, recording }
    }

    /// How far it has come.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress { left: self.blocks.iter().map(Paged::left).sum(), ..self.progress }
    }

    /// What is there already, and what is not registered any more (given back), is done.
    fn look(&mut self, ram: &GuestRam) -> Result<(), PagerError> {
        let registered = remote::registered(self.process, Mode::MISSING);
        let registered = registered.map_err(|source| PagerError::There { id: "all".into(), source })?;
        for paged in &mut self.blocks {
            let Range { start, end } = paged.range;
            let inside = registered.iter().map(|range| range.start.max(start)..range.end.min(end));
            let inside: Vec<_> =
                inside.filter(|range| !range.is_empty()).map(|range| range.start - start..range.end - start).collect();
            let there = there(self.process, ram, paged)?;
            for run in there.iter().chain(&pages::complement(&inside, end - start)) {
                paged.touched(run).for_each(|page| paged.set_done(page));
            }
        }
        Ok(())
    }

    /// Put a page (in units of 4 KiB) of the RAM block called `id` that nobody waits for yet. One that is there, or is part of a
    /// larger page of the host, is left alone.
    ///
    /// # Errors
    /// [`PagerError`]; it is as before.
    pub fn put_ahead(&mut self, id: &str, page: u64, content: &Page) -> Result<(), PagerError> {
        let block = self.blocks.iter().position(|paged| paged.id == id && paged.page == PAGE_SIZE as u64);
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

    /// What QEMU has put there before its guest ran is not what belongs there: overwrite it from `source`.
    ///
    /// # Errors
    /// [`PagerError`]; then the guest must not run.
    pub fn overwrite(&mut self, ram: &GuestRam, source: &mut impl PageSource) -> Result<(), PagerError> {
        for index in 0..self.blocks.len() {
            let Some(paged) = self.blocks.get(index) else { continue };
            let pages: Vec<_> = there(self.process, ram, paged)?.iter().flat_map(|run| paged.touched(run)).collect();
            for page in pages {
                let content = self.fetch_patiently(index, page, source)?;
                let Some(paged) = self.blocks.get_mut(index) else { continue };
                if content == Content::Zero {
                    self.buffer.fill(0);
                }
                let address = paged.addresses(&(page..page + 1)).start;
                memory::write(self.process, address, &self.buffer)
                    .map_err(|source| PagerError::There { id: paged.id.clone(), source })?;
                paged.set_done(page);
            }
        }
        Ok(())
    }

    fn fetch_patiently<S: PageSource>(
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
                    std::thread::sleep(self.patience(block, at, e, attempts, source)?);
                }
            }
        }
    }

    /// Fetch some pages of the host into the buffer, one after the other. On failure: the page (of 4 KiB) that failed.
    pub(super) fn fetch<S: PageSource>(
        &mut self,
        block: usize,
        pages: Range<u64>,
        source: &mut S,
    ) -> Result<Vec<Content>, (u64, S::Error)> {
        let Some(paged) = self.blocks.get(block) else { return Ok(Vec::new()) };
        let each = paged.page as usize / PAGE_SIZE;
        self.buffer.resize((pages.end - pages.start) as usize * paged.page as usize, 0);
        let mut contents = Vec::new();
        for (page, huge) in pages.zip(self.buffer.chunks_exact_mut(paged.page as usize)) {
            let mut content = Content::Zero;
            let (small, _) = huge.as_chunks_mut::<PAGE_SIZE>();
            for (small, at) in small.iter_mut().zip(page * each as u64..) {
                let small: &mut Page = small;
                match source.page(&paged.id, at, small).map_err(|e| (at, e))? {
                    Content::Data => content = Content::Data,
                    Content::Zero => small.fill(0),
                }
            }
            contents.push(content);
        }
        Ok(contents)
    }

    pub(super) fn patience<S: PageSource>(
        &self,
        block: usize,
        page: u64,
        error: S::Error,
        attempts: u32,
        source: &mut S,
    ) -> Result<Duration, PagerError> {
        match source.retry(&error, attempts) {
            Some(wait) => Ok(wait),
            None => {
                let block = self.blocks.get(block).map(|block| block.id.clone()).unwrap_or_default();
                Err(PagerError::Source { block, page, source: Box::new(error) })
            }
        }
    }

    /// All is there: end the registration, then the descriptors. Who waits goes on.
    pub(super) fn release(&mut self) -> Result<(), PagerError> {
        let Some(remote) = self.remote.take() else { return Ok(()) };
        for block in &self.blocks {
            // Parts of it may be unregistered already, and a block may have been unplugged.
            if let Err(e) = remote.userfault.unregister(block.range.clone()) {
                tracing::debug!("{e}: {:?}", std::error::Error::source(&e));
            }
        }
        Ok(remote.close()?)
    }
}

impl Pager {
    /// All is there, and others track the memory: close the descriptors and touch nothing.
    pub(super) fn let_go(&mut self) -> Result<(), PagerError> {
        match self.remote.take() {
            Some(remote) => Ok(remote.close()?),
            None => Ok(()),
        }
    }
}

fn paged(ram: &GuestRam, chosen: impl Fn(&str) -> bool) -> Vec<Paged> {
    ram.blocks().iter().filter(|block| chosen(&block.told.id)).map(Paged::new).collect()
}

/// The runs (offsets) of a block that are there, in the memory itself.
fn there(process: Process, ram: &GuestRam, paged: &Paged) -> Result<Vec<Range<u64>>, PagerError> {
    let block = ram.blocks().iter().find(|block| block.told.id == paged.id);
    // hugetlbfs does not tell its holes; what is mapped is there.
    match block.filter(|_| paged.page == PAGE_SIZE as u64) {
        Some(block) => Ok(ram.populated(block)?),
        None => {
            let runs = Scanner::open(process)?.matching(paged.range.clone(), Query::all(Categories::PRESENT))?;
            Ok(runs.into_iter().map(|run| run.start - paged.range.start..run.end - paged.range.start).collect())
        }
    }
}
