//! The RAM blocks of a running QEMU as data: where each is, and how it is read.
//!
//! Shared memory is read from its file (`pread`), private memory out of the process (`process_vm_readv`, a thousand pieces
//! a call). Neither changes anything: a page that is not there is not read through a mapping, which would make it be there.

use crate::pages;
use rekindle_kernel::maps::{self, Mapping};
use rekindle_kernel::memory;
use rekindle_kernel::pagemap::{Categories, Query, ScanError, Scanner};
use rekindle_kernel::process::Process;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::{self, LocateError, RamBlock};
use rustix::fs::{SeekFrom, seek};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};

/// Why guest RAM cannot be had as data.
#[derive(Debug, thiserror::Error)]
pub enum GuestRamError {
    /// The blocks were not found.
    #[error(transparent)]
    Locate(#[from] LocateError),
    /// The process cannot be looked at.
    #[error("cannot look at the memory map of QEMU (process {pid}): run as root")]
    Maps {
        /// QEMU.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A block's file cannot be opened.
    #[error("cannot open the file of RAM block {id} ({name}): run as root, or as QEMU's user")]
    File {
        /// The block.
        id: String,
        /// The file's name as the kernel tells it.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A block cannot be read.
    #[error("cannot read RAM block {id} at {:#x}..{:#x}", range.start, range.end)]
    Read {
        /// The block.
        id: String,
        /// Where in the block.
        range: Range<u64>,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// What is populated cannot be told.
    #[error("cannot tell which pages of RAM block {id} are there")]
    Scan {
        /// The block.
        id: String,
        /// Why.
        #[source]
        source: ScanError,
    },
}

/// How a block is read.
#[derive(Debug)]
enum Access {
    /// From this file, in which it begins at that offset.
    File(File, u64),
    /// Out of the process.
    Process,
}

/// One RAM block of a running QEMU.
#[derive(Debug)]
pub struct Block {
    /// What QEMU says of it.
    pub told: RamBlock,
    /// Its address in QEMU.
    pub address: u64,
    /// QEMU itself may write it. A guest's writes to memory that is not writable never come through.
    pub writable: bool,
    /// Others who map the same file see what is written.
    pub shared: bool,
    access: Access,
}

impl Block {
    /// Its addresses in QEMU, as far as it is used.
    #[must_use]
    pub fn used(&self) -> Range<u64> {
        let page = self.told.page_size.max(1);
        self.address..self.address + self.told.used.next_multiple_of(page).min(self.told.total)
    }

    /// Its addresses in QEMU, with what it may grow to.
    #[must_use]
    pub fn total(&self) -> Range<u64> {
        self.address..self.address + self.told.total
    }

    /// Its file, if it is shared memory, and the offset in it.
    #[must_use]
    pub fn file(&self) -> Option<(&File, u64)> {
        match &self.access {
            Access::File(file, offset) => Some((file, *offset)),
            Access::Process => None,
        }
    }

    /// Runs of addresses as runs of offsets in the block.
    pub(crate) fn offsets(&self, runs: Vec<Range<u64>>) -> Vec<Range<u64>> {
        runs.into_iter().map(|run| run.start - self.address..run.end - self.address).collect()
    }
}

/// A difference between what was and what is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A block came: memory or a device was plugged in.
    Added(String),
    /// A block went.
    Removed(String),
    /// A block is used further, or less far, than before, or was moved.
    Resized(String),
}

/// The RAM blocks of a running QEMU.
#[derive(Debug)]
pub struct GuestRam {
    process: Process,
    blocks: Vec<Block>,
    may_shrink: bool,
}

impl GuestRam {
    /// All RAM blocks of the QEMU `process`, which answers at `qmp`.
    ///
    /// # Errors
    /// [`GuestRamError`]; a block that cannot be found or read is never left out.
    pub fn of(qmp: &mut Qmp, process: Process) -> Result<Self, GuestRamError> {
        Self::from_blocks(process, ramblock::locate(qmp, process)?)
    }

    /// The same for blocks that are known, all of them with an address.
    ///
    /// # Errors
    /// [`GuestRamError`].
    pub fn from_blocks(process: Process, told: Vec<RamBlock>) -> Result<Self, GuestRamError> {
        let pid = process.pid;
        let maps = maps::of(process).map_err(|source| GuestRamError::Maps { pid, source })?;
        let blocks = told.into_iter().map(|told| block(process, &maps, told)).collect::<Result<_, _>>()?;
        Ok(Self { process, blocks, may_shrink: true })
    }

    /// Take it that the guest gives no memory back: it has neither a balloon nor virtio-mem. Then pages that were punched
    /// out of shared memory are not looked for, which takes 2 to 3 ms per GiB of each stop.
    #[must_use]
    pub fn never_shrinking(self) -> Self {
        Self { may_shrink: false, ..self }
    }

    /// Whether pages may be given back.
    #[must_use]
    pub fn may_shrink(&self) -> bool {
        self.may_shrink
    }

    /// QEMU.
    #[must_use]
    pub fn process(&self) -> Process {
        self.process
    }

    /// The blocks, in QEMU's order.
    #[must_use]
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// What has changed since: ask at each stop of the guest, before dirty pages are relied on.
    ///
    /// # Errors
    /// As for [`GuestRam::of`].
    pub fn changes(&self, qmp: &mut Qmp) -> Result<Vec<Change>, GuestRamError> {
        Ok(self.compare(&ramblock::list(qmp).map_err(LocateError::Qmp)?))
    }

    fn compare(&self, now: &[RamBlock]) -> Vec<Change> {
        let mut changes = Vec::new();
        for block in &self.blocks {
            let id = &block.told.id;
            match now.iter().find(|now| now.id == *id) {
                None => changes.push(Change::Removed(id.clone())),
                Some(now) => {
                    let moved = now.address.is_some_and(|address| address != block.address);
                    let told = &block.told;
                    if moved || (now.used, now.total, now.offset) != (told.used, told.total, told.offset) {
                        changes.push(Change::Resized(id.clone()));
                    }
                }
            }
        }
        let known = |id: &str| self.blocks.iter().any(|block| block.told.id == id);
        changes.extend(now.iter().filter(|now| !known(&now.id)).map(|now| Change::Added(now.id.clone())));
        changes
    }

    /// Read runs of a block, by offsets, one after the other into `buffer`, which holds exactly them.
    ///
    /// # Errors
    /// [`GuestRamError::Read`].
    pub fn read(&self, block: &Block, runs: &[Range<u64>], buffer: &mut [u8]) -> Result<(), GuestRamError> {
        let failed = |range: Range<u64>| move |source| GuestRamError::Read { id: block.told.id.clone(), range, source };
        match &block.access {
            Access::Process => {
                let whole = runs.first().map_or(0, |run| run.start)..runs.last().map_or(0, |run| run.end);
                let piece = |run: &Range<u64>| (block.address + run.start, (run.end - run.start) as usize);
                let pieces: Vec<_> = runs.iter().map(piece).collect();
                memory::read_pieces(self.process, &pieces, buffer).map_err(failed(whole))
            }
            Access::File(file, offset) => {
                let mut rest = buffer;
                for run in runs {
                    let length = (run.end - run.start) as usize;
                    let Some((one, others)) = std::mem::take(&mut rest).split_at_mut_checked(length) else {
                        return Err(failed(run.clone())(io::ErrorKind::InvalidInput.into()));
                    };
                    file.read_exact_at(one, offset + run.start).map_err(failed(run.clone()))?;
                    rest = others;
                }
                Ok(())
            }
        }
    }

    /// The runs of a block that hold something, by offsets: the rest reads as zero, without being read.
    ///
    /// # Errors
    /// [`GuestRamError::Read`], [`GuestRamError::Scan`].
    pub fn populated(&self, block: &Block) -> Result<Vec<Range<u64>>, GuestRamError> {
        let length = block.used().end - block.address;
        match &block.access {
            Access::File(file, offset) => data(file, *offset..*offset + length).map_err(|source| GuestRamError::Read {
                id: block.told.id.clone(),
                range: 0..length,
                source,
            }),
            Access::Process => {
                let failed = |source| GuestRamError::Scan { id: block.told.id.clone(), source };
                let query = Query { any: Categories::PRESENT | Categories::SWAPPED, ..Query::all(Categories::empty()) };
                let mut scanner = Scanner::open(self.process).map_err(failed)?;
                Ok(block.offsets(scanner.matching(block.used(), query).map_err(failed)?))
            }
        }
    }

    /// The runs of a block that are certainly zero: what [`GuestRam::populated`] leaves.
    ///
    /// # Errors
    /// As for [`GuestRam::populated`].
    pub fn holes(&self, block: &Block) -> Result<Vec<Range<u64>>, GuestRamError> {
        Ok(pages::complement(&self.populated(block)?, block.used().end - block.address))
    }
}

/// The runs of a file that hold data, in a range of it and relative to its beginning, in whole pages.
pub(crate) fn data(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    const PAGE: u64 = memory::PAGE_SIZE as u64;
    let mut runs = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start.max(at),
            Err(rustix::io::Errno::NXIO) => break,
            // Not a file with holes, as hugetlbfs: all of it counts.
            Err(rustix::io::Errno::INVAL) => at,
            Err(e) => return Err(e.into()),
        };
        if start >= range.end {
            break;
        }
        let end = match seek(file, SeekFrom::Hole(start)) {
            Ok(end) if end > start => end.min(range.end),
            _ => range.end,
        };
        let run = (start - range.start) / PAGE * PAGE..(end - range.start).next_multiple_of(PAGE);
        pages::push(&mut runs, run);
        at = end;
    }
    Ok(runs)
}

fn block(process: Process, maps: &[Mapping], told: RamBlock) -> Result<Block, GuestRamError> {
    let unmapped = |told: &RamBlock| LocateError::Unmapped {
        id: told.id.clone(),
        bytes: told.total,
        address: told.address.unwrap_or(0),
        pid: process.pid,
    };
    let address = told.address.ok_or_else(|| unmapped(&told))?;
    let parts = maps::covering(maps, &(address..address + told.total)).ok_or_else(|| unmapped(&told))?;
    let Some(first) = parts.first() else { return Err(unmapped(&told).into()) };
    // One file, in one piece: QEMU may have given parts of the mapping other properties.
    let place = |map: &Mapping| map.offset.wrapping_sub(map.range.start);
    let one_file = parts.iter().all(|map| map.shared && map.inode == first.inode && place(map) == place(first));
    let shared = parts.iter().any(|map| map.shared);
    let writable = parts.iter().all(|map| map.writable);
    let mut access = Access::Process;
    if one_file && first.inode != 0 {
        let failed = |source| GuestRamError::File { id: told.id.clone(), name: first.name.clone(), source };
        let file = open(process, first).map_err(failed)?;
        // A device (devdax) cannot be read, but its memory can.
        if !file.metadata().map_err(failed)?.file_type().is_char_device() {
            access = Access::File(file, first.offset + (address - first.range.start));
        }
    }
    Ok(Block { address, writable, shared, access, told })
}

/// The file of a mapping: as the kernel has it mapped, or else as QEMU has it open, which needs fewer rights.
fn open(process: Process, map: &Mapping) -> io::Result<File> {
    let refused = match map.open(process) {
        Ok(Some(file)) => return Ok(file),
        Ok(None) => io::ErrorKind::NotFound.into(),
        Err(e) => e,
    };
    let descriptors = fs::read_dir(format!("/proc/{}/fd", process.pid))?;
    for entry in descriptors.flatten() {
        let same = |file: &fs::Metadata| file.ino() == map.inode && file.is_file();
        let link = fs::read_link(entry.path()).unwrap_or_default();
        if link.to_string_lossy() == map.name && fs::metadata(entry.path()).is_ok_and(|file| same(&file)) {
            return File::open(entry.path());
        }
    }
    Err(refused)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "one run is meant")]
