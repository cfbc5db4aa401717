//! A domain whose disks are block devices: `vda` raw and `vdb` qcow2, on loop devices. And one with a disk on a network.

use super::kills::points;
use super::restore::restoring_into_libvirt;
use super::{Attached, DISK_BYTES, IMAGES, OVERLAYS, assert_both_agree, read_both, write_both};
use crate::attach::protect;
use crate::common::protector::{self, Protector, crash, restore, wait_filled};
use crate::common::{DEADLINE, Guest, Lab, wait_for};
use crate::overlays::image_digest;
use rekindle_kernel::block_device;
use rekindle_kernel::process::Process;
use rekindle_testing::libvirt::{Firmware, PrivateLibvirt};
use rekindle_testing::loop_device::LoopDevice;
use rekindle_testing::micro::free_port;
use rustix::fs::{Mode, OFlags, open};
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// More than a qcow2 image needs in addition to the disk.
const DEVICE_BYTES: u64 = DISK_BYTES + (16 << 20);

/// A domain with block devices, attached as VM `dom`.
pub(super) struct OnDevices<'a> {
    attached: Attached<'a>,
    pub(super) devices: [LoopDevice; 2],
    overlays: PathBuf,
}

impl<'a> Deref for OnDevices<'a> {
    type Target = Attached<'a>;

    fn deref(&self) -> &Attached<'a> {
        &self.attached
    }
}

fn device(target: &str) -> LoopDevice {
    let (path, file) = (format!("/dev/test-{target}"), format!("{IMAGES}/{target}.device"));
    LoopDevice::create(Path::new(&path), Path::new(&file), DEVICE_BYTES)
}

impl<'a> OnDevices<'a> {
    pub(super) fn boot(libvirt: &'a PrivateLibvirt, lab: &'a Lab) -> Self {
        let devices = [device("vda"), device("vdb")];
        let mut disks = String::new();
        for (format, device) in ["raw", "qcow2"].into_iter().zip(&devices) {
            let (path, name) = (device.path.to_str().unwrap(), device.path.file_name().unwrap().to_str().unwrap());
            if format == "qcow2" {
                let size = DISK_BYTES.to_string();
                let create = Command::new("qemu-img").args(["create", "-q", "-f", format, path, &size]).status();
                assert!(create.unwrap().success());
            }
            disks += &format!(
                "<disk type='block' device='disk'><driver name='qemu' type='{format}'/><source dev='{path}'/>
                 <target dev='{}' bus='virtio'/></disk>",
                name.trim_start_matches("test-")
            );
        }
        let attached = Attached::boot_on(&disks, Firmware::Bios, libvirt, lab);
        let overlays = Path::new(IMAGES).join("overlays");
        fs::create_dir(&overlays).unwrap();
        Self { attached, devices, overlays }
    }

