//! `rekindle move` between two hosts that share a store and disk images. Each host is a lab with its own run, RAM and
//! configuration directories and its own network namespace. A script in place of `ssh` runs the other host's Rekindle.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod deaths;
mod forced_command;
mod managed;

use common::protector::{Protector, pager};
use common::served::{image, read, section};
use common::vm::Vm;
use common::{CommandResult, DEADLINE, Guest, Lab, Watch, observe, qemu_new, qemu_old, wait_for};
use rekindle_kernel::process::Process;
use rekindle_testing::process::attached_queues;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Number of blocks, at the start of the disk, that the guest writes.
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
        Self::of(name, |vm| vm)
    }

    /// `adapt` changes the definition of the guest.
    fn of(name: &'static str, adapt: impl for<'a> Fn(Vm<'a>) -> Vm<'a>) -> Self {
        let (here, there) = (Lab::new(), Lab::new());
        let (disk, store) = (image(&here, "disk.raw"), here.path("store"));
        for lab in [&here, &there] {
            adapt(lab.vm(name)).section(&section(&disk, "")).write();
            lab.write_ssh("");
        }
        let pair = Self { here, there, name, disk, store };
        pair.new_store();
        pair
    }

    /// Replaces the store with an empty one.
    fn new_store(&self) {
        let _ = fs::remove_dir_all(&self.store);
        self.here.rekindle(["store", "init", self.store.to_str().unwrap()]).ok();
    }

    /// Returns the guest as a VM of `lab`.
    fn guest<'a>(&self, lab: &'a Lab) -> Guest<'a> {
        common::first_guest(lab, self.name)
    }

    /// Asserts that the guest has left `from` and runs in `to`: the same boot, no earlier than at `tick`, with its memory and
    /// its disk.
    #[track_caller]
    fn assert_moved(&self, from: &Lab, to: &Lab, boot: &str, tick: u64) {
        wait_empty(from);
        let guest = self.guest(to);
        guest.wait_ready();
        assert_eq!(guest.boot_id(), boot);
        assert!(guest.tick() >= tick);
        assert_cache_matches_disk(&guest);
        wait_filled(&guest);
        guest.verify();
        guest.assert_sound();
    }

    fn boot(&self) -> Guest<'_> {
        self.boot_in(qemu_new())
    }

    fn boot_in(&self, qemu: &Path) -> Guest<'_> {
        let definition = self.here.path(&format!("{}.toml", self.name));
        self.here.rekindle(["run", definition.to_str().unwrap(), "--qemu", qemu.to_str().unwrap()]).ok();
        let guest = self.guest(&self.here);
        guest.wait_ready();
        guest
    }

    /// Returns the command `rekindle move` from one lab to another, not started.
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

/// Returns the last line of a command's output, as JSON.
fn last(done: &CommandResult) -> Value {
    let line = done.stdout.lines().last().unwrap_or_else(|| panic!("no output: {done}"));
    serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {done}"))
}

/// Asserts that the guest's page cache and its disk have the same content.
fn assert_cache_matches_disk(guest: &Guest<'_>) {
    let cached = read(guest, 0, WRITTEN);
    guest.ask("drop-caches");
    assert_eq!(read(guest, 0, WRITTEN), cached, "the guest's page cache differs from its disk");
}

/// Waits until signalled processes have ended, and the VM has left nothing on the host.
fn wait_empty(lab: &Lab) {
    wait_for("the VM to be removed", DEADLINE, || {
        let names = common::lab::entries(&lab.run_root());
        let vms = names.iter().filter(|path| !path.file_name().unwrap().to_string_lossy().starts_with('.')).count();
        (vms == 0 && observe::qemus(&lab.run_root()).is_empty()).then_some(())
    });
    lab.assert_empty();
}

fn wait_filled(guest: &Guest<'_>) {
    let fill = guest.file("fill.json");
    wait_for("the fill to finish", DEADLINE, || (!fill.exists()).then_some(()));
}

