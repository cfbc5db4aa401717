//! Devices that were plugged in or unplugged while the guest ran.

use crate::taps::{accessible, open_taps, ports, replace_under_traffic};
use crate::{DEVICES, qmp, rekindle, text};
use rekindle_testing::libvirt::{BRIDGE, Domain, DomainOptions, Network, PrivateLibvirt, ip};
use rekindle_testing::tools::{qemu_new, qemu_newest, qemu_old};
use rekindle_testing::{DEADLINE, wait_for};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

const IMAGES: &str = "/var/lib/libvirt/images";

/// Makes a qcow2 image, and returns its path.
fn make_image(name: &str) -> String {
    let path = format!("{IMAGES}/{name}");
    let status = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &path, "16M"]).status();
    assert!(status.unwrap().success());
    path
}

#[track_caller]
fn replace_by(domain: &Domain<'_>, binary: &Path) {
    let arguments = ["replace-qemu", "--qemu", binary.to_str().unwrap(), &domain.name];
    let output = rekindle(&arguments).output().unwrap();
    assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
    wait_for("the guest of a replaced QEMU", DEADLINE, || domain.is_up().then_some(()));
}

/// Returns the ids of the domain's devices.
fn devices(libvirt: &PrivateLibvirt, domain: &Domain<'_>) -> BTreeSet<String> {
    let listed = qmp(libvirt, domain, "qom-list", &json!({"path": "/machine/peripheral"}));
    let is_device = |entry: &&Value| entry["type"].as_str().unwrap().starts_with("child<");
    let devices = listed.as_array().unwrap().iter().filter(is_device);
    devices.map(|device| device["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn plugged_devices_continue_in_each_qemu_and_can_be_unplugged() {
    let libvirt = PrivateLibvirt::start();
    fs::write(format!("{IMAGES}/disk"), vec![0; 2 << 20]).unwrap();
    let [old, newest] = [qemu_old(), qemu_newest()].map(accessible);
    let options = DomainOptions {
        emulator: &old,
        devices: DEVICES,
        memory_backing: "<maxMemory slots='2' unit='MiB'>1024</maxMemory>
            <cpu><numa><cell id='0' cpus='0-1' memory='256' unit='MiB'/></numa></cpu>",
        ..DomainOptions::new("plugged")
    };
    let domain = libvirt.boot(&options);
    let (name, boot_id) = (domain.name.as_str(), domain.ask("boot-id"));
    let change = |command: &str, device: &str, xml: &str| {
        let path = format!("/run/{device}.xml");
        fs::write(&path, xml).unwrap();
        libvirt.virsh(&[command, name, &path, "--live"]);
    };
    libvirt.virsh(&["iothreadadd", name, "3", "--live"]);
    let image = make_image("second");
    let second = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='qcow2' cache='none' iothread='3' discard='unmap'/>
         <source file='{image}'/><target dev='vdb' bus='virtio'/><serial>S2</serial></disk>"
    );
    let scsi = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{}'/>
         <target dev='sda' bus='scsi'/></disk>",
        make_image("third")
    );
    let memory = "<memory model='dimm'><target><size unit='MiB'>128</size><node>0</node></target></memory>";
    let random = "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>";
    change("attach-device", "second", &second);
    change("attach-device", "controller", "<controller type='scsi' index='0' model='virtio-scsi'/>");
    change("attach-device", "scsi", &scsi);
    change("attach-device", "random", random);
    change("attach-device", "memory", memory);
    change("attach-device", "tablet", "<input type='tablet' bus='usb'/>");
    let plugged = devices(&libvirt, &domain);
    assert!(["virtio-disk1", "scsi0", "scsi0-0-0-0", "rng0", "dimm0"].iter().all(|id| plugged.contains(*id)));
    wait_for("the disk in the guest", DEADLINE, || {
        domain.try_ask("read vdb 0 1", DEADLINE).ok()?.starts_with("ok").then_some(())
    });

    let mut content = domain.ask("read vdb 0 64");
    for (round, binary) in [qemu_new(), &newest, &old].into_iter().enumerate() {
        domain.ask(&format!("write vdb 0 64 {round}"));
        let written = domain.ask("read vdb 0 64");
        assert_ne!(written, content);
        content = written;
        replace_by(&domain, binary);
        assert_eq!(domain.ask("boot-id"), boot_id);
        domain.ask("drop-caches");
        assert_eq!(domain.ask("read vdb 0 64"), content, "round {round}");
        assert_eq!(devices(&libvirt, &domain), plugged, "round {round}");
    }
    // libvirt can unplug devices that the new QEMU has had from its start.
    change("detach-device", "second", &second);
    change("detach-device", "random", random);
    let is_unplugged = || {
        let ids = devices(&libvirt, &domain);
        (!ids.contains("virtio-disk1") && !ids.contains("rng0")).then_some(())
    };
    wait_for("the unplugged devices", DEADLINE, is_unplugged);
    libvirt.virsh(&["iothreaddel", name, "3", "--live"]);
    fs::remove_file(&image).unwrap();
    // libvirt gives the next disk the same id.
    let fourth = second.replace(&image, &make_image("fourth")).replace("S2", "S4").replace("iothread='3'", "");
    change("attach-device", "fourth", &fourth);
    let left = devices(&libvirt, &domain);
    assert!(left.contains("virtio-disk1"));
    replace_by(&domain, qemu_new());
    assert_eq!(devices(&libvirt, &domain), left);
    let serial = json!({"path": "/machine/peripheral/virtio-disk1", "property": "serial"});
    assert_eq!(qmp(&libvirt, &domain, "qom-get", &serial), "S4");
    assert_eq!(domain.ask("boot-id"), boot_id);
}

