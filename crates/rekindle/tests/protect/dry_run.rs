//! `rekindle protect --dry-run`: it states what protection would cost, and changes nothing.

use crate::common::protector::{Protector, crash, store};
use crate::common::{Guest, Lab};
use rekindle_testing::tools::{qemu_newest, qemu_old};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;

/// Returns the files below `directory` with their content. Sockets and locks have none.
fn contents(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else if path.extension().is_none_or(|extension| extension != "lock") {
            found.insert(path.clone(), fs::read(&path).unwrap_or_default());
        }
    }
    found
}

fn estimate(guest: &Guest<'_>, store: &Path, more: &[&str]) -> Value {
    let words = ["--json", "protect", &guest.name, "--store", store.to_str().unwrap(), "--dry-run"];
    let result = guest.lab.rekindle([&words[..], more].concat()).ok().json();
    assert_eq!(result["checkpoints"], 0, "{result}");
    result["estimate"].clone()
}

fn mean(estimate: &Value) -> u64 {
    let changed = estimate["changed_bytes"].as_array().unwrap();
    changed.iter().map(|bytes| bytes.as_u64().unwrap()).sum::<u64>() / changed.len() as u64
}

#[test]
fn a_dry_run_measures_how_much_memory_changes_and_changes_nothing() {
    for qemu in [qemu_newest(), qemu_old()] {
        let lab = Lab::new();
        let guest = lab.vm("web").memory("256M").boot(&["--qemu", qemu.to_str().unwrap()]);
        guest.touch("96M");
        let store = store(&lab, "store");
        let before = (contents(&guest.only_qemu().directory), contents(&store));
        let idle = estimate(&guest, &store, &["--every", "500ms"]);
        assert_eq!(idle["policy"], "precopy", "{idle}");
        assert_eq!(idle["ram_bytes"], 256 * MIB, "{idle}");
        assert_eq!(
            (&idle["measured_ms"], idle["changed_bytes"].as_array().unwrap().len()),
            (&1000.into(), 10),
            "{idle}"
        );

        guest.ask("dirty 20 96 random");
        let busy = estimate(&guest, &store, &["--every", "5s"]);
        assert_eq!(
            (&busy["measured_ms"], busy["changed_bytes"].as_array().unwrap().len()),
            (&5000.into(), 2),
            "{busy}"
        );
        assert!(
            mean(&busy) > mean(&idle) + 16 * MIB && mean(&busy) <= 256 * MIB,
            "{}: idle: {idle}; busy: {busy}",
            qemu.display()
        );
        guest.ask("dirty 0");
        assert_eq!((contents(&guest.only_qemu().directory), contents(&store)), before);
        guest.assert_sound();
    }
}

#[test]
fn a_dry_run_fails_where_a_protector_would() {
    let lab = Lab::new();
    let guest = lab.vm("web").memory("96M").boot(&[]);
    let (ours, missing) = (store(&lab, "ours"), lab.path("missing"));
    let missing = missing.to_str().unwrap();
    let dry_run = |store: &str, more: &[&str]| {
        lab.rekindle([&["protect", "web", "--store", store, "--dry-run"][..], more].concat())
    };
    dry_run(missing, &[]).status(1).prints(&["not a store"]);
    dry_run(missing, &["--create-store"]).ok().prints(&["would be created", "nothing was changed"]);
    assert!(!Path::new(missing).exists());
    let text = ours.to_str().unwrap();
    dry_run(text, &["--disk", "overlays"]).status(1).prints(&["server = true"]);
    dry_run(text, &["--policy", "fast"]).status(2);

    let mut protector = Protector::start(&guest, &lab, &ours, &["--every", "100ms"]);
    protector.next_checkpoint();
    dry_run(text, &[]).status(1).prints(&["protect"]);
    protector.next_checkpoint();
    protector.end();
    dry_run(text, &["--every", "5s"]).ok().prints(&["checkpoints"]);

    let other = lab.vm("other").memory("96M").boot(&[]);
    let words = ["protect", "other", "--store", text, "--dry-run"];
    lab.rekindle(words).status(1).prints(&["holds VM web", "not VM other"]);
    other.assert_sound();
    crash(&guest);
    dry_run(text, &[]).status(1);
}

#[test]
fn doctor_states_what_each_technique_would_do_to_a_guest_and_changes_nothing() {
    let lab = Lab::new();
    let guest = lab.vm("web").memory("96M").boot(&[]);
    let before = (guest.single_qemu().process, contents(&guest.only_qemu().directory));
    let findings = lab.rekindle(["--json", "doctor", "web"]).ok().json();
    let finding = |check: &str| {
        let found = findings.as_array().unwrap().iter().find(|finding| finding["what"] == check);
        found.unwrap_or_else(|| panic!("no {check} in {findings}"))
    };
    for (check, level, text) in [
        ("replace-qemu", "good", "its guest stopped for milliseconds"),
        ("reboot cold", "good", "would shut its guest down and boot it"),
        ("reboot warm-cache", "limited", "not possible: "),
        ("reboot phase", "limited", "not possible: "),
        ("protect", "good", "the first checkpoint has all of its memory: 96.0 MiB"),
    ] {
        let found = finding(check);
        assert_eq!(found["level"], level, "{found}");
        assert!(found["found"].as_str().unwrap().contains(text), "{found}");
    }
    assert_eq!((guest.single_qemu().process, contents(&guest.only_qemu().directory)), before);
    lab.rekindle(["doctor", "nobody"]).status(1).prints(&["no VM nobody"]);
    guest.assert_sound();
}
