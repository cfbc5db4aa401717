//! The features and the configuration space that a disk reports to its guest (virtio 1.2, 5.2.3 and 5.2.4).

use crate::block::SECTOR;
use crate::request::MOST_RANGES;

/// Bytes of the configuration space, up to `write_zeroes_may_unmap` and its padding.
pub const BYTES: usize = 60;

const SEGMENTS: u32 = 254;
/// Most sectors of one range of a discard or of a write of zeros: 1 GiB.
pub const RANGE_SECTORS: u32 = 1 << 21;

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
pub const PROTOCOL: u64 = 1 << 30;

/// The properties of a disk that its guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskConfig {
    pub capacity: u64,
    pub readonly: bool,
    /// Most queues that the guest may use.
    pub queues: u16,
}

impl DiskConfig {
    #[must_use]
    pub fn features(&self) -> u64 {
        use feature::{BLK_SIZE, DISCARD, FLUSH, INDIRECT, MQ, READONLY, SEG_MAX, TOPOLOGY, VERSION_1, WRITE_ZEROES};
        let common = SEG_MAX | BLK_SIZE | FLUSH | TOPOLOGY | MQ | INDIRECT | EVENT_IDX | VERSION_1 | LOG_ALL | PROTOCOL;
        // A read-only disk offers these features, too: a guest that continues on it has negotiated them.
        common | DISCARD | WRITE_ZEROES | if self.readonly { READONLY } else { 0 }
    }

    #[must_use]
    pub fn space(&self) -> [u8; BYTES] {
        let mut space = [0; BYTES];
        let mut put = |at: usize, bytes: &[u8]| {
            for (place, byte) in space.iter_mut().skip(at).zip(bytes) {
                *place = *byte;
            }
        };
        put(0, &(self.capacity / SECTOR).to_le_bytes());
        put(12, &SEGMENTS.to_le_bytes());
        put(20, &(SECTOR as u32).to_le_bytes());
        // Physical blocks of 2^3 sectors: the guest then prefers to write whole pages, which the block map can
        // record.
        put(24, &[3]);
        put(34, &self.queues.to_le_bytes());
        put(36, &RANGE_SECTORS.to_le_bytes());
        put(40, &MOST_RANGES.to_le_bytes());
        put(44, &8u32.to_le_bytes());
        put(48, &RANGE_SECTORS.to_le_bytes());
        put(52, &MOST_RANGES.to_le_bytes());
        put(56, &[1]);
        space
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_at_the_offsets_of_the_specification() {
        let shape = DiskConfig { capacity: 1 << 30, readonly: true, queues: 2 };
        let space = shape.space();
        assert_eq!(space[..8], (1u64 << 21).to_le_bytes());
        assert_eq!((space[20..24].to_vec(), space[24], space[34], space[56]), (vec![0, 2, 0, 0], 3, 2, 1));
        assert_ne!(shape.features() & (1 << 5), 0);
        assert_eq!(DiskConfig { readonly: false, ..shape }.features() & (1 << 5), 0);
    }
}
