//! Memory that a guest's kernel has leaked is back after a reboot of each kind, and what it leaks is counted right.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::served::{image, section};
use common::{DEADLINE, Guest, Lab, wait_for};
use serde_json::Value;
use std::collections::BTreeMap;

const PORT: u16 = 7003;
const MIB: i64 = 1 << 20;
/// What is leaked.
const LEAK: i64 = 32 * MIB;
/// What the kernel's other memory may differ by from one boot to the next.
const OTHER: i64 = MIB;

fn tell(guest: &Guest<'_>, line: &str) -> String {
    wait_for(&format!("an answer to {line}"), DEADLINE, || guest.try_ask_at(PORT, line).ok())
}

fn get(guest: &Guest<'_>) -> BTreeMap<String, i64> {
    let reply = tell(guest, "get");
    let words = reply.strip_prefix("ok ").unwrap_or_else(|| panic!("get: {reply}"));
    let pairs = words.split(' ').filter_map(|word| word.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
}

/// What the kernel has allocated and does not give back by itself, in bytes.
fn slab(guest: &Guest<'_>) -> i64 {
    get(guest)["SUnreclaim"] * 1024
}

/// Reboot it with a leak in it: all of it is back.
#[track_caller]
fn reboot(guest: &Guest<'_>, arguments: &[&str]) -> Value {
    let (before, available) = (slab(guest), get(guest)["MemAvailable"] * 1024);
    assert_eq!(tell(guest, &format!("set leak_now {}", LEAK / MIB)), "ok");
    let leaked = get(guest);
    assert_eq!(leaked["leaked_bytes"], LEAK);
    let grown = leaked["SUnreclaim"] * 1024 - before;
    assert!((LEAK - OTHER..LEAK + OTHER).contains(&grown), "{grown} bytes of {LEAK} are to be seen");
    assert!(available - leaked["MemAvailable"] * 1024 > LEAK - 4 * OTHER);
    let all = ["--json", "reboot", "os", &guest.name].into_iter().chain(arguments.iter().copied());
    let told = guest.lab.rekindle(all).ok().json();
    guest.wait_ready();
    assert_eq!(get(guest)["leaked_bytes"], 0, "{arguments:?}");
    let after = slab(guest);
    assert!(after < before + OTHER, "{arguments:?}: {before} bytes before the leak, {after} after the reboot");
    told
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
        let told = reboot(&guest, &["--how", "phase", "--candidate", phase]);
        assert_eq!(told["phase"]["candidate"], phase, "{told}");
    }
    reboot(&guest, &["--how", "warm-cache"]);
    reboot(&guest, &["--how", "cold"]);
}

#[test]
fn a_leak_comes_at_intervals_and_what_makes_no_sense_is_refused() {
    let lab = Lab::new();
    let guest = lab.vm("drips").leaky().boot(&[]);
    assert_eq!((get(&guest)["events"], get(&guest)["mean_ms"]), (0, 0), "none unless it is asked for");
    assert_eq!(tell(&guest, "set mean_ms 5"), "ok");
    wait_for("pieces to be leaked", DEADLINE, || (get(&guest)["events"] >= 20).then_some(()));
    assert_eq!(tell(&guest, "set mean_ms 0"), "ok");
    // The counters are read one after the other: only now do they agree.
    let leaked = get(&guest);
    assert_eq!(leaked["leaked_bytes"], leaked["events"] * 1024);
    let held = leaked["events"];
    assert_eq!(tell(&guest, "set size 2048"), "ok");
    assert_eq!(tell(&guest, "set leak_now 1"), "ok");
    let now = get(&guest);
    assert_eq!(now["events"] - held, 512, "{now:?}");
    for wrong in ["set size 4", "set size 1000000", "set mean_ms -1", "set leak_now much", "set events 7", "set none 1"]
    {
        assert!(tell(&guest, wrong).starts_with("error "), "{wrong}");
    }
    assert_eq!(get(&guest)["failed"], 0);
}
