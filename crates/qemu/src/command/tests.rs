//! The command line of a machine, as QEMU gets it.

use super::*;
use uuid::Uuid;

/// [`hardware`]'s generation, as text and as a number.
const VM_GENERATION: &str = "324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87";
const VM_GENERATION_BITS: u128 = 0x324e_6eaf_d1d1_4bf6_bf41_b9bb_6c91_fb87;

/// Describes a VM with one device of each kind. Its name and paths have commas, which QEMU's options must escape.
fn hardware() -> Hardware {
    Hardware {
        name: "a,b".into(),
        uuid: Some(Uuid::from_u128(7)),
        machine: "pc-q35-7.2".into(),
        cpu: "qemu64".into(),
        accel: "tcg".into(),
        vcpus: 2,
        ram: Ram { path: "/ram/a,b".into(), bytes: 512 << 20, prealloc: true },
        boot: None,
        disks: vec![Disk {
            id: "disk0".into(),
            path: "/d,1.raw".into(),
            format: "raw".into(),
            readonly: false,
            cache: "none".into(),
            serial: Some("S".into()),
            server: false,
            redo: None,
            attic_keep_ms: None,
            bps: None,
            iops: None,
        }],
        nets: vec![
            Net {
                id: "net0".into(),
                mac: "52:54:00:00:00:01".into(),
                backend: NetBackend::User(vec!["tcp:127.0.0.1:2222-:22".into()]),
            },
            Net {
                id: "net1".into(),
                mac: "52:54:00:00:00:02".into(),
                backend: NetBackend::Tap(Tap { ifname: "t".into(), netns: None, queues: 1, vhost: false }),
            },
        ],
        vga: true,
        agent: true,
        agent_ports: Some(AGENT_PORTS),
        rng: true,
        vm_generation: Some(Uuid::from_u128(VM_GENERATION_BITS)),
        phase: true,
        panic: false,
        extra: vec!["-device".into(), "virtio-balloon-pci,id=b".into()],
        foreign: None,
    }
}

/// Returns the command line of [`hardware`] for an old QEMU.
fn text(start: Start) -> String {
    text_for(&hardware(), start, Syntax::default())
}

/// Returns `hardware` as it is read from a record of an older Rekindle, which has no field `field`.
fn read_without(field: &str, hardware: &Hardware) -> Hardware {
    let mut record = serde_json::to_value(hardware).unwrap();
    record.as_object_mut().unwrap().remove(field).unwrap();
    serde_json::from_value(record).unwrap()
}

fn text_for(hardware: &Hardware, start: Start, syntax: Syntax) -> String {
    hardware.arguments(&Directory("/run/x".into()), Path::new("/run/x/console.log"), start, syntax).join(" ")
}

#[test]
fn each_qemu_is_given_the_options_that_it_knows() {
    let hardware = hardware_with_served_disk();
    let old = text_for(&hardware, Start::Boot, Syntax::default());
    assert!(old.contains("disk-disk0.sock,reconnect=1 "), "{old}");
    assert!(old.contains("-mon chardev=save,mode=control"), "{old}");
    assert!(old.contains("guest=a,,b,debug-threads=on "), "{old}");
    let newest =
        Syntax { reconnect_ms: true, monitor_objects: true, thread_names: false, websocket_paths: true, sandbox: true };
    let new = text_for(&hardware, Start::Boot, newest);
    assert!(new.contains("disk-disk0.sock,reconnect-ms=100 "), "{new}");
    assert!(new.contains("-object monitor-qmp,id=save-monitor,chardev=save"), "{new}");
    assert!(new.contains("-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny "), "{new}");
    assert!(!old.contains("-sandbox"), "a QEMU without seccomp does not know the option: {old}");
    for gone in ["reconnect=", "-mon ", "debug-threads"] {
        assert!(!new.contains(gone), "{gone}: {new}");
    }
    let (old_monitors, new_monitors) = (old.matches("-mon "), new.matches("monitor-qmp,id="));
    assert_eq!(old_monitors.count(), new_monitors.count(), "both have the same monitors");
}

