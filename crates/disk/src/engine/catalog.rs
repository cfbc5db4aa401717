//! The trait between the front end and the parts that know the disk's blocks.
//!
//! The front end moves bytes. It does not know where a block is, whether a write must wait for a checkpoint, or what
//! must be recorded for a later reboot. It asks a [`BlockCatalog`], in this order for each request:
//!
//! ```text
//! a request is taken    record_request
//! a read                take_retained ─> record_served;   locate ─> file_position ─ (I/O) ─> record_moved
//! a change              forget_blocks; reserve ─> the image, or an entry ─ (I/O) ─> record_entry, record_moved
//! a flush               sync_targets ─> file_to_sync ─ (I/O) ─> record_sync
//! a failure             forget_moved
//! ```
//!
//! The trait is a type parameter of the front end, so that no call is dynamic.

use super::ids::PartId;
use super::io::BufferPool;
use crate::block::overlapping_blocks;
use crate::block_map::Frame;
use crate::digest::Digest;
use crate::memory::Memory;
use crate::redo::format::EntryKind;
use crate::redo::log::{LogEntry, SpaceLimit};
use crate::request::{DiskProperties, DiskRange, RequestKind};
use rekindle_kernel::uring::Buffer;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The location of data of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DataLocation {
    /// In the image, at the same offset as on the disk.
    Image,
    /// In the segment of an epoch of the redo log.
    Segment { epoch: u64, offset: u64 },
    /// Nowhere: the data is zeros.
    Zeroes,
}

/// The position of data in a file.
pub(super) struct FilePosition {
    pub file: Arc<File>,
    pub offset: u64,
}

/// A file that a flush makes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SyncTarget {
    Image,
    /// The first `entries` entries of the segment of an epoch.
    Segment {
        epoch: u64,
        entries: u64,
    },
}

/// The error that earlier writes cannot be made durable any more.
#[derive(Debug)]
pub(super) struct DurabilityLost;

/// A change of the disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Change {
    /// First byte on the disk.
    pub disk_offset: u64,
    pub bytes: u64,
    pub kind: EntryKind,
}

/// The place to write a change to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteTarget {
    Image,
    /// An entry of the redo log, with a header before the data.
    Entry(LogEntry),
    /// Nowhere yet: the catalog keeps the part until [`BlockCatalog::retry_waiting`].
    Wait,
}

/// The result of writing an entry.
pub(super) enum EntryResult<'a> {
    Written,
    /// The front end tries the write again later, in the same place.
    NoSpace {
        part: PartId,
        /// The error, if it was not a short write.
        error: Option<&'a io::Error>,
    },
    /// The write is not repeated.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    DiskToGuest,
    GuestToDisk,
}

/// Adjacent blocks that were moved between the disk and the guest.
pub(super) struct MovedBlocks {
    pub memory: Arc<Memory>,
    pub first_block: u64,
    /// The guest's frame of each block; `None` if the block is not in one frame.
    pub frames: Vec<Option<Frame>>,
    pub direction: Direction,
    /// The blocks' content on the disk has changed since, or may have changed.
    pub is_stale: bool,
}

impl MovedBlocks {
    /// Returns whether one of the blocks is in `range`.
    pub fn overlaps(&self, range: DiskRange) -> bool {
        let blocks = overlapping_blocks(range.start, range.bytes);
        self.first_block < blocks.end && blocks.start < self.first_block + self.frames.len() as u64
    }
}

/// The state of a guest's driver when a queue starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DriverState {
    /// The driver has just started: this is its first queue, and nothing was answered yet.
    Started,
    /// The driver continues, with another QEMU or another queue.
    Continues,
}

/// The parts of the engine that know the disk's blocks, as the front end sees them.
pub(super) trait BlockCatalog {
    /// Returns whether the disk is open: a server for a restore gets its disk later.
    fn is_open(&self) -> bool;

    /// Returns the properties of the disk that requests are checked against.
    fn disk_properties(&self) -> DiskProperties;

