//! The host of a guest: hosts boot, restore, protect and shut down one VM. A model determines which operation may
//! succeed.

use super::disk::TestDisk;
use super::model::{Change, Model, vm};
use crate::directory::StoreDirectory;
use crate::engine::{Engine, EngineSettings};
use crate::error::{Result, StoreError};
use crate::fencing::fence;
use crate::listing::{Listing, list};
use crate::types::{Guest, OnlyIf, Owner};
use proptest::prelude::*;
use rekindle_testing::crash_disk::{CrashDisk, StepFailures};
use rustix::io::Errno;
use std::sync::{Arc, Mutex};

/// Returns an unused store.
fn new_store<D: TestDisk>() -> D {
    let disk = D::default();
    StoreDirectory::init(&disk.shared().disk).unwrap();
    disk
}

/// Claims the store like a restore, a boot or a shutdown. Returns the new epoch.
fn begin(disk: &impl TestDisk, operation: &str, guest: Guest, only_if: Option<OnlyIf>) -> Result<u64> {
    let owner = Owner::here(operation).with(guest);
    fence(disk.shared(), &vm(), &owner, only_if).map(|fenced| fenced.epoch)
}

/// Opens the store like a protector of the guest that began in epoch `run`; without `run`, of an unknown guest.
fn protect(disk: &impl TestDisk, run: Option<u64>) -> Result<Engine> {
    let guest = if run.is_some() { Guest::Same } else { Guest::Booted };
    let only_if = run.map(|run| OnlyIf::Run { run });
    let settings = EngineSettings { keep: 3, segment: 48 << 10, create: false };
    Engine::open(disk.shared(), &vm(), &Owner::here("protect web").with(guest), only_if, settings)
}

fn listing(disk: &impl TestDisk) -> Listing {
    list(&StoreDirectory::open(disk.shared(), Some(vm().uuid)).unwrap()).unwrap()
}

fn change(n: u64) -> Change {
    Change { blocks: vec![("ram", 20)], pages: vec![(0, n % 20, n + 1), (0, (n * 7) % 20, n + 2)] }
}

/// Operation of a host.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    Boot,
    Restore,
    Protect,
    Commit,
    Compact,
    End,
}

/// A host: the epoch in which its guest began, and the guest's protector.
#[derive(Debug, Default)]
struct Host {
    run: Option<u64>,
    protector: Option<Engine>,
}

/// Expected state, determined without the store.
#[derive(Debug, Default)]
struct Truth {
    /// Number of claims so far.
    epoch: u64,
    /// Host that may run the guest.
    holder: Option<usize>,
    /// Host whose protector is the owner.
    owner: Option<usize>,
    /// Number of checkpoints since the guest was last booted or shut down.
    current: u64,
    model: Model,
}

pub fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = prop_oneof![
        1 => Just(Step::Boot),
        2 => Just(Step::Restore),
        4 => Just(Step::Protect),
        8 => Just(Step::Commit),
        1 => Just(Step::Compact),
        1 => Just(Step::End),
    ];
    proptest::collection::vec((0usize..3, step), 1..60)
}

/// Asserts that `e` requires a host to stop a guest of epoch `run`, unless `holds`: the host may still run the guest.
fn check_error(e: &StoreError, run: u64, holds: bool) {
    assert!(matches!(e, StoreError::Superseded { .. }), "{e}");
    assert_eq!(e.guest_is_over(run).is_none(), holds, "run {run}: {e}");
}

