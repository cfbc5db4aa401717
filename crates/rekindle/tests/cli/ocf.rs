//! `rekindle ocf`: the resource agent's actions, on one host that acts as every node in turn.

use crate::common::protector::{Protector, store};
use crate::common::served::{image, section};
use crate::common::vm::Vm;
use crate::common::{CommandResult, DEADLINE, Guest, Lab, wait_for};
use rekindle_kernel::process::Process;
use rekindle_qemu::qmp::Qmp;
use rekindle_testing::object_store::{BUCKET, ObjectStoreServer};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};

fn signal(process: Process, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(process.pid).unwrap()).unwrap(), signal).unwrap();
}

fn is_stopped(process: Process) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid)).unwrap();
    stat.rsplit(')').next().unwrap().trim_start().starts_with('T')
}

/// Returns a VM whose service the monitor action checks.
fn probed(lab: &Lab) -> Vm<'_> {
    lab.vm("web").memory("96M").key("probe = \"tcp://10.79.1.2:7\"")
}

struct Resource<'a> {
    lab: &'a Lab,
    guest: Guest<'a>,
    definition: PathBuf,
    store: PathBuf,
    /// Options with which commands reach the store.
    credentials: Vec<String>,
    settings: &'static [&'static str],
}

impl<'a> Resource<'a> {
    fn new(lab: &'a Lab) -> Self {
        Self::of(lab, probed(lab), &[])
    }

    fn of(lab: &'a Lab, vm: Vm<'a>, settings: &'static [&'static str]) -> Self {
        let (store, credentials) = (store(lab, "web"), Vec::new());
        Self { lab, definition: vm.write(), guest: vm.guest(), store, credentials, settings }
    }

    /// Keeps the checkpoints in an object store.
    fn in_object_store(lab: &'a Lab, vm: Vm<'a>, server: &ObjectStoreServer) -> Self {
        let credentials = vec!["--environment-file".to_owned(), lab.write_environment_file(server)];
        let store = PathBuf::from(format!("s3://{BUCKET}/web"));
        let web = Self { store, credentials, ..Self::of(lab, vm, &[]) };
        web.store_command("init").ok();
        web
    }

    fn store_command(&self, action: &str) -> CommandResult {
        let words = ["--json", "store", action, self.store.to_str().unwrap()];
        self.lab.rekindle(words.into_iter().chain(self.credentials.iter().map(String::as_str)))
    }

    fn command(&self, action: &str, arguments: &[&str]) -> Command {
        let (definition, store) = (self.definition.to_str().unwrap(), self.store.to_str().unwrap());
        let first = ["--json", "ocf", action, "web", "--definition", definition, "--store", store, "--every", "200ms"];
        let credentials = self.credentials.iter().map(String::as_str);
        self.lab.command(first.into_iter().chain(credentials).chain(self.settings.iter().chain(arguments).copied()))
    }

    /// Returns the command without `--json`.
    fn plain(&self, action: &str, arguments: &[&str]) -> Command {
        let (definition, store) = (self.definition.to_str().unwrap(), self.store.to_str().unwrap());
        let first = ["ocf", action, "web", "--definition", definition, "--store", store];
        self.lab.command(first.iter().chain(arguments))
    }

    fn ocf(&self, action: &str, arguments: &[&str]) -> CommandResult {
        self.lab.finish(self.command(action, arguments))
    }

    /// Runs `ocf` while QEMU does not answer. A failure does not print the lab's state, which would query QEMU. Returns
    /// exit status and output.
    fn ocf_without_state_report(&self, action: &str, arguments: &[&str]) -> (Option<i32>, String) {
        let output = self.command(action, arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Stops the protector with SIGSTOP outside of a checkpoint's pause, so that its guest keeps running.
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
        let listed = self.store_command("ls").ok().json();
        let last = listed["checkpoints"]
            .as_array()
            .and_then(|all| all.last())
            .map(|checkpoint| checkpoint["number"].as_u64().unwrap());
        last.unwrap_or(0)
    }

    /// Waits for `count` more checkpoints.
    fn wait_checkpoints(&self, count: u64) {
        let target = self.newest() + count;
        wait_for("checkpoints", DEADLINE, || (self.newest() >= target).then_some(()));
    }

    /// Ends QEMU unexpectedly, and lets the agent find that.
    fn crash(&self) {
        self.guest.single_qemu().process.kill().unwrap();
        wait_for("the monitor to report it as stopped", DEADLINE, || {
            (self.ocf("monitor", &[]).code == Some(7)).then_some(())
        });
        self.ocf("stop", &[]).ok();
    }

    fn protector(&self) -> Process {
        let text = fs::read(self.guest.file("protector.json")).unwrap();
        let record: Value = serde_json::from_slice(&text).unwrap();
        let number = |key: &str| record[key].as_u64().unwrap();
        Process { pid: u32::try_from(number("pid")).unwrap(), started: number("started") }
    }
}

