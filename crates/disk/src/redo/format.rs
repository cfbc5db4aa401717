//! The names of segments, and their content byte by byte (`docs/disk-epochs.md`, Files).
//!
//! A *segment* is the file with the writes of one *epoch*, which is the time between two checkpoints. It consists of
//! a head, *entries* (a header and the data of one write), and after them a *seal record*. To *seal* an epoch is to
//! make all of its writes durable before the checkpoint at its end is committed; the seal record lists the entries
//! that the epoch consists of, so that a lost or damaged one is detected.
//!
//! Each of the three starts on a multiple of 4096 bytes and has one page of fields, in this order, little-endian:
//!
//! | page | fields (bytes) | after the page |
//! |---|---|---|
//! | head | magic (8), version (4), epoch (8), disk's UUID (16), nonce (16), checksum (16) | the first entry |
//! | header of an entry | magic (8), nonce (16), own offset (8), sequence (8), offset on the disk (8), bytes (8), kind (8), checksum of the data (16), checksum (16) | the data, padded to a page; nothing if the write is of zeros |
//! | header of a seal record | magic (8), nonce (16), own offset (8), number of entries (8), checksum of the list (16), checksum (16) | the list: the offset (8) of each entry, padded to a page |
//!
//! The last field is the XXH3-128 checksum of all fields before it; the rest of the page is zero. *Own offset* is
//! where the page is in the segment: together with the nonce it shows that a page was written here and for this segment.

use crate::block::SECTOR;
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_128;

/// Bytes of a segment's head and of an entry's header. All offsets in a segment are multiples of this number.
pub const PAGE_BYTES: u64 = 4096;
const PAGE_LEN: usize = PAGE_BYTES as usize;
pub type Page = [u8; PAGE_LEN];
/// Most data bytes of one entry.
pub const MAX_DATA_BYTES: u64 = 1 << 20;

const VERSION: u32 = 1;
const HEAD_MAGIC: &[u8; 8] = b"RKREDOSG";
const ENTRY_MAGIC: &[u8; 8] = b"RKREDOEN";
const SEAL_MAGIC: &[u8; 8] = b"RKREDOSE";
/// Bytes of one offset in a seal record.
const OFFSET_BYTES: u64 = 8;

/// Returns the file name of an epoch's segment.
#[must_use]
pub fn segment_name(epoch: u64) -> String {
    format!("{epoch}.log")
}

/// Returns the epoch in the file name of a segment.
#[must_use]
pub fn segment_epoch(name: &str) -> Option<u64> {
    let epoch = name.strip_suffix(".log")?.parse().ok()?;
    (segment_name(epoch) == name).then_some(epoch)
}

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
    pub disk_offset: u64,
    pub bytes: u64,
    pub kind: EntryKind,
    /// XXH3-128 of the data.
    pub data_checksum: u128,
}

impl EntryHeader {
    /// Returns the bytes of header and data in the segment.
    #[must_use]
    pub fn length(&self) -> u64 {
        entry_length(self.kind, self.bytes)
    }
}

/// Returns the bytes of header and data in the segment.
#[must_use]
pub fn entry_length(kind: EntryKind, bytes: u64) -> u64 {
    match kind {
        EntryKind::Data => PAGE_BYTES + bytes.next_multiple_of(PAGE_BYTES),
        EntryKind::Zeroes | EntryKind::Hole => PAGE_BYTES,
    }
}

/// A writer of fields, one after another, and of their checksum.
struct PageWriter {
    page: Page,
    position: usize,
}

impl PageWriter {
    fn new(magic: &[u8]) -> Self {
        let mut writer = Self { page: [0; PAGE_LEN], position: 0 };
        writer.put(magic);
        writer
    }

    fn put(&mut self, field: &[u8]) {
        for (target, byte) in self.page.iter_mut().skip(self.position).zip(field) {
            *target = *byte;
        }
        self.position += field.len();
    }

    /// Returns the page, with the checksum of all fields after them.
    fn finish(mut self) -> Page {
        let sum = xxh3_128(self.page.get(..self.position).unwrap_or_default());
        self.put(&sum.to_le_bytes());
        self.page
    }
}

