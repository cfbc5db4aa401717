//! A VM's life: run, ls, show, console, pause, stop; rejected commands; an unprivileged user.

use crate::common::{DEADLINE, Lab, Net, wait_for};
use rekindle_testing::micro::KERNEL_OPTIONS;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

#[test]
fn a_vm_is_started_shown_and_stopped_and_nothing_is_left() {
    let lab = Lab::new();
    lab.rekindle(["ls"]).ok().prints(&["no VMs"]);
    let guest = lab.vm("web").start(&[]);
    let definition = lab.path("web.toml");
    lab.rekindle(["run", definition.to_str().unwrap()]).status(1).prints(&["web runs already", "rekindle stop web"]);
    guest.wait_ready();
    lab.rekindle(["ls"]).ok().prints(&["NAME", "web", "running", "128M", "pc-q35-10.0"]);
    let shown = guest.rekindle(&["show"]).ok();
    // `show` also prints the defaults.
    shown.prints(&[
        "web is running",
        "sockets: ",
        "logs: ",
        "helper watch: process ",
        "vcpus = 1",
        "accel = \"auto\"",
        "cpu = \"auto\"",
        "qemu_args = []",
    ]);
    let shown = guest.rekindle(&["show"]).ok();
    shown.prints(&[
        "shutdown_timeout = \"1m\"",
        "vga = false",
        "agent = true",
        "rng = true",
        "prealloc = false",
        "mac = ",
    ]);
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    assert_eq!(shown["status"], "running");
    assert_eq!(shown["vmm"]["pid"], guest.only_qemu().process.pid);
    let running: Vec<_> = shown["running_command_line"].as_array().unwrap().iter().skip(1).cloned().collect();
    assert_eq!(
        &running,
        shown["command_line"].as_array().unwrap(),
        "QEMU runs with another command line than is shown"
    );
    guest.rekindle(&["show", "--timeline"]).ok().prints(&["no operation has been done"]);
    // QEMU does not depend on the session that started it.
    let session = fs::read_to_string(format!("/proc/{}/stat", guest.only_qemu().process.pid)).unwrap();
    let fields: Vec<_> = session.rsplit(") ").next().unwrap().split(' ').collect();
    assert_eq!(fields[3], guest.only_qemu().process.pid.to_string(), "it has no session of its own");
    assert_eq!(lab.interfaces(), ["web-net0"]);

    // These files are private to this user and the VM's: the sockets control the guest, and the files hold its memory.
    let user = fs::metadata(format!("/proc/{}", guest.only_qemu().process.pid)).unwrap().uid();
    assert_ne!(user, 0);
    for (path, group_may) in [(guest.file(""), 0o010), (guest.file("vmm-1"), 0o010), (lab.run_root(), 0)] {
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!(metadata.mode() & 0o077, group_may, "{}", path.display());
        assert!(group_may == 0 || metadata.gid() == user, "{}", path.display());
    }
    let stopped = guest.rekindle(&["stop"]).ok();
    stopped.prints(&["web: shut down by ACPI"]);
    lab.assert_empty();
    guest.rekindle(&["stop"]).status(1).prints(&["there is no VM web"]);
    // The VM can be started again immediately.
    lab.rekindle(["run", definition.to_str().unwrap()]).ok();
    guest.rekindle(&["stop", "--now"]).ok().prints(&["powered off"]);
    lab.assert_empty();
}

#[test]
fn a_name_and_a_kernel_or_a_disk_are_enough() {
    let lab = Lab::without_root();
    let (kernel, _) = lab.image();
    let disk = lab.path("disk.raw");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let kernel = format!("name = \"kernel\"\n[boot]\nkernel = {kernel:?}\n");
    let disk = format!("name = \"disk\"\n[[disk]]\npath = {disk:?}\n");
    for (name, text) in [("kernel", kernel), ("disk", disk)] {
        let path = lab.path("least.toml");
        fs::write(&path, text).unwrap();
        let run = lab.rekindle(["--json", "run", path.to_str().unwrap()]).ok().json();
        assert_eq!(run["definition"]["memory"], "512M", "{run:#}");
        lab.rekindle(["show", name]).ok().prints(&["is running", "memory = \"512M\"", "[devices]"]);
        // The QEMU that the definition does not name is found in PATH.
        let status = lab.rekindle(["--json", "status"]).ok().json();
        assert!(status["guests"][0]["outdated"].is_null(), "{status:#}");
        lab.rekindle(["replace-qemu", name]).ok();
        lab.rekindle(["stop", "--now", name]).ok();
    }
    lab.assert_empty();
}

