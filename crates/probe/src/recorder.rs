//! Where all threads of a probe write down what they saw, and where its report comes from.

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

/// The record of a run. Each note takes the time under the lock, so that the records are in the order of their times.
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
    /// When the run ended; until then nothing.
    end: Option<Duration>,
}

#[derive(Debug)]
struct Live {
    intervals: LiveIntervals,
    /// Dropped at the end, which notifies the reader.
    gaps: Option<SyncSender<Gap>>,
}

impl Recorder {
    /// A record that begins now. Gaps are also sent to `live`, if there is one.
    ///
    /// # Errors
    ///
    /// Only if the latencies' histogram cannot be made.
    pub(crate) fn start(target: &Target, options: &Options, live: Option<SyncSender<Gap>>) -> io::Result<Self> {
        // Up to 19 hours. A good answer can hardly be later than the timeout; what is, counts as the highest.
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

    /// When the record began.
    pub(crate) fn origin(&self) -> Instant {
        self.origin
    }

    /// How long it has been running.
    pub(crate) fn elapsed(&self) -> Duration {
        self.origin.elapsed()
    }

    /// A request begins.
    pub(crate) fn sent(&self) {
        self.lock().sent += 1;
    }

    /// A good answer came, so long after its request.
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

    /// A request failed.
    pub(crate) fn failed(&self, failure: &Failure) {
        let mut record = self.lock();
        let now = self.elapsed();
        failure.count_in(&mut record.failed);
        record.count(now, Counts { failed: 1, ..Counts::default() });
        if record.first_failure.is_none() {
            record.first_failure = Some(failure.describe());
        }
    }

    /// Ticks were left out.
    pub(crate) fn skipped(&self, ticks: u64) {
        if ticks > 0 {
            self.lock().skipped += ticks;
        }
    }

    /// The run is over: the last silence ends.
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

    /// The intervals that ended since the last call; after the end also the one that was cut short.
    pub(crate) fn take_intervals(&self) -> Vec<Interval> {
        let mut record = self.lock();
        let (now, end) = (self.elapsed(), record.end);
        let Some(live) = &mut record.live else { return Vec::new() };
        match end {
            Some(end) => live.intervals.take_all(end),
            None => live.intervals.take_ended(now),
        }
    }

    /// The report of the whole run, or as if it ended now.
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
            // A reader that is too far behind, or gone, does without: the report has it all.
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
        // A bucket's upper edge may lie above the largest value in it.
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
