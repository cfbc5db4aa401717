//! One operation on a VM at a time, and which process it is.

use crate::rundir::RunDir;
use rekindle_kernel::file::flock_holder;
use rekindle_kernel::process::Process;
use rustix::fs::{FlockOperation, flock};
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
    /// Another process holds it.
    #[error("VM {name} is busy: {holder}; wait for it to end, or end it")]
    Held {
        /// The VM.
        name: String,
        /// A description of that process.
        holder: String,
        /// Its operation, if it has written that.
        operation: Option<String>,
    },
    /// Another process holds it, and did not release it in time.
    #[error("VM {name} is busy: {holder}, and was not done within {} s; wait for it to end, or end it", patience.as_secs())]
    Late {
        /// The VM.
        name: String,
        /// A description of that process.
        holder: String,
        /// How long it was waited for.
        patience: Duration,
    },
    /// The lock file cannot be used.
    #[error("lock file {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

#[derive(Serialize, Deserialize)]
struct Holder {
    pid: u32,
    started: u64,
    operation: String,
}

/// Returns the operation that runs on the VM, without taking the lock, so that no operation is disturbed.
#[must_use]
pub fn holder(rundir: &RunDir) -> Option<String> {
    let holder: Holder = serde_json::from_slice(&std::fs::read(rundir.file("lock")).ok()?).ok()?;
    Process { pid: holder.pid, started: holder.started }.is_alive().then_some(holder.operation)
}

/// The process that is at work on the VM, if that is not this one.
#[must_use]
pub fn other(rundir: &RunDir) -> Option<Process> {
    let found = flock_holder(&rundir.file("lock")).ok().flatten().and_then(|pid| Process::of(pid).ok());
    found.filter(|found| Process::current().ok().as_ref() != Some(found))
}

/// Returns the process that takes checkpoints of a VM.
#[must_use]
pub fn protector(rundir: &RunDir) -> Option<Process> {
    flock_holder(&rundir.protection_lock()).ok().flatten().and_then(|pid| Process::of(pid).ok())
}

/// Whether it is this very process that works on a VM.
#[must_use]
pub fn is_ours(rundir: &RunDir) -> bool {
    let holder = std::fs::read(rundir.file("lock")).ok().and_then(|text| serde_json::from_slice::<Holder>(&text).ok());
    let me = Process::current().ok();
    holder.is_some_and(|Holder { pid, started, .. }| me == Some(Process { pid, started }))
}

/// Held until dropped, or until the process ends: the kernel releases it then.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // So that a process that lives on does not look like one that works on the VM.
        let _ = self.file.set_len(0);
    }
}

impl Lock {
    /// Locks the VM of `rundir` for `operation`. The run directory must exist.
    ///
    /// # Errors
    /// [`LockError::Held`] immediately, with the holder.
    pub fn acquire(rundir: &RunDir, operation: &str) -> Result<Self, LockError> {
        let path = rundir.file("lock");
        let failed = |source: io::Error| LockError::File { path: path.clone(), source };
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path)
                .map_err(failed)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let (holder, operation) = describe(&mut file);
                    return Err(LockError::Held { name: rundir.name().into(), holder, operation });
                }
                Err(e) => return Err(failed(e.into())),
            }
            // The run directory may have been removed and recreated between the open and the lock: then the lock is
            // on a file that no other process sees.
            if is_at(&file, &path).map_err(failed)? {
                let Process { pid, started } = Process::current().map_err(failed)?;
                let holder = Holder { pid, started, operation: operation.into() };
                let text = serde_json::to_vec(&holder).map_err(|e| failed(e.into()))?;
                file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(&text)).map_err(failed)?;
                return Ok(Self { file });
            }
        }
    }
}

/// Whether an open file is the one that is at `path` now.
///
/// # Errors
/// The system's, of the open file.
pub fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    Ok(std::fs::metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == (ours.dev(), ours.ino())))
}

/// Held while servers of a VM's disks are started or ended, by an operation or by `rekindle watch`: so that a disk
/// never gets two, and that none is started after the VM's end has ended them.
#[derive(Debug)]
pub struct Servers {
    _file: File,
}

