//! `rekindle attach` and `detach`: QEMUs that were started by hand or by libvirt, not by Rekindle.

mod libvirt;

use crate::common::protector::wait_filled;
use crate::common::{DEADLINE, Guest, Lab, Net, qemu_new, qemu_newest, qemu_old, wait_for};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::Mode;
use rekindle_kernel::userfault::remote;
use rekindle_qemu::qmp::Qmp;
use rekindle_testing::foreign::{ForeignQemu, QemuOptions};
use rekindle_testing::process::open_files;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

/// A guest in a QEMU that Rekindle has not started.
pub(super) struct ForeignGuest<'a> {
    /// The guest as Rekindle's VM after `rekindle attach`.
    pub guest: Guest<'a>,
    pub qemu: ForeignQemu,
}

impl<'a> ForeignGuest<'a> {
    pub(super) fn boot(lab: &'a Lab, name: &str, binary: &Path, arguments: &[&str]) -> Self {
        Self::boot_with(lab, name, QemuOptions::new(binary).arguments(arguments))
    }

    fn boot_with(lab: &'a Lab, name: &str, options: QemuOptions<'_>) -> Self {
        let directory = lab.path(&format!("foreign-{name}"));
        fs::create_dir(&directory).unwrap();
        // A QEMU of another user must have access.
        fs::set_permissions(lab.path(""), PermissionsExt::from_mode(0o755)).unwrap();
        let qemu = ForeignQemu::boot(&directory, &options.append("rekindle.tick=20"));
        Self { guest: lab.vm(name).net(Net::User(qemu.port())).guest(), qemu }
    }

    /// Returns the path of QEMU's QMP socket.
    fn socket(&self) -> String {
        self.qemu.path("qmp").to_str().unwrap().to_owned()
    }

    fn open_files(&self) -> BTreeMap<String, usize> {
        open_files(self.qemu.process.pid)
    }
}

pub(super) fn attach(lab: &Lab, foreign: &ForeignGuest<'_>) {
    let attached = lab.rekindle(["--json", "attach", &foreign.guest.name, "--qmp", &foreign.socket()]).ok();
    assert_eq!(attached.json()["vmm"]["pid"], foreign.qemu.process.pid);
}

/// Runs `rekindle protect`, which has to end successfully, and returns its checkpoint events.
pub(super) fn protect(lab: &Lab, name: &str, store: &Path, arguments: &[&str]) -> Vec<Value> {
    let common = ["--json", "protect", name, "--store", store.to_str().unwrap(), "--create-store", "--every", "100ms"];
    let protected = lab.rekindle(common.iter().chain(arguments)).ok();
    let events = protected.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == "checkpoint").collect()
}

/// Restores the guest in another run root, as on another host. Calls `check` with the new run directory, then stops the
/// guest.
fn restore_on_another_host(lab: &Lab, name: &str, store: &Path, arguments: &[&str], check: impl FnOnce(&Path)) {
    let run_root = lab.path("elsewhere");
    let rekindle = |arguments: &[&str]| {
        let mut command = lab.command(arguments);
        command.env("REKINDLE_RUN_DIR", &run_root);
        lab.finish(command)
    };
    let restore = ["--json", "restore", name, "--store", store.to_str().unwrap()];
    rekindle(&restore.iter().chain(arguments).copied().collect::<Vec<_>>()).ok();
    let run_directory = run_root.join(name);
    check(&run_directory);
    let fill = run_directory.join("fill.json");
    wait_for("the memory to be loaded", DEADLINE, || (!fill.exists()).then_some(()));
    rekindle(&["stop", "--now", name]).ok();
}

/// Asserts that the guest was not booted since boot `boot`, and that its memory is intact.
fn assert_not_rebooted(guest: &Guest<'_>, boot: &str) {
    assert_eq!(guest.boot_id(), boot, "the guest was booted instead of resumed");
    guest.ask("dirty 0");
    guest.verify();
}

