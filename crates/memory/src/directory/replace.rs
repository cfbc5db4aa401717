//! Replaces the RAM of a guest whose QEMU has ended by the RAM of a waiting QEMU, and releases the old RAM.
//!
//! Releasing takes about 0.1 s per GiB. Where old and new RAM fit together, the release happens later, so that no guest
//! waits for it.

use super::{RamDirectory, RamError};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes released per call. Other allocations on the same file system are served between two calls.
const BYTES_PER_RELEASE: u64 = 16 << 20;

/// RAM of a guest whose QEMU has ended. The file has no name; its space is used until it is released or dropped.
#[derive(Debug)]
pub struct PreviousRam(File);

impl PreviousRam {
    fn open(path: &Path) -> io::Result<Option<Self>> {
        match OpenOptions::new().write(true).open(path) {
            Ok(file) => Ok(Some(Self(file))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns the bytes that were promised to the old RAM and are not allocated.
    fn promised(&self) -> u64 {
        self.0.metadata().map_or(0, |file| file.len().saturating_sub(file.blocks() * 512))
    }

    /// Frees the pages now, even while another process has them mapped: a disk server unmaps them concurrently.
    pub fn release(self) {
        let bytes = self.0.metadata().map_or(0, |file| file.len());
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for offset in (0..bytes).step_by(BYTES_PER_RELEASE as usize) {
            if let Err(e) = fallocate(&self.0, punch, offset, BYTES_PER_RELEASE.min(bytes - offset)) {
                tracing::debug!("cannot punch out the old RAM; it is freed when its last user closes it: {e}");
                return;
            }
        }
    }
}

impl RamDirectory {
    /// Removes the RAM file of VM `name`, if it exists, and frees its pages.
    pub(super) fn remove_and_release(&self, name: &str) -> Result<(), RamError> {
        let old = PreviousRam::open(&self.file(name)).map_err(|source| self.failed(source))?;
        self.remove(name)?;
        old.into_iter().for_each(PreviousRam::release);
        Ok(())
    }

    /// Removes the waiting file of VM `name` ([`RamDirectory::create_waiting`]). A missing file is no error.
    ///
    /// # Errors
    /// [`RamError::Directory`].
    pub fn remove_waiting(&self, name: &str) -> Result<(), RamError> {
        match fs::remove_file(self.waiting(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(self.failed(e)),
            _ => Ok(()),
        }
    }

    /// Replaces the RAM of VM `name`, whose QEMU has ended, by the waiting file of `bytes` bytes.
    ///
    /// - *Needs:* a waiting file ([`RamDirectory::create_waiting`]); the old RAM is not in use.
    /// - *On success:* the waiting file has the name [`RamDirectory::file`], and its bytes are promised. Where old and
    ///   new RAM fit together, the old RAM is returned, so that the caller can release it later; otherwise it is
    ///   released.
    /// - *On failure:* the old RAM is removed, if the two did not fit together.
    ///
    /// # Errors
    /// [`RamError::TooSmall`]; [`RamError::Directory`] when there is no waiting file.
    pub fn replace(&self, name: &str, bytes: u64) -> Result<Option<PreviousRam>, RamError> {
        let failed = |source| self.failed(source);
        let _lock = self.lock()?;
        let (waiting, path) = (self.waiting(name), self.file(name));
        let allocated = fs::metadata(&waiting).map_err(failed)?.blocks() * 512;
        let required = bytes.saturating_sub(allocated);
        let mut old = PreviousRam::open(&path).map_err(failed)?;
        let room = self.room()?;
        let promised_to_others = room.promised.saturating_sub(old.as_ref().map_or(0, PreviousRam::promised));
        if required > room.free.saturating_sub(promised_to_others) {
            if let Some(old) = old.take() {
                fs::remove_file(&path).map_err(failed)?;
                old.release();
            }
            self.check_room(required)?;
        }
        fs::rename(&waiting, &path).map_err(failed)?;
        Ok(old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// Runs `test` with a tmpfs of 8 MiB that contains a guest's RAM file of `memory` MiB, of which `touched` MiB are
    /// allocated, and a waiting file of the same length.
    fn with_waiting_ram(memory: u64, touched: usize, test: impl FnOnce(&RamDirectory, File)) {
        if !rustix::process::geteuid().is_root() {
            eprintln!("needs root: not run");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ram");
        let ram = RamDirectory::own_tmpfs(&path, 8 << 20).unwrap();
        ram.create("x", memory << 20).unwrap();
        let old = OpenOptions::new().read(true).write(true).open(ram.file("x")).unwrap();
        old.write_all_at(&vec![1; touched << 20], 0).unwrap();
        ram.create_waiting("x", memory << 20).unwrap();
        test(&ram, old);
        RamDirectory::release_own_tmpfs(&path);
    }

    fn allocated(file: &File) -> u64 {
        file.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn if_both_fit_the_old_ram_is_released_later_and_counts_as_used_until_then() {
        with_waiting_ram(4, 3, |ram, open| {
            let old = ram.replace("x", 4 << 20).unwrap().expect("room for both");
            assert_eq!(fs::metadata(ram.file("x")).unwrap().blocks(), 0, "it is the waiting file");
            assert!(!ram.waiting("x").exists());
            assert_eq!(allocated(&open), 3 << 20);
            let e = ram.create("y", 2 << 20).unwrap_err();
            assert!(
                matches!(e, RamError::TooSmall { free, promised, .. } if free == 5 << 20 && promised == 4 << 20),
                "{e}"
            );
            // The pages are freed although the file is open.
            old.release();
            assert_eq!(allocated(&open), 0);
            ram.create("y", 2 << 20).unwrap();
            ram.remove("y").unwrap();
            ram.remove("x").unwrap();
        });
    }

    #[test]
    fn if_only_one_fits_the_old_ram_is_released_first() {
        with_waiting_ram(6, 5, |ram, open| {
            assert!(ram.replace("x", 6 << 20).unwrap().is_none());
            assert_eq!(allocated(&open), 0, "freed although it is open");
            assert_eq!(fs::metadata(ram.file("x")).unwrap().blocks(), 0);
            assert!(!ram.waiting("x").exists());
            assert!(matches!(ram.replace("x", 6 << 20), Err(RamError::Directory { .. })), "no file waits");
            assert!(ram.file("x").exists());
            ram.remove("x").unwrap();
        });
    }

    #[test]
    fn renewed_ram_fits_although_the_old_file_is_open() {
        with_waiting_ram(6, 5, |ram, open| {
            ram.renew("x", 6 << 20).unwrap();
            assert_eq!(allocated(&open), 0);
            assert!(!ram.waiting("x").exists(), "the waiting file is removed");
            ram.create_waiting("x", 6 << 20).unwrap();
            ram.remove_waiting("x").unwrap();
            ram.remove_waiting("x").unwrap();
            assert!(!ram.waiting("x").exists());
            ram.remove("x").unwrap();
        });
    }
}
