//! `PAGEMAP_SCAN`: finds pages of a process that were written, or that are present (Linux 6.7,
//! `Documentation/admin-guide/mm/pagemap.rst`).
//!
//! A page counts as written if no userfaultfd write-protects it. The kernel's page tables are therefore the record of
//! writes, and no list is needed. A scan can read that record for any userfaultfd that protects against writes.
//! Protecting the found pages again in the same pass requires asynchronous write protection.

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
    /// Properties of a page.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Categories: u64 {
        /// In an area of asynchronous write protection.
        const WP_ALLOWED = 1;
        /// Not write-protected by a userfaultfd.
        const WRITTEN = 1 << 1;
        /// Of a file or of shared memory.
        const FILE = 1 << 2;
        /// Mapped.
        const PRESENT = 1 << 3;
        /// Swapped out, or replaced by a marker: protected, but not present.
        const SWAPPED = 1 << 4;
        /// The page of zeros that all processes share.
        const ZERO = 1 << 5;
        /// Part of a huge page.
        const HUGE = 1 << 6;
        /// Written since the soft-dirty bits were cleared.
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

/// The reason why pages could not be scanned.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// The kernel has no `PAGEMAP_SCAN`.
    #[error("this kernel has no PAGEMAP_SCAN; Linux 6.7 or newer is needed")]
    Unsupported,
    /// `/proc/PID/pagemap` cannot be opened.
    #[error("cannot open the page map of process {pid}: run as root or as the user of that process")]
    Open {
        /// Number of the process.
        pid: u32,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// Part of the range is not under asynchronous write protection. A scan could not find writes to that part.
    #[error("{:#x}..{:#x} of process {pid} is not (any more) under asynchronous write protection", range.start, range.end)]
    Unprotected {
        /// Number of the process.
        pid: u32,
        /// The addresses that were scanned.
        range: Range<u64>,
    },
    /// The scan failed for another reason.
    #[error("cannot scan {:#x}..{:#x} of process {pid}", range.start, range.end)]
    Scan {
        /// Number of the process.
        pid: u32,
        /// The addresses that were scanned.
        range: Range<u64>,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

/// The pages to find. A page must meet the conditions of `all`, `none` and `any`.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    /// Properties that the page must have.
    pub all: Categories,
    /// Properties that the page must not have.
    pub none: Categories,
    /// Properties of which the page must have at least one, unless this is empty.
    pub any: Categories,
    /// Properties to report. Pages that differ in them are reported in different runs.
    pub report: Categories,
}

impl Query {
    /// Finds pages that have all of these properties, and reports those.
    #[must_use]
    pub const fn all(all: Categories) -> Self {
        Self { all, none: Categories::empty(), any: Categories::empty(), report: all }
    }
}

/// How a scan of written pages treats write protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rearm {
    /// Only reads. The range must be under asynchronous protection.
    No,
    /// Protects the found pages again, each page atomically with its report. The range must be under asynchronous
    /// protection.
    Yes,
    /// Only reads, without a check that the range is protected: the caller has ensured it.
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

/// Runs fetched per call; they occupy 192 KiB.
const RUNS_PER_CALL: usize = 8192;

/// A scanner for the pages of one process.
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
        let mut scanner = Self { pid, file, regions: vec![Region::default(); RUNS_PER_CALL] };
        // Scans an empty range to check that the kernel has the call.
        scanner.scan(0..0, 0, Query::all(Categories::PRESENT), |_, _| {})?;
        Ok(scanner)
    }

    /// Returns the written pages of `range` as runs of addresses, ascending and not adjacent.
    ///
    /// # Errors
    /// [`ScanError::Unprotected`] unless [`Rearm::Unchecked`]; [`ScanError::Scan`].
    pub fn written(&mut self, range: Range<u64>, rearm: Rearm) -> Result<PageRuns, ScanError> {
        let mut runs = PageRuns::new();
        self.scan(range, rearm.flags(), Query::all(Categories::WRITTEN), |run, _| runs.push(run))?;
        Ok(runs)
    }

    /// Returns the written pages of `range` like [`Scanner::written`], but only where a page or a marker is present. An
    /// address without either is a missing page that was never written, or a page that the kernel has released since.
    /// The scan puts no markers at such addresses.
    ///
    /// # Errors
    /// As for [`Scanner::written`].
    pub fn written_where_present(&mut self, range: Range<u64>, rearm: Rearm) -> Result<PageRuns, ScanError> {
        let query = Query { any: Categories::PRESENT | Categories::SWAPPED, ..Query::all(Categories::WRITTEN) };
        let mut runs = PageRuns::new();
        self.scan(range, rearm.flags(), query, |run, _| runs.push(run))?;
        Ok(runs)
    }

    /// Returns the parts of `range` that are mapped but not under asynchronous write protection.
    ///
    /// # Errors
    /// [`ScanError::Scan`].
    pub fn untracked(&mut self, range: Range<u64>) -> Result<PageRuns, ScanError> {
        self.matching(range, Query { none: Categories::WP_ALLOWED, ..Query::all(Categories::empty()) })
    }

    /// Returns the pages of `range` that match `query`.
    ///
    /// # Errors
    /// [`ScanError::Scan`].
    pub fn matching(&mut self, range: Range<u64>, query: Query) -> Result<PageRuns, ScanError> {
        let mut runs = PageRuns::new();
        self.scan(range, 0, query, |run, _| runs.push(run))?;
        Ok(runs)
    }

    /// Returns the address of the first page of `range` that matches `query`.
    ///
    /// # Errors
    /// [`ScanError::Scan`].
    pub fn first(&mut self, range: Range<u64>, query: Query) -> Result<Option<u64>, ScanError> {
        let mut first = None;
        self.scan_some(range, 0, query, 1, |run, _| first = first.or(Some(run.start)))?;
        Ok(first)
    }

    /// Calls `each` for every run of pages of `range` that match `query`, with the properties that the query reports.
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

    /// Scans like [`Scanner::scan`], but ends after `limit` pages unless `limit` is 0.
    fn scan_some(
        &mut self,
        range: Range<u64>,
        flags: u64,
        query: Query,
        limit: u64,
        mut each: impl FnMut(Range<u64>, Categories),
    ) -> Result<(), ScanError> {
        let mut scan_from = range.start;
        loop {
            let mut argument = Argument {
                size: size_of::<Argument>() as u64,
                flags,
                start: scan_from,
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
                // If the buffer becomes full at the very end, Linux 6.18 returns an end address before the last run
                // that it reports.
                reached = reached.max(region.end);
            }
            if reached <= scan_from || reached >= range.end || (limit > 0 && found > 0) {
                return Ok(());
            }
            scan_from = reached;
        }
    }
}

