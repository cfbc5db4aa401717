//! Every fault point of a move, on the host that has the guest and on the one that gets it. Whatever dies: the guest goes on on exactly
//! one of them, or its last checkpoint is whole and what to do is said; never do two QEMUs run it.

use super::{Pair, agrees, last, wait_empty, wait_filled};
use crate::common::{CommandResult, DEADLINE, Guest, Lab, Watch, wait_for};
use std::thread;

/// What has to come of a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Exit status 1: it goes on here, by itself.
    Back,
    /// The same, when what its Rekindle there has left was removed.
    BackLeft,
    /// Rekindle was killed, and `recover` here lets it go on here.
    Recovered,
    /// The same, and it runs there.
    There,
    /// The same: whoever was first has it.
    Either,
    /// It runs there, and there is nothing to recover.
    Moved,
    /// Its memory was lost with its QEMU, before the other host was told: `recover` boots it.
    Booted,
    /// The other host has taken it and lost it: it is restored from its last checkpoint.
    InStore,
    /// `BackLeft`, or `InStore` if it was taken by then: it is loaded there while its last checkpoint is committed here.
    BackOrInStore,
    /// The other host's Rekindle was killed when the guest might have run: `recover` there says that it does.
    RecoveredThere,
}

use Outcome::{Back, BackLeft, BackOrInStore, Booted, Either, InStore, Moved, Recovered, RecoveredThere, There};

/// Where, on which host, who dies, and what has to come of it.
const NEAR: &[(&str, &str, Outcome)] = &[
    ("move.prepare.journalled", "kill", Recovered),
    ("move.prepare.journalled", "kill-old", Booted),
    ("move.prepare.prepared", "kill", Recovered),
    ("move.prepare.prepared", "kill-old", Booted),
    ("move.suspend.journalled", "kill", Recovered),
    ("move.suspend.journalled", "kill-old", Booted),
    ("move.suspend.read", "kill", Recovered),
    // All of it has been read.
    ("move.suspend.read", "kill-old", Moved),
    ("move.suspend.committed", "kill", Recovered),
    // From here on its state is whole outside of it.
    ("move.suspend.committed", "kill-old", Moved),
    ("move.suspend.let-go", "kill", Recovered),
    ("move.suspend.let-go", "kill-old", Moved),
    // The other host could have been told: the store says that it has not.
    ("move.resume.journalled", "kill", Recovered),
    ("move.resume.journalled", "kill-old", Moved),
    ("move.resume.told", "kill", Either),
    ("move.resume.told", "kill-old", Moved),
    ("move.settle.running", "kill", There),
    ("move.settle.running", "kill-old", Moved),
    ("move.settle.journalled", "kill", There),
];

const FAR: &[(&str, &str, Outcome)] = &[
    ("prepare.journalled", "kill", BackLeft),
    ("prepare.spawned", "kill-new", Back),
    ("prepare.recorded", "kill", BackLeft),
    // What had waited is of no use; another QEMU is started.
    ("prepare.recorded", "kill-new", Moved),
    ("move.prepare.registered", "kill", BackLeft),
    ("move.prepare.registered", "kill-new", Moved),
    ("restore.prepare.journalled", "kill", BackLeft),
    // It is begun anew with another QEMU, which dies only if it comes past the same point.
    ("restore.prepare.journalled", "kill-new", Moved),
    ("restore.renew.registered", "kill", BackOrInStore),
    ("restore.renew.registered", "kill-new", Back),
    // From here on it may have run there: that it has died is seen by `cont` only.
    ("restore.renew.loaded", "kill-new", InStore),
    ("restore.resume.journalled", "kill-new", InStore),
    ("restore.resume.resumed", "kill", RecoveredThere),
    ("restore.settle.recorded", "kill", RecoveredThere),
    ("restore.settle.handed-over", "kill", RecoveredThere),
];

#[test]
fn a_move_with_every_death_on_the_host_that_has_the_guest() {
    walk("near", NEAR, "REKINDLE_FAULT");
}

#[test]
fn a_move_with_deaths_on_the_host_that_gets_it() {
    walk("far", FAR, "FAR_FAULT");
}

