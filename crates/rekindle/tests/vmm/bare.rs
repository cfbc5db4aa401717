//! `rekindle replace-qemu --qmp`: QEMUs that neither Rekindle nor libvirt has started.

use crate::common::{Lab, qemu_new, qemu_newest, qemu_old};
use rekindle_kernel::process::Process;
use rekindle_qemu::guest;
use rekindle_testing::foreign::{ForeignQemu, QemuOptions};
use rekindle_testing::{DEADLINE, wait_for};
use rekindle_vm::fault::DOMAIN_POINTS;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Machine and processor that all versions have.
const MACHINE: [&str; 6] = ["-machine", "pc-q35-7.2", "-m", "256", "-cpu", "qemu64"];

/// Boots a guest in a QEMU that has no parent, with a pattern in its memory.
pub(crate) fn boot(lab: &Lab, binary: &Path) -> ForeignQemu {
    let directory = lab.path("bare");
    fs::create_dir(&directory).unwrap();
    let qemu = ForeignQemu::boot(&directory, &QemuOptions::new(binary).arguments(&MACHINE).daemon());
    qemu.ask("touch 48M 7");
    qemu.ask("dirty 20 48 random");
    qemu
}

/// Returns the command that replaces the QEMU by the one of `binary`.
pub(crate) fn replacing(lab: &Lab, qemu: &ForeignQemu, binary: &Path) -> Command {
    let (socket, binary) = (qemu.path("qmp"), binary.to_str().unwrap());
    lab.command(["replace-qemu", "bare", "--qmp", socket.to_str().unwrap(), "--qemu", binary])
}

/// Checks that the guest continues, with its memory, in the process of the pid file, which answers at the QMP socket.
/// Returns that process.
#[track_caller]
pub(crate) fn assert_continues(lab: &Lab, qemu: &ForeignQemu, boot_id: &str) -> Process {
    wait_for("an answer of the guest", DEADLINE, || qemu.is_up().then_some(()));
    assert_eq!(qemu.ask("boot-id"), boot_id);
    qemu.ask("dirty 0");
    assert!(qemu.ask("verify").parse::<u64>().unwrap() > 0);
    qemu.ask("dirty 20 48 random");
    assert_eq!(guest::run_state(&mut qemu.qmp()).unwrap(), "running");
    assert!(!lab.run_root().join("bare").exists(), "a run directory is left");
    qemu.named_process().expect("a QEMU that the pid file names")
}

#[test]
fn a_guest_continues_in_other_versions_and_its_manager_finds_it() {
    let lab = Lab::without_root();
    let qemu = boot(&lab, qemu_old());
    let boot_id = qemu.ask("boot-id");
    let mut source = qemu.process;
    for binary in [qemu_new(), qemu_newest(), qemu_old()] {
        lab.finish(replacing(&lab, &qemu, binary)).ok();
        let destination = assert_continues(&lab, &qemu, &boot_id);
        assert!(!source.is_alive() && destination != source);
        source = destination;
    }
    // It is a QEMU like any other.
    let socket = qemu.path("qmp");
    lab.rekindle(["attach", "bare", "--qmp", socket.to_str().unwrap()]).ok();
    lab.finish(replacing(&lab, &qemu, qemu_new())).status(1).prints(&["rekindle detach bare"]);
    lab.rekindle(["detach", "bare"]).ok();
}

#[test]
fn a_dry_run_and_a_rejection_change_nothing() {
    let lab = Lab::without_root();
    let qemu = boot(&lab, qemu_new());
    let socket = qemu.path("qmp");
    let socket = socket.to_str().unwrap();
    lab.rekindle(["replace-qemu", "bare", "--qmp", socket, "--dry-run"]).ok();
    lab.rekindle(["replace-qemu", "bare", "other", "--qmp", socket]).status(2).prints(&["one name"]);
    qemu.qmp().execute::<serde_json::Value>("stop", ()).unwrap();
    lab.rekindle(["replace-qemu", "bare", "--qmp", socket]).status(1).prints(&["paused", "resume it"]);
    assert_eq!(qemu.named_process(), Some(qemu.process));
}

#[test]
fn a_parent_that_waits_for_its_qemu_is_named() {
    let lab = Lab::without_root();
    let directory = lab.path("child");
    fs::create_dir(&directory).unwrap();
    let qemu = ForeignQemu::boot(&directory, &QemuOptions::new(qemu_new()).arguments(&MACHINE));
    lab.finish(replacing(&lab, &qemu, qemu_new())).status(1).prints(&["its parent", "-daemonize"]);
    assert!(qemu.process.is_alive());
}

/// The guest is the same for all points: none of these faults costs its memory.
#[test]
fn a_replacement_that_is_killed_is_finished_or_undone() {
    let lab = Lab::without_root();
    let qemu = boot(&lab, qemu_new());
    let boot_id = qemu.ask("boot-id");
    let mut process = qemu.process;
    for point in DOMAIN_POINTS.iter().filter(|point| point.starts_with("replace.")) {
        eprintln!("==== {point}");
        let mut command = replacing(&lab, &qemu, qemu_new());
        command.env("REKINDLE_FAULT", format!("{point}:kill"));
        lab.finish(command).killed();
        lab.rekindle(["recover", "bare"]).ok();
        let now = assert_continues(&lab, &qemu, &boot_id);
        let is_undone = ["replace.prepare.", "replace.suspend."].iter().any(|step| point.starts_with(step));
        assert_eq!(now == process, is_undone, "{point}");
        assert!(is_undone || !process.is_alive(), "{point}");
        process = now;
    }
}

#[test]
fn a_guest_returns_to_its_qemu_if_the_new_one_dies() {
    let lab = Lab::without_root();
    let qemu = boot(&lab, qemu_new());
    let boot_id = qemu.ask("boot-id");
    for point in
        ["replace.prepare.copied", "replace.suspend.frozen", "replace.suspend.loaded", "replace.resume.journalled"]
    {
        let mut command = replacing(&lab, &qemu, qemu_new());
        command.env("REKINDLE_FAULT", format!("{point}:kill-new"));
        lab.finish(command).status(1);
        assert_eq!(assert_continues(&lab, &qemu, &boot_id), qemu.process, "{point}");
    }
}

#[test]
fn a_guest_that_is_lost_is_reported() {
    let lab = Lab::without_root();
    let qemu = boot(&lab, qemu_new());
    let mut command = replacing(&lab, &qemu, qemu_new());
    command.env("REKINDLE_FAULT", "replace.suspend.stopped:kill-old");
    lab.finish(command).status(1).prints(&["memory is lost", "start the guest as usual"]);
    assert!(!lab.run_root().join("bare").exists());
}
