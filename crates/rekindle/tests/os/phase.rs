//! `rekindle reboot --how phase`: a guest resumes from a phase of an earlier boot, but never from a phase that has
//! read disk blocks which were written since.

use crate::common::huge::{add_huge_pages, mount_hugetlbfs};
use crate::common::served::{digest, image, kill_server, read, section};
use crate::common::{CommandResult, DEADLINE, Guest, Lab, wait_for};
use rekindle_testing::process::attached_queues;
use rekindle_vm::lock::OperationLock;
use rekindle_vm::phases;
use rekindle_vm::rundir::RunDir;
use rustix::fs::inotify;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PHASES: &str = "[phase]\nsave = [\"kernel\", \"services\"]\n";

/// Returns a phase from the output of `show`.
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

/// Makes the guest announce its later phase, and waits until it is saved.
#[track_caller]
fn announce(guest: &Guest<'_>) {
    guest.ask("phase services");
    wait_saved(guest, "services");
}

fn reboot(guest: &Guest<'_>, arguments: &[&str]) -> CommandResult {
    let words = ["--json", "reboot", &guest.name, "--how", "phase"].into_iter().chain(arguments.iter().copied());
    guest.lab.rekindle(words)
}

/// Reboots the guest. Returns the phase that it resumed from, if any, and the report.
#[track_caller]
fn reboot_from(guest: &Guest<'_>) -> (Option<String>, Value) {
    let qemu = guest.only_qemu().process;
    let report = reboot(guest, &[]).ok().json();
    guest.wait_ready();
    assert_ne!(guest.only_qemu().process, qemu);
    (report["phase"]["candidate"].as_str().map(str::to_owned), report)
}

fn generation(guest: &Guest<'_>) -> Value {
    guest.rekindle(&["--json", "show"]).ok().json()["hardware"]["vm_generation"].clone()
}

fn guest<'a>(lab: &'a Lab, name: &str, image: &Path) -> Guest<'a> {
    lab.vm(name).section(PHASES).section(&section(image, "")).boot(&[])
}

#[test]
fn a_guest_with_several_queues_resumes_from_a_phase() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let vm = lab.vm("queues").queues();
    let guest = vm.section(PHASES).section(&section(&path, "")).boot(&[]);
    announce(&guest);
    for _ in 0..2 {
        assert_eq!(attached_queues(guest.only_qemu().process), [true, true, false]);
        assert_eq!(reboot_from(&guest).0.as_deref(), Some("services"));
    }
    assert_eq!(attached_queues(guest.only_qemu().process), [true, true, false]);
    guest.assert_sound();
}

