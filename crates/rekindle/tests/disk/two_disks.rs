//! A guest with two disk servers: both serve blocks from one retained cache, and neither serves blocks of the other's
//! disk.

use crate::common::guest::Guest;
use crate::common::served::{BLOCK, BLOCKS, READ, digest, image, kill_watcher, section};
use crate::common::{DEADLINE, Lab, wait_for};
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

/// Number of blocks that the guest reads of each disk. It drops a disk's pages when it closes the disk, and reuses them
/// for the next one, so it reads more of the first.
const READS: [u64; 2] = [BLOCKS, READ / 2];

const RAM_BYTES: u64 = 256 << 20;
const DISKS: [&str; 2] = ["vda", "vdb"];

/// Creates two images in which no two blocks are the same.
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
    lab.vm(name).memory(&format!("{}M", RAM_BYTES >> 20)).section(&sections.concat()).boot(&[])
}

fn status(guest: &Guest<'_>, number: usize) -> Status {
    Control::connect(&guest.file(&format!("disk-disk{number}.control"))).unwrap().status().unwrap()
}

fn cache_counts(guest: &Guest<'_>, number: usize) -> CacheCounts {
    let status = status(guest, number);
    status.retained.map(|(_, counts)| counts).or(status.emptied).unwrap_or_default()
}

fn server(guest: &Guest<'_>, number: usize) -> Process {
    let mark = format!("--control={}", guest.file(&format!("disk-disk{number}.control")).display());
    crate::common::with_argument_containing(&mark).unwrap().into_iter().find(Process::is_alive).expect("a server")
}

fn reboot(guest: &Guest<'_>) -> Value {
    let report = guest.lab.rekindle(["--json", "reboot", &guest.name]).ok().json();
    guest.wait_ready();
    report
}

/// Returns how many bytes of the host's memory the retained cache takes: deleted RAM files that a server has open.
fn retained_bytes(guest: &Guest<'_>) -> u64 {
    let mut files = BTreeMap::new();
    for number in 0..2 {
        let fds = fs::read_dir(format!("/proc/{}/fd", server(guest, number).pid)).unwrap();
        for fd in fds.flatten() {
            // The name is that in the jail of the QEMU from which the server has got it.
            if let Ok(metadata) = fs::metadata(fd.path())
                && metadata.is_file()
                && metadata.nlink() == 0
                && metadata.len() == RAM_BYTES
            {
                files.insert((metadata.dev(), metadata.ino()), metadata.blocks() * 512);
            }
        }
    }
    files.values().sum()
}

