//! Kills and power losses at every step of many histories. The newest disk has every flushed write. Each sealed epoch
//! can be opened with its content until a newer epoch is committed.

use super::files::{CrashDisk, Fate, Step};
use super::model::{BYTES, Content, Guarantee, ProtectedDisk, content, image, initial};
use crate::redo::error::RedoError;
use crate::redo::format::EntryKind;
use crate::redo::recover::{DiskVersion, open};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRng, TestRunner};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use uuid::Uuid;

#[derive(Debug, Clone, Copy)]
enum Action {
    Write(u64, u64, EntryKind),
    EndWrite(usize),
    Flush,
    Mark,
    Seal,
    Commit,
    Reopen,
    OpenOlder(prop::sample::Index),
    End,
}

fn action() -> impl Strategy<Value = Action> {
    let what = prop_oneof![4 => Just(EntryKind::Data), 1 => Just(EntryKind::Zeroes), 1 => Just(EntryKind::Hole)];
    prop_oneof![
        10 => (0..36u64, 1..12u64, what).prop_map(|(sector, sectors, what)| Action::Write(sector, sectors, what)),
        8 => any::<usize>().prop_map(Action::EndWrite),
        3 => Just(Action::Flush),
        2 => Just(Action::Mark),
        3 => Just(Action::Seal),
        2 => Just(Action::Commit),
        1 => Just(Action::Reopen),
        1 => any::<prop::sample::Index>().prop_map(Action::OpenOlder),
        1 => Just(Action::End),
    ]
}

/// The steps of a history, the guarantees after each action, and the disk of each epoch of each log.
struct History {
    ops: Vec<Step>,
    marks: Vec<(usize, Guarantee)>,
    epochs: BTreeMap<(Uuid, u64), Content>,
    /// The step at which each epoch was marked.
    marked: BTreeMap<u64, usize>,
}

fn make_history(actions: &[Action]) -> History {
    let disk = CrashDisk::new(image());
    let all: Vec<_> = initial().into_iter().map(|value| BTreeSet::from([value])).collect();
    let mut history = History {
        ops: Vec::new(),
        marks: vec![(0, Guarantee { newest: all, sealed: BTreeSet::new() })],
        epochs: BTreeMap::new(),
        marked: BTreeMap::new(),
    };
    let mut model = ProtectedDisk::begin(disk);
    history.marks.push((model.disk.steps(), model.guarantee.clone()));
    let (mut marked, mut sealed) = (None, None);
    let mut ended = false;
    for action in actions {
        // Until the action has ended, its effect may or may not be durable: both guarantees hold.
        match *action {
            Action::Write(sector, sectors, what) => {
                model.prepare().unwrap();
                history.marks.push((model.disk.steps(), model.guarantee.clone()));
                model.write(sector, sectors, what);
            }
            Action::EndWrite(which) => model.end_write(which),
            Action::Flush => model.flush(),
            Action::Mark => {
                let epoch = model.mark();
                history.marked.entry(epoch).or_insert(model.disk.steps());
                marked = Some(epoch);
            }
            Action::Seal => {
                if let Some(epoch) = marked.take() {
                    model.seal(epoch).unwrap();
                    sealed = Some(epoch);
                }
            }
            Action::Commit => {
                if let Some(epoch) = sealed.take() {
                    model.commit(epoch).unwrap();
                }
            }
            Action::Reopen => {
                model.reopen(DiskVersion::Newest);
                marked = None;
            }
            Action::OpenOlder(which) => {
                let epochs: Vec<_> = model.guarantee.sealed.iter().copied().collect();
                if !epochs.is_empty() {
                    let epoch = *which.get(&epochs);
                    model.reopen(DiskVersion::Epoch { epoch, disk: model.uuid });
                    (marked, sealed) = (None, None);
                }
            }
            Action::End => {
                model.end();
                ended = true;
            }
        }
        history.marks.push((model.disk.steps(), model.guarantee.clone()));
        model.check();
        if ended {
            break;
        }
    }
    let uuid = model.uuid;
    history.epochs.extend(model.epochs.into_iter().map(|(epoch, content)| ((uuid, epoch), content)));
    history.ops = model.disk.ops();
    history
}

