//! Stores in an object store in memory: the tests of the store in general, and what is particular to requests: lost
//! answers, requests that are carried out late, and servers that ignore conditions.

use super::disk::TestDisk;
use super::memory_objects::{Fault, MemoryObjects};
use super::model::{Change, Model, open, open_as};
use super::{epoch, guest, history};
use crate::directory::StoreDirectory;
use crate::error::StoreError;
use crate::format::names;
use crate::listing::list;
use crate::verify::verify;
use bytes::Bytes;
use futures_util::FutureExt;
use object_store::path::Path;
use object_store::{ObjectStore, PutOptions};
use proptest::prelude::*;

fn change(n: u64) -> Change {
    let pages = (0..14u64).map(|i| (0usize, (n * 5 + i * (1 + n % 3)) % 30, 1 + (n + i) % 9)).collect();
    Change { blocks: vec![("ram", 30), ("bios", 3)], pages }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_store_of_objects_holds_what_the_model_holds(
        keep in 1u32..4, steps in proptest::collection::vec(history::step(), 1..40),
    ) {
        history::run(&MemoryObjects::default(), keep, steps);
    }

    #[test]
    fn only_the_host_that_began_it_last_commits_to_objects(steps in guest::steps()) {
        guest::play::<MemoryObjects>(steps);
    }
}

#[test]
fn an_image_is_read_correctly_or_reported_as_removed_although_removed_objects_cannot_be_read() {
    history::read_lazily(&MemoryObjects::default());
}

#[test]
fn previous_owners_are_rejected() {
    epoch::commit_after_another_claim::<MemoryObjects>();
    epoch::claim_conditionally::<MemoryObjects>();
}

#[test]
fn an_owner_that_stalls_before_any_request_of_a_commit_spoils_nothing() {
    epoch::stall_in_a_commit::<MemoryObjects>();
}

#[test]
fn an_owner_that_stalls_before_any_request_of_a_compaction_deletes_nothing_that_is_needed() {
    epoch::stall_in_a_compaction::<MemoryObjects>();
}

#[test]
fn two_processes_that_create_a_store_of_objects_concurrently_get_the_same_one() {
    epoch::create_concurrently::<MemoryObjects>();
}

/// Returns a store with three checkpoints, and its model.
fn with_checkpoints() -> (MemoryObjects, Model) {
    let disk = MemoryObjects::default();
    let mut model = Model { keep: 2, ..Model::default() };
    let mut engine = open(&disk, 2).unwrap();
    for n in 0..3 {
        model.commit(&mut engine, &change(n)).unwrap();
        engine.remove_obsolete_files();
    }
    (disk, model)
}

#[test]
fn a_request_whose_answer_is_lost_anywhere_counts_as_done() {
    for after in 0.. {
        let (disk, mut model) = with_checkpoints();
        disk.fail_after(after, Fault::LostAnswer);
        let mut engine = open(&disk, 2).unwrap_or_else(|e| panic!("claiming, request {after}: {e}"));
        model.commit(&mut engine, &change(3)).unwrap_or_else(|e| panic!("request {after}: {e}"));
        engine.settle().unwrap();
        engine.remove_obsolete_files();
        model.check(&disk);
        if disk.stop_failing() {
            assert!(after > MemoryObjects::COMMIT_STEPS, "it has more requests than {after}");
            break;
        }
    }
}

/// The process or the server ends before any request. The next owner finds the newest checkpoint or the one before.
#[test]
fn an_outage_before_any_request_leaves_the_previous_checkpoint() {
    for after in 0.. {
        let (disk, mut model) = with_checkpoints();
        let writer = disk.handle();
        writer.fail_after(after, Fault::Outage);
        let before = model.clone();
        let committed = open(&writer, 2).and_then(|mut engine| {
            let committed = model.commit(&mut engine, &change(3));
            engine.remove_obsolete_files();
            committed
        });
        let is_complete = writer.stop_failing();
        let mut next = open(&disk, 2).unwrap();
        if let Err(e) = committed {
            assert!(!is_complete, "{e}");
            model = before;
        }
        assert_eq!(next.newest(), model.newest(), "before request {after}");
        model.check(&disk);
        model.commit(&mut next, &change(4)).unwrap();
        next.remove_obsolete_files();
        model.check(&disk);
        let used: u64 = list(&StoreDirectory::open(disk.shared(), None).unwrap()).unwrap().disk;
        assert!(used > 0);
        if is_complete {
            assert!(after > MemoryObjects::COMMIT_STEPS, "it has more requests than {after}");
            break;
        }
    }
}

/// A request without an answer is carried out after the client has stopped waiting for it.
#[test]
fn a_request_that_is_carried_out_late_changes_nothing_that_counts() {
    for next_owner_is_first in [false, true] {
        let mut commits_carried_out = 0;
        for after in 0.. {
            let (disk, mut model) = with_checkpoints();
            let writer = disk.handle();
            let mut engine = open(&writer, 2).unwrap();
            writer.fail_after(after, Fault::Late);
            let committed = model.commit(&mut engine, &change(3));
            engine.remove_obsolete_files();
            let is_complete = !writer.has_late_request();
            writer.stop_failing();
            if is_complete {
                assert!(after > 0, "a commit has more requests than {after}");
                break;
            }
            let late = |disk: &MemoryObjects| disk.carry_out_late_request().unwrap().is_ok();
            if committed.is_err() {
                // An owner whose entry may still appear cannot commit: the next checkpoint would have the same number.
                let _ = model.commit(&mut engine, &change(3));
            }
            if next_owner_is_first {
                let mut next = open(&disk, 2).unwrap();
                late(&writer);
                let newest = next.newest();
                assert!(newest == model.newest(), "request {after}: {newest}");
                model.commit(&mut next, &change(4)).unwrap();
                next.remove_obsolete_files();
            } else {
                late(&writer);
                drop(engine);
                let mut next = open(&disk, 2).unwrap();
                if next.newest() > model.newest() {
                    // The request was the commit.
                    commits_carried_out += 1;
                    let expected = model.after(&change(3));
                    model.checkpoints.insert(next.newest(), expected);
                    model.checkpoints.pop_first();
                }
                assert_eq!(next.newest(), model.newest(), "request {after}");
                model.check(&disk);
                model.commit(&mut next, &change(4)).unwrap();
                next.remove_obsolete_files();
            }
            model.check(&disk);
        }
        assert_eq!(commits_carried_out, usize::from(!next_owner_is_first));
    }
}

