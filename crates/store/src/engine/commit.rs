//! Commits the open checkpoint.

use super::pool::{Role, cost};
use super::{Engine, Flight, Pending};
use crate::error::{Result, StoreError};
use crate::format::base::Location;
use crate::format::entry::{self, Kind, Section};
use crate::format::manifest::{Extent, Kept, Manifest, StoredBlock, Table};
use crate::format::names;
use crate::log::{self, NotAppended};
use crate::types::{Block, Committed, now_us};
use std::time::{Duration, Instant};

/// The contents of a checkpoint other than pages.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    /// JSON that describes how to rebuild the VM.
    pub definition: Vec<u8>,
    /// JSON with notes of the protector.
    pub metadata: Vec<u8>,
    pub devices: Vec<u8>,
}

/// Changes that the log entry of a commit makes.
struct Plan {
    kept: Vec<Kept>,
    /// Numbers of log entries that are not needed any more.
    dropped: Vec<u64>,
    /// Positions of segments that no kept checkpoint needs any more.
    dead: Vec<usize>,
    segments: Vec<Extent>,
}

impl Engine {
    /// Commits the open checkpoint. `unchanged` is the number of pages that were not sent because they had not changed.
    ///
    /// On success, the checkpoint is durable.
    /// On failure, the checkpoint is not committed, and the store is unchanged. There is one exception: after an error
    /// while the log entry is linked or made durable, it is unknown whether the checkpoint is committed, and every
    /// later call fails with [`StoreError::Closed`].
    pub fn commit(&mut self, state: &State, unchanged: u64) -> Result<Committed> {
        self.check_sound()?;
        let Some(mut flight) = self.flight.take() else {
            let why = "no checkpoint was started".to_owned();
            return Err(StoreError::Closed { store: self.home.name().into(), why });
        };
        flight.pages.unchanged = unchanged;
        let done = match flight.failed.take() {
            Some(e) => Err(e),
            None => self.commit_flight(&mut flight, state),
        };
        if done.is_err() {
            if self.broken.is_none() {
                self.roll_back(flight);
            }
        } else {
            self.release();
        }
        done.map_err(|e| self.explain(e))
    }

    fn commit_flight(&mut self, flight: &mut Flight, state: &State) -> Result<Committed> {
        let began = Instant::now();
        let waited = flight.syncing;
        self.sync_flight(flight)?;
        let number = self.newest() + 1;
        let slot = self.slot + 1;
        drop_earlier(flight);
        let plan = self.plan(flight, number, slot);
        let manifest = self.manifest(plan.kept.clone(), plan.segments.clone());
        let blocks = self.stored_blocks(flight, number);
        let table = Table { number, time_us: now_us(), pages: flight.pages, bytes: flight.bytes, blocks };
        let lengths = [
            ("the definition", state.definition.len(), 1 << 24),
            ("the metadata", state.metadata.len(), 1 << 24),
            ("the device state", state.devices.len(), 1 << 26),
        ];
        for (what, len, max) in lengths {
            if len > max {
                let (len, max) = (len as u64, max as u64);
                return Err(StoreError::TooLarge { store: self.home.name().into(), what, len, max });
            }
        }
        let (manifest, table) = (manifest.encode(), table.encode());
        let sections = [
            (Section::Manifest, manifest.as_slice()),
            (Section::Checkpoint, &table),
            (Section::Definition, &state.definition),
            (Section::Metadata, &state.metadata),
            (Section::Devices, &state.devices),
        ];
        let (content, footer) = entry::encode(self.home.id, Kind::Checkpoint, self.claim.epoch, slot, &sections);
        self.append_entry(slot, &content, &mut flight.syncing)?;
        let apply_began = Instant::now();
        let bytes = flight.bytes + content.len() as u64;
        let mut dropped = plan.dropped;
        if self.state != 0 && !plan.kept.iter().any(|kept| kept.slot == self.state) && !dropped.contains(&self.state) {
            dropped.push(self.state);
        }
        self.state = slot;
        self.kept = plan.kept;
        if let Some(own) = self.kept.last_mut() {
            own.footer = footer;
        }
        self.apply(flight, number);
        self.retire(&plan.dead, &dropped);
        self.since_base += flight.pages.stored + flight.pages.zero;
        self.log_and_index_bytes += (content.len() as u64).next_multiple_of(4096);
        self.background_failed = false;
        let syncing = flight.syncing;
        let writing = flight.writing + (apply_began - began).saturating_sub(syncing - waited);
        Ok(Committed { number, pages: flight.pages, bytes, writing, syncing })
    }

