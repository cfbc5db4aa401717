//! Huge pages: how many a hugetlbfs still has.
//!
//! The kernel takes them out of a pool of its own, one for each size of page. A file has them *reserved* when it is first
//! mapped, and keeps them until it is removed; one that finds none when it is touched has its process killed by
//! `SIGBUS`. So a RAM file here is reserved whole when it is made, or it is not made.

use rustix::fs::{FsWord, StatFs};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// `HUGETLBFS_MAGIC` of `linux/magic.h`.
pub(crate) const HUGETLBFS_MAGIC: FsWord = 0x9584_58f6;

/// What a hugetlbfs and the pool behind it have, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugePages {
    /// Bytes of a page.
    pub page: u64,
    /// The pool as its owner set it.
    pub pool: u64,
    /// Pages that nobody has yet, with those that the kernel may add to the pool (`nr_overcommit_hugepages`).
    pub free: u64,
    /// How much of that is reserved.
    pub reserved: u64,
    /// What the mount's own `size=` leaves; none if it has none.
    pub limit: Option<u64>,
}

impl HugePages {
    /// Those of the file system of `stat`; none if it is no hugetlbfs.
    ///
    /// # Errors
    /// When the pool cannot be looked at in `/sys/kernel/mm/hugepages`.
    pub fn of(stat: &StatFs) -> io::Result<Option<Self>> {
        if stat.f_type != HUGETLBFS_MAGIC {
            return Ok(None);
        }
        let page = u64::try_from(stat.f_bsize).map_err(io::Error::other)?;
        let directory = directory(page);
        let pages = |name: &str| -> io::Result<u64> {
            let path = directory.join(name);
            let odd = |e: &dyn std::fmt::Display| io::Error::other(format!("{}: {e}", path.display()));
            let text = fs::read_to_string(&path).map_err(|e| odd(&e))?;
            text.trim().parse::<u64>().map_err(|e| odd(&e)).map(|pages| pages.saturating_mul(page))
        };
        let more = pages("nr_overcommit_hugepages")?.saturating_sub(pages("surplus_hugepages")?);
        Ok(Some(Self {
            page,
            pool: pages("nr_hugepages")?.saturating_sub(pages("surplus_hugepages")?),
            free: pages("free_hugepages")?.saturating_add(more),
            reserved: pages("resv_hugepages")?,
            // Without `size=` a mount says that it has no blocks at all or, with `min_size=`, as many as can be said.
            limit: (stat.f_blocks != 0 && stat.f_blocks != u64::MAX).then(|| stat.f_bavail.saturating_mul(page)),
        }))
    }

    /// Bytes that can still be reserved. A mount with `min_size=` may have more: they are reserved for it.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.free.saturating_sub(self.reserved).min(self.limit.unwrap_or(u64::MAX))
    }

    /// What makes room for `asked` bytes.
    #[must_use]
    pub fn mend(&self, asked: u64) -> String {
        if self.limit.is_some_and(|limit| limit < asked) {
            return "mount it with a larger `size=`".into();
        }
        let missing = asked.saturating_sub(self.left()).div_ceil(self.page);
        let (file, pages) = (directory(self.page).join("nr_hugepages"), self.pool / self.page + missing);
        format!("have more huge pages: echo {pages} > {}", file.display())
    }
}

/// Where the kernel shows the pool of pages of this size.
fn directory(page: u64) -> PathBuf {
    Path::new("/sys/kernel/mm/hugepages").join(format!("hugepages-{}kB", page >> 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 2 << 20;
    const POOL: HugePages =
        HugePages { page: PAGE, pool: 40 * PAGE, free: 30 * PAGE, reserved: 10 * PAGE, limit: None };

    #[test]
    fn what_is_reserved_is_not_left_and_a_mount_may_have_less() {
        assert_eq!(POOL.left(), 20 * PAGE);
        assert_eq!(HugePages { limit: Some(5 * PAGE), ..POOL }.left(), 5 * PAGE);
        assert_eq!(HugePages { limit: Some(50 * PAGE), ..POOL }.left(), 20 * PAGE);
        assert_eq!(HugePages { reserved: 31 * PAGE, ..POOL }.left(), 0);
    }

    #[test]
    fn the_mend_is_for_what_is_short() {
        let mend = POOL.mend(21 * PAGE - 5);
        assert_eq!(mend, "have more huge pages: echo 41 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
        let mend = HugePages { limit: Some(20 * PAGE), ..POOL }.mend(21 * PAGE);
        assert_eq!(mend, "mount it with a larger `size=`");
    }

    #[test]
    fn another_file_system_has_none() {
        assert_eq!(HugePages::of(&rustix::fs::statfs("/proc").unwrap()).unwrap(), None);
    }
}
