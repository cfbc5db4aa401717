//! A guest whose page cache is damaged before a reboot with a warm cache gets no damaged block. The whole experiment is
//! `make bench TOPIC=faults` (docs/fault-experiment.md).

use crate::common::guest::Guest;
use crate::common::{DEADLINE, Lab, wait_for};
use rekindle_disk::control::Control;
use rekindle_disk::retained::CacheCounts;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 2048;

/// Returns the content of block `n` of the disk. All blocks are different.
fn block(n: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    fastrand::Rng::with_seed(n).fill(&mut block);
    block
}

fn image(lab: &Lab) -> PathBuf {
    let path = lab.path("disk.raw");
    let file = File::create(&path).unwrap();
    for n in 0..BLOCKS {
        file.write_all_at(&block(n), n * BLOCK as u64).unwrap();
    }
    path
}

/// Computes the guest's expected reply to `read` of the whole disk.
fn digest(image: &Path) -> String {
    let content = fs::read(image).unwrap();
    assert_eq!(content.len() as u64, BLOCKS * BLOCK as u64);
    let digest = content
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |digest, byte| (digest ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    format!("{digest:016x}")
}

fn ram(guest: &Guest<'_>) -> File {
    let state: Value = serde_json::from_slice(&fs::read(guest.file("state.json")).unwrap()).unwrap();
    let path = state["hardware"]["ram"]["path"].as_str().expect("a path");
    File::options().read(true).write(true).open(path).unwrap()
}

/// Flips a bit in all frames that hold a block whose number is a multiple of `every`, and returns the number of such
/// blocks. Several frames can hold one block: a frame that the guest has freed keeps its content until it is reused.
fn damage(guest: &Guest<'_>, every: u64, rng: &mut fastrand::Rng) -> u64 {
    let ram = ram(guest);
    let known: HashMap<Vec<u8>, u64> = (0..BLOCKS).map(|n| (block(n), n)).collect();
    let mut frame = vec![0; BLOCK];
    let mut held = HashSet::new();
    for at in (0..ram.metadata().unwrap().len()).step_by(BLOCK) {
        ram.read_exact_at(&mut frame, at).unwrap();
        let Some(n) = known.get(&frame) else { continue };
        held.insert(*n);
        if n % every == 0 {
            let byte = rng.usize(0..BLOCK);
            ram.write_all_at(&[frame[byte] ^ 1 << rng.u8(0..8)], at + byte as u64).unwrap();
        }
    }
    assert!(held.len() as u64 > BLOCKS * 9 / 10, "the guest has cached only {} blocks", held.len());
    held.into_iter().filter(|n| n % every == 0).count() as u64
}

fn cache_counts(guest: &Guest<'_>) -> CacheCounts {
    let status = Control::connect(&guest.file("disk-disk0.control")).unwrap().status().unwrap();
    assert!(!status.unchecked, "a server without its check is for the experiment only");
    status.retained.map(|(_, counts)| counts).or(status.emptied).expect("a retained cache")
}

#[test]
fn damaged_frames_of_the_page_cache_are_not_given_to_the_next_guest() {
    let lab = Lab::new();
    let path = image(&lab);
    let section = format!("[[disk]]\npath = {path:?}\nserver = true\n");
    let guest = lab.vm("damaged").section(&section).boot(&[]);
    let whole = digest(&path);
    let read = format!("read vda 0 {BLOCKS}");
    let mut rng = fastrand::Rng::with_seed(5);
    // First reboot by a command, then because the guest has panicked.
    for panics in [false, true] {
        assert_eq!(guest.ask(&read), whole);
        let boot = guest.boot_id();
        let damaged = damage(&guest, 4, &mut rng);
        assert!(damaged > BLOCKS / 8, "{damaged}");
        if panics {
            let qemu = guest.only_qemu().process;
            guest.send("panic");
            wait_for("another QEMU", DEADLINE, || (!qemu.is_alive() && !guest.qemus().is_empty()).then_some(()));
            guest.wait_ready();
        } else {
            let report = guest.rekindle(&["--json", "reboot", "--how", "warm-cache"]).ok().json();
            assert!(report["kept"]["bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{report}");
            guest.wait_ready();
        }
        assert_ne!(guest.boot_id(), boot, "it was booted");
        // Every block is right. A block comes from the retained cache if it matches the disk.
        assert_eq!(guest.ask(&read), whole, "panics: {panics}");
        let counts = cache_counts(&guest);
        assert!(counts.refused >= damaged, "{damaged} were damaged: {counts:?}");
        assert!(counts.served > BLOCKS / 2, "few of the other blocks are served: {counts:?}");
    }
}
