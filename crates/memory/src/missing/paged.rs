//! The missing pages of a RAM block.

use crate::ram::Block;
use rekindle_pages::{BlockId, DirtySet, PageNo};
use std::ops::Range;

/// A RAM block that a pager fills.
#[derive(Debug)]
pub(super) struct PagedBlock {
    pub id: BlockId,
    /// The block's name, for messages.
    pub name: String,
    /// Addresses in QEMU.
    pub range: Range<u64>,
    /// Bytes of a host page.
    pub page_bytes: u64,
    /// Host pages that are neither present, nor zero, nor given back.
    missing: DirtySet,
}

impl PagedBlock {
    pub(super) fn new(id: BlockId, block: &Block) -> Self {
        let (range, page_bytes) = (block.used(), block.info.page_size);
        let missing = DirtySet::full((range.end - range.start) / page_bytes);
        Self { id, name: block.info.id.clone(), range, page_bytes, missing }
    }

    pub(super) fn pages(&self) -> u64 {
        (self.range.end - self.range.start) / self.page_bytes
    }

    pub(super) fn missing_pages(&self) -> u64 {
        self.missing.len()
    }

    pub(super) fn is_missing(&self, page: u64) -> bool {
        self.missing.contains(PageNo(page))
    }

    pub(super) fn remove_missing(&mut self, page: u64) {
        self.missing.remove(PageNo(page));
    }

    /// Returns the numbers of the pages that overlap a run of offsets.
    pub(super) fn pages_overlapping(&self, run: &Range<u64>) -> Range<u64> {
        run.start / self.page_bytes..run.end.div_ceil(self.page_bytes).min(self.pages())
    }

    /// Returns the addresses of a run of pages.
    pub(super) fn addresses(&self, pages: &Range<u64>) -> Range<u64> {
        self.range.start + pages.start * self.page_bytes..self.range.start + pages.end * self.page_bytes
    }

    /// Returns the offsets of a run of pages.
    pub(super) fn offsets(&self, pages: &Range<u64>) -> Range<u64> {
        pages.start * self.page_bytes..pages.end * self.page_bytes
    }

    /// Returns the number of the page at an address; `None` outside of the block.
    pub(super) fn page_at(&self, address: u64) -> Option<u64> {
        self.range.contains(&address).then(|| (address - self.range.start) / self.page_bytes)
    }

    /// Finds the first run of missing pages in `within`, with at most `max_pages` pages.
    pub(super) fn next_missing(&self, within: &Range<u64>, max_pages: u64) -> Option<Range<u64>> {
        let start = self.missing.next(PageNo(within.start))?.0;
        let limit = within.end.min(start + max_pages);
        let end = (start..limit).find(|&page| !self.is_missing(page));
        (start < limit).then(|| start..end.unwrap_or(limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_pages_are_found_in_runs() {
        let mut paged = PagedBlock {
            id: BlockId(0),
            name: "ram".into(),
            range: 0x1000_0000..0x1000_0000 + 200 * 4096,
            page_bytes: 4096,
            missing: DirtySet::full(200),
        };
        for page in [0, 3, 64, 199, 199, 1000] {
            paged.remove_missing(page);
        }
        assert_eq!(paged.missing_pages(), 196);
        assert_eq!(paged.next_missing(&(0..200), 100), Some(1..3));
        assert_eq!(paged.next_missing(&(3..200), 10), Some(4..14));
        assert_eq!(paged.next_missing(&(60..200), 100), Some(60..64));
        assert_eq!(paged.next_missing(&(199..200), 100), None);
        assert!(!paged.is_missing(5000), "a page outside of the block is never missing");
        assert_eq!(paged.pages_overlapping(&(4095..8193)), 0..3);
        assert_eq!(paged.page_at(0x1000_1fff), Some(1));
        assert_eq!(paged.page_at(0x1), None);
    }
}
