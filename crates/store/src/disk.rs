//! The directories of the store, behind a trait like its files ([`DurableFile`]), so that a test can record, lose, tear
//! or fail every single operation.
//!
//! Names are relative to the store's directory (`log/000000000042`).

use rekindle_kernel::durable_file::{DurableFile, LocalFile};
use std::fmt::Debug;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A directory of files.
pub trait Disk: Debug + Send + Sync {
    /// Returns the directory's name for messages.
    fn name(&self) -> &str;
    /// Creates the directory `name`, or the store's directory if `name` is empty. An existing directory is no error.
    ///
    /// # Errors
    /// Errors of `mkdir(2)` other than `EEXIST`.
    fn create_directory(&self, name: &str) -> io::Result<()>;
    /// Returns names and lengths of the files in directory `name`.
    ///
    /// # Errors
    /// Errors of reading the directory.
    fn list(&self, name: &str) -> io::Result<Vec<(String, u64)>>;
    /// Creates a new file for writing.
    ///
    /// # Errors
    /// `AlreadyExists`, which the first sync may also return instead; other errors of `open(2)`.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DurableFile>>;
    /// Opens a file for reading.
    ///
    /// # Errors
    /// `NotFound`; other errors of `open(2)`.
    fn open(&self, name: &str) -> io::Result<Arc<dyn DurableFile>>;
    /// Gives the file `from` the additional name `to` if no file has that name yet.
    ///
    /// # Errors
    /// `AlreadyExists`; `TimedOut` if the file may still get the name later; other errors of `link(2)`.
    fn link(&self, from: &str, to: &str) -> io::Result<()>;
    /// Gives the file `from` the additional name `to`, and removes the name `previous`. No file is read by these names:
    /// only their existence counts, and errors are ignored.
    fn replace_marker(&self, from: &str, to: &str, previous: &str) {
        let _ = self.link(from, to);
        let _ = self.remove(previous);
    }
    /// Removes the name `name`.
    ///
    /// # Errors
    /// `NotFound`; other errors of `unlink(2)`.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Waits until added and removed names in the directory `name` are durable. If `name` is empty, waits also until
    /// the name of the store's directory is durable in its parent.
    ///
    /// # Errors
    /// Errors of opening or syncing the directory.
    fn sync_directory(&self, name: &str) -> io::Result<()>;
    /// Checks that of several concurrent links to a name only one succeeds. Called before a store is created or claimed.
    ///
    /// # Errors
    /// `Unsupported`.
    fn check_exclusive_links(&self) -> io::Result<()> {
        Ok(())
    }
    /// Returns whether a file can be written after a sync. Otherwise [`Disk::create`] and [`Disk::link`] give files that
    /// never change.
    fn can_append(&self) -> bool {
        true
    }
    /// Returns whether each read takes the time of a request to a server, so that several at a time are worth their cost.
    /// Otherwise, nothing is read before it is needed.
    fn has_latency(&self) -> bool {
        false
    }
    /// Returns a descriptor that becomes readable when a read has ended that its caller has not waited for.
    fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A local or mounted directory.
#[derive(Debug)]
pub struct LocalDisk {
    root: PathBuf,
    name: String,
}

impl LocalDisk {
    /// Returns the directory `root`, which need not exist yet.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), name: root.display().to_string() }
    }

    fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.root.clone() } else { self.root.join(name) }
    }
}

impl Disk for LocalDisk {
    fn name(&self) -> &str {
        &self.name
    }

    fn create_directory(&self, name: &str) -> io::Result<()> {
        // Mode 0700, because a store contains the guest's memory.
        DirBuilder::new().recursive(true).mode(0o700).create(self.path(name))
    }

    fn list(&self, name: &str) -> io::Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.path(name))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            match entry.metadata() {
                Ok(metadata) => found.push((name, metadata.len())),
                // The file was removed since the directory was read.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(found)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DurableFile>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(self.path(name))?;
        Ok(Arc::new(LocalFile(file.into())))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DurableFile>> {
        Ok(Arc::new(LocalFile(File::open(self.path(name))?.into())))
    }

    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        fs::hard_link(self.path(from), self.path(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path(name))
    }

    fn sync_directory(&self, name: &str) -> io::Result<()> {
        File::open(self.path(name))?.sync_all()?;
        if name.is_empty() {
            let parent = fs::canonicalize(&self.root)?.parent().map(Path::to_owned);
            if let Some(parent) = parent {
                // A process may use a directory without permission to read its parent.
                match File::open(&parent).and_then(|parent| parent.sync_all()) {
                    Err(e) if e.kind() != io::ErrorKind::PermissionDenied => return Err(e),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}
