//! The status of a VM, as `rekindle status` and `rekindle show` print it.

use crate::helpers;
use crate::journal::{Journal, Kind, Step};
use crate::lock;
use crate::rundir::RunDir;
use crate::state::State;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::vmm::Vmm;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::Duration;

/// Limit for a QEMU to report its run state.
const QMP_TIMEOUT: Duration = Duration::from_secs(2);

/// The state of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The guest runs.
    Running,
    /// QEMU runs but the guest does not; QEMU's name of the run state.
    Stopped(String),
    /// QEMU waits with empty RAM for a checkpoint.
    Prepared,
    /// QEMU runs, but a helper is missing or stopped. The text names it, and whether it is being restarted or how to resume
    /// it.
    Degraded(String),
    /// QEMU does not answer on its second QMP socket.
    Silent,
    /// A protector uses the QEMU's only monitor, so its run state is not known. The guest runs except for the pauses
    /// of checkpoints, unless its owner has stopped it.
    Protected,
    /// QEMU has ended.
    Ended,
    /// An operation runs, and at this moment no QEMU is recorded as running the guest. The text names the operation.
    Busy(String),
    /// The VM was suspended for a reboot of the host, and waits to be resumed.
    Suspended,
    /// An operation was interrupted.
    NeedsRecovery,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Running => f.pad("running"),
            Self::Stopped(why) => f.pad(&format!("stopped ({why})")),
            Self::Prepared => f.pad("prepared"),
            Self::Degraded(why) => f.pad(&format!("degraded ({why})")),
            Self::Silent => f.pad("silent"),
            Self::Protected => f.pad("protected"),
            Self::Ended => f.pad("ended"),
            Self::Busy(operation) => f.pad(&format!("busy ({operation})")),
            Self::Suspended => f.pad("suspended"),
            Self::NeedsRecovery => f.pad("needs recovery"),
        }
    }
}

/// Returns the status of a VM, without disturbing an operation on it.
///
/// # Errors
/// When the run directory cannot be read.
pub fn status(rundir: &RunDir) -> io::Result<Status> {
    loop {
        if let Some(status) = status_after_interruption(rundir)? {
            return Ok(status);
        }
        let state = State::read(rundir)?;
        if state.as_ref().and_then(|state| state.prepared.as_ref()).is_some_and(|prepared| prepared.vmm.is_alive()) {
            return Ok(lock::running_operation(rundir).map_or(Status::Prepared, Status::Busy));
        }
        let recorded_qemu = state.and_then(|state| state.vmm);
        let status = observe_guest(rundir, recorded_qemu.as_ref());
        // A QEMU that has ended may be the previous one, if an operation ended in the meantime.
        let gives_no_answer = matches!(status, Status::Ended | Status::Silent);
        if !gives_no_answer || State::read(rundir)?.and_then(|state| state.vmm) == recorded_qemu {
            return add_helper_problems(rundir, status);
        }
    }
}

/// Returns the status of a VM whose journal exists although no operation runs.
fn status_after_interruption(rundir: &RunDir) -> io::Result<Option<Status>> {
    // Read the journal first: an operation that ends in between removes its journal before it releases the lock.
    if Journal::read(rundir)?.is_none() || lock::running_operation(rundir).is_some() {
        return Ok(None);
    }
    let Some(Journal { operation, .. }) = Journal::read(rundir)? else { return Ok(None) };
    let is_suspended = matches!(operation.kind, Kind::HostWarm | Kind::HostSaved)
        && operation.step == Step::Saved
        && !operation.from.as_ref().is_some_and(Vmm::is_alive);
    Ok(Some(if is_suspended { Status::Suspended } else { Status::NeedsRecovery }))
}

/// Returns the status by what the recorded QEMU reports about its guest.
fn observe_guest(rundir: &RunDir, recorded_qemu: Option<&Vmm>) -> Status {
    let Some(vmm) = recorded_qemu.filter(|vmm| vmm.is_alive()) else {
        // There is no recorded QEMU between the end of the old one and the record of the new one.
        return lock::running_operation(rundir).map_or(Status::Ended, Status::Busy);
    };
    if vmm.monitor.is_some() && lock::protector(rundir).is_some() {
        return match rundir.unprotected().exists() {
            true => Status::Degraded("unprotected: libvirt passes no commands on".into()),
            false => Status::Protected,
        };
    }
    match vmm.connect_watcher(QMP_TIMEOUT).and_then(|mut qmp| run_state(&mut qmp)) {
        Ok(state) if state == "running" => Status::Running,
        Ok(state) => Status::Stopped(state),
        Err(_) => Status::Silent,
    }
}

/// Adds missing and stopped helpers to a status. A QEMU that does not answer may wait for data from such a helper.
fn add_helper_problems(rundir: &RunDir, status: Status) -> io::Result<Status> {
    if !matches!(status, Status::Running | Status::Silent) {
        return Ok(status);
    }
    Ok(match helpers::describe_problems(rundir)? {
        None => status,
        Some(problems) if status == Status::Silent => Status::Degraded(format!("{problems}; QEMU does not answer")),
        Some(problems) => Status::Degraded(problems),
    })
}
