//! The log in a server's memory: the place of the next write, and the place of each sector.
//!
//! The *log* takes the writes of a protected guest's disk instead of the image. An *epoch* is the time between two
//! checkpoints. Its writes are *entries* in a file of its own, the *segment*.
//!
//! This module does no I/O. The caller allocates an entry, writes it and reports the result. So the engine
//! (`io_uring`, many writes at a time) and tests that lose, tear and reorder writes use the same code.

use super::format::{EntryHeader, EntryKind, PAGE_BYTES, Page, checksum, entry_length, write_header};
use super::index::{EntryPiece, Index, LocatedPiece, Overwritten, Source};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use uuid::Uuid;

pub mod seal;

/// Most merged entries that one [`Log::sweep`] forgets.
const MAX_SWEPT_ENTRIES: usize = 4096;

/// The place of a write in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEntry {
    pub epoch: u64,
    /// Offset of the entry's header in the segment.
    pub offset: u64,
    /// Newer entries have a higher number.
    pub sequence: u64,
    /// First byte on the disk.
    pub disk_offset: u64,
    pub bytes: u64,
    pub kind: EntryKind,
}

impl LogEntry {
    /// Returns the entry's bytes in the segment.
    #[must_use]
    pub fn length(&self) -> u64 {
        entry_length(self.kind, self.bytes)
    }

    /// Returns the part of the disk that the entry has content for.
    fn disk_range(&self) -> Range<u64> {
        self.disk_offset..self.disk_offset + self.bytes
    }

    fn source(&self) -> Source {
        match self.kind {
            EntryKind::Data => Source::Data { epoch: self.epoch, offset: self.offset + PAGE_BYTES },
            EntryKind::Zeroes => Source::Zeroes { epoch: self.epoch, hole: false },
            EntryKind::Hole => Source::Zeroes { epoch: self.epoch, hole: true },
        }
    }
}

/// The effect of the log's limit on a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpaceLimit {
    /// The write waits until the log is below its limit.
    Enforced,
    /// The write takes more space, because the guest or the server cannot stop before the write is done.
    MayBeExceeded,
}

/// The reason why no entry can be allocated yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CannotAllocate {
    /// The segment of this epoch does not exist yet.
    Segment(u64),
    /// The log has reached its size limit.
    Limit,
}

/// An entry that was written.
#[derive(Debug, Clone, Copy)]
struct WrittenEntry {
    entry: LogEntry,
    /// Bytes that no newer entry has overwritten.
    live_bytes: u64,
}

/// An entry that later entries of the same epoch have overwritten.
#[derive(Debug, Clone, Copy)]
struct OverwrittenEntry {
    sequence: u64,
    /// The space can be reclaimed when this number of entries is durable.
    after_written: u64,
}

/// The result of a sync of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncOutcome {
    Synced,
    Failed,
}

impl<T> From<&io::Result<T>> for SyncOutcome {
    fn from(result: &io::Result<T>) -> Self {
        if result.is_ok() { Self::Synced } else { Self::Failed }
    }
}

/// The segment of one epoch.
#[derive(Debug)]
pub struct Segment<F> {
    epoch: u64,
    nonce: u128,
    file: F,
    /// Offset of the next entry.
    tail: u64,
    /// Written entries by sequence number.
    entries: BTreeMap<u64, WrittenEntry>,
    /// Bytes in use.
    bytes: u64,
    /// Number of completed entries. `synced`: number of them that are durable.
    written: u64,
    synced: u64,
    /// Number of allocated entries whose write has not completed.
    unfinished: u64,
    /// A sync has failed: it is unknown which entries are durable.
    has_failed_sync: bool,
    overwritten: Vec<OverwrittenEntry>,
    /// The segment has a seal record, and the state lists the segment's epoch.
    is_sealed: bool,
}

