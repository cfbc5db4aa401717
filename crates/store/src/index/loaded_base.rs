//! A base index on the disk, of which parts are read when they are first needed.
//!
//! A *base index* is a file with the location and digest of every page, as of an older checkpoint. A *part* of it has
//! 4096 pages of one RAM block ([`crate::format::base`]).

use super::BlockInBase;
use crate::directory::StoreDirectory;
use crate::error::{Result, StoreError};
use crate::format::base::{self, BaseIndex, HEADER_FIELDS_LEN, HEADER_LEN, IndexEntry, PART_PAGES};
use crate::format::manifest::{EntryId, Manifest};
use crate::format::{Flaw, Structure, names};
use crate::sealing::{FileIdentity, FileKey};
use rekindle_kernel::durable_file::DurableFile;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, OnceLock};

/// A base index whose header and trailer were read.
#[derive(Debug)]
pub(super) struct LoadedBase {
    pub name: String,
    file: Arc<dyn DurableFile>,
    /// Key of an encrypted base index.
    key: Option<FileKey>,
    pub base: BaseIndex,
    /// Maps each position in the base index's segment table to the position in the manifest; `None` if the segment does
    /// not exist any more.
    positions_in_manifest: Vec<Option<usize>>,
    parts: Vec<OnceLock<Box<[IndexEntry]>>>,
}

impl LoadedBase {
    /// Finds the newest base index that is usable for checkpoint `number`. Skips a damaged base index with a warning.
    pub fn find(store: &StoreDirectory, manifest: &Manifest, number: u64) -> Option<Self> {
        let files = store.disk.list(names::INDEX).ok()?;
        let mut bases: Vec<_> =
            files.iter().filter_map(|(name, len)| names::parse_base(name).map(|key| (key, *len))).collect();
        bases.sort_unstable();
        for ((log_number, epoch), len) in bases.into_iter().rev() {
            match Self::load(store, manifest, number, (log_number, epoch), len) {
                Ok(Some(loaded)) => return Some(loaded),
                Ok(None) => {}
                Err(e) => tracing::warn!("{e}; rebuilding the index from the segments' directories"),
            }
        }
        None
    }

    /// Loads the base index that the owner of an epoch wrote after a log entry, whose file has `len` bytes. Returns
    /// `None` if it is not usable for checkpoint `number`, or was removed.
    fn load(
        store: &StoreDirectory,
        manifest: &Manifest,
        number: u64,
        (log_number, epoch): (u64, u64),
        len: u64,
    ) -> Result<Option<Self>> {
        let name = &names::base(log_number, epoch);
        let file = match store.disk.open(name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(store.failed(name, "opening"))?,
        };
        let flawed = |flaw| StoreError::flaw(store.name(), name, flaw);
        let fields = store.read_at(&file, name, 0, HEADER_FIELDS_LEN)?;
        let header = BaseIndex::decode_header(&fields, store.id).map_err(flawed)?;
        if header.usable_from > number {
            return Ok(None);
        }
        if header.trailer_at.checked_add(header.trailer_len).is_none_or(|end| end > len) {
            return Err(flawed(Flaw::bad(Structure::BaseHeader, 0, "the file is shorter than its header states")));
        }
        let identity = FileIdentity::BaseIndex { epoch };
        let key = store.find_key(identity, header.seal, Structure::BaseHeader).map_err(flawed)?;
        let mut trailer = store.read_at(&file, name, header.trailer_at, header.trailer_len as usize)?;
        let base = BaseIndex::decode(&header, &mut trailer, key.as_ref()).map_err(flawed)?;
        if end_of_parts(&base, key.is_some()) != Some(header.trailer_at) {
            let what = "its parts are not as long as its blocks";
            return Err(flawed(Flaw::bad(Structure::BaseTrailer, header.trailer_at, what)));
        }
        if let (Some(footer), Some(sealed)) = (base.entry_footer, &manifest.sealed)
            && !sealed.base_entries.contains(&EntryId { log_number, footer })
        {
            let what = "it was not written after that log entry of this history of the store";
            return Err(flawed(Flaw::bad(Structure::BaseTrailer, header.trailer_at, what)));
        }
        let in_manifest: HashMap<(u64, u64), usize> = manifest
            .segments
            .iter()
            .enumerate()
            .map(|(position, extent)| ((extent.epoch, extent.number), position))
            .collect();
        let positions_in_manifest =
            base.segments.iter().map(|extent| in_manifest.get(&(extent.epoch, extent.number)).copied()).collect();
        let parts = base.part_checksums.iter().map(|_| OnceLock::new()).collect();
        Ok(Some(Self { name: name.to_owned(), file, key, base, positions_in_manifest, parts }))
    }

