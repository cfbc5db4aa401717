//! A disk in memory. It records each operation, can construct every state that a crash may leave, and can fail
//! operations.

use crate::disk::{Disk, DiskFile};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

/// A recorded operation that changes the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    Mkdir(String),
    Create(String, usize),
    Link(String, usize),
    Remove(String),
    Write(usize, u64, Vec<u8>),
    Truncate(usize, u64),
    Sync(usize),
    SyncDirectory(String),
}

/// The effect of a crash on a step that no sync has made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashEffect {
    KeptCheckpoint,
    Lost,
    /// A write of which only the 512-byte sectors are kept whose bit is set; the bits repeat.
    Torn(u64),
}

/// Configuration of failing steps.
#[derive(Debug, Clone, Copy)]
pub struct StepFailures {
    /// Number of steps that still succeed.
    pub after: usize,
    pub error: rustix::io::Errno,
    /// A failing write still writes half of its bytes.
    pub half: bool,
    /// Number of steps that fail. Later steps succeed again.
    pub count: usize,
}

/// Work of another process that is done just before a step.
pub type Meanwhile = Box<dyn FnOnce() + Send>;

/// Work that interrupts the operations through one handle.
struct Interruption {
    counted: CountedOperation,
    /// Number of operations that are still done before the work.
    after: usize,
    work: Meanwhile,
}

/// The kind of operation that is counted until the interruption.
#[derive(Clone, Copy, PartialEq)]
enum CountedOperation {
    Step,
    Read,
}

impl std::fmt::Debug for Interruption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interruption")
    }
}

#[derive(Debug, Default, Clone)]
struct State {
    directories: BTreeSet<String>,
    names: BTreeMap<String, usize>,
    files: Vec<Vec<u8>>,
    ops: Vec<Op>,
    failures: Option<StepFailures>,
    /// Maximum over time of the total length of all files that have a name.
    max_bytes: u64,
}

/// A disk in memory. Clones share the content.
#[derive(Debug, Default, Clone)]
pub struct MemoryDisk {
    state: Arc<Mutex<State>>,
    interruption: Arc<Mutex<Option<Interruption>>>,
}

#[derive(Debug)]
struct MemoryFile {
    disk: MemoryDisk,
    /// Position in [`State::files`].
    file: usize,
}

fn parent(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(parent, _)| parent)
}

fn write_into(file: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let end = offset as usize + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[offset as usize..end].copy_from_slice(bytes);
}

impl MemoryDisk {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Returns the steps that were recorded so far.
    pub fn ops(&self) -> Vec<Op> {
        self.state().ops.clone()
    }

    pub fn steps(&self) -> usize {
        self.state().ops.len()
    }

    /// Makes steps fail from now on.
    pub fn fail_steps(&self, failures: StepFailures) {
        self.state().failures = Some(failures);
    }

    pub fn stop_failing(&self) {
        self.state().failures = None;
    }

    /// Returns whether a step has failed.
    pub fn has_failed(&self) -> bool {
        self.state().failures.is_some_and(|failures| failures.after == 0)
    }

    /// Returns a handle to the same disk that can be interrupted separately.
    pub fn handle(&self) -> Self {
        Self { state: self.state.clone(), interruption: Arc::default() }
    }

    /// Runs `meanwhile` before the `after`-th step through this handle from now on.
    pub fn interrupt(&self, after: usize, meanwhile: Meanwhile) {
        self.set_interruption(CountedOperation::Step, after, meanwhile);
    }

    /// Runs `meanwhile` before the `after`-th read through this handle from now on.
    pub fn interrupt_read(&self, after: usize, meanwhile: Meanwhile) {
        self.set_interruption(CountedOperation::Read, after, meanwhile);
    }

    fn set_interruption(&self, counted: CountedOperation, after: usize, work: Meanwhile) {
        *self.interruption.lock().unwrap() = Some(Interruption { counted, after, work });
    }

