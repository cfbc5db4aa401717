//! Every fault point of a restore, and of preparing a restore. No guest that could be lost runs yet: after each death
//! either the checkpoint is unchanged and can be restored, or the guest runs with its memory.

use super::Outcome::{self, AsItWas, Finished, LostLate, NotTried, Nothing, Removed};
use super::{ACTIONS, Failures, TABLE};
use crate::common::protector::wait_filled;
use crate::common::{CommandResult, Guest, Lab, Watch};

/// The QEMU that a restore uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Destination {
    /// The restore starts it.
    New,
    /// `rekindle restore --prepare` has started it before.
    Prepared,
}

#[test]
fn preparing_a_restore_with_every_death() {
    walk("spare", &["--prepare"], Destination::New, |point| point.starts_with("prepare."));
}

#[test]
fn restore_with_every_death() {
    walk("again", &[], Destination::New, |point| point.starts_with("restore."));
}

#[test]
fn restore_into_a_prepared_qemu_with_every_death() {
    // The prepared QEMU has already been started.
    let is_of_a_start = |point: &str| ["restore.prepare.spawned", "restore.prepare.recorded"].contains(&point);
    let is_wanted = |point: &str| point.starts_with("restore.") && !is_of_a_start(point);
    walk("waits", &[], Destination::Prepared, is_wanted);
}

/// Takes a checkpoint of a guest and tries each death at each of the points of a restore that `is_wanted` selects.
fn walk(name: &str, arguments: &[&str], destination: Destination, is_wanted: impl Fn(&str) -> bool) {
    let lab = Lab::new();
    let guest = lab.vm(name).boot(&[]);
    guest.touch("24M");
    let boot = guest.boot_id();
    let store = lab.path("store");
    let store = store.to_str().unwrap();
    lab.rekindle(["protect", name, "--store", store, "--create-store", "--every", "50ms", "--count", "1"]).ok();
    guest.only_qemu().process.kill().unwrap();
    guest.rekindle(&["stop", "--now"]).ok();
    let mut failures = Failures::default();
    for (point, outcomes) in TABLE.iter().filter(|(point, _)| is_wanted(point)) {
        for (action, outcome) in ACTIONS.iter().zip(outcomes).filter(|(_, outcome)| **outcome != NotTried) {
            // The QEMU is started only after this point, so it cannot be killed.
            let is_started_later = destination == Destination::New && *point == "restore.prepare.journalled";
            if is_started_later && *action == "kill-new" {
                continue;
            }
            let fault = format!("{point}:{action}");
            let case = Case { guest: &guest, store, arguments, destination, boot: &boot, fault: &fault };
            if !failures.try_fault(&fault, *outcome, || case.run(*outcome)) {
                let _ = guest.rekindle(&["stop", "--now"]);
            }
        }
    }
    failures.assert_none();
}

struct Case<'a> {
    guest: &'a Guest<'a>,
    store: &'a str,
    arguments: &'a [&'a str],
    destination: Destination,
    boot: &'a str,
    fault: &'a str,
}

impl Case<'_> {
    fn restore(&self, arguments: &[&str]) -> std::process::Command {
        let restore = ["--json", "restore", &self.guest.name, "--store", self.store];
        self.guest.lab.command(restore.iter().chain(arguments))
    }

    fn run(&self, outcome: Outcome) {
        let (guest, lab) = (self.guest, self.guest.lab);
        if self.destination == Destination::Prepared {
            lab.finish(self.restore(&["--prepare"])).ok();
        }
        let watch = Watch::start(&lab.run_root());
        let mut command = self.restore(self.arguments);
        command.env("REKINDLE_FAULT", self.fault);
        let restore = lab.finish(command);
        match outcome {
            Removed => {
                assert_killed(&restore);
                assert_eq!(guest.status(), "needs-recovery", "{restore}");
                lab.finish(self.restore(&[])).status(1).prints(&["rekindle recover"]);
                guest.rekindle(&["recover"]).ok().prints(&["is removed"]);
                lab.assert_empty();
            }
            AsItWas => {
                restore.status(1);
                lab.assert_empty();
            }
            Finished => {
                assert_killed(&restore);
                assert_eq!(guest.status(), "needs-recovery", "{restore}");
                guest.rekindle(&["recover"]).ok().prints(&["finished", "with its memory"]);
                self.assert_runs();
            }
            Nothing if self.arguments.contains(&"--prepare") => {
                assert_killed(&restore);
                assert_eq!(guest.status(), "prepared", "{restore}");
                guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
                let restored = lab.finish(self.restore(&[])).ok().json();
                assert_eq!(restored["prepared"], true, "{restored}");
                self.assert_runs();
            }
            Nothing => {
                assert_killed(&restore);
                // QEMU itself may wait for a page that no pager supplies, and the guest's helpers have not been
                // restarted.
                let status = guest.status();
                let is_degraded = status.contains("degraded") && status.contains("rekindle recover");
                assert!(is_degraded || ["running", "silent"].contains(&status.as_str()), "{status}: {restore}");
                guest.rekindle(&["recover"]).ok();
                self.assert_runs();
                assert_eq!(guest.status(), "running");
            }
            LostLate => {
                assert!([Some(0), Some(1)].contains(&restore.code), "{restore}");
                let status = guest.status();
                assert!(["ended", "absent"].contains(&status.as_str()), "{status} after {restore}");
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
        wait_filled(self.guest);
        self.guest.verify();
        self.guest.assert_sound();
    }
}

fn assert_killed(command: &CommandResult) {
    command.killed();
}
