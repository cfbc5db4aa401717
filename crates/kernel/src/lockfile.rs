//! Finding a process again by a lock that it inherited.
//!
//! A later command must find a process that outlives its starter, even if the starter was killed before it could record
//! the process. The arguments of a process do not identify it: any process of any user may have the same arguments. So
//! the child locks a file before it starts its program ([`hold`]), and the lock stays with the open file until the last
//! thread of the process has ended. A process that only opens the file, or names it in its arguments, does not hold the
//! lock.
//!
//! The file must be in a directory that only its user may enter, so that no other user can hold the lock.

use crate::file::{byte_lock, is_locked};
use crate::process::Process;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// How long the lock may be held without a visible holder. A process that ends disappears from `/proc/PID/fd` before
/// its lock is released.
const UNSEEN_HOLDER_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Makes the child lock the file `path` before it starts its program, and hold that lock until it ends. The file is
/// created if it is missing. The calling process never holds the lock.
///
/// Call it last: the child inherits the file at a low free descriptor number.
///
/// # Errors
/// For a path with a zero byte. The start of the command fails with `EAGAIN` if another process holds the lock.
pub fn hold<'a>(command: &'a mut Command, path: &Path) -> io::Result<&'a mut Command> {
    let lock = InheritedLock::new(path)?;
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; `take` makes no other.
    Ok(unsafe { command.pre_exec(move || lock.take(libc::STDERR_FILENO + 1)) })
}

/// The lock of a file, to be taken by a child between fork and exec.
pub(crate) struct InheritedLock {
    path: CString,
    lock: libc::flock,
}

impl InheritedLock {
    pub(crate) fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { path: CString::new(path.as_os_str().as_bytes())?, lock: byte_lock(libc::F_WRLCK, 0)? })
    }

    /// Locks the file in the calling process, for as long as the program that it executes runs. The program inherits
    /// the file at the lowest free descriptor number from `minimum` on. Async-signal-safe.
    pub(crate) fn take(&self, minimum: RawFd) -> io::Result<()> {
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: the kernel reads the path and the structure, which live as long as `self`, and keeps nothing of them.
        let inherited = unsafe {
            let file = libc::open(self.path.as_ptr(), flags, 0o600);
            if file < 0 || libc::fcntl(file, libc::F_OFD_SETLK, &raw const self.lock) != 0 {
                return Err(io::Error::last_os_error());
            }
            // Without close-on-exec. Both descriptors refer to one open file, to which the lock belongs.
            libc::fcntl(file, libc::F_DUPFD, minimum)
        };
        if inherited < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Returns the processes that hold the lock of `path`: the process that was started with [`hold`], and children that
/// inherited the lock.
///
/// # Errors
/// When the holder is not visible: a process in another PID namespace, or of another user.
pub fn holders(path: &Path) -> io::Result<Vec<Process>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let deadline = Instant::now() + UNSEEN_HOLDER_TIMEOUT;
    while is_locked(&file, 0)? {
        let found = find_holders(path, &file)?;
        if !found.is_empty() {
            return Ok(found);
        }
        if Instant::now() > deadline {
            let text = format!(
                "{} is locked by a process that cannot be seen from here (another PID namespace, or another user's)",
                path.display()
            );
            return Err(io::Error::other(text));
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(Vec::new())
}

/// Returns the process that holds a lock that belongs to a process (`F_SETLK`) rather than to an open file. QEMU has
/// such a lock on the file of its option `-pidfile`.
///
/// # Errors
/// When no process is visible as the holder: it is in another PID namespace, or the lock belongs to an open file.
pub fn owner(path: &Path) -> io::Result<Option<Process>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let mut query = libc::flock { l_len: 0, ..byte_lock(libc::F_WRLCK, 0)? };
    // SAFETY: the descriptor is open, because it is borrowed; the call writes the structure, which is ours.
    let done = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&file), libc::F_GETLK, &raw mut query) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    if query.l_type == libc::F_UNLCK as i16 {
        return Ok(None);
    }
    match u32::try_from(query.l_pid) {
        Ok(pid) if pid > 0 => match Process::of(pid) {
            Ok(process) => Ok(Some(process)),
            // The holder has ended since.
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        },
        _ => Err(io::Error::other(format!("{} is locked by a process that cannot be seen from here", path.display()))),
    }
}

/// Returns the processes that have the lock of `file` in a descriptor table that we may read.
fn find_holders(path: &Path, file: &File) -> io::Result<Vec<Process>> {
    let metadata = file.metadata()?;
    let locked_file =
        LockedFile { name: path.file_name().unwrap_or_default().as_bytes(), id: (metadata.dev(), metadata.ino()) };
    let pids = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut found = Vec::new();
    for pid in pids {
        // A process may end between any two of these steps.
        let Ok(process) = Process::of(pid) else { continue };
        if descriptor_tables(pid).iter().any(|table| locked_file.is_held_in(table))
            && Process::of(pid).ok() == Some(process)
        {
            found.push(process);
        }
    }
    Ok(found)
}

/// Returns the directories that list the descriptors of a process. If its first thread has ended, only those of its
/// other threads list them.
fn descriptor_tables(pid: u32) -> Vec<PathBuf> {
    let main = PathBuf::from(format!("/proc/{pid}"));
    if fs::read_dir(main.join("fd")).is_ok_and(|mut entries| entries.next().is_some()) {
        return vec![main];
    }
    let threads = fs::read_dir(main.join("task")).into_iter().flatten().flatten();
    threads.map(|thread| thread.path()).collect()
}

