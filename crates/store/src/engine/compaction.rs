//! Compaction: copies the needed records of segments that are mostly garbage into a new segment, and removes the old
//! segments.
//!
//! A *record* is a page as one checkpoint has stored it, and *garbage* is a record that no kept checkpoint needs.
//! Records are in *frames* (up to 1024 pages), and frames are in *segments*, which are files.
//!
//! Each step copies one frame, so that an open checkpoint need not wait long. The store is unchanged until the
//! compaction's log entry is written.

use super::pool::{DyingBytes, PlainFrame, Role, Segment, WrittenFrame, record_bytes};
use super::{Engine, OpenCheckpoint};
use crate::error::{Result, StoreError};
use crate::format::base::Location;
use crate::format::entry::{self, Kind as EntryKind, Section};
use crate::format::manifest::{EntryId, SegmentExtent};
use crate::format::segment::{
    Directory, FRAME_HEADER_LEN, FrameHeader, HEADER_LEN, Kind, ListedPage, MAX_DIRECTORY_BYTES, MAX_FRAME_PAGES,
    RECORD_LEN, Record,
};
use crate::format::{Flaw, Structure, names};
use crate::segments::OpenSegment;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of pages after which a frame of copied records is written.
const OUTPUT_FRAME_BYTES: usize = 1 << 20;

/// A segment is compacted in the background if at least one of this many of its bytes is garbage.
const BACKGROUND_GARBAGE_DIVISOR: u64 = 8;
/// Like [`BACKGROUND_GARBAGE_DIVISOR`], if space is needed.
const URGENT_GARBAGE_DIVISOR: u64 = 64;

/// If a segment cannot be appended to later, every checkpoint leaves a new one. More small segments than this are merged.
const MAX_SMALL_SEGMENTS: usize = 64;

/// How thoroughly to compact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Urgency {
    Background,
    /// Space is needed: also compact segments with little garbage.
    NeedSpace,
}

/// A record in the frame that is being built.
#[derive(Debug)]
struct CopiedRecord {
    block: u16,
    page: u32,
    old: Location,
}

/// A record that was written to the output.
#[derive(Debug)]
struct MovedRecord {
    block: u16,
    page: u32,
    old: Location,
    new: Location,
}

/// The frame of copied records that is being built.
#[derive(Debug, Default)]
struct OutputFrame {
    records: Vec<u8>,
    numbers: Vec<u8>,
    data: Vec<u8>,
    copied: Vec<CopiedRecord>,
}

impl OutputFrame {
    /// Adds a page. `content` is decrypted.
    fn push(&mut self, page: &ListedPage, old: Location, content: &[u8]) {
        let record = Record { len: content.len() as u16, ..page.record };
        self.records.extend_from_slice(&record.encode());
        self.numbers.extend_from_slice(&page.number.to_le_bytes());
        self.data.extend_from_slice(content);
        self.copied.push(CopiedRecord { block: page.record.block, page: page.record.page, old });
    }

    fn is_full(&self) -> bool {
        self.copied.len() >= MAX_FRAME_PAGES || self.data.len() >= OUTPUT_FRAME_BYTES
    }

    /// Returns the encoded frame, not encrypted, with its header. `newest` is the number of the newest checkpoint.
    fn encode(&self, newest: u64) -> (FrameHeader, Vec<u8>) {
        let (count, data_len) = (self.copied.len() as u32, self.data.len() as u32);
        let header = FrameHeader { kind: Kind::Moved, count, data_len, is_sealed: false, number: newest };
        let mut frame = vec![0; FRAME_HEADER_LEN];
        frame.reserve_exact(self.records.len() + self.numbers.len() + self.data.len());
        frame.extend_from_slice(&self.records);
        frame.extend_from_slice(&self.numbers);
        frame.extend_from_slice(&self.data);
        header.finish(&mut frame);
        (header, frame)
    }
}

/// A compaction in progress. Its victims are the segments that are removed at its end.
#[derive(Debug)]
pub(super) struct Compaction {
    victims: Vec<usize>,
    /// Index in `victims` of the segment that is being copied.
    victim: usize,
    /// Offset of the next frame in that segment.
    offset: u64,
    /// Records that only older checkpoints need.
    needed: HashSet<Location>,
    /// Position of the output segment.
    output: Option<usize>,
    frame: OutputFrame,
    moved: Vec<MovedRecord>,
    sync_time: Duration,
}

