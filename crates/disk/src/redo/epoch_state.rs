//! The durable state of a disk's epochs, in one of two slots (`docs/disk-epochs.md`, Files).
//!
//! An *epoch* is the time between two checkpoints. It is *sealed* when its writes are durable in the log, and *merged*
//! when they are in the image.

use crate::slots::{Counted, SlotRecord, fits_into_slot};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Version of the state. Format 1 has neither `image` nor `segments`, and can still be read.
pub const FORMAT: u32 = 2;

/// The durable state of a disk's epochs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EpochState {
    /// [`FORMAT`] of this state.
    pub format: u32,
    /// The disk's identity as long as the log exists.
    pub disk: Uuid,
    /// Length of the disk when the log was created.
    pub bytes: u64,
    /// The newest durable epoch.
    pub sealed: u64,
    /// The image may have writes of epochs up to this.
    pub floor: u64,
    /// The image has all writes of epochs up to this.
    pub merged: u64,
    /// Discarded epochs.
    pub dead: Vec<EpochRange>,
    /// File name of the image; `None` if an earlier version created the log.
    #[serde(default)]
    pub image: Option<String>,
    /// Sealed epochs whose segments have a seal record. Some may be merged or discarded. The oldest ranges are missing
    /// if there is no space for them.
    #[serde(default)]
    pub segments: Vec<EpochRange>,
}

/// The epochs from `first` to `last`, both included. In JSON: an array of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "(u64, u64)", into = "(u64, u64)")]
pub struct EpochRange {
    pub first: u64,
    pub last: u64,
}

impl EpochRange {
    #[must_use]
    pub fn contains(&self, epoch: u64) -> bool {
        (self.first..=self.last).contains(&epoch)
    }
}

impl From<(u64, u64)> for EpochRange {
    fn from((first, last): (u64, u64)) -> Self {
        Self { first, last }
    }
}

impl From<EpochRange> for (u64, u64) {
    fn from(range: EpochRange) -> Self {
        (range.first, range.last)
    }
}

/// A state, and its count.
pub(crate) type CountedState = Counted<EpochState>;

impl SlotRecord for EpochState {
    const MAGIC: &'static [u8; 8] = b"RKREDOST";
    const FORMAT: u32 = FORMAT;
}

impl EpochState {
    /// Returns whether an epoch is discarded.
    #[must_use]
    pub fn is_dead(&self, epoch: u64) -> bool {
        self.dead.iter().any(|range| range.contains(epoch))
    }

    /// Returns the sealed epochs up to `last` that are neither merged nor discarded. Their segments must have a seal
    /// record.
    pub fn sealed_segments(&self, last: u64) -> impl Iterator<Item = u64> {
        let last = last.min(self.sealed);
        let first_unmerged = self.merged.saturating_add(1);
        self.segments.iter().flat_map(move |range| {
            let mut next = Some(range.first.max(first_unmerged));
            std::iter::from_fn(move || {
                let epoch = self.first_alive(next?).filter(|epoch| *epoch <= last.min(range.last))?;
                next = epoch.checked_add(1);
                Some(epoch)
            })
        })
    }

    /// Returns the first epoch from `epoch` on that is not discarded. A damaged state may have ranges of any size.
    fn first_alive(&self, mut epoch: u64) -> Option<u64> {
        while let Some(dead) = self.dead.iter().find(|range| range.contains(epoch)) {
            epoch = dead.last.checked_add(1)?;
        }
        Some(epoch)
    }

    /// Returns the last epoch up to `epoch` that is not discarded, or 0.
    pub fn last_alive(&self, mut epoch: u64) -> u64 {
        while let Some(dead) = self.dead.iter().find(|range| range.contains(epoch)) {
            epoch = dead.first.saturating_sub(1);
            if epoch == 0 {
                break;
            }
        }
        epoch
    }

    /// Records that all epochs up to `epoch` are durable, and that the segments of `sealed` have seal records.
    pub fn seal(&mut self, epoch: u64, sealed: &[u64]) {
        self.sealed = self.sealed.max(epoch);
        for &epoch in sealed {
            let is_in_or_after =
                |range: &&mut EpochRange| (range.first..=range.last.saturating_add(1)).contains(&epoch);
            match self.segments.iter_mut().find(is_in_or_after) {
                Some(range) => range.last = range.last.max(epoch),
                None => self.segments.push(EpochRange { first: epoch, last: epoch }),
            }
        }
    }

