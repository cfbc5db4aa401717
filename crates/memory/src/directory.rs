//! Where RAM files live, and how much still fits.
//!
//! A RAM file on tmpfs or hugetlbfs gets its pages when the guest first touches them, so a directory with free space
//! today can be full tomorrow, and the guest that touches the page too many is killed by `SIGBUS`. Hence asking for more
//! than is left is refused beforehand. On hugetlbfs the kernel keeps the books: it sets pages aside for a file. On tmpfs it
//! does not, so what has been promised to the files that are there counts as used.

mod replace;

pub use replace::PreviousRam;

use crate::hugepages::{HUGETLBFS_MAGIC, HugePages};
use rekindle_kernel::memory::reserve;
use rustix::fs::{
    AtFlags, FallocateFlags, FlockOperation, Mode, OFlags, StatFs, StatxAttributes, StatxFlags, fallocate, flock,
    fstatfs, open, statfs, statx,
};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::ffi::CString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const TMPFS_MAGIC: u64 = 0x0102_1994;
const SUFFIX: &str = "ram";
/// Of the file of a QEMU that waits with empty RAM.
const WAITING: &str = "waiting";

/// Why a RAM file cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The directory cannot be used.
    #[error("RAM directory {}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Too much was asked for.
    #[error(
        "RAM directory {}: {} asked for, {} left ({} free, of which {} promised to other guests); stop a VM, make \
         `memory` smaller, or name a larger directory as `ram.dir`",
        path.display(), mib(*asked), mib(*left), mib(*free), mib(*promised)
    )]
    TooSmall {
        /// The directory.
        path: PathBuf,
        /// Bytes asked for.
        asked: u64,
        /// Bytes left: free less promised.
        left: u64,
        /// Bytes free in the file system and in the machine.
        free: u64,
        /// Bytes that other RAM files may still claim.
        promised: u64,
    },
    /// More huge pages were asked for than there are.
    #[error(
        "RAM directory {}: {} asked for, {} left in huge pages of {} ({} free, of which {} reserved{}); stop a VM, make \
         `memory` smaller, or {}",
        path.display(), mib(*asked), mib(pages.left()), mib(pages.page), mib(pages.free), mib(pages.reserved),
        pages.limit.map(|limit| format!("; the mount's `size=` leaves {}", mib(limit))).unwrap_or_default(),
        pages.mend(*asked)
    )]
    TooFewHugePages {
        /// The directory.
        path: PathBuf,
        /// Bytes asked for.
        asked: u64,
        /// What there is.
        pages: HugePages,
    },
    /// The kernel does not give huge pages that it has.
    #[error(
        "RAM directory {}: {} in huge pages are refused, although {} are left; raise the limit of this control group \
         (`hugetlb.*.rsvd.max`)",
        path.display(), mib(*asked), mib(*left)
    )]
    Withheld {
        /// The directory.
        path: PathBuf,
        /// Bytes asked for.
        asked: u64,
        /// Bytes left.
        left: u64,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    /// There is a file of that name.
    #[error("RAM file {} exists already: a VM of that name runs, or `rekindle recover` has not been run", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// A directory for RAM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamDirectory {
    path: PathBuf,
    /// The size of the tmpfs, if it is Rekindle's own.
    own_bytes: Option<u64>,
}

impl RamDirectory {
    /// The directory at `path`, which must exist.
    ///
    /// # Errors
    /// [`RamError::Directory`].
    pub fn at(path: &Path) -> Result<Self, RamError> {
        let failed = |source: io::Error| RamError::Directory { path: path.to_owned(), source };
        let metadata = fs::metadata(path).map_err(failed)?;
        if !metadata.is_dir() {
            return Err(failed(io::ErrorKind::NotADirectory.into()));
        }
        Ok(Self { path: path.to_owned(), own_bytes: None })
    }

    /// A tmpfs of Rekindle's own at `path`, mounted with room for `bytes` if it is not yet. Needs root.
    ///
    /// # Errors
    /// [`RamError::Directory`] when it cannot be mounted.
    pub fn own_tmpfs(path: &Path, bytes: u64) -> Result<Self, RamError> {
        let own = Self { path: path.to_owned(), own_bytes: Some(bytes) };
        own.lock().map(drop)?;
        Ok(own)
    }

