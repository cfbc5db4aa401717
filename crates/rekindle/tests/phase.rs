//! `rekindle reboot os --how phase`: a guest goes on from a phase of an earlier boot, and never from one that knows a disk of before.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::served::{digest, image, kill_server, read, section};
use common::{CommandResult, DEADLINE, Guest, Lab, wait_for};
use rekindle_vm::lock::Lock;
use rekindle_vm::phases;
use rekindle_vm::rundir::RunDir;
use rustix::fs::inotify;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PHASES: &str = "[phase]\nsave = [\"kernel\", \"services\"]\n";

/// What `show` says of a phase.
fn phase(guest: &Guest<'_>, name: &str) -> Value {
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    let phases = shown["phases"].as_array().unwrap();
    phases.iter().find(|phase| phase["name"] == name).unwrap_or_else(|| panic!("no phase {name} in {shown}")).clone()
}

#[track_caller]
fn wait_saved(guest: &Guest<'_>, name: &str) {
    wait_for(&format!("phase {name} to be saved"), DEADLINE, || {
        (phase(guest, name)["void"] == Value::Null).then_some(())
    });
}

/// Have the guest announce its later phase, and wait until that is saved.
#[track_caller]
fn announce(guest: &Guest<'_>) {
    guest.ask("phase services");
    wait_saved(guest, "services");
}

fn reboot(guest: &Guest<'_>, arguments: &[&str]) -> CommandResult {
    let all = ["--json", "reboot", "os", &guest.name, "--how", "phase"].into_iter().chain(arguments.iter().copied());
    guest.lab.rekindle(all)
}

/// Reboot it, and give the phase that it went on from, if any.
#[track_caller]
fn from(guest: &Guest<'_>) -> (Option<String>, Value) {
    let qemu = guest.only_qemu().process;
    let told = reboot(guest, &[]).ok().json();
    guest.wait_ready();
    assert_ne!(guest.only_qemu().process, qemu);
    (told["phase"]["candidate"].as_str().map(str::to_owned), told)
}

fn generation(guest: &Guest<'_>) -> Value {
    guest.rekindle(&["--json", "show"]).ok().json()["hardware"]["vm_generation"].clone()
}

fn guest<'a>(lab: &'a Lab, name: &str, image: &Path) -> Guest<'a> {
    lab.vm(name).section(PHASES).section(&section(image, "")).boot(&[])
}

