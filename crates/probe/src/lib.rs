//! The client side of a measurement: sends requests to a service while its VMM, guest or host is replaced, and reports
//! the answers as a client saw them.
//!
//! [`Probe::start`] starts a thread for each connection. [`Probe::stop`] returns the [`Report`]: requests sent,
//! answered and failed, connections opened and lost, latencies, throughput per interval, and the **service gaps**: the
//! silences between consecutive good answers. [`check`] sends one request, like the health check of a VM definition.
//! [`render`] draws a report for users.
//!
//! ```no_run
//! use rekindle_probe::{Options, Probe, Target, render};
//! use std::time::Duration;
//!
//! let target: Target = "http://10.0.0.2/".parse()?;
//! let probe = Probe::start(&target, Options { every: Duration::from_millis(1), ..Options::default() })?;
//! // … replace the VMM …
//! let report = probe.stop();
//! assert_eq!((report.failed.total(), report.connections_lost), (0, 0));
//! println!("{}", render(&report));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is measured
//!
//! **A closed loop on a fixed grid.** Each connection has a tick every [`Options::every`] and at most one outstanding
//! request. If an answer is late, requests do not accumulate: no request is sent at the ticks that pass meanwhile, and
//! [`Report::skipped`] counts them. The grids of `n` connections are shifted against each other, so that `n` requests
//! are sent per `every`, at equal distances.
//!
//! **Latencies are measured from the actual send**, not from the tick. If a connection must be opened first, the time
//! for that is included. An outage of one second is therefore *one* slow request per connection, and hardly changes the
//! percentiles: they have coordinated omission, on purpose. The gaps always show the outage.
//!
//! **A silence** is the time from one good answer to the next, over all connections. The times from the start to the
//! first good answer and from the last to the stop are silences, too. If a service answers every tick, its silences
//! have about the length `every` divided by the number of connections, so that gaps are measured with this precision.
//! Gaps are silences longer than [`Options::gap_threshold`].
//!
//! **After a failure the next request does not wait for its tick.** The first is sent immediately, the following ones
//! after 1, 2, 4 … 50 ms until one is answered. The end of an outage is therefore found within 50 ms, even with a long
//! `every`. After wrong content, the next request waits for its tick, because the service does answer.
//!
//! **A connection is lost** when an established connection ends and the probe has not closed it. A connection whose end
//! the server announces (`Connection: close`) is not lost. When a request times out, the *probe* closes its connection.
//! To measure whether connections survive an outage, set [`Options::timeout`] above the outage's length.
//!
//! The memory is bounded, regardless of the length of the run: see [`MAX_INTERVALS`] and [`MAX_GAPS`].

mod check;
mod client;
mod event;
mod failure;
mod gaps;
mod intervals;
mod netns;
mod options;
mod probe;
mod recorder;
mod render;
mod report;
mod schedule;
mod target;
mod waiter;
mod wire;
mod worker;

pub use check::{CheckError, check};
pub use event::Event;
pub use failure::Failure;
pub use gaps::MAX_GAPS;
pub use intervals::MAX_INTERVALS;
pub use netns::NetnsError;
pub use options::{Options, OptionsError};
pub use probe::{Probe, StartError};
pub use render::render;
pub use report::{Failures, Gap, Interval, Latency, Report};
pub use target::{Scheme, Target, UrlError, UrlFault};
pub use wire::ResolveError;

use std::time::{Duration, Instant};

/// Returns a duration in whole microseconds, at most `u64::MAX`.
fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Returns a duration in whole milliseconds, at most `u64::MAX`.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns a duration in nanoseconds, at most `u64::MAX` (584 years).
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the instant `duration` after `from`, but at most a hundred years after it, so that the sum cannot overflow.
fn later(from: Instant, duration: Duration) -> Instant {
    from + duration.min(Duration::from_secs(100 * 366 * 24 * 3600))
}
