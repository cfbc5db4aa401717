//! With which owner epoch a guest began to run here: `owner.json` in the run directory, of a guest that is protected or was restored.
//!
//! Whoever starts the guest elsewhere gives its store a new owner with a later such epoch (`docs/store-format.md`). From then on the
//! guest here can commit nothing. Who finds that out ends it: two guests of one VM are worse than none. Its disks' redo logs are left
//! as they are, since what it has written after its last checkpoint belongs to nobody any more.

use crate::progress::Progress;
use crate::target::TargetError;
use rekindle_store::remote::{Identity, SpareConnections};
use rekindle_store::types::{Guest, OnlyIf, Owner, Vm, now_us, utc};
use rekindle_store::{StoreError, StoreUrl, admin};
use rekindle_vm::life::LifeError;
use rekindle_vm::rundir::{RunDir, write_json};
use rekindle_vm::shutdown::pull_the_plug;
use rekindle_vm::state::State;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::PathBuf;
use uuid::Uuid;

/// `owner.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    store: StoreUrl,
    /// Certificate, key and authority for a store on a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    identity: Option<[PathBuf; 3]>,
    /// The epoch.
    run: u64,
    /// When the guest began to run here, in µs since 1970; not in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    since_us: Option<u64>,
    /// Who has the guest now, if it is not to run here any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    over: Option<String>,
}

/// A guest that is not to run here any more.
#[derive(Debug, thiserror::Error)]
#[error(
    "{name} is not to run here any more: {owner} has it; what ran of it here was ended, and the redo logs of its disks are as they \
     were; clear up: rekindle stop {name}"
)]
pub struct Over {
    name: String,
    owner: String,
}

/// A store that this host has written, and that is not there any more.
#[derive(Debug, thiserror::Error)]
#[error(
    "{store}: the store of VM {name} is gone: this host has been its owner{}, and now there is {} at that path; is the file system with it \
     mounted? To abandon the old checkpoints and start a new store, after making sure that {name} runs on no other host: {}",
    since.as_ref().map(|since| format!(" since {since}")).unwrap_or_default(),
    if *unused { "a new store without a VM" } else { "no store" },
    self.remedy()
)]
pub struct Gone {
    /// The VM.
    pub name: String,
    /// Where the store was.
    pub store: String,
    /// Since when this host was its owner, if that is known.
    pub since: Option<String>,
    /// There is a new store, which no VM uses yet.
    pub unused: bool,
}

impl Gone {
    /// The command that abandons what was in it.
    #[must_use]
    pub fn remedy(&self) -> String {
        format!("rekindle protect {} --store {} --create-store --abandon-old-checkpoints", self.name, self.store)
    }
}

/// Why a guest that is not to run any more could not be ended.
#[derive(Debug, thiserror::Error)]
pub enum GiveUpError {
    /// That cannot be written down.
    #[error(transparent)]
    RunDir(#[from] TargetError),
    /// Something of it runs on.
    #[error(transparent)]
    Life(#[from] LifeError),
}

/// A store by a name that does not depend on where one is.
fn full(store: &StoreUrl) -> StoreUrl {
    match store {
        StoreUrl::Directory(path) => StoreUrl::Directory(std::path::absolute(path).unwrap_or_else(|_| path.clone())),
        StoreUrl::Remote(_) => store.clone(),
    }
}

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("owner.json")
}

impl Owned {
    pub(crate) fn new(store: &StoreUrl, identity: Option<&Identity>, run: u64) -> Self {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let identity = identity.map(|Identity { cert, key, ca }| [cert, key, ca].map(absolute));
        Self { store: full(store), identity, run, since_us: Some(now_us()), over: None }
    }

    /// Become the owner of `store` for a guest that is about to run here, on a condition if need be, and note it.
    ///
    /// # Errors
    /// [`OwnError`]; the guest must not run then.
    pub fn begin(
        rundir: &RunDir,
        store: &StoreUrl,
        identity: Option<&Identity>,
        vm: &Vm,
        owner: &Owner,
        only_if: Option<OnlyIf>,
    ) -> Result<admin::Fenced, OwnError> {
        Self::begin_over(&SpareConnections::default(), rundir, store, identity, vm, owner, only_if)
    }

