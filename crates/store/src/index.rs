//! Where every page of one checkpoint is.
//!
//! The base index covers what there was when it was written; the directories of what came later lie over it. Without a
//! base that fits, the directories alone give the same.

use crate::error::{Result, StoreError};
use crate::format::base::{self, Base, Place, Spot};
use crate::format::manifest::{Extent, Manifest, StoredBlock, Table};
use crate::format::names;
use crate::format::segment::Kind;
use crate::format::{Flaw, Structure};
use crate::home::Home;
use crate::segments::{Files, frames, open_checked};
use crate::sparse::Sparse;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// A base index on the disk, loaded part by part.
#[derive(Debug)]
struct Loaded {
    name: String,
    file: Arc<dyn crate::disk::DiskFile>,
    base: Base,
    /// For each position in its segment table, that in the manifest's, if it is still there.
    segments: Vec<Option<usize>>,
    parts: Vec<OnceLock<Box<[Spot]>>>,
}

/// What lies over the base: place, digest, checkpoint number; number 0 for nothing.
type Over = [u64; 3];

#[derive(Debug)]
struct Block {
    stored: StoredBlock,
    pages: u64,
    over: Sparse<Over>,
    /// First part and pages in the base.
    base: Option<(usize, u64)>,
}

/// Frames of one checkpoint that lie over the base, for the order in which pages are fetched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recent {
    pub number: u64,
    pub segment: usize,
    pub at: u64,
}

/// Where every page of one checkpoint is.
#[derive(Debug)]
pub(crate) struct Index {
    /// The checkpoint.
    pub number: u64,
    /// The segments that places refer to, by position.
    pub segments: Vec<Extent>,
    /// Frames that were written since the base, newest first.
    pub recent: Vec<Recent>,
    /// Pages in directories that the base does not cover.
    pub uncovered: u64,
    blocks: Vec<Block>,
    base: Option<Loaded>,
}

impl Index {
    /// That of the checkpoint of `table`, with what `manifest` says counts. Without `with_base` from the directories alone.
    ///
    /// # Errors
    /// When a segment is missing or its directories are damaged.
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
        for (position, stored) in table.blocks.iter().enumerate() {
            by_number.insert(stored.number, position);
            let pages = stored.block.pages();
            let base = in_base.get(&stored.number).copied();
            blocks.push(Block { stored: stored.clone(), pages, over: Sparse::new(pages), base });
        }
        let from = base.as_ref().map_or(0, |loaded| loaded.base.from);
        let covered: HashMap<(u64, u64), u64> = base
            .iter()
            .flat_map(|loaded| &loaded.base.segments)
            .map(|extent| ((extent.epoch, extent.number), extent.len))
            .collect();
        let mut recent = Vec::new();
        let mut uncovered = 0;
        for (position, extent) in segments.iter().enumerate() {
            let begin = covered.get(&(extent.epoch, extent.number)).copied().unwrap_or(0);
            if begin >= extent.len {
                continue;
            }
            let file = files.get(home, *extent)?;
            frames(home, *extent, &file, begin.next_multiple_of(crate::format::ALIGNMENT), |at, directory| {
                if directory.header.kind == Kind::Pages {
                    if directory.header.number > table.number {
                        return Ok(());
                    }
                    recent.push(Recent { number: directory.header.number, segment: position, at });
                }
                uncovered += u64::from(directory.header.count);
                for found in directory.pages().filter(|found| found.number <= table.number) {
                    let Some(block) = by_number.get(&found.record.block).and_then(|n| blocks.get_mut(*n)) else {
                        continue;
                    };
                    if block.stored.is_void(found.record.page.into(), found.number) {
                        continue;
                    }
                    let Some(over) = block.over.get_mut(found.record.page.into()) else { continue };
                    // Of two of one checkpoint the later one counts. Segments come in the order of their numbers.
                    if found.number >= over[2] {
                        let place = Place::new(position, found.offset, found.record.len);
                        *over = [place.0, found.record.digest, found.number];
                    }
                }
                Ok(())
            })?;
        }
        recent.sort_by_key(|frame| std::cmp::Reverse((frame.number, frame.segment, frame.at)));
        recent.retain(|frame| frame.number > from);
        Ok(Self { number: table.number, segments, recent, uncovered, blocks, base })
    }

    /// Whether a base index helped.
    pub fn has_base(&self) -> bool {
        self.base.is_some()
    }

    /// Pages of block `block`, by position in the table.
    pub fn pages(&self, block: usize) -> Option<u64> {
        self.blocks.get(block).map(|block| block.pages)
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Where a page is. A page that nothing was stored of, and one beyond the block, is the default, which means zero.
    ///
    /// # Errors
    /// When a part of the base index is damaged: build it anew without. The error says what is wrong with it.
    pub fn find(&self, home: &Home, block: usize, page: u64) -> Result<Spot> {
        let Some(block) = self.blocks.get(block) else { return Ok(Spot::default()) };
        let [place, digest, number] = block.over.get(page);
        let over = Spot { place: Place(place), digest };
        let Some(base) = &self.base else { return Ok(over) };
        if number > base.base.from {
            return Ok(over);
        }
        let covers = |(_, pages): &(usize, u64)| page < *pages && !block.stored.is_void(page, base.base.from);
        let Some((first, _)) = block.base.filter(covers) else { return Ok(over) };
        let part = base.part(home, first, page / base::PART_PAGES, block.base.map_or(0, |(_, pages)| pages))?;
        let spot = part.get((page % base::PART_PAGES) as usize).copied().unwrap_or_default();
        // A page that was moved since: content of the same page with the same digest is the same.
        if number != 0 && spot.place.is_stored() && spot.digest == digest && over.place.len() == spot.place.len() {
            return Ok(over);
        }
        if spot.digest == 0 && !spot.place.is_stored() {
            return Ok(spot);
        }
        match base.segments.get(spot.place.segment()) {
            Some(Some(segment)) => {
                let place = Place::new(*segment, spot.place.offset(), spot.place.len());
                Ok(Spot { place, digest: spot.digest })
            }
            _ => {
                let flaw = Flaw::bad(Structure::BasePart, 0, "it refers to a segment that is gone");
                Err(StoreError::flaw(home.name(), &base.name, flaw))
            }
        }
    }
}

