//! The commands of `docs/protect-a-libvirt-guest.md`, run as they are written there.

use crate::page::Page;
use crate::{DEADLINE, rekindle, text};
use rekindle_testing::libvirt::{Domain, DomainOptions, Network, PrivateLibvirt};
use rekindle_testing::wait_for;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const DISK: &str = "/var/lib/libvirt/images/db.qcow2";
const CHECKPOINTS: &str = "/var/lib/libvirt/checkpoints";
const BLOCKS: u64 = 64;

fn newest_checkpoint(store: &Path) -> u64 {
    let listed = rekindle(&["--json", "store", "ls", store.to_str().unwrap()]).output().unwrap();
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap_or_default();
    listed["checkpoints"].as_array().and_then(|all| all.last()?["number"].as_u64()).unwrap_or(0)
}

/// Waits for a checkpoint of `domain` that has started after this call.
fn wait_checkpoint(domain: &Domain<'_>, store: &Path) {
    let target = newest_checkpoint(store) + 2;
    let qemu = domain.process();
    wait_for("a checkpoint", DEADLINE, || {
        assert!(qemu.is_alive(), "QEMU has ended: {}", domain.log());
        (newest_checkpoint(store) >= target).then_some(())
    });
}

fn end(mut protector: Child) {
    // As Ctrl-C does.
    let interrupted = Command::new("kill").args(["-INT", &protector.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    assert!(protector.wait().unwrap().success());
}

fn read_disk(domain: &Domain<'_>) -> String {
    domain.ask("drop-caches");
    domain.ask(&format!("read vda 0 {BLOCKS}"))
}

#[test]
fn the_commands_of_the_page_protect_a_domain_and_restore_it_into_libvirt() {
    let libvirt = PrivateLibvirt::start();
    let created = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", DISK, "64M"]).status().unwrap();
    assert!(created.success());
    let devices = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{DISK}'/>
         <target dev='vda' bus='virtio'/></disk>"
    );
    let options = DomainOptions { devices: &devices, network: Network::Tap(""), ..DomainOptions::new("db") };
    let domain = libvirt.boot(&options);
    let boot_id = domain.ask("boot-id");
    let store = Path::new(CHECKPOINTS).join("db");
    fs::create_dir(CHECKPOINTS).unwrap();
    let checkpoints = Some(Path::new(CHECKPOINTS));
    let page = Page { file: "protect-a-libvirt-guest.md", domain: &domain, checkpoints };
    let protect = |heading: &str| {
        let [protect] = page.commands_of(heading).try_into().unwrap();
        page.command(&protect).stdout(Stdio::null()).spawn().unwrap()
    };

    page.run_section("1. Attach");
    let protector = protect("2. Protect");
    domain.ask(&format!("write vda 0 {BLOCKS} 7"));
    let written = read_disk(&domain);
    wait_checkpoint(&domain, &store);
    let seen = page.run_section("3. See");
    assert!(seen.contains("protected") && seen.contains(&domain.name), "{seen}");
    page.run_section("4. Lose");
    assert!(libvirt.try_virsh(&["domstate", &domain.name]).is_err(), "a domain without definition is gone");
    drop(protector.wait_with_output().unwrap());

    let restored = page.run_section("5. Restore");
    assert!(restored.contains("running"), "{restored}");
    assert_eq!(domain.ask("boot-id"), boot_id);
    assert_eq!(read_disk(&domain), written);
    let protector = protect("6. Protect");
    wait_checkpoint(&domain, &store);
    end(protector);
    page.run_section("7. End");
    assert_eq!((domain.state(), domain.ask("boot-id")), ("running".to_owned(), boot_id));
    assert!(libvirt.virsh(&["domblklist", &domain.name]).contains(DISK));
    assert!(!text(&rekindle(&["status"]).output().unwrap()).contains("protected"));
}
