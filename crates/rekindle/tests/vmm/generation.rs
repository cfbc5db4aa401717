//! The VM generation ID. A changed ID informs the guest that it was rolled back or duplicated, so the ID must not
//! change for any other reason.

use crate::common::{DEADLINE, Guest, Lab, Net, qemu_new, qemu_old, wait_for};
use serde_json::Value;
use std::fs;

/// Returns the offsets at which the guest's RAM contains the ID. The first three fields are little-endian in RAM.
fn in_ram(guest: &Guest<'_>, generation: &str) -> Vec<usize> {
    let hex: String = generation.chars().filter(|c| *c != '-').collect();
    let mut bytes: Vec<_> = (0..32).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
    for field in [0..4, 4..6, 6..8] {
        bytes[field].reverse();
    }
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    let ram = fs::read(shown["hardware"]["ram"]["path"].as_str().unwrap()).unwrap();
    // The ID has a page of its own, after a header of 40 bytes.
    let offsets = (40..ram.len()).step_by(4096).filter(|at| ram[*at..].starts_with(&bytes));
    offsets.collect()
}

#[test]
fn the_generation_id_survives_every_reboot() {
    let lab = Lab::new();
    let (old, new) = (qemu_old().to_str().unwrap(), qemu_new().to_str().unwrap());
    let guest = lab.vm("same").boot(&["--qemu", old]);
    guest.touch("16M");
    let generation = guest.only_qemu().generation().expect("a VM has one by default");
    let offsets = in_ram(&guest, &generation);
    assert_eq!(offsets.len(), 1, "{generation} is not in the guest's RAM exactly once");
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    assert_eq!(shown["hardware"]["vm_generation"], generation.as_str());
    guest.rekindle(&["show"]).ok().prints(&["vmgenid = true", &format!("VM generation ID: {generation}")]);
    let boot = guest.boot_id();
    let same = |what: &str| {
        assert_eq!(guest.only_qemu().generation().as_ref(), Some(&generation), "after {what}");
        assert_eq!(in_ram(&guest, &generation), offsets, "after {what}");
    };
    for (how, arguments) in [
        ("warm", &["--verify-memory"][..]),
        ("warm", &["--verify-memory", "--qemu", new]),
        ("warm", &["--verify-memory"]),
        ("warm", &[]),
        ("saved", &[]),
        ("warm", &["--verify-memory", "--qemu", old]),
        ("saved", &[]),
        ("saved", &["--qemu", new]),
    ] {
        let report = guest.reboot(how, arguments).ok().json();
        if arguments.contains(&"--verify-memory") {
            assert_eq!(report["vms"][0]["memory_changed_bytes"], 0, "{report:#}");
        }
        same(how);
        assert_eq!(guest.boot_id(), boot, "after {how}");
        guest.verify();
        guest.assert_sound();
    }
    let boots = || fs::read_to_string(guest.file("console.log")).unwrap().matches("rekindle-micro ready").count();
    assert_eq!(boots(), 1);
    guest.send("reboot");
    wait_for("the guest to reboot", DEADLINE, || (boots() == 2).then_some(()));
    assert_ne!(guest.boot_id(), boot);
    same("a reboot of the guest");
    guest.reboot("cold", &[]).ok();
    guest.wait_ready();
    same("cold");
    // Recover immediately: QEMU may not have released its resources yet.
    guest.only_qemu().process.kill().unwrap();
    wait_for("QEMU to end", DEADLINE, || (guest.status() == "ended").then_some(()));
    guest.rekindle(&["recover"]).ok().prints(&["booted"]);
    guest.wait_ready();
    same("recover");
    // A VM that was stopped gets a new ID.
    guest.rekindle(&["stop", "--now"]).ok();
    let again = lab.rekindle(["--json", "run", lab.path("same.toml").to_str().unwrap()]).ok().json();
    assert!(again["hardware"]["vm_generation"].as_str().is_some_and(|it| it != generation), "{again:#}");
}

#[test]
fn a_vm_without_a_generation_id_gets_none_also_with_a_record_of_an_older_version() {
    let lab = Lab::without_root();
    let guest = lab.vm("none").net(Net::None).section("[devices]\nvmgenid = false").start(&[]);
    let none = || {
        assert_eq!(guest.only_qemu().generation(), None);
        let shown = guest.rekindle(&["--json", "show"]).ok().json();
        assert_eq!(shown["hardware"]["vm_generation"], Value::Null);
        assert_eq!(shown["definition"]["devices"]["vmgenid"], false);
    };
    none();
    let path = guest.file("state.json");
    let mut state: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (part, key) in [("/hardware", "vm_generation"), ("/definition/devices", "vmgenid")] {
        let removed = state.pointer_mut(part).unwrap().as_object_mut().unwrap().remove(key);
        assert!(removed.is_some(), "{part} has no {key}");
    }
    fs::write(&path, state.to_string()).unwrap();
    none();
    for how in ["warm", "saved"] {
        guest.reboot(how, &[]).ok();
        none();
        guest.assert_sound();
    }
}

#[test]
fn a_restored_guest_gets_another_generation_id() {
    let lab = Lab::new();
    let guest = lab.vm("back").boot(&[]);
    let generation = guest.only_qemu().generation().unwrap();
    let (boot, offsets) = (guest.boot_id(), in_ram(&guest, &generation));
    let store = lab.path("store");
    let store = ["--store", store.to_str().unwrap()];
    lab.rekindle([&["protect", "back", "--create-store", "--every", "100ms", "--count", "1"][..], &store].concat())
        .ok();
    guest.rekindle(&["stop", "--now"]).ok();
    lab.rekindle([&["restore", "back", "--eager"][..], &store].concat()).ok();
    assert_eq!(guest.boot_id(), boot);
    let other = guest.only_qemu().generation().unwrap();
    assert_ne!(other, generation);
    assert_eq!((in_ram(&guest, &other), in_ram(&guest, &generation)), (offsets, vec![]));
    // The new ID survives a reboot.
    let report = guest.warm(&["--verify-memory"]);
    assert_eq!(report["memory_changed_bytes"], 0, "{report:#}");
    assert_eq!(guest.only_qemu().generation(), Some(other));
    guest.assert_sound();
}
