//! A directory and an image in memory. They record each step, can produce every state that a crash may leave, and can
//! fail on demand. (The store's tests have another implementation, with other steps.)

#![allow(missing_docs, reason = "a comment is only where the name does not suffice")]

use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

/// A recorded operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    CreateDirectory,
    /// Name and index of the file.
    Create(String, usize),
    Remove(String),
    /// Index of the file, offset and bytes.
    Write(usize, u64, Vec<u8>),
    /// Index of the file, offset and length.
    Zero(usize, u64, u64),
    Sync(usize),
    SyncDirectory,
    RemoveDirectory,
}

/// The result of a step that no sync has made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Kept,
    Lost,
    /// Only the 512-byte sectors of a write whose bit is set, modulo 64, are written.
    Torn(u64),
}

/// Steps that are to fail.
#[derive(Debug, Clone, Copy)]
struct PlannedFailure {
    /// Number of steps that succeed before.
    steps_before: usize,
    error: i32,
    /// Only the first of the failing steps fails.
    is_once: bool,
}

#[derive(Debug, Default, Clone)]
struct DiskState {
    exists: bool,
    names: BTreeMap<String, usize>,
    /// The contents of the files, of which the first is the image.
    files: Vec<Vec<u8>>,
    steps: Vec<Step>,
    failure: Option<PlannedFailure>,
    /// Most pages of all files together for which the file system has space.
    capacity: Option<usize>,
}

impl DiskState {
    /// Returns the number of pages of the files in the directory.
    fn pages(&self) -> usize {
        self.names.values().map(|file| self.files[*file].len().div_ceil(4096)).sum()
    }

    /// Returns how many of `bytes` bytes at `offset` there is space for.
    fn room(&self, file: usize, offset: u64, bytes: usize) -> usize {
        let Some(capacity) = self.capacity.filter(|_| file != 0) else { return bytes };
        let pages = self.files[file].len().div_ceil(4096) + capacity.saturating_sub(self.pages());
        (pages * 4096).saturating_sub(offset as usize).min(bytes)
    }
}

/// A directory and an image in memory. Clones share the same disk.
#[derive(Debug, Default, Clone)]
pub struct CrashDisk(Arc<Mutex<DiskState>>);

#[derive(Debug, Clone)]
pub struct CrashFile {
    disk: CrashDisk,
    /// Index of the file; 0 is the image.
    index: usize,
}

fn write_into(file: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let end = offset as usize + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[offset as usize..end].copy_from_slice(bytes);
}

