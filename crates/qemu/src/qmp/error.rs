//! Why a QMP command failed.

use super::MAX_MESSAGE_BYTES;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Errors of a QMP connection.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    #[error("cannot connect to the QMP socket {}", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the QMP socket {} gave no greeting within {} ms; another client holds it (QMP serves one at a time), or QEMU hangs",
        path.display(),
        after.as_millis()
    )]
    NoGreeting { path: PathBuf, after: Duration },
    #[error("QEMU closed its QMP socket while `{during}` was under way")]
    Closed {
        /// The command that waited for an answer.
        during: String,
    },
    #[error("QEMU did not answer `{during}` within {} ms", after.as_millis())]
    Timeout {
        /// The command or event that was waited for.
        during: String,
        after: Duration,
    },
    #[error("QEMU refused `{command}`: {description}")]
    Refused { command: String, class: String, description: String },
    #[error("QEMU sent more than {} MiB instead of an answer to `{during}`", MAX_MESSAGE_BYTES >> 20)]
    TooLong {
        /// The command that waited for an answer.
        during: String,
    },
    #[error("QEMU answered `{during}` with something unexpected: {text}")]
    Protocol {
        /// The command that waited for an answer.
        during: String,
        /// The beginning of the message.
        text: String,
    },
    #[error(
        "cannot access libvirt domain {domain}: {message}; is libvirtd running? For another connection: --connect URI"
    )]
    Libvirt {
        /// Name, number or UUID of the domain.
        domain: String,
        message: String,
    },
    #[error("cannot run `{command}` through libvirt: {message}")]
    NotPassedOn { command: String, message: String },
    #[error("QMP socket error during `{during}`")]
    Io {
        /// The command that waited for an answer.
        during: String,
        #[source]
        source: io::Error,
    },
}

impl QmpError {
    /// Returns whether QEMU gave no answer, as opposed to an error or a closed socket.
    pub fn is_silence(&self) -> bool {
        matches!(self, Self::NoGreeting { .. } | Self::Timeout { .. } | Self::TooLong { .. })
    }

    /// Returns whether libvirt gave no answer of QEMU: its daemon may be stopped, for example.
    pub fn is_of_libvirt(&self) -> bool {
        matches!(self, Self::Libvirt { .. } | Self::NotPassedOn { .. })
    }
}
