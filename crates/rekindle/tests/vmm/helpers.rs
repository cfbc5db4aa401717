//! Helpers of a VM that die: `rekindle watch` restarts them automatically, and `show` reports helpers that cannot be
//! restarted.

use crate::common::protector::{Protector, crash, pager, restore, store, wait_filled};
use crate::common::served::{READ, digest, image, read, section, server, status, watcher};
use crate::common::{DEADLINE, Guest, Lab, wait_for};
use rekindle_kernel::process::Process;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Returns the entry of one helper in the output of `show`.
fn shown(guest: &Guest<'_>, helper: &str) -> Value {
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    let helpers = shown["helpers"].as_array().expect("helpers").clone();
    helpers.into_iter().find(|entry| entry["helper"] == helper).unwrap_or_else(|| panic!("no {helper}: {shown:#}"))
}

fn kill(process: Process) {
    process.kill().unwrap();
    assert!(process.wait_end(Duration::from_secs(10)).unwrap());
}

#[test]
fn a_disk_server_that_is_killed_is_restarted_and_no_read_is_wrong() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("served").section(&section(&path, "")).boot(&[]);
    let expected = digest(&path, 0, READ);
    let is_done = AtomicBool::new(false);
    let rounds = 4;
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut times = 0;
            while !is_done.load(Ordering::Relaxed) || times < 2 {
                assert_eq!(read(&guest, 0, READ), expected);
                guest.ask("drop-caches");
                times += 1;
            }
        });
        for _ in 0..rounds {
            let before = server(&guest).expect("a server");
            kill(before);
            let after = wait_for("another server", DEADLINE, || server(&guest));
            assert_ne!(after, before);
            wait_for("QEMU to use it", DEADLINE, || {
                let control = rekindle_disk::control::Control::connect(&guest.file("disk-disk0.control"));
                control.and_then(|mut control| control.status()).is_ok_and(|status| status.active).then_some(())
            });
        }
        is_done.store(true, Ordering::Relaxed);
        reading.join().unwrap();
    });
    guest.ask("write vda 10 100 3");
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    wait_for("the last restart to be noted", DEADLINE, || {
        (shown(&guest, "disk:disk0")["count"] == rounds).then_some(())
    });
    assert_eq!(shown(&guest, "disk:disk0")["pid"], server(&guest).expect("a server").pid);
    guest.rekindle(&["show"]).ok().prints(&["# helper disk:disk0: process ", "restarted 4 times"]);
    assert!(fs::read_to_string(guest.file("watch.log")).unwrap().contains("the server of disk disk0 was restarted"));
    assert_eq!(status(&guest).connected, 1);
    guest.assert_sound();
    // The server ends with its VM and is not restarted.
    let last = server(&guest).expect("a server");
    guest.rekindle(&["stop", "--now"]).ok();
    assert!(!last.is_alive() && server(&guest).is_none());
}

#[test]
fn a_disk_server_is_restarted_after_its_program_was_upgraded_or_removed() {
    let lab = Lab::new();
    let built = Path::new(env!("CARGO_BIN_EXE_rekindle"));
    // Links to the program that was built, in its file system: no copies.
    let directory = tempfile::tempdir_in(built.parent().unwrap()).unwrap();
    let program = fs::canonicalize(directory.path()).unwrap().join("rekindle");
    fs::hard_link(built, &program).unwrap();
    let path = image(&lab, "disk.raw");
    let vm = lab.vm("upgraded").section(&section(&path, ""));
    let definition = vm.write();
    let status = lab.command_of(&program, [OsStr::new("run"), definition.as_os_str()]).status().unwrap();
    assert!(status.success());
    let guest = vm.guest();
    guest.wait_ready();
    let program_of = |process: Process| fs::read_link(format!("/proc/{}/exe", process.pid)).unwrap();
    let restarted = || {
        let before = server(&guest).expect("a server");
        kill(before);
        let after = wait_for("another server", DEADLINE, || server(&guest));
        assert_ne!(after, before);
        program_of(after)
    };
    let removed = PathBuf::from(format!("{} (deleted)", program.display()));

    fs::remove_file(&program).unwrap();
    fs::hard_link(built, &program).unwrap();
    assert_eq!(program_of(server(&guest).expect("a server")), removed);
    assert_eq!(program_of(watcher(&guest).expect("a watch process")), removed);
    assert_eq!(restarted(), program, "the program that was installed in its place");

    fs::remove_file(&program).unwrap();
    assert_eq!(restarted(), removed, "the program that the watch process runs");
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    guest.assert_sound();
}

