//! Commands and helpers that run out of descriptors (`RLIMIT_NOFILE`).

use crate::common::interrupted::Interrupted;
use crate::common::protector::{Protector, crash, restore, store, wait_filled};
use crate::common::served::{assert_kept, digest, image, read, section, server};
use crate::common::{CommandResult, Lab, Watch};
use crate::qemu_user::user_of;
use rekindle_kernel::process::Process;
use std::fs;
use std::io::BufRead;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The limit that suffices for each command.
const ENOUGH: u64 = 256;
/// Limits that do not.
const TOO_LOW: [u64; 8] = [255, 64, 48, 32, 24, 16, 12, 8];

/// Runs `rekindle` with a limit of open files, soft and hard.
fn rekindle_with_limit(lab: &Lab, limit: u64, arguments: &[&str]) -> CommandResult {
    let rekindle = lab.command(arguments);
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={limit}:{limit}")).arg("--").arg(rekindle.get_program()).args(rekindle.get_args());
    for (name, value) in rekindle.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    lab.finish(command)
}

/// Limits the open files of a running process so that it can open only about `spare` more: fewer than the numbers below the
/// limit that are free.
fn limit_to_open_files(process: Process, spare: u64) {
    let open = fs::read_dir(format!("/proc/{}/fd", process.pid)).unwrap();
    let open: Vec<u64> = open.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok()).collect();
    let lowest_free = (0..).find(|number| !open.contains(number)).unwrap();
    set_limit(process, lowest_free + spare);
}

/// Sets the soft limit, as the process's user: root of a container may not change limits of other users' processes.
fn set_limit(process: Process, limit: u64) {
    let user = user_of(process);
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".into()]);
    command.args(["prlimit".into(), format!("--pid={}", process.pid), format!("--nofile={limit}:")]);
    assert!(command.status().unwrap().success(), "{command:?}");
}

#[test]
fn a_command_with_too_low_a_limit_of_open_files_names_it_and_changes_nothing() {
    let lab = Lab::new();
    let image = image(&lab, "disk.raw");
    let guest = lab.vm("few").section(&section(&image, "")).boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    let directory = store(&lab, "few");
    let store_path = directory.to_str().unwrap();
    let other = lab.vm("other").write();
    let other_disk = lab.path("other.raw");
    fs::write(&other_disk, [0; 1 << 16]).unwrap();
    let [other_disk, socket] = [other_disk, lab.path("other.sock")].map(|path| path.to_str().unwrap().to_owned());
    let protect = ["protect", "few", "--store", store_path, "--every", "50ms", "--count", "1"];
    let commands: [&[&str]; 7] = [
        &["run", other.to_str().unwrap()],
        &protect,
        &["restore", "few", "--store", store_path],
        &["replace-qemu", "few"],
        &["recover", "few"],
        &["pager", "few"],
        &["disk", "serve", &other_disk, "--socket", &socket],
    ];
    let qemu = guest.only_qemu().process;
    for command in commands {
        for limit in TOO_LOW {
            let result = rekindle_with_limit(&lab, limit, command);
            let text = result.stderr.clone();
            let is_named =
                text.contains(&format!("its limit is {limit} (RLIMIT_NOFILE)")) && text.contains("ulimit -n");
            assert!(result.code == Some(1) && is_named, "{result}");
        }
        assert_eq!(guest.only_qemu().process, qemu, "{command:?}");
    }
    assert!(!Path::new(&socket).exists() && !lab.run_root().join("other").exists());
    guest.assert_sound();
    // The limit that the errors name suffices.
    rekindle_with_limit(&lab, ENOUGH + 48, &["replace-qemu", "few"]).ok();
    assert_kept(&guest, &image, &boot);
    rekindle_with_limit(&lab, ENOUGH, &protect).ok();
    crash(&guest);
    rekindle_with_limit(&lab, ENOUGH, &["restore", "few", "--store", store_path]).ok();
    wait_filled(&guest);
    assert_kept(&guest, &image, &boot);
    guest.assert_sound();
}

