//! One request, from the available to the used ring.
//!
//! | module | what it is for |
//! |---|---|
//! | `plan` | what is to be done for it; what needs no disk, the attic too, is done at once |
//! | `carry` | its parts on their way to the disk and back, and the answer |
//! | `note` | what was moved is noted in the block map |

mod carry;
mod note;
mod plan;

pub(super) use note::Late;

use super::CHUNK;
use super::command::Session;
use crate::block::{BLOCK, touched};
use crate::map::Frame;
use crate::memory::Memory;
use crate::redo::log::LogEntry;
use crate::request::{Kind, Range, Request, Segment, Status};
use std::sync::Arc;

/// What is to be done with a part of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Read,
    Write,
    Sync,
    /// Give the room back; the guest does not mind what is there then.
    Discard,
    /// Zeroes, as a hole or as room that is kept.
    Zero {
        hole: bool,
    },
    /// Zeroes, written out: the file system knows neither.
    ZeroByWriting,
}

/// Where a part is read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PartLocation {
    /// In the image; a write of a disk that has a log is given a place when it begins.
    Image,
    /// In the segment of an epoch, from byte `at` on. Of a flush: so many entries of it are durable then.
    Segment { epoch: u64, at: u64 },
    /// Nowhere: zeroes.
    Zeroes,
    /// An entry of the log.
    Entry(LogEntry),
}

/// A part of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub work: Work,
    /// Byte of the disk.
    pub at: u64,
    pub bytes: u64,
    /// Where it begins in the request's data.
    pub offset: u64,
    pub place: PartLocation,
}

/// See [the module](self).
pub(super) struct Job {
    pub session: Session,
    pub queue: u16,
    head: u16,
    memory: Arc<Memory>,
    /// Its number among all.
    pub serial: u64,
    request: Request,
    pub parts: Vec<Part>,
    /// Bytes that it moves or zeroes.
    bytes: u64,
    left: usize,
    status: Status,
    /// It has been let through by the rate.
    admitted: bool,
    /// Another request that is under way at the same time touches the same blocks and one of them writes: what is on the disk
    /// afterwards is not known.
    stale: bool,
}

impl Job {
    /// The parts of the disk that it is about.
    fn ranges(&self) -> impl Iterator<Item = Range> {
        self.wants().ok().into_iter().flat_map(Kind::ranges)
    }

    /// Looks at the ranges of the request: of a long one there are many more parts.
    fn touches(&self, range: Range) -> bool {
        let (mine, other) = (|range: Range| touched(range.at, range.bytes), touched(range.at, range.bytes));
        self.ranges().map(mine).any(|mine| mine.start < other.end && other.start < mine.end)
    }

    /// What it wants.
    pub fn wants(&self) -> Result<&Kind, &Status> {
        self.request.what.as_ref()
    }

    fn changes_disk(&self) -> bool {
        matches!(self.wants(), Ok(Kind::Write(_) | Kind::Discard(_) | Kind::Zeroes(_)))
    }

    /// Move the data of part `number` between `bytes` and the guest. `None`: it leads out of the guest's memory.
    fn copy(&self, number: u32, bytes: &mut [u8]) -> Option<()> {
        let part = self.parts.get(number as usize)?;
        let (data, len) = (&self.request.data, bytes.len());
        if part.work == Work::Read {
            along(data, part.offset, len, |at, from, len| self.memory.write(at, bytes.get(from..from + len)?))
        } else {
            along(data, part.offset, len, |at, from, len| self.memory.read(at, bytes.get_mut(from..from + len)?))
        }
    }

    /// The frames that its blocks are in, beginning with the one at `offset` of the data; none for a block that is not in one page.
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

/// Move bytes between a buffer and the part of the guest's memory that begins at `offset` of what segments name.
fn along(
    segments: &[Segment],
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

/// Parts that are short enough to be moved at once.
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
        let segment = |address, len| Segment { address, len, writable: true };
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
