//! Base indices: the locations of all pages, so that opening a checkpoint need not read all directories.
//!
//! ```text
//! header (4096 bytes) | parts: location and digest of each of 4096 pages of a block | trailer: blocks, segments, checksums
//! ```
//!
//! In an encrypted store, each part and the trailer are sealed, and followed by a tag (16).

use super::codec::{Reader, Writer};
use super::manifest::SegmentExtent;
use super::{ALIGNMENT, Flaw, SEALED_VERSION, Structure, VERSION, checksum};
use crate::sealing::{FileKey, SEAL_LEN, Seal, TAG_LEN};
use std::io;
use uuid::Uuid;

const MAGIC: &[u8; 8] = b"RKBASEIX";
/// Bytes of the fields at the beginning of the header of an encrypted base index. The rest of the header is zero.
pub const HEADER_FIELDS_LEN: usize = 80 + SEAL_LEN;
/// Bytes before the first part.
pub const HEADER_LEN: u64 = ALIGNMENT;
/// Number of pages in a part.
pub const PART_PAGES: u64 = 4096;
/// Bytes of an entry: place and digest of a page.
pub const ENTRY_LEN: usize = 16;
const MAX_TRAILER_BYTES: u64 = 256 << 20;

/// Location of a stored page: 24 bits of segment position, 27 of offset, 13 of length; 0 for a page that was never stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Location(pub u64);

#[expect(clippy::len_without_is_empty, reason = "0 means a page of zeroes")]
impl Location {
    /// Number of segments that a location can refer to.
    pub const MAX_SEGMENTS: usize = 1 << 24;

    /// Returns the location of `len` bytes at `offset` of the segment at position `segment` of a table.
    #[must_use]
    pub fn new(segment: usize, offset: u64, len: u16) -> Self {
        debug_assert!(segment < Self::MAX_SEGMENTS && offset < super::segment::MAX_SEGMENT_BYTES && len < 1 << 13);
        Self((segment as u64) << 40 | offset << 13 | u64::from(len))
    }

    /// Returns whether the page was ever stored. A page that was stored as zero counts too.
    #[must_use]
    pub fn is_stored(self) -> bool {
        self.0 != 0
    }

    /// Returns the position of the segment in its table.
    #[must_use]
    pub fn segment(self) -> usize {
        (self.0 >> 40) as usize
    }

    /// Returns the offset in the segment.
    #[must_use]
    pub fn offset(self) -> u64 {
        self.0 >> 13 & 0x7ff_ffff
    }

    /// Returns the number of stored bytes; 0 for a page of zeroes.
    #[must_use]
    pub fn len(self) -> u16 {
        (self.0 & 0x1fff) as u16
    }
}

/// Index entry of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexEntry {
    pub location: Location,
    pub digest: u64,
}

/// A block that a base index covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BaseBlock {
    /// Number of the block in the store's records.
    pub number: u16,
    pub pages: u64,
}

/// Encoded header and trailer of a base index. The parts are between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedBase {
    pub header: Vec<u8>,
    pub trailer: Vec<u8>,
}

/// Contents of a base index other than its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseIndex {
    /// Newest checkpoint when writing began. The index does not cover later checkpoints.
    pub covers_through: u64,
    /// Newest checkpoint when writing ended. The index is usable for this checkpoint and later ones.
    pub usable_from: u64,
    /// Blocks in the order of their parts.
    pub blocks: Vec<BaseBlock>,
    /// Segments by position, to which a [`Location`] refers. The index covers the first `len` bytes of each.
    pub segments: Vec<SegmentExtent>,
    pub part_checksums: Vec<u64>,
    /// Only in an encrypted store: checksum in the footer of the log entry after which the index was written.
    pub entry_footer: Option<u64>,
}

/// Returns the bytes of a part with `pages` pages in the file.
#[must_use]
pub fn part_len(pages: u64, is_sealed: bool) -> u64 {
    pages * ENTRY_LEN as u64 + if is_sealed { TAG_LEN as u64 } else { 0 }
}

/// Returns the bytes of all parts of a block with `pages` pages in the file; `None` if there are too many.
#[must_use]
pub fn parts_len(pages: u64, is_sealed: bool) -> Option<u64> {
    let tags = if is_sealed { parts(pages) * TAG_LEN as u64 } else { 0 };
    pages.checked_mul(ENTRY_LEN as u64)?.checked_add(tags)
}

/// Returns the number of parts of a block with `pages` pages.
#[must_use]
pub fn parts(pages: u64) -> u64 {
    pages.div_ceil(PART_PAGES)
}

