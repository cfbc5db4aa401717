//! `rekindle protect --output-commit`: nobody sees what a fail-over takes back. A guest counts, and a client asks it for its count.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::protector::{Protector, crash, restore, store};
use common::{DEADLINE, Guest, Lab, wait_for};
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Ask for the guest's count again and again, until it has been told `answers` times and more, then do `work` with the client still asking.
/// Gives the last count that the client was told.
fn asked(guest: &Guest<'_>, answers: u64, work: impl FnOnce()) -> u64 {
    let (end, told, last) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !end.load(Ordering::SeqCst) {
                if let Ok(tick) = count(guest) {
                    last.store(tick, Ordering::SeqCst);
                    told.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        wait_for("the client to be told", DEADLINE, || (told.load(Ordering::SeqCst) >= answers).then_some(()));
        work();
        end.store(true, Ordering::SeqCst);
    });
    last.load(Ordering::SeqCst)
}

/// The guest's count, from a client that does not wait for ever.
fn count(guest: &Guest<'_>) -> io::Result<u64> {
    let stream = guest.connect(7000)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    writeln!(&stream, "tick")?;
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply)?;
    let number = reply.strip_prefix("ok ").and_then(|rest| rest.trim().parse().ok());
    number.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// The first count of a guest that was restored just now.
fn first_count(guest: &Guest<'_>) -> u64 {
    wait_for("the guest to count", DEADLINE, || {
        let text = fs::read(guest.file("console.log")).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        // The last line may not be whole.
        let lines = text.rsplit_once('\n')?.0.lines().map(str::trim_end).map(str::to_owned).collect::<Vec<_>>();
        lines.iter().find_map(|line| {
            let words: Vec<_> = line.split(' ').collect();
            let ["tick", number, _] = words.as_slice() else { return None };
            number.parse().ok()
        })
    })
}

/// Its host dies while a client asks it; it is restored. Gives the last count that the client was told, and the first one after.
fn fails_over(guest: &Guest<'_>, store: &Path, protector: Protector, answers: u64, more: &[&str]) -> (u64, u64) {
    let last = asked(guest, answers, || crash(guest));
    drop(protector);
    restore(guest, store, more);
    (last, first_count(guest))
}

#[test]
fn no_client_sees_a_count_that_a_fail_over_takes_back() {
    let lab = Lab::new();
    let guest = lab.vm("commits").boot(&[]);
    let store = store(&lab, "commits");
    let commits = ["--every", "50ms", "--output-commit"];
    for answers in [2, 3, 5] {
        let mut protector = Protector::start(&guest, &lab, &store, &commits);
        let done = protector.next_checkpoint();
        assert!(done["released_us"].as_u64().unwrap() > 0, "{done}");
        let (told, first) = fails_over(&guest, &store, protector, answers, &["--output-commit"]);
        assert!(first > told, "the client was told {told}, and the guest goes on with {first}");
    }
    // Nobody lets out what it sends, until it is protected.
    assert!(guest.try_ask("tick").is_err(), "a restored guest was heard before it was protected");
    let mut protector = Protector::start(&guest, &lab, &store, &commits);
    protector.next_checkpoint();
    guest.wait_ready();
    // As many as were asked for: nothing is left.
    protector.end();
    lab.rekindle(["protect", "commits", "--store", store.to_str().unwrap(), "--count", "1", "--output-commit"]).ok();
    guest.wait_ready();
    guest.assert_sound();
}

#[test]
fn without_it_a_client_has_seen_what_is_taken_back() {
    let lab = Lab::new();
    let guest = lab.vm("forgets").boot(&[]);
    let store = store(&lab, "forgets");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "1h"]);
    let done = protector.next_checkpoint();
    assert!(done["released_us"].is_null(), "{done}");
    let at_checkpoint = guest.tick();
    wait_for("it to count on", DEADLINE, || (guest.tick() > at_checkpoint + 5).then_some(()));
    let (told, first) = fails_over(&guest, &store, protector, 1, &[]);
    assert!(first <= told, "the client was told {told}, and the guest goes on with {first}");
}

#[test]
fn what_is_held_stays_so_until_somebody_lets_it_out() {
    let lab = Lab::new();
    let guest = lab.vm("holds").boot(&[]);
    let store = store(&lab, "holds");
    let silent = || assert!(guest.try_ask("tick").is_err(), "the guest was heard");
    let commits = ["--every", "50ms", "--output-commit"];
    let start = |fault: &str| {
        let environment = [("REKINDLE_FAULT", fault)];
        Protector::start_with(&guest, &lab, &store, &commits, &environment)
    };
    // Killed, with a checkpoint that counts and whose frames are still held; and the next one lets them out.
    start("output.committed:kill").wait_killed();
    silent();
    guest.rekindle(&["reboot", "vmm"]).status(1).prints(&["--output-commit", "rekindle release holds"]);
    let mut protector = start("");
    protector.next_checkpoint();
    guest.wait_ready();
    guest.rekindle(&["release"]).status(1).prints(&["takes checkpoints of VM holds"]);
    // Told to end: the same, and that is said.
    let pid = rustix::process::Pid::from_raw(i32::try_from(protector.child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let mut said = String::new();
    std::io::Read::read_to_string(&mut protector.lines, &mut said).unwrap();
    assert!(protector.child.wait().unwrap().success());
    let summary: serde_json::Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert_eq!(summary["output_held"], true, "{summary}");
    silent();
    assert_eq!(guest.rekindle(&["--json", "release"]).ok().json()["released"], true);
    guest.wait_ready();
    assert_eq!(guest.rekindle(&["--json", "release"]).ok().json()["released"], false);
    // A protector that is not asked to goes on holding what is held: who has begun it had a reason.
    start("output.committed:kill").wait_killed();
    silent();
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "50ms"]);
    assert!(protector.next_checkpoint()["released_us"].is_u64());
    guest.wait_ready();
    protector.end();
    guest.rekindle(&["release"]).ok();
    guest.wait_ready();
    guest.reboot("warm", &[]).ok();
    guest.assert_sound();
}
