//! The record of the pages that are written through a mapping of the guest's memory.
//!
//! `vm_memory` calls [`WriteMarks`] for each write to a region. A mark goes to two recipients: a bitmap per region
//! for a protector, and the dirty log of a migrating QEMU.

use super::PAGE;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};
use vm_memory::mmap::MmapRegion;
use vm_memory::{FileOffset, VolatileMemory};

/// The recipients of the record of written pages, of all regions together.
#[derive(Debug, Default)]
pub(super) struct WriteTracking {
    /// Whether a protector requests the record.
    pub is_recording: AtomicBool,
    dirty_log: RwLock<Option<DirtyLog>>,
}

impl WriteTracking {
    pub fn set_dirty_log(&self, log: Option<DirtyLog>) {
        *self.dirty_log.write().unwrap_or_else(PoisonError::into_inner) = log;
    }
}

/// The dirty bitmap of a migrating QEMU: one bit per page, from guest address 0 on.
#[derive(Debug)]
pub(super) struct DirtyLog {
    region: MmapRegion,
}

impl DirtyLog {
    /// Maps the bitmap, which is in `bytes` bytes of the file.
    pub fn map(file: File, offset: u64, bytes: usize) -> io::Result<Self> {
        let region = MmapRegion::from_file(FileOffset::new(file, offset), bytes).map_err(io::Error::other)?;
        Ok(Self { region })
    }

    fn mark(&self, page: u64) {
        let Ok(byte) = usize::try_from(page / 8) else { return };
        if let Ok(bits) = self.region.as_volatile_slice().get_atomic_ref::<AtomicU8>(byte) {
            bits.fetch_or(1 << (page % 8), Ordering::Relaxed);
        }
    }
}

/// The pages of one region that were written.
#[derive(Debug, Default)]
pub(super) struct RegionPages {
    tracking: Arc<WriteTracking>,
    /// Number of the region's first page in the guest.
    first_page: u64,
    /// One bit per page, in words of 64; empty until a protector requests it.
    words: OnceLock<Box<[AtomicU64]>>,
}

impl RegionPages {
    pub fn new(tracking: Arc<WriteTracking>, first_page: u64) -> Self {
        Self { tracking, first_page, words: OnceLock::new() }
    }

    /// Allocates the bitmap, up to the guest's page `last_page`.
    pub fn allocate(&self, last_page: u64) {
        let pages = last_page - self.first_page + 1;
        self.words.get_or_init(|| (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect());
    }

    /// Returns the guest's numbers of the written pages, in order, and clears their marks.
    pub fn take_written(&self) -> impl Iterator<Item = u64> {
        let words = self.words.get().into_iter().flatten().zip((self.first_page..).step_by(64));
        words.filter(|(word, _)| word.load(Ordering::Relaxed) != 0).flat_map(|(word, first_page)| {
            let bits = word.swap(0, Ordering::AcqRel);
            (0..64).filter(move |bit| bits & (1 << bit) != 0).map(move |bit| first_page + bit)
        })
    }
}

/// A handle through which writes to the mapping of one region are recorded.
#[derive(Debug, Clone, Default)]
pub struct WriteMarks {
    region: Arc<RegionPages>,
    /// First address of the region in the guest.
    base: u64,
}

impl WriteMarks {
    pub(super) fn new(region: Arc<RegionPages>, base: u64) -> Self {
        Self { region, base }
    }
}

impl Bitmap for WriteMarks {
    fn mark_dirty(&self, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        let first_byte = self.base.saturating_add(offset as u64);
        let last_byte = first_byte.saturating_add(len as u64 - 1);
        let pages = first_byte / PAGE..=last_byte / PAGE;
        let tracking = &self.region.tracking;
        if tracking.is_recording.load(Ordering::Relaxed)
            && let Some(words) = self.region.words.get()
        {
            for page in pages.clone().map(|page| page - self.region.first_page) {
                if let Some(word) = words.get((page / 64) as usize) {
                    // A reader that sees the mark also sees the written data.
                    word.fetch_or(1 << (page % 64), Ordering::Release);
                }
            }
        }
        if let Some(log) = &*tracking.dirty_log.read().unwrap_or_else(PoisonError::into_inner) {
            pages.for_each(|page| log.mark(page));
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = self.base.saturating_add(offset as u64) / PAGE - self.region.first_page;
        let word = self.region.words.get().and_then(|words| words.get((page / 64) as usize));
        word.is_some_and(|word| word.load(Ordering::Relaxed) & (1 << (page % 64)) != 0)
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

impl<'a> WithBitmapSlice<'a> for WriteMarks {
    type S = RefSlice<'a, Self>;
}

impl NewBitmap for WriteMarks {
    fn with_len(_: usize) -> Self {
        Self::default()
    }
}
