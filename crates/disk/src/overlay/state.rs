//! The durable state of a disk's overlays.

use crate::slots::SlotRecord;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Version of the state.
pub const FORMAT: u32 = 1;
/// The epoch before the first mark, whose writes the guest made to the image itself.
pub const FIRST_EPOCH: u64 = 1;

/// The durable state of a disk's overlays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayState {
    /// [`FORMAT`] of this state.
    pub format: u32,
    /// The disk's identity as long as it has overlays.
    pub disk: Uuid,
    /// QEMU's name of the image: a file name, or a `json:` description.
    pub image: String,
    /// Length of the disk.
    pub bytes: u64,
    /// The newest epoch that is durable with all epochs before it; 0 if there is none.
    pub sealed: u64,
    /// The image may have writes of epochs up to this.
    pub floor: u64,
    /// The image has all writes of epochs up to this.
    pub merged: u64,
}

impl SlotRecord for OverlayState {
    const MAGIC: &'static [u8; 8] = b"RKOVERLY";
    const FORMAT: u32 = FORMAT;
}

impl OverlayState {
    /// Returns the state of a disk that gets its first overlay.
    #[must_use]
    pub fn new(image: String, bytes: u64) -> Self {
        let (floor, merged) = (FIRST_EPOCH, FIRST_EPOCH);
        Self { format: FORMAT, disk: Uuid::new_v4(), image, bytes, sealed: 0, floor, merged }
    }

    /// Returns whether image and overlays still have the disk of this epoch's mark.
    #[must_use]
    pub fn has_epoch(&self, epoch: u64) -> bool {
        (self.floor..=self.sealed).contains(&epoch)
    }
}
