//! A command line while it is built.

use super::Start;
use crate::syntax::Syntax;
use serde_json::Value;
use std::path::Path;

/// The settings of QEMU's system call filter: libvirt's defaults.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// The arguments of a QEMU, in order.
#[derive(Default)]
pub(super) struct ArgumentList(Vec<String>);

impl ArgumentList {
    /// Adds an option without a value.
    pub(super) fn flag(&mut self, option: &str) {
        self.0.push(option.into());
    }

    pub(super) fn option(&mut self, option: &str, value: impl AsRef<str>) {
        self.0.extend([option.into(), value.as_ref().into()]);
    }

    /// Adds arguments that are complete already.
    pub(super) fn extend(&mut self, arguments: impl IntoIterator<Item = String>) {
        self.0.extend(arguments);
    }

    /// Adds a device in a fixed PCI slot.
    pub(super) fn device(&mut self, slot: u8, mut device: Value) {
        if let Some(properties) = device.as_object_mut() {
            properties.insert("bus".into(), "pcie.0".into());
            properties.insert("addr".into(), format!("{slot:#x}").into());
        }
        self.option("-device", device.to_string());
    }

    /// Adds the options that every QEMU of Rekindle has, for a guest of this name: no window, and log messages with
    /// their time.
    pub(super) fn process(&mut self, guest_name: &str, syntax: Syntax) {
        self.option("-name", syntax.name(&escaped(guest_name)));
        self.option("-display", "none");
        self.option("-msg", "timestamp=on");
    }

    /// Adds QEMU's system call filter, if this QEMU has one. All of its groups are denied: starting programs, changing the
    /// user, changing priorities, and obsolete calls.
    pub(super) fn sandbox(&mut self, syntax: Syntax) {
        if syntax.sandbox {
            self.option("-sandbox", SANDBOX);
        }
    }

    pub(super) fn accelerator(&mut self, name: &str) {
        self.option("-accel", if name == "tcg" { "tcg,thread=multi" } else { name });
    }

    /// Adds the character device `id`, on which a client can connect at the socket `path`.
    pub(super) fn socket(&mut self, id: &str, path: &Path) {
        let id = escaped(id);
        self.option("-chardev", format!("socket,id={id},path={},server=on,wait=off", escaped_path(path)));
    }

    /// Adds a character device like [`ArgumentList::socket`], whose output is also appended to the file `log`.
    pub(super) fn logged_socket(&mut self, id: &str, path: &Path, log: &Path) {
        let (id, path, log) = (escaped(id), escaped_path(path), escaped_path(log));
        let socket = format!("socket,id={id},path={path},server=on,wait=off,logfile={log},logappend=on");
        self.option("-chardev", socket);
    }

    /// Adds a QMP monitor with the socket `path`.
    pub(super) fn monitor(&mut self, id: &str, path: &Path, syntax: Syntax) {
        self.socket(id, path);
        let (option, value) = syntax.monitor(id);
        self.option(option, value);
    }

    /// Adds how QEMU starts, and returns the complete list.
    pub(super) fn finish(mut self, start: Start) -> Vec<String> {
        match start {
            Start::Boot => {}
            Start::Paused => self.flag("-S"),
            Start::Incoming => {
                self.option("-incoming", "defer");
                self.flag("-S");
            }
        }
        self.0
    }
}

/// Doubles the commas, as QEMU's `key=value` options require.
pub(super) fn escaped(text: &str) -> String {
    text.replace(',', ",,")
}

pub(super) fn escaped_path(path: &Path) -> String {
    escaped(&path.to_string_lossy())
}