/// Protects a guest with each policy while it writes, kills it, and restores it from the checkpoints of each policy.
fn protect_kill_and_restore(binary: &Path, arguments: &[&str]) {
    let lab = Lab::without_root();
    let mut foreign = ForeignGuest::boot(&lab, "foreign", binary, arguments);
    let guest = &foreign.guest;
    attach(&lab, &foreign);
    guest.ask("online-cpu 1");
    assert_eq!(guest.status(), "running");
    guest.touch("40M");
    let boot = guest.boot_id();
    guest.ask("dirty 20 40 random");
    let policies = ["basic", "cow", "precopy"];
    for policy in policies {
        let store = lab.path(policy);
        let checkpoints = protect(&lab, "foreign", &store, &["--policy", policy, "--count", "4"]);
        assert_eq!(checkpoints.len(), 4);
        assert!(checkpoints[1..].iter().all(|checkpoint| checkpoint["full"] == false), "{checkpoints:?}");
    }
    let tick = guest.tick();
    foreign.qemu.kill();
    let guest = &foreign.guest;
    assert_eq!(guest.status(), "ended");
    for policy in policies {
        restore_on_another_host(&lab, "foreign", &lab.path(policy), &[], |_| assert_not_rebooted(guest, &boot));
    }
    // With another QEMU the guest would have another CPU model, although the option is the same `-cpu max`.
    let other = if binary == qemu_new() { qemu_old() } else { qemu_new() };
    let store = lab.path("cow");
    let arguments = ["restore", "foreign", "--store", store.to_str().unwrap(), "--qemu", other.to_str().unwrap()];
    let refused = lab.rekindle(arguments).status(1);
    let reasons = ["would see other processors", "does not know the machine type"];
    assert!(reasons.iter().any(|reason| refused.stderr.contains(reason)), "{refused}");
    lab.assert_empty();
    // Restore on this host too, under the VM's own name: now Rekindle has started the VM, and can protect it further.
    lab.rekindle(["restore", "foreign", "--store", lab.path("cow").to_str().unwrap()]).ok();
    assert_not_rebooted(guest, &boot);
    assert!(guest.tick() + 10_000 > tick);
    wait_filled(guest);
    assert_eq!(protect(&lab, "foreign", &lab.path("cow"), &["--count", "2"]).len(), 2);
    guest.rekindle(&["replace-qemu"]).status(1).prints(&["Rekindle had not started", "rekindle restore"]);
    guest.assert_sound();
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

#[test]
fn a_guest_of_an_old_qemu_with_plain_memory_is_restored_elsewhere() {
    // This is the usual way to start a QEMU by hand: memory by `-m`, machine by its alias, nothing prepared.
    protect_kill_and_restore(qemu_old(), &["-machine", "q35,smm=off", "-m", "192M", "-device", "vmgenid,id=gen"]);
}

#[test]
fn a_guest_of_a_qemu_under_a_loader_is_restored_elsewhere() {
    // For this QEMU, `/proc/PID/exe` is the loader.
    protect_kill_and_restore(qemu_newest(), &["-machine", "q35", "-m", "192M", "-device", "vmgenid,id=gen"]);
}

#[test]
fn a_guest_of_a_new_qemu_with_two_memories_is_restored_elsewhere() {
    let arguments = [
        ["-machine", "pc"],
        ["-m", "size=192M,slots=2,maxmem=1G"],
        ["-object", r#"{"qom-type":"memory-backend-ram","id":"ram-node0","size":134217728}"#],
        ["-object", "memory-backend-memfd,id=mem,size=64M,share=on"],
        ["-numa", "node,nodeid=0,cpus=0,memdev=ram-node0"],
        ["-numa", "node,nodeid=1,cpus=1,memdev=mem"],
        ["-uuid", "7fe0a1c4-54b5-46de-b4b2-6fb1a1cbb2b1"],
    ];
    protect_kill_and_restore(qemu_new(), &arguments.concat());
}

#[test]
fn a_card_on_a_tap_gets_what_the_definition_has() {
    let lab = Lab::new();
    let ifname = format!("rkp{}", std::process::id() % 1_000_000);
    let ip = |arguments: &[&str]| assert!(Command::new("ip").args(arguments).status().unwrap().success());
    ip(&["tuntap", "add", &ifname, "mode", "tap"]);
    let tap = format!("tap,id=lan,ifname={ifname},script=no,downscript=no");
    let card = "virtio-net-pci,netdev=lan,mac=52:54:00:00:00:78";
    let arguments = ["-machine", "q35", "-m", "96M", "-netdev", &tap, "-device", card];
    let mut foreign = ForeignGuest::boot(&lab, "tapped", qemu_new(), &arguments);
    attach(&lab, &foreign);
    let boot = foreign.guest.boot_id();
    foreign.guest.touch("20M");
    let store = lab.path("store");
    protect(&lab, "tapped", &store, &["--count", "2"]);
    foreign.qemu.kill();
    ip(&["link", "del", &ifname]);
    let arguments = ["restore", "tapped", "--store", store.to_str().unwrap()];
    lab.rekindle(arguments).status(1).prints(&["network lan", "needs one again", "--definition"]);
    lab.assert_empty();
    let definition = lab.path("here.toml");
    let port = foreign.qemu.port();
    let (kernel, _) = lab.image();
    let qemu = qemu_new();
    let write_definition = |second_net: &str| {
        let first_net = format!("[[net]]\nkind = \"user\"\nforward = [\"127.0.0.1:{port}:7000\"]\n");
        let machine = format!("name = \"tapped\"\nqemu = {qemu:?}\naccel = \"tcg\"\n[boot]\nkernel = {kernel:?}\n");
        let text = machine + &first_net + second_net;
        fs::write(&definition, text).unwrap();
    };
    let with_definition = [&arguments[..], &["--definition", definition.to_str().unwrap()]].concat();
    write_definition("");
    lab.rekindle(&with_definition).status(1).prints(&["has 2, the definition has 1"]);
    write_definition(&format!("[[net]]\nkind = \"tap\"\nnetns = \"{}\"\n", lab.namespace));
    lab.rekindle(&with_definition).ok();
    assert_not_rebooted(&foreign.guest, &boot);
    assert_eq!(lab.interfaces().len(), 1, "the card is on a tap in the namespace");
    foreign.guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

/// A `rekindle protect` that runs during the test.
struct Protector(Child);

impl Protector {
    /// Starts a protector and waits until it has committed three checkpoints.
    fn start(lab: &Lab, name: &str, policy: &str) -> Self {
        let store = lab.path(&format!("store-{name}-{policy}"));
        let mut command =
            lab.command(["--json", "protect", name, "--create-store", "--every", "100ms", "--policy", policy]);
        let mut child = command.arg("--store").arg(store).stderr(Stdio::inherit()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let checkpoints = lines.map(Result::unwrap).filter(|line| line.contains("\"checkpoint\"")).take(3).count();
        assert_eq!(checkpoints, 3, "the protector ended");
        Self(child)
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Kills the protector of a VM while QEMU waits in a save for it to read the pipe.
    fn kill_in_pause(self, lab: &Lab, name: &str, qemu: Process) {
        let protector = Process::of(self.0.id()).unwrap();
        wait_for("a pause in which QEMU waits", DEADLINE, || {
            protector.resume().unwrap();
            wait_for("a pause", DEADLINE, || mark_of_pause(lab, name).exists().then_some(()));
            assert!(protector.stop_fully(DEADLINE).unwrap());
            waits_in_write(qemu).then_some(())
        });
        self.kill();
        assert!(mark_of_pause(lab, name).exists());
        wait_for("QEMU to continue", DEADLINE, || (!waits_in_write(qemu)).then_some(()));
    }
}

/// Returns the file that exists during a pause by one command.
fn mark_of_pause(lab: &Lab, name: &str) -> PathBuf {
    lab.run_root().join(name).join("piped-pause")
}

/// Returns whether the main thread of a process waits in `write` or `writev`.
fn waits_in_write(process: Process) -> bool {
    let call = fs::read_to_string(format!("/proc/{0}/task/{0}/syscall", process.pid)).unwrap();
    ["1", "20"].contains(&call.split_whitespace().next().unwrap())
}

impl Drop for Protector {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Asserts that Rekindle has left nothing in a QEMU whose open files were `files_before`.
#[track_caller]
fn assert_no_trace(process: Process, files_before: &BTreeMap<String, usize>) {
    assert!(remote::existing(process).unwrap().is_empty(), "a userfaultfd is left");
    let registered = remote::registered(process, Mode::MISSING | Mode::WRITE_PROTECT).unwrap();
    assert!(registered.is_empty(), "memory is still registered: {registered:x?}");
    assert_eq!(&open_files(process.pid), files_before, "descriptors are left");
}

#[test]
fn detaching_leaves_no_trace_also_of_a_protector_that_was_killed() {
    let lab = Lab::without_root();
    let foreign = ForeignGuest::boot(&lab, "traced", qemu_new(), &["-machine", "q35", "-m", "192M"]);
    let guest = &foreign.guest;
    let files = foreign.open_files();
    guest.touch("40M");
    guest.ask("dirty 20 40 random");
    for policy in ["precopy", "cow", "basic"] {
        attach(&lab, &foreign);
        let protector = Protector::start(&lab, "traced", policy);
        // The protector holds QEMU's only monitor, and any change in QEMU is the protector's.
        assert_eq!(guest.status(), "protected");
        guest.rekindle(&["detach"]).status(1).prints(&["takes checkpoints", &protector.0.id().to_string()]);
        let store = lab.path("second");
        lab.rekindle(["protect", "traced", "--store", store.to_str().unwrap()])
            .status(1)
            .prints(&["takes checkpoints"]);
        protector.kill();
        if policy != "cow" {
            assert!(
                !remote::existing(foreign.qemu.process).unwrap().is_empty(),
                "nothing was left that could be removed"
            );
        }
        guest.rekindle(&["detach"]).ok().prints(&["continues to run"]);
        assert_no_trace(foreign.qemu.process, &files);
        lab.assert_empty();
        let tick = guest.tick();
        wait_for("the guest to tick", DEADLINE, || (guest.tick() > tick).then_some(()));
    }
    // A protector that was not killed leaves no trace either.
    attach(&lab, &foreign);
    protect(&lab, "traced", &lab.path("store-traced-cow"), &["--policy", "cow", "--count", "2"]);
    assert_no_trace(foreign.qemu.process, &files);
    assert_eq!(foreign.qemu.qmp().execute::<Value>("query-fdsets", ()).unwrap(), json!([]));
    guest.ask("dirty 0");
    guest.verify();
    guest.rekindle(&["detach"]).ok();
}

#[test]
fn a_protector_that_is_killed_while_it_opens_the_pipe_leaves_nothing() {
    let lab = Lab::without_root();
    // Without a client at any monitor, QEMU removes the set by itself.
    let monitor = lab.path("other-monitor");
    let options = format!("unix:{},server=on,wait=off", monitor.display());
    let arguments = ["-machine", "q35", "-m", "192M", "-qmp", &options];
    let foreign = ForeignGuest::boot(&lab, "piped", qemu_new(), &arguments);
    let guest = &foreign.guest;
    let mut other_client = Qmp::connect(&monitor, DEADLINE).unwrap();
    let files = foreign.open_files();
    let mut descriptor_sets = || other_client.execute::<Value>("query-fdsets", ()).unwrap();
    attach(&lab, &foreign);
    let kill = |store: &str| {
        let mut command = lab.command(["protect", "piped", "--create-store", "--every", "100ms", "--store"]);
        command.arg(lab.path(store)).env("REKINDLE_FAULT", "pause.pipe.offered:kill");
        lab.finish(command).killed();
    };
    kill("first");
    assert_ne!(descriptor_sets(), json!([]));
    assert_eq!(protect(&lab, "piped", &lab.path("next"), &["--count", "3"]).len(), 3);
    assert_no_trace(foreign.qemu.process, &files);
    assert_eq!(descriptor_sets(), json!([]));
    kill("second");
    assert_ne!(descriptor_sets(), json!([]));
    guest.rekindle(&["detach"]).ok().prints(&["continues to run"]);
    assert_no_trace(foreign.qemu.process, &files);
    assert_eq!(descriptor_sets(), json!([]));
    let tick = guest.tick();
    wait_for("the guest to tick", DEADLINE, || (guest.tick() > tick).then_some(()));
}

#[test]
fn a_guest_runs_again_when_its_protector_is_killed_in_a_pause() {
    let lab = Lab::without_root();
    let foreign = ForeignGuest::boot(&lab, "held", qemu_new(), &["-machine", "q35", "-m", "192M"]);
    let guest = &foreign.guest;
    let files = foreign.open_files();
    guest.touch("40M");
    guest.ask("dirty 20 40 random");
    attach(&lab, &foreign);
    for policy in ["precopy", "cow", "basic"] {
        Protector::start(&lab, "held", policy).kill_in_pause(&lab, "held", foreign.qemu.process);
        // Rekindle has done nothing since.
        assert_eq!(foreign.qemu.qmp().execute::<Value>("query-status", ()).unwrap()["status"], "running");
        let tick = guest.tick();
        wait_for("the guest to tick", DEADLINE, || (guest.tick() > tick).then_some(()));
    }
    // The next protector finds a guest that its owner has stopped, and leaves it stopped.
    foreign.qemu.qmp().execute::<Value>("stop", ()).unwrap();
    let store = lab.path("store-held-basic");
    let mut command = lab.command(["--json", "protect", "held", "--every", "100ms", "--store"]);
    let mut child = command.arg(&store).stderr(Stdio::inherit()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let waiting = lines.find(|line| line.contains("\"waiting\"")).expect("the protector ended");
    assert!(waiting.contains("paused"), "{waiting}");
    Protector(child).kill();
    assert!(!mark_of_pause(&lab, "held").exists());
    foreign.qemu.qmp().execute::<Value>("cont", ()).unwrap();
    protect(&lab, "held", &lab.path("again"), &["--count", "3"]);
    assert_no_trace(foreign.qemu.process, &files);
    guest.ask("dirty 0");
    guest.verify();
    guest.rekindle(&["detach"]).ok();
}

/// Serves QMP on a socket from this process, which is no QEMU.
fn serve_qmp_without_qemu(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            let mut replies = stream.try_clone().unwrap();
            let version = json!({"qemu": {"major": 10, "minor": 0, "micro": 2}, "package": ""});
            writeln!(replies, "{}", json!({"QMP": {"version": version, "capabilities": []}})).unwrap();
            for command in serde_json::Deserializer::from_reader(stream).into_iter::<Value>() {
                let Ok(command) = command else { break };
                let asks_for_cpus = command["execute"] == "query-cpus-fast";
                let answer = if asks_for_cpus { json!([{"thread-id": std::process::id()}]) } else { json!({}) };
                let _ = writeln!(replies, "{}", json!({ "return": answer, "id": command["id"] }));
            }
        }
    });
}

#[test]
fn what_cannot_be_attached_to_is_named_and_leaves_nothing() {
    let lab = Lab::without_root();
    let attach_to = |name: &str, socket: &str| lab.rekindle(["attach", name, "--qmp", socket]);
    attach_to("none", lab.path("no.sock").to_str().unwrap()).status(1).prints(&["no.sock"]);
    serve_qmp_without_qemu(&lab.path("impostor"));
    attach_to("none", lab.path("impostor").to_str().unwrap())
        .status(1)
        .prints(&["no QEMU", &std::process::id().to_string()]);
    lab.rekindle(["attach", "none"]).status(2).prints(&["--qmp", "--libvirt"]);
    lab.rekindle(["attach", "none", "--libvirt", "nobody", "--connect", "test:///default"])
        .status(1)
        .prints(&["nobody"]);
    lab.rekindle(["detach", "none"]).status(1).prints(&["there is no VM none"]);
    lab.assert_empty();

    // Devices that could not be restored are reported by `attach`, not only by the restore.
    let disk = lab.path("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let drive = format!("file={},format=raw,if=none,id=d", disk.display());
    let unsupported =
        ["-machine", "q35", "-m", "96M", "-snapshot", "-drive", &drive, "-device", "nvme,serial=x,drive=d,id=n"];
    let foreign = ForeignGuest::boot(&lab, "bad", qemu_new(), &unsupported);
    let obstacles = ["cannot be attached to", "-snapshot", "nameless file", "nvme", "QEMU cannot save"];
    attach_to("bad", &foreign.socket()).status(1).prints(&obstacles);
    lab.assert_empty();
    drop(foreign);

    let mut foreign = ForeignGuest::boot(&lab, "good", qemu_new(), &["-machine", "pc", "-m", "96M"]);
    let files = foreign.open_files();
    let other_client = foreign.qemu.qmp();
    attach_to("good", &foreign.socket()).status(1).prints(&["another client holds it"]);
    drop(other_client);
    // Two commands attach the QEMU concurrently, under two names: one succeeds.
    let start = |name: &str| lab.command(["attach", name, "--qmp", &foreign.socket()]).spawn().unwrap();
    let results = [("one", start("one")), ("two", start("two"))].map(|(name, child)| lab.wait(child, name.into()));
    let successes = results.iter().filter(|result| result.code == Some(0)).count();
    assert_eq!(successes, 1, "{} {}", results[0], results[1]);
    let loser = results.iter().find(|result| result.code != Some(0)).unwrap();
    assert!(loser.stderr.contains("is VM") && loser.stderr.contains("rekindle detach"), "{loser}");
    let name = if results[0].code == Some(0) { "one" } else { "two" };
    let vm = |arguments: &[&str]| lab.rekindle(arguments.iter().copied().chain([name]));
    assert_no_trace(foreign.qemu.process, &files);

    // Commands that Rekindle rejects for a QEMU that it has not started.
    attach_to(name, &foreign.socket()).status(1).prints(&["runs already"]);
    vm(&["stop", "--now"]).status(1).prints(&["attached to", "the program that started it", "rekindle detach"]);
    vm(&["replace-qemu"]).status(1).prints(&["attached to", "rekindle detach"]);
    let unreachable = ["move", name, "--to", "b", "--ssh", "false", "--store", "/nonexistent"];
    lab.rekindle(unreachable).status(1).prints(&["an attached QEMU without libvirt", "rekindle restore"]);
    vm(&["console"]).status(1).prints(&["attached to"]);
    vm(&["show"]).ok().prints(&["attached to", "monitor:"]);
    lab.rekindle(["ls"]).ok().prints(&["attached", &foreign.qemu.process.pid.to_string(), "running"]);

    // A device that is plugged in later is not on the command line.
    let device = json!({"driver": "virtio-rng-pci", "id": "late"});
    let _: Value = foreign.qemu.qmp().execute("device_add", device).unwrap();
    let store = lab.path("store");
    let arguments = ["protect", name, "--store", store.to_str().unwrap(), "--create-store", "--count", "1"];
    lab.rekindle(arguments).status(1).prints(&["device late", "plugged in while the guest ran"]);

    foreign.qemu.kill();
    lab.rekindle(["ls"]).ok().prints(&["ended"]);
    vm(&["recover"]).status(1).prints(&["its QEMU has ended"]);
    lab.rekindle(arguments).status(1).prints(&["does not run"]);
    vm(&["detach"]).ok().prints(&["had ended"]);
    lab.assert_empty();
}

#[test]
fn a_qemu_of_another_user_in_a_sandbox_is_protected_by_root_and_named_to_others() {
    let lab = Lab::new();
    let sandbox = ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];
    let arguments = [["-machine", "q35"], ["-m", "128M"], sandbox].concat();
    let mut foreign =
        ForeignGuest::boot_with(&lab, "caged", QemuOptions::new(qemu_new()).arguments(&arguments).user("nobody"));
    let files = foreign.open_files();
    // A third user has no right to inspect this QEMU; the error suggests running the command as root.
    let home = lab.path("home");
    fs::create_dir(&home).unwrap();
    let chmod = |path: &str, mode: u32| fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    chmod(&foreign.socket(), 0o777);
    chmod(home.to_str().unwrap(), 0o777);
    // The original may be in a directory that only root can read.
    let program = lab.path("rekindle");
    fs::copy(env!("CARGO_BIN_EXE_rekindle"), &program).unwrap();
    let mut as_third_user = Command::new("setpriv");
    as_third_user.args(["--reuid", "games", "--regid", "games", "--clear-groups"]).arg(&program);
    as_third_user.args(["attach", "caged", "--qmp", &foreign.socket()]).env("REKINDLE_RUN_DIR", home.join("run"));
    as_third_user.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let refused = lab.finish(as_third_user).status(1).prints(&["process", "run as root"]);
    assert!(refused.stderr.contains(&foreign.qemu.process.pid.to_string()), "{refused}");

    attach(&lab, &foreign);
    foreign.guest.touch("30M");
    let boot = foreign.guest.boot_id();
    foreign.guest.ask("dirty 20 30 random");
    for policy in ["cow", "precopy"] {
        assert_eq!(protect(&lab, "caged", &lab.path(policy), &["--policy", policy, "--count", "3"]).len(), 3);
        assert_no_trace(foreign.qemu.process, &files);
    }
    // Each pause but the first is one command: this QEMU may write to root's pipe.
    Protector::start(&lab, "caged", "basic").kill_in_pause(&lab, "caged", foreign.qemu.process);
    foreign.qemu.kill();
    let guest = &foreign.guest;
    for policy in ["cow", "precopy"] {
        restore_on_another_host(&lab, "caged", &lab.path(policy), &[], |_| assert_not_rebooted(guest, &boot));
    }
    guest.rekindle(&["detach"]).ok();
}
