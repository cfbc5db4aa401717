//! The source of missing pages.

use rekindle_pages::{BlockId, Page, PageId, PageNo};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The content of a fetched page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// The data in the buffer.
    Data,
    /// Zeros. The buffer is ignored.
    Zero,
}

/// Why a page is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// A thread waits for it.
    Fault,
    /// It is the next one to be filled.
    Background,
}

/// Supplies missing pages, for example from a checkpoint or a peer.
pub trait PageSource {
    /// The reason why a page could not be fetched.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Fetches a page of a RAM block into `buffer`. `block` is a position in the block table of the guest that is
    /// filled.
    ///
    /// # Errors
    /// Any error means that the page is unavailable now. The pager never replaces the page with zeros.
    fn page(&mut self, block: BlockId, page: PageNo, buffer: &mut Page) -> Result<Content, Self::Error>;

    /// Returns how long to wait before the next attempt to fetch a page, after `attempt` failures (from 1).
    ///
    /// `None` ends [`super::Pager::run`] with the error. A guest thread that needs the page stays blocked.
    fn retry(&mut self, error: &Self::Error, attempt: u32) -> Option<Duration>;

    /// Fetches a page like [`PageSource::page`], if that is possible without waiting for another host. Otherwise starts to
    /// fetch it, and returns `None`: the pager tries again when [`PageSource::arrivals`] is readable, and serves other faults
    /// meanwhile.
    ///
    /// # Errors
    /// As for [`PageSource::page`].
    fn page_if_ready(
        &mut self,
        block: BlockId,
        page: PageNo,
        buffer: &mut Page,
        _need: Need,
    ) -> Result<Option<Content>, Self::Error> {
        self.page(block, page, buffer).map(Some)
    }

    /// Returns a descriptor of an event counter that becomes readable when a page may have arrived. The pager reads it.
    fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns whether the source can start to fetch pages before they are needed.
    fn fetches_ahead(&self) -> bool {
        false
    }

    /// Announces pages that are fetched soon, in this order, as a hint. Returns how many of them, from the first on, the
    /// source has started to fetch; the others are announced again.
    fn will_fetch(&mut self, pages: &[PageId]) -> usize {
        pages.len()
    }

    /// Notifies the source that the guest's RAM has these pages (offsets in the block), whatever becomes of the source.
    fn supplied(&mut self, _block: BlockId, _offsets: Range<u64>) {}
}
