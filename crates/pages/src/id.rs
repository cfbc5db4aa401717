//! Names of blocks and pages.

use crate::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Position of a RAM block in a block table, which is that of a QEMU or of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockId(pub usize);

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of a page in its block, in units of [`PAGE_SIZE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PageNo(pub u64);

impl PageNo {
    /// Returns the page that contains the byte at `offset`.
    pub fn containing(offset: u64) -> Self {
        Self(offset / PAGE_SIZE as u64)
    }

    /// Returns the offset of the page's first byte in its block.
    pub fn offset(self) -> u64 {
        self.0.saturating_mul(PAGE_SIZE as u64)
    }

    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for PageNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A page, with its block.
pub type PageId = (BlockId, PageNo);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_plain_numbers_in_json() {
        assert_eq!(serde_json::to_string(&(BlockId(3), PageNo(u64::MAX))).unwrap(), "[3,18446744073709551615]");
        assert_eq!(serde_json::from_str::<PageId>("[1,7]").unwrap(), (BlockId(1), PageNo(7)));
        assert!(serde_json::from_str::<BlockId>("-1").is_err());
    }

    #[test]
    fn a_page_begins_at_its_offset() {
        assert_eq!(PageNo(3).offset(), 12_288);
        assert_eq!([12_287, 12_288, 16_383].map(PageNo::containing), [PageNo(2), PageNo(3), PageNo(3)]);
        assert_eq!(PageNo(u64::MAX).next(), PageNo(u64::MAX));
    }
}
