//! The commands of `docs/upgrade-libvirt-guests.md`, run as they are written there.

use crate::page::Page;
use crate::{rekindle, text};
use rekindle_testing::libvirt::{Domain, DomainOptions, Network, PrivateLibvirt};
use rekindle_testing::tools::{qemu_new, qemu_old};
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const PAGE: &str = "upgrade-libvirt-guests.md";

/// Directories of files that QEMU finds by the place of its program, below `/usr`: firmware, modules.
const DATA_DIRECTORIES: [&str; 4] = ["share/qemu", "share/seabios", "lib/ipxe", "lib/x86_64-linux-gnu/qemu"];

/// An installed QEMU that can be upgraded, of which libvirt's user can read the files.
pub(crate) struct InstalledQemu {
    root: PathBuf,
}

impl InstalledQemu {
    /// Installs the old QEMU.
    pub(crate) fn old() -> Self {
        let installed = Self { root: PathBuf::from("/var/lib/libvirt/installed") };
        let old = qemu_old().ancestors().nth(2).expect("a tree with bin");
        for directory in DATA_DIRECTORIES.iter().chain(&["bin"]) {
            let target = installed.root.join(directory);
            fs::create_dir_all(&target).unwrap();
            let copied = Command::new("cp").arg("-aT").args([&old.join(directory), &target]).status();
            assert!(copied.unwrap().success());
        }
        installed
    }

    pub(crate) fn binary(&self) -> PathBuf {
        self.root.join("bin/qemu-system-x86_64")
    }

    /// Does what a package's upgrade does: new files take the names of the old ones.
    fn upgrade(&self) {
        let unpacked = self.root.join("bin/qemu.dpkg-new");
        fs::copy(qemu_new(), &unpacked).unwrap();
        fs::rename(&unpacked, self.binary()).unwrap();
        for directory in DATA_DIRECTORIES {
            let target = self.root.join(directory);
            fs::rename(&target, target.with_extension("dpkg-old")).unwrap();
            symlink(Path::new("/usr").join(directory), &target).unwrap();
        }
    }
}

#[test]
fn the_commands_of_the_page_upgrade_the_qemus_of_all_domains() {
    let libvirt = PrivateLibvirt::start();
    let installed = InstalledQemu::old();
    let emulator = installed.binary();
    let domains = ["db", "web"].map(|name| {
        libvirt.boot(&DomainOptions { emulator: &emulator, network: Network::Tap(""), ..DomainOptions::new(name) })
    });
    let boot_ids = domains.each_ref().map(|domain| domain.ask("boot-id"));
    let page = Page { file: PAGE, domain: &domains[0], checkpoints: None };

    // Apt would replace the QEMU of the machine that runs this test.
    assert_eq!(page.commands_of("1. Install"), ["apt-get install --only-upgrade qemu-system-x86"]);
    installed.upgrade();
    let before = page.run_section("2. See");
    assert_eq!(before.matches("out of date: 10.0").count(), 2, "{before}");
    assert_eq!(before.matches("7.2.").count(), 2, "{before}");
    let plan = page.run_section("3. Ask");
    assert!(domains.iter().all(|domain| plan.contains(&domain.name)), "{plan}");

    // Rekindle is killed in the middle. The page has the remedy.
    let [replace] = page.commands_of("4. Replace").try_into().unwrap();
    let arguments: Vec<_> = replace.split(' ').skip(1).collect();
    let killed = rekindle(&arguments).env("REKINDLE_FAULT", "replace.suspend.loaded:kill").output().unwrap();
    assert_eq!(killed.status.signal(), Some(9), "{}", text(&killed));
    assert_eq!(libvirt.daemon(), None);
    let [list, recover] = page.commands_of("If something goes wrong").try_into().unwrap();
    let listed = text(&page.run(&list));
    assert!(domains.iter().all(|domain| listed.contains(&domain.name)), "{listed}");
    let recovered = page.run(&recover);
    assert!(recovered.status.success(), "{}", text(&recovered));
    let status = page.run_section("2. See");
    assert!(status.contains("out of date: 10.0"), "{status}");

    page.run_section("4. Replace");
    let qemus = domains.each_ref().map(Domain::process);
    let repeated = page.run_section("4. Replace");
    assert_eq!(repeated.matches("its QEMU is the installed one").count(), 2, "{repeated}");
    assert_eq!(domains.each_ref().map(Domain::process), qemus);
    let after = page.run_section("5. Check");
    assert!(!after.contains("out of date"), "{after}");
    for (domain, boot_id) in domains.iter().zip(&boot_ids) {
        assert_eq!(domain.state(), "running");
        assert_eq!(domain.ask("boot-id"), *boot_id);
        assert!(after.contains(&domain.name), "{after}");
    }
}
