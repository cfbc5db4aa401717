//! `rekindle move` between two hosts that share a store and disk images: two labs, each with run, RAM and configuration directories and a
//! network namespace of its own; what is `ssh` elsewhere runs the other one's Rekindle here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;
#[path = "moving/deaths.rs"]
mod deaths;
#[path = "moving/managed.rs"]
mod managed;

use common::protector::{Protector, pager};
use common::served::{image, read, section};
use common::{CommandResult, DEADLINE, Guest, Lab, Watch, observe, wait_for};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the guest writes of its disk.
const WRITTEN: u64 = 256;

/// Two hosts, and a guest that is defined on both.
struct Pair {
    here: Lab,
    there: Lab,
    name: &'static str,
    disk: PathBuf,
    store: PathBuf,
}

impl Pair {
    fn new(name: &'static str) -> Self {
        let (here, there) = (Lab::new(), Lab::new());
        let (disk, store) = (image(&here, "disk.raw"), here.path("store"));
        for lab in [&here, &there] {
            lab.vm(name).section(&section(&disk, "")).write();
            let script = lab.path("ssh");
            // As ssh does it: the first word is the host, the rest is for a shell there.
            let text = format!(
                "#!/bin/sh\nshift\nREKINDLE_RUN_DIR={:?} REKINDLE_HOST_CONFIG={:?} REKINDLE_FAULT=$FAR_FAULT exec sh -c \"$*\"\n",
                lab.run_root(),
                lab.path(".host.toml")
            );
            fs::write(&script, text).unwrap();
            fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let pair = Self { here, there, name, disk, store };
        pair.new_store();
        pair
    }

    /// An empty store in the place of the one before.
    fn new_store(&self) {
        let _ = fs::remove_dir_all(&self.store);
        self.here.rekindle(["store", "init", self.store.to_str().unwrap()]).ok();
    }

    /// The guest as `lab` sees it.
    fn guest<'a>(&self, lab: &'a Lab) -> Guest<'a> {
        common::first_guest(lab, self.name)
    }

    fn boot(&self) -> Guest<'_> {
        let definition = self.here.path(&format!("{}.toml", self.name));
        self.here.rekindle(["run", definition.to_str().unwrap()]).ok();
        let guest = self.guest(&self.here);
        guest.wait_ready();
        guest
    }

    /// `rekindle move` from a lab to another, not yet started.
    fn command(&self, from: &Lab, to: &Lab, arguments: &[&str]) -> Command {
        let mut command = from.command(["--json", "move", self.name, "--to", "b", "--rekindle"]);
        command.arg(env!("CARGO_BIN_EXE_rekindle")).arg("--ssh").arg(to.path("ssh"));
        command.arg("--store").arg(&self.store).args(arguments).env_remove("FAR_FAULT");
        if !arguments.contains(&"--definition") {
            command.arg("--definition").arg(to.path(&format!("{}.toml", self.name)));
        }
        command
    }

    fn run(&self, from: &Lab, to: &Lab, arguments: &[&str]) -> CommandResult {
        from.finish(self.command(from, to, arguments))
    }
}

/// The last line of what a command wrote.
fn last(done: &CommandResult) -> Value {
    let line = done.stdout.lines().last().unwrap_or_else(|| panic!("nothing was said: {done}"));
    serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {done}"))
}

/// Memory and disk agree: what the guest has of the disk in its cache is what is on it.
fn agrees(guest: &Guest<'_>) {
    let cached = read(guest, 0, WRITTEN);
    guest.ask("drop-caches");
    assert_eq!(read(guest, 0, WRITTEN), cached, "the guest's memory has another disk");
}

/// Nothing of the VM is left on a host, once what was told to end has ended.
fn wait_empty(lab: &Lab) {
    wait_for("nothing to be left", DEADLINE, || {
        let names = common::lab::entries(&lab.run_root());
        let vms = names.iter().filter(|path| !path.file_name().unwrap().to_string_lossy().starts_with('.')).count();
        (vms == 0 && observe::qemus(&lab.run_root()).is_empty()).then_some(())
    });
    lab.assert_empty();
}

fn wait_filled(guest: &Guest<'_>) {
    let fill = guest.file("fill.json");
    wait_for("the memory to be there", DEADLINE, || (!fill.exists()).then_some(()));
}

