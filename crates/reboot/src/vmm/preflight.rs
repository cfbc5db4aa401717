//! The preflight of a hand-over: finds problems before anything is stopped.
//!
//! In a *hand-over*, a guest moves from one QEMU to another. The *preflight* is all checks before the first step that
//! stops or changes anything.

use super::{RUN_STATE_TIMEOUT, RebootMethod, Replacement};
use crate::error::{Problem, RebootError};
use crate::interrupted::end_pause;
use rekindle_memory::directory::{RamDirectory, huge_page_size};
use rekindle_qemu::command::Hardware;
use rekindle_qemu::cpu;
use rekindle_qemu::guest;
use rekindle_qemu::hold::OutputHold;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::ramblock::{MAIN_RAM, RamBlock};
use rekindle_qemu::virtio_queues::{self, VirtioQueue};
use rekindle_vm::definition::uncarriable;
use rekindle_vm::error::LifeError;
use rekindle_vm::hardware;
use rekindle_vm::helpers::{self, Helper};
use rekindle_vm::lock::RunStateLock;
use rustix::fs::statvfs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// How long the source QEMU may take to answer. A QEMU that does not is not asked to hand its guest over.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs all checks that need only the source QEMU, while the guest runs. Returns `false` if the owner of the VM has
/// paused the guest.
///
/// # Errors
/// [`RebootError::Preflight`] with all problems found.
pub(crate) fn check(replacement: &Replacement) -> Result<bool, RebootError> {
    let hardware = &replacement.locked_vm.state.hardware;
    let mut problems: Vec<_> = hardware::missing(hardware, &replacement.binary).into_iter().map(Problem).collect();
    let mut is_running = true;
    if replacement.options.how != RebootMethod::Cold {
        problems.extend(incomplete_memory(replacement));
        problems.extend(uncarriable(&replacement.locked_vm.state.definition).into_iter().map(Problem));
        is_running = check_guest(replacement, &mut problems)?;
    }
    match replacement.options.how {
        RebootMethod::Warm => problems.extend(check_ram_file(&hardware.ram.path, hardware.ram.bytes)),
        RebootMethod::Saved => {
            problems.extend(check_room_to_save(replacement));
            problems.extend(check_room_to_read(&hardware.ram.path));
        }
        RebootMethod::Cold => {}
    }
    for disk in &hardware.disks {
        if let Err(e) = std::fs::metadata(&disk.path) {
            problems.push(Problem(format!(
                "disk {}: {}: {e}; the running QEMU has it open, but another one cannot open it",
                disk.id,
                disk.path.display()
            )));
        }
    }
    problems.extend(missing_boot_files(hardware));
    problems.extend(stopped_disk_servers(replacement));
    if problems.is_empty() {
        return Ok(is_running);
    }
    Err(RebootError::Preflight { name: replacement.name().into(), problems })
}

/// Rejects a VM with a disk server that is stopped, or whose broker is: neither QEMU could use the disk.
fn stopped_disk_servers(replacement: &Replacement) -> Vec<Problem> {
    let stopped = helpers::stopped(&replacement.locked_vm.rundir).unwrap_or_default();
    let servers = stopped.iter().filter(|stopped| matches!(stopped.helper, Helper::Disk(_)));
    servers.map(|server| Problem(server.to_string())).collect()
}

/// Rejects a guest whose memory is still being loaded.
fn incomplete_memory(replacement: &Replacement) -> Option<Problem> {
    if !replacement.locked_vm.rundir.fill().exists() {
        return None;
    }
    let name = replacement.name();
    Some(Problem(format!(
        "its memory is still being loaded from a checkpoint, and another QEMU would read zeros for the missing \
         pages; wait until the load is complete (rekindle show {name}); if its pager has died: rekindle recover {name}"
    )))
}

