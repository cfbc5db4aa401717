//! Stops the VM on a node: takes a last checkpoint, from which the guest can resume, and ends QEMU; or shuts the guest
//! down cleanly.

use crate::guest::guest_of;
use crate::loops;
use crate::monitor::has_shut_down;
use crate::outcome::StrayQemu;
use crate::resource::Resource;
use rekindle_life::shutdown::{Ended, end_operation, pull_the_plug};
use rekindle_life::stop;
use rekindle_protect::owned::OwnerRecord;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Operation, Step};
use rekindle_vm::qemu::OFF;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
use serde::{Deserialize, Serialize};
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// Percentage of the time for the guest's last checkpoint or shutdown: the rest is for ending the VM's processes.
const GUEST_TIME_PERCENT: u32 = 60;
/// Percentage of the guest's time for a shutdown: the rest is for the last checkpoint of a guest that does not shut
/// down.
const SHUTDOWN_TIME_PERCENT: u32 = 80;
/// Percentage of the guest's time in which the protector may finish a checkpoint and end by itself. If the protector is
/// killed, all of the guest's memory must be read again.
const PROTECTOR_TIME_PERCENT: u32 = 50;

/// Why there is no last checkpoint of a guest that another program has started.
const NOT_ATTACHED: &str = "libvirt had started it outside of the cluster, so no checkpoint of it could be taken";

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
    let guest = guest_of(resource);
    // If it is unknown whether a QEMU runs the guest, ending it fails.
    let is_stray = !matches!(guest.stray(&rundir), Ok(None));
    if !rundir.exists() && !is_stray {
        return Ok(StopResult { how, ended: Ended::Before, lost: None });
    }
    let guest_time = deadline.saturating_duration_since(Instant::now()) * GUEST_TIME_PERCENT / 100;
    let guest_deadline = Instant::now() + guest_time;
    // No checkpoint can be taken of a guest that is not attached.
    if is_stray || how == StopMethod::ShutDown && !has_shut_down(resource, &rundir) {
        // The protector continues meanwhile: a guest that does not shut down serves its clients, and its network output
        // may be held.
        shut_down_guest(resource, &rundir, Instant::now() + guest_time * SHUTDOWN_TIME_PERCENT / 100);
    }
    let lost_stray = is_stray.then(|| NOT_ATTACHED.to_owned());
    end_protector(&rundir, guest_deadline);
    let had_shut_down = has_shut_down(resource, &rundir);
    let mut is_shutdown_reported = had_shut_down && report_shutdown(host, &rundir);
    // A guest that this node still owns gets a last checkpoint.
    if has_unsettled_move(&rundir)
        && let Err(why) = loops::recover(&rundir, guest_deadline)
    {
        tracing::warn!("{}: cannot settle its interrupted move: {why}", resource.name);
    }
    if !rundir.exists() {
        let has_shut_down = matches!(guest.stray(&rundir), Ok(None));
        guest.end_strays(&rundir)?;
        let ended = if has_shut_down { Ended::ByAcpi } else { Ended::PoweredOff };
        return Ok(StopResult { how, ended, lost: lost_stray });
    }
    let status = guest.status(&rundir);
    // Of the same moment as the status.
    let has_shut_down = matches!(&status, Ok(Status::Stopped(why)) if why == OFF);
    if has_shut_down && !had_shut_down {
        is_shutdown_reported = report_shutdown(host, &rundir);
    }
    let is_suspended = !has_shut_down
        && matches!(status, Ok(Status::Running | Status::Degraded(_) | Status::Stopped(_) | Status::Protected));
    let lost = match status {
        _ if is_stray => lost_stray,
        Ok(Status::Silent) => Some("its QEMU does not answer".into()),
        _ if is_suspended => loops::take_last_checkpoint(&rundir, resource, guest_deadline).err(),
        _ => None,
    };
    let how = if is_suspended { StopMethod::Suspend } else { how };
    if let Some(why) = &lost {
        tracing::error!(
            "{}: no last checkpoint was taken, so it will resume from the previous one: {why}",
            resource.name
        );
    }
    if !has_shut_down {
        // No later work of the guest can be in a checkpoint, whether or not the last one was taken.
        force_off(resource, &rundir)?;
    }
    let ended = end_qemu(host, resource, &rundir, has_shut_down, is_shutdown_reported)?;
    Ok(StopResult { how, ended, lost })
}

/// Ends the protector, which may finish a checkpoint first, in its part of the time until `guest_deadline`.
fn end_protector(rundir: &RunDir, guest_deadline: Instant) {
    let now = Instant::now();
    let protector_time = guest_deadline.saturating_duration_since(now) * PROTECTOR_TIME_PERCENT / 100;
    if let Err(e) = loops::end(rundir, now + protector_time) {
        tracing::warn!("{}: its protector does not end: {e}", rundir.name());
    }
}

