//! Rekindle kills only processes of the VM. It kills processes that do not answer only with `--force`.

use crate::common::{DEADLINE, Lab, served, wait_for};
use rekindle_kernel::process::Process;
use rekindle_vm::disks;
use rekindle_vm::rundir::RunDir;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn signal(process: Process, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(process.pid).unwrap()).unwrap(), signal).unwrap();
}

/// Processes that have a VM's files open or among their arguments, but do not belong to the VM. Killed on drop.
struct Decoys(Vec<Child>);

impl Decoys {
    fn start(run: &Path, name: &str) -> Self {
        let directory = run.join(name);
        let mut pids = Vec::new();
        let mut start = |command: &mut Command| {
            pids.push(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        };
        let control = format!("--control={}", directory.join("disk-disk0.control").display());
        for generation in 1..5 {
            let pid = directory.join(format!("vmm-{generation}/qemu.pid"));
            let arguments = ["-c", "import time; time.sleep(3600)", "-pidfile", pid.to_str().unwrap(), &control];
            start(Command::new("python3").args(arguments));
            let mut foreign = Command::new("setpriv");
            foreign.args(["--reuid=65534", "--regid=65534", "--clear-groups", "tail", "-f", "--", "/dev/null"]);
            start(foreign.arg(&pid).arg(&control));
        }
        // A backup program or an administrator may open these files.
        let opened = ["vmm-1/qemu.lock", "vmm-1/qemu.pid", "disk-disk0.lock"].map(|file| directory.join(file));
        start(Command::new("tail").arg("-F").args(opened));
        Self(pids)
    }

    #[track_caller]
    fn assert_alive(&mut self, after: &str) {
        for (number, child) in self.0.iter_mut().enumerate() {
            assert!(child.try_wait().unwrap().is_none(), "decoy {number} has ended after {after}");
        }
    }
}

impl Drop for Decoys {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn processes_with_a_vms_files_among_their_arguments_are_neither_recorded_nor_killed() {
    let lab = Lab::new();
    let image = served::image(&lab, "disk");
    let mut decoys = Decoys::start(&lab.run_root(), "web");
    let guest = lab.vm("web").section(&served::section(&image, "")).boot(&[]);
    decoys.assert_alive("run");
    let ours: Vec<_> = decoys.0.iter().map(Child::id).collect();
    let assert_not_recorded = |step: &str| {
        for file in ["state.json", "operation.json"] {
            let text = fs::read_to_string(guest.file(file)).unwrap_or_default();
            for pid in &ours {
                assert!(!text.contains(&format!("\"pid\": {pid},")), "{file} has decoy {pid} after {step}: {text}");
            }
        }
    };
    guest.warm(&[]);
    decoys.assert_alive("a warm reboot");
    assert_not_recorded("a warm reboot");
    // Try each path through `recover`: the destination QEMU was started and not recorded, or got the command to resume
    // the guest.
    for fault in ["warm.prepare.spawned:kill", "warm.resume.journalled:kill", "warm.resume.resumed:kill"] {
        let mut command = lab.command(["replace-qemu", "web"]);
        command.env("REKINDLE_FAULT", fault);
        lab.finish(command).killed();
        guest.rekindle(&["recover"]).ok();
        decoys.assert_alive(fault);
        assert_not_recorded(fault);
        guest.wait_ready();
        let qemus = guest.qemus().into_iter().filter(|qemu| !ours.contains(&qemu.process.pid)).count();
        assert_eq!(qemus, 1, "{fault}: {}", lab.state_report());
    }
    disks::server(&RunDir::new(&lab.run_root(), "web"), "disk0").unwrap().kill().unwrap();
    guest.rekindle(&["recover"]).ok();
    decoys.assert_alive("recover of a disk server");
    guest.rekindle(&["stop", "--now"]).ok();
    decoys.assert_alive("stop");
    assert!(!lab.run_root().join("web").exists());
}

#[test]
fn a_run_directory_is_private_so_that_no_other_user_can_hold_a_lock_in_it() {
    let lab = Lab::new();
    lab.configure_host("qemu_as_root = [\"web\"]");
    let private = [("", 0), ("vmm-1", 0), ("vmm-1/qemu.lock", 0), ("lock", 0)];
    // A QEMU with a user of its own can search the directories, but not make files or use those with locks.
    let searched = [("", 0o010), ("vmm-1", 0o1010), ("vmm-1/qemu.lock", 0), ("lock", 0)];
    for (name, modes) in [("web", private), ("own", searched)] {
        let guest = lab.vm(name).boot(&[]);
        for (path, of_others) in modes {
            let metadata = fs::metadata(guest.file(path)).unwrap();
            assert_eq!(metadata.mode() & 0o1077, of_others, "{name}/{path}: {:o}", metadata.mode());
            assert_eq!(metadata.uid(), 0, "{name}/{path}");
        }
        guest.rekindle(&["stop", "--now"]).ok();
    }
}

#[test]
fn recover_does_not_kill_a_qemu_that_does_not_answer() {
    let lab = Lab::new();
    let guest = lab.vm("web").boot(&[]);
    let boot = guest.boot_id();
    let qemu = guest.only_qemu().process;
    signal(qemu, Signal::STOP);
    let pid = qemu.pid.to_string();
    guest.rekindle(&["recover", "--wait", "2s"]).status(3).prints(&[&pid, "does not answer", "kill -CONT", "--force"]);
    assert!(qemu.is_alive());
    signal(qemu, Signal::CONT);
    guest.rekindle(&["recover"]).ok();
    assert_eq!(guest.boot_id(), boot);
    assert_eq!(guest.only_qemu().process, qemu);

    signal(qemu, Signal::STOP);
    guest.rekindle(&["recover", "--wait", "1s", "--force"]).ok().prints(&[&pid, "killing it (--force)"]);
    assert!(!qemu.is_alive());
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn recover_does_not_kill_a_destination_that_may_have_resumed_and_does_not_answer() {
    let lab = Lab::new();
    let guest = lab.vm("web").boot(&[]);
    let boot = guest.boot_id();
    let source = guest.only_qemu().process;
    let mut command = lab.command(["replace-qemu", "web"]);
    command.env("REKINDLE_FAULT", "warm.resume.resumed:kill");
    lab.finish(command).killed();
    // The guest runs in the new QEMU, and the old one still exists.
    let new = guest.qemus().into_iter().map(|qemu| qemu.process).find(|process| *process != source).unwrap();
    signal(new, Signal::STOP);
    let pid = new.pid.to_string();
    guest.rekindle(&["recover", "--wait", "2s"]).status(3).prints(&[&pid, "has not answered within 2 s", "--force"]);
    assert!(new.is_alive() && source.is_alive());
    assert_eq!(guest.status(), "needs-recovery");
    signal(new, Signal::CONT);
    guest.rekindle(&["recover"]).ok().prints(&["the guest runs in the destination QEMU"]);
    assert_eq!(guest.boot_id(), boot);
    assert_eq!(guest.only_qemu().process, new);
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn no_second_server_of_a_disk_is_started_while_one_does_not_answer() {
    let lab = Lab::new();
    let image = served::image(&lab, "disk");
    let guest = lab.vm("web").section(&served::section(&image, "")).boot(&[]);
    let server = served::server(&guest).unwrap();
    signal(server, Signal::STOP);
    let pid = server.pid.to_string();
    guest.rekindle(&["recover", "--wait", "2s"]).status(3).prints(&["disk0", &pid, "does not answer"]);
    assert!(server.is_alive());
    signal(server, Signal::CONT);
    wait_for("the server to answer", DEADLINE, || guest.rekindle(&["recover"]).code.filter(|code| *code == 0));
    assert_eq!(served::server(&guest), Some(server));
    guest.assert_sound();
    guest.rekindle(&["stop", "--now"]).ok();
}
