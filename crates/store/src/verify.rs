//! Verifies every byte of a store that is in use, without stopping its owner, the process that writes the store.
//!
//! A store has a *log*, whose newest entry has a *manifest*: the kept checkpoints, and the *segments*, which are the
//! files of their pages. Where the pages are is stored twice. Each segment has *directories* of the pages written to
//! it. A *base index* collects the directories up to some checkpoint, so that a store opens faster; without it, or if
//! it is damaged, the directories suffice. [`verify`] checks the log, the segments' directories and the base indices;
//! then the pages of each checkpoint, each page once, found by both ways.
//!
//! Meanwhile the owner may drop checkpoints and move pages to other segments. An error about a file or checkpoint that
//! a newer manifest does not list any more ([`is_replaced`]) is therefore no damage.

use crate::checkpoints::{SelectedCheckpoint, is_replaced, read_table};
use crate::directory::StoreDirectory;
use crate::error::{Result, StoreError};
use crate::format::base::{IndexEntry, Location};
use crate::format::entry::{Kind, Section};
use crate::format::manifest::EntryId;
use crate::format::names;
use crate::format::page::unpack;
use crate::image::LocalImage;
use crate::index::{BaseIndexUse, Index, check_bases, check_segment};
use crate::log;
use crate::segments::OpenSegments;
use rekindle_pages::{BlockId, PAGE_SIZE, PageId, PageNo};
use serde::Serialize;
use std::collections::HashSet;

/// Number of pages whose stored bytes are in memory at a time.
const PAGES_PER_READ: usize = 1024;

/// Result of a verification.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
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

    /// Returns the value of a successful check. Records the error of a failed check.
    fn note<T>(&mut self, store: &StoreDirectory, result: Result<T>) -> Option<T> {
        result.inspect_err(|e| self.note_error(store, e)).ok()
    }

    /// Records an error once, unless the owner has only replaced what it is about.
    fn note_error(&mut self, store: &StoreDirectory, error: &StoreError) {
        if is_replaced(store, error) {
            return;
        }
        let mut text = error.to_string();
        if let Some(cause) = std::error::Error::source(error) {
            text += &format!(": {cause}");
        }
        if !self.bad.contains(&text) {
            self.bad.push(text);
        }
    }
}

/// Checks all of a store: every page of every kept checkpoint, device states, block tables, indices. `progress` gets
/// the bytes of pages that were read, and an estimate of the total.
///
/// # Errors
/// Errors after which nothing can be checked: [`StoreError::NotAStore`], or a damaged superblock.
pub(crate) fn verify(store: &StoreDirectory, mut progress: impl FnMut(u64, u64)) -> Result<Verified> {
    let mut verified = Verified::default();
    verify_log(store, &mut verified);
    let newest = match SelectedCheckpoint::find(store, None) {
        Err(StoreError::Empty { .. }) => return Ok(verified),
        result => verified.note(store, result),
    };
    let Some(SelectedCheckpoint { manifest, skipped_damage, .. }) = newest else { return Ok(verified) };
    if let Some(damage) = skipped_damage {
        verified.note_error(store, &damage);
    }
    for extent in &manifest.segments {
        verified.note(store, check_segment(store, *extent));
    }
    for error in check_bases(store, &manifest)? {
        verified.warnings.push(format!("{error}; it can be deleted"));
    }
    let total = manifest.segments.iter().map(|extent| extent.len).sum();
    let mut verifier =
        PageVerifier { store, verified, checked: HashSet::new(), progress: &mut |bytes| progress(bytes, total) };
    for number in manifest.numbers() {
        verifier.verify_checkpoint(number);
    }
    Ok(verifier.verified)
}

/// Checks all entries of the log.
fn verify_log(store: &StoreDirectory, verified: &mut Verified) {
    let Some(listing) = verified.note(store, log::list(store)) else { return };
    for log_number in listing.log_numbers {
        let entry = verified.note(store, log::read(store, log_number));
        if entry.is_some_and(|entry| entry.kind == Kind::Claim) {
            verified.note(store, log::read_claim(store, EntryId::numbered(log_number)));
        }
    }
}

/// Checks the pages of checkpoints, each stored page once.
struct PageVerifier<'a> {
    store: &'a StoreDirectory,
    verified: Verified,
    /// Segment number and offset of each page that was checked.
    checked: HashSet<(u64, u64)>,
    /// Gets the bytes of pages that were read.
    progress: &'a mut dyn FnMut(u64),
}

