//! `rekindle ocf --libvirt`: a domain as a resource of a cluster.

use super::{Attached, assert_both_agree, read_both, write_both};
use crate::common::{CommandResult, DEADLINE, Lab, protector, wait_for};
use rekindle_kernel::process::Process;
use rekindle_store::types::{Guest, Owner};
use rekindle_store::{StoreUrl, admin};
use rekindle_testing::libvirt::PrivateLibvirt;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The domain of an [`Attached`] as resource `dom`. It is shut off first.
struct Resource<'a> {
    lab: &'a Lab,
    attached: Attached<'a>,
    store: PathBuf,
}

impl<'a> Resource<'a> {
    fn new(libvirt: &'a PrivateLibvirt, lab: &'a Lab) -> Self {
        let attached = Attached::boot(libvirt, lab);
        attached.detach("before it is a resource");
        attached.virsh("destroy", &[]).unwrap();
        Self { lab, attached, store: protector::store(lab, "store") }
    }

    fn ocf(&self, action: &str, arguments: &[&str]) -> CommandResult {
        self.ocf_on(self.lab, action, arguments)
    }

    /// Runs the action on the node whose run directory is that of `lab`.
    fn ocf_on(&self, lab: &Lab, action: &str, arguments: &[&str]) -> CommandResult {
        lab.finish(self.ocf_command(lab, action, arguments))
    }

    fn ocf_command(&self, lab: &Lab, action: &str, arguments: &[&str]) -> Command {
        let store = self.store.to_str().unwrap();
        if lab.path("") != self.lab.path("") {
            // All nodes have the same configuration.
            fs::copy(self.lab.path(".host.toml"), lab.path(".host.toml")).unwrap();
        }
        let mut command = lab.command(["--json", "ocf", action, "dom", "--libvirt", &self.attached.domain.name]);
        command.args(["--store", store, "--every", "200ms", "--within", "60s"]).args(arguments);
        command
    }

    #[track_caller]
    fn start_on(&self, lab: &Lab) -> Value {
        let started = self.ocf_on(lab, "start", &[]).ok().json();
        self.ocf_on(lab, "monitor", &[]).ok();
        // Checkpoints pause it for moments.
        wait_for("libvirt to run it", DEADLINE, || (self.attached.domain.state() == "running").then_some(()));
        wait_for("the guest", DEADLINE, || self.attached.domain.is_up().then_some(()));
        started
    }

    fn boot_id(&self) -> String {
        self.attached.domain.ask("boot-id")
    }

    fn url(&self) -> StoreUrl {
        StoreUrl::Directory(self.store.clone())
    }

    fn newest(&self) -> u64 {
        let listing = admin::listing(&self.url(), None).ok();
        listing.and_then(|listing| Some(listing.checkpoints.last()?.number)).unwrap_or(0)
    }

    /// Waits for a checkpoint that has started after this call.
    fn wait_checkpoint(&self) {
        let target = self.newest() + 2;
        wait_for("checkpoints", DEADLINE, || (self.newest() >= target).then_some(()));
    }

    /// Makes another host the owner of the store.
    fn claim_elsewhere(&self, guest: Guest) {
        let listing = admin::listing(&self.url(), None).unwrap();
        let owner = Owner { host: "elsewhere".into(), ..Owner::here("start dom").with(guest) };
        admin::fence(&self.url(), &listing.vm, &owner, None, None).unwrap();
    }

    fn protector(&self) -> Process {
        let record: Value =
            serde_json::from_slice(&fs::read(self.attached.guest.file("protector.json")).unwrap()).unwrap();
        let number = |key: &str| record[key].as_u64().unwrap();
        Process { pid: u32::try_from(number("pid")).unwrap(), started: number("started") }
    }

    /// Ends the guest without a shutdown.
    fn kill_qemu(&self) {
        self.attached.kill_qemu();
        self.ocf("monitor", &[]).status(7);
    }
}

