//! Displays. A VNC server starts without an address; it gets the source's listening sockets later. The windows of a
//! user's session cannot be passed on.

use super::{PassedVncServer, Rewriter};
use crate::foreign::CommandOption;
use crate::options::Options;
use std::os::fd::RawFd;

/// Id of a VNC server without `id=`.
const DEFAULT_VNC_ID: &str = "default";
/// Kinds of `-display` that need nothing of the host's, or only its graphics device.
const KEPT_DISPLAYS: [&str; 2] = ["none", "egl-headless"];

impl Rewriter<'_> {
    pub(super) fn read_vnc(&mut self, value: &str) {
        let mut server = match Options::parse(value, "vnc") {
            Ok(server) => server,
            Err(e) => return self.refuse(format!("-vnc {value}"), e.why),
        };
        for key in ["websocket", "reverse"] {
            if server.get(key).is_some_and(|value| value != "off") {
                self.refuse(
                    format!("-vnc {key}"),
                    "Rekindle does not pass on this kind of VNC connection: start the VM without it",
                );
            }
        }
        let id = server.get("id").unwrap_or_else(|| DEFAULT_VNC_ID.into());
        let listeners = self.pass_vnc_listeners(&id);
        let needs_password =
            server.get("password").is_some_and(|value| ["on", "yes", "true"].contains(&value.as_str()))
                && server.get("password-secret").is_none();
        self.vnc_server = Some(PassedVncServer { id, listeners, needs_password });
        server.remove(|key| ["to", "ipv4", "ipv6"].contains(&key));
        server.set("vnc", "none");
        self.add("vnc", server.to_string());
    }

    /// Returns the numbers at which the listening sockets of the VNC server `id` are open in the destination. They are
    /// those that QEMU reports: after an earlier replacement, the command line has no address.
    fn pass_vnc_listeners(&mut self, id: &str) -> Vec<RawFd> {
        let what = format!("VNC server {id}");
        let servers = &self.facts.vnc_servers;
        let Some(server) = servers.iter().find(|server| server.id == id) else {
            self.refuse(what, "QEMU does not report it");
            return Vec::new();
        };
        if servers.len() > 1 {
            self.refuse(what, "only one VNC server can be passed on: start the VM with one");
            return Vec::new();
        }
        let mut listeners = Vec::new();
        for address in &server.addresses {
            match self.numbers.put_listener(|bound| address.is(bound)) {
                Some(number) => listeners.push(number),
                None => self.refuse(&what, format!("this QEMU has no listening socket of {address}")),
            }
        }
        listeners
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
