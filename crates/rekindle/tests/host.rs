//! Guests are suspended out of their QEMUs and resumed into others, as around a reboot of the host.
//!
//! Here the host is not rebooted: the run directory, which a reboot empties, is removed in its place, and the record is told that it was
//! another boot. `tests/hosts/test` reboots a whole emulated host.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{DEADLINE, Guest, Lab, Watch, assert_ticks_once, wait_for};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

/// A lab whose RAM and record outlive its run directory.
fn lab() -> Lab {
    let lab = Lab::new();
    fs::create_dir(lab.path("ram")).unwrap();
    let config = format!("ram_dir = {:?}\nsuspend_dir = {:?}\n", lab.path("ram"), lab.path("suspended"));
    fs::write(lab.path(".host.toml"), config).unwrap();
    lab
}

/// What a reboot takes away: what is known of this boot, and taps.
fn forget_the_boot(lab: &Lab) {
    fs::remove_dir_all(lab.run_root()).unwrap();
    for interface in lab.interfaces() {
        let done = std::process::Command::new("ip").args(["-n", &lab.namespace, "link", "del", &interface]).status();
        assert!(done.unwrap().success(), "{interface}");
    }
}

/// The record says that it was another boot.
fn another_boot(lab: &Lab) {
    let path = lab.path("suspended/host.json");
    let mut head: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    head["boot_id"] = "of another boot".into();
    fs::write(path, head.to_string()).unwrap();
}

fn outcome(resumed: &Value, name: &str) -> Value {
    let all = resumed.as_array().unwrap();
    let one = all.iter().find(|one| one["name"] == name);
    one.unwrap_or_else(|| panic!("{name} is not in {resumed:#}")).clone()
}

/// That nothing is left of a suspend.
fn assert_nothing_kept(lab: &Lab) {
    let left = common::lab::entries(&lab.path("suspended"));
    let left: Vec<_> = left.iter().filter(|path| !path.ends_with("lock")).collect();
    assert!(left.is_empty(), "left of the record: {left:?}");
    assert!(!lab.path("ram/.suspended").exists(), "left beside the RAM");
}

struct Session {
    stream: std::net::TcpStream,
    said: u8,
}

impl Session {
    fn open(guest: &Guest<'_>) -> Self {
        let stream = guest.connect(7).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut session = Self { stream, said: 0 };
        session.echo();
        session
    }

    fn echo(&mut self) {
        self.said += 1;
        self.stream.write_all(&[self.said]).unwrap();
        let mut back = [0];
        self.stream.read_exact(&mut back).unwrap();
        assert_eq!(back, [self.said]);
    }
}

#[test]
fn all_guests_go_on_after_a_boot_with_their_memory_and_their_connections() {
    let lab = lab();
    let guests = [lab.vm("one").boot(&[]), lab.vm("two").section("[devices]\nvga = true").boot(&[])];
    for guest in &guests {
        guest.touch("16M");
    }
    let boots: Vec<_> = guests.iter().map(Guest::boot_id).collect();
    let mut sessions: Vec<_> = guests.iter().map(Session::open).collect();
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
        forget_the_boot(&lab);
        another_boot(&lab);
        let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
        for guest in &guests {
            let one = outcome(&resumed, &guest.name);
            assert_eq!(one["outcome"], "resumed", "{resumed:#}");
            assert!(one["resume_us"].as_u64() > one["stop_us"].as_u64(), "{resumed:#}");
            guest.verify();
            guest.assert_sound();
        }
        assert_eq!(guests.iter().map(Guest::boot_id).collect::<Vec<_>>(), boots);
        sessions.iter_mut().for_each(Session::echo);
        assert_nothing_kept(&lab);
        assert_eq!(lab.rekindle(["--json", "host", "resume"]).ok().json(), Value::Array(Vec::new()));
        for guest in &guests {
            assert_ticks_once(&guest.file("console.log"));
        }
    }
    // And they are VMs like any other.
    for guest in &guests {
        guest.warm(&[]);
        guest.verify();
    }
}

