//! The process that takes checkpoints beside a guest: `rekindle protect`, in a session of its own.
//!
//! `protector.json` in the run directory names it. It may die at any time: the monitor starts another one, which goes on where that one
//! was.

use crate::resource::Resource;
use rekindle_kernel::output::last_lines;
use rekindle_kernel::process::Process;
use rekindle_kernel::spawn::{detach, disown};
use rekindle_vm::attach::protector;
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

/// Between two looks whether a child has ended.
const LOOK: Duration = Duration::from_millis(10);

/// Lines at the end of its log that are looked at.
const LAST: usize = 100;
/// So much is told of what it has said, in characters.
const WORDS: usize = 500;

/// `protector.json`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Noted {
    pid: u32,
    started: u64,
}

/// The one that takes checkpoints, whoever has started it; else the one that was started here last, if it lives.
#[must_use]
pub fn running(rundir: &RunDir) -> Option<Process> {
    protector(rundir).or_else(|| noted(rundir))
}

fn noted(rundir: &RunDir) -> Option<Process> {
    let text = fs::read(rundir.file("protector.json")).ok()?;
    // Torn or unknown: another one is started, and the store lets one of them commit.
    let Noted { pid, started } = serde_json::from_slice(&text).ok()?;
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

/// Start one, if there is none. Whether it was started.
///
/// # Errors
/// The system's.
pub fn ensure(rundir: &RunDir, resource: &Resource) -> io::Result<bool> {
    if running(rundir).is_some() {
        return Ok(false);
    }
    // What the previous one has reported is not this one's.
    begin_anew(&rundir.file("protect.log"))?;
    let mut command = command(rundir, resource.protect_arguments(false))?;
    let child = detach(&mut command).stdin(Stdio::null()).spawn()?;
    let Process { pid, started } = Process::of(child.id())?;
    disown(child);
    write_json(&rundir.file("protector.json"), &Noted { pid, started })?;
    Ok(true)
}

/// What the one that was started last has said last, in short.
#[must_use]
pub fn last_words(rundir: &RunDir) -> String {
    let text = last_lines(&rundir.file("protect.log"), LAST);
    let last = text.lines().rev().find(|line| !line.trim().is_empty() && !line.starts_with('{')).unwrap_or("nothing");
    last.chars().take(WORDS).collect()
}

/// Wait until the one that was started has got at the guest, or has ended instead.
///
/// # Errors
/// Its last words, if it has ended. Who is neither there by `deadline` may be yet.
pub fn attached(rundir: &RunDir, deadline: Instant) -> Result<(), String> {
    loop {
        // It reports one for each checkpoint, so the end of its log is enough.
        if last_lines(&rundir.file("protect.log"), LAST).contains("\"event\":") || Instant::now() > deadline {
            return Ok(());
        }
        if running(rundir).is_none() {
            return Err(last_words(rundir));
        }
        thread::sleep(LOOK);
    }
}

/// End the one that runs, if there is one. It is given until `deadline` to end by itself, so that it does not leave the guest stopped.
///
/// # Errors
/// When it can neither be told nor killed.
pub fn end(rundir: &RunDir, deadline: Instant) -> io::Result<()> {
    let Some(process) = running(rundir) else { return Ok(()) };
    if noted(rundir) != Some(process) {
        tracing::warn!("{}: process {}, which takes checkpoints of it, is ended", rundir.name(), process.pid);
    }
    process.terminate()?;
    if !process.wait_end(deadline.saturating_duration_since(Instant::now()))? {
        process.kill()?;
        if !process.wait_end(Duration::from_secs(5))? {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it was killed, and does not end"));
        }
    }
    Ok(())
}

/// Take the last checkpoint, from which the guest does not go on, and wait for it until `deadline`.
///
/// # Errors
/// A text: why there is none. The guest may be stopped all the same.
pub fn last(rundir: &RunDir, resource: &Resource, deadline: Instant) -> Result<(), String> {
    finish(rundir, resource.protect_arguments(true), deadline)
}

/// Finish, or undo, what was cut off, by `deadline`.
///
/// # Errors
/// A text: why that cannot be.
pub fn recover(rundir: &RunDir, deadline: Instant) -> Result<(), String> {
    finish(rundir, ["recover", rundir.name()].map(OsString::from), deadline)
}

/// Run ourselves, until `deadline` at most: whatever it waits for, this does not.
fn finish(rundir: &RunDir, arguments: impl IntoIterator<Item = OsString>, deadline: Instant) -> Result<(), String> {
    let spawned = command(rundir, arguments).and_then(|mut command| command.stdin(Stdio::null()).spawn());
    let mut child = spawned.map_err(|e| e.to_string())?;
    match wait(&mut child, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!("see {}", rundir.file("protect.log").display())),
        Err(e) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(e.to_string())
        }
    }
}

fn wait(child: &mut Child, deadline: Instant) -> io::Result<bool> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it was not done in time"));
        }
        thread::sleep(LOOK);
    }
}
