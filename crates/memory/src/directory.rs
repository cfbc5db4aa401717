//! Directories for RAM files, and their free space.
//!
//! A RAM file on tmpfs or hugetlbfs gets its pages when the guest first touches them. The file system may be full by
//! then, and a guest that touches one more page is killed by `SIGBUS`. Therefore a file that may not fit later is
//! rejected when it is created. On hugetlbfs the kernel reserves pages for each file. On tmpfs it does not, so this
//! module counts the pages that existing files may still claim ("promised") as used.

mod replace;

pub use replace::PreviousRam;

use crate::hugepages::{HUGETLBFS_MAGIC, HugePages};
use rekindle_kernel::memory::reserve;
use rekindle_kernel::mounts::hides_mounts;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, StatFs, StatxAttributes, StatxFlags, fallocate, flock,
    fstatfs, open, openat, statfs, statx,
};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::ffi::CString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Suffix of the RAM file of a VM.
const RAM_SUFFIX: &str = "ram";
/// Suffix of the RAM file of a QEMU that waits for its guest with untouched RAM.
const WAITING_SUFFIX: &str = "waiting";

/// The reason why a RAM file cannot be created or removed.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The directory cannot be used.
    #[error("RAM directory {}", path.display())]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Fewer bytes are left than were requested.
    #[error(
        "RAM directory {}: {} requested, {} left ({} free, of which {} promised to other guests); stop a VM, make \
         `memory` smaller, or name a larger directory as `ram.dir`",
        path.display(), mib(*requested), mib(*left), mib(*free), mib(*promised)
    )]
    TooSmall {
        path: PathBuf,
        /// Bytes requested.
        requested: u64,
        /// Bytes left: free less promised.
        left: u64,
        /// Bytes free in the file system and in the machine.
        free: u64,
        /// Bytes that other RAM files may still claim.
        promised: u64,
    },
    /// Fewer huge pages are left than were requested.
    #[error(
        "RAM directory {}: {} requested, {} left in huge pages of {} ({} free, of which {} reserved{}); stop a VM, make \
         `memory` smaller, or {}",
        path.display(), mib(*requested), mib(pages.left()), mib(pages.page), mib(pages.free), mib(pages.reserved),
        pages.limit.map(|limit| format!("; the mount's `size=` leaves {}", mib(limit))).unwrap_or_default(),
        pages.remedy(*requested)
    )]
    TooFewHugePages {
        path: PathBuf,
        /// Bytes requested.
        requested: u64,
        /// Free space of the file system and of the kernel's pool.
        pages: HugePages,
    },
    /// The kernel refuses to reserve huge pages although enough are free.
    #[error(
        "RAM directory {}: the kernel does not reserve {} of huge pages, although {} are left; raise the limit of this \
         control group (`hugetlb.*.rsvd.max`)",
        path.display(), mib(*requested), mib(*left)
    )]
    Withheld {
        path: PathBuf,
        /// Bytes requested.
        requested: u64,
        /// Bytes left.
        left: u64,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A RAM file of that name exists.
    #[error("RAM file {} exists: a VM of that name runs, or an operation was interrupted; run `rekindle recover`", path.display())]
    Exists { path: PathBuf },
    /// The directory is on DAX, where Linux cannot wait for single pages.
    #[error(
        "RAM directory {}: it is on DAX, where a restore cannot load the guest's memory; name a directory on tmpfs or hugetlbfs as \
         `ram.dir`, or leave it out (restore --definition FILE)",
        path.display()
    )]
    Direct { path: PathBuf },
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// The space of a RAM directory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Free space of the file system and the machine.
    pub free: u64,
    /// The part of `free` that is not available: on hugetlbfs the pages that the kernel has reserved, elsewhere the
    /// pages that existing RAM files may still claim.
    pub promised: u64,
}

/// A directory for RAM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamDirectory {
    path: PathBuf,
    /// Configured size in bytes of Rekindle's own tmpfs; `None` for another directory.
    own_bytes: Option<u64>,
}

impl RamDirectory {
    /// Uses the directory at `path`, which must exist.
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

    /// Uses Rekindle's own tmpfs at `path`, and mounts it with a size of `bytes` if it is not mounted. Needs root.
    ///
    /// # Errors
    /// [`RamError::Directory`] when the tmpfs cannot be mounted.
    pub fn own_tmpfs(path: &Path, bytes: u64) -> Result<Self, RamError> {
        let own = Self { path: path.to_owned(), own_bytes: Some(bytes) };
        own.lock().map(drop)?;
        Ok(own)
    }

