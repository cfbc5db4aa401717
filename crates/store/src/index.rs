//! Index of all pages of a checkpoint.
//!
//! The index combines a base index with the directories of frames that were written later. If no base index is usable,
//! it is built from all directories, with the same result.

use crate::error::{Result, StoreError};
use crate::format::base::{self, Base, IndexEntry, Location};
use crate::format::manifest::{Extent, Manifest, StoredBlock, Table};
use crate::format::names;
use crate::format::segment::Kind;
use crate::format::{Flaw, Structure};
use crate::home::Home;
use crate::segments::{Files, frames, open_checked};
use rekindle_pages::{BlockId, PageId, PageNo};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

/// Number of segments whose directories are read concurrently.
const READERS: usize = 4;

/// A base index on the disk, loaded part by part.
#[derive(Debug)]
struct LoadedBase {
    name: String,
    file: Arc<dyn crate::disk::DiskFile>,
    base: Base,
    /// Maps each position in the base index's segment table to the position in the manifest; `None` if the segment does
    /// not exist any more.
    segments: Vec<Option<usize>>,
    parts: Vec<OnceLock<Box<[IndexEntry]>>>,
}

/// A record of a page that is newer than the base index.
#[derive(Debug, Clone, Copy)]
struct OverlayRecord {
    place: Location,
    digest: u64,
    /// Checkpoint in which the page was written.
    number: u64,
    page: u32,
    /// Position of the page's block.
    block: u32,
}

/// Records that are newer than the base index, sorted by part of a block. Which of a part's records are valid is
/// determined when a page of the part is first looked up.
#[derive(Debug, Default)]
struct Overlay {
    records: Vec<OverlayRecord>,
    /// Positions in `records`, sorted by part, and within a part in the order in which they were read.
    order: Vec<u32>,
    /// Start of each part in `order`; the last value is the end.
    starts: Vec<u32>,
    /// For each page of a part: position in `records` plus one, or 0.
    parts: Vec<OnceLock<Box<[u32]>>>,
}

impl Overlay {
    fn new(records: Vec<OverlayRecord>, blocks: &[IndexBlock]) -> Self {
        let part_of = |record: &OverlayRecord| {
            let first = blocks.get(record.block as usize).map_or(0, |block| block.first_part);
            first + record.page as usize / base::PART_PAGES as usize
        };
        let parts = blocks.last().map_or(0, |block| block.first_part + base::parts(block.pages) as usize);
        let mut starts = vec![0u32; parts + 1];
        for record in &records {
            if let Some(count) = starts.get_mut(part_of(record) + 1) {
                *count += 1;
            }
        }
        let mut sum = 0;
        for start in &mut starts {
            sum += *start;
            *start = sum;
        }
        let mut next = starts.clone();
        let mut order = vec![0u32; records.len()];
        for (position, record) in records.iter().enumerate() {
            if let Some(at) = next.get_mut(part_of(record)) {
                if let Some(place) = order.get_mut(*at as usize) {
                    *place = position as u32;
                }
                *at += 1;
            }
        }
        Self { records, order, starts, parts: (0..parts).map(|_| OnceLock::new()).collect() }
    }

    /// Finds the valid record of a page.
    fn find(&self, block: &IndexBlock, page: u64) -> Option<&OverlayRecord> {
        let part = block.first_part + (page / base::PART_PAGES) as usize;
        let pages = self.parts.get(part)?.get_or_init(|| self.build(part));
        let position = pages.get((page % base::PART_PAGES) as usize)?.checked_sub(1)?;
        self.records.get(position as usize)
    }

    fn build(&self, part: usize) -> Box<[u32]> {
        let begin = self.starts.get(part).map_or(0, |start| *start as usize);
        let end = self.starts.get(part + 1).map_or(begin, |start| *start as usize);
        let records = self.order.get(begin..end).unwrap_or_default();
        if records.is_empty() {
            return Box::default();
        }
        let mut pages = vec![0u32; base::PART_PAGES as usize];
        for position in records {
            let Some(record) = self.records.get(*position as usize) else { continue };
            let Some(best) = pages.get_mut(record.page as usize % base::PART_PAGES as usize) else { continue };
            // If a checkpoint has two records of a page, the later record is valid. Segments are read in the order of
            // their numbers.
            let before = best.checked_sub(1).and_then(|before| self.records.get(before as usize));
            if before.is_none_or(|before| record.number >= before.number) {
                *best = position + 1;
            }
        }
        pages.into_boxed_slice()
    }
}

