//! Locks of a VM, each a file of the run directory with `flock(2)`.
//!
//! | lock | held by | excludes |
//! |---|---|---|
//! | [`OperationLock`] | the process of an operation | other operations on the VM |
//! | [`ServersLock`] | a process that starts or ends disk servers | a second server of a disk |
//! | [`RunStateLock`] | a process that stops or resumes the guest | `cont` or `stop` by another process |

use crate::rundir::{RunDir, read_record};
use rekindle_kernel::file::flock_holder;
use rekindle_kernel::process::Process;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Why the lock of a VM could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds the lock.
    #[error("VM {name} is busy: {holder}; wait for it to end, or end it")]
    Held {
        /// Name of the VM.
        name: String,
        /// Description of the process that holds the lock.
        holder: String,
        /// The holder's operation, if the lock file names it already.
        operation: Option<String>,
    },
    /// Another process holds the lock and did not release it in time.
    #[error("VM {name} is busy: {holder}, and was not done within {} s; wait for it to end, or end it", patience.as_secs())]
    Late {
        /// Name of the VM.
        name: String,
        /// Description of the process that holds the lock.
        holder: String,
        /// The time limit.
        patience: Duration,
    },
    /// The lock file cannot be used.
    #[error("lock file {}", path.display())]
    File {
        /// Path of the lock file.
        path: PathBuf,
        /// The error of opening, locking or writing it.
        #[source]
        source: io::Error,
    },
}

/// The content of the lock file.
#[derive(Serialize, Deserialize)]
struct LockHolder {
    pid: u32,
    /// Start time of the process, as in [`Process`].
    started: u64,
    operation: String,
}

impl LockHolder {
    fn process(&self) -> Process {
        Process { pid: self.pid, started: self.started }
    }
}

const SERVERS_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Shorter than others: a guest may be stopped while this lock is waited for.
const RUN_STATE_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Returns the operation that runs on the VM. Does not take the lock, so that no operation is disturbed.
#[must_use]
pub fn running_operation(rundir: &RunDir) -> Option<String> {
    let holder = read_holder(rundir)?;
    holder.process().is_alive().then_some(holder.operation)
}

/// Returns the process that runs an operation on the VM, unless it is this process.
#[must_use]
pub fn other_holder(rundir: &RunDir) -> Option<Process> {
    let holder = process_with_lock(&rundir.file("lock"));
    holder.filter(|process| Process::current().ok().as_ref() != Some(process))
}

/// Returns the process that takes checkpoints of an attached VM.
#[must_use]
pub fn protector(rundir: &RunDir) -> Option<Process> {
    process_with_lock(&rundir.protection_lock())
}

/// Returns whether this process runs the operation on a VM.
#[must_use]
pub fn is_ours(rundir: &RunDir) -> bool {
    let this_process = Process::current().ok();
    read_holder(rundir).is_some_and(|holder| this_process == Some(holder.process()))
}

fn read_holder(rundir: &RunDir) -> Option<LockHolder> {
    serde_json::from_slice(&read_record(&rundir.file("lock")).ok()?).ok()
}

fn process_with_lock(path: &Path) -> Option<Process> {
    flock_holder(path).ok().flatten().and_then(|pid| Process::of(pid).ok())
}

/// The lock of a VM. Held until dropped, or until the process ends: the kernel then releases it.
#[derive(Debug)]
pub struct OperationLock {
    file: File,
}

impl Drop for OperationLock {
    fn drop(&mut self) {
        // Remove the holder's name: this process may live on without an operation on the VM.
        let _ = self.file.set_len(0);
    }
}

impl OperationLock {
    /// Locks the VM of `rundir` for `operation`, without waiting. The run directory must exist.
    ///
    /// # Errors
    /// [`LockError::Held`] with the holder; [`LockError::File`].
    pub fn acquire(rundir: &RunDir, operation: &str) -> Result<Self, LockError> {
        let path = rundir.file("lock");
        let failed = |source: io::Error| LockError::File { path: path.clone(), source };
        loop {
            let mut file = open_lock_file(&path).map_err(failed)?;
            if !try_lock(&file).map_err(failed)? {
                let (holder, operation) = describe_holder(&mut file);
                return Err(LockError::Held { name: rundir.name().into(), holder, operation });
            }
            // The run directory may have been removed and recreated between the open and the lock. Then the lock is
            // on a file that no other process sees.
            if is_at(&file, &path).map_err(failed)? {
                let Process { pid, started } = Process::current().map_err(failed)?;
                let holder = LockHolder { pid, started, operation: operation.into() };
                let text = serde_json::to_vec(&holder).map_err(|e| failed(e.into()))?;
                file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(&text)).map_err(failed)?;
                return Ok(Self { file });
            }
        }
    }
}

/// Returns whether an open file is the one that `path` leads to now.
///
/// # Errors
/// Errors of `fstat(2)` on the open file.
pub fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    let at_path = std::fs::metadata(path);
    Ok(at_path.is_ok_and(|at_path| (at_path.dev(), at_path.ino()) == (opened.dev(), opened.ino())))
}

/// Lock of the servers of a VM's disks. It is held while servers are started or ended, by an operation or by
/// `rekindle watch`, so that a disk never gets two servers, and so that no server is started after the VM's end.
#[derive(Debug)]
pub struct ServersLock {
    _file: File,
}