impl Loaded {
    fn part(&self, home: &Home, first: usize, part: u64, pages: u64) -> Result<&[Spot]> {
        let number = first + part as usize;
        let flawed = |flaw| StoreError::flaw(home.name(), &self.name, flaw);
        let none = Flaw::bad(Structure::BaseTrailer, 0, "it has not as many parts as its blocks need");
        let (slot, sum) = self.parts.get(number).zip(self.base.sums.get(number)).ok_or_else(|| flawed(none))?;
        if let Some(loaded) = slot.get() {
            return Ok(loaded);
        }
        // Parts are as long as a part can be, but for the last one of each block.
        let before: u64 = self.offset_of(number);
        let in_part = (pages - part * base::PART_PAGES).min(base::PART_PAGES);
        let bytes = home.read_at(&self.file, &self.name, before, in_part as usize * base::SPOT_LEN)?;
        let spots = base::decode_part(&bytes, *sum, before).map_err(flawed)?;
        Ok(slot.get_or_init(|| spots))
    }

    /// Where part `number` begins: the parts follow one another, shorter ones as they are.
    fn offset_of(&self, number: usize) -> u64 {
        let mut at = base::HEADER_LEN;
        let mut first = 0;
        for (_, pages) in &self.base.blocks {
            let parts = base::parts(*pages) as usize;
            if number < first + parts {
                return at + (number - first) as u64 * base::PART_PAGES * base::SPOT_LEN as u64;
            }
            first += parts;
            at += pages * base::SPOT_LEN as u64;
        }
        at
    }
}

/// The newest base index that is good for checkpoint `number`. One that is damaged is passed over with a warning.
fn find_base(home: &Home, manifest: &Manifest, number: u64) -> Option<Loaded> {
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
            Err(e) => tracing::warn!("{e}; the index is made from the directories instead"),
        }
    }
    None
}

fn load(home: &Home, manifest: &Manifest, number: u64, name: &str, len: u64) -> Result<Option<Loaded>> {
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
        return Err(flawed(Flaw::bad(Structure::BaseHeader, 0, "the file is shorter than it says")));
    }
    let trailer = home.read_at(&file, name, header.trailer_at, header.trailer_len as usize)?;
    let base = Base::decode(&header, &trailer).map_err(flawed)?;
    let spots: Option<u64> = base.blocks.iter().try_fold(0u64, |sum, (_, pages)| sum.checked_add(*pages));
    let ends = spots.and_then(|spots| spots.checked_mul(base::SPOT_LEN as u64)?.checked_add(base::HEADER_LEN));
    if ends != Some(header.trailer_at) {
        return Err(flawed(Flaw::bad(
            Structure::BaseTrailer,
            header.trailer_at,
            "its parts are not as long as its blocks",
        )));
    }
    let there: HashMap<(u64, u64), usize> =
        manifest.segments.iter().enumerate().map(|(n, extent)| ((extent.epoch, extent.number), n)).collect();
    let segments = base.segments.iter().map(|extent| there.get(&(extent.epoch, extent.number)).copied()).collect();
    let parts = base.sums.iter().map(|_| OnceLock::new()).collect();
    Ok(Some(Loaded { name: name.to_owned(), file, base, segments, parts }))
}

/// Check that every base index of the store can be read, all of it; the flaws of those that cannot.
pub(crate) fn check_bases(home: &Home, manifest: &Manifest) -> Result<Vec<StoreError>> {
    let mut flaws = Vec::new();
    let listed = home.disk.list(names::INDEX).map_err(home.failed(names::INDEX, "looking into the directory"))?;
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
        flaws.extend(checked.err());
    }
    Ok(flaws)
}

/// Check the header of a segment and all directories in it.
pub(crate) fn check_segment(home: &Home, extent: Extent) -> Result<u64> {
    let mut pages = 0;
    let file = open_checked(home, extent)?;
    frames(home, extent, &file, 0, |_, directory| {
        pages += u64::from(directory.header.count);
        Ok(())
    })?;
    Ok(pages)
}
