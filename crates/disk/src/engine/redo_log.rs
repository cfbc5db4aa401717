//! The redo log in the engine: the location of each block of a protected disk, the writes that wait, and the space
//! that is free again. The *redo log* takes the guest's writes, as *entries*, until they are merged into the image.
//!
//! Epochs, seals and merges are in [`crate::redo`], whose keeper visits the engine between two of its steps
//! ([`super::visit`]). The front end writes the entries. This module decides where, and does the log's own syncs and
//! holes.

use super::catalog::{Change, DataLocation, DurabilityLost, EntryResult, SyncTarget, WriteTarget};
use super::ids::PartId;
use super::io::{DiskIo, Token};
use crate::redo::index::{LocatedPiece, Source};
use crate::redo::log::{CannotAllocate, Log, LogEntry, ReclaimedSpace, SpaceLimit, SyncOutcome, Unsynced};
use crate::report::warn_limited;
use crate::request::DiskRange;
use rekindle_kernel::durable_file::LocalFile;
use rekindle_kernel::uring::Operation;
use serde::{Deserialize, Serialize};
use slab::Slab;
use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Time between two attempts of a write for which there is no space.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// An operation of the log that belongs to no request.
#[derive(Debug)]
enum LogOperation {
    Sync { epoch: u64, entries: u64 },
    Punch,
}

/// Space to reclaim once all present requests have ended: one of them may be about to read it.
#[derive(Debug)]
struct PendingReclaim<F> {
    space: ReclaimedSpace<F>,
    /// Sequence number of the first request that cannot read the space.
    unread_from: u64,
}

/// Sequence numbers of requests.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestSequence {
    /// Number of the oldest request in progress; `None`: there is none.
    pub oldest: Option<u64>,
    pub next: u64,
}

/// The state of a redo log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedoStatus {
    /// The identity of the disk.
    pub disk: Uuid,
    /// The current epoch.
    pub epoch: u64,
    /// The newest sealed epoch.
    pub sealed: u64,
    /// The image has all writes of epochs up to this.
    pub merged: u64,
    /// Bytes of the log in use.
    pub bytes: u64,
    /// Most bytes of the log.
    pub limit: u64,
    /// Number of extents in memory.
    pub extents: usize,
    /// The disk is open at an older epoch, and the first write discards the later ones.
    pub rewound: bool,
    /// Why writes wait.
    pub waiting: Option<String>,
    /// Why the last merge failed.
    pub failed: Option<String>,
}

/// A redo log in the engine, and the writes that wait for it.
#[derive(Debug)]
pub struct EngineLog<F = LocalFile> {
    pub log: Log<F>,
    /// The image may have writes from before the log that are not durable.
    pub is_image_dirty: bool,
    /// New writes wait: the log is about to end.
    pub is_closing: bool,
    /// Called when a segment or free space is needed.
    keeper: KeeperCallback,
    /// Parts that wait for space.
    waiting: VecDeque<PartId>,
    /// Why these parts wait.
    why_waiting: Option<String>,
    /// Some waiting parts wait for free space, and not only for a segment.
    is_full: bool,
    /// Time of the next attempt.
    retry_at: Option<Instant>,
    operations: Slab<LogOperation>,
    /// A sync would make it possible to reclaim space.
    is_sync_wanted: bool,
    /// Entries may have become reclaimable.
    is_reclaim_wanted: bool,
    reclaims: Vec<PendingReclaim<F>>,
}

/// A callback to the keeper, which neither blocks nor visits the engine.
#[derive(Clone)]
pub struct KeeperCallback(Arc<dyn Fn() + Send + Sync>);

impl KeeperCallback {
    #[must_use]
    pub fn new(call: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(call))
    }

    pub fn send(&self) {
        (self.0)();
    }
}

impl std::fmt::Debug for KeeperCallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeeperCallback")
    }
}

impl<F: Clone> EngineLog<F> {
    /// Creates the engine's part of a log. `keeper` is called when a segment or free space is needed.
    #[must_use]
    pub fn new(log: Log<F>, keeper: KeeperCallback, is_image_dirty: bool) -> Self {
        Self {
            log,
            is_image_dirty,
            is_closing: false,
            keeper,
            waiting: VecDeque::new(),
            why_waiting: None,
            is_full: false,
            retry_at: None,
            operations: Slab::new(),
            is_sync_wanted: false,
            is_reclaim_wanted: false,
            reclaims: Vec::new(),
        }
    }

