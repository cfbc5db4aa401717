//! Starts the VM on a node: resumes the guest from its newest checkpoint; boots it if there is no checkpoint, or if it
//! was shut down cleanly after the newest one.

use crate::loops;
use crate::monitor::{Verdict, has_shut_down, monitor, pause_at_shutdown};
use crate::resource::Resource;
use crate::stop::report_shutdown;
use rekindle_handover::HandoverError;
use rekindle_handover::boot::{self, LeftoverLog, NewVm};
use rekindle_life::stop;
use rekindle_protect::owned::{OwnError, OwnerRecord};
use rekindle_protect::restore::{Request, RestoreError, Restored, restore};
use rekindle_protect::target::TargetError;
use rekindle_store::listing::Listing;
use rekindle_store::types::{Guest, Owner, Vm};
use rekindle_store::{StoreError, admin};
use rekindle_vm::definition::{Definition, DefinitionErrors};
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::status::{self, Status};
use serde::Serialize;
use std::error::Error;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for a guest that is paused for a checkpoint.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Percentage of the time for waiting for a store that does not answer: the rest is for the guest.
const STORE_TIME_PERCENT: u32 = 60;
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Why the VM does not run on this node.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Definition(#[from] DefinitionErrors),
    /// The definition has the name of another VM.
    #[error("the definition has the name {found}, but the resource is {name}: they must be the same")]
    Name { name: String, found: String },
    /// The store does not answer: it is unknown whether there is a checkpoint, and which node runs the guest.
    #[error("cannot determine its newest checkpoint")]
    Store(#[source] StoreError),
    /// The store does not exist. Its storage may not be mounted, and then a booted guest could be a second one.
    #[error(
        "{store} is not a store; is the shared storage mounted on this node? For a new VM create it, once, on one \
         node: rekindle store init {store}"
    )]
    NotAStore { store: String },
    /// The store does not exist or has no checkpoint, and the guest cannot be booted either.
    #[error("{store} has no checkpoint of it (is its storage mounted on this node?), and it cannot be booted")]
    NoStore {
        store: String,
        #[source]
        source: LifeError,
    },
    #[error(transparent)]
    Restore(#[from] RestoreError),
    #[error(transparent)]
    Life(#[from] LifeError),
    /// The guest cannot be booted.
    #[error(transparent)]
    Boot(HandoverError),
    /// This node cannot become owner of the store.
    #[error(transparent)]
    Own(#[from] OwnError),
    #[error(transparent)]
    RunDir(#[from] TargetError),
    /// A QEMU of the VM runs on this node and does not answer.
    #[error(
        "its QEMU runs on this node but does not answer; its guest may run, so no other QEMU is started: let the \
         cluster stop the resource, or resume the process"
    )]
    Silent,
    /// The protector ended immediately.
    #[error("no checkpoints can be taken of it, so it was stopped again: {message}")]
    Unprotected {
        /// The last message in the protector's log.
        message: String,
    },
    /// The guest runs without a protector.
    #[error("its guest runs, but its protector cannot be started")]
    Protector(#[source] io::Error),
}

impl From<HandoverError> for StartError {
    fn from(e: HandoverError) -> Self {
        match e {
            HandoverError::Life(e) => Self::Life(e),
            e => Self::Boot(e),
        }
    }
}

impl StartError {
    /// Returns whether the store may become available later.
    fn is_transient(&self) -> bool {
        match self {
            Self::Store(e) => e.may_pass(),
            Self::NotAStore { .. } => true,
            _ => false,
        }
    }
}

/// How the guest was started on this node.
#[derive(Debug, Serialize)]
#[serde(tag = "started", rename_all = "kebab-case")]
pub enum StartResult {
    Already,
    Restored(Restored),
    Booted { why: &'static str },
}

/// Starts the VM on this node.
///
/// *Needs:* no other node runs the guest, which the cluster manager's fencing ensures; the store; room for the guest's
/// RAM.
/// *On success:* the guest runs, a protector takes checkpoints of it, and a previous node can commit nothing any more.
/// *On failure:* nothing of the VM runs on this node, and its checkpoints are unchanged. Exceptions: after
/// [`StartError::Silent`], the previous QEMU still runs; after [`StartError::Protector`], the guest runs unprotected.
pub fn start(host: &Host, resource: &Resource, deadline: Instant) -> Result<StartResult, StartError> {
    let name = resource.name.as_str();
    let rundir = RunDir::new(&host.root, name);
    // A guest that a checkpoint has just stopped counts as running.
    let verdict = monitor(host, resource, deadline.min(Instant::now() + PAUSE_TIMEOUT), false);
    if matches!(verdict, Verdict::Running | Verdict::Degraded(_)) {
        return Ok(StartResult::Already);
    }
    if has_shut_down(&rundir) {
        // Must precede the query of the store, which decides between resuming and booting.
        report_shutdown(&rundir);
    }
    let time_left = deadline.saturating_duration_since(Instant::now());
    let listing = find_with_retries(resource, Instant::now() + time_left * STORE_TIME_PERCENT / 100)?;
    let is_restorable = listing.as_ref().and_then(Listing::restorable).is_some();
    remove_previous(host, &rundir, is_restorable, deadline)?;
    let started = if is_restorable {
        StartResult::Restored(restore(host, &resource.name, &restore_request(resource))?)
    } else {
        boot(host, resource, listing.as_ref())?;
        let why = match listing {
            None => "its store is new",
            Some(Listing { owner: Some(Owner { guest: Guest::Ended, .. }), .. }) => "it was shut down cleanly",
            Some(_) => "there is no checkpoint of it since it was booted",
        };
        StartResult::Booted { why }
    };
    // If this fails, the next monitor action repeats it.
    if let Err(e) = pause_at_shutdown(&rundir) {
        tracing::debug!("{name}: {e}");
    }
    loops::ensure(&rundir, resource).map_err(StartError::Protector)?;
    // A guest that was just booted has nothing to lose, and the user learns immediately that it is not protected.
    if matches!(started, StartResult::Booted { .. })
        && let Err(message) = loops::wait_attached(&rundir, deadline)
    {
        stop::stop_immediately(host, name)?;
        return Err(StartError::Unprotected { message });
    }
    Ok(started)
}

/// Queries the store, and repeats the query until `deadline`: the store may itself be failing over to another node.
/// `None`: no VM has used the store yet.
fn find_with_retries(resource: &Resource, deadline: Instant) -> Result<Option<Listing>, StartError> {
    let mut is_reported = false;
    loop {
        match find(resource) {
            Err(e) if e.is_transient() && Instant::now() < deadline => {
                if !std::mem::replace(&mut is_reported, true) {
                    let why = e.source().map_or_else(|| e.to_string(), ToString::to_string);
                    tracing::warn!("{}: {why}; retrying", resource.name);
                }
                thread::sleep(POLL_INTERVAL);
            }
            result => return result,
        }
    }
}

/// Queries the store. `None`: no VM has used the store yet.
fn find(resource: &Resource) -> Result<Option<Listing>, StartError> {
    let store = &resource.protect.store;
    match admin::listing(store, resource.protect.identity.as_ref()) {
        Ok(listing) => Ok(Some(listing)),
        Err(StoreError::NotAStore { store }) => Err(StartError::NotAStore { store }),
        Err(StoreError::Unused { .. }) => Ok(None),
        Err(e) => Err(StartError::Store(e)),
    }
}

/// Removes the VM of a previous guest from this node. A QEMU that waits for a restore is kept if there is a checkpoint.
fn remove_previous(host: &Host, rundir: &RunDir, is_restorable: bool, deadline: Instant) -> Result<(), StartError> {
    if !rundir.exists() || is_restorable && matches!(status::status(rundir), Ok(Status::Prepared)) {
        return Ok(());
    }
    if matches!(status::status(rundir), Ok(Status::Silent)) {
        return Err(StartError::Silent);
    }
    if let Err(e) = loops::end(rundir, deadline.min(Instant::now() + Duration::from_secs(1))) {
        tracing::warn!("{}: its previous protector does not end: {e}", rundir.name());
    }
    match stop::stop_immediately(host, rundir.name()) {
        Ok(_) | Err(LifeError::Unknown { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn restore_request(resource: &Resource) -> Request {
    let (store, identity) = (resource.protect.store.clone(), resource.protect.identity.clone());
    let hold_output = resource.protect.output_commit;
    Request { store, identity, at: None, eager: false, definition: None, qemu: None, hold_output, move_claim: None }
}

/// Boots the guest from the newest state of its disks. No checkpoint is valid any more that the disks could belong to.
fn boot(host: &Host, resource: &Resource, listing: Option<&Listing>) -> Result<(), StartError> {
    let name = resource.name.as_str();
    let definition = Definition::load(&resource.definition)?;
    if definition.name != resource.name {
        return Err(StartError::Name { name: name.into(), found: definition.name.to_string() });
    }
    let (store, identity) = (&resource.protect.store, resource.protect.identity.as_ref());
    // A store belongs to one VM over all of its boots.
    let uuid = listing.map(|listing| listing.vm.uuid);
    // Redo logs are merged only if the store exists and needs none of them: an unmounted store appears empty, too.
    let leftover_log = if listing.is_some() { LeftoverLog::Merge } else { LeftoverLog::Reject };
    let vm = NewVm { definition, qemu: None, uuid, leftover_log };
    let booted = boot::start(host, vm, |rundir, hardware| {
        let vm = Vm { uuid: hardware.uuid.unwrap_or_default(), name: name.into() };
        let owner = Owner::here(&format!("start {name}")).with(Guest::Booted);
        OwnerRecord::claim(rundir, store, identity, &vm, &owner, None)?;
        Ok::<_, StartError>(())
    });
    match booted {
        Err(StartError::Life(source @ LifeError::Unfit { .. })) if listing.is_none() => {
            Err(StartError::NoStore { store: store.to_string(), source })
        }
        other => other.map(drop),
    }
}
