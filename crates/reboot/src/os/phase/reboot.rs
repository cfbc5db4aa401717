//! The reboot by phase. A destination QEMU is prepared with the latest usable candidate while the previous guest still
//! runs; then the previous guest is ended and the new one resumes. If there is no candidate, or it cannot be loaded,
//! the guest is booted instead. By then the previous guest has been shut down cleanly, so nothing is lost in either
//! case.

use super::candidates::{CandidateChoice, choose, one_line};
use super::successor::{self, ResumedGuest, Succession};
use super::{PhaseOutcome, SkippedCandidate};
use crate::error::{Failure, Problem, RebootError};
use crate::os::OsRebootReport;
use crate::vmm::cold::{self, Shutdown};
use crate::vmm::{self, Replacement};
use rekindle_handover::Handover;
use rekindle_handover::after_resume::ClockOutcome;
use rekindle_life::shutdown::{EndMethod, Ended};
use rekindle_memory::directory::PreviousRam;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{End, Kind, Step};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::Phase;
use rekindle_vm::{disks, ram};
use std::time::Instant;

const OPERATION: &str = "reboot --how phase";

/// Reboots the guest of VM `name` from a candidate; if `only_phase` is given, from the candidate of that phase. If
/// `find_other_problem` returns a problem for the locked VM, fails and changes nothing.
///
/// *Needs:* a VM whose definition saves phases; no other operation on the VM; a usable candidate `only_phase`, if given.
/// *On success:* the guest continues from the candidate, or boots: [`PhaseOutcome::candidate`] states which.
/// *On failure:* [`Failure::guest`] states whether the guest runs.
pub(in crate::os) fn reboot(
    host: &Host,
    name: &str,
    only_phase: Option<&str>,
    end: EndMethod,
    find_other_problem: impl FnOnce(&State) -> Option<Problem>,
) -> Result<OsRebootReport, Failure> {
    let started = Instant::now();
    let rundir = RunDir::new(&host.root, name);
    let find_any_problem =
        |state: &State| find_other_problem(state).or_else(|| find_problem(host, &rundir, state, only_phase));
    let mut replacement = vmm::begin_cold_reboot(host, name, OPERATION, find_any_problem)?;
    let handover = replacement.begin_handover(Kind::OsPhase).map_err(Failure::unchanged)?;
    let reboot = PhaseReboot {
        replacement,
        only_phase: only_phase.map(str::to_owned),
        end,
        started,
        shutdown: None,
        failed: Vec::new(),
    };
    reboot.run(handover)
}

/// Returns the problem that prevents the reboot, checked while the guest still runs. Writes of the guest until its end
/// may still make a candidate unusable.
pub(in crate::os) fn find_problem(
    host: &Host,
    rundir: &RunDir,
    state: &State,
    only_phase: Option<&str>,
) -> Option<Problem> {
    let phases = &state.definition.phase.save;
    if phases.is_empty() {
        let why = "no phase of its boot is saved; list the phases that its guest announces under [phase] and restart \
                   the VM, or use --how cold";
        return Some(Problem(why.into()));
    }
    if let Some(why) = super::why_unfit(&state.hardware) {
        return Some(Problem(format!("{why}; put `ram.dir` on a tmpfs, or use --how cold")));
    }
    let only_phase = only_phase?;
    if !phases.iter().any(|name| name == only_phase) {
        let why = format!("it saves no phase {only_phase}; its phases are: {}", phases.join(", "));
        return Some(Problem(why));
    }
    let CandidateChoice { chosen, skipped } = choose(host, rundir, state, Some(only_phase), &[]);
    if chosen.is_some() {
        return None;
    }
    let why = skipped.into_iter().next().map(|skipped| skipped.why).unwrap_or_default();
    Some(unusable(only_phase, &format!("may not be used: {why}")))
}

fn unusable(only_phase: &str, why: &str) -> Problem {
    Problem(format!("candidate {only_phase} {why}; omit --candidate, or use --how cold"))
}

/// A reboot in progress.
struct PhaseReboot {
    replacement: Replacement,
    only_phase: Option<String>,
    end: EndMethod,
    /// When the reboot command started.
    started: Instant,
    /// Set once the previous guest has ended.
    shutdown: Option<Shutdown>,
    /// Candidates that could not be loaded although the previous guest had ended.
    failed: Vec<SkippedCandidate>,
}

