//! Domains with a VNC server: after a replacement, a client that connects again to the same address sees the guest's
//! screen.

use crate::upgrade::InstalledQemu;
use crate::{rekindle, replace, text};
use rekindle_testing::libvirt::{Domain, DomainOptions, PrivateLibvirt};
use rekindle_testing::micro::free_port;
use rekindle_testing::rfb::{self, Screen};
use rekindle_testing::tools::qemu_new;
use rekindle_testing::websocket::Websocket;
use rekindle_testing::{DEADLINE, wait_for};
use std::fs;
use std::io::{self, ErrorKind, Read};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Returns libvirt's description of a VNC server at `port` of this host.
pub(crate) fn server(port: u16) -> String {
    format!("<graphics type='vnc' port='{port}' listen='127.0.0.1'/><video><model type='vga'/></video>")
}

/// Returns the value of the attribute that follows `before` in libvirt's record of the domain.
fn recorded(domain: &Domain<'_>, before: &str) -> String {
    let status = fs::read_to_string(domain.status_file()).unwrap();
    let (_, value) = status.split_once(before).unwrap_or_else(|| panic!("{before} is not in {status}"));
    value.split('\'').next().unwrap().to_owned()
}

fn connect(domain: &Domain<'_>) -> TcpStream {
    let port: u16 = recorded(domain, "<graphics type='vnc' port='").parse().unwrap();
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap_or_else(|e| panic!("port {port}: {e}"));
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Checks that the domain's VNC server accepts connections, if it has one.
#[track_caller]
pub(crate) fn assert_greets(domain: &Domain<'_>) {
    let status = fs::read_to_string(domain.status_file()).unwrap();
    if status.contains("<graphics type='vnc'") {
        rfb::banner(&mut connect(domain)).unwrap_or_else(|e| panic!("VNC of {}: {e}", domain.name));
    }
}

fn screen(domain: &Domain<'_>) -> Screen {
    rfb::screen(connect(domain), None).unwrap()
}

#[test]
fn a_client_connects_again_and_sees_the_same_screen() {
    let libvirt = PrivateLibvirt::start();
    let devices = server(free_port());
    let domain = libvirt.boot(&DomainOptions { devices: &devices, ..DomainOptions::new("shown") });
    let name = domain.name.as_str();
    let before = screen(&domain);
    assert!(!before.is_blank());
    let views = || ["vncdisplay", "domdisplay"].map(|view| libvirt.virsh(&[view, name]));
    let views_before = views();
    for _ in 0..2 {
        let mut client = connect(&domain);
        rfb::banner(&mut client).unwrap();
        replace(&domain);
        // Its connection has ended with the old QEMU.
        let end =
            client.read(&mut [0]).or_else(|e| if e.kind() == ErrorKind::ConnectionReset { Ok(0) } else { Err(e) });
        assert_eq!(end.unwrap(), 0);
        // The cursor of a text screen blinks.
        wait_for("the same screen", DEADLINE, || (screen(&domain) == before).then_some(()));
        assert_eq!(views(), views_before);
    }
    libvirt.virsh(&["screenshot", name, "/run/screenshot"]);
    assert!(fs::metadata("/run/screenshot").unwrap().len() > 0);
}

/// Logs in at a Unix socket.
fn log_in(path: &Path, password: Option<&str>) -> io::Result<Screen> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    rfb::screen(stream, password)
}

/// Checks that a password is needed.
#[track_caller]
fn assert_protected(path: &Path, password: &str) -> Screen {
    for wrong in [None, Some("wrong")] {
        let error = log_in(path, wrong).err().unwrap_or_else(|| panic!("logged in with {wrong:?}"));
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{wrong:?}: {error}");
    }
    log_in(path, Some(password)).unwrap()
}

#[test]
fn a_unix_socket_and_a_password_are_kept() {
    let libvirt = PrivateLibvirt::start();
    let devices =
        "<graphics type='vnc' passwd='geheim' passwdValidTo='2099-12-31T23:59:59'><listen type='socket'/></graphics>
<video><model type='vga'/></video>";
    let domain = libvirt.boot(&DomainOptions { devices, ..DomainOptions::new("protected") });
    let path = PathBuf::from(recorded(&domain, "<listen type='socket' socket='"));
    let identity = || {
        let metadata = fs::metadata(&path).unwrap();
        (metadata.ino(), metadata.uid(), metadata.gid(), metadata.mode())
    };
    let (before, socket) = (assert_protected(&path, "geheim"), identity());
    for _ in 0..2 {
        replace(&domain);
        assert_eq!(identity(), socket);
        let now = assert_protected(&path, "geheim");
        assert_eq!((now.width, now.height), (before.width, before.height));
    }
}

