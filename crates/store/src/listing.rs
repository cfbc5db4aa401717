//! What is in a store, at a glance.

use crate::error::{Result, StoreError};
use crate::format::manifest::{Kept, Manifest};
use crate::format::names;
use crate::home::Home;
use crate::image::{describe, is_replaced, kept_entry, table};
use crate::log;
use crate::types::{CheckpointInfo, Owner, Vm};
use serde::{Deserialize, Serialize};

/// What is in a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// The VM.
    pub vm: Vm,
    /// When the store was made, in microseconds since 1970.
    pub created_us: u64,
    /// The owner epoch.
    pub epoch: u64,
    /// The owner; `None` before the first.
    pub owner: Option<Owner>,
    /// The checkpoints that are kept, oldest first.
    pub checkpoints: Vec<Listed>,
    /// Bytes on the disk.
    pub disk: u64,
    /// Bytes of RAM at the newest checkpoint.
    pub ram: u64,
}

/// A checkpoint that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Its number.
    pub number: u64,
    /// What is known of it; `None` if that is damaged.
    pub info: Option<CheckpointInfo>,
    /// What is wrong with it.
    pub error: Option<String>,
}

impl Listing {
    /// The newest checkpoint, if it is of the guest as it was last: one that was booted since, or shut down in order, is not to be
    /// taken back to what it was before.
    #[must_use]
    pub fn restorable(&self) -> Option<u64> {
        let boot = self.owner.as_ref().map_or(0, |owner| owner.boot);
        // Of one that is damaged it is not known; whoever wants it is told.
        let counts = |listed: &&Listed| listed.info.as_ref().is_none_or(|info| info.epoch >= boot);
        self.checkpoints.last().filter(counts).map(|listed| listed.number)
    }
}

fn look(home: &Home, manifest: &Manifest, kept: Kept) -> Result<CheckpointInfo> {
    let entry = kept_entry(home, manifest, kept)?;
    Ok(describe(&entry, &table(home, &entry)?))
}

/// Look into a store.
pub(crate) fn list(home: &Home) -> Result<Listing> {
    let mut tries = 0;
    let (tail, looked) = loop {
        tries += 1;
        let mut tail = log::tail(home)?;
        let manifest = tail.state.take().map(|(_, manifest)| manifest).unwrap_or_default();
        let looked: Vec<_> = manifest.kept.iter().map(|kept| (kept.number, look(home, &manifest, *kept))).collect();
        // An owner at work has removed one since: all is looked at anew.
        let is_old = |looked: &Result<_>| looked.as_ref().is_err_and(|e| is_replaced(home, e));
        if tries == log::TRIES || !looked.iter().any(|(_, looked)| is_old(looked)) {
            break (tail, looked);
        }
    };
    let listed = |(number, looked)| match looked {
        Ok(info) => Listed { number, info: Some(info), error: None },
        Err(e) => Listed { number, info: None, error: Some(StoreError::to_string(&e)) },
    };
    let checkpoints: Vec<Listed> = looked.into_iter().map(listed).collect();
    let mut disk = 0;
    for directory in ["", names::LOG, names::SEGMENTS, names::INDEX] {
        let files = home.disk.list(directory).map_err(home.failed(directory, "looking into the directory"))?;
        let subdirectory = |name: &str| [names::LOG, names::SEGMENTS, names::INDEX].contains(&name);
        // The last entry of the log has two names.
        let counts = |name: &str| !subdirectory(name) && names::parse_last(name).is_none();
        disk += files.iter().filter(|(name, _)| counts(name)).map(|(_, len)| len.next_multiple_of(4096)).sum::<u64>();
    }
    let newest = checkpoints.iter().rev().find_map(|listed| listed.info.as_ref());
    let ram = newest.map_or(0, |info| info.blocks.iter().map(|block| block.used).sum());
    let owner = if tail.claim == 0 { None } else { Some(log::claim_in(home, tail.claim)?.owner) };
    Ok(Listing { vm: home.vm.clone(), created_us: home.created_us, epoch: tail.epoch, owner, checkpoints, disk, ram })
}
