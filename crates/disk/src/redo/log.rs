//! The log as its server has it in hand: where the next write goes, and where each sector is.
//!
//! Nothing here touches a file. Who moves the data asks for a place, writes there, and says when that has ended; so the same is
//! used by the engine (`io_uring`, many at a time) and by tests that lose, tear and reorder what was written.

use super::format::{Header, PAGE, Page, What, length, sum, write_header};
use super::index::{Index, Source};
use std::collections::BTreeMap;
use uuid::Uuid;

pub mod seal;

/// Records of segments that were merged, which are forgotten at a time.
const SWEPT: usize = 4096;

/// A place in the log that was given to a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// The segment.
    pub epoch: u64,
    /// Where its header begins there.
    pub offset: u64,
    /// What is newer has a higher one.
    pub sequence: u64,
    /// First byte of the disk.
    pub at: u64,
    /// Bytes of the disk.
    pub bytes: u64,
    /// What is written.
    pub what: What,
}

impl Placed {
    /// Bytes of the segment.
    #[must_use]
    pub fn length(&self) -> u64 {
        length(self.what, self.bytes)
    }

    fn source(&self) -> Source {
        match self.what {
            What::Data => Source::Data { epoch: self.epoch, at: self.offset + PAGE },
            What::Zeroes => Source::Zeroes { epoch: self.epoch, hole: false },
            What::Hole => Source::Zeroes { epoch: self.epoch, hole: true },
        }
    }
}

/// Why a write has no place yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The segment of this epoch is being made.
    Segment(u64),
    /// The log is as long as it may be.
    Limit,
}

/// An entry that was written.
#[derive(Debug, Clone, Copy)]
struct Record {
    placed: Placed,
    /// Bytes that no newer entry has overwritten.
    live: u64,
}

/// The segment of an epoch.
#[derive(Debug)]
pub struct Segment<F> {
    epoch: u64,
    nonce: u128,
    file: F,
    tail: u64,
    /// By sequence.
    records: BTreeMap<u64, Record>,
    /// Bytes that it takes.
    bytes: u64,
    /// Entries that were written, and those of them that are durable.
    written: u64,
    synced: u64,
    /// Places that were given and not written yet.
    open: u64,
    /// A sync has failed: what is durable is not known any more.
    broken: bool,
    /// Overwritten in the same epoch, and how many entries had been written then.
    dead: Vec<(u64, u64)>,
    /// It has a seal record, and the state names its epoch.
    is_sealed: bool,
}

impl<F> Segment<F> {
    /// An empty one.
    #[must_use]
    pub fn new(epoch: u64, nonce: u128, file: F) -> Self {
        let (records, dead) = (BTreeMap::new(), Vec::new());
        let (tail, bytes) = (PAGE, PAGE);
        let (broken, is_sealed) = (false, false);
        Self { epoch, nonce, file, tail, records, bytes, written: 0, synced: 0, open: 0, broken, dead, is_sealed }
    }

    /// Of which epoch it is.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

/// A segment that is to be synced.
#[derive(Debug, Clone)]
pub struct Unsynced<F> {
    /// Its epoch.
    pub epoch: u64,
    /// Its file.
    pub file: F,
    /// Entries that were written, and will be durable.
    pub written: u64,
}

/// What is to be merged.
#[derive(Debug)]
pub struct Batch<F> {
    /// Up to this epoch.
    pub upto: u64,
    /// Segments by epoch: the file, and the nonce that its entries have.
    pub segments: BTreeMap<u64, (F, u128)>,
    entries: Vec<Placed>,
}

impl<F> Batch<F> {
    /// The last content of each sector, in the order of the disk: first byte, bytes, the entry that has it.
    #[must_use]
    pub fn resolve(&self) -> Vec<(u64, u64, Placed)> {
        let mut index = Index::default();
        for entry in &self.entries {
            index.insert(entry.at, entry.at + entry.bytes, entry.sequence, entry.source(), |_, _, _| ());
        }
        let entries: BTreeMap<u64, &Placed> = self.entries.iter().map(|entry| (entry.sequence, entry)).collect();
        let pieces = index.all();
        pieces.filter_map(|(at, bytes, sequence)| Some((at, bytes, **entries.get(&sequence)?))).collect()
    }
}

/// Called when no write is under way any more.
struct WhenIdle(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for WhenIdle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WhenIdle")
    }
}

