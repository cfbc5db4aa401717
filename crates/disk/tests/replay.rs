//! Requests in progress of a front end (a QEMU, as the server's client) that has disconnected.
//!
//! They are recorded in memory that outlives the connection and the server, from which the next front end continues. A
//! *redo log* is where a server writes what a protected guest writes, until a checkpoint is committed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{Disk, FIRST_FREE_FRAME, Guest, GuestRequest, RingState, content, wait_for};
use rekindle_disk::control::ControlCommand;
use rekindle_disk::keeper::EpochId;
use rekindle_disk::limit::Limits;

const REQUESTS: u64 = 12;

/// A QEMU reconnects with requests in progress, and is stopped before any of them is done again. Another QEMU, with
/// an empty record of requests in progress, then continues the guest.
#[test]
fn a_queue_stops_after_all_requests_taken_before_are_done() {
    // Slow enough that requests are in progress when the connection breaks.
    let limits = Limits { bps: None, iops: Some(20) };
    let disk = Disk::with(64, |service| service.settings.limits = limits);
    let status = || disk.control().status().unwrap();
    let mut first = Guest::connect(&disk.socket(), common::memory(), 1);
    first.track();
    first.run(0, RingState::Empty);
    for block in 0..REQUESTS {
        first.fill(FIRST_FREE_FRAME + block, &content(block, 1));
        first.add_request(0, &GuestRequest::write(block, FIRST_FREE_FRAME + block));
    }
    first.kick(0);
    // Some are taken: more than 4 of the 12.
    wait_for("requests to be taken", || (status().requests_in_progress > 4).then_some(()));
    // The first front end's connection breaks. Its requests are still done, and no request of the next front end
    // starts before.
    let (about, memory) = first.inflight.take().unwrap();
    let mut second = Guest::connect(&disk.socket(), first.memory.try_clone().unwrap(), 1);
    second.continue_from(&first);
    drop(first);
    wait_for("the first front end to have gone", || (status().connected == 1).then_some(()));
    second.inflight = Some((about, memory));
    second.track();
    second.run(0, RingState::Kept);
    assert!(status().requests_in_progress > 0, "the first one's requests were to be under way");
    let base = second.stop(0) as u16;
    assert_eq!(u64::from(base), REQUESTS, "all were in the ring");
    let mut third = Guest::connect(&disk.socket(), second.memory.try_clone().unwrap(), 1);
    third.continue_from(&second);
    drop(second);
    third.track();
    third.run_from(0, base).unwrap();
    let mut completed = Vec::new();
    wait_for("every request to end", || {
        // Fails on a request that is answered twice.
        completed.extend(third.take_completed(0));
        (completed.len() as u64 == REQUESTS).then_some(())
    });
    assert!(completed.iter().all(|completed| completed.status == 0), "{completed:?}");
    // Requests that are done again do not overwrite later writes.
    third.write(0, FIRST_FREE_FRAME, &content(0, 2));
    third.stop(0);
    wait_for("nothing to be under way", || (status().requests_in_progress == 0).then_some(()));
    for block in 0..REQUESTS {
        assert_eq!(disk.block(block), content(block, if block == 0 { 2 } else { 1 }), "block {block}");
    }
}

/// Without a commit the log is full and writes wait. Their QEMU is killed then.
#[test]
fn writes_that_wait_for_space_in_the_log_do_not_block_others_when_their_qemu_has_disconnected() {
    // A write of a block takes 8 KiB in the log (header and data), so 256 of them exceed the limit of 1 MiB.
    let mut disk = Disk::with(256, |service| service.redo.limit = Some(1 << 20));
    disk.control().ask::<EpochId>(&ControlCommand::EpochBegin {}).unwrap();
    let is_waiting = |disk: &Disk| disk.control().status().unwrap().redo.is_some_and(|redo| redo.waiting.is_some());
    for last in [false, true] {
        let mut guest = Guest::start(&disk.socket());
        let mut block = 0;
        wait_for("a write to wait", || {
            // Each write is to another block: overwritten space would be reclaimed.
            while block < 256 && guest.requests_in_progress() < 8 {
                guest.add_request(0, &GuestRequest::write(block, FIRST_FREE_FRAME + block));
                block += 1;
            }
            guest.kick(0);
            drop(guest.take_completed(0));
            (is_waiting(&disk) || block == 256).then_some(())
        });
        if last {
            // The server ends, and waits only for the disk.
            disk.end();
            return;
        }
        assert!(is_waiting(&disk), "the log was to be full");
        drop(guest);
        wait_for("all to end", || (disk.control().status().unwrap().requests_in_progress == 0).then_some(()));
        let mut next = Guest::start(&disk.socket());
        next.read(255, FIRST_FREE_FRAME);
    }
}
