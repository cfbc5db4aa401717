//! Evidence of whether a guest has run since a moment. Recovery needs it where the journal alone does not show it: the
//! process that sent `cont` has died, and so has the QEMU that received it.

use rekindle_qemu::command::Hardware;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_OMIT, statfs, utimensat};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// File system type of tmpfs, as in `statfs(2)`.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// The mark: a modification time that no file has by chance. It is set on the RAM file just before a destination QEMU
/// resumes the guest.
const MARK_TIME: Timespec = Timespec { tv_sec: 1_000_000_000, tv_nsec: 123_456_789 };

/// Marks the RAM file so that [`is_untouched`] can detect later writes to it. Returns the mark in ns since 1970.
///
/// The kernel sets a file's modification time when a page of a shared mapping is first written through a fresh page
/// table. A QEMU that has not run its guest has a fresh page table. Pages that the load of the device state has *read*
/// (virtio rings) are mapped writable together with their neighbours, so a write to only those pages is not detected.
/// But a guest that runs immediately writes to its stacks and per-processor data, which are in other pages. Only tmpfs
/// is known to behave this way: on other file systems this returns `None`, and nothing can be concluded.
#[must_use]
pub fn mark_ram(ram: &Path) -> Option<i128> {
    let is_tmpfs = statfs(ram).is_ok_and(|stat| stat.f_type as u64 == TMPFS_MAGIC);
    if !is_tmpfs {
        return None;
    }
    let times = Timestamps { last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }, last_modification: MARK_TIME };
    utimensat(CWD, ram, &times, AtFlags::empty()).ok()?;
    Some(nanoseconds(MARK_TIME.tv_sec, MARK_TIME.tv_nsec))
}

/// Returns whether the RAM file has not been written since it was marked. Returns false without a mark.
#[must_use]
pub fn is_untouched(ram: &Path, mark: Option<i128>) -> bool {
    mark.is_some() && fs::metadata(ram).ok().as_ref().map(modified_ns) == mark
}

/// Returns the modification times, in ns since 1970, of the disk images that the guest can write. `None` if one of them
/// is not a regular file: the time of a block device does not show writes.
#[must_use]
pub fn disk_times(hardware: &Hardware) -> Option<Vec<(PathBuf, i128)>> {
    let writable = hardware.disks.iter().filter(|disk| !disk.readonly);
    writable
        .map(|disk| {
            let metadata = fs::metadata(&disk.path).ok().filter(fs::Metadata::is_file)?;
            Some((disk.path.clone(), modified_ns(&metadata)))
        })
        .collect()
}

fn modified_ns(metadata: &fs::Metadata) -> i128 {
    nanoseconds(metadata.mtime(), metadata.mtime_nsec())
}

fn nanoseconds(seconds: i64, nanoseconds: i64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_to_a_marked_file_is_detected() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("web.ram");
        fs::write(&path, [0; 8192]).unwrap();
        let mark = mark_ram(&path);
        assert!(mark.is_some() && is_untouched(&path, mark));
        fs::write(&path, [1; 8192]).unwrap();
        assert!(!is_untouched(&path, mark));
        assert!(!is_untouched(&path, None));
    }
}
