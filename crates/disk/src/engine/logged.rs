//! Writes into the redo log, and reads from it.

use super::job::{Part, PartLocation, Work};
use super::{DEPTH, Engine, Token};
use crate::redo::files::LocalFile;
use crate::redo::format::{EntryKind, PAGE};
use crate::redo::index::Source;
use crate::redo::log::{CannotAllocate, Log, LogEntry};
use crate::report::warn_limited;
use crate::request::{Range, RequestStatus};
use rekindle_kernel::uring::{Buffer, Operation};
use serde::{Deserialize, Serialize};
use slab::Slab;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Time between two attempts of a write for which there is no space.
const AGAIN: Duration = Duration::from_millis(100);

/// An operation of the log that belongs to no request.
#[derive(Debug)]
enum LogOperation {
    Sync { epoch: u64, written: u64 },
    Punch,
}

/// Space to reclaim once all present requests have ended: one of them may be about to read it.
#[derive(Debug)]
struct PendingReclaim<F> {
    file: F,
    at: u64,
    bytes: u64,
    /// The first request that cannot read it.
    before: u64,
}

/// The state of a redo log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedoStatus {
    /// The disk's identity.
    pub disk: Uuid,
    /// The current epoch.
    pub epoch: u64,
    /// The newest sealed epoch.
    pub sealed: u64,
    /// The image has all writes of epochs up to this.
    pub merged: u64,
    /// Bytes in use.
    pub bytes: u64,
    /// Most bytes.
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
    pub image_dirty: bool,
    /// New writes wait: the log is about to end.
    pub closing: bool,
    /// Called when a segment or free space is needed.
    wanted: KeeperCallback,
    held: VecDeque<(usize, u32)>,
    waiting: Option<String>,
    /// Parts that wait for space.
    is_full: bool,
    /// Time of the next attempt.
    retry: Option<Instant>,
    own: Slab<LogOperation>,
    grace: Vec<PendingReclaim<F>>,
}

/// A callback that neither blocks nor visits the engine.
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
        f.write_str("Notify")
    }
}

impl<F: Clone> EngineLog<F> {
    /// `wanted` is called when a segment or free space is needed.
    #[must_use]
    pub fn new(log: Log<F>, wanted: KeeperCallback, image_dirty: bool) -> Self {
        let (held, own, grace) = (VecDeque::new(), Slab::new(), Vec::new());
        Self { log, image_dirty, closing: false, wanted, held, waiting: None, is_full: false, retry: None, own, grace }
    }

    /// The state as far as the engine knows it.
    #[must_use]
    pub fn status(&self) -> RedoStatus {
        let (bytes, limit) = self.log.bytes();
        RedoStatus {
            disk: self.log.disk(),
            epoch: self.log.epoch(),
            sealed: 0,
            merged: self.log.merged(),
            bytes,
            limit,
            extents: self.log.extents(),
            rewound: false,
            waiting: self.waiting.clone(),
            failed: None,
        }
    }

    /// Whether writes wait for space.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// The longest time to wait for an event.
    pub(super) fn limit(&mut self) -> Option<Duration> {
        if self.log.sweep() {
            return Some(Duration::ZERO);
        }
        self.retry.map(|retry| retry.saturating_duration_since(Instant::now()))
    }

    /// Requests a segment or free space for a write that has no place yet.
    pub(crate) fn want(&mut self, wait: CannotAllocate) {
        self.is_full |= wait == CannotAllocate::Limit;
        self.wanted.send();
    }

    /// Records that a write into the log has completed.
    pub(crate) fn written(&mut self, placed: &LogEntry) {
        self.log.written(placed);
        if self.held.is_empty() {
            (self.waiting, self.is_full) = (None, false);
        }
    }

    fn full(&mut self, number: usize, part: u32, why: &str) {
        self.want(CannotAllocate::Limit);
        self.hold(number, part, &format!("there is no room for the redo log where it is{why}"));
    }

    fn hold(&mut self, number: usize, part: u32, why: &str) {
        if self.waiting.as_deref() != Some(why) {
            warn_limited!("writes wait: {why}");
            self.waiting = Some(why.into());
        }
        self.held.push_back((number, part));
        self.retry.get_or_insert_with(|| Instant::now() + AGAIN);
    }
}

/// Whether an error means that there is no space.
fn is_full(error: &io::Error) -> bool {
    // A limit of the process or a quota has the effect of a full disk, and can be lifted like it.
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
}

impl Engine {
    /// Divides a read into parts.
    pub(super) fn cut_read(&self, range: Range, offset: u64) -> Vec<Part> {
        let Some(logged) = &self.logged else { return super::job::cut(Work::Read, range, offset) };
        let pieces = logged.log.look_up(range.at, range.bytes);
        let parts = pieces.into_iter().flat_map(|(at, bytes, source)| {
            let mut parts = super::job::cut(Work::Read, Range { at, bytes }, offset + (at - range.at));
            for part in &mut parts {
                part.place = match source.map(|source| source.skip(part.at - at)) {
                    None => PartLocation::Image,
                    Some(Source::Data { epoch, at }) => PartLocation::Segment { epoch, at },
                    Some(Source::Zeroes { .. }) => PartLocation::Zeroes,
                };
            }
            parts
        });
        parts.collect()
    }

