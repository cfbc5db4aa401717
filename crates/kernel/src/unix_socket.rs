//! Connections to Unix sockets of processes that may not answer.

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Connects to the socket at `path`. The kernel keeps connections that the listener has not accepted in a queue, also those
/// that their clients have closed. When the queue of a stopped process is full, `connect(2)` waits.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if the queue is still full after `timeout`.
pub fn connect(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(timeout.max(Duration::from_millis(1))))?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(UnixStream::from(socket))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_full_queue_of_a_listener_that_accepts_nothing_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        // The longest queue that a listener can have.
        let longest: u32 = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap().trim().parse().unwrap();
        let failed = (0..longest + 2).find_map(|_| connect(&path, Duration::from_millis(20)).err());
        assert_eq!(failed.expect("the queue has an end").kind(), io::ErrorKind::WouldBlock);
    }
}
