//! Creation of stores: a store is created only with an explicit option, and a missing one is not replaced silently.

use crate::common::{Guest, Lab, Net};
use std::fs;
use std::path::{Path, PathBuf};

fn start<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    lab.vm(name).net(Net::None).memory("96M").start(&[])
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_mistyped_path_and_another_host_get_no_store() {
    let lab = Lab::without_root();
    let guest = start(&lab, "web");
    let wrong = lab.path("chekpoints");
    let stream = lab.path("stream");
    fs::write(&stream, "").unwrap();
    let store = ["--store", text(&wrong)];
    for arguments in [
        &[&["protect", "web", "--count", "1"], &store[..]].concat()[..],
        &[&["move", "web", "--to", "host2", "--ssh", "false"], &store[..]].concat(),
        &[&["restore", "elsewhere"], &store[..]].concat(),
        &[&["restore", "elsewhere", "--prepare"], &store[..]].concat(),
        &["store", "import", text(&wrong), text(&stream), "--name", "web"],
        &["store", "ls", text(&wrong)],
        &["store", "compact", text(&wrong)],
    ] {
        lab.rekindle(arguments).status(1).prints(&[text(&wrong), "not a store of Rekindle", "rekindle store init"]);
        assert!(!wrong.exists(), "{arguments:?} has created it");
    }
    let error = lab.rekindle(["--json", "protect", "web", "--store", text(&wrong)]).status(1).json();
    assert_eq!((&error["kind"], &error["store"]), (&"not-a-store".into(), &text(&wrong).into()), "{error}");

    // The path has the form that scp and NFS use.
    let mut command = lab.command(["protect", "web", "--store", "host2:/srv/x", "--create-store"]);
    command.current_dir(lab.path("."));
    lab.finish(command).status(2).prints(&["directory of host host2", "mount it", "s3://BUCKET/PREFIX"]);
    assert!(!lab.path("host2:").exists());

    // Both ways to create a store work.
    lab.rekindle(["protect", "web", "--store", text(&lab.path("one")), "--create-store", "--count", "1"]).ok();
    let two = lab.path("two");
    lab.rekindle(["store", "init", text(&two)]).ok().prints(&["rekindle protect"]);
    lab.rekindle(["store", "init", text(&two)]).status(1).prints(&["there is a store already", "without a VM yet"]);
    lab.rekindle(["restore", "elsewhere", "--store", text(&two)]).status(1).prints(&["a new store, without a VM yet"]);
    lab.rekindle(["protect", "web", "--store", text(&two), "--count", "1"]).ok();
    let before = lab.rekindle(["--json", "store", "ls", text(&two)]).ok().json();
    lab.rekindle(["store", "init", text(&two)]).status(1).prints(&["there is a store already", "of VM web"]);
    assert_eq!(lab.rekindle(["--json", "store", "ls", text(&two)]).ok().json(), before);
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

#[test]
fn a_missing_store_is_reported_and_replaced_only_with_an_explicit_option() {
    let lab = Lab::without_root();
    let guest = start(&lab, "web");
    let store = lab.path("store");
    let protect =
        |more: &[&str]| lab.rekindle([&["protect", "web", "--store", text(&store), "--count", "1"][..], more].concat());
    protect(&["--create-store"]).ok();
    protect(&["--create-store"]).ok();
    let abandon = ["--create-store", "--abandon-old-checkpoints"];
    protect(&abandon).status(1).prints(&["exists, with 2 checkpoints", "nothing was abandoned"]);

    // The store's file system is not mounted.
    let away: PathBuf = lab.path("away");
    fs::rename(&store, &away).unwrap();
    let words = ["the store of VM web is gone", "owner since 20", "mounted?", &abandon.join(" ")];
    for arguments in [&[][..], &["--create-store"]] {
        protect(arguments).status(1).prints(&words);
        assert!(!store.exists());
    }
    let error = protect(&["--json"]).status(1).json();
    assert_eq!((&error["kind"], &error["vm"]), (&"store-gone".into(), &"web".into()), "{error}");
    assert_eq!(error["store"], text(&store));
    assert!(error["since"].as_str().unwrap().ends_with(" UTC"), "{error}");
    let remedy = format!("rekindle protect web --store {} {}", text(&store), abandon.join(" "));
    assert_eq!(error["remedy"], remedy.as_str());
    lab.rekindle(["move", "web", "--to", "b", "--ssh", "false", "--store", text(&store), "--create-store"])
        .status(1)
        .prints(&words);
    protect(&["--abandon-old-checkpoints"]).status(1).prints(&words);
    assert!(!store.exists());
    // The file system is mounted again: no checkpoint was abandoned.
    fs::rename(&away, &store).unwrap();
    protect(&[]).ok();
    assert_eq!(lab.rekindle(["--json", "store", "ls", text(&store)]).ok().json()["checkpoints"][2]["number"], 3);

    // The store is lost.
    fs::rename(&store, &away).unwrap();
    lab.rekindle(["store", "init", text(&store)]).ok();
    protect(&[]).status(1).prints(&["the store of VM web is gone", "a new store without a VM"]);
    protect(&["--abandon-old-checkpoints"]).ok();
    let listed = lab.rekindle(["--json", "store", "ls", text(&store)]).ok().json();
    assert_eq!(listed["checkpoints"].as_array().unwrap().len(), 1, "{listed}");
    lab.rekindle(["store", "verify", text(&store)]).ok();
    fs::remove_dir_all(&store).unwrap();
    protect(&abandon).ok();
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}
