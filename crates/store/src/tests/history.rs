//! Random histories compared with the model: checkpoints, aborts, `keep`, `hold`, compaction, base indices, reopening.
//!
//! `keep` is the number of checkpoints that stay readable. `hold` keeps one more while a restore reads it. *Compaction*
//! copies needed pages to new segments and removes the old ones. A *base index* is a file with the locations of all
//! pages.

use super::disk::TestDisk;
use super::model::{Change, Model, check_image, lazy, open};
use crate::error::StoreError;
use proptest::prelude::*;
use rekindle_pages::{BlockId, PAGE_SIZE, PageNo};
use rekindle_testing::crash_disk::CrashDisk;

#[derive(Debug, Clone)]
pub enum Step {
    Commit(Change),
    Abort(Change),
    /// Pieces of background work.
    Work(usize),
    Settle,
    Compact,
    Reopen,
    Keep(u32),
    /// Holds the oldest checkpoint if true; else holds none.
    Hold(bool),
}

fn change() -> impl Strategy<Value = Change> {
    let ram = prop_oneof![4 => Just(40u64), 1 => 20u64..60];
    let others = prop_oneof![
        3 => Just(vec![("bios", 4u64)]),
        1 => Just(vec![]),
        1 => (1u64..8).prop_map(|pages| vec![("bios", pages)]),
        1 => Just(vec![("vga", 10), ("bios", 4)]),
    ];
    let pages = proptest::collection::vec((0usize..3, 0u64..60, prop_oneof![1 => Just(0u64), 4 => 1u64..12]), 0..60);
    (ram, others, pages).prop_map(|(ram, others, mut pages)| {
        let mut blocks = others;
        blocks.insert(blocks.len() / 2, ("ram", ram));
        pages.retain(|(block, page, _)| blocks.get(*block).is_some_and(|(_, pages)| page < pages));
        Change { blocks, pages }
    })
}

pub fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => change().prop_map(Step::Commit),
        1 => change().prop_map(Step::Abort),
        4 => (1usize..12).prop_map(Step::Work),
        1 => Just(Step::Settle),
        1 => Just(Step::Compact),
        2 => Just(Step::Reopen),
        1 => (1u32..4).prop_map(Step::Keep),
        1 => any::<bool>().prop_map(Step::Hold),
    ]
}

pub fn run(disk: &impl TestDisk, keep: u32, steps: Vec<Step>) {
    let mut engine = open(disk, keep).unwrap();
    let mut model = Model { keep, ..Model::default() };
    for step in steps {
        match step {
            Step::Commit(change) => {
                model.commit(&mut engine, &change).unwrap();
                engine.remove_obsolete_files();
            }
            Step::Abort(change) => {
                // Does everything of a commit except the last call.
                let blocks = model.after(&change).blocks.into_iter().map(|(block, _)| block).collect();
                let started = engine.begin(blocks).unwrap();
                let pages: Vec<_> =
                    change.pages.iter().map(|(b, page, kind)| (started[*b].number, *page, *kind)).collect();
                super::model::send(&mut engine, &pages);
                engine.work();
                engine.abort();
            }
            Step::Work(count) => {
                for _ in 0..count {
                    engine.work();
                }
            }
            Step::Settle => engine.settle().unwrap(),
            Step::Compact => drop(engine.compact().unwrap()),
            Step::Reopen => {
                drop(engine);
                engine = open(disk, model.keep).unwrap();
                model.held = None;
                assert_eq!(engine.newest(), model.newest());
            }
            Step::Hold(hold) => {
                model.held = model.checkpoints.keys().next().copied().filter(|_| hold);
                engine.hold(model.held);
            }
            Step::Keep(keep) => {
                engine.keep(keep);
                model.keep = keep;
            }
        }
        model.check(disk);
    }
}

proptest! {
    #[test]
    fn a_store_holds_what_the_model_holds(keep in 1u32..4, steps in proptest::collection::vec(step(), 1..40)) {
        run(&CrashDisk::default(), keep, steps);
    }
}

#[test]
fn a_lazily_opened_image_is_read_correctly_or_reported_as_removed() {
    read_lazily(&CrashDisk::default());
}

/// The owner commits, moves pages and removes the old segments while the image is open.
pub fn read_lazily(disk: &impl TestDisk) {
    let mut engine = open(disk, 2).unwrap();
    let mut model = Model { keep: 2, ..Model::default() };
    let change = |n: u64| Change {
        blocks: vec![("ram", 40)],
        pages: (0..30).map(|i| (0, (n * 7 + i) % 40, 1 + (n + i) % 11)).collect(),
    };
    for n in 0..3 {
        model.commit(&mut engine, &change(n)).unwrap();
    }
    let late = lazy(disk, None).unwrap();
    let expected = model.checkpoints.get(&3).unwrap().clone();
    model.commit(&mut engine, &change(3)).unwrap();
    engine.compact().unwrap();
    engine.settle().unwrap();
    engine.remove_obsolete_files();
    check_image(&late, 3, &expected);
    let late = lazy(disk, Some(4)).unwrap();
    for n in 4..7 {
        model.commit(&mut engine, &change(n)).unwrap();
    }
    engine.compact().unwrap();
    engine.remove_obsolete_files();
    let mut content = [0; PAGE_SIZE];
    let e = late.read_page((BlockId(0), PageNo(0)), &mut content).unwrap_err();
    assert!(matches!(&e, StoreError::NoSuchCheckpoint { asked: 4, .. }), "{e}");
    assert!(late.hot().is_err());
}
