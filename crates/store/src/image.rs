//! Reads a checkpoint of a store in a directory.

use crate::error::{BadPage, Result, StoreError};
use crate::format::base::IndexEntry;
use crate::format::entry::{Entry, Kind, Section};
use crate::format::manifest::{Manifest, Table};
use crate::format::names;
use crate::format::page::unpack;
use crate::format::segment::{DIRECTORY_ROOM, Directory};
use crate::home::Home;
use crate::index::Index;
use crate::log;
use crate::segments::Files;
use crate::types::{Block, CheckpointInfo};
use rekindle_pages::{BlockId, DirtySet, Page, PageId, PageNo};
use std::sync::{Arc, PoisonError, RwLock};

/// Limit of a combined read, in bytes.
const READ: u64 = 1 << 20;
/// Limit of unneeded bytes between two pages whose reads are combined.
const GAP: u64 = 16 << 10;

/// A checkpoint of a store in a directory.
#[derive(Debug)]
pub struct LocalImage {
    home: Home,
    entry: Entry,
    table: Table,
    files: Files,
    /// `None` until the first page is read, if the image was opened lazily.
    index: RwLock<Option<Arc<Index>>>,
}

/// Reads the block table of a checkpoint from its log entry.
pub(crate) fn table(home: &Home, entry: &Entry) -> Result<Table> {
    let bytes = log::section(home, entry, Section::Checkpoint)?;
    Table::decode(&bytes).map_err(|flaw| StoreError::flaw(home.name(), &names::entry(entry.slot), flaw))
}

/// Describes a checkpoint from its log entry and block table.
pub(crate) fn describe(entry: &Entry, table: &Table) -> CheckpointInfo {
    CheckpointInfo {
        number: table.number,
        epoch: entry.epoch,
        time_us: table.time_us,
        blocks: table.blocks.iter().map(|stored| stored.block.clone()).collect(),
        pages: table.pages,
        bytes: table.bytes + entry.len(),
        devices: entry.section_len(Section::Devices),
    }
}

/// Finds the newest manifest, and the log entry of checkpoint `at` or of the newest checkpoint. A damaged entry at the
/// end of the log is skipped only if `at` is an older checkpoint; the damage is then returned as the third value.
pub(crate) fn select(home: &Home, at: Option<u64>) -> Result<(Manifest, Entry, Option<StoreError>)> {
    let (tail_entry, manifest, passed) = match log::tail(home) {
        Ok(tail) => match tail.state {
            Some((entry, manifest)) => (Some(entry), manifest, None),
            None => (None, Manifest::default(), None),
        },
        Err(e @ (StoreError::Damaged { .. } | StoreError::Missing { .. })) => {
            match at.and_then(|at| older_manifest(home, at)) {
                Some(manifest) => (None, manifest, Some(e)),
                None => return Err(e),
            }
        }
        Err(e) => return Err(e),
    };
    let Some(newest) = manifest.newest() else {
        return Err(StoreError::Empty { store: home.name().into(), vm: home.vm.name.clone() });
    };
    let asked = at.unwrap_or(newest.number);
    let Some(kept) = manifest.kept.iter().find(|kept| kept.number == asked).copied() else {
        return Err(StoreError::NoSuchCheckpoint { store: home.name().into(), asked, have: manifest.numbers() });
    };
    if let Some(entry) = tail_entry.filter(|entry| entry.slot == kept.slot) {
        return Ok((manifest, entry, passed));
    }
    let entry = kept_entry(home, &manifest, kept)?;
    Ok((manifest, entry, passed))
}

