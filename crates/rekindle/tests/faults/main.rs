//! Every fault point of a reboot, with every death that is possible at it: `kill -9` of Rekindle, of the old QEMU, of
//! the new QEMU.
//!
//! After each death the guarantees must hold. Either the guest runs, or it runs with its memory after `rekindle
//! recover`, or the loss is unavoidable (the QEMU that died was the only process with the guest's state) and is
//! reported as a loss. Two QEMUs never run one guest. [`TABLE`] has the required outcome of each point and death.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod restore;

use common::{CommandResult, DEADLINE, Guest, Lab, Watch, assert_ticks_once, wait_for};
use rekindle_kernel::process::Process;
use rekindle_qemu::qmp::Qmp;
use rekindle_vm::fault::POINTS;
use std::thread;
use std::time::Duration;

/// The required outcome of a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Not tried: no such process exists at this point, or another test covers the point.
    NotTried,
    /// The reboot succeeds; the memory is kept (warm, saved) or new (cold).
    Success,
    /// Exit status 1: the guest continues in the old QEMU.
    AsItWas,
    /// Rekindle was killed or ended with exit status 3, and `recover` prints `undone`.
    Undone,
    /// Rekindle was killed or ended with exit status 3, and `recover` prints `finished`.
    Finished,
    /// Rekindle was killed or ended with exit status 3, and `recover` starts the guest from its saved state.
    FromState,
    /// Rekindle was killed, and `recover` has nothing to do.
    Nothing,
    /// Exit status 3: the memory is lost, which both the reboot and `recover` report; `recover` boots the guest.
    Lost,
    /// The QEMU died after Rekindle's last check, so exit status 0 is possible; then `ls` and `recover` report the
    /// loss.
    LostLate,
    /// Rekindle was killed, and `recover` removes the remains of the restore, which can then be repeated.
    Removed,
    /// Cold: `recover` boots the guest, whose memory was to be dropped.
    Booted,
    /// Like [`Outcome::Booted`], but exit status 0 is possible, as with [`Outcome::LostLate`].
    BootedLate,
}

use Outcome::{
    AsItWas, Booted, BootedLate, Finished, FromState, Lost, LostLate, NotTried, Nothing, Removed, Success, Undone,
};

