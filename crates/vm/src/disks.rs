//! The servers of a VM's disks. Each disk has one process (`rekindle disk serve`), which outlives the VM's QEMUs.
//!
//! A server that has died is restarted by `rekindle watch` ([`crate::helpers`]), or by the next operation on the VM.
//! QEMU then reconnects to it. The server's knowledge of the guest's cache is lost.

mod kept;
mod served;
mod since;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;

pub use kept::{Kept, release_memory, reuse};
pub use served::{served, served_now};

use crate::lock::Servers;
use crate::rundir::RunDir;
use rekindle_disk::control::{Control, ControlCommand, ControlError};
use rekindle_disk::keeper::EpochId;
use rekindle_disk::redo::offline::{self, MergeError};
use rekindle_kernel::lockfile;
use rekindle_kernel::output::last_lines;
use rekindle_kernel::process::Process;
use rekindle_kernel::spawn::{detach, disown};
use rekindle_qemu::command::{Disk, Hardware, disk_queues};
use rustix::net::sockopt::socket_peercred;
use since::Since;
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

/// Limit for a server to open its image and listen.
const START: Duration = Duration::from_secs(30);
/// Limit for a server that was asked to end, or killed, to finish its requests.
const END: Duration = Duration::from_secs(10);

/// Limit for another process to start or end servers of the same VM.
const BUSY: Duration = Duration::from_secs(60);

/// Limit for a server to merge a redo log. It is generous: a log may be long, and the guest has ended.
const MERGE: Duration = Duration::from_secs(600);

