//! Huge pages that a test reserves on this host.

use super::lab::Lab;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of a page.
const PAGE: u64 = 2 << 20;

/// Additional huge pages of 2 MiB; released on drop, also after a panic. Create it before the [`Lab`] whose guests use
/// the pages, so that it is dropped after the lab.
pub struct HugePages {
    more: u64,
    /// A lock for one user at a time: the number of pages is read and written in two steps.
    _only: File,
}

/// A file of the pool in `/sys`.
fn file(name: &str) -> PathBuf {
    Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").join(name)
}

fn number(name: &str) -> u64 {
    let path = file(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.trim().parse().expect("a number")
}

impl HugePages {
    /// Reserves `mib` MiB more than the host had.
    pub fn borrow(mib: u64) -> Self {
        let only = File::open(file("")).unwrap_or_else(|e| panic!("this host has no huge pages of 2 MiB: {e}"));
        flock(&only, FlockOperation::LockExclusive).expect("a directory can be locked");
        let (before, wanted) = (number("nr_hugepages"), (mib << 20).div_ceil(PAGE));
        let path = file("nr_hugepages");
        let written = fs::write(&path, (before + wanted).to_string());
        let pages = Self { more: number("nr_hugepages").saturating_sub(before), _only: only };
        let (path, more) = (path.display(), pages.more);
        assert!(
            more == wanted,
            "the tests on huge pages need {wanted} pages of 2 MiB, and this host gives {more} of them ({written:?}); as root on \
             a host with memory to spare: echo {} > {path}",
            before + wanted
        );
        pages
    }

    /// Mounts a hugetlbfs for the test, which the lab unmounts. `options` start with a comma, as `mount` takes them.
    pub fn mount(&self, lab: &Lab, name: &str, options: &str) -> PathBuf {
        let path = lab.path(name);
        fs::create_dir(&path).expect("a directory");
        let options = format!("pagesize=2M{options}");
        let mount =
            Command::new("mount").args(["-t", "hugetlbfs", "-o", &options, "rekindle-test"]).arg(&path).output();
        let mount = mount.expect("mount runs");
        assert!(mount.status.success(), "{}", String::from_utf8_lossy(&mount.stderr));
        path
    }

    /// Returns the bytes of the host's pool that are neither used nor reserved.
    pub fn left(&self) -> u64 {
        number("free_hugepages").saturating_sub(number("resv_hugepages")) * PAGE
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let now = number("nr_hugepages");
        let path = file("nr_hugepages");
        if let Err(e) = fs::write(&path, now.saturating_sub(self.more).to_string()) {
            eprintln!("{} huge pages were not released: {}: {e}", self.more, path.display());
        }
    }
}
