//! Why the RAM of a source that Rekindle did not start cannot be given to a destination.

use crate::ram_transfer::RamTransfer;
use rekindle_kernel::inject::InjectError;
use rekindle_memory::missing::PagerError;
use rekindle_memory::moving::MoveError;
use rekindle_memory::ram::GuestRamError;
use rekindle_memory::tracker::TrackError;
use rekindle_qemu::qmp::QmpError;
use std::io;

/// Why a source's RAM cannot be given to a destination.
#[derive(Debug, thiserror::Error)]
pub enum RamTransferError {
    #[error("the source QEMU has no RAM block {id}")]
    NoBlock { id: String },
    #[error(
        "RAM block {id} is private memory in huge pages, which can be copied, but not moved in place: leave out --in-place"
    )]
    HugePages { id: String },
    #[error(
        "RAM block {id}: its copy needs {} MiB in huge pages of {} KiB, and {} MiB are left; {remedy}",
        requested >> 20, page >> 10, left >> 20
    )]
    NoHugePages {
        id: String,
        /// Bytes requested.
        requested: u64,
        /// Bytes left.
        left: u64,
        /// Bytes of a huge page.
        page: u64,
        remedy: String,
    },
    #[error(
        "RAM block {id} is private memory over {file}, which has content: a page that the guest has not written is the file's; \
         start the guest with share=on, or without this file"
    )]
    PrivateFile {
        id: String,
        /// The file's name as the kernel reports it.
        file: String,
    },
    #[error("RAM block {id} is a device or begins inside its file, so another QEMU cannot map it as a whole")]
    NoWholeFile { id: String },
    #[error(
        "{transfer} the guest's RAM needs {} MiB, but the host and the control groups of process {pid} have only {} MiB \
         left; free some memory, or raise the limit",
        needed >> 20, available >> 20
    )]
    NoRoom {
        transfer: RamTransfer,
        /// The process whose control groups pay for it.
        pid: u32,
        needed: u64,
        available: u64,
    },
    #[error("cannot determine how much memory is available")]
    UnknownRoom(#[source] io::Error),
    #[error("cannot open, make or write the file of RAM block {id}")]
    File {
        id: String,
        #[source]
        source: io::Error,
    },
    #[error("the RAM has not been copied while the guest ran")]
    NotCopied,
    #[error("the destination's RAM has not been prepared for the move")]
    NotPrepared,
    #[error("pages of the RAM have not been moved to the new QEMU, and the guest waits where it needs one")]
    NotMoved,
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    #[error(transparent)]
    Track(#[from] TrackError),
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Move(#[from] MoveError),
    #[error(transparent)]
    Pager(#[from] PagerError),
}
