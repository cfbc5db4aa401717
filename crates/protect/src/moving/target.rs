//! The destination host of a move: `rekindle receive`. The source host starts it over ssh and sends messages to its
//! standard input.

use super::protocol::{self, Answer, Go, Hello, MAX_LINE, Message, Running, VERSION};
use super::record::identity_of;
use crate::protector::chain;
use crate::restore::checkpoint::ChosenCheckpoint;
use crate::restore::concurrent::EarlyLoad;
use crate::restore::prepare::{PreparedQemu, PrimedQemu, prepare};
use crate::restore::{MoveClaim, Request, RestoreError, Restored, restore_in};
use rekindle_kernel::lines::{LineError, Lines, write_by};
use rekindle_life::stop;
use rekindle_store::admin;
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::disks::{self, Epochs};
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::slot::IdleSlot;
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// How long a status query waits for an operation on the VM.
const BUSY: Duration = Duration::from_secs(60);

/// The reason why a VM cannot be taken, as a message for the source host.
type Rejection = String;

/// How long the source host may take for each step. After that, the prepared QEMU is removed from this host. The guest
/// still runs on the source host, or that host claims it in the store.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// Time from the start to the first line, which the source host sends as soon as it is connected.
    hello: Duration,
    /// Time between two lines while the guest runs on the source host. That host takes checkpoints meanwhile, the first
    /// one of all memory. For a guest of 4 TiB, that takes 4.2 days at 12 MB/s.
    checkpoints: Duration,
    /// Time from the state of the stopped guest to [`Message::Go`]: the source host commits the pages that the previous
    /// checkpoints have left. No guest should be stopped for longer.
    go: Duration,
    /// Time from a line's first byte to its last one: 4 MiB at 70 kB/s.
    line: Duration,
    /// Time until an answer was read. The source host waits for it, and an answer has at most 4 MiB, too.
    answer: Duration,
}

const PATIENCE: Patience = Patience {
    hello: Duration::from_secs(60),
    checkpoints: Duration::from_secs(7 * 24 * 3600),
    go: Duration::from_secs(3600),
    line: Duration::from_secs(60),
    answer: Duration::from_secs(60),
};

/// The connection to the source host.
struct SourceConnection<R, W> {
    lines: Lines<R>,
    to: W,
    patience: Patience,
}

