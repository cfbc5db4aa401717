//! `--dry-run` of every command that stops a guest: it prints the planned action and its obstacles, and changes
//! nothing. A command that stops several guests needs their names, or `--all`.

use crate::common::protector::store;
use crate::common::{Guest, Lab, Net};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn lab() -> Lab {
    let lab = Lab::without_root();
    fs::create_dir(lab.path("ram")).unwrap();
    let config = format!(
        "ram_dir = {:?}\nsuspend_dir = {:?}\nsave_dir = {:?}\n",
        lab.path("ram"),
        lab.path("suspended"),
        lab.save_dir()
    );
    lab.configure_host(&config);
    lab
}

/// Returns the content of the VMs' records, the names of all RAM and saved states, and the running QEMUs. Locks and
/// logs are left out: they are not state, and a `rekindle watch` that has just started creates some.
fn snapshot(lab: &Lab, guests: &[&Guest<'_>]) -> (BTreeMap<PathBuf, Vec<u8>>, Vec<u32>) {
    let mut files = BTreeMap::new();
    let mut todo = vec![lab.run_root(), lab.path("ram"), lab.path("suspended"), lab.save_dir()];
    while let Some(directory) = todo.pop() {
        for path in crate::common::lab::entries(&directory) {
            if path.is_dir() && !path.is_symlink() {
                todo.push(path);
                continue;
            }
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name.ends_with("lock") || name.contains(".log") || name == "helpers.json" {
                continue;
            }
            let is_record = name.ends_with(".json") || name.ends_with(".jsonl");
            files.insert(path.clone(), if is_record { fs::read(&path).unwrap() } else { Vec::new() });
        }
    }
    let running = guests.iter().map(|guest| {
        assert_eq!(guest.status(), "running", "{}", lab.state_report());
        guest.only_qemu().process.pid
    });
    (files, running.collect())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_dry_run_shows_what_would_be_done_and_changes_nothing() {
    let lab = lab();
    let [web, db] = ["web", "db"].map(|name| lab.vm(name).net(Net::None).memory("96M").start(&[]));
    let pid = web.only_qemu().process.pid;
    let replaced = format!("web: would replace QEMU process {pid}");
    let store = store(&lab, "web");
    let resource = ["--store", text(&store), "--definition", text(&lab.path("web.toml"))].map(str::to_owned);
    let resource = resource.each_ref().map(String::as_str);
    let away = ["--to", "b", "--ssh", "false"];
    let image = lab.path("disk.raw");
    fs::write(&image, [0; 4096]).unwrap();
    let before = snapshot(&lab, &[&web, &db]);
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&["stop", "web", "db"], 0, &["web: would shut its guest down", "db: would shut its guest down"]),
        (&["stop", "web", "--now"], 0, &["would power its guest off"]),
        (&["stop", "web", "nope"], 1, &["web: would", "nope: not possible: there is no VM nope"]),
        (&["replace-qemu", "web"], 0, &[&replaced, "stopped for milliseconds"]),
        (&["replace-qemu", "--all", "--how", "cold"], 0, &["web: would", "db: would", "shut down and booted"]),
        (&["replace-qemu", "web", "db", "--how", "saved"], 0, &["web: would", "db: would", "saved to disk"]),
        (&["replace-qemu", "web", "--qemu", "/bin/true"], 1, &["not possible", "does not behave like a QEMU"]),
        (&["replace-qemu", "web", "--rollback"], 1, &["not possible", "it has run no other QEMU binary"]),
        (&["reboot", "web", "--how", "cold"], 0, &["would shut its guest down and boot it"]),
        (&["reboot", "web", "--how", "warm-cache"], 1, &["not possible", "none of its disks has a server"]),
        (&["reboot", "web", "--how", "phase"], 1, &["not possible", "no phase of its boot is saved"]),
        (&["host", "suspend", "--all"], 0, &["web: would stop its guest", "db: would stop its guest"]),
        (&["host", "suspend", "web", "--how", "saved"], 0, &["web: would stop its guest, write its RAM to disk"]),
        (&[&["move", "web", "--store", text(&store)], &away[..]].concat(), 1, &["web: not possible", "b"]),
        (&[&["ocf", "stop", "web"], &resource[..]].concat(), 0, &["would take a last checkpoint"]),
        (&[&["ocf", "migrate-to", "web"], &resource[..], &away[..]].concat(), 1, &["web: not possible", "b"]),
        (&["disk", "merge", text(&image)], 0, &["has no redo log"]),
    ];
    for (arguments, status, words) in cases {
        let result = lab.rekindle([arguments, &["--dry-run"][..]].concat()).status(*status);
        result.prints(words).prints(&["nothing was changed"]);
        assert_eq!(snapshot(&lab, &[&web, &db]), before, "{arguments:?} has changed something");
    }
    lab.rekindle(["disk", "merge", text(&lab.path("none")), "--dry-run"]).status(1).prints(&["none", "No such file"]);
    let report = lab.rekindle(["--json", "stop", "web", "nope", "--dry-run"]).status(1).json();
    assert_eq!((&report["dry_run"], &report["vms"][0]["name"]), (&true.into(), &"web".into()), "{report}");
    assert!(report["vms"][0]["would"].is_string() && report["vms"][1]["error"].is_string(), "{report}");
    assert_eq!(snapshot(&lab, &[&web, &db]), before);
    lab.rekindle(["stop", "--now", "web", "db"]).ok();
    lab.assert_empty();
}

#[test]
fn a_suspend_needs_names_or_all_and_stops_no_other_guest() {
    let lab = lab();
    let [web, db] = ["web", "db"].map(|name| lab.vm(name).net(Net::None).memory("96M").start(&[]));
    lab.rekindle(["host", "suspend"]).status(2).prints(&["--all"]);
    lab.rekindle(["host", "suspend", "web", "--all"]).status(2);
    lab.rekindle(["host", "suspend", "web", "nope"]).status(1).prints(&["there is no VM nope"]);
    lab.rekindle(["host", "suspend", "web", "web"]).status(2).prints(&["named twice"]);
    for guest in [&web, &db] {
        assert_eq!(guest.status(), "running");
    }
    lab.rekindle(["host", "suspend", "web"]).ok().prints(&["web: suspended"]);
    assert_eq!((web.status().as_str(), db.status().as_str()), ("suspended", "running"));
    // A stop would drop the suspended guest's memory; the dry run does not.
    lab.rekindle(["stop", "web", "--dry-run"]).ok().prints(&["web: would"]);
    lab.rekindle(["host", "suspend", "--all", "--dry-run"]).status(1).prints(&["still suspended: web"]);
    lab.rekindle(["host", "resume"]).ok().prints(&["web: resumed with its memory"]);
    assert_eq!((web.status().as_str(), db.status().as_str()), ("running", "running"));
    lab.rekindle(["stop", "--now", "web", "db"]).ok();
    lab.assert_empty();
}
