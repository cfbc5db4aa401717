//! RAM blocks registered with a userfaultfd for write protection, and what the page tables say of them.

use super::{Dirty, TrackError};
use crate::ram::GuestRam;
use crate::{pages, ram};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory;
use rekindle_kernel::pagemap::{Categories, Query, Rearm, Scanner, reports_given_back};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::remote::{self, Existing, Remote, RemoteError};
use rekindle_kernel::userfault::{Features, Mode};
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What every kind of ours asks for. QEMU itself never asks for unpopulated pages, so it is also how ours are known.
const COMMON: Features =
    Features::WP_UNPOPULATED.union(Features::WP_HUGETLBFS_SHMEM).union(Features::PAGEFAULT_FLAG_WP);
/// Of the asynchronous kind.
pub(super) const ASYNCHRONOUS: Features = COMMON.union(Features::WP_ASYNC);
/// Of the synchronous kind.
pub(super) const SYNCHRONOUS: Features = COMMON.union(Features::EXACT_ADDRESS);

const PAGE: u64 = memory::PAGE_SIZE as u64;

/// Userfaultfds of trackers that an earlier process of ours left in QEMU.
///
/// # Errors
/// [`RemoteError::Take`] when QEMU's descriptors cannot be listed.
pub fn leftovers(process: Process) -> Result<Vec<Existing>, RemoteError> {
    let ours = |existing: &Existing| [ASYNCHRONOUS, SYNCHRONOUS].contains(&existing.features);
    Ok(remote::existing(process)?.into_iter().filter(ours).collect())
}

/// Close all [`leftovers`], with all their protection. Returns how many there were.
///
/// # Errors
/// [`RemoteError`].
pub fn sweep(injector: Injector) -> Result<usize, RemoteError> {
    let found = leftovers(injector.process())?;
    for existing in &found {
        Remote::take(injector, *existing)?.close()?;
    }
    Ok(found.len())
}

/// Prove that QEMU may make a userfaultfd of the kind that trackers want: one is made and closed again. Were we killed in
/// between, it is one of the [`leftovers`].
///
/// # Errors
/// [`RemoteError`], naming the right that is missing.
pub fn trial(injector: Injector, device: Option<RawFd>) -> Result<(), RemoteError> {
    Remote::open(injector, ASYNCHRONOUS, device)?.close()
}

/// One block.
#[derive(Debug)]
pub(super) struct Area {
    pub id: String,
    /// All of it, in QEMU's addresses: registered.
    pub total: Range<u64>,
    /// As far as it is used: told.
    pub used: Range<u64>,
    pub page: u64,
    /// What cannot be written need not be tracked.
    tracked: bool,
    /// It is shared memory.
    shared: bool,
}

impl Area {
    pub(super) fn of(block: &ram::Block) -> Self {
        Self {
            id: block.told.id.clone(),
            total: block.total(),
            used: block.used(),
            page: block.told.page_size,
            tracked: block.writable,
            shared: block.file().is_some(),
        }
    }

    pub(super) fn offsets(&self, runs: Vec<Range<u64>>) -> Vec<Range<u64>> {
        let start = self.total.start;
        runs.into_iter().map(|run| run.start - start..run.end - start).collect()
    }
}

/// What is not in a file, as offsets in its block.
#[derive(Debug, Default)]
struct Holes {
    /// Certainly zero.
    zero: Vec<Range<u64>>,
    /// Possibly zero: it must be read.
    unknown: Vec<Range<u64>>,
}