#[derive(Debug)]
struct IndexBlock {
    stored: StoredBlock,
    pages: u64,
    /// Number of the block's first part, counted over all blocks.
    first_part: usize,
    /// In the base index: the block's first part and its number of pages.
    base: Option<(usize, u64)>,
}

/// A frame that is newer than the base index. It determines the order in which pages are fetched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recent {
    pub number: u64,
    pub segment: usize,
    pub at: u64,
}

/// Index of all pages of a checkpoint.
#[derive(Debug)]
pub(crate) struct Index {
    pub number: u64,
    /// Segments by position. A [`Location`] refers to these positions.
    pub segments: Vec<Extent>,
    /// Frames written since the base index, newest first.
    pub recent: Vec<Recent>,
    /// Number of records in directories that the base index does not cover.
    pub uncovered: u64,
    blocks: Vec<IndexBlock>,
    overlay: Overlay,
    base: Option<LoadedBase>,
}

/// Frames and records of one or all segments that are newer than the base index.
#[derive(Debug, Default)]
struct SegmentOverlay {
    recent: Vec<Recent>,
    records: Vec<OverlayRecord>,
}

/// Calls `read` for each segment, several concurrently. Within a segment reads are sequential, since each frame gives
/// the offset of the next frame.
fn each_segment(
    segments: &[Extent],
    read: impl Fn(usize, Extent) -> Result<SegmentOverlay> + Sync,
) -> Result<SegmentOverlay> {
    let next = AtomicUsize::new(0);
    let done: Vec<OnceLock<Result<SegmentOverlay>>> = segments.iter().map(|_| OnceLock::new()).collect();
    thread::scope(|scope| {
        for _ in 0..READERS.min(segments.len()) {
            scope.spawn(|| {
                let take = || next.fetch_add(1, Ordering::Relaxed);
                let mut position = take();
                while let Some((extent, done)) = segments.get(position).zip(done.get(position)) {
                    let _ = done.set(read(position, *extent));
                    position = take();
                }
            });
        }
    });
    let mut all = SegmentOverlay::default();
    for one in done.into_iter().filter_map(OnceLock::into_inner) {
        let SegmentOverlay { recent, records } = one?;
        all.recent.extend(recent);
        all.records.extend(records);
    }
    Ok(all)
}

