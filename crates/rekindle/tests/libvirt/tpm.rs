//! Domains with a TPM, whose state is in an emulator (swtpm) of libvirt's: what the guest has measured and stored is kept.

use crate::taps::accessible;
use crate::{rekindle, text};
use rekindle_kernel::process::Process;
use rekindle_testing::libvirt::{Domain, DomainOptions, Firmware, PrivateLibvirt};
use rekindle_testing::tools::{qemu_new, qemu_newest, qemu_old};
use rekindle_testing::{DEADLINE, wait_for};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

const TPM: &str = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>";
/// The header of a session without a password, for a command of one handle.
const NO_PASSWORD: &str = "00000009400000090000000000";
/// The owner of the TPM.
const OWNER: &str = "40000001";
/// The index of a variable.
const VARIABLE: &str = "01500001";
/// Where libvirt has the sockets and pid files of emulators.
const EMULATORS: &str = "/run/libvirt/qemu/swtpm";
/// Where libvirt has their states, by the UUIDs of domains.
const EMULATOR_STATES: &str = "/var/lib/libvirt/swtpm";

/// Returns options of a guest that UEFI starts, as virt-install gives it a TPM.
fn with_tpm(name: &str) -> DomainOptions<'_> {
    DomainOptions { firmware: Firmware::Uefi, devices: TPM, ..DomainOptions::new(name) }
}

/// Sends the guest's TPM a command: its code, and what follows. Returns the reply without its header.
#[track_caller]
fn command(domain: &Domain<'_>, has_session: bool, code: &str, rest: &str) -> String {
    let tag = if has_session { "8002" } else { "8001" };
    let length = 10 + rest.len() / 2;
    let reply = domain.ask(&format!("tpm {tag}{length:08x}{code}{rest}"));
    assert_eq!(reply.get(12..20), Some("00000000"), "the TPM rejects command {code}: {reply}");
    reply[20..].to_owned()
}

/// Adds a measurement to a register that an application may use. Only a start of the guest clears it.
fn measure(domain: &Domain<'_>, byte: u8) {
    let digest = format!("{byte:02x}").repeat(32);
    command(domain, true, "00000182", &format!("00000010{NO_PASSWORD}00000001000b{digest}"));
}

/// Returns that register.
fn register(domain: &Domain<'_>) -> String {
    let reply = command(domain, false, "0000017e", "00000001000b03000001");
    reply[reply.len() - 64..].to_owned()
}

/// Makes a variable that is kept without power.
fn define_variable(domain: &Domain<'_>) {
    let public = format!("{VARIABLE}000b0206000600000008");
    command(domain, true, "0000012a", &format!("{OWNER}{NO_PASSWORD}0000000e{public}"));
}

fn write_variable(domain: &Domain<'_>, value: u64) {
    command(domain, true, "00000137", &format!("{OWNER}{VARIABLE}{NO_PASSWORD}0008{value:016x}0000"));
}

fn variable(domain: &Domain<'_>) -> u64 {
    let reply = command(domain, true, "0000014e", &format!("{OWNER}{VARIABLE}{NO_PASSWORD}00080000"));
    // After the lengths of the reply and of the value; the session follows.
    u64::from_str_radix(&reply[12..28], 16).unwrap()
}

/// Returns the emulators on this host that have the domain's state.
fn emulators_of(domain: &Domain<'_>) -> Vec<Process> {
    let directory = format!("{EMULATOR_STATES}/{}/", domain.uuid());
    let numbers = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let has_state = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.starts_with(b"/usr/bin/swtpm") && String::from_utf8_lossy(&line).contains(&directory)
    };
    numbers.filter(has_state).filter_map(|pid| Process::of(pid).ok()).collect()
}

/// Returns the sockets and pid files of emulators, and the files with their states.
fn emulator_files(domain: &Domain<'_>) -> Vec<PathBuf> {
    let directories = [EMULATORS.to_owned(), format!("{EMULATOR_STATES}/{}/tpm2", domain.uuid())];
    let files = |directory| fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = directories.iter().flat_map(files).collect();
    files.sort();
    files
}

