//! One request, from the available to the used ring.

use super::command::Session;
use super::{CHUNK, DEPTH, Engine, Token};
use crate::block::{BLOCK, touched, whole};
use crate::chain::walk;
use crate::digest::Digest;
use crate::map::Frame;
use crate::memory::Memory;
use crate::redo::log::Placed;
use crate::request::{self, Disk, IDENTITY, Kind, Range, Request, Segment, Status};
use rekindle_kernel::uring::{Buffer, Operation};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Bytes that are under way at a time, at most; one part always goes.
const MOST_BYTES: usize = 64 << 20;
/// Bytes that are copied and digested before the next are.
const PIECE: usize = 32 << 10;
/// Places in the ring that are kept for who waits for kicks.
const KEPT: usize = 40;

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
pub(super) enum Place {
    /// In the image; a write of a disk that has a log is given a place when it begins.
    Image,
    /// In the segment of an epoch, from byte `at` on. Of a flush: so many entries of it are durable then.
    Segment { epoch: u64, at: u64 },
    /// Nowhere: zeroes.
    Zeroes,
    /// An entry of the log.
    Entry(Placed),
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
    pub place: Place,
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
    left: usize,
    status: Status,
    /// It has been let through by the rate.
    admitted: bool,
    /// Another request that is under way at the same time touches the same blocks and one of them writes: what is on the disk
    /// afterwards is not known.
    stale: bool,
}

impl Job {
    fn touches(&self, range: Range) -> bool {
        let (mine, other) = (|part: &Part| touched(part.at, part.bytes), touched(range.at, range.bytes));
        self.parts.iter().map(mine).any(|mine| mine.start < other.end && other.start < mine.end)
    }

    fn changes_disk(&self) -> bool {
        self.parts.iter().any(|part| !matches!(part.work, Work::Read | Work::Sync))
    }

    /// Copy the part of its data that begins at `offset` out of the guest.
    pub fn gather(&self, offset: u64, into: &mut [u8]) -> Option<()> {
        let len = into.len();
        along(&self.request.data, offset, len, |at, from, len| self.memory.read(at, into.get_mut(from..from + len)?))
    }

