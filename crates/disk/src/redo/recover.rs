//! Opening a log after a crash, after a server was killed, or to return to a checkpoint.

use super::error::RedoError;
use super::files::{LogFile, LogFiles};
use super::format::{EntryKind, PAGE, checksum, read_head, read_header, read_seal, seal_length};
use super::log::{Log, LogEntry, Segment};
use super::state::{LogDirectory, segment_epoch, segment_name};
use rekindle_kernel::uring::Buffer;
use std::collections::BTreeSet;
use std::io;
use uuid::Uuid;

const WINDOW: u64 = 4 << 20;

/// The version of the disk to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiskVersion {
    /// The newest disk, with all writes.
    #[default]
    Newest,
    /// The disk of a checkpoint.
    Epoch { epoch: u64, disk: Uuid },
    /// The disk of a guest that resumed from a checkpoint and may not have written since. Epochs that the guest has
    /// not discarded by a write are not its own. The newest disk, if none of these epochs is left.
    Since {
        epoch: u64,
        disk: Uuid,
        /// The first epoch of the resumed guest.
        first: u64,
    },
}

/// Opens the log in `files` of a disk of `bytes` bytes; `None` if there is no log.
///
/// *On success:* all writes that were found are durable, in ended epochs. Nothing is discarded yet.
///
/// # Errors
/// After a [`RedoError`] nothing has changed.
#[allow(clippy::type_complexity, reason = "a log and where it is, or none")]
pub fn open<D: LogFiles>(
    files: D,
    bytes: u64,
    version: DiskVersion,
    limit: u64,
) -> Result<Option<(LogDirectory<D>, Log<D::File>)>, RedoError> {
    let path = files.path().to_owned();
    let failed = |doing| RedoError::io(&path, doing);
    let Some(mut log_dir) = LogDirectory::open(files)? else {
        return match version {
            DiskVersion::Newest | DiskVersion::Since { .. } => Ok(None),
            DiskVersion::Epoch { epoch, disk } => Err(RedoError::NoLog { path, epoch, disk }),
        };
    };
    let state = log_dir.state().clone();
    let names = log_dir.files().list().map_err(failed("reading the directory"))?;
    let mut epochs: Vec<u64> = names.iter().filter_map(|name| segment_epoch(name)).collect();
    epochs.sort_unstable();
    let version = match version {
        DiskVersion::Since { epoch, disk, first } => {
            let is_there = |of: &u64| (epoch + 1..first).contains(of) && *of > state.merged && !state.is_dead(*of);
            let is_left = disk == state.disk && epochs.iter().any(is_there);
            if is_left { DiskVersion::Epoch { epoch, disk } } else { DiskVersion::Newest }
        }
        other => other,
    };
    if let DiskVersion::Epoch { epoch, disk } = version {
        let path = path.clone();
        if disk != state.disk {
            return Err(RedoError::OtherDisk { path, found: state.disk, wanted: disk });
        } else if state.floor > epoch {
            return Err(RedoError::NewerDisk { path, epoch, floor: state.floor });
        } else if state.is_dead(epoch) {
            return Err(RedoError::Discarded { path, epoch });
        } else if epoch > state.sealed {
            return Err(RedoError::NotSealed { path, epoch, sealed: state.sealed });
        }
    }
    let given = [state.sealed, state.floor, state.merged].into_iter();
    let given = given.chain(state.dead.iter().map(|(_, last)| *last)).chain(epochs.iter().copied());
    let newest = given.max().unwrap_or(0);
    let closed = match version {
        DiskVersion::Epoch { epoch, .. } => epoch,
        DiskVersion::Newest | DiskVersion::Since { .. } => {
            (0..=newest).rev().find(|epoch| !state.is_dead(*epoch)).unwrap_or(0)
        }
    };
    let mut log = Log::new(state.disk, newest + 1, closed, state.merged, limit);
    let must_be_whole: BTreeSet<u64> = state.sealed_segments().filter(|epoch| *epoch <= closed).collect();
    let lost = |epoch, what| RedoError::DamagedSegment { path: path.clone(), name: segment_name(epoch), epoch, what };
    if let Some(epoch) = must_be_whole.iter().find(|epoch| !epochs.contains(epoch)) {
        return Err(lost(*epoch, "the file is missing".into()));
    }
    for epoch in epochs.into_iter().filter(|epoch| *epoch <= closed && *epoch > state.merged && !state.is_dead(*epoch))
    {
        let file = log_dir.files().open(&segment_name(epoch)).map_err(failed("opening a segment"))?;
        let is_sealed = must_be_whole.contains(&epoch);
        let found = scan(&file, epoch, state.disk).map_err(failed("reading a segment"))?;
        let found = if is_sealed { Some(sealed_content(found).map_err(|what| lost(epoch, what))?) } else { found };
        let Some(SegmentContent { nonce, end, entries, .. }) = found else { continue };
        if let Some(end) = entries.iter().map(|entry| entry.at + entry.bytes).find(|end| *end > bytes) {
            return Err(RedoError::ImageTooShort { path, end, bytes });
        }
        // A killed server may not have synced the segment.
        file.sync().map_err(failed("making a segment durable"))?;
        if !entries.is_empty() {
            log.add_segment(Segment::new(epoch, nonce, file), end, entries, is_sealed);
        }
    }
    if (closed + 1..=newest).any(|epoch| !state.is_dead(epoch)) {
        log_dir.rewind(closed + 1, newest);
    }
    // A server was killed while it removed these segments. They are not read.
    if let Err(e) = log_dir.remove_done() {
        tracing::warn!("{e}");
    }
    Ok(Some((log_dir, log)))
}

