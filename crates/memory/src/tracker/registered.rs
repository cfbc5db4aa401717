//! RAM blocks registered with a userfaultfd for write protection, and the record of writes in their page tables.

use super::{Dirty, TrackError};
use crate::ram::{self, GuestRam};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory;
use rekindle_kernel::pagemap::{Categories, Query, Rearm, Scanner, kernel_reports_given_back};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::remote::{self, Existing, Remote, RemoteError};
use rekindle_kernel::userfault::{Features, Mode};
use rekindle_pages::{PAGE_SIZE, PageRuns};
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Features of all trackers. They also identify a tracker: QEMU itself never requests protection of unpopulated pages.
const COMMON: Features =
    Features::WP_UNPOPULATED.union(Features::WP_HUGETLBFS_SHMEM).union(Features::PAGEFAULT_FLAG_WP);
pub(super) const ASYNCHRONOUS: Features = COMMON.union(Features::WP_ASYNC);
pub(super) const SYNCHRONOUS: Features = COMMON.union(Features::EXACT_ADDRESS);

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Finds userfaultfds of trackers that an earlier process left in QEMU.
///
/// # Errors
/// [`RemoteError::Take`] when QEMU's descriptors cannot be listed.
pub fn leftovers(process: Process) -> Result<Vec<Existing>, RemoteError> {
    let is_of_tracker = |existing: &Existing| [ASYNCHRONOUS, SYNCHRONOUS].contains(&existing.features);
    Ok(remote::existing(process)?.into_iter().filter(is_of_tracker).collect())
}

/// Closes all [`leftovers`], which ends their protection. Returns their number.
///
/// # Errors
/// [`RemoteError`] of listing, taking or closing a descriptor.
pub fn close_leftovers(injector: Injector) -> Result<usize, RemoteError> {
    let leftovers = leftovers(injector.process())?;
    for leftover in &leftovers {
        Remote::take(injector, *leftover)?.close()?;
    }
    Ok(leftovers.len())
}

/// Checks that QEMU can open the userfaultfd that trackers need, by opening and closing one. If this process is killed
/// in between, the descriptor is one of the [`leftovers`].
///
/// # Errors
/// [`RemoteError`]; the message names the missing permission.
pub fn check_userfaultfd(injector: Injector, device: Option<RawFd>) -> Result<(), RemoteError> {
    Remote::open(injector, ASYNCHRONOUS, device)?.close()
}

/// Address range of a RAM block, and how its writes are recorded.
#[derive(Debug)]
pub(super) struct Area {
    pub id: String,
    /// Addresses in QEMU that are registered: the whole block.
    pub total: Range<u64>,
    /// Addresses in QEMU whose writes are reported: the used part.
    pub used: Range<u64>,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Whether the block is tracked. A block that cannot be written is not.
    is_tracked: bool,
    /// Whether the block is shared memory with a file.
    is_shared: bool,
}

impl Area {
    pub(super) fn of(block: &ram::Block) -> Self {
        Self {
            id: block.info.id.clone(),
            total: block.total(),
            used: block.used(),
            page_bytes: block.info.page_size,
            is_tracked: block.writable,
            is_shared: block.file().is_some(),
        }
    }

    /// Converts addresses to offsets in the block.
    pub(super) fn offsets(&self, runs: PageRuns) -> PageRuns {
        runs.relative_to(self.total.start)
    }
}

/// Unmapped pages of a shared block that are, or may be, holes of its file, as offsets in the block.
#[derive(Debug, Default)]
struct Holes {
    /// Pages that are zero.
    zero: PageRuns,
    /// Pages that may be zero, and must be read.
    unknown: PageRuns,
}

/// The holes of shared blocks that were found while the guest ran, as offsets in each block, after the last collection.
/// `None` for a block whose holes must be found when the guest is stopped.
pub(super) type EarlierHoles = Vec<Option<PageRuns>>;

