//! Tracking by soft-dirty bits, for RAM in DAX files, which must not be write-protected by a userfaultfd.
//!
//! The bits can be cleared only for the whole process, and any process with the right to do so may clear them. So the
//! result suffices for a check that fails safely, but not for a checkpoint. Nothing stays in QEMU when the tracker
//! ends.

use super::TrackError;
use crate::ram::GuestRam;
use rekindle_kernel::memory;
use rekindle_kernel::pagemap::{Categories, Query, Scanner};
use rekindle_kernel::process::Process;
use rekindle_kernel::softdirty;
use rekindle_pages::{PAGE_SIZE, PageRuns};
use rekindle_qemu::stopped::Stopped;
use std::ops::Range;

/// A tracker of one RAM block by soft-dirty bits.
#[derive(Debug)]
pub struct SoftDirty {
    process: Process,
    scanner: Scanner,
    id: String,
    range: Range<u64>,
}

impl SoftDirty {
    /// Starts to track block `id` of `ram`. No page counts as written, except the first one, which is written to test
    /// the tracking.
    ///
    /// # Errors
    /// [`TrackError`]; QEMU is unchanged.
    pub fn attach(ram: &GuestRam, id: &str, _stopped: &mut Stopped<'_>) -> Result<Self, TrackError> {
        let block = ram.blocks().iter().find(|block| block.info.id == id);
        let block = block.ok_or_else(|| TrackError::NoBlock { id: id.into() })?;
        if !softdirty::works() {
            return Err(TrackError::NoSoftDirty);
        }
        let scanner = Scanner::open(ram.process()).map_err(TrackError::Scanner)?;
        let mut tracked = Self { process: ram.process(), scanner, id: id.into(), range: block.used() };
        tracked.clear()?;
        tracked.prove()?;
        Ok(tracked)
    }

    /// Returns the pages written since the last call, as byte offsets in the block, and resets the record.
    ///
    /// # Errors
    /// [`TrackError`]. After an error all pages count as written.
    pub fn collect(&mut self, _stopped: &mut Stopped<'_>) -> Result<PageRuns, TrackError> {
        let written = self.written(self.range.clone())?;
        self.clear()?;
        Ok(written.relative_to(self.range.start))
    }

    fn written(&mut self, range: Range<u64>) -> Result<PageRuns, TrackError> {
        let found = self.scanner.matching(range, Query::all(Categories::SOFT_DIRTY));
        found.map_err(|source| TrackError::Scan { id: self.id.clone(), source })
    }

    fn clear(&self) -> Result<(), TrackError> {
        softdirty::clear(self.process).map_err(|source| TrackError::Clear { pid: self.process.pid, source })
    }

    /// Tests that writes are recorded: writes the first byte of the block, unchanged.
    fn prove(&mut self) -> Result<(), TrackError> {
        let address = self.range.start;
        let failed = |source| TrackError::Proof { id: self.id.clone(), source };
        let mut byte = [0];
        memory::read(self.process, address, &mut byte).map_err(failed)?;
        memory::write(self.process, address, &byte).map_err(failed)?;
        match self.written(address..address + PAGE_SIZE as u64)?.is_empty() {
            false => Ok(()),
            true => Err(TrackError::Unproven { id: self.id.clone(), address }),
        }
    }
}
