//! Owners: the previous owner is rejected at any step at which the new owner may claim the store. A *claim* is the
//! entry of the log by which a process becomes the owner, and the *epoch* counts the owners.

use super::disk::TestDisk;
use super::model::{Change, Model, open, open_as, owner_of, send};
use crate::engine::{CheckpointState, Engine};
use crate::error::Result;
use rekindle_testing::crash_disk::CrashDisk;
use std::sync::{Arc, Mutex};

/// Returns change `n` of a fixed history. Changes overlap in their 14 pages, so that later ones replace records of
/// earlier ones. None of these pages is zero (kind 0).
fn change(n: u64) -> Change {
    let pages = (0..14u64).map(|i| (0usize, (n * 5 + i * (1 + n % 3)) % 30, 1 + (n + i) % 9)).collect();
    Change { blocks: vec![("ram", 30), ("bios", 3)], pages }
}

fn refused(result: Result<impl std::fmt::Debug>, mine: u64, epoch: u64) {
    let e = result.unwrap_err();
    assert_eq!(owner_of(&e), Some((mine, epoch, "restore web")), "{e}");
    let text = e.to_string();
    assert!(text.contains("restore web") && text.contains(&format!("process {}", std::process::id())), "{text}");
}

/// Returns a store with five checkpoints, the handle through which its owner of epoch 1 uses it, that owner, and the
/// model.
fn started<D: TestDisk>(keep: u32) -> (D, D, Engine, Model) {
    let disk = D::default();
    let slow = disk.handle();
    let mut model = Model { keep, ..Model::default() };
    let mut old = open(&slow, keep).unwrap();
    for n in 0..5 {
        model.commit(&mut old, &change(n)).unwrap();
        old.remove_obsolete_files();
    }
    (disk, slow, old, model)
}

#[test]
fn the_older_owner_is_refused_at_its_next_checkpoint_and_ever_after() {
    commit_after_another_claim::<CrashDisk>();
}

pub fn commit_after_another_claim<D: TestDisk>() {
    let (disk, _, mut old, mut model) = started::<D>(2);
    // The new owner claims the store just before the previous owner commits its checkpoint.
    let blocks = model.after(&change(5)).blocks.into_iter().map(|(block, _)| block).collect();
    let blocks = old.begin(blocks).unwrap();
    send(&mut old, &[(blocks[0].number, 3, 8)]);
    let mut new = open_as(&disk, 2, "restore web", None).unwrap();
    assert_eq!(new.owner().epoch, 2);
    refused(old.commit(&CheckpointState::default(), 0), 1, 2);
    for n in 6..14 {
        model.commit(&mut new, &change(n)).unwrap();
        new.remove_obsolete_files();
        new.compact().unwrap();
        refused(old.begin(vec![]), 1, 2);
        refused(old.compact(), 1, 2);
        model.check(&disk);
    }
}

#[test]
fn a_claim_for_an_epoch_that_is_over_is_rejected() {
    claim_conditionally::<CrashDisk>();
}

pub fn claim_conditionally<D: TestDisk>() {
    let (disk, ..) = started::<D>(2);
    drop(open_as(&disk, 2, "protect web", Some(1)).unwrap());
    drop(open_as(&disk, 2, "restore web", None).unwrap());
    refused(open_as(&disk, 2, "protect web", Some(2)), 2, 3);
    assert_eq!(open_as(&disk, 2, "protect web", Some(3)).unwrap().owner().epoch, 4);
}

/// The new owner and its model, once it has claimed the store.
type Seen = Arc<Mutex<Option<(Engine, Model)>>>;

