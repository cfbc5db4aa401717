//! A disk that is enlarged while its guest runs.

use crate::common::guest::Guest;
use crate::common::protector::{Protector, crash, restore, store};
use crate::common::served::{BLOCK, BLOCKS, digest, image, kill_server, read, section};
use crate::common::{CommandResult, DEADLINE, Lab, qemu_new, qemu_old, wait_for};
use std::fs::OpenOptions;
use std::path::Path;

fn set_length(image: &Path, blocks: u64) {
    OpenOptions::new().write(true).open(image).unwrap().set_len(blocks * BLOCK).unwrap();
}

fn resize(guest: &Guest<'_>) -> CommandResult {
    guest.rekindle(&["--json", "disk", "resize"])
}

/// Enlarges the image and asserts that the guest sees it without a reboot.
fn grow(guest: &Guest<'_>, image: &Path, blocks: u64) {
    let boot = guest.boot_id();
    let reply = guest.try_ask(&format!("read vda {} 1", blocks - 1)).unwrap();
    assert!(!reply.starts_with("ok"), "the guest already has that block: {reply}");
    set_length(image, blocks);
    assert_eq!(resize(guest).ok().json()["bytes"], blocks * BLOCK);
    wait_for("the guest to see it", DEADLINE, || {
        guest.try_ask(&format!("read vda {} 1", blocks - 1)).ok().filter(|reply| reply.starts_with("ok"))
    });
    guest.ask(&format!("write vda {} 8 5", blocks - 8));
    assert_eq!(guest.boot_id(), boot);
}

#[test]
fn a_guest_sees_that_its_disk_has_grown_and_a_shorter_image_is_rejected() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let old = qemu_old();
    let guest = lab.vm("grown").section(&section(&path, "")).boot(&["--qemu", old.to_str().unwrap()]);
    grow(&guest, &path, BLOCKS + 64);
    assert_eq!(read(&guest, BLOCKS, 64), digest(&path, BLOCKS, 64));
    // The guest also sees a new size after a change of QEMU, and after one of the disk server.
    guest.warm(&["--qemu", qemu_new().to_str().unwrap()]);
    grow(&guest, &path, BLOCKS + 128);
    kill_server(&guest);
    guest.rekindle(&["recover"]).ok();
    grow(&guest, &path, BLOCKS + 192);
    // A shorter image is rejected with an error that names it; the guest continues with the old size.
    set_length(&path, BLOCKS);
    resize(&guest).status(1).prints(&[
        path.to_str().unwrap(),
        "was",
        "a guest that uses the longer disk would lose data",
    ]);
    set_length(&path, BLOCKS + 192);
    assert_eq!(resize(&guest).ok().json()["bytes"], (BLOCKS + 192) * BLOCK);
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, BLOCKS), digest(&path, 0, BLOCKS));
    guest.assert_sound();
}

#[test]
fn a_disk_is_named_by_its_vm_or_by_the_socket_of_its_server() {
    let lab = Lab::new();
    let (one, other) = (image(&lab, "one.raw"), image(&lab, "other.raw"));
    let status = |disk: &str| lab.rekindle(["--json", "disk", "status", disk]);
    let guest = lab.vm("named").section(&section(&one, "")).section(&section(&other, "")).boot(&[]);
    assert_eq!(status("named/disk1").ok().json()["bytes"], BLOCKS * BLOCK);
    let socket = guest.file("disk-disk1.control");
    assert_eq!(status(socket.to_str().unwrap()).ok().json()["bytes"], BLOCKS * BLOCK);
    status("named").status(1).prints(&["which disk", "named/disk0, named/disk1"]);
    status("named/disk2").status(1).prints(&["which disk", "named/disk0, named/disk1"]);
    status("absent").status(1).prints(&["absent"]);
    guest.rekindle(&["stop"]).ok();
    let none = lab.vm("none").boot(&[]);
    none.rekindle(&["disk", "status"]).status(1).prints(&["no disk of none has a server"]);
}

#[test]
fn a_disk_with_epochs_can_grow_and_be_rolled_back() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("grown").section(&section(&path, "")).boot(&[]);
    let store = store(&lab, "grown");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms"]);
    protector.next_checkpoint();
    // Often enough that some notifications arrive while QEMU is stopping the guest for a checkpoint, and discards them.
    for step in 1..=16 {
        grow(&guest, &path, BLOCKS + 16 * step);
    }
    protector.next_checkpoint();
    let newest = read(&guest, BLOCKS, 64);
    kill_server(&guest);
    crash(&guest);
    protector.kill();
    restore(&guest, &store, &[]);
    wait_for("the command of the checkpoint to end", DEADLINE, || {
        guest.try_ask("write vda 0 1 1").ok().filter(|answer| !answer.contains("busy"))
    });
    guest.ask("drop-caches");
    assert_eq!(read(&guest, BLOCKS, 64), newest, "the content beyond the old end is that of the checkpoint");
    grow(&guest, &path, BLOCKS + 320);
    guest.assert_sound();
}
