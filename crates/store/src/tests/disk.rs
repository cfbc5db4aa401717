//! The disks of the tests: a disk in memory that can lose power, and an object store in memory ([`super::objects`]).

use crate::disk::Disk;
use crate::location::Storage;
use crate::sealing::{KeyRing, MasterKey};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_testing::crash_disk::{CrashDisk, Meanwhile, OUTSIDE};
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

/// A disk for a store, of which several processes have a handle.
pub trait TestDisk: Default + Clone + Send + 'static {
    /// Minimum of steps that change the disk in a commit, and in a compaction.
    const COMMIT_STEPS: usize;
    const COMPACTION_STEPS: usize;
    /// Returns the disk as a process sees it that opens it now.
    fn shared(&self) -> Storage;
    /// Returns a handle that [`TestDisk::interrupt`] affects separately.
    fn handle(&self) -> Self;
    /// Does `work` before the `after`-th step from now on through this handle.
    fn interrupt(&self, after: usize, work: Meanwhile);
    /// Returns the names of all files.
    fn names(&self) -> Vec<String>;
}

impl TestDisk for CrashDisk {
    const COMMIT_STEPS: usize = 8;
    const COMPACTION_STEPS: usize = 12;

    fn shared(&self) -> Storage {
        Arc::new(self.clone()).into()
    }

    fn handle(&self) -> Self {
        Self::handle(self)
    }

    fn interrupt(&self, after: usize, work: Meanwhile) {
        Self::interrupt(self, after, work);
    }

    fn names(&self) -> Vec<String> {
        Self::names(self).into_iter().collect()
    }
}

/// A disk whose store is encrypted.
#[derive(Debug, Clone, Default)]
pub struct Encrypted<D>(pub D);

/// Returns the keys whose bytes all have these values.
pub fn keys(values: &[u8]) -> Arc<KeyRing> {
    Arc::new(KeyRing::new(values.iter().map(|value| MasterKey::new([*value; 32])).collect()).unwrap())
}

impl<D: TestDisk> TestDisk for Encrypted<D> {
    const COMMIT_STEPS: usize = D::COMMIT_STEPS;
    const COMPACTION_STEPS: usize = D::COMPACTION_STEPS;

    fn shared(&self) -> Storage {
        Storage { keys: Some(keys(&[1])), ..self.0.shared() }
    }

    fn handle(&self) -> Self {
        Self(self.0.handle())
    }

    fn interrupt(&self, after: usize, work: Meanwhile) {
        self.0.interrupt(after, work);
    }

    fn names(&self) -> Vec<String> {
        self.0.names()
    }
}
