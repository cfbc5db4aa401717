//! Tap interfaces: opening, creating and removing them.
//!
//! A guest's tap is persistent, so that it outlives every QEMU, and single-queue: packets that arrive while no QEMU
//! reads wait in that queue, which the next QEMU reads through a duplicate of the same open file.

use crate::link;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use std::ffi::{c_int, c_short};
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;

const TUNSETIFF: u64 = 0x4004_54ca;
const TUNSETPERSIST: u64 = 0x4004_54cb;
const _: () = assert!(TUNSETIFF == crate::ioctl::write(b'T', 202, size_of::<c_int>()));
const _: () = assert!(TUNSETPERSIST == crate::ioctl::write(b'T', 203, size_of::<c_int>()));

mod ioctl {
    #![allow(missing_docs)]
    nix::ioctl_write_ptr_bad!(tunsetiff, super::TUNSETIFF, libc::ifreq);
    nix::ioctl_write_int_bad!(tunsetpersist, super::TUNSETPERSIST);
}

/// Opens the tap interface `name` in the network namespace of the calling thread, and creates it if it does not exist.
///
/// Returns a non-blocking descriptor for `-netdev tap,fd=`, with virtio-net headers. The interface is persistent: it
/// stays when the descriptor is closed, until [`remove`].
///
/// # Errors
/// `PermissionDenied` without `CAP_NET_ADMIN`; `ResourceBusy` while another process has the interface open;
/// `InvalidInput` for a name that is empty or longer than 15 bytes. The error names the interface.
pub fn open(name: &str) -> io::Result<OwnedFd> {
    attach(name, Some(true))
}

/// Creates a tap interface `name` that is removed when its last descriptor is closed.
///
/// # Errors
/// As for [`open`].
pub fn open_transient(name: &str) -> io::Result<OwnedFd> {
    attach(name, None)
}

/// Removes a persistent tap interface. It is no error if the interface does not exist.
///
/// # Errors
/// As for [`open`]; an interface that is in use is not removed.
pub fn remove(name: &str) -> io::Result<()> {
    drop(attach(name, Some(false))?);
    Ok(())
}

fn attach(name: &str, persist: Option<bool>) -> io::Result<OwnedFd> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("tap interface {name}: {e}"));
    let mut request = link::request(name).map_err(named)?;
    let device = "/dev/net/tun";
    let fd = rustix::fs::open(device, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
        .map_err(|e| io::Error::new(io::Error::from(e).kind(), format!("{device}: {e}")))?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as c_short;
    // SAFETY: `request` is a whole `struct ifreq` whose name ends with a zero byte, and
    // it lives through the call.
    unsafe { ioctl::tunsetiff(fd.as_raw_fd(), &raw const request) }.map_err(|e| named(e.into()))?;
    if let Some(persist) = persist {
        // SAFETY: TUNSETPERSIST takes an int by value and touches no memory of ours.
        unsafe { ioctl::tunsetpersist(fd.as_raw_fd(), c_int::from(persist)) }.map_err(|e| named(e.into()))?;
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_names_are_refused() {
        for name in ["", "sixteen-letters-", "a/b"] {
            assert_eq!(open(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
        }
    }

    #[test]
    fn a_tap_is_made_once_held_once_and_removed() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let name = format!("rkt{}", std::process::id());
        let held = open(&name).unwrap();
        assert_eq!(open(&name).unwrap_err().raw_os_error(), None, "the error carries the name");
        assert_eq!(open(&name).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(held);
        assert!(std::path::Path::new("/sys/class/net").join(&name).exists(), "it is persistent");
        remove(&name).unwrap();
        assert!(!std::path::Path::new("/sys/class/net").join(&name).exists());
    }
}
