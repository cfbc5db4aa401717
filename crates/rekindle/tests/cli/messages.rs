//! Error messages for a user's mistakes: in the user's terms, with a remedy.

use crate::common::Lab;
use std::fs;

#[test]
fn no_message_states_that_a_vm_that_does_not_exist_runs() {
    let lab = Lab::without_root();
    for arguments in [
        &["replace-qemu", "nope"][..],
        &["replace-qemu", "nope", "--dry-run"],
        &["reboot", "nope"],
        &["reboot", "nope", "--dry-run"],
        &["reboot", "vmm", "nope"],
        &["reboot", "os", "nope"],
        &["stop", "nope", "--dry-run"],
        &["pager", "nope"],
        &["watch", "nope"],
        &["phases", "nope"],
        &["show", "nope", "--timeline"],
        &["host", "suspend", "nope"],
    ] {
        let result = lab.rekindle(arguments).status(1).prints(&["there is no VM nope; `rekindle status` lists them"]);
        for unwanted in ["runs as before", "No such file", ".lock"] {
            assert!(!result.stdout.contains(unwanted) && !result.stderr.contains(unwanted), "{unwanted:?} in {result}");
        }
    }
    lab.assert_empty();
}

#[test]
fn a_file_where_a_store_is_expected_is_reported_with_the_path_that_the_user_gave() {
    let lab = Lab::without_root();
    for store in ["/etc/passwd", "/etc/passwd/below"] {
        for arguments in [&["store", "ls", store][..], &["store", "init", store], &["restore", "x", "--store", store]] {
            let result = lab.rekindle(arguments).status(1).prints(&[store, "not a directory; a store is a directory"]);
            assert!(!result.stderr.contains("rekindle-store"), "{result}");
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
    let result = lab.rekindle(["run", path.to_str().unwrap()]).status(2).prints(&["this is XML", "TOML"]);
    assert!(!result.stderr.contains("attach"), "{result}");
}

#[test]
fn another_program_s_command_name_gets_a_hint_at_ours() {
    let lab = Lab::without_root();
    for (wrong, ours) in [("start", "'run'"), ("list", "'status'"), ("destroy", "'stop'"), ("migrate", "'move'")] {
        lab.rekindle([wrong, "web"]).status(2).prints(&[&format!("a similar subcommand exists: {ours}")]);
    }
    // For other mistakes, the hint is a command with a similar spelling.
    lab.rekindle(["restor", "web"]).status(2).prints(&["'restore'"]);
    let result = lab.rekindle(["--json", "start", "web"]).status(2).prints(&["'run'"]);
    assert!(!result.stderr.contains("'store'"), "{result}");
    let result = lab.rekindle(["store", "start"]).status(2);
    assert!(!result.stderr.contains("'run'"), "{result}");
}
