//! One request, from the available to the used ring.
//!
//! | module | contents |
//! |---|---|
//! | `plan` | divides a request into parts; serves data that needs no disk, for example from the retained cache |
//! | `transfer` | reads and writes the parts, and answers the request |

mod plan;
mod transfer;

use crate::block::{BLOCK, overlapping_blocks, whole_blocks};
use crate::block_map::Frame;
use crate::engine::MAX_OPERATION_BYTES;
use crate::engine::catalog::{DataLocation, Direction, MovedBlocks, SyncTarget};
use crate::engine::ids::ConnectionId;
use crate::memory::Memory;
use crate::redo::format::EntryKind;
use crate::redo::log::LogEntry;
use crate::request::{BufferSegment, DiskRange, Request, RequestKind, RequestStatus};
use std::sync::Arc;

/// The operation on a part of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Read(DataLocation),
    Write,
    Sync(SyncTarget),
    /// Release the space; the content is undefined then.
    Discard,
    /// Write zeros, as a hole or as allocated space.
    Zero {
        hole: bool,
    },
    /// Write zeros as data, because the file system supports neither.
    ZeroByWriting,
}

impl Work {
    fn moves_data(self) -> bool {
        matches!(self, Self::Read(_) | Self::Write | Self::ZeroByWriting)
    }

    /// Returns how the redo log records this change.
    fn entry_kind(self) -> EntryKind {
        match self {
            Self::Discard | Self::Zero { hole: true } => EntryKind::Hole,
            Self::Zero { hole: false } | Self::ZeroByWriting => EntryKind::Zeroes,
            Self::Read(_) | Self::Write | Self::Sync(_) => EntryKind::Data,
        }
    }

    /// Returns the name of the operation, for messages.
    fn name(self) -> &'static str {
        match self {
            Self::Read(_) => "Read",
            Self::Write => "Write",
            Self::Sync(_) => "Sync",
            Self::Discard => "Discard",
            Self::Zero { .. } => "Zero",
            Self::ZeroByWriting => "ZeroByWriting",
        }
    }
}

/// A part of a request, which one operation of the ring can do.
#[derive(Debug, Clone, Copy)]
struct Part {
    work: Work,
    /// First byte on the disk.
    disk_offset: u64,
    bytes: u64,
    /// Offset in the request's data.
    data_offset: u64,
    /// The reserved entry of the redo log in which a change is written.
    entry: Option<LogEntry>,
}

/// A request in progress.
pub(super) struct ActiveRequest {
    pub connection_id: ConnectionId,
    pub queue_index: u16,
    /// The first descriptor of the request's chain.
    head: u16,
    memory: Arc<Memory>,
    /// Newer requests have a higher number.
    pub sequence: u64,
    request: Request,
    parts: Vec<Part>,
    /// Bytes to move or to zero.
    bytes: u64,
    /// Number of parts that have not completed.
    unfinished_parts: usize,
    status: RequestStatus,
    /// The rate limit has admitted the request.
    is_admitted: bool,
    /// Another request in progress has blocks in common with this one, and one of them writes: the resulting content
    /// is unknown.
    is_stale: bool,
}

impl ActiveRequest {
    /// Returns the parts of the disk that the request accesses.
    fn ranges(&self) -> impl Iterator<Item = DiskRange> {
        self.request.kind.as_ref().ok().into_iter().flat_map(RequestKind::ranges)
    }

    /// Returns whether the request has a block of `range`. Checks the request's ranges, because a long request has
    /// many more parts.
    fn overlaps(&self, range: DiskRange) -> bool {
        let blocks = overlapping_blocks(range.start, range.bytes);
        let mut own_blocks = self.ranges().map(|own| overlapping_blocks(own.start, own.bytes));
        own_blocks.any(|own| own.start < blocks.end && blocks.start < own.end)
    }

    fn changes_disk(&self) -> bool {
        self.request.kind.as_ref().is_ok_and(RequestKind::changes_disk)
    }

    /// Moves the data of a part between `buffer` and the guest. `None`: the data is outside the guest's memory.
    fn copy_part(&self, part_number: u32, buffer: &mut [u8]) -> Option<()> {
        let part = self.parts.get(part_number as usize)?;
        let (segments, len) = (&self.request.data, buffer.len());
        if matches!(part.work, Work::Read(_)) {
            let to_guest = |piece: Piece| self.memory.write(piece.address, buffer.get(piece.range())?);
            for_each_piece(segments, part.data_offset, len, to_guest)
        } else {
            let from_guest = |piece: Piece| self.memory.read(piece.address, buffer.get_mut(piece.range())?);
            for_each_piece(segments, part.data_offset, len, from_guest)
        }
    }

    /// Copies blocks of the retained cache to the guest, from `data_offset` of the request's data on. `None`: the
    /// data is outside the guest's memory.
    fn copy_retained(&self, data_offset: u64, blocks: &[u8]) -> Option<()> {
        let to_guest = |piece: Piece| self.memory.fill(piece.address, blocks.get(piece.range())?);
        for_each_piece(&self.request.data, data_offset, blocks.len(), to_guest)
    }

