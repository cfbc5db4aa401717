//! A guest's memory as a front end passes it: mapped, with a record of the pages that are written through this mapping.
//!
//! QEMU's page tables do not show these writes. So each written page is recorded twice: for QEMU during a migration,
//! in the log that QEMU passes (`VHOST_USER_SET_LOG_BASE`), and for a protector that requests it.

use crate::background::run_in_background;
use crate::block_map::Frame;
use crate::missing_pages::{DoubleMapping, MissingPages};
use rekindle_kernel::file::punch_hole;
use rekindle_kernel::mapping::drop_pages;
use rekindle_kernel::memory::PAGE_SIZE;
use rekindle_kernel::process::Process;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};
use vm_memory::mmap::MmapRegion;
use vm_memory::{
    Address, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    VolatileMemory,
};
use xxhash_rust::xxh3::xxh3_64;

/// Frames that a guest's memory may extend over in addition to four times its size: 64 GiB. A region beyond that is
/// distant.
const FAR: u64 = 1 << 24;

/// The recipients of the record of written pages.
#[derive(Debug, Default)]
struct WriteTracking {
    /// Whether a protector requests the record.
    wanted: AtomicBool,
    log: RwLock<Option<DirtyLog>>,
}

/// The pages of one region that were written.
#[derive(Debug, Default)]
struct RegionPages {
    written: Arc<WriteTracking>,
    /// Number of the region's first page in the guest.
    first: u64,
    /// One bit per page; empty until a protector requests it.
    bits: OnceLock<Box<[AtomicU64]>>,
}

/// The dirty bitmap of a migrating QEMU: one bit per page, from guest address 0 on.
#[derive(Debug)]
struct DirtyLog {
    region: MmapRegion,
}

impl DirtyLog {
    fn mark(&self, page: u64) {
        let bytes = self.region.as_volatile_slice();
        let Ok(byte) = usize::try_from(page / 8) else { return };
        if let Ok(byte) = bytes.get_atomic_ref::<AtomicU8>(byte) {
            byte.fetch_or(1 << (page % 8), Ordering::Relaxed);
        }
    }
}

/// A handle through which writes to the mapping of one region are recorded.
#[derive(Debug, Clone, Default)]
pub struct WriteMarks {
    region: Arc<RegionPages>,
    base: u64,
}

impl WriteMarks {
    fn mark(&self, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        let first = self.base.saturating_add(offset as u64);
        let pages = first / PAGE_SIZE as u64..=(first.saturating_add(len as u64 - 1)) / PAGE_SIZE as u64;
        if self.region.written.wanted.load(Ordering::Relaxed)
            && let Some(words) = self.region.bits.get()
        {
            for page in pages.clone().map(|page| page - self.region.first) {
                if let Some(word) = words.get((page / 64) as usize) {
                    // A reader that sees the mark also sees the written data.
                    word.fetch_or(1 << (page % 64), Ordering::Release);
                }
            }
        }
        if let Some(log) = &*self.region.written.log.read().unwrap_or_else(PoisonError::into_inner) {
            pages.for_each(|page| log.mark(page));
        }
    }
}

impl<'a> WithBitmapSlice<'a> for WriteMarks {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for WriteMarks {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.mark(offset, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = self.base.saturating_add(offset as u64) / PAGE_SIZE as u64 - self.region.first;
        let word = self.region.bits.get().and_then(|words| words.get((page / 64) as usize));
        word.is_some_and(|word| word.load(Ordering::Relaxed) & (1 << (page % 64)) != 0)
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

impl NewBitmap for WriteMarks {
    fn with_len(_: usize) -> Self {
        Self::default()
    }
}

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
    pub front: u64,
}

/// A range of written bytes, in the front end's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    pub address: u64,
    pub bytes: u64,
}

/// The mapped memory of one guest.
#[derive(Debug)]
pub struct Memory {
    /// The pages that a restore has not filled yet. Declared before the mapping, so that it is dropped first.
    missing: Option<MissingPages>,
    pub map: GuestMemoryMmap<WriteMarks>,
    written: Arc<WriteTracking>,
    /// Written pages of each region, with its first address, its bytes, and its address in the front end.
    fronts: Vec<(Arc<RegionPages>, u64, u64, u64)>,
}

impl Memory {
    /// Maps a guest's memory.
    ///
    /// # Errors
    /// Errors of `mmap(2)`; an error if regions overlap or exceed their files.
    pub fn map(regions: Vec<Region>) -> io::Result<Self> {
        let written = Arc::<WriteTracking>::default();
        let (mut mapped, mut fronts) = (Vec::new(), Vec::new());
        for Region { address, bytes, file, offset, front } in regions {
            let size = fits("a region", &file, offset, bytes)?;
            let pages = RegionPages {
                written: Arc::clone(&written),
                first: address / PAGE_SIZE as u64,
                ..RegionPages::default()
            };
            let region = Arc::new(pages);
            fronts.push((Arc::clone(&region), address, bytes, front));
            let marks = WriteMarks { region, base: address };
            let region = vm_memory::mmap::MmapRegionBuilder::new_with_bitmap(size, marks)
                .with_file_offset(FileOffset::new(file, offset))
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
                .build()
                .map_err(io::Error::other)?;
            let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "a region ends behind all addresses");
            mapped.push(GuestRegionMmap::new(region, GuestAddress(address)).ok_or_else(invalid)?);
        }
        mapped.sort_by_key(|region| region.start_addr());
        fronts.sort_by_key(|(_, start, _, _)| *start);
        let map = GuestMemoryMmap::from_regions(mapped).map_err(io::Error::other)?;
        Ok(Self { missing: None, map, written, fronts })
    }

