//! The host that gets a guest: `rekindle receive`, which the other one starts over ssh and speaks to on its standard input.

use super::protocol::{self, Answer, Go, Hello, LONGEST, Running, Say, VERSION};
use super::record::identity_of;
use crate::protector::chain;
use crate::restore::ahead::Looked;
use crate::restore::checkpoint::Chosen;
use crate::restore::prepare::{Early, Waits, prepare};
use crate::restore::{Request, RestoreError, Restored, TakeOver, restore_in};
use rekindle_store::admin;
use rekindle_vm::definition::{Definition, Name};
use rekindle_vm::disks;
use rekindle_vm::host::Host;
use rekindle_vm::life::{self, Status};
use rekindle_vm::place::Site;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use std::io::{self, BufRead, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// How long an operation on a VM is waited for that somebody asks about.
const BUSY: Duration = Duration::from_secs(60);

/// Why a VM cannot be had here, in words for the other host.
type Refusal = String;

/// Speak to the host that has the guest, until it has said all.
///
/// *Needs:* what `rekindle restore` needs.
/// *On success:* as the other host was told. What was prepared for it is gone again if it did not come.
/// *On failure:* the same.
///
/// `running` is called with the name of a VM that runs here from now on.
///
/// # Errors
/// When nothing can be read from `from`.
pub fn receive(host: &Host, from: impl BufRead, mut to: impl Write, running: &dyn Fn(&str)) -> io::Result<()> {
    let mut from = from;
    let mut hear =
        || -> io::Result<Option<Result<Say, Refusal>>> {
            let mut line = Vec::new();
            if (&mut from).take(LONGEST).read_until(b'\n', &mut line)? == 0 {
                return Ok(None);
            }
            Ok(Some(serde_json::from_slice(&line).map_err(|e| {
                format!("what was said is not understood here ({e}); use the same Rekindle on both hosts")
            })))
        };
    let mut say = |answer: &Answer| {
        let line = serde_json::to_string(answer).unwrap_or_default();
        // Who has gone learns it in another way.
        let _ = writeln!(to, "{line}").and_then(|()| to.flush());
    };
    let hello = match hear()? {
        None => return Ok(()),
        Some(Ok(Say::Hello(hello))) if hello.version == VERSION => hello,
        Some(Ok(Say::Ask { version: VERSION, name })) => {
            say(&look(host, &name));
            return Ok(());
        }
        Some(Ok(Say::Hello(_) | Say::Ask { .. })) => {
            let why = format!("it speaks version {VERSION} of moving; use the same Rekindle on both hosts");
            say(&Answer::Refused { why });
            return Ok(());
        }
        Some(Ok(_)) => {
            say(&Answer::Refused { why: "it was told to do something before it was told of a VM".into() });
            return Ok(());
        }
        Some(Err(why)) => {
            say(&Answer::Refused { why });
            return Ok(());
        }
    };
    let mut coming = match Coming::new(host, *hello) {
        Ok(coming) => coming,
        Err(why) => {
            say(&Answer::Refused { why });
            return Ok(());
        }
    };
    let this = rustix::system::uname().nodename().to_string_lossy().into_owned();
    say(&Answer::Ready { version: VERSION, host: this });
    loop {
        match hear()? {
            // It has thought better of it, or is gone.
            None => return Ok(()),
            Some(Ok(Say::Prepare {})) => match coming.prepare() {
                Ok(Waits { checkpoint, pid, .. }) => say(&Answer::Prepared { checkpoint, pid }),
                Err(why) => {
                    say(&Answer::Refused { why });
                    return Ok(());
                }
            },
            Some(Ok(Say::Look {})) => say(&coming.look()),
            Some(Ok(Say::State(state))) => {
                // The word comes while it loads.
                let mut word = || match hear() {
                    Ok(Some(Ok(Say::Go(go)))) => Some(go),
                    _ => None,
                };
                let Some(answer) = coming.load(state, &mut word) else { return Ok(()) };
                say(&answer);
                coming.tell(&answer, running);
                return Ok(());
            }
            Some(Ok(Say::Go(go))) => {
                let answer = coming.go(&go);
                say(&answer);
                coming.tell(&answer, running);
                return Ok(());
            }
            Some(Ok(_)) => {
                say(&Answer::Refused { why: "it was told of two VMs".into() });
                return Ok(());
            }
            Some(Err(why)) => {
                say(&Answer::Refused { why });
                return Ok(());
            }
        }
    }
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
