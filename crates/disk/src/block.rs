//! Units of a disk: sectors, and blocks as long as a page of the guest.

use rekindle_pages::PAGE_SIZE;
use std::ops::Range;

/// Bytes of a sector, the unit in which virtio counts (virtio 1.2, 5.2.4).
pub const SECTOR: u64 = 512;

/// Bytes of a block, the unit of the block map and the retained cache. A block is as long as a page of the guest,
/// because the guest's page cache consists of pages.
pub const BLOCK: usize = PAGE_SIZE;

pub type Block = [u8; BLOCK];

/// A block that lies completely in a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WholeBlock {
    pub number: u64,
    /// Offset of the block in the range.
    pub offset: usize,
}

/// Returns the blocks that lie completely in `bytes` bytes from byte `start` on.
pub fn whole_blocks(start: u64, bytes: u64) -> impl Iterator<Item = WholeBlock> {
    let block = BLOCK as u64;
    let first = start.div_ceil(block);
    let end = start.saturating_add(bytes) / block;
    (first..end.max(first)).map(move |number| WholeBlock { number, offset: (number * block - start) as usize })
}

/// Returns the numbers of the blocks that overlap `bytes` bytes from byte `start` on.
#[must_use]
pub fn overlapping_blocks(start: u64, bytes: u64) -> Range<u64> {
    let block = BLOCK as u64;
    let first = start / block;
    let end = if bytes == 0 { first } else { start.saturating_add(bytes).div_ceil(block) };
    first..end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_lie_completely_in_the_range() {
        let blocks =
            |start, bytes| whole_blocks(start, bytes).map(|block| (block.number, block.offset)).collect::<Vec<_>>();
        assert_eq!(blocks(0, 8192), [(0, 0), (1, 4096)]);
        assert_eq!(blocks(512, 8192), [(1, 3584)]);
        assert_eq!(blocks(512, 4096), []);
        assert_eq!(blocks(4096, 4095), []);
        assert_eq!(blocks(0, 0), []);
        assert_eq!(blocks(u64::MAX - 100, 5000), []);
    }

    #[test]
    fn overlapping_blocks_have_a_byte_of_the_range() {
        assert_eq!(overlapping_blocks(512, 4096), 0..2);
        assert_eq!(overlapping_blocks(4096, 4096), 1..2);
        assert_eq!(overlapping_blocks(4096, 0), 1..1);
    }
}