#[test]
fn a_pager_that_is_killed_is_restarted_and_loads_every_page() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("filled").memory("512M").section(&section(&path, "")).boot(&[]);
    let store = store(&lab, "filled");
    guest.touch("300M");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "1"]);
    assert!(protector.child.wait().unwrap().success());
    crash(&guest);
    assert_eq!(restore(&guest, &store, &[])["filled"], false);
    let mut killed = Vec::new();
    for _ in 0..3 {
        let missing_pager = wait_for("a pager, or the end of the fill", DEADLINE, || {
            let missing_pager = pager(&guest).filter(|pager| !killed.contains(pager));
            (missing_pager.is_some() || !guest.file("fill.json").exists()).then_some(missing_pager)
        });
        let Some(pager) = missing_pager else { break };
        // Stop the pager first, so that it cannot finish before it is killed.
        pager.stop().unwrap();
        if guest.file("fill.json").exists() {
            kill(pager);
            killed.push(pager);
        } else {
            pager.kill().unwrap();
        }
    }
    assert!(!killed.is_empty(), "no pager was killed while memory was missing");
    // The guest or its network may be waiting for a page.
    wait_for("the guest to answer", DEADLINE, || {
        guest.try_ask("write vda 600 64 5").ok().filter(|reply| reply.starts_with("ok"))
    });
    let cached = read(&guest, 0, READ);
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), cached, "the disk differs from what the guest wrote");
    wait_filled(&guest);
    guest.verify();
    guest.assert_sound();
    assert!(fs::read_to_string(guest.file("watch.log")).unwrap().contains("the pager was restarted"));
}

#[test]
fn a_vm_whose_server_cannot_be_restarted_is_degraded() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("gone").section(&section(&path, "")).boot(&[]);
    let away = lab.path("away.raw");
    fs::rename(&path, &away).unwrap();
    kill(server(&guest).expect("a server"));
    wait_for("the last attempt to restart the server", DEADLINE, || {
        guest.status().contains("not restarted any more").then_some(())
    });
    let status = guest.status();
    assert!(status.contains("degraded") && status.contains("the server of disk disk0"), "{status}");
    assert!(status.contains("8 times in a row") && status.contains("rekindle recover gone"), "{status}");
    guest
        .rekindle(&["show"])
        .ok()
        .prints(&["# gone is degraded (the server of disk disk0 is missing", "# helper disk:disk0: missing"]);
    lab.rekindle(["ls"]).ok().prints(&["degraded"]);
    assert!(shown(&guest, "disk:disk0")["given_up"].as_str().unwrap().contains("8 times in a row"));
    // Remove the cause.
    fs::rename(&away, &path).unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["a disk server had ended; it was started again"]);
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    wait_for("the record to be updated", DEADLINE, || shown(&guest, "disk:disk0")["given_up"].is_null().then_some(()));
    guest.assert_sound();
}

#[test]
fn without_rekindle_watch_the_vm_is_degraded_until_the_next_command() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("alone").section(&section(&path, "")).boot(&[]);
    assert_eq!(guest.status(), "running");
    kill(watcher(&guest).expect("a rekindle watch"));
    let status = guest.status();
    assert!(status.contains("degraded") && status.contains("`rekindle watch` is missing"), "{status}");
    kill(server(&guest).expect("a server"));
    let status = guest.status();
    assert!(status.contains("disk disk0 is missing") && status.contains("rekindle recover alone"), "{status}");
    guest.rekindle(&["recover"]).ok().prints(&["server"]);
    assert_eq!(guest.status(), "running");
    // A warm reboot starts the watch process as well.
    kill(watcher(&guest).expect("a rekindle watch"));
    guest.warm(&[]);
    guest.assert_sound();
    let before = server(&guest).expect("a server");
    kill(before);
    wait_for("another server", DEADLINE, || server(&guest));
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
}