    /// Returns the path of the image, for messages.
    fn image_path(&self) -> &Path;

    // Where is this block?

    /// Returns whether [`Self::take_retained`] may find blocks.
    fn has_retained_blocks(&self) -> bool;

    /// Copies blocks from `first_block` on out of the retained cache, as many as fit into `target`. Returns the digest
    /// of each block that the cache had and that equals the disk's. Removes all of these blocks from the retained
    /// cache, also those that differ from the disk's.
    fn take_retained(&mut self, first_block: u64, target: &mut [u8]) -> Vec<Option<Digest>>;

    /// Calls `visit_piece` with each piece of a range and the location of its data, in order.
    fn locate(&self, range: DiskRange, visit_piece: impl FnMut(DiskRange, DataLocation));

    /// Returns the file and offset of byte `disk_offset` of the disk, which was found at `location` earlier. A byte
    /// that was merged since is in the image.
    fn file_position(&self, location: DataLocation, disk_offset: u64) -> FilePosition;

    /// Returns the targets that a flush must sync.
    ///
    /// # Errors
    /// [`DurabilityLost`] if a sync has failed before.
    fn sync_targets(&self) -> Result<Vec<SyncTarget>, DurabilityLost>;

    /// Returns the file to sync for a target. `None`: there is nothing left to sync.
    fn file_to_sync(&self, target: SyncTarget) -> Option<Arc<File>>;

    // May I write it?

    /// Decides where a part writes a change. `entry`: the entry of an earlier attempt.
    fn reserve(&mut self, part: PartId, change: Change, entry: Option<LogEntry>, limit: SpaceLimit) -> WriteTarget;

    /// Writes the header of an entry with this data to `target`. `None`: the log has ended, which happens only while
    /// no entry is reserved.
    fn write_entry_header(&self, entry: &LogEntry, data: &[u8], target: &mut [u8]) -> Option<()>;

    /// Returns the segment in which the entry is.
    fn entry_file(&self, entry: &LogEntry) -> Option<Arc<File>>;

    /// Moves all waiting parts to `waiting`, for another attempt.
    fn retry_waiting(&mut self, waiting: &mut VecDeque<PartId>);

    /// Does the same as [`Self::retry_waiting`], if it is time for another attempt.
    fn retry_waiting_if_due(&mut self, waiting: &mut VecDeque<PartId>);

    // What must be recorded?

    /// Notes that a QEMU whose queues do not run has mapped `memory`.
    fn note_mapped(&mut self, memory: &Memory);

    /// Prepares to record the blocks of a guest in `memory`. Called when one of its queues starts.
    fn begin_records(&mut self, memory: &Arc<Memory>, driver: DriverState, buffers: &mut BufferPool);

    /// Records which blocks a request reads or changes, before any of it is done.
    fn record_request(&mut self, kind: &RequestKind);

    /// Returns whether moved blocks are recorded.
    fn records_moves(&self) -> bool;

    /// Forgets the content of blocks that are about to change.
    fn forget_blocks(&mut self, range: DiskRange);

    /// Forgets in which frames blocks are, because their content on the disk is unknown.
    fn forget_moved(&mut self, range: DiskRange);

    /// Records that a block with this digest was moved to a frame.
    fn record_served(&mut self, block: u64, frame: Frame, digest: Digest);

    /// Records moved blocks, whose data begins at byte `data_offset` of the buffer. Returns the buffer if it is not
    /// needed any more.
    fn record_moved(&mut self, moved: MovedBlocks, buffer: Buffer, data_offset: usize) -> Option<Buffer>;

    /// Records how the write of an entry ended.
    fn record_entry(&mut self, entry: &LogEntry, result: EntryResult<'_>);

    /// Records the result of a sync. Returns an error also if another sync has received it.
    ///
    /// # Errors
    /// The error of the sync: the written data is not durable.
    fn record_sync(&mut self, target: SyncTarget, result: io::Result<usize>) -> io::Result<usize>;
}
