//! Reads segments: keeps their files open, and decodes the directories of frames.
//!
//! A *segment* is a file of *frames*: up to 1024 pages that were written together, after a *directory* with a *record*
//! for each page ([`crate::format::segment`]). The *extent* of a segment is its name (owner epoch and number), and how
//! many of its bytes are committed.

use crate::directory::StoreDirectory;
use crate::error::{Result, StoreError};
use crate::format::manifest::SegmentExtent;
use crate::format::segment::{
    Directory, FRAME_HEADER_LEN, FrameHeader, HEADER_LEN, MAX_DIRECTORY_BYTES, RECORD_LEN, check_header,
};
use crate::format::{Flaw, Structure, names};
use rekindle_kernel::durable_file::DurableFile;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Limit of open files. By default a process may have 1024.
const MAX_OPEN_FILES: usize = 256;

/// Bytes that are read first of a frame: enough for a directory of 512 pages.
const USUAL_DIRECTORY_BYTES: usize = FRAME_HEADER_LEN + 512 * RECORD_LEN;

/// Segments that are open for reading, by epoch and number.
#[derive(Debug, Default)]
pub(crate) struct OpenSegments {
    files: Mutex<HashMap<(u64, u64), Arc<dyn DurableFile>>>,
}

impl OpenSegments {
    /// Returns an open segment whose header has been checked.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Damaged`].
    pub fn get(&self, store: &StoreDirectory, extent: SegmentExtent) -> Result<Arc<dyn DurableFile>> {
        let key = (extent.epoch, extent.number);
        if let Some(file) = self.files().get(&key) {
            return Ok(file.clone());
        }
        // Other threads must not wait: in an object store, opening is a request.
        let file = open_checked(store, extent)?;
        let mut files = self.files();
        if files.len() >= MAX_OPEN_FILES {
            files.clear();
        }
        Ok(files.entry(key).or_insert(file).clone())
    }

    fn files(&self) -> MutexGuard<'_, HashMap<(u64, u64), Arc<dyn DurableFile>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a segment and checks its header.
pub(crate) fn open_checked(store: &StoreDirectory, extent: SegmentExtent) -> Result<Arc<dyn DurableFile>> {
    let name = names::segment(extent.epoch, extent.number);
    let file = match store.disk.open(&name) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let needed = format!("checkpoints need {} bytes of pages in it", extent.len);
            return Err(StoreError::Missing { store: store.name().into(), file: name, needed });
        }
        opened => opened.map_err(store.failed(&name, "opening"))?,
    };
    let header = store.read_at(&file, &name, 0, 64)?;
    check_header(&header, store.id, extent.epoch, extent.number)
        .map_err(|flaw| StoreError::flaw(store.name(), &name, flaw))?;
    Ok(file)
}

/// Calls `visit` with the offset and the directory of each frame in the committed part of a segment, from byte `begin`
/// on.
///
/// # Errors
/// [`StoreError::Damaged`]; errors of reading the segment; errors of `visit`.
pub(crate) fn for_each_frame(
    store: &StoreDirectory,
    extent: SegmentExtent,
    file: &Arc<dyn DurableFile>,
    begin: u64,
    mut visit: impl FnMut(u64, &Directory<'_>) -> Result<()>,
) -> Result<()> {
    let name = names::segment(extent.epoch, extent.number);
    let flawed = |flaw| StoreError::flaw(store.name(), &name, flaw);
    let mut offset = begin.max(HEADER_LEN);
    let mut buffer = vec![0; MAX_DIRECTORY_BYTES];
    while offset < extent.len {
        // Most directories fit into the first read.
        let front = buffer.get_mut(..USUAL_DIRECTORY_BYTES).unwrap_or_default();
        let mut read_bytes = file.read_at(front, offset).map_err(store.failed(&name, "reading"))?;
        let header = FrameHeader::decode(front.get(..read_bytes).unwrap_or_default(), offset).map_err(flawed)?;
        if header.data_offset() > read_bytes {
            read_bytes = file.read_at(&mut buffer, offset).map_err(store.failed(&name, "reading"))?;
        }
        let directory = Directory::decode(buffer.get(..read_bytes).unwrap_or_default(), offset).map_err(flawed)?;
        if offset + directory.header.len() > extent.len {
            let what = "the frame ends after the committed part of the segment";
            return Err(flawed(Flaw::bad(Structure::FrameDirectory, offset, what)));
        }
        visit(offset, &directory)?;
        offset = directory.header.next_frame_offset(offset);
    }
    Ok(())
}
