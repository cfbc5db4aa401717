//! The log of a disk that nobody serves: what there is, and merging it.

use super::error::RedoError;
use super::files::{LocalFile, LocalFiles, Synced};
use super::merge::{Target, merge};
use super::recover::{self, Wanted, scan};
use super::state::{epoch_of, name_of, newest_slot};
use crate::image::{Image, ImageError};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
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
}

/// What there is in the directory of a log; also while a server has it. `None`: no log.
///
/// # Errors
/// [`RedoError`]; a damaged log is one.
pub fn look(directory: &Path) -> Result<Option<Left>, RedoError> {
    let failed = |doing| RedoError::io(directory, doing);
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries.map_err(failed("reading the directory"))?,
    };
    let epochs: Vec<u64> =
        entries.flatten().filter_map(|entry| epoch_of(&entry.file_name().to_string_lossy())).collect();
    let slots = match fs::read(directory.join("state")) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        slots => slots.map_err(failed("reading its state"))?,
    };
    let Some((_, state)) = newest_slot(&slots) else {
        return if epochs.is_empty() { Ok(None) } else { Err(RedoError::Damaged { path: directory.to_owned() }) };
    };
    let mut writes = 0;
    for epoch in epochs.into_iter().filter(|epoch| *epoch > state.merged && !state.is_dead(*epoch)) {
        match File::open(directory.join(name_of(epoch))) {
            // It was merged meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            file => {
                let file = LocalFile(Arc::new(file.map_err(failed("opening a segment"))?));
                let found = scan(&file, epoch, state.disk).map_err(failed("reading a segment"))?;
                writes += found.map_or(0, |(_, _, entries)| entries.len());
            }
        }
    }
    Ok(Some(Left { disk: state.disk, sealed: state.sealed, floor: state.floor, writes }))
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

/// Merge all of an image's log, and remove it. Gives how many epochs that were; `None` if there is no log.
///
/// *Needs:* that nobody has the image open.
/// *On success:* the image is the newest disk; no checkpoint's disk is to be had any more.
/// *On failure:* the log is still there, and can be merged again.
///
/// # Errors
/// [`MergeError`].
pub fn merge_all(image: &Path, directory: &Path, direct: bool) -> Result<Option<usize>, MergeError> {
    let opened = Image::open(image, crate::image::How { readonly: false, direct })?;
    let files = LocalFiles::new(directory, opened.how.direct);
    let Some((home, log)) = recover::open(files, opened.bytes, Wanted::Newest, u64::MAX)? else { return Ok(None) };
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
