//! Two hosts, one guest: where it was restored last it runs, and where it ran before it is ended, and is not booted again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::protector::{Protector, restore, store};
use common::{DEADLINE, Guest, Lab, Net, wait_for};
use std::fs;
use std::path::Path;

/// A guest without a network, which both hosts can have at once, that has booted.
fn boot<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    let guest = lab.vm(name).net(Net::None).memory("96M").start(&[]);
    wait_for("the guest to be up", DEADLINE, || {
        fs::read_to_string(guest.file("console.log")).ok().filter(|text| text.contains("rekindle-micro ready"))
    });
    guest
}

/// The same VM on another host.
fn there<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    lab.vm(name).net(Net::None).guest()
}

fn run_of(guest: &Guest<'_>) -> u64 {
    let text = fs::read(guest.file("owner.json")).unwrap();
    serde_json::from_slice::<serde_json::Value>(&text).unwrap()["run"].as_u64().unwrap()
}

fn protect<'a>(guest: &Guest<'a>, lab: &Lab, store: &Path) -> Protector {
    let mut protector = Protector::start(guest, lab, store, &["--every", "100ms"]);
    protector.wait("checkpoint");
    protector
}

#[test]
fn a_guest_that_was_restored_elsewhere_is_ended_where_it_ran() {
    let (first, second) = (Lab::without_root(), Lab::without_root());
    let here = boot(&first, "web");
    let store = store(&first, "web");
    let mut protector = protect(&here, &first, &store);
    assert_eq!(run_of(&here), 1);

    let there = there(&second, "web");
    restore(&there, &store, &[]);
    let status = protector.child.wait().unwrap();
    assert_eq!(status.code(), Some(1), "a host that was taken over says so");
    assert!(here.qemus().is_empty(), "its guest was ended\n{}", first.state_report());
    there.only_qemu();
    // Nobody boots it again here, and nobody takes the store back.
    here.rekindle(&["recover"]).status(1).prints(&["is not to run here any more", "restore web", "rekindle stop web"]);
    let text = store.to_str().unwrap();
    first.rekindle(["protect", "web", "--store", text, "--count", "1"]).status(1);
    here.rekindle(&["stop"]).ok();
    first.assert_empty();

    // The other one goes on, and is not told that anything has ended.
    let mut protector = protect(&there, &second, &store);
    protector.next_checkpoint();
    protector.end();
    there.only_qemu();
}

#[test]
fn a_protector_that_comes_back_late_ends_the_guest_before_it_claims_anything() {
    let (first, second) = (Lab::without_root(), Lab::without_root());
    let here = boot(&first, "web");
    let store = store(&first, "web");
    protect(&here, &first, &store).kill();
    let there = there(&second, "web");
    restore(&there, &store, &[]);
    // Nobody has told the first one yet.
    assert_eq!(here.qemus().len(), 1);
    let epoch =
        |lab: &Lab| lab.rekindle(["--json", "store", "ls", store.to_str().unwrap()]).ok().json()["epoch"].clone();
    let before = epoch(&second);
    first
        .rekindle(["protect", "web", "--store", store.to_str().unwrap()])
        .status(1)
        .prints(&["is not to run here any more"]);
    assert!(here.qemus().is_empty());
    assert_eq!(epoch(&second), before, "it has claimed the store");
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
    // The next one goes on, as of the same guest.
    protect(&guest, &lab, &store).end();
    assert_eq!(run_of(&guest), 1);
    guest.only_qemu();
}
