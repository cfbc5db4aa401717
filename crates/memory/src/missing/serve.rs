//! The pager's work: supplying pages for faults, and filling all other pages in the background.

use super::pager::{BackgroundAttempt, BlockPage, Completion, Pager, PagerError, PendingFault, Progress, is_alive};
use super::source::{Content, Need, PageSource};
use rekindle_kernel::userfault::{Event, Filled, UserfaultError};
use rekindle_pages::{PAGE_SIZE, PageNo};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes per background batch. Small, because a fault that occurs during a batch waits for its end.
const BACKGROUND_BATCH_BYTES: u64 = 256 << 10;
/// Runs that are announced to the source before they are filled: 16 MiB of single pages.
const ANNOUNCED_RUNS: usize = 4096;
/// Limit of the runs of one announcement.
const RUNS_PER_ANNOUNCEMENT: usize = 1024;
/// Fills until runs are announced again, if the source had no room for more.
const FILLS_PER_ANNOUNCEMENT: usize = 64;
/// The longest time until a page that is on its way is tried again. Usually the source notifies the pager earlier.
const ARRIVAL_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Time until it is checked again which pages are next.
const ORDER_CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// Pages on each side of a faulted page that are filled next, because they are likely to be needed (HydraVM, figure 5).
const NEIGHBOURS: u64 = 16;
/// Neighbours filled per batch, nearest first.
const NEIGHBOURS_PER_BATCH: u64 = 8;
/// Most runs of neighbours in the queue. Older runs are dropped, and filled with the remaining pages.
const MAX_QUEUED_NEIGHBOUR_RUNS: usize = 64;
/// The longest sleep before the pager checks whether it should end.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// As [`MAX_SLEEP`], for [`Pager::run_on_demand`], whose caller waits for its end.
const MAX_SLEEP_ON_DEMAND: Duration = Duration::from_millis(2);

/// A block, and a run of offsets in it.
type BlockRun = (usize, Range<u64>);

/// The runs that are filled in the background, in this order.
struct Order<I> {
    /// The next runs.
    runs: VecDeque<BlockRun>,
    /// The runs after them. An item is `None` if the next run is not known yet.
    unknown: Option<I>,
    /// All pages, which are last.
    all: VecDeque<BlockRun>,
}

impl<I: Iterator<Item = Option<BlockRun>>> Order<I> {
    /// Adds the next runs that are known.
    fn refill(&mut self) {
        while self.runs.len() < ANNOUNCED_RUNS {
            match self.unknown.as_mut().map(Iterator::next) {
                Some(Some(Some(run))) => self.runs.push_back(run),
                Some(Some(None)) => return,
                Some(None) => self.unknown = None,
                None => {
                    self.runs.append(&mut self.all);
                    return;
                }
            }
        }
    }
}

/// The result of filling pages in the background.
enum BatchOutcome {
    /// They are filled, or the next attempt is scheduled.
    Done,
    /// Those from here on wait for a GET.
    InFlight(Range<u64>),
}

/// Makes all attempts due that wait for a GET.
fn note_arrival(pending: &mut BTreeMap<BlockPage, PendingFault>, background: &mut BackgroundAttempt) {
    let now = Instant::now();
    for fault in pending.values_mut().filter(|fault| fault.is_in_flight) {
        (fault.is_in_flight, fault.due) = (false, now);
    }
    if std::mem::take(&mut background.is_in_flight) {
        background.due = now;
    }
    if std::mem::take(&mut background.are_neighbours_in_flight) {
        background.neighbours_due = now;
    }
}

impl Pager {
    /// Fills all pages: faulted pages first, then the runs of `order` (index among the chosen blocks, offsets), then
    /// all others. Returns when all pages are present and the registration has ended, or when `should_end` is set.
    ///
    /// # Errors
    /// [`PagerError`]; everything stays registered, and `run` or [`Pager::take_over`] may continue.
    pub fn run<S: PageSource>(
        &mut self,
        source: &mut S,
        order: impl IntoIterator<Item = (usize, Range<u64>)>,
        should_end: &AtomicBool,
    ) -> Result<Progress, PagerError> {
        self.run_until(source, order, should_end, || Completion::Release)
    }

