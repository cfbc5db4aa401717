//! Network interfaces: adding one to a bridge, and setting it up. Running `ip` for each would take longer than the
//! operation itself on a host that boots many guests.

use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};
use std::ffi::c_char;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};

/// Adds an interface to a bridge (`linux/sockios.h`).
const SIOCBRADDIF: libc::c_ulong = 0x89a2;

mod ioctl {
    #![allow(missing_docs)]
    nix::ioctl_read_bad!(get_flags, libc::SIOCGIFFLAGS, libc::ifreq);
    nix::ioctl_write_ptr_bad!(set_flags, libc::SIOCSIFFLAGS, libc::ifreq);
    nix::ioctl_write_ptr_bad!(bridge_add, super::SIOCBRADDIF, libc::ifreq);
}

/// Sets the interface `name` up, in the network namespace of the calling thread.
///
/// # Errors
/// Fails for a missing interface; `PermissionDenied` without `CAP_NET_ADMIN`. The error names the
/// interface.
pub fn up(name: &str) -> io::Result<()> {
    up_by(&socket()?, name)
}

/// Sets the interface `name` up in the network namespace of `socket`.
///
/// # Errors
/// As for [`up`].
pub(crate) fn up_by(socket: &OwnedFd, name: &str) -> io::Result<()> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("interface {name}: {e}"));
    let mut request = request(name).map_err(named)?;
    // SAFETY: `request` is a whole `struct ifreq` whose name ends with a zero byte, and it lives through the call,
    // which writes the flags into it.
    unsafe { ioctl::get_flags(socket.as_raw_fd(), &raw mut request) }.map_err(|e| named(e.into()))?;
    // SAFETY: SIOCGIFFLAGS has just written this field of the union.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
    // SAFETY: as above; the call only reads.
    unsafe { ioctl::set_flags(socket.as_raw_fd(), &raw const request) }.map_err(|e| named(e.into()))?;
    Ok(())
}

/// Adds the interface `name` to a bridge, both in the network namespace of the calling thread.
///
/// # Errors
/// `ResourceBusy` if the interface is in a bridge already. Also fails if the interface or the bridge is missing, if
/// `bridge` is not a bridge, if the interface cannot be in a bridge, and without `CAP_NET_ADMIN`. The error names both.
pub fn join(name: &str, bridge: &str) -> io::Result<()> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("interface {name} into bridge {bridge}: {e}"));
    let (socket, mut request) = (socket().map_err(named)?, request(bridge).map_err(named)?);
    let index = netdevice::name_to_index(&socket, name).map_err(|e| named(e.into()))?;
    request.ifr_ifru.ifru_ifindex = index as libc::c_int;
    // SAFETY: `request` is a whole `struct ifreq` whose name ends with a zero byte, and it lives through the call,
    // which only reads.
    unsafe { ioctl::bridge_add(socket.as_raw_fd(), &raw const request) }.map_err(|e| named(e.into()))?;
    Ok(())
}

/// Opens a socket in the network namespace of the calling thread.
pub(crate) fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// Makes the argument of an ioctl on the interface `name`. The name in it ends with a zero byte.
///
/// # Errors
/// `InvalidInput` for an invalid interface name.
pub(crate) fn request(name: &str) -> io::Result<libc::ifreq> {
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(['/', '\0']) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a name has 1 to 15 characters and no slash"));
    }
    // SAFETY: `struct ifreq` is integers and a pointer, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as c_char;
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;
    use std::process::Command;

    fn ip(arguments: &str) {
        assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success(), "ip {arguments}");
    }

    #[test]
    fn an_interface_goes_into_a_bridge_once_and_up() {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let (name, bridge) = (format!("rkl{}", std::process::id()), format!("rkb{}", std::process::id()));
        let tap = crate::tap::open_transient(&name, crate::tap::Features::OWN).unwrap();
        let interface = Path::new("/sys/class/net").join(&name);
        let is_up = || {
            let flags = fs::read_to_string(interface.join("flags")).unwrap();
            let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).unwrap();
            flags & libc::IFF_UP as u32 != 0
        };
        assert!(!is_up());
        assert!(join(&name, &bridge).unwrap_err().to_string().contains(&bridge), "there is no bridge yet");
        ip(&format!("link add {bridge} type bridge"));
        join(&name, &bridge).unwrap();
        let master = fs::read_link(interface.join("master")).unwrap();
        assert_eq!(master.file_name().unwrap().to_str(), Some(bridge.as_str()));
        assert_eq!(join(&name, &bridge).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        up(&name).unwrap();
        assert!(is_up());
        up(&name).unwrap();
        drop(tap);
        assert_ne!(join(&bridge, &bridge).unwrap_err().kind(), io::ErrorKind::ResourceBusy, "a bridge into itself");
        ip(&format!("link del {bridge}"));
    }

    #[test]
    fn a_missing_interface_is_named() {
        for name in ["sixteen-letters-", "rk-none"] {
            assert!(up(name).unwrap_err().to_string().contains(name), "{name}");
            assert!(join(name, "rk-no-bridge").unwrap_err().to_string().contains("rk-no-bridge"), "{name}");
        }
        for name in ["", "sixteen-letters-", "a/b", "a\0b"] {
            assert_eq!(up(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
        }
    }
}