/// A userfaultfd and the blocks that are registered with it.
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
    /// Opens a userfaultfd in QEMU and registers all blocks; nothing is protected yet. Closes the [`leftovers`] first.
    pub(super) fn attach(
        injector: Injector,
        ram: &GuestRam,
        features: Features,
        device: Option<RawFd>,
    ) -> Result<Self, TrackError> {
        close_leftovers(injector)?;
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

    /// Uses a userfaultfd that an earlier process left.
    pub(super) fn take_over(remote: Remote, ram: &GuestRam) -> Result<Self, TrackError> {
        let scanner = Mutex::new(Scanner::open(ram.process()).map_err(TrackError::Scanner)?);
        Ok(Self { remote, areas: ram.blocks().iter().map(Area::of).collect(), scanner })
    }

    fn register(&self, area: &Area) -> Result<(), TrackError> {
        if !area.is_tracked {
            return Ok(());
        }
        let registered = self.remote.userfault.register(area.total.clone(), Mode::WRITE_PROTECT);
        registered.map_err(|source| TrackError::Block { id: area.id.clone(), source })
    }

    /// Protects runs of addresses of a block against writes, or removes the protection.
    pub(super) fn protect(&self, area: &Area, runs: &[Range<u64>], protect: bool) -> Result<(), TrackError> {
        if !area.is_tracked {
            return Ok(());
        }
        let userfault = &self.remote.userfault;
        let result = runs.iter().try_for_each(|run| userfault.write_protect(run.clone(), protect));
        result.map_err(|source| TrackError::Block { id: area.id.clone(), source })
    }

    /// Protects all blocks.
    pub(super) fn arm(&self) -> Result<(), TrackError> {
        self.areas.iter().try_for_each(|area| self.protect(area, std::slice::from_ref(&area.total), true))
    }

    /// Finds the written pages of all blocks, as runs of addresses in QEMU.
    pub(super) fn written(&self, rearm: Rearm) -> Result<Vec<PageRuns>, TrackError> {
        let mut scanner = lock(&self.scanner);
        self.areas
            .iter()
            .map(|area| match area.is_tracked {
                false => Ok(PageRuns::new()),
                true => {
                    let written = scanner.written(area.used.clone(), rearm);
                    written.map_err(|source| TrackError::Scan { id: area.id.clone(), source })
                }
            })
            .collect()
    }

    /// Finds pages of private blocks that were given back but that this kernel does not record, as runs of addresses in
    /// QEMU.
    pub(super) fn given_back(&self) -> Result<Vec<PageRuns>, TrackError> {
        let mut scanner = lock(&self.scanner);
        // All pages were protected, so an absent page has a marker in the page table, unless it was given back.
        let none = Categories::PRESENT | Categories::SWAPPED;
        let query = Query { none, ..Query::all(Categories::empty()) };
        self.areas
            .iter()
            .map(|area| match area.is_tracked && !area.is_shared && !kernel_reports_given_back() {
                false => Ok(PageRuns::new()),
                true => {
                    let absent = scanner.matching(area.used.clone(), query);
                    absent.map_err(|source| TrackError::Scan { id: area.id.clone(), source })
                }
            })
            .collect()
    }

    /// Finds the holes of a shared block.
    fn holes(&self, area: &Area, block: &ram::Block) -> Result<Holes, TrackError> {
        let failed = |source| TrackError::Scan { id: area.id.clone(), source };
        let Some((file, offset)) = block.file().filter(|_| area.is_shared) else { return Ok(Holes::default()) };
        // A page that was punched out is not mapped. The reverse is not true: an unmapped page may be in the file.
        let query = Query { none: Categories::PRESENT, ..Query::all(Categories::empty()) };
        let unmapped = lock(&self.scanner).matching(area.used.clone(), query);
        let unmapped = area.offsets(unmapped.map_err(failed)?);
        let file_failed = |source| TrackError::Proof { id: area.id.clone(), source };
        if area.page_bytes > PAGE_BYTES {
            // hugetlbfs does not report holes. If the number of mapped pages is that of the file, all unmapped pages
            // are holes.
            let mapped_bytes = (area.used.end - area.used.start) - unmapped.bytes();
            let bytes_in_file = file.metadata().map_err(file_failed)?.blocks() * 512;
            return Ok(match mapped_bytes == bytes_in_file {
                true => Holes { zero: unmapped, unknown: PageRuns::new() },
                false => Holes { zero: PageRuns::new(), unknown: unmapped },
            });
        }
        let mut zero = PageRuns::new();
        for run in unmapped {
            let data = ram::data_runs(file, offset + run.start..offset + run.end).map_err(file_failed)?;
            let holes = data.complement(run.end - run.start).placed_at(run.start);
            holes.into_iter().for_each(|hole| zero.push(hole));
        }
        Ok(Holes { zero, unknown: PageRuns::new() })
    }

    /// Finds the holes of the shared blocks while the guest runs, which may take milliseconds.
    pub(super) fn earlier_holes(&self, ram: &GuestRam) -> Result<EarlierHoles, TrackError> {
        if !ram.may_shrink() {
            return Ok(EarlierHoles::new());
        }
        let areas = self.areas.iter().zip(ram.blocks());
        areas
            .map(|(area, block)| match area.page_bytes > PAGE_BYTES {
                true => Ok(None),
                false => Ok(Some(self.holes(area, block)?.zero)),
            })
            .collect()
    }

    /// Combines written pages and pages given back (addresses) with the holes of the files. The result is in offsets.
    pub(super) fn dirty(
        &self,
        ram: &GuestRam,
        written: Vec<PageRuns>,
        given_back: Vec<PageRuns>,
        earlier_holes: EarlierHoles,
    ) -> Result<Dirty, TrackError> {
        let mut dirty = Dirty::default();
        let records = written.into_iter().zip(given_back);
        let mut earlier_holes = earlier_holes.into_iter();
        for ((area, block), (written, given_back)) in self.areas.iter().zip(ram.blocks()).zip(records) {
            let written = area.offsets(written);
            let holes = match earlier_holes.next().flatten() {
                // A page that was written since then is among the written ones.
                Some(zero) => Holes { zero: zero.difference(&written), unknown: PageRuns::new() },
                None if ram.may_shrink() => self.holes(area, block)?,
                None => Holes::default(),
            };
            let zero = area.offsets(given_back).union(&holes.zero);
            let written = written.union(&holes.unknown);
            // Pages that are known to be zero need not be read.
            dirty.written.push(written.difference(&zero));
            dirty.zero.push(zero);
        }
        Ok(dirty)
    }

    /// Finds a byte of a present and protected page of a block for a test write.
    pub(super) fn byte_for_test_write(&self, index: usize) -> Result<Option<TestByte>, TrackError> {
        match self.areas.get(index) {
            Some(area) => byte_for_test_write(self.remote.process(), &mut lock(&self.scanner), area),
            None => Ok(None),
        }
    }

    /// Tests that writes are recorded, with the guest stopped: writes one byte of each block, unchanged. The page of
    /// that byte counts as written.
    pub(super) fn prove(&self) -> Result<(), TrackError> {
        let mut scanner = lock(&self.scanner);
        self.areas.iter().try_for_each(|area| prove_page(self.remote.process(), &mut scanner, area))
    }

    /// Tracks the blocks of `ram` from now on, in its order. New blocks are protected immediately.
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
        // The kernel unregistered removed blocks when they were unmapped.
        self.areas = areas;
        Ok(())
    }

    /// Unregisters all blocks. Writers that wait continue.
    pub(super) fn release(&self) {
        for area in self.areas.iter().filter(|area| area.is_tracked) {
            // Fails for a block that was unplugged. Closing the descriptor unregisters all remaining ranges.
            let _ = self.remote.userfault.unregister(area.total.clone());
            // Unregistering wakes only threads that wait for a missing page, not writers.
            let _ = self.remote.userfault.wake(area.total.clone());
        }
    }
}

