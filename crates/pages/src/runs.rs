//! Sets of pages as byte ranges.

use crate::{PAGE_SIZE, PageNo};
use std::ops::{Deref, Range};

/// A set of pages as byte ranges, ascending, with a gap between any two. The bytes are offsets in a block, or addresses
/// in a process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PageRuns(Vec<Range<u64>>);

impl PageRuns {
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a run that begins at or after the start of the last one.
    #[inline]
    pub fn push(&mut self, run: Range<u64>) {
        if run.is_empty() {
            return;
        }
        match self.0.last_mut() {
            Some(last) if last.end >= run.start => last.end = last.end.max(run.end),
            _ => self.0.push(run),
        }
    }

    /// Returns the pages that are in at least one of the sets.
    pub fn union(&self, other: &[Range<u64>]) -> Self {
        let mut runs: Vec<_> = self.iter().chain(other).cloned().collect();
        runs.sort_unstable_by_key(|run| run.start);
        runs.into_iter().collect()
    }

    /// Returns the runs with each gap of at most `max_gap` bytes filled.
    pub fn bridged(&self, max_gap: u64) -> Self {
        let mut bridged = Self::new();
        for run in self {
            match bridged.0.last_mut() {
                Some(last) if run.start - last.end <= max_gap => last.end = run.end,
                _ => bridged.0.push(run.clone()),
            }
        }
        bridged
    }

    /// Returns the part of `0..length` that is not in the set.
    pub fn complement(&self, length: u64) -> Self {
        Self::from(0..length).difference(self)
    }

    /// Returns the pages that are not in `other`, whose runs must be ascending.
    pub fn difference(&self, other: &[Range<u64>]) -> Self {
        let mut difference = Self::new();
        let mut removed_runs = other.iter().peekable();
        for run in self {
            // All pages of the run before this position have been handled.
            let mut position = run.start;
            while let Some(removed) = removed_runs.peek() {
                if removed.end <= position {
                    removed_runs.next();
                    continue;
                }
                if removed.start >= run.end {
                    break;
                }
                difference.push(position..removed.start.max(position));
                position = removed.end;
                if position >= run.end {
                    // The next run may overlap with the same removed run.
                    break;
                }
            }
            difference.push(position..run.end.max(position));
        }
        difference
    }

    /// Returns the pages that are in both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        let end = self.last().map_or(0, |run| run.end);
        self.difference(&other.complement(end))
    }

    /// Converts addresses to offsets from `base`, which must not be above the first run.
    pub fn relative_to(mut self, base: u64) -> Self {
        self.0.iter_mut().for_each(|run| *run = run.start - base..run.end - base);
        self
    }

    /// Converts offsets to addresses, where offset 0 is at `base`.
    pub fn placed_at(mut self, base: u64) -> Self {
        self.0.iter_mut().for_each(|run| *run = run.start + base..run.end + base);
        self
    }

    /// Returns the total length in bytes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.iter().map(|run| run.end - run.start).sum()
    }

    /// Returns the numbers of the pages, if the runs are offsets in a block.
    #[inline]
    pub fn numbers(&self) -> impl Iterator<Item = PageNo> + '_ {
        self.number_ranges().flatten().map(PageNo)
    }

    /// Returns the numbers of the pages as a range for each run.
    #[inline]
    pub fn number_ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        const PAGE: u64 = PAGE_SIZE as u64;
        self.iter().map(|run| run.start / PAGE..run.end / PAGE)
    }

    /// Splits the set into consecutive parts of at most `max_bytes`.
    pub fn split(&self, max_bytes: u64) -> Vec<Self> {
        let mut parts = Vec::new();
        let mut part = Self::new();
        let mut unused_bytes = max_bytes;
        for run in self {
            let mut start = run.start;
            while start < run.end {
                if unused_bytes == 0 {
                    parts.push(std::mem::take(&mut part));
                    unused_bytes = max_bytes;
                }
                let end = run.end.min(start + unused_bytes);
                part.push(start..end);
                unused_bytes -= end - start;
                start = end;
            }
        }
        if !part.is_empty() {
            parts.push(part);
        }
        parts
    }
}

impl Deref for PageRuns {
    type Target = [Range<u64>];

