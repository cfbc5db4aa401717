//! Killed, or without power, at every step of many histories: the newest disk has every write that was flushed, and each epoch that was
//! sealed is to be had as it was, until a newer one was committed.

use super::files::{Fate, Memory, Op};
use super::world::{BYTES, Content, Promise, World, content, image, initial};
use crate::redo::error::RedoError;
use crate::redo::format::What;
use crate::redo::recover::{Wanted, open};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRng, TestRunner};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

#[derive(Debug, Clone, Copy)]
enum Action {
    Write(u64, u64, What),
    EndWrite(usize),
    Flush,
    Mark,
    Seal,
    Commit,
    Reopen,
    GoBack(prop::sample::Index),
    End,
}

fn action() -> impl Strategy<Value = Action> {
    let what = prop_oneof![4 => Just(What::Data), 1 => Just(What::Zeroes), 1 => Just(What::Hole)];
    prop_oneof![
        10 => (0..36u64, 1..12u64, what).prop_map(|(sector, sectors, what)| Action::Write(sector, sectors, what)),
        8 => any::<usize>().prop_map(Action::EndWrite),
        3 => Just(Action::Flush),
        2 => Just(Action::Mark),
        3 => Just(Action::Seal),
        2 => Just(Action::Commit),
        1 => Just(Action::Reopen),
        1 => any::<prop::sample::Index>().prop_map(Action::GoBack),
        1 => Just(Action::End),
    ]
}

/// What was done, what had to be true after each action, and the disk of each epoch of each log.
struct Story {
    ops: Vec<Op>,
    marks: Vec<(usize, Promise)>,
    epochs: BTreeMap<(Uuid, u64), Content>,
    /// At which step each was marked.
    marked: BTreeMap<u64, usize>,
}

fn story(actions: &[Action]) -> Story {
    let disk = Memory::new(image());
    let all: Vec<_> = initial().into_iter().map(|value| BTreeSet::from([value])).collect();
    let mut story = Story {
        ops: Vec::new(),
        marks: vec![(0, Promise { newest: all, sealed: BTreeSet::new() })],
        epochs: BTreeMap::new(),
        marked: BTreeMap::new(),
    };
    let mut world = World::begin(disk);
    story.marks.push((world.disk.steps(), world.promise.clone()));
    let (mut marked, mut sealed) = (None, None);
    let mut ended = false;
    for action in actions {
        // What is about to be done may be there or not: both promises hold for any step in between.
        match *action {
            Action::Write(sector, sectors, what) => {
                world.prepare().unwrap();
                story.marks.push((world.disk.steps(), world.promise.clone()));
                world.write(sector, sectors, what);
            }
            Action::EndWrite(which) => world.end_write(which),
            Action::Flush => world.flush(),
            Action::Mark => {
                let epoch = world.mark();
                story.marked.entry(epoch).or_insert(world.disk.steps());
                marked = Some(epoch);
            }
            Action::Seal => {
                if let Some(epoch) = marked.take() {
                    world.seal(epoch).unwrap();
                    sealed = Some(epoch);
                }
            }
            Action::Commit => {
                if let Some(epoch) = sealed.take() {
                    world.commit(epoch).unwrap();
                }
            }
            Action::Reopen => {
                world.reopen(Wanted::Newest);
                marked = None;
            }
            Action::GoBack(which) => {
                let epochs: Vec<_> = world.promise.sealed.iter().copied().collect();
                if !epochs.is_empty() {
                    let epoch = *which.get(&epochs);
                    world.reopen(Wanted::Epoch { epoch, disk: world.uuid });
                    (marked, sealed) = (None, None);
                }
            }
            Action::End => {
                world.end();
                ended = true;
            }
        }
        story.marks.push((world.disk.steps(), world.promise.clone()));
        world.check();
        if ended {
            break;
        }
    }
    let uuid = world.uuid;
    story.epochs.extend(world.epochs.into_iter().map(|(epoch, content)| ((uuid, epoch), content)));
    story.ops = world.disk.ops();
    story
}

