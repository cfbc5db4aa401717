//! Memory that a guest's kernel has leaked is free again after a reboot of each kind, and the leak's counters are
//! right.

use crate::common::served::{image, section};
use crate::common::{DEADLINE, Guest, Lab, wait_for};
use serde_json::Value;
use std::collections::BTreeMap;

const PORT: u16 = 7003;
const MIB: i64 = 1 << 20;
/// Memory that the guest's kernel leaks, in bytes.
const LEAK: i64 = 32 * MIB;
/// How much the kernel's other memory may differ between two boots, in bytes.
const TOLERANCE: i64 = MIB;

fn command(guest: &Guest<'_>, line: &str) -> String {
    wait_for(&format!("an answer to {line}"), DEADLINE, || guest.try_ask_at(PORT, line).ok())
}

fn get(guest: &Guest<'_>) -> BTreeMap<String, i64> {
    let reply = command(guest, "get");
    let values = reply.strip_prefix("ok ").unwrap_or_else(|| panic!("get: {reply}"));
    let pairs = values.split(' ').filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
}

/// Returns how many bytes of slab memory the kernel cannot reclaim.
fn slab(guest: &Guest<'_>) -> i64 {
    get(guest)["SUnreclaim"] * 1024
}

/// Leaks memory and reboots the guest. Asserts that all of it is free again, and returns the report.
#[track_caller]
fn reboot(guest: &Guest<'_>, arguments: &[&str]) -> Value {
    let (before, available) = (slab(guest), get(guest)["MemAvailable"] * 1024);
    assert_eq!(command(guest, &format!("set leak_now {}", LEAK / MIB)), "ok");
    let leaked = get(guest);
    assert_eq!(leaked["leaked_bytes"], LEAK);
    let grown = leaked["SUnreclaim"] * 1024 - before;
    assert!(
        (LEAK - TOLERANCE..LEAK + TOLERANCE).contains(&grown),
        "SUnreclaim grew by {grown} bytes after a leak of {LEAK}"
    );
    assert!(available - leaked["MemAvailable"] * 1024 > LEAK - 4 * TOLERANCE);
    let words = ["--json", "reboot", &guest.name].into_iter().chain(arguments.iter().copied());
    let report = guest.lab.rekindle(words).ok().json();
    guest.wait_ready();
    assert_eq!(get(guest)["leaked_bytes"], 0, "{arguments:?}");
    let after = slab(guest);
    assert!(after < before + TOLERANCE, "{arguments:?}: {before} bytes before the leak, {after} after the reboot");
    report
}

#[test]
fn a_leak_is_gone_after_every_kind_of_reboot() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let phases = "[phase]\nsave = [\"kernel\", \"services\"]\n";
    let guest = lab.vm("leaky").leaky().memory("192M").section(phases).section(&section(&path, "")).boot(&[]);
    guest.ask("phase services");
    wait_for("both phases to be saved", DEADLINE, || {
        let shown = guest.rekindle(&["--json", "show"]).ok().json();
        shown["phases"].as_array().unwrap().iter().all(|phase| phase["void"].is_null()).then_some(())
    });
    for phase in ["services", "kernel"] {
        let report = reboot(&guest, &["--how", "phase", "--candidate", phase]);
        assert_eq!(report["phase"]["candidate"], phase, "{report}");
    }
    reboot(&guest, &["--how", "warm-cache"]);
    reboot(&guest, &["--how", "cold"]);
}

#[test]
fn leaks_at_intervals_are_counted_and_invalid_settings_are_rejected() {
    let lab = Lab::new();
    let guest = lab.vm("drips").leaky().boot(&[]);
    assert_eq!((get(&guest)["events"], get(&guest)["mean_ms"]), (0, 0), "it leaks without a setting");
    assert_eq!(command(&guest, "set mean_ms 5"), "ok");
    wait_for("pieces to be leaked", DEADLINE, || (get(&guest)["events"] >= 20).then_some(()));
    assert_eq!(command(&guest, "set mean_ms 0"), "ok");
    // The counters are read one after the other, so they agree only after the leak has stopped.
    let leaked = get(&guest);
    assert_eq!(leaked["leaked_bytes"], leaked["events"] * 1024);
    let before = leaked["events"];
    assert_eq!(command(&guest, "set size 2048"), "ok");
    assert_eq!(command(&guest, "set leak_now 1"), "ok");
    let now = get(&guest);
    assert_eq!(now["events"] - before, 512, "{now:?}");
    for invalid in
        ["set size 4", "set size 1000000", "set mean_ms -1", "set leak_now much", "set events 7", "set none 1"]
    {
        assert!(command(&guest, invalid).starts_with("error "), "{invalid}");
    }
    assert_eq!(get(&guest)["failed"], 0);
}
