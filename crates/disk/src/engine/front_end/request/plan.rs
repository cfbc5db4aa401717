//! Begins requests: parses them, divides them into parts, and does the work that needs no disk.

use super::{ActiveRequest, Part, Piece, Work, divide, for_each_piece};
use crate::block::{BLOCK, whole_blocks};
use crate::block_map::Frame;
use crate::descriptor_chain::read_chain;
use crate::digest::Digest;
use crate::engine::MAX_OPERATION_BYTES;
use crate::engine::catalog::{BlockCatalog, DurabilityLost};
use crate::engine::front_end::FrontEnd;
use crate::engine::ids::{ConnectionId, PartId};
use crate::memory::Memory;
use crate::report::warn_limited;
use crate::request::{self, DiskRange, IDENTITY_BYTES, Request, RequestKind, RequestStatus};
use std::sync::Arc;

/// Bytes of the disk that cost as much as a short request.
const BYTES_PER_COST: u64 = 1 << 20;

impl<B: BlockCatalog> FrontEnd<B> {
    /// Begins the request whose first descriptor is `head`. Returns the request's cost, in short requests.
    pub(in crate::engine::front_end) fn begin_request(
        &mut self,
        connection_id: ConnectionId,
        queue_index: u16,
        head: u16,
        memory: &Arc<Memory>,
    ) -> u64 {
        let Some(request) = self.parse_request(connection_id, queue_index, head, memory) else {
            // The chain has no status byte to write; the guest gets its descriptors back.
            self.answer_chain(connection_id, queue_index, head, 0);
            return 1;
        };
        if let Ok(kind) = &request.kind {
            self.blocks.record_request(kind);
        }
        let active = ActiveRequest {
            connection_id,
            queue_index,
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
        let request_number = self.requests.insert(active) as u32;
        self.plan(request_number);
        self.start_planned(request_number)
    }

    /// Parses a request. `None`: the chain of descriptors is invalid, and cannot even be answered with an error.
    fn parse_request(
        &self,
        connection_id: ConnectionId,
        queue_index: u16,
        head: u16,
        memory: &Memory,
    ) -> Option<Request> {
        let table = self.descriptor_table(connection_id, queue_index)?;
        let read = |address: u64, target: &mut [u8]| memory.read(address, target);
        match read_chain(read, table, head) {
            Ok(segments) => request::parse(segments.into_iter(), read, self.blocks.disk_properties()).ok(),
            Err(e) => {
                warn_limited!("queue {queue_index}: a chain of descriptors leads nowhere: {e}");
                None
            }
        }
    }

    /// Determines the parts of a request, and does the work that needs no disk.
    fn plan(&mut self, request_number: u32) {
        let Some(active) = self.requests.get(request_number as usize) else { return };
        let planned = match &active.request.kind {
            Err(status) => Err(*status),
            Ok(RequestKind::Identity) => self.answer_identity(active),
            Ok(RequestKind::Flush) => self.plan_flush(),
            Ok(RequestKind::Read(range)) => {
                let range = *range;
                return self.plan_read(request_number, range);
            }
            Ok(RequestKind::Write(range)) => Ok(divide(Work::Write, *range, 0).collect()),
            Ok(RequestKind::Discard(ranges)) => {
                Ok(ranges.iter().filter_map(|range| plan_change(Work::Discard, *range)).collect())
            }
            Ok(RequestKind::Zero(ranges)) => {
                let parts = ranges.iter().map(|zero| (Work::Zero { hole: zero.may_unmap }, zero.range));
                Ok(parts.filter_map(|(work, range)| plan_change(work, range)).collect())
            }
        };
        if active.changes_disk() {
            self.forget_changed(request_number);
        }
        if let Some(active) = self.requests.get_mut(request_number as usize) {
            match planned {
                Ok(parts) => active.parts = parts,
                Err(status) => active.status = status,
            }
        }
    }

    /// Queues the parts of a planned request, or answers a request that has no parts. Returns the request's cost.
    fn start_planned(&mut self, request_number: u32) -> u64 {
        let Some(active) = self.requests.get_mut(request_number as usize) else { return 1 };
        let cost = active.ranges().map(|range| 1 + range.bytes / BYTES_PER_COST).sum::<u64>().max(1);
        active.unfinished_parts = active.parts.len();
        let is_data = |part: &&Part| !matches!(part.work, Work::Discard | Work::Sync(_));
        active.bytes = active.parts.iter().filter(is_data).map(|part| part.bytes).sum();
        self.requested_bytes += active.bytes;
        if active.parts.is_empty() {
            self.finish_request(request_number);
        } else {
            let part_numbers = 0..active.parts.len() as u32;
            self.waiting_parts.extend(part_numbers.map(|part| PartId { request: request_number, part }));
        }
        cost
    }

    /// Copies the serial number to the guest.
    fn answer_identity(&self, active: &ActiveRequest) -> Result<Vec<Part>, RequestStatus> {
        let mut identity = [0; IDENTITY_BYTES];
        for (target, byte) in identity.iter_mut().zip(self.serial.bytes()) {
            *target = byte;
        }
        let len = IDENTITY_BYTES.min(active.request.written.saturating_sub(1) as usize);
        let to_guest = |piece: Piece| active.memory.write(piece.address, identity.get(piece.range())?);
        match for_each_piece(&active.request.data, 0, len, to_guest) {
            Some(()) => Ok(Vec::new()),
            None => Err(RequestStatus::Failed),
        }
    }

    fn plan_flush(&self) -> Result<Vec<Part>, RequestStatus> {
        let targets = self.blocks.sync_targets().map_err(|DurabilityLost| RequestStatus::Failed)?;
        let part = |target| Part { work: Work::Sync(target), disk_offset: 0, bytes: 0, data_offset: 0, entry: None };
        Ok(targets.into_iter().map(part).collect())
    }

    /// Forgets the blocks that a request is about to change. Other requests in progress that have some of the blocks
    /// become stale, and this one, too.
    fn forget_changed(&mut self, request_number: u32) {
        let mut is_stale = false;
        let ranges: Vec<DiskRange> =
            self.requests.get(request_number as usize).into_iter().flat_map(ActiveRequest::ranges).collect();
        for range in ranges {
            self.blocks.forget_blocks(range);
            if self.blocks.records_moves() {
                let others = self.requests.iter_mut().filter(|(other, _)| *other != request_number as usize);
                for (_, overlapping) in others.filter(|(_, other)| other.overlaps(range)) {
                    (overlapping.is_stale, is_stale) = (true, true);
                }
            }
        }
        if let Some(active) = self.requests.get_mut(request_number as usize) {
            active.is_stale |= is_stale;
        }
    }

    /// Serves blocks of the retained cache, and plans to read the other blocks.
    fn plan_read(&mut self, request_number: u32, range: DiskRange) {
        let is_being_written = self.blocks.records_moves()
            && self.requests.iter().any(|(other_number, other)| {
                other_number != request_number as usize && other.changes_disk() && other.overlaps(range)
            });
        let served = if is_being_written { Vec::new() } else { self.serve_retained(request_number, range) };
        let mut parts = Vec::new();
        let mut planned_bytes = 0;
        for ServedBlock { block, data_offset, digest, frame } in served {
            self.plan_disk_read(range, planned_bytes..data_offset, &mut parts);
            planned_bytes = data_offset + BLOCK as u64;
            if let Some(frame) = frame {
                self.blocks.record_served(block, frame, digest);
            }
        }
        self.plan_disk_read(range, planned_bytes..range.bytes, &mut parts);
        if let Some(active) = self.requests.get_mut(request_number as usize) {
            (active.parts, active.is_stale) = (parts, is_being_written);
        }
    }

    /// Adds the parts that read these bytes of a range from their location.
    fn plan_disk_read(&self, range: DiskRange, offsets: std::ops::Range<u64>, parts: &mut Vec<Part>) {
        if !offsets.is_empty() {
            let unserved = DiskRange { start: range.start + offsets.start, bytes: offsets.end - offsets.start };
            self.blocks.locate(unserved, |piece, location| {
                parts.extend(divide(Work::Read(location), piece, piece.start - range.start));
            });
        }
    }

    /// Copies blocks of the retained cache to the guest. Returns the copied blocks.
    fn serve_retained(&mut self, request_number: u32, range: DiskRange) -> Vec<ServedBlock> {
        let mut served = Vec::new();
        let first = whole_blocks(range.start, range.bytes).next().filter(|_| self.blocks.has_retained_blocks());
        let Some(first) = first else { return served };
        let count = whole_blocks(range.start, range.bytes).count() as u64;
        let mut buffer = self.io.buffers.take((count as usize * BLOCK).min(MAX_OPERATION_BYTES));
        if let Some(active) = self.requests.get(request_number as usize) {
            let mut frames = active.frames(first.offset as u64);
            for skipped in (0..count).step_by(MAX_OPERATION_BYTES / BLOCK) {
                let len = ((count - skipped) as usize * BLOCK).min(MAX_OPERATION_BYTES);
                let Some(bytes) = buffer.get_mut(..len) else { break };
                let first_block = first.number + skipped;
                let digests = self.blocks.take_retained(first_block, bytes);
                let data_offset = first.offset as u64 + skipped * BLOCK as u64;
                let blocks = RetainedBlocks { first_block, data_offset, bytes, digests: &digests };
                blocks.copy_to_guest(active, &mut frames, &mut served);
            }
        }
        self.io.buffers.put_back(Some(buffer));
        self.io.copied_bytes += served.len() * BLOCK;
        served
    }
}

/// Returns the part that changes a whole range without data; `None` for an empty range.
fn plan_change(work: Work, range: DiskRange) -> Option<Part> {
    let DiskRange { start, bytes } = range;
    (bytes > 0).then_some(Part { work, disk_offset: start, bytes, data_offset: 0, entry: None })
}

/// A block of the retained cache that was copied to the guest.
struct ServedBlock {
    block: u64,
    /// Offset in the request's data.
    data_offset: u64,
    digest: Digest,
    frame: Option<Frame>,
}

/// Adjacent blocks that were requested from the retained cache.
struct RetainedBlocks<'a> {
    first_block: u64,
    /// Offset of the first block in the request's data.
    data_offset: u64,
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
        for run in self.digests.chunk_by(|digest, next| digest.is_some() == next.is_some()) {
            let (position, len) = (skipped * BLOCK, run.len() * BLOCK);
            let run_offset = self.data_offset + position as u64;
            let bytes = self.bytes.get(position..position + len).unwrap_or_default();
            let is_in_cache = run.first().is_some_and(Option::is_some);
            let is_copied = is_in_cache && active.copy_retained(run_offset, bytes).is_some();
            for (index, (digest, frame)) in (0..).zip(run.iter().zip(&mut *frames)) {
                if let Some(digest) = digest.filter(|_| is_copied) {
                    let block = self.first_block + skipped as u64 + index;
                    served.push(ServedBlock { block, data_offset: run_offset + index * BLOCK as u64, digest, frame });
                }
            }
            skipped += run.len();
        }
    }
}
