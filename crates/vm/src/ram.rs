//! The RAM of a VM for a new boot: emptied, or separate from the retained cache, or taken from a QEMU that waits.

use crate::disks::{self, RetainedCache};
use crate::fault;
use crate::rundir::RunDir;
use rekindle_memory::directory::{PreviousRam, RamDirectory, RamError};
use rekindle_qemu::command::Hardware;
use std::fs;
use std::io;
use std::path::Path;

/// Replaces the RAM of a VM whose QEMUs have ended by empty RAM: see [`RamDirectory::renew`].
///
/// # Errors
/// [`RamError`], when there is not enough memory or a file cannot be made.
pub fn renew(rundir: &RunDir, hardware: &Hardware) -> Result<(), RamError> {
    end_fill(rundir);
    disks::release_memory(rundir, hardware);
    let ram = directory(hardware)?;
    hardware.ram_files().into_iter().try_for_each(|(path, bytes)| ram.renew(&file_id(&path), bytes).map(drop))
}

/// As [`renew`], but the disk servers keep their retained cache in the previous RAM, which is freed while the guest
/// uses the new RAM. Returns what is retained; `None` if there is no room for both.
///
/// # Errors
/// [`RamError`], as for [`renew`].
pub fn renew_keeping_cache(rundir: &RunDir, hardware: &Hardware) -> Result<Option<RetainedCache>, RamError> {
    end_fill(rundir);
    if let Some(cache) = disks::retain_caches(rundir, hardware) {
        let ram = directory(hardware)?;
        let mut files = hardware.ram_files().into_iter();
        match files.try_for_each(|(path, bytes)| ram.renew_keeping_cache(&file_id(&path), bytes).map(drop)) {
            Ok(()) => {
                fault::point("cache.renew.memory", None, None);
                return Ok(Some(cache));
            }
            Err(e) => tracing::warn!("nothing of the guest's cache is retained: {e}"),
        }
    }
    renew(rundir, hardware).map(|()| None)
}

/// Ends the fill of the previous RAM, if a restore had not completed it.
fn end_fill(rundir: &RunDir) {
    match fs::remove_file(rundir.fill()) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => tracing::warn!("{}: {e}", rundir.fill().display()),
        Ok(()) => disks::notify_filled(rundir),
    }
}

fn directory(hardware: &Hardware) -> Result<RamDirectory, RamError> {
    RamDirectory::at(hardware.ram.path.parent().unwrap_or(Path::new("/")))
}

/// Returns the name by which [`RamDirectory`] knows a RAM file.
#[must_use]
pub fn file_id(path: &Path) -> String {
    path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Makes RAM for a QEMU that will wait while another QEMU runs the guest. No RAM is reserved for it. Returns the
/// hardware with the new RAM file names.
///
/// # Errors
/// [`RamError`], when a file cannot be made.
pub fn create_waiting(hardware: &Hardware) -> Result<Hardware, RamError> {
    remove_waiting(hardware)?;
    let ram = directory(hardware)?;
    for (path, bytes) in hardware.ram_files() {
        ram.create_waiting(&file_id(&path), bytes)?;
    }
    let mut waiting = hardware.clone();
    waiting.ram.path = ram.waiting(&file_id(&hardware.ram.path));
    Ok(waiting)
}

/// Returns whether there is room for all of the VM's RAM in addition to everything that is reserved now.
#[must_use]
pub fn has_room(hardware: &Hardware) -> bool {
    let bytes = hardware.ram_files().iter().map(|(_, bytes)| bytes).sum();
    directory(hardware).is_ok_and(|ram| ram.check_room(bytes).is_ok())
}

/// Removes the RAM of [`create_waiting`]. Missing files are no error.
///
/// # Errors
/// [`RamError`], when a file cannot be removed.
pub fn remove_waiting(hardware: &Hardware) -> Result<(), RamError> {
    let Ok(ram) = directory(hardware) else { return Ok(()) };
    hardware.ram_files().into_iter().try_for_each(|(path, _)| ram.remove_waiting(&file_id(&path)))
}

/// Replaces the RAM of a VM whose previous QEMU has ended by the RAM of [`create_waiting`]: see
/// [`RamDirectory::replace`]. Returns the previous RAM, which can be freed later.
///
/// # Errors
/// [`RamError`], when there is not enough memory or a file cannot be renamed.
pub fn replace(rundir: &RunDir, hardware: &Hardware) -> Result<Vec<PreviousRam>, RamError> {
    end_fill(rundir);
    disks::release_memory(rundir, hardware);
    let ram = directory(hardware)?;
    let previous = hardware.ram_files().into_iter().map(|(path, bytes)| ram.replace(&file_id(&path), bytes));
    previous.filter_map(Result::transpose).collect()
}
