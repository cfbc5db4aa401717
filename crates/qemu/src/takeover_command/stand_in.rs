//! Stand-ins of servers that QEMU can bind only to an address of its own.
//!
//! The destination's server listens at a Unix socket in a directory of its manager's, to which only the user of the
//! QEMUs has access. When the source has been frozen, its listening socket takes the place of the stand-in, at the same
//! number.

use super::{ListenAddress, SourceDescriptor, open_descriptors};
use rekindle_kernel::descriptor;
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
    /// A server may make several sockets at the same path: whether it has removed this one's file to make the next. `None`
    /// if it makes one.
    pub is_removed: Option<bool>,
}

/// Returns the number at which `process` has the stand-in `path` open; `None` if the real socket has replaced it.
/// `is_removed` as in [`StandIn`].
///
/// # Errors
/// As for [`open_descriptors`] and [`descriptor::is_socket_file_removed`].
pub fn number(process: Process, path: &Path, is_removed: Option<bool>) -> io::Result<Option<RawFd>> {
    let stand_in = SourceDescriptor::Listener(ListenAddress::Unix(path.to_string_lossy().into_owned()));
    for (number, open) in open_descriptors(process)? {
        if open != stand_in {
            continue;
        }
        let Some(is_removed) = is_removed else { return Ok(Some(number)) };
        if descriptor::is_socket_file_removed(process, number)? == is_removed {
            return Ok(Some(number));
        }
    }
    Ok(None)
}
