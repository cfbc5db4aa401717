//! The protector of a guest: `rekindle protect`, in a session of its own.
//!
//! `protector.json` in the run directory identifies the protector. A protector may die at any time: the monitor starts
//! another one, which continues the work.

use crate::resource::Resource;
use rekindle_kernel::output::last_lines;
use rekindle_kernel::process::Process;
use rekindle_kernel::spawn::{detach, disown, this_program};
use rekindle_vm::lock::protector;
use rekindle_vm::logs::begin_anew;
use rekindle_vm::rundir::{RunDir, write_json};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Number of lines that are read from the end of the protector's log.
const LOG_LINES: usize = 100;

/// Maximum length of a reported protector message, in characters.
const MAX_MESSAGE_CHARS: usize = 500;

/// Content of `protector.json`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct ProtectorId {
    pid: u32,
    started: u64,
}

/// Returns the protector that is attached to the guest, whichever process has started it; if none is attached, the
/// protector that this node has started last, if it is alive.
#[must_use]
pub fn find_protector(rundir: &RunDir) -> Option<Process> {
    protector(rundir).or_else(|| started_by_this_node(rundir))
}

/// Returns the protector that this node has started last, if it is alive.
fn started_by_this_node(rundir: &RunDir) -> Option<Process> {
    let text = fs::read(rundir.file("protector.json")).ok()?;
    // If the file is unreadable, another protector is started, and the store lets only one of them commit.
    let ProtectorId { pid, started } = serde_json::from_slice(&text).ok()?;
    Some(Process { pid, started }).filter(Process::is_alive)
}

/// Returns a command of this program that logs to the protector's log.
fn rekindle_command(rundir: &RunDir, arguments: impl IntoIterator<Item = OsString>) -> io::Result<Command> {
    let log = rundir.file("protect.log");
    let open = || OpenOptions::new().create(true).append(true).mode(0o600).open(&log);
    let mut rekindle_command = this_program()?;
    rekindle_command.args(arguments).stdout(open()?).stderr(open()?);
    if let Some(root) = rundir.path().parent() {
        rekindle_command.env("REKINDLE_RUN_DIR", root);
    }
    Ok(rekindle_command)
}

/// Starts a protector if there is none. Returns whether one was started.
///
/// # Errors
/// An I/O error if the log or `protector.json` cannot be written, or the process cannot be started.
pub fn ensure(rundir: &RunDir, resource: &Resource) -> io::Result<bool> {
    if find_protector(rundir).is_some() {
        return Ok(false);
    }
    // Start a new log: it must not contain reports of the previous protector.
    begin_anew(&rundir.file("protect.log"))?;
    let mut command = rekindle_command(rundir, resource.protect_arguments(false))?;
    let child = detach(&mut command).stdin(Stdio::null()).spawn()?;
    let Process { pid, started } = Process::of(child.id())?;
    disown(child);
    write_json(&rundir.file("protector.json"), &ProtectorId { pid, started })?;
    Ok(true)
}

/// Returns the last message in the log of the newest protector, truncated to a readable length.
#[must_use]
pub fn last_message(rundir: &RunDir) -> String {
    let text = last_lines(&rundir.file("protect.log"), LOG_LINES);
    let is_message = |line: &&str| !line.trim().is_empty() && !line.starts_with('{');
    let message = text.lines().rfind(is_message).unwrap_or("nothing");
    message.chars().take(MAX_MESSAGE_CHARS).collect()
}

/// Waits until the started protector has attached to the guest or has ended, or `deadline` has passed.
///
/// # Errors
/// The protector's last message, if the protector has ended. At `deadline` the result is `Ok`: the protector may still
/// attach.
pub fn wait_attached(rundir: &RunDir, deadline: Instant) -> Result<(), String> {
    loop {
        // The protector logs an event for each checkpoint, so the end of the log is enough.
        if last_lines(&rundir.file("protect.log"), LOG_LINES).contains("\"event\":") || Instant::now() > deadline {
            return Ok(());
        }
        if find_protector(rundir).is_none() {
            return Err(last_message(rundir));
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Ends the running protector, if there is one. Until `deadline` the protector may end by itself; a protector that is
/// killed may leave the guest stopped.
///
/// # Errors
/// An I/O error if the protector cannot be signalled, or does not end after a kill.
pub fn end(rundir: &RunDir, deadline: Instant) -> io::Result<()> {
    let Some(process) = find_protector(rundir) else { return Ok(()) };
    if started_by_this_node(rundir) != Some(process) {
        tracing::warn!(
            "{}: ending process {}, which takes checkpoints of it and was not started by the cluster",
            rundir.name(),
            process.pid
        );
    }
    process.terminate()?;
    if !process.wait_end(deadline.saturating_duration_since(Instant::now()))? {
        process.kill()?;
        if !process.wait_end(Duration::from_secs(5))? {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the protector was killed but does not end"));
        }
    }
    Ok(())
}

/// Takes the last checkpoint and waits for it until `deadline`. The guest stays stopped afterwards.
///
/// # Errors
/// The reason why no checkpoint was taken. The guest may be stopped nevertheless.
pub fn take_last_checkpoint(rundir: &RunDir, resource: &Resource, deadline: Instant) -> Result<(), String> {
    run_rekindle(rundir, resource.protect_arguments(true), deadline)
}

/// Finishes or undoes an interrupted operation, by `deadline`.
///
/// # Errors
/// The reason why the recovery failed.
pub fn recover(rundir: &RunDir, deadline: Instant) -> Result<(), String> {
    run_rekindle(rundir, ["recover", rundir.name()].map(OsString::from), deadline)
}

/// Runs this program with `arguments`, and kills it at `deadline`.
fn run_rekindle(
    rundir: &RunDir,
    arguments: impl IntoIterator<Item = OsString>,
    deadline: Instant,
) -> Result<(), String> {
    let spawned = rekindle_command(rundir, arguments).and_then(|mut command| command.stdin(Stdio::null()).spawn());
    let mut child = spawned.map_err(|e| e.to_string())?;
    match wait_for_success(&mut child, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!("it failed; see {}", rundir.file("protect.log").display())),
        Err(e) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(e.to_string())
        }
    }
}

/// Waits until the child has ended. Returns whether it succeeded.
fn wait_for_success(child: &mut Child, deadline: Instant) -> io::Result<bool> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long"));
        }
        thread::sleep(POLL_INTERVAL);
    }
}
