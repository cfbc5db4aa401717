//! The host that gets a guest: `rekindle receive`, which the other one starts over ssh and speaks to on its standard input.

use super::protocol::{self, Answer, Go, Hello, LONGEST, Running, Say, VERSION};
use super::record::identity_of;
use crate::protector::chain;
use crate::restore::ahead::Looked;
use crate::restore::checkpoint::Chosen;
use crate::restore::prepare::{Early, Waits, prepare};
use crate::restore::{Request, RestoreError, Restored, TakeOver, restore_in};
use rekindle_kernel::lines::{LineError, Lines, write_by};
use rekindle_store::admin;
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::disks;
use rekindle_vm::host::Host;
use rekindle_vm::life::{self, Status};
use rekindle_vm::place::Site;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// How long an operation on a VM is waited for that somebody asks about.
const BUSY: Duration = Duration::from_secs(60);

/// Why a VM cannot be had here, in words for the other host.
type Refusal = String;

/// How long the other host may take for each step. After that, what was prepared here is removed. The guest still runs on the other host,
/// or that host claims it in the store.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// From the start to the first line, which the other host sends as soon as it is connected.
    hello: Duration,
    /// Between two lines while the guest runs there: it takes checkpoints of it, the first of them of all its memory. A guest of 1 TiB takes
    /// a day at 12 MB/s.
    checkpoints: Duration,
    /// From the state of the stopped guest to [`Say::Go`]: a commit of what the last pass has left. No guest should be stopped for longer.
    go: Duration,
    /// From a line's first byte to its last one: 4 MiB at 70 kB/s.
    line: Duration,
    /// Until an answer was read: it is waited for, and has at most 4 MiB, too.
    answer: Duration,
}

const PATIENCE: Patience = Patience {
    hello: Duration::from_secs(60),
    checkpoints: Duration::from_secs(24 * 3600),
    go: Duration::from_secs(3600),
    line: Duration::from_secs(60),
    answer: Duration::from_secs(60),
};

/// The line to the host that has the guest.
struct Source<R, W> {
    lines: Lines<R>,
    to: W,
    patience: Patience,
}

impl<R: Read + AsFd, W: Write + AsFd> Source<R, W> {
    /// Reads its next line, whose first byte has to come within `begin`. `None` at the end of the stream.
    fn hear(&mut self, begin: Duration) -> io::Result<Option<Result<Say, Refusal>>> {
        match self.lines.next_started_by(Instant::now() + begin, self.patience.line) {
            Ok(line) => Ok(Some(serde_json::from_slice(&line).map_err(|e| {
                format!("what was said is not understood here ({e}); use the same Rekindle on both hosts")
            }))),
            Err(LineError::Closed) => Ok(None),
            Err(LineError::Late) => {
                let why = "the host that has the guest has not sent its next line in time; see whether it runs and is reachable";
                self.say(&Answer::Refused { why: why.into() });
                Err(io::Error::new(io::ErrorKind::TimedOut, why))
            }
            Err(LineError::TooLong { limit }) => {
                Ok(Some(Err(format!("a line of more than {} MiB; use the same Rekindle on both hosts", limit >> 20))))
            }
            Err(LineError::Io(e)) => Err(e),
        }
    }

    /// Answers. `false` if the other host does not read it in time; it then finds the result in the store.
    fn say(&mut self, answer: &Answer) -> bool {
        let mut line = serde_json::to_vec(answer).unwrap_or_default();
        line.push(b'\n');
        write_by(&mut self.to, &line, Instant::now() + self.patience.answer).is_ok()
    }

    fn refuse(&mut self, why: impl Into<Refusal>) -> io::Result<()> {
        self.say(&Answer::Refused { why: why.into() });
        Ok(())
    }
}

