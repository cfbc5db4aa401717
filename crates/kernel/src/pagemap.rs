//! `PAGEMAP_SCAN`: which pages of a process were written, or are there (Linux 6.7,
//! `Documentation/admin-guide/mm/pagemap.rst`).
//!
//! A page counts as written when it is not write-protected by a userfaultfd: so the kernel's page tables are the record
//! of what was written, and no list need be kept. Reading them is possible for any userfaultfd that protects against
//! writes; protecting the found pages again in the same pass only for an asynchronous one.

use crate::ioctl;
use crate::process::Process;
use crate::userfault::{Features, Mode, Userfault};
use nix::errno::Errno;
use nix::sys::mman::{self, MapFlags, MmapAdvise, ProtFlags};
use rekindle_pages::PageRuns;
use std::fs::File;
use std::io;
use std::mem::size_of;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;

bitflags::bitflags! {
    /// What is true of a page.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Categories: u64 {
        /// It is in an area of asynchronous write protection.
        const WP_ALLOWED = 1;
        /// It is not write-protected by a userfaultfd.
        const WRITTEN = 1 << 1;
        /// It is of a file or of shared memory.
        const FILE = 1 << 2;
        /// It is mapped.
        const PRESENT = 1 << 3;
        /// It is swapped out, or a marker stands in its place: protected, but not there.
        const SWAPPED = 1 << 4;
        /// It is the page of zeroes that all processes share.
        const ZERO = 1 << 5;
        /// It is part of a huge page.
        const HUGE = 1 << 6;
        /// It was written since soft-dirty bits were cleared.
        const SOFT_DIRTY = 1 << 7;
    }
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Argument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const PM_SCAN_WP_MATCHING: u64 = 1;
const PM_SCAN_CHECK_WPASYNC: u64 = 2;
const PAGEMAP_SCAN: u64 = 0xc060_6610;
const _: () = assert!(PAGEMAP_SCAN == ioctl::read_write(b'f', 16, size_of::<Argument>()));
const _: () = assert!(size_of::<Region>() == 24);

mod call {
    nix::ioctl_readwrite_bad!(scan, super::PAGEMAP_SCAN, super::Argument);
}

/// Why pages could not be scanned.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// The kernel is too old.
    #[error("this kernel has no PAGEMAP_SCAN; Linux 6.7 or newer is needed")]
    Unsupported,
    /// `/proc/PID/pagemap` cannot be opened.
    #[error("cannot open the page map of process {pid}: run as root or as the user of that process")]
    Open {
        /// The process.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Part of the range is not under asynchronous write protection, so that a scan would find nothing whatever was
    /// written.
    #[error("{:#x}..{:#x} of process {pid} is not (any more) under asynchronous write protection", range.start, range.end)]
    Unprotected {
        /// The process.
        pid: u32,
        /// What was scanned.
        range: Range<u64>,
    },
    /// The scan failed.
    #[error("cannot scan {:#x}..{:#x} of process {pid}", range.start, range.end)]
    Scan {
        /// The process.
        pid: u32,
        /// What was scanned.
        range: Range<u64>,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The pages to find: all conditions must be true of a page.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    /// True of the page.
    pub all: Categories,
    /// Not true of the page.
    pub none: Categories,
    /// At least one is true of the page, if any is named.
    pub any: Categories,
    /// What to report of a page; pages that differ in it are in different runs.
    pub report: Categories,
}

impl Query {
    /// Pages of which all of these are true.
    #[must_use]
    pub const fn all(all: Categories) -> Self {
        Self { all, none: Categories::empty(), any: Categories::empty(), report: all }
    }
}

/// How a scan of written pages treats protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rearm {
    /// Only read. The range must be under asynchronous protection.
    No,
    /// Protect again what is found, page by page in the same moment. The range must be under asynchronous protection.
    Yes,
    /// Only read, and do not check how the range is protected: the caller knows.
    Unchecked,
}

impl Rearm {
    fn flags(self) -> u64 {
        match self {
            Self::No => PM_SCAN_CHECK_WPASYNC,
            Self::Yes => PM_SCAN_CHECK_WPASYNC | PM_SCAN_WP_MATCHING,
            Self::Unchecked => 0,
        }
    }
}

