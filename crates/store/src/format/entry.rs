//! Log entries: a header, sections that have a checksum each, and a footer.

use super::codec::{Reader, Writer};
use super::{Flaw, Structure, VERSION, checksum};
use lz4_flex::block::{compress, decompress_into};
use uuid::Uuid;

const MAGIC: &[u8; 8] = b"RKLOGENT";
const END_MAGIC: &[u8; 8] = b"RKLOGEND";
const HEADER_LEN: usize = 64;
const ROW_LEN: usize = 32;
const FOOTER_LEN: usize = 24;
const SECTIONS: u16 = 16;
/// Limit of bytes of an entry, and of a decompressed section.
pub const LONGEST: u64 = 128 << 20;

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

#[derive(Debug, Clone, Copy)]
struct Row {
    code: u32,
    at: u64,
    stored: u32,
    raw: u32,
    sum: u64,
}

/// A log entry with a valid header and footer. Each section is checked only when it is read.
#[derive(Debug, Clone)]
pub struct Entry {
    bytes: Vec<u8>,
    rows: Vec<Row>,
    pub kind: Kind,
    /// Epoch of the entry's owner.
    pub epoch: u64,
    /// Number of the entry in the log.
    pub slot: u64,
    /// Checksum in the footer. It covers the checksums of all other parts of the entry.
    pub footer: u64,
}

/// Returns the encoded entry, and the checksum in its footer.
#[must_use]
pub fn encode(id: Uuid, kind: Kind, epoch: u64, slot: u64, sections: &[(Section, &[u8])]) -> (Vec<u8>, u64) {
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
    out.put_u64(slot);
    out.put_u64(length as u64);
    let sum = checksum(&out);
    out.put_u64(sum);
    let sum = checksum(&table);
    out.extend_from_slice(&table);
    out.put_u64(sum);
    let footer = checksum(&out);
    out.extend_from_slice(&content);
    out.extend_from_slice(END_MAGIC);
    out.put_u64(slot);
    out.put_u64(footer);
    (out, footer)
}

#[expect(clippy::len_without_is_empty, reason = "none is empty")]
impl Entry {
    /// Decodes the content of a log file.
    ///
    /// # Errors
    /// Header, section table or footer are damaged, of a newer version, or of another store or entry.
    pub fn decode(bytes: Vec<u8>, id: Uuid, slot: u64) -> Result<Self, Flaw> {
        let head = |at: usize, what| Flaw::bad(Structure::EntryHeader, at as u64, what);
        let tail = |what| Flaw::bad(Structure::EntryFooter, bytes.len().saturating_sub(FOOTER_LEN) as u64, what);
        let (header, rest) = bytes.split_at_checked(HEADER_LEN).ok_or_else(|| head(bytes.len(), "it is cut short"))?;
        let mut reader = Reader::new(header);
        let mut fields = || {
            let magic: [u8; 8] = reader.array()?;
            let (version, kind, sections) = (reader.u32()?, reader.u16()?, reader.u16()?);
            let found_id = Uuid::from_bytes(reader.array()?);
            Some((magic, version, kind, sections, found_id, reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?))
        };
        let (magic, version, kind, sections, found_id, epoch, found_slot, length, sum) =
            fields().ok_or_else(|| head(0, "it is cut short"))?;
        if magic != *MAGIC {
            return Err(head(0, "it has no magic number"));
        }
        if header.get(..HEADER_LEN - 8).map(checksum) != Some(sum) {
            return Err(head(HEADER_LEN - 8, "its checksum is wrong"));
        }
        Flaw::check_version(version)?;
        if (found_id, found_slot) != (id, slot) {
            return Err(head(16, "it belongs to another store or has another number"));
        }
        let kind = match kind {
            1 => Kind::Claim,
            2 => Kind::Checkpoint,
            3 => Kind::Compaction,
            _ => return Err(head(12, "it is of an unknown kind")),
        };
        if sections > SECTIONS {
            return Err(head(14, "it has too many sections"));
        }
        let table_len = usize::from(sections) * ROW_LEN;
        let mut reader = Reader::new(rest);
        let mut fields = || Some((reader.bytes(table_len)?, reader.u64()?));
        let (table, sum) = fields().ok_or_else(|| head(HEADER_LEN, "its section table is cut short"))?;
        if checksum(table) != sum {
            return Err(head(HEADER_LEN + table_len, "the checksum of its section table is wrong"));
        }
        if length != bytes.len() as u64 {
            return Err(tail("the length of the file differs from the one in its header"));
        }
        let (_, footer) = bytes.split_last_chunk::<FOOTER_LEN>().ok_or_else(|| tail("it is cut short"))?;
        let mut reader = Reader::new(footer);
        let mut fields = || Some((reader.array()?, reader.u64()?, reader.u64()?));
        let (magic, end_slot, footer) = fields().ok_or_else(|| tail("it is cut short"))?;
        let content_at = HEADER_LEN + table_len + 8;
        if magic != *END_MAGIC || end_slot != slot || bytes.get(..content_at).map(checksum) != Some(footer) {
            return Err(tail("it does not belong to the entry's header"));
        }
        let mut at = content_at as u64;
        let mut rows = Vec::with_capacity(sections.into());
        let mut reader = Reader::new(table);
        while let Some(code) = reader.u32() {
            let mut fields = || Some((reader.u32()?, reader.u64()?, reader.u64()?, reader.u64()?));
            let (_, stored, raw, sum) = fields().ok_or_else(|| head(HEADER_LEN, "its section table is cut short"))?;
            if stored > raw || raw > LONGEST {
                return Err(head(HEADER_LEN, "a length in its section table makes no sense"));
            }
            rows.push(Row { code, at, stored: stored as u32, raw: raw as u32, sum });
            at += stored;
        }
        if at + FOOTER_LEN as u64 != length {
            return Err(head(HEADER_LEN, "the lengths in its section table do not add up"));
        }
        Ok(Self { kind, epoch, slot, footer, rows, bytes })
    }