#[test]
fn a_qemu_whose_memory_a_killed_move_has_registered_is_of_no_use_to_a_restore() {
    let pair = Pair::new("late");
    let guest = pair.boot();
    guest.touch("24M");
    let boot = guest.boot_id();
    let mut command = pair.command(&pair.here, &pair.there, &[]);
    command.env("FAR_FAULT", "move.prepare.registered:kill");
    pair.here.finish(command).status(1);
    assert_eq!(pair.guest(&pair.there).status(), "prepared");
    pair.here.rekindle(["stop", "--now", "late"]).ok();
    let restored =
        pair.there.rekindle(["--json", "restore", "late", "--store", pair.store.to_str().unwrap()]).ok().json();
    assert_eq!(restored["prepared"], false, "{restored}");
    assert!(restored["unused"].as_str().unwrap().contains("registered by another restore"), "{restored}");
    let guest = pair.guest(&pair.there);
    guest.wait_ready();
    assert_eq!(guest.boot_id(), boot);
    guest.assert_sound();
    wait_filled(&guest);
    guest.assert_sound();
}

#[test]
fn a_guest_goes_on_elsewhere_and_comes_back() {
    let pair = Pair::new("goes");
    let guest = pair.boot();
    guest.touch("24M");
    let boot = guest.boot_id();
    let mut protector = Protector::start(&guest, &pair.here, &pair.store, &["--every", "100ms"]);
    protector.next_checkpoint();
    // Both hosts are asked, and nothing is done.
    let pid = guest.only_qemu().process.pid;
    let planned = pair.run(&pair.here, &pair.there, &["--dry-run"]).ok().json();
    assert_eq!(planned["vms"][0]["would"], "move its guest to b", "{planned}");
    assert_eq!(guest.only_qemu().process.pid, pid);
    protector.next_checkpoint();
    wait_empty(&pair.there);
    let watch = Watch::start_for(&[&pair.here.run_root(), &pair.there.run_root()]);
    let hosts = [(&pair.here, &pair.there), (&pair.there, &pair.here), (&pair.here, &pair.there)];
    for (round, (from, to)) in hosts.into_iter().enumerate() {
        let before = pair.guest(from);
        for n in 0..20 {
            before.ask(&format!("write vda {} 16 {}", n * 37 % (WRITTEN - 16), round as u64 * 100 + n));
        }
        let tick = before.tick();
        // The second one begins while the memory still comes: what has not come is in the store.
        let filling = before.file("fill.json").exists();
        let moved = last(&pair.run(from, to, &[]).ok());
        assert_eq!((&moved["name"], &moved["host"]), (&"goes".into(), &"b".into()));
        assert_eq!(moved["there"]["prepared"], true, "{moved}");
        assert_eq!(moved["there"]["ahead"], true, "it is loaded while its last checkpoint is committed: {moved}");
        assert!(moved["rounds"].as_array().unwrap().len() >= 2, "{moved}");
        assert!(moved["stopped_us"].as_u64().unwrap() > 0, "{moved}");
        assert_eq!(moved["protector"].is_u64(), round == 0, "{moved}");
        wait_empty(from);
        let guest = pair.guest(to);
        guest.wait_ready();
        assert_eq!(guest.boot_id(), boot, "the same boot goes on");
        assert!(guest.tick() >= tick, "the guest was set back; it was filling: {filling}");
        agrees(&guest);
        guest.verify();
    }
    watch.end();
    assert!(protector.child.wait().unwrap().success(), "who took checkpoints of it was ended in order");
    let guest = pair.guest(&pair.there);
    wait_filled(&guest);
    wait_for("its pager to end", DEADLINE, || pager(&guest).is_none().then_some(()));
    guest.verify();
    guest.assert_sound();
    // It can be protected there, and restored.
    let mut protector = Protector::start(&guest, &pair.there, &pair.store, &["--every", "100ms"]);
    protector.next_checkpoint();
    protector.end();
}

