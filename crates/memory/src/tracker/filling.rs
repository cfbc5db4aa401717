//! Tracking while a pager fills the memory, with the pager's own record.
//!
//! A range belongs to one userfaultfd, so a tracker cannot register the memory itself while pages are missing. But the
//! pager fills pages write-protected ([`crate::missing`]), so a page that is mapped and not protected was written
//! since. This tracker reads and resets that record through a duplicate of the pager's descriptor. Blocks that the
//! pager does not fill are tracked by an [`Asynchronous`] tracker.
//!
//! Only *written* pages are reported. A missing page is neither reported nor read, because it still has the content of
//! the checkpoint that the pager fills from. That checkpoint, overwritten with the reported pages, is therefore the
//! memory at the time of the collection.
//!
//! | state of a page | meaning | reported as |
//! |---|---|---|
//! | mapped, or a marker, not protected | written | written |
//! | neither mapped nor a marker, but in the file | written, then unmapped by the kernel; or being filled | written |
//! | neither mapped nor a marker, not in the file | missing | |
//! | protected | not written | |
//! | no longer registered | given back ([`crate::missing`]) | zero, or written if it has content |
//!
//! The death of a pager changes nothing: the kernel keeps the record, and the next pager uses the same descriptor.

use super::registered::{Area, prove_page};
use super::{Asynchronous, Dirty, TrackError, Tracker};
use crate::missing;
use crate::ram::{Block, GuestRam, data_runs};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::pagemap::{Categories, Query, Rearm, ScanError, Scanner};
use rekindle_kernel::userfault::UserfaultError;
use rekindle_kernel::userfault::remote::Remote;
use rekindle_pages::{PAGE_SIZE, PageRuns};
use rekindle_qemu::stopped::Stopped;
use std::os::fd::RawFd;
use std::sync::Arc;

/// Attempts to read the record of a block while the guest gives pages back.
const MAX_COLLECT_ATTEMPTS: u32 = 100;

/// A tracker that reads a pager's record.
#[derive(Debug)]
pub struct Filling {
    injector: Injector,
    ram: Arc<GuestRam>,
    scanner: Scanner,
    /// Duplicate of the pager's descriptor.
    pager: Remote,
    /// Blocks that the pager fills.
    paged: Vec<PagedArea>,
    /// The other blocks; `None` if there are none.
    others: Option<OtherBlocks>,
}

/// A block that the pager fills.
#[derive(Debug)]
struct PagedArea {
    /// Index of the block in the tracked [`GuestRam`].
    index: usize,
    area: Area,
}

/// The blocks that the pager does not fill.
#[derive(Debug)]
struct OtherBlocks {
    /// Indices of the blocks in the tracked [`GuestRam`].
    indices: Vec<usize>,
    tracker: Asynchronous,
}

/// [`Dirty`] of one block.
struct BlockDirty {
    written: PageRuns,
    zero: PageRuns,
}

impl Filling {
    /// Starts to read the record of a pager, which fills the blocks that `is_paged` selects, with the guest stopped.
    /// For these blocks the record continues from the last collection by any process. The other blocks count as not
    /// written.
    ///
    /// Returns `None` if there is no pager that records writes. Then the caller must wait until all pages are present.
    ///
    /// # Errors
    /// [`TrackError`]; the pager's registration is unchanged.
    pub fn attach(
        injector: Injector,
        ram: Arc<GuestRam>,
        is_paged: impl Fn(&str) -> bool,
        stopped: &mut Stopped<'_>,
        device: Option<RawFd>,
    ) -> Result<Option<Self>, TrackError> {
        let Some(existing) = missing::existing_pager(injector.process())?.filter(|pager| pager.records_writes) else {
            return Ok(None);
        };
        let pager = Remote::take(injector, existing.userfaultfd)?;
        let scanner = Scanner::open(injector.process()).map_err(TrackError::Scanner)?;
        let (mut paged, mut other_indices, mut other_blocks) = (Vec::new(), Vec::new(), Vec::new());
        for (index, block) in ram.blocks().iter().enumerate() {
            if is_paged(&block.info.id) {
                paged.push(PagedArea { index, area: Area::of(block) });
            } else {
                other_indices.push(index);
                other_blocks.push(block.info.clone());
            }
        }
        let mut others = None;
        if !other_blocks.is_empty() {
            let other_ram = GuestRam::from_blocks(injector.process(), other_blocks)?;
            let other_ram = Arc::new(if ram.may_shrink() { other_ram } else { other_ram.never_shrinking() });
            let tracker = Asynchronous::attach(injector, other_ram, stopped, device)?;
            others = Some(OtherBlocks { indices: other_indices, tracker });
        }
        let mut tracker = Self { injector, ram, scanner, pager, paged, others };
        match tracker.prove() {
            Ok(()) => Ok(Some(tracker)),
            Err(e) => {
                tracker.detach()?;
                Err(e)
            }
        }
    }

