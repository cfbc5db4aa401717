//! The reboot itself: the next guest is loaded from the latest candidate that may be used while the former one still runs; then that one is brought
//! to its end, and the next one goes on. Where there is none, or it cannot be loaded, the guest is booted cold: the former one has ended in order
//! by then, so nothing is lost either way.

use super::candidates::{chain, choose};
use super::next::{self, Went};
use super::{Outcome, Skipped};
use crate::os::Rebooted;
use crate::vmm::{self, Change, Failure, Left, Problem, RebootError, cold, switch};
use rekindle_memory::directory::PreviousRam;
use rekindle_protect::restore::Clock;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Step};
use rekindle_vm::life::{End, Ended};
use rekindle_vm::state::State;
use rekindle_vm::timeline::Phase;
use rekindle_vm::{disks, fault, ram};
use std::time::Instant;

const OPERATION: &str = "reboot os --how phase";

/// When the former guest had ended, by the host's clock in µs, and how that came about.
pub(super) type Over = (u64, Ended);

/// Reboot the guest of VM `name` from a candidate; `only` from this one; unless `unless` finds something that speaks against it once
/// nobody else is at work on the VM.
///
/// *Needs:* a VM whose definition keeps phases; nothing else at work on it; with `only` that it may be used.
/// *On success:* the guest goes on from the candidate, or boots: [`Outcome`] says which.
/// *On failure:* as [`Failure::left`] says.
pub(in crate::os) fn reboot(
    host: &Host,
    name: &str,
    only: Option<&str>,
    end: End,
    unless: impl FnOnce(&State) -> Option<Problem>,
) -> Result<Rebooted, Failure> {
    let began = Instant::now();
    let rundir = rekindle_vm::rundir::RunDir::new(&host.root, name);
    let against = |state: &State| unless(state).or_else(|| against(host, &rundir, state, only));
    let change = vmm::begin_again(host, name, OPERATION, against)?;
    let journal =
        change.open_journal(Kind::OsPhase).map_err(|error| Failure { left: Left::AsItWas, error: error.into() })?;
    let attempt = Attempt { change, only: only.map(str::to_owned), end, began, over: None, failed: Vec::new() };
    attempt.go(journal)
}

/// What speaks against it while the guest still runs. What is written until its end may still make a candidate void.
pub(in crate::os) fn against(
    host: &Host,
    rundir: &rekindle_vm::rundir::RunDir,
    state: &State,
    only: Option<&str>,
) -> Option<Problem> {
    let phases = &state.definition.phase.save;
    if phases.is_empty() {
        let why = "no phase of its boot is kept; name those that its guest announces under [phase], start the VM again, or use --how cold";
        return Some(Problem(why.into()));
    }
    if let Some(why) = super::unfit(&state.hardware) {
        return Some(Problem(format!("{why}; put `ram.dir` on a tmpfs, or use --how cold")));
    }
    let only = only?;
    if !phases.iter().any(|name| name == only) {
        let why = format!("it keeps no phase {only}; there are: {}", phases.join(", "));
        return Some(Problem(why));
    }
    match choose(host, rundir, state, Some(only), &[]) {
        (Some(_), _) => None,
        (None, skipped) => {
            let why = skipped.into_iter().next().map(|skipped| skipped.why).unwrap_or_default();
            Some(Problem(unusable(only, &format!("may not be used: {why}"))))
        }
    }
}

fn unusable(only: &str, why: &str) -> String {
    format!("candidate {only} {why}; leave --candidate out, or use --how cold")
}

/// A reboot under way.
struct Attempt {
    change: Change,
    only: Option<String>,
    end: End,
    began: Instant,
    /// The former guest has ended.
    over: Option<Over>,
    /// Candidates that could not be loaded after that.
    failed: Vec<Skipped>,
}

