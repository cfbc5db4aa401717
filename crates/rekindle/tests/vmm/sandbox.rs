//! QEMU's system call filter: what a QEMU cannot do after an attacker has taken control of it.

use crate::common::{DEADLINE, Guest, Lab, Net, wait_for};
use rekindle_qemu::qmp::Qmp;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// Makes the guest's QEMU start a program, which creates `evidence`. Returns after QEMU has tried it.
fn start_a_program(guest: &Guest<'_>, evidence: &Path) {
    let qemu = guest.single_qemu().process;
    let mut qmp = Qmp::connect(&guest.file("vmm-1/watch.sock"), Duration::from_secs(5)).unwrap();
    let target = format!("exec:cat > {}", evidence.display());
    let answer = qmp.execute::<Value>("migrate", json!({"uri": target}));
    // QEMU was killed, has rejected the target, or the program has run.
    wait_for("QEMU's attempt", DEADLINE, || (answer.is_err() || !qemu.is_alive() || evidence.exists()).then_some(()));
}

/// A QEMU with a user of its own could not create the evidence, also without the filter.
fn as_root() -> Lab {
    let lab = Lab::without_root();
    lab.configure_host("qemu_own_user = \"off\"");
    lab
}

#[test]
fn a_qemu_cannot_start_a_program() {
    let lab = as_root();
    let guest = lab.vm("caged").net(Net::None).start(&[]);
    assert!(guest.single_qemu().process.has_syscall_filter().unwrap());
    lab.rekindle(["doctor"]).prints(&["each QEMU of Rekindle's VMs has a system call filter"]);
    let evidence = lab.path("evidence");
    start_a_program(&guest, &evidence);
    assert!(!evidence.exists(), "QEMU has started a program");
    guest.rekindle(&["stop", "--now"]);
}

#[test]
fn a_definition_can_turn_the_sandbox_off_and_doctor_names_the_vm() {
    let lab = as_root();
    let guest = lab.vm("free").net(Net::None).key("qemu_args = [\"-sandbox\", \"off\"]").start(&[]);
    lab.rekindle(["doctor"]).prints(&["limited sandbox", "free", "remove -sandbox from qemu_args"]);
    let evidence = lab.path("evidence");
    start_a_program(&guest, &evidence);
    assert!(evidence.exists(), "the same attempt succeeds without a sandbox");
    guest.rekindle(&["stop", "--now"]);
}

#[test]
fn a_qemu_does_not_get_the_credentials_of_an_object_store() {
    let lab = Lab::without_root();
    let vm = lab.vm("caged").net(Net::None);
    let definition = vm.write();
    let mut run = lab.command(["run", definition.to_str().unwrap()]);
    run.env("AWS_SECRET_ACCESS_KEY", "secret").env("OTHER", "kept");
    lab.finish(run).ok();
    let guest = vm.guest();
    let environment = std::fs::read(format!("/proc/{}/environ", guest.single_qemu().process.pid)).unwrap();
    let environment = String::from_utf8_lossy(&environment);
    assert!(environment.contains("OTHER=kept") && !environment.contains("AWS_"), "{environment}");
    guest.rekindle(&["stop", "--now"]).ok();
}
