//! The preflight of a hand-over: finds problems before anything is stopped.

use super::{RUN_STATE_TIMEOUT, RebootMethod, Replacement};
use crate::error::{Problem, RebootError};
use crate::interrupted::end_pause;
use rekindle_memory::directory::{RamDirectory, huge_page_size};
use rekindle_qemu::cpu;
use rekindle_qemu::guest;
use rekindle_qemu::hold::OutputHold;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::ramblock::{MAIN_RAM, RamBlock};
use rekindle_vm::definition::uncarriable;
use rekindle_vm::error::LifeError;
use rekindle_vm::hardware;
use rekindle_vm::lock::RunStateLock;
use rustix::fs::statvfs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// QEMU run states in which a guest can be handed over, with `true` if the guest runs in that state. All other states
/// are errors or transitions.
const TRANSFERABLE_STATES: &[(&str, bool)] = &[("running", true), ("paused", false)];

/// Runs all checks that need only the source QEMU, while the guest runs. Returns `false` if the owner of the VM has
/// paused the guest.
///
/// # Errors
/// [`RebootError::Preflight`] with all problems found.
pub(crate) fn check(replacement: &Replacement) -> Result<bool, RebootError> {
    let mut problems = Vec::new();
    let state = &replacement.held.state;
    problems.extend(hardware::missing(&state.hardware, &replacement.binary).into_iter().map(Problem));
    let mut running = true;
    if replacement.options.how != RebootMethod::Cold && replacement.held.rundir.fill().exists() {
        let name = replacement.name();
        problems.push(Problem(format!(
            "its memory is still being loaded from a checkpoint, and another QEMU would read zeros for the missing \
             pages; wait until the load is complete (rekindle show {name}); if its pager has died: rekindle recover \
             {name}"
        )));
    }
    if replacement.options.how != RebootMethod::Cold {
        problems.extend(uncarriable(&state.definition).into_iter().map(Problem));
        // A guest that the VM's owner has paused stays paused. Other pauses must not count as the owner's: wait for a
        // checkpoint that has stopped the guest, and end the pause of an interrupted checkpoint.
        let quiet = RunStateLock::acquire(&replacement.held.rundir, RUN_STATE_TIMEOUT).map_err(LifeError::from)?;
        end_pause(&replacement.held, &replacement.source_qemu)?;
        let mut qmp = replacement.source_qemu.connect(Duration::from_secs(10))?;
        let run_state = guest::run_state(&mut qmp)?;
        drop(quiet);
        if OutputHold::find(&mut qmp)?.is_some() {
            problems.push(Problem(format!(
                "its guest's network output is held until a checkpoint is committed (protect --output-commit), and \
                 another QEMU would not hold it; end the protector, then: rekindle release {}",
                replacement.name()
            )));
        }
        match TRANSFERABLE_STATES.iter().find(|(name, _)| *name == run_state) {
            Some((_, runs)) => running = *runs,
            None => problems.push(Problem(format!(
                "its guest is in QEMU's run state `{run_state}`, which cannot be handed over; fix the cause, or use \
                 --how cold"
            ))),
        }
    }
    match replacement.options.how {
        RebootMethod::Warm => problems.extend(ram_file(&state.hardware.ram.path, state.hardware.ram.bytes)),
        RebootMethod::Saved => {
            problems.extend(room_to_save(replacement));
            problems.extend(room_to_read(&state.hardware.ram.path));
        }
        RebootMethod::Cold => {}
    }
    for disk in &state.hardware.disks {
        if let Err(e) = std::fs::metadata(&disk.path) {
            problems.push(Problem(format!(
                "disk {}: {}: {e}; the running QEMU has it open, but another one cannot open it",
                disk.id,
                disk.path.display()
            )));
        }
    }
    problems.extend(boot_files(replacement));
    if problems.is_empty() {
        Ok(running)
    } else {
        Err(RebootError::Preflight { name: replacement.name().into(), problems })
    }
}

fn ram_file(path: &Path, bytes: u64) -> Option<Problem> {
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
fn boot_files(replacement: &Replacement) -> Vec<Problem> {
    let Some(boot) = &replacement.held.state.hardware.boot else { return Vec::new() };
    let files = [Some(&boot.kernel), boot.initrd.as_ref()];
    let missing = files.into_iter().flatten().filter_map(|path| std::fs::metadata(path).err().map(|e| (path, e)));
    missing
        .map(|(path, e)| Problem(format!("{}: {e}; restore the file: QEMU needs it to start", path.display())))
        .collect()
}

/// Checks that the file system of the guest's RAM has room for a save. A save reads every page of the RAM, and on tmpfs
/// reading a page that was never touched allocates it: without room, the source QEMU is killed. On hugetlbfs all pages
/// were reserved when the file was created.
fn room_to_read(path: &Path) -> Option<Problem> {
    let missing = std::fs::metadata(path).ok().map(|file| file.len().saturating_sub(file.blocks() * 512))?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    if huge_page_size(directory).ok()?.is_some() {
        return None;
    }
    let free = RamDirectory::at(directory).and_then(|directory| directory.room()).ok()?.free;
    (missing > free).then(|| {
        Problem(format!(
            "saving reads all of the guest's RAM, which allocates {} MiB more in {}, where {} MiB are free; use --how \
             warm, or free some space",
            missing >> 20,
            directory.display(),
            free >> 20
        ))
    })
}

/// Checks that the disk has room for the saved state. A saved guest takes at most the size of its RAM.
fn room_to_save(replacement: &Replacement) -> Option<Problem> {
    let path = super::saved::path(replacement);
    let directory = path.parent().unwrap_or(Path::new("/"));
    let bytes = replacement.held.state.hardware.ram.bytes;
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
    let problem = |(word, value, now): (String, u64, u64)| {
        Problem(format!(
            "the guest would see different processor features: {word} is {value:#x} in the source QEMU and {now:#x} \
             in the destination; set `cpu` to a model and features that both have"
        ))
    };
    Ok(cpu::differences(&source, &destination).into_iter().map(problem).collect())
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
    let size = |blocks: &[RamBlock]| blocks.iter().find(|block| block.id == MAIN_RAM).map(|block| block.used);
    let resized = match (size(source), size(destination)) {
        (Some(source), Some(destination)) if source != destination => Some(Problem(format!(
            "the destination QEMU has {destination} bytes of RAM, but the source has {source}: it is a different machine"
        ))),
        _ => None,
    };
    removed.chain(added).chain(resized).collect()
}
