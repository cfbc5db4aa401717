//! The loop that takes checkpoints.

mod error;

pub use error::ProtectError;

use crate::event::{Compared, Done, Event};
use crate::filling::{Held, Worth, judge};
use crate::owned::Owned;
use crate::pause::PauseError;
use crate::policy::Policy;
use crate::progress::{Commit, Progress, uptime};
use crate::session::{Begin, Plan, Session, SessionError, Tell};
use crate::target::{Target, TargetError};
use rekindle_memory::directory::is_direct;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::remote::Identity;
use rekindle_store::types::{Guest, OnlyIf, Owner};
use rekindle_store::{Image, Options, ReadOptions, StoreError, StoreUrl, Writer, admin};
use rekindle_vm::attach::Protection;
use rekindle_vm::disks;
use rekindle_vm::host::Host;
use rekindle_vm::life::{LifeError, OFF, run_state};
use rekindle_vm::lock::RunState;
use rekindle_vm::rundir::RunDir;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait before something is tried again.
const AGAIN: Duration = Duration::from_millis(200);
/// How long a reboot of the VM may take to put another QEMU in the place of the one that has gone.
const REBOOT: Duration = Duration::from_secs(120);
/// How long QEMU may take to answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How often in a row tracking may fail before we give up.
const TRIES: u32 = 3;

/// What becomes of disks that the guest writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disks {
    /// Refuse a guest that has any.
    Refuse,
    /// The owner knows that a restored guest finds newer disks than its memory knows.
    CrashConsistent,
    /// A command of the owner's snapshots them while the guest is stopped.
    Hook(String),
}

/// What is wanted.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where checkpoints go.
    pub store: StoreUrl,
    /// Who we are to a store on a server.
    pub identity: Option<Identity>,
    /// From one checkpoint's pause to the next.
    pub every: Duration,
    /// What is copied when; none: what suits the guest.
    pub policy: Option<Policy>,
    /// How many checkpoints are kept.
    pub keep: u32,
    /// How old the newest checkpoint may become before that is told.
    pub max_lag: Option<Duration>,
    /// Disks that the guest writes.
    pub disks: Disks,
    /// End after so many checkpoints.
    pub count: Option<u64>,
    /// Hold what the guest sends until the checkpoint that covers it counts.
    pub output_commit: bool,
    /// After those, compare all of the guest's memory with the newest, while it is stopped.
    pub compare: bool,
    /// After those, one more, from which the guest does not go on: whoever asked for that ends it.
    pub stay: bool,
    /// Create the store if there is none.
    pub create_store: bool,
    /// Start a new store where the one that this host has written is gone.
    pub abandon_old: bool,
}

/// What a loop did until its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Checkpoints that count.
    pub checkpoints: u64,
    /// Number of the newest one.
    pub newest: Option<u64>,
    /// Why it ended.
    pub ended: StopReason,
    /// What the guest sends is held, and nobody lets it out any more.
    #[serde(default)]
    pub output_held: bool,
}

/// Why a protector stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StopReason {
    /// Stopped by signal. Tracking stays in QEMU, so that the next protector can continue.
    #[serde(rename = "told")]
    Requested,
    /// It has taken as many as were asked for.
    Counted,
    /// The same, and the guest stays stopped at the last one.
    Stays,
    /// The guest's QEMU has ended.
    QemuEnded,
}

/// Protect VM `name` until `stop`, or until its QEMU ends.
///
/// *Needs:* the VM runs; root, or the same user with `kernel.yama.ptrace_scope=0`.
/// *On success:* the store holds its newest checkpoint.
/// *On failure:* the guest runs on, but where another host has it now ([`ProtectError::Over`]); the store holds what was committed before.
///
/// # Errors
/// [`ProtectError`].
pub fn protect(
    host: &Host,
    name: &str,
    settings: &Settings,
    stop: &AtomicBool,
    tell: &mut dyn FnMut(&Event),
) -> Result<Summary, ProtectError> {
    let target = Target::of(host, name)?;
    refuse_direct(&target)?;
    if settings.output_commit && target.state().attached.is_some() {
        return Err(ProtectError::Output { name: name.into() });
    }
    // Before the store is claimed: whoever has the VM is to go on.
    let only = Protection::take(target.rundir()).map_err(|e| ProtectError::session(name, e))?;
    Loop::open(host, &target, settings, stop, &format!("protect {name}"), only)?.run(target, tell)
}

