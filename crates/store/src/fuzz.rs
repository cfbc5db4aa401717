//! All parsers by name, for the fuzz targets in `fuzz/`. The test below runs each parser on mutated inputs with a fixed
//! budget on every build.

use crate::format::base::{BaseHeader, BaseIndex, decode_part};
use crate::format::entry::{Entry, Section};
use crate::format::manifest::{CheckpointTable, Manifest};
use crate::format::page::{Digester, unpack};
use crate::format::segment::{Directory, check_header};
use crate::format::superblock::Superblock;
use crate::format::{checksum, names, sealed_entry};
use crate::url::StoreUrl;
use rekindle_pages::PAGE_SIZE;
use rekindle_qemu::incoming::Incoming;
use uuid::Uuid;

/// Runs one parser on any bytes. It must not panic.
pub type Target = fn(&[u8]);

pub const TARGETS: &[(&str, Target)] = &[
    ("superblock", |bytes| drop(Superblock::decode(bytes))),
    ("segment-header", |bytes| {
        let _ = check_header(bytes, Uuid::nil(), 1, 1);
    }),
    ("frame", |bytes| {
        if let Ok(directory) = Directory::decode(&mut bytes.to_vec(), 4096, None) {
            directory.pages().for_each(drop);
        }
    }),
    ("entry", |bytes| {
        if let Ok(entry) = Entry::decode(bytes.to_vec(), Uuid::nil(), 1) {
            for section in [Section::Claim, Section::Manifest, Section::Checkpoint, Section::Devices] {
                drop(entry.section(section));
            }
        }
    }),
    ("sealed-entry", |bytes| {
        let _ = sealed_entry::decode_header(bytes);
    }),
    ("manifest", |bytes| drop(Manifest::decode(bytes))),
    ("table", |bytes| drop(CheckpointTable::decode(bytes))),
    ("base-header", |bytes| {
        let _ = BaseIndex::decode_header(bytes, Uuid::nil());
    }),
    ("base-trailer", |bytes| {
        let (trailer_len, trailer_checksum) = (bytes.len() as u64, checksum(bytes));
        let (store, seal) = (Uuid::nil(), None);
        let header = BaseHeader {
            store,
            covers_through: 0,
            usable_from: 0,
            trailer_at: 4096,
            trailer_len,
            trailer_checksum,
            seal,
        };
        drop(BaseIndex::decode(&header, &mut bytes.to_vec(), None));
    }),
    ("base-part", |bytes| drop(decode_part(&mut bytes.to_vec(), checksum(bytes), 0, None))),
    ("page", |bytes| {
        let _ = unpack(Digester::new(Uuid::nil()), bytes, 1, &mut [0; PAGE_SIZE]);
    }),
    ("names", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let _ = (names::parse_entry(&text), names::parse_segment(&text), names::parse_base(&text));
        let _ = (names::parse_new(&text), names::parse_last(&text));
    }),
    ("url", |bytes| drop(String::from_utf8_lossy(bytes).parse::<StoreUrl>())),
    ("stream", |bytes| {
        if let Ok(mut incoming) = Incoming::open(bytes) {
            while let Ok(Some(_)) = incoming.next_page() {}
        }
    }),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::base::{BaseBlock, IndexEntry, Location, encode_part};
    use crate::format::entry::{self, Kind};
    use crate::format::manifest::{BlockCut, KeptCheckpoint, SegmentExtent, StoredBlock};
    use crate::format::segment::{FrameHeader, Kind as FrameKind, Record, encode_header};
    use crate::types::{Block, Pages, Vm};
    use rekindle_qemu::stream::{HEADER, RamSection};

    /// Returns a valid input for a parser. The test mutates it.
    fn seed(name: &str) -> Vec<u8> {
        let block = Block { id: "ram".into(), used: 8192, max: 8192, page_size: 4096 };
        let stored = StoredBlock { number: 0, block, cuts: vec![BlockCut { number: 1, pages: 1 }] };
        let manifest = Manifest {
            claim: 1,
            next_block: 1,
            next_segment: 3,
            kept: vec![KeptCheckpoint { number: 1, log_number: 2, footer: 3 }],
            segments: vec![SegmentExtent { epoch: 1, number: 2, len: 8192, seal: None }],
            sealed: None,
        };
        let base = BaseIndex {
            covers_through: 1,
            usable_from: 2,
            blocks: vec![BaseBlock { number: 0, pages: 2 }],
            segments: manifest.segments.clone(),
            part_checksums: vec![5],
            entry_footer: None,
        };
        match name {
            "superblock" => {
                let vm = Vm { uuid: Uuid::nil(), name: "web".into() };
                Superblock { id: Uuid::nil(), vm, created_us: 1 }.encode(None).unwrap()
            }
            "segment-header" => encode_header(Uuid::nil(), 1, 1, None),
            "frame" => {
                let mut frame = vec![0; 64];
                frame.extend(Record { digest: 1, page: 1, len: 20, block: 0 }.encode());
                frame.extend(7u64.to_le_bytes());
                let header =
                    FrameHeader { kind: FrameKind::Moved, count: 1, data_len: 20, is_sealed: false, number: 7 };
                header.finish(&mut frame);
                frame
            }
            "entry" => {
                let sections = [(Section::Manifest, &[1; 100][..]), (Section::Devices, &[2; 999])];
                entry::encode(Uuid::nil(), Kind::Checkpoint, 1, 1, &sections).bytes
            }
            "sealed-entry" => [b"RKSEALED".as_slice(), &[0; 80]].concat(),
            "manifest" => manifest.encode(),
            "table" => {
                CheckpointTable { number: 1, time_us: 2, pages: Pages::default(), bytes: 3, blocks: vec![stored] }
                    .encode()
            }
            "base-header" => base.encode(Uuid::nil(), 4128, None).unwrap().header,
            "base-trailer" => base.encode(Uuid::nil(), 4128, None).unwrap().trailer,
            "base-part" => {
                let mut part = Vec::new();
                let entries = [IndexEntry { location: Location(1), digest: 2 }; 3];
                encode_part(entries.into_iter(), 4096, None, &mut part).unwrap();
                part
            }
            "page" => lz4_flex::block::compress(&[7; PAGE_SIZE]),
            "names" => b"000000000042".to_vec(),
            "url" => b"s3://checkpoints/site-1/web".to_vec(),
            "stream" => {
                let mut out = HEADER.to_vec();
                let mut section = RamSection::start_plain(&mut out, [("ram", 8192)].into_iter());
                section.page(&mut out, "ram", 4096, &[7; PAGE_SIZE]);
                section.end(&mut out);
                out.extend([4, 0]);
                out
            }
            other => panic!("{other} has no seed"),
        }
    }

    #[test]
    fn no_input_causes_a_panic() {
        let mut state = 0x1234_5678_9abc_def1u64;
        let mut random = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 16) as usize % below.max(1)
        };
        for (name, target) in TARGETS {
            let seed = seed(name);
            target(&seed);
            for _ in 0..4000 {
                let mut bytes = seed.clone();
                match random(5) {
                    0 => bytes = (0..random(300)).map(|_| random(256) as u8).collect(),
                    1 => bytes.truncate(random(seed.len() + 1)),
                    2 => {
                        let (from, to) = (random(bytes.len()), random(bytes.len()));
                        let part = bytes[from.min(to)..from.max(to)].to_vec();
                        bytes.splice(from..from, part);
                    }
                    _ => {}
                }
                for _ in 0..random(6) {
                    let at = random(bytes.len());
                    let value = [0, 1, 0x7f, 0x80, 0xff, random(256) as u8][random(6)];
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte = value;
                    }
                }
                target(&bytes);
            }
        }
    }
}
