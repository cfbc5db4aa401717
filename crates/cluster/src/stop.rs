//! A node gives the VM up: a last checkpoint, then off, so that the guest goes on from there; or shut down in order.

use crate::loops;
use crate::monitor::{has_shut_down, stays_when_shut_down, tell_to_shut_down};
use crate::resource::Resource;
use rekindle_protect::owned::Owned;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Operation, Step};
use rekindle_vm::life::{self, Ended, LifeError, Status};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::shutdown::{end_operation, pull_the_plug};
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::thread;
use std::time::{Duration, Instant};

/// What is left of the time for the guest, its checkpoint or its shutdown: the rest is for what must not be left behind.
const GUEST: u32 = 60;
/// What is left of that for a guest to shut down: the rest is for the last checkpoint of one that does not.
const SHUTDOWN: u32 = 80;
/// What is left of the guest's time for a protector to end by itself: a checkpoint that it is at is finished first. One that is killed leaves all of
/// the guest's memory to be read anew.
const LOOP: u32 = 50;

/// How long a QEMU may take to say that its guest has shut down.
const ANSWER: Duration = Duration::from_secs(1);

/// Between two looks at a guest that shuts itself down.
const LOOK: Duration = Duration::from_millis(50);

/// How a guest is to be stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// A last checkpoint, then off: at its next start, wherever that is, it goes on.
    #[default]
    Suspend,
    /// It is asked to shut down: at its next start it is booted.
    ShutDown,
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stopped {
    /// What the next start finds: a guest that does not shut down is suspended.
    pub how: How,
    /// How its QEMU came to its end.
    pub ended: Ended,
    /// Why there is no last checkpoint: the guest goes on from the one before.
    pub lost: Option<String>,
}

/// Have nothing of the VM run here any more, by `deadline`.
///
/// *Needs:* nothing. *On success:* nothing of it runs here; the run directory is gone.
/// *On failure:* a process could not be ended. The cluster manager has to fence this node.
///
/// # Errors
/// [`LifeError`]: what runs on, or cannot be removed.
pub fn stop(host: &Host, resource: &Resource, how: How, deadline: Instant) -> Result<Stopped, LifeError> {
    let rundir = RunDir::new(&host.root, resource.name.as_str());
    if !rundir.exists() {
        return Ok(Stopped { how, ended: Ended::Before, lost: None });
    }
    let all = deadline.saturating_duration_since(Instant::now());
    let guest = Instant::now() + all * GUEST / 100;
    if how == How::ShutDown && !has_shut_down(&rundir) {
        // Its protector goes on meanwhile: a guest that does not obey serves its clients, and what it sends may be held.
        ask_to_shut_down(&rundir, Instant::now() + all * GUEST / 100 * SHUTDOWN / 100);
    }
    let now = Instant::now();
    if let Err(e) = loops::end(&rundir, now + guest.saturating_duration_since(now) * LOOP / 100) {
        tracing::warn!("{}: its protector does not end: {e}", resource.name);
    }
    let mut told = has_shut_down(&rundir) && report_end(&rundir);
    // Of a guest that is still this node's there is to be a last checkpoint.
    if was_moving(&rundir)
        && let Err(why) = loops::recover(&rundir, guest)
    {
        tracing::warn!("{}: its move was cut off, and that cannot be mended: {why}", resource.name);
    }
    if !rundir.exists() {
        return Ok(Stopped { how, ended: Ended::Before, lost: None });
    }
    let status = life::status(&rundir);
    let runs = matches!(status, Ok(Status::Running | Status::Degraded(_) | Status::Stopped(_) | Status::Protected));
    let shut_down = has_shut_down(&rundir);
    let lost = match status {
        Ok(Status::Silent) => Some("its QEMU does not answer".into()),
        _ if runs && !shut_down => loops::last(&rundir, resource, guest).err(),
        _ => None,
    };
    let how = if runs && !shut_down { How::Suspend } else { how };
    if let Some(why) = &lost {
        tracing::error!("{}: there is no last checkpoint, it goes on from the one before: {why}", resource.name);
    }
    if !shut_down {
        // What it would still do, if there is no last one, is in no checkpoint.
        pull_the_plug_anyhow(&rundir)?;
    }
    // Whatever has the lock, and whatever it waits for. Of one that has shut itself down QEMU has still to be asked whether it has.
    let patience = if shut_down { ANSWER } else { Duration::ZERO };
    let stopped = life::stop_with(host, resource.name.as_str(), Some(patience), |rundir, _| {
        // Once: it is another claim's then.
        told = told || report_end(rundir);
        told
    })
    .or_else(|e| {
        tracing::warn!("{}: {e}; the plug is pulled", resource.name);
        pull_the_plug_anyhow(&rundir)?;
        life::stop(host, resource.name.as_str(), Some(Duration::ZERO))
    });
    match stopped {
        Ok(ended) => Ok(Stopped { how, ended, lost }),
        Err(LifeError::Unknown { .. }) => Ok(Stopped { how, ended: Ended::Before, lost }),
        Err(e) => Err(e),
    }
}

/// End what of it runs; an operation that does not end for that is killed.
fn pull_the_plug_anyhow(rundir: &RunDir) -> Result<(), LifeError> {
    match pull_the_plug(rundir) {
        Err(LifeError::Lock(e)) => {
            tracing::warn!("{}: {e}", rundir.name());
            end_operation(rundir)?;
            pull_the_plug(rundir)
        }
        other => other,
    }
}

/// Ask a guest to shut itself down, and wait until it has.
fn ask_to_shut_down(rundir: &RunDir, deadline: Instant) {
    if let Err(e) = stays_when_shut_down(rundir).and_then(|()| tell_to_shut_down(rundir)) {
        tracing::warn!("{}: it cannot be asked to shut down: {e}", rundir.name());
        return;
    }
    let runs = |status: &Status| matches!(status, Status::Running | Status::Degraded(_) | Status::Stopped(_));
    while Instant::now() < deadline && life::status(rundir).is_ok_and(|status| runs(&status)) {
        if has_shut_down(rundir) {
            return;
        }
        thread::sleep(LOOK);
    }
}

/// Whether it was about to go to another node, that was cut off, and what is left of it has still to be settled. If its QEMU has died
/// before the other node was told, nothing is: it would be booted here, and its last checkpoint is worth more.
fn was_moving(rundir: &RunDir) -> bool {
    let left = Journal::left_behind(rundir).ok().flatten().map(|journal| journal.operation);
    let unsettled = |operation: &Operation| {
        let alive = operation.from.as_ref().is_some_and(Vmm::is_alive);
        operation.kind == Kind::Move && (alive || operation.step >= Step::Resume)
    };
    matches!(life::status(rundir), Ok(Status::NeedsRecovery)) && left.as_ref().is_some_and(unsettled)
}

/// Tell the store of a guest that has shut itself down in order, so that it is booted at its next start. Whether the redo logs of its
/// disks may be merged: not if another host may have the guest by now, since its disks are that one's then.
pub fn report_end(rundir: &RunDir) -> bool {
    let told = match (Owned::read(rundir), State::read(rundir)) {
        (Ok(Some(owned)), Ok(Some(state))) => owned.report_end(rundir, &state),
        (Ok(None), _) => Ok(()),
        _ => Err("the run directory cannot be read".into()),
    };
    told.inspect_err(|e| {
        tracing::warn!(
            "{}: that it has shut down cannot be told to its store, so its last checkpoint counts still: {e}",
            rundir.name()
        );
    })
    .is_ok()
}
