//! A VM that Rekindle starts from a definition.

use super::ResourceGuest;
use crate::outcome::{StartError, StartResult, StrayQemu};
use crate::resource::Resource;
use rekindle_handover::boot::{self, LeftoverLog, NewVm};
use rekindle_life::shutdown::Ended;
use rekindle_life::stop;
use rekindle_protect::owned::OwnerRecord;
use rekindle_protect::restore::restore;
use rekindle_qemu::agent;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::Vmm;
use rekindle_store::listing::Listing;
use rekindle_store::types::Vm;
use rekindle_vm::definition::Definition;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use rekindle_vm::state::State;
use rekindle_vm::status::{self, Status};
use serde_json::{Value, json};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long QEMU or the guest's agent may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) struct OwnGuest<'a> {
    pub resource: &'a Resource,
    /// Path of the definition.
    pub definition: &'a Path,
}

impl ResourceGuest for OwnGuest<'_> {
    fn stray(&self, _rundir: &RunDir) -> io::Result<Option<StrayQemu>> {
        // Only Rekindle starts its QEMUs.
        Ok(None)
    }

    fn status(&self, rundir: &RunDir) -> io::Result<Status> {
        status::status(rundir)
    }

    fn make_shutdown_visible(&self, rundir: &RunDir) -> Result<(), String> {
        pause_at_shutdown(rundir).map_err(|e| e.to_string())
    }

    fn request_shutdown(&self, rundir: &RunDir, _deadline: Instant) -> Result<(), String> {
        pause_at_shutdown(rundir).and_then(|()| request_shutdown(rundir)).map_err(|e| e.to_string())
    }

    fn restore(&self, host: &Host) -> Result<StartResult, StartError> {
        Ok(StartResult::Restored(restore(host, &self.resource.name, &self.resource.restore_request(host))?))
    }

    fn boot(&self, host: &Host, listing: Option<&Listing>) -> Result<(), StartError> {
        boot(host, self.resource, self.definition, listing)
    }

    fn end_strays(&self, _rundir: &RunDir) -> Result<(), LifeError> {
        Ok(())
    }

    fn end_immediately(&self, host: &Host, rundir: &RunDir) -> Result<Ended, LifeError> {
        stop::stop_immediately(host, rundir.name())
    }
}

/// Configures QEMU to pause, and not to exit, when its guest powers itself off, so that this can be distinguished from
/// a crash.
fn pause_at_shutdown(rundir: &RunDir) -> Result<(), QmpError> {
    let Some(vmm) = qemu_of(rundir) else { return Ok(()) };
    let mut qmp: Qmp = vmm.connect_watcher(ANSWER_TIMEOUT)?;
    qmp.execute::<Value>("set-action", json!({"shutdown": "pause"})).map(drop)
}

/// Requests a shutdown of the guest, through its agent if it has one. Does not wait for the shutdown.
fn request_shutdown(rundir: &RunDir) -> Result<(), QmpError> {
    let Some(vmm) = qemu_of(rundir) else { return Ok(()) };
    let mut qmp: Qmp = vmm.connect_watcher(ANSWER_TIMEOUT)?;
    if agent::is_listening(&mut qmp).unwrap_or(false)
        && agent::shut_down(&vmm.directory().agent(), ANSWER_TIMEOUT).is_ok()
    {
        return Ok(());
    }
    qmp.execute::<Value>("system_powerdown", json!({})).map(drop)
}

fn qemu_of(rundir: &RunDir) -> Option<Vmm> {
    State::read(rundir).ok().flatten().and_then(|state| state.vmm)
}

/// Boots the guest from the newest state of its disks. No checkpoint is valid any more that the disks could belong to.
fn boot(host: &Host, resource: &Resource, definition: &Path, listing: Option<&Listing>) -> Result<(), StartError> {
    let name = resource.name.as_str();
    let definition = Definition::load(definition)?;
    if definition.name != resource.name {
        return Err(StartError::Name { name: name.into(), found: definition.name.to_string() });
    }
    let (store, credentials) = (&resource.protect.store, resource.protect.credentials.as_ref());
    // A store belongs to one VM over all of its boots.
    let uuid = listing.map(|listing| listing.vm.uuid);
    // Redo logs are merged only if the store exists and needs none of them: an unmounted store appears empty, too.
    let leftover_log = if listing.is_some() { LeftoverLog::Merge } else { LeftoverLog::Reject };
    let vm = NewVm { definition, qemu: None, uuid, leftover_log };
    let booted = boot::start(host, vm, |rundir, hardware| {
        let vm = Vm { uuid: hardware.uuid.unwrap_or_default(), name: name.into() };
        OwnerRecord::claim_for_boot(host, rundir, store, credentials, &vm, None).map_err(StartError::from)
    });
    match booted {
        Err(StartError::Life(source @ LifeError::Unfit { .. })) if listing.is_none() => {
            Err(StartError::NoStore { store: store.to_string(), source })
        }
        other => other.map(drop),
    }
}
