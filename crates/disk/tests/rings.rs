//! Rings that a guest has broken: only their queue stops.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{
    CompletedRequest, DISCARD, DataPiece, Disk, FIRST_FREE_FRAME, Guest, GuestRequest, IN, PAGE, QUEUE_ENTRIES,
    RingState, content, wait_for,
};
use rekindle_disk::control::ControlCommand;
use std::fs::OpenOptions;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;

/// Connects a guest with two running queues, both of which have served a request.
fn guest(disk: &Disk) -> Guest {
    let mut guest = Guest::connect(&disk.socket(), common::memory(), 2);
    for queue in [0, 1] {
        guest.run(queue, RingState::Empty);
        read(&mut guest, queue);
    }
    guest
}

fn read(guest: &mut Guest, queue: u16) {
    guest.add_request(queue, &GuestRequest::read(u64::from(queue), FIRST_FREE_FRAME));
    guest.kick(queue);
    let completed =
        wait_for("an answer", || Some(guest.take_completed(queue)).filter(|completed| !completed.is_empty()));
    assert!(matches!(completed[..], [CompletedRequest { status: 0, .. }]), "{completed:?}");
    assert_eq!(guest.frame(FIRST_FREE_FRAME), content(u64::from(queue), 0));
}

/// Breaks queue 0 with `damage`, and checks that everything else is served.
fn only_its_queue_stops(damage: impl FnOnce(&mut Guest), why: &str) {
    let disk = Disk::new(16);
    let mut guest = guest(&disk);
    damage(&mut guest);
    guest.kick(0);
    wait_for("the error to be reported to the front end", || guest.is_reported_broken(0).then_some(()));
    read(&mut guest, 1);
    let broken = disk.control().status().unwrap().broken;
    assert_eq!(broken.iter().map(|broken| broken.queue).collect::<Vec<_>>(), [0]);
    assert!(broken[0].why.contains(why), "{}", broken[0].why);
    // The queue stays stopped whatever the driver does; this is reported once.
    for _ in 0..3 {
        guest.add_request(0, &GuestRequest::read(1, FIRST_FREE_FRAME + 1));
        guest.kick(0);
        read(&mut guest, 1);
    }
    assert!(guest.take_completed(0).is_empty() && !guest.is_reported_broken(0) && !guest.is_reported_broken(1));
    // Queue 0 has served only the read of `guest`; queue 1 has served that one and four more.
    assert_eq!(guest.stop(0), 1, "where it was when it broke");
    assert_eq!(guest.stop(1), 5);
    assert!(disk.control().status().unwrap().broken.is_empty());
    // A restarted driver is served.
    let mut guest = self::guest(&disk);
    read(&mut guest, 0);
}

#[test]
fn an_available_index_that_is_too_far_ahead_stops_its_queue() {
    // One request was served, and then one more than the ring has entries is claimed to be available.
    only_its_queue_stops(|guest| guest.set_available(0, 1 + QUEUE_ENTRIES + 1), "64 entries");
}

#[test]
fn an_available_index_that_decreases_stops_its_queue() {
    only_its_queue_stops(|guest| guest.set_available(0, 0), "64 entries");
}

#[test]
fn a_head_that_is_no_descriptor_stops_its_queue() {
    only_its_queue_stops(
        |guest| {
            let head = guest.add_request(0, &GuestRequest::read(1, FIRST_FREE_FRAME + 1));
            guest.replace_head(0, head, QUEUE_ENTRIES);
        },
        "descriptor 64",
    );
}

#[test]
fn requests_in_progress_complete_when_their_ring_breaks() {
    let disk = Disk::new(16);
    let mut guest = guest(&disk);
    for block in 0..8 {
        guest.add_request(0, &GuestRequest::read(block, FIRST_FREE_FRAME + block));
    }
    guest.kick(0);
    let mut completed = Vec::new();
    wait_for("some to be taken", || {
        completed.extend(guest.take_completed(0));
        (!completed.is_empty()).then_some(())
    });
    guest.set_available(0, 1000);
    guest.kick(0);
    wait_for("the error to be reported to the front end", || guest.is_reported_broken(0).then_some(()));
    let base = guest.stop(0);
    completed.extend(guest.take_completed(0));
    // One more: the read of `guest`, whose answer was taken there.
    assert_eq!(completed.len() as u32 + 1, base, "each that was taken has completed");
    assert!(completed.iter().all(|completed| completed.status == 0), "{completed:?}");
}

