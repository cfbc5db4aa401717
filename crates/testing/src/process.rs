//! Lists the open files of processes, so that a test can check that none is left open.

use rekindle_kernel::process::Process;
use rekindle_kernel::{descriptor, tap};
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;

/// Returns the open files of a process by descriptor.
pub fn descriptors(pid: u32) -> BTreeMap<u32, String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let descriptor = |entry: fs::DirEntry| {
        let file = fs::read_link(entry.path()).ok()?;
        Some((entry.file_name().to_str()?.parse().ok()?, file.to_string_lossy().into_owned()))
    };
    entries.filter_map(descriptor).collect()
}

/// Returns, of each queue of a QEMU's taps, whether it is attached.
pub fn attached_queues(qemu: Process) -> Vec<bool> {
    let files = descriptors(qemu.pid).into_iter().filter(|(_, file)| file == "/dev/net/tun");
    let is_attached = |number: u32| {
        let queue = descriptor::take(qemu, number.cast_signed()).unwrap();
        !tap::queue(queue.as_fd()).unwrap().is_detached
    };
    files.map(|(number, _)| is_attached(number)).collect()
}

/// Counts the open files of a process by name, except sockets, which change. Descriptor numbers are left out, because
/// QEMU reopens its eventfds when a guest resumes.
pub fn open_files(pid: u32) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for file in descriptors(pid).into_values().filter(|file| !file.starts_with("socket:")) {
        *counts.entry(file).or_default() += 1;
    }
    counts
}
