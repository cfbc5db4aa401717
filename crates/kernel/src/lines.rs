//! Lines from an untrusted peer: a guest's agent, a QEMU, a helper process, a host on the network.
//!
//! Whatever the peer sends, a reader holds at most one line and one chunk in memory, and returns by its deadline. The
//! deadline covers the whole exchange: a peer that sends single bytes now and then does not extend it.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

/// Bytes per read.
const BYTES_PER_READ: usize = 8192;

/// The reason why there is no line.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// The line was not complete by the deadline.
    #[error("no whole line has come in time")]
    Late,
    /// The peer has closed its end. An incomplete line is dropped.
    #[error("the other side has closed the connection")]
    Closed,
    /// The line exceeds the limit. The connection cannot be used any more, since the rest of the line would be taken
    /// for another line.
    #[error("a line of more than {limit} bytes")]
    TooLong {
        /// Bytes that a line may have, with its line end.
        limit: usize,
    },
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<LineError> for io::Error {
    fn from(e: LineError) -> Self {
        let kind = match &e {
            LineError::Late => io::ErrorKind::TimedOut,
            LineError::Closed => io::ErrorKind::UnexpectedEof,
            LineError::TooLong { .. } => io::ErrorKind::InvalidData,
            LineError::Io(inner) => inner.kind(),
        };
        Self::new(kind, e)
    }
}

/// A reader of lines with a limited length.
#[derive(Debug)]
pub struct Lines<S> {
    stream: S,
    limit: usize,
    unread: Vec<u8>,
    /// Bytes of `unread` known to contain no line end.
    scanned: usize,
    /// Whether a line was too long, so that its rest cannot be distinguished from another line.
    is_broken: bool,
}

impl<S: Read + AsFd> Lines<S> {
    /// Makes a reader of `stream` for lines of at most `limit` bytes, with their line ends.
    #[must_use]
    pub fn new(stream: S, limit: usize) -> Self {
        Self { stream, limit, unread: Vec::new(), scanned: 0, is_broken: false }
    }

    /// Returns the stream that lines are read from.
    #[must_use]
    pub fn stream(&self) -> &S {
        &self.stream
    }

