//! Inspection and merging of the log of a disk that has no server.

use super::epoch_state::{EpochState, newest_slot};
use super::error::RedoError;
use super::files::{LocalFile, LocalFiles, Synced};
use super::merge::{MergeTarget, merge};
use super::recover::{self, DiskVersion, scan, sealed_content};
use super::state::{segment_epoch, segment_name};
use crate::image::{Image, ImageError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use uuid::Uuid;

/// Returns the default directory of an image's log. A block device has no default directory.
#[must_use]
pub fn default_directory(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".redo");
    PathBuf::from(path)
}

/// Summary of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSummary {
    pub disk: Uuid,
    /// The newest epoch that a checkpoint can refer to.
    pub sealed: u64,
    /// The oldest epoch that a checkpoint can refer to.
    pub floor: u64,
    /// Number of writes in the inspected epochs that are not in the image.
    pub writes: usize,
    /// File name of the image; `None` if an earlier version created the log.
    pub image: Option<String>,
}

/// Returns the file name by which a log identifies its image. Follows symbolic links, except for a block device.
#[must_use]
pub fn image_name(image: &Path) -> Option<String> {
    let is_device = fs::metadata(image).is_ok_and(|found| found.file_type().is_block_device());
    // The kernel's name of a device (dm-3) may change with the next boot.
    let path = if is_device { image.to_owned() } else { fs::canonicalize(image).unwrap_or_else(|_| image.to_owned()) };
    path.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// Summarizes the log in a directory, even while a server uses it. Returns `None` if there is no log. Reads and
/// checks only segments of epochs up to `upto`, as for the disk of that epoch: 0 for the state alone, `u64::MAX` for
/// the newest disk.
///
/// # Errors
/// [`RedoError`], also for a damaged log.
pub fn inspect(directory: &Path, upto: u64) -> Result<Option<LogSummary>, RedoError> {
    let mut seen = None;
    loop {
        let (count, left) = inspect_once(directory, upto)?;
        match left {
            // A server may have created a log or removed merged segments since the state was read.
            Err(RedoError::DamagedSegment { .. } | RedoError::DamagedState { .. }) if seen != Some(count) => {
                seen = Some(count)
            }
            left => return left,
        }
    }
}

/// Summarizes the log of an image like [`inspect`]. `renamed_from`: the previous file name of a renamed image.
///
/// # Errors
/// [`RedoError`], also if the log belongs to another image.
pub fn inspect_log(
    image: &Path,
    directory: &Path,
    upto: u64,
    renamed_from: Option<&str>,
) -> Result<Option<LogSummary>, RedoError> {
    let left = inspect(directory, upto)?;
    let found = left.as_ref().and_then(|left| left.image.as_deref());
    match (found, image_name(image)) {
        (Some(found), Some(image)) if found != image && renamed_from != Some(found) => {
            Err(RedoError::OtherImage { path: directory.to_owned(), found: found.into(), image })
        }
        _ => Ok(left),
    }
}

/// Inspects a directory once. Returns the count of the state that was read, and the summary.
#[allow(clippy::type_complexity, reason = "only `inspect` calls it")]
fn inspect_once(directory: &Path, upto: u64) -> Result<(u64, Result<Option<LogSummary>, RedoError>), RedoError> {
    let failed = |doing| RedoError::io(directory, doing);
    let slots = match fs::read(directory.join("state")) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        slots => slots.map_err(failed("reading its state"))?,
    };
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((0, Ok(None))),
        entries => entries.map_err(failed("reading the directory"))?,
    };
    let epochs: Vec<u64> =
        entries.flatten().filter_map(|entry| segment_epoch(&entry.file_name().to_string_lossy())).collect();
    let newest = newest_slot(&slots).map_err(|found| RedoError::NewerFormat { path: directory.to_owned(), found })?;
    let Some((count, state)) = newest else {
        let damaged = || RedoError::DamagedState { path: directory.to_owned() };
        return Ok((0, if epochs.is_empty() { Ok(None) } else { Err(damaged()) }));
    };
    let must_be_whole: BTreeSet<u64> = state.sealed_segments().filter(|epoch| *epoch <= upto).collect();
    let lost =
        |epoch, what| RedoError::DamagedSegment { path: directory.to_owned(), name: segment_name(epoch), epoch, what };
    if let Some(epoch) = must_be_whole.iter().find(|epoch| !epochs.contains(epoch)) {
        return Ok((count, Err(lost(*epoch, "the file is missing".into()))));
    }
    let mut writes = 0;
    let is_needed = |epoch: &u64| *epoch <= upto && *epoch > state.merged && !state.is_dead(*epoch);
    for epoch in epochs.into_iter().filter(is_needed) {
        let file = match File::open(directory.join(segment_name(epoch))) {
            // The segment was merged since the directory was read.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            file => LocalFile(Arc::new(file.map_err(failed("opening a segment"))?)),
        };
        let mut found = scan(&file, epoch, state.disk).map_err(failed("reading a segment"))?;
        if must_be_whole.contains(&epoch) {
            match sealed_content(found) {
                Ok(whole) => found = Some(whole),
                Err(what) => return Ok((count, Err(lost(epoch, what)))),
            }
        }
        writes += found.map_or(0, |found| found.entries.len());
    }
    let EpochState { disk, sealed, floor, image, .. } = state;
    Ok((count, Ok(Some(LogSummary { disk, sealed, floor, writes, image }))))
}

#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Redo(#[from] RedoError),
}

/// Merges the log of an image completely, and removes it. Returns the number of merged epochs; `None` if there is no
/// log. `renamed_from`: the previous file name of a renamed image.
///
/// *Needs:* no other process has the image open.
/// *On success:* the image is the newest disk; the disks of checkpoints are no longer available.
/// *On failure:* the log still exists, and can be merged again.
pub fn merge_all(
    image: &Path,
    directory: &Path,
    direct: bool,
    renamed_from: Option<&str>,
) -> Result<Option<usize>, MergeError> {
    let opened = Image::open(image, crate::image::OpenMode { readonly: false, direct })?;
    let files = LocalFiles::new(directory, opened.mode.direct);
    let Some((mut log_dir, log)) = recover::open(files, opened.bytes, DiskVersion::Newest, u64::MAX)? else {
        return Ok(None);
    };
    if let Some(name) = image_name(image) {
        log_dir.check_image(&name, renamed_from)?;
    }
    let log_dir = Mutex::new(Some(log_dir));
    let mut merged = 0;
    if let Some(batch) = log.batch(log.closed()) {
        merged = batch.segments.len();
        let image = Synced::new(LocalFile(Arc::clone(&opened.file)), Arc::clone(&opened.durability));
        merge(&log_dir, &batch, &mut MergeTarget::new(image), || Ok(()))?;
    }
    if let Some(mut log_dir) = log_dir.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        log_dir.close(log.epoch())?;
        log_dir.destroy()?;
    }
    Ok(Some(merged))
}
