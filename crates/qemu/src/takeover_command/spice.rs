//! A SPICE server, which QEMU can bind only to an address of its own: it accepts no listening socket as a descriptor.
//!
//! The destination's server listens at a [stand-in](super::stand_in) until the source has been frozen. The command line
//! keeps the ports: the next replacement finds the sockets by them.
//!
//! A server with TLS makes two sockets at the path of the stand-in, the one for TLS last, and also without an ordinary
//! port. No client can connect to the first one.

use super::stand_in::StandIn;
use super::{ListenAddress, PassedSpiceServer, Rewriter};
use crate::foreign::CommandOption;
use crate::qmp::{Qmp, QmpError};
use serde_json::{Value, json};

/// Name of the stand-in of a server that listens on TCP.
const STAND_IN: &str = "rekindle-spice.sock";
/// Appended to the path of a server that listens on a Unix socket.
const STAND_IN_SUFFIX: &str = ".rekindle";
/// Options that state where a server listens.
const FAMILY_KEYS: [&str; 3] = ["ipv4", "ipv6", "unix"];

impl Rewriter<'_> {
    pub(super) fn read_spice(&mut self, option: &CommandOption<'_>) {
        let Some(mut server) = self.parse(option, "") else { return };
        let number = |key: &str| server.get(key).and_then(|text| text.parse::<u16>().ok()).filter(|number| *number > 0);
        let (port, tls_port) = (number("port"), number("tls-port"));
        let address = server.get("addr").unwrap_or_default();
        let is_unix = server.get("unix").is_some_and(|value| value == "on");
        let (path, stand_ins) = match (port, tls_port) {
            // Its clients are passed to it one by one.
            (None, None) if !is_unix => return self.keep_unchanged(option),
            (None, None) => {
                let real = address.strip_suffix(STAND_IN_SUFFIX).unwrap_or(&address).to_owned();
                let path = format!("{real}{STAND_IN_SUFFIX}");
                let listener = self.numbers.put_only_listener(|bound| *bound == ListenAddress::Unix(real.clone()));
                (path.clone(), listener.map(|listener| vec![StandIn { listener, path, is_removed: None }]))
            }
            _ => {
                let Some(directory) = &self.destination.socket_directory else {
                    let why = "there is no directory in which only this QEMU's user can make a socket";
                    return self.refuse("-spice", why);
                };
                let path = directory.join(STAND_IN).to_string_lossy().into_owned();
                let mut stand_in = |port: u16, is_removed: Option<bool>| {
                    let listener = self.numbers.put_only_listener(|bound| is_at_port(bound, port))?;
                    Some(StandIn { listener, path: path.clone(), is_removed })
                };
                // With TLS, the server makes an ordinary socket at the path first, and then that for TLS.
                let plain = port.map(|port| stand_in(port, tls_port.map(|_| true)));
                let tls = tls_port.map(|port| stand_in(port, Some(false)));
                let both = plain.into_iter().chain(tls).collect();
                (path, both)
            }
        };
        let Some(stand_ins) = stand_ins else {
            return self.refuse("-spice", "this QEMU has not exactly one listening socket of each port or path");
        };
        let needs_password = server.get("disable-ticketing").is_none_or(|value| value != "on")
            && server.get("password-secret").is_none()
            && server.get("password").is_none();
        self.spice_server = Some(PassedSpiceServer { stand_ins, needs_password });
        server.remove(|key| FAMILY_KEYS.contains(&key));
        server.set("unix", "on");
        server.set("addr", &path);
        self.add("spice", server.to_string());
    }
}

fn is_at_port(bound: &ListenAddress, port: u16) -> bool {
    matches!(bound, ListenAddress::Tcp(address) if address.port() == port)
}

/// Sets the password of the SPICE server, and when it expires: `now`, `never`, or seconds since 1970.
///
/// # Errors
/// [`QmpError`], e.g. because the server needs no password.
pub fn set_password(qmp: &mut Qmp, password: &str, expiry: &str) -> Result<(), QmpError> {
    qmp.execute::<Value>("set_password", json!({ "protocol": "spice", "password": password }))?;
    qmp.execute::<Value>("expire_password", json!({ "protocol": "spice", "time": expiry })).map(drop)
}
