//! Which frames of a former guest's memory a server needs: a bit a frame, where the servers of the VM's other disks see it.
//!
//! All disks of a VM have their blocks in one memory, and each server knows only of its own. So each says which frames it needs, in a file
//! that it has locked as long as it needs any, and a frame goes back to the host when no server needs it. A bit is set when the claim is
//! made, cleared when the frame is not needed any more, and never set again.
//!
//! ```text
//! 0      magic
//! 8      which memory
//! 16     how many frames, u64
//! 4096   a bit a frame, in words of 64
//! ```

use crate::map::Frame;
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
const HEAD: u64 = 4096;

/// See [the module](self).
#[derive(Debug)]
pub(super) struct Claim {
    /// The file, locked by who made it; none: nobody else looks.
    file: Option<File>,
    bits: MmapRegion,
    words: usize,
}

fn words(frames: u64) -> usize {
    frames.div_ceil(64) as usize
}

fn bytes(frames: u64) -> usize {
    HEAD as usize + words(frames) * 8
}

impl Claim {
    /// Of nothing yet, for `frames` frames, that nobody else sees.
    ///
    /// # Errors
    /// The system's.
    pub fn alone(frames: Frame) -> io::Result<Self> {
        let bits = MmapRegion::new(bytes(frames.into())).map_err(io::Error::other)?;
        Ok(Self { file: None, bits, words: words(frames.into()) })
    }

    /// The same in a new file at `path`, about memory `identity`.
    ///
    /// *On success:* whoever opens it sees that somebody has it.
    ///
    /// # Errors
    /// The system's; also where there is no room for it.
    pub fn at(path: &Path, identity: u64, frames: Frame) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let long = bytes(frames.into());
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        if !file::lock_byte(&file, 0, Lock::Exclusive)? {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        // Room that is missing is told here, not by a signal later.
        fallocate(&file, FallocateFlags::empty(), 0, long as u64)?;
        file.write_all_at(&identity.to_le_bytes(), 8)?;
        file.write_all_at(&u64::from(frames).to_le_bytes(), 16)?;
        file.write_all_at(&MAGIC, 0)?;
        let bits = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), long).map_err(io::Error::other)?;
        Ok(Self { file: Some(file), bits, words: words(frames.into()) })
    }

    /// That of another server. `None`: it needs nothing of memory `identity`, or not any more.
    ///
    /// # Errors
    /// The system's; it is no such file.
    pub fn of_another(path: &Path, identity: u64) -> io::Result<Option<Self>> {
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let odd = || io::Error::new(io::ErrorKind::InvalidData, "it does not say which frames a server needs");
        let mut head = [0; 24];
        file.read_exact_at(&mut head, 0)?;
        let (magic, rest) = head.split_first_chunk::<8>().ok_or_else(odd)?;
        let (about, rest) = rest.split_first_chunk::<8>().ok_or_else(odd)?;
        let frames = rest.first_chunk::<8>().map(|frames| u64::from_le_bytes(*frames)).ok_or_else(odd)?;
        let fits = Frame::try_from(frames).is_ok_and(|frames| bytes(frames.into()) as u64 <= file_bytes(&file));
        if *magic != MAGIC || !fits {
            return Err(odd());
        }
        if u64::from_le_bytes(*about) != identity || !file::is_locked(&file, 0)? {
            return Ok(None);
        }
        let bits = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), bytes(frames));
        Ok(Some(Self { file: Some(file), bits: bits.map_err(io::Error::other)?, words: words(frames) }))
    }

    /// Whether others see it.
    pub fn is_shared(&self) -> bool {
        self.file.is_some()
    }

    /// Whether the server that made it still needs anything. Not for one's own.
    pub fn is_held(&self) -> bool {
        // Where that cannot be told its frames stay, which costs memory and nothing else.
        self.file.as_ref().is_some_and(|file| file::is_locked(file, 0).unwrap_or(true))
    }

    /// Frames 64 * `word` and up, lowest bit first.
    pub fn word(&self, word: usize) -> u64 {
        self.at_word(word, |bits| bits.load(Ordering::SeqCst))
    }

    #[cfg(test)]
    pub fn needs(&self, frame: Frame) -> bool {
        self.word(frame as usize / 64) & bit(frame) != 0
    }

    pub fn need(&self, frame: Frame) {
        self.at_word(frame as usize / 64, |bits| bits.fetch_or(bit(frame), Ordering::SeqCst));
    }

    /// Of two servers that let go of a frame at the same time, at least one sees afterwards that the other has.
    pub fn let_go(&self, frame: Frame) {
        self.at_word(frame as usize / 64, |bits| bits.fetch_and(!bit(frame), Ordering::SeqCst));
    }

    pub fn let_go_of_all(&self) {
        for word in 0..self.words {
            self.at_word(word, |bits| bits.swap(0, Ordering::SeqCst));
        }
    }

    /// How many frames it needs.
    pub fn count(&self) -> usize {
        (0..self.words).map(|word| self.word(word).count_ones() as usize).sum()
    }

    /// What is behind its end is not needed.
    fn at_word(&self, word: usize, then: impl FnOnce(&AtomicU64) -> u64) -> u64 {
        if word >= self.words {
            return 0;
        }
        let bits = self.bits.as_volatile_slice();
        bits.get_atomic_ref::<AtomicU64>(HEAD as usize + word * 8).map_or(0, then)
    }
}

fn bit(frame: Frame) -> u64 {
    1 << (frame % 64)
}

fn file_bytes(file: &File) -> u64 {
    file.metadata().map_or(0, |metadata| metadata.len())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn what_one_needs_the_other_sees_until_it_has_gone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk-a.frames");
        assert!(Claim::of_another(&path, 7).unwrap().is_none(), "there is none");
        let own = Claim::at(&path, 7, 200).unwrap();
        [0, 63, 64, 199].into_iter().for_each(|frame| own.need(frame));
        assert!(Claim::of_another(&path, 8).unwrap().is_none(), "of another memory");
        let seen = Claim::of_another(&path, 7).unwrap().unwrap();
        assert_eq!((seen.count(), seen.needs(64), seen.needs(65), seen.needs(100_000)), (4, true, false, false));
        own.let_go(64);
        assert!(!seen.needs(64) && seen.is_held());
        own.let_go_of_all();
        assert_eq!(seen.count(), 0);
        // Made anew: what was seen before is nobody's.
        let again = Claim::at(&path, 7, 200).unwrap();
        drop(own);
        assert!(!seen.is_held());
        assert!(Claim::of_another(&path, 7).unwrap().is_some());
        drop(again);
        assert!(Claim::of_another(&path, 7).unwrap().is_none(), "it has let go");
    }

    #[test]
    fn what_is_no_claim_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("odd");
        fs::write(&path, [0; 8192]).unwrap();
        assert_eq!(Claim::of_another(&path, 7).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // Shorter than it says.
        fs::write(&path, [&MAGIC[..], &7u64.to_le_bytes(), &(1u64 << 20).to_le_bytes()].concat()).unwrap();
        assert_eq!(Claim::of_another(&path, 7).unwrap_err().kind(), io::ErrorKind::InvalidData);
        fs::write(&path, &MAGIC[..]).unwrap();
        assert!(Claim::of_another(&path, 7).is_err());
        let directory = path.join("none").join("disk-a.frames");
        assert!(Claim::at(&directory, 7, 10).is_err());
    }
}
