//! Domains that libvirt's clients have changed: since the start, or while the replacement of the QEMU is prepared.

use super::{DEVICES, assert_continues, boot, qmp, rekindle, replace, text};
use rekindle_kernel::process::Process;
use rekindle_testing::libvirt::{Domain, DomainOptions, PrivateLibvirt};
use rekindle_testing::{DEADLINE, wait_for};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const IMAGES: &str = "/var/lib/libvirt/images";

/// Replaces the QEMU of `domain`, and calls `change` after the destination was prepared and before libvirt's daemon is
/// stopped.
fn replace_with_a_change(domain: &Domain<'_>, change: impl FnOnce()) -> Output {
    let mut command = rekindle(&["replace-qemu", &domain.name]);
    command.env("REKINDLE_FAULT", "replace.prepare.copied:stop").stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let process = Process::of(child.id()).unwrap();
    let is_stopped = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid)).unwrap();
        let state = stat.rsplit(')').next().unwrap().trim();
        assert!(!state.starts_with('Z'), "it has ended before the change");
        state.starts_with('T').then_some(())
    };
    wait_for("the prepared replacement", DEADLINE, is_stopped);
    change();
    process.resume().unwrap();
    child.wait_with_output().unwrap()
}

/// Checks that the replacement was rejected for a reason that contains `reason`, and that the guest is in `source`.
#[track_caller]
fn assert_rejected(domain: &Domain<'_>, output: &Output, reason: &str, source: Process) {
    let text = text(output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(reason), "{text}");
    assert_eq!((domain.process(), domain.state()), (source, "running".to_owned()));
    assert!(!fs::exists(format!("/run/rekindle/{}", domain.name)).unwrap());
}

fn reject(domain: &Domain<'_>, reason: &str) {
    let source = domain.process();
    let output = rekindle(&["replace-qemu", &domain.name]).output().unwrap();
    assert_rejected(domain, &output, reason, source);
}

#[test]
fn a_snapshot_during_the_preparation_leaves_the_guest_with_its_data_in_its_qemu() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "snapshot");
    let (boot_id, source) = (domain.ask("boot-id"), domain.process());
    let (overlay, spec) = (format!("{IMAGES}/overlay"), format!("vda,file={IMAGES}/overlay"));
    let mut written = String::new();
    let output = replace_with_a_change(&domain, || {
        let arguments = ["snapshot-create-as", &domain.name, "--disk-only", "--no-metadata", "--diskspec", &spec];
        libvirt.virsh(&arguments);
        // This is in the overlay only, which the prepared QEMU does not have.
        domain.ask("write vda 0 64 77");
        domain.ask("drop-caches");
        written = domain.ask("read vda 0 64");
    });
    assert_rejected(&domain, &output, "disk virtio-disk0", source);
    assert_continues(&domain, &boot_id);
    assert_eq!(domain.ask("read vda 0 64"), written);
    assert!(libvirt.virsh(&["domblklist", &domain.name]).contains(&overlay));
}

#[test]
fn limits_and_media_that_change_during_the_preparation_are_found_and_media_are_followed_later() {
    let libvirt = PrivateLibvirt::start();
    let devices = format!("{DEVICES}<disk type='file' device='cdrom'><target dev='hdb' bus='ide'/></disk>");
    fs::write(format!("{IMAGES}/disk"), vec![0; 2 << 20]).unwrap();
    fs::write(format!("{IMAGES}/medium"), vec![7; 1 << 20]).unwrap();
    let domain = libvirt.boot(&DomainOptions { devices: &devices, ..DomainOptions::new("media") });
    let (name, source) = (domain.name.as_str(), domain.process());
    let limit = || drop(libvirt.virsh(&["blkdeviotune", name, "vda", "--total-bytes-sec", "1048576", "--live"]));
    assert_rejected(&domain, &replace_with_a_change(&domain, limit), "disk virtio-disk0", source);
    libvirt.virsh(&["blkdeviotune", name, "vda", "--total-bytes-sec", "0", "--live"]);

    let medium = format!("{IMAGES}/medium");
    let insert = || drop(libvirt.virsh(&["change-media", name, "hdb", &medium, "--insert", "--live"]));
    assert_rejected(&domain, &replace_with_a_change(&domain, insert), "disk ide0-0-1", source);
    replace_up(&domain);
    assert_eq!(medium_of(&libvirt, &domain, "ide0-0-1").as_deref(), Some(medium.as_str()));
    libvirt.virsh(&["change-media", name, "hdb", "--eject", "--live"]);
    replace_up(&domain);
    assert_eq!(medium_of(&libvirt, &domain, "ide0-0-1"), None);
}

