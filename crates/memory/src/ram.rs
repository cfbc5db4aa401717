//! The RAM blocks of a running QEMU: finding their addresses, and reading them.
//!
//! Shared memory is read from its file (`pread`), private memory from the process (`process_vm_readv`, a thousand
//! pieces per call). Neither call allocates a missing page, as a read through a mapping would.

use rekindle_kernel::maps::{self, Mapping};
use rekindle_kernel::memory;
use rekindle_kernel::pagemap::{Categories, Query, ScanError, Scanner};
use rekindle_kernel::process::Process;
use rekindle_pages::{BlockId, PAGE_SIZE, PageRuns};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::ramblock::{self, LocateError, RamBlock};
use rustix::fs::{SeekFrom, fstatfs, seek};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};

/// Type of the file system `hugetlbfs` (`linux/magic.h`).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The reason why guest RAM cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum GuestRamError {
    /// The blocks were not found.
    #[error(transparent)]
    Locate(#[from] LocateError),
    /// The memory map of the process cannot be read.
    #[error("cannot read the memory map of QEMU (process {pid}): run as root")]
    Maps {
        pid: u32,
        #[source]
        source: io::Error,
    },
    /// A block's file cannot be opened.
    #[error("cannot open the file of RAM block {id} ({name}): run as root, or as QEMU's user")]
    File {
        id: String,
        /// The file's name as the kernel reports it.
        name: String,
        #[source]
        source: io::Error,
    },
    /// A block cannot be read.
    #[error("cannot read RAM block {id} at {:#x}..{:#x}", range.start, range.end)]
    Read {
        id: String,
        /// Offsets in the block.
        range: Range<u64>,
        #[source]
        source: io::Error,
    },
    /// The populated pages cannot be determined.
    #[error("cannot determine which pages of RAM block {id} are populated")]
    Scan {
        id: String,
        #[source]
        source: ScanError,
    },
}

/// Where a block is read from.
#[derive(Debug)]
enum ReadFrom {
    File {
        file: File,
        /// Offset of the block in the file.
        offset: u64,
    },
    /// The memory of the process.
    Process,
}

/// One RAM block of a running QEMU.
#[derive(Debug)]
pub struct Block {
    /// The entry in QEMU's block table.
    pub info: RamBlock,
    /// Address in QEMU.
    pub address: u64,
    /// Whether QEMU has the block mapped writable. If not, the guest cannot write it either.
    pub writable: bool,
    /// Whether writes are visible to other processes that map the same file.
    pub shared: bool,
    read_from: ReadFrom,
}

impl Block {
    /// Returns the addresses of the used part in QEMU.
    #[must_use]
    pub fn used(&self) -> Range<u64> {
        let page = self.info.page_size.max(1);
        self.address..self.address + self.info.used.next_multiple_of(page).min(self.info.total)
    }

    /// Returns the block's addresses in QEMU, including the part into which it may grow.
    #[must_use]
    pub fn total(&self) -> Range<u64> {
        self.address..self.address + self.info.total
    }

    /// Returns the file of shared memory, and the block's offset in it.
    #[must_use]
    pub fn file(&self) -> Option<(&File, u64)> {
        match &self.read_from {
            ReadFrom::File { file, offset } => Some((file, *offset)),
            ReadFrom::Process => None,
        }
    }
}

