//! What a running QEMU has open at its descriptors.

use super::{ListenAddress, SourceDescriptor};
use rekindle_kernel::descriptor;
use rekindle_kernel::process::Process;
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{SocketAddrAny, SocketAddrUnix, getpeername, getsockname};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;

/// The path of a macvtap, which is the interface in [`SourceDescriptor::Tap`], begins with this; a number follows.
pub const MACVTAP_PREFIX: &str = "/dev/tap";

/// Returns the open descriptors of `process`. Sockets are duplicated to query them, in whatever namespace they are.
///
/// # Errors
/// `PermissionDenied` without the right to trace the process.
pub fn open_descriptors(process: Process) -> io::Result<BTreeMap<RawFd, SourceDescriptor>> {
    let mut open = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{}/fd", process.pid))? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // QEMU closes files while it runs.
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        let link = link.to_string_lossy();
        let descriptor = match link.as_ref() {
            "/dev/null" => SourceDescriptor::Null,
            "/dev/vhost-net" => SourceDescriptor::VhostNet,
            "/dev/net/tun" => tap_interface(process, number)
                .map_or(SourceDescriptor::Other, |interface| SourceDescriptor::Tap { interface }),
            path if path.starts_with(MACVTAP_PREFIX) => SourceDescriptor::Tap { interface: path.to_owned() },
            path if path.starts_with("socket:") => socket_address(process, number)?,
            _ => SourceDescriptor::Other,
        };
        open.insert(number, descriptor);
    }
    Ok(open)
}

/// Returns the interface of a queue of a tap; `None` for one that has no interface.
fn tap_interface(process: Process, number: RawFd) -> Option<String> {
    let info = fs::read_to_string(format!("/proc/{}/fdinfo/{number}", process.pid)).ok()?;
    let interface = info.lines().find_map(|line| line.strip_prefix("iff:"))?.trim();
    (!interface.is_empty()).then(|| interface.to_owned())
}

fn socket_address(process: Process, number: RawFd) -> io::Result<SourceDescriptor> {
    let socket = match descriptor::take(process, number) {
        Ok(socket) => socket,
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Err(e),
        // It was closed in the meantime.
        Err(_) => return Ok(SourceDescriptor::Other),
    };
    if !socket_acceptconn(&socket).unwrap_or(false) {
        let server = getpeername(&socket).ok().flatten();
        let server =
            server.and_then(|address| SocketAddrUnix::try_from(address).ok()).and_then(|path| unix_path(&path));
        return Ok(server.map_or(SourceDescriptor::Other, |server| SourceDescriptor::Client { server }));
    }
    let address = getsockname(&socket)?;
    Ok(listener(&address).map_or(SourceDescriptor::Other, SourceDescriptor::Listener))
}

/// Returns the address of a listening socket; `None` for a family that QEMU's options do not name.
fn listener(address: &SocketAddrAny) -> Option<ListenAddress> {
    if let Ok(address) = SocketAddr::try_from(address.clone()) {
        return Some(ListenAddress::Tcp(address));
    }
    unix_path(&SocketAddrUnix::try_from(address.clone()).ok()?).map(ListenAddress::Unix)
}

/// Returns the path of a Unix address, with a leading `@` in the abstract namespace; `None` if it has none.
fn unix_path(address: &SocketAddrUnix) -> Option<String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let path = address.path_bytes().map(text);
    path.or_else(|| address.abstract_name().map(|name| format!("@{}", text(name))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn listening_sockets_are_known_by_their_addresses() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (unix, tcp) = (UnixListener::bind(&path).unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let (client, null) = (UnixStream::connect(&path).unwrap(), fs::File::open("/dev/null").unwrap());
        let open = open_descriptors(Process::of(std::process::id()).unwrap()).unwrap();
        let path = path.to_string_lossy().into_owned();
        assert_eq!(open[&unix.as_raw_fd()], SourceDescriptor::Listener(ListenAddress::Unix(path.clone())));
        let address = ListenAddress::Tcp(tcp.local_addr().unwrap());
        assert_eq!(open[&tcp.as_raw_fd()], SourceDescriptor::Listener(address));
        assert_eq!(open[&client.as_raw_fd()], SourceDescriptor::Client { server: path });
        assert_eq!(open[&null.as_raw_fd()], SourceDescriptor::Null);
    }
}
