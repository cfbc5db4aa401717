//! The timeline of a VM: `timeline.jsonl`, one step of an operation a line.
//!
//! A step is recorded when it ends. Each step has the time of the host clock in microseconds and of the monotonic
//! clock in nanoseconds.

use crate::rundir::RunDir;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{SystemTime, UNIX_EPOCH};

const FILE_NAME: &str = "timeline.jsonl";
/// Length in bytes above which the next operation starts a new file. One older file is kept, as `timeline.jsonl.1`.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The phases of every technique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Everything that can be done while the guest still runs.
    Prepare,
    /// The guest is stopped and its state saved.
    Suspend,
    /// The replaced part, e.g. QEMU, is renewed.
    Renew,
    /// The guest is resumed.
    Resume,
    /// Files and processes that are no longer needed are removed.
    Settle,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Prepare => "prepare",
            Self::Suspend => "suspend",
            Self::Renew => "renew",
            Self::Resume => "resume",
            Self::Settle => "settle",
        })
    }
}

/// One line of the timeline: a step with its duration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Name of the VM.
    pub vm: String,
    /// The operation, e.g. `replace-qemu --how warm`.
    pub operation: String,
    /// Phase of the operation.
    pub phase: Phase,
    /// Step of the phase.
    pub step: String,
    /// Start of the step: host clock, microseconds since 1970.
    pub start_host_us: u64,
    /// Start of the step: monotonic clock, nanoseconds.
    pub start_mono_ns: u64,
    /// Duration in microseconds.
    pub us: u64,
}

/// Returns the host clock, in microseconds since 1970.
#[must_use]
pub fn host_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
}

/// Returns the monotonic clock, in nanoseconds.
#[must_use]
pub fn mono_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A moment, by both clocks.
#[derive(Debug, Clone, Copy)]
struct Clocks {
    host_us: u64,
    mono_ns: u64,
}

impl Clocks {
    fn read() -> Self {
        Self { host_us: host_us(), mono_ns: mono_ns() }
    }
}

/// A collector of the steps of one operation. It keeps them in memory, so that writing them costs no time while the
/// guest is stopped.
#[derive(Debug)]
pub struct Recorder {
    vm: String,
    operation: String,
    entries: Vec<Entry>,
    phase: Phase,
    step_start: Clocks,
}

impl Recorder {
    /// Starts the first step, in the phase `prepare`.
    #[must_use]
    pub fn new(vm: &str, operation: &str) -> Self {
        Self {
            vm: vm.into(),
            operation: operation.into(),
            entries: Vec::new(),
            phase: Phase::Prepare,
            step_start: Clocks::read(),
        }
    }

    /// Starts `phase` and its first step.
    pub fn phase(&mut self, phase: Phase) {
        self.phase = phase;
        self.step_start = Clocks::read();
    }

    /// Ends the current step, names it `step`, and starts the next one.
    pub fn step(&mut self, step: &str) {
        let now = Clocks::read();
        self.entries.push(Entry {
            vm: self.vm.clone(),
            operation: self.operation.clone(),
            phase: self.phase,
            step: step.into(),
            start_host_us: self.step_start.host_us,
            start_mono_ns: self.step_start.mono_ns,
            us: (now.mono_ns - self.step_start.mono_ns) / 1000,
        });
        self.step_start = now;
    }

    /// Returns the steps so far.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Appends the steps to the VM's timeline. A failure is only logged: it is no reason to undo the operation.
    pub fn write(&self, rundir: &RunDir) {
        if let Err(e) = append(rundir, &self.entries) {
            tracing::warn!("{}: {e}", rundir.file(FILE_NAME).display());
        }
    }
}

/// Appends steps to the timeline of a VM.
///
/// # Errors
/// When the file cannot be rotated or written.
pub fn append(rundir: &RunDir, entries: &[Entry]) -> io::Result<()> {
    let mut text = Vec::new();
    for entry in entries {
        serde_json::to_writer(&mut text, entry)?;
        text.push(b'\n');
    }
    let path = rundir.file(FILE_NAME);
    // A guest that reboots itself again and again extends the timeline without end.
    if fs::metadata(&path).is_ok_and(|metadata| metadata.len() > MAX_FILE_BYTES) {
        fs::rename(&path, path.with_extension("jsonl.1"))?;
    }
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)?.write_all(&text)
}

/// Returns the timeline of a VM, oldest step first. An incomplete last line, left by a crash, is left out.
///
/// # Errors
/// When the file exists but cannot be read.
pub fn read(rundir: &RunDir) -> io::Result<Vec<Entry>> {
    match fs::read_to_string(rundir.file(FILE_NAME)) {
        Ok(text) => Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_does_not_grow_for_ever() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let mut recorder = Recorder::new("web", "reboot --how warm-cache");
        (0..200).for_each(|_| recorder.step("a step of a guest that reboots itself"));
        (0..100).for_each(|_| recorder.write(&rundir));
        let files = fs::read_dir(rundir.path()).unwrap();
        let lengths: Vec<_> = files.map(|file| file.unwrap().metadata().unwrap().len()).collect();
        assert!(lengths.len() == 2 && lengths.iter().sum::<u64>() < 3 * MAX_FILE_BYTES, "{lengths:?}");
        assert_eq!(read(&rundir).unwrap().last(), recorder.entries().last());
    }

    #[test]
    fn steps_follow_one_another_without_a_gap_and_are_read_back() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let mut recorder = Recorder::new("web", "replace-qemu --how warm");
        recorder.step("spawn");
        recorder.step("wait");
        recorder.phase(Phase::Suspend);
        recorder.step("stop");
        recorder.write(&rundir);
        fs::write(rundir.file(FILE_NAME), fs::read_to_string(rundir.file(FILE_NAME)).unwrap() + "{\"vm\": \"we")
            .unwrap();
        let entries = read(&rundir).unwrap();
        assert_eq!(entries, recorder.entries());
        assert_eq!(entries[2].phase, Phase::Suspend);
        assert!(entries[1].start_mono_ns >= entries[0].start_mono_ns + entries[0].us * 1000);
    }
}