    /// Drops the ranges of `segments` that are merged or discarded. Then drops the oldest other ranges until the
    /// state fits into its slot, because the other fields must always be recorded. Returns the epochs from the first to
    /// the last of these oldest ranges.
    pub fn fit_segments(&mut self) -> Option<EpochRange> {
        let (merged, dead) = (self.merged, &self.dead);
        let is_dead = |range: &EpochRange| dead.iter().any(|dead| dead.first <= range.first && range.last <= dead.last);
        self.segments.retain(|range| range.last > merged && !is_dead(range));
        if fits_into_slot(self) {
            return None;
        }
        self.segments.sort_unstable();
        let first = self.segments.first()?.first;
        let mut dropped = None;
        while !fits_into_slot(self) && !self.segments.is_empty() {
            dropped = Some(EpochRange { first, last: self.segments.remove(0).last });
        }
        dropped
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
pub(super) mod tests {
    use super::*;
    use crate::redo::format::PAGE_BYTES;
    use crate::slots::{CHECKSUM_BYTES, newest_slot, read_slot, write_slot};
    use xxhash_rust::xxh3::xxh3_128;

    pub(in crate::redo) fn ranges<const N: usize>(ranges: [(u64, u64); N]) -> Vec<EpochRange> {
        ranges.into_iter().map(EpochRange::from).collect()
    }

    #[test]
    fn a_slot_is_read_and_a_changed_one_is_not() {
        let dead = ranges([(3, 4)]);
        let (disk, image) = (Uuid::new_v4(), Some("disk.raw".to_owned()));
        let (sealed, floor, merged, segments) = (7, 6, 5, ranges([(1, 2), (6, 7)]));
        let state = EpochState { format: FORMAT, disk, bytes: 4096, sealed, floor, merged, dead, image, segments };
        assert!(state.is_dead(3) && state.is_dead(4) && !state.is_dead(5));
        let page = write_slot(&state, 9).unwrap();
        assert_eq!(read_slot(&page), Some(CountedState { count: 9, state }));
        for at in (0..64).chain([200, 4079, 4080, 4095]) {
            let mut changed = page.to_vec();
            changed[at] ^= 1;
            assert_eq!(read_slot::<EpochState>(&changed), None, "byte {at}");
        }
        assert_eq!(read_slot::<EpochState>(&page[..4095]), None);
    }

    /// Returns a slot with JSON text of an earlier or later version.
    pub(in crate::redo) fn slot(json: &str, count: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE_BYTES as usize];
        let content =
            [&EpochState::MAGIC[..], &count.to_le_bytes(), &(json.len() as u32).to_le_bytes(), json.as_bytes()]
                .concat();
        page[..content.len()].copy_from_slice(&content);
        let (body, sum) = page.split_at_mut(PAGE_BYTES as usize - CHECKSUM_BYTES);
        sum.copy_from_slice(&xxh3_128(body).to_le_bytes());
        page
    }

    #[test]
    fn a_state_of_format_1_is_read_and_one_of_a_later_format_is_not() {
        let disk = Uuid::from_u128(5);
        let old =
            format!(r#"{{"format":1,"disk":"{disk}","bytes":4096,"sealed":3,"floor":1,"merged":1,"dead":[[2,2]]}}"#);
        let CountedState { count, state } = newest_slot(&slot(&old, 4)).unwrap().unwrap();
        assert_eq!((count, state.format, state.sealed, state.image.as_deref()), (4, 1, 3, None));
        assert_eq!(state.sealed_segments(u64::MAX).count(), 0);
        // The same result if the other slot has a readable state, because that state is older.
        let later = slot(r#"{"format":3,"more":true}"#, 5);
        assert_eq!(newest_slot::<EpochState>(&[slot(&old, 4), later].concat()), Err(3));
    }

    #[test]
    fn sealed_segments_are_those_that_are_neither_merged_nor_discarded() {
        let (disk, dead) = (Uuid::nil(), ranges([(5, 6)]));
        let mut state = EpochState {
            format: FORMAT,
            disk,
            bytes: 1,
            sealed: 0,
            floor: 0,
            merged: 2,
            dead,
            image: None,
            segments: vec![],
        };
        state.seal(2, &[1, 2]);
        state.seal(4, &[3, 4]);
        state.seal(3, &[3]);
        state.seal(6, &[5, 6]);
        state.seal(9, &[8, 9]);
        assert_eq!(state.segments, ranges([(1, 6), (8, 9)]));
        assert_eq!(state.sealed_segments(u64::MAX).collect::<Vec<_>>(), [3, 4, 8, 9]);
        assert_eq!(state.sealed_segments(8).collect::<Vec<_>>(), [3, 4, 8]);
        assert_eq!((state.last_alive(9), state.last_alive(6), state.last_alive(5)), (9, 4, 4));
    }

    #[test]
    fn ranges_of_any_size_take_no_time() {
        let all = || ranges([(0, u64::MAX)]);
        let (disk, image) = (Uuid::nil(), None);
        let (sealed, merged) = (u64::MAX, 0);
        let state = EpochState {
            format: FORMAT,
            disk,
            bytes: 1,
            sealed,
            floor: 0,
            merged,
            dead: all(),
            image,
            segments: all(),
        };
        assert_eq!((state.sealed_segments(u64::MAX).count(), state.last_alive(u64::MAX)), (0, 0));
        let state = EpochState { dead: Vec::new(), ..state };
        assert_eq!(state.sealed_segments(u64::MAX).take(2).collect::<Vec<_>>(), [1, 2]);
    }
}
