//! The retained cache: the RAM of the guest's previous boot, as a cache of its disk (CacheMind, section 3.1).
//!
//! A block is served only if the frame that last held it still has the digest of the disk's content. A frame that the
//! guest changed, reused or damaged before it ended has another digest (section 3.2, without protecting any page).
//! The frame of a served block is released to the host, so that retained cache and new memory together are no larger
//! than the guest.
//!
//! A VM with several disks has a retained cache in each of their servers, all in the same memory. A frame is released
//! when no server needs it (`claim`). The servers share nothing else. Whether a block is served depends only on its
//! digest.
//!
//! A guest that starts another kernel by kexec stays in its memory, so no frame of the memory may be released. The
//! blocks that the previous kernel cached stay until the new kernel uses their frames, and are served in the same way
//! ([`RetainedCache::in_running_guest`]).

mod claim;
mod maintain;
#[cfg(test)]
mod tests;

use crate::block::{BLOCK, Block};
use crate::block_map::{BlockMap, Frame};
use crate::digest::{Digest, Digester};
use crate::memory::{Memory, MemoryFiles};
use claim::FrameClaim;
use maintain::Maintenance;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Whether blocks are served unchecked (feature `unchecked-attic`): for the fault experiment, without the protection
/// from damage.
pub const UNCHECKED: bool = cfg!(feature = "unchecked-attic");
/// Frames that are released together: 1 MiB.
const RELEASE_BATCH_FRAMES: usize = 256;

/// The other users of the memory.
#[derive(Debug)]
enum OtherUsers {
    /// The other users are not known yet: no frame is released.
    Unknown,
    /// A guest runs in the memory: no frame is ever released.
    Guest,
    /// These servers use the memory, and no other process.
    Known(Vec<FrameClaim>),
}

/// The retained cache of one disk: its blocks, and the memory that holds them.
#[derive(Debug)]
pub struct RetainedCache {
    files: MemoryFiles,
    /// [`Memory::identity`].
    identity: u64,
    map: BlockMap,
    digester: Digester,
    /// The claim on the frames of the map.
    own_claim: FrameClaim,
    others: OtherUsers,
    /// Frames that are not needed any more and not released yet.
    unneeded_frames: Vec<Frame>,
    maintenance: Maintenance,
    is_discarded: bool,
    counts: CacheCounts,
}

/// Numbers of blocks by their fate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct CacheCounts {
    pub served: u64,
    /// The digest did not match: changed, reused or damaged.
    pub refused: u64,
    /// The disk's content has changed since.
    pub overwritten: u64,
    /// Discarded: because memory is short, after a time, or by request.
    pub dropped: u64,
}

impl RetainedCache {
    /// Creates the cache of a guest that has ended, from its memory and block map. `claim`: the file that shows the
    /// servers of the VM's other disks which frames this server needs; no frame is released until
    /// [`RetainedCache::share`].
    ///
    /// # Errors
    /// If the claim cannot be created.
    pub fn new(memory: &Memory, map: BlockMap, digester: Digester, claim: Option<&Path>) -> io::Result<Self> {
        let (files, identity) = (memory.files(), memory.identity());
        let own_claim = match claim {
            Some(path) => FrameClaim::create(path, identity, map.frames())?,
            None => FrameClaim::private(map.frames())?,
        };
        map.held_blocks().for_each(|(frame, _)| own_claim.set_needed(frame));
        let others = if claim.is_some() { OtherUsers::Unknown } else { OtherUsers::Known(Vec::new()) };
        Ok(Self {
            files,
            identity,
            map,
            digester,
            own_claim,
            others,
            unneeded_frames: Vec::new(),
            maintenance: Maintenance::new(),
            is_discarded: false,
            counts: CacheCounts::default(),
        })
    }

    /// Creates the cache of a guest that continues in its memory with another kernel.
    pub fn in_running_guest(memory: &Memory, map: BlockMap, digester: Digester) -> io::Result<Self> {
        let mut cache = Self::new(memory, map, digester, None)?;
        cache.others = OtherUsers::Guest;
        Ok(cache)
    }

    /// Publishes at `path` which frames this server needs, unless it does so already.
    ///
    /// # Errors
    /// If the claim cannot be created.
    pub fn publish(&mut self, path: &Path) -> io::Result<()> {
        if !self.own_claim.is_shared() {
            let claim = FrameClaim::create(path, self.identity, self.map.frames())?;
            self.map.held_blocks().for_each(|(frame, _)| claim.set_needed(frame));
            (self.own_claim, self.others) = (claim, OtherUsers::Unknown);
        }
        Ok(())
    }

    /// Sets the files in which all other servers show which frames they need. Frames that no server needs are
    /// released from now on.
    ///
    /// # Errors
    /// If a file cannot be opened or is not a claim. Nothing has changed then.
    pub fn share(&mut self, paths: &[PathBuf]) -> io::Result<()> {
        let others = paths.iter().map(|path| FrameClaim::open_other(path, self.identity));
        let others = others.collect::<io::Result<Vec<_>>>()?;
        self.others = OtherUsers::Known(others.into_iter().flatten().collect());
        self.maintenance.sweep_again();
        Ok(())
    }

    /// Returns whether the cache waits for [`RetainedCache::share`].
    #[must_use]
    pub fn is_unshared(&self) -> bool {
        matches!(self.others, OtherUsers::Unknown)
    }

    /// Returns whether a guest runs in the cache's memory.
    #[must_use]
    pub fn is_in_running_guest(&self) -> bool {
        matches!(self.others, OtherUsers::Guest)
    }