impl CrashDisk {
    /// Creates a disk with an image and an empty directory.
    pub fn new(image: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(DiskState { files: vec![image], ..DiskState::default() })))
    }

    fn state(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().unwrap()
    }

    pub fn image(&self) -> CrashFile {
        CrashFile { disk: self.clone(), index: 0 }
    }

    pub fn recorded_steps(&self) -> Vec<Step> {
        self.state().steps.clone()
    }

    pub fn steps(&self) -> usize {
        self.state().steps.len()
    }

    pub fn fail_after(&self, after: usize, error: i32) {
        let mut state = self.state();
        state.failure = Some(PlannedFailure { steps_before: after, error, is_once: false });
    }

    /// Lets one step fail.
    pub fn fail_once_after(&self, after: usize, error: i32) {
        let mut state = self.state();
        state.failure = Some(PlannedFailure { steps_before: after, error, is_once: true });
    }

    pub fn stop_failing(&self) {
        self.state().failure = None;
    }

    /// Leaves space for `pages` more pages in the log's files.
    pub fn leave_room(&self, pages: usize) {
        let mut state = self.state();
        state.capacity = Some(state.pages() + pages);
    }

    pub fn change(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state();
        let file = state.names[name];
        change(&mut state.files[file]);
    }

    pub fn names(&self) -> Vec<String> {
        self.state().names.keys().cloned().collect()
    }

    /// Returns which of the first `count` steps are lost if the power fails after them.
    pub fn volatile(steps: &[Step], count: usize) -> Vec<usize> {
        let (mut synced_files, mut is_directory_synced) = (BTreeSet::new(), false);
        let mut volatile = Vec::new();
        for (index, step) in steps[..count].iter().enumerate().rev() {
            let is_durable = match step {
                Step::Sync(file) => {
                    synced_files.insert(*file);
                    true
                }
                Step::SyncDirectory => {
                    is_directory_synced = true;
                    true
                }
                Step::Write(file, ..) | Step::Zero(file, ..) => synced_files.contains(file),
                Step::Create(..) | Step::Remove(_) => is_directory_synced,
                Step::RemoveDirectory => {
                    is_directory_synced = true;
                    true
                }
                Step::CreateDirectory => true,
            };
            if !is_durable {
                volatile.push(index);
            }
        }
        volatile.reverse();
        volatile
    }

    /// Returns the disk after a power failure when `count` of `steps` were done, with `fates` for each step that was not
    /// durable.
    pub fn after_crash(image: &[u8], steps: &[Step], count: usize, fates: &BTreeMap<usize, Fate>) -> Self {
        let mut state = DiskState { files: vec![image.to_vec()], ..DiskState::default() };
        for (index, step) in steps[..count].iter().enumerate() {
            let fate = fates.get(&index).copied().unwrap_or(Fate::Kept);
            if let Step::Create(_, file) = step {
                state.files.resize(state.files.len().max(file + 1), Vec::new());
            }
            if fate == Fate::Lost {
                continue;
            }
            match step {
                Step::CreateDirectory => state.exists = true,
                Step::RemoveDirectory => {
                    state.exists = false;
                    state.names.clear();
                }
                Step::Create(name, file) => drop(state.names.insert(name.clone(), *file)),
                Step::Remove(name) => drop(state.names.remove(name)),
                Step::Write(file, offset, bytes) => match fate {
                    Fate::Torn(sectors) => {
                        for (sector, chunk) in bytes.chunks(512).enumerate() {
                            if sectors >> (sector % 64) & 1 == 1 {
                                write_into(&mut state.files[*file], offset + sector as u64 * 512, chunk);
                            }
                        }
                    }
                    _ => write_into(&mut state.files[*file], *offset, bytes),
                },
                Step::Zero(file, offset, len) => write_into(&mut state.files[*file], *offset, &vec![0; *len as usize]),
                Step::Sync(_) | Step::SyncDirectory => {}
            }
        }
        Self(Arc::new(Mutex::new(state)))
    }

    fn record(&self, step: Step) -> io::Result<MutexGuard<'_, DiskState>> {
        let mut state = self.state();
        match &mut state.failure {
            Some(PlannedFailure { steps_before: 0, error, .. }) => {
                let error = io::Error::from_raw_os_error(*error);
                state.failure.take_if(|failure| failure.is_once);
                return Err(error);
            }
            Some(failure) => failure.steps_before -= 1,
            None => {}
        }
        state.steps.push(step);
        Ok(state)
    }

    pub fn exists(&self) -> bool {
        self.state().exists
    }

    /// Returns the content of a file.
    pub fn content(&self, name: &str) -> io::Result<Vec<u8>> {
        let state = self.state();
        Ok(state.files[*state.names.get(name).ok_or(io::ErrorKind::NotFound)?].clone())
    }

    pub fn create_directory(&self) -> io::Result<()> {
        self.record(Step::CreateDirectory)?.exists = true;
        Ok(())
    }

    pub fn create(&self, name: &str) -> io::Result<CrashFile> {
        let number = {
            let state = self.state();
            assert!(state.exists);
            if state.names.contains_key(name) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            state.files.len()
        };
        let mut state = self.record(Step::Create(name.into(), number))?;
        state.names.insert(name.into(), number);
        state.files.push(Vec::new());
        Ok(CrashFile { disk: self.clone(), index: number })
    }

    pub fn open(&self, name: &str) -> io::Result<CrashFile> {
        let number = self.state().names.get(name).copied().ok_or(io::ErrorKind::NotFound)?;
        Ok(CrashFile { disk: self.clone(), index: number })
    }

    pub fn remove(&self, name: &str) -> io::Result<()> {
        let removed = self.record(Step::Remove(name.into()))?.names.remove(name);
        removed.map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub fn sync_directory(&self) -> io::Result<()> {
        self.record(Step::SyncDirectory).map(drop)
    }

    pub fn remove_directory(&self) -> io::Result<()> {
        let mut state = self.record(Step::RemoveDirectory)?;
        assert!(state.names.is_empty(), "{:?}", state.names);
        state.exists = false;
        Ok(())
    }
}

impl CrashFile {
    pub fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let state = self.disk.state();
        let file = state.files[self.index].get(offset as usize..).unwrap_or_default();
        let len = file.len().min(target.len());
        target[..len].copy_from_slice(&file[..len]);
        Ok(len)
    }

    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let room = self.disk.state().room(self.index, offset, bytes.len());
        let written = &bytes[..room];
        let mut state = self.disk.record(Step::Write(self.index, offset, written.to_vec()))?;
        write_into(&mut state.files[self.index], offset, written);
        if room < bytes.len() { Err(Errno::NOSPC.into()) } else { Ok(()) }
    }

    pub fn zero(&self, offset: u64, len: u64, hole: bool) -> io::Result<()> {
        // Fails as on a file system that supports only holes.
        if !hole {
            return Err(Errno::OPNOTSUPP.into());
        }
        let mut state = self.disk.record(Step::Zero(self.index, offset, len))?;
        write_into(&mut state.files[self.index], offset, &vec![0; len as usize]);
        Ok(())
    }

    pub fn sync(&self) -> io::Result<()> {
        self.disk.record(Step::Sync(self.index)).map(drop)
    }

    pub fn length(&self) -> io::Result<u64> {
        Ok(self.disk.state().files[self.index].len() as u64)
    }
}

/// A power failure: what becomes of each step that no sync has made durable.
pub struct PowerFailure {
    pub fates: BTreeMap<usize, Fate>,
    pub description: String,
}

/// Returns power failures after `count` steps: all volatile steps are lost, each alone is lost, each alone is kept.
pub fn power_failures(steps: &[Step], count: usize) -> Vec<PowerFailure> {
    let volatile = CrashDisk::volatile(steps, count);
    let all_lost: BTreeMap<_, _> = volatile.iter().map(|step| (*step, Fate::Lost)).collect();
    let mut failures = vec![PowerFailure { fates: all_lost.clone(), description: "all lost".into() }];
    for step in volatile {
        let fates = BTreeMap::from([(step, Fate::Lost)]);
        failures.push(PowerFailure { fates, description: format!("step {step} lost") });
        let mut fates = all_lost.clone();
        fates.remove(&step);
        failures.push(PowerFailure { fates, description: format!("only step {step} kept") });
    }
    failures
}
