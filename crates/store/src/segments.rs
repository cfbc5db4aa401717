//! Reads segments: keeps their files open, and decodes the directories of frames.

use crate::disk::DiskFile;
use crate::error::{Result, StoreError};
use crate::format::manifest::Extent;
use crate::format::segment::{
    DIRECTORY_ROOM, Directory, FRAME_HEADER_LEN, FrameHeader, HEADER_LEN, RECORD_LEN, check_header,
};
use crate::format::{Flaw, Structure, names};
use crate::home::Home;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Limit of open files. By default a process may have 1024.
const MAX_OPEN: usize = 256;

/// Bytes that are read first of a frame: enough for a directory of 512 pages.
const USUAL: usize = FRAME_HEADER_LEN + 512 * RECORD_LEN;

/// Segments that are open for reading, by epoch and number.
#[derive(Debug, Default)]
pub(crate) struct Files {
    open: Mutex<HashMap<(u64, u64), Arc<dyn DiskFile>>>,
}

impl Files {
    /// Returns an open segment whose header has been checked.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Damaged`].
    pub fn get(&self, home: &Home, extent: Extent) -> Result<Arc<dyn DiskFile>> {
        let key = (extent.epoch, extent.number);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = open.get(&key) {
            return Ok(file.clone());
        }
        let file = open_checked(home, extent)?;
        if open.len() >= MAX_OPEN {
            open.clear();
        }
        open.insert(key, file.clone());
        Ok(file)
    }
}

/// Opens a segment and checks its header.
pub(crate) fn open_checked(home: &Home, extent: Extent) -> Result<Arc<dyn DiskFile>> {
    let name = names::segment(extent.epoch, extent.number);
    let file = match home.disk.open(&name) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let needed = format!("checkpoints need {} bytes of pages in it", extent.len);
            return Err(StoreError::Missing { store: home.name().into(), file: name, needed });
        }
        other => other.map_err(home.failed(&name, "opening"))?,
    };
    let header = home.read_at(&file, &name, 0, 64)?;
    check_header(&header, home.id, extent.epoch, extent.number)
        .map_err(|flaw| StoreError::flaw(home.name(), &name, flaw))?;
    Ok(file)
}

/// Passes each frame in the committed part of a segment, from byte `from`, to `take`.
///
/// # Errors
/// [`StoreError::Damaged`]; errors of reading the segment; errors of `take`.
pub(crate) fn frames(
    home: &Home,
    extent: Extent,
    file: &Arc<dyn DiskFile>,
    from: u64,
    mut take: impl FnMut(u64, &Directory<'_>) -> Result<()>,
) -> Result<()> {
    let name = names::segment(extent.epoch, extent.number);
    let flawed = |flaw| StoreError::flaw(home.name(), &name, flaw);
    let mut at = from.max(HEADER_LEN);
    let mut buffer = vec![0; DIRECTORY_ROOM];
    while at < extent.len {
        // Most directories fit into the first read.
        let front = buffer.get_mut(..USUAL).unwrap_or_default();
        let mut found = file.read_at(front, at).map_err(home.failed(&name, "reading"))?;
        let header = FrameHeader::decode(front.get(..found).unwrap_or_default(), at).map_err(flawed)?;
        if header.data_offset() > found {
            found = file.read_at(&mut buffer, at).map_err(home.failed(&name, "reading"))?;
        }
        let directory = Directory::decode(buffer.get(..found).unwrap_or_default(), at).map_err(flawed)?;
        let next = directory.header.next(at);
        if at + directory.header.len() > extent.len {
            return Err(flawed(Flaw::bad(
                Structure::FrameDirectory,
                at,
                "the frame ends after the committed part of the segment",
            )));
        }
        take(at, &directory)?;
        at = next;
    }
    Ok(())
}
