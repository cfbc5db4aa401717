//! What others do while libvirt's daemon is stopped, or after Rekindle was killed: an administrator, the guest, a QEMU
//! that hangs.

use crate::{assert_continues, boot, qemus_of, rekindle, text, wait_shut_off};
use rekindle_kernel::process::Process;
use rekindle_qemu::guest::run_state;
use rekindle_qemu::qmp::Qmp;
use rekindle_testing::libvirt::{Domain, PrivateLibvirt};
use rekindle_testing::{DEADLINE, wait_for};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// A replacement that has stopped itself at a fault point.
struct StoppedReplacement(Child);

impl StoppedReplacement {
    fn begin(domain: &Domain<'_>, point: &str) -> Self {
        let mut command = rekindle(&["replace-qemu", &domain.name]);
        command.env("REKINDLE_FAULT", format!("{point}:stop")).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        wait_for(point, DEADLINE, || {
            assert!(process.is_alive(), "it has ended");
            process.is_stopped().then_some(())
        });
        Self(child)
    }

    fn finish(self) -> Output {
        Process::of(self.0.id()).unwrap().resume().unwrap();
        self.0.wait_with_output().unwrap()
    }
}

/// Kills a replacement between the decision and the resume in the destination. Returns source and destination.
fn kill_at_decision(domain: &Domain<'_>) -> [Process; 2] {
    let source = domain.process();
    let replacement = rekindle(&["replace-qemu", &domain.name])
        .env("REKINDLE_FAULT", "replace.resume.journalled:kill")
        .output()
        .unwrap();
    let destination = qemus_of(&domain.name).into_iter().find(|qemu| *qemu != source);
    [source, destination.unwrap_or_else(|| panic!("{}", text(&replacement)))]
}

fn recover(domain: &Domain<'_>) -> Output {
    rekindle(&["recover", &domain.name]).output().unwrap()
}

/// The program does not wait until a daemon that it has started accepts connections.
fn wait_for_daemon(libvirt: &PrivateLibvirt) {
    wait_for("libvirt's daemon", DEADLINE, || libvirt.try_virsh(&["uri"]).ok());
}

#[track_caller]
fn assert_exit(output: &Output, status: i32, message: &str) {
    assert_eq!(output.status.code(), Some(status), "{}", text(output));
    assert!(text(output).contains(message), "{}", text(output));
}

/// Connects to the source's monitor, which is free while the daemon is stopped.
fn monitor(domain: &Domain<'_>) -> Qmp {
    let status = fs::read_to_string(domain.status_file()).unwrap();
    let (_, path) = status.split_once("<monitor path='").unwrap();
    let (path, _) = path.split_once('\'').unwrap();
    Qmp::connect(Path::new(path), DEADLINE).unwrap()
}

#[test]
fn an_administrator_cannot_resume_the_source_after_the_decision() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "decided");
    let boot_id = domain.ask("boot-id");
    let [source, destination] = kill_at_decision(&domain);
    assert!(source.is_stopped());
    libvirt.start_daemon();
    let mut resume = Command::new("virsh")
        .args(["--connect", "qemu:///system", "resume", &domain.name])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    assert_exit(&recover(&domain), 0, "finished");
    resume.wait().unwrap();
    assert!(!source.is_alive());
    assert_eq!((domain.process(), domain.state()), (destination, "running".to_owned()));
    assert_continues(&domain, &boot_id);
}

#[test]
fn recover_refuses_to_choose_between_two_qemus() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "chosen");
    let boot_id = domain.ask("boot-id");
    let [source, destination] = kill_at_decision(&domain);
    source.resume().unwrap();
    libvirt.start_daemon();
    libvirt.virsh(&["resume", &domain.name]);
    assert_exit(&recover(&domain), 3, "runs the guest again");
    assert!(source.is_alive() && destination.is_alive());
    wait_for_daemon(&libvirt);

    destination.kill().unwrap();
    assert_exit(&recover(&domain), 0, "undone");
    assert_eq!(qemus_of(&domain.name), [source]);
    assert_continues(&domain, &boot_id);
}

#[test]
fn a_guest_that_powers_off_while_the_daemon_is_stopped_is_shut_off() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "off");
    let replacement = StoppedReplacement::begin(&domain, "libvirt.daemon.stopped");
    domain.ask("poweroff");
    let mut qmp = monitor(&domain);
    wait_for("the guest's end", DEADLINE, || (run_state(&mut qmp).unwrap() == "shutdown").then_some(()));
    drop(qmp);
    assert_exit(&replacement.finish(), 1, "has shut down");
    wait_for_daemon(&libvirt);
    wait_shut_off(&libvirt, &domain);
    assert!(qemus_of(&domain.name).is_empty());
}

#[test]
fn a_signal_ends_the_program_only_when_the_daemon_runs_again() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "signal");
    let boot_id = domain.ask("boot-id");
    let source = domain.process();
    let replacement = StoppedReplacement::begin(&domain, "libvirt.daemon.stopped");
    Process::of(replacement.0.id()).unwrap().terminate().unwrap();
    let output = replacement.finish();
    assert_eq!(output.status.signal(), Some(rustix::process::Signal::TERM.as_raw()), "{}", text(&output));
    wait_for_daemon(&libvirt);
    assert!(!source.is_alive());
    assert_eq!(qemus_of(&domain.name), [domain.process()]);
    assert_continues(&domain, &boot_id);
}

#[test]
fn the_daemon_is_started_again_although_the_source_hangs() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "hangs");
    let boot_id = domain.ask("boot-id");
    let source = domain.process();

    let replacement = StoppedReplacement::begin(&domain, "libvirt.daemon.stopped");
    source.stop().unwrap();
    assert_exit(&replacement.finish(), 3, "rekindle recover");
    wait_for_daemon(&libvirt);
    assert_exit(&rekindle(&["recover", "--wait", "1s", &domain.name]).output().unwrap(), 3, "has not answered");
    wait_for_daemon(&libvirt);
    source.resume().unwrap();
    assert_exit(&recover(&domain), 0, "undone");
    assert_continues(&domain, &boot_id);

    // Once the guest may have been stopped, the way back continues a process that was stopped.
    let replacement = StoppedReplacement::begin(&domain, "replace.suspend.journalled");
    source.stop().unwrap();
    assert_exit(&replacement.finish(), 1, "the guest runs as before");
    assert_eq!(qemus_of(&domain.name), [source]);
    assert_continues(&domain, &boot_id);
}
