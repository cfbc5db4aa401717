//! Finding the pages of a guest's RAM that were written, for the next checkpoint or the last copy of a hand-over.
//!
//! The kernel keeps the record. A tracker protects all pages; the first write to a page removes its protection; so the
//! pages without protection were written. [`Tracker::collect`] returns them and protects them again.
//!
//! | tracker | for | what removes the protection | cost of a first write | when the tracker ends or dies |
//! |---|---|---|---|---|
//! | [`Asynchronous`] | most RAM | the kernel | 1 µs | the kernel continues to record: its userfaultfd may stay in QEMU |
//! | [`Synchronous`] | copy-on-write (HydraVM): a checkpoint whose pages are copied after the pause | the tracker, when it has copied the page | 10 µs or more | all writers continue, and the record is lost: only the tracker has the userfaultfd |
//! | [`Filling`] | RAM that a pager still fills after a restore | the kernel: it is the pager's protection | 1 µs | the kernel continues to record, also when the pager dies |
//! | [`SoftDirty`] | RAM in DAX files, for checks that fail safely | nothing is protected: the kernel sets a bit | | nothing stays in QEMU |
//!
//! A range of memory belongs to one userfaultfd, and each userfaultfd has one kind of protection. So only one tracker
//! can have a range at a time.
//!
//! What can go wrong, and what follows for the API:
//!
//! - **A disk read in flight.** A page that was pinned for the read before it was protected is written without a fault.
//!   So `collect` and `adjust` take a [`Stopped`]: when QEMU stops a guest, it *drains* it, that is, it waits for the
//!   disk I/O in flight. [`Tracker::peek`] protects nothing and works while the guest runs. So do
//!   [`Asynchronous::attach_running`] and [`Asynchronous::collect_running`], but their [`UndrainedDirty`] must be
//!   drained before its pages can be copied.
//! - **DAX.** Where a file has no page yet, write protection is a marker in the page table. A fault on a DAX file does
//!   not replace the marker, and the kernel repeats the fault endlessly (Linux 6.12): the guest's virtual processor
//!   hangs. Soft-dirty bits need no marker.
//! - **Memory that the guest gives back** (balloon, free page reporting). See the next section.
//! - **Added and removed blocks.** Trackers do not detect them: call [`GuestRam::changes`] at each stop, and
//!   [`Tracker::adjust`].
//!
//! # Memory given back
//!
//! | RAM | a page that was given back | consequence |
//! |---|---|---|
//! | private | loses its protection | counts as written |
//! | shared file | keeps its protection, although it is a hole of the file now | the file's holes are looked up, and listed in [`Dirty::zero`], unless [`GuestRam::never_shrinking`] |
//! | hugetlbfs, which does not report holes | as in a shared file | unmapped pages count as written each time, unless their number proves that all of them are holes |
//!
//! One case is missed: a page of a shared file that was given back and then only *read*, or whose first write had just
//! started when the guest was stopped. Such a page is zero, but counts as unchanged. That is correct for the guest:
//! when it gives a page back, it states that it does not need the content, and that it may find the content unchanged.
//! For the same reason the holes may be looked up before the guest is stopped ([`Tracker::prepare`]).

mod asynchronous;
mod filling;
mod flight;
mod registered;
mod running;
mod soft_dirty;
mod synchronous;

pub use asynchronous::Asynchronous;
pub use filling::Filling;
pub use registered::{check_userfaultfd, close_leftovers, leftovers};
pub use running::UndrainedDirty;
pub use soft_dirty::SoftDirty;
pub use synchronous::{BeforeWrite, Claim, Synchronous};

use crate::ram::{GuestRam, GuestRamError};
use rekindle_kernel::pagemap::ScanError;
use rekindle_kernel::userfault::UserfaultError;
use rekindle_kernel::userfault::remote::RemoteError;
use rekindle_pages::PageRuns;
use rekindle_qemu::stopped::Stopped;
use std::io;
use std::sync::Arc;

