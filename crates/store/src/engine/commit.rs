//! Commits the open checkpoint.
//!
//! ```text
//! sync segments -> plan what the new manifest lists -> append the log entry -> update the state in memory
//! ----------------------- nothing has changed --------------^ from here on the checkpoint counts
//! ```
//!
//! The pages of checkpoints are *records* in files called *segments*. Everything else of a checkpoint is one entry of
//! the *log*, a directory of numbered files. The entry contains a *manifest*: the checkpoints that are *kept* (still
//! restorable) and the segments that they need; what it does not list is removed later. The first entry of an owner of
//! the store, a process that may write, is its *claim*; its *epoch* counts the owners.
//!
//! A RAM *block* is a piece of guest memory; a *cut* is a checkpoint at which a block has become shorter. Segments are
//! referred to by their *position* in the engine's pool; pages are appended to the *active* one.
//!
//! A commit makes its records live, and the records that they replace dying or garbage:
//!
//! | state | a record is | bytes are counted in |
//! |---|---|---|
//! | live | the newest content of its page | `Segment::live` |
//! | dying | replaced, but an older kept checkpoint needs it | `Segment::dying`, for each replacing checkpoint |
//! | garbage | not needed by a kept checkpoint | nothing; a segment that has only garbage is *dead* |
//!
//! If it is unknown which records are dying (the store was just opened, or too many were replaced), all records that
//! are not live count as dying until checkpoint `Segment::history_unknown_until` is the oldest kept one. *Compaction*,
//! in the background, copies what is not garbage to new segments.

use super::pool::{Role, record_bytes};
use super::{BlockState, Engine, OpenCheckpoint, PendingPage};
use crate::error::{Result, StoreError};
use crate::format::base::Location;
use crate::format::entry::{self, EncodedEntry, Kind, Section};
use crate::format::manifest::{
    CheckpointTable, EntryId, KeptCheckpoint, Manifest, SealedPart, SegmentExtent, StoredBlock,
};
use crate::format::names;
use crate::log::{self, NotAppended};
use crate::types::{Committed, now_us};
use std::time::{Duration, Instant};

/// Limits of a checkpoint's contents other than pages.
const MAX_DEFINITION_BYTES: usize = 16 << 20;
const MAX_METADATA_BYTES: usize = 16 << 20;
const MAX_DEVICE_STATE_BYTES: usize = 64 << 20;

/// The contents of a checkpoint other than pages.
#[derive(Debug, Clone, Default)]
pub(crate) struct CheckpointState {
    /// JSON that describes how to rebuild the VM.
    pub definition: Vec<u8>,
    /// JSON with notes of the protector.
    pub metadata: Vec<u8>,
    pub devices: Vec<u8>,
}

/// Changes that the log entry of a commit makes.
struct CommitPlan {
    /// Number of the new checkpoint.
    number: u64,
    /// Number of its log entry.
    log_number: u64,
    checkpoints: PlannedCheckpoints,
    segments: PlannedSegments,
}

/// The checkpoints after a commit.
struct PlannedCheckpoints {
    /// Ascending; the last one is the new checkpoint.
    kept: Vec<KeptCheckpoint>,
    /// Numbers of log entries that are not needed any more.
    dropped_entries: Vec<u64>,
}

/// The segments after a commit.
struct PlannedSegments {
    /// Segments that the new manifest lists.
    listed: Vec<SegmentExtent>,
    /// Positions of segments that no kept checkpoint needs any more.
    dead: Vec<usize>,
}

impl Engine {
    /// Commits the open checkpoint. `unchanged` is the number of pages that were not sent because they had not changed.
    ///
    /// On success, the checkpoint is durable.
    /// On failure, the checkpoint is not committed, and the store is unchanged. There is one exception: after an error
    /// while the log entry is linked or made durable, it is unknown whether the checkpoint is committed, and every
    /// later call fails with [`StoreError::Closed`].
    pub fn commit(&mut self, state: &CheckpointState, unchanged: u64) -> Result<Committed> {
        self.check_sound()?;
        let Some(mut checkpoint) = self.checkpoint.take() else {
            let why = "no checkpoint was started".to_owned();
            return Err(StoreError::Closed { store: self.store.name().into(), why });
        };
        checkpoint.pages.unchanged = unchanged;
        let committed = match checkpoint.failure.take() {
            Some(e) => Err(e),
            None => self.commit_open_checkpoint(&mut checkpoint, state),
        };
        if committed.is_ok() {
            self.allow_reuse_of_positions();
        } else if self.broken.is_none() {
            self.roll_back(checkpoint);
        }
        committed.map_err(|e| self.explain(e))
    }

