//! Replaces the QEMUs of domains that a real libvirt has started, and lets libvirt manage them afterwards.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod changes;
mod daemon;
mod disk_page;
mod faults;
mod huge_pages;
mod in_place;
mod interference;
mod page;
mod plugged;
mod protect_page;
mod several;
mod spice;
mod taps;
mod tpm;
mod traffic;
mod uefi;
mod upgrade;
mod vnc;

use rekindle_kernel::process::Process;
use rekindle_testing::libvirt::{Domain, DomainOptions, Network, PrivateLibvirt};
use rekindle_testing::micro::free_port;
use rekindle_testing::{DEADLINE, poll, wait_for};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Output};

/// A disk, a guest agent's channel and a balloon.
const DEVICES: &str = "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/>
  <source file='/var/lib/libvirt/images/disk'/><target dev='vda' bus='virtio'/></disk>
<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel><memballoon model='virtio'/>";
/// Blocks of 4096 bytes of the disk.
const DISK_BLOCKS: u64 = 512;

/// Boots a guest with a tap and a VNC server, and with a pattern in its memory and on a disk of its own.
fn boot<'a>(libvirt: &'a PrivateLibvirt, name: &str) -> Domain<'a> {
    boot_in(libvirt, name, "")
}

/// As [`boot`], with memory of the kind that libvirt's element `memory_backing` describes.
fn boot_in<'a>(libvirt: &'a PrivateLibvirt, name: &str, memory_backing: &str) -> Domain<'a> {
    let content: Vec<u8> = (0..DISK_BLOCKS * 4096).map(|byte| (byte % 251) as u8).collect();
    fs::write(format!("/var/lib/libvirt/images/{name}"), content).unwrap();
    let devices = DEVICES.replace("images/disk", &format!("images/{name}")) + &vnc::server(free_port());
    let network = Network::Tap("");
    let domain =
        libvirt.boot(&DomainOptions { devices: &devices, memory_backing, network, ..DomainOptions::new(name) });
    domain.ask("touch 48M 7");
    domain.ask("dirty 20 48 random");
    domain
}

/// Returns the program, which finds the private libvirt of this thread.
fn rekindle(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
    command.args(arguments).env("REKINDLE_RUN_DIR", "/run/rekindle");
    command
}

/// Returns everything that a program has printed.
fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Checks that the guest is the one of `boot_id`, with the memory that it has written, and that its disk and its VNC
/// server work.
#[track_caller]
fn assert_continues(domain: &Domain<'_>, boot_id: &str) {
    let is_up = poll(DEADLINE, || domain.is_up().then_some(())).is_some();
    assert!(is_up, "{}: the guest does not answer; QEMU's log:\n{}", domain.name, domain.log());
    assert_eq!(domain.ask("boot-id"), boot_id);
    domain.ask("dirty 0");
    assert!(domain.ask("verify").parse::<u64>().unwrap() > 0);
    domain.ask("dirty 20 48 random");
    domain.ask("drop-caches");
    domain.ask(&format!("read vda 0 {DISK_BLOCKS}"));
    vnc::assert_greets(domain);
}

/// Waits until libvirt has seen the end of a domain that was made by `virsh create`. Such a domain does not exist when it is
/// shut off.
fn wait_shut_off(libvirt: &PrivateLibvirt, domain: &Domain<'_>) {
    let is_gone = || libvirt.try_virsh(&["domstate", &domain.name]).is_err().then_some(());
    wait_for("libvirt to drop the domain", DEADLINE, is_gone);
}

/// Returns the processes of the QEMUs of a domain.
fn qemus_of(name: &str) -> Vec<Process> {
    let numbers = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let is_of_domain = |pid: &u32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).any(|word| word.starts_with(format!("guest={name},").as_bytes()))
    };
    numbers.filter(is_of_domain).filter_map(|pid| Process::of(pid).ok()).collect()
}

#[track_caller]
fn replace(domain: &Domain<'_>) -> Value {
    let source = domain.process();
    let output = rekindle(&["--json", "replace-qemu", &domain.name]).output().unwrap();
    assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
    assert_ne!(domain.process(), source);
    assert!(!source.is_alive());
    assert!(!fs::exists(format!("/run/rekindle/{}", domain.name)).unwrap());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Sends a QMP command through libvirt.
fn qmp(libvirt: &PrivateLibvirt, domain: &Domain<'_>, command: &str, arguments: &Value) -> Value {
    let text = json!({"execute": command, "arguments": arguments}).to_string();
    let answer = libvirt.virsh(&["qemu-monitor-command", &domain.name, &text]);
    serde_json::from_str::<Value>(&answer).unwrap()["return"].take()
}

/// Returns the inodes of the memory files that Rekindle has made for the domain's RAM.
fn memory_files(domain: &Domain<'_>) -> Vec<u64> {
    let entries = fs::read_dir(format!("/proc/{}/fd", domain.process().pid)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let is_ram = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memfd:rekindle-ram"))
    };
    let mut inodes: Vec<u64> = paths.filter(is_ram).map(|path| fs::metadata(path).unwrap().ino()).collect();
    inodes.sort_unstable();
    inodes.dedup();
    inodes
}

#[test]
fn a_domain_continues_in_another_qemu_and_libvirt_manages_it() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "managed");
    domain.ask("online-cpu 1");
    let boot_id = domain.ask("boot-id");
    let name = domain.name.as_str();

    replace(&domain);
    assert_continues(&domain, &boot_id);
    let memory = memory_files(&domain);
    assert_eq!(memory.len(), 1);

    // The RAM is a file now, which the next QEMU maps.
    replace(&domain);
    assert_continues(&domain, &boot_id);
    assert_eq!(memory_files(&domain), memory);

    assert_eq!(domain.state(), "running");
    libvirt.virsh(&["suspend", name]);
    assert_eq!(domain.state(), "paused");
    libvirt.virsh(&["resume", name]);
    assert_continues(&domain, &boot_id);
    libvirt.stop_daemon();
    libvirt.start_daemon();
    assert_eq!(domain.state(), "running");
    libvirt.virsh(&["save", name, "/var/lib/libvirt/saved"]);
    libvirt.virsh(&["restore", "/var/lib/libvirt/saved"]);
    assert_continues(&domain, &boot_id);
    libvirt.virsh(&["destroy", name]);
    assert!(!domain.status_file().exists());
}

#[test]
fn what_cannot_be_passed_on_is_named_and_nothing_is_changed() {
    let libvirt = PrivateLibvirt::start();
    let devices = format!(
        "<serial type='tcp'><source mode='bind' host='127.0.0.1' service='{}'/><protocol type='raw'/></serial>",
        free_port()
    );
    let domain = libvirt.boot(&DomainOptions { devices: &devices, ..DomainOptions::new("refused") });
    let (qemu, daemon) = (domain.process(), libvirt.daemon());
    let output = rekindle(&["replace-qemu", &domain.name]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("a character device listens on 127.0.0.1"), "{}", text(&output));
    assert_eq!((domain.process(), libvirt.daemon()), (qemu, daemon));
    assert!(!fs::exists(format!("/run/rekindle/{}", domain.name)).unwrap());

    libvirt.virsh(&["suspend", &domain.name]);
    let output = rekindle(&["replace-qemu", &domain.name]).output().unwrap();
    assert!(text(&output).contains("virsh resume"), "{}", text(&output));
    assert_eq!((domain.process(), domain.state()), (qemu, "paused".to_owned()));
}