/// Returns how many bytes of the host's memory the guest's current RAM takes.
fn present_bytes(guest: &Guest<'_>) -> u64 {
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
fn the_cache_of_both_disks_is_retained_and_memory_stays_within_its_limit() {
    let lab = Lab::new();
    let images = images(&lab);
    let guest = boot(&lab, "both", &images);
    assert_reads(&guest, &images);
    let report = reboot(&guest);
    for (number, read) in READS.iter().enumerate() {
        let kept = report["kept"]["disks"][format!("disk{number}")].as_u64().unwrap_or_default();
        assert!(kept >= read * 9 / 10 * BLOCK, "{report}");
    }
    assert_reads(&guest, &images);
    let counts = [cache_counts(&guest, 0), cache_counts(&guest, 1)];
    assert!(counts[0].served > BLOCKS / 2 && counts[0].refused < READ, "{counts:?}");
    assert!(counts[1].served > READS[1] * 8 / 10 && counts[1].refused < READS[1] / 20, "{counts:?}");
    // The guest uses nearly all of its RAM: the retained cache shrinks accordingly.
    reboot(&guest);
    guest.touch("180M");
    wait_for("the retained cache to shrink", DEADLINE, || {
        (retained_bytes(&guest) + present_bytes(&guest) <= RAM_BYTES * 105 / 100).then_some(())
    });
    guest.verify();
    assert_reads(&guest, &images);
    guest.assert_sound();
}

#[test]
fn a_page_frame_that_one_disk_took_from_the_other_belongs_to_its_last_disk() {
    let lab = Lab::new();
    let images = images(&lab);
    let guest = boot(&lab, "passed", &images);
    // The two disks use the frames in turn; the second one is the last.
    for _ in 0..3 {
        for (number, image) in images.iter().enumerate() {
            assert_eq!(read(&guest, number, 0, BLOCKS), digest(image, 0, BLOCKS));
            guest.ask("drop-caches");
        }
    }
    reboot(&guest);
    assert_eq!(read(&guest, 0, 0, BLOCKS), digest(&images[0], 0, BLOCKS));
    let counts = cache_counts(&guest, 0);
    assert!(counts.refused > BLOCKS / 4, "frames of the second disk were served: {counts:?}");
    assert_eq!(read(&guest, 1, 0, BLOCKS), digest(&images[1], 0, BLOCKS));
    let counts = cache_counts(&guest, 1);
    assert!(
        counts.served > BLOCKS * 8 / 10 && counts.refused < BLOCKS / 20,
        "the second disk lost frames to the first: {counts:?}"
    );
    guest.assert_sound();
}

#[test]
fn when_a_server_dies_its_part_is_freed_and_the_other_server_continues() {
    let lab = Lab::new();
    let images = images(&lab);
    let guest = boot(&lab, "alone", &images);
    assert_reads(&guest, &images);
    reboot(&guest);
    wait_for("unneeded memory to be freed", DEADLINE, || (retained_bytes(&guest) < 40 << 20).then_some(()));
    let before = retained_bytes(&guest);
    kill_watcher(&guest);
    server(&guest, 0).kill().unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["server"]);
    wait_for("the dead server's part to be freed", DEADLINE, || {
        (retained_bytes(&guest) < before - BLOCKS / 2 * BLOCK).then_some(())
    });
    assert_reads(&guest, &images);
    let counts = cache_counts(&guest, 1);
    assert!(counts.served > READS[1] * 8 / 10 && counts.refused < READS[1] / 20, "{counts:?}");
    // One disk has no server when the guest is rebooted: the other disk's cache is retained.
    kill_watcher(&guest);
    server(&guest, 1).kill().unwrap();
    let report = reboot(&guest);
    assert!(report["kept"]["disks"]["disk0"].as_u64().unwrap_or_default() > BLOCKS / 2 * BLOCK, "{report}");
    assert_eq!(report["kept"]["disks"]["disk1"], Value::Null, "{report}");
    assert_reads(&guest, &images);
    guest.assert_sound();
}

#[test]
fn recover_completes_a_killed_reboot_with_both_caches() {
    let lab = Lab::new();
    let images = images(&lab);
    let guest = boot(&lab, "killed", &images);
    let points: Vec<_> = POINTS.iter().filter(|point| point.starts_with("cache.")).collect();
    assert!(!points.is_empty());
    for point in points {
        assert_reads(&guest, &images);
        let boot = guest.boot_id();
        let mut command = lab.command(["reboot", &guest.name]);
        command.env("REKINDLE_FAULT", format!("{point}:kill"));
        let result = lab.finish(command);
        assert_eq!((result.code, guest.status().as_str()), (None, "needs-recovery"), "{point}: {result}");
        guest.rekindle(&["recover"]).ok();
        guest.wait_ready();
        assert_ne!(guest.boot_id(), boot, "{point}");
        assert_reads(&guest, &images);
        let counts = [cache_counts(&guest, 0), cache_counts(&guest, 1)];
        assert!(counts[0].served > BLOCKS / 2 && counts[0].refused < READ, "{point}: {counts:?}");
        assert!(counts[1].served > READS[1] * 8 / 10 && counts[1].refused < READS[1] / 20, "{point}: {counts:?}");
        // Only two generations of memory exist: the current RAM and the retained cache.
        guest.touch("120M");
        wait_for("the retained cache to shrink", DEADLINE, || {
            (retained_bytes(&guest) + present_bytes(&guest) <= RAM_BYTES * 105 / 100).then_some(())
        });
    }
    guest.assert_sound();
}
