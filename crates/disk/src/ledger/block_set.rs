//! A sparse set of blocks: a bitmap in pieces, without empty pieces.

use std::collections::BTreeMap;
use std::ops::Range;

/// Blocks of one piece: 16 MiB of the disk in 512 bytes.
const PIECE_BLOCKS: u64 = 4096;
const PIECE_WORDS: usize = (PIECE_BLOCKS / 64) as usize;

/// A sparse set of blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockSet(BTreeMap<u64, Box<[u64; PIECE_WORDS]>>);

/// Returns the words of a piece that contain blocks of a range, with the bits of these blocks.
fn words(piece: u64, range: &Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let begin = range.start.max(piece * PIECE_BLOCKS) - piece * PIECE_BLOCKS;
    let end = range.end.min((piece + 1) * PIECE_BLOCKS) - piece * PIECE_BLOCKS;
    (begin / 64..end.div_ceil(64)).map(move |word| {
        let (first, last) = (begin.max(word * 64) - word * 64, end.min((word + 1) * 64) - word * 64);
        let ones = if last - first == 64 { u64::MAX } else { ((1 << (last - first)) - 1) << first };
        (word as usize, ones)
    })
}

impl BlockSet {
    pub fn insert(&mut self, range: Range<u64>) {
        for piece in range.start / PIECE_BLOCKS..range.end.div_ceil(PIECE_BLOCKS) {
            let bits = self.0.entry(piece).or_insert_with(|| Box::new([0; PIECE_WORDS]));
            for (word, ones) in words(piece, &range) {
                if let Some(bits) = bits.get_mut(word) {
                    *bits |= ones;
                }
            }
        }
    }

    /// Returns the first block of a range that is in the set.
    #[must_use]
    pub fn first_in(&self, range: &Range<u64>) -> Option<u64> {
        let pieces = self.0.range(range.start / PIECE_BLOCKS..range.end.div_ceil(PIECE_BLOCKS));
        pieces.into_iter().find_map(|(piece, bits)| {
            let mut common =
                words(*piece, range).map(|(word, ones)| (word, bits.get(word).copied().unwrap_or(0) & ones));
            let first = common.find(|(_, bits)| *bits != 0);
            first.map(|(word, bits)| piece * PIECE_BLOCKS + word as u64 * 64 + u64::from(bits.trailing_zeros()))
        })
    }

    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.values().flat_map(|bits| bits.iter()).map(|word| u64::from(word.count_ones())).sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_equals_a_set_of_numbers(
            ranges in prop::collection::vec((0u64..20_000, 0u64..5000), 0..12),
            asked in prop::collection::vec((0u64..26_000, 0u64..9000), 1..12),
        ) {
            let (mut blocks, mut model) = (BlockSet::default(), BTreeSet::new());
            for (begin, count) in ranges {
                blocks.insert(begin..begin + count);
                model.extend(begin..begin + count);
            }
            prop_assert_eq!(blocks.len(), model.len() as u64);
            prop_assert_eq!(blocks.is_empty(), model.is_empty());
            for (begin, count) in asked {
                let range = begin..begin + count;
                prop_assert_eq!(blocks.first_in(&range), model.range(range).next().copied());
            }
        }
    }
}
