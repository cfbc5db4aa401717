//! Helpers that are killed, as the kernel does when memory runs out, or stopped (`SIGSTOP`), at the points of an operation.
//!
//! `faults` has the deaths of Rekindle and of the QEMUs. Here [`REPLACEMENTS`] and [`RESTORES`] have, for each helper and
//! each point at which it matters, what the operation must do. An operation that meets a stopped helper either succeeds, or
//! ends by itself with an error that names the process and how to resume it. No guest, no page and no commit is lost: the
//! guest has its memory and its disk, in one QEMU, and the next operation succeeds.

use crate::common::interrupted::Interrupted;
use crate::common::protector::{Protector, crash, pager, restore, store, wait_filled};
use crate::common::served::{assert_kept, image, section, server, watcher};
use crate::common::{CommandResult, DEADLINE, Guest, Lab, wait_for};
use rekindle_disk::control::Control;
use rekindle_kernel::process::Process;
use rekindle_kernel::unix_socket;
use std::fs;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Server,
    ServerBroker,
    Watch,
    Pager,
    PagerBroker,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Stop,
}

/// What the operation must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// It succeeds, although a stopped helper is resumed only afterwards.
    Success,
    /// Exit status 1. A replacement: the guest is in the QEMU that ran it before. A restore: nothing is left of it.
    AsItWas,
    /// [`Outcome::Success`], if no QEMU waits for the helper before it reports that the guest has stopped or resumed. Otherwise
    /// exit status 3: when the helper has been resumed, `recover` resumes the guest in the QEMU that ran it before.
    SuccessOrUndone,
    /// [`Outcome::Success`] or [`Outcome::AsItWas`], as fast as the helper is restarted.
    Either,
}

use Fault::{Kill, Stop};
use Outcome::{AsItWas, Either, Success, SuccessOrUndone};
use Victim::{Pager, PagerBroker, Server, ServerBroker, Watch};

/// The point before a command starts.
const BEFORE: &str = "";

/// Faults of `replace-qemu --how warm`. At the other points of [`rekindle_vm::fault::POINTS`] no helper has another part in the
/// operation than at one of these.
const REPLACEMENTS: &[(&str, Victim, Fault, Outcome)] = &[
    (BEFORE, Server, Stop, AsItWas),
    (BEFORE, ServerBroker, Stop, AsItWas),
    (BEFORE, Watch, Stop, Success),
    ("warm.prepare.journalled", Server, Kill, Success),
    ("warm.prepare.journalled", Server, Stop, AsItWas),
    // The new QEMU connects to the server next.
    ("warm.prepare.spawned", Server, Kill, Either),
    ("warm.prepare.spawned", Server, Stop, AsItWas),
    ("warm.prepare.spawned", ServerBroker, Kill, Either),
    // The new QEMU may have connected before.
    ("warm.prepare.spawned", ServerBroker, Stop, Either),
    ("warm.prepare.ready", Server, Kill, Either),
    ("warm.prepare.ready", Server, Stop, AsItWas),
    ("warm.prepare.ready", ServerBroker, Stop, Success),
    ("warm.prepare.ready", Watch, Kill, Success),
    ("warm.prepare.ready", Watch, Stop, Success),
    // The guest is stopped next. The old QEMU waits for the server, in which its requests must be done.
    ("warm.suspend.journalled", Server, Kill, Either),
    ("warm.suspend.journalled", Server, Stop, SuccessOrUndone),
    // The old QEMU has disconnected, and the new one connects when the guest resumes.
    ("warm.suspend.stopped", Server, Kill, Either),
    ("warm.suspend.stopped", Server, Stop, SuccessOrUndone),
    ("warm.resume.resumed", Server, Kill, Success),
    ("warm.resume.resumed", Server, Stop, Success),
];

