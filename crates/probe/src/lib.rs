//! The client side of a measurement: asks a service again and again while its VMM, guest or host is replaced, and
//! reports what a client saw.
//!
//! [`Probe::start`] puts one thread behind each connection; [`Probe::stop`] gives the [`Report`]: requests sent,
//! answered and failed, connections opened and lost, latencies, throughput per interval and the **service gaps**, the
//! silences between consecutive good answers. [`check`] asks once, as the health probe of a VM definition does, and
//! [`render`] draws a report for people.
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
//! # What is measured, and what is not
//!
//! **A closed loop on a fixed grid.** Each connection has a tick every [`Options::every`] and at most one request
//! outstanding. A late answer does not make requests pile up: the ticks that pass meanwhile are left out and counted as
//! [`Report::skipped`]. The connections' grids are shifted against each other, so that `n` of them ask `n` times per
//! `every`, evenly.
//!
//! **Latencies are as seen from the actual send**, not from the tick (opening a connection first, where that is needed,
//! counts). An outage of one second is therefore *one* slow request per connection and hardly moves the percentiles:
//! they suffer from coordinated omission, on purpose. The outage is in the gaps, which cannot leave it out.
//!
//! **A silence** runs from one good answer to the next, over all connections, and also from the start to the first and
//! from the last to the stop. A service that answers every tick shows silences of about `every` (divided by the
//! connections), so that a gap is known no better than that. Gaps are silences longer than [`Options::gap_threshold`].
//!
//! **After a failure the next request does not wait for its tick.** The first is sent immediately, the following ones
//! after 1, 2, 4 … 50 ms until one is answered, so that the end of an outage is seen within 50 ms even with a long
//! `every`. Wrong content, which comes from a service that does answer, waits for the next tick.
//!
//! **A connection is lost** when an established one ends without the probe having closed it. A server that announces
//! it (`Connection: close`) loses none. A request that times out makes the *probe* close its connection: to see whether
//! connections survive an outage, set [`Options::timeout`] above its length.
//!
//! Memory is bounded however long the run: see [`MAX_INTERVALS`] and [`MAX_GAPS`].

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

/// A duration in whole microseconds, at most `u64::MAX`.
fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// A duration in whole milliseconds, at most `u64::MAX`.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A duration in nanoseconds, at most `u64::MAX` (584 years).
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The instant so much later, at most a hundred years.
fn later(from: Instant, duration: Duration) -> Instant {
    from + duration.min(Duration::from_secs(100 * 366 * 24 * 3600))
}
