//! The retained caches of a VM's disks: memory of a guest that has ended, kept for its next boot.
//!
//! All disks of a VM have their blocks in the same memory, but each server knows only its own. Therefore there are
//! two steps. First each server lists the frames that it needs. When all have done this, each gets the lists of the
//! others. From then on a frame is freed when no server needs it. If this process is killed between the steps,
//! nothing has been freed yet, and both steps are repeated.

use super::served;
use super::server::{ask, connect, control_socket};
use crate::fault;
use crate::rundir::RunDir;
use rekindle_disk::block::BLOCK;
use rekindle_disk::confinement::frames_directory;
use rekindle_disk::control::{Control, ControlCommand};
use rekindle_qemu::command::{Disk, Hardware};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Limit for a server to notice that its QEMU has ended.
const QEMU_END_TIMEOUT: Duration = Duration::from_secs(10);

/// The retained cache of a guest that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetainedCache {
    /// Size in bytes of the disk blocks that the guest had in its memory. Whether a block is still the same on the
    /// disk is checked only when it is read.
    pub bytes: u64,
    /// Size in bytes, for each disk that has a retained cache.
    pub disks: BTreeMap<String, u64>,
}

/// A server whose guest has ended.
struct IdleServer<'a> {
    disk: &'a Disk,
    control: Control,
}

/// A server that retains blocks.
struct RetainingServer<'a> {
    idle: IdleServer<'a>,
    /// File in which the server lists the frames that it needs.
    claim: PathBuf,
    blocks: u64,
}

/// Makes the servers release the memory of a guest that has ended.
pub fn release_memory(rundir: &RunDir, hardware: &Hardware) {
    idle_servers(rundir, hardware).into_iter().for_each(IdleServer::release);
}

/// Makes the servers retain the part of an ended guest's memory that is a cache of their disks, and release the rest.
/// Returns its size, if it is not empty.
#[must_use]
pub fn retain_caches(rundir: &RunDir, hardware: &Hardware) -> Option<RetainedCache> {
    let is_shared = served(hardware).count() > 1;
    let idle = idle_servers(rundir, hardware);
    let retaining = idle.into_iter().filter_map(|server| server.retain(rundir, is_shared)).collect();
    let mut retaining = release_other_memories(retaining);
    fault::point("cache.renew.kept", None, None);
    if is_shared {
        let claims: Vec<PathBuf> = retaining.iter().map(|server| server.claim.clone()).collect();
        retaining = retaining.into_iter().filter_map(|server| server.share(&claims)).collect();
    }
    fault::point("cache.renew.shared", None, None);
    RetainedCache::of(retaining.iter().map(|server| (server.idle.disk, server.blocks)))
}

/// Makes the servers serve the blocks that the guest's present kernel has cached, as long as they are in place.
/// Called before the guest starts another kernel in the same memory. Returns their size, if there are any.
#[must_use]
pub fn reuse_caches(rundir: &RunDir, hardware: &Hardware) -> Option<RetainedCache> {
    let mut reused = Vec::new();
    for disk in served(hardware) {
        match ask(rundir, &disk.id, &ControlCommand::ReuseCache {}) {
            Ok(blocks) => reused.push((disk, blocks)),
            Err(e) => tracing::warn!("what the guest has of disk {} is not used by its next kernel: {e}", disk.id),
        }
    }
    RetainedCache::of(reused.into_iter())
}

impl RetainedCache {
    /// Adds up the blocks of all disks; `None` if there are none.
    fn of<'a>(blocks: impl Iterator<Item = (&'a Disk, u64)>) -> Option<Self> {
        let non_empty = blocks.filter(|(_, blocks)| *blocks > 0);
        let disks: BTreeMap<_, _> = non_empty.map(|(disk, blocks)| (disk.id.clone(), blocks * BLOCK as u64)).collect();
        let bytes = disks.values().sum();
        (bytes > 0).then_some(Self { bytes, disks })
    }
}

/// Returns the servers whose QEMU has ended.
fn idle_servers<'a>(rundir: &RunDir, hardware: &'a Hardware) -> Vec<IdleServer<'a>> {
    let mut servers = Vec::new();
    for disk in served(hardware) {
        let connected = connect(rundir, &disk.id);
        match connected.and_then(|mut control| control.wait_gone(QEMU_END_TIMEOUT).map(|_| control)) {
            Ok(control) => servers.push(IdleServer { disk, control }),
            // This server will be restarted, and has no cache then.
            Err(e) => tracing::warn!("what the guest had of disk {} is lost: {e}", disk.id),
        }
    }
    servers
}

/// The servers with caches in one memory.
#[derive(Default)]
struct MemoryUsers<'a> {
    blocks: u64,
    servers: Vec<RetainingServer<'a>>,
}

/// Returns the servers whose caches are in the memory that has most of them; the other servers release theirs. A
/// server whose queues did not run in the guest's last boot has memory of an earlier boot.
fn release_other_memories(servers: Vec<RetainingServer<'_>>) -> Vec<RetainingServer<'_>> {
    let mut memories: BTreeMap<Option<u64>, MemoryUsers<'_>> = BTreeMap::new();
    for mut server in servers {
        let memory_id = server.idle.control.status().ok().and_then(|status| status.retained_memory);
        let users = memories.entry(memory_id).or_default();
        users.blocks += server.blocks;
        users.servers.push(server);
    }
    let largest_id = memories.iter().max_by_key(|(_, users)| users.blocks).map(|(memory_id, _)| *memory_id);
    let largest = largest_id.and_then(|memory_id| memories.remove(&memory_id)).unwrap_or_default();
    memories.into_values().flat_map(|users| users.servers).for_each(|server| server.idle.release());
    largest.servers
}

impl<'a> IdleServer<'a> {
    /// Makes the server release the guest's memory.
    fn release(mut self) {
        if let Err(e) = self.control.ask::<()>(&ControlCommand::DropCache {}) {
            tracing::debug!("disk {}: {e}", self.disk.id);
        }
    }

    /// Makes the server retain its blocks. `is_shared` means that other servers have blocks in the same memory.
    fn retain(mut self, rundir: &RunDir, is_shared: bool) -> Option<RetainingServer<'a>> {
        let frames = frames_directory(&control_socket(rundir, &self.disk.id));
        let claim = frames.join(format!("disk-{}.claim", self.disk.id));
        match self.control.ask::<u64>(&ControlCommand::KeepCache { claim: is_shared.then(|| claim.clone()) }) {
            Ok(0) => {
                self.release();
                None
            }
            Ok(blocks) => Some(RetainingServer { idle: self, claim, blocks }),
            Err(e) => {
                tracing::warn!("what the guest had of disk {} is not kept: {e}", self.disk.id);
                self.release();
                None
            }
        }
    }
}

impl RetainingServer<'_> {
    /// Gives the server the lists of frames that the others need.
    fn share(mut self, claims: &[PathBuf]) -> Option<Self> {
        let others = claims.iter().filter(|claim| **claim != self.claim).cloned().collect();
        match self.idle.control.ask::<()>(&ControlCommand::ShareCache { claims: others }) {
            Ok(()) => Some(self),
            Err(e) => {
                // The other servers see that this one needs no frame.
                tracing::warn!("what the guest had of disk {} is not kept: {e}", self.idle.disk.id);
                self.idle.release();
                None
            }
        }
    }
}
