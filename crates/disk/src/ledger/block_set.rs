//! A sparse set of blocks: a bitmap in pieces, without empty pieces.

use std::collections::BTreeMap;
use std::ops::Range;

/// Blocks of one piece: 16 MiB of the disk in 512 bytes.
const PIECE_BLOCKS: u64 = 4096;
const PIECE_WORDS: usize = (PIECE_BLOCKS / 64) as usize;

/// A sparse set of blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockSet(BTreeMap<u64, Box<[u64; PIECE_WORDS]>>);

/// The bits of some blocks in one word of a piece.
struct WordMask {
    /// Index of the word in the piece.
    index: usize,
    bits: u64,
}

/// Returns the masks of the blocks of a range that are in a piece.
fn word_masks(piece: u64, range: &Range<u64>) -> impl Iterator<Item = WordMask> {
    let piece_start = piece * PIECE_BLOCKS;
    let start = range.start.max(piece_start) - piece_start;
    let end = range.end.min(piece_start + PIECE_BLOCKS) - piece_start;
    (start / 64..end.div_ceil(64)).map(move |index| {
        let word_start = index * 64;
        let (first_bit, end_bit) = (start.max(word_start) - word_start, end.min(word_start + 64) - word_start);
        let count = end_bit - first_bit;
        let bits = if count == 64 { u64::MAX } else { ((1 << count) - 1) << first_bit };
        WordMask { index: index as usize, bits }
    })
}

impl BlockSet {
    pub fn insert(&mut self, range: Range<u64>) {
        for piece in range.start / PIECE_BLOCKS..range.end.div_ceil(PIECE_BLOCKS) {
            let words = self.0.entry(piece).or_insert_with(|| Box::new([0; PIECE_WORDS]));
            for mask in word_masks(piece, &range) {
                if let Some(word) = words.get_mut(mask.index) {
                    *word |= mask.bits;
                }
            }
        }
    }

    /// Returns the first block of a range that is in the set.
    #[must_use]
    pub fn first_in(&self, range: &Range<u64>) -> Option<u64> {
        let pieces = self.0.range(range.start / PIECE_BLOCKS..range.end.div_ceil(PIECE_BLOCKS));
        for (piece, words) in pieces {
            for mask in word_masks(*piece, range) {
                let common_bits = words.get(mask.index).copied().unwrap_or(0) & mask.bits;
                if common_bits != 0 {
                    let first_bit = mask.index as u64 * 64 + u64::from(common_bits.trailing_zeros());
                    return Some(piece * PIECE_BLOCKS + first_bit);
                }
            }
        }
        None
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.values().flat_map(|words| words.iter()).map(|word| u64::from(word.count_ones())).sum()
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
        fn a_block_set_equals_a_set_of_numbers(
            ranges in prop::collection::vec((0u64..20_000, 0u64..5000), 0..12),
            queries in prop::collection::vec((0u64..26_000, 0u64..9000), 1..12),
        ) {
            let (mut blocks, mut model) = (BlockSet::default(), BTreeSet::new());
            for (start, count) in ranges {
                blocks.insert(start..start + count);
                model.extend(start..start + count);
            }
            prop_assert_eq!(blocks.len(), model.len() as u64);
            prop_assert_eq!(blocks.is_empty(), model.is_empty());
            for (start, count) in queries {
                let range = start..start + count;
                prop_assert_eq!(blocks.first_in(&range), model.range(range).next().copied());
            }
        }
    }
}
