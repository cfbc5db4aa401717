//! The protector's control loop: when a checkpoint is taken, and what happens after a failure.
//!
//! ```text
//!  start a session ──> take a checkpoint ──> wait ──┐
//!     ^   ^                   ^                     │
//!     │   │                   └─────────────────────┘
//!     │   └── QEMU was replaced, or tracking has failed: start again
//!     └────── QEMU cannot be tracked now: wait, start again
//! ```
//!
//! A store that does not answer, a stopped guest, a restart of libvirt's daemon and an unfinished operation on the VM only
//! delay the next checkpoint.

use super::series::CheckpointSeries;
use super::{DiskPolicy, ProtectSettings, StopReason, Summary};
use crate::counters::CounterFile;
use crate::error::{CheckpointError, ProtectError, TrackingStartError};
use crate::event::{CheckpointReport, ProtectEvent};
use crate::pause::PauseError;
use crate::session::TrackingSession;
use crate::target::{Target, TargetError};
use rekindle_qemu::guest::run_state;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreError;
use rekindle_store::types::{Guest, Owner};
use rekindle_vm::causes::with_causes;
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::logs::Throttle;
use rekindle_vm::overlays::OverlayDisksError;
use rekindle_vm::qemu::OFF;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Delay before a failed step is tried again.
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// How long a reboot of the VM may take to replace a QEMU that has ended.
const REBOOT_TIMEOUT: Duration = Duration::from_secs(120);
/// How long QEMU may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long libvirt may fail to pass commands on, for example while its package is upgraded.
const LIBVIRT_TIMEOUT: Duration = Duration::from_secs(600);
/// Longest delay before libvirt is tried again.
const MAX_LIBVIRT_DELAY: Duration = Duration::from_secs(5);
/// Number of consecutive failures after which protection stops.
const MAX_FAILURES: u32 = 3;
/// Limit of the reports why the store cannot be written, in each period.
const MAX_STORE_REPORTS: u32 = 5;
const STORE_REPORT_PERIOD: Duration = Duration::from_secs(60);
/// Delay between two checks whether the protector is to stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(super) struct ControlLoop<'a> {
    host: &'a Host,
    settings: &'a ProtectSettings,
    stop: &'a AtomicBool,
    on_event: &'a mut dyn FnMut(&ProtectEvent),
    series: CheckpointSeries<'a>,
    /// What is recorded for `rekindle metrics`.
    counters: CounterFile,
    /// Number of checkpoints that were taken.
    taken: u64,
    newest: Option<u64>,
    /// When the newest checkpoint was started; without one, when the protector was started.
    newest_started: Instant,
    consecutive_failures: u32,
    /// Since when libvirt has not passed commands on.
    libvirt_away_since: Option<Instant>,
    /// Why the store cannot be written, without digits. `None`: it can be.
    store_failure: Option<String>,
    store_failure_reports: Throttle,
    output_is_held: bool,
}

/// The next step of the loop.
enum LoopStep {
    /// Continue after this time.
    Wait(Duration),
    /// Start a new session with this target.
    Attach(Box<Target>),
    Stop(StopReason),
}

impl<'a> ControlLoop<'a> {
    pub fn new(
        host: &'a Host,
        settings: &'a ProtectSettings,
        stop: &'a AtomicBool,
        on_event: &'a mut dyn FnMut(&ProtectEvent),
        series: CheckpointSeries<'a>,
        counters: CounterFile,
    ) -> Self {
        Self {
            host,
            settings,
            stop,
            on_event,
            series,
            counters,
            taken: 0,
            newest: None,
            newest_started: Instant::now(),
            consecutive_failures: 0,
            libvirt_away_since: None,
            store_failure: None,
            store_failure_reports: Throttle::new(MAX_STORE_REPORTS, STORE_REPORT_PERIOD),
            output_is_held: false,
        }
    }

