//! Starts the VM on a node: resumes the guest from its newest checkpoint; boots it if there is no checkpoint, or if it
//! was shut down cleanly after the newest one.

use crate::guest::guest_of;
use crate::loops;
use crate::monitor::{Verdict, has_shut_down, monitor};
use crate::outcome::{StartError, StartResult};
use crate::resource::Resource;
use crate::stop::report_shutdown;
use crate::store_query::find_with_retries;
use rekindle_store::listing::Listing;
use rekindle_store::types::{Guest, Owner};
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::status::{self, Status};
use std::time::{Duration, Instant};

/// How long to wait for a guest that is paused for a checkpoint.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Percentage of the time for waiting for a store that does not answer: the rest is for the guest.
const STORE_TIME_PERCENT: u32 = 60;

/// Starts the VM on this node.
///
/// *Needs:* no other node runs the guest, which the cluster manager's fencing ensures; the store; room for the guest's
/// RAM.
/// *On success:* the guest runs, a protector takes checkpoints of it, and a previous node can commit nothing any more.
/// *On failure:* nothing of the VM runs on this node, and its checkpoints are unchanged. Exceptions: after
/// [`StartError::Silent`] and [`StartError::Stray`], the previous QEMU still runs; after [`StartError::Protector`], the guest runs unprotected.
pub fn start(host: &Host, resource: &Resource, deadline: Instant) -> Result<StartResult, StartError> {
    let name = resource.name.as_str();
    let rundir = RunDir::new(&host.root, name);
    // A guest that a checkpoint has just stopped counts as running.
    let verdict = monitor(host, resource, deadline.min(Instant::now() + PAUSE_TIMEOUT), false);
    if matches!(verdict, Verdict::Running | Verdict::Degraded(_)) {
        return Ok(StartResult::Already);
    }
    let guest = guest_of(resource);
    if let Some(stray) = guest.stray(&rundir).map_err(StartError::UnknownQemu)? {
        return Err(StartError::Stray { stray });
    }
    if has_shut_down(resource, &rundir) {
        // Must precede the query of the store, which decides between resuming and booting.
        report_shutdown(host, &rundir);
    }
    let time_left = deadline.saturating_duration_since(Instant::now());
    let listing = find_with_retries(resource, Instant::now() + time_left * STORE_TIME_PERCENT / 100)?;
    let is_restorable = listing.as_ref().and_then(Listing::restorable).is_some();
    remove_previous(host, resource, &rundir, is_restorable, deadline)?;
    let started = if is_restorable {
        guest.restore(host)?
    } else {
        guest.boot(host, listing.as_ref())?;
        let why = match listing {
            None => "its store is new",
            Some(Listing { owner: Some(Owner { guest: Guest::Ended, .. }), .. }) => "it was shut down cleanly",
            Some(_) => "there is no checkpoint of it since it was booted",
        };
        StartResult::Booted { why }
    };
    // If this fails, the next monitor action repeats it.
    if let Err(e) = guest.make_shutdown_visible(&rundir) {
        tracing::debug!("{name}: {e}");
    }
    loops::ensure(&rundir, resource).map_err(StartError::Protector)?;
    // A guest that was just booted has nothing to lose, and the user learns immediately that it is not protected.
    if matches!(started, StartResult::Booted { .. })
        && let Err(message) = loops::wait_attached(&rundir, deadline)
    {
        guest.end_immediately(host, &rundir)?;
        return Err(StartError::Unprotected { message });
    }
    Ok(started)
}

/// Removes the VM of a previous guest from this node. A QEMU that waits for a restore is kept if there is a checkpoint.
fn remove_previous(
    host: &Host,
    resource: &Resource,
    rundir: &RunDir,
    is_restorable: bool,
    deadline: Instant,
) -> Result<(), StartError> {
    if !rundir.exists() || is_restorable && matches!(status::status(rundir), Ok(Status::Prepared)) {
        return Ok(());
    }
    if matches!(status::status(rundir), Ok(Status::Silent)) {
        return Err(StartError::Silent);
    }
    if let Err(e) = loops::end(rundir, deadline.min(Instant::now() + Duration::from_secs(1))) {
        tracing::warn!("{}: its previous protector does not end: {e}", rundir.name());
    }
    match guest_of(resource).end_immediately(host, rundir) {
        Ok(_) | Err(LifeError::Unknown { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
