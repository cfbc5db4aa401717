//! Records of pages that are newer than the base index.
//!
//! A *record* is an entry of a frame's directory: which page the frame holds, with its digest. A *frame* is up to 1024
//! pages that were written together, in a *segment* (a file of frames). The *base index* is a file with the locations
//! of all pages as of an older checkpoint. `docs/store-format.md` describes all of them.

use super::IndexBlock;
use crate::directory::StoreDirectory;
use crate::error::Result;
use crate::format::base::{self, BaseIndex, IndexEntry, Location, PART_PAGES};
use crate::format::manifest::SegmentExtent;
use crate::format::segment::{Kind, ListedPage};
use crate::segments::{OpenSegments, for_each_frame};
use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Number of segments whose directories are read concurrently.
const READER_THREADS: usize = 4;

/// A record of a page that is newer than the base index.
#[derive(Debug, Clone, Copy)]
pub(super) struct OverlayRecord {
    pub location: Location,
    pub digest: u64,
    /// Checkpoint in which the page was written.
    pub number: u64,
    page: u32,
    /// Position of the page's block.
    block: u32,
}

impl OverlayRecord {
    pub fn entry(&self) -> IndexEntry {
        IndexEntry { location: self.location, digest: self.digest }
    }
}

/// A frame that is newer than the base index. It determines the order in which pages are fetched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecentFrame {
    /// Checkpoint of the frame's pages.
    pub number: u64,
    /// Position of the segment.
    pub segment: usize,
    pub offset: u64,
}

/// Frames and records of one or all segments that are newer than the base index.
#[derive(Debug, Default)]
pub(super) struct RecentRecords {
    pub frames: Vec<RecentFrame>,
    pub records: Vec<OverlayRecord>,
}

/// Reads the frames and records of a checkpoint that are newer than the base index.
pub(super) struct OverlayReader<'a> {
    store: &'a StoreDirectory,
    open_segments: &'a OpenSegments,
    /// Number of the checkpoint. Later records are skipped.
    checkpoint: u64,
    blocks: &'a [IndexBlock],
    /// Bytes of each segment that the base index covers, by epoch and number.
    covered: HashMap<(u64, u64), u64>,
}

impl<'a> OverlayReader<'a> {
    pub fn new(
        store: &'a StoreDirectory,
        open_segments: &'a OpenSegments,
        checkpoint: u64,
        blocks: &'a [IndexBlock],
        base: Option<&BaseIndex>,
    ) -> Self {
        let covered = base.iter().flat_map(|base| &base.segments);
        Self {
            store,
            open_segments,
            checkpoint,
            blocks,
            covered: covered.map(|extent| ((extent.epoch, extent.number), extent.len)).collect(),
        }
    }

    /// Reads all segments, several concurrently. Within a segment reads are sequential, since each frame gives the
    /// offset of the next frame.
    pub fn read_all(&self, segments: &[SegmentExtent]) -> Result<RecentRecords> {
        let next_position = AtomicUsize::new(0);
        let results: Vec<OnceLock<Result<RecentRecords>>> = segments.iter().map(|_| OnceLock::new()).collect();
        thread::scope(|scope| {
            for _ in 0..READER_THREADS.min(segments.len()) {
                scope.spawn(|| {
                    loop {
                        let position = next_position.fetch_add(1, Ordering::Relaxed);
                        let Some((extent, result)) = segments.get(position).zip(results.get(position)) else { break };
                        let _ = result.set(self.read_segment(position, *extent));
                    }
                });
            }
        });
        let mut all = RecentRecords::default();
        for result in results.into_iter().filter_map(OnceLock::into_inner) {
            let RecentRecords { frames, records } = result?;
            all.frames.extend(frames);
            all.records.extend(records);
        }
        Ok(all)
    }

    fn read_segment(&self, position: usize, extent: SegmentExtent) -> Result<RecentRecords> {
        let mut recent = RecentRecords::default();
        let covered = self.covered.get(&(extent.epoch, extent.number)).copied().unwrap_or(0);
        if covered >= extent.len {
            return Ok(recent);
        }
        let open_segment = self.open_segments.get(self.store, extent)?;
        let begin = covered.next_multiple_of(crate::format::ALIGNMENT);
        for_each_frame(self.store, extent, &open_segment, begin, |offset, directory| {
            if directory.header.kind == Kind::Pages {
                if directory.header.number > self.checkpoint {
                    return Ok(());
                }
                recent.frames.push(RecentFrame { number: directory.header.number, segment: position, offset });
            }
            let pages = directory.pages().filter(|page| page.number <= self.checkpoint);
            recent.records.extend(pages.filter_map(|page| self.valid_record(position, &page)));
            Ok(())
        })?;
        Ok(recent)
    }

