//! Why a VM is not protected.

use crate::owned::{GiveUpError, Gone, Over};
use crate::target::TargetError;
use rekindle_qemu::adopt::Obstacle;
use rekindle_store::StoreError;
use std::path::PathBuf;

/// Why a VM is not, or no longer, protected.
#[derive(Debug, thiserror::Error)]
pub enum ProtectError {
    /// No such VM, or it does not run.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store that this host has written is not there.
    #[error(transparent)]
    Gone(#[from] Gone),
    /// Checkpoints are to be abandoned that are there.
    #[error(
        "{store}: the store of VM {name} is there, with {checkpoints} checkpoints; nothing was abandoned: leave out \
         --abandon-old-checkpoints, or choose another --store"
    )]
    StillThere {
        /// The VM.
        name: String,
        /// The store.
        store: String,
        /// How many checkpoints it has.
        checkpoints: usize,
    },
    /// Another host has the guest; what ran of it here was ended.
    #[error(transparent)]
    Over(#[from] Over),
    /// Another host has the guest, and what runs of it here could not be ended.
    #[error("another host has the guest, and what runs of it here could not be ended")]
    GiveUp(#[from] GiveUpError),
    /// Its memory is written where nobody can see it, or not to be read.
    #[error("{name} cannot be protected:\n{}", listed(.obstacles))]
    Obstacles {
        /// The VM.
        name: String,
        /// What stands in the way.
        obstacles: Vec<Obstacle>,
    },
    /// It writes disks.
    #[error(
        "{name} writes to {disk}, whose content will not belong to its memory after a restore: let Rekindle serve it (server = \
         true), make it read-only, snapshot it with --disk-hook COMMAND, or, if a file system that is newer than the guest's memory \
         does no harm, say --disk crash-consistent"
    )]
    Disk {
        /// The VM.
        name: String,
        /// The disk.
        disk: String,
    },
    /// Pre-copy would miss writes.
    #[error(
        "{name} has {disk} open with O_DIRECT, past the page tables through which pre-copy sees writes: use --policy cow, or \
         another `cache` for the disk"
    )]
    Direct {
        /// The VM.
        name: String,
        /// The disk.
        disk: String,
    },
    /// Copy-on-write would miss writes.
    #[error(
        "{name}: the server of {disk} writes its memory, and does not wait until a page was copied, as --policy cow needs it: use \
         --policy precopy or basic"
    )]
    Served {
        /// The VM.
        name: String,
        /// The disk.
        disk: String,
    },
    /// What it sends cannot be held.
    #[error(
        "{name} was attached to, and not started by Rekindle: what it sends cannot be held until a checkpoint counts; protect it without \
         --output-commit"
    )]
    Output {
        /// The VM.
        name: String,
    },
    /// Its memory cannot be tracked without harm.
    #[error(
        "{name}: its RAM is memory that outlives the host's kernel (DAX: {}), and Linux does not resolve page faults there while \
         they are tracked: its processors would hang in the kernel; put `ram.dir` on a tmpfs to have it protected", path.display()
    )]
    DirectMemory {
        /// The VM.
        name: String,
        /// The file of its RAM.
        path: PathBuf,
    },
    /// Tracking or QEMU fails again and again.
    #[error("{name} cannot be protected")]
    Session {
        /// The VM.
        name: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl ProtectError {
    pub(crate) fn session(name: &str, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Session { name: name.into(), source: Box::new(source) }
    }
}

fn listed(obstacles: &[Obstacle]) -> String {
    obstacles.iter().map(|one| format!("  - {}: {}", one.what, one.why)).collect::<Vec<_>>().join("\n")
}
