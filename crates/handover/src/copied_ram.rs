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
use rekindle_kernel::file::punch_hole;
use rekindle_kernel::inject::{InjectError, Injector};
use rekindle_kernel::process::Process;
use rekindle_memory::ram::{Block, GuestRam, GuestRamError};
use rekindle_memory::room::available_to;
use rekindle_memory::tracker::{Asynchronous, Dirty, TrackError, Tracker, UndrainedDirty};
use rekindle_pages::{PAGE_SIZE, PageRuns, ZERO_PAGE};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::transfer::Feed;
use rekindle_qemu::userfaultfd;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::journal::Operation;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes that are copied at a time. The buffer fits into a processor's cache.
const PIECE_BYTES: u64 = 256 << 10;
/// Memory that a copy leaves to the host, in bytes.
const RESERVE_BYTES: u64 = 64 << 20;

/// Why a source's RAM cannot be given to a destination.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("the source QEMU has no RAM block {id}")]
    NoBlock { id: String },
    #[error("RAM block {id} is private memory in huge pages, which cannot be copied")]
    HugePages { id: String },
    #[error("RAM block {id} is a device or begins inside its file, so another QEMU cannot map it as a whole")]
    NoWholeFile { id: String },
    #[error(
        "copying the guest's RAM needs {} MiB, but the host and the control groups of process {pid} have only {} MiB \
         left; free some memory, or raise the limit",
        needed >> 20, available >> 20
    )]
    NoRoom {
        /// The process whose control groups pay for the copy.
        pid: u32,
        needed: u64,
        available: u64,
    },
    #[error("cannot determine how much memory is available")]
    UnknownRoom(#[source] io::Error),
    #[error("cannot make or write the copy of RAM block {id}")]
    Copy {
        id: String,
        #[source]
        source: io::Error,
    },
    #[error("the RAM has not been copied while the guest ran")]
    NotCopied,
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    #[error(transparent)]
    Track(#[from] TrackError),
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// A RAM block as a file that a destination maps from its first byte on.
#[derive(Debug)]
pub struct SuppliedBlock {
    /// QEMU's name of the block.
    pub id: String,
    /// Open for reading and writing.
    pub file: File,
    pub bytes: u64,
}

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
    /// The source's private blocks.
    source: Arc<GuestRam>,
    /// The copies of the source's private blocks, in the order of `source`.
    copies: Vec<SuppliedBlock>,
    /// Blocks of shared memory: the source's own files.
    shared: Vec<SuppliedBlock>,
    /// Memory that the copies need, with a reserve; 0 without copies.
    needed_bytes: u64,
    /// `Some` if the copies were complete at the last collection.
    tracker: Option<Asynchronous>,
}

impl CopiedRam {
    /// Makes the files for the blocks of `source` with the names `ids`. The files of private blocks are empty. `payer`
    /// is the process whose control groups are charged for the copy.
    ///
    /// # Errors
    /// [`CopyError`]: a block cannot be supplied, or there is no room for the copy. The source is unchanged.
    pub fn plan(source: &GuestRam, ids: &[String], payer: Process) -> Result<Self, CopyError> {
        let (mut copies, mut shared, mut private_blocks) = (Vec::new(), Vec::new(), Vec::new());
        let mut populated_bytes = RESERVE_BYTES;
        for id in ids {
            let no_block = || CopyError::NoBlock { id: id.clone() };
            let block = source.block_id(id).and_then(|id| source.block(id)).ok_or_else(no_block)?;
            if block.shared {
                shared.push(shared_file(block)?);
            } else {
                populated_bytes += source.populated(block)?.bytes();
                copies.push(empty_copy(block)?);
                private_blocks.push(block.info.clone());
            }
        }
        let needed_bytes = if copies.is_empty() { 0 } else { populated_bytes };
        check_room(payer, needed_bytes)?;
        let source = Arc::new(GuestRam::from_blocks(source.process(), private_blocks)?);
        Ok(Self { source, copies, shared, needed_bytes, tracker: None })
    }

    /// Returns the blocks with their files, which the destination maps.
    pub fn blocks(&self) -> impl Iterator<Item = &SuppliedBlock> {
        self.copies.iter().chain(&self.shared)
    }

    /// Returns how much memory the copies need, in bytes, with a reserve for the host.
    #[must_use]
    pub fn needed_bytes(&self) -> u64 {
        self.needed_bytes
    }

    /// Returns whether there is private memory, which must be copied.
    #[must_use]
    pub fn needs_copy(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Copies the private blocks while the guest runs: all of their pages at the first call, then what the guest has
    /// written meanwhile, in rounds.
    ///
    /// # Errors
    /// [`CopyError`]. The source is no longer tracked, and the next call copies all pages.
    pub fn copy_while_running(&mut self, qmp: &mut Qmp, limit: CopyLimit) -> Result<CopyProgress, CopyError> {
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
            Err(e) => Err(tracker.detach().err().map_or(e, CopyError::from)),
        }
    }

    /// Copies the pages that were written since the last round. The copies are then the RAM of the stopped guest.
    /// Returns the number of copied bytes.
    ///
    /// # Errors
    /// [`CopyError`]. The copies are incomplete: the guest must resume in the source.
    pub fn copy_rest(&mut self, stopped: &mut Stopped<'_>) -> Result<u64, CopyError> {
        if !self.needs_copy() {
            return Ok(0);
        }
        let mut tracker = self.tracker.take().ok_or(CopyError::NotCopied)?;
        // Nothing else has tested so far that writes are recorded: that test requires a stopped guest.
        let collected = tracker.prove(stopped).and_then(|()| tracker.collect(stopped));
        let copied = collected.map_err(CopyError::from).and_then(|dirty| self.copy(&dirty).map(|()| dirty.bytes()));
        match copied {
            Ok(bytes) => {
                self.tracker = Some(tracker);
                Ok(bytes)
            }
            Err(e) => Err(tracker.detach().err().map_or(e, CopyError::from)),
        }
    }

    /// Ends the tracking of the source, which is as before then. Not needed if the source ends.
    ///
    /// # Errors
    /// [`CopyError::Track`].
    pub fn detach(&mut self) -> Result<(), CopyError> {
        self.tracker.take().map_or(Ok(()), |tracker| Ok(tracker.detach()?))
    }

    /// Returns whether the evidence in `operation` proves that the guest has not run in the destination.
    #[must_use]
    pub fn is_untouched(&self, operation: &Operation) -> bool {
        let is_untouched =
            |block: &SuppliedBlock| evidence::is_untouched(&path_of(&block.file), operation.untouched_since_ns);
        self.blocks().all(is_untouched)
    }

    fn attach(&self, qmp: &mut Qmp) -> Result<(Asynchronous, UndrainedDirty), CopyError> {
        let injector = Injector::new(self.source.process())?;
        let device = userfaultfd::hand(qmp, self.source.process())?;
        let attached = Asynchronous::attach_running(injector, Arc::clone(&self.source), device);
        userfaultfd::take_back(qmp)?;
        Ok(attached?)
    }

    fn copy_rounds(
        &self,
        tracker: &mut Asynchronous,
        mut undrained: UndrainedDirty,
        qmp: &mut Qmp,
        limit: CopyLimit,
    ) -> Result<CopyProgress, CopyError> {
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

    fn copy(&self, dirty: &Dirty) -> Result<(), CopyError> {
        let mut buffer = vec![0; PIECE_BYTES as usize];
        let pages = dirty.written.iter().zip(&dirty.zero);
        for ((block, copy), (written, zero)) in self.source.blocks().iter().zip(&self.copies).zip(pages) {
            let failed = |source| CopyError::Copy { id: copy.id.clone(), source };
            for run in zero {
                punch_hole(&copy.file, run.start, run.end - run.start).map_err(failed)?;
            }
            for piece in written.split(PIECE_BYTES) {
                let content = buffer.get_mut(..piece.bytes() as usize).unwrap_or_default();
                self.source.read(block, &piece, content)?;
                write(&copy.file, &piece, content).map_err(failed)?;
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
        let marks = self.blocks().map(|block| evidence::mark_ram(&path_of(&block.file)));
        operation.untouched_since_ns = marks.reduce(|first, next| first.and(next)).flatten();
    }
}

impl RamSource for CopiedRam {
    type Error = HandoverError;

    fn connect(&mut self, _destination: &Vmm, qmp: &mut Qmp) -> Result<Feed, HandoverError> {
        Ok(Feed::open(qmp, WITHOUT_RAM)?)
    }
}

fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Opens the file of a block of shared memory.
fn shared_file(block: &Block) -> Result<SuppliedBlock, CopyError> {
    let id = block.info.id.clone();
    let Some((file, 0)) = block.file() else { return Err(CopyError::NoWholeFile { id }) };
    match File::options().read(true).write(true).open(path_of(file)) {
        Ok(file) => Ok(SuppliedBlock { id, file, bytes: block.info.total }),
        Err(source) => Err(CopyError::Copy { id, source }),
    }
}

/// Makes an empty file for the copy of a block.
fn empty_copy(block: &Block) -> Result<SuppliedBlock, CopyError> {
    let id = block.info.id.clone();
    if block.info.page_size != PAGE_SIZE as u64 {
        return Err(CopyError::HugePages { id });
    }
    let made = memfd_create("rekindle-ram", MemfdFlags::CLOEXEC).map_err(io::Error::from).map(File::from);
    match made.and_then(|file| file.set_len(block.info.total).map(|()| file)) {
        Ok(file) => Ok(SuppliedBlock { id, file, bytes: block.info.total }),
        Err(source) => Err(CopyError::Copy { id, source }),
    }
}

fn check_room(payer: Process, needed: u64) -> Result<(), CopyError> {
    if needed == 0 {
        return Ok(());
    }
    let available = available_to(payer).map_err(CopyError::UnknownRoom)?;
    if available < needed {
        return Err(CopyError::NoRoom { pid: payer.pid, needed, available });
    }
    Ok(())
}

/// Writes the content of runs of pages. Pages of zeros become holes, which need no memory.
fn write(copy: &File, runs: &PageRuns, content: &[u8]) -> io::Result<()> {
    let mut pages = content.as_chunks::<PAGE_SIZE>().0;
    for run in runs {
        let (run_pages, later_pages) = pages.split_at(((run.end - run.start) / PAGE_SIZE as u64) as usize);
        pages = later_pages;
        let mut offset = run.start;
        for alike in run_pages.chunk_by(|page, next| (*page == ZERO_PAGE) == (*next == ZERO_PAGE)) {
            let bytes = alike.as_flattened();
            match alike.first() {
                Some(&ZERO_PAGE) => punch_hole(copy, offset, bytes.len() as u64)?,
                _ => copy.write_all_at(bytes, offset)?,
            }
            offset += bytes.len() as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn pages_of_zeros_become_holes_and_all_others_are_written_at_their_offsets() {
        const PAGE: u64 = PAGE_SIZE as u64;
        let copy = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        copy.write_all_at(&[9; 8 * PAGE_SIZE], 0).unwrap();
        let mut runs = PageRuns::new();
        [PAGE..4 * PAGE, 6 * PAGE..7 * PAGE].into_iter().for_each(|run| runs.push(run));
        let content: Vec<u8> = [1, 0, 0, 2].iter().flat_map(|byte| [*byte; PAGE_SIZE]).collect();
        write(&copy, &runs, &content).unwrap();
        let mut found = [0; 8 * PAGE_SIZE];
        copy.read_exact_at(&mut found, 0).unwrap();
        let first_bytes: Vec<u8> = found.iter().step_by(PAGE_SIZE).copied().collect();
        assert_eq!(first_bytes, [9, 1, 0, 0, 9, 9, 2, 9]);
        assert_eq!(copy.metadata().unwrap().blocks() * 512, 6 * PAGE);
    }
}
