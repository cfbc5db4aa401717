//! Segments: a header, then frames of pages.
//!
//! ```text
//! segment: header (4096 bytes) | frame | frame | ...        each frame begins at a multiple of 4096
//! frame:   header (64) | directory: a record (16) per page; in a frame of moved pages also a number (8) per page | content
//! ```
//!
//! In an encrypted store, the directory and each page are sealed, and followed by a tag (16) each. A page's stored bytes
//! include its tag.

use super::codec::{Reader, Writer};
use super::{ALIGNMENT, Flaw, SEALED_VERSION, Structure, VERSION, checksum};
use crate::sealing::{FileKey, Seal, TAG_LEN};
use rekindle_pages::PAGE_SIZE;
use std::io;
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
/// Limit of the bytes of a frame's data, without the tags of an encrypted store.
pub const MAX_FRAME_DATA_BYTES: usize = 4 << 20;
/// Bytes that include the header and directory of any frame.
pub const MAX_DIRECTORY_BYTES: usize = FRAME_HEADER_LEN + MAX_FRAME_PAGES * (RECORD_LEN + NUMBER_LEN) + TAG_LEN;
/// Limit of the stored bytes of a page.
pub const MAX_STORED_PAGE_BYTES: usize = PAGE_SIZE + TAG_LEN;
/// Limit of a segment's bytes: a place has 27 bits for the offset.
pub const MAX_SEGMENT_BYTES: u64 = 1 << 27;

/// Returns the first 4096 bytes of a segment, which is encrypted if it has a `seal`.
#[must_use]
pub fn encode_header(id: Uuid, epoch: u64, number: u64, seal: Option<Seal>) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_LEN as usize);
    out.extend_from_slice(SEGMENT_MAGIC);
    out.put_u32(if seal.is_some() { SEALED_VERSION } else { VERSION });
    out.put_u32(0);
    out.extend_from_slice(id.as_bytes());
    out.put_u64(epoch);
    out.put_u64(number);
    if let Some(seal) = seal {
        seal.encode(&mut out);
    }
    let sum = checksum(&out);
    out.put_u64(sum);
    out.resize(HEADER_LEN as usize, 0);
    out
}

/// Checks the header in the first bytes of a segment. Returns which key the segment is sealed with, if it is encrypted.
///
/// # Errors
/// The header is damaged, of a newer version, or of another segment.
pub fn check_header(bytes: &[u8], id: Uuid, epoch: u64, number: u64) -> Result<Option<Seal>, Flaw> {
    let bad = |at, what| Flaw::bad(Structure::SegmentHeader, at, what);
    let mut reader = Reader::new(bytes);
    let mut fields = || {
        let magic: [u8; 8] = reader.array()?;
        let version = reader.u32()?;
        reader.u32()?;
        let found = (Uuid::from_bytes(reader.array()?), reader.u64()?, reader.u64()?);
        let seal = if version == SEALED_VERSION { Some(Seal::decode(reader.array()?)) } else { None };
        let summed = bytes.get(..bytes.len() - reader.rest().len())?;
        Some((magic, version, found, seal, summed, reader.u64()?))
    };
    let (magic, version, found, seal, summed, sum) =
        fields().ok_or_else(|| bad(bytes.len() as u64, "it is cut short"))?;
    if magic != *SEGMENT_MAGIC {
        return Err(bad(0, "it has no magic number"));
    }
    if checksum(summed) != sum {
        return Err(bad(summed.len() as u64, "its checksum is wrong"));
    }
    Flaw::check_version(version)?;
    if found != (id, epoch, number) {
        return Err(bad(16, "it belongs to another store or segment"));
    }
    Ok(seal)
}

