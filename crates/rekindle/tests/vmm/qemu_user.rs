//! Each QEMU of root runs as the user of its VM, in a jail with the files of this VM.

use crate::common::protector::{Protector, crash, restore, store, wait_filled};
use crate::common::served::{READ, digest, image, read, section, server};
use crate::common::{DEADLINE, Guest, Lab, Net, qemu_new, qemu_newest, qemu_old, wait_for};
use rekindle_kernel::access_list::{self, READ as MAY_READ, WRITE as MAY_WRITE};
use rekindle_kernel::confinement::status::Rights;
use rekindle_kernel::process::Process;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

fn lab() -> Lab {
    let lab = Lab::new();
    lab.configure_host("qemu_own_user = \"required\"");
    lab
}

/// Returns the user of a QEMU, and asserts that it has no rights but those of this user.
#[track_caller]
fn user(guest: &Guest<'_>) -> u32 {
    let qemu = guest.single_qemu();
    let process = Path::new("/proc").join(qemu.process.pid.to_string());
    let rights = Rights::of(qemu.process).unwrap();
    assert_eq!(rights.capabilities, 0, "{rights:?}");
    let status = fs::read_to_string(process.join("status")).unwrap();
    assert!(status.contains("NoNewPrivs:\t1"), "{status}");
    let user = user_of(qemu.process);
    assert_ne!(user, 0);
    // The files of the host do not exist for it.
    let root = process.join("root");
    let definition = guest.lab.path(&format!("{}.toml", guest.name));
    assert!(definition.exists() && root.join("usr/bin").exists());
    assert!(!root.join(definition.strip_prefix("/").unwrap()).exists());
    user
}

/// Returns the user of a process, and asserts that it has no other user or group.
#[track_caller]
pub fn user_of(process: Process) -> u32 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap();
    let ids: Vec<_> = status.lines().filter(|line| line.starts_with("Uid:") || line.starts_with("Gid:")).collect();
    let numbers: Vec<u32> =
        ids.iter().flat_map(|line| line.split_whitespace().skip(1)).map(|id| id.parse().unwrap()).collect();
    assert!(numbers.len() == 8 && numbers.iter().all(|number| *number == numbers[0]), "{ids:?}");
    numbers[0]
}

#[test]
fn a_vm_keeps_its_user_over_new_qemus_reboots_and_restores() {
    let lab = lab();
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("jailed").key(&format!("qemu = {:?}", qemu_old())).section(&section(&path, "")).boot(&[]);
    let first = user(&guest);
    assert_eq!(user_of(server(&guest).expect("a server")), first);
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    guest.touch("24M");
    let boot = guest.boot_id();
    for qemu in [qemu_new(), qemu_newest()] {
        guest.warm(&["--qemu", qemu.to_str().unwrap()]);
        assert_eq!(user(&guest), first);
        guest.verify();
    }
    assert_eq!(guest.boot_id(), boot);

    // A server that was restarted is reached through the same directory.
    let killed = server(&guest).expect("a server");
    killed.kill().unwrap();
    let restarted = wait_for("another server", DEADLINE, || server(&guest).filter(|other| *other != killed));
    // It listens before it is confined.
    wait_for("the server to be confined", DEADLINE, || {
        Rights::of(restarted).is_ok_and(|rights| rights.has_filter).then_some(())
    });
    assert_eq!(user_of(restarted), first);
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));

    let store = store(&lab, "jailed");
    let mut protector = Protector::start(&guest, &lab, &store, &["--every", "100ms", "--count", "2"]);
    assert!(protector.child.wait().unwrap().success());
    crash(&guest);
    restore(&guest, &store, &[]);
    wait_filled(&guest);
    assert_eq!((user(&guest), guest.boot_id()), (first, boot.clone()));
    guest.verify();

    guest.reboot("saved", &[]).ok();
    assert_eq!((user(&guest), guest.boot_id()), (first, boot.clone()));
    guest.verify();
    guest.reboot("cold", &[]).ok();
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    assert_eq!(user(&guest), first);
    guest.assert_sound();
    guest.rekindle(&["stop", "--now"]).ok();
    // Started again, it is the same user.
    lab.rekindle(["run", lab.path("jailed.toml").to_str().unwrap(), "--newest-disk"]).ok();
    assert_eq!(user(&guest), first);
    guest.rekindle(&["stop", "--now"]).ok();
    lab.assert_empty();
}