/// See [the module](self).
#[derive(Debug)]
pub struct Log<F> {
    disk: Uuid,
    /// What is written now is of this.
    epoch: u64,
    /// The last one that nothing is written to any more.
    closed: u64,
    /// Up to here everything is in the image.
    merged: u64,
    sequence: u64,
    segments: BTreeMap<u64, Segment<F>>,
    /// Segments of epochs in which nothing was written yet.
    ready: BTreeMap<u64, Segment<F>>,
    index: Index,
    bytes: u64,
    limit: u64,
    /// Parts of the disk whose entries are in the image, still to be forgotten.
    retired: Vec<(u64, u64)>,
    /// Called when nothing is under way into epochs up to this one.
    when_idle: Option<(u64, WhenIdle)>,
}

fn is_busy<F>(segments: &BTreeMap<u64, Segment<F>>, upto: u64) -> bool {
    segments.range(..=upto).any(|(_, segment)| segment.open > 0)
}

impl<F: Clone> Log<F> {
    /// A log without segments: epochs up to `closed` are what they are, `epoch` is the next one.
    #[must_use]
    pub fn new(disk: Uuid, epoch: u64, closed: u64, merged: u64, limit: u64) -> Self {
        let (segments, ready, index) = (BTreeMap::new(), BTreeMap::new(), Index::default());
        let (retired, when_idle) = (Vec::new(), None);
        Self { disk, epoch, closed, merged, sequence: 1, segments, ready, index, bytes: 0, limit, retired, when_idle }
    }

    /// The disk's identity.
    #[must_use]
    pub fn disk(&self) -> Uuid {
        self.disk
    }

    /// The epoch of what is written now.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Up to here everything is in the image.
    #[must_use]
    pub fn merged(&self) -> u64 {
        self.merged
    }

