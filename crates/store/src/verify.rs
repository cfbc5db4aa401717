//! Looking at every byte that counts.

use crate::error::{Result, StoreError};
use crate::format::entry::Section;
use crate::format::names;
use crate::format::page::unpack;
use crate::home::Home;
use crate::image::{LocalImage, PageId, kept_entry, select, table};
use crate::index::{Index, check_bases, check_segment};
use crate::log;
use crate::segments::Files;
use crate::types::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// What was looked at, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Verified {
    /// Checkpoints that were looked at.
    pub checkpoints: u64,
    /// Pages: each content once, though several checkpoints have it.
    pub pages: u64,
    /// Their stored bytes.
    pub bytes: u64,
    /// What is bad, each by its name.
    pub bad: Vec<String>,
    /// What is bad and can be made anew: base indices.
    pub warnings: Vec<String>,
}

impl Verified {
    /// Whether all is well.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.bad.is_empty()
    }

    fn note<T>(&mut self, looked: Result<T>) -> Option<T> {
        match looked {
            Ok(found) => Some(found),
            Err(e) => {
                let mut text = e.to_string();
                if let Some(cause) = std::error::Error::source(&e) {
                    text += &format!(": {cause}");
                }
                if !self.bad.contains(&text) {
                    self.bad.push(text);
                }
                None
            }
        }
    }
}

/// Look at all of a store: every page of every kept checkpoint, device states, tables, indices. `progress` gets the bytes
/// of pages that were read, and how many there will be as far as that is known.
///
/// # Errors
/// Only when there is nothing to look at: [`StoreError::NotAStore`], or its superblock is damaged.
pub(crate) fn verify(home: &Home, mut progress: impl FnMut(u64, u64)) -> Result<Verified> {
    let mut verified = Verified::default();
    for (slot, claim) in claims(home, &mut verified) {
        verified.note(if claim { log::claim_in(home, slot).map(drop) } else { log::read(home, slot).map(drop) });
    }
    let Some((manifest, _, passed)) = (match select(home, None) {
        Err(StoreError::Empty { .. }) => return Ok(verified),
        other => verified.note(other),
    }) else {
        return Ok(verified);
    };
    verified.note(passed.map_or(Ok(()), Err));
    let total = manifest.segments.iter().map(|extent| extent.len).sum();
    for extent in &manifest.segments {
        verified.note(check_segment(home, *extent));
    }
    for flaw in check_bases(home, &manifest)? {
        verified.warnings.push(format!("{flaw}; it can be deleted"));
    }
    let mut seen = HashSet::new();
    for kept in &manifest.kept {
        verified.checkpoints += 1;
        let Some(entry) = verified.note(kept_entry(home, &manifest, *kept)) else { continue };
        for section in [Section::Manifest, Section::Definition, Section::Metadata, Section::Devices] {
            verified.note(log::section(home, &entry, section));
        }
        if verified.note(table(home, &entry)).is_none() {
            continue;
        }
        let Some(image) = verified.note(LocalImage::open(home.clone(), Some(kept.number))) else { continue };
        // The base index must say what the directories say.
        let plain = Index::build(home, &Files::default(), &manifest, image.table(), false);
        let Some(plain) = verified.note(plain) else { continue };
        pages(&image, &plain, &mut seen, &mut verified, &mut |done| progress(done, total));
    }
    Ok(verified)
}

/// Numbers of the log entries that are claims, and of those that are not.
fn claims(home: &Home, verified: &mut Verified) -> Vec<(u64, bool)> {
    let Some((slots, _)) = verified.note(log::slots(home)) else { return Vec::new() };
    let is_claim = |slot| log::read(home, slot).is_ok_and(|entry| entry.kind == crate::format::entry::Kind::Claim);
    slots.into_iter().map(|slot| (slot, is_claim(slot))).collect()
}

fn pages(
    image: &LocalImage,
    plain: &Index,
    seen: &mut HashSet<(u64, u64)>,
    verified: &mut Verified,
    progress: &mut dyn FnMut(u64),
) {
    let home = image.home();
    let mut wanted: Vec<(u64, PageId)> = Vec::new();
    for block in 0..plain.blocks() {
        for page in 0..plain.pages(block).unwrap_or(0) {
            let id = (block, page);
            let Some(spot) = verified.note(plain.find(home, block, page)) else { continue };
            let by_base = image.with_index(|index| index.find(home, block, page));
            if let Some(by_base) = verified.note(by_base)
                && by_base.digest != spot.digest
            {
                let text = format!(
                    "{}: checkpoint {}: the base index says something else of block {block}, page {page}, than the \
                     directories; delete the files in {}/{}",
                    home.name(),
                    plain.number,
                    home.name(),
                    names::INDEX
                );
                verified.bad.push(text);
            }
            let extent = plain.segments.get(spot.place.segment());
            if spot.place.len() != 0
                && let Some(extent) = extent
                && seen.insert((extent.number, spot.place.offset()))
            {
                wanted.push((spot.place.0, id));
            }
        }
    }
    // In the order in which they lie on the disk.
    wanted.sort_unstable();
    let mut content = [0; PAGE_SIZE];
    for some in wanted.chunks(1024) {
        let ids: Vec<PageId> = some.iter().map(|(_, id)| *id).collect();
        match image.read_stored(&ids) {
            Ok(stored) => {
                for (id, (digest, stored)) in ids.iter().zip(stored) {
                    verified.pages += 1;
                    verified.bytes += stored.len() as u64;
                    if unpack(home.digester(), &stored, digest, &mut content).is_err() {
                        verified.note(image.read_page(id.0, id.1, &mut content));
                    }
                }
            }
            // One by one, so that only the bad ones are named.
            Err(_) => {
                for id in ids {
                    verified.pages += 1;
                    verified.note(image.read_page(id.0, id.1, &mut content));
                }
            }
        }
        progress(verified.bytes);
    }
}