/// Faults of `restore`, on demand.
const RESTORES: &[(&str, Victim, Fault, Outcome)] = &[
    ("restore.prepare.spawned", Server, Kill, AsItWas),
    ("restore.prepare.spawned", Server, Stop, AsItWas),
    ("restore.settle.handed-over", Server, Kill, Success),
    ("restore.settle.handed-over", Server, Stop, Success),
    ("restore.settle.handed-over", Pager, Kill, Success),
    ("restore.settle.handed-over", Pager, Stop, Success),
    ("restore.settle.handed-over", PagerBroker, Kill, Success),
    ("restore.settle.handed-over", PagerBroker, Stop, Success),
];

/// Returns the process of a helper, if it runs.
fn find(victim: Victim, guest: &Guest<'_>) -> Option<Process> {
    let broker_of = |helper: Option<Process>| helper?.others_in_session().unwrap().into_iter().next();
    match victim {
        Server => server(guest),
        ServerBroker => broker_of(server(guest)),
        Watch => watcher(guest),
        Pager => pager(guest),
        PagerBroker => broker_of(pager(guest)),
    }
}

/// Kills or stops the process.
fn inject(fault: Fault, process: Process) {
    match fault {
        Kill => {
            process.kill().unwrap();
            assert!(process.wait_end(Duration::from_secs(10)).unwrap());
        }
        Stop => assert!(process.stop_fully(Duration::from_secs(10)).unwrap()),
    }
}

/// Runs a command with a fault at a point. Returns the command's result, and the process with the fault.
fn run_with_fault(
    guest: &Guest<'_>,
    arguments: &[&str],
    (point, victim, fault): (&str, Victim, Fault),
) -> (CommandResult, Process) {
    let find = || wait_for(&format!("{victim:?}"), DEADLINE, || find(victim, guest));
    if point == BEFORE {
        let process = find();
        inject(fault, process);
        return (guest.lab.rekindle(arguments), process);
    }
    let command = Interrupted::start(guest.lab, arguments, point);
    let process = find();
    inject(fault, process);
    (command.finish(guest.lab), process)
}

/// Asserts that a command that has failed names the stopped process and how to resume it.
#[track_caller]
fn assert_names(result: &CommandResult, fault: Fault, process: Process) {
    if fault == Stop && result.code != Some(0) {
        let text = format!("{}{}", result.stdout, result.stderr);
        assert!(text.contains(&format!("kill -CONT {}", process.pid)), "{process:?} is not named by {result}");
    }
}

/// Runs all rows of a table, also after one that fails.
fn walk<T: Copy + std::fmt::Debug + Send + Sync>(rows: &[T], test: impl Fn(T) + Sync) {
    let mut failed = Vec::new();
    for row in rows {
        eprintln!("==== {row:?}");
        if thread::scope(|scope| scope.spawn(|| test(*row)).join()).is_err() {
            failed.push(row);
        }
    }
    assert!(!rows.is_empty() && failed.is_empty(), "these rows failed, see above: {failed:?}");
}

/// A guest with a disk that is served.
struct Served<'a> {
    guest: Guest<'a>,
    image: PathBuf,
    boot: String,
}

impl<'a> Served<'a> {
    fn boot(lab: &'a Lab, name: &str, memory: &str, touched: &str) -> Self {
        let image = image(lab, "disk.raw");
        let guest = lab.vm(name).memory(memory).section(&section(&image, "")).boot(&[]);
        guest.touch(touched);
        let boot = guest.boot_id();
        Self { guest, image, boot }
    }

    /// Asserts that the guest runs, with its memory, its disk and its helpers.
    #[track_caller]
    fn assert_kept(&self) {
        assert_kept(&self.guest, &self.image, &self.boot);
        wait_for("the helpers", DEADLINE, || (self.guest.status() == "running").then_some(()));
    }
}

