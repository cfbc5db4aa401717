//! Every fault point of a move, on the source host and on the destination host. Whichever process dies, the guest
//! continues on exactly one host, or its last checkpoint is complete and a message names the remedy. Two QEMUs never
//! run the guest.

use super::{Pair, assert_cache_matches_disk, last, wait_empty, wait_filled};
use crate::common::{CommandResult, DEADLINE, Guest, Lab, Watch, wait_for};
use std::thread;

/// The required result of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Exit status 1: the guest continues on the source host without a recovery.
    Back,
    /// Like `Back`, but `rekindle stop` must remove the remains on the destination host.
    BackAfterCleanup,
    /// Rekindle was killed; `recover` on the source host resumes the guest on this host.
    RecoveredOnSource,
    /// Rekindle was killed; `recover` on the source host finds that the guest runs on the destination host.
    RecoveredOnDestination,
    /// Rekindle was killed; after `recover` the guest runs on one of the two hosts.
    RecoveredOnEither,
    /// The guest runs on the destination host, and there is nothing to recover.
    Moved,
    /// The source QEMU died before its state was complete elsewhere: the memory is lost, and `recover` boots the guest.
    Booted,
    /// The destination host owned the guest and lost it: it has to be restored from its last checkpoint.
    OnlyInStore,
    /// `OnlyInStore` if the destination host owned the guest already, otherwise `BackAfterCleanup`: the load on the
    /// destination host and the commit on the source host are concurrent.
    BackOrOnlyInStore,
    /// The destination host's Rekindle was killed when the guest might have run: `recover` on that host finds that the
    /// guest runs.
    RecoveredByDestination,
}

use Outcome::{
    Back, BackAfterCleanup, BackOrOnlyInStore, Booted, Moved, OnlyInStore, RecoveredByDestination,
    RecoveredOnDestination, RecoveredOnEither, RecoveredOnSource,
};

/// Fault point, action, and required result of faults on the source host.
const SOURCE_FAULTS: &[(&str, &str, Outcome)] = &[
    ("move.prepare.journalled", "kill", RecoveredOnSource),
    ("move.prepare.journalled", "kill-old", Booted),
    ("move.prepare.prepared", "kill", RecoveredOnSource),
    ("move.prepare.prepared", "kill-old", Booted),
    ("move.suspend.journalled", "kill", RecoveredOnSource),
    ("move.suspend.journalled", "kill-old", Booted),
    ("move.suspend.read", "kill", RecoveredOnSource),
    // The whole state has been read.
    ("move.suspend.read", "kill-old", Moved),
    ("move.suspend.committed", "kill", RecoveredOnSource),
    // From here on the guest's state is complete outside of QEMU.
    ("move.suspend.committed", "kill-old", Moved),
    ("move.suspend.let-go", "kill", RecoveredOnSource),
    ("move.suspend.let-go", "kill-old", Moved),
    // The destination host may have got the order to resume; the store shows that it has not.
    ("move.resume.journalled", "kill", RecoveredOnSource),
    ("move.resume.journalled", "kill-old", Moved),
    ("move.resume.told", "kill", RecoveredOnEither),
    ("move.resume.told", "kill-old", Moved),
    ("move.settle.running", "kill", RecoveredOnDestination),
    ("move.settle.running", "kill-old", Moved),
    ("move.settle.journalled", "kill", RecoveredOnDestination),
];

/// Fault point, action, and required result of faults on the destination host.
const DESTINATION_FAULTS: &[(&str, &str, Outcome)] = &[
    ("prepare.journalled", "kill", BackAfterCleanup),
    ("prepare.spawned", "kill-new", Back),
    ("prepare.recorded", "kill", BackAfterCleanup),
    // The prepared QEMU cannot be used; another one is started.
    ("prepare.recorded", "kill-new", Moved),
    ("move.prepare.registered", "kill", BackAfterCleanup),
    ("move.prepare.registered", "kill-new", Moved),
    ("restore.prepare.journalled", "kill", BackAfterCleanup),
    // The restore starts again with another QEMU, which dies only if it passes the same point.
    ("restore.prepare.journalled", "kill-new", Moved),
    ("restore.renew.registered", "kill", BackOrOnlyInStore),
    ("restore.renew.registered", "kill-new", Back),
    // From here on the guest may have run on the destination host: only the failure of `cont` shows that its QEMU has
    // died.
    ("restore.renew.loaded", "kill-new", OnlyInStore),
    ("restore.resume.journalled", "kill-new", OnlyInStore),
    ("restore.resume.resumed", "kill", RecoveredByDestination),
    ("restore.settle.recorded", "kill", RecoveredByDestination),
    ("restore.settle.handed-over", "kill", RecoveredByDestination),
];

