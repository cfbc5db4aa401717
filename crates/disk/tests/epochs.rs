//! Epochs of a disk as a guest and its protector see them.
//!
//! An *epoch* is what a guest wrote to its disk between two checkpoints. A server keeps epochs in a *redo log* until it
//! merges them into the image. A protector, the process that takes checkpoints, marks, seals and commits them:
//! `docs/disk-epochs.md`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{
    CompletedRequest, DEADLINE, DataPiece, Disk, FIRST_FREE_FRAME, Guest, GuestRequest, IN, OUT, PAGE, RingState,
    content, log_options, wait_for,
};
use rekindle_disk::control::ControlCommand;
use rekindle_disk::engine::redo_log::RedoStatus;
use rekindle_disk::keeper::EpochId;
use rekindle_disk::redo::offline::{default_directory, inspect, merge_all};
use rekindle_disk::redo::recover::DiskVersion;
use rekindle_disk::server::{ServeError, serve};
use rustix::process::{Pid, Resource, Rlimit, prlimit, setrlimit};
use std::collections::BTreeMap;
use std::fs;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

const BLOCKS: u64 = 256;

fn redo_status(disk: &Disk) -> Option<RedoStatus> {
    disk.control().status().unwrap().redo
}

fn begin(disk: &Disk) -> EpochId {
    disk.control().ask(&ControlCommand::EpochBegin {}).unwrap()
}

/// Marks an epoch, with the guest's queues stopped.
fn mark(disk: &Disk, guest: &mut Guest) -> EpochId {
    guest.stop(0);
    let at = disk.control().ask(&ControlCommand::EpochMark {}).unwrap();
    guest.run(0, RingState::Kept);
    at
}

fn seal(disk: &Disk, epoch: u64) {
    disk.control().ask::<()>(&ControlCommand::EpochSeal { epoch }).unwrap();
}

fn commit(disk: &Disk, epoch: u64) {
    disk.control().ask::<()>(&ControlCommand::EpochCommitted { epoch }).unwrap();
    wait_for("the merge", || redo_status(disk).filter(|redo_status| redo_status.merged >= epoch));
}

fn log_directory(disk: &Disk) -> PathBuf {
    disk.directory.path().join("disk.raw.redo")
}

fn check(guest: &mut Guest, versions: &BTreeMap<u64, u64>, what: &str) {
    for block in 0..BLOCKS {
        let version = versions.get(&block).copied().unwrap_or(0);
        assert!(guest.read(block, FIRST_FREE_FRAME + block % 64) == content(block, version), "{what}: block {block}");
    }
}

fn write(guest: &mut Guest, versions: &mut BTreeMap<u64, u64>, blocks: impl Iterator<Item = u64>, version: u64) {
    for block in blocks {
        guest.write(block, FIRST_FREE_FRAME, &content(block, version));
        versions.insert(block, version);
    }
}

/// Ends the server abruptly, as a failed host would; written data remains.
fn restart(disk: &mut Disk, wanted: DiskVersion) -> Guest {
    disk.end();
    let options = log_options(wanted);
    disk.serve(|service| service.redo = options);
    Guest::start(&disk.socket())
}