#[test]
fn a_replacement_loses_nothing_when_a_helper_is_killed_or_stopped_at_any_point() {
    let lab = Lab::new();
    let vm = Served::boot(&lab, "stalls", "128M", "16M");
    let guest = &vm.guest;
    walk(REPLACEMENTS, |(point, victim, fault, outcome)| {
        let source = guest.only_qemu().process;
        let (result, process) = run_with_fault(guest, &["replace-qemu", "stalls"], (point, victim, fault));
        let running = guest.qemus().iter().filter(|qemu| qemu.run_state().as_deref() == Some("running")).count();
        if fault == Stop {
            process.resume().unwrap();
        }
        assert!(running <= 1, "two QEMUs ran the guest: {result}");
        assert_names(&result, fault, process);
        match (outcome, result.code) {
            (Success | Either | SuccessOrUndone, Some(0)) => {
                assert_ne!(guest.single_qemu().process, source, "{result}")
            }
            (AsItWas | Either, Some(1)) => assert_eq!(guest.single_qemu().process, source, "{result}"),
            (SuccessOrUndone, Some(3)) => {
                guest.rekindle(&["recover"]).ok().prints(&["undone"]);
                assert_eq!(guest.single_qemu().process, source, "{result}");
            }
            _ => {
                let _ = guest.rekindle(&["recover"]);
                panic!("{outcome:?} was expected of {result}");
            }
        }
        guest.rekindle(&["recover"]).ok();
        vm.assert_kept();
        guest.assert_sound();
    });
    // The next replacement succeeds.
    guest.warm(&[]);
    vm.assert_kept();
}

#[test]
fn a_restore_loses_nothing_when_a_helper_is_killed_or_stopped_at_any_point() {
    let lab = Lab::new();
    let vm = Served::boot(&lab, "again", "256M", "160M");
    let guest = &vm.guest;
    let store = store(&lab, "again");
    let mut protector = Protector::start(guest, &lab, &store, &["--every", "50ms", "--count", "1"]);
    assert!(protector.child.wait().unwrap().success());
    let arguments = ["restore", "again", "--store", store.to_str().unwrap()];
    crash(guest);
    walk(RESTORES, |(point, victim, fault, outcome)| {
        let (result, process) = run_with_fault(guest, &arguments, (point, victim, fault));
        if [Pager, PagerBroker].contains(&victim) && fault == Stop {
            assert!(guest.file("fill.json").exists(), "the memory was loaded before the pager was stopped");
            let status = guest.status();
            let is_named = status.contains(&format!("kill -CONT {}", process.pid));
            assert!(is_named || victim == PagerBroker, "{status}");
        }
        if fault == Stop {
            process.resume().unwrap();
        }
        assert_names(&result, fault, process);
        match (outcome, result.code) {
            (Success, Some(0)) => {}
            (AsItWas, Some(1)) => {
                // The checkpoint is still there.
                if guest.status() != "absent" {
                    guest.rekindle(&["recover"]).ok();
                }
                lab.assert_empty();
                restore(guest, &store, &[]);
            }
            _ => panic!("{outcome:?} was expected of {result}"),
        }
        guest.wait_ready();
        wait_filled(guest);
        vm.assert_kept();
        guest.assert_sound();
        crash(guest);
    });
}

/// Asserts that a guest that was protected runs, that the last commit can be restored, and that the next protector continues.
fn assert_commit_kept(vm: &Served<'_>, store: &Path, committed: u64) {
    let Served { guest, .. } = vm;
    let mut next = Protector::start(guest, guest.lab, store, &["--every", "50ms", "--count", "1"]);
    let checkpoint = next.wait("checkpoint")["number"].as_u64().unwrap();
    assert!(checkpoint > committed, "{checkpoint} is not newer than {committed}");
    assert!(next.child.wait().unwrap().success());
    vm.assert_kept();
}

#[test]
fn a_protector_loses_no_commit_when_a_helper_is_killed_or_stopped() {
    let lab = Lab::new();
    let vm = Served::boot(&lab, "kept", "128M", "16M");
    let guest = &vm.guest;
    let store = store(&lab, "kept");
    let rows = [(Server, Kill), (Server, Stop), (ServerBroker, Kill), (ServerBroker, Stop), (Watch, Stop)];
    walk(&rows, |(victim, fault)| {
        let mut protector = Protector::start(guest, &lab, &store, &["--every", "50ms"]);
        let committed = protector.next_checkpoint()["number"].as_u64().unwrap();
        let process = find(victim, guest).unwrap_or_else(|| panic!("{victim:?}"));
        inject(fault, process);
        if (victim, fault) == (Server, Stop) {
            // It ends, or reports that it cannot take a checkpoint, without help.
            while !protector_waits(&mut protector) {}
        } else {
            protector.next_checkpoint();
        }
        process.resume().unwrap();
        protector.kill();
        guest.rekindle(&["recover"]).ok();
        vm.assert_kept();
        assert_commit_kept(&vm, &store, committed);
    });
    crash(guest);
    restore(guest, &store, &[]);
    wait_filled(guest);
    vm.assert_kept();
}

