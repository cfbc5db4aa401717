//! `rekindle protect --disk overlays` of a libvirt domain: libvirt puts the overlays and merges them, and its users cannot
//! merge into what a checkpoint needs.

mod devices;
mod heads;
mod interference;
mod kills;
mod moving;
mod resource;
mod restore;

use super::attach::protect;
use super::overlays::{BLOCKS, image_digest, read, write};
use crate::common::protector::{self, Protector, crash, restore, wait_filled};
use crate::common::{DEADLINE, Guest, Lab, Net, wait_for};
use rekindle_kernel::process::Process;
use rekindle_testing::libvirt::{Domain, DomainOptions, Firmware, PrivateLibvirt};
use rekindle_testing::micro::free_port;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const URI: &str = "qemu:///system";
const IMAGES: &str = "/var/lib/libvirt/images";
const DISK_BYTES: u64 = 64 << 20;
const TPM: &str = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>";
const OVERLAYS: [&str; 2] = ["--disk", "overlays"];

/// A domain with two disks, `vda` raw and `vdb` qcow2, that is attached as VM `dom`.
struct Attached<'a> {
    libvirt: &'a PrivateLibvirt,
    lab: &'a Lab,
    domain: Domain<'a>,
    guest: Guest<'a>,
}

fn image(target: &str) -> PathBuf {
    Path::new(IMAGES).join(format!("{target}.image"))
}

