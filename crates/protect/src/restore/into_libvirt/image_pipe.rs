//! A save image that is written while libvirt, and then QEMU, reads it: a pipe with a path.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
use rustix::io::{Errno, ioctl_fionread};
use std::fs::{self, File};
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Interval between two checks of the other end.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Room for some events of a watched file; such an event has no name.
const EVENT_BYTES: usize = 1024;

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
    /// Reports when a reader closes the pipe.
    close_events: OwnedFd,
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
        let close_events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let pipe = Self { path: path.to_owned(), close_events };
        inotify::add_watch(&pipe.close_events, path, WatchFlags::CLOSE_NOWRITE)?;
        Ok(pipe)
    }

    /// Writes `header` to each reader that opens the pipe, until `is_at_body` returns a value for the reader that continues
    /// past the header.
    /// `None`: `has_reader_failed` is true first, or a reader has closed the pipe within the header.
    ///
    /// libvirt 9.0 opens a save image once. libvirt 11.3 reads the header, closes the image, opens it again and reads the
    /// header again, within less than a millisecond.
    pub(super) fn write_header<T>(
        &self,
        header: &[u8],
        has_reader_failed: &dyn Fn() -> bool,
        is_at_body: &dyn Fn(&PipeEnd) -> io::Result<Option<T>>,
    ) -> io::Result<Option<(PipeEnd, T)>> {
        let Some(mut end) = self.open(has_reader_failed)? else { return Ok(None) };
        end.write_all(header)?;
        loop {
            if self.was_closed_by_reader()? {
                if ioctl_fionread(&end.0)? != 0 {
                    return Ok(None);
                }
                // This end stays open: the next reader would otherwise find an empty image.
                while !end.has_taken(header)? {
                    if has_reader_failed() {
                        return Ok(None);
                    }
                    thread::sleep(POLL_INTERVAL);
                }
            }
            if let Some(found) = is_at_body(&end)? {
                return Ok(Some((end, found)));
            }
            if has_reader_failed() {
                return Ok(None);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns whether a reader has closed the pipe since the last call. The state of the pipe does not show a reader that
    /// closes and opens it in between.
    fn was_closed_by_reader(&self) -> io::Result<bool> {
        let mut buffer = [MaybeUninit::uninit(); EVENT_BYTES];
        let mut events = inotify::Reader::new(&self.close_events, &mut buffer);
        let mut is_closed = false;
        loop {
            match events.next() {
                Ok(event) => is_closed |= event.events().contains(ReadFlags::CLOSE_NOWRITE),
                Err(Errno::AGAIN) => return Ok(is_closed),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Gives each reader the end of the image until `have_ended` is true. A reader that opens a pipe without a writer waits
    /// for one without end.
    pub(super) fn end_readers(&self, have_ended: &dyn Fn() -> bool) {
        while !have_ended() {
            drop(open(&self.path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()));
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits for a reader. `None`: `has_reader_failed` is true first.
    fn open(&self, has_reader_failed: &dyn Fn() -> bool) -> io::Result<Option<PipeEnd>> {
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

    /// Writes all bytes if a process has the other end open.
    fn has_taken(&mut self, bytes: &[u8]) -> io::Result<bool> {
        if !self.has_reader()? {
            return Ok(false);
        }
        match self.write_all(bytes) {
            Ok(()) => Ok(true),
            // The event of a closing precedes it: that reader still counted.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe && ioctl_fionread(&self.0)? == 0 => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Returns whether a process has the other end open.
    fn has_reader(&self) -> io::Result<bool> {
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
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    const DEADLINE: Duration = Duration::from_secs(30);

    #[test]
    fn a_reader_that_comes_too_late_finds_the_end_of_the_image() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let pipe = ImagePipe::create(&path).unwrap();
        let reading = thread::spawn(move || fs::read(path).unwrap());
        pipe.end_readers(&|| reading.is_finished());
        assert_eq!(reading.join().unwrap(), b"");
    }

    #[test]
    fn each_reader_gets_the_header_however_soon_it_opens_the_pipe() {
        const READERS: usize = 50;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let pipe = ImagePipe::create(&path).unwrap();
        let is_last = AtomicBool::new(false);
        thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let mut last = None;
                for number in 1..=READERS {
                    drop(last.take());
                    let mut image = File::open(&path).unwrap();
                    let mut header = [0; 6];
                    image.read_exact(&mut header).unwrap();
                    assert_eq!(&header, b"header", "reader {number}");
                    last = Some(image);
                }
                is_last.store(true, Ordering::SeqCst);
                last.unwrap()
            });
            let at_body = |_: &PipeEnd| Ok(is_last.load(Ordering::SeqCst).then_some(()));
            let deadline = Instant::now() + DEADLINE;
            let (mut end, ()) =
                pipe.write_header(b"header", &|| Instant::now() > deadline, &at_body).unwrap().expect("in time");
            end.write_all(b"body").unwrap();
            drop(end);
            let mut body = String::new();
            reading.join().unwrap().read_to_string(&mut body).unwrap();
            assert_eq!(body, "body");
        });
    }

    #[test]
    fn a_reader_that_fails_within_the_header_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let pipe = ImagePipe::create(&path).unwrap();
        let reading = thread::spawn({
            let path = path.clone();
            move || File::open(path).unwrap().read_exact(&mut [0; 2]).unwrap()
        });
        let deadline = Instant::now() + DEADLINE;
        let written = pipe.write_header::<()>(b"header", &|| Instant::now() > deadline, &|_| Ok(None)).unwrap();
        assert!(written.is_none() && Instant::now() < deadline);
        reading.join().unwrap();
    }

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