/// Speak to the host that has the guest, until it has said all. `from` and `to` are pipes or sockets, without a buffer.
///
/// *Needs:* what `rekindle restore` needs.
/// *On success:* as the other host was told. What was prepared for it is gone again if it did not come.
/// *On failure:* the same.
///
/// `running` is called with the name of a VM that runs here from now on.
///
/// # Errors
/// When nothing can be read from `from`, or the other host takes longer than it may.
pub fn receive(host: &Host, from: impl Read + AsFd, to: impl Write + AsFd, running: &dyn Fn(&str)) -> io::Result<()> {
    let patience = PATIENCE;
    let mut source = Source { lines: Lines::new(from, LONGEST), to, patience };
    let hello = match source.hear(patience.hello)? {
        None => return Ok(()),
        Some(Ok(Say::Hello(hello))) if hello.version == VERSION => hello,
        Some(Ok(Say::Ask { version: VERSION, name })) => {
            source.say(&look(host, &name));
            return Ok(());
        }
        Some(Ok(Say::Hello(_) | Say::Ask { .. })) => {
            return source
                .refuse(format!("it speaks version {VERSION} of moving; use the same Rekindle on both hosts"));
        }
        Some(Ok(_)) => return source.refuse("it was told to do something before it was told of a VM"),
        Some(Err(why)) => return source.refuse(why),
    };
    let mut coming = match Coming::new(host, *hello) {
        Ok(coming) => coming,
        Err(why) => return source.refuse(why),
    };
    let this = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut heard = source.say(&Answer::Ready { version: VERSION, host: this });
    // A host that does not read an answer has given up the move.
    while heard {
        heard = match source.hear(patience.checkpoints)? {
            // It has thought better of it, or is gone.
            None => return Ok(()),
            Some(Ok(Say::Prepare {})) => match coming.prepare() {
                Ok(Waits { checkpoint, pid, .. }) => source.say(&Answer::Prepared { checkpoint, pid }),
                Err(why) => return source.refuse(why),
            },
            Some(Ok(Say::Look {})) => source.say(&coming.look()),
            Some(Ok(Say::State(state))) => {
                // The word comes while it loads.
                let mut late = None;
                let mut word = || match source.hear(patience.go) {
                    Ok(Some(Ok(Say::Go(go)))) => Some(go),
                    Ok(_) => None,
                    Err(e) => {
                        late = Some(e);
                        None
                    }
                };
                let answer = coming.load(state, &mut word);
                let Some(answer) = answer else { return late.map_or(Ok(()), Err) };
                source.say(&answer);
                coming.tell(&answer, running);
                return Ok(());
            }
            Some(Ok(Say::Go(go))) => {
                let answer = coming.go(&go);
                source.say(&answer);
                coming.tell(&answer, running);
                return Ok(());
            }
            Some(Ok(_)) => return source.refuse("it was told of two VMs"),
            Some(Err(why)) => return source.refuse(why),
        };
    }
    Ok(())
}

/// A VM that is to come.
struct Coming<'a> {
    host: &'a Host,
    name: Name,
    request: Request,
    /// A QEMU was made to wait for it.
    prepared: bool,
    /// That QEMU.
    early: Option<Early>,
    /// The same, with what it needs of the newest checkpoint.
    looked: Option<Looked<'a>>,
}

impl<'a> Coming<'a> {
    /// See whether it can be had here. Nothing is made.
    fn new(host: &'a Host, hello: Hello) -> Result<Self, Refusal> {
        let Hello { name, recipe, store, created_us, identity, definition, qemu, hold_output, .. } = hello;
        let definition = definition.as_deref().map(Definition::load).transpose().map_err(|e| chain(&e))?;
        let identity = identity.map(identity_of);
        if let Some(created_us) = created_us {
            let found = admin::listing(&store, identity.as_ref()).map_err(|e| chain(&e))?;
            if found.created_us != created_us {
                return Err(format!(
                    "{store} is another store there; both hosts have to reach the same one by that name"
                ));
            }
        }
        let site = Site::take(host, name.as_str(), "move").map_err(|e| chain(&e))?;
        let given = definition.is_some();
        let wanted = definition.clone().unwrap_or_else(|| recipe.definition.clone());
        let wanted = Definition { name: name.clone(), ..wanted };
        let planned = site.plan(wanted, qemu.as_deref(), |hardware| recipe.fit(hardware, given));
        let room = planned.and_then(|plan| plan.check_room());
        site.leave();
        room.map_err(|e| chain(&e))?;
        let request =
            Request { store, identity, at: None, eager: false, definition, qemu, hold_output, take_over: None };
        Ok(Self { host, name, request, prepared: false, early: None, looked: None })
    }

