//! Segments: a header, then frames of pages.
//!
//! ```text
//! segment: header (4096 bytes) | frame | frame | ...        each frame begins at a multiple of 4096
//! frame:   header (64) | directory: a record (16) per page; in a frame of moved pages also a number (8) per page | content
//! ```

use super::codec::{Reader, Writer};
use super::{ALIGNMENT, Flaw, Structure, VERSION, checksum};
use rekindle_pages::PAGE_SIZE;
use uuid::Uuid;
use xxhash_rust::xxh3::Xxh3;

const SEGMENT_MAGIC: &[u8; 8] = b"RKSEGMNT";
const FRAME_MAGIC: &[u8; 4] = b"RKFR";

/// Bytes before the first frame.
pub const HEADER_LEN: u64 = ALIGNMENT;
/// Bytes of a frame before its directory.
pub const FRAME_HEADER_LEN: usize = 64;
/// Bytes of a page's record in the directory.
pub const RECORD_LEN: usize = 16;
/// Bytes of a page's checkpoint number, which only frames of moved pages have.
pub const NUMBER_LEN: usize = 8;
/// Limit of pages in a frame.
pub const MAX_FRAME_PAGES: usize = 1024;
/// Limit of the bytes of a frame's data.
pub const MAX_FRAME_DATA_BYTES: usize = 4 << 20;
/// Bytes that include the header and directory of any frame.
pub const MAX_DIRECTORY_BYTES: usize = FRAME_HEADER_LEN + MAX_FRAME_PAGES * (RECORD_LEN + NUMBER_LEN);
/// Limit of a segment's bytes: a place has 27 bits for the offset.
pub const MAX_SEGMENT_BYTES: u64 = 1 << 27;

/// Returns the first 4096 bytes of a segment.
#[must_use]
pub fn encode_header(id: Uuid, epoch: u64, number: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_LEN as usize);
    out.extend_from_slice(SEGMENT_MAGIC);
    out.put_u32(VERSION);
    out.put_u32(0);
    out.extend_from_slice(id.as_bytes());
    out.put_u64(epoch);
    out.put_u64(number);
    let sum = checksum(&out);
    out.put_u64(sum);
    out.resize(HEADER_LEN as usize, 0);
    out
}

/// Checks the header in the first bytes of a segment.
///
/// # Errors
/// The header is damaged, of a newer version, or of another segment.
pub fn check_header(bytes: &[u8], id: Uuid, epoch: u64, number: u64) -> Result<(), Flaw> {
    let bad = |at, what| Flaw::bad(Structure::SegmentHeader, at, what);
    let mut reader = Reader::new(bytes);
    let mut fields = || {
        let magic: [u8; 8] = reader.array()?;
        let version = reader.u32()?;
        reader.u32()?;
        Some((magic, version, Uuid::from_bytes(reader.array()?), reader.u64()?, reader.u64()?, reader.u64()?))
    };
    let (magic, version, found_id, found_epoch, found_number, sum) =
        fields().ok_or_else(|| bad(bytes.len() as u64, "it is cut short"))?;
    if magic != *SEGMENT_MAGIC {
        return Err(bad(0, "it has no magic number"));
    }
    if bytes.get(..48).map(checksum) != Some(sum) {
        return Err(bad(48, "its checksum is wrong"));
    }
    Flaw::check_version(version)?;
    if (found_id, found_epoch, found_number) != (id, epoch, number) {
        return Err(bad(16, "it belongs to another store or segment"));
    }
    Ok(())
}

/// A page's record in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Record {
    /// Digest of the page before compression.
    pub digest: u64,
    /// Number of the page in its block.
    pub page: u32,
    /// Stored bytes: 0 for a page of zeroes, 4096 for an uncompressed page.
    pub len: u16,
    /// Number of the block that contains the page.
    pub block: u16,
}

impl Record {
    #[must_use]
    pub fn encode(self) -> [u8; RECORD_LEN] {
        let mut out = [0; RECORD_LEN];
        let digest = self.digest.to_le_bytes();
        let page = self.page.to_le_bytes();
        let (len, block) = (self.len.to_le_bytes(), self.block.to_le_bytes());
        let bytes = digest.iter().chain(&page).chain(&len).chain(&block);
        out.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        out
    }

    /// Returns whether length and digest can be those of a page: only a page of zeroes has no content.
    #[must_use]
    pub fn is_plausible(self) -> bool {
        usize::from(self.len) <= PAGE_SIZE && (self.len == 0) == (self.digest == 0)
    }

    /// Decodes a record. Any bytes are a valid record.
    #[must_use]
    pub fn decode(bytes: [u8; RECORD_LEN]) -> Self {
        let value = u128::from_le_bytes(bytes);
        Self {
            digest: value as u64,
            page: (value >> 64) as u32,
            len: (value >> 96) as u16,
            block: (value >> 112) as u16,
        }
    }
}

/// Kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Pages that were written in one checkpoint.
    Pages,
    /// Pages of several checkpoints, which a compaction has copied.
    Moved,
}

/// Header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    pub kind: Kind,
    /// Number of pages in the frame.
    pub count: u32,
    /// Bytes of the pages' content.
    pub data_len: u32,
    /// Checkpoint of the pages; for moved pages, the newest checkpoint at the time of the compaction.
    pub number: u64,
}

#[expect(clippy::len_without_is_empty, reason = "none is empty")]
impl FrameHeader {
    /// Returns the bytes of the directory.
    #[must_use]
    pub fn directory_len(&self) -> usize {
        let page_len = RECORD_LEN + if self.kind == Kind::Moved { NUMBER_LEN } else { 0 };
        self.count as usize * page_len
    }

    /// Returns the offset of the content in the frame.
    #[must_use]
    pub fn data_offset(&self) -> usize {
        FRAME_HEADER_LEN + self.directory_len()
    }

    /// Returns the bytes of the whole frame.
    #[must_use]
    pub fn len(&self) -> u64 {
        (self.data_offset() + self.data_len as usize) as u64
    }

    /// Returns the offset of the next frame if this frame begins at `offset`.
    #[must_use]
    pub fn next_frame_offset(&self, offset: u64) -> u64 {
        (offset + self.len()).next_multiple_of(ALIGNMENT)
    }

    /// Writes the header into the first bytes of `frame`, which must contain the directory already.
    pub fn seal(&self, frame: &mut [u8]) {
        let mut out = Vec::with_capacity(FRAME_HEADER_LEN);
        out.extend_from_slice(FRAME_MAGIC);
        out.put_u16(if self.kind == Kind::Moved { 2 } else { 1 });
        out.put_u16(0);
        out.put_u32(self.count);
        out.put_u32(self.data_len);
        out.put_u64(self.number);
        out.resize(FRAME_HEADER_LEN - 8, 0);
        let directory = frame.get(FRAME_HEADER_LEN..self.data_offset()).unwrap_or_default();
        let sum = two_part_checksum(&out, directory);
        out.put_u64(sum);
        frame.iter_mut().zip(out).for_each(|(to, from)| *to = from);
    }

    /// Decodes the header of a frame from the frame's first bytes. `offset` is that of the frame in the file, for
    /// errors. The directory is not checked.
    ///
    /// # Errors
    /// The bytes are not a valid header.
    pub fn decode(bytes: &[u8], offset: u64) -> Result<Self, Flaw> {
        let bad = |what| Flaw::bad(Structure::FrameDirectory, offset, what);
        let mut reader = Reader::new(bytes);
        let mut fields =
            || Some((reader.array()?, reader.u16()?, reader.u16()?, reader.u32()?, reader.u32()?, reader.u64()?));
        let (magic, kind, _, count, data_len, number) = fields().ok_or_else(|| bad("it is cut short"))?;
        if magic != *FRAME_MAGIC {
            return Err(bad("it has no magic number"));
        }
        let kind = match kind {
            1 => Kind::Pages,
            2 => Kind::Moved,
            _ => return Err(bad("it is of an unknown kind")),
        };
        if count as usize > MAX_FRAME_PAGES || data_len as usize > MAX_FRAME_DATA_BYTES {
            return Err(bad("it is longer than a frame can be"));
        }
        Ok(Self { kind, count, data_len, number })
    }
}

fn two_part_checksum(header: &[u8], directory: &[u8]) -> u64 {
    let mut sum = Xxh3::new();
    sum.update(header);
    sum.update(directory);
    sum.digest()
}

/// Header and directory of a frame, whose checksum was checked.
#[derive(Debug, Clone, Copy)]
pub struct Directory<'a> {
    pub header: FrameHeader,
    records: &'a [u8],
    numbers: &'a [u8],
    /// Offset of the frame in the file.
    frame_offset: u64,
}

/// A page that a directory lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListedPage {
    pub record: Record,
    /// Checkpoint in which the page was written.
    pub number: u64,
    /// Offset of the content in the file; for a page of zeroes, the offset of the record.
    pub offset: u64,
}

