//! Copies epochs into the image.
//!
//! There is one merge at a time: a merge needs the [`MergeTarget`], which exists once for an open image and cannot be
//! cloned.

use super::error::RedoError;
use super::files::{LogFile, LogFiles, Synced};
use super::format::{EntryKind, MAX_DATA, PAGE, checksum, read_header};
use super::log::{Batch, LogEntry};
use super::state::{LogDirectory, segment_name};
use rekindle_kernel::uring::Buffer;
use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, PoisonError};

/// Bytes to zero in one step.
const ZERO_STEP: u64 = 64 << 20;
/// Entries to keep in memory, because pieces of them follow.
const CACHED_ENTRIES: usize = 8;

/// The image to merge into.
#[derive(Debug)]
pub struct MergeTarget<F> {
    image: Synced<F>,
}

impl<F: LogFile> MergeTarget<F> {
    /// Wraps the image. The caller creates only one target for an open image.
    #[must_use]
    pub fn new(image: Synced<F>) -> Self {
        Self { image }
    }
}

/// A log's directory that other threads use during a merge.
pub trait SharedDirectory<D: LogFiles> {
    /// Calls `change` with exclusive access.
    ///
    /// # Errors
    /// The error of `change`; [`RedoError::Closed`] if the log has ended.
    fn with_directory(
        &self,
        change: &mut dyn FnMut(&mut LogDirectory<D>) -> Result<(), RedoError>,
    ) -> Result<(), RedoError>;
}

impl<D: LogFiles> SharedDirectory<D> for Mutex<Option<LogDirectory<D>>> {
    fn with_directory(
        &self,
        change: &mut dyn FnMut(&mut LogDirectory<D>) -> Result<(), RedoError>,
    ) -> Result<(), RedoError> {
        self.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map_or(Err(RedoError::Closed), change)
    }
}

/// Merges a batch into the image.
///
/// *Needs:* committed and sealed epochs; no other writer of the image.
/// *On success:* the image is the disk of the last epoch, durably, and the state records that; the segments can be
/// removed.
/// *On failure:* the log is unchanged. If an entry is damaged, image and state are unchanged, too, and older epochs
/// stay available. After another failure the image may be between two epochs, and the state prevents its use as an
/// older epoch.
///
/// Reads each entry twice: once before the first write, to find damage while the image is still that of the older
/// epochs.
///
/// Calls `pace` after each step. An error of `pace` ends the merge.
///
/// # Errors
/// [`RedoError::Io`] for an error of the image, the log or `pace`, and for an entry with a wrong checksum, which is
/// not written; [`RedoError::Closed`] if the log has ended.
pub fn merge<D: LogFiles>(
    log_dir: &impl SharedDirectory<D>,
    batch: &Batch<D::File>,
    target: &mut MergeTarget<D::File>,
    mut pace: impl FnMut() -> io::Result<()>,
) -> Result<(), RedoError> {
    let (upto, pieces) = (batch.upto, batch.resolve());
    let mut started = target.image.check().and_then(|()| verify(batch, &pieces, &mut pace));
    // Recorded before the first write, which makes the older epochs unavailable.
    log_dir.with_directory(&mut |log_dir| {
        let failed = RedoError::io(log_dir.files().path(), "merging it into the image");
        std::mem::replace(&mut started, Ok(())).map_err(failed)?;
        log_dir.record(|state| state.floor = state.floor.max(upto))
    })?;
    let mut merged = copy(batch, &pieces, &target.image, pace).and_then(|()| target.image.sync());
    log_dir.with_directory(&mut |log_dir| {
        let failed = RedoError::io(log_dir.files().path(), "merging it into the image");
        std::mem::replace(&mut merged, Ok(())).map_err(failed)?;
        log_dir.record(|state| state.merged = state.merged.max(upto))
    })
}

/// A range of the disk: its first byte, its length in bytes, and the entry that has its newest content.
type Piece = (u64, u64, LogEntry);

/// Checks the entries that [`copy`] reads.
fn verify<F: LogFile>(batch: &Batch<F>, pieces: &[Piece], mut pace: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let mut entries = EntryReader { batch, read: VecDeque::new() };
    for (.., placed) in pieces {
        entries.get(placed)?;
        pace()?;
    }
    Ok(())
}

