//! The loop that takes checkpoints.

use crate::event::{Compared, Done, Event};
use crate::pause::PauseError;
use crate::policy::Policy;
use crate::session::{Plan, Session, SessionError};
use crate::target::{Target, TargetError};
use rekindle_qemu::adopt::Obstacle;
use rekindle_store::remote::Identity;
use rekindle_store::{Image, Options, StoreError, StoreUrl, Which, Writer};
use rekindle_vm::host::Host;
use rekindle_vm::life::LifeError;
use rekindle_vm::lock::RunState;
use rekindle_vm::rundir::{RunDir, write_atomically};
use serde::{Deserialize, Serialize};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait before something is tried again.
const AGAIN: Duration = Duration::from_millis(200);
/// How long a reboot of the VM may take to put another QEMU in the place of the one that has gone.
const REBOOT: Duration = Duration::from_secs(120);
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
    /// After those, compare all of the guest's memory with the newest, while it is stopped.
    pub compare: bool,
}

/// Why a VM is not, or no longer, protected.
#[derive(Debug, thiserror::Error)]
pub enum ProtectError {
    /// No such VM, or it does not run.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its memory is written where nobody can see it, or not to be read.
    #[error("{name} cannot be protected:\n{}", listed(.obstacles))]
    Obstacles {
        /// The VM.
        name: String,
        /// What stands in the way.
        obstacles: Vec<Obstacle>,
    },
    /// It writes disks.
    #[error(
        "{name} writes to {disk}, whose content will not belong to its memory after a restore: make it read-only, snapshot it \
         with --disk-hook COMMAND, or, if a file system that is newer than the guest's memory does no harm, say \
         --disk crash-consistent"
    )]
    Disk {
        /// The VM.
        name: String,
        /// The disk.
        disk: String,
    },
    /// Pre-copy would miss writes.
    #[error(
        "{name} has {disk} open with O_DIRECT, past the page tables through which pre-copy sees writes: use --policy cow, or \
         another `cache` for the disk"
    )]
    Direct {
        /// The VM.
        name: String,
        /// The disk.
        disk: String,
    },
    /// Tracking or QEMU fails again and again.
    #[error("{name} cannot be protected")]
    Session {
        /// The VM.
        name: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

fn listed(obstacles: &[Obstacle]) -> String {
    obstacles.iter().map(|one| format!("  - {}: {}", one.what, one.why)).collect::<Vec<_>>().join("\n")
}

/// What a loop did until its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Checkpoints that count.
    pub checkpoints: u64,
    /// Number of the newest one.
    pub newest: Option<u64>,
    /// Why it ended.
    pub ended: Ended,
}

/// Why a loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// It was told to. Tracking stays in QEMU, so that the next protector can go on.
    Told,
    /// It has taken as many as were asked for.
    Counted,
    /// The guest's QEMU has ended.
    QemuEnded,
}

/// How far the loop has got, for the next one: `protect.json`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Progress {
    store: StoreUrl,
    pid: u32,
    policy: Policy,
    /// The checkpoint for which pages were collected last.
    collected: u64,
    /// The checkpoint that was committed last.
    committed: u64,
}

impl Progress {
    fn read(rundir: &RunDir) -> Option<Self> {
        serde_json::from_slice(&fs::read(rundir.file("protect.json")).ok()?).ok()
    }

    fn write(&self, rundir: &RunDir) {
        // Lost or torn, the next protector begins with a full checkpoint.
        let text = serde_json::to_vec(self).unwrap_or_default();
        if let Err(e) = write_atomically(&rundir.file("protect.json"), &text) {
            tracing::debug!("{}: {e}", rundir.file("protect.json").display());
        }
    }
}

/// Protect VM `name` until `stop`, or until its QEMU ends.
///
/// *Needs:* the VM runs; root, or the same user with `kernel.yama.ptrace_scope=0`.
/// *On success:* the store holds its newest checkpoint.
/// *On failure:* the guest runs on; the store holds what was committed before.
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
    let mut options = Options::new(target.identity(), &format!("protect {name}"));
    options.keep = settings.keep;
    options.identity.clone_from(&settings.identity);
    let writer = Writer::open(&settings.store, &options)?;
    options.only_if = Some(writer.epoch());
    let now = Instant::now();
    Loop { host, settings, stop, options, writer: Some(writer), taken: 0, newest: None, newest_at: now, away: false }
        .run(target, tell)
}

struct Loop<'a> {
    host: &'a Host,
    settings: &'a Settings,
    stop: &'a AtomicBool,
    options: Options,
    /// None after it has failed for good: it is opened again.
    writer: Option<Writer>,
    taken: u64,
    newest: Option<u64>,
    newest_at: Instant,
    away: bool,
}

/// What is to be done next.
enum Next {
    /// The next checkpoint, when its time has come.
    Wait(Duration),
    /// A new session with this target.
    Attach(Box<Target>),
    End(Ended),
}

