//! Huge pages for the guests of a lab.

use super::lab::Lab;
use rekindle_testing::hugepages::{HUGE_PAGE_SIZE, HugePages};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Adds huge pages to the host's pool. Create the returned value before the [`Lab`] whose guests use the pages, so that
/// it is dropped after the lab.
pub fn add_huge_pages(mib: u64) -> HugePages {
    HugePages::add((mib << 20).div_ceil(HUGE_PAGE_SIZE)).unwrap_or_else(|e| panic!("{e}"))
}

/// Mounts a hugetlbfs, which the lab unmounts. `options` start with a comma and follow the first option of `mount -o`.
pub fn mount_hugetlbfs(lab: &Lab, name: &str, options: &str) -> PathBuf {
    let path = lab.path(name);
    fs::create_dir(&path).expect("a directory");
    let options = format!("pagesize=2M{options}");
    let mount = Command::new("mount").args(["-t", "hugetlbfs", "-o", &options, "rekindle-test"]).arg(&path).output();
    let mount = mount.expect("mount runs");
    assert!(mount.status.success(), "{}", String::from_utf8_lossy(&mount.stderr));
    path
}