#[test]
fn what_was_loaded_and_is_not_what_was_committed_does_not_run() {
    let pair = Pair::new("unlike");
    pair.boot().touch("24M");
    let boot = pair.guest(&pair.here).boot_id();
    let mut altered = 0;
    for (n, what) in ["devices", "content", "devices", "content"].into_iter().enumerate() {
        let (from, to) = if n % 2 == 0 { (&pair.here, &pair.there) } else { (&pair.there, &pair.here) };
        let script = fs::read_to_string(to.path("ssh")).unwrap();
        let tick = pair.guest(from).tick();
        // What is said goes through a pipe that changes a few bits of it.
        let mark = to.path("altered");
        let text = |is: &str, becomes: &str| {
            format!("s/\"{what}\":\"\\(.\\{{200\\}}\\){is}/\"{what}\":\"\\1{becomes}/w {}", mark.display())
        };
        let sed = format!("sed -u -e '{}' -e t -e '{}'", text("B", "C"), text("[A-Za-z0-9+\\/]", "B"));
        fs::write(to.path("ssh"), script.replace("\nREKINDLE", &format!("\n{sed} | REKINDLE"))).unwrap();
        let moved = last(&pair.run(from, to, &[]).ok());
        fs::write(to.path("ssh"), script).unwrap();
        let is_altered = fs::read(&mark).is_ok_and(|line| !line.is_empty());
        let there = &moved["there"];
        assert_eq!(there["ahead"], !is_altered, "{moved}");
        if is_altered {
            altered += 1;
            assert!(there["unused"].as_str().unwrap().contains("is not what was said of it"), "{moved}");
        }
        wait_empty(from);
        let guest = pair.guest(to);
        guest.wait_ready();
        assert_eq!(guest.boot_id(), boot);
        assert!(guest.tick() >= tick);
        agrees(&guest);
        wait_filled(&guest);
        guest.verify();
        guest.assert_sound();
    }
    assert!(altered >= 2, "its device state was told, and changed on the way");
}

#[test]
fn what_the_other_host_cannot_have_is_told_before_anything_stops() {
    let pair = Pair::new("stays");
    let guest = pair.boot();
    guest.touch("8M");
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let refused = |arguments: &[&str], says: &[&str]| {
        let tick = guest.tick();
        pair.run(&pair.here, &pair.there, arguments).status(1).prints(&["b cannot take stays"]).prints(says);
        assert!(guest.tick() >= tick);
        guest.assert_sound();
        wait_empty(&pair.there);
    };
    // Another machine, a machine that QEMU does not know, and no QEMU.
    let kept = pair.there.path("other.toml");
    let otherwise = |memory: &str, disk: &Path| {
        fs::rename(pair.there.vm("stays").memory(memory).section(&section(disk, "")).write(), &kept).unwrap();
        pair.there.vm("stays").section(&section(&pair.disk, "")).write();
    };
    otherwise("160M", &pair.disk);
    refused(&["--definition", &path(&kept)], &["memory in bytes"]);
    refused(&["--definition", "/nonexistent/vm.toml"], &["/nonexistent/vm.toml"]);
    refused(&["--qemu", "/nonexistent/qemu"], &["/nonexistent/qemu"]);
    // Its image is not there, or is another one.
    otherwise("128M", &pair.there.path("nowhere.raw"));
    refused(&["--definition", &path(&kept)], &["nowhere.raw"]);
    otherwise("128M", &image(&pair.there, "other.raw"));
    refused(&["--definition", &path(&kept)], &["disk0", "another disk than the guest's"]);
    // No room for its RAM.
    fs::write(pair.there.path(".host.toml"), "ram_size = \"64M\"\n").unwrap();
    refused(&[], &["128"]);
    fs::remove_file(pair.there.path(".host.toml")).unwrap();
    // What it reaches under the store's name is another one.
    let script = fs::read_to_string(pair.there.path("ssh")).unwrap();
    let hidden = script.replace(
        "exec sh -c",
        &format!("exec unshare -m sh -c 'mount -t tmpfs none {:?} && exec sh -c \"$0\"'", pair.store),
    );
    fs::write(pair.there.path("ssh"), hidden).unwrap();
    refused(&[], &["not a store"]);
    fs::write(pair.there.path("ssh"), &script).unwrap();
    // It has a VM of that name.
    let plain = pair.there.vm("stays").net(common::Net::None).write();
    pair.there.rekindle(["run", plain.to_str().unwrap()]).ok();
    let done = pair.run(&pair.here, &pair.there, &["--definition", &path(&plain)]);
    done.status(1).prints(&["b cannot take stays", "runs already"]);
    guest.assert_sound();
    pair.there.rekindle(["stop", "--now", "stays"]).ok();
    // Nobody there answers, or somebody else.
    fs::write(pair.there.path("ssh"), "#!/bin/sh\nread -r asked; echo 'Welcome to b!'\n").unwrap();
    pair.run(&pair.here, &pair.there, &[]).status(1).prints(&["Welcome to b!", "no answer of Rekindle's"]);
    fs::write(pair.there.path("ssh"), "#!/bin/sh\nexit 255\n").unwrap();
    pair.run(&pair.here, &pair.there, &[]).status(1).prints(&["the line to b has broken"]);
    guest.verify();
    guest.assert_sound();
}

