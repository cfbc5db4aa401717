//! The output of programs, limited in bytes and time.

use crate::process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The result of a program that has ended.
#[derive(Debug)]
pub struct Output {
    /// The exit status or the signal that ended the program.
    pub status: ExitStatus,
    /// The bytes printed to standard output.
    pub out: Vec<u8>,
    /// The bytes printed to standard error.
    pub err: Vec<u8>,
}

/// Runs `command` and waits until it ends, at most until `deadline`. It may print `limit` bytes to each of its outputs.
///
/// # Errors
/// `TimedOut` or `InvalidData` if the program exceeded the deadline or the limit; it is killed then. Errors of starting
/// the program.
pub fn within(command: &mut Command, limit: usize, deadline: Instant) -> io::Result<Output> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let outputs = read_outputs(&mut child, limit, deadline).and_then(|outputs| {
        let time_left = deadline.saturating_duration_since(Instant::now());
        let has_ended = Process::of(child.id()).map_or(Ok(true), |process| process.wait_end(time_left))?;
        if has_ended { Ok(outputs) } else { Err(timed_out()) }
    });
    if outputs.is_err() {
        let _ = child.kill();
    }
    let status = child.wait()?;
    outputs.map(|(out, err)| Output { status, out, err })
}

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it has not ended in time")
}

/// Reads standard output and standard error of a child until both are closed.
fn read_outputs(child: &mut Child, limit: usize, deadline: Instant) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let (Some(mut out), Some(mut err)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(io::ErrorKind::BrokenPipe.into());
    };
    ioctl_fionbio(&out, true)?;
    ioctl_fionbio(&err, true)?;
    let (mut out_bytes, mut err_bytes) = (Vec::new(), Vec::new());
    let (mut out_is_open, mut err_is_open) = (true, true);
    while out_is_open || err_is_open {
        let time_left = deadline.saturating_duration_since(Instant::now());
        if time_left.is_zero() {
            return Err(timed_out());
        }
        // A closed pipe would always be ready, so only open pipes are polled.
        let mut open_pipes = Vec::with_capacity(2);
        open_pipes.extend(out_is_open.then(|| PollFd::new(&out, PollFlags::IN)));
        open_pipes.extend(err_is_open.then(|| PollFd::new(&err, PollFlags::IN)));
        match poll(&mut open_pipes, Some(&timespec(time_left))) {
            Ok(0) => return Err(timed_out()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        out_is_open = out_is_open && read_available(&mut out, &mut out_bytes, limit)?;
        err_is_open = err_is_open && read_available(&mut err, &mut err_bytes, limit)?;
    }
    Ok((out_bytes, err_bytes))
}

fn timespec(duration: Duration) -> Timespec {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec: seconds, tv_nsec: duration.subsec_nanos().into() }
}

/// Appends the bytes that are in a non-blocking pipe to `bytes`. Returns `false` at the pipe's end.
fn read_available(pipe: &mut impl Read, bytes: &mut Vec<u8>, limit: usize) -> io::Result<bool> {
    let room = limit.saturating_sub(bytes.len());
    match pipe.take(room as u64 + 1).read_to_end(bytes) {
        _ if bytes.len() > limit => {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("it has printed more than {limit} bytes")))
        }
        Ok(_) => Ok(false),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(e) => Err(e),
    }
}

/// Reads the bytes that are in a pipe now, at most `limit`, without waiting for its other end to close.
pub fn waiting_in(pipe: &mut (impl Read + rustix::fd::AsFd), limit: usize) -> Vec<u8> {
    let mut read = Vec::new();
    if ioctl_fionbio(&*pipe, true).is_ok() {
        // The error shows that the pipe is empty; the bytes read before it count.
        let _ = pipe.take(limit as u64).read_to_end(&mut read);
    }
    read
}

/// Bytes at the end of a log that are searched for its last lines.
const TAIL_BYTES: u64 = 16 << 10;

/// Returns the last lines of the log at `path`, at most `lines`. Only the last 16 KiB are read, however long the log
/// is. Returns an empty string if the log cannot be read.
#[must_use]
pub fn last_lines(path: &Path, lines: usize) -> String {
    let read_tail = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES)))?;
        let mut tail = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut tail)?;
        Ok(tail)
    };
    let tail = read_tail().unwrap_or_default();
    let text = String::from_utf8_lossy(&tail);
    let tail_lines: Vec<_> = text.lines().collect();
    tail_lines.get(tail_lines.len().saturating_sub(lines)..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command
    }

    #[test]
    fn both_outputs_and_the_status_are_there() {
        let soon = Instant::now() + Duration::from_secs(20);
        let done = within(&mut shell("echo one; echo two >&2; exit 3"), 100, soon).unwrap();
        assert_eq!((done.status.code(), &done.out[..], &done.err[..]), (Some(3), &b"one\n"[..], &b"two\n"[..]));
        // The program closes one of its outputs early.
        let done = within(&mut shell("exec 2>&-; sleep 0.05; echo one"), 100, soon).unwrap();
        assert_eq!(done.out, b"one\n");
    }

    #[test]
    fn one_that_does_not_end_or_prints_too_much_is_killed() {
        let deadline = || Instant::now() + Duration::from_millis(100);
        let e = within(&mut shell("exec sleep 1000"), 100, deadline()).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::TimedOut);
        let e = within(&mut shell("exec >&- 2>&-; exec sleep 1000"), 100, deadline()).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::TimedOut);
        let soon = Instant::now() + Duration::from_secs(20);
        let e = within(&mut shell("exec yes"), 100_000, soon).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_waits_in_a_pipe_is_taken_while_its_other_end_is_open() {
        let (mut reader, mut writer) = io::pipe().unwrap();
        io::Write::write_all(&mut writer, b"some").unwrap();
        assert_eq!(waiting_in(&mut reader, 3), b"som");
        assert_eq!(waiting_in(&mut reader, 3), b"e");
        drop(writer);
    }

    #[test]
    fn of_a_long_log_only_the_end_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        assert_eq!(last_lines(&path, 2), "");
        std::fs::write(&path, "one\ntwo\nthree\n").unwrap();
        assert_eq!(last_lines(&path, 2), "two\nthree");
        assert_eq!(last_lines(&path, 9), "one\ntwo\nthree");
        // A sparse log, longer than any memory.
        let mut log = File::options().append(true).open(&path).unwrap();
        log.set_len(1 << 40).unwrap();
        io::Write::write_all(&mut log, b"\nfour\nfive\n").unwrap();
        assert_eq!(last_lines(&path, 2), "four\nfive");
        assert!(last_lines(&path, 9).len() <= 16 << 10);
    }
}