    /// Bytes that its segments take, and may take.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes, self.limit)
    }

    /// Extents in memory.
    #[must_use]
    pub fn extents(&self) -> usize {
        self.index.len()
    }

    /// Whether no write is in it that is not in the image.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// A segment that was found, with its entries. `is_sealed`: its epoch is sealed, and it has a seal record.
    pub(crate) fn found(&mut self, segment: Segment<F>, end: u64, entries: Vec<Placed>, is_sealed: bool) {
        let epoch = segment.epoch;
        self.segments.insert(epoch, Segment { tail: end, ..segment });
        self.bytes += PAGE;
        for placed in entries {
            self.sequence = self.sequence.max(placed.sequence + 1);
            self.account(&placed);
            self.hold(&placed);
        }
        if let Some(segment) = self.segments.get_mut(&epoch) {
            segment.synced = segment.written;
        }
        if is_sealed {
            self.sealed(&[epoch]);
        }
    }

    fn account(&mut self, placed: &Placed) {
        self.bytes += placed.length();
        if let Some(segment) = self.segments.get_mut(&placed.epoch) {
            segment.bytes += placed.length();
        }
    }

    /// Epochs whose segments should be made: the current one, and the next, so that a mark need not wait.
    #[must_use]
    pub fn wanted(&self) -> Vec<u64> {
        let next = [self.epoch, self.epoch + 1].into_iter();
        next.filter(|epoch| !self.segments.contains_key(epoch) && !self.ready.contains_key(epoch)).collect()
    }

    /// A segment has been made.
    pub fn provide(&mut self, segment: Segment<F>) {
        self.ready.insert(segment.epoch, segment);
    }

    /// A place for a write of whole sectors. `limited`: none if the log gets longer than it may be.
    ///
    /// # Errors
    /// [`Wait`].
    pub fn place(&mut self, at: u64, bytes: u64, what: What, limited: bool) -> Result<Placed, Wait> {
        let epoch = self.epoch;
        if limited && self.bytes + length(what, bytes) > self.limit {
            return Err(Wait::Limit);
        }
        if !self.segments.contains_key(&epoch) {
            let segment = self.ready.remove(&epoch).ok_or(Wait::Segment(epoch))?;
            self.bytes += segment.bytes;
            self.segments.insert(epoch, segment);
        }
        let segment = self.segments.get_mut(&epoch).ok_or(Wait::Segment(epoch))?;
        let placed = Placed { epoch, offset: segment.tail, sequence: self.sequence, at, bytes, what };
        segment.tail += placed.length();
        segment.open += 1;
        self.sequence += 1;
        self.account(&placed);
        Ok(placed)
    }

    /// The header of a write that has a place.
    #[must_use]
    pub fn header(&self, placed: &Placed, data: &[u8]) -> Page {
        let Placed { sequence, at, bytes, what, .. } = *placed;
        let nonce = self.segments.get(&placed.epoch).map_or(0, |segment| segment.nonce);
        write_header(&Header { sequence, at, bytes, what, data: sum(data) }, nonce, placed.offset)
    }

    /// The file of an epoch's segment.
    #[must_use]
    pub fn file(&self, epoch: u64) -> Option<F> {
        self.segments.get(&epoch).map(|segment| segment.file.clone())
    }

    /// A write has ended well: from here on it is what is read.
    pub fn written(&mut self, placed: &Placed) {
        self.abandoned(placed);
        self.hold(placed);
    }

    /// A write has failed, and will not be tried again: nobody reads its place.
    pub fn abandoned(&mut self, placed: &Placed) {
        if let Some(segment) = self.segments.get_mut(&placed.epoch) {
            segment.open = segment.open.saturating_sub(1);
        }
        if let Some((_, WhenIdle(call))) = self.when_idle.take_if(|(upto, _)| !is_busy(&self.segments, *upto)) {
            call();
        }
    }

    fn hold(&mut self, placed: &Placed) {
        let Some(segment) = self.segments.get_mut(&placed.epoch) else { return };
        segment.written += 1;
        segment.records.insert(placed.sequence, Record { placed: *placed, live: placed.bytes });
        let segments = &mut self.segments;
        let loses = |epoch: u64, sequence: u64, bytes: u64| {
            let Some(segment) = segments.get_mut(&epoch) else { return };
            let Some(record) = segment.records.get_mut(&sequence) else { return };
            record.live = record.live.saturating_sub(bytes);
            // An older epoch's disk needs its own.
            if record.live == 0 && epoch == placed.epoch {
                segment.dead.push((sequence, segment.written));
            }
        };
        self.index.insert(placed.at, placed.at + placed.bytes, placed.sequence, placed.source(), loses);
    }

    /// The pieces of a part of the disk: first byte, bytes, and where they are if not in the image.
    #[must_use]
    pub fn look_up(&self, at: u64, bytes: u64) -> Vec<(u64, u64, Option<Source>)> {
        let mut pieces = self.index.look_up(at, at + bytes);
        for (_, _, source) in &mut pieces {
            source.take_if(|source| source.epoch() <= self.merged);
        }
        pieces
    }

    /// What gets a place from here on is of the next epoch. Gives the one that the disk is as of now, if nothing is under way; `None`
    /// if the next segment is missing. An epoch without writes is not ended.
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

    /// The last epoch that nothing is written to any more.
    #[must_use]
    pub fn closed(&self) -> u64 {
        self.closed
    }

    /// The segments up to `upto` that hold what is not known to be durable; `None` if one cannot be made so.
    #[must_use]
    pub fn unsynced(&self, upto: u64) -> Option<Vec<Unsynced<F>>> {
        let segments = || self.segments.range(..=upto).map(|(_, segment)| segment);
        if segments().any(|segment| segment.broken) {
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

    /// A sync has ended. Gives whether so many entries are durable: they are not where another sync of the segment has failed, since
    /// the kernel reports that to one of them only.
    pub fn synced(&mut self, epoch: u64, written: u64, is_good: bool) -> bool {
        // One that was merged is in the image, which was synced.
        let Some(segment) = self.segments.get_mut(&epoch) else { return is_good };
        segment.broken |= !is_good;
        if !segment.broken {
            segment.synced = segment.synced.max(written);
        }
        !segment.broken
    }

    /// Segments with room that could be reclaimed if they were durable.
    #[must_use]
    pub fn reclaimable(&self) -> Vec<Unsynced<F>> {
        let has = |epoch: u64| self.segments.get(&epoch).is_some_and(|segment| !segment.dead.is_empty());
        let all = self.unsynced(u64::MAX).unwrap_or_default();
        all.into_iter().filter(|unsynced| has(unsynced.epoch)).collect()
    }

    /// Room of entries that nobody needs any more: they were overwritten in their own epoch, by what is durable. Only when the log is
    /// more than half as long as it may be. File, first byte, bytes.
    pub fn reclaim(&mut self) -> Vec<(F, u64, u64)> {
        let mut found = Vec::new();
        if self.bytes * 2 <= self.limit {
            return found;
        }
        for segment in self.segments.values_mut().filter(|segment| !segment.broken) {
            let synced = segment.synced;
            for (sequence, _) in segment.dead.extract_if(.., |(_, written)| *written <= synced) {
                if let Some(Record { placed, .. }) = segment.records.remove(&sequence) {
                    segment.bytes -= placed.length();
                    self.bytes -= placed.length();
                    found.push((segment.file.clone(), placed.offset, placed.length()));
                }
            }
        }
        found
    }

    /// Bytes of the epoch that is written now.
    #[must_use]
    pub fn current_bytes(&self) -> u64 {
        self.segments.get(&self.epoch).map_or(0, |segment| segment.bytes)
    }

    /// End the current epoch, and write nothing more.
    pub fn close(&mut self) {
        (self.closed, self.epoch) = (self.epoch, self.epoch + 1);
    }

    /// Calls `call` once no write is under way into an epoch up to `upto`: now, or when the last of them ends. `call` must not block.
    pub fn when_idle(&mut self, upto: u64, call: impl FnOnce() + Send + 'static) {
        if is_busy(&self.segments, upto) {
            self.when_idle = Some((upto, WhenIdle(Box::new(call))));
        } else {
            call();
        }
    }

    /// What is to be merged up to an epoch; `None` if nothing is. No epoch that may still be written to is merged.
    #[must_use]
    pub fn batch(&self, upto: u64) -> Option<Batch<F>> {
        let busy = self.segments.values().find(|segment| segment.open > 0).map(|segment| segment.epoch - 1);
        let upto = upto.min(self.closed).min(busy.unwrap_or(u64::MAX));
        if upto <= self.merged {
            return None;
        }
        let segments = || self.segments.range(..=upto);
        let files = segments().map(|(epoch, segment)| (*epoch, (segment.file.clone(), segment.nonce))).collect();
        let records = segments().flat_map(|(_, segment)| segment.records.values());
        Some(Batch { upto, segments: files, entries: records.map(|record| record.placed).collect() })
    }

    /// Everything up to an epoch is in the image.
    pub fn merged_to(&mut self, upto: u64) {
        self.merged = self.merged.max(upto);
        let later = self.segments.split_off(&(upto + 1));
        for segment in std::mem::replace(&mut self.segments, later).into_values() {
            self.bytes -= segment.bytes;
            let ranges = segment.records.values().map(|Record { placed, .. }| (placed.at, placed.at + placed.bytes));
            self.retired.extend(ranges);
        }
    }

    /// Forget some of what is in the image; whether there is more. Not all at once: a guest may be waiting.
    pub fn sweep(&mut self) -> bool {
        let from = self.retired.len().saturating_sub(SWEPT);
        for (at, end) in self.retired.drain(from..) {
            self.index.forget(at, end, self.merged);
        }
        !self.retired.is_empty()
    }
}
