//! Files that this process has mapped.

use std::io;
use vm_memory::bitmap::Bitmap;
use vm_memory::mmap::MmapRegion;

/// Bytes per unmap, which takes less than a millisecond.
const BYTES_PER_UNMAP: usize = 4 << 20;

/// Drops the pages of a shared file's mapping from this process, piece by piece. If this is done before unmapping, a
/// thread that maps memory concurrently waits for one piece only. The file keeps its content, and the mapping stays
/// usable.
///
/// # Errors
/// `InvalidInput` for a private mapping, which would lose its content; errors of `madvise(2)`.
pub fn drop_pages<B: Bitmap>(region: &MmapRegion<B>) -> io::Result<()> {
    if region.flags() & libc::MAP_SHARED == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a private mapping would lose its pages"));
    }
    let advise = |at: usize, bytes: usize, advice| {
        // SAFETY: within the region, which is borrowed, so that it stays mapped. The pages of a shared mapping belong
        // to the file: they are not lost, and are mapped again on access.
        let done = unsafe { libc::madvise(region.as_ptr().wrapping_add(at).cast(), bytes, advice) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // Keeps the kernel from recording for each page that it was used, which is half of the work.
    advise(0, region.size(), libc::MADV_RANDOM)?;
    (0..region.size())
        .step_by(BYTES_PER_UNMAP)
        .try_for_each(|at| advise(at, BYTES_PER_UNMAP.min(region.size() - at), libc::MADV_DONTNEED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PageMap;
    use crate::process::Process;
    use rekindle_pages::PAGE_SIZE;
    use std::os::unix::fs::FileExt;
    use vm_memory::mmap::MmapRegionBuilder;
    use vm_memory::{Bytes, FileOffset, VolatileMemory};

    #[test]
    fn the_file_keeps_its_pages_and_the_process_has_none_of_them() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let bytes = 2 * BYTES_PER_UNMAP + PAGE_SIZE;
        file.set_len(bytes as u64).unwrap();
        let region = MmapRegion::<()>::from_file(FileOffset::new(file.try_clone().unwrap(), 0), bytes).unwrap();
        for at in (0..bytes).step_by(PAGE_SIZE) {
            region.as_volatile_slice().write_obj(at as u64 | 1, at).unwrap();
        }
        let populated = || {
            let map = PageMap::open(Process::current().unwrap()).unwrap();
            let runs = map.populated(region.as_ptr() as u64, bytes as u64).unwrap();
            runs.iter().map(|run| run.end - run.start).sum::<u64>()
        };
        assert_eq!(populated(), bytes as u64);
        drop_pages(&region).unwrap();
        assert_eq!(populated(), 0);
        let mut found = [0; 8];
        file.read_exact_at(&mut found, (bytes - PAGE_SIZE) as u64).unwrap();
        assert_eq!(u64::from_ne_bytes(found), (bytes - PAGE_SIZE) as u64 | 1);
        assert_eq!(region.as_volatile_slice().read_obj::<u64>(BYTES_PER_UNMAP).unwrap(), BYTES_PER_UNMAP as u64 | 1);
    }

    #[test]
    fn a_private_mapping_keeps_what_it_has() {
        let region = MmapRegionBuilder::<()>::new(PAGE_SIZE)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
            .build()
            .unwrap();
        region.as_volatile_slice().write_obj(7u8, 0).unwrap();
        assert_eq!(drop_pages(&region).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(region.as_volatile_slice().read_obj::<u8>(0).unwrap(), 7);
    }
}