/// Blocks with a userfaultfd.
#[derive(Debug)]
pub(super) struct Registered {
    pub remote: Remote,
    pub areas: Vec<Area>,
    scanner: Mutex<Scanner>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registered {
    /// Open a userfaultfd in QEMU and register all blocks; nothing is protected yet. What an earlier process of ours
    /// left is removed first.
    pub(super) fn attach(
        injector: Injector,
        ram: &GuestRam,
        features: Features,
        device: Option<RawFd>,
    ) -> Result<Self, TrackError> {
        sweep(injector)?;
        let scanner = Mutex::new(Scanner::open(injector.process()).map_err(TrackError::Scanner)?);
        let areas = ram.blocks().iter().map(Area::of).collect::<Vec<_>>();
        let remote = Remote::open(injector, features, device)?;
        let registered = Self { remote, areas, scanner };
        match registered.areas.iter().try_for_each(|area| registered.register(area)) {
            Ok(()) => Ok(registered),
            Err(e) => {
                registered.remote.close()?;
                Err(e)
            }
        }
    }

    /// Take over what an earlier process of ours left.
    pub(super) fn take_over(remote: Remote, ram: &GuestRam) -> Result<Self, TrackError> {
        let scanner = Mutex::new(Scanner::open(ram.process()).map_err(TrackError::Scanner)?);
        Ok(Self { remote, areas: ram.blocks().iter().map(Area::of).collect(), scanner })
    }

    fn register(&self, area: &Area) -> Result<(), TrackError> {
        if !area.tracked {
            return Ok(());
        }
        let registered = self.remote.userfault.register(area.total.clone(), Mode::WRITE_PROTECT);
        registered.map_err(|source| TrackError::Block { id: area.id.clone(), source })
    }

    /// Write-protect, or allow to write, runs of addresses of a block.
    pub(super) fn protect(&self, area: &Area, runs: &[Range<u64>], protect: bool) -> Result<(), TrackError> {
        if !area.tracked {
            return Ok(());
        }
        let userfault = &self.remote.userfault;
        let done = runs.iter().try_for_each(|run| userfault.write_protect(run.clone(), protect));
        done.map_err(|source| TrackError::Block { id: area.id.clone(), source })
    }

    /// Write-protect everything.
    pub(super) fn arm(&self) -> Result<(), TrackError> {
        self.areas.iter().try_for_each(|area| self.protect(area, std::slice::from_ref(&area.total), true))
    }

    /// The written pages of all blocks, as runs of addresses.
    pub(super) fn written(&self, rearm: Rearm) -> Result<Vec<Vec<Range<u64>>>, TrackError> {
        let mut scanner = lock(&self.scanner);
        self.areas
            .iter()
            .map(|area| match area.tracked {
                false => Ok(Vec::new()),
                true => {
                    let written = scanner.written(area.used.clone(), rearm);
                    written.map_err(|source| TrackError::Scan { id: area.id.clone(), source })
                }
            })
            .collect()
    }

    /// Pages of private blocks that were given back and that this kernel does not tell, as runs of addresses.
    pub(super) fn given_back(&self) -> Result<Vec<Vec<Range<u64>>>, TrackError> {
        let mut scanner = lock(&self.scanner);
        // Where everything is protected, a page that is not there has a marker in its place, unless it was given back.
        let none = Categories::PRESENT | Categories::SWAPPED;
        let query = Query { none, ..Query::all(Categories::empty()) };
        self.areas
            .iter()
            .map(|area| match area.tracked && !area.shared && !reports_given_back() {
                false => Ok(Vec::new()),
                true => {
                    let absent = scanner.matching(area.used.clone(), query);
                    absent.map_err(|source| TrackError::Scan { id: area.id.clone(), source })
                }
            })
            .collect()
    }

    /// Holes of a shared block.
    fn holes(&self, area: &Area, block: &ram::Block) -> Result<Holes, TrackError> {
        let failed = |source| TrackError::Scan { id: area.id.clone(), source };
        let Some((file, offset)) = block.file().filter(|_| area.shared) else { return Ok(Holes::default()) };
        // A page that was punched out is not mapped, but one that is not mapped may be in the file.
        let query = Query { none: Categories::PRESENT, ..Query::all(Categories::empty()) };
        let absent = lock(&self.scanner).matching(area.used.clone(), query);
        let absent = area.offsets(absent.map_err(failed)?);
        let looked = |source| TrackError::Proof { id: area.id.clone(), source };
        if area.page > PAGE {
            // hugetlbfs does not tell its holes. If as much is mapped as the file has, all the rest is holes.
            let there = (area.used.end - area.used.start) - pages::bytes(&absent);
            return Ok(match there == file.metadata().map_err(looked)?.blocks() * 512 {
                true => Holes { zero: absent, unknown: Vec::new() },
                false => Holes { zero: Vec::new(), unknown: absent },
            });
        }
        let mut zero = Vec::new();
        for run in absent {
            let there = ram::data(file, offset + run.start..offset + run.end).map_err(looked)?;
            let holes = pages::complement(&there, run.end - run.start);
            holes.into_iter().for_each(|hole| pages::push(&mut zero, run.start + hole.start..run.start + hole.end));
        }
        Ok(Holes { zero, unknown: Vec::new() })
    }

    /// What was written (addresses) and given back (addresses), with what the files tell, as offsets in the blocks.
    pub(super) fn dirty(
        &self,
        ram: &GuestRam,
        written: Vec<Vec<Range<u64>>>,
        given_back: Vec<Vec<Range<u64>>>,
    ) -> Result<Dirty, TrackError> {
        let mut dirty = Dirty::default();
        let found = written.into_iter().zip(given_back);
        for ((area, block), (written, given_back)) in self.areas.iter().zip(ram.blocks()).zip(found) {
            let holes = if ram.may_shrink() { self.holes(area, block)? } else { Holes::default() };
            let zero = pages::union(&area.offsets(given_back), &holes.zero);
            let written = pages::union(&area.offsets(written), &holes.unknown);
            // What is known to be zero need not be read.
            dirty.written.push(pages::difference(&written, &zero));
            dirty.zero.push(zero);
        }
        Ok(dirty)
    }

    /// A page of a block that is there and protected, with its first byte.
    pub(super) fn page_for_proof(&self, index: usize) -> Result<Option<(u64, u8)>, TrackError> {
        match self.areas.get(index) {
            Some(area) => page_for_proof(self.remote.process(), &mut lock(&self.scanner), area),
            None => Ok(None),
        }
    }

    /// Prove that writing is recorded, with a page of each block: with the guest stopped, one byte is written over by
    /// itself. The page counts as written from then on.
    pub(super) fn prove(&self) -> Result<(), TrackError> {
        let mut scanner = lock(&self.scanner);
        self.areas.iter().try_for_each(|area| prove_page(self.remote.process(), &mut scanner, area))
    }

    /// Go on with the blocks of `ram`, in its order; new ones are protected at once.
    pub(super) fn adjust(&mut self, ram: &GuestRam) -> Result<(), TrackError> {
        let mut areas = Vec::new();
        for block in ram.blocks() {
            let area = Area::of(block);
            if !self.areas.iter().any(|old| old.id == area.id && old.total == area.total) {
                self.register(&area)?;
                self.protect(&area, std::slice::from_ref(&area.total), true)?;
            }
            areas.push(area);
        }
        // What has gone was unregistered by its unmapping.
        self.areas = areas;
        Ok(())
    }

    /// Undo everything. Writers that wait go on.
    pub(super) fn release(&self) {
        for area in self.areas.iter().filter(|area| area.tracked) {
            // A block that was unplugged is not registered any more. Closing the descriptor undoes what is left.
            let _ = self.remote.userfault.unregister(area.total.clone());
            // Linux wakes by itself only who waits for a missing page.
            let _ = self.remote.userfault.wake(area.total.clone());
        }
    }
}

/// A page of a block that is there and protected, with its first byte.
fn page_for_proof(process: Process, scanner: &mut Scanner, area: &Area) -> Result<Option<(u64, u8)>, TrackError> {
    if !area.tracked {
        return Ok(None);
    }
    let query = Query { none: Categories::WRITTEN, ..Query::all(Categories::PRESENT) };
    let failed = |source| TrackError::Scan { id: area.id.clone(), source };
    let Some(address) = scanner.first(area.total.clone(), query).map_err(failed)? else { return Ok(None) };
    let mut byte = [0];
    memory::read(process, address, &mut byte).map_err(|source| TrackError::Proof { id: area.id.clone(), source })?;
    let [byte] = byte;
    Ok(Some((address, byte)))
}

/// Prove for one block that writing is recorded, if a page of it is there and protected.
pub(super) fn prove_page(process: Process, scanner: &mut Scanner, area: &Area) -> Result<(), TrackError> {
    let Some((address, byte)) = page_for_proof(process, scanner, area)? else { return Ok(()) };
    memory::write(process, address, &[byte]).map_err(|source| TrackError::Proof { id: area.id.clone(), source })?;
    let written = scanner.written(address..address + area.page, Rearm::Unchecked);
    match written.map_err(|source| TrackError::Scan { id: area.id.clone(), source })?.is_empty() {
        false => Ok(()),
        true => Err(TrackError::Unproven { id: area.id.clone(), address }),
    }
}
