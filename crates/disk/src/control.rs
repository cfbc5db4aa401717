//! What a disk's server is asked for beside its guest: one JSON object a line, each answered by one.
//!
//! ```text
//! > {"command": "status"}
//! < {"return": {"bytes": 1073741824, "active": true, ...}}
//! > {"command": "limit", "bps": 90000000, "iops": 120}
//! < {"return": null}
//! > {"command": "keep"}
//! < {"error": "a QEMU is still connected"}
//! ```

use crate::desk::Desk;
use crate::engine::command::{Command, Refused, Status};
use crate::engine::ledger::Question;
use crate::ledger::Moment;
use crate::limit::Limits;
use crate::memory::Span;
use crate::redo::keeper::EpochId;
use rekindle_kernel::lines::Lines;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long an answer may take: a server that is asked to stop waits for its disk.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a question at most.
const LONGEST: u64 = 1 << 16;
/// Bytes of an answer at most.
const LONGEST_ANSWER: usize = 16 << 20;

/// A question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Ask {
    /// What it does.
    Status {},
    /// Other limits.
    Limit {
        /// Bytes in a second.
        bps: Option<u64>,
        /// Requests in a second.
        iops: Option<u64>,
    },
    /// The image has grown; the answer is its length.
    Resize {},
    /// The guest has ended and its QEMU is gone: its memory becomes the next one's attic. The answer is how many blocks it may have.
    Keep {
        /// The VM has several disks, whose servers have their attics in the same memory: a new file, in which they see what this one needs.
        /// Nothing is given back before `share`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        claim: Option<PathBuf>,
    },
    /// The guest is about to start another kernel, in the same QEMU and memory (kexec): what it has cached by then is served to that one too, as
    /// far as it is still there. The answer is how many blocks that would be now.
    Reuse {},
    /// All of them keep what they had: the files of the others. What none of them needs is given back from here on.
    Share {
        /// The others' files.
        claims: Vec<PathBuf>,
    },
    /// There is to be no attic. Where no QEMU is connected, the memory of the guest before is let go of, too.
    Drop {},
    /// Note which pages are written of the guest of a QEMU that is connected, or of none any more. The answer is whether that was noted
    /// already, all the time.
    Note {
        /// The QEMU's process.
        pid: Option<u32>,
    },
    /// The pages that were written since they were last asked for, by the QEMU's addresses. Refused where not all were noted: the QEMU
    /// is another one.
    Collect {},
    /// A restore has brought all of the guest's memory: nothing of it is missing any more.
    Filled {},
    /// A guest is about to begin that has touched nothing: no QEMU is connected.
    PhaseBegin {},
    /// The guest is stopped: mark what it has touched until now. The answer is the moment's name.
    PhaseMark {},
    /// Whether a guest of a moment may go on from here: null, or why not.
    PhaseCheck {
        /// Which.
        moment: Moment,
    },
    /// The next guest is one of that moment, and its memory comes while it runs ([`Ask::Filled`] ends that): null, or why it may not be.
    PhaseGoOn {
        /// Which.
        moment: Moment,
    },
    /// What is written from here on goes to a redo log; the answer is the disk's identity, and the epoch of what is written now.
    EpochBegin {},
    /// Later writes are of the next epoch; the answer is the disk's identity, and the epoch that the disk is as of now.
    EpochMark {},
    /// Make an epoch durable.
    EpochSeal {
        /// Which.
        epoch: u64,
    },
    /// A checkpoint with this epoch counts.
    EpochCommitted {
        /// Which.
        epoch: u64,
    },
    /// Merge the log, which then goes. Answered at once.
    EpochEnd {},
    /// It has waited for a restore, and is to have its disk now.
    Have {
        /// As it was at a checkpoint; the newest, if it is not said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<EpochId>,
        /// The guest's memory still comes: missing pages are waited for, until `filled`.
        filling: bool,
    },
    /// End.
    End {},
}