#[test]
fn a_domain_is_resumed_on_a_node_that_does_not_know_it_after_a_crash_and_after_a_stop() {
    let libvirt = PrivateLibvirt::start();
    let (lab, other_node) = (Lab::without_root(), Lab::without_root());
    let dom = Resource::new(&libvirt, &lab);
    let guest = &dom.attached.guest;
    dom.ocf("monitor", &[]).status(7);
    dom.ocf("stop", &[]).ok();
    assert_eq!(dom.start_on(&lab)["started"], "booted");
    assert_eq!(dom.start_on(&lab)["started"], "already");
    let boot = dom.boot_id();
    write_both(guest, 1);
    let expected = read_both(guest);
    dom.wait_checkpoint();

    // The first node fails. The second one has never had the domain.
    dom.kill_qemu();
    dom.attached.virsh("undefine", &[]).unwrap();
    assert_eq!(dom.start_on(&other_node)["started"], "restored-into-libvirt");
    assert_eq!(dom.boot_id(), boot, "the guest was booted");
    assert_both_agree(guest, &expected, "on the second node");
    dom.wait_checkpoint();
    // The first node is up again, and has an old run directory.
    write_both(guest, 2);
    let expected = read_both(guest);

    // A stop takes a last checkpoint.
    let before = dom.newest();
    assert_eq!(dom.ocf_on(&other_node, "stop", &[]).ok().json()["lost"], Value::Null);
    assert!(dom.newest() > before);
    assert_eq!(dom.attached.domain.state(), "shut off");
    dom.ocf_on(&other_node, "monitor", &[]).status(7);
    assert_eq!(dom.start_on(&lab)["started"], "restored-into-libvirt");
    assert_eq!(dom.boot_id(), boot);
    assert_both_agree(guest, &expected, "back on the first node");
    dom.ocf("stop", &[]).ok();
    assert!(!guest.file("").exists());
}

#[test]
fn a_domain_that_another_host_owns_is_ended() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let dom = Resource::new(&libvirt, &lab);
    dom.start_on(&lab);
    dom.wait_checkpoint();
    // The protector would end the guest itself.
    dom.protector().kill().unwrap();
    dom.claim_elsewhere(Guest::Restored);
    dom.ocf("monitor", &[]).status(7);
    wait_for("libvirt to notice", DEADLINE, || (dom.attached.domain.state() == "shut off").then_some(()));
    dom.ocf("monitor", &[]).status(7);
    dom.ocf("stop", &[]).ok();

    // libvirt starts the domain again, outside of the cluster.
    dom.attached.virsh("start", &[]).unwrap();
    let qemu = dom.attached.domain.process();
    dom.ocf("monitor", &[]).status(7);
    assert!(!qemu.is_alive());
    assert_eq!(dom.attached.domain.state(), "shut off");
}

#[test]
fn a_running_domain_becomes_a_resource_and_one_that_was_started_again_is_shut_down() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let dom = Resource::new(&libvirt, &lab);
    dom.attached.virsh("start", &[]).unwrap();
    wait_for("the guest", DEADLINE, || dom.attached.domain.is_up().then_some(()));
    let boot = dom.boot_id();
    dom.ocf("monitor", &[]).ok();
    assert_eq!(dom.start_on(&lab)["started"], "already");
    assert_eq!(dom.boot_id(), boot);
    dom.wait_checkpoint();

    dom.kill_qemu();
    dom.attached.virsh("start", &[]).unwrap();
    wait_for("the guest", DEADLINE, || dom.attached.domain.is_up().then_some(()));
    let qemu = dom.attached.domain.process();
    dom.ocf("monitor", &[]).status(1).prints(&["the cluster has not started it"]);
    dom.ocf("start", &[]).status(1).prints(&["let the cluster stop the resource"]);
    assert!(qemu.is_alive());
    dom.ocf("stop", &["--dry-run"]).ok().prints(&["shut the guest down", "the cluster has not started it"]);
    let stopped = dom.ocf("stop", &[]).ok().json();
    assert!(stopped["lost"].as_str().unwrap().contains("outside of the cluster"), "{stopped}");
    assert!(dom.attached.domain.log().contains("reason=shutdown"), "{}", dom.attached.domain.log());
    assert_eq!(dom.attached.domain.state(), "shut off");
    dom.ocf("monitor", &[]).status(7);

    // Without a run directory, and a guest that cannot shut down.
    dom.attached.virsh("start", &[]).unwrap();
    dom.attached.virsh("suspend", &[]).unwrap();
    let qemu = dom.attached.domain.process();
    assert_eq!(dom.ocf("stop", &[]).ok().json()["ended"], "powered-off");
    assert!(!qemu.is_alive());
    assert_eq!(dom.attached.domain.state(), "shut off");
    dom.ocf("monitor", &[]).status(7);
}

