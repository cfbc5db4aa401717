//! What people and machines get wrong: definitions, arguments, QEMU binaries, files, guests. The guest runs on, or
//! `rekindle recover` makes it, and what was wrong is named.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{DEADLINE, Guest, Lab, Net, assert_ticks_once, qemu_new, qemu_old, wait_for};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

#[test]
fn mistakes_in_a_definition_are_told_with_their_place_and_exit_status_2() {
    let lab = Lab::without_root();
    let path = lab.path("bad.toml");
    let refused = |text: &str, words: &[&str]| {
        fs::write(&path, text).unwrap();
        lab.rekindle(["run", path.to_str().unwrap()]).status(2).prints(words);
    };
    let (kernel, _) = lab.image();
    let boot = format!("[boot]\nkernel = {kernel:?}\n");
    refused(
        &format!("name = \"web\"\nmemmory = \"1G\"\n{boot}"),
        &["bad.toml:2:1", "memmory", "did you mean `memory`"],
    );
    refused(&format!("name = \"web\"\nmemory = \"512MB\"\n{boot}"), &["bad.toml:2", "memory", "512MB"]);
    refused(&format!("name = \"web\"\nmemory = 512\n{boot}"), &["bad.toml:2", "memory"]);
    refused(&format!("name = \"web\"\nmemory = \"0M\"\n{boot}"), &["bad.toml:2", "memory"]);
    refused(&format!("name = \"web\"\nshutdown_timeout = 5\n{boot}"), &["bad.toml:2", "shutdown_timeout"]);
    refused("name = \"web\"\n", &["nothing to boot", "kernel"]);
    refused(&boot, &["`name` is missing"]);
    refused("name = \"web", &["not valid TOML"]);
    refused("name = \"web\"\n[boot]\nkernel = \"nowhere/vmlinuz\"\n", &["bad.toml:3", "nowhere/vmlinuz"]);
    refused(&format!("name = \"../web\"\nqemu_args = [\"-m\", \"1G\"]\n{boot}"), &["name", "qemu_args", "`memory`"]);
    lab.rekindle(["run", lab.path("absent.toml").to_str().unwrap()]).status(2).prints(&["absent.toml"]);
    let told = lab.rekindle(["--json", "run", path.to_str().unwrap()]).status(2).json();
    assert_eq!(told["exit_status"], 2);
    lab.assert_empty();
}

#[test]
fn a_command_line_that_makes_no_sense_has_exit_status_2_and_an_unknown_vm_1() {
    let lab = Lab::without_root();
    for arguments in [
        &["reboot", "vmm", "web", "--how", "lukewarm"][..],
        &["reboot", "vmm"],
        &["reboot", "vmm", "web", "web"],
        &["reboot", "vmm", "--all"],
        &["reboot", "vmm", "web", "--qemu", "/x", "--rollback"],
        &["stop"],
        &["show", "../web"],
        &["stop", "web", "--timeout", "5"],
        &["probe", "gopher://x"],
        &["restart"],
    ] {
        let done = lab.rekindle(arguments).status(2);
        assert!(!done.stderr.is_empty(), "{done}");
    }
    for arguments in
        [&["show", "web"][..], &["stop", "web"], &["recover", "web"], &["reboot", "vmm", "web"], &["console", "web"]]
    {
        lab.rekindle(arguments).status(1).prints(&["there is no VM web"]);
    }
    lab.assert_empty();
}