/// How many runs are fetched at a time: 192 KiB.
const RUNS: usize = 8192;

/// Scans the pages of one process.
#[derive(Debug)]
pub struct Scanner {
    pid: u32,
    file: File,
    regions: Vec<Region>,
}

impl Scanner {
    /// Opens the page map of `process`.
    ///
    /// # Errors
    /// [`ScanError::Open`], [`ScanError::Unsupported`].
    pub fn open(process: Process) -> Result<Self, ScanError> {
        let pid = process.pid;
        let file = File::open(format!("/proc/{pid}/pagemap")).map_err(|source| ScanError::Open { pid, source })?;
        let mut scanner = Self { pid, file, regions: vec![Region::default(); RUNS] };
        // An empty range, to check whether the kernel has the call.
        scanner.scan(0..0, 0, Query::all(Categories::PRESENT), |_, _| {})?;
        Ok(scanner)
    }

    /// The written pages of `range`, as runs of addresses, ascending and apart.
    ///
    /// # Errors
    /// [`ScanError::Unprotected`] unless [`Rearm::Unchecked`]; [`ScanError::Scan`].
    pub fn written(&mut self, range: Range<u64>, rearm: Rearm) -> Result<PageRuns, ScanError> {
        let mut runs = PageRuns::new();
        self.scan(range, rearm.flags(), Query::all(Categories::WRITTEN), |run, _| runs.push(run))?;
        Ok(runs)
    }

    /// As [`Scanner::written`], but a place where neither a page nor a marker is does not count: where pages are still
    /// missing, nothing was written there, or it has been taken back by the kernel since. Nothing is put there, either.
    ///
    /// # Errors
    /// As for [`Scanner::written`].
    pub fn written_there(&mut self, range: Range<u64>, rearm: Rearm) -> Result<PageRuns, ScanError> {
        let query = Query { any: Categories::PRESENT | Categories::SWAPPED, ..Query::all(Categories::WRITTEN) };
        let mut runs = PageRuns::new();
        self.scan(range, rearm.flags(), query, |run, _| runs.push(run))?;
        Ok(runs)
    }

    /// What of `range` is mapped, but not under asynchronous write protection.
    ///
    /// # Errors
    /// [`ScanError::Scan`].
    pub fn untracked(&mut self, range: Range<u64>) -> Result<PageRuns, ScanError> {
        self.matching(range, Query { none: Categories::WP_ALLOWED, ..Query::all(Categories::empty()) })
    }

    /// The pages of `range` for which `query` holds.
    ///
    /// # Errors
    /// [`ScanError::Scan`].
    pub fn matching(&mut self, range: Range<u64>, query: Query) -> Result<PageRuns, ScanError> {
        let mut runs = PageRuns::new();
        self.scan(range, 0, query, |run, _| runs.push(run))?;
        Ok(runs)
    }

    /// The address of the first page of `range` for which `query` holds.
    ///
    /// # Errors
    /// [`ScanError::Scan`].
    pub fn first(&mut self, range: Range<u64>, query: Query) -> Result<Option<u64>, ScanError> {
        let mut first = None;
        self.scan_some(range, 0, query, 1, |run, _| first = first.or(Some(run.start)))?;
        Ok(first)
    }

    /// Each run of pages of `range` for which `query` holds, with the categories that it reports.
    ///
    /// # Errors
    /// [`ScanError::Scan`].
    pub fn each(
        &mut self,
        range: Range<u64>,
        query: Query,
        each: impl FnMut(Range<u64>, Categories),
    ) -> Result<(), ScanError> {
        self.scan(range, 0, query, each)
    }

    fn scan(
        &mut self,
        range: Range<u64>,
        flags: u64,
        query: Query,
        each: impl FnMut(Range<u64>, Categories),
    ) -> Result<(), ScanError> {
        self.scan_some(range, flags, query, 0, each)
    }