/// A limit that an operator lowers, or a leak, is met in the middle of an operation.
#[test]
fn a_replacement_that_runs_out_of_descriptors_at_any_point_keeps_the_guest() {
    let lab = Lab::new();
    let image = image(&lab, "disk.raw");
    let guest = lab.vm("scarce").section(&section(&image, "")).boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    let (mut failed, mut recovered) = (0, 0);
    for point in [
        "warm.prepare.journalled",
        "warm.prepare.ready",
        "warm.suspend.stopped",
        "warm.suspend.saved",
        "warm.resume.resumed",
    ] {
        for spare in [4, 1, 0] {
            let watch = Watch::start(&lab.run_root());
            let source = guest.only_qemu().process;
            let command = Interrupted::start(&lab, &["reboot", "vmm", "scarce"], point);
            limit_to_open_files(command.process, spare);
            let result = command.finish(&lab);
            let row = format!("{point}, {spare} spare: {result}");
            eprintln!("{row}");
            // An injected call does not try again for 30 s, in which the guest may be stopped.
            assert!(result.took < Duration::from_secs(25), "{row}");
            if result.code != Some(0) {
                failed += 1;
                assert!(result.stderr.contains("(RLIMIT_NOFILE)"), "the limit is not named: {row}");
            }
            match result.code {
                Some(0) => assert_ne!(guest.only_qemu().process, source, "{row}"),
                Some(1) => assert_eq!(guest.only_qemu().process, source, "{row}"),
                Some(3) => {
                    recovered += 1;
                    let recovered = guest.rekindle(&["recover"]).ok();
                    assert!(!recovered.stdout.contains("memory was lost"), "{recovered}\n{row}");
                }
                _ => panic!("{row}"),
            }
            watch.end();
            // With the normal limit everything works.
            guest.rekindle(&["recover"]).ok();
            assert_kept(&guest, &image, &boot);
            guest.assert_sound();
        }
    }
    eprintln!("{failed} replacements failed, {recovered} of them needed recovery");
    assert!(failed > 0, "no replacement ran out of descriptors");
    guest.warm(&[]);
    guest.assert_sound();
}

#[test]
fn a_protector_and_a_disk_server_that_run_out_of_descriptors_lose_no_commit_and_no_write() {
    let lab = Lab::new();
    let image = image(&lab, "disk.raw");
    let guest = lab.vm("full").section(&section(&image, "")).boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    let store = store(&lab, "full");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "50ms"]);
    let committed = protector.next_checkpoint()["number"].as_u64().unwrap();
    let process = Process::of(protector.child.id()).unwrap();
    limit_to_open_files(process, 0);
    // It continues with the descriptors that it has, or reports the cause.
    let mut checkpoints = 0;
    let report = loop {
        let mut line = String::new();
        let bytes = protector.lines.read_line(&mut line).unwrap();
        if bytes == 0 || !line.contains("\"checkpoint\"") || checkpoints == 20 {
            break line;
        }
        checkpoints += 1;
    };
    assert!(checkpoints == 20 || report.contains("Too many open files"), "{report}");
    eprintln!("the protector, after {checkpoints} checkpoints: {report}");
    drop(protector);
    guest.rekindle(&["recover"]).ok();
    assert_kept(&guest, &image, &boot);
    // A server without descriptors serves its guest, and accepts the next QEMU when it has some.
    let server = server(&guest).expect("a server");
    limit_to_open_files(server, 0);
    guest.ask("write vda 10 20 3");
    // With a redo log, the image does not have the newest content.
    let written = read(&guest, 0, 64);
    assert_ne!(written, digest(&image, 0, 64));
    let assert_written = || {
        guest.wait_ready();
        assert_eq!(guest.boot_id(), boot);
        guest.verify();
        guest.ask("drop-caches");
        assert_eq!(read(&guest, 0, 64), written);
    };
    assert_written();
    set_limit(server, ENOUGH);
    guest.warm(&[]);
    assert_written();
    let mut next = Protector::start(&guest, &lab, &store, &["--every", "50ms", "--count", "1"]);
    assert!(next.wait("checkpoint")["number"].as_u64().unwrap() > committed);
    assert!(next.child.wait().unwrap().success());
    crash(&guest);
    restore(&guest, &store, &[]);
    wait_filled(&guest);
    assert_written();
    guest.assert_sound();
}
