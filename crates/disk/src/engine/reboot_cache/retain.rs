//! The memory of a guest's previous boot: it becomes the retained cache, is shared with the VM's other disks, and is
//! released.
//!
//! - The *block map* ([`crate::block_map`]) records which frame (page of the guest's memory) holds which block of the
//!   disk.
//! - The *retained cache* ([`crate::retained`]) is the previous boot's memory with its block map. The server reads
//!   blocks from it instead of from the disk.
//! - A *claim* is a file in which one disk's server marks the frames that it still needs. The retained caches of a VM's
//!   disks are in the same memory, so a frame is released only when no claim has it.
//! - *Discarded*: the cache serves no more blocks, and its memory is released in slices, between requests. *Dropped*:
//!   the server deletes it immediately. Memory that a guest uses stays.
//! - `record_all` ([`RebootCache::record_all`]) waits until all moved blocks are in the block map. Every function below
//!   that takes, replaces or counts the map calls it first, so that no block is recorded in the wrong map.

use super::{GuestMap, RebootCache};
use crate::background::run_in_background;
use crate::block_map::BlockMap;
use crate::digest::Digest;
use crate::engine::catalog::DriverState;
use crate::engine::io::BufferPool;
use crate::engine::refusal::Refusal;
use crate::memory::Memory;
use crate::report::warn_limited;
use crate::retained::{CacheCounts, RetainedCache};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval between updates of how much of the retained cache must be released. A new guest allocates memory all the
/// time.
const UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// The progress of the retained cache from its creation to its end.
pub(super) struct RetainedState {
    /// The next start of the guest's driver turns the block map into a retained cache in the same memory.
    is_reuse_announced: bool,
    /// Time at which the retained cache was created.
    created: Instant,
    /// Time of the last update.
    updated: Instant,
    /// The cache's memory is to be released between requests.
    is_releasing: bool,
    /// Final counts of the last retained cache, after it became empty.
    final_counts: Option<CacheCounts>,
}

impl RetainedState {
    pub fn new() -> Self {
        let now = Instant::now();
        Self { is_reuse_announced: false, created: now, updated: now, is_releasing: false, final_counts: None }
    }
}

impl RebootCache {
    pub fn has_retained_blocks(&self) -> bool {
        self.retained.is_some()
    }

    /// Copies blocks from `first_block` on out of the retained cache, like [`RetainedCache::take`].
    pub fn take_retained(&mut self, first_block: u64, target: &mut [u8]) -> Vec<Option<Digest>> {
        self.retained.as_mut().map_or(Vec::new(), |retained| retained.take(first_block, target))
    }

    /// Returns the retained cache, unless it serves nothing any more.
    pub fn retained(&self) -> Option<&RetainedCache> {
        self.retained.as_ref().filter(|retained| !retained.is_discarded())
    }

    /// Returns the final counts of the last retained cache, if it has become empty.
    pub fn final_counts(&self) -> Option<CacheCounts> {
        self.state.final_counts
    }

    /// Drops the retained cache if a QEMU has mapped memory in which no frame may be released.
    pub fn note_mapped(&mut self, memory: &Memory) {
        // Two cases: the cache of an ended guest is in this memory, so that a frame which is released would be taken
        // from the guest in it; or the cache of a running guest (kexec) is in other memory, because that guest is gone.
        if let Some(retained) =
            self.retained.take_if(|retained| retained.is_in(memory) != retained.is_in_running_guest())
        {
            warn_limited!("the retained cache is dropped: its memory is in use again, or its guest has disconnected");
            retained.detach();
        }
        // Without the other servers' claims, releasing a frame could take it from another disk.
        if self.retained.take_if(|retained| retained.is_unshared()).is_some() {
            warn_limited!("the retained cache is dropped: it is not known which frames the VM's other disks need");
        }
    }

    /// Prepares to record the blocks of a guest in `memory`. Called when one of its queues starts.
    pub fn begin_records(&mut self, memory: &Arc<Memory>, driver: DriverState, buffers: &mut BufferPool) {
        // The queues of another QEMU continue with a driver that had started before. Only a new start is the new
        // kernel.
        if driver == DriverState::Started && std::mem::take(&mut self.state.is_reuse_announced) {
            self.start_reuse(buffers);
        }
        if self.is_enabled {
            self.prepare_map(memory, buffers);
        }
    }

    /// Turns the block map into a retained cache in the same memory, in which the guest has started another kernel.
    /// The blocks that the previous kernel cached stay in memory until the new kernel uses the frames.
    fn start_reuse(&mut self, buffers: &mut BufferPool) {
        self.record_all(buffers);
        let Some(GuestMap { blocks, memory }) = self.guest_map.take() else { return };
        match RetainedCache::in_running_guest(&memory, blocks, self.digester) {
            Ok(retained) => {
                // Of two previous kernels, the blocks of the older one are less useful.
                if let Some(previous) = self.retained.replace(retained) {
                    // To free the block map of the older cache takes time, and the guest waits for its queue.
                    run_in_background("retained", previous, drop);
                }
                (self.state.final_counts, self.state.created) = (None, Instant::now());
            }
            Err(e) => warn_limited!("cannot use what the guest's previous kernel cached: {e}"),
        }
    }

