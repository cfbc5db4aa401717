//! A phase that a health check sees instead of the guest's word; and guests that reboot themselves or panic and go on from a phase.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::served::{digest, image, read, section};
use common::{DEADLINE, Guest, Lab, wait_for};
use serde_json::Value;

const KEPT: &str = "[phase]\nsave = [\"kernel\", \"services\"]\n";

#[track_caller]
fn wait_saved(guest: &Guest<'_>, name: &str) {
    wait_for(&format!("phase {name} to be saved"), DEADLINE, || {
        let shown = guest.rekindle(&["--json", "show"]).ok().json();
        let phases = shown["phases"].as_array().unwrap();
        phases.iter().any(|phase| phase["name"] == name && phase["void"] == Value::Null).then_some(())
    });
}

/// Reboot it by phase, once nothing is being saved; the phase that it went on from.
#[track_caller]
fn reboot(guest: &Guest<'_>, arguments: &[&str]) -> Value {
    let told = wait_for("the VM to be free", DEADLINE, || {
        let all = ["--json", "reboot", "os", &guest.name, "--how", "phase"].into_iter();
        let done = guest.lab.rekindle(all.chain(arguments.iter().copied()));
        let is_busy = done.code == Some(1) && done.stderr.contains("saving a phase");
        (!is_busy).then(|| done.ok().json())
    });
    guest.wait_ready();
    told["phase"].clone()
}

/// Have the guest do something that ends it, and wait until another QEMU has it.
#[track_caller]
fn end(guest: &Guest<'_>, command: &str) {
    let before = guest.only_qemu().process;
    guest.send(command);
    wait_for("another QEMU to run it", DEADLINE, || {
        let all = guest.qemus();
        all.iter().any(|qemu| qemu.process != before && qemu.run_state().as_deref() == Some("running")).then_some(())
    });
    guest.wait_ready();
    wait_for("that to be recorded", DEADLINE, || (guest.status() == "running").then_some(()));
}

#[test]
fn the_phase_in_which_a_guest_is_healthy_is_saved_without_its_word() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let phases = format!("{KEPT}healthy = \"services\"\n");
    // The first VM of a lab.
    let probe = "probe = \"http://10.79.1.2/\"";
    let guest = lab.vm("well").key(probe).section(&phases).section(&section(&path, "")).boot(&[]);
    assert_eq!(guest.ip(), "10.79.1.2");
    wait_saved(&guest, "kernel");
    wait_saved(&guest, "services");
    let boot = guest.boot_id();
    for round in 1..=2 {
        guest.touch("16M");
        guest.ask(&format!("write vda 1000 8 {round}"));
        let phase = reboot(&guest, &[]);
        assert_eq!(phase["candidate"], "services", "{phase}");
        assert_eq!((guest.boot_id(), guest.ask("verify")), (boot.clone(), "0".into()));
        assert_eq!(read(&guest, 1000, 8), digest(&path, 1000, 8));
    }
    // A guest that goes on from an earlier phase has yet to become healthy, and what was kept of that may still be used.
    let phase = reboot(&guest, &["--candidate", "kernel"]);
    assert_eq!(phase["candidate"], "kernel", "{phase}");
    wait_for("it to have been asked", DEADLINE, || (!guest.file("phase.expected").exists()).then_some(()));
    assert_eq!(reboot(&guest, &[])["candidate"], "services");
    // Each kernel has read the first block: both are void, and a boot saves them anew.
    guest.ask("write vda 0 1 3");
    let phase = reboot(&guest, &[]);
    assert_eq!(phase["candidate"], Value::Null, "{phase}");
    wait_saved(&guest, "services");
    assert_ne!(guest.boot_id(), boot);
    assert_eq!(read(&guest, 0, 8), digest(&path, 0, 8));
    // A VMM restart is no boot: nothing is saved of a guest that is up.
    guest.warm(&[]);
    assert!(!guest.file("phase.expected").exists());
    assert_eq!(reboot(&guest, &[])["candidate"], "services");
}

#[test]
fn a_guest_that_reboots_itself_or_panics_goes_on_from_a_phase() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let keys = "on_reboot = \"phase\"\non_crash = \"phase\"";
    let guest = lab.vm("again").key(keys).section(KEPT).section(&section(&path, "")).boot(&[]);
    wait_saved(&guest, "kernel");
    guest.ask("phase services");
    wait_saved(&guest, "services");
    let boot = guest.boot_id();
    guest.touch("16M");
    guest.ask("write vda 1000 8 7");
    end(&guest, "panic");
    assert_eq!((guest.boot_id(), guest.ask("verify")), (boot.clone(), "0".into()), "it goes on from the phase");
    assert_eq!(read(&guest, 1000, 8), digest(&path, 1000, 8));
    // Who panics again at once is booted: the reason may be in the phase.
    end(&guest, "panic");
    assert_ne!(guest.boot_id(), boot);
    // That was another boot, but nothing was written that the phase knows: it may still be used.
    wait_saved(&guest, "services");
    end(&guest, "reboot");
    assert_eq!(guest.boot_id(), boot);
    // Where none may be used the guest is booted.
    guest.ask("write vda 0 1 3");
    end(&guest, "reboot");
    assert_ne!(guest.boot_id(), boot);
    assert_eq!(read(&guest, 0, 64), digest(&path, 0, 64));
}
