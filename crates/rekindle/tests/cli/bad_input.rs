//! Bad input: definitions, arguments, QEMU binaries, files, guests. The error names the problem, and the guest
//! continues to run, or does so after `rekindle recover`.

use crate::common::{DEADLINE, Guest, Lab, Net, assert_ticks_once, qemu_new, qemu_old, wait_for};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

#[test]
fn mistakes_in_a_definition_are_reported_with_line_and_column_and_exit_status_2() {
    let lab = Lab::without_root();
    let path = lab.path("bad.toml");
    let assert_rejected = |text: &str, words: &[&str]| {
        fs::write(&path, text).unwrap();
        lab.rekindle(["run", path.to_str().unwrap()]).status(2).prints(words);
    };
    let (kernel, _) = lab.image();
    let boot = format!("[boot]\nkernel = {kernel:?}\n");
    assert_rejected(
        &format!("name = \"web\"\nmemmory = \"1G\"\n{boot}"),
        &["bad.toml:2:1", "memmory", "did you mean `memory`"],
    );
    assert_rejected(&format!("name = \"web\"\nmemory = \"512MB\"\n{boot}"), &["bad.toml:2", "memory", "512MB"]);
    assert_rejected(&format!("name = \"web\"\nmemory = 512\n{boot}"), &["bad.toml:2", "memory"]);
    assert_rejected(&format!("name = \"web\"\nmemory = \"0M\"\n{boot}"), &["bad.toml:2", "memory"]);
    assert_rejected(&format!("name = \"web\"\nshutdown_timeout = 5\n{boot}"), &["bad.toml:2", "shutdown_timeout"]);
    assert_rejected("name = \"web\"\n", &["nothing to boot", "kernel"]);
    assert_rejected(&boot, &["`name` is missing"]);
    assert_rejected("name = \"web", &["not valid TOML"]);
    assert_rejected("name = \"web\"\n[boot]\nkernel = \"nowhere/vmlinuz\"\n", &["bad.toml:3", "nowhere/vmlinuz"]);
    assert_rejected(
        &format!("name = \"../web\"\nqemu_args = [\"-m\", \"1G\"]\n{boot}"),
        &["name", "qemu_args", "`memory`"],
    );
    lab.rekindle(["run", lab.path("absent.toml").to_str().unwrap()]).status(2).prints(&["absent.toml"]);
    let report = lab.rekindle(["--json", "run", path.to_str().unwrap()]).status(2).json();
    assert_eq!(report["exit_status"], 2);
    lab.assert_empty();
}

#[test]
fn a_command_line_that_makes_no_sense_has_exit_status_2_and_an_unknown_vm_1() {
    let lab = Lab::without_root();
    for arguments in [
        &["replace-qemu", "web", "--how", "lukewarm"][..],
        &["replace-qemu"],
        &["replace-qemu", "web", "web"],
        &["replace-qemu", "--all"],
        &["replace-qemu", "web", "--qemu", "/x", "--rollback"],
        &["stop"],
        &["show", "../web"],
        &["stop", "web", "--timeout", "5"],
        &["probe", "gopher://x"],
        &["restart"],
    ] {
        let rejected = lab.rekindle(arguments).status(2);
        assert!(!rejected.stderr.is_empty(), "{rejected}");
    }
    for arguments in
        [&["show", "web"][..], &["stop", "web"], &["recover", "web"], &["replace-qemu", "web"], &["console", "web"]]
    {
        lab.rekindle(arguments).status(1).prints(&["there is no VM web"]);
    }
    lab.assert_empty();
}

