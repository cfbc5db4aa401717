//! A guest's memory as a front end passes it: mapped, with a record of the pages that are written through this mapping.
//!
//! QEMU's page tables do not show these writes. So each written page is recorded twice: for QEMU during a migration,
//! in the log that QEMU passes (`VHOST_USER_SET_LOG_BASE`), and for a protector that requests it (`marks`).

mod files;
mod marks;

use crate::background::run_in_background;
use crate::block_map::Frame;
use crate::broker::FrontEndMemory;
use crate::missing_pages::{DoubleMapping, MissingPages};
pub use files::MemoryFiles;
use files::{FilePart, FileSizes};
pub use marks::WriteMarks;
use marks::{DirtyLog, RegionPages, WriteTracking};
use rekindle_kernel::mapping::drop_pages;
use rekindle_kernel::process::Process;
use rekindle_pages::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::bitmap::Bitmap;
use vm_memory::{
    Address, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};
use xxhash_rust::xxh3::xxh3_64;

const PAGE: u64 = PAGE_SIZE as u64;
/// Frames that a guest's memory may extend over in addition to four times its size: 64 GiB. A region beyond that is
/// distant.
const MAX_EXTRA_FRAMES: u64 = 1 << 24;

/// A region of the guest's memory, in a file.
#[derive(Debug)]
pub struct Region {
    /// First address in the guest.
    pub address: u64,
    pub bytes: u64,
    pub file: File,
    /// Offset in the file.
    pub offset: u64,
    /// First address in the front end.
    pub front_end_address: u64,
}

/// A range of written bytes, in the front end's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    pub address: u64,
    pub bytes: u64,
}

/// A region whose written pages can be recorded.
#[derive(Debug)]
struct TrackedRegion {
    pages: Arc<RegionPages>,
    /// First address in the guest.
    address: u64,
    bytes: u64,
    /// First address in the front end.
    front_end_address: u64,
}

/// The mapped memory of one guest.
#[derive(Debug)]
pub struct Memory {
    /// The pages that a restore has not filled yet. Declared before the mapping, so that it is dropped first.
    missing: Option<MissingPages>,
    pub map: GuestMemoryMmap<WriteMarks>,
    tracking: Arc<WriteTracking>,
    /// By address.
    tracked_regions: Vec<TrackedRegion>,
}

