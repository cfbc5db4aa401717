//! Tracking by asynchronous write protection: the kernel lifts it and remembers.

use super::registered::{ASYNCHRONOUS, Registered, leftovers};
use super::{Dirty, TrackError, Tracker};
use crate::ram::GuestRam;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::pagemap::Rearm;
use rekindle_kernel::userfault::remote::Remote;
use rekindle_qemu::stopped::Stopped;
use std::os::fd::RawFd;
use std::sync::Arc;

/// See [the module](super). Dropped without [`Tracker::detach`], QEMU keeps its descriptor, and writes go on being
/// recorded for [`Asynchronous::resume`].
#[derive(Debug)]
pub struct Asynchronous {
    registered: Registered,
    ram: Arc<GuestRam>,
}

impl Asynchronous {
    /// Begin to track all blocks of `ram` with the guest stopped. Everything counts as not written from here on, but for
    /// a page of each block with which it was proved that tracking works.
    ///
    /// `device`: the number at which QEMU has `/dev/userfaultfd`, where it may not open a userfaultfd by itself.
    ///
    /// # Errors
    /// [`TrackError`]; QEMU is left as it was.
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

    /// Go on with what an earlier process of ours left in QEMU: what was written since *its* last
    /// [`Tracker::collect`] is still known. Whoever calls this must know that what was collected then has arrived.
    ///
    /// `None`: nothing was left, or it does not cover all blocks of `ram`. Then everything counts as written: see
    /// [`Dirty::everything`], and [`Asynchronous::attach`].
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
            // Unprotected: a block was added, or the range belongs to another descriptor.
            Err(TrackError::Scan { .. }) => return Ok(None),
            Err(e) => return Err(e),
        }
        registered.prove()?;
        Ok(Some(Self { registered, ram }))
    }
}

impl Tracker for Asynchronous {
    fn look(&mut self) -> Result<Dirty, TrackError> {
        let written = self.registered.written(Rearm::No)?;
        let written: Vec<_> =
            self.registered.areas.iter().zip(written).map(|(area, runs)| area.offsets(runs)).collect();
        Ok(Dirty { zero: vec![Vec::new(); written.len()], written })
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