/// A program that is run in the place of QEMU.
fn script(lab: &Lab, name: &str, text: &str) -> PathBuf {
    let path = lab.path(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// A QEMU that does something first if it is to take a guest over.
fn odd_qemu(lab: &Lab, name: &str, when_incoming: &str) -> PathBuf {
    let real = qemu_new().display();
    script(
        lab,
        name,
        &format!("#!/bin/bash\ncase \" $* \" in *\" -incoming \"*)\n{when_incoming}\nesac\nexec {real} \"$@\"\n"),
    )
}

/// A QEMU that lacks a device which the state has: it gives up in the middle of the load.
fn lacking_qemu(lab: &Lab, name: &str) -> PathBuf {
    let other = "set -- \"$@\" '{\"driver\": \"pvpanic-pci\"}';; *) set -- \"$@\" \"$word\";;";
    odd_qemu(lab, name, &format!("for word; do shift; case $word in *virtio-rng-pci*) {other} esac; done"))
}

/// Kills the QEMU that has the socket given once it runs the guest. Started in the background by a wrapper that becomes
/// that QEMU once this is ready; lets go of the taps that it inherits.
const KILLER: &str = r#"
import os, socket, sys, time
os.closerange(3, 256)
pid, path = int(sys.argv[1]), sys.argv[2]
end = time.monotonic() + 60
open(sys.argv[3], "w").close()
while time.monotonic() < end:
    try:
        monitor = socket.socket(socket.AF_UNIX)
        monitor.connect(path)
        break
    except OSError:
        time.sleep(0.001)
monitor.sendall(b'{"execute": "qmp_capabilities"}\n{"execute": "query-status"}\n')
for line in monitor.makefile():
    if '"RESUME"' in line or '"running": true' in line:
        os.kill(pid, 9)
        break
"#;

/// A QEMU that is killed as soon as it runs the guest. The socket is one that nobody else asks in these tests: a QEMU
/// talks to one at a time.
fn dying_qemu(lab: &Lab, name: &str) -> PathBuf {
    let killer = script(lab, &format!("{name}.py"), KILLER);
    let find = "previous=; for word; do [ \"$previous\" = -pidfile ] && folder=${word%/*}; previous=$word; done";
    let killer = killer.display();
    let start = format!("/usr/bin/env python3 {killer} $$ \"$folder/protect.sock\" {killer}.ready >/dev/null 2>&1 &");
    let wait = format!("until [ -e {killer}.ready ]; do sleep 0.01; done; rm {killer}.ready");
    odd_qemu(lab, name, &format!("{find}\n{start}\n{wait}"))
}

#[test]
fn a_new_binary_that_will_not_do_is_refused_and_the_guest_runs_on() {
    let lab = Lab::new();
    let guest = lab.vm("steady").boot(&[]);
    guest.touch("16M");
    let (boot, pid) = (guest.boot_id(), guest.only_qemu().process.pid);
    let refused = |qemu: PathBuf, words: &[&str]| {
        for how in ["warm", "saved", "cold"] {
            let done = guest.reboot(how, &["--qemu", qemu.to_str().unwrap()]).status(1).prints(words);
            assert_eq!(done.json()["vms"][0]["left"], "as-it-was");
            assert_eq!(guest.only_qemu().process.pid, pid);
        }
        guest.verify();
        guest.assert_sound();
    };
    refused(lab.path("qemu-missing"), &["qemu-missing", "No such file"]);
    let plain = lab.path("qemu-plain");
    fs::write(&plain, "no program").unwrap();
    refused(plain, &["qemu-plain", "ermission denied"]);
    refused(lab.path("."), &["may be executed"]);
    refused("/bin/true".into(), &["/bin/true does not behave like a QEMU"]);
    refused(script(&lab, "talker", "#!/bin/sh\necho '{\"hello\": 1}'\n"), &["talker does not behave like a QEMU"]);
    let broken = script(&lab, "broken", "#!/bin/sh\necho 'libfoo.so: cannot open' >&2\nexit 127\n");
    refused(broken, &["broken", "libfoo.so: cannot open"]);
    // The machine type is pinned to one that 7.2 does not have yet.
    refused(qemu_old().into(), &["machine type pc-q35-10.0", "7.2"]);
    assert_eq!(guest.boot_id(), boot);
    assert_ticks_once(&guest.file("console.log"));
}

#[test]
fn a_new_qemu_that_dies_before_the_guest_has_run_in_it_leaves_it_as_it_was() {
    let lab = Lab::new();
    let guest = lab.vm("safe").boot(&[]);
    guest.touch("16M");
    let (boot, pid) = (guest.boot_id(), guest.only_qemu().process.pid);
    let crash = odd_qemu(&lab, "crash-at-start", "echo 'boom at start' >&2; exit 1;;");
    let abort = odd_qemu(&lab, "abort-at-start", "kill -SEGV $$;;");
    let load = lacking_qemu(&lab, "crash-at-load");
    // It has less memory than the guest.
    let smaller = "for word; do shift; set -- \"$@\" \"${word//134217728/125829120}\"; done\n\
                   for word; do shift; set -- \"$@\" \"${word//131072K/122880K}\"; done";
    let small = odd_qemu(&lab, "less-memory", smaller);
    for (qemu, words) in
        [(crash, &["boom at start"][..]), (abort, &["ended while starting"]), (load, &["failed to"]), (small, &["RAM"])]
    {
        let name = qemu.display().to_string();
        guest.reboot("warm", &["--qemu", &name]).status(1).prints(&["the guest runs as before"]).prints(words);
        guest.verify();
        assert_eq!(guest.only_qemu().process.pid, pid, "{name}");
        guest.assert_sound();
    }
    assert_eq!(guest.boot_id(), boot);
    guest.warm(&[]);
    guest.verify();
    guest.assert_sound();
    assert_ticks_once(&guest.file("console.log"));
}

/// The load fails at its end, behind the device that writes the VM generation ID into the guest's RAM, and while it is
/// decided that the new QEMU may go on: it must not be taken for one that has run the guest.
#[test]
fn a_load_that_fails_late_does_not_cost_the_guest_its_memory() {
    let lab = Lab::new();
    let guest = lab.vm("late").boot(&[]);
    guest.touch("16M");
    let (boot, pid) = (guest.boot_id(), guest.only_qemu().process.pid);
    let other_port = "for word; do shift; set -- \"$@\" \"${word/\\\"nr\\\":1/\\\"nr\\\":2}\"; done";
    let qemu = odd_qemu(&lab, "crash-late", other_port);
    for _ in 0..10 {
        let done = guest.reboot("warm", &["--qemu", qemu.to_str().unwrap()]).status(1);
        assert_eq!(done.prints(&["virtio-console"]).json()["vms"][0]["left"], "as-it-was");
        assert_eq!(guest.only_qemu().process.pid, pid);
    }
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();
}

#[test]
fn a_new_qemu_that_crashes_just_after_the_resume_is_told_and_recovered_from() {
    let lab = Lab::new();
    let guest = lab.vm("brief").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    let qemu = dying_qemu(&lab, "die-at-resume");
    let done = guest.reboot("warm", &["--qemu", qemu.to_str().unwrap()]);
    match done.code {
        // It died before the guest had written anything in it: the guest goes on in the old one.
        Some(1) => {
            done.prints(&["the guest runs as before"]);
            guest.verify();
            assert_eq!(guest.boot_id(), boot);
        }
        // Exit status 0: it died after the last look at it.
        Some(code @ (0 | 3)) => {
            if code == 3 {
                done.prints(&["lost", "rekindle recover"]);
            }
            // Rekindle may have seen it dead before it had ended the old one, which is of no use any more, and stays stopped.
            let new = || guest.qemus().into_iter().find(|qemu| qemu.directory.ends_with("vmm-2"));
            wait_for("the new QEMU to be dead", DEADLINE, || new().is_none().then_some(()));
            assert!(
                guest.qemus().iter().all(|qemu| qemu.run_state().as_deref() != Some("running")),
                "{}",
                lab.state_report()
            );
            assert!(["needs-recovery", "ended"].contains(&guest.status().as_str()), "{}", guest.status());
            guest.rekindle(&["recover"]).ok().prints(&["memory was lost", "booted"]);
            guest.wait_ready();
            assert_ne!(guest.boot_id(), boot);
        }
        _ => panic!("{done}"),
    }
    guest.assert_sound();

    // With the saved way the state is still on the disk when the new QEMU fails to load it.
    guest.warm(&["--qemu", qemu_new().to_str().unwrap()]);
    let qemu = lacking_qemu(&lab, "crash-at-load");
    guest.touch("16M");
    let boot = guest.boot_id();
    let done = guest.reboot("saved", &["--qemu", qemu.to_str().unwrap()]);
    done.status(3).prints(&["failed to load the saved state", "rekindle recover"]);
    let first = guest.rekindle(&["recover"]);
    if first.code != Some(0) {
        // It fails as long as that binary does, and can be done again.
        first.status(1).prints(&["failed to load the saved state"]);
        fs::remove_file(&qemu).unwrap();
        std::os::unix::fs::symlink(qemu_new(), &qemu).unwrap();
        guest.rekindle(&["recover"]).ok().prints(&["with its memory"]);
    }
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();
}

/// Cut a warm reboot off with the state saved, and let both QEMUs die.
fn only_the_state_is_left(guest: &Guest<'_>) {
    let mut command = guest.lab.command(["reboot", "vmm", &guest.name]);
    command.env("REKINDLE_FAULT", "warm.suspend.written:kill");
    guest.lab.finish(command);
    for qemu in guest.qemus() {
        qemu.process.kill().unwrap();
        qemu.process.wait_end(Duration::from_secs(10)).unwrap();
    }
}

#[test]
fn a_state_that_is_cut_short_or_gone_is_not_loaded_and_not_the_end() {
    let lab = Lab::new();
    let guest = lab.vm("torn").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    only_the_state_is_left(&guest);
    let state = guest.file("handover.stream");
    let whole = fs::read(&state).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for (content, word) in [(&whole[..whole.len() / 2], "bytes instead of"), (&flipped, "digest"), (&[][..], "bytes")] {
        fs::write(&state, content).unwrap();
        guest.rekindle(&["recover"]).status(1).prints(&["handover.stream", "damaged", word, "rekindle stop torn"]);
        assert!(guest.qemus().is_empty(), "{}", lab.state_report());
    }
    fs::remove_file(&state).unwrap();
    guest.rekindle(&["recover"]).status(1).prints(&["handover.stream", "No such file"]);
    // It was only out of reach: put back, it is as good as ever.
    fs::write(&state, &whole).unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["with its memory"]);
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();

    // The same for a state that holds the RAM; and giving up is possible, and leaves nothing.
    let mut command = lab.command(["reboot", "vmm", &guest.name, "--how", "saved"]);
    command.env("REKINDLE_FAULT", "saved.renew.old-gone:kill");
    lab.finish(command);
    let saved = common::lab::entries(&lab.save_dir());
    assert_eq!(saved.len(), 1, "{saved:?}");
    let whole = fs::read(&saved[0]).unwrap();
    fs::write(&saved[0], &whole[..whole.len() / 2]).unwrap();
    guest.rekindle(&["recover"]).status(1).prints(&["damaged", "bytes instead of"]);
    fs::write(&saved[0], &whole).unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["with its memory"]);
    guest.verify();
    guest.assert_sound();
    let mut command = lab.command(["reboot", "vmm", &guest.name, "--how", "saved"]);
    command.env("REKINDLE_FAULT", "saved.renew.old-gone:kill");
    lab.finish(command);
    guest.rekindle(&["stop"]).ok();
    lab.assert_empty();
    let saved = common::lab::entries(&lab.save_dir());
    assert!(saved.is_empty(), "the saved state of a VM that is gone is left: {saved:?}");
}