#[test]
fn a_guest_goes_on_from_the_latest_phase_of_whose_blocks_none_was_written_since() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = guest(&lab, "phases", &path);
    wait_saved(&guest, "kernel");
    assert!(phase(&guest, "services")["void"].as_str().unwrap().contains("none was saved"));
    assert_eq!(read(&guest, 16, 64), digest(&path, 16, 64));
    announce(&guest);
    guest.rekindle(&["show"]).ok().prints(&["# phase kernel: ", "# phase services: ", "may be used"]);

    // What it has in its memory since, and what it has written elsewhere, is no part of it; the disk is what it is.
    guest.touch("16M");
    guest.ask("write vda 1000 8 7");
    let before = generation(&guest);
    let (candidate, told) = from(&guest);
    assert_eq!(candidate.as_deref(), Some("services"), "{told}");
    assert_eq!(told["ended"], "by-acpi", "{told}");
    assert_eq!(guest.ask("verify"), "0", "it has touched nothing yet");
    assert_ne!(generation(&guest), before, "it is told that it was set back");
    assert_eq!(read(&guest, 1000, 8), digest(&path, 1000, 8));
    assert_eq!(read(&guest, 16, 64), digest(&path, 16, 64));
    let console = fs::read_to_string(guest.file("console.log")).unwrap();
    assert!(console.contains("rekindle-phase services: restored "), "{console}");
    guest.rekindle(&["show", "--timeline"]).ok().prints(&[
        "reboot os --how phase",
        "choose a candidate",
        "tell the guest",
    ]);

    // The guest of the later phase has read block 20, that of the earlier one has not.
    guest.ask("write vda 20 1 9");
    assert!(phase(&guest, "services")["void"].as_str().unwrap().contains("disk disk0: block 20 "));
    let qemu = guest.only_qemu().process;
    reboot(&guest, &["--candidate", "services"]).status(1).prints(&["block 20 ", "--how cold", "runs as before"]);
    assert_eq!(guest.only_qemu().process, qemu);
    let (candidate, told) = from(&guest);
    assert_eq!(candidate.as_deref(), Some("kernel"), "{told}");
    assert_eq!(told["phase"]["skipped"][0]["name"], "services", "{told}");
    assert_eq!(read(&guest, 16, 64), digest(&path, 16, 64));
    assert_eq!(read(&guest, 1000, 8), digest(&path, 1000, 8));

    // It goes on booting, and so has a later phase again: one that knows what the earlier one did, and more.
    announce(&guest);
    assert_eq!(from(&guest).0.as_deref(), Some("services"));
    assert_eq!(read(&guest, 16, 64), digest(&path, 16, 64));

    // Each kernel has read the first block, where a partition table would be. It boots, and saves both anew.
    guest.ask("write vda 0 1 3");
    let (candidate, told) = from(&guest);
    assert_eq!(candidate, None, "{told}");
    assert_eq!(told["phase"]["skipped"].as_array().unwrap().len(), 2, "{told}");
    wait_saved(&guest, "kernel");
    assert_eq!(read(&guest, 0, 64), digest(&path, 0, 64));
    announce(&guest);

    // What was written while another server had it, or none, nobody knows.
    kill_server(&guest);
    guest.rekindle(&["recover"]).ok().prints(&["server"]);
    assert!(phase(&guest, "kernel")["void"].as_str().unwrap().contains("server is another one"));
    guest.ask("phase services");
    let skipped = "what that had touched before is not known";
    wait_for("it to be refused", DEADLINE, || {
        fs::read_to_string(guest.file("phases.log")).unwrap_or_default().contains(skipped).then_some(())
    });
    let (candidate, told) = from(&guest);
    assert_eq!(candidate, None, "{told}");
    assert_eq!(read(&guest, 16, 64), digest(&path, 16, 64));
    guest.rekindle(&["stop"]).ok();
    assert!(common::lab::entries(&lab.save_dir()).is_empty(), "{:?}", common::lab::entries(&lab.save_dir()));
}

/// The server of a disk has the image locked; but who writes it all the same, while the guest does not, is noticed.
#[test]
fn an_image_or_a_kernel_that_somebody_has_changed_is_noticed() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let (kernel, _) = lab.image();
    let own = lab.path("kernel");
    fs::copy(kernel, &own).unwrap();
    let vm = lab.vm("foreign").section(PHASES).section(&section(&path, ""));
    let text = fs::read_to_string(vm.write()).unwrap();
    let (from, to) = (lab.image().0, own.clone());
    fs::write(lab.path("foreign.toml"), text.replace(from.to_str().unwrap(), to.to_str().unwrap())).unwrap();
    lab.rekindle(["run", lab.path("foreign.toml").to_str().unwrap()]).ok();
    let guest = vm.guest();
    guest.wait_ready();
    wait_saved(&guest, "kernel");
    let bytes = fs::read(&own).unwrap();
    fs::write(&own, bytes).unwrap();
    assert!(phase(&guest, "kernel")["void"].as_str().unwrap().contains("kernel has changed"));
    assert_eq!(self::from(&guest).0, None);
    wait_saved(&guest, "kernel");
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::io::Write::write_all(&mut file, &[0; 512]).unwrap();
    drop(file);
    assert!(phase(&guest, "kernel")["void"].as_str().unwrap().contains("another process than the guest"));
    assert_eq!(self::from(&guest).0, None);
}

