//! What a redo log must never do: merge damaged data, ignore a failed sync, or delete another program's files.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{Ask, DEADLINE, Disk, FIRST, Guest, PAGE, content, redo, wait_for};
use rekindle_disk::control::Ask as Control;
use rekindle_disk::engine::redo_log::RedoStatus;
use rekindle_disk::redo::keeper::EpochId;
use rekindle_disk::redo::offline::merge_all;
use rekindle_disk::redo::recover::DiskVersion;
use rekindle_disk::server::{Service, serve};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

const BLOCKS: u64 = 64;

fn log_status(disk: &Disk) -> Option<RedoStatus> {
    disk.control().status().unwrap().redo
}

fn begin(disk: &Disk) -> Result<EpochId, String> {
    disk.control().ask(&Control::EpochBegin {}).map_err(|e| e.to_string())
}

/// Marks an epoch, with the guest's queue stopped.
fn mark(disk: &Disk, guest: &mut Guest) -> u64 {
    guest.stop(0);
    let EpochId { epoch, .. } = disk.control().ask(&Control::EpochMark {}).unwrap();
    guest.run(0, false);
    epoch
}

fn seal(disk: &Disk, epoch: u64) -> Result<(), String> {
    disk.control().ask(&Control::EpochSeal { epoch }).map_err(|e| e.to_string())
}

fn committed(disk: &Disk, epoch: u64) {
    disk.control().ask::<()>(&Control::EpochCommitted { epoch }).unwrap();
}

fn in_directory(path: &Path) -> impl Fn(&mut Service) {
    let path = path.to_owned();
    move |service| service.redo.directory = Some(path.clone())
}

/// Creates something at a path.
type Make = fn(&Path);

#[test]
fn a_directory_with_other_files_is_rejected_and_nothing_in_it_is_deleted() {
    let mut disk = Disk::new(BLOCKS);
    let target = disk.directory.path().join("important");
    let link = disk.directory.path().join("link");
    fs::create_dir(&target).unwrap();
    symlink(&target, &link).unwrap();
    let cases: [(&str, Make); 6] = [
        ("notes.txt", |path| fs::write(path, "mine").unwrap()),
        // The names of a redo log's own files, with the content of another program.
        ("state", |path| fs::write(path, "mine").unwrap()),
        ("lock", |path| fs::write(path, "mine").unwrap()),
        ("7", |path| fs::create_dir(path).unwrap()),
        ("state", |path| symlink("/dev/null", path).unwrap()),
        ("+7.log", |path| fs::write(path, "mine").unwrap()),
    ];
    for (name, make) in cases {
        make(&target.join(name));
        for directory in [&target, &link] {
            disk.end();
            disk.serve(in_directory(directory));
            let error = begin(&disk).unwrap_err();
            assert!(error.contains(name) && error.contains("--redo"), "{name}: {error}");
            assert!(fs::symlink_metadata(target.join(name)).is_ok(), "{name} was deleted");
            assert_eq!(log_status(&disk), None);
        }
        let path = target.join(name);
        if path.is_dir() { fs::remove_dir(path).unwrap() } else { fs::remove_file(path).unwrap() }
    }
    // A link to an empty directory is as good as the directory.
    begin(&disk).unwrap();
    assert!(target.join("state").exists());
    disk.control().end_epochs(DEADLINE).unwrap();
    begin(&disk).unwrap();
    // A file that appears later survives the end of the log.
    fs::write(target.join("notes.txt"), "mine").unwrap();
    disk.control().end_epochs(DEADLINE).unwrap();
    assert_eq!(log_status(&disk), None);
    assert_eq!(fs::read(target.join("notes.txt")).unwrap(), b"mine");
    assert_eq!(fs::read_dir(&target).unwrap().count(), 1, "what was the log's has gone");
}

#[test]
fn segments_of_another_program_are_not_deleted() {
    let disk = Disk::with(BLOCKS, |_| {});
    let directory = disk.directory.path().join("disk.raw.redo");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("7.log"), "2026-11-24 a line of a log").unwrap();
    let error = begin(&disk).unwrap_err();
    assert!(error.contains("7.log"), "{error}");
    assert_eq!(fs::read(directory.join("7.log")).unwrap(), b"2026-11-24 a line of a log");
}

#[test]
fn the_remains_of_an_interrupted_begin_are_replaced() {
    let disk = Disk::new(BLOCKS);
    let directory = disk.directory.path().join("disk.raw.redo");
    fs::create_dir(&directory).unwrap();
    for left in [vec![], vec![0; 4096], vec![0; 8192]] {
        fs::write(directory.join("state"), left).unwrap();
        begin(&disk).unwrap();
        disk.control().end_epochs(DEADLINE).unwrap();
        assert!(!directory.exists());
        fs::create_dir(&directory).unwrap();
    }
}

