//! File operations besides reading and writing: hints, holes, locks of single bytes, sizes, the alignment for
//! `O_DIRECT`.

use rustix::fd::{AsFd, AsRawFd};
use std::collections::HashMap;
use std::fs;
use std::io::{self, Read as _};
use std::path::Path;

/// Starts to write `len` bytes of a file from `offset` on to the disk, without waiting, so that a later sync has less
/// to do. The call makes nothing durable.
///
/// # Errors
/// `EINVAL` for an invalid range, `ESPIPE` for a pipe or socket. The caller may ignore any error, since the call is a
/// hint.
pub fn start_writeback(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    let signed = |value: u64| i64::try_from(value).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    // SAFETY: the descriptor is open, because it is borrowed; the call takes no pointer.
    let done = unsafe {
        libc::sync_file_range(file.as_fd().as_raw_fd(), signed(offset)?, signed(len)?, libc::SYNC_FILE_RANGE_WRITE)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Releases the disk space of `len` bytes of a file from `offset` on. The bytes read as zeros afterwards; the file
/// keeps its length.
///
/// # Errors
/// Errors of `fallocate(2)`, e.g. `EOPNOTSUPP` on a file system without holes.
pub fn punch_hole(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)?)
}

/// Number of readings of a long `/proc/locks` that have to miss a lock before it counts as free. While two processes took
/// and released locks without pause, 5 readings were once not enough in some 6,000 attempts.
const READINGS_OF_A_FREE_LOCK: usize = 30;

/// The kernel returns `/proc/locks` in pieces: each `read(2)` gets as many whole lines as fit into one page and into the
/// caller's buffer. A first piece that is clearly shorter than both is the whole list, at one moment.
const MAX_BYTES_OF_ONE_PIECE: usize = 4000;

/// Returns the process that holds the `flock` of a file, from `/proc/locks`. Unlike an attempt to take the lock,
/// reading that file disturbs no other process. `None` if the lock is free, or if its holder is not visible in this PID
/// namespace.
///
/// A longer list of locks comes in pieces, and the kernel skips entries when an earlier lock of the list is released
/// between two pieces. One reading therefore proves that a lock is held, but not that it is free.
///
/// # Errors
/// `NotFound` if the file is missing; other errors of `stat(2)`, or of reading `/proc/locks`.
pub fn flock_holder(path: &Path) -> io::Result<Option<u32>> {
    let file = rustix::fs::stat(path)?;
    let device = (rustix::fs::major(file.st_dev), rustix::fs::minor(file.st_dev));
    for _ in 0..READINGS_OF_A_FREE_LOCK {
        let (locks, is_one_piece) = read_locks()?;
        let holder = holder_in(&locks, device, file.st_ino);
        if holder.is_some() || is_one_piece {
            return Ok(holder);
        }
    }
    Ok(None)
}

/// Returns the text of `/proc/locks`, and whether it is one piece. The buffer has room for any piece: functions of the
/// standard library read files without a known length with small buffers first, which splits the shortest list.
fn read_locks() -> io::Result<(String, bool)> {
    let mut file = fs::File::open("/proc/locks")?;
    let mut buffer = vec![0; 64 << 10];
    let mut locks = Vec::new();
    let mut first_bytes = 0;
    loop {
        let bytes = file.read(&mut buffer)?;
        if bytes == 0 {
            return Ok((String::from_utf8_lossy(&locks).into_owned(), first_bytes < MAX_BYTES_OF_ONE_PIECE));
        }
        if locks.is_empty() {
            first_bytes = bytes;
        }
        locks.extend_from_slice(&buffer[..bytes]);
    }
}

/// Parses lines like `1: FLOCK  ADVISORY  WRITE 4711 00:1b:1234 0 EOF`. A line with `1: -> FLOCK ...` is a process that
/// waits for the lock.
fn holder_in(locks: &str, (major, minor): (u32, u32), inode: u64) -> Option<u32> {
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        (words.next()? == "FLOCK").then_some(())?;
        let pid = words.nth(2)?.parse().ok()?;
        (words.next()? == file).then_some(pid)
    })
}

