//! Block devices that fail during a guest's requests and recover: the device of the disk, and the device of its redo
//! log.

use crate::common::device::{Device, Tmpfs, run};
use crate::common::guest::Guest;
use crate::common::protector::{Protector, crash, restore, store};
use crate::common::served::{BLOCK, BLOCKS, digest, image, kill_server, read, section, server, status};
use crate::common::{DEADLINE, Lab, wait_for};
use std::fs;
use std::path::Path;
use std::thread;

/// Number of blocks that a truncated device keeps.
const KEPT: u64 = BLOCKS / 2;

/// Asserts that a command of the guest fails.
#[track_caller]
fn assert_fails(guest: &Guest<'_>, command: &str) {
    let reply = guest.try_ask(command).unwrap();
    assert!(reply.starts_with("error"), "`{command}`: {reply}");
}

/// Sends a command as [`Guest::ask`] does, but first waits for the end of the previous command.
#[track_caller]
fn ask(guest: &Guest<'_>, command: &str) -> String {
    let reply = wait_for("the guest to be free", DEADLINE, || {
        guest.try_ask(command).ok().filter(|reply| !reply.contains("busy"))
    });
    reply.strip_prefix("ok").unwrap_or_else(|| panic!("`{command}`: {reply}")).trim().to_owned()
}

/// Asserts that the guest reads the content of the device.
#[track_caller]
fn assert_content(guest: &Guest<'_>, device: &Device) {
    ask(guest, "drop-caches");
    assert_eq!(ask(guest, &format!("read vda 0 {BLOCKS}")), digest(&device.backing, 0, BLOCKS));
}

/// Simulates a crash of the host: kills QEMU, the disk server and the protector.
fn crash_host(guest: &Guest<'_>, protector: Protector) {
    kill_server(guest);
    crash(guest);
    protector.kill();
}

#[test]
fn a_failing_device_causes_errors_in_the_guest_only_for_the_failing_blocks() {
    let lab = Lab::new();
    let (small, original) = (Tmpfs::new(&lab, "small", 18), image(&lab, "disk.raw"));
    let mut device = Device::copy_of(&small, &original);
    let guest = lab.vm("fails").section(&section(&device.path, "")).boot(&[]);
    let (boot, served_by) = (guest.boot_id(), server(&guest));
    assert_content(&guest, &device);
    // The second half cannot be read. Because the tmpfs is full, it cannot be written either.
    device.truncate(KEPT * BLOCK, false);
    small.fill();
    ask(&guest, "drop-caches");
    assert_fails(&guest, "read vda 3000 16");
    assert_fails(&guest, "write vda 3000 16 1");
    // One request crosses the boundary, so a part of it could succeed.
    assert_fails(&guest, &format!("read vda {} 4", KEPT - 2));
    assert_eq!(read(&guest, 0, KEPT), digest(&device.backing, 0, KEPT), "the other blocks can be read");
    ask(&guest, "write vda 10 16 2");
    let status = status(&guest);
    assert!(status.active && status.requests_in_progress == 0, "{status:?}");
    // Repair the device.
    small.empty();
    device.repair();
    assert_content(&guest, &device);
    ask(&guest, "write vda 3000 16 3");
    assert_content(&guest, &device);
    assert_eq!((guest.boot_id(), server(&guest)), (boot, served_by));
    // The cache that a reboot retains matches the device, also where a write has failed.
    device.truncate(KEPT * BLOCK, false);
    small.fill();
    assert_fails(&guest, "write vda 3000 32 4");
    small.empty();
    device.repair();
    guest.lab.rekindle(["reboot", &guest.name]).ok();
    guest.wait_ready();
    assert_content(&guest, &device);
    guest.assert_sound();
}

#[test]
fn a_failing_device_under_a_redo_log_fails_reads_and_is_merged_into_after_its_repair() {
    let lab = Lab::new();
    let (small, original) = (Tmpfs::new(&lab, "small", 18), image(&lab, "disk.raw"));
    let redo = lab.path("redo");
    fs::create_dir(&redo).unwrap();
    let mut device = Device::copy_of(&small, &original);
    let guest = lab.vm("logged").section(&section(&device.path, &format!("redo = {redo:?}\n"))).boot(&[]);
    let store = store(&lab, "logged");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms"]);
    protector.next_checkpoint();
    assert!(redo.join("logged.disk0.redo").join("state").exists(), "the redo log is in the configured directory");
    device.truncate(KEPT * BLOCK, false);
    small.fill();
    ask(&guest, "drop-caches");
    assert_fails(&guest, "read vda 3000 16");
    // Writes go to the redo log and are read from there. They cannot be merged yet.
    ask(&guest, "write vda 3100 16 5");
    ask(&guest, "drop-caches");
    let written = ask(&guest, "read vda 3100 16");
    let redo_status = |guest: &Guest<'_>| status(guest).redo.expect("a log");
    wait_for("a merge that fails", DEADLINE, || {
        protector.next_checkpoint();
        redo_status(&guest).failed
    });
    assert_fails(&guest, "read vda 3000 16");
    assert_eq!(ask(&guest, "read vda 3100 16"), written);
    small.empty();
    device.repair();
    wait_for("the merge", DEADLINE, || {
        protector.next_checkpoint();
        (redo_status(&guest).failed.is_none() && digest(&device.backing, 3100, 16) == written).then_some(())
    });
    assert_eq!(ask(&guest, "read vda 3000 16"), digest(&original, 3000, 16));
    // After a crash, `run`, `restore` and `run --newest-disk` all find the redo log.
    ask(&guest, "write vda 0 64 6");
    protector.next_checkpoint();
    protector.next_checkpoint();
    crash_host(&guest, protector);
    let definition = lab.path("logged.toml");
    let definition = definition.to_str().unwrap();
    lab.rekindle(["run", definition]).status(1).prints(&["disk0", "rekindle restore", "--newest-disk"]);
    restore(&guest, &store, &[]);
    ask(&guest, "write vda 64 64 7");
    let newest = ask(&guest, &format!("read vda 0 {BLOCKS}"));
    ask(&guest, "drop-caches");
    assert_eq!(ask(&guest, &format!("read vda 0 {BLOCKS}")), newest, "memory and disk agree");
    kill_server(&guest);
    crash(&guest);
    lab.rekindle(["run", definition, "--newest-disk"]).ok();
    guest.wait_ready();
    assert_eq!(ask(&guest, &format!("read vda 0 {BLOCKS}")), newest);
    assert_content(&guest, &device);
    let log = redo.join("logged.disk0.redo");
    assert!(!log.exists(), "the redo log is removed");
    guest.assert_sound();
    guest.rekindle(&["stop", "--now"]).ok();
    assert_eq!(fs::read_dir(&redo).unwrap().count(), 0, "its server keeps no directory for the next log");
}