#[test]
fn records_that_cannot_be_understood_are_named() {
    let lab = Lab::without_root();
    let guest = lab.vm("muddled").net(Net::None).start(&[]);
    let other = lab.vm("clear").net(Net::None).start(&[]);
    let (path, journal) = (guest.file("state.json"), guest.file("operation.json"));
    let whole = fs::read(&path).unwrap();
    fs::write(&journal, "{\"kind\"").unwrap();
    for arguments in [&["reboot", "vmm"][..], &["recover"], &["stop"]] {
        guest.rekindle(arguments).status(1).prints(&["operation.json"]);
    }
    fs::remove_file(&journal).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    for arguments in [&["show"][..], &["reboot", "vmm"], &["recover"], &["stop"]] {
        guest.rekindle(arguments).status(1).prints(&["state.json"]);
    }
    // One muddled VM does not hide the others.
    lab.rekindle(["ls"]).ok().prints(&["clear", "state.json"]);
    assert_eq!(other.status(), "running");
    let newer = String::from_utf8(whole.clone()).unwrap().replace("\"format\": 3", "\"format\": 99");
    fs::write(&path, newer).unwrap();
    guest.rekindle(&["show"]).status(1).prints(&["newer Rekindle"]);
    fs::write(&path, &whole).unwrap();
    assert_eq!(guest.status(), "running");
    lab.rekindle(["stop", "--now", "muddled", "clear"]).ok();
    lab.assert_empty();
}

