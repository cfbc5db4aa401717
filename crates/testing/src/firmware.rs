//! A QEMU whose guest is the firmware alone.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// A QEMU with a guest that is the firmware alone. Killed on drop.
pub struct FirmwareVm {
    child: Child,
    directory: TempDir,
}

impl FirmwareVm {
    /// Starts the QEMU. `monitors`: names of QMP sockets in `directory`, which has QEMU's log, too. QEMU may not listen
    /// yet.
    pub fn start(binary: &Path, directory: TempDir, monitors: &[&str], arguments: &[String]) -> Self {
        let mut command = Command::new(binary);
        command.args(["-machine", "q35,accel=tcg", "-m", "64M", "-nodefaults", "-display", "none"]);
        for name in monitors {
            command.args(["-qmp", &format!("unix:{},server=on,wait=off", directory.path().join(name).display())]);
        }
        let log = File::create(directory.path().join("log")).unwrap();
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Self { child: command.spawn().unwrap(), directory }
    }

    /// Returns the process number of the QEMU.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the path of a file in its directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for FirmwareVm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
