//! The log in a server's memory: the place of the next write, and the place of each sector.
//!
//! This module does no I/O. The caller allocates an entry, writes it and reports the result. So the engine
//! (`io_uring`, many writes at a time) and tests that lose, tear and reorder writes use the same code.

use super::format::{EntryHeader, EntryKind, PAGE, Page, checksum, length, write_header};
use super::index::{Index, Source};
use std::collections::BTreeMap;
use std::io;
use uuid::Uuid;

pub mod seal;

/// Most records of merged segments that one [`Log::sweep`] forgets.
const SWEEP_RECORDS: usize = 4096;

/// The place of a write in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEntry {
    pub epoch: u64,
    /// Offset of the entry's header in the segment.
    pub offset: u64,
    /// Newer entries have a higher number.
    pub sequence: u64,
    /// First byte on the disk.
    pub at: u64,
    pub bytes: u64,
    pub what: EntryKind,
}

impl LogEntry {
    /// Returns the entry's bytes in the segment.
    #[must_use]
    pub fn length(&self) -> u64 {
        length(self.what, self.bytes)
    }

    fn source(&self) -> Source {
        match self.what {
            EntryKind::Data => Source::Data { epoch: self.epoch, at: self.offset + PAGE },
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
    placed: LogEntry,
    /// Bytes that no newer entry has overwritten.
    live: u64,
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

#[derive(Debug)]
pub struct Segment<F> {
    epoch: u64,
    nonce: u128,
    file: F,
    /// Offset of the next entry.
    tail: u64,
    /// Entries by sequence number.
    records: BTreeMap<u64, WrittenEntry>,
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
            tail: PAGE,
            records: BTreeMap::new(),
            bytes: PAGE,
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
    /// The segments by epoch: the file, and the nonce of its entries.
    pub segments: BTreeMap<u64, (F, u128)>,
    entries: Vec<LogEntry>,
}

impl<F> Batch<F> {
    /// Returns the newest content of each sector, in disk order: first byte, bytes, the entry that has it.
    #[must_use]
    pub fn resolve(&self) -> Vec<(u64, u64, LogEntry)> {
        let mut index = Index::default();
        for entry in &self.entries {
            index.insert(entry.at, entry.at + entry.bytes, entry.sequence, entry.source(), |_, _, _| ());
        }
        let entries: BTreeMap<u64, &LogEntry> = self.entries.iter().map(|entry| (entry.sequence, entry)).collect();
        let pieces = index.all();
        pieces.filter_map(|(at, bytes, sequence)| Some((at, bytes, **entries.get(&sequence)?))).collect()
    }
}

/// A callback for the moment when no write is in progress.
struct WhenIdle(Box<dyn FnOnce() + Send>);

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
    sequence: u64,
    segments: BTreeMap<u64, Segment<F>>,
    /// Segments of epochs without writes.
    ready: BTreeMap<u64, Segment<F>>,
    index: Index,
    bytes: u64,
    limit: u64,
    /// Parts of the disk whose extents are still to be forgotten: their entries are in the image.
    retired: Vec<(u64, u64)>,
    /// The callback to call when no write into epochs up to this one is in progress.
    when_idle: Option<(u64, WhenIdle)>,
}

fn is_busy<F>(segments: &BTreeMap<u64, Segment<F>>, upto: u64) -> bool {
    segments.range(..=upto).any(|(_, segment)| segment.unfinished > 0)
}

impl<F: Clone> Log<F> {
    /// Creates a log without segments.
    #[must_use]
    pub fn new(disk: Uuid, epoch: u64, closed: u64, merged: u64, limit: u64) -> Self {
        let (segments, ready, index) = (BTreeMap::new(), BTreeMap::new(), Index::default());
        let (retired, when_idle) = (Vec::new(), None);
        Self { disk, epoch, closed, merged, sequence: 1, segments, ready, index, bytes: 0, limit, retired, when_idle }
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

    /// Returns the bytes in use, and the limit.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes, self.limit)
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
        self.bytes += PAGE;
        for placed in entries {
            self.sequence = self.sequence.max(placed.sequence + 1);
            self.account(&placed);
            self.record_written(&placed);
        }
        if let Some(segment) = self.segments.get_mut(&epoch) {
            segment.synced = segment.written;
        }
        if is_sealed {
            self.mark_sealed(&[epoch]);
        }
    }

    fn account(&mut self, placed: &LogEntry) {
        self.bytes += placed.length();
        if let Some(segment) = self.segments.get_mut(&placed.epoch) {
            segment.bytes += placed.length();
        }
    }

    /// Returns the epochs that need a segment: the current epoch, and the next one, so that a mark need not wait.
    #[must_use]
    pub fn missing_segments(&self) -> Vec<u64> {
        let next = [self.epoch, self.epoch + 1].into_iter();
        next.filter(|epoch| !self.segments.contains_key(epoch) && !self.ready.contains_key(epoch)).collect()
    }

    /// Adds a segment for an epoch without writes.
    pub fn add_ready(&mut self, segment: Segment<F>) {
        self.ready.insert(segment.epoch, segment);
    }

    /// Allocates an entry for a write of whole sectors.
    pub fn allocate(
        &mut self,
        at: u64,
        bytes: u64,
        what: EntryKind,
        limit: SpaceLimit,
    ) -> Result<LogEntry, CannotAllocate> {
        let epoch = self.epoch;
        if limit == SpaceLimit::Enforced && self.bytes + length(what, bytes) > self.limit {
            return Err(CannotAllocate::Limit);
        }
        if !self.segments.contains_key(&epoch) {
            let segment = self.ready.remove(&epoch).ok_or(CannotAllocate::Segment(epoch))?;
            self.bytes += segment.bytes;
            self.segments.insert(epoch, segment);
        }
        let segment = self.segments.get_mut(&epoch).ok_or(CannotAllocate::Segment(epoch))?;
        let placed = LogEntry { epoch, offset: segment.tail, sequence: self.sequence, at, bytes, what };
        segment.tail += placed.length();
        segment.unfinished += 1;
        self.sequence += 1;
        self.account(&placed);
        Ok(placed)
    }

    /// Returns the header of an allocated entry.
    #[must_use]
    pub fn header(&self, placed: &LogEntry, data: &[u8]) -> Page {
        let LogEntry { sequence, at, bytes, what, .. } = *placed;
        let nonce = self.segments.get(&placed.epoch).map_or(0, |segment| segment.nonce);
        write_header(&EntryHeader { sequence, at, bytes, what, data: checksum(data) }, nonce, placed.offset)
    }

    #[must_use]
    pub fn file(&self, epoch: u64) -> Option<F> {
        self.segments.get(&epoch).map(|segment| segment.file.clone())
    }

    /// Records that a write has completed: later reads return its data.
    pub fn written(&mut self, placed: &LogEntry) {
        self.abandoned(placed);
        self.record_written(placed);
    }

    /// Records that a write has failed and is not repeated: its entry is never read.
    pub fn abandoned(&mut self, placed: &LogEntry) {
        if let Some(segment) = self.segments.get_mut(&placed.epoch) {
            segment.unfinished = segment.unfinished.saturating_sub(1);
        }
        if let Some((_, WhenIdle(call))) = self.when_idle.take_if(|(upto, _)| !is_busy(&self.segments, *upto)) {
            call();
        }
    }

    fn record_written(&mut self, placed: &LogEntry) {
        let Some(segment) = self.segments.get_mut(&placed.epoch) else { return };
        segment.written += 1;
        segment.records.insert(placed.sequence, WrittenEntry { placed: *placed, live: placed.bytes });
        let segments = &mut self.segments;
        let loses = |epoch: u64, sequence: u64, bytes: u64| {
            let Some(segment) = segments.get_mut(&epoch) else { return };
            let Some(record) = segment.records.get_mut(&sequence) else { return };
            record.live = record.live.saturating_sub(bytes);
            // A newer epoch does not overwrite the disk of an older one.
            if record.live == 0 && epoch == placed.epoch {
                let after_written = segment.written;
                segment.overwritten.push(OverwrittenEntry { sequence, after_written });
            }
        };
        self.index.insert(placed.at, placed.at + placed.bytes, placed.sequence, placed.source(), loses);
    }

    /// Returns the pieces of a part of the disk: first byte, bytes, and the source, which is `None` for the image.
    #[must_use]
    pub fn look_up(&self, at: u64, bytes: u64) -> Vec<(u64, u64, Option<Source>)> {
        let mut pieces = self.index.look_up(at, at + bytes);
        for (_, _, source) in &mut pieces {
            source.take_if(|source| source.epoch() <= self.merged);
        }
        pieces
    }

    /// Ends the current epoch: later writes are of the next epoch. Returns the epoch whose content the disk now has,
    /// provided that no write is in progress. Returns `None` if the next segment is missing. Does not end an epoch
    /// without writes.
    pub fn mark(&mut self) -> Option<u64> {
        if self.segments.contains_key(&self.epoch) {
            if !self.ready.contains_key(&(self.epoch + 1)) {
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
        let has = |epoch: u64| self.segments.get(&epoch).is_some_and(|segment| !segment.overwritten.is_empty());
        let all = self.unsynced(u64::MAX).unwrap_or_default();
        all.into_iter().filter(|unsynced| has(unsynced.epoch)).collect()
    }

    /// Reclaims the space of entries that durable entries of the same epoch have overwritten, but only when the log
    /// is over half its limit. Returns the reclaimed parts: file, first byte, bytes.
    pub fn reclaim(&mut self) -> Vec<(F, u64, u64)> {
        let mut reclaimed = Vec::new();
        if self.bytes * 2 <= self.limit {
            return reclaimed;
        }
        for segment in self.segments.values_mut().filter(|segment| !segment.has_failed_sync) {
            let synced = segment.synced;
            for entry in segment.overwritten.extract_if(.., |entry| entry.after_written <= synced) {
                if let Some(WrittenEntry { placed, .. }) = segment.records.remove(&entry.sequence) {
                    segment.bytes -= placed.length();
                    self.bytes -= placed.length();
                    reclaimed.push((segment.file.clone(), placed.offset, placed.length()));
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

    /// Calls `call` once no write into an epoch up to `upto` is in progress, possibly immediately. `call` must not
    /// block.
    pub fn when_idle(&mut self, upto: u64, call: impl FnOnce() + Send + 'static) {
        if is_busy(&self.segments, upto) {
            self.when_idle = Some((upto, WhenIdle(Box::new(call))));
        } else {
            call();
        }
    }

    /// Returns the entries to merge up to an epoch; `None` if there are none. Only ended epochs are merged.
    #[must_use]
    pub fn batch(&self, upto: u64) -> Option<Batch<F>> {
        let busy = self.segments.values().find(|segment| segment.unfinished > 0).map(|segment| segment.epoch - 1);
        let upto = upto.min(self.closed).min(busy.unwrap_or(u64::MAX));
        if upto <= self.merged {
            return None;
        }
        let segments = || self.segments.range(..=upto);
        let files = segments().map(|(epoch, segment)| (*epoch, (segment.file.clone(), segment.nonce))).collect();
        let records = segments().flat_map(|(_, segment)| segment.records.values());
        Some(Batch { upto, segments: files, entries: records.map(|record| record.placed).collect() })
    }

    /// Records that all writes up to an epoch are in the image.
    pub fn merged_to(&mut self, upto: u64) {
        self.merged = self.merged.max(upto);
        let later = self.segments.split_off(&(upto + 1));
        for segment in std::mem::replace(&mut self.segments, later).into_values() {
            self.bytes -= segment.bytes;
            let ranges =
                segment.records.values().map(|WrittenEntry { placed, .. }| (placed.at, placed.at + placed.bytes));
            self.retired.extend(ranges);
        }
    }

    /// Removes some merged extents from the index. Returns whether there are more. One call does not remove all of
    /// them, because a guest may be waiting.
    pub fn sweep(&mut self) -> bool {
        let from = self.retired.len().saturating_sub(SWEEP_RECORDS);
        for (at, end) in self.retired.drain(from..) {
            self.index.forget(at, end, self.merged);
        }
        !self.retired.is_empty()
    }
}
