//! Where missing pages come from.

use rekindle_kernel::memory::PAGE_SIZE;
use std::time::Duration;

/// One page.
pub type Page = [u8; PAGE_SIZE];

/// What a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// What was written into the buffer.
    Data,
    /// All zero. The buffer is not looked at.
    Zero,
}

/// Where missing pages come from: a checkpoint, a peer.
pub trait PageSource {
    /// Why a page cannot be had.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Fetch page `page` (in units of 4 KiB) of the RAM block called `block` into `buffer`.
    ///
    /// # Errors
    /// When it cannot be had now. It is never taken for zero.
    fn page(&mut self, block: &str, page: u64, buffer: &mut Page) -> Result<Content, Self::Error>;

    /// A page could not be had for the `attempt`-th time (from 1): how long to wait before it is tried again. `None`: give
    /// up, and end [`super::Pager::run`] with the error; whoever waits for the page goes on waiting.
    fn retry(&mut self, error: &Self::Error, attempt: u32) -> Option<Duration>;
}
