//! Finishes or undoes an interrupted restore or its preparation. The checkpoint is still in the store.

use super::RestoreError;
use rekindle_handover::{Destination, Handover};
use rekindle_qemu::vmm::{self, Vmm};
use rekindle_vm::cleanup::clean_up;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{End, JOURNAL_FILE, Journal, Step};
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::timeline::Recorder;

/// The result of recovering a restore or its preparation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The guest runs; or, after a preparation, a QEMU waits.
    Finished,
    /// Nothing is left of the VM.
    Removed,
}

/// Finishes a restore if its guest may have run and QEMU is alive; otherwise undoes it.
///
/// # Errors
/// [`RestoreError`]: the recovery can be repeated.
pub fn recover_restore(host: &Host, held: &LockedVm, journal: Journal) -> Result<Outcome, RestoreError> {
    let destination = journal.operation.to.clone().filter(Vmm::is_alive);
    let Some(vmm) = destination.filter(|_| journal.operation.step >= Step::Resume) else {
        clean_up(host, &held.rundir, &held.state)?;
        return Ok(Outcome::Removed);
    };
    let recorder = Recorder::new(held.rundir.name(), "recover");
    let mut handover = Handover { rundir: held.rundir.clone(), state: held.state.clone(), journal, recorder };
    let qmp = vmm.connect(vmm::START_TIMEOUT)?;
    let loaded = Destination::adopt(vmm, qmp)?.wait_for_interrupted_load()?;
    loaded.commit(&mut handover, "resume")?.settle(handover, "record")?;
    Ok(Outcome::Finished)
}

/// Finishes a preparation if its QEMU was recorded; otherwise undoes it.
///
/// # Errors
/// [`RestoreError`]: the recovery can be repeated.
pub fn recover_prepare(host: &Host, held: &LockedVm, journal: Journal) -> Result<Outcome, RestoreError> {
    if let Err(LifeError::Prepared { .. }) = held.vmm() {
        let path = held.rundir.file(JOURNAL_FILE);
        journal.close(End::Done).map_err(|source| RestoreError::Journal { path, source })?;
        return Ok(Outcome::Finished);
    }
    clean_up(host, &held.rundir, &held.state)?;
    Ok(Outcome::Removed)
}
