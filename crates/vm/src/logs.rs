//! The logs of a VM. They are bounded, because a guest can write to some of them without end. [`crate::rundir`] links
//! them.
//!
//! Each log is written by its own process (the console log by QEMU), always by appending (`O_APPEND`). There is
//! nothing between a writer and its file that could block a guest. `rekindle watch` checks the lengths a few times a
//! second ([`bound`]). A log that is too long is copied to `.1` and truncated; its writer continues at the beginning
//! of the same file. Output between the end of the copy and the truncation, some microseconds, is lost.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Default limit of one log in bytes. With its older parts a log may have three times as many.
pub const DEFAULT_LIMIT_BYTES: u64 = 8 << 20;
/// Smallest limit that a configuration may set, in bytes.
pub const MIN_LIMIT_BYTES: u64 = 4 << 10;
/// Number of older parts that are kept of each log.
const OLDER_PARTS: u32 = 2;

/// Removes a log and its older parts.
pub(crate) fn remove(log: &Path) {
    for path in (1..=OLDER_PARTS).map(|n| older_part(log, n)).chain([log.to_owned()]) {
        let _ = fs::remove_file(path);
    }
}

fn older_part(log: &Path, n: u32) -> PathBuf {
    let mut path = log.as_os_str().to_owned();
    path.push(format!(".{n}"));
    PathBuf::from(path)
}

/// Returns the paths of the older parts of a log, oldest first.
pub(crate) fn older_parts(log: &Path) -> impl Iterator<Item = PathBuf> + '_ {
    (1..=OLDER_PARTS).rev().map(|n| older_part(log, n))
}

fn is_log(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "log")
}

fn list(directory: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path())).collect()
}

/// Renames each log of a directory to its newest older part.
pub(crate) fn set_aside(directory: &Path) -> io::Result<()> {
    list(directory)?.iter().filter(|path| is_log(path)).try_for_each(|log| {
        shift_older_parts(log)?;
        fs::rename(log, older_part(log, 1))
    })
}

