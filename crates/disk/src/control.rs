//! The control protocol of a disk's server: one JSON object per line, answered by one line.
//!
//! ```text
//! > {"command": "status"}
//! < {"return": {"bytes": 1073741824, "active": true, ...}}
//! > {"command": "limit", "bps": 90000000, "iops": 120}
//! < {"return": null}
//! > {"command": "keep"}
//! < {"error": "a QEMU is still connected"}
//! ```

use crate::engine::Handle;
use crate::engine::command::{CacheCommand, Command, PageCommand, PageRecord, Status};
use crate::engine::ledger_commands::LedgerCommand;
use crate::engine::refusal::Refusal;
use crate::keeper::EpochId;
use crate::ledger::Moment;
use crate::limit::Limits;
use crate::memory::Span;
use crate::served_disk::ServedDisk;
use rekindle_kernel::lines::{LineError, Lines};
use rekindle_kernel::process::Process;
use rekindle_kernel::unix_socket;
use rustix::net::sockopt::socket_peercred;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for an answer. A server that is stopping waits for its disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long to wait for a server that a signal has stopped (`SIGSTOP`).
const STOPPED_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between checks whether the server is stopped.
const STOPPED_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// How long a server may let a connection wait in its queue when that is full.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Most bytes of a command, with its line end.
const MAX_COMMAND_BYTES: u64 = 1 << 16;
/// Most bytes of an answer.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// Interval between two queries of a server's status.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A command to a server, as it is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ControlCommand {
    /// Report the server's state.
    Status {},
    #[serde(rename = "limit")]
    SetLimits {
        /// Bytes per second.
        bps: Option<u64>,
        /// Requests per second.
        iops: Option<u64>,
    },
    /// Update the length of a grown image. Returns the length.
    #[serde(rename = "resize")]
    UpdateLength {},
    /// The guest has ended and its QEMU has disconnected: keep its memory as the next guest's retained cache. Returns
    /// the number of blocks.
    #[serde(rename = "keep")]
    KeepCache {
        /// For a VM with several disks, whose servers use the same memory: path of a new file that shows the other
        /// servers which frames this server needs. No frame is released before `share`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        claim: Option<PathBuf>,
    },
    /// The guest is about to start another kernel in the same QEMU and memory (kexec): serve the cached blocks that
    /// are still unchanged then. Returns the current number of blocks.
    #[serde(rename = "reuse")]
    ReuseCache {},
    /// All servers keep their blocks: read the other servers' files, and release the frames that no server needs.
    #[serde(rename = "share")]
    ShareCache { claims: Vec<PathBuf> },
    /// Discard the retained cache. If no QEMU is connected, also release the previous guest's memory.
    #[serde(rename = "drop")]
    DropCache {},
    /// Start recording the pages that the server writes in the memory of a connected QEMU's guest, or stop. Returns
    /// whether they were recorded without interruption.
    #[serde(rename = "note")]
    RecordPages {
        /// Process ID of the QEMU; `None` to stop.
        pid: Option<u32>,
    },
    /// Return and clear the recorded pages, by the QEMU's addresses. Rejected if the record is incomplete because
    /// another QEMU has connected.
    #[serde(rename = "collect")]
    CollectPages {},
    /// A restore has filled the guest's memory completely.
    #[serde(rename = "filled")]
    MemoryFilled {},
    /// A guest that has read and written nothing is about to boot. No QEMU is connected.
    PhaseBegin {},
    /// Mark the blocks that the stopped guest has touched. Returns the [`Moment`].
    PhaseMark {},
    /// Check whether a guest of `moment` may continue. Returns null, or the reason why it may not.
    PhaseCheck { moment: Moment },
    /// The next guest continues from `moment`, and its memory is filled while it runs, until
    /// [`ControlCommand::MemoryFilled`]. Returns null, or the reason why the guest may not continue.
    #[serde(rename = "phase-go-on")]
    PhaseResume { moment: Moment },
    /// Start a redo log. Returns the disk's identity and the current epoch.
    EpochBegin {},
    /// End the current epoch. Returns the disk's identity and the ended epoch.
    EpochMark {},
    /// Make an epoch durable.
    EpochSeal { epoch: u64 },
    /// A checkpoint with this epoch is committed.
    EpochCommitted { epoch: u64 },
    /// Merge and remove the log. Returns before that is done.
    EpochEnd {},
    /// Open the disk that the server has waited for.
    #[serde(rename = "have")]
    OpenDisk {
        /// The epoch to open; by default the newest disk.
        #[serde(default, rename = "at", skip_serializing_if = "Option::is_none")]
        epoch: Option<EpochId>,
        /// A restore is still filling the guest's memory, until [`ControlCommand::MemoryFilled`]: access to a missing
        /// page blocks.
        #[serde(rename = "filling")]
        is_filling: bool,
    },
    /// End the server.
    End {},
}

