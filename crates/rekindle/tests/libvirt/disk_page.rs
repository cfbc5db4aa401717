//! The commands of `docs/disk-cache-of-a-libvirt-guest.md`, run as they are written there, but for a service and an editor.

use crate::page::Page;
use crate::{DEADLINE, qmp, rekindle, text};
use rekindle_testing::libvirt::{Domain, DomainOptions, Network, PrivateLibvirt};
use rekindle_testing::page::blocks_of;
use rekindle_testing::wait_for;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Child, Command};

const PAGE: &str = "disk-cache-of-a-libvirt-guest.md";
const IMAGE: &str = "/var/lib/libvirt/images/db.raw";
const HOOK: &str = "/etc/libvirt/hooks/qemu";
const CONTROL: &str = "/run/rekindle-disk-db/disk.sock.control";
/// A copy of the program that libvirt's user can read, and where the page has it.
const PROGRAM: &str = "/run/rekindle-program";
const INSTALLED_PROGRAM: &str = "/usr/bin/rekindle";
/// Blocks of 4096 bytes of the disk.
const BLOCKS: u64 = 4096;

/// The page's service. Ends on drop.
struct Service(Child);

impl Service {
    /// Starts the service as systemd does.
    fn start() -> Self {
        let [unit] = blocks_of(PAGE, "2. Start", "ini").try_into().unwrap();
        let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap();
        let directory = Path::new("/run").join(value("RuntimeDirectory"));
        fs::create_dir(&directory).unwrap();
        assert!(Command::new("chown").arg(value("User")).arg(&directory).status().unwrap().success());
        fs::copy(env!("CARGO_BIN_EXE_rekindle"), PROGRAM).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--reuid", value("User"), "--regid", "kvm", "--clear-groups"]);
        let program = value("ExecStart").replace(INSTALLED_PROGRAM, PROGRAM);
        let server = Self(command.args(program.split(' ')).spawn().unwrap());
        wait_for("the server", DEADLINE, || Path::new(CONTROL).exists().then_some(()));
        server
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Changes the domain's definition as the page has it. `before`: the definition with the disk that it replaces.
fn edit(libvirt: &PrivateLibvirt, before: &str) {
    let [memory, disk] = blocks_of(PAGE, "3. Change", "xml").try_into().unwrap();
    let (start, end) = (before.find("<disk ").unwrap(), before.find("</disk>").unwrap() + "</disk>".len());
    let changed = format!("{}{disk}{}", &before[..start], &before[end..]).replace("<vcpu", &format!("{memory}<vcpu"));
    define(libvirt, &changed);
}

fn define(libvirt: &PrivateLibvirt, definition: &str) {
    let file = "/run/definition.xml";
    fs::write(file, definition).unwrap();
    libvirt.virsh(&["define", file]);
}

fn wait_off(domain: &Domain<'_>) {
    wait_for("the guest to be shut off", DEADLINE, || (domain.state() == "shut off").then_some(()));
}

/// Reads the disk in a guest that has just booted. Returns what it contains, and the blocks of it that came from the retained cache.
fn read_after_boot(domain: &Domain<'_>) -> (String, u64) {
    wait_for("the guest to boot", DEADLINE, || domain.is_up().then_some(()));
    let content = domain.ask(&format!("read vda 0 {BLOCKS}"));
    let output = rekindle(&["--json", "disk", "status", CONTROL]).output().unwrap();
    let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output)));
    let counts = if status["attic"].is_null() { &status["emptied"] } else { &status["attic"][1] };
    (content, counts["served"].as_u64().unwrap_or(0))
}

#[test]
fn the_commands_of_the_page_keep_a_guest_s_cache_over_its_reboots() {
    let libvirt = PrivateLibvirt::start();
    let content: Vec<u8> = (0..BLOCKS).flat_map(|block| [block.to_le_bytes(); 512].concat()).collect();
    fs::write(IMAGE, content).unwrap();
    let devices = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/><source file='{IMAGE}'/>
         <target dev='vda' bus='virtio'/></disk>"
    );
    let domain =
        libvirt.boot(&DomainOptions { devices: &devices, network: Network::Tap(""), ..DomainOptions::new("db") });
    let before = libvirt.virsh(&["dumpxml", "--inactive", &domain.name]);
    define(&libvirt, &before);
    let expected = domain.ask(&format!("read vda 0 {BLOCKS}"));
    let page = Page { file: PAGE, domain: &domain, checkpoints: None };

    let [shutdown, chown] = page.commands_of("1. Shut").try_into().unwrap();
    assert!(page.run(&shutdown).status.success());
    wait_off(&domain);
    assert!(page.run(&chown).status.success());
    assert_eq!(page.commands_of("2. Start"), ["systemctl enable --now rekindle-disk-db"]);
    let service = Service::start();
    assert_eq!(page.commands_of("3. Change"), ["virsh edit db"]);
    edit(&libvirt, &before);
    let status = page.run_section("4. Start");
    assert!(status.contains("mapped"), "{status}");
    assert_eq!(read_after_boot(&domain), (expected.clone(), 0));

    let [shutdown, keep, start, status] = page.commands_of("5. Restart").try_into().unwrap();
    let run = |command: &str| {
        let output = page.run(command);
        assert!(output.status.success(), "{command}: {}", text(&output));
        text(&output)
    };
    run(&shutdown);
    wait_off(&domain);
    run(&keep);
    run(&start);
    let (content, served) = read_after_boot(&domain);
    assert_eq!(content, expected);
    assert!(served > BLOCKS * 8 / 10, "{served} of {BLOCKS} blocks were not read from the image");
    let status = run(&status);
    assert!(status.contains("retained cache"), "{status}");

    let [hook] = blocks_of(PAGE, "6. Keep", "sh").try_into().unwrap();
    fs::create_dir_all(Path::new(HOOK).parent().unwrap()).unwrap();
    let hook =
        hook.replace(INSTALLED_PROGRAM, PROGRAM).replace("\"db prepare\"", &format!("\"{} prepare\"", domain.name));
    fs::write(HOOK, hook).unwrap();
    let [chmod, restart_daemon] = page.commands_of("6. Keep").try_into().unwrap();
    run(&chmod);
    assert_eq!(restart_daemon, "systemctl restart libvirtd");
    libvirt.stop_daemon();
    libvirt.start_daemon();
    // Waits until the daemon has connected to the domain: if it is destroyed before, libvirt reports an error although it is.
    assert_eq!(qmp(&libvirt, &domain, "query-status", &json!({}))["status"], "running");
    libvirt.virsh(&["destroy", &domain.name]);
    run(&start);
    let (content, served) = read_after_boot(&domain);
    assert_eq!(content, expected);
    assert!(served > BLOCKS * 8 / 10, "{served} of {BLOCKS} blocks were not read from the image");

    for command in page.commands_of("What Rekindle does not") {
        let output = page.run(&command);
        assert_eq!(output.status.code(), Some(1), "{command}: {}", text(&output));
        assert!(text(&output).contains("another process writes the guest's memory"), "{command}: {}", text(&output));
    }
    libvirt.virsh(&["destroy", &domain.name]);
    libvirt.virsh(&["undefine", &domain.name]);
    drop(service);
}
