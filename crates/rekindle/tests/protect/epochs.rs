//! A protected guest that writes its disk: after a failure it resumes with the disk of its checkpoint, or boots
//! from the newest disk.
//!
//! While a guest is protected, its disk server appends the guest's writes to a *redo log* next to the image. The writes
//! between two checkpoints are an *epoch*. It is *sealed* (made durable) before its checkpoint is committed, and merged
//! into the image afterwards (`docs/disk-epochs.md`).

use crate::common::guest::Guest;
use crate::common::protector::{Protector, crash, restore, store};
use crate::common::served::{self, image, kill_server, section, status};
use crate::common::{DEADLINE, Lab, wait_for};
use rekindle_disk::engine::redo_log::RedoStatus;
use std::path::{Path, PathBuf};

/// Number of blocks that the guest writes.
const WRITTEN: u64 = 512;

/// Returns the directory of the image's redo log.
fn redo(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(".redo");
    PathBuf::from(path)
}

fn read(guest: &Guest<'_>) -> String {
    served::read(guest, 0, WRITTEN)
}

fn digest(image: &Path) -> String {
    served::digest(image, 0, WRITTEN)
}

fn redo_status(guest: &Guest<'_>) -> Option<RedoStatus> {
    status(guest).redo
}

/// Simulates a crash of the host: kills QEMU, the disk server and the protector.
fn crash_host(guest: &Guest<'_>, protector: Protector) {
    kill_server(guest);
    crash(guest);
    protector.kill();
}

/// Asserts that the guest's page cache and its disk have the same content. Returns the digest of that content.
fn assert_cache_matches_disk(guest: &Guest<'_>) -> String {
    // If the checkpoint was taken during a `write` command, the restored guest continues it, and rejects another one
    // until then. This one writes outside the blocks that are compared.
    let write_elsewhere = format!("write vda {WRITTEN} 1 1");
    wait_for("the command of the checkpoint to end", DEADLINE, || {
        guest.try_ask(&write_elsewhere).ok().filter(|answer| !answer.contains("busy"))
    });
    let cached = read(guest);
    guest.ask("drop-caches");
    assert_eq!(read(guest), cached, "the guest's cache differs from its disk");
    cached
}

/// Makes the guest write its disk during several checkpoints and after the last one, and crashes the host. `seed`: each
/// round writes other content. Returns the digest of the newest disk.
fn write_and_crash(guest: &Guest<'_>, store: &Path, seed: u64) -> String {
    const BLOCKS_PER_WRITE: u64 = 32;
    let write = |first_block: u64, seed: u64| {
        guest.ask(&format!("write vda {} {BLOCKS_PER_WRITE} {seed}", first_block % (WRITTEN - BLOCKS_PER_WRITE)));
    };
    let mut protector = Protector::start(guest, guest.lab, store, &["--every", "100ms"]);
    protector.next_checkpoint();
    for n in 0..40 {
        // Overlapping writes, with checkpoints in between.
        write(n * 37, seed + n);
    }
    protector.next_checkpoint();
    let status = redo_status(guest).expect("a log");
    assert!(status.epoch > 2, "checkpoints have started new epochs: {status:?}");
    assert!(status.sealed > 0, "the epoch of a committed checkpoint is sealed: {status:?}");
    for n in 0..10 {
        write(n * 51, seed + 50 + n);
    }
    let newest = read(guest);
    crash_host(guest, protector);
    newest
}

/// Asserts that `run` boots neither the disk of the checkpoint nor the newest one without an option.
fn assert_run_needs_a_choice(lab: &Lab, definition: &Path) {
    let refused = lab.rekindle(["run", definition.to_str().unwrap()]);
    refused.status(1).prints(&["disk0", "rekindle restore", "--newest-disk"]);
}