impl<'a> Directory<'a> {
    /// Decodes a directory from the bytes at `frame_offset` of a file. The bytes must include the whole directory:
    /// [`MAX_DIRECTORY_BYTES`] bytes suffice.
    ///
    /// # Errors
    /// The directory is damaged.
    pub fn decode(bytes: &'a [u8], frame_offset: u64) -> Result<Self, Flaw> {
        let bad = |what| Flaw::bad(Structure::FrameDirectory, frame_offset, what);
        let header = FrameHeader::decode(bytes, frame_offset)?;
        let (front, rest) = bytes.split_at_checked(FRAME_HEADER_LEN).ok_or_else(|| bad("it is cut short"))?;
        let (summed, sum) = front.split_last_chunk::<8>().ok_or_else(|| bad("it is cut short"))?;
        let directory = rest.get(..header.directory_len()).ok_or_else(|| bad("it is cut short"))?;
        if two_part_checksum(summed, directory) != u64::from_le_bytes(*sum) {
            return Err(bad("its checksum is wrong"));
        }
        let (records, numbers) =
            directory.split_at_checked(header.count as usize * RECORD_LEN).ok_or_else(|| bad("it is cut short"))?;
        let mut content_len = 0;
        for bytes in records.as_chunks::<RECORD_LEN>().0 {
            let record = Record::decode(*bytes);
            if !record.is_plausible() {
                return Err(bad("a record of it makes no sense"));
            }
            content_len += u64::from(record.len);
        }
        if content_len != u64::from(header.data_len) {
            return Err(bad("its lengths do not add up"));
        }
        Ok(Self { header, records, numbers, frame_offset })
    }

    /// Iterates over the pages in the order in which they are stored.
    pub fn pages(&self) -> impl Iterator<Item = ListedPage> + use<'a> {
        let header = self.header;
        let mut record_offset = self.frame_offset + FRAME_HEADER_LEN as u64;
        let mut data_offset = self.frame_offset + header.data_offset() as u64;
        let mut numbers = self.numbers.as_chunks::<NUMBER_LEN>().0.iter();
        self.records.as_chunks::<RECORD_LEN>().0.iter().map(move |bytes| {
            let record = Record::decode(*bytes);
            let number = numbers.next().map_or(header.number, |number| u64::from_le_bytes(*number));
            let offset = if record.len == 0 { record_offset } else { data_offset };
            record_offset += RECORD_LEN as u64;
            data_offset += u64::from(record.len);
            ListedPage { record, number, offset }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(kind: Kind, records: &[(Record, u64)]) -> Vec<u8> {
        let mut frame = vec![0; FRAME_HEADER_LEN];
        records.iter().for_each(|(record, _)| frame.extend(record.encode()));
        if kind == Kind::Moved {
            records.iter().for_each(|(_, number)| frame.extend(number.to_le_bytes()));
        }
        let data_len = records.iter().map(|(record, _)| u32::from(record.len)).sum();
        FrameHeader { kind, count: records.len() as u32, data_len, number: 9 }.seal(&mut frame);
        frame
    }

    #[test]
    fn a_header_is_of_its_segment_only() {
        let id = Uuid::from_u128(1);
        let header = encode_header(id, 7, 12);
        assert_eq!(check_header(&header, id, 7, 12), Ok(()));
        assert!(check_header(&header, id, 7, 13).is_err());
        assert!(check_header(&header, Uuid::nil(), 7, 12).is_err());
        for bit in 0..56 * 8 {
            let mut bad = header.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(check_header(&bad, id, 7, 12).is_err(), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn a_directory_comes_back_and_every_flipped_bit_is_seen(
            pages in proptest::collection::vec((1u64.., any::<u32>(), 0u16..=4096, any::<u16>(), any::<u64>()), 1..20),
            moved in any::<bool>(), flip in any::<u32>(),
        ) {
            let records: Vec<(Record, u64)> = pages.into_iter().map(|(digest, page, len, block, number)| {
                let digest = if len == 0 { 0 } else { digest };
                (Record { digest, page, len, block }, if moved { number } else { 9 })
            }).collect();
            let mut bytes = frame(if moved { Kind::Moved } else { Kind::Pages }, &records);
            let found: Vec<_> = Directory::decode(&bytes, 8192).unwrap().pages().collect();
            let mut data_offset = 8192 + bytes.len() as u64;
            for (n, (found, (record, number))) in found.iter().zip(&records).enumerate() {
                prop_assert_eq!((found.record, found.number), (*record, *number));
                let record_offset = 8192 + (FRAME_HEADER_LEN + n * RECORD_LEN) as u64;
                prop_assert_eq!(found.offset, if record.len == 0 { record_offset } else { data_offset });
                data_offset += u64::from(record.len);
            }
            prop_assert_eq!(found.len(), records.len());
            let bit = flip as usize % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Directory::decode(&bytes, 8192).is_err(), "bit {}", bit);
        }

        #[test]
        fn no_bytes_make_a_directory_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), magic: bool) {
            if magic {
                bytes.splice(..bytes.len().min(6), *b"RKFR\x01\0");
            }
            let _ = Directory::decode(&bytes, 0);
            let _ = check_header(&bytes, Uuid::nil(), 0, 0);
        }
    }
}
