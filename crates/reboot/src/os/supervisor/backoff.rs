//! Decides when a dead helper is restarted, and when it is abandoned: the first restart is immediate, further ones in a
//! row wait longer and longer.

use std::time::{Duration, Instant};

/// A helper that has served this long has overcome the cause of its earlier deaths.
const STABLE_AFTER: Duration = Duration::from_secs(2);
/// Delay before the second restart in a row. The delay doubles with each further restart.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(5);
/// After this many deaths in a row, each sooner than [`STABLE_AFTER`], the helper is abandoned.
pub const DEATH_LIMIT: u32 = 8;

/// Decision after the death of a helper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestartDecision {
    RestartAt(Instant),
    /// Do not restart the helper any more.
    Abandon,
}

/// Counts the deaths of one helper.
#[derive(Debug, Clone, Copy, Default)]
pub struct Backoff {
    /// Deaths in a row, each sooner than [`STABLE_AFTER`].
    deaths: u32,
}

impl Backoff {
    /// Records that the helper died at `now` after it had served for `served`, or could not be started. Returns the
    /// decision.
    pub fn died(&mut self, now: Instant, served: Duration) -> RestartDecision {
        self.deaths = if served >= STABLE_AFTER { 1 } else { self.deaths + 1 };
        match self.deaths {
            1 => RestartDecision::RestartAt(now),
            deaths if deaths >= DEATH_LIMIT => RestartDecision::Abandon,
            deaths => RestartDecision::RestartAt(now + MAX_DELAY.min(FIRST_DELAY * 2u32.pow(deaths - 2))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT_SERVICE: Duration = Duration::from_millis(3);

    #[test]
    fn the_first_death_is_followed_by_a_restart_without_delay() {
        let now = Instant::now();
        let mut backoff = Backoff::default();
        assert_eq!(backoff.died(now, Duration::ZERO), RestartDecision::RestartAt(now));
    }

    #[test]
    fn deaths_in_a_row_are_followed_by_longer_and_longer_waits_and_then_by_none() {
        let start = Instant::now();
        let (mut now, mut backoff, mut delays_ms) = (start, Backoff::default(), Vec::new());
        while let RestartDecision::RestartAt(restart) = backoff.died(now, SHORT_SERVICE) {
            delays_ms.push((restart - now).as_millis());
            now = restart + SHORT_SERVICE;
        }
        assert_eq!(delays_ms, [0, 100, 200, 400, 800, 1600, 3200]);
        assert_eq!(backoff.died(now, SHORT_SERVICE), RestartDecision::Abandon, "it stays abandoned");
    }

    #[test]
    fn a_helper_that_serves_between_its_deaths_is_restarted_every_time() {
        let mut now = Instant::now();
        let mut backoff = Backoff::default();
        for _ in 0..10 * DEATH_LIMIT {
            now += STABLE_AFTER;
            assert_eq!(backoff.died(now, STABLE_AFTER), RestartDecision::RestartAt(now));
        }
        // A helper that was stable gets its restarts back.
        assert_eq!(backoff.died(now, SHORT_SERVICE), RestartDecision::RestartAt(now + FIRST_DELAY));
        assert_eq!(backoff.died(now, STABLE_AFTER), RestartDecision::RestartAt(now));
    }
}
