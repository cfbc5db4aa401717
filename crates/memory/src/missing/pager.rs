//! The pager: serves who waits, and brings the rest.

use super::paged::Paged;
use super::source::{Content, Page, PageSource};
use crate::pages;
use crate::ram::{GuestRam, GuestRamError};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory::{self, PAGE_SIZE};
use rekindle_kernel::pagemap::{Categories, Query, ScanError, Scanner};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::remote::{self, Remote, RemoteError};
use rekindle_kernel::userfault::{Event, Features, Filled, Mode, UserfaultError};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What a pager's userfaultfd is asked for. QEMU itself asks for no events of removed pages: so it is also how it is known.
const FEATURES: Features = Features::MISSING_SHMEM
    .union(Features::MISSING_HUGETLBFS)
    .union(Features::EVENT_REMOVE)
    .union(Features::EXACT_ADDRESS);

/// Bytes that are brought at a time when nobody waits. Small, because who comes meanwhile waits for them.
const BATCH: u64 = 256 << 10;
/// How long the pager sleeps at most before it looks whether it is to end.
const TICK: Duration = Duration::from_millis(50);

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

/// A page that somebody waits for.
#[derive(Debug)]
struct Wanted {
    since: Instant,
    attempts: u32,
    /// When to try (again).
    due: Instant,
}

/// Brings the missing pages of a QEMU. Dropped or killed, QEMU keeps its descriptor: see [the module](super).
#[derive(Debug)]
pub struct Pager {
    process: Process,
    remote: Option<Remote>,
    blocks: Vec<Paged>,
    /// By block and page.
    wanted: BTreeMap<(usize, u64), Wanted>,
    progress: Progress,
    /// Attempts for the batch behind, and when to try again.
    behind: (u32, Instant),
    buffer: Vec<u8>,
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
        let blocks = paged(ram, chosen);
        let remote = Remote::open(injector, FEATURES, device)?;
        let registered = blocks.iter().try_for_each(|block| {
            remote
                .userfault
                .register(block.range.clone(), Mode::MISSING)
                .map_err(|source| PagerError::Block { id: block.id.clone(), source })
        });
        if let Err(e) = registered {
            remote.close()?;
            return Err(e);
        }
        let mut pager = Self::with(injector.process(), remote, blocks);
        match pager.overwrite(ram, source) {
            Ok(()) => Ok(pager),
            Err(e) => {
                pager.release()?;
                Err(e)
            }
        }
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
        let existing = remote::existing(injector.process())?;
        let Some(ours) = existing.into_iter().find(|existing| existing.features == FEATURES) else { return Ok(None) };
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
        Self { process, remote: Some(remote), blocks, wanted: BTreeMap::new(), progress, behind, buffer: Vec::new() }
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

