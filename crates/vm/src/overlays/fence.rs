//! The fence of a libvirt domain's disk: the files below the newest overlay have no write permission.
//!
//! Users of libvirt merge overlays, too: `virsh blockcommit vda --active --pivot` copies all of them into the image,
//! and a checkpoint that needs the image as it was would be restored on a wrong disk. QEMU opens a file anew when it
//! begins to write it, as another user than root, so without write permission QEMU and libvirt reject each merge into
//! it, and each start on the image alone. What is open for writing already stays so.

use super::OverlayDisksError;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

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

/// Removes all write permissions of a file.
pub(super) fn close(path: &Path) -> Result<(), OverlayDisksError> {
    set_mode(path, mode_of(path)? & !ALL_WRITE_BITS)
}

/// Gives the owner write permission.
pub(super) fn open(path: &Path) -> Result<(), OverlayDisksError> {
    set_mode(path, mode_of(path)? | OWNER_WRITE_BIT)
}

/// Gives a file the permissions that it had before the fence.
pub(super) fn remove(path: &Path, mode: u32) -> Result<(), OverlayDisksError> {
    set_mode(path, mode | OWNER_WRITE_BIT)
}

/// Returns the permissions of a file without a fence.
pub(super) fn mode_without(path: &Path) -> Result<u32, OverlayDisksError> {
    mode_of(path)
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
        let before = mode_without(&path).unwrap();
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
