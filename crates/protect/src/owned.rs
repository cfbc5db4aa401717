//! `owner.json` in the run directory of a guest that is protected or was restored: the owner epoch in which it
//! started to run here.
//!
//! A host that starts the guest elsewhere becomes the store's owner in a later such epoch (`docs/store-format.md`).
//! From then on the guest here cannot commit. The process that detects this ends the guest: two running guests of one
//! VM are worse than none. The redo logs of its disks stay as they are, since writes after its last checkpoint are
//! not part of the guest any more.

use crate::progress::Progress;
use crate::target::TargetError;
use rekindle_store::remote::{Identity, SpareConnections};
use rekindle_store::types::{Guest, OnlyIf, Owner, Vm, now_us, utc};
use rekindle_store::{StoreError, StoreUrl, admin};
use rekindle_vm::error::LifeError;
use rekindle_vm::rundir::{RunDir, write_json};
use rekindle_vm::shutdown::pull_the_plug;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::PathBuf;
use uuid::Uuid;

/// The contents of `owner.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerRecord {
    store: StoreUrl,
    /// Certificate, key and authority for a store on a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    identity: Option<[PathBuf; 3]>,
    run: u64,
    /// When the guest started to run here, in µs since 1970; missing in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    since_us: Option<u64>,
    /// The owner of the guest, if it must not run here any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    over: Option<String>,
}

/// Another host has the guest; it must not run here any more.
#[derive(Debug, thiserror::Error)]
#[error(
    "{name} must not run here any more: {owner} has it; its QEMU and disk servers here were ended, and the redo logs of its disks are \
     unchanged; to remove the rest: rekindle stop {name}"
)]
pub struct OwnedElsewhere {
    name: String,
    owner: String,
}

/// A store that this host has written is missing.
#[derive(Debug, thiserror::Error)]
#[error(
    "{store}: the store of VM {name} is gone: this host has been its owner{}, and now there is {} at that path; is the file system with it \
     mounted? To abandon the old checkpoints and start a new store, after making sure that {name} runs on no other host: {}",
    since.as_ref().map(|since| format!(" since {since}")).unwrap_or_default(),
    if *unused { "a new store without a VM" } else { "no store" },
    self.remedy()
)]
pub struct StoreGone {
    pub name: String,
    pub store: String,
    /// When this host became its owner, if that is known.
    pub since: Option<String>,
    /// There is a new store at its path, which no VM uses yet.
    pub unused: bool,
}

impl StoreGone {
    /// The command that abandons its checkpoints.
    #[must_use]
    pub fn remedy(&self) -> String {
        format!("rekindle protect {} --store {} --create-store --abandon-old-checkpoints", self.name, self.store)
    }
}