/// Reads the log entry of a checkpoint that the manifest keeps.
pub(crate) fn kept_entry(home: &Home, manifest: &Manifest, kept: crate::format::manifest::Kept) -> Result<Entry> {
    let entry = log::read(home, kept.slot).map_err(|e| match e {
        e if e.is_not_found() => {
            let needed = format!("it is checkpoint {} (kept are {:?})", kept.number, manifest.numbers());
            StoreError::Missing { store: home.name().into(), file: names::entry(kept.slot), needed }
        }
        other => other,
    })?;
    if entry.kind != Kind::Checkpoint || (kept.footer != 0 && kept.footer != entry.footer) {
        let structure = crate::format::Structure::EntryFooter;
        let flaw = crate::format::Flaw::bad(structure, 0, "it is not the entry that the manifest lists");
        return Err(StoreError::flaw(home.name(), &names::entry(kept.slot), flaw));
    }
    Ok(entry)
}

/// Returns whether an error is only about a checkpoint or file that the newest manifest does not list any more. While a
/// process reads a store, the owner of the store may replace files.
pub(crate) fn is_replaced(home: &Home, e: &StoreError) -> bool {
    let newest = || Some(log::tail(home).ok()?.state?.1);
    match e {
        StoreError::NoSuchCheckpoint { asked, .. } => {
            newest().is_some_and(|manifest| !manifest.numbers().contains(asked))
        }
        StoreError::Missing { file, .. } => newest().is_some_and(|manifest| !needs(&manifest, file)),
        StoreError::Io { file, .. } if e.is_not_found() => newest().is_some_and(|manifest| !needs(&manifest, file)),
        _ => false,
    }
}

fn needs(manifest: &Manifest, file: &str) -> bool {
    let entries = manifest.kept.iter().map(|kept| names::entry(kept.slot));
    let segments = manifest.segments.iter().map(|extent| names::segment(extent.epoch, extent.number));
    entries.chain(segments).any(|needed| needed == file)
}

/// Finds the newest readable manifest that keeps checkpoint `at`.
fn older_manifest(home: &Home, at: u64) -> Option<Manifest> {
    log::slots(home).ok()?.0.into_iter().rev().find_map(|slot| {
        let entry = log::read(home, slot).ok().filter(|entry| entry.kind != Kind::Claim)?;
        log::manifest(home, &entry).ok().filter(|manifest| manifest.numbers().contains(&at))
    })
}

impl LocalImage {
    /// Opens checkpoint `at` of a store, or the newest, without building the index of pages. The first read of a page
    /// builds the index, and reports damage to it.
    pub(crate) fn open_lazily(home: Home, at: Option<u64>) -> Result<Self> {
        let (_, entry, passed) = select(&home, at)?;
        let table = table(&home, &entry)?;
        if let Some(damage) = passed {
            tracing::warn!("{damage}; checkpoint {} is opened without it", table.number);
        }
        Ok(Self { home, entry, table, files: Files::default(), index: RwLock::new(None) })
    }

    /// Opens checkpoint `at` of a store, or the newest.
    pub(crate) fn open(home: Home, at: Option<u64>) -> Result<Self> {
        let mut tries = 0;
        loop {
            tries += 1;
            let (manifest, entry, passed) = match select(&home, at) {
                Err(StoreError::Missing { .. }) if tries < 3 => continue,
                other => other?,
            };
            let table = table(&home, &entry)?;
            let files = Files::default();
            match (Index::build(&home, &files, &manifest, &table, true), passed) {
                // A writer may have replaced the manifest and removed a file that the old manifest lists.
                (Err(StoreError::Missing { .. }), None) if tries < 3 => {}
                // The older manifest lists a file that was removed after the damaged entry replaced the manifest.
                (Err(StoreError::Missing { .. }), Some(damage)) => return Err(damage),
                (Err(e), _) => return Err(e),
                (Ok(index), passed) => {
                    if let Some(damage) = passed {
                        tracing::warn!("{damage}; checkpoint {} is opened without it", table.number);
                    }
                    return Ok(Self { home, entry, table, files, index: RwLock::new(Some(Arc::new(index))) });
                }
            }
        }
    }

