//! The RAM of a source that Rekindle did not start, moved in place: for hosts that have no memory for a second copy of it.
//!
//! The destination starts with empty files, whose pages are *missing*: access to one blocks until it is supplied
//! ([`rekindle_memory::missing`]). When the guest is stopped, a thread supplies the pages that the destination needs from
//! the source. When the journal has that the guest runs in the destination, the thread moves all others, too, and makes
//! the source drop what was moved ([`rekindle_memory::moving`]). The source is kept, stopped, until the last page.
//!
//! | event | before [`Step::GiveBack`] | after it |
//! |---|---|---|
//! | this process is killed | the source has all pages; recovery decides as for copied RAM, but without evidence | the guest waits where it needs a page; recovery continues the move ([`InterruptedMove::of`]) |
//! | the destination is killed | the guest continues in the source, unless the decision was made | the guest is lost, as with each QEMU that is killed |
//! | the source is killed | the guest is lost | the guest is lost, unless all pages were moved |
//!
//! There is no evidence of whether the destination has run the guest: pages that the kernel has supplied are written
//! without a change of the file's modification time. So nothing leads back to the source once the decision is made.

use crate::ram::{Ram, RamSource, WITHOUT_RAM};
use crate::ram_transfer_error::RamTransferError;
use crate::source_ram::SourceRam;
use crate::supplied_block::SuppliedBlock;
use crate::{Handover, HandoverError};
use rekindle_kernel::inject::Injector;
use rekindle_kernel::sched;
use rekindle_memory::missing::{Content, PageSource, Pager, PagerError, Progress};
use rekindle_memory::moving::{MovedPages, WindowStep, droppable};
use rekindle_memory::ram::GuestRam;
use rekindle_pages::{BlockId, Page, PageNo};
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::stopped::Stopped;
use rekindle_qemu::transfer::Feed;
use rekindle_qemu::userfaultfd;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::fault;
use rekindle_vm::journal::{MovedBlocks, Operation, Step};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// RAM that is moved from the source to the destination.
#[derive(Debug)]
pub struct MovedRam {
    ram: SourceRam,
    /// Set by [`RamSource::connect`].
    registered: Option<Box<Registered>>,
    /// Set when the guest is stopped.
    ram_move: Option<RamMove>,
}

/// The registered memory of the destination.
#[derive(Debug)]
struct Registered {
    vmm: Vmm,
    ram: GuestRam,
    pager: Pager,
}

impl MovedRam {
    /// Moves the private blocks of `ram`.
    ///
    /// # Errors
    /// [`RamTransferError`]: the source cannot be made to drop pages. It is unchanged.
    pub fn new(ram: SourceRam) -> Result<Self, RamTransferError> {
        droppable(ram.private.process())?;
        Ok(Self { ram, registered: None, ram_move: None })
    }

    /// Returns the blocks with their files, which the destination maps.
    pub fn blocks(&self) -> impl Iterator<Item = &SuppliedBlock> {
        self.ram.blocks()
    }

    /// Describes the blocks in `operation`. It must be journalled before the guest is stopped.
    ///
    /// *Needs:* the destination is connected.
    pub fn note_blocks(&self, operation: &mut Operation) {
        let infos = |ram: &GuestRam| ram.blocks().iter().map(|block| block.info.clone()).collect();
        let destination = self.registered.as_ref().map(|registered| infos(&registered.ram));
        operation.moved_ram =
            destination.map(|destination| MovedBlocks { source: infos(&self.ram.private), destination });
    }

    /// Starts to supply the pages that the destination needs. None is dropped yet.
    ///
    /// # Errors
    /// [`RamTransferError`]: the guest must resume in the source.
    pub fn supply(&mut self, source: &Vmm, _stopped: &mut Stopped<'_>) -> Result<(), RamTransferError> {
        let Registered { vmm, ram, mut pager } = *self.registered.take().ok_or(RamTransferError::NotPrepared)?;
        let guest_runs = Arc::new(AtomicBool::new(false));
        let on_step = fault_points(source.clone(), vmm);
        let mut pages = MovedPages::new(Arc::clone(&self.ram.private), Arc::clone(&guest_runs), on_step)?;
        pager.overwrite_present_pages(&ram, &mut pages)?;
        self.ram_move = Some(RamMove::start(pager, pages, guest_runs));
        Ok(())
    }

