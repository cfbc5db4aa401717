//! Tracking by soft-dirty bits: for RAM in files with DAX, which write protection by a userfaultfd must not touch.
//!
//! Clearing them is for all of QEMU at once, and anybody may do it, so what is told is good for a check that fails on the safe side, and not
//! for a checkpoint. Nothing of it stays in QEMU when this ends.

use super::TrackError;
use crate::ram::GuestRam;
use rekindle_kernel::memory;
use rekindle_kernel::pagemap::{Categories, Query, Scanner};
use rekindle_kernel::process::Process;
use rekindle_kernel::softdirty;
use rekindle_qemu::stopped::Stopped;
use std::ops::Range;

/// What was written to one RAM block of a QEMU.
#[derive(Debug)]
pub struct SoftDirty {
    process: Process,
    scanner: Scanner,
    id: String,
    range: Range<u64>,
}

impl SoftDirty {
    /// Begin to track block `id` of `ram`: nothing counts as written from here on, but for a page with which it was proved
    /// that tracking works.
    ///
    /// # Errors
    /// [`TrackError`]; QEMU is as it was.
    pub fn attach(ram: &GuestRam, id: &str, _stopped: &mut Stopped<'_>) -> Result<Self, TrackError> {
        let block = ram.blocks().iter().find(|block| block.told.id == id);
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

    /// What was written since the last time, in bytes from the beginning of the block, and begin anew.
    ///
    /// # Errors
    /// [`TrackError`]: then everything must be taken for written.
    pub fn collect(&mut self, _stopped: &mut Stopped<'_>) -> Result<Vec<Range<u64>>, TrackError> {
        let written = self.written(self.range.clone())?;
        self.clear()?;
        Ok(written.into_iter().map(|run| run.start - self.range.start..run.end - self.range.start).collect())
    }

    fn written(&mut self, range: Range<u64>) -> Result<Vec<Range<u64>>, TrackError> {
        let found = self.scanner.matching(range, Query::all(Categories::SOFT_DIRTY));
        found.map_err(|source| TrackError::Scan { id: self.id.clone(), source })
    }

    fn clear(&self) -> Result<(), TrackError> {
        softdirty::clear(self.process).map_err(|source| TrackError::Clear { pid: self.process.pid, source })
    }

    /// Write the first byte of the block as it is, and have that told.
    fn prove(&mut self) -> Result<(), TrackError> {
        let address = self.range.start;
        let failed = |source| TrackError::Proof { id: self.id.clone(), source };
        let mut byte = [0];
        memory::read(self.process, address, &mut byte).map_err(failed)?;
        memory::write(self.process, address, &byte).map_err(failed)?;
        match self.written(address..address + memory::PAGE_SIZE as u64)?.is_empty() {
            false => Ok(()),
            true => Err(TrackError::Unproven { id: self.id.clone(), address }),
        }
    }
}
