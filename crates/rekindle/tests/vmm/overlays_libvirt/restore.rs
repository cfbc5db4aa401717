//! `rekindle restore --into-libvirt`: libvirt runs the restored domain, and manages it as before.

use super::{Attached, OVERLAYS, URI, assert_both_agree, image, overlays, read_both, write_both};
use crate::attach::protect;
use crate::common::hostile::HostileStore;
use crate::common::lab::entries;
use crate::common::protector::{self, Protector, Slowdown, pager};
use crate::common::{DEADLINE, Lab, wait_for};
use rekindle_testing::libvirt::{Firmware, PrivateLibvirt};
use rekindle_testing::tpm::Tpm;
use rekindle_vm::fault::RESTORE_DOMAIN_POINTS;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Returns `rekindle restore --into-libvirt` of VM `dom`.
pub(super) fn restoring_into_libvirt(lab: &Lab, store: &Path) -> Command {
    let mut command = lab.command(["--json", "restore", "dom", "--into-libvirt", "--preview", "--connect", URI]);
    command.arg("--store").arg(store);
    command
}

#[test]
fn libvirt_runs_a_restored_domain_with_its_disks_and_it_is_protected_again() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    let boot = guest.boot_id();
    write_both(guest, 1);
    let first = read_both(guest);
    let protected = [&OVERLAYS[..], &["--count", "4"]].concat();
    protect(&lab, "dom", &store, &protected);
    write_both(guest, 2);
    let restore = || lab.finish(restoring_into_libvirt(&lab, &store));
    restore().status(1).prints(&["dom", "run"]);
    attached.kill_qemu();
    // A host that has never had the domain.
    attached.virsh("undefine", &[]).unwrap();
    assert_eq!(restore().ok().json()["filled"], false, "its memory loads on demand");
    assert_eq!(attached.domain.state(), "running");
    assert_eq!(guest.boot_id(), boot);
    assert_both_agree(guest, &first, "restored into libvirt");
    for target in ["vda", "vdb"] {
        attached.assert_fenced(target);
    }
    assert!(
        attached
            .virsh("dominfo", &[])
            .unwrap()
            .lines()
            .any(|line| line.starts_with("Persistent") && line.ends_with("yes"))
    );
    libvirt.virsh(&["suspend", &attached.domain.name]);
    libvirt.virsh(&["resume", &attached.domain.name]);

    // Its next checkpoints merge the overlays, and it can be restored from them as well.
    write_both(guest, 3);
    let newest = read_both(guest);
    assert_eq!(protect(&lab, "dom", &store, &protected).len(), 4);
    write_both(guest, 4);
    attached.kill_qemu();
    restore().ok();
    assert_eq!(guest.boot_id(), boot);
    assert_both_agree(guest, &newest, "restored again, over a definition");
    attached.detach("at the end");
    assert_both_agree(guest, &newest, "on its images");
    // Its command line names overlays that were merged.
    lab.rekindle(["replace-qemu", &attached.domain.name]).ok();
    assert_eq!((attached.domain.state().as_str(), guest.boot_id()), ("running", boot));
    assert_both_agree(guest, &newest, "in another QEMU");
}

/// A change of a domain's XML, and words of the error.
type XmlChange<'a> = (&'a dyn Fn(&str) -> String, &'a [&'a str]);