#[test]
fn the_console_is_read_and_written_and_detached() {
    let lab = Lab::new();
    let guest = lab.vm("talk").append("rekindle.tick=100").boot(&[]);
    let mut child = lab.command(["console", "talk"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    wait_for("a tick on the console", DEADLINE, || {
        line.clear();
        lines.read_line(&mut line).unwrap();
        line.starts_with("tick ").then_some(())
    });
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"hello\n\x1d").unwrap();
    let status = wait_for("the console to end", DEADLINE, || child.try_wait().unwrap());
    assert!(status.success());
    guest.assert_sound();
    assert!(guest.file("console.log").exists());
}

#[test]
fn a_vm_whose_qemu_died_is_reported_as_ended_and_booted_by_recover() {
    let lab = Lab::new();
    let guest = lab.vm("fallen").boot(&[]);
    let boot = guest.boot_id();
    let qemu = guest.only_qemu();
    qemu.process.kill().unwrap();
    assert!(qemu.process.wait_end(Duration::from_secs(10)).unwrap());
    assert_eq!(guest.status(), "ended");
    guest.reboot("warm", &[]).status(1).prints(&["fallen", "has ended"]);
    guest.rekindle(&["recover"]).ok().prints(&["memory was lost", "booted"]);
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.assert_sound();
    guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
    // After a guest has powered itself off, the VM can be started again.
    guest.send("poweroff");
    wait_for("the guest to be off", DEADLINE, || guest.qemus().is_empty().then_some(()));
    assert_eq!(guest.status(), "ended");
    lab.rekindle(["run", lab.path("fallen.toml").to_str().unwrap()]).ok();
    guest.wait_ready();
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

#[test]
fn run_and_stop_can_be_killed_at_any_moment() {
    let lab = Lab::new();
    let definition = lab.vm("interrupted").write();
    let guest = lab.vm("interrupted").guest();
    for delay in [1, 4, 10, 20, 40, 60, 90, 130, 180] {
        let mut run = lab.command(["run", definition.to_str().unwrap()]).spawn().unwrap();
        thread::sleep(Duration::from_millis(delay));
        let _ = run.kill();
        run.wait().unwrap();
        let mut stop = lab.command(["stop", "--now", "interrupted"]).spawn().unwrap();
        thread::sleep(Duration::from_millis(delay / 3));
        let _ = stop.kill();
        stop.wait().unwrap();
        if guest.status() != "absent" {
            let recovered = guest.rekindle(&["recover"]).ok();
            assert!(["running", "absent"].contains(&guest.status().as_str()), "{} after {recovered}", guest.status());
            assert_eq!(guest.qemus().len(), usize::from(guest.status() == "running"), "{recovered}");
        }
        if guest.status() != "absent" {
            guest.rekindle(&["stop", "--now"]).ok();
        }
        assert!(guest.qemus().is_empty(), "after {delay} ms: {}", lab.state_report());
    }
    // The remains of a killed `run` do not prevent the next one.
    lab.rekindle(["run", definition.to_str().unwrap()]).ok();
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

#[test]
fn ls_and_show_never_block_or_fail_during_reboots() {
    let lab = Lab::without_root();
    let guest = lab.vm("seen").net(Net::None).start(&[]);
    let end = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    lab.rekindle(["ls"]).ok();
                    let show = guest.rekindle(&["--json", "show"]).ok().json();
                    // During a hand-over the guest may be stopped, but the status never requires a recovery.
                    assert_ne!(show["status"], "needs-recovery");
                    assert_ne!(show["status"], "ended");
                }
            });
        }
        let outcomes: Vec<_> = (0..15).map(|_| guest.reboot("warm", &[])).collect();
        end.store(true, Ordering::Relaxed);
        outcomes.into_iter().for_each(|done| drop(done.ok()));
    });
    guest.assert_sound();
}

#[test]
fn doctor_lists_what_it_checked_and_a_remedy_for_each_problem() {
    let lab = Lab::without_root();
    let findings =
        lab.rekindle(["--json", "doctor", "--qemu", crate::common::qemu_new().to_str().unwrap()]).ok().json();
    let titles: Vec<_> = findings.as_array().unwrap().iter().map(|finding| finding["what"].as_str().unwrap()).collect();
    for expected in [
        "QEMU",
        "KVM",
        "userfaultfd",
        "page tracking",
        "run directory",
        "memory",
        "taps",
        "vhost-net",
        "iproute2",
        "tracing",
        "sandbox",
    ] {
        assert!(titles.contains(&expected), "no {expected} in {titles:?}");
    }
    let bad = lab.rekindle(["doctor", "--qemu", "/nowhere/qemu"]).status(1);
    bad.prints(&["bad", "/nowhere/qemu", "-> apt-get install qemu-system-x86"]);
}

