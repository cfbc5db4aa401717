//! A save image that is written while libvirt, and then QEMU, reads it: a pipe with a path.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
use rustix::io::{Errno, ioctl_fionread};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Interval between two checks of the other end.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// What the reader has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    /// It has read everything that was written.
    HasRead,
    /// It has closed the pipe.
    Closed,
}

/// The pipe. Its path is removed when this is dropped.
#[derive(Debug)]
pub(super) struct ImagePipe {
    path: PathBuf,
}

impl ImagePipe {
    /// Makes the pipe. Replaces the file that an interrupted restore may have left.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        Ok(Self { path: path.to_owned() })
    }

    /// Waits for a reader. `None`: `has_reader_failed` is true first.
    pub(super) fn open(&self, has_reader_failed: &dyn Fn() -> bool) -> io::Result<Option<PipeEnd>> {
        loop {
            // Without a reader, this fails immediately.
            match open(&self.path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) {
                Ok(end) => return Ok(Some(PipeEnd(File::from(end)))),
                Err(Errno::NXIO) if has_reader_failed() => return Ok(None),
                Err(Errno::NXIO) => thread::sleep(POLL_INTERVAL),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl Drop for ImagePipe {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The end of the pipe that is written.
#[derive(Debug)]
pub(super) struct PipeEnd(File);

impl PipeEnd {
    pub(super) fn file(&self) -> &File {
        &self.0
    }

    /// Waits until the other end has read everything that was written, or is closed.
    pub(super) fn wait_read(&self) -> io::Result<Reader> {
        loop {
            // In this order: a reader may read everything and close the pipe.
            let is_closed = !self.has_reader()?;
            if ioctl_fionread(&self.0)? == 0 {
                return Ok(Reader::HasRead);
            }
            if is_closed {
                return Ok(Reader::Closed);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns whether a process has the other end open.
    pub(super) fn has_reader(&self) -> io::Result<bool> {
        let mut ends = [PollFd::new(&self.0, PollFlags::empty())];
        poll(&mut ends, Some(&Timespec::default()))?;
        Ok(!ends.iter().any(|end| end.revents().contains(PollFlags::ERR)))
    }
}

impl Write for PipeEnd {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(bytes) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let mut ends = [PollFd::new(&self.0, PollFlags::OUT)];
                    poll(&mut ends, None)?;
                }
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_reader_is_waited_for_and_its_progress_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        fs::write(&path, "left by another").unwrap();
        let pipe = ImagePipe::create(&path).unwrap();
        assert!(pipe.open(&|| true).unwrap().is_none(), "no reader");
        let reading = thread::spawn({
            let path = path.clone();
            move || {
                let mut image = File::open(path).unwrap();
                let mut start = [0; 4];
                image.read_exact(&mut start).unwrap();
                (image, start)
            }
        });
        let mut end = pipe.open(&|| false).unwrap().unwrap();
        end.write_all(b"head").unwrap();
        assert_eq!(end.wait_read().unwrap(), Reader::HasRead);
        let (image, start) = reading.join().unwrap();
        assert_eq!((&start, end.has_reader().unwrap()), (b"head", true));
        end.write_all(b"unread").unwrap();
        drop(image);
        assert_eq!(end.wait_read().unwrap(), Reader::Closed);
        drop(pipe);
        assert!(!path.exists());
    }
}