/// Serves the commands of one connection.
pub(crate) fn serve(disk: &ServedDisk, stream: &UnixStream) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    while let Some(line) = read_command(&mut reader)? {
        let answer = match line {
            CommandLine::Whole(text) => answer(disk, &text),
            CommandLine::TooLong => {
                json!({ "error": format!("a command has at most {MAX_COMMAND_BYTES} bytes, and this one is longer") })
            }
        };
        let mut answer = serde_json::to_vec(&answer)?;
        answer.push(b'\n');
        (&*stream).write_all(&answer)?;
    }
    Ok(())
}

/// A line that a client has sent.
enum CommandLine {
    Whole(String),
    /// The line has more than [`MAX_COMMAND_BYTES`] and was dropped.
    TooLong,
}

/// Reads the next command; `None` at the end of the connection.
fn read_command(reader: &mut impl BufRead) -> io::Result<Option<CommandLine>> {
    let mut line = Vec::new();
    let read = io::Read::take(&mut *reader, MAX_COMMAND_BYTES).read_until(b'\n', &mut line)?;
    if read == 0 {
        return Ok(None);
    }
    if read as u64 == MAX_COMMAND_BYTES && !line.ends_with(b"\n") {
        reader.skip_until(b'\n')?;
        return Ok(Some(CommandLine::TooLong));
    }
    let text = String::from_utf8(line).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
    Ok(Some(CommandLine::Whole(text)))
}

/// Carries out one command and returns the answer.
pub(crate) fn answer(disk: &ServedDisk, line: &str) -> Value {
    let result = match serde_json::from_str(line) {
        Ok(command) => carry_out(disk, command),
        Err(e) => Err(Refusal(format!("not a question to a disk: {e}"))),
    };
    match result {
        Ok(value) => json!({ "return": value }),
        Err(Refusal(why)) => json!({ "error": why }),
    }
}

fn carry_out(disk: &ServedDisk, command: ControlCommand) -> Result<Value, Refusal> {
    use ControlCommand as C;
    let engine = &disk.engine;
    match command {
        C::Status {} => to_json(status(disk)),
        C::SetLimits { bps, iops } => to_json(engine.ask(|to| Command::SetLimits(Limits { bps, iops }, to))),
        C::UpdateLength {} => to_json(engine.ask(Command::UpdateLength)),
        C::KeepCache { claim } => {
            let claim = claim.map(|path| disk.frames_path(path));
            to_json(engine.ask(|to| Command::Cache(CacheCommand::Keep(claim, to))))
        }
        C::ReuseCache {} => to_json(engine.ask(|to| Command::Cache(CacheCommand::Reuse(to)))),
        C::ShareCache { claims } => {
            let claims = claims.into_iter().map(|path| disk.frames_path(path)).collect();
            to_json(engine.ask(|to| Command::Cache(CacheCommand::Share(claims, to))))
        }
        C::DropCache {} => to_json(engine.ask(|to| Command::Cache(CacheCommand::Drop(to)))),
        C::RecordPages { pid } => to_json(record_pages(engine, pid)),
        C::CollectPages {} => to_json(engine.ask(|to| Command::Pages(PageCommand::Collect(to)))),
        C::MemoryFilled {} => to_json(engine.ask(Command::MemoryFilled)),
        C::PhaseBegin {} => to_json(engine.ask(|to| Command::Ledger(LedgerCommand::Begin(to)))),
        C::PhaseMark {} => to_json(engine.ask(|to| Command::Ledger(LedgerCommand::Mark(to)))),
        C::PhaseCheck { moment } => to_json(engine.ask(|to| Command::Ledger(LedgerCommand::Check(moment, to)))),
        C::PhaseResume { moment } => to_json(engine.ask(|to| Command::Ledger(LedgerCommand::Resume(moment, to)))),
        C::EpochBegin {} => to_json(disk.keeper().and_then(|keeper| keeper.begin(engine))),
        C::EpochMark {} => to_json(disk.keeper().and_then(|keeper| keeper.mark(engine))),
        C::EpochSeal { epoch } => to_json(disk.keeper().and_then(|keeper| keeper.seal(engine, epoch))),
        C::EpochCommitted { epoch } => to_json(disk.keeper().and_then(|keeper| keeper.committed(epoch))),
        C::EpochEnd {} => to_json(disk.keeper().map(|keeper| keeper.end())),
        C::OpenDisk { epoch, is_filling } => to_json(disk.open(epoch, is_filling)),
        C::End {} => to_json(engine.ask(Command::End)),
    }
}