    pub fn run(mut self, target: Target) -> Result<Summary, ProtectError> {
        let mut target = Box::new(target);
        // An earlier protector may have been killed while it waited.
        let _ = fs::remove_file(target.rundir().unprotected());
        let ended = loop {
            let next_step = match self.series.start_session(&target) {
                Ok(session) => self.run_session(session)?,
                Err(TrackingStartError::Retryable(e)) => self.after_failure(&target, e)?,
                Err(TrackingStartError::Fatal(e)) => return Err(e),
            };
            match next_step {
                LoopStep::Attach(new_target) => target = new_target,
                LoopStep::Stop(reason) => break reason,
                LoopStep::Wait(time) => {
                    if self.sleep(time, || false) {
                        break StopReason::Requested;
                    }
                }
            }
        };
        let output_held = self.output_is_held && ended != StopReason::QemuEnded;
        let overlays_left = matches!(self.settings.disks, DiskPolicy::Overlays { .. });
        Ok(Summary { checkpoints: self.taken, newest: self.newest, ended, output_held, overlays_left })
    }

    /// Takes checkpoints until the protector is to stop or tracking has to start again.
    fn run_session(&mut self, mut session: TrackingSession) -> Result<LoopStep, ProtectError> {
        let ended = self.take_checkpoints(&mut session);
        session.settle_overlays();
        match ended? {
            LoopStep::Stop(StopReason::Counted) => self.finish(session).map(LoopStep::Stop),
            LoopStep::Attach(new_target) => {
                let _ = session.detach();
                Ok(LoopStep::Attach(new_target))
            }
            next_step => Ok(next_step),
        }
    }

    fn take_checkpoints(&mut self, session: &mut TrackingSession) -> Result<LoopStep, ProtectError> {
        self.output_is_held = session.holds_output();
        self.report(&ProtectEvent::Attached {
            pid: session.target.vmm().pid,
            ram_bytes: session.ram_bytes(),
            incremental: session.is_incremental(),
            filling: session.is_filling(),
        });
        loop {
            let next_step = match self.take_checkpoint(session) {
                Ok(()) if self.settings.count.is_some_and(|count| self.taken >= count) => {
                    LoopStep::Stop(StopReason::Counted)
                }
                Ok(()) => LoopStep::Wait(self.settings.every.saturating_sub(self.newest_started.elapsed())),
                Err(e) => {
                    self.end_full_overlays(session, &e)?;
                    self.after_failure(&session.target, e)?
                }
            };
            self.report_lag();
            match next_step {
                LoopStep::Wait(time) => {
                    // A complete fill ends the wait early, so that the pager can end.
                    if self.sleep(time, || session.is_filled()) {
                        return Ok(LoopStep::Stop(StopReason::Requested));
                    }
                }
                next_step => return Ok(next_step),
            }
        }
    }

    fn take_checkpoint(&mut self, session: &mut TrackingSession) -> Result<(), CheckpointError> {
        let started = Instant::now();
        let was_filling = session.is_filling();
        let result = self.series.checkpoint(session);
        if was_filling && !session.is_filling() {
            self.report(&ProtectEvent::Filled);
        }
        let report = result?;
        self.consecutive_failures = 0;
        if self.libvirt_away_since.take().is_some() {
            let _ = fs::remove_file(session.target.rundir().unprotected());
        }
        if self.store_failure.take().is_some() {
            self.store_failure_reports = Throttle::new(MAX_STORE_REPORTS, STORE_REPORT_PERIOD);
            self.report(&ProtectEvent::StoreBack);
        }
        self.newest_started = started;
        self.note_checkpoint(report);
        Ok(())
    }