pub fn play<D: TestDisk>(steps: Vec<(usize, Step)>) {
    let disk: D = new_store();
    let mut places: [Host; 3] = Default::default();
    let mut truth = Truth { model: Model { keep: 3, ..Model::default() }, ..Truth::default() };
    for (n, (host, step)) in steps.into_iter().enumerate() {
        let place = &mut places[host];
        match step {
            Step::Boot | Step::Restore => {
                let guest = if matches!(step, Step::Boot) { Guest::Booted } else { Guest::Restored };
                if guest == Guest::Restored && (truth.epoch == 0 || listing(&disk).restorable().is_none()) {
                    continue;
                }
                truth.epoch += 1;
                assert_eq!(begin(&disk, "start web", guest, None).unwrap(), truth.epoch);
                *place = Host { run: Some(truth.epoch), protector: None };
                (truth.holder, truth.owner) = (Some(host), None);
                if guest == Guest::Booted {
                    truth.current = 0;
                }
            }
            Step::Protect => {
                let Some(run) = place.run else { continue };
                let holds = truth.holder == Some(host);
                match protect(&disk, Some(run)) {
                    Ok(engine) => {
                        assert!(holds, "{host} was let in");
                        truth.epoch += 1;
                        assert_eq!(engine.owner().epoch, truth.epoch);
                        place.protector = Some(engine);
                        truth.owner = Some(host);
                    }
                    Err(e) => {
                        assert!(!holds, "{e}");
                        check_error(&e, run, false);
                    }
                }
            }
            Step::Commit => {
                let (Some(run), Some(engine)) = (place.run, &mut place.protector) else { continue };
                match truth.model.commit(engine, &change(n as u64)) {
                    Ok(_) => {
                        assert!(truth.owner == Some(host) && truth.holder == Some(host));
                        truth.current += 1;
                    }
                    Err(e) => {
                        assert_ne!(truth.owner, Some(host), "{e}");
                        check_error(&e, run, truth.holder == Some(host));
                    }
                }
            }
            Step::Compact => {
                if truth.epoch == 0 {
                    continue;
                }
                // An administrator claims the store. No guest must be stopped because of that.
                let settings = EngineSettings { keep: 3, segment: 48 << 10, create: false };
                let engine = Engine::open(disk.shared(), &vm(), &Owner::here("store compact"), None, settings);
                engine.unwrap().compact().unwrap();
                truth.epoch += 1;
                truth.owner = None;
            }
            Step::End => {
                let Some(run) = place.run else { continue };
                match begin(&disk, "stop web", Guest::Ended, Some(OnlyIf::Run { run })) {
                    Ok(epoch) => {
                        assert!(truth.holder == Some(host));
                        truth.epoch += 1;
                        assert_eq!(epoch, truth.epoch);
                        (truth.holder, truth.owner, truth.current) = (None, None, 0);
                    }
                    Err(e) => {
                        assert_ne!(truth.holder, Some(host), "{e}");
                        check_error(&e, run, false);
                    }
                }
            }
        }
        if truth.epoch > 0 {
            let listing = listing(&disk);
            assert_eq!(listing.epoch, truth.epoch);
            assert_eq!(listing.restorable(), (truth.current > 0).then(|| truth.model.newest()));
        }
    }
    if truth.epoch > 0 {
        truth.model.check(&disk);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn only_the_host_that_began_it_last_commits_and_every_other_one_gets_an_error(steps in steps()) {
        play::<CrashDisk>(steps);
    }
}

/// Runs `work` on host A, whose guest began in epoch 1. Before the `after`-th step of it, host B begins a restore.
fn overtaken<T>(after: usize, work: impl FnOnce(&CrashDisk) -> Result<T>) -> Option<(CrashDisk, Result<T>)> {
    let disk: CrashDisk = new_store();
    begin(&disk, "start web", Guest::Booted, None).unwrap();
    let mut model = Model { keep: 3, ..Model::default() };
    model.commit(&mut protect(&disk, Some(1)).unwrap(), &change(0)).unwrap();
    let slow = disk.handle();
    let began = Arc::<Mutex<bool>>::default();
    let (plain, there) = (disk.clone(), began.clone());
    let meanwhile = move || {
        begin(&plain, "restore web", Guest::Restored, None).unwrap();
        *there.lock().unwrap() = true;
    };
    slow.interrupt(after, Box::new(meanwhile));
    let done = work(&slow);
    let began = *began.lock().unwrap();
    began.then_some((disk, done))
}

#[test]
fn a_protector_that_is_overtaken_anywhere_commits_nothing_and_learns_it() {
    for after in 0.. {
        let Some((disk, opened)) = overtaken(after, |slow| protect(slow, Some(1))) else {
            assert!(after > 6, "it has more steps than {after}");
            break;
        };
        match opened {
            // Host A opened the store before host B claimed it: the next operation of host A fails.
            Ok(mut engine) => check_error(&engine.begin(vec![]).unwrap_err(), 1, false),
            Err(e) => check_error(&e, 1, false),
        }
        assert_eq!(listing(&disk).restorable(), Some(1), "before step {after}");
        assert_eq!(listing(&disk).owner.map(|owner| owner.operation).as_deref(), Some("restore web"));
    }
}

#[test]
fn a_claim_that_another_one_follows_immediately_stays_so_that_the_previous_owner_is_rejected() {
    for after in 0.. {
        let disk: CrashDisk = new_store();
        let mut engine = protect(&disk, None).unwrap();
        let mut model = Model { keep: 3, ..Model::default() };
        model.commit(&mut engine, &change(0)).unwrap();
        let (slow, plain) = (disk.handle(), disk.clone());
        slow.interrupt(after, Box::new(move || assert!(begin(&plain, "restore web", Guest::Restored, None).is_ok())));
        begin(&slow, "start web", Guest::Restored, None).unwrap();
        let both = listing(&disk).epoch == 3;
        assert!(model.commit(&mut engine, &change(1)).is_err(), "before step {after}");
        model.check(&disk);
        if !both {
            assert!(after > 6, "a claim has more steps than {after}");
            break;
        }
    }
}

#[test]
fn the_end_of_a_guest_counts_only_where_it_ran_last() {
    for after in 0.. {
        let end = |slow: &CrashDisk| begin(slow, "stop web", Guest::Ended, Some(OnlyIf::Run { run: 1 }));
        let Some((disk, ended)) = overtaken(after, end) else {
            assert!(after > 6, "it has more steps than {after}");
            break;
        };
        let owner = listing(&disk).owner.unwrap();
        // The last process to claim is the owner. The store cannot report that the restored guest had ended.
        assert_eq!((owner.guest, owner.run), (Guest::Restored, listing(&disk).epoch), "before step {after}");
        match ended {
            Ok(epoch) => assert_eq!((owner.boot, listing(&disk).restorable()), (epoch, None)),
            Err(e) => {
                check_error(&e, 1, false);
                assert_eq!((owner.boot, listing(&disk).restorable()), (1, Some(1)));
            }
        }
    }
}

#[test]
fn a_full_disk_lets_the_guest_be_where_it_is_or_takes_it_away_wholly() {
    for after in 0.. {
        let disk: CrashDisk = new_store();
        begin(&disk, "start web", Guest::Booted, None).unwrap();
        let mut model = Model { keep: 3, ..Model::default() };
        let mut engine = protect(&disk, Some(1)).unwrap();
        model.commit(&mut engine, &change(0)).unwrap();
        disk.fail_steps(StepFailures { after, error: Errno::NOSPC, half: true, count: usize::MAX });
        let restored = begin(&disk, "restore web", Guest::Restored, None);
        let all_passed = !disk.has_failed();
        disk.stop_failing();
        let is_taken = listing(&disk).owner.unwrap().guest == Guest::Restored;
        assert!(is_taken || restored.is_err(), "after {after} steps");
        match model.commit(&mut engine, &change(1)) {
            Ok(_) => assert!(!is_taken, "after {after} steps"),
            Err(e) => {
                assert!(is_taken, "after {after} steps: {e}");
                check_error(&e, 1, false);
            }
        }
        model.check(&disk);
        if all_passed {
            assert!(restored.is_ok() && after > 4);
            break;
        }
    }
}

#[test]
fn a_guest_that_is_known_never_makes_a_store() {
    let disk = CrashDisk::default();
    assert!(matches!(protect(&disk, Some(1)), Err(StoreError::NotAStore { .. })));
    let ended = begin(&disk, "stop web", Guest::Ended, Some(OnlyIf::Run { run: 1 }));
    assert!(matches!(ended, Err(StoreError::NotAStore { .. })));
    assert!(matches!(begin(&disk, "restore web", Guest::Restored, None), Err(StoreError::NotAStore { .. })));
    assert!(disk.names().is_empty(), "{:?}", disk.names());
}

#[test]
fn a_store_of_an_older_rekindle_ends_no_guest() {
    let disk: CrashDisk = new_store();
    // The owner did not record its effect on the guest.
    let mut engine = super::model::open(&disk, 3).unwrap();
    let mut model = Model { keep: 3, ..Model::default() };
    model.commit(&mut engine, &change(0)).unwrap();
    assert_eq!(listing(&disk).restorable(), Some(1));
    drop(super::model::open_as(&disk, 3, "restore web", None).unwrap());
    let e = engine.begin(vec![]).unwrap_err();
    assert!(e.guest_is_over(0).is_none(), "{e}");
    let text = r#"{"host": "a", "pid": 1, "operation": "protect web", "since_us": 2}"#;
    let owner: Owner = serde_json::from_str(text).unwrap();
    assert_eq!((owner.guest, owner.run, owner.boot), (Guest::Same, 0, 0));
}
