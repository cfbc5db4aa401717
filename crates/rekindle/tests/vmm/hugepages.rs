//! Guests with RAM in huge pages, which come from a pool of fixed size and are reserved before a QEMU starts.

use crate::common::huge::{add_huge_pages, mount_hugetlbfs};
use crate::common::{Guest, Lab, Net, Watch, assert_ticks_once};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Defines a VM with its RAM in `ram`.
fn vm<'a>(lab: &'a Lab, name: &str, ram: &Path) -> crate::common::vm::Vm<'a> {
    lab.vm(name).section(&format!("[ram]\ndir = {ram:?}"))
}

/// Returns how much memory in huge pages a QEMU has mapped, in KiB.
fn huge_kib(guest: &Guest<'_>) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", guest.only_qemu().process.pid)).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:"));
    line.and_then(|rest| rest.trim().strip_suffix("kB")).map(|kib| kib.trim().parse().unwrap()).unwrap()
}

/// Returns how much of a mount's `size=` is free, in KiB.
fn left_kib(ram: &Path) -> u64 {
    let stat = rustix::fs::statvfs(ram).unwrap();
    (stat.f_bavail * stat.f_frsize) >> 10
}

/// Runs a reboot with an injected fault.
fn reboot_with_fault(guest: &Guest<'_>, fault: &str) -> crate::common::CommandResult {
    let watch = Watch::start(&guest.lab.run_root());
    let mut command = guest.lab.command(["replace-qemu", &guest.name]);
    command.env("REKINDLE_FAULT", fault);
    let result = guest.lab.finish(command);
    watch.end();
    result
}

#[test]
fn a_guest_in_huge_pages_survives_every_kind_of_reboot() {
    let _pages = add_huge_pages(264);
    let lab = Lab::new();
    let ram = mount_hugetlbfs(&lab, "huge", ",size=264M");
    let guest = vm(&lab, "huge", &ram).memory("256M").boot(&[]);
    guest.touch("24M");
    assert!(huge_kib(&guest) >= 24 << 10, "{} KiB", huge_kib(&guest));
    let boot = guest.boot_id();
    let kept = || {
        guest.verify();
        assert_eq!(guest.boot_id(), boot);
        guest.assert_sound();
    };
    let report = guest.warm(&["--verify-memory"]);
    assert_eq!(report["memory_changed_bytes"], 0, "{report:#}");
    assert!(report["memory"]["blocks_changed"].as_object().unwrap().values().all(|it| it == false), "{report:#}");
    kept();
    guest.warm(&[]);
    kept();
    // Saving reads all of the RAM, of which the guest has touched only a part. The rest is reserved for the guest, so
    // there is room although the mount has little free space.
    let file = fs::metadata(&crate::common::lab::entries(&ram)[0]).unwrap();
    let (untouched, left) = ((file.len() >> 10) - file.blocks() / 2, left_kib(&ram));
    assert!(untouched > left && left == 8 << 10, "{untouched} KiB were not touched, {left} KiB are left");
    guest.reboot("saved", &[]).ok();
    kept();

    reboot_with_fault(&guest, "warm.suspend.written:kill").killed();
    guest.rekindle(&["recover"]).ok().prints(&["undone", "with its memory"]);
    kept();
    reboot_with_fault(&guest, "warm.resume.journalled:kill").killed();
    guest.rekindle(&["recover"]).ok().prints(&["finished", "with its memory"]);
    kept();
    assert_ticks_once(&guest.file("console.log"));
    // It is unknown whether the guest has run in the QEMU that died, so its memory counts as changed.
    reboot_with_fault(&guest, "warm.resume.journalled:kill-new").status(3).prints(&["lost", "rekindle recover"]);
    guest.rekindle(&["recover"]).ok().prints(&["memory was lost", "booted"]);
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.assert_sound();
    guest.rekindle(&["stop"]).ok();
    assert!(crate::common::lab::entries(&ram).is_empty(), "RAM is left: {:?}", crate::common::lab::entries(&ram));
    assert_eq!(left_kib(&ram), 264 << 10);
}

#[test]
fn missing_huge_pages_are_an_error_with_a_remedy_before_a_qemu_starts() {
    let pages = add_huge_pages(264);
    let lab = Lab::without_root();
    let (ram, small) = (mount_hugetlbfs(&lab, "huge", ""), mount_hugetlbfs(&lab, "small", ",size=260M"));
    let refused = |path: &Path, status: i32, words: &[&str]| {
        lab.rekindle(["run", path.to_str().unwrap()]).status(status).prints(words);
        assert!(crate::common::lab::entries(&ram).is_empty(), "RAM is left: {:?}", crate::common::lab::entries(&ram));
        assert_eq!(
            crate::common::observe::qemus(&lab.run_root()).len(),
            crate::common::lab::entries(&small).len(),
            "{}",
            lab.state_report()
        );
    };
    let odd = vm(&lab, "odd", &ram).net(Net::None).memory("127M").write();
    refused(&odd, 2, &["`memory = \"127M\"`: not a multiple of 2M", "write \"126M\" or \"128M\""]);
    // The memory size is also rejected if the host configuration, not the definition, names the directory.
    lab.configure_host(&format!("ram_dir = {ram:?}"));
    let directory = ram.display().to_string();
    let odd = lab.vm("odd").net(Net::None).memory("127M").write();
    refused(&odd, 1, &["not a multiple of 2M", &directory, "\"126M\" or \"128M\""]);

    // Pages that the kernel has reserved for one guest are neither counted twice nor given to another.
    lab.configure_host("");
    for name in ["one", "two"] {
        vm(&lab, name, &small).net(Net::None).start(&[]);
    }
    let three = vm(&lab, "three", &small).net(Net::None).write();
    refused(&three, 1, &["128 MiB requested, 4 MiB left", "the mount's `size=` leaves 4 MiB", "a larger `size=`"]);
    let left = pages.free_bytes() >> 20;
    let much = vm(&lab, "much", &ram).net(Net::None).memory(&format!("{}M", left + 2)).write();
    let (required, available) =
        (format!("{} MiB requested", left + 2), format!("{left} MiB left in huge pages of 2 MiB"));
    refused(
        &much,
        1,
        &[&directory, &required, &available, "reserved", "enlarge the pool: echo ", "hugepages-2048kB/nr_hugepages"],
    );

    lab.rekindle(["stop", "--now", "one"]).ok();
    lab.rekindle(["run", three.to_str().unwrap()]).ok();
    lab.rekindle(["stop", "--now", "two", "three"]).ok();
    lab.assert_empty();
}
