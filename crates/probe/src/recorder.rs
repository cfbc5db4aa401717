//! The record in which all threads of a probe write their observations, and from which its report is made.

use std::io;
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hdrhistogram::Histogram;

use crate::failure::Failure;
use crate::gaps::{Gaps, Silence};
use crate::intervals::{Counts, Intervals, LiveIntervals};
use crate::options::Options;
use crate::report::{Failures, Gap, Interval, Latency, Report};
use crate::target::Target;
use crate::wire::Observer;
use crate::{micros, nanos};

/// The record of a run. Each method takes the time under the lock, so that entries are in the order of their times.
#[derive(Debug)]
pub(crate) struct Recorder {
    url: String,
    options: Options,
    origin: Instant,
    started_unix_ns: u64,
    record: Mutex<Record>,
}

#[derive(Debug)]
struct Record {
    sent: u64,
    answered: u64,
    failed: Failures,
    skipped: u64,
    bytes: u64,
    connections_opened: u64,
    connections_lost: u64,
    latencies: Histogram<u64>,
    slowest_us: u64,
    gaps: Gaps,
    intervals: Intervals,
    first_failure: Option<String>,
    live: Option<Live>,
    /// Time when the run ended; `None` while it runs.
    end: Option<Duration>,
}

#[derive(Debug)]
struct Live {
    intervals: LiveIntervals,
    /// Dropped at the end of the run, which notifies the reader.
    gaps: Option<SyncSender<Gap>>,
}

impl Recorder {
    /// Returns a record that starts now. Gaps are also sent to `live`.
    ///
    /// # Errors
    ///
    /// Only if the histogram of latencies cannot be created.
    pub(crate) fn start(target: &Target, options: &Options, live: Option<SyncSender<Gap>>) -> io::Result<Self> {
        // Latencies up to 19 hours, in microseconds. A good answer is hardly later than the timeout; later ones count
        // as the maximum.
        let latencies = Histogram::new_with_bounds(1, 1 << 36, 3).map_err(io::Error::other)?;
        let record = Record {
            sent: 0,
            answered: 0,
            failed: Failures::default(),
            skipped: 0,
            bytes: 0,
            connections_opened: 0,
            connections_lost: 0,
            latencies,
            slowest_us: 0,
            gaps: Gaps::new(options.effective_gap_threshold()),
            intervals: Intervals::new(options.interval),
            first_failure: None,
            live: live.map(|gaps| Live { intervals: LiveIntervals::new(options.interval), gaps: Some(gaps) }),
            end: None,
        };
        let (origin, clock) = (Instant::now(), SystemTime::now());
        Ok(Self {
            url: target.to_string(),
            options: options.clone(),
            origin,
            started_unix_ns: clock.duration_since(UNIX_EPOCH).map_or(0, nanos),
            record: Mutex::new(record),
        })
    }

    /// Returns the time when the record started.
    pub(crate) fn origin(&self) -> Instant {
        self.origin
    }

    /// Returns the time since the record started.
    pub(crate) fn elapsed(&self) -> Duration {
        self.origin.elapsed()
    }

    /// Records that a request was sent.
    pub(crate) fn sent(&self) {
        self.lock().sent += 1;
    }

    /// Records a good answer and the time since its request was sent.
    pub(crate) fn answered(&self, latency: Duration) {
        let mut record = self.lock();
        let now = self.elapsed();
        record.answered += 1;
        let latency = micros(latency);
        record.latencies.saturating_record(latency.max(1));
        record.slowest_us = record.slowest_us.max(latency);
        record.count(now, Counts { answered: 1, ..Counts::default() });
        self.end_silence(&mut record, now);
    }

    /// Records that a request failed.
    pub(crate) fn failed(&self, failure: &Failure) {
        let mut record = self.lock();
        let now = self.elapsed();
        failure.count_in(&mut record.failed);
        record.count(now, Counts { failed: 1, ..Counts::default() });
        if record.first_failure.is_none() {
            record.first_failure = Some(failure.describe());
        }
    }