    /// Take Rekindle's own tmpfs at `path` away if no RAM file is in it. Best effort: to fail is no error.
    ///
    /// A pager or a protector may see a moment later than we that its QEMU has ended, and has its RAM mapped until then.
    /// Nothing has a name there any more, so that is no reason to leave it: the kernel takes it apart when they let go.
    pub fn release_own_tmpfs(path: &Path) {
        let Ok(_lock) = lock_above(path) else { return };
        let empty = fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        if empty && unmount(path, UnmountFlags::DETACH).is_ok() {
            let _ = fs::remove_dir(path);
        }
    }

    /// Keep others from making RAM files here, and a tmpfs of Rekindle's own from being taken away.
    fn lock(&self) -> Result<Locked, RamError> {
        let failed = |source: io::Error| RamError::Directory { path: self.path.clone(), source };
        let above = match self.own_bytes {
            Some(bytes) => {
                let above = lock_above(&self.path).map_err(failed)?;
                // Whoever stopped the last VM has taken the tmpfs away.
                mount_own(&self.path, bytes).map_err(failed)?;
                Some(above)
            }
            None => None,
        };
        let directory = File::open(&self.path).map_err(failed)?;
        flock(&directory, FlockOperation::LockExclusive).map_err(|e| failed(e.into()))?;
        Ok(Locked { _above: above, _directory: directory })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the RAM file of VM `name` is or would be.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.{SUFFIX}"))
    }

    /// Where it is while its QEMU only waits.
    #[must_use]
    pub fn waiting(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.{WAITING}"))
    }

