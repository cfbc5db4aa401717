//! `rekindle protect --disk overlays`: checkpoints with the disks of a QEMU that Rekindle has not started.
//!
//! The guest's page cache is memory, so a disk that does not match the memory shows in a guest that reads the same
//! blocks with and without its cache.

use super::attach::{ForeignGuest, attach, protect};
use crate::common::protector::{self, Protector, crash, restore, wait_filled};
use crate::common::{Guest, Lab, qemu_new, qemu_newest, qemu_old};
use rekindle_qemu::block::graph::BlockGraph;
use rekindle_testing::loop_device::LoopDevice;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

const DISK_BYTES: u64 = 64 << 20;
/// Blocks of 4 KiB that the guest writes.
pub(super) const BLOCKS: u64 = 256;
pub(super) const DEVICE: &str = "/machine/peripheral/disk0/virtio-backend";

/// The image of the guest's disk.
pub(super) struct Disk {
    pub image: PathBuf,
    format: &'static str,
}

impl Disk {
    pub fn create(lab: &Lab, format: &'static str) -> Self {
        let image = lab.path("disk.image");
        let (size, path) = (DISK_BYTES.to_string(), image.to_str().unwrap());
        let created = Command::new("qemu-img").args(["create", "-q", "-f", format, path, &size]).status().unwrap();
        assert!(created.success());
        Self { image, format }
    }

    pub fn overlays(&self) -> PathBuf {
        self.image.with_file_name("disk.image.rekindle")
    }

    pub fn boot<'a>(&self, lab: &'a Lab, binary: &Path) -> ForeignGuest<'a> {
        let file = json!({"driver": "file", "filename": self.image, "node-name": "file0"}).to_string();
        Self::boot_on(&file, self.format, lab, binary)
    }

    /// Boots a guest with the disk in the node `file0`.
    fn boot_on<'a>(file: &str, format: &str, lab: &'a Lab, binary: &Path) -> ForeignGuest<'a> {
        let format = json!({"driver": format, "file": "file0", "node-name": "disk0-format"}).to_string();
        let arguments = ["-machine", "q35,smm=off", "-m", "192M", "-blockdev", file, "-blockdev", &format];
        let device = ["-device", "virtio-blk-pci,drive=disk0-format,id=disk0"];
        ForeignGuest::boot(lab, "foreign", binary, &[&arguments[..], &device].concat())
    }
}

pub(super) fn write(guest: &Guest<'_>, seed: u64) {
    guest.ask(&format!("write vda 0 {BLOCKS} {seed}"));
}

pub(super) fn read(guest: &Guest<'_>) -> String {
    guest.ask(&format!("read vda 0 {BLOCKS}"))
}

/// Asserts that the blocks in the guest's memory and those on its disk have this digest.
#[track_caller]
pub(super) fn assert_disk_agrees(guest: &Guest<'_>, expected: &str) {
    assert_eq!(read(guest), expected, "the guest's memory");
    guest.ask("drop-caches");
    assert_eq!(read(guest), expected, "the guest's disk");
}

pub(super) fn overlay_files(disk: &Disk) -> usize {
    let files = fs::read_dir(disk.overlays()).unwrap().map(|entry| entry.unwrap().file_name());
    files.filter(|name| name.to_string_lossy().starts_with("epoch-")).count()
}

/// Returns what the guest answers to [`read`] with this raw image.
pub(super) fn image_digest(image: &Path) -> String {
    let content = fs::read(image).unwrap();
    let bytes = &content[..(BLOCKS * 4096) as usize];
    let mix = |digest: u64, byte: &u8| (digest ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, mix))
}

