//! Merging epochs into the image.
//!
//! One merge at a time: a merge needs the [`Target`], of which there is one for an open image, and which cannot be cloned.

use super::error::RedoError;
use super::files::{Files, LogFile, Synced};
use super::format::{MOST_DATA, PAGE, What, read_header, sum};
use super::log::{Batch, Placed};
use super::state::{Home, name_of};
use rekindle_kernel::uring::Buffer;
use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, PoisonError};

/// Bytes that are made zeroes in one step.
const ZEROED: u64 = 64 << 20;
/// Entries of data that are kept for their next piece.
const CACHED: usize = 8;

/// The image, to be merged into.
#[derive(Debug)]
pub struct Target<F> {
    image: Synced<F>,
}

impl<F: LogFile> Target<F> {
    /// The only one for an open image.
    #[must_use]
    pub fn new(image: Synced<F>) -> Self {
        Self { image }
    }
}

/// The directory of a log, which others use while it is merged.
pub trait SharedHome<D: Files> {
    /// Calls `change` with exclusive access.
    ///
    /// # Errors
    /// What `change` gives; [`RedoError::Closed`] where there is no log any more.
    fn with_home(&self, change: &mut dyn FnMut(&mut Home<D>) -> Result<(), RedoError>) -> Result<(), RedoError>;
}

impl<D: Files> SharedHome<D> for Mutex<Option<Home<D>>> {
    fn with_home(&self, change: &mut dyn FnMut(&mut Home<D>) -> Result<(), RedoError>) -> Result<(), RedoError> {
        self.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map_or(Err(RedoError::Closed), change)
    }
}

/// Merge a batch into the image.
///
/// *Needs:* that its epochs are committed and sealed; that nobody else writes the image.
/// *On success:* the image holds the disk of its last epoch, durably, and the state says so; the segments are to be removed.
/// *On failure:* the log is as it was; the image is between two epochs, and the state does not let anybody use it as an older one.
///
/// `pace` is called after each step; its error ends the merge.
///
/// # Errors
/// [`RedoError::Io`]: of the image, the log, or `pace`; an entry that does not have its checksum, of which nothing is written;
/// [`RedoError::Closed`].
pub fn merge<D: Files>(
    home: &impl SharedHome<D>,
    batch: &Batch<D::File>,
    target: &mut Target<D::File>,
    pace: impl FnMut() -> io::Result<()>,
) -> Result<(), RedoError> {
    let upto = batch.upto;
    let mut started = target.image.check();
    // Before the first byte: from here on no older epoch is to be had.
    home.with_home(&mut |home| {
        let failed = RedoError::io(home.files().path(), "merging it into the image");
        std::mem::replace(&mut started, Ok(())).map_err(failed)?;
        home.record(|state| state.floor = state.floor.max(upto))
    })?;
    let mut merged = copy(batch, &target.image, pace).and_then(|()| target.image.sync());
    home.with_home(&mut |home| {
        let failed = RedoError::io(home.files().path(), "merging it into the image");
        std::mem::replace(&mut merged, Ok(())).map_err(failed)?;
        home.record(|state| state.merged = state.merged.max(upto))
    })
}

fn copy<F: LogFile>(batch: &Batch<F>, image: &Synced<F>, mut pace: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let image = image.file();
    let mut entries = Entries { batch, read: VecDeque::new() };
    for (at, bytes, placed) in batch.resolve() {
        let data = entries.get(&placed)?;
        let hole = placed.what == What::Hole;
        let mut done = 0;
        while done < bytes {
            let len = if placed.what == What::Data { MOST_DATA } else { ZEROED }.min(bytes - done);
            if placed.what == What::Data {
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

/// Reads entries, and gives only what has its checksum.
struct Entries<'a, F> {
    batch: &'a Batch<F>,
    read: VecDeque<(u64, Buffer)>,
}

impl<F: LogFile> Entries<'_, F> {
    /// An entry as it is in its segment: header, data.
    fn get(&mut self, placed: &Placed) -> io::Result<&[u8]> {
        let position = match self.read.iter().position(|(sequence, _)| *sequence == placed.sequence) {
            Some(position) => position,
            None => {
                self.read.truncate(CACHED - 1);
                self.read.push_front((placed.sequence, self.read_entry(placed)?));
                0
            }
        };
        Ok(self.read.get(position).map_or(&[], |(_, entry)| entry))
    }

    fn read_entry(&self, placed: &Placed) -> io::Result<Buffer> {
        let (file, nonce) = self.batch.segments.get(&placed.epoch).ok_or(io::ErrorKind::NotFound)?;
        let data = if placed.what == What::Data { placed.bytes } else { 0 };
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
                && (placed.what != What::Data || rest.get(..data as usize).is_some_and(|data| sum(data) == header.data))
        });
        if is_sound {
            return Ok(entry);
        }
        let why = format!(
            "{}: the entry at byte {} does not have its checksum, so it is not what the guest has written to the {} \
             bytes of its disk from byte {} on; nothing of it was written to the image, and the segment is kept. Check \
             the device under the redo log; restore the VM from a checkpoint if the entry stays damaged",
            name_of(placed.epoch),
            placed.offset,
            placed.bytes,
            placed.at
        );
        Err(io::Error::new(io::ErrorKind::InvalidData, why))
    }
}

/// Writes bytes from memory that any file can be written from.
fn write(image: &impl LogFile, bytes: &[u8], at: u64) -> io::Result<()> {
    // An entry's data is aligned, and a piece of it may not be.
    if (bytes.as_ptr() as u64).is_multiple_of(PAGE) {
        return image.write_at(bytes, at);
    }
    let mut aligned = Buffer::new(bytes.len());
    // It is as long as whole pages.
    let Some(piece) = aligned.get_mut(..bytes.len()) else { return Err(io::ErrorKind::InvalidData.into()) };
    piece.copy_from_slice(bytes);
    image.write_at(piece, at)
}

fn zero(image: &impl LogFile, at: u64, len: u64, hole: bool) -> io::Result<()> {
    match image.zero(at, len, hole) {
        // A file system, or a device, that cannot is given them.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS | libc::EINVAL)) => {}
        done => return done,
    }
    let zeroes = Buffer::new(len.min(MOST_DATA) as usize);
    let mut done = 0;
    while done < len {
        let now = MOST_DATA.min(len - done);
        image.write_at(zeroes.get(..now as usize).unwrap_or_default(), at + done)?;
        done += now;
    }
    Ok(())
}
