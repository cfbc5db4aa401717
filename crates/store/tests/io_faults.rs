//! A store in a directory whose disk is full or fails at each system call that changes or syncs a file.
//!
//! The scenario creates a store, claims it three times, commits checkpoints and compacts. Then the disk works again: the
//! owner continues, the power fails, and the store must have each checkpoint whose commit was reported, and no other.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use rekindle_pages::{BlockId, PAGE_SIZE, Page, PageNo};
use rekindle_store::types::{Block, Vm};
use rekindle_store::{Image, Options, ReadOptions, StoreError, StoreUrl, Writer, admin};
use rekindle_testing::io_faults::{Fault, FaultKind, FaultyFiles, with_faults};
use serde_json::json;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use uuid::Uuid;

const PAGES: u64 = 32;
/// Number of checkpoints that the store keeps.
const KEPT: usize = 2;
/// The scenario makes more calls than this, of which more than a tenth are syncs of files.
const MIN_CALLS: usize = 60;

/// The version of each page; 0 for a page of zeros.
type Contents = Vec<u64>;

/// Returns a page that cannot be compressed.
fn page(number: u64, version: u64) -> Page {
    static NOISE: LazyLock<Page> = LazyLock::new(|| {
        let mut noise = [0; PAGE_SIZE];
        fastrand::Rng::with_seed(1).fill(&mut noise);
        noise
    });
    if version == 0 {
        return [0; PAGE_SIZE];
    }
    let mut page = *NOISE;
    page[..8].copy_from_slice(&number.to_le_bytes());
    page[8..16].copy_from_slice(&version.to_le_bytes());
    page
}

fn vm() -> Vm {
    Vm { uuid: Uuid::from_u128(7), name: "web".into() }
}

fn blocks() -> [Block; 1] {
    let bytes = PAGES * PAGE_SIZE as u64;
    [Block { id: "pc.ram".into(), used: bytes, max: bytes, page_size: 4096 }]
}

/// A checkpoint that was to be committed.
#[derive(Debug, Clone)]
struct Attempt {
    number: u64,
    contents: Contents,
}

/// A store, and what its owners were reported.
struct History<'f> {
    files: &'f FaultyFiles,
    store: PathBuf,
    committed: Vec<Attempt>,
    /// The last attempt, if it is unknown whether it was committed.
    uncertain: Option<Attempt>,
    writer: Option<Writer>,
    attempts: u64,
    errors: usize,
}

impl<'f> History<'f> {
    fn new(files: &'f FaultyFiles, store: &Path) -> Self {
        let (store, committed) = (store.to_owned(), Vec::new());
        Self { files, store, committed, uncertain: None, writer: None, attempts: 0, errors: 0 }
    }

    fn url(&self) -> StoreUrl {
        StoreUrl::Directory(self.store.clone())
    }

    /// Checks that an error names the error of the system, and a file that a failed call was about.
    fn check_error(&mut self, error: &StoreError) {
        self.errors += 1;
        let failed = self.files.failed();
        let text = chain(error);
        if let StoreError::Closed { why, .. } = error {
            assert!(why.contains(names_part(&self.store)), "{text}");
            return;
        }
        let is_full = failed.last().is_some() && matches!(error, StoreError::NoSpace { .. });
        let cause = if is_full { "os error 28" } else { "os error 5" };
        let names_file = failed.iter().any(|call| text.contains(&*call.path.to_string_lossy()));
        assert!(names_file && text.contains(cause), "{text}, after {failed:?}");
    }

    fn newest(&self) -> u64 {
        self.committed.last().map_or(0, |attempt| attempt.number)
    }

    /// Claims the store. Returns whether that succeeded.
    fn open(&mut self) -> bool {
        let options =
            Options { keep: KEPT as u32, create: true, segment: 32 << 10, packers: 1, ..Options::new(vm(), "test") };
        match Writer::open(&self.url(), &options) {
            Ok(writer) => {
                let found = writer.next_number() - 1;
                match self.uncertain.take() {
                    Some(uncertain) if uncertain.number == found => self.committed.push(uncertain),
                    _ => {}
                }
                assert_eq!(found, self.newest(), "the newest checkpoint, to the next owner");
                self.writer = Some(writer);
                true
            }
            Err(e) => {
                self.check_error(&e);
                false
            }
        }
    }

    /// Tries to commit a checkpoint; opens the store before if no owner is left.
    fn commit(&mut self) {
        if self.writer.is_none() && !self.open() {
            return;
        }
        self.attempts += 1;
        let version = self.attempts;
        let mut contents = self.committed.last().map_or(vec![0; PAGES as usize], |newest| newest.contents.clone());
        (version as usize % 3..PAGES as usize).step_by(3).for_each(|page| contents[page] = version);
        contents[version as usize] = 0;
        let Some(writer) = &mut self.writer else { return };
        let attempt = Attempt { number: writer.next_number(), contents };
        match send(writer, &attempt.contents) {
            Ok(number) => {
                assert_eq!(number, attempt.number);
                self.committed.push(attempt);
            }
            Err(e) => {
                self.check_error(&e);
                self.give_way(attempt);
            }
        }
    }