impl Compaction {
    fn new(victims: Vec<usize>, needed: HashSet<Location>) -> Self {
        Self {
            victims,
            victim: 0,
            offset: HEADER_LEN,
            needed,
            output: None,
            frame: OutputFrame::default(),
            moved: Vec::new(),
            sync_time: Duration::ZERO,
        }
    }

    /// Adds records that a commit has replaced but older checkpoints still need.
    pub fn keep_replaced(&mut self, locations: &[Location]) {
        let victims = &self.victims;
        self.needed.extend(locations.iter().filter(|location| victims.contains(&location.segment())));
    }

    fn start_next_victim(&mut self) {
        self.victim += 1;
        self.offset = HEADER_LEN;
    }
}

/// A frame of a victim, read from the disk.
struct VictimFrame {
    header: FrameHeader,
    pages: Vec<ListedPage>,
    /// Offset of `data` in the file.
    data_offset: u64,
    data: Vec<u8>,
    segment: Arc<OpenSegment>,
}

impl VictimFrame {
    /// Returns the stored content of a page, decrypted.
    ///
    /// # Errors
    /// A text that describes what is wrong.
    fn content(&mut self, page: &ListedPage) -> std::result::Result<&[u8], &'static str> {
        let Record { digest, page: number, len, block } = page.record;
        let len = usize::from(len);
        if len == 0 {
            return Ok(&[]);
        }
        let begin = page.offset.saturating_sub(self.data_offset) as usize;
        let stored = self.data.get_mut(begin..begin + len).ok_or("the file ends before the frame does")?;
        self.segment.open_page(page.offset, block, number, digest, stored).map(|content| &*content)
    }
}

impl Engine {
    /// Returns whether there is enough garbage for a compaction in the background.
    pub(super) fn wants_compaction(&self) -> bool {
        // The limit is twice the RAM; background compaction starts at three quarters of it.
        let limit = self.pool.history_bytes(self.oldest()) + self.ram_bytes() / 2 * 3;
        !self.background_failed && self.used_bytes() > limit
    }

    /// Starts a compaction, unless one is in progress. Returns whether there is anything to compact.
    pub(super) fn start_compaction(&mut self, urgency: Urgency) -> bool {
        if self.compaction.is_some() {
            return true;
        }
        let victims = self.choose_victims(urgency);
        self.start_copying(victims)
    }

    /// Returns whether there are so many small segments that they are to be merged.
    pub(super) fn wants_merge(&self) -> bool {
        !self.background_failed
            && (!self.store.disk.can_append() || self.store.is_encrypted())
            && self.small_segments().nth(MAX_SMALL_SEGMENTS).is_some()
    }

    /// Starts to merge small segments into one. Returns whether there is anything to merge.
    pub(super) fn start_merge(&mut self) -> bool {
        let mut small: Vec<(u64, usize)> = self.small_segments().collect();
        small.sort_unstable();
        let max_output_bytes = self.max_segment_bytes(self.ram_bytes());
        let mut output_bytes = 0;
        let fits = |(len, _): &(u64, usize)| {
            output_bytes += len;
            output_bytes <= max_output_bytes
        };
        let victims: Vec<usize> = small.into_iter().take_while(fits).map(|(_, position)| position).collect();
        // One segment alone would only be copied.
        victims.len() > 1 && self.start_copying(victims)
    }

    /// Iterates over length and position of the segments with less than half of the bytes that a segment can have.
    fn small_segments(&self) -> impl Iterator<Item = (u64, usize)> {
        let (oldest, max_bytes) = (self.oldest(), self.max_segment_bytes(self.ram_bytes()) / 2);
        let is_small =
            move |segment: &Segment| segment.extent.len <= max_bytes && segment.history_unknown_until <= oldest;
        self.pool
            .iter()
            .filter(move |(position, segment)| self.can_be_victim(*position, segment) && is_small(segment))
            .map(|(position, segment)| (segment.extent.len, position))
    }

    /// Returns whether the content of a segment is complete and can be copied.
    fn can_be_victim(&self, position: usize, segment: &Segment) -> bool {
        let is_settled = segment.extent.len != 0 && segment.extent.len == segment.end && !segment.is_dirty;
        segment.role == Role::Data && is_settled && !segment.is_damaged && self.active != Some(position)
    }