#[test]
fn a_guest_resumes_from_the_latest_phase_whose_blocks_were_not_written_since() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = guest(&lab, "phases", &path);
    wait_saved(&guest, "kernel");
    assert!(phase(&guest, "services")["void"].as_str().unwrap().contains("none was saved"));
    assert_eq!(read(&guest, 16, 64), digest(&path, 16, 64));
    announce(&guest);
    guest.rekindle(&["show"]).ok().prints(&["# phase kernel: ", "# phase services: ", "may be used"]);

    // Later changes of memory are not part of the phase. Later writes to blocks that the phase has not read stay on the
    // disk.
    guest.touch("16M");
    guest.ask("write vda 1000 8 7");
    let before = generation(&guest);
    let (candidate, report) = reboot_from(&guest);
    assert_eq!(candidate.as_deref(), Some("services"), "{report}");
    assert_eq!(report["ended"], "by-acpi", "{report}");
    assert_eq!(guest.ask("verify"), "0", "memory that was touched after the phase is still there");
    assert_ne!(generation(&guest), before, "the guest cannot see that it was restored");
    assert_eq!(read(&guest, 1000, 8), digest(&path, 1000, 8));
    assert_eq!(read(&guest, 16, 64), digest(&path, 16, 64));
    let console = fs::read_to_string(guest.file("console.log")).unwrap();
    assert!(console.contains("rekindle-phase services: restored "), "{console}");
    guest.rekindle(&["show", "--timeline"]).ok().prints(&[
        "reboot --how phase",
        "choose a candidate",
        "notify the guest of the time",
    ]);

    // Block 20 was read before the later phase was saved, and not before the earlier one.
    guest.ask("write vda 20 1 9");
    assert!(phase(&guest, "services")["void"].as_str().unwrap().contains("disk disk0: block 20 "));
    let qemu = guest.only_qemu().process;
    reboot(&guest, &["--candidate", "services"]).status(1).prints(&["block 20 ", "--how cold", "runs as before"]);
    assert_eq!(guest.only_qemu().process, qemu);
    let (candidate, report) = reboot_from(&guest);
    assert_eq!(candidate.as_deref(), Some("kernel"), "{report}");
    assert_eq!(report["phase"]["skipped"][0]["name"], "services", "{report}");
    assert_eq!(read(&guest, 16, 64), digest(&path, 16, 64));
    assert_eq!(read(&guest, 1000, 8), digest(&path, 1000, 8));

    // The guest continues to boot and saves a later phase again, which includes the blocks that were read before the
    // earlier one.
    announce(&guest);
    assert_eq!(reboot_from(&guest).0.as_deref(), Some("services"));
    assert_eq!(read(&guest, 16, 64), digest(&path, 16, 64));

    // Each kernel reads the first block, to find a partition table: neither phase is usable. The guest boots and saves
    // both again.
    guest.ask("write vda 0 1 3");
    let (candidate, report) = reboot_from(&guest);
    assert_eq!(candidate, None, "{report}");
    assert_eq!(report["phase"]["skipped"].as_array().unwrap().len(), 2, "{report}");
    wait_saved(&guest, "kernel");
    assert_eq!(read(&guest, 0, 64), digest(&path, 0, 64));
    announce(&guest);

    // Writes are unknown from times at which another server, or none, had the disk.
    kill_server(&guest);
    guest.rekindle(&["recover"]).ok().prints(&["server"]);
    assert!(phase(&guest, "kernel")["void"].as_str().unwrap().contains("server was restarted since"));
    guest.ask("phase services");
    let rejected = "what that had touched before is not known";
    wait_for("the phase to be rejected", DEADLINE, || {
        fs::read_to_string(guest.file("phases.log")).unwrap_or_default().contains(rejected).then_some(())
    });
    let (candidate, report) = reboot_from(&guest);
    assert_eq!(candidate, None, "{report}");
    assert_eq!(read(&guest, 16, 64), digest(&path, 16, 64));
    guest.rekindle(&["stop"]).ok();
    assert!(
        crate::common::lab::entries(&lab.save_dir()).is_empty(),
        "{:?}",
        crate::common::lab::entries(&lab.save_dir())
    );
}

/// A disk server locks the image, but a program can ignore the lock: such a write is detected while the guest does not
/// write.
#[test]
fn a_change_of_the_image_or_the_kernel_from_outside_is_detected() {
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
    assert_eq!(reboot_from(&guest).0, None);
    wait_saved(&guest, "kernel");
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::io::Write::write_all(&mut file, &[0; 512]).unwrap();
    drop(file);
    assert!(phase(&guest, "kernel")["void"].as_str().unwrap().contains("another process than the guest"));
    assert_eq!(reboot_from(&guest).0, None);
}

