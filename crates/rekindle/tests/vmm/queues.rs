//! Network cards with several queues: each QEMU of the VM has all queues of the tap, and no connection is lost.

use crate::common::protector::{Protector, crash, restore, store, wait_filled};
use crate::common::{Guest, Lab, assert_ticks_once};
use rekindle_testing::process::attached_queues;
use rekindle_testing::traffic::{ECHO_PORT, Stream};

/// Boots a guest with two processors and three queues, of which it uses two.
fn boot<'a>(lab: &'a Lab, name: &str) -> Guest<'a> {
    let guest = lab.vm(name).queues().boot(&[]);
    assert_queues(&guest);
    guest
}

#[track_caller]
fn assert_queues(guest: &Guest<'_>) {
    assert_eq!(attached_queues(guest.single_qemu().process), [true, true, false]);
}

/// Begins traffic over several connections: the kernel distributes them over the queues.
fn traffic(guest: &Guest<'_>) -> Vec<Stream> {
    (0..4).map(|_| Stream::begin(guest.connect(ECHO_PORT).unwrap())).collect()
}

#[test]
fn connections_over_several_queues_outlive_each_way_of_replacement() {
    let lab = Lab::new();
    let guest = boot(&lab, "queues");
    guest.touch("16M");
    let boot_id = guest.boot_id();
    for (how, arguments) in [("warm", &[][..]), ("warm", &["--verify-memory"]), ("saved", &[]), ("warm", &[])] {
        let streams = traffic(&guest);
        guest.reboot(how, arguments).ok();
        streams.into_iter().for_each(Stream::assert_complete);
        assert_queues(&guest);
        assert_eq!(guest.boot_id(), boot_id, "after {how}");
        guest.verify();
        guest.assert_sound();
    }
    assert_ticks_once(&guest.file("console.log"));
    guest.reboot("cold", &[]).ok();
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot_id);
    assert_queues(&guest);
    guest.rekindle(&["stop"]).ok();
    lab.assert_empty();
}

#[test]
fn a_guest_that_returns_to_its_qemu_has_all_its_queues() {
    let lab = Lab::new();
    let guest = boot(&lab, "returned");
    let (boot_id, source) = (guest.boot_id(), guest.only_qemu().process);
    let warm = |fault: &str| {
        let mut command = lab.command(["replace-qemu", "returned", "--how", "warm"]);
        command.env("REKINDLE_FAULT", fault);
        lab.finish(command)
    };
    for fault in ["warm.suspend.taps:kill-new", "warm.suspend.saved:kill-new"] {
        let streams = traffic(&guest);
        warm(fault).status(1);
        streams.into_iter().for_each(Stream::assert_complete);
        assert_eq!(guest.only_qemu().process, source, "{fault}");
        assert_queues(&guest);
    }
    for fault in ["warm.suspend.taps:kill", "warm.suspend.saved:kill"] {
        warm(fault).killed();
        guest.rekindle(&["recover"]).ok();
        assert_eq!(guest.only_qemu().process, source, "{fault}");
        assert_queues(&guest);
        assert_eq!(guest.boot_id(), boot_id, "{fault}");
    }
    guest.assert_sound();
}

#[test]
fn a_restored_guest_has_its_queues_also_in_a_qemu_that_has_waited() {
    let lab = Lab::new();
    let guest = boot(&lab, "restored");
    let store = store(&lab, "restored");
    let hold = ["protect", "--store", store.to_str().unwrap(), "--output-commit", "--count", "1"];
    guest.rekindle(&hold).status(1).prints(&["output of network net0 cannot be held", "protect it without"]);
    guest.touch("16M");
    let boot_id = guest.boot_id();
    for prepare in [false, true] {
        let mut protector = Protector::start(&guest, &lab, &store, &["--every", "200ms"]);
        protector.wait("checkpoint");
        protector.end();
        crash(&guest);
        if prepare {
            guest.rekindle(&["restore", "--store", store.to_str().unwrap(), "--prepare"]).ok();
        }
        restore(&guest, &store, &[]);
        wait_filled(&guest);
        assert_queues(&guest);
        assert_eq!(guest.boot_id(), boot_id, "prepared: {prepare}");
        guest.verify();
        guest.assert_sound();
    }
    crash(&guest);
    for (net_key, problem) in
        [("queues = 2", "nets (id, MAC address, queues)"), ("queues = 3\nvhost = true", "take `vhost` out")]
    {
        let definition = lab.vm("restored").key("vcpus = 2").net_key(net_key).write();
        let words = ["restore", "--store", store.to_str().unwrap(), "--definition", definition.to_str().unwrap()];
        guest.rekindle(&words).status(1).prints(&[problem]);
    }
    let hold = ["restore", "--store", store.to_str().unwrap(), "--output-commit"];
    guest.rekindle(&hold).status(1).prints(&["output of network net0 cannot be held", "restore it without"]);
}

#[test]
fn a_tap_with_several_queues_belongs_to_one_vm() {
    let lab = Lab::new();
    let guest = boot(&lab, "first");
    let second = lab.vm("second").net_key("queues = 2\nifname = \"first-net0\"").write();
    lab.rekindle(["run", second.to_str().unwrap()]).status(1).prints(&["cannot open tap first-net0"]);
    assert_queues(&guest);
    guest.assert_sound();
}

#[test]
fn a_vm_with_vhost_is_rejected_where_there_is_none() {
    let lab = Lab::new();
    let definition = lab.vm("served").net_key("vhost = true").write();
    if std::path::Path::new("/dev/vhost-net").exists() {
        lab.rekindle(["run", definition.to_str().unwrap()]).ok();
        let pid = lab.rekindle(["show", "served", "--json"]).ok().json()["vmm"]["pid"].as_u64().unwrap();
        let arguments = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        assert!(arguments.contains(",vhost=on,vhostfd="), "{arguments}");
        lab.rekindle(["stop", "--now", "served"]).ok();
    } else {
        let words = ["network net0: `vhost = true`", "cannot open /dev/vhost-net", "modprobe vhost_net"];
        lab.rekindle(["run", definition.to_str().unwrap()]).status(1).prints(&words);
    }
    lab.assert_empty();
}