/// Returns libvirt's XML of the place of a card on the bus. The guest uses the card in the first slot.
fn slot(number: u32) -> String {
    format!("<address type='pci' domain='0x0000' bus='0x00' slot='{number:#x}' function='0x0'/>")
}

#[test]
fn a_plugged_card_carries_traffic_in_each_qemu_and_unplugged_ones_leave_no_tap() {
    let libvirt = PrivateLibvirt::start();
    let [old, newest] = [qemu_old(), qemu_newest()].map(accessible);
    let first = slot(0x10);
    let network = Network::Tap(&first);
    let domain =
        libvirt.boot(&DomainOptions { emulator: &old, network, both_processors: true, ..DomainOptions::new("cards") });
    let name = domain.name.as_str();
    let card = |mac: &str, place: &str, driver: &str| {
        let path = format!("/run/card-{mac}.xml");
        let xml = format!(
            "<interface type='bridge'><source bridge='{BRIDGE}'/><mac address='52:54:00:00:02:{mac}'/><model type='virtio'/>
             {driver}{place}</interface>"
        );
        fs::write(&path, xml).unwrap();
        path
    };
    let second = card("02", &slot(0x5), "<driver name='qemu' queues='2'/>");
    libvirt.virsh(&["attach-device", name, &second, "--live"]);
    assert_eq!((ports().len(), open_taps(&domain)), (2, 3));
    let boot_id = domain.ask("boot-id");
    libvirt.virsh(&["reset", name]);
    let is_other = || {
        // The guest has its address on the other card now.
        ip(&format!("neigh flush dev {BRIDGE}"));
        (domain.is_up() && domain.ask("boot-id") != boot_id).then_some(())
    };
    wait_for("the guest's next boot", DEADLINE, is_other);
    let boot_id = domain.ask("boot-id");
    for binary in [qemu_new(), &newest, &old] {
        replace_under_traffic(&domain, binary);
        assert_eq!(domain.ask("boot-id"), boot_id);
    }
    // Unplugged: the card of the domain's start.
    let xml = libvirt.virsh(&["dumpxml", name]);
    let from = xml.find("<interface type='bridge'>").unwrap();
    let (device, _) = xml[from..].split_once("</interface>").unwrap();
    let mac = device.split_once("<mac address='").unwrap().1.split_once('\'').unwrap().0;
    let unplug = |mac: &str| {
        libvirt.virsh(&["detach-interface", name, "bridge", "--mac", mac, "--live"]);
        wait_for("the removal of a tap", DEADLINE, || (ports().len() == 1).then_some(()));
    };
    assert!(mac.starts_with("52:54:00:00:01:"), "{mac}");
    unplug(mac);
    assert_eq!(open_taps(&domain), 2);
    replace_under_traffic(&domain, qemu_new());
    let mac_of_third = json!({"path": "/machine/peripheral/net2", "property": "mac"});
    for (mac, binary) in [("03", &*newest), ("04", qemu_new())] {
        // libvirt gives the next card the name of the one that was unplugged.
        libvirt.virsh(&["attach-device", name, &card(mac, &slot(0x11), ""), "--live"]);
        assert_eq!((ports().len(), open_taps(&domain)), (2, 3));
        replace_under_traffic(&domain, binary);
        let mac = format!("52:54:00:00:02:{mac}");
        assert_eq!(qmp(&libvirt, &domain, "qom-get", &mac_of_third), *mac);
        if mac.ends_with('3') {
            unplug(&mac);
        }
    }
    unplug("52:54:00:00:02:04");
    replace_under_traffic(&domain, qemu_new());
    assert_eq!((open_taps(&domain), domain.ask("boot-id")), (2, boot_id));
}

