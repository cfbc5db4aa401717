//! Errors of protecting a guest: of one checkpoint, of the start of a tracking session, and of the protector.

use crate::epochs::EpochError;
use crate::fill::FillError;
use crate::known_store::KnownStoreError;
use crate::owned::{EndGuestError, OwnedElsewhere, StoreGone};
use crate::pause::PauseError;
use crate::target::TargetError;
use rekindle_disk::control::ControlError;
use rekindle_kernel::inject::InjectError;
use rekindle_memory::ram::GuestRamError;
use rekindle_memory::tracker::TrackError;
use rekindle_qemu::adopt::{AdoptError, Obstacle};
use rekindle_qemu::block::BlockError;
use rekindle_qemu::devices::DeviceStateError;
use rekindle_qemu::qmp::QmpError;
use rekindle_qemu::ramblock::LocateError;
use rekindle_store::StoreError;
use rekindle_vm::overlays::OverlayDisksError;
use std::error::Error;
use std::path::PathBuf;

/// Why a VM is not protected, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum ProtectError {
    /// The VM does not exist or does not run.
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What this host knows of the VM's store cannot be read, or requires a key.
    #[error(transparent)]
    KnownStore(#[from] KnownStoreError),
    /// The store that this host has written is missing.
    #[error(transparent)]
    StoreGone(#[from] StoreGone),
    /// Checkpoints cannot be abandoned because their store exists.
    #[error(
        "{store}: the store of VM {name} exists, with {checkpoints} checkpoints; nothing was abandoned: leave out \
         --abandon-old-checkpoints, or choose another --store"
    )]
    StoreExists {
        name: String,
        store: String,
        /// Number of checkpoints in the store.
        checkpoints: usize,
    },
    /// Another host has the guest; its processes on this host were ended.
    #[error(transparent)]
    OwnedElsewhere(#[from] OwnedElsewhere),
    /// Another host has the guest, and its processes on this host could not be ended.
    #[error("another host has the guest, and its QEMU or disk servers here could not be ended")]
    EndGuest(#[from] EndGuestError),
    /// The guest's memory cannot be read, or is written past the page tables.
    #[error("{name} cannot be protected:\n{}", listed(.obstacles))]
    Obstacles { name: String, obstacles: Vec<Obstacle> },
    /// The guest writes to a disk that has no epochs.
    #[error(
        "{name} writes to {disk}, whose content would not match its memory after a restore: let Rekindle serve it \
         (server = true), make it read-only, snapshot it with --disk-hook COMMAND, or, if a file system that is newer \
         than the guest's memory does no harm, use --disk crash-consistent"
    )]
    WritableDisk { name: String, disk: String },
    /// The guest's disks are on overlays, and this protector would not record them.
    #[error(
        "{name}'s disks are on overlays of an earlier `rekindle protect`, without which its image is an older disk: \
         protect it with --disk overlays, or merge them first: rekindle detach {name}"
    )]
    OnOverlays { name: String },
    /// Overlays are only for machines that Rekindle did not design.
    #[error(
        "{name}: --disk overlays is for a guest whose QEMU Rekindle did not start; use `server = true` for its disks"
    )]
    OwnDisks { name: String },
    /// The overlays are full, or nearly.
    #[error(
        "{name} is not protected any more: the file system of its overlays is full, so they were merged into its images. \
         It runs on, and the checkpoints before have no disk. Make room, or use --overlay-dir, and protect it again"
    )]
    OverlaysFull { name: String },
    /// Pre-copy would miss writes.
    #[error(
        "{name} has {disk} open with O_DIRECT, so that the kernel writes its memory past the page tables that pre-copy \
         tracks: use --policy cow, or another `cache` for the disk"
    )]
    DirectIo { name: String, disk: String },
    /// Copy-on-write would miss writes.
    #[error(
        "{name}: the server of disk {disk} writes its memory without waiting for a page to be copied, which --policy \
         cow requires: use --policy precopy or basic"
    )]
    CowDiskServer { name: String, disk: String },
    /// The guest's network output cannot be held.
    #[error(
        "{name} was attached, not started by Rekindle: its network output cannot be held until a checkpoint is \
         committed; protect it without --output-commit"
    )]
    AttachedOutput { name: String },
    /// The guest's network output cannot be held.
    #[error("{name}: {problem}; protect it without --output-commit")]
    UnheldOutput { name: String, problem: String },
    /// The guest's RAM cannot be write-protected.
    #[error(
        "{name}: its RAM is on DAX ({}), where Linux does not resolve the page faults of write protection: its \
         processors would hang in the kernel; put `ram.dir` on a tmpfs", path.display()
    )]
    Dax {
        name: String,
        /// The guest's RAM file.
        path: PathBuf,
    },
    /// Tracking or QEMU fails repeatedly.
    #[error("{name} cannot be protected")]
    Tracking {
        name: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Why a session or a checkpoint failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
    #[error(transparent)]
    Pause(#[from] PauseError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Ram(#[from] GuestRamError),
    #[error(transparent)]
    Track(#[from] TrackError),
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("its memory is still being loaded from a checkpoint: {why}")]
    Filling { why: String },
    #[error(transparent)]
    Fill(#[from] FillError),
    /// A disk server failed.
    #[error(transparent)]
    DiskEpoch(#[from] EpochError),
    /// QEMU's own disks cannot take part.
    #[error(transparent)]
    Overlays(#[from] OverlayDisksError),
    #[error("cannot determine which pages of the guest's memory a disk server has written")]
    DiskServer(#[from] ControlError),
    /// A disk server has reported an address outside of the guest's RAM.
    #[error("a disk server has written {bytes} bytes at {address:#x}, which is not in the guest's RAM")]
    OutsideRam { address: u64, bytes: u64 },
    #[error("the guest's network output cannot be held until a checkpoint is committed")]
    HoldOutput(#[source] QmpError),
    /// The user's command for the disks failed.
    #[error("the disk hook `{command}` failed: {why}")]
    DiskHook { command: String, why: String },
    /// A RAM block was added, removed or resized.
    #[error("the guest's memory or devices have changed: {0}")]
    Reshaped(String),
    /// A page that the guest was about to write could not be copied.
    #[error("a page could not be copied before the guest changed it")]
    NotCopied(#[source] GuestRamError),
}

impl CheckpointError {
    /// Returns whether libvirt has not passed a command on: its daemon may be stopped.
    pub(crate) fn is_of_libvirt(&self) -> bool {
        match self {
            Self::Qmp(e)
            | Self::HoldOutput(e)
            | Self::Overlays(OverlayDisksError::Qmp(e) | OverlayDisksError::Block(BlockError::Qmp(e)))
            | Self::Pause(PauseError::Qmp(e) | PauseError::Devices(DeviceStateError::Qmp(e)))
            | Self::Ram(GuestRamError::Locate(LocateError::Qmp(e)))
            | Self::Adopt(AdoptError::Qmp(e)) => e.is_of_libvirt(),
            _ => false,
        }
    }
}

/// Why no tracking session could be started.
pub(crate) enum TrackingStartError {
    /// The guest cannot be protected with these settings.
    Fatal(ProtectError),
    /// Another attempt may succeed.
    Retryable(CheckpointError),
}

impl From<CheckpointError> for TrackingStartError {
    fn from(e: CheckpointError) -> Self {
        Self::Retryable(e)
    }
}

impl From<ProtectError> for TrackingStartError {
    fn from(e: ProtectError) -> Self {
        Self::Fatal(e)
    }
}

impl ProtectError {
    /// Returns the error for a VM whose tracking has failed because of `source`.
    pub(crate) fn tracking(name: &str, source: impl Error + Send + Sync + 'static) -> Self {
        Self::Tracking { name: name.into(), source: Box::new(source) }
    }
}

fn listed(obstacles: &[Obstacle]) -> String {
    obstacles.iter().map(|obstacle| format!("  - {}: {}", obstacle.what, obstacle.why)).collect::<Vec<_>>().join("\n")
}