/// Adds reads of 24 MiB each, all into the same part of the guest's memory, twice.
fn long_reads(guest: &mut Guest, count: usize) {
    for _ in 0..count {
        let piece = DataPiece::writable(FIRST_FREE_FRAME * PAGE, 12 << 20);
        guest.add_request(0, &GuestRequest { kind: IN, sector: 0, data: vec![piece, piece] });
    }
    guest.kick(0);
}

#[test]
fn a_queue_of_long_requests_stops_after_a_few_of_them() {
    let disk = Disk::with(16, |service| service.settings.limits.bps = Some(1 << 20));
    OpenOptions::new().write(true).open(&disk.image).unwrap().set_len(32 << 20).unwrap();
    disk.control().ask::<u64>(&ControlCommand::UpdateLength {}).unwrap();
    let mut guest = Guest::start(&disk.socket());
    long_reads(&mut guest, 16);
    let under_way = || disk.control().status().unwrap().requests_in_progress;
    wait_for("requests to be taken", || (under_way() > 1).then_some(()));
    assert!(under_way() <= 6, "as many as have 128 MiB");
    // The reads do not wait for the rate limit, which would take two minutes.
    let base = guest.stop(0) as u16;
    assert!((2..=7).contains(&base), "{base}");
    assert_eq!(guest.take_completed(0).len(), usize::from(base));
    disk.control().ask::<()>(&ControlCommand::SetLimits { bps: None, iops: None }).unwrap();
    guest.run_from(0, base).unwrap();
    let mut completed = usize::from(base);
    wait_for("the others to end", || {
        completed += guest.take_completed(0).len();
        (completed == 16).then_some(())
    });
}

#[test]
fn a_front_end_with_an_older_position_repeats_no_request() {
    let disk = Disk::with(16, |_| ());
    let mut guest = Guest::start(&disk.socket());
    for block in 0..3 {
        guest.write(block, FIRST_FREE_FRAME, &content(block, 1));
    }
    assert_eq!(guest.stop(0), 3);
    // The guest uses the memory of its requests for something else.
    guest.fill(FIRST_FREE_FRAME, &content(9, 9));
    guest.run_from(0, 0).unwrap();
    assert_eq!(guest.read(1, FIRST_FREE_FRAME + 1), content(1, 1));
    for block in 0..3 {
        assert_eq!(disk.block(block), content(block, 1), "block {block}");
    }
    assert_eq!(guest.stop(0), 4);
}

#[test]
fn discards_of_a_whole_large_disk_block_no_other_request() {
    let disk = Disk::with(16, |_| ());
    OpenOptions::new().write(true).open(&disk.image).unwrap().set_len(1 << 40).unwrap();
    disk.control().ask::<u64>(&ControlCommand::UpdateLength {}).unwrap();
    let mut guest = guest(&disk);
    let range = |n: u64| [(n << 21).to_le_bytes(), (1u64 << 21).to_le_bytes()].concat();
    guest.fill(FIRST_FREE_FRAME, &(0..64).flat_map(range).chain([0; 3072]).collect::<Vec<_>>());
    for _ in 0..15 {
        guest.add_request(
            0,
            &GuestRequest { kind: DISCARD, sector: 0, data: vec![DataPiece::readable(FIRST_FREE_FRAME * PAGE, 1024)] },
        );
    }
    guest.kick(0);
    let mut completed = Vec::new();
    wait_for("all to end", || {
        completed.extend(guest.take_completed(0));
        (completed.len() == 15).then_some(())
    });
    assert!(completed.iter().all(|completed| completed.status == 0), "{completed:?}");
    assert_eq!(disk.control().status().unwrap().mapped_blocks, 0);
}

#[test]
fn a_front_end_that_requests_too_much_is_rejected() {
    let disk = Disk::new(16);
    for (queues, size) in [(5, 64), (1, 1025), (u16::MAX, u16::MAX), (0, 64)] {
        let mut guest = Guest::connect(&disk.socket(), common::memory(), 1);
        let wanted = VhostUserInflight::new(0, 0, queues, size);
        assert!(guest.front.get_inflight_fd(&wanted).is_err(), "{queues} queues of {size}");
    }
    let mut guest = Guest::start(&disk.socket());
    read(&mut guest, 0);
}
