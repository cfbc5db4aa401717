//! Overlays after the protector, `detach`, a restore or QEMU was killed at each step, and when they have no room.

use super::attach::{ForeignGuest, attach, protect};
use super::overlays::{DEVICE, Disk, assert_disk_agrees, image_digest, overlay_files, read, write};
use crate::common::device::Tmpfs;
use crate::common::protector::{self, Protector, restore, wait_filled};
use crate::common::{DEADLINE, Guest, Lab, qemu_new, qemu_old, wait_for};
use rekindle_qemu::block::graph::BlockGraph;
use rekindle_qemu::guest::run_state;
use rekindle_vm::fault::OVERLAY_POINTS;
use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::thread;

/// Steps of a protector.
const PROTECTOR_STEPS: &[&str] = &["begin", "create", "mark", "seal", "merge"];
const ONE_CHECKPOINT: &[&str] = &["--disk", "overlays", "--count", "1"];
const TWO_CHECKPOINTS: &[&str] = &["--disk", "overlays", "--count", "2"];

/// Returns the fault points of these steps.
fn points(steps: &[&str]) -> Vec<&'static str> {
    let is_of_steps = |point: &&str| steps.contains(&point.split('.').nth(1).unwrap());
    let points: Vec<_> = OVERLAY_POINTS.iter().copied().filter(is_of_steps).collect();
    assert!(points.len() >= steps.len());
    points
}

#[test]
fn each_fault_point_is_of_a_step_that_is_walked() {
    let steps: BTreeSet<_> = OVERLAY_POINTS.iter().map(|point| point.split('.').nth(1).unwrap()).collect();
    let walked: BTreeSet<_> = PROTECTOR_STEPS.iter().copied().chain(["end", "restore"]).collect();
    assert_eq!(steps, walked);
}

/// Runs a protector with a fault that ends it.
fn protect_with(guest: &Guest<'_>, store: &Path, fault: &str) {
    let arguments = ["--disk", "overlays", "--every", "100ms"];
    Protector::start_with(guest, guest.lab, store, &arguments, &[("REKINDLE_FAULT", fault)]).wait_killed();
}

/// Returns the number of overlays on the disk.
fn chain_length(foreign: &ForeignGuest<'_>) -> usize {
    let graph = BlockGraph::read(&mut foreign.qemu.qmp()).unwrap();
    graph.chain_of(DEVICE).unwrap().overlays.len()
}

/// Detaches the guest. Asserts that its disk is the image alone, and has this content.
#[track_caller]
fn detach(foreign: &ForeignGuest<'_>, disk: &Disk, expected: &str, fault: &str) {
    let guest = &foreign.guest;
    guest.rekindle(&["detach"]).ok();
    assert!(!disk.overlays().exists(), "{fault}");
    assert_eq!(chain_length(foreign), 0, "{fault}");
    assert_disk_agrees(guest, expected);
}

#[test]
fn a_protector_killed_at_each_step_is_continued_by_protect_and_by_detach() {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, "qcow2");
    let foreign = disk.boot(&lab, qemu_new());
    let (guest, store) = (&foreign.guest, protector::store(&lab, "store"));
    let mut seed = 0;
    for point in points(PROTECTOR_STEPS) {
        for is_protected_again in [true, false] {
            eprintln!("{point}, protected again: {is_protected_again}");
            attach(&lab, &foreign);
            // A first protector, so that the killed one has something to merge.
            if !point.starts_with("overlay.begin.") {
                protect(&lab, "foreign", &store, ONE_CHECKPOINT);
            }
            seed += 1;
            write(guest, seed);
            let mut expected = read(guest);
            protect_with(guest, &store, &format!("{point}:kill"));
            assert!(chain_length(&foreign) <= 3, "{point}");
            if is_protected_again {
                assert_eq!(protect(&lab, "foreign", &store, TWO_CHECKPOINTS).len(), 2, "{point}");
                assert!(chain_length(&foreign) <= 3, "{point}");
                assert_disk_agrees(guest, &expected);
                seed += 1;
                write(guest, seed);
                expected = read(guest);
            }
            detach(&foreign, &disk, &expected, point);
        }
    }
}

