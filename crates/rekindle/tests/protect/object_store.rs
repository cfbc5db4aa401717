//! Checkpoints of a guest in a real object store: Ceph's S3 gateway.

use crate::common::protector::{Protector, crash, restore_with, wait_filled};
use crate::common::{DEADLINE, Guest, Lab, Net, wait_for};
use rekindle_testing::object_store::{BUCKET, ObjectStoreServer};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
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

/// The resource agent has the credentials in a file. So have the protector and the pager that its commands start.
#[test]
fn a_cluster_resource_uses_an_object_store_with_the_variables_of_a_file() {
    let server = ObjectStoreServer::start();
    let lab = Lab::without_root();
    let variables = lab.path("s3.env");
    let lines: Vec<String> = server.environment().iter().map(|(key, value)| format!("{key}={value}\n")).collect();
    fs::write(&variables, lines.concat()).unwrap();
    fs::set_permissions(&variables, Permissions::from_mode(0o644)).unwrap();
    let vm = lab.vm("web").net(Net::None).memory("96M");
    let (definition, guest) = (vm.write(), vm.guest());
    let (store, file) = (format!("s3://{BUCKET}/web"), variables.to_str().unwrap());
    let prepared = |words: &[&str]| lab.command([words, &["--json", "--environment-file", file]].concat());
    let command = |words: &[&str]| lab.finish(prepared(words));
    let ocf_command = |action: &str| {
        let resource =
            ["--definition", definition.to_str().unwrap(), "--store", &store, "--every", "100ms", "--keep", "1000"];
        prepared(&[&["ocf", action, "web"][..], &resource].concat())
    };
    let ocf = |action: &str| lab.finish(ocf_command(action));
    command(&["store", "init", &store]).status(1).prints(&["s3.env", "chmod 600"]);
    fs::set_permissions(&variables, Permissions::from_mode(0o600)).unwrap();
    command(&["store", "init", &store]).ok();
    ocf("monitor").status(7);
    assert_eq!(ocf("start").ok().json()["started"], "booted");
    ocf("monitor").status(0);
    let newest = || command(&["store", "ls", &store]).ok().json()["checkpoints"].as_array().map_or(0, Vec::len);
    wait_for("checkpoints", DEADLINE, || (newest() >= 2).then_some(()));
    // The node fails: QEMU, protector and files are lost.
    crash(&guest);
    ocf("monitor").status(7);
    // The pager dies, and is started anew by a process that does not know the file.
    let mut start = ocf_command("start");
    start.env("REKINDLE_FAULT", "fill.end.locked:kill");
    assert_eq!(lab.finish(start).ok().json()["started"], "restored");
    wait_for("the pager to die, and a restart of it", DEADLINE, || {
        let restarts = fs::read_to_string(guest.file("helpers.json")).unwrap_or_default();
        restarts.contains("\"pager\"").then_some(())
    });
    wait_filled(&guest);
    ocf("monitor").status(0);
    guest.single_qemu();
    let configured = lab.command([
        "ocf",
        "show-config",
        "web",
        "--definition",
        definition.to_str().unwrap(),
        "--store",
        &store,
        "--environment-file",
        file,
    ]);
    lab.finish(configured).ok().prints(&[&format!("environment_file={file}")]);
    // Without the file, the guest runs, and can be stopped: a failed stop would fence the node.
    let away = lab.path("away.env");
    fs::rename(&variables, &away).unwrap();
    ocf("monitor").status(0);
    let stopped = ocf("stop").ok().json();
    assert!(stopped["lost"].is_string(), "{stopped}");
    ocf("monitor").status(7);
    ocf("start").status(1).prints(&["there is no environment file", "s3.env"]);
    command(&["store", "ls", &store]).status(1).prints(&["s3.env"]);
    fs::rename(&away, &variables).unwrap();
    assert_eq!(ocf("start").ok().json()["started"], "restored");
    wait_filled(&guest);
    ocf("stop").ok();
    ocf("monitor").status(7);
}
