//! Opening a log after a crash, after a server was killed, or to return to a checkpoint.
//!
//! A log has a *segment* (file) for each *epoch* (time between two checkpoints), with an *entry* for each write. A
//! *seal* makes a segment durable, and lists its entries, so that damage is distinguished from a write that was
//! interrupted.

use super::directory::LogDirectory;
use super::epoch_state::{EpochRange, EpochState};
use super::error::RedoError;
use super::files::LogFiles;
use super::format::{
    EntryHeader, EntryKind, PAGE_BYTES, SealHeader, checksum, read_head, read_header, read_seal, seal_length,
    segment_epoch, segment_name,
};
use super::log::{Log, LogEntry, Segment};
use rekindle_kernel::durable_file::DurableFile;
use rekindle_kernel::uring::Buffer;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use uuid::Uuid;

/// Most bytes to read in one step.
/// What is wrong with a segment that does not exist.
pub const MISSING: &str = "the file is missing";
const MAX_WINDOW_BYTES: u64 = 4 << 20;

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

/// A log that was opened, and its directory.
#[derive(Debug)]
pub struct RecoveredLog<D: LogFiles> {
    pub log_dir: LogDirectory<D>,
    pub log: Log<D::File>,
}

/// Opens the log in `files` of a disk of `bytes` bytes; `None` if there is no log.
///
/// *On success:* all writes that were found are durable, in ended epochs. Nothing is discarded yet.
///
/// # Errors
/// After a [`RedoError`] nothing has changed.
pub fn open<D: LogFiles>(
    files: D,
    bytes: u64,
    version: DiskVersion,
    limit: u64,
) -> Result<Option<RecoveredLog<D>>, RedoError> {
    let path = files.path().to_owned();
    let failed = |doing| RedoError::io(&path, doing);
    let Some(mut log_dir) = LogDirectory::open(files)? else {
        return require_no_log(&path, version).map(|()| None);
    };
    let state = log_dir.state().clone();
    let names = log_dir.files().list().map_err(failed("reading the directory"))?;
    let mut epochs: Vec<u64> = names.iter().filter_map(|name| segment_epoch(name)).collect();
    epochs.sort_unstable();
    let newest = newest_epoch(&state, &epochs);
    // The last epoch that belongs to the disk.
    let last = match resolve_since(version, &state, &epochs) {
        DiskVersion::Epoch { epoch, disk } => {
            check_available(&path, &state, epoch, disk)?;
            epoch
        }
        DiskVersion::Newest | DiskVersion::Since { .. } => state.last_alive(newest),
    };
    let next = newest.checked_add(1).ok_or_else(|| RedoError::DamagedState { path: path.clone() })?;
    let mut log = Log::new(state.disk, next, last, state.merged, limit);
    let damaged =
        |epoch, what| RedoError::DamagedSegment { path: path.clone(), name: segment_name(epoch), epoch, what };
    let must_be_whole = existing_segments(&state, last, &epochs).map_err(|epoch| damaged(epoch, MISSING.into()))?;
    let is_unmerged = |epoch: &u64| *epoch <= last && *epoch > state.merged && !state.is_dead(*epoch);
    for epoch in epochs.into_iter().filter(is_unmerged) {
        let file = log_dir.files().open(&segment_name(epoch)).map_err(failed("opening a segment"))?;
        let is_sealed = must_be_whole.contains(&epoch);
        let scanned = scan(&file, epoch, state.disk).map_err(failed("reading a segment"))?;
        let content =
            if is_sealed { Some(sealed_content(scanned).map_err(|what| damaged(epoch, what))?) } else { scanned };
        let Some(SegmentContent { nonce, end, entries, .. }) = content else { continue };
        let ends = entries.iter().map(|entry| entry.disk_offset + entry.bytes);
        if let Some(end) = ends.into_iter().find(|end| *end > bytes) {
            return Err(RedoError::ImageTooShort { path, end, bytes });
        }
        // A killed server may not have synced the segment.
        file.sync().map_err(failed("making a segment durable"))?;
        if !entries.is_empty() {
            log.add_segment(Segment::new(epoch, nonce, file), end, entries, is_sealed);
        }
    }
    if state.last_alive(newest) > last {
        log_dir.rewind(EpochRange { first: last + 1, last: newest });
    }
    // A server was killed while it removed these segments. They are not read.
    if let Err(e) = log_dir.remove_done() {
        tracing::warn!("{e}");
    }
    Ok(Some(RecoveredLog { log_dir, log }))
}