/// A change of QEMU's block table. The string is the name of the block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockChange {
    /// Memory or a device was plugged in.
    Added(String),
    Removed(String),
    /// The block grew, shrank or was moved.
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
    /// Finds all RAM blocks of the QEMU `process` with QMP connection `qmp`.
    ///
    /// # Errors
    /// [`GuestRamError`] if any block cannot be found or opened; no block is left out.
    pub fn of(qmp: &mut Qmp, process: Process) -> Result<Self, GuestRamError> {
        Self::from_blocks(process, ramblock::locate(qmp, process)?)
    }

    /// Uses a known block table, in which all blocks must have an address.
    ///
    /// # Errors
    /// [`GuestRamError`].
    pub fn from_blocks(process: Process, blocks: Vec<RamBlock>) -> Result<Self, GuestRamError> {
        let pid = process.pid;
        let maps = maps::of(process).map_err(|source| GuestRamError::Maps { pid, source })?;
        let blocks = blocks.into_iter().map(|info| locate_block(process, &maps, info)).collect::<Result<_, _>>()?;
        Ok(Self { process, blocks, may_shrink: true })
    }

    /// Finds blocks by their lengths alone, in a QEMU whose monitor another program uses: `(id, bytes)` of each. Returns
    /// `None` unless exactly one mapping has the length of each block, or if a block has huge pages.
    ///
    /// # Errors
    /// [`GuestRamError`].
    pub fn by_length(process: Process, lengths: &[(String, u64)]) -> Result<Option<Self>, GuestRamError> {
        let pid = process.pid;
        let maps = maps::of(process).map_err(|source| GuestRamError::Maps { pid, source })?;
        let mut blocks = Vec::new();
        for (id, bytes) in lengths {
            let has_length = |map: &&Mapping| map.range.end - map.range.start == *bytes && map.readable && map.writable;
            let mut candidates = maps.iter().filter(has_length);
            let (Some(map), None) = (candidates.next(), candidates.next()) else { return Ok(None) };
            let (address, page_size) = (Some(map.range.start), PAGE_SIZE as u64);
            let info = RamBlock { id: id.clone(), used: *bytes, total: *bytes, page_size, offset: 0, address };
            let unreadable = |source| GuestRamError::File { id: id.clone(), name: map.name.clone(), source };
            let file = map.open(process).map_err(unreadable)?;
            if file.is_some_and(|file| fstatfs(file).map_or(true, |of| of.f_type as u64 == HUGETLBFS_MAGIC)) {
                return Ok(None);
            }
            blocks.push(locate_block(process, &maps, info)?);
        }
        Ok(Some(Self { process, blocks, may_shrink: true }))
    }

    /// Declares that the guest gives no memory back, because it has neither a balloon nor virtio-mem. Trackers then do
    /// not search for pages that were punched out of shared memory, which takes 2 to 3 ms per GiB at each stop.
    #[must_use]
    pub fn never_shrinking(self) -> Self {
        Self { may_shrink: false, ..self }
    }

    #[must_use]
    pub fn may_shrink(&self) -> bool {
        self.may_shrink
    }

    #[must_use]
    pub fn process(&self) -> Process {
        self.process
    }

    /// Returns the blocks in QEMU's order.
    #[must_use]
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    #[must_use]
    pub fn block(&self, id: BlockId) -> Option<&Block> {
        self.blocks.get(id.0)
    }

    /// Finds a block by its name in QEMU.
    #[must_use]
    pub fn block_id(&self, name: &str) -> Option<BlockId> {
        self.blocks.iter().position(|block| block.info.id == name).map(BlockId)
    }

    /// Compares QEMU's current block table with the table of this value. Call it at each stop of the guest, before
    /// dirty pages are used.
    ///
    /// # Errors
    /// As for [`GuestRam::of`].
    pub fn changes(&self, qmp: &mut Qmp) -> Result<Vec<BlockChange>, GuestRamError> {
        Ok(self.compare(&ramblock::list(qmp).map_err(LocateError::Qmp)?))
    }

    /// Compares another block table with the table of this value.
    fn compare(&self, table: &[RamBlock]) -> Vec<BlockChange> {
        let mut changes = Vec::new();
        for Block { info: old, address, .. } in &self.blocks {
            match table.iter().find(|new| new.id == old.id) {
                None => changes.push(BlockChange::Removed(old.id.clone())),
                Some(new) => {
                    let is_moved = new.address.is_some_and(|new_address| new_address != *address);
                    if is_moved || (new.used, new.total, new.offset) != (old.used, old.total, old.offset) {
                        changes.push(BlockChange::Resized(old.id.clone()));
                    }
                }
            }
        }
        let is_known = |id: &str| self.blocks.iter().any(|block| block.info.id == id);
        changes.extend(table.iter().filter(|new| !is_known(&new.id)).map(|new| BlockChange::Added(new.id.clone())));
        changes
    }

    /// Reads runs (offsets) of a block consecutively into `buffer`, whose length must be the sum of theirs.
    ///
    /// # Errors
    /// [`GuestRamError::Read`].
    pub fn read(&self, block: &Block, runs: &[Range<u64>], buffer: &mut [u8]) -> Result<(), GuestRamError> {
        let failed = |range: Range<u64>| move |source| GuestRamError::Read { id: block.info.id.clone(), range, source };
        match &block.read_from {
            ReadFrom::Process => {
                let whole = runs.first().map_or(0, |run| run.start)..runs.last().map_or(0, |run| run.end);
                let piece = |run: &Range<u64>| (block.address + run.start, (run.end - run.start) as usize);
                let pieces: Vec<_> = runs.iter().map(piece).collect();
                memory::read_pieces(self.process, &pieces, buffer).map_err(failed(whole))
            }
            ReadFrom::File { file, offset } => {
                let mut unfilled = buffer;
                for run in runs {
                    let length = (run.end - run.start) as usize;
                    let Some((run_buffer, after)) = std::mem::take(&mut unfilled).split_at_mut_checked(length) else {
                        return Err(failed(run.clone())(io::ErrorKind::InvalidInput.into()));
                    };
                    file.read_exact_at(run_buffer, offset + run.start).map_err(failed(run.clone()))?;
                    unfilled = after;
                }
                Ok(())
            }
        }
    }

    /// Finds the runs (offsets) of a block that have pages. All other runs are zero and need not be read.
    ///
    /// # Errors
    /// [`GuestRamError::Read`], [`GuestRamError::Scan`].
    pub fn populated(&self, block: &Block) -> Result<PageRuns, GuestRamError> {
        let length = block.used().end - block.address;
        match &block.read_from {
            ReadFrom::File { file, offset } => data_runs(file, *offset..*offset + length)
                .map_err(|source| GuestRamError::Read { id: block.info.id.clone(), range: 0..length, source }),
            ReadFrom::Process => {
                let failed = |source| GuestRamError::Scan { id: block.info.id.clone(), source };
                let query = Query { any: Categories::PRESENT | Categories::SWAPPED, ..Query::all(Categories::empty()) };
                let mut scanner = Scanner::open(self.process).map_err(failed)?;
                Ok(scanner.matching(block.used(), query).map_err(failed)?.relative_to(block.address))
            }
        }
    }

    /// Finds the runs (offsets) of a block that have no pages and therefore are zero: the complement of
    /// [`GuestRam::populated`].
    ///
    /// # Errors
    /// As for [`GuestRam::populated`].
    pub fn holes(&self, block: &Block) -> Result<PageRuns, GuestRamError> {
        Ok(self.populated(block)?.complement(block.used().end - block.address))
    }
}

