//! Divides requests into parts.

use super::{ActiveRequest, Part, Piece, Work, divide, for_each_piece};
use crate::block::{BLOCK, whole};
use crate::block_map::Frame;
use crate::descriptor_chain::walk;
use crate::digest::Digest;
use crate::engine::CHUNK;
use crate::engine::catalog::{BlockCatalog, DataLocation, DurabilityLost, PartId};
use crate::engine::command::FrontendId;
use crate::engine::front_end::FrontEnd;
use crate::memory::Memory;
use crate::report::warn_limited;
use crate::request::{self, IDENTITY, Kind, Range, Request, RequestStatus};
use std::sync::Arc;

/// Bytes of the disk that cost as much as a short request.
const BYTES_PER_COST: u64 = 1 << 20;

/// A block of the retained cache that was copied to the guest.
struct ServedBlock {
    block: u64,
    /// Offset in the request's data.
    offset: u64,
    digest: Digest,
    frame: Option<Frame>,
}

impl<B: BlockCatalog> FrontEnd<B> {
    /// Begins the request whose first descriptor is `head`. Returns the request's cost, in short requests.
    pub(in crate::engine::front_end) fn begin_request(
        &mut self,
        session: FrontendId,
        queue: u16,
        head: u16,
        memory: &Arc<Memory>,
    ) -> u64 {
        let Some(request) = self.parse_request(session, queue, head, memory) else {
            // The chain has no status byte to write; the guest gets its descriptors back.
            self.answer_chain(session, queue, head, 0);
            return 1;
        };
        if let Ok(kind) = &request.what {
            self.blocks.record_request(kind);
        }
        let active = ActiveRequest {
            session,
            queue,
            head,
            memory: Arc::clone(memory),
            sequence: self.next_sequence,
            request,
            parts: Vec::new(),
            bytes: 0,
            unfinished_parts: 0,
            status: RequestStatus::Ok,
            is_admitted: false,
            is_stale: false,
        };
        self.next_sequence += 1;
        let number = self.requests.insert(active) as u32;
        self.plan(number);
        self.start_planned(number)
    }

    /// Queues the parts of a planned request, or answers a request that has no parts. Returns the request's cost.
    fn start_planned(&mut self, number: u32) -> u64 {
        let Some(active) = self.requests.get_mut(number as usize) else { return 1 };
        let cost = active.ranges().map(|range| 1 + range.bytes / BYTES_PER_COST).sum::<u64>().max(1);
        active.unfinished_parts = active.parts.len();
        let is_data = |part: &&Part| !matches!(part.work, Work::Discard | Work::Sync(_));
        active.bytes = active.parts.iter().filter(is_data).map(|part| part.bytes).sum();
        self.requested_bytes += active.bytes;
        if active.parts.is_empty() {
            self.finish_request(number);
        } else {
            self.waiting.extend((0..active.parts.len() as u32).map(|part| PartId { request: number, part }));
        }
        cost
    }

    /// Parses a request. `None`: the chain of descriptors is invalid, and cannot even be answered with an error.
    fn parse_request(&self, session: FrontendId, queue: u16, head: u16, memory: &Memory) -> Option<Request> {
        let table = self.descriptor_table(session, queue)?;
        let read = |at: u64, into: &mut [u8]| memory.read(at, into);
        match walk(read, table.address, table.size, head) {
            Ok(segments) => request::parse(segments.into_iter(), read, self.blocks.disk()).ok(),
            Err(e) => {
                warn_limited!("queue {queue}: a chain of descriptors leads nowhere: {e}");
                None
            }
        }
    }

    /// Determines the parts of a request, and does the work that needs no disk.
    fn plan(&mut self, number: u32) {
        let Some(active) = self.requests.get(number as usize) else { return };
        let planned = match &active.request.what {
            Err(status) => Err(*status),
            Ok(Kind::Identity) => self.answer_identity(active),
            Ok(Kind::Flush) => self.plan_flush(),
            Ok(Kind::Read(range)) => {
                let range = *range;
                return self.plan_read(number, range);
            }
            Ok(Kind::Write(range)) => Ok(divide(Work::Write, *range, 0).collect()),
            Ok(Kind::Discard(ranges)) => Ok(plan_changes(ranges.iter().map(|range| (Work::Discard, *range)))),
            Ok(Kind::Zeroes(ranges)) => {
                Ok(plan_changes(ranges.iter().map(|(range, hole)| (Work::Zero { hole: *hole }, *range))))
            }
        };
        if active.changes_disk() {
            self.forget_changed(number);
        }
        if let Some(active) = self.requests.get_mut(number as usize) {
            match planned {
                Ok(parts) => active.parts = parts,
                Err(status) => active.status = status,
            }
        }
    }

    /// Copies the serial number to the guest.
    fn answer_identity(&self, active: &ActiveRequest) -> Result<Vec<Part>, RequestStatus> {
        let mut identity = [0; IDENTITY];
        for (place, byte) in identity.iter_mut().zip(self.serial.bytes()) {
            *place = byte;
        }
        let len = IDENTITY.min(active.request.written.saturating_sub(1) as usize);
        let write = |piece: Piece| active.memory.write(piece.address, identity.get(piece.range())?);
        match for_each_piece(&active.request.data, 0, len, write) {
            Some(()) => Ok(Vec::new()),
            None => Err(RequestStatus::Failed),
        }
    }

