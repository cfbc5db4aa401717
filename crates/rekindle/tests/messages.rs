//! What is said of mistakes: in the words of the user, with what to do.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::Lab;
use std::fs;

#[test]
fn of_a_vm_that_does_not_exist_nothing_is_said_to_run() {
    let lab = Lab::without_root();
    for arguments in [
        &["reboot", "vmm", "nope"][..],
        &["reboot", "vmm", "nope", "--dry-run"],
        &["reboot", "os", "nope"],
        &["reboot", "os", "nope", "--dry-run"],
        &["stop", "nope", "--dry-run"],
        &["pager", "nope"],
        &["watch", "nope"],
        &["phases", "nope"],
        &["show", "nope", "--timeline"],
        &["host", "suspend", "nope"],
    ] {
        let done = lab.rekindle(arguments).status(1).prints(&["there is no VM nope; `rekindle ls` lists them"]);
        for wrong in ["runs as before", "No such file", ".lock"] {
            assert!(!done.stdout.contains(wrong) && !done.stderr.contains(wrong), "{wrong:?} in {done}");
        }
    }
    lab.assert_empty();
}

#[test]
fn a_file_in_the_place_of_a_store_is_named_as_the_user_named_it() {
    let lab = Lab::without_root();
    for store in ["/etc/passwd", "/etc/passwd/below"] {
        for arguments in [&["store", "ls", store][..], &["store", "init", store], &["restore", "x", "--store", store]] {
            let done = lab.rekindle(arguments).status(1).prints(&[store, "not a directory; a store is a directory"]);
            assert!(!done.stderr.contains("rekindle-store"), "{done}");
        }
    }
}

#[test]
fn a_libvirt_domain_is_recognised() {
    let lab = Lab::without_root();
    let path = lab.path("db.xml");
    fs::write(&path, "<?xml version='1.0'?>\n<domain type='kvm'>\n  <name>db</name>\n</domain>\n").unwrap();
    let words = ["db.xml", "a libvirt domain (XML)", "virsh start db", "rekindle attach NAME --libvirt db"];
    lab.rekindle(["run", path.to_str().unwrap()]).status(2).prints(&words);
    fs::write(&path, "<network><name>default</name></network>").unwrap();
    let done = lab.rekindle(["run", path.to_str().unwrap()]).status(2).prints(&["this is XML", "TOML"]);
    assert!(!done.stderr.contains("attach"), "{done}");
}

#[test]
fn the_word_of_another_program_leads_to_ours() {
    let lab = Lab::without_root();
    for (wrong, ours) in [("start", "'run'"), ("list", "'ls'"), ("destroy", "'stop'"), ("migrate", "'move'")] {
        lab.rekindle([wrong, "web"]).status(2).prints(&[&format!("a similar subcommand exists: {ours}")]);
    }
    // None of those: what is spelled alike.
    lab.rekindle(["restor", "web"]).status(2).prints(&["'restore'"]);
    let done = lab.rekindle(["--json", "start", "web"]).status(2).prints(&["'run'"]);
    assert!(!done.stderr.contains("'store'"), "{done}");
    let done = lab.rekindle(["store", "start"]).status(2);
    assert!(!done.stderr.contains("'run'"), "{done}");
}