fn overlays(target: &str) -> PathBuf {
    Path::new(IMAGES).join(format!("{target}.image.rekindle"))
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// Makes the images of both disks, and returns libvirt's description of the disks.
fn make_disks(directory: &Path) -> String {
    let mut devices = String::new();
    for (target, format) in [("vda", "raw"), ("vdb", "qcow2")] {
        let (path, size) = (directory.join(format!("{target}.image")), DISK_BYTES.to_string());
        let create = Command::new("qemu-img").args(["create", "-q", "-f", format]).arg(&path).arg(size).status();
        assert!(create.unwrap().success());
        devices += &format!(
            "<disk type='file' device='disk'><driver name='qemu' type='{format}'/><source file='{}'/>
             <target dev='{target}' bus='virtio'/></disk>",
            path.display()
        );
    }
    devices
}

/// Defines a domain that runs, so that it can be started again.
fn define(libvirt: &PrivateLibvirt, domain: &Domain<'_>) {
    fs::write("/run/defined.xml", libvirt.virsh(&["dumpxml", &domain.name, "--inactive"])).unwrap();
    libvirt.virsh(&["define", "/run/defined.xml"]);
}

impl<'a> Attached<'a> {
    fn boot(libvirt: &'a PrivateLibvirt, lab: &'a Lab) -> Self {
        Self::boot_with(Firmware::Bios, libvirt, lab)
    }

    fn boot_with(firmware: Firmware, libvirt: &'a PrivateLibvirt, lab: &'a Lab) -> Self {
        Self::boot_on(&make_disks(Path::new(IMAGES)), firmware, libvirt, lab)
    }

    /// Boots a domain with these disks.
    fn boot_on(disks: &str, firmware: Firmware, libvirt: &'a PrivateLibvirt, lab: &'a Lab) -> Self {
        let mut devices = disks.to_owned();
        devices += "<disk type='file' device='cdrom'><target dev='hdc' bus='ide'/><readonly/></disk>";
        if firmware == Firmware::Uefi {
            devices += TPM;
        }
        let domain = libvirt.boot(&DomainOptions { devices: &devices, firmware, ..DomainOptions::new("overlays") });
        define(libvirt, &domain);
        let guest = lab.vm("dom").net(Net::User(domain.address.port())).guest();
        let attached = Self { libvirt, lab, domain, guest };
        lab.allow_arguments_of(&attached.virsh("dumpxml", &[]).unwrap());
        attached.attach();
        attached
    }

    fn attach(&self) {
        self.lab.rekindle(["attach", "dom", "--libvirt", &self.domain.name, "--connect", URI]).ok();
    }

    fn virsh(&self, command: &str, arguments: &[&str]) -> Result<String, String> {
        let words = [command, &self.domain.name];
        self.libvirt.try_virsh(&words.iter().chain(arguments).copied().collect::<Vec<_>>())
    }

    #[track_caller]
    fn assert_rejected(&self, command: &str, arguments: &[&str], reason: &str) {
        let error = self.virsh(command, arguments).expect_err(command);
        assert!(error.contains(reason), "{command}: {error}");
    }

    /// Returns the file of a disk according to libvirt: now, and when the domain is started next time.
    fn files(&self, target: &str) -> [String; 2] {
        [&[][..], &["--inactive"]].map(|arguments| {
            let list = self.virsh("domblklist", arguments).unwrap();
            let line = list.lines().find(|line| line.trim_start().starts_with(target)).unwrap();
            line.split_whitespace().nth(1).unwrap().to_owned()
        })
    }

    /// Asserts that both disks are on their images, which have their permissions again, and that no overlay is left.
    #[track_caller]
    fn assert_on_images(&self, context: &str) {
        for target in ["vda", "vdb"] {
            let path = image(target);
            assert_eq!(self.files(target), [path.to_str().unwrap(), path.to_str().unwrap()], "{context}");
            assert!(!overlays(target).exists(), "{context}");
            assert_eq!(mode(&path), 0o644, "{context}");
        }
        let xml = self.virsh("dumpxml", &[]).unwrap() + &self.virsh("dumpxml", &["--inactive"]).unwrap();
        assert!(!xml.contains(".rekindle"), "{context}: {xml}");
    }

    /// Asserts that libvirt has the disk on an overlay, and that nothing below can be written.
    #[track_caller]
    fn assert_fenced(&self, target: &str) {
        let [now, next] = self.files(target);
        assert_eq!(now, next);
        assert!(now.starts_with(overlays(target).to_str().unwrap()), "{now}");
        assert_eq!(mode(&image(target)), 0o444);
        assert_ne!(mode(Path::new(&now)) & 0o200, 0);
    }

    fn kill_qemu(&self) {
        let qemu = self.domain.process();
        qemu.kill().unwrap();
        assert!(qemu.wait_end(Duration::from_secs(10)).unwrap());
        wait_for("libvirt to notice", DEADLINE, || (self.domain.state() == "shut off").then_some(()));
    }

    #[track_caller]
    fn detach(&self, context: &str) {
        self.guest.rekindle(&["detach"]).ok();
        self.assert_on_images(context);
    }
}

fn write_both(guest: &Guest<'_>, seed: u64) {
    write(guest, seed);
    guest.ask(&format!("write vdb 0 {BLOCKS} {}", seed + 1000));
}

/// Returns the digests of the blocks on both disks.
fn read_both(guest: &Guest<'_>) -> [String; 2] {
    [read(guest), guest.ask(&format!("read vdb 0 {BLOCKS}"))]
}

/// Asserts that the blocks in the guest's memory and those on its disks have these digests.
#[track_caller]
fn assert_both_agree(guest: &Guest<'_>, expected: &[String; 2], context: &str) {
    assert_eq!(read_both(guest), *expected, "{context}: the guest's memory");
    guest.ask("drop-caches");
    assert_eq!(read_both(guest), *expected, "{context}: the guest's disks");
}

#[test]
fn memory_and_disks_of_a_restored_domain_agree() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    let boot = guest.boot_id();
    write_both(guest, 1);
    let first = read_both(guest);
    let protected = [&OVERLAYS[..], &["--count", "4"]].concat();
    assert_eq!(protect(&lab, "dom", &store, &protected).len(), 4);
    for target in ["vda", "vdb"] {
        attached.assert_fenced(target);
    }
    write_both(guest, 2);
    assert_ne!(read_both(guest), first);
    // The domain runs.
    let restoring = lab.command(["restore", "dom", "--store", store.to_str().unwrap()]);
    lab.finish(restoring).status(1);
    attached.kill_qemu();
    for attempt in [3, 4] {
        restore(guest, &store, &[]);
        assert_eq!(guest.boot_id(), boot, "attempt {attempt}");
        assert_both_agree(guest, &first, &format!("attempt {attempt}"));
        write_both(guest, attempt);
        wait_filled(guest);
        if attempt == 3 {
            crash(guest);
            // The guest has continued without the domain, whose newest disk is discarded.
            attached.assert_rejected("start", &[], "Permission denied");
        }
    }
    // It is Rekindle's now.
    let newest = read_both(guest);
    assert_eq!(protect(&lab, "dom", &store, &protected).len(), 4);
    write_both(guest, 5);
    crash(guest);
    restore(guest, &store, &[]);
    assert_both_agree(guest, &newest, "the restored guest's checkpoint");
    guest.rekindle(&["stop", "--now"]).ok();
}