#[test]
fn memory_that_did_not_survive_is_never_run() {
    let lab = lab();
    let guests = [lab.vm("whole").boot(&[]), lab.vm("damaged").boot(&[]), lab.vm("gone").boot(&[])];
    let boots: Vec<_> = guests.iter().map(Guest::boot_id).collect();
    lab.rekindle(["host", "suspend", "--all"]).ok();
    forget_the_boot(&lab);
    another_boot(&lab);
    let ram = |name: &str| -> PathBuf {
        let all = common::lab::entries(&lab.path("ram"));
        let mine = |path: &&PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&format!("{name}-"));
        all.iter().find(mine).unwrap().clone()
    };
    // One bit.
    let path = ram("damaged");
    let mut memory = fs::read(&path).unwrap();
    let at = memory.iter().rposition(|&byte| byte != 0).unwrap();
    memory[at] ^= 1;
    fs::write(&path, memory).unwrap();
    fs::remove_file(ram("gone")).unwrap();
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    assert_eq!(outcome(&resumed, "whole")["outcome"], "resumed", "{resumed:#}");
    for (name, why) in [("damaged", "1 of"), ("gone", "No such file")] {
        let one = outcome(&resumed, name);
        assert_eq!(one["outcome"], "lost", "{resumed:#}");
        assert!(one["why"].as_str().unwrap().contains(why), "{resumed:#}");
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
    let lab = lab();
    let guest = lab.vm("pair").boot(&[]);
    let boot = guest.boot_id();
    lab.rekindle(["host", "suspend", "--all"]).ok();
    fs::write(lab.path("ram/.suspended/token"), "another").unwrap();
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    assert!(outcome(&resumed, "pair")["why"].as_str().unwrap().contains("not the RAM of this record"), "{resumed:#}");
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.assert_sound();
}

#[test]
fn a_guest_that_is_shut_down_is_booted_again() {
    let lab = lab();
    let guest = lab.vm("cold").boot(&[]);
    let boot = guest.boot_id();
    lab.rekindle(["host", "suspend", "--all", "--how", "cold"]).ok().prints(&["cold: shut down"]);
    forget_the_boot(&lab);
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    assert_eq!(outcome(&resumed, "cold")["outcome"], "booted", "{resumed:#}");
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.assert_sound();
    assert_nothing_kept(&lab);
}

#[test]
fn one_that_cannot_be_carried_is_named_and_nobody_is_stopped() {
    let lab = lab();
    let good = lab.vm("good").boot(&[]);
    let bad = lab.vm("bad").key("qemu_args = [\"-device\", \"nvme-subsys\", \"-device\", \"usb-host\"]");
    let path = bad.write();
    // Without USB it does not start; a device that does, and cannot be carried, is enough.
    let text = fs::read_to_string(&path).unwrap().replace(
        "[\"-device\", \"nvme-subsys\", \"-device\", \"usb-host\"]",
        "[\"-object\", \"memory-backend-ram,id=more,size=1M\"]",
    );
    fs::write(&path, text).unwrap();
    lab.rekindle(["run", path.to_str().unwrap()]).ok();
    let bad = bad.guest();
    bad.wait_ready();
    let tick = good.tick();
    let said = lab.rekindle(["host", "suspend", "--all"]).status(1);
    said.prints(&["nothing was stopped", "bad: -object memory-backend-ram"]);
    wait_for("the good one to run on", DEADLINE, || (good.tick() > tick).then_some(()));
    for guest in [&good, &bad] {
        guest.assert_sound();
        assert_eq!(guest.status(), "running");
    }
    let said = lab.rekindle(["reboot", "host", "--dry-run"]).status(1);
    said.prints(&["bad:", "good:", "lost with this kernel", "--others saved"]);
    lab.rekindle(["reboot", "host", "--how", "saved", "--others", "cold", "--dry-run"])
        .ok()
        .prints(&["good: saved", "bad: cold"]);
    assert_nothing_kept(&lab);
}