    /// Prepares the block map for a guest's memory. The map is kept if the memory is the same: after a VMM restart,
    /// or if the memory table divides the memory differently, as firmware and kernel do.
    fn prepare_map(&mut self, memory: &Arc<Memory>, buffers: &mut BufferPool) {
        self.record_all(buffers);
        match &mut self.guest_map {
            Some(map) if map.memory.is_same(memory) => map.memory = Arc::clone(memory),
            _ => {
                let blocks = BlockMap::try_new(memory.frames());
                self.guest_map = blocks.map(|blocks| GuestMap { blocks, memory: Arc::clone(memory) });
                if self.guest_map.is_none() {
                    warn_limited!(
                        "the host has no memory for the block map: the cache will be cold after the next reboot"
                    );
                }
            }
        }
    }

    /// Announces that the guest is about to start another kernel in its memory. Returns the number of the guest's
    /// blocks.
    pub fn announce_reuse(&mut self, buffers: &mut BufferPool) -> usize {
        self.state.is_reuse_announced = true;
        self.record_all(buffers);
        self.mapped_blocks()
    }

    /// Turns the memory of the ended guest into the retained cache of the next guest. Returns the number of blocks in
    /// the cache. `claim`: see [`RetainedCache::new`].
    pub fn keep(&mut self, claim: Option<&Path>, buffers: &mut BufferPool) -> Result<usize, Refusal> {
        let claim_failed = |e: io::Error| {
            let file = claim.map_or(String::new(), |path| format!("{}: ", path.display()));
            Refusal(format!("{file}cannot record which of the guest's memory is needed: {e}"))
        };
        self.record_all(buffers);
        let Some(GuestMap { blocks, memory }) = self.guest_map.take() else {
            // There is no block map: a process that finishes an interrupted operation repeats the command, and no guest
            // has used the disk since the first time. Only the claim may be missing.
            let Some(retained) = self.retained.as_mut().filter(|retained| !retained.is_discarded()) else {
                return Ok(0);
            };
            claim.map_or(Ok(()), |path| retained.publish(path)).map_err(claim_failed)?;
            return Ok(retained.len());
        };
        // The previous cache is dropped first: the new cache's claim may have the same file.
        self.retained = None;
        (self.state.final_counts, self.state.created) = (None, Instant::now());
        self.state.is_reuse_announced = false;
        if blocks.is_empty() {
            return Ok(0);
        }
        let retained = RetainedCache::new(&memory, blocks, self.digester, claim).map_err(claim_failed)?;
        let kept_blocks = self.retained.insert(retained).len();
        Memory::unmap_in_background(memory);
        Ok(kept_blocks)
    }

    /// Sets the files in which the servers of the VM's other disks show which frames they need.
    pub fn share(&mut self, claims: &[PathBuf]) -> Result<(), Refusal> {
        let Some(retained) = self.retained.as_mut() else {
            return Err(Refusal("there is no retained cache".into()));
        };
        retained.share(claims).map_err(|e| Refusal(format!("cannot read which memory the VM's other disks need: {e}")))
    }

    /// Discards the retained cache while a guest runs. Its memory is released in slices: the guest's requests wait
    /// while the engine's thread releases memory.
    pub fn discard(&mut self) {
        (self.state.final_counts, self.state.is_reuse_announced) = (None, false);
        self.retained.iter_mut().for_each(RetainedCache::discard);
    }

    /// Discards all state of a previous guest.
    pub fn drop_all(&mut self, buffers: &mut BufferPool) {
        (self.state.final_counts, self.state.is_reuse_announced) = (None, false);
        // To free memory is slow, and the next guest may be waiting for the answer: other threads free the memory of
        // the cache, and unmap that of the block map.
        if let Some(retained) = self.retained.take() {
            run_in_background("retained", retained, drop);
        }
        self.record_all(buffers);
        if let Some(GuestMap { memory, .. }) = self.guest_map.take() {
            Memory::unmap_in_background(memory);
        }
    }

    /// Limits the retained cache to the memory that the guest has not allocated yet.
    pub fn maintain(&mut self) {
        let Some(retained) = &mut self.retained else { return };
        if self.state.updated.elapsed() >= UPDATE_INTERVAL {
            self.state.updated = Instant::now();
            if self.retain_for.is_some_and(|retain_for| self.state.created.elapsed() >= retain_for) {
                retained.discard();
            }
            retained.update(self.guest_map.as_ref().map(|map| map.memory.unallocated_frames()));
        }
        self.state.is_releasing = retained.maintain();
        if retained.is_done() {
            tracing::info!("the retained cache is empty: {:?}", retained.counts());
            self.state.final_counts = Some(retained.counts());
            (self.retained, self.state.is_releasing) = (None, false);
        }
    }

    /// Returns the longest time until the next [`Self::maintain`].
    pub fn next_maintenance(&self) -> Option<Duration> {
        let interval = if self.state.is_releasing { Duration::ZERO } else { UPDATE_INTERVAL };
        self.retained.as_ref().map(|_| interval)
    }
}
