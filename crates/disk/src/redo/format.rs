//! The content of a segment, byte by byte (`docs/disk-epochs.md`, Files).

use crate::block::SECTOR;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_128;

/// Bytes of a segment's head and of an entry's header. All offsets in a segment are multiples of this number.
pub const PAGE: u64 = 4096;
const SIZE: usize = PAGE as usize;
pub type Page = [u8; SIZE];
/// Most data bytes of one entry.
pub const MAX_DATA: u64 = 1 << 20;

const VERSION: u32 = 1;
const HEAD: &[u8; 8] = b"RKREDOSG";
const ENTRY: &[u8; 8] = b"RKREDOEN";
const SEAL: &[u8; 8] = b"RKREDOSE";
/// Bytes of one offset in a seal record.
const OFFSET: u64 = 8;

/// The head of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHead {
    pub epoch: u64,
    pub disk: Uuid,
    /// Random number that all entries of this segment repeat: an entry with another number is stale.
    pub nonce: u128,
}

/// The effect of an entry on its part of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// The data follows the header.
    Data,
    /// Zeros, with space allocated.
    Zeroes,
    /// Zeros, without allocated space.
    Hole,
}

/// The header of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryHeader {
    /// Newer entries have a higher number.
    pub sequence: u64,
    /// First byte on the disk.
    pub at: u64,
    pub bytes: u64,
    pub what: EntryKind,
    /// XXH3-128 of the data.
    pub data: u128,
}

impl EntryHeader {
    /// Returns the bytes of header and data in the segment.
    #[must_use]
    pub fn length(&self) -> u64 {
        length(self.what, self.bytes)
    }
}

/// Returns the bytes of header and data in the segment.
#[must_use]
pub fn length(what: EntryKind, bytes: u64) -> u64 {
    match what {
        EntryKind::Data => PAGE + bytes.next_multiple_of(PAGE),
        EntryKind::Zeroes | EntryKind::Hole => PAGE,
    }
}

/// A writer of fields, one after another, and of their checksum.
struct Writer {
    page: Page,
    at: usize,
}

impl Writer {
    fn new(magic: &[u8]) -> Self {
        let mut writer = Self { page: [0; SIZE], at: 0 };
        writer.put(magic);
        writer
    }

    fn put(&mut self, bytes: &[u8]) {
        for (place, byte) in self.page.iter_mut().skip(self.at).zip(bytes) {
            *place = *byte;
        }
        self.at += bytes.len();
    }

    fn sealed(mut self) -> Page {
        let sum = xxh3_128(self.page.get(..self.at).unwrap_or_default());
        self.put(&sum.to_le_bytes());
        self.page
    }
}

/// A reader of the fields that [`Writer`] wrote.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8], magic: &[u8; 8]) -> Option<Self> {
        let mut reader = Self { bytes, at: 0 };
        (reader.take::<8>()? == *magic).then_some(reader)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let taken = self.bytes.get(self.at..)?.first_chunk::<N>().copied();
        self.at += N;
        taken
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn u128(&mut self) -> Option<u128> {
        self.take().map(u128::from_le_bytes)
    }

    /// Returns whether the checksum of all bytes read so far follows them.
    fn is_sealed(&mut self) -> Option<bool> {
        let sum = xxh3_128(self.bytes.get(..self.at)?);
        Some(self.u128()? == sum)
    }
}

#[must_use]
pub fn write_head(head: &SegmentHead) -> Page {
    let mut writer = Writer::new(HEAD);
    writer.put(&VERSION.to_le_bytes());
    writer.put(&head.epoch.to_le_bytes());
    writer.put(&head.disk.as_u128().to_le_bytes());
    writer.put(&head.nonce.to_le_bytes());
    writer.sealed()
}

/// Reads a head; `None` if it is damaged or of another version.
#[must_use]
pub fn read_head(bytes: &[u8]) -> Option<SegmentHead> {
    let mut reader = Reader::new(bytes, HEAD)?;
    let version = u32::from_le_bytes(reader.take()?);
    let (epoch, disk, nonce) = (reader.u64()?, Uuid::from_u128(reader.u128()?), reader.u128()?);
    (reader.is_sealed()? && version == VERSION).then_some(SegmentHead { epoch, disk, nonce })
}

