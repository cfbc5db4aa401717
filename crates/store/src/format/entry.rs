//! Log entries: a header, sections that have a checksum each, and a footer.

use super::codec::{Reader, Writer};
use super::{Flaw, Structure, VERSION, checksum};
use lz4_flex::block::{compress, decompress_into};
use uuid::Uuid;

const MAGIC: &[u8; 8] = b"RKLOGENT";
const END_MAGIC: &[u8; 8] = b"RKLOGEND";
const HEADER_LEN: usize = 64;
/// Bytes of a section's row in the section table.
const ROW_LEN: usize = 32;
const FOOTER_LEN: usize = 24;
const MAX_SECTIONS: u16 = 16;
/// Limit of bytes of an entry, and of a decompressed section.
pub const MAX_ENTRY_BYTES: u64 = 128 << 20;

/// Kind of a log entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A new owner claims the store.
    Claim,
    /// The owner commits a checkpoint.
    Checkpoint,
    /// The owner commits a compaction, which has moved pages.
    Compaction,
}

impl Kind {
    fn code(self) -> u16 {
        match self {
            Self::Claim => 1,
            Self::Checkpoint => 2,
            Self::Compaction => 3,
        }
    }
}

/// Kind of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// JSON with the owner of the store.
    Claim,
    /// The list of all valid checkpoints and segments.
    Manifest,
    /// Number, time and RAM block table of a checkpoint.
    Checkpoint,
    /// JSON that describes how to rebuild the VM.
    Definition,
    /// JSON with notes of the protector.
    Metadata,
    /// The device state.
    Devices,
    /// Number of the newest entry with a manifest when the store was claimed; 0 if there was none.
    Before,
}

impl Section {
    fn code(self) -> u32 {
        match self {
            Self::Claim => 1,
            Self::Manifest => 2,
            Self::Checkpoint => 3,
            Self::Definition => 4,
            Self::Metadata => 5,
            Self::Devices => 6,
            Self::Before => 7,
        }
    }

    /// Returns the structure that errors about the section name.
    #[must_use]
    pub fn structure(self) -> Structure {
        match self {
            Self::Claim | Self::Before => Structure::Claim,
            Self::Manifest => Structure::Manifest,
            Self::Checkpoint => Structure::Checkpoint,
            Self::Definition => Structure::Definition,
            Self::Metadata => Structure::Metadata,
            Self::Devices => Structure::Devices,
        }
    }
}

/// A section's row in the section table.
#[derive(Debug, Clone, Copy)]
struct SectionRow {
    code: u32,
    /// Offset of the stored bytes in the entry.
    offset: u64,
    stored_len: u32,
    /// Length before compression; equal to `stored_len` if the section is not compressed.
    raw_len: u32,
    checksum: u64,
}

/// An encoded log entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedEntry {
    pub bytes: Vec<u8>,
    /// Checksum in the footer.
    pub footer: u64,
}

/// A log entry with a valid header and footer. Each section is checked only when it is read.
#[derive(Debug, Clone)]
pub struct Entry {
    bytes: Vec<u8>,
    rows: Vec<SectionRow>,
    pub kind: Kind,
    /// Epoch of the entry's owner.
    pub epoch: u64,
    /// Number of the entry in the log.
    pub log_number: u64,
    /// Checksum in the footer. It covers the checksums of all other parts of the entry.
    pub footer: u64,
}

/// Encodes an entry of the log of store `id`.
#[must_use]
pub fn encode(id: Uuid, kind: Kind, epoch: u64, log_number: u64, sections: &[(Section, &[u8])]) -> EncodedEntry {
    let mut table = Vec::with_capacity(sections.len() * ROW_LEN);
    let mut content = Vec::new();
    for (section, raw) in sections {
        // Half of a device state is zeroes. A section that does not shrink is stored uncompressed; both lengths are
        // equal then.
        let packed = Some(compress(raw)).filter(|packed| packed.len() < raw.len());
        let stored = packed.as_deref().unwrap_or(raw);
        table.put_u32(section.code());
        table.put_u32(0);
        table.put_u64(stored.len() as u64);
        table.put_u64(raw.len() as u64);
        table.put_u64(checksum(stored));
        content.extend_from_slice(stored);
    }
    let length = HEADER_LEN + table.len() + 8 + content.len() + FOOTER_LEN;
    let mut out = Vec::with_capacity(length);
    out.extend_from_slice(MAGIC);
    out.put_u32(VERSION);
    out.put_u16(kind.code());
    out.put_u16(sections.len() as u16);
    out.extend_from_slice(id.as_bytes());
    out.put_u64(epoch);
    out.put_u64(log_number);
    out.put_u64(length as u64);
    let sum = checksum(&out);
    out.put_u64(sum);
    let sum = checksum(&table);
    out.extend_from_slice(&table);
    out.put_u64(sum);
    let footer = checksum(&out);
    out.extend_from_slice(&content);
    out.extend_from_slice(END_MAGIC);
    out.put_u64(log_number);
    out.put_u64(footer);
    EncodedEntry { bytes: out, footer }
}

