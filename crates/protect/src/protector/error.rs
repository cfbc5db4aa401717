//! Errors of a protector.

use crate::owned::{EndGuestError, OwnedElsewhere, StoreGone};
use crate::target::TargetError;
use rekindle_qemu::adopt::Obstacle;
use rekindle_store::StoreError;
use std::path::PathBuf;

/// Why a VM is not protected, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum ProtectError {
    /// The VM does not exist or does not run.
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store that this host has written is missing.
    #[error(transparent)]
    StoreGone(#[from] StoreGone),
    /// Checkpoints cannot be abandoned because their store exists.
    #[error(
        "{store}: the store of VM {name} exists, with {checkpoints} checkpoints; nothing was abandoned: leave out \
         --abandon-old-checkpoints, or choose another --store"
    )]
    StillThere {
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
        "{name} writes to {disk}, whose content would not match its memory after a restore: let Rekindle serve it (server = \
         true), make it read-only, snapshot it with --disk-hook COMMAND, or, if a file system that is newer than the guest's memory \
         does no harm, use --disk crash-consistent"
    )]
    Disk { name: String, disk: String },
    /// Pre-copy would miss writes.
    #[error(
        "{name} has {disk} open with O_DIRECT, so that the kernel writes its memory past the page tables that pre-copy tracks: use --policy cow, or \
         another `cache` for the disk"
    )]
    Direct { name: String, disk: String },
    /// Copy-on-write would miss writes.
    #[error(
        "{name}: the server of disk {disk} writes its memory without waiting for a page to be copied, which --policy cow requires: use \
         --policy precopy or basic"
    )]
    DiskServer { name: String, disk: String },
    /// The guest's network output cannot be held.
    #[error(
        "{name} was attached, not started by Rekindle: its network output cannot be held until a checkpoint is committed; protect it without \
         --output-commit"
    )]
    Output { name: String },
    /// The guest's RAM cannot be write-protected.
    #[error(
        "{name}: its RAM is on DAX ({}), where Linux does not resolve the page faults of write protection: \
         its processors would hang in the kernel; put `ram.dir` on a tmpfs", path.display()
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

impl ProtectError {
    pub(crate) fn session(name: &str, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Tracking { name: name.into(), source: Box::new(source) }
    }
}

fn listed(obstacles: &[Obstacle]) -> String {
    obstacles.iter().map(|obstacle| format!("  - {}: {}", obstacle.what, obstacle.why)).collect::<Vec<_>>().join("\n")
}
