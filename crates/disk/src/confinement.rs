//! What the server of a disk may do itself after it has opened its files. Its [broker](crate::broker) does the rest.

use rekindle_kernel::confinement::{Access, Calls, Confinement, Grant};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, lchown};
use std::path::{Path, PathBuf};

/// Returns the directory in which the servers of a VM exchange the lists of frames that they need. It is next to the
/// control socket of a server, and no other process trusts what is in it.
#[must_use]
pub fn frames_directory(control: &Path) -> PathBuf {
    control.with_file_name("frames")
}

/// Creates the directory of the lists, in a run directory, for a server that becomes `user`. Without it, a server retains no cache in
/// memory that it shares with other servers.
pub(crate) fn create_frames_directory(control: &Path, user: Option<u32>) {
    let directory = frames_directory(control);
    // Once the VM's QEMU has a user of its own, that may search the run directory.
    if !directory.parent().is_some_and(|parent| is_private(parent, None, 0o010)) {
        return;
    }
    let created = match DirBuilder::new().mode(0o700).create(&directory) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => give_to(&directory, user.unwrap_or(rustix::process::geteuid().as_raw())),
    };
    if let Err(e) = created {
        tracing::warn!("{}: {e}; no cache is shared with the VM's other disk servers", directory.display());
    }
}

/// Gives the directory to the user, without lists of servers with another user.
fn give_to(directory: &Path, user: u32) -> io::Result<()> {
    if fs::symlink_metadata(directory)?.uid() == user {
        return Ok(());
    }
    // They cannot be given, too: an entry of an untrusted user may be a hard link to the file of another one.
    for entry in fs::read_dir(directory)? {
        fs::remove_file(entry?.path())?;
    }
    lchown(directory, Some(user), Some(user))
}

/// Returns the confinement of the server with this control socket, which becomes `user`.
#[must_use]
pub fn of_server(control: &Path, user: Option<u32>) -> Confinement {
    let mut files = Vec::new();
    let frames = frames_directory(control);
    if is_private(&frames, user, 0) {
        files.push(Grant::new(frames, Access::Directory));
    }
    Confinement { files, calls: Calls::FILES | Calls::CONNECTIONS | Calls::RING | Calls::USERFAULTFD, user }
}

/// Returns whether only `user`, or this user, can use the directory, except for the permissions `allowed` of others. Other
/// directories, such as `/tmp`, are not granted.
fn is_private(directory: &Path, user: Option<u32>, allowed: u32) -> bool {
    let owner = user.unwrap_or(rustix::process::geteuid().as_raw());
    fs::symlink_metadata(directory)
        .is_ok_and(|metadata| metadata.is_dir() && metadata.mode() & 0o077 & !allowed == 0 && metadata.uid() == owner)
}