/// A reader of a file, in pieces that are longer than requested. Keeps the last piece.
struct Window<'a, F> {
    file: &'a F,
    buffer: Buffer,
    at: u64,
    held: usize,
}

impl<F: LogFile> Window<'_, F> {
    fn get(&mut self, offset: u64, len: u64) -> io::Result<Option<&[u8]>> {
        let is_held = offset >= self.at && offset + len <= self.at + self.held as u64;
        if !is_held {
            self.at = offset;
            self.held = self.file.read_at(&mut self.buffer, offset)?;
        }
        let from = (offset - self.at) as usize;
        Ok(self.buffer.get(..self.held).and_then(|held| held.get(from..from + len as usize)))
    }
}

/// The valid content of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentContent {
    /// The nonce of the segment.
    pub nonce: u128,
    /// Offset from which on there is no valid entry.
    pub end: u64,
    /// The entries, by sequence number.
    pub entries: Vec<LogEntry>,
    /// The entries' offsets in the last seal record.
    pub seal: Option<Vec<u64>>,
}

/// Returns the content of a sealed epoch's segment, with all the entries that its seal record lists, and no others.
///
/// # Errors
/// A description of the damaged or missing part.
pub fn sealed_content(found: Option<SegmentContent>) -> Result<SegmentContent, String> {
    let mut found = found.ok_or("its head, at byte 0, is damaged or missing")?;
    let Some(seal) = &found.seal else {
        return Err(format!("its seal record is damaged or missing; entries end at byte {}", found.end));
    };
    let there: BTreeSet<u64> = found.entries.iter().map(|entry| entry.offset).collect();
    let mut missing = seal.iter().filter(|offset| !there.contains(offset));
    if let Some(first) = missing.clone().min() {
        let (count, all) = (missing.by_ref().count(), seal.len());
        return Err(format!("the entry at byte {first} is damaged or missing ({count} of {all} entries are)"));
    }
    // The other entries were overwritten within the epoch, or their write failed.
    let listed: BTreeSet<u64> = seal.iter().copied().collect();
    found.entries.retain(|entry| listed.contains(&entry.offset));
    Ok(found)
}

/// Reads a segment. Returns `None` if the head is invalid: then no entry of an unsealed segment was ever durable.
pub fn scan(file: &impl LogFile, epoch: u64, disk: Uuid) -> io::Result<Option<SegmentContent>> {
    let length = file.length()?;
    let buffer = Buffer::new(WINDOW.min(length).max(PAGE) as usize);
    let mut window = Window { file, buffer, at: 0, held: 0 };
    let head = window.get(0, PAGE)?.and_then(read_head).filter(|head| head.epoch == epoch && head.disk == disk);
    let Some(head) = head else { return Ok(None) };
    let (mut entries, mut seal) = (Vec::new(), None);
    let mut offset = PAGE;
    while offset + PAGE <= length {
        let page = window.get(offset, PAGE)?.unwrap_or_default();
        if let Some(header) = read_seal(page, head.nonce, offset) {
            let list = header.list_bytes().filter(|list| *list <= length - offset - PAGE);
            let list = list.map(|list| read_list(file, offset + PAGE, list)).transpose()?;
            let list = list.and_then(|list| header.read_list(&list));
            offset += if list.is_some() { seal_length(header.entries) } else { PAGE };
            seal = list.or(seal);
            continue;
        }
        let Some(header) = read_header(page, head.nonce, offset) else {
            offset += PAGE;
            continue;
        };
        let is_whole = match header.what {
            EntryKind::Data => {
                // The padding of the last entry may be missing.
                let len = header.bytes.min(length.saturating_sub(offset + PAGE));
                window.get(offset + PAGE, len)?.is_some_and(|data| len == header.bytes && checksum(data) == header.data)
            }
            EntryKind::Zeroes | EntryKind::Hole => true,
        };
        if is_whole {
            let super::format::EntryHeader { sequence, at, bytes, what, .. } = header;
            entries.push(LogEntry { epoch, offset, sequence, at, bytes, what });
        }
        offset += header.length();
    }
    entries.sort_unstable_by_key(|entry| entry.sequence);
    Ok(Some(SegmentContent { nonce: head.nonce, end: offset, entries, seal }))
}

fn read_list(file: &impl LogFile, offset: u64, bytes: u64) -> io::Result<Buffer> {
    let mut list = Buffer::new(bytes.next_multiple_of(PAGE).max(PAGE) as usize);
    file.read_at(&mut list, offset)?;
    Ok(list)
}