#[test]
fn a_directory_belongs_to_one_server_or_merge_at_a_time() {
    let mut first = Disk::new(BLOCKS);
    let mut second = Disk::new(BLOCKS);
    let directory = first.directory.path().join("shared.redo");
    for disk in [&mut first, &mut second] {
        disk.end();
        disk.serve(in_directory(&directory));
    }
    let mut guest = Guest::start(&first.socket());
    begin(&first).unwrap();
    guest.write(3, FIRST, &content(3, 1));
    let error = begin(&second).unwrap_err();
    assert!(error.contains("another disk server or merge"), "{error}");
    second.end();
    let error = merge_all(&second.image, &directory, true, None).unwrap_err().to_string();
    assert!(error.contains("another disk server or merge"), "{error}");
    assert_eq!(second.block(3), content(3, 0), "nothing of the first disk's log was merged into it");
    assert_eq!(guest.read(3, FIRST + 1), content(3, 1));
    let epoch = mark(&first, &mut guest);
    seal(&first, epoch).unwrap();
    first.control().end_epochs(DEADLINE).unwrap();
    assert_eq!(first.block(3), content(3, 1));
    // It is free when the first log has ended.
    second.serve(in_directory(&directory));
    begin(&second).unwrap();
}

#[test]
fn a_commit_of_a_log_that_has_ended_does_not_count_for_the_next_log() {
    let mut disk = Disk::new(BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    let old = begin(&disk).unwrap();
    let mut last = 0;
    for version in 1..4 {
        guest.write(1, FIRST, &content(1, version));
        last = mark(&disk, &mut guest);
        seal(&disk, last).unwrap();
        committed(&disk, last);
    }
    disk.control().end_epochs(DEADLINE).unwrap();
    let new = begin(&disk).unwrap();
    assert_ne!(new.disk, old.disk);
    assert!(new.epoch > last, "epoch {} means two contents to a request that is still under way", new.epoch);
    let mut sealed = Vec::new();
    for version in 4..6 {
        guest.write(1, FIRST, &content(1, version));
        let epoch = mark(&disk, &mut guest);
        seal(&disk, epoch).unwrap();
        sealed.push(epoch);
    }
    committed(&disk, sealed[0]);
    wait_for("the merge", || log_status(&disk).filter(|status| status.merged >= sealed[0]));
    assert_eq!(log_status(&disk).unwrap().merged, sealed[0], "an epoch was merged that no checkpoint has");
    drop(guest);
    disk.end();
    disk.serve(|service| service.redo = redo(DiskVersion::Epoch { epoch: sealed[0], disk: new.disk }));
    let mut guest = Guest::start(&disk.socket());
    assert_eq!(guest.read(1, FIRST), content(1, 4));
}

#[test]
fn an_entry_with_a_wrong_checksum_is_not_merged() {
    let disk = Disk::new(BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    begin(&disk).unwrap();
    guest.write(3, FIRST, &content(3, 1));
    guest.write(5, FIRST, &content(5, 1));
    let segment = disk.directory.path().join("disk.raw.redo/1.log");
    let file = OpenOptions::new().read(true).write(true).open(&segment).unwrap();
    // The data of the first entry: after the segment's head and the entry's header.
    let mut byte = [0];
    file.read_exact_at(&mut byte, 2 * PAGE + 100).unwrap();
    file.write_all_at(&[byte[0] ^ 4], 2 * PAGE + 100).unwrap();
    file.sync_all().unwrap();
    let epoch = mark(&disk, &mut guest);
    seal(&disk, epoch).unwrap();
    committed(&disk, epoch);
    let why = wait_for("a merge that fails", || {
        let status = log_status(&disk)?;
        assert_eq!(status.merged, 0, "damaged data was merged");
        status.failed
    });
    assert!(why.contains("checksum") && why.contains("1.log"), "{why}");
    assert_eq!(disk.block(3), content(3, 0));
    assert!(segment.exists());
    file.write_all_at(&byte, 2 * PAGE + 100).unwrap();
    file.sync_all().unwrap();
    committed(&disk, epoch);
    wait_for("the merge", || log_status(&disk).filter(|status| status.merged == epoch && status.failed.is_none()));
    assert_eq!((disk.block(3), disk.block(5)), (content(3, 1), content(5, 1)));
}

#[test]
fn a_server_does_not_start_with_a_damaged_sealed_epoch() {
    let mut disk = Disk::new(BLOCKS);
    let mut guest = Guest::start(&disk.socket());
    begin(&disk).unwrap();
    guest.write(3, FIRST, &content(3, 1));
    let epoch = mark(&disk, &mut guest);
    seal(&disk, epoch).unwrap();
    drop(guest);
    disk.end();
    let segment = disk.directory.path().join("disk.raw.redo/1.log");
    let whole = fs::read(&segment).unwrap();
    let mut flipped = whole.clone();
    flipped[2 * PAGE as usize + 100] ^= 4;
    for damaged in [&flipped[..], &whole[..2 * PAGE as usize], &[]] {
        fs::write(&segment, damaged).unwrap();
        let Err(error) = serve(disk.service(), || ()) else { panic!("served with {} bytes", damaged.len()) };
        assert!(error.to_string().contains("1.log"), "{error}");
        assert_eq!(fs::read(&segment).unwrap(), damaged);
        assert_eq!(disk.block(3), content(3, 0));
    }
    fs::write(&segment, whole).unwrap();
    disk.serve(|_| {});
    let mut guest = Guest::start(&disk.socket());
    assert_eq!(guest.read(3, FIRST), content(3, 1));
}

/// A block device whose writes end in its page cache, over a file system without space: one sync fails.
struct Device {
    room: PathBuf,
    path: PathBuf,
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

impl Device {
    fn new(directory: &Path) -> Self {
        let room = directory.join("room");
        fs::create_dir(&room).unwrap();
        run("mount", &["-t", "tmpfs", "-o", "size=1m", "rekindle-test", room.to_str().unwrap()]);
        let backing = room.join("backing");
        File::create(&backing).unwrap().set_len(BLOCKS * PAGE).unwrap();
        let path = PathBuf::from(run("losetup", &["--find", "--show", backing.to_str().unwrap()]));
        Self { room, path }
    }

    fn set_full(&self, is_full: bool) {
        let junk = self.room.join("junk");
        if is_full {
            use std::io::Write;
            let mut junk = File::create(&junk).unwrap();
            while junk.write_all(&[1; 4096]).is_ok() {}
        } else {
            fs::remove_file(&junk).unwrap();
            run("mount", &["-o", "remount,size=1m", self.room.to_str().unwrap()]);
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
        let _ = Command::new("umount").arg("-l").arg(&self.room).status();
    }
}

#[test]
fn after_a_failed_sync_of_the_image_later_flushes_and_seals_fail() {
    for is_seal_first in [true, false] {
        let directory = tempfile::Builder::new().prefix("disk-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let device = Device::new(directory.path());
        let mut disk = Disk::new(1);
        disk.end();
        let serve = |disk: &mut Disk| {
            let log = disk.directory.path().join("log.redo");
            disk.serve(|service| {
                service.image = device.path.clone();
                service.mode.direct = false;
                service.redo.directory = Some(log);
            });
        };
        serve(&mut disk);
        let mut guest = Guest::start(&disk.socket());
        device.set_full(true);
        guest.write(3, FIRST, &content(3, 1));
        begin(&disk).unwrap();
        let epoch = mark(&disk, &mut guest);
        if is_seal_first {
            let error = seal(&disk, epoch).unwrap_err();
            assert!(error.contains("making it durable"), "{error}");
        } else {
            assert_eq!(guest.ask(&Ask::flush()), 1, "the flush reports the error");
        }
        device.set_full(false);
        // The kernel reports the error once; the data is lost all the same.
        assert_eq!(guest.ask(&Ask::flush()), 1, "a later flush of the guest");
        let error = seal(&disk, epoch).unwrap_err();
        assert!(error.contains("start the disk's server"), "a later seal: {error}");
        // Merging must not remove segments either.
        guest.write(4, FIRST, &content(4, 1));
        disk.control().ask::<()>(&Control::EpochEnd {}).unwrap();
        wait_for("the end to fail", || log_status(&disk)?.failed);
        assert_eq!(guest.read(4, FIRST + 1), content(4, 1));
        drop(guest);
        disk.end();
        serve(&mut disk);
        let mut guest = Guest::start(&disk.socket());
        assert_eq!(guest.read(4, FIRST + 1), content(4, 1));
        guest.write(3, FIRST, &content(3, 1));
        assert_eq!(guest.ask(&Ask::flush()), 0, "after a new start");
        disk.control().end_epochs(DEADLINE).unwrap();
        assert_eq!(guest.read(4, FIRST + 1), content(4, 1));
        drop(guest);
        disk.end();
    }
}
