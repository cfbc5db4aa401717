//! `rekindle monitor`: samples of the free resources of a host and its guests.

use crate::common::{DEADLINE, Lab, wait_for};
use rekindle_kernel::process::Process;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Returns the complete samples. The last line may still be incomplete, and is left out.
fn samples(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_host_and_its_guests_are_sampled_until_a_signal() {
    let lab = Lab::new();
    let guest = lab.vm("aging").boot(&[]);
    let out = lab.path("samples.jsonl");
    fs::write(&out, "{\"incomplete").unwrap();
    let path = out.to_str().unwrap().to_owned();
    let service = format!("aging=tcp://{}:7", guest.ip());
    let mut command = lab.command(["monitor", "--out", &path, "--every", "50ms", "--service", &service]);
    command.args(["--netns", &lab.namespace]);
    let mut monitor = command.spawn().unwrap();
    wait_for("three samples of the guest", DEADLINE, || {
        (samples(&out).iter().filter(|sample| sample["guest"] == "aging").count() >= 3).then_some(())
    });
    lab.rekindle(["monitor", "--out", &path, "--count", "1"]).status(1).prints(&["another `rekindle monitor`", &path]);

    let before = guest.only_qemu().process.pid;
    guest.warm(&[]);
    let after = guest.only_qemu().process.pid;
    let boot_of = |pid: u32| move |sample: &Value| sample["boot"].as_str().unwrap().ends_with(&format!("/{pid}"));
    wait_for("a sample of the new QEMU", DEADLINE, || samples(&out).iter().any(boot_of(after)).then_some(()));
    guest.rekindle(&["stop", "--now"]).ok();
    wait_for("samples of the host alone", DEADLINE, || {
        samples(&out).iter().rev().take(3).all(|sample| sample["guest"].is_null()).then_some(())
    });
    Process::of(monitor.id()).unwrap().terminate().unwrap();
    assert!(monitor.wait().unwrap().success(), "it fails after the signal");

    let recorded = samples(&out);
    assert!(recorded.iter().all(|sample| sample["format"] == 1 && sample["unix_s"].is_f64()));
    let (host, guests): (Vec<_>, Vec<_>) = recorded.iter().partition(|sample| sample["guest"].is_null());
    assert!(host.iter().all(|sample| sample["free_memory_kib"].is_u64() && sample["open_files"].is_u64()));
    assert!(guests.iter().any(|sample| boot_of(before)(sample)));
    assert!(guests.iter().all(|sample| sample["resident_kib"].as_u64().unwrap() > 10_000));
    assert!(guests.iter().any(|sample| sample["response_time_ms"].as_f64().is_some_and(|ms| ms > 0.0)));
}

#[test]
fn what_cannot_be_sampled_is_named_in_the_error() {
    let lab = Lab::new();
    lab.rekindle(["monitor", "no-such-vm", "--count", "1"]).status(1).prints(&["no-such-vm"]);
    lab.rekindle(["monitor", "--service", "no-such-vm=tcp://10.0.0.1:1", "--count", "1"])
        .status(1)
        .prints(&["no-such-vm"]);
    lab.rekindle(["monitor", "--service", "web", "--count", "1"]).status(2).prints(&["NAME=URL"]);
    lab.rekindle(["monitor", "--service", "web=ftp://x", "--count", "1"]).status(2).prints(&["ftp"]);
    let none = lab.path("none/samples").to_str().unwrap().to_owned();
    lab.rekindle(["monitor", "--out", &none, "--count", "1"]).status(1).prints(&[&none]);
    let line = lab.rekindle(["monitor", "--count", "1"]).ok().stdout;
    assert!(serde_json::from_str::<Value>(line.trim()).unwrap()["guest"].is_null(), "{line}");
}
