//! The block map: which frame of the guest's memory holds which block of the disk, and the block's digest.
//!
//! A block is in at most one frame, and a frame holds at most one block: the block that was moved last. The digest is
//! of the content on the *disk*, computed from the bytes that were moved. The guest may change the frame at any time.
//! The digest shows whether the frame still holds the block when the block is needed.
//!
//! | | bytes |
//! |---|---|
//! | a record: block, digest | 20 for each frame; only used records take memory |
//! | the table from blocks to frames | 5 for each slot, at least 7/16 of which are in use: at most 11.5 |
//!
//! So a cached block takes at most 32 bytes.

use crate::digest::Digest;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Number of a page of the guest's memory: its address divided by the page size.
pub type Frame = u32;

/// Larger block numbers are not recorded: 16 TiB.
pub const MAX_BLOCKS: u64 = u32::MAX as u64 - 1;

/// A frame's record: the block's key (0: no block), and the four words of the digest. The record of an unused frame is
/// zero, so that it takes no memory.
type Record = [u32; 5];

/// A map between the frames of one guest's memory and the blocks that they hold.
#[derive(Debug)]
pub struct BlockMap {
    /// The record of each frame.
    records: Vec<Record>,
    /// The table from blocks to frames.
    frames: HashTable<Frame>,
    /// Seed of the hash table, so that a guest cannot slow the table down by its choice of blocks.
    seed: u64,
}

impl BlockMap {
    /// Creates an empty map for a guest whose memory has `frames` frames.
    #[must_use]
    pub fn new(frames: Frame) -> Self {
        let seed = RandomState::new().hash_one(0);
        Self { records: vec![[0; 5]; frames as usize], frames: HashTable::new(), seed }
    }

    /// Creates a map like [`Self::new`], or returns `None` if the host has no memory for it.
    #[must_use]
    pub fn try_new(frames: Frame) -> Option<Self> {
        // Untouched memory is zero, and is allocated only when it is used.
        Vec::<Record>::new().try_reserve_exact(frames as usize).ok()?;
        Some(Self::new(frames))
    }

    /// Returns the number of frames of the guest's memory.
    #[must_use]
    pub fn frames(&self) -> Frame {
        self.records.len() as Frame
    }

    /// Returns the block that a frame holds.
    #[must_use]
    pub fn block_in(&self, frame: Frame) -> Option<u64> {
        Some(u64::from(self.records.get(frame as usize)?[0].checked_sub(1)?))
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Records that `block`, which has this digest on the disk, was moved into or out of `frame`.
    pub fn moved(&mut self, block: u64, frame: Frame, digest: Digest) {
        let Some(key) = key_of(block) else { return self.reused(frame) };
        let Some(record) = self.records.get_mut(frame as usize) else { return self.changed(block) };
        let [a, b, c, d] = words_of(digest);
        let previous_key = std::mem::replace(record, [key, a, b, c, d])[0];
        if previous_key == key {
            return;
        }
        if previous_key != 0 {
            self.remove_from_table(previous_key, frame);
        }
        let (records, seed) = (&self.records, self.seed);
        let key_in = |frame: &Frame| records.get(*frame as usize).map_or(0, |record| record[0]);
        // The record of `frame` has `key` already, but the table does not: a match is the block's previous frame.
        match self.frames.entry(hash(key, seed), |frame| key_in(frame) == key, |frame| hash(key_in(frame), seed)) {
            Entry::Occupied(mut entry) => {
                let previous_frame = std::mem::replace(entry.get_mut(), frame);
                if let Some(record) = self.records.get_mut(previous_frame as usize) {
                    *record = [0; 5];
                }
            }
            Entry::Vacant(entry) => drop(entry.insert(frame)),
        }
    }

    /// Removes a block whose content on the disk is not known any more.
    pub fn changed(&mut self, block: u64) {
        self.take(block);
    }

    /// Removes a block and returns its frame and digest.
    pub fn take(&mut self, block: u64) -> Option<(Frame, Digest)> {
        let key = key_of(block)?;
        let records = &self.records;
        let has_key = |frame: &Frame| records.get(*frame as usize).is_some_and(|record| record[0] == key);
        let frame = self.frames.find_entry(hash(key, self.seed), has_key).ok()?.remove().0;
        let [_, a, b, c, d] = std::mem::take(self.records.get_mut(frame as usize)?);
        Some((frame, digest_from([a, b, c, d])))
    }

    /// Removes a range of blocks and calls `visit` with their frames. Inspects each frame at most once, even if the
    /// range is long.
    pub fn take_all(&mut self, blocks: Range<u64>, mut visit: impl FnMut(Frame)) {
        if self.is_empty() {
            return;
        }
        let is_short = blocks.end.saturating_sub(blocks.start) <= u64::from(self.frames()) / 8;
        if is_short {
            blocks.filter_map(|block| self.take(block)).for_each(|(frame, _)| visit(frame));
            return;
        }
        for frame in 0..self.frames() {
            if self.block_in(frame).is_some_and(|block| blocks.contains(&block)) {
                self.reused(frame);
                visit(frame);
            }
        }
    }

    /// Records that `frame` was overwritten with something other than a whole block.
    pub fn reused(&mut self, frame: Frame) {
        let Some(record) = self.records.get_mut(frame as usize) else { return };
        let held_key = std::mem::take(record)[0];
        if held_key != 0 {
            self.remove_from_table(held_key, frame);
        }
    }

    /// Removes `frame`, which held `key`, from the table.
    fn remove_from_table(&mut self, key: u32, frame: Frame) {
        if let Ok(entry) = self.frames.find_entry(hash(key, self.seed), |candidate| *candidate == frame) {
            entry.remove();
        }
    }

    /// Returns the frame that holds a block, and the block's digest.
    #[must_use]
    pub fn get(&self, block: u64) -> Option<(Frame, Digest)> {
        let key = key_of(block)?;
        let record_of = |frame: &Frame| self.records.get(*frame as usize);
        let has_key = |frame: &Frame| record_of(frame).is_some_and(|record| record[0] == key);
        let frame = self.frames.find(hash(key, self.seed), has_key)?;
        let [_, a, b, c, d] = *record_of(frame)?;
        Some((*frame, digest_from([a, b, c, d])))
    }

    /// Returns all frames that hold a block, in order, each with its block.
    pub fn held_blocks(&self) -> impl Iterator<Item = (Frame, u64)> {
        (0..self.frames()).filter_map(|frame| Some((frame, self.block_in(frame)?)))
    }

    /// Returns the bytes of memory in use.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.frames.len() * size_of::<Record>() + self.frames.allocation_size()
    }
}

