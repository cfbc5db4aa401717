//! The disk's blocks as the front end sees them: the image, its redo log, and the cache, behind one [`BlockCatalog`].
//!
//! The *redo log* has the writes of a protected guest that are not in the image yet ([`crate::redo`]). The *cache* is
//! what is known of the guest's memory ([`super::reboot_cache`]).

use super::catalog::{
    BlockCatalog, Change, DataLocation, DriverState, DurabilityLost, EntryResult, FilePosition, MovedBlocks,
    SyncTarget, WriteTarget,
};
use super::command::OpenDisk;
use super::ids::PartId;
use super::io::BufferPool;
use super::reboot_cache::RebootCache;
use super::redo_log::EngineLog;
use super::refusal::Refusal;
use crate::block_map::Frame;
use crate::digest::Digest;
use crate::image::Image;
use crate::ledger::{ImageStamp, ImageState};
use crate::memory::Memory;
use crate::redo::log::{LogEntry, SpaceLimit};
use crate::request::{DiskProperties, DiskRange, RequestKind};
use rekindle_kernel::uring::Buffer;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// The image, the redo log and the cache of one disk.
pub(super) struct DiskBlocks {
    image: Image,
    /// Length of the disk in bytes.
    capacity: u64,
    /// The server has only inspected the image, and has no disk yet.
    is_awaited: bool,
    /// The redo log of a protected VM's disk.
    pub log: Option<EngineLog>,
    pub cache: RebootCache,
}

impl DiskBlocks {
    pub fn new(disk: OpenDisk, cache: RebootCache) -> Self {
        let OpenDisk { image, log } = disk;
        Self { capacity: image.bytes, image, is_awaited: false, log, cache }
    }

    /// Creates the blocks of a server that only knows the length of its disk.
    pub fn awaited(image: Image, cache: RebootCache) -> Self {
        Self { capacity: image.bytes, image, is_awaited: true, log: None, cache }
    }

    pub fn is_awaited(&self) -> bool {
        self.is_awaited
    }

    /// Adds the disk that the server has waited for. No queue has run before.
    pub fn open(&mut self, disk: OpenDisk) -> Result<(), Refusal> {
        if !std::mem::replace(&mut self.is_awaited, false) {
            return Err(Refusal("it has its disk already".into()));
        }
        (self.capacity, self.image, self.log) = (disk.image.bytes, disk.image, disk.log);
        Ok(())
    }

    /// Returns the length of the disk in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Updates the length of the disk to that of the image. Returns whether it has grown.
    pub fn update_capacity(&mut self) -> Result<bool, Refusal> {
        let previous = self.capacity;
        self.capacity = self.image.current_length(previous).map_err(|e| Refusal(e.to_string()))?;
        Ok(self.capacity > previous)
    }

    /// Returns the length and times of the image. For a device, and for an image into which a log is merged, the
    /// times are 0 because they mean nothing: only the lock prevents changes by other processes.
    pub fn image_state(&self) -> ImageState {
        ImageState { capacity: self.capacity, stamp: self.image_stamp() }
    }