#[test]
fn a_ram_directory_that_is_full_or_gone_is_told() {
    let lab = Lab::new();
    fs::write(lab.path(".host.toml"), "ram_size = \"200M\"\n").unwrap();
    let guest = lab.vm("first").boot(&[]);
    // What is promised to the first counts, though its guest has not touched it.
    let second = lab.vm("second").write();
    let done = lab.rekindle(["run", second.to_str().unwrap()]).status(1);
    done.prints(&["128 MiB requested", "left", "promised to other guests"]);
    assert!(!lab.run_root().join("second").exists(), "something is left of it");
    let lost = lab.vm("third").section("[ram]\ndir = \"/nowhere\"").write();
    let refused = lab.rekindle(["run", lost.to_str().unwrap()]);
    assert!(matches!(refused.code, Some(1 | 2)), "{refused}");
    refused.prints(&["/nowhere"]);

    // Something else fills it: a warm reboot needs no room; a saved one would read, and so fill, all of the RAM file,
    // and a page too many ends the QEMU that asks for it.
    guest.touch("16M");
    let boot = guest.boot_id();
    let filler = lab.run_root().join(".ram/filler");
    let fill = || {
        let free = rustix::fs::statvfs(lab.run_root().join(".ram")).unwrap();
        let free = free.f_bavail * free.f_frsize;
        fs::write(&filler, vec![1; usize::try_from(free).unwrap() - (8 << 20)]).unwrap();
    };
    fill();
    guest.warm(&[]);
    guest.verify();
    guest.reboot("saved", &[]).status(1).prints(&["MiB", ".ram"]);
    guest.verify();
    fs::remove_file(&filler).unwrap();

    // It is filled while the guest's RAM is on the disk.
    let mut command = lab.command(["reboot", "vmm", &guest.name, "--how", "saved"]);
    command.env("REKINDLE_FAULT", "saved.renew.old-gone:kill");
    lab.finish(command);
    for path in common::lab::entries(&lab.run_root().join(".ram")) {
        fs::remove_file(path).unwrap();
    }
    fill();
    guest.rekindle(&["recover"]).status(1).prints(&["128 MiB requested", "left"]);
    assert_eq!(guest.status(), "needs-recovery");
    fs::remove_file(&filler).unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["with its memory"]);
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();

    // The RAM file has lost its name: that is found before anything is stopped.
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    let ram = PathBuf::from(shown["hardware"]["ram"]["path"].as_str().unwrap());
    let kept = lab.run_root().join(".ram/kept");
    fs::rename(&ram, &kept).unwrap();
    guest.reboot("warm", &[]).status(1).prints(&["RAM file", "--how saved"]);
    fs::rename(&kept, &ram).unwrap();
    guest.warm(&[]);
    guest.verify();
}

