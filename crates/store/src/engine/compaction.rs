//! Compaction: copies the needed records of segments that are mostly garbage into a new segment, and removes the old
//! segments.
//!
//! Each step copies one frame, so that an open checkpoint need not wait long. The store is unchanged until the
//! compaction's log entry is written.

use super::pool::{Role, cost};
use super::{Engine, Flight};
use crate::error::{Result, StoreError};
use crate::format::base::Location;
use crate::format::entry::{self, Kind as EntryKind, Section};
use crate::format::manifest::Extent;
use crate::format::names;
use crate::format::segment::{
    DIRECTORY_ROOM, Directory, FRAME_HEADER_LEN, FRAME_RECORDS, Found, FrameHeader, HEADER_LEN, Kind,
};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// Bytes of pages after which a frame of copied records is written.
const FRAME_BYTES: usize = 1 << 20;

/// A record that was copied.
#[derive(Debug)]
struct Moved {
    block: u16,
    page: u32,
    old: Location,
    new: Location,
}

/// A compaction in progress. Its victims are the segments that are removed at its end.
#[derive(Debug)]
pub(super) struct Compaction {
    victims: Vec<usize>,
    /// Index of the current victim, and the offset of the next frame in it.
    at: (usize, u64),
    /// Records that only older checkpoints need.
    needed: HashSet<Location>,
    out: Option<usize>,
    records: Vec<u8>,
    numbers: Vec<u8>,
    data: Vec<u8>,
    /// Records of the frame that is being built: block, page, old place.
    waiting: Vec<(u16, u32, Location)>,
    moved: Vec<Moved>,
    waited: Duration,
}

impl Compaction {
    /// Adds places that a commit has replaced but older checkpoints still need.
    pub fn also_needed(&mut self, places: &[Location]) {
        let victims = &self.victims;
        self.needed.extend(places.iter().filter(|place| victims.contains(&place.segment())));
    }

    fn frame_len(&self) -> usize {
        FRAME_HEADER_LEN + self.records.len() + self.numbers.len() + self.data.len()
    }
}

impl Engine {
    /// Chooses segments to compact; with `need_space`, also segments with little garbage. Returns whether there are
    /// any.
    pub(super) fn start_compaction(&mut self, need_space: bool) -> bool {
        if self.compaction.is_some() {
            return true;
        }
        let oldest = self.oldest();
        let share = if need_space { 64 } else { 8 };
        let mut candidates: Vec<(u64, u64, usize)> = self
            .pool
            .iter()
            .filter(|(position, segment)| {
                let settled = segment.extent.len != 0 && segment.extent.len == segment.end && !segment.dirty;
                segment.role == Role::Data && settled && !segment.damaged && self.active != Some(*position)
            })
            .map(|(position, segment)| (segment.garbage(oldest), segment.extent.len, position))
            .filter(|(garbage, len, _)| *garbage > 0 && garbage * share >= *len)
            .collect();
        // Highest share of garbage first.
        candidates.sort_by(|a, b| (u128::from(b.0) * u128::from(a.1)).cmp(&(u128::from(a.0) * u128::from(b.1))));
        let room = self.segment_len();
        let mut rest = 0;
        let mut victims = Vec::new();
        for (garbage, len, position) in candidates {
            rest += len - garbage;
            if !victims.is_empty() && rest > room {
                break;
            }
            victims.push(position);
        }
        if victims.is_empty() {
            return false;
        }
        let needed = self
            .history
            .iter()
            .filter(|(n, place)| *n > oldest && victims.contains(&place.segment()))
            .map(|(_, place)| place);
        self.compaction = Some(Compaction {
            needed: needed.collect(),
            victims,
            at: (0, 0),
            out: None,
            records: Vec::new(),
            numbers: Vec::new(),
            data: Vec::new(),
            waiting: Vec::new(),
            moved: Vec::new(),
            waited: Duration::ZERO,
        });
        true
    }

    /// Does one step of the compaction. Returns whether more is left.
    ///
    /// On failure, the compaction is discarded and the store is unchanged.
    pub(super) fn step_compaction(&mut self) -> Result<bool> {
        let Some(mut compaction) = self.compaction.take() else { return Ok(false) };
        let done = self.copy_frame(&mut compaction).and_then(|more| {
            if !more {
                self.finish_compaction(&mut compaction)?;
            }
            Ok(more)
        });
        match done {
            Ok(true) => self.compaction = Some(compaction),
            Ok(false) => self.release(),
            Err(_) => self.drop_output(&compaction),
        }
        done
    }

    /// Discards the compaction in progress.
    pub(super) fn stop_compaction(&mut self) {
        if let Some(compaction) = self.compaction.take() {
            self.drop_output(&compaction);
        }
    }

    fn drop_output(&mut self, compaction: &Compaction) {
        if let Some(segment) = compaction.out.filter(|_| self.broken.is_none()).and_then(|out| self.pool.remove(out)) {
            let name = names::segment(segment.extent.epoch, segment.extent.number);
            if let Err(e) = self.home.disk.remove(&name) {
                tracing::warn!("cannot remove the unused file {}/{name}: {e}", self.home.name());
            }
        }
        self.release();
    }

