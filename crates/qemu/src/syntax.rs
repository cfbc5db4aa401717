//! Options whose spelling differs between QEMU's versions. The binary is queried for the ones that it accepts.

use crate::qmp::{Qmp, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Milliseconds until QEMU reconnects to a disk server that has ended.
const RECONNECT_MS: u32 = 100;

/// The spelling of options that a QEMU accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Syntax {
    /// `-chardev socket` takes `reconnect-ms`. Otherwise it takes `reconnect`, in seconds, which QEMU 11 has removed.
    pub reconnect_ms: bool,
    /// Monitors are objects of the type `monitor-qmp`. Otherwise `-mon` is used, which is deprecated since QEMU 11.
    pub monitor_objects: bool,
    /// `-name` takes `debug-threads`, which is deprecated since QEMU 11, where threads always have names.
    pub thread_names: bool,
}

/// Defaults to the syntax of the oldest supported QEMU.
impl Default for Syntax {
    fn default() -> Self {
        Self { reconnect_ms: false, monitor_objects: false, thread_names: true }
    }
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

/// An entry of QEMU's description of its protocol.
#[derive(Deserialize)]
struct Entity {
    #[serde(rename = "meta-type")]
    kind: String,
    #[serde(default)]
    members: Vec<Member>,
}

/// A member of an object has a name; a member of an alternate has none.
#[derive(Deserialize)]
struct Member {
    #[serde(default)]
    name: String,
}

impl Entity {
    fn has(&self, member: &str) -> bool {
        self.members.iter().any(|one| one.name == member)
    }
}

#[derive(Deserialize)]
struct CommandLineOption {
    parameters: Vec<Named>,
}

impl Syntax {
    /// Queries the syntax of a QEMU.
    ///
    /// # Errors
    /// When QEMU does not answer or returns an error.
    pub fn ask(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let schema: Vec<Entity> = qmp.execute("query-qmp-schema", ())?;
        // The description does not contain the names of types: the options of a socket are recognized by a member
        // that only they have.
        let is_socket = |entity: &&Entity| entity.kind == "object" && entity.has("telnet");
        let reconnect_ms = schema.iter().filter(is_socket).any(|socket| socket.has("reconnect-ms"));
        let monitors: Vec<Named> = qmp.execute("qom-list-types", json!({"implements": "monitor-qmp"}))?;
        let name: Vec<CommandLineOption> = qmp.execute("query-command-line-options", json!({"option": "name"}))?;
        Ok(Self {
            reconnect_ms,
            monitor_objects: monitors.iter().any(|kind| kind.name == "monitor-qmp"),
            thread_names: name.iter().any(|name| name.parameters.iter().any(|one| one.name == "debug-threads")),
        })
    }

    /// Returns the parameter of `-chardev socket` with which QEMU reconnects when its server has ended.
    #[must_use]
    pub(crate) fn reconnect(self) -> String {
        if self.reconnect_ms { format!("reconnect-ms={RECONNECT_MS}") } else { "reconnect=1".into() }
    }

    /// Returns the option, and its value, that puts a QMP monitor on the character device `chardev`.
    #[must_use]
    pub(crate) fn monitor(self, chardev: &str) -> (&'static str, String) {
        if self.monitor_objects {
            ("-object", format!("monitor-qmp,id={chardev}-monitor,chardev={chardev}"))
        } else {
            ("-mon", format!("chardev={chardev},mode=control"))
        }
    }

    /// Returns the value of `-name` for a guest. The guest's name must be escaped already.
    #[must_use]
    pub(crate) fn name(self, guest: &str) -> String {
        format!("guest={guest}{}", if self.thread_names { ",debug-threads=on" } else { "" })
    }
}
