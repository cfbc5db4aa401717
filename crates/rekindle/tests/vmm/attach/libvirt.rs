//! Domains of libvirt: attached through its monitor.

use super::{Protector, assert_no_trace, protect, restore_on_another_host};
use crate::common::{DEADLINE, Lab, Net, free_port, qemu_new, wait_for};
use rekindle_kernel::process::Process;
use rekindle_qemu::monitor::Monitor;
use rekindle_testing::libvirt::{DomainOptions, PrivateLibvirt};
use rekindle_testing::micro::{KERNEL, KERNEL_OPTIONS};
use rekindle_testing::process::open_files;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// The connection to the private libvirt.
const URI: &str = "qemu:///system";

#[test]
fn a_guest_of_libvirt_is_protected_and_restored_without_it() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let file = |name: &str| format!("/var/lib/libvirt/images/{name}");
    let (kernel, initrd, console) = (file(KERNEL), file("initrd"), file("console"));
    let emulator = qemu_new().display().to_string();
    let name = format!("it's-{}", std::process::id());
    // The domain is as virt-install would write it. Its name needs quoting in a shell.
    let xml = format!(
        "<domain type='qemu'><name>{name}</name><memory unit='MiB'>192</memory><vcpu>2</vcpu>
         <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{kernel}</kernel><initrd>{initrd}</initrd>
         <cmdline>{KERNEL_OPTIONS} rekindle.tick=20 rekindle.touch=40M</cmdline></os>
         <features><acpi/></features><cpu mode='maximum'/><devices><emulator>{emulator}</emulator>
         <serial type='file'><source path='{console}'/></serial>
         <interface type='user'><mac address='52:54:00:12:34:99'/><model type='virtio'/></interface>
         <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
         <video><model type='vga'/></video><rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
         </devices></domain>"
    );
    fs::write(lab.path("domain.xml"), xml).unwrap();
    libvirt.virsh(&["create", lab.path("domain.xml").to_str().unwrap()]);
    let ticks = || {
        let text = fs::read(&console).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().filter(|line| line.starts_with("tick ")).count()
    };
    wait_for("the guest to tick", DEADLINE, || (ticks() > 10).then_some(()));

    let domain = ["--libvirt", &name, "--connect", URI];
    let attached = lab.rekindle(["--json", "attach", "dom"].iter().chain(&domain)).ok().json();
    let pid = u32::try_from(attached["vmm"]["pid"].as_u64().unwrap()).unwrap();
    let qemu = Process::of(pid).unwrap();
    let files = open_files(qemu.pid);
    lab.rekindle(["attach", "twin"].iter().chain(&domain)).status(1).prints(&["is VM dom already"]);
    lab.rekindle(["ls"]).ok().prints(&["dom", "running", &format!("libvirt's domain {name}")]);
    for policy in ["cow", "precopy"] {
        let checkpoints = protect(&lab, "dom", &lab.path(policy), &["--policy", policy, "--count", "4"]);
        assert_eq!(checkpoints.len(), 4);
        assert!(checkpoints.iter().all(|checkpoint| checkpoint["stopped_us"].as_u64().unwrap() > 0));
        assert_no_trace(qemu, &files);
    }
    assert_eq!(libvirt.virsh(&["domstate", &name]), "running");
    // Rekindle shows changes by libvirt's own tools.
    libvirt.virsh(&["suspend", &name]);
    lab.rekindle(["ls"]).ok().prints(&["stopped (paused)"]);
    libvirt.virsh(&["resume", &name]);

    // The guest is restored without libvirt.
    libvirt.stop_daemon();
    qemu.kill().unwrap();
    assert!(qemu.wait_end(Duration::from_secs(10)).unwrap());
    let port = free_port();
    let guest = lab.vm("dom").net(Net::User(port)).guest();
    let definition = lab.path("here.toml");
    let text = format!(
        "name = \"dom\"\nqemu = \"{emulator}\"\nmemory = \"192M\"\naccel = \"tcg\"\n[boot]\nkernel = \"{kernel}\"\n\
         [[net]]\nkind = \"user\"\nforward = [\"127.0.0.1:{port}:7000\"]\n"
    );
    fs::write(&definition, text).unwrap();
    let with_definition = ["--definition", definition.to_str().unwrap()];
    for policy in ["cow", "precopy"] {
        restore_on_another_host(&lab, "dom", &lab.path(policy), &with_definition, |run_directory| {
            let boot = guest.boot_id();
            guest.verify();
            let console = run_directory.join("console.log");
            let mut output = String::new();
            wait_for("the guest to tick", DEADLINE, || {
                output.clear();
                fs::File::open(&console).unwrap().read_to_string(&mut output).unwrap();
                output.lines().any(|line| line.starts_with("tick ")).then_some(())
            });
            assert!(!output.contains("rekindle-micro ready"), "it was booted: {output}");
            assert_eq!(guest.boot_id(), boot);
        });
    }
    guest.rekindle(&["detach"]).ok().prints(&["had ended"]);
    lab.assert_empty();
}