/// The `flock`s of this host, from one reading of `/proc/locks`. To check the locks of many files, it costs less than
/// [`flock_holder`] for each.
#[derive(Debug, Default)]
pub struct FlockTable {
    holders: HashMap<String, u32>,
}

impl FlockTable {
    /// Reads `/proc/locks`.
    ///
    /// # Errors
    /// Errors of reading that file.
    pub fn read() -> io::Result<Self> {
        let (locks, _) = read_locks()?;
        let parse = |line: &str| {
            let mut words = line.split_ascii_whitespace().skip(1);
            (words.next()? == "FLOCK").then_some(())?;
            let pid = words.nth(2)?.parse().ok()?;
            Some((words.next()?.to_owned(), pid))
        };
        Ok(Self { holders: locks.lines().filter_map(parse).collect() })
    }

    /// Returns the process that holds the `flock` of a file. If the table does not have it, `/proc/locks` is read again,
    /// because a long table may miss a lock that is held.
    ///
    /// # Errors
    /// As for [`flock_holder`].
    pub fn holder(&self, path: &Path) -> io::Result<Option<u32>> {
        let file = rustix::fs::stat(path)?;
        let (major, minor) = (rustix::fs::major(file.st_dev), rustix::fs::minor(file.st_dev));
        match self.holders.get(&format!("{major:02x}:{minor:02x}:{}", file.st_ino)) {
            Some(pid) => Ok(Some(*pid)),
            None => flock_holder(path),
        }
    }
}

/// The kind of a lock on one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// Other open files may hold a shared lock too.
    Shared,
    /// No other open file may hold a lock.
    Exclusive,
}

pub(crate) fn byte_lock(kind: libc::c_int, byte: u64) -> io::Result<libc::flock> {
    let start = i64::try_from(byte).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    Ok(libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: start, l_len: 1, l_pid: 0 })
}

/// Locks one byte of an open file (`F_OFD_SETLK`). The lock lasts until the last descriptor of that open file is
/// closed, in any process. Returns `false` if another open file holds a conflicting lock.
///
/// # Errors
/// Errors of `fcntl(2)`; `InvalidInput` for a position above `i64::MAX`.
pub fn lock_byte(file: impl AsFd, byte: u64, lock: Lock) -> io::Result<bool> {
    let kind = match lock {
        Lock::Shared => libc::F_RDLCK,
        Lock::Exclusive => libc::F_WRLCK,
    };
    let wanted = byte_lock(kind, byte)?;
    // SAFETY: the descriptor is open, because it is borrowed; the call only reads the structure.
    let done = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const wanted) };
    match (done == 0).then_some(()).ok_or_else(io::Error::last_os_error) {
        Ok(()) => Ok(true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Returns whether another open file holds a shared or exclusive lock on one byte of this file.
///
/// # Errors
/// Errors of `fcntl(2)`; `InvalidInput` for a position above `i64::MAX`.
pub fn is_locked(file: impl AsFd, byte: u64) -> io::Result<bool> {
    let mut query = byte_lock(libc::F_WRLCK, byte)?;
    // SAFETY: the descriptor is open, because it is borrowed; the call writes the structure, which is ours.
    let done = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &raw mut query) };
    if done == 0 { Ok(query.l_type != libc::F_UNLCK as i16) } else { Err(io::Error::last_os_error()) }
}

mod raw {
    #![allow(missing_docs, reason = "generated")]
    nix::ioctl_read!(blkgetsize64, 0x12, 114, usize);
}

/// Returns the size of a block device in bytes.
///
/// # Errors
/// `ENOTTY` for a file that is not a block device.
pub fn device_bytes(file: impl AsFd) -> io::Result<u64> {
    // The kernel's header declares the argument as `size_t`, but the kernel writes 64 bits.
    let mut bytes: usize = 0;
    const { assert!(size_of::<usize>() == 8) };
    // SAFETY: the descriptor is open, because it is borrowed; 64 bits are written into a variable of ours.
    unsafe { raw::blkgetsize64(file.as_fd().as_raw_fd(), &raw mut bytes) }?;
    Ok(bytes as u64)
}

