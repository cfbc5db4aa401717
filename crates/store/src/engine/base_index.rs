//! Writes the base index in pieces while checkpoints are taken. The base index is a file with the location and digest
//! of every page, so that opening a checkpoint need not read the directories of all segments ([`crate::format::base`]).
//!
//! A base index is not of one moment: an entry may be newer than the checkpoint at which writing the index began. This
//! does no harm, because a reader applies the directories of all later checkpoints on top.

use super::Engine;
use crate::error::{Result, StoreError};
use crate::format::base::{self, BaseBlock, BaseIndex, HEADER_LEN, IndexEntry, PART_PAGES};
use crate::format::manifest::SegmentExtent;
use crate::format::names;
use crate::sealing::{FileIdentity, FileKey, Seal};
use rekindle_kernel::durable_file::DurableFile;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use uuid::Uuid;

/// Number of parts (4096 pages each) in a piece. A piece is 1 MiB, so that a checkpoint that begins meanwhile need not
/// wait long.
const PARTS_PER_PIECE: u64 = 16;

/// A base index that is being written.
#[derive(Debug)]
pub(super) struct BaseIndexWriter {
    /// Temporary name of the file.
    name: String,
    file: Arc<dyn DurableFile>,
    /// Key of an encrypted base index.
    seal: Option<(Seal, FileKey)>,
    /// Newest checkpoint when writing began.
    covers_through: u64,
    /// Committed bytes of each segment when writing began, by epoch and number.
    covered: HashMap<(u64, u64), u64>,
    blocks: Vec<BaseBlock>,
    /// Position in `blocks` of the block to write next, and the part of it.
    next_block: usize,
    next_part: u64,
    /// Bytes written.
    end: u64,
    part_checksums: Vec<u64>,
}

impl Engine {
    /// Returns whether a new base index is due: the pages stored since the last one are a quarter of all pages or more.
    pub(super) fn wants_base_index(&self) -> bool {
        let pages: u64 = self.blocks.iter().map(|state| state.stored.block.pages()).sum();
        !self.background_failed
            && !self.kept.is_empty()
            && self.pages_since_base > 0
            && self.pages_since_base * 4 >= pages
    }

    /// Begins to write a base index, unless one is being written.
    pub(super) fn start_base_index(&mut self) -> Result<()> {
        if self.base_index.is_some() {
            return Ok(());
        }
        let name = names::new(names::INDEX, self.claim.epoch, &Uuid::new_v4().simple().to_string());
        let seal = self.store.create_key(FileIdentity::BaseIndex { epoch: self.claim.epoch }, &name)?;
        let file = self.store.disk.create(&name).map_err(self.store.failed(&name, "creating a base index"))?;
        let extents = self.pool.iter().map(|(_, segment)| segment.extent);
        let committed = self.blocks.iter().filter(|state| !state.is_new).map(|state| &state.stored);
        self.base_index = Some(BaseIndexWriter {
            name,
            file,
            seal,
            covers_through: self.newest(),
            covered: extents.map(|extent| ((extent.epoch, extent.number), extent.len)).collect(),
            blocks: committed.map(|stored| BaseBlock { number: stored.number, pages: stored.block.pages() }).collect(),
            next_block: 0,
            next_part: 0,
            end: HEADER_LEN,
            part_checksums: Vec::new(),
        });
        self.pages_since_base = 0;
        Ok(())
    }

    /// Writes a piece of the base index. Returns whether more is left. An error discards the base index.
    pub(super) fn step_base_index(&mut self) -> Result<bool> {
        let Some(mut writer) = self.base_index.take() else { return Ok(false) };
        let written = self.write_piece(&mut writer);
        if let Ok(true) = written {
            self.base_index = Some(writer);
            return Ok(true);
        }
        let finished = written.and_then(|_| self.finish_base_index(&writer));
        let _ = self.store.disk.remove(&writer.name);
        self.allow_reuse_of_positions();
        self.log_and_index_bytes = self.measure_log_and_index();
        finished.map(|()| false)
    }

    /// Discards the base index that is being written.
    pub(super) fn stop_base_index(&mut self) {
        if let Some(writer) = self.base_index.take() {
            let _ = self.store.disk.remove(&writer.name);
            self.allow_reuse_of_positions();
        }
    }

