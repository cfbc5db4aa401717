//! The log of a disk that nobody serves: what there is, and merging it.

use super::error::RedoError;
use super::files::{LocalFile, LocalFiles, Synced};
use super::merge::{Target, merge};
use super::recover::{self, Wanted, scan, whole};
use super::slot::{State, newest_slot};
use super::state::{epoch_of, name_of};
use crate::image::{Image, ImageError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use uuid::Uuid;

/// Where the log of an image is, if nothing else is said. A block device has none.
#[must_use]
pub fn beside(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".redo");
    PathBuf::from(path)
}

/// What there is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The disk's identity.
    pub disk: Uuid,
    /// The newest epoch that a checkpoint can have.
    pub sealed: u64,
    /// The oldest.
    pub floor: u64,
    /// Writes that are not in the image.
    pub writes: usize,
    /// File name of the image; unknown in the log of an earlier version.
    pub image: Option<String>,
}

/// The name by which a log knows its image: the last component of the path, of what a symbolic link names.
#[must_use]
pub fn image_name(image: &Path) -> Option<String> {
    let is_device = fs::metadata(image).is_ok_and(|found| found.file_type().is_block_device());
    // The real name of a device (dm-3) is another one after the next boot.
    let path = if is_device { image.to_owned() } else { fs::canonicalize(image).unwrap_or_else(|_| image.to_owned()) };
    path.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// What there is in the directory of a log; also while a server has it. `None`: no log.
///
/// # Errors
/// [`RedoError`]; a damaged log is one.
pub fn look(directory: &Path) -> Result<Option<Left>, RedoError> {
    let mut seen = None;
    loop {
        let (count, left) = inspect_once(directory)?;
        match left {
            // Its server may have merged and removed segments, or begun a log, meanwhile.
            Err(RedoError::Lost { .. } | RedoError::Damaged { .. }) if seen != Some(count) => seen = Some(count),
            left => return left,
        }
    }
}

/// As [`look`], for the log of an image. `renamed_from`: the file name that the image had when the log was begun.
///
/// # Errors
/// [`RedoError`]; also where it is another image's.
pub fn inspect_log(image: &Path, directory: &Path, renamed_from: Option<&str>) -> Result<Option<Left>, RedoError> {
    let left = look(directory)?;
    let found = left.as_ref().and_then(|left| left.image.as_deref());
    match (found, image_name(image)) {
        (Some(found), Some(image)) if found != image && renamed_from != Some(found) => {
            Err(RedoError::OtherImage { path: directory.to_owned(), found: found.into(), image })
        }
        _ => Ok(left),
    }
}

/// What there is, and the count of the state that was read.
#[allow(clippy::type_complexity, reason = "only `look` calls it")]
fn inspect_once(directory: &Path) -> Result<(u64, Result<Option<Left>, RedoError>), RedoError> {
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
        entries.flatten().filter_map(|entry| epoch_of(&entry.file_name().to_string_lossy())).collect();
    let newest = newest_slot(&slots).map_err(|found| RedoError::Newer { path: directory.to_owned(), found })?;
    let Some((count, state)) = newest else {
        let damaged = || RedoError::Damaged { path: directory.to_owned() };
        return Ok((0, if epochs.is_empty() { Ok(None) } else { Err(damaged()) }));
    };
    let must_be_whole: BTreeSet<u64> = state.sealed_segments().collect();
    let lost = |epoch, what| RedoError::Lost { path: directory.to_owned(), name: name_of(epoch), epoch, what };
    if let Some(epoch) = must_be_whole.iter().find(|epoch| !epochs.contains(epoch)) {
        return Ok((count, Err(lost(*epoch, "the file is missing".into()))));
    }
    let mut writes = 0;
    for epoch in epochs.into_iter().filter(|epoch| *epoch > state.merged && !state.is_dead(*epoch)) {
        let file = match File::open(directory.join(name_of(epoch))) {
            // It was merged meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            file => LocalFile(Arc::new(file.map_err(failed("opening a segment"))?)),
        };
        let mut found = scan(&file, epoch, state.disk).map_err(failed("reading a segment"))?;
        if must_be_whole.contains(&epoch) {
            match whole(found) {
                Ok(whole) => found = Some(whole),
                Err(what) => return Ok((count, Err(lost(epoch, what)))),
            }
        }
        writes += found.map_or(0, |found| found.entries.len());
    }
    let State { disk, sealed, floor, image, .. } = state;
    Ok((count, Ok(Some(Left { disk, sealed, floor, writes, image }))))
}

/// Why a log is not merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The log.
    #[error(transparent)]
    Redo(#[from] RedoError),
}

/// Merge all of an image's log, and remove it. Gives how many epochs that were; `None` if there is no log. `renamed_from`: the file
/// name that the image had when the log was begun.
///
/// *Needs:* that nobody has the image open.
/// *On success:* the image is the newest disk; no checkpoint's disk is to be had any more.
/// *On failure:* the log is still there, and can be merged again.
///
/// # Errors
/// [`MergeError`].
pub fn merge_all(
    image: &Path,
    directory: &Path,
    direct: bool,
    renamed_from: Option<&str>,
) -> Result<Option<usize>, MergeError> {
    let opened = Image::open(image, crate::image::How { readonly: false, direct })?;
    let files = LocalFiles::new(directory, opened.how.direct);
    let Some((mut home, log)) = recover::open(files, opened.bytes, Wanted::Newest, u64::MAX)? else { return Ok(None) };
    if let Some(name) = image_name(image) {
        home.check_image(&name, renamed_from)?;
    }
    let home = Mutex::new(Some(home));
    let mut merged = 0;
    if let Some(batch) = log.batch(log.closed()) {
        merged = batch.segments.len();
        let image = Synced::new(LocalFile(Arc::clone(&opened.file)), Arc::clone(&opened.durability));
        merge(&home, &batch, &mut Target::new(image), || Ok(()))?;
    }
    if let Some(mut home) = home.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        home.close(log.epoch())?;
        home.destroy()?;
    }
    Ok(Some(merged))
}
