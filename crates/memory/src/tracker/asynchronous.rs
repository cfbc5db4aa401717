//! Tracking by asynchronous write protection: the kernel itself removes the protection of a page at the first write.

use super::registered::{ASYNCHRONOUS, EarlierHoles, Registered, leftovers};
use super::{Dirty, TrackError, Tracker, UndrainedDirty};
use crate::ram::GuestRam;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::pagemap::Rearm;
use rekindle_kernel::userfault::remote::Remote;
use rekindle_pages::PageRuns;
use rekindle_qemu::stopped::Stopped;
use std::os::fd::RawFd;
use std::sync::Arc;

/// A tracker by asynchronous write protection. If it is dropped without [`Tracker::detach`], QEMU keeps its own
/// descriptor, and writes are still recorded for [`Asynchronous::resume`].
#[derive(Debug)]
pub struct Asynchronous {
    registered: Registered,
    ram: Arc<GuestRam>,
    /// Found by [`Tracker::prepare`]; empty after a collection.
    earlier_holes: EarlierHoles,
}

impl Asynchronous {
    /// Starts to track all blocks of `ram` with the guest stopped. All pages count as not written, except one page of
    /// each block, which is written to test the tracking.
    ///
    /// `device` is QEMU's descriptor of `/dev/userfaultfd`, if QEMU may not open a userfaultfd itself.
    ///
    /// # Errors
    /// [`TrackError`]; QEMU is unchanged.
    pub fn attach(
        injector: Injector,
        ram: Arc<GuestRam>,
        _stopped: &mut Stopped<'_>,
        device: Option<RawFd>,
    ) -> Result<Self, TrackError> {
        let registered = Registered::attach(injector, &ram, ASYNCHRONOUS, device)?;
        let tracker = Self { registered, ram, earlier_holes: EarlierHoles::new() };
        match tracker.registered.arm().and_then(|()| tracker.registered.prove()) {
            Ok(()) => Ok(tracker),
            Err(e) => tracker.detach().and(Err(e)),
        }
    }

    /// Starts to track all blocks of `ram` while the guest runs. Also returns all of their pages, to be copied after the
    /// drain. The tracking is not tested yet: [`Asynchronous::prove`] does that when the guest is stopped.
    ///
    /// # Errors
    /// [`TrackError`]; QEMU is unchanged.
    pub fn attach_running(
        injector: Injector,
        ram: Arc<GuestRam>,
        device: Option<RawFd>,
    ) -> Result<(Self, UndrainedDirty), TrackError> {
        let registered = Registered::attach(injector, &ram, ASYNCHRONOUS, device)?;
        let tracker = Self { registered, ram, earlier_holes: EarlierHoles::new() };
        // Pages that are populated later than this are also written later than the protection, and so recorded.
        match tracker.registered.arm().and_then(|()| Ok(Dirty::everything(&tracker.ram)?)) {
            Ok(everything) => Ok((tracker, UndrainedDirty::new(everything))),
            Err(e) => tracker.detach().and(Err(e)),
        }
    }

    /// Returns the pages written since the last collection, and resets the record, while the guest runs.
    ///
    /// # Errors
    /// As for [`Tracker::collect`].
    pub fn collect_running(&mut self) -> Result<UndrainedDirty, TrackError> {
        self.earlier_holes.clear();
        let mut written = self.registered.written(Rearm::Yes)?;
        let given_back = self.registered.given_back()?;
        for ((area, given_back), written) in self.registered.areas.iter().zip(&given_back).zip(&mut written) {
            self.registered.protect(area, given_back, true)?;
            // Such a page is not known to be zero: the guest may have written it before it was protected again.
            *written = written.union(given_back);
        }
        let known_zero = vec![PageRuns::new(); written.len()];
        self.registered.dirty(&self.ram, written, known_zero, EarlierHoles::new()).map(UndrainedDirty::new)
    }

    /// Tests that writes are recorded: writes one byte of each block, unchanged. The page of that byte counts as
    /// written.
    ///
    /// # Errors
    /// [`TrackError::Unproven`]: no page that this tracker has reported can be trusted to be all that was written.
    pub fn prove(&self, _stopped: &mut Stopped<'_>) -> Result<(), TrackError> {
        self.registered.prove()
    }

    /// Continues a record that an earlier process left in QEMU: it contains the writes since that process's last
    /// [`Tracker::collect`]. The caller must have ensured that the result of that collection is stored.
    ///
    /// Returns `None` if there is no record, or if it does not cover all blocks of `ram`. Then all pages count as
    /// written: use [`Dirty::everything`] and [`Asynchronous::attach`].
    ///
    /// # Errors
    /// [`TrackError`].
    pub fn resume(
        injector: Injector,
        ram: Arc<GuestRam>,
        _stopped: &mut Stopped<'_>,
    ) -> Result<Option<Self>, TrackError> {
        let found = leftovers(injector.process())?;
        let [only] = found.as_slice() else { return Ok(None) };
        if only.features != ASYNCHRONOUS {
            return Ok(None);
        }
        let registered = Registered::take_over(Remote::take(injector, *only)?, &ram)?;
        match registered.written(Rearm::No) {
            Ok(_) => {}
            // Some memory is not protected: a block was added, or the range belongs to another descriptor.
            Err(TrackError::Scan { .. }) => return Ok(None),
            Err(e) => return Err(e),
        }
        registered.prove()?;
        Ok(Some(Self { registered, ram, earlier_holes: EarlierHoles::new() }))
    }
}

impl Tracker for Asynchronous {
    fn peek(&mut self) -> Result<Dirty, TrackError> {
        let written = self.registered.written(Rearm::No)?;
        let written: Vec<_> =
            self.registered.areas.iter().zip(written).map(|(area, runs)| area.offsets(runs)).collect();
        Ok(Dirty { zero: vec![PageRuns::new(); written.len()], written })
    }

    fn prepare(&mut self) -> Result<(), TrackError> {
        self.earlier_holes = self.registered.earlier_holes(&self.ram)?;
        Ok(())
    }

    fn collect(&mut self, _stopped: &mut Stopped<'_>) -> Result<Dirty, TrackError> {
        let written = self.registered.written(Rearm::Yes)?;
        let given_back = self.registered.given_back()?;
        for (area, runs) in self.registered.areas.iter().zip(&given_back) {
            self.registered.protect(area, runs, true)?;
        }
        self.registered.dirty(&self.ram, written, given_back, std::mem::take(&mut self.earlier_holes))
    }

    fn adjust(&mut self, ram: Arc<GuestRam>, _stopped: &mut Stopped<'_>) -> Result<(), TrackError> {
        self.earlier_holes.clear();
        self.registered.adjust(&ram)?;
        self.ram = ram;
        Ok(())
    }

    fn detach(self) -> Result<(), TrackError> {
        self.registered.release();
        Ok(self.registered.remote.close()?)
    }
}
