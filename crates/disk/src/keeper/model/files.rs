//! Files in memory, of which each operation is a step of the model.

use crate::redo::files::{FileStart, LogFiles};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_testing::crash_disk::{CrashDisk, CrashFile};
use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The checks at each file operation.
#[derive(Debug, Default)]
pub(super) struct StepChecks {
    steps: AtomicUsize,
    /// The merge that has written to the image and not synced it yet.
    pub merging: std::sync::Mutex<Option<u32>>,
    /// Two concurrent merges are an error. False when the checker itself is tested.
    pub is_strict: bool,
}

/// A file of which every operation is a step, at which another thread may continue.
#[derive(Debug, Clone)]
pub(super) struct StepFile {
    file: CrashFile,
    checks: Arc<StepChecks>,
    /// Number of the merge that uses the file, if the file is the image.
    merge: Option<u32>,
}

impl StepFile {
    fn step(&self, ends_merge: bool) {
        self.checks.steps.fetch_add(1, Ordering::SeqCst);
        if let Some(merge) = self.merge {
            let mut merging = self.checks.merging.lock().unwrap();
            let is_other_merge = merging.is_some_and(|other| other != merge);
            assert!(!(is_other_merge && self.checks.is_strict), "two concurrent merges of one log");
            *merging = (!ends_merge).then_some(merge);
        }
    }
}

impl DurableFile for StepFile {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        self.checks.steps.fetch_add(1, Ordering::SeqCst);
        self.file.read_at(target, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.step(false);
        self.file.write_at(bytes, offset)
    }

    fn zero(&self, offset: u64, len: u64, hole: bool) -> io::Result<()> {
        self.step(false);
        self.file.zero(offset, len, hole)
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.step(false);
        self.file.truncate(len)
    }

    fn sync(&self) -> io::Result<()> {
        self.step(true);
        self.file.sync()
    }

    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }
}

#[derive(Debug, Clone)]
pub(super) struct StepFiles {
    pub memory: CrashDisk,
    pub checks: Arc<StepChecks>,
    is_claimed: Arc<AtomicBool>,
}

#[derive(Debug)]
pub(super) struct Claim(Arc<AtomicBool>);

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl StepFiles {
    pub fn new(image: Vec<u8>, is_strict: bool) -> Self {
        let checks = Arc::new(StepChecks { is_strict, ..StepChecks::default() });
        Self { memory: CrashDisk::new(image), checks, is_claimed: Arc::default() }
    }

    fn file(&self, file: CrashFile) -> StepFile {
        StepFile { file, checks: Arc::clone(&self.checks), merge: None }
    }

    /// Returns the image. `merge`: number of the merge that uses it; `None` for the engine.
    pub fn image(&self, merge: Option<u32>) -> StepFile {
        StepFile { merge, ..self.file(self.memory.image()) }
    }
}

impl LogFiles for StepFiles {
    type File = StepFile;
    type Claim = Claim;

    fn path(&self) -> &Path {
        self.memory.path()
    }

    fn create_directory(&self) -> io::Result<()> {
        LogFiles::create_directory(&self.memory)
    }

    fn claim(&self) -> io::Result<Option<Claim>> {
        if self.memory.claim()?.is_none() {
            return Ok(None);
        }
        assert!(!self.is_claimed.swap(true, Ordering::SeqCst), "two logs have the directory");
        Ok(Some(Claim(Arc::clone(&self.is_claimed))))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        LogFiles::list(&self.memory)
    }

    fn create(&self, name: &str) -> io::Result<StepFile> {
        self.memory.create(name).map(|file| self.file(file))
    }

    fn peek(&self, name: &str, max_bytes: u64) -> io::Result<Option<FileStart>> {
        self.memory.peek(name, max_bytes)
    }

    fn open(&self, name: &str) -> io::Result<StepFile> {
        self.memory.open(name).map(|file| self.file(file))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.checks.steps.fetch_add(1, Ordering::SeqCst);
        self.memory.remove(name)
    }

    fn sync(&self) -> io::Result<()> {
        self.memory.sync()
    }

    fn remove_directory(&self) -> io::Result<()> {
        LogFiles::remove_directory(&self.memory)
    }
}
