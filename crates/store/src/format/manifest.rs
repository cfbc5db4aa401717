//! The manifest (a list of all valid checkpoints and segments) and the block table of a checkpoint. A *segment* is a
//! file with pages, and a *block* is one of the guest's RAM blocks.

use super::codec::{Reader, Writer};
use super::segment;
use super::{Flaw, Structure};
use crate::sealing::{SEAL_ID_LEN, SealId};
use crate::types::{Block, Pages};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptCheckpoint {
    pub number: u64,
    /// Number of the checkpoint's log entry.
    pub log_number: u64,
    /// Checksum in that entry's footer; 0 (unknown) for the entry that contains this manifest.
    pub footer: u64,
}

/// A log entry, and the checksum in its footer: 0 if it is unknown. After a store was rolled back, another entry may get the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EntryId {
    pub log_number: u64,
    pub footer: u64,
}

impl EntryId {
    /// Returns the entry of this number, whatever its footer is.
    #[must_use]
    pub fn numbered(log_number: u64) -> Self {
        Self { log_number, footer: 0 }
    }
}

/// The committed part of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentExtent {
    /// Owner epoch in which the segment was written.
    pub epoch: u64,
    /// Number of the segment, which no other segment of the store has or had.
    pub number: u64,
    /// Committed bytes.
    pub len: u64,
    /// The file of an encrypted segment.
    pub seal: Option<SealId>,
}

/// List of all valid checkpoints and segments.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Manifest {
    /// Number of the log entry by which the owner claimed the store.
    pub claim: u64,
    /// Number for the next new block.
    pub next_block: u16,
    /// Lowest number that the next segment may get.
    pub next_segment: u64,
    /// Kept checkpoints, ascending.
    pub kept: Vec<KeptCheckpoint>,
    /// Segments, ascending by number.
    pub segments: Vec<SegmentExtent>,
    /// What an encrypted store has in addition.
    pub sealed: Option<SealedPart>,
}

/// The part of a manifest that only an encrypted store has. It binds files to the history that the manifest belongs to: a file
/// of the same name from before a rollback is authentic, too, but of another history.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SealedPart {
    /// Checksum in the footer of the claim's entry.
    pub claim_footer: u64,
    /// Log entries after which base indices were written that may be used. When it is read, the manifest's own entry is added.
    pub base_entries: Vec<EntryId>,
}

impl Manifest {
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32 + 24 * (self.kept.len() + self.segments.len()));
        out.put_u64(self.claim);
        out.put_u16(self.next_block);
        out.put_u64(self.next_segment);
        out.put_u32(self.kept.len() as u32);
        for kept in &self.kept {
            out.put_u64(kept.number);
            out.put_u64(kept.log_number);
            out.put_u64(kept.footer);
        }
        out.put_u32(self.segments.len() as u32);
        for segment in &self.segments {
            out.put_u64(segment.epoch);
            out.put_u64(segment.number);
            out.put_u64(segment.len);
        }
        if let Some(sealed) = &self.sealed {
            for segment in &self.segments {
                out.extend_from_slice(&segment.seal.unwrap_or(SealId([0; SEAL_ID_LEN])).0);
            }
            out.put_u64(sealed.claim_footer);
            out.put_u32(sealed.base_entries.len() as u32);
            for entry in &sealed.base_entries {
                out.put_u64(entry.log_number);
                out.put_u64(entry.footer);
            }
        }
        out
    }

    /// Decodes a manifest.
    ///
    /// # Errors
    /// The bytes are not a valid manifest.
    pub fn decode(bytes: &[u8]) -> Result<Self, Flaw> {
        let bad = |what| Flaw::bad(Structure::Manifest, 0, what);
        let mut reader = Reader::new(bytes);
        let mut fields = || {
            let mut manifest = Self {
                claim: reader.u64()?,
                next_block: reader.u16()?,
                next_segment: reader.u64()?,
                ..Self::default()
            };
            for _ in 0..reader.count(24)? {
                manifest.kept.push(KeptCheckpoint {
                    number: reader.u64()?,
                    log_number: reader.u64()?,
                    footer: reader.u64()?,
                });
            }
            for _ in 0..reader.count(24)? {
                manifest.segments.push(SegmentExtent {
                    epoch: reader.u64()?,
                    number: reader.u64()?,
                    len: reader.u64()?,
                    seal: None,
                });
            }
            if !reader.rest().is_empty() {
                for segment in &mut manifest.segments {
                    segment.seal = Some(SealId(reader.array()?));
                }
                let mut sealed = SealedPart { claim_footer: reader.u64()?, base_entries: Vec::new() };
                for _ in 0..reader.count(16)? {
                    sealed.base_entries.push(EntryId { log_number: reader.u64()?, footer: reader.u64()? });
                }
                manifest.sealed = Some(sealed);
            }
            reader.rest().is_empty().then_some(manifest)
        };
        let manifest = fields().ok_or_else(|| bad("its length differs from the stated one"))?;
        if !manifest.kept.is_sorted_by(|a, b| a.number < b.number && a.log_number < b.log_number) {
            return Err(bad("its checkpoints are not in order"));
        }
        let ordered = manifest.segments.is_sorted_by(|a, b| a.number < b.number);
        let sensible = |extent: &SegmentExtent| {
            (segment::HEADER_LEN..=segment::MAX_SEGMENT_BYTES).contains(&extent.len)
                && extent.number < manifest.next_segment
        };
        if !ordered || !manifest.segments.iter().all(sensible) {
            return Err(bad("its segments are not in order"));
        }
        Ok(manifest)
    }

    /// Returns the number of the oldest kept checkpoint.
    #[must_use]
    pub fn oldest(&self) -> Option<u64> {
        self.kept.first().map(|kept| kept.number)
    }

    /// Returns the newest checkpoint.
    #[must_use]
    pub fn newest(&self) -> Option<KeptCheckpoint> {
        self.kept.last().copied()
    }

    /// Returns the numbers of all kept checkpoints, ascending.
    #[must_use]
    pub fn numbers(&self) -> Vec<u64> {
        self.kept.iter().map(|kept| kept.number).collect()
    }
}

