//! Checks whether the guest really runs: queries QEMU, and does not only check that the process exists.

use crate::guest::{ResourceGuest, guest_of};
use crate::loops;
use crate::resource::Resource;
use crate::store_query::find;
use rekindle_kernel::file::flock_holder;
use rekindle_kernel::patience::answer_within;
use rekindle_life::shutdown::pull_the_plug;
use rekindle_probe::{Target, check};
use rekindle_protect::owned::OwnerRecord;
use rekindle_protect::progress::{age, committed};
use rekindle_protect::protector::ProtectSettings;
use rekindle_qemu::vmm::Vmm;
use rekindle_store::types::{Guest, Owner, Vm};
use rekindle_vm::causes::with_causes;
use rekindle_vm::definition::{Definition, NetBackend, TapPlace};
use rekindle_vm::host::Host;
use rekindle_vm::qemu::{ENDED_RUN_STATES, OFF};
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::status::Status;
use serde::Serialize;
use std::fmt::{self, Display};
use std::thread;
use std::time::{Duration, Instant};

/// Interval between checks of a guest that is just being stopped or resumed.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long the store may take to report the guest's owner.
const STORE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the guest's service may take to answer, if network output is not held.
const SERVICE_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of checkpoints before an answer of the guest's service arrives, if network output is held: one each for
/// address resolution, connection and answer, and the one in progress.
const CHECKPOINTS_PER_HELD_ANSWER: u32 = 4;

/// How long a guest that has reset itself or has panicked may wait for its reboot before it counts as ended. `rekindle
/// watch` takes the VM's lock as soon as it notices the end of the guest.
const REBOOT_TIMEOUT: Duration = Duration::from_secs(3);
/// After this many intervals without a checkpoint, and at least [`MIN_AGE_OF_UNPROTECTED`], the guest counts as not
/// protected.
const MAX_MISSED_INTERVALS: u32 = 10;
/// Lower limit for short checkpoint intervals: a store may be unreachable this long before it is reported.
const MIN_AGE_OF_UNPROTECTED: Duration = Duration::from_secs(60);

/// State of the VM on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", content = "why", rename_all = "kebab-case")]
pub enum Verdict {
    /// The guest runs.
    Running,
    /// The guest runs, but a process that serves it is missing, or a fail-over would lose more than configured.
    Degraded(String),
    /// Nothing of the VM runs that could harm a guest on another node.
    NotRunning,
    /// The VM exists, but its guest does not run, or does not run well.
    Failed(String),
}

impl Verdict {
    /// Returns the exit code that OCF defines for the verdict.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Running => 0,
            Self::Failed(_) => 1,
            Self::NotRunning => 7,
            Self::Degraded(_) => 190,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running => f.write_str("running"),
            Self::NotRunning => f.write_str("not running"),
            Self::Degraded(why) | Self::Failed(why) => f.write_str(why),
        }
    }
}

/// Checks the VM. Ends a guest that another node has taken over. Starts a missing protector. With `probes_service`,
/// also probes the guest's service, if the definition sets `probe`.
#[must_use]
pub fn monitor(host: &Host, resource: &Resource, deadline: Instant, probes_service: bool) -> Verdict {
    let rundir = RunDir::new(&host.root, resource.name.as_str());
    let verdict = check_guest(host, &rundir, resource, deadline);
    if !matches!(verdict, Verdict::Running | Verdict::Degraded(_)) {
        return verdict;
    }
    if let Some(verdict) = ensure_protector(&rundir, resource) {
        return verdict;
    }
    if let Verdict::Degraded(_) = verdict {
        return verdict;
    }
    let service = if probes_service { check_service(&rundir, resource, deadline) } else { Verdict::Running };
    match service {
        Verdict::Running => why_unprotected(&rundir, resource).map_or(Verdict::Running, Verdict::Degraded),
        verdict => verdict,
    }
}

