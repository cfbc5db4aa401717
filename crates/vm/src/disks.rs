//! The servers of a VM's disks: a process for each disk (`rekindle disk serve`) that outlives the QEMUs which come and go.
//!
//! One that has died is started again by the next operation on the VM; QEMU, which tries every second, goes on with it. What it
//! knew of the guest's cache is gone then.

mod kept;

pub use kept::{Kept, let_go};

use crate::rundir::RunDir;
use rekindle_disk::control::{Ask, Control};
use rekindle_disk::redo::keeper::At;
use rekindle_disk::redo::left::{self, MergeError};
use rekindle_kernel::process::{self, Process};
use rekindle_kernel::spawn::detach;
use rekindle_qemu::command::{Disk, Hardware, disk_queues};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

/// How long a server may take to open its image and listen.
const START: Duration = Duration::from_secs(30);
/// How long one that was asked to end, or killed, may take for what it has under way.
const END: Duration = Duration::from_secs(10);

/// How long one may take to merge a log: as long as it is, and its guest has ended.
const MERGE: Duration = Duration::from_secs(600);

/// Why a disk has no server.
#[derive(Debug, thiserror::Error)]
pub enum DisksError {
    /// It does not start.
    #[error("disk {id}: the server of {} does not start; it said:\n{said}", image.display())]
    Start {
        /// The disk.
        id: String,
        /// Its image.
        image: PathBuf,
        /// The end of its log.
        said: String,
    },
    /// It does not end.
    #[error("disk {id}: its server (process {pid}) was killed but does not end")]
    Stuck {
        /// The disk.
        id: String,
        /// The process.
        pid: u32,
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

/// The disks that have a server.
pub fn served(hardware: &Hardware) -> impl Iterator<Item = &Disk> {
    hardware.disks.iter().filter(|disk| disk.server)
}

/// Where a server is asked for something beside its guest.
#[must_use]
pub fn control(rundir: &RunDir, id: &str) -> PathBuf {
    rundir.file(&format!("disk-{id}.control"))
}

fn log(rundir: &RunDir, id: &str) -> PathBuf {
    rundir.file(&format!("disk-{id}.log"))
}

/// As one argument, so that no other command is taken for a server.
fn mark(rundir: &RunDir, id: &str) -> String {
    format!("--control={}", control(rundir, id).display())
}

fn answers(rundir: &RunDir, id: &str) -> bool {
    Control::connect(&control(rundir, id)).and_then(|mut control| control.status()).is_ok()
}

/// The epochs that disks are wanted at, by their ids; the others are wanted as they are.
pub type Epochs = BTreeMap<String, At>;

/// Have a server for each disk that is to have one; those that are there stay.
///
/// *On success:* a QEMU can connect to each of them; gives how many were started.
///
/// # Errors
/// [`DisksError`]; those that were started run on, until [`end`].
pub fn start(rundir: &RunDir, hardware: &Hardware) -> Result<usize, DisksError> {
    start_with(rundir, hardware, None)
}

/// The same, with the disks of a checkpoint, whose memory still comes: they wait for pages that are missing, until [`filled`]. None of
/// them may have a server.
///
/// # Errors
/// [`DisksError`]; a disk that is newer than its epoch, or another one, has no server, which says so.
pub fn start_at(rundir: &RunDir, hardware: &Hardware, epochs: &Epochs) -> Result<usize, DisksError> {
    start_with(rundir, hardware, Some(epochs))
}

fn start_with(rundir: &RunDir, hardware: &Hardware, epochs: Option<&Epochs>) -> Result<usize, DisksError> {
    // One that has died while a restore fills waits too.
    let filling = epochs.is_some() || rundir.fill().exists();
    let mut started = Vec::new();
    for disk in served(hardware).filter(|disk| !answers(rundir, &disk.id)) {
        let at = epochs.and_then(|epochs| epochs.get(&disk.id));
        started.push((disk, spawn(rundir, disk, hardware.vcpus, at, filling)?));
    }
    let count = started.len();
    started.into_iter().try_for_each(|(disk, child)| wait(rundir, disk, child))?;
    Ok(count)
}

fn spawn(rundir: &RunDir, disk: &Disk, vcpus: u32, at: Option<&At>, filling: bool) -> Result<Child, DisksError> {
    let failed = |doing| move |source| DisksError::Io { id: disk.id.clone(), doing, source };
    let mut options = OpenOptions::new();
    let opened = options.create(true).append(true).mode(0o600).open(log(rundir, &disk.id));
    let log = opened.map_err(failed("opening its log"))?;
    let again = log.try_clone().map_err(failed("opening its log"))?;
    let binary = std::env::current_exe().map_err(failed("finding this program"))?;
    let mut command = Command::new(binary);
    command.args(["disk", "serve"]).arg(&disk.path).arg(mark(rundir, &disk.id));
    // Where QEMU looks for it, whichever of the VM's it is.
    command.arg("--socket").arg(rundir.vmm(1).disk(&disk.id)).arg(format!("--queues={}", disk_queues(vcpus)));
    if disk.readonly {
        command.arg("--readonly");
    }
    if disk.cache != "none" {
        command.arg("--buffered");
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
    if filling {
        command.arg("--filling");
    }
    if let Some(At { disk, epoch }) = at {
        command.arg(format!("--epoch={epoch}")).arg(format!("--disk-id={disk}"));
    }
    detach(&mut command).stdout(log).stderr(again).spawn().map_err(failed("starting its server"))
}

fn wait(rundir: &RunDir, disk: &Disk, mut child: Child) -> Result<(), DisksError> {
    let deadline = Instant::now() + START;
    while !answers(rundir, &disk.id) {
        let ended = !matches!(child.try_wait(), Ok(None));
        if ended || Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            let text = fs::read_to_string(log(rundir, &disk.id)).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            let said = lines.get(lines.len().saturating_sub(10)..).unwrap_or_default().join("\n");
            return Err(DisksError::Start { id: disk.id.clone(), image: disk.path.clone(), said });
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// End the servers of a VM whose QEMUs have ended. Those that are gone already are no error.
///
/// *On success:* nobody has the images open.
///
/// # Errors
/// [`DisksError`].
pub fn end(rundir: &RunDir, hardware: &Hardware) -> Result<(), DisksError> {
    served(hardware).try_for_each(|disk| {
        let failed = |doing| move |source| DisksError::Io { id: disk.id.clone(), doing, source };
        let mark = mark(rundir, &disk.id);
        let servers = || process::with_argument_containing(&mark).map_err(failed("looking for its server"));
        let found = servers()?;
        if found.is_empty() {
            return Ok(());
        }
        let asked =
            Control::connect(&control(rundir, &disk.id)).and_then(|mut control| control.ask::<()>(&Ask::End {}));
        if let Err(e) = &asked {
            tracing::debug!("the server of disk {} cannot be asked to end: {e}", disk.id);
        }
        found.into_iter().try_for_each(|server| end_one(&disk.id, server, asked.is_ok()))
    })
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

/// What speaks against giving a VM its disks, in words: a disk with a redo log that QEMU itself would not see. With `choose` also one
/// whose log a failure has left, since there are two disks then, and the owner has to say which.
#[must_use]
pub fn left_behind(hardware: &Hardware, choose: bool) -> Vec<String> {
    let problem = |disk: &Disk| {
        let image = disk.path.display();
        match left::look(&left::beside(&disk.path)) {
            Ok(Some(left)) if !disk.server => Some(format!(
                "disk {}: {image} has a redo log with {} writes that QEMU would not see; add server = true, or merge it: \
                 rekindle disk merge {image}",
                disk.id, left.writes
            )),
            Ok(Some(_)) if choose => Some(format!(
                "disk {}: {image} was left in use, with a redo log: go on from the last checkpoint (rekindle restore), or \
                 start from the newest disk, which gives the checkpoint's up (rekindle run --newest-disk)",
                disk.id
            )),
            Ok(_) => None,
            Err(e) => Some(format!("disk {}: {e}", disk.id)),
        }
    };
    hardware.disks.iter().filter_map(problem).collect()
}

/// Merge what is left of the redo logs of a VM's disks, none of which has a server: each is the newest disk then.
///
/// # Errors
/// [`DisksError::Redo`]; that log can be merged again.
pub fn merge_left(hardware: &Hardware) -> Result<(), DisksError> {
    let has_log = |disk: &&Disk| !disk.readonly && left::beside(&disk.path).exists();
    served(hardware).filter(has_log).try_for_each(|disk| {
        let merged = left::merge_all(&disk.path, &left::beside(&disk.path), disk.cache == "none");
        merged.map(drop).map_err(|source| DisksError::Redo { id: disk.id.clone(), source })
    })
}

/// Merge the redo logs of a VM whose guest has shut down: its disks are what they are. What cannot be merged stays, and is told.
pub fn end_epochs(rundir: &RunDir, hardware: &Hardware) {
    for disk in served(hardware).filter(|disk| !disk.readonly) {
        let ended = Control::connect(&control(rundir, &disk.id)).and_then(|mut control| control.end_epochs(MERGE));
        match ended {
            Ok(()) => {}
            Err(e) => tracing::warn!("disk {}: its redo log, if it has one, is not merged: {e}", disk.id),
        }
    }
}

/// A restore has brought all of the guest's memory: the servers need wait for nothing any more. If one is not told, it is slower.
pub fn filled(rundir: &RunDir) {
    let entries = fs::read_dir(rundir.path()).into_iter().flatten().flatten();
    let of_server = |name: &std::ffi::OsStr| {
        let name = name.to_str()?.strip_prefix("disk-")?.strip_suffix(".control")?;
        Some(name.to_owned())
    };
    for id in entries.filter_map(|entry| of_server(&entry.file_name())) {
        let told = Control::connect(&control(rundir, &id)).and_then(|mut control| control.ask::<()>(&Ask::Filled {}));
        if let Err(e) = told {
            tracing::debug!("disk {id}: it looks for missing pages still: {e}");
        }
    }
}
