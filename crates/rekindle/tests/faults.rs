//! Every fault point of a reboot, with every death that it allows: `kill -9` of Rekindle, of the old QEMU, of the new.
//!
//! After each, what was promised must hold: the guest runs, or `rekindle recover` makes it run with its memory, or the
//! loss is one of those that cannot be avoided (a QEMU dies that alone has the guest's state), and is said plainly.
//! Never do two QEMUs run one guest. The table below says for each point and death which of these it has to be.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;
#[path = "faults/restore.rs"]
mod restore;

use common::{CommandResult, Guest, Lab, Watch, assert_ticks_once};
use rekindle_vm::fault::POINTS;
use std::thread;
use std::time::Duration;

/// What has to come of a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// No such process exists at this point: not tried.
    NotTried,
    /// The reboot succeeds all the same; the memory is kept (warm, saved) or new (cold).
    Success,
    /// Exit status 1: the guest goes on in the old QEMU.
    AsItWas,
    /// Rekindle was killed or gave up (exit status 3), and `recover` says `undone`.
    Undone,
    /// The same, and `recover` says `finished`.
    Finished,
    /// The same, and `recover` starts the guest from its saved state.
    FromState,
    /// There was nothing left to do for `recover`.
    Nothing,
    /// Exit status 3: the memory is lost, which both the reboot and `recover` say; `recover` boots the guest.
    Lost,
    /// The QEMU died after the last look at it, so exit status 0 is possible; then `ls` and `recover` tell.
    LostLate,
    /// Rekindle was killed, and `recover` removes what there is: a restore begins anew.
    Removed,
    /// Cold: the guest is booted by `recover`. Its memory is gone as was wanted.
    Booted,
    /// As [`Outcome::Booted`]; as with [`Outcome::LostLate`], exit status 0 is possible.
    BootedLate,
}

use Outcome::{
    AsItWas, Booted, BootedLate, Finished, FromState, Lost, LostLate, NotTried, Nothing, Removed, Success, Undone,
};