/// For each point: the outcomes of killing Rekindle, the old QEMU, the new QEMU (in the order of [`ACTIONS`]).
const TABLE: &[(&str, [Outcome; 3])] = &[
    // The old QEMU still runs the guest: the death of this QEMU ends the guest.
    ("warm.prepare.journalled", [Undone, Lost, NotTried]),
    ("warm.prepare.spawned", [Undone, Lost, AsItWas]),
    ("warm.prepare.recorded", [Undone, Lost, AsItWas]),
    ("warm.prepare.ready", [Undone, Lost, AsItWas]),
    ("warm.suspend.journalled", [Undone, Lost, AsItWas]),
    ("warm.suspend.stopped", [Undone, Lost, AsItWas]),
    ("warm.suspend.taps", [Undone, Lost, AsItWas]),
    // From here on the state is complete outside the old QEMU.
    ("warm.suspend.saved", [Undone, Success, AsItWas]),
    ("warm.suspend.written", [Undone, Success, AsItWas]),
    // From here on only the new QEMU may run the guest, unless it is certain that the guest has not run in it.
    ("warm.resume.journalled", [Finished, Success, AsItWas]),
    ("warm.resume.resumed", [Finished, Success, Lost]),
    ("warm.settle.journalled", [Finished, Success, Lost]),
    ("warm.settle.old-gone", [Finished, NotTried, LostLate]),
    ("warm.settle.recorded", [Finished, NotTried, LostLate]),
    ("saved.suspend.journalled", [Undone, Lost, NotTried]),
    ("saved.suspend.stopped", [Undone, Lost, NotTried]),
    ("saved.suspend.saved", [Undone, Success, NotTried]),
    ("saved.renew.old-gone", [FromState, NotTried, NotTried]),
    ("saved.renew.spawned", [FromState, NotTried, FromState]),
    ("saved.renew.recorded", [FromState, NotTried, FromState]),
    ("saved.renew.loaded", [FromState, NotTried, FromState]),
    ("saved.resume.journalled", [Finished, NotTried, FromState]),
    ("saved.resume.resumed", [Finished, NotTried, Lost]),
    ("saved.settle.recorded", [Nothing, NotTried, LostLate]),
    // The guest may have got the request to shut down already; killing the old QEMU is one way of shutting it down.
    ("cold.suspend.journalled", [Booted, Success, NotTried]),
    // This point needs a guest agent, which only the Debian guest has: `os::updates` covers it.
    ("cold.suspend.frozen", [NotTried; 3]),
    ("cold.suspend.off", [Booted, NotTried, NotTried]),
    ("cold.renew.memory", [Booted, NotTried, NotTried]),
    ("cold.renew.spawned", [Booted, NotTried, Booted]),
    ("cold.renew.recorded", [Booted, NotTried, Booted]),
    ("cold.resume.journalled", [Booted, NotTried, Booted]),
    ("cold.resume.resumed", [Booted, NotTried, BootedLate]),
    ("cold.settle.recorded", [Nothing, NotTried, BootedLate]),
    // These points need a guest agent, which only the Debian guest has: `os::kexec` covers them.
    ("kexec.prepare.journalled", [NotTried; 3]),
    ("kexec.suspend.journalled", [NotTried; 3]),
    ("kexec.suspend.asked", [NotTried; 3]),
    ("kexec.settle.booted", [NotTried; 3]),
    // Points of a reboot with a warm cache: `disk::two_disks` covers them.
    ("cache.renew.kept", [NotTried; 3]),
    ("cache.renew.shared", [NotTried; 3]),
    ("cache.renew.memory", [NotTried; 3]),
    // Points of a reboot by phase: `os::phase` covers them, and the points of a restore that such a reboot passes.
    ("phase.prepare.chosen", [NotTried; 3]),
    ("phase.prepare.spawned", [NotTried; 3]),
    ("phase.prepare.ready", [NotTried; 3]),
    ("phase.renew.replaced", [NotTried; 3]),
    ("phase.renew.agreed", [NotTried; 3]),
    // No guest that could be lost runs yet, and the checkpoint stays.
    ("prepare.journalled", [Removed, NotTried, NotTried]),
    ("prepare.spawned", [Removed, NotTried, AsItWas]),
    ("prepare.recorded", [Nothing, NotTried, LostLate]),
    ("restore.prepare.journalled", [Removed, NotTried, AsItWas]),
    ("restore.prepare.spawned", [Removed, NotTried, AsItWas]),
    ("restore.prepare.recorded", [Removed, NotTried, AsItWas]),
    ("restore.renew.registered", [Removed, NotTried, AsItWas]),
    ("restore.renew.loaded", [Removed, NotTried, AsItWas]),
    // From here on the guest may have run.
    ("restore.resume.journalled", [Finished, NotTried, AsItWas]),
    ("restore.resume.resumed", [Finished, NotTried, LostLate]),
    ("restore.settle.recorded", [Nothing, NotTried, LostLate]),
    ("restore.settle.handed-over", [Nothing, NotTried, LostLate]),
    // No reboot passes these points: `protect::filling` covers them.
    ("fill.checkpoint.collected", [NotTried; 3]),
    ("fill.handover.stopped", [NotTried; 3]),
    ("fill.handover.tracked", [NotTried; 3]),
    ("fill.handover.resumed", [NotTried; 3]),
    ("fill.handover.recorded", [NotTried; 3]),
    ("fill.end.locked", [NotTried; 3]),
    ("fill.end.closed", [NotTried; 3]),
    // `vmm::attach` covers this point.
    ("pause.pipe.offered", [NotTried; 3]),
    // `protect::output` covers this point.
    ("output.committed", [NotTried; 3]),
    // `moving` covers these points.
    ("move.prepare.journalled", [NotTried; 3]),
    ("move.prepare.registered", [NotTried; 3]),
    ("move.prepare.prepared", [NotTried; 3]),
    ("move.suspend.journalled", [NotTried; 3]),
    ("move.suspend.read", [NotTried; 3]),
    ("move.suspend.committed", [NotTried; 3]),
    ("move.suspend.let-go", [NotTried; 3]),
    ("move.resume.journalled", [NotTried; 3]),
    ("move.resume.told", [NotTried; 3]),
    ("move.settle.running", [NotTried; 3]),
    ("move.settle.journalled", [NotTried; 3]),
    // `host` covers these points.
    ("host.suspend.ahead", [NotTried; 3]),
    ("host.suspend.journalled", [NotTried; 3]),
    ("host.suspend.stopped", [NotTried; 3]),
    ("host.suspend.saved", [NotTried; 3]),
    ("host.suspend.listed", [NotTried; 3]),
    ("host.suspend.committed", [NotTried; 3]),
    ("host.suspend.ended", [NotTried; 3]),
    ("host.resume.placed", [NotTried; 3]),
    ("host.resume.loaded", [NotTried; 3]),
    ("host.resume.struck", [NotTried; 3]),
    ("host.resume.resumed", [NotTried; 3]),
    ("host.resume.recorded", [NotTried; 3]),
];

