//! The loop that takes checkpoints.

mod error;

pub use error::ProtectError;

use crate::event::{CheckpointReport, Comparison, ProtectEvent};
use crate::filling::{FillRecord, RecordWorth, judge};
use crate::owned::OwnerRecord;
use crate::pause::PauseError;
use crate::policy::Policy;
use crate::progress::{CommitId, Progress, uptime};
use crate::session::{CheckpointError, InitialTracking, OnStopped, Plan, TrackingSession};
use crate::target::{Target, TargetError};
use rekindle_life::attach::ProtectionLock;
use rekindle_memory::directory::is_direct;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::remote::Identity;
use rekindle_store::types::{Guest, OnlyIf, Owner};
use rekindle_store::{Image, Options, ReadOptions, StoreError, StoreUrl, Writer, admin};
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::qemu::OFF;
use rekindle_vm::rundir::RunDir;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Delay before a failed step is tried again.
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// How long a reboot of the VM may take to replace a QEMU that has ended.
const REBOOT: Duration = Duration::from_secs(120);
/// How long QEMU may take to answer.
const ANSWER: Duration = Duration::from_secs(2);
/// Number of consecutive failures after which protection stops.
const TRIES: u32 = 3;

/// Handling of disks that QEMU itself writes, not a disk server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disks {
    /// Reject a guest that has such a disk.
    Refuse,
    /// The user accepts that a restored guest finds its disks newer than its memory.
    CrashConsistent,
    /// A command of the user snapshots the disks while the guest is stopped.
    Hook(String),
}

/// Parameters of a protector.
#[derive(Debug, Clone)]
pub struct ProtectSettings {
    pub store: StoreUrl,
    /// This host's identity for a store on a server.
    pub identity: Option<Identity>,
    /// Interval from the start of one checkpoint to the start of the next.
    pub every: Duration,
    /// The policy; none: the best policy for the guest.
    pub policy: Option<Policy>,
    /// Number of checkpoints that the store keeps.
    pub keep: u32,
    /// Warn when the newest checkpoint is older than this.
    pub max_lag: Option<Duration>,
    pub disks: Disks,
    /// Number of checkpoints after which to stop.
    pub count: Option<u64>,
    /// Hold network output until the checkpoint that covers it is committed.
    pub output_commit: bool,
    /// After `count` checkpoints, compare the stopped guest's memory with the newest checkpoint.
    pub compare: bool,
    /// After `count` checkpoints, take one more and leave the guest stopped. The caller ends the guest.
    pub stay: bool,
    /// Create the store if there is none.
    pub create_store: bool,
    /// Start a new store if the store that this host has written is missing.
    pub abandon_old: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Number of checkpoints that this protector has committed.
    pub checkpoints: u64,
    /// Number of the newest checkpoint.
    pub newest: Option<u64>,
    pub ended: StopReason,
    /// Network output is still held, and no protector releases it any more.
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
    /// The requested number of checkpoints was taken.
    Counted,
    /// The requested number of checkpoints was taken, and one more at which the guest stays stopped.
    Stays,
    /// The guest's QEMU has ended.
    QemuEnded,
}

/// Takes checkpoints of VM `name` until `stop` is set, the requested number is reached, or its QEMU ends.
///
/// *Needs:* the VM runs; root, or the same user with `kernel.yama.ptrace_scope=0`.
/// *On success:* the store has the guest's newest checkpoint.
/// *On failure:* the guest continues to run, unless another host has it now ([`ProtectError::OwnedElsewhere`]); the
/// store keeps the checkpoints that were committed before.
pub fn protect(
    host: &Host,
    name: &str,
    settings: &ProtectSettings,
    stop: &AtomicBool,
    on_event: &mut dyn FnMut(&ProtectEvent),
) -> Result<Summary, ProtectError> {
    let target = Target::of(host, name)?;
    reject_dax(&target)?;
    if settings.output_commit && target.state().attached.is_some() {
        return Err(ProtectError::Output { name: name.into() });
    }
    // Must precede the claim of the store: if another protector of the VM runs, it can continue.
    let only = ProtectionLock::take(target.rundir()).map_err(|e| ProtectError::session(name, e))?;
    ProtectLoop::open(host, &target, settings, stop, &format!("protect {name}"), only)?.run(target, on_event)
}

