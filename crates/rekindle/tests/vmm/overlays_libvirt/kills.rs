//! Deaths of the protector, QEMU and libvirt's daemon at each step of a checkpoint, a merge and a detach.

use super::{Attached, OVERLAYS, assert_both_agree, read_both, write_both};
use crate::attach::protect;
use crate::common::protector::{self, Protector, restore, wait_filled};
use crate::common::{DEADLINE, Lab, wait_for};
use rekindle_testing::libvirt::PrivateLibvirt;
use rekindle_vm::fault::{FENCE_POINTS, OVERLAY_POINTS};
use std::thread;

/// Returns the fault points of these steps.
pub(super) fn points(steps: &[&str]) -> Vec<&'static str> {
    let all = OVERLAY_POINTS.iter().chain(FENCE_POINTS).copied();
    let points: Vec<_> = all.filter(|point| steps.contains(&point.split('.').nth(1).unwrap())).collect();
    assert!(points.len() > steps.len());
    points
}

#[test]
fn a_protector_of_a_domain_killed_at_each_step_is_continued() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    for (seed, point) in points(&["begin", "create", "mark", "seal", "merge"]).into_iter().enumerate() {
        eprintln!("{point}");
        if seed > 0 {
            attached.attach();
        }
        // A first protector, so that the killed one has something to merge.
        if !point.starts_with("overlay.begin.") {
            protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "1"]].concat());
        }
        write_both(guest, seed as u64);
        let expected = read_both(guest);
        let arguments = [&OVERLAYS[..], &["--every", "100ms"]].concat();
        let fault = format!("{point}:kill");
        Protector::start_with(guest, &lab, &store, &arguments, &[("REKINDLE_FAULT", &fault)]).wait_killed();
        if seed % 2 == 0 {
            let protected = protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "2"]].concat());
            assert_eq!(protected.len(), 2, "{point}");
            attached.assert_fenced("vda");
            assert_both_agree(guest, &expected, point);
        }
        attached.detach(point);
        assert_both_agree(guest, &expected, point);
    }
}

#[test]
fn a_detach_of_a_domain_killed_at_each_step_is_repeated() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    for (seed, point) in points(&["end"]).into_iter().enumerate() {
        eprintln!("{point}");
        if seed > 0 {
            attached.attach();
        }
        protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "2"]].concat());
        write_both(guest, seed as u64);
        let expected = read_both(guest);
        let mut detaching = lab.command(["detach", "dom"]);
        detaching.env("REKINDLE_FAULT", format!("{point}:kill"));
        lab.finish(detaching).killed();
        attached.detach(point);
        assert_both_agree(guest, &expected, point);
    }
}

/// Kills QEMU at each point of these steps, and restores the guest. Each has a libvirt of its own.
fn restore_after_each(steps: &[&str]) {
    for point in points(steps) {
        eprintln!("{point}");
        thread::spawn(move || restore_after(point)).join().unwrap_or_else(|_| panic!("{point}"));
    }
}

#[test]
fn a_domain_is_restored_after_qemu_was_killed_at_each_step_of_a_checkpoint() {
    restore_after_each(&["create", "mark", "seal"]);
}

#[test]
fn a_domain_is_restored_after_qemu_was_killed_at_each_step_of_a_merge() {
    restore_after_each(&["merge"]);
}

fn restore_after(point: &'static str) {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    write_both(guest, 1);
    let before = read_both(guest);
    protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "2"]].concat());
    write_both(guest, 2);
    let after = read_both(guest);
    let arguments = [&OVERLAYS[..], &["--every", "100ms"]].concat();
    let (fault, qemu) = (format!("{point}:kill-old"), attached.domain.process());
    Protector::start_with(guest, &lab, &store, &arguments, &[("REKINDLE_FAULT", &fault)]).wait_killed();
    assert!(!qemu.is_alive(), "{point}");
    restore(guest, &store, &[]);
    let restored = read_both(guest);
    assert!([before, after].contains(&restored), "{point}: the memory of another checkpoint");
    assert_both_agree(guest, &restored, point);
    wait_filled(guest);
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn a_protector_continues_after_the_daemon_was_killed_around_a_mark_and_a_merge() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    for (seed, point) in ["overlay.mark.fenced", "overlay.mark.marked", "overlay.merge.unfenced"].iter().enumerate() {
        eprintln!("{point}");
        if seed > 0 {
            attached.attach();
        }
        if point.starts_with("overlay.merge.") {
            protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "1"]].concat());
        }
        write_both(guest, seed as u64);
        let expected = read_both(guest);
        let daemon = libvirt.daemon().unwrap();
        let (fault, arguments) = (format!("{point}:kill-daemon"), [&OVERLAYS[..], &["--every", "100ms"]].concat());
        let mut protector =
            Protector::start_with(guest, &lab, &store, &arguments, &[("REKINDLE_FAULT", fault.as_str())]);
        wait_for("the daemon to be killed", DEADLINE, || (!daemon.is_alive()).then_some(()));
        libvirt.launch_daemon();
        // Each later pass kills a daemon again, so another protector continues.
        let _ = protector.child.kill();
        let _ = protector.child.wait();
        wait_for("a daemon that the protector has not killed", DEADLINE, || {
            if libvirt.daemon().is_none() {
                libvirt.launch_daemon();
            }
            libvirt.try_virsh(&["uri"]).ok()
        });
        let protected = protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "2"]].concat());
        assert_eq!(protected.len(), 2, "{point}");
        attached.assert_fenced("vda");
        attached.detach(point);
        assert_both_agree(guest, &expected, point);
    }
}
