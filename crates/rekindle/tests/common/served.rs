//! Disks served by Rekindle's disk server.

use super::{Guest, Lab};
use rekindle_disk::control::Control;
use rekindle_disk::engine::command::Status;
use rekindle_kernel::process::Process;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const BLOCK: u64 = 4096;
/// Size of the disk, in blocks.
pub const BLOCKS: u64 = 4096;
/// Number of blocks that the guest reads: they fit into its memory.
pub const READ: u64 = 2048;

/// Creates an image whose blocks are all different.
pub fn image(lab: &Lab, name: &str) -> PathBuf {
    let path = lab.path(name);
    let file = File::create(&path).unwrap();
    let mut block = [0; BLOCK as usize];
    for n in 0..BLOCKS {
        fastrand::Rng::with_seed(n).fill(&mut block);
        file.write_all_at(&block, n * BLOCK).unwrap();
    }
    path
}

pub fn section(image: &Path, more: &str) -> String {
    format!("[[disk]]\npath = {image:?}\nserver = true\n{more}")
}

/// Computes the guest's expected reply to `read`.
pub fn digest(image: &Path, first: u64, count: u64) -> String {
    let mut content = vec![0; (count * BLOCK) as usize];
    File::open(image).unwrap().read_exact_at(&mut content, first * BLOCK).unwrap();
    let digest = content
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |digest, byte| (digest ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    format!("{digest:016x}")
}

pub fn read(guest: &Guest<'_>, first: u64, count: u64) -> String {
    guest.ask(&format!("read vda {first} {count}"))
}

/// Asserts that the guest runs with its memory, and with the start of its disk. `boot`: the ID of its boot.
#[track_caller]
pub fn assert_kept(guest: &Guest<'_>, image: &Path, boot: &str) {
    const COMPARED: u64 = 64;
    guest.wait_ready();
    assert_eq!(guest.boot_id(), boot, "another boot of the guest");
    guest.verify();
    guest.ask("drop-caches");
    assert_eq!(read(guest, 0, COMPARED), digest(image, 0, COMPARED));
}

pub fn status(guest: &Guest<'_>) -> Status {
    Control::connect(&guest.file("disk-disk0.control")).unwrap().status().unwrap()
}

/// Finds the server of the guest's first disk.
pub fn server(guest: &Guest<'_>) -> Option<Process> {
    let mark = format!("--control={}", guest.file("disk-disk0.control").display());
    super::observe::with_argument_containing(&mark).unwrap().into_iter().find(Process::is_alive)
}

/// Finds the `rekindle watch` of a VM.
pub fn watcher(guest: &Guest<'_>) -> Option<Process> {
    watchers(guest).into_iter().next()
}

/// Finds all `rekindle watch` processes of a VM: the one of a previous VM of the same name may be about to end.
fn watchers(guest: &Guest<'_>) -> Vec<Process> {
    let mut found = super::observe::with_argument_containing("watch").unwrap();
    found.retain(|process| {
        let line = fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
        let root = fs::read(format!("/proc/{}/environ", process.pid)).unwrap_or_default();
        let root = String::from_utf8_lossy(&root).into_owned();
        line.ends_with(format!("watch\0{}\0", guest.name).as_bytes())
            && root.contains(guest.lab.run_root().to_str().unwrap())
    });
    found
}

/// Kills the VM's `rekindle watch`, so that no helper is restarted until `recover`.
pub fn kill_watcher(guest: &Guest<'_>) {
    for watcher in watchers(guest) {
        watcher.kill().unwrap();
        assert!(watcher.wait_end(Duration::from_secs(10)).unwrap());
    }
}

/// Kills the server of the first disk, which is not restarted until `recover`.
pub fn kill_server(guest: &Guest<'_>) -> Process {
    kill_watcher(guest);
    let server = server(guest).expect("a server");
    server.kill().unwrap();
    assert!(server.wait_end(Duration::from_secs(10)).unwrap());
    server
}
