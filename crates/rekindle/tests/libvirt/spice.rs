//! Domains with a SPICE server, as virt-install and virt-manager make them: after a replacement, a client that connects
//! again to the same address can log in, and the guest's screen is the same.

use crate::upgrade::InstalledQemu;
use crate::{rekindle, replace, text};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rekindle_testing::libvirt::{Domain, DomainOptions, PrivateLibvirt};
use rekindle_testing::micro::free_port;
use rekindle_testing::tools::qemu_new;
use rekindle_testing::{DEADLINE, spice, wait_for};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::fs;
use std::io::{self, ErrorKind, Read};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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

/// Makes certificates, and a libvirt whose SPICE servers have them. Returns the settings of clients that accept only these.
fn libvirt_with_certificates() -> (PrivateLibvirt, Arc<ClientConfig>) {
    const DIRECTORY: &str = "/etc/libvirt/spice";
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_key = KeyPair::generate().unwrap();
    let authority_certificate = authority.self_signed(&authority_key).unwrap();
    let server_key = KeyPair::generate().unwrap();
    let server = CertificateParams::new(vec![Ipv4Addr::LOCALHOST.to_string()]).unwrap();
    let server = server.signed_by(&server_key, &Issuer::new(authority, authority_key)).unwrap();

    let libvirt = PrivateLibvirt::start();
    fs::create_dir(DIRECTORY).unwrap();
    let files = [
        ("ca-cert.pem", authority_certificate.pem()),
        ("server-cert.pem", server.pem()),
        ("server-key.pem", server_key.serialize_pem()),
    ];
    for (name, content) in files {
        fs::write(Path::new(DIRECTORY).join(name), content).unwrap();
    }
    let configuration = format!("spice_tls = 1\nspice_tls_x509_cert_dir = \"{DIRECTORY}\"\n");
    fs::write("/etc/libvirt/qemu.conf", configuration).unwrap();
    libvirt.stop_daemon();
    libvirt.start_daemon();
    let mut roots = RootCertStore::empty();
    roots.add(authority_certificate.der().clone()).unwrap();
    (libvirt, Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth()))
}

/// Logs in by TLS.
fn log_in_securely(client: &Arc<ClientConfig>, port: u16, password: &str) -> io::Result<()> {
    let name = Ipv4Addr::LOCALHOST.to_string().try_into().unwrap();
    let session = ClientConnection::new(client.clone(), name).unwrap();
    spice::log_in(&mut StreamOwned::new(session, connect(port)), password)
}

#[test]
fn a_client_with_tls_connects_again() {
    let (libvirt, client) = libvirt_with_certificates();
    let installed = InstalledQemu::old();
    let (port, tls_port) = (free_port(), free_port());
    let devices = format!(
        "<graphics type='spice' port='{port}' tlsPort='{tls_port}' listen='127.0.0.1'>
<channel name='main' mode='secure'/><channel name='inputs' mode='secure'/></graphics>{COMPANIONS}"
    );
    let emulator = installed.binary();
    let options = DomainOptions { emulator: &emulator, devices: &devices, ..DomainOptions::new("spice-tls") };
    let domain = libvirt.boot(&options);
    let (boot_id, files) = (domain.ask("boot-id"), domain_directory(&domain));
    let display = libvirt.virsh(&["domdisplay", &domain.name]);
    let assert_works = || {
        log_in_securely(&client, tls_port, "").unwrap();
        // The ordinary port is not the one with TLS, and does not offer what needs TLS.
        let refused = spice::log_in(&mut connect(port), "").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{refused}");
        assert_eq!(libvirt.virsh(&["domdisplay", &domain.name]), display);
        assert_eq!(domain_directory(&domain), files);
        assert_eq!(domain.ask("boot-id"), boot_id);
    };
    assert_works();
    for binary in [&emulator, qemu_new(), &emulator] {
        let output = rekindle(&["replace-qemu", &domain.name, "--qemu", binary.to_str().unwrap()]).output().unwrap();
        assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
        assert_works();
    }
}

#[test]
fn a_server_with_only_tls_and_a_password_is_kept() {
    let (libvirt, client) = libvirt_with_certificates();
    let tls_port = free_port();
    let devices = format!(
        "<graphics type='spice' autoport='no' tlsPort='{tls_port}' passwd='geheim' listen='127.0.0.1' \
         defaultMode='secure'/><video><model type='virtio'/></video>"
    );
    let domain = libvirt.boot(&DomainOptions { devices: &devices, ..DomainOptions::new("spice-only-tls") });
    let (qemu, files) = (domain.process(), domain_directory(&domain));
    let assert_works = || {
        let wrong = log_in_securely(&client, tls_port, "wrong").unwrap_err();
        assert_eq!(wrong.kind(), ErrorKind::PermissionDenied, "{wrong}");
        log_in_securely(&client, tls_port, "geheim").unwrap();
        assert_eq!(domain_directory(&domain), files);
    };
    assert_works();
    let failed = rekindle(&["replace-qemu", &domain.name])
        .env("REKINDLE_FAULT", "replace.suspend.copied:kill-new")
        .output()
        .unwrap();
    assert_eq!(failed.status.code(), Some(1), "{}", text(&failed));
    assert_eq!(domain.process(), qemu);
    assert_works();
    for _ in 0..2 {
        replace(&domain);
        assert_works();
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
