//! Removal of everything that Rekindle keeps of a VM.

use crate::disks;
use crate::error::LifeError;
use crate::events::{self, EventKind};
use crate::host::Host;
use crate::names::saved_path;
use crate::network;
use crate::overlays;
use crate::phases;
use crate::qemu;
use crate::qemu_user;
use crate::ram;
use crate::rundir::{RunDir, ignore_missing};
use crate::state::State;
use rekindle_memory::directory::RamDirectory;
use std::fs;

/// Removes everything that Rekindle keeps of a VM: QEMUs, disk servers, taps, RAM, run directory. Missing parts are
/// no error, so that it can be repeated after an interruption.
///
/// # Errors
/// [`LifeError`], for the first process, tap or file that cannot be removed.
pub fn clean_up(host: &Host, rundir: &RunDir, state: &State) -> Result<(), LifeError> {
    let failed = |source| LifeError::RunDir { name: rundir.name().into(), source };
    qemu::end_all_qemus(rundir, state)?;
    overlays::remove_fresh(rundir);
    disks::end(rundir, &state.hardware)?;
    network::remove(host, &state.hardware)?;
    if let Some(directory) = state.hardware.ram.path.parent().filter(|path| path.exists()) {
        for (path, _) in state.hardware.ram_files() {
            RamDirectory::at(directory)?.remove(&ram::file_id(&path))?;
        }
    }
    // The disk servers have ended and no longer record writes: the VM's candidates can never be used again.
    ignore_missing(fs::remove_dir_all(phases::directory(host, rundir, &state.definition))).map_err(failed)?;
    ignore_missing(fs::remove_file(saved_path(host, rundir, &state.definition))).map_err(failed)?;
    if state.hardware.foreign.is_none() {
        // Late, because a server of files may not answer.
        qemu_user::withdraw(host, rundir.name(), &state.hardware);
    }
    events::record(rundir, EventKind::Removed);
    rundir.remove().map_err(failed)?;
    host.release_ram();
    Ok(())
}