#[test]
fn a_changed_description_of_a_domain_starts_nothing() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let store = protector::store(&lab, "store");
    let boot = attached.guest.boot_id();
    protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "2"]].concat());
    attached.kill_qemu();
    // A host that has never had the domain.
    attached.virsh("undefine", &[]).unwrap();
    let hostile = HostileStore::of(&lab, &store);
    let (trap, mark) = hostile.trap();
    let (trap, run) = (trap.display().to_string(), ["restore", "--into-libvirt", "--preview", "--connect", URI]);
    let device = |text: &'static str| move |xml: &str| xml.replacen("</devices>", &format!("{text}</devices>"), 1);
    let top = |text: &'static str| move |xml: &str| xml.replacen("<devices>", &format!("{text}<devices>"), 1);
    let emulator = |xml: &str| {
        let (before, after) = xml.split_once("<emulator>").unwrap();
        let (_, after) = after.split_once("</emulator>").unwrap();
        format!("{before}<emulator>{trap}</emulator>{after}")
    };
    let arguments =
        "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><q:arg value='-S'/></q:commandline>";
    let disk = "<disk type='file' device='disk'><source file='/etc/shadow'/><target dev='vdz' bus='virtio'/></disk>";
    let block = "<disk type='block' device='disk'><source dev='/dev/sda'/><target dev='vdz' bus='virtio'/></disk>";
    let shared = "<filesystem type='mount'><source dir='/'/><target dir='x'/></filesystem>";
    let host_device = "<hostdev mode='subsystem' type='usb'/>";
    let changes: [XmlChange<'_>; 6] = [
        (&emulator, &[&trap, "qemu = ["]),
        (&top(arguments), &["-S: an argument", "arguments = [\"-S\"]"]),
        (&device(disk), &["<disk>: /etc/shadow", "paths = [\"/etc/shadow\"]"]),
        (&device(block), &["<disk>: /dev/sda", "paths = [\"/dev/sda\"]"]),
        (&device(shared), &["<filesystem>", "elements = [\"filesystem\"]"]),
        (&device(host_device), &["<hostdev>"]),
    ];
    for (change, words) in changes {
        hostile.write(|recipe, _| {
            let xml = &mut recipe["hardware"]["foreign"]["domain_xml"];
            let changed = change(xml.as_str().unwrap());
            assert_ne!(changed, *xml);
            *xml = changed.into();
        });
        let refused = hostile.run(".host.toml", "dom", &run).status(1);
        for word in words.iter().chain(&["nothing was started"]) {
            assert!(refused.stderr.contains(word), "{word:?} was expected of {refused}");
        }
        assert_eq!(libvirt.virsh(&["list", "--all", "--name"]).trim(), "");
    }
    // Another domain of this host: neither its name and UUID nor its UUID alone are a permission to use its files.
    let other = "9d0e1f4c-3a35-4a0e-8b55-1f35d0f5a001";
    let secret = "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='/etc/shadow'/>\
                  <target dev='vdz' bus='virtio'/></disk>";
    let definition = lab.path("other.xml");
    let xml = format!(
        "<domain type='qemu'><name>other</name><uuid>{other}</uuid><memory>4096</memory>\
         <os><type arch='x86_64' machine='q35'>hvm</type></os><devices>{secret}</devices></domain>"
    );
    fs::write(&definition, xml).unwrap();
    libvirt.virsh(&["define", definition.to_str().unwrap()]);
    let replace = |xml: &str, element: &str, text: &str| {
        let (before, rest) = xml.split_once(&format!("<{element}>")).unwrap();
        let (_, after) = rest.split_once(&format!("</{element}>")).unwrap();
        format!("{before}<{element}>{text}</{element}>{after}")
    };
    for (name, word) in [("other", "this host's domain other"), ("mine", "the UUID of the domain other")] {
        hostile.write(|recipe, _| {
            let xml = &mut recipe["hardware"]["foreign"]["domain_xml"];
            let changed = replace(&replace(xml.as_str().unwrap(), "uuid", other), "name", name);
            *xml = changed.replacen("</devices>", &format!("{secret}</devices>"), 1).into();
        });
        let refused = hostile.run(".host.toml", "dom", &run).status(1);
        assert!(refused.stderr.contains(word) && refused.stderr.contains("nothing was started"), "{refused}");
        assert_eq!(libvirt.virsh(&["domstate", "other"]).trim(), "shut off");
    }
    libvirt.virsh(&["undefine", "other"]);
    // `qemu-img` is looked up next to the QEMU of the definition.
    hostile.write(|recipe, _| recipe["definition"]["qemu"] = trap.clone().into());
    let refused = hostile.run(".host.toml", "dom", &run).status(1);
    assert!(refused.stderr.contains(&trap), "{refused}");
    assert!(!Path::new(&mark).exists(), "a program of the store was started");
    hostile.write(|_, _| ());
    lab.finish(restoring_into_libvirt(&lab, &store)).ok();
    assert_eq!(attached.guest.boot_id(), boot);
}

#[test]
fn the_variables_of_uefi_and_the_tpm_are_those_of_the_checkpoint() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot_with(Firmware::Uefi, &libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    let boot = guest.boot_id();
    write_both(guest, 1);
    let blocks = read_both(guest);
    guest.ask("efi-variable checkpoint");
    let ask = |command: &str| guest.ask(command);
    let tpm = Tpm(&ask);
    let measured = tpm.fill();
    protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "2"]].concat());
    guest.ask("efi-variable later");
    tpm.write_variable(2);
    tpm.measure(2);
    attached.kill_qemu();
    let into_own_qemu = lab.rekindle(["restore", "dom", "--store", store.to_str().unwrap()]);
    into_own_qemu.status(1).prints(&["its TPM", "--into-libvirt"]);
    // A host that has never had the TPM.
    fs::remove_dir_all("/var/lib/libvirt/swtpm").unwrap();
    lab.finish(restoring_into_libvirt(&lab, &store)).ok();
    assert_eq!(guest.boot_id(), boot);
    assert_eq!(guest.ask("efi-variable"), "checkpoint");
    assert_eq!((tpm.variable(), tpm.register()), (1, measured));
    assert_both_agree(guest, &blocks, "restored");
    // The firmware reads them from the file that libvirt has for the domain.
    libvirt.virsh(&["reset", &attached.domain.name]);
    wait_for("the guest's next boot", DEADLINE, || {
        (attached.domain.is_up() && attached.domain.ask("boot-id") != boot).then_some(())
    });
    assert_eq!(guest.ask("efi-variable"), "checkpoint");
    assert_eq!(tpm.variable(), 1);
    attached.detach("at the end");
}

