//! A vector of bytes that lies in huge pages where the kernel has some.
//!
//! Megabytes of fresh memory cost one fault for each 4 KiB, which in a virtual machine takes longer than to fill
//! them; here it is one for each 2 MiB. Where huge pages are off (`/sys/kernel/mm/transparent_hugepage/enabled` is
//! `never`) it is memory as any.

use std::alloc::{Layout, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};

/// Bytes of a huge page.
pub const HUGE: usize = 2 << 20;

/// See [the module](self).
pub struct Large {
    /// Of a mapping that is `capacity` long, begins at a multiple of [`HUGE`] and is initialised: the kernel gives
    /// zeroes.
    start: NonNull<u8>,
    /// A multiple of [`HUGE`]; 0 if nothing is mapped.
    capacity: usize,
    len: usize,
}

// SAFETY: the memory is this value's alone; it is reached through it only.
unsafe impl Send for Large {}
// SAFETY: as above; a shared reference gives shared access only.
unsafe impl Sync for Large {}

impl Large {
    /// An empty one, which takes no memory.
    #[must_use]
    pub const fn new() -> Self {
        Self { start: NonNull::dangling(), capacity: 0, len: 0 }
    }

    /// Forgets what it holds. Its memory stays.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Forgets what lies behind `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Appends `bytes`.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.grow(bytes.len()).copy_from_slice(bytes);
    }

    /// Appends `more` bytes, and returns them to be filled: they hold anything that was here before.
    pub fn grow(&mut self, more: usize) -> &mut [u8] {
        let before = self.len;
        let Some(len) = before.checked_add(more) else { handle_alloc_error(Layout::new::<u8>()) };
        if len > self.capacity {
            self.map(len);
        }
        self.len = len;
        self.get_mut(before..).unwrap_or_default()
    }

    /// Ensures room for `len` bytes.
    fn map(&mut self, len: usize) {
        let failed = || handle_alloc_error(Layout::from_size_align(len, 1).unwrap_or(Layout::new::<u8>()));
        let Some(capacity) = len.max(self.capacity.saturating_mul(2)).checked_next_multiple_of(HUGE) else { failed() };
        let Some(room) = capacity.checked_add(HUGE) else { failed() };
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at a place that the kernel chooses.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), room, protection, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            failed();
        }
        let before = (mapped as usize).next_multiple_of(HUGE) - mapped as usize;
        // SAFETY: `before` is less than HUGE, so that `capacity` bytes lie behind it in the mapping.
        let start = unsafe { mapped.cast::<u8>().add(before) };
        // SAFETY: the ends of the new mapping, which nothing refers to; what is between stays. The lengths are
        // multiples of a page.
        unsafe {
            if before > 0 {
                libc::munmap(mapped, before);
            }
            if before < HUGE {
                libc::munmap(start.add(capacity).cast(), HUGE - before);
            }
            // A hint.
            libc::madvise(start.cast(), capacity, libc::MADV_HUGEPAGE);
        }
        let Some(start) = NonNull::new(start) else { failed() };
        // SAFETY: `len` bytes are initialised at the old start and fit at the new one, which is another mapping.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr(), start.as_ptr(), self.len) };
        self.unmap();
        (self.start, self.capacity) = (start, capacity);
    }

    fn unmap(&mut self) {
        if self.capacity > 0 {
            // SAFETY: it is our mapping, and nothing refers to it any more: slices borrow `self`.
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
        // SAFETY: initialised memory, borrowed with `self`; `len` is at most `capacity`, and 0 where nothing is mapped.
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