/// Checks that the guest is in a state in which it can be handed over, and that its network output is not held. Returns
/// whether the guest runs.
fn check_guest(replacement: &Replacement, problems: &mut Vec<Problem>) -> Result<bool, RebootError> {
    // A guest that the VM's owner has paused stays paused. Other pauses must not count as the owner's: wait for a
    // checkpoint that has stopped the guest, and end the pause of an interrupted checkpoint.
    let run_state_lock =
        RunStateLock::acquire(&replacement.locked_vm.rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
    end_pause(&replacement.locked_vm, &replacement.source_qemu)?;
    let mut qmp = replacement.source_qemu.connect(CONNECT_TIMEOUT)?;
    let run_state = guest::run_state(&mut qmp)?;
    drop(run_state_lock);
    if OutputHold::find(&mut qmp)?.is_some() {
        problems.push(Problem(format!(
            "its guest's network output is held until a checkpoint is committed (protect --output-commit), and \
             another QEMU would not hold it; end the protector, then: rekindle release {}",
            replacement.name()
        )));
    }
    match run_state.as_str() {
        "running" => Ok(true),
        "paused" => Ok(false),
        // All other states are errors or transitions.
        _ => {
            problems.push(Problem(format!(
                "its guest is in QEMU's run state `{run_state}`, which cannot be handed over; fix the cause, or use \
                 --how cold"
            )));
            Ok(true)
        }
    }
}

fn check_ram_file(path: &Path, bytes: u64) -> Option<Problem> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.len() == bytes => None,
        Ok(metadata) => Some(Problem(format!("RAM file {} has {} bytes, not {bytes}", path.display(), metadata.len()))),
        Err(e) => Some(Problem(format!(
            "RAM file {}: {e}; without it another QEMU cannot map the guest's RAM; use --how saved",
            path.display()
        ))),
    }
}

/// Returns a problem for each missing boot file. QEMU opens the kernel and the RAM disk whenever it starts, also to
/// load a guest that has already booted.
fn missing_boot_files(hardware: &Hardware) -> Vec<Problem> {
    let mut problems = Vec::new();
    for path in hardware.boot.iter().flat_map(|boot| [Some(&boot.kernel), boot.initrd.as_ref()]).flatten() {
        if let Err(e) = std::fs::metadata(path) {
            problems.push(Problem(format!("{}: {e}; restore the file: QEMU needs it to start", path.display())));
        }
    }
    problems
}

/// Checks that the file system of the guest's RAM has room for a save. A save reads every page of the RAM, and on tmpfs
/// reading a page that was never touched allocates it: without room, the source QEMU is killed. On hugetlbfs all pages
/// were reserved when the file was created.
fn check_room_to_read(path: &Path) -> Option<Problem> {
    let file = std::fs::metadata(path).ok()?;
    let unallocated = file.len().saturating_sub(file.blocks() * 512);
    let directory = path.parent().unwrap_or(Path::new("/"));
    if huge_page_size(directory).ok()?.is_some() {
        return None;
    }
    let free = RamDirectory::at(directory).and_then(|directory| directory.room()).ok()?.free;
    (unallocated > free).then(|| {
        Problem(format!(
            "saving reads all of the guest's RAM, which allocates {} MiB more in {}, where {} MiB are free; use --how \
             warm, or free some space",
            unallocated >> 20,
            directory.display(),
            free >> 20
        ))
    })
}

/// Checks that the disk has room for the saved state. A saved guest takes at most the size of its RAM.
fn check_room_to_save(replacement: &Replacement) -> Option<Problem> {
    let path = super::saved::state_path(replacement);
    let directory = path.parent().unwrap_or(Path::new("/"));
    let bytes = replacement.locked_vm.state.hardware.ram.bytes;
    if let Err(e) = std::fs::create_dir_all(directory) {
        return Some(Problem(format!("cannot save to {}: {e}; set another `save_dir`", directory.display())));
    }
    match statvfs(directory) {
        Ok(stat) => {
            let free = stat.f_bavail * stat.f_frsize;
            (free < bytes).then(|| {
                let (free, bytes) = (free >> 20, bytes >> 20);
                let directory = directory.display();
                Problem(format!(
                    "{directory} has {free} MiB free, but the guest's RAM is {bytes} MiB; free some space, or set \
                     another `save_dir`"
                ))
            })
        }
        Err(e) => Some(Problem(format!("{}: {e}", directory.display()))),
    }
}

/// Compares the processor features that the guest sees in the source QEMU with those in the waiting destination.
///
/// Processor features are not part of the device state: the guest would continue with features that it does not know
/// or, worse, without features that it uses.
///
/// # Errors
/// [`QmpError`] if a QEMU does not answer.
pub(crate) fn compare_cpus(source: &mut Qmp, destination: &mut Qmp) -> Result<Vec<Problem>, QmpError> {
    let (source, destination) = (cpu::features(source)?, cpu::features(destination)?);
    let problem = |(word, in_source, in_destination): (String, u64, u64)| {
        Problem(format!(
            "the guest would see different processor features: {word} is {in_source:#x} in the source QEMU and \
             {in_destination:#x} in the destination; set `cpu` to a model and features that both have"
        ))
    };
    Ok(cpu::differences(&source, &destination).into_iter().map(problem).collect())
}