    /// Maps memory that a restore is still filling: access to a missing page blocks until the front end, process
    /// `front`, has the page.
    ///
    /// # Errors
    /// As for [`Memory::map`]; also if userfaultfd is unavailable.
    pub fn map_missing(regions: Vec<Region>, front: Process) -> io::Result<Self> {
        let mut memory = Self::map(regions)?;
        let place = |(_, start, bytes, theirs): &(_, u64, u64, u64)| {
            let ours = memory.map.get_host_address(GuestAddress(*start)).map_err(io::Error::other)? as u64;
            Ok(DoubleMapping { ours: ours..ours + bytes, theirs: *theirs })
        };
        let places = memory.fronts.iter().map(place).collect::<io::Result<_>>()?;
        memory.missing = Some(MissingPages::begin(places, front)?);
        Ok(memory)
    }

    /// Stops blocking accesses, because no page is missing any more.
    pub fn filled(&self) {
        self.missing.iter().for_each(MissingPages::filled);
    }

    /// Returns the number of pages up to the end of the guest's memory, holes included.
    fn pages(&self) -> u64 {
        self.map.iter().map(|region| region.last_addr().raw_value() / PAGE_SIZE as u64 + 1).max().unwrap_or(0)
    }

    /// Returns the number of frames up to the end of the guest's memory, holes included. A distant region, such as a
    /// device's, has no frames, because the block map takes memory for each frame.
    #[must_use]
    pub fn frames(&self) -> Frame {
        let bytes = self.map.iter().fold(0u64, |sum, region| sum.saturating_add(region.len()));
        let most = (bytes / PAGE_SIZE as u64).saturating_mul(4).saturating_add(FAR);
        let ends = self.map.iter().map(|region| region.last_addr().raw_value() / PAGE_SIZE as u64 + 1);
        let end = ends.filter(|end| *end <= most).max().unwrap_or(0);
        Frame::try_from(end).unwrap_or(Frame::MAX)
    }

