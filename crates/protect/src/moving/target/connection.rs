//! The connection of a destination host to the source host, whose every step has a time limit.

use crate::moving::protocol::{Answer, MAX_LINE_BYTES, Message};
use rekindle_kernel::lines::{LineError, Lines, write_by};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// The reason why a VM cannot be taken, as a message for the source host.
pub(super) type Rejection = String;

/// How long the source host may take for each step. After that, the prepared QEMU is removed from this host. The guest
/// still runs on the source host, or that host claims it in the store.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeouts {
    /// Time from the start to the first line, which the source host sends as soon as it is connected.
    pub hello: Duration,
    /// Time between two lines while the guest runs on the source host. That host takes checkpoints meanwhile, the first
    /// one of all memory. For a guest of 4 TiB, that takes 4.2 days at 12 MB/s.
    pub checkpoints: Duration,
    /// Time from the state of the stopped guest to [`Message::Go`]: the source host commits the pages that the previous
    /// checkpoints have left. No guest should be stopped for longer.
    pub go: Duration,
    /// Time from a line's first byte to its last one: 4 MiB at 70 kB/s.
    line: Duration,
    /// Time until an answer was read. The source host waits for it, and an answer has at most 4 MiB, too.
    answer: Duration,
}

pub(super) const TIMEOUTS: Timeouts = Timeouts {
    hello: Duration::from_secs(60),
    checkpoints: Duration::from_secs(7 * 24 * 3600),
    go: Duration::from_secs(3600),
    line: Duration::from_secs(60),
    answer: Duration::from_secs(60),
};

/// The connection to the source host.
pub(super) struct SourceConnection<R, W> {
    lines: Lines<R>,
    output: W,
    pub(super) timeouts: Timeouts,
}

impl<R: Read + AsFd, W: Write + AsFd> SourceConnection<R, W> {
    /// `input` and `output` are pipes or sockets, without a buffer.
    pub fn new(input: R, output: W, timeouts: Timeouts) -> Self {
        Self { lines: Lines::new(input, MAX_LINE_BYTES), output, timeouts }
    }

    /// Reads the next message, whose first byte must arrive within `start_timeout`. `None` at the end of the stream.
    /// The inner error: the line is not a message.
    pub fn read_message(&mut self, start_timeout: Duration) -> io::Result<Option<Result<Message, Rejection>>> {
        match self.lines.next_started_by(Instant::now() + start_timeout, self.timeouts.line) {
            Ok(line) => {
                Ok(Some(serde_json::from_slice(&line).map_err(|e| {
                    format!("a message is not in the protocol ({e}); use the same Rekindle on both hosts")
                })))
            }
            Err(LineError::Closed) => Ok(None),
            Err(LineError::Late) => {
                let why = "the source host has not sent its next line in time; check whether it runs and is reachable";
                self.send(&Answer::Refused { why: why.into() });
                Err(io::Error::new(io::ErrorKind::TimedOut, why))
            }
            Err(LineError::TooLong { limit }) => {
                Ok(Some(Err(format!("a line of more than {} MiB; use the same Rekindle on both hosts", limit >> 20))))
            }
            Err(LineError::Io(e)) => Err(e),
        }
    }

    /// Sends an answer. Returns false if the source host does not read it in time; that host then finds the result in
    /// the store.
    pub fn send(&mut self, answer: &Answer) -> bool {
        let mut line = serde_json::to_vec(answer).unwrap_or_default();
        line.push(b'\n');
        write_by(&mut self.output, &line, Instant::now() + self.timeouts.answer).is_ok()
    }

    pub fn reject(&mut self, why: impl Into<Rejection>) -> io::Result<()> {
        self.send(&Answer::Refused { why: why.into() });
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::thread;

    const LONG: Duration = Duration::from_secs(100);
    const SHORT: Duration = Duration::from_millis(50);

    /// Returns a connection on which each step may take `LONG`, and the connection's other end.
    fn connect() -> (SourceConnection<UnixStream, UnixStream>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let timeouts = Timeouts { hello: LONG, checkpoints: LONG, go: LONG, line: LONG, answer: LONG };
        (SourceConnection::new(ours.try_clone().unwrap(), ours, timeouts), theirs)
    }

    #[test]
    fn a_line_that_arrives_byte_by_byte_ends_the_move() {
        let (mut source, theirs) = connect();
        source.timeouts.line = SHORT;
        // The thread ends by itself, which would not be an error.
        let slow_writer = thread::spawn(move || {
            let deadline = Instant::now() + Duration::from_secs(10);
            while Instant::now() < deadline && (&theirs).write_all(b" ").is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(source.read_message(source.timeouts.hello).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(source);
        slow_writer.join().unwrap();
    }

    #[test]
    fn a_host_that_sends_nothing_gets_the_reason() {
        let (mut source, theirs) = connect();
        source.timeouts.hello = SHORT;
        assert_eq!(source.read_message(source.timeouts.hello).unwrap_err().kind(), io::ErrorKind::TimedOut);
        let answer = Lines::new(theirs, MAX_LINE_BYTES).next_by(Instant::now() + LONG).unwrap();
        assert!(matches!(serde_json::from_slice(&answer).unwrap(), Answer::Refused { why } if why.contains("in time")));
    }

    #[test]
    fn a_line_without_an_end_is_rejected() {
        let (mut source, theirs) = connect();
        let fast_writer = thread::spawn({
            let theirs = theirs.try_clone().unwrap();
            move || while (&theirs).write_all(&[b' '; 1 << 16]).is_ok() {}
        });
        let why = source.read_message(LONG).unwrap().unwrap().unwrap_err();
        assert!(why.contains("more than 4 MiB"), "{why}");
        drop((source, theirs));
        fast_writer.join().unwrap();
    }

    #[test]
    fn an_answer_that_is_not_read_is_a_failure() {
        let (mut source, theirs) = connect();
        source.timeouts.answer = SHORT;
        assert!(!source.send(&Answer::Refused { why: "x".repeat(MAX_LINE_BYTES) }));
        drop(theirs);
        assert!(!source.send(&Answer::Refused { why: "x".into() }));
    }
}