/// A mounted ext4 file system, unmounted on drop. It has no journal: a journal would abort at the first error.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn a_failing_device_of_a_redo_log_causes_errors_in_the_guest_and_loses_no_write() {
    let lab = Lab::new();
    let small = Tmpfs::new(&lab, "small", 140);
    let empty = lab.path("empty.raw");
    fs::File::create(&empty).unwrap().set_len(128 << 20).unwrap();
    let mut device = Device::copy_of(&small, &empty);
    run("mkfs.ext4", &["-q", "-O", "^has_journal", "-E", "lazy_itable_init=0", device.path.to_str().unwrap()]);
    let redo = lab.path("redo");
    fs::create_dir(&redo).unwrap();
    run("mount", &[device.path.to_str().unwrap(), redo.to_str().unwrap()]);
    let mounted = Mounted(&redo);
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("broken").section(&section(&path, &format!("redo = {redo:?}\n"))).boot(&[]);
    let store = store(&lab, "broken");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "1000s"]);
    protector.next_checkpoint();
    ask(&guest, "write vda 0 64 1");
    ask(&guest, "drop-caches");
    let before = read(&guest, 0, 64);
    device.truncate(1 << 20, true);
    assert_fails(&guest, "write vda 200 64 2");
    ask(&guest, "drop-caches");
    assert_fails(&guest, "read vda 0 64");
    assert_eq!(read(&guest, 1000, 64), digest(&path, 1000, 64), "blocks of the image can be read");
    device.repair();
    ask(&guest, "drop-caches");
    assert_eq!(ask(&guest, "read vda 0 64"), before, "earlier writes are kept");
    protector.kill();
    ask(&guest, "write vda 300 64 3");
    let newest = ask(&guest, "read vda 300 64");
    // A flush has failed, so it is unknown which part of the segment is durable. Only a merge fixes that, because it
    // reads the whole segment.
    lab.rekindle(["disk", "merge", guest.file("disk-disk0.control").to_str().unwrap()]).ok();
    assert_eq!((digest(&path, 0, 64), digest(&path, 300, 64)), (before, newest));
    guest.assert_sound();
    guest.rekindle(&["stop"]).ok();
    drop(mounted);
}

#[test]
fn a_guest_waits_while_its_redo_log_has_no_space_and_then_continues() {
    let lab = Lab::new();
    let (small, path) = (Tmpfs::new(&lab, "small", 8), image(&lab, "disk.raw"));
    let guest = lab.vm("full").section(&section(&path, &format!("redo = {:?}\n", small.path))).boot(&[]);
    let store = store(&lab, "full");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "1000s"]);
    protector.next_checkpoint();
    let before = digest(&path, 0, BLOCKS);
    thread::scope(|scope| {
        let writing = scope.spawn(|| ask(&guest, "write vda 0 3000 1"));
        let why = wait_for("writes to wait", DEADLINE, || status(&guest).redo?.waiting);
        assert!(why.contains("no room"), "{why}");
        assert_eq!(digest(&path, 0, BLOCKS), before, "the checkpoint's disk is unchanged");
        // Reads do not wait for the blocked write.
        assert!(status(&guest).active);
        small.resize(64);
        assert_eq!(writing.join().unwrap(), "3000");
    });
    assert!(status(&guest).redo.expect("a log").waiting.is_none());
    let newest = read(&guest, 0, BLOCKS);
    ask(&guest, "drop-caches");
    assert_eq!(read(&guest, 0, BLOCKS), newest);
    crash_host(&guest, protector);
    restore(&guest, &store, &[]);
    ask(&guest, "drop-caches");
    assert_eq!(ask(&guest, &format!("read vda 0 {BLOCKS}")), before, "the disk of the checkpoint");
    guest.assert_sound();
}