#[test]
fn a_domain_is_not_ended_by_the_store_of_another_vm() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let dom = Resource::new(&libvirt, &lab);
    let other = lab.vm("other").write();
    lab.rekindle(["run", other.to_str().unwrap()]).ok();
    lab.rekindle(["protect", "other", "--store", dom.store.to_str().unwrap(), "--count", "1"]).ok();
    dom.claim_elsewhere(Guest::Restored);
    dom.attached.virsh("start", &[]).unwrap();
    let qemu = dom.attached.domain.process();
    dom.ocf("monitor", &[]).status(1).prints(&["belongs to VM other", "set the resource's own store"]);
    dom.ocf("start", &[]).status(1);
    assert!(qemu.is_alive());
}

#[test]
fn a_domain_that_libvirt_may_still_start_is_not_off() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let dom = Resource::new(&libvirt, &lab);
    // As after a request that the daemon has not answered.
    let run_directory = lab.run_root().join("dom");
    fs::create_dir_all(&run_directory).unwrap();
    fs::write(run_directory.join("libvirt-start"), "").unwrap();
    dom.ocf("monitor", &[]).status(1).prints(&["may still start it"]);
    dom.ocf("start", &[]).status(1).prints(&["may still start it"]);
    let daemon = libvirt.daemon().unwrap();
    daemon.stop().unwrap();
    dom.ocf("stop", &[]).status(1).prints(&["may still start it"]);
    daemon.resume().unwrap();
    dom.ocf("stop", &[]).ok();
    dom.ocf("monitor", &[]).status(7);
    assert!(!run_directory.exists());
    assert_eq!(dom.start_on(&lab)["started"], "booted");
    dom.ocf("stop", &[]).ok();
}

#[test]
fn a_domain_without_daemon_is_degraded_and_is_stopped_by_its_process() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let dom = Resource::new(&libvirt, &lab);
    dom.start_on(&lab);
    dom.wait_checkpoint();
    let (qemu, boot) = (dom.attached.domain.process(), dom.boot_id());
    libvirt.stop_daemon();
    dom.ocf("monitor", &[]).status(190).prints(&["libvirt does not answer"]);
    assert!(qemu.is_alive());
    assert_ne!(dom.ocf("stop", &[]).ok().json()["lost"], Value::Null);
    assert!(!qemu.is_alive());
    dom.ocf("monitor", &[]).status(7);
    // Another node would have to start it.
    dom.ocf("start", &[]).status(1).prints(&["libvirt"]);
    libvirt.start_daemon();
    assert_eq!(dom.start_on(&lab)["started"], "restored-into-libvirt");
    assert_eq!(dom.boot_id(), boot);
    dom.ocf("stop", &[]).ok();
}

#[test]
fn the_agent_ends_a_domain_on_a_node_without_the_program() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let dom = Resource::new(&libvirt, &lab);
    let agent = |action: &str| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/ocf/rekindle");
        let mut command = Command::new(script);
        command.arg(action).env("OCF_ROOT", "/usr/lib/ocf").env("OCF_RESOURCE_INSTANCE", "dom");
        command.env("OCF_RESKEY_domain", &dom.attached.domain.name).env("OCF_RESKEY_store", &dom.store);
        command.env("OCF_RESKEY_binary", "/absent").env("OCF_RESKEY_run_dir", lab.run_root());
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(agent("monitor").0, Some(7), "the agent needs the package resource-agents: {}", agent("monitor").1);
    // With a run directory, and without one.
    for is_resource in [true, false] {
        if is_resource {
            dom.start_on(&lab);
        } else {
            lab.rekindle(["detach", "dom"]).ok();
            dom.attached.virsh("start", &[]).unwrap();
        }
        let qemu = dom.attached.domain.process();
        assert_eq!(agent("monitor").0, Some(1), "{}", agent("monitor").1);
        assert_eq!(agent("stop").0, Some(0), "{}", agent("stop").1);
        assert!(!qemu.is_alive());
        assert_eq!(agent("monitor").0, Some(7));
        wait_for("libvirt to notice", DEADLINE, || (dom.attached.domain.state() == "shut off").then_some(()));
    }
    let (code, printed) = agent("migrate_to");
    assert_eq!(code, Some(3), "{printed}");
    assert!(printed.contains("allow-migrate=false"), "{printed}");
}