    /// Returns the block table of the open checkpoint, whose number will be `number`.
    fn stored_blocks(&self, flight: &Flight, number: u64) -> Vec<StoredBlock> {
        let stored = |(own, block): &(u16, Block)| {
            let state = self.blocks.iter().find(|state| state.number == *own);
            let cuts = state.map(|state| state.cuts.clone()).unwrap_or_default();
            let mut stored = StoredBlock { number: *own, block: block.clone(), cuts };
            if state.is_some_and(|state| block.pages() < state.block.pages()) {
                stored.cut(number, block.pages());
            }
            stored
        };
        flight.table.iter().map(stored).collect()
    }

    fn sync_flight(&mut self, flight: &mut Flight) -> Result<()> {
        for position in flight.touched.clone() {
            if self.pool.get(position).is_some_and(|segment| segment.dirty) {
                self.sync_segment(position, &mut flight.syncing)?;
            }
        }
        if flight.made {
            self.sync_segment_names(&mut flight.syncing)?;
        }
        Ok(())
    }

    pub(super) fn sync_segment_names(&self, waited: &mut Duration) -> Result<()> {
        let began = Instant::now();
        let synced = self.home.disk.sync_directory(names::SEGMENTS);
        *waited += began.elapsed();
        synced.map_err(self.home.failed(names::SEGMENTS, "making new segments durable"))
    }

    /// Plans which checkpoints are kept, and which entries and segments are dropped, once checkpoint `number` is log
    /// entry `slot`.
    fn plan(&self, flight: &Flight, number: u64, slot: u64) -> Plan {
        let mut kept = self.kept.clone();
        kept.push(Kept { number, slot, footer: 0 });
        let surplus = kept.len().saturating_sub(self.settings.keep as usize);
        let mut dropped = Vec::new();
        let mut position = 0;
        kept.retain(|kept| {
            position += 1;
            let stays = position > surplus || self.held == Some(kept.number);
            if !stays {
                dropped.push(kept.slot);
            }
            stays
        });
        let oldest = kept.first().map_or(number, |kept| kept.number);
        let mut lost_bytes = vec![0u64; self.pool.positions()];
        let mut lose = |place: Location| {
            if place.is_stored()
                && let Some(bytes) = lost_bytes.get_mut(place.segment())
            {
                *bytes += cost(place.len());
            }
        };
        for pending in &flight.pending {
            if let Some(state) = self.blocks.get(usize::from(pending.block)) {
                lose(Location(state.places.get(pending.page.into())));
            }
        }
        for (state, left) in self.shortened(flight) {
            state.places.set_from(left).for_each(|(_, place)| lose(Location(place)));
        }
        let mut dead = Vec::new();
        let mut segments = Vec::new();
        for (position, segment) in self.pool.iter().filter(|(_, segment)| segment.role == Role::Data) {
            let written = flight.touched.contains(&position);
            let lost = lost_bytes.get(position).copied().unwrap_or(0);
            let live = segment.live.saturating_sub(lost);
            let still_needed = lost > 0 && number > oldest;
            if !written && !still_needed && segment.is_dead(live, oldest) && self.active != Some(position) {
                dead.push(position);
            } else {
                segments.push(Extent { len: segment.end, ..segment.extent });
            }
        }
        Plan { kept, dropped, dead, segments }
    }

    /// Returns a manifest with these checkpoints and segments.
    pub(super) fn manifest(&self, kept: Vec<Kept>, mut segments: Vec<Extent>) -> Manifest {
        segments.sort_unstable_by_key(|extent| extent.number);
        let next_block = self.blocks.iter().map(|state| state.number + 1).max().unwrap_or(0).max(self.next_block);
        Manifest { claim: self.claim.slot, next_block, next_segment: self.next_segment, kept, segments }
    }

