//! A phase that a health check detects without a signal from the guest; and guests that reboot themselves or panic and
//! resume from a phase.

use crate::common::served::{digest, image, read, section};
use crate::common::{DEADLINE, Guest, Lab, wait_for};
use serde_json::Value;

const SAVED_PHASES: &str = "[phase]\nsave = [\"kernel\", \"services\"]\n";

#[track_caller]
fn wait_saved(guest: &Guest<'_>, name: &str) {
    wait_for(&format!("phase {name} to be saved"), DEADLINE, || {
        let shown = guest.rekindle(&["--json", "show"]).ok().json();
        let phases = shown["phases"].as_array().unwrap();
        phases.iter().any(|phase| phase["name"] == name && phase["void"] == Value::Null).then_some(())
    });
}

/// Waits until no phase is being saved, then reboots the guest by phase. Returns the `phase` of the report.
#[track_caller]
fn reboot(guest: &Guest<'_>, arguments: &[&str]) -> Value {
    let report = wait_for("the VM to be free", DEADLINE, || {
        let words = ["--json", "reboot", &guest.name, "--how", "phase"].into_iter();
        let result = guest.lab.rekindle(words.chain(arguments.iter().copied()));
        let is_busy = result.code == Some(1) && result.stderr.contains("saving a phase");
        (!is_busy).then(|| result.ok().json())
    });
    guest.wait_ready();
    report["phase"].clone()
}

/// Sends a command that ends the guest, and waits until another QEMU runs it.
#[track_caller]
fn end_guest(guest: &Guest<'_>, command: &str) {
    let before = guest.only_qemu().process;
    guest.send(command);
    wait_for("another QEMU to run it", DEADLINE, || {
        let qemus = guest.qemus();
        qemus.iter().any(|qemu| qemu.process != before && qemu.run_state().as_deref() == Some("running")).then_some(())
    });
    guest.wait_ready();
    wait_for("that to be recorded", DEADLINE, || (guest.status() == "running").then_some(()));
}

#[test]
fn the_phase_in_which_a_guest_is_healthy_is_saved_without_a_signal_from_it() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let phases = format!("{SAVED_PHASES}healthy = \"services\"\n");
    // The address of the first VM of a lab.
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
    // A guest that resumes from an earlier phase is not healthy yet. The later phase may still be used.
    let phase = reboot(&guest, &["--candidate", "kernel"]);
    assert_eq!(phase["candidate"], "kernel", "{phase}");
    wait_for("the health check", DEADLINE, || (!guest.file("phase.expected").exists()).then_some(()));
    assert_eq!(reboot(&guest, &[])["candidate"], "services");
    // Each kernel has read the first block, so both phases are void, and a boot saves them again.
    guest.ask("write vda 0 1 3");
    let phase = reboot(&guest, &[]);
    assert_eq!(phase["candidate"], Value::Null, "{phase}");
    wait_saved(&guest, "services");
    assert_ne!(guest.boot_id(), boot);
    assert_eq!(read(&guest, 0, 8), digest(&path, 0, 8));
    // A restart of QEMU is not a boot: no phase of a guest that is up is saved.
    guest.warm(&[]);
    assert!(!guest.file("phase.expected").exists());
    assert_eq!(reboot(&guest, &[])["candidate"], "services");
}

#[test]
fn a_guest_that_reboots_itself_or_panics_resumes_from_a_phase() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let keys = "on_reboot = \"phase\"\non_crash = \"phase\"";
    let guest = lab.vm("again").key(keys).section(SAVED_PHASES).section(&section(&path, "")).boot(&[]);
    wait_saved(&guest, "kernel");
    guest.ask("phase services");
    wait_saved(&guest, "services");
    let boot = guest.boot_id();
    guest.touch("16M");
    guest.ask("write vda 1000 8 7");
    end_guest(&guest, "panic");
    assert_eq!((guest.boot_id(), guest.ask("verify")), (boot.clone(), "0".into()), "the guest resumes from the phase");
    assert_eq!(read(&guest, 1000, 8), digest(&path, 1000, 8));
    // A guest that panics again soon is booted: the reason may be in the phase.
    end_guest(&guest, "panic");
    assert_ne!(guest.boot_id(), boot);
    // The guest was booted, but no block that the phase has read was written: the phase may still be used.
    wait_saved(&guest, "services");
    end_guest(&guest, "reboot");
    assert_eq!(guest.boot_id(), boot);
    // The guest is booted if no phase may be used.
    guest.ask("write vda 0 1 3");
    end_guest(&guest, "reboot");
    assert_ne!(guest.boot_id(), boot);
    assert_eq!(read(&guest, 0, 64), digest(&path, 0, 64));
}