#[test]
fn files_of_other_users_get_an_entry_for_the_vms_user_only() {
    let lab = lab();
    let [kernel, initrd] = ["kernel", "initrd"].map(|name| lab.path(name));
    let (original_kernel, original_initrd) = lab.image();
    fs::copy(original_kernel, &kernel).unwrap();
    fs::copy(original_initrd, &initrd).unwrap();
    let [written, readonly] = ["written.raw", "readonly.raw"].map(|name| lab.path(name));
    for disk in [&written, &readonly] {
        fs::File::create(disk).unwrap().set_len(16 << 20).unwrap();
    }
    for file in [&kernel, &initrd, &written, &readonly] {
        fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
    }
    let definition = lab.path("files.toml");
    let text = format!(
        "name = \"files\"\nmemory = \"128M\"\nqemu = {:?}\n[boot]\nkernel = {kernel:?}\ninitrd = {initrd:?}\nappend = \"console=ttyS0\"\n\
         [[disk]]\npath = {written:?}\nserver = false\n[[disk]]\npath = {readonly:?}\nserver = false\nreadonly = true\n",
        qemu_new()
    );
    fs::write(&definition, text).unwrap();
    lab.rekindle(["run", definition.to_str().unwrap()]).ok();
    let guest = lab.vm("files").net(Net::None).guest();
    let user = user(&guest);
    let entry = |file: &Path| access_list::of_user(file, user).unwrap();
    for (file, permissions) in
        [(&kernel, MAY_READ), (&initrd, MAY_READ), (&written, MAY_READ | MAY_WRITE), (&readonly, MAY_READ)]
    {
        assert_eq!(entry(file), Some(permissions), "{}", file.display());
        let metadata = fs::metadata(file).unwrap();
        assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o707), (0, 0, 0o600));
    }
    guest.rekindle(&["stop", "--now"]).ok();
    for file in [&kernel, &initrd, &written, &readonly] {
        assert_eq!((entry(file), fs::metadata(file).unwrap().mode() & 0o777), (None, 0o600), "{}", file.display());
    }
}