#[test]
fn a_guest_is_restored_after_a_crash_or_a_stop_and_booted_after_a_shutdown() {
    let lab = Lab::new();
    check_restores_and_boots(&Resource::new(&lab));
}

#[test]
fn a_guest_is_restored_and_booted_from_an_object_store_too() {
    let (lab, server) = (Lab::new(), ObjectStoreServer::start());
    check_restores_and_boots(&Resource::in_object_store(&lab, probed(&lab), &server));
}

fn check_restores_and_boots(web: &Resource<'_>) {
    web.monitor(7);
    web.ocf("stop", &[]).ok();
    assert_eq!(web.start()["started"], "booted");
    assert_eq!(web.start()["started"], "already");
    let boot = web.guest.boot_id();
    web.ocf("monitor", &["--deep"]).ok();
    web.wait_checkpoints(2);

    // QEMU ends unexpectedly, as in a crash.
    let tick = web.guest.tick();
    web.crash();
    assert_eq!(web.start()["started"], "restored");
    assert_eq!(web.guest.boot_id(), boot, "the guest was booted");
    assert!(web.guest.tick() + 500 > tick, "the guest lost much more than one interval");
    web.wait_checkpoints(1);

    // A stop takes a last checkpoint.
    let before = web.newest();
    assert_eq!(web.ocf("stop", &[]).ok().json()["lost"], Value::Null);
    assert!(web.newest() > before);
    web.monitor(7);
    assert!(!web.guest.file("").exists());
    assert_eq!(web.start()["started"], "restored");
    assert_eq!(web.guest.boot_id(), boot);
    web.wait_checkpoints(1);

    // After a shutdown, no checkpoint is valid any more.
    assert_eq!(web.ocf("stop", &["--how", "shutdown"]).ok().json()["how"], "shut-down");
    let started = web.start();
    assert_eq!((&started["started"], &started["why"]), (&"booted".into(), &"it was shut down cleanly".into()));
    let second = web.guest.boot_id();
    assert_ne!(second, boot);
    web.wait_checkpoints(1);

    // The guest shuts itself down.
    web.guest.send("poweroff");
    wait_for("the monitor to report it as stopped", DEADLINE, || {
        (web.ocf("monitor", &[]).code == Some(7)).then_some(())
    });
    web.ocf("stop", &[]).ok();
    assert_eq!(web.start()["started"], "booted");
    assert_ne!(web.guest.boot_id(), second);
    web.ocf("stop", &[]).ok();
    web.lab.assert_empty();
}