/// Hashes a key so that adjacent blocks are adjacent in the table, 16 of them in one cache line, because requests are
/// for several blocks. `hashbrown` takes the slot from the low bits, and distinguishes keys of one slot by the upper
/// 7 bits.
fn hash(key: u32, seed: u64) -> u64 {
    let (run, position_in_run) = (key >> 4, u64::from(key & 15));
    let hash_of_run = xxh3_64_with_seed(&run.to_ne_bytes(), seed);
    (hash_of_run & !15 | position_in_run) ^ position_in_run << 60
}

/// Returns the key of a block, which is not 0; `None` if the number is too large.
fn key_of(block: u64) -> Option<u32> {
    (block < MAX_BLOCKS).then(|| block as u32 + 1)
}

fn words_of(digest: Digest) -> [u32; 4] {
    [digest as u32, (digest >> 32) as u32, (digest >> 64) as u32, (digest >> 96) as u32]
}

fn digest_from([a, b, c, d]: [u32; 4]) -> Digest {
    u128::from(a) | u128::from(b) << 32 | u128::from(c) << 64 | u128::from(d) << 96
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Debug, Clone)]
    enum MapAction {
        Moved(u64, Frame, Digest),
        Changed(u64),
        Reused(Frame),
    }

    fn map_action() -> impl Strategy<Value = MapAction> {
        let (blocks, frames) = (prop_oneof![0..40u64, MAX_BLOCKS - 2..MAX_BLOCKS + 3], 0..24u32);
        prop_oneof![
            (blocks.clone(), frames.clone(), any::<Digest>())
                .prop_map(|(block, frame, digest)| MapAction::Moved(block, frame, digest)),
            blocks.prop_map(MapAction::Changed),
            frames.prop_map(MapAction::Reused),
        ]
    }

    proptest! {
        #[test]
        fn each_block_is_in_the_frame_that_it_was_moved_to_last(
            actions in proptest::collection::vec(map_action(), 0..200),
        ) {
            let mut map = BlockMap::new(20);
            let mut model: BTreeMap<u64, (Frame, Digest)> = BTreeMap::new();
            for action in actions {
                match action {
                    MapAction::Moved(block, frame, digest) => {
                        map.moved(block, frame, digest);
                        model.retain(|other, (holder, _)| *other != block && *holder != frame);
                        if block < MAX_BLOCKS && frame < 20 {
                            model.insert(block, (frame, digest));
                        }
                    }
                    MapAction::Changed(block) => {
                        map.changed(block);
                        model.remove(&block);
                    }
                    MapAction::Reused(frame) => {
                        map.reused(frame);
                        model.retain(|_, (holder, _)| *holder != frame);
                    }
                }
                prop_assert_eq!(map.len(), model.len());
                for block in (0..40).chain(MAX_BLOCKS - 2..MAX_BLOCKS + 3) {
                    prop_assert_eq!(map.get(block), model.get(&block).copied());
                }
                let mut held: Vec<_> = model.iter().map(|(block, (frame, _))| (*frame, *block)).collect();
                held.sort_unstable();
                for (frame, block) in &held {
                    prop_assert_eq!(map.block_in(*frame), Some(*block));
                }
                prop_assert_eq!((0..30).filter(|frame| map.block_in(*frame).is_some()).count(), held.len());
                prop_assert_eq!(map.held_blocks().collect::<Vec<_>>(), held);
            }
        }
    }

    #[test]
    fn blocks_of_a_range_are_forgotten_however_long_it_is() {
        for range in [0..3, 2..40, 0..u64::MAX, 7..7, 30..u64::MAX] {
            let mut map = BlockMap::new(64);
            (0..40).for_each(|block| map.moved(block, 63 - block as Frame, 1));
            let mut taken = Vec::new();
            map.take_all(range.clone(), |frame| taken.push(frame));
            taken.sort_unstable();
            let expected: Vec<_> = (24..64).filter(|frame| range.contains(&u64::from(63 - frame))).collect();
            assert_eq!(taken, expected);
            let remaining = (0..40).filter(|block| !range.contains(block)).collect::<Vec<_>>();
            assert_eq!((0..40).filter(|block| map.get(*block).is_some()).collect::<Vec<_>>(), remaining);
            assert_eq!(map.len(), remaining.len());
        }
    }

    #[test]
    fn a_cached_block_takes_at_most_32_bytes() {
        let mut map = BlockMap::new(1 << 18);
        let mut most_bytes = 0.0f64;
        for frame in 0..1u32 << 18 {
            map.moved(u64::from(frame) * 7919 % MAX_BLOCKS, frame, u128::from(frame));
            if map.len() > 1000 {
                most_bytes = most_bytes.max(map.bytes() as f64 / map.len() as f64);
            }
        }
        assert!(most_bytes <= 32.0, "{most_bytes} bytes");
    }
}
