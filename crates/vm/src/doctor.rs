//! What this host lacks, and the mend.

use crate::hardware::has_kvm;
use crate::host::Host;
use rekindle_memory::directory::available_memory;
use rekindle_qemu::binary::Binary;
use serde::Serialize;
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::process::Command;

const TMPFS_MAGIC: u64 = 0x0102_1994;

/// One thing looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub what: String,
    /// Whether it is as it should be.
    pub level: Level,
    /// What was found.
    pub found: String,
    /// What to do about it; empty when nothing is.
    pub mend: String,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Good,
    /// Something is slower or not possible.
    Limited,
    /// VMs cannot run.
    Bad,
}

/// Look at everything.
#[must_use]
pub fn examine(qemu: &Path) -> Vec<Finding> {
    vec![binary(qemu), accel(), run_directory(), memory(), taps(), ip(), tracing_rights()]
}

fn finding(what: &str, level: Level, found: impl Into<String>, mend: impl Into<String>) -> Finding {
    Finding { what: what.into(), level, found: found.into(), mend: mend.into() }
}

fn binary(path: &Path) -> Finding {
    match Binary::probe(path) {
        Ok(binary) if binary.saves_device_state() => {
            finding("QEMU", Level::Good, format!("{} {}", binary.path.display(), binary.version), "")
        }
        Ok(binary) => finding(
            "QEMU",
            Level::Limited,
            format!("{} {} has no xen-save-devices-state", binary.path.display(), binary.version),
            "a warm reboot takes some ms longer; use a QEMU built with Xen support (Debian's is)",
        ),
        Err(e) => finding("QEMU", Level::Bad, e.to_string(), "apt-get install qemu-system-x86"),
    }
}

fn accel() -> Finding {
    if has_kvm() {
        return finding("KVM", Level::Good, "kvm_intel or kvm_amd is loaded and /dev/kvm opens", "");
    }
    let found = if Path::new("/dev/kvm").exists() {
        "/dev/kvm is there, but no kvm_intel or kvm_amd behind it, or it may not be opened"
    } else {
        "no /dev/kvm"
    };
    let mend = "guests run under TCG, ten times slower; load kvm_intel or kvm_amd, add this user to group kvm";
    finding("KVM", Level::Limited, found, mend)
}

fn run_directory() -> Finding {
    match Host::open() {
        Ok(host) => {
            let found = host.root.display().to_string();
            let tmpfs = rustix::fs::statfs(&host.root).is_ok_and(|stat| stat.f_type as u64 == TMPFS_MAGIC);
            if tmpfs {
                finding("run directory", Level::Good, found, "")
            } else {
                let mend = "guests are stopped longer, for each synced write: set REKINDLE_RUN_DIR to one on a tmpfs";
                finding("run directory", Level::Limited, format!("{found} is not on a tmpfs"), mend)
            }
        }
        Err(e) => {
            let cause = std::error::Error::source(&e).map(|e| format!(": {e}")).unwrap_or_default();
            finding("run directory", Level::Bad, format!("{e}{cause}"), "set REKINDLE_RUN_DIR to a directory of yours")
        }
    }
}

fn memory() -> Finding {
    match available_memory() {
        Ok(bytes) => finding("memory", Level::Good, format!("{} MiB available", bytes >> 20), ""),
        Err(e) => finding("memory", Level::Bad, e.to_string(), "mount /proc"),
    }
}

fn taps() -> Finding {
    let root = rustix::process::geteuid().is_root();
    match OpenOptions::new().read(true).write(true).open("/dev/net/tun") {
        Ok(_) if root => finding("taps", Level::Good, "/dev/net/tun opens", ""),
        Ok(_) => finding("taps", Level::Limited, "not root", "run as root for `kind = \"tap\"`; `user` works"),
        Err(e) => {
            let denied = e.kind() == io::ErrorKind::PermissionDenied;
            let mend = if denied { "run as root for `kind = \"tap\"`" } else { "modprobe tun" };
            finding("taps", Level::Limited, format!("/dev/net/tun: {e}"), format!("{mend}; `kind = \"user\"` works"))
        }
    }
}

fn ip() -> Finding {
    match Command::new("ip").arg("-V").output() {
        Ok(output) => finding("iproute2", Level::Good, String::from_utf8_lossy(&output.stdout).trim(), ""),
        Err(e) => finding("iproute2", Level::Limited, format!("ip: {e}"), "apt-get install iproute2 for taps"),
    }
}

/// Reading a QEMU's memory and taking its taps is a matter of ptrace rights.
fn tracing_rights() -> Finding {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_else(|_| "0".into());
    let root = rustix::process::geteuid().is_root();
    match scope.trim() {
        "0" => finding("tracing", Level::Good, "a user may trace own processes", ""),
        "1" | "2" if root => finding("tracing", Level::Good, "root may trace", ""),
        other => finding(
            "tracing",
            Level::Bad,
            format!("kernel.yama.ptrace_scope is {other}"),
            "a warm reboot reads QEMU's memory: run as root, or sysctl kernel.yama.ptrace_scope=0",
        ),
    }
}
