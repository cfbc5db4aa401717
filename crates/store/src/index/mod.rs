//! Index of all pages of a checkpoint.
//!
//! The index combines a base index (`loaded_base`), a file with the locations of all pages as of an older checkpoint,
//! with the directories of frames that were written later (`overlay`). A frame is up to 1024 pages that were written
//! together; its directory lists them.
//! If no base index is usable, it is built from all directories, with the same result.

mod loaded_base;
mod overlay;

use crate::directory::StoreDirectory;
use crate::error::{Result, StoreError};
use crate::format::base::{self, IndexEntry, Location};
use crate::format::manifest::{CheckpointTable, Manifest, SegmentExtent, StoredBlock};
use crate::format::{Flaw, Structure};
use crate::segments::{OpenSegments, for_each_frame, open_checked};
use loaded_base::LoadedBase;
use overlay::{Overlay, OverlayReader, OverlayRecord, RecentRecords};
use rekindle_pages::{BlockId, PageId, PageNo};
use std::cmp::Reverse;

pub(crate) use loaded_base::check_bases;
pub(crate) use overlay::RecentFrame;

/// Whether an index is built from a base index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BaseIndexUse {
    IfUsable,
    /// The index is built from the directories of all segments.
    Never,
}

#[derive(Debug)]
struct IndexBlock {
    stored: StoredBlock,
    pages: u64,
    /// Number of the block's first part, counted over all blocks.
    first_part: usize,
    /// The block in the base index, if it has the block.
    in_base: Option<BlockInBase>,
}

#[derive(Debug, Clone, Copy)]
struct BlockInBase {
    /// Number of the block's first part in the base index.
    first_part: usize,
    pages: u64,
}

/// Index of all pages of a checkpoint.
#[derive(Debug)]
pub(crate) struct Index {
    /// Number of the checkpoint.
    pub number: u64,
    /// Segments by position. A [`Location`] refers to these positions.
    pub segments: Vec<SegmentExtent>,
    /// Frames written since the base index, newest first.
    pub recent: Vec<RecentFrame>,
    /// Number of records in directories that the base index does not cover.
    pub uncovered: u64,
    blocks: Vec<IndexBlock>,
    overlay: Overlay,
    base: Option<LoadedBase>,
}

impl Index {
    /// Builds the index of the checkpoint of `table` from the segments of `manifest`.
    ///
    /// # Errors
    /// [`StoreError::Missing`] for a segment; [`StoreError::Damaged`] for its header or directories.
    pub fn build(
        store: &StoreDirectory,
        open_segments: &OpenSegments,
        manifest: &Manifest,
        table: &CheckpointTable,
        base_use: BaseIndexUse,
    ) -> Result<Self> {
        let base = match base_use {
            BaseIndexUse::IfUsable => LoadedBase::find(store, manifest, table.number),
            BaseIndexUse::Never => None,
        };
        let blocks = index_blocks(table, base.as_ref());
        let covers_through = base.as_ref().map_or(0, |loaded| loaded.base.covers_through);
        let base_contents = base.as_ref().map(|loaded| &loaded.base);
        let reader = OverlayReader::new(store, open_segments, table.number, &blocks, base_contents);
        let segments = manifest.segments.clone();
        let RecentRecords { frames: mut recent, records } = reader.read_all(&segments)?;
        recent.retain(|frame| frame.number > covers_through);
        recent.sort_by_key(|frame| Reverse((frame.number, frame.segment, frame.offset)));
        let uncovered = records.len() as u64;
        let overlay = Overlay::new(records, &blocks);
        Ok(Self { number: table.number, segments, recent, uncovered, blocks, overlay, base })
    }

    /// Returns whether the index uses a base index.
    pub fn has_base(&self) -> bool {
        self.base.is_some()
    }

    /// Returns the number of pages of a block.
    pub fn pages(&self, block: BlockId) -> Option<u64> {
        self.blocks.get(block.0).map(|block| block.pages)
    }

    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Looks up a page. A page that was never stored, or is outside of its block, gives the default, which means zero.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] if a part of the base index is damaged. The caller can then build the index without it.
    pub fn find(&self, store: &StoreDirectory, (block, PageNo(page)): PageId) -> Result<IndexEntry> {
        let Some(block) = self.blocks.get(block.0).filter(|block| page < block.pages) else {
            return Ok(IndexEntry::default());
        };
        let recent = self.overlay.find(block, page);
        let recent_entry = recent.map(OverlayRecord::entry).unwrap_or_default();
        let Some(base) = &self.base else { return Ok(recent_entry) };
        if recent.is_some_and(|recent| recent.number > base.base.covers_through) {
            return Ok(recent_entry);
        }
        let covers_page =
            |in_base: &BlockInBase| page < in_base.pages && !block.stored.is_void(page, base.base.covers_through);
        let Some(in_base) = block.in_base.filter(covers_page) else { return Ok(recent_entry) };
        let base_entry = base.entry(store, in_base, page)?;
        // A compaction has moved the page since: an equal digest and length mean the same content.
        let is_moved = recent.is_some_and(|recent| {
            recent.digest == base_entry.digest && recent.location.len() == base_entry.location.len()
        });
        if base_entry.location.is_stored() && is_moved {
            return Ok(recent_entry);
        }
        if base_entry.digest == 0 && !base_entry.location.is_stored() {
            return Ok(base_entry);
        }
        let Some(segment) = base.position_in_manifest(base_entry.location.segment()) else {
            let flaw = Flaw::bad(Structure::BasePart, 0, "it refers to a segment that does not exist");
            return Err(StoreError::flaw(store.name(), &base.name, flaw));
        };
        let location = Location::new(segment, base_entry.location.offset(), base_entry.location.len());
        Ok(IndexEntry { location, digest: base_entry.digest })
    }
}

/// Returns the blocks of a checkpoint, with their places in the base index.
fn index_blocks(table: &CheckpointTable, base: Option<&LoadedBase>) -> Vec<IndexBlock> {
    let mut blocks = Vec::with_capacity(table.blocks.len());
    let mut first_part = 0;
    for stored in &table.blocks {
        let pages = stored.block.pages();
        let in_base = base.and_then(|base| base.block(stored.number));
        blocks.push(IndexBlock { stored: stored.clone(), pages, first_part, in_base });
        first_part += base::parts(pages) as usize;
    }
    blocks
}

/// Checks the header of a segment and all its directories.
pub(crate) fn check_segment(store: &StoreDirectory, extent: SegmentExtent) -> Result<()> {
    let segment = open_checked(store, extent)?;
    for_each_frame(store, extent, &segment, 0, |_, _| Ok(()))
}
