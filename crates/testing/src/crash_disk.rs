//! A disk in memory: directories, files with names in them, and an image, the file without a name.
//!
//! It records each *step*, an operation that changes it, and can produce every state that a crash may leave: each step
//! that no sync has made durable is kept, lost or torn. It can also fail steps, run out of space, and do the work of
//! another process before a step or a read. The tests of the store and of the redo log put it under their file layers.

#![allow(missing_docs, reason = "a comment is only where the name does not suffice")]

use rekindle_kernel::durable_file::DurableFile;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

/// The index of the image.
const IMAGE: usize = 0;
/// Stands for the directory that has the disk's topmost directory, whose own name is "".
pub const OUTSIDE: &str = "..";
/// Up to this number of volatile steps, [`power_failures`] returns all combinations of lost steps.
const MAX_COMBINED_STEPS: usize = 4;

/// A recorded operation. Directories and files are named like `log/17`; each file has an index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    CreateDirectory(String),
    RemoveDirectory(String),
    /// A new file, or a further name of a file.
    AddName(String, usize),
    Remove(String),
    /// Offset and bytes.
    Write(usize, u64, Vec<u8>),
    /// Offset and length.
    Zero(usize, u64, u64),
    /// New length.
    Truncate(usize, u64),
    Sync(usize),
    SyncDirectory(String),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write(file, offset, bytes) => write!(f, "Write({file}, {offset}, {} bytes)", bytes.len()),
            _ => write!(f, "{self:?}"),
        }
    }
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
pub struct StepFailures {
    /// Number of steps that succeed before.
    pub after: usize,
    pub error: Errno,
    /// A failing write still writes half of its bytes.
    pub half: bool,
    /// Number of steps that fail. Later steps succeed again.
    pub count: usize,
}

/// Work of another process.
pub type Meanwhile = Box<dyn FnOnce() + Send>;

/// Work that interrupts the operations through one handle.
struct Interruption {
    counted: CountedOperation,
    /// Number of operations that are still done before the work.
    after: usize,
    work: Meanwhile,
}

impl fmt::Debug for Interruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interruption")
    }
}

/// The kind of operation that is counted until the interruption.
#[derive(Clone, Copy, PartialEq)]
enum CountedOperation {
    Step,
    Read,
}

#[derive(Debug, Default, Clone)]
struct DiskState {
    directories: BTreeSet<String>,
    names: BTreeMap<String, usize>,
    files: Vec<Vec<u8>>,
    steps: Vec<Step>,
    failures: Option<StepFailures>,
    /// Most pages of all named files together for which the file system has space.
    capacity: Option<usize>,
    /// Maximum over time of the total length of all named files.
    max_bytes: usize,
}

fn parent(name: &str) -> &str {
    match name {
        "" => OUTSIDE,
        _ => name.rsplit_once('/').map_or("", |(parent, _)| parent),
    }
}

fn write_into(file: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let end = offset as usize + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[offset as usize..end].copy_from_slice(bytes);
}

impl DiskState {
    /// Returns the number of pages of the named files.
    fn pages(&self) -> usize {
        self.names.values().map(|file| self.files[*file].len().div_ceil(4096)).sum()
    }

    /// Returns how many of `bytes` bytes at `offset` there is space for.
    fn room(&self, file: usize, offset: u64, bytes: usize) -> usize {
        let Some(capacity) = self.capacity.filter(|_| file != IMAGE) else { return bytes };
        let pages = self.files[file].len().div_ceil(4096) + capacity.saturating_sub(self.pages());
        (pages * 4096).saturating_sub(offset as usize).min(bytes)
    }

    /// Counts a step. Returns the failure if it is to fail.
    fn next_failure(&mut self) -> Option<StepFailures> {
        let failures = self.failures.as_mut()?;
        if failures.after > 0 {
            failures.after -= 1;
            return None;
        }
        failures.count = failures.count.checked_sub(1)?;
        Some(*failures)
    }