/// Returns why the guest counts as not protected, if it does. Typical causes: the protector ends repeatedly, is
/// stopped, or writes to another store; or the store is unreachable.
fn why_unprotected(rundir: &RunDir, resource: &Resource) -> Option<String> {
    let vmm = qemu_of(rundir)?;
    let ProtectSettings { store, every, .. } = &resource.protect;
    let age = age(rundir, store, &vmm)?;
    (age > MIN_AGE_OF_UNPROTECTED.max(*every * MAX_MISSED_INTERVALS)).then(|| {
        let (age, message) = (age.as_secs(), loops::last_message(rundir));
        format!(
            "its guest runs, but no checkpoint of it was committed to {store} for {age} s; last message of its \
             protector: {message}"
        )
    })
}

/// Starts a protector if there is none. Returns a verdict if the guest must not run, or no protector can be started.
fn ensure_protector(rundir: &RunDir, resource: &Resource) -> Option<Verdict> {
    if loops::find_protector(rundir).is_some() {
        return None;
    }
    // The log contains the reason why the previous protector has ended. But first check whether the guest may run at
    // all.
    match superseded_by(rundir) {
        Ok(None) => {}
        Ok(Some(superseded)) => {
            tracing::error!("{superseded}");
            return Some(Verdict::NotRunning);
        }
        Err(why) => return Some(Verdict::Failed(why)),
    }
    let message = loops::last_message(rundir);
    match loops::ensure(rundir, resource) {
        Ok(_) => {
            let name = &resource.name;
            tracing::warn!("{name}: it had no protector; started one. Last message of the previous one: {message}");
            None
        }
        Err(e) => {
            Some(Verdict::Failed(format!("no checkpoints are taken of it, since its protector cannot be started: {e}")))
        }
    }
}

/// Checks whether the guest runs, and waits until `deadline` if it is only paused.
fn check_guest(host: &Host, rundir: &RunDir, resource: &Resource, deadline: Instant) -> Verdict {
    let guest = guest_of(resource);
    if let Some(verdict) = check_stray(host, resource, rundir) {
        return verdict;
    }
    if !rundir.exists() {
        return Verdict::NotRunning;
    }
    if let Some(verdict) = end_superseded_guest(rundir) {
        return verdict;
    }
    let mut has_tried_protector = false;
    let mut reboot_deadline = None;
    loop {
        let status = match guest.status(rundir) {
            Ok(status) => status,
            Err(e) => return Verdict::Failed(e.to_string()),
        };
        // A protector that was killed during a pause has left the guest stopped. The next protector resumes it.
        let is_left_paused = matches!(&status, Status::Stopped(why) if why == "paused") && rundir.paused().exists();
        if is_left_paused
            && !std::mem::replace(&mut has_tried_protector, true)
            && let Some(verdict) = ensure_protector(rundir, resource)
        {
            return verdict;
        }
        let mut verdict = verdict_for(&*guest, rundir, &status);
        if matches!(verdict, Some(Verdict::NotRunning | Verdict::Failed(_))) && may_reboot(rundir, &status) {
            let reboot_deadline = *reboot_deadline.get_or_insert_with(|| deadline.min(Instant::now() + REBOOT_TIMEOUT));
            if Instant::now() < reboot_deadline {
                verdict = None;
            }
        }
        match verdict {
            // A checkpoint stops the guest for milliseconds, a reboot is in progress, or QEMU is slow.
            None if Instant::now() < deadline => thread::sleep(POLL_INTERVAL),
            None => return Verdict::Failed("its guest is stopped, or its QEMU does not answer".into()),
            Some(verdict) => return verdict,
        }
    }
}