    /// Copies the needed records of the next frame. Returns `false` if all frames are done.
    fn copy_frame(&mut self, compaction: &mut Compaction) -> Result<bool> {
        let (victim, at) = compaction.at;
        let Some(position) = compaction.victims.get(victim).copied() else {
            self.write_frame(compaction)?;
            return Ok(false);
        };
        // A commit may have removed the segment meanwhile.
        let Some(extent) = self.pool.get(position).map(|segment| segment.extent) else {
            compaction.at = (victim + 1, 0);
            return Ok(true);
        };
        let at = at.max(HEADER_LEN);
        if at >= extent.len {
            compaction.at = (victim + 1, 0);
            return Ok(true);
        }
        let name = names::segment(extent.epoch, extent.number);
        let read = (|| {
            let file = self.files.get(&self.home, extent)?;
            let front = self.home.read_at(&file, &name, at, DIRECTORY_ROOM)?;
            let flawed = |flaw| StoreError::flaw(self.home.name(), &name, flaw);
            let directory = Directory::decode(&front, at).map_err(flawed)?;
            let header = directory.header;
            let found: Vec<Found> = directory.pages().collect();
            let data_at = at + header.data_offset() as u64;
            let data = self.home.read_at(&file, &name, data_at, header.data_len as usize)?;
            Ok::<_, StoreError>((header, found, data_at, data))
        })();
        let (header, found, data_at, data) = match read {
            Ok(read) => read,
            Err(e) => {
                // The damaged segment is kept, so that no more data is lost.
                if let Some(segment) = self.pool.get_mut(position) {
                    segment.damaged = true;
                }
                return Err(e);
            }
        };
        for found in found {
            let place = Location::new(position, found.offset, found.record.len);
            let state = self.blocks.iter().find(|state| state.number == found.record.block);
            let newest = state.is_some_and(|state| state.places.get(found.record.page.into()) == place.0);
            if !newest && !compaction.needed.contains(&place) {
                continue;
            }
            let begin = found.offset.saturating_sub(data_at) as usize;
            let len = usize::from(found.record.len);
            let content = if len == 0 { Some(&[][..]) } else { data.get(begin..begin + len) };
            let Some(content) = content else {
                let structure = crate::format::Structure::FrameDirectory;
                let flaw = crate::format::Flaw::bad(structure, at, "the file ends before the frame does");
                return Err(StoreError::flaw(self.home.name(), &name, flaw));
            };
            compaction.records.extend_from_slice(&found.record.encode());
            compaction.numbers.extend_from_slice(&found.number.to_le_bytes());
            compaction.data.extend_from_slice(content);
            compaction.waiting.push((found.record.block, found.record.page, place));
            if compaction.waiting.len() >= FRAME_RECORDS || compaction.data.len() >= FRAME_BYTES {
                self.write_frame(compaction)?;
            }
        }
        compaction.at = (victim, header.next(at));
        Ok(true)
    }

    fn write_frame(&mut self, compaction: &mut Compaction) -> Result<()> {
        if compaction.waiting.is_empty() {
            return Ok(());
        }
        let position = match compaction.out {
            Some(position) => position,
            None => *compaction.out.insert(self.make_segment(Role::Output)?),
        };
        let mut frame = Vec::with_capacity(compaction.frame_len());
        frame.resize(FRAME_HEADER_LEN, 0);
        frame.append(&mut compaction.records);
        frame.append(&mut compaction.numbers);
        let data_at = frame.len();
        let header = FrameHeader {
            kind: Kind::Moved,
            count: compaction.waiting.len() as u32,
            data_len: compaction.data.len() as u32,
            number: self.newest(),
        };
        frame.append(&mut compaction.data);
        header.seal(&mut frame);
        let Some(segment) = self.pool.get_mut(position) else { return Ok(()) };
        let name = names::segment(segment.extent.epoch, segment.extent.number);
        let at = segment.next();
        segment.dirty = true;
        segment.end = at + frame.len() as u64;
        if let Some(file) = &segment.file {
            file.write_at(&frame, at).map_err(|e| StoreError::io(self.home.disk.name(), &name, "moving pages", e))?;
            file.start_writeback(at, frame.len() as u64);
        }
        let mut data = at + data_at as u64;
        for ((block, page, old), n) in compaction.waiting.drain(..).zip(0u64..) {
            let own = at + FRAME_HEADER_LEN as u64 + n * crate::format::segment::RECORD_LEN as u64;
            let new = Location::new(position, if old.len() == 0 { own } else { data }, old.len());
            data += u64::from(old.len());
            compaction.moved.push(Moved { block, page, old, new });
        }
        Ok(())
    }