#[test]
fn a_definition_can_replace_the_sandbox() {
    let syntax = Syntax { sandbox: true, ..Syntax::default() };
    let hardware = Hardware { extra: vec!["-sandbox".into(), "off".into()], ..hardware() };
    let text = text_for(&hardware, Start::Boot, syntax);
    assert!(text.contains("-sandbox off") && !text.contains("-sandbox on"), "{text}");
}

#[test]
fn commas_are_escaped_in_options_but_not_in_json() {
    let text = text(Start::Boot);
    assert!(text.contains("guest=a,,b"), "{text}");
    assert!(text.contains("mem-path=/ram/a,,b,share=on,prealloc=on"), "{text}");
    assert!(text.contains(r#""filename":"/d,1.raw""#), "{text}");
}

/// The slots are part of what the guest sees: another slot would break the hand-over to a QEMU of another Rekindle.
#[test]
fn devices_are_in_fixed_pci_slots() {
    const FIRST_DISK: &str = r#""addr":"0x4""#;
    const SECOND_NET: &str = r#""addr":"0x11""#;
    let text = text(Start::Boot);
    assert!(text.contains(FIRST_DISK) && text.contains(SECOND_NET), "{text}");
}

#[test]
fn a_tap_has_the_descriptor_number_of_its_card() {
    const OF_SECOND_NET: &str = "fd=41,vhost=off";
    let text = text(Start::Boot);
    assert!(text.contains(OF_SECOND_NET), "{text}");
}

/// A running QEMU of an earlier version has its first queue at the same number.
#[test]
fn queues_and_vhost_devices_have_numbers_of_their_own() {
    let mut hardware = hardware();
    let tap = |queues, vhost| NetBackend::Tap(Tap { ifname: "t".into(), netns: None, queues, vhost });
    hardware.nets[0].backend = tap(2, true);
    hardware.nets[1].backend = tap(3, false);
    let text = text_for(&hardware, Start::Incoming, Syntax::default());
    assert!(text.contains("tap,id=net0,fds=40:100,vhost=on,vhostfds=380:381 "), "{text}");
    assert!(text.contains("tap,id=net1,fds=41:107:108,vhost=off "), "{text}");
    assert!(
        text.contains(r#""mq":true"#) && text.contains(r#""vectors":6"#) && text.contains(r#""vectors":8"#),
        "{text}"
    );
    hardware.nets[1].backend = tap(1, true);
    let text = text_for(&hardware, Start::Incoming, Syntax::default());
    assert!(text.contains("tap,id=net1,fd=41,vhost=on,vhostfd=388 ") && !text.contains(r#""vectors":4"#), "{text}");
    let net = &hardware.nets[0];
    hardware.nets = vec![Net { backend: tap(MAX_QUEUES, true), ..net.clone() }; own_machine::MAX_NETS];
    let slots = hardware.tap_slots();
    let queues = slots.iter().flat_map(|slot| [slot.destination, slot.waiting]);
    let numbers: Vec<_> = queues.chain(hardware.vhost_fds()).collect();
    let distinct: std::collections::BTreeSet<_> = numbers.iter().collect();
    assert_eq!((distinct.len(), numbers.len()), (8 * 8 * 3, 8 * 8 * 3));
}

#[test]
fn the_record_of_a_tap_with_one_queue_is_as_earlier_versions_wrote_it() {
    let record = serde_json::to_string(&hardware()).unwrap();
    assert!(!record.contains("queues") && !record.contains("vhost"), "{record}");
    assert_eq!(serde_json::from_str::<Hardware>(&record).unwrap(), hardware());
}

#[test]
fn a_destination_waits_and_leaves_ports_and_ram_alone() {
    assert!(text(Start::Boot).contains("hostfwd="));
    let text = text(Start::Incoming);
    assert!(text.contains("-incoming defer -S"), "{text}");
    assert!(!text.contains("hostfwd=") && text.contains("prealloc=off"), "{text}");
}

#[test]
fn a_port_has_the_same_number_with_and_without_the_other_port() {
    const AGENT_NUMBER: &str = r#""nr":1"#;
    const PHASE_NUMBER: &str = r#""nr":2"#;
    let both = text(Start::Boot);
    for part in [AGENT_NUMBER, PHASE_NUMBER, "org.qemu.guest_agent.0", PHASE_PORT, "path=/run/x/phase.sock"] {
        assert!(both.contains(part), "{part} in {both}");
    }
    let phase_only = text_for(&Hardware { agent: false, ..hardware() }, Start::Boot, Syntax::default());
    assert!(phase_only.contains("virtio-serial-pci") && phase_only.contains(PHASE_NUMBER), "{phase_only}");
    assert!(!phase_only.contains("agent"), "{phase_only}");
}

#[test]
fn every_device_is_named_for_the_preflight() {
    let types = hardware().device_types();
    for expected in
        ["VGA", "virtio-rng-pci", "vmgenid", "virtserialport", "virtio-blk-pci", "virtio-net-pci", "virtio-balloon-pci"]
    {
        assert!(types.iter().any(|device_type| device_type == expected), "{expected} in {types:?}");
    }
}

#[test]
fn hardware_that_was_recorded_without_a_generation_has_none() {
    let hardware = hardware();
    let text = text(Start::Incoming);
    assert!(text.contains(&format!(r#""guid":"{VM_GENERATION}""#)), "{text}");
    let record = serde_json::to_value(&hardware).unwrap();
    assert_eq!(serde_json::from_value::<Hardware>(record).unwrap(), hardware);
    let read = read_without("vm_generation", &hardware);
    assert_eq!(read, Hardware { vm_generation: None, ..hardware });
    assert!(!read.device_types().contains(&"vmgenid".to_owned()));
}

#[test]
fn the_bus_of_the_agent_keeps_the_number_of_ports_that_its_guest_knows() {
    let old_hardware = Hardware { agent_ports: None, ..hardware() };
    // The number is literal here: AGENT_PORTS must not change, because running guests know it.
    assert!(text(Start::Boot).contains(r#""max_ports":4"#));
    assert!(!text_for(&old_hardware, Start::Boot, Syntax::default()).contains("max_ports"));
    assert_eq!(read_without("agent_ports", &hardware()), old_hardware);
}

/// Returns [`hardware`] with a disk that a disk server serves.
fn hardware_with_served_disk() -> Hardware {
    let mut hardware = hardware();
    hardware.disks[0].server = true;
    hardware
}

#[test]
fn a_served_disk_is_reached_at_one_socket_by_every_qemu_of_the_vm() {
    let served = hardware_with_served_disk();
    for generation in ["vmm-1", "vmm-2"] {
        let directory = Directory(Path::new("/run/a,b").join(generation));
        let arguments = served.arguments(&directory, Path::new("/run/log"), Start::Incoming, Syntax::default());
        let text = arguments.join(" ");
        assert!(text.contains("id=disk0-server,path=/run/a,,b/disk-disk0.sock,reconnect=1"), "{text}");
        assert!(text.contains(r#""num-queues":2"#) && !text.contains("-blockdev"), "{text}");
    }
    assert!(served.device_types().contains(&"vhost-user-blk-pci".to_owned()));
}

/// A reboot or panic is acted on only if the VM has a disk server.
#[test]
fn the_monitor_for_reboots_and_panics_exists_only_with_a_served_disk() {
    for start in [Start::Boot, Start::Incoming] {
        let served = text_for(&hardware_with_served_disk(), start, Syntax::default());
        assert!(served.contains("events.sock"), "{served}");
        assert!(!text(start).contains("events.sock"), "{start:?}");
    }
}

#[test]
fn the_record_of_a_disk_that_qemu_serves_has_no_field_for_servers() {
    // As earlier versions wrote it.
    assert!(!serde_json::to_string(&hardware()).unwrap().contains("server"));
}

#[test]
fn a_served_disk_has_between_1_and_8_queues() {
    assert_eq!(disk_queues(0), 1);
    assert_eq!(disk_queues(64), 8);
}

#[test]
fn too_many_devices_are_refused() {
    let mut hardware = hardware();
    hardware.disks = vec![hardware.disks[0].clone(); own_machine::MAX_DISKS + 1];
    let error = hardware.check_slots().unwrap_err();
    assert_eq!(own_machine::MAX_DISKS, 12);
    assert!(error.contains("13 disks"), "{error}");
}