#[test]
fn a_restore_does_not_use_a_qemu_whose_memory_a_killed_move_has_registered() {
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
fn a_guest_moves_to_another_host_and_back() {
    let pair = Pair::new("moves");
    let guest = pair.boot();
    guest.touch("24M");
    let boot = guest.boot_id();
    let mut protector = Protector::start(&guest, &pair.here, &pair.store, &["--every", "100ms"]);
    protector.next_checkpoint();
    // A dry run checks both hosts and changes nothing.
    let pid = guest.single_qemu().process.pid;
    let planned = pair.run(&pair.here, &pair.there, &["--dry-run"]).ok().json();
    assert_eq!(planned["vms"][0]["would"], "move its guest to b", "{planned}");
    assert_eq!(guest.single_qemu().process.pid, pid);
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
        // The second move may start during the fill; pages that are still missing are in the store.
        let filling = before.file("fill.json").exists();
        let moved = last(&pair.run(from, to, &[]).ok());
        assert_eq!((&moved["name"], &moved["host"]), (&"moves".into(), &"b".into()));
        assert_eq!(moved["there"]["prepared"], true, "{moved}");
        assert_eq!(
            moved["there"]["ahead"], true,
            "it was not loaded during the commit of its last checkpoint: {moved}"
        );
        assert!(moved["rounds"].as_array().unwrap().len() >= 2, "{moved}");
        assert!(moved["stopped_us"].as_u64().unwrap() > 0, "{moved}");
        assert_eq!(moved["protector"].is_u64(), round == 0, "{moved}");
        wait_empty(from);
        let guest = pair.guest(to);
        guest.wait_ready();
        assert_eq!(guest.boot_id(), boot, "the guest was booted");
        assert!(guest.tick() >= tick, "the guest lost ticks; the move began during a fill: {filling}");
        assert_cache_matches_disk(&guest);
        guest.verify();
    }
    watch.end();
    assert!(protector.child.wait().unwrap().success(), "the protector of the first host failed");
    let guest = pair.guest(&pair.there);
    wait_filled(&guest);
    wait_for("the pager to end", DEADLINE, || pager(&guest).is_none().then_some(()));
    guest.verify();
    guest.assert_sound();
    // The guest can be protected on the other host.
    let mut protector = Protector::start(&guest, &pair.there, &pair.store, &["--every", "100ms"]);
    protector.next_checkpoint();
    protector.end();
}

#[test]
fn a_guest_moves_through_an_encrypted_store_with_a_key_file_of_both_hosts() {
    let pair = Pair::new("secret");
    let guest = pair.boot();
    let boot = guest.boot_id();
    let key = pair.here.path("store.key");
    let key = key.to_str().unwrap();
    pair.here.rekindle(["store", "new-key", key]).ok();
    let command = pair.run(&pair.here, &pair.there, &["--key-command", "cat key", "--dry-run"]);
    command.status(1).prints(&["cannot use a key command", "--key-file FILE"]);
    last(&pair.run(&pair.here, &pair.there, &["--key-file", key]).ok());
    let moved = pair.guest(&pair.there);
    moved.wait_ready();
    assert_eq!(moved.boot_id(), boot);
    wait_filled(&moved);
    pair.here.rekindle(["store", "verify", pair.store.to_str().unwrap(), "--key-file", key]).ok();
    // Both hosts know that the store is encrypted.
    for host in [&pair.here, &pair.there] {
        let plain = ["restore", pair.name, "--store", pair.store.to_str().unwrap()];
        host.rekindle(plain).status(1).prints(&["no key was given"]);
    }
    moved.assert_sound();
}

#[test]
fn a_guest_moves_with_the_queues_of_its_card() {
    let pair = Pair::of("queues", |vm| vm.queues());
    let guest = pair.boot();
    guest.touch("24M");
    let boot = guest.boot_id();
    for (from, to) in [(&pair.here, &pair.there), (&pair.there, &pair.here)] {
        assert_eq!(attached_queues(pair.guest(from).single_qemu().process), [true, true, false]);
        last(&pair.run(from, to, &[]).ok());
        wait_empty(from);
        let guest = pair.guest(to);
        guest.wait_ready();
        assert_eq!(guest.boot_id(), boot);
        guest.verify();
    }
    assert_eq!(attached_queues(pair.guest(&pair.here).single_qemu().process), [true, true, false]);
}

#[test]
fn a_move_waits_for_the_pager_of_the_move_before_it() {
    let pair = Pair::new("soon");
    pair.boot().touch("24M");
    // The pager stops when it is about to end: its record of written pages cannot be used any more.
    let mut first = pair.command(&pair.here, &pair.there, &[]);
    first.env("FAR_FAULT", "fill.end.locked:stop");
    pair.here.finish(first).ok();
    let guest = pair.guest(&pair.there);
    let pager = wait_for("the pager to stop", DEADLINE, || pager(&guest).filter(Process::is_stopped));

    let mut child = pair.command(&pair.there, &pair.here, &[]).spawn().unwrap();
    let mut events = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let waits = events.find(|event| event.contains("\"event\":\"waits\""));
    let why = waits.expect("the move did not wait");
    assert!(why.contains("its memory is still being loaded from a checkpoint"), "{why}");
    pager.resume().unwrap();
    events.for_each(drop);
    assert!(child.wait().unwrap().success(), "the move failed");
    wait_empty(&pair.there);
    let guest = pair.guest(&pair.here);
    guest.wait_ready();
    guest.verify();
    guest.assert_sound();
}

