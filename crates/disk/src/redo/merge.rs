//! Merging epochs into the image.

use super::error::RedoError;
use super::files::{Files, LogFile, read_any};
use super::format::MOST_DATA;
use super::index::Source;
use super::log::Batch;
use super::state::Home;
use rekindle_kernel::uring::Buffer;
use std::io;
use std::sync::{Mutex, PoisonError};

/// Bytes that are made zeroes in one step.
const ZEROED: u64 = 64 << 20;

/// Merge a batch into the image.
///
/// *Needs:* that its epochs are committed and sealed; that nobody else writes the image.
/// *On success:* the image holds the disk of its last epoch, durably, and the state says so; the segments are to be removed.
/// *On failure:* the log is as it was; the image is between two epochs, and the state does not let anybody use it as an older one.
///
/// `pace` is called after each step.
///
/// # Errors
/// [`RedoError::Io`].
pub fn merge<D: Files>(
    home: &Mutex<Option<Home<D>>>,
    batch: &Batch<D::File>,
    image: &D::File,
    pace: impl FnMut(),
) -> Result<(), RedoError> {
    let with = |change: &mut dyn FnMut(&mut Home<D>) -> Result<(), RedoError>| {
        home.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map_or(Ok(()), change)
    };
    let upto = batch.upto;
    // Before the first byte: from here on no older epoch is to be had.
    with(&mut |home| home.record(|state| state.floor = state.floor.max(upto)))?;
    let merged = copy(batch, image, pace).and_then(|()| image.sync());
    with(&mut |home| {
        if let Err(e) = &merged {
            let e = io::Error::new(e.kind(), e.to_string());
            return Err(RedoError::io(home.files().path(), "merging it into the image")(e));
        }
        home.record(|state| state.merged = state.merged.max(upto))
    })
}

fn copy<F: LogFile>(batch: &Batch<F>, image: &F, mut pace: impl FnMut()) -> io::Result<()> {
    for (at, bytes, source) in batch.resolve() {
        let step = if matches!(source, Source::Zeroes { .. }) { ZEROED } else { MOST_DATA };
        let mut done = 0;
        while done < bytes {
            let len = step.min(bytes - done);
            match source.skip(done) {
                Source::Data { epoch, at: from } => {
                    let file = batch.files.get(&epoch).ok_or(io::ErrorKind::NotFound)?;
                    let (mut buffer, skip) = read_any(file, from, len as usize)?;
                    // To where memory is aligned.
                    buffer.copy_within(skip..skip + len as usize, 0);
                    image.write_at(buffer.get(..len as usize).unwrap_or_default(), at + done)?;
                }
                Source::Zeroes { hole, .. } => zero(image, at + done, len, hole)?,
            }
            done += len;
            pace();
        }
    }
    Ok(())
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
