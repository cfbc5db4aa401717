//! `rekindle host suspend` and `resume`: guests leave their QEMUs and resume in other ones, as in a reboot of the host.
//!
//! The test does not reboot the host. Instead, it removes the run directory, which a reboot empties, and writes another
//! boot's ID into the record of the suspended guests. `tests/hosts/test` reboots a whole emulated host.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;

use common::{DEADLINE, Guest, Lab, Watch, assert_ticks_once, wait_for};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

/// A line of a definition. A guest with it runs, but cannot be moved to another QEMU.
const OBSTACLE: &str = "qemu_args = [\"-object\", \"memory-backend-ram,id=more,size=1M\"]";

/// Returns a lab whose RAM directory and record are outside its run directory.
fn lab_with_persistent_ram() -> Lab {
    let lab = Lab::new();
    fs::create_dir(lab.path("ram")).unwrap();
    let config = format!("ram_dir = {:?}\nsuspend_dir = {:?}\n", lab.path("ram"), lab.path("suspended"));
    lab.configure_host(&config);
    lab
}

/// Removes the run directory and the taps, as a reboot of the host does.
fn remove_what_a_boot_removes(lab: &Lab) {
    fs::remove_dir_all(lab.run_root()).unwrap();
    for interface in lab.interfaces() {
        let deleted = std::process::Command::new("ip").args(["-n", &lab.namespace, "link", "del", &interface]).status();
        assert!(deleted.unwrap().success(), "{interface}");
    }
}

/// Changes the record as if the guests had been suspended in another boot of the host.
fn record_another_boot(lab: &Lab) {
    let path = lab.path("suspended/host.json");
    let mut head: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    head["boot_id"] = "of another boot".into();
    fs::write(path, head.to_string()).unwrap();
}

/// Simulates a reboot of the host.
fn reboot_host(lab: &Lab) {
    remove_what_a_boot_removes(lab);
    record_another_boot(lab);
}

/// Returns the part of a report about one VM.
fn report_of(report: &Value, name: &str) -> Value {
    let vms = report.as_array().unwrap();
    let vm = vms.iter().find(|vm| vm["name"] == name);
    vm.unwrap_or_else(|| panic!("{name} is not in {report:#}")).clone()
}

/// Asserts that the suspend has left no files.
fn assert_nothing_kept(lab: &Lab) {
    let mut record = common::lab::entries(&lab.path("suspended"));
    record.retain(|path| !path.ends_with("lock"));
    assert!(record.is_empty(), "left of the record: {record:?}");
    assert!(!lab.path("ram/.suspended").exists(), "left next to the RAM");
}

/// Writes the plan of a reboot of the host in which all guests are suspended warm.
fn write_plan(lab: &Lab, token: &str, guests: &[&Guest<'_>]) {
    let vms: Vec<_> = guests.iter().map(|guest| (&guest.name, "warm")).collect();
    let plan = serde_json::json!({"token": token, "how": "warm", "vms": vms, "kernel": null});
    fs::write(lab.run_root().join(".host-plan.json"), plan.to_string()).unwrap();
}

/// Kills a guest's QEMUs, as a failure of the host does.
fn kill_qemus(guest: &Guest<'_>) {
    for qemu in guest.qemus() {
        qemu.process.kill().unwrap();
        assert!(qemu.process.wait_end(Duration::from_secs(10)).unwrap());
    }
}

/// A connection to the guest's echo service.
struct EchoConnection {
    stream: std::net::TcpStream,
    last_sent: u8,
}

impl EchoConnection {
    fn open(guest: &Guest<'_>) -> Self {
        let stream = guest.connect(7).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut connection = Self { stream, last_sent: 0 };
        connection.echo();
        connection
    }

    fn echo(&mut self) {
        self.last_sent += 1;
        self.stream.write_all(&[self.last_sent]).unwrap();
        let mut reply = [0];
        self.stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply, [self.last_sent]);
    }
}