/// At the end of a shutdown nobody can be asked any more: who cannot be carried is shut down, and whoever is at work on a VM ends with it.
#[test]
fn a_shutdown_takes_everybody_along() {
    let lab = lab();
    lab.rekindle(["host", "suspend", "--planned"]).ok();
    let carried = lab.vm("carried").boot(&[]);
    let device = "qemu_args = [\"-object\", \"memory-backend-ram,id=more,size=1M\"]";
    let other = lab.vm("other").key(device).boot(&[]);
    let busy = lab.vm("busy").boot(&[]);
    let all = [&carried, &other, &busy];
    let boots = all.map(Guest::boot_id);
    lab.rekindle(["host", "suspend", "--planned"]).ok();
    assert!(
        all.iter().all(|guest| guest.status() == "running"),
        "a shutdown that is none of Rekindle's: nothing is done"
    );
    let vms: Vec<_> = all.iter().map(|guest| (guest.name.clone(), "warm")).collect();
    let plan = serde_json::json!({"token": "of-the-plan", "how": "warm", "vms": vms, "kernel": null});
    fs::write(lab.run_root().join(".host-plan.json"), plan.to_string()).unwrap();
    let lock = fs::File::open(busy.file("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let told = lab.rekindle(["--json", "host", "suspend", "--planned"]).ok().json();
    assert_eq!(outcome(&told, "carried")["how"], "warm", "{told:#}");
    let fell_back = outcome(&told, "other");
    assert_eq!(fell_back["how"], "cold", "{told:#}");
    assert!(fell_back["fell_back"].as_str().unwrap().contains("cannot replace the QEMU"), "{told:#}");
    drop(lock);
    // The host goes down.
    for qemu in busy.qemus() {
        qemu.process.kill().unwrap();
        assert!(qemu.process.wait_end(Duration::from_secs(10)).unwrap());
    }
    forget_the_boot(&lab);
    another_boot(&lab);
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    for (guest, boot) in all.iter().zip(&boots) {
        let kept = guest.name == "carried";
        assert_eq!(outcome(&resumed, &guest.name)["outcome"], if kept { "resumed" } else { "booted" }, "{resumed:#}");
        guest.wait_ready();
        assert_eq!(guest.boot_id() == *boot, kept, "{}", guest.name);
        guest.assert_sound();
    }
    assert_nothing_kept(&lab);
}

#[test]
fn a_suspended_guest_can_be_given_up() {
    let lab = lab();
    let guest = lab.vm("given-up").boot(&[]);
    lab.rekindle(["host", "suspend", "--all"]).ok();
    guest.rekindle(&["stop"]).ok().prints(&["was dropped"]);
    assert_nothing_kept(&lab);
    assert_eq!(lab.rekindle(["--json", "host", "resume"]).ok().json(), Value::Array(Vec::new()));
    // Also in a boot that does not know of it yet.
    lab.rekindle(["run", lab.path("given-up.toml").to_str().unwrap()]).ok();
    guest.wait_ready();
    lab.rekindle(["host", "suspend", "--all"]).ok();
    forget_the_boot(&lab);
    guest.rekindle(&["stop"]).ok().prints(&["was dropped"]);
    assert_nothing_kept(&lab);
    assert!(common::lab::entries(&lab.path("ram")).is_empty(), "its RAM is left");
}

#[test]
fn an_owner_s_pause_stays() {
    let lab = lab();
    let guest = lab.vm("paused").boot(&[]);
    let path = guest.only_qemu().directory.join("qmp.sock");
    let mut qmp = rekindle_qemu::qmp::Qmp::connect(&path, Duration::from_secs(5)).unwrap();
    qmp.execute::<Value>("stop", ()).unwrap();
    drop(qmp);
    lab.rekindle(["host", "suspend", "--all"]).ok();
    forget_the_boot(&lab);
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    assert_eq!(outcome(&resumed, "paused")["outcome"], "resumed");
    assert_eq!(guest.qemus()[0].run_state().as_deref(), Some("paused"));
}

/// What `recover` has to say after a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    /// There is nobody to die.
    Nobody,
    /// It went through all the same.
    Through,
    /// Nothing was done yet, but the guest was stopped: it goes on.
    Unpaused,
    /// It is undone: the guest goes on in its old QEMU.
    Undone,
    /// The guest is started from its state.
    FromState,
    /// The guest goes on in the new QEMU.
    Finished,
    /// It is lost, and booted.
    Lost,
}

#[test]
fn a_vm_called_as_the_record_itself_is_resumed_with_its_memory() {
    let lab = lab();
    let guests = ["host", "guests"].map(|name| lab.vm(name).memory("96M").boot(&[]));
    let boots = guests.each_ref().map(Guest::boot_id);
    lab.rekindle(["--json", "host", "suspend", "--all", "--how", "warm"]).ok();
    forget_the_boot(&lab);
    another_boot(&lab);
    let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
    for (guest, boot) in guests.iter().zip(boots) {
        assert_eq!(outcome(&resumed, &guest.name)["outcome"], "resumed", "{resumed:#}");
        assert_eq!(guest.boot_id(), boot);
    }
    lab.rekindle(["stop", "--now", "host", "guests"]).ok();
    assert_nothing_kept(&lab);
}

use After::{Finished, FromState, Lost, Nobody, Through, Undone, Unpaused};

/// Per point: what has to come of killing Rekindle, the old QEMU, the new QEMU.
const WALK: &[(&str, [After; 3])] = &[
    ("host.suspend.ahead", [Unpaused, Lost, Nobody]),
    ("host.suspend.journalled", [Undone, Lost, Nobody]),
    ("host.suspend.stopped", [Undone, Lost, Nobody]),
    // From here on the state is whole outside the old QEMU.
    ("host.suspend.saved", [Undone, Through, Nobody]),
    ("host.suspend.listed", [Undone, Through, Nobody]),
    ("host.suspend.committed", [Undone, Through, Nobody]),
    ("host.suspend.ended", [FromState, Nobody, Nobody]),
    ("host.resume.placed", [FromState, Nobody, Nobody]),
    ("host.resume.loaded", [FromState, Nobody, FromState]),
    // From here on the guest may have run.
    ("host.resume.struck", [FromState, Nobody, Lost]),
    ("host.resume.resumed", [Finished, Nobody, Lost]),
    ("host.resume.recorded", [Finished, Nobody, Lost]),
];

#[test]
fn every_point_of_a_suspend_and_a_resume_is_walked_through() {
    let listed: Vec<_> = WALK.iter().map(|(point, _)| *point).collect();
    let there: Vec<_> = rekindle_vm::fault::POINTS.iter().copied().filter(|point| point.starts_with("host.")).collect();
    assert_eq!(listed, there);
}

#[test]
fn a_suspend_with_every_death() {
    walk("suspend");
}

#[test]
fn a_resume_with_every_death() {
    walk("resume");
}

fn walk(part: &str) {
    let lab = lab();
    let guest = lab.vm(part).boot(&[]);
    let mut tried = 0;
    for (point, afters) in WALK.iter().filter(|(point, _)| point.contains(part)) {
        for (action, after) in ["kill", "kill-old", "kill-new"].iter().zip(afters) {
            if *after != Nobody {
                tried += 1;
                one_death(&guest, &format!("{point}:{action}"), *after);
            }
        }
    }
    assert!(tried > 0, "no fault was tried");
}

fn one_death(guest: &Guest<'_>, fault: &str, after: After) {
    let lab = guest.lab;
    guest.touch("16M");
    let (boot, old) = (guest.boot_id(), guest.only_qemu().process.pid);
    let watch = Watch::start(&lab.run_root());
    let part = fault.split('.').nth(1).unwrap();
    if part == "resume" {
        lab.rekindle(["host", "suspend", "--all"]).ok();
    }
    let whom: &[&str] = if part == "suspend" { &["--all"] } else { &[] };
    let mut command = lab.command(["host", part].iter().chain(whom));
    command.env("REKINDLE_FAULT", fault);
    let done = lab.finish(command);
    if after == Through {
        done.ok();
        lab.rekindle(["host", "resume"]).ok().prints(&["resumed with its memory"]);
    } else {
        let killed = fault.ends_with(":kill");
        assert_eq!(done.code.is_none(), killed, "{fault}: {done}");
        let status = guest.status();
        let paused = after == Unpaused && status.contains("paused");
        assert!(
            paused || ["needs-recovery", "suspended", "ended"].contains(&&*status),
            "{fault}: {status} after {done}"
        );
        let word = match after {
            Unpaused => "had left the guest stopped; it was resumed",
            Undone => "undone: the guest runs in the same QEMU as before, with its memory",
            FromState => "from its saved state, with its memory",
            Finished => "finished: the guest runs in the destination QEMU, with its memory",
            _ => "memory was lost",
        };
        guest.rekindle(&["recover"]).ok().prints(&[word]);
    }
    watch.end();
    guest.wait_ready();
    assert_eq!(guest.boot_id() == boot, after != Lost, "{fault}");
    assert_eq!(guest.only_qemu().process.pid == old, [Undone, Unpaused].contains(&after), "{fault}");
    if after != Lost {
        guest.verify();
    }
    guest.assert_sound();
    assert_nothing_kept(lab);
    assert_ticks_once(&guest.file("console.log"));
}

/// At the end of a shutdown nobody looks after a suspend that was cut off but the same unit once more, and no guest may be lost by it.
#[test]
fn a_planned_suspend_that_was_killed_is_taken_up_by_the_next() {
    let lab = lab();
    let guests = [lab.vm("first").boot(&[]), lab.vm("second").boot(&[])];
    let boots: Vec<_> = guests.iter().map(Guest::boot_id).collect();
    let points = WALK.iter().map(|(point, _)| *point).filter(|point| point.starts_with("host.suspend."));
    for (number, point) in points.enumerate() {
        let vms: Vec<_> = guests.iter().map(|guest| (guest.name.clone(), "warm")).collect();
        let plan = serde_json::json!({"token": format!("plan-{number}"), "how": "warm", "vms": vms, "kernel": null});
        fs::write(lab.run_root().join(".host-plan.json"), plan.to_string()).unwrap();
        let mut command = lab.command(["host", "suspend", "--planned"]);
        command.env("REKINDLE_FAULT", format!("{point}:kill"));
        assert_eq!(lab.finish(command).code, None, "{point}");
        lab.rekindle(["host", "suspend", "--planned"]).ok();
        assert!(guests.iter().all(|guest| guest.qemus().is_empty()), "{point}: {}", lab.state_report());
        // Once more is one time too many, and does nothing.
        lab.rekindle(["host", "suspend", "--planned"]).ok();
        forget_the_boot(&lab);
        another_boot(&lab);
        let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
        for (guest, boot) in guests.iter().zip(&boots) {
            assert_eq!(outcome(&resumed, &guest.name)["outcome"], "resumed", "{point}: {resumed:#}");
            assert_eq!(guest.boot_id(), *boot, "{point}");
            guest.assert_sound();
        }
        assert_nothing_kept(&lab);
    }
}

/// And a resume that was cut off, in a host that lives, is taken up by the next one: what was let go already is not let go twice.
#[test]
fn a_resume_that_was_killed_is_taken_up_by_the_next() {
    let lab = lab();
    let guest = lab.vm("again").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    for point in ["placed", "loaded", "struck", "resumed"] {
        lab.rekindle(["host", "suspend", "--all"]).ok();
        forget_the_boot(&lab);
        another_boot(&lab);
        let mut command = lab.command(["host", "resume"]);
        command.env("REKINDLE_FAULT", format!("host.resume.{point}:kill"));
        assert_eq!(lab.finish(command).code, None, "{point}");
        let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
        assert_eq!(outcome(&resumed, "again")["outcome"], "resumed", "{point}: {resumed:#}");
        assert_eq!(guest.boot_id(), boot, "{point}");
        guest.verify();
        guest.assert_sound();
        assert_nothing_kept(&lab);
    }
}

/// The host dies with its QEMUs while it resumes: what was not let go yet is resumed by the next boot, what was is not run twice.
#[test]
fn a_host_that_dies_while_it_resumes() {
    let lab = lab();
    let guest = lab.vm("twice").boot(&[]);
    for (point, kept) in [("placed", true), ("loaded", true), ("struck", false), ("resumed", false)] {
        let boot = guest.boot_id();
        lab.rekindle(["host", "suspend", "--all"]).ok();
        let mut command = lab.command(["host", "resume"]);
        command.env("REKINDLE_FAULT", format!("host.resume.{point}:kill"));
        assert_eq!(lab.finish(command).code, None, "{point}");
        for qemu in guest.qemus() {
            qemu.process.kill().unwrap();
            assert!(qemu.process.wait_end(Duration::from_secs(10)).unwrap());
        }
        forget_the_boot(&lab);
        let resumed = lab.rekindle(["--json", "host", "resume"]).ok().json();
        assert_eq!(
            outcome(&resumed, "twice")["outcome"],
            if kept { "resumed" } else { "lost" },
            "{point}: {resumed:#}"
        );
        guest.wait_ready();
        assert_eq!(guest.boot_id() == boot, kept, "{point}");
        guest.assert_sound();
        assert_nothing_kept(&lab);
    }
}
