//! Domains of a real libvirt. Needs root and the packages `libvirt-daemon-system` and `libvirt-clients`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use rekindle_libvirt::domains;
use rekindle_libvirt::status_file::{DomainRecord, SYSTEM_DIRECTORY};
use rekindle_testing::libvirt::{DomainOptions, PrivateLibvirt};
use rekindle_testing::{DEADLINE, tools, wait_for};
use std::path::Path;

/// Returns the status of the only domain.
fn only_domain() -> DomainRecord {
    let mut records = domains::all(Path::new(SYSTEM_DIRECTORY)).unwrap();
    assert_eq!(records.len(), 1, "{records:?}");
    records.remove(0).unwrap()
}

#[test]
fn a_domain_is_found_while_the_daemon_is_stopped_and_after_it_was_started_again() {
    let libvirt = PrivateLibvirt::start();
    assert!(domains::all(Path::new(SYSTEM_DIRECTORY)).unwrap().is_empty());
    let domain = libvirt.boot(&DomainOptions::new("web"));
    let boot_id = domain.ask("boot-id");
    let qemu = domain.process();

    libvirt.stop_daemon();
    assert_eq!(libvirt.daemon(), None);
    let recorded = only_domain();
    assert_eq!((recorded.name.as_str(), recorded.pid), (domain.name.as_str(), qemu.pid));
    assert_eq!((recorded.state.as_str(), recorded.emulator.as_path()), ("running", tools::qemu_new()));
    assert!(domains::qemu(&recorded).is_some());
    assert_eq!(domains::outdated(&recorded).unwrap(), None);
    assert_eq!(domain.ask("boot-id"), boot_id, "the guest runs on");

    libvirt.start_daemon();
    let state = || Some(domain.state()).filter(|state| state == "running");
    wait_for("the domain is running for the new daemon", DEADLINE, state);
    assert_eq!((only_domain(), domain.process()), (recorded, qemu));
    assert_eq!(domain.ask("boot-id"), boot_id);
}
