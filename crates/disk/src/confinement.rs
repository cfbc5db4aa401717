//! What the server of a disk may do itself after it has opened its files. Its [broker](crate::broker) does the rest.

use rekindle_kernel::confinement::{Access, Calls, Confinement, Grant};
use rekindle_kernel::userfault::remote::DEVICE;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Returns the directory in which the servers of a VM exchange the lists of frames that they need. It is next to the
/// control socket of a server, and no other process trusts what is in it.
#[must_use]
pub fn frames_directory(control: &Path) -> PathBuf {
    control.with_file_name("frames")
}

/// Creates the directory of the lists, in a run directory. Without it, a server retains no cache in memory that it
/// shares with other servers.
pub(crate) fn create_frames_directory(control: &Path) {
    let directory = frames_directory(control);
    let is_private = directory.parent().is_some_and(is_private);
    if is_private
        && let Err(e) = DirBuilder::new().mode(0o700).create(&directory)
        && e.kind() != io::ErrorKind::AlreadyExists
    {
        tracing::warn!("{}: {e}", directory.display());
    }
}

/// Returns the confinement of the server with this control socket.
#[must_use]
pub fn of_server(control: &Path) -> Confinement {
    let mut files = vec![Grant::new(DEVICE, Access::WriteFile)];
    let frames = frames_directory(control);
    if is_private(&frames) {
        files.push(Grant::new(frames, Access::Directory));
    }
    Confinement { files, calls: Calls::FILES | Calls::CONNECTIONS | Calls::RING | Calls::USERFAULTFD }
}

/// Returns whether only this user can use the directory, as a run directory. Others, such as `/tmp`, are not granted.
fn is_private(directory: &Path) -> bool {
    fs::symlink_metadata(directory).is_ok_and(|metadata| {
        metadata.is_dir() && metadata.mode() & 0o077 == 0 && metadata.uid() == rustix::process::geteuid().as_raw()
    })
}
