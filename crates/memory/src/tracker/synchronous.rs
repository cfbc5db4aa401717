//! Tracking by synchronous write protection: a writer waits until we have copied the page, if it is needed.
//!
//! At the pause everything is protected. The first write to a page since then comes to a thread of ours: if the page
//! belongs to the checkpoint that is being copied, and has not been copied yet, that is done first; then the write goes on,
//! and the page is in the record of the next checkpoint. A second write costs nothing.

use super::flight::{Flight, Wanted};
use super::registered::{Area, Registered, SYNCHRONOUS};
use super::{Dirty, TrackError, Tracker};
use crate::pages;
use crate::ram::GuestRam;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::memory;
use rekindle_kernel::pagemap::Rearm;
use rekindle_kernel::userfault::{Event, UserfaultError};
use rekindle_qemu::stopped::Stopped;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, JoinHandle};

/// Protecting a run by itself costs as much as protecting this many pages in one go (measured: 2 µs a run, 10 to 20 ns a
/// page; `docs/attach.md`). Between two runs everything is protected already.
const BRIDGE: u64 = 128 * memory::PAGE_SIZE as u64;

/// What is done before a page of the checkpoint in flight may be written: copy it. The guest waits for that.
pub trait BeforeWrite: Send {
    /// The page `page` (offsets) of block `block` is about to be written.
    ///
    /// The write goes on afterwards in any case: where copying fails, remember that this checkpoint is void.
    fn before_write(&mut self, ram: &GuestRam, block: usize, page: Range<u64>);
}

impl<F: FnMut(&GuestRam, usize, Range<u64>) + Send> BeforeWrite for F {
    fn before_write(&mut self, ram: &GuestRam, block: usize, page: Range<u64>) {
        self(ram, block, page);
    }
}

/// What the serving thread shares with the rest.
#[derive(Debug)]
struct Shared {
    /// Written only when blocks come and go, with the guest stopped.
    registered: RwLock<Registered>,
    ram: RwLock<Arc<GuestRam>>,
    flight: Mutex<Flight>,
    /// Writers that waited for us.
    faults: AtomicU64,
    /// Pages copied for a writer.
    copied: AtomicU64,
    /// Ends the thread when it is written.
    end: OwnedFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pages to be copied by who claimed them. Dropped, they count as copied, and writers that wait for them go on.
#[derive(Debug)]
pub struct Claim {
    shared: Arc<Shared>,
    /// The block.
    pub block: usize,
    /// The pages, as offsets in the block.
    pub runs: Vec<Range<u64>>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.shared.copied(self.block, &self.runs, false);
    }
}

