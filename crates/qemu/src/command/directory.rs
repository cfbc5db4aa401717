//! The sockets and files of one QEMU process.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The directory of one QEMU process, with its sockets and files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory(pub PathBuf);

impl Directory {
    /// QMP socket for operations.
    pub fn qmp(&self) -> PathBuf {
        self.0.join("qmp.sock")
    }
    /// QMP socket for a watcher that runs during an operation.
    pub fn watch(&self) -> PathBuf {
        self.0.join("watch.sock")
    }
    /// QMP socket for the protector.
    pub fn protect(&self) -> PathBuf {
        self.0.join("protect.sock")
    }
    /// Second QMP socket for the protector: a staged command keeps its connection busy.
    pub fn save(&self) -> PathBuf {
        self.0.join("save.sock")
    }
    /// QMP socket for the process that waits for the guest's reboot or panic. Exists only if a disk is served:
    /// otherwise nothing is done about a reboot or panic.
    pub fn events(&self) -> PathBuf {
        self.0.join("events.sock")
    }
    /// Socket of the guest's serial console.
    pub fn console(&self) -> PathBuf {
        self.0.join("console.sock")
    }
    /// Socket of the guest agent's port.
    pub fn agent(&self) -> PathBuf {
        self.0.join("agent.sock")
    }
    /// Socket of the port through which the guest announces phases of its boot.
    pub fn phase(&self) -> PathBuf {
        self.0.join("phase.sock")
    }
    /// Socket of disk `id`'s server. The server outlives each QEMU, so the socket is in the parent directory.
    pub fn disk(&self, id: &str) -> PathBuf {
        self.0.parent().unwrap_or(Path::new("")).join(format!("disk-{id}.sock"))
    }
    /// File to which QEMU writes its process number.
    pub fn pid(&self) -> PathBuf {
        self.0.join("qemu.pid")
    }
    /// Lock file. QEMU holds its lock from before the program starts until it has ended: the holder of the lock is
    /// the QEMU.
    pub fn lock(&self) -> PathBuf {
        self.0.join("qemu.lock")
    }
    /// File with QEMU's messages.
    pub fn log(&self) -> PathBuf {
        self.0.join("qemu.log")
    }
}
