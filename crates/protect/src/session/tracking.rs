//! The tracker of a session: it records which pages the guest writes. A *session* is a protector's work with one QEMU.
//!
//! | tracker | used |
//! |---|---|
//! | [`Tracking::Asynchronous`] | normally |
//! | [`Tracking::Filling`] | while a restore still fills the memory |
//! | [`Tracking::Synchronous`] | with policy `cow` |

use super::cow::CopiesForWrites;
use crate::error::CheckpointError;
use crate::policy::Policy;
use crate::write_record::LockedWriteRecord;
use rekindle_kernel::inject::Injector;
use rekindle_memory::ram::GuestRam;
use rekindle_memory::tracker::{self, Asynchronous, Dirty, Filling, Synchronous, TrackError, Tracker};
use rekindle_qemu::stopped::Stopped;
use std::os::fd::RawFd;
use std::sync::Arc;

/// How tracking starts: it depends on how much of the guest's memory earlier checkpoints cover.
pub(crate) enum InitialTracking {
    /// No usable record exists: the next checkpoint contains all memory.
    Fresh,
    /// All pages that an earlier protector collected were committed, so its tracking can continue.
    Continue,
    /// A restore still fills the memory, and the pager records writes. `all_committed`: all pages that were collected
    /// from that record were committed.
    Filling { record: Box<LockedWriteRecord>, all_committed: bool },
}

pub(super) enum Tracking {
    /// The kernel removes the protection of a written page; the guest does not wait.
    Asynchronous(Asynchronous),
    /// The write record of a restore's pager.
    Filling(Box<Filling>),
    /// The guest waits at its first write to a page until the page is copied.
    Synchronous { tracker: Synchronous, copies: CopiesForWrites },
}

/// A tracker that has just started.
pub(super) struct StartedTracking {
    pub tracking: Tracking,
    /// The tracker's record contains all writes since the newest checkpoint.
    pub is_incremental: bool,
}

impl Tracking {
    /// Starts a tracker for a guest that is stopped. `device`: the descriptor number of `/dev/userfaultfd` in QEMU, if
    /// QEMU may not create a userfaultfd itself.
    pub fn start(
        policy: Policy,
        initial: &InitialTracking,
        injector: Injector,
        ram: &Arc<GuestRam>,
        stopped: &mut Stopped<'_>,
        device: Option<RawFd>,
    ) -> Result<StartedTracking, CheckpointError> {
        let ram = Arc::clone(ram);
        match (policy, initial) {
            (Policy::Cow, _) => {
                let copies = CopiesForWrites::default();
                let callback = copies.clone().into_callback();
                let tracker = Synchronous::attach(injector, ram, stopped, callback, device)?;
                Ok(StartedTracking { tracking: Self::Synchronous { tracker, copies }, is_incremental: false })
            }
            (_, InitialTracking::Filling { record, all_committed }) => {
                let why = "its pager keeps no record of what is written (Linux 6.7 or newer can)";
                let tracker = Filling::attach(injector, ram, |id| record.fill.is_paged(id), stopped, device)?
                    .ok_or_else(|| CheckpointError::Filling { why: why.into() })?;
                Ok(StartedTracking { tracking: Self::Filling(Box::new(tracker)), is_incremental: *all_committed })
            }
            (_, InitialTracking::Continue) => {
                if let Some(tracker) = Asynchronous::resume(injector, Arc::clone(&ram), stopped)? {
                    return Ok(StartedTracking { tracking: Self::Asynchronous(tracker), is_incremental: true });
                }
                tracker::close_leftovers(injector).map_err(TrackError::from)?;
                Self::start_fresh(injector, ram, stopped, device)
            }
            (_, InitialTracking::Fresh) => Self::start_fresh(injector, ram, stopped, device),
        }
    }

    fn start_fresh(
        injector: Injector,
        ram: Arc<GuestRam>,
        stopped: &mut Stopped<'_>,
        device: Option<RawFd>,
    ) -> Result<StartedTracking, CheckpointError> {
        let tracker = Asynchronous::attach(injector, ram, stopped, device)?;
        Ok(StartedTracking { tracking: Self::Asynchronous(tracker), is_incremental: false })
    }

    /// Does what the next [`Tracking::collect`] need not do while the guest is stopped.
    pub fn prepare(&mut self) -> Result<(), TrackError> {
        match self {
            Self::Asynchronous(tracker) => tracker.prepare(),
            Self::Filling(_) | Self::Synchronous { .. } => Ok(()),
        }
    }

    /// Returns the pages written since the last call, and resets the record.
    pub fn collect(&mut self, stopped: &mut Stopped<'_>) -> Result<Dirty, TrackError> {
        match self {
            Self::Asynchronous(tracker) => tracker.collect(stopped),
            Self::Filling(tracker) => tracker.collect(stopped),
            Self::Synchronous { tracker, .. } => tracker.collect(stopped),
        }
    }

    /// Removes all traces of the tracker from QEMU.
    pub fn detach(self) -> Result<(), TrackError> {
        match self {
            Self::Asynchronous(tracker) => tracker.detach(),
            Self::Filling(tracker) => tracker.detach(),
            Self::Synchronous { tracker, .. } => tracker.detach(),
        }
    }
}
