//! `owner.json` in the run directory of a guest that is protected or was restored: the owner epoch in which the guest
//! started on this host.
//!
//! Another host that starts the guest becomes the store's owner in a later owner epoch (`docs/store-format.md`). From
//! then on the guest on this host cannot commit. The process that detects this ends the guest: two running guests of
//! one VM are worse than none. The redo logs of the guest's disks stay as they are, because writes after its last
//! checkpoint are not part of the guest any more.

use crate::credential_paths::CredentialPaths;
use crate::known_store::{KnownStoreError, KnownStoreFile};
use crate::progress::Progress;
use crate::target::TargetError;
use rekindle_life::shutdown::pull_the_plug;
use rekindle_store::types::{Expected, Guest, OnlyIf, Owner, Vm, now_us, utc};
use rekindle_store::{Credentials, StoreError, StoreUrl, admin};
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::{RunDir, read_record, write_json};
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::PathBuf;
use uuid::Uuid;

/// Content of `owner.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerRecord {
    store: StoreUrl,
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "identity")]
    credentials: Option<CredentialPaths>,
    /// The owner epoch in which the guest started on this host.
    run: u64,
    /// When the guest started to run on this host, in µs since 1970; missing in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    since_us: Option<u64>,
    /// The new owner of the guest. If set, the guest must not run on this host any more.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "over")]
    new_owner: Option<String>,
}

/// Another host has the guest, which must not run on this host any more.
#[derive(Debug, thiserror::Error)]
#[error(
    "{name} must not run here any more: {owner} has it; its QEMU and disk servers here were ended, and the redo logs \
     of its disks are unchanged; to remove the rest: rekindle stop {name}"
)]
pub struct OwnedElsewhere {
    name: String,
    owner: String,
}

/// A store that this host has written is missing.
#[derive(Debug, thiserror::Error)]
#[error(
    "{store}: the store of VM {name} is gone: this host has been its owner{}, and now there is {} at that path; is the \
     file system with it mounted? To abandon the old checkpoints and start a new store, after making sure that {name} \
     runs on no other host: {}",
    since.as_ref().map(|since| format!(" since {since}")).unwrap_or_default(),
    if *unused { "a new store without a VM" } else { "no store" },
    self.remedy()
)]
pub struct StoreGone {
    pub name: String,
    pub store: String,
    /// When this host became the store's owner, if that is known.
    pub since: Option<String>,
    /// The path has a new store that no VM uses yet.
    pub unused: bool,
    /// The store is used with a key.
    pub has_key: bool,
}

impl StoreGone {
    /// Returns the command that abandons the missing store's checkpoints.
    #[must_use]
    pub fn remedy(&self) -> String {
        let Self { name, store, has_key, .. } = self;
        let key = if *has_key { " --key-file FILE (or --key-command COMMAND)" } else { "" };
        format!("rekindle protect {name} --store {store} --create-store --abandon-old-checkpoints{key}")
    }
}