impl<F> Segment<F> {
    /// Creates an empty segment.
    #[must_use]
    pub fn new(epoch: u64, nonce: u128, file: F) -> Self {
        Self {
            epoch,
            nonce,
            file,
            tail: PAGE_BYTES,
            entries: BTreeMap::new(),
            bytes: PAGE_BYTES,
            written: 0,
            synced: 0,
            unfinished: 0,
            has_failed_sync: false,
            overwritten: Vec::new(),
            is_sealed: false,
        }
    }

    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

/// A segment with entries that are not known to be durable.
#[derive(Debug, Clone)]
pub struct Unsynced<F> {
    pub epoch: u64,
    pub file: F,
    /// Number of entries that a sync makes durable.
    pub written: u64,
}

/// The entries to merge into the image.
#[derive(Debug)]
pub struct Batch<F> {
    /// The last epoch of the batch.
    pub upto: u64,
    /// The segments by epoch.
    pub segments: BTreeMap<u64, BatchSegment<F>>,
    entries: Vec<LogEntry>,
}

/// A segment to merge.
#[derive(Debug)]
pub struct BatchSegment<F> {
    pub file: F,
    /// The nonce of the segment's entries.
    pub nonce: u128,
}

/// A part of the disk to merge, and the entry that has its newest content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MergePiece {
    /// First byte on the disk.
    pub start: u64,
    pub bytes: u64,
    pub entry: LogEntry,
}

/// Space of a segment that is free again.
#[derive(Debug)]
pub struct ReclaimedSpace<F> {
    pub file: F,
    pub offset: u64,
    pub bytes: u64,
}

impl<F> Batch<F> {
    /// Returns the newest content of each sector, in disk order.
    #[must_use]
    pub fn newest_pieces(&self) -> Vec<MergePiece> {
        let mut index = Index::default();
        for entry in &self.entries {
            index.insert(entry.disk_range(), entry.sequence, entry.source(), |_| ());
        }
        let entries: BTreeMap<u64, &LogEntry> = self.entries.iter().map(|entry| (entry.sequence, entry)).collect();
        let piece =
            |EntryPiece { start, bytes, sequence }| Some(MergePiece { start, bytes, entry: **entries.get(&sequence)? });
        index.entry_pieces().filter_map(piece).collect()
    }
}

/// A callback for the moment when no write into epochs up to `upto` is in progress.
struct WhenIdle {
    upto: u64,
    call: Box<dyn FnOnce() + Send>,
}

impl std::fmt::Debug for WhenIdle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WhenIdle")
    }
}

/// A log's segments, and the index of their newest content.
#[derive(Debug)]
pub struct Log<F> {
    disk: Uuid,
    /// The epoch of new writes.
    epoch: u64,
    /// The last ended epoch, to which nothing is written any more.
    closed: u64,
    /// The image has all writes of epochs up to this.
    merged: u64,
    /// Sequence number of the next entry.
    next_sequence: u64,
    segments: BTreeMap<u64, Segment<F>>,
    /// Segments of epochs without writes.
    ready_segments: BTreeMap<u64, Segment<F>>,
    index: Index,
    /// Bytes in use.
    bytes: u64,
    /// Most bytes in use.
    limit: u64,
    /// Parts of the disk whose extents are still to be forgotten: their entries are in the image.
    merged_ranges: Vec<Range<u64>>,
    when_idle: Option<WhenIdle>,
}

/// Returns whether a write into an epoch up to `upto` is in progress.
fn is_busy<F>(segments: &BTreeMap<u64, Segment<F>>, upto: u64) -> bool {
    segments.range(..=upto).any(|(_, segment)| segment.unfinished > 0)
}

impl<F: Clone> Log<F> {
    /// Creates a log without segments.
    #[must_use]
    pub fn new(disk: Uuid, epoch: u64, closed: u64, merged: u64, limit: u64) -> Self {
        Self {
            disk,
            epoch,
            closed,
            merged,
            next_sequence: 1,
            segments: BTreeMap::new(),
            ready_segments: BTreeMap::new(),
            index: Index::default(),
            bytes: 0,
            limit,
            merged_ranges: Vec::new(),
            when_idle: None,
        }
    }

    #[must_use]
    pub fn disk(&self) -> Uuid {
        self.disk
    }

