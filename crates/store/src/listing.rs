//! Lists the contents of a store.

use crate::checkpoints::{describe, is_replaced, read_kept_entry, read_table};
use crate::directory::StoreDirectory;
use crate::error::Result;
use crate::format::manifest::{KeptCheckpoint, Manifest};
use crate::format::names;
use crate::log::{self, LogTail};
use crate::types::{CheckpointInfo, Owner, Vm};
use serde::Serialize;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
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

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
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

/// Lists the contents of a store.
pub(crate) fn list(store: &StoreDirectory) -> Result<Listing> {
    let (tail, checkpoints) = read_checkpoints(store)?;
    let newest = checkpoints.iter().rev().find_map(|listed| listed.info.as_ref());
    let ram = newest.map_or(0, |info| info.blocks.iter().map(|block| block.used).sum());
    let owner = if tail.claim.log_number == 0 { None } else { Some(log::read_claim(store, tail.claim)?.owner) };
    let (vm, created_us, disk) = (store.vm.clone(), store.created_us, used_bytes(store)?);
    Ok(Listing { vm, created_us, epoch: tail.epoch, owner, checkpoints, disk, ram })
}

/// Reads the end of the log, and the kept checkpoints of that moment. Starts again if the owner has removed a
/// checkpoint meanwhile.
fn read_checkpoints(store: &StoreDirectory) -> Result<(LogTail, Vec<ListedCheckpoint>)> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let mut tail = log::tail(store)?;
        let manifest = tail.newest_state.take().map(|state| state.manifest).unwrap_or_default();
        let mut checkpoints = Vec::with_capacity(manifest.kept.len());
        let mut is_outdated = false;
        for kept in &manifest.kept {
            let (info, error) = match read_info(store, &manifest, *kept) {
                Ok(info) => (Some(info), None),
                Err(e) => {
                    is_outdated |= is_replaced(store, &e);
                    (None, Some(e.to_string()))
                }
            };
            checkpoints.push(ListedCheckpoint { number: kept.number, info, error });
        }
        if !is_outdated || attempts == log::MAX_ATTEMPTS {
            return Ok((tail, checkpoints));
        }
    }
}

fn read_info(store: &StoreDirectory, manifest: &Manifest, kept: KeptCheckpoint) -> Result<CheckpointInfo> {
    let entry = read_kept_entry(store, manifest, kept)?;
    Ok(describe(&entry, &read_table(store, &entry)?))
}

/// Returns the bytes that the store uses on the disk.
fn used_bytes(store: &StoreDirectory) -> Result<u64> {
    const SUBDIRECTORIES: [&str; 3] = [names::LOG, names::SEGMENTS, names::INDEX];
    let mut bytes = 0;
    for directory in ["", names::LOG, names::SEGMENTS, names::INDEX] {
        let files = store.disk.list(directory).map_err(store.failed(directory, "listing the directory"))?;
        for (name, len) in files {
            // The second name of the last log entry must not be counted.
            if !SUBDIRECTORIES.contains(&name.as_str()) && names::parse_last(&name).is_none() {
                bytes += len.next_multiple_of(4096);
            }
        }
    }
    Ok(bytes)
}
