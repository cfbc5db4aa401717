//! Verifies every byte of a store that is in use.

use crate::error::{Result, StoreError};
use crate::format::entry::Section;
use crate::format::names;
use crate::format::page::unpack;
use crate::home::Home;
use crate::image::{LocalImage, is_replaced, select, table};
use crate::index::{Index, check_bases, check_segment};
use crate::log;
use crate::segments::Files;
use rekindle_pages::{BlockId, PAGE_SIZE, PageId, PageNo};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// Result of a verification.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Verified {
    pub checkpoints: u64,
    /// Number of stored pages that were checked. A page that several checkpoints share counts once.
    pub pages: u64,
    /// Stored bytes of the checked pages.
    pub bytes: u64,
    /// Messages about damage that cannot be repaired, and about checkpoints that could not be checked.
    pub bad: Vec<String>,
    /// Messages about damage that can be repaired: damaged base indices.
    pub warnings: Vec<String>,
}

impl Verified {
    /// Returns whether there is no damage other than [`Verified::warnings`].
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.bad.is_empty()
    }

    /// Returns the value of a successful check. Records the error of a failed check, unless a file was only replaced.
    fn note<T>(&mut self, home: &Home, result: Result<T>) -> Option<T> {
        match result {
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

/// Checks all of a store: every page of every kept checkpoint, device states, block tables, indices. `progress` gets
/// the bytes of pages that were read, and an estimate of the total.
///
/// # Errors
/// Errors after which nothing can be checked: [`StoreError::NotAStore`], or a damaged superblock.
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
        // The owner may remove the checkpoint or move its pages to other segments. The check is then repeated on the
        // current state.
        let mut tries = 0;
        loop {
            tries += 1;
            let result = checkpoint(home, number, &mut seen, &mut verified, &mut |done| progress(done, total));
            match result {
                Err(e @ StoreError::NoSuchCheckpoint { .. }) if is_replaced(home, &e) => break,
                Err(e) if is_replaced(home, &e) => {
                    // A checkpoint that was not checked must not count as good.
                    if tries == log::TRIES {
                        verified.bad.push(format!("{e}; its owner changes the store all the time; try again later"));
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
    // The base index must agree with the directories of the segments.
    let plain = Index::build(home, &Files::default(), &manifest, image.table(), false)?;
    pages(&image, &plain, seen, verified, progress);
    Ok(())
}

/// Lists the numbers of all log entries; the second value is whether the entry is a claim.
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
    let mut to_read: Vec<(u64, PageId)> = Vec::new();
    for block in (0..plain.blocks()).map(BlockId) {
        for page in (0..plain.pages(block).unwrap_or(0)).map(PageNo) {
            let id = (block, page);
            let Some(spot) = verified.note(home, plain.find(home, id)) else { continue };
            let by_base = image.with_index(|index| index.find(home, id));
            if let Some(by_base) = verified.note(home, by_base)
                && by_base.digest != spot.digest
            {
                let text = format!(
                    "{}: checkpoint {}: for page {page} of block {block} the base index differs from the directories; \
                     delete the files in {}/{}",
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
                to_read.push((spot.place.0, id));
            }
        }
    }
    // Pages are read in the order of their places on the disk.
    to_read.sort_unstable();
    let mut content = [0; PAGE_SIZE];
    for some in to_read.chunks(1024) {
        let ids: Vec<PageId> = some.iter().map(|(_, id)| *id).collect();
        match image.read_stored(&ids) {
            Ok(stored) => {
                for (id, (digest, stored)) in ids.iter().zip(stored) {
                    verified.pages += 1;
                    verified.bytes += stored.len() as u64;
                    if unpack(home.digester(), &stored, digest, &mut content).is_err() {
                        verified.note(home, image.read_page(*id, &mut content));
                    }
                }
            }
            // Each page is read alone, to find the damaged ones.
            Err(_) => {
                for id in ids {
                    verified.pages += 1;
                    verified.note(home, image.read_page(id, &mut content));
                }
            }
        }
        progress(verified.bytes);
    }
}
