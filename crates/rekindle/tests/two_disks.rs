//! A guest with two disks that servers of Rekindle's have: both keep what it had cached, in one memory, and neither takes from the other.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::guest::Guest;
use common::served::{BLOCK, BLOCKS, READ, digest, image, kill_watcher, section};
use common::{DEADLINE, Lab, wait_for};
use rekindle_disk::control::Control;
use rekindle_disk::engine::command::Status;
use rekindle_disk::retained::CacheCounts;
use rekindle_kernel::process::Process;
use rekindle_vm::fault::POINTS;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

/// What the guest reads of each. It drops a disk's pages when it closes it, and takes them for the next one: so the first has more.
const READS: [u64; 2] = [BLOCKS, READ / 2];

const DISKS: [&str; 2] = ["vda", "vdb"];

/// Two images, of which no two blocks are the same.
fn images(lab: &Lab) -> [PathBuf; 2] {
    let [first, second] = ["first.raw", "second.raw"].map(|name| image(lab, name));
    let file = File::options().write(true).open(&second).unwrap();
    let mut block = [0; BLOCK as usize];
    for n in 0..BLOCKS {
        fastrand::Rng::with_seed(1 << 32 | n).fill(&mut block);
        file.write_all_at(&block, n * BLOCK).unwrap();
    }
    [first, second]
}

fn boot<'a>(lab: &'a Lab, name: &str, images: &[PathBuf; 2]) -> Guest<'a> {
    let sections = images.each_ref().map(|image| section(image, ""));
    lab.vm(name).memory("256M").section(&sections.concat()).boot(&[])
}

fn status(guest: &Guest<'_>, number: usize) -> Status {
    Control::connect(&guest.file(&format!("disk-disk{number}.control"))).unwrap().status().unwrap()
}

fn became(guest: &Guest<'_>, number: usize) -> CacheCounts {
    let status = status(guest, number);
    status.retained.map(|(_, told)| told).or(status.emptied).unwrap_or_default()
}

fn server(guest: &Guest<'_>, number: usize) -> Process {
    let mark = format!("--control={}", guest.file(&format!("disk-disk{number}.control")).display());
    common::with_argument_containing(&mark).unwrap().into_iter().find(Process::is_alive).expect("a server")
}

fn reboot(guest: &Guest<'_>) -> Value {
    let told = guest.lab.rekindle(["--json", "reboot", "os", &guest.name]).ok().json();
    guest.wait_ready();
    told
}

/// Bytes that the former memory takes of the host: files without a name that a server has open.
fn former(guest: &Guest<'_>) -> u64 {
    let mut files = BTreeMap::new();
    for number in 0..2 {
        let fds = fs::read_dir(format!("/proc/{}/fd", server(guest, number).pid)).unwrap();
        for fd in fds.flatten() {
            let is_former = fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().contains(".ram (deleted)"));
            if let Ok(metadata) =
                fs::metadata(fd.path()).map_err(|_| ()).and_then(|of| is_former.then_some(of).ok_or(()))
            {
                files.insert((metadata.dev(), metadata.ino()), metadata.blocks() * 512);
            }
        }
    }
    files.values().sum()
}

/// The new one's.
fn present(guest: &Guest<'_>) -> u64 {
    let shown = guest.rekindle(&["--json", "show"]).ok().json();
    let path = shown["hardware"]["ram"]["path"].as_str().expect("where its RAM is").to_owned();
    fs::metadata(path).unwrap().blocks() * 512
}

fn read(guest: &Guest<'_>, number: usize, first: u64, count: u64) -> String {
    guest.ask(&format!("read {} {first} {count}", DISKS[number]))
}

fn assert_reads(guest: &Guest<'_>, images: &[PathBuf; 2]) {
    for (number, image) in images.iter().enumerate() {
        assert_eq!(read(guest, number, 0, READS[number]), digest(image, 0, READS[number]), "{}", DISKS[number]);
    }
}