impl Memory {
    /// Maps a guest's memory.
    ///
    /// # Errors
    /// Errors of `mmap(2)`; an error if regions overlap or exceed their files.
    pub fn map(regions: Vec<Region>) -> io::Result<Self> {
        let tracking = Arc::<WriteTracking>::default();
        let (mut mapped_regions, mut tracked_regions) = (Vec::new(), Vec::new());
        for Region { address, bytes, file, offset, front_end_address } in regions {
            let size = check_within_file("a region", &file, offset, bytes)?;
            let pages = Arc::new(RegionPages::new(Arc::clone(&tracking), address / PAGE));
            let marks = WriteMarks::new(Arc::clone(&pages), address);
            tracked_regions.push(TrackedRegion { pages, address, bytes, front_end_address });
            let mapping = vm_memory::mmap::MmapRegionBuilder::new_with_bitmap(size, marks)
                .with_file_offset(FileOffset::new(file, offset))
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
                .build()
                .map_err(io::Error::other)?;
            let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "a region ends behind all addresses");
            mapped_regions.push(GuestRegionMmap::new(mapping, GuestAddress(address)).ok_or_else(invalid)?);
        }
        mapped_regions.sort_by_key(|region| region.start_addr());
        tracked_regions.sort_by_key(|region| region.address);
        let map = GuestMemoryMmap::from_regions(mapped_regions).map_err(io::Error::other)?;
        Ok(Self { missing: None, map, tracking, tracked_regions })
    }

    /// Maps memory that a restore is still filling: access to a missing page blocks until the front end's process has
    /// the page.
    ///
    /// # Errors
    /// As for [`Memory::map`]; also if userfaultfd is unavailable.
    pub fn map_missing(regions: Vec<Region>, front_end: Process, access: FrontEndMemory) -> io::Result<Self> {
        let mut memory = Self::map(regions)?;
        let double_mapping = |region: &TrackedRegion| {
            let ours = memory.map.get_host_address(GuestAddress(region.address)).map_err(io::Error::other)? as u64;
            Ok(DoubleMapping { ours: ours..ours + region.bytes, theirs: region.front_end_address })
        };
        let mappings = memory.tracked_regions.iter().map(double_mapping).collect::<io::Result<_>>()?;
        memory.missing = Some(MissingPages::begin(mappings, front_end, access)?);
        Ok(memory)
    }

    /// Stops blocking accesses, because no page is missing any more.
    pub fn set_filled(&self) {
        self.missing.iter().for_each(MissingPages::set_filled);
    }

    /// Returns the page number after the end of each region.
    fn region_ends(&self) -> impl Iterator<Item = u64> {
        self.map.iter().map(|region| region.last_addr().raw_value() / PAGE + 1)
    }

    /// Returns the number of frames up to the end of the guest's memory, holes included. A distant region, such as a
    /// device's, has no frames, because the block map takes memory for each frame.
    #[must_use]
    pub fn frames(&self) -> Frame {
        let bytes = self.map.iter().fold(0u64, |sum, region| sum.saturating_add(region.len()));
        let max_frames = (bytes / PAGE).saturating_mul(4).saturating_add(MAX_EXTRA_FRAMES);
        let end = self.region_ends().filter(|end| *end <= max_frames).max().unwrap_or(0);
        Frame::try_from(end).unwrap_or(Frame::MAX)
    }

    /// Returns whether each frame that both memories have is at the same place of the same file. The division into
    /// regions does not matter.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.frames() == other.frames() && self.file_mappings() == other.file_mappings()
    }

    /// Returns where the files are in the guest.
    fn file_mappings(&self) -> BTreeSet<FileMapping> {
        let mapping = |region: &GuestRegionMmap<WriteMarks>| {
            let file = region.file_offset()?;
            let displacement = region.start_addr().raw_value().wrapping_sub(file.start());
            Some(FileMapping { file: FileId::of(file.file())?, displacement })
        };
        self.map.iter().filter_map(mapping).collect()
    }

    /// Returns a hash of the files' identities, which is the same in every process that maps this memory.
    #[must_use]
    pub fn identity(&self) -> u64 {
        let mappings = self.file_mappings().into_iter();
        let numbers = mappings.flat_map(|mapping| [mapping.file.device, mapping.file.inode, mapping.displacement]);
        let bytes: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
        xxh3_64(&bytes)
    }

    /// Returns the number of frames that the host has not allocated yet.
    #[must_use]
    pub fn unallocated_frames(&self) -> usize {
        let sizes = FileSizes::of(self.map.iter().filter_map(|region| Some(region.file_offset()?.file())));
        (sizes.length.saturating_sub(sizes.allocated) / PAGE) as usize
    }

    /// Copies bytes from the guest. Returns `None` if they are outside of its memory.
    #[must_use]
    pub fn read(&self, address: u64, target: &mut [u8]) -> Option<()> {
        self.map.read_slice(target, GuestAddress(address)).ok()
    }

    /// Copies bytes into the guest. Returns `None` if their place is outside of its memory.
    #[must_use]
    pub fn write(&self, address: u64, bytes: &[u8]) -> Option<()> {
        if bytes.len() >= PAGE_SIZE {
            self.map_pages(address, bytes.len());
        }
        self.map.write_slice(bytes, GuestAddress(address)).ok()
    }

    /// Reads a byte of each page before the page is written. The first access to a page that exists in the file, but
    /// not in this mapping, is a fault. A read fault maps 16 pages (`fault_around_bytes`), a write fault maps one.
    fn map_pages(&self, address: u64, bytes: usize) {
        let Ok(slice) = self.map.get_slice(GuestAddress(address), bytes) else { return };
        for offset in (0..bytes).step_by(PAGE_SIZE) {
            let _ = slice.load::<u8>(offset, Ordering::Relaxed);
        }
    }

    /// Copies whole pages into the guest that the host may not have allocated yet. Writes through the file, which
    /// avoids a fault and zeroing per page.
    #[must_use]
    pub fn fill(&self, address: u64, bytes: &[u8]) -> Option<()> {
        let region = self.map.find_region(GuestAddress(address))?;
        let region_offset = address - region.start_addr().raw_value();
        let is_in_region = region_offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= region.len());
        // A write that bypasses the mapping would not wait for a missing page, whose rest would be zero.
        let Some(file) = region.file_offset().filter(|_| is_in_region && self.missing.is_none()) else {
            return self.write(address, bytes);
        };
        // Huge pages cannot be written through the file.
        if file.file().write_all_at(bytes, file.start() + region_offset).is_err() {
            return self.write(address, bytes);
        }
        region.bitmap().mark_dirty(usize::try_from(region_offset).ok()?, bytes.len());
        Some(())
    }

    #[must_use]
    pub fn files(&self) -> MemoryFiles {
        let part = |region: &GuestRegionMmap<WriteMarks>| {
            let start = region.start_addr().raw_value();
            Some(FilePart { addresses: start..start + region.len(), file: region.file_offset()?.clone() })
        };
        MemoryFiles::new(self.map.iter().filter_map(part).collect())
    }

    /// Unmaps memory that has no other users, in the background: unmapping takes 0.1 s or more per used GiB.
    pub fn unmap_in_background(memory: Arc<Self>) {
        let Some(memory) = Arc::into_inner(memory) else { return };
        run_in_background("unmap", memory, |memory| {
            // With userfaultfd each unmapped page is reported to the pager: unmap all of the memory together.
            if memory.missing.is_none()
                && let Err(e) = memory.map.iter().try_for_each(|region| drop_pages(region))
            {
                tracing::debug!("a previous guest's memory is unmapped in one piece: {e}");
            }
        });
    }

    /// Sets the dirty log of a migrating QEMU.
    ///
    /// # Errors
    /// Errors of `mmap(2)`; an error if the log is too short for the guest's memory, or longer than its file.
    pub fn set_dirty_log(&self, file: File, offset: u64, bytes: u64) -> io::Result<()> {
        let pages = self.region_ends().max().unwrap_or(0);
        if bytes < pages.div_ceil(8) {
            let text = format!("a log of {bytes} bytes is too short for {pages} pages");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let size = check_within_file("a log", &file, offset, bytes)?;
        self.tracking.set_dirty_log(Some(DirtyLog::map(file, offset, size)?));
        Ok(())
    }

    pub fn end_dirty_log(&self) {
        self.tracking.set_dirty_log(None);
    }

    /// Starts recording written pages for a protector.
    pub fn start_recording_pages(&self) {
        for region in &self.tracked_regions {
            region.pages.allocate((region.address + (region.bytes - 1)) / PAGE);
        }
        self.tracking.is_recording.store(true, Ordering::Relaxed);
    }

    pub fn stop_recording_pages(&self) {
        self.tracking.is_recording.store(false, Ordering::Relaxed);
    }

    /// Returns and clears the recorded pages.
    ///
    /// This function may be called at any time: a page is recorded after its write, so a page that is read during a
    /// write is reported again.
    #[must_use]
    pub fn take_written_pages(&self) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        for region in &self.tracked_regions {
            for page in region.pages.take_written() {
                let offset = (page * PAGE).checked_sub(region.address).filter(|offset| *offset < region.bytes);
                let address = offset.and_then(|offset| region.front_end_address.checked_add(offset));
                let Some(address) = address else { continue };
                match spans.last_mut().filter(|last| last.address + last.bytes == address) {
                    Some(last) => last.bytes += PAGE,
                    None => spans.push(Span { address, bytes: PAGE }),
                }
            }
        }
        spans
    }
}

