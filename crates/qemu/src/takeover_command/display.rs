//! Displays. A VNC server starts without an address; it gets the source's listening sockets later. The windows of a
//! user's session cannot be passed on.
//!
//! QEMU accepts no descriptor for a websocket. A server with websockets listens at [stand-ins](super::stand_in) for all
//! of its sockets. QEMU reports the stand-ins as its addresses until it ends: their names state the real ones, by which
//! the next replacement finds the sockets.

use super::stand_in::StandIn;
use super::vnc::{VncAddress, VncServer};
use super::{ListenAddress, PassedVncServer, Rewriter};
use crate::foreign::CommandOption;
use crate::options::Options;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::path::Path;

/// Id of a VNC server without `id=`.
const DEFAULT_VNC_ID: &str = "default";
/// The address of a server that listens nowhere.
const NOWHERE: &str = "none";
/// Names of stand-ins, which an address follows.
const STAND_IN: &str = "rekindle-vnc-";
const WEBSOCKET_STAND_IN: &str = "rekindle-websocket-";
/// Kinds of `-display` that need nothing of the host's, or only its graphics device.
const KEPT_DISPLAYS: [&str; 2] = ["none", "egl-headless"];

impl<'a> Rewriter<'a> {
    pub(super) fn read_vnc(&mut self, value: &str) {
        let mut server = match Options::parse(value, "vnc") {
            Ok(server) => server,
            Err(e) => return self.refuse(format!("-vnc {value}"), e.why),
        };
        if server.get("reverse").is_some_and(|value| value != "off") {
            let why = "Rekindle does not pass on this kind of VNC connection: start the VM without it";
            self.refuse("-vnc reverse", why);
        }
        let id = server.get("id").unwrap_or_else(|| DEFAULT_VNC_ID.into());
        let needs_password =
            server.get("password").is_some_and(|value| ["on", "yes", "true"].contains(&value.as_str()))
                && server.get("password-secret").is_none();
        server.remove(|key| ["to", "ipv4", "ipv6", "websocket"].contains(&key));
        server.set("vnc", NOWHERE);
        let mut passed =
            PassedVncServer { id: id.clone(), listeners: Vec::new(), stand_ins: Vec::new(), needs_password };
        match self.reported_vnc_server(&id) {
            Some(reported) if reported.addresses.iter().any(|address| address.websocket) => {
                passed.stand_ins = self.pass_vnc_stand_ins(reported, &mut server);
            }
            Some(reported) => passed.listeners = self.pass_vnc_listeners(reported),
            None => {}
        }
        self.vnc_server = Some(passed);
        self.add("vnc", server.to_string());
    }

    /// Returns what QEMU reports about the VNC server `id`. After an earlier replacement, its command line does not state
    /// where it listens. `None` after an obstacle was added.
    fn reported_vnc_server(&mut self, id: &str) -> Option<&'a VncServer> {
        let servers = &self.facts.vnc_servers;
        let server = servers.iter().find(|server| server.id == id);
        if server.is_none() {
            self.refuse(format!("VNC server {id}"), "QEMU does not report it");
        } else if servers.len() > 1 {
            let why = "only one VNC server can be passed on: start the VM with one";
            self.refuse(format!("VNC server {id}"), why);
            return None;
        }
        server
    }

    /// Returns the numbers at which the listening sockets of the VNC server are open in the destination.
    fn pass_vnc_listeners(&mut self, server: &VncServer) -> Vec<RawFd> {
        let addresses = server.addresses.iter();
        addresses.filter_map(|address| self.pass_vnc_listener(server, address)).collect()
    }

    /// Passes on the listening socket at `address`. `None` after an obstacle was added.
    fn pass_vnc_listener(&mut self, server: &VncServer, address: &VncAddress) -> Option<RawFd> {
        let listener = match replaced_address(address) {
            Some(real) => self.numbers.put_listener(|bound| *bound == ListenAddress::Tcp(real)),
            None => self.numbers.put_listener(|bound| address.is(bound)),
        };
        if listener.is_none() {
            let why = format!("this QEMU has no listening socket of {address}");
            self.refuse(format!("VNC server {}", server.id), why);
        }
        listener
    }

    /// Writes a stand-in for each of the server's sockets into its `options`.
    fn pass_vnc_stand_ins(&mut self, server: &VncServer, options: &mut Options) -> Vec<StandIn> {
        const WHAT: &str = "-vnc websocket";
        if !self.destination.syntax.websocket_paths {
            self.refuse(WHAT, "a VNC server with a websocket needs QEMU 8.2 or newer: use --qemu with one");
            return Vec::new();
        }
        let Some(directory) = &self.destination.socket_directory else {
            self.refuse(WHAT, "there is no directory in which only this QEMU's user can make a socket");
            return Vec::new();
        };
        let mut stand_ins = Vec::new();
        for address in &server.addresses {
            let Some(real) = tcp_address(address) else {
                self.refuse(WHAT, format!("the server also listens on {address}: start the VM without one of them"));
                continue;
            };
            let Some(listener) = self.pass_vnc_listener(server, address) else { continue };
            let path = directory.join(format!("{}{real}", stand_in_prefix(address))).to_string_lossy().into_owned();
            let text = format!("unix:{path}");
            if address.websocket {
                options.add("websocket", &text);
            } else if options.get("vnc").as_deref() == Some(NOWHERE) {
                options.set("vnc", &text);
            } else {
                options.add("vnc", &text);
            }
            stand_ins.push(StandIn { listener, path, is_removed: None });
        }
        stand_ins
    }

    pub(super) fn read_display(&mut self, option: &CommandOption<'_>) {
        let value = option.value.unwrap_or_default();
        let kind = value.split([',', '=']).next().unwrap_or_default();
        if kind == "vnc" {
            self.read_vnc(value.strip_prefix("vnc=").unwrap_or_default());
        } else if KEPT_DISPLAYS.contains(&kind) {
            self.keep_unchanged(option);
        } else {
            let why =
                "two QEMUs cannot have one window, and Rekindle does not open a new one: use -display none or VNC";
            self.refuse(format!("-display {value}"), why);
        }
    }

    /// Rejects the display that QEMU opens by default.
    pub(super) fn check_display(&mut self) {
        if !self.given.display {
            let why = "the command line does not state whether there is a window: start it with -display none or -vnc";
            self.refuse("the default display", why);
        }
    }
}

/// Returns the TCP address at which a VNC server listens; `None` for a Unix socket that is no stand-in.
fn tcp_address(address: &VncAddress) -> Option<SocketAddr> {
    replaced_address(address)
        .or_else(|| Some(SocketAddr::new(address.host.parse().ok()?, address.service.parse().ok()?)))
}

/// Returns the address of the socket that has replaced a stand-in; `None` if `address` is no stand-in.
fn replaced_address(address: &VncAddress) -> Option<SocketAddr> {
    let path = Path::new(&address.service);
    if address.family == "unix" {
        path.file_name()?.to_str()?.strip_prefix(stand_in_prefix(address))?.parse().ok()
    } else {
        None
    }
}

fn stand_in_prefix(address: &VncAddress) -> &'static str {
    if address.websocket { WEBSOCKET_STAND_IN } else { STAND_IN }
}
