//! What a probe saw, for machines: every number of a run, with its unit in its name.

use serde::{Deserialize, Serialize};

/// Everything a probe saw, from its start to its stop (or, in a snapshot, until now).
///
/// `sent == answered + failed.total() + in_flight`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// What was probed.
    pub url: String,
    /// The host clock at the start, in nanoseconds of Unix time. Later times are this plus monotonic time, so that a
    /// clock that is set during the run moves none of them.
    pub started_unix_ns: u64,
    /// From the start to the stop.
    pub elapsed_us: u64,
    /// The time between two requests of one connection.
    pub every_us: u64,
    /// The number of connections held in parallel.
    pub connections: u64,
    /// Requests started.
    pub sent: u64,
    /// Good answers, whole and right.
    pub answered: u64,
    /// Requests that failed, by cause.
    pub failed: Failures,
    /// Requests with neither an answer nor a failure yet; at the stop they were dropped.
    pub in_flight: u64,
    /// Ticks at which no request was sent, because the one before was still outstanding or being retried.
    pub skipped: u64,
    /// Bytes received, also those of answers that were wrong or never became whole.
    pub bytes: u64,
    /// TCP connections established.
    pub connections_opened: u64,
    /// Established TCP connections that ended without the probe having closed them or the server having announced it.
    pub connections_lost: u64,
    /// Latencies of the good answers; none without one.
    pub latency: Option<Latency>,
    /// Silences longer than this are gaps.
    pub gap_threshold_us: u64,
    /// The longest silence, whether above the threshold or not.
    pub longest_gap_us: u64,
    /// The number of gaps.
    pub gaps_total: u64,
    /// The longest [`MAX_GAPS`](crate::MAX_GAPS) gaps, in the order of time.
    pub gaps: Vec<Gap>,
    /// The width of each interval: as configured, or a power of two times that in a run longer than
    /// [`MAX_INTERVALS`](crate::MAX_INTERVALS).
    pub interval_ms: u64,
    /// Throughput over time, without holes; the last interval may have been cut short by the stop.
    pub intervals: Vec<Interval>,
    /// What the first failure was, in words.
    pub first_failure: Option<String>,
}

/// Failed requests by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failures {
    /// No whole answer within the timeout.
    pub timeouts: u64,
    /// The connection was reset or closed before the answer was whole.
    pub resets: u64,
    /// The target refused the connection.
    pub refused: u64,
    /// No connection for any other reason: no route, host down, out of local ports or descriptors.
    pub unreachable: u64,
    /// An answer came, but a wrong one: not HTTP, an HTTP status of 400 or more, a wrong echo.
    pub wrong_content: u64,
}

impl Failures {
    /// All failed requests.
    pub fn total(&self) -> u64 {
        self.timeouts + self.resets + self.refused + self.unreachable + self.wrong_content
    }
}

/// Percentiles of the time from sending a request to its whole answer, to three significant digits; the largest is
/// exact. They hide outages (see the crate's documentation): those are in the gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are enough")]
pub struct Latency {
    pub p50_us: u64,
    pub p95_us: u64,
    pub p99_us: u64,
    pub max_us: u64,
}

/// A silence longer than the threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    /// The last good answer before it (or the start), host clock, in nanoseconds of Unix time.
    pub start_unix_ns: u64,
    /// From there to the next good answer (or the stop).
    pub length_us: u64,
}

/// What happened in one interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// The interval's start, from the start of the probe.
    pub start_ms: u64,
    /// Good answers in it.
    pub answered: u64,
    /// Requests that failed in it.
    pub failed: u64,
    /// Bytes received in it.
    pub bytes: u64,
}