impl Servers {
    /// Waits for it, at most for `patience`. None where the VM has no run directory.
    ///
    /// # Errors
    /// The system's; that it is held for so long.
    pub fn acquire(rundir: &RunDir, patience: Duration) -> io::Result<Option<Self>> {
        let path = rundir.file("servers.lock");
        let deadline = Instant::now() + patience;
        loop {
            let mut options = OpenOptions::new();
            let file = match options.write(true).create(true).truncate(false).mode(0o600).open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                other => other?,
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // The run directory may have been removed and recreated since it was opened.
                Ok(()) if is_at(&file, &path)? => return Ok(Some(Self { _file: file })),
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {
                    let text = format!("{} is locked by another process for {} s", path.display(), patience.as_secs());
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Held by a process that stops or resumes a guest, for as long as another one's `cont` or `stop` in between would do
/// harm.
///
/// The operations on a VM exclude one another by [`Lock`]; a protector is no operation, runs
/// concurrently, and pauses the guest for milliseconds at a time. Two QEMUs would run one guest if it resumed the old
/// one that a reboot has stopped.
#[derive(Debug)]
pub struct RunState {
    _file: File,
}

impl RunState {
    /// Waits for it, at most for `patience`.
    ///
    /// # Errors
    /// [`LockError::Held`] when another process holds it for so long.
    pub fn acquire(rundir: &RunDir, patience: Duration) -> Result<Self, LockError> {
        let path = rundir.file("run-state.lock");
        let failed = |source: io::Error| LockError::File { path: path.clone(), source };
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(failed)?;
        let deadline = Instant::now() + patience;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { _file: file }),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_micros(200));
                }
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {
                    let holder = "another process keeps its guest stopped, or a checkpoint of it does not end".into();
                    return Err(LockError::Held { name: rundir.name().into(), holder, operation: None });
                }
                Err(e) => return Err(failed(e.into())),
            }
        }
    }
}

/// Describes the holder, and its operation if that has been written.
fn describe(file: &mut File) -> (String, Option<String>) {
    let mut text = String::new();
    let _ = file.read_to_string(&mut text);
    match serde_json::from_str::<Holder>(&text) {
        Ok(holder) => {
            (format!("`{}` (process {}) is at work on it", holder.operation, holder.pid), Some(holder.operation))
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
        let first = Lock::acquire(&rundir, "reboot vmm --how warm").unwrap();
        let e = Lock::acquire(&rundir, "stop").unwrap_err().to_string();
        assert!(e.contains("reboot vmm --how warm") && e.contains(&std::process::id().to_string()), "{e}");
        assert_eq!(holder(&rundir).as_deref(), Some("reboot vmm --how warm"));
        drop(first);
        assert_eq!(holder(&rundir), None);
        Lock::acquire(&rundir, "stop").unwrap();
    }

    #[test]
    fn one_at_a_time_changes_the_run_state_and_the_next_waits() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let first = RunState::acquire(&rundir, Duration::ZERO).unwrap();
        assert!(matches!(RunState::acquire(&rundir, Duration::from_millis(1)), Err(LockError::Held { .. })));
        thread::scope(|scope| {
            let next = scope.spawn(|| RunState::acquire(&rundir, Duration::from_secs(30)).map(drop));
            drop(first);
            next.join().unwrap().unwrap();
        });
    }

    #[test]
    fn servers_are_started_and_ended_one_after_another_and_not_without_a_run_directory() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        assert!(Servers::acquire(&rundir, Duration::ZERO).unwrap().is_none());
        rundir.create().unwrap();
        let first = Servers::acquire(&rundir, Duration::ZERO).unwrap();
        assert!(first.is_some());
        assert_eq!(Servers::acquire(&rundir, Duration::ZERO).unwrap_err().kind(), io::ErrorKind::TimedOut);
        thread::scope(|scope| {
            let next = scope.spawn(|| Servers::acquire(&rundir, Duration::from_secs(30)).unwrap().is_some());
            drop(first);
            assert!(next.join().unwrap());
        });
    }

    #[test]
    fn a_run_directory_that_was_replaced_is_locked_anew() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        let _old = Lock::acquire(&rundir, "stop").unwrap();
        rundir.remove().unwrap();
        rundir.create().unwrap();
        Lock::acquire(&rundir, "run").unwrap();
    }
}
