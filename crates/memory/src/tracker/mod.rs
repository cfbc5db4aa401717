//! Which pages of a guest's RAM were written.
//!
//! The record is the kernel's: a page that is not write-protected by our userfaultfd was written since it last was. Two
//! kinds of protection:
//!
//! - [`Asynchronous`]: the kernel lifts the protection itself at the first write, about 1 µs. Nothing of ours need run, so
//!   the descriptor may stay in QEMU when we end, and goes on recording.
//! - [`Synchronous`]: the writer waits for us, some 10 µs and more, and we may copy the page before it is written (HydraVM,
//!   section on copy-on-write). Protection of a descriptor is of one kind only, and a range belongs to one descriptor; but the
//!   record is the same, so the synchronous kind tracks for the next checkpoint too. Its descriptor is ours alone: if we
//!   die, the kernel lets every writer go on.
//!
//! **DAX.** Where no page is, write protection of shared memory puts a marker into the page table. A fault of a DAX file finds it in its
//! place, leaves it, and is tried again, for ever, in the kernel (Linux 6.12): the processor of a guest never comes back. So
//! RAM in such files is tracked by [`SoftDirty`] bits, which put nothing there.
//!
//! **Stopped guests.** A page that was pinned for a disk read before it was protected is written past the protection. So
//! arming and re-arming ask for a [`Stopped`]; looking does not.
//!
//! **Memory given back** (balloon, free page reporting). Private pages that were given back count as written. Of shared
//! memory the kernel keeps the protection where a page was punched out of the file, so it does not count as written: what
//! is not mapped is looked for in the file, and its holes are told in [`Dirty::zero`], unless
//! [`GuestRam::never_shrinking`]. (hugetlbfs does not tell holes; there, what is not mapped is told as written each time if
//! it cannot be told otherwise.) One case is not told: a page of shared memory that was given back and then only *read*, or
//! whose first write had just begun when the guest was stopped. It is zero, and is taken for what it was before. A guest
//! that gives a page back says that it does not need what is in it, and that it may find it unchanged.
//!
//! **Memory that still comes** (a restore that fills) belongs to the pager's descriptor: [`Filling`] reads the record of that.
//!
//! **Blocks that come and go** are not noticed here: ask [`GuestRam::changes`] at each stop, and [`Tracker::adjust`].

mod asynchronous;
mod filling;
mod flight;
mod registered;
mod soft_dirty;
mod synchronous;

pub use asynchronous::Asynchronous;
pub use filling::Filling;
pub use registered::{leftovers, sweep, trial};
pub use soft_dirty::SoftDirty;
pub use synchronous::{BeforeWrite, Claim, Synchronous};

use crate::pages;
use crate::ram::{GuestRam, GuestRamError};
use rekindle_kernel::pagemap::ScanError;
use rekindle_kernel::userfault::UserfaultError;
use rekindle_kernel::userfault::remote::RemoteError;
use rekindle_qemu::stopped::Stopped;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Why pages cannot be tracked.
#[derive(Debug, thiserror::Error)]
pub enum TrackError {
    /// No userfaultfd in QEMU.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// A block cannot be registered, protected or released.
    #[error("cannot track RAM block {id}")]
    Block {
        /// The block.
        id: String,
        /// Why.
        #[source]
        source: UserfaultError,
    },
    /// The page tables cannot be read.
    #[error("cannot read what was written to RAM block {id}")]
    Scan {
        /// The block.
        id: String,
        /// Why.
        #[source]
        source: ScanError,
    },
    /// The page tables cannot be opened at all.
    #[error(transparent)]
    Scanner(ScanError),
    /// A page was written, and that was not recorded.
    #[error(
        "tracking of RAM block {id} does not work on this host: a page was written at {address:#x}, and the kernel does \
         not tell"
    )]
    Unproven {
        /// The block.
        id: String,
        /// Where it was written.
        address: u64,
    },
    /// The page for the proof could not be read or written.
    #[error("cannot prove that RAM block {id} is tracked")]
    Proof {
        /// The block.
        id: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// There is no such block.
    #[error("QEMU has no RAM block {id}")]
    NoBlock {
        /// The block.
        id: String,
    },
    /// This kernel keeps no soft-dirty bits.
    #[error("this kernel keeps no soft-dirty bits: it was built without CONFIG_MEM_SOFT_DIRTY")]
    NoSoftDirty,
    /// Soft-dirty bits cannot be cleared.
    #[error("cannot clear the soft-dirty bits of process {pid}: run as root")]
    Clear {
        /// QEMU.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The block's file cannot be looked at.
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    /// Pages of the checkpoint before have not all been copied.
    #[error("{bytes} bytes of the checkpoint before have not been copied yet")]
    InFlight {
        /// How much.
        bytes: u64,
    },
    /// The pager has let go of a block that was tracked by its record.
    #[error("all of RAM block {id} is there, and its pager has ended its record of what was written: attach anew")]
    Filled {
        /// The block.
        id: String,
    },
    /// The guest gives back page after page of a block that still comes.
    #[error("the guest gave back pages of RAM block {id} whenever it was looked at; try again")]
    Restless {
        /// The block.
        id: String,
    },
    /// The thread that serves writers could not be started, or has ended.
    #[error("cannot serve the guest's writes")]
    Thread {
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What may have changed, for each block of the [`GuestRam`] that is tracked, in its order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Dirty {
    /// Pages that were written: read them.
    pub written: Vec<Vec<Range<u64>>>,
    /// Pages that are zero and may have been something else: they need not be read. Most of them were zero before.
    pub zero: Vec<Vec<Range<u64>>>,
}

impl Dirty {
    /// Everything: for a first checkpoint, or when nothing is known.
    ///
    /// # Errors
    /// As for [`GuestRam::populated`].
    pub fn everything(ram: &GuestRam) -> Result<Self, GuestRamError> {
        let written = ram.blocks().iter().map(|block| ram.populated(block)).collect::<Result<Vec<_>, _>>()?;
        let length = |block: &crate::ram::Block| block.used().end - block.address;
        let zero = ram.blocks().iter().zip(&written).map(|(block, there)| pages::complement(there, length(block)));
        Ok(Self { zero: zero.collect(), written })
    }

    /// How many bytes are to be read.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.written.iter().map(|runs| pages::bytes(runs)).sum()
    }
}

/// Dirty tracking of a running guest.
pub trait Tracker {
    /// What was written since the last [`Tracker::collect`], without forgetting it: what is found may go on being
    /// written. At any time.
    ///
    /// # Errors
    /// [`TrackError::Scan`], also when the protection is gone.
    fn look(&mut self) -> Result<Dirty, TrackError>;

    /// What was written since the last time, and begin anew.
    ///
    /// # Errors
    /// [`TrackError`]: then some pages may have been forgotten, and everything must be taken for written.
    fn collect(&mut self, stopped: &mut Stopped<'_>) -> Result<Dirty, TrackError>;

    /// Go on with these blocks: new ones are tracked from now on and count as not written, so take all of them for
    /// written once. What a [`Tracker`] tells is in the order of `ram` from here on.
    ///
    /// # Errors
    /// [`TrackError`]; then the old blocks are still tracked.
    fn adjust(&mut self, ram: Arc<GuestRam>, stopped: &mut Stopped<'_>) -> Result<(), TrackError>;

    /// End it, and leave no trace in QEMU: no protection, no registered range, no descriptor.
    ///
    /// # Errors
    /// [`TrackError::Remote`] when QEMU's own descriptor cannot be closed; everything else is undone then.
    fn detach(self) -> Result<(), TrackError>
    where
        Self: Sized;
}