    fn image_stamp(&self) -> Option<ImageStamp> {
        if self.image.is_device || self.log.is_some() {
            return Some(ImageStamp { bytes: self.capacity, modified_ns: 0, changed_ns: 0 });
        }
        let metadata = self.image.file.metadata().ok()?;
        let ns = |seconds: i64, nanoseconds: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
        Some(ImageStamp {
            bytes: metadata.len(),
            modified_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// Handles the completion of an operation of the redo log itself.
    pub fn log_operation_completed(&mut self, number: u32, result: io::Result<usize>) {
        if let Some(log) = &mut self.log {
            log.operation_completed(number, result, &self.image.path);
        }
    }

    /// Returns the segment of an epoch; `None` if it was merged, or there is no log.
    fn segment_file(&self, epoch: u64) -> Option<Arc<File>> {
        Some(self.log.as_ref()?.log.segment_file(epoch)?.0)
    }
}

impl BlockCatalog for DiskBlocks {
    fn is_open(&self) -> bool {
        !self.is_awaited
    }

    fn disk_properties(&self) -> DiskProperties {
        DiskProperties { capacity: self.capacity, readonly: self.image.mode.readonly }
    }

    fn image_path(&self) -> &Path {
        &self.image.path
    }

    fn has_retained_blocks(&self) -> bool {
        self.cache.has_retained_blocks()
    }

    fn take_retained(&mut self, first_block: u64, target: &mut [u8]) -> Vec<Option<Digest>> {
        self.cache.take_retained(first_block, target)
    }

    fn locate(&self, range: DiskRange, mut visit_piece: impl FnMut(DiskRange, DataLocation)) {
        match &self.log {
            Some(log) => log.locate(range, visit_piece),
            None => visit_piece(range, DataLocation::Image),
        }
    }

    fn file_position(&self, location: DataLocation, disk_offset: u64) -> FilePosition {
        if let DataLocation::Segment { epoch, offset } = location
            && let Some(file) = self.segment_file(epoch)
        {
            return FilePosition { file, offset };
        }
        FilePosition { file: Arc::clone(&self.image.file), offset: disk_offset }
    }

    fn sync_targets(&self) -> Result<Vec<SyncTarget>, DurabilityLost> {
        let mut targets = Vec::new();
        if self.log.as_ref().is_none_or(|log| log.is_image_dirty) {
            if self.image.durability.is_broken() {
                return Err(DurabilityLost);
            }
            targets.push(SyncTarget::Image);
        }
        if let Some(log) = &self.log {
            targets.extend(log.sync_targets()?);
        }
        Ok(targets)
    }

    fn file_to_sync(&self, target: SyncTarget) -> Option<Arc<File>> {
        match target {
            SyncTarget::Image => Some(Arc::clone(&self.image.file)),
            // `None`: the segment was merged since, and the image was synced.
            SyncTarget::Segment { epoch, .. } => self.segment_file(epoch),
        }
    }

    fn reserve(&mut self, part: PartId, change: Change, entry: Option<LogEntry>, limit: SpaceLimit) -> WriteTarget {
        self.log.as_mut().map_or(WriteTarget::Image, |log| log.reserve(part, change, entry, limit))
    }

    fn write_entry_header(&self, entry: &LogEntry, data: &[u8], target: &mut [u8]) -> Option<()> {
        target.copy_from_slice(&self.log.as_ref()?.log.entry_header(entry, data));
        Some(())
    }

    fn entry_file(&self, entry: &LogEntry) -> Option<Arc<File>> {
        self.segment_file(entry.epoch)
    }

    fn retry_waiting(&mut self, waiting: &mut VecDeque<PartId>) {
        self.log.iter_mut().for_each(|log| log.retry_waiting(waiting));
    }

    fn retry_waiting_if_due(&mut self, waiting: &mut VecDeque<PartId>) {
        if self.log.as_ref().is_some_and(EngineLog::is_retry_due) {
            self.retry_waiting(waiting);
        }
    }

    fn note_mapped(&mut self, memory: &Memory) {
        self.cache.note_mapped(memory);
    }

    fn begin_records(&mut self, memory: &Arc<Memory>, driver: DriverState, buffers: &mut BufferPool) {
        self.cache.begin_records(memory, driver, buffers);
    }

    fn record_request(&mut self, kind: &RequestKind) {
        self.cache.record_request(kind);
    }

    fn records_moves(&self) -> bool {
        self.cache.records_moves()
    }

    fn forget_blocks(&mut self, range: DiskRange) {
        self.cache.forget_blocks(range);
    }

    fn forget_moved(&mut self, range: DiskRange) {
        self.cache.forget_moved(range);
    }

    fn record_served(&mut self, block: u64, frame: Frame, digest: Digest) {
        self.cache.record_served(block, frame, digest);
    }

    fn record_moved(&mut self, moved: MovedBlocks, buffer: Buffer, data_offset: usize) -> Option<Buffer> {
        self.cache.record_moved(moved, buffer, data_offset)
    }

    fn record_entry(&mut self, entry: &LogEntry, result: EntryResult<'_>) {
        if let Some(log) = &mut self.log {
            log.record_entry(entry, result);
        }
    }

    fn record_sync(&mut self, target: SyncTarget, result: io::Result<usize>) -> io::Result<usize> {
        // The sync was not done, and is repeated.
        if matches!(&result, Err(e) if e.kind() == io::ErrorKind::Interrupted || e.kind() == io::ErrorKind::WouldBlock)
        {
            return result;
        }
        match (target, &mut self.log) {
            (SyncTarget::Segment { epoch, entries }, Some(log)) => log.record_sync(epoch, entries, result),
            (SyncTarget::Segment { .. }, None) => result,
            (SyncTarget::Image, _) if result.is_err() => {
                self.image.durability.set_broken();
                result
            }
            // The kernel has reported the error to an earlier sync.
            (SyncTarget::Image, _) if self.image.durability.is_broken() => Err(io::Error::from_raw_os_error(libc::EIO)),
            (SyncTarget::Image, _) => result,
        }
    }
}