    /// Unmounts Rekindle's own tmpfs at `path` if it has no RAM file. Ignores failures.
    ///
    /// A pager or a protector may still have RAM of the tmpfs mapped, because it notices the end of its QEMU a moment
    /// later. So the unmount is lazy: the kernel frees the file system when the last mapping ends.
    pub fn release_own_tmpfs(path: &Path) {
        let Ok(_lock) = lock_parent(path) else { return };
        let is_empty = fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        if is_empty && unmount(path, UnmountFlags::DETACH).is_ok() {
            let _ = fs::remove_dir(path);
        }
    }

    /// Prevents other processes from creating RAM files in this directory, and from unmounting Rekindle's own tmpfs.
    fn lock(&self) -> Result<DirectoryLock, RamError> {
        let failed = |source| self.failed(source);
        let parent = match self.own_bytes {
            Some(bytes) => {
                let parent = lock_parent(&self.path).map_err(failed)?;
                // Mounts the tmpfs again if the process that stopped the last VM has unmounted it.
                mount_own(&self.path, bytes).map_err(failed)?;
                Some(parent)
            }
            None => None,
        };
        let directory = File::open(&self.path).map_err(failed)?;
        flock(&directory, FlockOperation::LockExclusive).map_err(|e| failed(e.into()))?;
        Ok(DirectoryLock { _parent: parent, _directory: directory })
    }

    fn failed(&self, source: io::Error) -> RamError {
        RamError::Directory { path: self.path.clone(), source }
    }

    /// Returns whether files in this directory are on DAX, so that mapping one maps the storage itself.
    ///
    /// # Errors
    /// [`RamError::Directory`] when no file can be made there.
    pub fn is_direct(&self) -> Result<bool, RamError> {
        // Only files have the attribute.
        let file = openat(CWD, &self.path, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
        match file {
            // Not a file system of RAM files on DAX: those have unnamed files.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => Ok(false),
            Err(e) => Err(self.failed(e.into())),
            Ok(file) => has_direct_attribute(&file).map_err(|e| self.failed(e)),
        }
    }

    fn is_on_hugetlbfs(&self) -> Result<bool, RamError> {
        let page_size = huge_page_size(&self.path).map_err(|e| self.failed(e))?;
        Ok(page_size.is_some())
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the RAM file of VM `name`, which need not exist.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.{RAM_SUFFIX}"))
    }

    /// Returns the path of the RAM file of VM `name` while its QEMU waits for the guest.
    #[must_use]
    pub fn waiting(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.{WAITING_SUFFIX}"))
    }

    /// Returns the space of the directory.
    ///
    /// # Errors
    /// [`RamError::Directory`].
    pub fn room(&self) -> Result<Room, RamError> {
        let failed = |source| self.failed(source);
        let stat = statfs(&self.path).map_err(|e| failed(e.into()))?;
        if let Some(pages) = HugePages::of(&stat).map_err(failed)? {
            return Ok(Room { free: pages.left() + pages.reserved, promised: pages.reserved });
        }
        let mut free = free_bytes(&stat);
        if stat.f_type as u64 == TMPFS_MAGIC {
            free = free.min(available_memory().map_err(failed)?);
        }
        let mut promised = 0;
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.path().extension().is_some_and(|extension| extension == RAM_SUFFIX) {
                let Ok(metadata) = entry.metadata() else { continue };
                promised += metadata.len().saturating_sub(metadata.blocks() * 512);
            }
        }
        Ok(Room { free, promised })
    }