    /// Fills pages like [`Pager::run`]. When all pages are present, `completion` decides what happens to the
    /// registration, with which the record of writes ([`crate::tracker::Filling`]) ends.
    ///
    /// # Errors
    /// As for [`Pager::run`].
    pub fn run_until<S: PageSource>(
        &mut self,
        source: &mut S,
        order: impl IntoIterator<Item = (usize, Range<u64>)>,
        should_end: &AtomicBool,
        completion: impl FnMut() -> Completion,
    ) -> Result<Progress, PagerError> {
        self.run_in_order(source, order.into_iter().map(Some), should_end, completion)
    }

    /// Fills pages like [`Pager::run_until`]. An item of `order` is `None` if the next run is not known yet: the pager serves
    /// faults, and asks again later.
    ///
    /// # Errors
    /// As for [`Pager::run`].
    pub fn run_in_order<S: PageSource>(
        &mut self,
        source: &mut S,
        order: impl IntoIterator<Item = Option<(usize, Range<u64>)>>,
        should_end: &AtomicBool,
        mut completion: impl FnMut() -> Completion,
    ) -> Result<Progress, PagerError> {
        let mut order = Order { runs: VecDeque::new(), unknown: Some(order.into_iter()), all: self.all_pages() };
        while !should_end.load(Ordering::Relaxed) {
            let wait = self.time_to_next_attempt();
            self.handle_events(wait, source)?;
            // Without this check the end of the process is noticed only on access to its memory. No access happens
            // while the source fails, or while the registration is kept for a tracker.
            if !wait.is_zero() && !is_alive(&self.pidfd) {
                return Err(PagerError::QemuEnded { pid: self.process.pid });
            }
            self.serve_faults(source)?;
            if self.remote.is_none() {
                break;
            }
            if self.due_fault().is_some() || self.fill_neighbours(source)? || self.fill_batch(&mut order, source)? {
                continue;
            }
            match completion() {
                Completion::Release => self.release()?,
                Completion::HandedOver => self.close()?,
                Completion::Wait => {
                    self.background.due = Instant::now() + MAX_SLEEP;
                    continue;
                }
            }
            self.progress.complete = true;
            break;
        }
        Ok(self.progress())
    }

    /// Supplies pages for faults, and fills their neighbours, until `should_end` is set. Other pages are not fetched,
    /// because that would delay a guest that is being started. Another pager can take over afterwards.
    ///
    /// While `may_fill_all` is set, the guest is not started yet, and the other pages are filled too. If one of them
    /// cannot be fetched, these pages are left to the next pager.
    ///
    /// # Errors
    /// [`PagerError`]; everything stays registered.
    pub fn run_on_demand<S: PageSource>(
        &mut self,
        source: &mut S,
        should_end: &AtomicBool,
        may_fill_all: &AtomicBool,
    ) -> Result<Progress, PagerError> {
        let mut unfilled = Order { runs: self.all_pages(), unknown: None::<std::iter::Empty<_>>, all: VecDeque::new() };
        while !should_end.load(Ordering::Relaxed) && self.remote.is_some() {
            let fills_all = may_fill_all.load(Ordering::Relaxed) && !unfilled.runs.is_empty();
            let background = fills_all.then_some(self.background.due);
            let neighbours = (!self.neighbours.is_empty()).then_some(self.background.neighbours_due);
            let faults = self.pending.values().map(|fault| fault.due);
            let next_attempt = faults.chain(background).chain(neighbours).min();
            let wait = next_attempt.map_or(MAX_SLEEP_ON_DEMAND, |due| due.saturating_duration_since(Instant::now()));
            self.handle_events(wait.min(MAX_SLEEP_ON_DEMAND), source)?;
            self.serve_faults(source)?;
            if self.due_fault().is_some() || self.fill_neighbours(source)? || !fills_all {
                continue;
            }
            if let Err(e) = self.fill_batch(&mut unfilled, source) {
                tracing::debug!("background fill is left to the next pager: {e}");
                unfilled.runs.clear();
            }
        }
        Ok(self.progress())
    }

