//! Errors that a redo log must never make: merging damaged data, ignoring a failed sync, or deleting another
//! program's files.
//!
//! The *redo log* has the writes of a protected guest until they are *merged*: copied to the image. Each *epoch*, the
//! time between two checkpoints, has a file in it, a *segment*. To *seal* an epoch is to make it durable
//! (`docs/disk-epochs.md`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{DEADLINE, Disk, FIRST_FREE_FRAME, Guest, GuestRequest, PAGE, RingState, content, log_options, wait_for};
use rekindle_disk::control::ControlCommand;
use rekindle_disk::engine::redo_log::RedoStatus;
use rekindle_disk::keeper::EpochId;
use rekindle_disk::redo::offline::merge_all;
use rekindle_disk::redo::recover::DiskVersion;
use rekindle_disk::server::{Service, serve};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Blocks of each disk.
const DISK_BLOCKS: u64 = 64;
/// The guest's pages for its requests.
const WRITE_FRAME: u64 = FIRST_FREE_FRAME;
const READ_FRAME: u64 = FIRST_FREE_FRAME + 1;
/// The first segment of a log, in the disk's directory.
const FIRST_SEGMENT: &str = "disk.raw.redo/1.log";
/// A byte in the data of the segment's first entry: after the segment's head and the entry's header, which take a page
/// each.
const DATA_BYTE: u64 = 2 * PAGE + 100;

fn log_status(disk: &Disk) -> Option<RedoStatus> {
    disk.control().status().unwrap().redo
}

fn begin_log(disk: &Disk) -> Result<EpochId, String> {
    disk.control().ask(&ControlCommand::EpochBegin {}).map_err(|e| e.to_string())
}

/// Merges and removes the log, and waits until that is done.
fn end_log(disk: &Disk) {
    disk.control().end_epochs(DEADLINE).unwrap();
}

/// Ends the current epoch, with the guest's queue stopped, and returns its number.
fn mark_epoch(disk: &Disk, guest: &mut Guest) -> u64 {
    guest.stop(0);
    let EpochId { epoch, .. } = disk.control().ask(&ControlCommand::EpochMark {}).unwrap();
    guest.run(0, RingState::Kept);
    epoch
}

fn seal_epoch(disk: &Disk, epoch: u64) -> Result<(), String> {
    disk.control().ask(&ControlCommand::EpochSeal { epoch }).map_err(|e| e.to_string())
}

fn mark_and_seal(disk: &Disk, guest: &mut Guest) -> u64 {
    let epoch = mark_epoch(disk, guest);
    seal_epoch(disk, epoch).unwrap();
    epoch
}

/// Reports that a checkpoint with this epoch is committed, so that the epoch may be merged.
fn report_commit(disk: &Disk, epoch: u64) {
    disk.control().ask::<()>(&ControlCommand::EpochCommitted { epoch }).unwrap();
}

/// Writes a block as the guest.
fn write(guest: &mut Guest, block: u64, version: u64) {
    guest.write(block, WRITE_FRAME, &content(block, version));
}

/// Reads a block as the guest, and checks which version it has.
#[track_caller]
fn assert_reads(guest: &mut Guest, block: u64, version: u64) {
    assert_eq!(guest.read(block, READ_FRAME), content(block, version), "block {block}");
}

/// Restarts the server with its log in `directory`.
fn serve_with_log_in(disk: &mut Disk, directory: &Path) {
    disk.end();
    disk.serve(|service: &mut Service| service.redo.directory = Some(directory.to_owned()));
}

/// A file that another program has put into the directory of the log.
struct ForeignFile {
    name: &'static str,
    create: fn(&Path),
}

const FOREIGN_FILES: [ForeignFile; 6] = [
    ForeignFile { name: "notes.txt", create: |path| fs::write(path, "mine").unwrap() },
    // The names of a redo log's own files, with the content of another program.
    ForeignFile { name: "state", create: |path| fs::write(path, "mine").unwrap() },
    ForeignFile { name: "lock", create: |path| fs::write(path, "mine").unwrap() },
    ForeignFile { name: "7", create: |path| fs::create_dir(path).unwrap() },
    ForeignFile { name: "state", create: |path| symlink("/dev/null", path).unwrap() },
    ForeignFile { name: "+7.log", create: |path| fs::write(path, "mine").unwrap() },
];

