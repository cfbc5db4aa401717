//! The frames of a previous guest's memory that a server needs: a bitmap that the servers of the VM's other disks can
//! read.
//!
//! All disks of a VM have their blocks in the same memory, and each server knows only its own blocks. So each server
//! publishes the frames that it needs, in a file that it keeps locked. A frame is released to the host when no server
//! needs it. A bit is set when the claim is created, cleared when the frame is not needed any more, and never set
//! again.
//!
//! ```text
//! 0      magic
//! 8      identity of the memory
//! 16     number of frames, u64
//! 4096   one bit per frame, in words of 64
//! ```

use crate::block_map::Frame;
use rekindle_kernel::file::{self, Lock};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use vm_memory::mmap::MmapRegion;
use vm_memory::{FileOffset, VolatileMemory};

const MAGIC: [u8; 8] = *b"RKCLAIM1";
/// Bytes before the bits.
const HEADER_BYTES: usize = 4096;
/// Offsets in the header.
const IDENTITY_OFFSET: u64 = 8;
const FRAMES_OFFSET: u64 = 16;

/// The frames that one server needs.
#[derive(Debug)]
pub(super) struct FrameClaim {
    /// The file, locked by the server that created it; `None` if no other server reads it.
    file: Option<File>,
    bits: MmapRegion,
    words: usize,
}

/// Returns the words of the bitmap.
fn word_count(frames: u64) -> usize {
    frames.div_ceil(64) as usize
}

/// Returns the bytes of the file.
fn claim_bytes(frames: u64) -> usize {
    HEADER_BYTES + word_count(frames) * 8
}

impl FrameClaim {
    /// Creates an empty claim on `frames` frames that is invisible to other servers.
    pub fn private(frames: Frame) -> io::Result<Self> {
        let bits = MmapRegion::new(claim_bytes(frames.into())).map_err(io::Error::other)?;
        Ok(Self { file: None, bits, words: word_count(frames.into()) })
    }

    /// Creates an empty claim on the frames of memory `identity`, in a new file at `path`.
    ///
    /// *On success:* the file's lock shows that a server uses it.
    ///
    /// # Errors
    /// Errors of the file operations, also if there is no space for the file.
    pub fn create(path: &Path, identity: u64, frames: Frame) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let length = claim_bytes(frames.into());
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        if !file::lock_byte(&file, 0, Lock::Exclusive)? {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        // A full disk is an error of `fallocate`, not a signal at a later access.
        fallocate(&file, FallocateFlags::empty(), 0, length as u64)?;
        file.write_all_at(&identity.to_le_bytes(), IDENTITY_OFFSET)?;
        file.write_all_at(&u64::from(frames).to_le_bytes(), FRAMES_OFFSET)?;
        file.write_all_at(&MAGIC, 0)?;
        let bits = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), length).map_err(io::Error::other)?;
        Ok(Self { file: Some(file), bits, words: word_count(frames.into()) })
    }

    /// Opens the claim of another server. `None`: that server needs nothing of memory `identity`.
    ///
    /// # Errors
    /// Errors of the file operations; `InvalidData` if the file is not a claim.
    pub fn open_other(path: &Path, identity: u64) -> io::Result<Option<Self>> {
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let not_a_claim = || io::Error::new(io::ErrorKind::InvalidData, "not a list of the frames that a server needs");
        let mut header = [0; 24];
        file.read_exact_at(&mut header, 0)?;
        let [magic, claimed_identity, frames] = header.as_chunks::<8>().0 else { return Err(not_a_claim()) };
        let (claimed_identity, frames) = (u64::from_le_bytes(*claimed_identity), u64::from_le_bytes(*frames));
        let file_bytes = file.metadata()?.len();
        let is_complete = Frame::try_from(frames).is_ok_and(|frames| claim_bytes(frames.into()) as u64 <= file_bytes);
        if *magic != MAGIC || !is_complete {
            return Err(not_a_claim());
        }
        if claimed_identity != identity || !file::is_locked(&file, 0)? {
            return Ok(None);
        }
        let bits = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), claim_bytes(frames));
        Ok(Some(Self { file: Some(file), bits: bits.map_err(io::Error::other)?, words: word_count(frames) }))
    }

    /// Returns whether other servers can read the claim.
    pub fn is_shared(&self) -> bool {
        self.file.is_some()
    }

    /// Returns whether the server that created the claim still needs any frame. Not for a server's own claim.
    pub fn is_held(&self) -> bool {
        // If the lock cannot be checked, the frames stay allocated, which only costs memory.
        self.file.as_ref().is_some_and(|file| file::is_locked(file, 0).unwrap_or(true))
    }

    /// Returns the bits of frames 64 * `word` and up, lowest bit first.
    pub fn word(&self, word: usize) -> u64 {
        self.access_word(word, |bits| bits.load(Ordering::SeqCst))
    }

    #[cfg(test)]
    pub fn needs(&self, frame: Frame) -> bool {
        self.word(frame as usize / 64) & bit(frame) != 0
    }

    pub fn set_needed(&self, frame: Frame) {
        self.access_word(frame as usize / 64, |bits| bits.fetch_or(bit(frame), Ordering::SeqCst));
    }

    /// Releases a frame. If two servers release a frame at the same time, at least one sees afterwards that the other
    /// has released it.
    pub fn release(&self, frame: Frame) {
        self.access_word(frame as usize / 64, |bits| bits.fetch_and(!bit(frame), Ordering::SeqCst));
    }

    pub fn release_all(&self) {
        for word in 0..self.words {
            self.access_word(word, |bits| bits.swap(0, Ordering::SeqCst));
        }
    }

    /// Returns the number of needed frames.
    pub fn count(&self) -> usize {
        (0..self.words).map(|word| self.word(word).count_ones() as usize).sum()
    }

    /// Applies `access` to a word. Frames after the end of the claim are not needed.
    fn access_word(&self, word: usize, access: impl FnOnce(&AtomicU64) -> u64) -> u64 {
        if word >= self.words {
            return 0;
        }
        let bits = self.bits.as_volatile_slice();
        bits.get_atomic_ref::<AtomicU64>(HEADER_BYTES + word * 8).map_or(0, access)
    }
}

