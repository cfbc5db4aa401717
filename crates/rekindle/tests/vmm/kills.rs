//! Rekindle is killed at random moments of a reboot. The guest keeps its memory.
//!
//! `faults` kills at the named fault points; this test also kills between them. The test prints its seed.
//! `REKINDLE_TEST_SEED` repeats a run, and `REKINDLE_TEST_ROUNDS` sets the number of kills.

use crate::common::{Guest, Lab, Watch, assert_ticks_once};
use std::env;
use std::thread;
use std::time::Duration;

const ROUNDS: u64 = 20;

fn from_environment(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|e| panic!("{name}={text}: {e}")))
}

/// Starts `rekindle` and kills it after `delay`. Returns `false` if it had ended before.
fn kill_after(lab: &Lab, delay: Duration, arguments: &[&str]) -> bool {
    let mut child = lab.command(arguments).spawn().unwrap();
    thread::sleep(delay);
    let _ = child.kill();
    child.wait().unwrap().code().is_none()
}

/// Returns the milliseconds that a reboot without a kill spends in preparation, and in all its phases.
fn durations(guest: &Guest<'_>, arguments: &[&str]) -> (f64, f64) {
    let report = guest.warm(arguments);
    let steps = report["steps"].as_array().unwrap();
    let sum = |phase: Option<&str>| {
        let of_phase = steps.iter().filter(|step| phase.is_none_or(|phase| step["phase"] == phase));
        of_phase.map(|step| step["us"].as_u64().unwrap() as f64 / 1000.).sum()
    };
    (sum(Some("prepare")), sum(None))
}

#[test]
fn a_guest_keeps_its_memory_when_rekindle_is_killed_at_random_moments() {
    let seed = from_environment("REKINDLE_TEST_SEED").unwrap_or_else(|| fastrand::u64(..));
    let rounds = from_environment("REKINDLE_TEST_ROUNDS").unwrap_or(ROUNDS);
    eprintln!("REKINDLE_TEST_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let lab = Lab::new();
    let guest = lab.vm("random").boot(&[]);
    guest.touch("16M");
    let boot = guest.boot_id();
    let durations = [&[][..], &["--verify-memory"]].map(|arguments| (arguments, durations(&guest, arguments)));
    let mut kills = 0;
    for round in 0..rounds {
        let (arguments, (preparation, whole)) = &durations[random.usize(..durations.len())];
        // Most of a reboot is preparation, which changes little: every other kill is aimed at the rest of the reboot.
        let from = if round % 2 == 0 { 0. } else { 0.9 * preparation };
        let delay = Duration::from_secs_f64((from + random.f64() * (1.1 * whole - from)) / 1000.);
        eprintln!("round {round}: {arguments:?}, after {delay:?}");
        let watch = Watch::start(&lab.run_root());
        let words = [&["replace-qemu", "random"], *arguments].concat();
        kills += u64::from(kill_after(&lab, delay, &words));
        // `ls` and `show` work at any time, and the status shows whether `recover` is required.
        let status = guest.status();
        assert!(["running", "needs-recovery"].contains(&status.as_str()), "{status}\n{}", lab.state_report());
        guest.rekindle(&["show"]).ok();
        guest.rekindle(&["show", "--timeline"]).ok();
        // Half of the recoveries are killed as well.
        if random.bool() {
            kill_after(&lab, Duration::from_micros(random.u64(..100_000)), &["recover", "random"]);
        }
        let recovered = guest.rekindle(&["recover"]).ok();
        assert!(!recovered.stdout.contains("memory was lost"), "{recovered}");
        watch.end();
        assert_eq!(guest.boot_id(), boot, "another boot of the guest: {recovered}");
        guest.verify();
        guest.assert_sound();
    }
    assert!(kills > 0, "each reboot ended before its kill");
    assert_ticks_once(&guest.file("console.log"));
    for _ in 0..5 {
        kill_after(&lab, Duration::from_micros(random.u64(..60_000)), &["stop", "--now", "random"]);
        // After a stop that was killed, `ls` works, and `show` finds the VM or fails cleanly.
        let listed = lab.rekindle(["ls"]).ok();
        let shown = guest.rekindle(&["show"]);
        assert!([Some(0), Some(1)].contains(&shown.code), "{shown}\n{listed}");
    }
    if guest.status() != "absent" {
        guest.rekindle(&["stop", "--now"]).ok();
    }
    // An empty RAM directory may be left; the stop of the next VM removes it.
    let next = lab.vm("next").boot(&[]);
    next.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}
