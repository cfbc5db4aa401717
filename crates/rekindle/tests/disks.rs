//! Disks that Rekindle's own server has: over reboots of the guest, over other QEMUs, and over the server's death.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::guest::Guest;
use common::served::{BLOCK, READ, digest, image, kill_server, read, section, server, status, watcher};
use common::{DEADLINE, Lab, wait_for};
use rekindle_disk::retained::CacheCounts;
use rekindle_qemu::qmp::Qmp;
use serde_json::Value;
use std::fs::{self, File};
use std::time::Duration;

/// What became of the attic's blocks, if there was one.
fn became(guest: &Guest<'_>) -> Option<CacheCounts> {
    let status = status(guest);
    status.retained.map(|(_, told)| told).or(status.emptied)
}

fn reboot_os(guest: &Guest<'_>, how: &[&str]) -> Value {
    let boot = guest.boot_id();
    let all = ["--json", "reboot", "os", &guest.name].into_iter().chain(how.iter().copied());
    let told = guest.lab.rekindle(all).ok().json();
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot, "it was booted");
    guest.only_qemu();
    told
}

#[test]
fn a_rebooted_guest_is_given_what_it_had_of_its_disk() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("warm").section(&section(&path, "serial = \"S1\"\n")).boot(&[]);
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    // Some of it is written, and lies on the disk.
    let before = digest(&path, 100, 50);
    guest.ask("write vda 100 50 7");
    assert_ne!(digest(&path, 100, 50), before);

    // The usual way, where a disk has a server.
    let told = reboot_os(&guest, &[]);
    assert_eq!(told["how"], "warm-cache");
    let kept = told["kept"]["bytes"].as_u64().unwrap();
    assert!(kept >= READ * 9 / 10 * BLOCK, "{told}");
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    let told = became(&guest).expect("an attic");
    assert!(told.served > READ * 8 / 10, "{told:?}");
    // The guest has used some of those pages for something else.
    assert!(told.refused < READ / 50, "{told:?}");

    // Once more, and cold: everything comes from the disk, and the former memory has gone.
    let told = reboot_os(&guest, &["--how", "cold"]);
    assert_eq!((told["how"].as_str(), &told["kept"]), (Some("cold"), &Value::Null));
    assert_eq!(became(&guest), None);
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    guest.rekindle(&["show", "--timeline"]).ok().prints(&["reboot os --how cold"]);

    let server = server(&guest).expect("a server");
    guest.rekindle(&["stop"]).ok();
    assert!(!server.is_alive(), "it ends with the VM");
    assert!(!guest.file("").exists());
}

#[test]
fn a_guest_that_reboots_itself_or_panics_has_its_cache_and_one_that_powers_off_is_off() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("self").section(&section(&path, "")).boot(&[]);
    for command in ["reboot", "panic"] {
        assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
        let (boot, qemu) = (guest.boot_id(), guest.only_qemu().process);
        wait_for("somebody to wait for it", DEADLINE, || waits(&guest).then_some(()));
        guest.send(command);
        wait_for("another QEMU", DEADLINE, || (!qemu.is_alive() && !guest.qemus().is_empty()).then_some(()));
        guest.wait_ready();
        assert_ne!(guest.boot_id(), boot, "{command}");
        assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
        let told = became(&guest).expect("an attic");
        assert!(told.served > READ / 2 && told.refused < READ / 50, "{command}: {told:?}");
        wait_for("the operation to end", DEADLINE, || (guest.status() == "running").then_some(()));
    }
    // Nobody waits: it stays stopped, and is booted when it is asked for.
    watcher(&guest).expect("one that waits").kill().unwrap();
    let boot = guest.boot_id();
    guest.send("reboot");
    wait_for("it to be stopped", DEADLINE, || guest.status().contains("shutdown").then_some(()));
    guest.rekindle(&["recover"]).ok().prints(&["the guest was booted"]);
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    wait_for("somebody to wait for it", DEADLINE, || waits(&guest).then_some(()));
    guest.send("poweroff");
    wait_for("it to be off", DEADLINE, || guest.qemus().is_empty().then_some(()));
    assert_eq!(guest.status(), "ended");
}

/// Whether QEMU has been told what to do: its socket for that has somebody.
fn waits(guest: &Guest<'_>) -> bool {
    let events = guest.only_qemu().directory.join("events.sock");
    watcher(guest).is_some() && Qmp::connect(&events, Duration::from_millis(50)).is_err()
}