    fn apply(&mut self, step: &Step, fate: Fate) {
        if let Step::AddName(_, file) = step {
            // A file exists even if its name is lost.
            self.files.resize(self.files.len().max(file + 1), Vec::new());
        }
        if fate == Fate::Lost {
            return;
        }
        match step {
            Step::CreateDirectory(name) => drop(self.directories.insert(name.clone())),
            Step::RemoveDirectory(name) => {
                self.directories.remove(name);
                self.names.retain(|file, _| parent(file) != name);
            }
            Step::AddName(name, file) => drop(self.names.insert(name.clone(), *file)),
            Step::Remove(name) => drop(self.names.remove(name)),
            Step::Write(file, offset, bytes) => {
                let sectors = if let Fate::Torn(sectors) = fate { sectors } else { u64::MAX };
                for (sector, chunk) in bytes.chunks(512).enumerate().filter(|(n, _)| sectors >> (n % 64) & 1 == 1) {
                    write_into(&mut self.files[*file], offset + sector as u64 * 512, chunk);
                }
            }
            Step::Zero(file, offset, len) => write_into(&mut self.files[*file], *offset, &vec![0; *len as usize]),
            Step::Truncate(file, len) => self.files[*file].truncate(*len as usize),
            Step::Sync(_) | Step::SyncDirectory(_) => {}
        }
    }

    fn record(&mut self, step: Step) {
        self.apply(&step, Fate::Kept);
        self.steps.push(step);
        let named_files: BTreeSet<_> = self.names.values().collect();
        let bytes = named_files.into_iter().map(|file| self.files[*file].len()).sum();
        self.max_bytes = self.max_bytes.max(bytes);
    }
}

/// A disk in memory. Clones share the content.
#[derive(Debug, Clone)]
pub struct CrashDisk {
    state: Arc<Mutex<DiskState>>,
    interruption: Arc<Mutex<Option<Interruption>>>,
}

#[derive(Debug, Clone)]
pub struct CrashFile {
    disk: CrashDisk,
    index: usize,
}

impl Default for CrashDisk {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl From<DiskState> for CrashDisk {
    fn from(state: DiskState) -> Self {
        Self { state: Arc::new(Mutex::new(state)), interruption: Arc::default() }
    }
}

impl CrashDisk {
    /// Creates a disk with an image and no directory.
    pub fn new(image: Vec<u8>) -> Self {
        DiskState { files: vec![image], ..DiskState::default() }.into()
    }

    fn state(&self) -> MutexGuard<'_, DiskState> {
        self.state.lock().unwrap()
    }

    pub fn image(&self) -> CrashFile {
        CrashFile { disk: self.clone(), index: IMAGE }
    }

    pub fn recorded_steps(&self) -> Vec<Step> {
        self.state().steps.clone()
    }

    pub fn steps(&self) -> usize {
        self.state().steps.len()
    }

    pub fn fail_steps(&self, failures: StepFailures) {
        self.state().failures = Some(failures);
    }

    pub fn fail_after(&self, after: usize, error: i32) {
        let error = Errno::from_raw_os_error(error);
        self.fail_steps(StepFailures { after, error, half: false, count: usize::MAX });
    }

    /// Lets one step fail.
    pub fn fail_once_after(&self, after: usize, error: i32) {
        self.fail_steps(StepFailures { after, error: Errno::from_raw_os_error(error), half: false, count: 1 });
    }

    pub fn stop_failing(&self) {
        self.state().failures = None;
    }

    /// Returns whether all steps that were to succeed are done.
    pub fn has_failed(&self) -> bool {
        self.state().failures.is_some_and(|failures| failures.after == 0)
    }

    /// Leaves space for `pages` more pages in the named files.
    pub fn leave_room(&self, pages: usize) {
        let mut state = self.state();
        state.capacity = Some(state.pages() + pages);
    }

    /// Returns the maximum over time of the total length of all named files.
    pub fn max_bytes(&self) -> usize {
        self.state().max_bytes
    }

    /// Returns a handle to the same disk that can be interrupted separately.
    pub fn handle(&self) -> Self {
        Self { state: self.state.clone(), interruption: Arc::default() }
    }

    /// Runs `work` before the `after`-th step through this handle from now on.
    pub fn interrupt(&self, after: usize, work: Meanwhile) {
        *self.interruption.lock().unwrap() = Some(Interruption { counted: CountedOperation::Step, after, work });
    }

    /// Runs `work` before the `after`-th read through this handle from now on.
    pub fn interrupt_read(&self, after: usize, work: Meanwhile) {
        *self.interruption.lock().unwrap() = Some(Interruption { counted: CountedOperation::Read, after, work });
    }

    /// Returns an independent disk with the same content and without recorded steps.
    pub fn copy(&self) -> Self {
        DiskState { steps: Vec::new(), failures: None, ..self.state().clone() }.into()
    }

