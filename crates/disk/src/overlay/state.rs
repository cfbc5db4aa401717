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
    /// A seal has failed, so that it is unknown what is durable: nothing is sealed any more.
    #[serde(default)]
    pub seal_failed: bool,
    /// The first mark may have taken place: until then the image has all writes, and the overlays have none.
    #[serde(default = "may_be_marked_if_unrecorded")]
    pub may_be_marked: bool,
    /// The QEMU process that the overlays are for. Only in this process is a device without overlays one whose
    /// overlays were merged; in any other it is on an image that is older than the disk.
    #[serde(default)]
    pub owner: String,
    /// Set for the disk of a libvirt domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<OverlayFence>,
    /// The checkpoints of earlier epochs have lost their disk because another program may have merged newer writes into it. The
    /// floor is not lower than this, which is for the error.
    #[serde(default)]
    pub changed_by_others: u64,
    /// Epochs that no checkpoint and no disk has any more, because a restore went back to an epoch before them.
    #[serde(default)]
    pub dead: Vec<DeadEpochs>,
}

/// States of earlier versions do not record it.
fn may_be_marked_if_unrecorded() -> bool {
    true
}

/// The files below the newest overlay have no write permission, because users of libvirt would otherwise merge into
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayFence {
    /// Permissions of the image without the fence.
    pub image_mode: u32,
    /// Set until a restored guest, which is no domain of libvirt, uses the overlays.
    pub is_in_force: bool,
}

/// Epochs that a restore has discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadEpochs {
    pub first: u64,
    pub last: u64,
}

impl SlotRecord for OverlayState {
    const MAGIC: &'static [u8; 8] = b"RKOVERLY";
    const FORMAT: u32 = FORMAT;
}

impl OverlayState {
    /// Returns the state of a disk that gets its first overlay. `image`: QEMU's name of it.
    #[must_use]
    pub fn new(image: String, bytes: u64) -> Self {
        let (floor, merged) = (FIRST_EPOCH, FIRST_EPOCH);
        Self {
            format: FORMAT,
            disk: Uuid::new_v4(),
            image,
            bytes,
            sealed: 0,
            floor,
            merged,
            seal_failed: false,
            may_be_marked: false,
            owner: String::new(),
            fence: None,
            changed_by_others: 0,
            dead: Vec::new(),
        }
    }

    /// Returns whether image and overlays still have the disk of this epoch's mark.
    #[must_use]
    pub fn has_epoch(&self, epoch: u64) -> bool {
        (self.floor..=self.sealed).contains(&epoch) && !self.is_dead(epoch)
    }

    /// Returns whether a restore has discarded the epoch.
    #[must_use]
    pub fn is_dead(&self, epoch: u64) -> bool {
        self.dead.iter().any(|dead| (dead.first..=dead.last).contains(&epoch))
    }

    /// Notes that the image has all writes of the epochs up to `up_to`, except dead ones, which are never merged. So the floor
    /// rises only to the newest epoch that is not dead, and the checkpoint before the dead ones keeps its disk. Our own merges
    /// have raised the floor already; a merge by a user of libvirt has not.
    pub fn note_merged(&mut self, up_to: u64) {
        let mut newest = up_to;
        while let Some(dead) = self.dead.iter().find(|dead| (dead.first..=dead.last).contains(&newest)) {
            newest = dead.first - 1;
        }
        self.floor = self.floor.max(newest);
        self.merged = self.merged.max(up_to);
    }

    /// Notes that another program may have merged writes of the epochs up to `newest`, to which the guest writes, into the image
    /// or into an older overlay. The overlays above hide them from the guest and from each later checkpoint.
    pub fn note_changed_by_others(&mut self, newest: u64) {
        self.floor = self.floor.max(newest);
        self.changed_by_others = self.changed_by_others.max(newest);
    }

    /// Returns whether another program may have changed the disk of this epoch's mark.
    #[must_use]
    pub fn is_changed_by_others(&self, epoch: u64) -> bool {
        epoch < self.changed_by_others
    }

    /// Goes back to the disk of `epoch`: the guest writes to epoch `fresh` from now on, and those between are dead.
    pub fn restart_at(&mut self, epoch: u64, fresh: u64, owner: String) {
        self.dead.retain(|dead| dead.last > self.merged);
        if epoch + 1 < fresh {
            self.dead.push(DeadEpochs { first: epoch + 1, last: fresh - 1 });
        }
        self.owner = owner;
    }
}