    /// What QEMU has put there before its guest ran is not what belongs there.
    fn overwrite(&mut self, ram: &GuestRam, source: &mut impl PageSource) -> Result<(), PagerError> {
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
    fn fetch<S: PageSource>(
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

    fn patience<S: PageSource>(
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

    /// Bring everything: who waits comes first, then the runs of `order` (index among the chosen blocks, offsets), then the
    /// rest. Returns when all is there and the registration is gone, or when `end` is set.
    ///
    /// # Errors
    /// [`PagerError`]; everything stays registered, and `run` or [`Pager::take_over`] may go on.
    pub fn run<S: PageSource>(
        &mut self,
        source: &mut S,
        order: impl IntoIterator<Item = (usize, Range<u64>)>,
        end: &AtomicBool,
    ) -> Result<Progress, PagerError> {
        let everything: Vec<_> =
            self.blocks.iter().enumerate().map(|(n, block)| (n, 0..block.range.end - block.range.start)).collect();
        let mut order: VecDeque<_> = order.into_iter().chain(everything).collect();
        while !end.load(Ordering::Relaxed) {
            self.events(self.time_to_wait())?;
            self.serve(source)?;
            if self.remote.is_none() {
                break;
            }
            if Instant::now() >= self.behind.1 && self.due().is_none() && !self.bring_some(&mut order, source)? {
                self.release()?;
                self.progress.complete = true;
                break;
            }
        }
        Ok(self.progress())
    }

    /// A wanted page whose time has come.
    fn due(&self) -> Option<(usize, u64)> {
        let now = Instant::now();
        self.wanted.iter().find(|(_, wanted)| wanted.due <= now).map(|(&place, _)| place)
    }

    fn time_to_wait(&self) -> Duration {
        let next = self.wanted.values().map(|wanted| wanted.due).chain([self.behind.1]).min();
        next.map_or(TICK, |next| next.saturating_duration_since(Instant::now())).min(TICK)
    }

    /// Wait for events, at most for `time`, and take note of them.
    fn events(&mut self, time: Duration) -> Result<(), PagerError> {
        let Some(remote) = &self.remote else { return Ok(()) };
        let limit = rustix::time::Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&remote.userfault, PollFlags::IN)], Some(&limit)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(e) => return Err(PagerError::Wait { source: e.into() }),
        }
        let gone = PagerError::Gone { pid: self.process.pid };
        let events = match remote.userfault.events() {
            Ok(events) => events,
            Err(UserfaultError::Gone) => return Err(gone),
            Err(e) => return Err(PagerError::Wait { source: io::Error::other(e) }),
        };
        if events.is_empty() && !self.process.is_alive() {
            return Err(gone);
        }
        let now = Instant::now();
        for event in events {
            match event {
                Event::Fault { address, .. } => {
                    self.progress.faults += 1;
                    let place =
                        self.blocks.iter().enumerate().find_map(|(n, block)| Some((n, block.page_at(address)?)));
                    if let Some(place) = place {
                        self.wanted.entry(place).or_insert(Wanted { since: now, attempts: 0, due: now });
                    }
                }
                Event::Remove(range) | Event::Unmap(range) => self.given_back(&range),
                _ => {}
            }
        }
        Ok(())
    }

    /// Nothing old may be put here any more.
    fn given_back(&mut self, range: &Range<u64>) {
        let Some(remote) = &self.remote else { return };
        for block in &mut self.blocks {
            let start = range.start.clamp(block.range.start, block.range.end);
            let end = range.end.clamp(block.range.start, block.range.end);
            let pages = block.touched(&(start - block.range.start..end - block.range.start));
            if pages.is_empty() || start >= end {
                continue;
            }
            let addresses = block.addresses(&pages);
            // Out of the registration, so that also the next pager knows. Where the process has too many mappings for
            // that, this one remembers, and serves zeroes.
            if let Err(e) = remote.userfault.unregister(addresses) {
                tracing::debug!("{e}: {:?}", std::error::Error::source(&e));
            }
            for page in pages {
                self.progress.given_back += u64::from(!block.is_done(page));
                block.set_done(page);
            }
        }
    }

