//! When a helper that has died is restarted, and when it is not restarted any more.

use std::time::{Duration, Instant};

/// A helper that has served for so long before it died has got over what the deaths before were about.
const SETTLED: Duration = Duration::from_secs(2);
/// The wait before the second restart in a row; it doubles with each further one.
const FIRST: Duration = Duration::from_millis(100);
/// The longest wait.
const LONGEST: Duration = Duration::from_secs(5);
/// Deaths in a row, each sooner than [`SETTLED`], before the helper is given up.
pub const LIMIT: u32 = 8;

/// What is to be done about a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Restart it at this time.
    RestartAt(Instant),
    /// Leave it.
    GiveUp,
}

/// The deaths of one helper.
#[derive(Debug, Clone, Copy, Default)]
pub struct Backoff {
    /// In a row.
    deaths: u32,
}

impl Backoff {
    /// The helper has died, or could not be started, at `now`; `served` is how long it had served.
    pub fn died(&mut self, now: Instant, served: Duration) -> Next {
        self.deaths = if served >= SETTLED { 1 } else { self.deaths + 1 };
        match self.deaths {
            1 => Next::RestartAt(now),
            deaths if deaths >= LIMIT => Next::GiveUp,
            deaths => Next::RestartAt(now + LONGEST.min(FIRST * 2u32.pow(deaths - 2))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BRIEF: Duration = Duration::from_millis(3);

    #[test]
    fn the_first_death_is_followed_by_a_restart_without_delay() {
        let now = Instant::now();
        let mut backoff = Backoff::default();
        assert_eq!(backoff.died(now, Duration::ZERO), Next::RestartAt(now));
    }

    #[test]
    fn deaths_in_a_row_are_followed_by_longer_and_longer_waits_and_then_by_none() {
        let start = Instant::now();
        let (mut now, mut backoff, mut waits) = (start, Backoff::default(), Vec::new());
        while let Next::RestartAt(at) = backoff.died(now, BRIEF) {
            waits.push(at - now);
            now = at + BRIEF;
        }
        let ms: Vec<_> = waits.iter().map(Duration::as_millis).collect();
        assert_eq!(ms, [0, 100, 200, 400, 800, 1600, 3200]);
        assert_eq!(backoff.died(now, BRIEF), Next::GiveUp, "it stays given up");
    }

    #[test]
    fn a_helper_that_serves_between_its_deaths_is_restarted_every_time() {
        let mut now = Instant::now();
        let mut backoff = Backoff::default();
        for _ in 0..10 * LIMIT {
            now += SETTLED;
            assert_eq!(backoff.died(now, SETTLED), Next::RestartAt(now));
        }
        // One that settled has its restarts back.
        assert_eq!(backoff.died(now, BRIEF), Next::RestartAt(now + FIRST));
        assert_eq!(backoff.died(now, SETTLED), Next::RestartAt(now));
    }
}