const ACTIONS: [&str; 3] = ["kill", "kill-old", "kill-new"];

#[test]
fn every_point_is_in_the_table() {
    let listed: Vec<_> = TABLE.iter().map(|(point, _)| *point).collect();
    assert_eq!(listed, POINTS, "TABLE must have the outcomes of each fault point");
}

#[test]
fn warm_reboot_with_every_death_while_it_prepares_and_suspends() {
    walk("warm-early", |point| point.starts_with("warm.") && !is_late(point));
}

#[test]
fn warm_reboot_with_every_death_while_it_resumes_and_settles() {
    walk("warm-late", |point| point.starts_with("warm.") && is_late(point));
}

#[test]
fn saved_reboot_with_every_death() {
    walk("saved", |point| point.starts_with("saved."));
}

#[test]
fn cold_reboot_with_every_death() {
    walk("cold", |point| point.starts_with("cold."));
}

fn is_late(point: &str) -> bool {
    !point.contains(".prepare.") && !point.contains(".suspend.")
}

/// The number of tried faults, and the failures among them: one failure does not hide another.
#[derive(Default)]
struct Failures {
    tried: usize,
    messages: Vec<String>,
}

impl Failures {
    /// Runs the test of one fault. Returns whether it succeeded.
    fn try_fault(&mut self, fault: &str, outcome: Outcome, test: impl FnOnce() + Send) -> bool {
        self.tried += 1;
        let Err(panic) = thread::scope(|scope| scope.spawn(test).join()) else { return true };
        let message = panic.downcast_ref::<String>().cloned();
        let message = message.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default();
        self.messages.push(format!("==== {fault}, whose outcome must be {outcome:?}:\n{message}\n"));
        false
    }

    /// Asserts that faults were tried, and that none failed.
    #[track_caller]
    fn assert_none(self) {
        let Self { tried, messages } = self;
        assert!(tried > 0, "no fault was tried");
        assert!(messages.is_empty(), "{} of {tried} faults end wrongly:\n{}", messages.len(), messages.join("\n"));
    }
}

/// Boots a guest and tries each death at each of the points that `is_wanted` selects.
fn walk(name: &str, is_wanted: impl Fn(&str) -> bool) {
    let lab = Lab::new();
    let guest = lab.vm(name).boot(&[]);
    let mut failures = Failures::default();
    for (point, outcomes) in TABLE.iter().filter(|(point, _)| is_wanted(point)) {
        let how = point.split('.').next().unwrap();
        for (action, outcome) in ACTIONS.iter().zip(outcomes).filter(|(_, outcome)| **outcome != NotTried) {
            let fault = format!("{point}:{action}");
            if !failures.try_fault(&fault, *outcome, || Case::begin(&guest, how, &fault).run(*outcome)) {
                start_anew(&guest);
            }
        }
    }
    failures.assert_none();
}

/// Boots the guest again after a failed test of a fault, for the next fault.
fn start_anew(guest: &Guest<'_>) {
    let _ = guest.rekindle(&["recover"]);
    if guest.rekindle(&["stop", "--now"]).code != Some(0) {
        for qemu in guest.qemus() {
            let _ = qemu.process.kill();
        }
        let _ = std::fs::remove_file(guest.file("operation.json"));
        let _ = guest.rekindle(&["stop", "--now"]);
    }
    let _ = std::fs::remove_dir_all(guest.lab.save_dir());
    std::fs::create_dir(guest.lab.save_dir()).unwrap();
    let definition = guest.lab.path(&format!("{}.toml", guest.name));
    guest.lab.rekindle(["run", definition.to_str().unwrap()]).ok();
    guest.wait_ready();
}

/// The death of one process at one fault point.
struct Case<'a> {
    guest: &'a Guest<'a>,
    how: &'a str,
    fault: &'a str,
    /// The guest's boot before the fault.
    boot: String,
    /// The process ID of QEMU before the fault.
    old_qemu: u32,
}

impl<'a> Case<'a> {
    fn begin(guest: &'a Guest<'a>, how: &'a str, fault: &'a str) -> Self {
        if guest.try_ask("verify").is_ok_and(|reply| reply == "ok 0") {
            guest.touch("16M");
        }
        guest.verify();
        Self { guest, how, fault, boot: guest.boot_id(), old_qemu: guest.only_qemu().process.pid }
    }