/// That its memory can be tracked without harm.
pub(crate) fn refuse_direct(target: &Target) -> Result<(), ProtectError> {
    let (name, hardware) = (target.name(), &target.state().hardware);
    for (path, _) in hardware.ram_files().into_iter().filter(|_| hardware.foreign.is_none()) {
        match is_direct(&path) {
            Ok(false) => {}
            Ok(true) => return Err(ProtectError::DirectMemory { name: name.into(), path }),
            // A guest whose memory cannot be looked at is not tracked either.
            Err(source) => return Err(TargetError::RunDir { path, source }.into()),
        }
    }
    Ok(())
}

/// Become the owner of the store: of a guest that it knows to run here, if it still is to; of another one as of one that was booted.
fn own(target: &Target, settings: &Settings, options: &Options) -> Result<(Owned, Writer), ProtectError> {
    let mut found = Owned::read(target.rundir())?.filter(|owned| owned.is_of(&settings.store));
    if let Some(owned) = &found {
        owned.may_run(target.rundir())?;
        if settings.abandon_old && is_gone(target, owned, settings)? {
            Owned::abandon(target.rundir())?;
            found = None;
        }
    }
    let Some(owned) = found else {
        let create = settings.create_store;
        let writer = Writer::open(&settings.store, &Options { guest: Guest::Booted, create, ..options.clone() })?;
        let owned = Owned::new(&settings.store, settings.identity.as_ref(), writer.epoch());
        owned.write(target.rundir())?;
        return Ok((owned, writer));
    };
    let only_if = Some(OnlyIf::Run { run: owned.run() });
    match Writer::open(&settings.store, &Options { only_if, ..options.clone() }) {
        Ok(writer) => Ok((owned, writer)),
        Err(e) if e.is_no_store() => Err(owned.gone(target.rundir(), &e).into()),
        Err(e) => Err(match e.guest_is_over(owned.run()) {
            Some(owner) => owned.give_up(target.rundir(), owner).map_or_else(ProtectError::from, ProtectError::from),
            None => e.into(),
        }),
    }
}

