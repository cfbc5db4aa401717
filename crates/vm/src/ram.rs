//! The RAM of a VM whose guest is to begin anew: emptied, beside what is kept of the former guest's, or that of a QEMU that waits.

use crate::disks::{self, Kept};
use crate::fault;
use crate::rundir::RunDir;
use rekindle_memory::directory::{Former, RamDirectory, RamError};
use rekindle_qemu::command::Hardware;
use std::fs;
use std::io;
use std::path::Path;

/// Give a VM whose QEMUs have ended RAM for a new start in the place of what it has: see [`RamDirectory::renew`].
///
/// # Errors
/// [`RamError`].
pub fn renew(rundir: &RunDir, hardware: &Hardware) -> Result<(), RamError> {
    forget_fill(rundir);
    let _ = disks::let_go(rundir, hardware, false);
    let ram = directory(hardware)?;
    hardware.ram_files().into_iter().try_for_each(|(path, bytes)| ram.renew(&name(&path), bytes).map(drop))
}

/// The same beside what of the former RAM its disks' servers keep, which is given back as the guest takes the new one. Gives what that is:
/// nothing where there is no room for both.
///
/// # Errors
/// [`RamError`].
pub fn renew_beside(rundir: &RunDir, hardware: &Hardware) -> Result<Option<Kept>, RamError> {
    forget_fill(rundir);
    if let Some(kept) = disks::let_go(rundir, hardware, true) {
        let ram = directory(hardware)?;
        let mut files = hardware.ram_files().into_iter();
        match files.try_for_each(|(path, bytes)| ram.renew_beside(&name(&path), bytes).map(drop)) {
            Ok(()) => {
                fault::point("cache.renew.memory", None, None);
                return Ok(Some(kept));
            }
            Err(e) => tracing::warn!("nothing of what the guest had of its disks is kept: {e}"),
        }
    }
    renew(rundir, hardware).map(|()| None)
}

/// What a restore was still bringing into the former RAM is not wanted any more.
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

/// Make RAM for a QEMU that is to wait while another one runs the guest: nothing is promised to it. Gives the machine that has it.
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

/// Whether there is room for all of it beside everything that is promised now.
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
    hardware.ram_files().into_iter().try_for_each(|(path, _)| ram.forget_waiting(&name(&path)))
}

/// Give a VM whose former QEMU has ended the RAM that waits, in the place of what it has: see [`RamDirectory::replace`]. Gives what can be
/// given back later.
///
/// # Errors
/// [`RamError`].
pub fn replace(rundir: &RunDir, hardware: &Hardware) -> Result<Vec<Former>, RamError> {
    forget_fill(rundir);
    let _ = disks::let_go(rundir, hardware, false);
    let ram = directory(hardware)?;
    let replaced = hardware.ram_files().into_iter().map(|(path, bytes)| ram.replace(&name(&path), bytes));
    replaced.filter_map(Result::transpose).collect()
}
