//! The servers of a VM's disks. Each disk has one process (`rekindle disk serve`), which outlives the VM's QEMUs.
//!
//! A server that has died is restarted by `rekindle watch` ([`crate::helpers`]), or by the next operation on the VM.
//! QEMU then reconnects to it. The server's knowledge of the guest's cache is lost.
//!
//! | file | purpose |
//! |---|---|
//! | `server` | the process of one disk |
//! | `served` | which disks have a server, and when |
//! | `redo_logs` | problems of redo logs, and merging them |
//! | `resume_point` | the epochs from which a restored guest resumed |
//! | `retained` | the retained caches over a reboot |

mod error;
mod redo_logs;
mod resume_point;
mod retained;
mod served;
mod server;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
pub(crate) mod tests;

pub use error::DisksError;
pub use redo_logs::{LeftoverLogs, end_epochs, identity_problems, merge_leftover_logs, redo_log_problems};
pub use retained::{RetainedCache, release_memory, retain_caches, reuse_caches};
pub use served::{need_servers, served, served_now};
pub(crate) use server::ask;
pub use server::{control_socket, is_served, server, servers};

use crate::lock::ServersLock;
use crate::qemu_user;
use crate::rundir::RunDir;
use rekindle_disk::control::ControlCommand;
use rekindle_disk::keeper::EpochId;
use rekindle_qemu::command::{Disk, Hardware};
use resume_point::ResumePoint;
use server::{answers, end_server, refuse_silent, server_command, server_status, spawn, wait_until_it_answers};
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::Duration;

/// Limit for another process to start or end servers of the same VM.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// The epochs at which disks are required, by the disks' ids. The newest version of all other disks is used.
pub type Epochs = BTreeMap<String, EpochId>;

/// The version of the disk that a server starts with.
#[derive(Clone, Copy)]
enum DiskVersion<'a> {
    Newest,
    /// The versions of a checkpoint whose memory is still being loaded.
    Checkpoint(&'a Epochs),
    /// None yet: [`serve_checkpoint`] supplies the epochs.
    Waiting,
}

/// Starts a server for each disk that requires one and has none.
///
/// *On success:* a QEMU can connect to each server. Returns the number of started servers.
///
/// # Errors
/// [`DisksError`]; servers that were started continue to run until [`end`].
pub fn start(rundir: &RunDir, hardware: &Hardware) -> Result<usize, DisksError> {
    start_version(rundir, hardware, DiskVersion::Newest)
}

