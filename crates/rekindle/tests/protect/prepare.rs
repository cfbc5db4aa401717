//! `rekindle restore --prepare` with real guests: a QEMU waits with empty RAM, into which the newest checkpoint is
//! loaded later. If that QEMU cannot be used, another one is started, and the report states why.

use crate::common::lab::{entries, left_in};
use crate::common::protector::Protector;
use crate::common::served::{image, kill_server, section};
use crate::common::{CommandResult, DEADLINE, Guest, Lab, Net, free_port, observe, qemu_old, wait_for};
use rekindle_disk::control::Control;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Another host, with its own run, RAM and configuration directories.
struct Spare<'a> {
    lab: &'a Lab,
    root: PathBuf,
}

impl<'a> Spare<'a> {
    fn new(lab: &'a Lab) -> Self {
        lab.write_host_config("spare.toml", "");
        Self { lab, root: lab.path("spare") }
    }

    fn rekindle(&self, arguments: &[&str]) -> CommandResult {
        let mut command = self.lab.command(arguments);
        command.env("REKINDLE_RUN_DIR", &self.root).env("REKINDLE_HOST_CONFIG", self.lab.path("spare.toml"));
        self.lab.finish(command)
    }

    fn json(&self, arguments: &[&str]) -> Value {
        self.rekindle(&[&["--json"], arguments].concat()).ok().json()
    }

    fn status(&self, name: &str) -> String {
        let listed = self.json(&["ls"]);
        let status = listed.as_array().unwrap().iter().find(|vm| vm["name"] == name).map(|vm| vm["status"].clone());
        status.map_or("absent".into(), |status| status.as_str().map_or(status.to_string(), str::to_owned))
    }

    /// Returns the only QEMU of this host.
    fn qemu(&self) -> observe::Qemu {
        let [qemu] = observe::qemus(&self.root).try_into().expect("one QEMU");
        qemu
    }

    fn wait_filled(&self, name: &str) {
        let fill = self.root.join(name).join("fill.json");
        wait_for("the fill to finish", DEADLINE, || (!fill.exists()).then_some(()));
    }

    fn assert_empty(&self) {
        assert!(observe::qemus(&self.root).is_empty(), "QEMUs are left");
        let remains = left_in(&self.root);
        assert!(remains.is_empty(), "{remains:?}");
    }
}

impl Drop for Spare<'_> {
    fn drop(&mut self) {
        for qemu in observe::qemus(&self.root) {
            let _ = qemu.process.kill();
        }
    }
}

fn store(lab: &Lab) -> String {
    lab.path("store").to_str().unwrap().to_owned()
}

fn checkpoint(guest: &Guest<'_>, store: &str) {
    let arguments = ["protect", &guest.name, "--store", store, "--create-store", "--every", "50ms", "--count", "1"];
    guest.lab.rekindle(arguments).ok();
}

/// Simulates a failure of the guest's host.
fn crash(guest: &Guest<'_>) {
    guest.only_qemu().process.kill().unwrap();
    guest.rekindle(&["stop", "--now"]).ok();
}

/// Returns all files of a store, with their lengths.
fn listing(directory: &Path) -> Vec<(PathBuf, u64)> {
    let mut found = Vec::new();
    for path in entries(directory) {
        match fs::metadata(&path).unwrap() {
            metadata if metadata.is_dir() => found.extend(listing(&path)),
            metadata => found.push((path, metadata.len())),
        }
    }
    found
}

