//! A QEMU that does not answer is not a dead one: it may run its guest, and is never killed for its silence unless the user says so.

use super::RebootError;
use rekindle_qemu::program::Program;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::{Vmm, VmmError};
use rekindle_vm::disks::DisksError;
use rekindle_vm::journal::{Kind, Operation, Step};
use rekindle_vm::life::{Held, LifeError, processes_of, run_state};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long one of the two sockets may take to answer before the other one is tried.
const TURN: Duration = Duration::from_secs(2);

/// How `recover` deals with a QEMU that runs and does not answer.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// How long it may take to answer.
    pub wait: Duration,
    /// Kill it then. Otherwise the recovery fails and changes nothing.
    pub force: bool,
}

impl Default for Patience {
    fn default() -> Self {
        Self { wait: Duration::from_secs(60), force: false }
    }
}

impl RebootError {
    /// Whether a recovery that failed for this reason has to be repeated.
    #[must_use]
    pub fn needs_recovery(&self) -> bool {
        let silent = |e: &QmpError| {
            matches!(e, QmpError::NoGreeting { .. } | QmpError::Timeout { .. } | QmpError::TooLong { .. })
        };
        let hangs = |e: &VmmError| match e {
            VmmError::Silent { .. } => true,
            VmmError::Qmp(e) => silent(e),
            _ => false,
        };
        match self {
            Self::Silent { .. } | Self::Kexec { .. } => true,
            Self::Move(e) => e.needs_recovery(),
            Self::Vmm(e) | Self::Life(LifeError::Vmm(e)) => hangs(e),
            Self::Qmp(e) | Self::Life(LifeError::Qmp(e)) => silent(e),
            Self::Life(LifeError::Disks(e)) => matches!(e, DisksError::Silent { .. }),
            _ => false,
        }
    }
}

/// Waits until each QEMU answers that the recovery of an operation relies on.
///
/// *On success:* each of them answers, has ended, or was killed because of [`Patience::force`].
pub(super) fn require(held: &Held, operation: &Operation, patience: Patience) -> Result<(), RebootError> {
    // What has not run a guest yet, or is to be removed, is ended without being asked.
    if matches!(operation.kind, Kind::Stop | Kind::Run | Kind::Prepare) {
        return Ok(());
    }
    let name = held.rundir.name();
    if operation.step >= Step::Resume
        && let Some(new) = destination(held, operation)?
        && wait(name, &new, patience)?
    {
        // The guest is that one's, whatever the other one does.
        return Ok(());
    }
    if let Some(old) = operation.from.as_ref().or(held.state.vmm.as_ref()) {
        wait(name, old, patience)?;
    }
    Ok(())
}

/// The QEMU that the operation has started, recorded or not.
fn destination(held: &Held, operation: &Operation) -> Result<Option<Vmm>, RebootError> {
    match operation.to.clone().filter(Vmm::is_alive) {
        Some(recorded) => Ok(Some(recorded)),
        None => of_generation(held, operation.generation),
    }
}

/// The QEMU of a generation of the VM.
pub(super) fn of_generation(held: &Held, generation: u32) -> Result<Option<Vmm>, RebootError> {
    let directory = held.rundir.vmm(generation);
    let failed = |source| RebootError::File { path: directory.0.clone(), source };
    let Some(process) = processes_of(&directory).map_err(failed)?.into_iter().find(|process| process.is_alive()) else {
        return Ok(None);
    };
    // As it was started, if that is on record: the program of the process may be a loader.
    let recorded = held.state.vmm.as_ref().filter(|vmm| vmm.process() == process).map(|vmm| vmm.binary.clone());
    let binary = recorded.or_else(|| Some(Program::of(process).ok()?.start)).unwrap_or_else(|| PathBuf::from("qemu"));
    Ok(Some(Vmm { binary, pid: process.pid, started: process.started, directory: directory.0, monitor: None }))
}

/// Waits until a QEMU answers. `false`: it has ended, or was killed because of [`Patience::force`].
///
/// # Errors
/// [`RebootError::Silent`]; nothing was changed.
pub(super) fn wait(name: &str, vmm: &Vmm, patience: Patience) -> Result<bool, RebootError> {
    let watched = |source: io::Error| RebootError::File { path: vmm.directory.clone(), source };
    let answers = |qmp: &mut Qmp| run_state(qmp).is_ok();
    let deadline = Instant::now() + patience.wait;
    let mut reported = false;
    loop {
        if vmm.process().wait_end(Duration::ZERO).map_err(watched)? {
            return Ok(false);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let turn = left.min(TURN).max(Duration::from_millis(1));
        // Another client may be connected to one of them, and QEMU serves one at a time.
        if vmm.connect(turn).is_ok_and(|mut qmp| answers(&mut qmp))
            || vmm.watch(turn).is_ok_and(|mut qmp| answers(&mut qmp))
        {
            return Ok(true);
        }
        if left.is_zero() {
            break;
        }
        if !std::mem::replace(&mut reported, true) {
            tracing::warn!(
                "{name}: QEMU (process {}) runs and does not answer; waiting up to {} s for it",
                vmm.pid,
                patience.wait.as_secs()
            );
        }
    }
    if vmm.process().wait_end(Duration::ZERO).map_err(watched)? {
        return Ok(false);
    }
    if !patience.force {
        return Err(RebootError::Silent { name: name.into(), pid: vmm.pid, waited: patience.wait });
    }
    tracing::warn!("{name}: QEMU (process {}) does not answer and is killed (--force)", vmm.pid);
    vmm.kill().map_err(watched)?;
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_that_sends_too_much_has_not_answered() {
        let error = RebootError::Qmp(QmpError::TooLong { during: "query-status".into() });
        assert!(error.needs_recovery());
    }
}
