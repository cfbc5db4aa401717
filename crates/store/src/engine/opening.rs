//! Opens a store for writing from the state that the log records.
//!
//! To open a store is to *claim* it: the writer adds an entry to the log that makes it the owner ([`crate::log`]). The
//! *manifest* in the newest entry that has one lists the valid checkpoints and segments.

use super::pool::{Segment, SegmentPool, record_bytes};
use super::replaced::ReplacedRecords;
use super::{BlockState, Engine, EngineSettings};
use crate::checkpoints::{read_kept_entry, read_table};
use crate::directory::StoreDirectory;
use crate::error::{Result, StoreError};
use crate::format::manifest::{CheckpointTable, EntryId, Manifest};
use crate::format::{entry, names};
use crate::index::{BaseIndexUse, Index};
use crate::location::Storage;
use crate::log;
use crate::segments::OpenSegments;
use crate::types::{OnlyIf, Owner, Vm};
use rekindle_pages::{BlockId, PageNo};

/// Longer entries of the log are no claims, so that they need not be read to find out.
const MAX_CLAIM_BYTES: u64 = 1024;

impl Engine {
    /// Opens the store in `storage` and becomes its owner. With `only_if`, becomes the owner only if that condition holds,
    /// and creates nothing.
    pub fn open(
        storage: impl Into<Storage>,
        vm: &Vm,
        owner: &Owner,
        only_if: Option<OnlyIf>,
        settings: EngineSettings,
    ) -> Result<Self> {
        let store = match only_if {
            None => StoreDirectory::open_for(storage, vm, settings.create)?,
            // A condition cannot hold for a missing store. If a store is missing, its file system may not be mounted.
            Some(_) => StoreDirectory::open(storage, Some(vm.uuid))?,
        };
        let (claim, tail) = log::claim(&store, owner, only_if)?;
        let mut engine = Self {
            newest_entry: claim.entry.log_number,
            newest_manifest_entry: EntryId::default(),
            base_entries: Vec::new(),
            claim,
            store,
            settings,
            pool: SegmentPool::default(),
            sealed_frame: Vec::new(),
            open_segments: OpenSegments::default(),
            blocks: Vec::new(),
            next_block: 0,
            next_segment: 1,
            kept: Vec::new(),
            held: None,
            replaced: ReplacedRecords::default(),
            checkpoint: None,
            active: None,
            compaction: None,
            base_index: None,
            background_failed: false,
            pages_since_base: 0,
            log_and_index_bytes: 0,
            obsolete_files: Vec::new(),
            broken: None,
        };
        if let Some(state) = tail.newest_state {
            engine.newest_manifest_entry = EntryId { log_number: state.entry.log_number, footer: state.entry.footer };
            engine.base_entries = state.manifest.sealed.clone().unwrap_or_default().base_entries;
            engine.forget_removed_base_indices();
            let Some(newest) = state.manifest.newest() else { return Ok(engine) };
            let entry = read_kept_entry(&engine.store, &state.manifest, newest)?;
            let table = read_table(&engine.store, &entry)?;
            engine.load(&state.manifest, &table)?;
            engine.remove_leftovers(&state.manifest);
        } else {
            engine.remove_leftovers(&Manifest::default());
        }
        engine.log_and_index_bytes = engine.measure_log_and_index();
        Ok(engine)
    }

    /// Loads the state of the newest checkpoint.
    fn load(&mut self, manifest: &Manifest, table: &CheckpointTable) -> Result<()> {
        let index = Index::build(&self.store, &self.open_segments, manifest, table, BaseIndexUse::IfUsable)?;
        match self.load_from(&index, manifest, table) {
            Err(e @ StoreError::Damaged { .. }) if index.has_base() => {
                tracing::warn!("{e}; rebuilding the index from the segments' directories");
                let index = Index::build(&self.store, &self.open_segments, manifest, table, BaseIndexUse::Never)?;
                self.load_from(&index, manifest, table)
            }
            result => result,
        }
    }

