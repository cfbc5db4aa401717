//! Moves through `rekindle ocf`, as a cluster manager starts them: the guest is protected before and after the move,
//! and a stop follows a move that was interrupted.

use super::{Pair, wait_empty};
use crate::common::served::section;
use crate::common::{CommandResult, DEADLINE, Lab, Net, wait_for};
use serde_json::Value;
use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

const NAME: &str = "kept";

struct Managed {
    pair: Pair,
}

impl Managed {
    /// Defines a guest without a network: the definition must be the same on both hosts, and the two labs cannot have
    /// the same tap at the same time.
    fn new() -> Self {
        let pair = Pair::new(NAME);
        for lab in [&pair.here, &pair.there] {
            lab.vm(NAME).section(&section(&pair.disk, "")).net(Net::None).write();
        }
        Self { pair }
    }

    fn command(&self, lab: &Lab, action: &str, arguments: &[&str]) -> Command {
        let mut command = lab.command(["--json", "ocf", action, NAME, "--every", "200ms", "--definition"]);
        command.arg(lab.path("kept.toml")).arg("--store").arg(&self.pair.store).args(arguments);
        command.env_remove("FAR_FAULT");
        command
    }

    fn ocf(&self, lab: &Lab, action: &str, arguments: &[&str]) -> CommandResult {
        lab.finish(self.command(lab, action, arguments))
    }

    fn migrate(&self, from: &Lab, to: &Lab) -> Command {
        let mut command = self.command(from, "migrate-to", &["--to", "b", "--within", "60s", "--rekindle"]);
        command.arg(env!("CARGO_BIN_EXE_rekindle")).arg("--ssh").arg(to.path("ssh"));
        command
    }

    fn newest(&self) -> u64 {
        let listed = self.pair.here.rekindle(["--json", "store", "ls", self.pair.store.to_str().unwrap()]).ok().json();
        listed["checkpoints"].as_array().and_then(|all| all.last()?["number"].as_u64()).unwrap_or(0)
    }

    fn wait_checkpoints(&self, count: u64) {
        let target = self.newest() + count;
        wait_for("checkpoints", DEADLINE, || (self.newest() >= target).then_some(()));
    }
}

/// Returns the first and the last tick that the guest has written to its console on a host.
fn ticks(lab: &Lab) -> Option<(u64, u64)> {
    let text = fs::read(lab.run_root().join(NAME).join("console.log")).ok()?;
    let text = String::from_utf8_lossy(&text);
    // The last line may be incomplete.
    let (complete, _) = text.rsplit_once('\n')?;
    let mut ticks =
        complete.lines().filter_map(|line| line.trim_end().strip_prefix("tick ")?.split(' ').next()?.parse().ok());
    let first = ticks.next()?;
    Some((first, ticks.next_back().unwrap_or(first)))
}

/// Returns the last tick on the console before `act` removes the VM.
fn last_tick_during(lab: &Lab, act: impl FnOnce()) -> u64 {
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut last = ticks(lab).expect("no tick on the console").1;
            while lab.run_root().join(NAME).exists() {
                last = ticks(lab).map_or(last, |(_, newest)| newest);
                thread::sleep(Duration::from_millis(1));
            }
            last
        });
        act();
        reader.join().unwrap()
    })
}

fn wait_ticks(lab: &Lab) -> u64 {
    wait_for("ticks of the guest", DEADLINE, || ticks(lab).filter(|(first, last)| last > first).map(|(first, _)| first))
}

#[test]
fn a_guest_is_moved_while_it_runs_and_a_stop_takes_a_last_checkpoint() {
    let managed = Managed::new();
    let (here, there) = (&managed.pair.here, &managed.pair.there);
    managed.ocf(here, "start", &[]).ok();
    wait_ticks(here);
    managed.wait_checkpoints(2);
    let last = last_tick_during(here, || {
        here.finish(managed.migrate(here, there)).ok().prints(&["\"rounds\""]);
        wait_empty(here);
    });
    managed.ocf(here, "monitor", &[]).status(7);
    managed.ocf(here, "stop", &[]).ok();
    // A `monitor` on the destination is what `migrate_from` does.
    managed.ocf(there, "monitor", &[]).status(0);
    assert!(wait_ticks(there) > last, "the guest lost ticks in the move");
    managed.wait_checkpoints(2);

    // The other host is unreachable: the guest continues where it was, and is protected.
    fs::write(here.path("ssh-none"), "#!/bin/sh\nexit 255\n").unwrap();
    let mut nowhere = managed.command(there, "migrate-to", &["--to", "b", "--within", "60s", "--ssh"]);
    nowhere.arg(format!("sh {}", here.path("ssh-none").display()));
    there.finish(nowhere).status(1).prints(&["the connection to b has broken"]);
    managed.wait_checkpoints(2);

    // A move was killed in the pause: a stop loses nothing, and the guest continues after its last tick.
    let mut interrupted = managed.migrate(there, here);
    interrupted.env("REKINDLE_FAULT", "move.suspend.committed:kill");
    there.finish(interrupted).killed();
    wait_empty(here);
    let last = last_tick_during(there, || {
        assert_eq!(managed.ocf(there, "stop", &[]).ok().json()["lost"], Value::Null);
        wait_empty(there);
    });
    managed.ocf(here, "start", &[]).ok().prints(&["restored"]);
    assert!(wait_ticks(here) > last, "the guest lost ticks that were on the console");
    managed.ocf(here, "stop", &[]).ok();
    here.assert_empty();
}
