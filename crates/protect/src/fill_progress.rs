//! `fill-progress.json`: how much of a guest's memory its pager has still to load, for `rekindle metrics`.
//!
//! A confined pager has no access to the run directory, and must not wait for its broker to report progress: it opens
//! the file before it is confined, and replaces its content by one write of constant length. A reader may find a mixture
//! of two writes. So each number is there twice.

use rekindle_vm::rundir::{RunDir, read_record};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The shortest time between two writes.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// Length of the file: room for the longest numbers.
const FILE_BYTES: usize = 160;

/// Progress of a fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FillProgress {
    /// Bytes that the pager fills.
    pub total: u64,
    /// Bytes that are still missing.
    pub missing: u64,
    #[serde(rename = "total_again")]
    total_check: u64,
    #[serde(rename = "missing_again")]
    missing_check: u64,
}

impl FillProgress {
    fn new(total: u64, missing: u64) -> Self {
        Self { total, missing, total_check: total, missing_check: missing }
    }

    /// Reads the progress of the pager of a VM. A file that is being written counts as none.
    #[must_use]
    pub fn read(rundir: &RunDir) -> Option<Self> {
        let progress: Self = serde_json::from_slice(&read_record(&path(rundir)).ok()?).ok()?;
        let is_whole = (progress.total, progress.missing) == (progress.total_check, progress.missing_check);
        (is_whole && progress.missing <= progress.total).then_some(progress)
    }
}

pub(crate) fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("fill-progress.json")
}

/// The open file of a pager.
#[derive(Debug)]
pub(crate) struct FillProgressFile {
    file: File,
    progress: FillProgress,
    written_at: Instant,
}

impl FillProgressFile {
    /// Creates the file.
    ///
    /// # Errors
    /// Errors of `open(2)` and `write(2)`.
    pub(crate) fn create(rundir: &RunDir, total: u64, missing: u64) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path(rundir))?;
        let created = Self { file, progress: FillProgress::new(total, missing), written_at: Instant::now() };
        created.write()?;
        Ok(created)
    }

    /// Notes that `bytes` more are loaded.
    pub(crate) fn note_loaded(&mut self, bytes: u64) {
        let FillProgress { total, missing, .. } = self.progress;
        self.progress = FillProgress::new(total, missing.saturating_sub(bytes));
        if self.progress.missing == 0 || self.written_at.elapsed() >= WRITE_INTERVAL {
            self.written_at = Instant::now();
            if let Err(e) = self.write() {
                tracing::debug!("the progress of the fill cannot be recorded: {e}");
            }
        }
    }

    fn write(&self) -> io::Result<()> {
        let mut text = serde_json::to_vec(&self.progress)?;
        text.resize(FILE_BYTES, b' ');
        self.file.write_all_at(&text, 0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_progress_of_a_fill_is_read_back() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        assert_eq!(FillProgress::read(&rundir), None);
        let mut file = FillProgressFile::create(&rundir, 100, 60).unwrap();
        assert_eq!(FillProgress::read(&rundir), Some(FillProgress::new(100, 60)));
        file.note_loaded(10);
        assert_eq!(FillProgress::read(&rundir).unwrap().missing, 60, "within a second");
        file.note_loaded(60);
        assert_eq!(FillProgress::read(&rundir).unwrap().missing, 0);
        let longest = FillProgress::new(u64::MAX, u64::MAX);
        assert!(serde_json::to_vec(&longest).unwrap().len() <= FILE_BYTES);
    }

    #[test]
    fn a_mixture_of_two_writes_is_not_read() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        for text in [
            r#"{"total": 9, "missing": 5, "total_again": 9, "missing_again": 4}"#,
            r#"{"total": 9, "missing": 10, "total_again": 9, "missing_again": 10}"#,
            r#"{"total": 9, "missing": 5, "#,
        ] {
            fs::write(path(&rundir), text).unwrap();
            assert_eq!(FillProgress::read(&rundir), None, "{text}");
        }
    }
}
