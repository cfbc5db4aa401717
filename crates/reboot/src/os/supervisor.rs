//! Restarts the processes that serve a VM ([`rekindle_vm::helpers`]) when they die.
//!
//! Part of `rekindle watch`. A pidfd of each helper reports its death within a millisecond; new helpers are found by
//! polling a few times a second. The supervisor starts helpers with the same functions, and under the same locks, as
//! `rekindle recover`.

mod backoff;

use super::phase::saver;
use backoff::{Backoff, DEATH_LIMIT, RestartDecision};
use rekindle_kernel::process::Process;
use rekindle_protect::restore::start_pager;
use rekindle_vm::causes::with_causes;
use rekindle_vm::disks;
use rekindle_vm::events::{self, EventKind};
use rekindle_vm::helpers::{self, Helper, RestartRecord};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::host_us;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Interval between searches for new helpers.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// How long a helper that was never seen may be missing: another process may be about to start it.
const START_GRACE: Duration = Duration::from_secs(1);
/// How long a started helper may take until it serves the VM.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const START_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// State of one helper.
#[derive(Default)]
struct HelperState {
    process: Option<RunningHelper>,
    backoff: Backoff,
    missing: Option<MissingHelper>,
}

struct RunningHelper {
    process: Process,
    /// When this process was found or started.
    found: Instant,
    /// Reports the death of the process.
    pidfd: OwnedFd,
}

/// A helper that should run and does not.
#[derive(Clone, Copy)]
struct MissingHelper {
    since: Instant,
    /// When it is to be restarted. `None`: it is abandoned.
    restart_at: Option<Instant>,
}

/// Supervises the helpers of one VM.
pub(super) struct HelperSupervisor<'a> {
    rundir: &'a RunDir,
    log_limit: u64,
    is_rotation_failure_logged: bool,
    helpers: BTreeMap<Helper, HelperState>,
    record: RestartRecord,
}

impl<'a> HelperSupervisor<'a> {
    pub(super) fn new(rundir: &'a RunDir, log_limit: u64) -> Self {
        let mut record = helpers::read_record(rundir);
        // Abandonments are those of a previous supervisor: a new one tries all helpers again.
        record.values_mut().for_each(|restarts| restarts.abandoned = None);
        Self { rundir, log_limit, is_rotation_failure_logged: false, helpers: BTreeMap::new(), record }
    }

    /// Supervises the helpers until `has_ended` is set.
    pub(super) fn supervise(mut self, has_ended: &AtomicBool) {
        while !has_ended.load(Ordering::Relaxed) {
            if let Err(e) = self.check_all() {
                tracing::debug!("{}: {e}", self.rundir.name());
            }
            self.bound_logs();
            self.wait();
        }
    }

    /// Rotates logs that have become too long.
    fn bound_logs(&mut self) {
        let failures = self.rundir.bound_logs(self.log_limit);
        if let Some((log, e)) = failures.first()
            && !std::mem::replace(&mut self.is_rotation_failure_logged, true)
        {
            // The log that cannot be rotated may be this process's own, so report the failure only once.
            tracing::warn!("cannot rotate {}: {e}", log.display());
        }
    }

    /// Finds new helpers and restarts those that have died.
    fn check_all(&mut self) -> std::io::Result<()> {
        let mut needed = helpers::needed(self.rundir)?;
        needed.retain(|helper| *helper != Helper::Watch);
        self.helpers.retain(|helper, _| needed.contains(helper));
        for helper in needed {
            let now = Instant::now();
            let state = self.helpers.entry(helper.clone()).or_default();
            if state.process.as_ref().is_some_and(|running| running.process.is_alive()) {
                continue;
            }
            if let Some(process) = helper.process(self.rundir)
                && let Ok(pidfd) = process.pidfd()
            {
                state.process = Some(RunningHelper { process, found: now, pidfd });
                state.missing = None;
                self.clear_abandoned(&helper);
                continue;
            }
            self.handle_missing(&helper, now);
        }
        Ok(())
    }

    /// Clears the mark of an abandoned helper that runs again, whichever process has started it.
    fn clear_abandoned(&mut self, helper: &Helper) {
        if let Some(restarts) = self.record.get_mut(&helper.key())
            && restarts.abandoned.take().is_some()
        {
            self.write_record();
        }
    }

    /// Restarts a helper that does not run if its time has come.
    fn handle_missing(&mut self, helper: &Helper, now: Instant) {
        let Some(state) = self.helpers.get_mut(helper) else { return };
        let missing = match (state.process.take(), state.missing) {
            (Some(dead), _) => {
                tracing::warn!("{}: {helper} (process {}) has died", self.rundir.name(), dead.process.pid);
                let served = now.saturating_duration_since(dead.found);
                let decision = state.backoff.died(now, served);
                self.apply_decision(helper, now, decision, None)
            }
            (None, Some(missing)) => missing,
            (None, None) => *state.missing.insert(MissingHelper { since: now, restart_at: Some(now + START_GRACE) }),
        };
        if missing.restart_at.is_some_and(|restart_at| restart_at <= now) {
            self.restart(helper, missing.since);
        }
    }