/// Finds the runs of a file that hold data within `range`, in whole pages, relative to the start of `range`.
pub(crate) fn data_runs(file: &File, range: Range<u64>) -> io::Result<PageRuns> {
    const PAGE: u64 = PAGE_SIZE as u64;
    let mut runs = PageRuns::new();
    let mut search_from = range.start;
    while search_from < range.end {
        let start = match seek(file, SeekFrom::Data(search_from)) {
            Ok(start) => start.max(search_from),
            Err(rustix::io::Errno::NXIO) => break,
            // This file system does not report holes (e.g. hugetlbfs): all of the file counts as data.
            Err(rustix::io::Errno::INVAL) => search_from,
            Err(e) => return Err(e.into()),
        };
        if start >= range.end {
            break;
        }
        let end = match seek(file, SeekFrom::Hole(start)) {
            Ok(end) if end > start => end.min(range.end),
            _ => range.end,
        };
        runs.push((start - range.start) / PAGE * PAGE..(end - range.start).next_multiple_of(PAGE));
        search_from = end;
    }
    Ok(runs)
}

/// Finds the mappings of a RAM block, and opens its file if it has one.
fn locate_block(process: Process, maps: &[Mapping], info: RamBlock) -> Result<Block, GuestRamError> {
    let unmapped = |info: &RamBlock| LocateError::Unmapped {
        id: info.id.clone(),
        bytes: info.total,
        address: info.address.unwrap_or(0),
        pid: process.pid,
    };
    let address = info.address.ok_or_else(|| unmapped(&info))?;
    let parts = maps::covering(maps, &(address..address + info.total)).ok_or_else(|| unmapped(&info))?;
    let Some(first) = parts.first() else { return Err(unmapped(&info).into()) };
    // One contiguous piece of one file. It may consist of several mappings, because QEMU may change the flags of a
    // part.
    let base = |map: &Mapping| map.offset.wrapping_sub(map.range.start);
    let is_in_one_file = parts.iter().all(|map| map.shared && map.inode == first.inode && base(map) == base(first));
    let shared = parts.iter().any(|map| map.shared);
    let writable = parts.iter().all(|map| map.writable);
    let mut read_from = ReadFrom::Process;
    if is_in_one_file && first.inode != 0 {
        let failed = |source| GuestRamError::File { id: info.id.clone(), name: first.name.clone(), source };
        let file = open_mapped_file(process, first).map_err(failed)?;
        // The file of a device (devdax) cannot be read, but the process's memory can.
        if !file.metadata().map_err(failed)?.file_type().is_char_device() {
            read_from = ReadFrom::File { file, offset: first.offset + (address - first.range.start) };
        }
    }
    Ok(Block { address, writable, shared, read_from, info })
}

