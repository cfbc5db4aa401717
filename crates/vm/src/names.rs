//! Names of a VM's files outside its run directory.

use crate::definition::Definition;
use crate::host::Host;
use crate::rundir::RunDir;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Returns a name for a VM's files outside its run directory. It identifies the run directory: two users, or one user
/// with two run directories, may both have a VM `web` and use the same place.
#[must_use]
pub fn unique_name(rundir: &RunDir) -> String {
    let digest = xxhash_rust::xxh3::xxh3_64(rundir.path().as_os_str().as_bytes());
    format!("{}-{:08x}", rundir.name(), digest as u32)
}

/// Returns the file to which a saved reboot of a VM writes the guest's RAM.
#[must_use]
pub fn saved_path(host: &Host, rundir: &RunDir, definition: &Definition) -> PathBuf {
    let directory = definition.save_dir.as_ref().unwrap_or(&host.save_dir);
    directory.join(format!("{}.state", unique_name(rundir)))
}
