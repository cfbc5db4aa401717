//! The replacement of one QEMU, and its recovery.

use super::BareOptions;
use super::inspect::{BareGuest, inspect};
use crate::deferred_signals::DeferredSignals;
use crate::error::{Failure, RebootError};
use crate::interrupted::{Recovered, SilentQemuPolicy, continue_interrupted, restore_priorities};
use crate::unprepared::environment::vcpus;
use crate::unprepared::give::{Passwords, end_source, finish_move, give};
use crate::unprepared::hand_over::{Transferred, approach, hand_over};
use crate::unprepared::inspect::{Inspected, check_run_directory};
use crate::unprepared::recover::{GuestPlace, ResumedDestination, place, resume_destination};
use crate::unprepared::start::{Waiting, place_threads, start_destination};
use crate::unprepared::{
    DESTINATION_GENERATION, OPERATION, UnpreparedError, passed, passed_parts, pid_file, stand_in, vnc, way_back,
};
use crate::vmm::{QemuInfo, RUN_STATE_TIMEOUT, RebootReport, ReplacementPlan, VmOutcome, VmPlan};
use rekindle_handover::ram_transfer::RamTransfer;
use rekindle_handover::{Handover, priority};
use rekindle_kernel::surroundings::ThreadPlaces;
use rekindle_life::attach::AdoptedGuest;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{BareOperation, Journal, Kind, Step};
use rekindle_vm::lock::{OperationLock, RunStateLock};
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::timeline::Recorder;
use std::fs::{self, File};
use std::path::PathBuf;

/// Plans what [`replace`] would do. Changes nothing.
#[must_use]
pub fn plan(host: &Host, name: &str, options: &BareOptions) -> VmPlan {
    let plan = |guest: BareGuest| {
        let moves_in_place = guest.inspected.transfer == RamTransfer::InPlace;
        let (from, binary) = (guest.inspected.baseline.source_info(), guest.inspected.binary);
        ReplacementPlan { from, binary: binary.path, version: binary.version, moves_in_place }
    };
    VmPlan { name: name.into(), result: inspect(host, name, options).map(plan) }
}

/// Replaces the QEMU of the guest with the QMP socket of `options`. `name` is for the operation only.
///
/// *Needs:* root; the guest runs; no other program is connected to the socket.
/// *On success:* the guest runs in its destination QEMU, at the same sockets.
/// *On failure:* [`Failure::guest`] states the guest's status.
#[must_use]
pub fn replace(host: &Host, name: &str, options: &BareOptions) -> VmOutcome {
    VmOutcome { name: name.into(), result: try_replace(host, name, options) }
}

fn try_replace(host: &Host, name: &str, options: &BareOptions) -> Result<RebootReport, Failure> {
    let mut recorder = Recorder::new(name, OPERATION);
    let mut guest = inspect(host, name, options).map_err(Failure::unchanged)?;
    recorder.step("preflight");
    let (_lock, mut handover) = begin(host, &mut guest, recorder).map_err(Failure::unchanged)?;
    handover.pass("replace.prepare.journalled");
    let log = log_of(guest.inspected.baseline.adopted.pid);
    let rehearse = |handover: &Handover, destination, qmp: &mut Qmp| {
        vnc::rehearse(handover.name(), passed(handover)?, qmp)?;
        stand_in::rehearse(handover.name(), passed(handover)?, destination)
    };
    let waiting = match start_destination(&mut handover, &mut guest.inspected, log.as_deref(), rehearse) {
        Ok(waiting) => waiting,
        Err(error) => {
            // Its connection is closed: the way back needs the monitor.
            drop(guest);
            return Err(abandon(handover, error));
        }
    };
    handover.pass("replace.prepare.copied");
    let Inspected { baseline, qmp, transfer, .. } = guest.inspected;
    let is_moved_in_place = transfer == RamTransfer::InPlace;
    let Waiting { mut destination, mut taps, ram_files, places } = waiting;
    // Until the guest has all of its RAM, it needs this process.
    let _signals = is_moved_in_place.then(DeferredSignals::begin);
    let transferred = {
        let _boosts = (priority::boost_this_thread(), priority::boost_hand_over(handover.source(), &destination.vmm));
        approach(&mut handover, &baseline, qmp, &mut destination, &mut taps)
            .and_then(|approached| hand_over(&mut handover, approached, destination, &mut taps))
    };
    match transferred {
        Ok(transferred) => {
            finish(handover, baseline.source_info(), &places, transferred).map_err(Failure::needs_recovery)
        }
        Err(error) => {
            let failure = return_to_source(handover, &ram_files, error);
            taps.takeover.send_again_to_source();
            Err(failure)
        }
    }
}

