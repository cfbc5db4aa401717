//! The place of the newest content of each sector: a segment or the image.
//!
//! A *segment* is the file with the writes of one *epoch*, the time between two checkpoints. A sector that no segment
//! has is read from the image.

use std::collections::BTreeMap;
use std::ops::Range;

/// The place of content in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// In the segment of `epoch`, starting at byte `offset`.
    Data { epoch: u64, offset: u64 },
    /// Zeros, recorded in the segment of `epoch`. `hole`: they need no space.
    Zeroes { epoch: u64, hole: bool },
}

impl Source {
    #[must_use]
    pub fn epoch(self) -> u64 {
        match self {
            Self::Data { epoch, .. } | Self::Zeroes { epoch, .. } => epoch,
        }
    }

    /// Returns the source of the content `bytes` bytes later.
    #[must_use]
    pub fn skip(self, bytes: u64) -> Self {
        match self {
            Self::Data { epoch, offset } => Self::Data { epoch, offset: offset + bytes },
            zeroes @ Self::Zeroes { .. } => zeroes,
        }
    }
}

/// A part of the disk whose content is in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocatedPiece {
    /// First byte on the disk.
    pub start: u64,
    pub bytes: u64,
    /// `None`: the content is in the image.
    pub source: Option<Source>,
}

/// Bytes of an entry that a newer entry has overwritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overwritten {
    pub epoch: u64,
    /// Sequence number of the overwritten entry.
    pub sequence: u64,
    pub bytes: u64,
}

/// A part of the disk whose newest content is in one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryPiece {
    /// First byte on the disk.
    pub start: u64,
    pub bytes: u64,
    /// Sequence number of the entry.
    pub sequence: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    end: u64,
    sequence: u64,
    source: Source,
}

/// The extents of the segments' newest content, by their first byte. Extents do not overlap.
#[derive(Debug, Clone, Default)]
pub struct Index(BTreeMap<u64, Extent>);

