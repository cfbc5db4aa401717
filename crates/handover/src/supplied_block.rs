//! RAM blocks as files that a destination maps.

use crate::ram_transfer_error::RamTransferError;
use rekindle_kernel::file::punch_hole;
use rekindle_kernel::memory::reserve;
use rekindle_memory::hugepages::HugePages;
use rekindle_memory::ram::Block;
use rekindle_pages::{PAGE_SIZE, PageRuns, ZERO_PAGE};
use rustix::fs::{MemfdFlags, fstatfs, memfd_create};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory};

/// `MFD_HUGE_SHIFT` of `linux/memfd.h`.
const HUGE_SIZE_SHIFT: u32 = 26;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A RAM block as a file that a destination maps from its first byte on.
#[derive(Debug)]
pub struct SuppliedBlock {
    /// QEMU's name of the block.
    pub id: String,
    /// Open for reading and writing.
    pub file: File,
    pub bytes: u64,
    /// The file in huge pages, which is written through a mapping: hugetlbfs has no `write(2)`.
    huge: Option<MmapRegion>,
}

impl SuppliedBlock {
    /// Opens the file of a block of shared memory.
    pub(crate) fn shared(block: &Block) -> Result<Self, RamTransferError> {
        let id = block.info.id.clone();
        let Some((file, 0)) = block.file() else { return Err(RamTransferError::NoWholeFile { id }) };
        match File::options().read(true).write(true).open(path_of(file)) {
            Ok(file) => Ok(Self { id, file, bytes: block.info.total, huge: None }),
            Err(source) => Err(RamTransferError::File { id, source }),
        }
    }

    /// Makes an empty file for a private block. One in huge pages has all of its pages reserved, since a QEMU that touches a page
    /// for which there is none is killed.
    pub(crate) fn empty(block: &Block) -> Result<Self, RamTransferError> {
        let (id, bytes, page_bytes) = (block.info.id.clone(), block.info.total, block.info.page_size);
        let failed = |source: io::Error| RamTransferError::File { id: id.clone(), source };
        let is_huge = page_bytes != PAGE_SIZE as u64;
        let huge_flags = if is_huge { huge_flags(page_bytes) } else { MemfdFlags::empty() };
        let file = memfd_create("rekindle-ram", MemfdFlags::CLOEXEC | huge_flags).map_err(|e| failed(e.into()))?;
        let file = File::from(file);
        file.set_len(bytes).map_err(failed)?;
        let mut huge = None;
        if is_huge {
            reserve(&file, bytes).map_err(|source| no_huge_pages(&id, &file, bytes, source))?;
            let mapped = file.try_clone().map(|file| MmapRegion::from_file(FileOffset::new(file, 0), bytes as usize));
            huge = Some(mapped.map_err(failed)?.map_err(|e| failed(io::Error::other(e)))?);
        }
        Ok(Self { id, file, bytes, huge })
    }

    /// Returns whether it is an empty file in huge pages.
    pub(crate) fn is_huge(&self) -> bool {
        self.huge.is_some()
    }

    /// Returns a path at which this process can open the file.
    pub(crate) fn path(&self) -> PathBuf {
        path_of(&self.file)
    }

    /// Writes the content of runs of pages, one after the other. Small pages of zeros become holes, which need no memory.
    pub(crate) fn write(&self, runs: &PageRuns, content: &[u8]) -> Result<(), RamTransferError> {
        let written = match &self.huge {
            Some(mapping) => write_mapped(mapping, runs, content),
            None => write(&self.file, runs, content),
        };
        written.map_err(|source| RamTransferError::File { id: self.id.clone(), source })
    }

    /// Writes zeros to runs of pages.
    pub(crate) fn clear(&self, runs: &PageRuns) -> Result<(), RamTransferError> {
        let clear = |run: Range<u64>| match &self.huge {
            Some(mapping) => clear_mapped(mapping, run),
            None => punch_hole(&self.file, run.start, run.end - run.start),
        };
        runs.iter()
            .cloned()
            .try_for_each(clear)
            .map_err(|source| RamTransferError::File { id: self.id.clone(), source })
    }
}

fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Returns the flags of `memfd_create(2)` for huge pages of this size.
fn huge_flags(page_bytes: u64) -> MemfdFlags {
    MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(page_bytes.ilog2() << HUGE_SIZE_SHIFT)
}

