//! Copies epochs into the image.
//!
//! An *epoch* is what a guest wrote between two checkpoints. It is kept in the redo log, apart from the image, until
//! its checkpoint is committed.
//!
//! There is one merge at a time: a merge needs the [`MergeTarget`], which exists once for an open image and cannot be
//! cloned.

use super::directory::LogDirectory;
use super::error::RedoError;
use super::files::{LogFiles, Synced};
use super::format::{EntryHeader, EntryKind, MAX_DATA_BYTES, PAGE_BYTES, checksum, read_header, segment_name};
use super::log::{Batch, LogEntry, MergePiece};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_kernel::uring::Buffer;
use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, PoisonError};

/// Most bytes to zero in one step.
const MAX_ZERO_BYTES: u64 = 64 << 20;
/// Entries to keep in memory, because pieces of them follow.
const MAX_CACHED_ENTRIES: usize = 8;

/// The image to merge into.
#[derive(Debug)]
pub struct MergeTarget<F> {
    image: Synced<F>,
}

impl<F: DurableFile> MergeTarget<F> {
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
    let (upto, pieces) = (batch.upto, batch.newest_pieces());
    let mut verified = target.image.check().and_then(|()| verify(batch, &pieces, &mut pace));
    // Recorded before the first write, which makes the older epochs unavailable.
    log_dir.with_directory(&mut |log_dir| {
        let failed = RedoError::io(log_dir.files().path(), "merging it into the image");
        std::mem::replace(&mut verified, Ok(())).map_err(failed)?;
        log_dir.record(|state| state.floor = state.floor.max(upto))
    })?;
    let mut copied = copy(batch, &pieces, target.image.file(), pace).and_then(|()| target.image.sync());
    log_dir.with_directory(&mut |log_dir| {
        let failed = RedoError::io(log_dir.files().path(), "merging it into the image");
        std::mem::replace(&mut copied, Ok(())).map_err(failed)?;
        log_dir.record(|state| state.merged = state.merged.max(upto))
    })
}

/// Checks the entries that [`copy`] reads.
fn verify<F: DurableFile>(
    batch: &Batch<F>,
    pieces: &[MergePiece],
    mut pace: impl FnMut() -> io::Result<()>,
) -> io::Result<()> {
    let mut reader = EntryReader::new(batch);
    for piece in pieces {
        reader.get(&piece.entry)?;
        pace()?;
    }
    Ok(())
}

/// Writes the pieces to the image.
fn copy<F: DurableFile>(
    batch: &Batch<F>,
    pieces: &[MergePiece],
    image: &F,
    mut pace: impl FnMut() -> io::Result<()>,
) -> io::Result<()> {
    let mut reader = EntryReader::new(batch);
    for &MergePiece { start, bytes, entry } in pieces {
        let entry_bytes = reader.get(&entry)?;
        let max_step = if entry.kind == EntryKind::Data { MAX_DATA_BYTES } else { MAX_ZERO_BYTES };
        let mut copied = 0;
        while copied < bytes {
            let (disk_offset, len) = (start + copied, max_step.min(bytes - copied));
            match entry.kind {
                EntryKind::Data => {
                    let data_start = (PAGE_BYTES + disk_offset - entry.disk_offset) as usize;
                    let data = entry_bytes.get(data_start..data_start + len as usize);
                    write(image, data.ok_or(io::ErrorKind::InvalidData)?, disk_offset)?;
                }
                EntryKind::Zeroes => zero(image, disk_offset, len, false)?,
                EntryKind::Hole => zero(image, disk_offset, len, true)?,
            }
            copied += len;
            pace()?;
        }
    }
    Ok(())
}

/// A reader of entries that checks their checksums.
struct EntryReader<'a, F> {
    batch: &'a Batch<F>,
    /// The entries that were read last, the newest first.
    cached: VecDeque<CachedEntry>,
}

struct CachedEntry {
    sequence: u64,
    bytes: Buffer,
}