/// The identity of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    fn of(file: &File) -> Option<Self> {
        let metadata = file.metadata().ok()?;
        Some(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

/// The place of a file in the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct FileMapping {
    file: FileId,
    /// Address in the guest minus offset in the file.
    displacement: u64,
}

/// Rejects a part that exceeds its file, because access to its mapping would kill this process. Returns the part's
/// bytes.
fn check_within_file(what: &str, file: &File, offset: u64, bytes: u64) -> io::Result<usize> {
    let length = file.metadata()?.len();
    if offset.checked_add(bytes).is_none_or(|end| end > length) {
        let text = format!("{what} of {bytes} bytes does not fit into its file of {length}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    usize::try_from(bytes).map_err(io::Error::other)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// First address of the guest's memory in the front end.
    const FRONT_END_BASE: u64 = 0x7000_0000_0000;

    fn region(address: u64, bytes: u64) -> Region {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        Region { address, bytes, file, offset: 0, front_end_address: FRONT_END_BASE + address }
    }

    #[test]
    fn a_write_allocates_only_the_pages_that_it_writes() {
        use rustix::fs::{MemfdFlags, memfd_create};
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[7; 3 * PAGE_SIZE], 33 * PAGE).unwrap();
        let whole_file =
            Region { address: 0, bytes: 1 << 20, file: file.try_clone().unwrap(), offset: 0, front_end_address: 0 };
        let memory = Memory::map(vec![whole_file]).unwrap();
        assert_eq!(memory.unallocated_frames(), 256 - 3);
        // The write starts inside a page that exists, and continues in two pages that do not.
        memory.write(35 * PAGE + 100, &[1; 2 * PAGE_SIZE]).unwrap();
        assert_eq!(memory.unallocated_frames(), 256 - 5);
        let mut expected = vec![0; 1 << 20];
        expected[33 * PAGE_SIZE..36 * PAGE_SIZE].fill(7);
        expected[35 * PAGE_SIZE + 100..37 * PAGE_SIZE + 100].fill(1);
        let mut found = vec![0; 1 << 20];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == expected);
    }

    #[test]
    fn written_pages_are_recorded_on_request() {
        let memory = Memory::map(vec![region(1 << 20, 1 << 20), region(0, 640 << 10)]).unwrap();
        assert_eq!(memory.frames(), 512);
        memory.write(0, &[1; 10]).unwrap();
        assert!(memory.take_written_pages().is_empty(), "not requested");
        memory.start_recording_pages();
        memory.write(4095, &[1; 2]).unwrap();
        memory.write((1 << 20) + 8192, &[1; 4096]).unwrap();
        let spans = [
            Span { address: FRONT_END_BASE, bytes: 8192 },
            Span { address: FRONT_END_BASE + (1 << 20) + 8192, bytes: 4096 },
        ];
        assert_eq!(memory.take_written_pages(), spans);
        assert!(memory.take_written_pages().is_empty());
        let mut byte = [0];
        memory.read(4096, &mut byte).unwrap();
        assert_eq!(byte, [1]);
        assert!(memory.take_written_pages().is_empty(), "a read changes nothing");
        assert!(memory.write(700 << 10, &[1]).is_none(), "in the hole");
        assert!(memory.write((2 << 20) - 1, &[1; 2]).is_none(), "over the end");
    }

    #[test]
    fn written_pages_are_in_the_dirty_log_of_a_migrating_qemu() {
        let memory = Memory::map(vec![region(0, 1 << 20)]).unwrap();
        let log = tempfile::tempfile().unwrap();
        log.set_len(32).unwrap();
        assert!(memory.set_dirty_log(log.try_clone().unwrap(), 0, 31).is_err(), "too short");
        memory.set_dirty_log(log.try_clone().unwrap(), 0, 32).unwrap();
        memory.write(9 * 4096, &[1]).unwrap();
        memory.end_dirty_log();
        memory.write(10 * 4096, &[1]).unwrap();
        let mut bytes = [0; 32];
        std::os::unix::fs::FileExt::read_exact_at(&log, &mut bytes, 0).unwrap();
        assert_eq!((bytes[0], bytes[1], bytes[2]), (0, 0b10, 0));
    }

    #[test]
    fn filled_pages_are_recorded_like_written_ones() {
        let memory = Memory::map(vec![region(0, 1 << 20), region(1 << 20, 1 << 20)]).unwrap();
        memory.start_recording_pages();
        memory.fill((1 << 20) + 4096, &[7; 4096]).unwrap();
        let mut found = [0; 4096];
        memory.read((1 << 20) + 4096, &mut found).unwrap();
        assert_eq!(found, [7; 4096]);
        assert_eq!(memory.take_written_pages(), [Span { address: FRONT_END_BASE + (1 << 20) + 4096, bytes: 4096 }]);
        // A range over the end of a region: `fill` calls `write`.
        memory.fill((1 << 20) - 2048, &[8; 4096]).unwrap();
        memory.read((1 << 20) - 2048, &mut found).unwrap();
        assert_eq!(found, [8; 4096]);
        assert_eq!(memory.take_written_pages().iter().map(|span| span.bytes).sum::<u64>(), 8192);
        assert!(memory.fill(2 << 20, &[1; 4096]).is_none());
    }

    #[test]
    fn the_same_memory_may_be_divided_otherwise() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let part_of_file = |address, bytes, offset| Region {
            address,
            bytes,
            file: file.try_clone().unwrap(),
            offset,
            front_end_address: 0,
        };
        let whole = Memory::map(vec![part_of_file(0, 1 << 20, 0)]).unwrap();
        let divided =
            Memory::map(vec![part_of_file(0, 640 << 10, 0), part_of_file(768 << 10, 256 << 10, 768 << 10)]).unwrap();
        assert!(whole.is_same(&divided));
        let shifted = Memory::map(vec![part_of_file(4096, (1 << 20) - 4096, 0)]).unwrap();
        assert!(!whole.is_same(&shifted));
        assert!(!whole.is_same(&Memory::map(vec![region(0, 1 << 20)]).unwrap()), "another file");
    }

    #[test]
    fn a_distant_region_has_no_frames() {
        let distant = 1 << 52;
        let memory = Memory::map(vec![region(distant, 1 << 20), region(0, 1 << 20)]).unwrap();
        assert_eq!(memory.frames(), 256, "blocks in a device's memory are not recorded");
        memory.start_recording_pages();
        memory.write(distant + 4096, &[1]).unwrap();
        assert_eq!(memory.take_written_pages(), [Span { address: FRONT_END_BASE + distant + 4096, bytes: 4096 }]);
        // A log has a bit for each page up to the end of the distant region.
        let log = tempfile::tempfile().unwrap();
        log.set_len(1 << 20).unwrap();
        assert!(memory.set_dirty_log(log, 0, 1 << 20).is_err());
    }

    #[test]
    fn a_log_that_is_longer_than_its_file_is_rejected() {
        let memory = Memory::map(vec![region(0, 1 << 20)]).unwrap();
        let log = tempfile::tempfile().unwrap();
        log.set_len(4096).unwrap();
        assert!(memory.set_dirty_log(log.try_clone().unwrap(), 0, 4097).is_err());
        assert!(memory.set_dirty_log(log, 4096, 4096).is_err());
    }

    #[test]
    fn a_region_that_exceeds_its_file_or_overlaps_another_is_rejected() {
        let Region { file, .. } = region(0, 4096);
        let too_long = Region { address: 0, bytes: 8192, file, offset: 0, front_end_address: 0 };
        assert!(Memory::map(vec![too_long]).is_err());
        assert!(Memory::map(vec![region(0, 8192), region(4096, 8192)]).is_err(), "they overlap");
    }
}
