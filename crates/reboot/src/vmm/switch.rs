//! The two ends that every change of VMMs comes to: back to the old one, or on with the new.

use super::handover;
use super::{Failure, Left, RebootError};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::fault;
use rekindle_vm::journal::Journal;
use rekindle_vm::life::processes_of;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use serde_json::Value;
use std::fs;
use std::time::Duration;

/// End every QEMU of `generation`, also one that was started but not written down.
pub(crate) fn end_generation(rundir: &RunDir, generation: u32) -> Result<(), RebootError> {
    let file = |source| RebootError::File { path: rundir.path().to_owned(), source };
    for process in processes_of(&rundir.vmm(generation)).map_err(file)? {
        process.kill().map_err(file)?;
        process.wait_end(Duration::from_secs(10)).map_err(file)?;
    }
    Ok(())
}

/// Back to the old QEMU: the new one is ended first, then the old one goes on.
///
/// *Needs:* the guest has not run in the new QEMU.
pub(crate) fn back(rundir: &RunDir, old: &Vmm, journal: Journal, run: bool) -> Result<(), RebootError> {
    let file = |source| RebootError::File { path: rundir.path().to_owned(), source };
    let generation = journal.operation.generation;
    end_generation(rundir, generation)?;
    let mut qmp = old.connect(vmm::START)?;
    if run && rekindle_vm::life::run_state(&mut qmp)? != "running" {
        continue_patiently(&mut qmp)?;
    }
    let _ = fs::remove_dir_all(rundir.vmm(generation).0);
    handover::forget(rundir);
    journal.close().map_err(file)
}

/// `cont`, tried again while QEMU says no: a state being saved when its reader went away is given up a moment later.
fn continue_patiently(qmp: &mut Qmp) -> Result<(), RebootError> {
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

/// After a failure before the decision for the new QEMU: back if the old one lives, else the guest is lost or, where
/// its state is saved, for `recover` to start again.
pub(crate) fn give_up(rundir: &RunDir, old: &Vmm, journal: Journal, run: bool, error: RebootError) -> Failure {
    let saved = journal.operation.saved.is_some();
    if !old.is_alive() {
        // Nothing runs the guest; whether it can be run again is for `recover`.
        let _ = end_generation(rundir, journal.operation.generation);
        let error = if saved { error } else { RebootError::Lost { name: rundir.name().into() } };
        return Failure::new(Left::NeedsRecovery, error);
    }
    match back(rundir, old, journal, run) {
        Ok(()) => Failure::new(Left::AsItWas, error),
        Err(e) => {
            tracing::error!("going back to the old QEMU failed: {e}");
            Failure::new(Left::NeedsRecovery, error)
        }
    }
}

/// On with the new QEMU, which runs the guest: the old one is ended, the new one recorded.
pub(crate) fn settle(
    rundir: &RunDir,
    mut state: State,
    old: Option<&Vmm>,
    new: &Vmm,
    qmp: &Qmp,
    journal: Journal,
    faults: Option<(&'static str, &'static str)>,
) -> Result<State, RebootError> {
    let file = |source| RebootError::File { path: rundir.path().to_owned(), source };
    if let Some(old) = old {
        old.kill().map_err(file)?;
    }
    let recorded = state.generation == journal.operation.generation;
    // Recorded already, and cut off before the journal was closed: the "old" generation of the state is the new one.
    if !recorded {
        end_generation(rundir, state.generation)?;
    }
    if let Some((gone, _)) = faults {
        fault::point(gone, old, Some(new));
    }
    if !recorded {
        let _ = fs::remove_dir_all(rundir.vmm(state.generation).0);
        let before = state.vmm.as_ref().map(|vmm| vmm.binary.clone());
        if before.as_ref() != Some(&new.binary) {
            state.previous = before;
        }
    }
    state.generation = journal.operation.generation;
    state.vmm = Some(new.clone());
    state.version = Some(qmp.version().clone());
    state.write(rundir).map_err(file)?;
    if let Some((_, point)) = faults {
        fault::point(point, old, Some(new));
    }
    handover::forget(rundir);
    journal.close().map_err(file)?;
    Ok(state)
}
