//! The redo logs of a VM's disks: problems before a start, and merging them.

use super::server::connect;
use super::{DisksError, Epochs, served};
use crate::rundir::RunDir;
use rekindle_disk::redo::offline;
use rekindle_qemu::command::{Disk, Hardware};
use std::path::PathBuf;
use std::time::Duration;

/// Limit for a server to merge a redo log. It is generous: a log may be long, and the guest has ended.
const MERGE_TIMEOUT: Duration = Duration::from_secs(600);

/// Returns the directory of a disk's redo log, which may not exist.
fn redo_directory(disk: &Disk) -> PathBuf {
    disk.redo.clone().unwrap_or_else(|| offline::default_directory(&disk.path))
}

/// What a redo log means that a failure has left with a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeftoverLogs {
    /// The disk's server uses it.
    Use,
    /// There are two versions of the disk, and the user must choose one.
    Reject,
}

/// Describes what prevents giving a VM its disks at `epochs`: a damaged redo log, or a redo log that QEMU would not
/// see because the disk has no server; with [`LeftoverLogs::Reject`] any redo log. Damage to later epochs prevents
/// nothing.
#[must_use]
pub fn redo_log_problems(hardware: &Hardware, epochs: &Epochs, leftover: LeftoverLogs) -> Vec<String> {
    let problem = |disk: &Disk| {
        let image = disk.path.display();
        let last_epoch = epochs.get(&disk.id).map_or(u64::MAX, |at| at.epoch);
        match offline::inspect_log(&disk.path, &redo_directory(disk), last_epoch, None) {
            Ok(Some(log)) if !disk.server => Some(format!(
                "disk {}: {image} has a redo log with {} writes that QEMU would not see; add server = true, or merge it: \
                 rekindle disk merge {image}",
                disk.id, log.writes
            )),
            Ok(Some(_)) if leftover == LeftoverLogs::Reject => Some(format!(
                "disk {}: {image} was left in use, with a redo log: resume from the last checkpoint (rekindle restore), or \
                 boot from the newest disk and discard the checkpoint's (rekindle run --newest-disk)",
                disk.id
            )),
            Ok(_) => None,
            Err(e) => Some(format!("disk {}: {e}", disk.id)),
        }
    };
    hardware.disks.iter().filter_map(problem).collect()
}

/// Describes which images are not the guest's, by the identities in `epochs`. The images may be in use.
#[must_use]
pub fn identity_problems(hardware: &Hardware, epochs: &Epochs) -> Vec<String> {
    let problem = |disk: &Disk| {
        let at = epochs.get(&disk.id)?;
        let image = disk.path.display();
        // Only the identity is checked; the segments may be in use.
        match offline::inspect_log(&disk.path, &redo_directory(disk), 0, None) {
            Ok(Some(log)) if log.disk == at.disk => None,
            Ok(Some(_)) => Some(format!("disk {}: {image} is another disk here than the guest's", disk.id)),
            Ok(None) => {
                Some(format!("disk {}: {image} has no redo log here, so it is another disk than the guest's", disk.id))
            }
            Err(e) => Some(format!("disk {}: {e}", disk.id)),
        }
    };
    served(hardware).filter_map(problem).collect()
}

/// Merges the remaining redo logs of a VM's disks, none of which may have a server. Afterwards each image is the
/// newest version of its disk.
///
/// # Errors
/// [`DisksError::Redo`]; the merge can be repeated.
pub fn merge_leftover_logs(hardware: &Hardware) -> Result<(), DisksError> {
    let has_log = |disk: &&Disk| !disk.readonly && redo_directory(disk).exists();
    served(hardware).filter(has_log).try_for_each(|disk| {
        let merged = offline::merge_all(&disk.path, &redo_directory(disk), disk.cache == "none", None);
        merged.map(drop).map_err(|source| DisksError::Redo { id: disk.id.clone(), source })
    })
}

/// Merges the redo logs of a VM whose guest has shut down: the newest version of its disks is kept. A log that cannot
/// be merged is left as it is, with a warning.
pub fn end_epochs(rundir: &RunDir, hardware: &Hardware) {
    for disk in served(hardware).filter(|disk| !disk.readonly) {
        if let Err(e) = connect(rundir, &disk.id).and_then(|mut control| control.end_epochs(MERGE_TIMEOUT)) {
            tracing::warn!("disk {}: its redo log, if it has one, is not merged: {e}", disk.id);
        }
    }
}