/// The reason why pages cannot be tracked.
#[derive(Debug, thiserror::Error)]
pub enum TrackError {
    /// No userfaultfd could be created in QEMU or taken from it.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// A block cannot be registered, protected or released.
    #[error("cannot track RAM block {id}")]
    Block {
        id: String,
        #[source]
        source: UserfaultError,
    },
    /// The page tables cannot be read.
    #[error("cannot read what was written to RAM block {id}")]
    Scan {
        id: String,
        #[source]
        source: ScanError,
    },
    /// The page map of QEMU cannot be opened.
    #[error(transparent)]
    Scanner(ScanError),
    /// A test write was not recorded.
    #[error("tracking of RAM block {id} does not work on this host: a test write at {address:#x} was not recorded")]
    Unproven {
        id: String,
        /// Address of the test write.
        address: u64,
    },
    /// The page for the test write could not be read or written.
    #[error("cannot test the tracking of RAM block {id}")]
    Proof {
        id: String,
        #[source]
        source: io::Error,
    },
    /// QEMU has no block of this name.
    #[error("QEMU has no RAM block {id}")]
    NoBlock { id: String },
    /// This kernel keeps no soft-dirty bits.
    #[error("this kernel keeps no soft-dirty bits: it was built without CONFIG_MEM_SOFT_DIRTY")]
    NoSoftDirty,
    /// Soft-dirty bits cannot be cleared.
    #[error("cannot clear the soft-dirty bits of process {pid}: run as root")]
    Clear {
        pid: u32,
        #[source]
        source: io::Error,
    },
    /// The block's file cannot be read.
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    /// The previous checkpoint has not been copied completely.
    #[error("{bytes} bytes of the previous checkpoint have not been copied yet")]
    InFlight {
        /// Bytes left to copy.
        bytes: u64,
    },
    /// The pager whose record was used has unregistered the block.
    #[error(
        "RAM block {id} is completely filled, and its pager has ended the record of writes; track it from the start"
    )]
    Filled { id: String },
    /// The guest gave back pages of the block during each attempt to read the record.
    #[error("the guest gives back pages of RAM block {id} too fast to read the record of writes; try again")]
    Restless { id: String },
    /// The thread that serves writers could not be started, or has ended.
    #[error("cannot serve the guest's writes")]
    Thread {
        #[source]
        source: io::Error,
    },
}

/// The pages that may have changed, for each block of the tracked [`GuestRam`], in its order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Dirty {
    /// Pages that were written, as offsets in the block.
    pub written: Vec<PageRuns>,
    /// Pages that are zero now and need not be read, as offsets in the block. Most of them were zero before.
    pub zero: Vec<PageRuns>,
}

impl Dirty {
    /// Returns all pages, for a first checkpoint or when there is no record.
    ///
    /// # Errors
    /// As for [`GuestRam::populated`].
    pub fn everything(ram: &GuestRam) -> Result<Self, GuestRamError> {
        let written = ram.blocks().iter().map(|block| ram.populated(block)).collect::<Result<Vec<_>, _>>()?;
        let length = |block: &crate::ram::Block| block.used().end - block.address;
        let zero = ram.blocks().iter().zip(&written).map(|(block, written)| written.complement(length(block)));
        Ok(Self { zero: zero.collect(), written })
    }

    /// Returns the bytes of the written pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.written.iter().map(PageRuns::bytes).sum()
    }
}

/// Tracking of the pages that a running guest writes.
pub trait Tracker {
    /// Returns the pages written since the last [`Tracker::collect`], without resetting the record. The guest may run,
    /// and write these pages again.
    ///
    /// # Errors
    /// [`TrackError::Scan`], also when the protection was removed.
    fn peek(&mut self) -> Result<Dirty, TrackError>;

    /// Does that part of the next [`Tracker::collect`] which can be done while the guest runs. Memory that the guest gives
    /// back after this may be reported by the collection after the next one.
    ///
    /// # Errors
    /// [`TrackError`]. The record is unchanged.
    fn prepare(&mut self) -> Result<(), TrackError> {
        Ok(())
    }

    /// Returns the pages written since the last call, and resets the record.
    ///
    /// # Errors
    /// [`TrackError`]. After an error a part of the record may be lost, and all pages count as written.
    fn collect(&mut self, stopped: &mut Stopped<'_>) -> Result<Dirty, TrackError>;

    /// Tracks the blocks of `ram` from now on, and reports in the order of `ram`. Added blocks count as not written, so
    /// the caller must copy all of their pages once.
    ///
    /// # Errors
    /// [`TrackError`]. After an error the old blocks are still tracked.
    fn adjust(&mut self, ram: Arc<GuestRam>, stopped: &mut Stopped<'_>) -> Result<(), TrackError>;

    /// Ends tracking and leaves no trace in QEMU: no protection, no registered range, no descriptor.
    ///
    /// # Errors
    /// [`TrackError::Remote`] when QEMU's own descriptor cannot be closed; everything else is undone then.
    fn detach(self) -> Result<(), TrackError>
    where
        Self: Sized;
}
