//! The monitor of a QEMU that Rekindle did not start.

use crate::adopt::{AdoptError, Adopted, adopt_connected};
use crate::libvirt;
use crate::qmp::{Qmp, QmpError};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// The monitor of a QEMU that Rekindle did not start: how to reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Monitor {
    /// A QMP socket. It serves one client at a time.
    Socket { path: PathBuf },
    /// Through libvirt, which holds the monitor.
    Libvirt {
        /// The domain's name, number or UUID.
        domain: String,
        /// libvirt's connection URI. None: libvirt chooses.
        connect: Option<String>,
    },
}

impl std::fmt::Display for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Socket { path } => write!(f, "{}", path.display()),
            Self::Libvirt { domain, connect: None } => write!(f, "libvirt's domain {domain}"),
            Self::Libvirt { domain, connect: Some(uri) } => write!(f, "libvirt's domain {domain} at {uri}"),
        }
    }
}

impl Monitor {
    /// Connects to the monitor.
    ///
    /// # Errors
    /// [`QmpError::NoGreeting`] after `timeout` when another client holds the socket; [`QmpError::Libvirt`] with
    /// libvirt's message.
    pub fn connect(&self, timeout: Duration) -> Result<Qmp, QmpError> {
        match self {
            Self::Socket { path } => Qmp::connect(path, timeout),
            Self::Libvirt { domain, connect } => libvirt::connect(domain, connect.as_deref(), timeout),
        }
    }

    /// Inspects the QEMU that the monitor belongs to. The guest is not touched.
    ///
    /// # Errors
    /// [`AdoptError`]; also when the process cannot be identified for certain.
    pub fn adopt(&self, timeout: Duration) -> Result<(Adopted, Qmp), AdoptError> {
        let qmp = self.connect(timeout)?;
        let socket = match self {
            Self::Socket { path } => Some(path.as_path()),
            Self::Libvirt { .. } => None,
        };
        adopt_connected(qmp, socket)
    }
}
