//! The descriptors of a chain (virtio 1.2, 2.7.5), which may have any content.
//!
//! A chain is identified by its head alone. When a server that was killed had taken a chain, the chain is no longer
//! in the available ring.

use crate::request::BufferSegment;

/// `VIRTQ_DESC_F_*`.
const NEXT: u16 = 1;
const WRITABLE: u16 = 2;
const INDIRECT: u16 = 4;

/// Bytes of a descriptor.
const DESCRIPTOR_BYTES: usize = 16;
/// Most descriptors of a chain.
const MAX_DESCRIPTORS: usize = 1024;
/// Most descriptors of an indirect table, so that their numbers have 16 bits.
const MAX_TABLE_ENTRIES: u64 = 1 << 16;

/// The reason why a chain cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    #[error("a descriptor is outside the guest's memory")]
    Outside,
    #[error("it names descriptor {0}, which does not exist")]
    NoSuch(u16),
    #[error("it has more than {MAX_DESCRIPTORS} descriptors, or no end")]
    Endless,
    /// An indirect descriptor that is nested, is not the last one, or has an invalid length.
    #[error("it has an invalid indirect descriptor")]
    Indirect,
}

/// A table of descriptors in the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorTable {
    pub address: u64,
    /// Number of descriptors.
    pub entries: u32,
}

/// One descriptor (`struct virtq_desc`).
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    /// Number of the next descriptor of the chain.
    next: u16,
}

impl Descriptor {
    /// Reads descriptor `number` of a table.
    fn read(
        read: &mut impl FnMut(u64, &mut [u8]) -> Option<()>,
        table: DescriptorTable,
        number: u32,
    ) -> Result<Self, ChainError> {
        if number >= table.entries {
            return Err(ChainError::NoSuch(number as u16));
        }
        let mut raw = [0; DESCRIPTOR_BYTES];
        let address = table.address.checked_add(u64::from(number) * DESCRIPTOR_BYTES as u64);
        read(address.ok_or(ChainError::Outside)?, &mut raw).ok_or(ChainError::Outside)?;
        let raw = u128::from_le_bytes(raw);
        Ok(Self { address: raw as u64, len: (raw >> 64) as u32, flags: (raw >> 96) as u16, next: (raw >> 112) as u16 })
    }

    fn has_flag(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Returns the table that an indirect descriptor describes. `None`: its length or its flags are invalid.
    fn indirect_table(&self) -> Option<DescriptorTable> {
        let bytes = u64::from(self.len);
        let entries = bytes / DESCRIPTOR_BYTES as u64;
        let is_whole = bytes > 0 && bytes.is_multiple_of(DESCRIPTOR_BYTES as u64) && entries <= MAX_TABLE_ENTRIES;
        let is_valid = is_whole && !self.has_flag(NEXT);
        is_valid.then_some(DescriptorTable { address: self.address, entries: entries as u32 })
    }
}

/// Returns the parts of memory that the chain from descriptor `head` of a table on names, in order. `read` copies bytes
/// of the guest's memory.
pub fn read_chain(
    mut read: impl FnMut(u64, &mut [u8]) -> Option<()>,
    table: DescriptorTable,
    head: u16,
) -> Result<Vec<BufferSegment>, ChainError> {
    let mut segments = Vec::new();
    let (mut table, mut number, mut is_indirect) = (table, u32::from(head), false);
    loop {
        if number < table.entries && segments.len() >= MAX_DESCRIPTORS {
            return Err(ChainError::Endless);
        }
        let descriptor = Descriptor::read(&mut read, table, number)?;
        if descriptor.has_flag(INDIRECT) {
            if is_indirect {
                return Err(ChainError::Indirect);
            }
            table = descriptor.indirect_table().ok_or(ChainError::Indirect)?;
            (number, is_indirect) = (0, true);
            continue;
        }
        let Descriptor { address, len, .. } = descriptor;
        segments.push(BufferSegment { address, len: len.into(), writable: descriptor.has_flag(WRITABLE) });
        if !descriptor.has_flag(NEXT) {
            return Ok(segments);
        }
        number = descriptor.next.into();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn descriptor(address: u64, len: u32, flags: u16, next: u16) -> Vec<u8> {
        [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    }

    /// Follows a chain in a guest's memory of these bytes, whose table of descriptors begins at address 0.
    fn chain_in(memory: &[u8], entries: u32, head: u16) -> Result<Vec<BufferSegment>, ChainError> {
        let read = |address: u64, target: &mut [u8]| {
            let start = usize::try_from(address).ok()?;
            target.copy_from_slice(memory.get(start..start.checked_add(target.len())?)?);
            Some(())
        };
        read_chain(read, DescriptorTable { address: 0, entries }, head)
    }

    #[test]
    fn a_chain_is_followed_also_through_an_indirect_table() {
        let mut table =
            [descriptor(0x1000, 16, NEXT, 2), descriptor(64, 32, INDIRECT, 0), descriptor(7, 1, WRITABLE, 0)];
        let direct = chain_in(&table.concat(), 3, 0).unwrap();
        let segment = |address, len, writable| BufferSegment { address, len, writable };
        assert_eq!(direct, [segment(0x1000, 16, false), segment(7, 1, true)]);
        let indirect_table = [vec![0; 16], descriptor(5, 6, NEXT | WRITABLE, 1), descriptor(8, 9, 0, 0)].concat();
        let memory = [&table.concat()[..], &indirect_table].concat();
        assert_eq!(chain_in(&memory, 3, 1).unwrap(), [segment(5, 6, true), segment(8, 9, false)]);
        table[2] = descriptor(7, 1, NEXT, 0);
        assert_eq!(chain_in(&table.concat(), 3, 0), Err(ChainError::Endless));
        assert_eq!(chain_in(&table.concat(), 3, 3), Err(ChainError::NoSuch(3)));
        table[2] = descriptor(7, 1, NEXT, 9);
        assert_eq!(chain_in(&table.concat(), 3, 0), Err(ChainError::NoSuch(9)));
        assert_eq!(chain_in(&table.concat(), 300, 200), Err(ChainError::Outside));
        assert_eq!(chain_in(&descriptor(0, 33, INDIRECT, 0), 1, 0), Err(ChainError::Indirect));
        assert_eq!(chain_in(&descriptor(0, 16, INDIRECT, 0), 1, 0), Err(ChainError::Indirect), "a table in a table");
    }

    proptest! {
        #[test]
        fn any_content_ends(bytes in proptest::collection::vec(any::<u8>(), 0..512), head in 0..64u16) {
            if let Ok(segments) = chain_in(&bytes, 32, head) {
                prop_assert!(!segments.is_empty() && segments.len() <= MAX_DESCRIPTORS);
            }
        }
    }
}