    /// Iterates over the blocks that have fewer pages in the open checkpoint, or were removed, with the number of pages
    /// left.
    fn shortened<'a>(&'a self, flight: &'a Flight) -> impl Iterator<Item = (&'a super::BlockState, u64)> {
        self.blocks.iter().filter_map(|state| {
            let now = flight.table.iter().find(|(number, _)| *number == state.number);
            let left = now.map_or(0, |(_, block)| block.pages());
            (left < state.block.pages()).then_some((state, left))
        })
    }

    /// Appends an entry to the log as number `slot`.
    pub(super) fn append_entry(&mut self, slot: u64, content: &[u8], waited: &mut Duration) -> Result<()> {
        if content.len() as u64 > entry::LONGEST {
            let (len, max) = (content.len() as u64, entry::LONGEST);
            return Err(StoreError::TooLarge { store: self.home.name().into(), what: "a log entry", len, max });
        }
        match log::append(&self.home, self.claim.epoch, slot, content, waited) {
            Ok(()) => {
                self.slot = slot;
                Ok(())
            }
            Err(NotAppended::Failed(e)) => Err(e),
            Err(NotAppended::Taken) => Err(log::superseded(&self.home, self.claim.epoch, slot)),
            Err(NotAppended::Uncertain(e)) => {
                self.broken = Some(e.to_string());
                Err(e)
            }
        }
    }

    /// Updates the state in memory after the commit: the pages of the committed checkpoint become the newest.
    fn apply(&mut self, flight: &mut Flight, number: u64) {
        for position in &flight.touched {
            let active = self.active == Some(*position);
            if let Some(segment) = self.pool.get_mut(*position) {
                segment.extent.len = segment.end;
                if !active {
                    segment.file = None;
                }
            }
        }
        let needed = number > self.oldest();
        let mut replaced = Vec::new();
        for pending in &flight.pending {
            let Some(state) = self.blocks.get_mut(usize::from(pending.block)) else { continue };
            let Some(place) = state.places.get_mut(pending.page.into()) else { continue };
            let old = Location(std::mem::replace(place, pending.place.0));
            state.digests.set(pending.page.into(), pending.digest);
            if let Some(segment) = self.pool.of(pending.place) {
                segment.live += cost(pending.place.len());
            }
            if old.is_stored() {
                replaced.push(old);
            }
        }
        for (state, left) in self.shortened(flight) {
            replaced.extend(state.places.set_from(left).map(|(_, place)| Location(place)));
        }
        for old in &replaced {
            if let Some(segment) = self.pool.of(*old) {
                segment.live = segment.live.saturating_sub(cost(old.len()));
                if needed {
                    segment.replaced(number, cost(old.len()));
                }
            }
        }
        self.blocks.retain(|state| flight.table.iter().any(|(number, _)| *number == state.number));
        for state in &mut self.blocks {
            state.new = false;
            self.next_block = self.next_block.max(state.number + 1);
            let Some((_, block)) = flight.table.iter().find(|(own, _)| *own == state.number) else { continue };
            if block.pages() < state.block.pages() {
                state.cut(number, block.pages());
            }
            state.block.clone_from(block);
        }
        if needed && let Some(compaction) = &mut self.compaction {
            compaction.also_needed(&replaced);
        }
        let oldest = self.oldest();
        self.history.prune(oldest);
        if needed && let Some(until) = self.history.push(number, replaced) {
            for segment in self.pool.iter_mut().filter(|segment| !segment.dying.is_empty()) {
                segment.unknown_until = segment.unknown_until.max(until);
            }
        }
        self.pool.iter_mut().for_each(|segment| segment.dying.retain(|(n, _)| *n > oldest));
    }

    /// Schedules the removal of segments and log entries that the newest manifest does not list any more.
    pub(super) fn retire(&mut self, segments: &[usize], entries: &[u64]) {
        for position in segments {
            if let Some(segment) = self.pool.remove(*position) {
                self.retired.push(names::segment(segment.extent.epoch, segment.extent.number));
            }
        }
        self.retired.extend(entries.iter().map(|slot| names::entry(*slot)));
        if !entries.is_empty() {
            // The sizes are read from the directories instead of counted, so that errors cannot accumulate.
            self.log_and_index_bytes = self.measure_log_and_index();
        }
    }
}

/// Drops all but the last content of each page that was sent more than once.
fn drop_earlier(flight: &mut Flight) {
    if !flight.duplicates {
        return;
    }
    // The sort is stable, so that the content that was sent last comes last.
    flight.pending.sort_by_key(|pending| (pending.block, pending.page));
    let mut last: Vec<Pending> = Vec::with_capacity(flight.pending.len());
    for pending in flight.pending.drain(..) {
        match last.last_mut() {
            Some(before) if (before.block, before.page) == (pending.block, pending.page) => *before = pending,
            _ => last.push(pending),
        }
    }
    flight.pending = last;
}