    fn commit_open_checkpoint(
        &mut self,
        checkpoint: &mut OpenCheckpoint,
        state: &CheckpointState,
    ) -> Result<Committed> {
        let started_at = Instant::now();
        let syncing_before = checkpoint.syncing;
        self.sync_checkpoint(checkpoint)?;
        drop_earlier_contents(checkpoint);
        let mut plan = self.plan_commit(checkpoint);
        let number = plan.number;
        let entry = self.encode_checkpoint(checkpoint, &plan, state)?;
        self.append_entry(plan.log_number, &entry.bytes, &mut checkpoint.syncing)?;
        let appended_at = Instant::now();
        if let Some(new_checkpoint) = plan.checkpoints.kept.last_mut() {
            // Later manifests identify the entry by the checksum in its footer.
            new_checkpoint.footer = entry.footer;
        }
        self.apply_commit(checkpoint, plan);
        self.log_and_index_bytes += (entry.bytes.len() as u64).next_multiple_of(4096);
        let syncing = checkpoint.syncing;
        Ok(Committed {
            number,
            pages: checkpoint.pages,
            bytes: checkpoint.bytes + entry.bytes.len() as u64,
            writing: checkpoint.writing + (appended_at - started_at).saturating_sub(syncing - syncing_before),
            syncing,
            known: self.known_store(),
        })
    }

    fn sync_checkpoint(&mut self, checkpoint: &mut OpenCheckpoint) -> Result<()> {
        for position in &checkpoint.written_segments {
            if let Some(file) = self.pool.get(*position).and_then(|segment| segment.file.as_ref()) {
                file.start_sync();
            }
        }
        for position in checkpoint.written_segments.clone() {
            if self.pool.get(position).is_some_and(|segment| segment.is_dirty) {
                self.sync_segment(position, &mut checkpoint.syncing)?;
            }
        }
        if checkpoint.has_new_segments {
            self.sync_segment_names(&mut checkpoint.syncing)?;
        }
        Ok(())
    }

    pub(super) fn sync_segment_names(&self, sync_time: &mut Duration) -> Result<()> {
        let started_at = Instant::now();
        let synced = self.store.disk.sync_directory(names::SEGMENTS);
        *sync_time += started_at.elapsed();
        synced.map_err(self.store.failed(names::SEGMENTS, "making new segments durable"))
    }

    /// Plans the commit of the open checkpoint as the next checkpoint and log entry.
    fn plan_commit(&self, checkpoint: &OpenCheckpoint) -> CommitPlan {
        let (number, log_number) = (self.newest() + 1, self.newest_entry + 1);
        let checkpoints = self.plan_checkpoints(number, log_number);
        let oldest = checkpoints.kept.first().map_or(number, |kept| kept.number);
        let segments = self.plan_segments(checkpoint, number, oldest);
        CommitPlan { number, log_number, checkpoints, segments }
    }

    /// Keeps the newest checkpoints, as many as configured, and the one that is held.
    fn plan_checkpoints(&self, number: u64, log_number: u64) -> PlannedCheckpoints {
        let mut candidates = self.kept.clone();
        candidates.push(KeptCheckpoint { number, log_number, footer: 0 });
        let surplus = candidates.len().saturating_sub(self.settings.keep as usize);
        let (mut kept, mut dropped_entries) = (Vec::new(), Vec::new());
        for (age_rank, candidate) in candidates.into_iter().enumerate() {
            if age_rank >= surplus || self.held == Some(candidate.number) {
                kept.push(candidate);
            } else {
                dropped_entries.push(candidate.log_number);
            }
        }
        // The new manifest replaces the previous one, which has an entry of its own if a compaction wrote it.
        let previous = self.newest_manifest_entry.log_number;
        let is_of_checkpoint = self.kept.iter().any(|kept| kept.log_number == previous);
        if previous != 0 && !is_of_checkpoint {
            dropped_entries.push(previous);
        }
        PlannedCheckpoints { kept, dropped_entries }
    }

