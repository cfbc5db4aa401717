//! The file layer on a disk in memory that can lose power. The log's directory is the disk's topmost one.

use crate::redo::files::{FileStart, LogFiles};
use rekindle_testing::crash_disk::{CrashDisk, CrashFile, OUTSIDE};
use std::io;
use std::path::Path;

const DIRECTORY: &str = "";

impl LogFiles for CrashDisk {
    type File = CrashFile;
    type Claim = ();

    fn claim(&self) -> io::Result<Option<()>> {
        Ok(self.has_directory(DIRECTORY).then_some(()))
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
        Self::create_directory(self, DIRECTORY)?;
        self.sync_directory(OUTSIDE)
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
        self.sync_directory(DIRECTORY)
    }

    fn remove_directory(&self) -> io::Result<()> {
        Self::remove_directory(self, DIRECTORY)?;
        self.sync_directory(OUTSIDE)
    }
}
