//! Block devices that fail under a guest's own requests, and are well again; where the redo log of one is.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::device::{Device, Tmpfs, run};
use common::guest::Guest;
use common::protector::{Protector, crash, restore, store};
use common::served::{BLOCK, BLOCKS, digest, image, kill_server, read, section, server, status};
use common::{DEADLINE, Lab, wait_for};
use std::fs;
use std::path::Path;
use std::thread;

/// Blocks that a device keeps when it is cut.
const SOUND: u64 = BLOCKS / 2;

/// The guest is told of an error.
#[track_caller]
fn fails(guest: &Guest<'_>, command: &str) {
    let reply = guest.try_ask(command).unwrap();
    assert!(reply.starts_with("error"), "`{command}`: {reply}");
}

/// As [`Guest::ask`], when the command before has ended.
#[track_caller]
fn ask(guest: &Guest<'_>, command: &str) -> String {
    let reply = wait_for("the guest to be free", DEADLINE, || {
        guest.try_ask(command).ok().filter(|reply| !reply.contains("busy"))
    });
    reply.strip_prefix("ok").unwrap_or_else(|| panic!("`{command}`: {reply}")).trim().to_owned()
}

/// All that the guest reads is what is on the device.
#[track_caller]
fn agrees(guest: &Guest<'_>, device: &Device) {
    ask(guest, "drop-caches");
    assert_eq!(ask(guest, &format!("read vda 0 {BLOCKS}")), digest(&device.backing, 0, BLOCKS));
}

/// The host dies: QEMU, the disk's server and the protector with it.
fn host_dies(guest: &Guest<'_>, protector: Protector) {
    kill_server(guest);
    crash(guest);
    protector.kill();
}

#[test]
fn a_device_that_fails_is_an_error_to_the_guest_and_nothing_else() {
    let lab = Lab::new();
    let (small, original) = (Tmpfs::new(&lab, "small", 18), image(&lab, "disk.raw"));
    let mut device = Device::copy_of(&small, &original);
    let guest = lab.vm("fails").section(&section(&device.path, "")).boot(&[]);
    let (boot, served_by) = (guest.boot_id(), server(&guest));
    agrees(&guest, &device);
    // Behind the middle it can neither be read nor, for want of room, be written.
    device.truncate(SOUND * BLOCK, false);
    small.fill();
    ask(&guest, "drop-caches");
    fails(&guest, "read vda 3000 16");
    fails(&guest, "write vda 3000 16 1");
    // Over the edge: one request, of which a part could be done.
    fails(&guest, &format!("read vda {} 4", SOUND - 2));
    assert_eq!(read(&guest, 0, SOUND), digest(&device.backing, 0, SOUND), "the rest is served as ever");
    ask(&guest, "write vda 10 16 2");
    let told = status(&guest);
    assert!(told.active && told.under_way == 0, "{told:?}");
    // Well again.
    small.empty();
    device.repair();
    agrees(&guest, &device);
    ask(&guest, "write vda 3000 16 3");
    agrees(&guest, &device);
    assert_eq!((guest.boot_id(), server(&guest)), (boot, served_by));
    // What is kept over a reboot is what is on the device, also where writing has failed.
    device.truncate(SOUND * BLOCK, false);
    small.fill();
    fails(&guest, "write vda 3000 32 4");
    small.empty();
    device.repair();
    guest.lab.rekindle(["reboot", "os", &guest.name]).ok();
    guest.wait_ready();
    agrees(&guest, &device);
    guest.assert_sound();
}

#[test]
fn a_device_that_fails_under_a_redo_log_fails_its_reads_and_is_merged_into_when_it_is_well() {
    let lab = Lab::new();
    let (small, original) = (Tmpfs::new(&lab, "small", 18), image(&lab, "disk.raw"));
    let redo = lab.path("redo");
    fs::create_dir(&redo).unwrap();
    let mut device = Device::copy_of(&small, &original);
    let guest = lab.vm("logged").section(&section(&device.path, &format!("redo = {redo:?}\n"))).boot(&[]);
    let store = store(&lab, "logged");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms"]);
    protector.next_checkpoint();
    assert!(redo.join("logged.disk0.redo").join("state").exists(), "the log is where it is to be");
    device.truncate(SOUND * BLOCK, false);
    small.fill();
    ask(&guest, "drop-caches");
    fails(&guest, "read vda 3000 16");
    // Writes go to the log, and are read from there; merging them has to wait.
    ask(&guest, "write vda 3100 16 5");
    ask(&guest, "drop-caches");
    let written = ask(&guest, "read vda 3100 16");
    let told = |guest: &Guest<'_>| status(guest).redo.expect("a log");
    wait_for("a merge that fails", DEADLINE, || {
        protector.next_checkpoint();
        told(&guest).failed
    });
    fails(&guest, "read vda 3000 16");
    assert_eq!(ask(&guest, "read vda 3100 16"), written);
    small.empty();
    device.repair();
    wait_for("the merge", DEADLINE, || {
        protector.next_checkpoint();
        (told(&guest).failed.is_none() && digest(&device.backing, 3100, 16) == written).then_some(())
    });
    assert_eq!(ask(&guest, "read vda 3000 16"), digest(&original, 3000, 16));
    // What a failure leaves there is found: by who asks, by a restore, and by who wants the newest disk.
    ask(&guest, "write vda 0 64 6");
    protector.next_checkpoint();
    protector.next_checkpoint();
    host_dies(&guest, protector);
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
    agrees(&guest, &device);
    assert_eq!(fs::read_dir(&redo).unwrap().count(), 0, "the log has gone");
    guest.assert_sound();
}

/// An ext4 on the device, mounted; without a journal, which would give up at the first error.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn a_redo_log_whose_device_fails_is_an_error_to_the_guest_and_stays_readable() {
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
    fails(&guest, "write vda 200 64 2");
    ask(&guest, "drop-caches");
    fails(&guest, "read vda 0 64");
    assert_eq!(read(&guest, 1000, 64), digest(&path, 1000, 64), "the image is sound");
    device.repair();
    ask(&guest, "drop-caches");
    assert_eq!(ask(&guest, "read vda 0 64"), before, "what it had, it has");
    protector.kill();
    ask(&guest, "write vda 300 64 3");
    let newest = ask(&guest, "read vda 300 64");
    // A flush has failed, and nobody knows what of the segment is durable: only a merge, which reads all of it, mends that.
    lab.rekindle(["disk", "merge", guest.file("disk-disk0.control").to_str().unwrap()]).ok();
    assert_eq!((digest(&path, 0, 64), digest(&path, 300, 64)), (before, newest));
    guest.assert_sound();
    guest.rekindle(&["stop"]).ok();
    drop(mounted);
}

#[test]
fn a_guest_waits_while_there_is_no_room_for_its_redo_log_and_goes_on() {
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
        assert_eq!(digest(&path, 0, BLOCKS), before, "the checkpoint's disk is as it was");
        // Reads do not wait.
        assert!(status(&guest).active);
        small.resize(64);
        assert_eq!(writing.join().unwrap(), "3000");
    });
    assert!(status(&guest).redo.expect("a log").waiting.is_none());
    let newest = read(&guest, 0, BLOCKS);
    ask(&guest, "drop-caches");
    assert_eq!(read(&guest, 0, BLOCKS), newest);
    host_dies(&guest, protector);
    restore(&guest, &store, &[]);
    ask(&guest, "drop-caches");
    assert_eq!(ask(&guest, &format!("read vda 0 {BLOCKS}")), before, "the checkpoint's");
    guest.assert_sound();
}
