//! Inspection and merging of the log of a disk that has no server.
//!
//! The *redo log* has the writes of a protected guest that are not in the image yet. To *merge* is to copy them there.
//! They are divided into *epochs*, one for each time between two checkpoints (`docs/disk-epochs.md`).

use super::directory::{STATE_BYTES, STATE_NAME, last_used_epoch};
use super::epoch_state::{CountedState, EpochState};
use super::error::RedoError;
use super::files::{LocalFiles, LogFiles, Synced};
use super::format::{segment_epoch, segment_name};
use super::merge::{MergeTarget, merge};
use super::recover::{self, DiskVersion, MISSING, RecoveredLog, existing_segments, scan, sealed_content};
use crate::image::{Image, ImageError, OpenMode};
use crate::slots::newest_slot;
use rekindle_kernel::durable_file::LocalFile;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
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
    let is_device = fs::metadata(image).is_ok_and(|metadata| metadata.file_type().is_block_device());
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
    let mut inspected_count = None;
    loop {
        let Inspection { state_count, summary } = inspect_once(directory, upto)?;
        match summary {
            // A server may have created a log or removed merged segments since the state was read.
            Err(RedoError::DamagedSegment { .. } | RedoError::DamagedState { .. })
                if inspected_count != Some(state_count) =>
            {
                inspected_count = Some(state_count);
            }
            summary => return summary,
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
    let summary = inspect(directory, upto)?;
    let recorded = summary.as_ref().and_then(|summary| summary.image.as_deref());
    match (recorded, image_name(image)) {
        (Some(recorded), Some(image)) if recorded != image && renamed_from != Some(recorded) => {
            Err(RedoError::OtherImage { path: directory.to_owned(), found: recorded.into(), image })
        }
        _ => Ok(summary),
    }
}

/// The result of inspecting a directory once.
struct Inspection {
    /// The count of the state that was read.
    state_count: u64,
    summary: Result<Option<LogSummary>, RedoError>,
}

/// Inspects a directory once.
///
/// # Errors
/// An error that repeating the inspection cannot remove.
fn inspect_once(directory: &Path, upto: u64) -> Result<Inspection, RedoError> {
    let failed = |doing| RedoError::io(directory, doing);
    let slots = match LocalFiles::new(directory, false).peek(STATE_NAME, STATE_BYTES) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        slots => slots.map_err(failed("reading its state"))?.map(|start| start.bytes).unwrap_or_default(),
    };
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Inspection { state_count: 0, summary: Ok(None) }),
        entries => entries.map_err(failed("reading the directory"))?,
    };
    let epochs: Vec<u64> =
        entries.flatten().filter_map(|entry| segment_epoch(&entry.file_name().to_string_lossy())).collect();
    let newest = newest_slot(&slots).map_err(|found| RedoError::NewerFormat { path: directory.to_owned(), found })?;
    let Some(CountedState { count: state_count, state }) = newest else {
        let damaged = RedoError::DamagedState { path: directory.to_owned() };
        let summary = if epochs.is_empty() { Ok(None) } else { Err(damaged) };
        return Ok(Inspection { state_count: 0, summary });
    };
    let writes = match count_writes(directory, &state, &epochs, upto) {
        Ok(writes) => writes,
        Err(e) => return Ok(Inspection { state_count, summary: Err(e) }),
    };
    let EpochState { disk, sealed, floor, image, .. } = state;
    Ok(Inspection { state_count, summary: Ok(Some(LogSummary { disk, sealed, floor, writes, image })) })
}

/// Returns the number of writes in epochs up to `upto` that are not merged. `epochs`: those that have a segment.
///
/// # Errors
/// [`RedoError::DamagedSegment`] if the segment of a sealed epoch is not complete.
fn count_writes(directory: &Path, state: &EpochState, epochs: &[u64], upto: u64) -> Result<usize, RedoError> {
    let failed = |doing| RedoError::io(directory, doing);
    let damaged =
        |epoch, what| RedoError::DamagedSegment { path: directory.to_owned(), name: segment_name(epoch), epoch, what };
    let must_be_whole = existing_segments(state, upto, epochs).map_err(|epoch| damaged(epoch, MISSING.into()))?;
    let mut writes = 0;
    let is_needed = |epoch: &u64| *epoch <= upto && *epoch > state.merged && !state.is_dead(*epoch);
    for epoch in epochs.iter().copied().filter(is_needed) {
        let file = match File::open(directory.join(segment_name(epoch))) {
            // The segment was merged since the directory was read.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            file => LocalFile(Arc::new(file.map_err(failed("opening a segment"))?)),
        };
        let mut content = scan(&file, epoch, state.disk).map_err(failed("reading a segment"))?;
        if must_be_whole.contains(&epoch) {
            content = Some(sealed_content(content).map_err(|what| damaged(epoch, what))?);
        }
        writes += content.map_or(0, |content| content.entries.len());
    }
    Ok(writes)
}

/// The reason why a log cannot be merged.
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
    let opened_image = Image::open(image, OpenMode { readonly: false, direct })?;
    let files = LocalFiles::new(directory, opened_image.mode.direct);
    let recovered = recover::open(files, opened_image.bytes, DiskVersion::Newest, u64::MAX)?;
    let Some(RecoveredLog { mut log_dir, log }) = recovered else { return Ok(None) };
    if let Some(name) = image_name(image) {
        log_dir.check_image(&name, renamed_from)?;
    }
    let log_dir = Mutex::new(Some(log_dir));
    let mut merged_epochs = 0;
    if let Some(batch) = log.batch(log.closed()) {
        merged_epochs = batch.segments.len();
        let file = LocalFile(Arc::clone(&opened_image.file));
        let image = Synced::new(file, Arc::clone(&opened_image.durability));
        merge(&log_dir, &batch, &mut MergeTarget::new(image), || Ok(()))?;
    }
    if let Some(mut log_dir) = log_dir.into_inner().unwrap_or_else(PoisonError::into_inner) {
        log_dir.close(last_used_epoch(log.epoch()))?;
        log_dir.destroy()?;
    }
    Ok(Some(merged_epochs))
}
