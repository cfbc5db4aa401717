//! Domains whose RAM is moved in place instead of copied.

use crate::{assert_continues, boot, memory_files, qemus_of, rekindle, text, wait_shut_off};
use rekindle_testing::libvirt::{Domain, PrivateLibvirt};
use rekindle_vm::fault::MOVE_POINTS;
use serde_json::Value;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

fn moving(domain: &Domain<'_>) -> Command {
    rekindle(&["--json", "replace-qemu", "--in-place", &domain.name])
}

#[track_caller]
fn assert_libvirt_has(domain: &Domain<'_>, boot_id: &str, what: &str) {
    let found = (qemus_of(&domain.name), domain.state());
    assert_eq!(found, (vec![domain.process()], "running".to_owned()), "{what}");
    assert!(!fs::exists(format!("/run/rekindle/{}/state.json", domain.name)).unwrap(), "{what}");
    assert_continues(domain, boot_id);
}

#[test]
fn a_domain_whose_ram_is_moved_in_place_continues_and_libvirt_manages_it() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "moved");
    domain.ask("online-cpu 1");
    let (boot_id, source) = (domain.ask("boot-id"), domain.process());
    let output = moving(&domain).output().unwrap();
    assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(result["vms"][0]["moved_in_place"]["demanded_pages"].is_u64(), "{result}");
    assert!(!source.is_alive());
    assert_libvirt_has(&domain, &boot_id, "moved");
    assert_eq!(memory_files(&domain).len(), 1);
    libvirt.virsh(&["suspend", &domain.name]);
    libvirt.virsh(&["resume", &domain.name]);
    assert_continues(&domain, &boot_id);

    // The next QEMU maps the memory file: nothing is moved.
    let output = moving(&domain).output().unwrap();
    assert!(output.status.success() && !text(&output).contains("moved_in_place"), "{}", text(&output));
    assert_libvirt_has(&domain, &boot_id, "again");
}

#[test]
fn a_domain_whose_move_is_killed_continues_after_recovery() {
    let libvirt = PrivateLibvirt::start();
    for (number, point) in ["replace.resume.journalled"].iter().chain(MOVE_POINTS).enumerate() {
        let domain = boot(&libvirt, &format!("killed{number}"));
        let (boot_id, source) = (domain.ask("boot-id"), domain.process());
        let killed = moving(&domain).env("REKINDLE_FAULT", format!("{point}:kill")).output().unwrap();
        assert_eq!(killed.status.signal(), Some(9), "{point}: {}", text(&killed));
        let recovered = rekindle(&["recover", &domain.name]).output().unwrap();
        assert!(recovered.status.success(), "{point}: {}", text(&recovered));
        assert!(!source.is_alive(), "{point}");
        assert_libvirt_has(&domain, &boot_id, point);
    }
}

#[test]
fn a_domain_whose_source_dies_during_the_move_is_shut_off() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "lost");
    let failed = moving(&domain).env("REKINDLE_FAULT", "replace.move.dropped:kill-old").output().unwrap();
    assert_eq!(failed.status.code(), Some(3), "{}", text(&failed));
    assert!(text(&failed).contains("memory is lost"), "{}", text(&failed));
    let recovered = rekindle(&["recover", &domain.name]).output().unwrap();
    assert!(text(&recovered).contains("libvirt shows the domain as shut off"), "{}", text(&recovered));
    wait_shut_off(&libvirt, &domain);
    assert!(qemus_of(&domain.name).is_empty());
}
