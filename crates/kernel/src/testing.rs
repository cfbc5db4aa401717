//! Memory of this process for tests: pages of which one byte each is used.

use rekindle_pages::PAGE_SIZE;
use std::ops::Range;

/// The kind of memory of an [`Area`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Anonymous private memory.
    Private,
    /// Anonymous shared memory, which the kernel keeps in tmpfs.
    Shared,
    /// Anonymous shared memory in huge pages, which the kernel keeps in hugetlbfs.
    Huge,
}

/// A mapping of a number of pages.
pub struct Area {
    start: *mut u8,
    page: usize,
    pages: usize,
}

// SAFETY: the bytes are accessed only by atomic operations or by system calls.
unsafe impl Sync for Area {}
// SAFETY: as above.
unsafe impl Send for Area {}

impl Area {
    /// Maps unpopulated pages.
    pub fn new(kind: Kind, pages: usize) -> Self {
        Self::try_new(kind, pages).unwrap()
    }

    /// Maps unpopulated pages; `None` when no huge pages are available.
    pub fn try_new(kind: Kind, pages: usize) -> Option<Self> {
        let (flags, page) = match kind {
            Kind::Private => (libc::MAP_PRIVATE, PAGE_SIZE),
            Kind::Shared => (libc::MAP_SHARED, PAGE_SIZE),
            Kind::Huge => (libc::MAP_SHARED | libc::MAP_HUGETLB, 2 << 20),
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let none = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let start = unsafe { libc::mmap(none, pages * page, protection, flags | libc::MAP_ANONYMOUS, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        if kind != Kind::Huge {
            // SAFETY: our own mapping.
            unsafe { libc::madvise(start, pages * page, libc::MADV_NOHUGEPAGE) };
        }
        Some(Self { start: start.cast(), page, pages })
    }

    pub fn range(&self) -> Range<u64> {
        self.start as u64..self.start as u64 + (self.pages * self.page) as u64
    }

    pub fn address(&self, page: usize) -> u64 {
        self.start as u64 + (page * self.page) as u64
    }

    fn byte(&self, page: usize) -> &std::sync::atomic::AtomicU8 {
        assert!(page < self.pages);
        // SAFETY: within the mapping, which lives as long as `self`.
        unsafe { std::sync::atomic::AtomicU8::from_ptr(self.start.add(page * self.page)) }
    }

    pub fn get(&self, page: usize) -> u8 {
        self.byte(page).load(std::sync::atomic::Ordering::SeqCst)
    }

    pub fn set(&self, page: usize, value: u8) {
        self.byte(page).store(value, std::sync::atomic::Ordering::SeqCst);
    }

    /// Releases one page with `MADV_DONTNEED`.
    pub fn give_back(&self, page: usize) {
        self.give_back_some(page, 1);
    }

    pub fn give_back_some(&self, page: usize, pages: usize) {
        assert!(page + pages <= self.pages);
        // SAFETY: within our own mapping.
        let done =
            unsafe { libc::madvise(self.start.add(page * self.page).cast(), pages * self.page, libc::MADV_DONTNEED) };
        assert_eq!(done, 0);
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and there is no reference into it any more.
        unsafe { libc::munmap(self.start.cast(), self.pages * self.page) };
    }
}
