//! The place of the newest content of each sector: a segment or the image.

use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// In the segment of `epoch`, starting at byte `at`.
    Data { epoch: u64, at: u64 },
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
            Self::Data { epoch, at } => Self::Data { epoch, at: at + bytes },
            zeroes @ Self::Zeroes { .. } => zeroes,
        }
    }
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
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn over(&self, at: u64, end: u64) -> Vec<(u64, Extent)> {
        if at >= end {
            return Vec::new();
        }
        let before = self.0.range(..at).next_back().filter(|(_, extent)| extent.end > at);
        before.into_iter().chain(self.0.range(at..end)).map(|(at, extent)| (*at, *extent)).collect()
    }

    /// Records that the entry with `sequence` has the content of `at..end`, except where a newer entry is recorded.
    /// Calls `loses` with epoch, sequence number and byte count of each entry that is overwritten.
    pub fn insert(&mut self, at: u64, end: u64, sequence: u64, source: Source, mut loses: impl FnMut(u64, u64, u64)) {
        let mut from = at;
        let put = |map: &mut BTreeMap<u64, Extent>, from: u64, to: u64| {
            if from < to {
                map.insert(from, Extent { end: to, sequence, source: source.skip(from - at) });
            }
        };
        for (first, extent) in self.over(at, end) {
            if extent.sequence > sequence {
                put(&mut self.0, from, first);
                loses(source.epoch(), sequence, extent.end.min(end) - first.max(at));
                from = extent.end;
                continue;
            }
            loses(extent.source.epoch(), extent.sequence, extent.end.min(end) - first.max(at));
            self.0.remove(&first);
            if first < at {
                self.0.insert(first, Extent { end: at, ..extent });
            }
            if extent.end > end {
                self.0.insert(end, Extent { source: extent.source.skip(end - first), ..extent });
            }
        }
        put(&mut self.0, from, end);
    }

    /// Returns the pieces of `at..end`, in order and without gaps: first byte, bytes, and the source, which is `None`
    /// for the image.
    #[must_use]
    pub fn look_up(&self, at: u64, end: u64) -> Vec<(u64, u64, Option<Source>)> {
        let mut pieces = Vec::new();
        let mut from = at;
        for (first, extent) in self.over(at, end) {
            let (begin, stop) = (first.max(at), extent.end.min(end));
            if from < begin {
                pieces.push((from, begin - from, None));
            }
            pieces.push((begin, stop - begin, Some(extent.source.skip(begin - first))));
            from = stop;
        }
        if from < end {
            pieces.push((from, end - from, None));
        }
        pieces
    }

    /// Returns all extents, in disk order: first byte, bytes, the sequence number of their entry.
    pub fn all(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        self.0.iter().map(|(at, extent)| (*at, extent.end - at, extent.sequence))
    }

    /// Removes the extents in `at..end` of epochs up to `epoch`: their content is in the image.
    pub fn forget(&mut self, at: u64, end: u64, epoch: u64) {
        for (first, extent) in self.over(at, end) {
            if extent.source.epoch() <= epoch {
                self.0.remove(&first);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEN: u64 = 64;

    proptest! {
        #[test]
        fn each_byte_is_where_the_newest_entry_has_it_in_whichever_order_they_end(
            entries in proptest::collection::vec((0..LEN, 1..20u64, any::<bool>(), any::<u32>()), 0..30),
        ) {
            // The random number gives the order in which they complete, the position their sequence.
            let mut order: Vec<usize> = (0..entries.len()).collect();
            order.sort_by_key(|n| entries[*n].3);
            let mut index = Index::default();
            let mut model: Vec<Option<(usize, Source)>> = vec![None; LEN as usize];
            let mut live: Vec<u64> = vec![0; entries.len()];
            for n in order {
                let (at, bytes, zeroes, _) = entries[n];
                let end = (at + bytes).min(LEN);
                let epoch = n as u64 / 10;
                let source = match zeroes {
                    true => Source::Zeroes { epoch, hole: false },
                    false => Source::Data { epoch, at: 1000 * n as u64 },
                };
                live[n] = end - at;
                index.insert(at, end, n as u64, source, |of, sequence, bytes| {
                    assert_eq!(of, sequence / 10);
                    live[sequence as usize] -= bytes;
                });
                for byte in at..end {
                    let place = &mut model[byte as usize];
                    if place.is_none_or(|(other, _)| other < n) {
                        *place = Some((n, source.skip(byte - at)));
                    }
                }
            }
            for (at, end) in [(0, LEN), (3, 40), (20, 21), (5, 5)] {
                let mut next = at;
                for (first, bytes, source) in index.look_up(at, end) {
                    prop_assert_eq!(first, next);
                    prop_assert!(bytes > 0);
                    for byte in first..first + bytes {
                        let expected = model[byte as usize].map(|(_, source)| source);
                        prop_assert_eq!(source.map(|source| source.skip(byte - first)), expected);
                    }
                    next = first + bytes;
                }
                prop_assert_eq!(next, end);
            }
            for (n, live) in live.iter().enumerate() {
                let held = model.iter().flatten().filter(|(other, _)| *other == n).count();
                prop_assert_eq!(*live, held as u64, "entry {}", n);
            }
            prop_assert_eq!(index.all().map(|(_, bytes, _)| bytes).sum::<u64>(), model.iter().flatten().count() as u64);
            // Only merged content is forgotten.
            index.forget(0, LEN, 0);
            for (first, bytes, source) in index.look_up(0, LEN) {
                for byte in first..first + bytes {
                    let expected = model[byte as usize].filter(|(n, _)| *n >= 10).map(|(_, source)| source);
                    prop_assert_eq!(source.map(|source| source.skip(byte - first)), expected);
                }
            }
        }
    }
}
