//! The pager's work: supplying pages for faults, and filling all other pages in the background.

use super::pager::{Completion, Pager, PagerError, PendingFault, Progress};
use super::source::{Content, PageSource};
use rekindle_kernel::userfault::{Event, Filled, UserfaultError};
use rekindle_pages::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes per background batch. Small, because a fault that occurs during a batch waits for its end.
const BATCH: u64 = 256 << 10;
/// Pages on each side of a faulted page that are filled next, because they are likely to be needed (HydraVM, figure 5).
const NEIGHBOURS: u64 = 16;
/// Neighbours filled per batch, nearest first.
const STEP: u64 = 8;
/// Most runs of neighbours in the queue. Older runs are dropped, and filled with the remaining pages.
const MAX_QUEUED: usize = 64;
/// The longest sleep before the pager checks whether it should end.
const TICK: Duration = Duration::from_millis(50);

impl Pager {
    /// Fills all pages: faulted pages first, then the runs of `order` (index among the chosen blocks, offsets), then
    /// all others. Returns when all pages are present and the registration has ended, or when `end` is set.
    ///
    /// # Errors
    /// [`PagerError`]; everything stays registered, and `run` or [`Pager::take_over`] may continue.
    pub fn run<S: PageSource>(
        &mut self,
        source: &mut S,
        order: impl IntoIterator<Item = (usize, Range<u64>)>,
        end: &AtomicBool,
    ) -> Result<Progress, PagerError> {
        self.run_until(source, order, end, || Completion::Release)
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
        end: &AtomicBool,
        mut completion: impl FnMut() -> Completion,
    ) -> Result<Progress, PagerError> {
        let mut order: VecDeque<_> = order.into_iter().chain(self.everything()).collect();
        while !end.load(Ordering::Relaxed) {
            let wait = self.time_to_wait();
            self.events(wait)?;
            // Without this check the end of the process is noticed only on access to its memory. No access happens
            // while the source fails, or while the registration is kept for a tracker.
            if !wait.is_zero() && !self.process.is_alive() {
                return Err(PagerError::QemuEnded { pid: self.process.pid });
            }
            self.serve(source)?;
            if self.remote.is_none() {
                break;
            }
            if self.due().is_some() || Instant::now() < self.background.1 || self.fill_neighbours(source)? {
                continue;
            }
            if !self.fill_batch(&mut order, source)? {
                match completion() {
                    Completion::Release => self.release()?,
                    Completion::HandedOver => self.close()?,
                    Completion::Wait => {
                        self.background.1 = Instant::now() + TICK;
                        continue;
                    }
                }
                self.progress.complete = true;
                break;
            }
        }
        Ok(self.progress())
    }

    /// Supplies pages for faults, and fills their neighbours, until `end` is set. Other pages are not fetched, because
    /// that would delay a guest that is being started. Another pager can take over afterwards.
    ///
    /// While `all` is set, the guest is not started yet, and the other pages are filled too. If one of them cannot be
    /// fetched, these pages are left to the next pager.
    ///
    /// # Errors
    /// [`PagerError`]; everything stays registered.
    pub fn run_on_demand<S: PageSource>(
        &mut self,
        source: &mut S,
        end: &AtomicBool,
        all: &AtomicBool,
    ) -> Result<Progress, PagerError> {
        /// Short, so that the function returns soon after `end` is set.
        const TICK: Duration = Duration::from_millis(2);
        let mut rest = self.everything();
        while !end.load(Ordering::Relaxed) && self.remote.is_some() {
            let next = self.pending.values().map(|fault| fault.due).min();
            let fills_all = all.load(Ordering::Relaxed) && !rest.is_empty();
            let background = (fills_all || !self.neighbours.is_empty()).then_some(self.background.1);
            let next = next.into_iter().chain(background).min();
            self.events(next.map_or(TICK, |next| next.saturating_duration_since(Instant::now()).min(TICK)))?;
            self.serve(source)?;
            if self.due().is_none()
                && Instant::now() >= self.background.1
                && !self.fill_neighbours(source)?
                && fills_all
                && let Err(e) = self.fill_batch(&mut rest, source)
            {
                tracing::debug!("background fill is left to the next pager: {e}");
                rest.clear();
            }
        }
        Ok(self.progress())
    }