/// Explains why no huge pages could be reserved.
fn no_huge_pages(id: &str, file: &File, requested: u64, source: io::Error) -> RamTransferError {
    let id = id.to_owned();
    let pages = fstatfs(file).map_err(io::Error::from).and_then(|stat| HugePages::of(&stat));
    match pages {
        Ok(Some(pages)) if source.kind() == io::ErrorKind::OutOfMemory => {
            let remedy = match pages.left() < requested {
                true => pages.remedy(requested),
                false => "raise the limit of this control group (`hugetlb.*.rsvd.max`)".into(),
            };
            RamTransferError::NoHugePages { id, requested, left: pages.left(), page: pages.page, remedy }
        }
        _ => RamTransferError::File { id, source },
    }
}

/// Writes the content of runs of small pages. Pages of zeros become holes.
fn write(file: &File, runs: &PageRuns, content: &[u8]) -> io::Result<()> {
    let mut pages = content.as_chunks::<PAGE_SIZE>().0;
    for run in runs {
        let (run_pages, later_pages) = pages.split_at(((run.end - run.start) / PAGE_SIZE as u64) as usize);
        pages = later_pages;
        let mut offset = run.start;
        for alike in run_pages.chunk_by(|page, next| (*page == ZERO_PAGE) == (*next == ZERO_PAGE)) {
            let bytes = alike.as_flattened();
            match alike.first() {
                Some(&ZERO_PAGE) => punch_hole(file, offset, bytes.len() as u64)?,
                _ => file.write_all_at(bytes, offset)?,
            }
            offset += bytes.len() as u64;
        }
    }
    Ok(())
}

fn write_mapped(mapping: &MmapRegion, runs: &PageRuns, mut content: &[u8]) -> io::Result<()> {
    for run in runs {
        let (run_content, after) = content.split_at((run.end - run.start) as usize);
        content = after;
        write_at(mapping, run_content, run.start)?;
    }
    Ok(())
}

fn clear_mapped(mapping: &MmapRegion, run: Range<u64>) -> io::Result<()> {
    for start in run.clone().step_by(ZEROS.len()) {
        let length = (run.end - start).min(ZEROS.len() as u64) as usize;
        write_at(mapping, ZEROS.get(..length).unwrap_or_default(), start)?;
    }
    Ok(())
}

fn write_at(mapping: &MmapRegion, bytes: &[u8], offset: u64) -> io::Result<()> {
    mapping.as_volatile_slice().write_slice(bytes, offset as usize).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn block(huge: impl FnOnce(&File) -> Option<MmapRegion>) -> SuppliedBlock {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(&[9; 8 * PAGE_SIZE], 0).unwrap();
        SuppliedBlock { id: "pc.ram".into(), huge: huge(&file), file, bytes: 8 * PAGE }
    }

    fn mapped(file: &File) -> Option<MmapRegion> {
        let file = FileOffset::new(file.try_clone().unwrap(), 0);
        Some(MmapRegion::from_file(file, 8 * PAGE_SIZE).unwrap())
    }

    fn runs(runs: &[Range<u64>]) -> PageRuns {
        let mut all = PageRuns::new();
        runs.iter().for_each(|run| all.push(run.start * PAGE..run.end * PAGE));
        all
    }

    fn first_bytes(block: &SuppliedBlock) -> Vec<u8> {
        let mut found = [0; 8 * PAGE_SIZE];
        block.file.read_exact_at(&mut found, 0).unwrap();
        assert!(found.chunks(PAGE_SIZE).all(|page| page.iter().all(|byte| *byte == page[0])));
        found.iter().step_by(PAGE_SIZE).copied().collect()
    }

    #[test]
    fn pages_are_written_at_their_offsets_and_cleared() {
        let content: Vec<u8> = [1, 0, 0, 2].iter().flat_map(|byte| [*byte; PAGE_SIZE]).collect();
        for block in [block(|_| None), block(mapped)] {
            block.write(&runs(&[1..4, 6..7]), &content).unwrap();
            assert_eq!(first_bytes(&block), [9, 1, 0, 0, 9, 9, 2, 9]);
            block.clear(&runs(&[0..1, 6..8])).unwrap();
            assert_eq!(first_bytes(&block), [0, 1, 0, 0, 9, 9, 0, 0]);
        }
    }

    #[test]
    fn small_pages_of_zeros_need_no_memory() {
        let block = block(|_| None);
        block.write(&runs(std::slice::from_ref(&(2..4))), &[0; 2 * PAGE_SIZE]).unwrap();
        assert_eq!(block.file.metadata().unwrap().blocks() * 512, 6 * PAGE);
    }
}