#[test]
fn a_protector_that_has_died_is_replaced_and_a_guest_that_hangs_is_stopped_in_time() {
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

    // The store is unavailable for a while: the guest runs, and the resource is healthy.
    let away = web.store.with_extension("away");
    fs::rename(&web.store, &away).unwrap();
    let tick = web.guest.tick();
    web.monitor(0);
    wait_for("the guest to run", DEADLINE, || (web.guest.tick() > tick + 20).then_some(()));
    fs::rename(&away, &web.store).unwrap();
    web.wait_checkpoints(2);

    // QEMU does not answer.
    let qemu = web.guest.single_qemu().process;
    signal(qemu, Signal::STOP);
    let (code, output) = web.ocf_without_state_report("monitor", &["--within", "2s"]);
    assert_eq!(code, Some(1), "{output}");
    let (code, output) = web.ocf_without_state_report("start", &["--within", "20s"]);
    assert!(qemu.is_alive(), "{code:?}: {output}");
    assert!(code != Some(0) && output.contains("does not answer"), "{code:?}: {output}");
    let (code, output) = web.ocf_without_state_report("stop", &["--within", "5s"]);
    assert!(!qemu.is_alive(), "{code:?}: {output}");
    assert!(code == Some(0) && output.contains("does not answer"), "{code:?}: {output}");
    assert!(crate::common::with_argument_containing(lab.run_root().to_str().unwrap()).unwrap().is_empty());
    assert_eq!(web.start()["started"], "restored");
}

