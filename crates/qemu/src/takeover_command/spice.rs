//! A SPICE server, which QEMU can bind only to an address of its own: it accepts no listening socket as a descriptor.
//!
//! The destination's server listens at a [stand-in](super::stand_in) until the source has been frozen. The command line
//! keeps the port: the next replacement finds the socket by it.

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
        if number("tls-port").is_some() {
            let why = "Rekindle does not pass on a SPICE port with TLS yet: start the VM with a port without TLS";
            return self.refuse("-spice tls-port", why);
        }
        let address = server.get("addr").unwrap_or_default();
        let is_unix = server.get("unix").is_some_and(|value| value == "on");
        let (listener, stand_in) = match (number("port"), is_unix) {
            // Its clients are passed to it one by one.
            (None, false) => return self.keep_unchanged(option),
            (Some(port), _) => {
                let Some(directory) = &self.destination.socket_directory else {
                    let why = "there is no directory in which only this QEMU's user can make a socket";
                    return self.refuse("-spice", why);
                };
                let stand_in = directory.join(STAND_IN).to_string_lossy().into_owned();
                (self.numbers.put_only_listener(|bound| is_at_port(bound, port)), stand_in)
            }
            (None, true) => {
                let path = address.strip_suffix(STAND_IN_SUFFIX).unwrap_or(&address).to_owned();
                let stand_in = format!("{path}{STAND_IN_SUFFIX}");
                (self.numbers.put_only_listener(|bound| *bound == ListenAddress::Unix(path.clone())), stand_in)
            }
        };
        let Some(listener) = listener else {
            return self.refuse("-spice", "this QEMU has not exactly one listening socket of that port or path");
        };
        let needs_password = server.get("disable-ticketing").is_none_or(|value| value != "on")
            && server.get("password-secret").is_none()
            && server.get("password").is_none();
        self.spice_server = Some(PassedSpiceServer { listener, stand_in: stand_in.clone(), needs_password });
        server.remove(|key| FAMILY_KEYS.contains(&key));
        server.set("unix", "on");
        server.set("addr", &stand_in);
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
