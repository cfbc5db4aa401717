//! A server that is killed at any moment under load, and its replacement: every request is done, and answered once.
//!
//! A server and its replacement share the record of requests in progress (`VHOST_USER_GET_INFLIGHT_FD`), which is in
//! memory that outlives the server: the replacement repeats the requests that are in the record. Some disks have a
//! *redo log*, files to which all writes go until they are copied to the image (`docs/disk-epochs.md`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{
    DataPiece, Disk, FIRST_FREE_FRAME, Guest, GuestRequest, IN, OUT, PAGE, RingState, content, service, wait_for,
};
use rekindle_disk::control::ControlCommand;
use rekindle_disk::keeper::EpochId;
use rekindle_disk::server::serve;
use rekindle_kernel::process::Process;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// Environment variable with the directory of the disk, for the server that another process runs.
const DIRECTORY_VARIABLE: &str = "REKINDLE_TEST_DISK";
/// Blocks of 4 KiB of the disk: enough for the 28 ranges of a round, 18 blocks apart.
const BLOCKS: u64 = 512;

#[test]
#[ignore = "run by the other test"]
fn server() {
    let directory = PathBuf::from(std::env::var_os(DIRECTORY_VARIABLE).unwrap());
    serve(service(&directory, &directory.join("disk.raw")), |_| ()).unwrap();
}

fn start(directory: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["server", "--exact", "--ignored"]).env(DIRECTORY_VARIABLE, directory);
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
}

#[test]
fn no_request_is_lost_and_none_is_answered_twice() {
    kill_repeatedly(60, LogUse::None, AfterKill::Reconnect);
}

#[test]
fn no_request_is_lost_when_another_qemu_takes_the_guest_over_right_afterwards() {
    kill_repeatedly(25, LogUse::None, AfterKill::HandOver);
}

#[test]
fn no_request_is_lost_that_is_only_in_a_log() {
    kill_repeatedly(25, LogUse::AllWrites, AfterKill::Reconnect);
}

/// Which writes go to the disk's redo log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LogUse {
    /// There is no log: the server writes to the image.
    None,
    /// The log starts before the first write, so that all writes go to it.
    AllWrites,
}

/// What happens when the next server runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AfterKill {
    /// QEMU reconnects.
    Reconnect,
    /// QEMU reconnects, and another QEMU continues the guest.
    HandOver,
}