#[test]
fn what_a_domain_cannot_be_is_rejected() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let dom = Resource::new(&libvirt, &lab);
    dom.ocf("start", &["--output-commit"]).status(2);
    dom.ocf("start", &["--definition", "/etc/dom.toml"]).status(2);
    dom.ocf("migrate-to", &["--to", "elsewhere"]).status(2).prints(&["allow-migrate=false"]);
    let by_number = ["ocf", "monitor", "dom", "--libvirt", "7", "--store", dom.store.to_str().unwrap()];
    lab.rekindle(by_number).status(2).prints(&["not a domain's name"]);
    dom.attached.virsh("autostart", &[]).unwrap();
    dom.ocf("start", &[]).status(1).prints(&["virsh autostart --disable"]);
    dom.attached.virsh("undefine", &[]).unwrap();
    dom.ocf("start", &[]).status(1).prints(&["does not know domain", "virsh define"]);
    dom.ocf("monitor", &[]).status(7);
    dom.ocf("show-config", &[]).ok();
}

#[test]
fn a_shutdown_that_comes_in_a_pause_is_requested_again() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let dom = Resource::new(&libvirt, &lab);
    dom.start_on(&lab);
    // As a checkpoint does, but until the request was rejected.
    dom.attached.virsh("suspend", &[]).unwrap();
    let log = lab.path("stop.log");
    let mut command = dom.ocf_command(&lab, "stop", &["--how", "shutdown"]);
    command.env("REKINDLE_LOG", "debug").stderr(fs::File::create(&log).unwrap());
    let stopping = command.spawn().unwrap();
    wait_for("a rejected request", DEADLINE, || {
        fs::read_to_string(&log).unwrap().contains("its shutdown is requested again").then_some(())
    });
    dom.attached.virsh("resume", &[]).unwrap();
    let stopped = lab.wait(stopping, "stop".into()).ok();
    assert_eq!(stopped.json()["how"], "shut-down", "{stopped}");
    assert_eq!(dom.attached.domain.state(), "shut off");
}

#[test]
fn a_guest_that_has_shut_down_is_booted_with_its_newest_disks() {
    let libvirt = PrivateLibvirt::start();
    let (lab, other_node) = (Lab::without_root(), Lab::without_root());
    let dom = Resource::new(&libvirt, &lab);
    let guest = &dom.attached.guest;
    dom.start_on(&lab);
    dom.wait_checkpoint();
    let boot = dom.boot_id();
    write_both(guest, 1);
    let expected = read_both(guest);
    guest.ask("drop-caches");
    let stopped = dom.ocf("stop", &["--how", "shutdown"]).ok();
    assert_eq!(stopped.json()["how"], "shut-down", "{stopped}");
    assert_eq!(dom.attached.domain.state(), "shut off");

    let log = dom.attached.domain.log();
    let started = dom.start_on(&lab);
    assert_eq!(
        (&started["started"], &started["why"]),
        (&"booted".into(), &"it was shut down cleanly".into()),
        "{stopped}\n{log}"
    );
    let second = dom.boot_id();
    assert_ne!(second, boot);
    assert_eq!(read_both(guest), expected);
    dom.wait_checkpoint();

    // The guest shuts itself down. It is started on a node whose run directory does not have it.
    write_both(guest, 2);
    let expected = read_both(guest);
    guest.ask("drop-caches");
    guest.send("poweroff");
    wait_for("the monitor to report it as stopped", DEADLINE, || {
        (dom.ocf("monitor", &[]).code == Some(7)).then_some(())
    });
    dom.ocf("stop", &[]).ok();
    assert_eq!(dom.start_on(&other_node)["started"], "booted");
    assert_ne!(dom.boot_id(), second);
    assert_eq!(read_both(guest), expected);
    dom.wait_checkpoint();

    // A signal ends QEMU, which is no shutdown of the guest.
    let third = dom.boot_id();
    let qemu = dom.attached.domain.process();
    qemu.terminate().unwrap();
    assert!(qemu.wait_end(DEADLINE).unwrap());
    dom.ocf_on(&other_node, "monitor", &[]).status(7);
    dom.ocf_on(&other_node, "stop", &[]).ok();
    assert_eq!(dom.start_on(&other_node)["started"], "restored-into-libvirt");
    assert_eq!(dom.boot_id(), third);
    assert_both_agree(guest, &expected, "after a signal");
    dom.ocf_on(&other_node, "stop", &[]).ok();
}
