//! One operation on a VM at a time, and who has it.

use crate::rundir::RunDir;
use rekindle_kernel::process::Process;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

/// Why the lock of a VM cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody else is at work.
    #[error("VM {name} is busy: {holder}; wait for it to end, or end it")]
    Held {
        /// The VM.
        name: String,
        /// Who.
        holder: String,
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

/// Who is at work on the VM, as far as can be seen without taking the lock: looking must not be in anybody's way.
#[must_use]
pub fn holder(rundir: &RunDir) -> Option<String> {
    let holder: Holder = serde_json::from_slice(&std::fs::read(rundir.file("lock")).ok()?).ok()?;
    Process { pid: holder.pid, started: holder.started }.is_alive().then_some(holder.operation)
}

/// Held until dropped, or until the process ends: the kernel lets go of it then.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // So that nobody takes a process that lives on for one that is at work.
        let _ = self.file.set_len(0);
    }
}

impl Lock {
    /// Lock the VM of `rundir` for `operation`. The run directory must exist.
    ///
    /// # Errors
    /// [`LockError::Held`] at once, saying by whom.
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
                    return Err(LockError::Held { name: rundir.name().into(), holder: describe(&mut file) });
                }
                Err(e) => return Err(failed(e.into())),
            }
            // The run directory may have been removed and made anew between the open and the lock: then the lock is
            // on a file that nobody else sees.
            let ours = file.metadata().map_err(failed)?.ino();
            if std::fs::metadata(&path).is_ok_and(|now| now.ino() == ours) {
                let Process { pid, started } = Process::current().map_err(failed)?;
                let holder = Holder { pid, started, operation: operation.into() };
                let text = serde_json::to_vec(&holder).map_err(|e| failed(e.into()))?;
                file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(&text)).map_err(failed)?;
                return Ok(Self { file });
            }
        }
    }
}

fn describe(file: &mut File) -> String {
    let mut text = String::new();
    let _ = file.read_to_string(&mut text);
    match serde_json::from_str::<Holder>(&text) {
        Ok(holder) => format!("`{}` (process {}) is at work on it", holder.operation, holder.pid),
        Err(_) => "another rekindle has just begun to work on it".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_holds_it() {
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