/// Checks whether a QEMU runs the guest here that the cluster has not started. If no node has the guest, takes it over.
/// Ends it if another node has the guest. Otherwise nothing is known about what it has done: its stop shuts it down.
fn check_stray(host: &Host, resource: &Resource, rundir: &RunDir) -> Option<Verdict> {
    let guest = guest_of(resource);
    let stray = match guest.stray(rundir) {
        Ok(None) => return None,
        Ok(Some(stray)) => stray,
        Err(e) => return Some(Verdict::Failed(format!("it may run on this node: {e}"))),
    };
    let queried = resource.clone();
    let listing = match answer_within(STORE_TIMEOUT, move || find(&queried).map_err(|e| with_causes(&e))) {
        Some(Ok(listing)) => listing,
        Some(Err(why)) => return Some(Verdict::Failed(format!("{stray}, and its owner is unknown: {why}"))),
        None => return Some(Verdict::Failed(format!("{stray}, and its owner is unknown: its store does not answer"))),
    };
    // The owner of another VM has nothing to do with this domain.
    if let Some(Vm { name, uuid }) = listing.as_ref().map(|listing| &listing.vm).filter(|vm| vm.uuid != stray.uuid) {
        let store = &resource.protect.store;
        return Some(Verdict::Failed(format!(
            "{stray}, and {store} belongs to VM {name} ({uuid}), not to this domain ({}): set the resource's own store",
            stray.uuid
        )));
    }
    let here = Owner::here("").host;
    match listing.as_ref().and_then(|listing| listing.owner.as_ref()).filter(|owner| owner.guest != Guest::Ended) {
        None => match guest.boot(host, listing.as_ref()) {
            Ok(()) => {
                tracing::warn!("{}: {stray}; it is a resource of the cluster now", resource.name);
                None
            }
            Err(e) => Some(Verdict::Failed(format!("{stray}, and it cannot be attached: {}", with_causes(&e)))),
        },
        Some(owner) if owner.host != here => {
            tracing::error!("{}: {stray}, but its store's owner is {owner}: it is ended here", resource.name);
            Some(guest.end_strays(rundir).map_or_else(not_ended, |()| Verdict::NotRunning))
        }
        Some(_) => Some(Verdict::Failed(format!(
            "{stray}, so it is not protected; the cluster stops it, which shuts the guest down"
        ))),
    }
}

/// Ends a guest that is known to run on another node: an earlier attempt may have been interrupted. Returns a verdict
/// if the guest must not run here, or if that cannot be determined.
fn end_superseded_guest(rundir: &RunDir) -> Option<Verdict> {
    match OwnerRecord::read(rundir) {
        Ok(Some(record)) if record.may_run(rundir).is_err() => {
            Some(pull_the_plug(rundir).map_or_else(not_ended, |()| Verdict::NotRunning))
        }
        Ok(_) => None,
        Err(e) => Some(Verdict::Failed(e.to_string())),
    }
}

fn not_ended(e: impl Display) -> Verdict {
    Verdict::Failed(superseded_but_running(e))
}

fn superseded_but_running(e: impl Display) -> String {
    format!("another node has it, but it cannot be ended here: {e}")
}

/// Returns whether `rekindle watch` may be about to reboot a guest that has ended.
fn may_reboot(rundir: &RunDir, status: &Status) -> bool {
    let has_ended = matches!(status, Status::Stopped(why) if ENDED_RUN_STATES.contains(&why.as_str()));
    let is_watched = |state: State| state.definition.watches_guest();
    has_ended
        && State::read(rundir).ok().flatten().is_some_and(is_watched)
        && matches!(flock_holder(&rundir.watch_lock()), Ok(Some(_)))
}

/// Converts a status to a verdict. `None`: check again.
fn verdict_for(guest: &dyn ResourceGuest, rundir: &RunDir, status: &Status) -> Option<Verdict> {
    match status {
        // The protector uses QEMU's only monitor, so QEMU cannot be queried.
        Status::Protected => Some(Verdict::Running),
        Status::Running => match guest.make_shutdown_visible(rundir) {
            Ok(()) => Some(Verdict::Running),
            Err(_) => None,
        },
        Status::Degraded(why) => match guest.make_shutdown_visible(rundir) {
            Ok(()) => Some(Verdict::Degraded(format!("its guest runs, but is degraded: {why}"))),
            Err(_) => None,
        },
        // The guest has shut down cleanly, and must not be reverted to a checkpoint.
        Status::Stopped(why) if why == OFF => Some(Verdict::NotRunning),
        Status::Stopped(why) if ENDED_RUN_STATES.contains(&why.as_str()) => {
            Some(Verdict::Failed(format!("its guest is {why}")))
        }
        Status::Stopped(_) | Status::Silent => None,
        // The previous QEMU has ended or is about to end; another one is about to start.
        Status::Busy(_) => None,
        Status::Prepared | Status::Ended => Some(Verdict::NotRunning),
        Status::Suspended => Some(Verdict::Failed("it is suspended for a reboot of this host".into())),
        Status::NeedsRecovery => {
            Some(Verdict::Failed("an operation on it was interrupted; run: rekindle recover".into()))
        }
    }
}