/// Replaces the QEMU of a domain, and waits until its guest replies.
#[track_caller]
fn replace_up(domain: &Domain<'_>) {
    replace(domain);
    wait_for("the guest of a replaced QEMU", DEADLINE, || domain.is_up().then_some(()));
}

/// Returns the file that a drive shows the guest; `None` without a medium.
fn medium_of(libvirt: &PrivateLibvirt, domain: &Domain<'_>, alias: &str) -> Option<String> {
    let drives = qmp(libvirt, domain, "query-block", &json!({}));
    let is_it = |drive: &&Value| drive["qdev"].as_str().is_some_and(|path| path.split('/').any(|part| part == alias));
    let drive = drives.as_array().unwrap().iter().find(is_it).expect(alias);
    drive.pointer("/inserted/file").map(|file| file.as_str().unwrap().to_owned())
}

#[test]
fn backing_images_are_kept_and_snapshots_and_block_jobs_since_the_start_are_followed() {
    let libvirt = PrivateLibvirt::start();
    let first = boot(&libvirt, "base");
    let snapshot = |domain: &Domain<'_>, name: &str| {
        let spec = format!("vda,file={IMAGES}/{name}");
        libvirt.virsh(&["snapshot-create-as", &domain.name, "--disk-only", "--no-metadata", "--diskspec", &spec]);
    };
    snapshot(&first, "overlay");
    libvirt.virsh(&["destroy", &first.name]);
    let devices = DEVICES.replace("type='raw'", "type='qcow2'").replace("images/disk", "images/overlay");
    let domain = libvirt.boot(&DomainOptions { devices: &devices, ..DomainOptions::new("chain") });
    let name = domain.name.as_str();
    let replace_and_read = |content: &str, file: &str| {
        replace_up(&domain);
        domain.ask("drop-caches");
        assert_eq!(domain.ask("read vda 0 64"), content, "on {file}");
        let file = format!("{IMAGES}/{file}");
        assert_eq!(medium_of(&libvirt, &domain, "virtio-disk0").as_deref(), Some(file.as_str()));
        assert!(libvirt.virsh(&["domblklist", name]).contains(&file));
    };
    let write = |seed: u32| {
        domain.ask(&format!("write vda 0 32 {seed}"));
        domain.ask("drop-caches");
        domain.ask("read vda 0 64")
    };
    let started_with = domain.ask("read vda 0 64");
    replace_and_read(&started_with, "overlay");
    libvirt.virsh(&["blockpull", name, "vda", "--wait"]);
    replace_and_read(&started_with, "overlay");
    // Two snapshots, the lower of which is merged, then the other.
    snapshot(&domain, "second");
    replace_and_read(&write(7), "second");
    snapshot(&domain, "third");
    let content = write(9);
    let (lower, middle) = (format!("{IMAGES}/overlay"), format!("{IMAGES}/second"));
    libvirt.virsh(&["blockcommit", name, "vda", "--base", &lower, "--top", &middle, "--wait"]);
    fs::remove_file(&middle).unwrap();
    replace_and_read(&content, "third");
    libvirt.virsh(&["blockcommit", name, "vda", "--active", "--pivot", "--wait"]);
    fs::remove_file(format!("{IMAGES}/third")).unwrap();
    replace_and_read(&content, "overlay");
    let copy = format!("{IMAGES}/copy");
    libvirt.virsh(&["blockcopy", name, "vda", &copy, "--transient-job", "--wait", "--pivot"]);
    fs::remove_file(&lower).unwrap();
    replace_and_read(&content, "copy");
}