    /// Commits the compaction after all frames are copied, and removes the victims.
    fn finish_compaction(&mut self, compaction: &mut Compaction) -> Result<()> {
        if let Some(out) = compaction.out {
            self.sync_segment(out, &mut compaction.waited)?;
            self.sync_segment_names(&mut compaction.waited)?;
        }
        let segments = self
            .pool
            .iter()
            .filter(|(position, segment)| {
                let data = segment.role == Role::Data && segment.extent.len != 0;
                (data && !compaction.victims.contains(position)) || compaction.out == Some(*position)
            })
            .map(|(position, segment)| {
                let len = if compaction.out == Some(position) { segment.end } else { segment.extent.len };
                Extent { len, ..segment.extent }
            })
            .collect();
        let slot = self.slot + 1;
        let mut manifest = self.manifest(self.kept.clone(), segments);
        // The manifest must not count the new blocks of an open checkpoint.
        manifest.next_block = self.next_block;
        let manifest = manifest.encode();
        let sections = [(Section::Manifest, manifest.as_slice())];
        let (content, _) = entry::encode(self.home.id, EntryKind::Compaction, self.claim.epoch, slot, &sections);
        self.append_entry(slot, &content, &mut compaction.waited)?;
        let before = std::mem::replace(&mut self.state, slot);
        self.apply_moves(compaction);
        let replaced = if self.kept.iter().any(|kept| kept.slot == before) { vec![] } else { vec![before] };
        self.log_and_index_bytes += (content.len() as u64).next_multiple_of(4096);
        self.retire(&compaction.victims.clone(), &replaced);
        self.tidy();
        Ok(())
    }

    fn apply_moves(&mut self, compaction: &Compaction) {
        let oldest = self.oldest();
        let Some(out) = compaction.out else { return };
        let mut elsewhere: HashMap<Location, Location> = HashMap::new();
        let mut live = 0;
        for moved in &compaction.moved {
            let state = self.blocks.iter_mut().find(|state| state.number == moved.block);
            match state.and_then(|state| state.places.get_mut(moved.page.into())) {
                Some(place) if *place == moved.old.0 => {
                    *place = moved.new.0;
                    live += cost(moved.new.len());
                }
                // The page was replaced meanwhile, or only older checkpoints need this content.
                _ => {
                    elsewhere.insert(moved.old, moved.new);
                }
            }
        }
        let mut dying: HashMap<u64, u64> = HashMap::new();
        for (n, place) in self.history.iter().filter(|(n, place)| *n > oldest && elsewhere.contains_key(place)) {
            *dying.entry(n).or_default() += cost(place.len());
        }
        for place in self.history.places_mut() {
            if let Some(new) = elsewhere.get(place) {
                *place = *new;
            }
        }
        let unknown = compaction.victims.iter().filter_map(|victim| self.pool.get(*victim));
        let unknown = unknown.map(|segment| segment.unknown_until).max().unwrap_or(0);
        let mut dying: Vec<_> = dying.into_iter().collect();
        dying.sort_unstable();
        if let Some(segment) = self.pool.get_mut(out) {
            segment.role = Role::Data;
            segment.extent.len = segment.end;
            segment.file = None;
            segment.live = live;
            segment.dying = dying;
            segment.unknown_until = unknown;
        }
    }

    /// Compacts until `more` bytes fit into the limit of the store's size, or until no segment is left to compact.
    pub(super) fn make_room(&mut self, flight: &Flight, more: u64) -> Result<()> {
        let pages: u64 = flight.table.iter().map(|(_, block)| block.pages()).sum();
        let ram = pages * rekindle_pages::PAGE_SIZE as u64;
        let bound = 2 * ram + self.pool.history(self.oldest());
        // Space for the output of the compaction itself, a base index and a log entry.
        let log_and_index_bytes = ram / 128;
        let required = |engine: &Self| engine.used() + more + engine.segment_len_of(flight) + log_and_index_bytes;
        let mut before = u64::MAX;
        while required(self) > bound && self.used() < before {
            before = self.used();
            if !self.start_compaction(true) {
                break;
            }
            loop {
                match self.step_compaction() {
                    Ok(true) => {}
                    Ok(false) => break,
                    // A damaged segment is kept. The checkpoint is written nevertheless.
                    Err(e @ (StoreError::Damaged { .. } | StoreError::Missing { .. }))
                        if self.check_owner().is_ok() =>
                    {
                        tracing::warn!("cannot compact a segment: {e}");
                        before = u64::MAX;
                        break;
                    }
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(())
    }

    /// Returns whether there is enough garbage for a compaction in the background.
    pub(super) fn wants_compaction(&self) -> bool {
        // The limit is twice the RAM; background compaction starts at three quarters of it.
        !self.background_failed && self.used() > self.pool.history(self.oldest()) + self.ram() / 2 * 3
    }

    /// Compacts until hardly any garbage is left. Returns the number of bytes that were freed.
    pub fn compact(&mut self) -> Result<u64> {
        self.abort();
        self.check_owner()?;
        self.active = None;
        self.pool.iter_mut().for_each(|segment| segment.file = None);
        let first = self.used();
        let mut before = u64::MAX;
        while self.used() < before {
            before = self.used();
            if !self.start_compaction(true) {
                break;
            }
            while self.step_compaction().map_err(|e| self.explain(e))? {}
        }
        Ok(first.saturating_sub(self.used()))
    }
}
