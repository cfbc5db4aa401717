//! The segments of a writer, and how many of their bytes are needed.
//!
//! A *segment* is a file of pages. Bytes are *live* if they are the newest content of a page, *dying* if only older
//! checkpoints that are kept need them, and garbage otherwise. Compaction removes garbage.

use crate::format::ALIGNMENT;
use crate::format::base::Location;
use crate::format::manifest::SegmentExtent;
use crate::format::names;
use crate::format::segment::{FrameHeader, HEADER_LEN, RECORD_LEN, Record, seal_frame};
use crate::sealing::FileKey;
use rekindle_kernel::durable_file::DurableFile;
use std::io;
use std::sync::Arc;

/// Returns the bytes that a record with `len` bytes of content uses in a segment.
pub(crate) fn record_bytes(len: u16) -> u64 {
    u64::from(len) + RECORD_LEN as u64
}

/// Purpose of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Pages of checkpoints.
    Data,
    /// Output of a compaction in progress. No checkpoint uses it until the compaction is done.
    Output,
}

/// Bytes of a segment that checkpoint `replaced_by` has replaced, but that older kept checkpoints need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DyingBytes {
    pub replaced_by: u64,
    pub bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Segment {
    /// Committed part of the segment.
    pub extent: SegmentExtent,
    /// Bytes written.
    pub end: u64,
    pub role: Role,
    /// Open while pages may be appended, and until the last sync.
    pub file: Option<Arc<dyn DurableFile>>,
    /// Key of an encrypted segment, while pages may be appended.
    pub key: Option<FileKey>,
    /// Bytes were written since the last sync.
    pub is_dirty: bool,
    /// Pages may be appended. False after a failed sync, and if an encrypted segment was truncated.
    pub is_sound: bool,
    /// Bytes of records that are the newest of their page.
    pub live: u64,
    /// Bytes that only checkpoints older than the newest need.
    pub dying: Vec<DyingBytes>,
    /// Until this checkpoint is the oldest, an older checkpoint may need any of the bytes that are not live.
    pub history_unknown_until: u64,
    /// The segment's directories are damaged, so that it cannot be compacted.
    pub is_damaged: bool,
}

impl Segment {
    /// Returns a segment that was just created.
    pub fn new(extent: SegmentExtent, role: Role, file: Arc<dyn DurableFile>, key: Option<FileKey>) -> Self {
        Self { end: HEADER_LEN, role, file: Some(file), key, is_dirty: true, is_sound: true, ..Self::committed(extent) }
    }

    /// Returns a segment that the manifest lists.
    pub fn committed(extent: SegmentExtent) -> Self {
        Self {
            extent,
            end: extent.len,
            role: Role::Data,
            file: None,
            key: None,
            is_dirty: false,
            is_sound: false,
            live: 0,
            dying: Vec::new(),
            history_unknown_until: 0,
            is_damaged: false,
        }
    }

    pub fn name(&self) -> String {
        names::segment(self.extent.epoch, self.extent.number)
    }

    /// Returns the bytes that only kept checkpoints older than the newest need, if `oldest` is the oldest.
    pub fn dying_bytes(&self, oldest: u64) -> u64 {
        self.dying.iter().filter(|dying| dying.replaced_by > oldest).map(|dying| dying.bytes).sum()
    }

    /// Returns the bytes that are not live but that kept checkpoints need or may need, if `oldest` is the oldest.
    pub fn history_bytes(&self, oldest: u64) -> u64 {
        if self.history_unknown_until > oldest {
            self.extent.len.saturating_sub(HEADER_LEN + self.live)
        } else {
            self.dying_bytes(oldest)
        }
    }

    /// Returns the bytes that no kept checkpoint needs, if `oldest` is the oldest.
    pub fn garbage_bytes(&self, oldest: u64) -> u64 {
        self.extent.len.saturating_sub(HEADER_LEN + self.live + self.history_bytes(oldest))
    }

    /// Returns whether no kept checkpoint needs the segment, if `live` of its bytes are live.
    pub fn is_dead(&self, live: u64, oldest: u64) -> bool {
        live == 0 && self.history_unknown_until <= oldest && self.dying_bytes(oldest) == 0
    }

    /// Records that checkpoint `replaced_by` has replaced `bytes` of the segment.
    pub fn add_dying(&mut self, replaced_by: u64, bytes: u64) {
        match self.dying.last_mut() {
            Some(last) if last.replaced_by == replaced_by => last.bytes += bytes,
            _ => self.dying.push(DyingBytes { replaced_by, bytes }),
        }
    }

