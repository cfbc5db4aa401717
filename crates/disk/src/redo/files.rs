//! The directory of a log, behind a trait like its files ([`DurableFile`]): a test can record, lose, tear or fail each
//! operation apart from the guest's requests.

use crate::image::Durability;
use rekindle_kernel::durable_file::{DurableFile, LocalFile};
use rekindle_kernel::file::{self, Lock};
#[cfg(test)]
use rekindle_kernel::uring::Buffer;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use std::fmt::Debug;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for I/O of a killed server to finish.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for a killed server to release the directory. A killed server has no I/O in progress on the
/// directory.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// The directory of a log.
pub trait LogFiles: Debug + Send + Sync + 'static {
    /// Offsets, lengths and memory are aligned for `O_DIRECT`.
    type File: DurableFile + Clone + 'static;
    /// Exclusive access to the directory, until the claim is dropped.
    type Claim: Debug + Send;
    fn path(&self) -> &Path;
    /// Creates the directory durably. An existing directory is no error.
    fn create_directory(&self) -> io::Result<()>;
    /// Locks the directory for this log; `None` if there is no directory.
    ///
    /// # Errors
    /// `ResourceBusy` if another log of this or another process has locked the directory.
    fn claim(&self) -> io::Result<Option<Self::Claim>>;
    /// Returns the file names; none if there is no directory.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Creates a file and locks it for this process.
    ///
    /// # Errors
    /// `AlreadyExists` if there is a file with this name.
    fn create(&self, name: &str) -> io::Result<Self::File>;
    /// Reads up to `max_bytes` bytes of a file, without locking it. `None`: it is not a regular file.
    ///
    /// # Errors
    /// `NotFound` if there is no such file.
    fn peek(&self, name: &str, max_bytes: u64) -> io::Result<Option<FileStart>>;
    /// Opens a file and locks it for this process, once no other process has I/O in progress on it. Does not follow
    /// symbolic links.
    ///
    /// # Errors
    /// `NotFound` if there is no such file, `ResourceBusy` if another process has locked it, `InvalidInput` if it is
    /// not a regular file.
    fn open(&self, name: &str) -> io::Result<Self::File>;
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Waits until created and removed names are durable.
    fn sync(&self) -> io::Result<()>;
    /// Removes the empty directory. A symbolic link to it stays.
    ///
    /// # Errors
    /// `DirectoryNotEmpty` if the directory has files.
    fn remove_directory(&self) -> io::Result<()>;
}

/// The beginning of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileStart {
    pub bytes: Vec<u8>,
    /// Length of the whole file.
    pub length: u64,
}

/// A file with several users. After one failed sync, every sync by any user fails.
#[derive(Debug, Clone)]
pub struct Synced<F> {
    file: F,
    durability: Arc<Durability>,
}

impl<F: DurableFile> Synced<F> {
    /// Wraps an open file. All users of the open file share `durability`.
    #[must_use]
    pub fn new(file: F, durability: Arc<Durability>) -> Self {
        Self { file, durability }
    }

    pub fn file(&self) -> &F {
        &self.file
    }

    /// Fails if a sync of the file has failed before.
    pub fn check(&self) -> io::Result<()> {
        if self.durability.is_broken() {
            let why = "a sync of the disk's image has failed before, so it is not known what of the image is durable. \
                       Check the device under the image, then start the disk's server again";
            return Err(io::Error::other(why));
        }
        Ok(())
    }

    /// Waits until content and length are durable.
    ///
    /// # Errors
    /// The error of the sync. Every later sync fails, too.
    pub fn sync(&self) -> io::Result<()> {
        let synced = self.file.sync();
        if synced.is_err() {
            self.durability.set_broken();
            return synced;
        }
        // The kernel may have reported the error for this data to another user's sync.
        self.check()
    }
}

/// A directory of this host.
#[derive(Debug, Clone)]
pub struct LocalFiles {
    path: PathBuf,
    direct: bool,
}

impl LocalFiles {
    /// Wraps the directory at `path`, which need not exist. `direct`: bypass the host's page cache if the file system
    /// supports it.
    #[must_use]
    pub fn new(path: &Path, direct: bool) -> Self {
        Self { path: path.to_owned(), direct }
    }

    /// Opens a file for reading, without locking it. `None`: it is not a regular file.
    ///
    /// # Errors
    /// `NotFound` if there is no such file.
    pub fn open_to_peek(&self, name: &str) -> io::Result<Option<File>> {
        let path = self.path.join(name);
        if !fs::symlink_metadata(&path)?.is_file() {
            return Ok(None);
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::from(rustix::fs::open(&path, flags, Mode::empty())?);
        Ok(file.metadata()?.is_file().then_some(file))
    }

    fn open_with(&self, name: &str, flags: OFlags) -> io::Result<LocalFile> {
        let path = self.path.join(name);
        match fs::symlink_metadata(&path) {
            Ok(metadata) if !metadata.is_file() && !flags.contains(OFlags::EXCL) => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is not a regular file")));
            }
            _ => {}
        }
        let flags = flags | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        // The log holds the guest's data, so only its owner may read it.
        let open = |flags| rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map(File::from);
        let file = match self.direct.then(|| open(flags | OFlags::DIRECT)) {
            None => open(flags)?,
            // Some file systems create the file before they reject O_DIRECT.
            Some(Err(rustix::io::Errno::INVAL)) => open(flags & !OFlags::EXCL)?,
            Some(opened) => opened?,
        };
        let deadline = Instant::now() + RELEASE_TIMEOUT;
        while !file::lock_byte(&file, 0, Lock::Exclusive)? {
            if Instant::now() > deadline {
                return Err(io::ErrorKind::ResourceBusy.into());
            }
            thread::sleep(RETRY_INTERVAL);
        }
        Ok(LocalFile(Arc::new(file)))
    }
}

