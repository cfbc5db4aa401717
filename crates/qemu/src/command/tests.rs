//! The command line of a machine, as QEMU gets it.

use super::*;
use uuid::Uuid;
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
                backend: NetBackend::Tap(Tap { ifname: "t".into(), netns: None }),
            },
        ],
        vga: true,
        agent: true,
        agent_ports: Some(AGENT_PORTS),
        rng: true,
        vm_generation: Some(Uuid::from_u128(0x324e_6eaf_d1d1_4bf6_bf41_b9bb_6c91_fb87)),
        phase: true,
        panic: false,
        extra: vec!["-device".into(), "virtio-balloon-pci,id=b".into()],
        foreign: None,
    }
}

fn text(start: Start) -> String {
    text_for(&hardware(), start, Syntax::default())
}

fn text_for(hardware: &Hardware, start: Start, syntax: Syntax) -> String {
    hardware.arguments(&Directory("/run/x".into()), Path::new("/run/x/console.log"), start, syntax).join(" ")
}

#[test]
fn each_qemu_is_given_the_options_that_it_knows() {
    let mut hardware = hardware();
    for disk in &mut hardware.disks {
        disk.server = true;
    }
    let old = text_for(&hardware, Start::Boot, Syntax::default());
    assert!(old.contains("disk-disk0.sock,reconnect=1 "), "{old}");
    assert!(old.contains("-mon chardev=save,mode=control"), "{old}");
    assert!(old.contains("guest=a,,b,debug-threads=on "), "{old}");
    let newest = Syntax { reconnect_ms: true, monitor_objects: true, thread_names: false };
    let new = text_for(&hardware, Start::Boot, newest);
    assert!(new.contains("disk-disk0.sock,reconnect-ms=100 "), "{new}");
    assert!(new.contains("-object monitor-qmp,id=save-monitor,chardev=save"), "{new}");
    for gone in ["reconnect=", "-mon ", "debug-threads"] {
        assert!(!new.contains(gone), "{gone}: {new}");
    }
    assert_eq!(old.matches("-mon ").count(), new.matches("monitor-qmp,id=").count());
}

#[test]
fn commas_are_escaped_and_slots_fixed() {
    let text = text(Start::Boot);
    assert!(text.contains("guest=a,,b"), "{text}");
    assert!(text.contains("mem-path=/ram/a,,b,share=on,prealloc=on"), "{text}");
    assert!(text.contains(r#""filename":"/d,1.raw""#), "{text}");
    assert!(text.contains(r#""addr":"0x4""#) && text.contains(r#""addr":"0x11""#), "{text}");
    assert!(text.contains("fd=41,vhost=off"), "{text}");
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
    let both = text(Start::Boot);
    for part in [r#""nr":1"#, r#""nr":2"#, "org.qemu.guest_agent.0", PHASE_PORT, "path=/run/x/phase.sock"] {
        assert!(both.contains(part), "{part} in {both}");
    }
    let phase_only = text_for(&Hardware { agent: false, ..hardware() }, Start::Boot, Syntax::default());
    assert!(phase_only.contains("virtio-serial-pci") && phase_only.contains(r#""nr":2"#), "{phase_only}");
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
    assert!(text.contains(r#""guid":"324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87""#), "{text}");
    let mut json = serde_json::to_value(&hardware).unwrap();
    assert_eq!(serde_json::from_value::<Hardware>(json.clone()).unwrap(), hardware);
    json.as_object_mut().unwrap().remove("vm_generation").unwrap();
    let read: Hardware = serde_json::from_value(json).unwrap();
    assert_eq!(read, Hardware { vm_generation: None, ..hardware });
    assert!(!read.device_types().contains(&"vmgenid".to_owned()));
}

#[test]
fn the_bus_of_the_agent_keeps_the_number_of_ports_that_its_guest_knows() {
    let old_hardware = Hardware { agent_ports: None, ..hardware() };
    assert!(text(Start::Boot).contains(r#""max_ports":4"#));
    assert!(!text_for(&old_hardware, Start::Boot, Syntax::default()).contains("max_ports"));
    let mut json = serde_json::to_value(hardware()).unwrap();
    json.as_object_mut().unwrap().remove("agent_ports").unwrap();
    assert_eq!(serde_json::from_value::<Hardware>(json).unwrap(), old_hardware);
}

#[test]
fn a_served_disk_is_reached_at_one_socket_by_every_qemu_of_the_vm() {
    let mut served = hardware();
    served.disks[0].server = true;
    let arguments = |generation: &str| {
        let directory = Directory(Path::new("/run/a,b").join(generation));
        served.arguments(&directory, Path::new("/run/log"), Start::Incoming, Syntax::default()).join(" ")
    };
    for generation in ["vmm-1", "vmm-2"] {
        let text = arguments(generation);
        assert!(text.contains("id=disk0-server,path=/run/a,,b/disk-disk0.sock,reconnect=1"), "{text}");
        assert!(text.contains(r#""num-queues":2"#) && !text.contains("-blockdev"), "{text}");
    }
    assert!(arguments("vmm-1").contains("events.sock") && !text(Start::Boot).contains("events.sock"));
    assert!(served.device_types().contains(&"vhost-user-blk-pci".to_owned()));
    // As earlier versions wrote it: the record of a disk that QEMU serves has no field for servers.
    assert!(!serde_json::to_string(&hardware()).unwrap().contains("server"));
    assert_eq!(disk_queues(0), 1);
    assert_eq!(disk_queues(64), 8);
}

#[test]
fn too_many_devices_are_refused() {
    let mut hardware = hardware();
    hardware.disks = vec![hardware.disks[0].clone(); own_machine::MAX_DISKS + 1];
    assert!(hardware.check_slots().unwrap_err().contains("13 disks"));
}
