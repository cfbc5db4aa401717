//! Kills and power losses at every step of many histories. The newest disk has every flushed write. Each sealed epoch
//! can be opened with its content until a newer epoch is committed.

use super::model::{BYTES, Content, Guarantee, ProtectedDisk, content, initial_content, initial_image, unwritten};
use crate::block::SECTOR;
use crate::redo::error::RedoError;
use crate::redo::format::{EntryKind, PAGE_BYTES};
use crate::redo::recover::{DiskVersion, RecoveredLog, open};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRng, TestRunner};
use rekindle_testing::crash_disk::{CrashDisk, Fate, PowerFailure, Step, power_failures, random_power_failure};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use uuid::Uuid;

/// The limit of the log, which is never full.
const LIMIT: u64 = 1 << 30;

/// An action of the guest, the protector or the server.
#[derive(Debug, Clone, Copy)]
enum Action {
    Write {
        sector: u64,
        sectors: u64,
        kind: EntryKind,
    },
    /// Complete one of the writes in progress.
    EndWrite(usize),
    Flush,
    Mark,
    /// Seal the epoch that was marked last.
    Seal,
    /// Commit the epoch that was sealed last.
    Commit,
    /// Restart the server.
    Reopen,
    /// Restart the server with a sealed epoch.
    OpenOlder(prop::sample::Index),
    /// Merge and remove the log.
    End,
}

