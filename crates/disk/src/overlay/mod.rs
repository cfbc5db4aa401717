//! The epochs of a disk that QEMU itself serves.
//!
//! An *epoch* is the time between two marks; mark N ends epoch N and belongs to checkpoint N. The first mark puts an
//! *overlay* on the disk, a qcow2 file that receives all further writes (`qemu::block`), and each later mark another
//! one. So the disk of checkpoint N is the image with the overlays of epochs up to N:
//!
//! ```text
//!            mark 1         mark 2         mark 3
//!   image ──────┬── epoch-2 ────┬── epoch-3 ────┬── epoch-4 ──> the guest writes here
//!   (epoch 1)   checkpoint 1    checkpoint 2    checkpoint 3
//! ```
//!
//! Once checkpoint N is committed, the overlays of epochs up to N are merged into the image and deleted. Then the image
//! is newer than each checkpoint before N; the *floor* records that before the first byte is merged.
//!
//! | module | contents |
//! |---|---|
//! | [`state`] | the durable state: what is sealed, merged, and the floor |
//! | [`directory`] | the directory with that state and the overlay files |
//! | [`plan`] | what to do next, decided from the state and from what QEMU reports |

pub mod directory;
pub mod plan;
pub mod state;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    #[error("overlays {}: {doing}", path.display())]
    Io {
        path: PathBuf,
        /// The step that failed.
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("overlays {}: in use by another process of Rekindle", path.display())]
    InUse { path: PathBuf },
    #[error(
        "overlays {}: its state is damaged, so it is not known which of them belong to the disk; the image alone is an \
         older disk. Keep both, and restore them from a copy", path.display()
    )]
    DamagedState { path: PathBuf },
    #[error(
        "overlays {}: format {found} of a newer Rekindle, and this one supports up to {}", path.display(), state::FORMAT
    )]
    NewerFormat { path: PathBuf, found: u32 },
    #[error(
        "overlays {}: it has {name} already; merge the overlays of the disk, or move the file elsewhere", path.display()
    )]
    Occupied { path: PathBuf, name: String },
    #[error(
        "overlays {}: a sync of the disk has failed, so it is unknown which of its data is durable, and no checkpoint of \
         it is taken any more; check the storage, then end the overlays and begin again", path.display()
    )]
    SealFailed { path: PathBuf },
    #[error(
        "overlays {}: the disk of epoch {epoch} is not there any more: newer writes are merged into the image, or a \
         restore has discarded it. Restore the newest checkpoint; after `rekindle detach`, no checkpoint has this disk",
        path.display()
    )]
    NoEpoch { path: PathBuf, epoch: u64 },
    #[error("overlays {}: epoch {epoch} has no file {name}, and the image does not have its writes", path.display())]
    MissingEpoch { path: PathBuf, epoch: u64, name: String },
}
