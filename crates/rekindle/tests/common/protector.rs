//! A protector that runs during a test, and operations on the protected guest.

use super::guest::Guest;
use super::lab::Lab;
use super::{DEADLINE, wait_for};
use rekindle_kernel::process::Process;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A running `rekindle protect`.
pub struct Protector {
    pub child: Child,
    /// Standard output, with a JSON event on each line.
    pub lines: BufReader<ChildStdout>,
}

impl Protector {
    /// Starts `rekindle protect` of a guest into a store, with additional arguments.
    pub fn start(guest: &Guest<'_>, lab: &Lab, store: &Path, arguments: &[&str]) -> Self {
        Self::start_with(guest, lab, store, arguments, &[])
    }

    /// Starts `rekindle protect` as [`Self::start`] does, with additional environment variables.
    pub fn start_with(
        guest: &Guest<'_>,
        lab: &Lab,
        store: &Path,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Self {
        let store = store.to_str().unwrap();
        let mut command = lab.command(["--json", "protect", &guest.name, "--store", store]);
        let mut child =
            command.args(arguments).envs(environment.iter().copied()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Waits for the next event of this kind. Skips other events, and prints them except checkpoints.
    #[track_caller]
    pub fn wait(&mut self, event: &str) -> Value {
        loop {
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "the protector ended before `{event}`");
            let value: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
            if value["event"] == event {
                return value;
            }
            if value["event"] != "checkpoint" {
                eprintln!("{}", line.trim_end());
            }
        }
    }

    /// Waits for a checkpoint that contains all changes that the guest has made until now.
    #[track_caller]
    pub fn next_checkpoint(&mut self) -> Value {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64;
        loop {
            let checkpoint = self.wait("checkpoint");
            if checkpoint["stopped_host_us"].as_u64().unwrap() > now {
                return checkpoint;
            }
        }
    }

    /// Returns the protector's peak resident memory, in bytes.
    pub fn most_memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the protector runs");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// Waits until the protector has been killed.
    pub fn wait_killed(mut self) {
        let _ = std::io::copy(&mut self.lines, &mut std::io::sink());
        assert!(!self.child.wait().unwrap().success(), "the protector ended successfully, but should have been killed");
    }

    /// Stops the protector with SIGTERM, so that it does not leave the guest stopped.
    pub fn end(mut self) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        // A full pipe would block the protector.
        let _ = std::io::copy(&mut self.lines, &mut std::io::sink());
        assert!(self.child.wait().unwrap().success());
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Protector {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a store of the lab. Creates it if it does not exist.
pub fn store(lab: &Lab, name: &str) -> PathBuf {
    let path = lab.path(&format!("store-{name}"));
    if !path.exists() {
        lab.rekindle(["store", "init", path.to_str().unwrap()]).ok();
    }
    path
}

/// Simulates a crash of the guest's host: kills QEMU and removes the VM's run directory.
pub fn crash(guest: &Guest<'_>) {
    // Do not check the run state: a checkpoint may have stopped the guest.
    let [qemu] = guest.qemus().try_into().expect("one QEMU");
    qemu.process.kill().unwrap();
    assert!(qemu.process.wait_end(Duration::from_secs(10)).unwrap());
    guest.rekindle(&["stop", "--now"]).ok();
}

/// Runs `rekindle restore`, which has to succeed.
#[track_caller]
pub fn restore(guest: &Guest<'_>, store: &Path, arguments: &[&str]) -> Value {
    restore_with(guest, store, arguments, &[])
}

/// Runs `rekindle restore` as [`restore`] does, with additional environment variables, which its pager inherits.
#[track_caller]
pub fn restore_with(guest: &Guest<'_>, store: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Value {
    let words = ["--json", "restore"].iter().chain(arguments).copied();
    let mut command = guest.lab.command(words.chain([guest.name.as_str(), "--store", store.to_str().unwrap()]));
    command.envs(environment.iter().copied());
    guest.lab.finish(command).ok().json()
}

/// Waits until all of the guest's memory is loaded.
pub fn wait_filled(guest: &Guest<'_>) {
    wait_for("the memory to be loaded", DEADLINE, || (!guest.file("fill.json").exists()).then_some(()));
}

/// A thread that stops a pager for most of the time, so that its fill takes long. The pager is fast again on drop. On a
/// busy machine the pager is stopped late, and then for longer.
pub struct Slowdown {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

fn signal(process: Process, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(process.pid).unwrap()).unwrap();
    if process.is_alive() {
        let _ = kill_process(pid, signal);
    }
}

impl Slowdown {
    pub fn of(process: Process) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&end);
        let thread = thread::spawn(move || {
            let mut worked = Duration::from_millis(1);
            while !is_over.load(Ordering::Relaxed) {
                signal(process, Signal::STOP);
                // Stopped for 40 times as long as it has worked. The limit is how long the guest may wait for a missing
                // page.
                thread::sleep((worked * 40).min(Duration::from_millis(400)));
                let resumed = Instant::now();
                signal(process, Signal::CONT);
                thread::sleep(Duration::from_millis(1));
                worked = resumed.elapsed();
            }
            signal(process, Signal::CONT);
        });
        Self { end, thread: Some(thread) }
    }
}

impl Drop for Slowdown {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

/// Finds the pager of a guest.
pub fn pager(guest: &Guest<'_>) -> Option<Process> {
    let processes = super::observe::with_argument_containing("pager").unwrap();
    processes.into_iter().find(|process| {
        let line = fs::read_to_string(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
        line.contains("\0pager\0")
            && line.ends_with(&format!("\0{}\0", guest.name))
            && has_run_root(process.pid, &guest.lab.run_root())
    })
}

fn has_run_root(pid: u32, root: &Path) -> bool {
    let text = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    String::from_utf8_lossy(&text).contains(&format!("REKINDLE_RUN_DIR={}", root.display()))
}
