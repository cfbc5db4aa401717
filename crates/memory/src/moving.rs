//! The private pages of a stopped QEMU, as the source of another one's missing pages. A page that the other QEMU has is
//! dropped here, so that both together need little more memory than one copy of the RAM.
//!
//! **Promise.** Each page is in one of the two QEMUs at every instant: a page is dropped only after the pager has reported
//! that it is in the other one's RAM. If this process is killed in between, the page is in both, and the next pager, which
//! finds it present, does not fetch it again.
//!
//! Only the stop makes this possible: no page of the source changes.

use crate::missing::{Content, PageSource};
use crate::ram::{GuestRam, GuestRamError};
use rekindle_kernel::inject::{InjectError, Injector};
use rekindle_kernel::private_pages::drop_pages;
use rekindle_kernel::process::Process;
use rekindle_pages::{BlockId, DirtySet, PAGE_SIZE, Page, PageNo, ZERO_PAGE};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Bytes of pages after which they are dropped in the source. One injection drops them all.
const WINDOW_BYTES: u64 = 16 << 20;
/// Bytes of pages that may be in both QEMUs: while pages cannot be dropped, the guest still gets those that it needs.
pub const MAX_UNDROPPED_BYTES: u64 = 4 * WINDOW_BYTES;
/// Delay before a page is fetched again, or pages are dropped again, after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Why a page cannot be fetched from a stopped QEMU.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    #[error("the previous QEMU (process {pid}) has ended before all pages of the guest were moved")]
    SourceEnded { pid: u32 },
    #[error("the previous QEMU (process {pid}) cannot be made to drop pages that were moved")]
    Drop {
        pid: u32,
        #[source]
        source: InjectError,
    },
    #[error("the previous QEMU has no page {page} of block {block}", page = page.0, block = block.0)]
    NoPage { block: BlockId, page: PageNo },
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    #[error("cannot watch the previous QEMU (process {pid})")]
    Watch {
        pid: u32,
        #[source]
        source: io::Error,
    },
}

/// A moment of the move, at which a test can make a process fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowStep {
    /// The pages of a window are in both QEMUs.
    Supplied,
    /// They were dropped in the source.
    Dropped,
}

/// The pages of a stopped QEMU that has private RAM.
pub struct MovedPages {
    source: Arc<GuestRam>,
    injector: Injector,
    /// Becomes readable when the source has ended.
    pidfd: OwnedFd,
    /// For each block, the pages that it has. All others are zero.
    populated: Vec<DirtySet>,
    /// Whether supplied pages may be dropped: no way leads back to the source.
    may_drop: Arc<AtomicBool>,
    /// Supplied pages that were not dropped: addresses in the source.
    undropped: Vec<Range<u64>>,
    undropped_bytes: u64,
    /// With so many undropped bytes they are dropped: more than a window after a failure.
    next_drop_bytes: u64,
    on_step: Box<dyn FnMut(WindowStep) + Send>,
    /// The error that was logged last, so that each error is logged once.
    last_error: Option<String>,
}

impl MovedPages {
    /// Uses the private RAM blocks of `source`. Nothing is dropped before `may_drop` is set. `on_step` is called at each
    /// [`WindowStep`].
    ///
    /// *Needs:* the guest of `source` is stopped, and does not run in it again once `may_drop` is set.
    ///
    /// # Errors
    /// [`MoveError`].
    pub fn new(
        source: Arc<GuestRam>,
        may_drop: Arc<AtomicBool>,
        on_step: Box<dyn FnMut(WindowStep) + Send>,
    ) -> Result<Self, MoveError> {
        let process = source.process();
        let watch = |source| MoveError::Watch { pid: process.pid, source };
        // First, so that everything below is of this process.
        let pidfd = process.pidfd().map_err(watch)?;
        let mut populated = Vec::new();
        for block in source.blocks() {
            let mut pages = DirtySet::with_room(block.info.total / PAGE_SIZE as u64);
            source.populated(block)?.numbers().for_each(|page| {
                pages.insert(page);
            });
            populated.push(pages);
        }
        // Last: a process that was killed runs no call, so nothing had been taken from its memory while its pages were listed.
        let injector = droppable(process)?;
        Ok(Self {
            source,
            injector,
            pidfd,
            populated,
            may_drop,
            undropped: Vec::new(),
            undropped_bytes: 0,
            next_drop_bytes: WINDOW_BYTES,
            on_step,
            last_error: None,
        })
    }