/// Opens the file of a mapping through `/proc/PID/map_files`, or else through QEMU's descriptor, which needs fewer
/// rights.
fn open_mapped_file(process: Process, map: &Mapping) -> io::Result<File> {
    let error = match map.open(process) {
        Ok(Some(file)) => return Ok(file),
        Ok(None) => io::ErrorKind::NotFound.into(),
        Err(e) => e,
    };
    let descriptors = fs::read_dir(format!("/proc/{}/fd", process.pid))?;
    for entry in descriptors.flatten() {
        let is_mapped_file = |file: &fs::Metadata| file.ino() == map.inode && file.is_file();
        let link = fs::read_link(entry.path()).unwrap_or_default();
        if link.to_string_lossy() == map.name && fs::metadata(entry.path()).is_ok_and(|file| is_mapped_file(&file)) {
            return File::open(entry.path());
        }
    }
    Err(error)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "the vector has one run")]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn ram_block(id: &str, address: Option<u64>, pages: u64) -> RamBlock {
        RamBlock { id: id.into(), used: pages * PAGE, total: pages * PAGE, page_size: PAGE, offset: 0, address }
    }

    fn ram(area: &[u8], pages: u64) -> GuestRam {
        let address = (area.as_ptr() as u64).next_multiple_of(PAGE);
        GuestRam::from_blocks(Process::current().unwrap(), vec![ram_block("ram", Some(address), pages)]).unwrap()
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
        assert_eq!(*ram.populated(block).unwrap(), [0..8 * PAGE]);
    }

    #[test]
    fn only_pages_with_data_are_found_in_a_sparse_file() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("ram");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_len(100 * PAGE).unwrap();
        file.write_all_at(&[1], 10 * PAGE).unwrap();
        file.write_all_at(&[1; 2], 21 * PAGE - 1).unwrap();
        assert_eq!(*data_runs(&file, 0..100 * PAGE).unwrap(), [10 * PAGE..11 * PAGE, 20 * PAGE..22 * PAGE]);
        assert_eq!(*data_runs(&file, 10 * PAGE..21 * PAGE).unwrap(), [0..PAGE, 10 * PAGE..11 * PAGE]);
        assert_eq!(*data_runs(&file, 50 * PAGE..60 * PAGE).unwrap(), []);
    }

    #[test]
    fn added_removed_and_resized_blocks_are_reported() {
        let area = vec![0u8; 9 * PAGE_SIZE];
        let ram = ram(&area, 8);
        let same = ram.blocks()[0].info.clone();
        assert_eq!(ram.compare(std::slice::from_ref(&same)), []);
        let without_address = RamBlock { address: None, ..same.clone() };
        assert_eq!(ram.compare(&[without_address]), [], "a QEMU that does not report addresses");
        let grown = RamBlock { used: 4 * PAGE, ..same.clone() };
        assert_eq!(ram.compare(&[grown]), [BlockChange::Resized("ram".into())]);
        assert_eq!(ram.compare(&[same, ram_block("dimm", None, 1)]), [BlockChange::Added("dimm".into())]);
        assert_eq!(ram.compare(&[]), [BlockChange::Removed("ram".into())]);
    }

    #[test]
    fn the_error_for_an_unmapped_block_names_it() {
        let me = Process::current().unwrap();
        let e = GuestRam::from_blocks(me, vec![ram_block("dimm", Some(PAGE), 2)]).unwrap_err();
        assert!(e.to_string().contains("dimm"), "{e}");
        assert!(GuestRam::from_blocks(me, vec![ram_block("dimm", None, 2)]).is_err());
    }
}
