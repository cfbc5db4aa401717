//! Stand-ins of servers that QEMU can bind only to an address of its own.
//!
//! The destination's server listens at a Unix socket in a directory of its manager's, to which only the user of the
//! QEMUs has access. When the source has been frozen, its listening socket takes the place of the stand-in, at the same
//! number.

use super::{ListenAddress, SourceDescriptor, open_descriptors};
use rekindle_kernel::process::Process;
use std::io;
use std::os::fd::RawFd;
use std::path::Path;

/// A stand-in for a listening socket of the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StandIn {
    /// The number at which the source's listening socket is open in the destination.
    pub listener: RawFd,
    /// Path of the Unix socket that the server has made in its place.
    pub path: String,
}

/// Returns the number at which `process` has the stand-in `path` open; `None` if the real socket has replaced it.
///
/// # Errors
/// As for [`open_descriptors`].
pub fn number(process: Process, path: &Path) -> io::Result<Option<RawFd>> {
    let stand_in = SourceDescriptor::Listener(ListenAddress::Unix(path.to_string_lossy().into_owned()));
    let open = open_descriptors(process)?;
    Ok(open.into_iter().find(|(_, descriptor)| *descriptor == stand_in).map(|(number, _)| number))
}
