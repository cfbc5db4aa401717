//! Guests on every supported QEMU, and moved from each of them to each other: by replacing the QEMU under a running
//! guest (`rekindle replace-qemu`), and by restoring a checkpoint of a crashed guest with another QEMU.
//!
//! | function | QEMU |
//! |---|---|
//! | `oldest_qemu` | 7.2 |
//! | `default_qemu` | the QEMU of most other tests: 10, or the one that `QEMU_NEW` names |
//! | `newest_qemu` | 11; its path is a script that starts the binary |
//!
//! The guest is the tests' own small Linux, which obeys commands (`Guest::ask`). `touch` fills a part of its memory
//! with a pattern that `verify` checks. Its disk `vda` is a raw image in the lab, a temporary directory, and is served
//! by a disk server: a process of Rekindle that QEMU connects to.

use crate::common::interrupted::Interrupted;
use crate::common::protector::{Protector, crash, restore, store, wait_filled};
use crate::common::served::{READ as READ_BLOCKS, digest, image, read, section, server, status};
use crate::common::{DEADLINE, Guest, Lab, assert_ticks_once, major, wait_for};
use crate::common::{qemu_new as default_qemu, qemu_newest as newest_qemu, qemu_old as oldest_qemu};
use rekindle_qemu::program::Program;
use serde_json::Value;
use std::path::Path;

/// Number of checkpoints after which a protector locates the queues of its guest again.
const LOCATE_EVERY: u32 = 64;
/// How much memory `touch` fills.
const TOUCHED: &str = "24M";

/// Returns the QEMUs to which a guest that starts on the oldest one moves, so that it makes each of the six possible
/// moves once: oldest, default, newest, oldest, newest, default, oldest.
fn all_moves_from_oldest() -> [&'static Path; 6] {
    [default_qemu(), newest_qemu(), oldest_qemu(), newest_qemu(), default_qemu(), oldest_qemu()]
}

/// Boots a guest on `qemu`, with the oldest QEMU's machine type, which the newer QEMUs have, too.
fn boot_on<'a>(lab: &'a Lab, name: &str, qemu: &Path, disk: &Path) -> Guest<'a> {
    let vm = lab.vm(name).key("machine = \"pc-q35-7.2\"").section("[devices]\nvga = true");
    let served_disk = section(disk, "");
    vm.section(&served_disk).boot(&["--qemu", qemu.to_str().unwrap()])
}

/// Returns the digest of the disk's first blocks as the guest reads them.
fn digest_in_guest(guest: &Guest<'_>) -> String {
    read(guest, 0, READ_BLOCKS)
}

/// Makes the guest write `count` blocks of its disk, with content that depends on `seed`.
fn write_blocks(guest: &Guest<'_>, first: u64, count: u64, seed: u64) {
    guest.ask(&format!("write vda {first} {count} {seed}"));
}

/// Asserts that the guest reads what the image contains.
#[track_caller]
fn assert_reads_image(guest: &Guest<'_>, disk: &Path) {
    assert_eq!(digest_in_guest(guest), digest(disk, 0, READ_BLOCKS));
}

#[track_caller]
fn assert_runs_on(guest: &Guest<'_>, qemu: &Path) {
    let program = Program::of(guest.only_qemu().process).unwrap();
    assert_eq!(program.start, qemu, "{program:?}");
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    assert_eq!(shown["vmm"]["binary"], qemu.to_str().unwrap());
    assert_eq!(shown["qemu_version"]["major"], major(qemu));
}

/// QEMU stops a queue that a disk server serves when it is queried in the wrong way.
#[test]
fn a_disk_answers_while_a_replacement_is_prepared_and_after_a_protector_has_located_the_queues() {
    let lab = Lab::new();
    let disk = image(&lab, "disk.raw");
    let guest = boot_on(&lab, "queried", oldest_qemu(), &disk);
    let assert_answers = || {
        guest.ask("drop-caches");
        assert_reads_image(&guest, &disk);
    };
    let store = store(&lab, "queried");
    for qemu in [default_qemu(), newest_qemu(), oldest_qemu()] {
        let arguments = ["reboot", "vmm", "queried", "--qemu", qemu.to_str().unwrap()];
        let command = Interrupted::start(&lab, &arguments, "warm.prepare.ready");
        assert_answers();
        command.finish(&lab).ok();
        // It locates them again after the last of these checkpoints.
        let count = LOCATE_EVERY.to_string();
        let protector = ["protect", "--store", store.to_str().unwrap(), "--every", "10ms", "--count", &count];
        guest.rekindle(&protector).ok();
        assert_answers();
    }
    guest.assert_sound();
}