    /// Changes a file without recording a step.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state();
        let file = state.names[name];
        change(&mut state.files[file]);
    }

    pub fn names(&self) -> Vec<String> {
        self.state().names.keys().cloned().collect()
    }

    pub fn has_directory(&self, name: &str) -> bool {
        self.state().directories.contains(name)
    }

    /// Returns the content of a file.
    pub fn content(&self, name: &str) -> io::Result<Vec<u8>> {
        let state = self.state();
        Ok(state.files[*state.names.get(name).ok_or(io::ErrorKind::NotFound)?].clone())
    }

    /// Returns which of the first `count` steps are lost if the power fails after them.
    pub fn volatile(steps: &[Step], count: usize) -> Vec<usize> {
        let (mut synced_files, mut synced_directories) = (BTreeSet::new(), BTreeSet::new());
        let mut volatile = Vec::new();
        for (index, step) in steps[..count].iter().enumerate().rev() {
            let is_durable = match step {
                Step::Sync(file) => {
                    synced_files.insert(*file);
                    true
                }
                Step::SyncDirectory(name) => {
                    synced_directories.insert(name.as_str());
                    true
                }
                Step::Write(file, ..) | Step::Zero(file, ..) | Step::Truncate(file, _) => synced_files.contains(file),
                Step::CreateDirectory(name) | Step::AddName(name, _) | Step::Remove(name) => {
                    synced_directories.contains(parent(name))
                }
                Step::RemoveDirectory(name) => {
                    let is_durable = synced_directories.contains(parent(name));
                    if is_durable {
                        // Its names are lost with it, whether they were durable or not.
                        synced_directories.insert(name);
                    }
                    is_durable
                }
            };
            if !is_durable {
                volatile.push(index);
            }
        }
        volatile.reverse();
        volatile
    }

    /// Returns the disk after a power failure when `count` of `steps` were done, with `fates` for each step that was not
    /// durable. The disk began with an image and no directory.
    pub fn after_crash(image: &[u8], steps: &[Step], count: usize, fates: &BTreeMap<usize, Fate>) -> Self {
        let mut state = DiskState { files: vec![image.to_vec()], ..DiskState::default() };
        for (index, step) in steps[..count].iter().enumerate() {
            state.apply(step, fates.get(&index).copied().unwrap_or(Fate::Kept));
        }
        let DiskState { directories, names, .. } = &mut state;
        if !directories.contains("") {
            directories.clear();
        }
        names.retain(|name, _| directories.contains(parent(name)));
        state.into()
    }

    /// Runs the work that is due before this operation.
    fn run_due_work(&self, operation: CountedOperation) {
        let mut interruption = self.interruption.lock().unwrap();
        let Some(next) = interruption.as_mut().filter(|next| next.counted == operation) else { return };
        if next.after > 0 {
            next.after -= 1;
            return;
        }
        let due = interruption.take();
        // The work may use this handle, too.
        drop(interruption);
        if let Some(due) = due {
            (due.work)();
        }
    }

    fn step(&self, step: Step) -> io::Result<()> {
        self.run_due_work(CountedOperation::Step);
        let mut state = self.state();
        // Another process may have used the name just before.
        if let Step::AddName(name, _) = &step
            && state.names.contains_key(name)
        {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if let Some(StepFailures { error, half, .. }) = state.next_failure() {
            if let (true, Step::Write(file, offset, mut bytes)) = (half, step) {
                bytes.truncate(bytes.len() / 2);
                state.record(Step::Write(file, offset, bytes));
            }
            return Err(error.into());
        }
        state.record(step);
        Ok(())
    }

    /// Creates the directory `name`. An existing directory is no error.
    pub fn create_directory(&self, name: &str) -> io::Result<()> {
        if self.has_directory(name) {
            return Ok(());
        }
        self.step(Step::CreateDirectory(name.into()))
    }

    pub fn remove_directory(&self, name: &str) -> io::Result<()> {
        let names = self.names();
        assert!(!names.iter().any(|file| parent(file) == name), "{names:?}");
        self.step(Step::RemoveDirectory(name.into()))
    }

    /// Returns names and lengths of the files and directories in the directory `name`.
    pub fn list(&self, name: &str) -> io::Result<Vec<(String, u64)>> {
        self.run_due_work(CountedOperation::Read);
        let state = self.state();
        if !state.directories.contains(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let files = state.names.iter().map(|(path, file)| (path, state.files[*file].len() as u64));
        let entries = files.chain(state.directories.iter().map(|path| (path, 0)));
        let in_directory = entries.filter(|(path, _)| parent(path) == name);
        Ok(in_directory.map(|(path, length)| (path.rsplit('/').next().unwrap().to_owned(), length)).collect())
    }

    pub fn create(&self, name: &str) -> io::Result<CrashFile> {
        let index = {
            let mut state = self.state();
            if state.names.contains_key(name) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            if !state.directories.contains(parent(name)) {
                return Err(io::ErrorKind::NotFound.into());
            }
            state.files.push(Vec::new());
            state.files.len() - 1
        };
        self.step(Step::AddName(name.into(), index))?;
        Ok(CrashFile { disk: self.clone(), index })
    }

    pub fn open(&self, name: &str) -> io::Result<CrashFile> {
        self.run_due_work(CountedOperation::Read);
        let index = self.state().names.get(name).copied().ok_or(io::ErrorKind::NotFound)?;
        Ok(CrashFile { disk: self.clone(), index })
    }

    /// Gives the file `from` the additional name `to`.
    pub fn link(&self, from: &str, to: &str) -> io::Result<()> {
        let index = self.state().names.get(from).copied().ok_or(io::ErrorKind::NotFound)?;
        self.step(Step::AddName(to.into(), index))
    }

    pub fn remove(&self, name: &str) -> io::Result<()> {
        if !self.state().names.contains_key(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.step(Step::Remove(name.into()))
    }

    /// Makes the names in a directory durable. The name of the topmost directory is in [`OUTSIDE`].
    pub fn sync_directory(&self, name: &str) -> io::Result<()> {
        self.step(Step::SyncDirectory(name.into()))
    }
}

impl DurableFile for CrashFile {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        self.disk.run_due_work(CountedOperation::Read);
        let state = self.disk.state();
        let file = state.files[self.index].get(offset as usize..).unwrap_or_default();
        let len = file.len().min(target.len());
        target[..len].copy_from_slice(&file[..len]);
        Ok(len)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let room = self.disk.state().room(self.index, offset, bytes.len());
        self.disk.step(Step::Write(self.index, offset, bytes[..room].to_vec()))?;
        if room < bytes.len() { Err(Errno::NOSPC.into()) } else { Ok(()) }
    }

    fn zero(&self, offset: u64, len: u64, hole: bool) -> io::Result<()> {
        // Fails as on a file system that supports only holes.
        if !hole {
            return Err(Errno::OPNOTSUPP.into());
        }
        self.disk.step(Step::Zero(self.index, offset, len))
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.disk.step(Step::Truncate(self.index, len))
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.step(Step::Sync(self.index))
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.disk.state().files[self.index].len() as u64)
    }
}