    /// Returns whether each frame that both memories have is at the same place of the same file. The division into
    /// regions does not matter.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.frames() == other.frames() && self.places() == other.places()
    }

    /// Returns the files and their displacements in the guest: device, inode, address minus offset.
    fn places(&self) -> BTreeSet<(u64, u64, u64)> {
        let place = |region: &GuestRegionMmap<WriteMarks>| {
            let file = region.file_offset()?;
            let metadata = file.file().metadata().ok()?;
            let shift = region.start_addr().raw_value().wrapping_sub(file.start());
            Some((metadata.dev(), metadata.ino(), shift))
        };
        self.map.iter().filter_map(place).collect()
    }

    /// Returns a hash of the files' identities, which is the same in every process that maps this memory.
    #[must_use]
    pub fn identity(&self) -> u64 {
        let places = self.places().into_iter();
        let bytes: Vec<u8> =
            places.flat_map(|(dev, ino, shift)| [dev, ino, shift]).flat_map(u64::to_le_bytes).collect();
        xxh3_64(&bytes)
    }

    /// Returns the number of frames that the host has not allocated yet.
    #[must_use]
    pub fn room(&self) -> usize {
        let (long, taken) = sizes(self.map.iter().filter_map(|region| Some(region.file_offset()?.file())));
        (long.saturating_sub(taken) / PAGE_SIZE as u64) as usize
    }

    /// Copies bytes from the guest. Returns `None` if they are outside of its memory.
    #[must_use]
    pub fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
        self.map.read_slice(into, GuestAddress(address)).ok()
    }

    /// Copies bytes into the guest. Returns `None` if their place is outside of its memory.
    #[must_use]
    pub fn write(&self, address: u64, bytes: &[u8]) -> Option<()> {
        if bytes.len() >= PAGE_SIZE {
            self.touch(address, bytes.len());
        }
        self.map.write_slice(bytes, GuestAddress(address)).ok()
    }

    /// Reads a byte of each page before the page is written. The first access to a page that exists in the file, but
    /// not in this mapping, is a fault. A read fault maps 16 pages (`fault_around_bytes`), a write fault maps one.
    fn touch(&self, address: u64, bytes: usize) {
        let Ok(slice) = self.map.get_slice(GuestAddress(address), bytes) else { return };
        for at in (0..bytes).step_by(PAGE_SIZE) {
            let _ = slice.load::<u8>(at, Ordering::Relaxed);
        }
    }

    /// Copies whole pages into the guest that the host may not have allocated yet. Writes through the file, which
    /// avoids a fault and zeroing per page.
    #[must_use]
    pub fn fill(&self, address: u64, bytes: &[u8]) -> Option<()> {
        let region = self.map.find_region(GuestAddress(address))?;
        let within = address - region.start_addr().raw_value();
        let fits = within.checked_add(bytes.len() as u64).is_some_and(|end| end <= region.len());
        // A write that bypasses the mapping would not wait for a missing page, whose rest would be zero.
        let Some(file) = region.file_offset().filter(|_| fits && self.missing.is_none()) else {
            return self.write(address, bytes);
        };
        // Huge pages cannot be written through the file.
        if file.file().write_all_at(bytes, file.start() + within).is_err() {
            return self.write(address, bytes);
        }
        region.bitmap().mark_dirty(usize::try_from(within).ok()?, bytes.len());
        Some(())
    }

    #[must_use]
    pub fn files(&self) -> MemoryFiles {
        let part = |region: &GuestRegionMmap<WriteMarks>| {
            Some((region.start_addr().raw_value(), region.len(), region.file_offset()?.clone()))
        };
        MemoryFiles { parts: self.map.iter().filter_map(part).collect() }
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
    pub fn log(&self, file: File, offset: u64, bytes: u64) -> io::Result<()> {
        let needed = self.pages().div_ceil(8);
        if bytes < needed {
            let text = format!("a log of {bytes} bytes is too short for {} pages", self.pages());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let size = fits("a log", &file, offset, bytes)?;
        let region = MmapRegion::from_file(FileOffset::new(file, offset), size).map_err(io::Error::other)?;
        *self.written.log.write().unwrap_or_else(PoisonError::into_inner) = Some(DirtyLog { region });
        Ok(())
    }

    pub fn end_log(&self) {
        *self.written.log.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Starts or stops recording pages for a protector.
    pub fn note(&self, wanted: bool) {
        for (pages, start, bytes, _) in self.fronts.iter().filter(|_| wanted) {
            let count = (start + (bytes - 1)) / PAGE_SIZE as u64 - pages.first + 1;
            pages.bits.get_or_init(|| (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect());
        }
        self.written.wanted.store(wanted, Ordering::Relaxed);
    }

    /// Returns and clears the recorded pages.
    ///
    /// This function may be called at any time: a page is recorded after its write, so a page that is read during a
    /// write is reported again.
    #[must_use]
    pub fn collect(&self) -> Vec<Span> {
        const PAGE: u64 = PAGE_SIZE as u64;
        let mut found: Vec<Span> = Vec::new();
        for (pages, start, bytes, front) in &self.fronts {
            for (word, first) in pages.bits.get().into_iter().flatten().zip((pages.first..).step_by(64)) {
                if word.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                let bits = word.swap(0, Ordering::AcqRel);
                for page in (0..64).filter(|bit| bits & (1 << bit) != 0).map(|bit| first + bit) {
                    let offset = (page * PAGE).checked_sub(*start).filter(|offset| offset < bytes);
                    let Some(address) = offset.and_then(|offset| front.checked_add(offset)) else { continue };
                    match found.last_mut().filter(|last| last.address + last.bytes == address) {
                        Some(last) => last.bytes += PAGE,
                        None => found.push(Span { address, bytes: PAGE }),
                    }
                }
            }
        }
        found
    }
}

/// Rejects a part that exceeds its file, because access to its mapping would kill this process. Returns the part's
/// bytes.
fn fits(what: &str, file: &File, offset: u64, bytes: u64) -> io::Result<usize> {
    let length = file.metadata()?.len();
    if offset.checked_add(bytes).is_none_or(|end| end > length) {
        let text = format!("{what} of {bytes} bytes does not fit into its file of {length}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    usize::try_from(bytes).map_err(io::Error::other)
}

/// Returns the total length of files, and their allocated bytes. Each file counts once.
fn sizes<'a>(files: impl Iterator<Item = &'a File>) -> (u64, u64) {
    let sizes_by_file: BTreeMap<_, _> = files
        .filter_map(|file| file.metadata().ok())
        .map(|metadata| ((metadata.dev(), metadata.ino()), (metadata.len(), metadata.blocks() * 512)))
        .collect();
    sizes_by_file.values().fold((0, 0), |(long, taken), (of_long, of_taken)| (long + of_long, taken + of_taken))
}

/// The files of a guest's memory, without a mapping: unmapped memory is released faster.
#[derive(Debug)]
pub struct MemoryFiles {
    /// First address in the guest, bytes, offset, file.
    parts: Vec<(u64, u64, FileOffset)>,
}

impl MemoryFiles {
    /// Returns the address ranges: first address, bytes.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.parts.iter().map(|(first, bytes, _)| (*first, *bytes))
    }

    /// Returns the number of frames that the host has allocated.
    #[must_use]
    pub fn taken(&self) -> usize {
        let (_, taken) = sizes(self.parts.iter().map(|(_, _, file)| file.file()));
        taken.div_ceil(PAGE_SIZE as u64) as usize
    }

    fn place(&self, address: u64, bytes: u64) -> Option<(&File, u64)> {
        let end = address.checked_add(bytes)?;
        let (first, _, file) = self.parts.iter().find(|(first, long, _)| *first <= address && end <= first + long)?;
        Some((file.file(), file.start() + (address - first)))
    }

    /// Copies bytes from the memory. Returns `None` if they are outside of it.
    #[must_use]
    pub fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
        let (file, at) = self.place(address, into.len() as u64)?;
        file.read_exact_at(into, at).ok()
    }

    /// Releases a part to the host.
    pub fn punch(&self, address: u64, bytes: u64) -> io::Result<()> {
        self.place(address, bytes).map_or(Ok(()), |(file, at)| punch_hole(file, at, bytes))
    }

    /// Returns whether `memory` uses one of these files.
    #[must_use]
    pub fn shares(&self, memory: &Memory) -> bool {
        let ours = self.parts.iter().filter_map(|(_, _, file)| file.file().metadata().ok());
        let ours: BTreeSet<_> = ours.map(|metadata| (metadata.dev(), metadata.ino())).collect();
        memory.places().iter().any(|(dev, ino, _)| ours.contains(&(*dev, *ino)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn region(address: u64, bytes: u64) -> Region {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        Region { address, bytes, file, offset: 0, front: 0x7000_0000_0000 + address }
    }

    #[test]
    fn a_write_takes_no_page_of_the_host_but_those_that_it_fills() {
        use rustix::fs::{MemfdFlags, memfd_create};
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[7; 3 * PAGE_SIZE], 33 * PAGE_SIZE as u64).unwrap();
        let part = Region { address: 0, bytes: 1 << 20, file: file.try_clone().unwrap(), offset: 0, front: 0 };
        let memory = Memory::map(vec![part]).unwrap();
        assert_eq!(memory.room(), 256 - 3);
        // The write starts inside a page that exists, and continues in two pages that do not.
        memory.write(35 * PAGE_SIZE as u64 + 100, &[1; 2 * PAGE_SIZE]).unwrap();
        assert_eq!(memory.room(), 256 - 5);
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
        assert!(memory.collect().is_empty(), "not requested");
        memory.note(true);
        memory.write(4095, &[1; 2]).unwrap();
        memory.write((1 << 20) + 8192, &[1; 4096]).unwrap();
        let front = 0x7000_0000_0000;
        let spans = [Span { address: front, bytes: 8192 }, Span { address: front + (1 << 20) + 8192, bytes: 4096 }];
        assert_eq!(memory.collect(), spans);
        assert!(memory.collect().is_empty());
        let mut byte = [0];
        memory.read(4096, &mut byte).unwrap();
        assert_eq!(byte, [1]);
        assert!(memory.collect().is_empty(), "a read changes nothing");
        assert!(memory.write(700 << 10, &[1]).is_none(), "in the hole");
        assert!(memory.write((2 << 20) - 1, &[1; 2]).is_none(), "over the end");
    }

    #[test]
    fn a_qemu_that_migrates_has_its_log() {
        let memory = Memory::map(vec![region(0, 1 << 20)]).unwrap();
        let log = tempfile::tempfile().unwrap();
        log.set_len(32).unwrap();
        assert!(memory.log(log.try_clone().unwrap(), 0, 31).is_err(), "too short");
        memory.log(log.try_clone().unwrap(), 0, 32).unwrap();
        memory.write(9 * 4096, &[1]).unwrap();
        memory.end_log();
        memory.write(10 * 4096, &[1]).unwrap();
        let mut bytes = [0; 32];
        std::os::unix::fs::FileExt::read_exact_at(&log, &mut bytes, 0).unwrap();
        assert_eq!((bytes[0], bytes[1], bytes[2]), (0, 0b10, 0));
    }

    #[test]
    fn what_is_filled_is_there_and_noted_as_what_is_written() {
        let memory = Memory::map(vec![region(0, 1 << 20), region(1 << 20, 1 << 20)]).unwrap();
        memory.note(true);
        memory.fill((1 << 20) + 4096, &[7; 4096]).unwrap();
        let mut found = [0; 4096];
        memory.read((1 << 20) + 4096, &mut found).unwrap();
        assert_eq!(found, [7; 4096]);
        assert_eq!(memory.collect(), [Span { address: 0x7000_0000_0000 + (1 << 20) + 4096, bytes: 4096 }]);
        // A range over the end of a region: `fill` calls `write`.
        memory.fill((1 << 20) - 2048, &[8; 4096]).unwrap();
        memory.read((1 << 20) - 2048, &mut found).unwrap();
        assert_eq!(found, [8; 4096]);
        assert_eq!(memory.collect().iter().map(|span| span.bytes).sum::<u64>(), 8192);
        assert!(memory.fill(2 << 20, &[1; 4096]).is_none());
    }

    #[test]
    fn the_same_memory_may_be_cut_otherwise() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let part =
            |address, bytes, offset| Region { address, bytes, file: file.try_clone().unwrap(), offset, front: 0 };
        let whole = Memory::map(vec![part(0, 1 << 20, 0)]).unwrap();
        let cut = Memory::map(vec![part(0, 640 << 10, 0), part(768 << 10, 256 << 10, 768 << 10)]).unwrap();
        assert!(whole.is_same(&cut));
        let shifted = Memory::map(vec![part(4096, (1 << 20) - 4096, 0)]).unwrap();
        assert!(!whole.is_same(&shifted));
        assert!(!whole.is_same(&Memory::map(vec![region(0, 1 << 20)]).unwrap()), "another file");
    }

    #[test]
    fn a_region_at_the_end_of_all_addresses_takes_no_room() {
        let far = 1 << 52;
        let memory = Memory::map(vec![region(far, 1 << 20), region(0, 1 << 20)]).unwrap();
        assert_eq!(memory.frames(), 256, "blocks in a device's memory are not recorded");
        memory.note(true);
        memory.write(far + 4096, &[1]).unwrap();
        assert_eq!(memory.collect(), [Span { address: 0x7000_0000_0000 + far + 4096, bytes: 4096 }]);
        // A log has a bit for each page up to the end of the distant region.
        let log = tempfile::tempfile().unwrap();
        log.set_len(1 << 20).unwrap();
        assert!(memory.log(log, 0, 1 << 20).is_err());
    }

    #[test]
    fn a_log_that_is_longer_than_its_file_is_refused() {
        let memory = Memory::map(vec![region(0, 1 << 20)]).unwrap();
        let log = tempfile::tempfile().unwrap();
        log.set_len(4096).unwrap();
        assert!(memory.log(log.try_clone().unwrap(), 0, 4097).is_err());
        assert!(memory.log(log, 4096, 4096).is_err());
    }

    #[test]
    fn memory_that_is_not_there_is_refused() {
        let Region { file, .. } = region(0, 4096);
        let long = Region { address: 0, bytes: 8192, file, offset: 0, front: 0 };
        assert!(Memory::map(vec![long]).is_err());
        assert!(Memory::map(vec![region(0, 8192), region(4096, 8192)]).is_err(), "they overlap");
    }
}