    /// Records the decision on a helper that is missing since `since`. `start_error`: why its last start failed.
    fn apply_decision(
        &mut self,
        helper: &Helper,
        since: Instant,
        decision: RestartDecision,
        start_error: Option<&str>,
    ) -> MissingHelper {
        let restart_at = match decision {
            RestartDecision::RestartAt(restart_at) => Some(restart_at),
            RestartDecision::Abandon => {
                self.abandon(helper, start_error);
                None
            }
        };
        let missing = MissingHelper { since, restart_at };
        if let Some(state) = self.helpers.get_mut(helper) {
            state.missing = Some(missing);
        }
        missing
    }

    fn abandon(&mut self, helper: &Helper, start_error: Option<&str>) {
        let why = match start_error {
            Some(error) => format!("it failed {DEATH_LIMIT} times in a row, the last time because: {error}"),
            None => format!("it died {DEATH_LIMIT} times in a row"),
        };
        let name = self.rundir.name();
        tracing::error!("{name}: {helper} is not restarted any more: {why}; to restart it: rekindle recover {name}");
        self.record.entry(helper.key()).or_default().abandoned = Some(why);
        self.write_record();
    }

    fn restart(&mut self, helper: &Helper, missing_since: Instant) {
        let name = self.rundir.name();
        match start(self.rundir, helper) {
            Ok(Some(process)) => {
                let (now, downtime) = (Instant::now(), missing_since.elapsed());
                let (pid, ms) = (process.pid, downtime.as_millis());
                tracing::warn!("{name}: {helper} was restarted (process {pid}) after {ms} ms");
                let restarts = self.record.entry(helper.key()).or_default();
                restarts.count += 1;
                restarts.last_host_us = Some(host_us());
                restarts.last_took_us = Some(u64::try_from(downtime.as_micros()).unwrap_or(u64::MAX));
                self.write_record();
                events::record(self.rundir, EventKind::HelperRestarted { helper: helper.to_string(), process: pid });
                if let (Some(state), Ok(pidfd)) = (self.helpers.get_mut(helper), process.pidfd()) {
                    state.process = Some(RunningHelper { process, found: now, pidfd });
                    state.missing = None;
                }
            }
            Ok(None) => {
                // A pager can load the rest of the memory before its process is found.
                tracing::warn!("{name}: {helper} was restarted, and is not needed any more");
                self.helpers.remove(helper);
            }
            Err(why) => {
                tracing::warn!("{name}: cannot restart {helper}: {why}");
                let now = Instant::now();
                let decision = self.helpers.get_mut(helper).map(|state| state.backoff.died(now, Duration::ZERO));
                let decision = decision.unwrap_or(RestartDecision::Abandon);
                self.apply_decision(helper, missing_since, decision, Some(&why));
            }
        }
    }

    fn write_record(&self) {
        if let Err(e) = helpers::write_record(self.rundir, &self.record) {
            tracing::debug!("{}: {e}", self.rundir.helpers().display());
        }
    }

    /// Waits until a helper dies, a restart is due, or new helpers are to be searched for.
    fn wait(&self) {
        let next_restart = self.helpers.values().filter_map(|state| state.missing?.restart_at).min();
        let timeout = next_restart.map_or(POLL_INTERVAL, |restart_at| {
            restart_at.saturating_duration_since(Instant::now()).min(POLL_INTERVAL)
        });
        let running = self.helpers.values().filter_map(|state| state.process.as_ref());
        let mut pidfds: Vec<_> = running.map(|running| PollFd::new(&running.pidfd, PollFlags::IN)).collect();
        // Less than a second.
        let timeout = Timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
        if let Err(e) = poll(&mut pidfds, Some(&timeout)) {
            tracing::debug!("cannot wait for helpers: {e}");
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Starts a helper and waits until it serves the VM. `None` if it is not needed any more.
fn start(rundir: &RunDir, helper: &Helper) -> Result<Option<Process>, String> {
    match helper {
        Helper::Disk(_) => disks::restart(rundir).map(drop).map_err(|e| with_causes(&e))?,
        Helper::Pager => start_pager(rundir).map_err(|e| with_causes(&e))?,
        Helper::Phases => {
            if let Some(state) = State::read(rundir).map_err(|e| e.to_string())? {
                saver::start(rundir, &state.definition).map_err(|e| e.to_string())?;
            }
        }
        Helper::Watch => {}
    }
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        if let Some(process) = helper.process(rundir) {
            return Ok(Some(process));
        }
        if !helpers::needed(rundir).map_err(|e| e.to_string())?.contains(helper) {
            return Ok(None);
        }
        if Instant::now() > deadline {
            return Err(format!("it did not serve within {} s", START_TIMEOUT.as_secs()));
        }
        thread::sleep(START_POLL_INTERVAL);
    }
}
