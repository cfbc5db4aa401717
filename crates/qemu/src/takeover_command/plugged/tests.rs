//! Devices and objects that were plugged in or unplugged while the guest ran.

use super::{PluggedDevice, in_order_of_buses};
use crate::block::graph::{BlockNode, CacheMode};
use crate::command::RamBackend;
use crate::options::Options;
use crate::ramblock::RamBlock;
use crate::syntax::Syntax;
use crate::takeover_command::tests::{facts, rewrite_line};
use crate::takeover_command::{Descriptor, Drive, PluggedNetwork, RunningFacts, SourceDescriptor};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;

fn device(id: &str, driver: &str, bus: Option<&str>, properties: &Value) -> PluggedDevice {
    let properties = properties.as_object().unwrap().clone().into_iter().collect();
    let defaults = BTreeMap::from([("write-cache".into(), json!("auto")), ("bootindex".into(), json!(-1))]);
    PluggedDevice { id: id.into(), driver: driver.into(), bus: bus.map(str::to_owned), properties, defaults }
}

/// The facts of a machine into which these devices were plugged.
fn facts_with(plugged: Vec<PluggedDevice>) -> RunningFacts {
    let ids: Vec<&str> = plugged.iter().map(|device| device.id.as_str()).collect();
    RunningFacts { plugged: plugged.clone(), ..facts(&ids) }
}

fn disk(drive: &str) -> PluggedDevice {
    let properties = json!({"drive": drive, "addr": 48, "write-cache": "on", "bootindex": -1, "serial": "", "secs": 63,
        "iothread": "/objects/io1"});
    device("disk", "virtio-blk-pci", Some("/machine/i440fx/pci.0"), &properties)
}

/// Gives the disk an image in a file of this path.
fn add_image(facts: &mut RunningFacts, path: &str) {
    let device = "/machine/peripheral/disk/virtio-backend".to_owned();
    let storages = BTreeMap::from([("top".to_owned(), "top-s".to_owned())]);
    let nodes = vec!["top".to_owned()];
    facts.drives = vec![Drive { device, file: Some(path.into()), nodes, storages, tray_open: false }];
    let cache = CacheMode { direct: true, no_flush: false };
    for (name, driver) in [("top", "qcow2"), ("top-s", if path.starts_with('/') { "file" } else { "nbd" })] {
        let node = BlockNode {
            driver: driver.into(),
            file: path.into(),
            read_only: false,
            size: 0,
            cache,
            detect_zeroes: "off".into(),
        };
        facts.nodes.insert(name.into(), node);
    }
}

/// Returns the values of this option in the rewritten command line, in order.
fn values(line: &str, facts: &RunningFacts, option: &str) -> Vec<Value> {
    let line = rewrite_line(&format!("-display none{line}"), facts, &[], Syntax::default()).unwrap();
    let pairs = line.arguments.windows(2).filter(|pair| pair[0] == option);
    pairs.map(|pair| serde_json::from_str(&pair[1]).unwrap_or_else(|_| json!(pair[1]))).collect()
}

fn refused(facts: &RunningFacts) -> Vec<String> {
    refused_line("", facts)
}

fn refused_line(line: &str, facts: &RunningFacts) -> Vec<String> {
    let obstacles = rewrite_line(&format!("-display none{line}"), facts, &[], Syntax::default()).unwrap_err();
    obstacles.into_iter().map(|obstacle| format!("{}: {}", obstacle.what, obstacle.why)).collect()
}

