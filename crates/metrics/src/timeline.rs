//! Counts the operations in the timeline of a VM, and how long replacements stopped its guest, and keeps the steps of the
//! last one. Each call reads only what was added since the one before it.

use rekindle_vm::rundir::{RunDir, open_record};
use rekindle_vm::timeline::{Entry, Phase};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// Limit of what one call reads of a file. The next call continues.
const MAX_READ_BYTES: usize = 2 << 20;
/// Limit of the operations that are counted by name. Others are counted as [`OTHER`].
const MAX_OPERATIONS: usize = 32;
const MAX_NAME_BYTES: usize = 64;
/// Limit of the steps that are kept of an operation. The longest operation has about 25.
const MAX_STEPS: usize = 48;
/// Limit of the kept characters of the name of an operation or a step.
const MAX_TEXT_CHARS: usize = 64;
const OTHER: &str = "other";
/// The longest gap between two steps of one operation.
const MAX_GAP_NS: u64 = 1_000_000;
/// Upper bounds of the buckets of stopped times, in µs.
const BOUNDS_US: [u64; 12] = [
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    30_000_000,
    300_000_000,
];

/// What is counted of one operation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OperationCounts {
    pub count: u64,
    /// Only of replacements.
    pub stopped: Option<StoppedTimes>,
}

/// Stopped times: count of each bucket, with one more for what is above the last bound.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StoppedTimes {
    counts: [u64; BOUNDS_US.len() + 1],
    pub sum_us: u64,
}

impl StoppedTimes {
    fn add(&mut self, us: u64) {
        let bucket = BOUNDS_US.iter().position(|bound| us <= *bound).unwrap_or(BOUNDS_US.len());
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
        self.sum_us = self.sum_us.saturating_add(us);
    }

    pub(crate) fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns upper bound in µs and count of each bucket.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        BOUNDS_US.into_iter().zip(self.counts)
    }
}

/// The operation that was recorded last, as far as its steps have been read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LastOperation {
    pub name: String,
    /// Host clock, in µs since 1970.
    pub started_us: u64,
    pub steps: Vec<OperationStep>,
    /// Number of steps that are not kept.
    pub omitted_steps: u64,
}

/// A step of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OperationStep {
    pub phase: Phase,
    pub name: String,
    /// Time since the start of the operation, in µs.
    pub offset_us: u64,
    pub us: u64,
}

impl LastOperation {
    /// Returns how long the guest was stopped, in µs; `None` if it was not, or the end of that time is not recorded.
    pub(crate) fn stopped_us(&self) -> Option<u64> {
        let stopped = self.steps.iter().find(|step| step.phase == Phase::Suspend)?;
        let resumed = self.steps.iter().rfind(|step| step.phase == Phase::Resume)?;
        resumed.offset_us.saturating_add(resumed.us).checked_sub(stopped.offset_us)
    }
}