#[test]
fn all_guests_resume_after_a_boot_with_their_memory_and_their_connections() {
    let lab = lab_with_persistent_ram();
    let guests = [lab.vm("one").boot(&[]), lab.vm("two").section("[devices]\nvga = true").boot(&[])];
    for guest in &guests {
        guest.touch("16M");
    }
    let boots: Vec<_> = guests.iter().map(Guest::boot_id).collect();
    let mut connections: Vec<_> = guests.iter().map(EchoConnection::open).collect();
    for how in ["warm", "saved", "warm"] {
        let watch = Watch::start(&lab.run_root());
        lab.rekindle(["--json", "host", "suspend", "--all", "--how", how]).ok();
        watch.end();
        for guest in &guests {
            assert!(guest.qemus().is_empty(), "{}", lab.state_report());
            assert_eq!(guest.status(), "suspended");
            let definition = lab.path(&format!("{}.toml", guest.name));
            lab.rekindle(["run", definition.to_str().unwrap()]).status(1);
        }
        lab.rekindle(["host", "suspend", "--all"]).status(2).prints(&["no VM runs"]);
        reboot_host(&lab);
        let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
        for guest in &guests {
            let report = report_of(&resumed, &guest.name);
            assert_eq!(report["outcome"], "resumed", "{resumed:#}");
            assert!(report["resume_us"].as_u64() > report["stop_us"].as_u64(), "{resumed:#}");
            guest.verify();
            guest.assert_sound();
        }
        assert_eq!(guests.iter().map(Guest::boot_id).collect::<Vec<_>>(), boots);
        connections.iter_mut().for_each(EchoConnection::echo);
        assert_nothing_kept(&lab);
        assert_eq!(lab.rekindle(["--json", "host", "resume"]).ok().json(), Value::Array(Vec::new()));
        for guest in &guests {
            assert_ticks_once(&guest.file("console.log"));
        }
    }
    // The VMs work as before the suspend.
    for guest in &guests {
        guest.warm(&[]);
        guest.verify();
    }
}

#[test]
fn memory_that_did_not_survive_is_never_run() {
    let lab = lab_with_persistent_ram();
    let guests = [lab.vm("whole").boot(&[]), lab.vm("damaged").boot(&[]), lab.vm("gone").boot(&[])];
    let boots: Vec<_> = guests.iter().map(Guest::boot_id).collect();
    lab.rekindle(["host", "suspend", "--all"]).ok();
    reboot_host(&lab);
    let ram = |name: &str| -> PathBuf {
        let is_of_vm = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&format!("{name}-"));
        common::lab::entries(&lab.path("ram")).into_iter().find(is_of_vm).unwrap()
    };
    // Flip one bit.
    let path = ram("damaged");
    let mut memory = fs::read(&path).unwrap();
    let last = memory.iter_mut().rfind(|byte| **byte != 0).unwrap();
    *last ^= 1;
    fs::write(&path, memory).unwrap();
    fs::remove_file(ram("gone")).unwrap();
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    assert_eq!(report_of(&resumed, "whole")["outcome"], "resumed", "{resumed:#}");
    for (name, why) in [("damaged", "1 of"), ("gone", "No such file")] {
        let report = report_of(&resumed, name);
        assert_eq!(report["outcome"], "lost", "{resumed:#}");
        assert!(report["why"].as_str().unwrap().contains(why), "{resumed:#}");
    }
    for (guest, boot) in guests.iter().zip(&boots) {
        guest.wait_ready();
        assert_eq!(guest.boot_id() == *boot, guest.name == "whole", "{}", guest.name);
        guest.assert_sound();
    }
    assert_nothing_kept(&lab);
}

#[test]
fn ram_of_another_record_is_not_believed_even_in_the_same_boot() {
    let lab = lab_with_persistent_ram();
    let guest = lab.vm("pair").boot(&[]);
    let boot = guest.boot_id();
    lab.rekindle(["host", "suspend", "--all"]).ok();
    fs::write(lab.path("ram/.suspended/token"), "another").unwrap();
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    assert!(report_of(&resumed, "pair")["why"].as_str().unwrap().contains("not the RAM of this record"), "{resumed:#}");
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.assert_sound();
}

#[test]
fn a_guest_that_is_shut_down_is_booted_again() {
    let lab = lab_with_persistent_ram();
    let guest = lab.vm("cold").boot(&[]);
    let boot = guest.boot_id();
    lab.rekindle(["host", "suspend", "--all", "--how", "cold"]).ok().prints(&["cold: shut down"]);
    remove_what_a_boot_removes(&lab);
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    assert_eq!(report_of(&resumed, "cold")["outcome"], "booted", "{resumed:#}");
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.assert_sound();
    assert_nothing_kept(&lab);
}

