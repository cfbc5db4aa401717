//! The disk's blocks as the front end sees them: the image, its redo log, and the cache, behind one [`BlockCatalog`].

use super::catalog::{
    BlockCatalog, Change, DataLocation, DriverState, DurabilityLost, EntryResult, FilePosition, MovedBlocks, PartId,
    SyncTarget, WriteTarget,
};
use super::command::Refused;
use super::io::BufferPool;
use super::reboot_cache::RebootCache;
use super::redo_log::EngineLog;
use crate::block_map::Frame;
use crate::digest::Digest;
use crate::image::Image;
use crate::ledger::{ImageStamp, ImageState};
use crate::memory::Memory;
use crate::redo::log::{LogEntry, SpaceLimit};
use crate::request::{Disk, Kind, Range};
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
    pub fn new(image: Image, log: Option<EngineLog>, cache: RebootCache) -> Self {
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
    pub fn open(&mut self, image: Image, log: Option<EngineLog>) -> Result<(), Refused> {
        if !std::mem::replace(&mut self.is_awaited, false) {
            return Err(Refused("it has its disk already".into()));
        }
        (self.capacity, self.image, self.log) = (image.bytes, image, log);
        Ok(())
    }

    /// Returns the length of the disk in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Updates the length of the image. Returns the previous length.
    pub fn measure(&mut self) -> Result<u64, Refused> {
        let measured = self.image.measure(self.capacity).map_err(|e| Refused(e.to_string()))?;
        Ok(std::mem::replace(&mut self.capacity, measured))
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

    fn segment(&self, epoch: u64) -> Option<Arc<File>> {
        Some(self.log.as_ref()?.log.file(epoch)?.0)
    }
}

impl BlockCatalog for DiskBlocks {
    fn is_open(&self) -> bool {
        !self.is_awaited
    }

    fn disk(&self) -> Disk {
        Disk { capacity: self.capacity, readonly: self.image.mode.readonly }
    }

    fn path(&self) -> &Path {
        &self.image.path
    }

    fn has_retained_blocks(&self) -> bool {
        self.cache.has_retained_blocks()
    }

    fn take_retained(&mut self, first: u64, into: &mut [u8]) -> Vec<Option<Digest>> {
        self.cache.take_retained(first, into)
    }

    fn locate(&self, range: Range, mut piece: impl FnMut(Range, DataLocation)) {
        match &self.log {
            Some(log) => log.locate(range, piece),
            None => piece(range, DataLocation::Image),
        }
    }

    fn disk_file(&self, location: DataLocation, at: u64) -> FilePosition {
        if let DataLocation::Segment { epoch, offset } = location
            && let Some(file) = self.segment(epoch)
        {
            return FilePosition { file, offset };
        }
        FilePosition { file: Arc::clone(&self.image.file), offset: at }
    }

    fn sync_targets(&self, mut target: impl FnMut(SyncTarget)) -> Result<(), DurabilityLost> {
        if self.log.as_ref().is_none_or(|log| log.is_image_dirty) {
            if self.image.durability.is_broken() {
                return Err(DurabilityLost);
            }
            target(SyncTarget::Image);
        }
        self.log.as_ref().map_or(Ok(()), |log| log.sync_targets(target))
    }

    fn file_to_sync(&self, target: SyncTarget) -> Option<Arc<File>> {
        match target {
            SyncTarget::Image => Some(Arc::clone(&self.image.file)),
            // `None`: the segment was merged since, and the image was synced.
            SyncTarget::Segment { epoch, .. } => self.segment(epoch),
        }
    }

    fn reserve(&mut self, part: PartId, change: Change, entry: Option<LogEntry>, limit: SpaceLimit) -> WriteTarget {
        self.log.as_mut().map_or(WriteTarget::Image, |log| log.reserve(part, change, entry, limit))
    }

    fn write_entry_header(&self, entry: &LogEntry, data: &[u8], into: &mut [u8]) -> Option<()> {
        into.copy_from_slice(&self.log.as_ref()?.log.header(entry, data));
        Some(())
    }

    fn entry_file(&self, entry: &LogEntry) -> Option<Arc<File>> {
        self.segment(entry.epoch)
    }

    fn retry_waiting(&mut self, waiting: &mut VecDeque<PartId>) {
        self.log.iter_mut().for_each(|log| log.retry_waiting(waiting));
    }

    fn retry_due(&mut self, waiting: &mut VecDeque<PartId>) {
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

    fn record_request(&mut self, kind: &Kind) {
        self.cache.record_request(kind);
    }

    fn records_moves(&self) -> bool {
        self.cache.records_moves()
    }

    fn forget_blocks(&mut self, range: Range) {
        self.cache.forget_blocks(range);
    }

    fn forget_moved(&mut self, range: Range) {
        self.cache.forget_moved(range);
    }

    fn record_served(&mut self, block: u64, frame: Frame, digest: Digest) {
        self.cache.record_served(block, frame, digest);
    }

    fn record_moved(&mut self, moved: MovedBlocks, buffer: Buffer, start: usize) -> Option<Buffer> {
        self.cache.record_moved(moved, buffer, start)
    }

    fn record_entry(&mut self, entry: &LogEntry, result: EntryResult<'_>) {
        if let Some(log) = &mut self.log {
            log.record_entry(entry, result);
        }
    }

    fn record_sync(&mut self, target: SyncTarget, result: io::Result<usize>) -> io::Result<usize> {
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
            (SyncTarget::Image, _) if self.image.durability.is_broken() => Err(io::Error::from_raw_os_error(libc::EIO)),
            (SyncTarget::Image, _) => result,
        }
    }
}