fn walk(name: &'static str, table: &[(&str, &str, Outcome)], variable: &str) {
    let pair = Pair::new(name);
    let mut wrong = Vec::new();
    let mut boot = start(&pair);
    for (point, action, outcome) in table {
        let fault = format!("{point}:{action}");
        let case = || case(&pair, variable, &fault, *outcome, &boot);
        if let Err(panic) = thread::scope(|scope| scope.spawn(case).join()) {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            wrong.push(format!("==== {fault}, which has to end as {outcome:?}:\n{text}\n"));
            for lab in [&pair.here, &pair.there] {
                let _ = lab.rekindle(["stop", "--now", name]);
            }
            boot = start(&pair);
        } else if *outcome == Booted {
            boot = pair.guest(&pair.here).boot_id();
            pair.guest(&pair.here).touch("8M");
        }
    }
    assert!(wrong.is_empty(), "{} of {} faults end wrongly:\n{}", wrong.len(), table.len(), wrong.join("\n"));
}

/// A fresh guest; its boot.
fn start(pair: &Pair) -> String {
    pair.new_store();
    let mut redo = pair.disk.clone().into_os_string();
    redo.push(".redo");
    let _ = std::fs::remove_dir_all(redo);
    let guest = pair.boot();
    guest.touch("8M");
    guest.boot_id()
}

fn case(pair: &Pair, variable: &str, fault: &str, outcome: Outcome, boot: &str) {
    let (here, there, name) = (&pair.here, &pair.there, pair.name);
    let before = pair.guest(here);
    before.ask(&format!("write vda 3 16 {}", before.tick()));
    let watch = Watch::start_for(&[&here.run_root(), &there.run_root()]);
    let mut command = pair.command(here, there, &[]);
    command.env(variable, fault);
    let done = here.finish(command);
    let (mine, theirs) = (pair.guest(here), pair.guest(there));
    let is_back = |guest: &Guest<'_>| {
        goes_on(guest, boot);
        guest.assert_sound();
        wait_empty(there);
    };
    let is_there = || {
        wait_empty(here);
        goes_on(&theirs, boot);
        theirs.assert_sound();
    };
    let outcome = match outcome {
        BackOrInStore if done.code == Some(3) => InStore,
        BackOrInStore => BackLeft,
        sure => sure,
    };
    match outcome {
        Back => {
            done.status(1);
            is_back(&mine);
        }
        BackLeft => {
            done.status(1);
            there.rekindle(["stop", "--now", name]).ok();
            is_back(&mine);
        }
        Either => {
            killed(&done);
            mine.rekindle(&["recover"]).ok();
            if mine.status() == "running" { is_back(&mine) } else { is_there() }
        }
        Recovered => {
            killed(&done);
            wait_empty(there);
            assert_eq!(mine.status(), "needs-recovery", "{done}");
            mine.rekindle(&["recover"]).ok().prints(&["undone"]);
            is_back(&mine);
        }
        There => {
            killed(&done);
            assert_eq!(mine.status(), "needs-recovery", "{done}");
            mine.rekindle(&["recover"]).ok().prints(&["runs on the other host"]);
            is_there();
        }
        Moved => {
            assert_eq!(last(&done.ok())["name"], name);
            is_there();
        }
        Booted => {
            assert_ne!(done.code, Some(0), "{done}");
            mine.rekindle(&["recover"]).ok().prints(&["booted"]);
            mine.wait_ready();
            assert_ne!(mine.boot_id(), boot);
            wait_empty(there);
        }
        InStore => {
            done.status(3).prints(&["has taken", "rekindle restore"]);
            wait_empty(here);
            there.rekindle(["stop", "--now", name]);
            here.rekindle(["restore", name, "--store", pair.store.to_str().unwrap()]).ok();
            is_back(&mine);
        }
        BackOrInStore => unreachable!("it is one of the two by now"),
        RecoveredThere => {
            let _: CommandResult = done;
            wait_empty(here);
            wait_for("what is there to be recovered", DEADLINE, || {
                (theirs.rekindle(&["recover"]).code == Some(0)).then_some(())
            });
            is_there();
        }
    }
    watch.end();
    // For the next one: it is here.
    if !there_is_none(there) {
        pair.run(there, here, &[]).ok();
        goes_on(&mine, boot);
        wait_empty(there);
    }
}

fn there_is_none(lab: &Lab) -> bool {
    lab.rekindle(["--json", "ls"]).ok().json().as_array().is_none_or(Vec::is_empty)
}

/// The guest runs with its memory and its disk.
fn goes_on(guest: &Guest<'_>, boot: &str) {
    guest.wait_ready();
    assert_eq!(guest.boot_id(), boot);
    agrees(guest);
    wait_filled(guest);
    guest.verify();
}

fn killed(done: &CommandResult) {
    assert_eq!(done.code, None, "it has to be killed: {done}");
}
