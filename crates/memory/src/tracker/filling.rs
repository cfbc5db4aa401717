//! Tracking while a pager still brings the memory: by the pager's own record.
//!
//! A range belongs to one userfaultfd, so as long as pages are missing no tracker can have one. But the pager's own puts its pages
//! write-protected ([`crate::missing`]), so from the first moment on a page that is mapped and not protected was written
//! since. This reads that record, and begins it anew, through a duplicate of the pager's descriptor. Blocks that the pager
//! does not bring are tracked as ever.
//!
//! What is told is what was *written*; what is missing is not told, and never read: it is what it was in the checkpoint that
//! the pager brings. So what is told, put over that checkpoint, is the memory of this moment.
//!
//! | where | is | told as |
//! |---|---|---|
//! | mapped, or a marker, not protected | written | written |
//! | neither mapped nor a marker, but in the file | written, and unmapped by the kernel since; or just coming | written |
//! | neither mapped nor a marker, not in the file | missing | |
//! | protected | as it came | |
//! | not registered any more | given back ([`crate::missing`]) | zero, or written where something is |
//!
//! A pager that is killed changes nothing here: the record is the kernel's, and the next pager goes on with the same descriptor.

use super::registered::{Area, prove_page};
use super::{Asynchronous, Dirty, TrackError, Tracker};
use crate::missing;
use crate::pages;
use crate::ram::{Block, GuestRam, data};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory::PAGE_SIZE;
use rekindle_kernel::pagemap::{Categories, Query, Rearm, ScanError, Scanner};
use rekindle_kernel::userfault::UserfaultError;
use rekindle_kernel::userfault::remote::Remote;
use rekindle_qemu::stopped::Stopped;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

/// How often a block is looked at again because the guest gave pages back just then.
const TRIES: u32 = 100;

/// See [the module](self).
#[derive(Debug)]
pub struct Filling {
    injector: Injector,
    ram: Arc<GuestRam>,
    scanner: Scanner,
    /// Our duplicate of the pager's descriptor.
    pagers: Remote,
    /// The blocks that the pager brings, with their index in `ram`.
    paged: Vec<(usize, Area)>,
    /// The other blocks, with their indices in `ram`.
    others: Option<(Vec<usize>, Asynchronous)>,
}

/// What a block told.
struct Found {
    written: Vec<Range<u64>>,
    zero: Vec<Range<u64>>,
}

impl Filling {
    /// Begin to read the record of a pager, which brings the blocks that `paged` names, with the guest stopped. Those blocks go on
    /// from the last time that anybody collected; the others count as not written from here on.
    ///
    /// `None`: no pager has left a descriptor that records. Then wait until all is there.
    ///
    /// # Errors
    /// [`TrackError`]; the pager's registration is as it was.
    pub fn attach(
        injector: Injector,
        ram: Arc<GuestRam>,
        paged: impl Fn(&str) -> bool,
        stopped: &mut Stopped<'_>,
        device: Option<RawFd>,
    ) -> Result<Option<Self>, TrackError> {
        let Some((existing, true)) = missing::left(injector.process())? else { return Ok(None) };
        let pagers = Remote::take(injector, existing)?;
        let scanner = Scanner::open(injector.process()).map_err(TrackError::Scanner)?;
        let all = || ram.blocks().iter().enumerate();
        let areas = all().filter(|(_, block)| paged(&block.told.id)).map(|(index, block)| (index, Area::of(block)));
        let rest: Vec<usize> = all().filter(|(_, block)| !paged(&block.told.id)).map(|(index, _)| index).collect();
        let (areas, told) = (areas.collect(), rest.iter().filter_map(|&index| ram.blocks().get(index)));
        let told: Vec<_> = told.map(|block| block.told.clone()).collect();
        let mut others = None;
        if !rest.is_empty() {
            let part = GuestRam::from_blocks(injector.process(), told)?;
            let part = Arc::new(if ram.may_shrink() { part } else { part.never_shrinking() });
            others = Some((rest, Asynchronous::attach(injector, part, stopped, device)?));
        }
        let mut tracker = Self { injector, ram, scanner, pagers, paged: areas, others };
        match tracker.prove() {
            Ok(()) => Ok(Some(tracker)),
            Err(e) => {
                tracker.detach()?;
                Err(e)
            }
        }
    }