#[test]
fn a_server_that_ignores_conditions_is_rejected() {
    let disk = MemoryObjects::default().without_conditions();
    let e = StoreDirectory::init(&disk.shared().disk).unwrap_err();
    assert!(std::error::Error::source(&e).unwrap().to_string().contains("does not keep the condition"), "{e}");
    assert_eq!(disk.names(), [""; 0]);
    let good = MemoryObjects::default();
    drop(open(&good, 2).unwrap());
    // The server was replaced by one that ignores conditions: no process may claim the store.
    let bad = good.handle().without_conditions();
    let before = bad.names();
    assert!(open(&bad, 2).is_err());
    assert_eq!(bad.names(), before);
}

#[test]
fn a_server_whose_conditions_are_not_atomic_is_rejected_each_time() {
    let disk = MemoryObjects::default().without_atomic_conditions();
    for _ in 0..2 {
        let e = StoreDirectory::init(&disk.shared().disk).unwrap_err();
        assert!(std::error::Error::source(&e).unwrap().to_string().contains("does not keep the condition"), "{e}");
        assert_eq!(disk.names(), [""; 0]);
    }
}

#[test]
fn a_check_of_conditions_that_failed_is_made_again() {
    for after in 0.. {
        let disk = MemoryObjects::default().without_atomic_conditions();
        disk.fail_after(after, Fault::Outage);
        let failed = StoreDirectory::init(&disk.shared().disk).is_err() && disk.stop_failing();
        assert!(StoreDirectory::init(&disk.shared().disk).is_err(), "after {after} requests");
        if !failed {
            break;
        }
    }
}

#[test]
fn an_unused_store_is_created_once() {
    let disk = MemoryObjects::default();
    StoreDirectory::init(&disk.shared().disk).unwrap();
    let again = StoreDirectory::init(&disk.shared().disk);
    assert!(matches!(again, Err(StoreError::Exists { vm: None, .. })));
    drop(open(&disk, 2).unwrap());
    assert!(!disk.names().contains(&names::UNUSED.to_owned()));
    assert!(matches!(StoreDirectory::init(&disk.shared().disk), Err(StoreError::Exists { vm: Some(_), .. })));
}

#[test]
fn a_prefix_with_other_objects_is_rejected() {
    let disk = MemoryObjects::default();
    let other = Path::from("site/web/photos/1.jpeg");
    disk.contents()
        .put_opts(&other, Bytes::from_static(b"x").into(), PutOptions::default())
        .now_or_never()
        .unwrap()
        .unwrap();
    let e = StoreDirectory::init(&disk.shared().disk).unwrap_err();
    assert!(matches!(&e, StoreError::NotEmpty { found, .. } if found == "photos"), "{e}");
    assert_eq!(disk.names(), ["photos/1.jpeg"]);
}

/// Every commit leaves a segment, because objects cannot be appended to.
#[test]
fn small_segments_are_merged_and_a_commit_lists_nothing() {
    let disk = MemoryObjects::default();
    let mut model = Model { keep: 2, ..Model::default() };
    let mut engine = open(&disk, 2).unwrap();
    let mut most_segments = 0;
    for n in 0..400 {
        let lists = disk.lists();
        let change = Change { blocks: vec![("ram", 2000)], pages: vec![(0, n * 5 % 2000, 1 + n % 9)] };
        model.commit(&mut engine, &change).unwrap();
        assert_eq!(disk.lists(), lists);
        engine.remove_obsolete_files();
        while engine.work() {}
        let segments = disk.names().into_iter().filter(|name| name.starts_with(names::SEGMENTS)).count();
        most_segments = most_segments.max(segments);
    }
    assert!((60..100).contains(&most_segments), "{most_segments}");
    model.check(&disk);
    drop(engine);
    let verified = verify(&StoreDirectory::open(disk.shared(), None).unwrap(), |_, _| {}).unwrap();
    assert!(verified.is_good() && verified.warnings.is_empty(), "{verified:?}");
}

#[test]
fn of_owners_that_claim_concurrently_each_has_an_epoch_of_its_own() {
    let (disk, model) = with_checkpoints();
    let claim = |n: usize| open_as(&disk, 2, &format!("race {n}"), None).map(|engine| engine.owner().epoch);
    let mut epochs: Vec<u64> = std::thread::scope(|scope| {
        let racers: Vec<_> = (0..8).map(|n| scope.spawn(move || claim(n).unwrap())).collect();
        racers.into_iter().map(|racer| racer.join().unwrap()).collect()
    });
    epochs.sort_unstable();
    assert_eq!(epochs, (2..10).collect::<Vec<u64>>());
    // Of those with a condition, at most one succeeds.
    let winners = std::thread::scope(|scope| {
        let conditional = || open_as(&disk, 2, "race", Some(9)).is_ok();
        let racers: Vec<_> = (0..8).map(|_| scope.spawn(conditional)).collect();
        racers.into_iter().map(|racer| racer.join().unwrap()).filter(|won| *won).count()
    });
    assert_eq!(winners, 1);
    model.check(&disk);
}
