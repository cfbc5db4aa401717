//! The report of a probe. The name of each number contains its unit.

use serde::{Deserialize, Serialize};

/// Everything that a probe has measured from its start to its stop; in a snapshot, until now.
///
/// `sent == answered + failed.total() + in_flight`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// URL of the target.
    pub url: String,
    /// Time of the start by the host's clock, in nanoseconds of Unix time. Later times are this time plus monotonic
    /// time, so that setting the clock during the run does not change them.
    pub started_unix_ns: u64,
    /// Time from the start to the stop.
    pub elapsed_us: u64,
    /// Time between two requests of one connection.
    pub every_us: u64,
    /// Number of parallel connections.
    pub connections: u64,
    /// Number of requests that were started.
    pub sent: u64,
    /// Number of complete and correct answers.
    pub answered: u64,
    /// Number of failed requests by cause.
    pub failed: Failures,
    /// Number of requests without an answer or a failure yet. At the stop they were dropped.
    pub in_flight: u64,
    /// Number of ticks at which no request was sent, because the previous request was outstanding or was retried.
    pub skipped: u64,
    /// Bytes received, including those of wrong or incomplete answers.
    pub bytes: u64,
    /// Number of TCP connections that were established.
    pub connections_opened: u64,
    /// Number of established TCP connections that ended although neither the probe closed them nor the server announced
    /// it.
    pub connections_lost: u64,
    /// Latencies of the good answers; `None` if there was none.
    pub latency: Option<Latency>,
    /// Length above which a silence is a gap.
    pub gap_threshold_us: u64,
    /// Length of the longest silence, even if it is below the threshold.
    pub longest_gap_us: u64,
    /// Number of all gaps.
    pub gaps_total: u64,
    /// The longest [`MAX_GAPS`](crate::MAX_GAPS) gaps, in the order of time.
    pub gaps: Vec<Gap>,
    /// Width of each interval: the configured width, or a power of two times it in a run of more than
    /// [`MAX_INTERVALS`](crate::MAX_INTERVALS) intervals.
    pub interval_ms: u64,
    /// Throughput over time, without holes. The stop may have shortened the last interval.
    pub intervals: Vec<Interval>,
    /// Description of the first failure.
    pub first_failure: Option<String>,
}

/// Numbers of failed requests by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failures {
    /// No complete answer within the timeout.
    pub timeouts: u64,
    /// The connection was reset or closed before the answer was complete.
    pub resets: u64,
    /// The target refused the connection.
    pub refused: u64,
    /// Connecting failed for another reason: no route, host down, out of local ports or descriptors.
    pub unreachable: u64,
    /// The answer was wrong: not HTTP, an HTTP status of 400 or more, a wrong echo.
    pub wrong_content: u64,
}

impl Failures {
    /// Returns the number of all failed requests.
    pub fn total(&self) -> u64 {
        self.timeouts + self.resets + self.refused + self.unreachable + self.wrong_content
    }
}

/// Percentiles of the time from sending a request to its complete answer, to three significant digits. The maximum is
/// exact. Percentiles hide outages (see the crate's documentation); the gaps show them.
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
    /// Time of the last good answer before the gap, or of the start, by the host's clock, in nanoseconds of Unix time.
    pub start_unix_ns: u64,
    /// Time from that answer to the next good answer, or to the stop.
    pub length_us: u64,
}

/// Counts of one interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// Start of the interval, as an offset from the start of the probe.
    pub start_ms: u64,
    /// Number of good answers.
    pub answered: u64,
    /// Number of failed requests.
    pub failed: u64,
    /// Bytes received.
    pub bytes: u64,
}
