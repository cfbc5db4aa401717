//! The image of a disk: a raw file or a block device.
//!
//! The image is opened with `O_DIRECT` if the file system supports it, so that the host does not cache blocks that
//! the guest caches. The image is locked as QEMU locks it (`OFD` locks at bytes 100 and 200, `locking=on`), so that
//! two servers, or a server and a QEMU, exclude each other.

use crate::block::SECTOR;
use rekindle_kernel::file::{self, Lock};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How an image is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenMode {
    /// Reject writes.
    pub readonly: bool,
    /// Bypass the host's page cache.
    pub direct: bool,
}

impl OpenMode {
    /// Opens a file, with more flags.
    ///
    /// # Errors
    /// Errors of `open(2)`.
    pub(crate) fn open(self, path: &Path, flags: OFlags) -> io::Result<File> {
        let access = if self.readonly { OFlags::RDONLY } else { OFlags::RDWR } | OFlags::CLOEXEC;
        Ok(rustix::fs::open(path, access | flags, Mode::empty())?.into())
    }
}

/// The reason why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("disk image {}: {doing}", path.display())]
    Io {
        path: PathBuf,
        /// The step that failed.
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    /// The image is neither a regular file nor a block device.
    #[error("disk image {}: it is {what}, but only a raw file or a block device can be served", path.display())]
    Kind {
        path: PathBuf,
        /// The actual kind of file.
        what: &'static str,
    },
    #[error(
        "disk image {}: another program has it open ({what}); a disk that two write is damaged. End that one first \
         (fuser {})", path.display(), path.display()
    )]
    InUse {
        path: PathBuf,
        /// How the other process uses the image.
        what: &'static str,
    },
    #[error("disk image {}: its length of {bytes} bytes is not a multiple of 512-byte sectors", path.display())]
    Odd { path: PathBuf, bytes: u64 },
    #[error(
        "disk image {}: it is {bytes} bytes long but was {before}; a guest that uses the longer disk would lose data",
        path.display()
    )]
    Shorter { path: PathBuf, bytes: u64, before: u64 },
}

/// An open image.
#[derive(Debug)]
pub struct Image {
    pub path: PathBuf,
    pub file: Arc<File>,
    /// Length in bytes.
    pub bytes: u64,
    pub mode: OpenMode,
    /// Alignment that each operation requires of its offset, length and memory.
    pub alignment: u32,
    pub is_device: bool,
    /// Whether written data can still be made durable.
    pub durability: Arc<Durability>,
}

/// A flag that records whether all syncs of an open file have succeeded.
///
/// The kernel reports a write-back error only once per open file, to the next sync, and drops the data. The guest's
/// flushes, seals and merges share the open image. So after one failed sync all later syncs fail, until the image is
/// opened again.
#[derive(Debug, Default)]
pub struct Durability(AtomicBool);

impl Durability {
    /// Records that a sync has failed.
    pub fn set_broken(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// How long a killed server may hold its image: until its I/O has ended.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval between attempts to lock the image.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// QEMU's permissions on an image: offsets of the locked bytes from [`USED_BASE`] and [`DENIED_BASE`].
const READ: u64 = 0;
const WRITE: u64 = 1;
const RESIZE: u64 = 3;
/// First byte of the range that a process locks (shared) for the permissions that it uses.
const USED_BASE: u64 = 100;
/// First byte of the range that a process locks (shared) for the permissions that it denies to others.
const DENIED_BASE: u64 = 200;

impl Image {
    /// Opens and locks the image at `path`.
    ///
    /// *On success:* no other process that respects the locks can open the image for writing.
    pub fn open(path: &Path, mode: OpenMode) -> Result<Self, ImageError> {
        Self::open_with(path, mode, |flags| mode.open(path, flags))
    }

    /// Opens and locks the image at `path` as [`Self::open`] does. `open` opens the file.
    pub fn open_with(
        path: &Path,
        mode: OpenMode,
        open: impl Fn(OFlags) -> io::Result<File>,
    ) -> Result<Self, ImageError> {
        Self::open_unlocked(path, mode, open)?.lock_within(RELEASE_TIMEOUT)
    }

    /// Inspects the image at `path` without locking it. The image's content may change at any time.
    pub fn inspect(path: &Path) -> Result<Self, ImageError> {
        let mode = OpenMode { readonly: true, direct: false };
        Self::open_unlocked(path, mode, |flags| mode.open(path, flags))
    }

    /// Locks the image, and waits up to `timeout` for a process that is releasing it.
    fn lock_within(self, timeout: Duration) -> Result<Self, ImageError> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.lock() {
                Ok(()) => return Ok(self),
                Err(ImageError::InUse { .. }) if Instant::now() < deadline => thread::sleep(RETRY_INTERVAL),
                Err(e) => return Err(e),
            }
        }
    }

