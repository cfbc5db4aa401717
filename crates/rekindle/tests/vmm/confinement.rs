//! Disk servers and pagers are confined. What a confined process cannot do is shown where their confinement is defined.

use crate::common::protector::{Protector, crash, pager, restore, store, wait_filled};
use crate::common::served::{READ, digest, image, read, section, server};
use crate::common::{DEADLINE, Guest, Lab, Net, wait_for};
use rekindle_kernel::confinement::status::Rights;
use rekindle_kernel::process::Process;
use rekindle_vm::helpers::Helper;
use rekindle_vm::rundir::RunDir;

#[track_caller]
fn assert_confined(process: Process) {
    let rights = Rights::of(process).unwrap();
    assert!(rights.threads > 0 && rights.describe_missing().is_none(), "{rights:?}");
}

#[test]
fn each_thread_of_a_disk_server_and_a_pager_is_confined() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("caged").memory("512M").section(&section(&path, "")).boot(&[]);
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    assert_confined(server(&guest).expect("a server"));
    lab.rekindle(["doctor"]).prints(&["disk servers and pagers are confined"]);
    let store = store(&lab, "caged");
    guest.touch("300M");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "1"]);
    assert!(protector.child.wait().unwrap().success());
    crash(&guest);
    assert_eq!(restore(&guest, &store, &[])["filled"], false);
    let pager = pager(&guest).expect("a pager, while memory is missing");
    pager.stop().unwrap();
    assert_confined(pager);
    // Rekindle takes the pager, and not its broker, for the pager.
    assert_eq!(Helper::Pager.process(&RunDir::new(&lab.run_root(), &guest.name)), Some(pager));
    lab.rekindle(["doctor"]).prints(&["disk servers and pagers are confined"]);
    assert_confined(server(&guest).expect("a server"));
    pager.resume().unwrap();
    wait_filled(&guest);
    guest.verify();
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    guest.assert_sound();
}

/// Returns the brokers of processes of the lab.
fn brokers(guest: &Guest<'_>) -> Vec<Process> {
    let mut found = crate::common::observe::with_argument_containing("rekindle broker").unwrap();
    found.retain(|process| {
        let environment = std::fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(guest.lab.run_root().to_str().unwrap()) && process.is_alive()
    });
    found
}

#[test]
fn a_broker_has_one_capability_and_ends_with_its_server() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("brokered").section(&section(&path, "")).boot(&[]);
    let [broker] = brokers(&guest).try_into().expect("one broker");
    /// `CAP_SYS_PTRACE` of `linux/capability.h`.
    const SYS_PTRACE: u64 = 1 << 19;
    assert_eq!(Rights::of(broker).unwrap().capabilities, SYS_PTRACE);
    let server = server(&guest).expect("a server");
    server.kill().unwrap();
    wait_for("the broker to end", DEADLINE, || (!broker.is_alive()).then_some(()));
    wait_for("another server", DEADLINE, || crate::common::served::server(&guest).filter(|other| *other != server));
    guest.rekindle(&["stop", "--now"]).ok();
    wait_for("all brokers to end", DEADLINE, || brokers(&guest).is_empty().then_some(()));
}

#[test]
fn the_host_can_turn_the_confinement_off_and_doctor_names_the_helper() {
    let lab = Lab::without_root();
    lab.write_host_config(".host.toml", "confine_helpers = false");
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("free").net(Net::None).section(&section(&path, "")).start(&[]);
    let rights = Rights::of(server(&guest).expect("a server")).unwrap();
    assert!(!rights.has_filter && rights.capabilities != 0, "{rights:?}");
    lab.rekindle(["doctor"]).prints(&[
        "limited confinement",
        "the server of disk disk0 of free",
        "no system call filter",
    ]);
    guest.rekindle(&["stop", "--now"]).ok();
}