#[expect(clippy::len_without_is_empty, reason = "none is empty")]
impl Entry {
    /// Decodes the content of a log file.
    ///
    /// # Errors
    /// Header, section table or footer are damaged, of a newer version, or of another store or entry.
    pub fn decode(bytes: Vec<u8>, id: Uuid, log_number: u64) -> Result<Self, Flaw> {
        let header = EntryHeader::decode(&bytes, id, log_number)?;
        let table_len = usize::from(header.sections) * ROW_LEN;
        let table = checked_table(&bytes, table_len)?;
        if header.length != bytes.len() as u64 {
            return Err(bad_footer(&bytes, "the length of the file differs from the one in its header"));
        }
        let content_offset = HEADER_LEN + table_len + 8;
        let footer = checked_footer(&bytes, content_offset, log_number)?;
        let rows = decode_rows(table, content_offset as u64, header.length)?;
        Ok(Self { kind: header.kind, epoch: header.epoch, log_number, footer, rows, bytes })
    }

    /// Returns the bytes of the whole file.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the bytes of a section before compression; 0 if the entry has no such section.
    #[must_use]
    pub fn section_len(&self, section: Section) -> u64 {
        self.rows.iter().find(|row| row.code == section.code()).map_or(0, |row| row.raw_len.into())
    }

    /// Returns the decompressed content of a section.
    ///
    /// # Errors
    /// The section is damaged or missing.
    pub fn section(&self, section: Section) -> Result<Vec<u8>, Flaw> {
        let row = self.rows.iter().find(|row| row.code == section.code());
        let row = row.ok_or(Flaw::bad(section.structure(), HEADER_LEN as u64, "the entry has none"))?;
        let bad = |what| Flaw::bad(section.structure(), row.offset, what);
        let begin = row.offset as usize;
        let stored = self.bytes.get(begin..begin + row.stored_len as usize).ok_or_else(|| bad("it is cut short"))?;
        if checksum(stored) != row.checksum {
            return Err(bad("its checksum is wrong"));
        }
        if row.stored_len == row.raw_len {
            return Ok(stored.to_vec());
        }
        // LZ4 expands data at most 255 times. A larger stated length is rejected before memory is allocated.
        if u64::from(row.raw_len) > u64::from(row.stored_len) * 256 {
            return Err(bad("its length makes no sense"));
        }
        let mut raw = vec![0; row.raw_len as usize];
        match decompress_into(stored, &mut raw) {
            Ok(len) if len == raw.len() => Ok(raw),
            _ => Err(bad("it cannot be decompressed")),
        }
    }
}

fn bad_header(offset: usize, what: &'static str) -> Flaw {
    Flaw::bad(Structure::EntryHeader, offset as u64, what)
}

fn bad_footer(bytes: &[u8], what: &'static str) -> Flaw {
    Flaw::bad(Structure::EntryFooter, bytes.len().saturating_sub(FOOTER_LEN) as u64, what)
}

/// The header of an entry, which was checked.
struct EntryHeader {
    kind: Kind,
    /// Number of sections.
    sections: u16,
    epoch: u64,
    /// Bytes of the whole entry.
    length: u64,
}

impl EntryHeader {
    fn decode(bytes: &[u8], id: Uuid, log_number: u64) -> Result<Self, Flaw> {
        let header = bytes.get(..HEADER_LEN).ok_or_else(|| bad_header(bytes.len(), "it is cut short"))?;
        let short = || bad_header(0, "it is cut short");
        let mut reader = Reader::new(header);
        if reader.array::<8>().ok_or_else(short)? != *MAGIC {
            return Err(bad_header(0, "it has no magic number"));
        }
        let (content, sum) = header.split_last_chunk::<8>().ok_or_else(short)?;
        if checksum(content) != u64::from_le_bytes(*sum) {
            return Err(bad_header(HEADER_LEN - 8, "its checksum is wrong"));
        }
        Flaw::check_version(reader.u32().ok_or_else(short)?)?;
        let kind_code = reader.u16().ok_or_else(short)?;
        let sections = reader.u16().ok_or_else(short)?;
        let found_id = Uuid::from_bytes(reader.array().ok_or_else(short)?);
        let epoch = reader.u64().ok_or_else(short)?;
        let found_number = reader.u64().ok_or_else(short)?;
        let length = reader.u64().ok_or_else(short)?;
        if (found_id, found_number) != (id, log_number) {
            return Err(bad_header(16, "it belongs to another store or has another number"));
        }
        let kind = match kind_code {
            1 => Kind::Claim,
            2 => Kind::Checkpoint,
            3 => Kind::Compaction,
            _ => return Err(bad_header(12, "it is of an unknown kind")),
        };
        if sections > MAX_SECTIONS {
            return Err(bad_header(14, "it has too many sections"));
        }
        Ok(Self { kind, sections, epoch, length })
    }
}

