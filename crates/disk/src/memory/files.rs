//! The files of a guest's memory, without a mapping: unmapped memory is released faster.

use super::{FileId, Memory, PAGE};
use rekindle_kernel::file::punch_hole;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use vm_memory::FileOffset;

/// A part of a guest's memory that is contiguous in a file.
#[derive(Debug)]
pub(super) struct FilePart {
    /// Addresses in the guest.
    pub addresses: Range<u64>,
    pub file: FileOffset,
}

/// The files of a guest's memory.
#[derive(Debug)]
pub struct MemoryFiles {
    parts: Vec<FilePart>,
}

impl MemoryFiles {
    pub(super) fn new(parts: Vec<FilePart>) -> Self {
        Self { parts }
    }

    /// Returns the ranges of the guest's addresses.
    pub fn address_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.parts.iter().map(|part| part.addresses.clone())
    }

    /// Returns the number of frames that the host has allocated.
    #[must_use]
    pub fn allocated_frames(&self) -> usize {
        let sizes = FileSizes::of(self.parts.iter().map(|part| part.file.file()));
        sizes.allocated.div_ceil(PAGE) as usize
    }

    /// Returns the file that has all of these addresses, and the offset of the first one.
    fn find(&self, address: u64, bytes: u64) -> Option<(&File, u64)> {
        let end = address.checked_add(bytes)?;
        let part = self.parts.iter().find(|part| part.addresses.start <= address && end <= part.addresses.end)?;
        Some((part.file.file(), part.file.start() + (address - part.addresses.start)))
    }

    /// Copies bytes from the memory. Returns `None` if they are outside of it.
    #[must_use]
    pub fn read(&self, address: u64, target: &mut [u8]) -> Option<()> {
        let (file, offset) = self.find(address, target.len() as u64)?;
        file.read_exact_at(target, offset).ok()
    }

    /// Releases a part to the host.
    pub fn release(&self, address: u64, bytes: u64) -> io::Result<()> {
        self.find(address, bytes).map_or(Ok(()), |(file, offset)| punch_hole(file, offset, bytes))
    }

    /// Returns whether `memory` uses one of these files.
    #[must_use]
    pub fn are_used_by(&self, memory: &Memory) -> bool {
        let own: BTreeSet<FileId> = self.parts.iter().filter_map(|part| FileId::of(part.file.file())).collect();
        memory.file_mappings().iter().any(|mapping| own.contains(&mapping.file))
    }
}

/// The total size of some files in bytes.
#[derive(Debug, Default)]
pub(super) struct FileSizes {
    pub length: u64,
    pub allocated: u64,
}

impl FileSizes {
    /// Returns the size of these files together. Each file counts once.
    pub fn of<'a>(files: impl Iterator<Item = &'a File>) -> Self {
        let metadata_by_file: BTreeMap<(u64, u64), _> = files
            .filter_map(|file| file.metadata().ok())
            .map(|metadata| ((metadata.dev(), metadata.ino()), metadata))
            .collect();
        let mut sizes = Self::default();
        for metadata in metadata_by_file.values() {
            sizes.length += metadata.len();
            sizes.allocated += metadata.blocks() * 512;
        }
        sizes
    }
}