    fn start_copying(&mut self, victims: Vec<usize>) -> bool {
        if victims.is_empty() {
            return false;
        }
        let needed = self.replaced.needed_since(self.oldest()).map(|(_, location)| location);
        let needed = needed.filter(|location| victims.contains(&location.segment())).collect();
        self.compaction = Some(Compaction::new(victims, needed));
        true
    }

    /// Chooses the segments with the highest share of garbage, as many as fit into one segment when copied.
    fn choose_victims(&self, urgency: Urgency) -> Vec<usize> {
        struct Candidate {
            garbage: u64,
            len: u64,
            position: usize,
        }
        let oldest = self.oldest();
        let divisor = match urgency {
            Urgency::Background => BACKGROUND_GARBAGE_DIVISOR,
            Urgency::NeedSpace => URGENT_GARBAGE_DIVISOR,
        };
        let mut candidates = Vec::new();
        for (position, segment) in self.pool.iter() {
            if !self.can_be_victim(position, segment) {
                continue;
            }
            let (garbage, len) = (segment.garbage_bytes(oldest), segment.extent.len);
            if garbage > 0 && garbage * divisor >= len {
                candidates.push(Candidate { garbage, len, position });
            }
        }
        candidates.sort_by(|a, b| {
            (u128::from(b.garbage) * u128::from(a.len)).cmp(&(u128::from(a.garbage) * u128::from(b.len)))
        });
        let max_output_bytes = self.max_segment_bytes(self.ram_bytes());
        let mut output_bytes = 0;
        let mut victims = Vec::new();
        for Candidate { garbage, len, position } in candidates {
            output_bytes += len - garbage;
            if !victims.is_empty() && output_bytes > max_output_bytes {
                break;
            }
            victims.push(position);
        }
        victims
    }

    /// Does one step of the compaction. Returns whether more is left.
    ///
    /// On failure, the compaction is discarded and the store is unchanged.
    pub(super) fn step_compaction(&mut self) -> Result<bool> {
        let Some(mut compaction) = self.compaction.take() else { return Ok(false) };
        let step = self.copy_frame(&mut compaction).and_then(|has_more| {
            if !has_more {
                self.finish_compaction(&mut compaction)?;
            }
            Ok(has_more)
        });
        match step {
            Ok(true) => self.compaction = Some(compaction),
            Ok(false) => self.allow_reuse_of_positions(),
            Err(_) => self.drop_output(&compaction),
        }
        step
    }

    /// Discards the compaction in progress.
    pub(super) fn stop_compaction(&mut self) {
        if let Some(compaction) = self.compaction.take() {
            self.drop_output(&compaction);
        }
    }

    fn drop_output(&mut self, compaction: &Compaction) {
        // If it is unknown whether the compaction's log entry was written, the output may be in use.
        let output = compaction.output.filter(|_| self.broken.is_none());
        if let Some(segment) = output.and_then(|position| self.pool.remove(position)) {
            self.remove_unused_file(&segment.name());
        }
        self.allow_reuse_of_positions();
    }

    /// Copies the needed records of the next frame. Returns `false` if all frames are done.
    fn copy_frame(&mut self, compaction: &mut Compaction) -> Result<bool> {
        let Some(position) = compaction.victims.get(compaction.victim).copied() else {
            self.write_output_frame(compaction)?;
            return Ok(false);
        };
        // A commit may have removed the segment meanwhile.
        let extent = self.pool.get(position).map(|segment| segment.extent);
        let offset = compaction.offset;
        let Some(extent) = extent.filter(|extent| offset < extent.len) else {
            compaction.start_next_victim();
            return Ok(true);
        };
        let mut frame = self.read_victim_frame(extent, offset).inspect_err(|_| self.keep_damaged(position))?;
        for page in &std::mem::take(&mut frame.pages) {
            let old = Location::new(position, page.offset, page.record.len);
            if !self.is_newest(page, old) && !compaction.needed.contains(&old) {
                continue;
            }
            let content = frame.content(page).map_err(|what| {
                self.keep_damaged(position);
                let flaw = Flaw::bad(Structure::FrameDirectory, offset, what);
                StoreError::flaw(self.store.name(), &names::segment(extent.epoch, extent.number), flaw)
            })?;
            compaction.frame.push(page, old, content);
            if compaction.frame.is_full() {
                self.write_output_frame(compaction)?;
            }
        }
        compaction.offset = frame.header.next_frame_offset(offset);
        Ok(true)
    }

