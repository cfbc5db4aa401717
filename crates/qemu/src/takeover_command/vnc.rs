//! The VNC server of a running QEMU: where it listens, and how it gets a password and listening sockets.
//!
//! A server without an address (`-vnc none`) accepts listening sockets as descriptors. QEMU does that for its first
//! server only.

use super::ListenAddress;
use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

/// The command that gives a VNC server other listening sockets.
const LISTEN_COMMAND: &str = "display-update";

/// A VNC server, as QEMU reports it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct VncServer {
    pub id: String,
    /// Where it listens; nowhere with `-vnc none`.
    #[serde(rename = "server")]
    pub addresses: Vec<VncAddress>,
}

/// Where a VNC server listens, in QEMU's form.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct VncAddress {
    /// `ipv4`, `ipv6` or `unix`.
    pub family: String,
    pub host: String,
    /// The port, or the path of a Unix socket.
    pub service: String,
    /// Whether it accepts browsers' connections (websockets) instead of VNC's.
    #[serde(default)]
    pub websocket: bool,
}

impl VncAddress {
    /// Returns whether a socket that is bound to `bound` listens at this address.
    #[must_use]
    pub fn is(&self, bound: &ListenAddress) -> bool {
        match bound {
            ListenAddress::Unix(path) => self.family == "unix" && self.service == *path,
            ListenAddress::Tcp(bound) => {
                let host: Option<IpAddr> = self.host.parse().ok();
                host == Some(bound.ip()) && self.service.parse() == Ok(bound.port())
            }
        }
    }
}

impl fmt::Display for VncAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.family == "unix" { f.write_str(&self.service) } else { write!(f, "{}:{}", self.host, self.service) }
    }
}

/// Returns the VNC servers, the first one first. A QEMU that was built without VNC has none.
///
/// # Errors
/// When QEMU does not answer.
pub fn servers(qmp: &mut Qmp) -> Result<Vec<VncServer>, QmpError> {
    match qmp.execute("query-vnc-servers", ()) {
        Err(QmpError::Refused { .. }) => Ok(Vec::new()),
        servers => servers,
    }
}

/// Returns whether [`listen`] is possible.
///
/// # Errors
/// When QEMU does not answer.
pub fn can_listen(qmp: &mut Qmp) -> Result<bool, QmpError> {
    #[derive(Deserialize)]
    struct Command {
        name: String,
    }
    let commands: Vec<Command> = qmp.execute("query-commands", ())?;
    Ok(commands.iter().any(|command| command.name == LISTEN_COMMAND))
}

/// Lets the first VNC server listen on `sockets`.
///
/// *Needs:* it listens nowhere. Otherwise QEMU closes its present sockets, and removes the path of a Unix socket.
///
/// # Errors
/// [`QmpError`], e.g. because QEMU has no VNC server.
pub fn listen(qmp: &mut Qmp, sockets: &[OwnedFd]) -> Result<(), QmpError> {
    let mut addresses = Vec::new();
    for (index, socket) in sockets.iter().enumerate() {
        let name = format!("rekindle-vnc-{index}");
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": name }), socket.as_fd())?;
        addresses.push(json!({ "type": "fd", "str": name }));
    }
    qmp.execute::<Value>(LISTEN_COMMAND, json!({ "type": "vnc", "addresses": addresses })).map(drop)
}

/// Sets the password of the first VNC server, and when it expires: `now`, `never`, or seconds since 1970.
///
/// # Errors
/// [`QmpError`], e.g. because the server needs no password.
pub fn set_password(qmp: &mut Qmp, password: &str, expiry: &str) -> Result<(), QmpError> {
    qmp.execute::<Value>("set_password", json!({ "protocol": "vnc", "password": password }))?;
    qmp.execute::<Value>("expire_password", json!({ "protocol": "vnc", "time": expiry })).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_sockets() {
        let answer = json!([{"id": "default", "auth": "none", "clients": [], "server": [
            {"auth": "none", "family": "ipv6", "service": "5901", "host": "::1", "websocket": false},
            {"auth": "none", "family": "unix", "service": "/run/v", "host": "", "websocket": false}]}]);
        let servers: Vec<VncServer> = serde_json::from_value(answer).unwrap();
        let [tcp, unix] = servers[0].addresses.as_slice() else { panic!("{servers:?}") };
        let bound = |address: &str| ListenAddress::Tcp(address.parse().unwrap());
        assert!(tcp.is(&bound("[::1]:5901")));
        assert!(!tcp.is(&bound("[::1]:5900")) && !tcp.is(&bound("127.0.0.1:5901")));
        let path = |path: &str| ListenAddress::Unix(path.into());
        assert!(unix.is(&path("/run/v")) && !unix.is(&path("/run/w")) && !tcp.is(&path("5901")));
        assert_eq!((tcp.to_string(), unix.to_string()), ("::1:5901".into(), "/run/v".into()));
    }
}
