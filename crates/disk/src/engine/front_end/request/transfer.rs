//! Moves the parts of requests between the disk and the guest, and answers the requests.
//!
//! ```text
//!  waiting ──start_part──> operation of the ring ──part_completed──> end_part ──last one──> finish_request
//!     ^                                                  │
//!     └──────────── interrupted, or no space ────────────┘
//! ```

use super::{Part, PartBlocks, Work, divide};
use crate::engine::catalog::{BlockCatalog, Change, DataLocation, EntryResult, SyncTarget, WriteTarget};
use crate::engine::front_end::FrontEnd;
use crate::engine::ids::PartId;
use crate::engine::io::Token;
use crate::redo::format::{EntryKind, PAGE_BYTES};
use crate::redo::log::{LogEntry, SpaceLimit};
use crate::report::warn_limited;
use crate::request::{DiskRange, RequestStatus};
use rekindle_kernel::uring::{Buffer, Operation};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Returns whether an operation with this error is repeated unchanged.
fn is_interrupted(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
}

/// Returns whether an error means that there is no space.
fn is_out_of_space(error: &io::Error) -> bool {
    // A limit of the process or a quota has the same effect as a full disk, and can be lifted, too.
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
}

/// The meaning of an operation's result for its part.
enum PartOutcome {
    /// A read has its data in the buffer. Any other operation is complete.
    Moved,
    /// The operation need not be done: a discard that the file system does not support.
    Skipped,
    Interrupted,
    /// The file system cannot zero a range.
    NeedsWrittenZeros,
    Failed,
}

impl<B: BlockCatalog> FrontEnd<B> {
    fn part(&self, id: PartId) -> Option<Part> {
        self.requests.get(id.request as usize)?.parts.get(id.part as usize).copied()
    }

    fn set_entry(&mut self, id: PartId, entry: Option<LogEntry>) {
        let parts = self.requests.get_mut(id.request as usize).map(|active| &mut active.parts);
        if let Some(part) = parts.and_then(|parts| parts.get_mut(id.part as usize)) {
            part.entry = entry;
        }
    }

    /// Starts waiting parts while there is space and the rate limit allows it.
    pub(in crate::engine) fn start_waiting_parts(&mut self) {
        self.throttled_until = None;
        self.blocks.retry_waiting_if_due(&mut self.waiting_parts);
        while let Some(&id) = self.waiting_parts.front() {
            let Some(part) = self.part(id) else {
                self.waiting_parts.pop_front();
                continue;
            };
            let bytes_to_move = if part.work.moves_data() { part.bytes as usize } else { 0 };
            if !self.io.has_room(bytes_to_move) || !self.admit(id, &part) {
                break;
            }
            self.waiting_parts.pop_front();
            self.start_part(id, &part);
            // Copying takes time: submit operations, so that the disk works meanwhile.
            if part.work == Work::Write && self.io.take_copied_much() {
                // If submitting fails, the next wait reports the error.
                let _ = self.io.submit();
            }
        }
    }

    /// Asks the rate limit about the request of a part. Returns whether the part may start. If not, the part may
    /// start at `throttled_until`.
    fn admit(&mut self, id: PartId, part: &Part) -> bool {
        let Some(active) = self.requests.get_mut(id.request as usize) else { return true };
        if active.is_admitted || !part.work.moves_data() {
            return true;
        }
        let bytes = active.parts.iter().map(|part| part.bytes).sum();
        // A QEMU that stops its guest waits for these requests, and does nothing else meanwhile.
        if !self.stopping_queues.is_empty() {
            self.throttle.charge(bytes);
        } else if let Err(wait) = self.throttle.admit(bytes, Instant::now()) {
            self.throttled_until = Some(Instant::now() + wait);
            return false;
        }
        active.is_admitted = true;
        true
    }

    fn start_part(&mut self, id: PartId, part: &Part) {
        match part.work {
            Work::Read(location) => self.start_read(id, part, location),
            Work::Sync(target) => self.start_sync(id, target),
            Work::Write | Work::Discard | Work::Zero { .. } | Work::ZeroByWriting => self.start_change(id, part),
        }
    }

