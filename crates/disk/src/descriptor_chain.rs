//! The descriptors of a chain (virtio 1.2, 2.7.5), which may have any content.
//!
//! A chain is identified by its head alone. When a server that was killed had taken a chain, the chain is no longer
//! in the available ring.

use crate::request::BufferSegment;

const NEXT: u16 = 1;
const WRITABLE: u16 = 2;
const INDIRECT: u16 = 4;
pub const DESCRIPTOR: usize = 16;
/// Most descriptors of a chain.
const MOST: usize = 1024;

/// The reason why a chain cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    #[error("a descriptor is outside the guest's memory")]
    Outside,
    #[error("it names descriptor {0}, which does not exist")]
    NoSuch(u16),
    #[error("it has more than {MOST} descriptors, or no end")]
    Endless,
    /// An indirect descriptor that is nested, is not the last one, or has an invalid length.
    #[error("it has an invalid indirect descriptor")]
    Indirect,
}

/// Returns the parts of memory that a chain names, in order.
///
/// `read` copies bytes of the guest's memory. `table`: address of the queue's `size` descriptors.
pub fn walk(
    mut read: impl FnMut(u64, &mut [u8]) -> Option<()>,
    table: u64,
    size: u16,
    head: u16,
) -> Result<Vec<BufferSegment>, ChainError> {
    let mut segments = Vec::new();
    let (mut table, mut size, mut at, mut is_indirect) = (table, u32::from(size), u32::from(head), false);
    loop {
        if at >= size {
            return Err(ChainError::NoSuch(at as u16));
        }
        if segments.len() >= MOST {
            return Err(ChainError::Endless);
        }
        let mut raw = [0; DESCRIPTOR];
        let address = table.checked_add(u64::from(at) * DESCRIPTOR as u64).ok_or(ChainError::Outside)?;
        read(address, &mut raw).ok_or(ChainError::Outside)?;
        let (first, second) = raw.split_at(8);
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        let (len, rest) = second.split_at(4);
        let (flags, next) = rest.split_at(2);
        let (address, len) = (number(first), number(len));
        let (flags, next) = (number(flags) as u16, number(next) as u32);
        if flags & INDIRECT != 0 {
            let entries = len / DESCRIPTOR as u64;
            let is_whole = len > 0 && len.is_multiple_of(DESCRIPTOR as u64) && entries <= 1 << 16;
            if is_indirect || flags & NEXT != 0 || !is_whole {
                return Err(ChainError::Indirect);
            }
            (table, size, at, is_indirect) = (address, entries as u32, 0, true);
            continue;
        }
        segments.push(BufferSegment { address, len, writable: flags & WRITABLE != 0 });
        if flags & NEXT == 0 {
            return Ok(segments);
        }
        at = next;
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

    fn of(bytes: &[u8], size: u16, head: u16) -> Result<Vec<BufferSegment>, ChainError> {
        let read = |at: u64, into: &mut [u8]| {
            let at = usize::try_from(at).ok()?;
            into.copy_from_slice(bytes.get(at..at.checked_add(into.len())?)?);
            Some(())
        };
        walk(read, 0, size, head)
    }

    #[test]
    fn a_chain_is_followed_also_through_a_table_of_its_own() {
        let mut bytes =
            [descriptor(0x1000, 16, NEXT, 2), descriptor(64, 32, INDIRECT, 0), descriptor(7, 1, WRITABLE, 0)];
        let direct = of(&bytes.concat(), 3, 0).unwrap();
        let part = |address, len, writable| BufferSegment { address, len, writable };
        assert_eq!(direct, [part(0x1000, 16, false), part(7, 1, true)]);
        let table = [vec![0; 16], descriptor(5, 6, NEXT | WRITABLE, 1), descriptor(8, 9, 0, 0)].concat();
        let indirect = [&bytes.concat()[..], &table].concat();
        assert_eq!(of(&indirect, 3, 1).unwrap(), [part(5, 6, true), part(8, 9, false)]);
        bytes[2] = descriptor(7, 1, NEXT, 0);
        assert_eq!(of(&bytes.concat(), 3, 0), Err(ChainError::Endless));
        assert_eq!(of(&bytes.concat(), 3, 3), Err(ChainError::NoSuch(3)));
        bytes[2] = descriptor(7, 1, NEXT, 9);
        assert_eq!(of(&bytes.concat(), 3, 0), Err(ChainError::NoSuch(9)));
        assert_eq!(of(&bytes.concat(), 300, 200), Err(ChainError::Outside));
        assert_eq!(of(&descriptor(0, 33, INDIRECT, 0), 1, 0), Err(ChainError::Indirect));
        assert_eq!(of(&descriptor(0, 16, INDIRECT, 0), 1, 0), Err(ChainError::Indirect), "a table in a table");
    }

    proptest! {
        #[test]
        fn any_content_ends(bytes in proptest::collection::vec(any::<u8>(), 0..512), head in 0..64u16) {
            if let Ok(segments) = of(&bytes, 32, head) {
                prop_assert!(!segments.is_empty() && segments.len() <= MOST);
            }
        }
    }
}