    /// The parts of a flush; `None` if earlier writes cannot be made durable any more.
    pub(super) fn cut_flush(&self) -> Option<Vec<Part>> {
        let part = |place| Part { work: Work::Sync, at: 0, bytes: 0, offset: 0, place };
        let is_image_wanted = self.logged.as_ref().is_none_or(|logged| logged.image_dirty);
        if is_image_wanted && self.image.durability.is_broken() {
            return None;
        }
        let Some(logged) = &self.logged else { return Some(vec![part(PartLocation::Image)]) };
        let unsynced = logged.log.unsynced(u64::MAX)?.into_iter();
        let segments =
            unsynced.map(|segment| part(PartLocation::Segment { epoch: segment.epoch, at: segment.written }));
        let image = logged.image_dirty.then(|| part(PartLocation::Image));
        Some(image.into_iter().chain(segments).collect())
    }

    /// Starts writing a part into the log. It waits if there is no space.
    pub(super) fn append(&mut self, number: usize, part: u32, work: Part) {
        // The requests of a QEMU that stops its guest, or has disconnected, need not wait for a checkpoint; later ones wait for them.
        let is_left = self.jobs.get(number).is_none_or(|job| !self.fronts.contains_key(&job.session));
        let may_wait = self.stopping.is_empty() && !is_left && !self.ended;
        let Some(logged) = &mut self.logged else { return };
        let what = match work.work {
            Work::Discard | Work::Zero { hole: true } => EntryKind::Hole,
            Work::Zero { hole: false } | Work::ZeroByWriting => EntryKind::Zeroes,
            _ => EntryKind::Data,
        };
        let placed = match work.place {
            place if logged.closing => {
                if let PartLocation::Entry(placed) = place {
                    logged.log.abandoned(&placed);
                }
                logged.hold(number, part, "the log is about to end");
                if let Some(part) = self.jobs.get_mut(number).and_then(|job| job.parts.get_mut(part as usize)) {
                    part.place = PartLocation::Image;
                }
                return;
            }
            // Not the first attempt.
            PartLocation::Entry(placed) => placed,
            _ => match logged.log.allocate(work.at, work.bytes, what, may_wait) {
                Ok(placed) => placed,
                Err(wait @ CannotAllocate::Segment(epoch)) => {
                    logged.want(wait);
                    return logged.hold(number, part, &format!("epoch {epoch} has no segment yet"));
                }
                Err(CannotAllocate::Limit) => {
                    let (_, limit) = logged.log.bytes();
                    logged.want(CannotAllocate::Limit);
                    let why = format!(
                        "the redo log has reached its limit of {limit} bytes, because no checkpoint is committed. Check that \
                         rekindle protect runs, or discard the disk of the last checkpoint: rekindle disk merge"
                    );
                    logged.hold(number, part, &why);
                    return self.sync_to_reclaim();
                }
            },
        };
        if let Some(place) = self.jobs.get_mut(number).and_then(|job| job.parts.get_mut(part as usize)) {
            place.place = PartLocation::Entry(placed);
        }
        let mut buffer = self.buffer(placed.length() as usize);
        let len = work.bytes as usize;
        let (head, data) = buffer.split_at_mut(PAGE as usize);
        let data = match what {
            EntryKind::Data => {
                let (data, rest) = data.split_at_mut(len);
                rest.fill(0);
                if self.copy(number, part, data).is_none() {
                    self.abandon(&placed);
                    self.put_back(Some(buffer));
                    return self.part_done(number, RequestStatus::Failed);
                }
                &*data
            }
            EntryKind::Zeroes | EntryKind::Hole => &[],
        };
        let Some(logged) = &self.logged else { return };
        head.copy_from_slice(&logged.log.header(&placed, data));
        let Some(file) = logged.log.file(placed.epoch) else { return };
        if work.work == Work::Write {
            self.moving += len;
        }
        let operation = Operation::Write { at: placed.offset, len: placed.length() as usize, buffer };
        if self.ring.begin(&file.0, operation, Token::Part(number as u32, part).pack()).is_err() {
            // There is space: it was checked before.
            self.abandon(&placed);
            self.part_done(number, RequestStatus::Failed);
        }
    }

    fn abandon(&mut self, placed: &LogEntry) {
        if let Some(logged) = &mut self.logged {
            logged.log.abandoned(placed);
        }
    }