    /// Drops the pages that the other QEMU has, if there are enough of them. A failure is an error only if no more pages may be
    /// in both.
    fn drop_if_due(&mut self) -> Result<(), MoveError> {
        if self.undropped_bytes < self.next_drop_bytes || !self.may_drop.load(Ordering::SeqCst) {
            return Ok(());
        }
        match self.drop_supplied() {
            Err(error) if self.undropped_bytes < MAX_UNDROPPED_BYTES => {
                self.next_drop_bytes = self.undropped_bytes + WINDOW_BYTES;
                self.check_alive()?;
                self.warn_once(&error, "trying again later");
                Ok(())
            }
            dropped => dropped,
        }
    }

    fn warn_once(&mut self, error: &MoveError, consequence: &str) {
        let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
        let text = format!("{error}{cause}; {consequence}");
        if self.last_error.as_ref() != Some(&text) {
            tracing::warn!("{text}");
            self.last_error = Some(text);
        }
    }

    fn drop_supplied(&mut self) -> Result<(), MoveError> {
        (self.on_step)(WindowStep::Supplied);
        let pid = self.source.process().pid;
        drop_pages(self.injector, &self.undropped).map_err(|source| MoveError::Drop { pid, source })?;
        self.undropped.clear();
        self.undropped_bytes = 0;
        self.next_drop_bytes = WINDOW_BYTES;
        (self.on_step)(WindowStep::Dropped);
        Ok(())
    }

    /// Returns an error if the source has ended: what was read under its number may be of another process.
    fn check_alive(&self) -> Result<(), MoveError> {
        let pid = self.source.process().pid;
        let ended = rekindle_kernel::process::has_ended(&self.pidfd);
        match ended.map_err(|source| MoveError::Watch { pid, source })? {
            true => Err(MoveError::SourceEnded { pid }),
            false => Ok(()),
        }
    }
}

/// Returns an injector for a process whose pages can be dropped. Proves it by dropping no page.
///
/// # Errors
/// [`MoveError::Drop`], e.g. because of a seccomp filter that cannot be suspended.
pub fn droppable(process: Process) -> Result<Injector, MoveError> {
    let proved = Injector::new(process).and_then(|injector| {
        drop_pages(injector, std::slice::from_ref(&(0..0)))?;
        Ok(injector)
    });
    proved.map_err(|source| MoveError::Drop { pid: process.pid, source })
}

impl PageSource for MovedPages {
    type Error = MoveError;

    fn page(&mut self, block: BlockId, page: PageNo, buffer: &mut Page) -> Result<Content, MoveError> {
        self.drop_if_due()?;
        let no_page = MoveError::NoPage { block, page };
        let Some(source_block) = self.source.block(block) else { return Err(no_page) };
        if page.offset() >= source_block.info.total {
            return Err(no_page);
        }
        if !self.populated.get(block.0).is_some_and(|populated| populated.contains(page)) {
            return Ok(Content::Zero);
        }
        let offsets = page.offset()..page.next().offset();
        let read = self.source.read(source_block, std::slice::from_ref(&offsets), buffer);
        self.check_alive()?;
        read?;
        Ok(if *buffer == ZERO_PAGE { Content::Zero } else { Content::Data })
    }

    fn retry(&mut self, error: &MoveError, _attempt: u32) -> Option<Duration> {
        if let Err(MoveError::SourceEnded { .. }) = self.check_alive() {
            return None;
        }
        self.warn_once(error, "trying again, and the guest waits where it needs a page that was not moved");
        Some(RETRY_DELAY)
    }

    fn supplied(&mut self, block: BlockId, offsets: Range<u64>) {
        let Some(address) = self.source.block(block).map(|block| block.address) else { return };
        let range = address + offsets.start..address + offsets.end;
        self.undropped_bytes += range.end - range.start;
        match self.undropped.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.undropped.push(range),
        }
    }
}

impl std::fmt::Debug for MovedPages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MovedPages").field("source", &self.source.process()).finish_non_exhaustive()
    }
}
