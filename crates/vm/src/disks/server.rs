//! The process that serves one disk: its files, its start, its end.

use super::DisksError;
use crate::rundir::{RunDir, open_record};
use rekindle_disk::control::{Control, ControlCommand, ControlError};
use rekindle_disk::engine::command::Status;
use rekindle_kernel::file::is_locked;
use rekindle_kernel::lockfile;
use rekindle_kernel::output::last_lines;
use rekindle_kernel::process::Process;
use rekindle_kernel::spawn::{detach, disown, this_program, without_credentials};
use rekindle_kernel::unix_socket;
use rekindle_qemu::command::{Disk, disk_queues};
use rustix::net::sockopt::socket_peercred;
use serde::de::DeserializeOwned;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

/// Limit for a server to open its image and listen.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const START_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Limit for a connection to wait in the full queue of a server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit for a server that was asked to end, or killed, to finish its requests.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Lines of a server's log in an error.
const LOG_TAIL_LINES: usize = 10;

/// Returns the control socket of a disk's server.
#[must_use]
pub fn control_socket(rundir: &RunDir, id: &str) -> PathBuf {
    rundir.file(&format!("disk-{id}.control"))
}

fn log_name(id: &str) -> String {
    format!("disk-{id}.log")
}

/// Returns the lock file of a disk's server. The server holds its lock from before the program starts until it has
/// ended: the holder of the lock is the server.
fn lock_file(rundir: &RunDir, id: &str) -> PathBuf {
    rundir.file(&format!("disk-{id}.lock"))
}

pub(super) fn connect(rundir: &RunDir, id: &str) -> Result<Control, ControlError> {
    Control::connect(&control_socket(rundir, id))
}

/// Sends a command to a disk's server and returns its answer.
pub(crate) fn ask<T: DeserializeOwned>(rundir: &RunDir, id: &str, command: &ControlCommand) -> Result<T, ControlError> {
    connect(rundir, id)?.ask(command)
}

pub(super) fn server_status(rundir: &RunDir, id: &str) -> Result<Status, ControlError> {
    connect(rundir, id)?.status()
}

pub(super) fn answers(rundir: &RunDir, id: &str) -> bool {
    server_status(rundir, id).is_ok()
}

/// Returns the processes that serve a disk of this VM, whether they answer or not.
///
/// # Errors
/// When the lock of the disk is held by a process that cannot be seen.
pub fn servers(rundir: &RunDir, id: &str) -> io::Result<Vec<Process>> {
    let mut processes = lockfile::holders(&lock_file(rundir, id))?;
    // A server that an earlier version of Rekindle has started holds no lock, but it listens.
    if let Some(process) = server(rundir, id)
        && !processes.contains(&process)
    {
        processes.push(process);
    }
    Ok(processes)
}

/// Returns the process that serves a disk, if there is one: the peer of its control socket. A server that is stopped, and
/// whose queue of connections is full, is found by its lock.
#[must_use]
pub fn server(rundir: &RunDir, id: &str) -> Option<Process> {
    let stream = match unix_socket::connect(&control_socket(rundir, id), CONNECT_TIMEOUT) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            return lockfile::holders(&lock_file(rundir, id)).ok()?.into_iter().find(Process::is_alive);
        }
        connected => connected.ok()?,
    };
    let pid = socket_peercred(&stream).ok()?.pid.as_raw_nonzero().get();
    Process::of(u32::try_from(pid).ok()?).ok().filter(Process::is_alive)
}

/// Returns whether a process holds the lock of a disk's server. Unlike [`server`], this connects to no process.
#[must_use]
pub fn is_served(rundir: &RunDir, id: &str) -> bool {
    open_record(&lock_file(rundir, id)).and_then(|file| is_locked(&file, 0)).unwrap_or(false)
}