    /// Returns the [`Memory::identity`] of the cache's memory.
    #[must_use]
    pub fn identity(&self) -> u64 {
        self.identity
    }

    /// Returns the number of blocks that the cache may have.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Returns whether the cache serves nothing any more.
    #[must_use]
    pub fn is_discarded(&self) -> bool {
        self.is_discarded
    }

    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        self.counts
    }

    /// Takes the blocks from `first_block` on, as many as fit into `target`. Returns the digest of each block that
    /// matches the disk. Removes all of these blocks from the cache, matching or not.
    pub fn take(&mut self, first_block: u64, target: &mut [u8]) -> Vec<Option<Digest>> {
        let blocks = target.as_chunks_mut::<BLOCK>().0;
        let held: Vec<Option<(Frame, Digest)>> =
            (first_block..).zip(blocks.iter()).map(|(block, _)| self.map.take(block)).collect();
        let mut digests = Vec::with_capacity(held.len());
        let mut remaining: &mut [Block] = blocks;
        for run in held.chunk_by(|one, next| are_in_one_run(*one, *next)) {
            let (run_blocks, after) = std::mem::take(&mut remaining).split_at_mut(run.len());
            remaining = after;
            self.take_run(run, run_blocks, &mut digests);
        }
        if self.unneeded_frames.len() >= RELEASE_BATCH_FRAMES {
            self.release_frames();
        }
        digests
    }

    /// Reads the blocks of contiguous frames together, and adds the digest of each that matches the disk to `digests`.
    /// `held`: frame and expected digest of each block; `None` for all of them if the cache does not have them.
    fn take_run(&mut self, held: &[Option<(Frame, Digest)>], blocks: &mut [Block], digests: &mut Vec<Option<Digest>>) {
        let first_frame = held.first().copied().flatten().map(|(frame, _)| frame);
        let is_read = first_frame
            .is_some_and(|frame| self.files.read(u64::from(frame) * BLOCK as u64, blocks.as_flattened_mut()).is_some());
        for (block, held) in blocks.iter().zip(held) {
            let Some((frame, expected)) = *held else {
                digests.push(None);
                continue;
            };
            // The digest is of the copy that the guest gets.
            let digest = self.digester.digest(block);
            let is_served = is_read && (digest == expected || UNCHECKED);
            if is_served {
                self.counts.served += 1;
            } else {
                self.counts.refused += 1;
            }
            digests.push(is_served.then_some(digest));
            self.unneeded_frames.push(frame);
        }
    }

    /// Removes blocks whose content on the disk changes.
    pub fn changed(&mut self, blocks: Range<u64>) {
        let previous_len = self.map.len();
        let unneeded_frames = &mut self.unneeded_frames;
        self.map.take_all(blocks, |frame| unneeded_frames.push(frame));
        self.counts.overwritten += (previous_len - self.map.len()) as u64;
        if self.unneeded_frames.len() >= RELEASE_BATCH_FRAMES {
            self.release_frames();
        }
    }

    /// Drops a block because memory is short.
    fn drop_block(&mut self, block: u64) {
        let Some((frame, _)) = self.map.take(block) else { return };
        self.counts.dropped += 1;
        self.unneeded_frames.push(frame);
        if self.unneeded_frames.len() >= RELEASE_BATCH_FRAMES {
            self.release_frames();
        }
    }

    /// Releases frames that are not needed any more, except those that other servers need. A frame that cannot be
    /// released stays unused.
    pub fn release_frames(&mut self) {
        if matches!(self.others, OtherUsers::Unknown) {
            return;
        }
        let mut frames = std::mem::take(&mut self.unneeded_frames);
        if self.is_in_running_guest() {
            return;
        }
        // Release all claims first, then check the claims of the other servers: of two servers, at least one sees
        // that neither needs the frame.
        frames.iter().for_each(|frame| self.own_claim.release(*frame));
        frames.retain(|frame| self.needed_word(*frame as usize / 64) >> (frame % 64) & 1 == 0);
        frames.sort_unstable();
        for run in frames.chunk_by(|one, next| one + 1 == *next) {
            let Some(first) = run.first() else { continue };
            if let Err(e) = self.release_run(*first, run.len() as u64) {
                tracing::debug!("{} frames of the retained cache from {first} on cannot be released: {e}", run.len());
            }
        }
    }

    /// Returns the frames 64 * `word` and up that any server needs, one bit each.
    fn needed_word(&self, word: usize) -> u64 {
        let others = match &self.others {
            OtherUsers::Unknown | OtherUsers::Guest => &[][..],
            OtherUsers::Known(others) => others,
        };
        others.iter().fold(self.own_claim.word(word), |needed, other| needed | other.word(word))
    }

    /// Discards the cache without releasing its memory, which has another user now.
    pub fn detach(mut self) {
        self.unneeded_frames.clear();
    }

    /// Returns whether the cache is in a file of `memory`.
    #[must_use]
    pub fn is_in(&self, memory: &Memory) -> bool {
        self.files.are_used_by(memory)
    }

    /// Releases adjacent frames to the host.
    fn release_run(&self, first: Frame, count: u64) -> io::Result<()> {
        self.files.release(u64::from(first) * BLOCK as u64, count * BLOCK as u64)
    }
}

/// Returns whether two adjacent blocks are in adjacent frames, or in none.
fn are_in_one_run(one: Option<(Frame, Digest)>, next: Option<(Frame, Digest)>) -> bool {
    match (one, next) {
        (Some((one, _)), Some((next, _))) => one + 1 == next,
        (one, next) => one.is_none() && next.is_none(),
    }
}

impl Drop for RetainedCache {
    fn drop(&mut self) {
        self.release_frames();
    }
}