    /// Returns the bytes of the whole file.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the bytes of a section before compression; 0 if the entry has no such section.
    #[must_use]
    pub fn section_len(&self, section: Section) -> u64 {
        self.rows.iter().find(|row| row.code == section.code()).map_or(0, |row| row.raw.into())
    }

    /// Returns the decompressed content of a section.
    ///
    /// # Errors
    /// The section is damaged or missing.
    pub fn section(&self, section: Section) -> Result<Vec<u8>, Flaw> {
        let row = self.rows.iter().find(|row| row.code == section.code());
        let row = row.ok_or(Flaw::bad(section.structure(), HEADER_LEN as u64, "the entry has none"))?;
        let bad = |what| Flaw::bad(section.structure(), row.at, what);
        let at = row.at as usize;
        let stored = self.bytes.get(at..at + row.stored as usize).ok_or_else(|| bad("it is cut short"))?;
        if checksum(stored) != row.sum {
            return Err(bad("its checksum is wrong"));
        }
        if row.stored == row.raw {
            return Ok(stored.to_vec());
        }
        // LZ4 expands data at most 255 times. A larger stated length is rejected before memory is allocated.
        if u64::from(row.raw) > u64::from(row.stored) * 256 {
            return Err(bad("its length makes no sense"));
        }
        let mut raw = vec![0; row.raw as usize];
        match decompress_into(stored, &mut raw) {
            Ok(len) if len == raw.len() => Ok(raw),
            _ => Err(bad("it cannot be decompressed")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: Uuid = Uuid::from_u128(5);

    fn sample() -> Vec<u8> {
        let sections = [(Section::Manifest, &[1, 2, 3][..]), (Section::Devices, &[7; 1000][..])];
        encode(ID, Kind::Checkpoint, 3, 42, &sections).0
    }

    #[test]
    fn every_flipped_bit_is_seen_and_named() {
        let bytes = sample();
        let entry = Entry::decode(bytes.clone(), ID, 42).unwrap();
        assert_eq!((entry.kind, entry.epoch, entry.slot), (Kind::Checkpoint, 3, 42));
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
                Flaw::Newer { .. } => panic!("bit {bit}: a damaged version is taken for a newer one"),
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