/// A checkpoint at which a block was shortened. Earlier records of the removed pages are void.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCut {
    /// Number of the checkpoint.
    pub number: u64,
    /// Number of pages that the block still had.
    pub pages: u64,
}

/// A stored RAM block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBlock {
    /// Number that identifies the block in the store's records.
    pub number: u16,
    pub block: Block,
    /// Checkpoints at which the block was shortened, the latest last. Each leaves more pages than the previous one: a
    /// later cut to fewer or equally many pages replaces it.
    pub cuts: Vec<BlockCut>,
}

impl StoredBlock {
    /// Returns whether the record of `page` in checkpoint `number` is void.
    #[must_use]
    pub fn is_void(&self, page: u64, number: u64) -> bool {
        self.cuts.iter().any(|cut| page >= cut.pages && number < cut.number)
    }

    /// Records that the block has only `pages` pages from checkpoint `number` on.
    pub fn cut(&mut self, number: u64, pages: u64) {
        self.cuts.retain(|cut| cut.pages < pages);
        self.cuts.push(BlockCut { number, pages });
    }
}

/// Block table and page counts of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointTable {
    pub number: u64,
    /// Time of the commit, in microseconds since 1970.
    pub time_us: u64,
    pub pages: Pages,
    /// Bytes written to segments for the checkpoint.
    pub bytes: u64,
    pub blocks: Vec<StoredBlock>,
}

impl CheckpointTable {
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.put_u64(self.number);
        out.put_u64(self.time_us);
        let Pages { stored, zero, unchanged, compressed } = self.pages;
        [stored, zero, unchanged, compressed, self.bytes].into_iter().for_each(|count| out.put_u64(count));
        out.put_u32(self.blocks.len() as u32);
        for StoredBlock { number, block, cuts } in &self.blocks {
            out.put_u16(*number);
            out.put_u64(block.used);
            out.put_u64(block.max);
            out.put_u64(block.page_size);
            out.put_text(&block.id);
            out.put_u32(cuts.len() as u32);
            for cut in cuts {
                out.put_u64(cut.number);
                out.put_u64(cut.pages);
            }
        }
        out
    }

    /// Decodes a block table.
    ///
    /// # Errors
    /// The bytes are not a valid block table.
    pub fn decode(bytes: &[u8]) -> Result<Self, Flaw> {
        let bad = |what| Flaw::bad(Structure::Checkpoint, 0, what);
        let mut reader = Reader::new(bytes);
        let mut fields = || {
            let (number, time_us) = (reader.u64()?, reader.u64()?);
            let (stored, zero, unchanged, compressed) = (reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?);
            let pages = Pages { stored, zero, unchanged, compressed };
            let bytes = reader.u64()?;
            let mut blocks = Vec::new();
            for _ in 0..reader.count(32)? {
                let number = reader.u16()?;
                let (used, max, page_size) = (reader.u64()?, reader.u64()?, reader.u64()?);
                let block = Block { id: reader.text()?.to_owned(), used, max, page_size };
                let mut cuts = Vec::new();
                for _ in 0..reader.count(16)? {
                    cuts.push(BlockCut { number: reader.u64()?, pages: reader.u64()? });
                }
                blocks.push(StoredBlock { number, block, cuts });
            }
            reader.rest().is_empty().then_some(Self { number, time_us, pages, bytes, blocks })
        };
        let table = fields().ok_or_else(|| bad("its length differs from the stated one"))?;
        check_blocks(table.blocks.iter().map(|stored| &stored.block)).map_err(bad)?;
        let mut numbers: Vec<_> = table.blocks.iter().map(|stored| stored.number).collect();
        numbers.sort_unstable();
        if !numbers.is_sorted_by(|a, b| a < b) {
            return Err(bad("two of its blocks have the same number"));
        }
        Ok(table)
    }
}