    /// Lets a guest run on whose overlays have no room. Learns from the store which overlays could be merged, if there
    /// are too many.
    fn end_full_overlays(&self, session: &mut TrackingSession, e: &CheckpointError) -> Result<(), ProtectError> {
        match e {
            CheckpointError::Overlays(OverlayDisksError::NoSpace { .. })
            | CheckpointError::Pause(PauseError::NotRunning { .. }) => {
                let name = session.target.name().to_owned();
                let ended = session.end_full_overlays().map_err(|e| ProtectError::tracking(&name, e))?;
                if ended { Err(ProtectError::OverlaysFull { name }) } else { Ok(()) }
            }
            CheckpointError::Overlays(OverlayDisksError::NotReady { .. }) => {
                self.series.note_committed_overlays(session);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn note_checkpoint(&mut self, report: CheckpointReport) {
        self.taken += 1;
        self.newest = Some(report.number);
        self.report(&ProtectEvent::Checkpoint(Box::new(report)));
    }

    /// Ends a session after the requested number of checkpoints.
    fn finish(&mut self, mut session: TrackingSession) -> Result<StopReason, ProtectError> {
        let name = session.target.name().to_owned();
        let failed = |e| ProtectError::tracking(&name, e);
        if self.settings.stay {
            let report = self.take_last(&mut session).map_err(failed)?;
            self.note_checkpoint(report);
            self.output_is_held = false;
            return Ok(StopReason::Stays);
        }
        if self.settings.compare {
            let comparison = self.series.compare(&mut session, self.newest).map_err(failed)?;
            self.report(&ProtectEvent::Compared(comparison));
        }
        match session.end_hold() {
            Ok(()) => self.output_is_held = false,
            Err(e) => tracing::warn!("the guest's network output is still held: {}", with_causes(&e)),
        }
        if let Err(e) = session.detach() {
            tracing::warn!("cannot remove the tracking from QEMU: {e}");
        }
        Ok(StopReason::Counted)
    }

    /// Takes one more checkpoint, at which the guest stays stopped.
    fn take_last(&mut self, session: &mut TrackingSession) -> Result<CheckpointReport, CheckpointError> {
        let run_state = session.target.hold_run_state()?;
        Ok(self.series.last_checkpoint(session, &run_state, &mut |_| {})?.report)
    }

    /// Decides how the loop continues after a failure.
    fn after_failure(&mut self, target: &Target, error: CheckpointError) -> Result<LoopStep, ProtectError> {
        let is_alive = target.vmm().is_alive();
        let wait = LoopStep::Wait(self.settings.every.max(RETRY_DELAY));
        match error {
            CheckpointError::Store(e) => self.after_store_failure(target, e),
            CheckpointError::Pause(PauseError::NotRunning { state }) if is_alive => {
                self.report_wait(format!("the guest was stopped by another program ({state})"));
                Ok(wait)
            }
            CheckpointError::DiskEpoch(e) if is_alive && !e.is_gone() => {
                self.report_wait(with_causes(&e));
                Ok(wait)
            }
            CheckpointError::Overlays(e) if is_alive && e.may_pass() => {
                self.report_wait(with_causes(&e));
                Ok(wait)
            }
            CheckpointError::Filling { .. } if is_alive => {
                self.report_wait(error.to_string());
                Ok(LoopStep::Wait(RETRY_DELAY))
            }
            CheckpointError::Target(TargetError::Life(e @ LifeError::NeedsRecovery { .. })) => {
                self.report_wait(e.to_string());
                Ok(wait)
            }
            error if is_alive && error.is_of_libvirt() => self.wait_for_libvirt(target, error),
            error => self.track_again(target, error),
        }
    }

    fn after_store_failure(&mut self, target: &Target, error: StoreError) -> Result<LoopStep, ProtectError> {
        if error.may_pass() {
            self.counters.note_store_failure();
            self.report_store_failure(with_causes(&error));
            if matches!(error, StoreError::Closed { .. }) {
                self.series.close_writer();
            }
            return Ok(LoopStep::Wait(self.settings.every.max(RETRY_DELAY)));
        }
        let owner_record = self.series.owner_record();
        match error.guest_is_over(owner_record.run()) {
            // The guest has shut down; its QEMU is about to end.
            Some(Owner { guest: Guest::Ended, .. }) if has_ended(target.vmm()) => {
                Ok(LoopStep::Stop(StopReason::QemuEnded))
            }
            Some(owner) => Err(self.series.end_guest(target.rundir(), owner)),
            None if error.is_no_store() => Err(owner_record.store_gone(target.rundir(), &error).into()),
            None => Err(error.into()),
        }
    }

    /// Waits for libvirt, with growing delays, and starts the tracking again. The guest runs meanwhile.
    fn wait_for_libvirt(&mut self, target: &Target, error: CheckpointError) -> Result<LoopStep, ProtectError> {
        let away = self.libvirt_away_since.get_or_insert_with(Instant::now).elapsed();
        if away > LIBVIRT_TIMEOUT {
            return Err(ProtectError::tracking(target.name(), error));
        }
        if let Err(e) = fs::write(target.rundir().unprotected(), []) {
            tracing::warn!("`rekindle status` does not show that {} is unprotected: {e}", target.name());
        }
        self.report_wait(format!(
            "{}; the guest runs unprotected until libvirt passes commands on",
            with_causes(&error)
        ));
        let is_stopped = self.sleep(away.clamp(RETRY_DELAY, MAX_LIBVIRT_DELAY), || !target.vmm().is_alive());
        if is_stopped {
            return Ok(LoopStep::Stop(StopReason::Requested));
        }
        Ok(LoopStep::Attach(Box::new(target.clone())))
    }

    /// Starts the tracking again, after `error`: in the QEMU that runs the guest now, or in the same one.
    fn track_again(&mut self, target: &Target, error: CheckpointError) -> Result<LoopStep, ProtectError> {
        // A reboot of the VM may be in progress: wait until it has ended.
        let run_state = RunStateLock::acquire(target.rundir(), REBOOT_TIMEOUT);
        let current = Target::of(self.host, target.name());
        drop(run_state);
        let current = match current {
            Ok(current) => current,
            Err(_) if !target.vmm().is_alive() => return Ok(LoopStep::Stop(StopReason::QemuEnded)),
            Err(e) => return Err(e.into()),
        };
        if current.vmm() != target.vmm() {
            self.consecutive_failures = 0;
            self.report(&ProtectEvent::Moved { why: format!("QEMU process {} runs the guest now", current.vmm().pid) });
            return Ok(LoopStep::Attach(Box::new(current)));
        }
        self.consecutive_failures += 1;
        // A disk server may have died: QEMU continues with its replacement.
        if matches!(error, CheckpointError::DiskServer(_) | CheckpointError::DiskEpoch(_)) {
            let started = disks::start(target.rundir(), &target.state().hardware);
            started.map_err(|e| ProtectError::tracking(target.name(), e))?;
        }
        if self.consecutive_failures >= MAX_FAILURES {
            return Err(ProtectError::tracking(target.name(), error));
        }
        self.report(&ProtectEvent::Moved { why: with_causes(&error) });
        Ok(LoopStep::Attach(Box::new(current)))
    }

    fn report(&mut self, event: &ProtectEvent) {
        self.counters.note(event);
        (self.on_event)(event);
    }

    /// Reports why no checkpoint is possible for now.
    fn report_wait(&mut self, reason: String) {
        self.report(&ProtectEvent::Waiting { state: reason });
    }

    /// Reports why the store cannot be written, also if the cause changes: after a lost connection, the server may reject
    /// the next one.
    fn report_store_failure(&mut self, error: String) {
        // Some errors contain a time, or how long a request took.
        let failure: String = error.chars().filter(|c| !c.is_ascii_digit()).collect();
        // One that is not admitted is reported later, if it lasts.
        if self.store_failure.as_ref() != Some(&failure) && self.store_failure_reports.admit(Instant::now()).is_some() {
            self.store_failure = Some(failure);
            self.report(&ProtectEvent::StoreAway { error });
        }
    }

    /// Reports if the newest checkpoint is too old.
    fn report_lag(&mut self) {
        let lag = self.newest_started.elapsed();
        if let Some(max_lag) = self.settings.max_lag
            && lag > max_lag
        {
            let (lag_ms, max_ms) = (lag.as_millis() as u64, max_lag.as_millis() as u64);
            self.report(&ProtectEvent::Lag { lag_ms, max_ms });
        }
    }

    /// Sleeps for `time`, or until `wake` returns true. Returns whether a stop was requested.
    fn sleep(&mut self, time: Duration, wake: impl Fn() -> bool) -> bool {
        let end = Instant::now() + time;
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return true;
            }
            self.counters.write_if_due();
            let remaining = end.saturating_duration_since(Instant::now());
            if remaining.is_zero() || wake() {
                return false;
            }
            thread::sleep(remaining.min(STOP_POLL_INTERVAL));
        }
    }
}

/// Returns whether the guest has shut down or its QEMU has ended.
fn has_ended(vmm: &Vmm) -> bool {
    let state = || vmm.connect_watcher(ANSWER_TIMEOUT).and_then(|mut qmp| run_state(&mut qmp));
    !vmm.is_alive() || state().is_ok_and(|state| state == OFF)
}
