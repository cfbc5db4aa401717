//! Saves one candidate, the snapshot of a guest at a phase of its boot: checks whether the phase may be saved, takes
//! the snapshot, and replaces the previous candidate.

use super::candidates::{self, CandidateInfo, one_line};
use rekindle_protect::candidate;
use rekindle_protect::target::Target;
use rekindle_qemu::command::Hardware;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::Vmm;
use rekindle_store::StoreUrl;
use rekindle_vm::definition::uncarriable;
use rekindle_vm::error::LifeError;
use rekindle_vm::host::Host;
use rekindle_vm::locked_vm::LockedVm;
use rekindle_vm::phases;
use rekindle_vm::rundir::{RunDir, sync_directory};
use rekindle_vm::state::State;
use serde_json::Value;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for another operation on the VM, and then as long again for the guest's memory to be loaded.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Result of saving a candidate.
pub(super) enum SaveOutcome {
    Saved {
        stopped_us: u64,
        bytes: u64,
    },
    /// A usable candidate exists already, so none was taken.
    Existing,
}

/// Saves a candidate of `phase`, unless a usable one exists. The guest of `vmm` must be in that phase.
pub(super) fn save(host: &Host, rundir: &RunDir, vmm: &Vmm, phase: &str) -> Result<SaveOutcome, String> {
    let locked_vm = lock_vm(host, rundir)?;
    let state = &locked_vm.state;
    check_savable(state, vmm, phase)?;
    if candidates::find(host, rundir, state, phase).usable.is_ok() {
        return Ok(SaveOutcome::Existing);
    }
    wait_until_filled(rundir)?;
    let directory = phases::directory(host, rundir, &state.definition);
    let (path, new_path) = (directory.join(phase), directory.join(format!("{phase}.new")));
    let failed = |path: &Path, e: io::Error| format!("{}: {e}", path.display());
    DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(|e| failed(&directory, e))?;
    // A process that was killed may have left this directory.
    remove_if_exists(&new_path).map_err(|e| failed(&new_path, e))?;
    let target = Target::of(host, rundir.name()).map_err(|e| one_line(&e))?;
    let info = || CandidateInfo::record(rundir, &state.hardware).map(|info| candidates::to_json(&info));
    let taken = candidate::take(&target, &StoreUrl::Directory(new_path.clone()), info).map_err(|e| {
        let _ = remove_if_exists(&new_path);
        one_line(&e)
    })?;
    // Between the two steps there is no candidate.
    remove_if_exists(&path)
        .and_then(|()| fs::rename(&new_path, &path))
        .and_then(|()| sync_directory(&directory))
        .map_err(|e| failed(&path, e))?;
    Ok(SaveOutcome::Saved { stopped_us: taken.stopped_us, bytes: taken.bytes })
}

/// Checks whether a candidate of this phase may be saved.
///
/// # Errors
/// The reason why it may not.
fn check_savable(state: &State, vmm: &Vmm, phase: &str) -> Result<(), String> {
    if state.vmm.as_ref() != Some(vmm) {
        return Err("another QEMU runs the guest now".into());
    }
    if !state.definition.phase.save.iter().any(|name| name == phase) {
        return Err("the VM's definition does not name it under phase.save".into());
    }
    if let Some(why) = super::why_unfit(&state.hardware) {
        return Err(why);
    }
    if let Some(why) = uncarriable(&state.definition).into_iter().next() {
        return Err(why);
    }
    match untracked_image(vmm, &state.hardware).map_err(|e| one_line(&e))? {
        Some(file) => {
            Err(format!("QEMU has {file} open for the guest through `qemu_args`, so writes to it are not recorded"))
        }
        None => Ok(()),
    }
}

/// Waits until the guest's memory, if it is loaded from a checkpoint, is complete.
fn wait_until_filled(rundir: &RunDir) -> Result<(), String> {
    let deadline = Instant::now() + BUSY_TIMEOUT;
    while rundir.fill().exists() {
        if Instant::now() > deadline {
            return Err("the guest's memory is still being loaded from a checkpoint".into());
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Returns an image that QEMU has open and can write and that is not a `[[disk]]`.
fn untracked_image(vmm: &Vmm, hardware: &Hardware) -> Result<Option<String>, QmpError> {
    let mut qmp = Qmp::connect(&vmm.directory().qmp(), BUSY_TIMEOUT)?;
    let devices: Vec<Value> = qmp.execute("query-block", ())?;
    let mut files = devices.iter().filter_map(|device| device.pointer("/inserted/file").and_then(Value::as_str));
    let is_known = |file: &str| hardware.disks.iter().any(|disk| disk.readonly && disk.path == Path::new(file));
    Ok(files.find(|file| !is_known(file)).map(str::to_owned))
}

/// Locks the VM. Waits, because the operation that started the guest may still hold the lock for a moment.
fn lock_vm(host: &Host, rundir: &RunDir) -> Result<LockedVm, String> {
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        match LockedVm::lock(host, rundir.name(), phases::SAVING) {
            Err(LifeError::Lock(_)) if Instant::now() < deadline => thread::sleep(POLL_INTERVAL),
            locked_vm => return locked_vm.map_err(|e| one_line(&e)),
        }
    }
}

fn remove_if_exists(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
