//! Disk servers across reboots of the guest, replacements of QEMU, and crashes of the server.

use crate::common::guest::Guest;
use crate::common::served::{BLOCK, READ, digest, image, kill_server, read, section, server, status, watcher};
use crate::common::{DEADLINE, Lab, wait_for};
use rekindle_disk::retained::CacheCounts;
use rekindle_qemu::qmp::Qmp;
use serde_json::Value;
use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

/// Number of blocks that a guest of [`boot_with_cached_blocks`] has cached.
const CACHED: u64 = 256;

/// Returns the counts of blocks of the retained cache (the RAM of the previous boot), if there was one: `served` from
/// it, and `refused`, because their content in RAM had changed.
fn cache_counts(guest: &Guest<'_>) -> Option<CacheCounts> {
    let status = status(guest);
    status.retained.map(|(_, counts)| counts).or(status.emptied)
}

fn reboot_os(guest: &Guest<'_>, how: &[&str]) -> Value {
    let boot = guest.boot_id();
    let words = ["--json", "reboot", &guest.name].into_iter().chain(how.iter().copied());
    let report = guest.lab.rekindle(words).ok().json();
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot, "the guest was not booted");
    guest.only_qemu();
    report
}

#[test]
fn a_rebooted_guest_is_served_from_its_retained_cache() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("warm").section(&section(&path, "serial = \"S1\"\n")).boot(&[]);
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    // A write changes some of the cached blocks, also on the disk.
    let before = digest(&path, 100, 50);
    guest.ask("write vda 100 50 7");
    assert_ne!(digest(&path, 100, 50), before);

    // A warm cache is the default if a disk has a server.
    let report = reboot_os(&guest, &[]);
    assert_eq!(report["how"], "warm-cache");
    // Nearly all blocks that the guest has read: it has reused the pages of some.
    let kept_blocks = report["kept"]["bytes"].as_u64().unwrap() / BLOCK;
    assert!(kept_blocks >= READ * 9 / 10, "{report}");
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    let counts = cache_counts(&guest).expect("a retained cache");
    assert!(counts.served > READ * 8 / 10, "{counts:?}");
    assert!(counts.refused < READ / 50, "{counts:?}");

    // After a cold reboot all blocks are read from the disk, and the previous memory is discarded.
    let report = reboot_os(&guest, &["--how", "cold"]);
    assert_eq!((report["how"].as_str(), &report["kept"]), (Some("cold"), &Value::Null));
    assert_eq!(cache_counts(&guest), None);
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    guest.rekindle(&["show", "--timeline"]).ok().prints(&["reboot --how cold"]);

    let server = server(&guest).expect("a server");
    guest.rekindle(&["stop"]).ok();
    assert!(!server.is_alive(), "the server runs after the VM has ended");
    assert!(!guest.file("").exists());
}

#[test]
fn a_guest_that_reboots_itself_or_panics_keeps_its_cache_and_one_that_powers_off_stays_off() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("self").section(&section(&path, "")).boot(&[]);
    for command in ["reboot", "panic"] {
        assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
        let (boot, qemu) = (guest.boot_id(), guest.only_qemu().process);
        wait_for("rekindle watch to connect", DEADLINE, || is_watched(&guest).then_some(()));
        guest.send(command);
        wait_for("another QEMU", DEADLINE, || (!qemu.is_alive() && !guest.qemus().is_empty()).then_some(()));
        guest.wait_ready();
        assert_ne!(guest.boot_id(), boot, "{command}");
        assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
        let counts = cache_counts(&guest).expect("a retained cache");
        assert!(counts.served > READ / 2 && counts.refused < READ / 50, "{command}: {counts:?}");
        wait_for("the operation to end", DEADLINE, || (guest.status() == "running").then_some(()));
    }
    // Without `rekindle watch` the guest stays stopped until `recover` boots it.
    watcher(&guest).expect("a rekindle watch").kill().unwrap();
    let boot = guest.boot_id();
    guest.send("reboot");
    wait_for("the guest to be stopped", DEADLINE, || guest.status().contains("shutdown").then_some(()));
    guest.rekindle(&["recover"]).ok().prints(&["the guest was booted"]);
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    wait_for("rekindle watch to connect", DEADLINE, || is_watched(&guest).then_some(()));
    guest.send("poweroff");
    wait_for("the guest to be off", DEADLINE, || guest.qemus().is_empty().then_some(()));
    assert_eq!(guest.status(), "ended");
}

/// Returns whether a `rekindle watch` is connected to QEMU's socket for events. QEMU serves one client at a time there,
/// so another connection gets no answer.
fn is_watched(guest: &Guest<'_>) -> bool {
    let events = guest.only_qemu().directory.join("events.sock");
    watcher(guest).is_some() && Qmp::connect(&events, Duration::from_millis(50)).is_err()
}