#[test]
fn a_guest_that_cannot_be_carried_is_named_and_no_guest_is_stopped() {
    let lab = lab_with_persistent_ram();
    let good = lab.vm("good").boot(&[]);
    let bad = lab.vm("bad").key(OBSTACLE).boot(&[]);
    let tick = good.tick();
    let refused = lab.rekindle(["host", "suspend", "--all"]).status(1);
    refused.prints(&["nothing was stopped", "bad: -object memory-backend-ram"]);
    wait_for("the good guest to tick", DEADLINE, || (good.tick() > tick).then_some(()));
    for guest in [&good, &bad] {
        guest.assert_sound();
        assert_eq!(guest.status(), "running");
    }
    let refused = lab.rekindle(["reboot-host", "--dry-run"]).status(1);
    refused.prints(&["bad:", "good:", "lost with this kernel", "--others saved"]);
    lab.rekindle(["reboot-host", "--how", "saved", "--others", "cold", "--dry-run"])
        .ok()
        .prints(&["good: saved", "bad: cold"]);
    assert_nothing_kept(&lab);
}

/// At the end of a shutdown no operator can decide any more: guests that cannot be carried are shut down, and an
/// operation on a VM ends with the host.
#[test]
fn a_planned_shutdown_suspends_or_ends_every_guest() {
    let lab = lab_with_persistent_ram();
    lab.rekindle(["host", "suspend", "--planned"]).ok();
    let carried = lab.vm("carried").boot(&[]);
    let other = lab.vm("other").key(OBSTACLE).boot(&[]);
    let busy = lab.vm("busy").boot(&[]);
    let guests = [&carried, &other, &busy];
    let boots = guests.map(Guest::boot_id);
    lab.rekindle(["host", "suspend", "--planned"]).ok();
    assert!(
        guests.iter().all(|guest| guest.status() == "running"),
        "without a plan the shutdown is not Rekindle's, and nothing is suspended"
    );
    write_plan(&lab, "of-the-plan", &guests);
    let lock = fs::File::open(busy.file("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let suspended = lab.rekindle(["--json", "host", "suspend", "--planned"]).ok().json();
    assert_eq!(report_of(&suspended, "carried")["how"], "warm", "{suspended:#}");
    let other_report = report_of(&suspended, "other");
    assert_eq!(other_report["how"], "cold", "{suspended:#}");
    assert!(other_report["fell_back"].as_str().unwrap().contains("cannot replace the QEMU"), "{suspended:#}");
    drop(lock);
    // The host shuts down.
    kill_qemus(&busy);
    reboot_host(&lab);
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    for (guest, boot) in guests.iter().zip(&boots) {
        let is_carried = guest.name == "carried";
        let expected = if is_carried { "resumed" } else { "booted" };
        assert_eq!(report_of(&resumed, &guest.name)["outcome"], expected, "{resumed:#}");
        guest.wait_ready();
        assert_eq!(guest.boot_id() == *boot, is_carried, "{}", guest.name);
        guest.assert_sound();
    }
    assert_nothing_kept(&lab);
}

#[test]
fn a_suspended_guest_can_be_dropped() {
    let lab = lab_with_persistent_ram();
    let guest = lab.vm("dropped").boot(&[]);
    lab.rekindle(["host", "suspend", "--all"]).ok();
    guest.rekindle(&["stop"]).ok().prints(&["was dropped"]);
    assert_nothing_kept(&lab);
    assert_eq!(lab.rekindle(["--json", "host", "resume"]).ok().json(), Value::Array(Vec::new()));
    // A stop after a boot of the host, before the guest is resumed, drops the guest's memory, too.
    lab.rekindle(["run", lab.path("dropped.toml").to_str().unwrap()]).ok();
    guest.wait_ready();
    lab.rekindle(["host", "suspend", "--all"]).ok();
    remove_what_a_boot_removes(&lab);
    guest.rekindle(&["stop"]).ok().prints(&["was dropped"]);
    assert_nothing_kept(&lab);
    assert!(common::lab::entries(&lab.path("ram")).is_empty(), "its RAM is left");
}

#[test]
fn an_owner_s_pause_stays() {
    let lab = lab_with_persistent_ram();
    let guest = lab.vm("paused").boot(&[]);
    let path = guest.only_qemu().directory.join("qmp.sock");
    let mut qmp = rekindle_qemu::qmp::Qmp::connect(&path, Duration::from_secs(5)).unwrap();
    qmp.execute::<Value>("stop", ()).unwrap();
    drop(qmp);
    lab.rekindle(["host", "suspend", "--all"]).ok();
    remove_what_a_boot_removes(&lab);
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    assert_eq!(report_of(&resumed, "paused")["outcome"], "resumed");
    assert_eq!(guest.qemus()[0].run_state().as_deref(), Some("paused"));
}

#[test]
fn a_vm_called_as_the_directory_of_the_records_is_resumed_with_its_memory() {
    let lab = lab_with_persistent_ram();
    let guest = lab.vm("guests").memory("96M").boot(&[]);
    let boot = guest.boot_id();
    lab.rekindle(["--json", "host", "suspend", "--all", "--how", "warm"]).ok();
    reboot_host(&lab);
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    assert_eq!(report_of(&resumed, "guests")["outcome"], "resumed", "{resumed:#}");
    assert_eq!(guest.boot_id(), boot);
    lab.rekindle(["stop", "--now", "guests"]).ok();
    assert_nothing_kept(&lab);
}

/// The required outcome of a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Not tried: no such process exists at this point.
    NotTried,
    /// The operation succeeds nevertheless.
    Success,
    /// The operation has changed nothing yet, but the guest was stopped: `recover` resumes it.
    Unpaused,
    /// `recover` undoes the suspend: the guest continues in its old QEMU.
    Undone,
    /// `recover` starts the guest from its saved state.
    FromState,
    /// `recover` finishes the resume: the guest continues in the new QEMU.
    Finished,
    /// The memory is lost, and `recover` boots the guest.
    Lost,
}

use Outcome::{Finished, FromState, Lost, NotTried, Success, Undone, Unpaused};

/// For each point: the outcomes of killing Rekindle, the old QEMU, the new QEMU.
const TABLE: &[(&str, [Outcome; 3])] = &[
    ("host.suspend.ahead", [Unpaused, Lost, NotTried]),
    ("host.suspend.journalled", [Undone, Lost, NotTried]),
    ("host.suspend.stopped", [Undone, Lost, NotTried]),
    // From here on the state is complete outside the old QEMU.
    ("host.suspend.saved", [Undone, Success, NotTried]),
    ("host.suspend.listed", [Undone, Success, NotTried]),
    ("host.suspend.committed", [Undone, Success, NotTried]),
    ("host.suspend.ended", [FromState, NotTried, NotTried]),
    ("host.resume.placed", [FromState, NotTried, NotTried]),
    ("host.resume.loaded", [FromState, NotTried, FromState]),
    // From here on the guest may have run. At this point it has not: the mark on its RAM file shows it.
    ("host.resume.struck", [FromState, NotTried, FromState]),
    ("host.resume.resumed", [Finished, NotTried, Lost]),
    ("host.resume.recorded", [Finished, NotTried, Lost]),
];

#[test]
fn every_point_of_a_suspend_and_a_resume_is_walked_through() {
    let listed: Vec<_> = TABLE.iter().map(|(point, _)| *point).collect();
    let mut points = rekindle_vm::fault::POINTS.to_vec();
    points.retain(|point| point.starts_with("host."));
    assert_eq!(listed, points);
}

#[test]
fn a_suspend_with_every_death() {
    walk("suspend");
}

#[test]
fn a_resume_with_every_death() {
    walk("resume");
}

/// Tries each death at each point of one part: `suspend` or `resume`.
fn walk(part: &str) {
    let lab = lab_with_persistent_ram();
    let guest = lab.vm(part).boot(&[]);
    let mut tried = 0;
    for (point, outcomes) in TABLE.iter().filter(|(point, _)| point.contains(part)) {
        for (action, outcome) in ["kill", "kill-old", "kill-new"].iter().zip(outcomes) {
            if *outcome != NotTried {
                tried += 1;
                try_fault(&guest, &format!("{point}:{action}"), *outcome);
            }
        }
    }
    assert!(tried > 0, "no fault was tried");
}

/// Suspends and resumes the guest with one death.
fn try_fault(guest: &Guest<'_>, fault: &str, outcome: Outcome) {
    let lab = guest.lab;
    guest.touch("16M");
    let (boot, old_qemu) = (guest.boot_id(), guest.only_qemu().process.pid);
    let watch = Watch::start(&lab.run_root());
    let part = fault.split('.').nth(1).unwrap();
    if part == "resume" {
        lab.rekindle(["host", "suspend", "--all"]).ok();
    }
    let selection: &[&str] = if part == "suspend" { &["--all"] } else { &[] };
    let mut command = lab.command(["host", part].iter().chain(selection));
    command.env("REKINDLE_FAULT", fault);
    let result = lab.finish(command);
    if outcome == Success {
        result.ok();
        lab.rekindle(["host", "resume"]).ok().prints(&["resumed with its memory"]);
    } else {
        let is_killed = fault.ends_with(":kill");
        assert_eq!(result.code.is_none(), is_killed, "{fault}: {result}");
        let status = guest.status();
        let is_paused = outcome == Unpaused && status.contains("paused");
        assert!(
            is_paused || ["needs-recovery", "suspended", "ended"].contains(&&*status),
            "{fault}: {status} after {result}"
        );
        let message = match outcome {
            Unpaused => "had left the guest stopped; it was resumed",
            Undone => "undone: the guest runs in the same QEMU as before, with its memory",
            FromState => "from its saved state, with its memory",
            Finished => "finished: the guest runs in the destination QEMU, with its memory",
            _ => "memory was lost",
        };
        guest.rekindle(&["recover"]).ok().prints(&[message]);
    }
    watch.end();
    guest.wait_ready();
    assert_eq!(guest.boot_id() == boot, outcome != Lost, "{fault}");
    assert_eq!(guest.only_qemu().process.pid == old_qemu, [Undone, Unpaused].contains(&outcome), "{fault}");
    if outcome != Lost {
        guest.verify();
    }
    guest.assert_sound();
    assert_nothing_kept(lab);
    assert_ticks_once(&guest.file("console.log"));
}

/// At the end of a shutdown only the same systemd unit, started again, can continue a suspend that was killed. No guest
/// may be lost.
#[test]
fn a_planned_suspend_that_was_killed_is_taken_up_by_the_next() {
    let lab = lab_with_persistent_ram();
    let guests = [lab.vm("first").boot(&[]), lab.vm("second").boot(&[])];
    let boots: Vec<_> = guests.iter().map(Guest::boot_id).collect();
    let points = TABLE.iter().map(|(point, _)| *point).filter(|point| point.starts_with("host.suspend."));
    for (number, point) in points.enumerate() {
        write_plan(&lab, &format!("plan-{number}"), &guests.each_ref());
        let mut command = lab.command(["host", "suspend", "--planned"]);
        command.env("REKINDLE_FAULT", format!("{point}:kill"));
        lab.finish(command).killed();
        lab.rekindle(["host", "suspend", "--planned"]).ok();
        assert!(guests.iter().all(|guest| guest.qemus().is_empty()), "{point}: {}", lab.state_report());
        // Another suspend finds no guest and does nothing.
        lab.rekindle(["host", "suspend", "--planned"]).ok();
        reboot_host(&lab);
        let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
        for (guest, boot) in guests.iter().zip(&boots) {
            assert_eq!(report_of(&resumed, &guest.name)["outcome"], "resumed", "{point}: {resumed:#}");
            assert_eq!(guest.boot_id(), *boot, "{point}");
            guest.assert_sound();
        }
        assert_nothing_kept(&lab);
    }
}

/// The host continues to run after a resume was killed: the next resume continues it, and resumes no guest twice.
#[test]
fn a_resume_that_was_killed_is_taken_up_by_the_next() {
    let lab = lab_with_persistent_ram();
    let guest = lab.vm("again").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    for point in ["placed", "loaded", "struck", "resumed"] {
        lab.rekindle(["host", "suspend", "--all"]).ok();
        reboot_host(&lab);
        let mut command = lab.command(["host", "resume"]);
        command.env("REKINDLE_FAULT", format!("host.resume.{point}:kill"));
        lab.finish(command).killed();
        let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
        assert_eq!(report_of(&resumed, "again")["outcome"], "resumed", "{point}: {resumed:#}");
        assert_eq!(guest.boot_id(), boot, "{point}");
        guest.verify();
        guest.assert_sound();
        assert_nothing_kept(&lab);
    }
}

/// The host fails with its QEMUs during a resume: guests that had not run yet are resumed in the next boot, the
/// others are not run twice from the same state.
#[test]
fn a_host_that_dies_while_it_resumes() {
    let lab = lab_with_persistent_ram();
    let guest = lab.vm("twice").boot(&[]);
    for (point, is_kept) in [("placed", true), ("loaded", true), ("struck", false), ("resumed", false)] {
        let boot = guest.boot_id();
        lab.rekindle(["host", "suspend", "--all"]).ok();
        let mut command = lab.command(["host", "resume"]);
        command.env("REKINDLE_FAULT", format!("host.resume.{point}:kill"));
        lab.finish(command).killed();
        kill_qemus(&guest);
        remove_what_a_boot_removes(&lab);
        let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
        let expected = if is_kept { "resumed" } else { "lost" };
        assert_eq!(report_of(&resumed, "twice")["outcome"], expected, "{point}: {resumed:#}");
        guest.wait_ready();
        assert_eq!(guest.boot_id() == boot, is_kept, "{point}");
        guest.assert_sound();
        assert_nothing_kept(&lab);
    }
}
