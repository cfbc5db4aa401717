//! Kills each process at each point of a replacement. Afterwards exactly one QEMU has the guest, or libvirt shows the
//! domain as shut off, and libvirt's daemon accepts connections.

use crate::{assert_continues, boot, qemus_of, rekindle, text, wait_shut_off};
use rekindle_testing::libvirt::{Domain, PrivateLibvirt};
use rekindle_testing::{DEADLINE, wait_for};
use rekindle_vm::fault::DOMAIN_POINTS;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::sync::Mutex;
use std::thread;

/// What becomes of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// It continues in the source.
    Source,
    /// It continues in the destination.
    Destination,
    /// The QEMU that was killed was the only one with its state: libvirt shows the domain as shut off.
    ShutOff,
}

use Outcome::{Destination, ShutOff, Source};

/// Outcomes for each point if Rekindle, the source, the destination, or libvirt's daemon is killed there. At the first
/// point there is no destination yet, and while the daemon is stopped there is no daemon to kill.
const TABLE: &[(&str, [Outcome; 4])] = &[
    ("replace.prepare.journalled", [Source, ShutOff, Destination, Source]),
    ("replace.prepare.tpm-unlocked", [Source, ShutOff, Destination, Source]),
    ("replace.prepare.tpm-started", [Source, ShutOff, Destination, Source]),
    ("replace.prepare.spawned", [Source, ShutOff, Source, Source]),
    ("replace.prepare.compared", [Source, ShutOff, Source, Source]),
    ("replace.prepare.copied", [Source, ShutOff, Source, Destination]),
    ("libvirt.daemon.stopping", [Source, ShutOff, Source, Destination]),
    ("libvirt.daemon.stopped", [Source, ShutOff, Source, Destination]),
    ("replace.suspend.journalled", [Source, ShutOff, Source, Destination]),
    ("replace.suspend.stopped", [Source, ShutOff, Source, Destination]),
    ("replace.suspend.taps", [Source, ShutOff, Source, Destination]),
    ("replace.suspend.copied", [Source, Destination, Source, Destination]),
    ("replace.suspend.frozen", [Source, Destination, Source, Destination]),
    ("replace.suspend.loaded", [Source, Destination, Source, Destination]),
    ("replace.resume.journalled", [Destination, Destination, Source, Destination]),
    ("replace.resume.resumed", [Destination, Destination, ShutOff, Destination]),
    ("replace.give-back.frozen", [Destination, Destination, ShutOff, Destination]),
    ("replace.give-back.tpm-passed", [Destination, Destination, ShutOff, Destination]),
    ("replace.give-back.graphics-passed", [Destination, Destination, ShutOff, Destination]),
    ("libvirt.give-back.status-written", [Destination, Destination, ShutOff, Destination]),
    ("libvirt.give-back.pid-written", [Destination, Destination, ShutOff, Destination]),
    ("libvirt.give-back.daemon-started", [Destination, Destination, ShutOff, Destination]),
    ("libvirt.give-back.reconnected", [Destination, Destination, ShutOff, Destination]),
    ("replace.settle.journalled", [Destination, Destination, ShutOff, Destination]),
    ("replace.settle.source-gone", [Destination, Destination, ShutOff, Destination]),
];

/// Threads that walk through the faults, each with a libvirt of its own. A walk waits more than it computes.
const WALKERS: usize = 2;

#[test]
fn one_qemu_has_the_guest_after_rekindle_is_killed() {
    walk("kill", |[rekindle_killed, ..]| rekindle_killed);
}

#[test]
fn one_qemu_has_the_guest_after_the_source_is_killed() {
    walk("kill-old", |[_, source_killed, ..]| source_killed);
}

#[test]
fn one_qemu_has_the_guest_after_the_destination_is_killed() {
    walk("kill-new", |[_, _, destination_killed, _]| destination_killed);
}

#[test]
fn one_qemu_has_the_guest_after_the_daemon_is_killed() {
    walk("kill-daemon", |[.., daemon_killed]| daemon_killed);
}

/// Kills Rekindle at each point of a replacement of two domains, and recovers one of them. The same guests are used for
/// all points: none of these faults costs a guest's memory.
#[test]
fn both_guests_continue_and_libvirt_has_them_after_rekindle_is_killed_with_two_domains() {
    let libvirt = PrivateLibvirt::start();
    let domains = ["one", "two"].map(|name| boot(&libvirt, name));
    let boot_ids = domains.each_ref().map(|domain| domain.ask("boot-id"));
    for (number, point) in DOMAIN_POINTS.iter().enumerate() {
        let is_of_daemon = point.starts_with("libvirt.daemon") || point.ends_with("daemon-started");
        // Such points are passed once, for the first domain.
        let killed_at = if is_of_daemon { &domains[0] } else { &domains[number % 2] };
        kill_and_recover(&domains, &format!("{point}:kill:{}", killed_at.name));
        for (domain, boot_id) in domains.iter().zip(&boot_ids) {
            let found = (qemus_of(&domain.name), domain.state());
            assert_eq!(found, (vec![domain.process()], "running".to_owned()), "{point}: {}", domain.name);
            assert_continues(domain, boot_id);
        }
    }
}

