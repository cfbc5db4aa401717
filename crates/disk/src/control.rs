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
use crate::engine::command::{CacheCommand, Command, PageCommand, PageRecord, Refused, Status};
use crate::engine::ledger_commands::LedgerCommand;
use crate::ledger::Moment;
use crate::limit::Limits;
use crate::memory::Span;
use crate::redo::keeper::EpochId;
use crate::served_disk::ServedDisk;
use rekindle_kernel::lines::Lines;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for an answer. A server that is stopping waits for its disk.
const PATIENCE: Duration = Duration::from_secs(60);
/// Most bytes of a command.
const LONGEST: u64 = 1 << 16;
/// Most bytes of an answer.
const LONGEST_ANSWER: usize = 16 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Ask {
    /// Report the server's state.
    Status {},
    /// Set the rate limits.
    Limit {
        /// Bytes per second.
        bps: Option<u64>,
        /// Requests per second.
        iops: Option<u64>,
    },
    /// Update the length of a grown image. Returns the length.
    Resize {},
    /// The guest has ended and its QEMU has disconnected: keep its memory as the next guest's retained cache. Returns
    /// the number of blocks.
    Keep {
        /// For a VM with several disks, whose servers use the same memory: path of a new file that shows the other
        /// servers which frames this server needs. No frame is released before `share`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        claim: Option<PathBuf>,
    },
    /// The guest is about to start another kernel in the same QEMU and memory (kexec): serve the cached blocks that
    /// are still unchanged then. Returns the current number of blocks.
    Reuse {},
    /// All servers keep their blocks: read the other servers' files, and release the frames that no server needs.
    Share { claims: Vec<PathBuf> },
    /// Discard the retained cache. If no QEMU is connected, also release the previous guest's memory.
    Drop {},
    /// Start recording the pages that the server writes in the memory of a connected QEMU's guest, or stop. Returns
    /// whether they were recorded without interruption.
    Note {
        /// Process ID of the QEMU; `None` to stop.
        pid: Option<u32>,
    },
    /// Return and clear the recorded pages, by the QEMU's addresses. Rejected if the record is incomplete because
    /// another QEMU has connected.
    Collect {},
    /// A restore has filled the guest's memory completely.
    Filled {},
    /// A guest that has read and written nothing is about to boot. No QEMU is connected.
    PhaseBegin {},
    /// Mark the blocks that the stopped guest has touched. Returns the [`Moment`].
    PhaseMark {},
    /// Check whether a guest of `moment` may continue. Returns null, or the reason why it may not.
    PhaseCheck { moment: Moment },
    /// The next guest continues from `moment`, and its memory is filled while it runs, until [`Ask::Filled`]. Returns
    /// null, or the reason why the guest may not continue.
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
    Have {
        /// The epoch to open; by default the newest disk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<EpochId>,
        /// A restore is still filling the guest's memory, until `filled`: access to a missing page blocks.
        filling: bool,
    },
    /// End the server.
    End {},
}

/// Carries out one command and returns the answer.
pub(crate) fn answer(disk: &ServedDisk, line: &str) -> Value {
    let engine = &disk.engine;
    let asked: Ask = match serde_json::from_str(line) {
        Ok(asked) => asked,
        Err(e) => return json!({ "error": format!("not a question to a disk: {e}") }),
    };
    let answered = match asked {
        Ask::Status {} => value(engine.ask(Command::Status).map(|mut status| {
            if let Ok(keeper) = disk.keeper() {
                status.redo.iter_mut().for_each(|redo| keeper.complete_status(redo));
            }
            status
        })),
        Ask::Limit { bps, iops } => value(engine.ask(|to| Command::Limit(Limits { bps, iops }, to))),
        Ask::Resize {} => value(engine.ask(Command::Measure)),
        Ask::Keep { claim } => value(engine.ask(|to| Command::Cache(CacheCommand::Keep(claim, to)))),
        Ask::Reuse {} => value(engine.ask(|to| Command::Cache(CacheCommand::Reuse(to)))),
        Ask::Share { claims } => value(engine.ask(|to| Command::Cache(CacheCommand::Share(claims, to)))),
        Ask::Drop {} => value(engine.ask(|to| Command::Cache(CacheCommand::Drop(to)))),
        Ask::Note { pid } => value(record_pages(engine, pid)),
        Ask::Collect {} => value(engine.ask(|to| Command::Pages(PageCommand::Collect(to)))),
        Ask::Filled {} => value(engine.ask(Command::Filled)),
        Ask::PhaseBegin {} => value(engine.ask(|to| Command::Ledger(LedgerCommand::Begin(to)))),
        Ask::PhaseMark {} => value(engine.ask(|to| Command::Ledger(LedgerCommand::Mark(to)))),
        Ask::PhaseCheck { moment } => value(engine.ask(|to| Command::Ledger(LedgerCommand::Check(moment, to)))),
        Ask::PhaseResume { moment } => value(engine.ask(|to| Command::Ledger(LedgerCommand::Resume(moment, to)))),
        Ask::EpochBegin {} => value(disk.keeper().and_then(|keeper| keeper.begin(engine))),
        Ask::EpochMark {} => value(disk.keeper().and_then(|keeper| keeper.mark(engine))),
        Ask::EpochSeal { epoch } => value(disk.keeper().and_then(|keeper| keeper.seal(engine, epoch))),
        Ask::EpochCommitted { epoch } => value(disk.keeper().and_then(|keeper| keeper.committed(epoch))),
        Ask::EpochEnd {} => value(disk.keeper().map(|keeper| keeper.end())),
        Ask::Have { at, filling } => value(disk.open(at, filling)),
        Ask::End {} => value(engine.ask(Command::End)),
    };
    match answered {
        Ok(value) => json!({ "return": value }),
        Err(Refused(why)) => json!({ "error": why }),
    }
}

