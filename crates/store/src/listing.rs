//! Lists the contents of a store.

use crate::error::{Result, StoreError};
use crate::format::manifest::{Kept, Manifest};
use crate::format::names;
use crate::home::Home;
use crate::image::{describe, is_replaced, kept_entry, table};
use crate::log;
use crate::types::{CheckpointInfo, Owner, Vm};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    pub vm: Vm,
    /// Time when the store was created, in microseconds since 1970.
    pub created_us: u64,
    pub epoch: u64,
    /// `None` before the first claim.
    pub owner: Option<Owner>,
    /// Kept checkpoints, oldest first.
    pub checkpoints: Vec<ListedCheckpoint>,
    /// Bytes that the store uses on the disk.
    pub disk: u64,
    /// Bytes of RAM at the newest checkpoint.
    pub ram: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedCheckpoint {
    pub number: u64,
    /// `None` if the checkpoint is damaged.
    pub info: Option<CheckpointInfo>,
    /// Error message of a damaged checkpoint.
    pub error: Option<String>,
}

impl Listing {
    /// Returns the newest checkpoint, or `None` if the guest was booted or cleanly shut down since: its earlier state
    /// must not be restored.
    #[must_use]
    pub fn restorable(&self) -> Option<u64> {
        let boot = self.owner.as_ref().map_or(0, |owner| owner.boot);
        // The epoch of a damaged checkpoint is unknown. An attempt to restore it returns the error.
        let is_current = |listed: &&ListedCheckpoint| listed.info.as_ref().is_none_or(|info| info.epoch >= boot);
        self.checkpoints.last().filter(is_current).map(|listed| listed.number)
    }
}

fn inspect(home: &Home, manifest: &Manifest, kept: Kept) -> Result<CheckpointInfo> {
    let entry = kept_entry(home, manifest, kept)?;
    Ok(describe(&entry, &table(home, &entry)?))
}

pub(crate) fn list(home: &Home) -> Result<Listing> {
    let mut tries = 0;
    let (tail, inspected) = loop {
        tries += 1;
        let mut tail = log::tail(home)?;
        let manifest = tail.state.take().map(|(_, manifest)| manifest).unwrap_or_default();
        let inspected: Vec<_> =
            manifest.kept.iter().map(|kept| (kept.number, inspect(home, &manifest, *kept))).collect();
        // If the owner has removed a checkpoint meanwhile, start again.
        let is_old = |result: &Result<_>| result.as_ref().is_err_and(|e| is_replaced(home, e));
        if tries == log::TRIES || !inspected.iter().any(|(_, result)| is_old(result)) {
            break (tail, inspected);
        }
    };
    let listed = |(number, result)| match result {
        Ok(info) => ListedCheckpoint { number, info: Some(info), error: None },
        Err(e) => ListedCheckpoint { number, info: None, error: Some(StoreError::to_string(&e)) },
    };
    let checkpoints: Vec<ListedCheckpoint> = inspected.into_iter().map(listed).collect();
    let mut disk = 0;
    for directory in ["", names::LOG, names::SEGMENTS, names::INDEX] {
        let files = home.disk.list(directory).map_err(home.failed(directory, "listing the directory"))?;
        let subdirectory = |name: &str| [names::LOG, names::SEGMENTS, names::INDEX].contains(&name);
        // The second name of the last log entry must not be counted.
        let counts = |name: &str| !subdirectory(name) && names::parse_last(name).is_none();
        disk += files.iter().filter(|(name, _)| counts(name)).map(|(_, len)| len.next_multiple_of(4096)).sum::<u64>();
    }
    let newest = checkpoints.iter().rev().find_map(|listed| listed.info.as_ref());
    let ram = newest.map_or(0, |info| info.blocks.iter().map(|block| block.used).sum());
    let owner = if tail.claim == 0 { None } else { Some(log::claim_in(home, tail.claim)?.owner) };
    Ok(Listing { vm: home.vm.clone(), created_us: home.created_us, epoch: tail.epoch, owner, checkpoints, disk, ram })
}