impl Story {
    fn check(&self, count: usize, fate: &BTreeMap<usize, Fate>, goes_on: bool, what: &str) {
        let place = self.marks.iter().rposition(|(step, _)| *step <= count).unwrap();
        // Several actions may have ended at this step; each is a moment at which the power may have gone.
        let first = self.marks.iter().position(|(step, _)| *step == self.marks[place].0).unwrap();
        let last = (place + 1).min(self.marks.len() - 1);
        let around: Vec<&Promise> = self.marks[first..=last].iter().map(|(_, promise)| promise).collect();
        let context = || format!("{what}, after step {count} ({:?} next)", self.ops.get(count).map(short));
        let disk = Memory::after_crash(&image(), &self.ops, count, fate);
        let opened =
            open(disk.clone(), BYTES, Wanted::Newest, 1 << 30).unwrap_or_else(|e| panic!("{}: {e}", context()));
        let newest = content(&disk, opened.as_ref().map(|(_, log)| log));
        for (sector, value) in newest.iter().enumerate() {
            let may: BTreeSet<u64> = around.iter().flat_map(|promise| &promise.newest[sector]).copied().collect();
            assert!(may.contains(value), "{}: sector {sector} is {value} and may be {may:?}", context());
        }
        for ((uuid, epoch), expected) in &self.epochs {
            let disk = Memory::after_crash(&image(), &self.ops, count, fate);
            let wanted = Wanted::Epoch { epoch: *epoch, disk: *uuid };
            let must = around.iter().all(|promise| promise.sealed.contains(epoch));
            // One that was marked and not sealed is with the next that is.
            let may = around.iter().any(|promise| promise.sealed.last() >= Some(epoch));
            match open(disk.clone(), BYTES, wanted, 1 << 30) {
                Ok(opened) => {
                    let (_, log) = opened.unwrap();
                    assert!(may, "{}: epoch {epoch} is to be had", context());
                    assert_eq!(content(&disk, Some(&log)), *expected, "{}: epoch {epoch}", context());
                }
                Err(
                    RedoError::NoLog { .. }
                    | RedoError::NewerDisk { .. }
                    | RedoError::NotSealed { .. }
                    | RedoError::GivenUp { .. },
                ) => assert!(!must, "{}: epoch {epoch} is not to be had", context()),
                Err(e) => panic!("{}: epoch {epoch}: {e}", context()),
            }
        }
        if goes_on && opened.is_some() {
            self.go_on(&disk, count, &newest, &context);
        }
    }

    /// The next server works with what it finds.
    fn go_on(&self, disk: &Memory, count: usize, newest: &[u64], context: &dyn Fn() -> String) {
        let (home, log) = open(disk.clone(), BYTES, Wanted::Newest, 1 << 30).unwrap().unwrap();
        let uuid = home.state().disk;
        let mut world = World::begin(Memory::new(image()));
        (world.disk, world.uuid, world.log, world.home) = (disk.clone(), uuid, Some(log), Some(home).into());
        world.now = newest.iter().map(|value| (0, *value)).collect();
        world.check();
        world.prepare().unwrap_or_else(|e| panic!("{}: {e}", context()));
        world.write(3, 9, What::Data);
        let epoch = world.mark();
        let is_new = self.marked.get(&epoch).is_none_or(|step| *step > count);
        assert!(is_new, "{}: epoch {epoch} is given out twice", context());
        world.seal(epoch).unwrap();
        world.write(5, 2, What::Data);
        world.commit(epoch).unwrap();
        world.end_writes();
        world.check();
        world.end();
        world.check();
    }
}

fn short(op: &Op) -> String {
    match op {
        Op::Write(file, at, bytes) => format!("Write({file}, {at}, {} bytes)", bytes.len()),
        other => format!("{other:?}"),
    }
}

fn runner() -> TestRunner {
    let random = TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(Config::default(), random)
}

fn stories(count: usize, actions: usize) -> Vec<Story> {
    let mut runner = runner();
    let histories = proptest::collection::vec(action(), actions);
    (0..count).map(|_| story(&histories.new_tree(&mut runner).unwrap().current())).collect()
}

#[test]
fn killed_at_every_step() {
    let (mut steps, mut epochs) = (0, 0);
    for story in stories(8, 40) {
        steps += story.ops.len();
        epochs += story.epochs.len();
        for count in 0..=story.ops.len() {
            story.check(count, &BTreeMap::new(), true, "killed");
            if let Some(Op::Write(..)) = story.ops.get(count) {
                for sectors in [1, 0x5555_5555_5555_5555, !1] {
                    story.check(count + 1, &BTreeMap::from([(count, Fate::Torn(sectors))]), false, "killed in a write");
                }
            }
        }
    }
    assert!(steps > 250 && epochs > 12, "{steps} steps, {epochs} epochs: these histories show nothing");
}

#[test]
fn power_lost_at_every_step() {
    for story in stories(6, 36) {
        for count in 0..=story.ops.len() {
            let volatile = Memory::volatile(&story.ops, count);
            let all_lost: BTreeMap<_, _> = volatile.iter().map(|step| (*step, Fate::Lost)).collect();
            story.check(count, &all_lost, true, "all lost");
            for step in &volatile {
                story.check(count, &BTreeMap::from([(*step, Fate::Lost)]), false, &format!("step {step} lost"));
                let mut kept = all_lost.clone();
                kept.remove(step);
                story.check(count, &kept, false, &format!("only step {step} kept"));
            }
        }
    }
}

#[test]
fn power_lost_at_any_step_with_any_mixture() {
    let stories = stories(24, 60);
    let mut runner = runner();
    let fate = prop_oneof![Just(Fate::Kept), Just(Fate::Lost), any::<u64>().prop_map(Fate::Torn)];
    let cases = (any::<prop::sample::Index>(), any::<prop::sample::Index>(), proptest::collection::vec(fate, 48));
    for n in 0..600 {
        let (which, count, fates) = cases.new_tree(&mut runner).unwrap().current();
        let story = &stories[which.index(stories.len())];
        let count = count.index(story.ops.len() + 1);
        let volatile = Memory::volatile(&story.ops, count);
        let fate: BTreeMap<_, _> = volatile.iter().copied().zip(fates.into_iter().cycle()).collect();
        story.check(count, &fate, n % 4 == 0, &format!("{fate:?}"));
    }
}
