//! Guests on every supported QEMU, and moved from each of them to each other.

use crate::common::protector::{Protector, crash, restore, store, wait_filled};
use crate::common::served::{READ, digest, image, read, section, server, status};
use crate::common::{DEADLINE, Guest, Lab, assert_ticks_once, major, qemu_new, qemu_newest, qemu_old, wait_for};
use rekindle_qemu::program::Program;
use serde_json::Value;
use std::path::Path;

/// Returns a cycle of QEMUs that contains each ordered pair of different QEMUs once.
fn all_pairs() -> [&'static Path; 6] {
    [qemu_new(), qemu_newest(), qemu_old(), qemu_newest(), qemu_new(), qemu_old()]
}

/// Boots a guest on `qemu`, with the oldest QEMU's machine type, which the newer QEMUs have, too.
fn boot_on<'a>(lab: &'a Lab, name: &str, qemu: &Path, disk: &Path) -> Guest<'a> {
    let vm = lab.vm(name).key("machine = \"pc-q35-7.2\"").section("[devices]\nvga = true");
    vm.section(&section(disk, "")).boot(&["--qemu", qemu.to_str().unwrap()])
}

fn assert_runs_on(guest: &Guest<'_>, qemu: &Path) {
    let program = Program::of(guest.only_qemu().process).unwrap();
    assert_eq!(program.start, qemu, "{program:?}");
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    assert_eq!(shown["vmm"]["binary"], qemu.to_str().unwrap());
    assert_eq!(shown["qemu_version"]["major"], major(qemu));
}

#[test]
fn each_qemu_is_replaced_by_each_other_warm_and_back() {
    let lab = Lab::new();
    let disk = image(&lab, "disk.raw");
    let guest = boot_on(&lab, "warm", qemu_old(), &disk);
    guest.touch("24M");
    let boot = guest.boot_id();
    assert_eq!(read(&guest, 0, READ), digest(&disk, 0, READ));
    for (n, qemu) in (0..).zip(all_pairs()) {
        let report = guest.warm(&["--qemu", qemu.to_str().unwrap(), "--verify-memory"]);
        assert_eq!(report["memory_changed_bytes"], 0, "{report:#}");
        assert_eq!(report["to"]["version"]["major"], major(qemu), "{report:#}");
        assert_runs_on(&guest, qemu);
        guest.ask(&format!("write vda {} 16 {n}", 100 + 16 * n));
        assert_eq!(read(&guest, 0, READ), digest(&disk, 0, READ));
    }
    // `--rollback` returns to the previous QEMU, which a script starts.
    guest.warm(&["--qemu", qemu_newest().to_str().unwrap()]);
    guest.warm(&["--rollback"]);
    assert_runs_on(&guest, qemu_old());
    guest.warm(&["--rollback"]);
    assert_runs_on(&guest, qemu_newest());
    guest.verify();
    guest.assert_sound();
    assert_eq!(guest.boot_id(), boot);
    // QEMU connects to the new disk server after the previous one has died.
    let before = server(&guest).expect("a server");
    before.kill().unwrap();
    wait_for("the server's end", DEADLINE, || (!before.is_alive()).then_some(()));
    guest.rekindle(&["recover"]).ok();
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), digest(&disk, 0, READ));
    assert_ticks_once(&guest.file("console.log"));
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

#[test]
fn each_qemu_is_replaced_by_each_other_saved_and_cold() {
    let lab = Lab::new();
    let disk = image(&lab, "disk.raw");
    let guest = boot_on(&lab, "saved", qemu_old(), &disk);
    guest.touch("24M");
    let boot = guest.boot_id();
    for qemu in all_pairs() {
        guest.reboot("saved", &["--qemu", qemu.to_str().unwrap()]).ok();
        assert_runs_on(&guest, qemu);
        guest.verify();
    }
    assert_eq!(guest.boot_id(), boot);
    for qemu in [qemu_newest(), qemu_old()] {
        assert_eq!(read(&guest, 0, READ), digest(&disk, 0, READ));
        guest.reboot("cold", &["--qemu", qemu.to_str().unwrap()]).ok();
        guest.wait_ready();
        assert_runs_on(&guest, qemu);
    }
    assert_ne!(guest.boot_id(), boot);
    guest.assert_sound();
}

/// Protects a guest that writes its memory and disk, kills it, restores it on the same QEMU, and reboots it with a
/// retained cache.
fn protect_restore_and_reboot_on(qemu: &'static Path) {
    let lab = Lab::new();
    let disk = image(&lab, "disk.raw");
    let guest = boot_on(&lab, "safe", qemu, &disk);
    let store = store(&lab, "safe");
    let boot = guest.boot_id();
    guest.touch("24M");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms"]);
    for n in 0..6 {
        guest.ask(&format!("write vda {} 32 {n}", 40 * n));
        protector.next_checkpoint();
    }
    assert!(status(&guest).redo.expect("a log").sealed > 0);
    let written = read(&guest, 0, READ);
    crash(&guest);
    protector.kill();
    restore(&guest, &store, &[]);
    wait_filled(&guest);
    assert_runs_on(&guest, qemu);
    assert_eq!(guest.boot_id(), boot);
    guest.verify();
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), written);
    // A reboot retains the cache.
    let report: Value = lab.rekindle(["--json", "reboot", "os", &guest.name]).ok().json();
    guest.wait_ready();
    assert_eq!(report["how"], "warm-cache");
    assert!(report["kept"]["bytes"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(read(&guest, 0, READ), written);
    assert_runs_on(&guest, qemu);
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

#[test]
fn a_guest_is_protected_and_restored_on_the_oldest_qemu() {
    protect_restore_and_reboot_on(qemu_old());
}

#[test]
fn a_guest_is_protected_and_restored_on_the_newest_qemu() {
    protect_restore_and_reboot_on(qemu_newest());
}

#[test]
fn a_checkpoint_of_one_qemu_is_restored_on_another() {
    let lab = Lab::new();
    let disk = image(&lab, "disk.raw");
    let mut before = qemu_old();
    let guest = boot_on(&lab, "across", before, &disk);
    let boot = guest.boot_id();
    guest.touch("24M");
    let store = store(&lab, "across");
    for qemu in [qemu_newest(), qemu_new(), qemu_old()] {
        assert_runs_on(&guest, before);
        let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms"]);
        protector.next_checkpoint();
        crash(&guest);
        protector.kill();
        restore(&guest, &store, &["--qemu", qemu.to_str().unwrap()]);
        wait_filled(&guest);
        assert_eq!(guest.boot_id(), boot);
        guest.verify();
        before = qemu;
    }
    assert_runs_on(&guest, before);
    guest.assert_sound();
}
