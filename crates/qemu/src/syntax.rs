//! Options whose spelling differs between QEMU's versions. The binary is queried for the ones that it accepts.

use crate::qmp::{Qmp, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Milliseconds until QEMU reconnects to a disk server that has ended.
const RECONNECT_MS: u32 = 100;

/// The first QEMU with `websocket=unix:PATH`, by major and minor version. QEMU does not report it as a feature.
const FIRST_WITH_WEBSOCKET_PATHS: (u32, u32) = (8, 2);

/// The spelling of options that a QEMU accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Syntax {
    /// `-chardev socket` takes `reconnect-ms`. Otherwise it takes `reconnect`, in seconds, which QEMU 11 has removed.
    pub reconnect_ms: bool,
    /// Monitors are objects of the type `monitor-qmp`. Otherwise `-mon` is used, which is deprecated since QEMU 11.
    pub monitor_objects: bool,
    /// `-name` takes `debug-threads`, which is deprecated since QEMU 11, where threads always have names.
    pub thread_names: bool,
    /// `-vnc` takes `websocket=unix:PATH`.
    pub websocket_paths: bool,
    /// There is the option `-sandbox`: QEMU was built with seccomp.
    pub sandbox: bool,
}

/// Defaults to the syntax of the oldest supported QEMU.
impl Default for Syntax {
    fn default() -> Self {
        Self { reconnect_ms: false, monitor_objects: false, thread_names: true, websocket_paths: false, sandbox: false }
    }
}

/// An entry of QEMU's description of its protocol.
#[derive(Deserialize)]
struct SchemaEntry {
    #[serde(rename = "meta-type")]
    kind: String,
    #[serde(default)]
    members: Vec<Named>,
}

#[derive(Deserialize)]
struct CommandLineOption {
    option: String,
    parameters: Vec<Named>,
}

/// A type, a parameter, or a member of an object. A member of an alternate has no name.
#[derive(Deserialize)]
struct Named {
    #[serde(default)]
    name: String,
}

fn has(list: &[Named], name: &str) -> bool {
    list.iter().any(|entry| entry.name == name)
}
impl Syntax {
    /// Queries the syntax of a QEMU.
    ///
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub fn query(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let schema: Vec<SchemaEntry> = qmp.execute("query-qmp-schema", ())?;
        // The description does not contain the names of types: the options of a socket are recognized by a member
        // that only they have.
        let is_socket = |entry: &&SchemaEntry| entry.kind == "object" && has(&entry.members, "telnet");
        let reconnect_ms = schema.iter().filter(is_socket).any(|socket| has(&socket.members, "reconnect-ms"));
        let monitor_types: Vec<Named> = qmp.execute("qom-list-types", json!({"implements": "monitor-qmp"}))?;
        let options: Vec<CommandLineOption> = qmp.execute("query-command-line-options", ())?;
        let name_takes = |parameter| options.iter().any(|it| it.option == "name" && has(&it.parameters, parameter));
        Ok(Self {
            reconnect_ms,
            monitor_objects: has(&monitor_types, "monitor-qmp"),
            thread_names: name_takes("debug-threads"),
            websocket_paths: (qmp.version().major, qmp.version().minor) >= FIRST_WITH_WEBSOCKET_PATHS,
            sandbox: options.iter().any(|it| it.option == "sandbox"),
        })
    }

    /// Returns the parameter of `-chardev socket` with which QEMU reconnects when its server has ended.
    pub(crate) fn reconnect(self) -> String {
        if self.reconnect_ms { format!("reconnect-ms={RECONNECT_MS}") } else { "reconnect=1".into() }
    }

    /// Returns the option, and its value, that puts a QMP monitor on the character device `chardev`.
    pub(crate) fn monitor(self, chardev: &str) -> (&'static str, String) {
        if self.monitor_objects {
            ("-object", format!("monitor-qmp,id={chardev}-monitor,chardev={chardev}"))
        } else {
            ("-mon", format!("chardev={chardev},mode=control"))
        }
    }

    /// Returns the value of `-name` for a guest. The guest's name must be escaped already.
    pub(crate) fn name(self, guest: &str) -> String {
        format!("guest={guest}{}", if self.thread_names { ",debug-threads=on" } else { "" })
    }
}
