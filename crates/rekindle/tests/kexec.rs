//! `rekindle reboot os --how kexec`: the Debian guest's kernel starts another one, under the same QEMU.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{DEADLINE, Guest, Lab, wait_for};
use rekindle_qemu::agent;
use std::time::Duration;

const ANSWER: Duration = Duration::from_secs(5);

/// Run a shell's words in the guest.
fn sh(guest: &Guest<'_>, words: &str) -> agent::Ran {
    let port = guest.only_qemu().directory.join("agent.sock");
    wait_for("the agent to run something", DEADLINE, || agent::run(&port, "/bin/sh", &["-c", words], ANSWER).ok())
}

fn kexec(guest: &Guest<'_>, arguments: &[&str]) -> common::CommandResult {
    let all = ["--json", "reboot", "os", &guest.name, "--how", "kexec"].into_iter().chain(arguments.iter().copied());
    guest.lab.rekindle(all)
}

#[test]
fn another_kernel_runs_in_the_same_qemu_with_the_same_command_line() {
    let lab = Lab::new();
    let guest = lab.vm("jumps").debian().boot(&[]);
    let (boot, qemu) = (guest.boot_id(), guest.only_qemu().process);
    let line = sh(&guest, "cat /proc/cmdline").out;
    let told = kexec(&guest, &[]).ok().json();
    assert_eq!(
        (told["how"].as_str(), told["kexec"]["kernel"].as_str()),
        (Some("kexec"), Some("/boot/vmlinuz")),
        "{told}"
    );
    guest.wait_ready();
    let after = guest.boot_id();
    assert_ne!(after, boot);
    // The new kernel was given what the former one had read of the disk, where it still lay.
    assert!(told["kept"]["disks"]["disk0"].as_u64().unwrap() > 10 << 20, "{told}");
    let attic = lab.rekindle(["--json", "disk", "status", "jumps"]).ok().json();
    assert!(attic["attic"][1]["served"].as_u64().unwrap() > 0, "{attic}");
    // A monitor sees inside of it, and that it is another boot.
    wait_for("its agent to tell what is inside", DEADLINE, || {
        let said = guest.rekindle(&["monitor", "--count", "1"]).ok().stdout;
        let samples = said.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let inside = samples.into_iter().find(|sample| sample["guest_free_memory_kib"].is_u64())?;
        assert_eq!((inside["boot"].as_str(), inside["guest"].as_str()), (Some(&*after), Some(&*guest.name)));
        inside["guest_open_files"].is_u64().then_some(())
    });
    assert_eq!(guest.only_qemu().process, qemu);
    assert_eq!(sh(&guest, "cat /proc/cmdline").out.trim(), line.trim());
    let console = std::fs::read_to_string(guest.file("console.log")).unwrap();
    assert!(!console.contains("failed"), "{console}");
    guest.rekindle(&["show", "--timeline"]).ok().prints(&[
        "reboot os --how kexec",
        "load the kernel",
        "start the new kernel",
    ]);

    // What cannot be is said with the mend, and the guest feels nothing of it.
    kexec(&guest, &["--kernel", "/boot/none"]).status(1).prints(&["the guest has no kernel /boot/none", "--how cold"]);
    kexec(&guest, &["--initrd", "/boot/none"]).status(1).prints(&["/boot/none", "--how cold"]);
    kexec(&guest, &["--kernel", "/etc/passwd", "--initrd", "none"]).status(1).prints(&["cannot load another one"]);
    sh(&guest, "cp /boot/vmlinuz /root/vmlinuz-x");
    kexec(&guest, &["--kernel", "/root/vmlinuz-x"]).status(1).prints(&["--initrd none"]);
    sh(&guest, "mv /usr/sbin/kexec /sbin/kexec /root/ 2>/dev/null");
    kexec(&guest, &[]).status(1).prints(&["kexec-tools"]);
    assert_eq!((guest.boot_id(), guest.status()), (after.clone(), "running".into()));
    sh(&guest, "mv /root/kexec /usr/sbin/");

    // Killed before the guest was told anything, and after: either way `recover` finds out.
    for (fault, said, jumps) in [
        ("kexec.prepare.journalled:kill", "undone", false),
        ("kexec.suspend.journalled:kill", "undone", false),
        ("kexec.suspend.asked:kill", "the guest was booted", true),
        ("kexec.settle.booted:kill", "the guest was booted", true),
    ] {
        guest.wait_ready();
        let boot = guest.boot_id();
        wait_for("its agent", DEADLINE, || {
            let port = guest.only_qemu().directory.join("agent.sock");
            agent::boot_id(&port, ANSWER).ok()
        });
        let mut command = lab.command(["reboot", "os", &guest.name, "--how", "kexec"]);
        command.env("REKINDLE_FAULT", fault);
        assert_eq!(lab.finish(command).code, None, "{fault}");
        assert_eq!(guest.status(), "needs-recovery", "{fault}");
        guest.rekindle(&["recover"]).ok().prints(&[said]);
        guest.wait_ready();
        assert_eq!(guest.boot_id() != boot, jumps, "{fault}");
        assert_eq!(guest.only_qemu().process, qemu, "{fault}");
        guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
    }

    // Cold, and its agent is who shuts it down.
    let told = lab.rekindle(["--json", "reboot", "os", &guest.name, "--how", "cold"]).ok().json();
    assert_eq!(told["ended"], "by-agent", "{told}");
    guest.wait_ready();
    assert_ne!(guest.only_qemu().process, qemu);
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn a_guest_without_an_agent_is_refused_by_name() {
    let lab = Lab::new();
    let guest = lab.vm("mute").boot(&[]);
    let boot = guest.boot_id();
    kexec(&guest, &[]).status(1).prints(&["mute was not rebooted", "qemu-guest-agent", "--how cold"]);
    assert_eq!((guest.boot_id(), guest.status()), (boot, "running".into()));
    lab.rekindle(["reboot", "os", "mute", "--kernel", "/boot/x", "--how", "cold"]).status(2).prints(&["--how kexec"]);
    // The same of a VM that has no port for one.
    let bare = lab.vm("bare").section("[devices]\nagent = false\n").boot(&[]);
    kexec(&bare, &[]).status(1).prints(&["agent = false"]);
    // Cold, by the power button, and where that is ignored by the plug.
    let told = lab.rekindle(["--json", "reboot", "os", "mute", "--how", "cold"]).ok().json();
    assert_eq!(told["ended"], "by-acpi", "{told}");
    let deaf = lab.vm("deaf").key("shutdown_timeout = \"1s\"").append("rekindle.ignore_power=1").boot(&[]);
    lab.rekindle(["reboot", "os", "deaf", "--how", "cold"]).ok().prints(&["it was powered off"]);
    deaf.wait_ready();
}
