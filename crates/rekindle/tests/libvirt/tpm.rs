//! Domains with a TPM, whose state is in an emulator (swtpm) of libvirt's: what the guest has measured and stored is kept.

use crate::taps::accessible;
use crate::{rekindle, text};
use rekindle_kernel::process::Process;
use rekindle_testing::libvirt::{Domain, DomainOptions, Firmware, PrivateLibvirt};
use rekindle_testing::tools::{qemu_new, qemu_newest, qemu_old};
use rekindle_testing::tpm::Tpm;
use rekindle_testing::{DEADLINE, wait_for};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

const TPM: &str = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>";
/// Where libvirt has the sockets and pid files of emulators.
const EMULATORS: &str = "/run/libvirt/qemu/swtpm";
/// Where libvirt has their states, by the UUIDs of domains.
const EMULATOR_STATES: &str = "/var/lib/libvirt/swtpm";

/// Returns options of a guest that UEFI starts, as virt-install gives it a TPM.
fn with_tpm(name: &str) -> DomainOptions<'_> {
    DomainOptions { firmware: Firmware::Uefi, devices: TPM, ..DomainOptions::new(name) }
}

/// Resets the guest, and waits until it has booted.
fn reset(libvirt: &PrivateLibvirt, domain: &Domain<'_>) {
    let boot_id = domain.ask("boot-id");
    libvirt.virsh(&["reset", &domain.name]);
    let is_other = || (domain.is_up() && domain.ask("boot-id") != boot_id).then_some(());
    wait_for("the guest's next boot", DEADLINE, is_other);
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
    let ask = |command: &str| domain.ask(command);
    let tpm = Tpm(&ask);
    let boot_id = domain.ask("boot-id");
    let files = emulator_files(&domain);
    assert_eq!(files.len(), 4, "{files:?}");
    tpm.define_variable();
    let mut written = 0;
    for binary in [qemu_new(), &newest, &old] {
        written += 1;
        tpm.write_variable(written);
        tpm.measure(1);
        let before = (tpm.register(), tpm.variable(), emulators_of(&domain));
        let arguments = ["replace-qemu", "--qemu", binary.to_str().unwrap(), &domain.name];
        let output = rekindle(&arguments).output().unwrap();
        assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
        wait_for("the guest of a replaced QEMU", DEADLINE, || domain.is_up().then_some(()));
        assert_eq!(domain.ask("boot-id"), boot_id);
        let emulators = emulators_of(&domain);
        assert_eq!((tpm.register(), tpm.variable()), (before.0, before.1));
        assert_eq!((before.1, emulators.len()), (written, 1));
        assert_ne!(emulators, before.2);
        assert_eq!(emulator_files(&domain), files);
        let pid_file = files.iter().find(|file| file.extension().is_some_and(|extension| extension == "pid")).unwrap();
        assert_eq!(fs::read_to_string(pid_file).unwrap().trim(), emulators[0].pid.to_string());
    }
    // The emulator has stored what is kept without power, and the register is clear after a start.
    reset(&libvirt, &domain);
    assert_eq!(tpm.variable(), written);
    assert_eq!(tpm.register(), "0".repeat(64));
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
    let ask = |command: &str| domain.ask(command);
    let tpm = Tpm(&ask);
    tpm.measure(1);
    tpm.define_variable();
    tpm.write_variable(7);
    let before = (tpm.register(), emulators_of(&domain), emulator_files(&domain), domain.process());
    // The second emulator has the state already at the last of these points.
    for point in ["replace.prepare.spawned", "replace.suspend.copied", "replace.suspend.loaded"] {
        let failed = rekindle(&["replace-qemu", &domain.name])
            .env("REKINDLE_FAULT", format!("{point}:kill-new"))
            .output()
            .unwrap();
        assert_eq!(failed.status.code(), Some(1), "{point}: {}", text(&failed));
        assert!(text(&failed).contains("destination QEMU"), "{point}: {}", text(&failed));
        let now = (tpm.register(), emulators_of(&domain), emulator_files(&domain), domain.process());
        assert_eq!(now, before, "{point}");
        assert_eq!(tpm.variable(), 7);
    }
    tpm.write_variable(8);
    reset(&libvirt, &domain);
    assert_eq!(tpm.variable(), 8);
}

#[test]
fn one_emulator_has_the_tpm_after_rekindle_is_killed() {
    let libvirt = PrivateLibvirt::start();
    let domain = libvirt.boot(&with_tpm("tpm-killed"));
    let ask = |command: &str| domain.ask(command);
    let tpm = Tpm(&ask);
    tpm.define_variable();
    let files = emulator_files(&domain);
    let points = [
        ("replace.prepare.tpm-unlocked", false),
        ("replace.prepare.tpm-started", false),
        ("replace.prepare.spawned", false),
        ("replace.suspend.loaded", false),
        ("replace.resume.journalled", true),
        ("replace.give-back.frozen", true),
        ("replace.give-back.tpm-passed", true),
        ("replace.settle.journalled", true),
        ("replace.settle.source-gone", true),
    ];
    for (number, (point, is_replaced)) in points.into_iter().enumerate() {
        let number = number as u64;
        tpm.write_variable(number);
        tpm.measure(1);
        let (measured, emulators) = (tpm.register(), emulators_of(&domain));
        let killed =
            rekindle(&["replace-qemu", &domain.name]).env("REKINDLE_FAULT", format!("{point}:kill")).output().unwrap();
        assert_eq!(killed.status.signal(), Some(9), "{point}: {}", text(&killed));
        let recovered = rekindle(&["recover", &domain.name]).output().unwrap();
        assert!(recovered.status.success(), "{point}: {}", text(&recovered));
        wait_for("the recovered guest", DEADLINE, || domain.is_up().then_some(()));
        assert_eq!((tpm.register(), tpm.variable()), (measured, number), "{point}");
        let now = emulators_of(&domain);
        assert_eq!((now.len(), now == emulators, emulator_files(&domain)), (1, !is_replaced, files.clone()), "{point}");
    }
}