/// Why a guest that must not run here any more could not be ended.
#[derive(Debug, thiserror::Error)]
pub enum EndGuestError {
    /// The record could not be written.
    #[error(transparent)]
    RunDir(#[from] TargetError),
    /// A process of the guest still runs.
    #[error(transparent)]
    Life(#[from] LifeError),
}

/// The store's URL, independent of the working directory.
fn full(store: &StoreUrl) -> StoreUrl {
    match store {
        StoreUrl::Directory(path) => StoreUrl::Directory(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
        StoreUrl::Remote(_) => store.clone(),
    }
}

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("owner.json")
}

impl OwnerRecord {
    pub(crate) fn new(store: &StoreUrl, identity: Option<&Identity>, run: u64) -> Self {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let identity = identity.map(|Identity { cert, key, ca }| [cert, key, ca].map(absolute));
        Self { store: full(store), identity, run, since_us: Some(now_us()), over: None }
    }

    /// Becomes the owner of `store` for a guest that is about to run here, if `only_if` holds, and records it.
    ///
    /// # Errors
    /// [`OwnError`]; the guest must not run then.
    pub fn claim(
        rundir: &RunDir,
        store: &StoreUrl,
        identity: Option<&Identity>,
        vm: &Vm,
        owner: &Owner,
        only_if: Option<OnlyIf>,
    ) -> Result<admin::Fenced, OwnError> {
        Self::claim_over(&SpareConnections::default(), rundir, store, identity, vm, owner, only_if)
    }

    /// As [`OwnerRecord::claim`], over an existing connection to a server.
    ///
    /// # Errors
    /// As [`OwnerRecord::claim`].
    pub fn claim_over(
        spare: &SpareConnections,
        rundir: &RunDir,
        store: &StoreUrl,
        identity: Option<&Identity>,
        vm: &Vm,
        owner: &Owner,
        only_if: Option<OnlyIf>,
    ) -> Result<admin::Fenced, OwnError> {
        let fenced = admin::fence_over(spare, store, vm, owner, only_if, identity)?;
        Self::new(store, identity, fenced.epoch).write(rundir)?;
        Ok(fenced)
    }

    /// Reads the record of the VM of `rundir`, if there is one.
    ///
    /// # Errors
    /// [`TargetError::RunDir`] if it exists and cannot be read: then it is not known whether the guest may run.
    pub fn read(rundir: &RunDir) -> Result<Option<Self>, TargetError> {
        let failed = |source| TargetError::RunDir { path: path(rundir), source };
        match fs::read(path(rundir)) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| failed(e.into())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    pub(crate) fn write(&self, rundir: &RunDir) -> Result<(), TargetError> {
        write_json(&path(rundir), self).map_err(|source| TargetError::RunDir { path: path(rundir), source })
    }

    /// Whether the record is about `store`.
    pub(crate) fn is_of(&self, store: &StoreUrl) -> bool {
        self.store == full(store)
    }

    /// The error to report when the store is missing.
    pub(crate) fn store_gone(&self, rundir: &RunDir, e: &StoreError) -> StoreGone {
        StoreGone {
            name: rundir.name().into(),
            store: self.store.to_string(),
            since: self.since_us.map(utc),
            unused: matches!(e, StoreError::Unused { .. }),
        }
    }

    /// Removes the record of a missing store, so that its VM can start a new one.
    ///
    /// # Errors
    /// [`TargetError::RunDir`]; then the record may still exist.
    pub(crate) fn abandon(rundir: &RunDir) -> Result<(), TargetError> {
        // Pages that were collected for the old store are in no checkpoint of a new one.
        for path in [Progress::path(rundir), path(rundir)] {
            match fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(TargetError::RunDir { path, source });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The owner epoch in which the guest started to run here.
    #[must_use]
    pub fn run(&self) -> u64 {
        self.run
    }

    /// Checks that the guest of `rundir` may run here, as far as is known without asking the store.
    ///
    /// # Errors
    /// [`OwnedElsewhere`].
    pub fn may_run(&self, rundir: &RunDir) -> Result<(), OwnedElsewhere> {
        match &self.over {
            None => Ok(()),
            Some(owner) => Err(OwnedElsewhere { name: rundir.name().into(), owner: owner.clone() }),
        }
    }

    fn identity(&self) -> Option<Identity> {
        self.identity.clone().map(|[cert, key, ca]| Identity { cert, key, ca })
    }

    /// Returns the newer owner of the guest `uuid` if the store has one.
    ///
    /// # Errors
    /// Errors of the store: then nothing is known. [`StoreError::OtherVm`] if another store is at its place, which
    /// has other epochs.
    pub fn ask(&self, uuid: Uuid) -> Result<Option<Owner>, StoreError> {
        let found = admin::listing(&self.store, self.identity().as_ref())?;
        if found.vm.uuid != uuid {
            let store = self.store.to_string();
            return Err(StoreError::OtherVm { store, found: found.vm, expected: uuid, name: None });
        }
        Ok(found.owner.filter(|owner| owner.run > self.run))
    }

    /// Records in the store that the guest has shut down cleanly and no checkpoint is needed any more, unless another
    /// host has the guest.
    ///
    /// # Errors
    /// [`StoreError::Superseded`] if another host has it; for other errors of the store it is not known.
    pub fn ended(&self, vm: &Vm) -> Result<(), StoreError> {
        let owner = Owner::here(&format!("stop {}", vm.name)).with(Guest::Ended);
        let only_if = Some(OnlyIf::Run { run: self.run });
        match admin::fence(&self.store, vm, &owner, only_if, self.identity().as_ref()) {
            // No checkpoint to resume from.
            Err(e) if e.is_no_store() => Ok(()),
            other => other.map(drop),
        }
    }

    /// As [`OwnerRecord::ended`], for the VM of a run directory. Must be called before its redo logs are merged:
    /// another host may have the guest.
    ///
    /// # Errors
    /// As [`OwnerRecord::ended`]; [`OwnedElsewhere`].
    pub fn report_shutdown(
        &self,
        rundir: &RunDir,
        state: &State,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.may_run(rundir)?;
        Ok(self.ended(&Vm { uuid: state.hardware.uuid.unwrap_or_default(), name: rundir.name().into() })?)
    }

    /// Ends what runs here of a guest that another host has, immediately. Nothing is merged.
    ///
    /// # Errors
    /// [`EndGuestError`]; try again.
    pub fn end_guest(&self, rundir: &RunDir, owner: &Owner) -> Result<OwnedElsewhere, EndGuestError> {
        let owner = owner.to_string();
        // First, so that it is not booted here again.
        Self { over: Some(owner.clone()), ..self.clone() }.write(rundir)?;
        pull_the_plug(rundir)?;
        Ok(OwnedElsewhere { name: rundir.name().into(), owner })
    }
}

/// Why a guest must not start to run.
#[derive(Debug, thiserror::Error)]
pub enum OwnError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    RunDir(#[from] TargetError),
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn vm() -> Vm {
        Vm { uuid: Uuid::from_u128(7), name: "web".into() }
    }

    #[test]
    fn a_guest_that_runs_elsewhere_ends_here_and_its_shutdown_is_not_recorded() {
        let root = tempfile::tempdir().unwrap();
        let store = StoreUrl::Directory(root.path().join("store"));
        admin::init(&store, None).unwrap();
        let [here, there] = ["here", "there"].map(|name| {
            let rundir = RunDir::new(&root.path().join(name), "web");
            rundir.create().unwrap();
            rundir
        });
        let begin = |rundir: &RunDir, guest| {
            OwnerRecord::claim(rundir, &store, None, &vm(), &Owner::here("test").with(guest), None).unwrap();
            OwnerRecord::read(rundir).unwrap().unwrap()
        };
        let first = begin(&here, Guest::Booted);
        assert!(first.is_of(&store) && first.ask(vm().uuid).unwrap().is_none());
        let second = begin(&there, Guest::Restored);
        let owner = first.ask(vm().uuid).unwrap().unwrap();
        assert_eq!((owner.run, owner.boot), (2, 1));
        assert!(matches!(first.ended(&vm()), Err(StoreError::Superseded { .. })));
        // The run directory has no state: nothing to end.
        let over = first.end_guest(&here, &owner).unwrap();
        assert!(over.to_string().contains("rekindle stop web"), "{over}");
        assert!(OwnerRecord::read(&here).unwrap().unwrap().may_run(&here).is_err());
        assert!(second.may_run(&there).is_ok() && second.ask(vm().uuid).unwrap().is_none());
        second.ended(&vm()).unwrap();
        assert_eq!(second.ask(vm().uuid).unwrap().unwrap().guest, Guest::Ended);
        // Another VM's store, created where this VM's is not mounted, decides nothing.
        assert!(matches!(first.ask(Uuid::from_u128(8)), Err(StoreError::OtherVm { .. })));
    }

    #[test]
    fn a_record_that_cannot_be_read_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        assert!(OwnerRecord::read(&rundir).unwrap().is_none());
        fs::write(path(&rundir), "{").unwrap();
        assert!(OwnerRecord::read(&rundir).is_err());
    }
}
