//! Real files whose changes and syncs fail: `ENOSPC` or `EIO` from the N-th system call on, or only once. Also what a
//! power failure leaves of these files.
//!
//! [`FaultyFiles::supervise`] puts a thread under a seccomp filter. The kernel stops the thread, and every thread that it
//! starts, before each system call that changes or syncs a file, and notifies the [`supervisor`], which lets the call
//! pass or fails it. So the code under test needs no layer of its own, and raw system calls are seen, too.
//!
//! | class | system calls | `ENOSPC` | `EIO` |
//! |---|---|---|---|
//! | content | `write`, `pwrite64`, `writev`, `pwritev`, `pwritev2`, `copy_file_range`, `fallocate`, `ftruncate`, `sync_file_range` | yes | yes |
//! | sync | `fsync`, `fdatasync` | yes | yes |
//! | new name | `open` and `openat` with `O_CREAT`, `mkdir`, `link`, `rename` and their variants | yes | yes |
//! | removed name | `unlink`, `rmdir` and their variants | no | yes |
//!
//! *Limit:* `io_uring` does its work without system calls, so its writes and syncs do not fail here.
//!
//! A sync that is to succeed is recorded and not passed to the file system, so that a scenario takes milliseconds. What
//! it has made durable survives [`FaultyFiles::lose_power`]; everything else is lost there: names that were added since
//! the last sync of their directory, and contents that were written since the last sync of their file. A removed name
//! stays removed.

mod supervisor;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use supervisor::{Call, Class};

/// How calls fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// One call fails with `ENOSPC`.
    NoSpaceOnce,
    /// The disk stays full: from one call on, all fail with `ENOSPC`.
    NoSpace,
    /// One call fails with `EIO`.
    IoErrorOnce,
    /// One sync of a file fails with `EIO`, and what was written to the file since its last sync is lost immediately. A
    /// later sync succeeds, although it cannot make these bytes durable (as on Linux since 4.13). Only such syncs count.
    SyncLosesData,
}

impl FaultKind {
    /// Returns the error of the calls that fail.
    #[must_use]
    pub fn errno(self) -> Errno {
        match self {
            Self::NoSpaceOnce | Self::NoSpace => Errno::NOSPC,
            Self::IoErrorOnce | Self::SyncLosesData => Errno::IO,
        }
    }

    /// Returns whether a call can fail in this way.
    fn applies_to(self, call: &Call) -> bool {
        match self {
            Self::NoSpaceOnce | Self::NoSpace => call.class != Class::RemovedName,
            Self::IoErrorOnce => true,
            Self::SyncLosesData => call.class == Class::Sync && !call.path.is_dir(),
        }
    }
}

/// Which calls fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// How they fail.
    pub kind: FaultKind,
    /// Number of the first call that fails, from 1.
    pub number: usize,
}

/// A call that has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedCall {
    /// Name of the system call.
    pub name: &'static str,
    /// The file or directory that it was about.
    pub path: PathBuf,
}

/// Device and inode of a file.
type FileId = (u64, u64);

#[derive(Debug, Default)]
struct FilesState {
    fault: Option<Fault>,
    /// Number of calls since the start of the fault.
    counted: usize,
    failed: Vec<FailedCall>,
    /// The files are changed by this module: nothing is recorded, and nothing fails.
    is_paused: bool,
    /// Contents at the last sync.
    durable_contents: HashMap<FileId, Content>,
    /// Names that were added since the last sync of their directory, in this order.
    volatile_names: Vec<PathBuf>,
}

/// The answer to a call that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The kernel carries out the call.
    Pass,
    /// The call succeeds without an effect.
    Succeed,
    Fail(Errno),
}

/// The files below a directory, which the threads of a scenario use.
#[derive(Debug, Clone)]
pub struct FaultyFiles {
    directory: PathBuf,
    state: Arc<Mutex<FilesState>>,
}