impl<'a, F: DurableFile> EntryReader<'a, F> {
    fn new(batch: &'a Batch<F>) -> Self {
        Self { batch, cached: VecDeque::new() }
    }

    /// Returns the header and data of an entry as in the segment.
    fn get(&mut self, entry: &LogEntry) -> io::Result<&[u8]> {
        let position = match self.cached.iter().position(|cached| cached.sequence == entry.sequence) {
            Some(position) => position,
            None => {
                self.cached.truncate(MAX_CACHED_ENTRIES - 1);
                self.cached.push_front(CachedEntry { sequence: entry.sequence, bytes: self.read_entry(entry)? });
                0
            }
        };
        Ok(self.cached.get(position).map_or(&[], |cached| &cached.bytes))
    }

    fn read_entry(&self, entry: &LogEntry) -> io::Result<Buffer> {
        let segment = self.batch.segments.get(&entry.epoch).ok_or(io::ErrorKind::NotFound)?;
        let data_bytes = if entry.kind == EntryKind::Data { entry.bytes } else { 0 };
        let mut bytes = Buffer::new(entry.length() as usize);
        let read = segment.file.read_at(&mut bytes, entry.offset)?;
        // The padding of a segment's last entry may be missing.
        if (read as u64) < PAGE_BYTES + data_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (header, data_and_padding) = bytes.split_at(PAGE_BYTES as usize);
        let header = read_header(header, segment.nonce, entry.offset);
        let data = data_and_padding.get(..data_bytes as usize);
        let is_sound = header.is_some_and(|header| {
            is_header_of(&header, entry)
                && (entry.kind != EntryKind::Data || data.is_some_and(|data| checksum(data) == header.data_checksum))
        });
        if is_sound {
            return Ok(bytes);
        }
        let why = format!(
            "{}: the entry at byte {} does not have its checksum, so it is not what the guest has written to the {} \
             bytes of its disk from byte {} on; nothing of it was written to the image, and the segment is kept. Check \
             the device under the redo log; restore the VM from a checkpoint if the entry stays damaged",
            segment_name(entry.epoch),
            entry.offset,
            entry.bytes,
            entry.disk_offset
        );
        Err(io::Error::new(io::ErrorKind::InvalidData, why))
    }
}

/// Returns whether a header describes this entry.
fn is_header_of(header: &EntryHeader, entry: &LogEntry) -> bool {
    header.sequence == entry.sequence
        && header.disk_offset == entry.disk_offset
        && header.bytes == entry.bytes
        && header.kind == entry.kind
}

/// Writes bytes, which may be unaligned, from aligned memory.
fn write(image: &impl DurableFile, bytes: &[u8], offset: u64) -> io::Result<()> {
    // An entry's data is aligned, but a piece of the data may not be.
    if (bytes.as_ptr() as u64).is_multiple_of(PAGE_BYTES) {
        return image.write_at(bytes, offset);
    }
    let mut aligned = Buffer::new(bytes.len());
    // The buffer is rounded up to whole pages.
    let Some(copy) = aligned.get_mut(..bytes.len()) else { return Err(io::ErrorKind::InvalidData.into()) };
    copy.copy_from_slice(bytes);
    image.write_at(copy, offset)
}

/// Zeroes a range of the image. `hole`: its space may be released.
fn zero(image: &impl DurableFile, offset: u64, len: u64, hole: bool) -> io::Result<()> {
    match image.zero(offset, len, hole) {
        // The file system or device cannot zero a range: write zeros.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS | libc::EINVAL)) => {}
        result => return result,
    }
    let zeros = Buffer::new(len.min(MAX_DATA_BYTES) as usize);
    let mut written = 0;
    while written < len {
        let step = MAX_DATA_BYTES.min(len - written);
        image.write_at(zeros.get(..step as usize).unwrap_or_default(), offset + written)?;
        written += step;
    }
    Ok(())
}