impl<R: Read + AsFd, W: Write + AsFd> SourceConnection<R, W> {
    /// Reads the next message, whose first byte must arrive within `begin`. `None` at the end of the stream. The inner
    /// error: the line is not a message.
    fn read_message(&mut self, begin: Duration) -> io::Result<Option<Result<Message, Rejection>>> {
        match self.lines.next_started_by(Instant::now() + begin, self.patience.line) {
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
    fn send(&mut self, answer: &Answer) -> bool {
        let mut line = serde_json::to_vec(answer).unwrap_or_default();
        line.push(b'\n');
        write_by(&mut self.to, &line, Instant::now() + self.patience.answer).is_ok()
    }

    fn reject(&mut self, why: impl Into<Rejection>) -> io::Result<()> {
        self.send(&Answer::Refused { why: why.into() });
        Ok(())
    }
}

/// Serves a move until the source host has sent its last message. `from` and `to` are pipes or sockets, without a
/// buffer. Calls `on_running` with the name of a VM that runs on this host from then on.
///
/// *Needs:* the same as `rekindle restore`.
/// *On success:* the last answer states the result. If the guest did not arrive, the prepared QEMU was removed.
/// *On failure:* the prepared QEMU was removed.
///
/// # Errors
/// An I/O error if `from` cannot be read, or the source host exceeds a time limit.
pub fn receive(
    host: &Host,
    from: impl Read + AsFd,
    to: impl Write + AsFd,
    on_running: &dyn Fn(&str),
) -> io::Result<()> {
    let patience = PATIENCE;
    let mut source = SourceConnection { lines: Lines::new(from, MAX_LINE), to, patience };
    let hello = match source.read_message(patience.hello)? {
        None => return Ok(()),
        Some(Ok(Message::Hello(hello))) if hello.version == VERSION => hello,
        Some(Ok(Message::Ask { version: VERSION, name })) => {
            source.send(&vm_status(host, &name));
            return Ok(());
        }
        Some(Ok(Message::Hello(_) | Message::Ask { .. })) => {
            return source.reject(format!(
                "it has version {VERSION} of the protocol for moves; use the same Rekindle on both hosts"
            ));
        }
        Some(Ok(_)) => return source.reject("a message arrived before one that names a VM"),
        Some(Err(why)) => return source.reject(why),
    };
    let mut incoming = match IncomingVm::new(host, *hello) {
        Ok(incoming) => incoming,
        Err(why) => return source.reject(why),
    };
    let this = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut answer_read = source.send(&Answer::Ready { version: VERSION, host: this });
    // A source host that does not read an answer has abandoned the move.
    while answer_read {
        answer_read = match source.read_message(patience.checkpoints)? {
            // The source host has cancelled the move, or has failed.
            None => return Ok(()),
            Some(Ok(Message::Prepare {})) => match incoming.prepare() {
                Ok(PreparedQemu { checkpoint, pid, .. }) => source.send(&Answer::Prepared { checkpoint, pid }),
                Err(why) => return source.reject(why),
            },
            Some(Ok(Message::ReadNewest {})) => source.send(&incoming.read_newest()),
            Some(Ok(Message::State(state))) => {
                // [`Message::Go`] arrives during the load.
                let mut late = None;
                let mut wait_for_go = || match source.read_message(patience.go) {
                    Ok(Some(Ok(Message::Go(go)))) => Some(go),
                    Ok(_) => None,
                    Err(e) => {
                        late = Some(e);
                        None
                    }
                };
                let answer = incoming.load(state, &mut wait_for_go);
                let Some(answer) = answer else { return late.map_or(Ok(()), Err) };
                source.send(&answer);
                incoming.notify_running(&answer, on_running);
                return Ok(());
            }
            Some(Ok(Message::Go(go))) => {
                let answer = incoming.resume(&go);
                source.send(&answer);
                incoming.notify_running(&answer, on_running);
                return Ok(());
            }
            Some(Ok(_)) => return source.reject("a second message names a VM"),
            Some(Err(why)) => return source.reject(why),
        };
    }
    Ok(())
}

/// A VM that is being moved to this host.
struct IncomingVm<'a> {
    host: &'a Host,
    name: Name,
    request: Request,
    /// A destination QEMU may have been prepared.
    prepared: bool,
    /// The prepared QEMU, if its memory is registered.
    early: Option<PrimedQemu>,
    /// The prepared QEMU together with the data of the newest checkpoint that a load needs. Replaces `early`.
    early_load: Option<EarlyLoad<'a>>,
}

impl<'a> IncomingVm<'a> {
    /// Checks whether the VM can run on this host. Creates nothing.
    fn new(host: &'a Host, hello: Hello) -> Result<Self, Rejection> {
        let Hello { name, recipe, store, created_us, identity, definition, qemu, hold_output, .. } = hello;
        let definition = definition.as_deref().map(Definition::load).transpose().map_err(|e| chain(&e))?;
        let identity = identity.map(identity_of);
        if let Some(created_us) = created_us {
            let found = admin::listing(&store, identity.as_ref()).map_err(|e| chain(&e))?;
            if found.created_us != created_us {
                return Err(format!(
                    "{store} is a different store there; both hosts must reach the same store by that URL"
                ));
            }
        }
        let idle_slot = IdleSlot::lock(host, name.as_str(), "move").map_err(|e| chain(&e))?;
        let given = definition.is_some();
        let wanted = definition.clone().unwrap_or_else(|| recipe.definition.clone());
        let wanted = Definition { name: name.clone(), ..wanted };
        // The last checkpoint needs all of the disks.
        let planned = idle_slot.plan(wanted, qemu.as_deref(), &Epochs::new(), |hardware| recipe.fit(hardware, given));
        let room = planned.and_then(|plan| plan.check_room());
        idle_slot.release();
        room.map_err(|e| chain(&e))?;
        let request =
            Request { store, identity, at: None, eager: false, definition, qemu, hold_output, move_claim: None };
        Ok(Self { host, name, request, prepared: false, early: None, early_load: None })
    }