/// Ends QEMU and removes the run directory. Kills QEMU if it does not end otherwise. Reports a clean shutdown of the
/// guest, unless `is_shutdown_reported`.
fn end_qemu(
    host: &Host,
    resource: &Resource,
    rundir: &RunDir,
    has_shut_down: bool,
    mut is_shutdown_reported: bool,
) -> Result<Ended, LifeError> {
    let name = rundir.name();
    // Do not wait for the lock's holder. Only a QEMU whose guest has shut down gets time to confirm that.
    let timeout = if has_shut_down { ANSWER_TIMEOUT } else { Duration::ZERO };
    let stopped = stop::stop(host, name, Some(timeout), |rundir, _| {
        // Report the shutdown only once: afterwards another node may own the store.
        is_shutdown_reported = is_shutdown_reported || report_shutdown(host, rundir);
        is_shutdown_reported
    });
    let stopped = stopped.or_else(|e| {
        tracing::warn!("{name}: {e}; killing its QEMU");
        force_off(resource, rundir)?;
        stop::stop_immediately(host, name)
    });
    match stopped {
        Err(LifeError::Unknown { .. }) => {
            // A start was interrupted before it recorded the VM.
            rundir.remove().map_err(|source| LifeError::RunDir { name: name.into(), source })?;
            Ok(Ended::Before)
        }
        result => result,
    }
}

/// Kills every process of the VM. If an operation holds the VM's lock and does not end, it is killed, too.
fn force_off(resource: &Resource, rundir: &RunDir) -> Result<(), LifeError> {
    let ended = match pull_the_plug(rundir) {
        Err(LifeError::Lock(e)) => {
            tracing::warn!("{}: {e}", rundir.name());
            end_operation(rundir)?;
            pull_the_plug(rundir)
        }
        result => result,
    };
    ended.and_then(|()| guest_of(resource).end_strays(rundir))
}

/// Requests a shutdown of the guest, and waits until `deadline` for it.
fn shut_down_guest(resource: &Resource, rundir: &RunDir, deadline: Instant) {
    let guest = guest_of(resource);
    if let Err(e) = guest.request_shutdown(rundir, deadline) {
        tracing::warn!("{}: cannot request its shutdown: {e}", rundir.name());
        return;
    }
    let has_qemu = |status: &Status| matches!(status, Status::Running | Status::Degraded(_) | Status::Stopped(_));
    let has_stray = || matches!(guest.stray(rundir), Ok(Some(_)));
    while Instant::now() < deadline && (guest.status(rundir).is_ok_and(|status| has_qemu(&status)) || has_stray()) {
        if has_shut_down(resource, rundir) {
            return;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Returns whether an interrupted move must be settled first. A move need not be settled if the source QEMU died before
/// the other node was notified: settling would boot the guest on this node, and its last checkpoint is worth more.
fn has_unsettled_move(rundir: &RunDir) -> bool {
    let interrupted = Journal::read(rundir).ok().flatten().map(|journal| journal.operation);
    let must_be_settled = |operation: &Operation| {
        let source_is_alive = operation.from.as_ref().is_some_and(Vmm::is_alive);
        operation.kind == Kind::Move && (source_is_alive || operation.step >= Step::Resume)
    };
    matches!(status::status(rundir), Ok(Status::NeedsRecovery)) && interrupted.as_ref().is_some_and(must_be_settled)
}

/// Reports to the store that the guest has shut down cleanly, so that its next start boots it. Returns whether the redo
/// logs of its disks may be merged: not if another host may have the guest, because then that host owns the disks.
pub fn report_shutdown(host: &Host, rundir: &RunDir) -> bool {
    let result = match (OwnerRecord::read(rundir), State::read(rundir)) {
        (Ok(Some(record)), Ok(Some(state))) => record.report_shutdown(host, rundir, &state),
        (Ok(None), _) => Ok(()),
        _ => Err("the run directory cannot be read".into()),
    };
    result
        .inspect_err(|e| {
            tracing::warn!(
                "{}: cannot report its shutdown to its store, so the next start resumes it from its last checkpoint: \
                 {e}",
                rundir.name()
            );
        })
        .is_ok()
}

/// Returns the QEMU that runs the guest here although the cluster has not started it, which a [`stop`] ends.
///
/// # Errors
/// If it is unknown whether there is one.
pub fn stray(host: &Host, resource: &Resource) -> io::Result<Option<StrayQemu>> {
    guest_of(resource).stray(&RunDir::new(&host.root, resource.name.as_str()))
}