/// Makes a new owner claim the store and commit checkpoints before the `after`-th step through `slow`. `old` is the
/// model of the previous owner, which may be about to commit `also` at that step.
fn take_over<D: TestDisk>(disk: &D, slow: &D, old: Model, also: Change, after: usize) -> Seen {
    let seen = Seen::default();
    let (plain, there) = (disk.clone(), seen.clone());
    let meanwhile = move || {
        let mut model = old;
        let mut new = open_as(&plain, model.keep, "restore web", None).unwrap();
        if new.newest() > model.newest() {
            // The previous owner has committed its checkpoint before the claim, so the checkpoint is valid.
            assert_eq!(new.newest(), model.newest() + 1);
            let expected = model.after(&also);
            model.checkpoints.insert(new.newest(), expected);
            if model.checkpoints.len() > model.keep as usize {
                model.checkpoints.pop_first();
            }
        }
        model.check(&plain);
        for n in 10..12 {
            model.commit(&mut new, &change(n)).unwrap();
            new.remove_obsolete_files();
        }
        new.compact().unwrap();
        model.commit(&mut new, &change(12)).unwrap();
        new.settle().unwrap();
        *there.lock().unwrap() = Some((new, model));
    };
    slow.interrupt(after, Box::new(meanwhile));
    seen
}

#[test]
fn an_owner_that_stalls_anywhere_in_a_commit_spoils_nothing() {
    stall_in_a_commit::<CrashDisk>();
}

pub fn stall_in_a_commit<D: TestDisk>() {
    for keep in [1, 3] {
        for after in 0.. {
            let (disk, slow, mut old, model) = started::<D>(keep);
            let seen = take_over(&disk, &slow, model.clone(), change(5), after);
            let stalled = model.clone().commit(&mut old, &change(5));
            old.remove_obsolete_files();
            let Some((mut new, mut after_it)) = seen.lock().unwrap().take() else {
                stalled.unwrap();
                assert!(after > D::COMMIT_STEPS, "a commit has more steps than {after}");
                break;
            };
            match stalled {
                // The new owner found the checkpoint whose commit was reported to the previous owner.
                Ok(_) => assert!(after_it.newest() == model.newest() + 4),
                Err(e) => assert_eq!(owner_of(&e), Some((1, 2, "restore web")), "before step {after}: {e}"),
            }
            after_it.check(&disk);
            after_it.commit(&mut new, &change(13)).unwrap();
            after_it.check(&disk);
        }
    }
}

#[test]
fn an_owner_that_stalls_anywhere_in_a_compaction_deletes_nothing_that_is_needed() {
    stall_in_a_compaction::<CrashDisk>();
}

pub fn stall_in_a_compaction<D: TestDisk>() {
    for keep in [1, 3] {
        for after in 0.. {
            let (disk, slow, mut old, model) = started::<D>(keep);
            let seen = take_over(&disk, &slow, model.clone(), Change::default(), after);
            let before = disk.names();
            match old.compact().and_then(|_| old.settle()) {
                Ok(()) => {}
                Err(e) => assert_eq!(owner_of(&e), Some((1, 2, "restore web")), "before step {after}: {e}"),
            }
            old.remove_obsolete_files();
            let Some((mut new, mut after_it)) = seen.lock().unwrap().take() else {
                let now = disk.names();
                let gone = before.iter().any(|name| name.starts_with("segments") && !now.contains(name));
                assert!(after > D::COMPACTION_STEPS && gone, "a compaction has more steps than {after}");
                break;
            };
            drop(old);
            after_it.check(&disk);
            after_it.commit(&mut new, &change(13)).unwrap();
            after_it.check(&disk);
            drop(new);
            open(&disk, keep).unwrap();
            after_it.check(&disk);
        }
    }
}

#[test]
fn two_processes_that_create_a_store_concurrently_get_the_same_one() {
    create_concurrently::<CrashDisk>();
}

pub fn create_concurrently<D: TestDisk>() {
    for after in 0.. {
        let disk = D::default();
        let slow = disk.handle();
        let seen = take_over(&disk, &slow, Model { keep: 2, ..Model::default() }, Change::default(), after);
        let first = open_as(&slow, 2, "protect web", None);
        let Some((mut new, mut model)) = seen.lock().unwrap().take() else { break };
        // The later claim has the higher epoch.
        let mut first = first.unwrap_or_else(|e| panic!("interrupted before step {after}: {e}"));
        if first.owner().epoch > new.owner().epoch {
            assert!(owner_of(&new.begin(vec![]).unwrap_err()).is_some());
            assert_eq!(first.newest(), model.newest());
            model.commit(&mut first, &change(20)).unwrap();
        } else {
            refused(first.begin(vec![]), 1, 2);
            model.commit(&mut new, &change(20)).unwrap();
        }
        model.check(&disk);
    }
}
