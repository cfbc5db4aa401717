//! Writes the base index in pieces while checkpoints are taken.
//!
//! A base index is not of one moment: an entry may be newer than the checkpoint at which writing the index began. This
//! does no harm, because a reader applies the directories of all later checkpoints on top.

use super::Engine;
use crate::disk::DiskFile;
use crate::error::{Result, StoreError};
use crate::format::base::{self, Base, HEADER_LEN, IndexEntry, Location, PART_PAGES};
use crate::format::manifest::Extent;
use crate::format::names;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use uuid::Uuid;

/// Number of parts in a piece.
const PIECE: u64 = 16;

/// A base index that is being written.
#[derive(Debug)]
pub(super) struct BaseInProgress {
    name: String,
    file: Arc<dyn DiskFile>,
    /// Newest checkpoint when writing began.
    from: u64,
    /// Committed bytes of each segment when writing began, by epoch and number.
    covered: HashMap<(u64, u64), u64>,
    /// Number and page count of each block.
    blocks: Vec<(u16, u64)>,
    /// Position of the block, and number of the part, to write next.
    at: (usize, u64),
    end: u64,
    sums: Vec<u64>,
}

impl Engine {
    /// Returns whether a new base index is due: the pages stored since the last one are a quarter of all pages or more.
    pub(super) fn wants_base(&self) -> bool {
        let pages: u64 = self.blocks.iter().map(|state| state.block.pages()).sum();
        !self.background_failed && !self.kept.is_empty() && self.since_base > 0 && self.since_base * 4 >= pages
    }

    /// Begins to write a base index, unless one is being written.
    pub(super) fn start_base(&mut self) -> Result<()> {
        if self.basing.is_some() {
            return Ok(());
        }
        let name = names::new(names::INDEX, self.claim.epoch, &Uuid::new_v4().simple().to_string());
        let file = self.home.disk.create(&name).map_err(self.home.failed(&name, "creating a base index"))?;
        let covered = self.pool.iter().map(|(_, segment)| segment.extent);
        self.basing = Some(BaseInProgress {
            name,
            file,
            from: self.newest(),
            covered: covered.map(|extent| ((extent.epoch, extent.number), extent.len)).collect(),
            blocks: self.blocks.iter().filter(|b| !b.new).map(|b| (b.number, b.block.pages())).collect(),
            at: (0, 0),
            end: HEADER_LEN,
            sums: Vec::new(),
        });
        self.since_base = 0;
        Ok(())
    }

    /// Writes a piece of the base index. Returns whether more is left. An error discards the base index.
    pub(super) fn step_base(&mut self) -> Result<bool> {
        let Some(mut basing) = self.basing.take() else { return Ok(false) };
        match self.write_piece(&mut basing) {
            Ok(true) => self.basing = Some(basing),
            other => {
                let done = other.and_then(|_| self.finish_base(&basing));
                let _ = self.home.disk.remove(&basing.name);
                self.release();
                self.log_and_index_bytes = self.measure_log_and_index();
                done?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Discards the base index that is being written.
    pub(super) fn stop_base(&mut self) {
        if let Some(basing) = self.basing.take() {
            let _ = self.home.disk.remove(&basing.name);
            self.release();
        }
    }

    fn write_piece(&mut self, basing: &mut BaseInProgress) -> Result<bool> {
        let mut piece = Vec::new();
        for _ in 0..PIECE {
            let (position, part) = basing.at;
            let Some((number, pages)) = basing.blocks.get(position).copied() else { break };
            if part * PART_PAGES >= pages {
                basing.at = (position + 1, 0);
                continue;
            }
            let range = part * PART_PAGES..(part * PART_PAGES + PART_PAGES).min(pages);
            // No checkpoint for which this index can be used has a block that was removed meanwhile.
            let state = self.blocks.iter().find(|state| state.number == number);
            let spots = range.map(|page| {
                state.map_or(IndexEntry::default(), |state| IndexEntry {
                    place: Location(state.places.get(page)),
                    digest: state.digests.get(page),
                })
            });
            basing.sums.push(base::encode_part(spots, &mut piece));
            basing.at = (position, part + 1);
        }
        let failed = |e: io::Error| StoreError::io(self.home.disk.name(), &basing.name, "writing a base index", e);
        basing.file.write_at(&piece, basing.end).map_err(failed)?;
        basing.file.start_writeback(basing.end, piece.len() as u64);
        basing.end += piece.len() as u64;
        Ok(basing.at.0 < basing.blocks.len())
    }

    fn finish_base(&mut self, basing: &BaseInProgress) -> Result<()> {
        let covered = |extent: &Extent| {
            let len = basing.covered.get(&(extent.epoch, extent.number)).copied().unwrap_or(0);
            Extent { len, ..*extent }
        };
        let base = Base {
            from: basing.from,
            to: self.newest(),
            blocks: basing.blocks.clone(),
            segments: self.pool.known().iter().map(covered).collect(),
            sums: basing.sums.clone(),
        };
        let (header, trailer) = base.encode(self.home.id, basing.end);
        let failed = |doing| {
            let name = basing.name.clone();
            let store = self.home.disk.name().to_owned();
            move |e: io::Error| StoreError::io(&store, &name, doing, e)
        };
        basing.file.write_at(&trailer, basing.end).map_err(failed("writing a base index"))?;
        basing.file.write_at(&header, 0).map_err(failed("writing a base index"))?;
        basing.file.sync().map_err(failed("making a base index durable"))?;
        let name = names::base(self.state, self.claim.epoch);
        // An existing base index of the same log entry is equivalent.
        match self.home.disk.link(&basing.name, &name) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed("linking a base index")(e)),
            _ => {}
        }
        self.home.disk.sync_directory(names::INDEX).map_err(failed("making a base index durable"))?;
        self.remove_old_bases();
        Ok(())
    }

    /// Removes all base indices except two: the newest, and the newest that is usable for the oldest kept checkpoint.
    fn remove_old_bases(&self) {
        let listed = self.home.disk.list(names::INDEX).unwrap_or_default();
        let mut bases: Vec<_> = listed.iter().filter_map(|(name, _)| names::parse_base(name)).collect();
        bases.sort_unstable();
        let oldest = self.oldest();
        let usable_from = |slot, epoch| {
            let name = names::base(slot, epoch);
            let file = self.home.disk.open(&name).ok()?;
            let bytes = self.home.read_at(&file, &name, 0, 80).ok()?;
            Base::decode_header(&bytes, self.home.id).ok().map(|header| header.to)
        };
        let mut newest = true;
        let mut enough = false;
        // A base index of a later owner is never removed.
        for (slot, epoch) in bases.into_iter().rev().filter(|(_, epoch)| *epoch <= self.claim.epoch) {
            let to = usable_from(slot, epoch);
            let stays = to.is_some_and(|_| newest || !enough);
            enough |= to.is_some_and(|to| to <= oldest);
            newest = false;
            if !stays {
                let _ = self.home.disk.remove(&names::base(slot, epoch));
            }
        }
    }
}