    /// `(free, promised)` in bytes: what the file system and the machine still have, and what of it has been promised: on
    /// hugetlbfs the pages that are reserved for any file, elsewhere what the RAM files that are there may still claim.
    ///
    /// # Errors
    /// [`RamError::Directory`].
    pub fn room(&self) -> Result<(u64, u64), RamError> {
        let failed = |source: io::Error| RamError::Directory { path: self.path.clone(), source };
        let stat = statfs(&self.path).map_err(|e| failed(e.into()))?;
        if let Some(pages) = HugePages::of(&stat).map_err(failed)? {
            return Ok((pages.left() + pages.reserved, pages.reserved));
        }
        let mut free = free_bytes(&stat);
        if stat.f_type as u64 == TMPFS_MAGIC {
            free = free.min(available_memory().map_err(failed)?);
        }
        let mut promised = 0;
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.path().extension().is_some_and(|extension| extension == SUFFIX) {
                let Ok(metadata) = entry.metadata() else { continue };
                promised += metadata.len().saturating_sub(metadata.blocks() * 512);
            }
        }
        Ok((free, promised))
    }

    /// Make the RAM file of VM `name` with `bytes` bytes, readable by nobody else.
    ///
    /// On success: the file exists, empty and as long as asked for; its pages come when they are touched. On hugetlbfs
    /// they are set aside for it, so that they do come.
    ///
    /// # Errors
    /// [`RamError::TooSmall`] or [`RamError::TooFewHugePages`] with both figures; [`RamError::Exists`].
    pub fn create(&self, name: &str, bytes: u64) -> Result<PathBuf, RamError> {
        // Between looking and making nobody else may make one.
        let _lock = self.lock()?;
        self.check_room(bytes)?;
        let path = self.make(self.file(name), bytes)?;
        if let Err(e) = self.fill_direct(&path, bytes) {
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        Ok(path)
    }

    /// As [`RamDirectory::create`], for a QEMU that only waits and touches nothing: nothing is promised to it, so any number of
    /// them may wait. (On hugetlbfs its pages are set aside all the same: QEMU would have the kernel do it.) The guest
    /// that is to run in it needs [`RamDirectory::claim`] first.
    ///
    /// # Errors
    /// As for [`RamDirectory::create`], but [`RamError::TooSmall`].
    pub fn create_waiting(&self, name: &str, bytes: u64) -> Result<PathBuf, RamError> {
        let _lock = self.lock()?;
        self.make(self.waiting(name), bytes)
    }

    /// Promise the `bytes` bytes of the file of VM `name` that waits: it gets the name [`RamDirectory::file`]. Done already
    /// is no error.
    ///
    /// # Errors
    /// [`RamError::TooSmall`], and then it waits on; [`RamError::Exists`]; [`RamError::Directory`] when none waits.
    pub fn claim(&self, name: &str, bytes: u64) -> Result<PathBuf, RamError> {
        let failed = |source: io::Error| RamError::Directory { path: self.path.clone(), source };
        let _lock = self.lock()?;
        let (waiting, path) = (self.waiting(name), self.file(name));
        match (waiting.exists(), path.exists()) {
            (true, true) => return Err(RamError::Exists { path }),
            (false, true) => return Ok(path),
            (_, false) => {}
        }
        self.check_room(bytes)?;
        fs::rename(&waiting, &path).map_err(failed)?;
        Ok(path)
    }

    /// Whether as much is left now. Of huge pages the kernel is asked itself, when they are set aside: a mount may have some
    /// to its own, and a control group a limit.
    ///
    /// # Errors
    /// [`RamError::TooSmall`] with all figures.
    pub fn check_room(&self, bytes: u64) -> Result<(), RamError> {
        let failed = |source: io::Error| RamError::Directory { path: self.path.clone(), source };
        if huge_page_size(&self.path).map_err(failed)?.is_some() {
            return Ok(());
        }
        let (free, promised) = self.room()?;
        let left = free.saturating_sub(promised);
        if bytes > left {
            return Err(RamError::TooSmall { path: self.path.clone(), asked: bytes, left, free, promised });
        }
        Ok(())
    }

    fn make(&self, path: PathBuf, bytes: u64) -> Result<PathBuf, RamError> {
        let failed = |source: io::Error| RamError::Directory { path: self.path.clone(), source };
        if path.exists() {
            return Err(RamError::Exists { path });
        }
        let huge = huge_page_size(&self.path).map_err(failed)?.is_some();
        let made = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = made.map_err(failed)?;
        let sized = file.set_len(bytes).map_err(failed);
        let had = sized.and_then(|()| if huge { self.reserve(&file, bytes) } else { Ok(()) });
        if let Err(e) = had {
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        Ok(path)
    }

    /// Give VM `name`, whose QEMU has ended, RAM for a new start in the place of what it has.
    ///
    /// On success: the file exists and is as long as asked for. It is empty, but on hugetlbfs it is the one that was there,
    /// with what the guest has left in it, as after a reset: pages that go back to the pool may not come again.
    ///
    /// # Errors
    /// As for [`RamDirectory::create`].
    pub fn renew(&self, name: &str, bytes: u64) -> Result<PathBuf, RamError> {
        let failed = |source: io::Error| RamError::Directory { path: self.path.clone(), source };
        let path = self.file(name);
        let fits = fs::metadata(&path).is_ok_and(|file| file.len() == bytes);
        if fits && huge_page_size(&self.path).map_err(failed)?.is_some() {
            return Ok(path);
        }
        self.give_back(name)?;
        self.create(name, bytes)
    }

    /// The same while somebody has the former RAM open and gives its pages back as those of the new one are taken: together they are
    /// never more than the VM has been promised.
    ///
    /// # Errors
    /// As for [`RamDirectory::renew`]; [`RamError::Exists`] on hugetlbfs, where the file that was there is the new one.
    pub fn renew_keeping_cache(&self, name: &str, bytes: u64) -> Result<PathBuf, RamError> {
        let failed = |source: io::Error| RamError::Directory { path: self.path.clone(), source };
        let path = self.file(name);
        if huge_page_size(&self.path).map_err(failed)?.is_some() {
            return Err(RamError::Exists { path });
        }
        let there = fs::metadata(&path).map_or(0, |file| file.blocks() * 512);
        self.remove(name)?;
        let _lock = self.lock()?;
        self.check_room(bytes.saturating_sub(there))?;
        self.make(path, bytes)
    }

    /// Where a file's pages are the memory itself (DAX), all of it is taken at once: in large pieces, which huge pages can map.
    fn fill_direct(&self, path: &Path, bytes: u64) -> Result<(), RamError> {
        let failed = |e: rustix::io::Errno| RamError::Directory { path: self.path.clone(), source: e.into() };
        let failed_at = |source: io::Error| RamError::Directory { path: self.path.clone(), source };
        if !is_direct(path).map_err(failed_at)? {
            return Ok(());
        }
        let file = OpenOptions::new().write(true).open(path).map_err(failed_at)?;
        fallocate(&file, FallocateFlags::empty(), 0, bytes).map_err(failed)
    }

    /// Have the huge pages of a RAM file set aside for it.
    fn reserve(&self, file: &File, bytes: u64) -> Result<(), RamError> {
        let Err(source) = reserve(file, bytes) else { return Ok(()) };
        let path = self.path.clone();
        let failed = |source: io::Error| RamError::Directory { path: path.clone(), source };
        let stat = statfs(&path).map_err(|e| failed(e.into()))?;
        Err(match HugePages::of(&stat).map_err(failed)? {
            Some(pages) if source.kind() == io::ErrorKind::OutOfMemory && pages.left() < bytes => {
                RamError::TooFewHugePages { path, asked: bytes, pages }
            }
            Some(pages) if source.kind() == io::ErrorKind::OutOfMemory => {
                RamError::Withheld { path, asked: bytes, left: pages.left(), source }
            }
            _ => failed(source),
        })
    }

    /// Remove the RAM file of VM `name`, and with it the guest's memory. One that is not there is no error.
    ///
    /// # Errors
    /// [`RamError::Directory`].
    pub fn remove(&self, name: &str) -> Result<(), RamError> {
        for path in [self.file(name), self.waiting(name)] {
            match fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(RamError::Directory { path: self.path.clone(), source: e });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Held while a RAM file is made.
struct Locked {
    _above: Option<OwnedFd>,
    _directory: File,
}

/// Lock a tmpfs of Rekindle's own that is mounted at `path`, or is going to be: by the folder above, which stays.
fn lock_above(path: &Path) -> io::Result<OwnedFd> {
    let above = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o700).create(above)?;
    let lock = open(above, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    flock(&lock, FlockOperation::LockExclusive)?;
    Ok(lock)
}

/// Mount a tmpfs with room for `bytes` at `path`, if there is none yet.
fn mount_own(path: &Path, bytes: u64) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let above = fs::metadata(path.parent().unwrap_or(Path::new("/")))?.dev();
    if fs::metadata(path)?.dev() != above {
        return Ok(());
    }
    let options = |more: &str| CString::new(format!("size={bytes},mode=0700{more}")).map_err(io::Error::other);
    let try_mount = |more: &str| -> io::Result<()> {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        Ok(mount("rekindle-ram", path, "tmpfs", flags, options(more)?.as_c_str())?)
    };
    // `noswap` since Linux 6.4: a guest's memory is not to be on a swap disk.
    try_mount(",noswap").or_else(|_| try_mount(""))
}

/// Whether `path` is on hugetlbfs, and then its page size.
///
/// # Errors
/// When it cannot be looked at.
pub fn huge_page_size(path: &Path) -> io::Result<Option<u64>> {
    let directory = File::open(path)?;
    let stat = fstatfs(&directory)?;
    Ok((stat.f_type == HUGETLBFS_MAGIC).then_some(stat.f_bsize as u64))
}

/// Whether the pages of the file at `path` are the memory itself (DAX).
///
/// # Errors
/// When it cannot be looked at.
pub fn is_direct(path: &Path) -> io::Result<bool> {
    let file = File::open(path)?;
    let known = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
    Ok(known.stx_attributes.contains(StatxAttributes::DAX))
}

fn free_bytes(stat: &StatFs) -> u64 {
    // A tmpfs without limit says 0 blocks in all.
    if stat.f_blocks == 0 && stat.f_type as u64 == TMPFS_MAGIC { u64::MAX } else { stat.f_bavail * stat.f_bsize as u64 }
}

/// `MemAvailable` of `/proc/meminfo` in bytes: what the machine can give without swapping.
///
/// # Errors
/// When `/proc/meminfo` is not as expected.
pub fn available_memory() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix("kB"))
        .and_then(|number| number.trim().parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other("/proc/meminfo has no MemAvailable"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_fits_is_refused_with_both_figures_and_what_is_promised_counts() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = RamDirectory::at(directory.path()).unwrap();
        let (free, promised) = ram.room().unwrap();
        assert_eq!(promised, 0);
        let e = ram.create("big", free * 2).unwrap_err();
        assert!(matches!(e, RamError::TooSmall { asked, .. } if asked == free * 2));
        assert!(e.to_string().contains(&format!("{} MiB asked for", (free * 2) >> 20)), "{e}");
        let most = free / 4 * 3;
        ram.create("first", most).unwrap();
        assert_eq!(ram.room().unwrap().1, most);
        assert!(matches!(ram.create("second", most), Err(RamError::TooSmall { .. })));
        assert!(matches!(ram.create("first", 4096), Err(RamError::Exists { .. })));
        ram.remove("first").unwrap();
        ram.remove("first").unwrap();
        let file = ram.create("second", most).unwrap();
        assert_eq!(fs::metadata(file).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn any_number_may_wait_but_only_what_fits_is_claimed() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = RamDirectory::at(directory.path()).unwrap();
        let most = ram.room().unwrap().0 / 4 * 3;
        for name in ["one", "two", "three"] {
            ram.create_waiting(name, most).unwrap();
        }
        assert_eq!(ram.room().unwrap().1, 0, "nothing is promised to those who wait");
        assert!(matches!(ram.create_waiting("one", most), Err(RamError::Exists { .. })));
        let file = ram.claim("one", most).unwrap();
        assert_eq!(file, ram.file("one"));
        assert_eq!(ram.room().unwrap().1, most);
        assert_eq!(ram.claim("one", most).unwrap(), file, "once more is no error");
        assert!(matches!(ram.claim("two", most), Err(RamError::TooSmall { .. })));
        assert!(ram.waiting("two").exists(), "it waits on");
        ram.remove("one").unwrap();
        ram.claim("two", most).unwrap();
        assert!(matches!(ram.claim("nobody", 4096), Err(RamError::Directory { .. } | RamError::TooSmall { .. })));
        ram.remove("two").unwrap();
        assert!(matches!(ram.claim("nobody", 4096), Err(RamError::Directory { .. })));
        ram.remove("three").unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_renewed_file_is_empty_again_and_may_be_of_another_size() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = RamDirectory::at(directory.path()).unwrap();
        let file = ram.create("web", 1 << 20).unwrap();
        fs::write(&file, [7; 1 << 20]).unwrap();
        for bytes in [1 << 20, 2 << 20] {
            assert_eq!(ram.renew("web", bytes).unwrap(), file);
            let metadata = fs::metadata(&file).unwrap();
            assert_eq!((metadata.len(), metadata.blocks()), (bytes, 0));
        }
    }

    #[test]
    fn room_that_the_former_ram_has_is_room_for_the_next() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("needs root: not run");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ram");
        let ram = RamDirectory::own_tmpfs(&path, 8 << 20).unwrap();
        ram.create("x", 6 << 20).unwrap();
        let former = File::options().read(true).write(true).open(ram.file("x")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&former, &[1; 5 << 20], 0).unwrap();
        let next = ram.renew_keeping_cache("x", 6 << 20).unwrap();
        assert_eq!(fs::metadata(&next).unwrap().blocks(), 0, "it is another file");
        assert_eq!(former.metadata().unwrap().blocks() * 512, 5 << 20);
        // Somebody else's has no claim to that room.
        assert!(matches!(ram.create("y", 3 << 20), Err(RamError::TooSmall { .. })));
        // Without the former one's there would not be enough.
        fs::remove_file(&next).unwrap();
        assert!(matches!(ram.renew_keeping_cache("x", 6 << 20), Err(RamError::TooSmall { .. })));
        drop(former);
        RamDirectory::release_own_tmpfs(&path);
    }

    #[test]
    fn a_missing_directory_is_named() {
        let e = RamDirectory::at(Path::new("/nowhere/at/all")).unwrap_err();
        assert!(e.to_string().contains("/nowhere/at/all"), "{e}");
    }

    #[test]
    fn a_tmpfs_of_our_own_is_mounted_once_with_its_size() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("needs root: not run");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ram");
        let ram = RamDirectory::own_tmpfs(&path, 64 << 20).unwrap();
        let again = RamDirectory::own_tmpfs(&path, 64 << 20).unwrap();
        assert_eq!(ram, again);
        assert_eq!(ram.room().unwrap().0, 64 << 20);
        assert!(matches!(ram.create("x", 65 << 20), Err(RamError::TooSmall { .. })));
        // The last VM is stopped while another is being started.
        RamDirectory::release_own_tmpfs(&path);
        assert!(!path.exists());
        ram.create("x", 1 << 20).unwrap();
        RamDirectory::release_own_tmpfs(&path);
        assert!(path.join("x.ram").exists(), "one that is in use stays");
        // A pager that has not seen yet that the VM is gone has it open.
        let held = File::open(path.join("x.ram")).unwrap();
        fs::remove_file(path.join("x.ram")).unwrap();
        RamDirectory::release_own_tmpfs(&path);
        assert!(!path.exists());
        assert_eq!(held.metadata().unwrap().len(), 1 << 20);
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(path.to_str().unwrap()), "mounted once, unmounted once");
    }
}