    /// Returns the next line, with its line end, if it is complete by `deadline`. A caller that skips lines must check
    /// its deadline itself: a peer may always have one more line.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn next_by(&mut self, deadline: Instant) -> Result<Vec<u8>, LineError> {
        loop {
            if let Some(line) = self.take_line()? {
                return Ok(line);
            }
            if !self.fill(deadline.saturating_duration_since(Instant::now()))? {
                return Err(LineError::Late);
            }
        }
    }

    /// Returns the next line of a peer that may be silent for long before it starts one. The first byte must arrive by
    /// `begin`, the rest of the line within `rest` after that.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn next_started_by(&mut self, begin: Instant, rest: Duration) -> Result<Vec<u8>, LineError> {
        let mut end = None;
        loop {
            if let Some(line) = self.take_line()? {
                return Ok(line);
            }
            let now = Instant::now();
            let deadline = if self.unread.is_empty() { begin } else { *end.get_or_insert(now + rest) };
            if !self.fill(deadline.saturating_duration_since(now))? {
                return Err(LineError::Late);
            }
        }
    }

    /// Returns the next line if it has arrived completely.
    ///
    /// # Errors
    /// [`LineError`], but not [`LineError::Late`].
    pub fn next_ready(&mut self) -> Result<Option<Vec<u8>>, LineError> {
        match self.next_by(Instant::now()) {
            Err(LineError::Late) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Takes a complete line out of the unread bytes.
    fn take_line(&mut self) -> Result<Option<Vec<u8>>, LineError> {
        let unscanned = self.unread.get(self.scanned..).unwrap_or_default();
        let end = unscanned.iter().position(|&byte| byte == b'\n').map(|index| self.scanned + index + 1);
        if self.is_broken || end.unwrap_or(self.unread.len()) > self.limit {
            self.is_broken = true;
            self.unread = Vec::new();
            self.scanned = 0;
            return Err(LineError::TooLong { limit: self.limit });
        }
        let Some(end) = end else {
            self.scanned = self.unread.len();
            return Ok(None);
        };
        let after_line = self.unread.split_off(end);
        self.scanned = 0;
        Ok(Some(std::mem::replace(&mut self.unread, after_line)))
    }

    /// Reads available bytes, waiting at most for `timeout`. Returns `false` if nothing arrived.
    fn fill(&mut self, timeout: Duration) -> Result<bool, LineError> {
        if !is_ready(&self.stream, PollFlags::IN, timeout)? {
            return Ok(false);
        }
        let mut chunk = [0; BYTES_PER_READ];
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(LineError::Closed),
            Ok(n) => {
                self.unread.extend_from_slice(chunk.get(..n).unwrap_or_default());
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Err(LineError::Closed),
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => Ok(true),
            Err(e) => Err(e.into()),
        }
    }
}

/// Waits until `stream` is ready for `events`, at most for `timeout`. Returns whether it is.
fn is_ready(stream: &impl AsFd, events: PollFlags, timeout: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        let time_left = deadline.saturating_duration_since(Instant::now());
        let seconds = i64::try_from(time_left.as_secs()).unwrap_or(i64::MAX);
        let time_left = Timespec { tv_sec: seconds, tv_nsec: time_left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(stream, events)], Some(&time_left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Bytes per write: a pipe or socket that is ready accepts as many without blocking.
const BYTES_PER_WRITE: usize = 4096;

/// Writes all of `bytes` to a pipe or socket by `deadline`, even if the peer reads little or nothing. After an error,
/// the peer may have received a part of the bytes.
///
/// # Errors
/// [`LineError`].
pub fn write_by(stream: &mut (impl Write + AsFd), bytes: &[u8], deadline: Instant) -> Result<(), LineError> {
    for piece in bytes.chunks(BYTES_PER_WRITE) {
        let mut unwritten = piece;
        while !unwritten.is_empty() {
            if !is_ready(stream, PollFlags::OUT, deadline.saturating_duration_since(Instant::now()))? {
                return Err(LineError::Late);
            }
            match stream.write(unwritten) {
                Ok(0) => return Err(LineError::Closed),
                Ok(n) => unwritten = unwritten.get(n..).unwrap_or_default(),
                Err(e) if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                    return Err(LineError::Closed);
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
    Ok(stream.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::thread;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn lines_come_whole_whatever_the_pieces_are() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut lines = Lines::new(ours, 100);
        let mut out = &theirs;
        out.write_all(b"one\nt").unwrap();
        assert_eq!(lines.next_by(soon()).unwrap(), b"one\n");
        assert!(lines.next_ready().unwrap().is_none());
        assert!(matches!(lines.next_by(Instant::now()), Err(LineError::Late)));
        out.write_all(b"wo\n\nlast").unwrap();
        assert_eq!(lines.next_ready().unwrap().unwrap(), b"two\n");
        assert_eq!(lines.next_ready().unwrap().unwrap(), b"\n");
        drop(theirs);
        assert!(matches!(lines.next_by(soon()), Err(LineError::Closed)));
    }

    #[test]
    fn a_line_without_an_end_takes_no_more_memory_than_its_limit() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let flood = thread::spawn(move || {
            let mut sent = 0u64;
            while (&theirs).write_all(&[b'x'; 4096]).is_ok() {
                sent += 4096;
            }
            sent
        });
        let mut lines = Lines::new(ours, 100_000);
        assert!(matches!(lines.next_by(soon()), Err(LineError::TooLong { limit: 100_000 })));
        assert!(lines.unread.capacity() < 2 * 100_000);
        // The rest of the long line is not taken for a line.
        assert!(matches!(lines.next_by(soon()), Err(LineError::TooLong { .. })));
        drop(lines);
        assert!(flood.join().unwrap() < 10_000_000);
    }

    #[test]
    fn bytes_now_and_then_do_not_move_the_deadline() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let drip = thread::spawn(move || {
            while (&theirs).write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let mut lines = Lines::new(ours, 1 << 30);
        assert!(matches!(lines.next_by(Instant::now() + Duration::from_millis(50)), Err(LineError::Late)));
        drop(lines);
        drip.join().unwrap();
    }

    #[test]
    fn a_line_may_begin_late_but_ends_soon_after() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut lines = Lines::new(ours, 1 << 30);
        (&theirs).write_all(b"one\ntwo\nth").unwrap();
        let none = Duration::ZERO;
        for line in [&b"one\n"[..], b"two\n"] {
            assert_eq!(lines.next_started_by(soon(), Duration::from_secs(20)).unwrap(), line);
        }
        // The first bytes of the line have arrived, and no time is left for the rest.
        assert!(matches!(lines.next_started_by(soon() + Duration::from_secs(1000), none), Err(LineError::Late)));
        (&theirs).write_all(b"ree\n").unwrap();
        assert_eq!(lines.next_started_by(Instant::now(), Duration::from_secs(20)).unwrap(), b"three\n");
        assert!(matches!(lines.next_started_by(Instant::now(), Duration::from_secs(20)), Err(LineError::Late)));
    }

    #[test]
    fn a_peer_that_reads_nothing_does_not_block_a_writer() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let (reader, mut writer) = io::pipe().unwrap();
        let much = vec![b'x'; 4 << 20];
        let in_a_moment = || Instant::now() + Duration::from_millis(50);
        assert!(matches!(write_by(&mut ours, &much, in_a_moment()), Err(LineError::Late)));
        assert!(matches!(write_by(&mut writer, &much, in_a_moment()), Err(LineError::Late)));
        drop((theirs, reader));
        assert!(matches!(write_by(&mut ours, &much, soon()), Err(LineError::Closed)));
        assert!(matches!(write_by(&mut writer, &much, soon()), Err(LineError::Closed)));
        let (mut reader, mut writer) = io::pipe().unwrap();
        let read = thread::spawn(move || {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).unwrap();
            all
        });
        write_by(&mut writer, &much, soon()).unwrap();
        drop(writer);
        assert!(read.join().unwrap() == much);
    }
}
