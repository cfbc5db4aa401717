//! A vector of bytes in huge pages, where the kernel has some.
//!
//! Fresh memory costs one page fault for each 4 KiB. In a virtual machine these faults take longer than filling the
//! memory. In huge pages there is one fault for each 2 MiB. Where huge pages are off
//! (`/sys/kernel/mm/transparent_hugepage/enabled` is `never`), the vector uses ordinary pages.

use std::alloc::{Layout, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};

/// Size of a huge page in bytes.
pub const HUGE: usize = 2 << 20;

/// A growable vector of bytes whose memory is aligned to huge pages and asks the kernel for them.
pub struct Large {
    /// Start of a mapping of `capacity` bytes, at a multiple of [`HUGE`]. All of it is initialised, because the kernel
    /// supplies zeros.
    start: NonNull<u8>,
    /// Bytes that are mapped: a multiple of [`HUGE`], or 0 without a mapping.
    capacity: usize,
    len: usize,
}

// SAFETY: only this value refers to the memory.
unsafe impl Send for Large {}
// SAFETY: as above; a shared reference gives shared access only.
unsafe impl Sync for Large {}

impl Large {
    /// Makes an empty vector, which uses no memory.
    #[must_use]
    pub const fn new() -> Self {
        Self { start: NonNull::dangling(), capacity: 0, len: 0 }
    }

    /// Sets the length to 0. The memory stays mapped.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Drops the bytes after the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Appends a copy of `bytes`.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.grow(bytes.len()).copy_from_slice(bytes);
    }

    /// Appends `more` bytes and returns them, for the caller to fill. They have arbitrary content, e.g. that of bytes
    /// which were cleared before.
    pub fn grow(&mut self, more: usize) -> &mut [u8] {
        let before = self.len;
        let Some(len) = before.checked_add(more) else { handle_alloc_error(Layout::new::<u8>()) };
        if len > self.capacity {
            self.map(len);
        }
        self.len = len;
        self.get_mut(before..).unwrap_or_default()
    }

    /// Maps room for at least `len` bytes and moves the content into it.
    fn map(&mut self, len: usize) {
        let failed = || handle_alloc_error(Layout::from_size_align(len, 1).unwrap_or(Layout::new::<u8>()));
        let Some(capacity) = len.max(self.capacity.saturating_mul(2)).checked_next_multiple_of(HUGE) else { failed() };
        let Some(room) = capacity.checked_add(HUGE) else { failed() };
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), room, protection, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            failed();
        }
        let before = (mapped as usize).next_multiple_of(HUGE) - mapped as usize;
        // SAFETY: `before` is less than HUGE, so that the mapping has `capacity` bytes from `start` on.
        let start = unsafe { mapped.cast::<u8>().add(before) };
        // SAFETY: the two ends of the new mapping, to which nothing refers; the part between them stays. The lengths
        // are multiples of a page.
        unsafe {
            if before > 0 {
                libc::munmap(mapped, before);
            }
            if before < HUGE {
                libc::munmap(start.add(capacity).cast(), HUGE - before);
            }
            // A hint: without huge pages the memory works the same.
            libc::madvise(start.cast(), capacity, libc::MADV_HUGEPAGE);
        }
        let Some(start) = NonNull::new(start) else { failed() };
        // SAFETY: `len` bytes are initialised at the old start and fit at the new start, which is in another mapping.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr(), start.as_ptr(), self.len) };
        self.unmap();
        (self.start, self.capacity) = (start, capacity);
    }

    fn unmap(&mut self) {
        if self.capacity > 0 {
            // SAFETY: our own mapping, to which nothing refers any more, since slices borrow `self`.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.capacity) };
            self.capacity = 0;
        }
    }
}

impl Default for Large {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        self.unmap();
    }
}

impl Deref for Large {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialised memory, borrowed with `self`; `len` is at most `capacity`, and 0 without a mapping.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Large {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Large {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Large({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_and_keeps_what_it_has() {
        let mut large = Large::new();
        assert!(large.is_empty());
        let mut expected = Vec::new();
        for round in 0..9u8 {
            let part = vec![round; 700_001];
            large.extend_from_slice(&part);
            expected.extend_from_slice(&part);
            assert_eq!((large.start.as_ptr() as usize % HUGE, large.capacity % HUGE), (0, 0));
        }
        assert!(*large == *expected);
        large.truncate(3);
        assert_eq!(*large, [0; 3]);
        assert_eq!(large.grow(4).len(), 4);
        assert_eq!(large.len(), 7);
        let at = large.start;
        large.clear();
        large.extend_from_slice(&[7; 4096]);
        assert_eq!((large.start, large.len()), (at, 4096), "its memory stays");
    }
}