    /// The frames that its blocks are in, beginning with the one at `offset` of the data; none for a block that is not in one page.
    fn frames(&self, offset: u64) -> impl Iterator<Item = Option<Frame>> {
        let (mut at, mut segments) = (0, self.request.data.iter().peekable());
        (offset..).step_by(BLOCK).map(move |offset| {
            while let Some(before) = segments.next_if(|segment| at + segment.len <= offset) {
                at += before.len;
            }
            let segment = segments.peek()?;
            let address = segment.address + (offset - at);
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

impl Engine {
    /// Begin a request. `is_new`: it has not been taken before.
    pub(super) fn begin(&mut self, session: Session, queue: u16, head: u16, memory: &Arc<Memory>, is_new: bool) {
        if is_new {
            self.note_taken(session, queue, head);
        }
        let Some((table, size)) = self.table(session, queue) else { return };
        let disk = Disk { capacity: self.capacity, readonly: self.image.how.readonly };
        let read = |at: u64, into: &mut [u8]| memory.read(at, into);
        let request = match walk(read, table, size, head) {
            Ok(segments) => request::parse(segments.into_iter(), read, disk).ok(),
            Err(e) => {
                tracing::warn!("queue {queue}: a chain of descriptors leads nowhere: {e}");
                None
            }
        };
        let Some(request) = request else {
            // There is no place for an answer; the guest gets its descriptors back.
            self.tell(session, queue, head, 0);
            return;
        };
        let memory = Arc::clone(memory);
        let (parts, left, status) = (Vec::new(), 0, Status::Ok);
        let (serial, admitted, stale) = (self.serial, false, false);
        self.serial += 1;
        let job = Job { session, queue, head, memory, serial, request, parts, left, status, admitted, stale };
        let number = self.jobs.insert(job);
        self.plan(number);
        let Some(job) = self.jobs.get_mut(number) else { return };
        job.left = job.parts.len();
        if job.left == 0 {
            self.finish(number);
        } else {
            self.waiting.extend((0..job.parts.len() as u32).map(|part| (number, part)));
        }
    }

    /// Find out what is to be done for a job, and do what needs no disk.
    fn plan(&mut self, number: usize) {
        let Some(job) = self.jobs.get(number) else { return };
        let parts = match &job.request.what {
            Err(status) => {
                let status = *status;
                return self.fail(number, status);
            }
            Ok(Kind::Identity) => {
                let mut serial = [0; IDENTITY];
                for (place, byte) in serial.iter_mut().zip(self.settings.serial.bytes()) {
                    *place = byte;
                }
                let len = IDENTITY.min(job.request.written.saturating_sub(1) as usize);
                let write = |at, from: usize, len| job.memory.write(at, serial.get(from..from + len)?);
                if along(&job.request.data, 0, len, write).is_none() {
                    self.fail(number, Status::Failed);
                }
                return;
            }
            Ok(Kind::Flush) => match self.cut_flush() {
                Some(parts) => parts,
                None => return self.fail(number, Status::Failed),
            },
            Ok(Kind::Read(range)) => {
                let range = *range;
                return self.plan_read(number, range);
            }
            Ok(Kind::Write(range)) => cut(Work::Write, *range, 0),
            Ok(Kind::Discard(ranges)) => {
                let part = |range: &Range| Part {
                    work: Work::Discard,
                    at: range.at,
                    bytes: range.bytes,
                    offset: 0,
                    place: Place::Image,
                };
                ranges.iter().filter(|range| range.bytes > 0).map(part).collect()
            }
            Ok(Kind::Zeroes(ranges)) => {
                let part = |(range, hole): &(Range, bool)| Part {
                    work: Work::Zero { hole: *hole },
                    at: range.at,
                    bytes: range.bytes,
                    offset: 0,
                    place: Place::Image,
                };
                ranges.iter().filter(|(range, _)| range.bytes > 0).map(part).collect()
            }
        };
        self.change(number, &parts);
        if let Some(job) = self.jobs.get_mut(number) {
            job.parts = parts;
        }
    }

    /// What is on the disk there is about to become something else.
    fn change(&mut self, number: usize, parts: &[Part]) {
        let mut stale = false;
        for part in parts.iter().filter(|part| part.work != Work::Sync) {
            for block in touched(part.at, part.bytes) {
                if let Some((map, _)) = &mut self.map {
                    map.changed(block);
                }
                if let Some(attic) = &mut self.attic {
                    attic.changed(block);
                }
            }
            if self.map.is_some() {
                let range = Range { at: part.at, bytes: part.bytes };
                for (_, other) in self.jobs.iter_mut().filter(|(of, other)| *of != number && other.touches(range)) {
                    (other.stale, stale) = (true, true);
                }
            }
        }
        if let Some(job) = self.jobs.get_mut(number) {
            job.stale |= stale;
        }
    }

    /// Blocks that are in the attic are given from there; the rest is read.
    fn plan_read(&mut self, number: usize, range: Range) {
        let is_written = self.map.is_some()
            && self.jobs.iter().any(|(of, other)| of != number && other.changes_disk() && other.touches(range));
        let found = if is_written { Vec::new() } else { self.out_of_attic(number, range) };
        let mut parts = Vec::new();
        let mut at = 0;
        for (of, offset, digest, frame) in found {
            if offset > at {
                parts.extend(self.cut_read(Range { at: range.at + at, bytes: offset - at }, at));
            }
            at = offset + BLOCK as u64;
            if let (Some((map, _)), Some(frame)) = (&mut self.map, frame) {
                map.moved(of, frame, digest);
            }
        }
        if at < range.bytes {
            parts.extend(self.cut_read(Range { at: range.at + at, bytes: range.bytes - at }, at));
        }
        if let Some(job) = self.jobs.get_mut(number) {
            (job.parts, job.stale) = (parts, is_written);
        }
    }

    /// Give the guest what of a range is in the attic: block, where it begins in the data, digest, frame.
    fn out_of_attic(&mut self, number: usize, range: Range) -> Vec<(u64, u64, Digest, Option<Frame>)> {
        let mut found = Vec::new();
        let blocks = whole(range.at, range.bytes);
        let Some((first, begin)) = whole(range.at, range.bytes).next().filter(|_| self.attic.is_some()) else {
            return found;
        };
        let blocks = blocks.count() as u64;
        let mut buffer = self.buffer((blocks as usize * BLOCK).min(CHUNK));
        let (Some(attic), Some(job)) = (&mut self.attic, self.jobs.get(number)) else { return found };
        let mut frames = job.frames(begin as u64);
        for done in (0..blocks).step_by(CHUNK / BLOCK) {
            let bytes = (blocks - done) as usize * BLOCK;
            let bytes = bytes.min(CHUNK);
            let Some(bytes) = buffer.get_mut(..bytes) else { break };
            let digests = attic.take(first + done, bytes);
            let mut next = 0;
            // What comes side by side is passed on in one.
            for run in digests.chunk_by(|one, other| one.is_some() == other.is_some()) {
                let (place, offset) = (next * BLOCK, begin as u64 + done * BLOCK as u64 + (next * BLOCK) as u64);
                let fill = |at, from: usize, len| job.memory.fill(at, bytes.get(place + from..place + from + len)?);
                let is_there = run.first().is_some_and(Option::is_some)
                    && along(&job.request.data, offset, run.len() * BLOCK, fill).is_some();
                for (n, (digest, frame)) in (0..).zip(run.iter().zip(&mut frames)) {
                    if let Some(digest) = digest.filter(|_| is_there) {
                        found.push((first + done + next as u64 + n, offset + n * BLOCK as u64, digest, frame));
                    }
                }
                next += run.len();
            }
        }
        drop(frames);
        self.put_back(Some(buffer));
        self.has_moved += found.len() * BLOCK;
        found
    }

    fn fail(&mut self, number: usize, status: Status) {
        if let Some(job) = self.jobs.get_mut(number) {
            job.status = status;
        }
    }

    /// Begin parts, as far as there is room and the rate allows.
    pub(super) fn begin_waiting(&mut self) {
        self.due = None;
        self.release_if_due();
        while let Some(&(number, part)) = self.waiting.front() {
            let room = (DEPTH as usize).saturating_sub(self.ring.under_way()) > KEPT;
            let Some(job) = self.jobs.get_mut(number) else {
                self.waiting.pop_front();
                continue;
            };
            let Some(work) = job.parts.get(part as usize).copied() else {
                self.waiting.pop_front();
                continue;
            };
            let moves = matches!(work.work, Work::Read | Work::Write | Work::ZeroByWriting);
            let is_full = moves && self.moving > 0 && self.moving + work.bytes as usize > MOST_BYTES;
            if !room || is_full {
                break;
            }
            if !job.admitted && moves {
                let bytes = job.parts.iter().map(|part| part.bytes).sum();
                if let Err(wait) = self.throttle.admit(bytes, Instant::now()) {
                    self.due = Some(Instant::now() + wait);
                    break;
                }
                job.admitted = true;
            }
            self.waiting.pop_front();
            self.begin_part(number, part, work);
        }
    }

    fn begin_part(&mut self, number: usize, part: u32, whole: Part) {
        let Part { work, at, bytes, offset, place } = whole;
        if self.logged.is_some() && !matches!(work, Work::Read | Work::Sync) {
            return self.append(number, part, whole);
        }
        let len = bytes as usize;
        let segment = match place {
            Place::Segment { epoch, .. } => self.logged.as_ref().and_then(|logged| logged.log.file(epoch)),
            _ => None,
        };
        match (work, place) {
            (Work::Read, Place::Zeroes) => {
                let mut buffer = self.buffer(len);
                buffer.fill(0);
                self.moving += len;
                return self.part_ended(number, part, Ok(len), Some(buffer));
            }
            // It was merged meanwhile, and the image synced.
            (Work::Sync, Place::Segment { .. }) if segment.is_none() => return self.part_done(number, Status::Ok),
            _ => {}
        }
        let operation = match work {
            Work::Sync => Operation::Sync,
            Work::Discard | Work::Zero { hole: true } => {
                Operation::Allocate { mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, at, len: bytes }
            }
            Work::Zero { hole: false } => {
                Operation::Allocate { mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, at, len: bytes }
            }
            Work::Read => {
                let at = match place {
                    Place::Segment { at, .. } if segment.is_some() => at,
                    _ => at,
                };
                Operation::Read { at, len, buffer: self.buffer(len) }
            }
            Work::ZeroByWriting => {
                let mut buffer = self.buffer(len);
                buffer.fill(0);
                Operation::Write { at, len, buffer }
            }
            Work::Write => {
                let mut buffer = self.buffer(len);
                let Some(job) = self.jobs.get(number) else { return };
                if buffer.get_mut(..len).and_then(|data| job.gather(offset, data)).is_none() {
                    return self.part_done(number, Status::Failed);
                }
                Operation::Write { at, len, buffer }
            }
        };
        if let Operation::Read { len, .. } | Operation::Write { len, .. } = &operation {
            self.moving += len;
        }
        let file = segment.map_or_else(|| Arc::clone(&self.image.file), |segment| segment.0);
        if self.ring.begin(&file, operation, Token::Part(number as u32, part).pack()).is_err() {
            // There is room: it was looked for.
            self.part_done(number, Status::Failed);
        }
    }

    pub(super) fn part_ended(&mut self, number: usize, part: u32, result: io::Result<usize>, buffer: Option<Buffer>) {
        let Some(work) = self.jobs.get(number).and_then(|job| job.parts.get(part as usize)).copied() else { return };
        if buffer.is_some() && matches!(work.work, Work::Read | Work::Write | Work::ZeroByWriting) {
            self.moving = self.moving.saturating_sub(work.bytes as usize);
        }
        if let (Place::Entry(placed), Some(data)) = (work.place, &buffer) {
            let status = self.appended((number, part), &placed, result, data);
            self.put_back(buffer);
            if let Some(status) = status {
                self.part_done(number, status);
            }
            return;
        }
        if work.work == Work::Sync {
            self.flushed(work.place, result.is_ok());
        }
        let status = match result {
            Ok(moved) if buffer.is_some() && moved as u64 != work.bytes => {
                tracing::warn!("{}: {moved} bytes instead of {} at {}", self.image.path.display(), work.bytes, work.at);
                Status::Failed
            }
            Ok(_) => self.moved(number, work, buffer.as_deref()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {
                self.waiting.push_back((number, part));
                self.put_back(buffer);
                return;
            }
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) && work.work == Work::Discard => Status::Ok,
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) && matches!(work.work, Work::Zero { .. }) => {
                return self.zero_by_writing(number, part, work);
            }
            Err(e) => {
                tracing::warn!(
                    "{}: {:?} of {} bytes at {}: {e}",
                    self.image.path.display(),
                    work.work,
                    work.bytes,
                    work.at
                );
                Status::Failed
            }
        };
        self.put_back(buffer);
        self.part_done(number, status);
    }

    /// A file system that cannot make zeroes is given them.
    fn zero_by_writing(&mut self, number: usize, part: u32, work: Part) {
        let Some(job) = self.jobs.get_mut(number) else { return };
        let mut parts = cut(Work::ZeroByWriting, Range { at: work.at, bytes: work.bytes }, 0).into_iter();
        let (Some(place), Some(first)) = (job.parts.get_mut(part as usize), parts.next()) else { return };
        *place = first;
        self.waiting.push_back((number, part));
        for more in parts {
            job.parts.push(more);
            job.left += 1;
            self.waiting.push_back((number, job.parts.len() as u32 - 1));
        }
    }

    /// What was moved is passed on, and noted.
    pub(super) fn moved(&mut self, number: usize, part: Part, buffer: Option<&[u8]>) -> Status {
        let (Some(job), Some(bytes)) = (self.jobs.get(number), buffer) else { return Status::Ok };
        let len = part.bytes as usize;
        let (mut map, mut is_ours) = (None, false);
        if let Some((known, memory)) = &mut self.map
            && matches!(part.work, Work::Read | Work::Write)
        {
            is_ours = Arc::ptr_eq(memory, &job.memory) && !job.stale;
            map = Some(known);
        }
        let begin = whole(part.at, part.bytes).next().map_or(0, |(_, offset)| offset as u64);
        let mut blocks = whole(part.at, part.bytes).zip(job.frames(part.offset + begin)).peekable();
        self.has_moved += len;
        // Piece by piece, so that what is copied is digested while it is at hand.
        for piece in (0..len).step_by(PIECE) {
            let end = (piece + PIECE).min(len);
            if part.work == Work::Read {
                let write = |at, from: usize, len| job.memory.write(at, bytes.get(piece + from..piece + from + len)?);
                if along(&job.request.data, part.offset + piece as u64, end - piece, write).is_none() {
                    return Status::Failed;
                }
            }
            let Some(map) = &mut map else { continue };
            while let Some(((block, offset), frame)) = blocks.next_if(|((_, offset), _)| offset + BLOCK <= end) {
                let content = bytes.get(offset..).and_then(|rest| rest.first_chunk::<BLOCK>());
                match (frame, content) {
                    (Some(frame), Some(content)) if is_ours => map.moved(block, frame, self.digester.of(content)),
                    _ if part.work == Work::Write => map.changed(block),
                    _ => {}
                }
            }
        }
        Status::Ok
    }

    pub(super) fn part_done(&mut self, number: usize, status: Status) {
        let Some(job) = self.jobs.get_mut(number) else { return };
        if status != Status::Ok {
            job.status = status;
        }
        job.left = job.left.saturating_sub(1);
        if job.left == 0 {
            self.finish(number);
        }
    }

    /// Answer.
    fn finish(&mut self, number: usize) {
        let Some(job) = self.jobs.try_remove(number) else { return };
        if job.status != Status::Ok
            && let Some((map, _)) = &mut self.map
        {
            // What a write that failed has left there is not known.
            job.parts.iter().flat_map(|part| touched(part.at, part.bytes)).for_each(|block| map.changed(block));
        }
        let written = if job.status == Status::Ok { job.request.written } else { 1 };
        let answered = job.memory.write(job.request.status, &[job.status as u8]);
        self.tell(job.session, job.queue, job.head, if answered.is_some() { written } else { 0 });
        self.has_room = true;
    }
}

/// Parts that are short enough to be moved at once.
pub(super) fn cut(work: Work, range: Range, offset: u64) -> Vec<Part> {
    let part = |done: u64| Part {
        work,
        at: range.at + done,
        bytes: (range.bytes - done).min(CHUNK as u64),
        offset: offset + done,
        place: Place::Image,
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