    fn run(&self, outcome: Outcome) {
        let Self { guest, how, .. } = self;
        let watch = Watch::start(&guest.lab.run_root());
        let mut command = guest.lab.command(["replace-qemu", &guest.name, "--how", how]);
        command.env("REKINDLE_FAULT", self.fault);
        let reboot = guest.lab.finish(command);
        watch.end();
        assert!(guest.qemus().iter().filter(|qemu| qemu.run_state().as_deref() == Some("running")).count() <= 1);
        let watch = Watch::start(&guest.lab.run_root());
        match outcome {
            NotTried | Removed => unreachable!("not an outcome of a reboot that is tried"),
            Success => {
                reboot.ok();
                self.assert_rebooted();
            }
            AsItWas => {
                reboot.status(1).prints(&["the guest runs as before"]);
                self.assert_in_old_qemu();
                self.assert_memory_kept();
            }
            Lost => self.recover_without_memory(&reboot.status(3).prints(&["lost", "rekindle recover"])),
            LostLate if reboot.code == Some(3) => {
                self.recover_without_memory(&reboot.prints(&["lost", "rekindle recover"]));
            }
            LostLate => self.recover_without_memory(&reboot.ok()),
            Undone => {
                self.recover(reboot).prints(&["undone", "with its memory"]);
                self.assert_in_old_qemu();
                self.assert_memory_kept();
            }
            Finished => {
                self.recover(reboot).prints(&["finished", "with its memory"]);
                self.assert_in_new_qemu();
                self.assert_memory_kept();
            }
            FromState => {
                self.recover(reboot).prints(&["from its saved state, with its memory"]);
                self.assert_memory_kept();
            }
            Nothing => {
                reboot.killed();
                assert_eq!(guest.status(), "running");
                guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
                self.assert_rebooted();
            }
            Booted => self.recover_by_booting(reboot),
            BootedLate if reboot.code == Some(0) => {
                assert_eq!(guest.status(), "ended", "{reboot}");
                guest.rekindle(&["recover"]).ok();
                self.assert_booted();
            }
            BootedLate => self.recover_by_booting(reboot.status(3)),
        }
        watch.end();
        guest.assert_sound();
        assert_ticks_once(&guest.file("console.log"));
        // The VM works as before the fault.
        guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
        let boot = guest.boot_id();
        guest.warm(&[]);
        assert_eq!(guest.boot_id(), boot);
        guest.assert_sound();
    }

    /// Asserts that the reboot kept the memory (warm, saved) or booted the guest (cold).
    fn assert_rebooted(&self) {
        if self.how == "cold" {
            self.assert_booted();
        } else {
            self.assert_memory_kept();
        }
        self.assert_in_new_qemu();
    }

    /// Runs `recover` after a reboot that was killed or reports that `recover` is needed. Until then `ls` reports the
    /// same, and other operations are rejected.
    fn recover(&self, reboot: CommandResult) -> CommandResult {
        let guest = self.guest;
        if self.fault.ends_with(":kill") {
            reboot.killed();
        } else {
            assert_eq!(reboot.code, Some(3), "{reboot}");
        }
        assert_eq!(guest.status(), "needs-recovery", "{reboot}");
        guest.reboot("warm", &[]).status(1).prints(&["rekindle recover"]);
        guest.rekindle(&["recover"]).ok()
    }

    /// Runs `recover` after a reboot that has lost the guest's memory.
    fn recover_without_memory(&self, reboot: &CommandResult) {
        let status = self.guest.status();
        assert!(["needs-recovery", "ended"].contains(&status.as_str()), "{status} after {reboot}");
        self.guest.rekindle(&["recover"]).ok().prints(&["memory was lost", "booted"]);
        self.assert_booted();
    }

    /// Runs `recover` after a cold reboot.
    fn recover_by_booting(&self, reboot: CommandResult) {
        let recovered = self.recover(reboot);
        assert!(!recovered.stdout.contains("with its memory"), "it was booted: {recovered}");
        self.assert_booted();
    }

    fn assert_in_old_qemu(&self) {
        assert_eq!(self.guest.only_qemu().process.pid, self.old_qemu, "it has to run where it ran before");
    }

    fn assert_in_new_qemu(&self) {
        assert_ne!(self.guest.only_qemu().process.pid, self.old_qemu, "it has to run in the new QEMU");
    }

    fn assert_memory_kept(&self) {
        self.guest.verify();
        assert_eq!(self.guest.boot_id(), self.boot, "another boot of the guest");
    }

    fn assert_booted(&self) {
        self.guest.wait_ready();
        assert_ne!(self.guest.boot_id(), self.boot);
    }
}