#[test]
fn a_disk_follows_its_guest_from_qemu_to_qemu() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("moves").section(&section(&path, "cache = \"writeback\"\n")).boot(&[]);
    let boot = guest.boot_id();
    let served_by = server(&guest).expect("a server");
    for (seed, how) in ["warm", "saved", "warm"].into_iter().enumerate() {
        assert_eq!(read(&guest, 0, 256), digest(&path, 0, 256));
        guest.reboot(how, &[]).ok();
        guest.wait_ready();
        assert_eq!(guest.boot_id(), boot, "{how}: the guest was booted");
        guest.ask(&format!("write vda {} 64 {seed}", seed * 64));
        guest.ask("drop-caches");
        assert_eq!(read(&guest, 0, 512), digest(&path, 0, 512), "{how}");
        assert_eq!(status(&guest).connected, 1, "{how}");
        assert_eq!(server(&guest), Some(served_by), "{how}: the server was replaced");
    }
    // The server keeps its knowledge of the guest's cache when QEMU is replaced.
    let known = status(&guest).mapped_blocks;
    guest.warm(&[]);
    assert_eq!(read(&guest, 3000, 16), digest(&path, 3000, 16));
    assert!(status(&guest).mapped_blocks >= known, "{} of {known}", status(&guest).mapped_blocks);
}

/// Boots a guest with a served disk, of which it has read the first [`CACHED`] blocks.
fn boot_with_cached_blocks<'a>(lab: &'a Lab, name: &str, image: &Path) -> Guest<'a> {
    let guest = lab.vm(name).section(&section(image, "")).boot(&[]);
    assert_disk_is_read(&guest, image);
    guest
}

#[track_caller]
fn assert_disk_is_read(guest: &Guest<'_>, image: &Path) {
    assert_eq!(read(guest, 0, CACHED), digest(image, 0, CACHED));
}

#[track_caller]
fn assert_served_from_cache(guest: &Guest<'_>) {
    let counts = cache_counts(guest);
    assert!(counts.is_some_and(|counts| counts.served > 100), "{counts:?}");
}

#[test]
fn a_server_that_died_is_restarted_and_nothing_is_lost() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = boot_with_cached_blocks(&lab, "killed", &path);
    let killed = kill_server(&guest);
    guest.rekindle(&["recover"]).ok().prints(&["server"]);
    // QEMU reconnects and repeats the requests that were in progress.
    guest.ask("write vda 10 100 3");
    guest.ask("drop-caches");
    assert_disk_is_read(&guest, &path);
    assert_ne!(server(&guest), Some(killed));
    guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);

    // Without a server there is no cache to retain, so the guest boots cold.
    kill_server(&guest);
    let report = reboot_os(&guest, &["--how", "warm-cache"]);
    assert_eq!(report["kept"], Value::Null);
    assert_disk_is_read(&guest, &path);
}

#[test]
fn a_guest_whose_qemu_died_is_booted_and_served_from_its_retained_cache() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = boot_with_cached_blocks(&lab, "qemu-died", &path);
    guest.only_qemu().process.kill().unwrap();
    wait_for("QEMU to be gone", DEADLINE, || guest.qemus().is_empty().then_some(()));
    guest.rekindle(&["recover"]).ok().prints(&["booted from its disks"]);
    guest.wait_ready();
    assert_disk_is_read(&guest, &path);
    assert_served_from_cache(&guest);
}

#[test]
fn a_reboot_that_is_killed_after_the_cache_was_retained_is_finished_with_that_cache() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = boot_with_cached_blocks(&lab, "unfinished", &path);
    let mut command = guest.lab.command(["reboot", &guest.name]);
    command.env("REKINDLE_FAULT", "cold.renew.memory:kill");
    assert_ne!(guest.lab.finish(command).code, Some(0));
    guest.rekindle(&["recover"]).ok().prints(&["the guest was booted"]);
    guest.wait_ready();
    assert_disk_is_read(&guest, &path);
    assert_served_from_cache(&guest);
}

#[test]
fn a_warm_cache_is_rejected_if_no_disk_has_a_server() {
    let lab = Lab::new();
    let guest = lab.vm("plain").boot(&[]);
    let boot = guest.boot_id();
    let refused = lab.rekindle(["reboot", "plain", "--how", "warm-cache"]);
    refused.status(1).prints(&["plain was not rebooted", "`server = true`", "--how cold"]);
    assert_eq!((guest.boot_id(), guest.status()), (boot, "running".into()));
    assert_eq!(reboot_os(&guest, &[])["how"], "cold", "the default if no disk has a server");
}

#[test]
fn an_image_that_another_vm_has_open_is_rejected() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let first = lab.vm("first").section(&section(&path, "")).boot(&[]);
    let second = lab.vm("second").section(&section(&path, ""));
    let definition = second.write();
    let refused = lab.rekindle(["run", definition.to_str().unwrap()]);
    refused.status(1).prints(&["disk0", "another program has it open", path.to_str().unwrap()]);
    assert!(!lab.run_root().join("second").exists(), "a run directory is left");
    assert_eq!(read(&first, 0, 16), digest(&path, 0, 16));
}

#[test]
fn a_server_whose_control_socket_is_missing_is_still_found_and_ended() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("no-socket").section(&section(&path, "")).boot(&[]);
    fs::remove_file(guest.file("disk-disk0.control")).unwrap();
    guest.rekindle(&["stop", "--now"]).ok();
    assert!(!guest.file("").exists());
    File::options().write(true).open(&path).expect("the image can be written after the server has ended");
}