#[test]
fn a_prepared_restore_uses_the_newest_checkpoint() {
    let lab = Lab::new();
    let guest = lab.vm("ready").memory("192M").net(Net::User(free_port())).boot(&[]);
    let (spare, store) = (Spare::new(&lab), store(&lab));
    guest.touch("32M");
    checkpoint(&guest, &store);

    let before = listing(Path::new(&store));
    let waits = spare.json(&["restore", "ready", "--store", &store, "--prepare"]);
    assert_eq!((waits["checkpoint"].clone(), waits["replaced"].clone()), (1.into(), false.into()));
    assert_eq!(listing(Path::new(&store)), before, "the preparation has changed the store");
    let qemu = spare.qemu();
    assert_eq!(waits["pid"], qemu.process.pid);
    assert_eq!(spare.status("ready"), "prepared");
    let ram: Vec<_> = entries(&spare.root.join(".ram"));
    let [ram] = ram.as_slice() else { panic!("{ram:?}") };
    assert!(ram.extension().is_some_and(|extension| extension == "waiting"), "{ram:?}");
    assert_eq!(fs::metadata(ram).unwrap().blocks(), 0, "the RAM of a prepared QEMU is not empty");
    // A prepared QEMU runs no guest, and no command treats it as a guest.
    let definition = lab.path("ready.toml");
    let refused = ["prepared for a restore", "rekindle stop ready"];
    spare.rekindle(&["run", definition.to_str().unwrap()]).status(1).prints(&refused);
    spare.rekindle(&["protect", "ready", "--store", &store]).status(1).prints(&refused);
    spare.rekindle(&["replace-qemu", "ready"]).status(1).prints(&refused);
    spare.rekindle(&["recover", "ready"]).ok().prints(&["nothing to recover"]);
    spare.rekindle(&["show", "ready"]).ok().prints(&["is prepared", &qemu.process.pid.to_string()]);
    assert_eq!(spare.qemu().process, qemu.process);

    // The guest still runs, and changes its memory.
    guest.touch("64M");
    let (boot, tick) = (guest.boot_id(), guest.tick());
    checkpoint(&guest, &store);
    crash(&guest);
    let restored = spare.json(&["restore", "ready", "--store", &store]);
    assert_eq!((restored["checkpoint"].clone(), restored["prepared"].clone()), (2.into(), true.into()), "{restored}");
    assert_eq!(restored["unused"], Value::Null);
    assert_eq!(spare.qemu().process, qemu.process, "the guest does not run in the prepared QEMU");
    assert_eq!(guest.boot_id(), boot);
    assert!(guest.tick() >= tick);
    guest.verify();
    spare.wait_filled("ready");
    guest.verify();
    // Zero pages are not written to the RAM file, so they take no memory of the host.
    let log = fs::read_to_string(spare.root.join("ready/pager.log")).unwrap();
    let zero = log
        .lines()
        .find_map(|line| line.split_once(" in the background, ")?.1.strip_suffix(" zero")?.parse::<u64>().ok());
    assert!(zero.is_some_and(|pages| pages > (32 << 20) / 4096), "{log}");
    let [ram] = entries(&spare.root.join(".ram")).try_into().unwrap();
    assert!(fs::metadata(&ram).unwrap().blocks() * 512 < 160 << 20, "{ram:?} is filled with zeroes");
    assert_eq!(spare.status("ready"), "running");
    assert_eq!(spare.json(&["show", "ready"])["prepared"], Value::Null);
    // The VM is like any other: its QEMU can be replaced, and its guest can be protected.
    spare.rekindle(&["replace-qemu", "ready"]).ok();
    assert_eq!(guest.boot_id(), boot);
    spare.rekindle(&["protect", "ready", "--store", &store, "--every", "50ms", "--count", "1"]).ok();
    guest.verify();
    spare.rekindle(&["stop", "ready", "--now"]).ok();
    spare.assert_empty();
}

