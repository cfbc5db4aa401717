//! A server's record of a phase of its guest's boot: random histories over vhost-user, with guests that continue from
//! phases, and servers that end. No guest continues with a disk that differs in a block that the guest knows.
//!
//! A *phase* is a point in a guest's boot at which its state was saved. A guest *knows* a block if it has read or
//! written it until then (`docs/os-reboot.md`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{DataPiece, Disk, FIRST_FREE_FRAME, Guest, GuestRequest, OUT, PAGE, RingState, content, wait_for};
use rekindle_disk::control::ControlCommand;
use rekindle_disk::keeper::EpochId;
use rekindle_disk::ledger::{Moment, StaleReason};
use std::collections::BTreeMap;
use vhost::VhostBackend;
use vhost::vhost_user::Frontend;

const BLOCKS: u64 = 64;

fn begin(disk: &Disk) {
    wait_for_disconnect(disk);
    disk.control().ask::<()>(&ControlCommand::PhaseBegin {}).unwrap();
}

fn wait_for_disconnect(disk: &Disk) {
    wait_for("the guest to be gone", || (disk.control().status().unwrap().connected == 0).then_some(()));
}

fn mark(disk: &Disk, guest: &mut Guest) -> Result<Moment, String> {
    guest.stop(0);
    let marked = disk.control().ask(&ControlCommand::PhaseMark {}).map_err(|e| e.to_string());
    guest.run(0, RingState::Kept);
    marked
}

fn check(disk: &Disk, moment: Moment) -> Option<StaleReason> {
    disk.control().ask(&ControlCommand::PhaseCheck { moment }).unwrap()
}

fn resume(disk: &Disk, moment: Moment) -> Option<StaleReason> {
    wait_for_disconnect(disk);
    disk.control().ask(&ControlCommand::PhaseResume { moment }).unwrap()
}

/// Reports that the memory of a continued guest is complete, as it always is in these tests.
fn report_filled(disk: &Disk) {
    disk.control().ask::<()>(&ControlCommand::MemoryFilled {}).unwrap();
}