/// A power failure: what becomes of each step that no sync has made durable.
pub struct PowerFailure {
    pub fates: BTreeMap<usize, Fate>,
    pub description: String,
}

/// Returns power failures after `count` steps. The first loses all volatile steps. The others are all combinations of
/// lost steps; if these are too many, each step alone is lost, and each alone is kept.
pub fn power_failures(steps: &[Step], count: usize) -> Vec<PowerFailure> {
    let volatile = CrashDisk::volatile(steps, count);
    let losing = |lost: &dyn Fn(usize) -> bool| {
        let lost: Vec<usize> = (0..volatile.len()).filter(|n| lost(*n)).map(|n| volatile[n]).collect();
        let description = format!("of steps {volatile:?}, {lost:?} are lost");
        PowerFailure { fates: lost.into_iter().map(|step| (step, Fate::Lost)).collect(), description }
    };
    if volatile.len() <= MAX_COMBINED_STEPS {
        return (0..1u32 << volatile.len()).rev().map(|lost| losing(&|n| lost >> n & 1 == 1)).collect();
    }
    let each_alone = (0..volatile.len()).flat_map(|step| [losing(&|n| n == step), losing(&|n| n != step)]);
    [losing(&|_| true)].into_iter().chain(each_alone).collect()
}

/// Returns a random number of steps, and a power failure after them that mixes all fates.
pub fn random_power_failure(steps: &[Step], random: &mut fastrand::Rng) -> (usize, PowerFailure) {
    let count = random.usize(..=steps.len());
    let mut random_fate = || match random.u8(..3) {
        0 => Fate::Kept,
        1 => Fate::Lost,
        _ => Fate::Torn(random.u64(..)),
    };
    let volatile = CrashDisk::volatile(steps, count);
    let fates: BTreeMap<_, _> = volatile.into_iter().map(|step| (step, random_fate())).collect();
    let description = format!("{fates:?}");
    (count, PowerFailure { fates, description })
}
