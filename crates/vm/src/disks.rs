//! The servers of a VM's disks: a process for each disk (`rekindle disk serve`) that outlives the QEMUs which come
//! and go.
//!
//! One that has died is restarted by `rekindle watch` ([`crate::helpers`]), or by the next operation on the VM; QEMU
//! connects to it again. What it knew of the guest's cache is lost then.

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
use rekindle_disk::control::{Ask, Control, ControlError};
use rekindle_disk::redo::keeper::EpochId;
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

/// How long a server may take to open its image and listen.
const START: Duration = Duration::from_secs(30);
/// How long one that was asked to end, or killed, may take for what it has under way.
const END: Duration = Duration::from_secs(10);

/// How long another process may take to start or end servers of the same VM.
const BUSY: Duration = Duration::from_secs(60);

/// How long one may take to merge a log: as long as it is, and its guest has ended.
const MERGE: Duration = Duration::from_secs(600);

/// Why a disk has no server.
#[derive(Debug, thiserror::Error)]
pub enum DisksError {
    /// It does not start.
    #[error("disk {id}: the server of {} does not start; its log ends with:\n{log}", image.display())]
    Start {
        /// The disk.
        id: String,
        /// Its image.
        image: PathBuf,
        /// The end of its log.
        log: String,
    },
    /// It does not end.
    #[error("disk {id}: its server (process {pid}) was killed but does not end")]
    Stuck {
        /// The disk.
        id: String,
        /// The process.
        pid: u32,
    },
    /// A server runs and does not answer. A second one of the same disk is never started.
    #[error(
        "disk {id}: its server (process {pid}) runs and does not answer; if it is stopped, resume it: kill -CONT {pid}; if it hangs, \
         kill it: kill -KILL {pid}, and run this command again"
    )]
    Silent {
        /// The disk.
        id: String,
        /// The process.
        pid: u32,
    },
    /// Its server does not take it.
    #[error("disk {id}")]
    Refused {
        /// The disk.
        id: String,
        /// Why.
        #[source]
        source: ControlError,
    },
    /// Its redo log cannot be read or merged.
    #[error("disk {id}")]
    Redo {
        /// The disk.
        id: String,
        /// Why.
        #[source]
        source: MergeError,
    },
    /// The run directory.
    #[error("run directory {}", path.display())]
    RunDir {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The system refuses.
    #[error("disk {id}: {doing}")]
    Io {
        /// The disk.
        id: String,
        /// What was done.
        doing: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The socket of a server for commands of ours.
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

/// Locked by the disk's server from before its program starts until it has ended: by this it is found.
fn lock(rundir: &RunDir, id: &str) -> PathBuf {
    rundir.file(&format!("disk-{id}.lock"))
}

/// The process that serves a disk of this VM, whether it answers or not.
///
/// # Errors
/// When the disk is served by a process that cannot be seen.
pub fn servers(rundir: &RunDir, id: &str) -> io::Result<Vec<Process>> {
    let mut found = lockfile::holders(&lock(rundir, id))?;
    // One that an earlier version of Rekindle has started holds no lock, but listens.
    if let Some(process) = server(rundir, id)
        && !found.contains(&process)
    {
        found.push(process);
    }
    Ok(found)
}

/// Rejects a disk whose server runs and does not answer. One that is just ending is waited for.
fn refuse_silent(rundir: &RunDir, disk: &Disk) -> Result<(), DisksError> {
    let failed = |source| DisksError::Io { id: disk.id.clone(), doing: "finding its server", source };
    for server in servers(rundir, &disk.id).map_err(failed)? {
        if !server.wait_end(END).map_err(failed)? {
            return Err(DisksError::Silent { id: disk.id.clone(), pid: server.pid });
        }
    }
    Ok(())
}

/// The process that serves a disk, if one does: the peer of its control socket.
#[must_use]
pub fn server(rundir: &RunDir, id: &str) -> Option<Process> {
    let stream = UnixStream::connect(control(rundir, id)).ok()?;
    let pid = socket_peercred(&stream).ok()?.pid.as_raw_nonzero().get();
    Process::of(u32::try_from(pid).ok()?).ok().filter(Process::is_alive)
}

fn answers(rundir: &RunDir, id: &str) -> bool {
    Control::connect(&control(rundir, id)).and_then(|mut control| control.status()).is_ok()
}

/// The epochs that disks are wanted at, by their ids; the others are wanted as they are.
pub type Epochs = BTreeMap<String, EpochId>;

/// Starts a server for each disk that is to have one and has none.
///
/// *On success:* a QEMU can connect to each of them; gives how many were started.
///
/// # Errors
/// [`DisksError`]; those that were started run on, until [`end`].
pub fn start(rundir: &RunDir, hardware: &Hardware) -> Result<usize, DisksError> {
    start_with(rundir, hardware, &Begin::Newest)
}

/// As [`start`], with the disks of a checkpoint whose memory is still being loaded: the servers wait for missing
/// pages until [`filled`]. None of the disks may have a server.
///
/// # Errors
/// [`DisksError`]; no server starts for a disk that is newer than its epoch, or another one, and the error names it.
pub fn start_at(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<usize, DisksError> {
    start_with(rundir, hardware, &Begin::At(epochs))
}

/// As [`start`], for a QEMU that waits for a checkpoint: the images are checked, but not locked until [`have`].
///
/// # Errors
/// [`DisksError`].
pub fn start_waiting(rundir: &RunDir, hardware: &Hardware) -> Result<usize, DisksError> {
    start_with(rundir, hardware, &Begin::Waiting)
}

/// Describes what prevents a restore with the servers that wait.
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

/// Makes servers that wait serve the disks of a checkpoint, whose memory is still being loaded.
///
/// *On success:* the images are locked; queues may run.
/// *On failure:* all wait as before. One that had its disk already was ended, and another one waits in its place.
///
/// # Errors
/// [`DisksError`]: another process has an image open, it is newer than the checkpoint, or another one.
pub fn have(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<(), DisksError> {
    let had = served(hardware).try_for_each(|disk| {
        let ask = Ask::Have { at: epochs.get(&disk.id).copied(), filling: true };
        let asked = Control::connect(&control(rundir, &disk.id)).and_then(|mut control| control.ask::<()>(&ask));
        asked.map_err(|source| DisksError::Refused { id: disk.id.clone(), source })
    });
    let had = had.and_then(|()| since::note(rundir, hardware, epochs));
    if had.is_err() {
        wait_again(rundir, hardware);
    }
    had
}

/// Undoes [`have`] when a restore fails: servers that have their disks already are replaced by ones that wait, and
/// the images are unlocked.
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

/// The disk that a server starts with.
enum Begin<'a> {
    /// The newest disk.
    Newest,
    /// Those of a checkpoint.
    At(&'a Epochs),
    /// None yet: [`have`] names them.
    Waiting,
}

/// Restarts the servers that have died of a VM whose QEMU uses its disks, as [`start`] does. Nothing is started for a
/// VM that ends or moves.
///
/// *On success:* a QEMU can connect to each of them; gives how many were started.
///
/// # Errors
/// [`DisksError`].
pub fn restart(rundir: &RunDir) -> Result<usize, DisksError> {
    let failed = |source| DisksError::RunDir { path: rundir.path().to_owned(), source };
    let Some(_lock) = Servers::acquire(rundir, BUSY).map_err(failed)? else { return Ok(0) };
    // Checked with the lock held: a process that ends the servers has ended QEMU, or noted the move, before that.
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
    // One that has died while a restore fills waits too.
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
                // Its guest may not have written since it resumed: then the log still has later epochs of another run.
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
    // The path at which every QEMU of the VM connects.
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

/// Ends the servers of a VM whose QEMUs have ended. Those that are gone already are no error.
///
/// *On success:* no server has the images open.
///
/// # Errors
/// [`DisksError`].
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
    let asked = Control::connect(&control(rundir, &disk.id)).and_then(|mut control| control.ask::<()>(&Ask::End {}));
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

/// Where the redo log of a disk is, if it has one.
fn redo(disk: &Disk) -> PathBuf {
    disk.redo.clone().unwrap_or_else(|| offline::default_directory(&disk.path))
}

/// Describes what prevents giving a VM its disks at `epochs`: a damaged redo log, or one that QEMU itself would not
/// see. Damage to later epochs prevents nothing. With `choose` also one whose log a failure has left, since there are
/// two disks then, and the user must choose.
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

/// Describes which images are not those of a guest whose disks have these identities. They may be in use.
#[must_use]
pub fn others(hardware: &Hardware, epochs: &Epochs) -> Vec<String> {
    let problem = |disk: &Disk| {
        let at = epochs.get(&disk.id)?;
        let image = disk.path.display();
        // Only the identity matters; the segments may be in use.
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

/// Merges what is left of the redo logs of a VM's disks, none of which has a server: each is the newest disk then.
///
/// # Errors
/// [`DisksError::Redo`]; that log can be merged again.
pub fn merge_left(hardware: &Hardware) -> Result<(), DisksError> {
    let has_log = |disk: &&Disk| !disk.readonly && redo(disk).exists();
    served(hardware).filter(has_log).try_for_each(|disk| {
        let merged = offline::merge_all(&disk.path, &redo(disk), disk.cache == "none", None);
        merged.map(drop).map_err(|source| DisksError::Redo { id: disk.id.clone(), source })
    })
}

/// Merges the redo logs of a VM whose guest has shut down: its newest disks count. A log that cannot be merged is
/// kept, and a warning logged.
pub fn end_epochs(rundir: &RunDir, hardware: &Hardware) {
    for disk in served(hardware).filter(|disk| !disk.readonly) {
        let ended = Control::connect(&control(rundir, &disk.id)).and_then(|mut control| control.end_epochs(MERGE));
        match ended {
            Ok(()) => {}
            Err(e) => tracing::warn!("disk {}: its redo log, if it has one, is not merged: {e}", disk.id),
        }
    }
}

/// Notifies the servers that a restore has loaded all of the guest's memory: they no longer check for missing pages.
/// One that does not get this is only slower.
pub fn filled(rundir: &RunDir) {
    let entries = fs::read_dir(rundir.path()).into_iter().flatten().flatten();
    let of_server = |name: &std::ffi::OsStr| {
        let name = name.to_str()?.strip_prefix("disk-")?.strip_suffix(".control")?;
        Some(name.to_owned())
    };
    for id in entries.filter_map(|entry| of_server(&entry.file_name())) {
        let notified =
            Control::connect(&control(rundir, &id)).and_then(|mut control| control.ask::<()>(&Ask::Filled {}));
        if let Err(e) = notified {
            tracing::debug!("disk {id}: its server still checks for missing pages: {e}");
        }
    }
}