/// Returns the start of a text that has no limit in a file.
pub(crate) fn shortened(text: &str, max_chars: usize) -> String {
    match text.char_indices().nth(max_chars) {
        Some((end, _)) => format!("{}\u{2026}", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// A position in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    device: u64,
    inode: u64,
    offset: u64,
}

/// The steps of the operation that was read last.
#[derive(Debug)]
struct CurrentOperation {
    name: String,
    phase: Phase,
    end_ns: u64,
    suspended_ns: Option<u64>,
    resumed_ns: Option<u64>,
    is_counted: bool,
    start_ns: u64,
    kept: LastOperation,
}

/// The counts of one VM.
#[derive(Debug, Default)]
pub(crate) struct TimelineCounts {
    operations: BTreeMap<String, OperationCounts>,
    position: Option<Position>,
    current: Option<CurrentOperation>,
}

impl TimelineCounts {
    /// Reads what was added to the timeline.
    pub(crate) fn update(&mut self, rundir: &RunDir) {
        let (newer, older) = (rundir.file("timeline.jsonl"), rundir.file("timeline.jsonl.1"));
        let is_current = |path: &Path, position: Position| {
            path.symlink_metadata().is_ok_and(|file| {
                (file.dev(), file.ino()) == (position.device, position.inode) && file.len() >= position.offset
            })
        };
        // The older file has what was added before the timeline was rotated.
        if !self.position.is_some_and(|position| is_current(&newer, position)) {
            let is_rotated = self.position.is_none_or(|position| is_current(&older, position));
            if is_rotated && self.read_file(&older).is_err() {
                self.position = None;
            }
        }
        if self.read_file(&newer).is_err() {
            self.position = None;
        }
        self.finish_if_resumed();
    }

    pub(crate) fn operations(&self) -> impl Iterator<Item = (&str, &OperationCounts)> {
        self.operations.iter().map(|(name, counts)| (name.as_str(), counts))
    }

    pub(crate) fn last_operation(&self) -> Option<&LastOperation> {
        self.current.as_ref().map(|current| &current.kept)
    }

    fn read_file(&mut self, path: &Path) -> io::Result<()> {
        let file = open_record(path)?;
        let metadata = file.metadata()?;
        let start = Position { device: metadata.dev(), inode: metadata.ino(), offset: 0 };
        let known = self.position.filter(|known| {
            (known.device, known.inode) == (start.device, start.inode) && known.offset <= metadata.len()
        });
        let position = known.unwrap_or(start);
        let end =
            if metadata.len() == position.offset { position.offset } else { self.read_from(&file, position.offset)? };
        self.position = Some(Position { offset: end, ..position });
        Ok(())
    }

    /// Reads whole lines from `offset` on. Returns the offset after them.
    fn read_from(&mut self, file: &File, offset: u64) -> io::Result<u64> {
        let mut buffer = vec![0; MAX_READ_BYTES];
        let mut length = 0;
        while let Some(rest) = buffer.get_mut(length..).filter(|rest| !rest.is_empty()) {
            match file.read_at(rest, offset + length as u64)? {
                0 => break,
                bytes => length += bytes,
            }
        }
        let text = buffer.get(..length).unwrap_or_default();
        let Some(last_newline) = text.iter().rposition(|byte| *byte == b'\n') else {
            // A line that does not fit is skipped; an incomplete one is read when it is complete.
            return Ok(offset + if length == MAX_READ_BYTES { length as u64 } else { 0 });
        };
        for line in text.get(..last_newline).unwrap_or_default().split(|byte| *byte == b'\n') {
            if let Ok(entry) = serde_json::from_slice(line) {
                self.add(&entry);
            }
        }
        Ok(offset + last_newline as u64 + 1)
    }

    fn add(&mut self, entry: &Entry) {
        let end_ns = entry.start_mono_ns.saturating_add(entry.us.saturating_mul(1000));
        let continues = self.current.as_ref().is_some_and(|current| {
            current.name == entry.operation
                && current.phase <= entry.phase
                && entry.start_mono_ns.saturating_sub(current.end_ns) <= MAX_GAP_NS
        });
        if !continues {
            self.finish_if_resumed();
            let name = self.label(&entry.operation);
            self.operations.entry(name).or_default().count += 1;
            self.current = Some(CurrentOperation {
                name: entry.operation.clone(),
                phase: entry.phase,
                end_ns,
                suspended_ns: None,
                resumed_ns: None,
                is_counted: false,
                start_ns: entry.start_mono_ns,
                kept: LastOperation {
                    name: shortened(&entry.operation, MAX_TEXT_CHARS),
                    started_us: entry.start_host_us,
                    steps: Vec::new(),
                    omitted_steps: 0,
                },
            });
        }
        let Some(current) = &mut self.current else { return };
        if current.kept.steps.len() < MAX_STEPS {
            current.kept.steps.push(OperationStep {
                phase: entry.phase,
                name: shortened(&entry.step, MAX_TEXT_CHARS),
                offset_us: entry.start_mono_ns.saturating_sub(current.start_ns) / 1000,
                us: entry.us,
            });
        } else {
            current.kept.omitted_steps += 1;
        }
        (current.phase, current.end_ns) = (entry.phase, end_ns);
        match entry.phase {
            Phase::Suspend => {
                current.suspended_ns.get_or_insert(entry.start_mono_ns);
            }
            Phase::Resume => current.resumed_ns = Some(end_ns),
            Phase::Prepare | Phase::Renew | Phase::Settle => {}
        }
    }

    /// Counts the stopped time of the current operation. A recorder writes all steps of an operation together, so the
    /// guest has resumed if a step of that phase was read.
    fn finish_if_resumed(&mut self) {
        let Some(current) = &mut self.current else { return };
        let (Some(suspended), Some(resumed)) = (current.suspended_ns, current.resumed_ns) else { return };
        let is_replacement = current.name.starts_with("replace-qemu");
        if current.is_counted || !is_replacement {
            return;
        }
        current.is_counted = true;
        let name = current.name.clone();
        let name = self.label(&name);
        let counts = self.operations.entry(name).or_default();
        counts.stopped.get_or_insert_default().add(resumed.saturating_sub(suspended) / 1000);
    }

    /// Returns the label of an operation. The number of labels is limited.
    fn label(&self, name: &str) -> String {
        let is_known = self.operations.contains_key(name);
        let has_room = self.operations.len() < MAX_OPERATIONS && name.len() <= MAX_NAME_BYTES;
        if is_known || has_room { name.to_owned() } else { OTHER.to_owned() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use rekindle_vm::timeline::append;
    use std::fs::{self, OpenOptions};
    use std::io::Write;

    const WARM: &str = "replace-qemu --how warm";

    fn entry(operation: &str, phase: Phase, start_ms: u64, ms: u64) -> Entry {
        Entry {
            vm: "web".into(),
            operation: operation.into(),
            phase,
            step: "step".into(),
            start_host_us: 0,
            start_mono_ns: start_ms * 1_000_000,
            us: ms * 1000,
        }
    }

    /// A replacement that stops the guest for `stopped_ms`.
    fn replacement(start_ms: u64, stopped_ms: u64) -> Vec<Entry> {
        let resume_ms = start_ms + 10 + stopped_ms;
        vec![
            entry(WARM, Phase::Prepare, start_ms, 10),
            entry(WARM, Phase::Suspend, start_ms + 10, stopped_ms - 1),
            entry(WARM, Phase::Resume, resume_ms - 1, 1),
            entry(WARM, Phase::Settle, resume_ms, 5),
        ]
    }

    fn counts(timeline: &TimelineCounts) -> (u64, u64, u64) {
        let (_, counts) = timeline.operations().find(|(name, _)| *name == WARM).unwrap();
        let stopped = counts.stopped.clone().unwrap_or_default();
        (counts.count, stopped.count(), stopped.sum_us)
    }

    #[test]
    fn replacements_are_counted_once_also_over_a_rotation() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let mut timeline = TimelineCounts::default();
        timeline.update(&rundir);
        assert_eq!(timeline.operations().count(), 0);
        append(&rundir, &replacement(1000, 20)).unwrap();
        timeline.update(&rundir);
        timeline.update(&rundir);
        assert_eq!(counts(&timeline), (1, 1, 20_000));
        append(&rundir, &replacement(2000, 30)).unwrap();
        fs::rename(rundir.file("timeline.jsonl"), rundir.file("timeline.jsonl.1")).unwrap();
        append(&rundir, &replacement(3000, 40)).unwrap();
        timeline.update(&rundir);
        assert_eq!(counts(&timeline), (3, 3, 90_000));
        let mut later = TimelineCounts::default();
        later.update(&rundir);
        assert_eq!(counts(&later), (3, 3, 90_000), "another exporter counts the same");
    }

    #[test]
    fn the_steps_of_the_last_operation_are_kept() {
        let mut timeline = TimelineCounts::default();
        assert_eq!(timeline.last_operation(), None);
        for entry in replacement(1000, 20).iter().chain(&replacement(2000, 30)) {
            timeline.add(entry);
        }
        let last = timeline.last_operation().unwrap();
        assert_eq!((last.name.as_str(), last.steps.len(), last.stopped_us()), (WARM, 4, Some(30_000)));
        assert_eq!((last.steps[1].offset_us, last.steps[1].us), (10_000, 29_000));
        for number in 0..100 {
            timeline.add(&entry(&"\u{e9}".repeat(1000), Phase::Prepare, 9000 + number, 1));
        }
        let last = timeline.last_operation().unwrap();
        assert_eq!((last.steps.len(), last.omitted_steps, last.stopped_us()), (MAX_STEPS, 52, None));
        assert_eq!(last.name.chars().count(), MAX_TEXT_CHARS + 1);
    }

    #[test]
    fn an_incomplete_line_is_read_when_it_is_complete() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let line = serde_json::to_string(&entry("run", Phase::Prepare, 1, 1)).unwrap();
        let mut file = OpenOptions::new().create(true).append(true).open(rundir.file("timeline.jsonl")).unwrap();
        file.write_all(&line.as_bytes()[..20]).unwrap();
        let mut timeline = TimelineCounts::default();
        timeline.update(&rundir);
        assert_eq!(timeline.operations().count(), 0);
        file.write_all(&line.as_bytes()[20..]).unwrap();
        file.write_all(b"\nno JSON\n\xff\xfe\n").unwrap();
        timeline.update(&rundir);
        assert_eq!(timeline.operations().map(|(name, counts)| (name, counts.count)).collect::<Vec<_>>(), [("run", 1)]);
    }

    #[test]
    fn the_number_of_labels_is_limited() {
        let mut timeline = TimelineCounts::default();
        for number in 0..1000 {
            timeline.add(&entry(
                &format!("operation {number}"),
                Phase::Resume,
                u64::MAX / 1_000_000 - number,
                u64::MAX / 1000,
            ));
        }
        timeline.add(&entry(&"x".repeat(1000), Phase::Resume, 0, 0));
        assert_eq!(timeline.operations().count(), MAX_OPERATIONS + 1);
        assert!(timeline.operations().any(|(name, _)| name == OTHER));
    }
}