#[test]
fn a_prepared_qemu_that_does_not_fit_any_more_is_replaced_and_the_report_states_why() {
    let lab = Lab::new();
    let disk = lab.path("disk.raw");
    fs::write(&disk, vec![1; 1 << 20]).unwrap();
    let section = format!("[[disk]]\npath = {disk:?}\nreadonly = true\nserver = false");
    let port = free_port();
    let guest = lab.vm("moved").section(&section).net(Net::User(port)).boot(&[]);
    let store = store(&lab);
    let spare = Spare::new(&lab);
    checkpoint(&guest, &store);
    let boot = guest.boot_id();
    crash(&guest);
    let prepare = |more: &[&str]| {
        let waits = spare.json(&[&["restore", "moved", "--store", &store, "--prepare"], more].concat());
        assert_eq!(spare.status("moved"), "prepared");
        waits["pid"].clone()
    };
    let restore = |more: &[&str]| {
        let restored = spare.json(&[&["restore", "moved", "--store", &store], more].concat());
        assert_eq!(guest.boot_id(), boot, "{restored}");
        spare.qemu();
        restored
    };
    let end = || drop(spare.rekindle(&["stop", "moved", "--now"]).ok());

    // Prepare twice: the second QEMU replaces the first.
    let first = prepare(&[]);
    assert_ne!(prepare(&[]), first);
    let waits = spare.qemu();
    // The prepared QEMU dies.
    waits.process.kill().unwrap();
    assert!(waits.process.wait_end(Duration::from_secs(10)).unwrap());
    assert_eq!(spare.status("moved"), "ended");
    let restored = restore(&[]);
    assert_eq!(restored["prepared"], false);
    assert!(restored["unused"].as_str().unwrap().contains("has ended"), "{restored}");
    end();
    // The image has been replaced since the prepared QEMU opened it.
    prepare(&[]);
    let pid = spare.qemu().process.pid;
    fs::write(lab.path("other.raw"), vec![2; 1 << 20]).unwrap();
    fs::rename(lab.path("other.raw"), &disk).unwrap();
    let restored = restore(&[]);
    assert!(restored["unused"].as_str().unwrap().contains("disk.raw has changed"), "{restored}");
    assert_ne!(restored["pid"], pid);
    end();
    // The restore names another definition than the preparation. Without a definition of its own, a restore uses that
    // of the preparation.
    let other = lab.vm("moved").section(&section).net(Net::User(port));
    let definition = other.key("shutdown_timeout = \"7s\"").write();
    prepare(&[]);
    let restored = restore_elsewhere(
        &spare,
        &["restore", "moved", "--store", &store, "--definition", definition.to_str().unwrap()],
    );
    assert!(restored["unused"].as_str().unwrap().contains("definition of the VM has changed"), "{restored}");
    end();
    prepare(&["--definition", definition.to_str().unwrap()]);
    let restored = restore_elsewhere(&spare, &["restore", "moved", "--store", &store]);
    assert_eq!(restored["prepared"], true, "{restored}");
    end();
    // The prepared QEMU is stopped.
    prepare(&[]);
    spare.rekindle(&["stop", "moved"]).ok().prints(&["only prepared"]);
    spare.assert_empty();
}

fn restore_elsewhere(spare: &Spare<'_>, arguments: &[&str]) -> Value {
    let restored = spare.json(arguments);
    assert_eq!(spare.status("moved"), "running");
    restored
}

#[test]
fn a_restore_uses_the_last_checkpoint_that_the_previous_owner_committed() {
    let lab = Lab::new();
    let spare = Spare::new(&lab);
    for round in 0..4 {
        let guest = lab.vm("late").net(Net::User(free_port())).boot(&[]);
        let store = format!("{}-{round}", store(&lab));
        // The previous host is still alive.
        let mut command = lab.command([
            "protect",
            "late",
            "--store",
            &store,
            "--create-store",
            "--every",
            "1ms",
            "--count",
            "100000",
        ]);
        let protector = command.spawn().unwrap();
        let newest = || {
            let listed = lab.rekindle(["--json", "store", "ls", &store]);
            (listed.code == Some(0))
                .then(|| listed.json()["checkpoints"].as_array()?.last()?["number"].as_u64())
                .flatten()
        };
        wait_for("some checkpoints", DEADLINE, || newest().filter(|newest| *newest > 2));
        spare.rekindle(&["restore", "late", "--store", &store, "--prepare"]).ok();
        let restored = spare.json(&["restore", "late", "--store", &store]);
        let ended = lab.wait(protector, "protect".into());
        assert_eq!(ended.code, Some(1), "the older owner was not rejected: {ended}");
        assert_eq!(newest(), restored["checkpoint"].as_u64(), "{restored}");
        // The guest runs in the prepared QEMU, or the report states why not.
        assert_eq!(restored["prepared"] == true, restored["unused"].is_null(), "{restored}");
        assert!(guest.qemus().is_empty(), "the guest still runs on its previous host\n{}", lab.state_report());
        guest.rekindle(&["stop"]).ok();
        spare.rekindle(&["stop", "late", "--now"]).ok();
    }
    spare.assert_empty();
}

