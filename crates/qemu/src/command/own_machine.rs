//! The command line of a machine that Rekindle has designed: a PC of type q35, whose devices are on PCI bus 0.

use super::argument_list::{ArgumentList, escaped_path};
use super::{Directory, Disk, Hardware, Net, NetBackend, PHASE_PORT, Start, Tap, disk_queues};
use crate::syntax::Syntax;
use serde_json::{Value, json};
use std::path::Path;

/// PCI slots by kind of device; for disks and network cards, the first of several. Slot 0 is the host bridge, 0x1f the
/// south bridge.
const SLOT_VGA: u8 = 0x01;
const SLOT_RNG: u8 = 0x02;
const SLOT_SERIAL: u8 = 0x03;
const FIRST_SLOT_DISK: u8 = 0x04;
const FIRST_SLOT_NET: u8 = 0x10;
const SLOT_PANIC: u8 = 0x18;

pub(super) const MAX_DISKS: usize = (FIRST_SLOT_NET - FIRST_SLOT_DISK) as usize;
pub(super) const MAX_NETS: usize = (SLOT_PANIC - FIRST_SLOT_NET) as usize;

pub(super) fn arguments(
    hardware: &Hardware,
    directory: &Directory,
    console_log: &Path,
    start: Start,
    syntax: Syntax,
) -> Vec<String> {
    let mut list = ArgumentList::default();
    list.process(&hardware.name, syntax);
    if !hardware.extra.iter().any(|argument| argument.trim_start_matches('-') == "sandbox") {
        list.sandbox(syntax);
    }
    add_board(&mut list, hardware, directory, start);
    add_sockets(&mut list, hardware, directory, console_log, syntax);
    if let Some(boot) = &hardware.boot {
        list.option("-kernel", boot.kernel.to_string_lossy());
        if let Some(initrd) = &boot.initrd {
            list.option("-initrd", initrd.to_string_lossy());
        }
        list.option("-append", &boot.append);
    }
    add_small_devices(&mut list, hardware, directory);
    for (slot, disk) in (FIRST_SLOT_DISK..).zip(&hardware.disks) {
        if disk.server {
            add_served_disk(&mut list, slot, disk, directory, hardware.vcpus, syntax);
        } else {
            add_disk(&mut list, slot, disk);
        }
    }
    for (index, net) in hardware.nets.iter().enumerate() {
        add_net(&mut list, index, net, start);
    }
    if hardware.panic {
        list.device(SLOT_PANIC, json!({"driver": "pvpanic-pci", "id": "panic"}));
    }
    list.extend(hardware.extra.iter().cloned());
    list.finish(start)
}

/// Adds the machine type, the processors and the RAM.
fn add_board(list: &mut ArgumentList, hardware: &Hardware, directory: &Directory, start: Start) {
    if let Some(uuid) = hardware.uuid {
        list.option("-uuid", uuid.to_string());
    }
    list.flag("-nodefaults");
    list.flag("-no-user-config");
    list.option("-pidfile", directory.pid().to_string_lossy());
    // `suppress-vmdesc` and `send-configuration=off` make the state without RAM a valid incoming stream.
    list.option("-machine", format!("{},memory-backend=ram,suppress-vmdesc=on", hardware.machine));
    list.option("-global", "migration.send-configuration=off");
    list.accelerator(&hardware.accel);
    list.option("-cpu", &hardware.cpu);
    list.option("-smp", hardware.vcpus.to_string());
    let ram = &hardware.ram;
    list.option("-m", format!("{}K", ram.bytes / 1024));
    let prealloc = if ram.prealloc && start != Start::Incoming { "on" } else { "off" };
    let (bytes, path) = (ram.bytes, escaped_path(&ram.path));
    let backend = format!("memory-backend-file,id=ram,size={bytes},mem-path={path},share=on,prealloc={prealloc}");
    list.option("-object", backend);
}

/// Adds the monitors and the serial console.
fn add_sockets(
    list: &mut ArgumentList,
    hardware: &Hardware,
    directory: &Directory,
    console_log: &Path,
    syntax: Syntax,
) {
    list.monitor("qmp", &directory.qmp(), syntax);
    list.monitor("watch", &directory.watch(), syntax);
    list.monitor("protect", &directory.protect(), syntax);
    list.monitor("save", &directory.save(), syntax);
    if hardware.disks.iter().any(|disk| disk.server) {
        list.monitor("events", &directory.events(), syntax);
    }
    list.logged_socket("console", &directory.console(), console_log);
    list.option("-serial", "chardev:console");
}

/// Adds the devices other than disks and network cards.
fn add_small_devices(list: &mut ArgumentList, hardware: &Hardware, directory: &Directory) {
    if hardware.vga {
        list.device(SLOT_VGA, json!({"driver": "VGA", "id": "vga"}));
    }
    if hardware.rng {
        list.option("-object", "rng-random,id=rng,filename=/dev/urandom");
        list.device(SLOT_RNG, json!({"driver": "virtio-rng-pci", "id": "rng-device", "rng": "rng"}));
    }
    if let Some(guid) = hardware.vm_generation {
        list.option("-device", json!({"driver": "vmgenid", "id": "vm-generation", "guid": guid}).to_string());
    }
    if hardware.agent || hardware.phase {
        let mut bus = json!({"driver": "virtio-serial-pci", "id": "ports"});
        if let Some(ports) = hardware.agent_ports {
            set_property(&mut bus, "max_ports", ports);
        }
        list.device(SLOT_SERIAL, bus);
    }
    if hardware.agent {
        add_port(list, 1, "agent", "org.qemu.guest_agent.0", &directory.agent());
    }
    if hardware.phase {
        add_port(list, 2, "phase", PHASE_PORT, &directory.phase());
    }
}

