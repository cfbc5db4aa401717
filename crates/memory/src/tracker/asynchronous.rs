//! Tracking by asynchronous write protection: the kernel itself removes the protection of a page at the first write.

use super::registered::{ASYNCHRONOUS, Registered, leftovers};
use super::{Dirty, TrackError, Tracker};
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
        match registered.arm().and_then(|()| registered.prove()) {
            Ok(()) => Ok(Self { registered, ram }),
            Err(e) => {
                registered.release();
                registered.remote.close()?;
                Err(e)
            }
        }
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
        Ok(Some(Self { registered, ram }))
    }
}

impl Tracker for Asynchronous {
    fn peek(&mut self) -> Result<Dirty, TrackError> {
        let written = self.registered.written(Rearm::No)?;
        let written: Vec<_> =
            self.registered.areas.iter().zip(written).map(|(area, runs)| area.offsets(runs)).collect();
        Ok(Dirty { zero: vec![PageRuns::new(); written.len()], written })
    }

    fn collect(&mut self, _stopped: &mut Stopped<'_>) -> Result<Dirty, TrackError> {
        let written = self.registered.written(Rearm::Yes)?;
        let given_back = self.registered.given_back()?;
        for (area, runs) in self.registered.areas.iter().zip(&given_back) {
            self.registered.protect(area, runs, true)?;
        }
        self.registered.dirty(&self.ram, written, given_back)
    }

    fn adjust(&mut self, ram: Arc<GuestRam>, _stopped: &mut Stopped<'_>) -> Result<(), TrackError> {
        self.registered.adjust(&ram)?;
        self.ram = ram;
        Ok(())
    }

    fn detach(self) -> Result<(), TrackError> {
        self.registered.release();
        Ok(self.registered.remote.close()?)
    }
}