/// Why a guest that must not run on this host any more could not be ended.
#[derive(Debug, thiserror::Error)]
pub enum EndGuestError {
    /// `owner.json` could not be written.
    #[error(transparent)]
    RunDir(#[from] TargetError),
    /// A process of the guest still runs.
    #[error(transparent)]
    Life(#[from] LifeError),
}

/// Makes the store's URL independent of the working directory.
fn absolute_url(store: &StoreUrl) -> StoreUrl {
    match store {
        StoreUrl::Directory(path) => StoreUrl::Directory(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
        StoreUrl::Objects(_) => store.clone(),
    }
}

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("owner.json")
}

impl OwnerRecord {
    pub(crate) fn new(store: &StoreUrl, credentials: Option<&Credentials>, run: u64) -> Self {
        let credentials = credentials.and_then(CredentialPaths::of);
        Self { store: absolute_url(store), credentials, run, since_us: Some(now_us()), new_owner: None }
    }

    /// Makes this host the owner of `store` for a guest that is about to run on it, if `only_if` holds. Records the
    /// ownership.
    ///
    /// # Errors
    /// [`OwnError`]: the guest must not run.
    pub fn claim(
        rundir: &RunDir,
        store: &StoreUrl,
        credentials: Option<&Credentials>,
        vm: &Vm,
        owner: &Owner,
        only_if: Option<OnlyIf>,
    ) -> Result<admin::Fenced, OwnError> {
        let fenced = admin::fence(store, vm, owner, only_if, credentials)?;
        Self::new(store, credentials, fenced.epoch).write(rundir)?;
        Ok(fenced)
    }

    /// Makes this host the owner of `store` for a guest that is about to boot from its disks, unless the store was exchanged
    /// or rolled back, or its owner epoch is not `at_epoch`. Records the ownership, and what is known of the store.
    ///
    /// # Errors
    /// [`OwnError`]: the guest must not run.
    pub fn claim_for_boot(
        host: &Host,
        rundir: &RunDir,
        store: &StoreUrl,
        credentials: Option<&Credentials>,
        vm: &Vm,
        at_epoch: Option<u64>,
    ) -> Result<(), OwnError> {
        let known_store = KnownStoreFile::of(host, rundir.name());
        let known = known_store.check(credentials)?;
        let only_if = Some(OnlyIf::Expected(Expected { at_epoch, known, ..Expected::default() }));
        let owner = Owner::here(&format!("start {}", rundir.name())).with(Guest::Booted);
        let fenced = Self::claim(rundir, store, credentials, vm, &owner, only_if)?;
        known_store.note(store, fenced.known);
        Ok(())
    }

    /// Reads the record of the VM of `rundir`. `None`: there is no record.
    ///
    /// # Errors
    /// [`TargetError::RunDir`]: the record exists but cannot be read, so it is unknown whether the guest may run.
    pub fn read(rundir: &RunDir) -> Result<Option<Self>, TargetError> {
        let failed = |source| TargetError::RunDir { path: path(rundir), source };
        match read_record(&path(rundir)) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| failed(e.into())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    pub(crate) fn write(&self, rundir: &RunDir) -> Result<(), TargetError> {
        write_json(&path(rundir), self).map_err(|source| TargetError::RunDir { path: path(rundir), source })
    }

    /// Returns whether the record is about `store`.
    pub(crate) fn is_of(&self, store: &StoreUrl) -> bool {
        self.store == absolute_url(store)
    }

    /// Returns the error to report if the store is missing.
    pub(crate) fn store_gone(&self, rundir: &RunDir, e: &StoreError) -> StoreGone {
        StoreGone {
            name: rundir.name().into(),
            store: self.store.to_string(),
            since: self.since_us.map(utc),
            unused: matches!(e, StoreError::Unused { .. }),
            has_key: self.credentials().is_some_and(|credentials| credentials.keys.is_some()),
        }
    }

    /// Removes the record of a missing store, so that its VM can start a new one.
    ///
    /// # Errors
    /// [`TargetError::RunDir`]: the record may still exist.
    pub(crate) fn abandon(rundir: &RunDir) -> Result<(), TargetError> {
        // The progress record must go, too: pages that were collected for the old store are in no checkpoint of a new
        // one.
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

    /// Returns the owner epoch in which the guest started on this host.
    #[must_use]
    pub fn run(&self) -> u64 {
        self.run
    }

    /// Checks that the guest of `rundir` may run on this host, as far as is known without a query to the store.
    ///
    /// # Errors
    /// [`OwnedElsewhere`]: another host has the guest.
    pub fn may_run(&self, rundir: &RunDir) -> Result<(), OwnedElsewhere> {
        match &self.new_owner {
            None => Ok(()),
            Some(owner) => Err(OwnedElsewhere { name: rundir.name().into(), owner: owner.clone() }),
        }
    }

    fn credentials(&self) -> Option<Credentials> {
        self.credentials.as_ref().map(CredentialPaths::credentials)
    }

    /// Queries the store for a newer owner of the guest `uuid`. `None`: this host is still the owner.
    ///
    /// # Errors
    /// [`StoreError`]: the owner is unknown. [`StoreError::OtherVm`]: the path now has another VM's store, whose epochs
    /// mean nothing for this guest.
    pub fn query_new_owner(&self, uuid: Uuid) -> Result<Option<Owner>, StoreError> {
        let listing = admin::listing(&self.store, self.credentials().as_ref())?;
        if listing.vm.uuid != uuid {
            let store = self.store.to_string();
            return Err(StoreError::OtherVm { store, found: listing.vm, expected: uuid, name: None });
        }
        Ok(listing.owner.filter(|owner| owner.run > self.run))
    }

    /// Records in the store that the guest has shut down cleanly and needs no checkpoint any more, unless another host
    /// has the guest. From then on this host knows the store in this state.
    ///
    /// # Errors
    /// [`StoreError::Superseded`]: another host has the guest. After other errors it is unknown whether one has.
    fn report_end(&self, known_store: &KnownStoreFile, vm: &Vm) -> Result<(), StoreError> {
        let owner = Owner::here(&format!("stop {}", vm.name)).with(Guest::Ended);
        let only_if = Some(OnlyIf::Run { run: self.run });
        match admin::fence(&self.store, vm, &owner, only_if, self.credentials().as_ref()) {
            // Without a store there is no checkpoint to resume from.
            Err(e) if e.is_no_store() => Ok(()),
            fenced => {
                known_store.note(&self.store, fenced?.known);
                Ok(())
            }
        }
    }

    /// Records in the store that the guest of `rundir` has shut down cleanly and needs no checkpoint any more. Must be called
    /// before the VM's redo logs are merged: another host may have the guest.
    ///
    /// # Errors
    /// [`OwnedElsewhere`], or [`StoreError::Superseded`]: another host has the guest. After other errors it is unknown whether
    /// one has.
    pub fn report_shutdown(
        &self,
        host: &Host,
        rundir: &RunDir,
        state: &State,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.may_run(rundir)?;
        let vm = Vm { uuid: state.hardware.uuid.unwrap_or_default(), name: rundir.name().into() };
        Ok(self.report_end(&KnownStoreFile::of(host, rundir.name()), &vm)?)
    }

    /// Ends immediately every process on this host of a guest that another host has. No redo log is merged.
    ///
    /// # Errors
    /// [`EndGuestError`]: a process may still run; call this again.
    pub fn end_guest(&self, rundir: &RunDir, owner: &Owner) -> Result<OwnedElsewhere, EndGuestError> {
        let owner = owner.to_string();
        // Must precede the kill, so that the guest is not booted on this host again.
        Self { new_owner: Some(owner.clone()), ..self.clone() }.write(rundir)?;
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
    KnownStore(#[from] KnownStoreError),
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
        let [rundir_a, rundir_b] = ["a", "b"].map(|name| {
            let rundir = RunDir::new(&root.path().join(name), "web");
            rundir.create().unwrap();
            rundir
        });
        let start_guest = |rundir: &RunDir, guest| {
            OwnerRecord::claim(rundir, &store, None, &vm(), &Owner::here("test").with(guest), None).unwrap();
            OwnerRecord::read(rundir).unwrap().unwrap()
        };
        let record_a = start_guest(&rundir_a, Guest::Booted);
        assert!(record_a.is_of(&store) && record_a.query_new_owner(vm().uuid).unwrap().is_none());
        let record_b = start_guest(&rundir_b, Guest::Restored);
        let owner = record_a.query_new_owner(vm().uuid).unwrap().unwrap();
        assert_eq!((owner.run, owner.boot), (2, 1));
        let [known_a, known_b] =
            [&rundir_a, &rundir_b].map(|rundir| KnownStoreFile::in_directory(rundir.path(), "web"));
        assert!(matches!(record_a.report_end(&known_a, &vm()), Err(StoreError::Superseded { .. })));
        assert_eq!(known_a.check(None).unwrap(), None);
        // The run directory has no state, so there is no process to end.
        let superseded = record_a.end_guest(&rundir_a, &owner).unwrap();
        assert!(superseded.to_string().contains("rekindle stop web"), "{superseded}");
        assert!(OwnerRecord::read(&rundir_a).unwrap().unwrap().may_run(&rundir_a).is_err());
        assert!(record_b.may_run(&rundir_b).is_ok() && record_b.query_new_owner(vm().uuid).unwrap().is_none());
        record_b.report_end(&known_b, &vm()).unwrap();
        assert_eq!(known_b.check(None).unwrap().unwrap().reached.epoch, 3, "the end is the third claim");
        assert_eq!(record_b.query_new_owner(vm().uuid).unwrap().unwrap().guest, Guest::Ended);
        // Another VM's store at the same path, e.g. because this VM's store is not mounted, decides nothing.
        assert!(matches!(record_a.query_new_owner(Uuid::from_u128(8)), Err(StoreError::OtherVm { .. })));
    }

    #[test]
    fn a_record_that_cannot_be_read_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        assert!(OwnerRecord::read(&rundir).unwrap().is_none());
        fs::write(path(&rundir), "{").unwrap();
        assert!(OwnerRecord::read(&rundir).is_err());
        // The store of an earlier version, on a server.
        fs::write(path(&rundir), r#"{"store":"tls://backup:7001/web","run":1}"#).unwrap();
        let e = OwnerRecord::read(&rundir).unwrap_err();
        let cause = std::error::Error::source(&e).unwrap().to_string();
        assert!(cause.contains("mount the directory"), "{cause}");
    }
}
