//! Stops the VM on a node: takes a last checkpoint, from which the guest can resume, and ends QEMU; or shuts the guest
//! down cleanly.

use crate::loops;
use crate::monitor::{has_shut_down, pause_at_shutdown, request_shutdown};
use crate::resource::Resource;
use rekindle_life::shutdown::Ended;
use rekindle_life::shutdown::{end_operation, pull_the_plug};
use rekindle_life::stop;
use rekindle_protect::owned::OwnerRecord;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Operation, Step};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
use serde::{Deserialize, Serialize};
use std::thread;
use std::time::{Duration, Instant};

/// Percentage of the time for the guest's last checkpoint or shutdown: the rest is for ending the VM's processes.
const GUEST_SHARE: u32 = 60;
/// Percentage of the guest's time for a shutdown: the rest is for the last checkpoint of a guest that does not shut
/// down.
const SHUTDOWN_SHARE: u32 = 80;
/// Percentage of the guest's time in which the protector may finish a checkpoint and end by itself. If the protector is
/// killed, all of the guest's memory must be read again.
const PROTECTOR_SHARE: u32 = 50;

/// How long a QEMU may take to report that its guest has shut down.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How a guest is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StopMethod {
    /// Take a last checkpoint and end QEMU: the next start, on any node, resumes the guest.
    #[default]
    Suspend,
    /// Shut the guest down: the next start boots it.
    ShutDown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StopResult {
    /// The method that took effect: a guest that does not shut down is suspended.
    pub how: StopMethod,
    /// How QEMU ended.
    pub ended: Ended,
    /// The reason why there is no last checkpoint. The guest will then resume from the previous one.
    pub lost: Option<String>,
}

/// Ends every process of the VM on this node, by `deadline`.
///
/// *Needs:* nothing. *On success:* nothing of the VM runs on this node; the run directory is removed.
/// *On failure:* a process could not be ended. The cluster manager has to fence this node.
///
/// # Errors
/// [`LifeError`]: a process still runs, or a file cannot be removed.
pub fn stop(host: &Host, resource: &Resource, how: StopMethod, deadline: Instant) -> Result<StopResult, LifeError> {
    let rundir = RunDir::new(&host.root, resource.name.as_str());
    if !rundir.exists() {
        return Ok(StopResult { how, ended: Ended::Before, lost: None });
    }
    let all = deadline.saturating_duration_since(Instant::now());
    let guest = Instant::now() + all * GUEST_SHARE / 100;
    if how == StopMethod::ShutDown && !has_shut_down(&rundir) {
        // The protector continues meanwhile: a guest that does not shut down serves its clients, and its network output
        // may be held.
        ask_to_shut_down(&rundir, Instant::now() + all * GUEST_SHARE / 100 * SHUTDOWN_SHARE / 100);
    }
    let now = Instant::now();
    if let Err(e) = loops::end(&rundir, now + guest.saturating_duration_since(now) * PROTECTOR_SHARE / 100) {
        tracing::warn!("{}: its protector does not end: {e}", resource.name);
    }
    let mut reported = has_shut_down(&rundir) && report_shutdown(&rundir);
    // A guest that this node still owns gets a last checkpoint.
    if has_unsettled_move(&rundir)
        && let Err(why) = loops::recover(&rundir, guest)
    {
        tracing::warn!("{}: cannot settle its interrupted move: {why}", resource.name);
    }
    if !rundir.exists() {
        return Ok(StopResult { how, ended: Ended::Before, lost: None });
    }
    let status = status::status(&rundir);
    let runs = matches!(status, Ok(Status::Running | Status::Degraded(_) | Status::Stopped(_) | Status::Protected));
    let shut_down = has_shut_down(&rundir);
    let lost = match status {
        Ok(Status::Silent) => Some("its QEMU does not answer".into()),
        _ if runs && !shut_down => loops::take_last_checkpoint(&rundir, resource, guest).err(),
        _ => None,
    };
    let how = if runs && !shut_down { StopMethod::Suspend } else { how };
    if let Some(why) = &lost {
        tracing::error!(
            "{}: no last checkpoint was taken, so it will resume from the previous one: {why}",
            resource.name
        );
    }
    if !shut_down {
        // No later work of the guest can be in a checkpoint, whether or not the last one was taken.
        force_off(&rundir)?;
    }
    // Do not wait for the lock's holder. Only a QEMU whose guest has shut down gets time to confirm that.
    let patience = if shut_down { ANSWER_TIMEOUT } else { Duration::ZERO };
    let stopped = stop::stop(host, resource.name.as_str(), Some(patience), |rundir, _| {
        // Report the shutdown only once: afterwards another node may own the store.
        reported = reported || report_shutdown(rundir);
        reported
    })
    .or_else(|e| {
        tracing::warn!("{}: {e}; killing its QEMU", resource.name);
        force_off(&rundir)?;
        stop::stop_immediately(host, resource.name.as_str())
    });
    match stopped {
        Ok(ended) => Ok(StopResult { how, ended, lost }),
        Err(LifeError::Unknown { .. }) => Ok(StopResult { how, ended: Ended::Before, lost }),
        Err(e) => Err(e),
    }
}

/// Kills every process of the VM. If an operation holds the VM's lock and does not end, it is killed, too.
fn force_off(rundir: &RunDir) -> Result<(), LifeError> {
    match pull_the_plug(rundir) {
        Err(LifeError::Lock(e)) => {
            tracing::warn!("{}: {e}", rundir.name());
            end_operation(rundir)?;
            pull_the_plug(rundir)
        }
        other => other,
    }
}

/// Requests a shutdown of the guest, and waits until `deadline` for it.
fn ask_to_shut_down(rundir: &RunDir, deadline: Instant) {
    if let Err(e) = pause_at_shutdown(rundir).and_then(|()| request_shutdown(rundir)) {
        tracing::warn!("{}: cannot request its shutdown: {e}", rundir.name());
        return;
    }
    let runs = |status: &Status| matches!(status, Status::Running | Status::Degraded(_) | Status::Stopped(_));
    while Instant::now() < deadline && status::status(rundir).is_ok_and(|status| runs(&status)) {
        if has_shut_down(rundir) {
            return;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Returns whether an interrupted move must be settled first. A move need not be settled if the source QEMU died before
/// the other node was notified: settling would boot the guest on this node, and its last checkpoint is worth more.
fn has_unsettled_move(rundir: &RunDir) -> bool {
    let left = Journal::read(rundir).ok().flatten().map(|journal| journal.operation);
    let unsettled = |operation: &Operation| {
        let alive = operation.from.as_ref().is_some_and(Vmm::is_alive);
        operation.kind == Kind::Move && (alive || operation.step >= Step::Resume)
    };
    matches!(status::status(rundir), Ok(Status::NeedsRecovery)) && left.as_ref().is_some_and(unsettled)
}

/// Reports to the store that the guest has shut down cleanly, so that its next start boots it. Returns whether the redo
/// logs of its disks may be merged: not if another host may have the guest, because then that host owns the disks.
pub fn report_shutdown(rundir: &RunDir) -> bool {
    let reported = match (OwnerRecord::read(rundir), State::read(rundir)) {
        (Ok(Some(owned)), Ok(Some(state))) => owned.report_shutdown(rundir, &state),
        (Ok(None), _) => Ok(()),
        _ => Err("the run directory cannot be read".into()),
    };
    reported
        .inspect_err(|e| {
            tracing::warn!(
                "{}: cannot report its shutdown to its store, so the next start resumes it from its last checkpoint: \
                 {e}",
                rundir.name()
            );
        })
        .is_ok()
}
