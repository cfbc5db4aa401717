//! Phase reboots of the Debian guest with writes between them: its file systems and files are intact at the end.
//!
//! `REKINDLE_TEST_ROUNDS` sets the number of reboots.

use crate::common::{DEADLINE, Guest, Lab, wait_for};
use rekindle_qemu::agent;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const PHASES: &str = "[phase]\nsave = [\"kernel\", \"services\"]\n";
const ANSWER: Duration = Duration::from_secs(30);
/// Offset of the partition, in bytes.
const PARTITION: u64 = 1 << 20;

fn rounds() -> u64 {
    std::env::var("REKINDLE_TEST_ROUNDS").ok().map_or(3, |rounds| rounds.parse().expect("a number"))
}

/// Copies a file system into a partition. Every firmware reads a disk's first block, which must not belong to the file
/// system.
fn partitioned(directory: &Path, disk: &Path) -> PathBuf {
    let copy = directory.join("partitioned.raw");
    let megabytes = fs::metadata(disk).unwrap().len() >> 20;
    let (from, to) = (format!("if={}", disk.display()), format!("of={}", copy.display()));
    let copied =
        Command::new("dd").args([&from, &to, "bs=1M", "seek=1", "conv=sparse", "status=none"]).status().unwrap();
    assert!(copied.success());
    let sectors = u32::try_from(megabytes * 2048).unwrap();
    let mut table = [0u8; 512];
    table[446..454].copy_from_slice(&[0, 0xfe, 0xff, 0xff, 0x83, 0xfe, 0xff, 0xff]);
    table[454..458].copy_from_slice(&2048u32.to_le_bytes());
    table[458..462].copy_from_slice(&sectors.to_le_bytes());
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    let file = fs::OpenOptions::new().write(true).open(&copy).unwrap();
    file.write_all_at(&table, 0).unwrap();
    file.set_len((megabytes + 1) << 20).unwrap();
    copy
}

/// Copies an image to a directory.
fn copy(directory: &Path, disk: &Path) -> PathBuf {
    let copy = directory.join(disk.file_name().unwrap());
    let copied = Command::new("cp").arg("--sparse=always").args([disk, &copy]).status().unwrap();
    assert!(copied.success());
    copy
}

fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("updates-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Runs a shell command in the guest and returns its output. The command must succeed.
#[track_caller]
fn sh(guest: &Guest<'_>, command: &str) -> String {
    // The guest is stopped for a moment while a phase is saved.
    let running = || {
        let mut qemus = guest.qemus();
        assert_eq!(qemus.len(), 1, "exactly one QEMU was expected");
        (qemus[0].run_state().as_deref() == Some("running")).then(|| qemus.remove(0))
    };
    let port = wait_for("the guest to run", DEADLINE, running).directory.join("agent.sock");
    let ran = wait_for("the agent to run a command", DEADLINE, || {
        agent::run(&port, "/bin/sh", &["-c", command], ANSWER).ok()
    });
    assert_eq!(ran.status, Some(0), "{command}: {ran:?}");
    ran.stdout
}

fn void(guest: &Guest<'_>, name: &str) -> Value {
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    let phases = shown["phases"].as_array().unwrap().clone();
    phases.into_iter().find(|phase| phase["name"] == name).unwrap()["void"].clone()
}

#[track_caller]
fn wait_saved(guest: &Guest<'_>, name: &str) {
    wait_for(&format!("phase {name} to be saved"), DEADLINE, || (void(guest, name) == Value::Null).then_some(()));
}

/// Waits for the end of the boot, which is after the last phase and after the data file system is mounted.
#[track_caller]
fn wait_booted(guest: &Guest<'_>) {
    wait_for("the guest to have booted", DEADLINE, || {
        (sh(guest, "systemctl is-active rekindle-ready || true").trim() == "active").then_some(())
    });
}

/// Reboots the guest by phase. Returns the report's `phase`.
#[track_caller]
fn reboot(guest: &Guest<'_>) -> Value {
    reboot_by(guest, "shutdown", "by-agent")
}

/// Reboots the guest by phase as [`reboot`] does, with `--end`. Asserts that the report states how the guest `ended`.
#[track_caller]
fn reboot_by(guest: &Guest<'_>, end: &str, ended: &str) -> Value {
    let report = guest.lab.rekindle(["--json", "reboot", &guest.name, "--how", "phase", "--end", end]).ok().json();
    assert_eq!(report["ended"], ended, "{report}\n{}", guest.lab.state_report());
    guest.wait_ready();
    wait_booted(guest);
    report["phase"].clone()
}

/// Creates a file, appends to another one and rewrites a third one, and writes them to disk.
fn update(guest: &Guest<'_>, place: &str, round: u64) {
    write(guest, place, round);
    sh(guest, "sync");
}

/// Creates, appends to and rewrites files as [`update`] does, without `sync`.
fn write(guest: &Guest<'_>, place: &str, round: u64) {
    sh(
        guest,
        &format!(
            "cd {place} && head -c 300000 /dev/urandom >file{round} && sha256sum file{round} >>sums && echo {round} >last"
        ),
    );
}

fn check(guest: &Guest<'_>, place: &str, rounds: u64) {
    assert_eq!(sh(guest, &format!("cat {place}/last")).trim(), rounds.to_string());
    sh(guest, &format!("echo 3 >/proc/sys/vm/drop_caches; cd {place} && sha256sum --quiet -c sums"));
    assert_eq!(sh(guest, &format!("wc -l <{place}/sums")).trim(), rounds.to_string());
}

/// Checks the file system in an image's partition.
fn fsck(image: &Path) {
    let file_system = format!("{}?offset={PARTITION}", image.display());
    let checked = Command::new("e2fsck").args(["-f", "-n", &file_system]).output().expect("e2fsck runs");
    let output = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert_eq!(checked.status.code(), Some(0), "{output}");
}

#[test]
fn a_guest_that_writes_its_root_resumes_from_the_early_phase_only() {
    let (lab, directory) = (Lab::new(), directory());
    let [_, _, disk, _] = lab.debian();
    let disk = partitioned(directory.path(), &disk);
    let guest = lab.vm("root").section(PHASES).debian_of("root=/dev/vda1 rw", &format!("path = {disk:?}\n")).boot(&[]);
    wait_saved(&guest, "kernel");
    wait_booted(&guest);
    for round in 1..=rounds() {
        update(&guest, "/srv", round);
        let phase = reboot(&guest);
        assert_eq!(phase["candidate"], "kernel", "{phase}");
        let why = phase["skipped"][0]["why"].as_str().unwrap();
        assert!(phase["skipped"][0]["name"] == "services" && why.contains("disk disk0: block "), "{phase}");
        check(&guest, "/srv", round);
    }
    guest.rekindle(&["stop"]).ok().prints(&["by its agent"]);
    fsck(&disk);
}

/// Boots a guest that only reads its root and writes `data`, and waits until its late phase is saved.
fn immutable<'a>(lab: &'a Lab, name: &str, data: &Path) -> Guest<'a> {
    let disk = &lab.debian()[2];
    let guest = lab
        .vm(name)
        .section(PHASES)
        .debian_of(
            "root=/dev/vda ro rekindle.overlay=50% rekindle.data=/dev/vdb1",
            &format!("path = {disk:?}\nreadonly = true\n"),
        )
        .section(&format!("[[disk]]\npath = {data:?}\n"))
        .boot(&[]);
    wait_saved(&guest, "services");
    wait_booted(&guest);
    guest
}