/// Restores the guest after it has written without a checkpoint, twice, and protects it further.
fn protect_and_restore(binary: &Path, format: &'static str) {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, format);
    let mut foreign = disk.boot(&lab, binary);
    let store = lab.path("store");
    attach(&lab, &foreign);
    let guest = &foreign.guest;
    let boot = guest.boot_id();
    write(guest, 1);
    let first = read(guest);
    assert_eq!(protect(&lab, "foreign", &store, &["--disk", "overlays", "--count", "4"]).len(), 4);
    // A protector that would not record the overlays is rejected.
    let arguments = ["protect", "foreign", "--store", store.to_str().unwrap(), "--disk", "crash-consistent"];
    lab.rekindle(arguments).status(1).prints(&["--disk overlays", "rekindle detach"]);
    assert!(overlay_files(&disk) <= 4, "three overlays, and the one for the next checkpoint");
    write(guest, 2);
    assert_ne!(read(guest), first);
    // The disk is in use.
    let rejected = lab.command(["restore", "foreign", "--store", store.to_str().unwrap()]);
    lab.finish(rejected).status(1);
    foreign.qemu.kill();
    let guest = &foreign.guest;
    for attempt in [3, 4] {
        restore(guest, &store, &[]);
        assert_eq!(guest.boot_id(), boot, "attempt {attempt}");
        assert_disk_agrees(guest, &first);
        write(guest, attempt);
        wait_filled(guest);
        if attempt == 3 {
            crash(guest);
        }
    }
    let newest = read(guest);
    assert_eq!(protect(&lab, "foreign", &store, &["--disk", "overlays", "--count", "5"]).len(), 5);
    write(guest, 5);
    crash(guest);
    restore(guest, &store, &[]);
    assert_disk_agrees(guest, &newest);
    assert_eq!(guest.status(), "running");
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn memory_and_disk_of_a_restored_guest_agree_with_qemu_7() {
    protect_and_restore(qemu_old(), "raw");
}

#[test]
fn memory_and_disk_of_a_restored_guest_agree_with_qemu_10() {
    protect_and_restore(qemu_new(), "qcow2");
}

#[test]
fn a_block_device_is_restored_only_if_it_is_the_one_of_the_checkpoint() {
    let lab = Lab::without_root();
    let (image, directory) = (lab.path("disk.image"), lab.path("overlays"));
    fs::create_dir(&directory).unwrap();
    let device = LoopDevice::create(&image, &lab.path("backing"), DISK_BYTES);
    let node = json!({"driver": "host_device", "filename": image, "node-name": "file0"}).to_string();
    let mut foreign = Disk::boot_on(&node, "raw", &lab, qemu_new());
    let store = lab.path("store");
    attach(&lab, &foreign);
    write(&foreign.guest, 1);
    let expected = read(&foreign.guest);
    let overlays = ["--disk", "overlays", "--overlay-dir", directory.to_str().unwrap(), "--count", "3"];
    assert_eq!(protect(&lab, "foreign", &store, &overlays).len(), 3);
    write(&foreign.guest, 2);
    foreign.qemu.kill();
    let other = LoopDevice::create(&image, &lab.path("other"), DISK_BYTES);
    let restoring = ["restore", "foreign", "--store", store.to_str().unwrap()];
    lab.rekindle(restoring).status(1).prints(&["another block device", "/other at 0", "/backing at 0"]);
    drop(other);
    device.link();
    let guest = &foreign.guest;
    restore(guest, &store, &[]);
    assert_disk_agrees(guest, &expected);
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn detach_merges_everything_and_removes_the_overlays() {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, "raw");
    let foreign = disk.boot(&lab, qemu_new());
    let (guest, store) = (&foreign.guest, lab.path("store"));
    attach(&lab, &foreign);
    let protected = ["--disk", "overlays", "--count", "3"];
    for seed in 1..=3 {
        write(guest, seed);
        protect(&lab, "foreign", &store, &protected);
    }
    write(guest, 4);
    let expected = read(guest);
    let detached: Value = lab.rekindle(["--json", "detach", "foreign"]).ok().json();
    assert_eq!(detached["running"], true);
    assert!(!disk.overlays().exists());
    let mut qmp = foreign.qemu.qmp();
    let graph = BlockGraph::read(&mut qmp).unwrap();
    let chain = graph.chain_of(DEVICE).unwrap();
    assert_eq!((chain.base.as_str(), chain.overlays.len()), ("disk0-format", 0));
    assert_eq!(graph.overlays_of(0).count(), 0);
    drop(qmp);
    assert_disk_agrees(guest, &expected);
    // The image alone is the disk again.
    assert_eq!(image_digest(&disk.image), expected);
    // Its checkpoints have no disk any more.
    attach(&lab, &foreign);
    assert_eq!(protect(&lab, "foreign", &store, &protected).len(), 3);
}

/// Asserts that QEMU saves the guest, or rejects that because its disk has overlays.
#[track_caller]
fn assert_is_saved(foreign: &ForeignGuest<'_>, is_saved: bool) {
    let mut qmp = foreign.qemu.qmp();
    let status: Value = qmp.execute("query-migrate", ()).unwrap();
    let saved = qmp.execute::<Value>("migrate", json!({"uri": "exec:cat >/dev/null"})).map_err(|e| e.to_string());
    if is_saved {
        assert_eq!(status.get("blocked-reasons"), None);
        saved.unwrap();
        qmp.execute::<Value>("migrate_cancel", ()).unwrap();
        return;
    }
    let error = saved.unwrap_err();
    assert!(error.contains("rekindle-detach-first"), "{error}");
    let internal = qmp.human("savevm s1").unwrap();
    assert!(internal.contains("rekindle-detach-first"), "{internal}");
}

fn other_programs_cannot_save(binary: &Path) {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, "qcow2");
    let foreign = disk.boot(&lab, binary);
    attach(&lab, &foreign);
    let store = lab.path("store");
    for _ in 0..2 {
        protect(&lab, "foreign", &store, &["--disk", "overlays", "--count", "1"]);
        assert_is_saved(&foreign, false);
    }
    lab.rekindle(["detach", "foreign"]).ok();
    assert_is_saved(&foreign, true);
}

