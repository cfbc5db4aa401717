//! A process that inspects a store while the owner writes reports no damage, neither for removed files nor for moved
//! pages.

use super::model::{Change, Model, open};
use crate::checkpoints::SelectedCheckpoint;
use crate::directory::StoreDirectory;
use crate::format::names;
use crate::listing::list;
use crate::verify::verify;
use rekindle_testing::crash_disk::CrashDisk;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Returns change `n` of a fixed history: changes overlap in their pages, and none is zero (kind 0).
fn change(n: u64) -> Change {
    let pages = (0..6u64).map(|i| (0usize, (n * 5 + i) % 20, 1 + (n + i) % 9)).collect();
    Change { blocks: vec![("ram", 20)], pages }
}

/// Returns a store that keeps `keep` checkpoints, and a flag. Before the `after`-th read of the store, its owner
/// replaces all checkpoints and compacts, and the flag is set.
fn store_that_changes(keep: u32, after: usize) -> (StoreDirectory, Arc<AtomicBool>) {
    let disk = CrashDisk::default();
    let mut model = Model { keep, ..Model::default() };
    let mut engine = open(&disk, keep).unwrap();
    for n in 0..u64::from(keep) + 2 {
        model.commit(&mut engine, &change(n)).unwrap();
        engine.remove_obsolete_files();
    }
    let reader = disk.handle();
    let store = StoreDirectory::open(Arc::new(reader.clone()), None).unwrap();
    let has_changed = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&has_changed);
    let meanwhile = move || {
        for n in 10..10 + u64::from(keep) {
            model.commit(&mut engine, &change(n)).unwrap();
            engine.remove_obsolete_files();
        }
        engine.compact().unwrap();
        engine.settle().unwrap();
        engine.remove_obsolete_files();
        flag.store(true, Ordering::Relaxed);
    };
    reader.interrupt_read(after, Box::new(meanwhile));
    (store, has_changed)
}

#[test]
fn a_listing_is_of_one_moment() {
    for keep in [1, 3] {
        for after in 0.. {
            let (store, has_changed) = store_that_changes(keep, after);
            let listing = list(&store).unwrap();
            assert_eq!(listing.checkpoints.len() as u32, keep, "read {after}");
            let bad: Vec<_> = listing.checkpoints.iter().filter_map(|listed| listed.error.as_ref()).collect();
            assert!(bad.is_empty(), "read {after}: {bad:?}");
            assert_eq!(listing.restorable(), listing.checkpoints.last().map(|listed| listed.number));
            if !has_changed.load(Ordering::Relaxed) {
                assert!(after > 8, "a listing has more reads than {after}");
                break;
            }
        }
    }
}

#[test]
fn replaced_checkpoints_are_no_damage_and_moved_pages_are_checked() {
    for after in 0.. {
        let (store, has_changed) = store_that_changes(3, after);
        let verified = verify(&store, |_, _| {}).unwrap();
        assert!(verified.is_good(), "read {after}: {verified:?}");
        assert!(verified.warnings.is_empty(), "read {after}: {verified:?}");
        if !has_changed.load(Ordering::Relaxed) {
            assert!(after > 20, "it has more reads than {after}");
            assert_eq!(verified.checkpoints, 3);
            break;
        }
    }
}

#[test]
fn a_missing_file_that_was_not_replaced_is_damage() {
    let (store, _) = store_that_changes(3, usize::MAX);
    let number = list(&store).unwrap().checkpoints[0].number;
    let entry = SelectedCheckpoint::find(&store, Some(number)).unwrap().entry;
    store.disk.remove(&names::entry(entry.log_number)).unwrap();
    let listed = list(&store).unwrap().checkpoints.remove(0);
    assert_eq!((listed.number, listed.info), (number, None));
    assert!(listed.error.unwrap().contains("is missing"));
    assert!(!verify(&store, |_, _| {}).unwrap().is_good());
}