/// Whether the store that this host has written is gone, and can be started anew. With another VM's there, it is not for this one.
fn is_gone(target: &Target, owned: &Owned, settings: &Settings) -> Result<bool, ProtectError> {
    match admin::listing(&settings.store, settings.identity.as_ref()) {
        Ok(found) if found.vm.uuid == target.identity().uuid => {
            let (name, store) = (target.name().into(), settings.store.to_string());
            Err(ProtectError::StillThere { name, store, checkpoints: found.checkpoints.len() })
        }
        Ok(_) => Ok(false),
        Err(e @ StoreError::NotAStore { .. }) if !settings.create_store => Err(owned.gone(target.rundir(), &e).into()),
        Err(e) if e.is_no_store() => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// Takes one checkpoint after another.
pub(crate) struct Loop<'a> {
    host: &'a Host,
    settings: &'a Settings,
    stop: &'a AtomicBool,
    options: Options,
    /// As the owner of what the store is written.
    owned: Owned,
    /// None after it has failed for good: it is opened again.
    writer: Option<Writer>,
    /// The checkpoint that the next one goes on from, if it is known who committed it.
    base: Option<Commit>,
    taken: u64,
    newest: Option<u64>,
    newest_at: Instant,
    /// When a checkpoint of this guest was committed last, by this loop or one before, since this host was booted.
    committed_at_ms: Option<u64>,
    away: bool,
    /// What the guest sends is held.
    held: bool,
    /// Nobody else takes checkpoints of it, lets go of it, or moves it.
    _only: Protection,
}

/// What is to be done next.
enum Next {
    /// The next checkpoint, when its time has come.
    Wait(Duration),
    /// A new session with this target.
    Attach(Box<Target>),
    End(StopReason),
}

impl<'a> Loop<'a> {
    /// Become the owner of the store.
    pub(crate) fn open(
        host: &'a Host,
        target: &Target,
        settings: &'a Settings,
        stop: &'a AtomicBool,
        operation: &str,
        only: Protection,
    ) -> Result<Self, ProtectError> {
        let mut options = Options::new(target.identity(), operation);
        options.keep = settings.keep;
        options.identity.clone_from(&settings.identity);
        let (owned, writer) = own(target, settings, &options)?;
        options.only_if = Some(OnlyIf::Run { run: owned.run() });
        let now = Instant::now();
        let (writer, base) = (Some(writer), None);
        let before = Progress::read(target.rundir());
        let before = before.filter(|it| it.is_of(target.vmm()) && it.store == settings.store);
        Ok(Self {
            host,
            settings,
            stop,
            options,
            owned,
            writer,
            base,
            taken: 0,
            newest: None,
            newest_at: now,
            committed_at_ms: before.and_then(|it| it.committed_at_ms),
            away: false,
            held: false,
            _only: only,
        })
    }

    fn run(mut self, target: Target, tell: &mut dyn FnMut(&Event)) -> Result<Summary, ProtectError> {
        let mut target = Box::new(target);
        let mut failures = 0;
        let ended = 'sessions: loop {
            let mut session = match self.attach(&target) {
                Ok(session) => session,
                Err(Failure::Fatal(e)) => return Err(e),
                Err(Failure::Session(e)) => match self.after(&target, e, &mut failures, tell)? {
                    Next::End(ended) => break ended,
                    Next::Attach(next) => {
                        target = next;
                        continue;
                    }
                    Next::Wait(time) => {
                        if self.sleep(time, || false) {
                            break StopReason::Requested;
                        }
                        continue;
                    }
                },
            };
            tell(&Event::Attached {
                pid: target.vmm().pid,
                ram_bytes: session.ram_bytes(),
                incremental: session.resumed,
                filling: session.is_filling(),
            });
            loop {
                let began = Instant::now();
                let filling = session.is_filling();
                let done = self.checkpoint(&mut session);
                if filling && !session.is_filling() {
                    tell(&Event::Filled);
                }
                let next = match done {
                    Ok(done) => {
                        failures = 0;
                        if std::mem::take(&mut self.away) {
                            tell(&Event::StoreBack);
                        }
                        self.taken += 1;
                        self.newest = Some(done.number);
                        self.newest_at = began;
                        tell(&Event::Checkpoint(Box::new(done)));
                        if self.settings.count.is_some_and(|count| self.taken >= count) {
                            Next::End(StopReason::Counted)
                        } else {
                            Next::Wait(self.settings.every.saturating_sub(began.elapsed()))
                        }
                    }
                    Err(e) => self.after(&session.target, e, &mut failures, tell)?,
                };
                self.lag(tell);
                match next {
                    Next::Wait(time) => {
                        // Its pager ends the sooner.
                        if self.sleep(time, || session.may_take_over()) {
                            break 'sessions StopReason::Requested;
                        }
                    }
                    Next::Attach(next) => {
                        let _ = session.detach();
                        target = next;
                        continue 'sessions;
                    }
                    Next::End(StopReason::Counted) if self.settings.stay => {
                        let done =
                            self.stay(&mut session).map_err(|e| ProtectError::session(session.target.name(), e))?;
                        tell(&Event::Checkpoint(Box::new(done)));
                        self.held = false;
                        break 'sessions StopReason::Stays;
                    }
                    Next::End(StopReason::Counted) => {
                        if self.settings.compare {
                            let compared = self.compare(&mut session).map_err(|source| ProtectError::Session {
                                name: session.target.name().into(),
                                source: Box::new(source),
                            })?;
                            tell(&Event::Compared(compared));
                        }
                        match session.let_output_out() {
                            Ok(()) => self.held = false,
                            Err(e) => tracing::warn!("what the guest has sent is held still: {}", chain(&e)),
                        }
                        if let Err(e) = session.detach() {
                            tracing::warn!("tracking could not be taken out of QEMU: {e}");
                        }
                        break 'sessions StopReason::Counted;
                    }
                    Next::End(ended) => break 'sessions ended,
                }
            }
        };
        let output_held = self.held && ended != StopReason::QemuEnded;
        Ok(Summary { checkpoints: self.taken, newest: self.newest, ended, output_held })
    }

    pub(crate) fn attach(&mut self, target: &Target) -> Result<Session, Failure> {
        let held = Held::take(target.rundir())?;
        let plan = Plan::of(target, self.settings.policy, &self.settings.disks)?;
        let begin = self.begin(target, &plan, held)?;
        let run_state = target.hold_run_state().map_err(|e| Failure::Session(SessionError::Target(e)))?;
        let mut session = Session::attach(target.clone(), plan, begin)?;
        drop(run_state);
        self.held = session.hold_output(self.settings.output_commit)?;
        Ok(session)
    }

    /// What is known of the guest's memory already.
    fn begin(&mut self, target: &Target, plan: &Plan, held: Option<Held>) -> Result<Begin, SessionError> {
        let progress = Progress::read(target.rundir());
        let store = &self.settings.store;
        self.base = None;
        let Some(held) = held else {
            let newest = self.writer.as_mut().map(|writer| {
                writer.hold(None);
                writer.next_number() - 1
            });
            let arrived = progress.zip(newest).is_some_and(|(progress, newest)| {
                progress.has_arrived(store, target.vmm(), newest) && progress.policy == plan.policy
            });
            return Ok(if arrived { Begin::Resume } else { Begin::Anew });
        };
        let wait = |why: &str| SessionError::Filling { why: why.into() };
        if plan.policy == Policy::Cow {
            return Err(wait("policy cow wants the memory for itself"));
        }
        let which = ReadOptions { identity: self.settings.identity.clone(), ..ReadOptions::default() };
        let newest = match Image::open(store, &which) {
            Ok(image) => Commit { number: image.info().number, epoch: image.info().epoch },
            Err(StoreError::Empty { .. }) => return Err(wait("that of another store")),
            Err(e) => return Err(e.into()),
        };
        let worth = judge(&held.fill, progress.as_ref(), store, target.vmm(), newest);
        let writer = open(&mut self.writer, store, &self.options)?;
        if worth == Worth::Nothing || writer.next_number() != newest.number + 1 {
            return Err(wait("not the newest of this store"));
        }
        // The pager reads it.
        writer.hold(Some(held.fill.number));
        self.base = Some(newest);
        Ok(Begin::Filling { held: Box::new(held), whole: worth == Worth::Whole })
    }

    pub(crate) fn checkpoint(&mut self, session: &mut Session) -> Result<Done, SessionError> {
        self.one(session, |session, writer, every| session.checkpoint(writer, every))
    }

    /// Of a checkpoint that failed: what is to be said if that is because another host has the guest by now. What runs of it here has been
    /// ended then.
    pub(crate) fn given_up(&self, rundir: &RunDir, e: &SessionError) -> Option<ProtectError> {
        let SessionError::Store(e) = e else { return None };
        let owner = e.guest_is_over(self.owned.run())?;
        Some(self.owned.give_up(rundir, owner).map_or_else(ProtectError::from, ProtectError::from))
    }

    /// The last checkpoint of a guest that stays stopped: see [`Session::last`]. Gives the owner epoch that has committed it, too.
    pub(crate) fn last(
        &mut self,
        session: &mut Session,
        held: &RunState,
        tell: &mut Tell<'_>,
    ) -> Result<(Done, u64), SessionError> {
        let done = self.one(session, |session, writer, _| session.last(writer, held, tell))?;
        Ok((done, self.base.map_or(0, |base| base.epoch)))
    }

    /// One more checkpoint, at which the guest stays.
    fn stay(&mut self, session: &mut Session) -> Result<Done, SessionError> {
        let run_state = session.target.hold_run_state()?;
        let (done, _) = self.last(session, &run_state, &mut |_| {})?;
        (self.taken, self.newest) = (self.taken + 1, Some(done.number));
        Ok(done)
    }

    fn one(
        &mut self,
        session: &mut Session,
        take: impl FnOnce(&mut Session, &mut Writer, Duration) -> Result<Done, SessionError>,
    ) -> Result<Done, SessionError> {
        let progress = self.progress(session);
        let writer = open(&mut self.writer, &self.settings.store, &self.options)?;
        writer.hold(session.restored());
        let number = writer.next_number();
        let (collected, committed, epoch) = (number, number - 1, writer.epoch());
        let mut progress = Progress { collected, committed, epoch, ..progress };
        let rundir = session.target.rundir().clone();
        progress.write(&rundir);
        let done = take(session, writer, self.settings.every)?;
        progress.epoch = writer.epoch();
        (progress.collected, progress.committed) = (done.number, done.number);
        progress.committed_at_ms = u64::try_from(uptime().as_millis()).ok();
        self.committed_at_ms = progress.committed_at_ms;
        self.base = Some(Commit { number: done.number, epoch: progress.epoch });
        progress.base = self.base;
        progress.write(&rundir);
        Ok(done)
    }

    /// What is said of `session` beside numbers.
    fn progress(&self, session: &Session) -> Progress {
        let Vmm { pid, started, .. } = *session.target.vmm();
        let (store, policy) = (self.settings.store.clone(), session.policy());
        Progress {
            store,
            pid,
            started,
            policy,
            collected: 0,
            committed: 0,
            committed_at_ms: self.committed_at_ms,
            epoch: 0,
            base: self.base,
        }
    }

    fn compare(&mut self, session: &mut Session) -> Result<Compared, SessionError> {
        let committed = self.newest.unwrap_or_default();
        // What it collects goes nowhere: a protector after one that was killed here must not go on incrementally.
        Progress { collected: committed + 1, committed, ..self.progress(session) }.write(session.target.rundir());
        let which = ReadOptions { at: self.newest, identity: self.settings.identity.clone(), ..ReadOptions::default() };
        session.compare(&Image::open(&self.settings.store, &which)?)
    }

    /// What comes of a failure.
    fn after(
        &mut self,
        target: &Target,
        error: SessionError,
        failures: &mut u32,
        tell: &mut dyn FnMut(&Event),
    ) -> Result<Next, ProtectError> {
        match error {
            SessionError::Store(e) if e.may_pass() => {
                if !std::mem::replace(&mut self.away, true) {
                    tell(&Event::StoreAway { error: chain(&e) });
                }
                if matches!(e, StoreError::Closed { .. }) {
                    self.writer = None;
                }
                Ok(Next::Wait(self.settings.every.max(AGAIN)))
            }
            SessionError::Store(e) => match e.guest_is_over(self.owned.run()) {
                // Its last checkpoint is of no use any more, and it is about to be gone anyway.
                Some(Owner { guest: Guest::Ended, .. }) if has_ended(target.vmm()) => {
                    Ok(Next::End(StopReason::QemuEnded))
                }
                Some(owner) => Err(self.owned.give_up(target.rundir(), owner)?.into()),
                None if e.is_no_store() => Err(self.owned.gone(target.rundir(), &e).into()),
                None => Err(e.into()),
            },
            SessionError::Pause(PauseError::NotRunning { state }) if target.vmm().is_alive() => {
                tell(&Event::Waiting { state: format!("somebody has stopped the guest ({state})") });
                Ok(Next::Wait(self.settings.every.max(AGAIN)))
            }
            SessionError::Epoch(e) if !e.is_gone() && target.vmm().is_alive() => {
                tell(&Event::Waiting { state: chain(&e) });
                Ok(Next::Wait(self.settings.every.max(AGAIN)))
            }
            e @ SessionError::Filling { .. } if target.vmm().is_alive() => {
                tell(&Event::Waiting { state: e.to_string() });
                Ok(Next::Wait(AGAIN))
            }
            SessionError::Target(TargetError::Life(e @ LifeError::NeedsRecovery { .. })) => {
                tell(&Event::Waiting { state: e.to_string() });
                Ok(Next::Wait(self.settings.every.max(AGAIN)))
            }
            error => {
                // A reboot of the VM may be at work: it is waited for.
                let held = RunState::acquire(target.rundir(), REBOOT);
                let now = Target::of(self.host, target.name());
                drop(held);
                match now {
                    Err(_) if !target.vmm().is_alive() => Ok(Next::End(StopReason::QemuEnded)),
                    Err(e) => Err(e.into()),
                    Ok(now) if now.vmm() != target.vmm() => {
                        *failures = 0;
                        tell(&Event::Moved { why: format!("QEMU process {} runs the guest now", now.vmm().pid) });
                        Ok(Next::Attach(Box::new(now)))
                    }
                    Ok(now) => {
                        *failures += 1;
                        // It may be one that has died: QEMU goes on with the next one.
                        if matches!(error, SessionError::Served(_) | SessionError::Epoch(_))
                            && let Err(e) = disks::start(target.rundir(), &target.state().hardware)
                        {
                            return Err(ProtectError::session(target.name(), e));
                        }
                        if *failures >= TRIES {
                            let (name, source) = (target.name().into(), Box::new(error));
                            return Err(ProtectError::Session { name, source });
                        }
                        tell(&Event::Moved { why: chain(&error) });
                        Ok(Next::Attach(Box::new(now)))
                    }
                }
            }
        }
    }

    fn lag(&self, tell: &mut dyn FnMut(&Event)) {
        if let Some(max) = self.settings.max_lag
            && self.newest_at.elapsed() > max
        {
            let ms = |time: Duration| time.as_millis() as u64;
            tell(&Event::Lag { lag_ms: ms(self.newest_at.elapsed()), max_ms: ms(max) });
        }
    }

    /// Not longer than until `wake`. `true`: told to stop.
    fn sleep(&self, time: Duration, wake: impl Fn() -> bool) -> bool {
        let until = Instant::now() + time;
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || wake() {
                return false;
            }
            thread::sleep(left.min(Duration::from_millis(50)));
        }
    }
}

/// The writer, opened again if it is closed.
fn open<'w>(writer: &'w mut Option<Writer>, store: &StoreUrl, options: &Options) -> Result<&'w mut Writer, StoreError> {
    match writer {
        Some(writer) => Ok(writer),
        None => Ok(writer.insert(Writer::open(store, options)?)),
    }
}

/// Why there is no session.
pub(crate) enum Failure {
    Fatal(ProtectError),
    Session(SessionError),
}

impl From<SessionError> for Failure {
    fn from(e: SessionError) -> Self {
        Self::Session(e)
    }
}

impl From<ProtectError> for Failure {
    fn from(e: ProtectError) -> Self {
        Self::Fatal(e)
    }
}

/// Whether a guest has shut itself down.
fn has_ended(vmm: &Vmm) -> bool {
    let state = || vmm.watch(ANSWER).and_then(|mut qmp| run_state(&mut qmp));
    !vmm.is_alive() || state().is_ok_and(|state| state == OFF)
}

/// An error with all its causes.
pub(crate) fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut next = e.source();
    while let Some(source) = next {
        text += &format!(": {source}");
        next = source.source();
    }
    text
}
