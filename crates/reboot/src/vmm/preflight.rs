//! What speaks against replacing a VMM, found before anything is stopped.

use super::recover::end_pause;
use super::{Change, How, RUN_STATE_PATIENCE, RebootError};
use rekindle_memory::directory::{RamDirectory, huge_page_size};
use rekindle_qemu::cpu;
use rekindle_qemu::hold::Hold;
use rekindle_qemu::qmp::Qmp;
use rekindle_vm::definition::uncarriable;
use rekindle_vm::lock::RunState;
use rekindle_vm::{hardware, life};
use rustix::fs::statvfs;
use serde::Serialize;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// One thing that speaks against it, as a sentence that names the thing and the mend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Problem(pub String);

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Run states in which a guest can be carried over. Others are QEMU's own troubles or moments between.
const CARRIABLE: &[(&str, bool)] = &[("running", true), ("paused", false)];

/// Check everything that can be checked with the old QEMU running and no new one started. Gives whether the guest
/// runs (or was paused by its owner).
///
/// # Errors
/// [`RebootError::Preflight`] with all problems found.
pub(crate) fn check(change: &Change) -> Result<bool, RebootError> {
    let mut problems = Vec::new();
    let state = &change.held.state;
    problems.extend(hardware::missing(&state.hardware, &change.binary).into_iter().map(Problem));
    let mut running = true;
    if change.options.how != How::Cold && change.held.rundir.fill().exists() {
        let name = change.name();
        problems.push(Problem(format!(
            "its memory is still being brought from a checkpoint, and a new QEMU would find zeroes for what is missing; wait \
             until that is done (rekindle show {name}), or see that its pager runs: rekindle recover {name}"
        )));
    }
    if change.options.how != How::Cold {
        problems.extend(uncarriable(&state.definition).into_iter().map(Problem));
        // Not while a checkpoint keeps it stopped, nor as somebody left it who was killed meanwhile: neither is its owner's pause,
        // and a guest that was paused by its owner stays so.
        let quiet = RunState::acquire(&change.held.rundir, RUN_STATE_PATIENCE).map_err(life::LifeError::from)?;
        end_pause(&change.held, &change.old)?;
        let mut qmp = change.old.connect(Duration::from_secs(10))?;
        let run_state = life::run_state(&mut qmp)?;
        drop(quiet);
        if Hold::found(&mut qmp)?.is_some() {
            problems.push(Problem(format!(
                "what its guest sends is held until a checkpoint counts (protect --output-commit), and a new QEMU would not hold it; end \
                 the protector, and: rekindle release {}",
                change.name()
            )));
        }
        match CARRIABLE.iter().find(|(name, _)| *name == run_state) {
            Some((_, runs)) => running = *runs,
            None => problems.push(Problem(format!(
                "its guest is in QEMU's run state `{run_state}`, which cannot be carried over; mend what caused it, or \
                 use --how cold"
            ))),
        }
    }
    match change.options.how {
        How::Warm => problems.extend(ram_file(&state.hardware.ram.path, state.hardware.ram.bytes)),
        How::Saved => {
            problems.extend(room_to_save(change));
            problems.extend(room_to_read(&state.hardware.ram.path));
        }
        How::Cold => {}
    }
    for disk in &state.hardware.disks {
        if let Err(e) = std::fs::metadata(&disk.path) {
            problems.push(Problem(format!(
                "disk {}: {}: {e}; the old QEMU still has it open, a new one could not open it",
                disk.id,
                disk.path.display()
            )));
        }
    }
    problems.extend(boot_files(change));
    if problems.is_empty() { Ok(running) } else { Err(RebootError::Preflight { name: change.name().into(), problems }) }
}

fn ram_file(path: &Path, bytes: u64) -> Option<Problem> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.len() == bytes => None,
        Ok(metadata) => Some(Problem(format!("RAM file {} has {} bytes, not {bytes}", path.display(), metadata.len()))),
        Err(e) => Some(Problem(format!(
            "RAM file {}: {e}; the guest's RAM has no name any more and cannot be given to a new QEMU; use --how saved",
            path.display()
        ))),
    }
}

/// QEMU wants the kernel and the RAM disk at its start, also when it takes a guest over that has long booted.
fn boot_files(change: &Change) -> Vec<Problem> {
    let Some(boot) = &change.held.state.hardware.boot else { return Vec::new() };
    let files = [Some(&boot.kernel), boot.initrd.as_ref()];
    let missing = files.into_iter().flatten().filter_map(|path| std::fs::metadata(path).err().map(|e| (path, e)));
    missing.map(|(path, e)| Problem(format!("{}: {e}; put it back", path.display()))).collect()
}

/// Saving reads every page of the guest's RAM, and on a tmpfs a page that was never touched is made when it is read: if
/// there is no room for it, the old QEMU is killed. On hugetlbfs each page was set aside when the file was made.
fn room_to_read(path: &Path) -> Option<Problem> {
    let missing = std::fs::metadata(path).ok().map(|file| file.len().saturating_sub(file.blocks() * 512))?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    if huge_page_size(directory).ok()?.is_some() {
        return None;
    }
    let (free, _) = RamDirectory::at(directory).and_then(|directory| directory.room()).ok()?;
    (missing > free).then(|| {
        Problem(format!(
            "saving reads all of the guest's RAM, which takes {} MiB more in {}; {} MiB are free there; use --how warm, or \
             make room",
            missing >> 20,
            directory.display(),
            free >> 20
        ))
    })
}

/// A saved guest takes at most its RAM on disk.
fn room_to_save(change: &Change) -> Option<Problem> {
    let path = super::saved::path(change);
    let directory = path.parent().unwrap_or(Path::new("/"));
    let bytes = change.held.state.hardware.ram.bytes;
    if let Err(e) = std::fs::create_dir_all(directory) {
        return Some(Problem(format!("cannot save into {}: {e}; name another `save_dir`", directory.display())));
    }
    match statvfs(directory) {
        Ok(stat) => {
            let free = stat.f_bavail * stat.f_frsize;
            (free < bytes).then(|| {
                let (free, bytes) = (free >> 20, bytes >> 20);
                let directory = directory.display();
                Problem(format!(
                    "{directory} has {free} MiB free, the guest's RAM is {bytes} MiB; make room, or name another \
                     `save_dir`"
                ))
            })
        }
        Err(e) => Some(Problem(format!("{}: {e}", directory.display()))),
    }
}

/// Compare what the guest sees of its processors in the old QEMU and in the new one, which waits.
///
/// The device state does not hold it: a guest would go on with features that it was never told of or, worse, without
/// some that it uses.
///
/// # Errors
/// When a QEMU does not answer.
pub(crate) fn compare_cpus(old: &mut Qmp, new: &mut Qmp) -> Result<Vec<Problem>, RebootError> {
    let (old, new) = (cpu::features(old)?, cpu::features(new)?);
    let problem = |(word, value, now): (String, u64, u64)| {
        Problem(format!(
            "the guest would see other processor features: {word} is {value:#x} in the old QEMU and {now:#x} in the new one; \
             define `cpu` with a model and features that both have"
        ))
    };
    Ok(cpu::differences(&old, &new).into_iter().map(problem).collect())
}