    /// Returns the move, if the guest was stopped.
    pub fn take_move(&mut self) -> Option<RamMove> {
        self.ram_move.take()
    }

    fn register(&self, destination: &Vmm, qmp: &mut Qmp) -> Result<Registered, RamTransferError> {
        let process = destination.process();
        let found = GuestRam::of(qmp, process)?;
        let info = |moved: &SuppliedBlock| {
            let block = found.block_id(&moved.id).and_then(|id| found.block(id));
            block.map(|block| block.info.clone()).ok_or_else(|| RamTransferError::NoBlock { id: moved.id.clone() })
        };
        // In the order of the source's blocks: their numbers are the same.
        let infos = self.ram.files.iter().map(info).collect::<Result<Vec<_>, _>>()?;
        let ram = GuestRam::from_blocks(process, infos)?;
        let injector = Injector::new(process)?;
        let device = userfaultfd::hand(qmp, process)?;
        let pager = Pager::register(injector, &ram, |_| true, device);
        userfaultfd::take_back(qmp)?;
        Ok(Registered { vmm: destination.clone(), ram, pager: pager? })
    }
}

impl Ram for MovedRam {
    fn supplies(&self, id: &str) -> bool {
        self.blocks().any(|block| block.id == id)
    }

    /// Adds nothing: nothing would show whether the destination has run the guest.
    fn note_evidence(&self, operation: &mut Operation) {
        operation.untouched_since_ns = None;
    }
}

impl RamSource for MovedRam {
    type Error = HandoverError;

    fn connect(&mut self, destination: &Vmm, qmp: &mut Qmp) -> Result<Feed, HandoverError> {
        let registered = self.register(destination, qmp).map_err(|e| HandoverError::Move(Box::new(e)))?;
        self.registered = Some(Box::new(registered));
        Ok(Feed::open(qmp, WITHOUT_RAM)?)
    }
}

/// Returns the function that passes the fault points of a move.
fn fault_points(source: Vmm, destination: Vmm) -> Box<dyn FnMut(WindowStep) + Send> {
    Box::new(move |step| {
        let point = match step {
            WindowStep::Supplied => "replace.move.supplied",
            WindowStep::Dropped => "replace.move.dropped",
        };
        fault::point(point, Some(&source), Some(&destination));
    })
}

/// What a move has cost the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveReport {
    /// Number of pages that the guest has waited for.
    pub demanded_pages: u64,
    /// The guest's longest wait for a page, in microseconds.
    pub longest_wait_us: u64,
}

/// A thread that supplies the destination's missing pages. Once the guest runs there, dropping this waits for the end of
/// the move: otherwise the guest would wait for its pages.
#[derive(Debug)]
pub struct RamMove {
    /// It is journalled that the guest runs in the destination: pages may be dropped in the source.
    guest_runs: Arc<AtomicBool>,
    /// Ends the supply of nothing but the pages that are waited for.
    ends_on_demand: Arc<AtomicBool>,
    /// The guest will not run in the destination.
    is_abandoned: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Progress, PagerError>>>,
}