#[test]
fn a_guest_does_not_run_from_loaded_state_that_differs_from_the_checkpoint() {
    let pair = Pair::new("altered");
    pair.boot().touch("24M");
    let boot = pair.guest(&pair.here).boot_id();
    let mut altered = 0;
    for (n, what) in ["devices", "content", "devices", "content"].into_iter().enumerate() {
        let (from, to) = if n % 2 == 0 { (&pair.here, &pair.there) } else { (&pair.there, &pair.here) };
        let script = fs::read_to_string(to.path("ssh")).unwrap();
        let tick = pair.guest(from).tick();
        // The messages to the other host go through a pipe that alters a few bits.
        let mark = to.path("altered");
        let text = |is: &str, becomes: &str| {
            format!("s/\"{what}\":\"\\(.\\{{200\\}}\\){is}/\"{what}\":\"\\1{becomes}/w {}", mark.display())
        };
        let sed = format!("sed -u -e '{}' -e t -e '{}'", text("B", "C"), text("[A-Za-z0-9+\\/]", "B"));
        fs::write(to.path("ssh"), script.replace("\nREKINDLE", &format!("\n{sed} | REKINDLE"))).unwrap();
        let moved = last(&pair.run(from, to, &[]).ok());
        fs::write(to.path("ssh"), script).unwrap();
        let is_altered = fs::read(&mark).is_ok_and(|line| !line.is_empty());
        let destination = &moved["there"];
        assert_eq!(destination["ahead"], !is_altered, "{moved}");
        if is_altered {
            altered += 1;
            assert!(
                destination["unused"].as_str().unwrap().contains("differs from what the source host sent"),
                "{moved}"
            );
        }
        pair.assert_moved(from, to, &boot, tick);
    }
    assert!(altered >= 2, "too few messages were altered on the way");
}

#[test]
fn what_the_other_host_cannot_run_is_reported_before_anything_stops() {
    let pair = Pair::new("stays");
    let guest = pair.boot();
    guest.touch("8M");
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let rejects = |arguments: &[&str], words: &[&str]| {
        let tick = guest.tick();
        pair.run(&pair.here, &pair.there, arguments).status(1).prints(&["b cannot take stays"]).prints(words);
        assert!(guest.tick() >= tick);
        guest.assert_sound();
        wait_empty(&pair.there);
    };
    // Rejected: another memory size, no definition, and no QEMU.
    let kept = pair.there.path("other.toml");
    let define_other = |memory: &str, disk: &Path| {
        fs::rename(pair.there.vm("stays").memory(memory).section(&section(disk, "")).write(), &kept).unwrap();
        pair.there.vm("stays").section(&section(&pair.disk, "")).write();
    };
    define_other("160M", &pair.disk);
    rejects(&["--definition", &path(&kept)], &["memory in bytes"]);
    rejects(&["--definition", "/nonexistent/vm.toml"], &["/nonexistent/vm.toml"]);
    rejects(&["--qemu", "/nonexistent/qemu"], &["/nonexistent/qemu"]);
    // Rejected: the disk image is missing, or is another one.
    define_other("128M", &pair.there.path("nowhere.raw"));
    rejects(&["--definition", &path(&kept)], &["nowhere.raw"]);
    define_other("128M", &image(&pair.there, "other.raw"));
    rejects(&["--definition", &path(&kept)], &["disk0", "another disk than the guest's"]);
    // Rejected: no room for the guest's RAM.
    pair.there.configure_host("ram_size = \"64M\"");
    rejects(&[], &["128"]);
    pair.there.configure_host("");
    // At the store's path, the other host has another directory.
    let script = fs::read_to_string(pair.there.path("ssh")).unwrap();
    let hidden = script.replace(
        "exec sh -c",
        &format!("exec unshare -m sh -c 'mount -t tmpfs none {:?} && exec sh -c \"$0\"'", pair.store),
    );
    fs::write(pair.there.path("ssh"), hidden).unwrap();
    rejects(&[], &["not a store"]);
    fs::write(pair.there.path("ssh"), &script).unwrap();
    // Rejected: the other host has a VM of that name.
    define_other("128M", &pair.disk);
    let plain = pair.there.vm("stays").net(common::Net::None).write();
    pair.there.rekindle(["run", plain.to_str().unwrap()]).ok();
    let moved = pair.run(&pair.here, &pair.there, &["--definition", &path(&kept)]);
    moved.status(1).prints(&["b cannot take stays", "runs already"]);
    guest.assert_sound();
    pair.there.rekindle(["stop", "--now", "stays"]).ok();
    // Another program answers, or the connection fails.
    fs::write(pair.there.path("ssh"), "#!/bin/sh\nread -r asked; echo 'Welcome to b!'\n").unwrap();
    pair.run(&pair.here, &pair.there, &[]).status(1).prints(&["Welcome to b!", "not an answer of Rekindle"]);
    fs::write(pair.there.path("ssh"), "#!/bin/sh\nexit 255\n").unwrap();
    pair.run(&pair.here, &pair.there, &[]).status(1).prints(&["the connection to b has broken"]);
    guest.verify();
    guest.assert_sound();
}

