//! Times of requests: a fixed grid of ticks, and the backoff after a failure. The code is pure: times are offsets from
//! the start.

use std::time::Duration;

use crate::nanos;

/// The ticks of one connection: `phase`, `phase + every`, `phase + 2 × every` …
#[derive(Debug)]
pub(crate) struct Schedule {
    every: u64,
    next: u64,
}

impl Schedule {
    /// Returns the grid of connection `index` of `count`. The phases divide `every` evenly.
    pub(crate) fn new(every: Duration, index: usize, count: usize) -> Self {
        let every = nanos(every).max(1);
        let phase = u128::from(every) * index as u128 / (count as u128).max(1);
        Self { every, next: u64::try_from(phase).unwrap_or(0) }
    }

    /// Returns the tick to wait for.
    pub(crate) fn due(&self) -> Duration {
        Duration::from_nanos(self.next)
    }

    /// Advances to the first tick after `now`, by at least one tick. Returns the number of ticks that were left out.
    pub(crate) fn advance(&mut self, now: Duration) -> u64 {
        let missed = nanos(now).saturating_sub(self.next) / self.every;
        self.next = self.next.saturating_add(missed.saturating_add(1).saturating_mul(self.every));
        missed
    }
}

/// Delays between consecutive failures: none, then 1, 2, 4 … 50 ms.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    const LONGEST: Duration = Duration::from_millis(50);

    /// Makes the next failure a first one again, after an answer.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    /// Returns how long to wait after one more failure.
    pub(crate) fn next(&mut self) -> Duration {
        let delay = match self.failures {
            0 => Duration::ZERO,
            n => Duration::from_millis(1 << (n - 1).min(6)).min(Self::LONGEST),
        };
        self.failures = self.failures.saturating_add(1);
        delay
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn connections_share_the_grid_evenly() {
        let due = |index| Schedule::new(Duration::from_millis(4), index, 4).due();
        assert_eq!([due(0), due(1), due(3)], [0, 1, 3].map(Duration::from_millis));
    }

    #[test]
    fn backoff_grows_to_50_ms_and_starts_again() {
        let mut backoff = Backoff::default();
        let delays: Vec<_> = (0..9).map(|_| backoff.next().as_millis()).collect();
        assert_eq!(delays, [0, 1, 2, 4, 8, 16, 32, 50, 50]);
        backoff.reset();
        assert_eq!(backoff.next(), Duration::ZERO);
    }

    proptest! {
        #[test]
        fn a_late_answer_leaves_ticks_out_and_stays_on_the_grid(
            every in 1_u64..2_000_000_000,
            late in prop::collection::vec(0_u64..20_000_000_000, 1..50),
        ) {
            let mut schedule = Schedule::new(Duration::from_nanos(every), 0, 1);
            let mut ticks = 0;
            for late in late {
                let due = schedule.due();
                let now = due + Duration::from_nanos(late);
                let skipped = schedule.advance(now);
                ticks += 1 + skipped;
                prop_assert_eq!(skipped, late / every);
                prop_assert!(schedule.due() > now);
                prop_assert!(schedule.due() - now <= Duration::from_nanos(every));
                prop_assert_eq!(nanos(schedule.due()), ticks * every);
            }
        }
    }
}