    /// Returns the maximum over time of the total length of all files that have a name.
    pub fn max_bytes(&self) -> u64 {
        self.state().max_bytes
    }

    /// Returns an independent disk with the same content and without recorded steps.
    pub fn copy(&self) -> Self {
        let mut state = self.state().clone();
        state.ops.clear();
        state.failures = None;
        Self { state: Arc::new(Mutex::new(state)), interruption: Arc::default() }
    }

    /// Changes a file without recording a step.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state();
        let file = state.names[name];
        change(&mut state.files[file]);
    }

    pub fn delete(&self, name: &str) {
        assert!(self.state().names.remove(name).is_some(), "{name}");
    }

    pub fn names(&self) -> Vec<String> {
        self.state().names.keys().cloned().collect()
    }

    pub fn content(&self, name: &str) -> Vec<u8> {
        let state = self.state();
        state.files[state.names[name]].clone()
    }

    /// Returns which of the first `count` steps are not durable if the power fails after them.
    pub fn volatile(ops: &[Op], count: usize) -> Vec<usize> {
        let (mut files, mut directories) = (BTreeSet::new(), BTreeSet::new());
        let mut volatile = Vec::new();
        for (n, op) in ops[..count].iter().enumerate().rev() {
            let durable = match op {
                Op::Sync(file) => {
                    files.insert(*file);
                    true
                }
                Op::SyncDirectory(name) => {
                    directories.insert(name.clone());
                    true
                }
                Op::Write(file, ..) | Op::Truncate(file, _) => files.contains(file),
                Op::Mkdir(name) | Op::Create(name, _) | Op::Link(name, _) | Op::Remove(name) => {
                    directories.contains(parent(name))
                }
            };
            if !durable {
                volatile.push(n);
            }
        }
        volatile.reverse();
        volatile
    }

    /// Returns the state of an empty disk after the first `count` of `ops` and a power failure. `effects` has the effect
    /// on each step that was not durable.
    pub fn after_crash(ops: &[Op], count: usize, effects: &BTreeMap<usize, CrashEffect>) -> Self {
        let mut state = State::default();
        for (n, op) in ops[..count].iter().enumerate() {
            let effects = effects.get(&n).copied().unwrap_or(CrashEffect::KeptCheckpoint);
            // A file exists, possibly without a name, even if its name is lost.
            if let Op::Create(_, file) = op {
                state.files.resize(state.files.len().max(file + 1), Vec::new());
            }
            if effects == CrashEffect::Lost {
                continue;
            }
            match op {
                Op::Mkdir(name) => drop(state.directories.insert(name.clone())),
                Op::Create(name, file) | Op::Link(name, file) => drop(state.names.insert(name.clone(), *file)),
                Op::Remove(name) => drop(state.names.remove(name)),
                Op::Write(file, offset, bytes) => match effects {
                    CrashEffect::Torn(sectors) => {
                        for (sector, chunk) in bytes.chunks(512).enumerate() {
                            if sectors >> (sector % 64) & 1 == 1 {
                                write_into(&mut state.files[*file], offset + sector as u64 * 512, chunk);
                            }
                        }
                    }
                    _ => write_into(&mut state.files[*file], *offset, bytes),
                },
                Op::Truncate(file, len) => state.files[*file].truncate(*len as usize),
                Op::Sync(_) | Op::SyncDirectory(_) => {}
            }
        }
        let State { names, directories, .. } = &mut state;
        names.retain(|name, _| parent(name).is_empty() || directories.contains(parent(name)));
        Self { state: Arc::new(Mutex::new(state)), interruption: Arc::default() }
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

    fn step(&self, op: Op) -> io::Result<MutexGuard<'_, State>> {
        self.run_due_work(CountedOperation::Step);
        // Another process may have taken the name just before.
        if let Op::Create(name, _) | Op::Link(name, _) = &op
            && self.state().names.contains_key(name)
        {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let mut state = self.state();
        if let Some(failures) = &mut state.failures {
            if failures.after == 0 && failures.count > 0 {
                failures.count -= 1;
                let StepFailures { error, half, .. } = *failures;
                if let (true, Op::Write(file, offset, bytes)) = (half, &op) {
                    let part = bytes[..bytes.len() / 2].to_vec();
                    write_into(&mut state.files[*file], *offset, &part);
                    state.ops.push(Op::Write(*file, *offset, part));
                }
                return Err(error.into());
            }
            failures.after = failures.after.saturating_sub(1);
        }
        match &op {
            Op::Mkdir(name) => drop(state.directories.insert(name.clone())),
            Op::Create(name, file) | Op::Link(name, file) => drop(state.names.insert(name.clone(), *file)),
            Op::Remove(name) => drop(state.names.remove(name)),
            Op::Write(file, offset, bytes) => write_into(&mut state.files[*file], *offset, bytes),
            Op::Truncate(file, len) => state.files[*file].truncate(*len as usize),
            Op::Sync(_) | Op::SyncDirectory(_) => {}
        }
        state.ops.push(op);
        let used =
            state.names.values().collect::<BTreeSet<_>>().iter().map(|file| state.files[**file].len() as u64).sum();
        state.max_bytes = state.max_bytes.max(used);
        Ok(state)
    }
}