    fn deref(&self) -> &[Range<u64>] {
        &self.0
    }
}

impl From<Range<u64>> for PageRuns {
    fn from(run: Range<u64>) -> Self {
        [run].into_iter().collect()
    }
}

/// Merges adjacent and overlapping runs. The runs must be in ascending order.
impl FromIterator<Range<u64>> for PageRuns {
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(runs: I) -> Self {
        let mut merged = Self::new();
        runs.into_iter().for_each(|run| merged.push(run));
        merged
    }
}

impl IntoIterator for PageRuns {
    type Item = Range<u64>;
    type IntoIter = std::vec::IntoIter<Range<u64>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a PageRuns {
    type Item = &'a Range<u64>;
    type IntoIter = std::slice::Iter<'a, Range<u64>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn runs(bytes: &BTreeSet<u64>) -> PageRuns {
        bytes.iter().map(|&byte| byte..byte + 1).collect()
    }

    #[test]
    fn empty_runs_are_not_added() {
        let runs: PageRuns = [5..5, 5..6, 6..6, 6..8, 9..9].into_iter().collect();
        assert_eq!(*runs, [5..8; 1]);
    }

    #[test]
    fn offsets_become_page_numbers_and_addresses() {
        let runs: PageRuns = [2 * PAGE..4 * PAGE, 7 * PAGE..8 * PAGE].into_iter().collect();
        assert_eq!(runs.numbers().collect::<Vec<_>>(), [2, 3, 7].map(PageNo));
        assert_eq!(runs.number_ranges().collect::<Vec<_>>(), [2..4, 7..8]);
        let placed = runs.clone().placed_at(100 * PAGE);
        assert_eq!(placed.first(), Some(&(102 * PAGE..104 * PAGE)));
        assert_eq!(placed.relative_to(100 * PAGE), runs);
    }

    proptest! {
        #[test]
        fn operations_agree_with_those_of_btree_sets(
            first_model in proptest::collection::btree_set(0u64..40, 0..30),
            second_model in proptest::collection::btree_set(0u64..40, 0..30),
        ) {
            let (first, second) = (runs(&first_model), runs(&second_model));
            prop_assert!(first.windows(2).all(|two| two[0].end < two[1].start), "{:?}", first);
            prop_assert_eq!(first.bytes(), first_model.len() as u64);
            prop_assert_eq!(first.union(&second), runs(&first_model.union(&second_model).copied().collect()));
            prop_assert_eq!(first.difference(&second), runs(&first_model.difference(&second_model).copied().collect()));
            let common = first_model.intersection(&second_model).copied().collect();
            prop_assert_eq!(first.intersection(&second), runs(&common));
            for length in [40, 17] {
                let all: BTreeSet<_> = (0..length).collect();
                prop_assert_eq!(first.complement(length), runs(&all.difference(&first_model).copied().collect()));
            }
            let gaps = first.bridged(3).complement(40);
            let inner_gaps = gaps.iter().filter(|gap| gap.start > 0 && gap.end < 40);
            prop_assert!(inner_gaps.clone().all(|gap| gap.end - gap.start > 3), "{:?}", gaps);
            prop_assert!(inner_gaps.clone().all(|gap| first.complement(40).contains(gap)), "{:?}", gaps);
            prop_assert_eq!(first.bridged(0), first.clone());
            prop_assert_eq!(first.into_iter().flatten().collect::<BTreeSet<_>>(), first_model);
        }

        #[test]
        fn parts_are_full_and_make_the_whole(
            bytes in proptest::collection::btree_set(0u64..100, 0..80), max_bytes in 1u64..20,
        ) {
            let whole = runs(&bytes);
            let parts = whole.split(max_bytes);
            let sizes: Vec<_> = parts.iter().map(PageRuns::bytes).collect();
            if let Some((last, others)) = sizes.split_last() {
                prop_assert!(others.iter().all(|size| *size == max_bytes), "{:?}", sizes);
                prop_assert!((1..=max_bytes).contains(last), "{:?}", sizes);
            }
            prop_assert_eq!(parts.into_iter().flatten().collect::<PageRuns>(), whole);
        }
    }
}
