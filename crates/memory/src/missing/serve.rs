//! The pager at work: serves who waits, and brings the rest.

use super::pager::{Last, Pager, PagerError, Progress, Wanted};
use super::source::{Content, PageSource};
use rekindle_kernel::memory::PAGE_SIZE;
use rekindle_kernel::userfault::{Event, Filled, UserfaultError};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes that are brought at a time when nobody waits. Small, because who comes meanwhile waits for them.
const BATCH: u64 = 256 << 10;
/// Pages to either side of one that somebody waited for that are brought next: they are wanted next (HydraVM, figure 5).
const AROUND: u64 = 16;
/// So many of them at a time, nearest first.
const STEP: u64 = 8;
/// Runs of neighbours that are kept in mind; older ones come with the rest.
const MOST_AROUND: usize = 64;
/// How long the pager sleeps at most before it looks whether it is to end.
const TICK: Duration = Duration::from_millis(50);

impl Pager {
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
        self.run_until(source, order, end, || Last::Release)
    }

    /// As [`Pager::run`], but when all is there, `last` says what is to become of the registration. A record of what was
    /// written ([`crate::tracker::Filling`]) ends with it.
    ///
    /// # Errors
    /// As for [`Pager::run`].
    pub fn run_until<S: PageSource>(
        &mut self,
        source: &mut S,
        order: impl IntoIterator<Item = (usize, Range<u64>)>,
        end: &AtomicBool,
        mut last: impl FnMut() -> Last,
    ) -> Result<Progress, PagerError> {
        let mut order: VecDeque<_> = order.into_iter().chain(self.everything()).collect();
        while !end.load(Ordering::Relaxed) {
            let wait = self.time_to_wait();
            self.events(wait)?;
            // Nothing is told of a process that has ended to who does nothing with its memory: one whose source is away, or that waits to let go.
            if !wait.is_zero() && !self.process.is_alive() {
                return Err(PagerError::Gone { pid: self.process.pid });
            }
            self.serve(source)?;
            if self.remote.is_none() {
                break;
            }
            if self.due().is_some() || Instant::now() < self.behind.1 || self.bring_around(source)? {
                continue;
            }
            if !self.bring_some(&mut order, source)? {
                match last() {
                    Last::Release => self.release()?,
                    Last::HandedOver => self.let_go()?,
                    Last::Wait => {
                        self.behind.1 = Instant::now() + TICK;
                        continue;
                    }
                }
                self.progress.complete = true;
                break;
            }
        }
        Ok(self.progress())
    }

    /// Serve who waits, and bring what is beside those pages, but nothing else, until `end` is set: while a guest is being
    /// brought to run, whatever else is fetched would be in the way. Another pager can take over then. As long as `all` is set the
    /// guest is waited with, and the rest is brought, too; where that fails it is left to the next pager.
    ///
    /// # Errors
    /// [`PagerError`]; everything stays registered.
    pub fn run_on_demand<S: PageSource>(
        &mut self,
        source: &mut S,
        end: &AtomicBool,
        all: &AtomicBool,
    ) -> Result<Progress, PagerError> {
        /// So that it ends soon when it is told to.
        const TICK: Duration = Duration::from_millis(2);
        let mut rest = self.everything();
        while !end.load(Ordering::Relaxed) && self.remote.is_some() {
            let next = self.wanted.values().map(|wanted| wanted.due).min();
            let wants_all = all.load(Ordering::Relaxed) && !rest.is_empty();
            let around = (wants_all || !self.around.is_empty()).then_some(self.behind.1);
            let next = next.into_iter().chain(around).min();
            self.events(next.map_or(TICK, |next| next.saturating_duration_since(Instant::now()).min(TICK)))?;
            self.serve(source)?;
            if self.due().is_none()
                && Instant::now() >= self.behind.1
                && !self.bring_around(source)?
                && wants_all
                && let Err(e) = self.bring_some(&mut rest, source)
            {
                tracing::debug!("what nobody waits for is brought later: {e}");
                rest.clear();
            }
        }
        Ok(self.progress())
    }

    /// All of its blocks, in order.
    fn everything(&self) -> VecDeque<(usize, Range<u64>)> {
        self.blocks.iter().enumerate().map(|(n, block)| (n, 0..block.range.end - block.range.start)).collect()
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
                        let since = self.wanted.remove(&(block, page)).map(|wanted| wanted.since);
                        let took =
                            since.map_or(0, |since| u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX));
                        self.progress.worst_ns = self.progress.worst_ns.max(took);
                        self.progress.demanded += 1;
                        if !done {
                            self.look_around(block, page);
                        }
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
    pub(super) fn put(&mut self, block: usize, pages: Range<u64>, content: Content) -> Result<bool, PagerError> {
        let (Some(remote), Some(paged)) = (&self.remote, self.blocks.get_mut(block)) else { return Ok(true) };
        let addresses = paged.addresses(&pages);
        if content == Content::Zero && self.recording {
            // There is no way to put the kernel's own zeroes protected.
            self.buffer.clear();
            self.buffer.resize((addresses.end - addresses.start) as usize, 0);
        }
        let userfault = &remote.userfault;
        let failed = |source| PagerError::Block { id: paged.id.clone(), source };
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

    /// Note the neighbours of a page.
    fn look_around(&mut self, block: usize, page: u64) {
        let Some(paged) = self.blocks.get(block).filter(|paged| paged.page == PAGE_SIZE as u64) else { return };
        for distance in (0..AROUND / STEP).rev() {
            let before = page.saturating_sub((distance + 1) * STEP)..page.saturating_sub(distance * STEP);
            let after = page + 1 + distance * STEP..(page + 1 + (distance + 1) * STEP).min(paged.pages());
            self.around.extend([before, after].into_iter().filter(|run| !run.is_empty()).map(|run| (block, run)));
        }
        let old = self.around.len().saturating_sub(MOST_AROUND);
        self.around.drain(..old);
    }

    /// Bring the next neighbours of a page that somebody waited for. `false`: there are none left.
    fn bring_around<S: PageSource>(&mut self, source: &mut S) -> Result<bool, PagerError> {
        while let Some((block, run)) = self.around.pop() {
            let Some(pages) = self.blocks.get(block).and_then(|paged| paged.next_missing(&run, STEP)) else { continue };
            if pages.end < run.end {
                self.around.push((block, pages.end..run.end));
            }
            self.bring(block, pages, source)?;
            return Ok(true);
        }
        Ok(false)
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
        self.bring(next.0, next.1, source)?;
        Ok(true)
    }

    /// Fetch and put pages that nobody waits for. What cannot be had is left for later.
    fn bring<S: PageSource>(&mut self, block: usize, pages: Range<u64>, source: &mut S) -> Result<(), PagerError> {
        match self.fetch(block, pages.clone(), source) {
            Ok(contents) => {
                self.behind.0 = 0;
                self.put_behind(block, pages, &contents)
            }
            Err((at, e)) => {
                self.behind.0 += 1;
                let wait = self.patience(block, at, e, self.behind.0, source)?;
                self.behind.1 = Instant::now() + wait;
                Ok(())
            }
        }
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
}
