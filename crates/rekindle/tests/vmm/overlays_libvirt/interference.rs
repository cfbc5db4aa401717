//! Users of libvirt merge overlays in the moment in which a merge of ours starts, and the image has no fence.

use super::devices::OnDevices;
use super::restore::restoring_into_libvirt;
use super::{Attached, IMAGES, OVERLAYS, assert_both_agree, image, overlays, read_both, write_both};
use crate::attach::protect;
use crate::common::protector::{self, Protector, restore};
use crate::common::{DEADLINE, Lab, wait_for};
use rekindle_kernel::process::Process;
use rekindle_testing::libvirt::PrivateLibvirt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

const UNFENCED: &str = "overlay.merge.unfenced";
const REQUESTED: &str = "overlay.merge.requested";
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A domain, and how it is protected.
struct Protected<'a> {
    attached: &'a Attached<'a>,
    store: PathBuf,
    arguments: Vec<&'a str>,
}

/// A protector that a fault has stopped.
struct StoppedProtector {
    protector: Protector,
    process: Process,
}

impl StoppedProtector {
    fn wait_stopped(&self) {
        wait_for("the merge", DEADLINE, || self.process.is_stopped().then_some(()));
    }

    /// Lets it continue until it has stopped in the merge of the second disk.
    fn continue_to_next_disk(&self) {
        self.process.resume().unwrap();
        wait_for("the merge of the second disk", DEADLINE, || is_exposed("vdb").then_some(()));
        self.wait_stopped();
    }

    /// Lets it continue from this stop and from all later ones.
    fn continue_to_end(&self) {
        self.continue_to_next_disk();
        let process = self.process;
        thread::spawn(move || {
            while process.is_alive() {
                if process.is_stopped() {
                    let _ = process.resume();
                }
                thread::sleep(POLL_INTERVAL);
            }
        });
    }
}

/// Returns the directory of a disk's overlays, also of a block device.
fn directory(target: &str) -> PathBuf {
    let (next_to_image, number) = (overlays(target), if target == "vda" { "-0" } else { "-1" });
    let in_parent = || fs::read_dir(Path::new(IMAGES).join("overlays")).unwrap().map(|entry| entry.unwrap().path());
    if next_to_image.exists() {
        return next_to_image;
    }
    in_parent().find(|path| path.to_str().unwrap().ends_with(number)).unwrap()
}

/// Returns whether it is not certain yet that no other program has merged.
fn is_exposed(target: &str) -> bool {
    directory(target).join("exposed").exists()
}

impl<'a> Protected<'a> {
    fn new(attached: &'a Attached<'a>, lab: &Lab, arguments: Vec<&'a str>) -> Self {
        Self { attached, store: protector::store(lab, "store"), arguments }
    }

    fn protect(&self, count: &str) -> usize {
        protect(self.attached.lab, "dom", &self.store, &[&self.arguments[..], &["--count", count]].concat()).len()
    }

    /// Starts a protector that stops at this point of each merge, and waits until it has stopped at the first disk.
    fn stop_at(&self, point: &str) -> StoppedProtector {
        let arguments = [&self.arguments[..], &["--every", "100ms"]].concat();
        let fault = [("REKINDLE_FAULT", &*format!("{point}:stop"))];
        let protector = Protector::start_with(&self.attached.guest, self.attached.lab, &self.store, &arguments, &fault);
        let process = Process::of(protector.child.id()).unwrap();
        let stopped = StoppedProtector { protector, process };
        stopped.wait_stopped();
        stopped
    }

    /// Takes a checkpoint, and stops at this point of the merge after the next one.
    fn stop_in_merge(&self, point: &str, seed: u64) -> StoppedProtector {
        self.protect("1");
        write_both(&self.attached.guest, seed);
        self.stop_at(point)
    }

    /// Starts a user's merge of all overlays of the first disk. libvirt rejects it until ours has ended.
    fn start_users_merge(&self, arguments: &[&str]) {
        let arguments = [&["vda", "--active"], arguments].concat();
        let started = || self.attached.virsh("blockcommit", &arguments).inspect_err(|e| eprintln!("{e}")).ok();
        wait_for("libvirt to accept a merge", DEADLINE, started);
    }

    fn abort_users_merge(&self) {
        self.attached.virsh("blockjob", &["vda", "--abort"]).unwrap();
        let is_over =
            || self.attached.virsh("blockjob", &["vda"]).unwrap().contains("No current block job").then_some(());
        wait_for("the end of the job", DEADLINE, is_over);
    }
}

/// Asserts that no restore accepts the newest checkpoint.
#[track_caller]
fn assert_not_restored(lab: &Lab, store: &Path, reasons: &[&str]) {
    lab.rekindle(["restore", "dom", "--store", store.to_str().unwrap()]).status(1).prints(reasons);
    lab.finish(restoring_into_libvirt(lab, store)).status(1).prints(reasons);
}

/// A merge that was cancelled leaves no trace in QEMU or libvirt, but the image has newer writes.
fn reject_a_checkpoint_after(point: &str, protected: &Protected<'_>, image: &Path) {
    let (attached, lab) = (protected.attached, protected.attached.lab);
    let guest = &attached.guest;
    let stopped = protected.stop_in_merge(point, 1);
    write_both(guest, 2);
    guest.ask("drop-caches");
    let newest = read_both(guest);
    protected.start_users_merge(&["--wait"]);
    protected.abort_users_merge();
    stopped.continue_to_next_disk();
    attached.kill_qemu();
    stopped.protector.kill();
    assert_not_restored(lab, &protected.store, &[image.to_str().unwrap(), "has lost its disk", "virsh start"]);
    attached.virsh("start", &[]).unwrap();
    wait_for("the guest", DEADLINE, || guest.is_up().then_some(()));
    assert_eq!(read_both(guest), newest);
}