impl Attempt {
    fn go(mut self, mut journal: Journal) -> Result<Rebooted, Failure> {
        let needs_recovery = |error: RebootError| Failure { left: Left::NeedsRecovery, error: error.into() };
        loop {
            let Change { host, held, .. } = &self.change;
            let (chosen, skipped) = choose(host, &held.rundir, &held.state, self.only.as_deref(), &self.failed);
            let Some(good) = chosen else { return self.boot(journal, skipped).map_err(needs_recovery) };
            self.change.recorder.step("choose a candidate");
            fault::point("phase.prepare.chosen", Some(&self.change.old), None);
            let why = match next::load(&mut self.change, journal, &good, self.end, self.began, &mut self.over) {
                Ok(went) => return Ok(self.gone_on(went, good.name, skipped)),
                Err(why) => why,
            };
            journal = match self.undo().map_err(needs_recovery)? {
                Some(journal) => journal,
                None => return Err(needs_recovery(why)),
            };
            let why = chain(&why);
            match (&self.only, self.over) {
                (_, Some(_)) => {
                    tracing::warn!("candidate {} cannot be loaded: {why}", good.name);
                    self.failed.push(Skipped { name: good.name, why });
                }
                // For want of memory for two, perhaps: it is tried once more when the former one has ended.
                (None, None) => {
                    tracing::info!("candidate {} cannot be loaded while the former guest runs: {why}", good.name);
                    self.shut_down(&mut journal).map_err(needs_recovery)?;
                }
                (Some(only), None) => {
                    let problem = Problem(unusable(only, &format!("cannot be loaded: {why}")));
                    let error = RebootError::Against { name: self.change.name().into(), problem };
                    let closed = journal.close().map_err(self.change.file_error("operation.json"));
                    closed.map_err(needs_recovery)?;
                    return Err(Failure { left: Left::AsItWas, error: error.into() });
                }
            }
        }
    }

    fn shut_down(&mut self, journal: &mut Journal) -> Result<Over, RebootError> {
        let over = match self.over {
            Some(over) => over,
            None => cold::shut_down(&mut self.change, journal, self.end)?,
        };
        self.over = Some(over);
        Ok(over)
    }

    /// Boot it.
    fn boot(mut self, mut journal: Journal, skipped: Vec<Skipped>) -> Result<Rebooted, RebootError> {
        let (stopped, ended) = self.shut_down(&mut journal)?;
        let again = cold::boot(&mut self.change, journal, stopped, ended)?;
        let phase = Some(Outcome { candidate: None, skipped, clock: None, load_us: None });
        Ok(Rebooted { report: again.report, kept: None, ended: Some(ended), kexec: None, phase })
    }

    /// After a load that failed: the new QEMU is ended, and the journal goes on. None if that is for `recover`: the guest may have run in the new
    /// QEMU, or runs, or the former one does not come to its end.
    fn undo(&self) -> Result<Option<Journal>, RebootError> {
        let (rundir, hardware) = (&self.change.held.rundir, &self.change.held.state.hardware);
        let left = Journal::left_behind(rundir).map_err(self.change.file_error("operation.json"))?;
        let can_go_on = |step: Step| step == Step::Prepare || (step == Step::Suspend && self.over.is_some());
        let Some(mut journal) = left.filter(|left| can_go_on(left.operation.step)) else { return Ok(None) };
        switch::end_generation(rundir, journal.operation.generation)?;
        let _ = std::fs::remove_dir_all(rundir.vmm(journal.operation.generation).0);
        // They were told that the guest's memory is on its way.
        disks::filled(rundir);
        ram::forget_waiting(hardware)?;
        journal.operation.to = None;
        journal.write().map_err(self.change.file_error("operation.json"))?;
        Ok(Some(journal))
    }

    fn gone_on(self, went: Went, candidate: String, skipped: Vec<Skipped>) -> Rebooted {
        let Self { mut change, over, .. } = self;
        let (stopped, ended) = over.unwrap_or((went.resumed, Ended::Before));
        change.recorder.phase(Phase::Settle);
        went.former.into_iter().for_each(PreviousRam::give_back);
        change.recorder.step("give the former memory back");
        change.recorder.write(&change.held.rundir);
        let report = change.report(&went.vmm, &went.state, (stopped, went.resumed), None);
        let clock = Some(went.loaded.clock).filter(|clock| *clock != Clock::NoAgent);
        let phase = Some(Outcome { candidate: Some(candidate), skipped, clock, load_us: Some(went.loaded.us) });
        Rebooted { report, kept: None, ended: Some(ended), kexec: None, phase }
    }
}