#[test]
fn a_directory_with_other_files_is_rejected_and_nothing_in_it_is_deleted() {
    let mut disk = Disk::new(DISK_BLOCKS);
    let directory = disk.directory.path().join("important");
    let link = disk.directory.path().join("link");
    fs::create_dir(&directory).unwrap();
    symlink(&directory, &link).unwrap();
    for ForeignFile { name, create } in FOREIGN_FILES {
        let path = directory.join(name);
        create(&path);
        for log_directory in [&directory, &link] {
            serve_with_log_in(&mut disk, log_directory);
            let error = begin_log(&disk).unwrap_err();
            assert!(error.contains(name) && error.contains("--redo"), "{name}: {error}");
            assert!(fs::symlink_metadata(&path).is_ok(), "{name} was deleted");
            assert_eq!(log_status(&disk), None);
        }
        if path.is_dir() { fs::remove_dir(path).unwrap() } else { fs::remove_file(path).unwrap() }
    }
    // A link to an empty directory is used like the directory.
    begin_log(&disk).unwrap();
    assert!(directory.join("state").exists());
    end_log(&disk);
    begin_log(&disk).unwrap();
    // A file that appears later survives the end of the log.
    fs::write(directory.join("notes.txt"), "mine").unwrap();
    end_log(&disk);
    assert_eq!(log_status(&disk), None);
    assert_eq!(fs::read(directory.join("notes.txt")).unwrap(), b"mine");
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "what was the log's has gone");
}

#[test]
fn segments_of_another_program_are_not_deleted() {
    let disk = Disk::new(DISK_BLOCKS);
    let directory = disk.directory.path().join("disk.raw.redo");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("7.log"), "2026-11-24 a line of a log").unwrap();
    let error = begin_log(&disk).unwrap_err();
    assert!(error.contains("7.log"), "{error}");
    assert_eq!(fs::read(directory.join("7.log")).unwrap(), b"2026-11-24 a line of a log");
}

#[test]
fn the_remains_of_an_interrupted_begin_are_replaced() {
    let disk = Disk::new(DISK_BLOCKS);
    let directory = disk.directory.path().join("disk.raw.redo");
    fs::create_dir(&directory).unwrap();
    for unfinished_state in [vec![], vec![0; 4096], vec![0; 8192]] {
        fs::write(directory.join("state"), unfinished_state).unwrap();
        begin_log(&disk).unwrap();
        end_log(&disk);
        assert!(!directory.exists());
        fs::create_dir(&directory).unwrap();
    }
}

#[test]
fn a_directory_belongs_to_one_server_or_merge_at_a_time() {
    let mut owner = Disk::new(DISK_BLOCKS);
    let mut other = Disk::new(DISK_BLOCKS);
    let directory = owner.directory.path().join("shared.redo");
    serve_with_log_in(&mut owner, &directory);
    serve_with_log_in(&mut other, &directory);
    let mut guest = Guest::start(&owner.socket());
    begin_log(&owner).unwrap();
    write(&mut guest, 3, 1);
    let error = begin_log(&other).unwrap_err();
    assert!(error.contains("another disk server or merge"), "{error}");
    other.end();
    let error = merge_all(&other.image, &directory, true, None).unwrap_err().to_string();
    assert!(error.contains("another disk server or merge"), "{error}");
    assert_eq!(other.block(3), content(3, 0), "nothing of the first disk's log was merged into it");
    assert_reads(&mut guest, 3, 1);
    mark_and_seal(&owner, &mut guest);
    end_log(&owner);
    assert_eq!(owner.block(3), content(3, 1));
    // The directory is free when the first log has ended.
    other.serve(|service: &mut Service| service.redo.directory = Some(directory.clone()));
    begin_log(&other).unwrap();
}

