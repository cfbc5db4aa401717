//! The RAM of a source QEMU that Rekindle did not start, as files that a destination can map.
//!
//! Such a source usually has its RAM in *private* memory, which ends with the process. [`CopiedRam`] copies it into
//! memfds: completely while the guest runs, then, in rounds, the pages that were written meanwhile, and in the pause the
//! last few. The order of each round, which makes it correct with disk requests in flight, is described at
//! `rekindle_memory::tracker::UndrainedDirty`. RAM that is shared memory already is passed on as it is: a guest that was
//! handed over once is not copied again.

use crate::HandoverError;
use crate::evidence;
use crate::ram::{Ram, RamSource, WITHOUT_RAM};
use crate::ram_transfer_error::RamTransferError;
use crate::source_ram::SourceRam;
use crate::supplied_block::SuppliedBlock;
use rekindle_kernel::inject::Injector;
use rekindle_memory::tracker::{Asynchronous, Dirty, Tracker, UndrainedDirty};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::transfer::Feed;
use rekindle_qemu::userfaultfd;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::journal::Operation;
use std::sync::Arc;

/// Bytes that are copied at a time. The buffer fits into a processor's cache.
const PIECE_BYTES: u64 = 256 << 10;

/// When to end copying while the guest runs.
#[derive(Debug, Clone, Copy)]
pub struct CopyLimit {
    /// As soon as at most this much has been written since the last round.
    pub remaining_bytes: u64,
    /// After this many rounds.
    pub rounds: u32,
}

impl Default for CopyLimit {
    fn default() -> Self {
        // 1 MiB takes less than a millisecond to copy in the pause.
        Self { remaining_bytes: 1 << 20, rounds: 30 }
    }
}

/// What was copied while the guest ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyProgress {
    pub rounds: u32,
    pub copied_bytes: u64,
    /// Written again since the last round.
    pub remaining_bytes: u64,
}

/// The RAM of a source QEMU that Rekindle did not start. Dropping it leaves write protection in the source, which slows
/// the guest's next writes: call [`CopiedRam::detach`] before the guest resumes in the source.
#[derive(Debug)]
pub struct CopiedRam {
    ram: SourceRam,
    /// `Some` if the copies were complete at the last collection.
    tracker: Option<Asynchronous>,
}

impl CopiedRam {
    /// Copies `ram`, for which there is room.
    #[must_use]
    pub fn new(ram: SourceRam) -> Self {
        Self { ram, tracker: None }
    }

    /// Returns the blocks with their files, which the destination maps.
    pub fn blocks(&self) -> impl Iterator<Item = &SuppliedBlock> {
        self.ram.blocks()
    }

    /// Returns whether there is private memory, which must be copied.
    #[must_use]
    pub fn needs_copy(&self) -> bool {
        self.ram.has_private()
    }

    /// Copies the private blocks while the guest runs: all of their pages at the first call, then what the guest has
    /// written meanwhile, in rounds.
    ///
    /// # Errors
    /// [`RamTransferError`]. The source is no longer tracked, and the next call copies all pages.
    pub fn copy_while_running(&mut self, qmp: &mut Qmp, limit: CopyLimit) -> Result<CopyProgress, RamTransferError> {
        if !self.needs_copy() {
            return Ok(CopyProgress::default());
        }
        let (mut tracker, undrained) = match self.tracker.take() {
            None => self.attach(qmp)?,
            Some(mut tracker) => match tracker.collect_running() {
                Ok(undrained) => (tracker, undrained),
                Err(e) => return Err(tracker.detach().err().unwrap_or(e).into()),
            },
        };
        match self.copy_rounds(&mut tracker, undrained, qmp, limit) {
            Ok(progress) => {
                self.tracker = Some(tracker);
                Ok(progress)
            }
            Err(e) => Err(tracker.detach().err().map_or(e, RamTransferError::from)),
        }
    }