#[test]
fn what_keeps_no_phases_is_refused_and_what_is_not_wanted_is_not_saved() {
    let lab = Lab::new();
    let plain = lab.vm("plain").boot(&[]);
    let boot = plain.boot_id();
    reboot(&plain, &[]).status(1).prints(&["plain was not rebooted", "[phase]", "--how cold"]);
    let freeze = ["--how", "cold", "--end", "freeze"];
    lab.rekindle(["reboot", "os", "plain"].into_iter().chain(freeze))
        .status(1)
        .prints(&["no agent answers", "omit --end freeze"]);
    plain.rekindle(&["reboot", "os", "--how", "kexec", "--end", "freeze"]).status(2).prints(&["--how kexec"]);
    plain.rekindle(&["reboot", "os", "--candidate", "kernel"]).status(2).prints(&["--how phase"]);
    assert_eq!((plain.boot_id(), plain.status()), (boot, "running".into()));
    // Nobody listens: the guest has booted all the same.
    plain.ask("phase services");

    let guest = guest(&lab, "some", &image(&lab, "disk.raw"));
    wait_saved(&guest, "kernel");
    reboot(&guest, &["--candidate", "other"]).status(1).prints(&["it saves no phase other", "kernel, services"]);
    let log = || fs::read_to_string(guest.file("phases.log")).unwrap_or_default();
    guest.ask("phase other");
    wait_for("it to be refused", DEADLINE, || log().contains("does not name it").then_some(()));
    // No room where it is saved.
    let places: Vec<PathBuf> = common::lab::entries(&lab.save_dir());
    let place = places.iter().find(|path| path.extension().is_some_and(|end| end == "phase")).unwrap();
    fs::write(place.join("services.new"), b"in the way").unwrap();
    guest.ask("phase services");
    wait_for("it to fail", DEADLINE, || log().contains("services.new").then_some(()));
    assert!(phase(&guest, "services")["void"].as_str().unwrap().contains("none was saved"));
    fs::remove_file(place.join("services.new")).unwrap();
    // What one that was killed has left is in nobody's way.
    fs::create_dir(place.join("services.new")).unwrap();
    fs::write(place.join("services.new/half"), b"of it").unwrap();
    announce(&guest);
    // A candidate that is damaged is none, and the guest boots.
    let services = place.join("services");
    for file in common::lab::entries(&services) {
        if file.is_file() {
            fs::write(&file, b"nonsense").unwrap();
        }
    }
    assert!(phase(&guest, "services")["void"].is_string());
    assert_eq!(from(&guest).0.as_deref(), Some("kernel"));
}

/// Whatever dies at whichever point: the guest runs, or `recover` makes it run; from a candidate or booted, and its disk is the newest.
#[test]
fn every_death_ends_with_a_guest_that_runs() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = guest(&lab, "deaths", &path);
    wait_saved(&guest, "kernel");
    let mut wrong = Vec::new();
    for (fault, status) in [
        // The former guest runs, and goes on where Rekindle dies; another QEMU is tried when it has ended.
        ("phase.prepare.chosen:kill", None),
        ("phase.prepare.spawned:kill", None),
        ("phase.prepare.spawned:kill-new", Some(0)),
        ("phase.prepare.spawned:kill-old", Some(0)),
        ("restore.renew.registered:kill", None),
        ("restore.renew.registered:kill-new", Some(0)),
        ("phase.prepare.ready:kill", None),
        ("phase.prepare.ready:kill-new", Some(0)),
        ("phase.prepare.ready:kill-old", Some(0)),
        // It has ended, or is about to.
        ("cold.suspend.journalled:kill", None),
        ("cold.suspend.off:kill", None),
        ("phase.renew.replaced:kill", None),
        ("phase.renew.replaced:kill-new", Some(0)),
        ("phase.renew.agreed:kill", None),
        ("phase.renew.agreed:kill-new", Some(0)),
        ("restore.renew.loaded:kill", None),
        // The next one may have run.
        ("restore.renew.loaded:kill-new", Some(3)),
        ("restore.resume.journalled:kill", None),
        ("restore.resume.journalled:kill-new", Some(3)),
        ("restore.resume.resumed:kill", None),
        ("restore.settle.recorded:kill", None),
        ("restore.settle.handed-over:kill", None),
    ] {
        wait_saved(&guest, "kernel");
        guest.ask(&format!("write vda 2000 16 {}", fault.len()));
        let mut command = lab.command(["reboot", "os", &guest.name, "--how", "phase"]);
        command.env("REKINDLE_FAULT", fault);
        let qemu = guest.only_qemu().process;
        let done = lab.finish(command);
        if done.code != status {
            wrong.push(format!("{fault}: {done}"));
        }
        if done.code != Some(0) {
            guest.rekindle(&["recover"]).ok();
        }
        let is_prepared = fault.ends_with(":kill")
            && (fault.starts_with("phase.prepare") || fault == "restore.renew.registered:kill");
        if is_prepared && guest.only_qemu().process != qemu {
            wrong.push(format!("{fault}: the former guest was to go on"));
        }
        guest.wait_ready();
        assert_eq!(guest.status(), "running", "{fault}");
        assert_eq!(read(&guest, 2000, 16), digest(&path, 2000, 16), "{fault}");
        let fill = guest.file("fill.json");
        wait_for("the memory to be there", DEADLINE, || (!fill.exists()).then_some(()));
        guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
        guest.assert_sound();
        let ram = guest.rekindle(&["--json", "show"]).ok().json()["hardware"]["ram"]["path"]
            .as_str()
            .map(PathBuf::from)
            .unwrap();
        assert_eq!(common::lab::entries(ram.parent().unwrap()), [ram], "{fault}: memory of another QEMU is left");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // And it is a VM like any other.
    wait_saved(&guest, "kernel");
    guest.warm(&[]);
    assert_eq!(from(&guest).0.as_deref(), Some("kernel"), "a VMM restart changes nothing");
    // Who saves has died: phases that were saved stay.
    let keeper = common::with_argument_containing("phases").unwrap();
    let keeper = keeper.into_iter().find(|process| {
        let environment = fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(lab.run_root().to_str().unwrap())
    });
    let keeper = keeper.expect("a process that saves phases");
    keeper.kill().unwrap();
    assert!(keeper.wait_end(Duration::from_secs(10)).unwrap());
    assert_eq!(from(&guest).0.as_deref(), Some("kernel"));
    announce(&guest);
}