#[test]
fn a_guest_on_overlays_is_saved_by_no_other_program_with_qemu_7() {
    other_programs_cannot_save(qemu_old());
}

#[test]
fn a_guest_on_overlays_is_saved_by_no_other_program_with_qemu_11() {
    other_programs_cannot_save(qemu_newest());
}

#[test]
fn a_killed_protector_leaves_overlays_that_the_next_one_continues() {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, "qcow2");
    let foreign = disk.boot(&lab, qemu_new());
    let (guest, store) = (&foreign.guest, protector::store(&lab, "store"));
    attach(&lab, &foreign);
    let mut expected = String::new();
    for seed in 1..=4 {
        let mut protector = Protector::start(guest, &lab, &store, &["--disk", "overlays", "--every", "100ms"]);
        protector.next_checkpoint();
        write(guest, seed);
        expected = read(guest);
        // It is killed at any step of the next checkpoint or of a merge, also while the guest is stopped.
        protector.kill();
        assert!(overlay_files(&disk) <= 5);
    }
    lab.rekindle(["detach", "foreign"]).ok();
    assert!(!disk.overlays().exists());
    assert_disk_agrees(guest, &expected);
}

#[test]
fn protection_continues_after_several_checkpoints_were_not_committed() {
    let lab = Lab::without_root();
    let disk = Disk::create(&lab, "raw");
    let mut foreign = disk.boot(&lab, qemu_new());
    let store = protector::store(&lab, "store");
    attach(&lab, &foreign);
    let guest = &foreign.guest;
    // First without any checkpoint in the store, then with an older one.
    for round in 0..2 {
        for seed in 0..4 {
            write(guest, 10 * round + seed);
            let fault = [("REKINDLE_FAULT", "overlay.seal.sealed:kill")];
            Protector::start_with(guest, &lab, &store, &["--disk", "overlays"], &fault).wait_killed();
            assert!(overlay_files(&disk) <= 5);
        }
        write(guest, 10 * round + 5);
        let expected = read(guest);
        protect(&lab, "foreign", &store, &["--disk", "overlays", "--count", "1"]);
        write(guest, 10 * round + 6);
        if round == 0 {
            foreign.qemu.kill()
        } else {
            crash(guest)
        }
        restore(guest, &store, &[]);
        assert_disk_agrees(guest, &expected);
        wait_filled(guest);
    }
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn a_disk_that_cannot_have_overlays_is_named() {
    let lab = Lab::without_root();
    let image = lab.path("disk.image");
    File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
    let drive = format!("file={},format=raw,if=none,id=d0", image.display());
    let arguments = ["-machine", "q35", "-m", "192M", "-drive", &drive, "-device", "virtio-blk-pci,drive=d0,id=disk0"];
    let foreign = ForeignGuest::boot(&lab, "foreign", qemu_new(), &arguments);
    attach(&lab, &foreign);
    let store = lab.path("store");
    let protect = ["protect", "foreign", "--store", store.to_str().unwrap(), "--create-store", "--disk", "overlays"];
    lab.rekindle(protect).status(1).prints(&["-blockdev"]);
    assert!(!lab.path("disk.image.rekindle").exists());
}