/// Kills a protector at each of these fault points, one after the other. The next one must continue, and the guest must be
/// restored with the disks of its checkpoint.
fn continue_after_killed_at(points: &[&str]) {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "1"]].concat());
    for (seed, point) in points.iter().enumerate() {
        write_both(guest, seed as u64);
        let fault = [("REKINDLE_FAULT", &*format!("{point}:kill"))];
        Protector::start_with(guest, &lab, &store, &OVERLAYS, &fault).wait_killed();
    }
    write_both(guest, 10);
    let expected = read_both(guest);
    let protected = protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "2"]].concat());
    assert_eq!(protected.len(), 2);
    for target in ["vda", "vdb"] {
        attached.assert_fenced(target);
    }
    write_both(guest, 11);
    attached.kill_qemu();
    restore(guest, &store, &[]);
    assert_both_agree(guest, &expected, "restored");
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn overlays_are_merged_below_those_of_a_checkpoint_that_was_not_committed() {
    // The first protector has not merged what it has committed, and the second has not committed what it has sealed.
    continue_after_killed_at(&["overlay.merge.unfenced", "overlay.seal.sealed"]);
}

#[test]
fn protection_continues_after_several_checkpoints_were_not_committed() {
    let not_committed = ["overlay.seal.sealed"; 4];
    continue_after_killed_at(&[&["overlay.merge.unfenced"][..], &not_committed].concat());
}

#[test]
fn detach_puts_a_domain_on_its_images_and_libvirt_starts_it_on_them() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    for seed in 1..=3 {
        write_both(guest, seed);
        protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "3"]].concat());
    }
    write_both(guest, 4);
    let expected = read_both(guest);
    guest.ask("drop-caches");
    attached.detach("after protection");
    assert_eq!(attached.domain.state(), "running");
    assert_both_agree(guest, &expected, "after detach");
    assert_eq!(image_digest(&image("vda")), expected[0]);
    // libvirt has no block job, and accepts one.
    attached.virsh("blockcommit", &["vda", "--active"]).unwrap_err();
    attached.virsh("snapshot-create-as", &["s", "--disk-only", "--no-metadata"]).unwrap();
    attached.virsh("blockcommit", &["vda", "--active", "--pivot", "--wait"]).unwrap();
    attached.virsh("blockcommit", &["vdb", "--active", "--pivot", "--wait"]).unwrap();
    attached.virsh("destroy", &[]).unwrap();
    attached.virsh("start", &[]).unwrap();
    wait_for("the guest", DEADLINE, || guest.is_up().then_some(()));
    assert_eq!(read_both(guest), expected);
}

