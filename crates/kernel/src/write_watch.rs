//! How often a file was opened for writing: inotify for the times that have ended, and the descriptors of a process for now.

use rustix::fd::OwnedFd;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use std::fs::{self, Metadata};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Bits of the flags of an open file that allow writing.
const WRITE_ACCESS: u64 = 0o3;
const BUFFER_BYTES: usize = 4096;

/// Counts how often a file that was open for writing is closed. Processes that have it open at the same time may count as one.
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
    let file = fs::metadata(path)?;
    let directory = Path::new("/proc").join(pid.to_string());
    let descriptors = match fs::read_dir(directory.join("fd")) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        descriptors => descriptors?,
    };
    let mut count = 0;
    for entry in descriptors {
        let entry = entry?;
        // A descriptor may be closed meanwhile.
        let is_same = fs::metadata(entry.path()).is_ok_and(|open| is_same_file(&file, &open));
        let flags = || fs::read_to_string(directory.join("fdinfo").join(entry.file_name()));
        match is_same.then(flags) {
            Some(Ok(text)) => count += usize::from(allows_writing(&text)?),
            Some(Err(e)) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(count)
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
        for text in ["again", "and again"] {
            fs::write(&path, text).unwrap();
        }
        assert_eq!(watch.closed().unwrap(), 3);
        fs::write(directory.path().join("other"), "").unwrap();
        assert_eq!(watch.closed().unwrap(), 3);
        fs::remove_file(&path).unwrap();
        watch.closed().unwrap_err();
    }
}
