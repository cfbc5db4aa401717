//! A domain with `<hugepages/>`, whose RAM is in private huge pages unless it is shared.

use crate::{assert_continues, boot_in, memory_files, rekindle, replace, text};
use rekindle_testing::hugepages::{HUGE_PAGE_SIZE, HugePages};
use rekindle_testing::libvirt::PrivateLibvirt;
use rustix::mount::{MountFlags, mount};
use std::fs;

const RAM_BYTES: u64 = 256 << 20;

/// Returns how much memory in huge pages a process has mapped, in bytes.
fn huge_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() << 10
}

#[test]
fn a_domain_in_private_huge_pages_is_copied_into_huge_pages() {
    // Room for the domain, and for no copy.
    let mut pages = HugePages::add(RAM_BYTES / HUGE_PAGE_SIZE).unwrap();
    let libvirt = PrivateLibvirt::start();
    fs::create_dir("/run/huge").unwrap();
    mount("hugetlbfs", "/run/huge", "hugetlbfs", MountFlags::empty(), c"pagesize=2M").unwrap();
    // It searches for such mounts when it starts.
    libvirt.stop_daemon();
    libvirt.start_daemon();
    let domain = boot_in(&libvirt, "huge", "<memoryBacking><hugepages/></memoryBacking>");
    let (boot_id, source) = (domain.ask("boot-id"), domain.process());
    assert!(huge_bytes(source.pid) > 48 << 20);

    let rejected = rekindle(&["replace-qemu", &domain.name]).output().unwrap();
    assert_eq!(rejected.status.code(), Some(1), "{}", text(&rejected));
    for part in ["256 MiB in huge pages of 2048 KiB", "nr_hugepages"] {
        assert!(text(&rejected).contains(part), "{}", text(&rejected));
    }
    assert_eq!(domain.process(), source);
    pages.add_more(RAM_BYTES / HUGE_PAGE_SIZE).unwrap();
    let in_place = rekindle(&["replace-qemu", "--in-place", &domain.name]).output().unwrap();
    assert_eq!(in_place.status.code(), Some(1), "{}", text(&in_place));
    assert!(text(&in_place).contains("not moved in place"), "{}", text(&in_place));

    let left = pages.free_bytes();
    replace(&domain);
    assert_continues(&domain, &boot_id);
    assert!(huge_bytes(domain.process().pid) > 48 << 20);
    assert_eq!(pages.free_bytes(), left, "the first QEMU's pages are free again");
    let memory = memory_files(&domain);
    assert_eq!(memory.len(), 1);
    // The next QEMU maps the memory file.
    replace(&domain);
    assert_continues(&domain, &boot_id);
    assert_eq!(memory_files(&domain), memory);
}