impl ServersLock {
    /// Waits for the lock, at most for `patience`. `None` if the VM has no run directory.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] after `patience`; errors of `open(2)` and `flock(2)`.
    pub fn acquire(rundir: &RunDir, patience: Duration) -> io::Result<Option<Self>> {
        let path = rundir.file("servers.lock");
        let deadline = Instant::now() + patience;
        loop {
            let file = match open_lock_file(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                opened => opened?,
            };
            if try_lock(&file)? {
                // The run directory may have been removed and recreated after the file was opened.
                if is_at(&file, &path)? {
                    return Ok(Some(Self { _file: file }));
                }
            } else if Instant::now() < deadline {
                thread::sleep(SERVERS_POLL_INTERVAL);
            } else {
                let holder = name_holder(&path).unwrap_or_else(|| "another process".into());
                let text = format!("{} is locked by {holder} for {} s", path.display(), patience.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
    }
}

/// Lock of a guest's run state. A process that stops or resumes a guest holds it for as long as another process's
/// `cont` or `stop` would do harm.
///
/// Operations on a VM exclude one another by [`OperationLock`]. But a protector is no operation: it runs concurrently,
/// and pauses the guest for milliseconds at a time. If it resumed the source QEMU that a reboot has stopped, two QEMUs
/// would run the same guest.
#[derive(Debug)]
pub struct RunStateLock {
    _file: File,
}

impl RunStateLock {
    /// Waits for the lock, at most for `patience`.
    ///
    /// # Errors
    /// [`LockError::Held`] when another process still holds it after `patience`; [`LockError::File`].
    pub fn acquire(rundir: &RunDir, patience: Duration) -> Result<Self, LockError> {
        let path = rundir.file("run-state.lock");
        let failed = |source: io::Error| LockError::File { path: path.clone(), source };
        let file = open_lock_file(&path).map_err(failed)?;
        let deadline = Instant::now() + patience;
        while !try_lock(&file).map_err(failed)? {
            if Instant::now() >= deadline {
                let holder = name_holder(&path).unwrap_or_else(|| "another process".into());
                let holder = format!("{holder} keeps its guest stopped, or takes a checkpoint that does not end");
                return Err(LockError::Held { name: rundir.name().into(), holder, operation: None });
            }
            thread::sleep(RUN_STATE_POLL_INTERVAL);
        }
        Ok(Self { _file: file })
    }
}

fn open_lock_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Returns whether the lock was taken; false if another process holds it, or if a signal interrupted the call.
fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Names the process that holds the lock of `path`, and how it continues if it is stopped.
fn name_holder(path: &Path) -> Option<String> {
    let process = process_with_lock(path)?;
    Some(format!("process {}{}", process.pid, describe_if_stopped(process)))
}

/// Returns how a process continues that a signal has stopped; empty if it is not stopped.
fn describe_if_stopped(process: Process) -> String {
    let pid = process.pid;
    if process.is_stopped() { format!(", stopped by a signal; to resume it: kill -CONT {pid}") } else { String::new() }
}

/// Returns a description of the lock's holder, and its operation if the lock file names it already.
fn describe_holder(file: &mut File) -> (String, Option<String>) {
    let mut text = String::new();
    let _ = file.read_to_string(&mut text);
    match serde_json::from_str::<LockHolder>(&text) {
        Ok(holder) => {
            let stopped = describe_if_stopped(holder.process());
            (
                format!("`{}` (process {}{stopped}) is at work on it", holder.operation, holder.pid),
                Some(holder.operation),
            )
        }
        Err(_) => ("another rekindle has just started to work on it".into(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_gets_an_error_that_names_the_holder() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let first = OperationLock::acquire(&rundir, "replace-qemu --how warm").unwrap();
        let e = OperationLock::acquire(&rundir, "stop").unwrap_err().to_string();
        assert!(e.contains("replace-qemu --how warm") && e.contains(&std::process::id().to_string()), "{e}");
        assert_eq!(running_operation(&rundir).as_deref(), Some("replace-qemu --how warm"));
        drop(first);
        assert_eq!(running_operation(&rundir), None);
        OperationLock::acquire(&rundir, "stop").unwrap();
    }

    #[test]
    fn one_at_a_time_changes_the_run_state_and_the_next_waits() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let first = RunStateLock::acquire(&rundir, Duration::ZERO).unwrap();
        assert!(matches!(RunStateLock::acquire(&rundir, Duration::from_millis(1)), Err(LockError::Held { .. })));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| RunStateLock::acquire(&rundir, Duration::from_secs(30)).map(drop));
            drop(first);
            waiting.join().unwrap().unwrap();
        });
    }

    #[test]
    fn servers_are_started_and_ended_one_after_another_and_not_without_a_run_directory() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        assert!(ServersLock::acquire(&rundir, Duration::ZERO).unwrap().is_none());
        rundir.create().unwrap();
        let first = ServersLock::acquire(&rundir, Duration::ZERO).unwrap();
        assert!(first.is_some());
        assert_eq!(ServersLock::acquire(&rundir, Duration::ZERO).unwrap_err().kind(), io::ErrorKind::TimedOut);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ServersLock::acquire(&rundir, Duration::from_secs(30)).unwrap().is_some());
            drop(first);
            assert!(waiting.join().unwrap());
        });
    }

    #[test]
    fn a_run_directory_that_was_replaced_is_locked_anew() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let _old = OperationLock::acquire(&rundir, "stop").unwrap();
        rundir.remove().unwrap();
        rundir.create().unwrap();
        OperationLock::acquire(&rundir, "run").unwrap();
    }
}