    /// Records the number of ticks at which no request was sent.
    pub(crate) fn skipped(&self, ticks: u64) {
        if ticks > 0 {
            self.lock().skipped += ticks;
        }
    }

    /// Records the end of the run, which ends the last silence.
    pub(crate) fn end(&self) {
        let mut record = self.lock();
        if record.end.is_none() {
            let now = self.elapsed();
            record.end = Some(now);
            record.count(now, Counts::default());
            self.end_silence(&mut record, now);
            if let Some(live) = &mut record.live {
                live.gaps = None;
            }
        }
    }

    /// Removes and returns the intervals that ended since the last call. After the end of the run, also the incomplete
    /// one.
    pub(crate) fn take_intervals(&self) -> Vec<Interval> {
        let mut record = self.lock();
        let (now, end) = (self.elapsed(), record.end);
        let Some(live) = &mut record.live else { return Vec::new() };
        match end {
            Some(end) => live.intervals.take_all(end),
            None => live.intervals.take_ended(now),
        }
    }

    /// Returns the report of the whole run, or as if the run ended now.
    pub(crate) fn report(&self) -> Report {
        let record = self.lock();
        let elapsed = record.end.unwrap_or_else(|| self.elapsed());
        let (mut gaps, mut intervals) = (record.gaps.clone(), record.intervals.clone());
        gaps.end_silence(elapsed);
        intervals.add(elapsed, Counts::default());
        Report {
            url: self.url.clone(),
            started_unix_ns: self.started_unix_ns,
            elapsed_us: micros(elapsed),
            every_us: micros(self.options.every),
            connections: self.options.connections as u64,
            sent: record.sent,
            answered: record.answered,
            failed: record.failed,
            in_flight: record.sent.saturating_sub(record.answered + record.failed.total()),
            skipped: record.skipped,
            bytes: record.bytes,
            connections_opened: record.connections_opened,
            connections_lost: record.connections_lost,
            latency: record.latency(),
            gap_threshold_us: micros(self.options.effective_gap_threshold()),
            longest_gap_us: micros(gaps.longest()),
            gaps_total: gaps.total(),
            gaps: gaps.kept().iter().map(|silence| self.gap(*silence)).collect(),
            interval_ms: intervals.width_ms(),
            intervals: intervals.list(),
            first_failure: record.first_failure.clone(),
        }
    }

    fn end_silence(&self, record: &mut Record, at: Duration) {
        let ended = record.gaps.end_silence(at);
        if let (Some(silence), Some(Live { gaps: Some(gaps), .. })) = (ended, &record.live) {
            // A reader that is too far behind, or has ended, does not get the gap. The report contains it.
            let _ = gaps.try_send(self.gap(silence));
        }
    }

    fn gap(&self, silence: Silence) -> Gap {
        Gap {
            start_unix_ns: self.started_unix_ns.saturating_add(nanos(silence.start)),
            length_us: micros(silence.length),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Record {
    fn count(&mut self, at: Duration, counts: Counts) {
        self.intervals.add(at, counts);
        if let Some(live) = &mut self.live {
            live.intervals.add(at, counts);
        }
    }

    fn latency(&self) -> Option<Latency> {
        // The upper edge of a bucket may be above the largest value in it.
        let percentile = |q| self.latencies.value_at_quantile(q).min(self.slowest_us);
        (self.answered > 0).then(|| Latency {
            p50_us: percentile(0.50),
            p95_us: percentile(0.95),
            p99_us: percentile(0.99),
            max_us: self.slowest_us,
        })
    }
}

impl Observer for Recorder {
    fn opened(&self) {
        self.lock().connections_opened += 1;
    }

    fn lost(&self) {
        self.lock().connections_lost += 1;
    }

    fn received(&self, bytes: u64) {
        let mut record = self.lock();
        let now = self.elapsed();
        record.bytes += bytes;
        record.count(now, Counts { bytes, ..Counts::default() });
    }
}