    /// Returns the arguments of `rekindle protect`.
    pub(super) fn arguments<'w>(&'w self, further: &[&'w str]) -> Vec<&'w str> {
        [&OVERLAYS[..], &["--overlay-dir", self.overlays.to_str().unwrap()], further].concat()
    }

    fn protect(&self, store: &Path, count: &str) -> usize {
        protect(self.lab, "dom", store, &self.arguments(&["--count", count])).len()
    }

    fn are_read_only(&self) -> [bool; 2] {
        self.devices.each_ref().map(|device| block_device::is_read_only(&device.path).unwrap())
    }

    /// Asserts that both disks are on overlays, and that no program can write to the devices.
    #[track_caller]
    fn assert_fenced(&self) {
        for target in ["vda", "vdb"] {
            let [now, next] = self.files(target);
            assert_eq!(now, next);
            assert!(now.starts_with(self.overlays.to_str().unwrap()), "{now}");
        }
        assert_eq!(self.are_read_only(), [true, true]);
    }

    /// Asserts that both disks are on their devices, which are writable, and that no overlay is left.
    #[track_caller]
    fn assert_on_devices(&self, context: &str) {
        for (target, device) in ["vda", "vdb"].into_iter().zip(&self.devices) {
            let path = device.path.to_str().unwrap();
            assert_eq!(self.files(target), [path, path], "{context}");
        }
        assert_eq!(self.are_read_only(), [false, false], "{context}");
        assert_eq!(fs::read_dir(&self.overlays).unwrap().count(), 0, "{context}");
    }

    #[track_caller]
    pub(super) fn detach(&self, context: &str) {
        self.guest.rekindle(&["detach"]).ok();
        self.assert_on_devices(context);
    }

    fn restore_into_libvirt(&self, store: &Path) {
        self.lab.finish(restoring_into_libvirt(self.lab, store)).ok();
    }
}

fn set_read_only(device: &LoopDevice) {
    let set = Command::new("blockdev").arg("--setro").arg(&device.path).status();
    assert!(set.unwrap().success());
}

#[test]
fn a_domain_on_block_devices_is_protected_restored_and_detached() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = OnDevices::boot(&libvirt, &lab);
    let (guest, store) = (&domain.guest, protector::store(&lab, "store"));
    let boot = guest.boot_id();
    write_both(guest, 1);
    let first = read_both(guest);
    let without_directory = ["protect", "dom", "--store", store.to_str().unwrap(), "--create-store", "--count", "1"];
    lab.rekindle([&without_directory[..], &OVERLAYS].concat()).status(1).prints(&["block device", "--overlay-dir DIR"]);
    // A program of this host uses one, as a mount does.
    let used = open(&domain.devices[0].path, OFlags::RDONLY | OFlags::EXCL, Mode::empty()).unwrap();
    let arguments = domain.arguments(&["--count", "1"]);
    let protecting = ["protect", "dom", "--store", store.to_str().unwrap(), "--create-store"];
    lab.rekindle([&protecting[..], &arguments].concat()).status(1).prints(&["/dev/test-vda", "is in use by this host"]);
    drop(used);
    assert_eq!(domain.protect(&store, "4"), 4);
    domain.assert_fenced();
    // Neither a user of libvirt nor another domain can write to the devices.
    for target in ["vda", "vdb"] {
        domain.assert_rejected("blockcommit", &[target, "--active", "--pivot", "--wait"], "Permission denied");
    }
    let alone = fs::read_to_string(format!("/run/{}.xml", domain.domain.name)).unwrap();
    let port = domain.domain.address.port().to_string();
    let alone = alone.replace("-overlays</name>", "-alone</name>").replace(&port, &free_port().to_string());
    fs::write("/run/alone.xml", alone).unwrap();
    libvirt.try_virsh(&["create", "/run/alone.xml"]).expect_err("the device is an older disk");
    let name = domain.domain.name.replace("-overlays", "-alone");
    let log = fs::read_to_string(format!("/var/log/libvirt/qemu/{name}.log")).unwrap();
    assert!(log.contains("The device is not writable"), "{log}");

    write_both(guest, 2);
    domain.kill_qemu();
    // A host that has never had the domain.
    domain.virsh("undefine", &[]).unwrap();
    domain.restore_into_libvirt(&store);
    assert_eq!((domain.domain.state().as_str(), guest.boot_id()), ("running", boot.clone()));
    assert_both_agree(guest, &first, "restored into libvirt");
    domain.assert_fenced();
    wait_filled(guest);
    write_both(guest, 3);
    let newest = read_both(guest);
    assert_eq!(domain.protect(&store, "4"), 4);
    domain.assert_fenced();
    write_both(guest, 4);
    domain.kill_qemu();
    domain.restore_into_libvirt(&store);
    assert_both_agree(guest, &newest, "restored again, over a definition");
    domain.detach("at the end");
    assert_both_agree(guest, &newest, "on its devices");
    assert_eq!(image_digest(&domain.devices[0].path), newest[0]);
    domain.virsh("destroy", &[]).unwrap();
    domain.virsh("start", &[]).unwrap();
    wait_for("the guest", DEADLINE, || guest.is_up().then_some(()));
    assert_eq!(read_both(guest), newest);
}

