//! The retained caches of a VM's disks: memory of a guest that has ended, kept for its next boot.
//!
//! All disks of a VM have their blocks in the same memory, but each server knows only its own. Therefore there are
//! two steps. First each server lists the frames that it needs. When all have done this, each gets the lists of the
//! others. From then on a frame is freed when no server needs it. If this process is killed between the steps,
//! nothing has been freed yet, and both steps are repeated.

use super::{control, served};
use crate::fault;
use crate::rundir::RunDir;
use rekindle_disk::block::BLOCK;
use rekindle_disk::control::{Control, ControlCommand};
use rekindle_qemu::command::{Disk, Hardware};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Limit for a server to notice that its QEMU has ended.
const GONE: Duration = Duration::from_secs(10);

/// The retained cache of a guest that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Size in bytes of the disk blocks that the guest had in its memory. Whether a block is still the same on the
    /// disk is checked only when it is read.
    pub bytes: u64,
    /// Size in bytes, for each disk that has a retained cache.
    pub disks: BTreeMap<String, u64>,
}

/// A server whose guest has ended.
struct Idle<'a> {
    disk: &'a Disk,
    control: Control,
}

/// A server that retains blocks.
struct Keeping<'a> {
    idle: Idle<'a>,
    claim: PathBuf,
    blocks: u64,
}

/// Makes the servers release the memory of a guest that has ended. With `keep` they retain the part that is a cache
/// of their disks. Returns its size, if it is not empty.
#[must_use]
pub fn release_memory(rundir: &RunDir, hardware: &Hardware, keep: bool) -> Option<Kept> {
    let mut servers = Vec::new();
    for disk in served(hardware) {
        let connected = Control::connect(&control(rundir, &disk.id));
        match connected.and_then(|mut control| control.wait_gone(GONE).map(|_| control)) {
            Ok(control) => servers.push(Idle { disk, control }),
            // This server will be restarted, and has no cache then.
            Err(e) => tracing::warn!("what the guest had of disk {} is lost: {e}", disk.id),
        }
    }
    if !keep {
        servers.into_iter().for_each(Idle::drop);
        return None;
    }
    let are_several = served(hardware).count() > 1;
    let kept: Vec<_> = servers.into_iter().filter_map(|server| server.keep(rundir, are_several)).collect();
    let mut kept = of_one_memory(kept);
    fault::point("cache.renew.kept", None, None);
    if are_several {
        let claims: Vec<PathBuf> = kept.iter().map(|keeping| keeping.claim.clone()).collect();
        kept = kept.into_iter().filter_map(|keeping| keeping.share(&claims)).collect();
    }
    fault::point("cache.renew.shared", None, None);
    let disks: BTreeMap<_, _> =
        kept.into_iter().map(|keeping| (keeping.idle.disk.id.clone(), keeping.blocks * BLOCK as u64)).collect();
    let bytes = disks.values().sum();
    (bytes > 0).then_some(Kept { bytes, disks })
}

/// Makes the servers serve the blocks that the guest's present kernel has cached, as long as they are in place.
/// Called before the guest starts another kernel in the same memory. Returns their size, if there are any.
#[must_use]
pub fn reuse(rundir: &RunDir, hardware: &Hardware) -> Option<Kept> {
    let asked = served(hardware).filter_map(|disk| {
        let connected = Control::connect(&control(rundir, &disk.id));
        match connected.and_then(|mut control| control.ask::<u64>(&ControlCommand::ReuseCache {})) {
            Ok(blocks) => Some((disk.id.clone(), blocks * BLOCK as u64)),
            Err(e) => {
                tracing::warn!("what the guest has of disk {} is not used by its next kernel: {e}", disk.id);
                None
            }
        }
    });
    let disks: BTreeMap<_, _> = asked.filter(|(_, bytes)| *bytes > 0).collect();
    let bytes = disks.values().sum();
    (bytes > 0).then_some(Kept { bytes, disks })
}

/// Returns the servers whose caches are in the memory that has most of them; the other servers drop theirs. A server
/// whose queues did not run in the guest's last boot has memory of an earlier boot.
fn of_one_memory(kept: Vec<Keeping<'_>>) -> Vec<Keeping<'_>> {
    let mut memories: BTreeMap<Option<u64>, (u64, Vec<Keeping<'_>>)> = BTreeMap::new();
    for mut keeping in kept {
        let memory = keeping.idle.control.status().ok().and_then(|status| status.retained_memory);
        let (blocks, all) = memories.entry(memory).or_default();
        *blocks += keeping.blocks;
        all.push(keeping);
    }
    let most = memories.iter().max_by_key(|(_, (blocks, _))| *blocks).map(|(memory, _)| *memory);
    let (most, others): (Vec<_>, Vec<_>) = memories.into_iter().partition(|(memory, _)| Some(*memory) == most);
    others.into_iter().flat_map(|(_, (_, all))| all).for_each(|keeping| keeping.idle.drop());
    most.into_iter().flat_map(|(_, (_, all))| all).collect()
}

impl<'a> Idle<'a> {
    fn drop(mut self) {
        if let Err(e) = self.control.ask::<()>(&ControlCommand::DropCache {}) {
            tracing::debug!("disk {}: {e}", self.disk.id);
        }
    }

    /// Makes the server retain its blocks. `is_claimed` means that other servers have blocks in the same memory.
    fn keep(mut self, rundir: &RunDir, is_claimed: bool) -> Option<Keeping<'a>> {
        let claim = rundir.file(&format!("disk-{}.claim", self.disk.id));
        match self.control.ask::<u64>(&ControlCommand::KeepCache { claim: is_claimed.then(|| claim.clone()) }) {
            Ok(0) => {
                self.drop();
                None
            }
            Ok(blocks) => Some(Keeping { idle: self, claim, blocks }),
            Err(e) => {
                tracing::warn!("what the guest had of disk {} is not kept: {e}", self.disk.id);
                self.drop();
                None
            }
        }
    }
}

impl Keeping<'_> {
    /// Gives the server the lists of frames that the others need.
    fn share(mut self, claims: &[PathBuf]) -> Option<Self> {
        let others = claims.iter().filter(|claim| **claim != self.claim).cloned().collect();
        match self.idle.control.ask::<()>(&ControlCommand::ShareCache { claims: others }) {
            Ok(()) => Some(self),
            Err(e) => {
                // The other servers see that this one needs no frame.
                tracing::warn!("what the guest had of disk {} is not kept: {e}", self.idle.disk.id);
                self.idle.drop();
                None
            }
        }
    }
}
