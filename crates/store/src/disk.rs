//! All that the store does with files, in one small layer, so that a test can record, lose, tear and refuse every
//! single step.
//!
//! Names are relative to the store's directory (`log/000000000042`).

use std::fmt::Debug;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An open file.
#[allow(clippy::len_without_is_empty, reason = "a length in bytes")]
pub trait DiskFile: Debug + Send + Sync {
    /// Read from `offset` on until `buffer` is full or the file ends; how many bytes that are.
    ///
    /// # Errors
    /// The system's.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Write all of `bytes` at `offset`.
    ///
    /// # Errors
    /// The system's; then any part of it may have been written.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Let the disk begin with bytes that were written. A hint.
    fn start_writeback(&self, offset: u64, len: u64);
    /// Wait until content and length are durable.
    ///
    /// # Errors
    /// The system's; then it is not known what is durable.
    fn sync(&self) -> io::Result<()>;
    /// Cut the file to `len` bytes.
    ///
    /// # Errors
    /// The system's.
    fn truncate(&self, len: u64) -> io::Result<()>;
    /// Its length in bytes.
    ///
    /// # Errors
    /// The system's.
    fn len(&self) -> io::Result<u64>;
}

/// A directory with files.
pub trait Disk: Debug + Send + Sync {
    /// Where it is, for messages.
    fn name(&self) -> &str;
    /// Make the directory `name`, and the store's own if `name` is empty. One that is there is no error.
    ///
    /// # Errors
    /// The system's.
    fn create_directory(&self, name: &str) -> io::Result<()>;
    /// Names and lengths in directory `name`.
    ///
    /// # Errors
    /// The system's.
    fn list(&self, name: &str) -> io::Result<Vec<(String, u64)>>;
    /// Make a new file, for reading and writing.
    ///
    /// # Errors
    /// `AlreadyExists`, and the system's.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    /// Open a file for reading.
    ///
    /// # Errors
    /// `NotFound`, and the system's.
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    /// Give the file `from` the further name `to`, if nothing has it.
    ///
    /// # Errors
    /// `AlreadyExists`, and the system's.
    fn link(&self, from: &str, to: &str) -> io::Result<()>;
    /// Remove the name `name`.
    ///
    /// # Errors
    /// `NotFound`, and the system's.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Wait until what came and went in directory `name` is durable; for the empty name also that the directory itself
    /// is there.
    ///
    /// # Errors
    /// The system's.
    fn sync_directory(&self, name: &str) -> io::Result<()>;
}

/// A directory of this machine, or one that it has mounted.
#[derive(Debug)]
pub struct LocalDisk {
    root: PathBuf,
    name: String,
}

impl LocalDisk {
    /// That at `root`, which need not exist yet.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), name: root.display().to_string() }
    }

    fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.root.clone() } else { self.root.join(name) }
    }
}

#[derive(Debug)]
struct LocalFile(File);

impl DiskFile for LocalFile {
    fn read_at(&self, mut buffer: &mut [u8], mut offset: u64) -> io::Result<usize> {
        let wanted = buffer.len();
        while !buffer.is_empty() {
            match self.0.read_at(buffer, offset) {
                Ok(0) => break,
                Ok(n) => {
                    buffer = buffer.get_mut(n..).unwrap_or_default();
                    offset += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(wanted - buffer.len())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn start_writeback(&self, offset: u64, len: u64) {
        // Not every file system knows it; the sync does the work then.
        let _ = rekindle_kernel::file::start_writeback(&self.0, offset, len);
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
}

impl Disk for LocalDisk {
    fn name(&self) -> &str {
        &self.name
    }

    fn create_directory(&self, name: &str) -> io::Result<()> {
        // Whoever can read it can read the guest's memory.
        DirBuilder::new().recursive(true).mode(0o700).create(self.path(name))
    }

    fn list(&self, name: &str) -> io::Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.path(name))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            match entry.metadata() {
                Ok(metadata) => found.push((name, metadata.len())),
                // It went while we looked.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(found)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(self.path(name))?;
        Ok(Arc::new(LocalFile(file)))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(LocalFile(File::open(self.path(name))?)))
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
                // One may use a directory without being allowed to read the one above it.
                match File::open(&parent).and_then(|parent| parent.sync_all()) {
                    Err(e) if e.kind() != io::ErrorKind::PermissionDenied => return Err(e),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}
