//! Reads a checkpoint of a store.
//!
//! **Problem.** A page can be in any segment that the store has, and the owner of the store may compact it at any time:
//! it moves pages to new segments and removes the old ones. So a missing file may only mean that what was read before
//! is outdated. Then the manifest is read and the index is built again (`LocalImage::open`,
//! `LocalImage::with_index`).
//!
//! **Terms** (`docs/store-format.md`):
//!
//! | term | what it is |
//! |---|---|
//! | block | one of the guest's RAM blocks |
//! | segment | file with pages: a sequence of frames |
//! | frame | up to 1024 pages, after a *directory* that lists them |
//! | log entry | commits a checkpoint |
//! | manifest | part of a log entry: all valid checkpoints, and the segments with their extents |
//! | extent | name of a segment, and how many of its bytes count |
//! | table | part of a log entry: the RAM blocks of the checkpoint |
//! | index | location and digest of each page, built from the directories of all segments |
//! | base index | file with the index as of an older checkpoint; only the directories since then must be read, too |

use crate::checkpoints::{SelectedCheckpoint, describe, read_table};
use crate::directory::StoreDirectory;
use crate::error::{BadPage, Result, StoreError};
use crate::format::base::{IndexEntry, Location};
use crate::format::entry::{Entry, Section};
use crate::format::manifest::{CheckpointTable, SegmentExtent};
use crate::format::names;
use crate::format::page::{StoredPage, unpack};
use crate::format::segment::{Directory, MAX_DIRECTORY_BYTES, MAX_STORED_PAGE_BYTES};
use crate::index::{BaseIndexUse, Index, RecentFrame};
use crate::log;
use crate::objects::schedule::Need;
use crate::objects::waiting::{may_wait, need_without_waiting, without_waiting};
use crate::segments::OpenSegments;
use crate::types::{Block, CheckpointInfo};
use rekindle_pages::{BlockId, DirtySet, PAGE_SIZE, Page, PageId, PageNo};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError, RwLock};

/// Limit of a combined read, in bytes.
const MAX_READ_BYTES: u64 = 1 << 20;
/// Limit of unneeded bytes between two pages whose reads are combined.
const MAX_GAP_BYTES: u64 = 16 << 10;
/// Number of pages whose stored bytes are in memory at a time: at most 2 MiB.
const PAGES_PER_READ: usize = 512;
/// Attempts to open a checkpoint while the owner replaces files. A file that is missing at the last attempt is an
/// error.
const MAX_OPEN_ATTEMPTS: usize = 3;

/// A checkpoint of a store.
#[derive(Debug)]
pub struct LocalImage {
    store: StoreDirectory,
    entry: Entry,
    table: CheckpointTable,
    open_segments: OpenSegments,
    /// `None` until the first page is read, if the image was opened lazily.
    index: RwLock<Option<Arc<Index>>>,
}

impl LocalImage {
    /// Opens checkpoint `number` of a store, or the newest, without building the index of pages. The first read of a
    /// page builds the index, and reports damage to it.
    pub(crate) fn open_lazily(store: StoreDirectory, number: Option<u64>) -> Result<Self> {
        let selected = SelectedCheckpoint::find(&store, number)?;
        let table = read_table(&store, &selected.entry)?;
        selected.warn_of_skipped_damage(table.number);
        let open_segments = OpenSegments::default();
        Ok(Self { store, entry: selected.entry, table, open_segments, index: RwLock::new(None) })
    }