#[test]
fn settings_without_an_option_are_kept_and_what_cannot_be_kept_is_named() {
    let libvirt = PrivateLibvirt::start();
    fs::write(format!("{IMAGES}/disk"), vec![0; 2 << 20]).unwrap();
    let iotune = "<iotune><write_iops_sec>70</write_iops_sec></iotune><target dev='vda'";
    let devices = DEVICES.replace("cache='none'", "cache='none' iothread='1'").replace("<target dev='vda'", iotune);
    let options = DomainOptions {
        devices: &devices,
        memory_backing: "<iothreads>2</iothreads>",
        ..DomainOptions::new("settings")
    };
    let domain = libvirt.boot(&options);
    let name = domain.name.as_str();
    libvirt.virsh(&["dommemstat", name, "--period", "3", "--live"]);
    libvirt.virsh(&["domblkthreshold", name, "vda", "1048576"]);
    libvirt.virsh(&["iothreadset", name, "1", "--poll-max-ns", "50000", "--live"]);
    libvirt.virsh(&["iothreadpin", name, "1", "0", "--live"]);
    let limits = ["--read-bytes-sec", "900000", "--read-bytes-sec-max", "1000000"];
    libvirt.virsh(&[&["blkdeviotune", name, "vda", "--live"][..], &limits].concat());
    let limits = libvirt.virsh(&["blkdeviotune", name, "vda"]);
    replace(&domain);
    wait_for("the guest of a replaced QEMU", DEADLINE, || domain.is_up().then_some(()));
    let balloon = json!({"path": "/machine/peripheral/balloon0", "property": "guest-stats-polling-interval"});
    assert_eq!(qmp(&libvirt, &domain, "qom-get", &balloon), 3);
    let nodes = qmp(&libvirt, &domain, "query-named-block-nodes", &json!({"flat": true}));
    assert!(nodes.as_array().unwrap().iter().any(|node| node["write_threshold"] == 1_048_576), "{nodes}");
    let threads = qmp(&libvirt, &domain, "query-iothreads", &json!({}));
    let thread = threads.as_array().unwrap().iter().find(|thread| thread["id"] == "iothread1").unwrap();
    assert_eq!(thread["poll-max-ns"], 50000);
    let status = format!("/proc/{}/task/{}/status", domain.process().pid, thread["thread-id"]);
    let status = fs::read_to_string(status).unwrap();
    assert!(status.lines().any(|line| line.split_whitespace().eq(["Cpus_allowed_list:", "0"])), "{status}");

    let assert_limit = |name: &str, limit: &str| {
        assert!(limits.lines().any(|line| line.split_whitespace().eq([name, ":", limit])), "{limits}");
    };
    assert_limit("read_bytes_sec", "900000");
    assert_limit("write_iops_sec", "70");
    assert_eq!(libvirt.virsh(&["blkdeviotune", name, "vda"]), limits);
    let none = ["--read-bytes-sec", "0", "--read-bytes-sec-max", "0", "--write-iops-sec", "0"];
    libvirt.virsh(&[&["blkdeviotune", name, "vda", "--live"][..], &none].concat());
    let unlimited = libvirt.virsh(&["blkdeviotune", name, "vda"]);
    replace(&domain);
    assert_eq!(libvirt.virsh(&["blkdeviotune", name, "vda"]), unlimited);

    libvirt.virsh(&["memtune", name, "--hard-limit", "2097152", "--live"]);
    reject(&domain, "virsh memtune");
}

/// Ends virtlockd, which the test has started.
struct LockDaemon;

impl Drop for LockDaemon {
    fn drop(&mut self) {
        let pid = fs::read_to_string("/run/virtlockd.pid").ok().and_then(|text| text.trim().parse().ok());
        if let Some(process) = pid.and_then(|pid| Process::of(pid).ok()) {
            let _ = process.kill();
        }
    }
}

#[test]
fn a_lease_of_virtlockd_is_named() {
    const PROGRAM: &str = "/usr/sbin/virtlockd";
    let libvirt = PrivateLibvirt::start();
    assert!(Path::new(PROGRAM).exists(), "{PROGRAM} is missing; install libvirt-daemon-system");
    assert!(Command::new(PROGRAM).arg("-d").status().unwrap().success());
    let _lock_daemon = LockDaemon;
    fs::write("/etc/libvirt/qemu.conf", "lock_manager = \"lockd\"\n").unwrap();
    libvirt.stop_daemon();
    libvirt.start_daemon();
    fs::write(format!("{IMAGES}/disk"), vec![0; 2 << 20]).unwrap();
    let domain = libvirt.boot(&DomainOptions { devices: DEVICES, ..DomainOptions::new("leased") });
    reject(&domain, "virtlockd-sock");
}