#[test]
fn a_guest_that_only_reads_its_root_resumes_from_the_late_phase_and_mounts_its_data_after_it() {
    let (lab, directory) = (Lab::new(), directory());
    let data = copy(directory.path(), &lab.debian()[3]);
    let guest = immutable(&lab, "data", &data);
    let boot = guest.boot_id();
    for round in 1..=rounds() {
        update(&guest, "/srv/data", round);
        // These files are in the guest's memory, and must not exist after the reboot.
        sh(&guest, "head -c 20000000 /dev/urandom >/run/leak; echo aged >/root/aged");
        let phase = reboot(&guest);
        assert_eq!(phase["candidate"], "services", "{phase}");
        assert_eq!(guest.boot_id(), boot, "the guest was booted");
        check(&guest, "/srv/data", round);
        sh(&guest, "[ ! -e /run/leak ] && [ ! -e /root/aged ]");
        let started = sh(&guest, "systemctl show --value -p ActiveEnterTimestampMonotonic rekindle-restored.target");
        assert_ne!(started.trim(), "0", "the target for a restored guest was not started");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let guest_time: u64 = sh(&guest, "date +%s").trim().parse().unwrap();
        assert!(now.abs_diff(guest_time) < 60, "{now} on the host, {guest_time} in the guest");
    }
    assert!(void(&guest, "services").is_null() && void(&guest, "kernel").is_null());
    guest.rekindle(&["stop"]).ok().prints(&["by its agent"]);
    fsck(&data);
}

/// The guest is frozen and powered off instead of shut down: only the freeze makes it write its data to disk.
#[test]
fn data_written_before_a_freeze_survives_the_reboot() {
    let (lab, directory) = (Lab::new(), directory());
    let data = copy(directory.path(), &lab.debian()[3]);
    let guest = immutable(&lab, "frozen", &data);
    let rounds = rounds();
    for round in 1..=rounds {
        write(&guest, "/srv/data", round);
        let phase = reboot_by(&guest, "freeze", "frozen");
        assert_eq!(phase["candidate"], "services", "{phase}");
        check(&guest, "/srv/data", round);
    }
    // Rekindle is killed while the guest is frozen: `recover` thaws it, so that it can be shut down.
    write(&guest, "/srv/data", rounds + 1);
    let mut command = lab.command(["reboot", &guest.name, "--how", "phase", "--end", "freeze"]);
    command.env("REKINDLE_FAULT", "cold.suspend.frozen:kill");
    lab.finish(command).killed();
    assert_eq!(guest.status(), "needs-recovery");
    guest.rekindle(&["recover"]).ok().prints(&["the guest was booted"]);
    guest.wait_ready();
    wait_booted(&guest);
    check(&guest, "/srv/data", rounds + 1);
    // A backup program may have frozen the file systems: they stay frozen.
    let port = guest.only_qemu().directory.join("agent.sock");
    agent::freeze(&port, ANSWER).unwrap();
    let words = ["reboot", &guest.name, "--how", "cold", "--end", "freeze"];
    lab.rekindle(words).status(1).prints(&["frozen already", "runs as before"]);
    agent::thaw(&port, ANSWER).unwrap();
    // A cold reboot with a freeze keeps the data, too.
    write(&guest, "/srv/data", rounds + 2);
    assert_eq!(lab.rekindle(["--json"].into_iter().chain(words)).ok().json()["ended"], "frozen");
    guest.wait_ready();
    wait_booted(&guest);
    check(&guest, "/srv/data", rounds + 2);
    guest.rekindle(&["stop"]).ok().prints(&["by its agent"]);
    fsck(&data);
}