#[test]
fn a_plugged_disk_has_its_image_and_what_was_chosen() {
    let mut facts = facts_with(vec![disk("top")]);
    add_image(&mut facts, "/d");
    let options = json!({"qom-type": "iothread", "id": "io1"}).as_object().unwrap().clone();
    facts.objects = BTreeMap::from([("io1".to_owned(), Options::Json(options))]);
    let expected = json!({"driver": "virtio-blk-pci", "id": "disk", "bus": "pci.0", "addr": 48, "write-cache": "on",
        "iothread": "/objects/io1", "drive": "top"});
    assert_eq!(values("", &facts, "-device"), std::slice::from_ref(&expected));
    let nodes: Vec<Value> = values("", &facts, "-blockdev").iter().map(|node| node["node-name"].clone()).collect();
    assert_eq!(nodes, ["top-s", "top"]);
    assert!(values("", &facts, "-object").contains(&json!({"qom-type": "iothread", "id": "io1"})));
    // Another disk of that name was unplugged before.
    let line = " -blockdev file,node-name=first-s,filename=/f -blockdev raw,node-name=first,file=first-s \
                -device virtio-blk-pci,id=disk,drive=first,serial=first,addr=4";
    assert_eq!(values(line, &facts, "-device"), [expected]);
    assert_eq!(values(line, &facts, "-blockdev").len(), 2);
    // After one replacement, the command line names all of it.
    facts.plugged.clear();
    let line = " -object iothread,id=io1 -blockdev file,node-name=top-s,filename=/d -blockdev qcow2,node-name=top,file=top-s \
                -device virtio-blk-pci,id=disk,drive=top";
    assert_eq!(values(line, &facts, "-device").len(), 1);
    assert_eq!(values(line, &facts, "-blockdev").len(), 2);
    assert_eq!(values(line, &facts, "-object").len(), 2, "with the guest's RAM");
}

#[test]
fn a_plugged_card_has_its_tap_and_an_unplugged_one_leaves_none() {
    let card = device("card", "virtio-net-pci", Some("/machine/i440fx/pci.0"), &json!({"netdev": "n1"}));
    let mut facts = facts_with(vec![card]);
    let network = |numbers: &[i32]| PluggedNetwork { kind: "tap".into(), descriptors: Some(numbers.to_vec()) };
    facts.plugged_networks.insert("n1".into(), network(&[41, 42]));
    facts.removed_networks.insert("n0".into());
    let tap = |number: i32| (number, SourceDescriptor::Tap { interface: "vnet1".into() });
    // Before, a card of this name was unplugged, whose tap had a number that the new one's has now.
    let line = "-display none -netdev tap,fd=41,id=n1,vhost=on,vhostfd=43 -device virtio-net-pci,netdev=n1,id=card \
                -netdev user,id=n0,hostfwd=tcp::1-:2 -device virtio-net-pci,id=gone,netdev=n0";
    let rewritten = rewrite_line(line, &facts, &[tap(41), tap(42)], Syntax::default()).unwrap();
    let netdevs: Vec<&String> =
        rewritten.arguments.windows(2).filter(|pair| pair[0] == "-netdev").map(|pair| &pair[1]).collect();
    let passed = rewritten.descriptors.iter().filter_map(|(number, descriptor)| match descriptor {
        Descriptor::Tap { source, interface } => Some((*number, *source, interface.as_str())),
        _ => None,
    });
    let passed: Vec<_> = passed.collect();
    let [(first, 41, "vnet1"), (second, 42, "vnet1")] = passed[..] else { panic!("{passed:?}") };
    assert_eq!(netdevs, [&format!("type=tap,id=n1,fds={first}:{second}")]);
    assert!(rewritten.forwards.is_empty());
    // The kernel serves it, if QEMU has a vhost device for each queue.
    let vhost = |number: i32| (number, SourceDescriptor::VhostNet);
    let open = [tap(41), tap(42), vhost(50), vhost(51)];
    let rewritten = rewrite_line("-display none", &facts, &open, Syntax::default()).unwrap();
    assert!(rewritten.arguments.iter().any(|argument| argument.contains("vhost=on") && argument.contains("vhostfds=")));
    let refused = rewrite_line("-display none", &facts, &open[..3], Syntax::default()).unwrap_err();
    assert!(refused[0].why.contains("vhost-net"), "{refused:?}");
}