#[test]
fn users_of_libvirt_cannot_change_what_a_checkpoint_needs() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    let protected = [&OVERLAYS[..], &["--count", "2"]].concat();
    write_both(guest, 1);
    protect(&lab, "dom", &store, &protected);
    let denied = "Permission denied";
    for disk in ["vda", "vdb"] {
        attached.assert_rejected("blockcommit", &[disk, "--active", "--pivot", "--wait"], denied);
        attached.assert_rejected("blockcommit", &[disk, "--active", "--shallow", "--pivot", "--wait"], denied);
    }
    attached.assert_rejected("save", &["/var/lib/libvirt/saved"], "rekindle-detach-first");
    attached.assert_rejected("snapshot-create-as", &["internal"], "");
    // Another domain cannot be started on the image alone.
    let alone = fs::read_to_string(format!("/run/{}.xml", attached.domain.name)).unwrap();
    let port = attached.domain.address.port().to_string();
    let alone = alone.replace("-overlays</name>", "-alone</name>").replace(&port, &free_port().to_string());
    fs::write("/run/alone.xml", alone).unwrap();
    let error = libvirt.try_virsh(&["create", "/run/alone.xml"]).expect_err("the image is an older disk");
    // libvirt's own error may be that the monitor of a QEMU which has ended refuses connections.
    let name = attached.domain.name.replace("-overlays", "-alone");
    let log = fs::read_to_string(format!("/var/log/libvirt/qemu/{name}.log")).unwrap();
    assert!(log.contains(denied), "{error}; {log}");

    let replace = ["replace-qemu", &attached.domain.name];
    lab.rekindle(replace).status(1).prints(&["rekindle detach dom"]);
    // Another QEMU would run the guest on the image alone, also if nothing shows any more that this one is attached.
    let mut unaware = lab.command(replace);
    unaware.env("REKINDLE_RUN_DIR", "/run/rekindle");
    lab.finish(unaware).status(1).prints(&["disk virtio-disk0", "disk virtio-disk1"]);
    attached.assert_fenced("vda");

    // A snapshot of a user: no checkpoint is taken until it is merged, and its merge stops at the overlay.
    let mut protector = Protector::start(guest, &lab, &store, &[&OVERLAYS[..], &["--every", "100ms"]].concat());
    protector.next_checkpoint();
    let user_file = format!("{IMAGES}/user.qcow2");
    let only_vda = ["user", "--disk-only", "--no-metadata", "--diskspec"];
    let spec = format!("vda,file={user_file}");
    let mut taken = Err(String::new());
    wait_for("a moment without a job", DEADLINE, || {
        let arguments = [&only_vda[..], &[&spec, "--diskspec", "vdb,snapshot=no"]].concat();
        taken = attached.virsh("snapshot-create-as", &arguments);
        taken.is_ok().then_some(())
    });
    wait_for_merge(&mut protector, &user_file);
    // A protector that starts meanwhile also waits.
    protector.end();
    let mut protector = Protector::start(guest, &lab, &store, &[&OVERLAYS[..], &["--every", "100ms"]].concat());
    wait_for_merge(&mut protector, &user_file);
    write_both(guest, 2);
    attached.assert_rejected("blockcommit", &["vda", "--active", "--pivot", "--wait"], denied);
    attached.virsh("blockcommit", &["vda", "--active", "--shallow", "--pivot", "--wait"]).unwrap();
    protector.next_checkpoint();
    // A backup of a user. Without a file, libvirt puts it next to the overlay.
    let backup = format!(
        "<domainbackup><disks><disk name='vda' type='file'><target file='{IMAGES}/vda.backup'/></disk>
         <disk name='vdb' backup='no'/></disks></domainbackup>"
    );
    fs::write("/run/backup.xml", backup).unwrap();
    let mut is_started = Err(String::new());
    wait_for("a moment without a job", DEADLINE, || {
        is_started = attached.virsh("backup-begin", &["/run/backup.xml"]);
        is_started.is_ok().then_some(())
    });
    protector.next_checkpoint();
    protector.end();
    let expected = read_both(guest);
    assert_both_agree(guest, &expected, "after a snapshot and a backup");
    attached.detach("at the end");
    assert_both_agree(guest, &expected, "after detach");
}

/// Waits until the protector waits for the merge of a user's snapshot. Returns the command that merges it, without
/// `virsh`.
#[track_caller]
fn wait_for_merge(protector: &mut Protector, user_file: &str) -> Vec<String> {
    loop {
        let waiting = protector.wait("waiting")["state"].as_str().unwrap().to_owned();
        if waiting.contains(user_file) {
            let (_, command) = waiting.split_once("virsh ").unwrap_or_else(|| panic!("no command: {waiting}"));
            return command.split_whitespace().map(str::to_owned).collect();
        }
    }
}