    pub(crate) fn home(&self) -> &Home {
        &self.home
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// Returns whether the index uses a base index.
    #[must_use]
    pub fn has_base(&self) -> bool {
        self.index().is_ok_and(|index| index.has_base())
    }

    #[must_use]
    pub fn info(&self) -> CheckpointInfo {
        describe(&self.entry, &self.table)
    }

    /// Reads a section of the checkpoint's log entry.
    pub(crate) fn section(&self, section: Section) -> Result<Vec<u8>> {
        log::section(&self.home, &self.entry, section)
    }

    pub(crate) fn index(&self) -> Result<Arc<Index>> {
        let found = self.index.read().unwrap_or_else(PoisonError::into_inner).clone();
        found.map_or_else(|| self.renew(None, true), Ok)
    }

    /// Rebuilds the index after damaged or missing data was found through it. `seen` is the index that was used.
    fn renew(&self, seen: Option<&Arc<Index>>, with_base: bool) -> Result<Arc<Index>> {
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(now) = index.as_ref().filter(|now| seen.is_none_or(|seen| !Arc::ptr_eq(now, seen))) {
            return Ok(now.clone());
        }
        let (manifest, entry, _) = select(&self.home, Some(self.table.number))?;
        if entry.footer != self.entry.footer {
            let (asked, have) = (self.table.number, manifest.numbers());
            return Err(StoreError::NoSuchCheckpoint { store: self.home.name().into(), asked, have });
        }
        let built = Arc::new(Index::build(&self.home, &self.files, &manifest, &self.table, with_base)?);
        *index = Some(built.clone());
        Ok(built)
    }

    /// Calls `work` with the index. Calls it again with a new index if the first index is outdated or damaged.
    pub(crate) fn with_index<T>(&self, mut work: impl FnMut(&Index) -> Result<T>) -> Result<T> {
        let index = self.index()?;
        let error = match work(&index) {
            Err(e @ StoreError::Missing { .. }) => e,
            Err(e @ StoreError::Damaged { .. }) if index.has_base() => {
                tracing::warn!("{e}; rebuilding the index from the segments' directories");
                let renewed = self.renew(Some(&index), false)?;
                return work(&renewed);
            }
            other => return other,
        };
        // Either the writer has moved pages and removed the old segment, or the file is really missing.
        match self.renew(Some(&index), true) {
            Ok(renewed) => work(&renewed),
            Err(e @ StoreError::NoSuchCheckpoint { .. }) => Err(e),
            Err(_) => Err(error),
        }
    }

    fn block(&self, block: BlockId) -> Result<&Block> {
        self.table
            .blocks
            .get(block.0)
            .map(|stored| &stored.block)
            .ok_or_else(|| self.no_page(format!("number {block}"), PageNo(0)))
    }

    fn no_page(&self, block: String, page: PageNo) -> StoreError {
        let (store, checkpoint) = (self.home.name().into(), self.table.number);
        StoreError::NoSuchPage { store, checkpoint, block, page: page.0 }
    }

    fn bad_page(&self, index: &Index, (block, page): PageId, spot: IndexEntry, what: &str) -> StoreError {
        let extent = index.segments.get(spot.place.segment());
        StoreError::from(Box::new(BadPage {
            store: self.home.name().into(),
            vm: self.home.vm.name.clone(),
            checkpoint: self.table.number,
            block: self.block(block).map(|block| block.id.clone()).unwrap_or_default(),
            page: page.0,
            file: extent.map(|extent| names::segment(extent.epoch, extent.number)).unwrap_or_default(),
            at: spot.place.offset(),
            what: what.into(),
        }))
    }

    /// Looks up pages in the index, in the given order.
    pub(crate) fn spots(&self, index: &Index, pages: &[PageId]) -> Result<Vec<IndexEntry>> {
        let spot = |&(block, page): &PageId| {
            if page.0 >= self.block(block)?.pages() {
                return Err(self.no_page(self.block(block)?.id.clone(), page));
            }
            index.find(&self.home, (block, page))
        };
        pages.iter().map(spot).collect()
    }

    /// Reads the stored bytes and the digest of each page, in the given order. Combines reads that are close together.
    pub(crate) fn read_stored(&self, pages: &[PageId]) -> Result<Vec<(u64, Vec<u8>)>> {
        self.with_index(|index| {
            let spots = self.spots(index, pages)?;
            let mut order: Vec<(u64, usize)> = spots
                .iter()
                .enumerate()
                .filter(|(_, spot)| spot.place.len() != 0)
                .map(|(n, spot)| (spot.place.0, n))
                .collect();
            order.sort_unstable();
            let mut stored: Vec<(u64, Vec<u8>)> = spots.iter().map(|spot| (spot.digest, Vec::new())).collect();
            let mut rest = order.as_slice();
            while let Some(&(_, first)) = rest.first() {
                let Some(begin) = spots.get(first).map(|spot| spot.place) else { break };
                let mut end = begin.offset() + u64::from(begin.len());
                let mut taken = 1;
                for (_, n) in rest.iter().skip(1) {
                    let Some(place) = spots.get(*n).map(|spot| spot.place) else { break };
                    let together = place.segment() == begin.segment()
                        && place.offset() <= end + GAP
                        && place.offset() + u64::from(place.len()) - begin.offset() <= READ;
                    if !together {
                        break;
                    }
                    end = end.max(place.offset() + u64::from(place.len()));
                    taken += 1;
                }
                let (group, others) = rest.split_at(taken);
                rest = others;
                let Some(extent) = index.segments.get(begin.segment()) else { continue };
                let file = self.files.get(&self.home, *extent)?;
                let name = names::segment(extent.epoch, extent.number);
                let bytes = self.home.read_at(&file, &name, begin.offset(), (end - begin.offset()) as usize)?;
                for &(_, n) in group {
                    let (Some(spot), Some((_, content)), Some(id)) = (spots.get(n), stored.get_mut(n), pages.get(n))
                    else {
                        continue;
                    };
                    let at = (spot.place.offset() - begin.offset()) as usize;
                    let part = bytes.get(at..at + usize::from(spot.place.len()));
                    let part = part.ok_or_else(|| self.bad_page(index, *id, *spot, "the file ends before it"))?;
                    content.extend_from_slice(part);
                }
            }
            Ok(stored)
        })
    }

    /// Reads one page with one read of exactly its stored bytes, and checks its digest.
    ///
    /// # Errors
    /// [`StoreError::Page`] if the page is damaged; [`StoreError::NoSuchPage`]; [`StoreError::NoSuchCheckpoint`] if the
    /// store does not keep the checkpoint any more.
    pub fn read_page(&self, id: PageId, content: &mut Page) -> Result<()> {
        self.with_index(|index| {
            let spot = self.spots(index, &[id])?.first().copied().unwrap_or_default();
            let mut buffer = [0; rekindle_pages::PAGE_SIZE];
            let stored = buffer.get_mut(..spot.place.len().into()).unwrap_or_default();
            if !stored.is_empty() {
                let Some(extent) = index.segments.get(spot.place.segment()) else {
                    return Err(self.bad_page(index, id, spot, "its segment is not known"));
                };
                let file = self.files.get(&self.home, *extent)?;
                let name = names::segment(extent.epoch, extent.number);
                let found = file.read_at(stored, spot.place.offset()).map_err(self.home.failed(&name, "reading"))?;
                if found != stored.len() {
                    return Err(self.bad_page(index, id, spot, "the file ends before it"));
                }
            }
            unpack(self.home.digester(), stored, spot.digest, content)
                .map_err(|what| self.bad_page(index, id, spot, what))
        })
    }

    /// Returns the digests of pages, in the given order.
    ///
    /// # Errors
    /// Errors of [`LocalImage::read_page`].
    pub fn digests(&self, pages: &[PageId]) -> Result<Vec<u64>> {
        self.with_index(|index| Ok(self.spots(index, pages)?.iter().map(|spot| spot.digest).collect()))
    }

    /// Reads pages of any blocks, and passes them to `take` in the given order.
    ///
    /// # Errors
    /// Errors of [`LocalImage::read_page`]. The pages before the failed page were passed to `take`.
    pub fn read_many(&self, pages: &[PageId], mut take: impl FnMut(PageId, &Page)) -> Result<()> {
        let mut content = [0; rekindle_pages::PAGE_SIZE];
        // Few pages at a time, to use little memory.
        for some in pages.chunks(512) {
            for (id, (digest, stored)) in some.iter().zip(self.read_stored(some)?) {
                unpack(self.home.digester(), &stored, digest, &mut content).or_else(|what| {
                    let index = self.index()?;
                    let spot = self.spots(&index, &[*id]).ok().and_then(|spots| spots.first().copied());
                    Err(self.bad_page(&index, *id, spot.unwrap_or_default(), what))
                })?;
                take(*id, &content);
            }
        }
        Ok(())
    }

    /// Iterates over the nonzero pages, the most recently written first, because these are likely the guest's working
    /// set.
    ///
    /// # Errors
    /// Errors of building the index, if the image was opened lazily.
    pub fn hot(&self) -> Result<Hot<'_>> {
        let index = self.index()?;
        let seen = (0..index.blocks()).map(|_| DirtySet::default()).collect();
        Ok(Hot { image: self, index, seen, frame: 0, ready: Vec::new(), rest: (BlockId(0), PageNo(0)) })
    }
}