/// An unprivileged user's VM: run directory under `XDG_RUNTIME_DIR`, RAM in `/dev/shm`, user network. The test runs as
/// root to change to that user.
#[test]
fn an_unprivileged_user_runs_and_reboots_a_vm() {
    let lab = Lab::new();
    // An unused user ID, so that the user has no other VMs.
    let uid = 1_900_000_000 + std::process::id();
    let shared = format!("/dev/shm/rekindle-{uid}");
    let _cleanup = RemoveOnDrop(shared.clone().into());
    let here = lab.path("user");
    fs::create_dir(&here).unwrap();
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(lab.path("."), open.clone()).unwrap();
    let (kernel, initrd) = lab.image();
    for (from, to) in [(kernel, "vmlinuz"), (initrd, "initrd"), (env!("CARGO_BIN_EXE_rekindle").into(), "program")] {
        fs::copy(&from, here.join(to)).unwrap();
        fs::set_permissions(here.join(to), open.clone()).unwrap();
    }
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let definition = here.join("mine.toml");
    let text = |net: &str| {
        format!(
            "name = \"mine\"\nmemory = \"128M\"\nsave_dir = {here:?}\n[boot]\nkernel = \"vmlinuz\"\ninitrd = \"initrd\"\n\
             append = \"{KERNEL_OPTIONS}\"\n[[net]]\n{net}\n"
        )
    };
    chown(&here, Some(uid), Some(uid)).unwrap();
    let as_user = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        let ids = [format!("--reuid={uid}"), format!("--regid={uid}")];
        command.args(ids).args(["--clear-groups", "--"]).arg(here.join("program")).args(arguments);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("XDG_RUNTIME_DIR", &here);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        lab.finish(command)
    };
    let run = ["run", definition.to_str().unwrap()];
    fs::write(&definition, text("kind = \"tap\"\nnetns = \"rkt-user\"")).unwrap();
    as_user(&run).status(1).prints(&["needs root", "kind = \"user\""]);
    as_user(&["doctor"]).prints(&["limited taps", "run as root", "works"]);
    fs::write(&definition, text(&format!("kind = \"user\"\nforward = [\"127.0.0.1:{port}:7000\"]"))).unwrap();
    as_user(&run).ok();
    let ask = |command: &str| -> Option<String> {
        let stream = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        writeln!(&stream, "{command}").ok()?;
        let mut reply = String::new();
        BufReader::new(stream).read_line(&mut reply).ok()?;
        reply.strip_prefix("ok ").map(|rest| rest.trim().to_owned())
    };
    let boot = wait_for("the user's guest to be up", DEADLINE, || ask("boot-id"));
    ask("touch 16M 3").unwrap();
    for how in ["warm", "saved"] {
        as_user(&["replace-qemu", "mine", "--how", how]).ok();
        assert_eq!(ask("boot-id").unwrap(), boot, "after {how}");
        assert_eq!(ask("verify").unwrap(), "4096", "after {how}");
    }
    as_user(&["ls"]).ok().prints(&["mine", "running"]);
    as_user(&["stop", "mine"]).ok();
    as_user(&["ls"]).ok().prints(&["no VMs"]);
    let remains: Vec<_> = crate::common::lab::entries(shared.as_ref());
    assert!(remains.is_empty(), "{remains:?}");
}

/// A directory that is removed on drop.
struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_paused_guest_stays_paused_in_a_new_qemu_until_it_is_resumed() {
    let lab = Lab::new();
    let guest = lab.vm("calm").boot(&[]);
    let boot = guest.boot_id();
    guest.rekindle(&["pause"]).ok().prints(&["calm is paused", "rekindle resume calm"]);
    guest.rekindle(&["pause"]).ok().prints(&["calm was paused already"]);
    lab.rekindle(["status", "calm"]).ok().prints(&["stopped (paused)"]);
    let pid = guest.single_qemu().process.pid;
    guest.warm(&[]);
    assert_ne!(guest.single_qemu().process.pid, pid);
    assert!(guest.status().contains("paused"), "{}", guest.status());
    guest.rekindle(&["resume"]).ok().prints(&["calm runs again"]);
    guest.rekindle(&["resume"]).ok().prints(&["calm was running already"]);
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();

    // The mark of a checkpoint that was interrupted: the pause is not the owner's.
    guest.rekindle(&["pause"]).ok();
    fs::write(guest.file("paused"), []).unwrap();
    for command in ["pause", "resume"] {
        let rejected = guest.rekindle(&[command]).status(1);
        rejected.prints(&["an interrupted checkpoint has left its guest stopped", "rekindle recover calm"]);
    }
    guest.rekindle(&["recover"]).ok();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();
}