impl Index {
    /// Returns the number of extents.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the extents that overlap a range, each with its first byte.
    fn overlapping(&self, range: &Range<u64>) -> Vec<(u64, Extent)> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.0.range(..range.start).next_back().filter(|(_, extent)| extent.end > range.start);
        let extents = before.into_iter().chain(self.0.range(range.clone()));
        extents.map(|(start, extent)| (*start, *extent)).collect()
    }

    /// Records that the entry with `sequence` has the content of `range`, except where a newer entry is recorded. Calls
    /// `report` with each part of an entry that is overwritten.
    pub fn insert(&mut self, range: Range<u64>, sequence: u64, source: Source, mut report: impl FnMut(Overwritten)) {
        let insert_piece = |map: &mut BTreeMap<u64, Extent>, piece: Range<u64>| {
            if !piece.is_empty() {
                let source = source.skip(piece.start - range.start);
                map.insert(piece.start, Extent { end: piece.end, sequence, source });
            }
        };
        // The first byte that is not handled yet.
        let mut next = range.start;
        for (start, extent) in self.overlapping(&range) {
            let common_bytes = extent.end.min(range.end) - start.max(range.start);
            if extent.sequence > sequence {
                insert_piece(&mut self.0, next..start);
                report(Overwritten { epoch: source.epoch(), sequence, bytes: common_bytes });
                next = extent.end;
                continue;
            }
            report(Overwritten { epoch: extent.source.epoch(), sequence: extent.sequence, bytes: common_bytes });
            self.0.remove(&start);
            if start < range.start {
                self.0.insert(start, Extent { end: range.start, ..extent });
            }
            if extent.end > range.end {
                let source = extent.source.skip(range.end - start);
                self.0.insert(range.end, Extent { source, ..extent });
            }
        }
        insert_piece(&mut self.0, next..range.end);
    }

    /// Returns the pieces of a range, in order and without gaps.
    #[must_use]
    pub fn look_up(&self, range: Range<u64>) -> Vec<LocatedPiece> {
        let mut pieces = Vec::new();
        let mut next = range.start;
        for (extent_start, extent) in self.overlapping(&range) {
            let (start, end) = (extent_start.max(range.start), extent.end.min(range.end));
            if next < start {
                pieces.push(LocatedPiece { start: next, bytes: start - next, source: None });
            }
            let source = Some(extent.source.skip(start - extent_start));
            pieces.push(LocatedPiece { start, bytes: end - start, source });
            next = end;
        }
        if next < range.end {
            pieces.push(LocatedPiece { start: next, bytes: range.end - next, source: None });
        }
        pieces
    }

    /// Returns all extents, in disk order.
    pub fn entry_pieces(&self) -> impl Iterator<Item = EntryPiece> + '_ {
        let piece = |(start, extent): (&u64, &Extent)| EntryPiece {
            start: *start,
            bytes: extent.end - start,
            sequence: extent.sequence,
        };
        self.0.iter().map(piece)
    }

    /// Removes the extents in a range of epochs up to `epoch`: their content is in the image.
    pub fn forget(&mut self, range: &Range<u64>, epoch: u64) {
        for (start, extent) in self.overlapping(range) {
            if extent.source.epoch() <= epoch {
                self.0.remove(&start);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DISK_BYTES: u64 = 64;

    /// An entry of the test. Its sequence number is its position.
    #[derive(Debug, Clone)]
    struct TestEntry {
        start: u64,
        bytes: u64,
        is_zeroes: bool,
        /// Entries complete in the order of this number.
        completion: u32,
    }

    fn test_entry() -> impl Strategy<Value = TestEntry> {
        (0..DISK_BYTES, 1..20u64, any::<bool>(), any::<u32>())
            .prop_map(|(start, bytes, is_zeroes, completion)| TestEntry { start, bytes, is_zeroes, completion })
    }

    proptest! {
        #[test]
        fn each_byte_is_where_the_newest_entry_has_it_in_whichever_order_they_end(
            entries in proptest::collection::vec(test_entry(), 0..30),
        ) {
            let mut order: Vec<usize> = (0..entries.len()).collect();
            order.sort_by_key(|number| entries[*number].completion);
            let mut index = Index::default();
            // The newest entry of each byte, and its source there.
            let mut model: Vec<Option<(usize, Source)>> = vec![None; DISK_BYTES as usize];
            let mut live_bytes: Vec<u64> = vec![0; entries.len()];
            for number in order {
                let TestEntry { start, bytes, is_zeroes, .. } = entries[number];
                let end = (start + bytes).min(DISK_BYTES);
                let epoch = number as u64 / 10;
                let source = if is_zeroes {
                    Source::Zeroes { epoch, hole: false }
                } else {
                    Source::Data { epoch, offset: 1000 * number as u64 }
                };
                live_bytes[number] = end - start;
                index.insert(start..end, number as u64, source, |Overwritten { epoch, sequence, bytes }| {
                    assert_eq!(epoch, sequence / 10);
                    live_bytes[sequence as usize] -= bytes;
                });
                for byte in start..end {
                    let newest = &mut model[byte as usize];
                    if newest.is_none_or(|(other, _)| other < number) {
                        *newest = Some((number, source.skip(byte - start)));
                    }
                }
            }
            for range in [0..DISK_BYTES, 3..40, 20..21, 5..5] {
                let mut next = range.start;
                for LocatedPiece { start, bytes, source } in index.look_up(range.clone()) {
                    prop_assert_eq!(start, next);
                    prop_assert!(bytes > 0);
                    for byte in start..start + bytes {
                        let expected = model[byte as usize].map(|(_, source)| source);
                        prop_assert_eq!(source.map(|source| source.skip(byte - start)), expected);
                    }
                    next = start + bytes;
                }
                prop_assert_eq!(next, range.end);
            }
            for (number, live) in live_bytes.iter().enumerate() {
                let held = model.iter().flatten().filter(|(newest, _)| *newest == number).count();
                prop_assert_eq!(*live, held as u64, "entry {}", number);
            }
            let indexed: u64 = index.entry_pieces().map(|piece| piece.bytes).sum();
            prop_assert_eq!(indexed, model.iter().flatten().count() as u64);
            // Only merged content is forgotten.
            index.forget(&(0..DISK_BYTES), 0);
            for LocatedPiece { start, bytes, source } in index.look_up(0..DISK_BYTES) {
                for byte in start..start + bytes {
                    let expected = model[byte as usize].filter(|(number, _)| *number >= 10).map(|(_, source)| source);
                    prop_assert_eq!(source.map(|source| source.skip(byte - start)), expected);
                }
            }
        }
    }
}