#[test]
fn a_protector_that_has_started_during_the_fill_continues_after_it() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "2"]].concat());
    attached.kill_qemu();
    lab.finish(restoring_into_libvirt(&lab, &store)).ok();
    let slowdown = Slowdown::of(pager(guest).expect("its memory loads on demand"));
    let mut protector = Protector::start(guest, &lab, &store, &[&OVERLAYS[..], &["--every", "100ms"]].concat());
    assert_eq!(protector.wait("attached")["filling"], true, "the pager was not slow enough");
    protector.next_checkpoint();
    drop(slowdown);
    // The kernel permits only root to make a userfaultfd, and this QEMU runs as another user.
    protector.wait("filled");
    write_both(guest, 1);
    let expected = read_both(guest);
    assert_eq!(protector.next_checkpoint()["full"], false);
    protector.kill();
    write_both(guest, 2);
    attached.kill_qemu();
    lab.finish(restoring_into_libvirt(&lab, &store)).ok();
    assert_both_agree(guest, &expected, "restored again");
    attached.detach("at the end");
}

#[test]
fn a_restore_into_libvirt_that_is_killed_is_finished_or_leaves_nothing() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let (guest, store) = (&attached.guest, protector::store(&lab, "store"));
    let boot = guest.boot_id();
    write_both(guest, 1);
    let first = read_both(guest);
    protect(&lab, "dom", &store, &[&OVERLAYS[..], &["--count", "3"]].concat());
    let files = || {
        let mut files: Vec<_> = ["vda", "vdb"].map(overlays).iter().flat_map(|path| entries(path)).collect();
        files.extend(entries(&lab.save_dir()));
        files
    };
    attached.kill_qemu();
    for point in RESTORE_DOMAIN_POINTS {
        eprintln!("==== {point}");
        let before = files();
        let mut command = restoring_into_libvirt(&lab, &store);
        command.env("REKINDLE_FAULT", format!("{point}:kill"));
        lab.finish(command).killed();
        lab.rekindle(["recover", "dom"]).ok();
        let is_decided =
            ["libvirt-restore.resume.", "libvirt-restore.settle."].iter().any(|step| point.starts_with(step));
        let state = if is_decided { "running" } else { "shut off" };
        assert_eq!(attached.domain.state(), state, "{point}");
        if is_decided {
            assert_eq!(guest.boot_id(), boot, "{point}");
            assert_both_agree(guest, &first, point);
            attached.assert_fenced("vda");
            attached.kill_qemu();
            lab.rekindle(["detach", "dom"]).ok();
        } else if *point != "libvirt-restore.renew.attached" {
            // From then on the guest may have run on its overlays. The next protector removes them.
            assert_eq!(files(), before, "{point}");
        }
    }
    lab.finish(restoring_into_libvirt(&lab, &store)).ok();
    assert_both_agree(guest, &first, "after the walk");
    attached.detach("at the end");
}

#[test]
fn what_a_restored_domain_needs_is_named_before_anything_starts() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let attached = Attached::boot(&libvirt, &lab);
    let store = protector::store(&lab, "store");
    let boot = attached.guest.boot_id();
    let crash_consistent = ["--disk", "crash-consistent", "--count", "3"];
    protect(&lab, "dom", &store, &crash_consistent);
    attached.kill_qemu();
    let moved = image("elsewhere");
    fs::rename(image("vdb"), &moved).unwrap();
    let restore = || lab.finish(restoring_into_libvirt(&lab, &store));
    restore().status(1).prints(&["this host does not have", "the file", "vdb.image"]);
    assert_eq!(attached.domain.state(), "shut off");
    fs::rename(moved, image("vdb")).unwrap();
    // All memory passes through libvirt.
    let mut eager = restoring_into_libvirt(&lab, &store);
    eager.arg("--eager");
    assert_eq!(lab.finish(eager).ok().json()["filled"], true);
    assert_eq!(attached.domain.state(), "running");
    assert_eq!(attached.guest.boot_id(), boot);
    lab.rekindle(["restore", "dom", "--into-libvirt", "--store", store.to_str().unwrap()]).status(2);
    attached.guest.rekindle(&["detach"]).ok();
}