/// A page's record in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Record {
    /// Digest of the page before compression.
    pub digest: u64,
    /// Number of the page in its block.
    pub page: u32,
    /// Stored bytes: 0 for a page of zeroes, 4096 for an uncompressed page, and 16 more for the tag of a sealed page.
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

    /// Returns whether length and digest can be those of a page whose stored bytes include a tag of `tag_len` bytes:
    /// only a page of zeroes has no content.
    #[must_use]
    pub fn is_plausible(self, tag_len: usize) -> bool {
        let content_len = usize::from(self.len).checked_sub(tag_len);
        let is_possible = content_len.is_some_and(|len| (1..=PAGE_SIZE).contains(&len));
        if self.digest == 0 { self.len == 0 } else { is_possible }
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
    /// Directory and pages are encrypted.
    pub is_sealed: bool,
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
        FRAME_HEADER_LEN + self.directory_len() + self.tag_len()
    }

    /// Returns the bytes of the tag after the directory and after each page; 0 without encryption.
    #[must_use]
    pub fn tag_len(&self) -> usize {
        if self.is_sealed { TAG_LEN } else { 0 }
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

    /// Returns the encoded header without its checksum.
    fn encode_fields(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(FRAME_HEADER_LEN);
        out.extend_from_slice(FRAME_MAGIC);
        out.put_u16(if self.kind == Kind::Moved { 2 } else { 1 });
        out.put_u16(self.is_sealed.into());
        out.put_u32(self.count);
        out.put_u32(self.data_len);
        out.put_u64(self.number);
        out.resize(FRAME_HEADER_LEN - 8, 0);
        out
    }

    /// Writes the header into the first bytes of `frame`, which must contain the directory already.
    pub fn finish(&self, frame: &mut [u8]) {
        let mut out = self.encode_fields();
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
        let (magic, kind, sealed, count, data_len, number) = fields().ok_or_else(|| bad("it is cut short"))?;
        if magic != *FRAME_MAGIC {
            return Err(bad("it has no magic number"));
        }
        let kind = match kind {
            1 => Kind::Pages,
            2 => Kind::Moved,
            _ => return Err(bad("it is of an unknown kind")),
        };
        let is_sealed = match sealed {
            0 => false,
            1 => true,
            _ => return Err(bad("it is of an unknown kind")),
        };
        let max_data_bytes = MAX_FRAME_DATA_BYTES + if is_sealed { MAX_FRAME_PAGES * TAG_LEN } else { 0 };
        if count as usize > MAX_FRAME_PAGES || data_len as usize > max_data_bytes {
            return Err(bad("it is longer than a frame can be"));
        }
        Ok(Self { kind, count, data_len, is_sealed, number })
    }
}

/// Returns what is authenticated with a sealed page. Its place in the file is part of the nonce.
fn page_context(block: u16, page: u32, digest: u64) -> [u8; 14] {
    let mut context = [0; 14];
    let fields = digest.to_le_bytes().into_iter().chain(page.to_le_bytes()).chain(block.to_le_bytes());
    context.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
    context
}

/// Encrypts a whole frame, which begins at `frame_offset` of the file of `key`, and writes it to `out`. Returns the header
/// and the records of the encrypted frame.
///
/// # Errors
/// The frame cannot be encrypted.
pub fn seal_frame(
    key: &FileKey,
    frame_offset: u64,
    plain: FrameHeader,
    frame: &[u8],
    out: &mut Vec<u8>,
) -> io::Result<(FrameHeader, Vec<Record>)> {
    let bad = || io::Error::other("a frame is shorter than its header states");
    let directory_end = FRAME_HEADER_LEN + plain.directory_len();
    let directory = frame.get(FRAME_HEADER_LEN..directory_end).ok_or_else(bad)?;
    let (record_bytes, numbers) = directory.split_at_checked(plain.count as usize * RECORD_LEN).ok_or_else(bad)?;
    let mut content = frame.get(directory_end..).ok_or_else(bad)?;
    let mut header = FrameHeader { is_sealed: true, ..plain };
    out.clear();
    out.resize(header.data_offset(), 0);
    let mut records = Vec::with_capacity(plain.count as usize);
    for bytes in record_bytes.as_chunks::<RECORD_LEN>().0 {
        let mut record = Record::decode(*bytes);
        if record.len != 0 {
            let (page, rest) = content.split_at_checked(record.len.into()).ok_or_else(bad)?;
            content = rest;
            let begin = out.len();
            out.extend_from_slice(page);
            let context = page_context(record.block, record.page, record.digest);
            let page = out.get_mut(begin..).ok_or_else(bad)?;
            let tag = key.seal(frame_offset + begin as u64, &context, page)?;
            out.extend_from_slice(&tag);
            record.len += TAG_LEN as u16;
        }
        records.push(record);
    }
    header.data_len = (out.len() - header.data_offset()) as u32;
    let (front, _) = out.split_at_mut_checked(header.data_offset()).ok_or_else(bad)?;
    let (sealed, tag) = front.split_at_mut_checked(directory_end).ok_or_else(bad)?;
    let sealed = sealed.get_mut(FRAME_HEADER_LEN..).ok_or_else(bad)?;
    let (sealed_records, sealed_numbers) = sealed.split_at_mut_checked(record_bytes.len()).ok_or_else(bad)?;
    for (encoded, record) in sealed_records.as_chunks_mut::<RECORD_LEN>().0.iter_mut().zip(&records) {
        *encoded = record.encode();
    }
    sealed_numbers.copy_from_slice(numbers);
    tag.copy_from_slice(&key.seal(frame_offset, &header.encode_fields(), sealed)?);
    header.finish(out);
    Ok((header, records))
}