/// Runs `scenario` in a supervised thread of its own, with the files below `directory`.
///
/// # Panics
/// If `scenario` panics, and as [`FaultyFiles::new`] and [`FaultyFiles::supervise`].
pub fn with_faults<T: Send>(directory: &Path, scenario: impl FnOnce(&FaultyFiles) -> T + Send) -> T {
    let files = FaultyFiles::new(directory);
    thread::scope(|scope| {
        let scenario = scope.spawn(|| {
            files.supervise();
            scenario(&files)
        });
        scenario.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

impl FaultyFiles {
    /// Returns the files below `directory`, which work until a fault starts.
    ///
    /// # Panics
    /// If `directory` has a symbolic link in its path.
    #[must_use]
    pub fn new(directory: &Path) -> Self {
        assert_eq!(fs::canonicalize(directory).unwrap(), directory, "the kernel reports paths without symbolic links");
        Self { directory: directory.to_owned(), state: Arc::default() }
    }

    /// Lets calls of this thread fail from now on, and those of the threads that it starts.
    ///
    /// # Panics
    /// If the kernel has no seccomp notifications.
    pub fn supervise(&self) {
        let (listener_sender, listener) = std::sync::mpsc::channel();
        let files = self.clone();
        // Started before, so that the supervisor itself has no filter. It ends with the last thread that has the filter.
        thread::spawn(move || {
            if let Ok(listener) = listener.recv() {
                supervisor::run(&listener, &files);
            }
        });
        listener_sender.send(supervisor::install_filter().unwrap()).unwrap();
    }

    fn state(&self) -> MutexGuard<'_, FilesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a fault. All that the directory has now is durable.
    pub fn start(&self, fault: Fault) {
        self.note_flush();
        let mut state = self.state();
        (state.fault, state.counted) = (Some(fault), 0);
        state.failed.clear();
        state.volatile_names.clear();
    }

    /// Ends the fault: the disk works again. Returns the calls that have failed.
    pub fn stop(&self) -> Vec<FailedCall> {
        let mut state = self.state();
        state.fault = None;
        std::mem::take(&mut state.failed)
    }

    /// Returns the calls that have failed since the last start.
    #[must_use]
    pub fn failed(&self) -> Vec<FailedCall> {
        self.state().failed.clone()
    }

    /// Returns whether the disk is full now, and stays full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let state = self.state();
        state.fault.is_some_and(|fault| fault.kind == FaultKind::NoSpace) && !state.failed.is_empty()
    }

    /// Records that the contents of all files are durable, for a flush by `io_uring`, which is not seen here.
    pub fn note_flush(&self) {
        let mut contents = HashMap::new();
        for path in files_below(&self.directory) {
            // Another thread may remove the file now.
            if let (Ok(id), Ok(content)) = (file_id(&path), Content::read(&path)) {
                contents.insert(id, content);
            }
        }
        self.state().durable_contents = contents;
    }

    /// Leaves of the files what a power failure leaves. No other thread may use them now.
    pub fn lose_power(&self) {
        self.change_files(|| {
            let names = std::mem::take(&mut self.state().volatile_names);
            for name in names.into_iter().rev() {
                let removed = if name.is_dir() { fs::remove_dir_all(&name) } else { fs::remove_file(&name) };
                assert!(removed.is_ok() || !name.exists(), "{}: {removed:?}", name.display());
            }
            for path in files_below(&self.directory) {
                let id = file_id(&path).unwrap();
                let durable = self.state().durable_contents.get(&id).cloned().unwrap_or_default();
                if Content::read(&path).unwrap() != durable {
                    durable.restore(&path).unwrap();
                }
            }
        });
    }

    /// Calls `change`, whose system calls are neither recorded nor failed.
    fn change_files(&self, change: impl FnOnce()) {
        self.state().is_paused = true;
        change();
        self.state().is_paused = false;
    }

    /// Decides on a call that waits, and records its effect if it is to succeed.
    fn judge(&self, call: Call) -> Verdict {
        let mut state = self.state();
        if state.is_paused || !call.path.starts_with(&self.directory) {
            return Verdict::Pass;
        }
        if let Some(fault) = state.fault.filter(|fault| fault.kind.applies_to(&call)) {
            state.counted += 1;
            let is_failing = match fault.kind {
                FaultKind::NoSpace => state.counted >= fault.number,
                _ => state.counted == fault.number,
            };
            if is_failing {
                if fault.kind == FaultKind::SyncLosesData {
                    state.lose_unsynced(&call.open_path);
                }
                state.failed.push(FailedCall { name: call.name, path: call.path });
                return Verdict::Fail(fault.kind.errno());
            }
        }
        match call.class {
            Class::Content => Verdict::Pass,
            Class::Sync => {
                state.note_sync(&call);
                Verdict::Succeed
            }
            Class::NewName => {
                // An existing name is not new, whether the call fails or not.
                if fs::symlink_metadata(&call.path).is_err() {
                    state.volatile_names.push(call.path);
                }
                Verdict::Pass
            }
            Class::RemovedName => {
                let is_last = fs::symlink_metadata(&call.path).is_ok_and(|metadata| metadata.nlink() == 1);
                if let (true, Ok(id)) = (is_last, file_id(&call.path)) {
                    // The next file may get the same number.
                    state.durable_contents.remove(&id);
                }
                state.volatile_names.retain(|name| *name != call.path);
                Verdict::Pass
            }
        }
    }
}

impl FilesState {
    fn note_sync(&mut self, call: &Call) {
        if call.path.is_dir() {
            self.volatile_names.retain(|name| name.parent() != Some(&call.path));
        } else if let (Ok(id), Ok(content)) = (file_id(&call.open_path), Content::read(&call.open_path)) {
            self.durable_contents.insert(id, content);
        }
    }

    /// Restores the content that a file had at its last sync.
    fn lose_unsynced(&self, path: &Path) {
        let Ok(id) = file_id(path) else { return };
        self.durable_contents.get(&id).unwrap_or(&Content::default()).restore(path).unwrap();
    }
}

fn file_id(path: &Path) -> io::Result<FileId> {
    fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

/// The content of a file, without its holes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Content {
    /// Offset and bytes.
    pieces: Vec<(u64, Vec<u8>)>,
}

impl Content {
    fn read(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let mut pieces = Vec::new();
        let mut end = 0;
        loop {
            let start = match seek(&file, SeekFrom::Data(end)) {
                Err(Errno::NXIO) => return Ok(Self { pieces }),
                start => start?,
            };
            end = seek(&file, SeekFrom::Hole(start))?;
            let mut bytes = vec![0; (end - start) as usize];
            file.read_exact_at(&mut bytes, start)?;
            pieces.push((start, bytes));
        }
    }

    /// Restores the content of a file. Everything else becomes zero, and the length stays, as far as it is enough.
    fn restore(&self, path: &Path) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        let length = file.metadata()?.len();
        if length > 0 {
            fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, length)?;
        }
        self.pieces.iter().try_for_each(|(offset, bytes)| file.write_all_at(bytes, *offset))
    }
}

