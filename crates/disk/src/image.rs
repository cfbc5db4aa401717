//! The image of a disk: a raw file or a block device.
//!
//! The image is opened with `O_DIRECT` if the file system supports it, so that the host does not cache blocks that
//! the guest caches. The image is locked as QEMU locks it (`OFD` locks at bytes 100 and 200, `locking=on`), so that
//! two servers, or a server and a QEMU, exclude each other.

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenMode {
    /// Reject writes.
    pub readonly: bool,
    /// Bypass the host's page cache.
    pub direct: bool,
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
const RELEASE: Duration = Duration::from_secs(3);
/// Interval between attempts to lock the image.
const AGAIN: Duration = Duration::from_millis(5);

/// QEMU's permissions on an image: bit numbers, and offsets of the locked bytes after [`PERMITTED`] and [`UNSHARED`].
const READ: u64 = 0;
const WRITE: u64 = 1;
const RESIZE: u64 = 3;
/// First byte of the range that a process locks (shared) for its permissions.
const PERMITTED: u64 = 100;
/// First byte of the range that a process locks (shared) for the permissions that it denies to others.
const UNSHARED: u64 = 200;

impl Image {
    /// Opens and locks the image at `path`.
    ///
    /// *On success:* no other process that respects the locks can open the image for writing.
    pub fn open(path: &Path, mode: OpenMode) -> Result<Self, ImageError> {
        Self::open_within(path, mode, RELEASE)
    }

    /// Inspects the image at `path` without locking it. The image's content may change at any time.
    pub fn inspect(path: &Path) -> Result<Self, ImageError> {
        Self::unlocked(path, OpenMode { readonly: true, direct: false })
    }

    /// Opens an image like [`Image::open`], and waits up to `patience` for a process that is releasing it.
    fn open_within(path: &Path, mode: OpenMode, patience: Duration) -> Result<Self, ImageError> {
        let image = Self::unlocked(path, mode)?;
        let deadline = Instant::now() + patience;
        loop {
            match image.lock() {
                Ok(()) => return Ok(image),
                Err(ImageError::InUse { .. }) if Instant::now() < deadline => thread::sleep(AGAIN),
                Err(e) => return Err(e),
            }
        }
    }

    fn unlocked(path: &Path, mode: OpenMode) -> Result<Self, ImageError> {
        let failed = |doing| {
            let path = path.to_owned();
            move |source: io::Error| ImageError::Io { path, doing, source }
        };
        let access = if mode.readonly { OFlags::RDONLY } else { OFlags::RDWR } | OFlags::CLOEXEC;
        let open = |flags| rustix::fs::open(path, access | flags, Mode::empty()).map(File::from);
        let (file, direct) = match mode.direct.then(|| open(OFlags::DIRECT)) {
            Some(Ok(file)) => (file, true),
            // `O_DIRECT` is not supported, for example by tmpfs, which is in memory anyway.
            Some(Err(rustix::io::Errno::INVAL)) | None => {
                (open(OFlags::empty()).map_err(|e| failed("opening it")(e.into()))?, false)
            }
            Some(Err(e)) => return Err(failed("opening it")(e.into())),
        };
        let metadata = file.metadata().map_err(failed("reading its metadata"))?;
        let kind = metadata.file_type();
        let (bytes, is_device) = match kind {
            kind if kind.is_file() => (metadata.len(), false),
            kind if kind.is_block_device() => (file::device_bytes(&file).map_err(failed("asking its length"))?, true),
            kind => {
                let what = if kind.is_dir() { "a directory" } else { "no file" };
                return Err(ImageError::Kind { path: path.to_owned(), what });
            }
        };
        if !bytes.is_multiple_of(crate::block::SECTOR) {
            return Err(ImageError::Odd { path: path.to_owned(), bytes });
        }
        let alignment = if direct { file::direct_alignment(&file).unwrap_or(4096) } else { 1 };
        let mode = OpenMode { direct, ..mode };
        let (file, durability) = (Arc::new(file), Arc::default());
        Ok(Self { path: path.to_owned(), file, bytes, mode, alignment, is_device, durability })
    }

    /// Returns the current length. Fails if the image is shorter than `before`.
    pub fn measure(&self, before: u64) -> Result<u64, ImageError> {
        let failed = |source| ImageError::Io { path: self.path.clone(), doing: "asking its length", source };
        let bytes = match self.is_device {
            true => file::device_bytes(&self.file).map_err(failed)?,
            false => self.file.metadata().map_err(failed)?.len(),
        };
        let bytes = bytes - bytes % crate::block::SECTOR;
        if bytes < before {
            return Err(ImageError::Shorter { path: self.path.clone(), bytes, before });
        }
        Ok(bytes)
    }

    fn lock(&self) -> Result<(), ImageError> {
        let failed = |source| ImageError::Io { path: self.path.clone(), doing: "locking it", source };
        let ours: &[u64] = if self.mode.readonly { &[READ] } else { &[READ, WRITE, RESIZE] };
        let kept = [WRITE, RESIZE];
        let bytes = ours.iter().map(|bit| PERMITTED + bit).chain(kept.iter().map(|bit| UNSHARED + bit));
        for byte in bytes {
            match file::lock_byte(&self.file, byte, Lock::Shared).map_err(failed)? {
                true => {}
                false => return Err(self.in_use("it does not share it")),
            }
        }
        // Another process denies a permission that we use, or uses one that we deny.
        let against = ours.iter().map(|bit| (UNSHARED + bit, "it does not share it"));
        let against = against.chain(kept.iter().map(|bit| (PERMITTED + bit, "it writes it")));
        for (byte, what) in against {
            if file::is_locked(&self.file, byte).map_err(failed)? {
                return Err(self.in_use(what));
            }
        }
        Ok(())
    }

    fn in_use(&self, what: &'static str) -> ImageError {
        ImageError::InUse { path: self.path.clone(), what }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::fs;

    const WRITABLE: OpenMode = OpenMode { readonly: false, direct: true };
    const READONLY: OpenMode = OpenMode { readonly: true, direct: true };

    fn image(bytes: u64) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.raw");
        File::create(&path).unwrap().set_len(bytes).unwrap();
        (directory, path)
    }

    #[test]
    fn one_process_writes_it_or_several_read_it() {
        let (_directory, path) = image(1 << 20);
        let open = |mode| Image::open_within(&path, mode, Duration::ZERO);
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
    fn what_is_no_disk_image_is_an_error() {
        let (directory, path) = image(1000);
        assert!(matches!(Image::open(&path, WRITABLE), Err(ImageError::Odd { bytes: 1000, .. })));
        let missing = Image::open(&directory.path().join("none"), WRITABLE).unwrap_err();
        assert!(missing.to_string().contains("none: opening it"), "{missing}");
        assert!(matches!(Image::open(directory.path(), READONLY), Err(ImageError::Kind { what: "a directory", .. })));
        assert!(matches!(Image::open(Path::new("/dev/null"), READONLY), Err(ImageError::Kind { .. })));
    }

    #[test]
    fn it_may_grow_but_not_shrink() {
        let (_directory, path) = image(8192);
        let image = Image::open(&path, WRITABLE).unwrap();
        let grow = |bytes| fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        grow(16384);
        assert_eq!(image.measure(8192).unwrap(), 16384);
        grow(4096);
        assert!(matches!(image.measure(8192), Err(ImageError::Shorter { bytes: 4096, before: 8192, .. })));
    }
}