/// Returns the ids and names of the domain's character devices, without those of Rekindle.
fn ports_of(libvirt: &PrivateLibvirt, domain: &Domain<'_>) -> BTreeSet<String> {
    let listed = qmp(libvirt, domain, "query-chardev", &json!({}));
    let labels = listed.as_array().unwrap().iter().map(|device| device["label"].as_str().unwrap().to_owned());
    labels.filter(|label| !label.starts_with("rekindle-")).collect()
}

#[test]
fn plugged_ports_have_their_clients_in_each_qemu_and_unplugged_ones_are_left_out() {
    let libvirt = PrivateLibvirt::start();
    fs::write(format!("{IMAGES}/disk"), vec![0; 2 << 20]).unwrap();
    let [old, newest] = [qemu_old(), qemu_newest()].map(accessible);
    let domain = libvirt.boot(&DomainOptions { emulator: &old, devices: DEVICES, ..DomainOptions::new("ports") });
    let (name, boot_id) = (domain.name.as_str(), domain.ask("boot-id"));
    let change = |command: &str, xml: &str| {
        fs::write("/run/port.xml", xml).unwrap();
        libvirt.virsh(&[command, name, "/run/port.xml", "--live"]);
    };
    let socket = |path: &str| {
        format!(
            "<channel type='unix'><source mode='bind' path='{path}'/><target type='virtio' name='org.rekindle.test'/></channel>"
        )
    };
    let first = socket("/var/lib/libvirt/qemu/first");
    change("attach-device", "<channel type='pty'><target type='virtio' name='org.rekindle.pty'/></channel>");
    change("attach-device", &first);
    let [listed, plugged] = [ports_of(&libvirt, &domain), devices(&libvirt, &domain)];
    assert!(["charchannel1", "charchannel2"].iter().all(|id| listed.contains(*id)), "{listed:?}");
    for binary in [qemu_new(), &newest, &old] {
        replace_by(&domain, binary);
        assert_eq!(ports_of(&libvirt, &domain), listed);
        assert_eq!(devices(&libvirt, &domain), plugged);
        drop(UnixStream::connect("/var/lib/libvirt/qemu/first").unwrap());
        let xml = libvirt.virsh(&["dumpxml", name]);
        let port = xml.split_once("<channel type='pty'").unwrap().1;
        let path = port.split_once("<source path='").unwrap().1.split_once('\'').unwrap().0;
        assert!(fs::File::options().read(true).write(true).open(path).is_ok(), "{path}");
    }
    // Unplugged: a port of a QEMU's start. libvirt gives the next one its name.
    change("detach-device", &first);
    let is_unplugged = || (!ports_of(&libvirt, &domain).contains("charchannel2")).then_some(());
    wait_for("the unplugged port", DEADLINE, is_unplugged);
    let listed = ports_of(&libvirt, &domain);
    replace_by(&domain, qemu_new());
    assert_eq!(ports_of(&libvirt, &domain), listed);
    change("attach-device", &socket("/var/lib/libvirt/qemu/second"));
    let listed = ports_of(&libvirt, &domain);
    assert!(listed.contains("charchannel2"));
    replace_by(&domain, &newest);
    assert_eq!(ports_of(&libvirt, &domain), listed);
    drop(UnixStream::connect("/var/lib/libvirt/qemu/second").unwrap());
    assert_eq!(domain.ask("boot-id"), boot_id);
}