/// Why the server of a disk could not be started, used or ended.
#[derive(Debug, thiserror::Error)]
pub enum DisksError {
    /// The server does not start.
    #[error("disk {id}: the server of {} does not start; its log ends with:\n{log}", image.display())]
    Start {
        /// Id of the disk.
        id: String,
        /// Path of the disk's image.
        image: PathBuf,
        /// The end of the server's log.
        log: String,
    },
    /// The server was killed but does not end.
    #[error("disk {id}: its server (process {pid}) was killed but does not end")]
    Stuck {
        /// Id of the disk.
        id: String,
        /// The server's process number.
        pid: u32,
    },
    /// A server runs but does not answer. A second server of the same disk is never started.
    #[error(
        "disk {id}: its server (process {pid}) runs and does not answer; if it is stopped, resume it: kill -CONT {pid}; if it hangs, \
         kill it: kill -KILL {pid}, and run this command again"
    )]
    Silent {
        /// Id of the disk.
        id: String,
        /// The server's process number.
        pid: u32,
    },
    /// The server rejects a command or does not answer it.
    #[error("disk {id}")]
    Refused {
        /// Id of the disk.
        id: String,
        /// The server's answer, or the error of the connection.
        #[source]
        source: ControlError,
    },
    /// The redo log cannot be read or merged.
    #[error("disk {id}")]
    Redo {
        /// Id of the disk.
        id: String,
        /// The error of reading or merging.
        #[source]
        source: MergeError,
    },
    /// The lock of the servers, or the run directory, cannot be used.
    #[error("run directory {}", path.display())]
    RunDir {
        /// Path of the run directory.
        path: PathBuf,
        /// The error of locking or reading.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("disk {id}: {doing}")]
    Io {
        /// Id of the disk.
        id: String,
        /// The failed action.
        doing: &'static str,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

/// Returns the control socket of a disk's server.
#[must_use]
pub fn control(rundir: &RunDir, id: &str) -> PathBuf {
    rundir.file(&format!("disk-{id}.control"))
}

fn log(rundir: &RunDir, id: &str) -> PathBuf {
    rundir.file(&log_name(id))
}

fn log_name(id: &str) -> String {
    format!("disk-{id}.log")
}

/// Lock file. The disk's server holds its lock from before the program starts until it has ended: the holder of the
/// lock is the server.
fn lock(rundir: &RunDir, id: &str) -> PathBuf {
    rundir.file(&format!("disk-{id}.lock"))
}

/// Returns the processes that serve a disk of this VM, whether they answer or not.
///
/// # Errors
/// When the lock of the disk is held by a process that cannot be seen.
pub fn servers(rundir: &RunDir, id: &str) -> io::Result<Vec<Process>> {
    let mut found = lockfile::holders(&lock(rundir, id))?;
    // A server that an earlier version of Rekindle has started holds no lock, but it listens.
    if let Some(process) = server(rundir, id)
        && !found.contains(&process)
    {
        found.push(process);
    }
    Ok(found)
}

/// Rejects a disk whose server runs and does not answer. A server that is ending is waited for.
fn refuse_silent(rundir: &RunDir, disk: &Disk) -> Result<(), DisksError> {
    let failed = |source| DisksError::Io { id: disk.id.clone(), doing: "finding its server", source };
    for server in servers(rundir, &disk.id).map_err(failed)? {
        if !server.wait_end(END).map_err(failed)? {
            return Err(DisksError::Silent { id: disk.id.clone(), pid: server.pid });
        }
    }
    Ok(())
}

/// Returns the process that serves a disk, if there is one: the peer of its control socket.
#[must_use]
pub fn server(rundir: &RunDir, id: &str) -> Option<Process> {
    let stream = UnixStream::connect(control(rundir, id)).ok()?;
    let pid = socket_peercred(&stream).ok()?.pid.as_raw_nonzero().get();
    Process::of(u32::try_from(pid).ok()?).ok().filter(Process::is_alive)
}

fn answers(rundir: &RunDir, id: &str) -> bool {
    Control::connect(&control(rundir, id)).and_then(|mut control| control.status()).is_ok()
}

/// The epochs at which disks are required, by the disks' ids. The newest version of all other disks is used.
pub type Epochs = BTreeMap<String, EpochId>;

/// Starts a server for each disk that requires one and has none.
///
/// *On success:* a QEMU can connect to each server. Returns the number of started servers.
///
/// # Errors
/// [`DisksError`]; servers that were started continue to run until [`end`].
pub fn start(rundir: &RunDir, hardware: &Hardware) -> Result<usize, DisksError> {
    start_with(rundir, hardware, &Begin::Newest)
}

/// As [`start`], with the disks of a checkpoint whose memory is still being loaded: the servers wait for missing
/// pages until [`filled`]. No disk may have a server yet.
///
/// # Errors
/// [`DisksError`]; no server starts for a disk that is newer than its epoch, or is another disk, and the error names
/// the disk.
pub fn start_at(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<usize, DisksError> {
    start_with(rundir, hardware, &Begin::At(epochs))
}

/// As [`start`], for a QEMU that waits for a checkpoint: the images are checked, but not locked until [`have`].
///
/// # Errors
/// [`DisksError`], as for [`start`].
pub fn start_waiting(rundir: &RunDir, hardware: &Hardware) -> Result<usize, DisksError> {
    start_with(rundir, hardware, &Begin::Waiting)
}

/// Describes what prevents a restore with the waiting servers.
#[must_use]
pub fn against_waiting(rundir: &RunDir, hardware: &Hardware) -> Option<String> {
    served(hardware).find_map(|disk| {
        let status = Control::connect(&control(rundir, &disk.id)).and_then(|mut control| control.status());
        match status {
            Ok(status) if status.waits && status.connected > 0 => None,
            Ok(_) => Some(format!("the server of disk {} does not wait for it", disk.id)),
            Err(e) => Some(format!("the server of disk {} does not answer: {e}", disk.id)),
        }
    })
}

/// Makes the waiting servers serve the disks of a checkpoint whose memory is still being loaded.
///
/// *On success:* the images are locked; queues may run. *On failure:* all servers wait as before. A server that had
/// opened its disk already was replaced by a new one that waits.
///
/// # Errors
/// [`DisksError`]: another process has an image open, an image is newer than the checkpoint, or it is another disk.
pub fn have(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<(), DisksError> {
    let had = served(hardware).try_for_each(|disk| {
        let ask = ControlCommand::OpenDisk { epoch: epochs.get(&disk.id).copied(), is_filling: true };
        let asked = Control::connect(&control(rundir, &disk.id)).and_then(|mut control| control.ask::<()>(&ask));
        asked.map_err(|source| DisksError::Refused { id: disk.id.clone(), source })
    });
    let had = had.and_then(|()| since::note(rundir, hardware, epochs));
    if had.is_err() {
        wait_again(rundir, hardware);
    }
    had
}

/// Undoes [`have`] when a restore fails: servers that have opened their disks are replaced by waiting ones, and the
/// images are unlocked.
pub fn wait_again(rundir: &RunDir, hardware: &Hardware) {
    let waits = |disk: &Disk| {
        let status = Control::connect(&control(rundir, &disk.id)).and_then(|mut control| control.status());
        status.is_ok_and(|status| status.waits)
    };
    let failed = |source| DisksError::RunDir { path: rundir.path().to_owned(), source };
    let ended = Servers::acquire(rundir, BUSY)
        .map_err(failed)
        .and_then(|_lock| served(hardware).filter(|disk| !waits(disk)).try_for_each(|disk| end_server(rundir, disk)));
    if let Err(e) = ended.and_then(|()| start_waiting(rundir, hardware)) {
        tracing::warn!("the prepared QEMU can no longer be used: {e}");
    }
}

/// The version of the disk that a server starts with.
enum Begin<'a> {
    /// The newest version.
    Newest,
    /// The versions of a checkpoint.
    At(&'a Epochs),
    /// None yet: [`have`] supplies the epochs.
    Waiting,
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
    let Some(_lock) = Servers::acquire(rundir, BUSY).map_err(failed)? else { return Ok(0) };
    // Check this with the lock held: a process that ends the servers has ended QEMU, or recorded the move, before.
    match served_now(rundir).map_err(failed)? {
        Some(hardware) => start_locked(rundir, &hardware, &Begin::Newest),
        None => Ok(0),
    }
}

fn start_with(rundir: &RunDir, hardware: &Hardware, begin: &Begin<'_>) -> Result<usize, DisksError> {
    if served(hardware).next().is_none() {
        return Ok(0);
    }
    let failed = |source| DisksError::RunDir { path: rundir.path().to_owned(), source };
    let _lock = Servers::acquire(rundir, BUSY).map_err(failed)?;
    start_locked(rundir, hardware, begin)
}

fn start_locked(rundir: &RunDir, hardware: &Hardware, begin: &Begin<'_>) -> Result<usize, DisksError> {
    // A server that died while a restore fills must wait for missing pages too.
    let filling = matches!(begin, Begin::At(_)) || rundir.fill().exists();
    let mut started = Vec::new();
    for disk in served(hardware).filter(|disk| !answers(rundir, &disk.id)) {
        refuse_silent(rundir, disk)?;
        let mut command = command(rundir, disk, hardware.vcpus)?;
        match begin {
            Begin::Waiting => drop(command.arg("--wait")),
            Begin::At(epochs) => {
                if let Some(EpochId { disk, epoch }) = epochs.get(&disk.id) {
                    command.arg(format!("--epoch={epoch}")).arg(format!("--disk-id={disk}"));
                }
            }
            Begin::Newest => {
                // The guest may not have written since it resumed: then the log still has later epochs of another
                // run.
                if let Some(Since { at: EpochId { disk, epoch }, first }) = since::read(rundir, disk)? {
                    command.arg(format!("--epoch={epoch}")).arg(format!("--disk-id={disk}"));
                    command.arg(format!("--since={first}"));
                }
            }
        }
        if filling {
            command.arg("--filling");
        }
        started.push((disk, spawn(rundir, disk, &mut command)?));
    }
    let count = started.len();
    started.into_iter().try_for_each(|(disk, child)| wait(rundir, disk, child))?;
    if let Begin::At(epochs) = begin {
        since::note(rundir, hardware, epochs)?;
    }
    Ok(count)
}

fn command(rundir: &RunDir, disk: &Disk, vcpus: u32) -> Result<Command, DisksError> {
    let failed = |source| DisksError::Io { id: disk.id.clone(), doing: "finding this program", source };
    let binary = std::env::current_exe().map_err(failed)?;
    let mut command = Command::new(binary);
    command.args(["disk", "serve"]).arg(&disk.path);
    command.arg(format!("--control={}", control(rundir, &disk.id).display()));
    // Every QEMU of the VM connects to this path.
    command.arg("--socket").arg(rundir.vmm(1).disk(&disk.id)).arg(format!("--queues={}", disk_queues(vcpus)));
    if disk.readonly {
        command.arg("--readonly");
    }
    if disk.cache != "none" {
        command.arg("--buffered");
    }
    if let Some(redo) = &disk.redo {
        command.arg("--redo").arg(redo);
    }
    if let Some(keep) = disk.attic_keep_ms {
        command.arg(format!("--attic-keep={keep}ms"));
    }
    if let Some(bps) = disk.bps {
        command.arg(format!("--bps={bps}B"));
    }
    if let Some(iops) = disk.iops {
        command.arg(format!("--iops={iops}"));
    }
    if let Some(serial) = &disk.serial {
        command.arg(format!("--serial={serial}"));
    }
    Ok(command)
}

fn spawn(rundir: &RunDir, disk: &Disk, command: &mut Command) -> Result<Child, DisksError> {
    let failed = |doing| move |source| DisksError::Io { id: disk.id.clone(), doing, source };
    let mut options = OpenOptions::new();
    rundir.link_log(&log_name(&disk.id));
    let opened = options.create(true).append(true).mode(0o600).open(log(rundir, &disk.id));
    let log = opened.map_err(failed("opening its log"))?;
    let again = log.try_clone().map_err(failed("opening its log"))?;
    let held = lockfile::hold(detach(command).stdout(log).stderr(again), &lock(rundir, &disk.id));
    held.and_then(Command::spawn).map_err(failed("starting its server"))
}

fn wait(rundir: &RunDir, disk: &Disk, mut child: Child) -> Result<(), DisksError> {
    let deadline = Instant::now() + START;
    while !answers(rundir, &disk.id) {
        let ended = !matches!(child.try_wait(), Ok(None));
        if ended || Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            let log = last_lines(&log(rundir, &disk.id), 10);
            return Err(DisksError::Start { id: disk.id.clone(), image: disk.path.clone(), log });
        }
        thread::sleep(Duration::from_millis(1));
    }
    disown(child);
    Ok(())
}

/// Ends the servers of a VM whose QEMUs have ended. A missing server is no error.
///
/// *On success:* no server has the images open.
///
/// # Errors
/// [`DisksError`]; the remaining servers can be ended by another call.
pub fn end(rundir: &RunDir, hardware: &Hardware) -> Result<(), DisksError> {
    let failed = |source| DisksError::RunDir { path: rundir.path().to_owned(), source };
    let _lock = Servers::acquire(rundir, BUSY).map_err(failed)?;
    served(hardware).try_for_each(|disk| end_server(rundir, disk))
}

fn end_server(rundir: &RunDir, disk: &Disk) -> Result<(), DisksError> {
    let failed = |source| DisksError::Io { id: disk.id.clone(), doing: "finding its server", source };
    let found = servers(rundir, &disk.id).map_err(failed)?;
    if found.is_empty() {
        return Ok(());
    }
    let asked =
        Control::connect(&control(rundir, &disk.id)).and_then(|mut control| control.ask::<()>(&ControlCommand::End {}));
    if let Err(e) = &asked {
        tracing::debug!("the server of disk {} cannot be asked to end: {e}", disk.id);
    }
    found.into_iter().try_for_each(|server| end_one(&disk.id, server, asked.is_ok()))
}

fn end_one(id: &str, server: Process, asked: bool) -> Result<(), DisksError> {
    let failed = |source| DisksError::Io { id: id.into(), doing: "ending its server", source };
    if asked && server.wait_end(END).map_err(failed)? {
        return Ok(());
    }
    server.kill().map_err(failed)?;
    if server.wait_end(END).map_err(failed)? {
        Ok(())
    } else {
        Err(DisksError::Stuck { id: id.into(), pid: server.pid })
    }
}

/// Returns the directory of a disk's redo log, which may not exist.
fn redo(disk: &Disk) -> PathBuf {
    disk.redo.clone().unwrap_or_else(|| offline::default_directory(&disk.path))
}

/// Describes what prevents giving a VM its disks at `epochs`: a damaged redo log, or a redo log that QEMU would not
/// see because the disk has no server. Damage to later epochs prevents nothing. With `choose` it also reports each
/// redo log that a failure has left: there are then two versions of the disk, and the user must choose.
#[must_use]
pub fn left_behind(hardware: &Hardware, epochs: &Epochs, choose: bool) -> Vec<String> {
    let problem = |disk: &Disk| {
        let image = disk.path.display();
        let upto = epochs.get(&disk.id).map_or(u64::MAX, |at| at.epoch);
        match offline::inspect_log(&disk.path, &redo(disk), upto, None) {
            Ok(Some(left)) if !disk.server => Some(format!(
                "disk {}: {image} has a redo log with {} writes that QEMU would not see; add server = true, or merge it: \
                 rekindle disk merge {image}",
                disk.id, left.writes
            )),
            Ok(Some(_)) if choose => Some(format!(
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
pub fn others(hardware: &Hardware, epochs: &Epochs) -> Vec<String> {
    let problem = |disk: &Disk| {
        let at = epochs.get(&disk.id)?;
        let image = disk.path.display();
        // Only the identity is checked; the segments may be in use.
        match offline::inspect_log(&disk.path, &redo(disk), 0, None) {
            Ok(Some(left)) if left.disk == at.disk => None,
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
pub fn merge_left(hardware: &Hardware) -> Result<(), DisksError> {
    let has_log = |disk: &&Disk| !disk.readonly && redo(disk).exists();
    served(hardware).filter(has_log).try_for_each(|disk| {
        let merged = offline::merge_all(&disk.path, &redo(disk), disk.cache == "none", None);
        merged.map(drop).map_err(|source| DisksError::Redo { id: disk.id.clone(), source })
    })
}

/// Merges the redo logs of a VM whose guest has shut down: the newest version of its disks is kept. A log that cannot
/// be merged is left as it is, with a warning.
pub fn end_epochs(rundir: &RunDir, hardware: &Hardware) {
    for disk in served(hardware).filter(|disk| !disk.readonly) {
        let ended = Control::connect(&control(rundir, &disk.id)).and_then(|mut control| control.end_epochs(MERGE));
        match ended {
            Ok(()) => {}
            Err(e) => tracing::warn!("disk {}: its redo log, if it has one, is not merged: {e}", disk.id),
        }
    }
}

/// Notifies the servers that a restore has loaded all of the guest's memory, so that they no longer check for missing
/// pages. A server that does not get the message is only slower.
pub fn filled(rundir: &RunDir) {
    let entries = fs::read_dir(rundir.path()).into_iter().flatten().flatten();
    let of_server = |name: &std::ffi::OsStr| {
        let name = name.to_str()?.strip_prefix("disk-")?.strip_suffix(".control")?;
        Some(name.to_owned())
    };
    for id in entries.filter_map(|entry| of_server(&entry.file_name())) {
        let notified = Control::connect(&control(rundir, &id))
            .and_then(|mut control| control.ask::<()>(&ControlCommand::MemoryFilled {}));
        if let Err(e) = notified {
            tracing::debug!("disk {id}: its server still checks for missing pages: {e}");
        }
    }
}