#[test]
fn a_checkpoint_is_not_restored_if_a_user_has_merged_before_our_merge() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let protected = Protected::new(&attached, &lab, OVERLAYS.to_vec());
    reject_a_checkpoint_after(UNFENCED, &protected, &image("vda"));
}

#[test]
fn a_checkpoint_is_not_restored_if_a_user_has_merged_directly_after_our_merge() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let protected = Protected::new(&attached, &lab, OVERLAYS.to_vec());
    reject_a_checkpoint_after(REQUESTED, &protected, &image("vda"));
}

#[test]
fn a_block_device_is_not_restored_if_a_user_has_merged_before_our_merge() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = OnDevices::boot(&libvirt, &lab);
    let protected = Protected::new(&domain, &lab, domain.arguments(&[]));
    reject_a_checkpoint_after(UNFENCED, &protected, &domain.devices[0].path);
}

#[test]
fn a_block_device_is_not_restored_if_a_user_has_merged_directly_after_our_merge() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = OnDevices::boot(&libvirt, &lab);
    let protected = Protected::new(&domain, &lab, domain.arguments(&[]));
    reject_a_checkpoint_after(REQUESTED, &protected, &domain.devices[0].path);
}

/// The protection continues with a checkpoint that has its disk, or ends with what the user has to do.
fn continue_after_users_merges(protected: &Protected<'_>, detach: impl Fn(&str)) {
    let attached = protected.attached;
    let guest = &attached.guest;
    // It was cancelled, and QEMU leaves the image writable.
    let stopped = protected.stop_in_merge(UNFENCED, 1);
    write_both(guest, 2);
    let expected = read_both(guest);
    protected.start_users_merge(&["--wait"]);
    protected.abort_users_merge();
    stopped.continue_to_next_disk();
    stopped.protector.kill();
    let arguments = ["protect", "dom", "--store", protected.store.to_str().unwrap()];
    let reasons = ["was ended without a pivot", "rekindle detach"];
    attached
        .lab
        .rekindle([&arguments[..], &protected.arguments, &["--count", "1"]].concat())
        .status(1)
        .prints(&reasons);
    detach("after a merge that was cancelled");
    assert_both_agree(guest, &expected, "detached");
    attached.attach();

    // It still runs: checkpoints wait until it has put the disk on its image.
    let mut stopped = protected.stop_in_merge(UNFENCED, 3);
    write_both(guest, 4);
    protected.start_users_merge(&["--wait"]);
    stopped.continue_to_end();
    while !stopped.protector.wait("waiting")["state"].as_str().unwrap().contains("block job commit-vda") {}
    attached.virsh("blockjob", &["vda", "--pivot"]).unwrap();
    stopped.protector.next_checkpoint();
    stopped.protector.kill();
    assert_eq!(protected.protect("2"), 2);

    // It has put the disk on its image.
    let stopped = protected.stop_in_merge(UNFENCED, 5);
    write_both(guest, 6);
    let expected = read_both(guest);
    protected.start_users_merge(&["--pivot", "--wait"]);
    stopped.continue_to_next_disk();
    stopped.protector.kill();
    assert_eq!(protected.protect("3"), 3);
    assert!(!is_exposed("vda") && !is_exposed("vdb"));
    assert_both_agree(guest, &expected, "protected again");
    write_both(guest, 7);
    attached.kill_qemu();
    attached.lab.finish(restoring_into_libvirt(attached.lab, &protected.store)).ok();
    assert_both_agree(guest, &expected, "restored");
}

#[test]
fn the_protection_continues_after_users_have_merged_in_the_middle_of_our_merge() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let protected = Protected::new(&attached, &lab, OVERLAYS.to_vec());
    continue_after_users_merges(&protected, |context| attached.detach(context));
}

#[test]
fn the_protection_of_block_devices_continues_after_users_have_merged_in_the_middle_of_our_merge() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = OnDevices::boot(&libvirt, &lab);
    let protected = Protected::new(&domain, &lab, domain.arguments(&[]));
    continue_after_users_merges(&protected, |context| domain.detach(context));
}

#[test]
fn a_restore_asks_the_user_if_the_protector_was_killed_while_users_could_merge() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let protected = Protected::new(&attached, &lab, OVERLAYS.to_vec());
    let guest = &attached.guest;
    protected.protect("1");
    write_both(guest, 1);
    let expected = read_both(guest);
    let stopped = protected.stop_at(REQUESTED);
    write_both(guest, 2);
    stopped.protector.kill();
    attached.kill_qemu();
    let exposed = overlays("vda").join("exposed");
    assert_not_restored(&lab, &protected.store, &["vda.image", &format!("rm {}", exposed.display())]);
    fs::remove_file(exposed).unwrap();
    assert_not_restored(&lab, &protected.store, &["vda.image has write permission", "chmod a-w"]);
    assert!(Command::new("chmod").arg("a-w").arg(image("vda")).status().unwrap().success());
    restore(guest, &protected.store, &[]);
    assert_both_agree(guest, &expected, "confirmed by the user");
    guest.rekindle(&["stop", "--now"]).ok();
}
