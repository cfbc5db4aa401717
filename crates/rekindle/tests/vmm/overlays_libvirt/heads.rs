//! The copies of an overlay that is on the disk: what each checkpoint has of it, and when another overlay is put.

use super::{Attached, OVERLAYS, assert_both_agree, overlays, read_both, write_both};
use crate::attach::protect;
use crate::common::protector::{self, Protector, crash, restore};
use crate::common::{DEADLINE, Lab, wait_for};
use rekindle_kernel::process::Process;
use rekindle_testing::libvirt::PrivateLibvirt;
use std::fs;
use std::path::Path;

/// Takes this number of checkpoints.
fn protect_times(lab: &Lab, store: &Path, count: u32) {
    protect(lab, "dom", store, &[&OVERLAYS[..], &["--count", &count.to_string()]].concat());
}

/// Starts a protector, and waits until it has stopped itself after libvirt has put the overlays, before the pause.
fn stopped_before_the_pause(attached: &Attached<'_>, store: &Path, arguments: &[&str]) -> (Protector, Process) {
    stopped_at("overlay.mark.marked", attached, store, arguments)
}

/// Starts a protector, and waits until it has stopped itself at this fault point.
fn stopped_at(point: &str, attached: &Attached<'_>, store: &Path, arguments: &[&str]) -> (Protector, Process) {
    let arguments = [&OVERLAYS[..], arguments].concat();
    let fault = [("REKINDLE_FAULT", &*format!("{point}:stop"))];
    let protector = Protector::start_with(&attached.guest, attached.lab, store, &arguments, &fault);
    let process = Process::of(protector.child.id()).unwrap();
    wait_for("the protector to stop", DEADLINE, || process.is_stopped().then_some(()));
    (protector, process)
}

#[test]
fn a_checkpoint_has_what_the_guest_has_written_between_the_overlays_and_the_pause() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    let boot = guest.boot_id();
    write_both(guest, 1);
    protect_times(&lab, &store, 2);
    write_both(guest, 2);
    let (mut protector, process) = stopped_before_the_pause(&attached, &store, &["--count", "1"]);
    guest.ask("write vda 0 8 3");
    guest.ask("write vdb 8 8 3");
    let expected = read_both(guest);
    process.resume().unwrap();
    protector.wait("checkpoint");
    assert!(protector.child.wait().unwrap().success());
    write_both(guest, 4);
    attached.kill_qemu();
    for attempt in [5, 6] {
        restore(guest, &store, &[]);
        assert_eq!(guest.boot_id(), boot, "attempt {attempt}");
        assert_both_agree(guest, &expected, &format!("attempt {attempt}"));
        write_both(guest, attempt);
        crash(guest);
    }
}

#[test]
fn a_disk_that_is_hardly_written_keeps_its_overlay_and_each_checkpoint_has_a_copy() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    write_both(guest, 1);
    protect_times(&lab, &store, 1);
    let first = ["vda", "vdb"].map(|target| attached.files(target));
    guest.ask("write vda 0 8 2");
    protect_times(&lab, &store, 3);
    guest.ask("write vda 4 8 3");
    guest.ask("write vdb 0 8 3");
    let expected = read_both(guest);
    protect_times(&lab, &store, 1);
    guest.ask("write vda 2 8 4");
    // A copy that belongs to no checkpoint.
    let fault = [("REKINDLE_FAULT", "overlay.seal.sealed:kill")];
    Protector::start_with(guest, &lab, &store, &OVERLAYS, &fault).wait_killed();
    assert_eq!(["vda", "vdb"].map(|target| attached.files(target)), first);
    let copies = fs::read_dir(overlays("vda")).unwrap();
    let copies = copies.filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with("head-"));
    assert!((2..=3).contains(&copies.count()));
    attached.kill_qemu();
    for attempt in [5, 6] {
        restore(guest, &store, &[]);
        assert_both_agree(guest, &expected, &format!("attempt {attempt}"));
        write_both(guest, attempt);
        crash(guest);
    }
}

#[test]
fn an_overlay_that_was_small_until_just_before_the_pause_gets_another_one_above_it() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    write_both(guest, 1);
    protect_times(&lab, &store, 1);
    let first = attached.files("vda");
    let (mut protector, process) = stopped_at("overlay.mark.chosen", &attached, &store, &["--count", "1"]);
    write_both(guest, 2);
    let expected = read_both(guest);
    process.resume().unwrap();
    protector.wait("checkpoint");
    assert!(protector.child.wait().unwrap().success());
    assert_ne!(attached.files("vda"), first);
    write_both(guest, 3);
    attached.kill_qemu();
    restore(guest, &store, &[]);
    assert_both_agree(guest, &expected, "restored");
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn an_overlay_that_was_put_in_vain_is_used_for_the_checkpoint_after_it() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    protect_times(&lab, &store, 1);
    write_both(guest, 3);
    // Killed before it merges the overlays of its checkpoint, so that the overlay in vain is the third.
    let fault = [("REKINDLE_FAULT", "overlay.merge.unfenced:kill")];
    Protector::start_with(guest, &lab, &store, &OVERLAYS, &fault).wait_killed();
    write_both(guest, 4);
    let (mut protector, process) = stopped_before_the_pause(&attached, &store, &["--every", "50ms", "--count", "1"]);
    write_both(guest, 1);
    let expected = read_both(guest);
    attached.virsh("suspend", &[]).unwrap();
    process.resume().unwrap();
    for _ in 0..5 {
        let state = protector.wait("waiting")["state"].as_str().unwrap().to_owned();
        assert!(state.contains("stopped by another program"), "{state}");
    }
    attached.virsh("resume", &[]).unwrap();
    // The protector would stop itself again if libvirt put another one.
    protector.wait("checkpoint");
    assert!(protector.child.wait().unwrap().success());
    write_both(guest, 2);
    attached.kill_qemu();
    restore(guest, &store, &[]);
    assert_both_agree(guest, &expected, "restored");
}
