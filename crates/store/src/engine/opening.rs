//! Opens a store for writing from the state that the log records.

use super::pool::{History, Pool, Segment, cost};
use super::{BlockState, Engine, Settings};
use crate::disk::Disk;
use crate::error::{Result, StoreError};
use crate::format::manifest::{Extent, Manifest, StoredBlock, Table};
use crate::format::{entry, names};
use crate::home::Home;
use crate::index::Index;
use crate::log;
use crate::segments::Files;
use crate::sparse::{Digests, Sparse};
use crate::types::{OnlyIf, Owner, Vm};
use rekindle_pages::{BlockId, PageNo};
use std::sync::Arc;

impl Engine {
    /// Opens the store in `disk` and becomes its owner. With `only_if`, becomes the owner only if that condition holds,
    /// and creates nothing.
    pub fn open(
        disk: Arc<dyn Disk>,
        vm: &Vm,
        owner: &Owner,
        only_if: Option<OnlyIf>,
        settings: Settings,
    ) -> Result<Self> {
        let home = match only_if {
            None => Home::open_for(disk, vm, settings.create)?,
            // A condition cannot hold for a missing store. If a store is missing, its file system may not be mounted.
            Some(_) => Home::open(disk, Some(vm.uuid))?,
        };
        let (claim, tail) = log::claim(&home, owner, only_if)?;
        let mut engine = Self {
            slot: claim.slot,
            state: 0,
            claim,
            home,
            settings,
            pool: Pool::default(),
            files: Files::default(),
            blocks: Vec::new(),
            next_block: 0,
            next_segment: 1,
            kept: Vec::new(),
            held: None,
            history: History::default(),
            flight: None,
            active: None,
            compaction: None,
            basing: None,
            background_failed: false,
            since_base: 0,
            log_and_index_bytes: 0,
            retired: Vec::new(),
            broken: None,
        };
        if let Some((state, manifest)) = tail.state {
            engine.state = state.slot;
            let Some(newest) = manifest.newest() else { return Ok(engine) };
            let entry = crate::image::kept_entry(&engine.home, &manifest, newest)?;
            let table = crate::image::table(&engine.home, &entry)?;
            engine.load(&manifest, &table)?;
            engine.clean(&manifest);
        } else {
            engine.clean(&Manifest::default());
        }
        engine.log_and_index_bytes = engine.measure_log_and_index();
        Ok(engine)
    }

    /// Loads the state of the newest checkpoint.
    fn load(&mut self, manifest: &Manifest, table: &Table) -> Result<()> {
        let index = Index::build(&self.home, &self.files, manifest, table, true)?;
        match self.fill(manifest, table, &index) {
            Err(e @ StoreError::Damaged { .. }) if index.has_base() => {
                tracing::warn!("{e}; rebuilding the index from the segments' directories");
                let index = Index::build(&self.home, &self.files, manifest, table, false)?;
                self.fill(manifest, table, &index)
            }
            other => other,
        }
    }

    fn fill(&mut self, manifest: &Manifest, table: &Table, index: &Index) -> Result<()> {
        self.pool = Pool::default();
        self.blocks.clear();
        for extent in &manifest.segments {
            self.pool.add(Segment::found(*extent));
        }
        for (position, StoredBlock { number, block, cuts }) in table.blocks.iter().enumerate() {
            let pages = block.pages();
            let (mut places, digests) = (Sparse::new(pages), Digests::new(pages));
            for page in 0..pages {
                let spot = index.find(&self.home, (BlockId(position), PageNo(page)))?;
                if !spot.place.is_stored() {
                    continue;
                }
                if let Some(place) = places.get_mut(page) {
                    *place = spot.place.0;
                }
                digests.set(page, spot.digest);
                if let Some(segment) = self.pool.of(spot.place) {
                    segment.live += cost(spot.place.len());
                }
            }
            let (number, block, cuts, digests) = (*number, block.clone(), cuts.clone(), Arc::new(digests));
            self.blocks.push(BlockState { number, block, cuts, places, digests, new: false });
        }
        let newest = manifest.newest().map_or(0, |kept| kept.number);
        if manifest.oldest().is_some_and(|oldest| oldest < newest) {
            // An older checkpoint may need records that are not the newest of their page.
            self.pool.iter_mut().for_each(|segment| segment.unknown_until = newest);
        }
        self.kept.clone_from(&manifest.kept);
        self.next_block = manifest.next_block;
        self.next_segment = manifest.next_segment;
        self.since_base = index.uncovered;
        Ok(())
    }

    /// Removes files that a previous owner has left. Nothing depends on their removal.
    fn clean(&self, manifest: &Manifest) {
        let disk = &self.home.disk;
        let mine = self.claim.epoch;
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
                let old_new = names::parse_new(&name).is_some_and(|epoch| epoch < mine)
                    || names::parse_last(&name).is_some_and(|slot| slot < self.slot);
                let segment = (directory == names::SEGMENTS).then(|| names::parse_segment(&name)).flatten();
                let unused = segment.is_some_and(|(epoch, number)| {
                    let is_it = |extent: &Extent| (extent.epoch, extent.number) == (epoch, number);
                    epoch < mine && !manifest.segments.iter().any(is_it)
                });
                let entry = (directory == names::LOG).then(|| names::parse_entry(&name)).flatten();
                let replaced = entry.is_some_and(|slot| {
                    let needed = slot >= self.state || manifest.kept.iter().any(|kept| kept.slot == slot);
                    // Claims are short entries. They are never removed.
                    !needed
                        && (len > 1024 || slot > manifest.claim)
                        && log::read(&self.home, slot).is_ok_and(|entry| entry.kind != entry::Kind::Claim)
                });
                if old_new || unused || replaced {
                    remove(format!("{directory}/{name}"));
                }
            }
        }
    }

    /// Reads the total size of the log and the base indices.
    pub(super) fn measure_log_and_index(&self) -> u64 {
        let files = [names::LOG, names::INDEX].map(|directory| self.home.disk.list(directory).unwrap_or_default());
        files.iter().flatten().map(|(_, len)| len.next_multiple_of(4096)).sum()
    }
}