    fn load_from(&mut self, index: &Index, manifest: &Manifest, table: &CheckpointTable) -> Result<()> {
        self.pool = SegmentPool::default();
        self.blocks.clear();
        for extent in &manifest.segments {
            self.pool.add(Segment::committed(*extent));
        }
        for (position, stored) in table.blocks.iter().enumerate() {
            let mut state = BlockState::new(stored.number, stored.block.clone());
            state.stored.cuts.clone_from(&stored.cuts);
            state.is_new = false;
            for page in 0..stored.block.pages() {
                let index_entry = index.find(&self.store, (BlockId(position), PageNo(page)))?;
                if !index_entry.location.is_stored() {
                    continue;
                }
                if let Some(location) = state.locations.get_mut(page) {
                    *location = index_entry.location;
                }
                state.digests.set(page, index_entry.digest);
                if let Some(segment) = self.pool.segment_of(index_entry.location) {
                    segment.live += record_bytes(index_entry.location.len());
                }
            }
            self.blocks.push(state);
        }
        let newest = manifest.newest().map_or(0, |kept| kept.number);
        if manifest.oldest().is_some_and(|oldest| oldest < newest) {
            // An older checkpoint may need records that are not the newest of their page.
            self.pool.iter_mut().for_each(|segment| segment.history_unknown_until = newest);
        }
        self.kept.clone_from(&manifest.kept);
        self.next_block = manifest.next_block;
        self.next_segment = manifest.next_segment;
        self.pages_since_base = index.uncovered;
        Ok(())
    }

    /// Removes files that a previous owner has left. Nothing depends on their removal.
    fn remove_leftovers(&self, manifest: &Manifest) {
        let disk = &self.store.disk;
        let remove = |name: String| {
            if let Err(e) = disk.remove(&name) {
                tracing::debug!("cannot remove the unused file {}/{name}: {e}", disk.name());
            }
        };
        for (name, _) in disk.list("").unwrap_or_default() {
            if name.starts_with(names::NEW) || name == names::UNUSED {
                remove(name);
            }
        }
        for directory in [names::LOG, names::SEGMENTS, names::INDEX] {
            for (name, len) in disk.list(directory).unwrap_or_default() {
                let is_unfinished = names::parse_new(&name).is_some_and(|epoch| epoch < self.claim.epoch);
                let is_leftover = match directory {
                    names::LOG => self.is_leftover_in_log(manifest, &name, len),
                    names::SEGMENTS => self.is_leftover_segment(manifest, &name),
                    _ => false,
                };
                if is_unfinished || is_leftover {
                    remove(format!("{directory}/{name}"));
                }
            }
        }
    }

    /// Returns whether a file of the log, of `len` bytes, is a replaced entry or the second name of an older entry.
    fn is_leftover_in_log(&self, manifest: &Manifest, name: &str, len: u64) -> bool {
        if let Some(log_number) = names::parse_last(name) {
            return log_number < self.newest_entry;
        }
        let Some(log_number) = names::parse_entry(name) else { return false };
        let is_needed = log_number >= self.newest_manifest_entry.log_number
            || manifest.kept.iter().any(|kept| kept.log_number == log_number);
        // Claims are never removed.
        let may_be_state = len > MAX_CLAIM_BYTES || log_number > manifest.claim;
        let is_claim = || log::read(&self.store, log_number).map_or(true, |entry| entry.kind == entry::Kind::Claim);
        !is_needed && may_be_state && !is_claim()
    }

    /// Returns whether a file is a segment of a previous owner that the manifest does not list.
    fn is_leftover_segment(&self, manifest: &Manifest, name: &str) -> bool {
        names::parse_segment(name).is_some_and(|(epoch, number)| {
            let is_listed = manifest.segments.iter().any(|extent| (extent.epoch, extent.number) == (epoch, number));
            epoch < self.claim.epoch && !is_listed
        })
    }

    /// Reads the total size of the log and the base indices.
    pub(super) fn measure_log_and_index(&self) -> u64 {
        let files = [names::LOG, names::INDEX].map(|directory| self.store.disk.list(directory).unwrap_or_default());
        files.iter().flatten().map(|(_, len)| len.next_multiple_of(4096)).sum()
    }
}
