//! Soft-dirty bits: which pages of a process were written since they were last cleared
//! (`Documentation/admin-guide/mm/soft-dirty.rst`).
//!
//! This is the oldest record of writes that Linux has, and the coarsest: it is cleared for a whole process, and all
//! users of a process share it. Unlike write protection by a userfaultfd, it puts no markers into page tables where no
//! page is present. It can therefore be used for DAX files: a fault of a DAX file that meets such a marker is retried
//! endlessly (Linux 6.12).

use crate::process::Process;
use nix::sys::mman::{self, MapFlags, ProtFlags};
use std::fs;
use std::fs::File;
use std::io;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

/// `CLEAR_REFS_SOFT_DIRTY` of `fs/proc/task_mmu.c`.
const CLEAR_SOFT_DIRTY: &str = "4";
/// Bit 55 of a page map entry.
const SOFT_DIRTY_BIT: u64 = 1 << 55;

/// Clears the soft-dirty bits: from now on no page of `process` counts as written.
///
/// Writes by a device into a page that was pinned before are not recorded, so call this while no such operation is in
/// progress.
///
/// # Errors
/// `NotFound` when the process has ended; errors of writing `/proc/PID/clear_refs`. On a kernel without soft-dirty bits
/// the call succeeds and does nothing: check [`works`].
pub fn clear(process: Process) -> io::Result<()> {
    // Held open during the write, so that the number cannot be reused by another process.
    let _pidfd = process.pidfd()?;
    fs::write(format!("/proc/{}/clear_refs", process.pid), CLEAR_SOFT_DIRTY)
}

/// Returns whether this kernel has soft-dirty bits (`CONFIG_MEM_SOFT_DIRTY`), by a trial write to a page.
#[must_use]
pub fn works() -> bool {
    static WORKS: OnceLock<bool> = OnceLock::new();
    *WORKS.get_or_init(|| try_write().unwrap_or(false))
}

/// Makes the trial on memory of this process.
fn try_write() -> io::Result<bool> {
    const PAGE: usize = rekindle_pages::PAGE_SIZE;
    let size = const { NonZero::new(PAGE).unwrap() };
    // SAFETY: a fresh mapping at an address that the kernel chooses, to which nothing refers.
    let page = unsafe {
        mman::mmap_anonymous(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
    }?;
    // SAFETY: the first byte of our own writable mapping.
    unsafe { page.cast::<u8>().write_volatile(1) };
    let mut entry = [0; 8];
    let read = File::open("/proc/self/pagemap")
        .and_then(|map| map.read_exact_at(&mut entry, page.addr().get() as u64 / PAGE as u64 * 8));
    // SAFETY: our own mapping, whose last use was above.
    let _ = unsafe { mman::munmap(page, PAGE) };
    read.map(|()| u64::from_le_bytes(entry) & SOFT_DIRTY_BIT != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagemap::{Categories, Query, Scanner};
    use crate::testing::{Area, Kind};

    #[test]
    fn what_is_written_after_a_clear_is_reported_and_nothing_else() {
        if !works() {
            eprintln!("this kernel keeps no soft-dirty bits: not run");
            return;
        }
        let me = Process::current().unwrap();
        for kind in [Kind::Private, Kind::Shared] {
            let area = Area::new(kind, 16);
            (0..8).for_each(|page| area.set(page, 1));
            clear(me).unwrap();
            area.set(3, 2);
            area.set(12, 2);
            let reported =
                Scanner::open(me).unwrap().matching(area.range(), Query::all(Categories::SOFT_DIRTY)).unwrap();
            let pages = [3, 12].map(|page| area.address(page)..area.address(page + 1));
            assert_eq!(*reported, pages, "{kind:?}");
        }
    }

    #[test]
    fn a_process_that_has_ended_is_not_cleared() {
        let me = Process::current().unwrap();
        let other = Process { started: me.started + 1, ..me };
        assert_eq!(clear(other).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
