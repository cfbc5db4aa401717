//! Connections to the sockets of a QEMU.

use rekindle_kernel::unix_socket;
use rustix::net::sockopt::socket_peercred;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Connects to the socket at `path`. In a directory in which other users can make files, the listener must run as the owner
/// of the socket: a QEMU could have replaced its own socket by a link to one of another process.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if the listener does not accept within `timeout`; [`io::ErrorKind::PermissionDenied`] if
/// it runs as another user.
pub fn connect(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let stream = unix_socket::connect(path, timeout)?;
    require_owner_listens(path, &stream)?;
    Ok(stream)
}

fn require_owner_listens(path: &Path, stream: &UnixStream) -> io::Result<()> {
    /// The sticky bit of a directory.
    const STICKY: u32 = 0o1000;
    let is_shared =
        path.parent().is_some_and(|parent| fs::metadata(parent).is_ok_and(|parent| parent.mode() & STICKY != 0));
    if !is_shared {
        return Ok(());
    }
    let (file, peer) = (fs::symlink_metadata(path)?, socket_peercred(stream)?);
    if file.file_type().is_socket() && file.uid() == peer.uid.as_raw() {
        return Ok(());
    }
    let message = format!("{}: it leads to a process of another user than its owner", path.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_link_to_a_socket_of_another_user_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let connect = |name: &str| connect(&path(name), Duration::from_secs(5)).map(drop).map_err(|e| e.kind());
        let _own = UnixListener::bind(path("own")).unwrap();
        let _other = UnixListener::bind(path("other")).unwrap();
        chown(path("other"), Some(65534), None).unwrap();
        symlink(path("own"), path("link")).unwrap();
        assert_eq!((connect("own"), connect("other"), connect("link")), (Ok(()), Ok(()), Ok(())));
        fs::set_permissions(directory.path(), Permissions::from_mode(0o1770)).unwrap();
        let denied = Err(io::ErrorKind::PermissionDenied);
        assert_eq!((connect("own"), connect("other"), connect("link")), (Ok(()), denied, denied));
    }
}