/// Checks that the disk needs no log.
pub fn require_no_log(path: &Path, version: DiskVersion) -> Result<(), RedoError> {
    match version {
        DiskVersion::Newest | DiskVersion::Since { .. } => Ok(()),
        DiskVersion::Epoch { epoch, disk } => Err(RedoError::NoLog { path: path.to_owned(), epoch, disk }),
    }
}

/// Returns the sealed epochs up to `last`, each of which must have a segment. `epochs`: those that have one.
///
/// # Errors
/// The first epoch without a segment.
pub fn existing_segments(state: &EpochState, last: u64, epochs: &[u64]) -> Result<BTreeSet<u64>, u64> {
    let exists = |epoch| if epochs.contains(&epoch) { Ok(epoch) } else { Err(epoch) };
    state.sealed_segments(last).map(exists).collect()
}

/// Returns the newest epoch that the log knows.
fn newest_epoch(state: &EpochState, segment_epochs: &[u64]) -> u64 {
    let recorded = [state.sealed, state.floor, state.merged].into_iter();
    let dead = state.dead.iter().map(|range| range.last);
    recorded.chain(dead).chain(segment_epochs.iter().copied()).max().unwrap_or(0)
}

/// Replaces [`DiskVersion::Since`] with the version that it means.
fn resolve_since(version: DiskVersion, state: &EpochState, segment_epochs: &[u64]) -> DiskVersion {
    let DiskVersion::Since { epoch, disk, first } = version else { return version };
    let is_left_over = |candidate: &u64| {
        (epoch + 1..first).contains(candidate) && *candidate > state.merged && !state.is_dead(*candidate)
    };
    if disk == state.disk && segment_epochs.iter().any(is_left_over) {
        DiskVersion::Epoch { epoch, disk }
    } else {
        DiskVersion::Newest
    }
}

/// Checks that the disk of an epoch is available.
fn check_available(path: &Path, state: &EpochState, epoch: u64, disk: Uuid) -> Result<(), RedoError> {
    let path = path.to_owned();
    if disk != state.disk {
        Err(RedoError::OtherDisk { path, found: state.disk, wanted: disk })
    } else if state.floor > epoch {
        Err(RedoError::NewerDisk { path, epoch, floor: state.floor })
    } else if state.is_dead(epoch) {
        Err(RedoError::Discarded { path, epoch })
    } else if epoch > state.sealed {
        Err(RedoError::NotSealed { path, epoch, sealed: state.sealed })
    } else {
        Ok(())
    }
}

/// A reader of a file, in pieces that are longer than requested. Keeps the last piece.
struct Window<'a, F> {
    file: &'a F,
    buffer: Buffer,
    /// Offset of the buffer in the file.
    offset: u64,
    /// Bytes in the buffer.
    len: usize,
}

