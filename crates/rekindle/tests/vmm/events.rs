//! `rekindle events`: what was done to a VM and what went wrong, also after it was stopped.

use crate::common::protector::{Protector, store};
use crate::common::served::{image, kill_server, section, server};
use crate::common::{DEADLINE, Lab, wait_for};
use rekindle_kernel::spawn::die_with_starter;
use serde_json::Value;
use std::io::{BufRead, BufReader};

/// Returns the events of a VM, each as its kind and its operation or other text.
fn events(lab: &Lab, arguments: &[&str]) -> Vec<(String, String)> {
    let printed = lab.rekindle([&["--json", "events"], arguments].concat()).ok().stdout;
    let parse = |line: &str| {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(event["host_us"].as_u64().unwrap() > 0, "{line}");
        let text = ["operation", "helper", "store", "why"].iter().find_map(|key| event[key].as_str());
        (event["event"].as_str().unwrap().to_owned(), text.unwrap_or_default().to_owned())
    };
    printed.lines().map(parse).collect()
}

fn pair(kind: &str, text: &str) -> (String, String) {
    (kind.to_owned(), text.to_owned())
}

#[test]
fn events_are_those_of_operations_helpers_and_protection_and_outlive_the_vm() {
    let lab = Lab::new();
    let disk = image(&lab, "disk.raw");
    let guest = lab.vm("web").section(&section(&disk, "")).boot(&[]);
    lab.vm("other").boot(&[]);
    let mut follower = lab.command(["--json", "events", "web", "-f", "-n", "0"]);
    let mut follower = die_with_starter(&mut follower).spawn().unwrap();
    let mut followed = BufReader::new(follower.stdout.take().unwrap());

    guest.warm(&[]);
    kill_server(&guest);
    guest.rekindle(&["recover"]).ok();
    wait_for("a new server", DEADLINE, || server(&guest));
    let store = store(&lab, "store");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms"]);
    protector.next_checkpoint();
    protector.end();
    lab.rekindle(["stop", "--now", "web"]).ok();

    let replace = "replace-qemu --how warm";
    let of_web = events(&lab, &["web"]);
    let expected = [
        pair("started", "run"),
        pair("done", "run"),
        pair("started", replace),
        pair("done", replace),
        pair("protection-started", store.to_str().unwrap()),
        pair("protection-ended", "its protector was stopped"),
        pair("removed", ""),
    ];
    let mut rest = of_web.iter();
    for event in &expected {
        assert!(rest.any(|found| found == event), "no {event:?} in its place in {of_web:?}");
    }
    assert_eq!(events(&lab, &["web", "-n", "1"]), [pair("removed", "")]);
    assert!(events(&lab, &[]).len() >= of_web.len() + 2, "the events of the other VM are missing");
    lab.rekindle(["events", "web"]).ok().prints(&["replace-qemu --how warm: done", "removed from this host"]);

    // What was followed is the same, without what was before.
    let mut lines = Vec::new();
    while lines.last().is_none_or(|line: &String| !line.contains("removed")) {
        let mut line = String::new();
        assert_ne!(followed.read_line(&mut line).unwrap(), 0, "{lines:?}");
        lines.push(line);
    }
    assert!(lines[0].contains("started") && lines[0].contains(replace), "{lines:?}");
    follower.kill().unwrap();
    follower.wait().unwrap();
}

#[test]
fn an_operation_that_fails_is_undone_in_the_events() {
    let lab = Lab::new();
    let guest = lab.vm("web").boot(&[]);
    let mut killed = lab.command(["replace-qemu", "web"]);
    killed.env("REKINDLE_FAULT", "warm.prepare.ready:kill");
    lab.finish(killed).killed();
    guest.rekindle(&["recover"]).ok();
    let events = events(&lab, &["web", "-n", "2"]);
    let replace = "replace-qemu --how warm";
    assert_eq!(events, [pair("started", replace), pair("undone", replace)]);
    guest.assert_sound();
}