/// As [`start`], with the disks of a checkpoint whose memory is still being loaded: the servers wait for missing
/// pages until [`notify_filled`]. No disk may have a server yet.
///
/// # Errors
/// [`DisksError`]; no server starts for a disk that is newer than its epoch, or is another disk, and the error names
/// the disk.
pub fn start_at(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<usize, DisksError> {
    start_version(rundir, hardware, DiskVersion::Checkpoint(epochs))
}

/// As [`start`], for a QEMU that waits for a checkpoint: the images are checked, but not locked until
/// [`serve_checkpoint`].
///
/// # Errors
/// [`DisksError`], as for [`start`].
pub fn start_waiting(rundir: &RunDir, hardware: &Hardware) -> Result<usize, DisksError> {
    start_version(rundir, hardware, DiskVersion::Waiting)
}

/// Restarts the servers that have died, if a QEMU uses the VM's disks. Nothing is started for a VM that ends or
/// moves.
///
/// *On success:* a QEMU can connect to each server. Returns the number of started servers.
///
/// # Errors
/// [`DisksError`], as for [`start`].
pub fn restart(rundir: &RunDir) -> Result<usize, DisksError> {
    let failed = |source| DisksError::RunDir { path: rundir.path().to_owned(), source };
    let Some(_lock) = lock_servers(rundir)? else { return Ok(0) };
    // Check this with the lock held: a process that ends the servers has ended QEMU, or recorded the move, before.
    match served_now(rundir).map_err(failed)? {
        Some(hardware) => start_locked(rundir, &hardware, DiskVersion::Newest),
        None => Ok(0),
    }
}

fn start_version(rundir: &RunDir, hardware: &Hardware, version: DiskVersion<'_>) -> Result<usize, DisksError> {
    if served(hardware).next().is_none() {
        return Ok(0);
    }
    let _lock = lock_servers(rundir)?;
    start_locked(rundir, hardware, version)
}

fn lock_servers(rundir: &RunDir) -> Result<Option<ServersLock>, DisksError> {
    ServersLock::acquire(rundir, LOCK_TIMEOUT)
        .map_err(|source| DisksError::RunDir { path: rundir.path().to_owned(), source })
}

fn start_locked(rundir: &RunDir, hardware: &Hardware, version: DiskVersion<'_>) -> Result<usize, DisksError> {
    // A server that died while a restore fills must wait for missing pages too.
    let is_filling = matches!(version, DiskVersion::Checkpoint(_)) || rundir.fill().exists();
    let missing: Vec<_> = served(hardware).filter(|disk| !answers(rundir, &disk.id)).collect();
    let user = if missing.is_empty() { None } else { qemu_user::of_disk_servers(rundir.name(), hardware)? };
    let mut started = Vec::new();
    for disk in missing {
        refuse_silent(rundir, disk)?;
        let mut command = server_command(rundir, disk, hardware.vcpus, user)?;
        add_version(&mut command, rundir, disk, version)?;
        if is_filling {
            command.arg("--filling");
        }
        started.push((disk, spawn(rundir, disk, &mut command)?));
    }
    let count = started.len();
    started.into_iter().try_for_each(|(disk, child)| wait_until_it_answers(rundir, disk, child))?;
    if let DiskVersion::Checkpoint(epochs) = version {
        resume_point::record(rundir, hardware, epochs)?;
    }
    Ok(count)
}

/// Adds the version of the disk to the command of its server.
fn add_version(
    command: &mut Command,
    rundir: &RunDir,
    disk: &Disk,
    version: DiskVersion<'_>,
) -> Result<(), DisksError> {
    match version {
        DiskVersion::Waiting => drop(command.arg("--wait")),
        DiskVersion::Checkpoint(epochs) => {
            if let Some(EpochId { disk, epoch }) = epochs.get(&disk.id) {
                command.arg(format!("--epoch={epoch}")).arg(format!("--disk-id={disk}"));
            }
        }
        DiskVersion::Newest => {
            // The guest may not have written since it resumed: then the log still has later epochs of another run.
            if let Some(ResumePoint { at: EpochId { disk, epoch }, first }) = resume_point::read(rundir, disk)? {
                command.arg(format!("--epoch={epoch}")).arg(format!("--disk-id={disk}"));
                command.arg(format!("--since={first}"));
            }
        }
    }
    Ok(())
}

/// Ends the servers of a VM whose QEMUs have ended. A missing server is no error.
///
/// *On success:* no server has the images open.
///
/// # Errors
/// [`DisksError`]; the remaining servers can be ended by another call.
pub fn end(rundir: &RunDir, hardware: &Hardware) -> Result<(), DisksError> {
    let _lock = lock_servers(rundir)?;
    served(hardware).try_for_each(|disk| end_server(rundir, disk))
}

/// Describes what prevents a restore with the waiting servers.
#[must_use]
pub fn why_not_waiting(rundir: &RunDir, hardware: &Hardware) -> Option<String> {
    served(hardware).find_map(|disk| match server_status(rundir, &disk.id) {
        Ok(status) if status.waits && status.connected > 0 => None,
        Ok(_) => Some(format!("the server of disk {} does not wait for it", disk.id)),
        Err(e) => Some(format!("the server of disk {} does not answer: {e}", disk.id)),
    })
}

/// Makes the waiting servers serve the disks of a checkpoint whose memory is still being loaded.
///
/// *On success:* the images are locked; queues may run. *On failure:* all servers wait as before. A server that had
/// opened its disk already was replaced by a new one that waits.
///
/// # Errors
/// [`DisksError`]: another process has an image open, an image is newer than the checkpoint, or it is another disk.
pub fn serve_checkpoint(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<(), DisksError> {
    let open_disk = |disk: &Disk| {
        let command = ControlCommand::OpenDisk { epoch: epochs.get(&disk.id).copied(), is_filling: true };
        ask(rundir, &disk.id, &command).map_err(|source| DisksError::Refused { id: disk.id.clone(), source })
    };
    let opened = served(hardware).try_for_each(open_disk);
    let result = opened.and_then(|()| resume_point::record(rundir, hardware, epochs));
    if result.is_err() {
        wait_again(rundir, hardware);
    }
    result
}

/// Undoes [`serve_checkpoint`] when a restore fails: servers that have opened their disks are replaced by waiting
/// ones, and the images are unlocked.
pub fn wait_again(rundir: &RunDir, hardware: &Hardware) {
    let waits = |disk: &&Disk| server_status(rundir, &disk.id).is_ok_and(|status| status.waits);
    let ended = lock_servers(rundir)
        .and_then(|_lock| served(hardware).filter(|disk| !waits(disk)).try_for_each(|disk| end_server(rundir, disk)));
    if let Err(e) = ended.and_then(|()| start_waiting(rundir, hardware)) {
        tracing::warn!("the prepared QEMU can no longer be used: {e}");
    }
}

/// Notifies the servers that a restore has loaded all of the guest's memory, so that they no longer check for missing
/// pages. A server that does not get the message is only slower.
pub fn notify_filled(rundir: &RunDir) {
    for entry in fs::read_dir(rundir.path()).into_iter().flatten().flatten() {
        let file_name = entry.file_name();
        let id = file_name.to_str().and_then(|name| name.strip_prefix("disk-")?.strip_suffix(".control"));
        if let Some(id) = id
            && let Err(e) = ask::<()>(rundir, id, &ControlCommand::MemoryFilled {})
        {
            tracing::debug!("disk {id}: its server still checks for missing pages: {e}");
        }
    }
}
