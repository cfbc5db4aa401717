//! Free huge pages of a hugetlbfs.
//!
//! The kernel has one pool for each page size. It *reserves* pages for a file when the file is first mapped, and the
//! file keeps them until it is removed. A process that touches a page for which the pool has none is killed by
//! `SIGBUS`. So all pages of a RAM file are reserved when it is created; otherwise it is not created.

use rustix::fs::{FsWord, StatFs};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// `HUGETLBFS_MAGIC` of `linux/magic.h`.
pub(crate) const HUGETLBFS_MAGIC: FsWord = 0x9584_58f6;

/// Free space of a hugetlbfs and of the kernel's pool, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugePages {
    /// Size of a huge page.
    pub page: u64,
    /// Configured size of the pool (`nr_hugepages`).
    pub pool: u64,
    /// Free pages, including pages that the kernel may add to the pool (`nr_overcommit_hugepages`).
    pub free: u64,
    /// The part of `free` that is reserved for files.
    pub reserved: u64,
    /// Space left by the mount's `size=`; `None` without that option.
    pub limit: Option<u64>,
}

impl HugePages {
    /// Reads the free space of the file system of `stat`; `None` if it is not a hugetlbfs.
    ///
    /// # Errors
    /// Errors of reading the pool in `/sys/kernel/mm/hugepages`.
    pub fn of(stat: &StatFs) -> io::Result<Option<Self>> {
        if stat.f_type != HUGETLBFS_MAGIC {
            return Ok(None);
        }
        let page = u64::try_from(stat.f_bsize).map_err(io::Error::other)?;
        let directory = directory(page);
        let pages = |name: &str| -> io::Result<u64> {
            let path = directory.join(name);
            let failed = |e: &dyn std::fmt::Display| io::Error::other(format!("{}: {e}", path.display()));
            let text = fs::read_to_string(&path).map_err(|e| failed(&e))?;
            text.trim().parse::<u64>().map_err(|e| failed(&e)).map(|pages| pages.saturating_mul(page))
        };
        let (free, reserved) = read_together(|| pages("free_hugepages"), || pages("resv_hugepages"))?;
        let overcommit = pages("nr_overcommit_hugepages")?.saturating_sub(pages("surplus_hugepages")?);
        Ok(Some(Self {
            page,
            pool: pages("nr_hugepages")?.saturating_sub(pages("surplus_hugepages")?),
            free: free.saturating_add(overcommit),
            reserved,
            // Without `size=` a mount reports 0 blocks or, with `min_size=`, the largest number.
            limit: (stat.f_blocks != 0 && stat.f_blocks != u64::MAX).then(|| stat.f_bavail.saturating_mul(page)),
        }))
    }

    /// Returns how many bytes can still be reserved. A mount with `min_size=` may have more, reserved for itself.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.free.saturating_sub(self.reserved).min(self.limit.unwrap_or(u64::MAX))
    }

    /// Returns a remedy that makes `requested` bytes fit, as the last part of an error message.
    #[must_use]
    pub fn remedy(&self, requested: u64) -> String {
        if self.limit.is_some_and(|limit| limit < requested) {
            return "mount it with a larger `size=`".into();
        }
        let missing = requested.saturating_sub(self.left()).div_ceil(self.page);
        let (file, pages) = (directory(self.page).join("nr_hugepages"), self.pool / self.page + missing);
        format!("enlarge the pool: echo {pages} > {}", file.display())
    }
}

/// Reads how much is free and how much of it is reserved. A guest that touches a reserved page lowers both between two
/// reads: they are repeated. If they change without end, less is reported to be left than there is.
fn read_together(free: impl Fn() -> io::Result<u64>, reserved: impl Fn() -> io::Result<u64>) -> io::Result<(u64, u64)> {
    const ATTEMPTS: usize = 1000;
    let (mut before, mut attempts) = (reserved()?, 0);
    loop {
        let (free, after) = (free()?, reserved()?);
        attempts += 1;
        if after == before || attempts == ATTEMPTS {
            return Ok((free, before.max(after)));
        }
        before = after;
    }
}

/// Returns the sysfs directory of the pool of this page size.
fn directory(page: u64) -> PathBuf {
    Path::new("/sys/kernel/mm/hugepages").join(format!("hugepages-{}kB", page >> 10))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const PAGE: u64 = 2 << 20;
    const POOL: HugePages =
        HugePages { page: PAGE, pool: 40 * PAGE, free: 30 * PAGE, reserved: 10 * PAGE, limit: None };

    #[test]
    fn reserved_pages_and_the_limit_of_the_mount_are_subtracted() {
        assert_eq!(POOL.left(), 20 * PAGE);
        assert_eq!(HugePages { limit: Some(5 * PAGE), ..POOL }.left(), 5 * PAGE);
        assert_eq!(HugePages { limit: Some(50 * PAGE), ..POOL }.left(), 20 * PAGE);
        assert_eq!(HugePages { reserved: 31 * PAGE, ..POOL }.left(), 0);
    }

    #[test]
    fn the_remedy_names_what_is_too_small() {
        let remedy = POOL.remedy(21 * PAGE - 5);
        assert_eq!(remedy, "enlarge the pool: echo 41 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
        let remedy = HugePages { limit: Some(20 * PAGE), ..POOL }.remedy(21 * PAGE);
        assert_eq!(remedy, "mount it with a larger `size=`");
    }

    #[test]
    fn a_page_that_is_touched_between_two_reads_is_not_counted_as_left() {
        // At each read of what is free, a guest touches one of the ten pages that were reserved, until none is left.
        let touched = Cell::new(0);
        let free = || {
            let now = 30 - touched.get();
            touched.set((touched.get() + 1).min(10));
            Ok(now)
        };
        assert_eq!(read_together(free, || Ok(10 - touched.get())).unwrap(), (20, 0));
        // Without end.
        let reads = Cell::new(0);
        let reserved = || {
            reads.set(reads.get() + 1);
            Ok(10 + reads.get() % 2)
        };
        assert_eq!(read_together(|| Ok(30), reserved).unwrap(), (30, 11));
    }

    #[test]
    fn other_file_systems_have_no_huge_pages() {
        assert_eq!(HugePages::of(&rustix::fs::statfs("/proc").unwrap()).unwrap(), None);
    }
}