mod tests {
    use super::*;
    use rekindle_kernel::memory::PAGE_SIZE;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn told(id: &str, address: Option<u64>, pages: u64) -> RamBlock {
        RamBlock { id: id.into(), used: pages * PAGE, total: pages * PAGE, page_size: PAGE, offset: 0, address }
    }

    fn ram(area: &[u8], pages: u64) -> GuestRam {
        let address = (area.as_ptr() as u64).next_multiple_of(PAGE);
        GuestRam::from_blocks(Process::current().unwrap(), vec![told("ram", Some(address), pages)]).unwrap()
    }

    #[test]
    fn private_memory_is_read_in_runs() {
        let mut area = vec![0u8; 9 * PAGE_SIZE];
        let skip = (area.as_ptr() as usize).next_multiple_of(PAGE_SIZE) - area.as_ptr() as usize;
        for page in 0..8 {
            area[skip + page * PAGE_SIZE] = page as u8 + 1;
        }
        let ram = ram(&area, 8);
        let block = &ram.blocks()[0];
        assert!(!block.shared && block.writable && block.file().is_none());
        let mut buffer = vec![0; 3 * PAGE_SIZE];
        ram.read(block, &[7 * PAGE..8 * PAGE, 2 * PAGE..4 * PAGE], &mut buffer).unwrap();
        assert_eq!([buffer[0], buffer[PAGE_SIZE], buffer[2 * PAGE_SIZE]], [8, 3, 4]);
        assert!(ram.read(block, &[0..PAGE], &mut buffer).is_err(), "the buffer does not fit");
        assert_eq!(ram.populated(block).unwrap(), [0..8 * PAGE]);
    }