    /// Lists all segments of pages except the dead ones. `number`: the new checkpoint; `oldest`: the oldest kept one.
    fn plan_segments(&self, checkpoint: &OpenCheckpoint, number: u64, oldest: u64) -> PlannedSegments {
        let keeps_older = number > oldest;
        let replaced_bytes = self.replaced_bytes_by_segment(checkpoint);
        let (mut listed, mut dead) = (Vec::new(), Vec::new());
        for (position, segment) in self.pool.iter().filter(|(_, segment)| segment.role == Role::Data) {
            let is_written = self.active == Some(position) || checkpoint.written_segments.contains(&position);
            let replaced = replaced_bytes.get(position).copied().unwrap_or(0);
            let has_new_dying = keeps_older && replaced > 0;
            let remaining_live = segment.live.saturating_sub(replaced);
            if !is_written && !has_new_dying && segment.is_dead(remaining_live, oldest) {
                dead.push(position);
            } else {
                listed.push(SegmentExtent { len: segment.end, ..segment.extent });
            }
        }
        PlannedSegments { listed, dead }
    }

    /// Returns for each position of the pool the bytes of records that the open checkpoint replaces.
    fn replaced_bytes_by_segment(&self, checkpoint: &OpenCheckpoint) -> Vec<u64> {
        let mut replaced_bytes = vec![0u64; self.pool.positions()];
        let mut add = |location: Location| {
            if location.is_stored()
                && let Some(bytes) = replaced_bytes.get_mut(location.segment())
            {
                *bytes += record_bytes(location.len());
            }
        };
        for pending in &checkpoint.pending {
            if let Some(state) = self.blocks.get(usize::from(pending.block)) {
                add(state.locations.get(pending.page.into()));
            }
        }
        for (state, remaining) in self.shortened_blocks(checkpoint) {
            state.locations.values_from(remaining).for_each(|(_, location)| add(location));
        }
        replaced_bytes
    }