/// Returns the bit of a frame in its word.
fn bit(frame: Frame) -> u64 {
    1 << (frame % 64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn another_server_sees_a_claim_until_its_creator_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk-a.frames");
        assert!(FrameClaim::open_other(&path, 7).unwrap().is_none(), "no file");
        let own = FrameClaim::create(&path, 7, 200).unwrap();
        [0, 63, 64, 199].into_iter().for_each(|frame| own.set_needed(frame));
        assert!(FrameClaim::open_other(&path, 8).unwrap().is_none(), "of another memory");
        let seen = FrameClaim::open_other(&path, 7).unwrap().unwrap();
        assert_eq!((seen.count(), seen.needs(64), seen.needs(65), seen.needs(100_000)), (4, true, false, false));
        own.release(64);
        assert!(!seen.needs(64) && seen.is_held());
        own.release_all();
        assert_eq!(seen.count(), 0);
        // The file was created again: the claim opened before has no holder.
        let again = FrameClaim::create(&path, 7, 200).unwrap();
        drop(own);
        assert!(!seen.is_held());
        assert!(FrameClaim::open_other(&path, 7).unwrap().is_some());
        drop(again);
        assert!(FrameClaim::open_other(&path, 7).unwrap().is_none(), "it is released");
    }

    #[test]
    fn a_file_that_is_no_claim_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("odd");
        fs::write(&path, [0; 8192]).unwrap();
        assert_eq!(FrameClaim::open_other(&path, 7).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // The file is shorter than its header states.
        fs::write(&path, [&MAGIC[..], &7u64.to_le_bytes(), &(1u64 << 20).to_le_bytes()].concat()).unwrap();
        assert_eq!(FrameClaim::open_other(&path, 7).unwrap_err().kind(), io::ErrorKind::InvalidData);
        fs::write(&path, &MAGIC[..]).unwrap();
        assert!(FrameClaim::open_other(&path, 7).is_err());
        let directory = path.join("none").join("disk-a.frames");
        assert!(FrameClaim::create(&directory, 7, 10).is_err());
    }
}
