//! The run directory of one VM.
//!
//! ```text
//! /run/rekindle/NAME/
//!   lock            held by the operation in hand; names it
//!   state.json      what runs            (docs/run-directory.md)
//!   operation.json  the operation in hand
//!   timeline.jsonl  what happened when
//!   logs            -> /var/log/rekindle/NAME ([`crate::logs`])
//!   console.log     -> logs/console.log: the guest's serial console, over all QEMUs
//!   vmm-1/          sockets and log of the first QEMU, vmm-2/ of the next, ...
//! ```

mod log_links;

use rekindle_kernel::lockfile;
use rekindle_qemu::binary::{Binary, BinaryError};
use rekindle_qemu::command::Directory;
use serde::Serialize;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Name of the folder, adjacent to the run directories, in which answers of QEMU binaries are kept.
pub const BINARIES: &str = ".binaries";

/// The run directory of one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
    name: String,
}

impl RunDir {
    /// The run directory of VM `name` under `root`; it need not exist.
    #[must_use]
    pub fn new(root: &Path, name: &str) -> Self {
        Self { path: root.join(name), name: name.to_owned() }
    }

    /// Names of the VMs that have a run directory under `root`.
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

    /// What the QEMU at `path` knows, from the answers kept for all VMs of this host, or asked now: see
    /// [`Binary::known`].
    ///
    /// # Errors
    /// As [`Binary::known`].
    pub fn binary(&self, path: &Path) -> Result<Binary, BinaryError> {
        Binary::known(path, &self.path.with_file_name(BINARIES))
    }

    /// The VM's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.path.is_dir()
    }

    /// Makes it, private to this user. One that exists is no error.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn create(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.path)
    }

    /// Removes it with all that is in it. The logs stay where they are.
    ///
    /// # Errors
    /// When something in it cannot be removed.
    pub fn remove(&self) -> io::Result<()> {
        let absent_is_fine = |done: io::Result<()>| match done {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        };
        // Renamed first: a half-removed directory would look like a VM with an unknown operation.
        let aside = self.path.with_file_name(format!(".{}.removed", self.name));
        absent_is_fine(fs::remove_dir_all(&aside))?;
        absent_is_fine(fs::rename(&self.path, &aside))?;
        absent_is_fine(fs::remove_dir_all(&aside))
    }

    /// A file of the run directory.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Exists while a checkpoint keeps the guest stopped: if it exists and no process is in that pause, the guest is
    /// to be resumed.
    #[must_use]
    pub fn paused(&self) -> PathBuf {
        self.file("paused")
    }

    /// Locked by the process that waits for the guest to reboot itself, to boot it.
    #[must_use]
    pub fn watch_lock(&self) -> PathBuf {
        self.file("watch.lock")
    }

    /// Locked by the process that takes checkpoints of an attached VM.
    #[must_use]
    pub fn protection_lock(&self) -> PathBuf {
        self.file("protection.lock")
    }

    /// Locked by the pager, and by a restore until the pager has started.
    #[must_use]
    pub fn pager_lock(&self) -> PathBuf {
        self.file("pager.lock")
    }

    /// Locked by the process that saves phases of the guest's boot.
    #[must_use]
    pub fn phases_lock(&self) -> PathBuf {
        self.file("phases.lock")
    }

    /// What `rekindle watch` has done about helpers that died.
    #[must_use]
    pub fn helpers(&self) -> PathBuf {
        self.file("helpers.json")
    }

    /// What a restore leaves to its pager until all of the guest's memory is loaded.
    #[must_use]
    pub fn fill(&self) -> PathBuf {
        self.file("fill.json")
    }

    /// The log of the guest's serial console, by the path that does not depend on the run directory.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        self.logs().join("console.log")
    }

    /// The directory of the `generation`-th QEMU.
    #[must_use]
    pub fn vmm(&self, generation: u32) -> Directory {
        Directory(self.file(&format!("vmm-{generation}")))
    }

    /// Makes the directory of the `generation`-th QEMU, empty: what an earlier attempt left there is removed.
    ///
    /// # Errors
    /// When it cannot be made, or a QEMU runs in it.
    pub fn create_vmm(&self, generation: u32) -> io::Result<Directory> {
        let directory = self.vmm(generation);
        if let Some(process) = lockfile::holders(&directory.lock())?.first() {
            let text = format!("QEMU process {} runs in {}", process.pid, directory.0.display());
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
        match fs::remove_dir_all(&directory.0) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        DirBuilder::new().mode(0o700).create(&directory.0)?;
        self.link_qemu_log(generation);
        Ok(directory)
    }
}

/// Replaces the file at `path` by `content` as JSON: after a crash there is the old content or the new, never a part.
///
/// # Errors
/// When it cannot be written; the old content stays.
pub fn write_json(path: &Path, content: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(content)?;
    text.push(b'\n');
    write_atomically(path, &text)
}

/// Replaces the file at `path` by `content`, as [`write_json`] does.
///
/// # Errors
/// When it cannot be written; the old content stays.
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

/// Makes a rename or removal in `directory` last.
///
/// # Errors
/// When the directory cannot be synced.
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
        // A directory with the name of the temporary file.
        fs::create_dir(path.with_extension("new")).unwrap();
        assert!(write_json(&path, &2).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n");
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