    fn start_read(&mut self, id: PartId, part: &Part, location: DataLocation) {
        let len = part.bytes as usize;
        let mut buffer = self.io.buffers.take(len);
        self.io.bytes_in_flight += len;
        if location == DataLocation::Zeroes {
            buffer.get_mut(..len).unwrap_or_default().fill(0);
            return self.part_completed(id, Ok(len), Some(buffer));
        }
        let source = self.blocks.file_position(location, part.disk_offset);
        self.begin_operation(id, &source.file, Operation::Read { at: source.offset, len, buffer });
    }

    fn start_sync(&mut self, id: PartId, target: SyncTarget) {
        match self.blocks.file_to_sync(target) {
            Some(file) => self.begin_operation(id, &file, Operation::Sync),
            None => self.end_part(id.request, RequestStatus::Ok),
        }
    }

    fn start_change(&mut self, id: PartId, part: &Part) {
        let change = Change { disk_offset: part.disk_offset, bytes: part.bytes, kind: part.work.entry_kind() };
        let limit = self.space_limit(id);
        match self.blocks.reserve(id, change, part.entry, limit) {
            WriteTarget::Image => self.change_image(id, part),
            WriteTarget::Entry(entry) => {
                self.set_entry(id, Some(entry));
                self.write_entry(id, part, &entry);
            }
            WriteTarget::Wait => self.set_entry(id, None),
        }
    }

    /// Decides whether a write must wait when the redo log has reached its limit.
    fn space_limit(&self, id: PartId) -> SpaceLimit {
        // The requests of a QEMU that stops its guest, or has disconnected, need not wait for a checkpoint; later
        // requests wait for them.
        let connection_id = self.requests.get(id.request as usize).map(|active| active.connection_id);
        let is_connected = connection_id.is_some_and(|connection_id| self.connections.contains_key(&connection_id));
        let must_complete = !self.stopping_queues.is_empty() || !is_connected || self.is_ending;
        if must_complete { SpaceLimit::MayBeExceeded } else { SpaceLimit::Enforced }
    }

    /// Starts the operation that changes the image.
    fn change_image(&mut self, id: PartId, part: &Part) {
        let Part { disk_offset, bytes, .. } = *part;
        let len = bytes as usize;
        let operation = match part.work {
            Work::Discard | Work::Zero { hole: true } => Operation::Allocate {
                mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                at: disk_offset,
                len: bytes,
            },
            Work::Zero { hole: false } => Operation::Allocate {
                mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
                at: disk_offset,
                len: bytes,
            },
            Work::Read(_) | Work::Write | Work::Sync(_) | Work::ZeroByWriting => {
                let mut buffer = self.io.buffers.take(len);
                let data = buffer.get_mut(..len).unwrap_or_default();
                if part.work == Work::ZeroByWriting {
                    data.fill(0);
                } else if self.copy_data(id, data).is_none() {
                    self.io.buffers.put_back(Some(buffer));
                    return self.end_part(id.request, RequestStatus::Failed);
                }
                self.io.bytes_in_flight += len;
                Operation::Write { at: disk_offset, len, buffer }
            }
        };
        let image = self.blocks.file_position(DataLocation::Image, disk_offset).file;
        self.begin_operation(id, &image, operation);
    }