    /// Everything that is there, for when what was collected before has been lost: with what is collected from here on, it is
    /// all that can differ from the checkpoint that the pager brings.
    ///
    /// # Errors
    /// [`TrackError`].
    pub fn everything(&mut self) -> Result<Dirty, TrackError> {
        let mut dirty = self.others_whole()?;
        for part in 0..self.paged.len() {
            let Some((index, area)) = self.paged.get(part) else { continue };
            let (index, used) = (*index, area.used.clone());
            let outside = self.untracked(part)?;
            let there = self.holding(part, std::slice::from_ref(&used))?;
            let zero = pages::difference(&outside, &there);
            let offsets = |runs| self.paged.get(part).map(|(_, area)| area.offsets(runs)).unwrap_or_default();
            set(&mut dirty, index, Found { written: offsets(there), zero: offsets(zero) });
        }
        Ok(dirty)
    }

    /// All of the blocks that the pager does not bring: nothing is known of what was written to them before [`Filling::attach`].
    ///
    /// # Errors
    /// [`TrackError`].
    pub fn others_whole(&self) -> Result<Dirty, TrackError> {
        let mut dirty = nothing(&self.ram);
        for &index in self.others.iter().flat_map(|(indices, _)| indices) {
            let Some(block) = self.ram.blocks().get(index) else { continue };
            let written = self.ram.populated(block)?;
            let zero = pages::complement(&written, block.used().end - block.address);
            set(&mut dirty, index, Found { written, zero });
        }
        Ok(dirty)
    }

    /// As [`Tracker::collect`]: what was written since the last time, and begin anew.
    ///
    /// # Errors
    /// [`TrackError::Filled`] when the pager has let go of the memory meanwhile; [`TrackError`]: then some pages may have been
    /// forgotten, and [`Filling::everything`] must be taken for written.
    pub fn collect(&mut self, stopped: &mut Stopped<'_>) -> Result<Dirty, TrackError> {
        let mut dirty = nothing(&self.ram);
        for part in 0..self.paged.len() {
            let found = self.part(part)?;
            if let Some((index, _)) = self.paged.get(part) {
                set(&mut dirty, *index, found);
            }
        }
        if let Some((indices, others)) = &mut self.others {
            let Dirty { written, zero } = others.collect(stopped)?;
            for (&index, (written, zero)) in indices.iter().zip(written.into_iter().zip(zero)) {
                set(&mut dirty, index, Found { written, zero });
            }
        }
        Ok(dirty)
    }

