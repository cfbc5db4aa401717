//! Sets of pages: runs of byte offsets, ascending, with gaps between them.

use rekindle_kernel::memory::PAGE_SIZE;
use std::ops::Range;

/// The content of a page of 4 KiB.
pub type Page = [u8; PAGE_SIZE];

/// Adds a run that begins at or after the end of the last one.
pub fn push(runs: &mut Vec<Range<u64>>, run: Range<u64>) {
    match runs.last_mut() {
        Some(last) if last.end >= run.start => last.end = last.end.max(run.end),
        _ if run.is_empty() => {}
        _ => runs.push(run),
    }
}

/// Returns all that is in at least one of the sets.
#[must_use]
pub fn union(one: &[Range<u64>], other: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut all: Vec<_> = one.iter().chain(other).cloned().collect();
    all.sort_unstable_by_key(|run| run.start);
    let mut runs = Vec::new();
    all.into_iter().for_each(|run| push(&mut runs, run));
    runs
}

/// Returns the runs with each gap of at most `max_gap` bytes filled.
#[must_use]
pub fn bridged(runs: &[Range<u64>], max_gap: u64) -> Vec<Range<u64>> {
    let mut all: Vec<Range<u64>> = Vec::new();
    for run in runs {
        match all.last_mut() {
            Some(last) if run.start - last.end <= max_gap => last.end = run.end,
            _ => all.push(run.clone()),
        }
    }
    all
}

/// Returns all of `0..length` that is not in `runs`.
#[must_use]
pub fn complement(runs: &[Range<u64>], length: u64) -> Vec<Range<u64>> {
    let mut rest = Vec::new();
    let mut at = 0;
    for run in runs {
        push(&mut rest, at..run.start.min(length));
        at = run.end;
    }
    if at < length {
        push(&mut rest, at..length);
    }
    rest
}

/// Returns all of `one` that is not in `other`.
#[must_use]
pub fn difference(one: &[Range<u64>], other: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut rest = Vec::new();
    let mut others = other.iter().peekable();
    for run in one {
        let mut at = run.start;
        while let Some(next) = others.peek() {
            if next.end <= at {
                others.next();
                continue;
            }
            if next.start >= run.end {
                break;
            }
            push_if_not_empty(&mut rest, at..next.start.max(at));
            at = next.end;
            if at >= run.end {
                break;
            }
        }
        push_if_not_empty(&mut rest, at..run.end.max(at));
    }
    rest
}

/// Returns all that is in both sets.
#[must_use]
pub fn intersection(one: &[Range<u64>], other: &[Range<u64>]) -> Vec<Range<u64>> {
    let end = one.last().map_or(0, |run| run.end);
    difference(one, &complement(other, end))
}

/// As [`push`], but ignores an empty run also where it is adjacent to the last one.
fn push_if_not_empty(runs: &mut Vec<Range<u64>>, run: Range<u64>) {
    if !run.is_empty() {
        push(runs, run);
    }
}

/// Returns the number of bytes in the runs.
#[must_use]
pub fn bytes(runs: &[Range<u64>]) -> u64 {
    runs.iter().map(|run| run.end - run.start).sum()
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "the vector has one run")]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn runs(set: &BTreeSet<u64>) -> Vec<Range<u64>> {
        let mut runs = Vec::new();
        set.iter().for_each(|&n| push(&mut runs, n..n + 1));
        runs
    }

    fn set(runs: &[Range<u64>]) -> BTreeSet<u64> {
        runs.iter().cloned().flatten().collect()
    }

    proptest! {
        #[test]
        fn operations_agree_with_those_of_btree_sets(
            one in proptest::collection::btree_set(0u64..40, 0..30),
            other in proptest::collection::btree_set(0u64..40, 0..30),
        ) {
            let (a, b) = (runs(&one), runs(&other));
            prop_assert_eq!(bytes(&a), one.len() as u64);
            prop_assert_eq!(union(&a, &b), runs(&one.union(&other).copied().collect()));
            prop_assert_eq!(difference(&a, &b), runs(&one.difference(&other).copied().collect()));
            prop_assert_eq!(intersection(&a, &b), runs(&one.intersection(&other).copied().collect()));
            let all: BTreeSet<_> = (0..40).collect();
            prop_assert_eq!(complement(&a, 40), runs(&all.difference(&one).copied().collect()));
            let gaps = complement(&bridged(&a, 3), 40);
            let inner = gaps.iter().filter(|gap| gap.start > 0 && gap.end < 40);
            prop_assert!(inner.clone().all(|gap| gap.end - gap.start > 3), "{:?}", gaps);
            prop_assert!(inner.clone().all(|gap| complement(&a, 40).contains(gap)), "{:?}", gaps);
            prop_assert_eq!(bridged(&a, 0), a.clone());
            prop_assert_eq!(set(&a), one);
        }
    }
}
