//! How often a file was opened for writing: inotify for the times that have ended, and the descriptors of a process for now.

use rustix::fd::OwnedFd;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Bits of the flags of an open file that allow writing.
const WRITE_ACCESS: u64 = 0o3;
const BUFFER_BYTES: usize = 4096;

/// Counts how often a file that was open for writing is closed. The count is a lower bound: two closings may count as one, but at
/// least one counts.
#[derive(Debug)]
pub struct WriteWatch {
    inotify: OwnedFd,
    closed: usize,
}

impl WriteWatch {
    /// Starts to count for the file or the device node at this path.
    ///
    /// # Errors
    /// Errors of `inotify_add_watch(2)`.
    pub fn start(path: &Path) -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        // Without the events of `open`, the kernel would make one event of two.
        inotify::add_watch(&inotify, path, WatchFlags::CLOSE_WRITE | WatchFlags::OPEN)?;
        Ok(Self { inotify, closed: 0 })
    }

    /// Returns how often the file was closed since the start by a process that could write to it.
    ///
    /// # Errors
    /// `InvalidData` if that is not known: events were lost, or the file was removed.
    pub fn closed(&mut self) -> io::Result<usize> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
        let mut events = Reader::new(&self.inotify, &mut buffer);
        loop {
            match events.next() {
                Ok(event) if event.events() == ReadFlags::CLOSE_WRITE => self.closed += 1,
                Ok(event) if event.events() == ReadFlags::OPEN => {}
                Ok(_) => return Err(io::ErrorKind::InvalidData.into()),
                Err(Errno::AGAIN) => return Ok(self.closed),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Returns whether both are the same file, or nodes of the same block device.
#[must_use]
pub fn is_same_file(file: &Metadata, other: &Metadata) -> bool {
    match file.file_type().is_block_device() {
        true => other.file_type().is_block_device() && other.rdev() == file.rdev(),
        false => (other.dev(), other.ino()) == (file.dev(), file.ino()),
    }
}

/// Returns how many descriptors a process has with which it may write to the file or the block device at this path; 0 if the
/// process has ended.
///
/// # Errors
/// Errors of reading the file's metadata, or `/proc`.
pub fn open_for_writing(pid: u32, path: &Path) -> io::Result<usize> {
    let mut count = 0;
    for number in descriptors_of(pid, path)? {
        match fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("fdinfo").join(number)) {
            Ok(text) => count += usize::from(allows_writing(&text)?),
            // It was closed meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(count)
}

/// Returns whether a process has the file or the block device at this path open: it may see another one there, in its own mount
/// namespace.
///
/// # Errors
/// As for [`open_for_writing`].
pub fn has_open(pid: u32, path: &Path) -> io::Result<bool> {
    Ok(!descriptors_of(pid, path)?.is_empty())
}

/// Returns the numbers of a process's descriptors of the file or the block device at this path.
fn descriptors_of(pid: u32, path: &Path) -> io::Result<Vec<OsString>> {
    let file = fs::metadata(path)?;
    let descriptors = match fs::read_dir(format!("/proc/{pid}/fd")) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        descriptors => descriptors?,
    };
    let mut numbers = Vec::new();
    for entry in descriptors {
        let entry = entry?;
        // A descriptor may be closed meanwhile.
        if fs::metadata(entry.path()).is_ok_and(|open| is_same_file(&file, &open)) {
            numbers.push(entry.file_name());
        }
    }
    Ok(numbers)
}

fn allows_writing(fdinfo: &str) -> io::Result<bool> {
    let flags = fdinfo.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    Ok(flags.ok_or(io::ErrorKind::InvalidData)? & WRITE_ACCESS != 0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn only_what_was_open_for_writing_counts() {
        let directory = tempfile::TempDir::new().unwrap();
        let (path, pid) = (directory.path().join("image"), std::process::id());
        fs::write(&path, "before").unwrap();
        let mut watch = WriteWatch::start(&path).unwrap();
        let reader = File::open(&path).unwrap();
        let writer = File::options().write(true).open(&path).unwrap();
        assert_eq!((watch.closed().unwrap(), open_for_writing(pid, &path).unwrap()), (0, 1));
        drop((reader, writer));
        assert_eq!((watch.closed().unwrap(), open_for_writing(pid, &path).unwrap()), (1, 0));
        // Two at the same time.
        let writers = [0, 1].map(|_| File::options().write(true).open(&path).unwrap());
        assert_eq!(open_for_writing(pid, &path).unwrap(), 2);
        drop(writers);
        assert!((2..=3).contains(&watch.closed().unwrap()));
        let before = watch.closed().unwrap();
        fs::write(directory.path().join("other"), "").unwrap();
        assert_eq!(watch.closed().unwrap(), before);
        fs::remove_file(&path).unwrap();
        watch.closed().unwrap_err();
    }
}