    /// The last [`Filling::collect`], when all is there: from here on all blocks are tracked by a descriptor of our own, and
    /// not one write is missed in between, since the guest is stopped. The pager closes its own.
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
            // Parts of it may be unregistered already: given back.
            if let Err(e) = self.pagers.userfault.unregister(area.total.clone()) {
                tracing::debug!("{e}: {:?}", std::error::Error::source(&e));
            }
        }
        Ok((dirty, Asynchronous::attach(self.injector, Arc::clone(&self.ram), stopped, device)?))
    }

    /// End it. The pager's registration stays, and its record goes on.
    ///
    /// # Errors
    /// [`TrackError::Remote`].
    pub fn detach(self) -> Result<(), TrackError> {
        match self.others {
            Some((_, others)) => others.detach(),
            None => Ok(()),
        }
    }

    /// What was written to a block that comes.
    fn part(&mut self, part: usize) -> Result<Found, TrackError> {
        let Some((_, area)) = self.paged.get(part) else { return Ok(Found { written: Vec::new(), zero: Vec::new() }) };
        let (used, total, id) = (area.used.clone(), area.used.end - area.used.start, area.id.clone());
        // What was found stays found, although the block is looked at again.
        let mut written = Vec::new();
        for _ in 0..TRIES {
            let outside = self.untracked(part)?;
            if pages::bytes(&outside) == total {
                return Err(TrackError::Filled { id });
            }
            if !self.look_inside(part, &pages::difference(std::slice::from_ref(&used), &outside), &mut written)? {
                // The guest has just given pages back, so that they are not registered any more.
                continue;
            }
            // Whatever the page tables say: where nothing is, there is nothing to be read. It is missing, or was given back.
            let there = self.holding(part, &pages::union(&written, &outside))?;
            let zero = pages::difference(&outside, &there);
            let Some((_, area)) = self.paged.get(part) else { continue };
            return Ok(Found { written: area.offsets(there), zero: area.offsets(zero) });
        }
        Err(TrackError::Restless { id })
    }

    /// Add what was written in these registered runs, and protect it again. `false`: they are not all registered any more.
    fn look_inside(
        &mut self,
        part: usize,
        inside: &[Range<u64>],
        written: &mut Vec<Range<u64>>,
    ) -> Result<bool, TrackError> {
        let failed = |id: &str, source| TrackError::Scan { id: id.to_owned(), source };
        let id = self.paged.get(part).map(|(_, area)| area.id.clone()).unwrap_or_default();
        for run in inside {
            match self.scanner.written_there(run.clone(), Rearm::Yes) {
                Ok(found) => *written = pages::union(written, &found),
                Err(ScanError::Unprotected { .. }) => return Ok(false),
                Err(source) => return Err(failed(&id, source)),
            }
        }
        let Some((index, area)) = self.paged.get(part) else { return Ok(true) };
        if area.page > PAGE_SIZE as u64 || self.ram.blocks().get(*index).is_none_or(|block| block.file().is_none()) {
            // Neither huge pages nor private ones are unmapped without a trace.
            return Ok(true);
        }
        // A page of a file may have been unmapped after it was written: only the file tells it from a missing one.
        let query = Query { none: Categories::PRESENT | Categories::SWAPPED, ..Query::all(Categories::empty()) };
        let mut absent = Vec::new();
        for run in inside {
            absent.extend(self.scanner.matching(run.clone(), query).map_err(|source| failed(&id, source))?);
        }
        let unmapped = self.holding(part, &absent)?;
        for run in &unmapped {
            match self.pagers.userfault.write_protect(run.clone(), true) {
                Ok(()) => {}
                Err(UserfaultError::Failed { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                    return Ok(false);
                }
                Err(source) => return Err(TrackError::Block { id, source }),
            }
        }
        *written = pages::union(written, &unmapped);
        Ok(true)
    }

    /// Runs of addresses of a block that are not registered any more.
    fn untracked(&mut self, part: usize) -> Result<Vec<Range<u64>>, TrackError> {
        let Some((_, area)) = self.paged.get(part) else { return Ok(Vec::new()) };
        let untracked = self.scanner.untracked(area.used.clone());
        untracked.map_err(|source| TrackError::Scan { id: area.id.clone(), source })
    }

    /// What of these runs of addresses of a block holds something: a page that is there.
    fn holding(&mut self, part: usize, runs: &[Range<u64>]) -> Result<Vec<Range<u64>>, TrackError> {
        let Some((index, area)) = self.paged.get(part) else { return Ok(Vec::new()) };
        let file = self.ram.blocks().get(*index).and_then(Block::file).filter(|_| area.page == PAGE_SIZE as u64);
        let mut there = Vec::new();
        for run in runs {
            match file {
                Some((file, offset)) => {
                    let at = offset + (run.start - area.total.start);
                    let found = data(file, at..at + (run.end - run.start));
                    let found = found.map_err(|source| TrackError::Proof { id: area.id.clone(), source })?;
                    found.iter().for_each(|part| pages::push(&mut there, run.start + part.start..run.start + part.end));
                }
                // hugetlbfs does not tell its holes, private memory has no file: the page tables do.
                None => {
                    let any = Categories::PRESENT | Categories::SWAPPED;
                    let query = Query { any, ..Query::all(Categories::empty()) };
                    let found = self.scanner.matching(run.clone(), query);
                    let found = found.map_err(|source| TrackError::Scan { id: area.id.clone(), source })?;
                    found.into_iter().for_each(|part| pages::push(&mut there, part));
                }
            }
        }
        Ok(there)
    }

    /// Prove that the record works, with a page of each block that is there and not written yet, if there is one.
    fn prove(&mut self) -> Result<(), TrackError> {
        self.paged.iter().try_for_each(|(_, area)| prove_page(self.injector.process(), &mut self.scanner, area))
    }
}

fn nothing(ram: &GuestRam) -> Dirty {
    let none = vec![Vec::new(); ram.blocks().len()];
    Dirty { written: none.clone(), zero: none }
}

fn set(dirty: &mut Dirty, index: usize, found: Found) {
    if let (Some(written), Some(zero)) = (dirty.written.get_mut(index), dirty.zero.get_mut(index)) {
        (*written, *zero) = (found.written, found.zero);
    }
}
