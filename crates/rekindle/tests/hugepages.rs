//! Guests whose RAM is in huge pages: a pool that does not grow, whose pages are set aside before a QEMU starts.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{Guest, HugePages, Lab, Net, Watch, assert_ticks_once};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A VM with its RAM in `ram`, as a definition.
fn vm<'a>(lab: &'a Lab, name: &str, ram: &Path) -> common::vm::Vm<'a> {
    lab.vm(name).section(&format!("[ram]\ndir = {ram:?}"))
}

/// What a QEMU has mapped of huge pages, in KiB.
fn huge_kib(guest: &Guest<'_>) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", guest.only_qemu().process.pid)).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:"));
    line.and_then(|rest| rest.trim().strip_suffix("kB")).map(|kib| kib.trim().parse().unwrap()).unwrap()
}

/// What a mount leaves of its `size=`, in KiB.
fn left_kib(ram: &Path) -> u64 {
    let stat = rustix::fs::statvfs(ram).unwrap();
    (stat.f_bavail * stat.f_frsize) >> 10
}

/// A reboot that is cut off by `fault`.
fn cut_off(guest: &Guest<'_>, fault: &str) -> common::CommandResult {
    let watch = Watch::start(&guest.lab.run_root());
    let mut command = guest.lab.command(["reboot", "vmm", &guest.name]);
    command.env("REKINDLE_FAULT", fault);
    let done = guest.lab.finish(command);
    watch.end();
    done
}

#[test]
fn a_guest_in_huge_pages_lives_through_every_reboot() {
    let pages = HugePages::borrow(264);
    let lab = Lab::new();
    let ram = pages.mount(&lab, "huge", ",size=264M");
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
    // Saving reads all of the RAM, of which the guest has touched a part; the rest is promised to it, so there is room
    // although next to nothing is left to others.
    let file = fs::metadata(&common::lab::entries(&ram)[0]).unwrap();
    let (untouched, left) = ((file.len() >> 10) - file.blocks() / 2, left_kib(&ram));
    assert!(untouched > left && left == 8 << 10, "{untouched} KiB were not touched, {left} KiB are left");
    guest.reboot("saved", &[]).ok();
    kept();

    assert_eq!(cut_off(&guest, "warm.suspend.written:kill").code, None);
    guest.rekindle(&["recover"]).ok().prints(&["undone", "with its memory"]);
    kept();
    assert_eq!(cut_off(&guest, "warm.resume.journalled:kill").code, None);
    guest.rekindle(&["recover"]).ok().prints(&["finished", "with its memory"]);
    kept();
    assert_ticks_once(&guest.file("console.log"));
    // Nobody can tell here whether the guest has run in a QEMU that died: its memory counts as touched.
    cut_off(&guest, "warm.resume.journalled:kill-new").status(3).prints(&["lost", "rekindle recover"]);
    guest.rekindle(&["recover"]).ok().prints(&["memory was lost", "booted"]);
    guest.wait_ready();
    assert_ne!(guest.boot_id(), boot);
    guest.assert_sound();
    guest.rekindle(&["stop"]).ok();
    assert!(common::lab::entries(&ram).is_empty(), "RAM is left: {:?}", common::lab::entries(&ram));
    assert_eq!(left_kib(&ram), 264 << 10);
}

#[test]
fn huge_pages_that_are_not_there_are_refused_with_the_mend_before_a_qemu_starts() {
    let pages = HugePages::borrow(264);
    let lab = Lab::without_root();
    let (ram, small) = (pages.mount(&lab, "huge", ""), pages.mount(&lab, "small", ",size=260M"));
    let refused = |path: &Path, status: i32, words: &[&str]| {
        lab.rekindle(["run", path.to_str().unwrap()]).status(status).prints(words);
        assert!(common::lab::entries(&ram).is_empty(), "RAM is left: {:?}", common::lab::entries(&ram));
        assert_eq!(
            common::observe::qemus(&lab.run_root()).len(),
            common::lab::entries(&small).len(),
            "{}",
            lab.state_report()
        );
    };
    let odd = vm(&lab, "odd", &ram).net(Net::None).memory("127M").write();
    refused(&odd, 2, &["`memory = \"127M\"`: not a multiple of 2M", "write \"126M\" or \"128M\""]);
    // The same where the host says where RAM is, and not the definition.
    fs::write(lab.path(".host.toml"), format!("ram_dir = {ram:?}\n")).unwrap();
    let place = ram.display().to_string();
    let odd = lab.vm("odd").net(Net::None).memory("127M").write();
    refused(&odd, 1, &["not a multiple of 2M", &place, "\"126M\" or \"128M\""]);

    // What the kernel has set aside for one guest is neither counted twice nor given to another.
    fs::remove_file(lab.path(".host.toml")).unwrap();
    for name in ["one", "two"] {
        vm(&lab, name, &small).net(Net::None).start(&[]);
    }
    let three = vm(&lab, "three", &small).net(Net::None).write();
    refused(&three, 1, &["128 MiB asked for, 4 MiB left", "the mount's `size=` leaves 4 MiB", "a larger `size=`"]);
    let left = pages.left() >> 20;
    let much = vm(&lab, "much", &ram).net(Net::None).memory(&format!("{}M", left + 2)).write();
    let (asked, has) = (format!("{} MiB asked for", left + 2), format!("{left} MiB left in huge pages of 2 MiB"));
    refused(
        &much,
        1,
        &[&place, &asked, &has, "reserved", "have more huge pages: echo ", "hugepages-2048kB/nr_hugepages"],
    );

    lab.rekindle(["stop", "--now", "one"]).ok();
    lab.rekindle(["run", three.to_str().unwrap()]).ok();
    lab.rekindle(["stop", "--now", "two", "three"]).ok();
    lab.assert_empty();
}