#[test]
fn a_server_that_dies_during_an_operation_is_restarted() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("during").section(&section(&path, "")).boot(&[]);
    // The reboot is stopped while it holds the VM's lock.
    let mut command = lab.command(["replace-qemu", &guest.name, "--how", "warm"]);
    let mut reboot = command.env("REKINDLE_FAULT", "warm.prepare.ready:stop").spawn().unwrap();
    let stopped = Process::of(reboot.id()).unwrap();
    let stat = || fs::read_to_string(format!("/proc/{}/stat", stopped.pid)).unwrap();
    wait_for("the reboot to be stopped", DEADLINE, || {
        stat().rsplit(')').next().unwrap().trim().starts_with('T').then_some(())
    });
    let before = server(&guest).expect("a server");
    kill(before);
    let after = wait_for("another server", DEADLINE, || server(&guest));
    assert_ne!(before, after);
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    reboot.kill().unwrap();
    reboot.wait().unwrap();
    guest.rekindle(&["recover"]).ok();
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    guest.assert_sound();
}

#[test]
fn the_log_of_a_guest_that_prints_without_end_is_limited_and_outside_the_run_directory() {
    const LIMIT: u64 = 8 << 10;
    let lab = Lab::new();
    let logs = lab.path("logs");
    lab.configure_host(&format!("log_limit = \"8K\"\nlog_dir = {logs:?}"));
    // The guest prints a tick every 20 ms.
    let guest = lab.vm("talks").boot(&[]);
    let logs = logs.join("talks");
    let length = |name: &str| fs::metadata(logs.join(name)).map_or(0, |found| found.len());
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    assert_eq!(shown["logs"], logs.to_str().unwrap());
    let tick = guest.tick();
    wait_for("the console's log to be rotated twice", DEADLINE, || {
        assert!(length("console.log") < 8 * LIMIT, "it has {} bytes", length("console.log"));
        logs.join("console.log.2").exists().then_some(())
    });
    let first = fs::read_to_string(logs.join("console.log.1")).unwrap();
    wait_for("another rotation", DEADLINE, || {
        (fs::read_to_string(logs.join("console.log.1")).unwrap() != first).then_some(())
    });
    assert!(!logs.join("console.log.3").exists());
    assert!(["console.log.1", "console.log.2"].iter().all(|name| length(name) <= 2 * LIMIT));
    // The guest continues, and its output is still at the usual path.
    assert!(guest.tick() > tick);
    wait_for("what it prints", DEADLINE, || {
        fs::read_to_string(guest.file("console.log")).unwrap_or_default().contains("tick ").then_some(())
    });
    let in_run_directory = |path: &std::path::PathBuf| path.extension().is_some_and(|end| end == "log");
    let mut plain = crate::common::lab::entries(&guest.file(""));
    plain.retain(|path| in_run_directory(path) && !path.symlink_metadata().unwrap().is_symlink());
    assert!(plain.is_empty(), "logs in the run directory: {plain:?}");
    assert!(logs.join("qemu-1.log").exists() && logs.join("watch.log").exists());
    // Another QEMU writes the same log.
    guest.warm(&[]);
    wait_for("what it prints", DEADLINE, || (length("console.log") > 0).then_some(()));
    guest.assert_sound();
    // Logs stay after the VM has ended, and are rotated when it is started again.
    guest.rekindle(&["stop", "--now"]).ok();
    assert!(!guest.file("").exists() && length("console.log.1") > 0);
    lab.rekindle(["run", lab.path("talks.toml").to_str().unwrap()]).ok();
    guest.wait_ready();
    guest.assert_sound();
}
