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
use rekindle_vm::disks;
use rekindle_vm::helpers::{self, Helper, RestartRecord};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::host_us;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Interval between searches for new helpers.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// How long a helper that was never seen may be missing: another process may be about to start it.
const START_GRACE: Duration = Duration::from_secs(1);
/// How long a started helper may take until it serves the VM.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// State of one helper.
struct HelperState {
    /// The helper's process, the time since when it is known, and a pidfd that reports its death.
    process: Option<(Process, Instant, OwnedFd)>,
    backoff: Backoff,
    /// The time since when the helper is missing, and the time of its next restart: `None` if the helper is abandoned.
    missing: Option<(Instant, Option<Instant>)>,
}

/// Supervises the helpers of one VM.
pub(super) struct HelperSupervisor<'a> {
    rundir: &'a RunDir,
    log_limit: u64,
    rotation_failure_reported: bool,
    known: BTreeMap<Helper, HelperState>,
    record: RestartRecord,
}

impl<'a> HelperSupervisor<'a> {
    pub(super) fn new(rundir: &'a RunDir, log_limit: u64) -> Self {
        let mut record = helpers::read_record(rundir);
        // Abandonments are those of a previous supervisor: a new one tries all helpers again.
        record.values_mut().for_each(|restarts| restarts.abandoned = None);
        Self { rundir, log_limit, rotation_failure_reported: false, known: BTreeMap::new(), record }
    }

    /// Supervises the helpers until `end` is set.
    pub(super) fn supervise(mut self, end: &AtomicBool) {
        while !end.load(Ordering::Relaxed) {
            if let Err(e) = self.check_all() {
                tracing::debug!("{}: {e}", self.rundir.name());
            }
            self.bound_logs();
            self.wait();
        }
    }

    fn bound_logs(&mut self) {
        let failed = self.rundir.bound_logs(self.log_limit);
        if let Some((log, e)) = failed.first()
            && !std::mem::replace(&mut self.rotation_failure_reported, true)
        {
            // The log that cannot be rotated may be this process's own, so report the failure only once.
            tracing::warn!("cannot rotate {}: {e}", log.display());
        }
    }

    /// Finds new helpers and restarts those that have died.
    fn check_all(&mut self) -> std::io::Result<()> {
        let mut needed = helpers::needed(self.rundir)?;
        needed.retain(|helper| *helper != Helper::Watch);
        self.known.retain(|helper, _| needed.contains(helper));
        for helper in needed {
            let now = Instant::now();
            let known = self.known.entry(helper.clone()).or_insert_with(|| HelperState {
                process: None,
                backoff: Backoff::default(),
                missing: None,
            });
            if known.process.as_ref().is_some_and(|(process, ..)| process.is_alive()) {
                continue;
            }
            if let Some(process) = helper.process(self.rundir)
                && let Ok(pidfd) = process.pidfd()
            {
                known.process = Some((process, now, pidfd));
                known.missing = None;
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
            self.write();
        }
    }

    fn handle_missing(&mut self, helper: &Helper, now: Instant) {
        let Some(known) = self.known.get_mut(helper) else { return };
        let (since, at) = match (known.process.take(), known.missing) {
            (Some((process, since, _)), _) => {
                tracing::warn!("{}: {helper} (process {}) has died", self.rundir.name(), process.pid);
                let next = known.backoff.died(now, now.saturating_duration_since(since));
                self.decide(helper, now, next, None)
            }
            (None, Some(missing)) => missing,
            (None, None) => *known.missing.insert((now, Some(now + START_GRACE))),
        };
        if at.is_some_and(|at| at <= now) {
            self.restart(helper, since);
        }
    }

    /// Decides when to restart a helper that is missing since `since`, and records the decision. `why`: the reason why
    /// its last start failed.
    fn decide(
        &mut self,
        helper: &Helper,
        since: Instant,
        next: RestartDecision,
        why: Option<&str>,
    ) -> (Instant, Option<Instant>) {
        let missing = match next {
            RestartDecision::RestartAt(at) => (since, Some(at)),
            RestartDecision::Abandon => {
                let why = match why {
                    Some(why) => format!("it failed {DEATH_LIMIT} times in a row, the last time because: {why}"),
                    None => format!("it died {DEATH_LIMIT} times in a row"),
                };
                let name = self.rundir.name();
                tracing::error!(
                    "{name}: {helper} is not restarted any more: {why}; to restart it: rekindle recover {name}"
                );
                self.record.entry(helper.key()).or_default().abandoned = Some(why);
                self.write();
                (since, None)
            }
        };
        if let Some(known) = self.known.get_mut(helper) {
            known.missing = Some(missing);
        }
        missing
    }

    fn restart(&mut self, helper: &Helper, since: Instant) {
        let name = self.rundir.name();
        match start(self.rundir, helper) {
            Ok(Some(process)) => {
                let (now, took) = (Instant::now(), since.elapsed());
                tracing::warn!(
                    "{name}: {helper} was restarted (process {}) after {} ms",
                    process.pid,
                    took.as_millis()
                );
                let restarts = self.record.entry(helper.key()).or_default();
                restarts.count += 1;
                restarts.last_host_us = Some(host_us());
                restarts.last_took_us = Some(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
                self.write();
                if let (Some(known), Ok(pidfd)) = (self.known.get_mut(helper), process.pidfd()) {
                    known.process = Some((process, now, pidfd));
                    known.missing = None;
                }
            }
            Ok(None) => drop(self.known.remove(helper)),
            Err(why) => {
                tracing::warn!("{name}: cannot restart {helper}: {why}");
                let now = Instant::now();
                let next = self.known.get_mut(helper).map(|known| known.backoff.died(now, Duration::ZERO));
                self.decide(helper, since, next.unwrap_or(RestartDecision::Abandon), Some(&why));
            }
        }
    }

    fn write(&self) {
        if let Err(e) = helpers::write_record(self.rundir, &self.record) {
            tracing::debug!("{}: {e}", self.rundir.helpers().display());
        }
    }

    /// Waits until a helper dies, a restart is due, or new helpers are to be searched for.
    fn wait(&self) {
        let now = Instant::now();
        let restarts = self.known.values().filter_map(|known| known.missing?.1);
        let until = restarts.min().map_or(POLL_INTERVAL, |at| at.saturating_duration_since(now).min(POLL_INTERVAL));
        let all = self.known.values().filter_map(|known| known.process.as_ref());
        let mut fds: Vec<_> = all.map(|(_, _, pidfd)| PollFd::new(pidfd, PollFlags::IN)).collect();
        let timeout = Timespec { tv_sec: 0, tv_nsec: until.subsec_nanos().into() };
        if let Err(e) = poll(&mut fds, Some(&timeout)) {
            tracing::debug!("cannot wait for helpers: {e}");
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Starts a helper and waits until it serves the VM. `None` if it is not needed any more.
fn start(rundir: &RunDir, helper: &Helper) -> Result<Option<Process>, String> {
    let started = match helper {
        Helper::Disk(_) => disks::restart(rundir).map(drop).map_err(|e| chain(&e)),
        Helper::Pager => start_pager(rundir).map_err(|e| chain(&e)),
        Helper::Phases => match State::read(rundir) {
            Ok(Some(state)) => saver::start(rundir, &state.definition).map_err(|e| e.to_string()),
            Ok(None) => Ok(()),
            Err(e) => Err(e.to_string()),
        },
        Helper::Watch => Ok(()),
    };
    started?;
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
        thread::sleep(Duration::from_millis(1));
    }
}

/// Formats an error and all its causes in one line.
pub(super) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