#[test]
fn every_fault_of_a_move_on_the_source_host() {
    walk("near", SOURCE_FAULTS, "REKINDLE_FAULT");
}

#[test]
fn every_fault_of_a_move_on_the_destination_host() {
    walk("far", DESTINATION_FAULTS, "FAR_FAULT");
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
            wrong.push(format!("==== {fault}, expected {outcome:?}:\n{text}\n"));
            for lab in [&pair.here, &pair.there] {
                let _ = lab.rekindle(["stop", "--now", name]);
            }
            boot = start(&pair);
        } else if *outcome == Booted {
            boot = pair.guest(&pair.here).boot_id();
            pair.guest(&pair.here).touch("8M");
        }
    }
    assert!(wrong.is_empty(), "{} of {} faults have a wrong result:\n{}", wrong.len(), table.len(), wrong.join("\n"));
}

/// Boots a guest with an empty store. Returns its boot ID.
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
    let result = here.finish(command);
    let (source, destination) = (pair.guest(here), pair.guest(there));
    let assert_back = |guest: &Guest<'_>| {
        assert_continued(guest, boot);
        guest.assert_sound();
        wait_empty(there);
    };
    let assert_moved = || {
        wait_empty(here);
        assert_continued(&destination, boot);
        destination.assert_sound();
    };
    let outcome = match outcome {
        BackOrOnlyInStore if result.code == Some(3) => OnlyInStore,
        BackOrOnlyInStore => BackAfterCleanup,
        other => other,
    };
    match outcome {
        Back => {
            result.status(1);
            assert_back(&source);
        }
        BackAfterCleanup => {
            result.status(1);
            there.rekindle(["stop", "--now", name]).ok();
            assert_back(&source);
        }
        RecoveredOnEither => {
            assert_killed(&result);
            source.rekindle(&["recover"]).ok();
            if source.status() == "running" { assert_back(&source) } else { assert_moved() }
        }
        RecoveredOnSource => {
            assert_killed(&result);
            wait_empty(there);
            assert_eq!(source.status(), "needs-recovery", "{result}");
            source.rekindle(&["recover"]).ok().prints(&["undone"]);
            assert_back(&source);
        }
        RecoveredOnDestination => {
            assert_killed(&result);
            assert_eq!(source.status(), "needs-recovery", "{result}");
            source.rekindle(&["recover"]).ok().prints(&["runs on the other host"]);
            assert_moved();
        }
        Moved => {
            assert_eq!(last(&result.ok())["name"], name);
            assert_moved();
        }
        Booted => {
            assert_ne!(result.code, Some(0), "{result}");
            source.rekindle(&["recover"]).ok().prints(&["booted"]);
            source.wait_ready();
            assert_ne!(source.boot_id(), boot);
            wait_empty(there);
        }
        OnlyInStore => {
            result.status(3).prints(&["has taken", "rekindle restore"]);
            wait_empty(here);
            there.rekindle(["stop", "--now", name]);
            here.rekindle(["restore", name, "--store", pair.store.to_str().unwrap()]).ok();
            assert_back(&source);
        }
        BackOrOnlyInStore => unreachable!("replaced by one of the two above"),
        RecoveredByDestination => {
            let _: CommandResult = result;
            wait_empty(here);
            wait_for("the recovery on the destination host", DEADLINE, || {
                (destination.rekindle(&["recover"]).code == Some(0)).then_some(())
            });
            assert_moved();
        }
    }
    watch.end();
    // The next case needs the guest on the source host.
    if !has_no_vm(there) {
        pair.run(there, here, &[]).ok();
        assert_continued(&source, boot);
        wait_empty(there);
    }
}

fn has_no_vm(lab: &Lab) -> bool {
    lab.rekindle(["--json", "ls"]).ok().json().as_array().is_none_or(Vec::is_empty)
}

/// Checks that the guest still runs the same boot, with its memory and its disk.
fn assert_continued(guest: &Guest<'_>, boot: &str) {
    guest.wait_ready();
    assert_eq!(guest.boot_id(), boot);
    assert_cache_matches_disk(guest);
    wait_filled(guest);
    guest.verify();
}

fn assert_killed(done: &CommandResult) {
    done.killed();
}
