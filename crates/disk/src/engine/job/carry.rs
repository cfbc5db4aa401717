//! Reads and writes the parts of a request, and answers it.

use super::{Part, PartLocation, Work, cut};
use crate::block::touched;
use crate::engine::{DEPTH, Engine, FEED, Token};
use crate::report::warn_limited;
use crate::request::{Range, RequestStatus};
use rekindle_kernel::uring::{Buffer, Operation};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Most bytes in progress, except that one part always may be.
const MOST_BYTES: usize = 64 << 20;
/// Entries of the ring that are kept for waiting for kicks.
const KEPT: usize = 40;

impl Engine {
    /// Starts waiting parts, as far as there is space and the rate limit allows.
    pub(in crate::engine) fn begin_waiting(&mut self) {
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
                // A QEMU that stops its guest waits for these requests, and does nothing else meanwhile.
                if !self.stopping.is_empty() {
                    self.throttle.charge(bytes);
                } else if let Err(wait) = self.throttle.admit(bytes, Instant::now()) {
                    self.due = Some(Instant::now() + wait);
                    break;
                }
                job.admitted = true;
            }
            self.waiting.pop_front();
            self.begin_part(number, part, work);
            // Copying takes time: let the disk work meanwhile.
            if work.work == Work::Write && self.has_moved > FEED {
                self.has_moved = 0;
                // If that fails, the next wait reports it.
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
            PartLocation::Segment { epoch, .. } => self.logged.as_ref().and_then(|logged| logged.log.file(epoch)),
            _ => None,
        };
        match (work, place) {
            (Work::Read, PartLocation::Zeroes) => {
                let mut buffer = self.buffer(len);
                buffer.fill(0);
                self.moving += len;
                return self.part_ended(number, part, Ok(len), Some(buffer));
            }
            // Merged since, and the image was synced.
            (Work::Sync, PartLocation::Segment { .. }) if segment.is_none() => {
                return self.part_done(number, RequestStatus::Ok);
            }
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
                    PartLocation::Segment { at, .. } if segment.is_some() => at,
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
                if buffer.get_mut(..len).and_then(|data| self.copy(number, part, data)).is_none() {
                    self.put_back(Some(buffer));
                    return self.part_done(number, RequestStatus::Failed);
                }
                Operation::Write { at, len, buffer }
            }
        };
        if let Operation::Read { len, .. } | Operation::Write { len, .. } = &operation {
            self.moving += len;
        }
        let file = segment.map_or_else(|| Arc::clone(&self.image.file), |segment| segment.0);
        if self.ring.begin(&file, operation, Token::Part(number as u32, part).pack()).is_err() {
            // There is space: it was checked before.
            self.part_done(number, RequestStatus::Failed);
        }
    }

    pub(in crate::engine) fn part_ended(
        &mut self,
        number: usize,
        part: u32,
        result: io::Result<usize>,
        mut buffer: Option<Buffer>,
    ) {
        let Some(work) = self.jobs.get(number).and_then(|job| job.parts.get(part as usize)).copied() else { return };
        if buffer.is_some() && matches!(work.work, Work::Read | Work::Write | Work::ZeroByWriting) {
            self.moving = self.moving.saturating_sub(work.bytes as usize);
        }
        if let (PartLocation::Entry(placed), true) = (work.place, buffer.is_some()) {
            return self.appended((number, part), &placed, result, buffer);
        }
        let result = if work.work == Work::Sync { self.flushed(work.place, result) } else { result };
        let status = match result {
            Ok(moved) if buffer.is_some() && moved as u64 != work.bytes => {
                warn_limited!("{}: {moved} bytes instead of {} at {}", self.image.path.display(), work.bytes, work.at);
                RequestStatus::Failed
            }
            Ok(_) => {
                let copied = match (work.work, &mut buffer) {
                    (Work::Read, Some(buffer)) => {
                        buffer.get_mut(..work.bytes as usize).and_then(|data| self.copy(number, part, data))
                    }
                    _ => Some(()),
                };
                if copied.is_some() {
                    return self.moved(number, part, buffer, 0);
                }
                RequestStatus::Failed
            }
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {
                self.waiting.push_back((number, part));
                self.put_back(buffer);
                return;
            }
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) && work.work == Work::Discard => RequestStatus::Ok,
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) && matches!(work.work, Work::Zero { .. }) => {
                return self.zero_by_writing(number, part, work);
            }
            Err(e) => {
                warn_limited!(
                    "{}: {:?} of {} bytes at {}: {e}",
                    self.image.path.display(),
                    work.work,
                    work.bytes,
                    work.at
                );
                RequestStatus::Failed
            }
        };
        self.put_back(buffer);
        self.part_done(number, status);
    }

    /// Writes zeros, for a file system that cannot zero a range.
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

    /// Moves the data of a part between the buffer and the guest.
    pub(in crate::engine) fn copy(&mut self, number: usize, part: u32, bytes: &mut [u8]) -> Option<()> {
        self.has_moved += bytes.len();
        self.jobs.get(number)?.copy(part, bytes)
    }

    /// Completes a part whose data begins at byte `at` of the buffer.
    pub(in crate::engine) fn moved(&mut self, number: usize, part: u32, buffer: Option<Buffer>, at: usize) {
        let note = self.to_note(number, part);
        self.part_done(number, RequestStatus::Ok);
        if let Some(buffer) = buffer {
            self.note_moved(note, buffer, at);
        }
    }

    pub(in crate::engine) fn part_done(&mut self, number: usize, status: RequestStatus) {
        let Some(job) = self.jobs.get_mut(number) else { return };
        if status != RequestStatus::Ok {
            job.status = status;
        }
        job.left = job.left.saturating_sub(1);
        if job.left == 0 {
            self.finish(number);
        }
    }

    pub(super) fn finish(&mut self, number: usize) {
        let Some(job) = self.jobs.try_remove(number) else { return };
        self.taken_bytes = self.taken_bytes.saturating_sub(job.bytes);
        if job.status != RequestStatus::Ok
            && let Some((map, _)) = &mut self.map
        {
            // The content after a failed write is unknown.
            job.ranges().for_each(|range| map.take_all(touched(range.at, range.bytes), |_| ()));
        }
        let written = if job.status == RequestStatus::Ok { job.request.written } else { 1 };
        let answered = job.memory.write(job.request.status, &[job.status as u8]);
        self.answer_chain(job.session, job.queue, job.head, if answered.is_some() { written } else { 0 });
        self.has_room = true;
    }
}