#[test]
fn a_detach_killed_at_each_step_is_continued_by_detach_also_after_protect() {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, "raw");
    let foreign = disk.boot(&lab, qemu_old());
    let (guest, store) = (&foreign.guest, protector::store(&lab, "store"));
    let mut seed = 0;
    for point in points(&["end"]) {
        for is_protected_again in [true, false] {
            eprintln!("{point}, protected again: {is_protected_again}");
            attach(&lab, &foreign);
            protect(&lab, "foreign", &store, TWO_CHECKPOINTS);
            seed += 1;
            write(guest, seed);
            let expected = read(guest);
            let mut detaching = lab.command(["detach", "foreign"]);
            detaching.env("REKINDLE_FAULT", format!("{point}:kill"));
            lab.finish(detaching).killed();
            if is_protected_again {
                let store = store.to_str().unwrap();
                let arguments = ["protect", "foreign", "--store", store, "--every", "100ms"];
                let protected = lab.rekindle(arguments.iter().chain(TWO_CHECKPOINTS));
                // A QEMU whose merge of all overlays was cancelled may leave the image writable.
                let is_cancelled = ["overlay.end.copied", "overlay.end.stopped"].contains(&point);
                if is_cancelled && protected.code != Some(0) {
                    protected.status(1).prints(&["keep the overlay"]);
                } else {
                    protected.ok();
                }
                assert!(chain_length(&foreign) <= 3, "{point}");
            }
            detach(&foreign, &disk, &expected, point);
        }
    }
}

#[test]
fn a_checkpoint_is_restored_after_qemu_was_killed_at_each_step() {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, "raw");
    let foreign = disk.boot(&lab, qemu_new());
    let (guest, store) = (&foreign.guest, protector::store(&lab, "store"));
    attach(&lab, &foreign);
    for (round, point) in points(&["create", "mark", "seal", "merge"]).into_iter().enumerate() {
        eprintln!("{point}");
        let seed = 2 * round as u64 + 1;
        write(guest, seed);
        let before = read(guest);
        protect(&lab, "foreign", &store, ONE_CHECKPOINT);
        write(guest, seed + 1);
        let after = read(guest);
        protect_with(guest, &store, &format!("{point}:kill-old"));
        restore(guest, &store, &[]);
        let restored = read(guest);
        assert!([before, after].contains(&restored), "{point}: the memory of another checkpoint");
        assert_disk_agrees(guest, &restored);
        wait_filled(guest);
    }
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn a_guest_whose_qemu_was_killed_before_the_first_mark_is_protected_in_another_one() {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, "qcow2");
    for (seed, point) in points(&["begin", "create"]).into_iter().enumerate() {
        eprintln!("{point}");
        let store = protector::store(&lab, point);
        let mut expected = String::new();
        for fault in [Some(format!("{point}:kill-old")), None] {
            let foreign = disk.boot(&lab, qemu_new());
            let guest = &foreign.guest;
            attach(&lab, &foreign);
            if let Some(fault) = fault {
                write(guest, seed as u64);
                expected = read(guest);
                protect_with(guest, &store, &fault);
                assert!(!foreign.qemu.process.is_alive(), "{point}");
            } else {
                assert_eq!(protect(&lab, "foreign", &lab.path(&format!("other-{point}")), TWO_CHECKPOINTS).len(), 2);
                assert_disk_agrees(guest, &expected);
            }
            guest.rekindle(&["detach"]).ok();
            drop(foreign);
            fs::remove_dir_all(lab.path("foreign-foreign")).unwrap();
        }
        assert!(!disk.overlays().exists(), "{point}");
    }
}

/// Returns the digest of the newest disk, as docs/protect-attached.md copies it after its QEMU has ended.
fn newest_disk(lab: &Lab, disk: &Disk) -> String {
    let overlays = fs::read_dir(disk.overlays()).into_iter().flatten().map(|entry| entry.unwrap().path());
    let newest = overlays.filter(|path| path.extension().is_some_and(|end| end == "qcow2")).max();
    let Some(newest) = newest else { return image_digest(&disk.image) };
    let copy = lab.path("copy.raw");
    let convert = Command::new("qemu-img").args(["convert", "-O", "raw"]).args([&newest, &copy]).status();
    assert!(convert.unwrap().success());
    image_digest(&copy)
}