    /// Drops the owner if it cannot continue after a failed commit.
    fn give_way(&mut self, attempt: Attempt) {
        let Some(writer) = &mut self.writer else { return };
        match writer.begin(&blocks()).map(drop) {
            Ok(()) => {}
            Err(e @ StoreError::Closed { .. }) => {
                self.check_error(&e);
                self.uncertain = Some(attempt);
                self.writer = None;
            }
            Err(e) => panic!("{e}"),
        }
    }

    /// Does maintenance, which may fail.
    fn maintain(&mut self, work: impl FnOnce(&mut Writer) -> Result<(), StoreError>) {
        let Some(writer) = &mut self.writer else { return };
        if let Err(e) = work(writer) {
            self.check_error(&e);
            let closed = self.writer.as_mut().is_some_and(|writer| writer.begin(&blocks()).is_err());
            if closed {
                self.writer = None;
            }
        }
    }

    /// The scenario.
    fn run(&mut self) {
        if let Err(e) = admin::init(&self.url(), None) {
            self.check_error(&e);
        }
        for round in 0..9 {
            self.commit();
            match round {
                2 | 5 => self.writer = None,
                3 | 7 => self.maintain(|writer| writer.compact().map(drop)),
                4 => self.maintain(Writer::settle),
                _ => {}
            }
        }
    }

    /// Checks that the store has the newest committed checkpoints and nothing else.
    fn check(&self) {
        let verified = admin::verified(&self.url(), None, &mut |_, _| {}).unwrap();
        assert!(verified.is_good(), "{verified:?}");
        let listing = admin::listing(&self.url(), None).unwrap();
        let found: Vec<u64> = listing.checkpoints.iter().map(|checkpoint| checkpoint.number).collect();
        let mut possible = vec![self.committed.clone()];
        if let Some(uncertain) = &self.uncertain {
            possible.push(self.committed.iter().chain([uncertain]).cloned().collect());
        }
        let kept = |history: &Vec<Attempt>| -> BTreeMap<u64, Contents> {
            let kept = history.iter().rev().take(KEPT);
            kept.map(|attempt| (attempt.number, attempt.contents.clone())).collect()
        };
        let expected = possible.iter().map(kept).find(|kept| kept.keys().copied().eq(found.iter().copied()));
        let expected = expected.unwrap_or_else(|| panic!("{found:?} instead of one of {possible:?}"));
        for (number, contents) in &expected {
            let image = Image::open(&self.url(), &ReadOptions { at: Some(*number), ..ReadOptions::default() }).unwrap();
            let mut next = 0;
            image
                .read_pages(BlockId(0), PageNo(0)..PageNo(PAGES), |number, content| {
                    assert!(*content == page(number.0, contents[number.0 as usize]), "page {}", number.0);
                    next += 1;
                })
                .unwrap();
            assert_eq!(next, PAGES);
        }
    }
}

/// Returns the last component of a path.
fn names_part(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

fn send(writer: &mut Writer, contents: &Contents) -> Result<u64, StoreError> {
    let mut checkpoint = writer.begin(&blocks())?;
    let pages: Vec<Page> = (0..PAGES).map(|number| page(number, contents[number as usize])).collect();
    checkpoint.pages(BlockId(0), (0..PAGES).map(PageNo).zip(&pages))?;
    checkpoint.commit(&json!({"name": "web"}), &json!({}), b"devices").map(|committed| committed.number)
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// Lets each call of the scenario fail.
fn walk(kind: FaultKind) {
    let directory = tempfile::Builder::new().prefix("store-").tempdir_in("/dev/shm").unwrap();
    let directory = fs::canonicalize(directory.path()).unwrap();
    with_faults(&directory, |files| {
        for number in 1.. {
            let store = directory.join("web.store");
            let mut history = History::new(files, &store);
            files.start(Fault { kind, number });
            history.run();
            let failed = files.stop();
            println!("{kind:?} at call {number}: {failed:?}, {} errors", history.errors);
            assert!(failed.len() >= history.errors.min(1));
            // The disk works again: this owner or the next one continues.
            let before = history.committed.len();
            while history.committed.len() < before + 2 {
                history.commit();
            }
            drop(history.writer.take());
            files.lose_power();
            history.check();
            history.commit();
            history.maintain(|writer| writer.compact().map(drop));
            history.check();
            drop(history.writer.take());
            fs::remove_dir_all(&store).unwrap();
            if failed.is_empty() {
                let min_calls = if kind == FaultKind::SyncLosesData { MIN_CALLS / 10 } else { MIN_CALLS };
                assert!(number > min_calls, "{number} calls");
                assert_eq!(history.errors, 0);
                break;
            }
        }
    });
}

#[test]
fn a_store_whose_disk_is_full_for_one_call() {
    walk(FaultKind::NoSpaceOnce);
}

#[test]
fn a_store_whose_disk_is_full_from_one_call_on() {
    walk(FaultKind::NoSpace);
}

#[test]
fn a_store_of_which_one_call_fails() {
    walk(FaultKind::IoErrorOnce);
}

#[test]
fn a_store_of_which_one_sync_fails_and_loses_what_was_written() {
    walk(FaultKind::SyncLosesData);
}
