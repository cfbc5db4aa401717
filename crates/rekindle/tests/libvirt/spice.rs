//! Domains with a SPICE server, as virt-install and virt-manager make them: after a replacement, a client that connects
//! again to the same address can log in, and the guest's screen is the same.

use crate::upgrade::InstalledQemu;
use crate::{rekindle, replace, text};
use rekindle_testing::libvirt::{Domain, DomainOptions, PrivateLibvirt};
use rekindle_testing::micro::free_port;
use rekindle_testing::tools::qemu_new;
use rekindle_testing::{DEADLINE, spice, wait_for};
use std::fs;
use std::io::{self, ErrorKind, Read};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// What virt-install adds to a SPICE server: the agent's channel, two ports for USB devices of the client, and sound.
const COMPANIONS: &str = "<video><model type='qxl'/></video>
<channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0'/></channel>
<redirdev bus='usb' type='spicevmc'/><redirdev bus='usb' type='spicevmc'/>
<sound model='ich6'/><audio id='1' type='spice'/><controller type='usb' model='ich9-ehci1'/>";

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap_or_else(|e| panic!("port {port}: {e}"));
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Returns the image that libvirt takes of the screen.
fn screenshot(libvirt: &PrivateLibvirt, domain: &Domain<'_>) -> Vec<u8> {
    const IMAGE: &str = "/run/screenshot";
    libvirt.virsh(&["screenshot", &domain.name, IMAGE]);
    fs::read(IMAGE).unwrap()
}

/// Returns the files in the directory that libvirt has made for the domain.
fn domain_directory(domain: &Domain<'_>) -> Vec<PathBuf> {
    let status = fs::read_to_string(domain.status_file()).unwrap();
    let monitor = status.split_once("<monitor path='").unwrap().1.split('\'').next().unwrap();
    let entries = fs::read_dir(Path::new(monitor).parent().unwrap()).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_client_connects_again_and_the_screen_is_the_same() {
    let libvirt = PrivateLibvirt::start();
    let installed = InstalledQemu::old();
    let port = free_port();
    let devices = format!("<graphics type='spice' port='{port}' listen='127.0.0.1'/>{COMPANIONS}");
    let emulator = installed.binary();
    let domain = libvirt.boot(&DomainOptions { emulator: &emulator, devices: &devices, ..DomainOptions::new("spice") });
    let boot_id = domain.ask("boot-id");
    let before = screenshot(&libvirt, &domain);
    let files = domain_directory(&domain);
    let display = || libvirt.virsh(&["domdisplay", &domain.name]);
    let display_before = display();
    assert_eq!(display_before, format!("spice://127.0.0.1:{port}"));
    spice::log_in(&mut connect(port), "").unwrap();
    for binary in [qemu_new(), &emulator, qemu_new()] {
        let mut client = connect(port);
        spice::greet(&mut client).unwrap();
        let binary = binary.to_str().unwrap();
        let output = rekindle(&["replace-qemu", &domain.name, "--qemu", binary]).output().unwrap();
        assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
        // Its connection has ended with the old QEMU.
        let end =
            client.read(&mut [0]).or_else(|e| if e.kind() == ErrorKind::ConnectionReset { Ok(0) } else { Err(e) });
        assert_eq!(end.unwrap(), 0);
        spice::log_in(&mut connect(port), "").unwrap();
        assert_eq!(display(), display_before);
        assert_eq!(domain.ask("boot-id"), boot_id);
        // The cursor of a text screen blinks.
        wait_for("the same screen", DEADLINE, || (screenshot(&libvirt, &domain) == before).then_some(()));
    }
    assert_eq!(domain_directory(&domain), files);
}

#[test]
fn a_unix_socket_and_a_password_are_kept() {
    let libvirt = PrivateLibvirt::start();
    let devices = "<graphics type='spice' passwd='geheim' passwdValidTo='2099-12-31T23:59:59'>
<listen type='socket'/></graphics><video><model type='virtio'/></video>";
    let domain = libvirt.boot(&DomainOptions { devices, ..DomainOptions::new("spice-socket") });
    let status = fs::read_to_string(domain.status_file()).unwrap();
    let path = status.split_once("<listen type='socket' socket='").unwrap().1.split('\'').next().unwrap();
    let identity = || {
        let metadata = fs::metadata(path).unwrap();
        (metadata.ino(), metadata.uid(), metadata.gid(), metadata.mode())
    };
    let log_in = |password: &str| -> io::Result<()> {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        spice::log_in(&mut stream, password)
    };
    let assert_protected = || {
        for wrong in ["", "wrong"] {
            assert_eq!(log_in(wrong).unwrap_err().kind(), ErrorKind::PermissionDenied, "`{wrong}`");
        }
        log_in("geheim").unwrap();
    };
    assert_protected();
    let (socket, files) = (identity(), domain_directory(&domain));
    for _ in 0..2 {
        replace(&domain);
        assert_eq!(identity(), socket);
        assert_protected();
        assert_eq!(domain_directory(&domain), files);
    }
}

#[test]
fn nothing_of_a_failed_attempt_remains() {
    let libvirt = PrivateLibvirt::start();
    let port = free_port();
    let devices = format!("<graphics type='spice' port='{port}' listen='127.0.0.1'/>{COMPANIONS}");
    let domain = libvirt.boot(&DomainOptions { devices: &devices, ..DomainOptions::new("spice-failed") });
    let (qemu, files) = (domain.process(), domain_directory(&domain));
    let failed = rekindle(&["replace-qemu", &domain.name])
        .env("REKINDLE_FAULT", "replace.suspend.copied:kill-new")
        .output()
        .unwrap();
    assert_eq!(failed.status.code(), Some(1), "{}", text(&failed));
    assert_eq!((domain.process(), domain_directory(&domain)), (qemu, files));
    spice::log_in(&mut connect(port), "").unwrap();
}
