//! Tracking by synchronous write protection: a writer waits until the page is copied, if the checkpoint needs the page.
//!
//! At the pause all pages are protected. The first write to a page since then is reported to the tracker's thread. If
//! the page belongs to the checkpoint in flight and has not been copied, the thread copies it first. Then the write
//! proceeds, and the page is in the record of the next checkpoint. A second write to the page does not fault.

use super::flight::{Flight, WriteAction};
use super::registered::{Area, EarlierHoles, Registered, SYNCHRONOUS, TestByte};
use super::{Dirty, TrackError, Tracker};
use crate::ram::GuestRam;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory;
use rekindle_kernel::pagemap::Rearm;
use rekindle_kernel::userfault::{Event, UserfaultError};
use rekindle_pages::{BlockId, PAGE_SIZE, PageRuns};
use rekindle_qemu::stopped::Stopped;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, JoinHandle};

/// Gaps up to this size are protected together with the runs around them. A separate run costs as much as this many
/// pages (measured: 2 µs per run, 10 to 20 ns per page; `docs/internals/attach.md`), and the pages in the gap are
/// protected already.
const MAX_BRIDGED_GAP_BYTES: u64 = 128 * PAGE_SIZE as u64;

/// A callback that copies a page of the checkpoint in flight before the guest writes it. The guest waits meanwhile.
pub trait BeforeWrite: Send {
    /// Copies `page` (offsets) of block `block`, which is about to be written.
    ///
    /// The write proceeds afterwards in any case. An implementation that cannot copy the page must invalidate the
    /// checkpoint.
    fn before_write(&mut self, ram: &GuestRam, block: BlockId, page: Range<u64>);
}

impl<F: FnMut(&GuestRam, BlockId, Range<u64>) + Send> BeforeWrite for F {
    fn before_write(&mut self, ram: &GuestRam, block: BlockId, page: Range<u64>) {
        self(ram, block, page);
    }
}

/// State shared by the tracker and its thread.
#[derive(Debug)]
struct Shared {
    /// Locked for writing only when blocks are added or removed, with the guest stopped.
    registered: RwLock<Registered>,
    ram: RwLock<Arc<GuestRam>>,
    flight: Mutex<Flight>,
    /// Number of write faults.
    faults: AtomicU64,
    /// Number of pages copied because of a write fault.
    copied_for_writers: AtomicU64,
    /// Eventfd that ends the thread.
    end_request: OwnedFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pages that the caller copies. When the claim is dropped, they count as copied, and writers that wait for them
/// continue.
#[derive(Debug)]
pub struct Claim {
    shared: Arc<Shared>,
    pub block: BlockId,
    /// Offsets in the block.
    pub runs: PageRuns,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.shared.mark_copied(self.block.0, &self.runs, AllowedWrites::ThoseThatWait);
    }
}

/// The pages to which writes are allowed when they have been copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AllowedWrites {
    /// All of them.
    All,
    /// The pages for which a writer waits.
    ThoseThatWait,
}

/// Allows writes to pages (offsets) of a block. The caller holds the lock of the flight, so that no checkpoint begins
/// between the caller's decision and this call.
fn allow(registered: &Registered, flight: &mut Flight, block: usize, runs: &[Range<u64>]) {
    flight.record_allowed(block, runs);
    let Some(area) = registered.areas.get(block) else { return };
    // Fails for a block that has just been unplugged, which has no writers any more.
    if let Err(e) = registered.protect(area, &addresses(area, runs), false) {
        tracing::debug!("{e}: {:?}", std::error::Error::source(&e));
    }
}

fn addresses(area: &Area, runs: &[Range<u64>]) -> Vec<Range<u64>> {
    let start = area.total.start;
    runs.iter().map(|run| start + run.start..start + run.end).collect()
}

impl Shared {
    fn registered(&self) -> std::sync::RwLockReadGuard<'_, Registered> {
        self.registered.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a write fault at `address`. The fault may be out of date: another fault has allowed the write, and the
    /// page has been protected again at a pause since then.
    fn serve_fault(&self, address: u64, before_write: &mut dyn BeforeWrite) {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let registered = self.registered();
        let mut areas = registered.areas.iter().enumerate();
        let Some((block, area)) = areas.find(|(_, area)| area.total.contains(&address)) else { return };
        let offset = (address - area.total.start) / area.page_bytes * area.page_bytes;
        let page = offset..offset + area.page_bytes;
        let mut flight = lock(&self.flight);
        match flight.before_write(block, offset) {
            WriteAction::Wait => {}
            WriteAction::Allow => allow(&registered, &mut flight, block, std::slice::from_ref(&page)),
            WriteAction::Copy => {
                drop((flight, registered));
                let ram = Arc::clone(&self.ram.read().unwrap_or_else(PoisonError::into_inner));
                before_write.before_write(&ram, BlockId(block), page.clone());
                self.copied_for_writers.fetch_add(1, Ordering::Relaxed);
                // Another writer of the same page may wait by now; the call allows that write too.
                self.mark_copied(block, std::slice::from_ref(&page), AllowedWrites::All);
            }
        }
    }