/// A reader of the fields that [`PageWriter`] wrote.
struct PageReader<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> PageReader<'a> {
    fn new(bytes: &'a [u8], magic: &[u8; 8]) -> Option<Self> {
        let mut reader = Self { bytes, position: 0 };
        (reader.read::<8>()? == *magic).then_some(reader)
    }

    fn read<const N: usize>(&mut self) -> Option<[u8; N]> {
        let field = self.bytes.get(self.position..)?.first_chunk::<N>().copied();
        self.position += N;
        field
    }

    fn read_u64(&mut self) -> Option<u64> {
        self.read().map(u64::from_le_bytes)
    }

    fn read_u128(&mut self) -> Option<u128> {
        self.read().map(u128::from_le_bytes)
    }

    /// Returns whether the checksum of all bytes read so far follows them.
    fn has_checksum(&mut self) -> Option<bool> {
        let sum = xxh3_128(self.bytes.get(..self.position)?);
        Some(self.read_u128()? == sum)
    }
}

#[must_use]
pub fn write_head(head: &SegmentHead) -> Page {
    let mut writer = PageWriter::new(HEAD_MAGIC);
    writer.put(&VERSION.to_le_bytes());
    writer.put(&head.epoch.to_le_bytes());
    writer.put(&head.disk.as_u128().to_le_bytes());
    writer.put(&head.nonce.to_le_bytes());
    writer.finish()
}

/// Reads a head; `None` if it is damaged or of another version.
#[must_use]
pub fn read_head(bytes: &[u8]) -> Option<SegmentHead> {
    let mut reader = PageReader::new(bytes, HEAD_MAGIC)?;
    let version = u32::from_le_bytes(reader.read()?);
    let (epoch, disk, nonce) = (reader.read_u64()?, Uuid::from_u128(reader.read_u128()?), reader.read_u128()?);
    (reader.has_checksum()? && version == VERSION).then_some(SegmentHead { epoch, disk, nonce })
}

/// Returns the header to write at byte `offset` of the segment with `nonce`.
#[must_use]
pub fn write_header(header: &EntryHeader, nonce: u128, offset: u64) -> Page {
    let mut writer = PageWriter::new(ENTRY_MAGIC);
    writer.put(&nonce.to_le_bytes());
    let kind_code: u64 = match header.kind {
        EntryKind::Data => 0,
        EntryKind::Zeroes => 1,
        EntryKind::Hole => 2,
    };
    for field in [offset, header.sequence, header.disk_offset, header.bytes, kind_code] {
        writer.put(&field.to_le_bytes());
    }
    writer.put(&header.data_checksum.to_le_bytes());
    writer.finish()
}

/// Reads the header at byte `offset` of the segment with `nonce`; `None` if it is damaged or stale.
#[must_use]
pub fn read_header(bytes: &[u8], nonce: u128, offset: u64) -> Option<EntryHeader> {
    let mut reader = PageReader::new(bytes, ENTRY_MAGIC)?;
    let is_ours = reader.read_u128()? == nonce && reader.read_u64()? == offset;
    let (sequence, disk_offset, bytes) = (reader.read_u64()?, reader.read_u64()?, reader.read_u64()?);
    let kind = match reader.read_u64()? {
        0 => EntryKind::Data,
        1 => EntryKind::Zeroes,
        2 => EntryKind::Hole,
        _ => return None,
    };
    let header = EntryHeader { sequence, disk_offset, bytes, kind, data_checksum: reader.read_u128()? };
    let has_whole_sectors = disk_offset.is_multiple_of(SECTOR) && bytes.is_multiple_of(SECTOR) && bytes > 0;
    let is_within_limits = disk_offset.checked_add(bytes).is_some();
    let is_within_limits = is_within_limits && (kind != EntryKind::Data || bytes <= MAX_DATA_BYTES);
    (is_ours && has_whole_sectors && is_within_limits && reader.has_checksum()?).then_some(header)
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
        self.entries.checked_mul(OFFSET_BYTES)
    }

    /// Returns the offsets, if `list` has their checksum.
    #[must_use]
    pub fn read_list(&self, list: &[u8]) -> Option<Vec<u64>> {
        let list = list.get(..usize::try_from(self.list_bytes()?).ok()?)?;
        let (offsets, _) = list.as_chunks::<{ OFFSET_BYTES as usize }>();
        (xxh3_128(list) == self.sum).then(|| offsets.iter().map(|offset| u64::from_le_bytes(*offset)).collect())
    }
}

/// Returns the bytes that a seal record of this number of entries takes in its segment.
#[must_use]
pub fn seal_length(entries: u64) -> u64 {
    PAGE_BYTES
        + entries.saturating_mul(OFFSET_BYTES).checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX - PAGE_BYTES)
}