/// The file whose lock is searched for.
struct LockedFile<'a> {
    name: &'a [u8],
    /// Device and inode number.
    id: (u64, u64),
}

impl LockedFile<'_> {
    fn is_held_in(&self, table: &Path) -> bool {
        let descriptors = fs::read_dir(table.join("fd")).into_iter().flatten().flatten();
        descriptors.into_iter().any(|entry| self.is_held_by(table, &entry.path()))
    }

    /// Returns whether a descriptor holds the lock. The name is compared first, because `stat` of an unrelated file may
    /// block, e.g. on a network file system that does not answer.
    fn is_held_by(&self, table: &Path, descriptor: &Path) -> bool {
        let named = |link: &Path| {
            let link = link.as_os_str().as_bytes();
            link.strip_suffix(b" (deleted)").unwrap_or(link).ends_with(self.name)
        };
        let is_it = || fs::metadata(descriptor).is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.id);
        let info = || fs::read_to_string(table.join("fdinfo").join(descriptor.file_name().unwrap_or_default()));
        fs::read_link(descriptor).is_ok_and(|link| named(&link))
            && is_it()
            && info().is_ok_and(|info| info.lines().any(|line| line.starts_with("lock:") && line.contains("OFDLCK")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Stdio};

    struct Running(Child);

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn start(command: &mut Command) -> Running {
        Running(command.stdout(Stdio::null()).spawn().unwrap())
    }

    fn pids(path: &Path) -> Vec<u32> {
        holders(path).unwrap().iter().map(|process| process.pid).collect()
    }

    fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !condition() {
            assert!(Instant::now() < deadline, "{what}");
            thread::sleep(POLL_INTERVAL);
        }
    }

    #[test]
    fn only_the_process_that_inherited_the_lock_is_found() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("qemu.lock");
        assert_eq!(pids(&path), [] as [u32; 0]);
        let mut holder = start(hold(Command::new("sleep").arg("1000"), &path).unwrap());
        // A process that names the file, a process that has it open, and a process of another user.
        let naps = ["-c", "import time; time.sleep(1000)"];
        let named = start(Command::new("python3").args(naps).arg(&path));
        let opened = start(Command::new("tail").arg("-f").arg(&path));
        let root_user = rustix::process::geteuid().is_root();
        let mut foreign = Command::new("setpriv");
        foreign
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "tail", "-f", "/dev/null"])
            .arg(&path)
            .stderr(Stdio::null());
        let mut foreign = root_user.then(|| start(&mut foreign));
        let has_opened = |pid: u32| {
            let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            entries.into_iter().any(|entry| fs::read_link(entry.path()).is_ok_and(|link| link == path))
        };
        wait_for("tail does not open it", || has_opened(opened.0.id()));
        assert_eq!(pids(&path), [holder.0.id()]);
        if let Some(foreign) = &mut foreign {
            assert!(foreign.0.try_wait().unwrap().is_none(), "setpriv or tail has failed");
        }
        drop((named, opened, foreign));

        holder.0.kill().unwrap();
        holder.0.wait().unwrap();
        assert_eq!(pids(&path), [] as [u32; 0]);
    }

    #[test]
    fn it_is_found_after_its_file_was_removed_and_while_it_is_stopped() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("qemu.lock");
        let holder = start(hold(Command::new("sleep").arg("1000"), &path).unwrap());
        Process::of(holder.0.id()).unwrap().stop().unwrap();
        assert_eq!(pids(&path), [holder.0.id()]);
        let link = root.path().join("other");
        fs::hard_link(&path, &link).unwrap();
        fs::remove_file(&path).unwrap();
        fs::rename(&link, &path).unwrap();
        assert_eq!(pids(&path), [holder.0.id()]);
    }

    #[test]
    fn a_second_process_cannot_be_started_with_it_and_the_starter_never_holds_it() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("disk.lock");
        let first = start(hold(Command::new("sleep").arg("1000"), &path).unwrap());
        let e = hold(&mut Command::new("true"), &path).unwrap().spawn().unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EAGAIN));
        assert_eq!(pids(&path), [first.0.id()]);
    }

    #[test]
    fn a_process_whose_first_thread_alone_has_ended_is_found() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("qemu.lock");
        let run = "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start(); ctypes.CDLL(None).pthread_exit(None)";
        let mut command = Command::new("python3");
        command.args(["-c", run]).stdin(Stdio::piped());
        let child = start(hold(&mut command, &path).unwrap());
        let process = Process::of(child.0.id()).unwrap();
        wait_for("its first thread does not end", || !process.is_alive());
        assert_eq!(pids(&path), [process.pid]);
    }

    #[test]
    fn a_lock_of_the_process_itself_has_an_owner() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("qemu.pid");
        assert_eq!(owner(&path).unwrap(), None);
        fs::write(&path, "1\n").unwrap();
        assert_eq!(owner(&path).unwrap(), None);
        let run =
            "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); time.sleep(1000)";
        let child = start(Command::new("python3").args(["-c", run]).arg(&path));
        wait_for("it does not lock the file", || owner(&path).unwrap().is_some());
        assert_eq!(owner(&path).unwrap().map(|process| process.pid), Some(child.0.id()));
    }
}
