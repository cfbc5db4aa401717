//! The two ends of every hand-over: return to the source QEMU, or settle on the destination.

use super::handover;
use super::{Failure, GuestStatus, RebootError};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::fault;
use rekindle_vm::journal::Journal;
use rekindle_vm::qemu::processes_of;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde_json::Value;
use std::fs;
use std::time::Duration;

/// Ends every QEMU of `generation`, recorded or not.
pub(crate) fn end_generation(rundir: &RunDir, generation: u32) -> Result<(), RebootError> {
    let file = |source| RebootError::File { path: rundir.path().to_owned(), source };
    for process in processes_of(&rundir.vmm(generation)).map_err(file)? {
        process.kill().map_err(file)?;
        process.wait_end(Duration::from_secs(10)).map_err(file)?;
    }
    Ok(())
}

/// Returns to the source QEMU: ends the destination, then resumes the guest in the source.
///
/// *Needs:* the guest has not run in the destination QEMU.
pub(crate) fn return_to_source(
    rundir: &RunDir,
    source_qemu: &Vmm,
    journal: Journal,
    run: bool,
) -> Result<(), RebootError> {
    let file = |source| RebootError::File { path: rundir.path().to_owned(), source };
    let generation = journal.operation.generation;
    end_generation(rundir, generation)?;
    let mut qmp = source_qemu.connect(vmm::START)?;
    if run && rekindle_vm::qemu::run_state(&mut qmp)? != "running" {
        cont_with_retries(&mut qmp)?;
    }
    let _ = fs::remove_dir_all(rundir.vmm(generation).0);
    handover::remove_stream(rundir);
    journal.close().map_err(file)
}

/// Sends `cont`, and repeats it while QEMU rejects it: QEMU cancels a save whose reader has closed only a moment later.
fn cont_with_retries(qmp: &mut Qmp) -> Result<(), RebootError> {
    let mut tries = 0;
    loop {
        match qmp.execute::<Value>("cont", ()) {
            Ok(_) => return Ok(()),
            Err(QmpError::Refused { .. }) if tries < 100 => {
                tries += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// Handles a failure before the decision for the destination QEMU. Returns to the source if it lives. Otherwise the
/// guest is lost or, if its state is saved, `recover` can resume it.
pub(crate) fn abandon(rundir: &RunDir, source_qemu: &Vmm, journal: Journal, run: bool, error: RebootError) -> Failure {
    let saved = journal.operation.saved.is_some();
    if !source_qemu.is_alive() {
        // Nothing runs the guest; `recover` decides whether it can run again.
        let _ = end_generation(rundir, journal.operation.generation);
        let error = if saved { error } else { RebootError::Lost { name: rundir.name().into() } };
        return Failure::new(GuestStatus::NeedsRecovery, error);
    }
    match return_to_source(rundir, source_qemu, journal, run) {
        Ok(()) => Failure::new(GuestStatus::Unchanged, error),
        Err(e) => {
            tracing::error!("{}: cannot resume the guest in its source QEMU: {e}", rundir.name());
            Failure::new(GuestStatus::NeedsRecovery, error)
        }
    }
}

/// Settles on the destination QEMU, which runs the guest: ends the source and records the destination.
pub(crate) fn settle(
    rundir: &RunDir,
    mut state: State,
    source_qemu: Option<&Vmm>,
    destination_qemu: &Vmm,
    qmp: &Qmp,
    journal: Journal,
    faults: Option<(&'static str, &'static str)>,
) -> Result<State, RebootError> {
    let file = |source| RebootError::File { path: rundir.path().to_owned(), source };
    if let Some(source_qemu) = source_qemu {
        source_qemu.kill().map_err(file)?;
    }
    let recorded = state.generation == journal.operation.generation;
    // If an earlier attempt recorded the destination and was interrupted before it closed the journal, the state's
    // generation is the destination's: do not end it.
    if !recorded {
        end_generation(rundir, state.generation)?;
    }
    if let Some((gone, _)) = faults {
        fault::point(gone, source_qemu, Some(destination_qemu));
    }
    if !recorded {
        let _ = fs::remove_dir_all(rundir.vmm(state.generation).0);
        let before = state.vmm.as_ref().map(|vmm| vmm.binary.clone());
        if before.as_ref() != Some(&destination_qemu.binary) {
            state.previous = before;
        }
    }
    state.generation = journal.operation.generation;
    state.vmm = Some(destination_qemu.clone());
    state.version = Some(qmp.version().clone());
    state.write(rundir).map_err(file)?;
    if let Some((_, point)) = faults {
        fault::point(point, source_qemu, Some(destination_qemu));
    }
    handover::remove_stream(rundir);
    journal.close().map_err(file)?;
    Ok(state)
}