    /// Writes an entry of the redo log: a header, and the data if the entry has data.
    fn write_entry(&mut self, id: PartId, part: &Part, entry: &LogEntry) {
        let mut buffer = self.io.buffers.take(entry.length() as usize);
        let (header, after_header) = buffer.split_at_mut(PAGE_BYTES as usize);
        let data: &[u8] = match entry.kind {
            EntryKind::Data => {
                let (data, padding) = after_header.split_at_mut(part.bytes as usize);
                padding.fill(0);
                if self.copy_data(id, data).is_none() {
                    self.io.buffers.put_back(Some(buffer));
                    return self.fail_entry(id, entry);
                }
                data
            }
            EntryKind::Zeroes | EntryKind::Hole => &[],
        };
        let has_header = self.blocks.write_entry_header(entry, data, header).is_some();
        let Some(file) = self.blocks.entry_file(entry).filter(|_| has_header) else { return };
        if part.work.moves_data() {
            self.io.bytes_in_flight += part.bytes as usize;
        }
        let operation = Operation::Write { at: entry.offset, len: entry.length() as usize, buffer };
        if self.io.begin(&file, operation, Token::Part(id)).is_err() {
            // There is space in the ring: it was checked before.
            self.fail_entry(id, entry);
        }
    }

    fn fail_entry(&mut self, id: PartId, entry: &LogEntry) {
        self.blocks.record_entry(entry, EntryResult::Failed);
        self.end_part(id.request, RequestStatus::Failed);
    }

    fn begin_operation(&mut self, id: PartId, file: &Arc<File>, operation: Operation) {
        if self.io.begin(file, operation, Token::Part(id)).is_err() {
            // There is space in the ring: it was checked before.
            self.end_part(id.request, RequestStatus::Failed);
        }
    }

    /// Handles the completion of a part's operation.
    pub(in crate::engine) fn part_completed(
        &mut self,
        id: PartId,
        result: io::Result<usize>,
        mut buffer: Option<Buffer>,
    ) {
        let Some(part) = self.part(id) else { return };
        if buffer.is_some() && part.work.moves_data() {
            self.io.bytes_in_flight = self.io.bytes_in_flight.saturating_sub(part.bytes as usize);
        }
        if let (Some(entry), true) = (part.entry, buffer.is_some()) {
            return self.entry_completed(id, &entry, result, buffer);
        }
        let result = match part.work {
            Work::Sync(target) => self.blocks.record_sync(target, result),
            _ => result,
        };
        let status = match self.interpret_result(&part, &result) {
            PartOutcome::Moved => match self.copy_read_data(id, &part, buffer.as_mut()) {
                Some(()) => return self.finish_move(id, buffer, 0),
                None => RequestStatus::Failed,
            },
            PartOutcome::Skipped => RequestStatus::Ok,
            PartOutcome::Failed => RequestStatus::Failed,
            PartOutcome::NeedsWrittenZeros => return self.zero_by_writing(id, &part),
            PartOutcome::Interrupted => {
                self.waiting_parts.push_back(id);
                return self.io.buffers.put_back(buffer);
            }
        };
        self.io.buffers.put_back(buffer);
        self.end_part(id.request, status);
    }