#[test]
fn only_one_move_runs_at_a_time_and_a_disk_without_a_server_is_rejected() {
    let pair = Pair::new("once");
    let guest = pair.boot();
    // The first move waits for the other host, which waits for a line from a pipe.
    let script = fs::read_to_string(pair.there.path("ssh")).unwrap();
    let gate = pair.there.path("gate");
    let made = Command::new("mkfifo").arg(&gate).status().unwrap();
    assert!(made.success());
    fs::write(pair.there.path("ssh"), script.replace("\nshift\n", &format!("\nshift\nread line < {gate:?}\n")))
        .unwrap();
    let first = pair.command(&pair.here, &pair.there, &[]).spawn().unwrap();
    wait_for("the first move to lock the VM", DEADLINE, || {
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
    // QEMU writes the disk without a disk server.
    let section = format!("[[disk]]\npath = {:?}\nserver = false\n", pair.disk);
    let plain = pair.here.vm("once").section(&section).net(common::Net::None).write();
    fs::remove_dir_all(format!("{}.redo", pair.disk.display())).unwrap();
    pair.here.rekindle(["run", plain.to_str().unwrap()]).ok();
    pair.run(&pair.here, &pair.there, &[]).status(1).prints(&["disk0", "server = true"]);
}

#[test]
fn after_a_connection_breaks_at_the_order_to_resume_the_store_decides_where_the_guest_runs() {
    let pair = Pair::new("decided");
    // An old QEMU does not use a disk again whose server ended while the guest was stopped: it is replaced.
    let guest = pair.boot_in(qemu_old());
    let first_qemu = guest.only_qemu().process.pid;
    guest.touch("8M");
    let script = fs::read_to_string(pair.there.path("ssh")).unwrap();
    // The messages to the other host go through a pipe, which breaks at the order to resume.
    let breaks = |and: &str| {
        let passes = format!(
            "{{ while IFS= read -r line; do case $line in *'{{\"go\"'*) {and} exit 0;; esac; printf '%s\\n' \"$line\"; done; }} | REKINDLE"
        );
        fs::write(pair.there.path("ssh"), script.replace("\nREKINDLE", &format!("\n{passes}"))).unwrap();
    };
    breaks("");
    let moved = pair.run(&pair.here, &pair.there, &[]).status(1);
    moved.prints(&["has not taken decided", "was resumed here", "the connection to b has broken"]);
    assert_ne!(guest.only_qemu().process.pid, first_qemu);
    guest.verify();
    assert_cache_matches_disk(&guest);
    guest.assert_sound();
    wait_empty(&pair.there);
    // The store becomes unavailable at the same moment.
    let away = pair.here.path("store-away");
    breaks(&format!("mv {:?} {away:?};", pair.store));
    let unknown = ["cannot determine whether b has taken decided", "rekindle recover decided"];
    pair.run(&pair.here, &pair.there, &[]).status(3).prints(&unknown);
    wait_empty(&pair.there);
    let stopped = || {
        let [qemu] = guest.qemus().try_into().expect("one QEMU");
        assert_eq!(qemu.run_state().as_deref(), Some("paused"));
        assert_eq!(guest.status(), "needs-recovery");
    };
    stopped();
    guest.rekindle(&["recover"]).status(3).prints(&unknown);
    guest.rekindle(&["protect", "--store", pair.store.to_str().unwrap()]).status(1);
    pair.run(&pair.here, &pair.there, &[]).status(1).prints(&["rekindle recover decided"]);
    stopped();
    let _ = fs::remove_dir_all(&pair.store);
    fs::rename(&away, &pair.store).unwrap();
    guest.rekindle(&["recover"]).ok().prints(&["undone"]);
    guest.verify();
    assert_cache_matches_disk(&guest);
    guest.assert_sound();
    // After the recovery the guest can be moved as usual.
    fs::write(pair.there.path("ssh"), &script).unwrap();
    pair.run(&pair.here, &pair.there, &[]).ok();
    wait_empty(&pair.here);
    pair.guest(&pair.there).verify();
}