/// Returns the state of the engine and of the log.
fn status(disk: &ServedDisk) -> Result<Status, Refusal> {
    let mut status = disk.engine.ask(Command::Status)?;
    if let (Some(redo), Ok(keeper)) = (&mut status.redo, disk.keeper()) {
        keeper.complete_status(redo);
    }
    Ok(status)
}

/// Starts or stops recording pages. Returns whether they were recorded already.
fn record_pages(engine: &Handle, process: Option<u32>) -> Result<bool, Refusal> {
    let Some(process) = process else {
        return engine.ask(|answer| Command::Pages(PageCommand::End(answer))).map(|()| false);
    };
    let record = engine.ask(|answer| Command::Pages(PageCommand::Record { process, answer }))?;
    Ok(record == PageRecord::Continues)
}

fn to_json<T: Serialize>(result: Result<T, Refusal>) -> Result<Value, Refusal> {
    result.and_then(|value| serde_json::to_value(value).map_err(|e| Refusal(e.to_string())))
}

/// The reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("{}: no disk server answers", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The server rejected the command.
    #[error("{}: {why}", path.display())]
    Refused {
        path: PathBuf,
        /// The reason that the server returned.
        why: String,
    },
}

/// A connection to a server.
#[derive(Debug)]
pub struct Control {
    path: PathBuf,
    lines: Lines<UnixStream>,
    /// The server, if it is visible from here.
    server: Option<Process>,
}

impl Control {
    /// Connects to the control socket at `path`.
    pub fn connect(path: &Path) -> Result<Self, ControlError> {
        let connected = unix_socket::connect(path, CONNECT_TIMEOUT).and_then(|stream| {
            stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
            Ok(stream)
        });
        let stream = connected.map_err(|source| ControlError::Connect { path: path.to_owned(), source })?;
        let server = server_of(&stream);
        Ok(Self { path: path.to_owned(), lines: Lines::new(stream, MAX_ANSWER_BYTES), server })
    }

    /// Sends a command and waits for the answer.
    pub fn ask<T: DeserializeOwned>(&mut self, command: &ControlCommand) -> Result<T, ControlError> {
        let answer = self.exchange(command);
        let answer = answer.map_err(|source| ControlError::Connect { path: self.path.clone(), source })?;
        match answer.error {
            Some(why) => Err(self.refused(why)),
            None => serde_json::from_value(answer.value.unwrap_or(Value::Null))
                .map_err(|e| ControlError::Connect { path: self.path.clone(), source: io::Error::other(e) }),
        }
    }

    /// Sends a line and receives a line.
    fn exchange(&mut self, command: &ControlCommand) -> io::Result<Answer> {
        let mut line = serde_json::to_vec(command)?;
        line.push(b'\n');
        self.lines.stream().write_all(&line)?;
        match self.wait_for_line(Instant::now() + ANSWER_TIMEOUT) {
            Ok(line) => serde_json::from_slice(&line).map_err(io::Error::other),
            Err(e) => {
                // A late answer must not be taken for the answer to the next command.
                let _ = self.lines.stream().shutdown(Shutdown::Both);
                Err(e)
            }
        }
    }

