//! Where missing pages come from.

pub use crate::pages::Page;
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

    /// Fetches page `page` (in units of 4 KiB) of the RAM block named `block` into `buffer`.
    ///
    /// # Errors
    /// When the page is unavailable now. The pager never replaces it with zeroes.
    fn page(&mut self, block: &str, page: u64, buffer: &mut Page) -> Result<Content, Self::Error>;

    /// Returns how long to wait before a page is fetched again, after `attempt` failures (from 1).
    ///
    /// `None` ends [`super::Pager::run`] with the error. A guest thread that needs the page stays blocked.
    fn retry(&mut self, error: &Self::Error, attempt: u32) -> Option<Duration>;
}