#[test]
fn a_disk_goes_with_its_guest_from_qemu_to_qemu() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("moves").section(&section(&path, "cache = \"writeback\"\n")).boot(&[]);
    let boot = guest.boot_id();
    let served_by = server(&guest).expect("a server");
    for (seed, how) in ["warm", "saved", "warm"].into_iter().enumerate() {
        assert_eq!(read(&guest, 0, 256), digest(&path, 0, 256));
        guest.reboot(how, &[]).ok();
        guest.wait_ready();
        assert_eq!(guest.boot_id(), boot, "{how}: the guest goes on");
        guest.ask(&format!("write vda {} 64 {seed}", seed * 64));
        guest.ask("drop-caches");
        assert_eq!(read(&guest, 0, 512), digest(&path, 0, 512), "{how}");
        assert_eq!(status(&guest).connected, 1, "{how}");
        assert_eq!(server(&guest), Some(served_by), "{how}: one server all the time");
    }
    // What it knows of the guest's cache has gone along with a VMM that was replaced under it.
    let known = status(&guest).mapped;
    guest.warm(&[]);
    assert_eq!(read(&guest, 3000, 16), digest(&path, 3000, 16));
    assert!(status(&guest).mapped >= known, "{} of {known}", status(&guest).mapped);
}

#[test]
fn a_server_that_died_is_started_again_and_nothing_is_lost() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("killed").section(&section(&path, "")).boot(&[]);
    assert_eq!(read(&guest, 0, 256), digest(&path, 0, 256));
    let killed = kill_server(&guest);
    guest.rekindle(&["recover"]).ok().prints(&["server"]);
    // QEMU connects again and hands over what was under way.
    guest.ask("write vda 10 100 3");
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, 256), digest(&path, 0, 256));
    assert_ne!(server(&guest), Some(killed));
    guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
    // Dead when the guest is rebooted: there is nothing to keep, and it boots cold.
    kill_server(&guest);
    let told = reboot_os(&guest, &["--how", "warm-cache"]);
    assert_eq!(told["kept"], Value::Null);
    assert_eq!(read(&guest, 0, 256), digest(&path, 0, 256));
    // QEMU dies, and the guest is booted with its disk.
    guest.only_qemu().process.kill().unwrap();
    wait_for("QEMU to be gone", DEADLINE, || guest.qemus().is_empty().then_some(()));
    guest.rekindle(&["recover"]).ok().prints(&["booted from its disks"]);
    guest.wait_ready();
    assert_eq!(read(&guest, 0, 256), digest(&path, 0, 256));
    // What it had cached was in its memory still.
    assert!(became(&guest).is_some_and(|told| told.served > 100), "{:?}", became(&guest));
    // A reboot that is killed when everything is kept and nothing boots yet.
    let mut command = guest.lab.command(["reboot", "os", &guest.name]);
    command.env("REKINDLE_FAULT", "cold.renew.memory:kill");
    assert_ne!(guest.lab.finish(command).code, Some(0));
    guest.rekindle(&["recover"]).ok().prints(&["the guest was booted"]);
    guest.wait_ready();
    assert_eq!(read(&guest, 0, 256), digest(&path, 0, 256));
    assert!(became(&guest).is_some_and(|told| told.served > 100), "{:?}", became(&guest));
}

#[test]
fn what_cannot_be_is_said_before_anything_is_done() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("plain").boot(&[]);
    let boot = guest.boot_id();
    let refused = lab.rekindle(["reboot", "os", "plain", "--how", "warm-cache"]);
    refused.status(1).prints(&["plain was not rebooted", "`server = true`", "--how cold"]);
    assert_eq!((guest.boot_id(), guest.status()), (boot, "running".into()));
    assert_eq!(reboot_os(&guest, &[])["how"], "cold", "the usual way, where no disk has a server");
    // Somebody else has the image.
    let first = lab.vm("first").section(&section(&path, "")).boot(&[]);
    let second = lab.vm("second").section(&section(&path, ""));
    let definition = second.write();
    let refused = lab.rekindle(["run", definition.to_str().unwrap()]);
    refused.status(1).prints(&["disk0", "another program has it open", path.to_str().unwrap()]);
    assert!(!lab.run_root().join("second").exists(), "nothing is left behind");
    assert_eq!(read(&first, 0, 16), digest(&path, 0, 16));
    // A server of its own name is no stranger's.
    fs::remove_file(first.file("disk-disk0.control")).unwrap();
    first.rekindle(&["stop", "--now"]).ok();
    assert!(!first.file("").exists());
    File::options().write(true).open(&path).unwrap();
}
