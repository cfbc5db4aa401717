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
    /// The epoch with which the guest began to run here: an administrator's claim leaves it, as the guest is none of his.
    #[serde(default)]
    pub run: Option<u64>,
    /// What this host's own claim has in its name, so that it is known again when nobody lived to write down that it was made.
    #[serde(default)]
    pub token: String,
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
        (epoch, run): (u64, Option<u64>),
        checkpoint: u64,
    ) -> Self {
        let token = uuid::Uuid::new_v4().simple().to_string();
        Self { format: FORMAT, far, store, identity: identity.map(files), vm, epoch, run, token, checkpoint }
    }

    /// The same after another owner epoch, of one that had begun to run the guest.
    pub(super) fn at(self, epoch: u64) -> Self {
        Self { epoch, run: Some(epoch), ..self }
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
