//! Looking at every byte that counts.

use crate::error::{Result, StoreError};
use crate::format::entry::Section;
use crate::format::names;
use crate::format::page::unpack;
use crate::home::Home;
use crate::image::{LocalImage, PageId, is_replaced, select, table};
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

    /// What was looked at in the store `home`, if it is good.
    fn note<T>(&mut self, home: &Home, looked: Result<T>) -> Option<T> {
        match looked {
            Ok(found) => Some(found),
            Err(e) if is_replaced(home, &e) => None,
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
        verified.note(home, if claim { log::claim_in(home, slot).map(drop) } else { log::read(home, slot).map(drop) });
    }
    let Some((manifest, _, passed)) = (match select(home, None) {
        Err(StoreError::Empty { .. }) => return Ok(verified),
        other => verified.note(home, other),
    }) else {
        return Ok(verified);
    };
    verified.note(home, passed.map_or(Ok(()), Err));
    let total = manifest.segments.iter().map(|extent| extent.len).sum();
    for extent in &manifest.segments {
        verified.note(home, check_segment(home, *extent));
    }
    for flaw in check_bases(home, &manifest)? {
        verified.warnings.push(format!("{flaw}; it can be deleted"));
    }
    let mut seen = HashSet::new();
    for number in manifest.numbers() {
        // An owner at work may remove the checkpoint, or move its pages to other segments: then it is looked at as it is now.
        let mut tries = 0;
        loop {
            tries += 1;
            let looked = checkpoint(home, number, &mut seen, &mut verified, &mut |done| progress(done, total));
            match looked {
                Err(e @ StoreError::NoSuchCheckpoint { .. }) if is_replaced(home, &e) => break,
                Err(e) if is_replaced(home, &e) => {
                    // It was not looked at, and that is not to be taken for good.
                    if tries == log::TRIES {
                        verified.bad.push(format!("{e}; its owner works on it all the time, so try again later"));
                        break;
                    }
                }
                other => {
                    verified.checkpoints += 1;
                    verified.note(home, other);
                    break;
                }
            }
        }
    }
    Ok(verified)
}

/// One checkpoint.
fn checkpoint(
    home: &Home,
    number: u64,
    seen: &mut HashSet<(u64, u64)>,
    verified: &mut Verified,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let (manifest, entry, _) = select(home, Some(number))?;
    for section in [Section::Manifest, Section::Definition, Section::Metadata, Section::Devices] {
        verified.note(home, log::section(home, &entry, section));
    }
    table(home, &entry)?;
    let image = LocalImage::open(home.clone(), Some(number))?;
    // The base index must say what the directories say.
    let plain = Index::build(home, &Files::default(), &manifest, image.table(), false)?;
    pages(&image, &plain, seen, verified, progress);
    Ok(())
}

/// Numbers of the log entries that are claims, and of those that are not.
fn claims(home: &Home, verified: &mut Verified) -> Vec<(u64, bool)> {
    let Some((slots, _)) = verified.note(home, log::slots(home)) else { return Vec::new() };
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
            let Some(spot) = verified.note(home, plain.find(home, block, page)) else { continue };
            let by_base = image.with_index(|index| index.find(home, block, page));
            if let Some(by_base) = verified.note(home, by_base)
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
                        verified.note(home, image.read_page(id.0, id.1, &mut content));
                    }
                }
            }
            // One by one, so that only the bad ones are named.
            Err(_) => {
                for id in ids {
                    verified.pages += 1;
                    verified.note(home, image.read_page(id.0, id.1, &mut content));
                }
            }
        }
        progress(verified.bytes);
    }
}
