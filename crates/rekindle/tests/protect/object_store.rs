//! Checkpoints of a guest in a real object store: Ceph's S3 gateway.

use crate::common::protector::{Protector, crash, restore_with, wait_filled};
use crate::common::{DEADLINE, Guest, Lab, Net, wait_for};
use rekindle_testing::object_store::{BUCKET, ObjectStoreServer};
use std::fs;
use std::path::PathBuf;

/// Boots a guest without a network.
fn boot<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    let guest = lab.vm(name).net(Net::None).memory("96M").start(&[]);
    wait_for("the guest to be up", DEADLINE, || {
        fs::read_to_string(guest.file("console.log")).ok().filter(|text| text.contains("rekindle-micro ready"))
    });
    guest
}

/// Returns the last tick on the guest's console.
fn last_tick(guest: &Guest<'_>) -> Option<u64> {
    let text = fs::read_to_string(guest.file("console.log")).ok()?;
    // The lines are "tick N UPTIME".
    text.lines().rev().find_map(|line| line.strip_prefix("tick ")?.split_whitespace().next()?.parse().ok())
}

#[test]
fn a_guest_continues_from_an_object_store_also_if_the_server_failed_in_the_middle_of_a_commit() {
    let mut server = ObjectStoreServer::start();
    let variables = server.environment();
    let environment: Vec<(&str, &str)> = variables.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let lab = Lab::without_root();
    let guest = boot(&lab, "web");
    let store = PathBuf::from(format!("s3://{BUCKET}/web"));
    let mut init = lab.command(["store", "init", store.to_str().unwrap()]);
    init.envs(environment.iter().copied());
    lab.finish(init).ok();

    let mut protector = Protector::start_with(&guest, &lab, &store, &["--every", "100ms"], &environment);
    assert_eq!(protector.wait("checkpoint")["number"], 1);
    let committed = protector.next_checkpoint()["number"].as_u64().unwrap();
    // The protector commits all the time, so the server fails in a commit or just before one.
    server.kill_gateway();
    let tick = last_tick(&guest);
    wait_for("the guest to continue", DEADLINE, || (last_tick(&guest) > tick).then_some(()));
    protector.kill();
    crash(&guest);
    server.restart_gateway();

    let restored = restore_with(&guest, &store, &[], &environment);
    let number = restored["checkpoint"].as_u64().unwrap();
    assert!(number >= committed, "{restored}");
    wait_filled(&guest);
    let tick = last_tick(&guest);
    wait_for("the restored guest to run", DEADLINE, || (last_tick(&guest) > tick).then_some(()));
    guest.only_qemu();
    // The guest is protected again, into the same store.
    let mut again = Protector::start_with(&guest, &lab, &store, &["--every", "100ms"], &environment);
    assert!(again.wait("checkpoint")["number"].as_u64().unwrap() > number);
    again.end();
    let mut verify = lab.command(["--json", "store", "verify", store.to_str().unwrap()]);
    verify.envs(environment.iter().copied());
    assert_eq!(lab.finish(verify).ok().json()["bad"], serde_json::json!([]));
}