    /// Returns the epoch of new writes.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the last merged epoch: the image has all writes of epochs up to this.
    #[must_use]
    pub fn merged(&self) -> u64 {
        self.merged
    }

    /// Returns the bytes in use.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the most bytes that may be in use.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the number of extents in memory.
    #[must_use]
    pub fn extents(&self) -> usize {
        self.index.len()
    }

    /// Returns whether all writes of the log are in the image.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Adds a segment from the directory, with its entries. `is_sealed`: the epoch is sealed, and the segment has a
    /// seal record.
    pub(crate) fn add_segment(&mut self, segment: Segment<F>, end: u64, entries: Vec<LogEntry>, is_sealed: bool) {
        let epoch = segment.epoch;
        self.segments.insert(epoch, Segment { tail: end, ..segment });
        self.bytes += PAGE_BYTES;
        for entry in entries {
            self.next_sequence = self.next_sequence.max(entry.sequence + 1);
            self.count_bytes(&entry);
            self.record_written(&entry);
        }
        if let Some(segment) = self.segments.get_mut(&epoch) {
            segment.synced = segment.written;
        }
        if is_sealed {
            self.mark_sealed(&[epoch]);
        }
    }

    fn count_bytes(&mut self, entry: &LogEntry) {
        self.bytes += entry.length();
        if let Some(segment) = self.segments.get_mut(&entry.epoch) {
            segment.bytes += entry.length();
        }
    }

    /// Returns the epochs that need a segment: the current epoch, and the next one, so that a mark need not wait.
    #[must_use]
    pub fn missing_segments(&self) -> Vec<u64> {
        let has_segment = |epoch: &u64| self.segments.contains_key(epoch) || self.ready_segments.contains_key(epoch);
        [self.epoch, self.epoch + 1].into_iter().filter(|epoch| !has_segment(epoch)).collect()
    }

    /// Adds a segment for an epoch without writes.
    pub fn add_ready(&mut self, segment: Segment<F>) {
        self.ready_segments.insert(segment.epoch, segment);
    }

    /// Allocates an entry for a write of whole sectors.
    pub fn allocate(
        &mut self,
        disk_offset: u64,
        bytes: u64,
        kind: EntryKind,
        limit: SpaceLimit,
    ) -> Result<LogEntry, CannotAllocate> {
        let epoch = self.epoch;
        if limit == SpaceLimit::Enforced && self.bytes + entry_length(kind, bytes) > self.limit {
            return Err(CannotAllocate::Limit);
        }
        if !self.segments.contains_key(&epoch) {
            let segment = self.ready_segments.remove(&epoch).ok_or(CannotAllocate::Segment(epoch))?;
            self.bytes += segment.bytes;
            self.segments.insert(epoch, segment);
        }
        let segment = self.segments.get_mut(&epoch).ok_or(CannotAllocate::Segment(epoch))?;
        let entry = LogEntry { epoch, offset: segment.tail, sequence: self.next_sequence, disk_offset, bytes, kind };
        segment.tail += entry.length();
        segment.unfinished += 1;
        self.next_sequence += 1;
        self.count_bytes(&entry);
        Ok(entry)
    }

    /// Returns the header of an allocated entry.
    #[must_use]
    pub fn entry_header(&self, entry: &LogEntry, data: &[u8]) -> Page {
        let LogEntry { sequence, disk_offset, bytes, kind, .. } = *entry;
        let nonce = self.segments.get(&entry.epoch).map_or(0, |segment| segment.nonce);
        let header = EntryHeader { sequence, disk_offset, bytes, kind, data_checksum: checksum(data) };
        write_header(&header, nonce, entry.offset)
    }

    /// Returns the segment of an epoch; `None` if the epoch has no writes or was merged.
    #[must_use]
    pub fn segment_file(&self, epoch: u64) -> Option<F> {
        self.segments.get(&epoch).map(|segment| segment.file.clone())
    }

    /// Records that a write has completed: later reads return its data.
    pub fn complete_write(&mut self, entry: &LogEntry) {
        self.abandon_write(entry);
        self.record_written(entry);
    }