    fn open_unlocked(
        path: &Path,
        mode: OpenMode,
        open: impl Fn(OFlags) -> io::Result<File>,
    ) -> Result<Self, ImageError> {
        let failed = |doing| {
            let path = path.to_owned();
            move |source: io::Error| ImageError::Io { path, doing, source }
        };
        let (file, direct) = match mode.direct.then(|| open(OFlags::DIRECT)) {
            Some(Ok(file)) => (file, true),
            // `O_DIRECT` is not supported, for example by tmpfs, which is in memory anyway.
            Some(Err(e)) if e.kind() != io::ErrorKind::InvalidInput => return Err(failed("opening it")(e)),
            Some(Err(_)) | None => (open(OFlags::empty()).map_err(failed("opening it"))?, false),
        };
        let metadata = file.metadata().map_err(failed("reading its metadata"))?;
        let file_type = metadata.file_type();
        let is_device = file_type.is_block_device();
        if !is_device && !file_type.is_file() {
            let what = if file_type.is_dir() { "a directory" } else { "no file" };
            return Err(ImageError::Kind { path: path.to_owned(), what });
        }
        let bytes =
            if is_device { file::device_bytes(&file).map_err(failed("asking its length"))? } else { metadata.len() };
        if !bytes.is_multiple_of(SECTOR) {
            return Err(ImageError::Odd { path: path.to_owned(), bytes });
        }
        let alignment = if direct { file::direct_alignment(&file).unwrap_or(4096) } else { 1 };
        let mode = OpenMode { direct, ..mode };
        let (file, durability) = (Arc::new(file), Arc::default());
        Ok(Self { path: path.to_owned(), file, bytes, mode, alignment, is_device, durability })
    }

    /// Returns the current length in whole sectors. Fails if the image is shorter than `previous_bytes`.
    pub fn current_length(&self, previous_bytes: u64) -> Result<u64, ImageError> {
        let failed = |source| ImageError::Io { path: self.path.clone(), doing: "asking its length", source };
        let file_bytes = if self.is_device {
            file::device_bytes(&self.file).map_err(failed)?
        } else {
            self.file.metadata().map_err(failed)?.len()
        };
        let bytes = file_bytes - file_bytes % SECTOR;
        if bytes < previous_bytes {
            return Err(ImageError::Shorter { path: self.path.clone(), bytes, before: previous_bytes });
        }
        Ok(bytes)
    }

    /// Locks the image as QEMU does: first the own permissions, then a check of those of other processes.
    fn lock(&self) -> Result<(), ImageError> {
        let failed = |source| ImageError::Io { path: self.path.clone(), doing: "locking it", source };
        let in_use = |what| ImageError::InUse { path: self.path.clone(), what };
        let used: &[u64] = if self.mode.readonly { &[READ] } else { &[READ, WRITE, RESIZE] };
        let denied = [WRITE, RESIZE];
        let used_bytes = used.iter().map(|permission| USED_BASE + permission);
        let denied_bytes = denied.iter().map(|permission| DENIED_BASE + permission);
        for byte in used_bytes.chain(denied_bytes) {
            if !file::lock_byte(&self.file, byte, Lock::Shared).map_err(failed)? {
                return Err(in_use("it does not share it"));
            }
        }
        for permission in used {
            if file::is_locked(&self.file, DENIED_BASE + permission).map_err(failed)? {
                return Err(in_use("it does not share it"));
            }
        }
        for permission in denied {
            if file::is_locked(&self.file, USED_BASE + permission).map_err(failed)? {
                return Err(in_use("it writes it"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::fs;

    const WRITABLE: OpenMode = OpenMode { readonly: false, direct: true };
    const READONLY: OpenMode = OpenMode { readonly: true, direct: true };

    fn create_image(bytes: u64) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.raw");
        File::create(&path).unwrap().set_len(bytes).unwrap();
        (directory, path)
    }

    #[test]
    fn one_process_writes_an_image_or_several_read_it() {
        let (_directory, path) = create_image(1 << 20);
        let open = |mode: OpenMode| {
            let opened = Image::open_unlocked(&path, mode, |flags| mode.open(&path, flags));
            opened.and_then(|image| image.lock_within(Duration::ZERO))
        };
        let writer = Image::open(&path, WRITABLE).unwrap();
        assert_eq!(writer.bytes, 1 << 20);
        assert!(matches!(open(WRITABLE), Err(ImageError::InUse { .. })));
        drop(writer);
        let readers = [Image::open(&path, READONLY).unwrap(), Image::open(&path, READONLY).unwrap()];
        assert!(matches!(open(WRITABLE), Err(ImageError::InUse { .. })), "under its readers");
        drop(readers);
        let inspected = Image::inspect(&path).unwrap();
        let _writer = Image::open(&path, WRITABLE).unwrap();
        assert_eq!(
            (inspected.bytes, Image::inspect(&path).unwrap().bytes),
            (1 << 20, 1 << 20),
            "an inspected image is not locked"
        );
        assert!(matches!(open(READONLY), Err(ImageError::InUse { .. })));
    }

    #[test]
    fn only_files_and_devices_of_whole_sectors_are_disk_images() {
        let (directory, path) = create_image(1000);
        assert!(matches!(Image::open(&path, WRITABLE), Err(ImageError::Odd { bytes: 1000, .. })));
        let missing = Image::open(&directory.path().join("none"), WRITABLE).unwrap_err();
        assert!(missing.to_string().contains("none: opening it"), "{missing}");
        assert!(matches!(Image::open(directory.path(), READONLY), Err(ImageError::Kind { what: "a directory", .. })));
        assert!(matches!(Image::open(Path::new("/dev/null"), READONLY), Err(ImageError::Kind { .. })));
    }

    #[test]
    fn an_image_may_grow_but_not_shrink() {
        let (_directory, path) = create_image(8192);
        let image = Image::open(&path, WRITABLE).unwrap();
        let set_length = |bytes| fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        set_length(16384);
        assert_eq!(image.current_length(8192).unwrap(), 16384);
        set_length(4096);
        assert!(matches!(image.current_length(8192), Err(ImageError::Shorter { bytes: 4096, before: 8192, .. })));
    }
}