    /// Copies the pages that were written since the last round. The copies are then the RAM of the stopped guest.
    /// Returns the number of copied bytes.
    ///
    /// # Errors
    /// [`RamTransferError`]. The copies are incomplete: the guest must resume in the source.
    pub fn copy_rest(&mut self, stopped: &mut Stopped<'_>) -> Result<u64, RamTransferError> {
        if !self.needs_copy() {
            return Ok(0);
        }
        let mut tracker = self.tracker.take().ok_or(RamTransferError::NotCopied)?;
        // Nothing else has tested so far that writes are recorded: that test requires a stopped guest.
        let collected = tracker.prove(stopped).and_then(|()| tracker.collect(stopped));
        let copied =
            collected.map_err(RamTransferError::from).and_then(|dirty| self.copy(&dirty).map(|()| dirty.bytes()));
        match copied {
            Ok(bytes) => {
                self.tracker = Some(tracker);
                Ok(bytes)
            }
            Err(e) => Err(tracker.detach().err().map_or(e, RamTransferError::from)),
        }
    }

    /// Ends the tracking of the source, which is as before then. Not needed if the source ends.
    ///
    /// # Errors
    /// [`RamTransferError::Track`].
    pub fn detach(&mut self) -> Result<(), RamTransferError> {
        self.tracker.take().map_or(Ok(()), |tracker| Ok(tracker.detach()?))
    }

    /// Returns whether the evidence in `operation` proves that the guest has not run in the destination.
    #[must_use]
    pub fn is_untouched(&self, operation: &Operation) -> bool {
        let is_untouched = |block: &SuppliedBlock| evidence::is_untouched(&block.path(), operation.untouched_since_ns);
        self.blocks().all(is_untouched)
    }

    fn attach(&self, qmp: &mut Qmp) -> Result<(Asynchronous, UndrainedDirty), RamTransferError> {
        let injector = Injector::new(self.ram.private.process())?;
        let device = userfaultfd::hand(qmp, self.ram.private.process())?;
        let attached = Asynchronous::attach_running(injector, Arc::clone(&self.ram.private), device);
        userfaultfd::take_back(qmp)?;
        Ok(attached?)
    }

    fn copy_rounds(
        &self,
        tracker: &mut Asynchronous,
        mut undrained: UndrainedDirty,
        qmp: &mut Qmp,
        limit: CopyLimit,
    ) -> Result<CopyProgress, RamTransferError> {
        let mut progress = CopyProgress::default();
        loop {
            let dirty = undrained.drain(qmp)?;
            self.copy(&dirty)?;
            let round_bytes = dirty.bytes();
            progress.rounds += 1;
            progress.copied_bytes += round_bytes;
            progress.remaining_bytes = tracker.peek()?.bytes();
            // If not even half is left to copy, the next round is worthwhile.
            let is_shrinking = progress.remaining_bytes < round_bytes / 2;
            let is_small = progress.remaining_bytes <= limit.remaining_bytes;
            if is_small || !is_shrinking || progress.rounds >= limit.rounds {
                return Ok(progress);
            }
            undrained = tracker.collect_running()?;
        }
    }

    fn copy(&self, dirty: &Dirty) -> Result<(), RamTransferError> {
        let mut buffer = vec![0; PIECE_BYTES as usize];
        let pages = dirty.written.iter().zip(&dirty.zero);
        for ((block, copy), (written, zero)) in self.ram.private.blocks().iter().zip(&self.ram.files).zip(pages) {
            copy.clear(zero)?;
            for piece in written.split(PIECE_BYTES) {
                let content = buffer.get_mut(..piece.bytes() as usize).unwrap_or_default();
                self.ram.private.read(block, &piece, content)?;
                copy.write(&piece, content)?;
            }
        }
        Ok(())
    }
}

impl Ram for CopiedRam {
    fn supplies(&self, id: &str) -> bool {
        self.blocks().any(|block| block.id == id)
    }

    fn note_evidence(&self, operation: &mut Operation) {
        let marks = self.blocks().map(|block| evidence::mark_ram(&block.path()));
        operation.untouched_since_ns = marks.reduce(|first, next| first.and(next)).flatten();
    }
}

impl RamSource for CopiedRam {
    type Error = HandoverError;

    fn connect(&mut self, _destination: &Vmm, qmp: &mut Qmp) -> Result<Feed, HandoverError> {
        Ok(Feed::open(qmp, WITHOUT_RAM)?)
    }
}
