//! Reads segments: keeps their files open, and decodes the directories of frames.
//!
//! A *segment* is a file of *frames*: up to 1024 pages that were written together, after a *directory* with a *record*
//! for each page ([`crate::format::segment`]). The *extent* of a segment is its name (owner epoch and number), and how
//! many of its bytes are committed.

use crate::directory::StoreDirectory;
use crate::error::{Result, StoreError};
use crate::format::manifest::SegmentExtent;
use crate::format::segment::{
    Directory, FRAME_HEADER_LEN, FrameHeader, HEADER_LEN, MAX_DIRECTORY_BYTES, RECORD_LEN, check_header, open_page,
};
use crate::format::{Flaw, Structure, names};
use crate::sealing::{FileIdentity, FileKey, SEAL_LEN, TAG_LEN};
use rekindle_kernel::durable_file::DurableFile;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Limit of open files. By default a process may have 1024.
const MAX_OPEN_FILES: usize = 256;

/// Bytes that are read first of a frame: enough for a directory of 512 pages.
const USUAL_DIRECTORY_BYTES: usize = FRAME_HEADER_LEN + 512 * RECORD_LEN + TAG_LEN;

/// A segment that is open for reading, and whose header was checked.
#[derive(Debug)]
pub(crate) struct OpenSegment {
    pub file: Arc<dyn DurableFile>,
    /// Key of an encrypted segment.
    pub key: Option<FileKey>,
}

impl OpenSegment {
    /// Decrypts the stored bytes of a page, which were read at `offset`, in place. Returns the compressed or plain
    /// content of the page. Without encryption, the stored bytes are the content.
    ///
    /// # Errors
    /// A text that describes what is wrong.
    pub fn open_page<'p>(
        &self,
        offset: u64,
        block: u16,
        page: u32,
        digest: u64,
        stored: &'p mut [u8],
    ) -> std::result::Result<&'p mut [u8], &'static str> {
        match &self.key {
            // Nothing is stored of a page of zeroes, whose record has the digest 0.
            Some(key) if !stored.is_empty() => open_page(key, offset, block, page, digest, stored),
            _ => Ok(stored),
        }
    }
}

/// Segments that are open for reading, by epoch and number.
#[derive(Debug, Default)]
pub(crate) struct OpenSegments {
    segments: Mutex<HashMap<(u64, u64), Arc<OpenSegment>>>,
}

impl OpenSegments {
    /// Returns an open segment whose header has been checked.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Damaged`].
    pub fn get(&self, store: &StoreDirectory, extent: SegmentExtent) -> Result<Arc<OpenSegment>> {
        let key = (extent.epoch, extent.number);
        if let Some(segment) = self.segments().get(&key) {
            return Ok(segment.clone());
        }
        // Other threads must not wait: in an object store, opening is a request.
        let segment = Arc::new(open_checked(store, extent)?);
        let mut segments = self.segments();
        // One only: a reader may be among the others.
        if segments.len() >= MAX_OPEN_FILES
            && let Some(any) = segments.keys().next().copied()
        {
            segments.remove(&any);
        }
        Ok(segments.entry(key).or_insert(segment).clone())
    }

    fn segments(&self) -> MutexGuard<'_, HashMap<(u64, u64), Arc<OpenSegment>>> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a segment and checks its header.
pub(crate) fn open_checked(store: &StoreDirectory, extent: SegmentExtent) -> Result<OpenSegment> {
    let name = names::segment(extent.epoch, extent.number);
    let file = match store.disk.open(&name) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let needed = format!("checkpoints need {} bytes of pages in it", extent.len);
            return Err(StoreError::Missing { store: store.name().into(), file: name, needed });
        }
        opened => opened.map_err(store.failed(&name, "opening"))?,
    };
    let header = store.read_at(&file, &name, 0, 64 + SEAL_LEN)?;
    let identity = FileIdentity::Segment { epoch: extent.epoch, number: extent.number };
    let key = check_header(&header, store.id, extent.epoch, extent.number)
        .and_then(|seal| {
            let key = store.find_key(identity, seal, Structure::SegmentHeader)?;
            let what = "it is another file than the one that the manifest lists";
            let is_listed = seal.map(|seal| seal.id()) == extent.seal;
            is_listed.then_some(key).ok_or(Flaw::bad(Structure::SegmentHeader, 0, what))
        })
        .map_err(|flaw| StoreError::flaw(store.name(), &name, flaw))?;
    Ok(OpenSegment { file, key })
}

/// Calls `visit` with the offset and the directory of each frame in the committed part of a segment, from byte `begin`
/// on.
///
/// # Errors
/// [`StoreError::Damaged`]; errors of reading the segment; errors of `visit`.
pub(crate) fn for_each_frame(
    store: &StoreDirectory,
    extent: SegmentExtent,
    segment: &OpenSegment,
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
        let mut read_bytes = segment.file.read_at(front, offset).map_err(store.failed(&name, "reading"))?;
        let header = FrameHeader::decode(front.get(..read_bytes).unwrap_or_default(), offset).map_err(flawed)?;
        if header.data_offset() > read_bytes {
            read_bytes = segment.file.read_at(&mut buffer, offset).map_err(store.failed(&name, "reading"))?;
        }
        let front = buffer.get_mut(..read_bytes).unwrap_or_default();
        let directory = Directory::decode(front, offset, segment.key.as_ref()).map_err(flawed)?;
        if offset + directory.header.len() > extent.len {
            let what = "the frame ends after the committed part of the segment";
            return Err(flawed(Flaw::bad(Structure::FrameDirectory, offset, what)));
        }
        visit(offset, &directory)?;
        offset = directory.header.next_frame_offset(offset);
    }
    Ok(())
}
