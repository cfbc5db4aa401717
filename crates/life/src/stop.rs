//! `rekindle stop`: shuts a VM down and removes everything that Rekindle keeps of it.

use crate::shutdown::{Ended, has_shut_down, shut_down};
use rekindle_vm::cleanup::clean_up;
use rekindle_vm::disks;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind};
use rekindle_vm::lock::RunStateLock;
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::{PreparedError, State};
use std::time::Duration;

/// How long to wait for the end of a checkpoint.
const CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(30);

/// Shuts a VM down and removes everything that Rekindle keeps of it. The guest has `patience` to shut down, by default
/// its `shutdown_timeout`; if it is zero, the VM is powered off immediately.
///
/// `may_merge` is called after a clean shutdown of the guest. If it returns false, or the shutdown was not clean, the
/// redo logs of the VM's disks stay as they are.
///
/// *Needs:* no other operation on the VM. *On success:* only the VM's disks are left. *On failure:* the error names
/// what could not be removed; the same command can be repeated.
///
/// # Errors
/// [`LifeError`]; also [`LifeError::Attached`] for a running VM that Rekindle did not start.
pub fn stop(
    host: &Host,
    name: &str,
    patience: Option<Duration>,
    may_merge: impl FnOnce(&RunDir, &State) -> bool,
) -> Result<Ended, LifeError> {
    let vm = lock_to_stop(host, name)?;
    let journal = Journal::open(&vm.rundir, Kind::Stop, vm.state.vmm.clone(), vm.state.generation)
        .map_err(|source| LifeError::RunDir { name: name.into(), source })?;
    let _run_state = RunStateLock::acquire(&vm.rundir, CHECKPOINT_TIMEOUT)?;
    let patience = patience.unwrap_or_else(|| vm.state.definition.shutdown_timeout.as_duration());
    let mut had_shut_down = false;
    let ended = match vm.vmm() {
        Ok(vmm) => {
            had_shut_down = !patience.is_zero() && has_shut_down(vmm);
            shut_down(vmm, patience)?
        }
        Err(LifeError::Prepared(_)) => Ended::Prepared,
        Err(_) => Ended::Before,
    };
    // The file stays: until it is removed with the run directory, an interrupted stop can be recognized.
    drop(journal);
    // After a clean shutdown the newest version of the disks counts. Otherwise that of the last checkpoint may be
    // wanted.
    let is_clean = had_shut_down || matches!(ended, Ended::ByAgent | Ended::ByAcpi);
    if is_clean && may_merge(&vm.rundir, &vm.state) {
        disks::end_epochs(&vm.rundir, &vm.state.hardware);
    }
    clean_up(host, &vm.rundir, &vm.state)?;
    Ok(ended)
}

/// As [`stop`], but powers the VM off immediately. The redo logs of its disks stay as they are.
///
/// # Errors
/// As for [`stop`].
pub fn stop_immediately(host: &Host, name: &str) -> Result<Ended, LifeError> {
    stop(host, name, Some(Duration::ZERO), |_, _| false)
}

/// The object that [`stop`] would stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stoppable {
    /// A guest; the process number is its QEMU's.
    Guest(u32),
    /// A QEMU that waits for a checkpoint, by its process number.
    Prepared(u32),
    /// Files of a VM whose QEMU has ended.
    Files,
}

/// Returns what [`stop`] would stop. Nothing is changed.
///
/// # Errors
/// As [`stop`], before it has stopped anything.
pub fn stoppable(host: &Host, name: &str) -> Result<Stoppable, LifeError> {
    let vm = lock_to_stop(host, name)?;
    Ok(match vm.vmm() {
        Ok(vmm) => Stoppable::Guest(vmm.pid),
        Err(LifeError::Prepared(PreparedError { pid, .. })) => Stoppable::Prepared(pid),
        Err(_) => Stoppable::Files,
    })
}

fn lock_to_stop(host: &Host, name: &str) -> Result<LockedVm, LifeError> {
    // An interrupted operation no longer matters: all of its QEMUs are ended.
    let (vm, _interrupted) = LockedVm::lock_even_if_interrupted(host, name, "stop")?;
    if vm.vmm().is_ok() {
        vm.refuse_attached("shutting it down")?;
    }
    Ok(vm)
}
