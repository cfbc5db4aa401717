//! The server's knowledge of a guest's memory, which it keeps over the guest's reboots (CacheMind).
//!
//! | module | contents |
//! |---|---|
//! | this module | which frame of the running guest holds which block, and the records of each request |
//! | `digest_thread` | a thread that digests large pieces |
//! | `retain` | the memory of a previous boot: from the guest's end until no block is left |
//!
//! | owns | life |
//! |---|---|
//! | [`BlockMap`] | from the first queue of a guest until its memory is retained or dropped |
//! | [`RetainedCache`] | from `keep` or a kexec until all its blocks are served, overwritten or dropped |
//! | [`Ledger`] | as long as the server |
//!
//! Moved blocks are recorded when their digest is known. Small pieces are digested immediately, large pieces by
//! another thread after the guest has its answer. Blocks that change on the disk in between are not recorded.

mod digest_thread;
mod retain;

use super::Settings;
use super::catalog::{Direction, MovedBlocks};
use super::io::BufferPool;
use crate::block::{BLOCK, overlapping_blocks};
use crate::block_map::{BlockMap, Frame};
use crate::digest::{Digest, Digester};
use crate::ledger::Ledger;
use crate::memory::Memory;
use crate::request::{DiskRange, RequestKind};
use crate::retained::RetainedCache;
use digest_thread::{DigestThread, DigestedPiece, MIN_PIECE_BYTES, Piece, digests};
use rekindle_kernel::uring::Buffer;
use retain::RetainedState;
use slab::Slab;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// The block map of a guest, and the memory that the map describes.
struct GuestMap {
    blocks: BlockMap,
    memory: Arc<Memory>,
}

/// The block map, the retained cache and the ledger of one disk.
pub(super) struct RebootCache {
    digester: Digester,
    digest_thread: DigestThread,
    /// Moved blocks whose digests are not known yet.
    pending: Slab<MovedBlocks>,
    /// Maintain a block map, for a warm cache.
    is_enabled: bool,
    guest_map: Option<GuestMap>,
    retained: Option<RetainedCache>,
    state: RetainedState,
    /// How long to keep a retained cache.
    retain_for: Option<Duration>,
    /// The blocks that the guest has read or written, for phase-based reboots.
    pub ledger: Ledger,
}

impl RebootCache {
    /// Creates an empty cache. The cache writes to `wake` when [`Self::record_digested`] has work.
    ///
    /// # Errors
    /// If there are no random numbers, or no thread can be started.
    pub fn new(settings: &Settings, wake: Arc<OwnedFd>) -> io::Result<Self> {
        Ok(Self {
            digester: Digester::new()?,
            digest_thread: DigestThread::start(wake)?,
            pending: Slab::new(),
            is_enabled: settings.has_block_map,
            guest_map: None,
            retained: None,
            state: RetainedState::new(),
            retain_for: settings.retain_for,
            ledger: Ledger::default(),
        })
    }

    /// Returns whether moved blocks are recorded.
    pub fn records_moves(&self) -> bool {
        self.guest_map.is_some()
    }

    /// Returns the number of blocks in the block map.
    pub fn mapped_blocks(&self) -> usize {
        self.guest_map.as_ref().map_or(0, |map| map.blocks.len())
    }

    /// Returns the memory of the block map in bytes.
    pub fn map_bytes(&self) -> usize {
        self.guest_map.as_ref().map_or(0, |map| map.blocks.bytes())
    }

    /// Records the blocks of a request in the ledger, before any of it is done.
    pub fn record_request(&mut self, kind: &RequestKind) {
        for range in kind.ranges() {
            let blocks = overlapping_blocks(range.start, range.bytes);
            if kind.changes_disk() {
                self.ledger.record_write(blocks);
            } else {
                self.ledger.record_read(blocks);
            }
        }
    }

    /// Forgets the content of blocks that are about to change.
    pub fn forget_blocks(&mut self, range: DiskRange) {
        let blocks = overlapping_blocks(range.start, range.bytes);
        if let Some(retained) = &mut self.retained {
            retained.changed(blocks.clone());
        }
        if let Some(map) = &mut self.guest_map {
            map.blocks.take_all(blocks, |_| ());
            let overlapping = self.pending.iter_mut().filter(|(_, moved)| moved.overlaps(range));
            overlapping.for_each(|(_, moved)| moved.is_stale = true);
        }
    }

    /// Forgets in which frames blocks are.
    pub fn forget_moved(&mut self, range: DiskRange) {
        if let Some(map) = &mut self.guest_map {
            map.blocks.take_all(overlapping_blocks(range.start, range.bytes), |_| ());
        }
    }

    /// Records that a block with this digest was moved to a frame.
    pub fn record_served(&mut self, block: u64, frame: Frame, digest: Digest) {
        if let Some(map) = &mut self.guest_map {
            map.blocks.moved(block, frame, digest);
        }
    }

    /// Records moved blocks, whose data begins at byte `data_offset` of the buffer. Returns the buffer if it is not
    /// needed any more.
    pub fn record_moved(&mut self, moved: MovedBlocks, buffer: Buffer, data_offset: usize) -> Option<Buffer> {
        let bytes = data_offset..data_offset + moved.frames.len() * BLOCK;
        if bytes.len() >= MIN_PIECE_BYTES && !moved.is_stale && self.digest_thread.is_free() {
            let pending = self.pending.insert(moved);
            return match self.digest_thread.send(Piece { pending, buffer, bytes, digester: self.digester }) {
                Ok(()) => None,
                // The digest thread has ended: digest the piece on this thread.
                Err(piece) => Some(self.record_piece(piece.digest())),
            };
        }
        self.enter(&moved, digests(self.digester, buffer.get(bytes).unwrap_or_default()));
        Some(buffer)
    }

    /// Records a digested piece. Returns its buffer.
    fn record_piece(&mut self, piece: DigestedPiece) -> Buffer {
        let DigestedPiece { pending, buffer, digests } = piece;
        if let Some(moved) = self.pending.try_remove(pending) {
            self.enter(&moved, digests.into_iter());
        }
        buffer
    }

    /// Enters moved blocks into the block map.
    fn enter(&mut self, moved: &MovedBlocks, digests: impl Iterator<Item = Digest>) {
        let Some(map) = &mut self.guest_map else { return };
        let is_current = Arc::ptr_eq(&map.memory, &moved.memory) && !moved.is_stale;
        for (block, (frame, digest)) in (moved.first_block..).zip(moved.frames.iter().zip(digests)) {
            match frame {
                Some(frame) if is_current => map.blocks.moved(block, *frame, digest),
                // A written block that is in no frame: its content in the block map is outdated.
                _ if moved.direction == Direction::GuestToDisk => map.blocks.changed(block),
                _ => {}
            }
        }
    }

    /// Records the pieces that have been digested.
    pub fn record_digested(&mut self, buffers: &mut BufferPool) {
        while let Some(piece) = self.digest_thread.try_receive() {
            buffers.put_back(Some(self.record_piece(piece)));
        }
    }

    /// Waits until all moved blocks are recorded. Called before the map is taken or its memory changes. Takes a few
    /// milliseconds at most.
    pub fn record_all(&mut self, buffers: &mut BufferPool) {
        while !self.pending.is_empty()
            && let Some(piece) = self.digest_thread.receive()
        {
            buffers.put_back(Some(self.record_piece(piece)));
        }
        self.pending.clear();
    }
}
