//! Block devices below overlays: which device a path is.
//!
//! The name of a device may be another device's after the next start of the host. So a checkpoint has what stays the same
//! as long as it is the same storage, as the kernel shows it in `/sys`:
//!
//! | device | identity |
//! |---|---|
//! | device mapper (LVM, multipath, dm-crypt), md | its UUID |
//! | SCSI, NVMe, virtio | its world-wide name, or its serial number, if that is the device's own |
//! | loop | the path of its file, and the offset in it |
//! | partition | its number, its start, and the identity of the disk |
//! | any other | the kernel's sequence number, which a device gets when its storage is attached, and the id of this start of the
//! host: so it is the same one only until it is detached or the host is started again |

use super::OverlayDisksError;
use rekindle_kernel::block_device;
use rekindle_kernel::process::boot_id;
use rustix::fs::{major, minor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Length of a sector in `/sys`.
const SECTOR_BYTES: u64 = 512;
/// Attributes that identify a device, with the name of their kind. The first that a device has counts.
const ATTRIBUTES: [(&str, &str); 6] = [
    ("dm", "dm/uuid"),
    ("md", "md/uuid"),
    ("wwid", "wwid"),
    ("wwid", "device/wwid"),
    ("serial", "serial"),
    ("serial", CONTROLLER_SERIAL),
];
const CONTROLLER_SERIAL: &str = "device/serial";

/// Identifies the storage of a block device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceIdentity {
    pub name: String,
    pub bytes: u64,
}

impl fmt::Display for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} bytes", self.name, self.bytes)
    }
}

impl DeviceIdentity {
    /// Identifies the device at a path; `None` for a regular file.
    pub fn of(path: &Path) -> Result<Option<Self>, OverlayDisksError> {
        let metadata = fs::metadata(path).map_err(OverlayDisksError::io(path))?;
        if !metadata.file_type().is_block_device() {
            return Ok(None);
        }
        let (major, minor) = (major(metadata.rdev()), minor(metadata.rdev()));
        let link = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let attributes = link.canonicalize().map_err(OverlayDisksError::io(&link))?;
        let sectors: Option<u64> = attribute(&attributes, "size").and_then(|text| text.parse().ok());
        let sectors = sectors.ok_or_else(|| invalid_data(&link))?;
        let name = match stable_name(&attributes) {
            Some(name) => name,
            None => {
                let sequence = sequence_number(&attributes).ok_or_else(|| invalid_data(&link))?;
                let boot = boot_id().map_err(OverlayDisksError::io(&link))?;
                format!("device {major}:{minor} with sequence number {sequence} of boot {boot}")
            }
        };
        Ok(Some(Self { name, bytes: sectors * SECTOR_BYTES }))
    }

    /// Returns whether `now` is the same storage, which may have grown.
    fn is_still(&self, now: &Self) -> bool {
        self.name == now.name && self.bytes <= now.bytes
    }
}

/// Checks that the image is the device that it was. `expected`: `None` for a regular file.
pub(super) fn check_same(image: &Path, expected: Option<&DeviceIdentity>) -> Result<(), OverlayDisksError> {
    let Some(expected) = expected else { return Ok(()) };
    let actual = DeviceIdentity::of(image)?;
    if actual.as_ref().is_some_and(|actual| expected.is_still(actual)) {
        return Ok(());
    }
    let actual = actual.map_or_else(|| "no block device".to_owned(), |actual| actual.to_string());
    Err(OverlayDisksError::OtherDevice { image: image.to_owned(), expected: expected.to_string(), actual })
}

/// Checks that this host does not use a block device, as a mounted file system or below another device: the read-only flag does
/// not stop their writes.
pub(super) fn check_unused(device: &Path) -> Result<(), OverlayDisksError> {
    match block_device::is_in_use(device).map_err(OverlayDisksError::io(device))? {
        true => Err(OverlayDisksError::DeviceInUse { device: device.to_owned() }),
        false => Ok(()),
    }
}

fn invalid_data(path: &Path) -> OverlayDisksError {
    OverlayDisksError::io(path)(io::ErrorKind::InvalidData.into())
}

/// Returns the sequence number of a device (Linux 5.15), or of the disk that a partition is on.
fn sequence_number(attributes: &Path) -> Option<String> {
    attribute(attributes, "diskseq").or_else(|| attribute(attributes.parent()?, "diskseq"))
}

fn attribute(directory: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(directory.join(name)).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn stable_name(attributes: &Path) -> Option<String> {
    if let Some(number) = attribute(attributes, "partition") {
        let (start, disk) = (attribute(attributes, "start")?, stable_name(attributes.parent()?)?);
        return Some(format!("partition {number} at sector {start} of {disk}"));
    }
    if let Some(file) = attribute(attributes, "loop/backing_file") {
        let offset = attribute(attributes, "loop/offset")?;
        return Some(format!("loop {file} at {offset}"));
    }
    // The serial number in the parent of an NVMe namespace is that of its controller, which may have more namespaces.
    let is_of_controller = attribute(attributes, "nsid").is_some();
    let found = |(kind, name): &(&str, &str)| match *name {
        CONTROLLER_SERIAL if is_of_controller => None,
        name => Some(format!("{kind} {}", attribute(attributes, name)?)),
    };
    ATTRIBUTES.iter().find_map(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// Returns the name of a device with these attributes.
    fn name_of(directory: &str, attributes: &[(&str, &str)]) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, value) in attributes {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{value}\n")).unwrap();
        }
        stable_name(&folder.path().join(directory))
    }

    #[test]
    fn a_device_is_named_by_what_outlives_a_start_of_the_host() {
        let named = |attributes| name_of("", attributes).unwrap();
        assert_eq!(named(&[("dm/uuid", "LVM-abc"), ("serial", "1")]), "dm LVM-abc");
        assert_eq!(named(&[("device/wwid", "naa.5000")]), "wwid naa.5000");
        assert_eq!(named(&[("loop/backing_file", "/i/a b"), ("loop/offset", "0")]), "loop /i/a b at 0");
        let partition = [("sda/wwid", "w"), ("sda/sda2/partition", "2"), ("sda/sda2/start", "2048")];
        assert_eq!(name_of("sda/sda2", &partition).unwrap(), "partition 2 at sector 2048 of wwid w");
        assert_eq!(name_of("", &[("serial", ""), ("size", "8")]), None);
        assert_eq!(named(&[("device/serial", "1")]), "serial 1");
        assert_eq!(name_of("", &[("nsid", "2"), ("device/serial", "1")]), None, "a controller's serial number");
        assert_eq!(name_of("sda/sda2", &partition[1..]), None, "a partition of an unknown disk");
    }

    #[test]
    fn a_device_may_have_grown_but_not_changed() {
        let device = |name: &str, bytes| DeviceIdentity { name: name.into(), bytes };
        let before = device("dm LVM-a", 8192);
        assert!(before.is_still(&device("dm LVM-a", 12288)));
        assert!(!before.is_still(&device("dm LVM-a", 4096)));
        assert!(!before.is_still(&device("dm LVM-b", 8192)));
    }

    #[test]
    fn a_file_in_place_of_a_device_is_rejected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        check_same(file.path(), None).unwrap();
        let device = DeviceIdentity { name: "dm LVM-a".into(), bytes: 0 };
        let error = check_same(file.path(), Some(&device)).unwrap_err();
        assert!(error.to_string().contains("no block device") && error.to_string().contains("dm LVM-a"), "{error}");
    }
}