/// Saving a phase is nobody's command: who wants something of the VM meanwhile waits.
#[test]
fn a_reboot_waits_for_a_phase_that_is_being_saved_and_for_nothing_else() {
    let lab = Lab::new();
    let guest = guest(&lab, "saving", &image(&lab, "disk.raw"));
    wait_saved(&guest, "kernel");
    let rundir = RunDir::new(&lab.run_root(), &guest.name);
    // A phase is there a moment before who saved it lets go of the VM.
    let lock = |operation| wait_for("nobody to hold the VM", DEADLINE, || Lock::acquire(&rundir, operation).ok());
    let other = lock("protecting something else");
    reboot(&guest, &[]).status(1).prints(&["is busy", "protecting something else"]);
    drop(other);
    let saving = lock(phases::SAVING);
    let tries = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).unwrap();
    inotify::add_watch(&tries, rundir.file("lock"), inotify::WatchFlags::OPEN).unwrap();
    let mut command = lab.command(["--json", "reboot", "os", &guest.name, "--how", "phase"]);
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    wait_for("it to try", DEADLINE, || rustix::io::read(&tries, &mut [0; 64]).ok());
    assert!(child.try_wait().unwrap().is_none(), "it waits");
    drop(saving);
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success());
    let told: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(told["phase"]["candidate"], "kernel", "{told}");
    guest.wait_ready();
}

/// In huge pages the former guest's memory would be the next one's.
#[test]
fn a_guest_in_huge_pages_has_no_phases() {
    let pages = common::HugePages::borrow(264);
    let lab = Lab::new();
    let ram = pages.mount(&lab, "huge", ",size=264M");
    let vm = lab.vm("huge").memory("256M").section(&format!("[ram]\ndir = {ram:?}"));
    let guest = vm.section(PHASES).section(&section(&image(&lab, "disk.raw"), "")).boot(&[]);
    reboot(&guest, &[]).status(1).prints(&["huge was not rebooted", "huge pages", "--how cold"]);
    let log = || fs::read_to_string(guest.file("phases.log")).unwrap_or_default();
    wait_for("it not to be saved", DEADLINE, || log().contains("huge pages").then_some(()));
}