/// Replaces both domains with a fault that kills Rekindle, and recovers one of those that it has left, with which the
/// other is recovered, too.
fn kill_and_recover(domains: &[Domain<'_>; 2], fault: &str) {
    let names = domains.each_ref().map(|domain| domain.name.as_str());
    let replaced = rekindle(&["replace-qemu", names[0], names[1]]).env("REKINDLE_FAULT", fault).output();
    let replaced = replaced.unwrap();
    assert_eq!(replaced.status.signal(), Some(9), "{fault}: {}", text(&replaced));
    let is_interrupted = |name: &&str| fs::exists(format!("/run/rekindle/{name}/state.json")).unwrap();
    let interrupted: Vec<_> = names.into_iter().filter(is_interrupted).collect();
    if let Some(&name) = interrupted.last() {
        let recovered = rekindle(&["recover", name]).output().unwrap();
        assert!(recovered.status.success(), "{fault}: {}", text(&recovered));
        for name in &interrupted {
            assert!(text(&recovered).contains(&format!("{name}: ")), "{fault}: {}", text(&recovered));
        }
    }
    for name in names {
        assert!(!fs::exists(format!("/run/rekindle/{name}/state.json")).unwrap(), "{fault}: {name}");
    }
    for name in interrupted {
        let again = rekindle(&["recover", name]).output().unwrap();
        assert!(text(&again).contains("nothing to recover"), "{fault}: {}", text(&again));
    }
}

/// Takes `action` at each point. `expected` chooses its outcome from those of a point. A guest that has survived one
/// fault is used for the next.
fn walk(action: &str, expected: fn([Outcome; 4]) -> Outcome) {
    let listed: Vec<_> = TABLE.iter().map(|(point, _)| *point).collect();
    assert_eq!(listed, DOMAIN_POINTS, "TABLE must have the outcomes of each fault point");
    let cases = Mutex::new(TABLE.iter().enumerate());
    let failures = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..WALKERS {
            scope.spawn(|| {
                let libvirt = PrivateLibvirt::start();
                let mut running = None;
                while let Some((number, (point, outcomes))) = { cases.lock().unwrap().next() } {
                    let domain = running.take().unwrap_or_else(|| boot(&libvirt, &format!("faulty{number}")));
                    let found = inject(&libvirt, &domain, &format!("{point}:{action}"));
                    let expected = expected(*outcomes);
                    if found == Ok(expected) {
                        running = Some(domain).filter(|_| expected != ShutOff);
                    } else {
                        eprintln!("{point}: {found:?} instead of {expected:?}");
                        failures.lock().unwrap().push(point);
                        let _ = libvirt.try_virsh(&["destroy", &domain.name]);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{failures:?}");
}

/// Replaces the domain's QEMU with a fault, recovers it, and returns what has become of its guest.
fn inject(libvirt: &PrivateLibvirt, domain: &Domain<'_>, fault: &str) -> Result<Outcome, String> {
    let boot_id = domain.ask("boot-id");
    let source = domain.process();
    let replaced = rekindle(&["replace-qemu", &domain.name]).env("REKINDLE_FAULT", fault).output().unwrap();
    let mut log = text(&replaced);
    if fs::exists(format!("/run/rekindle/{}/state.json", domain.name)).unwrap() {
        let recovered = rekindle(&["recover", &domain.name]).output().unwrap();
        log += &text(&recovered);
        if !recovered.status.success() {
            return Err(log);
        }
    }
    if fault.starts_with("replace.prepare") && libvirt.daemon().is_none() {
        // Rekindle had not stopped the daemon yet. An administrator starts it.
        libvirt.start_daemon();
    }
    // After a failure the program does not wait until a daemon that it has started accepts connections.
    wait_for("libvirt's daemon", DEADLINE, || libvirt.try_virsh(&["uri"]).ok());
    let qemus = qemus_of(&domain.name);
    if qemus.is_empty() {
        wait_shut_off(libvirt, domain);
        return Ok(ShutOff);
    }
    match (domain.state().as_str(), qemus.as_slice()) {
        ("running", [qemu]) if *qemu == domain.process() => {
            assert_continues(domain, &boot_id);
            Ok(if *qemu == source { Source } else { Destination })
        }
        (state, qemus) => Err(format!("{state}, QEMUs {qemus:?}; {log}")),
    }
}
