//! The RAM of a VM for a new boot: emptied, in addition to the retained cache, or that of a QEMU that waits.

use crate::disks::{self, Kept};
use crate::fault;
use crate::rundir::RunDir;
use rekindle_memory::directory::{PreviousRam, RamDirectory, RamError};
use rekindle_qemu::command::Hardware;
use std::fs;
use std::io;
use std::path::Path;

/// Gives a VM whose QEMUs have ended RAM for a new start in the place of what it has: see [`RamDirectory::renew`].
///
/// # Errors
/// [`RamError`].
pub fn renew(rundir: &RunDir, hardware: &Hardware) -> Result<(), RamError> {
    forget_fill(rundir);
    let _ = disks::release_memory(rundir, hardware, false);
    let ram = directory(hardware)?;
    hardware.ram_files().into_iter().try_for_each(|(path, bytes)| ram.renew(&name(&path), bytes).map(drop))
}

/// As [`renew`], but its disks' servers retain their cache in the previous RAM, which is freed as the guest uses the
/// new one. Returns what is retained: nothing if there is no room for both.
///
/// # Errors
/// [`RamError`].
pub fn renew_keeping_cache(rundir: &RunDir, hardware: &Hardware) -> Result<Option<Kept>, RamError> {
    forget_fill(rundir);
    if let Some(kept) = disks::release_memory(rundir, hardware, true) {
        let ram = directory(hardware)?;
        let mut files = hardware.ram_files().into_iter();
        match files.try_for_each(|(path, bytes)| ram.renew_keeping_cache(&name(&path), bytes).map(drop)) {
            Ok(()) => {
                fault::point("cache.renew.memory", None, None);
                return Ok(Some(kept));
            }
            Err(e) => tracing::warn!("nothing of the guest's cache is retained: {e}"),
        }
    }
    renew(rundir, hardware).map(|()| None)
}

/// Ends the fill of the previous RAM by a restore.
fn forget_fill(rundir: &RunDir) {
    match fs::remove_file(rundir.fill()) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => tracing::warn!("{}: {e}", rundir.fill().display()),
        Ok(()) => disks::filled(rundir),
    }
}

fn directory(hardware: &Hardware) -> Result<RamDirectory, RamError> {
    RamDirectory::at(hardware.ram.path.parent().unwrap_or(Path::new("/")))
}

/// The name under which [`RamDirectory`] knows a RAM file.
#[must_use]
pub fn name(path: &Path) -> String {
    path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Makes RAM for a QEMU that is to wait while another one runs the guest: nothing is promised to it. Returns the
/// machine that has it.
///
/// # Errors
/// [`RamError`].
pub fn waiting(hardware: &Hardware) -> Result<Hardware, RamError> {
    forget_waiting(hardware)?;
    let ram = directory(hardware)?;
    for (path, bytes) in hardware.ram_files() {
        ram.create_waiting(&name(&path), bytes)?;
    }
    let mut waits = hardware.clone();
    waits.ram.path = ram.waiting(&name(&hardware.ram.path));
    Ok(waits)
}

/// Whether there is room for all of it in addition to everything that is promised now.
#[must_use]
pub fn has_room(hardware: &Hardware) -> bool {
    let bytes = hardware.ram_files().iter().map(|(_, bytes)| bytes).sum();
    directory(hardware).is_ok_and(|ram| ram.check_room(bytes).is_ok())
}

/// Nothing has come of that. What is gone already is no error.
///
/// # Errors
/// [`RamError`].
pub fn forget_waiting(hardware: &Hardware) -> Result<(), RamError> {
    let Ok(ram) = directory(hardware) else { return Ok(()) };
    hardware.ram_files().into_iter().try_for_each(|(path, _)| ram.remove_waiting(&name(&path)))
}

/// Gives a VM whose previous QEMU has ended the RAM that waits, in place of its own: see [`RamDirectory::replace`].
/// Returns what can be freed later.
///
/// # Errors
/// [`RamError`].
pub fn replace(rundir: &RunDir, hardware: &Hardware) -> Result<Vec<PreviousRam>, RamError> {
    forget_fill(rundir);
    let _ = disks::release_memory(rundir, hardware, false);
    let ram = directory(hardware)?;
    let replaced = hardware.ram_files().into_iter().map(|(path, bytes)| ram.replace(&name(&path), bytes));
    replaced.filter_map(Result::transpose).collect()
}