    fn write_piece(&self, writer: &mut BaseIndexWriter) -> Result<bool> {
        let mut piece = Vec::new();
        let failed = |e: io::Error| StoreError::io(self.store.disk.name(), &writer.name, "writing a base index", e);
        let key = writer.seal.as_ref().map(|(_, key)| key);
        for _ in 0..PARTS_PER_PIECE {
            let Some(block) = writer.blocks.get(writer.next_block).copied() else { break };
            let first_page = writer.next_part * PART_PAGES;
            if first_page >= block.pages {
                writer.next_block += 1;
                writer.next_part = 0;
                continue;
            }
            // No checkpoint for which this index can be used has a block that was removed meanwhile.
            let state = self.blocks.iter().find(|state| state.stored.number == block.number);
            let pages = first_page..(first_page + PART_PAGES).min(block.pages);
            let entries = pages.map(|page| {
                state.map_or(IndexEntry::default(), |state| IndexEntry {
                    location: state.locations.get(page),
                    digest: state.digests.get(page),
                })
            });
            let checksum = base::encode_part(entries, writer.end, key, &mut piece).map_err(failed)?;
            writer.part_checksums.push(checksum);
            writer.next_part += 1;
        }
        writer.file.write_at(&piece, writer.end).map_err(failed)?;
        writer.file.start_writeback(writer.end, piece.len() as u64);
        writer.end += piece.len() as u64;
        Ok(writer.next_block < writer.blocks.len())
    }

    fn finish_base_index(&mut self, writer: &BaseIndexWriter) -> Result<()> {
        let covered_extent = |extent: &SegmentExtent| {
            let len = writer.covered.get(&(extent.epoch, extent.number)).copied().unwrap_or(0);
            SegmentExtent { len, ..*extent }
        };
        let base = BaseIndex {
            covers_through: writer.covers_through,
            usable_from: self.newest(),
            blocks: writer.blocks.clone(),
            segments: self.pool.last_extents().iter().map(covered_extent).collect(),
            part_checksums: writer.part_checksums.clone(),
            entry_footer: self.store.is_encrypted().then_some(self.newest_manifest_entry.footer),
        };
        let failed = |doing| self.store.failed(&writer.name, doing);
        let encoded =
            base.encode(self.store.id, writer.end, writer.seal.as_ref()).map_err(failed("encrypting a base index"))?;
        writer.file.write_at(&encoded.trailer, writer.end).map_err(failed("writing a base index"))?;
        writer.file.write_at(&encoded.header, 0).map_err(failed("writing a base index"))?;
        writer.file.sync().map_err(failed("making a base index durable"))?;
        let name = names::base(self.newest_manifest_entry.log_number, self.claim.epoch);
        match self.store.disk.link(&writer.name, &name) {
            // It may be of another history.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && self.store.is_encrypted() => return Ok(()),
            // An existing base index of the same log entry is equivalent.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            result => result.map_err(self.store.failed(&name, "linking a base index"))?,
        }
        let synced = self.store.disk.sync_directory(names::INDEX);
        synced.map_err(self.store.failed(names::INDEX, "making a base index durable"))?;
        self.base_entries.push(self.newest_manifest_entry);
        self.remove_old_base_indices();
        self.forget_removed_base_indices();
        Ok(())
    }

    /// Removes all base indices except two: the newest, and the newest that is usable for the oldest kept checkpoint.
    fn remove_old_base_indices(&self) {
        let files = self.store.disk.list(names::INDEX).unwrap_or_default();
        // A base index of a later owner is never removed.
        let mut bases: Vec<_> = files
            .iter()
            .filter_map(|(name, _)| names::parse_base(name))
            .filter(|(_, epoch)| *epoch <= self.claim.epoch)
            .collect();
        bases.sort_unstable();
        let mut is_newest = true;
        let mut oldest_is_covered = false;
        for (log_number, epoch) in bases.into_iter().rev() {
            let name = names::base(log_number, epoch);
            let usable_from = self.read_usable_from(&name);
            let is_listed = self.base_entries.iter().any(|entry| entry.log_number == log_number);
            if self.store.is_encrypted() && !is_listed {
                // It cannot be used: it is of another history, or of an owner that did not notice its successor.
                let _ = self.store.disk.remove(&name);
                continue;
            }
            let is_needed = usable_from.is_some() && (is_newest || !oldest_is_covered);
            oldest_is_covered |= usable_from.is_some_and(|usable_from| usable_from <= self.oldest());
            is_newest = false;
            if !is_needed {
                let _ = self.store.disk.remove(&name);
            }
        }
    }

    /// Drops the entries of `base_entries` whose base index was removed.
    pub(super) fn forget_removed_base_indices(&mut self) {
        let Ok(files) = self.store.disk.list(names::INDEX) else { return };
        let existing: Vec<u64> =
            files.iter().filter_map(|(name, _)| names::parse_base(name)).map(|(log_number, _)| log_number).collect();
        // After the newest entry, one may still be written.
        let newest = self.newest_manifest_entry;
        self.base_entries.retain(|entry| *entry == newest || existing.contains(&entry.log_number));
        self.base_entries.dedup();
    }

    /// Reads the checkpoint from which on a base index is usable; `None` if its header cannot be read.
    fn read_usable_from(&self, name: &str) -> Option<u64> {
        let file = self.store.disk.open(name).ok()?;
        let bytes = self.store.read_at(&file, name, 0, base::HEADER_FIELDS_LEN).ok()?;
        BaseIndex::decode_header(&bytes, self.store.id).ok().map(|header| header.usable_from)
    }
}