#[test]
fn what_cannot_be_carried_or_saved_is_refused_beforehand() {
    let lab = Lab::new();
    let vm = lab.vm("heavy").key("save_dir = \"/proc\"");
    let guest = vm.key("qemu_args = [\"-object\", \"memory-backend-ram,id=more,size=8M\"]").boot(&[]);
    let pid = guest.only_qemu().process.pid;
    guest.reboot("warm", &[]).status(1).prints(&["nothing was stopped", "memory-backend"]);
    guest.reboot("saved", &[]).status(1).prints(&["/proc has 0 MiB free", "128 MiB", "save_dir"]);
    assert_eq!(guest.only_qemu().process.pid, pid);
    guest.reboot("cold", &[]).ok();
    guest.wait_ready();
    guest.assert_sound();
}

#[test]
fn a_guest_that_ignores_the_power_button_is_powered_off_and_meanwhile_nobody_else_gets_at_it() {
    let lab = Lab::new();
    let guest = lab.vm("deaf").key("shutdown_timeout = \"8s\"").append("rekindle.ignore_power=1").boot(&[]);
    let boot = guest.boot_id();
    let cold = lab.command(["--json", "reboot", "vmm", &guest.name, "--how", "cold"]).spawn().unwrap();
    let holder = cold.id().to_string();
    wait_for("the reboot to begin", DEADLINE, || guest.file("operation.json").exists().then_some(()));
    for arguments in [&["reboot", "vmm"][..], &["recover"], &["stop"]] {
        guest.rekindle(arguments).status(1).prints(&["busy", "reboot vmm --how cold", &holder]);
    }
    let definition = lab.path("deaf.toml");
    lab.rekindle(["run", definition.to_str().unwrap()]).status(1).prints(&["busy", &holder]);
    assert_eq!(guest.status(), "running");
    let report = lab.wait(cold, "cold".into()).ok();
    report.prints(&["powered off"]);
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.assert_sound();
    guest.rekindle(&["stop", "--timeout", "1s"]).ok().prints(&["powered off"]);
    lab.assert_empty();
}