/// The lock on a log's directory (`flock`).
#[derive(Debug)]
pub struct LocalClaim(pub(crate) File);

impl LogFiles for LocalFiles {
    type File = LocalFile;
    type Claim = LocalClaim;

    fn path(&self) -> &Path {
        &self.path
    }

    fn create_directory(&self) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        sync_parent(&self.path)
    }

    fn claim(&self) -> io::Result<Option<LocalClaim>> {
        let deadline = Instant::now() + CLAIM_TIMEOUT;
        loop {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory = match rustix::fs::open(&self.path, flags, Mode::empty()) {
                Err(rustix::io::Errno::NOENT) => return Ok(None),
                opened => File::from(opened?),
            };
            match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    thread::sleep(RETRY_INTERVAL);
                    continue;
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(io::ErrorKind::ResourceBusy.into()),
                Err(e) => return Err(e.into()),
            }
            // A previous log may have removed the directory before the lock was taken, and another log may have
            // created a new directory.
            let locked = directory.metadata()?;
            let is_locked = |current: fs::Metadata| (current.dev(), current.ino()) == (locked.dev(), locked.ino());
            if fs::metadata(&self.path).is_ok_and(is_locked) {
                return Ok(Some(LocalClaim(directory)));
            }
        }
    }

    fn peek(&self, name: &str, max_bytes: u64) -> io::Result<Option<FileStart>> {
        self.open_to_peek(name)?.map(|file| read_start(file, max_bytes)).transpose()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        match fs::read_dir(&self.path) {
            Ok(entries) => entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }

    fn create(&self, name: &str) -> io::Result<LocalFile> {
        self.open_with(name, OFlags::CREATE | OFlags::EXCL)
    }

    fn open(&self, name: &str) -> io::Result<LocalFile> {
        self.open_with(name, OFlags::empty())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    fn remove_directory(&self) -> io::Result<()> {
        if fs::symlink_metadata(&self.path)?.is_symlink() {
            return Ok(());
        }
        fs::remove_dir(&self.path)?;
        sync_parent(&self.path)
    }
}

/// Reads up to `max_bytes` bytes of a file, from its beginning.
pub(crate) fn read_start(file: File, max_bytes: u64) -> io::Result<FileStart> {
    let length = file.metadata()?.len();
    let mut bytes = Vec::new();
    file.take(max_bytes).read_to_end(&mut bytes)?;
    Ok(FileStart { bytes, length })
}

fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}

/// Reads `len` bytes at `offset`, neither of which need be aligned, into aligned memory.
///
/// # Errors
/// `UnexpectedEof` if the file ends earlier.
#[cfg(test)]
pub fn read_unaligned(file: &impl DurableFile, offset: u64, len: usize) -> io::Result<(Buffer, usize)> {
    let skip = (offset % super::format::PAGE_BYTES) as usize;
    let mut buffer = Buffer::new(skip + len);
    let read = file.read_at(&mut buffer, offset - skip as u64)?;
    if read < skip + len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((buffer, skip))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn files_are_created_once_read_at_any_offset_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let files = LocalFiles::new(&directory.path().join("disk.redo"), true);
        assert!(files.list().unwrap().is_empty());
        files.create_directory().unwrap();
        files.create_directory().unwrap();
        let file = files.create("1.log").unwrap();
        assert_eq!(files.create("1.log").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let mut buffer = Buffer::new(8192);
        (0..8192).for_each(|byte| buffer[byte] = (byte / 512) as u8);
        file.write_at(&buffer, 0).unwrap();
        file.sync().unwrap();
        let (read, skip) = read_unaligned(&file, 4096 + 512, 1024).unwrap();
        assert_eq!((read[skip], read[skip + 1023]), (9, 10));
        assert_eq!(read_unaligned(&file, 4096, 8192).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        drop(file);
        files.open("1.log").unwrap();
        let first = files.peek("1.log", 513).unwrap().unwrap();
        assert_eq!((first.bytes[511], first.bytes[512], first.bytes.len(), first.length), (0, 1, 513, 8192));
        assert_eq!(files.list().unwrap(), ["1.log"]);
        files.remove("1.log").unwrap();
        std::os::unix::fs::symlink("/dev/null", files.path().join("2.log")).unwrap();
        assert_eq!(files.open("2.log").unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(files.peek("2.log", 1).unwrap(), None);
        files.remove("2.log").unwrap();
        files.remove_directory().unwrap();
        assert!(!files.path().exists());
    }

    #[test]
    fn a_directory_has_one_owner_also_when_it_is_removed_and_created_again() {
        let directory = tempfile::tempdir().unwrap();
        let files = LocalFiles::new(&directory.path().join("disk.redo"), true);
        assert!(files.claim().unwrap().is_none());
        files.create_directory().unwrap();
        let claim = files.claim().unwrap().unwrap();
        assert_eq!(files.claim().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        files.remove_directory().unwrap();
        files.create_directory().unwrap();
        let second_claim = files.claim().unwrap().unwrap();
        drop(claim);
        assert_eq!(files.claim().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(second_claim);
        files.claim().unwrap().unwrap();
    }
}