/// Rejects guests whose RAM cannot be write-protected (DAX).
pub(crate) fn reject_dax(target: &Target) -> Result<(), ProtectError> {
    let (name, hardware) = (target.name(), &target.state().hardware);
    for (path, _) in hardware.ram_files().into_iter().filter(|_| hardware.foreign.is_none()) {
        match is_direct(&path) {
            Ok(false) => {}
            Ok(true) => return Err(ProtectError::Dax { name: name.into(), path }),
            // If the file cannot be checked, the guest is not tracked either.
            Err(source) => return Err(TargetError::RunDir { path, source }.into()),
        }
    }
    Ok(())
}

/// Makes this host the owner of the store. If this host has a record that the guest started on it, the store must still
/// allow the guest to run. Otherwise the guest counts as booted on this host.
fn become_owner(
    target: &Target,
    settings: &ProtectSettings,
    options: &Options,
) -> Result<(OwnerRecord, Writer), ProtectError> {
    let mut found = OwnerRecord::read(target.rundir())?.filter(|owned| owned.is_of(&settings.store));
    if let Some(owned) = &found {
        owned.may_run(target.rundir())?;
        if settings.abandon_old && store_is_missing(target, owned, settings)? {
            OwnerRecord::abandon(target.rundir())?;
            found = None;
        }
    }
    let Some(owned) = found else {
        let create = settings.create_store;
        let writer = Writer::open(&settings.store, &Options { guest: Guest::Booted, create, ..options.clone() })?;
        let owned = OwnerRecord::new(&settings.store, settings.identity.as_ref(), writer.epoch());
        owned.write(target.rundir())?;
        return Ok((owned, writer));
    };
    let only_if = Some(OnlyIf::Run { run: owned.run() });
    match Writer::open(&settings.store, &Options { only_if, ..options.clone() }) {
        Ok(writer) => Ok((owned, writer)),
        Err(e) if e.is_no_store() => Err(owned.store_gone(target.rundir(), &e).into()),
        Err(e) => Err(match e.guest_is_over(owned.run()) {
            Some(owner) => owned.end_guest(target.rundir(), owner).map_or_else(ProtectError::from, ProtectError::from),
            None => e.into(),
        }),
    }
}