    /// Prepares a destination QEMU. This also checks whether this host has everything that the QEMU needs.
    fn prepare(&mut self) -> Result<PreparedQemu, Rejection> {
        // From here on there may be a QEMU to remove.
        self.prepared = true;
        let waits = prepare(self.host, &self.name, &self.request).map_err(|e| chain(&e))?;
        let chosen = ChosenCheckpoint::open(&self.request).map_err(|e| chain(&e))?;
        let state = State::read(&RunDir::new(&self.host.root, self.name.as_str())).map_err(|e| chain(&e))?;
        let others = state.map(|state| disks::identity_problems(&state.hardware, &chosen.epochs)).unwrap_or_default();
        if !others.is_empty() {
            return Err(others.join("; "));
        }
        // Does the steps that are possible before the guest is stopped. If they fail, the restore does them, or starts
        // another QEMU.
        self.early = PrimedQemu::take(self.host, &self.name).inspect_err(|e| tracing::debug!("{}", chain(e))).ok();
        Ok(waits)
    }

    /// Reads the data of the newest checkpoint that a load needs.
    fn read_newest(&mut self) -> Answer {
        match EarlyLoad::new(self.host, &self.name, &self.request, &mut self.early) {
            Ok(early_load) => {
                let (checkpoint, pages) = (Some(early_load.number()), early_load.pages());
                self.early_load = Some(early_load);
                Answer::NewestRead { checkpoint, pages }
            }
            Err(e) => {
                tracing::debug!("{} is loaded after its last checkpoint is committed: {}", self.name, chain(&e));
                Answer::NewestRead { checkpoint: None, pages: Vec::new() }
            }
        }
    }