#[test]
fn a_prepared_qemu_survives_a_failed_restore_and_only_one_of_two_restores_uses_it() {
    let lab = Lab::new();
    let guest = lab.vm("patient").net(Net::User(free_port())).boot(&[]);
    let store = store(&lab);
    let spare = Spare::new(&lab);
    checkpoint(&guest, &store);
    let boot = guest.boot_id();
    crash(&guest);
    let pid = spare.json(&["restore", "patient", "--store", &store, "--prepare"])["pid"].clone();
    let before = listing(Path::new(&store));
    let still_waits = || {
        if Path::new(&store).exists() {
            assert_eq!(listing(Path::new(&store)), before, "the store was changed");
        }
        assert_eq!(spare.status("patient"), "prepared");
        assert_eq!(pid, spare.qemu().process.pid);
    };
    // The store is unavailable.
    let aside = lab.path("aside");
    fs::rename(&store, &aside).unwrap();
    spare.rekindle(&["restore", "patient", "--store", &store]).status(1).prints(&["store"]);
    still_waits();
    fs::rename(&aside, &store).unwrap();
    spare.rekindle(&["restore", "patient", "--store", &store, "--at", "7"]).status(1).prints(&["checkpoint 7"]);
    still_waits();
    let qemu = qemu_old().to_str().unwrap();
    spare
        .rekindle(&["restore", "patient", "--store", &store, "--qemu", qemu])
        .status(1)
        .prints(&["machine type pc-q35"]);
    still_waits();
    // There is no room for the RAM at the moment.
    lab.write_host_config("spare.toml", "ram_size = \"64M\"");
    let ram = spare.root.join(".ram");
    let full = ram.join("other.ram");
    let free = rekindle_memory::directory::RamDirectory::at(&ram).unwrap().room().unwrap().free;
    fs::File::create(&full).unwrap().set_len(free - (64 << 20)).unwrap();
    spare.rekindle(&["restore", "patient", "--store", &store]).status(1).prints(&["128 MiB requested", "promised"]);
    still_waits();
    fs::remove_file(&full).unwrap();

    // Two concurrent restores: one gets the prepared QEMU, and the other one fails.
    let start = || {
        let mut command = lab.command(["--json", "restore", "patient", "--store", &store]);
        command.env("REKINDLE_RUN_DIR", &spare.root).env("REKINDLE_HOST_CONFIG", lab.path("spare.toml"));
        command.spawn().unwrap()
    };
    let both = [start(), start()].map(|child| lab.wait(child, "restore".into()));
    let (won, lost): (Vec<_>, Vec<_>) = both.into_iter().partition(|done| done.code == Some(0));
    let ([won], [lost]) = (won.as_slice(), lost.as_slice()) else {
        panic!("{won:?} {lost:?}", won = won.len(), lost = lost.len())
    };
    assert_eq!(won.json()["prepared"], true, "{won}");
    assert_eq!(lost.code, Some(1));
    assert!(lost.stderr.contains("busy") || lost.stderr.contains("runs already"), "{lost}");
    assert_eq!(guest.boot_id(), boot);
    assert_eq!(pid, spare.qemu().process.pid);
    // A guest that runs cannot be prepared.
    spare.rekindle(&["restore", "patient", "--store", &store, "--prepare"]).status(1).prints(&["runs already"]);
    spare.rekindle(&["stop", "patient", "--now"]).ok();
    spare.assert_empty();
}

#[test]
fn a_restore_that_is_impossible_here_is_rejected_before_anything_starts() {
    let lab = Lab::new();
    let guest = lab.vm("big").memory("192M").net(Net::User(free_port())).boot(&[]);
    let store = store(&lab);
    checkpoint(&guest, &store);
    let (spare, before) = (Spare::new(&lab), listing(Path::new(&store)));
    let rejects = |arguments: &[&str], expected: &[&str]| {
        for more in [&[][..], &["--prepare"][..]] {
            let command = [&["restore", "big", "--store"], arguments, more].concat();
            if !(more.contains(&"--prepare") && (arguments.contains(&"--at") || expected.contains(&"requested"))) {
                spare.rekindle(&command).status(1).prints(expected);
            }
            spare.assert_empty();
            assert_eq!(listing(Path::new(&store)), before, "the store was changed");
        }
    };
    let old = qemu_old().to_str().unwrap().to_owned();
    rejects(&[&store, "--qemu", &old], &["cannot run here", "does not know the machine type pc-q35-"]);
    rejects(&[&store, "--at", "9"], &["checkpoint 9"]);
    rejects(&[lab.path("nowhere").to_str().unwrap()], &["nowhere"]);
    lab.write_host_config("spare.toml", "ram_size = \"100M\"");
    rejects(&[&store], &["192 MiB requested", "requested"]);
    // The same command on the host where the guest runs is rejected, too.
    lab.rekindle(["restore", "big", "--store", &store]).status(1).prints(&["runs already"]);
    guest.assert_sound();
    spare.rekindle(&["restore", "big", "--store", &store, "--prepare", "--eager"]).status(2).prints(&["--eager"]);
}