/// Answer one question.
pub(crate) fn answer(desk: &Desk, line: &str) -> Value {
    let engine = &desk.engine;
    let asked: Ask = match serde_json::from_str(line) {
        Ok(asked) => asked,
        Err(e) => return json!({ "error": format!("not a question to a disk: {e}") }),
    };
    let answered = match asked {
        Ask::Status {} => value(engine.ask(Command::Status).map(|mut status| {
            if let Ok(keeper) = desk.keeper() {
                status.redo.iter_mut().for_each(|redo| keeper.complete_status(redo));
            }
            status
        })),
        Ask::Limit { bps, iops } => value(engine.ask(|to| Command::Limit(Limits { bps, iops }, to))),
        Ask::Resize {} => value(engine.ask(Command::Measure)),
        Ask::Keep { claim } => value(engine.ask(|to| Command::Keep(claim, to))),
        Ask::Reuse {} => value(engine.ask(Command::Reuse)),
        Ask::Share { claims } => value(engine.ask(|to| Command::Share(claims, to))),
        Ask::Drop {} => value(engine.ask(Command::Drop)),
        Ask::Note { pid } => value(engine.ask(|to| Command::Note(pid, to))),
        Ask::Collect {} => value(engine.ask(Command::Collect)),
        Ask::Filled {} => value(engine.ask(Command::Filled)),
        Ask::PhaseBegin {} => value(engine.ask(|to| Command::Ledger(Question::Begin(to)))),
        Ask::PhaseMark {} => value(engine.ask(|to| Command::Ledger(Question::Mark(to)))),
        Ask::PhaseCheck { moment } => value(engine.ask(|to| Command::Ledger(Question::Check(moment, to)))),
        Ask::PhaseGoOn { moment } => value(engine.ask(|to| Command::Ledger(Question::GoOn(moment, to)))),
        Ask::EpochBegin {} => value(desk.keeper().and_then(|keeper| keeper.begin(engine))),
        Ask::EpochMark {} => value(desk.keeper().and_then(|keeper| keeper.mark(engine))),
        Ask::EpochSeal { epoch } => value(desk.keeper().and_then(|keeper| keeper.seal(engine, epoch))),
        Ask::EpochCommitted { epoch } => value(desk.keeper().and_then(|keeper| keeper.committed(epoch))),
        Ask::EpochEnd {} => value(desk.keeper().map(|keeper| keeper.end())),
        Ask::Have { at, filling } => value(desk.have(at, filling)),
        Ask::End {} => value(engine.ask(Command::End)),
    };
    match answered {
        Ok(value) => json!({ "return": value }),
        Err(Refused(why)) => json!({ "error": why }),
    }
}

fn value<T: Serialize>(answer: Result<T, Refused>) -> Result<Value, Refused> {
    answer.and_then(|value| serde_json::to_value(value).map_err(|e| Refused(e.to_string())))
}

/// Answer all questions of one connection.
pub(crate) fn serve(desk: &Desk, stream: &UnixStream) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        let read = io::Read::take(&mut reader, LONGEST).read_line(&mut line)?;
        if read == 0 {
            return Ok(());
        }
        let mut answer = serde_json::to_vec(&answer(desk, &line))?;
        answer.push(b'\n');
        (&*stream).write_all(&answer)?;
    }
}

/// Why a server does not answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Nobody is there.
    #[error("{}: no disk server answers", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It will not.
    #[error("{}: {why}", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// Its words.
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
    /// Connect to the control socket at `path`.
    ///
    /// # Errors
    /// [`ControlError::Connect`].
    pub fn connect(path: &Path) -> Result<Self, ControlError> {
        let connected = UnixStream::connect(path).and_then(|stream| {
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(stream)
        });
        let failed = |source| ControlError::Connect { path: path.to_owned(), source };
        Ok(Self { path: path.to_owned(), lines: Lines::new(connected.map_err(failed)?, LONGEST_ANSWER) })
    }

    /// Ask.
    ///
    /// # Errors
    /// [`ControlError`].
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

    /// What the server does.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn status(&mut self) -> Result<Status, ControlError> {
        self.ask(&Ask::Status {})
    }

    /// Wait until it sees that its QEMU has gone, and nothing of that is under way any more: a moment later than we. One that waits for its
    /// guest may be there. Gives what it does then.
    ///
    /// # Errors
    /// [`ControlError`]; that it has not gone after `patience`, too.
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

    /// Merge the log of the disk and wait until it has gone. One that there is not has gone.
    ///
    /// # Errors
    /// [`ControlError`]; that it has not gone after `patience`, too.
    pub fn end_epochs(&mut self, patience: Duration) -> Result<(), ControlError> {
        let deadline = Instant::now() + patience;
        self.ask::<()>(&Ask::EpochEnd {})?;
        while let Some(told) = self.status()?.redo {
            if let Some(why) = told.failed {
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

    /// The pages that it has written since they were last asked for.
    ///
    /// # Errors
    /// [`ControlError`]; then any may have been written.
    pub fn collect(&mut self) -> Result<Vec<Span>, ControlError> {
        self.ask(&Ask::Collect {})
    }
}