impl History {
    fn check(&self, count: usize, fate: &BTreeMap<usize, Fate>, continues: bool, what: &str) {
        let place = self.marks.iter().rposition(|(step, _)| *step <= count).unwrap();
        // Several actions may have ended at this step, and the power may fail after each of them.
        let first = self.marks.iter().position(|(step, _)| *step == self.marks[place].0).unwrap();
        let last = (place + 1).min(self.marks.len() - 1);
        let around: Vec<&Guarantee> = self.marks[first..=last].iter().map(|(_, guarantee)| guarantee).collect();
        let context = || format!("{what}, after step {count} ({:?} next)", self.ops.get(count).map(short));
        let disk = CrashDisk::after_crash(&image(), &self.ops, count, fate);
        let opened =
            open(disk.clone(), BYTES, DiskVersion::Newest, 1 << 30).unwrap_or_else(|e| panic!("{}: {e}", context()));
        let newest = content(&disk, opened.as_ref().map(|(_, log)| log));
        for (sector, value) in newest.iter().enumerate() {
            let may: BTreeSet<u64> = around.iter().flat_map(|guarantee| &guarantee.newest[sector]).copied().collect();
            assert!(may.contains(value), "{}: sector {sector} is {value} and may be {may:?}", context());
        }
        for ((uuid, epoch), expected) in &self.epochs {
            let disk = CrashDisk::after_crash(&image(), &self.ops, count, fate);
            let wanted = DiskVersion::Epoch { epoch: *epoch, disk: *uuid };
            let must = around.iter().all(|guarantee| guarantee.sealed.contains(epoch));
            // A marked epoch without a seal becomes available with the next sealed one.
            let may = around.iter().any(|guarantee| guarantee.sealed.last() >= Some(epoch));
            match open(disk.clone(), BYTES, wanted, 1 << 30) {
                Ok(opened) => {
                    let (_, log) = opened.unwrap();
                    assert!(may, "{}: epoch {epoch} can be opened", context());
                    assert_eq!(content(&disk, Some(&log)), *expected, "{}: epoch {epoch}", context());
                }
                Err(
                    RedoError::NoLog { .. }
                    | RedoError::NewerDisk { .. }
                    | RedoError::NotSealed { .. }
                    | RedoError::Discarded { .. },
                ) => assert!(!must, "{}: epoch {epoch} cannot be opened", context()),
                Err(e) => panic!("{}: epoch {epoch}: {e}", context()),
            }
        }
        if continues && opened.is_some() {
            self.continue_with(&disk, count, &newest, &context);
        }
    }

    /// Lets the next server write, flush and reopen the disk that was found.
    fn continue_with(&self, disk: &CrashDisk, count: usize, newest: &[u64], context: &dyn Fn() -> String) {
        let (log_dir, log) = open(disk.clone(), BYTES, DiskVersion::Newest, 1 << 30).unwrap().unwrap();
        let uuid = log_dir.state().disk;
        let mut model = ProtectedDisk::begin(CrashDisk::new(image()));
        (model.disk, model.uuid, model.log, model.log_dir) = (disk.clone(), uuid, Some(log), Some(log_dir).into());
        model.now = newest.iter().map(|value| (0, *value)).collect();
        model.check();
        model.prepare().unwrap_or_else(|e| panic!("{}: {e}", context()));
        model.write(3, 9, EntryKind::Data);
        let epoch = model.mark();
        let is_new = self.marked.get(&epoch).is_none_or(|step| *step > count);
        assert!(is_new, "{}: epoch {epoch} is used twice", context());
        model.seal(epoch).unwrap();
        model.write(5, 2, EntryKind::Data);
        model.commit(epoch).unwrap();
        model.end_writes();
        model.check();
        model.end();
        model.check();
    }
}

fn short(op: &Step) -> String {
    match op {
        Step::Write(file, at, bytes) => format!("Write({file}, {at}, {} bytes)", bytes.len()),
        other => format!("{other:?}"),
    }
}

fn runner() -> TestRunner {
    let random = TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(Config::default(), random)
}

fn random_histories(count: usize, actions: usize) -> Vec<History> {
    let mut runner = runner();
    let histories = proptest::collection::vec(action(), actions);
    (0..count).map(|_| make_history(&histories.new_tree(&mut runner).unwrap().current())).collect()
}

#[test]
fn killed_at_every_step() {
    let (mut steps, mut epochs) = (0, 0);
    for history in random_histories(8, 40) {
        steps += history.ops.len();
        epochs += history.epochs.len();
        for count in 0..=history.ops.len() {
            history.check(count, &BTreeMap::new(), true, "killed");
            if let Some(Step::Write(..)) = history.ops.get(count) {
                for sectors in [1, 0x5555_5555_5555_5555, !1] {
                    history.check(
                        count + 1,
                        &BTreeMap::from([(count, Fate::Torn(sectors))]),
                        false,
                        "killed in a write",
                    );
                }
            }
        }
    }
    assert!(steps > 250 && epochs > 12, "{steps} steps, {epochs} epochs: too few to test anything");
}