#[test]
fn one_at_a_time_moves_it_and_what_cannot_be_moved_is_refused() {
    let pair = Pair::new("once");
    let guest = pair.boot();
    // The first one waits for the other host, which waits for a file.
    let script = fs::read_to_string(pair.there.path("ssh")).unwrap();
    let gate = pair.there.path("gate");
    let made = Command::new("mkfifo").arg(&gate).status().unwrap();
    assert!(made.success());
    fs::write(pair.there.path("ssh"), script.replace("\nshift\n", &format!("\nshift\nread line < {gate:?}\n")))
        .unwrap();
    let first = pair.command(&pair.here, &pair.there, &[]).spawn().unwrap();
    wait_for("the first to have the VM", DEADLINE, || {
        fs::read_to_string(guest.file("lock")).is_ok_and(|text| text.contains("\"move\"")).then_some(())
    });
    pair.run(&pair.here, &pair.there, &[]).status(1).prints(&["`move`"]);
    guest.rekindle(&["stop"]).status(1).prints(&["`move`"]);
    fs::write(&gate, "on\n").unwrap();
    pair.here.wait(first, "move".into()).ok();
    wait_empty(&pair.here);
    pair.guest(&pair.there).wait_ready();
    pair.run(&pair.here, &pair.there, &[]).status(1).prints(&["there is no VM once"]);
    pair.there.rekindle(["stop", "--now", "once"]).ok();
    // A disk that QEMU itself writes.
    let section = format!("[[disk]]\npath = {:?}\nserver = false\n", pair.disk);
    let plain = pair.here.vm("once").section(&section).net(common::Net::None).write();
    fs::remove_dir_all(format!("{}.redo", pair.disk.display())).unwrap();
    pair.here.rekindle(["run", plain.to_str().unwrap()]).ok();
    pair.run(&pair.here, &pair.there, &[]).status(1).prints(&["disk0", "server = true"]);
}

#[test]
fn a_line_that_breaks_at_the_word_is_decided_by_the_store_and_not_without_it() {
    let pair = Pair::new("cut");
    let guest = pair.boot();
    guest.touch("8M");
    let script = fs::read_to_string(pair.there.path("ssh")).unwrap();
    // What is said goes through a pipe, which breaks when the word comes.
    let breaks = |and: &str| {
        let passes = format!(
            "{{ while IFS= read -r line; do case $line in *'{{\"go\"'*) {and} exit 0;; esac; printf '%s\\n' \"$line\"; done; }} | REKINDLE"
        );
        fs::write(pair.there.path("ssh"), script.replace("\nREKINDLE", &format!("\n{passes}"))).unwrap();
    };
    breaks("");
    let done = pair.run(&pair.here, &pair.there, &[]).status(1);
    done.prints(&["has not taken cut", "goes on here after all", "the line to b has broken"]);
    guest.verify();
    agrees(&guest);
    guest.assert_sound();
    wait_empty(&pair.there);
    // And the store with it.
    let away = pair.here.path("store-away");
    breaks(&format!("mv {:?} {away:?};", pair.store));
    let refused = ["cannot be known whether b has taken cut", "rekindle recover cut"];
    pair.run(&pair.here, &pair.there, &[]).status(3).prints(&refused);
    wait_empty(&pair.there);
    let stopped = || {
        let [qemu] = guest.qemus().try_into().expect("one QEMU");
        assert_eq!(qemu.run_state().as_deref(), Some("paused"));
        assert_eq!(guest.status(), "needs-recovery");
    };
    stopped();
    guest.rekindle(&["recover"]).status(3).prints(&refused);
    guest.rekindle(&["protect", "--store", pair.store.to_str().unwrap()]).status(1);
    pair.run(&pair.here, &pair.there, &[]).status(1).prints(&["rekindle recover cut"]);
    stopped();
    let _ = fs::remove_dir_all(&pair.store);
    fs::rename(&away, &pair.store).unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["undone"]);
    guest.verify();
    agrees(&guest);
    guest.assert_sound();
    // Whatever was left: it can be moved as ever.
    fs::write(pair.there.path("ssh"), &script).unwrap();
    pair.run(&pair.here, &pair.there, &[]).ok();
    wait_empty(&pair.here);
    pair.guest(&pair.there).verify();
}
