//! Options that QEMU's versions want written in different ways. The binary is asked which of them it knows.

use crate::qmp::{Qmp, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Milliseconds until QEMU connects again to a disk server that has ended.
const RECONNECT_MS: u32 = 100;

/// Which ways of writing an option a QEMU knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Syntax {
    /// `-chardev socket` takes `reconnect-ms`. Others take `reconnect`, in seconds, which QEMU 11 does not know any
    /// more.
    pub reconnect_ms: bool,
    /// Monitors are objects of the type `monitor-qmp`. Others take `-mon`, which is deprecated since QEMU 11.
    pub monitor_objects: bool,
    /// `-name` takes `debug-threads`. It is deprecated since QEMU 11, where threads always have names.
    pub thread_names: bool,
}

/// The syntax of the oldest QEMU that is supported.
impl Default for Syntax {
    fn default() -> Self {
        Self { reconnect_ms: false, monitor_objects: false, thread_names: true }
    }
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

/// An entry of QEMU's description of its own protocol.
#[derive(Deserialize)]
struct Entity {
    #[serde(rename = "meta-type")]
    kind: String,
    #[serde(default)]
    members: Vec<Member>,
}

/// Members of an object have names, those of an alternate have none.
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
    /// Asks a QEMU.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn ask(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let schema: Vec<Entity> = qmp.execute("query-qmp-schema", ())?;
        // Names of types are not part of the description: the options of a socket are known by a member that only
        // they have.
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

    /// The parameter of `-chardev socket` for a client that connects again when its server has ended.
    #[must_use]
    pub(crate) fn reconnect(self) -> String {
        if self.reconnect_ms { format!("reconnect-ms={RECONNECT_MS}") } else { "reconnect=1".into() }
    }

    /// The option that puts a QMP monitor on the character device `chardev`, with its value.
    #[must_use]
    pub(crate) fn monitor(self, chardev: &str) -> (&'static str, String) {
        if self.monitor_objects {
            ("-object", format!("monitor-qmp,id={chardev}-monitor,chardev={chardev}"))
        } else {
            ("-mon", format!("chardev={chardev},mode=control"))
        }
    }

    /// The value of `-name` for a guest, whose name must be escaped already.
    #[must_use]
    pub(crate) fn name(self, guest: &str) -> String {
        format!("guest={guest}{}", if self.thread_names { ",debug-threads=on" } else { "" })
    }
}