/// Another process, for example a protector, stops the guest while a destination is prepared. The failed preparation
/// must not resume the guest: the other process may just copy its pages.
#[test]
fn a_failed_preparation_leaves_a_stopped_guest_stopped() {
    let lab = Lab::new();
    let guest = lab.vm("calm").boot(&[]);
    let source = guest.only_qemu();
    let mut command = lab.command(["replace-qemu", &guest.name]);
    let mut reboot = command.env("REKINDLE_FAULT", "warm.prepare.recorded:stop").spawn().unwrap();
    let state = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(')').next().unwrap().trim().chars().next()
    };
    wait_for("the reboot to be stopped", DEADLINE, || (state(reboot.id()) == Some('T')).then_some(()));
    let monitor = || Qmp::connect(&source.directory.join("watch.sock"), DEADLINE).unwrap();
    rekindle_qemu::guest::stop(&mut monitor()).unwrap();
    let destination = guest.qemus().into_iter().find(|qemu| qemu.process != source.process).unwrap();
    destination.process.kill().unwrap();
    Process::of(reboot.id()).unwrap().resume().unwrap();
    assert_eq!(reboot.wait().unwrap().code(), Some(1));
    assert_eq!(source.run_state().as_deref(), Some("paused"));
    rekindle_qemu::guest::resume(&mut monitor()).unwrap();
    assert_eq!(guest.status(), "running");
    guest.assert_sound();
}

/// Kills `recover` at several moments. The last `recover`, which is not killed, must succeed.
#[test]
fn recover_can_itself_be_killed() {
    let lab = Lab::new();
    let guest = lab.vm("patience").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    for (how, fault) in [
        ("warm", "warm.suspend.written:kill"),
        ("warm", "warm.resume.journalled:kill"),
        ("warm", "warm.settle.journalled:kill"),
        ("saved", "saved.renew.old-gone:kill"),
        ("saved", "saved.resume.journalled:kill"),
    ] {
        let mut command = lab.command(["replace-qemu", &guest.name, "--how", how]);
        command.env("REKINDLE_FAULT", fault);
        lab.finish(command).killed();
        let watch = Watch::start(&lab.run_root());
        for delay in [1, 3, 6, 10, 15, 25, 40, 70, 120] {
            let mut recover = lab.command(["recover", &guest.name]).spawn().unwrap();
            thread::sleep(Duration::from_millis(delay));
            let _ = recover.kill();
            recover.wait().unwrap();
        }
        guest.rekindle(&["recover"]).ok();
        watch.end();
        guest.verify();
        assert_eq!(guest.boot_id(), boot, "{fault}");
        guest.assert_sound();
        guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
        assert_ticks_once(&guest.file("console.log"));
    }
}

/// Both QEMUs die after the state was saved: a new QEMU loads the state from the file.
#[test]
fn both_qemus_die_after_the_state_was_saved() {
    let lab = Lab::new();
    let guest = lab.vm("both").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    let mut command = lab.command(["replace-qemu", &guest.name]);
    command.env("REKINDLE_FAULT", "warm.suspend.written:kill");
    lab.finish(command).killed();
    assert_eq!(guest.qemus().len(), 2, "{}", lab.state_report());
    for qemu in guest.qemus() {
        qemu.process.kill().unwrap();
        assert!(qemu.process.wait_end(Duration::from_secs(10)).unwrap());
    }
    assert_eq!(guest.status(), "needs-recovery");
    guest.rekindle(&["recover"]).ok().prints(&["from its saved state, with its memory"]);
    guest.verify();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();
    assert_ticks_once(&guest.file("console.log"));
}

/// Checks the [`Watch`] itself: both QEMUs of one guest are resumed.
#[test]
#[should_panic(expected = "two QEMUs ran one guest")]
fn the_watch_sees_two_qemus_that_run_one_guest() {
    let lab = Lab::new();
    let guest = lab.vm("twice").boot(&[]);
    let mut command = lab.command(["replace-qemu", &guest.name]);
    command.env("REKINDLE_FAULT", "warm.suspend.written:kill");
    lab.finish(command);
    let watch = Watch::start(&lab.run_root());
    for qemu in guest.qemus() {
        let path = qemu.directory.join("qmp.sock");
        let mut qmp = rekindle_qemu::qmp::Qmp::connect(&path, Duration::from_secs(5)).unwrap();
        qmp.execute::<serde_json::Value>("cont", ()).unwrap();
    }
    watch.wait_seen(Duration::from_secs(30));
    watch.end();
}