    /// Finds a block by its number in the store's records.
    pub fn block(&self, number: u16) -> Option<BlockInBase> {
        let mut first_part = 0;
        for block in &self.base.blocks {
            if block.number == number {
                return Some(BlockInBase { first_part, pages: block.pages });
            }
            first_part += base::parts(block.pages) as usize;
        }
        None
    }

    /// Returns the position in the manifest of a segment of the base index; `None` if the segment does not exist any
    /// more.
    pub fn position_in_manifest(&self, segment: usize) -> Option<usize> {
        self.positions_in_manifest.get(segment).copied().flatten()
    }

    /// Returns the entry of a page of a block.
    pub fn entry(&self, store: &StoreDirectory, block: BlockInBase, page: u64) -> Result<IndexEntry> {
        let part = self.part(store, block, page / PART_PAGES)?;
        Ok(part.get((page % PART_PAGES) as usize).copied().unwrap_or_default())
    }

    /// Returns the entries of a part of a block. The first call reads them.
    fn part(&self, store: &StoreDirectory, block: BlockInBase, part: u64) -> Result<&[IndexEntry]> {
        let number = block.first_part + part as usize;
        let flawed = |flaw| StoreError::flaw(store.name(), &self.name, flaw);
        let Some((loaded, checksum)) = self.parts.get(number).zip(self.base.part_checksums.get(number)) else {
            let what = "it has fewer parts than its blocks need";
            return Err(flawed(Flaw::bad(Structure::BaseTrailer, 0, what)));
        };
        if let Some(entries) = loaded.get() {
            return Ok(entries);
        }
        let offset = self.part_offset(number);
        // All parts are full, except the last part of each block.
        let pages = (block.pages - part * PART_PAGES).min(PART_PAGES);
        let len = base::part_len(pages, self.key.is_some());
        let mut bytes = store.read_at(&self.file, &self.name, offset, len as usize)?;
        let entries = base::decode_part(&mut bytes, *checksum, offset, self.key.as_ref()).map_err(flawed)?;
        Ok(loaded.get_or_init(|| entries))
    }

    /// Returns the offset of a part. The parts follow one another without gaps.
    fn part_offset(&self, number: usize) -> u64 {
        let is_sealed = self.key.is_some();
        let mut block_offset = HEADER_LEN;
        let mut first_part = 0;
        for block in &self.base.blocks {
            let parts = base::parts(block.pages) as usize;
            if number < first_part + parts {
                return block_offset + (number - first_part) as u64 * base::part_len(PART_PAGES, is_sealed);
            }
            first_part += parts;
            block_offset += base::parts_len(block.pages, is_sealed).unwrap_or_default();
        }
        block_offset
    }

    /// Checks that all parts can be read.
    fn check_parts(&self, store: &StoreDirectory) -> Result<()> {
        let mut first_part = 0;
        for block in &self.base.blocks {
            for part in 0..base::parts(block.pages) {
                self.part(store, BlockInBase { first_part, pages: block.pages }, part)?;
            }
            first_part += base::parts(block.pages) as usize;
        }
        Ok(())
    }
}

/// Returns the offset after the parts that the blocks of a base index need; `None` if it is too large.
fn end_of_parts(base: &BaseIndex, is_sealed: bool) -> Option<u64> {
    let add_block = |end: u64, block: &base::BaseBlock| end.checked_add(base::parts_len(block.pages, is_sealed)?);
    base.blocks.iter().try_fold(HEADER_LEN, add_block)
}

/// Checks that all base indices of the store can be read completely. Returns the error of each damaged base index.
pub(crate) fn check_bases(store: &StoreDirectory, manifest: &Manifest) -> Result<Vec<StoreError>> {
    let mut errors = Vec::new();
    let files = store.disk.list(names::INDEX).map_err(store.failed(names::INDEX, "listing the directory"))?;
    for (key, len) in files.into_iter().filter_map(|(file, len)| Some((names::parse_base(&file)?, len))) {
        let loaded = LoadedBase::load(store, manifest, u64::MAX, key, len);
        let checked = loaded.and_then(|loaded| loaded.map_or(Ok(()), |loaded| loaded.check_parts(store)));
        // The owner may have removed a replaced base index meanwhile.
        errors.extend(checked.err().filter(|e| !e.is_not_found()));
    }
    Ok(errors)
}
