//! Huge pages of 2 MiB that a test adds to this host's pool.

use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::path::Path;

/// Bytes of a huge page.
pub const HUGE_PAGE_SIZE: u64 = 2 << 20;

/// Additional huge pages. They are removed from the pool on drop, also after a panic, so drop their users first.
pub struct HugePages {
    added: u64,
    /// A lock that one test of all crates holds at a time: the size of the pool is read and written in two steps.
    _lock: File,
}

/// Returns the directory of the kernel's files about the pool.
fn pool_directory() -> &'static Path {
    Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB")
}

/// Reads the number in a file about the pool.
fn read_pool(name: &str) -> Result<u64, String> {
    let path = pool_directory().join(name);
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    text.trim().parse().map_err(|e| format!("{}: {e}", path.display()))
}

impl HugePages {
    /// Adds pages to the pool. The error states how many pages the host has supplied instead.
    pub fn add(pages: u64) -> Result<Self, String> {
        let lock = File::open(pool_directory()).map_err(|e| format!("this host has no huge pages of 2 MiB: {e}"))?;
        flock(&lock, FlockOperation::LockExclusive).expect("a directory can be locked");
        let mut huge_pages = Self { added: 0, _lock: lock };
        huge_pages.add_more(pages).map(|()| huge_pages)
    }

    /// Adds further pages, as [`HugePages::add`].
    pub fn add_more(&mut self, pages: u64) -> Result<(), String> {
        let size_before = read_pool("nr_hugepages")?;
        let (path, size) = (pool_directory().join("nr_hugepages"), size_before + pages);
        let written = fs::write(&path, size.to_string());
        let added = read_pool("nr_hugepages")?.saturating_sub(size_before);
        self.added += added;
        if added == pages {
            return Ok(());
        }
        Err(format!(
            "{pages} huge pages of 2 MiB are needed, and this host has added {added} ({written:?}); as root on a host \
             with enough free memory: echo {size} > {}",
            path.display()
        ))
    }

    /// Returns the bytes of the pool that are neither used nor reserved.
    pub fn free_bytes(&self) -> u64 {
        let page_count = |name| read_pool(name).expect("the pool");
        loop {
            // A guest that touches a reserved page lowers both numbers.
            let (reserved, free) = (page_count("resv_hugepages"), page_count("free_hugepages"));
            if page_count("resv_hugepages") == reserved {
                return free.saturating_sub(reserved) * HUGE_PAGE_SIZE;
            }
        }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if self.added == 0 {
            return;
        }
        let path = pool_directory().join("nr_hugepages");
        let removed = read_pool("nr_hugepages").and_then(|size| {
            fs::write(&path, size.saturating_sub(self.added).to_string())
                .map_err(|e| format!("{}: {e}", path.display()))
        });
        if let Err(e) = removed {
            eprintln!("{} huge pages stay in the pool: {e}", self.added);
        }
    }
}