    /// Returns the state of the log as far as the engine knows it.
    #[must_use]
    pub fn status(&self) -> RedoStatus {
        RedoStatus {
            disk: self.log.disk(),
            epoch: self.log.epoch(),
            sealed: 0,
            merged: self.log.merged(),
            bytes: self.log.bytes(),
            limit: self.log.limit(),
            extents: self.log.extents(),
            rewound: false,
            waiting: self.why_waiting.clone(),
            failed: None,
        }
    }

    /// Returns whether writes wait for space.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Forgets some merged entries. Returns the longest time to wait for an event.
    pub(super) fn work(&mut self) -> Option<Duration> {
        if self.log.sweep() {
            return Some(Duration::ZERO);
        }
        self.retry_at.map(|retry_at| retry_at.saturating_duration_since(Instant::now()))
    }

    /// Requests a segment or free space for a write that has no place yet.
    pub(crate) fn request_space(&mut self, missing: CannotAllocate) {
        self.is_full |= missing == CannotAllocate::Limit;
        self.keeper.send();
    }

    /// Records that a write into the log has completed.
    pub(crate) fn complete_write(&mut self, entry: &LogEntry) {
        self.log.complete_write(entry);
        if self.waiting.is_empty() {
            (self.why_waiting, self.is_full) = (None, false);
        }
    }

    /// Keeps a part until the next attempt. `why`: why it waits.
    fn keep_waiting(&mut self, part: PartId, why: &str) {
        if self.why_waiting.as_deref() != Some(why) {
            warn_limited!("writes wait: {why}");
            self.why_waiting = Some(why.into());
        }
        self.waiting.push_back(part);
        self.retry_at.get_or_insert_with(|| Instant::now() + RETRY_INTERVAL);
    }

    /// Moves all waiting parts to `waiting`, for another attempt.
    pub(super) fn retry_waiting(&mut self, waiting: &mut VecDeque<PartId>) {
        self.retry_at = None;
        waiting.extend(self.take_waiting());
    }

    /// Removes the waiting parts, because the log has ended.
    pub(super) fn take_waiting(&mut self) -> impl Iterator<Item = PartId> {
        self.waiting.drain(..)
    }

    pub(super) fn is_retry_due(&self) -> bool {
        self.retry_at.is_some_and(|retry_at| retry_at <= Instant::now())
    }

    /// Calls `visit_piece` with each piece of a range and the location of its data, in order.
    pub(super) fn locate(&self, range: DiskRange, mut visit_piece: impl FnMut(DiskRange, DataLocation)) {
        for LocatedPiece { start, bytes, source } in self.log.look_up(range.start, range.bytes) {
            let location = match source {
                None => DataLocation::Image,
                Some(Source::Data { epoch, offset }) => DataLocation::Segment { epoch, offset },
                Some(Source::Zeroes { .. }) => DataLocation::Zeroes,
            };
            visit_piece(DiskRange { start, bytes }, location);
        }
    }

    /// Returns the segments that a flush must sync.
    pub(super) fn sync_targets(&self) -> Result<Vec<SyncTarget>, DurabilityLost> {
        let unsynced = self.log.unsynced(u64::MAX).ok_or(DurabilityLost)?;
        let target = |segment: Unsynced<F>| SyncTarget::Segment { epoch: segment.epoch, entries: segment.written };
        Ok(unsynced.into_iter().map(target).collect())
    }

    /// Reserves an entry for a change, or keeps the part until it is tried again.
    pub(super) fn reserve(
        &mut self,
        part: PartId,
        change: Change,
        entry: Option<LogEntry>,
        limit: SpaceLimit,
    ) -> WriteTarget {
        if self.is_closing {
            if let Some(entry) = entry {
                self.log.abandon_write(&entry);
            }
            self.keep_waiting(part, "the log is about to end");
            return WriteTarget::Wait;
        }
        if let Some(entry) = entry {
            return WriteTarget::Entry(entry);
        }
        let missing = match self.log.allocate(change.disk_offset, change.bytes, change.kind, limit) {
            Ok(entry) => return WriteTarget::Entry(entry),
            Err(missing) => missing,
        };
        self.request_space(missing);
        match missing {
            CannotAllocate::Segment(epoch) => self.keep_waiting(part, &format!("epoch {epoch} has no segment yet")),
            CannotAllocate::Limit => {
                let limit = self.log.limit();
                let why = format!(
                    "the redo log has reached its limit of {limit} bytes, because no checkpoint is committed. Check that \
                     rekindle protect runs, or discard the disk of the last checkpoint: rekindle disk merge"
                );
                self.keep_waiting(part, &why);
                self.is_sync_wanted = true;
            }
        }
        WriteTarget::Wait
    }

