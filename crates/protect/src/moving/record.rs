//! `move.json` in the run directory: the data that recovery needs if a move is interrupted while the guest is stopped.

use super::remote::RemoteHost;
use crate::credential_paths::CredentialPaths;
use rekindle_store::Credentials;
use rekindle_store::StoreUrl;
use rekindle_store::types::Vm;
use rekindle_vm::rundir::{RunDir, write_json};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::PathBuf;

/// Format of `move.json` that this version of Rekindle writes.
const FORMAT: u32 = 1;

/// Content of `move.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MoveRecord {
    format: u32,
    /// The destination host.
    #[serde(rename = "far")]
    pub remote: RemoteHost,
    /// The VM's store.
    pub store: StoreUrl,
    #[serde(rename = "identity")]
    credentials: Option<CredentialPaths>,
    /// The VM's identity in the store.
    pub vm: Vm,
    /// The owner epoch that has committed the guest's last checkpoint. The host that becomes the next owner has the
    /// guest.
    pub epoch: u64,
    /// The owner epoch in which the guest started to run on this host. An administrator's claim does not change it,
    /// because an administrator's command does not run the guest.
    #[serde(default)]
    pub run: Option<u64>,
    /// A part of the operation's name in this host's own claim. It identifies the claim if this process is killed
    /// before it records the claim.
    #[serde(default)]
    pub token: String,
    /// The last checkpoint.
    pub checkpoint: u64,
}

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("move.json")
}

impl MoveRecord {
    pub(super) fn new(
        remote: RemoteHost,
        store: StoreUrl,
        credentials: Option<&Credentials>,
        vm: Vm,
        epoch: u64,
        run: Option<u64>,
        checkpoint: u64,
    ) -> Self {
        let token = uuid::Uuid::new_v4().simple().to_string();
        Self {
            format: FORMAT,
            remote,
            store,
            credentials: credentials.and_then(CredentialPaths::of),
            vm,
            epoch,
            run,
            token,
            checkpoint,
        }
    }

    /// Returns the record for a later owner epoch, in which the destination host was about to run the guest.
    pub(super) fn with_owner_epoch(self, epoch: u64) -> Self {
        Self { epoch, run: Some(epoch), ..self }
    }

    /// Returns this host's credentials for the store.
    pub(super) fn credentials(&self) -> Option<Credentials> {
        self.credentials.as_ref().map(CredentialPaths::credentials)
    }

    pub(super) fn write(&self, rundir: &RunDir) -> io::Result<()> {
        write_json(&path(rundir), self)
    }

    pub(super) fn read(rundir: &RunDir) -> io::Result<Self> {
        let text = fs::read(path(rundir))?;
        let malformed =
            |why: String| io::Error::other(format!("{} is not a record of a move: {why}", path(rundir).display()));
        let record: Self = serde_json::from_slice(&text).map_err(|e| malformed(e.to_string()))?;
        if record.format == FORMAT { Ok(record) } else { Err(malformed(format!("it has format {}", record.format))) }
    }

    pub(super) fn remove(rundir: &RunDir) -> io::Result<()> {
        match fs::remove_file(path(rundir)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}