    /// Iterates over the blocks that have fewer pages in the open checkpoint, or were removed, with the number of
    /// remaining pages.
    fn shortened_blocks<'a>(&'a self, checkpoint: &'a OpenCheckpoint) -> impl Iterator<Item = (&'a BlockState, u64)> {
        self.blocks.iter().filter_map(|state| {
            let remaining = checkpoint.block(state.stored.number).map_or(0, |block| block.pages());
            (remaining < state.stored.block.pages()).then_some((state, remaining))
        })
    }

    /// Encodes the log entry of the open checkpoint.
    fn encode_checkpoint(
        &self,
        checkpoint: &OpenCheckpoint,
        plan: &CommitPlan,
        state: &CheckpointState,
    ) -> Result<EncodedEntry> {
        for (what, content, max) in [
            ("the definition", &state.definition, MAX_DEFINITION_BYTES),
            ("the metadata", &state.metadata, MAX_METADATA_BYTES),
            ("the device state", &state.devices, MAX_DEVICE_STATE_BYTES),
        ] {
            if content.len() > max {
                return Err(self.too_large(what, content.len() as u64, max as u64));
            }
        }
        let (kept, listed) = (plan.checkpoints.kept.clone(), plan.segments.listed.clone());
        let manifest = self.manifest(self.next_block_number(), kept, listed).encode();
        let (number, pages, bytes) = (plan.number, checkpoint.pages, checkpoint.bytes);
        let blocks = self.stored_blocks(checkpoint, number);
        let table = CheckpointTable { number, time_us: now_us(), pages, bytes, blocks }.encode();
        let sections = [
            (Section::Manifest, manifest.as_slice()),
            (Section::Checkpoint, &table),
            (Section::Definition, &state.definition),
            (Section::Metadata, &state.metadata),
            (Section::Devices, &state.devices),
        ];
        Ok(entry::encode(self.store.id, Kind::Checkpoint, self.claim.epoch, plan.log_number, &sections))
    }

    /// Returns a manifest with these checkpoints and segments.
    pub(super) fn manifest(
        &self,
        next_block: u16,
        kept: Vec<KeptCheckpoint>,
        mut segments: Vec<SegmentExtent>,
    ) -> Manifest {
        segments.sort_unstable_by_key(|extent| extent.number);
        let sealed = self
            .store
            .is_encrypted()
            .then(|| SealedPart { claim_footer: self.claim.entry.footer, base_entries: self.base_entries.clone() });
        Manifest {
            claim: self.claim.entry.log_number,
            next_block,
            next_segment: self.next_segment,
            kept,
            segments,
            sealed,
        }
    }

    /// Returns the block table of the open checkpoint, whose number will be `number`.
    fn stored_blocks(&self, checkpoint: &OpenCheckpoint, number: u64) -> Vec<StoredBlock> {
        let mut blocks = Vec::with_capacity(checkpoint.blocks.len());
        for numbered in &checkpoint.blocks {
            let previous = self.blocks.iter().find(|state| state.stored.number == numbered.number);
            let cuts = previous.map(|state| state.stored.cuts.clone()).unwrap_or_default();
            let mut stored = StoredBlock { number: numbered.number, block: numbered.block.clone(), cuts };
            let pages = numbered.block.pages();
            if previous.is_some_and(|state| pages < state.stored.block.pages()) {
                stored.cut(number, pages);
            }
            blocks.push(stored);
        }
        blocks
    }

    fn too_large(&self, what: &'static str, len: u64, max: u64) -> StoreError {
        StoreError::TooLarge { store: self.store.name().into(), what, len, max }
    }

    /// Appends an entry to the log as number `log_number`.
    pub(super) fn append_entry(&mut self, log_number: u64, content: &[u8], sync_time: &mut Duration) -> Result<()> {
        if content.len() as u64 > entry::MAX_ENTRY_BYTES {
            return Err(self.too_large("a log entry", content.len() as u64, entry::MAX_ENTRY_BYTES));
        }
        match log::append(&self.store, self.claim.epoch, log_number, content, sync_time) {
            Ok(()) => {
                self.newest_entry = log_number;
                Ok(())
            }
            Err(NotAppended::Failed(e)) => Err(e),
            Err(NotAppended::Taken) => Err(log::superseded(&self.store, self.claim.epoch, log_number)),
            Err(NotAppended::Uncertain(e)) => {
                self.broken = Some(e.to_string());
                Err(e)
            }
        }
    }

    /// Updates the state in memory after the commit: the pages of the committed checkpoint become the newest.
    fn apply_commit(&mut self, checkpoint: &OpenCheckpoint, plan: CommitPlan) {
        let CommitPlan { number, log_number, checkpoints, segments } = plan;
        self.kept = checkpoints.kept;
        let footer = self.kept.last().map_or(0, |kept| kept.footer);
        self.newest_manifest_entry = EntryId { log_number, footer };
        self.mark_segments_committed(checkpoint);
        let replaced = self.apply_pages(checkpoint, number);
        self.apply_blocks(checkpoint, number);
        self.remember_replaced(replaced, number);
        self.retire(&segments.dead, &checkpoints.dropped_entries);
        self.pages_since_base += checkpoint.pages.stored + checkpoint.pages.zero;
        self.background_failed = false;
    }

    fn mark_segments_committed(&mut self, checkpoint: &OpenCheckpoint) {
        if !self.store.disk.can_append() {
            self.active = None;
        }
        for position in &checkpoint.written_segments {
            let is_active = self.active == Some(*position);
            if let Some(segment) = self.pool.get_mut(*position) {
                segment.extent.len = segment.end;
                if !is_active {
                    segment.file = None;
                }
            }
        }
    }

    /// Makes the pages of the committed checkpoint `number` live, and those that they replace dying, or garbage if no
    /// older checkpoint is kept. Returns the locations of the replaced records.
    fn apply_pages(&mut self, checkpoint: &OpenCheckpoint, number: u64) -> Vec<Location> {
        let mut replaced = Vec::new();
        for pending in &checkpoint.pending {
            let Some(state) = self.blocks.get_mut(usize::from(pending.block)) else { continue };
            let Some(location) = state.locations.get_mut(pending.page.into()) else { continue };
            let previous = std::mem::replace(location, pending.location);
            state.digests.set(pending.page.into(), pending.digest);
            if let Some(segment) = self.pool.segment_of(pending.location) {
                segment.live += record_bytes(pending.location.len());
            }
            if previous.is_stored() {
                replaced.push(previous);
            }
        }
        for (state, remaining) in self.shortened_blocks(checkpoint) {
            replaced.extend(state.locations.values_from(remaining).map(|(_, location)| location));
        }
        let keeps_older = number > self.oldest();
        for location in &replaced {
            let bytes = record_bytes(location.len());
            if let Some(segment) = self.pool.segment_of(*location) {
                segment.live = segment.live.saturating_sub(bytes);
                if keeps_older {
                    segment.add_dying(number, bytes);
                }
            }
        }
        replaced
    }

    /// Makes the blocks of the committed checkpoint `number` the newest.
    fn apply_blocks(&mut self, checkpoint: &OpenCheckpoint, number: u64) {
        self.blocks.retain(|state| checkpoint.block(state.stored.number).is_some());
        for state in &mut self.blocks {
            state.is_new = false;
            self.next_block = self.next_block.max(state.stored.number + 1);
            let Some(block) = checkpoint.block(state.stored.number) else { continue };
            if block.pages() < state.stored.block.pages() {
                state.cut(number, block.pages());
            }
            state.stored.block.clone_from(block);
        }
    }

    /// Remembers the dying records that checkpoint `number` has replaced, for compactions, which must copy them.
    fn remember_replaced(&mut self, replaced: Vec<Location>, number: u64) {
        let oldest = self.oldest();
        self.replaced.prune(oldest);
        if number > oldest {
            if let Some(compaction) = &mut self.compaction {
                compaction.keep_replaced(&replaced);
            }
            if let Some(newest_forgotten) = self.replaced.add(number, replaced) {
                // There were too many records to remember.
                for segment in self.pool.iter_mut().filter(|segment| !segment.dying.is_empty()) {
                    segment.history_unknown_until = segment.history_unknown_until.max(newest_forgotten);
                }
            }
        }
        self.pool.iter_mut().for_each(|segment| segment.dying.retain(|dying| dying.replaced_by > oldest));
    }

    /// Schedules the removal of segments and log entries that the newest manifest does not list any more.
    pub(super) fn retire(&mut self, segments: &[usize], entries: &[u64]) {
        for position in segments {
            if let Some(segment) = self.pool.remove(*position) {
                self.obsolete_files.push(segment.name());
            }
        }
        self.obsolete_files.extend(entries.iter().map(|log_number| names::entry(*log_number)));
        if !entries.is_empty() && self.store.disk.can_append() {
            // The sizes are read from the directories instead of counted, so that errors cannot accumulate.
            self.log_and_index_bytes = self.measure_log_and_index();
        }
    }
}

/// Drops all but the last content of each page that was sent more than once.
fn drop_earlier_contents(checkpoint: &mut OpenCheckpoint) {
    if !checkpoint.has_duplicates {
        return;
    }
    // The sort is stable, so that the content that was sent last comes last.
    checkpoint.pending.sort_by_key(|pending| (pending.block, pending.page));
    let mut last_contents: Vec<PendingPage> = Vec::with_capacity(checkpoint.pending.len());
    for pending in checkpoint.pending.drain(..) {
        match last_contents.last_mut() {
            Some(last) if (last.block, last.page) == (pending.block, pending.page) => *last = pending,
            _ => last_contents.push(pending),
        }
    }
    checkpoint.pending = last_contents;
}
