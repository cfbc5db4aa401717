//! RAM that a QEMU has already which only waits, in the place of that of a guest whose QEMU has ended; and giving the latter back.
//!
//! Its pages are some 0.1 s of work for each GiB. Where there is room for both until then, nobody waits for it.

use super::{RamDirectory, RamError};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// So much is given back at a time: whoever else wants memory of the same file system is let in between.
const PIECE: u64 = 16 << 20;

/// RAM of a guest whose QEMU has ended: it has no name any more, and takes its room until it is given back or dropped.
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

    /// What it may still claim of what it was promised.
    fn promised(&self) -> u64 {
        self.0.metadata().map_or(0, |file| file.len().saturating_sub(file.blocks() * 512))
    }

    /// Give its pages back now, also those that somebody has mapped who has not let go of it yet: a server of a disk unmaps it beside.
    pub fn give_back(self) {
        let bytes = self.0.metadata().map_or(0, |file| file.len());
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for at in (0..bytes).step_by(PIECE as usize) {
            if let Err(e) = fallocate(&self.0, punch, at, PIECE.min(bytes - at)) {
                tracing::debug!("the former memory goes with its last user: {e}");
                return;
            }
        }
    }
}

impl RamDirectory {
    /// Remove the RAM file of VM `name`, if there is one, and give its pages back.
    pub(super) fn give_back(&self, name: &str) -> Result<(), RamError> {
        let former = PreviousRam::open(&self.file(name)).map_err(|source| self.failed(source))?;
        self.remove(name)?;
        former.into_iter().for_each(PreviousRam::give_back);
        Ok(())
    }

    /// Remove what waits for VM `name` ([`RamDirectory::create_waiting`]). None is no error.
    ///
    /// # Errors
    /// [`RamError::Directory`].
    pub fn forget_waiting(&self, name: &str) -> Result<(), RamError> {
        match fs::remove_file(self.waiting(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(self.failed(e)),
            _ => Ok(()),
        }
    }

    /// Give VM `name`, whose QEMU has ended, the RAM of `bytes` bytes that waits, in the place of what it has.
    ///
    /// *Needs:* one that waits ([`RamDirectory::create_waiting`]); nobody uses the former RAM.
    /// *On success:* the file that waited has the name [`RamDirectory::file`], and its bytes are promised. Gives the former RAM where there is
    /// room for both, so that it can be given back later; else that has been done.
    /// *On failure:* the former RAM is gone, if there was no room for both.
    ///
    /// # Errors
    /// [`RamError::TooSmall`]; [`RamError::Directory`] when none waits.
    pub fn replace(&self, name: &str, bytes: u64) -> Result<Option<PreviousRam>, RamError> {
        let failed = |source| self.failed(source);
        let _lock = self.lock()?;
        let (waiting, path) = (self.waiting(name), self.file(name));
        let there = fs::metadata(&waiting).map_err(failed)?.blocks() * 512;
        let wanted = bytes.saturating_sub(there);
        let mut former = PreviousRam::open(&path).map_err(failed)?;
        let (free, promised) = self.room()?;
        let promised = promised.saturating_sub(former.as_ref().map_or(0, PreviousRam::promised));
        if wanted > free.saturating_sub(promised) {
            if let Some(former) = former.take() {
                fs::remove_file(&path).map_err(failed)?;
                former.give_back();
            }
            self.check_room(wanted)?;
        }
        fs::rename(&waiting, &path).map_err(failed)?;
        Ok(former)
    }

    fn failed(&self, source: io::Error) -> RamError {
        RamError::Directory { path: self.path.clone(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// A tmpfs of 8 MiB with the RAM of a guest in it, of `memory` MiB, `touched` of which it has touched; and as much that waits.
    fn with(memory: u64, touched: usize, test: impl FnOnce(&RamDirectory, File)) {
        if !rustix::process::geteuid().is_root() {
            eprintln!("needs root: not run");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ram");
        let ram = RamDirectory::own_tmpfs(&path, 8 << 20).unwrap();
        ram.create("x", memory << 20).unwrap();
        let former = OpenOptions::new().read(true).write(true).open(ram.file("x")).unwrap();
        former.write_all_at(&vec![1; touched << 20], 0).unwrap();
        ram.create_waiting("x", memory << 20).unwrap();
        test(&ram, former);
        RamDirectory::release_own_tmpfs(&path);
    }

    fn taken(file: &File) -> u64 {
        file.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn where_there_is_room_for_both_the_former_goes_later_and_counts_until_then() {
        with(4, 3, |ram, seen| {
            let former = ram.replace("x", 4 << 20).unwrap().expect("room for both");
            assert_eq!(fs::metadata(ram.file("x")).unwrap().blocks(), 0, "it is the other one");
            assert!(!ram.waiting("x").exists());
            assert_eq!(taken(&seen), 3 << 20);
            let e = ram.create("y", 2 << 20).unwrap_err();
            assert!(
                matches!(e, RamError::TooSmall { free, promised, .. } if free == 5 << 20 && promised == 4 << 20),
                "{e}"
            );
            // Somebody has it open still.
            former.give_back();
            assert_eq!(taken(&seen), 0);
            ram.create("y", 2 << 20).unwrap();
            ram.remove("y").unwrap();
            ram.remove("x").unwrap();
        });
    }

    #[test]
    fn where_there_is_none_it_goes_first() {
        with(6, 5, |ram, seen| {
            assert!(ram.replace("x", 6 << 20).unwrap().is_none());
            assert_eq!(taken(&seen), 0, "although somebody has it open");
            assert_eq!(fs::metadata(ram.file("x")).unwrap().blocks(), 0);
            assert!(!ram.waiting("x").exists());
            assert!(matches!(ram.replace("x", 6 << 20), Err(RamError::Directory { .. })), "none waits");
            assert!(ram.file("x").exists());
            ram.remove("x").unwrap();
        });
    }

    #[test]
    fn what_somebody_has_open_is_no_obstacle_to_the_next() {
        with(6, 5, |ram, seen| {
            ram.renew("x", 6 << 20).unwrap();
            assert_eq!(taken(&seen), 0);
            assert!(!ram.waiting("x").exists(), "it is not waited with");
            ram.create_waiting("x", 6 << 20).unwrap();
            ram.forget_waiting("x").unwrap();
            ram.forget_waiting("x").unwrap();
            assert!(!ram.waiting("x").exists());
            ram.remove("x").unwrap();
        });
    }
}