/// Locks the guest and journals the operation.
fn begin(host: &Host, guest: &mut BareGuest, recorder: Recorder) -> Result<(OperationLock, Handover), RebootError> {
    let name = guest.name.to_string();
    let rundir = RunDir::new(&host.root, &name);
    host.create_run_dir(&rundir).map_err(RebootError::file(rundir.path()))?;
    let lock = OperationLock::acquire(&rundir, OPERATION).map_err(LifeError::from)?;
    // It was checked before, without the lock.
    check_run_directory(host, &name)?;
    match journal_operation(&rundir, guest, recorder) {
        Ok(handover) => Ok((lock, handover)),
        Err(error) => {
            let _ = rundir.remove();
            Err(error)
        }
    }
}

fn journal_operation(rundir: &RunDir, guest: &mut BareGuest, recorder: Recorder) -> Result<Handover, RebootError> {
    let BareGuest { name, monitor, pid_file, inspected } = guest;
    let adopted = &inspected.baseline.adopted;
    let source = Vmm {
        binary: adopted.binary.clone(),
        pid: adopted.pid,
        started: adopted.started,
        directory: rundir.vmm(DESTINATION_GENERATION - 1).0,
        monitor: Some(monitor.clone()),
        direct_monitors: None,
    };
    let failed = RebootError::file(&rundir.file("operation.json"));
    let mut journal =
        Journal::open(rundir, Kind::BareReplace, Some(source), DESTINATION_GENERATION).map_err(&failed)?;
    journal.operation.passed = Some(passed_parts(inspected));
    journal.operation.bare = Some(BareOperation { pid_file: pid_file.clone() });
    journal.write().map_err(&failed)?;
    // Written after the journal: without a state, the operation has started nothing.
    let vcpus = vcpus(&mut inspected.qmp)?.len() as u32;
    let adopted =
        AdoptedGuest { adopted: &inspected.baseline.adopted, foreign: None, generation: None, monitor, vcpus };
    let state = adopted.into_state(rundir, name);
    state.write(rundir).map_err(RebootError::file(&rundir.file("state.json")))?;
    Ok(Handover { rundir: rundir.clone(), state, journal, recorder })
}

/// Returns the file that is the QEMU's log: its standard error, if that is a file.
fn log_of(pid: u32) -> Option<PathBuf> {
    let path = fs::read_link(format!("/proc/{pid}/fd/2")).ok()?;
    path.is_file().then_some(path)
}

/// Ends the hand-over: the destination gets the sockets and the pid file, and the source is ended.
fn finish(
    mut handover: Handover,
    from: QemuInfo,
    places: &ThreadPlaces,
    transferred: Transferred,
) -> Result<RebootReport, RebootError> {
    let Transferred { mut running, stopped_host_us } = transferred;
    place_threads(places, running.vmm.process(), &mut running.qmp);
    let resumed_host_us = running.stage.resumed_host_us;
    let ram_move = running.stage.ram.take_move();
    running.begin_give_back(&mut handover)?;
    if let Some(ram_move) = &ram_move {
        ram_move.move_all(&handover);
    }
    give_back(&mut handover, &running.vmm, &mut running.qmp)?;
    let moved_in_place = finish_move(&mut handover, ram_move)?;
    let (destination, qmp) = (&running.vmm, &running.qmp);
    let report = RebootReport {
        name: handover.name().into(),
        stopped_us: resumed_host_us.saturating_sub(stopped_host_us),
        stop_host_us: stopped_host_us,
        resume_host_us: resumed_host_us,
        steps: handover.recorder.entries().to_vec(),
        from,
        to: QemuInfo { binary: destination.binary.clone(), version: Some(qmp.version().clone()), pid: destination.pid },
        memory: None,
        daemon_away_us: None,
        moved_in_place,
    };
    settle(handover, &running.vmm, &mut running.qmp)?;
    Ok(report)
}