impl PhaseReboot {
    /// Tries one candidate after the other; boots the guest if none can be loaded.
    fn run(mut self, mut handover: Handover) -> Result<OsRebootReport, Failure> {
        loop {
            let Replacement { host, locked_vm, .. } = &self.replacement;
            let CandidateChoice { chosen, skipped } =
                choose(host, &locked_vm.rundir, &locked_vm.state, self.only_phase.as_deref(), &self.failed);
            let Some(candidate) = chosen else {
                return self.boot(handover, skipped).map_err(Failure::needs_recovery);
            };
            handover.recorder.step("choose a candidate");
            handover.pass("phase.prepare.chosen");
            let succession = Succession { candidate: &candidate, end: self.end, started: self.started };
            let error = match successor::load(&mut self.replacement, &mut handover, &succession, &mut self.shutdown) {
                Ok(running) => {
                    let resumed = running.settle(handover).map_err(Failure::needs_recovery)?;
                    return Ok(self.report(resumed, candidate.name, skipped));
                }
                Err(error) => error,
            };
            handover = match self.undo(handover).map_err(Failure::needs_recovery)? {
                Some(handover) => handover,
                None => return Err(Failure::needs_recovery(error)),
            };
            let why = one_line(&error);
            match (&self.only_phase, self.shutdown) {
                (_, Some(_)) => {
                    tracing::warn!("cannot load candidate {}: {why}", candidate.name);
                    self.failed.push(SkippedCandidate { name: candidate.name, why });
                }
                // There may have been no memory for two guests: try once more after the previous guest has ended.
                (None, None) => {
                    tracing::info!("cannot load candidate {} while the previous guest runs: {why}", candidate.name);
                    self.shut_down(&mut handover).map_err(Failure::needs_recovery)?;
                }
                (Some(only_phase), None) => {
                    let problem = unusable(only_phase, &format!("cannot be loaded: {why}"));
                    let closed =
                        handover.journal.close(End::Undone).map_err(self.replacement.file_error("operation.json"));
                    closed.map_err(Failure::needs_recovery)?;
                    let name = self.replacement.name().into();
                    return Err(Failure::unchanged(RebootError::Prevented { name, problem }));
                }
            }
        }
    }

    /// Ends the previous guest, unless it has ended.
    fn shut_down(&mut self, handover: &mut Handover) -> Result<Shutdown, RebootError> {
        let shutdown = match self.shutdown {
            Some(shutdown) => shutdown,
            None => cold::shut_down(&mut self.replacement, handover, self.end)?,
        };
        self.shutdown = Some(shutdown);
        Ok(shutdown)
    }

    fn boot(mut self, mut handover: Handover, skipped: Vec<SkippedCandidate>) -> Result<OsRebootReport, RebootError> {
        let shutdown = self.shut_down(&mut handover)?;
        let booted = cold::boot_again(&self.replacement, handover, shutdown)?;
        let phase = Some(PhaseOutcome { candidate: None, skipped, clock: None, load_us: None });
        Ok(OsRebootReport { report: booted.report, kept: None, ended: Some(shutdown.ended), kexec: None, phase })
    }

    /// Undoes a failed load: ends the destination QEMU and resets the journal. Returns `None` if `recover` must decide,
    /// because the guest may run in the destination, or the previous guest has not ended.
    fn undo(&self, mut handover: Handover) -> Result<Option<Handover>, RebootError> {
        let can_continue = match handover.journal.operation.step {
            Step::Prepare => true,
            Step::Suspend => self.shutdown.is_some(),
            Step::Saved | Step::Resume | Step::GiveBack | Step::Settle => false,
        };
        if !can_continue {
            return Ok(None);
        }
        handover.discard_destination()?;
        // The disk servers were notified that the guest's memory is being loaded; end that state.
        disks::notify_filled(&handover.rundir);
        ram::remove_waiting(&handover.state.hardware)?;
        handover.journal.operation.to = None;
        handover.write_journal()?;
        Ok(Some(handover))
    }

    fn report(self, resumed: ResumedGuest, candidate: String, skipped: Vec<SkippedCandidate>) -> OsRebootReport {
        let Self { replacement, shutdown, .. } = self;
        let ResumedGuest { mut settled, clock, load_us, previous_ram } = resumed;
        let already_ended = Shutdown { host_us: settled.resumed_host_us, ended: Ended::Before };
        let Shutdown { host_us: stopped_host_us, ended } = shutdown.unwrap_or(already_ended);
        settled.recorder.phase(Phase::Settle);
        previous_ram.into_iter().for_each(PreviousRam::release);
        settled.recorder.step("free the previous RAM");
        settled.recorder.write(&replacement.locked_vm.rundir);
        let report = replacement.report(&settled, stopped_host_us);
        let clock = Some(clock).filter(|clock| *clock != ClockOutcome::NoAgent);
        let phase = Some(PhaseOutcome { candidate: Some(candidate), skipped, clock, load_us: Some(load_us) });
        OsRebootReport { report, kept: None, ended: Some(ended), kexec: None, phase }
    }
}