#[test]
fn only_the_device_of_the_checkpoint_is_restored() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = OnDevices::boot(&libvirt, &lab);
    let (guest, store) = (&domain.guest, protector::store(&lab, "store"));
    write_both(guest, 1);
    let expected = read_both(guest);
    assert_eq!(domain.protect(&store, "2"), 2);
    write_both(guest, 2);
    domain.kill_qemu();
    let rejected = |reasons: &[&str]| {
        let arguments = ["restore", "dom", "--store", store.to_str().unwrap()];
        lab.rekindle(arguments).status(1).prints(reasons);
        lab.finish(restoring_into_libvirt(&lab, &store)).status(1).prints(reasons);
    };
    let [vda, vdb] = &domain.devices;
    // Another device has its name.
    let other = LoopDevice::create(&vda.path, &Path::new(IMAGES).join("other.device"), DEVICE_BYTES);
    set_read_only(&other);
    rejected(&["/dev/test-vda is another block device", "other.device", "vda.device"]);
    fs::remove_file(&vda.path).unwrap();
    fs::write(&vda.path, "").unwrap();
    rejected(&["/dev/test-vda is another block device", "no block device"]);
    vda.link();
    // A program of this host uses it, as a mount does.
    let used = open(&vda.path, OFlags::RDONLY | OFlags::EXCL, Mode::empty()).unwrap();
    rejected(&["/dev/test-vda", "is in use by this host", "lsblk"]);
    drop(used);
    // As after a start of the host.
    block_device::set_read_only(&vdb.path, false).unwrap();
    rejected(&["/dev/test-vdb is writable", "blockdev --setro /dev/test-vdb"]);
    set_read_only(vdb);
    restore(guest, &store, &[]);
    assert_both_agree(guest, &expected, "restored");
    // Its QEMU is Rekindle's, and merges into the devices.
    assert_eq!(domain.are_read_only(), [false, false]);
    wait_filled(guest);
    write_both(guest, 3);
    let newest = read_both(guest);
    assert_eq!(domain.protect(&store, "3"), 3);
    write_both(guest, 4);
    crash(guest);
    restore(guest, &store, &[]);
    assert_both_agree(guest, &newest, "the restored guest's checkpoint");
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn users_of_libvirt_cannot_merge_into_a_device_that_is_writable_for_a_merge() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = OnDevices::boot(&libvirt, &lab);
    let (guest, store) = (&domain.guest, protector::store(&lab, "store"));
    write_both(guest, 1);
    domain.protect(&store, "1");
    write_both(guest, 2);
    let expected = read_both(guest);
    let fault = [("REKINDLE_FAULT", "overlay.merge.started:stop")];
    let protector = Protector::start_with(guest, &lab, &store, &domain.arguments(&["--every", "100ms"]), &fault);
    let process = Process::of(protector.child.id()).unwrap();
    wait_for("the merge", DEADLINE, || process.is_stopped().then_some(()));
    let [vda, _] = domain.are_read_only();
    assert!(!vda, "it is writable, so only the permissions of its node reject what follows");
    let attempt = || domain.virsh("blockcommit", &["vda", "--active", "--pivot", "--wait"]).expect_err("blockcommit");
    wait_for("the end of the merge", DEADLINE, || attempt().contains("Permission denied").then_some(()));
    process.kill().unwrap();
    drop(protector);
    assert_eq!(domain.protect(&store, "2"), 2);
    domain.assert_fenced();
    domain.detach("at the end");
    assert_both_agree(guest, &expected, "on its devices");
}

#[test]
fn a_protector_of_block_devices_killed_at_each_step_is_continued() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = OnDevices::boot(&libvirt, &lab);
    let (guest, store) = (&domain.guest, protector::store(&lab, "store"));
    let arguments = domain.arguments(&["--every", "100ms"]);
    for (seed, point) in points(&["begin", "create", "mark", "merge"]).into_iter().enumerate() {
        eprintln!("{point}");
        if seed > 0 {
            domain.attach();
        }
        if !point.starts_with("overlay.begin.") {
            domain.protect(&store, "1");
        }
        write_both(guest, seed as u64);
        let expected = read_both(guest);
        let fault = format!("{point}:kill");
        Protector::start_with(guest, &lab, &store, &arguments, &[("REKINDLE_FAULT", &fault)]).wait_killed();
        if seed % 2 == 0 {
            assert_eq!(domain.protect(&store, "2"), 2, "{point}");
            domain.assert_fenced();
        }
        domain.detach(point);
        assert_both_agree(guest, &expected, point);
    }
}

