//! The page model that all crates share.
//!
//! | type | meaning |
//! |---|---|
//! | [`Page`] | the content of a page of [`PAGE_SIZE`] bytes |
//! | [`BlockId`], [`PageNo`] | a RAM block by its position in a block table, a page by its number in the block |
//! | [`PageRun`] | adjacent pages of one block, by number |
//! | [`PageRuns`] | pages of one block or one address space, as byte ranges |
//! | [`DirtySet`] | pages of one block, with a bit for each page |

#![allow(missing_docs, reason = "a name that needs no explanation gets no comment")]

mod id;
mod run;
mod runs;
mod set;

pub use id::{BlockId, PageId, PageNo};
pub use run::PageRun;
pub use runs::PageRuns;
pub use set::DirtySet;

/// Bytes of a page of x86-64. Page numbers count pages of this size, also where the kernel maps larger ones.
pub const PAGE_SIZE: usize = 4096;

pub type Page = [u8; PAGE_SIZE];

pub const ZERO_PAGE: Page = [0; PAGE_SIZE];
