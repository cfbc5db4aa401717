//! Where missing pages come from.

use rekindle_pages::{BlockId, Page, PageNo};
use std::time::Duration;

/// What a page contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// The data in the buffer.
    Data,
    /// Zeroes. The buffer is ignored.
    Zero,
}

/// Supplies missing pages, for example from a checkpoint or a peer.
pub trait PageSource {
    /// Why a page could not be fetched.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Fetches a page of a RAM block, given by its position in the block table of the guest that is filled, into
    /// `buffer`.
    ///
    /// # Errors
    /// When the page is unavailable now. The pager never replaces it with zeroes.
    fn page(&mut self, block: BlockId, page: PageNo, buffer: &mut Page) -> Result<Content, Self::Error>;

    /// Returns how long to wait before a page is fetched again, after `attempt` failures (from 1).
    ///
    /// `None` ends [`super::Pager::run`] with the error. A guest thread that needs the page stays blocked.
    fn retry(&mut self, error: &Self::Error, attempt: u32) -> Option<Duration>;
}