#[test]
fn the_newest_disk_is_complete_after_qemu_was_killed_at_each_step_of_detach() {
    for point in points(&["end"]) {
        eprintln!("{point}");
        let lab = Lab::without_root();
        let disk = Disk::create(&lab, "raw");
        let foreign = disk.boot(&lab, qemu_new());
        let (guest, store) = (&foreign.guest, protector::store(&lab, "store"));
        attach(&lab, &foreign);
        write(guest, 1);
        protect(&lab, "foreign", &store, TWO_CHECKPOINTS);
        write(guest, 2);
        let expected = read(guest);
        let mut detaching = lab.command(["detach", "foreign"]);
        detaching.env("REKINDLE_FAULT", format!("{point}:kill-old"));
        lab.finish(detaching);
        assert!(!foreign.qemu.process.is_alive(), "{point}");
        assert_eq!(newest_disk(&lab, &disk), expected, "{point}");
        // It merges nothing, and removes nothing that is needed.
        guest.rekindle(&["stop", "--now"]);
        assert_eq!(newest_disk(&lab, &disk), expected, "{point}");
    }
}

#[test]
fn a_restore_killed_at_each_step_leaves_no_overlay_and_is_repeated() {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, "qcow2");
    let mut foreign = disk.boot(&lab, qemu_new());
    let store = protector::store(&lab, "store");
    attach(&lab, &foreign);
    write(&foreign.guest, 1);
    let expected = read(&foreign.guest);
    protect(&lab, "foreign", &store, TWO_CHECKPOINTS);
    foreign.qemu.kill();
    let guest = &foreign.guest;
    let files = overlay_files(&disk);
    for point in points(&["restore"]) {
        eprintln!("{point}");
        let mut killed = lab.command(["restore", "foreign", "--store", store.to_str().unwrap()]);
        killed.env("REKINDLE_FAULT", format!("{point}:kill"));
        lab.finish(killed).killed();
        assert_eq!(overlay_files(&disk), files + 1, "{point}");
        guest.rekindle(&["recover"]).ok().prints(&["is removed"]);
        assert_eq!(overlay_files(&disk), files, "{point}");
    }
    restore(guest, &store, &[]);
    assert_disk_agrees(guest, &expected);
    guest.rekindle(&["stop", "--now"]).ok();
}

/// Protects a guest with its overlays in a small file system, fills that, and lets the guest write: before the guest is
/// protected again, or while it is.
fn run_out_of_space(is_protected: bool) {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, "raw");
    let foreign = disk.boot(&lab, qemu_new());
    let (guest, store, small) = (&foreign.guest, protector::store(&lab, "store"), Tmpfs::new(&lab, "small", 192));
    attach(&lab, &foreign);
    let overlays = ["--disk", "overlays", "--overlay-dir", small.path.to_str().unwrap()];
    let start = || Protector::start(guest, &lab, &store, &[&overlays[..], &["--every", "100ms"]].concat());
    let mut protector = start();
    protector.next_checkpoint();
    if is_protected {
        write(guest, 1);
        small.fill();
    } else {
        protector.end();
        small.fill();
        protector = thread::scope(|scope| {
            // The guest answers when it continues.
            scope.spawn(|| write(guest, 1));
            let is_full = || run_state(&mut foreign.qemu.qmp()).unwrap() == "io-error";
            wait_for("QEMU to stop the guest", DEADLINE, || is_full().then_some(()));
            start()
        });
    }
    let mut text = String::new();
    let mut errors = protector.child.stderr.take().unwrap();
    let _ = std::io::copy(&mut protector.lines, &mut std::io::sink());
    errors.read_to_string(&mut text).unwrap();
    assert_eq!(protector.child.wait().unwrap().code(), Some(1), "{text}");
    assert!(text.contains("the file system of its overlays is full"), "{text}");
    // The guest runs, and its image has all writes.
    let expected = read(guest);
    assert_eq!(chain_length(&foreign), 0);
    assert_disk_agrees(guest, &expected);
    assert_eq!(image_digest(&disk.image), expected);
    let left = fs::read_dir(&small.path).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["junk"]);
    // With room again, it is protected again.
    small.empty();
    assert_eq!(protect(&lab, "foreign", &store, &[&overlays[..], &["--count", "2"]].concat()).len(), 2);
    guest.rekindle(&["detach"]).ok();
    assert_disk_agrees(guest, &expected);
}

#[test]
fn little_room_for_overlays_ends_protection_while_the_guest_runs() {
    run_out_of_space(true);
}

#[test]
fn a_guest_that_was_stopped_because_its_overlay_is_full_continues_on_its_image() {
    run_out_of_space(false);
}
