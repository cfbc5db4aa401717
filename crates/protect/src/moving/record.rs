//! `move.json` of the run directory: what has to be known of a move once its guest is stopped, for whoever finds it cut off.

use super::far::Far;
use rekindle_store::StoreUrl;
use rekindle_store::remote::Identity;
use rekindle_store::types::Vm;
use rekindle_vm::rundir::{RunDir, write_json};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::PathBuf;

/// The format that this Rekindle writes.
const FORMAT: u32 = 1;

/// `move.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    format: u32,
    /// Where it goes.
    pub far: Far,
    /// Where its checkpoints are.
    pub store: StoreUrl,
    identity: Option<[PathBuf; 3]>,
    /// Who it is to the store.
    pub vm: Vm,
    /// The owner epoch that has committed its last checkpoint. Who becomes the owner after it has the guest.
    pub epoch: u64,
    /// That checkpoint.
    pub checkpoint: u64,
}

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("move.json")
}

impl Record {
    pub(super) fn new(
        far: Far,
        store: StoreUrl,
        identity: Option<&Identity>,
        vm: Vm,
        epoch: u64,
        checkpoint: u64,
    ) -> Self {
        Self { format: FORMAT, far, store, identity: identity.map(files), vm, epoch, checkpoint }
    }

    /// The same after another owner epoch.
    pub(super) fn at(self, epoch: u64) -> Self {
        Self { epoch, ..self }
    }

    /// Certificate, key and authority, for a store on a server.
    pub(super) fn identity(&self) -> Option<Identity> {
        self.identity.clone().map(identity_of)
    }

    pub(super) fn write(&self, rundir: &RunDir) -> io::Result<()> {
        write_json(&path(rundir), self)
    }

    pub(super) fn read(rundir: &RunDir) -> io::Result<Self> {
        let text = fs::read(path(rundir))?;
        let odd = |why: String| io::Error::other(format!("{} cannot be understood: {why}", path(rundir).display()));
        let record: Self = serde_json::from_slice(&text).map_err(|e| odd(e.to_string()))?;
        if record.format == FORMAT { Ok(record) } else { Err(odd(format!("it has format {}", record.format))) }
    }

    pub(super) fn remove(rundir: &RunDir) -> io::Result<()> {
        match fs::remove_file(path(rundir)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

/// The files of an identity, as they are written down.
pub(super) fn files(identity: &Identity) -> [PathBuf; 3] {
    [identity.cert.clone(), identity.key.clone(), identity.ca.clone()]
}

/// The identity of files that were written down.
pub(super) fn identity_of([cert, key, ca]: [PathBuf; 3]) -> Identity {
    Identity { cert, key, ca }
}