impl RamMove {
    fn start<S: PageSource + Send + 'static>(mut pager: Pager, mut pages: S, guest_runs: Arc<AtomicBool>) -> Self {
        let (ends_on_demand, is_abandoned) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (end_on_demand, abandoned) = (Arc::clone(&ends_on_demand), Arc::clone(&is_abandoned));
        let thread = thread::spawn(move || {
            pager.run_on_demand(&mut pages, &end_on_demand, &AtomicBool::new(false))?;
            // It was created in the pause. The rest takes too long for a rank before all other threads.
            sched::end_rank_of_this_thread();
            pager.run(&mut pages, [], &abandoned)
        });
        Self { guest_runs, ends_on_demand, is_abandoned, thread: Some(thread) }
    }

    /// Starts to move all pages, if it is journalled that the guest runs in the destination.
    pub fn move_all(&self, handover: &Handover) {
        if handover.journal.operation.step >= Step::GiveBack {
            self.guest_runs.store(true, Ordering::SeqCst);
            self.ends_on_demand.store(true, Ordering::SeqCst);
        }
    }

    /// Waits until all pages are in the destination, whose registration has ended then. The source can be ended.
    ///
    /// # Errors
    /// [`RamTransferError::Pager`], [`RamTransferError::NotMoved`]: pages are missing, and the guest waits where it needs one.
    pub fn finish(mut self, handover: &Handover) -> Result<MoveReport, RamTransferError> {
        self.move_all(handover);
        if !self.guest_runs.load(Ordering::SeqCst) {
            return Err(RamTransferError::NotMoved);
        }
        let progress = self.join()?;
        if !progress.complete {
            return Err(RamTransferError::NotMoved);
        }
        handover.pass("replace.move.complete");
        Ok(MoveReport { demanded_pages: progress.demanded, longest_wait_us: progress.worst_ns / 1000 })
    }

    fn join(&mut self) -> Result<Progress, PagerError> {
        let Some(thread) = self.thread.take() else { return Ok(Progress::default()) };
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for RamMove {
    fn drop(&mut self) {
        let is_abandoned = !self.guest_runs.load(Ordering::SeqCst);
        if is_abandoned {
            self.is_abandoned.store(true, Ordering::SeqCst);
            self.ends_on_demand.store(true, Ordering::SeqCst);
        }
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(Err(error @ PagerError::QemuEnded { .. }))) if is_abandoned => tracing::debug!("{error}"),
            Some(Ok(Err(error))) => {
                let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
                tracing::error!("{error}{cause}; run `rekindle recover`");
            }
            Some(Err(_)) => tracing::error!("moving the guest's RAM has failed unexpectedly; run `rekindle recover`"),
            Some(Ok(Ok(_))) | None => {}
        }
    }
}

/// What a recovery finds of a move.
#[derive(Debug)]
pub enum InterruptedMove {
    /// The destination has all pages, or RAM that was not to be moved.
    Complete,
    /// Pages are missing; they are supplied from now on.
    Continues(RamMove),
    /// The source has ended, and pages that only it had are lost.
    Lost,
}

impl InterruptedMove {
    /// Continues an interrupted move. It must be called before any request to the destination: a thread of it that
    /// waits for a page may be the one that would answer.
    ///
    /// *Needs:* the decision for the destination is journalled.
    ///
    /// # Errors
    /// [`RamTransferError`]: nothing was changed.
    pub fn of(handover: &Handover) -> Result<Self, RamTransferError> {
        let operation = &handover.journal.operation;
        let (Some(blocks), Some(destination)) = (&operation.moved_ram, handover.destination()) else {
            return Ok(Self::Complete);
        };
        let process = destination.process();
        if !process.is_alive() {
            return Ok(Self::Complete);
        }
        let ram = GuestRam::from_blocks(process, blocks.destination.clone())?;
        let Some(pager) = Pager::take_over(Injector::new(process)?, &ram, |_| true)? else { return Ok(Self::Complete) };
        let guest_runs = Arc::new(AtomicBool::new(false));
        let ram_move = match handover.live_source() {
            Some(source) => {
                let source_ram = Arc::new(GuestRam::from_blocks(source.process(), blocks.source.clone())?);
                let on_step = fault_points(source.clone(), destination.clone());
                let pages = MovedPages::new(source_ram, Arc::clone(&guest_runs), on_step)?;
                RamMove::start(pager, pages, guest_runs)
            }
            // The previous process was killed when all pages were there, before it had closed the descriptors.
            None if pager.progress().left == 0 => RamMove::start(pager, EndedSource, guest_runs),
            None => return Ok(Self::Lost),
        };
        ram_move.move_all(handover);
        Ok(Self::Continues(ram_move))
    }
}

/// The source of a move that has ended after the last page.
struct EndedSource;

impl PageSource for EndedSource {
    type Error = RamTransferError;

    fn page(&mut self, _block: BlockId, _page: PageNo, _buffer: &mut Page) -> Result<Content, RamTransferError> {
        Err(RamTransferError::NotMoved)
    }

    fn retry(&mut self, _error: &RamTransferError, _attempt: u32) -> Option<Duration> {
        None
    }
}