    /// As [`Scanner::scan`], to an end after `limit` pages unless that is 0.
    fn scan_some(
        &mut self,
        range: Range<u64>,
        flags: u64,
        query: Query,
        limit: u64,
        mut each: impl FnMut(Range<u64>, Categories),
    ) -> Result<(), ScanError> {
        let mut at = range.start;
        loop {
            let mut argument = Argument {
                size: size_of::<Argument>() as u64,
                flags,
                start: at,
                end: range.end,
                vec: self.regions.as_mut_ptr() as u64,
                vec_len: self.regions.len() as u64,
                category_inverted: query.none.bits(),
                category_mask: (query.all | query.none).bits(),
                category_anyof_mask: query.any.bits(),
                return_mask: query.report.bits(),
                max_pages: limit,
                ..Argument::default()
            };
            // SAFETY: the kernel reads and writes one `struct pm_scan_arg` of asserted size, and at most `vec_len`
            // whole regions at `vec`, which is our own vector of that length.
            let found = match unsafe { call::scan(self.file.as_raw_fd(), &raw mut argument) } {
                Ok(found) => found as usize,
                Err(Errno::EINTR) => continue,
                Err(Errno::ENOTTY) => return Err(ScanError::Unsupported),
                Err(Errno::EPERM) if flags & PM_SCAN_CHECK_WPASYNC != 0 => {
                    return Err(ScanError::Unprotected { pid: self.pid, range });
                }
                Err(e) => return Err(ScanError::Scan { pid: self.pid, range, source: e.into() }),
            };
            let mut reached = argument.walk_end;
            for region in self.regions.iter().take(found) {
                each(region.start..region.end, Categories::from_bits_truncate(region.categories));
                // When the buffer is full just at the end, Linux 6.18 returns an end before the last run that it
                // reports.
                reached = reached.max(region.end);
            }
            if reached <= at || reached >= range.end || (limit > 0 && found > 0) {
                return Ok(());
            }
            at = reached;
        }
    }
}

/// Whether this kernel reports pages of private memory as written that were given back a whole page table at a time
/// (2 MiB). Linux 6.7 does not, 6.18.44 does: found by trying. If it does not, the caller must search for them.
#[must_use]
pub fn reports_given_back() -> bool {
    static REPORTS: OnceLock<bool> = OnceLock::new();
    *REPORTS.get_or_init(|| try_given_back().unwrap_or(false))
}

/// Tries it on memory of our own.
fn try_given_back() -> Option<bool> {
    const TABLE: usize = 2 << 20;
    let features = Features::WP_ASYNC | Features::WP_UNPOPULATED;
    let userfault = Userfault::own(features).ok()?;
    let mut scanner = Scanner::open(Process::current().ok()?).ok()?;
    let size = NonZero::new(4 * TABLE)?;
    // SAFETY: a fresh mapping wherever the kernel likes, which nothing else knows.
    let area = unsafe {
        mman::mmap_anonymous(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
    }
    .ok()?;
    let reported = (|| {
        let whole = area.addr().get() as u64..(area.addr().get() + 4 * TABLE) as u64;
        // SAFETY: our own mapping; huge pages have no page table to give back.
        unsafe { mman::madvise(area, 4 * TABLE, MmapAdvise::MADV_NOHUGEPAGE) }.ok()?;
        let start = whole.start.next_multiple_of(TABLE as u64);
        let table = start..start + TABLE as u64;
        let skip = (start - whole.start) as usize;
        // SAFETY: within our own writable mapping, by less than its half.
        unsafe { area.cast::<u8>().add(skip).write_bytes(1, TABLE) };
        userfault.register(whole.clone(), Mode::WRITE_PROTECT).ok()?;
        userfault.write_protect(whole, true).ok()?;
        // SAFETY: within our own mapping, to which there are no references.
        unsafe { mman::madvise(area.byte_add(skip), TABLE, MmapAdvise::MADV_DONTNEED) }.ok()?;
        let written = scanner.written(table.clone(), Rearm::No).ok()?;
        Some(*written == [table])
    })();
    // SAFETY: our own mapping, whose last use was above.
    let _ = unsafe { mman::munmap(area, 4 * TABLE) };
    reported
}

#[cfg(test)]
mod tests;