#[test]
fn a_guest_with_a_served_disk_resumes_in_a_prepared_qemu_at_the_epoch_of_its_checkpoint() {
    let lab = Lab::new();
    let path = image(&lab, "disk.raw");
    let port = free_port();
    let guest = lab.vm("served").section(&section(&path, "")).net(Net::User(port)).boot(&[]);
    let (spare, store) = (Spare::new(&lab), store(&lab));
    let mut protector = Protector::start(&guest, &lab, Path::new(&store), &["--create-store", "--every", "100ms"]);
    protector.next_checkpoint();
    // The waiting disk server does not open the disk: the server that has it keeps it.
    spare.json(&["restore", "served", "--store", &store, "--prepare"]);
    let waits = spare.qemu();
    let status = || Control::connect(&spare.root.join("served/disk-disk0.control")).unwrap().status().unwrap();
    assert!(status().waits && !status().active);
    guest.ask("write vda 0 64 1");
    protector.next_checkpoint();
    // While another server has the disk, a restore fails. The prepared QEMU still waits, and the protector still owns
    // the store.
    let refused = spare.rekindle(&["restore", "served", "--store", &store]);
    refused.status(1).prints(&["disk0", "another program has it open"]);
    assert_eq!((spare.status("served"), status().waits), ("prepared".into(), true));
    protector.next_checkpoint();
    guest.ask("write vda 32 64 2");
    protector.next_checkpoint();
    protector.next_checkpoint();
    let boot = guest.boot_id();
    kill_server(&guest);
    crash(&guest);
    protector.kill();
    let restored = spare.json(&["restore", "served", "--store", &store]);
    assert_eq!((restored["prepared"].clone(), restored["unused"].clone()), (true.into(), Value::Null), "{restored}");
    assert_eq!((spare.qemu().process, guest.boot_id()), (waits.process, boot));
    assert!(status().redo.is_some() && !status().waits, "the server does not use the redo log");
    let cached = wait_for("the guest to answer", DEADLINE, || {
        guest.try_ask("read vda 0 2048").ok().filter(|answer| answer.starts_with("ok"))
    });
    guest.ask("drop-caches");
    assert_eq!(guest.try_ask("read vda 0 2048").unwrap(), cached, "the page cache differs from the disk");
    spare.wait_filled("served");
    guest.ask("write vda 64 64 3");
    guest.ask("drop-caches");
    // The guest is protected, stopped and prepared again. Then the waiting disk server dies: another QEMU is started,
    // and the report states why.
    spare.rekindle(&["protect", "served", "--store", &store, "--every", "50ms", "--count", "1"]).ok();
    let newest = guest.ask("read vda 0 2048");
    spare.rekindle(&["stop", "served", "--now"]).ok();
    spare.json(&["restore", "served", "--store", &store, "--prepare"]);
    let mark = format!("--control={}", spare.root.join("served/disk-disk0.control").display());
    crate::common::with_argument_containing(&mark).unwrap().iter().for_each(|server| server.kill().unwrap());
    let restored = spare.json(&["restore", "served", "--store", &store]);
    assert_eq!(restored["prepared"], false, "{restored}");
    assert!(restored["unused"].as_str().unwrap().contains("the server of disk disk0"), "{restored}");
    guest.ask("drop-caches");
    assert_eq!(guest.ask("read vda 0 2048"), newest);
    spare.rekindle(&["stop", "served", "--now"]).ok();
    spare.assert_empty();
}