#[test]
fn each_qemu_is_replaced_by_each_other_warm_and_back() {
    let lab = Lab::new();
    let disk = image(&lab, "disk.raw");
    let guest = boot_on(&lab, "warm", oldest_qemu(), &disk);
    guest.touch(TOUCHED);
    let boot_id = guest.boot_id();
    assert_reads_image(&guest, &disk);
    for (n, qemu) in (0u64..).zip(all_moves_from_oldest()) {
        let report = guest.warm(&["--qemu", qemu.to_str().unwrap(), "--verify-memory"]);
        assert_eq!(report["memory_changed_bytes"], 0, "{report:#}");
        assert_eq!(report["to"]["version"]["major"], major(qemu), "{report:#}");
        assert_runs_on(&guest, qemu);
        write_blocks(&guest, 100 + 16 * n, 16, n);
        assert_reads_image(&guest, &disk);
    }
    // `--rollback` returns to the QEMU before the last replacement. For the second one, that is the newest QEMU, whose
    // recorded path must be the script's and not the binary's.
    guest.warm(&["--qemu", newest_qemu().to_str().unwrap()]);
    guest.warm(&["--rollback"]);
    assert_runs_on(&guest, oldest_qemu());
    guest.warm(&["--rollback"]);
    assert_runs_on(&guest, newest_qemu());
    guest.verify();
    guest.assert_sound();
    assert_eq!(guest.boot_id(), boot_id);
    replace_dead_server(&guest);
    assert_reads_image(&guest, &disk);
    assert_ticks_once(&guest.file("console.log"));
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

/// Kills the disk server and has `rekindle recover` start another one, to which QEMU connects. The guest's next read is
/// from that server.
fn replace_dead_server(guest: &Guest<'_>) {
    let killed_server = server(guest).expect("a server");
    killed_server.kill().unwrap();
    wait_for("the server's end", DEADLINE, || (!killed_server.is_alive()).then_some(()));
    guest.rekindle(&["recover"]).ok();
    guest.ask("drop-caches");
}

#[test]
fn each_qemu_is_replaced_by_each_other_saved_and_cold() {
    let lab = Lab::new();
    let disk = image(&lab, "disk.raw");
    let guest = boot_on(&lab, "saved", oldest_qemu(), &disk);
    guest.touch(TOUCHED);
    let boot_id = guest.boot_id();
    for qemu in all_moves_from_oldest() {
        guest.reboot("saved", &["--qemu", qemu.to_str().unwrap()]).ok();
        assert_runs_on(&guest, qemu);
        guest.verify();
    }
    assert_eq!(guest.boot_id(), boot_id);
    for qemu in [newest_qemu(), oldest_qemu()] {
        assert_reads_image(&guest, &disk);
        guest.reboot("cold", &["--qemu", qemu.to_str().unwrap()]).ok();
        guest.wait_ready();
        assert_runs_on(&guest, qemu);
    }
    assert_ne!(guest.boot_id(), boot_id);
    guest.assert_sound();
}

/// Protects a guest that writes its memory and disk, kills it, restores it on the same QEMU, and reboots it.
///
/// A *protector* takes a checkpoint of the guest every 100 ms into a store. It divides the disk's writes into epochs,
/// which the disk server keeps in a redo log until no checkpoint needs them separately.
fn protect_restore_and_reboot_on(qemu: &'static Path) {
    let lab = Lab::new();
    let disk = image(&lab, "disk.raw");
    let guest = boot_on(&lab, "safe", qemu, &disk);
    let store = store(&lab, "safe");
    let boot_id = guest.boot_id();
    guest.touch(TOUCHED);
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms"]);
    for n in 0..6u64 {
        write_blocks(&guest, 40 * n, 32, n);
        protector.next_checkpoint();
    }
    let redo_log = status(&guest).redo.expect("a redo log");
    assert!(redo_log.sealed > 0, "no epoch has ended: {redo_log:?}");
    let written = digest_in_guest(&guest);
    crash(&guest);
    protector.kill();
    restore(&guest, &store, &[]);
    wait_filled(&guest);
    assert_runs_on(&guest, qemu);
    assert_eq!(guest.boot_id(), boot_id);
    guest.verify();
    guest.ask("drop-caches");
    assert_eq!(digest_in_guest(&guest), written);
    // By default, a reboot keeps the old memory as a cache of the disk for the new boot: method `warm-cache`.
    let report: Value = lab.rekindle(["--json", "reboot", &guest.name]).ok().json();
    guest.wait_ready();
    assert_eq!(report["how"], "warm-cache");
    assert!(report["kept"]["bytes"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(digest_in_guest(&guest), written);
    assert_runs_on(&guest, qemu);
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

#[test]
fn a_guest_is_protected_and_restored_on_the_oldest_qemu() {
    protect_restore_and_reboot_on(oldest_qemu());
}

#[test]
fn a_guest_is_protected_and_restored_on_the_newest_qemu() {
    protect_restore_and_reboot_on(newest_qemu());
}

#[test]
fn a_checkpoint_of_one_qemu_is_restored_on_another() {
    let lab = Lab::new();
    let disk = image(&lab, "disk.raw");
    let mut checkpointed_on = oldest_qemu();
    let guest = boot_on(&lab, "across", checkpointed_on, &disk);
    let boot_id = guest.boot_id();
    guest.touch(TOUCHED);
    let store = store(&lab, "across");
    for qemu in [newest_qemu(), default_qemu(), oldest_qemu()] {
        assert_runs_on(&guest, checkpointed_on);
        let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms"]);
        protector.next_checkpoint();
        crash(&guest);
        protector.kill();
        restore(&guest, &store, &["--qemu", qemu.to_str().unwrap()]);
        wait_filled(&guest);
        assert_eq!(guest.boot_id(), boot_id);
        guest.verify();
        checkpointed_on = qemu;
    }
    assert_runs_on(&guest, checkpointed_on);
    guest.assert_sound();
}