    /// Have a QEMU wait. What it needs and what cannot be had is found out by that.
    fn prepare(&mut self) -> Result<Waits, Refusal> {
        // From here on there may be something to be taken back.
        self.prepared = true;
        let waits = prepare(self.host, &self.name, &self.request).map_err(|e| chain(&e))?;
        let chosen = Chosen::open(&self.request).map_err(|e| chain(&e))?;
        let state = State::read(&RunDir::new(&self.host.root, self.name.as_str())).map_err(|e| chain(&e))?;
        let others = state.map(|state| disks::others(&state.hardware, &chosen.epochs)).unwrap_or_default();
        if !others.is_empty() {
            return Err(others.join("; "));
        }
        // What can be done before the guest is stopped. Without, the restore does it, or starts another QEMU.
        self.early = Early::take(self.host, &self.name).inspect_err(|e| tracing::debug!("{}", chain(e))).ok();
        Ok(waits)
    }

    /// Have what a load needs of the newest checkpoint.
    fn look(&mut self) -> Answer {
        match Looked::new(self.host, &self.name, &self.request, &mut self.early) {
            Ok(looked) => {
                let (checkpoint, pages) = (Some(looked.number()), looked.pages());
                self.looked = Some(looked);
                Answer::Looked { checkpoint, pages }
            }
            Err(e) => {
                tracing::debug!("{} is loaded when its last checkpoint is there: {}", self.name, chain(&e));
                Answer::Looked { checkpoint: None, pages: Vec::new() }
            }
        }
    }

    /// Load it beside the commit of its last checkpoint, and let it go on at the `word`; none if that does not come.
    fn load(&mut self, state: protocol::State, word: &mut dyn FnMut() -> Option<Go>) -> Option<Answer> {
        let began = Instant::now();
        let told = self.looked.as_ref().and_then(|looked| state.into_told(looked.devices()));
        let (Some(looked), Some(told)) = (self.looked.take_if(|_| told.is_some()), told) else {
            return word().map(|go| self.go(&go));
        };
        let take_over = Arc::new(TakeOver { spare: looked.spare(), ..TakeOver::default() });
        let request = Request { take_over: Some(Arc::clone(&take_over)), ..self.request.clone() };
        let (go, loaded) = thread::scope(|scope| {
            let (committed, counts) = mpsc::sync_channel(1);
            let request = &request;
            let load = scope.spawn(move || looked.load(told, counts, request, began));
            let go = word();
            if let Some(go) = &go {
                take_over.after.store(go.epoch, Ordering::SeqCst);
                // If it has failed, that is seen below.
                let _ = committed.send(());
            }
            drop(committed);
            (go, load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let go = go?;
        match loaded {
            Err(e) if !take_over.begun.load(Ordering::SeqCst) => {
                let why = chain(&e);
                tracing::warn!("what of {} was loaded before it counted is of no use: {why}", self.name);
                Some(self.restore(&go, take_over, Some(why)))
            }
            loaded => Some(self.answer(&go, &take_over, loaded, true, began)),
        }
    }

    /// Let its guest go on.
    fn go(&mut self, go: &Go) -> Answer {
        let take_over = TakeOver { after: AtomicU64::new(go.epoch), ..TakeOver::default() };
        self.restore(go, Arc::new(take_over), None)
    }

    /// Let its guest go on from what is in the store. `unused`: why not from what was there before.
    fn restore(&mut self, go: &Go, take_over: Arc<TakeOver>, unused: Option<String>) -> Answer {
        let began = Instant::now();
        // Nobody else has the VM until then.
        if let Some(looked) = self.looked.take() {
            self.early = Some(looked.into_early());
        }
        let request = Request { take_over: Some(Arc::clone(&take_over)), ..self.request.clone() };
        let restored = restore_in(self.host, &self.name, &request, self.early.take());
        let restored = restored.map(|restored| Restored { unused: unused.or(restored.unused), ..restored });
        self.answer(go, &take_over, restored, false, began)
    }

    fn answer(
        &mut self,
        go: &Go,
        take_over: &TakeOver,
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
                let after = take_over.after.load(Ordering::SeqCst);
                let claimed = Some(after).filter(|after| *after != go.epoch);
                Answer::Failed { why: chain(&e), begun: take_over.begun.load(Ordering::SeqCst), claimed }
            }
        }
    }

    /// Tell of it, if it runs.
    fn tell(&self, answer: &Answer, running: &dyn Fn(&str)) {
        if matches!(answer, Answer::Running(_)) {
            running(self.name.as_str());
        }
    }
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        (self.early, self.looked) = (None, None);
        let rundir = RunDir::new(&self.host.root, self.name.as_str());
        let waits = || State::read(&rundir).ok().flatten().is_some_and(|state| state.prepared.is_some());
        if self.prepared
            && waits()
            && let Err(e) = life::stop(self.host, self.name.as_str(), Some(Duration::ZERO))
        {
            tracing::warn!("what was prepared for {} is left: {}", self.name, chain(&e));
        }
    }
}

