//! The RAM blocks of a source that Rekindle did not start, and the files of which a destination maps them.

use crate::ram_transfer::RamTransfer;
use crate::ram_transfer_error::RamTransferError;
use rekindle_kernel::maps;
use rekindle_kernel::process::Process;
use rekindle_memory::moving::MAX_UNDROPPED_BYTES;
use rekindle_memory::ram::{Block, GuestRam, GuestRamError};
use rekindle_memory::room::available_to;
use rekindle_pages::PAGE_SIZE;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Memory that a replacement leaves to the host, in bytes.
const RESERVE_BYTES: u64 = 64 << 20;

/// A RAM block as a file that a destination maps from its first byte on.
#[derive(Debug)]
pub struct SuppliedBlock {
    /// QEMU's name of the block.
    pub id: String,
    /// Open for reading and writing.
    pub file: File,
    pub bytes: u64,
}

/// RAM blocks of a source, with their files.
#[derive(Debug)]
pub struct SourceRam {
    /// The source's private blocks.
    pub(crate) private: Arc<GuestRam>,
    /// Empty files for the private blocks, in the order of `private`.
    pub(crate) files: Vec<SuppliedBlock>,
    /// Blocks of shared memory: the source's own files.
    pub(crate) shared: Vec<SuppliedBlock>,
    /// Bytes of the private blocks that need memory.
    populated_bytes: u64,
}

impl SourceRam {
    /// Makes the files for the blocks of `source` with the names `ids`. The files of private blocks are empty.
    ///
    /// # Errors
    /// [`RamTransferError`]: a block cannot be supplied. The source is unchanged.
    pub fn of(source: &GuestRam, ids: &[String]) -> Result<Self, RamTransferError> {
        let (mut files, mut shared, mut private_blocks) = (Vec::new(), Vec::new(), Vec::new());
        let mut populated_bytes = 0;
        for id in ids {
            let no_block = || RamTransferError::NoBlock { id: id.clone() };
            let block = source.block_id(id).and_then(|id| source.block(id)).ok_or_else(no_block)?;
            if block.shared {
                shared.push(shared_file(block)?);
            } else {
                check_no_content(source.process(), block)?;
                populated_bytes += source.populated(block)?.bytes();
                files.push(empty_file(block)?);
                private_blocks.push(block.info.clone());
            }
        }
        let private = Arc::new(GuestRam::from_blocks(source.process(), private_blocks)?);
        Ok(Self { private, files, shared, populated_bytes })
    }

    /// Returns the blocks with their files, which the destination maps.
    pub fn blocks(&self) -> impl Iterator<Item = &SuppliedBlock> {
        self.files.iter().chain(&self.shared)
    }

    /// Returns whether there is private memory.
    #[must_use]
    pub fn has_private(&self) -> bool {
        !self.files.is_empty()
    }

    /// Returns how much memory the transfer needs besides the source's, in bytes, with a reserve for the host.
    #[must_use]
    pub fn needed_bytes(&self, transfer: RamTransfer) -> u64 {
        match transfer {
            _ if !self.has_private() => 0,
            RamTransfer::Copied => self.populated_bytes + RESERVE_BYTES,
            RamTransfer::InPlace => MAX_UNDROPPED_BYTES + RESERVE_BYTES,
        }
    }

    /// Checks that there is room for the transfer. `payer`: a process whose control groups are charged for it.
    ///
    /// # Errors
    /// [`RamTransferError::NoRoom`], [`RamTransferError::UnknownRoom`].
    pub fn check_room(&self, payer: Process, transfer: RamTransfer) -> Result<(), RamTransferError> {
        let needed = self.needed_bytes(transfer);
        if needed == 0 {
            return Ok(());
        }
        let available = available_to(payer).map_err(RamTransferError::UnknownRoom)?;
        if available < needed {
            return Err(RamTransferError::NoRoom { transfer, pid: payer.pid, needed, available });
        }
        Ok(())
    }
}

pub(crate) fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Rejects private memory over a file that has content: its pages that were not written are not zero.
fn check_no_content(source: Process, block: &Block) -> Result<(), RamTransferError> {
    let failed = |e| GuestRamError::Maps { pid: source.pid, source: e };
    let maps = maps::of(source).map_err(failed)?;
    for map in maps::covering(&maps, &block.total()).unwrap_or_default() {
        if let Some(file) = map.open(source).map_err(failed)?
            && file.metadata().map_err(failed)?.blocks() > 0
        {
            return Err(RamTransferError::PrivateFile { id: block.info.id.clone(), file: map.name.clone() });
        }
    }
    Ok(())
}

/// Opens the file of a block of shared memory.
fn shared_file(block: &Block) -> Result<SuppliedBlock, RamTransferError> {
    let id = block.info.id.clone();
    let Some((file, 0)) = block.file() else { return Err(RamTransferError::NoWholeFile { id }) };
    match File::options().read(true).write(true).open(path_of(file)) {
        Ok(file) => Ok(SuppliedBlock { id, file, bytes: block.info.total }),
        Err(source) => Err(RamTransferError::File { id, source }),
    }
}

/// Makes an empty file for a private block.
fn empty_file(block: &Block) -> Result<SuppliedBlock, RamTransferError> {
    let id = block.info.id.clone();
    if block.info.page_size != PAGE_SIZE as u64 {
        return Err(RamTransferError::HugePages { id });
    }
    let made = memfd_create("rekindle-ram", MemfdFlags::CLOEXEC).map_err(io::Error::from).map(File::from);
    match made.and_then(|file| file.set_len(block.info.total).map(|()| file)) {
        Ok(file) => Ok(SuppliedBlock { id, file, bytes: block.info.total }),
        Err(source) => Err(RamTransferError::File { id, source }),
    }
}
