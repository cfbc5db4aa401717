//! `rekindle protect` is killed at every write, sync and link of a commit, and at every scan of the guest's memory.
//! Afterwards the store holds the newest committed checkpoint or the previous one, and the guest continues to run.
//!
//! strace(1) counts the calls and kills the process at the named one. The store crate tests, on a disk of its own, the
//! effect of a power failure on unsynced writes.

use crate::common::{Guest, Lab, assert_ticks_once};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// System calls at which the protector is killed, each with the step between the tried call numbers. strace counts the
/// calls of each thread, and kills when the first thread reaches the number.
const CALLS: &[(&str, usize)] =
    &[("fsync", 1), ("linkat,link", 1), ("fdatasync", 1), ("unlinkat,unlink", 1), ("pwrite64", 1), ("ioctl", 7)];

struct Case<'a> {
    lab: &'a Lab,
    guest: &'a Guest<'a>,
    store: PathBuf,
}

impl Case<'_> {
    fn store(&self) -> &str {
        self.store.to_str().unwrap()
    }

    /// Runs a protector until it has committed one checkpoint, or is killed as it starts call `number` of `calls`.
    /// Returns whether it was killed.
    fn killed(&self, calls: &str, number: u32) -> bool {
        let inject = format!("inject={calls}:signal=KILL:when={number}");
        let rekindle =
            self.lab.command(["protect", &self.guest.name, "--store", self.store(), "--create-store", "--count", "1"]);
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={calls}"), "-e", &inject]);
        command.arg(rekindle.get_program()).args(rekindle.get_args());
        for (name, value) in rekindle.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        match status.expect("strace is installed").code() {
            Some(0) => false,
            // strace ends with the status of the traced process.
            None | Some(137) => true,
            Some(other) => panic!("at {calls} {number}: exit status {other}\n{}", self.lab.state_report()),
        }
    }

    /// Returns the number of the newest checkpoint; 0 if there is none.
    fn newest(&self) -> u64 {
        let listed = self.lab.rekindle(["--json", "store", "ls", self.store()]).ok().json();
        let checkpoints = listed["checkpoints"].as_array().unwrap_or_else(|| panic!("{listed}"));
        checkpoints.iter().map(|checkpoint| checkpoint["number"].as_u64().unwrap()).max().unwrap_or(0)
    }
}

/// Returns whether the store exists: the first protector may have been killed before it created it.
fn is_store(path: &Path) -> bool {
    path.join("rekindle-store").exists()
}

#[test]
fn a_protector_killed_at_every_step_of_a_commit_loses_no_committed_checkpoint() {
    let lab = Lab::new();
    let guest = lab.vm("steps").boot(&[]);
    guest.touch("8M");
    let boot = guest.boot_id();
    let case = Case { lab: &lab, guest: &guest, store: lab.path("store") };
    let mut kills = 0;
    for (calls, step) in CALLS {
        let mut before = if is_store(&case.store) { case.newest() } else { 0 };
        let kills_before = kills;
        for number in (1..).step_by(*step) {
            let killed = case.killed(calls, number);
            // A protector that is killed during a pause leaves the guest stopped; `recover` resumes it.
            guest.rekindle(&["recover"]).ok();
            assert_eq!(guest.boot_id(), boot);
            let newest = if is_store(&case.store) { case.newest() } else { 0 };
            let expected = if killed { before..=before + 1 } else { before + 1..=before + 1 };
            assert!(expected.contains(&newest), "{calls} {number}: {before}, then {newest}");
            if newest > 0 {
                lab.rekindle(["store", "verify", case.store()]).ok();
            }
            before = newest;
            if !killed {
                break;
            }
            kills += 1;
        }
        eprintln!("{calls}: killed at {}", kills - kills_before);
        assert!(kills > kills_before, "no call of {calls}");
    }
    assert!(kills > 20, "{kills}");
    guest.verify();
    guest.assert_sound();
    assert_ticks_once(&guest.file("console.log"));

    // The next checkpoint can be restored.
    lab.rekindle(["protect", &guest.name, "--store", case.store(), "--count", "1"]).ok();
    let [qemu] = guest.qemus().try_into().expect("one QEMU");
    qemu.process.kill().unwrap();
    guest.rekindle(&["stop", "--now"]).ok();
    lab.rekindle(["restore", &guest.name, "--store", case.store()]).ok();
    assert_eq!(guest.boot_id(), boot);
    guest.verify();
    guest.assert_sound();
}