/// Compares the queues of virtio devices: QEMU cannot load a queue that is larger than the one that it has made. Debian's
/// QEMU 10.0.13 makes all queues with 1,024 entries, QEMU 11.1.3 those of disks with 256.
pub(crate) fn compare_queues(source: &mut Qmp, destination: &mut Qmp) -> Result<Vec<Problem>, QmpError> {
    match (virtio_queues::of_running(source), virtio_queues::of_waiting(destination)) {
        // A QEMU without the unstable command. If a queue is too small, the load fails, and the guest continues in the source.
        (Err(QmpError::Refused { .. }), _) | (_, Err(QmpError::Refused { .. })) => Ok(Vec::new()),
        (source, destination) => Ok(too_small_queues(&source?, &destination?)),
    }
}

/// Returns a problem for each device of the source whose first queue does not fit into that of the destination.
fn too_small_queues(source: &[VirtioQueue], destination: &[VirtioQueue]) -> Vec<Problem> {
    let mut problems = Vec::new();
    // Only the first one of each device. The others of a card depend on what the guest's driver has negotiated: a waiting
    // QEMU still has them in another order.
    for queue in source.iter().filter(|queue| queue.number == 0) {
        let is_same = |other: &&VirtioQueue| (&other.device, other.number) == (&queue.device, queue.number);
        let Some(made) = destination.iter().find(is_same) else { continue };
        if let Some(offered) = made.offered_entries
            && queue.entries > offered
        {
            let device = queue.device.trim_start_matches("/machine/").trim_end_matches("/virtio-backend");
            problems.push(Problem(format!(
                "{device}: its queue 0 has {} entries, and the destination QEMU can load {offered} at most (a live migration fails \
                 too); choose another QEMU with --qemu, or shut the guest down and start it in the new one",
                queue.entries
            )));
        }
    }
    problems
}

/// Compares the RAM blocks of the source QEMU with those of the waiting destination: both must have the same blocks.
/// Only the main RAM, which both QEMUs map, must have the same size: QEMU resizes other blocks that can be resized.
pub(crate) fn compare_blocks(source: &[RamBlock], destination: &[RamBlock]) -> Vec<Problem> {
    let is_missing = |blocks: &[RamBlock], id: &str| !blocks.iter().any(|block| block.id == id);
    let removed = source
        .iter()
        .filter(|block| is_missing(destination, &block.id))
        .map(|block| Problem(format!("the destination QEMU has no RAM block {}: it is a different machine", block.id)));
    let added = destination
        .iter()
        .filter(|block| is_missing(source, &block.id))
        .map(|block| Problem(format!("the source QEMU has no RAM block {}: it is a different machine", block.id)));
    let main_ram_size = |blocks: &[RamBlock]| blocks.iter().find(|block| block.id == MAIN_RAM).map(|block| block.used);
    let resized = match (main_ram_size(source), main_ram_size(destination)) {
        (Some(source), Some(destination)) if source != destination => Some(Problem(format!(
            "the destination QEMU has {destination} bytes of RAM, but the source has {source}: it is a \
             different machine"
        ))),
        _ => None,
    };
    removed.chain(added).chain(resized).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_qemu::virtio_queues::RingAddresses;

    fn queue(device: &str, number: u64, entries: u64, offered_entries: u64) -> VirtioQueue {
        let device = format!("/machine/peripheral/{device}/virtio-backend");
        let rings = RingAddresses { descriptors: 0, available: 0, used: 0 };
        VirtioQueue { device, number, entries, offered_entries: Some(offered_entries), rings }
    }

    #[test]
    fn a_queue_that_the_destination_cannot_load_is_a_problem_once_for_its_device() {
        let source = [queue("disk", 0, 1024, 1024), queue("disk", 1, 1024, 1024), queue("card", 0, 128, 1024)];
        let destination = [queue("disk", 0, 256, 256), queue("disk", 1, 256, 256), queue("card", 0, 256, 256)];
        let problems = too_small_queues(&source, &destination);
        assert_eq!(problems.len(), 1, "{problems:?}: a guest may use fewer entries than QEMU offers");
        let text = &problems[0].0;
        assert!(text.starts_with("peripheral/disk: its queue 0 has 1024 entries") && text.contains("256"), "{text}");
        assert!(too_small_queues(&destination, &source).is_empty());
        // A card with several queues: the waiting QEMU still has its control queue where the guest's third queue is.
        let (several, waiting) = ([queue("card", 2, 256, 256)], [queue("card", 2, 64, 64)]);
        assert!(too_small_queues(&several, &waiting).is_empty());
    }
}
