//! Kills each process at each point of a replacement. Afterwards exactly one QEMU has the guest, or libvirt shows the
//! domain as shut off, and libvirt's daemon runs.

use crate::{assert_continues, boot, rekindle, text};
use rekindle_kernel::process::Process;
use rekindle_testing::libvirt::{Domain, PrivateLibvirt};
use rekindle_testing::{DEADLINE, wait_for};
use rekindle_vm::fault::DOMAIN_POINTS;
use std::fs;
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

/// Outcomes for each point if Rekindle, the source, or the destination is killed there. At the first point there is no
/// destination yet.
const TABLE: &[(&str, [Outcome; 3])] = &[
    ("libvirt.prepare.journalled", [Source, ShutOff, Destination]),
    ("libvirt.prepare.spawned", [Source, ShutOff, Source]),
    ("libvirt.prepare.compared", [Source, ShutOff, Source]),
    ("libvirt.prepare.copied", [Source, ShutOff, Source]),
    ("libvirt.daemon.stopping", [Source, ShutOff, Source]),
    ("libvirt.daemon.stopped", [Source, ShutOff, Source]),
    ("libvirt.suspend.journalled", [Source, ShutOff, Source]),
    ("libvirt.suspend.stopped", [Source, ShutOff, Source]),
    ("libvirt.suspend.copied", [Source, Destination, Source]),
    ("libvirt.suspend.written", [Source, Destination, Source]),
    ("libvirt.resume.journalled", [Destination, Destination, Source]),
    ("libvirt.resume.resumed", [Destination, Destination, ShutOff]),
    ("libvirt.give-back.frozen", [Destination, Destination, ShutOff]),
    ("libvirt.give-back.status-written", [Destination, Destination, ShutOff]),
    ("libvirt.give-back.pid-written", [Destination, Destination, ShutOff]),
    ("libvirt.give-back.daemon-started", [Destination, Destination, ShutOff]),
    ("libvirt.give-back.reconnected", [Destination, Destination, ShutOff]),
    ("libvirt.settle.journalled", [Destination, Destination, ShutOff]),
    ("libvirt.settle.source-gone", [Destination, Destination, ShutOff]),
];

const ACTIONS: [&str; 3] = ["kill", "kill-old", "kill-new"];

/// Threads that walk through the faults, each with a libvirt of its own. A walk waits more than it computes.
const WALKERS: usize = 4;

#[test]
fn after_each_fault_one_qemu_has_the_guest_and_libvirt_manages_it() {
    let listed: Vec<_> = TABLE.iter().map(|(point, _)| *point).collect();
    assert_eq!(listed, DOMAIN_POINTS, "TABLE must have the outcomes of each fault point");
    let cases_of = |(point, outcomes): &(&'static str, [Outcome; 3])| {
        let point = *point;
        ACTIONS.into_iter().zip(*outcomes).map(move |(action, outcome)| (format!("{point}:{action}"), outcome))
    };
    let cases: Mutex<Vec<_>> = Mutex::new(TABLE.iter().flat_map(cases_of).collect());
    let failures = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for walker in 0..WALKERS {
            let (cases, failures) = (&cases, &failures);
            scope.spawn(move || {
                let libvirt = PrivateLibvirt::start();
                while let Some((fault, expected)) = { cases.lock().unwrap().pop() } {
                    let remaining = cases.lock().unwrap().len();
                    let domain = boot(&libvirt, &format!("faulty{walker}-{remaining}"));
                    let found = inject(&libvirt, &domain, &fault);
                    let destroyed = libvirt.try_virsh(&["destroy", &domain.name]);
                    if found != Ok(expected) || (expected != ShutOff && destroyed.is_err()) {
                        eprintln!("{fault}: {found:?} instead of {expected:?}; destroy: {destroyed:?}");
                        failures.lock().unwrap().push(fault);
                    }
                }
            });
        }
    });
    assert!(cases.into_inner().unwrap().is_empty());
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{failures:?}");
}

/// Replaces the domain's QEMU with a fault, recovers it, and returns what has become of its guest.
fn inject(libvirt: &PrivateLibvirt, domain: &Domain<'_>, fault: &str) -> Result<Outcome, String> {
    let boot_id = domain.ask("boot-id");
    let source = domain.process();
    let replaced =
        rekindle(&["replace-qemu", "--preview", &domain.name]).env("REKINDLE_FAULT", fault).output().unwrap();
    let mut log = text(&replaced);
    if fs::exists(format!("/run/rekindle/{}/state.json", domain.name)).unwrap() {
        let recovered = rekindle(&["recover", &domain.name]).output().unwrap();
        log += &text(&recovered);
        if !recovered.status.success() {
            return Err(log);
        }
    }
    if libvirt.daemon().is_none() {
        return Err(format!("libvirt's daemon does not run; {log}"));
    }
    let qemus = qemus_of(&domain.name);
    if qemus.is_empty() {
        // A domain that was made by `virsh create` does not exist when it is shut off. libvirt needs a moment to see that
        // its QEMU has ended.
        let is_gone = || libvirt.try_virsh(&["domstate", &domain.name]).is_err().then_some(());
        wait_for("libvirt to drop the domain", DEADLINE, is_gone);
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

/// Returns the processes of the QEMUs of a domain.
fn qemus_of(name: &str) -> Vec<Process> {
    let numbers = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let is_of_domain = |pid: &u32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).any(|word| word.starts_with(format!("guest={name},").as_bytes()))
    };
    numbers.filter(is_of_domain).filter_map(|pid| Process::of(pid).ok()).collect()
}
