//! The features and the configuration space that a disk reports to its guest (virtio 1.2, 5.2.3 and 5.2.4).

use crate::block::SECTOR;

/// Bytes of the configuration space, up to `write_zeroes_may_unmap` and its padding.
pub const CONFIG_SPACE_BYTES: usize = 60;

/// Most data segments of one request.
const MAX_SEGMENTS: u32 = 254;
/// Most ranges in one discard or write of zeros.
pub const MAX_RANGES: u32 = 64;
/// Most sectors of one of these ranges: 1 GiB.
pub const MAX_RANGE_SECTORS: u32 = 1 << 21;

/// `VIRTIO_BLK_F_*`.
mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const READONLY: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const INDIRECT: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const VERSION_1: u64 = 1 << 32;
}

/// `VIRTIO_RING_F_EVENT_IDX`.
pub const EVENT_IDX: u64 = feature::EVENT_IDX;
/// `VHOST_F_LOG_ALL`: QEMU can request a log of written pages. QEMU does not migrate without it.
pub const LOG_ALL: u64 = 1 << 26;
/// `VHOST_USER_F_PROTOCOL_FEATURES`.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;

/// The properties of a disk that its guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskConfig {
    /// Length of the disk in bytes.
    pub capacity: u64,
    pub readonly: bool,
    /// Most queues that the guest may use.
    pub queues: u16,
}

impl DiskConfig {
    /// Returns the virtio and vhost-user features that the server offers.
    #[must_use]
    pub fn features(&self) -> u64 {
        use feature::{BLK_SIZE, DISCARD, FLUSH, INDIRECT, MQ, READONLY, SEG_MAX, TOPOLOGY, VERSION_1, WRITE_ZEROES};
        let device = SEG_MAX | BLK_SIZE | FLUSH | TOPOLOGY | MQ | if self.readonly { READONLY } else { 0 };
        let transport = INDIRECT | EVENT_IDX | VERSION_1 | LOG_ALL | PROTOCOL_FEATURES;
        // A read-only disk offers these features, too: a guest that continues on it has negotiated them.
        device | DISCARD | WRITE_ZEROES | transport
    }

    /// Returns the configuration space (`struct virtio_blk_config`).
    #[must_use]
    pub fn config_space(&self) -> [u8; CONFIG_SPACE_BYTES] {
        let mut space = [0; CONFIG_SPACE_BYTES];
        let mut put = |offset: usize, field: &[u8]| {
            for (target, byte) in space.iter_mut().skip(offset).zip(field) {
                *target = *byte;
            }
        };
        // capacity, seg_max, blk_size
        put(0, &(self.capacity / SECTOR).to_le_bytes());
        put(12, &MAX_SEGMENTS.to_le_bytes());
        put(20, &(SECTOR as u32).to_le_bytes());
        // physical_block_exp: blocks of 2^3 sectors. The guest then prefers to write whole pages, which the block map
        // can record.
        put(24, &[3]);
        // num_queues
        put(34, &self.queues.to_le_bytes());
        // max_discard_sectors, max_discard_seg, discard_sector_alignment
        put(36, &MAX_RANGE_SECTORS.to_le_bytes());
        put(40, &MAX_RANGES.to_le_bytes());
        put(44, &8u32.to_le_bytes());
        // max_write_zeroes_sectors, max_write_zeroes_seg, write_zeroes_may_unmap
        put(48, &MAX_RANGE_SECTORS.to_le_bytes());
        put(52, &MAX_RANGES.to_le_bytes());
        put(56, &[1]);
        space
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_at_the_offsets_of_the_specification() {
        let readonly = DiskConfig { capacity: 1 << 30, readonly: true, queues: 2 };
        let space = readonly.config_space();
        assert_eq!(space[..8], (1u64 << 21).to_le_bytes(), "capacity");
        assert_eq!(space[20..24], 512u32.to_le_bytes(), "blk_size");
        assert_eq!(space[24], 3, "physical_block_exp");
        assert_eq!(space[34], 2, "num_queues");
        assert_eq!(space[56], 1, "write_zeroes_may_unmap");
        assert_ne!(readonly.features() & (1 << 5), 0, "VIRTIO_BLK_F_RO");
        assert_eq!(DiskConfig { readonly: false, ..readonly }.features() & (1 << 5), 0);
    }
}
