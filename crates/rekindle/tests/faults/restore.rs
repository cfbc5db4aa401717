//! Every fault point of a restore, and of preparing one. There is no guest yet that could be lost: after each death either the
//! checkpoint is unchanged and can be restored, or the guest runs with its memory.

use super::Outcome::{self, AsItWas, Finished, LostLate, NotTried, Nothing, Removed};
use super::{ACTIONS, TABLE};
use crate::common::{CommandResult, DEADLINE, Guest, Lab, Watch, wait_for};
use std::thread;

#[test]
fn preparing_a_restore_with_every_death() {
    walk("spare", &["--prepare"], false, |point| point.starts_with("prepare."));
}

#[test]
fn restore_with_every_death() {
    walk("again", &[], false, |point| point.starts_with("restore."));
}

#[test]
fn restore_into_a_prepared_qemu_with_every_death() {
    // The prepared QEMU has already been started.
    let wanted = |point: &str| point.starts_with("restore.") && point != "restore.prepare.spawned";
    walk("waits", &[], true, wanted);
}

fn walk(name: &str, arguments: &[&str], prepared: bool, wanted: impl Fn(&str) -> bool) {
    let lab = Lab::new();
    let guest = lab.vm(name).boot(&[]);
    guest.touch("24M");
    let boot = guest.boot_id();
    let store = lab.path("store");
    let store = store.to_str().unwrap();
    lab.rekindle(["protect", name, "--store", store, "--create-store", "--every", "50ms", "--count", "1"]).ok();
    guest.only_qemu().process.kill().unwrap();
    guest.rekindle(&["stop", "--now"]).ok();
    let mut tried = 0;
    let mut wrong = Vec::new();
    for (point, outcomes) in TABLE.iter().filter(|(point, _)| wanted(point)) {
        for (action, outcome) in ACTIONS.iter().zip(outcomes).filter(|(_, outcome)| **outcome != NotTried) {
            // The QEMU is started only after this point, so it cannot be killed.
            if !prepared && *point == "restore.prepare.journalled" && *action == "kill-new" {
                continue;
            }
            tried += 1;
            let case =
                Case { guest: &guest, store, arguments, prepared, boot: &boot, fault: format!("{point}:{action}") };
            let one = thread::scope(|scope| scope.spawn(|| case.run(*outcome)).join());
            if let Err(panic) = one {
                let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                wrong.push(format!("==== {}, which has to end as {outcome:?}:\n{text}\n", case.fault));
                let _ = guest.rekindle(&["stop", "--now"]);
            }
        }
    }
    assert!(tried > 0, "no fault was tried");
    assert!(wrong.is_empty(), "{} of {tried} faults end wrongly:\n{}", wrong.len(), wrong.join("\n"));
}

struct Case<'a> {
    guest: &'a Guest<'a>,
    store: &'a str,
    arguments: &'a [&'a str],
    prepared: bool,
    boot: &'a str,
    fault: String,
}

impl Case<'_> {
    fn restore(&self, arguments: &[&str]) -> std::process::Command {
        let first = ["--json", "restore", &self.guest.name, "--store", self.store];
        self.guest.lab.command(first.iter().chain(arguments))
    }

    fn run(&self, outcome: Outcome) {
        let (guest, lab) = (self.guest, self.guest.lab);
        if self.prepared {
            lab.finish(self.restore(&["--prepare"])).ok();
        }
        let watch = Watch::start(&lab.run_root());
        let mut command = self.restore(self.arguments);
        command.env("REKINDLE_FAULT", &self.fault);
        let done = lab.finish(command);
        match outcome {
            Removed => {
                assert_killed(&done);
                assert_eq!(guest.status(), "needs-recovery", "{done}");
                lab.finish(self.restore(&[])).status(1).prints(&["rekindle recover"]);
                guest.rekindle(&["recover"]).ok().prints(&["is removed"]);
                lab.assert_empty();
            }
            AsItWas => {
                done.status(1);
                lab.assert_empty();
            }
            Finished => {
                assert_killed(&done);
                assert_eq!(guest.status(), "needs-recovery", "{done}");
                guest.rekindle(&["recover"]).ok().prints(&["finished", "with its memory"]);
                self.assert_runs();
            }
            Nothing if self.arguments.contains(&"--prepare") => {
                assert_killed(&done);
                assert_eq!(guest.status(), "prepared", "{done}");
                guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
                let restored = lab.finish(self.restore(&[])).ok().json();
                assert_eq!(restored["prepared"], true, "{restored}");
                self.assert_runs();
            }
            Nothing => {
                assert_killed(&done);
                // QEMU itself may wait for a page that no pager supplies. The guest's helpers have not been restarted either.
                let status = guest.status();
                let is_degraded = status.contains("degraded") && status.contains("rekindle recover");
                assert!(is_degraded || ["running", "silent"].contains(&status.as_str()), "{status}: {done}");
                guest.rekindle(&["recover"]).ok();
                self.assert_runs();
                assert_eq!(guest.status(), "running");
            }
            LostLate => {
                assert!([Some(0), Some(1)].contains(&done.code), "{done}");
                let status = guest.status();
                assert!(["ended", "absent"].contains(&status.as_str()), "{status} after {done}");
            }
            other => unreachable!("{other:?} is not for a restore"),
        }
        watch.end();
        if guest.status() != "absent" {
            guest.rekindle(&["stop", "--now"]).ok();
        }
        lab.assert_empty();
        // The checkpoint can still be restored.
        let watch = Watch::start(&lab.run_root());
        lab.finish(self.restore(&[])).ok();
        self.assert_runs();
        watch.end();
        guest.rekindle(&["stop", "--now"]).ok();
        lab.assert_empty();
    }

    /// Asserts that the guest runs with its memory.
    fn assert_runs(&self) {
        // The first packet to a new interface may be lost.
        self.guest.wait_ready();
        assert_eq!(self.guest.boot_id(), self.boot);
        let fill = self.guest.file("fill.json");
        wait_for("the memory to be loaded", DEADLINE, || (!fill.exists()).then_some(()));
        self.guest.verify();
        self.guest.assert_sound();
    }
}

fn assert_killed(done: &CommandResult) {
    assert_eq!(done.code, None, "the command was not killed: {done}");
}
