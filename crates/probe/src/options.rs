//! How to probe: pace, patience, number of connections, and where from.

use std::time::Duration;

/// How to probe a target. All have sensible defaults: `Options { every, ..Options::default() }`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The time between two requests of one connection. Default: 10 ms. There is no spinning: below some 200 µs the
    /// host's timers and scheduler set the pace, and [`skipped`](crate::Report::skipped) reports how far it was missed.
    pub every: Duration,
    /// A request with no answer for so long has failed, and its connection is closed. Default: 10 s.
    pub timeout: Duration,
    /// A SYN with no answer for so long is sent anew, from a new socket and to the host's next address, as part of the
    /// same request. Default: 250 ms. The kernel would repeat it only after 1, 3 and 7 s, and a gap could not be
    /// distinguished better than that. Must be longer than the round trip to the target.
    pub connect_attempt: Duration,
    /// The number of connections, each with a thread. Default: 1.
    pub connections: usize,
    /// The width of the throughput intervals: whole milliseconds. Default: 100 ms.
    pub interval: Duration,
    /// Silences longer than this are reported as gaps. Default: ten times `every`, and at least 5 ms.
    pub gap_threshold: Option<Duration>,
    /// Ends the probing after so long. Default: at [`Probe::stop`](crate::Probe::stop).
    pub duration: Option<Duration>,
    /// Probe from inside the network namespace `/run/netns/NAME`. Default: the caller's own.
    pub netns: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            every: Duration::from_millis(10),
            timeout: Duration::from_secs(10),
            connect_attempt: Duration::from_millis(250),
            connections: 1,
            interval: Duration::from_millis(100),
            gap_threshold: None,
            duration: None,
            netns: None,
        }
    }
}

/// [`Options`] that cannot be met.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// A duration of nothing.
    #[error("{0} must be longer than 0")]
    Zero(&'static str),
    /// No connection, or more threads than make sense.
    #[error("{0} connections requested; 1 to {max} are possible", max = Options::MAX_CONNECTIONS)]
    Connections(usize),
    /// The interval is not a number of whole milliseconds.
    #[error("interval {0:?} is not a whole number of milliseconds")]
    Interval(Duration),
}

impl Options {
    /// The largest number of connections.
    pub const MAX_CONNECTIONS: usize = 1024;

    /// The silence that counts as a gap.
    pub fn effective_gap_threshold(&self) -> Duration {
        self.gap_threshold.unwrap_or_else(|| self.every.saturating_mul(10).max(Duration::from_millis(5)))
    }

    /// Refuses what cannot be met.
    ///
    /// # Errors
    ///
    /// [`OptionsError`] names the first option that is out of range.
    pub fn validate(&self) -> Result<(), OptionsError> {
        let durations = [
            ("every", self.every),
            ("timeout", self.timeout),
            ("connect_attempt", self.connect_attempt),
            ("interval", self.interval),
            ("duration", self.duration.unwrap_or(Duration::MAX)),
        ];
        if let Some((name, _)) = durations.into_iter().find(|(_, duration)| duration.is_zero()) {
            return Err(OptionsError::Zero(name));
        }
        if !(1..=Self::MAX_CONNECTIONS).contains(&self.connections) {
            return Err(OptionsError::Connections(self.connections));
        }
        if !self.interval.as_nanos().is_multiple_of(1_000_000) {
            return Err(OptionsError::Interval(self.interval));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threshold_follows_the_pace() {
        let threshold =
            |us| Options { every: Duration::from_micros(us), ..Options::default() }.effective_gap_threshold();
        assert_eq!(threshold(100), Duration::from_millis(5));
        assert_eq!(threshold(1_000), Duration::from_millis(10));
        let own = Options { gap_threshold: Some(Duration::from_micros(1)), ..Options::default() };
        assert_eq!(own.effective_gap_threshold(), Duration::from_micros(1));
    }

    #[test]
    fn impossible_options_are_refused() {
        assert_eq!(Options::default().validate(), Ok(()));
        let refused = |options: Options| options.validate().unwrap_err();
        let zero = Duration::ZERO;
        assert_eq!(refused(Options { every: zero, ..Options::default() }), OptionsError::Zero("every"));
        assert_eq!(refused(Options { duration: Some(zero), ..Options::default() }), OptionsError::Zero("duration"));
        assert_eq!(refused(Options { connections: 0, ..Options::default() }), OptionsError::Connections(0));
        let odd = Duration::from_micros(1_500);
        assert_eq!(refused(Options { interval: odd, ..Options::default() }), OptionsError::Interval(odd));
    }
}