#[test]
fn a_moment_is_valid_until_a_touched_block_is_written() {
    let mut disk = Disk::new(BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    let error = mark(&disk, &mut guest).unwrap_err();
    assert!(error.contains("not known"), "{error}");
    assert!(disk.control().ask::<()>(&ControlCommand::PhaseBegin {}).is_err(), "a guest is there");
    drop(guest);
    begin(&disk);
    let mut guest = Guest::start(&disk.socket());
    assert_eq!(guest.read(5, FIRST_FREE_FRAME), content(5, 0));
    guest.write(7, FIRST_FREE_FRAME, &content(7, 1));
    assert!(disk.control().ask::<Moment>(&ControlCommand::PhaseMark {}).is_err(), "the guest runs");
    let moment = mark(&disk, &mut guest).unwrap();
    guest.write(6, FIRST_FREE_FRAME, &content(6, 1));
    assert_eq!(guest.read(5, FIRST_FREE_FRAME), content(5, 0));
    assert_eq!(check(&disk, moment), None);
    // The write has the current content, and covers only part of the block.
    guest.fill(FIRST_FREE_FRAME, &content(5, 0));
    let part =
        GuestRequest { kind: OUT, sector: 5 * 8 + 3, data: vec![DataPiece::readable(FIRST_FREE_FRAME * PAGE, 512)] };
    assert_eq!(guest.request(&part), 0);
    assert_eq!(check(&disk, moment), Some(StaleReason::Written { block: 5 }));
    let later = mark(&disk, &mut guest).unwrap();
    guest.write(7, FIRST_FREE_FRAME, &content(7, 2));
    assert_eq!(check(&disk, later), Some(StaleReason::Written { block: 7 }), "what it has written it knows too");
    let last = mark(&disk, &mut guest).unwrap();
    drop(guest);
    disk.end();
    disk.serve(|_| ());
    assert_eq!(check(&disk, last), Some(StaleReason::Server));
}

/// The next guest's QEMU has connected while the previous guest runs. A guest that is only stopped may continue with
/// its memory.
#[test]
fn a_qemu_that_waits_for_its_guest_does_not_prevent_a_resume() {
    let disk = Disk::new(BLOCKS);
    begin(&disk);
    let mut guest = Guest::start(&disk.socket());
    assert_eq!(guest.read(5, FIRST_FREE_FRAME), content(5, 0));
    let moment = mark(&disk, &mut guest).unwrap();
    let next = Frontend::connect(disk.socket(), 1).unwrap();
    next.get_features().unwrap();
    let status = || disk.control().status().unwrap();
    wait_for("the next one to be seen", || (status().connected == 2).then_some(()));
    assert_eq!(status().waiting_for_guest, 1);
    let resume = || disk.control().ask::<Option<StaleReason>>(&ControlCommand::PhaseResume { moment });
    guest.stop(0);
    assert!(resume().unwrap_err().to_string().contains("still connected"));
    assert!(disk.control().ask::<()>(&ControlCommand::PhaseBegin {}).is_err());
    drop(guest);
    let gone = disk.control().wait_gone(common::DEADLINE).unwrap();
    assert_eq!((gone.connected, gone.waiting_for_guest), (1, 1));
    disk.control().ask::<()>(&ControlCommand::DropCache {}).unwrap();
    assert_eq!(resume().unwrap(), None);
    report_filled(&disk);
    drop(next);
    let mut guest = Guest::start(&disk.socket());
    assert_eq!(guest.read(5, FIRST_FREE_FRAME), content(5, 0));
    assert!(resume().unwrap_err().to_string().contains("still connected"));
}

/// Neither the redo log of a protected VM nor its end changes which blocks were touched.
#[test]
fn a_redo_log_changes_nothing_of_what_was_touched() {
    let disk = Disk::new(BLOCKS);
    begin(&disk);
    disk.control().ask::<EpochId>(&ControlCommand::EpochBegin {}).unwrap();
    let mut guest = Guest::start(&disk.socket());
    assert_eq!(guest.read(5, FIRST_FREE_FRAME), content(5, 0));
    let moment = mark(&disk, &mut guest).unwrap();
    guest.write(6, FIRST_FREE_FRAME, &content(6, 1));
    assert_eq!(check(&disk, moment), None);
    disk.control().end_epochs(common::DEADLINE).unwrap();
    assert_eq!(check(&disk, moment), None);
    guest.write(5, FIRST_FREE_FRAME, &content(5, 1));
    assert_eq!(check(&disk, moment), Some(StaleReason::Written { block: 5 }));
}

#[test]
fn random_histories() {
    let seed = std::env::var("REKINDLE_TEST_SEED").ok().map_or_else(|| fastrand::u64(..), |seed| seed.parse().unwrap());
    eprintln!("REKINDLE_TEST_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut disk = Disk::new(BLOCKS);
    let mut versions = vec![0u64; BLOCKS as usize];
    let mut moments: Vec<(Moment, BTreeMap<u64, u64>)> = Vec::new();
    let (mut resumed_count, mut rejected_count) = (0, 0);
    for boot in 0..60 {
        // The blocks that the guest knows; `None`: the guest is older than the server.
        let mut known;
        let chosen = (!moments.is_empty() && boot % 3 != 0).then(|| moments[random.usize(..moments.len())].clone());
        match chosen {
            Some((moment, known_then)) if resume(&disk, moment).is_none() => {
                for (block, version) in &known_then {
                    assert_eq!(versions[*block as usize], *version, "a guest continues with another block {block}");
                }
                report_filled(&disk);
                (known, resumed_count) = (Some(known_then), resumed_count + 1);
            }
            rejected => {
                rejected_count += u64::from(rejected.is_some());
                begin(&disk);
                known = Some(BTreeMap::new());
            }
        }
        let mut guest = Guest::start(&disk.socket());
        for _ in 0..random.u64(1..20) {
            let block = random.u64(..BLOCKS);
            let version = &mut versions[block as usize];
            match random.u64(..8) {
                0..5 => assert!(guest.read(block, FIRST_FREE_FRAME) == content(block, *version), "block {block}"),
                5 | 6 => {
                    *version += 1;
                    guest.write(block, FIRST_FREE_FRAME, &content(block, *version));
                }
                _ => {
                    let marked = mark(&disk, &mut guest);
                    assert_eq!(marked.is_ok(), known.is_some());
                    moments.extend(marked.ok().zip(known.clone()));
                    continue;
                }
            }
            if let Some(known) = &mut known {
                known.insert(block, versions[block as usize]);
            }
        }
        drop(guest);
        if random.u64(..10) == 0 {
            disk.end();
            disk.serve(|_| ());
            moments.iter().for_each(|(moment, _)| assert_eq!(check(&disk, *moment), Some(StaleReason::Server)));
        }
    }
    assert!(resumed_count > 0 && rejected_count > 0, "{resumed_count} continued, {rejected_count} were rejected");
}