#[test]
fn a_vm_gets_its_user_with_the_next_qemu_while_its_disk_server_stays() {
    let lab = Lab::new();
    lab.configure_host("qemu_own_user = \"off\"");
    let path = image(&lab, "disk.raw");
    let guest = lab.vm("changed").section(&section(&path, "")).boot(&[]);
    let served_by = server(&guest).expect("a server");
    lab.rekindle(["doctor"]).prints(&["QEMU runs as root: changed", "qemu_own_user"]);
    lab.configure_host("qemu_own_user = \"required\"");
    guest.warm(&[]);
    user(&guest);
    assert_eq!(server(&guest), Some(served_by));
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    lab.rekindle(["doctor"]).prints(&["the server of a disk runs as root", "of changed"]);
    // And back.
    lab.configure_host("qemu_own_user = \"off\"");
    guest.warm(&[]);
    guest.ask("drop-caches");
    assert_eq!(read(&guest, 0, READ), digest(&path, 0, READ));
    guest.assert_sound();
    guest.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn an_image_with_a_backing_file_is_rejected() {
    let lab = lab();
    let [base, image] = ["base.qcow2", "disk.qcow2"].map(|name| lab.path(name));
    let qemu_img = |arguments: &[&str]| {
        let made = std::process::Command::new("qemu-img").args(arguments).output().unwrap();
        assert!(made.status.success(), "{made:?}");
    };
    qemu_img(&["create", "-q", "-f", "qcow2", base.to_str().unwrap(), "16M"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", base.to_str().unwrap(), "-F", "qcow2", image.to_str().unwrap()]);
    let section = format!("[[disk]]\npath = {image:?}\nformat = \"qcow2\"\nserver = false");
    let definition = lab.vm("layered").net(Net::None).section(&section).write();
    let refused = lab.rekindle(["run", definition.to_str().unwrap()]);
    refused.status(1).prints(&[base.to_str().unwrap(), "qemu-img convert", "qemu_as_root"]);
    // Without a requirement, it runs as root, and doctor names the reason.
    lab.configure_host("");
    lab.rekindle(["run", definition.to_str().unwrap()]).ok().prints(&["its QEMU runs as root", "the backing file"]);
    lab.rekindle(["doctor"]).prints(&["QEMU runs as root: layered (the backing file", base.to_str().unwrap()]);
    let guest = lab.vm("layered").net(Net::None).guest();
    guest.rekindle(&["stop", "--now"]).ok();
    // If it has had a user of its own, its QEMU may have written the name.
    qemu_img(&["create", "-q", "-f", "qcow2", image.to_str().unwrap(), "16M"]);
    lab.rekindle(["run", definition.to_str().unwrap()]).ok();
    user(&guest);
    guest.rekindle(&["stop", "--now"]).ok();
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", base.to_str().unwrap(), "-F", "qcow2", image.to_str().unwrap()]);
    lab.rekindle(["run", definition.to_str().unwrap()]).status(1).prints(&[base.to_str().unwrap(), "qemu-img convert"]);
}

/// An attacker that controls a QEMU must not be able to make the next one run as root.
#[test]
fn a_qemu_that_cannot_enter_its_jail_runs_as_root_only_if_there_was_none_with_an_own_user() {
    let lab = Lab::new();
    let program = lab.path("bin/qemu-system-x86_64");
    fs::create_dir(lab.path("bin")).unwrap();
    fs::write(&program, format!("#!/bin/sh\nexec {} \"$@\"\n", qemu_new().display())).unwrap();
    let permit = |mode| fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
    permit(0o700);
    let vm = lab.vm("first").net(Net::None).key(&format!("qemu = {program:?}"));
    let definition = vm.write();
    let run = || lab.rekindle(["run", definition.to_str().unwrap()]);
    run().ok().prints(&["its QEMU runs as root", "Permission denied"]);
    let guest = vm.guest();
    lab.rekindle(["doctor"]).prints(&["QEMU runs as root: first"]);
    assert_eq!(recorded_users(&lab), 0);
    guest.rekindle(&["stop", "--now"]).ok();

    permit(0o755);
    run().ok();
    user(&guest);
    assert_eq!(recorded_users(&lab), 1);
    permit(0o700);
    guest.reboot("warm", &[]).status(1).prints(&["Permission denied"]);
    user(&guest);
    guest.rekindle(&["stop", "--now"]).ok();
    run().status(1).prints(&[program.to_str().unwrap(), "Permission denied"]);

    // The server of a disk has the user, and that does not prevent the next start.
    let path = image(&lab, "disk.raw");
    let vm = lab.vm("served").net(Net::None).key(&format!("qemu = {program:?}")).section(&section(&path, ""));
    let definition = vm.write();
    for _ in 0..2 {
        lab.rekindle(["run", definition.to_str().unwrap()]).ok().prints(&["its QEMU runs as root"]);
        let guest = vm.guest();
        assert_ne!(user_of(server(&guest).expect("a server")), 0);
        assert_eq!(user_of(guest.single_qemu().process), 0);
        guest.rekindle(&["stop", "--now"]).ok();
    }
    lab.assert_empty();
}

/// Returns how many VMs have a user.
fn recorded_users(lab: &Lab) -> usize {
    let entries = fs::read_dir(lab.run_root().join(".users")).unwrap().flatten();
    entries.filter(|entry| entry.path().is_symlink()).count()
}

/// Starts a VM whose QEMU is a program that first attempts to reach what belongs to the host and to another VM, and
/// returns what has succeeded.
fn attempts(lab: &Lab, name: &str, victim: &Guest<'_>) -> Vec<String> {
    let directory = lab.path(&format!("{name}-program"));
    fs::create_dir_all(directory.join("bin")).unwrap();
    let program = directory.join("bin/qemu-system-x86_64");
    let target = victim.single_qemu().process.pid;
    let script = include_str!("stand_in_qemu.py")
        .replace("{QEMU}", qemu_new().to_str().unwrap())
        .replace("{VICTIM_RUN}", victim.file("").to_str().unwrap())
        .replace("{VICTIM_PID}", &target.to_string())
        .replace("{VICTIM_DISK}", lab.path("victim.raw").to_str().unwrap())
        .replace("{VICTIM_DEFINITION}", lab.path("victim.toml").to_str().unwrap());
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let path = image(lab, &format!("{name}.raw"));
    let guest = lab.vm(name).net(Net::None).key(&format!("qemu = {program:?}")).section(&section(&path, "")).start(&[]);
    let log = fs::read_to_string(guest.file("vmm-1/qemu.log")).unwrap();
    guest.rekindle(&["stop", "--now"]).ok();
    assert!(log.contains("all attempts made"), "{log}");
    log.lines().filter_map(|line| line.strip_prefix("reached ")).map(str::to_owned).collect()
}

#[test]
fn a_program_in_place_of_qemu_reaches_nothing_of_the_host_and_of_other_vms() {
    let lab = lab();
    let path = image(&lab, "victim.raw");
    let victim = lab.vm("victim").section(&section(&path, "")).boot(&[]);
    assert_eq!(attempts(&lab, "hostile", &victim), Vec::<String>::new());
    victim.assert_sound();
    // As root, it reaches everything: the attempts are real.
    lab.configure_host("qemu_as_root = [\"root\"]");
    let reached = attempts(&lab, "root", &victim);
    let expected = include_str!("stand_in_qemu.py").matches("@attempt").count();
    assert_eq!(reached.len(), expected, "{reached:?}");
    victim.assert_sound();
    victim.rekindle(&["stop", "--now"]).ok();
}

#[test]
fn a_file_that_the_user_cannot_use_is_named() {
    let lab = lab();
    let guest = lab.vm("named").net(Net::None).start(&[]);
    user(&guest);
    guest.rekindle(&["stop", "--now"]).ok();
    // A file system without access control lists.
    let directory = lab.path("no-lists");
    fs::create_dir(&directory).unwrap();
    let mounted = std::process::Command::new("mount").args(["-t", "ramfs", "none"]).arg(&directory).status().unwrap();
    assert!(mounted.success());
    let disk = directory.join("disk.raw");
    fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o600)).unwrap();
    let definition = lab
        .vm("unusable")
        .net(Net::None)
        .section(&format!("[[disk]]\npath = {disk:?}\nserver = false\ncache = \"writeback\""))
        .write();
    let refused = lab.rekindle(["run", definition.to_str().unwrap()]);
    let unmounted = std::process::Command::new("umount").arg(&directory).status().unwrap();
    assert!(unmounted.success());
    refused.status(1).prints(&[disk.to_str().unwrap(), "access control list", "qemu_as_root"]);
}
