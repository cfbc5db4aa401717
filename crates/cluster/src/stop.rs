//! A node gives the VM up: a last checkpoint, then off, so that the guest goes on from there; or shut down in order.

use crate::loops;
use crate::monitor::{has_shut_down, press_power_button, stays_when_shut_down};
use crate::resource::Resource;
use rekindle_protect::owned::Owned;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::host::Host;
use rekindle_vm::journal::{Journal, Kind, Operation, Step};
use rekindle_vm::life::{self, Ended, LifeError, Status};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::shutdown::pull_the_plug;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::thread;
use std::time::{Duration, Instant};

/// What is left of the time for the guest, its checkpoint or its shutdown: the rest is for what must not be left behind.
const GUEST: u32 = 60;
/// What is left of that for a protector to end by itself: a checkpoint that it is at is finished first. One that is killed leaves all of
/// the guest's memory to be read anew.
const LOOP: u32 = 50;

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
        return Ok(Stopped { ended: Ended::Before, lost: None });
    }
    let all = deadline.saturating_duration_since(Instant::now());
    let guest = Instant::now() + all * GUEST / 100;
    // Who holds what the guest sends has to let it out: its shutdown may need its network.
    let held_back = how == How::ShutDown && resource.protect.output_commit && loops::running(&rundir).is_some();
    if held_back && !has_shut_down(&rundir) {
        ask_to_shut_down(&rundir, guest);
    }
    if let Err(e) = loops::end(&rundir, guest.min(Instant::now() + all * GUEST / 100 * LOOP / 100)) {
        tracing::warn!("{}: its protector does not end: {e}", resource.name);
    }
    if has_shut_down(&rundir) {
        tell_end(&rundir);
    }
    // Of a guest that is still this node's there is to be a last checkpoint.
    if was_moving(&rundir)
        && let Err(why) = loops::recover(&rundir, guest)
    {
        tracing::warn!("{}: its move was cut off, and that cannot be mended: {why}", resource.name);
    }
    if !rundir.exists() {
        return Ok(Stopped { ended: Ended::Before, lost: None });
    }
    let status = life::status(&rundir);
    let runs = matches!(status, Ok(Status::Running | Status::Stopped(_) | Status::Protected));
    let (lost, patience) = match how {
        How::Suspend if runs => (loops::last(&rundir, resource, guest).err(), Duration::ZERO),
        How::ShutDown if runs => (None, guest.saturating_duration_since(Instant::now())),
        _ if matches!(status, Ok(Status::Silent)) => (Some("its QEMU does not answer".into()), Duration::ZERO),
        How::Suspend | How::ShutDown => (None, Duration::ZERO),
    };
    if let Some(why) = &lost {
        tracing::error!("{}: there is no last checkpoint, it goes on from the one before: {why}", resource.name);
    }
    if how == How::Suspend {
        // What it would still do, if there is no last one, is in no checkpoint.
        pull_the_plug(&rundir)?;
    }
    // Whatever has the lock, and whatever it waits for.
    let stopped =
        life::stop_with(host, resource.name.as_str(), Some(patience), |rundir, _| tell_end(rundir)).or_else(|e| {
            tracing::warn!("{}: {e}; the plug is pulled", resource.name);
            pull_the_plug(&rundir)?;
            life::stop(host, resource.name.as_str(), Some(Duration::ZERO))
        });
    match stopped {
        Ok(ended) => Ok(Stopped { ended, lost }),
        Err(LifeError::Unknown { .. }) => Ok(Stopped { ended: Ended::Before, lost }),
        Err(e) => Err(e),
    }
}

/// Press the power button of a guest whose protector goes on meanwhile, and wait until it has shut itself down.
fn ask_to_shut_down(rundir: &RunDir, deadline: Instant) {
    let asked = stays_when_shut_down(rundir).and_then(|()| press_power_button(rundir));
    if let Err(e) = asked {
        tracing::warn!("{}: it cannot be asked to shut down: {e}", rundir.name());
        return;
    }
    while Instant::now() < deadline && matches!(life::status(rundir), Ok(Status::Running | Status::Stopped(_))) {
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
pub fn tell_end(rundir: &RunDir) -> bool {
    let told = match (Owned::read(rundir), State::read(rundir)) {
        (Ok(Some(owned)), Ok(Some(state))) => owned.tell_end(rundir, &state),
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