/// What is to be seen of a VM here.
fn look(host: &Host, name: &Name) -> Answer {
    let rundir = RunDir::new(&host.root, name.as_str());
    let deadline = Instant::now() + BUSY;
    loop {
        if !rundir.exists() {
            return Answer::Found { runs: false, status: "absent".into() };
        }
        match life::status(&rundir) {
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

    /// A line on which each thing may take `LONG`, and its other end.
    fn source() -> (Source<UnixStream, UnixStream>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let patience = Patience { hello: LONG, checkpoints: LONG, go: LONG, line: LONG, answer: LONG };
        let to = ours.try_clone().unwrap();
        (Source { lines: Lines::new(ours, LONGEST), to, patience }, theirs)
    }

    #[test]
    fn a_line_that_comes_byte_by_byte_ends_the_move() {
        let (mut source, theirs) = source();
        source.patience.line = SHORT;
        // It ends by itself; that would be no error.
        let drip = thread::spawn(move || {
            let deadline = Instant::now() + Duration::from_secs(10);
            while Instant::now() < deadline && (&theirs).write_all(b" ").is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(source.hear(source.patience.hello).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(source);
        drip.join().unwrap();
    }

    #[test]
    fn a_host_that_sends_nothing_gets_the_reason() {
        let (mut source, theirs) = source();
        source.patience.hello = SHORT;
        assert_eq!(source.hear(source.patience.hello).unwrap_err().kind(), io::ErrorKind::TimedOut);
        let said = Lines::new(theirs, LONGEST).next_by(Instant::now() + LONG).unwrap();
        assert!(matches!(serde_json::from_slice(&said).unwrap(), Answer::Refused { why } if why.contains("in time")));
    }

    #[test]
    fn a_line_without_an_end_is_refused() {
        let (mut source, theirs) = source();
        let flood = thread::spawn({
            let theirs = theirs.try_clone().unwrap();
            move || while (&theirs).write_all(&[b' '; 1 << 16]).is_ok() {}
        });
        let why = source.hear(LONG).unwrap().unwrap().unwrap_err();
        assert!(why.contains("more than 4 MiB"), "{why}");
        drop((source, theirs));
        flood.join().unwrap();
    }

    #[test]
    fn an_answer_that_is_not_read_is_not_waited_for() {
        let (mut source, theirs) = source();
        source.patience.answer = SHORT;
        assert!(!source.say(&Answer::Refused { why: "x".repeat(LONGEST) }));
        drop(theirs);
        assert!(!source.say(&Answer::Refused { why: "x".into() }));
    }
}
