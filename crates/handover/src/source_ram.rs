//! The RAM blocks of a source that Rekindle did not start, and the files of which a destination maps them.

use crate::ram_transfer::RamTransfer;
use crate::ram_transfer_error::RamTransferError;
use crate::supplied_block::SuppliedBlock;
use rekindle_kernel::maps;
use rekindle_kernel::process::Process;
use rekindle_memory::moving::MAX_UNDROPPED_BYTES;
use rekindle_memory::ram::{Block, GuestRam, GuestRamError};
use rekindle_memory::room::available_to;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// Memory that a replacement leaves to the host, in bytes.
const RESERVE_BYTES: u64 = 64 << 20;

/// RAM blocks of a source, with their files.
#[derive(Debug)]
pub struct SourceRam {
    /// The source's private blocks.
    pub(crate) private: Arc<GuestRam>,
    /// Empty files for the private blocks, in the order of `private`.
    pub(crate) files: Vec<SuppliedBlock>,
    /// Blocks of shared memory: the source's own files.
    pub(crate) shared: Vec<SuppliedBlock>,
    /// Bytes of the private blocks that need memory. The huge pages of a file are reserved.
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
                shared.push(SuppliedBlock::shared(block)?);
            } else {
                check_no_content(source.process(), block)?;
                let file = SuppliedBlock::empty(block)?;
                if !file.is_huge() {
                    populated_bytes += source.populated(block)?.bytes();
                }
                files.push(file);
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

    /// Checks that the transfer is possible, and that there is room for it. `payer`: a process whose control groups are charged
    /// for it.
    ///
    /// # Errors
    /// [`RamTransferError::NoRoom`], [`RamTransferError::UnknownRoom`], [`RamTransferError::HugePages`].
    pub fn check(&self, payer: Process, transfer: RamTransfer) -> Result<(), RamTransferError> {
        if let (RamTransfer::InPlace, Some(huge)) = (transfer, self.files.iter().find(|file| file.is_huge())) {
            return Err(RamTransferError::HugePages { id: huge.id.clone() });
        }
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
