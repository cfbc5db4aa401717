//! Units of a disk.

/// Bytes of a sector, the unit in which virtio counts (virtio 1.2, 5.2.4).
pub const SECTOR: u64 = 512;

/// Bytes of a block, the unit of the block map and the retained cache. A block is as long as a page of the guest,
/// because the guest's page cache consists of pages.
pub const BLOCK: usize = 4096;

pub type Block = [u8; BLOCK];

/// Returns the blocks that lie completely in `bytes` bytes from byte `at` on, each with its offset from `at`.
pub fn whole(at: u64, bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let block = BLOCK as u64;
    let first = at.div_ceil(block);
    let end = at.saturating_add(bytes) / block;
    (first..end.max(first)).map(move |number| (number, (number * block - at) as usize))
}

/// Returns the blocks that overlap `bytes` bytes from byte `at` on.
#[must_use]
pub fn touched(at: u64, bytes: u64) -> std::ops::Range<u64> {
    let block = BLOCK as u64;
    if bytes == 0 {
        return at / block..at / block;
    }
    at / block..at.saturating_add(bytes).div_ceil(block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_are_those_that_nothing_is_missing_of() {
        let blocks = |at, bytes| whole(at, bytes).collect::<Vec<_>>();
        assert_eq!(blocks(0, 8192), [(0, 0), (1, 4096)]);
        assert_eq!(blocks(512, 8192), [(1, 3584)]);
        assert_eq!(blocks(512, 4096), []);
        assert_eq!(blocks(4096, 4095), []);
        assert_eq!(blocks(0, 0), []);
        assert_eq!(blocks(u64::MAX - 100, 5000), []);
        assert_eq!(touched(512, 4096), 0..2);
        assert_eq!(touched(4096, 4096), 1..2);
        assert_eq!(touched(4096, 0), 1..1);
    }
}
