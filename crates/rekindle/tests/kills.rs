//! Rekindle is killed at random moments: the guest keeps its memory, whatever it is in the middle of.
//!
//! The fault walk (`faults.rs`) kills at the points that somebody has thought of; this one also between them. The seed is
//! printed; `REKINDLE_TEST_SEED` and `REKINDLE_TEST_ROUNDS` give another one, or more of it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{Guest, Lab, Watch, assert_ticks_once};
use std::env;
use std::thread;
use std::time::Duration;

/// How often it is killed.
const ROUNDS: u64 = 20;

fn given(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|e| panic!("{name}={text}: {e}")))
}

/// Start `rekindle`, and kill it after `delay` unless it has ended. Whether it was killed.
fn killed(lab: &Lab, arguments: &[&str], delay: Duration) -> bool {
    let mut child = lab.command(arguments).spawn().unwrap();
    thread::sleep(delay);
    let _ = child.kill();
    child.wait().unwrap().code().is_none()
}

/// How long an undisturbed reboot prepares and how long it takes in all, in ms of the timeline.
fn length(guest: &Guest<'_>, arguments: &[&str]) -> (f64, f64) {
    let report = guest.warm(arguments);
    let steps = report["steps"].as_array().unwrap();
    let sum = |phase: Option<&str>| {
        let wanted = steps.iter().filter(|step| phase.is_none_or(|phase| step["phase"] == phase));
        wanted.map(|step| step["us"].as_u64().unwrap() as f64 / 1000.).sum()
    };
    (sum(Some("prepare")), sum(None))
}

#[test]
fn rekindle_killed_at_random_moments_costs_no_guest_its_memory() {
    let seed = given("REKINDLE_TEST_SEED").unwrap_or_else(|| fastrand::u64(..));
    let rounds = given("REKINDLE_TEST_ROUNDS").unwrap_or(ROUNDS);
    eprintln!("REKINDLE_TEST_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let lab = Lab::new();
    let guest = lab.vm("random").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    let lengths = [&[][..], &["--verify-memory"]].map(|arguments| (arguments, length(&guest, arguments)));
    let mut kills = 0;
    for round in 0..rounds {
        let (arguments, (prepares, takes)) = &lengths[random.usize(..lengths.len())];
        // Most of a reboot is preparation, in which little can go wrong: every other kill falls into the rest of it.
        let from = if round % 2 == 0 { 0. } else { 0.9 * prepares };
        let delay = Duration::from_secs_f64((from + random.f64() * (1.1 * takes - from)) / 1000.);
        eprintln!("round {round}: {arguments:?}, after {delay:?}");
        let watch = Watch::start(&lab.run_root());
        let all = [&["reboot", "vmm", "random"], *arguments].concat();
        kills += u64::from(killed(&lab, &all, delay));
        // Looking at it works at any time, and tells what is to be done.
        let status = guest.status();
        assert!(["running", "needs-recovery"].contains(&status.as_str()), "{status}\n{}", lab.state_report());
        guest.rekindle(&["show"]).ok();
        guest.rekindle(&["show", "--timeline"]).ok();
        // Now and then the recovery is killed as well.
        if random.bool() {
            killed(&lab, &["recover", "random"], Duration::from_micros(random.u64(..100_000)));
        }
        let recovered = guest.rekindle(&["recover"]).ok();
        assert!(!recovered.stdout.contains("memory was lost"), "{recovered}");
        watch.end();
        assert_eq!(guest.boot_id(), boot, "another boot of the guest: {recovered}");
        guest.verify();
        guest.assert_sound();
    }
    assert!(kills > 0, "it was never faster killed than done");
    assert_ticks_once(&guest.file("console.log"));
    for _ in 0..5 {
        killed(&lab, &["stop", "--now", "random"], Duration::from_micros(random.u64(..60_000)));
        // Half-way gone or not: it is listed as something that can be stopped, or not at all.
        let listed = lab.rekindle(["ls"]).ok();
        let shown = guest.rekindle(&["show"]);
        assert!([Some(0), Some(1)].contains(&shown.code), "{shown}\n{listed}");
    }
    if guest.status() != "absent" {
        guest.rekindle(&["stop", "--now"]).ok();
    }
    // An empty RAM directory may be left; it goes with the next VM that ends.
    let next = lab.vm("next").boot(&[]);
    next.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}