/// Rejects a disk whose server runs and does not answer. A server that is ending is waited for, one that is stopped is not.
pub(super) fn refuse_silent(rundir: &RunDir, disk: &Disk) -> Result<(), DisksError> {
    let failed = |source| DisksError::Io { id: disk.id.clone(), doing: "finding its server", source };
    for server in servers(rundir, &disk.id).map_err(failed)? {
        let patience = if server.is_stopped() { Duration::ZERO } else { END_TIMEOUT };
        if !server.wait_end(patience).map_err(failed)? {
            return Err(DisksError::Silent { id: disk.id.clone(), pid: server.pid });
        }
    }
    Ok(())
}

/// Returns the command that serves a disk at its newest version, as a user of the VM.
pub(super) fn server_command(
    rundir: &RunDir,
    disk: &Disk,
    vcpus: u32,
    user: Option<u32>,
) -> Result<Command, DisksError> {
    let failed = |source| DisksError::Io { id: disk.id.clone(), doing: "finding this program", source };
    let mut command = this_program().map_err(failed)?;
    without_credentials(&mut command).args(["disk", "serve"]).arg(&disk.path);
    command.arg(format!("--control={}", control_socket(rundir, &disk.id).display()));
    // Every QEMU of the VM connects to this path.
    command.arg("--socket").arg(rundir.vmm(1).disk(&disk.id)).arg(format!("--queues={}", disk_queues(vcpus)));
    if let Some(user) = user {
        command.arg(format!("--user={user}"));
    }
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

/// Starts a server. It does not listen yet.
pub(super) fn spawn(rundir: &RunDir, disk: &Disk, command: &mut Command) -> Result<Child, DisksError> {
    let failed = |doing| move |source| DisksError::Io { id: disk.id.clone(), doing, source };
    rundir.link_log(&log_name(&disk.id));
    let log_path = rundir.file(&log_name(&disk.id));
    let mut options = OpenOptions::new();
    let stdout = options.create(true).append(true).mode(0o600).open(log_path).map_err(failed("opening its log"))?;
    let stderr = stdout.try_clone().map_err(failed("opening its log"))?;
    let locked = lockfile::hold(detach(command).stdout(stdout).stderr(stderr), &lock_file(rundir, &disk.id));
    locked.and_then(Command::spawn).map_err(failed("starting its server"))
}

/// Waits until a QEMU can connect to a server that was started.
pub(super) fn wait_until_it_answers(rundir: &RunDir, disk: &Disk, mut child: Child) -> Result<(), DisksError> {
    let deadline = Instant::now() + START_TIMEOUT;
    while !answers(rundir, &disk.id) {
        let has_ended = !matches!(child.try_wait(), Ok(None));
        if has_ended || Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            let log = last_lines(&rundir.file(&log_name(&disk.id)), LOG_TAIL_LINES);
            return Err(DisksError::Start { id: disk.id.clone(), image: disk.path.clone(), log });
        }
        thread::sleep(START_POLL_INTERVAL);
    }
    disown(child);
    Ok(())
}

/// Ends the server of a disk: by a command, otherwise by a signal. A missing server is no error.
pub(super) fn end_server(rundir: &RunDir, disk: &Disk) -> Result<(), DisksError> {
    let failed = |doing| move |source| DisksError::Io { id: disk.id.clone(), doing, source };
    let processes = servers(rundir, &disk.id).map_err(failed("finding its server"))?;
    if processes.is_empty() {
        return Ok(());
    }
    let asked = ask::<()>(rundir, &disk.id, &ControlCommand::End {});
    if let Err(e) = &asked {
        tracing::debug!("the server of disk {} cannot be asked to end: {e}", disk.id);
    }
    for server in processes {
        if asked.is_ok() && server.wait_end(END_TIMEOUT).map_err(failed("ending its server"))? {
            continue;
        }
        server.kill().map_err(failed("ending its server"))?;
        if !server.wait_end(END_TIMEOUT).map_err(failed("ending its server"))? {
            return Err(DisksError::Stuck { id: disk.id.clone(), pid: server.pid });
        }
    }
    Ok(())
}