    /// Records how the write of an entry ended.
    pub(super) fn record_entry(&mut self, entry: &LogEntry, result: EntryResult<'_>) {
        match result {
            EntryResult::Written => self.complete_write(entry),
            EntryResult::Failed => self.log.abandon_write(entry),
            EntryResult::NoSpace { part, error } => {
                self.request_space(CannotAllocate::Limit);
                let detail = error.map_or(String::new(), |e| format!(" ({e})"));
                self.keep_waiting(part, &format!("there is no room for the redo log where it is{detail}"));
            }
        }
    }

    /// Records the result of a sync of a segment. Returns an error also if another sync has received it.
    pub(super) fn record_sync(&mut self, epoch: u64, entries: u64, result: io::Result<usize>) -> io::Result<usize> {
        let is_durable = self.log.record_sync(epoch, entries, SyncOutcome::from(&result));
        self.is_reclaim_wanted = true;
        if is_durable || result.is_err() { result } else { Err(io::Error::from_raw_os_error(libc::EIO)) }
    }
}

impl EngineLog {
    pub(super) fn has_space_to_reclaim(&self) -> bool {
        self.is_sync_wanted || self.is_reclaim_wanted || !self.reclaims.is_empty()
    }

    /// Starts operations that free space in the log: syncs of segments with overwritten entries, and holes in place
    /// of entries that no request in progress can be about to read.
    pub(super) fn reclaim_space(&mut self, io: &mut DiskIo, requests: RequestSequence) {
        if std::mem::take(&mut self.is_sync_wanted) {
            self.begin_sync(io);
        }
        if std::mem::take(&mut self.is_reclaim_wanted) {
            let unread_from = requests.next;
            let reclaimed = self.log.reclaim().into_iter();
            self.reclaims.extend(reclaimed.map(|space| PendingReclaim { space, unread_from }));
        }
        if !self.reclaims.is_empty() {
            self.punch_unread(io, requests.oldest.unwrap_or(u64::MAX));
        }
    }

    /// Syncs a segment whose overwritten entries could then be reclaimed.
    fn begin_sync(&mut self, io: &mut DiskIo) {
        let is_syncing = |segment_epoch| {
            let mut operations = self.operations.iter();
            operations
                .any(|(_, operation)| matches!(operation, LogOperation::Sync { epoch, .. } if *epoch == segment_epoch))
        };
        match self.log.reclaimable().into_iter().find(|segment| !is_syncing(segment.epoch)) {
            Some(segment) => {
                let sync = LogOperation::Sync { epoch: segment.epoch, entries: segment.written };
                self.begin_operation(io, &segment.file, Operation::Sync, sync);
            }
            None => self.is_reclaim_wanted = true,
        }
    }

    /// Punches holes in place of entries that no request in progress can be about to read.
    fn punch_unread(&mut self, io: &mut DiskIo, oldest_request: u64) {
        let mut spare_entries = io.spare_entries();
        let is_unread = |reclaim: &mut PendingReclaim<LocalFile>| {
            let is_unread = reclaim.unread_from <= oldest_request && spare_entries > 0;
            spare_entries -= usize::from(is_unread);
            is_unread
        };
        let unread: Vec<PendingReclaim<LocalFile>> = self.reclaims.extract_if(.., is_unread).collect();
        for ReclaimedSpace { file, offset, bytes } in unread.into_iter().map(|reclaim| reclaim.space) {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            self.begin_operation(io, &file, Operation::Allocate { mode, at: offset, len: bytes }, LogOperation::Punch);
        }
    }

    fn begin_operation(&mut self, io: &mut DiskIo, file: &LocalFile, operation: Operation, kind: LogOperation) {
        let number = self.operations.insert(kind);
        if io.begin(&file.0, operation, Token::LogOperation(number as u32)).is_err() {
            self.operations.remove(number);
        }
    }

    /// Handles the completion of an operation of the log itself.
    pub(super) fn operation_completed(&mut self, number: u32, result: io::Result<usize>, image: &Path) {
        if let Err(e) = &result {
            warn_limited!("the redo log of {}: {e}", image.display());
        }
        if let Some(LogOperation::Sync { epoch, entries }) = self.operations.try_remove(number as usize) {
            // The error is logged above; a flush of the guest fails, too.
            drop(self.record_sync(epoch, entries, result));
        }
    }
}
