//! Domains whose firmware is UEFI, with variables in a flash memory.

use crate::taps::accessible;
use crate::{rekindle, text};
use rekindle_testing::libvirt::{DomainOptions, Firmware, PrivateLibvirt};
use rekindle_testing::tools::{qemu_new, qemu_newest, qemu_old};
use rekindle_testing::{DEADLINE, wait_for};

#[test]
fn the_variables_of_uefi_go_from_qemu_7_to_10_and_11_and_back() {
    let libvirt = PrivateLibvirt::start();
    let [old, newest] = [qemu_old(), qemu_newest()].map(accessible);
    let domain =
        libvirt.boot(&DomainOptions { emulator: &old, firmware: Firmware::Uefi, ..DomainOptions::new("uefi") });
    let boot_id = domain.ask("boot-id");
    let mut number = 0;
    for binary in [qemu_new(), &newest, &old] {
        number += 1;
        domain.ask(&format!("efi-variable written-{number}"));
        let arguments = ["replace-qemu", "--qemu", binary.to_str().unwrap(), &domain.name];
        let output = rekindle(&arguments).output().unwrap();
        assert!(output.status.success(), "{}\n{}", text(&output), domain.log());
        wait_for("the guest of a replaced QEMU", DEADLINE, || domain.is_up().then_some(()));
        assert_eq!(domain.ask("boot-id"), boot_id);
        assert_eq!(domain.ask("efi-variable"), format!("written-{number}"));
    }
    // The firmware finds its variables when it starts the guest again, in the file that libvirt has for them.
    domain.ask("efi-variable written-last");
    libvirt.virsh(&["reset", &domain.name]);
    let is_other = || (domain.is_up() && domain.ask("boot-id") != boot_id).then_some(());
    wait_for("the guest's next boot", DEADLINE, is_other);
    assert_eq!(domain.ask("efi-variable"), "written-last");
}
