//! What QEMUs of each supported version report of vhost. None of these has it: `tests/hosts` has cards that the kernel
//! serves.

#![allow(clippy::unwrap_used, reason = "tests")]

use rekindle_qemu::vhost;
use rekindle_testing::foreign::{ForeignQemu, QemuOptions};
use rekindle_testing::tools;

#[test]
fn each_qemu_reports_that_the_kernel_serves_no_card() {
    for binary in [tools::qemu_old(), tools::qemu_new(), tools::qemu_newest()] {
        let directory = tempfile::tempdir().unwrap();
        let options = QemuOptions::new(binary).arguments(&["-S", "-machine", "q35", "-m", "128"]);
        let qemu = ForeignQemu::start(directory.path(), &options);
        assert_eq!(vhost::served_cards(&mut qemu.qmp()).unwrap(), Vec::<String>::new(), "{}", binary.display());
    }
}