#[test]
fn a_protector_continues_when_the_daemon_of_libvirt_is_back() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = libvirt.boot(&DomainOptions::new("protected"));
    lab.rekindle(["attach", "dom", "--libvirt", &domain.name, "--connect", URI]).ok();
    let mut command = lab.command(["--json", "protect", "dom", "--create-store", "--every", "100ms"]);
    let mut child = command.arg("--store").arg(lab.path("store")).stderr(Stdio::inherit()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let protector = Protector(child);
    let mut events = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let mut wait_for_event = |kind: &str| {
        events.find(|event| event["event"] == kind).unwrap_or_else(|| panic!("the protector ended before `{kind}`"))
    };
    let first = wait_for_event("checkpoint");
    libvirt.stop_daemon();
    let reason = wait_for_event("waiting");
    assert!(reason["state"].as_str().unwrap().contains("unprotected"), "{reason}");
    domain.ask("boot-id");
    lab.rekindle(["status"]).ok().prints(&["degraded (unprotected"]);
    libvirt.start_daemon();
    wait_for_event("attached");
    let second = wait_for_event("checkpoint");
    assert!(second["number"].as_u64() > first["number"].as_u64(), "{first} {second}");
    assert_eq!(lab.rekindle(["--json", "status"]).ok().json()["guests"][0]["status"], "protected");
    // The first checkpoints after a start are full; QEMU waits longer in their pauses.
    protector.kill_in_pause(&lab, "dom", domain.process());
    wait_for("libvirt's state", DEADLINE, || (domain.state() == "running").then_some(()));
    domain.ask("boot-id");
    lab.rekindle(["detach", "dom"]).ok();
}

#[test]
fn a_domain_whose_qemu_was_replaced_is_protected_without_its_daemon() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = libvirt.boot(&DomainOptions::new("direct"));
    let boot = domain.ask("boot-id");
    lab.rekindle(["replace-qemu", &domain.name]).ok();
    lab.rekindle(["attach", "dom", "--libvirt", &domain.name, "--connect", URI]).ok();
    let store = lab.path("store");
    let protect = |arguments: &[&str]| {
        let mut command = lab.command(["--json", "protect", "dom", "--create-store", "--every", "100ms", "--store"]);
        command.arg(&store).args(arguments);
        command
    };
    let mut child = protect(&[]).stderr(Stdio::inherit()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let protector = Protector(child);
    let mut events = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let mut wait_for_event = |kind: &str| {
        events.find(|event| event["event"] == kind).unwrap_or_else(|| panic!("the protector ended before `{kind}`"))
    };
    wait_for_event("checkpoint");
    libvirt.stop_daemon();
    // One may have been taken before the daemon ended, and one while it did.
    let three = [(); 3].map(|()| wait_for_event("checkpoint")["number"].as_u64().unwrap());
    assert!(three.is_sorted(), "{three:?}");
    assert_eq!(lab.rekindle(["--json", "status"]).ok().json()["guests"][0]["status"], "protected");
    libvirt.start_daemon();
    wait_for("libvirt's state", DEADLINE, || (domain.state() == "running").then_some(()));
    // A suspend by libvirt's tools is noticed as before.
    libvirt.virsh(&["suspend", &domain.name]);
    wait_for_event("waiting");
    libvirt.virsh(&["resume", &domain.name]);
    wait_for_event("checkpoint");
    protector.kill_in_pause(&lab, "dom", domain.process());
    wait_for("libvirt's state", DEADLINE, || (domain.state() == "running").then_some(()));
    let compared = lab.finish(protect(&["--count", "2", "--compare"])).ok();
    assert!(compared.stdout.contains("\"event\":\"compared\""), "{compared}");
    assert!(compared.stdout.contains("\"wrong\":0"), "{compared}");
    assert_eq!(domain.ask("boot-id"), boot);
    lab.rekindle(["detach", "dom"]).ok();
}

#[test]
fn libvirt_resumes_a_domain_from_a_checkpoint_that_was_exported_for_it() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let domain = libvirt.boot(&DomainOptions::new("exported"));
    let boot = domain.ask("boot-id");
    domain.ask("touch 24M");
    lab.rekindle(["attach", "dom", "--libvirt", &domain.name, "--connect", URI]).ok();
    let store = lab.path("store");
    let store = store.to_str().unwrap();
    lab.rekindle(["protect", "dom", "--create-store", "--count", "2", "--store", store]).ok();
    libvirt.virsh(&["destroy", &domain.name]);

    let image = Path::new("/var/lib/libvirt/checkpoint");
    lab.rekindle(["store", "export", store, "--libvirt", "--output", image.to_str().unwrap()]).ok();
    // The user of libvirt's QEMUs has no right to read it, and libvirt gives it that right.
    assert_eq!(fs::metadata(image).unwrap().permissions().mode() & 0o777, 0o600);
    libvirt.virsh(&["restore", image.to_str().unwrap()]);
    assert_eq!(domain.state(), "running");
    assert_eq!(domain.ask("boot-id"), boot);
    assert!(domain.ask("verify").parse::<u64>().unwrap() > 0);
    libvirt.virsh(&["suspend", &domain.name]);
    libvirt.virsh(&["resume", &domain.name]);
    domain.ask("boot-id");
    lab.rekindle(["detach", "dom"]).ok();
}

#[test]
fn a_domain_that_was_started_again_gets_no_commands_for_its_old_qemu() {
    let libvirt = PrivateLibvirt::start();
    let domain = libvirt.create(&DomainOptions::new("again"));
    let monitor = Monitor::Libvirt { domain: domain.name.clone(), connect: Some(URI.into()) };
    let mut qmp = monitor.connect(DEADLINE).unwrap();
    qmp.execute::<Value>("query-status", ()).unwrap();
    // The same name and UUID.
    let file = "/run/again.xml";
    fs::write(file, libvirt.virsh(&["dumpxml", &domain.name])).unwrap();
    libvirt.virsh(&["destroy", &domain.name]);
    libvirt.virsh(&["create", file]);
    let e = qmp.execute::<Value>("query-status", ()).unwrap_err();
    assert!(e.is_of_libvirt() && e.to_string().contains("started again"), "{e}");
    monitor.connect(DEADLINE).unwrap().execute::<Value>("query-status", ()).unwrap();
}
