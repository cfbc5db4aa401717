//! Keeps other programs from migrating or saving a guest whose disks are on overlays.
//!
//! A migrated or saved guest would continue on the images alone, which are older disks than its memory. QEMU has no
//! command to forbid a migration, but some image formats do: as long as QEMU has a node of format `vdi`, it rejects
//! each migration, save and internal snapshot, with an error that contains the node's name. So an empty `vdi` image is
//! opened that no device uses. It is in memory, handed over as a descriptor: QEMU needs access to no further file.
//! Checkpoints do not migrate the guest.

use super::BlockError;
use super::graph::BlockGraph;
use crate::qmp::Qmp;
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// The name of the node, which is what a user reads in QEMU's error.
const NODE: &str = "rekindle-detach-first";
/// Length of the disk, and of its only block.
const DISK_BYTES: u32 = 1 << 20;
const SECTOR_BYTES: u32 = 512;
/// Entry of a block that has no data.
const UNALLOCATED: u32 = u32::MAX;

/// Makes QEMU reject migrations and saves until [`permit`].
///
/// # Errors
/// When QEMU rejects the image, for example because it was started with `-only-migratable`.
pub fn forbid(qmp: &mut Qmp) -> Result<(), BlockError> {
    #[derive(Deserialize)]
    struct AddedDescriptor {
        #[serde(rename = "fdset-id")]
        set: u64,
    }
    if BlockGraph::read(qmp)?.has_node(NODE) {
        return Ok(());
    }
    let image = image().map_err(|source| BlockError::Memory { source })?;
    let AddedDescriptor { set } = qmp.execute_with_fd("add-fd", json!({}), image.as_fd())?;
    let file = json!({"driver": "file", "filename": format!("/dev/fdset/{set}"), "read-only": true});
    let node = json!({"driver": "vdi", "node-name": NODE, "read-only": true, "file": file});
    let added = qmp.execute::<Value>("blockdev-add", node);
    // The node has a duplicate of the descriptor.
    qmp.execute::<Value>("remove-fd", json!({"fdset-id": set}))?;
    Ok(added.map(drop)?)
}

/// Lets QEMU migrate and save the guest again. It is no error if it may already.
///
/// # Errors
/// When QEMU does not answer.
pub fn permit(qmp: &mut Qmp) -> Result<(), BlockError> {
    if BlockGraph::read(qmp)?.has_node(NODE) {
        qmp.execute::<Value>("blockdev-del", json!({"node-name": NODE}))?;
    }
    Ok(())
}

/// Returns whether this reason of QEMU's, why it rejects a migration, is the one of [`forbid`].
#[must_use]
pub fn is_forbidden_by_overlays(reason: &str) -> bool {
    reason.contains(NODE)
}

/// Makes an empty image in memory. The descriptor is read-only: QEMU requires the access mode that it opens.
fn image() -> io::Result<OwnedFd> {
    let memory = File::from(memfd_create("rekindle-no-migration", MemfdFlags::CLOEXEC)?);
    (&memory).write_all(&empty_vdi())?;
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Returns an empty image in VirtualBox's format 1.1: a header of one sector, and the map of its blocks.
fn empty_vdi() -> Vec<u8> {
    let mut image = vec![0; 2 * SECTOR_BYTES as usize];
    let fields: [(usize, u32); 11] = [
        (0x40, 0xbeda_107f),       // signature
        (0x44, 0x0001_0001),       // version
        (0x48, 0x180),             // bytes of the header below
        (0x4c, 1),                 // type: dynamic
        (0x154, SECTOR_BYTES),     // where the map is
        (0x158, 2 * SECTOR_BYTES), // where the data would be
        (0x168, SECTOR_BYTES),
        (0x170, DISK_BYTES),
        (0x178, DISK_BYTES), // bytes of a block
        (0x180, 1),          // blocks
        (SECTOR_BYTES as usize, UNALLOCATED),
    ];
    for (offset, value) in fields {
        if let Some(field) = image.get_mut(offset..offset + 4) {
            field.copy_from_slice(&value.to_le_bytes());
        }
    }
    image
}
