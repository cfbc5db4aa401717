//! A protector beside a test, and what is done to the guest that it protects.

use super::guest::Guest;
use super::lab::Lab;
use super::{DEADLINE, wait_for};
use rekindle_kernel::process::Process;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A protector beside the test.
pub struct Protector {
    /// Its process.
    pub child: Child,
    /// What it says.
    pub lines: BufReader<ChildStdout>,
}

impl Protector {
    /// `rekindle protect` of a guest into a store, with more arguments.
    pub fn start(guest: &Guest<'_>, lab: &Lab, store: &Path, arguments: &[&str]) -> Self {
        Self::start_with(guest, lab, store, arguments, &[])
    }

    /// The same with more in its environment.
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

    /// The next event of this kind; those before it are passed over, and told if the test fails.
    #[track_caller]
    pub fn wait(&mut self, event: &str) -> Value {
        loop {
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "it ended before `{event}`");
            let value: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
            if value["event"] == event {
                return value;
            }
            if value["event"] != "checkpoint" {
                eprintln!("{}", line.trim_end());
            }
        }
    }

    /// Wait for a checkpoint of what the guest has done until now.
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

    /// The most memory that it has had, in bytes.
    pub fn most_memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("it lives");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// Wait for its death.
    pub fn dies(mut self) {
        let _ = std::io::copy(&mut self.lines, &mut std::io::sink());
        assert!(!self.child.wait().unwrap().success(), "it was to be killed");
    }

    /// Let it end by itself, so that it does not leave the guest stopped.
    pub fn end(mut self) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        // Whatever it says until then must not keep it.
        let _ = std::io::copy(&mut self.lines, &mut std::io::sink());
        assert!(self.child.wait().unwrap().success());
    }

    /// Kill it, whatever it does.
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

/// A store of a lab, created if it is not there yet.
pub fn store(lab: &Lab, name: &str) -> PathBuf {
    let path = lab.path(&format!("store-{name}"));
    if !path.exists() {
        lab.rekindle(["store", "init", path.to_str().unwrap()]).ok();
    }
    path
}

/// The host of the guest has died: its QEMU, and all that Rekindle kept of it.
pub fn crash(guest: &Guest<'_>) {
    // Whatever it does: a checkpoint may have stopped it just now.
    let [qemu] = guest.qemus().try_into().expect("one QEMU");
    qemu.process.kill().unwrap();
    assert!(qemu.process.wait_end(Duration::from_secs(10)).unwrap());
    guest.rekindle(&["stop", "--now"]).ok();
}

/// `rekindle restore`, which has to succeed.
#[track_caller]
pub fn restore(guest: &Guest<'_>, store: &Path, arguments: &[&str]) -> Value {
    restore_with(guest, store, arguments, &[])
}

/// The same with more in its environment, and its pager's.
#[track_caller]
pub fn restore_with(guest: &Guest<'_>, store: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Value {
    let all = ["--json", "restore"].iter().chain(arguments).copied();
    let mut command = guest.lab.command(all.chain([guest.name.as_str(), "--store", store.to_str().unwrap()]));
    command.envs(environment.iter().copied());
    guest.lab.finish(command).ok().json()
}

/// Wait until a restore has filled.
pub fn wait_filled(guest: &Guest<'_>) {
    wait_for("the memory to be there", DEADLINE, || (!guest.file("fill.json").exists()).then_some(()));
}

/// The pager of a guest.
pub fn pager(guest: &Guest<'_>) -> Option<Process> {
    let all = super::eyes::with_argument_containing("pager").unwrap();
    all.into_iter().find(|process| {
        let line = fs::read_to_string(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
        line.contains("\0pager\0")
            && line.ends_with(&format!("\0{}\0", guest.name))
            && environment(process.pid, &guest.lab.run_root())
    })
}

fn environment(pid: u32, root: &Path) -> bool {
    let text = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    String::from_utf8_lossy(&text).contains(&format!("REKINDLE_RUN_DIR={}", root.display()))
}