/// Returns the section table, of `table_len` bytes, if its checksum is correct.
fn checked_table(bytes: &[u8], table_len: usize) -> Result<&[u8], Flaw> {
    let short = || bad_header(HEADER_LEN, "its section table is cut short");
    let mut reader = Reader::new(bytes.get(HEADER_LEN..).unwrap_or_default());
    let table = reader.bytes(table_len).ok_or_else(short)?;
    if checksum(table) != reader.u64().ok_or_else(short)? {
        return Err(bad_header(HEADER_LEN + table_len, "the checksum of its section table is wrong"));
    }
    Ok(table)
}

/// Returns the checksum in the footer if it is that of everything before the content.
fn checked_footer(bytes: &[u8], content_offset: usize, log_number: u64) -> Result<u64, Flaw> {
    let short = || bad_footer(bytes, "it is cut short");
    let (_, footer) = bytes.split_last_chunk::<FOOTER_LEN>().ok_or_else(short)?;
    let mut reader = Reader::new(footer);
    let magic: [u8; 8] = reader.array().ok_or_else(short)?;
    let found_number = reader.u64().ok_or_else(short)?;
    let found_checksum = reader.u64().ok_or_else(short)?;
    let expected_checksum = bytes.get(..content_offset).map(checksum);
    if magic != *END_MAGIC || found_number != log_number || expected_checksum != Some(found_checksum) {
        return Err(bad_footer(bytes, "it does not belong to the entry's header"));
    }
    Ok(found_checksum)
}

/// Decodes the section table of an entry of `length` bytes, whose content begins at `content_offset`.
fn decode_rows(table: &[u8], content_offset: u64, length: u64) -> Result<Vec<SectionRow>, Flaw> {
    let mut rows = Vec::with_capacity(table.len() / ROW_LEN);
    let mut offset = content_offset;
    let mut reader = Reader::new(table);
    while let Some(code) = reader.u32() {
        let mut fields = || Some((reader.u32()?, reader.u64()?, reader.u64()?, reader.u64()?));
        let (_, stored_len, raw_len, checksum) =
            fields().ok_or_else(|| bad_header(HEADER_LEN, "its section table is cut short"))?;
        if stored_len > raw_len || raw_len > MAX_ENTRY_BYTES {
            return Err(bad_header(HEADER_LEN, "a length in its section table makes no sense"));
        }
        rows.push(SectionRow { code, offset, stored_len: stored_len as u32, raw_len: raw_len as u32, checksum });
        offset += stored_len;
    }
    if offset + FOOTER_LEN as u64 != length {
        return Err(bad_header(HEADER_LEN, "the lengths in its section table do not add up"));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: Uuid = Uuid::from_u128(5);

    fn sample() -> Vec<u8> {
        let sections = [(Section::Manifest, &[1, 2, 3][..]), (Section::Devices, &[7; 1000][..])];
        encode(ID, Kind::Checkpoint, 3, 42, &sections).bytes
    }

    #[test]
    fn every_flipped_bit_is_seen_and_named() {
        let bytes = sample();
        let entry = Entry::decode(bytes.clone(), ID, 42).unwrap();
        assert_eq!((entry.kind, entry.epoch, entry.log_number), (Kind::Checkpoint, 3, 42));
        assert_eq!(entry.section(Section::Manifest).unwrap(), [1, 2, 3]);
        assert_eq!(entry.section(Section::Devices).unwrap(), [7; 1000]);
        assert!(entry.section(Section::Metadata).is_err());
        let mut seen = Vec::new();
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let flaw = Entry::decode(bad, ID, 42).and_then(|entry| {
                entry.section(Section::Manifest)?;
                entry.section(Section::Devices)
            });
            match flaw.unwrap_err() {
                Flaw::Bad { structure, .. } if seen.contains(&structure) => {}
                Flaw::Bad { structure, .. } => seen.push(structure),
                other => panic!("bit {bit}: damage is taken for {other:?}"),
            }
        }
        let expected = [Structure::EntryHeader, Structure::Manifest, Structure::Devices, Structure::EntryFooter];
        assert_eq!(seen, expected);
        for len in 0..bytes.len() {
            assert!(Entry::decode(bytes[..len].to_vec(), ID, 42).is_err(), "cut at {len}");
        }
        assert!(Entry::decode(bytes.clone(), ID, 41).is_err());
        assert!(Entry::decode(bytes, Uuid::nil(), 42).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_an_entry_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), at in 0usize..200) {
            let mut mutated = sample();
            let at = at.min(mutated.len());
            let end = (at + bytes.len()).min(mutated.len());
            mutated.splice(at..end, bytes.clone());
            for bytes in [bytes, mutated] {
                if let Ok(entry) = Entry::decode(bytes, ID, 42) {
                    let _ = entry.section(Section::Devices);
                }
            }
        }
    }
}