impl Loop<'_> {
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
                        if self.sleep(time) {
                            break Ended::Told;
                        }
                        continue;
                    }
                },
            };
            tell(&Event::Attached {
                pid: target.vmm().pid,
                ram_bytes: session.ram_bytes(),
                incremental: session.resumed,
            });
            loop {
                let began = Instant::now();
                let done = self.checkpoint(&mut session);
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
                            Next::End(Ended::Counted)
                        } else {
                            Next::Wait(self.settings.every.saturating_sub(began.elapsed()))
                        }
                    }
                    Err(e) => self.after(&session.target, e, &mut failures, tell)?,
                };
                self.lag(tell);
                match next {
                    Next::Wait(time) => {
                        if self.sleep(time) {
                            break 'sessions Ended::Told;
                        }
                    }
                    Next::Attach(next) => {
                        let _ = session.detach();
                        target = next;
                        continue 'sessions;
                    }
                    Next::End(Ended::Counted) => {
                        if self.settings.compare {
                            let compared = self.compare(&mut session).map_err(|source| ProtectError::Session {
                                name: session.target.name().into(),
                                source: Box::new(source),
                            })?;
                            tell(&Event::Compared(compared));
                        }
                        if let Err(e) = session.detach() {
                            tracing::warn!("tracking could not be taken out of QEMU: {e}");
                        }
                        break 'sessions Ended::Counted;
                    }
                    Next::End(ended) => break 'sessions ended,
                }
            }
        };
        Ok(Summary { checkpoints: self.taken, newest: self.newest, ended })
    }

    fn attach(&mut self, target: &Target) -> Result<Session, Failure> {
        if target.rundir().fill().exists() {
            // What is not there yet would be taken for zero, or waited for with the guest stopped.
            return Err(Failure::Session(SessionError::Filling));
        }
        let plan = Plan::of(target, self.settings.policy, &self.settings.disks)?;
        let progress = Progress::read(target.rundir());
        let newest = self.writer.as_ref().map(|writer| writer.next_number() - 1);
        let resume = progress.is_some_and(|progress| {
            progress.collected == progress.committed
                && Some(progress.committed) == newest
                && progress.store == self.settings.store
                && progress.pid == target.vmm().pid
                && progress.policy == plan.policy
        });
        let held = target.hold_run_state().map_err(|e| Failure::Session(SessionError::Target(e)))?;
        let session = Session::attach(target.clone(), plan, resume)?;
        drop(held);
        Ok(session)
    }

    fn checkpoint(&mut self, session: &mut Session) -> Result<Done, SessionError> {
        if self.writer.is_none() {
            self.writer = Some(Writer::open(&self.settings.store, &self.options)?);
        }
        let Some(writer) = &mut self.writer else { return Err(SessionError::NoWriter) };
        let (rundir, pid, policy) = (session.target.rundir().clone(), session.target.vmm().pid, session.policy());
        let store = self.settings.store.clone();
        let number = writer.next_number();
        Progress { store: store.clone(), pid, policy, collected: number, committed: number - 1 }.write(&rundir);
        let done = session.checkpoint(writer, self.settings.every)?;
        Progress { store, pid, policy, collected: done.number, committed: done.number }.write(&rundir);
        Ok(done)
    }

    fn compare(&mut self, session: &mut Session) -> Result<Compared, SessionError> {
        let committed = self.newest.unwrap_or_default();
        // What it collects goes nowhere: a protector after one that was killed here must not go on incrementally.
        let (store, pid, policy) = (self.settings.store.clone(), session.target.vmm().pid, session.policy());
        Progress { store, pid, policy, collected: committed + 1, committed }.write(session.target.rundir());
        let which = Which { at: self.newest, identity: self.settings.identity.clone(), ..Which::default() };
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
            SessionError::Store(e) if is_passing(&e) => {
                if !std::mem::replace(&mut self.away, true) {
                    tell(&Event::StoreAway { error: chain(&e) });
                }
                if matches!(e, StoreError::Closed { .. }) {
                    self.writer = None;
                }
                Ok(Next::Wait(self.settings.every.max(AGAIN)))
            }
            SessionError::Store(e) => Err(e.into()),
            SessionError::Pause(PauseError::NotRunning { state }) if target.vmm().is_alive() => {
                tell(&Event::Waiting { state: format!("somebody has stopped the guest ({state})") });
                Ok(Next::Wait(self.settings.every.max(AGAIN)))
            }
            e @ SessionError::Filling if target.vmm().is_alive() => {
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
                    Err(_) if !target.vmm().is_alive() => Ok(Next::End(Ended::QemuEnded)),
                    Err(e) => Err(e.into()),
                    Ok(now) if now.vmm() != target.vmm() => {
                        *failures = 0;
                        tell(&Event::Moved { why: format!("QEMU process {} runs the guest now", now.vmm().pid) });
                        Ok(Next::Attach(Box::new(now)))
                    }
                    Ok(now) => {
                        *failures += 1;
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

    /// `true`: told to stop.
    fn sleep(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            thread::sleep(left.min(Duration::from_millis(50)));
        }
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

/// Whether a store may be well again later.
fn is_passing(e: &StoreError) -> bool {
    matches!(
        e,
        StoreError::NoSpace { .. } | StoreError::Io { .. } | StoreError::Line { .. } | StoreError::Closed { .. }
    )
}

fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut next = e.source();
    while let Some(source) = next {
        text += &format!(": {source}");
        next = source.source();
    }
    text
}
