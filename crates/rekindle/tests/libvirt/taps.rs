//! Domains whose network cards are taps, as nearly every domain has them.

use crate::traffic::Pings;
use crate::{assert_continues, boot, rekindle, text};
use rekindle_testing::libvirt::{BRIDGE, Domain, DomainOptions, Network, PrivateLibvirt, ip};
use rekindle_testing::process::descriptors;
use rekindle_testing::tools::{qemu_new, qemu_newest, qemu_old};
use rekindle_testing::traffic::{ECHO_PORT, Stream};
use rekindle_testing::{DEADLINE, wait_for};
use rustix::mount::mount_bind;
use std::fs;
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

/// Returns the interfaces in the bridge, each with its number.
pub(crate) fn ports() -> Vec<String> {
    let links = ip(&format!("-o link show master {BRIDGE}"));
    links.lines().map(|line| line.split('<').next().unwrap().to_owned()).collect()
}

/// Returns how many open taps the domain's QEMU has.
pub(crate) fn open_taps(domain: &Domain<'_>) -> usize {
    descriptors(domain.process().pid).values().filter(|file| *file == "/dev/net/tun").count()
}

/// Makes a QEMU of the home directory of root accessible to libvirt's user.
pub(crate) fn accessible(binary: &Path) -> PathBuf {
    let root = binary.ancestors().nth(3).expect("a tree with usr/bin");
    let place = Path::new("/var/lib/libvirt").join(root.file_name().unwrap());
    fs::create_dir(&place).unwrap();
    mount_bind(root, &place).unwrap();
    place.join("usr/bin").join(binary.file_name().unwrap())
}

/// Begins traffic with the domain's echo service.
fn begin_stream(domain: &Domain<'_>) -> Stream {
    Stream::begin(TcpStream::connect((domain.address.ip(), ECHO_PORT)).unwrap())
}

/// Replaces the domain's QEMU by the one of `binary`, under traffic in both directions.
#[track_caller]
pub(crate) fn replace_under_traffic(domain: &Domain<'_>, binary: &Path) {
    let (stream, pings) = (begin_stream(domain), Pings::begin(domain));
    let (source, before) = (domain.process(), (ports(), open_taps(domain)));
    let arguments = ["replace-qemu", "--qemu", binary.to_str().unwrap(), &domain.name];
    let output = rekindle(&arguments).output().unwrap();
    assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
    assert!(!source.is_alive());
    stream.assert_complete();
    pings.assert_few_lost();
    // Interface and bridge are as before, and no tap is open twice.
    assert_eq!((ports(), open_taps(domain)), before);
}

#[test]
fn connections_over_a_tap_outlive_two_qemus() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "tap");
    let boot_id = domain.ask("boot-id");
    assert_eq!((ports().len(), open_taps(&domain)), (1, 1));
    for _ in 0..2 {
        replace_under_traffic(&domain, qemu_new());
    }
    // The guest answers to ARP.
    ip(&format!("neigh flush dev {BRIDGE}"));
    assert_continues(&domain, &boot_id);
    // libvirt removes the interface with the domain: no process has kept it open.
    libvirt.virsh(&["destroy", &domain.name]);
    wait_for("the removal of the tap", DEADLINE, || ports().is_empty().then_some(()));
}

#[test]
fn a_tap_goes_from_qemu_7_to_10_and_11() {
    let libvirt = PrivateLibvirt::start();
    let [old, newest] = [qemu_old(), qemu_newest()].map(accessible);
    let domain =
        libvirt.boot(&DomainOptions { emulator: &old, network: Network::Tap(""), ..DomainOptions::new("old") });
    let boot_id = domain.ask("boot-id");
    for binary in [qemu_new(), &newest] {
        replace_under_traffic(&domain, binary);
        assert_eq!(domain.ask("boot-id"), boot_id);
    }
}

#[test]
fn a_guest_that_returns_to_its_qemu_has_its_tap() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot(&libvirt, "returned");
    let (boot_id, source) = (domain.ask("boot-id"), domain.process());
    let (stream, pings) = (begin_stream(&domain), Pings::begin(&domain));
    // The destination has read the tap when it is killed.
    let arguments = ["replace-qemu", &domain.name];
    let output = rekindle(&arguments).env("REKINDLE_FAULT", "replace.suspend.loaded:kill-new").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert_eq!(domain.process(), source);
    stream.assert_complete();
    pings.assert_few_lost();
    assert_continues(&domain, &boot_id);
}

fn attached_queues(domain: &Domain<'_>) -> Vec<bool> {
    rekindle_testing::process::attached_queues(domain.process())
}

/// Boots a guest with a tap of three queues, of which it uses two.
fn boot_with_queues<'a>(libvirt: &'a PrivateLibvirt, name: &str) -> Domain<'a> {
    let network = Network::Tap("<driver name='qemu' queues='3'/>");
    let domain = libvirt.boot(&DomainOptions { network, both_processors: true, ..DomainOptions::new(name) });
    assert_eq!(attached_queues(&domain), [true, true, false]);
    domain
}

#[test]
fn connections_over_a_tap_with_several_queues_outlive_two_qemus() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot_with_queues(&libvirt, "queues");
    let boot_id = domain.ask("boot-id");
    for _ in 0..2 {
        replace_under_traffic(&domain, qemu_new());
        assert_eq!(attached_queues(&domain), [true, true, false]);
        assert_eq!(domain.ask("boot-id"), boot_id);
    }
}

#[test]
fn a_guest_that_returns_to_its_qemu_has_all_its_queues() {
    let libvirt = PrivateLibvirt::start();
    let domain = boot_with_queues(&libvirt, "queues-returned");
    let source = domain.process();
    for fault in ["replace.suspend.taps:kill-new", "replace.suspend.loaded:kill-new"] {
        let stream = begin_stream(&domain);
        let output = rekindle(&["replace-qemu", &domain.name]).env("REKINDLE_FAULT", fault).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{fault}: {}", text(&output));
        assert_eq!(domain.process(), source);
        assert_eq!(attached_queues(&domain), [true, true, false], "{fault}");
        stream.assert_complete();
    }
    let arguments = ["replace-qemu", &domain.name];
    let killed = rekindle(&arguments).env("REKINDLE_FAULT", "replace.suspend.taps:kill").output().unwrap();
    assert_eq!(killed.status.signal(), Some(9), "{}", text(&killed));
    let recovered = rekindle(&["recover", &domain.name]).output().unwrap();
    assert!(recovered.status.success(), "{}", text(&recovered));
    assert_eq!((domain.process(), attached_queues(&domain)), (source, vec![true, true, false]));
    domain.ask("boot-id");
}