    /// Returns the record of a page that the checkpoint has.
    fn valid_record(&self, segment: usize, listed: &ListedPage) -> Option<OverlayRecord> {
        let (position, block) =
            self.blocks.iter().enumerate().find(|(_, block)| block.stored.number == listed.record.block)?;
        let page = listed.record.page;
        if u64::from(page) >= block.pages || block.stored.is_void(page.into(), listed.number) {
            return None;
        }
        Some(OverlayRecord {
            location: Location::new(segment, listed.offset, listed.record.len),
            digest: listed.record.digest,
            number: listed.number,
            page,
            block: position as u32,
        })
    }
}

/// Records that are newer than the base index, sorted by part of a block. Which of a part's records are valid is
/// determined when a page of the part is first looked up.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    records: Vec<OverlayRecord>,
    /// Positions in `records`, sorted by part, and within a part in the order in which they were read.
    order: Vec<u32>,
    /// Start of each part in `order`; the last value is the end.
    starts: Vec<u32>,
    /// For each page of a part: position in `records` plus one, or 0.
    parts: Vec<OnceLock<Box<[u32]>>>,
}

impl Overlay {
    pub fn new(records: Vec<OverlayRecord>, blocks: &[IndexBlock]) -> Self {
        let part_of = |record: &OverlayRecord| {
            let first_part = blocks.get(record.block as usize).map_or(0, |block| block.first_part);
            first_part + record.page as usize / PART_PAGES as usize
        };
        let parts = blocks.last().map_or(0, |block| block.first_part + base::parts(block.pages) as usize);
        let starts = count_starts(records.iter().map(part_of), parts);
        // A counting sort: `next` has for each part the position in `order` of its next record.
        let mut next = starts.clone();
        let mut order = vec![0u32; records.len()];
        for (position, record) in records.iter().enumerate() {
            if let Some(next) = next.get_mut(part_of(record)) {
                if let Some(ordered) = order.get_mut(*next as usize) {
                    *ordered = position as u32;
                }
                *next += 1;
            }
        }
        Self { records, order, starts, parts: (0..parts).map(|_| OnceLock::new()).collect() }
    }

    /// Finds the valid record of a page.
    pub fn find(&self, block: &IndexBlock, page: u64) -> Option<&OverlayRecord> {
        let part = block.first_part + (page / PART_PAGES) as usize;
        let positions = self.parts.get(part)?.get_or_init(|| self.valid_records_of_part(part));
        let position = positions.get((page % PART_PAGES) as usize)?.checked_sub(1)?;
        self.records.get(position as usize)
    }

    /// Returns the values of [`Overlay::parts`] for a part.
    fn valid_records_of_part(&self, part: usize) -> Box<[u32]> {
        let begin = self.starts.get(part).map_or(0, |start| *start as usize);
        let end = self.starts.get(part + 1).map_or(begin, |start| *start as usize);
        let positions = self.order.get(begin..end).unwrap_or_default();
        if positions.is_empty() {
            return Box::default();
        }
        let mut valid = vec![0u32; PART_PAGES as usize];
        for position in positions {
            let Some(record) = self.records.get(*position as usize) else { continue };
            let Some(newest) = valid.get_mut(record.page as usize % PART_PAGES as usize) else { continue };
            // If a checkpoint has two records of a page, the later record is valid. Segments are read in the order of
            // their numbers.
            let previous = newest.checked_sub(1).and_then(|previous| self.records.get(previous as usize));
            if previous.is_none_or(|previous| record.number >= previous.number) {
                *newest = position + 1;
            }
        }
        valid.into_boxed_slice()
    }
}

/// Returns the number of values below each part, and the number of all values at the end.
fn count_starts(part_of_each: impl Iterator<Item = usize>, parts: usize) -> Vec<u32> {
    let mut starts = vec![0u32; parts + 1];
    for part in part_of_each {
        if let Some(count) = starts.get_mut(part + 1) {
            *count += 1;
        }
    }
    let mut sum = 0;
    for start in &mut starts {
        sum += *start;
        *start = sum;
    }
    starts
}
