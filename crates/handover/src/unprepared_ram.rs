//! The RAM of a source that Rekindle did not start: copied, or moved in place.

use crate::HandoverError;
use crate::copied_ram::{CopiedRam, CopyLimit};
use crate::moved_ram::{MovedRam, RamMove};
use crate::ram::{Ram, RamSource};
use crate::ram_transfer::RamTransfer;
use crate::ram_transfer_error::RamTransferError;
use crate::source_ram::SourceRam;
use crate::supplied_block::SuppliedBlock;
use rekindle_kernel::process::Process;
use rekindle_memory::ram::GuestRam;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::transfer::Feed;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::journal::Operation;

#[derive(Debug)]
pub enum UnpreparedRam {
    Copied(CopiedRam),
    Moved(MovedRam),
}

impl UnpreparedRam {
    /// Makes the files for the blocks of `source` with the names `ids`. `payer` is the process whose control groups are
    /// charged for the memory.
    ///
    /// # Errors
    /// [`RamTransferError`]: a block cannot be supplied, or there is no room. The source is unchanged.
    pub fn plan(
        source: &GuestRam,
        ids: &[String],
        payer: Process,
        transfer: RamTransfer,
    ) -> Result<Self, RamTransferError> {
        let ram = SourceRam::of(source, ids)?;
        ram.check(payer, transfer)?;
        Ok(match transfer {
            RamTransfer::InPlace if ram.has_private() => Self::Moved(MovedRam::new(ram)?),
            RamTransfer::InPlace | RamTransfer::Copied => Self::Copied(CopiedRam::new(ram)),
        })
    }

    /// Returns the blocks with their files, which the destination maps.
    pub fn blocks(&self) -> Box<dyn Iterator<Item = &SuppliedBlock> + '_> {
        match self {
            Self::Copied(ram) => Box::new(ram.blocks()),
            Self::Moved(ram) => Box::new(ram.blocks()),
        }
    }

    /// Copies RAM while the guest runs ([`CopiedRam::copy_while_running`]), unless it is moved later.
    ///
    /// # Errors
    /// [`RamTransferError`]. The source is no longer tracked, and the next call copies all pages.
    pub fn copy_while_running(&mut self, qmp: &mut Qmp) -> Result<(), RamTransferError> {
        match self {
            Self::Copied(ram) => ram.copy_while_running(qmp, CopyLimit::default()).map(drop),
            Self::Moved(_) => Ok(()),
        }
    }

    /// Describes RAM that is moved in `operation`. It must be journalled before the guest is stopped.
    pub fn note_blocks(&self, operation: &mut Operation) {
        match self {
            Self::Copied(_) => {}
            Self::Moved(ram) => ram.note_blocks(operation),
        }
    }

    /// Makes the RAM of the stopped guest available to the destination: copies what was written since the last round, or
    /// starts to supply the pages that are waited for.
    ///
    /// # Errors
    /// [`RamTransferError`]: the guest must resume in the source.
    pub fn complete(&mut self, source: &Vmm, stopped: &mut Stopped<'_>) -> Result<(), RamTransferError> {
        match self {
            Self::Copied(ram) => ram.copy_rest(stopped).map(drop),
            Self::Moved(ram) => ram.supply(source, stopped),
        }
    }

    /// Returns the move of the RAM of a guest that was stopped; `None` if it was copied.
    pub fn take_move(&mut self) -> Option<RamMove> {
        match self {
            Self::Copied(_) => None,
            Self::Moved(ram) => ram.take_move(),
        }
    }
}

impl Ram for UnpreparedRam {
    fn supplies(&self, id: &str) -> bool {
        self.blocks().any(|block| block.id == id)
    }

    fn note_evidence(&self, operation: &mut Operation) {
        match self {
            Self::Copied(ram) => ram.note_evidence(operation),
            Self::Moved(ram) => ram.note_evidence(operation),
        }
    }
}

impl RamSource for UnpreparedRam {
    type Error = HandoverError;

    fn connect(&mut self, destination: &Vmm, qmp: &mut Qmp) -> Result<Feed, HandoverError> {
        match self {
            Self::Copied(ram) => ram.connect(destination, qmp),
            Self::Moved(ram) => ram.connect(destination, qmp),
        }
    }
}