/// Returns the seal record to write at byte `offset` of the segment with `nonce`, for entries at the offsets
/// `entries`: header and padded list.
#[must_use]
pub fn write_seal(entries: &[u64], nonce: u128, offset: u64) -> (Page, Vec<u8>) {
    let mut list: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    let mut writer = PageWriter::new(SEAL_MAGIC);
    writer.put(&nonce.to_le_bytes());
    writer.put(&offset.to_le_bytes());
    writer.put(&(entries.len() as u64).to_le_bytes());
    writer.put(&xxh3_128(&list).to_le_bytes());
    list.resize(list.len().next_multiple_of(PAGE_LEN), 0);
    (writer.finish(), list)
}

/// Reads the header of a seal record at byte `offset` of the segment with `nonce`; `None` if there is none.
#[must_use]
pub fn read_seal(bytes: &[u8], nonce: u128, offset: u64) -> Option<SealHeader> {
    let mut reader = PageReader::new(bytes, SEAL_MAGIC)?;
    let is_ours = reader.read_u128()? == nonce && reader.read_u64()? == offset;
    let header = SealHeader { entries: reader.read_u64()?, sum: reader.read_u128()? };
    (is_ours && reader.has_checksum()?).then_some(header)
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
    fn a_head_is_read_and_a_changed_one_is_not() {
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
            sequence in any::<u64>(), sector in 0u64..1 << 40, sectors in 1u64..=2048, kind_index in 0..3usize,
            data_checksum in any::<u128>(), offset in 1u64..1 << 20, changed_byte in 0usize..112, bit in 0..8u8,
        ) {
            let kind = [EntryKind::Data, EntryKind::Zeroes, EntryKind::Hole][kind_index];
            let (disk_offset, bytes) = (sector * SECTOR, sectors * SECTOR);
            let header = EntryHeader { sequence, disk_offset, bytes, kind, data_checksum };
            let page = write_header(&header, NONCE, offset);
            prop_assert_eq!(read_header(&page, NONCE, offset), Some(header));
            prop_assert_eq!(read_header(&page, NONCE + 1, offset), None);
            prop_assert_eq!(read_header(&page, NONCE, offset + PAGE_BYTES), None);
            let mut changed = page;
            changed[changed_byte % 96] ^= 1 << bit;
            prop_assert_eq!(read_header(&changed, NONCE, offset), None);
        }
    }

    #[test]
    fn a_seal_record_is_read_where_it_was_written_and_a_changed_one_is_not() {
        let entries: Vec<u64> = (1..=600).map(|n| n * PAGE_BYTES).collect();
        let (page, list) = write_seal(&entries, NONCE, 5 * PAGE_BYTES);
        let header = read_seal(&page, NONCE, 5 * PAGE_BYTES).unwrap();
        assert_eq!((header.entries, seal_length(600), list.len() as u64), (600, 3 * PAGE_BYTES, 2 * PAGE_BYTES));
        assert_eq!(header.read_list(&list), Some(entries));
        assert_eq!(read_seal(&page, NONCE + 1, 5 * PAGE_BYTES), None);
        assert_eq!(read_seal(&page, NONCE, 6 * PAGE_BYTES), None);
        assert_eq!(header.read_list(&list[..4096]), None);
        for at in 0..72 {
            let mut changed = page;
            changed[at] ^= 1;
            assert_eq!(read_seal(&changed, NONCE, 5 * PAGE_BYTES), None, "byte {at}");
        }
        for at in [0, 4799] {
            let mut changed = list.clone();
            changed[at] ^= 1;
            assert_eq!(header.read_list(&changed), None, "byte {at}");
        }
    }

    #[test]
    fn a_header_with_invalid_fields_is_not_read() {
        let header = EntryHeader { sequence: 1, disk_offset: 0, bytes: 4096, kind: EntryKind::Data, data_checksum: 0 };
        let is_valid =
            |header: EntryHeader| read_header(&write_header(&header, NONCE, PAGE_BYTES), NONCE, PAGE_BYTES).is_some();
        assert!(is_valid(header));
        assert!(!is_valid(EntryHeader { bytes: 0, ..header }));
        assert!(!is_valid(EntryHeader { bytes: 100, ..header }));
        assert!(!is_valid(EntryHeader { disk_offset: 100, ..header }));
        assert!(!is_valid(EntryHeader { bytes: MAX_DATA_BYTES + 512, ..header }));
        assert!(is_valid(EntryHeader { bytes: MAX_DATA_BYTES + 512, kind: EntryKind::Hole, ..header }));
        assert!(!is_valid(EntryHeader { disk_offset: u64::MAX - 511, bytes: 1024, kind: EntryKind::Hole, ..header }));
    }
}