/// Nonzero pages of an image, the most recently written first.
#[derive(Debug)]
pub struct Hot<'a> {
    image: &'a LocalImage,
    index: Arc<Index>,
    seen: Vec<DirtySet>,
    frame: usize,
    ready: Vec<PageId>,
    rest: PageId,
}

impl Hot<'_> {
    /// Loads the pages of the next frame into `ready`, in reverse, because `pop` takes pages from the end.
    fn load(&mut self, frame: crate::index::Recent) {
        let Some(extent) = self.index.segments.get(frame.segment).copied() else { return };
        let home = &self.image.home;
        let Ok(file) = self.image.files.get(home, extent) else { return };
        let Ok(bytes) = home.read_at(&file, "", frame.at, DIRECTORY_ROOM) else { return };
        // A frame affects only the order. The pages of an unreadable frame come with the rest; reading such a page
        // returns the error.
        let Ok(directory) = Directory::decode(&bytes, frame.at) else { return };
        let position = |number| self.image.table.blocks.iter().position(|stored| stored.number == number).map(BlockId);
        let pages: Vec<_> = directory
            .pages()
            .filter(|found| found.record.len != 0)
            .filter_map(|found| Some((position(found.record.block)?, PageNo(found.record.page.into()))))
            .collect();
        self.ready.extend(pages.into_iter().rev());
    }

    /// Returns whether a page is nonzero and was not returned before.
    fn wanted(&mut self, (block, page): PageId) -> bool {
        self.index.pages(block).is_some_and(|pages| page.0 < pages)
            && self.seen.get_mut(block.0).is_some_and(|seen| seen.insert(page))
            // A page whose lookup fails is returned, so that reading it returns the error.
            && self.index.find(&self.image.home, (block, page)).map_or(true, |spot| spot.place.len() != 0)
    }
}

impl Iterator for Hot<'_> {
    type Item = PageId;

    fn next(&mut self) -> Option<PageId> {
        loop {
            while let Some(id) = self.ready.pop() {
                if self.wanted(id) {
                    return Some(id);
                }
            }
            if let Some(frame) = self.index.recent.get(self.frame).copied() {
                self.frame += 1;
                self.load(frame);
                continue;
            }
            let (block, page) = self.rest;
            let pages = self.index.pages(block)?;
            self.rest = if page.0 < pages { (block, page.next()) } else { (BlockId(block.0 + 1), PageNo(0)) };
            if page.0 < pages && self.wanted((block, page)) {
                return Some((block, page));
            }
        }
    }
}