impl Index {
    /// Builds the index of the checkpoint of `table` from the segments of `manifest`. Without `with_base`, uses the
    /// directories alone.
    ///
    /// # Errors
    /// [`StoreError::Missing`] for a segment; [`StoreError::Damaged`] for its header or directories.
    pub fn build(home: &Home, files: &Files, manifest: &Manifest, table: &Table, with_base: bool) -> Result<Self> {
        let base = if with_base { find_base(home, manifest, table.number) } else { None };
        let segments = manifest.segments.clone();
        let mut first_part = 0;
        let mut in_base = HashMap::new();
        for (number, pages) in base.iter().flat_map(|loaded| &loaded.base.blocks) {
            in_base.insert(*number, (first_part, *pages));
            first_part += base::parts(*pages) as usize;
        }
        let mut by_number = HashMap::new();
        let mut blocks = Vec::with_capacity(table.blocks.len());
        let mut first_part = 0;
        for (position, stored) in table.blocks.iter().enumerate() {
            by_number.insert(stored.number, position);
            let pages = stored.block.pages();
            let base = in_base.get(&stored.number).copied();
            blocks.push(IndexBlock { stored: stored.clone(), pages, first_part, base });
            first_part += base::parts(pages) as usize;
        }
        let from = base.as_ref().map_or(0, |loaded| loaded.base.from);
        let covered: HashMap<(u64, u64), u64> = base
            .iter()
            .flat_map(|loaded| &loaded.base.segments)
            .map(|extent| ((extent.epoch, extent.number), extent.len))
            .collect();
        let over = |position: usize, extent: Extent| -> Result<SegmentOverlay> {
            let mut covering = SegmentOverlay::default();
            let begin = covered.get(&(extent.epoch, extent.number)).copied().unwrap_or(0);
            if begin >= extent.len {
                return Ok(covering);
            }
            let file = files.get(home, extent)?;
            // Adjacent records usually belong to the same block.
            let mut last = (u16::MAX, None);
            frames(home, extent, &file, begin.next_multiple_of(crate::format::ALIGNMENT), |at, directory| {
                if directory.header.kind == Kind::Pages {
                    if directory.header.number > table.number {
                        return Ok(());
                    }
                    covering.recent.push(Recent { number: directory.header.number, segment: position, at });
                }
                for found in directory.pages().filter(|found| found.number <= table.number) {
                    if last.0 != found.record.block || last.1.is_none() {
                        let block = by_number.get(&found.record.block);
                        last = (found.record.block, block.and_then(|n| Some((*n as u32, blocks.get(*n)?))));
                    }
                    let Some((block, of)) = last.1 else { continue };
                    let page = u64::from(found.record.page);
                    if page >= of.pages || of.stored.is_void(page, found.number) {
                        continue;
                    }
                    covering.records.push(OverlayRecord {
                        place: Location::new(position, found.offset, found.record.len),
                        digest: found.record.digest,
                        number: found.number,
                        page: found.record.page,
                        block,
                    });
                }
                Ok(())
            })?;
            Ok(covering)
        };
        let SegmentOverlay { mut recent, records } = each_segment(&segments, over)?;
        let uncovered = records.len() as u64;
        let overlay = Overlay::new(records, &blocks);
        recent.sort_by_key(|frame| std::cmp::Reverse((frame.number, frame.segment, frame.at)));
        recent.retain(|frame| frame.number > from);
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
    pub fn find(&self, home: &Home, (block, PageNo(page)): PageId) -> Result<IndexEntry> {
        let Some(block) = self.blocks.get(block.0) else { return Ok(IndexEntry::default()) };
        if page >= block.pages {
            return Ok(IndexEntry::default());
        }
        let over = self.overlay.find(block, page);
        let over_spot =
            over.map_or(IndexEntry::default(), |over| IndexEntry { place: over.place, digest: over.digest });
        let Some(base) = &self.base else { return Ok(over_spot) };
        if over.is_some_and(|over| over.number > base.base.from) {
            return Ok(over_spot);
        }
        let covers = |(_, pages): &(usize, u64)| page < *pages && !block.stored.is_void(page, base.base.from);
        let Some((first, pages)) = block.base.filter(covers) else { return Ok(over_spot) };
        let part = base.part(home, first, page / base::PART_PAGES, pages)?;
        let spot = part.get((page % base::PART_PAGES) as usize).copied().unwrap_or_default();
        // A compaction has moved the page since: an equal digest and length mean the same content.
        let moved = |over: &&OverlayRecord| over.digest == spot.digest && over.place.len() == spot.place.len();
        if spot.place.is_stored() && over.filter(moved).is_some() {
            return Ok(over_spot);
        }
        if spot.digest == 0 && !spot.place.is_stored() {
            return Ok(spot);
        }
        match base.segments.get(spot.place.segment()) {
            Some(Some(segment)) => {
                let place = Location::new(*segment, spot.place.offset(), spot.place.len());
                Ok(IndexEntry { place, digest: spot.digest })
            }
            _ => {
                let flaw = Flaw::bad(Structure::BasePart, 0, "it refers to a segment that does not exist");
                Err(StoreError::flaw(home.name(), &base.name, flaw))
            }
        }
    }
}

impl LoadedBase {
    fn part(&self, home: &Home, first: usize, part: u64, pages: u64) -> Result<&[IndexEntry]> {
        let number = first + part as usize;
        let flawed = |flaw| StoreError::flaw(home.name(), &self.name, flaw);
        let none = Flaw::bad(Structure::BaseTrailer, 0, "it has fewer parts than its blocks need");
        let (slot, sum) = self.parts.get(number).zip(self.base.sums.get(number)).ok_or_else(|| flawed(none))?;
        if let Some(loaded) = slot.get() {
            return Ok(loaded);
        }
        // All parts are full, except the last part of each block.
        let before: u64 = self.offset_of(number);
        let in_part = (pages - part * base::PART_PAGES).min(base::PART_PAGES);
        let bytes = home.read_at(&self.file, &self.name, before, in_part as usize * base::ENTRY_LEN)?;
        let spots = base::decode_part(&bytes, *sum, before).map_err(flawed)?;
        Ok(slot.get_or_init(|| spots))
    }