/// QEMU can write to the device while it merges. The protector makes it read-only when QEMU has ended.
#[test]
fn a_restore_asks_the_user_only_if_the_protector_was_killed_in_a_merge() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = OnDevices::boot(&libvirt, &lab);
    let (guest, store) = (&domain.guest, protector::store(&lab, "store"));
    let arguments = domain.arguments(&["--every", "100ms"]);
    domain.protect(&store, "1");
    write_both(guest, 1);
    let expected = read_both(guest);
    let start = |fault: &str| {
        Protector::start_with(
            guest,
            &lab,
            &store,
            &arguments,
            &[("REKINDLE_FAULT", &format!("overlay.merge.started:{fault}"))],
        )
    };
    let mut protector = start("stop");
    let process = Process::of(protector.child.id()).unwrap();
    wait_for("the merge", DEADLINE, || process.is_stopped().then_some(()));
    assert!(domain.are_read_only().contains(&false));
    domain.kill_qemu();
    process.resume().unwrap();
    assert!(process.wait_end(DEADLINE).unwrap());
    protector.child.wait().unwrap();
    domain.restore_into_libvirt(&store);
    assert_both_agree(guest, &expected, "only its QEMU has ended");
    wait_filled(guest);

    start("kill").wait_killed();
    domain.kill_qemu();
    lab.finish(restoring_into_libvirt(&lab, &store)).status(1).prints(&["blockdev --setro"]);
    domain.devices.iter().for_each(set_read_only);
    domain.restore_into_libvirt(&store);
    assert_both_agree(guest, &expected, "confirmed by the user");
    domain.detach("at the end");
    assert_both_agree(guest, &expected, "on its devices");
}

/// A server of a network disk.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_disk_that_qemu_reaches_by_a_network_is_rejected_with_the_reason() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let (image, port) = (Path::new(IMAGES).join("exported.image"), free_port().to_string());
    fs::File::create_new(&image).unwrap().set_len(DISK_BYTES).unwrap();
    let server = Command::new("qemu-nbd")
        .args(["--format=raw", "--persistent", "--shared=4", "--bind=127.0.0.1", "--export-name=disk", "--port", &port])
        .arg(&image)
        .stdin(Stdio::null())
        .spawn();
    let _server = Server(server.expect("qemu-nbd of the package qemu-utils"));
    let is_up = || std::net::TcpStream::connect(("127.0.0.1", port.parse().unwrap())).ok();
    wait_for("the server", DEADLINE, is_up);
    let disk = format!(
        "<disk type='network' device='disk'><driver name='qemu' type='raw'/>
         <source protocol='nbd' name='disk'><host name='127.0.0.1' port='{port}'/></source>
         <target dev='vda' bus='virtio'/></disk>"
    );
    let attached = Attached::boot_on(&disk, Firmware::Bios, &libvirt, &lab);
    let guest: &Guest<'_> = &attached.guest;
    let store = protector::store(&lab, "store");
    let url = format!("nbd://127.0.0.1:{port}/disk");
    let protecting = ["protect", "dom", "--store", store.to_str().unwrap(), "--create-store", "--count", "1"];
    let directory = ["--overlay-dir", IMAGES];
    let rejected = lab.rekindle([&protecting[..], &OVERLAYS, &directory].concat()).status(1);
    rejected.prints(&[&url, "Nothing keeps other programs from writing", "block device"]);
    // Nothing was changed.
    let devices = attached.virsh("domblklist", &[]).unwrap();
    assert!(devices.lines().any(|line| line.split_whitespace().eq(["vda", "disk"])), "{devices}");
    guest.ask("write vda 0 16 1");
}
