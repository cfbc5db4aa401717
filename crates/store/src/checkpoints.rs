//! Finds checkpoints in the log: which entry has a checkpoint, what the entry describes, and whether an entry that is
//! missing was only replaced by the owner meanwhile.
//!
//! An *entry* of the log commits a checkpoint. Its *manifest* lists all checkpoints that are kept, with their entries,
//! and all segments. Its *table* lists the checkpoint's RAM blocks.

use crate::directory::StoreDirectory;
use crate::error::{Result, StoreError};
use crate::format::entry::{Entry, Kind, Section};
use crate::format::manifest::{CheckpointTable, KeptCheckpoint, Manifest};
use crate::format::{Flaw, Structure, names};
use crate::log;
use crate::types::CheckpointInfo;

/// A checkpoint that was found in the log.
pub(crate) struct SelectedCheckpoint {
    /// The manifest that lists the checkpoint.
    pub manifest: Manifest,
    /// Log entry of the checkpoint.
    pub entry: Entry,
    /// Damage at the end of the log that was skipped, because the requested checkpoint is older.
    pub skipped_damage: Option<StoreError>,
}

impl SelectedCheckpoint {
    /// Finds checkpoint `number`, or the newest checkpoint. A damaged entry at the end of the log is skipped only if
    /// `number` is an older checkpoint.
    pub fn find(store: &StoreDirectory, number: Option<u64>) -> Result<Self> {
        let mut tail_entry = None;
        let mut skipped_damage = None;
        let manifest = match log::tail(store) {
            Ok(tail) => match tail.newest_state {
                Some(state) => {
                    tail_entry = Some(state.entry);
                    state.manifest
                }
                None => Manifest::default(),
            },
            Err(damage @ (StoreError::Damaged { .. } | StoreError::UnknownKey { .. } | StoreError::Missing { .. })) => {
                let Some(manifest) = number.and_then(|number| find_older_manifest(store, number)) else {
                    return Err(damage);
                };
                skipped_damage = Some(damage);
                manifest
            }
            Err(e) => return Err(e),
        };
        let Some(newest) = manifest.newest() else {
            return Err(StoreError::Empty { store: store.name().into(), vm: store.vm.name.clone() });
        };
        let asked = number.unwrap_or(newest.number);
        let Some(kept) = manifest.kept.iter().find(|kept| kept.number == asked).copied() else {
            return Err(StoreError::NoSuchCheckpoint { store: store.name().into(), asked, have: manifest.numbers() });
        };
        let entry = match tail_entry.filter(|entry| entry.log_number == kept.log_number) {
            Some(entry) => entry,
            None => read_kept_entry(store, &manifest, kept)?,
        };
        Ok(Self { manifest, entry, skipped_damage })
    }

    /// Logs the damage that was skipped.
    pub fn warn_of_skipped_damage(&self, number: u64) {
        if let Some(damage) = &self.skipped_damage {
            tracing::warn!("{damage}; checkpoint {number} is opened without it");
        }
    }
}

/// Finds the newest readable manifest that keeps checkpoint `number`.
fn find_older_manifest(store: &StoreDirectory, number: u64) -> Option<Manifest> {
    let entries = log::list(store).ok()?;
    entries.log_numbers.into_iter().rev().find_map(|log_number| {
        let entry = log::read(store, log_number).ok().filter(|entry| entry.kind != Kind::Claim)?;
        log::manifest(store, &entry).ok().filter(|manifest| manifest.numbers().contains(&number))
    })
}

/// Reads the log entry of a checkpoint that the manifest keeps.
pub(crate) fn read_kept_entry(store: &StoreDirectory, manifest: &Manifest, kept: KeptCheckpoint) -> Result<Entry> {
    let file = names::entry(kept.log_number);
    let entry = log::read(store, kept.log_number).map_err(|e| {
        if !e.is_not_found() {
            return e;
        }
        let needed = format!("it is checkpoint {} (kept are {:?})", kept.number, manifest.numbers());
        StoreError::Missing { store: store.name().into(), file: file.clone(), needed }
    })?;
    if entry.kind != Kind::Checkpoint || (kept.footer != 0 && kept.footer != entry.footer) {
        let flaw = Flaw::bad(Structure::EntryFooter, 0, "it is not the entry that the manifest lists");
        return Err(StoreError::flaw(store.name(), &file, flaw));
    }
    Ok(entry)
}

/// Reads the block table of a checkpoint from its log entry.
pub(crate) fn read_table(store: &StoreDirectory, entry: &Entry) -> Result<CheckpointTable> {
    let bytes = log::section(store, entry, Section::Checkpoint)?;
    CheckpointTable::decode(&bytes)
        .map_err(|flaw| StoreError::flaw(store.name(), &names::entry(entry.log_number), flaw))
}

/// Describes a checkpoint from its log entry and block table.
pub(crate) fn describe(entry: &Entry, table: &CheckpointTable) -> CheckpointInfo {
    CheckpointInfo {
        number: table.number,
        epoch: entry.epoch,
        time_us: table.time_us,
        blocks: table.blocks.iter().map(|stored| stored.block.clone()).collect(),
        pages: table.pages,
        bytes: table.bytes + entry.len(),
        devices: entry.section_len(Section::Devices),
    }
}

/// Returns whether an error is only about a checkpoint or file that the newest manifest does not list any more. While a
/// process reads a store, the owner of the store may replace files.
pub(crate) fn is_replaced(store: &StoreDirectory, error: &StoreError) -> bool {
    let newest_manifest = || Some(log::tail(store).ok()?.newest_state?.manifest);
    match error {
        StoreError::NoSuchCheckpoint { asked, .. } => {
            newest_manifest().is_some_and(|manifest| !manifest.numbers().contains(asked))
        }
        StoreError::Missing { file, .. } => newest_manifest().is_some_and(|manifest| !needs_file(&manifest, file)),
        StoreError::Io { file, .. } if error.is_not_found() => {
            newest_manifest().is_some_and(|manifest| !needs_file(&manifest, file))
        }
        _ => false,
    }
}

fn needs_file(manifest: &Manifest, file: &str) -> bool {
    let entries = manifest.kept.iter().map(|kept| names::entry(kept.log_number));
    let segments = manifest.segments.iter().map(|extent| names::segment(extent.epoch, extent.number));
    entries.chain(segments).any(|needed| needed == file)
}