/// Returns the regular files below a directory.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(files_below(&entry.path())),
            Ok(kind) if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::create_dir;
    use std::io::Write;

    /// Runs `scenario` with a directory that no other test uses.
    fn in_directory<T: Send>(scenario: impl FnOnce(&FaultyFiles, &Path) -> T + Send) -> T {
        let directory = tempfile::tempdir().unwrap();
        let path = fs::canonicalize(directory.path()).unwrap();
        with_faults(&path, |files| scenario(files, &path))
    }

    fn start(files: &FaultyFiles, kind: FaultKind, number: usize) {
        files.start(Fault { kind, number });
    }

    fn failed_names(files: &FaultyFiles) -> Vec<&'static str> {
        files.stop().iter().map(|call| call.name).collect()
    }

    #[test]
    fn each_call_fails_once_also_in_a_thread_that_the_scenario_starts() {
        in_directory(|files, path| {
            let names = ["mkdir", "openat", "write", "pwrite64", "fdatasync", "linkat", "fsync", "unlink"];
            for (index, name) in names.into_iter().enumerate() {
                start(files, FaultKind::IoErrorOnce, index + 1);
                let results = thread::scope(|scope| scope.spawn(|| change(path)).join().unwrap());
                let is_failed = |result: &io::Result<()>| {
                    result.as_ref().is_err_and(|e| e.raw_os_error() == Some(Errno::IO.raw_os_error()))
                };
                assert!(results.iter().any(is_failed), "{name}: {results:?}");
                let failed = files.stop();
                assert_eq!(failed.len(), 1);
                // The C library chooses one of two calls.
                assert_eq!(failed[0].name.trim_end_matches("at"), name.trim_end_matches("at"));
                assert!(failed[0].path.starts_with(path), "{failed:?}");
                let _ = fs::remove_dir_all(path.join("d"));
            }
        });
    }

    /// Makes changes until one fails.
    fn change(path: &Path) -> Vec<io::Result<()>> {
        let directory = path.join("d");
        let mut results = vec![create_dir(&directory)];
        let created = File::create_new(directory.join("f"));
        let Ok(mut file) = created else {
            results.push(created.map(drop));
            return results;
        };
        results.push(file.write_all(b"one"));
        results.push(file.write_all_at(b"two", 3));
        results.push(file.sync_data());
        results.push(fs::hard_link(directory.join("f"), directory.join("g")));
        results.push(File::open(&directory).and_then(|directory| directory.sync_all()));
        results.push(fs::remove_file(directory.join("f")));
        results
    }

    #[test]
    fn a_full_disk_stays_full_and_can_still_remove() {
        in_directory(|files, path| {
            fs::write(path.join("a"), "a").unwrap();
            start(files, FaultKind::NoSpace, 2);
            let mut file = File::create_new(path.join("b")).unwrap();
            assert_eq!(file.write_all(b"b").unwrap_err().kind(), io::ErrorKind::StorageFull);
            assert_eq!(file.sync_all().unwrap_err().kind(), io::ErrorKind::StorageFull);
            fs::remove_file(path.join("a")).unwrap();
            assert_eq!(failed_names(files), ["write", "fsync"]);
            file.write_all(b"b").unwrap();
        });
    }

    #[test]
    fn a_failed_sync_loses_what_was_written_since_the_last_one() {
        in_directory(|files, path| {
            let path = path.join("f");
            let file = File::create_new(&path).unwrap();
            start(files, FaultKind::SyncLosesData, 2);
            file.write_all_at(b"durable", 0).unwrap();
            file.sync_data().unwrap();
            file.write_all_at(b"newer and longer", 0).unwrap();
            file.sync_data().unwrap_err();
            assert_eq!(fs::read(&path).unwrap(), b"durable\0\0\0\0\0\0\0\0\0");
            file.sync_data().unwrap();
            assert_eq!(failed_names(files), ["fdatasync"]);
        });
    }

    #[test]
    fn a_power_failure_leaves_what_is_synced() {
        in_directory(|files, path| {
            start(files, FaultKind::NoSpaceOnce, usize::MAX);
            let sync = |path: &Path| File::open(path).unwrap().sync_all().unwrap();
            let (kept, lost) = (path.join("kept"), path.join("lost"));
            for directory in [&kept, &lost] {
                create_dir(directory).unwrap();
                for name in ["synced", "changed", "empty"] {
                    fs::write(directory.join(name), "content").unwrap();
                }
                sync(&directory.join("synced"));
                sync(&directory.join("changed"));
                sync(directory);
                fs::write(directory.join("without a name"), "content").unwrap();
                sync(&directory.join("without a name"));
                fs::hard_link(directory.join("synced"), directory.join("second name")).unwrap();
                if *directory == kept {
                    sync(path);
                }
            }
            OpenOptions::new().write(true).open(kept.join("changed")).unwrap().write_all(b"CONTENT").unwrap();
            files.lose_power();
            assert!(!lost.exists());
            let mut found: Vec<_> = fs::read_dir(&kept).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            found.sort_unstable();
            assert_eq!(found, ["changed", "empty", "synced"]);
            assert_eq!(fs::read(kept.join("synced")).unwrap(), b"content");
            assert_eq!(fs::read(kept.join("changed")).unwrap(), b"content");
            assert_eq!(fs::read(kept.join("empty")).unwrap(), [0; 7]);
        });
    }
}