/// A byte of QEMU's memory that is written, unchanged, to test that writes are recorded.
pub(super) struct TestByte {
    pub address: u64,
    pub value: u8,
}

/// Finds the first byte of a present and protected page of `area`.
fn byte_for_test_write(process: Process, scanner: &mut Scanner, area: &Area) -> Result<Option<TestByte>, TrackError> {
    if !area.is_tracked {
        return Ok(None);
    }
    let query = Query { none: Categories::WRITTEN, ..Query::all(Categories::PRESENT) };
    let failed = |source| TrackError::Scan { id: area.id.clone(), source };
    let Some(address) = scanner.first(area.total.clone(), query).map_err(failed)? else { return Ok(None) };
    let mut byte = [0];
    memory::read(process, address, &mut byte).map_err(|source| TrackError::Proof { id: area.id.clone(), source })?;
    let [value] = byte;
    Ok(Some(TestByte { address, value }))
}

/// Tests that writes to one block are recorded, if it has a present and protected page.
pub(super) fn prove_page(process: Process, scanner: &mut Scanner, area: &Area) -> Result<(), TrackError> {
    let Some(TestByte { address, value }) = byte_for_test_write(process, scanner, area)? else { return Ok(()) };
    memory::write(process, address, &[value]).map_err(|source| TrackError::Proof { id: area.id.clone(), source })?;
    let written = scanner.written(address..address + area.page_bytes, Rearm::Unchecked);
    match written.map_err(|source| TrackError::Scan { id: area.id.clone(), source })?.is_empty() {
        false => Ok(()),
        true => Err(TrackError::Unproven { id: area.id.clone(), address }),
    }
}