/// Starts or stops recording pages. Returns whether they were recorded already.
fn record_pages(engine: &Handle, process: Option<u32>) -> Result<bool, Refused> {
    let Some(process) = process else {
        return engine.ask(|answer| Command::Pages(PageCommand::End(answer))).map(|()| false);
    };
    let record = engine.ask(|answer| Command::Pages(PageCommand::Record { process, answer }))?;
    Ok(record == PageRecord::Continues)
}

fn value<T: Serialize>(answer: Result<T, Refused>) -> Result<Value, Refused> {
    answer.and_then(|value| serde_json::to_value(value).map_err(|e| Refused(e.to_string())))
}

/// Serves the commands of one connection.
pub(crate) fn serve(disk: &ServedDisk, stream: &UnixStream) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        let read = io::Read::take(&mut reader, LONGEST).read_line(&mut line)?;
        if read == 0 {
            return Ok(());
        }
        let mut answer = serde_json::to_vec(&answer(disk, &line))?;
        answer.push(b'\n');
        (&*stream).write_all(&answer)?;
    }
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
}

impl Control {
    /// Connects to the control socket at `path`.
    pub fn connect(path: &Path) -> Result<Self, ControlError> {
        let connected = UnixStream::connect(path).and_then(|stream| {
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(stream)
        });
        let failed = |source| ControlError::Connect { path: path.to_owned(), source };
        Ok(Self { path: path.to_owned(), lines: Lines::new(connected.map_err(failed)?, LONGEST_ANSWER) })
    }

    /// Sends a command and waits for the answer.
    pub fn ask<T: DeserializeOwned>(&mut self, ask: &Ask) -> Result<T, ControlError> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(rename = "return")]
            value: Option<Value>,
            error: Option<String>,
        }
        let path = self.path.clone();
        let failed = move |source| ControlError::Connect { path, source };
        let mut line = serde_json::to_vec(ask).map_err(io::Error::other).map_err(failed.clone())?;
        line.push(b'\n');
        let deadline = Instant::now() + PATIENCE;
        let sent = self.lines.stream().write_all(&line);
        let answer = sent.and_then(|()| Ok(self.lines.next_by(deadline)?)).map_err(failed.clone())?;
        let answer: Answer = serde_json::from_slice(&answer).map_err(io::Error::other).map_err(failed.clone())?;
        match answer.error {
            Some(why) => Err(ControlError::Refused { path: self.path.clone(), why }),
            None => {
                serde_json::from_value(answer.value.unwrap_or(Value::Null)).map_err(|e| failed(io::Error::other(e)))
            }
        }
    }

    pub fn status(&mut self) -> Result<Status, ControlError> {
        self.ask(&Ask::Status {})
    }

    /// Waits until the server has noticed that its QEMU has disconnected and no request is in progress. A QEMU that
    /// waits for its guest may be connected. Returns the state of the server.
    ///
    /// # Errors
    /// [`ControlError`], also if `patience` has passed.
    pub fn wait_gone(&mut self, patience: Duration) -> Result<Status, ControlError> {
        let deadline = Instant::now() + patience;
        loop {
            let status = self.status()?;
            if status.connected == status.waiting && status.under_way == 0 {
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(ControlError::Refused { path: self.path.clone(), why: "a QEMU is still connected".into() });
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Merges and removes the disk's redo log, if it has one, and waits until that is done.
    ///
    /// # Errors
    /// [`ControlError`], also if `patience` has passed.
    pub fn end_epochs(&mut self, patience: Duration) -> Result<(), ControlError> {
        let deadline = Instant::now() + patience;
        self.ask::<()>(&Ask::EpochEnd {})?;
        while let Some(redo) = self.status()?.redo {
            if let Some(why) = redo.failed {
                return Err(ControlError::Refused { path: self.path.clone(), why });
            }
            if Instant::now() > deadline {
                let why = "its redo log is being merged still".into();
                return Err(ControlError::Refused { path: self.path.clone(), why });
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Returns and clears the recorded pages.
    ///
    /// # Errors
    /// After a [`ControlError`], any page may have been written.
    pub fn collect(&mut self) -> Result<Vec<Span>, ControlError> {
        self.ask(&Ask::Collect {})
    }
}