/// Per point: what has to come of killing Rekindle, the old QEMU, the new QEMU.
const TABLE: &[(&str, [Outcome; 3])] = &[
    // The old QEMU still runs the guest: its death is the guest's.
    ("warm.prepare.journalled", [Undone, Lost, NotTried]),
    ("warm.prepare.spawned", [Undone, Lost, AsItWas]),
    ("warm.prepare.recorded", [Undone, Lost, AsItWas]),
    ("warm.prepare.ready", [Undone, Lost, AsItWas]),
    ("warm.suspend.journalled", [Undone, Lost, AsItWas]),
    ("warm.suspend.stopped", [Undone, Lost, AsItWas]),
    ("warm.suspend.taps", [Undone, Lost, AsItWas]),
    // From here on the state is whole outside the old QEMU.
    ("warm.suspend.saved", [Undone, Success, AsItWas]),
    ("warm.suspend.written", [Undone, Success, AsItWas]),
    // From here on only the new QEMU may run the guest, unless it certainly has not.
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
    // The guest may have been asked to shut down already; killing the old QEMU is one way of shutting down.
    ("cold.suspend.journalled", [Booted, Success, NotTried]),
    // Of the Debian guest, which has an agent: `updates.rs` passes it.
    ("cold.suspend.frozen", [NotTried; 3]),
    ("cold.suspend.off", [Booted, NotTried, NotTried]),
    ("cold.renew.memory", [Booted, NotTried, NotTried]),
    ("cold.renew.spawned", [Booted, NotTried, Booted]),
    ("cold.renew.recorded", [Booted, NotTried, Booted]),
    ("cold.resume.journalled", [Booted, NotTried, Booted]),
    ("cold.resume.resumed", [Booted, NotTried, BootedLate]),
    ("cold.settle.recorded", [Nothing, NotTried, BootedLate]),
    // Of the Debian guest, which has an agent: `kexec.rs` walks through them.
    ("kexec.prepare.journalled", [NotTried; 3]),
    ("kexec.suspend.journalled", [NotTried; 3]),
    ("kexec.suspend.asked", [NotTried; 3]),
    ("kexec.settle.booted", [NotTried; 3]),
    // Of a guest that is rebooted with its cache: `two_disks.rs` walks through them.
    ("cache.renew.kept", [NotTried; 3]),
    ("cache.renew.shared", [NotTried; 3]),
    ("cache.renew.memory", [NotTried; 3]),
    // Of a guest with phases: `phase.rs` walks through them, and through those of a restore that it passes.
    ("phase.prepare.chosen", [NotTried; 3]),
    ("phase.prepare.spawned", [NotTried; 3]),
    ("phase.prepare.ready", [NotTried; 3]),
    ("phase.renew.replaced", [NotTried; 3]),
    ("phase.renew.agreed", [NotTried; 3]),
    // There is no guest yet that could be lost: the checkpoint is where it was.
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
    // No reboot passes these: `filling.rs` walks through them.
    ("fill.checkpoint.collected", [NotTried; 3]),
    ("fill.handover.stopped", [NotTried; 3]),
    ("fill.handover.tracked", [NotTried; 3]),
    ("fill.handover.resumed", [NotTried; 3]),
    ("fill.handover.recorded", [NotTried; 3]),
    ("fill.end.locked", [NotTried; 3]),
    ("fill.end.closed", [NotTried; 3]),
    // Nor this one: `output.rs` does.
    ("output.committed", [NotTried; 3]),
    // Nor these: `moving.rs` does.
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
    // Nor these: `host.rs` does.
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
    assert_eq!(listed, POINTS, "the table has to say what must come of each fault point");
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

/// One guest, `name`, goes through all points that are wanted. What is wrong is collected, so that one point does not
/// hide another.
fn walk(name: &str, wanted: impl Fn(&str) -> bool) {
    let lab = Lab::new();
    let guest = lab.vm(name).boot(&[]);
    let mut tried = 0;
    let mut wrong = Vec::new();
    for (point, outcomes) in TABLE.iter().filter(|(point, _)| wanted(point)) {
        let how = point.split('.').next().unwrap();
        for (action, outcome) in ACTIONS.iter().zip(outcomes).filter(|(_, outcome)| **outcome != NotTried) {
            tried += 1;
            let fault = format!("{point}:{action}");
            let one = thread::scope(|scope| scope.spawn(|| Case::begin(&guest, how, &fault).run(*outcome)).join());
            if let Err(panic) = one {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default();
                wrong.push(format!("==== {fault}, which has to end as {outcome:?}:\n{text}\n"));
                make_it_run(&guest);
            }
        }
    }
    assert!(tried > 0, "no fault was tried");
    assert!(wrong.is_empty(), "{} of {tried} faults end wrongly:\n{}", wrong.len(), wrong.join("\n"));
}

/// After a case that failed: a fresh guest for the next one.
fn make_it_run(guest: &Guest<'_>) {
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

/// One death at one point.
struct Case<'a> {
    guest: &'a Guest<'a>,
    how: &'a str,
    fault: &'a str,
    boot: String,
    old: u32,
}

impl<'a> Case<'a> {
    fn begin(guest: &'a Guest<'a>, how: &'a str, fault: &'a str) -> Self {
        if guest.try_ask("verify").is_ok_and(|reply| reply == "ok 0") {
            guest.touch("16M");
        }
        guest.verify();
        Self { guest, how, fault, boot: guest.boot_id(), old: guest.only_qemu().process.pid }
    }

    fn run(&self, outcome: Outcome) {
        let Self { guest, how, .. } = self;
        let watch = Watch::start(&guest.lab.run_root());
        let mut command = guest.lab.command(["reboot", "vmm", &guest.name, "--how", how]);
        command.env("REKINDLE_FAULT", self.fault);
        let done = guest.lab.finish(command);
        watch.end();
        assert!(guest.qemus().iter().filter(|qemu| qemu.run_state().as_deref() == Some("running")).count() <= 1);
        let watch = Watch::start(&guest.lab.run_root());
        match outcome {
            NotTried | Removed => unreachable!("not tried of a reboot"),
            Success => self.went_through(done),
            AsItWas => self.as_it_was(done),
            Lost => self.lost(&done.status(3).prints(&["lost", "rekindle recover"])),
            LostLate if done.code == Some(3) => self.lost(&done.prints(&["lost", "rekindle recover"])),
            LostLate => self.lost(&done.ok()),
            Undone => {
                self.needs_recovery(done).prints(&["undone", "with its memory"]);
                assert_eq!(guest.only_qemu().process.pid, self.old, "it has to run where it ran before");
                self.kept();
            }
            Finished => {
                self.needs_recovery(done).prints(&["finished", "with its memory"]);
                assert_ne!(guest.only_qemu().process.pid, self.old, "it has to run in the new QEMU");
                self.kept();
            }
            FromState => {
                self.needs_recovery(done).prints(&["from its saved state, with its memory"]);
                self.kept();
            }
            Nothing => {
                assert_eq!(done.code, None, "{done}");
                assert_eq!(guest.status(), "running");
                guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
                self.as_wanted();
            }
            Booted => self.booted(done),
            BootedLate if done.code == Some(0) => {
                assert_eq!(guest.status(), "ended", "{done}");
                guest.rekindle(&["recover"]).ok();
                self.fresh();
            }
            BootedLate => self.booted(done.status(3)),
        }
        watch.end();
        guest.assert_sound();
        assert_ticks_once(&guest.file("console.log"));
        // And it is a VM like any other again.
        guest.rekindle(&["recover"]).ok().prints(&["nothing to recover"]);
        let boot = guest.boot_id();
        guest.warm(&[]);
        assert_eq!(guest.boot_id(), boot);
        guest.assert_sound();
    }

    fn went_through(&self, done: CommandResult) {
        done.ok();
        self.as_wanted();
    }

    /// As the way of rebooting promises.
    fn as_wanted(&self) {
        if self.how == "cold" {
            self.fresh()
        } else {
            self.kept()
        }
        assert_ne!(self.guest.only_qemu().process.pid, self.old);
    }

    fn as_it_was(&self, done: CommandResult) {
        done.status(1).prints(&["the guest runs as before"]);
        assert_eq!(self.guest.only_qemu().process.pid, self.old);
        self.kept();
    }

    /// Rekindle was killed, or says that `recover` is needed; so does `ls`; and until then nothing else is done to it.
    fn needs_recovery(&self, done: CommandResult) -> CommandResult {
        let guest = self.guest;
        if self.fault.ends_with(":kill") {
            assert_eq!(done.code, None, "it has to be killed: {done}");
        } else {
            assert_eq!(done.code, Some(3), "{done}");
        }
        assert_eq!(guest.status(), "needs-recovery", "{done}");
        guest.reboot("warm", &[]).status(1).prints(&["rekindle recover"]);
        guest.rekindle(&["recover"]).ok()
    }

    fn lost(&self, done: &CommandResult) {
        let status = self.guest.status();
        assert!(["needs-recovery", "ended"].contains(&status.as_str()), "{status} after {done}");
        self.guest.rekindle(&["recover"]).ok().prints(&["memory was lost", "booted"]);
        self.fresh();
    }

    fn booted(&self, done: CommandResult) {
        let recovered = self.needs_recovery(done);
        assert!(!recovered.stdout.contains("with its memory"), "it was booted: {recovered}");
        self.fresh();
    }

    fn kept(&self) {
        self.guest.verify();
        assert_eq!(self.guest.boot_id(), self.boot, "another boot of the guest");
    }

    fn fresh(&self) {
        self.guest.wait_ready();
        assert_ne!(self.guest.boot_id(), self.boot);
    }
}

/// `recover` is killed again and again, at another moment each time, and at last left alone.
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
        let mut command = lab.command(["reboot", "vmm", &guest.name, "--how", how]);
        command.env("REKINDLE_FAULT", fault);
        assert_eq!(lab.finish(command).code, None, "{fault}");
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

/// Both QEMUs die with the state already saved: a fresh one takes the guest over from the file.
#[test]
fn both_qemus_die_after_the_state_was_saved() {
    let lab = Lab::new();
    let guest = lab.vm("both").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    let mut command = lab.command(["reboot", "vmm", &guest.name]);
    command.env("REKINDLE_FAULT", "warm.suspend.written:kill");
    assert_eq!(lab.finish(command).code, None);
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

/// The watch would see it: two QEMUs that are both told to run one guest.
#[test]
#[should_panic(expected = "two QEMUs ran one guest")]
fn the_watch_sees_two_qemus_that_run_one_guest() {
    let lab = Lab::new();
    let guest = lab.vm("twice").boot(&[]);
    let mut command = lab.command(["reboot", "vmm", &guest.name]);
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