#[test]
fn what_a_guest_had_of_both_disks_is_kept_and_is_no_more_than_its_memory() {
    let lab = Lab::new();
    let images = images(&lab);
    let guest = boot(&lab, "both", &images);
    assert_reads(&guest, &images);
    let told = reboot(&guest);
    for (number, read) in READS.iter().enumerate() {
        let kept = told["kept"]["disks"][format!("disk{number}")].as_u64().unwrap_or_default();
        assert!(kept >= read * 9 / 10 * BLOCK, "{told}");
    }
    assert_reads(&guest, &images);
    let told = [became(&guest, 0), became(&guest, 1)];
    assert!(told[0].served > BLOCKS / 2 && told[0].refused < READ, "{told:?}");
    assert!(told[1].served > READS[1] * 8 / 10 && told[1].refused < READS[1] / 20, "{told:?}");
    // The guest takes all that it can have: what is kept goes for it.
    reboot(&guest);
    guest.touch("180M");
    wait_for("the former memory to shrink", DEADLINE, || {
        (former(&guest) + present(&guest) <= (256 << 20) * 105 / 100).then_some(())
    });
    guest.verify();
    assert_reads(&guest, &images);
    guest.assert_sound();
}

#[test]
fn a_frame_that_went_from_one_disk_to_the_other_is_the_other_s() {
    let lab = Lab::new();
    let images = images(&lab);
    let guest = boot(&lab, "passed", &images);
    // To and fro, the second is the last to have them.
    for _ in 0..3 {
        for (number, image) in images.iter().enumerate() {
            assert_eq!(read(&guest, number, 0, BLOCKS), digest(image, 0, BLOCKS));
            guest.ask("drop-caches");
        }
    }
    reboot(&guest);
    assert_eq!(read(&guest, 0, 0, BLOCKS), digest(&images[0], 0, BLOCKS));
    let told = became(&guest, 0);
    assert!(told.refused > BLOCKS / 4, "they are the second's: {told:?}");
    assert_eq!(read(&guest, 1, 0, BLOCKS), digest(&images[1], 0, BLOCKS));
    let told = became(&guest, 1);
    assert!(told.served > BLOCKS * 8 / 10 && told.refused < BLOCKS / 20, "the first took nothing from it: {told:?}");
    guest.assert_sound();
}

#[test]
fn what_a_server_has_needed_goes_with_it_and_the_other_serves_on() {
    let lab = Lab::new();
    let images = images(&lab);
    let guest = boot(&lab, "alone", &images);
    assert_reads(&guest, &images);
    reboot(&guest);
    wait_for("what nobody needs to go", DEADLINE, || (former(&guest) < 40 << 20).then_some(()));
    let before = former(&guest);
    kill_watcher(&guest);
    server(&guest, 0).kill().unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["server"]);
    wait_for("its part to go", DEADLINE, || (former(&guest) < before - BLOCKS / 2 * BLOCK).then_some(()));
    assert_reads(&guest, &images);
    let told = became(&guest, 1);
    assert!(told.served > READS[1] * 8 / 10 && told.refused < READS[1] / 20, "{told:?}");
    // One of them has nothing when the guest is rebooted: the other's is kept.
    kill_watcher(&guest);
    server(&guest, 1).kill().unwrap();
    let told = reboot(&guest);
    assert!(told["kept"]["disks"]["disk0"].as_u64().unwrap_or_default() > BLOCKS / 2 * BLOCK, "{told}");
    assert_eq!(told["kept"]["disks"]["disk1"], Value::Null, "{told}");
    assert_reads(&guest, &images);
    guest.assert_sound();
}

#[test]
fn a_reboot_that_is_killed_while_it_keeps_the_caches_is_ended_with_them() {
    let lab = Lab::new();
    let images = images(&lab);
    let guest = boot(&lab, "killed", &images);
    let points: Vec<_> = POINTS.iter().filter(|point| point.starts_with("cache.")).collect();
    assert!(!points.is_empty());
    for point in points {
        assert_reads(&guest, &images);
        let boot = guest.boot_id();
        let mut command = lab.command(["reboot", "os", &guest.name]);
        command.env("REKINDLE_FAULT", format!("{point}:kill"));
        let done = lab.finish(command);
        assert_eq!((done.code, guest.status().as_str()), (None, "needs-recovery"), "{point}: {done}");
        guest.rekindle(&["recover"]).ok();
        guest.wait_ready();
        assert_ne!(guest.boot_id(), boot, "{point}");
        assert_reads(&guest, &images);
        let told = [became(&guest, 0), became(&guest, 1)];
        assert!(told[0].served > BLOCKS / 2 && told[0].refused < READ, "{point}: {told:?}");
        assert!(told[1].served > READS[1] * 8 / 10 && told[1].refused < READS[1] / 20, "{point}: {told:?}");
        // No third memory is left behind.
        guest.touch("120M");
        wait_for("the former memory to shrink", DEADLINE, || {
            (former(&guest) + present(&guest) <= (256 << 20) * 105 / 100).then_some(())
        });
    }
    guest.assert_sound();
}