    /// Opens checkpoint `number` of a store, or the newest.
    pub(crate) fn open(store: StoreDirectory, number: Option<u64>) -> Result<Self> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let is_last_attempt = attempts == MAX_OPEN_ATTEMPTS;
            let selected = match SelectedCheckpoint::find(&store, number) {
                Err(StoreError::Missing { .. }) if !is_last_attempt => continue,
                result => result?,
            };
            let table = read_table(&store, &selected.entry)?;
            let open_segments = OpenSegments::default();
            let built = Index::build(&store, &open_segments, &selected.manifest, &table, BaseIndexUse::IfUsable);
            let index = match built {
                Ok(index) => index,
                Err(e @ StoreError::Missing { .. }) => match selected.skipped_damage {
                    // The older manifest lists a file that was removed after the damaged entry replaced the manifest.
                    Some(damage) => return Err(damage),
                    // A writer may have replaced the manifest and removed a file that the old manifest lists.
                    None if !is_last_attempt => continue,
                    None => return Err(e),
                },
                Err(e) => return Err(e),
            };
            selected.warn_of_skipped_damage(table.number);
            let index = RwLock::new(Some(Arc::new(index)));
            return Ok(Self { store, entry: selected.entry, table, open_segments, index });
        }
    }

    pub(crate) fn store(&self) -> &StoreDirectory {
        &self.store
    }

    pub(crate) fn table(&self) -> &CheckpointTable {
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

    pub(crate) fn footer(&self) -> u64 {
        self.entry.footer
    }

    /// Reads a section of the checkpoint's log entry.
    pub(crate) fn section(&self, section: Section) -> Result<Vec<u8>> {
        log::section(&self.store, &self.entry, section)
    }

    pub(crate) fn index(&self) -> Result<Arc<Index>> {
        let built = self.index.read().unwrap_or_else(PoisonError::into_inner).clone();
        built.map_or_else(|| self.rebuild_index(None, BaseIndexUse::IfUsable), Ok)
    }

    /// Rebuilds the index after damaged or missing data was found through the index `outdated`, unless another thread
    /// has rebuilt it since.
    fn rebuild_index(&self, outdated: Option<&Arc<Index>>, base_use: BaseIndexUse) -> Result<Arc<Index>> {
        may_wait(|| self.rebuild_index_waiting(outdated, base_use))
    }

    fn rebuild_index_waiting(&self, outdated: Option<&Arc<Index>>, base_use: BaseIndexUse) -> Result<Arc<Index>> {
        let mut current = self.index.write().unwrap_or_else(PoisonError::into_inner);
        let is_usable = |index: &&Arc<Index>| outdated.is_none_or(|outdated| !Arc::ptr_eq(index, outdated));
        if let Some(index) = current.as_ref().filter(is_usable) {
            return Ok(index.clone());
        }
        let selected = SelectedCheckpoint::find(&self.store, Some(self.table.number))?;
        // The footer has a checksum of the entry: another footer means that another checkpoint has this number now.
        if selected.entry.footer != self.entry.footer {
            let (asked, have) = (self.table.number, selected.manifest.numbers());
            return Err(StoreError::NoSuchCheckpoint { store: self.store.name().into(), asked, have });
        }
        let built = Index::build(&self.store, &self.open_segments, &selected.manifest, &self.table, base_use)?;
        let built = Arc::new(built);
        *current = Some(built.clone());
        Ok(built)
    }

    /// Calls `work` with the index. Calls it again with a new index if the first index is outdated (a segment is
    /// missing) or damaged. Only a base index can be damaged without loss: the segments' directories have the same
    /// content.
    pub(crate) fn with_index<T>(&self, mut work: impl FnMut(&Index) -> Result<T>) -> Result<T> {
        let index = self.index()?;
        let result = work(&index);
        // To rebuild the index takes many requests. A hint does not wait for them: the read of the page does.
        if need_without_waiting() == Some(Need::ReadAhead) {
            return result;
        }
        let error = match result {
            Err(e @ StoreError::Missing { .. }) => e,
            // An object that is open can be removed.
            Err(e) if e.is_not_found() => e,
            Err(e @ StoreError::Damaged { .. }) if index.has_base() => {
                tracing::warn!("{e}; rebuilding the index from the segments' directories");
                let rebuilt = self.rebuild_index(Some(&index), BaseIndexUse::Never)?;
                return work(&rebuilt);
            }
            result => return result,
        };
        // Either the writer has moved pages and removed the old segment, or the file is really missing.
        match self.rebuild_index(Some(&index), BaseIndexUse::IfUsable) {
            Ok(rebuilt) => work(&rebuilt),
            Err(e @ StoreError::NoSuchCheckpoint { .. }) => Err(e),
            Err(_) => Err(error),
        }
    }

    fn block(&self, block: BlockId) -> Result<&Block> {
        self.table
            .blocks
            .get(block.0)
            .map(|stored| &stored.block)
            // The block does not exist, so it has no name, and no page of it is special: the error names page 0.
            .ok_or_else(|| self.no_page(format!("number {block}"), PageNo(0)))
    }

    /// Returns the number by which the records of pages refer to a block.
    fn block_number(&self, block: BlockId) -> u16 {
        self.table.blocks.get(block.0).map_or(0, |stored| stored.number)
    }

    fn no_page(&self, block: String, page: PageNo) -> StoreError {
        let (store, checkpoint) = (self.store.name().into(), self.table.number);
        StoreError::NoSuchPage { store, checkpoint, block, page: page.0 }
    }

    fn bad_page(&self, index: &Index, (block, page): PageId, location: Location, what: &str) -> StoreError {
        let extent = index.segments.get(location.segment());
        StoreError::from(Box::new(BadPage {
            store: self.store.name().into(),
            vm: self.store.vm.name.clone(),
            checkpoint: self.table.number,
            block: self.block(block).map(|block| block.id.clone()).unwrap_or_default(),
            page: page.0,
            file: extent.map(|extent| names::segment(extent.epoch, extent.number)).unwrap_or_default(),
            at: location.offset(),
            what: what.into(),
        }))
    }

    fn find(&self, index: &Index, (block, page): PageId) -> Result<IndexEntry> {
        if page.0 >= self.block(block)?.pages() {
            return Err(self.no_page(self.block(block)?.id.clone(), page));
        }
        index.find(&self.store, (block, page))
    }

    /// Reads the stored bytes, decrypted, and the digest of each page, in the given order. Combines reads that are close
    /// together.
    pub(crate) fn read_stored(&self, pages: &[PageId]) -> Result<Vec<StoredPage>> {
        self.with_index(|index| {
            let mut stored = Vec::with_capacity(pages.len());
            let wanted = self.locate(index, pages, |digest| stored.push(StoredPage { digest, bytes: Vec::new() }))?;
            let mut unstarted = groups(&wanted).peekable();
            for group in groups(&wanted) {
                // The groups after this one are on their way while this thread waits for it.
                while self.store.disk.has_latency()
                    && let Some(next) = unstarted.peek()
                    && self.start_group(index, next)?
                {
                    unstarted.next();
                }
                self.read_group(index, group, &mut stored)?;
            }
            Ok(stored)
        })
    }

    /// Starts to read pages that will be read soon, as far as there is room. Returns for how many of the first pages there
    /// was room. Does not wait.
    pub(crate) fn start_reads(&self, pages: &[PageId]) -> Result<usize> {
        let mut started = 0;
        for pages in pages.chunks(PAGES_PER_READ) {
            let is_complete = without_waiting(Need::ReadAhead, || {
                self.with_index(|index| {
                    let wanted = self.locate(index, pages, |_| {})?;
                    let mut is_complete = true;
                    for group in groups(&wanted) {
                        match self.start_group(index, group) {
                            Ok(true) => {}
                            Ok(false) => return Ok(false),
                            // Its segment is being opened; those of the other groups are opened meanwhile.
                            Err(e) if e.is_would_block() => is_complete = false,
                            Err(e) => return Err(e),
                        }
                    }
                    Ok(is_complete)
                })
            });
            match is_complete {
                Ok(true) => started += pages.len(),
                Ok(false) => break,
                Err(e) if e.is_would_block() => break,
                Err(e) => return Err(e),
            }
        }
        Ok(started)
    }

    /// Reads one page like [`LocalImage::read_page`], if that is possible without waiting for a server. Otherwise starts
    /// to read it, and returns `false`: the caller tries again when [`LocalImage::arrivals`] is readable.
    ///
    /// # Errors
    /// Errors of [`LocalImage::read_page`]. The next call tries again.
    pub fn read_page_if_ready(&self, id: PageId, content: &mut Page, need: Need) -> Result<bool> {
        match without_waiting(need, || self.read_page(id, content)) {
            Ok(()) => Ok(true),
            Err(e) if e.is_would_block() => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Returns whether reads of pages take the time of a request to a server.
    #[must_use]
    pub fn has_latency(&self) -> bool {
        self.store.disk.has_latency()
    }

    /// Returns a descriptor that becomes readable when a read has ended that its caller has not waited for.
    #[must_use]
    pub fn arrivals(&self) -> Option<BorrowedFd<'_>> {
        self.store.disk.arrivals()
    }

    /// Returns those of the pages that have stored bytes, sorted by location. Passes the digest of each page to `take`.
    fn locate(&self, index: &Index, pages: &[PageId], mut take: impl FnMut(u64)) -> Result<Vec<WantedPage>> {
        let mut wanted = Vec::with_capacity(pages.len());
        for (position, id) in pages.iter().enumerate() {
            let IndexEntry { location, digest } = self.find(index, *id)?;
            take(digest);
            // Length 0 means a page of zeros, for which nothing is stored: there is nothing to read.
            if location.len() != 0 {
                wanted.push(WantedPage { location, id: *id, position });
            }
        }
        // A location's number orders by segment, then by offset.
        wanted.sort_unstable_by_key(|wanted| (wanted.location.0, wanted.position));
        Ok(wanted)
    }

    /// Starts to read pages that are close together. Returns `false` if there is no room for that now.
    fn start_group(&self, index: &Index, group: &[WantedPage]) -> Result<bool> {
        let Some((extent, range)) = place(index, group) else { return Ok(true) };
        Ok(self.open_segments.get(&self.store, extent)?.file.start_read(range))
    }

    /// Reads pages that are close together with one read, and adds their bytes to `stored`.
    fn read_group(&self, index: &Index, group: &[WantedPage], stored: &mut [StoredPage]) -> Result<()> {
        let Some((extent, Range { start: begin, end })) = place(index, group) else { return Ok(()) };
        let segment = self.open_segments.get(&self.store, extent)?;
        let name = names::segment(extent.epoch, extent.number);
        let bytes = self.store.read_at(&segment.file, &name, begin, (end - begin) as usize)?;
        for wanted in group {
            let offset = (wanted.location.offset() - begin) as usize;
            let page_bytes = bytes
                .get(offset..offset + usize::from(wanted.location.len()))
                .ok_or_else(|| self.bad_page(index, wanted.id, wanted.location, "the file ends before it"))?;
            if let Some(stored) = stored.get_mut(wanted.position) {
                stored.bytes.extend_from_slice(page_bytes);
                let (block, page) = (self.block_number(wanted.id.0), wanted.id.1.0 as u32);
                let (offset, digest) = (wanted.location.offset(), stored.digest);
                let len = match segment.open_page(offset, block, page, digest, &mut stored.bytes) {
                    Ok(content) => content.len(),
                    Err(what) => return Err(self.bad_page(index, wanted.id, wanted.location, what)),
                };
                stored.bytes.truncate(len);
            }
        }
        Ok(())
    }

    /// Reads one page with one read of exactly its stored bytes, and checks its digest.
    ///
    /// # Errors
    /// [`StoreError::Page`] if the page is damaged; [`StoreError::NoSuchPage`]; [`StoreError::NoSuchCheckpoint`] if the
    /// store does not keep the checkpoint any more.
    pub fn read_page(&self, id: PageId, content: &mut Page) -> Result<()> {
        self.with_index(|index| {
            let IndexEntry { location, digest } = self.find(index, id)?;
            let mut buffer = [0; MAX_STORED_PAGE_BYTES];
            let mut stored = buffer.get_mut(..location.len().into()).unwrap_or_default();
            // A page of zeros has no stored bytes; `unpack` makes zeros of an empty slice.
            if !stored.is_empty() {
                let Some(extent) = index.segments.get(location.segment()) else {
                    return Err(self.bad_page(index, id, location, "its segment is not known"));
                };
                let segment = self.open_segments.get(&self.store, *extent)?;
                let name = names::segment(extent.epoch, extent.number);
                let read_bytes =
                    segment.file.read_at(stored, location.offset()).map_err(self.store.failed(&name, "reading"))?;
                if read_bytes != stored.len() {
                    return Err(self.bad_page(index, id, location, "the file ends before it"));
                }
                stored = segment
                    .open_page(location.offset(), self.block_number(id.0), id.1.0 as u32, digest, stored)
                    .map_err(|what| self.bad_page(index, id, location, what))?;
            }
            unpack(self.store.digester(), stored, digest, content)
                .map_err(|what| self.bad_page(index, id, location, what))
        })
    }

    /// Returns the digests of pages, in the given order.
    ///
    /// # Errors
    /// Errors of [`LocalImage::read_page`].
    pub fn digests(&self, pages: &[PageId]) -> Result<Vec<u64>> {
        self.with_index(|index| pages.iter().map(|id| Ok(self.find(index, *id)?.digest)).collect())
    }

    /// Reads pages of any blocks, and passes them to `take` in the given order.
    ///
    /// # Errors
    /// Errors of [`LocalImage::read_page`]. The pages before the failed page were passed to `take`.
    pub fn read_many(&self, pages: &[PageId], mut take: impl FnMut(PageId, &Page)) -> Result<()> {
        let mut content = [0; PAGE_SIZE];
        for ids in pages.chunks(PAGES_PER_READ) {
            for (id, stored) in ids.iter().zip(self.read_stored(ids)?) {
                unpack(self.store.digester(), &stored.bytes, stored.digest, &mut content).or_else(|what| {
                    let index = self.index()?;
                    let location = self.find(&index, *id).map(|entry| entry.location).unwrap_or_default();
                    Err(self.bad_page(&index, *id, location, what))
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
    pub fn hot(&self) -> Result<LocalHotPages<'_>> {
        let index = self.index()?;
        let returned = (0..index.blocks()).map(|_| DirtySet::default()).collect();
        let next_unlisted = (BlockId(0), PageNo(0));
        Ok(LocalHotPages { image: self, index, returned, next_frame: 0, frame_pages: Vec::new(), next_unlisted })
    }
}

/// A page whose stored bytes are to be read.
struct WantedPage {
    location: Location,
    id: PageId,
    /// Position of the page in the caller's list.
    position: usize,
}

impl WantedPage {
    /// Returns the offset after the stored bytes.
    fn end(&self) -> u64 {
        self.location.offset() + u64::from(self.location.len())
    }
}

/// Splits sorted pages into groups that are close enough to be read with one read each.
fn groups(wanted: &[WantedPage]) -> impl Iterator<Item = &[WantedPage]> {
    let mut remaining = wanted;
    std::iter::from_fn(move || {
        let (group, others) = remaining.split_at(count_for_one_read(remaining));
        remaining = others;
        Some(group).filter(|group| !group.is_empty())
    })
}

/// Returns the segment of a sorted group of pages, and the range of bytes from the first to the last one.
fn place(index: &Index, group: &[WantedPage]) -> Option<(SegmentExtent, Range<u64>)> {
    // The first page has the lowest offset.
    let first = group.first()?;
    let begin = first.location.offset();
    let end = group.iter().map(WantedPage::end).max()?;
    Some((*index.segments.get(first.location.segment())?, begin..end))
}

/// Returns how many of the first pages are close enough to be read with one read. The pages are sorted by location.
fn count_for_one_read(wanted: &[WantedPage]) -> usize {
    let Some(first) = wanted.first() else { return 0 };
    let mut end = first.end();
    let is_close = |next: &&WantedPage| {
        let is_close = next.location.segment() == first.location.segment()
            && next.location.offset() <= end + MAX_GAP_BYTES
            && next.end() - first.location.offset() <= MAX_READ_BYTES;
        end = end.max(next.end());
        is_close
    };
    1 + wanted.iter().skip(1).take_while(is_close).count()
}

/// Nonzero pages of an image, the most recently written first: the pages of recent frames, then all others by number.
#[derive(Debug)]
pub struct LocalHotPages<'a> {
    image: &'a LocalImage,
    index: Arc<Index>,
    /// Pages of each block that were returned.
    returned: Vec<DirtySet>,
    /// Position in [`Index::recent`] of the frame to load next.
    next_frame: usize,
    /// Pages of the loaded frame, in reverse, because `pop` takes pages from the end.
    frame_pages: Vec<PageId>,
    /// Next page to check after all recent frames.
    next_unlisted: PageId,
}

impl LocalHotPages<'_> {
    /// Loads the list of pages in a frame's directory. A frame affects only the order: the pages of an unreadable frame
    /// come with the others, and reading such a page returns the error.
    fn load(&mut self, frame: RecentFrame) {
        let Some(extent) = self.index.segments.get(frame.segment).copied() else { return };
        let store = &self.image.store;
        let Ok(segment) = self.image.open_segments.get(store, extent) else { return };
        // The name of the file is only for errors, and an error is ignored here.
        let Ok(mut bytes) = store.read_at(&segment.file, "", frame.offset, MAX_DIRECTORY_BYTES) else { return };
        let Ok(directory) = Directory::decode(&mut bytes, frame.offset, segment.key.as_ref()) else { return };
        let blocks = &self.image.table.blocks;
        // A record of length 0 is a page of zeros, which is not hot.
        for listed in directory.pages().filter(|listed| listed.record.len != 0) {
            if let Some(position) = blocks.iter().position(|stored| stored.number == listed.record.block) {
                self.frame_pages.push((BlockId(position), PageNo(listed.record.page.into())));
            }
        }
        self.frame_pages.reverse();
    }

    /// Returns whether a page is nonzero and was not returned before.
    fn is_wanted(&mut self, (block, page): PageId) -> bool {
        self.index.pages(block).is_some_and(|pages| page.0 < pages)
            && self.returned.get_mut(block.0).is_some_and(|returned| returned.insert(page))
            // A page whose lookup fails is returned, so that reading it returns the error.
            && self.index.find(&self.image.store, (block, page)).map_or(true, |entry| entry.location.len() != 0)
    }
}

impl Iterator for LocalHotPages<'_> {
    type Item = PageId;

    fn next(&mut self) -> Option<PageId> {
        loop {
            while let Some(id) = self.frame_pages.pop() {
                if self.is_wanted(id) {
                    return Some(id);
                }
            }
            if let Some(frame) = self.index.recent.get(self.next_frame).copied() {
                self.next_frame += 1;
                self.load(frame);
                continue;
            }
            let (block, page) = self.next_unlisted;
            // `None` after the last block ends the iteration.
            if page.0 >= self.index.pages(block)? {
                self.next_unlisted = (BlockId(block.0 + 1), PageNo(0));
                continue;
            }
            self.next_unlisted = (block, page.next());
            if self.is_wanted((block, page)) {
                return Some((block, page));
            }
        }
    }
}