#[test]
fn a_commit_of_a_log_that_has_ended_does_not_count_for_the_next_log() {
    let mut disk = Disk::new(DISK_BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    let ended_log = begin_log(&disk).unwrap();
    let mut last_of_ended_log = 0;
    for version in 1..4 {
        write(&mut guest, 1, version);
        last_of_ended_log = mark_and_seal(&disk, &mut guest);
        report_commit(&disk, last_of_ended_log);
    }
    end_log(&disk);
    let next_log = begin_log(&disk).unwrap();
    assert_ne!(next_log.disk, ended_log.disk);
    let first_epoch = next_log.epoch;
    assert!(
        first_epoch > last_of_ended_log,
        "epoch {first_epoch} means two contents to a request that is still under way"
    );
    write(&mut guest, 1, 4);
    let committed = mark_and_seal(&disk, &mut guest);
    write(&mut guest, 1, 5);
    mark_and_seal(&disk, &mut guest);
    report_commit(&disk, committed);
    wait_for("the merge", || log_status(&disk).filter(|status| status.merged >= committed));
    assert_eq!(log_status(&disk).unwrap().merged, committed, "an epoch was merged that no checkpoint has");
    drop(guest);
    disk.end();
    disk.serve(|service| service.redo = log_options(DiskVersion::Epoch { epoch: committed, disk: next_log.disk }));
    let mut guest = Guest::start(&disk.socket());
    assert_reads(&mut guest, 1, 4);
}

#[test]
fn an_entry_with_a_wrong_checksum_is_not_merged() {
    let disk = Disk::new(DISK_BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    begin_log(&disk).unwrap();
    write(&mut guest, 3, 1);
    write(&mut guest, 5, 1);
    let segment = disk.directory.path().join(FIRST_SEGMENT);
    let file = OpenOptions::new().read(true).write(true).open(&segment).unwrap();
    let mut right_byte = [0];
    file.read_exact_at(&mut right_byte, DATA_BYTE).unwrap();
    let set_byte = |byte: u8| {
        file.write_all_at(&[byte], DATA_BYTE).unwrap();
        file.sync_all().unwrap();
    };
    set_byte(right_byte[0] ^ 4);
    let epoch = mark_and_seal(&disk, &mut guest);
    report_commit(&disk, epoch);
    let why = wait_for("a merge that fails", || {
        let status = log_status(&disk)?;
        assert_eq!(status.merged, 0, "damaged data was merged");
        status.failed
    });
    assert!(why.contains("checksum") && why.contains("1.log"), "{why}");
    assert_eq!(disk.block(3), content(3, 0));
    assert!(segment.exists());
    set_byte(right_byte[0]);
    report_commit(&disk, epoch);
    wait_for("the merge", || log_status(&disk).filter(|status| status.merged == epoch && status.failed.is_none()));
    assert_eq!((disk.block(3), disk.block(5)), (content(3, 1), content(5, 1)));
}

#[test]
fn a_server_does_not_start_with_a_damaged_sealed_epoch() {
    let mut disk = Disk::new(DISK_BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    begin_log(&disk).unwrap();
    write(&mut guest, 3, 1);
    mark_and_seal(&disk, &mut guest);
    drop(guest);
    disk.end();
    let segment = disk.directory.path().join(FIRST_SEGMENT);
    let undamaged = fs::read(&segment).unwrap();
    let mut flipped = undamaged.clone();
    flipped[DATA_BYTE as usize] ^= 4;
    let truncated = &undamaged[..2 * PAGE as usize];
    for damaged in [&flipped[..], truncated, &[]] {
        fs::write(&segment, damaged).unwrap();
        let Err(error) = serve(disk.service(), |_| ()) else { panic!("served with {} bytes", damaged.len()) };
        assert!(error.to_string().contains("1.log"), "{error}");
        assert_eq!(fs::read(&segment).unwrap(), damaged);
        assert_eq!(disk.block(3), content(3, 0));
    }
    fs::write(&segment, undamaged).unwrap();
    disk.serve(|_| {});
    let mut guest = Guest::start(&disk.socket());
    assert_reads(&mut guest, 3, 1);
}

fn run_program(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A block device whose writes end in its page cache, over a file system that can be filled so that a sync fails.
struct LoopDevice {
    mount_point: PathBuf,
    path: PathBuf,
}

impl LoopDevice {
    fn new(directory: &Path) -> Self {
        let mount_point = directory.join("room");
        fs::create_dir(&mount_point).unwrap();
        run_program("mount", &["-t", "tmpfs", "-o", "size=1m", "rekindle-test", mount_point.to_str().unwrap()]);
        let backing = mount_point.join("backing");
        File::create(&backing).unwrap().set_len(DISK_BLOCKS * PAGE).unwrap();
        let path = PathBuf::from(run_program("losetup", &["--find", "--show", backing.to_str().unwrap()]));
        Self { mount_point, path }
    }

    fn filler(&self) -> PathBuf {
        self.mount_point.join("junk")
    }

    /// Takes all space of the file system.
    fn fill(&self) {
        use std::io::Write;
        let mut filler = File::create(self.filler()).unwrap();
        while filler.write_all(&[1; 4096]).is_ok() {}
    }

    fn free(&self) {
        fs::remove_file(self.filler()).unwrap();
        run_program("mount", &["-o", "remount,size=1m", self.mount_point.to_str().unwrap()]);
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
        let _ = Command::new("umount").arg("-l").arg(&self.mount_point).status();
    }
}

fn serve_device(disk: &mut Disk, device: &LoopDevice) {
    let log = disk.directory.path().join("log.redo");
    disk.serve(|service| {
        service.image = device.path.clone();
        service.mode.direct = false;
        service.redo.directory = Some(log);
    });
}

/// The sync that receives the error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FailingSync {
    Seal,
    Flush,
}

#[test]
fn after_a_failed_sync_of_the_image_later_flushes_and_seals_fail() {
    for failing in [FailingSync::Seal, FailingSync::Flush] {
        let directory = tempfile::Builder::new().prefix("disk-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let device = LoopDevice::new(directory.path());
        let mut disk = Disk::new(1);
        disk.end();
        serve_device(&mut disk, &device);
        let mut guest = Guest::start(&disk.socket());
        device.fill();
        write(&mut guest, 3, 1);
        begin_log(&disk).unwrap();
        let epoch = mark_epoch(&disk, &mut guest);
        match failing {
            FailingSync::Seal => {
                let error = seal_epoch(&disk, epoch).unwrap_err();
                assert!(error.contains("making it durable"), "{error}");
            }
            FailingSync::Flush => assert_eq!(guest.request(&GuestRequest::flush()), 1, "the flush reports the error"),
        }
        device.free();
        // The kernel reports the error once; the data is lost all the same.
        assert_eq!(guest.request(&GuestRequest::flush()), 1, "a later flush of the guest");
        let error = seal_epoch(&disk, epoch).unwrap_err();
        assert!(error.contains("start the disk's server"), "a later seal: {error}");
        // Merging must not remove segments either.
        write(&mut guest, 4, 1);
        disk.control().ask::<()>(&ControlCommand::EpochEnd {}).unwrap();
        wait_for("the end to fail", || log_status(&disk)?.failed);
        assert_reads(&mut guest, 4, 1);
        drop(guest);
        disk.end();
        check_after_restart(&mut disk, &device);
    }
}

/// Checks that after a new start of the server nothing of the log is missing, and that writes can be made durable.
fn check_after_restart(disk: &mut Disk, device: &LoopDevice) {
    serve_device(disk, device);
    let mut guest = Guest::start(&disk.socket());
    assert_reads(&mut guest, 4, 1);
    write(&mut guest, 3, 1);
    assert_eq!(guest.request(&GuestRequest::flush()), 0, "after a new start");
    end_log(disk);
    assert_reads(&mut guest, 4, 1);
    drop(guest);
    disk.end();
}
