//! Counts per interval of time, in bounded memory. The code is pure: times are offsets from the start.

use std::collections::VecDeque;
use std::time::Duration;

use crate::millis;
use crate::report::Interval;

/// Limit of intervals in a report. In a longer run, adjacent intervals are added together, so that every interval
/// becomes twice as wide. At 100 ms this happens after 27 minutes, and again after 55.
pub const MAX_INTERVALS: usize = 16_384;

/// Counts of one interval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) answered: u64,
    pub(crate) failed: u64,
    pub(crate) bytes: u64,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.answered += other.answered;
        self.failed += other.failed;
        self.bytes += other.bytes;
    }

    fn at(self, start_ms: u64) -> Interval {
        Interval { start_ms, answered: self.answered, failed: self.failed, bytes: self.bytes }
    }
}

/// The intervals of a whole run.
#[derive(Debug, Clone)]
pub(crate) struct Intervals {
    width_ms: u64,
    buckets: Vec<Counts>,
}

impl Intervals {
    pub(crate) fn new(width: Duration) -> Self {
        Self { width_ms: millis(width).max(1), buckets: Vec::new() }
    }

    /// Returns the width of each interval in milliseconds.
    pub(crate) fn width_ms(&self) -> u64 {
        self.width_ms
    }

    /// Adds `counts` to the interval that contains `at`.
    pub(crate) fn add(&mut self, at: Duration, counts: Counts) {
        let at = millis(at);
        while at / self.width_ms >= MAX_INTERVALS as u64 {
            self.widen();
        }
        let index = usize::try_from(at / self.width_ms).unwrap_or(MAX_INTERVALS - 1);
        if self.buckets.len() <= index {
            self.buckets.resize(index + 1, Counts::default());
        }
        self.buckets[index].add(counts);
    }

    fn widen(&mut self) {
        self.width_ms = self.width_ms.saturating_mul(2);
        self.buckets = self
            .buckets
            .chunks(2)
            .map(|pair| {
                let mut sum = Counts::default();
                pair.iter().for_each(|counts| sum.add(*counts));
                sum
            })
            .collect();
    }

    /// Returns all intervals since the start, including empty ones.
    pub(crate) fn list(&self) -> Vec<Interval> {
        (0..).zip(&self.buckets).map(|(index, counts)| counts.at(index * self.width_ms)).collect()
    }
}

/// Intervals that a live reader has not read yet. They always have the configured width.
#[derive(Debug)]
pub(crate) struct LiveIntervals {
    width_ms: u64,
    /// Number of the first interval in `buckets`: how many intervals were taken or lost.
    first: u64,
    buckets: VecDeque<Counts>,
}

impl LiveIntervals {
    /// Limit of unread intervals. Older ones are lost.
    const MAX_UNREAD: usize = 4096;

    pub(crate) fn new(width: Duration) -> Self {
        Self { width_ms: millis(width).max(1), first: 0, buckets: VecDeque::new() }
    }

    /// Adds `counts` to the interval that contains `at`, unless that interval was already taken.
    pub(crate) fn add(&mut self, at: Duration, counts: Counts) {
        self.extend_to((millis(at) / self.width_ms).saturating_add(1));
        let index = (millis(at) / self.width_ms).saturating_sub(self.first);
        if let Some(bucket) = usize::try_from(index).ok().and_then(|index| self.buckets.get_mut(index)) {
            bucket.add(counts);
        }
    }

    /// Removes the intervals that ended by `now`, including empty ones, and returns them.
    pub(crate) fn take_ended(&mut self, now: Duration) -> Vec<Interval> {
        let end = millis(now) / self.width_ms;
        self.extend_to(end);
        let mut taken = Vec::new();
        while self.first < end
            && let Some(counts) = self.buckets.pop_front()
        {
            taken.push(counts.at(self.first.saturating_mul(self.width_ms)));
            self.first += 1;
        }
        taken
    }

    /// Removes all intervals up to `now`, including the incomplete one, and returns them.
    pub(crate) fn take_all(&mut self, now: Duration) -> Vec<Interval> {
        self.take_ended(now.saturating_add(Duration::from_millis(self.width_ms)))
    }

    /// Adds empty intervals up to number `end`, exclusive.
    fn extend_to(&mut self, end: u64) {
        let oldest = end.saturating_sub(Self::MAX_UNREAD as u64);
        if self.first < oldest {
            let lost = usize::try_from(oldest - self.first).unwrap_or(usize::MAX);
            self.buckets.drain(..lost.min(self.buckets.len()));
            self.first = oldest;
        }
        while self.first + (self.buckets.len() as u64) < end {
            self.buckets.push_back(Counts::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ONE: Counts = Counts { answered: 1, failed: 0, bytes: 10 };

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_long_run_widens_its_intervals() {
        let mut intervals = Intervals::new(ms(100));
        intervals.add(ms(0), ONE);
        intervals.add(ms(150), ONE);
        intervals.add(ms(100 * MAX_INTERVALS as u64), ONE);
        assert_eq!(intervals.width_ms(), 200);
        let list = intervals.list();
        assert_eq!(list.len(), MAX_INTERVALS / 2 + 1);
        assert_eq!((list[0].answered, list[1].answered, list[1].start_ms), (2, 0, 200));
    }

    #[test]
    fn an_end_on_an_edge_begins_an_interval_live_as_in_the_report() {
        for end in [0, 9, 10, 11] {
            let (mut live, mut whole) = (LiveIntervals::new(ms(10)), Intervals::new(ms(10)));
            live.add(ms(end), ONE);
            whole.add(ms(end), ONE);
            assert_eq!(live.take_all(ms(end)), whole.list());
        }
    }

    #[test]
    fn live_intervals_come_once_and_in_order() {
        let mut live = LiveIntervals::new(ms(10));
        live.add(ms(25), ONE);
        let starts = |list: Vec<Interval>| list.iter().map(|i| (i.start_ms, i.answered)).collect::<Vec<_>>();
        assert_eq!(starts(live.take_ended(ms(29))), [(0, 0), (10, 0)]);
        assert_eq!(starts(live.take_ended(ms(29))), []);
        assert_eq!(starts(live.take_all(ms(41))), [(20, 1), (30, 0), (40, 0)]);
    }

    #[test]
    fn a_live_reader_that_is_far_behind_loses_the_oldest() {
        let mut live = LiveIntervals::new(ms(1));
        live.add(ms(0), ONE);
        live.add(ms(10_000), ONE);
        let taken = live.take_all(ms(10_001));
        assert_eq!(taken.len(), LiveIntervals::MAX_UNREAD);
        assert_eq!(taken.iter().map(|interval| interval.answered).sum::<u64>(), 1);
        assert_eq!(taken.last().map(|interval| interval.start_ms), Some(10_001));
    }

    proptest! {
        #[test]
        fn nothing_is_lost(width in 1_u64..50, times in prop::collection::vec(0_u64..3_000_000, 0..100)) {
            let mut intervals = Intervals::new(ms(width));
            for at in &times {
                intervals.add(ms(*at), ONE);
            }
            let (list, width) = (intervals.list(), intervals.width_ms());
            prop_assert!(list.len() <= MAX_INTERVALS);
            for interval in &list {
                let inside = |at: &&u64| (interval.start_ms..interval.start_ms + width).contains(*at);
                prop_assert_eq!(interval.answered, times.iter().filter(inside).count() as u64);
            }
            prop_assert_eq!(list.iter().map(|i| i.bytes).sum::<u64>(), 10 * times.len() as u64);
        }
    }
}
