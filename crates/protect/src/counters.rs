//! `protect-counters.json`: what a protector has done since it started, for `rekindle metrics`.
//!
//! Protectors have no socket. A protector writes this record at most once a second, and without waiting for the disk:
//! it may be lost in a crash of the host. All counters start at zero with the protector.

use crate::event::{CheckpointReport, ProtectEvent};
use rekindle_store::StoreUrl;
use rekindle_vm::rundir::{RunDir, read_record, replace_unsynced};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The shortest time between two writes of the record.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// Upper bounds of the buckets of pauses, in µs.
const PAUSE_BOUNDS_US: [u64; 12] =
    [500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 5_000_000];
/// Upper bounds of the buckets of checkpoints and commits, in µs.
const CHECKPOINT_BOUNDS_US: [u64; 12] =
    [5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000, 5_000_000, 15_000_000, 60_000_000];
/// Limit of the buckets in a record.
const MAX_BUCKETS: usize = 64;

/// Content of `protect-counters.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProtectCounters {
    /// The configured interval, in ms.
    pub every_ms: u64,
    /// Value of `--max-lag`, in ms.
    pub max_lag_ms: Option<u64>,
    /// Committed checkpoints.
    pub checkpoints: u64,
    /// Those of them that have all of the guest's memory.
    pub full_checkpoints: u64,
    /// Guest-stopped times.
    pub pauses: DurationHistogram,
    /// Times from the start of a checkpoint, before the guest was stopped, to the commit.
    pub durations: DurationHistogram,
    /// Times from the guest's resume to the commit.
    pub commits: DurationHistogram,
    /// Time between the last two pauses, in ms.
    pub interval_ms: Option<u64>,
    /// Bytes of pages that may have changed.
    pub dirty_bytes: u64,
    /// Bytes that were written to the store.
    pub written_bytes: u64,
    /// How often the newest checkpoint was older than `max_lag_ms`.
    pub lag_exceeded: u64,
    /// Failed attempts to write the store.
    pub store_failures: u64,
    /// The last attempt to write the store has failed.
    pub is_store_away: bool,
    /// No checkpoint is possible for now, for a reason other than the store.
    pub is_waiting: bool,
    /// How often tracking has started again.
    pub tracking_restarts: u64,
    /// Space of the file system that has the store, if the store is a directory.
    pub store_space: Option<StoreSpace>,
}

/// Space of a file system, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreSpace {
    pub size: u64,
    /// Available to the protector's user.
    pub available: u64,
}

/// Counts of durations. The record has the bounds, so that a protector of another version can be read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DurationHistogram {
    /// Upper bound in µs and count of each bucket, not cumulative.
    pub buckets: Vec<(u64, u64)>,
    /// Durations above the last bound.
    pub above: u64,
    pub sum_us: u64,
}

impl DurationHistogram {
    fn with_bounds(bounds: &[u64]) -> Self {
        Self { buckets: bounds.iter().map(|&bound| (bound, 0)).collect(), ..Self::default() }
    }

    fn add(&mut self, us: u64) {
        let bucket = self.buckets.iter_mut().find(|(bound, _)| us <= *bound).map(|(_, count)| count);
        *bucket.unwrap_or(&mut self.above) += 1;
        self.sum_us = self.sum_us.saturating_add(us);
    }

    /// Returns the number of durations. `None`: the record is damaged.
    #[must_use]
    pub fn count(&self) -> Option<u64> {
        let is_sorted = self.buckets.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let counts = self.buckets.iter().map(|&(_, count)| count);
        let count = counts.chain([self.above]).try_fold(0u64, u64::checked_add)?;
        (is_sorted && self.buckets.len() <= MAX_BUCKETS).then_some(count)
    }
}

impl ProtectCounters {
    /// Reads the record of a VM. A torn or unreadable record counts as none.
    #[must_use]
    pub fn read(rundir: &RunDir) -> Option<Self> {
        serde_json::from_slice(&read_record(&path(rundir)).ok()?).ok()
    }

    fn note(&mut self, event: &ProtectEvent) {
        match event {
            ProtectEvent::Checkpoint(report) => self.note_checkpoint(report),
            ProtectEvent::Lag { .. } => self.lag_exceeded += 1,
            ProtectEvent::Waiting { .. } => self.is_waiting = true,
            ProtectEvent::Moved { .. } => self.tracking_restarts += 1,
            ProtectEvent::Attached { .. }
            | ProtectEvent::Filled
            | ProtectEvent::Compared(_)
            | ProtectEvent::StoreAway { .. }
            | ProtectEvent::StoreBack => {}
        }
    }

    fn note_checkpoint(&mut self, report: &CheckpointReport) {
        self.checkpoints += 1;
        self.full_checkpoints += u64::from(report.full);
        self.pauses.add(report.stopped_us);
        self.durations.add(report.took_us);
        self.commits.add(report.commit_us);
        self.interval_ms = report.interval_ms;
        self.dirty_bytes = self.dirty_bytes.saturating_add(report.dirty_bytes);
        self.written_bytes = self.written_bytes.saturating_add(report.bytes);
        (self.is_store_away, self.is_waiting) = (false, false);
    }
}

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("protect-counters.json")
}

