//! One RAM block whose pages come: which are there, which are not to come any more.

use crate::ram::Block;
use std::ops::Range;

/// A set of pages by number.
#[derive(Debug)]
pub(super) struct Paged {
    pub id: String,
    /// Its addresses in QEMU.
    pub range: Range<u64>,
    /// Bytes of a page in the host.
    pub page: u64,
    /// Pages that are there, are zero, or were given back.
    done: Vec<u64>,
    /// How many are not.
    left: u64,
}

impl Paged {
    pub(super) fn new(block: &Block) -> Self {
        let (range, page) = (block.used(), block.told.page_size);
        let pages = (range.end - range.start) / page;
        Self { id: block.told.id.clone(), range, page, done: vec![0; pages.div_ceil(64) as usize], left: pages }
    }

    /// How many pages it has.
    pub(super) fn pages(&self) -> u64 {
        (self.range.end - self.range.start) / self.page
    }

    /// How many of them are not done.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    pub(super) fn is_done(&self, page: u64) -> bool {
        self.done.get((page / 64) as usize).is_none_or(|word| word & (1 << (page % 64)) != 0)
    }

    pub(super) fn set_done(&mut self, page: u64) {
        let is_new = page < self.pages() && !self.is_done(page);
        if let Some(word) = self.done.get_mut((page / 64) as usize).filter(|_| is_new) {
            *word |= 1 << (page % 64);
            self.left -= 1;
        }
    }

    /// The pages that lie in a run of offsets, wholly or in part.
    pub(super) fn touched(&self, run: &Range<u64>) -> Range<u64> {
        run.start / self.page..run.end.div_ceil(self.page).min(self.pages())
    }

    /// The addresses of some pages.
    pub(super) fn addresses(&self, pages: &Range<u64>) -> Range<u64> {
        self.range.start + pages.start * self.page..self.range.start + pages.end * self.page
    }

    /// The page at an address.
    pub(super) fn page_at(&self, address: u64) -> Option<u64> {
        self.range.contains(&address).then(|| (address - self.range.start) / self.page)
    }

    /// The first run of pages at or after `from` that are not done, at most `most`.
    pub(super) fn next_missing(&self, within: &Range<u64>, most: u64) -> Option<Range<u64>> {
        let start = within.clone().find(|&page| !self.is_done(page))?;
        let end = (start..within.end.min(start + most)).find(|&page| self.is_done(page));
        Some(start..end.unwrap_or(within.end.min(start + most)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_comes_in_runs() {
        let mut paged = Paged {
            id: "ram".into(),
            range: 0x1000_0000..0x1000_0000 + 200 * 4096,
            page: 4096,
            done: vec![0; 4],
            left: 200,
        };
        for page in [0, 3, 64, 199, 199, 1000] {
            paged.set_done(page);
        }
        assert_eq!(paged.left(), 196);
        assert_eq!(paged.next_missing(&(0..200), 100), Some(1..3));
        assert_eq!(paged.next_missing(&(3..200), 10), Some(4..14));
        assert_eq!(paged.next_missing(&(60..200), 100), Some(60..64));
        assert_eq!(paged.next_missing(&(199..200), 100), None);
        assert!(paged.is_done(5000), "what is beyond does not come");
        assert_eq!(paged.touched(&(4095..8193)), 0..3);
        assert_eq!(paged.page_at(0x1000_1fff), Some(1));
        assert_eq!(paged.page_at(0x1), None);
    }
}