/// Returns the header to write at byte `offset` of the segment with `nonce`.
#[must_use]
pub fn write_header(header: &EntryHeader, nonce: u128, offset: u64) -> Page {
    let mut writer = Writer::new(ENTRY);
    writer.put(&nonce.to_le_bytes());
    let kind: u64 = match header.what {
        EntryKind::Data => 0,
        EntryKind::Zeroes => 1,
        EntryKind::Hole => 2,
    };
    for field in [offset, header.sequence, header.at, header.bytes, kind] {
        writer.put(&field.to_le_bytes());
    }
    writer.put(&header.data.to_le_bytes());
    writer.sealed()
}

/// Reads the header at byte `offset` of the segment with `nonce`; `None` if it is damaged or stale.
#[must_use]
pub fn read_header(bytes: &[u8], nonce: u128, offset: u64) -> Option<EntryHeader> {
    let mut reader = Reader::new(bytes, ENTRY)?;
    let is_ours = reader.u128()? == nonce && reader.u64()? == offset;
    let (sequence, at, bytes) = (reader.u64()?, reader.u64()?, reader.u64()?);
    let what = match reader.u64()? {
        0 => EntryKind::Data,
        1 => EntryKind::Zeroes,
        2 => EntryKind::Hole,
        _ => return None,
    };
    let header = EntryHeader { sequence, at, bytes, what, data: reader.u128()? };
    let is_whole = at.is_multiple_of(SECTOR) && bytes.is_multiple_of(SECTOR) && bytes > 0;
    let is_short = what != EntryKind::Data || bytes <= MAX_DATA;
    (is_ours && is_whole && is_short && at.checked_add(bytes).is_some() && reader.is_sealed()?).then_some(header)
}

/// The header of a seal record. The offsets of the entries that the sealed epoch consists of follow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealHeader {
    pub entries: u64,
    /// XXH3-128 of the offsets.
    sum: u128,
}

impl SealHeader {
    /// Returns the bytes of the offsets; `None` for a number that fits into no file.
    #[must_use]
    pub fn list_bytes(&self) -> Option<u64> {
        self.entries.checked_mul(OFFSET)
    }

    /// Returns the offsets, if `list` has their checksum.
    #[must_use]
    pub fn read_list(&self, list: &[u8]) -> Option<Vec<u64>> {
        let list = list.get(..usize::try_from(self.list_bytes()?).ok()?)?;
        let (offsets, _) = list.as_chunks::<{ OFFSET as usize }>();
        (xxh3_128(list) == self.sum).then(|| offsets.iter().map(|offset| u64::from_le_bytes(*offset)).collect())
    }
}

/// Returns the bytes that a seal record of this number of entries takes in its segment.
#[must_use]
pub fn seal_length(entries: u64) -> u64 {
    PAGE + entries.saturating_mul(OFFSET).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX - PAGE)
}

/// Returns the seal record to write at byte `offset` of the segment with `nonce`, for entries at the offsets
/// `entries`: header and padded list.
#[must_use]
pub fn write_seal(entries: &[u64], nonce: u128, offset: u64) -> (Page, Vec<u8>) {
    let mut list: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    let mut writer = Writer::new(SEAL);
    writer.put(&nonce.to_le_bytes());
    writer.put(&offset.to_le_bytes());
    writer.put(&(entries.len() as u64).to_le_bytes());
    writer.put(&xxh3_128(&list).to_le_bytes());
    list.resize(list.len().next_multiple_of(SIZE), 0);
    (writer.sealed(), list)
}

/// Reads the header of a seal record at byte `offset` of the segment with `nonce`; `None` if there is none.
#[must_use]
pub fn read_seal(bytes: &[u8], nonce: u128, offset: u64) -> Option<SealHeader> {
    let mut reader = Reader::new(bytes, SEAL)?;
    let is_ours = reader.u128()? == nonce && reader.u64()? == offset;
    let header = SealHeader { entries: reader.u64()?, sum: reader.u128()? };
    (is_ours && reader.is_sealed()?).then_some(header)
}