    /// Excludes a damaged segment from compactions. It is kept, so that no more data is lost.
    fn keep_damaged(&mut self, position: usize) {
        if let Some(segment) = self.pool.get_mut(position) {
            segment.is_damaged = true;
        }
    }

    /// Reads the frame at `offset` of a segment.
    fn read_victim_frame(&self, extent: SegmentExtent, offset: u64) -> Result<VictimFrame> {
        let name = names::segment(extent.epoch, extent.number);
        let segment = self.open_segments.get(&self.store, extent)?;
        let mut front = self.store.read_at(&segment.file, &name, offset, MAX_DIRECTORY_BYTES)?;
        let directory = Directory::decode(&mut front, offset, segment.key.as_ref())
            .map_err(|flaw| StoreError::flaw(self.store.name(), &name, flaw))?;
        let header = directory.header;
        let data_offset = offset + header.data_offset() as u64;
        let data = self.store.read_at(&segment.file, &name, data_offset, header.data_len as usize)?;
        Ok(VictimFrame { header, pages: directory.pages().collect(), data_offset, data, segment })
    }

    /// Returns whether the record at `location` is the newest of its page.
    fn is_newest(&self, page: &ListedPage, location: Location) -> bool {
        let state = self.blocks.iter().find(|state| state.stored.number == page.record.block);
        state.is_some_and(|state| state.locations.get(page.record.page.into()) == location)
    }

    /// Appends the frame that was built to the output segment.
    fn write_output_frame(&mut self, compaction: &mut Compaction) -> Result<()> {
        if compaction.frame.copied.is_empty() {
            return Ok(());
        }
        let position = match compaction.output {
            Some(position) => position,
            None => *compaction.output.insert(self.create_segment(Role::Output)?),
        };
        let output = std::mem::take(&mut compaction.frame);
        let (header, bytes) = output.encode(self.newest());
        let Some(segment) = self.pool.get_mut(position) else { return Ok(()) };
        let frame = PlainFrame { header, records: Vec::new(), bytes: &bytes };
        let written = segment.write_frame(frame, &mut self.sealed_frame);
        let failed = |e| StoreError::io(self.store.disk.name(), &segment.name(), "moving pages", e);
        let WrittenFrame { offset, header, .. } = written.map_err(failed)?;
        let mut record_offset = offset + FRAME_HEADER_LEN as u64;
        let mut data_offset = offset + header.data_offset() as u64;
        for CopiedRecord { block, page, old } in output.copied {
            let offset = if old.len() == 0 { record_offset } else { data_offset };
            let new = Location::new(position, offset, old.len());
            record_offset += RECORD_LEN as u64;
            data_offset += u64::from(old.len());
            compaction.moved.push(MovedRecord { block, page, old, new });
        }
        Ok(())
    }

    /// Commits the compaction after all frames are copied, and removes the victims.
    fn finish_compaction(&mut self, compaction: &mut Compaction) -> Result<()> {
        if let Some(output) = compaction.output {
            self.sync_segment(output, &mut compaction.sync_time)?;
            self.sync_segment_names(&mut compaction.sync_time)?;
        }
        let mut segments = Vec::new();
        for (position, segment) in self.pool.iter() {
            let is_committed = segment.role == Role::Data && segment.extent.len != 0;
            if compaction.output == Some(position) {
                segments.push(SegmentExtent { len: segment.end, ..segment.extent });
            } else if is_committed && !compaction.victims.contains(&position) {
                segments.push(segment.extent);
            }
        }
        let log_number = self.newest_entry + 1;
        // The manifest must not count the new blocks of an open checkpoint.
        let manifest = self.manifest(self.next_block, self.kept.clone(), segments).encode();
        let sections = [(Section::Manifest, manifest.as_slice())];
        let entry = entry::encode(self.store.id, EntryKind::Compaction, self.claim.epoch, log_number, &sections);
        self.append_entry(log_number, &entry.bytes, &mut compaction.sync_time)?;
        let previous_state =
            std::mem::replace(&mut self.newest_manifest_entry, EntryId { log_number, footer: entry.footer }).log_number;
        if let Some(output) = compaction.output {
            self.apply_moves(compaction, output);
        }
        self.log_and_index_bytes += (entry.bytes.len() as u64).next_multiple_of(4096);
        let is_checkpoint = self.kept.iter().any(|kept| kept.log_number == previous_state);
        let dropped_entries = if is_checkpoint { vec![] } else { vec![previous_state] };
        self.retire(&compaction.victims, &dropped_entries);
        self.remove_obsolete_files();
        Ok(())
    }

