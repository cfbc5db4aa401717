//! `rekindle protect --output-commit`: no client sees output that a fail-over undoes. The guest counts, and a client
//! requests the count.

use crate::common::protector::{Protector, crash, restore, store};
use crate::common::{DEADLINE, Guest, Lab, wait_for};
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Requests the guest's count repeatedly. After `answers` answers, does `work` while the client continues. Returns the
/// last count that the client has seen.
fn last_count_during(guest: &Guest<'_>, answers: u64, work: impl FnOnce()) -> u64 {
    let (end, received, last) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !end.load(Ordering::SeqCst) {
                if let Ok(tick) = count(guest) {
                    last.store(tick, Ordering::SeqCst);
                    received.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        wait_for("answers to the client", DEADLINE, || (received.load(Ordering::SeqCst) >= answers).then_some(()));
        work();
        end.store(true, Ordering::SeqCst);
    });
    last.load(Ordering::SeqCst)
}

/// Returns the guest's count, as a client with a timeout gets it.
fn count(guest: &Guest<'_>) -> io::Result<u64> {
    let stream = guest.connect(7000)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    writeln!(&stream, "tick")?;
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply)?;
    let number = reply.strip_prefix("ok ").and_then(|rest| rest.trim().parse().ok());
    number.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Returns the first count on the console after a restore.
fn first_count(guest: &Guest<'_>) -> u64 {
    wait_for("the guest to count", DEADLINE, || {
        let text = fs::read(guest.file("console.log")).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        // The last line may be incomplete.
        let lines = text.rsplit_once('\n')?.0.lines().map(str::trim_end).map(str::to_owned).collect::<Vec<_>>();
        lines.iter().find_map(|line| {
            let words: Vec<_> = line.split(' ').collect();
            let ["tick", number, _] = words.as_slice() else { return None };
            number.parse().ok()
        })
    })
}

/// Simulates a crash of the guest's host while a client requests the count, and restores the guest. Returns the last
/// count that the client has seen, and the first count after the restore.
fn fail_over(guest: &Guest<'_>, store: &Path, protector: Protector, answers: u64, more: &[&str]) -> (u64, u64) {
    let last = last_count_during(guest, answers, || crash(guest));
    drop(protector);
    restore(guest, store, more);
    (last, first_count(guest))
}

#[test]
fn no_client_sees_a_count_that_a_fail_over_undoes() {
    let lab = Lab::new();
    let guest = lab.vm("commits").boot(&[]);
    let store = store(&lab, "commits");
    let commits = ["--every", "50ms", "--output-commit"];
    for answers in [2, 3, 5] {
        let mut protector = Protector::start(&guest, &lab, &store, &commits);
        let checkpoint = protector.next_checkpoint();
        assert!(checkpoint["released_us"].as_u64().unwrap() > 0, "{checkpoint}");
        let (seen, first) = fail_over(&guest, &store, protector, answers, &["--output-commit"]);
        assert!(first > seen, "the client has seen {seen}, and the restored guest starts with {first}");
    }
    // The output of a restored guest is held until the guest is protected.
    assert!(guest.try_ask("tick").is_err(), "a restored guest's output was released before it was protected");
    let mut protector = Protector::start(&guest, &lab, &store, &commits);
    protector.next_checkpoint();
    guest.wait_ready();
    // A protector that ends after `--count` checkpoints leaves no output held.
    protector.end();
    lab.rekindle(["protect", "commits", "--store", store.to_str().unwrap(), "--count", "1", "--output-commit"]).ok();
    guest.wait_ready();
    guest.assert_sound();
}

#[test]
fn without_output_commit_a_client_sees_counts_that_a_fail_over_undoes() {
    let lab = Lab::new();
    let guest = lab.vm("forgets").boot(&[]);
    let store = store(&lab, "forgets");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "1h"]);
    let checkpoint = protector.next_checkpoint();
    assert!(checkpoint["released_us"].is_null(), "{checkpoint}");
    let at_checkpoint = guest.tick();
    wait_for("the guest to count", DEADLINE, || (guest.tick() > at_checkpoint + 5).then_some(()));
    let (seen, first) = fail_over(&guest, &store, protector, 1, &[]);
    assert!(first <= seen, "the client has seen {seen}, and the restored guest starts with {first}");
}

#[test]
fn held_output_is_released_only_by_a_protector_or_by_release() {
    let lab = Lab::new();
    let guest = lab.vm("holds").boot(&[]);
    let store = store(&lab, "holds");
    let assert_silent = || assert!(guest.try_ask("tick").is_err(), "output was released");
    let commits = ["--every", "50ms", "--output-commit"];
    let start = |fault: &str| {
        let environment = [("REKINDLE_FAULT", fault)];
        Protector::start_with(&guest, &lab, &store, &commits, &environment)
    };
    // The protector is killed after a commit, with frames that are still held: the next checkpoint releases them.
    start("output.committed:kill").wait_killed();
    assert_silent();
    guest.rekindle(&["replace-qemu"]).status(1).prints(&["--output-commit", "rekindle release holds"]);
    let mut protector = start("");
    protector.next_checkpoint();
    guest.wait_ready();
    guest.rekindle(&["release"]).status(1).prints(&["takes checkpoints of VM holds"]);
    // The protector is ended by a signal: output stays held, and the summary states that.
    let pid = rustix::process::Pid::from_raw(i32::try_from(protector.child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let mut output = String::new();
    std::io::Read::read_to_string(&mut protector.lines, &mut output).unwrap();
    assert!(protector.child.wait().unwrap().success());
    let summary: serde_json::Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    assert_eq!(summary["output_held"], true, "{summary}");
    assert_silent();
    assert_eq!(guest.rekindle(&["--json", "release"]).ok().json()["released"], true);
    guest.wait_ready();
    assert_eq!(guest.rekindle(&["--json", "release"]).ok().json()["released"], false);
    // A protector without `--output-commit` continues to hold output that was held before: the hold was the operator's
    // decision.
    start("output.committed:kill").wait_killed();
    assert_silent();
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "50ms"]);
    assert!(protector.next_checkpoint()["released_us"].is_u64());
    guest.wait_ready();
    protector.end();
    guest.rekindle(&["release"]).ok();
    guest.wait_ready();
    guest.reboot("warm", &[]).ok();
    guest.assert_sound();
}