/// Starts a log again: its content becomes the newest older part. The log's writer must have ended.
///
/// # Errors
/// Errors of `rename(2)`. A missing log is no error.
pub fn begin_anew(log: &Path) -> io::Result<()> {
    match fs::canonicalize(log) {
        Ok(log) => {
            shift_older_parts(&log)?;
            fs::rename(&log, older_part(&log, 1))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

/// Renames the older parts of a log, so that the name of the newest one is free.
fn shift_older_parts(log: &Path) -> io::Result<()> {
    for n in (1..OLDER_PARTS).rev() {
        match fs::rename(older_part(log, n), older_part(log, n + 1)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

/// Rotates each log of these directories that is longer than `limit`. Returns the logs that could not be rotated,
/// with the errors.
pub(crate) fn bound(directories: &[&Path], limit: u64) -> Vec<(PathBuf, io::Error)> {
    let logs = directories.iter().flat_map(|directory| list(directory).unwrap_or_default());
    let is_long = |path: &PathBuf| is_log(path) && fs::metadata(path).is_ok_and(|metadata| metadata.len() > limit);
    let mut failed = Vec::new();
    for log in logs.filter(is_long) {
        if let Err(e) = rotate(&log, limit) {
            failed.push((log, e));
        }
    }
    failed
}

/// Copies the last `limit` bytes of a log to its newest older part, and truncates it.
fn rotate(log: &Path, limit: u64) -> io::Result<()> {
    let log = fs::canonicalize(log)?;
    let mut file = OpenOptions::new().read(true).write(true).open(&log)?;
    // The log may have been rotated under another name already.
    if file.metadata()?.len() <= limit {
        return Ok(());
    }
    let copied = shift_older_parts(&log).and_then(|()| copy_end(&mut file, &older_part(&log, 1), limit));
    // Truncate it even if the copy failed: a full file system has no room for a copy.
    file.set_len(0)?;
    copied.inspect_err(|_| drop(fs::remove_file(older_part(&log, 1))))
}

fn copy_end(from: &mut File, to: &Path, limit: u64) -> io::Result<()> {
    let mut to = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(to)?;
    let length = from.metadata()?.len();
    from.seek(SeekFrom::Start(length.saturating_sub(limit)))?;
    // A writer may be as fast as the copy: limit what is copied.
    io::copy(&mut from.take(2 * limit), &mut to).map(drop)
}

/// A limit on reports of an event that a guest can cause without end.
#[derive(Debug)]
pub struct Throttle {
    max_reports: u32,
    period_length: Duration,
    period: Option<Period>,
    /// Events since the last report that were not reported.
    left_out: u64,
}

/// The current period of a [`Throttle`].
#[derive(Debug)]
struct Period {
    start: Instant,
    reports: u32,
}

impl Throttle {
    /// Makes a limit of `max_reports` in each period.
    #[must_use]
    pub fn new(max_reports: u32, period_length: Duration) -> Self {
        Self { max_reports, period_length, period: None, left_out: 0 }
    }

    /// Returns whether to report an event at `now`: if so, the number of events that were left out since the last
    /// report.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        let period = match &mut self.period {
            Some(period) if now.saturating_duration_since(period.start) < self.period_length => period,
            period => period.insert(Period { start: now, reports: 0 }),
        };
        if period.reports >= self.max_reports {
            self.left_out += 1;
            return None;
        }
        period.reports += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rundir::RunDir;
    use std::io::Write;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    fn make_run_dir(root: &Path) -> RunDir {
        let rundir = RunDir::new(&root.join("run"), "web");
        rundir.create().unwrap();
        rundir.link_logs(&root.join("log")).unwrap();
        rundir
    }

    fn open_to_append(path: &Path) -> File {
        OpenOptions::new().create(true).append(true).open(path).unwrap()
    }

    #[test]
    fn logs_are_outside_the_run_directory_and_those_of_the_vm_before_are_older_parts() {
        let root = tempfile::tempdir().unwrap();
        let rundir = make_run_dir(root.path());
        let log = root.path().join("log/web");
        assert_eq!(rundir.logs(), log);
        fs::write(rundir.console_log(), "first").unwrap();
        rundir.create_vmm(1).unwrap();
        fs::write(rundir.vmm(1).log(), "qemu").unwrap();
        assert_eq!(fs::read_to_string(rundir.file("console.log")).unwrap(), "first");
        assert!(rundir.file("console.log").symlink_metadata().unwrap().is_symlink());
        assert_eq!(fs::read_to_string(log.join("console.log")).unwrap(), "first");
        assert_eq!(fs::read_to_string(log.join("qemu-1.log")).unwrap(), "qemu");
        // Linking again does not change the logs.
        rundir.link_logs(&root.path().join("log")).unwrap();
        assert_eq!(fs::read_to_string(rundir.console_log()).unwrap(), "first");
        rundir.remove().unwrap();
        make_run_dir(root.path());
        assert!(!log.join("console.log").exists());
        assert_eq!(fs::read_to_string(log.join("console.log.1")).unwrap(), "first");
        rundir.create_vmm(1).unwrap();
        assert!(!rundir.vmm(1).log().exists(), "the log of another VM's QEMU");
    }

    #[test]
    fn what_happens_all_the_time_is_reported_now_and_then() {
        let start = Instant::now();
        let mut throttle = Throttle::new(2, Duration::from_secs(10));
        let admitted = (0..500u32).filter_map(|n| throttle.admit(start + Duration::from_millis(50) * n));
        assert_eq!(admitted.collect::<Vec<_>>(), [0, 0, 198, 0, 198, 0]);
    }

    #[test]
    fn logs_of_few_qemus_are_kept() {
        let root = tempfile::tempdir().unwrap();
        let rundir = make_run_dir(root.path());
        for generation in 1..=10 {
            rundir.create_vmm(generation).unwrap();
            fs::write(rundir.vmm(generation).log(), "x").unwrap();
        }
        let kept_generations: Vec<_> =
            (1..=10).filter(|n| root.path().join(format!("log/web/qemu-{n}.log")).exists()).collect();
        assert_eq!(kept_generations, [8, 9, 10]);
    }

    #[test]
    fn a_log_that_is_too_long_is_rotated_under_its_writer() {
        let root = tempfile::tempdir().unwrap();
        let rundir = make_run_dir(root.path());
        let mut writer = open_to_append(&rundir.console_log());
        for part in ["1", "2", "3", "4"] {
            writer.write_all(part.repeat(6000).as_bytes()).unwrap();
            assert!(rundir.bound_logs(MIN_LIMIT_BYTES).is_empty());
            assert_eq!(fs::metadata(rundir.console_log()).unwrap().len(), 0);
        }
        writer.write_all(b"rest").unwrap();
        assert!(rundir.bound_logs(MIN_LIMIT_BYTES).is_empty());
        let log = |name: &str| fs::read_to_string(root.path().join("log/web").join(name)).unwrap();
        assert_eq!(log("console.log"), "rest");
        assert_eq!((log("console.log.1"), log("console.log.2")), ("4".repeat(4096), "3".repeat(4096)));
        assert!(!root.path().join("log/web/console.log.3").exists());
        assert_eq!(fs::read_to_string(rundir.file("console.log")).unwrap(), "rest", "by its name in the run directory");
    }

    #[test]
    fn a_writer_that_never_stops_fills_no_more_than_a_few_limits() {
        let root = tempfile::tempdir().unwrap();
        let rundir = make_run_dir(root.path());
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut writer = open_to_append(&rundir.console_log());
                while !is_done.load(Ordering::Relaxed) {
                    writer.write_all(&[b'x'; 512]).unwrap();
                }
            });
            let mut rotated = 0;
            while rotated < 20 {
                let length_before = fs::metadata(rundir.console_log()).map_or(0, |metadata| metadata.len());
                assert!(rundir.bound_logs(MIN_LIMIT_BYTES).is_empty());
                rotated += u32::from(length_before > MIN_LIMIT_BYTES);
                for n in 1..=OLDER_PARTS {
                    let length = fs::metadata(older_part(&root.path().join("log/web/console.log"), n))
                        .map_or(0, |metadata| metadata.len());
                    assert!(length <= 2 * MIN_LIMIT_BYTES, "part {n} has {length} bytes");
                }
            }
            is_done.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_log_that_cannot_be_copied_is_bounded_all_the_same() {
        let root = tempfile::tempdir().unwrap();
        let rundir = make_run_dir(root.path());
        open_to_append(&rundir.console_log()).write_all(&[b'x'; 6000]).unwrap();
        // Directories in place of the older parts.
        fs::create_dir_all(root.path().join("log/web/console.log.1/in-the-way")).unwrap();
        fs::create_dir_all(root.path().join("log/web/console.log.2/in-the-way")).unwrap();
        assert_eq!(rundir.bound_logs(MIN_LIMIT_BYTES).len(), 1);
        assert_eq!(fs::metadata(rundir.console_log()).unwrap().len(), 0);
    }

    #[test]
    fn without_a_place_for_logs_they_are_in_the_run_directory() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("log"), "a file").unwrap();
        let rundir = make_run_dir(root.path());
        open_to_append(&rundir.console_log()).write_all(&[b'x'; 6000]).unwrap();
        assert_eq!(rundir.logs(), rundir.file("logs"));
        assert!(rundir.bound_logs(MIN_LIMIT_BYTES).is_empty());
        assert_eq!(fs::metadata(rundir.console_log()).unwrap().len(), 0);
    }
}
