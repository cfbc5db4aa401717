//! The fence of a libvirt domain's disk: the files below the newest overlay have no write permission.
//!
//! Users of libvirt merge overlays, too: `virsh blockcommit vda --active --pivot` copies all of them into the image,
//! and a checkpoint that needs the image as it was would be restored on a wrong disk. QEMU opens a file anew when it
//! begins to write it, as another user than root, so without write permission QEMU and libvirt reject each merge into
//! it, and each start on the image alone. What is open for writing already stays so.
//!
//! A QEMU of libvirt's has nodes of its own for the block devices of its domain. The permissions of such a node keep this
//! QEMU alone from opening the device. So the device is also read-only for all, except while QEMU writes to it: before the
//! first overlay, and in a merge.

use super::OverlayDisksError;
use super::device::{self, DeviceIdentity};
use super::exposure::Exposure;
use rekindle_kernel::block_device;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

const ALL_WRITE_BITS: u32 = 0o222;
const OWNER_WRITE_BIT: u32 = 0o200;
/// Bit of the capability with which a process writes files without write permission.
const CAP_DAC_OVERRIDE: u32 = 1;

fn mode_of(path: &Path) -> Result<u32, OverlayDisksError> {
    Ok(fs::metadata(path).map_err(OverlayDisksError::io(path))?.permissions().mode() & 0o7777)
}

