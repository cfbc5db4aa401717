//! Simulates a crash of the process or a power failure after every step. Unsynced steps are kept, lost or torn, in a
//! sample of the possible combinations.

use super::model::{Change, Expected, Model, check_image, image, open};
use crate::error::StoreError;
use rekindle_testing::crash_disk::{CrashDisk, Fate, PowerFailure, Step, power_failures, random_power_failure};
use std::collections::BTreeMap;

/// The expected state after a step.
#[derive(Debug, Clone)]
struct Mark {
    step: usize,
    model: Model,
}

/// The recorded steps of a run, and all checkpoints that were committed in it.
struct Story {
    steps: Vec<Step>,
    marks: Vec<Mark>,
    all: BTreeMap<u64, Expected>,
}

/// Returns change `n` of a fixed history. Changes overlap in their 14 pages, so that later ones replace records of
/// earlier ones. Some pages are zero (kind 0).
fn change(n: u64) -> Change {
    // The block shrinks and grows again.
    let ram = if n % 5 == 3 { 22 } else { 30 };
    let pages = (0..14u64).map(|i| (0usize, (n * 5 + i * (1 + n % 3)) % ram, (n + i) % 9)).collect();
    Change { blocks: vec![("ram", ram), ("bios", 3)], pages }
}

/// Runs a store through creation, checkpoints, compactions, base indices and a new owner, and records the steps.
fn story(keep: u32) -> Story {
    let disk = CrashDisk::default();
    let mut model = Model { keep, ..Model::default() };
    let mut marks = vec![Mark { step: 0, model: model.clone() }];
    let mut all = BTreeMap::new();
    let mut engine = open(&disk, keep).unwrap();
    let mut compactions = 0;
    for n in 0..9 {
        // A crash before this commit must leave no trace of it; a crash after it must keep all of it.
        model.commit(&mut engine, &change(n)).unwrap();
        all.insert(model.newest(), model.checkpoints[&model.newest()].clone());
        marks.push(Mark { step: disk.steps(), model: model.clone() });
        engine.remove_obsolete_files();
        match n {
            2 | 6 => engine.settle().unwrap(),
            4 => {
                drop(engine);
                engine = open(&disk, keep).unwrap();
            }
            3 | 5 | 7 => {
                engine.compact().unwrap();
                compactions += 1;
            }
            _ => {
                for _ in 0..5 {
                    engine.work();
                }
            }
        }
    }
    assert_eq!(compactions, 3);
    Story { steps: disk.recorded_steps(), marks, all }
}

impl Story {
    /// Checks a store after a crash at step `count`: every checkpoint committed before must exist, the next may exist.
    fn check(&self, count: usize, fates: &BTreeMap<usize, Fate>, continues: bool, what: &str) {
        let disk = CrashDisk::after_crash(&[], &self.steps, count, fates);
        let before = self.marks.iter().rev().find(|mark| mark.step <= count).unwrap();
        let next = self.marks.iter().find(|mark| mark.step > count);
        let context = || format!("{what}, after step {count} ({:?} next)", self.steps.get(count).map(Step::to_string));
        let least = before.model.newest();
        let found = match image(&disk, None) {
            Ok(image) => {
                let number = image.info().number;
                check_image(&image, number, &self.all[&number]);
                number
            }
            Err(StoreError::Empty { .. } | StoreError::NotAStore { .. }) => 0,
            Err(e) => panic!("{}: {e}", context()),
        };
        let most = next.map_or(least, |mark| mark.model.newest());
        assert!((least..=most).contains(&found), "{}: {found}, not {least} or {most}", context());
        // The next owner continues from the found checkpoint.
        let mut engine = open(&disk, before.model.keep).unwrap_or_else(|e| panic!("{}: {e}", context()));
        assert_eq!(engine.newest(), found, "{}", context());
        let mut model = if found == least { before.model.clone() } else { next.unwrap().model.clone() };
        if !continues {
            return;
        }
        model.check(&disk);
        for n in 20..22 {
            model.commit(&mut engine, &change(n)).unwrap_or_else(|e| panic!("{}: {e}", context()));
            engine.remove_obsolete_files();
        }
        engine.compact().unwrap_or_else(|e| panic!("{}: {e}", context()));
        model.check(&disk);
        // The owner leaves no unused files.
        drop(engine);
        drop(open(&disk, before.model.keep).unwrap());
        let left: Vec<_> = disk.names().into_iter().filter(|name| name.contains("new-")).collect();
        assert_eq!(left, Vec::<String>::new(), "{}", context());
    }
}

#[test]
fn killed_at_every_step() {
    for keep in [1, 3] {
        let story = story(keep);
        for count in 0..=story.steps.len() {
            story.check(count, &BTreeMap::new(), true, "killed");
            // A crash in the middle of a write.
            if let Some(Step::Write(..)) = story.steps.get(count) {
                for sectors in [1, 0x5555_5555_5555_5555] {
                    story.check(count + 1, &BTreeMap::from([(count, Fate::Torn(sectors))]), false, "killed in a write");
                }
            }
        }
    }
}

#[test]
fn power_lost_at_every_step() {
    for keep in [1, 3] {
        let story = story(keep);
        for count in 0..=story.steps.len() {
            for (index, PowerFailure { fates, description }) in power_failures(&story.steps, count).iter().enumerate() {
                story.check(count, fates, index == 0, description);
            }
        }
    }
}

#[test]
fn power_lost_at_any_step_with_any_mixture() {
    let stories = [story(1), story(3)];
    let mut random = fastrand::Rng::with_seed(0);
    for n in 0..1500 {
        let story = &stories[random.usize(..2)];
        let (count, PowerFailure { fates, description }) = random_power_failure(&story.steps, &mut random);
        story.check(count, &fates, n % 4 == 0, &description);
    }
}