    /// Waits for a line until `deadline`. A server that is stopped must continue within [`STOPPED_TIMEOUT`].
    fn wait_for_line(&mut self, deadline: Instant) -> io::Result<Vec<u8>> {
        let mut stopped_since = None;
        loop {
            let now = Instant::now();
            match self.lines.next_by(deadline.min(now + STOPPED_CHECK_INTERVAL)) {
                Err(LineError::Late) if Instant::now() < deadline => {}
                other => return Ok(other?),
            }
            let stopped = self.server.filter(Process::is_stopped);
            stopped_since = stopped.and(stopped_since.or(Some(now)));
            if let (Some(Process { pid, .. }), Some(since)) = (stopped, stopped_since)
                && since.elapsed() > STOPPED_TIMEOUT
            {
                let text =
                    format!("its server (process {pid}) was stopped by a signal; to resume it: kill -CONT {pid}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
    }

    fn refused(&self, why: String) -> ControlError {
        ControlError::Refused { path: self.path.clone(), why }
    }

    pub fn status(&mut self) -> Result<Status, ControlError> {
        self.ask(&ControlCommand::Status {})
    }

    /// Waits until the server has noticed that its QEMU has disconnected and no request is in progress. A QEMU that
    /// waits for its guest may be connected. Returns the state of the server.
    ///
    /// # Errors
    /// [`ControlError`], also if `timeout` has passed.
    pub fn wait_gone(&mut self, timeout: Duration) -> Result<Status, ControlError> {
        let deadline = Instant::now() + timeout;
        loop {
            let status = self.status()?;
            if status.connected == status.waiting_for_guest && status.requests_in_progress == 0 {
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(self.refused("a QEMU is still connected".into()));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Merges and removes the disk's redo log, if it has one, and waits until that is done.
    ///
    /// # Errors
    /// [`ControlError`], also if `timeout` has passed.
    pub fn end_epochs(&mut self, timeout: Duration) -> Result<(), ControlError> {
        let deadline = Instant::now() + timeout;
        self.ask::<()>(&ControlCommand::EpochEnd {})?;
        while let Some(redo) = self.status()?.redo {
            if let Some(why) = redo.failed {
                return Err(self.refused(why));
            }
            if Instant::now() > deadline {
                return Err(self.refused("its redo log is being merged still".into()));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns and clears the recorded pages.
    ///
    /// # Errors
    /// After a [`ControlError`], any page may have been written.
    pub fn collect(&mut self) -> Result<Vec<Span>, ControlError> {
        self.ask(&ControlCommand::CollectPages {})
    }
}

/// Returns the process that listens at the other end of a connection.
fn server_of(stream: &UnixStream) -> Option<Process> {
    let pid = socket_peercred(stream).ok()?.pid.as_raw_nonzero().get();
    Process::of(u32::try_from(pid).ok()?).ok()
}

/// An answer, as the server sends it.
#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "return")]
    value: Option<Value>,
    error: Option<String>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// Returns the lines that the server reads from these bytes; `None` for one that is too long.
    fn lines_in(bytes: &[u8]) -> Vec<Option<String>> {
        let mut reader = BufReader::new(bytes);
        let mut lines = Vec::new();
        while let Some(line) = read_command(&mut reader).unwrap() {
            lines.push(match line {
                CommandLine::Whole(text) => Some(text),
                CommandLine::TooLong => None,
            });
        }
        lines
    }

    #[test]
    fn a_command_that_is_too_long_is_one_command_and_the_next_one_is_read() {
        let line = |len: usize| "x".repeat(len - 1) + "\n";
        let most = MAX_COMMAND_BYTES as usize;
        let input = [line(most), line(most + 1), line(3 * most), line(2), "end".into()].concat();
        let expected = [Some(line(most)), None, None, Some(line(2)), Some("end".into())];
        assert_eq!(lines_in(input.as_bytes()), expected);
        assert_eq!(lines_in("x".repeat(most + 1).as_bytes()), [None], "without a line end");
    }
}
