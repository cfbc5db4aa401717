//! A file that is read and written at offsets, behind a trait: the store and the redo log of a disk do all their file
//! operations through it, so that a test can record, lose, tear or fail each of them.

use crate::file::start_writeback;
use rustix::fs::{FallocateFlags, fallocate};
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// An open file. If it was opened with `O_DIRECT`, offsets, lengths and memory are aligned.
pub trait DurableFile: Debug + Send + Sync {
    /// Reads from `offset` until `target` is full or the file ends. Returns the number of bytes.
    ///
    /// # Errors
    /// Errors of `pread(2)`.
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// Errors of `pwrite(2)`; any part of `bytes` may have been written.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Zeroes `len` bytes at `offset`. `hole`: their space may be released.
    ///
    /// # Errors
    /// Errors of `fallocate(2)`; `Unsupported` if zeros have to be written instead.
    fn zero(&self, offset: u64, len: u64, hole: bool) -> io::Result<()>;
    /// Shortens the file to `len` bytes.
    ///
    /// # Errors
    /// Errors of `ftruncate(2)`.
    fn truncate(&self, len: u64) -> io::Result<()>;
    /// Waits until content and length are durable.
    ///
    /// # Errors
    /// Errors of `fdatasync(2)`; it is then unknown which content is durable.
    fn sync(&self) -> io::Result<()>;
    /// Starts what [`DurableFile::sync`] waits for, as a hint: the caller writes nothing more to the file.
    fn start_sync(&self) {}
    /// Starts to read these bytes, as a hint: they will be read soon. Returns `false` if there is no room for that now.
    fn start_read(&self, _range: Range<u64>) -> bool {
        true
    }
    /// Returns the length in bytes.
    ///
    /// # Errors
    /// Errors of `fstat(2)`.
    fn length(&self) -> io::Result<u64>;
    /// Allocates space for the first `len` bytes, as a hint: a failure is ignored.
    fn reserve(&self, _len: u64) {}
    /// Starts to write these bytes to the disk, as a hint: a failure is ignored.
    fn start_writeback(&self, _offset: u64, _len: u64) {}
}

/// A file of this host. Clones share the open file.
#[derive(Debug, Clone)]
pub struct LocalFile(pub Arc<File>);

impl DurableFile for LocalFile {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < target.len() {
            let unfilled = target.get_mut(filled..).unwrap_or_default();
            match self.0.read_at(unfilled, offset + filled as u64) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(filled)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn zero(&self, offset: u64, len: u64, hole: bool) -> io::Result<()> {
        let mode = if hole { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
        Ok(fallocate(&self.0, mode | FallocateFlags::KEEP_SIZE, offset, len)?)
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn reserve(&self, len: u64) {
        // Not every file system supports this. The writes allocate the space then.
        let _ = fallocate(&self.0, FallocateFlags::empty(), 0, len);
    }

    fn start_writeback(&self, offset: u64, len: u64) {
        // A file system without support is no error: the sync writes the bytes.
        let _ = start_writeback(&self.0, offset, len);
    }
}