#[test]
fn unknown_phases_are_rejected_and_failures_to_save_one_do_no_harm() {
    let lab = Lab::new();
    let plain = lab.vm("plain").boot(&[]);
    let boot = plain.boot_id();
    reboot(&plain, &[]).status(1).prints(&["plain was not rebooted", "[phase]", "--how cold"]);
    let freeze = ["--how", "cold", "--end", "freeze"];
    lab.rekindle(["reboot", "plain"].into_iter().chain(freeze))
        .status(1)
        .prints(&["no agent answers", "omit --end freeze"]);
    plain.rekindle(&["reboot", "--how", "kexec", "--end", "freeze"]).status(2).prints(&["--how kexec"]);
    plain.rekindle(&["reboot", "--candidate", "kernel"]).status(2).prints(&["--how phase"]);
    assert_eq!((plain.boot_id(), plain.status()), (boot, "running".into()));
    // No process listens for phases: the announcement has no effect.
    plain.ask("phase services");

    let guest = guest(&lab, "some", &image(&lab, "disk.raw"));
    wait_saved(&guest, "kernel");
    reboot(&guest, &["--candidate", "other"]).status(1).prints(&["it saves no phase other", "kernel, services"]);
    let log = || fs::read_to_string(guest.file("phases.log")).unwrap_or_default();
    guest.ask("phase other");
    wait_for("the phase to be rejected", DEADLINE, || log().contains("does not name it").then_some(()));
    // An existing file prevents the save.
    let saved: Vec<PathBuf> = crate::common::lab::entries(&lab.save_dir());
    let directory = saved.iter().find(|path| path.extension().is_some_and(|end| end == "phase")).unwrap();
    fs::write(directory.join("services.new"), b"in the way").unwrap();
    guest.ask("phase services");
    wait_for("the save to fail", DEADLINE, || log().contains("services.new").then_some(()));
    assert!(phase(&guest, "services")["void"].as_str().unwrap().contains("none was saved"));
    fs::remove_file(directory.join("services.new")).unwrap();
    // The files of a save that was killed do not prevent the next one.
    fs::create_dir(directory.join("services.new")).unwrap();
    fs::write(directory.join("services.new/half"), b"of it").unwrap();
    announce(&guest);
    // A damaged candidate is not used; the reboot uses the earlier one.
    let services = directory.join("services");
    for file in crate::common::lab::entries(&services) {
        if file.is_file() {
            fs::write(&file, b"nonsense").unwrap();
        }
    }
    assert!(phase(&guest, "services")["void"].is_string());
    assert_eq!(reboot_from(&guest).0.as_deref(), Some("kernel"));
}

/// After each fault the guest runs, or `recover` starts it, from a candidate or by a boot; its disk has the newest
/// writes.
#[test]
fn after_every_fault_a_guest_runs() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = guest(&lab, "deaths", &path);
    wait_saved(&guest, "kernel");
    let mut wrong = Vec::new();
    for (fault, status) in [
        // The guest still runs, and continues if Rekindle dies; if a QEMU dies, another one is started after the
        // guest's end.
        ("phase.prepare.chosen:kill", None),
        ("phase.prepare.spawned:kill", None),
        ("phase.prepare.spawned:kill-new", Some(0)),
        ("phase.prepare.spawned:kill-old", Some(0)),
        ("restore.renew.registered:kill", None),
        ("restore.renew.registered:kill-new", Some(0)),
        ("phase.prepare.ready:kill", None),
        ("phase.prepare.ready:kill-new", Some(0)),
        ("phase.prepare.ready:kill-old", Some(0)),
        // The guest has ended, or is about to.
        ("cold.suspend.journalled:kill", None),
        ("cold.suspend.off:kill", None),
        ("phase.renew.replaced:kill", None),
        ("phase.renew.replaced:kill-new", Some(0)),
        ("phase.renew.agreed:kill", None),
        ("phase.renew.agreed:kill-new", Some(0)),
        ("restore.renew.loaded:kill", None),
        // The new QEMU may have run the guest.
        ("restore.renew.loaded:kill-new", Some(3)),
        ("restore.resume.journalled:kill", None),
        ("restore.resume.journalled:kill-new", Some(3)),
        ("restore.resume.resumed:kill", None),
        ("restore.settle.recorded:kill", None),
        ("restore.settle.handed-over:kill", None),
    ] {
        wait_saved(&guest, "kernel");
        guest.ask(&format!("write vda 2000 16 {}", fault.len()));
        let mut command = lab.command(["reboot", &guest.name, "--how", "phase"]);
        command.env("REKINDLE_FAULT", fault);
        let qemu = guest.only_qemu().process;
        let result = lab.finish(command);
        if result.code != status {
            wrong.push(format!("{fault}: {result}"));
        }
        if result.code != Some(0) {
            guest.rekindle(&["recover"]).ok();
        }
        let is_prepared = fault.ends_with(":kill")
            && (fault.starts_with("phase.prepare") || fault == "restore.renew.registered:kill");
        if is_prepared && guest.only_qemu().process != qemu {
            wrong.push(format!("{fault}: the guest should have continued in its QEMU"));
        }
        guest.wait_ready();
        assert_eq!(guest.status(), "running", "{fault}");
        assert_eq!(read(&guest, 2000, 16), digest(&path, 2000, 16), "{fault}");
        let fill = guest.file("fill.json");
        wait_for("the fill to finish", DEADLINE, || (!fill.exists()).then_some(()));
        guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
        guest.assert_sound();
        let ram = guest.rekindle(&["--json", "show"]).ok().json()["hardware"]["ram"]["path"]
            .as_str()
            .map(PathBuf::from)
            .unwrap();
        assert_eq!(
            crate::common::lab::entries(ram.parent().unwrap()),
            [ram],
            "{fault}: memory of another QEMU is left"
        );
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // After all faults, the VM works as any other.
    wait_saved(&guest, "kernel");
    guest.warm(&[]);
    assert_eq!(reboot_from(&guest).0.as_deref(), Some("kernel"), "a VMM restart changes nothing");
    // If the process that saves phases has died, saved phases stay valid.
    let keeper = crate::common::with_argument_containing("phases").unwrap();
    let keeper = keeper.into_iter().find(|process| {
        let environment = fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(lab.run_root().to_str().unwrap())
    });
    let keeper = keeper.expect("a process that saves phases");
    keeper.kill().unwrap();
    assert!(keeper.wait_end(Duration::from_secs(10)).unwrap());
    assert_eq!(reboot_from(&guest).0.as_deref(), Some("kernel"));
    announce(&guest);
}