impl BaseIndex {
    /// Encodes header and trailer. The trailer's place in the file is `trailer_at`, after the parts. With `seal`, the
    /// base index is encrypted.
    ///
    /// # Errors
    /// The trailer cannot be encrypted.
    pub fn encode(&self, id: Uuid, trailer_at: u64, seal: Option<&(Seal, FileKey)>) -> io::Result<EncodedBase> {
        let mut trailer = Vec::new();
        trailer.put_u32(self.blocks.len() as u32);
        for block in &self.blocks {
            trailer.put_u16(block.number);
            trailer.put_u64(block.pages);
        }
        trailer.put_u32(self.segments.len() as u32);
        for segment in &self.segments {
            trailer.put_u64(segment.epoch);
            trailer.put_u64(segment.number);
            trailer.put_u64(segment.len);
        }
        trailer.put_u32(self.part_checksums.len() as u32);
        self.part_checksums.iter().for_each(|checksum| trailer.put_u64(*checksum));
        if let Some(footer) = self.entry_footer {
            trailer.put_u64(footer);
        }
        let fields = BaseHeader {
            store: id,
            covers_through: self.covers_through,
            usable_from: self.usable_from,
            trailer_at,
            trailer_len: (trailer.len() + if seal.is_some() { TAG_LEN } else { 0 }) as u64,
            trailer_checksum: 0,
            seal: seal.map(|(seal, _)| *seal),
        };
        let mut header = fields.encode_context();
        if let Some((_, key)) = seal {
            let tag = key.seal(trailer_at, &header, &mut trailer)?;
            trailer.extend_from_slice(&tag);
        }
        header.put_u64(checksum(&trailer));
        if let Some(seal) = fields.seal {
            seal.encode(&mut header);
        }
        let sum = checksum(&header);
        header.put_u64(sum);
        header.resize(HEADER_LEN as usize, 0);
        Ok(EncodedBase { header, trailer })
    }

    /// Decodes the header from the first bytes of a file.
    ///
    /// # Errors
    /// The header is damaged, of a newer version, or of another store.
    pub fn decode_header(bytes: &[u8], id: Uuid) -> Result<BaseHeader, Flaw> {
        let bad = |at, what| Flaw::bad(Structure::BaseHeader, at, what);
        let mut reader = Reader::new(bytes);
        let mut fields = || {
            let magic: [u8; 8] = reader.array()?;
            let version = reader.u32()?;
            reader.u32()?;
            let header = BaseHeader {
                store: Uuid::from_bytes(reader.array()?),
                covers_through: reader.u64()?,
                usable_from: reader.u64()?,
                trailer_at: reader.u64()?,
                trailer_len: reader.u64()?,
                trailer_checksum: reader.u64()?,
                seal: if version == SEALED_VERSION { Some(Seal::decode(reader.array()?)) } else { None },
            };
            let summed = bytes.get(..bytes.len() - reader.rest().len())?;
            Some((magic, version, header, summed, reader.u64()?))
        };
        let (magic, version, header, summed, sum) =
            fields().ok_or_else(|| bad(bytes.len() as u64, "it is cut short"))?;
        if magic != *MAGIC {
            return Err(bad(0, "it has no magic number"));
        }
        if checksum(summed) != sum {
            return Err(bad(summed.len() as u64, "its checksum is wrong"));
        }
        Flaw::check_version(version)?;
        if header.store != id {
            return Err(bad(16, "it belongs to another store"));
        }
        if header.trailer_len > MAX_TRAILER_BYTES || header.covers_through > header.usable_from {
            return Err(bad(32, "its content makes no sense"));
        }
        Ok(header)
    }

    /// Decodes a base index, given its header and the bytes of its trailer, which are decrypted in place.
    ///
    /// # Errors
    /// The trailer is damaged.
    pub fn decode(header: &BaseHeader, trailer: &mut [u8], key: Option<&FileKey>) -> Result<Self, Flaw> {
        let bad = |what| Flaw::bad(Structure::BaseTrailer, header.trailer_at, what);
        if trailer.len() as u64 != header.trailer_len || checksum(trailer) != header.trailer_checksum {
            return Err(bad("its checksum is wrong"));
        }
        let trailer: &[u8] = match key {
            Some(key) => key
                .open(header.trailer_at, &header.encode_context(), trailer)
                .ok_or(Flaw::not_authentic(Structure::BaseTrailer, header.trailer_at))?,
            None => trailer,
        };
        let mut reader = Reader::new(trailer);
        let mut fields = || {
            let mut base = Self {
                covers_through: header.covers_through,
                usable_from: header.usable_from,
                blocks: vec![],
                segments: vec![],
                part_checksums: vec![],
                entry_footer: None,
            };
            for _ in 0..reader.count(10)? {
                base.blocks.push(BaseBlock { number: reader.u16()?, pages: reader.u64()? });
            }
            for _ in 0..reader.count(24)? {
                let (epoch, number, len) = (reader.u64()?, reader.u64()?, reader.u64()?);
                base.segments.push(SegmentExtent { epoch, number, len, seal: None });
            }
            for _ in 0..reader.count(8)? {
                base.part_checksums.push(reader.u64()?);
            }
            if key.is_some() {
                base.entry_footer = Some(reader.u64()?);
            }
            reader.rest().is_empty().then_some(base)
        };
        let base = fields().ok_or_else(|| bad("its length differs from the stated one"))?;
        let needed = base.blocks.iter().try_fold(0u64, |sum, block| sum.checked_add(parts(block.pages)));
        if needed != Some(base.part_checksums.len() as u64) {
            return Err(bad("it has another number of parts than its blocks need"));
        }
        Ok(base)
    }
}

