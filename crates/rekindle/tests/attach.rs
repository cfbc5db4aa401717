//! `rekindle attach` and `detach`: QEMUs that somebody else has started, by hand and by libvirt.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::foreign::{ForeignQemu, descriptors, free_port};
use common::{DEADLINE, Guest, Lab, Net, qemu_new, qemu_newest, qemu_old, wait_for};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::Mode;
use rekindle_kernel::userfault::remote;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

fn attach(lab: &Lab, plain: &ForeignQemu<'_>) {
    let done = lab.rekindle(["--json", "attach", &plain.guest.name, "--qmp", &plain.socket()]).ok();
    assert_eq!(done.json()["vmm"]["pid"], plain.process.pid);
}

/// Some checkpoints; what was told of each.
fn protect(lab: &Lab, name: &str, store: &Path, arguments: &[&str]) -> Vec<Value> {
    let all = ["--json", "protect", name, "--store", store.to_str().unwrap(), "--create-store", "--every", "100ms"];
    let done = lab.rekindle(all.iter().chain(arguments)).ok();
    let events = done.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == "checkpoint").collect()
}

/// Let it go on elsewhere: another run directory, and all that is in one.
fn restore_elsewhere(lab: &Lab, name: &str, store: &Path, more: &[&str], check: impl FnOnce(&Path)) {
    let elsewhere = lab.path("elsewhere");
    let run = |arguments: &[&str]| {
        let mut command = lab.command(arguments);
        command.env("REKINDLE_RUN_DIR", &elsewhere);
        lab.finish(command)
    };
    let arguments = ["--json", "restore", name, "--store", store.to_str().unwrap()];
    run(&arguments.iter().chain(more).copied().collect::<Vec<_>>()).ok();
    check(&elsewhere.join(name));
    let fill = elsewhere.join(name).join("fill.json");
    wait_for("the memory to be there", DEADLINE, || (!fill.exists()).then_some(()));
    run(&["stop", "--now", name]).ok();
}

/// That the guest is the one that was, and its memory right.
fn is_whole(guest: &Guest<'_>, boot: &str) {
    assert_eq!(guest.boot_id(), boot, "the guest went on, and was not booted");
    guest.ask("dirty 0");
    guest.verify();
}

