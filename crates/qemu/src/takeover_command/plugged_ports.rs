//! The host's ends of ports that were plugged in or unplugged while the guest ran: of a channel or serial port that was plugged
//! in, the character device is not on QEMU's command line, and of one that was unplugged, it still is. QEMU reports only a
//! name of each character device, which has no options.

use super::{PluggedDevice, Rewriter};
use crate::foreign::split;
use crate::options::Options;
use crate::qmp::{Qmp, QmpError};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// The character device of a port that was plugged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortEnd {
    /// QEMU listens at a Unix socket.
    Socket {
        path: String,
    },
    Pty,
    /// What QEMU reports of another one.
    Other(String),
}

impl PortEnd {
    /// Parses the name that QEMU reports, such as `disconnected:unix:/run/agent,server=on`.
    fn of(file_name: &str) -> Self {
        let socket = file_name.strip_prefix("disconnected:").unwrap_or(file_name);
        let path = socket.strip_prefix("unix:").and_then(|rest| rest.strip_suffix(",server=on"));
        match path {
            Some(path) if path.starts_with('/') && !path.ends_with(",abstract=on") => {
                Self::Socket { path: path.into() }
            }
            _ if file_name.starts_with("pty:") => Self::Pty,
            _ => Self::Other(file_name.into()),
        }
    }
}

/// How the character devices differ from those of the command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ChangedPorts {
    /// Those of devices that were plugged in, by id.
    pub(super) plugged: BTreeMap<String, PortEnd>,
    /// Ids on the command line of which QEMU has no character device any more, or that of a device that was plugged in.
    pub(super) removed: BTreeSet<String>,
}

impl ChangedPorts {
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub(super) fn read(arguments: &[String], plugged: &[PluggedDevice], qmp: &mut Qmp) -> Result<Self, QmpError> {
        #[derive(Deserialize)]
        struct CharacterDevice {
            label: String,
            filename: String,
        }
        let listed: Vec<CharacterDevice> = qmp.execute("query-chardev", ())?;
        let present = listed.into_iter().map(|device| (device.label, device.filename)).collect();
        Ok(Self::of(arguments, plugged, &present))
    }

    fn of(arguments: &[String], plugged: &[PluggedDevice], present: &BTreeMap<String, String>) -> Self {
        // An unknown option is reported by the rewrite.
        let options = split(arguments).unwrap_or_default();
        let values = options.iter().filter(|option| option.name == "chardev").filter_map(|option| option.value);
        let named = values.filter_map(|value| Options::parse(value, "backend").ok()?.get("id"));
        let of_plugged = plugged.iter().filter_map(|device| device.text("chardev"));
        let plugged: BTreeMap<String, PortEnd> =
            of_plugged.filter_map(|id| Some((id.to_owned(), PortEnd::of(present.get(id)?)))).collect();
        let removed = named.filter(|id| !present.contains_key(id) || plugged.contains_key(id)).collect();
        Self { plugged, removed }
    }
}

impl Rewriter<'_> {
    /// Adds the character devices of ports that were plugged in.
    pub(super) fn add_plugged_ports(&mut self) {
        let facts = self.facts;
        for device in &facts.plugged {
            let chardev = device.text("chardev");
            if chardev.is_some_and(|id| !facts.plugged_ports.contains_key(id)) {
                let why = "QEMU does not list its character device: unplug it";
                self.refuse(format!("device {}", device.id), why);
            }
        }
        for (id, end) in &facts.plugged_ports {
            let what = format!("character device {id}");
            let pairs: &[(&str, &str)] = match end {
                PortEnd::Socket { path } => &[("backend", "socket"), ("id", id), ("path", path), ("server", "on")],
                PortEnd::Pty => &[("backend", "pty"), ("id", id)],
                PortEnd::Other(name) => {
                    let why = "its device was plugged in while the guest ran; of these, only Unix sockets at which QEMU \
                               listens and ptys can be passed on: unplug it, or start the VM with it";
                    self.refuse(format!("{what} ({name})"), why);
                    continue;
                }
            };
            let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), Some((*value).to_owned())));
            let mut options = Options::Pairs(pairs.collect());
            if self.pass_chardev(&what, &mut options).is_some() {
                self.add("chardev", options.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_port_has_a_name() {
        let socket = |path: &str| PortEnd::Socket { path: path.into() };
        assert_eq!(PortEnd::of("disconnected:unix:/run/a,b,server=on"), socket("/run/a,b"));
        assert_eq!(PortEnd::of("unix:/run/a,server=on"), socket("/run/a"));
        assert_eq!(PortEnd::of("pty:/dev/pts/3"), PortEnd::Pty);
        for other in ["unix:/run/a", "unix:a,abstract=on,server=on", "tcp:127.0.0.1:1,server=on", "spicevmc", "null"] {
            assert_eq!(PortEnd::of(other), PortEnd::Other(other.into()));
        }
    }

    #[test]
    fn unplugged_ports_are_removed_and_plugged_ones_are_described_anew() {
        let line = "-chardev pty,id=kept -chardev pty,id=gone -chardev socket,id=again,path=/old,server=on";
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let port = |chardev: &str| PluggedDevice {
            id: format!("port-{chardev}"),
            driver: "virtserialport".into(),
            bus: None,
            properties: BTreeMap::from([("chardev".into(), chardev.into())]),
            defaults: BTreeMap::new(),
        };
        let present = [("kept", "pty:/dev/pts/1"), ("again", "unix:/new,server=on"), ("new", "pty:/dev/pts/2")];
        let present = present.map(|(id, name)| (id.to_owned(), name.to_owned())).into();
        let changed = ChangedPorts::of(&arguments, &[port("again"), port("new")], &present);
        let again = ("again".to_owned(), PortEnd::Socket { path: "/new".into() });
        assert_eq!(changed.plugged, BTreeMap::from([again, ("new".to_owned(), PortEnd::Pty)]));
        assert_eq!(changed.removed, BTreeSet::from(["again".into(), "gone".into()]));
    }
}
