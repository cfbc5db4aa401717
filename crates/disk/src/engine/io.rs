//! The engine's I/O: the io_uring ring, its buffers, and the bytes in progress.

use super::ids::{ConnectionId, PartId};
use rekindle_kernel::uring::{Buffer, Completion, HALF_HUGE_PAGE_BYTES, IdleRing, Operation, Ring};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Most operations in progress.
const RING_ENTRIES: u32 = 256;
/// Entries of the ring that requests leave free for waiting for kicks.
const RESERVED_ENTRIES: usize = 40;
/// Most bytes in progress. A single operation may exceed this limit.
const MAX_BYTES_IN_FLIGHT: usize = 64 << 20;
/// Most bytes of unused buffers that are kept.
const MAX_POOLED_BYTES: usize = 16 << 20;
/// Most bytes to copy between buffers and the guest before new operations are submitted, so that the disk is not idle.
pub(super) const MAX_COPIED_BYTES: usize = 256 << 10;

/// The origin of a completion: 64 bits that the ring returns with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    /// Another thread has queued a command or a result.
    Wake,
    /// A queue was kicked.
    Kick(ConnectionId, u16),
    Part(PartId),
    /// An operation of the redo log itself has completed.
    LogOperation(u32),
}

impl Token {
    pub fn pack(self) -> u64 {
        match self {
            Self::Wake => 0,
            Self::Kick(connection_id, queue) => 1 << 62 | u64::from(connection_id.0) << 16 | u64::from(queue),
            Self::Part(PartId { request, part }) => 2 << 62 | u64::from(request) << 24 | u64::from(part),
            Self::LogOperation(number) => 3 << 62 | u64::from(number),
        }
    }

    pub fn unpack(token: u64) -> Self {
        match token >> 62 {
            0 => Self::Wake,
            1 => Self::Kick(ConnectionId((token >> 16) as u32), token as u16),
            3 => Self::LogOperation(token as u32),
            _ => Self::Part(PartId { request: (token >> 24) as u32, part: (token & 0xff_ffff) as u32 }),
        }
    }
}

/// A pool of unused buffers.
#[derive(Default)]
pub(super) struct BufferPool {
    unused: Vec<Buffer>,
    /// Bytes of all unused buffers.
    bytes: usize,
}

impl BufferPool {
    /// Returns a buffer of at least `bytes` bytes.
    pub fn take(&mut self, bytes: usize) -> Buffer {
        let is_suitable = |buffer: &Buffer| buffer.len() >= bytes && buffer.len() <= bytes.max(1) * 4;
        match self.unused.iter().rposition(is_suitable) {
            Some(position) => {
                let buffer = self.unused.swap_remove(position);
                self.bytes -= buffer.len();
                buffer
            }
            None if bytes > HALF_HUGE_PAGE_BYTES / 2 && bytes <= HALF_HUGE_PAGE_BYTES => {
                let [first, second] = Buffer::pair();
                self.put_back(Some(second));
                first
            }
            None => Buffer::new(bytes),
        }
    }

    pub fn put_back(&mut self, buffer: Option<Buffer>) {
        let Some(buffer) = buffer else { return };
        if self.bytes + buffer.len() <= MAX_POOLED_BYTES {
            self.bytes += buffer.len();
            self.unused.push(buffer);
        }
    }
}

/// The error that the ring has no free entry for the operation.
#[derive(Debug)]
pub(super) struct RingFull;

/// Creates the ring of an engine.
///
/// # Errors
/// If io_uring is unavailable.
pub fn create_ring() -> io::Result<IdleRing> {
    IdleRing::new(RING_ENTRIES)
}

/// The ring, its unused buffers, and the bytes in progress.
pub(super) struct DiskIo {
    ring: Ring,
    pub buffers: BufferPool,
    /// Bytes of all operations in progress.
    pub bytes_in_flight: usize,
    /// Bytes copied since operations were last submitted.
    pub copied_bytes: usize,
}

impl DiskIo {
    /// Enables the ring, which belongs to the calling thread from then on.
    ///
    /// # Errors
    /// Errors of `io_uring_register(2)`.
    pub fn new(ring: IdleRing) -> io::Result<Self> {
        let ring = ring.enable()?;
        Ok(Self { ring, buffers: BufferPool::default(), bytes_in_flight: 0, copied_bytes: 0 })
    }

    /// Requests one completion with `token` when `descriptor` is readable.
    pub fn listen(&mut self, descriptor: &Arc<OwnedFd>, token: Token) {
        // There are far fewer queues than the ring has entries, and requests leave some entries to them: `has_room`.
        if self.ring.when_readable(descriptor, token.pack()).is_err() {
            tracing::error!("the io_uring ring has no space to wait for {token:?}");
        }
    }

    /// Ends the wait that [`Self::listen`] has started.
    pub fn stop_listening(&mut self, token: Token) {
        self.ring.cancel(token.pack());
    }

    pub fn begin(&mut self, file: &Arc<File>, operation: Operation, token: Token) -> Result<(), RingFull> {
        self.ring.begin(file, operation, token.pack()).map_err(|_| RingFull)
    }

    /// Returns whether an operation of a request that moves `bytes` bytes may begin.
    pub fn has_room(&self, bytes: usize) -> bool {
        let free_entries = (RING_ENTRIES as usize).saturating_sub(self.ring.under_way());
        let is_within_limit =
            bytes == 0 || self.bytes_in_flight == 0 || self.bytes_in_flight + bytes <= MAX_BYTES_IN_FLIGHT;
        free_entries > RESERVED_ENTRIES && is_within_limit
    }

    /// Returns the number of entries for work that nothing waits for. Half of the ring is kept for requests, and for
    /// waiting for kicks.
    pub fn spare_entries(&self) -> usize {
        (RING_ENTRIES as usize / 2).saturating_sub(self.ring.under_way())
    }

    /// Returns whether more than [`MAX_COPIED_BYTES`] were copied since the last call that returned true, or since
    /// operations were submitted.
    pub fn take_copied_much(&mut self) -> bool {
        let has_copied_much = self.copied_bytes > MAX_COPIED_BYTES;
        if has_copied_much {
            self.copied_bytes = 0;
        }
        has_copied_much
    }

    pub fn submit(&mut self) -> io::Result<()> {
        self.ring.submit()
    }

    /// Submits operations and waits for a completion, for at most `limit`.
    pub fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.ring.wait(limit)
    }

    pub fn completions(&mut self) -> Vec<Completion> {
        self.ring.completions()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unpacked_token_equals_the_packed_one() {
        for token in [
            Token::Wake,
            Token::Kick(ConnectionId(7), 3),
            Token::Kick(ConnectionId(u32::MAX), u16::MAX),
            Token::Part(PartId { request: u32::MAX, part: 0xff_ffff }),
            Token::LogOperation(u32::MAX),
        ] {
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }
}