/// Gives the destination what the guest's manager uses. Can be repeated.
fn give_back(handover: &mut Handover, destination: &Vmm, qmp: &mut Qmp) -> Result<(), RebootError> {
    give(handover, destination.process(), qmp, &Passwords::default())?;
    let pid_file = handover.journal.operation.bare.as_ref().and_then(|bare| bare.pid_file.clone());
    if let (Some(path), Some(source)) = (pid_file, handover.source()) {
        // Before the source ends: systemd reads the file then.
        if pid_file::names(&path, source.pid) {
            pid_file::rewrite(&path, destination.pid).map_err(RebootError::file(&path))?;
        }
    }
    handover.recorder.step("give back");
    Ok(())
}

fn settle(mut handover: Handover, destination: &Vmm, qmp: &mut Qmp) -> Result<(), RebootError> {
    end_source(&mut handover, destination, qmp)?;
    handover.rundir.remove().map_err(RebootError::file(handover.rundir.path()))
}

/// Handles a failure of the hand-over.
fn return_to_source(mut handover: Handover, ram_files: &[File], error: RebootError) -> Failure {
    if handover.journal.operation.step >= Step::Resume && !way_back::can_return(&mut handover, ram_files) {
        return Failure::needs_recovery(error);
    }
    abandon(handover, error)
}

/// Handles a failure before the decision: the guest continues in the source.
fn abandon(handover: Handover, error: RebootError) -> Failure {
    let name = handover.name().to_owned();
    let error = way_back::with_log(&handover, error);
    let was_stopped = handover.journal.operation.step >= Step::Suspend;
    match end_in_source(handover, way_back::SILENT_SOURCE) {
        Ok(Recovered::Ended) if was_stopped => Failure::unchanged(UnpreparedError::Lost { name }),
        Ok(Recovered::Ended) => Failure::unchanged(UnpreparedError::Ended { name }),
        Ok(_) => Failure::unchanged(error),
        Err(e) => {
            tracing::error!("{name}: cannot return the guest to its QEMU: {e}");
            Failure::needs_recovery(error)
        }
    }
}

/// Returns the guest to the source, and ends the operation. Can be repeated.
fn end_in_source(handover: Handover, policy: SilentQemuPolicy) -> Result<Recovered, RebootError> {
    let recovered = match way_back::return_guest(&handover, true, policy)? {
        Recovered::ShutOff => Recovered::Ended,
        other => other,
    };
    handover.rundir.remove().map_err(RebootError::file(handover.rundir.path()))?;
    Ok(recovered)
}

/// Returns whether `name` is a guest whose replacement was interrupted.
pub(crate) fn is_interrupted(host: &Host, name: &str) -> bool {
    let rundir = RunDir::new(&host.root, name);
    let is_replacement = Journal::read(&rundir)
        .is_ok_and(|journal| journal.is_some_and(|Journal { operation, .. }| operation.kind == Kind::BareReplace));
    // An attempt that was interrupted before it started anything has no state.
    is_replacement && State::read(&rundir).is_ok_and(|state| state.is_some())
}

/// Ends an interrupted replacement. Can be repeated.
///
/// # Errors
/// [`RebootError`], e.g. because a QEMU does not answer.
pub(crate) fn recover(host: &Host, name: &str, policy: SilentQemuPolicy) -> Result<Recovered, RebootError> {
    let (locked_vm, journal) = LockedVm::lock_even_if_interrupted(host, name, "recover")?;
    let Some(journal) = journal else { return Ok(Recovered::Nothing) };
    restore_priorities(&journal.operation);
    let _run_state = RunStateLock::acquire(&locked_vm.rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
    let mut handover = continue_interrupted(&locked_vm, journal);
    let _signals = handover.journal.operation.moved_ram.is_some().then(DeferredSignals::begin);
    match place(&handover, policy)? {
        GuestPlace::Source => end_in_source(handover, policy),
        GuestPlace::Destination(destination) => {
            let ResumedDestination { vmm, mut qmp, ram_move } = resume_destination(&mut handover, *destination)?;
            if handover.journal.operation.step < Step::Settle {
                give_back(&mut handover, &vmm, &mut qmp)?;
            }
            finish_move(&mut handover, ram_move)?;
            settle(handover, &vmm, &mut qmp)?;
            Ok(Recovered::Finished)
        }
        GuestPlace::Lost => {
            way_back::end_without_guest(&handover)?;
            handover.rundir.remove().map_err(RebootError::file(handover.rundir.path()))?;
            Ok(Recovered::Ended)
        }
    }
}
