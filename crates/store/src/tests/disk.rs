//! The store's file layer on a disk in memory that can lose power.

use crate::disk::Disk;
use rekindle_kernel::durable_file::DurableFile;
use rekindle_testing::crash_disk::{CrashDisk, OUTSIDE};
use std::io;
use std::sync::Arc;

impl Disk for CrashDisk {
    fn name(&self) -> &str {
        "memory"
    }

    fn create_directory(&self, name: &str) -> io::Result<()> {
        Self::create_directory(self, name)
    }

    fn list(&self, name: &str) -> io::Result<Vec<(String, u64)>> {
        Self::list(self, name)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DurableFile>> {
        Ok(Arc::new(Self::create(self, name)?))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DurableFile>> {
        Ok(Arc::new(Self::open(self, name)?))
    }

    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        Self::link(self, from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        Self::remove(self, name)
    }

    fn sync_directory(&self, name: &str) -> io::Result<()> {
        Self::sync_directory(self, name)?;
        if name.is_empty() { Self::sync_directory(self, OUTSIDE) } else { Ok(()) }
    }
}