    /// Returns the offset of the next frame.
    pub fn next_frame_offset(&self) -> u64 {
        self.end.next_multiple_of(ALIGNMENT)
    }
}

/// A frame that is to be written.
pub(crate) struct PlainFrame<'f> {
    pub header: FrameHeader,
    /// The records of its directory, or none if the caller does not need those of the written frame.
    pub records: Vec<Record>,
    pub bytes: &'f [u8],
}

/// A frame that was written at an offset of its segment, with header and records as they are there.
pub(crate) struct WrittenFrame {
    pub offset: u64,
    pub header: FrameHeader,
    pub records: Vec<Record>,
}

impl Segment {
    /// Writes a frame after the last one, encrypted if the segment is, and starts to write it to the disk. `buffer`: for the
    /// encrypted frame.
    ///
    /// # Errors
    /// The frame does not count. If it was encrypted, nothing may be written to the segment any more.
    pub fn write_frame(&mut self, frame: PlainFrame<'_>, buffer: &mut Vec<u8>) -> io::Result<WrittenFrame> {
        let offset = self.next_frame_offset();
        self.is_dirty = true;
        let PlainFrame { header, records, bytes } = frame;
        let (header, records, bytes) = match &self.key {
            Some(key) => {
                let (header, records) = seal_frame(key, offset, header, bytes, buffer)?;
                (header, records, buffer.as_slice())
            }
            None => (header, records, bytes),
        };
        if let Some(file) = &self.file {
            file.write_at(bytes, offset)?;
            file.start_writeback(offset, bytes.len() as u64);
        }
        self.end = offset + bytes.len() as u64;
        Ok(WrittenFrame { offset, header, records })
    }
}

/// All segments by position. A [`Location`] refers to these positions.
#[derive(Debug, Default)]
pub(crate) struct SegmentPool {
    segments: Vec<Option<Segment>>,
    /// The current or last segment at each position.
    last_extents: Vec<SegmentExtent>,
    free: Vec<usize>,
    /// Positions of removed segments. A compaction or base index in progress may still refer to them.
    awaiting_reuse: Vec<usize>,
}

impl SegmentPool {
    pub fn get(&self, position: usize) -> Option<&Segment> {
        self.segments.get(position)?.as_ref()
    }

    pub fn get_mut(&mut self, position: usize) -> Option<&mut Segment> {
        self.segments.get_mut(position)?.as_mut()
    }

    /// Returns the segment that contains the record at `location`.
    pub fn segment_of(&mut self, location: Location) -> Option<&mut Segment> {
        self.get_mut(location.segment())
    }

    /// Adds a segment and returns its position; `None` if all positions are in use.
    pub fn add(&mut self, segment: Segment) -> Option<usize> {
        let extent = segment.extent;
        if let Some(position) = self.free.pop() {
            if let Some(free) = self.segments.get_mut(position) {
                *free = Some(segment);
            }
            if let Some(last_extent) = self.last_extents.get_mut(position) {
                *last_extent = extent;
            }
            return Some(position);
        }
        if self.segments.len() >= Location::MAX_SEGMENTS {
            return None;
        }
        self.segments.push(Some(segment));
        self.last_extents.push(extent);
        Some(self.segments.len() - 1)
    }

    /// Removes a segment. [`SegmentPool::allow_reuse`] makes its position available again.
    pub fn remove(&mut self, position: usize) -> Option<Segment> {
        let segment = self.segments.get_mut(position)?.take()?;
        self.awaiting_reuse.push(position);
        Some(segment)
    }

    /// Makes the positions of all removed segments available again.
    pub fn allow_reuse(&mut self) {
        self.free.append(&mut self.awaiting_reuse);
    }

    /// Iterates over all segments and their positions.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Segment)> {
        self.segments.iter().enumerate().filter_map(|(position, segment)| Some((position, segment.as_ref()?)))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Segment> {
        self.segments.iter_mut().flatten()
    }

    /// Returns the number of positions, including free ones.
    pub fn positions(&self) -> usize {
        self.segments.len()
    }

    /// Returns the current or last segment at each position.
    pub fn last_extents(&self) -> &[SegmentExtent] {
        &self.last_extents
    }

    /// Returns the bytes of all segments on the disk.
    pub fn bytes(&self) -> u64 {
        self.iter().map(|(_, segment)| segment.next_frame_offset()).sum()
    }

    /// Returns the bytes that only older checkpoints need or may need, if `oldest` is the oldest.
    pub fn history_bytes(&self, oldest: u64) -> u64 {
        self.iter().map(|(_, segment)| segment.history_bytes(oldest)).sum()
    }
}