#[test]
fn what_cannot_be_opened_again_is_named() {
    let mut with_nbd = facts_with(vec![disk("top")]);
    add_image(&mut with_nbd, "nbd://host/export");
    assert!(refused(&with_nbd)[0].starts_with("device disk: it was plugged in while the guest ran, and not all"));
    let card = device("card", "virtio-net-pci", Some("/machine/i440fx/pci.0"), &json!({"netdev": "n1"}));
    assert!(refused(&facts_with(vec![card.clone()]))[0].contains("does not list the network"));
    let mut with_user_network = facts_with(vec![card]);
    let network = PluggedNetwork { kind: "user".into(), descriptors: None };
    with_user_network.plugged_networks.insert("n1".into(), network);
    assert!(refused(&with_user_network)[0].starts_with("network n1 (user): its card was plugged in"));
    let unnamed = RunningFacts { plugged_without_id: vec!["virtio-rng-pci".into()], ..facts(&[]) };
    assert!(refused(&unnamed)[0].starts_with("device virtio-rng-pci without an id"));
    let hardware = device("gpu", "vfio-pci", Some("/machine/i440fx/pci.0"), &json!({}));
    assert!(refused(&facts_with(vec![hardware]))[0].starts_with("device vfio-pci,id=gpu"));
}

#[test]
fn unplugged_devices_and_objects_are_left_out_with_their_images() {
    let line = " -object iothread,id=io1 -object memory-backend-ram,id=dimm,size=1M -device pc-dimm,id=dimm0,memdev=dimm \
                -blockdev file,node-name=top-s,filename=/d -blockdev qcow2,node-name=top,file=top-s \
                -device virtio-blk-pci,id=disk,drive=top,iothread=io1 -device virtio-rng-pci,id=rng0";
    let facts = facts(&["rng0"]);
    assert_eq!(values(line, &facts, "-device"), ["virtio-rng-pci,id=rng0"]);
    assert_eq!(values(line, &facts, "-blockdev"), [] as [Value; 0]);
    assert_eq!(values(line, &facts, "-object").len(), 1, "the guest's RAM");
}

#[test]
fn plugged_memory_is_a_file() {
    let dimm =
        device("dimm0", "pc-dimm", None, &json!({"memdev": "/objects/dimm", "slot": 0, "addr": 4_294_967_296_u64}));
    let mut facts = facts_with(vec![dimm]);
    facts.machine.backends.push(RamBackend { id: "dimm".into(), bytes: MIB });
    let block = RamBlock { id: "dimm".into(), used: MIB, total: MIB, page_size: 4096, offset: 0, address: None };
    facts.ram_blocks.push(block);
    let expected = json!({"driver": "pc-dimm", "id": "dimm0", "memdev": "/objects/dimm", "slot": 0,
        "addr": 4_294_967_296_u64});
    let line = " -m 128,slots=2,maxmem=1G";
    assert_eq!(values(line, &facts, "-device"), [expected]);
    let backends = values(line, &facts, "-object");
    assert!(backends.iter().any(|backend| backend.as_str().is_some_and(|text| text.contains("id=dimm,size=1048576"))));
    assert_eq!(values(line, &facts, "-machine").len(), 2, "the type, and the backend of the main memory alone");
}

#[test]
fn devices_follow_those_that_provide_their_buses() {
    let on = |id: &str, bus: &str| device(id, "x", Some(bus), &json!({}));
    let bridge = "/machine/peripheral/a-bridge/a-bridge";
    let bus_of_disk = "/machine/peripheral/scsi/virtio-backend/scsi.0";
    let devices = vec![on("a-disk", bus_of_disk), on("scsi", bridge), on("a-bridge", "/machine/q35/pcie.0")];
    let ordered: Vec<String> = in_order_of_buses(devices).into_iter().map(|device| device.id).collect();
    assert_eq!(ordered, ["a-bridge", "scsi", "a-disk"]);
}