    #[test]
    fn holes_of_a_file_are_zero_without_being_read() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("ram");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_len(100 * PAGE).unwrap();
        file.write_all_at(&[1], 10 * PAGE).unwrap();
        file.write_all_at(&[1; 2], 21 * PAGE - 1).unwrap();
        assert_eq!(data(&file, 0..100 * PAGE).unwrap(), [10 * PAGE..11 * PAGE, 20 * PAGE..22 * PAGE]);
        assert_eq!(data(&file, 10 * PAGE..21 * PAGE).unwrap(), [0..PAGE, 10 * PAGE..11 * PAGE]);
        assert_eq!(data(&file, 50 * PAGE..60 * PAGE).unwrap(), []);
    }

    #[test]
    fn blocks_that_come_go_and_grow_are_noticed() {
        let area = vec![0u8; 9 * PAGE_SIZE];
        let ram = ram(&area, 8);
        let same = ram.blocks()[0].told.clone();
        assert_eq!(ram.compare(std::slice::from_ref(&same)), []);
        let silent = RamBlock { address: None, ..same.clone() };
        assert_eq!(ram.compare(&[silent]), [], "a QEMU that does not tell addresses");
        let grown = RamBlock { used: 4 * PAGE, ..same.clone() };
        assert_eq!(ram.compare(&[grown]), [Change::Resized("ram".into())]);
        assert_eq!(ram.compare(&[same, told("dimm", None, 1)]), [Change::Added("dimm".into())]);
        assert_eq!(ram.compare(&[]), [Change::Removed("ram".into())]);
    }

    #[test]
    fn a_block_that_is_not_mapped_is_refused_by_name() {
        let me = Process::current().unwrap();
        let e = GuestRam::from_blocks(me, vec![told("dimm", Some(PAGE), 2)]).unwrap_err();
        assert!(e.to_string().contains("dimm"), "{e}");
        assert!(GuestRam::from_blocks(me, vec![told("dimm", None, 2)]).is_err());
    }
}