/// Protected by every policy while it writes, killed, and restored from each of the checkpoints.
fn goes_on_elsewhere(binary: &Path, arguments: &[&str]) {
    let lab = Lab::without_root();
    let mut plain = ForeignQemu::boot(&lab, "foreign", binary, arguments, None);
    let guest = &plain.guest;
    attach(&lab, &plain);
    assert_eq!(guest.status(), "running");
    guest.touch("40M");
    let boot = guest.boot_id();
    guest.ask("dirty 20 40 random");
    let policies = ["basic", "cow", "precopy"];
    for policy in policies {
        let store = lab.path(policy);
        let taken = protect(&lab, "foreign", &store, &["--policy", policy, "--count", "4"]);
        assert_eq!(taken.len(), 4);
        assert!(taken[1..].iter().all(|checkpoint| checkpoint["full"] == false), "{taken:?}");
    }
    let tick = guest.tick();
    plain.kill();
    assert_eq!(plain.guest.status(), "ended");
    for policy in policies {
        restore_elsewhere(&lab, "foreign", &lab.path(policy), &[], |_| is_whole(&plain.guest, &boot));
    }
    // Another QEMU means other processors by the same `-cpu max`.
    let other = if binary == qemu_new() { qemu_old() } else { qemu_new() };
    let store = lab.path("cow");
    let arguments = ["restore", "foreign", "--store", store.to_str().unwrap(), "--qemu", other.to_str().unwrap()];
    let refused = lab.rekindle(arguments).status(1);
    let known = ["would see other processors", "does not know the machine type"];
    assert!(known.iter().any(|why| refused.stderr.contains(why)), "{refused}");
    lab.assert_empty();
    // And under its own name again, as a VM of Rekindle's that can be protected further.
    lab.rekindle(["restore", "foreign", "--store", lab.path("cow").to_str().unwrap()]).ok();
    is_whole(&plain.guest, &boot);
    assert!(plain.guest.tick() + 10_000 > tick);
    let fill = plain.guest.file("fill.json");
    wait_for("the memory to be there", DEADLINE, || (!fill.exists()).then_some(()));
    assert_eq!(protect(&lab, "foreign", &lab.path("cow"), &["--count", "2"]).len(), 2);
    plain.guest.rekindle(&["reboot", "vmm"]).status(1).prints(&["Rekindle had not started", "rekindle restore"]);
    plain.guest.assert_sound();
    plain.guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

#[test]
fn a_guest_of_an_old_qemu_with_plain_memory_goes_on_elsewhere() {
    // As anybody starts one: memory by `-m`, machine by its alias, nothing prepared.
    goes_on_elsewhere(qemu_old(), &["-machine", "q35,smm=off", "-m", "192M", "-device", "vmgenid,id=gen"]);
}

#[test]
fn a_guest_of_a_qemu_under_a_loader_goes_on_elsewhere() {
    // `/proc/PID/exe` is the loader.
    goes_on_elsewhere(qemu_newest(), &["-machine", "q35", "-m", "192M", "-device", "vmgenid,id=gen"]);
}

#[test]
fn a_guest_of_a_new_qemu_with_two_memories_goes_on_elsewhere() {
    let arguments = [
        ["-machine", "pc"],
        ["-m", "size=192M,slots=2,maxmem=1G"],
        ["-object", r#"{"qom-type":"memory-backend-ram","id":"ram-node0","size":134217728}"#],
        ["-object", "memory-backend-memfd,id=mem,size=64M,share=on"],
        ["-numa", "node,nodeid=0,cpus=0,memdev=ram-node0"],
        ["-numa", "node,nodeid=1,cpus=1,memdev=mem"],
        ["-uuid", "7fe0a1c4-54b5-46de-b4b2-6fb1a1cbb2b1"],
    ];
    goes_on_elsewhere(qemu_new(), &arguments.concat());
}

#[test]
fn a_card_on_a_tap_gets_what_the_definition_says() {
    let lab = Lab::new();
    let ifname = format!("rkp{}", std::process::id() % 1_000_000);
    let ip = |arguments: &[&str]| assert!(Command::new("ip").args(arguments).status().unwrap().success());
    ip(&["tuntap", "add", &ifname, "mode", "tap"]);
    let tap = format!("tap,id=lan,ifname={ifname},script=no,downscript=no");
    let card = "virtio-net-pci,netdev=lan,mac=52:54:00:00:00:78";
    let mut plain = ForeignQemu::boot(
        &lab,
        "tapped",
        qemu_new(),
        &["-machine", "q35", "-m", "96M", "-netdev", &tap, "-device", card],
        None,
    );
    attach(&lab, &plain);
    let boot = plain.guest.boot_id();
    plain.guest.touch("20M");
    let store = lab.path("store");
    protect(&lab, "tapped", &store, &["--count", "2"]);
    plain.kill();
    ip(&["link", "del", &ifname]);
    let arguments = ["restore", "tapped", "--store", store.to_str().unwrap()];
    lab.rekindle(arguments).status(1).prints(&["network lan", "needs one again", "--definition"]);
    lab.assert_empty();
    let definition = lab.path("here.toml");
    let port = plain.port();
    let (kernel, _) = lab.image();
    let write = |more: &str| {
        let forward = format!("[[net]]\nkind = \"user\"\nforward = [\"127.0.0.1:{port}:7000\"]\n");
        let text = format!("name = \"tapped\"\naccel = \"tcg\"\n[boot]\nkernel = {kernel:?}\n{forward}{more}");
        fs::write(&definition, text).unwrap();
    };
    let all = arguments.iter().copied().chain(["--definition", definition.to_str().unwrap()]).collect::<Vec<_>>();
    write("");
    lab.rekindle(&all).status(1).prints(&["has 2, the definition says 1"]);
    write(&format!("[[net]]\nkind = \"tap\"\nnetns = \"{}\"\n", lab.namespace));
    lab.rekindle(&all).ok();
    is_whole(&plain.guest, &boot);
    assert_eq!(lab.interfaces().len(), 1, "the card is on a tap in the namespace");
    plain.guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

/// A protector beside the test.
struct Protector(Child);

impl Protector {
    /// Start one, and wait until it has committed some checkpoints.
    fn start(lab: &Lab, name: &str, policy: &str) -> Self {
        let store = lab.path(&format!("store-{name}-{policy}"));
        let mut command =
            lab.command(["--json", "protect", name, "--create-store", "--every", "100ms", "--policy", policy]);
        let mut child = command.arg("--store").arg(store).stderr(Stdio::inherit()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let taken = lines.map(Result::unwrap).filter(|line| line.contains("\"checkpoint\"")).take(3).count();
        assert_eq!(taken, 3, "the protector ended");
        Self(child)
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Protector {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// That nothing of Rekindle is in a QEMU.
#[track_caller]
fn no_trace(process: Process, before: &std::collections::BTreeMap<String, usize>) {
    assert!(remote::existing(process).unwrap().is_empty(), "a userfaultfd is left");
    let left = remote::registered(process, Mode::MISSING | Mode::WRITE_PROTECT).unwrap();
    assert!(left.is_empty(), "memory is still registered: {left:x?}");
    assert_eq!(&descriptors(process), before, "descriptors are left");
}

#[test]
fn detaching_leaves_no_trace_also_of_a_protector_that_was_killed() {
    let lab = Lab::without_root();
    let plain = ForeignQemu::boot(&lab, "traced", qemu_new(), &["-machine", "q35", "-m", "192M"], None);
    let guest = &plain.guest;
    let before = plain.descriptors();
    guest.touch("40M");
    guest.ask("dirty 20 40 random");
    for policy in ["precopy", "cow", "basic"] {
        attach(&lab, &plain);
        let protector = Protector::start(&lab, "traced", policy);
        // Its only monitor is the protector's, and so is what is in its QEMU.
        assert_eq!(guest.status(), "protected");
        guest.rekindle(&["detach"]).status(1).prints(&["takes checkpoints", &protector.0.id().to_string()]);
        let store = lab.path("second");
        lab.rekindle(["protect", "traced", "--store", store.to_str().unwrap()])
            .status(1)
            .prints(&["takes checkpoints"]);
        protector.kill();
        if policy != "cow" {
            assert!(!remote::existing(plain.process).unwrap().is_empty(), "nothing was left that could be taken away");
        }
        guest.rekindle(&["detach"]).ok().prints(&["continues to run"]);
        no_trace(plain.process, &before);
        lab.assert_empty();
        let tick = guest.tick();
        wait_for("the guest to go on", DEADLINE, || (guest.tick() > tick).then_some(()));
    }
    // Nor does one that was not killed leave any.
    attach(&lab, &plain);
    protect(&lab, "traced", &lab.path("store-traced-cow"), &["--policy", "cow", "--count", "2"]);
    no_trace(plain.process, &before);
    assert_eq!(plain.qmp().execute::<Value>("query-fdsets", ()).unwrap(), json!([]));
    guest.ask("dirty 0");
    guest.verify();
    guest.rekindle(&["detach"]).ok();
}

/// Something that speaks QMP and is no QEMU.
fn impostor(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            let mut out = stream.try_clone().unwrap();
            let version = json!({"qemu": {"major": 10, "minor": 0, "micro": 2}, "package": ""});
            writeln!(out, "{}", json!({"QMP": {"version": version, "capabilities": []}})).unwrap();
            for command in serde_json::Deserializer::from_reader(stream).into_iter::<Value>() {
                let Ok(command) = command else { break };
                let cpus = command["execute"] == "query-cpus-fast";
                let answer = if cpus { json!([{"thread-id": std::process::id()}]) } else { json!({}) };
                let _ = writeln!(out, "{}", json!({ "return": answer }));
            }
        }
    });
}

#[test]
fn what_cannot_be_attached_to_is_named_and_leaves_nothing() {
    let lab = Lab::without_root();
    let attach_to = |name: &str, socket: &str| lab.rekindle(["attach", name, "--qmp", socket]);
    attach_to("none", lab.path("no.sock").to_str().unwrap()).status(1).prints(&["no.sock"]);
    impostor(&lab.path("impostor"));
    attach_to("none", lab.path("impostor").to_str().unwrap())
        .status(1)
        .prints(&["no QEMU", &std::process::id().to_string()]);
    lab.rekindle(["attach", "none"]).status(2).prints(&["--qmp", "--libvirt"]);
    lab.rekindle(["attach", "none", "--libvirt", "nobody", "--connect", "test:///default"])
        .status(1)
        .prints(&["nobody"]);
    lab.rekindle(["detach", "none"]).status(1).prints(&["there is no VM none"]);
    lab.assert_empty();

    // What cannot be restored is said now, and not when it is too late.
    let disk = lab.path("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let drive = format!("file={},format=raw,if=none,id=d", disk.display());
    let bad = ["-machine", "q35", "-m", "96M", "-snapshot", "-drive", &drive, "-device", "nvme,serial=x,drive=d,id=n"];
    let plain = ForeignQemu::boot(&lab, "bad", qemu_new(), &bad, None);
    let said = ["cannot be attached to", "-snapshot", "nameless file", "nvme", "QEMU cannot save"];
    attach_to("bad", &plain.socket()).status(1).prints(&said);
    lab.assert_empty();
    drop(plain);

    let mut plain = ForeignQemu::boot(&lab, "good", qemu_new(), &["-machine", "pc", "-m", "96M"], None);
    let descriptors = plain.descriptors();
    // Its socket is somebody else's just now.
    let held = plain.qmp();
    attach_to("good", &plain.socket()).status(1).prints(&["another client holds it"]);
    drop(held);
    // Two at once, under two names: one of them has it.
    let start = |name: &str| lab.command(["attach", name, "--qmp", &plain.socket()]).spawn().unwrap();
    let both = [("one", start("one")), ("two", start("two"))].map(|(name, child)| lab.wait(child, name.into()));
    let won: Vec<_> = both.iter().filter(|done| done.code == Some(0)).collect();
    assert_eq!(won.len(), 1, "{} {}", both[0], both[1]);
    let lost = both.iter().find(|done| done.code != Some(0)).unwrap();
    assert!(lost.stderr.contains("is VM") && lost.stderr.contains("rekindle detach"), "{lost}");
    let name = if both[0].code == Some(0) { "one" } else { "two" };
    let vm = |arguments: &[&str]| lab.rekindle(arguments.iter().copied().chain([name]));
    no_trace(plain.process, &descriptors);

    // What is not Rekindle's to do.
    attach_to(name, &plain.socket()).status(1).prints(&["runs already"]);
    vm(&["stop", "--now"]).status(1).prints(&["attached to", "the program that started it", "rekindle detach"]);
    vm(&["reboot", "vmm"]).status(1).prints(&["attached to", "rekindle detach"]);
    vm(&["console"]).status(1).prints(&["attached to"]);
    vm(&["show"]).ok().prints(&["attached to", "monitor:"]);
    lab.rekindle(["ls"]).ok().prints(&["attached", &plain.process.pid.to_string(), "running"]);

    // A device that is plugged in later is not on the command line.
    let device = json!({"driver": "virtio-rng-pci", "id": "late"});
    let _: Value = plain.qmp().execute("device_add", device).unwrap();
    let store = lab.path("store");
    let arguments = ["protect", name, "--store", store.to_str().unwrap(), "--create-store", "--count", "1"];
    lab.rekindle(arguments).status(1).prints(&["device late", "plugged in while the guest ran"]);

    plain.kill();
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
    let mut plain = ForeignQemu::boot(&lab, "caged", qemu_new(), &arguments, Some("nobody"));
    let before = plain.descriptors();
    // A third user has no right to look into it, and is told so.
    let home = lab.path("home");
    fs::create_dir(&home).unwrap();
    let chmod = |path: &str, mode: u32| {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    chmod(&plain.socket(), 0o777);
    chmod(home.to_str().unwrap(), 0o777);
    // It may be where only root gets at it.
    let program = lab.path("rekindle");
    fs::copy(env!("CARGO_BIN_EXE_rekindle"), &program).unwrap();
    let mut other = Command::new("setpriv");
    other.args(["--reuid", "games", "--regid", "games", "--clear-groups"]).arg(&program);
    other.args(["attach", "caged", "--qmp", &plain.socket()]).env("REKINDLE_RUN_DIR", home.join("run"));
    other.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let done = lab.finish(other).status(1).prints(&["process", "run as root"]);
    assert!(done.stderr.contains(&plain.process.pid.to_string()), "{done}");

    attach(&lab, &plain);
    plain.guest.touch("30M");
    let boot = plain.guest.boot_id();
    plain.guest.ask("dirty 20 30 random");
    for policy in ["cow", "precopy"] {
        assert_eq!(protect(&lab, "caged", &lab.path(policy), &["--policy", policy, "--count", "3"]).len(), 3);
        no_trace(plain.process, &before);
    }
    plain.kill();
    for policy in ["cow", "precopy"] {
        restore_elsewhere(&lab, "caged", &lab.path(policy), &[], |_| is_whole(&plain.guest, &boot));
    }
    plain.guest.rekindle(&["detach"]).ok();
}

/// A libvirtd of the test's own, of another user, with all of its directories.
struct Libvirt<'a> {
    lab: &'a Lab,
    daemon: Child,
    uri: String,
}

impl<'a> Libvirt<'a> {
    fn start(lab: &'a Lab) -> Self {
        let root = lab.path("lv");
        fs::create_dir(&root).unwrap();
        let path = |name: &str| root.join(name).to_string_lossy().into_owned();
        let directories = [
            ("HOME", "home"),
            ("XDG_RUNTIME_DIR", "run"),
            ("XDG_CONFIG_HOME", "c"),
            ("XDG_CACHE_HOME", "cache"),
            ("XDG_DATA_HOME", "data"),
        ];
        let (kernel, initrd) = lab.image();
        fs::copy(kernel, path("vmlinuz")).unwrap();
        fs::copy(initrd, path("initrd")).unwrap();
        directories.iter().for_each(|(_, name)| fs::create_dir(path(name)).unwrap());
        fs::set_permissions(lab.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        assert!(Command::new("chown").args(["-R", "nobody:nogroup", &path("")]).status().unwrap().success());
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "nobody", "--regid", "nogroup", "--clear-groups", "libvirtd", "--timeout", "600"]);
        command.args(["--pid-file", &path("libvirtd.pid")]).current_dir(&root).env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").envs(directories.map(|(key, name)| (key, path(name))));
        let log = fs::File::create(path("log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let daemon = command.spawn().expect("setpriv runs");
        let uri = format!("qemu:///session?socket={}", path("run/libvirt/libvirt-sock"));
        let libvirt = Self { lab, daemon, uri };
        wait_for("libvirtd (libvirt-daemon) to answer", DEADLINE, || libvirt.try_virsh(&["uri"]).then_some(()));
        libvirt
    }

    fn virsh(&self) -> Command {
        let mut command = Command::new("virsh");
        command.args(["--quiet", "--connect", &self.uri]).env("XDG_CACHE_HOME", self.lab.path("virsh"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn try_virsh(&self, arguments: &[&str]) -> bool {
        self.virsh().args(arguments).output().expect("virsh (libvirt-clients) runs").status.success()
    }

    #[track_caller]
    fn ask(&self, arguments: &[&str]) -> String {
        let mut command = self.virsh();
        command.args(arguments);
        self.lab.finish(command).ok().stdout.trim().to_owned()
    }
}

impl Drop for Libvirt<'_> {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[test]
fn a_guest_of_libvirt_is_protected_and_goes_on_without_it() {
    let lab = Lab::new();
    let libvirt = Libvirt::start(&lab);
    let root = lab.path("lv");
    let file = |name: &str| root.join(name).to_string_lossy().into_owned();
    let (kernel, initrd, console) = (file("vmlinuz"), file("initrd"), file("console"));
    let emulator = qemu_new().display().to_string();
    // As virt-install would write it; the name is one that shells dislike.
    let xml = format!(
        "<domain type='qemu'><name>it's</name><memory unit='MiB'>192</memory><vcpu>2</vcpu>
         <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{kernel}</kernel><initrd>{initrd}</initrd>
         <cmdline>console=ttyS0 quiet rekindle.tick=20 rekindle.touch=40M</cmdline></os>
         <features><acpi/></features><cpu mode='maximum'/><devices><emulator>{emulator}</emulator>
         <serial type='file'><source path='{console}'/></serial>
         <interface type='user'><mac address='52:54:00:12:34:99'/><model type='virtio'/></interface>
         <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
         <video><model type='vga'/></video><rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
         </devices></domain>"
    );
    fs::write(lab.path("domain.xml"), xml).unwrap();
    libvirt.ask(&["create", lab.path("domain.xml").to_str().unwrap()]);
    let ticks = || {
        let text = fs::read(&console).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().filter(|line| line.starts_with("tick ")).count()
    };
    wait_for("the guest to tick", DEADLINE, || (ticks() > 10).then_some(()));

    let domain = ["--libvirt", "it's", "--connect", &libvirt.uri];
    let shown = lab.rekindle(["--json", "attach", "dom"].iter().chain(&domain)).ok().json();
    let pid = u32::try_from(shown["vmm"]["pid"].as_u64().unwrap()).unwrap();
    let qemu = Process::of(pid).unwrap();
    let before = descriptors(qemu);
    lab.rekindle(["attach", "twin"].iter().chain(&domain)).status(1).prints(&["is VM dom already"]);
    lab.rekindle(["ls"]).ok().prints(&["dom", "running", "libvirt's domain it's"]);
    for policy in ["cow", "precopy"] {
        let taken = protect(&lab, "dom", &lab.path(policy), &["--policy", policy, "--count", "4"]);
        assert_eq!(taken.len(), 4);
        assert!(taken.iter().all(|checkpoint| checkpoint["stopped_us"].as_u64().unwrap() > 0));
        no_trace(qemu, &before);
    }
    assert_eq!(libvirt.ask(&["domstate", "it's"]), "running");
    // What libvirt's own tools do is seen.
    libvirt.ask(&["suspend", "it's"]);
    lab.rekindle(["ls"]).ok().prints(&["stopped (paused)"]);
    libvirt.ask(&["resume", "it's"]);

    // libvirt dies with the guest.
    drop(libvirt);
    qemu.kill().unwrap();
    assert!(qemu.wait_end(Duration::from_secs(10)).unwrap());
    let port = free_port();
    let guest = lab.vm("dom").net(Net::User(port)).guest();
    let definition = lab.path("here.toml");
    let text = format!(
        "name = \"dom\"\nmemory = \"192M\"\naccel = \"tcg\"\n[boot]\nkernel = \"{kernel}\"\n[[net]]\nkind = \"user\"\n\
         forward = [\"127.0.0.1:{port}:7000\"]\n"
    );
    fs::write(&definition, text).unwrap();
    let here = ["--definition", definition.to_str().unwrap()];
    for policy in ["cow", "precopy"] {
        restore_elsewhere(&lab, "dom", &lab.path(policy), &here, |rundir| {
            let boot = guest.boot_id();
            guest.verify();
            let console = rundir.join("console.log");
            let mut went_on = String::new();
            wait_for("the guest to tick on", DEADLINE, || {
                went_on.clear();
                fs::File::open(&console).unwrap().read_to_string(&mut went_on).unwrap();
                went_on.lines().any(|line| line.starts_with("tick ")).then_some(())
            });
            assert!(!went_on.contains("rekindle-micro ready"), "it was booted: {went_on}");
            assert_eq!(guest.boot_id(), boot);
        });
    }
    guest.rekindle(&["detach"]).ok().prints(&["had ended"]);
    lab.assert_empty();
}