/// The counters of this protector, and when they were written.
pub(crate) struct CounterFile {
    path: PathBuf,
    store: StoreUrl,
    counters: ProtectCounters,
    written_at: Option<Instant>,
    is_changed: bool,
    /// A checkpoint was committed since the store's space was determined. The store answers then.
    has_committed: bool,
}

impl CounterFile {
    /// `every` and `max_lag` are the protector's settings.
    pub(crate) fn new(rundir: &RunDir, store: &StoreUrl, every: Duration, max_lag: Option<Duration>) -> Self {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let counters = ProtectCounters {
            every_ms: ms(every),
            max_lag_ms: max_lag.map(ms),
            pauses: DurationHistogram::with_bounds(&PAUSE_BOUNDS_US),
            durations: DurationHistogram::with_bounds(&CHECKPOINT_BOUNDS_US),
            commits: DurationHistogram::with_bounds(&CHECKPOINT_BOUNDS_US),
            ..ProtectCounters::default()
        };
        Self {
            path: path(rundir),
            store: store.clone(),
            counters,
            written_at: None,
            is_changed: true,
            has_committed: false,
        }
    }

    pub(crate) fn note(&mut self, event: &ProtectEvent) {
        self.counters.note(event);
        self.is_changed = true;
        self.has_committed |= matches!(event, ProtectEvent::Checkpoint(_));
        self.write_if_due();
    }

    /// Notes a failed attempt to write the store.
    pub(crate) fn note_store_failure(&mut self) {
        self.counters.store_failures += 1;
        self.counters.is_store_away = true;
        self.is_changed = true;
        self.write_if_due();
    }

    /// Writes the record if it has changed and was not written in the last second.
    pub(crate) fn write_if_due(&mut self) {
        if self.is_changed && self.written_at.is_none_or(|written_at| written_at.elapsed() >= WRITE_INTERVAL) {
            self.write();
        }
    }

    fn write(&mut self) {
        if std::mem::take(&mut self.has_committed) {
            self.counters.store_space = store_space(&self.store);
        }
        let written = serde_json::to_vec(&self.counters).map_err(Into::into);
        if let Err(e) = written.and_then(|text| replace_unsynced(&self.path, &text)) {
            tracing::debug!("{}: {e}", self.path.display());
        }
        (self.written_at, self.is_changed) = (Some(Instant::now()), false);
    }
}

impl Drop for CounterFile {
    fn drop(&mut self) {
        if self.is_changed {
            self.write();
        }
    }
}

fn store_space(store: &StoreUrl) -> Option<StoreSpace> {
    let StoreUrl::Directory(directory) = store else { return None };
    let space = rustix::fs::statvfs(directory).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
    Some(StoreSpace { size: bytes(space.f_blocks), available: bytes(space.f_bavail) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn durations_are_in_the_first_bucket_that_has_room_for_them() {
        let mut histogram = DurationHistogram::with_bounds(&[10, 20]);
        [0, 10, 11, 21, u64::MAX].into_iter().for_each(|us| histogram.add(us));
        assert_eq!((histogram.buckets.as_slice(), histogram.above), (&[(10, 2), (20, 1)][..], 2));
        assert_eq!((histogram.count(), histogram.sum_us), (Some(5), u64::MAX));
        histogram.above = u64::MAX;
        assert_eq!(histogram.count(), None, "too many");
        let unsorted = DurationHistogram { buckets: vec![(20, 1), (10, 1)], ..DurationHistogram::default() };
        assert_eq!(unsorted.count(), None);
    }

    #[test]
    fn counters_are_written_at_most_once_a_second_and_at_the_end() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        assert_eq!(ProtectCounters::read(&rundir), None);
        let store = StoreUrl::Directory(root.path().to_owned());
        let mut file = CounterFile::new(&rundir, &store, Duration::from_millis(500), None);
        file.note_store_failure();
        let first = ProtectCounters::read(&rundir).unwrap();
        assert!(first.is_store_away && first.store_failures == 1 && first.every_ms == 500, "{first:?}");
        file.note(&ProtectEvent::Waiting { state: "paused".into() });
        assert_eq!(ProtectCounters::read(&rundir).unwrap(), first, "within a second");
        drop(file);
        assert!(ProtectCounters::read(&rundir).unwrap().is_waiting);
        assert!(store_space(&store).unwrap().size > 0);
    }

    #[test]
    fn a_damaged_record_is_no_record() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        for text in ["", "{", "3", r#"{"checkpoints": -1}"#, r#"{"checkpoints": 1e99}"#] {
            fs::write(path(&rundir), text).unwrap();
            assert_eq!(ProtectCounters::read(&rundir), None, "{text}");
        }
        fs::write(path(&rundir), r#"{"checkpoints": 3, "of_a_later_version": true}"#).unwrap();
        assert_eq!(ProtectCounters::read(&rundir).unwrap().checkpoints, 3);
    }
}