    /// Records that a write has failed and is not repeated: its entry is never read.
    pub fn abandon_write(&mut self, entry: &LogEntry) {
        if let Some(segment) = self.segments.get_mut(&entry.epoch) {
            segment.unfinished = segment.unfinished.saturating_sub(1);
        }
        if let Some(idle) = self.when_idle.take_if(|idle| !is_busy(&self.segments, idle.upto)) {
            (idle.call)();
        }
    }

    fn record_written(&mut self, entry: &LogEntry) {
        let Some(segment) = self.segments.get_mut(&entry.epoch) else { return };
        segment.written += 1;
        segment.entries.insert(entry.sequence, WrittenEntry { entry: *entry, live_bytes: entry.bytes });
        let segments = &mut self.segments;
        let record_overwritten = |Overwritten { epoch, sequence, bytes }| {
            let Some(segment) = segments.get_mut(&epoch) else { return };
            let Some(overwritten) = segment.entries.get_mut(&sequence) else { return };
            overwritten.live_bytes = overwritten.live_bytes.saturating_sub(bytes);
            // A newer epoch does not overwrite the disk of an older one.
            if overwritten.live_bytes == 0 && epoch == entry.epoch {
                let after_written = segment.written;
                segment.overwritten.push(OverwrittenEntry { sequence, after_written });
            }
        };
        self.index.insert(entry.disk_range(), entry.sequence, entry.source(), record_overwritten);
    }

    /// Returns the pieces of `bytes` bytes of the disk from byte `disk_offset` on, in order and without gaps.
    #[must_use]
    pub fn look_up(&self, disk_offset: u64, bytes: u64) -> Vec<LocatedPiece> {
        let mut pieces = self.index.look_up(disk_offset..disk_offset + bytes);
        for piece in &mut pieces {
            piece.source.take_if(|source| source.epoch() <= self.merged);
        }
        pieces
    }

    /// Ends the current epoch: later writes are of the next epoch. Returns the epoch whose content the disk now has,
    /// provided that no write is in progress. Returns `None` if the next segment is missing. Does not end an epoch
    /// without writes.
    pub fn mark(&mut self) -> Option<u64> {
        if self.segments.contains_key(&self.epoch) {
            if !self.ready_segments.contains_key(&(self.epoch + 1)) {
                return None;
            }
            self.closed = self.epoch;
            self.epoch += 1;
        }
        Some(self.closed)
    }

    /// Returns the last ended epoch.
    #[must_use]
    pub fn closed(&self) -> u64 {
        self.closed
    }

    /// Returns the segments up to `upto` with entries that are not known to be durable; `None` if a sync of one of
    /// them has failed.
    #[must_use]
    pub fn unsynced(&self, upto: u64) -> Option<Vec<Unsynced<F>>> {
        let segments = || self.segments.range(..=upto).map(|(_, segment)| segment);
        if segments().any(|segment| segment.has_failed_sync) {
            return None;
        }
        let dirty = segments().filter(|segment| segment.synced < segment.written);
        let unsynced = |segment: &Segment<F>| Unsynced {
            epoch: segment.epoch,
            file: segment.file.clone(),
            written: segment.written,
        };
        Some(dirty.map(unsynced).collect())
    }

    /// Records the result of a sync. Returns whether the first `written` entries are durable. They are not durable if
    /// another sync of the segment failed, because the kernel reports an error to one sync only.
    pub fn record_sync(&mut self, epoch: u64, written: u64, outcome: SyncOutcome) -> bool {
        // The content of a merged segment is in the image, which was synced.
        let Some(segment) = self.segments.get_mut(&epoch) else { return outcome == SyncOutcome::Synced };
        segment.has_failed_sync |= outcome == SyncOutcome::Failed;
        if !segment.has_failed_sync {
            segment.synced = segment.synced.max(written);
        }
        !segment.has_failed_sync
    }

    /// Returns the segments with space that could be reclaimed if they were durable.
    #[must_use]
    pub fn reclaimable(&self) -> Vec<Unsynced<F>> {
        let has_overwritten =
            |epoch: u64| self.segments.get(&epoch).is_some_and(|segment| !segment.overwritten.is_empty());
        let unsynced = self.unsynced(u64::MAX).unwrap_or_default();
        unsynced.into_iter().filter(|segment| has_overwritten(segment.epoch)).collect()
    }