fn set_mode(path: &Path, mode: u32) -> Result<(), OverlayDisksError> {
    if mode_of(path)? == mode {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(OverlayDisksError::io(path))
}

/// The image of a libvirt domain's disk.
#[derive(Debug, Clone)]
pub(super) struct FencedImage {
    image: PathBuf,
    qemu: u32,
    device: Option<FencedDevice>,
}

/// An image that is a block device.
#[derive(Debug, Clone)]
struct FencedDevice {
    /// The node that its QEMU opens.
    node: PathBuf,
    identity: DeviceIdentity,
}

impl FencedImage {
    /// `qemu`: the domain's QEMU.
    pub fn new(image: &Path, device: Option<DeviceIdentity>, qemu: u32) -> Self {
        let device = device.map(|identity| FencedDevice { node: node_of(image, qemu), identity });
        Self { image: image.to_owned(), qemu, device }
    }

    fn opened_file(&self) -> &Path {
        self.device.as_ref().map_or(&self.image, |device| &device.node)
    }

    pub fn is_device(&self) -> bool {
        self.device.is_some()
    }

    /// Counts from now on how often a program opens the image for writing.
    pub fn watch(&self) -> Result<Exposure, OverlayDisksError> {
        Exposure::start(self.opened_file(), self.qemu)
    }

    /// As [`FencedImage::watch`], for an overlay above the image.
    pub fn watch_overlay(&self, overlay: &Path) -> Result<Exposure, OverlayDisksError> {
        Exposure::start(overlay, self.qemu)
    }

    /// Returns whether QEMU could open the image for writing.
    pub fn is_open_to_jobs(&self) -> Result<bool, OverlayDisksError> {
        let is_read_only = || block_device::is_read_only(&self.image).map_err(OverlayDisksError::io(&self.image));
        Ok(is_open(self.opened_file())? && !(self.is_device() && is_read_only()?))
    }

    /// Keeps QEMU from opening the image for writing. It may have it open.
    pub fn close_to_jobs(&self) -> Result<(), OverlayDisksError> {
        close(self.opened_file())
    }

    /// Keeps all programs from opening the image for writing. QEMU must not write to it any more.
    pub fn close(&self) -> Result<(), OverlayDisksError> {
        self.close_to_jobs()?;
        self.close_device()
    }

    /// Makes the image read-only for all programs if it is a block device. Data that was written to it before is durable then.
    pub fn close_device(&self) -> Result<(), OverlayDisksError> {
        self.set_device(true)
    }

    fn set_device(&self, read_only: bool) -> Result<(), OverlayDisksError> {
        let Some(device) = &self.device else { return Ok(()) };
        // The name may be another device's meanwhile, which is none of ours.
        device::check_same(&self.image, Some(&device.identity))?;
        set_device(&self.image, read_only)
    }

    pub fn open(&self) -> Result<(), OverlayDisksError> {
        self.set_device(false)?;
        open(self.opened_file())
    }

    /// Gives the image the permissions that it had before the fence. QEMU may be writing to it.
    pub fn remove(&self, mode: u32) -> Result<(), OverlayDisksError> {
        self.set_device(false)?;
        remove(self.opened_file(), mode)
    }

    /// Returns the permissions of an image without a fence.
    pub fn mode_without(&self) -> Result<u32, OverlayDisksError> {
        mode_of(self.opened_file())
    }
}

/// Returns the path of the node by which a QEMU opens a device.
fn node_of(image: &Path, qemu: u32) -> PathBuf {
    // A symbolic link would be followed to the node of this process.
    let resolved = image.canonicalize().unwrap_or_else(|_| image.to_owned());
    Path::new("/proc").join(format!("{qemu}/root")).join(resolved.strip_prefix("/").unwrap_or(&resolved))
}

/// Returns whether a QEMU has a node of its own for a device.
pub(super) fn has_own_node(image: &Path, qemu: u32) -> io::Result<bool> {
    let (node, shared) = (fs::metadata(node_of(image, qemu))?, fs::metadata(image)?);
    Ok(node.rdev() == shared.rdev() && (node.dev(), node.ino()) != (shared.dev(), shared.ino()))
}

fn set_device(device: &Path, read_only: bool) -> Result<(), OverlayDisksError> {
    let set = block_device::is_read_only(device).and_then(|is_read_only| match is_read_only == read_only {
        true => Ok(()),
        false => block_device::set_read_only(device, read_only),
    });
    set.map_err(OverlayDisksError::io(device))
}

fn is_device(path: &Path) -> Result<bool, OverlayDisksError> {
    Ok(fs::metadata(path).map_err(OverlayDisksError::io(path))?.file_type().is_block_device())
}

/// Returns whether a program could write to an image, which has no QEMU.
pub(super) fn is_image_open(image: &Path) -> Result<bool, OverlayDisksError> {
    if is_device(image)? {
        return Ok(!block_device::is_read_only(image).map_err(OverlayDisksError::io(image))?);
    }
    is_open(image)
}

/// Removes the fence of an image for a QEMU that is none of libvirt's.
pub(super) fn remove_from_image(image: &Path, mode: u32) -> Result<(), OverlayDisksError> {
    if is_device(image)? { set_device(image, false) } else { remove(image, mode) }
}

/// Removes all write permissions of a file.
pub(super) fn close(path: &Path) -> Result<(), OverlayDisksError> {
    set_mode(path, mode_of(path)? & !ALL_WRITE_BITS)
}

/// Gives the owner write permission.
pub(super) fn open(path: &Path) -> Result<(), OverlayDisksError> {
    set_mode(path, mode_of(path)? | OWNER_WRITE_BIT)
}

/// Gives a file the permissions that it had before the fence.
fn remove(path: &Path, mode: u32) -> Result<(), OverlayDisksError> {
    set_mode(path, mode | OWNER_WRITE_BIT)
}

/// Returns whether a file has a write permission.
pub(super) fn is_open(path: &Path) -> Result<bool, OverlayDisksError> {
    Ok(mode_of(path)? & ALL_WRITE_BITS != 0)
}

/// Returns whether a process may write files without write permission.
pub(super) fn is_ignored_by(pid: u32) -> io::Result<bool> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let capabilities = field("CapEff:").and_then(|text| u64::from_str_radix(text, 16).ok());
    // A process without the field is taken for one that has the capability.
    Ok(capabilities.is_none_or(|set| set & (1 << CAP_DAC_OVERRIDE) != 0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_fence_is_closed_opened_and_removed_without_other_changes() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("image");
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o664)).unwrap();
        let before = mode_of(&path).unwrap();
        close(&path).unwrap();
        assert_eq!((mode_of(&path).unwrap(), is_open(&path).unwrap()), (0o444, false));
        open(&path).unwrap();
        assert_eq!((mode_of(&path).unwrap(), is_open(&path).unwrap()), (0o644, true));
        remove(&path, before).unwrap();
        assert_eq!(mode_of(&path).unwrap(), 0o664);
        // A file that the owner could not write before must be writable for a merge.
        remove(&path, 0o444).unwrap();
        assert_eq!(mode_of(&path).unwrap(), 0o644);
        close(&directory.path().join("none")).unwrap_err();
    }
}