    /// Returns all present pages, for the case that an earlier collection was lost. Together with later collections
    /// these are all pages that can differ from the checkpoint that the pager fills from.
    ///
    /// # Errors
    /// [`TrackError`].
    pub fn everything(&mut self) -> Result<Dirty, TrackError> {
        let mut dirty = self.all_of_other_blocks()?;
        for PagedArea { index, area } in &self.paged {
            let given_back = untracked(&mut self.scanner, area)?;
            let block = self.ram.blocks().get(*index);
            let present = present(&mut self.scanner, block, area, &PageRuns::from(area.used.clone()))?;
            let zero = given_back.difference(&present);
            set(&mut dirty, *index, BlockDirty { written: area.offsets(present), zero: area.offsets(zero) });
        }
        Ok(dirty)
    }

    /// Returns all pages of the blocks that the pager does not fill: writes to them before [`Filling::attach`] are
    /// unknown.
    ///
    /// # Errors
    /// [`TrackError`].
    pub fn all_of_other_blocks(&self) -> Result<Dirty, TrackError> {
        let mut dirty = nothing(&self.ram);
        for &index in self.others.iter().flat_map(|others| &others.indices) {
            let Some(block) = self.ram.blocks().get(index) else { continue };
            let written = self.ram.populated(block)?;
            let zero = written.complement(block.used().end - block.address);
            set(&mut dirty, index, BlockDirty { written, zero });
        }
        Ok(dirty)
    }

    /// Returns the pages written since the last call, and resets the record.
    ///
    /// # Errors
    /// [`TrackError::Filled`] when the pager has unregistered the memory. After any other [`TrackError`] a part of the
    /// record may be lost, and the pages of [`Filling::everything`] count as written.
    pub fn collect(&mut self, stopped: &mut Stopped<'_>) -> Result<Dirty, TrackError> {
        let mut dirty = nothing(&self.ram);
        for PagedArea { index, area } in &self.paged {
            let block = self.ram.blocks().get(*index);
            let collected = PagedRecord { scanner: &mut self.scanner, pager: &self.pager, block, area }.collect()?;
            set(&mut dirty, *index, collected);
        }
        if let Some(others) = &mut self.others {
            let Dirty { written, zero } = others.tracker.collect(stopped)?;
            for (&index, (written, zero)) in others.indices.iter().zip(written.into_iter().zip(zero)) {
                set(&mut dirty, index, BlockDirty { written, zero });
            }
        }
        Ok(dirty)
    }

    /// Collects for the last time, when all pages are present, and registers all blocks with the tracker's own
    /// descriptor. The guest must stay stopped, so that no write is missed in between. The pager closes its descriptor
    /// afterwards.
    ///
    /// # Errors
    /// As for [`Filling::collect`].
    pub fn hand_over(
        &mut self,
        stopped: &mut Stopped<'_>,
        device: Option<RawFd>,
    ) -> Result<(Dirty, Asynchronous), TrackError> {
        let dirty = self.collect(stopped)?;
        if let Some(others) = self.others.take() {
            others.tracker.detach()?;
        }
        for PagedArea { area, .. } in &self.paged {
            // Fails for parts that are unregistered already, because the guest gave them back.
            if let Err(e) = self.pager.userfault.unregister(area.total.clone()) {
                tracing::debug!("{e}: {:?}", std::error::Error::source(&e));
            }
        }
        Ok((dirty, Asynchronous::attach(self.injector, Arc::clone(&self.ram), stopped, device)?))
    }

    /// Ends tracking. The pager's registration stays, and the kernel continues to record.
    ///
    /// # Errors
    /// [`TrackError::Remote`].
    pub fn detach(self) -> Result<(), TrackError> {
        match self.others {
            Some(others) => others.tracker.detach(),
            None => Ok(()),
        }
    }

    /// Tests that writes are recorded, with a present, unwritten page of each block, if there is one.
    fn prove(&mut self) -> Result<(), TrackError> {
        let process = self.injector.process();
        self.paged.iter().try_for_each(|paged| prove_page(process, &mut self.scanner, &paged.area))
    }
}

/// A pager's record of the writes to one block.
struct PagedRecord<'a> {
    scanner: &'a mut Scanner,
    pager: &'a Remote,
    /// The block; `None` if it is not in the block table any more.
    block: Option<&'a Block>,
    area: &'a Area,
}