    /// As [`Owned::begin`], over a line to a server that is there already.
    ///
    /// # Errors
    /// As [`Owned::begin`].
    pub fn begin_over(
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

    /// That of the VM of `rundir`, if there is one.
    ///
    /// # Errors
    /// [`TargetError::RunDir`] when it is there and cannot be read: then it is not known whether the guest may run.
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

    /// Whether it is about this store.
    pub(crate) fn is_of(&self, store: &StoreUrl) -> bool {
        self.store == full(store)
    }

    /// What to report when its store has turned out not to be there.
    pub(crate) fn gone(&self, rundir: &RunDir, e: &StoreError) -> Gone {
        Gone {
            name: rundir.name().into(),
            store: self.store.to_string(),
            since: self.since_us.map(utc),
            unused: matches!(e, StoreError::Unused { .. }),
        }
    }

    /// Drops the record of a store that is gone, so that its VM can start a new one.
    ///
    /// # Errors
    /// [`TargetError::RunDir`]; then it may still be there.
    pub(crate) fn abandon(rundir: &RunDir) -> Result<(), TargetError> {
        // What was collected for the old store is in no checkpoint of a new one.
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

    /// The epoch.
    #[must_use]
    pub fn run(&self) -> u64 {
        self.run
    }

    /// That the guest of `rundir` may run here, as far as is known without asking the store.
    ///
    /// # Errors
    /// [`Over`].
    pub fn may_run(&self, rundir: &RunDir) -> Result<(), Over> {
        match &self.over {
            None => Ok(()),
            Some(owner) => Err(Over { name: rundir.name().into(), owner: owner.clone() }),
        }
    }

    fn identity(&self) -> Option<Identity> {
        self.identity.clone().map(|[cert, key, ca]| Identity { cert, key, ca })
    }

    /// Ask the store who has the guest `uuid`, if somebody else has.
    ///
    /// # Errors
    /// The store's: nothing is known then. [`StoreError::OtherVm`] too: what was there before is not, and what is has other epochs.
    pub fn ask(&self, uuid: Uuid) -> Result<Option<Owner>, StoreError> {
        let found = admin::listing(&self.store, self.identity().as_ref())?;
        if found.vm.uuid != uuid {
            let store = self.store.to_string();
            return Err(StoreError::OtherVm { store, found: found.vm, expected: uuid, name: None });
        }
        Ok(found.owner.filter(|owner| owner.run > self.run))
    }

    /// The guest has shut itself down in order: note in the store that no checkpoint is wanted any more, unless somebody else has
    /// the guest.
    ///
    /// # Errors
    /// [`StoreError::Superseded`] if somebody has; the store's others, and then it is not known.
    pub fn ended(&self, vm: &Vm) -> Result<(), StoreError> {
        let owner = Owner::here(&format!("stop {}", vm.name)).with(Guest::Ended);
        let only_if = Some(OnlyIf::Run { run: self.run });
        match admin::fence(&self.store, vm, &owner, only_if, self.identity().as_ref()) {
            // Nothing to go back to.
            Err(e) if e.is_no_store() => Ok(()),
            other => other.map(drop),
        }
    }

    /// As [`Owned::ended`], for the VM of a run directory; before anything of its disks is merged, which are another host's if that has
    /// the guest.
    ///
    /// # Errors
    /// As [`Owned::ended`]; [`Over`].
    pub fn report_end(&self, rundir: &RunDir, state: &State) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.may_run(rundir)?;
        Ok(self.ended(&Vm { uuid: state.hardware.uuid.unwrap_or_default(), name: rundir.name().into() })?)
    }

    /// Somebody else has the guest: end what runs of it here, at once. Nothing is merged.
    ///
    /// # Errors
    /// [`GiveUpError`]; to be tried again.
    pub fn give_up(&self, rundir: &RunDir, owner: &Owner) -> Result<Over, GiveUpError> {
        let owner = owner.to_string();
        // First: nobody is to boot it again here.
        Self { over: Some(owner.clone()), ..self.clone() }.write(rundir)?;
        pull_the_plug(rundir)?;
        Ok(Over { name: rundir.name().into(), owner })
    }
}

/// Why a guest may not begin to run.
#[derive(Debug, thiserror::Error)]
pub enum OwnError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It cannot be noted.
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
    fn a_guest_that_began_elsewhere_is_over_here_and_its_end_is_not_told() {
        let root = tempfile::tempdir().unwrap();
        let store = StoreUrl::Directory(root.path().join("store"));
        admin::init(&store, None).unwrap();
        let [here, there] = ["here", "there"].map(|name| {
            let rundir = RunDir::new(&root.path().join(name), "web");
            rundir.create().unwrap();
            rundir
        });
        let begin = |rundir: &RunDir, guest| {
            Owned::begin(rundir, &store, None, &vm(), &Owner::here("test").with(guest), None).unwrap();
            Owned::read(rundir).unwrap().unwrap()
        };
        let first = begin(&here, Guest::Booted);
        assert!(first.is_of(&store) && first.ask(vm().uuid).unwrap().is_none());
        let second = begin(&there, Guest::Restored);
        let owner = first.ask(vm().uuid).unwrap().unwrap();
        assert_eq!((owner.run, owner.boot), (2, 1));
        assert!(matches!(first.ended(&vm()), Err(StoreError::Superseded { .. })));
        // The run directory has no state: there is nothing to be ended.
        let over = first.give_up(&here, &owner).unwrap();
        assert!(over.to_string().contains("rekindle stop web"), "{over}");
        assert!(Owned::read(&here).unwrap().unwrap().may_run(&here).is_err());
        assert!(second.may_run(&there).is_ok() && second.ask(vm().uuid).unwrap().is_none());
        second.ended(&vm()).unwrap();
        assert_eq!(second.ask(vm().uuid).unwrap().unwrap().guest, Guest::Ended);
        // A store that was made where that of this VM is not mounted says nothing of it.
        assert!(matches!(first.ask(Uuid::from_u128(8)), Err(StoreError::OtherVm { .. })));
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_none() {
        let root = tempfile::tempdir().unwrap();
        let rundir = RunDir::new(root.path(), "web");
        rundir.create().unwrap();
        assert!(Owned::read(&rundir).unwrap().is_none());
        fs::write(path(&rundir), "{").unwrap();
        assert!(Owned::read(&rundir).is_err());
    }
}