    /// Returns the offset of part `number`. The parts follow one another without gaps.
    fn offset_of(&self, number: usize) -> u64 {
        let mut at = base::HEADER_LEN;
        let mut first = 0;
        for (_, pages) in &self.base.blocks {
            let parts = base::parts(*pages) as usize;
            if number < first + parts {
                return at + (number - first) as u64 * base::PART_PAGES * base::ENTRY_LEN as u64;
            }
            first += parts;
            at += pages * base::ENTRY_LEN as u64;
        }
        at
    }
}

/// Finds the newest base index that is usable for checkpoint `number`. Skips a damaged base index with a warning.
fn find_base(home: &Home, manifest: &Manifest, number: u64) -> Option<LoadedBase> {
    let mut bases: Vec<_> = home
        .disk
        .list(names::INDEX)
        .ok()?
        .into_iter()
        .filter_map(|(name, len)| names::parse_base(&name).map(|(slot, epoch)| (slot, epoch, len)))
        .collect();
    bases.sort_unstable();
    for (slot, epoch, len) in bases.into_iter().rev() {
        match load(home, manifest, number, &names::base(slot, epoch), len) {
            Ok(Some(loaded)) => return Some(loaded),
            Ok(None) => {}
            Err(e) => tracing::warn!("{e}; rebuilding the index from the segments' directories"),
        }
    }
    None
}

fn load(home: &Home, manifest: &Manifest, number: u64, name: &str, len: u64) -> Result<Option<LoadedBase>> {
    let file = match home.disk.open(name) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(home.failed(name, "opening"))?,
    };
    let flawed = |flaw| StoreError::flaw(home.name(), name, flaw);
    let header = Base::decode_header(&home.read_at(&file, name, 0, 80)?, home.id).map_err(flawed)?;
    if header.to > number {
        return Ok(None);
    }
    if header.trailer_at.checked_add(header.trailer_len).is_none_or(|end| end > len) {
        return Err(flawed(Flaw::bad(Structure::BaseHeader, 0, "the file is shorter than its header states")));
    }
    let trailer = home.read_at(&file, name, header.trailer_at, header.trailer_len as usize)?;
    let base = Base::decode(&header, &trailer).map_err(flawed)?;
    let spots: Option<u64> = base.blocks.iter().try_fold(0u64, |sum, (_, pages)| sum.checked_add(*pages));
    let ends = spots.and_then(|spots| spots.checked_mul(base::ENTRY_LEN as u64)?.checked_add(base::HEADER_LEN));
    if ends != Some(header.trailer_at) {
        return Err(flawed(Flaw::bad(
            Structure::BaseTrailer,
            header.trailer_at,
            "its parts are not as long as its blocks",
        )));
    }
    let existing: HashMap<(u64, u64), usize> =
        manifest.segments.iter().enumerate().map(|(n, extent)| ((extent.epoch, extent.number), n)).collect();
    let segments = base.segments.iter().map(|extent| existing.get(&(extent.epoch, extent.number)).copied()).collect();
    let parts = base.sums.iter().map(|_| OnceLock::new()).collect();
    Ok(Some(LoadedBase { name: name.to_owned(), file, base, segments, parts }))
}

/// Checks that all base indices of the store can be read completely. Returns the error of each damaged base index.
pub(crate) fn check_bases(home: &Home, manifest: &Manifest) -> Result<Vec<StoreError>> {
    let mut flaws = Vec::new();
    let listed = home.disk.list(names::INDEX).map_err(home.failed(names::INDEX, "listing the directory"))?;
    for (name, len) in listed.into_iter().filter(|(name, _)| names::parse_base(name).is_some()) {
        let name = format!("{}/{name}", names::INDEX);
        let checked = load(home, manifest, u64::MAX, &name, len).and_then(|loaded| {
            let Some(loaded) = loaded else { return Ok(()) };
            let mut first = 0;
            for (_, pages) in &loaded.base.blocks {
                for part in 0..base::parts(*pages) {
                    loaded.part(home, first, part, *pages)?;
                }
                first += base::parts(*pages) as usize;
            }
            Ok(())
        });
        // The owner may have removed a replaced base index meanwhile.
        flaws.extend(checked.err().filter(|e| !e.is_not_found()));
    }
    Ok(flaws)
}

/// Checks the header of a segment and all its directories. Returns the number of pages.
pub(crate) fn check_segment(home: &Home, extent: Extent) -> Result<u64> {
    let mut pages = 0;
    let file = open_checked(home, extent)?;
    frames(home, extent, &file, 0, |_, directory| {
        pages += u64::from(directory.header.count);
        Ok(())
    })?;
    Ok(pages)
}