    /// Serve all who wait and whose time has come.
    fn serve<S: PageSource>(&mut self, source: &mut S) -> Result<(), PagerError> {
        while let Some((block, page)) = self.due() {
            let Some(paged) = self.blocks.get(block) else { break };
            // Asked for although it is done: it came meanwhile, is a zero that was left out, or was given back.
            let content = if paged.is_done(page) {
                self.buffer.clear();
                self.buffer.resize(paged.page as usize, 0);
                Ok(Content::Zero)
            } else {
                self.fetch(block, page..page + 1, source)
                    .map(|contents| contents.first().copied().unwrap_or(Content::Zero))
            };
            match content {
                Ok(content) => {
                    if self.put(block, page..page + 1, content)? {
                        let since = self.wanted.remove(&(block, page)).map(|wanted| wanted.since);
                        let took =
                            since.map_or(0, |since| u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX));
                        self.progress.worst_ns = self.progress.worst_ns.max(took);
                        self.progress.demanded += 1;
                    }
                }
                Err((at, e)) => {
                    let attempts = self.wanted.get(&(block, page)).map_or(0, |wanted| wanted.attempts) + 1;
                    let wait = self.patience(block, at, e, attempts, source)?;
                    if let Some(wanted) = self.wanted.get_mut(&(block, page)) {
                        (wanted.attempts, wanted.due) = (attempts, Instant::now() + wait);
                    }
                }
            }
            // Others may have come, and a removal must be seen before the next page is put.
            self.events(Duration::ZERO)?;
        }
        Ok(())
    }

    /// Put what is in the buffer to some pages, and wake who waits. `false`: mappings are changing, try again.
    fn put(&mut self, block: usize, pages: Range<u64>, content: Content) -> Result<bool, PagerError> {
        let (Some(remote), Some(paged)) = (&self.remote, self.blocks.get_mut(block)) else { return Ok(true) };
        let addresses = paged.addresses(&pages);
        let userfault = &remote.userfault;
        let failed = |source| PagerError::Block { id: paged.id.clone(), source };
        let mut at = addresses.start;
        while at < addresses.end {
            let filled = if content == Content::Zero && paged.page == PAGE_SIZE as u64 {
                userfault.zero(at..addresses.end, true)
            } else {
                let rest = self.buffer.get((at - addresses.start) as usize..).unwrap_or_default();
                userfault.copy(at, rest, true)
            };
            match filled.map_err(failed)? {
                Filled::All => break,
                // It is there; who waits for it must be told so.
                Filled::Exists(done) => {
                    at += done;
                    userfault.wake(at..at + paged.page).map_err(failed)?;
                    at += paged.page;
                }
                Filled::Changing(_) => return Ok(false),
                Filled::Gone(_) if !self.process.is_alive() => return Err(PagerError::Gone { pid: self.process.pid }),
                // Given back: who touches it finds zero without us.
                Filled::Gone(done) => {
                    at += done;
                    let _ = userfault.wake(at..at + paged.page);
                    at += paged.page;
                }
            }
        }
        pages.for_each(|page| paged.set_done(page));
        Ok(true)
    }

    /// Bring the next pages behind. `false`: there are none left.
    fn bring_some<S: PageSource>(
        &mut self,
        order: &mut VecDeque<(usize, Range<u64>)>,
        source: &mut S,
    ) -> Result<bool, PagerError> {
        let next = loop {
            let Some((block, run)) = order.front().cloned() else { return Ok(false) };
            let missing = self.blocks.get(block).and_then(|paged| {
                let most = (BATCH / paged.page).max(1);
                paged.next_missing(&paged.touched(&run), most)
            });
            match (missing, self.blocks.get(block)) {
                (Some(pages), Some(paged)) => {
                    // What is before it in the run is done.
                    if let Some(first) = order.front_mut() {
                        first.1.start = first.1.start.max(pages.start * paged.page);
                    }
                    break (block, pages);
                }
                _ => order.pop_front(),
            };
        };
        let (block, pages) = next;
        match self.fetch(block, pages.clone(), source) {
            Ok(contents) => {
                self.behind.0 = 0;
                self.put_behind(block, pages, &contents)?;
            }
            Err((at, e)) => {
                self.behind.0 += 1;
                let wait = self.patience(block, at, e, self.behind.0, source)?;
                self.behind.1 = Instant::now() + wait;
            }
        }
        Ok(true)
    }

    /// Put a batch: runs of pages with data; zeroes are left out, and read as such at the end.
    fn put_behind(&mut self, block: usize, pages: Range<u64>, contents: &[Content]) -> Result<(), PagerError> {
        let Some(page_bytes) = self.blocks.get(block).map(|paged| paged.page as usize) else { return Ok(()) };
        let all = std::mem::take(&mut self.buffer);
        let mut at = 0;
        for run in contents.chunk_by(|one, next| one == next) {
            let part = pages.start + at as u64..pages.start + (at + run.len()) as u64;
            if run.first() == Some(&Content::Data) {
                let bytes = all.get(at * page_bytes..(at + run.len()) * page_bytes).unwrap_or_default();
                self.buffer.clear();
                self.buffer.extend_from_slice(bytes);
                if !self.put(block, part, Content::Data)? {
                    // Mappings are changing: after the events.
                    break;
                }
                self.progress.filled += run.len() as u64;
            } else if let Some(paged) = self.blocks.get_mut(block) {
                part.for_each(|page| paged.set_done(page));
                self.progress.zero += run.len() as u64;
            }
            at += run.len();
        }
        self.buffer = all;
        Ok(())
    }

    /// All is there: end the registration, then the descriptors. Who waits goes on.
    fn release(&mut self) -> Result<(), PagerError> {
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
