//! The run directory of one VM.
//!
//! ```text
//! /run/rekindle/NAME/
//!   lock            held by the running operation; names it
//!   state.json      definition, hardware, QEMU (docs/run-directory.md)
//!   operation.json  journal of the running operation
//!   timeline.jsonl  steps of operations, with their times
//!   logs            -> /var/log/rekindle/NAME ([`crate::logs`])
//!   console.log     -> logs/console.log: the guest's serial console, over all QEMUs
//!   vmm-1/          sockets and log of the first QEMU, vmm-2/ of the next, ...
//! ```

mod log_links;

pub use log_links::EVENTS_LOG;

use rekindle_kernel::lockfile;
use rekindle_qemu::binary::{Binary, BinaryError};
use rekindle_qemu::command::Directory;
use rustix::fs::OFlags;
use serde::Serialize;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Name of the directory, adjacent to the run directories, with the cached answers of QEMU binaries.
pub const BINARY_CACHE: &str = ".binaries";

/// Limit of a file that [`read_record`] reads.
pub const MAX_RECORD_BYTES: u64 = 16 << 20;

/// The run directory of one VM. It need not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
    name: String,
}

impl RunDir {
    /// Returns the run directory of VM `name` under `root`. Nothing is created.
    #[must_use]
    pub fn new(root: &Path, name: &str) -> Self {
        Self { path: root.join(name), name: name.to_owned() }
    }

    /// Returns the names of the VMs that have a run directory under `root`, sorted.
    ///
    /// # Errors
    /// When `root` cannot be read.
    pub fn list(root: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(root)? {
            let entry = entry?;
            if let Ok(name) = entry.file_name().into_string()
                && !name.starts_with('.')
                && entry.file_type()?.is_dir()
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Returns the features of the QEMU at `path`, from the answers cached for all VMs of this host, or queried now:
    /// see [`Binary::probe_cached`].
    ///
    /// # Errors
    /// As [`Binary::probe_cached`].
    pub fn binary(&self, path: &Path) -> Result<Binary, BinaryError> {
        Binary::probe_cached(path, &self.path.with_file_name(BINARY_CACHE))
    }

    /// Returns the VM's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the directory exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.path.is_dir()
    }

    /// Makes the directory, private to this user. It is no error if it exists.
    ///
    /// # Errors
    /// Errors of `mkdir(2)`.
    pub fn create(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.path)
    }

    /// Removes the directory with its content. The logs stay where they are.
    ///
    /// # Errors
    /// When the directory cannot be renamed, or a file in it not be removed.
    pub fn remove(&self) -> io::Result<()> {
        // Rename the directory first: a half-removed one would look like a VM with an unknown operation.
        let renamed = self.path.with_file_name(format!(".{}.removed", self.name));
        ignore_missing(fs::remove_dir_all(&renamed))?;
        ignore_missing(fs::rename(&self.path, &renamed))?;
        ignore_missing(fs::remove_dir_all(&renamed))
    }

    /// Returns the path of a file in the run directory.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Returns the file that exists while a checkpoint keeps the guest stopped. If it exists and no process is in
    /// that pause, the guest must be resumed.
    #[must_use]
    pub fn paused(&self) -> PathBuf {
        self.file("paused")
    }

    /// Returns the file that exists while QEMU keeps its guest stopped for a checkpoint, and resumes it by itself. If it
    /// exists and no process is in that pause, QEMU's threads may have a raised priority.
    #[must_use]
    pub fn piped_pause(&self) -> PathBuf {
        self.file("piped-pause")
    }

    /// Returns the lock file of `rekindle watch`, which restarts helpers and reboots a guest that has reset itself or
    /// panicked.
    #[must_use]
    pub fn watch_lock(&self) -> PathBuf {
        self.file("watch.lock")
    }

    /// Returns the lock file of the process that takes checkpoints of an attached VM.
    #[must_use]
    pub fn protection_lock(&self) -> PathBuf {
        self.file("protection.lock")
    }

    /// Returns the file that exists while the protector of an attached VM cannot reach QEMU.
    #[must_use]
    pub fn unprotected(&self) -> PathBuf {
        self.file("unprotected")
    }

    /// Returns the lock file of the pager. A restore holds it until the pager has started.
    #[must_use]
    pub fn pager_lock(&self) -> PathBuf {
        self.file("pager.lock")
    }

    /// Returns the lock file of the process that saves phases of the guest's boot.
    #[must_use]
    pub fn phases_lock(&self) -> PathBuf {
        self.file("phases.lock")
    }

    /// Returns the record of helpers that `rekindle watch` has restarted.
    #[must_use]
    pub fn helpers(&self) -> PathBuf {
        self.file("helpers.json")
    }