/// Returns whether the store that this host has written is missing, so that a new one can be started. If the path has
/// another VM's store, this returns false, and opening that store fails later.
fn store_is_missing(target: &Target, owned: &OwnerRecord, settings: &ProtectSettings) -> Result<bool, ProtectError> {
    match admin::listing(&settings.store, settings.identity.as_ref()) {
        Ok(found) if found.vm.uuid == target.identity().uuid => {
            let (name, store) = (target.name().into(), settings.store.to_string());
            Err(ProtectError::StillThere { name, store, checkpoints: found.checkpoints.len() })
        }
        Ok(_) => Ok(false),
        Err(e @ StoreError::NotAStore { .. }) if !settings.create_store => {
            Err(owned.store_gone(target.rundir(), &e).into())
        }
        Err(e) if e.is_no_store() => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// The loop that takes one checkpoint after another.
pub(crate) struct ProtectLoop<'a> {
    host: &'a Host,
    settings: &'a ProtectSettings,
    stop: &'a AtomicBool,
    options: Options,
    /// This host's record as the store's owner.
    owned: OwnerRecord,
    /// `None` after the store was closed: it is reopened at the next checkpoint.
    writer: Option<Writer>,
    /// The checkpoint that the next one builds on, if its owner is known.
    base: Option<CommitId>,
    taken: u64,
    newest: Option<u64>,
    newest_at: Instant,
    /// When a checkpoint of this guest was last committed, by this protector or an earlier one, in ms since this host
    /// was booted.
    committed_at_ms: Option<u64>,
    store_failed: bool,
    output_held: bool,
    /// Locks out other protectors, detach and moves.
    _only: ProtectionLock,
}

/// The next step of the loop.
enum LoopStep {
    /// Take the next checkpoint after this time.
    Wait(Duration),
    /// Start a new session with this target.
    Attach(Box<Target>),
    End(StopReason),
}

impl<'a> ProtectLoop<'a> {
    /// Makes this host the owner of the store.
    pub(crate) fn open(
        host: &'a Host,
        target: &Target,
        settings: &'a ProtectSettings,
        stop: &'a AtomicBool,
        operation: &str,
        only: ProtectionLock,
    ) -> Result<Self, ProtectError> {
        let mut options = Options::new(target.identity(), operation);
        options.keep = settings.keep;
        options.identity.clone_from(&settings.identity);
        let (owned, writer) = become_owner(target, settings, &options)?;
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
            store_failed: false,
            output_held: false,
            _only: only,
        })
    }

    fn run(mut self, target: Target, on_event: &mut dyn FnMut(&ProtectEvent)) -> Result<Summary, ProtectError> {
        let mut target = Box::new(target);
        let mut failures = 0;
        let ended = 'sessions: loop {
            let mut session = match self.attach(&target) {
                Ok(session) => session,
                Err(Failure::Fatal(e)) => return Err(e),
                Err(Failure::Tracking(e)) => match self.after_failure(&target, e, &mut failures, on_event)? {
                    LoopStep::End(ended) => break ended,
                    LoopStep::Attach(next) => {
                        target = next;
                        continue;
                    }
                    LoopStep::Wait(time) => {
                        if self.sleep(time, || false) {
                            break StopReason::Requested;
                        }
                        continue;
                    }
                },
            };
            on_event(&ProtectEvent::Attached {
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
                    on_event(&ProtectEvent::Filled);
                }
                let next = match done {
                    Ok(done) => {
                        failures = 0;
                        if std::mem::take(&mut self.store_failed) {
                            on_event(&ProtectEvent::StoreBack);
                        }
                        self.taken += 1;
                        self.newest = Some(done.number);
                        self.newest_at = began;
                        on_event(&ProtectEvent::Checkpoint(Box::new(done)));
                        if self.settings.count.is_some_and(|count| self.taken >= count) {
                            LoopStep::End(StopReason::Counted)
                        } else {
                            LoopStep::Wait(self.settings.every.saturating_sub(began.elapsed()))
                        }
                    }
                    Err(e) => self.after_failure(&session.target, e, &mut failures, on_event)?,
                };
                self.lag(on_event);
                match next {
                    LoopStep::Wait(time) => {
                        // A complete fill ends the pause early, so that the pager can end.
                        if self.sleep(time, || session.is_filled()) {
                            break 'sessions StopReason::Requested;
                        }
                    }
                    LoopStep::Attach(next) => {
                        let _ = session.detach();
                        target = next;
                        continue 'sessions;
                    }
                    LoopStep::End(StopReason::Counted) if self.settings.stay => {
                        let done = self
                            .take_last(&mut session)
                            .map_err(|e| ProtectError::session(session.target.name(), e))?;
                        on_event(&ProtectEvent::Checkpoint(Box::new(done)));
                        self.output_held = false;
                        break 'sessions StopReason::Stays;
                    }
                    LoopStep::End(StopReason::Counted) => {
                        if self.settings.compare {
                            let compared = self.compare(&mut session).map_err(|source| ProtectError::Tracking {
                                name: session.target.name().into(),
                                source: Box::new(source),
                            })?;
                            on_event(&ProtectEvent::Compared(compared));
                        }
                        match session.end_hold() {
                            Ok(()) => self.output_held = false,
                            Err(e) => tracing::warn!("the guest's network output is still held: {}", chain(&e)),
                        }
                        if let Err(e) = session.detach() {
                            tracing::warn!("cannot remove the tracking from QEMU: {e}");
                        }
                        break 'sessions StopReason::Counted;
                    }
                    LoopStep::End(ended) => break 'sessions ended,
                }
            }
        };
        let output_held = self.output_held && ended != StopReason::QemuEnded;
        Ok(Summary { checkpoints: self.taken, newest: self.newest, ended, output_held })
    }

    pub(crate) fn attach(&mut self, target: &Target) -> Result<TrackingSession, Failure> {
        let held = FillRecord::take(target.rundir())?;
        let plan = Plan::of(target, self.settings.policy, &self.settings.disks)?;
        let begin = self.begin(target, &plan, held)?;
        let run_state = target.hold_run_state().map_err(|e| Failure::Tracking(CheckpointError::Target(e)))?;
        let mut session = TrackingSession::attach(target.clone(), plan, begin)?;
        drop(run_state);
        self.output_held = session.hold_output(self.settings.output_commit)?;
        Ok(session)
    }

    /// Determines which part of the guest's memory earlier checkpoints cover.
    fn begin(
        &mut self,
        target: &Target,
        plan: &Plan,
        held: Option<FillRecord>,
    ) -> Result<InitialTracking, CheckpointError> {
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
            return Ok(if arrived { InitialTracking::Continue } else { InitialTracking::Fresh });
        };
        let wait = |why: &str| CheckpointError::Filling { why: why.into() };
        if plan.policy == Policy::Cow {
            return Err(wait("policy cow cannot share the memory with the pager"));
        }
        let which = ReadOptions { identity: self.settings.identity.clone(), ..ReadOptions::default() };
        let newest = match Image::open(store, &which) {
            Ok(image) => CommitId { number: image.info().number, epoch: image.info().epoch },
            Err(StoreError::Empty { .. }) => return Err(wait("it is a checkpoint of another store")),
            Err(e) => return Err(e.into()),
        };
        let worth = judge(&held.fill, progress.as_ref(), store, target.vmm(), newest);
        let writer = open(&mut self.writer, store, &self.options)?;
        if worth == RecordWorth::Unusable || writer.next_number() != newest.number + 1 {
            return Err(wait("it is not the newest checkpoint of this store"));
        }
        // The pager still reads the restored checkpoint, so the store must keep it.
        writer.hold(Some(held.fill.number));
        self.base = Some(newest);
        Ok(InitialTracking::Filling { held: Box::new(held), whole: worth == RecordWorth::Complete })
    }

    pub(crate) fn checkpoint(&mut self, session: &mut TrackingSession) -> Result<CheckpointReport, CheckpointError> {
        self.take_one(session, |session, writer, every| session.checkpoint(writer, every))
    }

    /// Handles the failure of a checkpoint because another host has the guest: ends the guest's processes on this host
    /// and returns the error to report. `None`: `e` has another cause.
    pub(crate) fn owned_elsewhere(&self, rundir: &RunDir, e: &CheckpointError) -> Option<ProtectError> {
        let CheckpointError::Store(e) = e else { return None };
        let owner = e.guest_is_over(self.owned.run())?;
        Some(self.owned.end_guest(rundir, owner).map_or_else(ProtectError::from, ProtectError::from))
    }

    /// Takes the last checkpoint of a guest that stays stopped: see [`TrackingSession::last`]. Also returns the owner
    /// epoch that has committed the checkpoint.
    pub(crate) fn last(
        &mut self,
        session: &mut TrackingSession,
        held: &RunStateLock,
        on_stopped: &mut OnStopped<'_>,
    ) -> Result<(CheckpointReport, u64), CheckpointError> {
        let done = self.take_one(session, |session, writer, _| session.last(writer, held, on_stopped))?;
        Ok((done, self.base.map_or(0, |base| base.epoch)))
    }

    /// Takes one more checkpoint, at which the guest stays stopped.
    fn take_last(&mut self, session: &mut TrackingSession) -> Result<CheckpointReport, CheckpointError> {
        let run_state = session.target.hold_run_state()?;
        let (done, _) = self.last(session, &run_state, &mut |_| {})?;
        (self.taken, self.newest) = (self.taken + 1, Some(done.number));
        Ok(done)
    }

    fn take_one(
        &mut self,
        session: &mut TrackingSession,
        take: impl FnOnce(&mut TrackingSession, &mut Writer, Duration) -> Result<CheckpointReport, CheckpointError>,
    ) -> Result<CheckpointReport, CheckpointError> {
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
        self.base = Some(CommitId { number: done.number, epoch: progress.epoch });
        progress.base = self.base;
        progress.write(&rundir);
        Ok(done)
    }

    /// Returns a progress record without the fields that depend on the checkpoint.
    fn progress(&self, session: &TrackingSession) -> Progress {
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

    fn compare(&mut self, session: &mut TrackingSession) -> Result<Comparison, CheckpointError> {
        let committed = self.newest.unwrap_or_default();
        // The collected pages are not committed: if this process is killed, a later protector must not continue
        // incrementally.
        Progress { collected: committed + 1, committed, ..self.progress(session) }.write(session.target.rundir());
        let which = ReadOptions { at: self.newest, identity: self.settings.identity.clone(), ..ReadOptions::default() };
        session.compare(&Image::open(&self.settings.store, &which)?)
    }

    /// Decides how the loop continues after a failure.
    fn after_failure(
        &mut self,
        target: &Target,
        error: CheckpointError,
        failures: &mut u32,
        on_event: &mut dyn FnMut(&ProtectEvent),
    ) -> Result<LoopStep, ProtectError> {
        match error {
            CheckpointError::Store(e) if e.may_pass() => {
                if !std::mem::replace(&mut self.store_failed, true) {
                    on_event(&ProtectEvent::StoreAway { error: chain(&e) });
                }
                if matches!(e, StoreError::Closed { .. }) {
                    self.writer = None;
                }
                Ok(LoopStep::Wait(self.settings.every.max(RETRY_DELAY)))
            }
            CheckpointError::Store(e) => match e.guest_is_over(self.owned.run()) {
                // The guest has shut down; its QEMU is about to end.
                Some(Owner { guest: Guest::Ended, .. }) if has_ended(target.vmm()) => {
                    Ok(LoopStep::End(StopReason::QemuEnded))
                }
                Some(owner) => Err(self.owned.end_guest(target.rundir(), owner)?.into()),
                None if e.is_no_store() => Err(self.owned.store_gone(target.rundir(), &e).into()),
                None => Err(e.into()),
            },
            CheckpointError::Pause(PauseError::NotRunning { state }) if target.vmm().is_alive() => {
                on_event(&ProtectEvent::Waiting {
                    state: format!("the guest was stopped by another program ({state})"),
                });
                Ok(LoopStep::Wait(self.settings.every.max(RETRY_DELAY)))
            }
            CheckpointError::Epoch(e) if !e.is_gone() && target.vmm().is_alive() => {
                on_event(&ProtectEvent::Waiting { state: chain(&e) });
                Ok(LoopStep::Wait(self.settings.every.max(RETRY_DELAY)))
            }
            e @ CheckpointError::Filling { .. } if target.vmm().is_alive() => {
                on_event(&ProtectEvent::Waiting { state: e.to_string() });
                Ok(LoopStep::Wait(RETRY_DELAY))
            }
            CheckpointError::Target(TargetError::Life(e @ LifeError::NeedsRecovery { .. })) => {
                on_event(&ProtectEvent::Waiting { state: e.to_string() });
                Ok(LoopStep::Wait(self.settings.every.max(RETRY_DELAY)))
            }
            error => {
                // A reboot of the VM may be in progress: wait until it has ended.
                let held = RunStateLock::acquire(target.rundir(), REBOOT);
                let now = Target::of(self.host, target.name());
                drop(held);
                match now {
                    Err(_) if !target.vmm().is_alive() => Ok(LoopStep::End(StopReason::QemuEnded)),
                    Err(e) => Err(e.into()),
                    Ok(now) if now.vmm() != target.vmm() => {
                        *failures = 0;
                        on_event(&ProtectEvent::Moved {
                            why: format!("QEMU process {} runs the guest now", now.vmm().pid),
                        });
                        Ok(LoopStep::Attach(Box::new(now)))
                    }
                    Ok(now) => {
                        *failures += 1;
                        // A disk server may have died: QEMU continues with its replacement.
                        if matches!(error, CheckpointError::DiskServer(_) | CheckpointError::Epoch(_))
                            && let Err(e) = disks::start(target.rundir(), &target.state().hardware)
                        {
                            return Err(ProtectError::session(target.name(), e));
                        }
                        if *failures >= TRIES {
                            let (name, source) = (target.name().into(), Box::new(error));
                            return Err(ProtectError::Tracking { name, source });
                        }
                        on_event(&ProtectEvent::Moved { why: chain(&error) });
                        Ok(LoopStep::Attach(Box::new(now)))
                    }
                }
            }
        }
    }

    fn lag(&self, on_event: &mut dyn FnMut(&ProtectEvent)) {
        if let Some(max) = self.settings.max_lag
            && self.newest_at.elapsed() > max
        {
            let ms = |time: Duration| time.as_millis() as u64;
            on_event(&ProtectEvent::Lag { lag_ms: ms(self.newest_at.elapsed()), max_ms: ms(max) });
        }
    }

    /// Sleeps for `time`, or until `wake` returns true. Returns whether a stop was requested.
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

/// Returns the writer. Reopens the store if the writer is closed.
fn open<'w>(writer: &'w mut Option<Writer>, store: &StoreUrl, options: &Options) -> Result<&'w mut Writer, StoreError> {
    match writer {
        Some(writer) => Ok(writer),
        None => Ok(writer.insert(Writer::open(store, options)?)),
    }
}

/// Why no session could be started.
pub(crate) enum Failure {
    Fatal(ProtectError),
    Tracking(CheckpointError),
}

impl From<CheckpointError> for Failure {
    fn from(e: CheckpointError) -> Self {
        Self::Tracking(e)
    }
}

impl From<ProtectError> for Failure {
    fn from(e: ProtectError) -> Self {
        Self::Fatal(e)
    }
}

/// Returns whether the guest has shut down or its QEMU has ended.
fn has_ended(vmm: &Vmm) -> bool {
    let state = || vmm.watch(ANSWER).and_then(|mut qmp| run_state(&mut qmp));
    !vmm.is_alive() || state().is_ok_and(|state| state == OFF)
}

/// Formats an error with all its causes.
pub(crate) fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut next = e.source();
    while let Some(source) = next {
        text += &format!(": {source}");
        next = source.source();
    }
    text
}