#[test]
fn a_checkpoint_has_its_disk_and_the_newest_is_available_too() {
    let mut disk = Disk::new(BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    let mut newest = BTreeMap::new();
    write(&mut guest, &mut newest, 0..4, 1);
    assert!(redo_status(&disk).is_none() && !log_directory(&disk).exists());
    let new_log = begin(&disk);
    assert_eq!((begin(&disk).disk, new_log.epoch), (new_log.disk, 1), "a disk that has a log keeps it");
    write(&mut guest, &mut newest, 2..20, 2);
    check(&mut guest, &newest, "in the first epoch");
    let first = mark(&disk, &mut guest);
    assert_eq!(first, EpochId { disk: new_log.disk, epoch: 1 });
    let checkpoint = newest.clone();
    write(&mut guest, &mut newest, 10..40, 3);
    seal(&disk, 1);
    write(&mut guest, &mut newest, (0..BLOCKS).step_by(7), 4);
    check(&mut guest, &newest, "in the second epoch");
    assert_eq!(disk.block(0), content(0, 1), "the image is what it was when the log began");
    assert_eq!(disk.block(10), content(10, 0));
    // The newest disk, after a restart.
    drop(guest);
    let mut guest = restart(&mut disk, DiskVersion::Newest);
    check(&mut guest, &newest, "after a restart");
    // The checkpoint's disk. Nothing is discarded until the guest writes.
    drop(guest);
    let back = DiskVersion::Epoch { epoch: 1, disk: new_log.disk };
    let mut guest = restart(&mut disk, back);
    check(&mut guest, &checkpoint, "at the checkpoint");
    assert!(redo_status(&disk).unwrap().rewound);
    drop(guest);
    let mut guest = restart(&mut disk, DiskVersion::Newest);
    check(&mut guest, &newest, "not gone back");
    drop(guest);
    let mut guest = restart(&mut disk, back);
    let mut newest = checkpoint;
    write(&mut guest, &mut newest, 30..32, 5);
    check(&mut guest, &newest, "gone back");
    assert!(!redo_status(&disk).unwrap().rewound);
    drop(guest);
    let mut guest = restart(&mut disk, DiskVersion::Newest);
    check(&mut guest, &newest, "gone back for good");
    // After the commit it is merged, and the log is removed.
    let at = mark(&disk, &mut guest);
    seal(&disk, at.epoch);
    commit(&disk, at.epoch);
    assert_eq!(disk.block(30), content(30, 5));
    check(&mut guest, &newest, "merged");
    write(&mut guest, &mut newest, 50..60, 6);
    disk.control().end_epochs(DEADLINE).unwrap();
    assert!(!log_directory(&disk).exists());
    check(&mut guest, &newest, "without a log again");
    write(&mut guest, &mut newest, 60..61, 7);
    assert_eq!(disk.block(60), content(60, 7), "writes go to the image again");
    assert_eq!(disk.block(59), content(59, 6));
}

#[test]
fn a_mark_of_a_running_guest_and_a_commit_without_a_seal_are_rejected() {
    let disk = Disk::new(BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    let refusal = |command| disk.control().ask::<serde_json::Value>(&command).unwrap_err().to_string();
    assert!(refusal(ControlCommand::EpochMark {}).contains("no redo log"));
    assert!(refusal(ControlCommand::EpochSeal { epoch: 1 }).contains("no redo log"));
    begin(&disk);
    assert!(refusal(ControlCommand::EpochMark {}).contains("the guest runs"));
    assert!(refusal(ControlCommand::EpochSeal { epoch: 1 }).contains("has not ended"));
    guest.write(1, FIRST_FREE_FRAME, &content(1, 1));
    let at = mark(&disk, &mut guest);
    assert!(refusal(ControlCommand::EpochCommitted { epoch: at.epoch }).contains("was not sealed"));
    seal(&disk, at.epoch);
    commit(&disk, at.epoch);
    assert_eq!(disk.block(1), content(1, 1));
}

#[test]
fn another_or_a_newer_disk_is_not_served_for_a_checkpoint() {
    let mut disk = Disk::new(BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    let new_log = begin(&disk);
    for version in 1..3 {
        guest.write(1, FIRST_FREE_FRAME, &content(1, version));
        let at = mark(&disk, &mut guest);
        seal(&disk, at.epoch);
    }
    commit(&disk, 2);
    guest.write(1, FIRST_FREE_FRAME, &content(1, 3));
    drop(guest);
    disk.end();
    let refused = |epoch, of| {
        let mut service = disk.service();
        service.redo = log_options(DiskVersion::Epoch { epoch, disk: of });
        let Err(ServeError::Redo(e)) = serve(service, |_| ()) else { panic!("it is served") };
        e.to_string()
    };
    assert!(refused(1, new_log.disk).contains("the disk is newer than the checkpoint"));
    assert!(refused(2, uuid::Uuid::new_v4()).contains("it is of disk"));
    assert!(refused(9, new_log.disk).contains("never sealed"));
    // Without a server, the log can be inspected and merged.
    let left = inspect(&log_directory(&disk), u64::MAX).unwrap().unwrap();
    assert_eq!((left.disk, left.sealed, left.floor, left.writes), (new_log.disk, 2, 2, 1));
    assert_eq!(disk.block(1), content(1, 2));
    assert!(merge_all(&disk.image, &default_directory(&disk.image), true, None).unwrap().is_some());
    assert_eq!(disk.block(1), content(1, 3));
    assert_eq!(inspect(&log_directory(&disk), u64::MAX).unwrap(), None);
    assert_eq!(merge_all(&disk.image, &default_directory(&disk.image), true, None).unwrap(), None);
    assert!(refused(2, new_log.disk).contains("the disk is newer than the checkpoint"));
    disk.serve(|_| ());
}

#[test]
fn requests_of_any_shape_pass_through_the_log() {
    let mut disk = Disk::new(1024);
    let mut guest = Guest::connect(&disk.socket(), common::memory(), 1);
    guest.run(0, RingState::Empty);
    begin(&disk);
    let mut model: Vec<u8> = (0..1024).flat_map(|block| content(block, 0)).collect();
    let mut random = fastrand::Rng::with_seed(5);
    for round in 0..300 {
        let sector = random.u64(..8000);
        let sectors = random.u64(1..=if round % 10 == 0 { 180 } else { 20 });
        let at = (sector * 512) as usize..((sector + sectors) * 512) as usize;
        let range = [&sector.to_le_bytes()[..], &(sectors as u32).to_le_bytes(), &0u32.to_le_bytes()].concat();
        match random.u32(..8) {
            0 => {
                let mut page = range;
                page.resize(PAGE as usize, 0);
                guest.fill(FIRST_FREE_FRAME, &page);
                let kind = if random.bool() { 11 } else { 13 };
                assert_eq!(
                    guest.request(&GuestRequest {
                        kind,
                        sector: 0,
                        data: vec![DataPiece::readable(FIRST_FREE_FRAME * PAGE, 16)]
                    }),
                    0
                );
                model[at].fill(0);
            }
            1 => assert_eq!(guest.request(&GuestRequest::flush()), 0),
            2 => {
                let marked = mark(&disk, &mut guest);
                seal(&disk, marked.epoch);
                disk.control().ask::<()>(&ControlCommand::EpochCommitted { epoch: marked.epoch }).unwrap();
            }
            3..6 => {
                let address = FIRST_FREE_FRAME * PAGE + random.u64(..8) * 512;
                random.fill(&mut model[at.clone()]);
                guest.memory.write_all_at(&model[at.clone()], address).unwrap();
                let data = vec![DataPiece::readable(address, at.len() as u64)];
                assert_eq!(guest.request(&GuestRequest { kind: OUT, sector, data }), 0);
            }
            _ => {
                let address = FIRST_FREE_FRAME * PAGE + random.u64(..8) * 512;
                assert_eq!(
                    guest.request(&GuestRequest {
                        kind: IN,
                        sector,
                        data: vec![DataPiece::writable(address, at.len() as u64)]
                    }),
                    0
                );
                let mut got = vec![0; at.len()];
                guest.memory.read_exact_at(&mut got, address).unwrap();
                assert!(got == model[at], "round {round}: sectors {sector} and {sectors}");
            }
        }
    }
    assert!(redo_status(&disk).unwrap().epoch > 10);
    drop(guest);
    disk.end();
    merge_all(&disk.image, &log_directory(&disk), true, None).unwrap();
    assert!(fs::read(&disk.image).unwrap() == model);
    disk.serve(|_| ());
}

#[test]
fn a_full_log_holds_writes_and_loses_none() {
    let mut disk = Disk::new(BLOCKS);
    disk.end();
    disk.serve(|service| service.redo.limit = Some(256 << 10));
    let mut guest = Guest::start(&disk.socket());
    begin(&disk);
    // A write of a block takes 8 KiB in the log, a header and the data: 24 + 12 writes exceed the limit of 256 KiB.
    // They are to different blocks, so that no space can be reclaimed.
    let blocks = 0..12u64;
    let mut versions = BTreeMap::new();
    write(&mut guest, &mut versions, 100..124, 1);
    for block in blocks.clone() {
        guest.fill(FIRST_FREE_FRAME + block, &content(block, 1));
        guest.add_request(0, &GuestRequest::write(block, FIRST_FREE_FRAME + block));
    }
    guest.kick(0);
    let why = wait_for("writes that wait", || redo_status(&disk)?.waiting);
    assert!(why.contains("has reached its limit") && why.contains("no checkpoint is committed"), "{why}");
    let mut completed = guest.take_completed(0).len();
    assert!(completed < blocks.clone().count());
    // Reads do not wait.
    guest.add_request(0, &GuestRequest::read(110, FIRST_FREE_FRAME + 40));
    guest.kick(0);
    wait_for("a read", || {
        completed += guest.take_completed(0).len();
        (guest.frame(FIRST_FREE_FRAME + 40) == content(110, 1)).then_some(())
    });
    // Stopping the guest does not wait; the checkpoint then frees space.
    guest.stop(0);
    completed += guest.take_completed(0).len();
    let at: EpochId = disk.control().ask(&ControlCommand::EpochMark {}).unwrap();
    guest.run(0, RingState::Kept);
    // One more: the read.
    assert_eq!(completed, blocks.clone().count() + 1, "all of them completed before the queue stopped");
    seal(&disk, at.epoch);
    commit(&disk, at.epoch);
    versions.extend(blocks.map(|block| (block, 1)));
    write(&mut guest, &mut versions, 130..150, 2);
    assert_eq!(redo_status(&disk).unwrap().waiting, None);
    check(&mut guest, &versions, "after it was full");
}

/// Environment variable with the directory of the disk, for the server that another process runs.
const DIRECTORY_VARIABLE: &str = "REKINDLE_TEST_DISK";
/// The file size limit, until the test raises it.
const FILE_SIZE_LIMIT: u64 = 3 << 20;

#[test]
#[ignore = "run by another test"]
fn server() {
    let directory = PathBuf::from(std::env::var_os(DIRECTORY_VARIABLE).unwrap());
    // As on a full disk: the kernel does not extend files.
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default()).unwrap();
    setrlimit(Resource::Fsize, Rlimit { current: Some(FILE_SIZE_LIMIT), maximum: Some(FILE_SIZE_LIMIT * 4) }).unwrap();
    serve(common::service(&directory, &directory.join("disk.raw")), |_| ()).unwrap();
}

#[test]
fn a_full_disk_under_the_log_fails_no_write_and_loses_none() {
    let mut disk = Disk::new(BLOCKS * 4);
    disk.end();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["server", "--exact", "--ignored"]).env(DIRECTORY_VARIABLE, disk.directory.path());
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let mut guest = Guest::start(&disk.socket());
    begin(&disk);
    let mut versions = BTreeMap::new();
    // Writes of 64 KiB each, until one waits.
    let mut completed = 0;
    let mut sent = 0;
    for first in (0..BLOCKS * 4).step_by(16) {
        let frame = FIRST_FREE_FRAME + (sent % 14) * 16;
        (0..16).for_each(|of| guest.fill(frame + of, &content(first + of, 1)));
        guest.add_request(
            0,
            &GuestRequest { kind: OUT, sector: first * 8, data: vec![DataPiece::readable(frame * PAGE, 16 * PAGE)] },
        );
        guest.kick(0);
        sent += 1;
        versions.extend((first..first + 16).map(|block| (block, 1)));
        let why = wait_for("its end, or that it waits", || {
            let all = guest.take_completed(0);
            assert!(all.iter().all(|completed| completed.status == 0), "{all:?}");
            completed += all.len() as u64;
            if completed == sent { Some(None) } else { redo_status(&disk)?.waiting.map(Some) }
        });
        if let Some(why) = why {
            assert!(why.contains("no room"), "{why}");
            break;
        }
    }
    assert_eq!(sent, completed + 1, "one of them waits");
    assert!(redo_status(&disk).unwrap().bytes > FILE_SIZE_LIMIT / 2);
    // There is space again, and the writes continue without a command.
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    let more = Rlimit { current: Some(FILE_SIZE_LIMIT * 4), maximum: Some(FILE_SIZE_LIMIT * 4) };
    prlimit(Some(pid), Resource::Fsize, more).unwrap();
    let last =
        wait_for("the one that waited", || Some(guest.take_completed(0)).filter(|completed| !completed.is_empty()));
    assert!(matches!(last[..], [CompletedRequest { written: 1, status: 0, .. }]), "{last:?}");
    wait_for("the status", || redo_status(&disk).filter(|redo_status| redo_status.waiting.is_none()));
    for (block, version) in &versions {
        assert!(guest.read(*block, FIRST_FREE_FRAME + 300) == content(*block, *version), "block {block}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    disk.serve(|_| ());
}

#[test]
fn the_space_of_overwritten_entries_is_used_again() {
    let mut disk = Disk::new(BLOCKS);
    disk.end();
    disk.serve(|service| service.redo.limit = Some(512 << 10));
    let mut guest = Guest::start(&disk.socket());
    begin(&disk);
    let mut versions = BTreeMap::new();
    // 59 * 16 writes of 8 KiB in the log are 14 times the limit, in one epoch and without a flush.
    for version in 1..60 {
        write(&mut guest, &mut versions, 0..16, version);
    }
    check(&mut guest, &versions, "overwritten");
    let blocks = File::open(log_directory(&disk).join("1.log")).unwrap().metadata().unwrap();
    let used = std::os::unix::fs::MetadataExt::blocks(&blocks) * 512;
    assert!(used < 2 << 20, "{used}");
    drop(guest);
    let mut guest = restart(&mut disk, DiskVersion::Newest);
    check(&mut guest, &versions, "after a restart");
}

#[test]
fn an_unreadable_segment_is_an_error_and_never_other_data() {
    let disk = Disk::new(BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    begin(&disk);
    guest.write(3, FIRST_FREE_FRAME, &content(3, 1));
    let file = fs::OpenOptions::new().write(true).open(log_directory(&disk).join("1.log")).unwrap();
    // Only the segment's head is left.
    file.set_len(4096).unwrap();
    assert_eq!(guest.request(&GuestRequest::read(3, FIRST_FREE_FRAME + 1)), 1, "an error");
    assert_ne!(guest.frame(FIRST_FREE_FRAME + 1), content(3, 0), "not what was there before");
    assert_eq!(guest.read(4, FIRST_FREE_FRAME + 1), content(4, 0), "the rest is served as ever");
    // The merge fails, and the status has the reason.
    let at = mark(&disk, &mut guest);
    seal(&disk, at.epoch);
    disk.control().ask::<()>(&ControlCommand::EpochCommitted { epoch: at.epoch }).unwrap();
    let why = wait_for("a merge that fails", || redo_status(&disk)?.failed);
    assert!(why.contains("merging it into the image"), "{why}");
    assert_eq!(disk.block(3), content(3, 0));
}

#[test]
fn a_full_log_without_a_protector_ends() {
    let mut disk = Disk::new(BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    let new_log = begin(&disk);
    let mut versions = BTreeMap::new();
    write(&mut guest, &mut versions, 0..8, 1);
    let at = mark(&disk, &mut guest);
    seal(&disk, at.epoch);
    drop(guest);
    // The guest is restored and not protected.
    disk.end();
    disk.serve(|service| {
        service.redo = log_options(DiskVersion::Epoch { epoch: at.epoch, disk: new_log.disk });
        service.redo.limit = Some(256 << 10);
    });
    let mut guest = Guest::start(&disk.socket());
    write(&mut guest, &mut versions, 50..100, 2);
    wait_for("the log's end", || redo_status(&disk).is_none().then_some(()));
    check(&mut guest, &versions, "after its log has ended");
    assert!(!log_directory(&disk).exists());
}
