//! The parts of a request on their way to the disk and back, and its answer.

use super::{Carried, Part, Place, Work, cut};
use crate::block::{touched, whole};
use crate::digest::Digest;
use crate::engine::hand::{Back, LARGE};
use crate::engine::{DEPTH, Engine, FEED, Token};
use crate::request::{Range, Status};
use rekindle_kernel::uring::{Buffer, Operation};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Bytes that are under way at a time, at most; one part always goes.
const MOST_BYTES: usize = 64 << 20;
/// Places in the ring that are kept for who waits for kicks.
const KEPT: usize = 40;

impl Engine {
    /// Begin parts, as far as there is room and the rate allows.
    pub(in crate::engine) fn begin_waiting(&mut self) {
        self.due = None;
        self.release_if_due();
        while let Some(&(number, part)) = self.waiting.front() {
            let room = (DEPTH as usize).saturating_sub(self.ring.under_way() + self.hand.out()) > KEPT;
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
            // What was gathered has taken its time: meanwhile the disk is to have something to do.
            if work.work == Work::Write && self.has_moved > FEED {
                self.has_moved = 0;
                // If that cannot be done, the next wait says why.
                let _ = self.ring.submit();
            }
        }
    }

    fn begin_part(&mut self, number: usize, part: u32, whole: Part) {
        let Part { work, at, bytes, place, .. } = whole;
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
                let buffer = self.buffer(len);
                self.moving += len;
                return self.carry(number, part, len, buffer);
            }
        };
        if let Operation::Read { len, .. } | Operation::Write { len, .. } = &operation {
            self.moving += len;
        }
        let file = segment.map_or_else(|| Arc::clone(&self.image.file), |segment| segment.0);
        self.submit(number, part, &file, operation);
    }

    fn submit(&mut self, number: usize, part: u32, file: &Arc<File>, operation: Operation) {
        if self.ring.begin(file, operation, Token::Part(number as u32, part).pack()).is_err() {
            // There is room: it was looked for.
            self.part_done(number, Status::Failed);
        }
    }

    pub(in crate::engine) fn part_ended(
        &mut self,
        number: usize,
        part: u32,
        result: io::Result<usize>,
        buffer: Option<Buffer>,
    ) {
        let Some(work) = self.jobs.get(number).and_then(|job| job.parts.get(part as usize)).copied() else { return };
        if buffer.is_some() && matches!(work.work, Work::Read | Work::Write | Work::ZeroByWriting) {
            self.moving = self.moving.saturating_sub(work.bytes as usize);
        }
        if let (Place::Entry(placed), true) = (work.place, buffer.is_some()) {
            let status = self.appended((number, part), &placed, result);
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
            Ok(_) => match (work.work, buffer) {
                (Work::Read, Some(buffer)) => return self.carry(number, part, work.bytes as usize, buffer),
                (_, buffer) => {
                    self.note_moved(number, part, None);
                    self.put_back(buffer);
                    return self.part_done(number, Status::Ok);
                }
            },
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

    /// Move the first `len` bytes of a part between its buffer and the guest: here, or, if there is more to do, by the other hand.
    fn carry(&mut self, number: usize, part: u32, len: usize, mut buffer: Buffer) {
        let digester = self.map.as_ref().map(|_| self.digester);
        let Some(job) = self.jobs.get(number) else { return };
        if len >= LARGE && self.jobs.len() > 1 && self.hand.is_free() {
            let Some(load) = job.load(part, digester, buffer) else { return };
            match self.hand.give(number, part, load) {
                Ok(()) => return,
                // It is gone: this one can do all of it.
                Err(load) => return self.carried(number, part, load.carry()),
            }
        }
        let digests = buffer.get_mut(..len).and_then(|bytes| job.carry(part, digester, bytes));
        self.has_moved += len;
        self.carried(number, part, Carried { buffer, digests });
    }

    /// Take back what the other hand has done.
    pub(in crate::engine) fn take_back(&mut self) {
        while let Some(Back { job, part, carried }) = self.hand.take_back() {
            self.carried(job, part, carried);
        }
    }

    /// A part's data is where it was to go: what was read is done with; what is to be written goes to the disk.
    fn carried(&mut self, number: usize, part: u32, carried: Carried) {
        let Carried { buffer, digests } = carried;
        let Some(work) = self.jobs.get(number).and_then(|job| job.parts.get(part as usize)).copied() else { return };
        let len = work.bytes as usize;
        match (work.work, digests) {
            (Work::Write, Some(digests)) => {
                if let Some(job) = self.jobs.get_mut(number) {
                    job.gathered(part, digests);
                }
                let file = Arc::clone(&self.image.file);
                self.submit(number, part, &file, Operation::Write { at: work.at, len, buffer });
            }
            (of, digests) => {
                if of == Work::Write {
                    self.moving = self.moving.saturating_sub(len);
                }
                let status = if digests.is_some() { Status::Ok } else { Status::Failed };
                self.note_moved(number, part, digests);
                self.put_back(Some(buffer));
                self.part_done(number, status);
            }
        }
    }

    /// Copy what is to be written out of the guest.
    pub(in crate::engine) fn gather(&mut self, number: usize, part: u32, into: &mut [u8]) -> Option<()> {
        let digester = self.map.as_ref().map(|_| self.digester);
        self.has_moved += into.len();
        let job = self.jobs.get_mut(number)?;
        let digests = job.carry(part, digester, into)?;
        job.gathered(part, digests);
        Some(())
    }

    /// What was moved is noted. `digests`: of what was read; of what was written the job has them.
    pub(in crate::engine) fn note_moved(&mut self, number: usize, index: u32, digests: Option<Vec<Digest>>) {
        let Some(job) = self.jobs.get(number) else { return };
        let Some(&part) = job.parts.get(index as usize) else { return };
        let Some((map, memory)) = self.map.as_mut().filter(|_| matches!(part.work, Work::Read | Work::Write)) else {
            return;
        };
        let is_ours = Arc::ptr_eq(memory, &job.memory) && !job.stale;
        let begin = whole(part.at, part.bytes).next().map_or(0, |(_, offset)| offset as u64);
        let kept = job.digests.get(index as usize);
        let mut digests = digests.as_ref().or(kept).into_iter().flatten();
        for ((block, _), frame) in whole(part.at, part.bytes).zip(job.frames(part.offset + begin)) {
            match (frame, digests.next()) {
                (Some(frame), Some(digest)) if is_ours => map.moved(block, frame, *digest),
                _ if part.work == Work::Write => map.changed(block),
                _ => {}
            }
        }
    }

    pub(in crate::engine) fn part_done(&mut self, number: usize, status: Status) {
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
    pub(super) fn finish(&mut self, number: usize) {
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
