//! The protector of a guest: `rekindle protect`, in a session of its own.
//!
//! `protector.json` in the run directory identifies it. It may die at any time: the monitor starts another one, which
//! continues its work.

use crate::resource::Resource;
use rekindle_kernel::output::last_lines;
use rekindle_kernel::process::Process;
use rekindle_kernel::spawn::{detach, disown};
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

/// How many lines at the end of the protector's log are read.
const LOG_LINES: usize = 100;

/// Longest message of the protector that is reported, in characters.
const MAX_MESSAGE_CHARS: usize = 500;

/// `protector.json`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct ProtectorId {
    pid: u32,
    started: u64,
}

/// Returns the protector that is attached to the guest, whichever process has started it; else the one that was started
/// here last, if it lives.
#[must_use]
pub fn running(rundir: &RunDir) -> Option<Process> {
    protector(rundir).or_else(|| recorded(rundir))
}

fn recorded(rundir: &RunDir) -> Option<Process> {
    let text = fs::read(rundir.file("protector.json")).ok()?;
    // If the file is unreadable, another protector is started, and the store lets only one of them commit.
    let ProtectorId { pid, started } = serde_json::from_slice(&text).ok()?;
    Some(Process { pid, started }).filter(Process::is_alive)
}

fn command(rundir: &RunDir, arguments: impl IntoIterator<Item = OsString>) -> io::Result<Command> {
    let log = rundir.file("protect.log");
    let open = || OpenOptions::new().create(true).append(true).mode(0o600).open(&log);
    let mut command = Command::new(std::env::current_exe()?);
    command.args(arguments).stdout(open()?).stderr(open()?);
    if let Some(root) = rundir.path().parent() {
        command.env("REKINDLE_RUN_DIR", root);
    }
    Ok(command)
}

/// Starts a protector if there is none. Returns whether it was started.
///
/// # Errors
/// Errors of the operating system.
pub fn ensure(rundir: &RunDir, resource: &Resource) -> io::Result<bool> {
    if running(rundir).is_some() {
        return Ok(false);
    }
    // Start a new log: it must not contain reports of the previous protector.
    begin_anew(&rundir.file("protect.log"))?;
    let mut command = command(rundir, resource.protect_arguments(false))?;
    let child = detach(&mut command).stdin(Stdio::null()).spawn()?;
    let Process { pid, started } = Process::of(child.id())?;
    disown(child);
    write_json(&rundir.file("protector.json"), &ProtectorId { pid, started })?;
    Ok(true)
}

/// Returns the last message of the protector that was started last, shortened.
#[must_use]
pub fn last_message(rundir: &RunDir) -> String {
    let text = last_lines(&rundir.file("protect.log"), LOG_LINES);
    let last = text.lines().rev().find(|line| !line.trim().is_empty() && !line.starts_with('{')).unwrap_or("nothing");
    last.chars().take(MAX_MESSAGE_CHARS).collect()
}

/// Waits until the started protector has attached to the guest, or has ended instead.
///
/// # Errors
/// Its last message, if it has ended. A protector that has not attached by `deadline` may still do so.
pub fn wait_attached(rundir: &RunDir, deadline: Instant) -> Result<(), String> {
    loop {
        // It reports an event for each checkpoint, so the end of its log is enough.
        if last_lines(&rundir.file("protect.log"), LOG_LINES).contains("\"event\":") || Instant::now() > deadline {
            return Ok(());
        }
        if running(rundir).is_none() {
            return Err(last_message(rundir));
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Ends the running protector, if there is one. Until `deadline` it may end by itself, so that it does not leave the
/// guest stopped.
///
/// # Errors
/// If it can be neither signalled nor killed.
pub fn end(rundir: &RunDir, deadline: Instant) -> io::Result<()> {
    let Some(process) = running(rundir) else { return Ok(()) };
    if recorded(rundir) != Some(process) {
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

/// Takes the last checkpoint, after which the guest stays stopped, and waits for it until `deadline`.
///
/// # Errors
/// A text that states why there is none. The guest may be stopped nevertheless.
pub fn take_last_checkpoint(rundir: &RunDir, resource: &Resource, deadline: Instant) -> Result<(), String> {
    run_rekindle(rundir, resource.protect_arguments(true), deadline)
}

/// Finishes or undoes an interrupted operation, by `deadline`.
///
/// # Errors
/// A text that states why that failed.
pub fn recover(rundir: &RunDir, deadline: Instant) -> Result<(), String> {
    run_rekindle(rundir, ["recover", rundir.name()].map(OsString::from), deadline)
}

/// Runs this program with `arguments`, until `deadline` at most, whatever it waits for.
fn run_rekindle(
    rundir: &RunDir,
    arguments: impl IntoIterator<Item = OsString>,
    deadline: Instant,
) -> Result<(), String> {
    let spawned = command(rundir, arguments).and_then(|mut command| command.stdin(Stdio::null()).spawn());
    let mut child = spawned.map_err(|e| e.to_string())?;
    match wait_for(&mut child, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!("it failed; see {}", rundir.file("protect.log").display())),
        Err(e) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(e.to_string())
        }
    }
}

fn wait_for(child: &mut Child, deadline: Instant) -> io::Result<bool> {
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
