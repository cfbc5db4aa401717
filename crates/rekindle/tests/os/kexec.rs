//! `rekindle reboot --how kexec`: the Debian guest's kernel starts another kernel, in the same QEMU.

use crate::common::{DEADLINE, Guest, Lab, wait_for};
use rekindle_qemu::agent;
use std::time::Duration;

const ANSWER: Duration = Duration::from_secs(5);

/// Runs a shell command in the guest.
fn sh(guest: &Guest<'_>, command: &str) -> agent::ProgramResult {
    let port = guest.only_qemu().directory.join("agent.sock");
    wait_for("the agent to run a command", DEADLINE, || agent::run(&port, "/bin/sh", &["-c", command], ANSWER).ok())
}

fn kexec(guest: &Guest<'_>, arguments: &[&str]) -> crate::common::CommandResult {
    let words = ["--json", "reboot", &guest.name, "--how", "kexec"].into_iter().chain(arguments.iter().copied());
    guest.lab.rekindle(words)
}

#[test]
fn another_kernel_runs_in_the_same_qemu_with_the_same_command_line() {
    let lab = Lab::new();
    let guest = lab.vm("jumps").debian().boot(&[]);
    let (boot, qemu) = (guest.boot_id(), guest.only_qemu().process);
    let line = sh(&guest, "cat /proc/cmdline").stdout;
    let report = kexec(&guest, &[]).ok().json();
    assert_eq!(
        (report["how"].as_str(), report["kexec"]["kernel"].as_str()),
        (Some("kexec"), Some("/boot/vmlinuz")),
        "{report}"
    );
    guest.wait_ready();
    let after = guest.boot_id();
    assert_ne!(after, boot);
    // The new kernel got blocks from the retained cache, which the previous kernel had read from the disk.
    assert!(report["kept"]["disks"]["disk0"].as_u64().unwrap() > 10 << 20, "{report}");
    let status = lab.rekindle(["--json", "disk", "status", "jumps"]).ok().json();
    assert!(status["attic"][1]["served"].as_u64().unwrap() > 0, "{status}");
    // A monitor gets figures from inside the guest, with the ID of the new boot.
    wait_for("the agent's figures in a sample", DEADLINE, || {
        let printed = guest.rekindle(&["monitor", "--count", "1"]).ok().stdout;
        let samples = printed.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let inside = samples.into_iter().find(|sample| sample["guest_free_memory_kib"].is_u64())?;
        assert_eq!((inside["boot"].as_str(), inside["guest"].as_str()), (Some(&*after), Some(&*guest.name)));
        inside["guest_open_files"].is_u64().then_some(())
    });
    assert_eq!(guest.only_qemu().process, qemu);
    assert_eq!(sh(&guest, "cat /proc/cmdline").stdout.trim(), line.trim());
    let console = std::fs::read_to_string(guest.file("console.log")).unwrap();
    assert!(!console.contains("failed"), "{console}");
    guest.rekindle(&["show", "--timeline"]).ok().prints(&[
        "reboot --how kexec",
        "load the kernel",
        "start the new kernel",
    ]);

    // Each error names a remedy, and the guest is not affected.
    kexec(&guest, &["--kernel", "/boot/none"]).status(1).prints(&["the guest has no kernel /boot/none", "--how cold"]);
    kexec(&guest, &["--initrd", "/boot/none"]).status(1).prints(&["/boot/none", "--how cold"]);
    kexec(&guest, &["--kernel", "/etc/passwd", "--initrd", "none"]).status(1).prints(&["cannot load another one"]);
    sh(&guest, "cp /boot/vmlinuz /root/vmlinuz-x");
    kexec(&guest, &["--kernel", "/root/vmlinuz-x"]).status(1).prints(&["--initrd none"]);
    sh(&guest, "mv /usr/sbin/kexec /sbin/kexec /root/ 2>/dev/null");
    kexec(&guest, &[]).status(1).prints(&["kexec-tools"]);
    assert_eq!((guest.boot_id(), guest.status()), (after.clone(), "running".into()));
    sh(&guest, "mv /root/kexec /usr/sbin/");

    // Rekindle is killed before the guest got the command to reboot, and after it: `recover` determines which.
    for (fault, printed, is_new_boot) in [
        ("kexec.prepare.journalled:kill", "undone", false),
        ("kexec.suspend.journalled:kill", "undone", false),
        ("kexec.suspend.asked:kill", "the guest was booted", true),
        ("kexec.settle.booted:kill", "the guest was booted", true),
    ] {
        guest.wait_ready();
        let boot = guest.boot_id();
        wait_for("the agent to answer", DEADLINE, || {
            let port = guest.only_qemu().directory.join("agent.sock");
            agent::boot_id(&port, ANSWER).ok()
        });
        let mut command = lab.command(["reboot", &guest.name, "--how", "kexec"]);
        command.env("REKINDLE_FAULT", fault);
        lab.finish(command).killed();
        assert_eq!(guest.status(), "needs-recovery", "{fault}");
        guest.rekindle(&["recover"]).ok().prints(&[printed]);
        guest.wait_ready();
        assert_eq!(guest.boot_id() != boot, is_new_boot, "{fault}");
        assert_eq!(guest.only_qemu().process, qemu, "{fault}");
        guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
    }

    // A cold reboot: the agent shuts the guest down.
    let report = lab.rekindle(["--json", "reboot", &guest.name, "--how", "cold"]).ok().json();
    assert_eq!(report["ended"], "by-agent", "{report}");
    guest.wait_ready();
    assert_ne!(guest.only_qemu().process, qemu);
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn a_guest_without_an_agent_is_rejected_with_a_remedy() {
    let lab = Lab::new();
    let guest = lab.vm("mute").boot(&[]);
    let boot = guest.boot_id();
    kexec(&guest, &[]).status(1).prints(&["mute was not rebooted", "qemu-guest-agent", "--how cold"]);
    assert_eq!((guest.boot_id(), guest.status()), (boot, "running".into()));
    lab.rekindle(["reboot", "mute", "--kernel", "/boot/x", "--how", "cold"]).status(2).prints(&["--how kexec"]);
    // A kexec of a VM without an agent port is rejected, too.
    let bare = lab.vm("bare").section("[devices]\nagent = false\n").boot(&[]);
    kexec(&bare, &[]).status(1).prints(&["agent = false"]);
    // A cold reboot by the power button; a guest that ignores the button is powered off.
    let report = lab.rekindle(["--json", "reboot", "mute", "--how", "cold"]).ok().json();
    assert_eq!(report["ended"], "by-acpi", "{report}");
    let deaf = lab.vm("deaf").key("shutdown_timeout = \"1s\"").append("rekindle.ignore_power=1").boot(&[]);
    lab.rekindle(["reboot", "deaf", "--how", "cold"]).ok().prints(&["it was powered off"]);
    deaf.wait_ready();
}