/// Limit of a VM's RAM in bytes, because the writer needs 16 bytes of memory per page.
pub const MAX_RAM_BYTES: u64 = 1 << 44;

/// Checks that these blocks can be the RAM blocks of a VM.
///
/// # Errors
/// A text that describes what is wrong.
pub fn check_blocks<'a>(blocks: impl Iterator<Item = &'a Block>) -> Result<(), &'static str> {
    let mut names = Vec::new();
    let mut total = 0u64;
    for block in blocks {
        if block.id.is_empty() || block.id.len() > 255 {
            return Err("a block's name must have 1 to 255 bytes");
        }
        if block.used > block.max {
            return Err("a block uses more than it may have");
        }
        total = total.saturating_add(block.used);
        names.push(block.id.as_str());
    }
    if total > MAX_RAM_BYTES {
        return Err("it has more than 16 TiB of RAM");
    }
    names.sort_unstable();
    if names.is_sorted_by(|a, b| a < b) { Ok(()) } else { Err("two blocks have the same name") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block(id: &str, used: u64) -> Block {
        Block { id: id.into(), used, max: used * 2, page_size: 4096 }
    }

    #[test]
    fn they_come_back() {
        let manifest = Manifest {
            claim: 5,
            next_block: 3,
            next_segment: 12,
            kept: vec![
                KeptCheckpoint { number: 1, log_number: 6, footer: 77 },
                KeptCheckpoint { number: 2, log_number: 9, footer: 0 },
            ],
            segments: vec![
                SegmentExtent { epoch: 1, number: 4, len: 8192, seal: None },
                SegmentExtent { epoch: 2, number: 11, len: 4096, seal: None },
            ],
            sealed: None,
        };
        assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest.clone()));
        let mut sealed = manifest.clone();
        let base_entries = vec![EntryId { log_number: 9, footer: 5 }];
        sealed.sealed = Some(SealedPart { claim_footer: 8, base_entries });
        for (segment, n) in sealed.segments.iter_mut().zip(1..) {
            segment.seal = Some(SealId([n; SEAL_ID_LEN]));
        }
        assert_eq!(Manifest::decode(&sealed.encode()), Ok(sealed.clone()));
        let mut bad = manifest.clone();
        bad.segments.reverse();
        assert!(Manifest::decode(&bad.encode()).is_err());
        bad = manifest;
        bad.next_segment = 11;
        assert!(Manifest::decode(&bad.encode()).is_err());
        let pages = Pages { stored: 1, zero: 2, unchanged: 3, compressed: 4 };
        let stored = |number, block, cuts| StoredBlock { number, block, cuts };
        let cuts = vec![BlockCut { number: 3, pages: 1 }];
        let blocks = vec![stored(0, block("ram", 4096), vec![]), stored(2, block("é", 0), cuts)];
        let mut table = CheckpointTable { number: 1, time_us: 2, pages, bytes: 5, blocks };
        assert_eq!(CheckpointTable::decode(&table.encode()), Ok(table.clone()));
        table.blocks.push(stored(2, block("other", 1), vec![]));
        assert!(CheckpointTable::decode(&table.encode()).is_err());
    }

    #[test]
    fn records_of_removed_pages_stay_void() {
        let mut stored = StoredBlock { number: 0, block: block("ram", 1 << 20), cuts: vec![] };
        stored.cut(5, 10);
        stored.cut(8, 20);
        assert!(stored.is_void(10, 4) && stored.is_void(20, 7) && stored.is_void(15, 4));
        assert!(!stored.is_void(9, 4) && !stored.is_void(10, 5) && !stored.is_void(15, 7));
        stored.cut(9, 10);
        assert_eq!(stored.cuts, [BlockCut { number: 9, pages: 10 }]);
    }

    #[test]
    fn tables_that_no_vm_has_are_refused() {
        let check = |blocks: &[Block]| check_blocks(blocks.iter());
        assert_eq!(check(&[block("ram", 1 << 40), block("bios", 4096)]), Ok(()));
        assert!(check(&[block("ram", 1 << 40), block("ram", 4096)]).is_err());
        assert!(check(&[block("", 4096)]).is_err());
        assert!(check(&[block("ram", 1 << 45)]).is_err());
        assert!(check(&[Block { used: 9, max: 8, ..block("ram", 4) }]).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_them_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Manifest::decode(&bytes);
            let _ = CheckpointTable::decode(&bytes);
        }
    }
}