#[test]
fn power_lost_at_every_step() {
    for history in random_histories(6, 36) {
        for count in 0..=history.ops.len() {
            let volatile = CrashDisk::volatile(&history.ops, count);
            let all_lost: BTreeMap<_, _> = volatile.iter().map(|step| (*step, Fate::Lost)).collect();
            history.check(count, &all_lost, true, "all lost");
            for step in &volatile {
                history.check(count, &BTreeMap::from([(*step, Fate::Lost)]), false, &format!("step {step} lost"));
                let mut kept = all_lost.clone();
                kept.remove(step);
                history.check(count, &kept, false, &format!("only step {step} kept"));
            }
        }
    }
}

#[test]
fn power_lost_at_any_step_with_any_mixture_of_lost_steps() {
    let random_histories = random_histories(24, 60);
    let mut runner = runner();
    let fate = prop_oneof![Just(Fate::Kept), Just(Fate::Lost), any::<u64>().prop_map(Fate::Torn)];
    let cases = (any::<prop::sample::Index>(), any::<prop::sample::Index>(), proptest::collection::vec(fate, 48));
    for n in 0..600 {
        let (which, count, fates) = cases.new_tree(&mut runner).unwrap().current();
        let history = &random_histories[which.index(random_histories.len())];
        let count = count.index(history.ops.len() + 1);
        let volatile = CrashDisk::volatile(&history.ops, count);
        let fate: BTreeMap<_, _> = volatile.iter().copied().zip(fates.into_iter().cycle()).collect();
        history.check(count, &fate, n % 4 == 0, &format!("{fate:?}"));
    }
}

/// Returns a history in which the file system becomes full. The seal record has two pages, and there is space for
/// `room` of them. One epoch is sealed, committed and merged.
fn history_of_full_disk(room: usize) -> History {
    let mut model = ProtectedDisk::begin(CrashDisk::new(image()));
    let before = Guarantee { sealed: BTreeSet::new(), ..model.guarantee.clone() };
    let mut marks = vec![(0, before), (model.disk.steps(), model.guarantee.clone())];
    let mut note = |model: &ProtectedDisk| marks.push((model.disk.steps(), model.guarantee.clone()));
    model.prepare().unwrap();
    model.write(0, 8, EntryKind::Data);
    note(&model);
    model.write(8, 8, EntryKind::Data);
    note(&model);
    let epoch = model.mark();
    let marked = BTreeMap::from([(epoch, model.disk.steps())]);
    model.prepare().unwrap();
    note(&model);
    model.disk.leave_room(0);
    model.write(4, 8, EntryKind::Data);
    note(&model);
    assert_eq!(model.try_end_write(0).unwrap_err().kind(), ErrorKind::StorageFull);
    model.disk.leave_room(room);
    model.seal(epoch).unwrap_or_else(|e| panic!("{room} pages: {e:?}"));
    note(&model);
    assert_eq!(
        model.log().segments_to_seal(epoch).unwrap().is_empty(),
        room == 2,
        "the next seal repeats a missing record"
    );
    model.commit(epoch).unwrap();
    note(&model);
    model.end_write(0);
    note(&model);
    model.check();
    let uuid = model.uuid;
    let epochs = model.epochs.into_iter().map(|(epoch, content)| ((uuid, epoch), content)).collect();
    History { ops: model.disk.ops(), marks, epochs, marked }
}

#[test]
fn a_full_file_system_prevents_no_seal_and_no_merge() {
    for room in 0..=2 {
        let history = history_of_full_disk(room);
        for count in 0..=history.ops.len() {
            let context = format!("{room} pages");
            history.check(count, &BTreeMap::new(), true, &context);
            let volatile = CrashDisk::volatile(&history.ops, count);
            let all_lost = volatile.iter().map(|step| (*step, Fate::Lost)).collect();
            history.check(count, &all_lost, true, &context);
            for step in volatile {
                for fate in [Fate::Lost, Fate::Torn(0x5555_5555_5555_5555), Fate::Torn(!1)] {
                    history.check(count, &BTreeMap::from([(step, fate)]), false, &context);
                }
            }
        }
    }
}