    /// Returns the frames of the request's blocks, starting at `first_offset` of the data; `None` for a block that is
    /// not in one page.
    fn frames(&self, first_offset: u64) -> impl Iterator<Item = Option<Frame>> {
        let (mut segment_start, mut segments) = (0, self.request.data.iter().peekable());
        (first_offset..).step_by(BLOCK).map(move |offset| {
            while let Some(previous) = segments.next_if(|segment| segment_start + segment.len <= offset) {
                segment_start += previous.len;
            }
            let segment = segments.peek()?;
            let address = segment.address.checked_add(offset - segment_start)?;
            let is_in_segment = offset + BLOCK as u64 <= segment_start + segment.len;
            let is_page = is_in_segment && address.is_multiple_of(BLOCK as u64);
            is_page.then(|| Frame::try_from(address / BLOCK as u64).ok()).flatten()
        })
    }

    /// Returns the whole blocks that a part moves. `None`: the part moves no whole block.
    fn moved_blocks(&self, part_number: u32) -> Option<PartBlocks> {
        let part = self.parts.get(part_number as usize)?;
        let direction = match part.work {
            Work::Write => Direction::GuestToDisk,
            Work::Read(_) => Direction::DiskToGuest,
            _ => return None,
        };
        let mut blocks = whole_blocks(part.disk_offset, part.bytes);
        let first = blocks.next()?;
        let frames = self.frames(part.data_offset + first.offset as u64).take(1 + blocks.count()).collect();
        let memory = Arc::clone(&self.memory);
        let moved = MovedBlocks { memory, first_block: first.number, frames, direction, is_stale: self.is_stale };
        Some(PartBlocks { moved, first_offset: first.offset })
    }
}

/// The whole blocks of a part.
struct PartBlocks {
    moved: MovedBlocks,
    /// Offset of the first block in the part's data.
    first_offset: usize,
}

/// Bytes of a request's data that are contiguous in the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    /// Address in the guest.
    address: u64,
    /// Position in the buffer.
    position: usize,
    len: usize,
}

impl Piece {
    /// Returns the position of the piece in the buffer.
    fn range(self) -> std::ops::Range<usize> {
        self.position..self.position + self.len
    }
}

/// Divides `bytes` bytes of the data that `segments` describe, starting at `data_offset`, into contiguous pieces, and
/// calls `copy` with each piece. `None`: the segments are shorter, or `copy` has returned `None`.
fn for_each_piece(
    segments: &[BufferSegment],
    data_offset: u64,
    bytes: usize,
    mut copy: impl FnMut(Piece) -> Option<()>,
) -> Option<()> {
    let (mut skip, mut position) = (data_offset, 0);
    for segment in segments {
        if position == bytes {
            break;
        }
        if skip >= segment.len {
            skip -= segment.len;
            continue;
        }
        let len = usize::try_from(segment.len - skip).unwrap_or(usize::MAX).min(bytes - position);
        copy(Piece { address: segment.address.checked_add(skip)?, position, len })?;
        (skip, position) = (0, position + len);
    }
    (position == bytes).then_some(())
}

/// Divides a range into parts of at most [`MAX_OPERATION_BYTES`]. `data_offset`: offset of the range in the request's
/// data.
fn divide(work: Work, range: DiskRange, data_offset: u64) -> impl Iterator<Item = Part> {
    (0..range.bytes).step_by(MAX_OPERATION_BYTES).map(move |start| Part {
        work: match work {
            Work::Read(DataLocation::Segment { epoch, offset }) => {
                Work::Read(DataLocation::Segment { epoch, offset: offset + start })
            }
            _ => work,
        },
        disk_offset: range.start + start,
        bytes: (range.bytes - start).min(MAX_OPERATION_BYTES as u64),
        data_offset: data_offset + start,
        entry: None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_long_range_is_divided_and_nothing_is_lost() {
        let chunk = MAX_OPERATION_BYTES as u64;
        let divided = |work, range| -> Vec<_> {
            divide(work, range, 4096).map(|part| (part.work, part.disk_offset, part.bytes, part.data_offset)).collect()
        };
        let range = DiskRange { start: 512, bytes: 2 * chunk + 1024 };
        assert_eq!(
            divided(Work::Write, range),
            [
                (Work::Write, 512, chunk, 4096),
                (Work::Write, 512 + chunk, chunk, 4096 + chunk),
                (Work::Write, 512 + 2 * chunk, 1024, 4096 + 2 * chunk)
            ]
        );
        assert_eq!(divided(Work::Write, DiskRange { start: 0, bytes: 0 }), []);
        let read = |offset| Work::Read(DataLocation::Segment { epoch: 3, offset });
        let range = DiskRange { start: 0, bytes: chunk + 512 };
        assert_eq!(
            divided(read(8192), range),
            [(read(8192), 0, chunk, 4096), (read(8192 + chunk), chunk, 512, 4096 + chunk)]
        );
    }

    #[test]
    fn pieces_follow_the_segments_and_end_with_them() {
        let segment = |address, len| BufferSegment { address, len, writable: true };
        let segments = [segment(100, 10), segment(500, 0), segment(200, 20)];
        let pieces = |offset, bytes| {
            let mut seen = Vec::new();
            let result = for_each_piece(&segments, offset, bytes, |piece| {
                seen.push((piece.address, piece.position, piece.len));
                Some(())
            });
            result.map(|()| seen)
        };
        assert_eq!(pieces(5, 10).unwrap(), [(105, 0, 5), (200, 5, 5)]);
        assert_eq!(pieces(10, 20).unwrap(), [(200, 0, 20)]);
        assert_eq!(pieces(11, 20), None);
        assert_eq!(pieces(0, 0).unwrap(), []);
    }
}