    /// Returns all pages, as one run per block.
    fn everything(&self) -> VecDeque<(usize, Range<u64>)> {
        self.blocks.iter().enumerate().map(|(n, block)| (n, 0..block.range.end - block.range.start)).collect()
    }

    /// Returns block and page of a pending fault whose next attempt is due.
    fn due(&self) -> Option<(usize, u64)> {
        let now = Instant::now();
        self.pending.iter().find(|(_, fault)| fault.due <= now).map(|(&page, _)| page)
    }

    fn time_to_wait(&self) -> Duration {
        let next = self.pending.values().map(|fault| fault.due).chain([self.background.1]).min();
        next.map_or(TICK, |next| next.saturating_duration_since(Instant::now())).min(TICK)
    }

    /// Waits for events, for at most `time`, and records them.
    fn events(&mut self, time: Duration) -> Result<(), PagerError> {
        let Some(remote) = &self.remote else { return Ok(()) };
        let limit = rustix::time::Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&remote.userfault, PollFlags::IN)], Some(&limit)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(e) => return Err(PagerError::Wait { source: e.into() }),
        }
        let ended = PagerError::QemuEnded { pid: self.process.pid };
        let events = match remote.userfault.events() {
            Ok(events) => events,
            Err(UserfaultError::Gone) => return Err(ended),
            Err(e) => return Err(PagerError::Wait { source: io::Error::other(e) }),
        };
        if events.is_empty() && !self.process.is_alive() {
            return Err(ended);
        }
        let now = Instant::now();
        for event in events {
            match event {
                Event::Fault { address, .. } => {
                    self.progress.faults += 1;
                    let page = self.blocks.iter().enumerate().find_map(|(n, block)| Some((n, block.page_at(address)?)));
                    if let Some(page) = page {
                        self.pending.entry(page).or_insert(PendingFault { since: now, attempts: 0, due: now });
                    }
                }
                Event::Remove(range) | Event::Unmap(range) => self.given_back(&range),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes pages that the guest gave back from the registration: no old content may be put into them.
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
            // The next pager recognises these pages because they are not registered. If the process has too many
            // mappings to unregister them, this pager still marks them as done and supplies zeros.
            if let Err(e) = remote.userfault.unregister(addresses) {
                tracing::debug!("{e}: {:?}", std::error::Error::source(&e));
            }
            for page in pages {
                self.progress.given_back += u64::from(!block.is_done(page));
                block.set_done(page);
            }
        }
    }

    /// Supplies the pages of all pending faults that are due.
    fn serve<S: PageSource>(&mut self, source: &mut S) -> Result<(), PagerError> {
        while let Some((block, page)) = self.due() {
            let Some(paged) = self.blocks.get(block) else { break };
            // A fault on a page that is done: the page was filled since, is a zero page that was not filled, or was
            // given back.
            let done = paged.is_done(page);
            let content = if done {
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
                        let since = self.pending.remove(&(block, page)).map(|fault| fault.since);
                        let took =
                            since.map_or(0, |since| u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX));
                        self.progress.worst_ns = self.progress.worst_ns.max(took);
                        self.progress.demanded += 1;
                        if !done {
                            self.queue_neighbours(block, page);
                        }
                    }
                }
                Err((at, e)) => {
                    let attempts = self.pending.get(&(block, page)).map_or(0, |fault| fault.attempts) + 1;
                    let wait = self.retry_delay(block, at, e, attempts, source)?;
                    if let Some(fault) = self.pending.get_mut(&(block, page)) {
                        (fault.attempts, fault.due) = (attempts, Instant::now() + wait);
                    }
                }
            }
            // There may be new faults, and a removal must be handled before the next page is filled.
            self.events(Duration::ZERO)?;
        }
        Ok(())
    }

    /// Fills pages from the buffer and wakes the blocked threads. Returns `false` if the mappings are being changed:
    /// the caller must read the events and try again.
    pub(super) fn put(&mut self, block: usize, pages: Range<u64>, content: Content) -> Result<bool, PagerError> {
        let (Some(remote), Some(paged)) = (&self.remote, self.blocks.get_mut(block)) else { return Ok(true) };
        let addresses = paged.addresses(&pages);
        if content == Content::Zero && self.recording {
            // The kernel's zero page cannot be filled write-protected.
            self.buffer.clear();
            self.buffer.resize((addresses.end - addresses.start) as usize, 0);
        }
        let userfault = &remote.userfault;
        let failed = |source| PagerError::Block { id: paged.name.clone(), source };
        let mut at = addresses.start;
        while at < addresses.end {
            let rest = self.buffer.get((at - addresses.start) as usize..).unwrap_or_default();
            let filled = if self.recording {
                userfault.copy_protected(at, rest, true)
            } else if content == Content::Zero && paged.page == PAGE_SIZE as u64 {
                userfault.zero(at..addresses.end, true)
            } else {
                userfault.copy(at, rest, true)
            };
            match filled.map_err(failed)? {
                Filled::All => break,
                // The page is present; threads blocked on it must be woken.
                Filled::Exists(done) => {
                    at += done;
                    userfault.wake(at..at + paged.page).map_err(failed)?;
                    at += paged.page;
                }
                Filled::Changing(_) => return Ok(false),
                Filled::Gone(_) if !self.process.is_alive() => {
                    return Err(PagerError::QemuEnded { pid: self.process.pid });
                }
                // The guest has given the page back: the kernel itself supplies zeros.
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

    /// Queues the neighbours of a page, the nearest ones last.
    fn queue_neighbours(&mut self, block: usize, page: u64) {
        let Some(paged) = self.blocks.get(block).filter(|paged| paged.page == PAGE_SIZE as u64) else { return };
        for distance in (0..NEIGHBOURS / STEP).rev() {
            let before = page.saturating_sub((distance + 1) * STEP)..page.saturating_sub(distance * STEP);
            let after = page + 1 + distance * STEP..(page + 1 + (distance + 1) * STEP).min(paged.pages());
            self.neighbours.extend([before, after].into_iter().filter(|run| !run.is_empty()).map(|run| (block, run)));
        }
        let old = self.neighbours.len().saturating_sub(MAX_QUEUED);
        self.neighbours.drain(..old);
    }

    /// Fills the next neighbours of a faulted page. Returns `false` if none are left.
    fn fill_neighbours<S: PageSource>(&mut self, source: &mut S) -> Result<bool, PagerError> {
        while let Some((block, run)) = self.neighbours.pop() {
            let Some(pages) = self.blocks.get(block).and_then(|paged| paged.next_missing(&run, STEP)) else { continue };
            if pages.end < run.end {
                self.neighbours.push((block, pages.end..run.end));
            }
            self.fill(block, pages, source)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Fills the next background batch. Returns `false` if none are left.
    fn fill_batch<S: PageSource>(
        &mut self,
        order: &mut VecDeque<(usize, Range<u64>)>,
        source: &mut S,
    ) -> Result<bool, PagerError> {
        let next = loop {
            let Some((block, run)) = order.front().cloned() else { return Ok(false) };
            let missing = self.blocks.get(block).and_then(|paged| {
                let max = (BATCH / paged.page).max(1);
                paged.next_missing(&paged.touched(&run), max)
            });
            match (missing, self.blocks.get(block)) {
                (Some(pages), Some(paged)) => {
                    // All earlier pages of the run are done.
                    if let Some(first) = order.front_mut() {
                        first.1.start = first.1.start.max(pages.start * paged.page);
                    }
                    break (block, pages);
                }
                _ => order.pop_front(),
            };
        };
        self.fill(next.0, next.1, source)?;
        Ok(true)
    }

    /// Fetches and fills pages in the background. If that fails, schedules the next attempt.
    fn fill<S: PageSource>(&mut self, block: usize, pages: Range<u64>, source: &mut S) -> Result<(), PagerError> {
        match self.fetch(block, pages.clone(), source) {
            Ok(contents) => {
                self.background.0 = 0;
                self.put_batch(block, pages, &contents)
            }
            Err((at, e)) => {
                self.background.0 += 1;
                let wait = self.retry_delay(block, at, e, self.background.0, source)?;
                self.background.1 = Instant::now() + wait;
                Ok(())
            }
        }
    }

    /// Fills the pages of a batch that have data. Zero pages are not filled: they read as zero after the registration
    /// ends.
    fn put_batch(&mut self, block: usize, pages: Range<u64>, contents: &[Content]) -> Result<(), PagerError> {
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
                    // The mappings are being changed: handle the events first.
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
}