    /// Updates the state in memory: the moved records are in the segment `output` now.
    fn apply_moves(&mut self, compaction: &Compaction, output: usize) {
        let mut live = 0;
        // Moved records that only older checkpoints need, and their new locations.
        let mut moved_history: HashMap<Location, Location> = HashMap::new();
        for moved in &compaction.moved {
            let state = self.blocks.iter_mut().find(|state| state.stored.number == moved.block);
            match state.and_then(|state| state.locations.get_mut(moved.page.into())) {
                Some(location) if *location == moved.old => {
                    *location = moved.new;
                    live += record_bytes(moved.new.len());
                }
                // The page was replaced meanwhile, or only older checkpoints need this content.
                _ => {
                    moved_history.insert(moved.old, moved.new);
                }
            }
        }
        let mut dying: HashMap<u64, u64> = HashMap::new();
        for (replaced_by, location) in self.replaced.needed_since(self.oldest()) {
            if moved_history.contains_key(&location) {
                *dying.entry(replaced_by).or_default() += record_bytes(location.len());
            }
        }
        for location in self.replaced.locations_mut() {
            if let Some(new) = moved_history.get(location) {
                *location = *new;
            }
        }
        let victims = compaction.victims.iter().filter_map(|victim| self.pool.get(*victim));
        let history_unknown_until = victims.map(|segment| segment.history_unknown_until).max().unwrap_or(0);
        if let Some(segment) = self.pool.get_mut(output) {
            segment.role = Role::Data;
            segment.extent.len = segment.end;
            segment.file = None;
            segment.live = live;
            segment.dying = dying.into_iter().map(|(replaced_by, bytes)| DyingBytes { replaced_by, bytes }).collect();
            segment.dying.sort_unstable();
            segment.history_unknown_until = history_unknown_until;
        }
    }

    /// Compacts until `more` bytes fit into the limit of the store's size, or until no segment is left to compact.
    pub(super) fn make_room(&mut self, checkpoint: &OpenCheckpoint, more: u64) -> Result<()> {
        let ram_bytes = checkpoint.ram_bytes();
        let limit = 2 * ram_bytes + self.pool.history_bytes(self.oldest());
        // Space for the output of the compaction itself, a base index and a log entry.
        let reserve = self.max_segment_bytes(ram_bytes) + ram_bytes / 128;
        let mut used_before = u64::MAX;
        while self.used_bytes() + more + reserve > limit && self.used_bytes() < used_before {
            used_before = self.used_bytes();
            if !self.start_compaction(Urgency::NeedSpace) {
                break;
            }
            match self.run_compaction() {
                Ok(()) => {}
                // A damaged segment is kept. The checkpoint is written nevertheless.
                Err(e @ (StoreError::Damaged { .. } | StoreError::UnknownKey { .. } | StoreError::Missing { .. }))
                    if self.check_owner().is_ok() =>
                {
                    tracing::warn!("cannot compact a segment: {e}");
                    used_before = u64::MAX;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Does all steps of the compaction in progress.
    pub(super) fn run_compaction(&mut self) -> Result<()> {
        while self.step_compaction()? {}
        Ok(())
    }

    /// Compacts until hardly any garbage is left. Returns the number of bytes that were freed.
    pub fn compact(&mut self) -> Result<u64> {
        self.abort();
        self.check_owner()?;
        self.active = None;
        self.pool.iter_mut().for_each(|segment| segment.file = None);
        let used_at_start = self.used_bytes();
        let mut used_before = u64::MAX;
        while self.used_bytes() < used_before {
            used_before = self.used_bytes();
            if !self.start_compaction(Urgency::NeedSpace) {
                break;
            }
            self.run_compaction().map_err(|e| self.explain(e))?;
        }
        Ok(used_at_start.saturating_sub(self.used_bytes()))
    }
}
