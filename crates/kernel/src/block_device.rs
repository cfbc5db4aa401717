//! The read-only flag of a block device. While it is set, the kernel rejects to open the device for writing, and `write(2)`
//! and asynchronous writes also by a process that has opened it before. It belongs to this host, and ends with its next start.
//!
//! It does not stop a mounted file system or a device above it (Linux only logs such writes), pages that were mapped writable
//! before, SCSI commands (`SG_IO`), or writes to the whole disk that a partition is on.

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

const BLKROSET: u64 = 0x125d;
const BLKROGET: u64 = 0x125e;
const _: () = assert!(BLKROSET == crate::ioctl::none(0x12, 93));
const _: () = assert!(BLKROGET == crate::ioctl::none(0x12, 94));

mod ioctl {
    #![allow(missing_docs)]
    nix::ioctl_write_ptr_bad!(blkroset, super::BLKROSET, libc::c_int);
    nix::ioctl_read_bad!(blkroget, super::BLKROGET, libc::c_int);
}

/// Returns whether the device at this path is read-only.
///
/// # Errors
/// `ENOTTY` if it is no block device; errors of `open(2)`.
pub fn is_read_only(path: &Path) -> io::Result<bool> {
    let device = File::open(path)?;
    let mut flag: c_int = 0;
    // SAFETY: the descriptor is open, and the pointer is to an int of ours.
    unsafe { ioctl::blkroget(device.as_raw_fd(), &raw mut flag) }?;
    Ok(flag != 0)
}

/// Makes the device at this path read-only, or writable. Data that its page cache has for it is written before.
///
/// # Errors
/// `ENOTTY` if it is no block device; `EACCES` without the capability for administration; errors of `open(2)` and of the
/// write.
pub fn set_read_only(path: &Path, read_only: bool) -> io::Result<()> {
    let device = File::open(path)?;
    if read_only {
        device.sync_data()?;
    }
    let flag = c_int::from(read_only);
    // SAFETY: the descriptor is open, and the pointer is to an int of ours.
    unsafe { ioctl::blkroset(device.as_raw_fd(), &raw const flag) }?;
    Ok(())
}

/// Returns whether this host uses the device exclusively: as a mounted file system, or as a part of another device.
///
/// # Errors
/// Errors of `open(2)`.
pub fn is_in_use(path: &Path) -> io::Result<bool> {
    match open(path, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty()) {
        Ok(_) => Ok(false),
        Err(Errno::BUSY) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn only_a_block_device_has_the_flag() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(is_read_only(file.path()).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(set_read_only(file.path(), true).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    }
}