impl<F: DurableFile> Window<'_, F> {
    /// Returns `len` bytes at `offset`; `None` if the file ends before.
    fn get(&mut self, offset: u64, len: u64) -> io::Result<Option<&[u8]>> {
        let is_buffered = offset >= self.offset && offset + len <= self.offset + self.len as u64;
        if !is_buffered {
            self.offset = offset;
            self.len = self.file.read_at(&mut self.buffer, offset)?;
        }
        let start = (offset - self.offset) as usize;
        Ok(self.buffer.get(..self.len).and_then(|buffered| buffered.get(start..start + len as usize)))
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
pub fn sealed_content(scanned: Option<SegmentContent>) -> Result<SegmentContent, String> {
    let mut content = scanned.ok_or("its head, at byte 0, is damaged or missing")?;
    let Some(seal) = &content.seal else {
        return Err(format!("its seal record is damaged or missing; entries end at byte {}", content.end));
    };
    let entry_offsets: BTreeSet<u64> = content.entries.iter().map(|entry| entry.offset).collect();
    let missing: Vec<u64> = seal.iter().copied().filter(|offset| !entry_offsets.contains(offset)).collect();
    if let Some(first) = missing.iter().min() {
        let (count, all) = (missing.len(), seal.len());
        return Err(format!("the entry at byte {first} is damaged or missing ({count} of {all} entries are)"));
    }
    // The other entries were overwritten within the epoch, or their write failed.
    let listed: BTreeSet<u64> = seal.iter().copied().collect();
    content.entries.retain(|entry| listed.contains(&entry.offset));
    Ok(content)
}

/// Reads a segment. Returns `None` if the head is invalid: then no entry of an unsealed segment was ever durable.
pub fn scan(file: &impl DurableFile, epoch: u64, disk: Uuid) -> io::Result<Option<SegmentContent>> {
    let length = file.length()?;
    let buffer = Buffer::new(MAX_WINDOW_BYTES.min(length).max(PAGE_BYTES) as usize);
    let mut window = Window { file, buffer, offset: 0, len: 0 };
    let head = window.get(0, PAGE_BYTES)?.and_then(read_head);
    let Some(head) = head.filter(|head| head.epoch == epoch && head.disk == disk) else { return Ok(None) };
    let (mut entries, mut seal) = (Vec::new(), None);
    let mut offset = PAGE_BYTES;
    while offset + PAGE_BYTES <= length {
        let page = window.get(offset, PAGE_BYTES)?.unwrap_or_default();
        if let Some(header) = read_seal(page, head.nonce, offset) {
            let list = read_seal_list(file, &header, offset + PAGE_BYTES, length)?;
            offset += if list.is_some() { seal_length(header.entries) } else { PAGE_BYTES };
            seal = list.or(seal);
            continue;
        }
        let Some(header) = read_header(page, head.nonce, offset) else {
            offset += PAGE_BYTES;
            continue;
        };
        if has_valid_data(&mut window, &header, offset + PAGE_BYTES, length)? {
            let EntryHeader { sequence, disk_offset, bytes, kind, .. } = header;
            entries.push(LogEntry { epoch, offset, sequence, disk_offset, bytes, kind });
        }
        offset += header.length();
    }
    entries.sort_unstable_by_key(|entry| entry.sequence);
    Ok(Some(SegmentContent { nonce: head.nonce, end: offset, entries, seal }))
}

/// Returns whether the data of an entry, at byte `data_offset` of a segment of `length` bytes, has its checksum.
fn has_valid_data<F: DurableFile>(
    window: &mut Window<'_, F>,
    header: &EntryHeader,
    data_offset: u64,
    length: u64,
) -> io::Result<bool> {
    match header.kind {
        EntryKind::Data => {
            // The padding of the last entry may be missing.
            let len = header.bytes.min(length.saturating_sub(data_offset));
            let data = window.get(data_offset, len)?;
            Ok(data.is_some_and(|data| len == header.bytes && checksum(data) == header.data_checksum))
        }
        EntryKind::Zeroes | EntryKind::Hole => Ok(true),
    }
}

/// Reads the list of a seal record, at byte `list_offset` of a segment of `length` bytes. `None`: it is damaged.
fn read_seal_list(
    file: &impl DurableFile,
    header: &SealHeader,
    list_offset: u64,
    length: u64,
) -> io::Result<Option<Vec<u64>>> {
    let list_bytes = header.list_bytes().filter(|bytes| *bytes <= length - list_offset);
    let Some(list_bytes) = list_bytes else { return Ok(None) };
    let mut list = Buffer::new(list_bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES) as usize);
    file.read_at(&mut list, list_offset)?;
    Ok(header.read_list(&list))
}