    /// Handles the completion of a write into the log. Retries it later if there is no space.
    pub(super) fn appended(
        &mut self,
        (number, part): (usize, u32),
        placed: &LogEntry,
        result: io::Result<usize>,
        buffer: Option<Buffer>,
    ) {
        let Some(logged) = &mut self.logged else { return };
        match result {
            Ok(written) if written as u64 == placed.length() => {
                logged.written(placed);
                return self.moved(number, part, buffer, PAGE as usize);
            }
            // A short write: no space for the rest.
            Ok(_) => logged.full(number, part, ""),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {
                self.waiting.push_back((number, part));
            }
            Err(e) if is_full(&e) => logged.full(number, part, &format!(" ({e})")),
            Err(e) => {
                warn_limited!("the redo log of {}: writing {} bytes: {e}", self.image.path.display(), placed.length());
                logged.log.abandoned(placed);
                self.part_done(number, RequestStatus::Failed);
            }
        }
        self.put_back(buffer);
    }

    /// Handles the completion of a part of a flush. Returns an error also if another sync of the image has received it.
    pub(super) fn flushed(&mut self, place: PartLocation, result: io::Result<usize>) -> io::Result<usize> {
        if matches!(&result, Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))) {
            return result;
        }
        match (place, &mut self.logged) {
            (PartLocation::Segment { epoch, at: written }, Some(logged)) => {
                let is_durable = logged.log.synced(epoch, written, result.is_ok());
                self.reclaim();
                if !is_durable && result.is_ok() {
                    return Err(io::Error::from_raw_os_error(libc::EIO));
                }
            }
            (PartLocation::Image, _) if result.is_err() => self.image.durability.set_broken(),
            (PartLocation::Image, _) if self.image.durability.is_broken() => {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            _ => {}
        }
        result
    }

    /// Retries waiting parts.
    pub(super) fn release(&mut self) {
        if let Some(logged) = &mut self.logged {
            logged.retry = None;
            self.waiting.extend(logged.held.drain(..));
        }
    }

    /// Retries waiting parts, if it is time.
    pub(super) fn release_if_due(&mut self) {
        if self.logged.as_ref().and_then(|logged| logged.retry).is_some_and(|retry| retry <= Instant::now()) {
            self.release();
        }
    }

    /// Lets waiting parts continue into the image: the log has ended.
    pub(super) fn unlogged(&mut self, logged: &mut EngineLog) {
        self.waiting.extend(logged.held.drain(..));
    }

    /// Syncs segments whose overwritten entries could then be reclaimed.
    fn sync_to_reclaim(&mut self) {
        let Some(logged) = &mut self.logged else { return };
        let is_syncing = |epoch| {
            logged.own.iter().any(|(_, own)| matches!(own, LogOperation::Sync { epoch: of, .. } if *of == epoch))
        };
        let unsynced = logged.log.reclaimable().into_iter().find(|segment| !is_syncing(segment.epoch));
        if let Some(segment) = unsynced {
            self.begin_log_operation(
                &segment.file,
                Operation::Sync,
                LogOperation::Sync { epoch: segment.epoch, written: segment.written },
            );
        } else {
            self.reclaim();
        }
    }

    fn begin_log_operation(&mut self, file: &LocalFile, operation: Operation, own: LogOperation) {
        let Some(logged) = &mut self.logged else { return };
        let number = logged.own.insert(own);
        if self.ring.begin(&file.0, operation, Token::LogOperation(number as u32).pack()).is_err() {
            logged.own.remove(number);
        }
    }

    pub(super) fn log_operation_ended(&mut self, number: u32, result: &io::Result<usize>) {
        let Some(logged) = &mut self.logged else { return };
        match logged.own.try_remove(number as usize) {
            Some(LogOperation::Sync { epoch, written }) => {
                logged.log.synced(epoch, written, result.is_ok());
                self.reclaim();
            }
            Some(LogOperation::Punch) | None => {}
        }
        if let Err(e) = result {
            warn_limited!("the redo log of {}: {e}", self.image.path.display());
        }
    }

    fn reclaim(&mut self) {
        let before = self.serial;
        let Some(logged) = &mut self.logged else { return };
        let found = logged.log.reclaim().into_iter();
        logged.grace.extend(found.map(|(file, at, bytes)| PendingReclaim { file, at, bytes, before }));
    }

    /// Reclaims space that no request in progress can be about to read.
    pub(super) fn punch(&mut self) {
        let Some(logged) = self.logged.as_mut().filter(|logged| !logged.grace.is_empty()) else { return };
        let oldest = self.jobs.iter().map(|(_, job)| job.serial).min().unwrap_or(u64::MAX);
        // Space in the ring is kept for requests, and for waiting for kicks.
        let mut room = (DEPTH as usize / 2).saturating_sub(self.ring.under_way());
        let is_free = |grace: &mut PendingReclaim<LocalFile>| {
            let is_free = grace.before <= oldest && room > 0;
            room -= usize::from(is_free);
            is_free
        };
        let free: Vec<PendingReclaim<LocalFile>> = logged.grace.extract_if(.., is_free).collect();
        for PendingReclaim { file, at, bytes, .. } in free {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            self.begin_log_operation(&file, Operation::Allocate { mode, at, len: bytes }, LogOperation::Punch);
        }
    }
}