    /// Interprets the result of an operation, and logs failures.
    fn interpret_result(&self, part: &Part, result: &io::Result<usize>) -> PartOutcome {
        let path = self.blocks.image_path().display();
        match result {
            Ok(moved) if part.work.moves_data() && *moved as u64 != part.bytes => {
                warn_limited!("{path}: {moved} bytes instead of {} at {}", part.bytes, part.disk_offset);
                PartOutcome::Failed
            }
            Ok(_) => PartOutcome::Moved,
            Err(e) if is_interrupted(e) => PartOutcome::Interrupted,
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) && part.work == Work::Discard => PartOutcome::Skipped,
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) && matches!(part.work, Work::Zero { .. }) => {
                PartOutcome::NeedsWrittenZeros
            }
            Err(e) => {
                warn_limited!("{path}: {} of {} bytes at {}: {e}", part.work.name(), part.bytes, part.disk_offset);
                PartOutcome::Failed
            }
        }
    }

    /// Copies the data of a read to the guest. `None`: the request's buffers are outside the guest's memory.
    fn copy_read_data(&mut self, id: PartId, part: &Part, buffer: Option<&mut Buffer>) -> Option<()> {
        match (part.work, buffer) {
            (Work::Read(_), Some(buffer)) => self.copy_data(id, buffer.get_mut(..part.bytes as usize)?),
            _ => Some(()),
        }
    }

    /// Handles the completion of a write into the redo log. The write is tried again later if there is no space.
    fn entry_completed(&mut self, id: PartId, entry: &LogEntry, result: io::Result<usize>, buffer: Option<Buffer>) {
        match result {
            Ok(written) if written as u64 == entry.length() => {
                self.blocks.record_entry(entry, EntryResult::Written);
                return self.finish_move(id, buffer, PAGE_BYTES as usize);
            }
            // A short write: there is no space for the rest.
            Ok(_) => self.blocks.record_entry(entry, EntryResult::NoSpace { part: id, error: None }),
            Err(e) if is_interrupted(&e) => self.waiting_parts.push_back(id),
            Err(e) if is_out_of_space(&e) => {
                self.blocks.record_entry(entry, EntryResult::NoSpace { part: id, error: Some(&e) });
            }
            Err(e) => {
                let path = self.blocks.image_path().display();
                warn_limited!("the redo log of {path}: writing {} bytes: {e}", entry.length());
                self.fail_entry(id, entry);
            }
        }
        self.io.buffers.put_back(buffer);
    }

    /// Writes zeros, for a file system that cannot zero a range.
    fn zero_by_writing(&mut self, id: PartId, part: &Part) {
        let Some(active) = self.requests.get_mut(id.request as usize) else { return };
        let mut parts = divide(Work::ZeroByWriting, DiskRange { start: part.disk_offset, bytes: part.bytes }, 0);
        let (Some(replaced), Some(first)) = (active.parts.get_mut(id.part as usize), parts.next()) else { return };
        *replaced = first;
        self.waiting_parts.push_back(id);
        for part in parts {
            self.waiting_parts.push_back(PartId { part: active.parts.len() as u32, ..id });
            active.parts.push(part);
            active.unfinished_parts += 1;
        }
    }

    /// Moves the data of a part between the buffer and the guest.
    fn copy_data(&mut self, id: PartId, buffer: &mut [u8]) -> Option<()> {
        self.io.copied_bytes += buffer.len();
        self.requests.get(id.request as usize)?.copy_part(id.part, buffer)
    }

    /// Completes a part whose data begins at byte `data_start` of the buffer, and records the blocks that it has moved.
    fn finish_move(&mut self, id: PartId, buffer: Option<Buffer>, data_start: usize) {
        // Must be done before the request ends, which may be now.
        let active = self.requests.get(id.request as usize).filter(|_| self.blocks.records_moves());
        let moved = active.and_then(|active| active.moved_blocks(id.part));
        self.end_part(id.request, RequestStatus::Ok);
        let unused = match (moved, buffer) {
            (Some(PartBlocks { moved, first_offset }), Some(buffer)) => {
                self.blocks.record_moved(moved, buffer, data_start + first_offset)
            }
            (_, buffer) => buffer,
        };
        self.io.buffers.put_back(unused);
    }

    /// Records that a part of a request has ended, and answers the request after its last part.
    fn end_part(&mut self, request: u32, status: RequestStatus) {
        let Some(active) = self.requests.get_mut(request as usize) else { return };
        if status != RequestStatus::Ok {
            active.status = status;
        }
        active.unfinished_parts = active.unfinished_parts.saturating_sub(1);
        if active.unfinished_parts == 0 {
            self.finish_request(request);
        }
    }

    /// Answers a request that has no unfinished part.
    pub(super) fn finish_request(&mut self, request_number: u32) {
        let Some(active) = self.requests.try_remove(request_number as usize) else { return };
        self.requested_bytes = self.requested_bytes.saturating_sub(active.bytes);
        let is_ok = active.status == RequestStatus::Ok;
        if !is_ok {
            // The content after a failed write is unknown.
            active.ranges().for_each(|range| self.blocks.forget_moved(range));
        }
        let written = if is_ok { active.request.written } else { 1 };
        let is_answered = active.memory.write(active.request.status_address, &[active.status as u8]).is_some();
        self.answer_chain(active.connection_id, active.queue_index, active.head, if is_answered { written } else { 0 });
        self.has_room = true;
    }
}
