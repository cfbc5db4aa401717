//! How libvirt's daemon is stopped and started for a replacement.

use crate::{assert_continues, boot, rekindle, text};
use rekindle_testing::libvirt::{DomainOptions, PrivateLibvirt};
use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

/// Stands for systemd, with the daemon as the main process of a service. Records its calls.
const SYSTEMCTL: &str = r#"#!/bin/sh
echo "$*" >> /run/systemctl.calls
case "$*" in
    show*MainPID*libvirtd.service)
        echo "MainPID=$(cat /run/libvirtd.pid)"
        echo "TriggeredBy=libvirtd.socket libvirtd-ro.socket"
        echo "RequiredBy=$(cat /run/required-by)" ;;
    show*MainPID*) echo "MainPID=0" ;;
    show*)
        shift 2
        for unit; do
            case $unit in
                libvirtd-ro.socket) printf 'Id=%s\nActiveState=inactive\n\n' "$unit" ;;
                *) printf 'Id=%s\nActiveState=active\n\n' "$unit" ;;
            esac
        done ;;
    stop*)
        pid=$(cat /run/libvirtd.pid)
        kill "$pid" && tail --pid="$pid" -f /dev/null
        exit 0 ;;
    start*) exec /usr/sbin/libvirtd -d > /dev/null 2>&1 ;;
esac
"#;

#[test]
fn a_service_of_systemd_is_stopped_and_started_with_its_sockets() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "service");
    let boot_id = domain.ask("boot-id");
    for directory in ["/run/systemd/system", "/run/bin"] {
        fs::create_dir_all(directory).unwrap();
    }
    fs::write("/run/bin/systemctl", SYSTEMCTL).unwrap();
    fs::set_permissions("/run/bin/systemctl", PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("/run/bin:{}", env::var("PATH").unwrap());
    let replace = || {
        let mut command = rekindle(&["replace-qemu", &domain.name]);
        command.env("PATH", &path).output().unwrap()
    };

    // systemd would stop what requires the daemon.
    fs::write("/run/required-by", "nova-compute.service").unwrap();
    let (qemu, daemon) = (domain.process(), libvirt.daemon());
    let output = replace();
    assert!(text(&output).contains("systemctl stop nova-compute.service"), "{}", text(&output));
    assert_eq!((domain.process(), libvirt.daemon()), (qemu, daemon));

    fs::write("/run/required-by", "libvirtd.socket").unwrap();
    let output = replace();
    assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
    assert_ne!(domain.process(), qemu);
    assert_ne!(libvirt.daemon(), daemon);
    let calls = fs::read_to_string("/run/systemctl.calls").unwrap();
    let changes: Vec<_> = calls.lines().filter(|call| !call.starts_with("show")).collect();
    // The source's monitor is used only after the stop; the second stop is that of a daemon that was started meanwhile.
    assert_eq!(changes.first(), Some(&"stop libvirtd.service libvirtd.socket"), "{calls}");
    assert_eq!(changes.last(), Some(&"start libvirtd.socket libvirtd.service"), "{calls}");
    assert_continues(&domain, &boot_id);
    assert_eq!(domain.state(), "running");
}

#[test]
fn a_job_of_another_domain_prevents_a_replacement() {
    let libvirt = PrivateLibvirt::start();
    let domain = libvirt.create(&DomainOptions::new("idle"));
    let (qemu, daemon) = (domain.process(), libvirt.daemon());
    let record = fs::read_to_string(domain.status_file()).unwrap();
    let other = record
        .replace(&format!("<name>{}</name>", domain.name), "<name>other</name>")
        .replace("<vcpus>", "<job type='none' async='backup'/><vcpus>");
    // The daemon that runs does not read it.
    fs::write("/run/libvirt/qemu/other.xml", other).unwrap();
    let output = rekindle(&["replace-qemu", &domain.name]).output().unwrap();
    fs::remove_file("/run/libvirt/qemu/other.xml").unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("busy with other (backup)"), "{}", text(&output));
    assert_eq!((domain.process(), libvirt.daemon()), (qemu, daemon));
}

#[test]
fn a_second_replacement_waits_for_the_first() {
    let libvirt = PrivateLibvirt::start();
    let domains = ["one", "two"].map(|name| libvirt.boot(&DomainOptions::new(name)));
    let boot_ids = domains.each_ref().map(|domain| domain.ask("boot-id"));
    let replacements = domains.each_ref().map(|domain| {
        let mut command = rekindle(&["replace-qemu", &domain.name]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    for replacement in replacements {
        let output = replacement.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
    }
    for (domain, boot_id) in domains.iter().zip(&boot_ids) {
        assert_eq!((domain.ask("boot-id"), domain.state()), (boot_id.clone(), "running".to_owned()));
    }
}
