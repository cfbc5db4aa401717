//! A node gets the VM: its guest goes on from its newest checkpoint; or it is booted, where there is none, or where it was shut down in
//! order since.

use crate::loops;
use crate::monitor::{Verdict, has_shut_down, monitor, stays_when_shut_down};
use crate::resource::Resource;
use crate::stop::report_end;
use rekindle_protect::owned::{OwnError, Owned};
use rekindle_protect::restore::{Request, RestoreError, Restored, restore};
use rekindle_protect::target::TargetError;
use rekindle_store::listing::Listing;
use rekindle_store::types::{Guest, Owner, Vm};
use rekindle_store::{StoreError, admin};
use rekindle_vm::definition::{Definition, DefinitionErrors};
use rekindle_vm::host::Host;
use rekindle_vm::life::{self, LifeError, Status};
use rekindle_vm::rundir::RunDir;
use serde::Serialize;
use std::error::Error;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// How long a guest may be stopped by a checkpoint.
const PAUSE: Duration = Duration::from_secs(2);
/// What is left of the time for a store that cannot be asked: the rest is for the guest.
const STORE: u32 = 60;
/// Between two attempts at that.
const LOOK: Duration = Duration::from_millis(200);

/// Why the VM does not run here.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its definition.
    #[error(transparent)]
    Definition(#[from] DefinitionErrors),
    /// Its definition is of another VM.
    #[error("the definition is of VM {found}, and the resource is {name}: they have to have the same name")]
    Name {
        /// The resource.
        name: String,
        /// The VM.
        found: String,
    },
    /// The store: it is not known whether there is a checkpoint, nor who runs the guest.
    #[error("it is not known where its guest is to go on from")]
    Store(#[source] StoreError),
    /// There is no store: its storage may not be mounted, and a guest that is booted then would be a second one.
    #[error(
        "{store} is not a store; is the shared storage mounted on this node? For a new VM create it, once, on one node: rekindle store init \
         {store}"
    )]
    NotAStore {
        /// The store.
        store: String,
    },
    /// There is no store, and it cannot be booted either.
    #[error("{store} has no checkpoint of it (is the storage that it is on mounted?), and it cannot be booted")]
    NoStore {
        /// The store.
        store: String,
        /// Why.
        #[source]
        source: LifeError,
    },
    /// The guest cannot go on.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// It cannot be booted.
    #[error(transparent)]
    Life(#[from] LifeError),
    /// The store cannot be owned.
    #[error(transparent)]
    Own(#[from] OwnError),
    /// The run directory.
    #[error(transparent)]
    RunDir(#[from] TargetError),
    /// A QEMU of it runs here and does not answer.
    #[error(
        "its QEMU runs here and does not answer, so that its guest may run; it is not replaced by another one: let the cluster stop the \
         resource, or resume the process"
    )]
    Silent,
    /// Its protector has ended at once.
    #[error("no checkpoints can be taken of it, so that it was not left running: {said}")]
    Unprotected {
        /// The protector's last words.
        said: String,
    },
    /// The guest runs, and nobody takes checkpoints of it.
    #[error("its guest runs, and its protector cannot be started")]
    Protector(#[source] io::Error),
}

impl StartError {
    /// Whether the store may be there later.
    fn may_pass(&self) -> bool {
        match self {
            Self::Store(e) => e.may_pass(),
            Self::NotAStore { .. } => true,
            _ => false,
        }
    }
}

/// How its guest came to run here.
#[derive(Debug, Serialize)]
#[serde(tag = "started", rename_all = "kebab-case")]
pub enum Started {
    /// It ran already.
    Already,
    /// It goes on from a checkpoint.
    Restored(Restored),
    /// It was booted.
    Booted {
        /// Why it was not restored.
        why: &'static str,
    },
}

/// Have the VM run here.
///
/// *Needs:* that nothing runs its guest on another node, which the cluster manager's fencing sees to; the store; room for its RAM.
/// *On success:* its guest runs, a protector takes checkpoints of it, and whoever ran it before can commit nothing any more.
/// *On failure:* nothing runs here; the checkpoint is where it was.
///
/// # Errors
/// [`StartError`].
pub fn start(host: &Host, resource: &Resource, deadline: Instant) -> Result<Started, StartError> {
    let name = resource.name.as_str();
    let rundir = RunDir::new(&host.root, name);
    // A guest that a checkpoint has just stopped runs.
    let verdict = monitor(host, resource, deadline.min(Instant::now() + PAUSE), false);
    if matches!(verdict, Verdict::Running | Verdict::Degraded(_)) {
        return Ok(Started::Already);
    }
    if has_shut_down(&rundir) {
        // Before the store is asked what there is.
        report_end(&rundir);
    }
    let found =
        find_until(resource, Instant::now() + deadline.saturating_duration_since(Instant::now()) * STORE / 100)?;
    let restorable = found.as_ref().and_then(Listing::restorable);
    clear(host, &rundir, restorable.is_some(), deadline)?;
    let started = match (&found, restorable) {
        (_, Some(_)) => Started::Restored(restore(host, &resource.name, &request(resource))?),
        (found, None) => {
            boot(host, resource, found.as_ref())?;
            let why = match found {
                None => "its store is new",
                Some(Listing { owner: Some(Owner { guest: Guest::Ended, .. }), .. }) => "it was shut down in order",
                Some(_) => "there is no checkpoint of it since it was booted",
            };
            Started::Booted { why }
        }
    };
    // What the guest does before it is told so is told by the next look at it.
    if let Err(e) = stays_when_shut_down(&rundir) {
        tracing::debug!("{name}: {e}");
    }
    loops::ensure(&rundir, resource).map_err(StartError::Protector)?;
    // A guest that has just been booted has nothing to lose, and its owner learns now that it is not protected.
    if matches!(started, Started::Booted { .. })
        && let Err(said) = loops::attached(&rundir, deadline)
    {
        life::stop(host, name, Some(Duration::ZERO))?;
        return Err(StartError::Unprotected { said });
    }
    Ok(started)
}

/// What its store has, as soon as that can be asked: it may be on its way to another node itself. `None`: no VM has used it yet.
fn find_until(resource: &Resource, deadline: Instant) -> Result<Option<Listing>, StartError> {
    let mut told = false;
    loop {
        match find(resource) {
            Err(e) if e.may_pass() && Instant::now() < deadline => {
                if !std::mem::replace(&mut told, true) {
                    let why = e.source().map_or_else(|| e.to_string(), ToString::to_string);
                    tracing::warn!("{}: {why}; it is asked again", resource.name);
                }
                thread::sleep(LOOK);
            }
            other => return other,
        }
    }
}

/// What its store has. `None`: no VM has used it yet.
fn find(resource: &Resource) -> Result<Option<Listing>, StartError> {
    let store = &resource.protect.store;
    match admin::listing(store, resource.protect.identity.as_ref()) {
        Ok(found) => Ok(Some(found)),
        Err(StoreError::NotAStore { store }) => Err(StartError::NotAStore { store }),
        Err(StoreError::Unused { .. }) => Ok(None),
        Err(e) => Err(StartError::Store(e)),
    }
}

/// Remove what an earlier guest has left here. A QEMU that waits for a restore is of use for one.
fn clear(host: &Host, rundir: &RunDir, to_restore: bool, deadline: Instant) -> Result<(), StartError> {
    if !rundir.exists() || to_restore && matches!(life::status(rundir), Ok(Status::Prepared)) {
        return Ok(());
    }
    if matches!(life::status(rundir), Ok(Status::Silent)) {
        return Err(StartError::Silent);
    }
    if let Err(e) = loops::end(rundir, deadline.min(Instant::now() + Duration::from_secs(1))) {
        tracing::warn!("{}: its former protector does not end: {e}", rundir.name());
    }
    match life::stop(host, rundir.name(), Some(Duration::ZERO)) {
        Ok(_) | Err(LifeError::Unknown { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn request(resource: &Resource) -> Request {
    let (store, identity) = (resource.protect.store.clone(), resource.protect.identity.clone());
    let hold_output = resource.protect.output_commit;
    Request { store, identity, at: None, eager: false, definition: None, qemu: None, hold_output, take_over: None }
}

/// Boot it from its newest disks: no checkpoint is wanted any more that they could belong to.
fn boot(host: &Host, resource: &Resource, found: Option<&Listing>) -> Result<(), StartError> {
    let name = resource.name.as_str();
    let definition = Definition::load(&resource.definition)?;
    if definition.name != resource.name {
        return Err(StartError::Name { name: name.into(), found: definition.name.to_string() });
    }
    let (store, identity) = (&resource.protect.store, resource.protect.identity.as_ref());
    // A store is of one VM, however often that is booted.
    let uuid = found.map(|found| found.vm.uuid);
    // The redo logs of its disks are merged only if the store is known to want no checkpoint's: one that is not mounted has none either.
    let newest_disk = found.is_some();
    let booted = life::run_as(host, definition, None, newest_disk, uuid, |rundir, hardware| {
        let vm = Vm { uuid: hardware.uuid.unwrap_or_default(), name: name.into() };
        let owner = Owner::here(&format!("start {name}")).with(Guest::Booted);
        Owned::begin(rundir, store, identity, &vm, &owner, None)?;
        Ok::<_, StartError>(())
    });
    match booted {
        Err(StartError::Life(source @ LifeError::Unfit { .. })) if found.is_none() => {
            Err(StartError::NoStore { store: store.to_string(), source })
        }
        other => other.map(drop),
    }
}