fn action() -> impl Strategy<Value = Action> {
    let kind = prop_oneof![4 => Just(EntryKind::Data), 1 => Just(EntryKind::Zeroes), 1 => Just(EntryKind::Hole)];
    prop_oneof![
        10 => (0..36u64, 1..12u64, kind)
            .prop_map(|(sector, sectors, kind)| Action::Write { sector, sectors, kind }),
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
    steps: Vec<Step>,
    guarantees: Vec<GuaranteeAt>,
    epochs: BTreeMap<(Uuid, u64), Content>,
    /// The number of steps after which each epoch was marked.
    marked: BTreeMap<u64, usize>,
}

/// The guarantee after a number of steps.
struct GuaranteeAt {
    steps: usize,
    guarantee: Guarantee,
}

fn make_history(actions: &[Action]) -> History {
    let disk = CrashDisk::new(initial_image());
    let newest: Vec<_> = initial_content().into_iter().map(|value| BTreeSet::from([value])).collect();
    let mut history = History {
        steps: Vec::new(),
        guarantees: vec![GuaranteeAt { steps: 0, guarantee: Guarantee { newest, sealed: BTreeSet::new() } }],
        epochs: BTreeMap::new(),
        marked: BTreeMap::new(),
    };
    let mut model = ProtectedDisk::begin(disk);
    history.record_guarantee(&model);
    let (mut marked, mut sealed) = (None, None);
    let mut ended = false;
    for action in actions {
        // Until the action has ended, its effect may or may not be durable: both guarantees hold.
        match *action {
            Action::Write { sector, sectors, kind } => {
                model.prepare().unwrap();
                history.record_guarantee(&model);
                model.write(sector, sectors, kind);
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
        history.record_guarantee(&model);
        model.check();
        if ended {
            break;
        }
    }
    let uuid = model.uuid;
    history.epochs.extend(model.epochs.into_iter().map(|(epoch, content)| ((uuid, epoch), content)));
    history.steps = model.disk.recorded_steps();
    history
}

impl History {
    fn record_guarantee(&mut self, model: &ProtectedDisk) {
        self.guarantees.push(GuaranteeAt { steps: model.disk.steps(), guarantee: model.guarantee.clone() });
    }

    /// Returns the guarantees of which each may hold after `count` steps.
    fn guarantees_around(&self, count: usize) -> Vec<&Guarantee> {
        let newest = self.guarantees.iter().rposition(|at| at.steps <= count).unwrap();
        // Several actions may have ended at this step, and the power may fail after each of them.
        let first = self.guarantees.iter().position(|at| at.steps == self.guarantees[newest].steps).unwrap();
        let last = (newest + 1).min(self.guarantees.len() - 1);
        self.guarantees[first..=last].iter().map(|at| &at.guarantee).collect()
    }

    /// Checks what a server finds after a crash that follows `count` steps. `fates`: of steps that are not durable.
    /// `continues`: the server then also writes. `crash`: for messages.
    fn check(&self, count: usize, fates: &BTreeMap<usize, Fate>, continues: bool, crash: &str) {
        let around = self.guarantees_around(count);
        let context = || format!("{crash}, after step {count} ({:?} next)", self.steps.get(count).map(Step::to_string));
        let disk = CrashDisk::after_crash(&initial_image(), &self.steps, count, fates);
        let opened =
            open(disk.clone(), BYTES, DiskVersion::Newest, LIMIT).unwrap_or_else(|e| panic!("{}: {e}", context()));
        let newest = content(&disk, opened.as_ref().map(|opened| &opened.log));
        for (sector, value) in newest.iter().enumerate() {
            let allowed: BTreeSet<u64> =
                around.iter().flat_map(|guarantee| &guarantee.newest[sector]).copied().collect();
            assert!(allowed.contains(value), "{}: sector {sector} is {value} and may be {allowed:?}", context());
        }
        for ((uuid, epoch), expected) in &self.epochs {
            let disk = CrashDisk::after_crash(&initial_image(), &self.steps, count, fates);
            let version = DiskVersion::Epoch { epoch: *epoch, disk: *uuid };
            let must_be_available = around.iter().all(|guarantee| guarantee.sealed.contains(epoch));
            // A marked epoch without a seal becomes available with the next sealed one.
            let may_be_available = around.iter().any(|guarantee| guarantee.sealed.last() >= Some(epoch));
            match open(disk.clone(), BYTES, version, LIMIT) {
                Ok(opened) => {
                    let RecoveredLog { log, .. } = opened.unwrap();
                    assert!(may_be_available, "{}: epoch {epoch} can be opened", context());
                    assert_eq!(content(&disk, Some(&log)), *expected, "{}: epoch {epoch}", context());
                }
                Err(
                    RedoError::NoLog { .. }
                    | RedoError::NewerDisk { .. }
                    | RedoError::NotSealed { .. }
                    | RedoError::Discarded { .. },
                ) => assert!(!must_be_available, "{}: epoch {epoch} cannot be opened", context()),
                Err(e) => panic!("{}: epoch {epoch}: {e}", context()),
            }
        }
        if continues && opened.is_some() {
            self.continue_with(&disk, count, &newest, &context);
        }
    }

    /// Lets the next server write, flush and reopen the disk that was found.
    fn continue_with(&self, disk: &CrashDisk, count: usize, newest: &[u64], context: &dyn Fn() -> String) {
        let opened = open(disk.clone(), BYTES, DiskVersion::Newest, LIMIT).unwrap().unwrap();
        let RecoveredLog { log_dir, log } = opened;
        let uuid = log_dir.state().disk;
        let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
        (model.disk, model.uuid, model.log, model.log_dir) = (disk.clone(), uuid, Some(log), Some(log_dir).into());
        model.expected = unwritten(newest);
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

fn random_histories(count: usize, actions: usize) -> Vec<History> {
    let random = TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(Config::default(), random);
    let histories = proptest::collection::vec(action(), actions);
    (0..count).map(|_| make_history(&histories.new_tree(&mut runner).unwrap().current())).collect()
}

#[test]
fn killed_at_every_step() {
    let (mut steps, mut epochs) = (0, 0);
    for history in random_histories(8, 40) {
        steps += history.steps.len();
        epochs += history.epochs.len();
        for count in 0..=history.steps.len() {
            history.check(count, &BTreeMap::new(), true, "killed");
            if let Some(Step::Write(..)) = history.steps.get(count) {
                for sectors in [1, 0x5555_5555_5555_5555, !1] {
                    history.check(
                        count + 1,
                        &BTreeMap::from([(count, Fate::Torn(sectors))]),
                        true,
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
        for count in 0..=history.steps.len() {
            for (index, PowerFailure { fates, description }) in power_failures(&history.steps, count).iter().enumerate()
            {
                history.check(count, fates, index == 0, description);
            }
        }
    }
}

#[test]
fn power_lost_at_any_step_with_any_mixture_of_lost_steps() {
    let random_histories = random_histories(24, 60);
    let mut random = fastrand::Rng::with_seed(0);
    for n in 0..600 {
        let history = &random_histories[random.usize(..random_histories.len())];
        let (count, PowerFailure { fates, description }) = random_power_failure(&history.steps, &mut random);
        history.check(count, &fates, n % 4 == 0, &description);
    }
}

#[test]
fn a_segment_with_any_part_of_its_head_is_removed() {
    let history = make_history(&[Action::Write { sector: 0, sectors: 8, kind: EntryKind::Data }]);
    let created = history.steps.iter().position(|step| matches!(step, Step::AddName(name, _) if name == "1.log"));
    let head = created.unwrap() + 1;
    assert!(matches!(&history.steps[head], Step::Write(_, 0, page) if page.len() == PAGE_BYTES as usize));
    for written_sectors in 0..=PAGE_BYTES / SECTOR {
        let fates = BTreeMap::from([(head, Fate::Torn((1 << written_sectors) - 1))]);
        // The next server merges and removes this segment.
        history.check(head + 1, &fates, true, &format!("{written_sectors} sectors of the head are written"));
    }
}

/// Returns a history in which the file system becomes full. The seal record has two pages, and there is space for
/// `room` of them. One epoch is sealed, committed and merged.
fn history_of_full_disk(room: usize) -> History {
    let mut model = ProtectedDisk::begin(CrashDisk::new(initial_image()));
    let before = Guarantee { sealed: BTreeSet::new(), ..model.guarantee.clone() };
    let mut history = History {
        steps: Vec::new(),
        guarantees: vec![GuaranteeAt { steps: 0, guarantee: before }],
        epochs: BTreeMap::new(),
        marked: BTreeMap::new(),
    };
    history.record_guarantee(&model);
    model.prepare().unwrap();
    model.write(0, 8, EntryKind::Data);
    history.record_guarantee(&model);
    model.write(8, 8, EntryKind::Data);
    history.record_guarantee(&model);
    let epoch = model.mark();
    history.marked.insert(epoch, model.disk.steps());
    model.prepare().unwrap();
    history.record_guarantee(&model);
    model.disk.leave_room(0);
    model.write(4, 8, EntryKind::Data);
    history.record_guarantee(&model);
    assert_eq!(model.try_end_write(0).unwrap_err().kind(), ErrorKind::StorageFull);
    model.disk.leave_room(room);
    model.seal(epoch).unwrap_or_else(|e| panic!("{room} pages: {e:?}"));
    history.record_guarantee(&model);
    assert_eq!(
        model.log().segments_to_seal(epoch).unwrap().is_empty(),
        room == 2,
        "the next seal repeats a missing record"
    );
    model.commit(epoch).unwrap();
    history.record_guarantee(&model);
    model.end_write(0);
    history.record_guarantee(&model);
    model.check();
    let uuid = model.uuid;
    history.steps = model.disk.recorded_steps();
    history.epochs.extend(model.epochs.into_iter().map(|(epoch, content)| ((uuid, epoch), content)));
    history
}

#[test]
fn a_full_file_system_prevents_no_seal_and_no_merge() {
    for room in 0..=2 {
        let history = history_of_full_disk(room);
        for count in 0..=history.steps.len() {
            let context = format!("{room} pages");
            history.check(count, &BTreeMap::new(), true, &context);
            let volatile = CrashDisk::volatile(&history.steps, count);
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
