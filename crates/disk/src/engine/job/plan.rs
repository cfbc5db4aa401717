//! Divides requests into parts.

use super::super::command::FrontendId;
use super::{Job, Part, PartLocation, Work, along, cut};
use crate::block::{BLOCK, touched, whole};
use crate::chain::walk;
use crate::digest::Digest;
use crate::engine::{CHUNK, Engine};
use crate::map::Frame;
use crate::memory::Memory;
use crate::report::warn_limited;
use crate::request::{self, Disk, IDENTITY, Kind, Range, RequestStatus};
use std::sync::Arc;

/// Bytes of the disk that cost as much as a short request.
const COST: u64 = 1 << 20;

impl Engine {
    /// Begins a request. `is_new`: it was not taken before. Returns its cost in short requests.
    pub(in crate::engine) fn begin(
        &mut self,
        session: FrontendId,
        queue: u16,
        head: u16,
        memory: &Arc<Memory>,
        is_new: bool,
    ) -> u64 {
        if is_new {
            self.note_taken(session, queue, head);
        }
        let Some((table, size)) = self.table(session, queue) else { return 1 };
        let disk = Disk { capacity: self.capacity, readonly: self.image.mode.readonly };
        let read = |at: u64, into: &mut [u8]| memory.read(at, into);
        let request = match walk(read, table, size, head) {
            Ok(segments) => request::parse(segments.into_iter(), read, disk).ok(),
            Err(e) => {
                warn_limited!("queue {queue}: a chain of descriptors leads nowhere: {e}");
                None
            }
        };
        let Some(request) = request else {
            // There is no status byte to write; the guest gets its descriptors back.
            self.answer_chain(session, queue, head, 0);
            return 1;
        };
        let memory = Arc::clone(memory);
        let (parts, bytes, left, status) = (Vec::new(), 0, 0, RequestStatus::Ok);
        let (serial, admitted, stale) = (self.serial, false, false);
        self.serial += 1;
        let job = Job { session, queue, head, memory, serial, request, parts, bytes, left, status, admitted, stale };
        let number = self.jobs.insert(job);
        self.note_touched(number);
        self.plan(number);
        let Some(job) = self.jobs.get_mut(number) else { return 1 };
        let cost = job.ranges().map(|range| 1 + range.bytes / COST).sum::<u64>().max(1);
        job.left = job.parts.len();
        let is_data = |part: &&Part| !matches!(part.work, Work::Discard | Work::Sync);
        job.bytes = job.parts.iter().filter(is_data).map(|part| part.bytes).sum();
        self.taken_bytes += job.bytes;
        if job.left == 0 {
            self.finish(number);
        } else {
            self.waiting.extend((0..job.parts.len() as u32).map(|part| (number, part)));
        }
        cost
    }

    /// Determines the parts of a job, and does what needs no disk.
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
                    self.fail(number, RequestStatus::Failed);
                }
                return;
            }
            Ok(Kind::Flush) => match self.cut_flush() {
                Some(parts) => parts,
                None => return self.fail(number, RequestStatus::Failed),
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
                    place: PartLocation::Image,
                };
                ranges.iter().filter(|range| range.bytes > 0).map(part).collect()
            }
            Ok(Kind::Zeroes(ranges)) => {
                let part = |(range, hole): &(Range, bool)| Part {
                    work: Work::Zero { hole: *hole },
                    at: range.at,
                    bytes: range.bytes,
                    offset: 0,
                    place: PartLocation::Image,
                };
                ranges.iter().filter(|(range, _)| range.bytes > 0).map(part).collect()
            }
        };
        if !matches!(job.wants(), Ok(Kind::Flush)) {
            self.change(number);
        }
        if let Some(job) = self.jobs.get_mut(number) {
            job.parts = parts;
        }
    }

    /// Forgets the blocks that a job is about to change.
    fn change(&mut self, number: usize) {
        let mut stale = false;
        let ranges: Vec<Range> = self.jobs.get(number).into_iter().flat_map(Job::ranges).collect();
        for range in ranges {
            let blocks = touched(range.at, range.bytes);
            if let Some(retained) = &mut self.retained {
                retained.changed(blocks.clone());
            }
            if let Some((map, _)) = &mut self.map {
                map.take_all(blocks, |_| ());
                for (_, other) in self.jobs.iter_mut().filter(|(of, other)| *of != number && other.touches(range)) {
                    (other.stale, stale) = (true, true);
                }
                self.late.iter_mut().filter(|(_, late)| late.touches(range)).for_each(|(_, late)| late.stale = true);
            }
        }
        if let Some(job) = self.jobs.get_mut(number) {
            job.stale |= stale;
        }
    }

    /// Serves blocks of the retained cache and reads the rest.
    fn plan_read(&mut self, number: usize, range: Range) {
        let is_written = self.map.is_some()
            && self.jobs.iter().any(|(of, other)| of != number && other.changes_disk() && other.touches(range));
        let found = if is_written { Vec::new() } else { self.take_retained(number, range) };
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

    /// Copies blocks of the retained cache to the guest. Returns of each: block, offset in the data, digest, frame.
    fn take_retained(&mut self, number: usize, range: Range) -> Vec<(u64, u64, Digest, Option<Frame>)> {
        let mut found = Vec::new();
        let blocks = whole(range.at, range.bytes);
        let Some((first, begin)) = whole(range.at, range.bytes).next().filter(|_| self.retained.is_some()) else {
            return found;
        };
        let blocks = blocks.count() as u64;
        let mut buffer = self.buffer((blocks as usize * BLOCK).min(CHUNK));
        let (Some(retained), Some(job)) = (&mut self.retained, self.jobs.get(number)) else { return found };
        let mut frames = job.frames(begin as u64);
        for done in (0..blocks).step_by(CHUNK / BLOCK) {
            let bytes = (blocks - done) as usize * BLOCK;
            let bytes = bytes.min(CHUNK);
            let Some(bytes) = buffer.get_mut(..bytes) else { break };
            let digests = retained.take(first + done, bytes);
            let mut next = 0;
            // Adjacent blocks are copied together.
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

    fn fail(&mut self, number: usize, status: RequestStatus) {
        if let Some(job) = self.jobs.get_mut(number) {
            job.status = status;
        }
    }
}
