//! One request, from the available to the used ring.
//!
//! | module | contents |
//! |---|---|
//! | `plan` | divides a request into parts; serves data that needs no disk, for example from the retained cache |
//! | `transfer` | reads and writes the parts, and answers the request |

mod plan;
mod transfer;

use crate::block::{BLOCK, touched, whole};
use crate::block_map::Frame;
use crate::engine::CHUNK;
use crate::engine::catalog::{DataLocation, Direction, MovedBlocks, SyncTarget};
use crate::engine::command::FrontendId;
use crate::memory::Memory;
use crate::redo::format::EntryKind;
use crate::redo::log::LogEntry;
use crate::request::{BufferSegment, Kind, Range, Request, RequestStatus};
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

#[derive(Debug, Clone, Copy)]
struct Part {
    work: Work,
    /// First byte on the disk.
    at: u64,
    bytes: u64,
    /// Offset in the request's data.
    offset: u64,
    /// The reserved entry of the redo log in which a change is written.
    entry: Option<LogEntry>,
}

/// A request in progress.
pub(super) struct ActiveRequest {
    pub session: FrontendId,
    pub queue: u16,
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
    fn ranges(&self) -> impl Iterator<Item = Range> {
        self.request.what.as_ref().ok().into_iter().flat_map(Kind::ranges)
    }

    /// Returns whether the request has a block of `range`. Checks the request's ranges, because a long request has
    /// many more parts.
    fn overlaps(&self, range: Range) -> bool {
        let other = touched(range.at, range.bytes);
        let mut own = self.ranges().map(|range| touched(range.at, range.bytes));
        own.any(|own| own.start < other.end && other.start < own.end)
    }

    fn changes_disk(&self) -> bool {
        matches!(self.request.what, Ok(Kind::Write(_) | Kind::Discard(_) | Kind::Zeroes(_)))
    }

    /// Moves the data of part `number` between `bytes` and the guest. `None`: the data is outside the guest's memory.
    fn copy(&self, number: u32, bytes: &mut [u8]) -> Option<()> {
        let part = self.parts.get(number as usize)?;
        let (data, len) = (&self.request.data, bytes.len());
        if matches!(part.work, Work::Read(_)) {
            let write = |piece: Piece| self.memory.write(piece.address, bytes.get(piece.range())?);
            for_each_piece(data, part.offset, len, write)
        } else {
            let read = |piece: Piece| self.memory.read(piece.address, bytes.get_mut(piece.range())?);
            for_each_piece(data, part.offset, len, read)
        }
    }

    /// Copies blocks of the retained cache to the guest, from `offset` of the request's data on. `None`: the place is
    /// outside the guest's memory.
    fn fill(&self, offset: u64, bytes: &[u8]) -> Option<()> {
        let fill = |piece: Piece| self.memory.fill(piece.address, bytes.get(piece.range())?);
        for_each_piece(&self.request.data, offset, bytes.len(), fill)
    }

    /// Returns the frames of the request's blocks, starting at `offset` of the data; `None` for a block that is not
    /// in one page.
    fn frames(&self, offset: u64) -> impl Iterator<Item = Option<Frame>> {
        let (mut segment_start, mut segments) = (0, self.request.data.iter().peekable());
        (offset..).step_by(BLOCK).map(move |offset| {
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

    /// Returns the whole blocks that part `number` moves, and the offset of the first one in the part's data. `None`:
    /// the part moves no whole block.
    fn moved_blocks(&self, number: u32) -> Option<(MovedBlocks, usize)> {
        let part = self.parts.get(number as usize)?;
        let direction = match part.work {
            Work::Write => Direction::GuestToDisk,
            Work::Read(_) => Direction::DiskToGuest,
            _ => return None,
        };
        let mut blocks = whole(part.at, part.bytes);
        let (first, start) = blocks.next()?;
        let frames = self.frames(part.offset + start as u64).take(1 + blocks.count()).collect();
        let memory = Arc::clone(&self.memory);
        Some((MovedBlocks { memory, first, frames, direction, is_stale: self.is_stale }, start))
    }
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

/// Divides `bytes` bytes of the data that `segments` describe, starting at `offset`, into contiguous pieces, and
/// calls `each` with each piece. `None`: the segments are shorter, or `each` has returned `None`.
fn for_each_piece(
    segments: &[BufferSegment],
    offset: u64,
    bytes: usize,
    mut each: impl FnMut(Piece) -> Option<()>,
) -> Option<()> {
    let (mut skip, mut position) = (offset, 0);
    for segment in segments {
        if position == bytes {
            break;
        }
        if skip >= segment.len {
            skip -= segment.len;
            continue;
        }
        let len = usize::try_from(segment.len - skip).unwrap_or(usize::MAX).min(bytes - position);
        each(Piece { address: segment.address.checked_add(skip)?, position, len })?;
        (skip, position) = (0, position + len);
    }
    (position == bytes).then_some(())
}

/// Divides a range into parts of at most [`CHUNK`] bytes. `offset`: offset of the range in the request's data.
fn divide(work: Work, range: Range, offset: u64) -> impl Iterator<Item = Part> {
    (0..range.bytes).step_by(CHUNK).map(move |start| Part {
        work: match work {
            Work::Read(DataLocation::Segment { epoch, offset }) => {
                Work::Read(DataLocation::Segment { epoch, offset: offset + start })
            }
            other => other,
        },
        at: range.at + start,
        bytes: (range.bytes - start).min(CHUNK as u64),
        offset: offset + start,
        entry: None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_long_range_is_divided_and_nothing_is_lost() {
        let chunk = CHUNK as u64;
        let divided = |work, range| -> Vec<_> {
            divide(work, range, 4096).map(|part| (part.work, part.at, part.bytes, part.offset)).collect()
        };
        let range = Range { at: 512, bytes: 2 * chunk + 1024 };
        assert_eq!(
            divided(Work::Write, range),
            [
                (Work::Write, 512, chunk, 4096),
                (Work::Write, 512 + chunk, chunk, 4096 + chunk),
                (Work::Write, 512 + 2 * chunk, 1024, 4096 + 2 * chunk)
            ]
        );
        assert_eq!(divided(Work::Write, Range { at: 0, bytes: 0 }), []);
        let read = |offset| Work::Read(DataLocation::Segment { epoch: 3, offset });
        let range = Range { at: 0, bytes: chunk + 512 };
        assert_eq!(
            divided(read(8192), range),
            [(read(8192), 0, chunk, 4096), (read(8192 + chunk), chunk, 512, 4096 + chunk)]
        );
    }

    #[test]
    fn bytes_go_along_the_segments_and_not_beyond() {
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