#[test]
fn a_guest_with_a_served_disk_that_powers_itself_off_is_booted_and_not_restored() {
    let lab = Lab::new();
    let web = Resource::of(&lab, lab.vm("web").memory("96M").section(&section(&image(&lab, "disk"), "")), &[]);
    web.start();
    web.wait_checkpoints(2);
    // A reboot of the guest's OS is not a shutdown: protection continues.
    let (boot, protector) = (web.guest.boot_id(), web.protector());
    web.guest.rekindle(&["reboot", "--how", "cold"]).ok();
    web.guest.wait_ready();
    assert_ne!(web.guest.boot_id(), boot);
    web.monitor(0);
    web.wait_checkpoints(2);
    assert!(protector.is_alive(), "the protector did not follow the guest");
    let boot = web.guest.boot_id();
    // The watcher ends QEMU after a power-off, before the next monitor action.
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
fn a_monitor_action_resumes_a_guest_that_a_killed_protector_left_stopped() {
    let lab = Lab::new();
    let web = Resource::new(&lab);
    web.start();
    web.wait_checkpoints(1);
    let first = web.protector();
    // Simulate a protector that is stopped in the pause of a checkpoint.
    web.freeze(first);
    fs::write(web.guest.file("paused"), []).unwrap();
    let path = web.guest.single_qemu().directory.join("watch.sock");
    Qmp::connect(&path, DEADLINE).unwrap().execute::<Value>("stop", ()).unwrap();
    first.kill().unwrap();
    first.wait_end(DEADLINE).unwrap();
    assert!(web.guest.status().contains("paused"));
    web.monitor(0);
    assert_ne!(web.protector(), first);
    let tick = web.guest.tick();
    wait_for("the guest to run", DEADLINE, || (web.guest.tick() > tick).then_some(()));
    web.ocf("stop", &[]).ok();
}

#[test]
fn a_start_fails_and_leaves_no_guest_if_no_checkpoint_can_be_taken() {
    let lab = Lab::new();
    // QEMU writes the disk without a disk server.
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
    let web = Resource::of(&lab, probed(&lab), &["--output-commit"]);
    web.start();
    web.wait_checkpoints(2);
    let boot = web.guest.boot_id();
    web.ocf("monitor", &["--deep", "--within", "20s"]).ok();
    // The store is unavailable: answers are held until it is back, which is no failure of the guest.
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
fn a_guest_that_does_not_shut_down_stays_protected_and_is_restored_from_a_last_checkpoint() {
    let lab = Lab::new();
    let web = Resource::of(&lab, lab.vm("web").memory("96M").append("rekindle.ignore_power=1"), &[]);
    web.start();
    web.wait_checkpoints(1);
    let (boot, before, protector) = (web.guest.boot_id(), web.newest(), web.protector());
    let stop = web.command("stop", &["--how", "shutdown", "--within", "20s"]).stdout(Stdio::piped()).spawn().unwrap();
    web.wait_checkpoints(3);
    let tick = web.guest.tick();
    assert!(protector.is_alive(), "the protector ended during the shutdown");
    let stopped = web.lab.wait(stop, "stop".into()).ok().json();
    assert_eq!((&stopped["how"], &stopped["lost"]), (&"suspend".into(), &Value::Null));
    assert!(web.newest() > before + 3);
    assert_eq!(web.start()["started"], "restored");
    assert_eq!(web.guest.boot_id(), boot);
    assert!(web.guest.tick() > tick, "the guest lost ticks that a client has seen");
    web.ocf("stop", &[]).ok();
    lab.assert_empty();
}

#[test]
fn a_stop_kills_an_operation_that_hangs_and_nothing_starts_later() {
    let lab = Lab::new();
    let web = Resource::new(&lab);
    web.start();
    web.wait_checkpoints(1);
    let mut reboot = lab.command(["reboot", "web", "--how", "cold"]);
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
fn a_start_waits_for_an_unavailable_store_and_does_not_boot_instead() {
    let lab = Lab::new();
    let mut web = Resource::of(&lab, lab.vm("web").memory("96M").section(&section(&image(&lab, "disk"), "")), &[]);
    let share = lab.path("share");
    fs::create_dir(&share).unwrap();
    web.store = share.join("web");
    web.ocf("start", &["--within", "2s"]).status(1).prints(&["rekindle store init"]);
    assert!(!web.store.exists() && web.guest.qemus().is_empty(), "a store was created or a guest started");
    lab.rekindle(["store", "init", web.store.to_str().unwrap()]).ok();
    web.start();
    web.wait_checkpoints(2);
    let boot = web.guest.boot_id();
    web.crash();

    // The store's file system is not mounted; the mount point exists.
    let away = lab.path("away");
    fs::rename(&web.store, &away).unwrap();
    web.ocf("start", &[]).status(1).prints(&["is not a store", "is the shared storage mounted on this node?"]);
    assert!(!web.store.exists(), "another store was created");
    assert!(web.guest.qemus().is_empty(), "the guest was booted");

    // The mount point is missing for a while.
    fs::remove_dir(&share).unwrap();
    let errors = lab.path("errors");
    let mut start = web.command("start", &["--within", "60s"]);
    let start = start.stdout(Stdio::piped()).stderr(File::create(&errors).unwrap()).spawn().unwrap();
    wait_for("the start to try the store again", DEADLINE, || {
        fs::read_to_string(&errors).unwrap().contains("retrying").then_some(())
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
fn a_start_waits_for_an_object_store_that_is_away_and_does_not_boot_instead() {
    let (lab, mut server) = (Lab::new(), ObjectStoreServer::start());
    let web = Resource::in_object_store(&lab, probed(&lab), &server);
    web.start();
    web.wait_checkpoints(2);
    let boot = web.guest.boot_id();
    // The store is unavailable for a while: the guest runs, and the resource is healthy.
    server.kill_gateway();
    let tick = web.guest.tick();
    web.monitor(0);
    wait_for("the guest to run", DEADLINE, || (web.guest.tick() > tick + 20).then_some(()));
    web.crash();
    let errors = lab.path("errors");
    let mut start = web.command("start", &["--within", "120s"]);
    let start = start.stdout(Stdio::piped()).stderr(File::create(&errors).unwrap()).spawn().unwrap();
    wait_for("the start to try the store again", DEADLINE, || {
        fs::read_to_string(&errors).unwrap().contains("retrying").then_some(())
    });
    server.restart_gateway();
    assert_eq!(web.lab.wait(start, "start".into()).ok().json()["started"], "restored");
    web.guest.wait_ready();
    assert_eq!(web.guest.boot_id(), boot);

    // The store accepts connections and does not answer. A request ends early enough for another attempt.
    web.crash();
    let gateway = Pid::from_raw(i32::try_from(server.gateway_pid()).unwrap()).unwrap();
    kill_process(gateway, Signal::STOP).unwrap();
    web.ocf("start", &["--within", "30s"]).status(1).prints(&["retrying"]);
    assert!(web.guest.qemus().is_empty(), "the guest was booted");
    kill_process(gateway, Signal::CONT).unwrap();
    assert_eq!(web.start()["started"], "restored");
    assert_eq!(web.guest.boot_id(), boot);
    web.ocf("stop", &[]).ok();
    lab.assert_empty();
}

#[test]
fn a_guest_whose_newest_checkpoint_is_old_is_degraded() {
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
    // Backdate the newest checkpoint by an hour.
    progress["committed_at_ms"] = at.saturating_sub(3_600_000).into();
    fs::write(&path, progress.to_string()).unwrap();
    web.monitor(190).prints(&["no checkpoint of it was committed"]);
    signal(protector, Signal::CONT);
    web.wait_checkpoints(1);
    web.monitor(0);
    web.ocf("stop", &[]).ok();
}

#[test]
fn checkpoints_of_another_protector_suffice_and_a_stop_ends_it() {
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
    assert_eq!(web.protector(), first, "another protector was started");
    let before = web.newest();
    assert_eq!(web.ocf("stop", &[]).ok().json()["lost"], Value::Null);
    assert!(web.newest() > before);
    other.end();
    lab.assert_empty();
}

#[test]
fn a_guest_that_reboots_itself_is_running_for_each_monitor_action() {
    let lab = Lab::new();
    let vm = lab.vm("web").memory("96M").key("on_reboot = \"warm-cache\"");
    let web = Resource::of(&lab, vm.section(&section(&image(&lab, "disk"), "")), &[]);
    web.start();
    web.wait_checkpoints(1);
    let boot = web.guest.boot_id();
    web.guest.send("reboot");
    // No monitor action may report the guest as stopped until the new boot answers.
    wait_for("the new boot to answer", DEADLINE, || {
        web.ocf("monitor", &["--within", "60s"]).ok();
        web.guest.try_ask("boot_id").is_ok_and(|id| !id.is_empty() && id.trim() != boot).then_some(())
    });
    web.ocf("stop", &[]).ok();
}

#[test]
fn cluster_configuration_is_generated_from_the_definition() {
    let lab = Lab::new();
    let web = Resource::new(&lab);
    let text = web.lab.rekindle([
        "ocf",
        "show-config",
        "web",
        "--definition",
        web.definition.to_str().unwrap(),
        "--store",
        "s3://checkpoints/web",
        "--environment-file",
        "/etc/rekindle/s3.env",
    ]);
    text.ok().prints(&[
        "ocf:rekindle:vm",
        "utilization memory=96 vcpus=1",
        "store=s3://checkpoints/web environment_file=/etc/rekindle/s3.env every=2s",
        "rekindle store init s3://checkpoints/web --environment-file /etc/rekindle/s3.env",
    ]);
    // Each option that was given is part of the generated configuration.
    let words = ["--output-commit", "--keep", "3", "--policy", "basic", "--disk", "crash-consistent"];
    web.lab.finish(web.plain("show-config", &words)).ok().prints(&[
        "keep=3",
        "policy=basic",
        "disk=crash-consistent",
        "output_commit=true",
        "failure-timeout=60s",
        "start-failure-is-fatal=false load-threshold=400%",
    ]);
    let overlays = web.lab.finish(web.plain("show-config", &["--disk", "overlays"]));
    overlays.status(2).prints(&["overlays is for a domain", "server = true"]);
    let utilization = web.ocf("show-config", &[]).ok().json();
    assert_eq!((&utilization["memory"], &utilization["vcpus"]), (&96.into(), &1.into()));
}