/// Returns the alignment that offset, length and memory of an operation with `O_DIRECT` need (`STATX_DIOALIGN`, Linux
/// 6.1). `None` if the kernel does not report it.
#[must_use]
pub fn direct_alignment(file: impl AsFd) -> Option<u32> {
    // SAFETY: all zeroes are a value of this structure of numbers.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, because it is borrowed; the path is an empty string; the structure is ours.
    let done = unsafe { libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut status) };
    let is_reported = done == 0 && status.stx_mask & libc::STATX_DIOALIGN != 0;
    let alignment = status.stx_dio_mem_align.max(status.stx_dio_offset_align);
    (is_reported && alignment.is_power_of_two()).then_some(alignment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_locked_byte_is_seen_by_others_only() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let other = file.reopen().unwrap();
        assert!(lock_byte(&file, 100, Lock::Shared).unwrap());
        assert!(!is_locked(&file, 100).unwrap(), "one's own");
        assert!(is_locked(&other, 100).unwrap() && !is_locked(&other, 101).unwrap());
        assert!(lock_byte(&other, 100, Lock::Shared).unwrap());
        assert!(!lock_byte(&other, 100, Lock::Exclusive).unwrap());
        drop(file);
        assert!(lock_byte(&other, 100, Lock::Exclusive).unwrap());
    }

    #[test]
    fn the_holder_of_a_flock_is_found_and_a_process_that_waits_for_it_is_not() {
        let locks = "1: FLOCK  ADVISORY  WRITE 4711 00:1b:99 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 4712 00:1b:98 0 EOF\n\
                     2: POSIX  ADVISORY  WRITE 4713 00:1b:98 0 EOF\n3: FLOCK  ADVISORY  READ  4714 08:1b:98 0 EOF\n\
                     4: FLOCK  ADVISORY  READ  4715 00:1b:98 0 EOF\n";
        assert_eq!(holder_in(locks, (0, 0x1b), 98), Some(4715));
        assert_eq!(holder_in(locks, (0, 0x1b), 97), None);
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(flock_holder(file.path()).unwrap(), None);
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert_eq!(flock_holder(file.path()).unwrap(), Some(std::process::id()));
        assert_eq!(FlockTable::read().unwrap().holder(file.path()).unwrap(), Some(std::process::id()));
        assert_eq!(FlockTable::default().holder(file.path()).unwrap(), Some(std::process::id()), "read again");
    }

    #[test]
    fn the_holder_of_a_flock_is_found_while_other_locks_are_released() {
        find_holders_while_others_are_released(150, 20, 40);
    }

    #[test]
    fn the_holder_of_a_flock_in_a_short_list_is_found_while_other_locks_are_released() {
        find_holders_while_others_are_released(2, 3, 2000);
    }

    /// Finds the holders of `held` locks, `rounds` times, while another thread takes and releases `brief` locks.
    fn find_holders_while_others_are_released(held: usize, brief: usize, rounds: usize) {
        let folder = tempfile::tempdir().unwrap();
        let lock = |name: String| {
            let path = folder.path().join(name);
            let file = fs::File::create(&path).unwrap();
            rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
            (path, file)
        };
        let held: Vec<_> = (0..held).map(|n| lock(format!("held-{n}"))).collect();
        let is_done = std::sync::atomic::AtomicBool::new(false);
        let relaxed = std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(relaxed) {
                    drop((0..brief).map(|n| lock(format!("brief-{n}"))).collect::<Vec<_>>());
                }
            });
            for round in 0..rounds {
                for (path, _) in &held {
                    let holder = flock_holder(path).unwrap();
                    is_done.fetch_or(holder.is_none(), relaxed);
                    assert_eq!(holder, Some(std::process::id()), "round {round}, {}", path.display());
                }
            }
            is_done.store(true, relaxed);
        });
    }

    #[test]
    fn a_file_is_no_block_device() {
        assert_eq!(device_bytes(tempfile::tempfile().unwrap()).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    }

    #[test]
    fn a_file_takes_the_hint_and_a_pipe_does_not() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 8192]).unwrap();
        start_writeback(&file, 0, 8192).unwrap();
        let (_reader, writer) = io::pipe().unwrap();
        assert!(start_writeback(&writer, 0, 1).is_err());
        assert!(start_writeback(&file, u64::MAX, 1).is_err());
    }
}