/// Saving a phase is a background operation: a command that needs the VM waits for it.
#[test]
fn a_reboot_waits_for_a_phase_that_is_being_saved_and_for_nothing_else() {
    let lab = Lab::new();
    let guest = guest(&lab, "saving", &image(&lab, "disk.raw"));
    wait_saved(&guest, "kernel");
    let rundir = RunDir::new(&lab.run_root(), &guest.name);
    // The process that saves a phase unlocks the VM a moment after the phase is visible.
    let lock =
        |operation| wait_for("the VM to be unlocked", DEADLINE, || OperationLock::acquire(&rundir, operation).ok());
    let other = lock("protecting something else");
    reboot(&guest, &[]).status(1).prints(&["is busy", "protecting something else"]);
    drop(other);
    let saving = lock(phases::SAVING);
    let attempts = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).unwrap();
    inotify::add_watch(&attempts, rundir.file("lock"), inotify::WatchFlags::OPEN).unwrap();
    let mut command = lab.command(["--json", "reboot", &guest.name, "--how", "phase"]);
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    wait_for("the reboot to try the lock", DEADLINE, || rustix::io::read(&attempts, &mut [0; 64]).ok());
    assert!(child.try_wait().unwrap().is_none(), "the reboot did not wait");
    drop(saving);
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success());
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["phase"]["candidate"], "kernel", "{report}");
    guest.wait_ready();
}

/// A VM with RAM in huge pages saves no phases: the new guest's memory would be that of the previous guest.
#[test]
fn a_guest_in_huge_pages_has_no_phases() {
    let _pages = add_huge_pages(264);
    let lab = Lab::new();
    let ram = mount_hugetlbfs(&lab, "huge", ",size=264M");
    let vm = lab.vm("huge").memory("256M").section(&format!("[ram]\ndir = {ram:?}"));
    let guest = vm.section(PHASES).section(&section(&image(&lab, "disk.raw"), "")).boot(&[]);
    reboot(&guest, &[]).status(1).prints(&["huge was not rebooted", "huge pages", "--how cold"]);
    let log = || fs::read_to_string(guest.file("phases.log")).unwrap_or_default();
    wait_for("the save to be rejected", DEADLINE, || log().contains("huge pages").then_some(()));
}