#[test]
fn after_a_crash_the_user_chooses_the_disk_of_the_checkpoint_or_the_newest_one() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("epochs").section(&section(&path, "")).boot(&[]);
    let store = store(&lab, "epochs");
    let definition = lab.path("epochs.toml");
    let boot = guest.boot_id();

    // The second crash is that of a restored guest.
    for seed in [0, 100] {
        write_and_crash(&guest, &store, seed);
        assert!(redo(&path).exists());
        assert_run_needs_a_choice(&lab, &definition);
        restore(&guest, &store, &[]);
        assert_eq!(guest.boot_id(), boot, "the guest was resumed");
        assert_cache_matches_disk(&guest);
        guest.assert_sound();
    }

    let newest = write_and_crash(&guest, &store, 200);
    assert!(redo(&path).exists());
    assert_run_needs_a_choice(&lab, &definition);
    lab.rekindle(["run", definition.to_str().unwrap(), "--newest-disk"]).ok();
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    assert_eq!(read(&guest), newest, "all that was written");
    assert_eq!(digest(&path), newest, "all of it is merged");
    assert!(!redo(&path).exists());
    assert_cache_matches_disk(&guest);
    // The checkpoint's disk no longer exists.
    guest.rekindle(&["stop"]).ok();
    let refused = lab.rekindle(["restore", "epochs", "--store", store.to_str().unwrap()]);
    refused.status(1).prints(&["the disk is newer than the checkpoint", "--newest-disk"]);
    assert!(!guest.file("").exists(), "nothing is left behind");
}

#[test]
fn a_clean_stop_merges_the_redo_log_and_a_disk_with_a_log_is_not_given_to_qemu() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("ended").section(&section(&path, "")).boot(&[]);
    let store = store(&lab, "ended");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "1"]);
    assert!(protector.child.wait().unwrap().success());
    guest.ask("write vda 5 20 9");
    let newest = read(&guest);
    assert_ne!(digest(&path), newest, "it is in the log");
    // Once a checkpoint is committed, its log is merged into the image while the guest runs.
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms"]);
    protector.next_checkpoint();
    wait_for("the merge", DEADLINE, || (digest(&path) == newest).then_some(()));
    guest.ask("write vda 8 20 10");
    let newest = read(&guest);
    crash_host(&guest, protector);
    assert!(redo(&path).exists(), "the log is kept until the user chooses a disk");
    let plain = lab.vm("plain").section(&format!("[[disk]]\npath = {path:?}\nformat = \"raw\"\nserver = false\n"));
    let refused = lab.rekindle(["run", plain.write().to_str().unwrap()]);
    refused.status(1).prints(&["disk0", "redo log", "rekindle disk merge"]);
    lab.rekindle(["disk", "merge", path.to_str().unwrap()]).ok();
    assert_eq!(digest(&path), newest);
    let guest = plain.boot(&[]);
    assert_eq!(read(&guest), newest);
    guest.rekindle(&["stop"]).ok();

    let guest = lab.vm("again").section(&section(&path, "")).boot(&[]);
    let mut protector = Protector::start(
        &guest,
        &lab,
        &store.with_extension("again"),
        &["--create-store", "--every", "100ms", "--count", "1"],
    );
    assert!(protector.child.wait().unwrap().success());
    guest.ask("write vda 30 20 11");
    let newest = read(&guest);
    assert!(redo_status(&guest).is_some(), "the redo log of the checkpoint is kept until the VM is stopped");
    guest.rekindle(&["stop"]).ok();
    assert_eq!(digest(&path), newest);
    assert!(!redo(&path).exists());
}

#[test]
fn a_server_that_dies_before_the_restored_guest_writes_is_restarted_at_the_same_epoch() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("since").section(&section(&path, "")).boot(&[]);
    let store = store(&lab, "since");
    guest.ask("write vda 0 64 1");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "1"]);
    assert!(protector.child.wait().unwrap().success());
    let expected = read(&guest);
    guest.ask("write vda 0 64 2");
    assert_ne!(read(&guest), expected, "newer than the checkpoint");
    kill_server(&guest);
    crash(&guest);
    restore(&guest, &store, &[]);
    for _ in 0..2 {
        kill_server(&guest);
        guest.rekindle(&["recover"]).ok();
        guest.ask("drop-caches");
        assert_eq!(read(&guest), expected, "the disk is still that of the checkpoint");
    }
    guest.ask("write vda 100 8 3");
    let newest = read(&guest);
    assert_ne!(newest, expected);
    kill_server(&guest);
    guest.rekindle(&["recover"]).ok();
    guest.ask("drop-caches");
    assert_eq!(read(&guest), newest, "the write after the restore is kept");
    guest.assert_sound();
}
