//! The messages that QEMU sends, and the commands that it receives.

use super::events::Timestamp;
use super::{LIBVIRT_ERROR_CLASS, QmpError, Version};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A message with the length of its JSON.
pub(super) struct ReceivedMessage {
    pub bytes: usize,
    pub message: Message,
}

impl ReceivedMessage {
    /// Parses a line that arrived while `during` was in progress.
    pub(super) fn parse(during: &str, line: &[u8]) -> Result<Self, QmpError> {
        let message = serde_json::from_slice(line).map_err(|_| QmpError::Protocol {
            during: during.into(),
            text: String::from_utf8_lossy(line).trim().chars().take(200).collect(),
        })?;
        Ok(Self { bytes: line.len(), message })
    }
}

/// One line from QEMU.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Message {
    Event {
        event: String,
        #[serde(default)]
        data: Value,
        timestamp: Timestamp,
    },
    Error {
        /// The `id` of the command that this replies to; null if it had none.
        #[serde(default)]
        id: Value,
        error: ErrorBody,
    },
    Return {
        /// As for an error.
        #[serde(default)]
        id: Value,
        #[serde(rename = "return")]
        value: Value,
    },
    Greeting {
        #[serde(rename = "QMP")]
        qmp: Greeting,
    },
}

#[derive(Deserialize)]
pub(super) struct ErrorBody {
    pub class: String,
    pub desc: String,
}

impl ErrorBody {
    /// Returns the error of `command`.
    pub(super) fn of(self, command: &str) -> QmpError {
        let command = command.into();
        if self.class == LIBVIRT_ERROR_CLASS {
            QmpError::NotPassedOn { command, message: self.desc }
        } else {
            QmpError::Refused { command, class: self.class, description: self.desc }
        }
    }
}

#[derive(Deserialize)]
pub(super) struct Greeting {
    pub version: GreetingVersion,
}

#[derive(Deserialize)]
pub(super) struct GreetingVersion {
    pub qemu: Version,
}

/// Returns a command as JSON, ending with its closing brace: QEMU needs no line end. QEMU repeats `id` in its reply.
pub(super) fn command_json(command: &str, arguments: impl Serialize, id: Option<&Value>) -> Result<Vec<u8>, QmpError> {
    let failed = |e: serde_json::Error| QmpError::Io { during: command.into(), source: e.into() };
    let arguments = serde_json::to_value(arguments).map_err(failed)?;
    let mut request = Map::from_iter([("execute".into(), command.into())]);
    if !arguments.is_null() {
        request.insert("arguments".into(), arguments);
    }
    request.extend(id.map(|id| ("id".into(), id.clone())));
    serde_json::to_vec(&request).map_err(failed)
}
