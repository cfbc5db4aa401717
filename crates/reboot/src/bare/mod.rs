//! Replaces the QEMU of a guest that neither Rekindle nor libvirt has started: a script, a service of systemd, Proxmox. Only
//! its QMP socket is known. The steps are those of [`crate::unprepared`].
//!
//! The manager of such a guest knows the QEMU by its sockets, which the destination gets, and perhaps by its pid file,
//! which is rewritten. One that waits for the end of its process would take the replacement for the end of the guest: that
//! prevents it ([`supervision`]).
//!
//! A QMP socket serves one client at a time. As long as Rekindle is connected, no other program can use the monitor.

mod inspect;
mod replace;
mod supervision;

pub(crate) use replace::{is_interrupted, recover};
pub use replace::{plan, replace};

use std::path::PathBuf;

/// A guest by its QMP socket, and the QEMU that it gets.
#[derive(Debug, Clone)]
pub struct BareOptions {
    /// Path of the QMP socket.
    pub qmp: PathBuf,
    /// QEMU binary of the destination. `None`: the program that runs now, as its file is now.
    pub qemu: Option<PathBuf>,
    /// Move its RAM in place, even if there is memory for a copy.
    pub in_place: bool,
}