/// The snapshot is below the overlay that is being put, or above an overlay that is fenced already.
#[test]
fn a_snapshot_of_a_user_in_the_middle_of_a_step_only_delays_checkpoints() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "1"]].concat());
    let arguments = [&OVERLAYS[..], &["--every", "100ms"]].concat();
    for (round, action) in ["stop", "kill"].into_iter().enumerate() {
        eprintln!("{action}");
        let seed = 1 + round as u64;
        write_both(guest, seed);
        let fault = format!("overlay.mark.fenced:{action}");
        let mut protector =
            Protector::start_with(guest, &lab, &store, &arguments, &[("REKINDLE_FAULT", fault.as_str())]);
        let process = Process::of(protector.child.id()).unwrap();
        wait_for("the fault", DEADLINE, || (process.is_stopped() || !process.is_alive()).then_some(()));
        let user_file = format!("{IMAGES}/{action}.qcow2");
        let spec = format!("vda,file={user_file}");
        let snapshot = ["user", "--disk-only", "--no-metadata", "--diskspec", &spec, "--diskspec", "vdb,snapshot=no"];
        attached.virsh("snapshot-create-as", &snapshot).unwrap();
        if action == "stop" {
            process.resume().unwrap();
        } else {
            protector = Protector::start(guest, &lab, &store, &arguments);
        }
        let command = wait_for_merge(&mut protector, &user_file);
        write_both(guest, seed + 10);
        let words: Vec<&str> = command.iter().skip(2).map(String::as_str).collect();
        assert_eq!(&command[..3], ["blockcommit", "DOMAIN", "vda"]);
        attached.virsh("blockcommit", &[&words[..], &["--wait"]].concat()).unwrap();
        // Without the fault.
        protector.kill();
        let expected = read_both(guest);
        protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "2"]].concat());
        attached.assert_fenced("vda");
        assert_both_agree(guest, &expected, action);
    }
    let expected = read_both(guest);
    write_both(guest, 20);
    attached.kill_qemu();
    restore(guest, &store, &[]);
    assert_both_agree(guest, &expected, "restored");
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn a_domain_that_libvirt_starts_again_has_its_newest_disk_and_blocks_a_restore() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    let protected = [&OVERLAYS[..], &["--count", "3"]].concat();
    write_both(guest, 1);
    protect(&lab, "dom", &store, &protected);
    write_both(guest, 2);
    guest.ask("drop-caches");
    let newest = read_both(guest);
    attached.kill_qemu();
    attached.virsh("start", &[]).unwrap();
    wait_for("the guest", DEADLINE, || guest.is_up().then_some(()));
    assert_eq!(read_both(guest), newest);
    let store = store.to_str().unwrap();
    lab.rekindle(["restore", "dom", "--store", store]).status(1).prints(&["libvirt has started the domain again"]);
    // Its QEMU is another one.
    attached.attach();
    let again = ["protect", "dom", "--store", store, "--disk", "overlays", "--count", "1"];
    lab.rekindle(again).status(1).prints(&["on overlays of an earlier"]);
    // As docs/protect-attached.md describes.
    for target in ["vda", "vdb"] {
        let chmod = Command::new("chmod").arg("u+w").arg(image(target)).status().unwrap();
        assert!(chmod.success());
        let base = image(target);
        let merge = [target, "--base", base.to_str().unwrap(), "--active", "--pivot", "--wait"];
        attached.virsh("blockcommit", &merge).unwrap();
        fs::remove_dir_all(overlays(target)).unwrap();
    }
    attached.assert_on_images("merged by hand");
    assert_both_agree(guest, &newest, "merged by hand");
    // Its QEMU was given the overlays by its command line.
    lab.rekindle(again).status(1).prints(&["the command line gives it"]);
    guest.rekindle(&["detach"]).ok();
    attached.virsh("destroy", &[]).unwrap();
    attached.virsh("start", &[]).unwrap();
    wait_for("the guest", DEADLINE, || guest.is_up().then_some(()));
    attached.attach();
    protect(&lab, "dom", Path::new(store), &protected);
    attached.detach("protected again");
    assert_both_agree(guest, &newest, "protected again");
}

#[test]
fn an_image_that_another_program_may_have_changed_is_not_restored() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    write_both(guest, 1);
    let expected = read_both(guest);
    protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "2"]].concat());
    attached.kill_qemu();
    let chmod = |mode: &str| assert!(Command::new("chmod").arg(mode).arg(image("vdb")).status().unwrap().success());
    chmod("u+w");
    let arguments = ["restore", "dom", "--store", store.to_str().unwrap()];
    lab.rekindle(arguments).status(1).prints(&["vdb.image has write permission", "chmod a-w"]);
    chmod("a-w");
    restore(guest, &store, &[]);
    assert_both_agree(guest, &expected, "restored");
    guest.rekindle(&["stop", "--now"]).ok();
}