/// Returns whether this kernel reports released pages of private memory as written if a whole page table (2 MiB) of
/// them was released together. Linux 6.7 does not, 6.18.44 does; the result comes from a trial. If the kernel does not
/// report them, the caller must search for them.
#[must_use]
pub fn kernel_reports_given_back() -> bool {
    static REPORTS: OnceLock<bool> = OnceLock::new();
    *REPORTS.get_or_init(|| try_given_back().unwrap_or(false))
}

/// Makes the trial on memory of this process.
fn try_given_back() -> Option<bool> {
    const TABLE: usize = 2 << 20;
    let features = Features::WP_ASYNC | Features::WP_UNPOPULATED;
    let userfault = Userfault::own(features).ok()?;
    let mut scanner = Scanner::open(Process::current().ok()?).ok()?;
    let size = NonZero::new(4 * TABLE)?;
    // SAFETY: a fresh mapping at an address that the kernel chooses, to which nothing refers.
    let area = unsafe {
        mman::mmap_anonymous(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
    }
    .ok()?;
    let reported = (|| {
        let whole = area.addr().get() as u64..(area.addr().get() + 4 * TABLE) as u64;
        // SAFETY: our own mapping; with huge pages there would be no page table to release.
        unsafe { mman::madvise(area, 4 * TABLE, MmapAdvise::MADV_NOHUGEPAGE) }.ok()?;
        let start = whole.start.next_multiple_of(TABLE as u64);
        let table = start..start + TABLE as u64;
        let skip = (start - whole.start) as usize;
        // SAFETY: within our own writable mapping, of which it covers less than half.
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
