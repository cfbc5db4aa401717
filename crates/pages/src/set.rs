//! Sets of pages with a bit for each page.

use crate::PageNo;
use fixedbitset::FixedBitSet;

/// A set of pages of one block. It uses a bit for each page up to the last one that was ever in it.
#[derive(Debug, Clone, Default)]
pub struct DirtySet {
    bits: FixedBitSet,
    len: u64,
}

impl DirtySet {
    /// Returns an empty set with memory for `pages` pages.
    pub fn with_room(pages: u64) -> Self {
        Self { bits: FixedBitSet::with_capacity(pages as usize), len: 0 }
    }

    /// Returns the set of the first `pages` pages.
    pub fn full(pages: u64) -> Self {
        let mut set = Self::with_room(pages);
        set.bits.insert_range(..);
        Self { len: pages, ..set }
    }

    /// Returns the number of pages in the set.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    pub fn contains(&self, page: PageNo) -> bool {
        self.bits.contains(page.0 as usize)
    }

    /// Adds a page. Returns whether it is new.
    #[inline]
    pub fn insert(&mut self, page: PageNo) -> bool {
        let bit = page.0 as usize;
        if bit >= self.bits.len() {
            self.grow(bit);
        }
        let is_new = !self.bits.put(bit);
        self.len += u64::from(is_new);
        is_new
    }

    /// Makes room for at least this bit. Doubles the memory, because growing by a few bits each time would cost more
    /// than the insertions.
    #[cold]
    fn grow(&mut self, bit: usize) {
        self.bits.grow((bit + 1).next_power_of_two());
    }

    /// Removes a page. Returns whether it was in the set.
    #[inline]
    pub fn remove(&mut self, page: PageNo) -> bool {
        let was_in_set = self.contains(page);
        if was_in_set {
            self.bits.remove(page.0 as usize);
            self.len -= 1;
        }
        was_in_set
    }

    /// Removes and returns the first page of the set at or after `from`.
    #[inline]
    pub fn take_next(&mut self, from: PageNo) -> Option<PageNo> {
        let page = self.next(from)?;
        self.bits.remove(page.0 as usize);
        self.len -= 1;
        Some(page)
    }

    /// Removes all pages and keeps the memory.
    pub fn clear(&mut self) {
        self.bits.clear();
        self.len = 0;
    }

    /// Finds the first page of the set at or after `from`.
    #[inline]
    pub fn next(&self, from: PageNo) -> Option<PageNo> {
        const WORD_BITS: u64 = usize::BITS as u64;
        let first_word = (from.0 / WORD_BITS) as usize;
        // In the first word, the pages before `from` do not count.
        let mut mask = usize::MAX << (from.0 % WORD_BITS);
        for (index, word) in self.bits.as_slice().iter().enumerate().skip(first_word) {
            let candidates = word & mask;
            if candidates != 0 {
                return Some(PageNo(index as u64 * WORD_BITS + u64::from(candidates.trailing_zeros())));
            }
            mask = usize::MAX;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_full_set_has_its_pages_and_no_other() {
        for pages in [0, 1, 63, 64, 65, 127, 128, 129, 1000] {
            let set = DirtySet::full(pages);
            assert_eq!((set.len(), set.is_empty()), (pages, pages == 0));
            assert_eq!((0..2000).filter(|page| set.contains(PageNo(*page))).count() as u64, pages);
            assert_eq!(set.next(PageNo(pages)), None);
        }
    }

    #[test]
    fn pages_beyond_its_memory_are_not_in_a_set() {
        let mut set = DirtySet::with_room(10);
        assert!(!set.contains(PageNo(u64::MAX)) && !set.remove(PageNo(1 << 40)));
        assert_eq!(set.next(PageNo(u64::MAX)), None);
        assert!(set.insert(PageNo(5000)) && !set.insert(PageNo(5000)));
        assert_eq!((set.len(), set.next(PageNo(0))), (1, Some(PageNo(5000))));
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_btree_set(
            room in 0u64..400,
            changes in proptest::collection::vec((any::<bool>(), 0u64..600), 0..200),
        ) {
            let (mut set, mut model) = (DirtySet::with_room(room), BTreeSet::new());
            for (is_insertion, page) in changes {
                if is_insertion {
                    prop_assert_eq!(set.insert(PageNo(page)), model.insert(page));
                } else {
                    prop_assert_eq!(set.remove(PageNo(page)), model.remove(&page));
                }
                prop_assert_eq!(set.len(), model.len() as u64);
            }
            for page in 0..1300 {
                prop_assert_eq!(set.contains(PageNo(page)), model.contains(&page));
                prop_assert_eq!(set.next(PageNo(page)), model.range(page..).next().map(|page| PageNo(*page)));
            }
            let mut taken = Vec::new();
            while let Some(page) = set.take_next(PageNo(100)) {
                taken.push(page.0);
            }
            prop_assert_eq!(taken, model.split_off(&100).into_iter().collect::<Vec<_>>());
            prop_assert_eq!(set.len(), model.len() as u64);
            set.clear();
            prop_assert!(set.is_empty() && set.next(PageNo(0)).is_none());
        }
    }
}
