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
use crate::ram::{Block, GuestRam, data};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::pagemap::{Categories, Query, Rearm, ScanError, Scanner};
use rekindle_kernel::userfault::UserfaultError;
use rekindle_kernel::userfault::remote::Remote;
use rekindle_pages::{PAGE_SIZE, PageRuns};
use rekindle_qemu::stopped::Stopped;
use std::os::fd::RawFd;
use std::sync::Arc;

/// Attempts to read the record of a block while the guest gives pages back.
const TRIES: u32 = 100;

/// A tracker that reads a pager's record.
#[derive(Debug)]
pub struct Filling {
    injector: Injector,
    ram: Arc<GuestRam>,
    scanner: Scanner,
    /// Duplicate of the pager's descriptor.
    pager: Remote,
    /// Blocks that the pager fills, with their index in `ram`.
    paged: Vec<(usize, Area)>,
    /// Indices of the other blocks in `ram`, and their tracker.
    others: Option<(Vec<usize>, Asynchronous)>,
}

/// [`Dirty`] of one block.
struct BlockDirty {
    written: PageRuns,
    zero: PageRuns,
}

impl Filling {
    /// Starts to read the record of a pager, which fills the blocks that `paged` selects, with the guest stopped. For
    /// these blocks the record continues from the last collection by any process. The other blocks count as not
    /// written.
    ///
    /// Returns `None` if there is no pager that records writes. Then the caller must wait until all pages are present.
    ///
    /// # Errors
    /// [`TrackError`]; the pager's registration is unchanged.
    pub fn attach(
        injector: Injector,
        ram: Arc<GuestRam>,
        paged: impl Fn(&str) -> bool,
        stopped: &mut Stopped<'_>,
        device: Option<RawFd>,
    ) -> Result<Option<Self>, TrackError> {
        let Some((existing, true)) = missing::existing_pager(injector.process())? else { return Ok(None) };
        let pager = Remote::take(injector, existing)?;
        let scanner = Scanner::open(injector.process()).map_err(TrackError::Scanner)?;
        let all = || ram.blocks().iter().enumerate();
        let areas = all().filter(|(_, block)| paged(&block.info.id)).map(|(index, block)| (index, Area::of(block)));
        let rest: Vec<usize> = all().filter(|(_, block)| !paged(&block.info.id)).map(|(index, _)| index).collect();
        let (areas, infos) = (areas.collect(), rest.iter().filter_map(|&index| ram.blocks().get(index)));
        let infos: Vec<_> = infos.map(|block| block.info.clone()).collect();
        let mut others = None;
        if !rest.is_empty() {
            let part = GuestRam::from_blocks(injector.process(), infos)?;
            let part = Arc::new(if ram.may_shrink() { part } else { part.never_shrinking() });
            others = Some((rest, Asynchronous::attach(injector, part, stopped, device)?));
        }
        let mut tracker = Self { injector, ram, scanner, pager, paged: areas, others };
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
        for part in 0..self.paged.len() {
            let Some((index, area)) = self.paged.get(part) else { continue };
            let (index, used) = (*index, area.used.clone());
            let outside = self.untracked(part)?;
            let present = self.present(part, &PageRuns::from(used))?;
            let zero = outside.difference(&present);
            let offsets = |runs| self.paged.get(part).map(|(_, area)| area.offsets(runs)).unwrap_or_default();
            set(&mut dirty, index, BlockDirty { written: offsets(present), zero: offsets(zero) });
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
        for &index in self.others.iter().flat_map(|(indices, _)| indices) {
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
        for part in 0..self.paged.len() {
            let found = self.collect_block(part)?;
            if let Some((index, _)) = self.paged.get(part) {
                set(&mut dirty, *index, found);
            }
        }
        if let Some((indices, others)) = &mut self.others {
            let Dirty { written, zero } = others.collect(stopped)?;
            for (&index, (written, zero)) in indices.iter().zip(written.into_iter().zip(zero)) {
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
        if let Some((_, others)) = self.others.take() {
            others.detach()?;
        }
        for (_, area) in &self.paged {
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
            Some((_, others)) => others.detach(),
            None => Ok(()),
        }
    }

    /// Collects the writes to a block that the pager fills.
    fn collect_block(&mut self, part: usize) -> Result<BlockDirty, TrackError> {
        let Some((_, area)) = self.paged.get(part) else {
            return Ok(BlockDirty { written: PageRuns::new(), zero: PageRuns::new() });
        };
        let (used, id) = (PageRuns::from(area.used.clone()), area.id.clone());
        // Kept over all attempts, because each attempt resets the record of the pages that it finds.
        let mut written = PageRuns::new();
        for _ in 0..TRIES {
            let outside = self.untracked(part)?;
            if outside.bytes() == used.bytes() {
                return Err(TrackError::Filled { id });
            }
            if !self.collect_registered(part, &used.difference(&outside), &mut written)? {
                // The guest has just given pages back, so they are not registered any more.
                continue;
            }
            // A page that is not present is missing or was given back, whatever the page tables record. It is not read.
            let present = self.present(part, &written.union(&outside))?;
            let zero = outside.difference(&present);
            let Some((_, area)) = self.paged.get(part) else { continue };
            return Ok(BlockDirty { written: area.offsets(present), zero: area.offsets(zero) });
        }
        Err(TrackError::Restless { id })
    }

    /// Adds the written pages of these registered runs to `written`, and protects them again. Returns `false` if some
    /// are no longer registered.
    fn collect_registered(
        &mut self,
        part: usize,
        inside: &PageRuns,
        written: &mut PageRuns,
    ) -> Result<bool, TrackError> {
        let failed = |id: &str, source| TrackError::Scan { id: id.to_owned(), source };
        let id = self.paged.get(part).map(|(_, area)| area.id.clone()).unwrap_or_default();
        for run in inside {
            match self.scanner.written_there(run.clone(), Rearm::Yes) {
                Ok(found) => *written = written.union(&found),
                Err(ScanError::Unprotected { .. }) => return Ok(false),
                Err(source) => return Err(failed(&id, source)),
            }
        }
        let Some((index, area)) = self.paged.get(part) else { return Ok(true) };
        if area.page > PAGE_SIZE as u64 || self.ram.blocks().get(*index).is_none_or(|block| block.file().is_none()) {
            // Huge pages and private pages leave a trace in the page table when they are unmapped.
            return Ok(true);
        }
        // A page of a file may have been unmapped after it was written. Only the file distinguishes such a page from a
        // missing one.
        let query = Query { none: Categories::PRESENT | Categories::SWAPPED, ..Query::all(Categories::empty()) };
        let mut absent = PageRuns::new();
        for run in inside {
            let found = self.scanner.matching(run.clone(), query).map_err(|source| failed(&id, source))?;
            found.into_iter().for_each(|part| absent.push(part));
        }
        let unmapped = self.present(part, &absent)?;
        for run in &unmapped {
            match self.pager.userfault.write_protect(run.clone(), true) {
                Ok(()) => {}
                Err(UserfaultError::Failed { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                    return Ok(false);
                }
                Err(source) => return Err(TrackError::Block { id, source }),
            }
        }
        *written = written.union(&unmapped);
        Ok(true)
    }

    /// Finds the runs of addresses of a block that are no longer registered.
    fn untracked(&mut self, part: usize) -> Result<PageRuns, TrackError> {
        let Some((_, area)) = self.paged.get(part) else { return Ok(PageRuns::new()) };
        let untracked = self.scanner.untracked(area.used.clone());
        untracked.map_err(|source| TrackError::Scan { id: area.id.clone(), source })
    }

    /// Finds the present pages within these runs of addresses of a block.
    fn present(&mut self, part: usize, runs: &PageRuns) -> Result<PageRuns, TrackError> {
        let Some((index, area)) = self.paged.get(part) else { return Ok(PageRuns::new()) };
        let file = self.ram.blocks().get(*index).and_then(Block::file).filter(|_| area.page == PAGE_SIZE as u64);
        let mut present = PageRuns::new();
        for run in runs {
            match file {
                Some((file, offset)) => {
                    let at = offset + (run.start - area.total.start);
                    let found = data(file, at..at + (run.end - run.start));
                    let found = found.map_err(|source| TrackError::Proof { id: area.id.clone(), source })?;
                    found.placed_at(run.start).into_iter().for_each(|part| present.push(part));
                }
                // hugetlbfs does not report holes, and private memory has no file: use the page tables.
                None => {
                    let any = Categories::PRESENT | Categories::SWAPPED;
                    let query = Query { any, ..Query::all(Categories::empty()) };
                    let found = self.scanner.matching(run.clone(), query);
                    let found = found.map_err(|source| TrackError::Scan { id: area.id.clone(), source })?;
                    found.into_iter().for_each(|part| present.push(part));
                }
            }
        }
        Ok(present)
    }

    /// Tests that writes are recorded, with a present, unwritten page of each block, if there is one.
    fn prove(&mut self) -> Result<(), TrackError> {
        self.paged.iter().try_for_each(|(_, area)| prove_page(self.injector.process(), &mut self.scanner, area))
    }
}

fn nothing(ram: &GuestRam) -> Dirty {
    let none = vec![PageRuns::new(); ram.blocks().len()];
    Dirty { written: none.clone(), zero: none }
}

fn set(dirty: &mut Dirty, index: usize, found: BlockDirty) {
    if let (Some(written), Some(zero)) = (dirty.written.get_mut(index), dirty.zero.get_mut(index)) {
        (*written, *zero) = (found.written, found.zero);
    }
}