/// Opens a websocket, as the clients in browsers do.
fn browse(port: u16) -> Websocket<TcpStream> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap_or_else(|e| panic!("port {port}: {e}"));
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    Websocket::open(stream).unwrap_or_else(|e| panic!("port {port}: {e}"))
}

/// Returns the names in the directory that libvirt has made for the domain.
fn names_of_files(domain: &Domain<'_>) -> Vec<String> {
    let monitor = PathBuf::from(recorded(domain, "<monitor path='"));
    let entries = fs::read_dir(monitor.parent().unwrap()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_browser_connects_again_to_the_port_that_libvirt_has_chosen() {
    let libvirt = PrivateLibvirt::start();
    let installed = InstalledQemu::old();
    let emulator = installed.binary();
    let devices = server(free_port()).replace("port=", "websocket='-1' port=");
    let options = DomainOptions { emulator: &emulator, devices: &devices, ..DomainOptions::new("browsed") };
    let domain = libvirt.boot(&options);
    let port: u16 = recorded(&domain, " websocket='").parse().unwrap();
    let before = rfb::screen(browse(port), None).unwrap();
    assert!(!before.is_blank());
    let (files, boot_id) = (names_of_files(&domain), domain.ask("boot-id"));

    // QEMU 7.2 has no websockets on Unix sockets.
    let qemu = domain.process();
    let old = rekindle(&["replace-qemu", &domain.name, "--qemu", emulator.to_str().unwrap()]).output().unwrap();
    assert_eq!(old.status.code(), Some(1), "{}", text(&old));
    assert!(text(&old).contains("-vnc websocket: a VNC server with a websocket needs QEMU 8.2"), "{}", text(&old));
    assert_eq!(domain.process(), qemu);

    for _ in 0..2 {
        let (mut client, mut browser) = (connect(&domain), browse(port));
        rfb::banner(&mut client).unwrap();
        rfb::banner(&mut browser).unwrap();
        let output =
            rekindle(&["replace-qemu", &domain.name, "--qemu", qemu_new().to_str().unwrap()]).output().unwrap();
        assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
        assert!(browser.read(&mut [0]).is_err(), "its connection has ended with the old QEMU");
        assert_eq!(domain.ask("boot-id"), boot_id);
        // The cursor of a text screen blinks.
        let same = |seen: Screen| (seen == before).then_some(());
        wait_for("the same screen", DEADLINE, || same(rfb::screen(browse(port), None).unwrap()));
        wait_for("the same screen", DEADLINE, || same(screen(&domain)));
        assert_eq!(names_of_files(&domain), files);
    }
}

#[test]
fn a_browser_needs_the_password() {
    let libvirt = PrivateLibvirt::start();
    let port = free_port();
    let devices = server(free_port()).replace("port=", &format!("passwd='geheim' websocket='{port}' port="));
    let domain = libvirt.boot(&DomainOptions { devices: &devices, ..DomainOptions::new("browsed-protected") });
    let (qemu, files) = (domain.process(), names_of_files(&domain));
    let assert_protected = || {
        for wrong in [None, Some("wrong")] {
            let error = rfb::screen(browse(port), wrong).err().unwrap_or_else(|| panic!("logged in with {wrong:?}"));
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{wrong:?}: {error}");
        }
        rfb::screen(browse(port), Some("geheim")).unwrap();
    };
    assert_protected();
    let failed = rekindle(&["replace-qemu", &domain.name])
        .env("REKINDLE_FAULT", "replace.suspend.copied:kill-new")
        .output()
        .unwrap();
    assert_eq!(failed.status.code(), Some(1), "{}", text(&failed));
    assert_eq!((domain.process(), names_of_files(&domain)), (qemu, files.clone()));
    assert_protected();
    for _ in 0..2 {
        replace(&domain);
        assert_protected();
        assert_eq!(names_of_files(&domain), files);
    }
}

#[test]
fn a_password_that_libvirt_has_not_recorded_is_named() {
    let libvirt = PrivateLibvirt::start();
    fs::write("/etc/libvirt/qemu.conf", "vnc_password = \"default\"\n").unwrap();
    libvirt.stop_daemon();
    libvirt.start_daemon();
    let devices = server(free_port());
    let domain = libvirt.boot(&DomainOptions { devices: &devices, ..DomainOptions::new("unknown") });
    let qemu = domain.process();
    let output = rekindle(&["replace-qemu", &domain.name]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("virsh update-device"), "{}", text(&output));
    assert_eq!(domain.process(), qemu);
}
