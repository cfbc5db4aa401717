//! `rekindle ocf`: what the resource agent has done, on one host that is every node in turn.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::protector::{Protector, store};
use common::served::{image, section};
use common::vm::Vm;
use common::{CommandResult, DEADLINE, Guest, Lab, wait_for};
use rekindle_kernel::process::Process;
use rekindle_qemu::qmp::Qmp;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

fn signal(process: Process, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(process.pid).unwrap()).unwrap(), signal).unwrap();
}

fn is_stopped(process: Process) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid)).unwrap();
    stat.rsplit(')').next().unwrap().trim_start().starts_with('T')
}

struct Resource<'a> {
    lab: &'a Lab,
    guest: Guest<'a>,
    definition: PathBuf,
    store: PathBuf,
    settings: &'static [&'static str],
}

impl<'a> Resource<'a> {
    fn new(lab: &'a Lab) -> Self {
        Self::of(lab, lab.vm("web").memory("96M").key("probe = \"tcp://10.79.1.2:7\""), &[])
    }

    fn of(lab: &'a Lab, vm: Vm<'a>, settings: &'static [&'static str]) -> Self {
        Self { lab, definition: vm.write(), guest: vm.guest(), store: store(lab, "web"), settings }
    }

    fn command(&self, action: &str, arguments: &[&str]) -> Command {
        let (definition, store) = (self.definition.to_str().unwrap(), self.store.to_str().unwrap());
        let first = ["--json", "ocf", action, "web", "--definition", definition, "--store", store, "--every", "200ms"];
        self.lab.command(first.iter().chain(self.settings).chain(arguments))
    }

    /// Told for people.
    fn plain(&self, action: &str, arguments: &[&str]) -> Command {
        let (definition, store) = (self.definition.to_str().unwrap(), self.store.to_str().unwrap());
        let first = ["ocf", action, "web", "--definition", definition, "--store", store];
        self.lab.command(first.iter().chain(arguments))
    }

    fn ocf(&self, action: &str, arguments: &[&str]) -> CommandResult {
        self.lab.finish(self.command(action, arguments))
    }

    /// The same while QEMU answers nobody, and so cannot be asked for a picture of the scene.
    fn ocf_unseen(&self, action: &str, arguments: &[&str]) -> (Option<i32>, String) {
        let output = self.command(action, arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Stops the protector by a signal while its guest runs: one that is stopped in the pause of a checkpoint keeps the guest stopped.
    fn freeze(&self, protector: Process) {
        wait_for("the protector to be stopped outside of a pause", DEADLINE, || {
            signal(protector, Signal::STOP);
            wait_for("the protector to be stopped", DEADLINE, || is_stopped(protector).then_some(()));
            let is_outside = !self.guest.file("paused").exists();
            if !is_outside {
                signal(protector, Signal::CONT);
            }
            is_outside.then_some(())
        });
    }

    #[track_caller]
    fn start(&self) -> Value {
        let started = self.ocf("start", &[]).ok().json();
        self.monitor(0);
        self.guest.wait_ready();
        started
    }

    #[track_caller]
    fn monitor(&self, code: i32) -> CommandResult {
        self.ocf("monitor", &["--within", "10s"]).status(code)
    }

    fn newest(&self) -> u64 {
        let listed = self.lab.rekindle(["--json", "store", "ls", self.store.to_str().unwrap()]).ok().json();
        let last =
            listed["checkpoints"].as_array().and_then(|all| all.last()).map(|one| one["number"].as_u64().unwrap());
        last.unwrap_or(0)
    }

    /// So many checkpoints from now on.
    fn wait_checkpoints(&self, count: u64) {
        let wanted = self.newest() + count;
        wait_for("checkpoints", DEADLINE, || (self.newest() >= wanted).then_some(()));
    }

    fn protector(&self) -> Process {
        let text = fs::read(self.guest.file("protector.json")).unwrap();
        let noted: Value = serde_json::from_slice(&text).unwrap();
        let number = |key: &str| noted[key].as_u64().unwrap();
        Process { pid: u32::try_from(number("pid")).unwrap(), started: number("started") }
    }
}

#[test]
fn a_vm_goes_on_after_a_crash_and_after_a_stop_and_is_booted_after_a_shutdown() {
    let lab = Lab::new();
    let web = Resource::new(&lab);
    web.monitor(7);
    web.ocf("stop", &[]).ok();
    assert_eq!(web.start()["started"], "booted");
    assert_eq!(web.start()["started"], "already");
    let boot = web.guest.boot_id();
    web.ocf("monitor", &["--deep"]).ok();
    web.wait_checkpoints(2);

    // A crash: its QEMU ends by itself.
    let tick = web.guest.tick();
    web.guest.only_qemu().process.kill().unwrap();
    wait_for("that to be seen", DEADLINE, || (web.ocf("monitor", &[]).code == Some(7)).then_some(()));
    web.ocf("stop", &[]).ok();
    assert_eq!(web.start()["started"], "restored");
    assert_eq!(web.guest.boot_id(), boot, "it goes on");
    assert!(web.guest.tick() + 500 > tick, "it has lost more than the interval by far");
    web.wait_checkpoints(1);

    // A stop: a last checkpoint.
    let before = web.newest();
    assert_eq!(web.ocf("stop", &[]).ok().json()["lost"], Value::Null);
    assert!(web.newest() > before);
    web.monitor(7);
    assert!(!web.guest.file("").exists());
    assert_eq!(web.start()["started"], "restored");
    assert_eq!(web.guest.boot_id(), boot);
    web.wait_checkpoints(1);

    // It is shut down: no checkpoint is of it any more.
    assert_eq!(web.ocf("stop", &["--how", "shutdown"]).ok().json()["how"], "shut-down");
    let started = web.start();
    assert_eq!((&started["started"], &started["why"]), (&"booted".into(), &"it was shut down cleanly".into()));
    let second = web.guest.boot_id();
    assert_ne!(second, boot);
    web.wait_checkpoints(1);

    // It shuts itself down.
    web.guest.send("poweroff");
    wait_for("that to be seen", DEADLINE, || (web.ocf("monitor", &[]).code == Some(7)).then_some(()));
    web.ocf("stop", &[]).ok();
    assert_eq!(web.start()["started"], "booted");
    assert_ne!(web.guest.boot_id(), second);
    web.ocf("stop", &[]).ok();
    lab.assert_empty();
}

#[test]
fn a_protector_that_has_died_is_seen_to_and_a_guest_that_hangs_is_stopped_in_time() {
    let lab = Lab::new();
    let web = Resource::new(&lab);
    web.start();
    web.wait_checkpoints(1);
    let first = web.protector();
    first.kill().unwrap();
    first.wait_end(DEADLINE).unwrap();
    web.monitor(0);
    assert_ne!(web.protector(), first);
    web.wait_checkpoints(2);

    // The store is away for a while: neither the guest nor its resource minds.
    let away = web.store.with_extension("away");
    fs::rename(&web.store, &away).unwrap();
    let tick = web.guest.tick();
    web.monitor(0);
    wait_for("the guest to go on", DEADLINE, || (web.guest.tick() > tick + 20).then_some(()));
    fs::rename(&away, &web.store).unwrap();
    web.wait_checkpoints(2);

    // Its QEMU answers nobody.
    let qemu = web.guest.only_qemu().process;
    signal(qemu, Signal::STOP);
    let (code, said) = web.ocf_unseen("monitor", &["--within", "2s"]);
    assert_eq!(code, Some(1), "{said}");
    let (code, said) = web.ocf_unseen("start", &["--within", "20s"]);
    assert!(qemu.is_alive(), "{code:?}: {said}");
    assert!(code != Some(0) && said.contains("does not answer"), "{code:?}: {said}");
    let (code, said) = web.ocf_unseen("stop", &["--within", "5s"]);
    assert!(!qemu.is_alive(), "{code:?}: {said}");
    assert!(code == Some(0) && said.contains("does not answer"), "{code:?}: {said}");
    assert!(common::with_argument_containing(lab.run_root().to_str().unwrap()).unwrap().is_empty());
    assert_eq!(web.start()["started"], "restored");
}

#[test]
fn a_guest_with_a_served_disk_that_powers_itself_off_is_booted_and_not_gone_back_behind() {
    let lab = Lab::new();
    let web = Resource::of(&lab, lab.vm("web").memory("96M").section(&section(&image(&lab, "disk"), "")), &[]);
    web.start();
    web.wait_checkpoints(2);
    // That its system is rebooted is no end of it.
    let (boot, protector) = (web.guest.boot_id(), web.protector());
    web.guest.rekindle(&["reboot", "os", "--how", "cold"]).ok();
    web.guest.wait_ready();
    assert_ne!(web.guest.boot_id(), boot);
    web.monitor(0);
    web.wait_checkpoints(2);
    assert!(protector.is_alive(), "it has followed the guest");
    let boot = web.guest.boot_id();
    // Who waits for its reboots ends its QEMU, before the next monitor looks.
    web.guest.send("poweroff");
    wait_for("its QEMU to end", DEADLINE, || web.guest.qemus().is_empty().then_some(()));
    web.monitor(7);
    web.ocf("stop", &[]).ok();
    let started = web.start();
    assert_eq!((&started["started"], &started["why"]), (&"booted".into(), &"it was shut down cleanly".into()));
    assert_ne!(web.guest.boot_id(), boot);
    web.ocf("stop", &[]).ok();
    lab.assert_empty();
}

#[test]
fn a_guest_that_a_killed_protector_left_stopped_is_let_go_by_the_next_look_at_it() {
    let lab = Lab::new();
    let web = Resource::new(&lab);
    web.start();
    web.wait_checkpoints(1);
    let first = web.protector();
    // As in a pause of its.
    web.freeze(first);
    fs::write(web.guest.file("paused"), []).unwrap();
    let path = web.guest.only_qemu().directory.join("watch.sock");
    Qmp::connect(&path, DEADLINE).unwrap().execute::<Value>("stop", ()).unwrap();
    first.kill().unwrap();
    first.wait_end(DEADLINE).unwrap();
    assert!(web.guest.status().contains("paused"));
    web.monitor(0);
    assert_ne!(web.protector(), first);
    let tick = web.guest.tick();
    wait_for("the guest to go on", DEADLINE, || (web.guest.tick() > tick).then_some(()));
    web.ocf("stop", &[]).ok();
}

#[test]
fn a_guest_of_which_no_checkpoint_can_be_taken_is_not_left_running_and_that_is_said() {
    let lab = Lab::new();
    // QEMU writes it itself.
    let disk = image(&lab, "disk");
    let section = format!("[[disk]]\npath = {disk:?}\nserver = false\n");
    let web = Resource::of(&lab, lab.vm("web").memory("96M").section(&section), &[]);
    web.ocf("start", &[]).status(1).prints(&["no checkpoints can be taken of it", "disk"]);
    assert!(web.guest.qemus().is_empty());
    web.monitor(7);
    lab.assert_empty();
}

#[test]
fn a_guest_whose_output_is_held_can_use_its_network_while_it_shuts_down() {
    let lab = Lab::new();
    let web =
        Resource::of(&lab, lab.vm("web").memory("96M").key("probe = \"tcp://10.79.1.2:7\""), &["--output-commit"]);
    web.start();
    web.wait_checkpoints(2);
    let boot = web.guest.boot_id();
    web.ocf("monitor", &["--deep", "--within", "20s"]).ok();
    // Its store is away: an answer is held until it is back, and the guest is not to blame.
    let away = web.store.with_extension("away");
    fs::rename(&web.store, &away).unwrap();
    web.ocf("monitor", &["--deep", "--within", "20s"]).ok().prints(&["too few checkpoints"]);
    fs::rename(&away, &web.store).unwrap();
    web.wait_checkpoints(2);
    let protector = web.protector();
    let console = web.guest.file("console.log");
    let stop = web.command("stop", &["--how", "shutdown", "--within", "60s"]);
    web.lab.finish(stop).ok();
    assert!(!protector.is_alive() && !console.exists());
    let started = web.start();
    assert_eq!((&started["started"], &started["why"]), (&"booted".into(), &"it was shut down cleanly".into()));
    assert_ne!(web.guest.boot_id(), boot);
    web.ocf("stop", &[]).ok();
}

#[test]
fn a_guest_that_does_not_shut_down_is_protected_meanwhile_and_goes_on_from_a_last_checkpoint() {
    let lab = Lab::new();
    let web = Resource::of(&lab, lab.vm("web").memory("96M").append("rekindle.ignore_power=1"), &[]);
    web.start();
    web.wait_checkpoints(1);
    let (boot, before, protector) = (web.guest.boot_id(), web.newest(), web.protector());
    let stop = web.command("stop", &["--how", "shutdown", "--within", "20s"]).stdout(Stdio::piped()).spawn().unwrap();
    web.wait_checkpoints(3);
    let tick = web.guest.tick();
    assert!(protector.is_alive(), "its clients are served still");
    let stopped = web.lab.wait(stop, "stop".into()).ok().json();
    assert_eq!((&stopped["how"], &stopped["lost"]), (&"suspend".into(), &Value::Null));
    assert!(web.newest() > before + 3);
    assert_eq!(web.start()["started"], "restored");
    assert_eq!(web.guest.boot_id(), boot);
    assert!(web.guest.tick() > tick, "nothing that a client has seen is taken back");
    web.ocf("stop", &[]).ok();
    lab.assert_empty();
}

#[test]
fn an_operation_that_does_not_end_is_ended_by_a_stop_and_starts_nothing_later() {
    let lab = Lab::new();
    let web = Resource::new(&lab);
    web.start();
    web.wait_checkpoints(1);
    let mut reboot = lab.command(["reboot", "os", "web", "--how", "cold"]);
    let mut reboot = reboot.env("REKINDLE_FAULT", "cold.suspend.off:stop").spawn().unwrap();
    wait_for("its QEMU to end", DEADLINE, || web.guest.qemus().is_empty().then_some(()));
    web.ocf("stop", &["--within", "60s"]).ok().prints(&["is killed"]);
    assert!(!reboot.wait().unwrap().success());
    web.monitor(7);
    lab.assert_empty();
    assert_eq!(web.start()["started"], "restored");
    web.ocf("stop", &[]).ok();
}

#[test]
fn a_store_that_is_away_is_waited_for_by_a_start_and_nothing_is_booted_in_its_place() {
    let lab = Lab::new();
    let mut web = Resource::of(&lab, lab.vm("web").memory("96M").section(&section(&image(&lab, "disk"), "")), &[]);
    let share = lab.path("share");
    fs::create_dir(&share).unwrap();
    web.store = share.join("web");
    web.ocf("start", &["--within", "2s"]).status(1).prints(&["rekindle store init"]);
    assert!(!web.store.exists() && web.guest.qemus().is_empty(), "a store or a guest was made");
    lab.rekindle(["store", "init", web.store.to_str().unwrap()]).ok();
    web.start();
    web.wait_checkpoints(2);
    let boot = web.guest.boot_id();
    web.guest.only_qemu().process.kill().unwrap();
    wait_for("that to be seen", DEADLINE, || (web.ocf("monitor", &[]).code == Some(7)).then_some(()));
    web.ocf("stop", &[]).ok();

    // Its file system is not mounted, and its mount point is there.
    let away = lab.path("away");
    fs::rename(&web.store, &away).unwrap();
    web.ocf("start", &[]).status(1).prints(&["is not a store", "is the shared storage mounted on this node?"]);
    assert!(!web.store.exists(), "no other store is made");
    assert!(web.guest.qemus().is_empty(), "it was booted");

    // Its mount point is not there, for a while.
    fs::remove_dir(&share).unwrap();
    let said = lab.path("said");
    let mut start = web.command("start", &["--within", "60s"]);
    let start = start.stdout(Stdio::piped()).stderr(fs::File::create(&said).unwrap()).spawn().unwrap();
    wait_for("the store to be asked again", DEADLINE, || {
        fs::read_to_string(&said).unwrap().contains("retrying").then_some(())
    });
    fs::create_dir(lab.path("share2")).unwrap();
    fs::rename(&away, lab.path("share2").join("web")).unwrap();
    fs::rename(lab.path("share2"), &share).unwrap();
    let started = web.lab.wait(start, "start".into()).ok().json();
    assert_eq!(started["started"], "restored");
    web.guest.wait_ready();
    assert_eq!(web.guest.boot_id(), boot);
    web.ocf("stop", &[]).ok();
}

#[test]
fn a_guest_of_which_no_checkpoint_is_committed_any_more_is_degraded() {
    let lab = Lab::new();
    let web = Resource::new(&lab);
    web.start();
    web.wait_checkpoints(1);
    let protector = web.protector();
    web.freeze(protector);
    let path = web.guest.file("protect.json");
    let mut progress: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let at = progress["committed_at_ms"].as_u64().unwrap();
    web.monitor(0);
    // As if that had been longer ago.
    progress["committed_at_ms"] = at.saturating_sub(3_600_000).into();
    fs::write(&path, progress.to_string()).unwrap();
    web.monitor(190).prints(&["no checkpoint of it was committed"]);
    signal(protector, Signal::CONT);
    web.wait_checkpoints(1);
    web.monitor(0);
    web.ocf("stop", &[]).ok();
}

#[test]
fn checkpoints_that_another_protector_takes_are_enough_and_it_is_ended_by_a_stop() {
    let lab = Lab::new();
    let web = Resource::new(&lab);
    web.start();
    web.wait_checkpoints(1);
    let first = web.protector();
    first.terminate().unwrap();
    first.wait_end(DEADLINE).unwrap();
    let mut other = Protector::start(&web.guest, &lab, &web.store, &["--every", "100ms"]);
    other.next_checkpoint();
    web.monitor(0);
    assert_eq!(web.protector(), first, "no other one is started");
    let before = web.newest();
    assert_eq!(web.ocf("stop", &[]).ok().json()["lost"], Value::Null);
    assert!(web.newest() > before);
    other.end();
    lab.assert_empty();
}

#[test]
fn a_guest_that_reboots_itself_runs_for_whoever_looks_meanwhile() {
    let lab = Lab::new();
    let vm = lab.vm("web").memory("96M").key("on_reboot = \"warm-cache\"");
    let web = Resource::of(&lab, vm.section(&section(&image(&lab, "disk"), "")), &[]);
    web.start();
    web.wait_checkpoints(1);
    let boot = web.guest.boot_id();
    web.guest.send("reboot");
    // Until another boot answers: nobody who looks is told that it does not run.
    wait_for("it to be up again", DEADLINE, || {
        web.ocf("monitor", &["--within", "60s"]).ok();
        web.guest.try_ask("boot_id").is_ok_and(|id| !id.is_empty() && id.trim() != boot).then_some(())
    });
    web.ocf("stop", &[]).ok();
}

#[test]
fn lines_for_the_cluster_come_from_the_definition() {
    let lab = Lab::new();
    let web = Resource::new(&lab);
    let text = web.lab.rekindle([
        "ocf",
        "show-config",
        "web",
        "--definition",
        web.definition.to_str().unwrap(),
        "--store",
        "tls://store:7001/web",
        "--cert",
        "/c.pem",
        "--key",
        "/k.pem",
        "--ca",
        "/ca.pem",
    ]);
    text.ok().prints(&[
        "ocf:rekindle:vm",
        "utilization memory=96 vcpus=1",
        "cert=/c.pem key=/k.pem ca=/ca.pem every=2s",
    ]);
    // What was asked for is not left out of what is pasted.
    let all = ["--output-commit", "--keep", "3", "--policy", "basic", "--disk", "crash-consistent"];
    web.lab.finish(web.plain("show-config", &all)).ok().prints(&[
        "keep=3",
        "policy=basic",
        "disk=crash-consistent",
        "output_commit=true",
        "failure-timeout=60s",
        "start-failure-is-fatal=false",
    ]);
    let utilization = web.ocf("show-config", &[]).ok().json();
    assert_eq!((&utilization["memory"], &utilization["vcpus"]), (&96.into(), &1.into()));
}