impl PageVerifier<'_> {
    /// Checks a checkpoint. If the owner removes it meanwhile, there is nothing to check. If the owner moves its pages,
    /// the check is repeated with their new locations.
    fn verify_checkpoint(&mut self, number: u64) {
        for attempt in 1.. {
            match self.try_verify(number) {
                Err(e @ StoreError::NoSuchCheckpoint { .. }) if is_replaced(self.store, &e) => return,
                Err(e) if is_replaced(self.store, &e) => {
                    // A checkpoint that was not checked must not count as good.
                    if attempt == log::MAX_ATTEMPTS {
                        let text = format!("{e}; its owner changes the store all the time; try again later");
                        self.verified.bad.push(text);
                        return;
                    }
                }
                result => {
                    self.verified.checkpoints += 1;
                    self.verified.note(self.store, result);
                    return;
                }
            }
        }
    }

    fn try_verify(&mut self, number: u64) -> Result<()> {
        let store = self.store;
        let selected = SelectedCheckpoint::find(store, Some(number))?;
        for section in [Section::Manifest, Section::Definition, Section::Metadata, Section::Devices] {
            self.verified.note(store, log::section(store, &selected.entry, section));
        }
        read_table(store, &selected.entry)?;
        let image = LocalImage::open(store.clone(), Some(number))?;
        let open_segments = OpenSegments::default();
        let index_of_directories =
            Index::build(store, &open_segments, &selected.manifest, image.table(), BaseIndexUse::Never)?;
        let pages = self.find_unchecked_pages(&image, &index_of_directories);
        self.read_pages(&image, &pages);
        Ok(())
    }

    /// Looks up each page in `index_of_directories` and in the index of the image, which uses a base index if there is
    /// one. Both must agree. Returns the pages that were not checked yet, in the order of their locations on the disk.
    fn find_unchecked_pages(&mut self, image: &LocalImage, index_of_directories: &Index) -> Vec<PageId> {
        let store = self.store;
        let mut unchecked: Vec<(Location, PageId)> = Vec::new();
        for block in (0..index_of_directories.blocks()).map(BlockId) {
            for page in (0..index_of_directories.pages(block).unwrap_or(0)).map(PageNo) {
                let id = (block, page);
                let found_by_directories = self.verified.note(store, index_of_directories.find(store, id));
                let Some(IndexEntry { location, digest }) = found_by_directories else { continue };
                let found_by_base = image.with_index(|index| index.find(store, id));
                if self.verified.note(store, found_by_base).is_some_and(|entry| entry.digest != digest) {
                    self.note_wrong_base(index_of_directories.number, id);
                }
                // A page of zeros has no stored bytes.
                if location.len() != 0
                    && let Some(segment) = index_of_directories.segments.get(location.segment())
                    && self.checked.insert((segment.number, location.offset()))
                {
                    unchecked.push((location, id));
                }
            }
        }
        unchecked.sort_unstable_by_key(|(location, id)| (location.0, *id));
        unchecked.into_iter().map(|(_, id)| id).collect()
    }

    fn note_wrong_base(&mut self, checkpoint: u64, (block, page): PageId) {
        let store = self.store.name();
        self.verified.bad.push(format!(
            "{store}: checkpoint {checkpoint}: for page {page} of block {block} the base index differs from the \
             directories; delete the files in {store}/{}",
            names::INDEX
        ));
    }

    /// Reads pages and checks their digests. A page that fails is read again alone, for an error that names it.
    fn read_pages(&mut self, image: &LocalImage, pages: &[PageId]) {
        let mut content = [0; PAGE_SIZE];
        for ids in pages.chunks(PAGES_PER_READ) {
            self.verified.pages += ids.len() as u64;
            if let Ok(stored_pages) = image.read_stored(ids) {
                for (id, stored) in ids.iter().zip(stored_pages) {
                    self.verified.bytes += stored.bytes.len() as u64;
                    if unpack(self.store.digester(), &stored.bytes, stored.digest, &mut content).is_err() {
                        self.verified.note(self.store, image.read_page(*id, &mut content));
                    }
                }
            } else {
                // At least one of them is unreadable.
                for id in ids {
                    self.verified.note(self.store, image.read_page(*id, &mut content));
                }
            }
            (self.progress)(self.verified.bytes);
        }
    }
}