    /// Notes that pages (offsets) of a block have been copied, and allows writes to them.
    fn mark_copied(&self, block: usize, runs: &[Range<u64>], allowed: AllowedWrites) {
        let registered = self.registered();
        let mut flight = lock(&self.flight);
        let waited_for = flight.mark_copied(block, runs);
        let allowed_runs = if allowed == AllowedWrites::All { runs } else { &waited_for };
        allow(&registered, &mut flight, block, allowed_runs);
    }

    /// Serves write faults until the tracker requests the end of the thread, or QEMU has ended.
    fn serve_faults(&self, before: &mut dyn BeforeWrite) -> io::Result<()> {
        // A duplicate, so that no lock is held during the poll.
        let userfaultfd = self.registered().remote.userfault.as_fd().try_clone_to_owned()?;
        loop {
            let mut fds = [PollFd::new(&userfaultfd, PollFlags::IN), PollFd::new(&self.end_request, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            let [_, end_request] = &fds;
            if end_request.revents().contains(PollFlags::IN) {
                return Ok(());
            }
            let events = match self.registered().remote.userfault.events() {
                Ok(events) => events,
                // QEMU has ended.
                Err(UserfaultError::Gone) => return Ok(()),
                Err(e) => return Err(io::Error::other(e)),
            };
            for event in events {
                if let Event::Fault { address, write_protected: true, .. } = event {
                    self.serve_fault(address, before);
                }
            }
        }
    }
}

/// A tracker by synchronous write protection. If it is dropped or killed, the kernel lets all writers continue, and the
/// record is lost.
#[derive(Debug)]
pub struct Synchronous {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Synchronous {
    /// Starts to track all blocks of `ram` with the guest stopped. No page counts as written. `before` copies pages of
    /// the checkpoints that [`Synchronous::begin`] starts. `device` is as in [`super::Asynchronous::attach`].
    ///
    /// # Errors
    /// [`TrackError`]; QEMU is unchanged. In particular, a private mapping of a file that is not on tmpfs or hugetlbfs
    /// cannot be tracked.
    pub fn attach(
        injector: Injector,
        ram: Arc<GuestRam>,
        _stopped: &mut Stopped<'_>,
        before: impl BeforeWrite + 'static,
        device: Option<RawFd>,
    ) -> Result<Self, TrackError> {
        let failed = |source: io::Error| TrackError::Thread { source };
        let mut registered = Registered::attach(injector, &ram, SYNCHRONOUS, device)?;
        // From now on QEMU has no descriptor of it, so the death of this process unblocks QEMU.
        registered.remote.keep_only_ours()?;
        let end_request = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        let shared = Arc::new(Shared {
            registered: RwLock::new(registered),
            ram: RwLock::new(ram),
            flight: Mutex::new(Flight::default()),
            faults: AtomicU64::new(0),
            copied_for_writers: AtomicU64::new(0),
            end_request,
        });
        let (thread_shared, mut before) = (Arc::clone(&shared), before);
        let thread = thread::Builder::new().name("write faults".into()).spawn(move || {
            let result = thread_shared.serve_faults(&mut before);
            if let Err(e) = &result {
                // Writers must not wait for a thread that has ended.
                tracing::error!("cannot serve the guest's write faults; tracking ends: {e}");
                thread_shared.registered().release();
            }
            result
        });
        let tracker = Self { thread: Some(thread.map_err(failed)?), shared };
        tracker.shared.registered().arm()?;
        tracker.prove()?;
        Ok(tracker)
    }

    /// Tests that a write to a page of each block is reported as a fault.
    fn prove(&self) -> Result<(), TrackError> {
        let blocks = self.shared.registered().areas.len();
        for index in 0..blocks {
            // The lock must not be held during the write, which waits until the thread has served its fault.
            let (process, test_byte) = {
                let registered = self.shared.registered();
                (registered.remote.process(), registered.byte_for_test_write(index)?)
            };
            let Some(TestByte { address, value }) = test_byte else { continue };
            let id = || self.shared.registered().areas.get(index).map(|area| area.id.clone()).unwrap_or_default();
            let faults_before = self.faults();
            memory::write(process, address, &[value]).map_err(|source| TrackError::Proof { id: id(), source })?;
            if self.faults() == faults_before {
                return Err(TrackError::Unproven { id: id(), address });
            }
        }
        Ok(())
    }

    /// Begins a checkpoint of these pages (offsets in each block) with the guest stopped. Each page is passed once,
    /// either to [`BeforeWrite`] or by [`Synchronous::claim`].
    ///
    /// # Errors
    /// [`TrackError::InFlight`] when the previous checkpoint has not been copied completely.
    pub fn begin(&self, pages: &[PageRuns], _stopped: &mut Stopped<'_>) -> Result<(), TrackError> {
        self.check_all_copied()?;
        let registered = self.shared.registered();
        let sizes = registered.areas.iter().map(|area| (area.total.end - area.total.start, area.page_bytes));
        let mut flight = lock(&self.shared.flight);
        let previous = std::mem::replace(&mut *flight, Flight::new(sizes, pages));
        // A fault that was served late has removed the protection of its page. The page was not written since, because
        // the guest is stopped, so it is protected again.
        for (area, runs) in registered.areas.iter().zip(flight.allowed_before(previous)) {
            registered.protect(area, &addresses(area, &runs), true)?;
        }
        Ok(())
    }

    /// Takes the next pages of the checkpoint in flight: of one block, at most `max` bytes, at least one page. The
    /// caller copies them and then drops the claim. `None` if all pages are taken.
    #[must_use]
    pub fn claim(&self, max: u64) -> Option<Claim> {
        let (block, runs) = lock(&self.shared.flight).claim(max)?;
        Some(Claim { shared: Arc::clone(&self.shared), block: BlockId(block), runs })
    }

    /// Checks that all pages of the checkpoint in flight have been copied.
    ///
    /// # Errors
    /// [`TrackError::InFlight`].
    pub fn check_all_copied(&self) -> Result<(), TrackError> {
        match lock(&self.shared.flight).uncopied_bytes() {
            0 => Ok(()),
            bytes => Err(TrackError::InFlight { bytes }),
        }
    }

    /// Returns the number of write faults.
    #[must_use]
    pub fn faults(&self) -> u64 {
        self.shared.faults.load(Ordering::Relaxed)
    }

    /// Returns the number of pages that were copied because of a write fault.
    #[must_use]
    pub fn copied_for_writers(&self) -> u64 {
        self.shared.copied_for_writers.load(Ordering::Relaxed)
    }

    fn check_thread(&self) -> Result<(), TrackError> {
        match &self.thread {
            Some(thread) if !thread.is_finished() => Ok(()),
            _ => Err(TrackError::Thread { source: io::Error::other("the tracker's thread has ended") }),
        }
    }

    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(&self.shared.ram.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Tracker for Synchronous {
    fn peek(&mut self) -> Result<Dirty, TrackError> {
        self.check_thread()?;
        let registered = self.shared.registered();
        let written = registered.written(Rearm::Unchecked)?;
        let written: Vec<_> = registered.areas.iter().zip(written).map(|(area, runs)| area.offsets(runs)).collect();
        Ok(Dirty { zero: vec![PageRuns::new(); written.len()], written })
    }

    fn collect(&mut self, _stopped: &mut Stopped<'_>) -> Result<Dirty, TrackError> {
        self.check_thread()?;
        self.check_all_copied()?;
        let registered = self.shared.registered();
        lock(&self.shared.flight).start_recording_allowed();
        let written = registered.written(Rearm::Unchecked)?;
        let given_back = registered.given_back()?;
        for (area, (written, given_back)) in registered.areas.iter().zip(written.iter().zip(&given_back)) {
            registered.protect(area, &written.union(given_back).bridged(MAX_BRIDGED_GAP_BYTES), true)?;
        }
        registered.dirty(&self.ram(), written, given_back, EarlierHoles::new())
    }

    fn adjust(&mut self, ram: Arc<GuestRam>, _stopped: &mut Stopped<'_>) -> Result<(), TrackError> {
        self.check_thread()?;
        self.check_all_copied()?;
        self.shared.registered.write().unwrap_or_else(PoisonError::into_inner).adjust(&ram)?;
        *self.shared.ram.write().unwrap_or_else(PoisonError::into_inner) = ram;
        Ok(())
    }

    fn detach(mut self) -> Result<(), TrackError> {
        self.finish();
        Ok(())
    }
}

impl Synchronous {
    /// Lets all waiting writers continue, and ends the thread.
    fn finish(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.registered().release();
        // A write to an eventfd fails only if its counter is at its limit of 2^64 - 2.
        let _ = rustix::io::write(&self.shared.end_request, &1u64.to_ne_bytes());
        if thread.join().is_err() {
            tracing::error!("the thread that serves the guest's write faults panicked");
        }
    }
}

impl Drop for Synchronous {
    fn drop(&mut self) {
        self.finish();
    }
}