/// Decrypts the stored bytes of a page, which are at `offset` of the file of `key`, in place. Returns the content that was
/// sealed.
///
/// # Errors
/// A text that describes what is wrong.
pub fn open_page<'p>(
    key: &FileKey,
    offset: u64,
    block: u16,
    page: u32,
    digest: u64,
    stored: &'p mut [u8],
) -> Result<&'p mut [u8], &'static str> {
    let opened = key.open(offset, &page_context(block, page, digest), stored);
    opened.ok_or("it was changed, or belongs to another place: its authentication fails")
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
    /// Decodes a directory from the bytes at `frame_offset` of a file, which has a `key` if it is encrypted. The bytes
    /// must include the whole directory: [`MAX_DIRECTORY_BYTES`] bytes suffice. An encrypted directory is decrypted in
    /// place.
    ///
    /// # Errors
    /// The directory is damaged.
    pub fn decode(bytes: &'a mut [u8], frame_offset: u64, key: Option<&FileKey>) -> Result<Self, Flaw> {
        let bad = |what| Flaw::bad(Structure::FrameDirectory, frame_offset, what);
        let header = FrameHeader::decode(bytes, frame_offset)?;
        let (front, rest) = bytes.split_at_mut_checked(FRAME_HEADER_LEN).ok_or_else(|| bad("it is cut short"))?;
        let (summed, sum) = front.split_last_chunk::<8>().ok_or_else(|| bad("it is cut short"))?;
        let directory =
            rest.get_mut(..header.directory_len() + header.tag_len()).ok_or_else(|| bad("it is cut short"))?;
        if two_part_checksum(summed, directory) != u64::from_le_bytes(*sum) {
            return Err(bad("its checksum is wrong"));
        }
        let directory: &[u8] = match (key, header.is_sealed) {
            (None, false) => directory,
            (Some(key), true) => key
                .open(frame_offset, summed, directory)
                .ok_or(Flaw::not_authentic(Structure::FrameDirectory, frame_offset))?,
            (Some(_), false) => return Err(bad("it is not encrypted, but its segment is")),
            (None, true) => return Err(bad("it is encrypted, but its segment is not")),
        };
        let (records, numbers) =
            directory.split_at_checked(header.count as usize * RECORD_LEN).ok_or_else(|| bad("it is cut short"))?;
        let mut content_len = 0;
        for bytes in records.as_chunks::<RECORD_LEN>().0 {
            let record = Record::decode(*bytes);
            if !record.is_plausible(header.tag_len()) {
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
        FrameHeader { kind, count: records.len() as u32, data_len, is_sealed: false, number: 9 }.finish(&mut frame);
        frame
    }

    #[test]
    fn a_header_is_of_its_segment_only() {
        let id = Uuid::from_u128(1);
        let header = encode_header(id, 7, 12, None);
        assert_eq!(check_header(&header, id, 7, 12), Ok(None));
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
            let found: Vec<_> = Directory::decode(&mut bytes, 8192, None).unwrap().pages().collect();
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
            prop_assert!(Directory::decode(&mut bytes, 8192, None).is_err(), "bit {}", bit);
        }

        #[test]
        fn no_bytes_make_a_directory_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), magic: bool) {
            if magic {
                bytes.splice(..bytes.len().min(6), *b"RKFR\x01\0");
            }
            let _ = Directory::decode(&mut bytes, 0, None);
            let _ = check_header(&bytes, Uuid::nil(), 0, 0);
        }
    }
}