    /// Reclaims the space of entries that durable entries of the same epoch have overwritten, but only when the log
    /// is over half its limit.
    pub fn reclaim(&mut self) -> Vec<ReclaimedSpace<F>> {
        let mut reclaimed = Vec::new();
        if self.bytes * 2 <= self.limit {
            return reclaimed;
        }
        for segment in self.segments.values_mut().filter(|segment| !segment.has_failed_sync) {
            let synced = segment.synced;
            for overwritten in segment.overwritten.extract_if(.., |entry| entry.after_written <= synced) {
                if let Some(WrittenEntry { entry, .. }) = segment.entries.remove(&overwritten.sequence) {
                    let bytes = entry.length();
                    segment.bytes -= bytes;
                    self.bytes -= bytes;
                    reclaimed.push(ReclaimedSpace { file: segment.file.clone(), offset: entry.offset, bytes });
                }
            }
        }
        reclaimed
    }

    /// Returns the bytes of the current epoch.
    #[must_use]
    pub fn current_bytes(&self) -> u64 {
        self.segments.get(&self.epoch).map_or(0, |segment| segment.bytes)
    }

    /// Ends the current epoch, and accepts no more writes.
    pub fn close(&mut self) {
        (self.closed, self.epoch) = (self.epoch, self.epoch + 1);
    }

    /// Continues a closed log with epochs after `last`. The state may name the epochs up to `last` as merged.
    ///
    /// *Needs:* the log is empty, and no write is in progress.
    pub fn reopen_after(&mut self, last: u64) {
        (self.closed, self.epoch) = (self.closed.max(last), self.epoch.max(last + 1));
        self.ready_segments = self.ready_segments.split_off(&self.epoch);
    }

    /// Calls `call` once no write into an epoch up to `upto` is in progress, possibly immediately. `call` must not
    /// block.
    pub fn when_idle(&mut self, upto: u64, call: impl FnOnce() + Send + 'static) {
        if is_busy(&self.segments, upto) {
            self.when_idle = Some(WhenIdle { upto, call: Box::new(call) });
        } else {
            call();
        }
    }

    /// Returns the entries to merge up to an epoch; `None` if there are none. Only ended epochs are merged.
    #[must_use]
    pub fn batch(&self, upto: u64) -> Option<Batch<F>> {
        let first_busy = self.segments.values().find(|segment| segment.unfinished > 0);
        let last_idle_epoch = first_busy.map_or(u64::MAX, |segment| segment.epoch - 1);
        let upto = upto.min(self.closed).min(last_idle_epoch);
        if upto <= self.merged {
            return None;
        }
        let (mut segments, mut entries) = (BTreeMap::new(), Vec::new());
        for (epoch, segment) in self.segments.range(..=upto) {
            segments.insert(*epoch, BatchSegment { file: segment.file.clone(), nonce: segment.nonce });
            entries.extend(segment.entries.values().map(|written| written.entry));
        }
        Some(Batch { upto, segments, entries })
    }

    /// Records that all writes up to an epoch are in the image.
    pub fn merged_to(&mut self, upto: u64) {
        self.merged = self.merged.max(upto);
        let later = self.segments.split_off(&(upto + 1));
        for segment in std::mem::replace(&mut self.segments, later).into_values() {
            self.bytes -= segment.bytes;
            self.merged_ranges.extend(segment.entries.values().map(|written| written.entry.disk_range()));
        }
    }

    /// Removes some merged extents from the index. Returns whether there are more. One call does not remove all of
    /// them, because a guest may be waiting.
    pub fn sweep(&mut self) -> bool {
        let first_swept = self.merged_ranges.len().saturating_sub(MAX_SWEPT_ENTRIES);
        for range in self.merged_ranges.drain(first_swept..) {
            self.index.forget(&range, self.merged);
        }
        !self.merged_ranges.is_empty()
    }
}