fn copy<F: LogFile>(
    batch: &Batch<F>,
    pieces: &[Piece],
    image: &Synced<F>,
    mut pace: impl FnMut() -> io::Result<()>,
) -> io::Result<()> {
    let image = image.file();
    let mut entries = EntryReader { batch, read: VecDeque::new() };
    for &(at, bytes, placed) in pieces {
        let data = entries.get(&placed)?;
        let hole = placed.what == EntryKind::Hole;
        let mut done = 0;
        while done < bytes {
            let len = if placed.what == EntryKind::Data { MAX_DATA } else { ZERO_STEP }.min(bytes - done);
            if placed.what == EntryKind::Data {
                let from = (at + done - placed.at) as usize;
                let piece = data.get(PAGE as usize + from..).and_then(|data| data.get(..len as usize));
                let piece = piece.ok_or(io::ErrorKind::InvalidData)?;
                write(image, piece, at + done)?;
            } else {
                zero(image, at + done, len, hole)?;
            }
            done += len;
            pace()?;
        }
    }
    Ok(())
}

/// A reader of entries that checks their checksums.
struct EntryReader<'a, F> {
    batch: &'a Batch<F>,
    read: VecDeque<(u64, Buffer)>,
}

impl<F: LogFile> EntryReader<'_, F> {
    /// Returns the header and data of an entry as in the segment.
    fn get(&mut self, placed: &LogEntry) -> io::Result<&[u8]> {
        let position = match self.read.iter().position(|(sequence, _)| *sequence == placed.sequence) {
            Some(position) => position,
            None => {
                self.read.truncate(CACHED_ENTRIES - 1);
                self.read.push_front((placed.sequence, self.read_entry(placed)?));
                0
            }
        };
        Ok(self.read.get(position).map_or(&[], |(_, entry)| entry))
    }

    fn read_entry(&self, placed: &LogEntry) -> io::Result<Buffer> {
        let (file, nonce) = self.batch.segments.get(&placed.epoch).ok_or(io::ErrorKind::NotFound)?;
        let data = if placed.what == EntryKind::Data { placed.bytes } else { 0 };
        let mut entry = Buffer::new(placed.length() as usize);
        let read = file.read_at(&mut entry, placed.offset)?;
        // The padding of a segment's last entry may be missing.
        if (read as u64) < PAGE + data {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (header, rest) = entry.split_at(PAGE as usize);
        let is_sound = read_header(header, *nonce, placed.offset).is_some_and(|header| {
            (header.sequence, header.at, header.bytes, header.what)
                == (placed.sequence, placed.at, placed.bytes, placed.what)
                && (placed.what != EntryKind::Data
                    || rest.get(..data as usize).is_some_and(|data| checksum(data) == header.data))
        });
        if is_sound {
            return Ok(entry);
        }
        let why = format!(
            "{}: the entry at byte {} does not have its checksum, so it is not what the guest has written to the {} \
             bytes of its disk from byte {} on; nothing of it was written to the image, and the segment is kept. Check \
             the device under the redo log; restore the VM from a checkpoint if the entry stays damaged",
            segment_name(placed.epoch),
            placed.offset,
            placed.bytes,
            placed.at
        );
        Err(io::Error::new(io::ErrorKind::InvalidData, why))
    }
}

/// Writes bytes, which may be unaligned, from aligned memory.
fn write(image: &impl LogFile, bytes: &[u8], at: u64) -> io::Result<()> {
    // An entry's data is aligned, but a piece of the data may not be.
    if (bytes.as_ptr() as u64).is_multiple_of(PAGE) {
        return image.write_at(bytes, at);
    }
    let mut aligned = Buffer::new(bytes.len());
    // The buffer is rounded up to whole pages.
    let Some(piece) = aligned.get_mut(..bytes.len()) else { return Err(io::ErrorKind::InvalidData.into()) };
    piece.copy_from_slice(bytes);
    image.write_at(piece, at)
}

fn zero(image: &impl LogFile, at: u64, len: u64, hole: bool) -> io::Result<()> {
    match image.zero(at, len, hole) {
        // The file system or device cannot zero a range: write zeros.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS | libc::EINVAL)) => {}
        done => return done,
    }
    let zeroes = Buffer::new(len.min(MAX_DATA) as usize);
    let mut done = 0;
    while done < len {
        let now = MAX_DATA.min(len - done);
        image.write_at(zeroes.get(..now as usize).unwrap_or_default(), at + done)?;
        done += now;
    }
    Ok(())
}
