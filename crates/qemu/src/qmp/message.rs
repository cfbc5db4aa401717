//! The messages that QEMU sends, and the commands that it receives.

use super::events::Timestamp;
use super::{QmpError, Version};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

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
        error: ErrorBody,
    },
    Return {
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

#[derive(Deserialize)]
pub(super) struct Greeting {
    pub version: GreetingVersion,
}

#[derive(Deserialize)]
pub(super) struct GreetingVersion {
    pub qemu: Version,
}

/// Returns a command as JSON, ending with its closing brace: QEMU needs no line end.
pub(super) fn command_json(command: &str, arguments: impl Serialize) -> Result<Vec<u8>, QmpError> {
    let failed = |e: serde_json::Error| QmpError::Io { during: command.into(), source: e.into() };
    let arguments = serde_json::to_value(arguments).map_err(failed)?;
    let mut request = json!({ "execute": command });
    if let Some(request) = request.as_object_mut().filter(|_| !arguments.is_null()) {
        request.insert("arguments".into(), arguments);
    }
    serde_json::to_vec(&request).map_err(failed)
}