/// Reads the next event of a protector. Returns whether it reports that it cannot take a checkpoint.
fn protector_waits(protector: &mut Protector) -> bool {
    let mut line = String::new();
    let bytes = protector.lines.read_line(&mut line).unwrap();
    bytes == 0 || line.contains("\"waiting\"") || line.contains("\"moved\"")
}

#[test]
fn a_protector_that_is_stopped_in_a_pause_is_named_and_its_guest_runs_again_after_it() {
    let lab = Lab::new();
    let vm = Served::boot(&lab, "paused", "128M", "16M");
    let guest = &vm.guest;
    let store = store(&lab, "paused");
    let mut protector = Protector::start(guest, &lab, &store, &["--every", "10ms"]);
    let committed = protector.next_checkpoint()["number"].as_u64().unwrap();
    // A full pipe would block the protector.
    let mut lines = std::mem::replace(&mut protector.lines, std::io::BufReader::new(never_read()));
    let reader = thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
    let process = Process::of(protector.child.id()).unwrap();
    wait_for("the protector to be stopped in a pause", DEADLINE, || {
        assert!(process.stop_fully(Duration::from_secs(10)).unwrap());
        let is_paused = guest.file("paused").exists();
        if !is_paused {
            process.resume().unwrap();
        }
        is_paused.then_some(())
    });
    let source = guest.single_qemu().process;
    let result = guest.rekindle(&["replace-qemu"]).status(1);
    assert_names(&result, Stop, process);
    assert_eq!(guest.single_qemu().process, source);
    // It continues: no commit is lost, and the replacement succeeds.
    process.resume().unwrap();
    guest.warm(&[]);
    vm.assert_kept();
    protector.child.kill().unwrap();
    protector.child.wait().unwrap();
    drop(reader.join().unwrap());
    guest.rekindle(&["recover"]).ok();
    assert_commit_kept(&vm, &store, committed);
}

/// Returns the output of a child that prints nothing.
fn never_read() -> std::process::ChildStdout {
    let mut child = std::process::Command::new("true").stdout(std::process::Stdio::piped()).spawn().unwrap();
    let output = child.stdout.take().unwrap();
    child.wait().unwrap();
    output
}

/// The kernel keeps connections that a stopped server has not accepted, also those that were closed. When their queue is
/// full, a connect blocks.
#[test]
fn no_command_hangs_when_the_queue_of_a_stopped_server_is_full() {
    let lab = Lab::new();
    let vm = Served::boot(&lab, "queue", "128M", "16M");
    let guest = &vm.guest;
    let stopped = server(guest).expect("a server");
    inject(Stop, stopped);
    let control = guest.file("disk-disk0.control");
    let longest: u32 = fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap().trim().parse().unwrap();
    let is_full = (0..longest + 2).any(|_| unix_socket::connect(&control, Duration::from_millis(20)).is_err());
    assert!(is_full, "the queue is not full");
    assert!(Control::connect(&control).is_err());
    let named = format!("kill -CONT {}", stopped.pid);
    let status = guest.status();
    assert!(status.contains("degraded") && status.contains(&named), "{status}");
    guest.rekindle(&["show"]).ok().prints(&[&named]);
    guest.rekindle(&["replace-qemu"]).status(1).prints(&["nothing was stopped", &named]);
    assert_eq!(server(guest), Some(stopped), "another server was started");
    stopped.resume().unwrap();
    vm.assert_kept();
    guest.warm(&[]);
    guest.assert_sound();
    // `stop` ends a server that does not continue.
    inject(Stop, server(guest).expect("a server"));
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}
