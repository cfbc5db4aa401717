//! vhost-net: the host's kernel serves a queue of a guest's network card, instead of QEMU.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;

/// The device whose open file serves one queue of a card.
pub const DEVICE: &str = "/dev/vhost-net";

/// Opens a vhost device for one queue of a QEMU's network card.
///
/// # Errors
/// Of `open(2)`, with the device and a remedy.
pub fn open() -> io::Result<OwnedFd> {
    let opened = OpenOptions::new().read(true).write(true).open(DEVICE);
    let failed = |e: io::Error| {
        let remedy = match e.kind() {
            io::ErrorKind::PermissionDenied => "run as root",
            _ => "load the kernel's module: modprobe vhost_net",
        };
        io::Error::new(e.kind(), format!("cannot open {DEVICE}: {e}; {remedy}"))
    };
    Ok(opened.map_err(failed)?.into())
}
