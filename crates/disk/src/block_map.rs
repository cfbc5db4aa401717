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
pub const MOST_BLOCKS: u64 = u32::MAX as u64 - 1;

/// A frame's record: block + 1 (0: no block), and the digest. The record of an unused frame is zero, so that it takes
/// no memory.
type Record = [u32; 5];

/// A map between the frames of one guest's memory and the blocks that they hold.
#[derive(Debug)]
pub struct BlockMap {
    records: Vec<Record>,
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

    #[must_use]
    pub fn frames(&self) -> Frame {
        self.records.len() as Frame
    }

    #[must_use]
    pub fn block_in(&self, frame: Frame) -> Option<u64> {
        Some(u64::from(self.records.get(frame as usize)?[0].checked_sub(1)?))
    }

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
        let Some(key) = key(block) else { return self.reused(frame) };
        let Some(record) = self.records.get_mut(frame as usize) else { return self.changed(block) };
        let [a, b, c, d] = split(digest);
        let before = std::mem::replace(record, [key, a, b, c, d])[0];
        if before == key {
            return;
        }
        if before != 0 {
            self.remove(before, frame);
        }
        let (records, seed) = (&self.records, self.seed);
        let holds = |of: &Frame| records.get(*of as usize).map_or(0, |record| record[0]);
        // The record of `frame` has `key` already, but the table does not: a match is the block's previous frame.
        match self.frames.entry(hash(key, seed), |of| holds(of) == key, |of| hash(holds(of), seed)) {
            Entry::Occupied(mut entry) => {
                let other = std::mem::replace(entry.get_mut(), frame);
                if let Some(record) = self.records.get_mut(other as usize) {
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
        let key = key(block)?;
        let records = &self.records;
        let same = |frame: &Frame| records.get(*frame as usize).is_some_and(|record| record[0] == key);
        let frame = self.frames.find_entry(hash(key, self.seed), same).ok()?.remove().0;
        let [_, a, b, c, d] = std::mem::take(self.records.get_mut(frame as usize)?);
        Some((frame, joined([a, b, c, d])))
    }

    /// Removes a range of blocks and calls `each` with their frames. Inspects each frame at most once, even if the
    /// range is long.
    pub fn take_all(&mut self, blocks: Range<u64>, mut each: impl FnMut(Frame)) {
        let few = blocks.end.saturating_sub(blocks.start) <= u64::from(self.frames()) / 8;
        if self.is_empty() {
        } else if few {
            blocks.filter_map(|block| self.take(block)).for_each(|(frame, _)| each(frame));
        } else {
            for frame in 0..self.frames() {
                if self.block_in(frame).is_some_and(|block| blocks.contains(&block)) {
                    self.reused(frame);
                    each(frame);
                }
            }
        }
    }

    /// Records that `frame` was overwritten with something other than a whole block.
    pub fn reused(&mut self, frame: Frame) {
        let Some(record) = self.records.get_mut(frame as usize) else { return };
        let held = std::mem::take(record)[0];
        if held != 0 {
            self.remove(held, frame);
        }
    }

    /// Removes `frame`, which held `key`, from the table.
    fn remove(&mut self, key: u32, frame: Frame) {
        if let Ok(found) = self.frames.find_entry(hash(key, self.seed), |of| *of == frame) {
            found.remove();
        }
    }

    #[must_use]
    pub fn get(&self, block: u64) -> Option<(Frame, Digest)> {
        let key = key(block)?;
        let record = |frame: &Frame| self.records.get(*frame as usize);
        let same = |frame: &Frame| record(frame).is_some_and(|record| record[0] == key);
        let frame = self.frames.find(hash(key, self.seed), same)?;
        let [_, a, b, c, d] = *record(frame)?;
        Some((*frame, joined([a, b, c, d])))
    }

    /// Returns all frames that hold a block, in order, each with its block.
    pub fn held(&self) -> impl Iterator<Item = (Frame, u64)> {
        let numbered = self.records.iter().zip(0..);
        numbered.filter_map(|(record, frame)| Some((frame, u64::from(record[0].checked_sub(1)?))))
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
    let (run, within) = (key >> 4, u64::from(key & 15));
    let of_run = xxh3_64_with_seed(&run.to_ne_bytes(), seed);
    (of_run & !15 | within) ^ within << 60
}

fn key(block: u64) -> Option<u32> {
    (block < MOST_BLOCKS).then(|| block as u32 + 1)
}

fn split(digest: Digest) -> [u32; 4] {
    [digest as u32, (digest >> 32) as u32, (digest >> 64) as u32, (digest >> 96) as u32]
}

fn joined([a, b, c, d]: [u32; 4]) -> Digest {
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

    fn step() -> impl Strategy<Value = MapAction> {
        let (blocks, frames) = (prop_oneof![0..40u64, MOST_BLOCKS - 2..MOST_BLOCKS + 3], 0..24u32);
        prop_oneof![
            (blocks.clone(), frames.clone(), any::<Digest>()).prop_map(|(b, f, d)| MapAction::Moved(b, f, d)),
            blocks.prop_map(MapAction::Changed),
            frames.prop_map(MapAction::Reused),
        ]
    }

    proptest! {
        #[test]
        fn it_finds_what_was_moved_last(steps in proptest::collection::vec(step(), 0..200)) {
            let mut map = BlockMap::new(20);
            let mut model: BTreeMap<u64, (Frame, Digest)> = BTreeMap::new();
            for step in steps {
                match step {
                    MapAction::Moved(block, frame, digest) => {
                        map.moved(block, frame, digest);
                        model.retain(|of, (held, _)| *of != block && *held != frame);
                        if block < MOST_BLOCKS && frame < 20 {
                            model.insert(block, (frame, digest));
                        }
                    }
                    MapAction::Changed(block) => {
                        map.changed(block);
                        model.remove(&block);
                    }
                    MapAction::Reused(frame) => {
                        map.reused(frame);
                        model.retain(|_, (held, _)| *held != frame);
                    }
                }
                prop_assert_eq!(map.len(), model.len());
                for block in (0..40).chain(MOST_BLOCKS - 2..MOST_BLOCKS + 3) {
                    prop_assert_eq!(map.get(block), model.get(&block).copied());
                }
                let mut held: Vec<_> = model.iter().map(|(block, (frame, _))| (*frame, *block)).collect();
                held.sort_unstable();
                for (frame, block) in &held {
                    prop_assert_eq!(map.block_in(*frame), Some(*block));
                }
                prop_assert_eq!((0..30).filter(|frame| map.block_in(*frame).is_some()).count(), held.len());
                prop_assert_eq!(map.held().collect::<Vec<_>>(), held);
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
            let left = (0..40).filter(|block| !range.contains(block)).collect::<Vec<_>>();
            assert_eq!((0..40).filter(|block| map.get(*block).is_some()).collect::<Vec<_>>(), left);
            assert_eq!(map.len(), left.len());
        }
    }

    #[test]
    fn a_cached_block_takes_at_most_32_bytes() {
        let mut map = BlockMap::new(1 << 18);
        let mut worst = 0.0f64;
        for n in 0..1u32 << 18 {
            map.moved(u64::from(n) * 7919 % MOST_BLOCKS, n, u128::from(n));
            if map.len() > 1000 {
                worst = worst.max(map.bytes() as f64 / map.len() as f64);
            }
        }
        assert!(worst <= 32.0, "{worst} bytes");
    }
}
