//! Devices that were plugged in or unplugged while the guest ran.

use crate::taps::accessible;
use crate::{DEVICES, qmp, rekindle, text};
use rekindle_testing::libvirt::{Domain, DomainOptions, PrivateLibvirt};
use rekindle_testing::tools::{qemu_new, qemu_newest, qemu_old};
use rekindle_testing::{DEADLINE, wait_for};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
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
    let arguments = ["replace-qemu", "--preview", "--qemu", binary.to_str().unwrap(), &domain.name];
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