    /// Loads the guest while its last checkpoint is being committed, and resumes it when `wait_for_go` returns a
    /// message. `None`: no message arrived.
    fn load(&mut self, state: protocol::StoppedState, wait_for_go: &mut dyn FnMut() -> Option<Go>) -> Option<Answer> {
        let began = Instant::now();
        let sent = self.early_load.as_ref().and_then(|early_load| state.decode(early_load.devices()));
        let (Some(early_load), Some(sent)) = (self.early_load.take_if(|_| sent.is_some()), sent) else {
            return wait_for_go().map(|go| self.resume(&go));
        };
        let move_claim = Arc::new(MoveClaim { spare: early_load.spare(), ..MoveClaim::default() });
        let request = Request { move_claim: Some(Arc::clone(&move_claim)), ..self.request.clone() };
        let (message, loaded) = thread::scope(|scope| {
            let (committed, commit_signal) = mpsc::sync_channel(1);
            let request = &request;
            let load = scope.spawn(move || early_load.load(sent, commit_signal, request, began));
            let message = wait_for_go();
            if let Some(go) = &message {
                move_claim.after.store(go.epoch, Ordering::SeqCst);
                // A failure of the load is handled below.
                let _ = committed.send(());
            }
            drop(committed);
            (message, load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let message = message?;
        match loaded {
            Err(e) if !move_claim.may_run.load(Ordering::SeqCst) => {
                let why = chain(&e);
                tracing::warn!("the load of {} before its commit failed; loading from the store: {why}", self.name);
                Some(self.restore(&message, move_claim, Some(why)))
            }
            loaded => Some(self.answer(&message, &move_claim, loaded, true, began)),
        }
    }

    /// Resumes the guest from the store.
    fn resume(&mut self, go: &Go) -> Answer {
        let move_claim = MoveClaim { after: AtomicU64::new(go.epoch), ..MoveClaim::default() };
        self.restore(go, Arc::new(move_claim), None)
    }

    /// Resumes the guest from the store. `unused`: why the load before the commit was not used.
    fn restore(&mut self, go: &Go, move_claim: Arc<MoveClaim>, unused: Option<String>) -> Answer {
        let began = Instant::now();
        // The VM stays locked meanwhile.
        if let Some(early_load) = self.early_load.take() {
            self.early = Some(early_load.into_early());
        }
        let request = Request { move_claim: Some(Arc::clone(&move_claim)), ..self.request.clone() };
        let restored = restore_in(self.host, &self.name, &request, self.early.take());
        let restored = restored.map(|restored| Restored { unused: unused.or(restored.unused), ..restored });
        self.answer(go, &move_claim, restored, false, began)
    }

    fn answer(
        &mut self,
        go: &Go,
        move_claim: &MoveClaim,
        restored: Result<Restored, RestoreError>,
        ahead: bool,
        began: Instant,
    ) -> Answer {
        match restored {
            Ok(restored) => {
                self.prepared = false;
                let all = began.elapsed().as_micros() as u64;
                Answer::Running(Running {
                    us: restored.us,
                    since_us: all.saturating_sub(restored.us),
                    pid: restored.pid,
                    prepared: restored.prepared,
                    ahead,
                    unused: restored.unused,
                    clock: restored.clock,
                })
            }
            Err(e) => {
                let after = move_claim.after.load(Ordering::SeqCst);
                let claimed = Some(after).filter(|after| *after != go.epoch);
                Answer::Failed { why: chain(&e), resumed: move_claim.may_run.load(Ordering::SeqCst), claimed }
            }
        }
    }

    /// Reports the VM to `on_running` if its guest was resumed.
    fn notify_running(&self, answer: &Answer, on_running: &dyn Fn(&str)) {
        if matches!(answer, Answer::Running(_)) {
            on_running(self.name.as_str());
        }
    }
}

impl Drop for IncomingVm<'_> {
    fn drop(&mut self) {
        (self.early, self.early_load) = (None, None);
        let rundir = RunDir::new(&self.host.root, self.name.as_str());
        let waits = || State::read(&rundir).ok().flatten().is_some_and(|state| state.prepared.is_some());
        if self.prepared
            && waits()
            && let Err(e) = stop::stop_immediately(self.host, self.name.as_str())
        {
            tracing::warn!("cannot remove what was prepared for {}: {}", self.name, chain(&e));
        }
    }
}

/// Returns the status of a VM on this host.
fn vm_status(host: &Host, name: &Name) -> Answer {
    let rundir = RunDir::new(&host.root, name.as_str());
    let deadline = Instant::now() + BUSY;
    loop {
        if !rundir.exists() {
            return Answer::Found { runs: false, status: "absent".into() };
        }
        match status::status(&rundir) {
            Ok(Status::Busy(_)) if Instant::now() < deadline => thread::sleep(Duration::from_millis(50)),
            Ok(status) => {
                let runs = matches!(status, Status::Running | Status::Degraded(_) | Status::Protected);
                return Answer::Found { runs, status: status.to_string() };
            }
            Err(e) => return Answer::Refused { why: chain(&e) },
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const LONG: Duration = Duration::from_secs(100);
    const SHORT: Duration = Duration::from_millis(50);

    /// Returns a connection on which each step may take `LONG`, and the connection's other end.
    fn source() -> (SourceConnection<UnixStream, UnixStream>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let patience = Patience { hello: LONG, checkpoints: LONG, go: LONG, line: LONG, answer: LONG };
        let to = ours.try_clone().unwrap();
        (SourceConnection { lines: Lines::new(ours, MAX_LINE), to, patience }, theirs)
    }

    #[test]
    fn a_line_that_arrives_byte_by_byte_ends_the_move() {
        let (mut source, theirs) = source();
        source.patience.line = SHORT;
        // The thread ends by itself, which would not be an error.
        let drip = thread::spawn(move || {
            let deadline = Instant::now() + Duration::from_secs(10);
            while Instant::now() < deadline && (&theirs).write_all(b" ").is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(source.read_message(source.patience.hello).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(source);
        drip.join().unwrap();
    }

    #[test]
    fn a_host_that_sends_nothing_gets_the_reason() {
        let (mut source, theirs) = source();
        source.patience.hello = SHORT;
        assert_eq!(source.read_message(source.patience.hello).unwrap_err().kind(), io::ErrorKind::TimedOut);
        let answer = Lines::new(theirs, MAX_LINE).next_by(Instant::now() + LONG).unwrap();
        assert!(matches!(serde_json::from_slice(&answer).unwrap(), Answer::Refused { why } if why.contains("in time")));
    }

    #[test]
    fn a_line_without_an_end_is_rejected() {
        let (mut source, theirs) = source();
        let flood = thread::spawn({
            let theirs = theirs.try_clone().unwrap();
            move || while (&theirs).write_all(&[b' '; 1 << 16]).is_ok() {}
        });
        let why = source.read_message(LONG).unwrap().unwrap().unwrap_err();
        assert!(why.contains("more than 4 MiB"), "{why}");
        drop((source, theirs));
        flood.join().unwrap();
    }

    #[test]
    fn an_answer_that_is_not_read_is_a_failure() {
        let (mut source, theirs) = source();
        source.patience.answer = SHORT;
        assert!(!source.send(&Answer::Refused { why: "x".repeat(MAX_LINE) }));
        drop(theirs);
        assert!(!source.send(&Answer::Refused { why: "x".into() }));
    }
}
