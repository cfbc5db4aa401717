//! A disk that is full or fails at every step, and the disk space that a store uses.

use super::disk::TestDisk;
use super::model::{Change, Model, open};
use crate::error::StoreError;
use rekindle_pages::PAGE_SIZE;
use rekindle_testing::crash_disk::{CrashDisk, Step, StepFailures};
use rustix::io::Errno;
use std::convert::identity;

/// Returns change `n` of a fixed history. Changes overlap in their 14 pages, so that later ones replace records of
/// earlier ones. Some pages are zero (kind 0).
fn change(n: u64) -> Change {
    let pages = (0..14u64).map(|i| (0usize, (n * 5 + i * (1 + n % 3)) % 30, (n + i) % 9)).collect();
    Change { blocks: vec![("ram", 30), ("bios", 3)], pages }
}

/// For each step of three checkpoints and a compaction: lets `count` steps from it on fail with `error`.
pub fn walk<D: TestDisk>(store_on: fn(CrashDisk) -> D, error: Errno, half: bool, count: usize) {
    for keep in [1, 2] {
        for after in 0.. {
            let disk = CrashDisk::default();
            let store = store_on(disk.clone());
            let mut model = Model { keep, ..Model::default() };
            let mut engine = open(&store, keep).unwrap();
            model.commit(&mut engine, &change(0)).unwrap();
            disk.fail_steps(StepFailures { after, error, half, count });
            let mut failures = 0;
            for n in 1..4 {
                match model.commit(&mut engine, &change(n)) {
                    Ok(_) => {}
                    Err(e) => {
                        failures += 1;
                        check_error(&e, error);
                    }
                }
                engine.remove_obsolete_files();
                if n == 2
                    && let Err(e) = engine.compact().and_then(|_| engine.settle())
                {
                    check_error(&e, error);
                }
            }
            let all_passed = !disk.has_failed();
            disk.stop_failing();
            // All committed checkpoints exist. The writer continues, at the latest after the store is opened again.
            match model.commit(&mut engine, &change(5)) {
                Ok(_) => {}
                Err(StoreError::Closed { why, .. }) => {
                    assert!(why.contains("log"), "{why}");
                    drop(engine);
                    engine = open(&store, keep).unwrap();
                    // The last entry may have been written.
                    if engine.newest() > model.newest() {
                        continue;
                    }
                    model.check(&store);
                    model.commit(&mut engine, &change(5)).unwrap();
                }
                Err(e) => panic!("{e}"),
            }
            engine.remove_obsolete_files();
            model.check(&store);
            drop(engine);
            let mut engine = open(&store, keep).unwrap();
            model.check(&store);
            model.commit(&mut engine, &change(6)).unwrap();
            model.check(&store);
            if all_passed {
                // No step has failed in this pass: all steps were tried. There are more than 40.
                assert!(after > 40 && failures == 0);
                break;
            }
        }
    }
}

fn check_error(e: &StoreError, error: Errno) {
    match e {
        StoreError::NoSpace { doing, .. } => assert!(error == Errno::NOSPC && !doing.is_empty()),
        StoreError::Io { .. } => assert_ne!(error, Errno::NOSPC, "{e}"),
        StoreError::Closed { .. } => {}
        other => panic!("{other}"),
    }
}

#[test]
fn a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else() {
    walk(identity, Errno::NOSPC, false, usize::MAX);
    walk(identity, Errno::NOSPC, true, 1);
}

#[test]
fn a_disk_that_fails_for_a_while_costs_checkpoints_and_nothing_else() {
    walk(identity, Errno::IO, true, usize::MAX);
    walk(identity, Errno::IO, false, 1);
}

#[test]
fn a_store_cannot_be_made_on_a_full_disk_and_can_be_made_there_later() {
    for after in 0.. {
        let disk = CrashDisk::default();
        disk.fail_steps(StepFailures { after, error: Errno::NOSPC, half: true, count: usize::MAX });
        let made = open(&disk, 1);
        if !disk.has_failed() {
            made.unwrap();
            break;
        }
        if let Err(e) = made {
            assert!(matches!(e, StoreError::NoSpace { .. }), "{e}");
        }
        disk.stop_failing();
        let mut model = Model { keep: 1, ..Model::default() };
        model.commit(&mut open(&disk, 1).unwrap(), &change(0)).unwrap();
        model.check(&disk);
    }
}

#[test]
fn with_one_checkpoint_kept_the_disk_holds_twice_the_ram_at_most() {
    const PAGES: u64 = 4096;
    let disk = CrashDisk::default();
    let settings = crate::engine::EngineSettings { keep: 1, segment: 0, create: true };
    let owner = crate::types::Owner::here("test");
    let mut engine =
        crate::engine::Engine::open(std::sync::Arc::new(disk.clone()), &super::model::vm(), &owner, None, settings)
            .unwrap();
    let mut model = Model { keep: 1, ..Model::default() };
    let blocks = vec![("ram", PAGES)];
    // All pages are incompressible: their kinds of content are odd.
    let fill = (0..PAGES).map(|page| (0, page, page * 2 + 1)).collect();
    model.commit(&mut engine, &Change { blocks: blocks.clone(), pages: fill }).unwrap();
    let mut state = 1u64;
    let mut moved = 0;
    for round in 0..24u64 {
        // Rewrites between a few pages and nearly all pages.
        let count = [40, 400, 1200, 3600][round as usize % 4];
        let pages = (0..count)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (0, (state >> 33) % PAGES, state >> 20 | 1)
            })
            .collect();
        model.commit(&mut engine, &Change { blocks: blocks.clone(), pages }).unwrap();
        engine.remove_obsolete_files();
        while engine.work() {}
        moved += u64::from(
            disk.recorded_steps().iter().any(|step| matches!(step, Step::Remove(name) if name.starts_with("segments"))),
        );
    }
    assert!(moved > 0, "segments were emptied");
    let (most, bound) = (disk.max_bytes() as u64, 2 * PAGES * PAGE_SIZE as u64);
    assert!(
        most <= bound,
        "{most} bytes at most, {bound} allowed: {:.3} times the RAM",
        most as f64 / bound as f64 * 2.0
    );
    drop(engine);
    model.check(&disk);
}
