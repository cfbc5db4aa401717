//! One request, from the available to the used ring.
//!
//! | module | contents |
//! |---|---|
//! | `plan` | divides a request into parts; serves what needs no disk, including the retained cache |
//! | `carry` | reads and writes the parts, and answers the request |
//! | `note` | records moved blocks in the block map |

mod carry;
mod note;
mod plan;

pub(super) use note::PendingRecord;

use super::CHUNK;
use super::command::FrontendId;
use crate::block::{BLOCK, touched};
use crate::map::Frame;
use crate::memory::Memory;
use crate::redo::log::LogEntry;
use crate::request::{BufferSegment, Kind, Range, Request, RequestStatus};
use std::sync::Arc;

/// The operation on a part of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Read,
    Write,
    Sync,
    /// Release the space; the content is undefined then.
    Discard,
    /// Zeros, as a hole or as allocated space.
    Zero {
        hole: bool,
    },
    /// Zeros, written: the file system supports neither.
    ZeroByWriting,
}

/// Where a part is read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PartLocation {
    /// In the image. A write of a disk with a log gets its entry when it begins.
    Image,
    /// In the segment of an epoch, from byte `at` on. For a flush: the number of entries that become durable.
    Segment {
        epoch: u64,
        at: u64,
    },
    /// Zeros, stored nowhere.
    Zeroes,
    Entry(LogEntry),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub work: Work,
    /// First byte on the disk.
    pub at: u64,
    pub bytes: u64,
    /// Offset in the request's data.
    pub offset: u64,
    pub place: PartLocation,
}

/// See [the module](self).
pub(super) struct Job {
    pub session: FrontendId,
    pub queue: u16,
    head: u16,
    memory: Arc<Memory>,
    /// Number of the request.
    pub serial: u64,
    request: Request,
    pub parts: Vec<Part>,
    /// Bytes to move or to zero.
    bytes: u64,
    left: usize,
    status: RequestStatus,
    /// Admitted by the rate limit.
    admitted: bool,
    /// Another request in progress has blocks in common, and one of them writes: the resulting content is unknown.
    stale: bool,
}

impl Job {
    /// The parts of the disk that it accesses.
    fn ranges(&self) -> impl Iterator<Item = Range> {
        self.wants().ok().into_iter().flat_map(Kind::ranges)
    }

    /// Whether it accesses `range`. Checks the request's ranges: a long one has many more parts.
    fn touches(&self, range: Range) -> bool {
        let (mine, other) = (|range: Range| touched(range.at, range.bytes), touched(range.at, range.bytes));
        self.ranges().map(mine).any(|mine| mine.start < other.end && other.start < mine.end)
    }

    pub fn wants(&self) -> Result<&Kind, &RequestStatus> {
        self.request.what.as_ref()
    }

    fn changes_disk(&self) -> bool {
        matches!(self.wants(), Ok(Kind::Write(_) | Kind::Discard(_) | Kind::Zeroes(_)))
    }

    /// Moves the data of part `number` between `bytes` and the guest. `None`: it is outside the guest's memory.
    fn copy(&self, number: u32, bytes: &mut [u8]) -> Option<()> {
        let part = self.parts.get(number as usize)?;
        let (data, len) = (&self.request.data, bytes.len());
        if part.work == Work::Read {
            along(data, part.offset, len, |at, from, len| self.memory.write(at, bytes.get(from..from + len)?))
        } else {
            along(data, part.offset, len, |at, from, len| self.memory.read(at, bytes.get_mut(from..from + len)?))
        }
    }

    /// The frames of its blocks, starting at `offset` of the data; none for a block that is not in one page.
    fn frames(&self, offset: u64) -> impl Iterator<Item = Option<Frame>> {
        let (mut at, mut segments) = (0, self.request.data.iter().peekable());
        (offset..).step_by(BLOCK).map(move |offset| {
            while let Some(before) = segments.next_if(|segment| at + segment.len <= offset) {
                at += before.len;
            }
            let segment = segments.peek()?;
            let address = segment.address.checked_add(offset - at)?;
            let fits = offset + BLOCK as u64 <= at + segment.len && address.is_multiple_of(BLOCK as u64);
            fits.then(|| Frame::try_from(address / BLOCK as u64).ok()).flatten()
        })
    }
}

/// Moves bytes between a buffer and the guest's memory, starting at `offset` of the data that `segments` name.
fn along(
    segments: &[BufferSegment],
    offset: u64,
    bytes: usize,
    mut each: impl FnMut(u64, usize, usize) -> Option<()>,
) -> Option<()> {
    let (mut skip, mut done) = (offset, 0);
    for segment in segments {
        if done == bytes {
            break;
        }
        if skip >= segment.len {
            skip -= segment.len;
            continue;
        }
        let take = usize::try_from(segment.len - skip).unwrap_or(usize::MAX).min(bytes - done);
        each(segment.address.checked_add(skip)?, done, take)?;
        (skip, done) = (0, done + take);
    }
    (done == bytes).then_some(())
}

/// Divides a range into parts of at most [`CHUNK`] bytes.
pub(super) fn cut(work: Work, range: Range, offset: u64) -> Vec<Part> {
    let part = |done: u64| Part {
        work,
        at: range.at + done,
        bytes: (range.bytes - done).min(CHUNK as u64),
        offset: offset + done,
        place: PartLocation::Image,
    };
    (0..range.bytes).step_by(CHUNK).map(part).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_long_range_is_cut_and_nothing_is_lost() {
        let parts = cut(Work::Read, Range { at: 512, bytes: 2 * CHUNK as u64 + 1024 }, 4096);
        let seen: Vec<_> = parts.iter().map(|part| (part.at, part.bytes, part.offset)).collect();
        let chunk = CHUNK as u64;
        assert_eq!(
            seen,
            [(512, chunk, 4096), (512 + chunk, chunk, 4096 + chunk), (512 + 2 * chunk, 1024, 4096 + 2 * chunk)]
        );
        assert!(cut(Work::Read, Range { at: 0, bytes: 0 }, 0).is_empty());
    }

    #[test]
    fn bytes_go_along_the_segments_and_not_beyond() {
        let segment = |address, len| BufferSegment { address, len, writable: true };
        let segments = [segment(100, 10), segment(500, 0), segment(200, 20)];
        let moves = |offset, bytes| {
            let mut seen = Vec::new();
            let done = along(&segments, offset, bytes, |at, from, len| {
                seen.push((at, from, len));
                Some(())
            });
            done.map(|()| seen)
        };
        assert_eq!(moves(5, 10).unwrap(), [(105, 0, 5), (200, 5, 5)]);
        assert_eq!(moves(10, 20).unwrap(), [(200, 0, 20)]);
        assert_eq!(moves(11, 20), None);
        assert_eq!(moves(0, 0).unwrap(), []);
    }
}