/// Adds a port of the agent's bus, which the guest knows by its `number` and `name`.
fn add_port(list: &mut ArgumentList, number: u32, id: &str, name: &str, socket: &Path) {
    list.socket(id, socket);
    let port = json!({"driver": "virtserialport", "bus": "ports.0", "nr": number, "chardev": id,
        "id": format!("{id}-port"), "name": name});
    list.option("-device", port.to_string());
}

/// The meaning of a cache mode of QEMU.
struct CacheMode {
    /// Whether QEMU bypasses the host's page cache.
    direct: bool,
    /// Whether QEMU ignores the guest's flushes.
    no_flush: bool,
    /// Whether the guest sees a volatile write cache: `on` or `off`.
    write_cache: &'static str,
}

impl CacheMode {
    fn named(name: &str) -> Self {
        let (direct, no_flush, write_cache) = match name {
            "none" => (true, false, "on"),
            "directsync" => (true, false, "off"),
            "writethrough" => (false, false, "off"),
            "unsafe" => (false, true, "on"),
            _ => (false, false, "on"),
        };
        Self { direct, no_flush, write_cache }
    }
}

/// Adds a disk that QEMU serves itself: block nodes for the file, the format and the rate limits, and the device.
fn add_disk(list: &mut ArgumentList, slot: u8, disk: &Disk) {
    let mode = CacheMode::named(&disk.cache);
    let id = &disk.id;
    let cache = json!({"direct": mode.direct, "no-flush": mode.no_flush});
    // The image file is locked by QEMU's own image locking, which passes from one QEMU to the next.
    let file = json!({"driver": "file", "node-name": format!("{id}-file"), "filename": disk.path, "cache": cache,
        "read-only": disk.readonly, "auto-read-only": false, "discard": "unmap",
        // The previous QEMU was on this host too: the host's cache of the image is valid. Dropping it (for which
        // QEMU also syncs the file) would take longer than all the other steps.
        "drop-cache": false});
    let format = json!({"driver": disk.format, "node-name": format!("{id}-format"), "file": format!("{id}-file"),
        "cache": cache, "read-only": disk.readonly, "discard": "unmap"});
    list.option("-blockdev", file.to_string());
    list.option("-blockdev", format.to_string());
    let mut top_node = format!("{id}-format");
    if disk.bps.is_some() || disk.iops.is_some() {
        let group = format!("{id}-limits");
        // 0 means no limit.
        let limits = json!({"bps-total": disk.bps.unwrap_or(0), "iops-total": disk.iops.unwrap_or(0)});
        list.option("-object", json!({"qom-type": "throttle-group", "id": group, "limits": limits}).to_string());
        let throttle_node = format!("{id}-limited");
        let throttle = json!({"driver": "throttle", "node-name": throttle_node, "throttle-group": group,
            "file": top_node, "cache": cache, "read-only": disk.readonly, "discard": "unmap"});
        list.option("-blockdev", throttle.to_string());
        top_node = throttle_node;
    }
    let mut device = json!({"driver": "virtio-blk-pci", "id": id, "drive": top_node, "write-cache": mode.write_cache});
    if let Some(serial) = &disk.serial {
        set_property(&mut device, "serial", serial.clone());
    }
    list.device(slot, device);
}

/// Adds a disk that one of Rekindle's disk servers serves.
fn add_served_disk(list: &mut ArgumentList, slot: u8, disk: &Disk, directory: &Directory, vcpus: u32, syntax: Syntax) {
    let (id, socket) = (&disk.id, escaped_path(&directory.disk(&disk.id)));
    // QEMU reconnects when a server that was killed is started again.
    list.option("-chardev", format!("socket,id={id}-server,path={socket},{}", syntax.reconnect()));
    let device = json!({"driver": "vhost-user-blk-pci", "id": id, "chardev": format!("{id}-server"),
        "num-queues": disk_queues(vcpus)});
    list.device(slot, device);
}

fn add_net(list: &mut ArgumentList, index: usize, net: &Net, start: Start) {
    let id = &net.id;
    let mut backend = match &net.backend {
        NetBackend::User(_) => format!("user,id={id}"),
        NetBackend::Tap(tap) => tap.netdev(index, id),
    };
    if let NetBackend::User(rules) = &net.backend
        && start != Start::Incoming
    {
        for rule in rules {
            backend += &format!(",hostfwd={rule}");
        }
    }
    list.option("-netdev", backend);
    let mut card = json!({"driver": "virtio-net-pci", "id": format!("{id}-card"), "netdev": id, "mac": net.mac});
    if let NetBackend::Tap(Tap { queues, .. }) = net.backend
        && queues > 1
    {
        set_property(&mut card, "mq", true);
        // One interrupt for each virtqueue, one for the queue of commands and one for changes of the configuration.
        set_property(&mut card, "vectors", 2 * queues + 2);
    }
    list.device(FIRST_SLOT_NET + index as u8, card);
}

fn set_property(device: &mut Value, name: &str, value: impl Into<Value>) {
    if let Some(properties) = device.as_object_mut() {
        properties.insert(name.into(), value.into());
    }
}