    /// Returns all pages, as one run per block.
    fn all_pages(&self) -> VecDeque<(usize, Range<u64>)> {
        self.blocks.iter().enumerate().map(|(n, block)| (n, 0..block.range.end - block.range.start)).collect()
    }

    /// Returns the page of a pending fault whose next attempt is due.
    fn due_fault(&self) -> Option<BlockPage> {
        let now = Instant::now();
        self.pending.iter().find(|(_, fault)| fault.due <= now).map(|(&page, _)| page)
    }

    /// Returns the time until the next attempt to fill a page is due, at most [`MAX_SLEEP`].
    fn time_to_next_attempt(&self) -> Duration {
        let neighbours = (!self.neighbours.is_empty()).then_some(self.background.neighbours_due);
        let due = self.pending.values().map(|fault| fault.due).chain(neighbours);
        due.fold(self.background.due, Instant::min).saturating_duration_since(Instant::now()).min(MAX_SLEEP)
    }

    /// Waits for events, for at most `time`, and records them.
    fn handle_events<S: PageSource>(&mut self, time: Duration, source: &S) -> Result<(), PagerError> {
        let Some(remote) = &self.remote else { return Ok(()) };
        let limit = rustix::time::Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
        let arrivals = source.arrivals();
        let mut polled = vec![PollFd::new(&remote.userfault, PollFlags::IN)];
        polled.extend(arrivals.as_ref().map(|arrivals| PollFd::new(arrivals, PollFlags::IN)));
        match poll(&mut polled, Some(&limit)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(e) => return Err(PagerError::Wait { source: e.into() }),
        }
        let has_events = polled.first().is_some_and(|userfault| !userfault.revents().is_empty());
        let has_arrivals = polled.get(1).is_some_and(|arrivals| !arrivals.revents().is_empty());
        if let Some(arrivals) = arrivals.filter(|_| has_arrivals) {
            // Before the pages are tried again: what arrives after this makes the descriptor readable again.
            let _ = rustix::io::read(arrivals, &mut [0; 8]);
            note_arrival(&mut self.pending, &mut self.background);
        }
        if !has_events {
            return Ok(());
        }
        let ended = PagerError::QemuEnded { pid: self.process.pid };
        let events = match remote.userfault.events() {
            Ok(events) => events,
            Err(UserfaultError::Gone) => return Err(ended),
            Err(e) => return Err(PagerError::Wait { source: io::Error::other(e) }),
        };
        if events.is_empty() && !is_alive(&self.pidfd) {
            return Err(ended);
        }
        let now = Instant::now();
        for event in events {
            match event {
                Event::Fault { address, .. } => {
                    self.progress.faults += 1;
                    if let Some(page) = self.page_at(address) {
                        self.pending.entry(page).or_insert(PendingFault {
                            since: now,
                            attempts: 0,
                            due: now,
                            is_in_flight: false,
                        });
                    }
                }
                Event::Remove(range) | Event::Unmap(range) => self.unregister_given_back(&range),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the page at an address, if it is in one of the pager's blocks.
    fn page_at(&self, address: u64) -> Option<BlockPage> {
        let mut blocks = self.blocks.iter().enumerate();
        blocks.find_map(|(block, paged)| Some(BlockPage { block, page: paged.page_at(address)? }))
    }

    /// Removes pages that the guest gave back from the registration: no old content may be put into them.
    fn unregister_given_back(&mut self, range: &Range<u64>) {
        let Some(remote) = &self.remote else { return };
        for block in &mut self.blocks {
            let start = range.start.clamp(block.range.start, block.range.end);
            let end = range.end.clamp(block.range.start, block.range.end);
            let pages = block.pages_overlapping(&(start - block.range.start..end - block.range.start));
            if pages.is_empty() || start >= end {
                continue;
            }
            let addresses = block.addresses(&pages);
            // The next pager recognises these pages because they are not registered. If the process has too many
            // mappings to unregister them, this pager still treats them as not missing and supplies zeros.
            if let Err(e) = remote.userfault.unregister(addresses) {
                tracing::debug!("{e}: {:?}", std::error::Error::source(&e));
            }
            for page in pages {
                self.progress.given_back += u64::from(block.is_missing(page));
                block.remove_missing(page);
            }
        }
    }

    /// Supplies the pages of all pending faults that are due.
    fn serve_faults<S: PageSource>(&mut self, source: &mut S) -> Result<(), PagerError> {
        while let Some(faulted) = self.due_fault() {
            self.serve_fault(faulted, source)?;
            // There may be new faults, and a removal must be handled before the next page is filled.
            self.handle_events(Duration::ZERO, source)?;
        }
        Ok(())
    }

    /// Fetches and fills the page of a pending fault. If fetching fails, schedules the next attempt.
    fn serve_fault<S: PageSource>(&mut self, faulted: BlockPage, source: &mut S) -> Result<(), PagerError> {
        let BlockPage { block, page } = faulted;
        let Some(paged) = self.blocks.get(block) else { return Ok(()) };
        let is_missing = paged.is_missing(page);
        let content = if is_missing {
            match self.fetch(block, page..page + 1, Some(Need::Fault), source) {
                Ok(contents) => match contents.first() {
                    Some(content) => *content,
                    None => {
                        if let Some(fault) = self.pending.get_mut(&faulted) {
                            (fault.is_in_flight, fault.due) = (true, Instant::now() + ARRIVAL_CHECK_INTERVAL);
                        }
                        return Ok(());
                    }
                },
                Err((failed_page, e)) => {
                    let attempts = self.pending.get(&faulted).map_or(0, |fault| fault.attempts) + 1;
                    let delay = self.retry_delay(block, failed_page, e, attempts, source)?;
                    if let Some(fault) = self.pending.get_mut(&faulted) {
                        (fault.attempts, fault.due) = (attempts, Instant::now() + delay);
                        fault.is_in_flight = false;
                    }
                    return Ok(());
                }
            }
        } else {
            // The page was filled since the fault, is a zero page that was not filled, or was given back.
            self.buffer.clear();
            self.buffer.resize(paged.page_bytes as usize, 0);
            Content::Zero
        };
        if self.fill_from_buffer(block, page..page + 1, content)? {
            let elapsed = self.pending.remove(&faulted).map_or(Duration::ZERO, |fault| fault.since.elapsed());
            let elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
            self.progress.worst_ns = self.progress.worst_ns.max(elapsed_ns);
            self.progress.demanded += 1;
            if is_missing {
                self.notify_supplied(block, &(page..page + 1), source);
                self.queue_neighbours(block, page);
            }
        }
        Ok(())
    }

    /// Fills pages from the buffer and wakes the blocked threads. Returns `false` if the mappings are being changed:
    /// the caller must read the events and try again.
    pub(super) fn fill_from_buffer(
        &mut self,
        block: usize,
        pages: Range<u64>,
        content: Content,
    ) -> Result<bool, PagerError> {
        let (Some(remote), Some(paged)) = (&self.remote, self.blocks.get_mut(block)) else { return Ok(true) };
        let addresses = paged.addresses(&pages);
        if content == Content::Zero && self.recording {
            // The kernel's zero page cannot be filled write-protected.
            self.buffer.clear();
            self.buffer.resize((addresses.end - addresses.start) as usize, 0);
        }
        let userfault = &remote.userfault;
        let failed = |source| PagerError::Block { id: paged.name.clone(), source };
        let mut address = addresses.start;
        while address < addresses.end {
            let unfilled = self.buffer.get((address - addresses.start) as usize..).unwrap_or_default();
            let filled = if self.recording {
                userfault.copy_protected(address, unfilled, true)
            } else if content == Content::Zero && paged.page_bytes == PAGE_SIZE as u64 {
                userfault.zero(address..addresses.end, true)
            } else {
                userfault.copy(address, unfilled, true)
            };
            match filled.map_err(failed)? {
                Filled::All => break,
                // The page is present; threads blocked on it must be woken.
                Filled::Exists(filled_bytes) => {
                    address += filled_bytes;
                    userfault.wake(address..address + paged.page_bytes).map_err(failed)?;
                    address += paged.page_bytes;
                }
                Filled::Changing(_) => return Ok(false),
                Filled::Gone(_) if !is_alive(&self.pidfd) => {
                    return Err(PagerError::QemuEnded { pid: self.process.pid });
                }
                // The guest has given the page back: the kernel itself supplies zeros.
                Filled::Gone(filled_bytes) => {
                    address += filled_bytes;
                    let _ = userfault.wake(address..address + paged.page_bytes);
                    address += paged.page_bytes;
                }
            }
        }
        pages.for_each(|page| paged.remove_missing(page));
        Ok(true)
    }

    /// Notifies the source that the guest's RAM has `pages`.
    fn notify_supplied<S: PageSource>(&self, block: usize, pages: &Range<u64>, source: &mut S) {
        if let Some(paged) = self.blocks.get(block) {
            source.supplied(paged.id, paged.offsets(pages));
        }
    }

    /// Queues the neighbours of a page, the nearest ones last.
    fn queue_neighbours(&mut self, block: usize, page: u64) {
        let Some(paged) = self.blocks.get(block).filter(|paged| paged.page_bytes == PAGE_SIZE as u64) else { return };
        for distance in (0..NEIGHBOURS / NEIGHBOURS_PER_BATCH).rev() {
            let before = page.saturating_sub((distance + 1) * NEIGHBOURS_PER_BATCH)
                ..page.saturating_sub(distance * NEIGHBOURS_PER_BATCH);
            let after = page + 1 + distance * NEIGHBOURS_PER_BATCH
                ..(page + 1 + (distance + 1) * NEIGHBOURS_PER_BATCH).min(paged.pages());
            self.neighbours.extend([before, after].into_iter().filter(|run| !run.is_empty()).map(|run| (block, run)));
        }
        let surplus = self.neighbours.len().saturating_sub(MAX_QUEUED_NEIGHBOUR_RUNS);
        self.neighbours.drain(..surplus);
    }

    /// Fills the next neighbours of a faulted page. Returns `false` if none are left, or the next one is still on its way.
    fn fill_neighbours<S: PageSource>(&mut self, source: &mut S) -> Result<bool, PagerError> {
        if Instant::now() < self.background.neighbours_due {
            return Ok(false);
        }
        while let Some((block, run)) = self.neighbours.pop() {
            let Some(pages) = self.blocks.get(block).and_then(|paged| paged.next_missing(&run, NEIGHBOURS_PER_BATCH))
            else {
                continue;
            };
            if pages.end < run.end {
                self.neighbours.push((block, pages.end..run.end));
            }
            if let BatchOutcome::InFlight(unfilled) = self.fill(block, pages, source)? {
                self.neighbours.push((block, unfilled));
                self.background.are_neighbours_in_flight = true;
                self.background.neighbours_due = Instant::now() + ARRIVAL_CHECK_INTERVAL;
                return Ok(false);
            }
            return Ok(true);
        }
        Ok(false)
    }

    /// Fills the next background batch, if it is due. Returns `false` if none are left.
    fn fill_batch<S: PageSource, I: Iterator<Item = Option<BlockRun>>>(
        &mut self,
        order: &mut Order<I>,
        source: &mut S,
    ) -> Result<bool, PagerError> {
        if Instant::now() < self.background.due {
            return Ok(true);
        }
        if order.runs.len() <= ANNOUNCED_RUNS / 2 {
            order.refill();
        }
        self.announce(&order.runs, source);
        while let Some((block, run)) = order.runs.front_mut() {
            let block = *block;
            if let Some(paged) = self.blocks.get(block) {
                let max_pages = (BACKGROUND_BATCH_BYTES / paged.page_bytes).max(1);
                if let Some(pages) = paged.next_missing(&paged.pages_overlapping(run), max_pages) {
                    // No earlier page of the run is missing.
                    run.start = run.start.max(pages.start * paged.page_bytes);
                    if let BatchOutcome::InFlight(_) = self.fill(block, pages, source)? {
                        self.background.is_in_flight = true;
                        self.background.due = Instant::now() + ARRIVAL_CHECK_INTERVAL;
                    }
                    return Ok(true);
                }
            }
            order.runs.pop_front();
            self.background.announced = self.background.announced.saturating_sub(1);
            if order.runs.is_empty() {
                order.refill();
            }
        }
        if order.unknown.is_some() {
            self.background.due = Instant::now() + ORDER_CHECK_INTERVAL;
            return Ok(true);
        }
        Ok(false)
    }

    /// Announces the missing pages among the next runs to the source, so that it can read several at a time.
    fn announce<S: PageSource>(&mut self, runs: &VecDeque<BlockRun>, source: &mut S) {
        let BackgroundAttempt { announced, fills_before_announcement, .. } = &mut self.background;
        if !source.fetches_ahead() || *announced > ANNOUNCED_RUNS / 2 || *announced >= runs.len() {
            return;
        }
        if *fills_before_announcement > 0 {
            *fills_before_announcement -= 1;
            return;
        }
        let next = runs.iter().enumerate().skip(*announced).take(RUNS_PER_ANNOUNCEMENT);
        // Longer runs are the rest of a block, of which hardly any page is missing.
        let single_pages = next.filter(|(_, (_, run))| run.end - run.start <= PAGE_SIZE as u64);
        let (positions, missing): (Vec<_>, Vec<_>) = single_pages
            .filter_map(|(position, (block, run))| {
                let paged = self.blocks.get(*block)?;
                paged.next_missing(&paged.pages_overlapping(run), 1)?;
                Some((position, (paged.id, PageNo::containing(run.start))))
            })
            .unzip();
        let accepted = if missing.is_empty() { 0 } else { source.will_fetch(&missing) };
        match positions.get(accepted) {
            Some(first_rejected) => {
                *announced = *first_rejected;
                *fills_before_announcement = FILLS_PER_ANNOUNCEMENT;
            }
            None => *announced = runs.len().min(*announced + RUNS_PER_ANNOUNCEMENT),
        }
    }

    /// Fetches and fills pages in the background. If that fails, schedules the next attempt.
    fn fill<S: PageSource>(
        &mut self,
        block: usize,
        pages: Range<u64>,
        source: &mut S,
    ) -> Result<BatchOutcome, PagerError> {
        match self.fetch(block, pages.clone(), Some(Need::Background), source) {
            Ok(contents) => {
                self.background.failures = 0;
                let end = pages.start + contents.len() as u64;
                self.fill_batch_from_buffer(block, pages.start..end, &contents, source)?;
                Ok(if end < pages.end { BatchOutcome::InFlight(end..pages.end) } else { BatchOutcome::Done })
            }
            Err((failed_page, e)) => {
                self.background.failures += 1;
                let delay = self.retry_delay(block, failed_page, e, self.background.failures, source)?;
                self.background.due = Instant::now() + delay;
                self.background.neighbours_due = self.background.due;
                (self.background.is_in_flight, self.background.are_neighbours_in_flight) = (false, false);
                Ok(BatchOutcome::Done)
            }
        }
    }

    /// Fills the pages of a batch that have data. Zero pages are not filled: they read as zero after the registration
    /// ends.
    fn fill_batch_from_buffer<S: PageSource>(
        &mut self,
        block: usize,
        pages: Range<u64>,
        contents: &[Content],
        source: &mut S,
    ) -> Result<(), PagerError> {
        let Some(page_bytes) = self.blocks.get(block).map(|paged| paged.page_bytes as usize) else { return Ok(()) };
        let batch = std::mem::take(&mut self.buffer);
        let mut index = 0;
        for run in contents.chunk_by(|content, next| content == next) {
            let run_pages = pages.start + index as u64..pages.start + (index + run.len()) as u64;
            if run.first() == Some(&Content::Data) {
                let bytes = batch.get(index * page_bytes..(index + run.len()) * page_bytes).unwrap_or_default();
                self.buffer.clear();
                self.buffer.extend_from_slice(bytes);
                if !self.fill_from_buffer(block, run_pages.clone(), Content::Data)? {
                    // The mappings are being changed: handle the events first.
                    break;
                }
                self.progress.filled += run.len() as u64;
            } else if let Some(paged) = self.blocks.get_mut(block) {
                run_pages.clone().for_each(|page| paged.remove_missing(page));
                self.progress.zero += run.len() as u64;
            }
            self.notify_supplied(block, &run_pages, source);
            index += run.len();
        }
        self.buffer = batch;
        Ok(())
    }
}