impl PagedRecord<'_> {
    /// Reads the record, and resets it.
    fn collect(&mut self) -> Result<BlockDirty, TrackError> {
        let (area, id) = (self.area, || self.area.id.clone());
        let used = PageRuns::from(area.used.clone());
        // Kept over all attempts, because each attempt resets the record of the pages that it finds.
        let mut written = PageRuns::new();
        for _ in 0..MAX_COLLECT_ATTEMPTS {
            let given_back = untracked(self.scanner, area)?;
            if given_back.bytes() == used.bytes() {
                return Err(TrackError::Filled { id: id() });
            }
            if !self.collect_registered(&used.difference(&given_back), &mut written)? {
                // The guest has just given pages back, so they are not registered any more.
                continue;
            }
            // A page that is not present is missing or was given back, whatever the page tables record. It is not read.
            let present = present(self.scanner, self.block, area, &written.union(&given_back))?;
            let zero = given_back.difference(&present);
            return Ok(BlockDirty { written: area.offsets(present), zero: area.offsets(zero) });
        }
        Err(TrackError::Restless { id: id() })
    }

    /// Adds the written pages of these registered runs to `written`, and protects them again. Returns `false` if some
    /// are no longer registered.
    fn collect_registered(&mut self, registered: &PageRuns, written: &mut PageRuns) -> Result<bool, TrackError> {
        let area = self.area;
        for run in registered {
            match self.scanner.written_where_present(run.clone(), Rearm::Yes) {
                Ok(written_now) => *written = written.union(&written_now),
                Err(ScanError::Unprotected { .. }) => return Ok(false),
                Err(source) => return Err(TrackError::Scan { id: area.id.clone(), source }),
            }
        }
        if area.page_bytes > PAGE_SIZE as u64 || self.block.is_none_or(|block| block.file().is_none()) {
            // Huge pages and private pages leave a trace in the page table when they are unmapped.
            return Ok(true);
        }
        // A page of a file may have been unmapped after it was written. Only the file distinguishes such a page from a
        // missing one.
        let query = Query { none: Categories::PRESENT | Categories::SWAPPED, ..Query::all(Categories::empty()) };
        let absent = matching(self.scanner, area, registered, query)?;
        let unmapped = present(self.scanner, self.block, area, &absent)?;
        for run in &unmapped {
            match self.pager.userfault.write_protect(run.clone(), true) {
                Ok(()) => {}
                Err(UserfaultError::Failed { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                    return Ok(false);
                }
                Err(source) => return Err(TrackError::Block { id: area.id.clone(), source }),
            }
        }
        *written = written.union(&unmapped);
        Ok(true)
    }
}

/// Finds the runs of addresses of a block that are no longer registered, because the guest gave them back.
fn untracked(scanner: &mut Scanner, area: &Area) -> Result<PageRuns, TrackError> {
    let untracked = scanner.untracked(area.used.clone());
    untracked.map_err(|source| TrackError::Scan { id: area.id.clone(), source })
}

/// Finds the present pages within these runs of addresses of a block.
fn present(scanner: &mut Scanner, block: Option<&Block>, area: &Area, runs: &PageRuns) -> Result<PageRuns, TrackError> {
    let Some((file, offset)) = block.and_then(Block::file).filter(|_| area.page_bytes == PAGE_SIZE as u64) else {
        // hugetlbfs does not report holes, and private memory has no file: use the page tables.
        let any = Categories::PRESENT | Categories::SWAPPED;
        return matching(scanner, area, runs, Query { any, ..Query::all(Categories::empty()) });
    };
    let mut present = PageRuns::new();
    for run in runs {
        let file_offset = offset + (run.start - area.total.start);
        let in_file = data_runs(file, file_offset..file_offset + (run.end - run.start));
        let in_file = in_file.map_err(|source| TrackError::Proof { id: area.id.clone(), source })?;
        in_file.placed_at(run.start).into_iter().for_each(|run| present.push(run));
    }
    Ok(present)
}

/// Finds the pages within these runs of addresses of a block that match `query` in the page tables.
fn matching(scanner: &mut Scanner, area: &Area, runs: &PageRuns, query: Query) -> Result<PageRuns, TrackError> {
    let mut all_matching = PageRuns::new();
    for run in runs {
        let in_run = scanner.matching(run.clone(), query);
        let in_run = in_run.map_err(|source| TrackError::Scan { id: area.id.clone(), source })?;
        in_run.into_iter().for_each(|run| all_matching.push(run));
    }
    Ok(all_matching)
}

/// Returns that no page of any block is dirty.
fn nothing(ram: &GuestRam) -> Dirty {
    let none = vec![PageRuns::new(); ram.blocks().len()];
    Dirty { written: none.clone(), zero: none }
}

/// Sets the dirty pages of block `index`.
fn set(dirty: &mut Dirty, index: usize, of_block: BlockDirty) {
    if let (Some(written), Some(zero)) = (dirty.written.get_mut(index), dirty.zero.get_mut(index)) {
        (*written, *zero) = (of_block.written, of_block.zero);
    }
}