/// Writes an executable script that a test uses as QEMU.
fn write_script(lab: &Lab, name: &str, text: &str) -> PathBuf {
    let path = lab.path(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Writes a wrapper of QEMU that first runs the shell code `when_incoming` if QEMU is started as a destination. The
/// code is part of a `case`.
fn write_qemu_wrapper(lab: &Lab, name: &str, when_incoming: &str) -> PathBuf {
    let real = qemu_new().display();
    write_script(
        lab,
        name,
        &format!("#!/bin/bash\ncase \" $* \" in *\" -incoming \"*)\n{when_incoming}\nesac\nexec {real} \"$@\"\n"),
    )
}

/// Writes a wrapper that replaces a device which the state contains, so that the load fails in the middle.
fn write_qemu_without_device(lab: &Lab, name: &str) -> PathBuf {
    let other = "set -- \"$@\" '{\"driver\": \"pvpanic-pci\"}';; *) set -- \"$@\" \"$word\";;";
    write_qemu_wrapper(lab, name, &format!("for word; do shift; case $word in *virtio-rng-pci*) {other} esac; done"))
}

/// A script that kills the QEMU with a given socket as soon as it runs the guest. The wrapper starts the script in the
/// background and becomes that QEMU when the script is ready. The script closes the taps that it inherits.
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

/// Writes a wrapper of a QEMU that is killed as soon as it runs the guest. A QEMU serves one client of a socket at a
/// time: no other client uses this socket in these tests.
fn write_qemu_killed_when_running(lab: &Lab, name: &str) -> PathBuf {
    let killer = write_script(lab, &format!("{name}.py"), KILLER);
    let find = "previous=; for word; do [ \"$previous\" = -pidfile ] && folder=${word%/*}; previous=$word; done";
    let killer = killer.display();
    let start = format!("/usr/bin/env python3 {killer} $$ \"$folder/protect.sock\" {killer}.ready >/dev/null 2>&1 &");
    let wait = format!("until [ -e {killer}.ready ]; do sleep 0.01; done; rm {killer}.ready");
    write_qemu_wrapper(lab, name, &format!("{find}\n{start}\n{wait}"))
}

#[test]
fn a_new_binary_that_will_not_do_is_refused_and_the_guest_runs_on() {
    let lab = Lab::new();
    let guest = lab.vm("steady").boot(&[]);
    guest.touch("16M");
    let (boot, pid) = (guest.boot_id(), guest.only_qemu().process.pid);
    let assert_rejected = |qemu: PathBuf, words: &[&str]| {
        for how in ["warm", "saved", "cold"] {
            let rejected = guest.reboot(how, &["--qemu", qemu.to_str().unwrap()]).status(1).prints(words);
            assert_eq!(rejected.json()["vms"][0]["left"], "as-it-was");
            assert_eq!(guest.only_qemu().process.pid, pid);
        }
        guest.verify();
        guest.assert_sound();
    };
    assert_rejected(lab.path("qemu-missing"), &["qemu-missing", "No such file"]);
    let not_executable = lab.path("qemu-plain");
    fs::write(&not_executable, "no program").unwrap();
    assert_rejected(not_executable, &["qemu-plain", "ermission denied"]);
    assert_rejected(lab.path("."), &["may be executed"]);
    assert_rejected("/bin/true".into(), &["/bin/true does not behave like a QEMU"]);
    let talker = write_script(&lab, "talker", "#!/bin/sh\necho '{\"hello\": 1}'\n");
    assert_rejected(talker, &["talker does not behave like a QEMU"]);
    let broken = write_script(&lab, "broken", "#!/bin/sh\necho 'libfoo.so: cannot open' >&2\nexit 127\n");
    assert_rejected(broken, &["broken", "libfoo.so: cannot open"]);
    // The machine type is pinned to a version that QEMU 7.2 does not have yet.
    assert_rejected(qemu_old().into(), &["machine type pc-q35-10.0", "7.2"]);
    assert_eq!(guest.boot_id(), boot);
    assert_ticks_once(&guest.file("console.log"));
}

#[test]
fn a_new_qemu_that_dies_before_the_guest_has_run_in_it_leaves_it_as_it_was() {
    let lab = Lab::new();
    let guest = lab.vm("safe").boot(&[]);
    guest.touch("16M");
    let (boot, pid) = (guest.boot_id(), guest.only_qemu().process.pid);
    let exits = write_qemu_wrapper(&lab, "crash-at-start", "echo 'boom at start' >&2; exit 1;;");
    let crashes = write_qemu_wrapper(&lab, "abort-at-start", "kill -SEGV $$;;");
    let fails_to_load = write_qemu_without_device(&lab, "crash-at-load");
    // This QEMU has less memory than the guest.
    let smaller = "for word; do shift; set -- \"$@\" \"${word//134217728/125829120}\"; done\n\
                   for word; do shift; set -- \"$@\" \"${word//131072K/122880K}\"; done";
    let too_small = write_qemu_wrapper(&lab, "less-memory", smaller);
    for (qemu, word) in
        [(exits, "boom at start"), (crashes, "ended while starting"), (fails_to_load, "failed to"), (too_small, "RAM")]
    {
        let name = qemu.display().to_string();
        guest.reboot("warm", &["--qemu", &name]).status(1).prints(&["the guest runs as before", word]);
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

/// The load fails at its end, after the load of the device that writes the VM generation ID into the guest's RAM, while
/// Rekindle decides that the new QEMU may continue. Rekindle must detect that this QEMU has not run the guest.
#[test]
fn a_load_that_fails_late_does_not_cost_the_guest_its_memory() {
    let lab = Lab::new();
    let guest = lab.vm("late").boot(&[]);
    guest.touch("16M");
    let (boot, pid) = (guest.boot_id(), guest.only_qemu().process.pid);
    let other_port = "for word; do shift; set -- \"$@\" \"${word/\\\"nr\\\":1/\\\"nr\\\":2}\"; done";
    let qemu = write_qemu_wrapper(&lab, "crash-late", other_port);
    for _ in 0..10 {
        let failed = guest.reboot("warm", &["--qemu", qemu.to_str().unwrap()]).status(1);
        assert_eq!(failed.prints(&["virtio-console"]).json()["vms"][0]["left"], "as-it-was");
        assert_eq!(guest.only_qemu().process.pid, pid);
    }
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();
}

#[test]
fn a_new_qemu_that_crashes_just_after_the_resume_is_reported_and_recovered_from() {
    let lab = Lab::new();
    let guest = lab.vm("brief").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    let qemu = write_qemu_killed_when_running(&lab, "die-at-resume");
    let reboot = guest.reboot("warm", &["--qemu", qemu.to_str().unwrap()]);
    match reboot.code {
        // The new QEMU died before the guest had written anything in it: the guest continues in the old one.
        Some(1) => {
            reboot.prints(&["the guest runs as before"]);
            guest.verify();
            assert_eq!(guest.boot_id(), boot);
        }
        // Exit status 0 is possible because the new QEMU may die after Rekindle's last check.
        Some(code @ (0 | 3)) => {
            if code == 3 {
                reboot.prints(&["lost", "rekindle recover"]);
            }
            // Rekindle may have found the new QEMU dead before it ended the old one. Then the old one stays, stopped,
            // and is of no use.
            let has_new = || guest.qemus().iter().any(|qemu| qemu.directory.ends_with("vmm-2"));
            wait_for("the new QEMU to be dead", DEADLINE, || (!has_new()).then_some(()));
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
        _ => panic!("{reboot}"),
    }
    guest.assert_sound();

    // With `--how saved` the state is still on the disk when the new QEMU fails to load it.
    guest.warm(&["--qemu", qemu_new().to_str().unwrap()]);
    let qemu = write_qemu_without_device(&lab, "crash-at-load");
    guest.touch("16M");
    let boot = guest.boot_id();
    let failed = guest.reboot("saved", &["--qemu", qemu.to_str().unwrap()]);
    failed.status(3).prints(&["failed to load the saved state", "rekindle recover"]);
    let recover = guest.rekindle(&["recover"]);
    if recover.code != Some(0) {
        // `recover` fails as long as that binary fails to load the state, and can be repeated.
        recover.status(1).prints(&["failed to load the saved state"]);
        fs::remove_file(&qemu).unwrap();
        std::os::unix::fs::symlink(qemu_new(), &qemu).unwrap();
        guest.rekindle(&["recover"]).ok().prints(&["with its memory"]);
    }
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();
}

/// Kills a warm reboot when the state has been saved, and then both QEMUs.
fn leave_only_the_state(guest: &Guest<'_>) {
    let mut command = guest.lab.command(["replace-qemu", &guest.name]);
    command.env("REKINDLE_FAULT", "warm.suspend.written:kill");
    guest.lab.finish(command);
    for qemu in guest.qemus() {
        qemu.process.kill().unwrap();
        qemu.process.wait_end(Duration::from_secs(10)).unwrap();
    }
}

#[test]
fn a_state_that_is_truncated_or_missing_is_not_loaded_and_can_be_put_back() {
    let lab = Lab::new();
    let guest = lab.vm("torn").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    leave_only_the_state(&guest);
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
    // Once the state file is back, the guest is recovered from it.
    fs::write(&state, &whole).unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["with its memory"]);
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();

    // A state that contains the RAM is damaged in the same way. `stop` drops that state and leaves nothing.
    let mut command = lab.command(["replace-qemu", &guest.name, "--how", "saved"]);
    command.env("REKINDLE_FAULT", "saved.renew.old-gone:kill");
    lab.finish(command);
    let saved = crate::common::lab::entries(&lab.save_dir());
    assert_eq!(saved.len(), 1, "{saved:?}");
    let whole = fs::read(&saved[0]).unwrap();
    fs::write(&saved[0], &whole[..whole.len() / 2]).unwrap();
    guest.rekindle(&["recover"]).status(1).prints(&["damaged", "bytes instead of"]);
    fs::write(&saved[0], &whole).unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["with its memory"]);
    guest.verify();
    guest.assert_sound();
    let mut command = lab.command(["replace-qemu", &guest.name, "--how", "saved"]);
    command.env("REKINDLE_FAULT", "saved.renew.old-gone:kill");
    lab.finish(command);
    guest.rekindle(&["stop"]).ok();
    lab.assert_empty();
    let saved = crate::common::lab::entries(&lab.save_dir());
    assert!(saved.is_empty(), "the saved state of a stopped VM is left: {saved:?}");
}

#[test]
fn records_that_cannot_be_understood_are_named() {
    let lab = Lab::without_root();
    let guest = lab.vm("muddled").net(Net::None).start(&[]);
    let other = lab.vm("clear").net(Net::None).start(&[]);
    let (record, journal) = (guest.file("state.json"), guest.file("operation.json"));
    let valid_record = fs::read(&record).unwrap();
    fs::write(&journal, "{\"kind\"").unwrap();
    for arguments in [&["replace-qemu"][..], &["recover"], &["stop"]] {
        guest.rekindle(arguments).status(1).prints(&["operation.json"]);
    }
    fs::remove_file(&journal).unwrap();
    fs::write(&record, &valid_record[..valid_record.len() / 2]).unwrap();
    for arguments in [&["show"][..], &["replace-qemu"], &["recover"], &["stop"]] {
        guest.rekindle(arguments).status(1).prints(&["state.json"]);
    }
    // A VM with a broken record does not hide the others.
    lab.rekindle(["ls"]).ok().prints(&["clear", "state.json"]);
    assert_eq!(other.status(), "running");
    let newer = String::from_utf8(valid_record.clone()).unwrap().replace("\"format\": 3", "\"format\": 99");
    fs::write(&record, newer).unwrap();
    guest.rekindle(&["show"]).status(1).prints(&["newer Rekindle"]);
    fs::write(&record, &valid_record).unwrap();
    assert_eq!(guest.status(), "running");
    lab.rekindle(["stop", "--now", "muddled", "clear"]).ok();
    lab.assert_empty();
}

#[test]
fn a_ram_directory_that_is_full_or_missing_is_reported() {
    let lab = Lab::new();
    lab.configure_host("ram_size = \"200M\"");
    let guest = lab.vm("first").boot(&[]);
    // The memory that is promised to the first guest counts, although the guest has not touched it.
    let second = lab.vm("second").write();
    let rejected = lab.rekindle(["run", second.to_str().unwrap()]).status(1);
    rejected.prints(&["128 MiB requested", "left", "promised to other guests"]);
    assert!(!lab.run_root().join("second").exists(), "something is left of it");
    let third = lab.vm("third").section("[ram]\ndir = \"/nowhere\"").write();
    let rejected = lab.rekindle(["run", third.to_str().unwrap()]);
    assert!(matches!(rejected.code, Some(1 | 2)), "{rejected}");
    rejected.prints(&["/nowhere"]);

    // Another file fills the directory. A warm reboot needs no room. A saved one would read all of the RAM file and so
    // allocate it; a QEMU that gets no page is killed.
    guest.touch("16M");
    let boot = guest.boot_id();
    let filler = lab.run_root().join(".ram/filler");
    let fill_directory = || {
        let free = rustix::fs::statvfs(lab.run_root().join(".ram")).unwrap();
        let free = free.f_bavail * free.f_frsize;
        fs::write(&filler, vec![1; usize::try_from(free).unwrap() - (8 << 20)]).unwrap();
    };
    fill_directory();
    guest.warm(&[]);
    guest.verify();
    guest.reboot("saved", &[]).status(1).prints(&["MiB", ".ram"]);
    guest.verify();
    fs::remove_file(&filler).unwrap();

    // The directory is filled while the guest's RAM is on the disk.
    let mut command = lab.command(["replace-qemu", &guest.name, "--how", "saved"]);
    command.env("REKINDLE_FAULT", "saved.renew.old-gone:kill");
    lab.finish(command);
    for path in crate::common::lab::entries(&lab.run_root().join(".ram")) {
        fs::remove_file(path).unwrap();
    }
    fill_directory();
    guest.rekindle(&["recover"]).status(1).prints(&["128 MiB requested", "left"]);
    assert_eq!(guest.status(), "needs-recovery");
    fs::remove_file(&filler).unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["with its memory"]);
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();

    // The RAM file has been renamed: Rekindle finds that before it stops anything.
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    let ram = PathBuf::from(shown["hardware"]["ram"]["path"].as_str().unwrap());
    let renamed = lab.run_root().join(".ram/kept");
    fs::rename(&ram, &renamed).unwrap();
    guest.reboot("warm", &[]).status(1).prints(&["RAM file", "--how saved"]);
    fs::rename(&renamed, &ram).unwrap();
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
fn a_guest_that_ignores_the_power_button_is_powered_off_and_its_vm_is_busy_meanwhile() {
    let lab = Lab::new();
    let guest = lab.vm("deaf").key("shutdown_timeout = \"8s\"").append("rekindle.ignore_power=1").boot(&[]);
    let boot = guest.boot_id();
    let cold = lab.command(["--json", "replace-qemu", &guest.name, "--how", "cold"]).spawn().unwrap();
    let holder = cold.id().to_string();
    wait_for("the reboot to begin", DEADLINE, || guest.file("operation.json").exists().then_some(()));
    for arguments in [&["replace-qemu"][..], &["recover"], &["stop"]] {
        guest.rekindle(arguments).status(1).prints(&["busy", "replace-qemu --how cold", &holder]);
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

#[test]
fn an_object_store_whose_certificate_would_not_be_checked_is_rejected() {
    let lab = Lab::without_root();
    let mut list = lab.command(["store", "ls", "s3://bucket/web"]);
    list.env("AWS_ALLOW_INVALID_CERTIFICATES", "true");
    lab.finish(list).status(1).prints(&["AWS_ALLOW_INVALID_CERTIFICATES", "AWS_CA_BUNDLE"]);
}