#[test]
fn what_the_tpm_has_measured_and_stored_goes_from_qemu_7_to_10_and_11_and_back() {
    let libvirt = PrivateLibvirt::start();
    let [old, newest] = [qemu_old(), qemu_newest()].map(accessible);
    let domain = libvirt.boot(&DomainOptions { emulator: &old, ..with_tpm("tpm") });
    let boot_id = domain.ask("boot-id");
    let files = emulator_files(&domain);
    assert_eq!(files.len(), 4, "{files:?}");
    define_variable(&domain);
    let mut written = 0;
    for binary in [qemu_new(), &newest, &old] {
        written += 1;
        write_variable(&domain, written);
        measure(&domain, 1);
        let before = (register(&domain), variable(&domain), emulators_of(&domain));
        let arguments = ["replace-qemu", "--preview", "--qemu", binary.to_str().unwrap(), &domain.name];
        let output = rekindle(&arguments).output().unwrap();
        assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
        wait_for("the guest of a replaced QEMU", DEADLINE, || domain.is_up().then_some(()));
        assert_eq!(domain.ask("boot-id"), boot_id);
        let emulators = emulators_of(&domain);
        assert_eq!((register(&domain), variable(&domain)), (before.0, before.1));
        assert_eq!((before.1, emulators.len()), (written, 1));
        assert_ne!(emulators, before.2);
        assert_eq!(emulator_files(&domain), files);
        let pid_file = files.iter().find(|file| file.extension().is_some_and(|extension| extension == "pid")).unwrap();
        assert_eq!(fs::read_to_string(pid_file).unwrap().trim(), emulators[0].pid.to_string());
    }
    // The emulator has stored what is kept without power, and the register is clear after a start.
    let measured = register(&domain);
    libvirt.virsh(&["reset", &domain.name]);
    let is_other = || (domain.is_up() && domain.ask("boot-id") != boot_id).then_some(());
    wait_for("the guest's next boot", DEADLINE, is_other);
    assert_eq!(variable(&domain), written);
    assert_ne!(register(&domain), measured);
    // libvirt ends the emulator that it did not start, and removes its files.
    let emulators = emulators_of(&domain);
    libvirt.virsh(&["destroy", &domain.name]);
    wait_for("the end of the emulator", DEADLINE, || (!emulators[0].is_alive()).then_some(()));
    assert_eq!(fs::read_dir(EMULATORS).unwrap().count(), 0);
}

#[test]
fn a_guest_that_returns_to_its_qemu_has_its_tpm_there() {
    let libvirt = PrivateLibvirt::start();
    let domain = libvirt.boot(&with_tpm("tpm-back"));
    measure(&domain, 1);
    define_variable(&domain);
    write_variable(&domain, 7);
    let before = (register(&domain), emulators_of(&domain), emulator_files(&domain), domain.process());
    // The second emulator has the state already at the last of these points.
    for point in ["replace.prepare.spawned", "replace.suspend.copied", "replace.suspend.loaded"] {
        let failed = rekindle(&["replace-qemu", "--preview", &domain.name])
            .env("REKINDLE_FAULT", format!("{point}:kill-new"))
            .output()
            .unwrap();
        assert_eq!(failed.status.code(), Some(1), "{point}: {}", text(&failed));
        assert!(text(&failed).contains("destination QEMU"), "{point}: {}", text(&failed));
        let now = (register(&domain), emulators_of(&domain), emulator_files(&domain), domain.process());
        assert_eq!(now, before, "{point}");
        assert_eq!(variable(&domain), 7);
    }
    write_variable(&domain, 8);
    let boot_id = domain.ask("boot-id");
    libvirt.virsh(&["reset", &domain.name]);
    let is_other = || (domain.is_up() && domain.ask("boot-id") != boot_id).then_some(());
    wait_for("the guest's next boot", DEADLINE, is_other);
    assert_eq!(variable(&domain), 8);
}

#[test]
fn one_emulator_has_the_tpm_after_rekindle_is_killed() {
    let libvirt = PrivateLibvirt::start();
    let domain = libvirt.boot(&with_tpm("tpm-killed"));
    define_variable(&domain);
    let files = emulator_files(&domain);
    let points = [
        ("replace.prepare.tpm-started", false),
        ("replace.prepare.spawned", false),
        ("replace.suspend.loaded", false),
        ("replace.resume.journalled", true),
        ("replace.give-back.frozen", true),
        ("replace.settle.journalled", true),
        ("replace.settle.tpm-settled", true),
        ("replace.settle.source-gone", true),
    ];
    for (number, (point, is_replaced)) in points.into_iter().enumerate() {
        let number = number as u64;
        write_variable(&domain, number);
        measure(&domain, 1);
        let (measured, emulators) = (register(&domain), emulators_of(&domain));
        let killed = rekindle(&["replace-qemu", "--preview", &domain.name])
            .env("REKINDLE_FAULT", format!("{point}:kill"))
            .output()
            .unwrap();
        assert_eq!(killed.status.signal(), Some(9), "{point}: {}", text(&killed));
        let recovered = rekindle(&["recover", &domain.name]).output().unwrap();
        assert!(recovered.status.success(), "{point}: {}", text(&recovered));
        wait_for("the recovered guest", DEADLINE, || domain.is_up().then_some(()));
        assert_eq!((register(&domain), variable(&domain)), (measured, number), "{point}");
        let now = emulators_of(&domain);
        assert_eq!((now.len(), now == emulators, emulator_files(&domain)), (1, !is_replaced, files.clone()), "{point}");
    }
}