    fn plan_flush(&self) -> Result<Vec<Part>, RequestStatus> {
        let mut parts = Vec::new();
        let sync = |target| parts.push(Part { work: Work::Sync(target), at: 0, bytes: 0, offset: 0, entry: None });
        match self.blocks.sync_targets(sync) {
            Ok(()) => Ok(parts),
            Err(DurabilityLost) => Err(RequestStatus::Failed),
        }
    }

    /// Forgets the blocks that a request is about to change.
    fn forget_changed(&mut self, number: u32) {
        let mut is_stale = false;
        let ranges: Vec<Range> =
            self.requests.get(number as usize).into_iter().flat_map(ActiveRequest::ranges).collect();
        for range in ranges {
            self.blocks.forget_blocks(range);
            if self.blocks.records_moves() {
                let others = self.requests.iter_mut().filter(|(other, _)| *other != number as usize);
                for (_, other) in others.filter(|(_, other)| other.overlaps(range)) {
                    (other.is_stale, is_stale) = (true, true);
                }
            }
        }
        if let Some(active) = self.requests.get_mut(number as usize) {
            active.is_stale |= is_stale;
        }
    }

    /// Serves blocks of the retained cache, and plans to read the other blocks.
    fn plan_read(&mut self, number: u32, range: Range) {
        let is_being_written = self.blocks.records_moves()
            && self.requests.iter().any(|(other_number, other)| {
                other_number != number as usize && other.changes_disk() && other.overlaps(range)
            });
        let served = if is_being_written { Vec::new() } else { self.serve_retained(number, range) };
        let mut parts = Vec::new();
        let mut planned = 0;
        for ServedBlock { block, offset, digest, frame } in served {
            self.plan_disk_read(range, planned..offset, &mut parts);
            planned = offset + BLOCK as u64;
            if let Some(frame) = frame {
                self.blocks.record_served(block, frame, digest);
            }
        }
        self.plan_disk_read(range, planned..range.bytes, &mut parts);
        if let Some(active) = self.requests.get_mut(number as usize) {
            (active.parts, active.is_stale) = (parts, is_being_written);
        }
    }

    /// Adds the parts that read these bytes of a range from their location.
    fn plan_disk_read(&self, range: Range, offsets: std::ops::Range<u64>, parts: &mut Vec<Part>) {
        if !offsets.is_empty() {
            let wanted = Range { at: range.at + offsets.start, bytes: offsets.end - offsets.start };
            self.blocks.locate(wanted, |piece, location: DataLocation| {
                parts.extend(divide(Work::Read(location), piece, piece.at - range.at));
            });
        }
    }

    /// Copies blocks of the retained cache to the guest. Returns the copied blocks.
    fn serve_retained(&mut self, number: u32, range: Range) -> Vec<ServedBlock> {
        let mut served = Vec::new();
        let first = whole(range.at, range.bytes).next().filter(|_| self.blocks.has_retained_blocks());
        let Some((first_block, first_offset)) = first else { return served };
        let count = whole(range.at, range.bytes).count() as u64;
        let mut buffer = self.io.buffers.take((count as usize * BLOCK).min(CHUNK));
        if let Some(active) = self.requests.get(number as usize) {
            let mut frames = active.frames(first_offset as u64);
            for skipped in (0..count).step_by(CHUNK / BLOCK) {
                let len = ((count - skipped) as usize * BLOCK).min(CHUNK);
                let Some(bytes) = buffer.get_mut(..len) else { break };
                let digests = self.blocks.take_retained(first_block + skipped, bytes);
                let offset = first_offset as u64 + skipped * BLOCK as u64;
                let blocks = RetainedBlocks { first: first_block + skipped, offset, bytes, digests: &digests };
                blocks.copy_to_guest(active, &mut frames, &mut served);
            }
        }
        self.io.buffers.put_back(Some(buffer));
        self.io.copied += served.len() * BLOCK;
        served
    }
}

/// Adjacent blocks that were requested from the retained cache.
struct RetainedBlocks<'a> {
    first: u64,
    /// Offset of the first block in the request's data.
    offset: u64,
    bytes: &'a [u8],
    /// The digest of each block; `None`: the cache does not have the block.
    digests: &'a [Option<Digest>],
}

impl RetainedBlocks<'_> {
    /// Copies the blocks that the cache had to the guest, adjacent blocks together, and adds them to `served`.
    fn copy_to_guest(
        &self,
        active: &ActiveRequest,
        frames: &mut impl Iterator<Item = Option<Frame>>,
        served: &mut Vec<ServedBlock>,
    ) {
        let mut skipped = 0;
        for run in self.digests.chunk_by(|one, next| one.is_some() == next.is_some()) {
            let (position, len) = (skipped * BLOCK, run.len() * BLOCK);
            let offset = self.offset + position as u64;
            let bytes = self.bytes.get(position..position + len).unwrap_or_default();
            let is_copied = run.first().is_some_and(Option::is_some) && active.fill(offset, bytes).is_some();
            for (number, (digest, frame)) in (0..).zip(run.iter().zip(&mut *frames)) {
                if let Some(digest) = digest.filter(|_| is_copied) {
                    let block = self.first + skipped as u64 + number;
                    served.push(ServedBlock { block, offset: offset + number * BLOCK as u64, digest, frame });
                }
            }
            skipped += run.len();
        }
    }
}

/// Returns the parts that change whole ranges without data.
fn plan_changes(changes: impl Iterator<Item = (Work, Range)>) -> Vec<Part> {
    let part = |(work, range): (Work, Range)| Part { work, at: range.at, bytes: range.bytes, offset: 0, entry: None };
    changes.filter(|(_, range)| range.bytes > 0).map(part).collect()
}
