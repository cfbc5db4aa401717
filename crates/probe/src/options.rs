//! Options of a probe: pace, timeouts, number of connections, network namespace.

use std::time::Duration;

/// Options of a probe. All have defaults: `Options { every, ..Options::default() }`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Time between two requests of one connection. Default: 10 ms. The probe does not spin: below about 200 µs, the
    /// host's timers and scheduler determine the pace, and [`skipped`](crate::Report::skipped) reports the number of
    /// missed ticks.
    pub every: Duration,
    /// Time after which a request without an answer has failed and its connection is closed. Default: 10 s.
    pub timeout: Duration,
    /// Time after which an unanswered SYN is sent again, from a new socket and to the host's next address, as part of
    /// the same request. Default: 250 ms. The kernel would repeat the SYN only after 1, 3 and 7 s, so that the end of a
    /// gap would be found that late. The time must be longer than the round trip to the target.
    pub connect_attempt: Duration,
    /// Number of connections, each with a thread. Default: 1.
    pub connections: usize,
    /// Width of the throughput intervals, in whole milliseconds. Default: 100 ms.
    pub interval: Duration,
    /// Length above which a silence is reported as a gap. Default: ten times `every`, and at least 5 ms.
    pub gap_threshold: Option<Duration>,
    /// Time after which the probe ends. Default: at [`Probe::stop`](crate::Probe::stop).
    pub duration: Option<Duration>,
    /// Name of the network namespace `/run/netns/NAME` from which to probe. Default: the caller's namespace.
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

/// Fault of invalid [`Options`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// A duration is 0.
    #[error("{0} must be longer than 0")]
    Zero(&'static str),
    /// The number of connections is 0 or too large.
    #[error("{0} connections requested; 1 to {max} are possible", max = Options::MAX_CONNECTIONS)]
    Connections(usize),
    /// The interval is not a whole number of milliseconds.
    #[error("interval {0:?} is not a whole number of milliseconds")]
    Interval(Duration),
}

impl Options {
    /// Limit of connections.
    pub const MAX_CONNECTIONS: usize = 1024;

    /// Returns the length above which a silence is a gap, with the default filled in.
    pub fn effective_gap_threshold(&self) -> Duration {
        self.gap_threshold.unwrap_or_else(|| self.every.saturating_mul(10).max(Duration::from_millis(5)))
    }

    /// Checks that all options are in range.
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
