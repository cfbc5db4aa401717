//! `rekindle status`: guests whose QEMU is out of date.

use crate::common::Lab;
use rekindle_testing::libvirt::{DomainOptions, PrivateLibvirt};
use rekindle_testing::tools;
use serde_json::json;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};

/// A QEMU that libvirt's user can execute, and that a test may replace.
const EMULATOR: &str = "/var/lib/libvirt/images/qemu-system-x86_64";

/// Number of a user without rights: `nobody`.
const OTHER_USER: u32 = 65534;

/// Replaces a program as a package manager does: the new file gets the name.
fn replace_program(program: &Path, new_program: &Path) {
    let temporary = program.with_extension("new");
    fs::copy(new_program, &temporary).unwrap();
    fs::rename(temporary, program).unwrap();
}

#[test]
fn a_domain_whose_qemu_was_upgraded_is_out_of_date() {
    let libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let nothing = lab.rekindle(["--json", "status"]).ok().json();
    assert_eq!(nothing, json!({"format": 1, "guests": [], "unreadable": []}));

    fs::copy(tools::qemu_new(), EMULATOR).unwrap();
    let domain = libvirt.create(&DomainOptions { emulator: Path::new(EMULATOR), ..DomainOptions::new("web") });
    let status = || lab.rekindle(["--json", "status"]).ok().json()["guests"][0].clone();
    let current = status();
    assert_eq!(current["name"], domain.name);
    assert_eq!(current["manager"], "libvirt");
    assert_eq!(current["status"], "running");
    assert_eq!(current["pid"], domain.process().pid);
    assert!(current["outdated"].is_null(), "{current}");

    replace_program(Path::new(EMULATOR), Path::new("/bin/cat"));
    assert_eq!(status()["outdated"]["reason"], "other-build");
    lab.rekindle(["status"]).ok().prints(&[&domain.name, "libvirt", "running", "out of date: another build"]);
    fs::remove_file(EMULATOR).unwrap();
    lab.rekindle(["status"]).ok().prints(&["out of date: its file was removed"]);
    // A QEMU that libvirt cannot probe does not prevent it from ending the domain.
    libvirt.virsh(&["destroy", &domain.name]);
    lab.rekindle(["status"]).ok().prints(&["no VMs and no domains"]);
}

#[test]
fn a_host_without_libvirt_has_no_domains_and_a_user_without_rights_is_informed_once() {
    let _libvirt = PrivateLibvirt::start();
    let lab = Lab::without_root();
    let directory = Path::new("/run/libvirt/qemu");
    for name in ["a.xml", "b.xml"] {
        fs::write(directory.join(name), "<domstatus/>").unwrap();
        fs::set_permissions(directory.join(name), PermissionsExt::from_mode(0o600)).unwrap();
    }
    let damaged = lab.rekindle(["status"]).ok();
    damaged.prints(&["/run/libvirt/qemu/a.xml", "/run/libvirt/qemu/b.xml", "<domstatus> has no <domain>"]);

    fs::set_permissions(directory, PermissionsExt::from_mode(0o000)).unwrap();
    // The program may be in a directory that the other user cannot read.
    let program = "/run/rekindle";
    fs::copy(env!("CARGO_BIN_EXE_rekindle"), program).unwrap();
    fs::create_dir("/run/other-user").unwrap();
    chown("/run/other-user", Some(OTHER_USER), None).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &OTHER_USER.to_string(), "--clear-groups", program, "status"]);
    command.env("REKINDLE_RUN_DIR", "/run/other-user").env("REKINDLE_HOST_CONFIG", "/run/absent.toml");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let result = lab.finish(command).ok().prints(&["/run/libvirt/qemu", "run as root"]);
    assert_eq!(result.stdout.matches("cannot read").count(), 1, "{result}");

    fs::remove_dir_all(directory).unwrap();
    let result = lab.rekindle(["status"]).ok().prints(&["no VMs and no domains"]);
    assert!(!result.stdout.contains("cannot read"), "{result}");
}