/// Let pages (offsets) of a block be written. The flight is held, so that no checkpoint begins between the decision and this.
fn allow(registered: &Registered, flight: &mut Flight, block: usize, runs: &[Range<u64>]) {
    flight.allowed(block, runs);
    let Some(area) = registered.areas.get(block) else { return };
    // A block that has just been unplugged has no writers any more.
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

    /// A write to `address` waits, or did: a fault may be served late, after a pause, when another one has let the page be written and it
    /// was protected again.
    fn fault(&self, address: u64, before: &mut dyn BeforeWrite) {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let registered = self.registered();
        let found = registered.areas.iter().enumerate().find(|(_, area)| area.total.contains(&address));
        let Some((block, area)) = found else { return };
        let offset = (address - area.total.start) / area.page * area.page;
        let page = offset..offset + area.page;
        let mut flight = lock(&self.flight);
        match flight.want(block, offset) {
            Wanted::Wait => {}
            Wanted::Free => allow(&registered, &mut flight, block, std::slice::from_ref(&page)),
            Wanted::Copy => {
                drop((flight, registered));
                let ram = Arc::clone(&self.ram.read().unwrap_or_else(PoisonError::into_inner));
                before.before_write(&ram, block, page.clone());
                self.copied.fetch_add(1, Ordering::Relaxed);
                // Another writer of the same page may have come meanwhile; this lets it go on as well.
                self.copied(block, std::slice::from_ref(&page), true);
            }
        }
    }

    /// These pages (offsets) of a block have been copied: who waits for them may write, and if `all`, everybody.
    fn copied(&self, block: usize, runs: &[Range<u64>], all: bool) {
        let registered = self.registered();
        let mut flight = lock(&self.flight);
        let waited = flight.copied(block, runs);
        allow(&registered, &mut flight, block, if all { runs } else { &waited });
    }

    fn serve(&self, before: &mut dyn BeforeWrite) -> io::Result<()> {
        // Of its own, so that nothing is locked while it waits.
        let waiting = self.registered().remote.userfault.as_fd().try_clone_to_owned()?;
        loop {
            let mut fds = [PollFd::new(&waiting, PollFlags::IN), PollFd::new(&self.end, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            let [_, end] = &fds;
            if end.revents().contains(PollFlags::IN) {
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
                    self.fault(address, before);
                }
            }
        }
    }
}

/// See [the module](super). Dropped or killed, the kernel lets all writers go on, and nothing is known any more.
#[derive(Debug)]
pub struct Synchronous {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Synchronous {
    /// Begin to track all blocks of `ram` with the guest stopped. As [`super::Asynchronous::attach`], with `before` for the
    /// pages of the checkpoints that [`Synchronous::begin`] names.
    ///
    /// # Errors
    /// [`TrackError`]; QEMU is left as it was. A private block of a file that is not on tmpfs or hugetlbfs cannot be
    /// tracked this way.
    pub fn attach(
        injector: Injector,
        ram: Arc<GuestRam>,
        _stopped: &mut Stopped<'_>,
        before: impl BeforeWrite + 'static,
        device: Option<RawFd>,
    ) -> Result<Self, TrackError> {
        let failed = |source: io::Error| TrackError::Thread { source };
        let mut registered = Registered::attach(injector, &ram, SYNCHRONOUS, device)?;
        // From here on it is ours alone: our death frees QEMU.
        registered.remote.keep_only_ours()?;
        let end = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        let shared = Arc::new(Shared {
            registered: RwLock::new(registered),
            ram: RwLock::new(ram),
            flight: Mutex::new(Flight::default()),
            faults: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            end,
        });
        let (served, mut before) = (Arc::clone(&shared), before);
        let thread = thread::Builder::new().name("write faults".into()).spawn(move || {
            let served_all = served.serve(&mut before);
            if let Err(e) = &served_all {
                // Writers must not wait for a thread that has ended.
                tracing::error!("cannot serve the guest's writes any more, tracking ends: {e}");
                served.registered().release();
            }
            served_all
        });
        let tracker = Self { thread: Some(thread.map_err(failed)?), shared };
        tracker.shared.registered().arm()?;
        tracker.prove()?;
        Ok(tracker)
    }

    /// As for the asynchronous kind, but a fault must come, too.
    fn prove(&self) -> Result<(), TrackError> {
        let blocks = self.shared.registered().areas.len();
        for index in 0..blocks {
            let (process, place) = {
                let registered = self.shared.registered();
                (registered.remote.process(), registered.page_for_proof(index)?)
            };
            let Some((address, byte)) = place else { continue };
            let id = || self.shared.registered().areas.get(index).map(|area| area.id.clone()).unwrap_or_default();
            let before = self.faults();
            memory::write(process, address, &[byte]).map_err(|source| TrackError::Proof { id: id(), source })?;
            if self.faults() == before {
                return Err(TrackError::Unproven { id: id(), address });
            }
        }
        Ok(())
    }

    /// Begin a checkpoint of these pages (offsets in each block) with the guest stopped: each is given to
    /// [`BeforeWrite`] or by [`Synchronous::claim`], once.
    ///
    /// # Errors
    /// [`TrackError::InFlight`] when the one before is not all copied.
    pub fn begin(&self, pages: &[Vec<Range<u64>>], _stopped: &mut Stopped<'_>) -> Result<(), TrackError> {
        self.landed()?;
        let registered = self.shared.registered();
        let sizes = registered.areas.iter().map(|area| (area.total.end - area.total.start, area.page));
        let mut flight = lock(&self.shared.flight);
        let before = std::mem::replace(&mut *flight, Flight::new(sizes, pages));
        // A fault that was served late has let its page be written again. Nobody has: the guest is stopped.
        for (area, runs) in registered.areas.iter().zip(flight.allowed_before(before)) {
            registered.protect(area, &addresses(area, &runs), true)?;
        }
        Ok(())
    }

    /// The next pages of the checkpoint in flight, of one block and at most `most` bytes (at least a page). Copy them, then
    /// drop the claim. `None`: all were given out.
    #[must_use]
    pub fn claim(&self, most: u64) -> Option<Claim> {
        let (block, runs) = lock(&self.shared.flight).claim(most)?;
        Some(Claim { shared: Arc::clone(&self.shared), block, runs })
    }

    /// That everything of the checkpoint in flight was copied.
    ///
    /// # Errors
    /// [`TrackError::InFlight`].
    pub fn landed(&self) -> Result<(), TrackError> {
        match lock(&self.shared.flight).left_bytes() {
            0 => Ok(()),
            bytes => Err(TrackError::InFlight { bytes }),
        }
    }

    /// How many writers have waited for us.
    #[must_use]
    pub fn faults(&self) -> u64 {
        self.shared.faults.load(Ordering::Relaxed)
    }

    /// How many pages were copied because somebody wanted to write them.
    #[must_use]
    pub fn copied_for_writers(&self) -> u64 {
        self.shared.copied.load(Ordering::Relaxed)
    }

    fn alive(&self) -> Result<(), TrackError> {
        match &self.thread {
            Some(thread) if !thread.is_finished() => Ok(()),
            _ => Err(TrackError::Thread { source: io::Error::other("the thread has ended; attach again") }),
        }
    }

    fn ram(&self) -> Arc<GuestRam> {
        Arc::clone(&self.shared.ram.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Tracker for Synchronous {
    fn look(&mut self) -> Result<Dirty, TrackError> {
        self.alive()?;
        let registered = self.shared.registered();
        let written = registered.written(Rearm::Unchecked)?;
        let written: Vec<_> = registered.areas.iter().zip(written).map(|(area, runs)| area.offsets(runs)).collect();
        Ok(Dirty { zero: vec![Vec::new(); written.len()], written })
    }

    fn collect(&mut self, _stopped: &mut Stopped<'_>) -> Result<Dirty, TrackError> {
        self.alive()?;
        self.landed()?;
        let registered = self.shared.registered();
        lock(&self.shared.flight).collecting();
        let written = registered.written(Rearm::Unchecked)?;
        let given_back = registered.given_back()?;
        for (area, (written, given_back)) in registered.areas.iter().zip(written.iter().zip(&given_back)) {
            registered.protect(area, &pages::bridged(&pages::union(written, given_back), BRIDGE), true)?;
        }
        registered.dirty(&self.ram(), written, given_back)
    }

    fn adjust(&mut self, ram: Arc<GuestRam>, _stopped: &mut Stopped<'_>) -> Result<(), TrackError> {
        self.alive()?;
        self.landed()?;
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
    /// Let all writers go on, and end the thread.
    fn finish(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.registered().release();
        // An eventfd takes it unless it was written 2^64 times.
        let _ = rustix::io::write(&self.shared.end, &1u64.to_ne_bytes());
        if thread.join().is_err() {
            tracing::error!("the thread that serves the guest's writes panicked");
        }
    }
}

impl Drop for Synchronous {
    fn drop(&mut self) {
        self.finish();
    }
}
