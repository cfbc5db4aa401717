//! Tables with a value for every page of a RAM block of the guest. A table is divided into parts of equal length. Only
//! parts with values use memory, so that a large block without pages costs nothing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of pages of a part, the same as in a base index, the file with the locations of all pages ([`PART_PAGES`]).
///
/// [`PART_PAGES`]: crate::format::base::PART_PAGES
const PART: usize = 4096;

/// Returns the part of a page, and its position in the part.
fn split(page: u64) -> (usize, usize) {
    ((page / PART as u64) as usize, (page % PART as u64) as usize)
}

/// Returns the number of parts for `pages` pages.
fn parts(pages: u64) -> usize {
    pages.div_ceil(PART as u64) as usize
}

/// Returns the number of pages of a part. The last part may be shorter.
fn part_len(pages: u64, part: usize) -> usize {
    pages.saturating_sub((part * PART) as u64).min(PART as u64) as usize
}

/// A table with a value for every page. Each value is the default until it is set.
#[derive(Debug, Clone)]
pub(crate) struct PageTable<T> {
    pages: u64,
    parts: Vec<Option<Box<[T]>>>,
}

impl<T: Copy + Default + PartialEq> PageTable<T> {
    pub fn new(pages: u64) -> Self {
        Self { pages, parts: vec![None; parts(pages)] }
    }

    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Grows the table to at least `pages` pages.
    pub fn grow(&mut self, pages: u64) {
        // Only the last of the existing parts may be shorter than a part of the longer table.
        let last = self.parts.len().saturating_sub(1);
        self.pages = self.pages.max(pages);
        self.parts.resize(parts(self.pages), None);
        let len = part_len(self.pages, last);
        if let Some(Some(part)) = self.parts.get_mut(last) {
            let mut values = std::mem::take(part).into_vec();
            values.resize(len, T::default());
            *part = values.into_boxed_slice();
        }
    }

    /// Returns the value of a page; the default for a page beyond the end.
    pub fn get(&self, page: u64) -> T {
        let (part, within) = split(page);
        self.parts.get(part).and_then(|part| part.as_ref()?.get(within)).copied().unwrap_or_default()
    }

    /// Returns the value of a page for changing; `None` beyond the end.
    pub fn get_mut(&mut self, page: u64) -> Option<&mut T> {
        if page >= self.pages {
            return None;
        }
        let (part, within) = split(page);
        let len = part_len(self.pages, part);
        let part = self.parts.get_mut(part)?;
        part.get_or_insert_with(|| vec![T::default(); len].into_boxed_slice()).get_mut(within)
    }

    /// Iterates over the pages from `from` on whose value is not the default.
    pub fn values_from(&self, from: u64) -> impl Iterator<Item = (u64, T)> + '_ {
        let (first, within) = split(from);
        self.parts.iter().enumerate().skip(first).flat_map(move |(number, part)| {
            let skip = if number == first { within } else { 0 };
            let values = part.iter().flat_map(|values| values.iter().enumerate()).skip(skip);
            values
                .filter(|(_, value)| **value != T::default())
                .map(move |(within, value)| ((number * PART + within) as u64, *value))
        })
    }
}

/// Digests of a block's pages. The thread that commits sets them, and the thread that sends pages reads them.
#[derive(Debug)]
pub(crate) struct PageDigests {
    pages: u64,
    parts: Vec<OnceLock<Box<[AtomicU64]>>>,
}

impl PageDigests {
    /// Returns a table of `pages` digests, all 0.
    pub fn new(pages: u64) -> Self {
        Self { pages, parts: (0..parts(pages)).map(|_| OnceLock::new()).collect() }
    }

    /// Returns a copy with `pages` pages.
    pub fn resized(&self, pages: u64) -> Self {
        let new = Self::new(pages);
        for (number, (old, new)) in self.parts.iter().zip(&new.parts).enumerate() {
            if let Some(values) = old.get() {
                let values = values.iter().map(|value| value.load(Ordering::Relaxed)).chain(std::iter::repeat(0));
                let _ = new.set(values.take(part_len(pages, number)).map(AtomicU64::new).collect());
            }
        }
        new
    }

    /// Returns the digest of a page; 0 for a page beyond the end.
    pub fn get(&self, page: u64) -> u64 {
        let (part, within) = split(page);
        let value = self.parts.get(part).and_then(|part| part.get()?.get(within));
        value.map_or(0, |value| value.load(Ordering::Relaxed))
    }

    pub fn set(&self, page: u64, digest: u64) {
        let (part, within) = split(page);
        let len = part_len(self.pages, part);
        let Some(part) = self.parts.get(part) else { return };
        // A part without values reads as 0 already.
        if digest == 0 && part.get().is_none() {
            return;
        }
        let values = part.get_or_init(|| std::iter::repeat_with(|| AtomicU64::new(0)).take(len).collect());
        if let Some(value) = values.get(within) {
            value.store(digest, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn tables_agree_with_maps(sets in proptest::collection::vec((0u64..20_000, 1u64..100), 0..60), from in 0u64..20_000) {
            let mut page_table = PageTable::<u64>::new(10_000);
            let digests = PageDigests::new(10_000);
            // Both pages are in the last part (8192..10000), which grows: one within it, and its last page.
            for page in [9_000, 9_999] {
                *page_table.get_mut(page).unwrap() = 7;
                digests.set(page, 7);
            }
            page_table.grow(18_000);
            let digests = digests.resized(18_000);
            let mut map = BTreeMap::from([(9_000, 7), (9_999, 7)]);
            for (page, value) in sets {
                match page_table.get_mut(page) {
                    Some(place) => *place = value,
                    None => prop_assert!(page >= 18_000),
                }
                if page < 18_000 {
                    digests.set(page, value);
                    map.insert(page, value);
                }
            }
            let found: Vec<_> = page_table.values_from(from).collect();
            let want: Vec<_> = map.range(from..).map(|(page, value)| (*page, *value)).collect();
            prop_assert_eq!(found, want);
            // Pages from 18,000 on are beyond the end.
            for page in 0..20_000 {
                let want = map.get(&page).copied().unwrap_or(0);
                prop_assert_eq!((page_table.get(page), digests.get(page)), (want, want));
            }
        }
    }
}