fn kill_repeatedly(rounds: u64, log: LogUse, after_kill: AfterKill) {
    let (with_log, with_hand_over) = (log == LogUse::AllWrites, after_kill == AfterKill::HandOver);
    let mut disk = Disk::new(BLOCKS);
    if with_log {
        // Later servers have the log, too.
        disk.control().ask::<EpochId>(&ControlCommand::EpochBegin {}).unwrap();
    }
    disk.end();
    let directory = disk.directory.path().to_owned();
    let mut child = start(&directory);
    let mut guest = Guest::connect(&disk.socket(), common::memory(), 2);
    guest.track();
    guest.run(0, RingState::Empty);
    guest.run(1, RingState::Empty);
    let mut versions = vec![0u64; BLOCKS as usize];
    let mut random = fastrand::Rng::with_seed(1);
    let mut unanswered = 0;
    for round in 1..=rounds {
        // Writes of long ranges, which take some time, with reads in between.
        let mut reads = Vec::new();
        for queue in [0, 1] {
            // 14 requests and a flush in each of two queues: 30 requests in a round. A request has 16 blocks. The
            // ranges are 18 blocks apart on the disk and 40 frames (pages) apart in memory, so that none of them
            // overlap.
            for n in 0..14u64 {
                let block = (u64::from(queue) * 14 + n) * 18;
                let frame = FIRST_FREE_FRAME + (u64::from(queue) * 14 + n) * 40;
                // Each third request is a read, of blocks that no round writes.
                if n % 3 == 2 {
                    let data = vec![DataPiece::writable(frame * PAGE, 16 * PAGE)];
                    // A block has 8 sectors of 512 bytes.
                    guest.add_request(queue, &GuestRequest { kind: IN, sector: block * 8, data });
                    reads.push((block, frame));
                } else {
                    for of in 0..16 {
                        guest.fill(frame + of, &content(block + of, round));
                        versions[(block + of) as usize] = round;
                    }
                    let data = vec![DataPiece::readable(frame * PAGE, 16 * PAGE)];
                    guest.add_request(queue, &GuestRequest { kind: OUT, sector: block * 8, data });
                }
            }
            guest.add_request(queue, &GuestRequest::flush());
        }
        guest.kick(0);
        guest.kick(1);
        // Not a wait for a condition: the server is killed at a random moment of the next 3 ms.
        sleep(Duration::from_micros(random.u64(..3000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut completed: Vec<_> = [0, 1].into_iter().flat_map(|queue| guest.take_completed(queue)).collect();
        unanswered += 30 - completed.len();
        child = start(&directory);
        guest.reconnect(&disk.socket());
        if with_hand_over {
            // QEMU does not migrate the record of requests in progress: the destination has its own, which is empty.
            let bases = [0, 1].map(|queue| guest.stop(queue));
            let mut destination = Guest::connect(&disk.socket(), guest.memory.try_clone().unwrap(), 2);
            destination.continue_from(&guest);
            guest = destination;
            guest.track();
            for (queue, base) in (0..).zip(bases) {
                guest.run_from(queue, base as u16).unwrap();
            }
        }
        wait_for("all requests", || {
            // `take_completed` fails on a request that is answered twice.
            completed.extend([0, 1].into_iter().flat_map(|queue| guest.take_completed(queue)));
            (completed.len() == 30).then_some(())
        });
        assert!(completed.iter().all(|completed| completed.status == 0), "{completed:?}");
        for (block, frame) in reads {
            for of in 0..16 {
                assert!(guest.frame(frame + of) == content(block + of, versions[(block + of) as usize]));
            }
        }
        for first in (0..BLOCKS).step_by(16) {
            // Beyond the frames of the requests, which end before 28 * 40.
            let frame = FIRST_FREE_FRAME + 2000;
            // With a log, the image may not have the newest content: the guest reads the disk through the server.
            if with_log {
                let data = vec![DataPiece::writable(frame * PAGE, 16 * PAGE)];
                assert_eq!(guest.request(&GuestRequest { kind: IN, sector: first * 8, data }), 0);
            }
            for (block, frame) in (first..first + 16).zip(frame..) {
                let found = if with_log { guest.frame(frame) } else { disk.block(block) };
                assert!(found == content(block, versions[block as usize]), "block {block} in round {round}");
            }
        }
    }
    // The test has no value if the requests are usually done before the server is killed.
    assert!(unanswered as u64 > rounds / 2, "it was hardly ever killed with requests under way: {unanswered}");
    child.kill().unwrap();
    child.wait().unwrap();
    // The disk's own server, which ended at the beginning, opens the disk again.
    disk.serve(|_| ());
}

#[test]
fn no_notification_is_lost_while_the_server_is_stopped_and_another_front_end_goes() {
    let mut disk = Disk::new(BLOCKS);
    disk.end();
    let mut child = start(disk.directory.path());
    let server = Process::of(child.id()).unwrap();
    let mut guest = Guest::connect(&disk.socket(), common::memory(), 1);
    guest.track();
    guest.run(0, RingState::Empty);
    let mut random = fastrand::Rng::with_seed(2);
    for round in 0..200u64 {
        let other = Guest::connect(&disk.socket(), guest.memory.try_clone().unwrap(), 1);
        let is_early = random.bool();
        if is_early {
            guest.add_request(0, &GuestRequest::read(round, FIRST_FREE_FRAME));
            guest.kick(0);
        }
        assert!(server.stop_fully(Duration::from_secs(10)).unwrap());
        if !is_early {
            guest.add_request(0, &GuestRequest::read(round, FIRST_FREE_FRAME));
            guest.kick(0);
        }
        drop(other);
        server.resume().unwrap();
        let completed = guest.wait_completed(0);
        assert!(completed.len() == 1 && completed[0].status == 0, "round {round}: {completed:?}");
        assert!(guest.frame(FIRST_FREE_FRAME) == disk.block(round), "round {round}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    disk.serve(|_| ());
}