impl DiskFile for MemoryFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.disk.run_due_work(CountedOperation::Read);
        let state = self.disk.state();
        let file = state.files[self.file].get(offset as usize..).unwrap_or_default();
        let len = file.len().min(buffer.len());
        buffer[..len].copy_from_slice(&file[..len]);
        Ok(len)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.disk.step(Op::Write(self.file, offset, bytes.to_vec())).map(drop)
    }

    fn start_writeback(&self, _: u64, _: u64) {}

    fn sync(&self) -> io::Result<()> {
        self.disk.step(Op::Sync(self.file)).map(drop)
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.disk.step(Op::Truncate(self.file, len)).map(drop)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.disk.state().files[self.file].len() as u64)
    }
}

impl Disk for MemoryDisk {
    fn name(&self) -> &str {
        "memory"
    }

    fn create_directory(&self, name: &str) -> io::Result<()> {
        if self.state().directories.contains(name) {
            return Ok(());
        }
        self.step(Op::Mkdir(name.into())).map(drop)
    }

    fn list(&self, name: &str) -> io::Result<Vec<(String, u64)>> {
        self.run_due_work(CountedOperation::Read);
        let state = self.state();
        if !name.is_empty() && !state.directories.contains(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let files = state.names.iter().map(|(name, file)| (name, state.files[*file].len() as u64));
        let entries = files.chain(state.directories.iter().filter(|name| !name.is_empty()).map(|name| (name, 0)));
        let in_directory = entries.filter(|(path, _)| parent(path) == name);
        Ok(in_directory.map(|(path, len)| (path.rsplit('/').next().unwrap().to_owned(), len)).collect())
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let file = {
            let mut state = self.state();
            if state.names.contains_key(name) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            if !parent(name).is_empty() && !state.directories.contains(parent(name)) {
                return Err(io::ErrorKind::NotFound.into());
            }
            state.files.push(Vec::new());
            state.files.len() - 1
        };
        drop(self.step(Op::Create(name.into(), file))?);
        Ok(Arc::new(MemoryFile { disk: self.clone(), file }))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.run_due_work(CountedOperation::Read);
        let file = self.state().names.get(name).copied().ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(MemoryFile { disk: self.clone(), file }))
    }

    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        let file = {
            let state = self.state();
            if state.names.contains_key(to) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            state.names.get(from).copied().ok_or(io::ErrorKind::NotFound)?
        };
        self.step(Op::Link(to.into(), file)).map(drop)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        if !self.state().names.contains_key(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.step(Op::Remove(name.into())).map(drop)
    }

    fn sync_directory(&self, name: &str) -> io::Result<()> {
        self.step(Op::SyncDirectory(name.into())).map(drop)
    }
}
