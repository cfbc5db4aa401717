//! One guest and two hosts: the guest runs on the host on which it was restored last. On the previous host it is ended,
//! and not booted again.

use crate::common::protector::{Protector, restore, store};
use crate::common::{DEADLINE, Guest, Lab, Net, wait_for};
use std::fs;
use std::path::Path;

/// Boots a guest without a network: two labs cannot have the same tap at the same time.
fn boot<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    let guest = lab.vm(name).net(Net::None).memory("96M").start(&[]);
    wait_for("the guest to be up", DEADLINE, || {
        fs::read_to_string(guest.file("console.log")).ok().filter(|text| text.contains("rekindle-micro ready"))
    });
    guest
}

/// Returns the VM of this name on another host.
fn on_other_host<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    lab.vm(name).net(Net::None).guest()
}

fn run_epoch(guest: &Guest<'_>) -> u64 {
    let text = fs::read(guest.file("owner.json")).unwrap();
    serde_json::from_slice::<serde_json::Value>(&text).unwrap()["run"].as_u64().unwrap()
}

fn protect<'a>(guest: &Guest<'a>, lab: &Lab, store: &Path) -> Protector {
    let mut protector = Protector::start(guest, lab, store, &["--every", "100ms"]);
    protector.wait("checkpoint");
    protector
}

#[test]
fn a_guest_that_was_restored_elsewhere_is_ended_on_its_previous_host() {
    let (first, second) = (Lab::without_root(), Lab::without_root());
    let here = boot(&first, "web");
    let store = store(&first, "web");
    let mut protector = protect(&here, &first, &store);
    assert_eq!(run_epoch(&here), 1);

    let there = on_other_host(&second, "web");
    restore(&there, &store, &[]);
    let status = protector.child.wait().unwrap();
    assert_eq!(status.code(), Some(1), "the protector did not report the other owner");
    assert!(here.qemus().is_empty(), "the guest still runs on its previous host\n{}", first.state_report());
    there.only_qemu();
    // The guest is not booted again on the first host, and a protector on it does not claim the store.
    here.rekindle(&["recover"]).status(1).prints(&["must not run here any more", "restore web", "rekindle stop web"]);
    let text = store.to_str().unwrap();
    first.rekindle(["protect", "web", "--store", text, "--count", "1"]).status(1);
    here.rekindle(&["stop"]).ok();
    first.assert_empty();

    // The guest on the other host is not affected.
    let mut protector = protect(&there, &second, &store);
    protector.next_checkpoint();
    protector.end();
    there.only_qemu();
}

#[test]
fn a_late_protector_ends_the_guest_and_does_not_claim_the_store() {
    let (first, second) = (Lab::without_root(), Lab::without_root());
    let here = boot(&first, "web");
    let store = store(&first, "web");
    protect(&here, &first, &store).kill();
    let there = on_other_host(&second, "web");
    restore(&there, &store, &[]);
    // The first host does not know about the restore yet.
    assert_eq!(here.qemus().len(), 1);
    let epoch =
        |lab: &Lab| lab.rekindle(["--json", "store", "ls", store.to_str().unwrap()]).ok().json()["epoch"].clone();
    let before = epoch(&second);
    first
        .rekindle(["protect", "web", "--store", store.to_str().unwrap()])
        .status(1)
        .prints(&["must not run here any more"]);
    assert!(here.qemus().is_empty());
    assert_eq!(epoch(&second), before, "the late protector has claimed the store");
    there.only_qemu();
}

#[test]
fn an_administrator_s_claim_ends_no_guest() {
    let lab = Lab::without_root();
    let guest = boot(&lab, "web");
    let store = store(&lab, "web");
    let mut protector = protect(&guest, &lab, &store);
    lab.rekindle(["store", "compact", store.to_str().unwrap()]).ok();
    assert_eq!(protector.child.wait().unwrap().code(), Some(1));
    guest.only_qemu();
    // The next protector continues with the same run epoch.
    protect(&guest, &lab, &store).end();
    assert_eq!(run_epoch(&guest), 1);
    guest.only_qemu();
}