    /// Returns the file with the remaining work of a restore's pager. It exists until all of the guest's memory is
    /// loaded.
    #[must_use]
    pub fn fill(&self) -> PathBuf {
        self.file("fill.json")
    }

    /// Returns the log of the guest's serial console, by its path in the log directory.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        self.logs().join("console.log")
    }

    /// Returns the directory of the `generation`-th QEMU.
    #[must_use]
    pub fn vmm(&self, generation: u32) -> Directory {
        Directory(self.file(&format!("vmm-{generation}")))
    }

    /// Makes the directory of the `generation`-th QEMU. Removes the remains of an earlier attempt.
    ///
    /// # Errors
    /// When the directory cannot be made, or a QEMU runs in it.
    pub fn create_vmm(&self, generation: u32) -> io::Result<Directory> {
        let directory = self.vmm(generation);
        if let Some(process) = lockfile::holders(&directory.lock())?.first() {
            let message = format!("QEMU process {} runs in {}", process.pid, directory.0.display());
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
        }
        ignore_missing(fs::remove_dir_all(&directory.0))?;
        DirBuilder::new().mode(0o700).create(&directory.0)?;
        self.link_qemu_log(generation);
        Ok(directory)
    }
}

/// Replaces the file at `path` by `content` as JSON: after a crash the file has the old or the new content, never a
/// part.
///
/// # Errors
/// Errors of writing, syncing and renaming; the old content stays unless only the last sync failed.
pub fn write_json(path: &Path, content: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(content)?;
    text.push(b'\n');
    write_atomically(path, &text)
}

/// Replaces the file at `path` by `content`, as [`write_json`] does.
///
/// # Errors
/// Errors of writing, syncing and renaming; the old content stays unless only the last sync failed.
pub fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    let written = file.write_all(content).and_then(|()| file.sync_data());
    if let Err(e) = written.and_then(|()| fs::rename(&temporary, path)) {
        let _ = fs::remove_file(&temporary);
        return Err(e);
    }
    sync_directory(path.parent().unwrap_or(Path::new("/")))
}

/// Replaces the file at `path` by `content`, without waiting for the disk: for records that may be lost in a crash of the
/// host. A reader finds the old or the new content.
///
/// # Errors
/// Errors of writing and renaming; the old content stays.
pub fn replace_unsynced(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(content).and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

/// Reads a file of a run directory. Other programs of the VM's user may have replaced it: a link, a pipe or a file of more
/// than [`MAX_RECORD_BYTES`] is an error.
///
/// # Errors
/// Errors of `open(2)` and `read(2)`; `InvalidData` for a file that cannot be a record.
pub fn read_record(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open_record(path)?.take(MAX_RECORD_BYTES + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_RECORD_BYTES { Err(not_a_record(path, "too long")) } else { Ok(content) }
}

/// Opens a file of a run directory for reading, as [`read_record`] does. Never blocks.
///
/// # Errors
/// Errors of `open(2)`; `InvalidData` for a file that is not a regular one.
pub fn open_record(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(not_a_record(path, "not a regular file")) }
}

fn not_a_record(path: &Path, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} is {why}", path.display()))
}

/// Takes a removal or rename of a missing file for success.
pub fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Makes a rename or removal in `directory` durable.
///
/// # Errors
/// Errors of `open(2)` and `fdatasync(2)` of the directory.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_data()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_content() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        write_json(&path, &1).unwrap();
        // A directory in place of the temporary file.
        fs::create_dir(path.with_extension("new")).unwrap();
        assert!(write_json(&path, &2).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n");
    }

    #[test]
    fn what_is_not_a_record_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        replace_unsynced(&path("record.json"), b"{}").unwrap();
        replace_unsynced(&path("record.json"), b"[]").unwrap();
        assert_eq!(read_record(&path("record.json")).unwrap(), b"[]");
        std::os::unix::fs::symlink("record.json", path("link")).unwrap();
        assert!(read_record(&path("link")).is_err());
        File::create(path("long")).unwrap().set_len(MAX_RECORD_BYTES + 1).unwrap();
        assert_eq!(read_record(&path("long")).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // Opening a pipe without a writer would block.
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, path("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(read_record(&path("pipe")).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn only_vms_are_listed() {
        let root = tempfile::tempdir().unwrap();
        RunDir::new(root.path(), "web").create().unwrap();
        fs::create_dir(root.path().join(".ram")).unwrap();
        fs::write(root.path().join("file"), "").unwrap();
        assert_eq!(RunDir::list(root.path()).unwrap(), ["web"]);
    }
}