fn qemu_of(rundir: &RunDir) -> Option<Vmm> {
    State::read(rundir).ok().flatten().and_then(|state| state.vmm)
}

/// Queries the store whether another node has the guest. If so, ends the guest on this node.
///
/// An unreachable store decides nothing: the guest continues to run, as it does while its protector waits for the
/// store.
fn superseded_by(rundir: &RunDir) -> Result<Option<String>, String> {
    let Some(record) = OwnerRecord::read(rundir).map_err(|e| e.to_string())? else { return Ok(None) };
    let state = State::read(rundir).map_err(|e| e.to_string())?;
    let Some(uuid) = state.and_then(|state| state.hardware.uuid) else { return Ok(None) };
    let queried = record.clone();
    // The limit holds whatever the store connection's timeouts are: the cluster manager counts a check that takes too
    // long as a failed guest.
    let Some(new_owner) = answer_within(STORE_TIMEOUT, move || queried.query_new_owner(uuid)) else {
        tracing::warn!("{}: its store does not answer", rundir.name());
        return Ok(None);
    };
    match new_owner {
        Ok(None) => Ok(None),
        Ok(Some(owner)) => {
            let superseded = record.end_guest(rundir, &owner);
            superseded.map(|superseded| Some(superseded.to_string())).map_err(superseded_but_running)
        }
        Err(e) => {
            tracing::warn!("{}: cannot query its store: {e}", rundir.name());
            Ok(None)
        }
    }
}

/// Probes the guest's service. If network output is held, an answer arrives only after some checkpoints. Without those
/// checkpoints, a missing answer is not the guest's fault.
fn check_service(rundir: &RunDir, resource: &Resource, deadline: Instant) -> Verdict {
    let definition = match State::read(rundir) {
        Ok(Some(state)) => state.definition,
        Ok(None) => return Verdict::NotRunning,
        Err(e) => return Verdict::Failed(e.to_string()),
    };
    let Some(probe) = &definition.probe else { return Verdict::Running };
    let target: Target = match probe.to_string().parse() {
        Ok(target) => target,
        Err(e) => return Verdict::Failed(format!("`probe`: {e}")),
    };
    let output_is_held = resource.protect.output_commit;
    let timeout = if output_is_held {
        let time_left = deadline.saturating_duration_since(Instant::now());
        (SERVICE_TIMEOUT + resource.protect.every * CHECKPOINTS_PER_HELD_ANSWER).min(time_left)
    } else {
        SERVICE_TIMEOUT
    };
    let commits_before = committed(rundir);
    match check(&target, timeout, probe_namespace(&definition)) {
        Ok(_) => Verdict::Running,
        Err(e) if output_is_held && committed(rundir) < commits_before + u64::from(CHECKPOINTS_PER_HELD_ANSWER) => {
            tracing::warn!(
                "{}: its service does not answer yet; too few checkpoints were committed since the probe: {e}",
                rundir.name()
            );
            Verdict::Running
        }
        Err(e) => Verdict::Failed(format!("its service does not answer: {e}")),
    }
}

/// Returns the network namespace of the first tap that is in one.
fn probe_namespace(definition: &Definition) -> Option<&str> {
    definition.nets.iter().find_map(|net| match &net.backend {
        NetBackend::Tap { place: TapPlace::Netns { netns, .. }, .. } => Some(netns.as_str()),
        NetBackend::Tap { .. } | NetBackend::User { .. } => None,
    })
}

/// Returns whether the guest has shut down cleanly, and its VM waits to be ended.
pub(crate) fn has_shut_down(resource: &Resource, rundir: &RunDir) -> bool {
    matches!(guest_of(resource).status(rundir), Ok(Status::Stopped(why)) if why == OFF)
}
