//! The file layer on a disk in memory that can lose power.

use crate::redo::files::{FileStart, LogFile, LogFiles};
use rekindle_testing::crash_disk::{CrashDisk, CrashFile};
use std::io;
use std::path::Path;

impl LogFile for CrashFile {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        Self::read_at(self, target, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        Self::write_at(self, bytes, offset)
    }

    fn zero(&self, offset: u64, len: u64, hole: bool) -> io::Result<()> {
        Self::zero(self, offset, len, hole)
    }

    fn reserve(&self, _len: u64) {}

    fn sync(&self) -> io::Result<()> {
        Self::sync(self)
    }

    fn length(&self) -> io::Result<u64> {
        Self::length(self)
    }
}

impl LogFiles for CrashDisk {
    type File = CrashFile;
    type Claim = ();

    fn claim(&self) -> io::Result<Option<()>> {
        Ok(self.exists().then_some(()))
    }

    fn peek(&self, name: &str, max_bytes: u64) -> io::Result<Option<FileStart>> {
        let mut bytes = self.content(name)?;
        let length = bytes.len() as u64;
        bytes.truncate(max_bytes as usize);
        Ok(Some(FileStart { bytes, length }))
    }

    fn path(&self) -> &Path {
        Path::new("disk.redo")
    }

    fn create_directory(&self) -> io::Result<()> {
        Self::create_directory(self)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.names())
    }

    fn create(&self, name: &str) -> io::Result<CrashFile> {
        Self::create(self, name)
    }

    fn open(&self, name: &str) -> io::Result<CrashFile> {
        Self::open(self, name)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        Self::remove(self, name)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_directory()
    }

    fn remove_directory(&self) -> io::Result<()> {
        Self::remove_directory(self)
    }
}