    /// Creates the RAM file of VM `name` with `bytes` bytes; only this user can read it.
    ///
    /// The new file has no pages. Each page is allocated when it is touched. On hugetlbfs all pages are reserved, so
    /// that the allocation cannot fail; on DAX all pages are allocated now.
    ///
    /// # Errors
    /// [`RamError::TooSmall`] or [`RamError::TooFewHugePages`] with the requested and the available size;
    /// [`RamError::Exists`].
    pub fn create(&self, name: &str, bytes: u64) -> Result<PathBuf, RamError> {
        // No other process may create a file between the check and the creation.
        let _lock = self.lock()?;
        self.check_room(bytes)?;
        let path = self.create_file(self.file(name), bytes)?;
        if let Err(e) = self.allocate_direct(&path, bytes) {
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        Ok(path)
    }

    /// Creates the RAM file of a QEMU that waits for its guest and touches no page. No bytes are promised to it, so any
    /// number of such files may exist. (On hugetlbfs its pages are reserved all the same, because QEMU would reserve
    /// them.) [`RamDirectory::claim`] is required before a guest runs in the file.
    ///
    /// # Errors
    /// As for [`RamDirectory::create`], except [`RamError::TooSmall`].
    pub fn create_waiting(&self, name: &str, bytes: u64) -> Result<PathBuf, RamError> {
        let _lock = self.lock()?;
        self.create_file(self.waiting(name), bytes)
    }

    /// Promises `bytes` bytes to the waiting file of VM `name`, and renames the file to [`RamDirectory::file`].
    /// Idempotent.
    ///
    /// # Errors
    /// [`RamError::TooSmall`], and then the file still waits; [`RamError::Exists`]; [`RamError::Directory`] when there
    /// is no waiting file.
    pub fn claim(&self, name: &str, bytes: u64) -> Result<PathBuf, RamError> {
        let _lock = self.lock()?;
        let (waiting, path) = (self.waiting(name), self.file(name));
        match (waiting.exists(), path.exists()) {
            (true, true) => return Err(RamError::Exists { path }),
            // Claimed before.
            (false, true) => return Ok(path),
            (_, false) => {}
        }
        self.check_room(bytes)?;
        fs::rename(&waiting, &path).map_err(|e| self.failed(e))?;
        Ok(path)
    }

    /// Checks that `bytes` bytes are left. On hugetlbfs the check happens when the kernel reserves the pages instead: a
    /// mount may have pages of its own, and a control group may have a limit.
    ///
    /// # Errors
    /// [`RamError::TooSmall`] with the requested and the available size.
    pub fn check_room(&self, bytes: u64) -> Result<(), RamError> {
        if self.is_on_hugetlbfs()? {
            return Ok(());
        }
        let Room { free, promised } = self.room()?;
        let left = free.saturating_sub(promised);
        if bytes > left {
            return Err(RamError::TooSmall { path: self.path.clone(), requested: bytes, left, free, promised });
        }
        Ok(())
    }

    fn create_file(&self, path: PathBuf, bytes: u64) -> Result<PathBuf, RamError> {
        let failed = |source| self.failed(source);
        if path.exists() {
            return Err(RamError::Exists { path });
        }
        let reserves_pages = self.is_on_hugetlbfs()?;
        let created = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = created.map_err(failed)?;
        let sized = file.set_len(bytes).map_err(failed);
        let reserved = sized.and_then(|()| if reserves_pages { self.reserve(&file, bytes) } else { Ok(()) });
        if let Err(e) = reserved {
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        Ok(path)
    }

    /// Provides the RAM of VM `name`, whose QEMU has ended, for a new start, with `bytes` bytes.
    ///
    /// The new file is empty, with one exception: on hugetlbfs the old file is used again, with the guest's old
    /// content, as after a reset. Pages that are returned to the pool may be unavailable afterwards.
    ///
    /// # Errors
    /// As for [`RamDirectory::create`].
    pub fn renew(&self, name: &str, bytes: u64) -> Result<PathBuf, RamError> {
        let path = self.file(name);
        let fits = fs::metadata(&path).is_ok_and(|file| file.len() == bytes);
        if fits && self.is_on_hugetlbfs()? {
            return Ok(path);
        }
        self.remove_and_release(name)?;
        self.create(name, bytes)
    }

    /// Replaces the RAM of VM `name` like [`RamDirectory::renew`], while another process has the old RAM open. That
    /// process releases pages of the old RAM as pages of the new RAM are allocated: together they never exceed the
    /// bytes promised to the VM.
    ///
    /// # Errors
    /// As for [`RamDirectory::renew`]; [`RamError::Exists`] on hugetlbfs, where the old file would be used again.
    pub fn renew_keeping_cache(&self, name: &str, bytes: u64) -> Result<PathBuf, RamError> {
        let path = self.file(name);
        if self.is_on_hugetlbfs()? {
            return Err(RamError::Exists { path });
        }
        let allocated = fs::metadata(&path).map_or(0, |file| file.blocks() * 512);
        self.remove(name)?;
        let _lock = self.lock()?;
        self.check_room(bytes.saturating_sub(allocated))?;
        self.create_file(path, bytes)
    }

    /// Allocates all of a file on DAX. In one call the file gets large extents, which huge pages can map.
    fn allocate_direct(&self, path: &Path, bytes: u64) -> Result<(), RamError> {
        let failed = |source| self.failed(source);
        if !is_direct(path).map_err(failed)? {
            return Ok(());
        }
        let file = OpenOptions::new().write(true).open(path).map_err(failed)?;
        fallocate(&file, FallocateFlags::empty(), 0, bytes).map_err(|e| failed(e.into()))
    }

    /// Makes the kernel reserve the huge pages of a RAM file.
    fn reserve(&self, file: &File, bytes: u64) -> Result<(), RamError> {
        let Err(source) = reserve(file, bytes) else { return Ok(()) };
        let failed = |source| self.failed(source);
        let path = self.path.clone();
        let stat = statfs(&path).map_err(|e| failed(e.into()))?;
        Err(match HugePages::of(&stat).map_err(failed)? {
            Some(pages) if source.kind() == io::ErrorKind::OutOfMemory && pages.left() < bytes => {
                RamError::TooFewHugePages { path, requested: bytes, pages }
            }
            Some(pages) if source.kind() == io::ErrorKind::OutOfMemory => {
                RamError::Withheld { path, requested: bytes, left: pages.left(), source }
            }
            _ => failed(source),
        })
    }

    /// Removes the RAM files of VM `name`, and with them the guest's memory. A missing file is no error.
    ///
    /// # Errors
    /// [`RamError::Directory`].
    pub fn remove(&self, name: &str) -> Result<(), RamError> {
        for path in [self.file(name), self.waiting(name)] {
            match fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(self.failed(e)),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The locks held while a RAM file is created.
struct DirectoryLock {
    /// Of Rekindle's own tmpfs only.
    _parent: Option<OwnedFd>,
    _directory: File,
}

/// Locks Rekindle's own tmpfs through the parent directory, which is never removed. `path` need not be mounted.
fn lock_parent(path: &Path) -> io::Result<OwnedFd> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
    let lock = open(parent, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    flock(&lock, FlockOperation::LockExclusive)?;
    Ok(lock)
}

/// Mounts a tmpfs with a size of `bytes` at `path`, unless one is mounted.
fn mount_own(path: &Path, bytes: u64) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let parent_device = fs::metadata(path.parent().unwrap_or(Path::new("/")))?.dev();
    let is_mounted = fs::metadata(path)?.dev() != parent_device;
    if is_mounted {
        return Ok(());
    }
    if hides_mounts(path)? {
        let why = "the tmpfs for RAM is not mounted, and the host would not see a mount of this process, which has mounts of its own, as \
                   in a systemd unit; start a VM on the host first, or run on the host: rekindle host mount";
        return Err(io::Error::other(why));
    }
    let try_mount = |more_options: &str| -> io::Result<()> {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        let options = CString::new(format!("size={bytes},mode=0700{more_options}")).map_err(io::Error::other)?;
        Ok(mount("rekindle-ram", path, "tmpfs", flags, options.as_c_str())?)
    };
    // `noswap` needs Linux 6.4. It keeps the guest's memory off the swap disk.
    try_mount(",noswap").or_else(|_| try_mount(""))
}

/// Returns the page size if `path` is on hugetlbfs.
///
/// # Errors
/// Errors of opening `path` and of `fstatfs(2)`.
pub fn huge_page_size(path: &Path) -> io::Result<Option<u64>> {
    let directory = File::open(path)?;
    let stat = fstatfs(&directory)?;
    Ok((stat.f_type == HUGETLBFS_MAGIC).then_some(stat.f_bsize as u64))
}

/// Returns whether the file at `path` is on DAX, so that mapping it maps the storage itself.
///
/// # Errors
/// Errors of opening `path` and of `statx(2)`.
pub fn is_direct(path: &Path) -> io::Result<bool> {
    has_direct_attribute(&File::open(path)?)
}

fn has_direct_attribute(file: impl AsFd) -> io::Result<bool> {
    let known = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
    Ok(known.stx_attributes.contains(StatxAttributes::DAX))
}

fn free_bytes(stat: &StatFs) -> u64 {
    // A tmpfs without limit reports a total of 0 blocks.
    if stat.f_blocks == 0 && stat.f_type as u64 == TMPFS_MAGIC { u64::MAX } else { stat.f_bavail * stat.f_bsize as u64 }
}

/// Returns `MemAvailable` of `/proc/meminfo` in bytes: the memory that can be allocated without swapping.
///
/// # Errors
/// Errors of reading `/proc/meminfo`, or a file without that entry.
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
    fn a_file_that_does_not_fit_is_rejected_with_figures_and_promised_pages_count_as_used() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = RamDirectory::at(directory.path()).unwrap();
        let Room { free, promised } = ram.room().unwrap();
        assert_eq!(promised, 0);
        let e = ram.create("big", free * 2).unwrap_err();
        assert!(matches!(e, RamError::TooSmall { requested, .. } if requested == free * 2));
        assert!(e.to_string().contains(&format!("{} MiB requested", (free * 2) >> 20)), "{e}");
        let most = free / 4 * 3;
        ram.create("first", most).unwrap();
        assert_eq!(ram.room().unwrap().promised, most);
        assert!(matches!(ram.create("second", most), Err(RamError::TooSmall { .. })));
        assert!(matches!(ram.create("first", 4096), Err(RamError::Exists { .. })));
        ram.remove("first").unwrap();
        ram.remove("first").unwrap();
        let file = ram.create("second", most).unwrap();
        assert_eq!(fs::metadata(file).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn any_number_of_files_may_wait_but_only_those_that_fit_are_claimed() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = RamDirectory::at(directory.path()).unwrap();
        let most = ram.room().unwrap().free / 4 * 3;
        for name in ["one", "two", "three"] {
            ram.create_waiting(name, most).unwrap();
        }
        assert_eq!(ram.room().unwrap().promised, 0, "nothing is promised to waiting files");
        assert!(matches!(ram.create_waiting("one", most), Err(RamError::Exists { .. })));
        let file = ram.claim("one", most).unwrap();
        assert_eq!(file, ram.file("one"));
        assert_eq!(ram.room().unwrap().promised, most);
        assert_eq!(ram.claim("one", most).unwrap(), file, "a second claim is no error");
        assert!(matches!(ram.claim("two", most), Err(RamError::TooSmall { .. })));
        assert!(ram.waiting("two").exists(), "it still waits");
        ram.remove("one").unwrap();
        ram.claim("two", most).unwrap();
        assert!(matches!(ram.claim("unknown", 4096), Err(RamError::Directory { .. } | RamError::TooSmall { .. })));
        ram.remove("two").unwrap();
        assert!(matches!(ram.claim("unknown", 4096), Err(RamError::Directory { .. })));
        ram.remove("three").unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_renewed_file_is_empty_and_may_have_another_size() {
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
    fn the_space_of_old_ram_is_available_to_the_ram_that_replaces_it() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("needs root: not run");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ram");
        let ram = RamDirectory::own_tmpfs(&path, 8 << 20).unwrap();
        ram.create("x", 6 << 20).unwrap();
        let old = File::options().read(true).write(true).open(ram.file("x")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&old, &[1; 5 << 20], 0).unwrap();
        let next = ram.renew_keeping_cache("x", 6 << 20).unwrap();
        assert_eq!(fs::metadata(&next).unwrap().blocks(), 0, "it is another file");
        assert_eq!(old.metadata().unwrap().blocks() * 512, 5 << 20);
        // The file of another VM cannot use that space.
        assert!(matches!(ram.create("y", 3 << 20), Err(RamError::TooSmall { .. })));
        // Without the space of the old RAM, too little is left.
        fs::remove_file(&next).unwrap();
        assert!(matches!(ram.renew_keeping_cache("x", 6 << 20), Err(RamError::TooSmall { .. })));
        drop(old);
        RamDirectory::release_own_tmpfs(&path);
    }

    #[test]
    fn the_error_for_a_missing_directory_names_it() {
        let e = RamDirectory::at(Path::new("/nowhere/at/all")).unwrap_err();
        assert!(e.to_string().contains("/nowhere/at/all"), "{e}");
    }

    #[test]
    fn the_own_tmpfs_is_mounted_once_with_its_size_and_unmounted_when_unused() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("needs root: not run");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ram");
        let ram = RamDirectory::own_tmpfs(&path, 64 << 20).unwrap();
        let again = RamDirectory::own_tmpfs(&path, 64 << 20).unwrap();
        assert_eq!(ram, again);
        assert_eq!(ram.room().unwrap().free, 64 << 20);
        assert!(matches!(ram.create("x", 65 << 20), Err(RamError::TooSmall { .. })));
        // The last VM is stopped while another is being started.
        RamDirectory::release_own_tmpfs(&path);
        assert!(!path.exists());
        ram.create("x", 1 << 20).unwrap();
        RamDirectory::release_own_tmpfs(&path);
        assert!(path.join("x.ram").exists(), "a tmpfs with a RAM file stays mounted");
        // A pager that has not noticed the end of the VM has the file open.
        let held = File::open(path.join("x.ram")).unwrap();
        fs::remove_file(path.join("x.ram")).unwrap();
        RamDirectory::release_own_tmpfs(&path);
        assert!(!path.exists());
        assert_eq!(held.metadata().unwrap().len(), 1 << 20);
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(path.to_str().unwrap()), "mounted once, unmounted once");
    }
}