#[must_use]
pub fn checksum(data: &[u8]) -> u128 {
    xxh3_128(data)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NONCE: u128 = 0x0123_4567_89ab_cdef_0011_2233_4455_6677;

    #[test]
    fn a_head_comes_back_and_no_changed_one_does() {
        let head = SegmentHead { epoch: 7, disk: Uuid::from_u128(9), nonce: NONCE };
        let page = write_head(&head);
        assert_eq!(read_head(&page), Some(head));
        for at in 0..60 {
            let mut changed = page;
            changed[at] ^= 1;
            assert_eq!(read_head(&changed), None, "byte {at}");
        }
        assert_eq!(read_head(&page[..59]), None);
        assert_eq!(read_head(&[]), None);
    }

    proptest! {
        #[test]
        fn a_header_is_read_where_it_was_written_and_nowhere_else(
            sequence in any::<u64>(), sector in 0u64..1 << 40, sectors in 1u64..=2048, kind in 0..3u8, data in any::<u128>(),
            offset in 1u64..1 << 20, at in 0usize..112, bit in 0..8u8,
        ) {
            let what = [EntryKind::Data, EntryKind::Zeroes, EntryKind::Hole][usize::from(kind)];
            let header = EntryHeader { sequence, at: sector * SECTOR, bytes: sectors * SECTOR, what, data };
            let page = write_header(&header, NONCE, offset);
            prop_assert_eq!(read_header(&page, NONCE, offset), Some(header));
            prop_assert_eq!(read_header(&page, NONCE + 1, offset), None);
            prop_assert_eq!(read_header(&page, NONCE, offset + PAGE), None);
            let mut changed = page;
            changed[at % 96] ^= 1 << bit;
            prop_assert_eq!(read_header(&changed, NONCE, offset), None);
        }
    }

    #[test]
    fn a_seal_record_is_read_where_it_was_written_and_no_changed_one_is() {
        let entries: Vec<u64> = (1..=600).map(|n| n * PAGE).collect();
        let (page, list) = write_seal(&entries, NONCE, 5 * PAGE);
        let header = read_seal(&page, NONCE, 5 * PAGE).unwrap();
        assert_eq!((header.entries, seal_length(600), list.len() as u64), (600, 3 * PAGE, 2 * PAGE));
        assert_eq!(header.read_list(&list), Some(entries));
        assert_eq!(read_seal(&page, NONCE + 1, 5 * PAGE), None);
        assert_eq!(read_seal(&page, NONCE, 6 * PAGE), None);
        assert_eq!(header.read_list(&list[..4096]), None);
        for at in 0..72 {
            let mut changed = page;
            changed[at] ^= 1;
            assert_eq!(read_seal(&changed, NONCE, 5 * PAGE), None, "byte {at}");
        }
        for at in [0, 4799] {
            let mut changed = list.clone();
            changed[at] ^= 1;
            assert_eq!(header.read_list(&changed), None, "byte {at}");
        }
    }

    #[test]
    fn a_header_that_leads_nowhere_is_none() {
        let header = EntryHeader { sequence: 1, at: 0, bytes: 4096, what: EntryKind::Data, data: 0 };
        let is_one = |header: EntryHeader| read_header(&write_header(&header, NONCE, PAGE), NONCE, PAGE).is_some();
        assert!(is_one(header));
        assert!(!is_one(EntryHeader { bytes: 0, ..header }));
        assert!(!is_one(EntryHeader { bytes: 100, ..header }));
        assert!(!is_one(EntryHeader { at: 100, ..header }));
        assert!(!is_one(EntryHeader { bytes: MAX_DATA + 512, ..header }));
        assert!(is_one(EntryHeader { bytes: MAX_DATA + 512, what: EntryKind::Hole, ..header }));
        assert!(!is_one(EntryHeader { at: u64::MAX - 511, bytes: 1024, what: EntryKind::Hole, ..header }));
    }
}