/// Header of a base index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BaseHeader {
    /// ID of the store.
    pub store: Uuid,
    /// Like [`BaseIndex::covers_through`].
    pub covers_through: u64,
    /// Like [`BaseIndex::usable_from`].
    pub usable_from: u64,
    /// Offset of the trailer.
    pub trailer_at: u64,
    pub trailer_len: u64,
    pub trailer_checksum: u64,
    /// Which key an encrypted base index is sealed with.
    pub seal: Option<Seal>,
}

impl BaseHeader {
    /// Returns the first fields of the encoded header, which are authenticated with the trailer.
    fn encode_context(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_LEN as usize);
        out.extend_from_slice(MAGIC);
        out.put_u32(if self.seal.is_some() { SEALED_VERSION } else { VERSION });
        out.put_u32(0);
        out.extend_from_slice(self.store.as_bytes());
        out.put_u64(self.covers_through);
        out.put_u64(self.usable_from);
        out.put_u64(self.trailer_at);
        out.put_u64(self.trailer_len);
        out
    }
}

/// Appends the encoded part to `out`, whose first byte will be at `offset` of the file, and returns the part's checksum.
/// With `key`, the part is encrypted.
///
/// # Errors
/// The part cannot be encrypted.
pub fn encode_part(
    entries: impl Iterator<Item = IndexEntry>,
    offset: u64,
    key: Option<&FileKey>,
    out: &mut Vec<u8>,
) -> io::Result<u64> {
    let begin = out.len();
    for entry in entries {
        out.put_u64(entry.location.0);
        out.put_u64(entry.digest);
    }
    if let Some(key) = key {
        let tag = key.seal(offset + begin as u64, &[], out.get_mut(begin..).unwrap_or_default())?;
        out.extend_from_slice(&tag);
    }
    Ok(checksum(out.get(begin..).unwrap_or_default()))
}

/// Decodes a part, which is at `offset` of the file. With `key`, it is decrypted in place.
///
/// # Errors
/// The bytes do not have the checksum `expected`.
pub fn decode_part(
    bytes: &mut [u8],
    expected: u64,
    offset: u64,
    key: Option<&FileKey>,
) -> Result<Box<[IndexEntry]>, Flaw> {
    if checksum(bytes) != expected {
        return Err(Flaw::bad(Structure::BasePart, offset, "its checksum is wrong"));
    }
    let bytes: &[u8] = match key {
        Some(key) => key.open(offset, &[], bytes).ok_or(Flaw::not_authentic(Structure::BasePart, offset))?,
        None => bytes,
    };
    let number = |half: &[u8; 8]| u64::from_le_bytes(*half);
    let entries = bytes.as_chunks::<8>().0.as_chunks::<2>().0;
    Ok(entries
        .iter()
        .map(|[location, digest]| IndexEntry { location: Location(number(location)), digest: number(digest) })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_base_comes_back_and_every_flipped_bit_is_seen() {
        let id = Uuid::from_u128(3);
        let segments = vec![SegmentExtent { epoch: 1, number: 5, len: 1000, seal: None }];
        let base = BaseIndex {
            covers_through: 3,
            usable_from: 5,
            blocks: vec![BaseBlock { number: 0, pages: 4097 }, BaseBlock { number: 3, pages: 1 }],
            segments,
            part_checksums: vec![1, 2, 3],
            entry_footer: None,
        };
        let EncodedBase { header, trailer } = base.encode(id, 9999, None).unwrap();
        let read = |header: &[u8], trailer: &[u8]| {
            BaseIndex::decode(&BaseIndex::decode_header(header, id)?, &mut trailer.to_vec(), None)
        };
        assert_eq!(read(&header, &trailer), Ok(base));
        assert!(BaseIndex::decode_header(&header, Uuid::nil()).is_err());
        for bit in 0..80 * 8 {
            let mut bad = header.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&bad, &trailer).is_err(), "bit {bit} of the header");
        }
        for bit in 0..trailer.len() * 8 {
            let mut bad = trailer.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&header, &bad).is_err(), "bit {bit} of the trailer");
        }
    }

    fn header_of(trailer: &[u8]) -> BaseHeader {
        let (trailer_len, trailer_checksum) = (trailer.len() as u64, checksum(trailer));
        let (store, seal) = (Uuid::nil(), None);
        BaseHeader { store, covers_through: 0, usable_from: 0, trailer_at: 0, trailer_len, trailer_checksum, seal }
    }

    proptest! {
        #[test]
        fn places_keep_what_they_are_made_of(segment in 0usize..1 << 24, offset in 0u64..1 << 27, len in 0u16..=4096) {
            let location = Location::new(segment, offset, len);
            prop_assert_eq!((location.segment(), location.offset(), location.len()), (segment, offset, len));
        }

        #[test]
        fn no_bytes_make_a_base_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = bytes;
            let _ = BaseIndex::decode_header(&bytes, Uuid::nil());
            let sum = checksum(&bytes);
            let _ = BaseIndex::decode(&header_of(&bytes), &mut bytes, None);
            let _ = decode_part(&mut bytes, sum, 0, None);
        }
    }
}
