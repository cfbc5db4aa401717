//! Checks this host for problems, with hints.

use crate::hardware::has_kvm;
use crate::helpers::{self, Helper};
use crate::host::Host;
use crate::qemu_user::Obstacle;
use crate::rundir::RunDir;
use crate::state::State;
use rekindle_kernel::confinement::status::Rights;
use rekindle_kernel::confinement::support;
use rekindle_kernel::uring::Ring;
use rekindle_kernel::userfault::remote::DEVICE;
use rekindle_kernel::userfault::{self, Features};
use rekindle_kernel::vhost_net;
use rekindle_memory::directory::available_memory;
use rekindle_qemu::binary::Binary;
use rekindle_qemu::vmm::Vmm;
use rustix::io::Errno;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::process::Command;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const TEST_RING_ENTRIES: u32 = 8;

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the check.
    #[serde(rename = "what")]
    pub check: String,
    /// Severity of the finding.
    pub level: Level,
    /// What was found.
    #[serde(rename = "found")]
    pub observation: String,
    /// What to do about it; empty if nothing is to be done.
    #[serde(rename = "mend")]
    pub hint: String,
}

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// No problem.
    Good,
    /// Something is slower, not possible, or less protected.
    Limited,
    /// VMs cannot run.
    Bad,
}

/// Runs all checks.
#[must_use]
pub fn examine(qemu: &Path) -> Vec<Finding> {
    vec![
        check_binary(qemu),
        check_kvm(),
        check_userfaultfd(),
        check_write_tracking(),
        check_run_directory(),
        check_memory(),
        check_disk_servers(),
        check_taps(),
        check_vhost_net(),
        check_iproute2(),
        check_tracing_rights(),
        check_sandboxes(qemu),
        check_users(),
        check_helpers(),
    ]
}

fn finding(check: &str, level: Level, observation: impl Into<String>, hint: impl Into<String>) -> Finding {
    Finding { check: check.into(), level, observation: observation.into(), hint: hint.into() }
}

fn check_binary(path: &Path) -> Finding {
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

fn check_kvm() -> Finding {
    if has_kvm() {
        return finding("KVM", Level::Good, "kvm_intel or kvm_amd is loaded and /dev/kvm opens", "");
    }
    let hint = "guests run under TCG, ten times slower; load kvm_intel or kvm_amd, add this user to group kvm";
    match open_device(Path::new("/dev/kvm")) {
        Ok(_) => finding("KVM", Level::Limited, "/dev/kvm opens, but neither kvm_intel nor kvm_amd is loaded", hint),
        Err(e) => finding("KVM", Level::Limited, format!("/dev/kvm: {e}"), hint),
    }
}

/// `protect`, and a restore that loads memory on demand, need a userfaultfd in QEMU. Root can make it in each QEMU that runs as root.
fn check_userfaultfd() -> Finding {
    const CHECK: &str = "userfaultfd";
    let Err(e) = open_device(Path::new(DEVICE)) else {
        return finding(CHECK, Level::Good, format!("{DEVICE} opens"), "");
    };
    let hint = if e.kind() == io::ErrorKind::PermissionDenied {
        "protect and restore need it: permit this user to read and write it, as in docs/without-root.md"
    } else {
        "Linux 6.1 or newer; until then, only QEMUs that run as root can be protected, and restored on demand"
    };
    finding(CHECK, Level::Limited, format!("{DEVICE}: {e}"), hint)
}

/// Checks that this kernel can record which pages of a guest are written, as `protect` needs it.
fn check_write_tracking() -> Finding {
    const CHECK: &str = "page tracking";
    match userfault::supported() {
        Ok(features) if features.contains(Features::WP_ASYNC) => {
            finding(CHECK, Level::Good, "the kernel can record which pages a guest writes", "")
        }
        Ok(_) => {
            let observation = "the kernel cannot record which pages a guest writes";
            finding(CHECK, Level::Limited, observation, "protect, move and attach need Linux 6.7 or newer")
        }
        Err(e) => finding(CHECK, Level::Limited, e.to_string(), "protect, move and attach need a userfaultfd"),
    }
}

fn open_device(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Checks that the QEMUs of this user's VMs have a system call filter, and that the one at `binary` has support for it.
fn check_sandboxes(binary: &Path) -> Finding {
    const CHECK: &str = "sandbox";
    if Binary::probe(binary).is_ok_and(|binary| !binary.syntax.sandbox) {
        let observation = format!("{} was built without seccomp", binary.display());
        return finding(CHECK, Level::Limited, observation, "use a QEMU with seccomp (Debian's has it)");
    }
    let unfiltered = match unfiltered_qemus() {
        Ok(unfiltered) => unfiltered,
        Err(e) => {
            return finding(CHECK, Level::Limited, format!("cannot list the VMs: {e}"), "repair what the error names");
        }
    };
    if unfiltered.is_empty() {
        return finding(CHECK, Level::Good, "each QEMU of Rekindle's VMs has a system call filter", "");
    }
    let observation = format!("QEMU has no system call filter (seccomp): {}", unfiltered.join(", "));
    let hint = "remove -sandbox from qemu_args, or use a QEMU with seccomp; then run: rekindle replace-qemu NAME";
    finding(CHECK, Level::Limited, observation, hint)
}

/// Checks that no QEMU of root's VMs, and no server of their disks, runs as root.
fn check_users() -> Finding {
    const CHECK: &str = "QEMU's users";
    if !rustix::process::geteuid().is_root() {
        return finding(CHECK, Level::Good, "QEMUs run as this user, which is not root", "");
    }
    let of_root = qemus_of_root().and_then(|qemus| Ok((qemus, disk_servers_of_root()?)));
    match of_root {
        Err(e) => finding(CHECK, Level::Limited, format!("cannot list the VMs: {e}"), "repair what the error names"),
        Ok((qemus, servers)) if qemus.is_empty() && servers.is_empty() => {
            finding(CHECK, Level::Good, "no QEMU of Rekindle's VMs and no server of their disks runs as root", "")
        }
        Ok((qemus, servers)) if qemus.is_empty() => {
            let observation =
                format!("the server of a disk runs as root, its VM's QEMU does not: {}", servers.join("; "));
            let hint = "remove confine_helpers from host.toml, then end the servers: rekindle watch starts others as the user of the VM; if \
                        they run as root again, a warning in the log of rekindle watch has the reason";
            finding(CHECK, Level::Limited, observation, hint)
        }
        Ok((qemus, _)) => {
            let observation = format!("QEMU runs as root: {}", qemus.join("; "));
            let hint = "without a reason: check host.toml (qemu_own_user, qemu_as_root), then run: rekindle replace-qemu NAME; otherwise see \
                        The user of a VM in docs/run-directory.md";
            finding(CHECK, Level::Limited, observation, hint)
        }
    }
}

/// Describes the servers of disks that run as root although the QEMU of their VM has another user.
fn disk_servers_of_root() -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let root = Host::open()?.root;
    let mut found = Vec::new();
    for name in qemus_with(|qemu| qemu.owner().is_ok_and(|owner| !owner.user.is_root()))? {
        let rundir = RunDir::new(&root, &name);
        let servers = helpers::needed(&rundir)?.into_iter().filter(|helper| matches!(helper, Helper::Disk(_)));
        // A server that has just ended has no rights.
        let rights = |helper: &Helper| helper.process(&rundir).and_then(|process| Rights::of(process).ok());
        let of_root = servers.filter(|helper| rights(helper).is_some_and(|rights| rights.is_root));
        found.extend(of_root.map(|helper| format!("{helper} of {name}")));
    }
    Ok(found)
}

/// Returns the names of the VMs whose QEMU was started by Rekindle and runs as root, each with what prevents another user.
fn qemus_of_root() -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let root = Host::open()?.root;
    let mut found = qemus_with(|qemu| qemu.owner().is_ok_and(|owner| owner.user.is_root()))?;
    for name in &mut found {
        let state = State::read(&RunDir::new(&root, name))?;
        if let Some(obstacle) = state.and_then(|state| Obstacle::of(&state.hardware)) {
            *name = format!("{name} ({obstacle})");
        }
    }
    Ok(found)
}

/// Returns the names of the VMs whose QEMU was started by Rekindle and has no system call filter, sorted.
fn unfiltered_qemus() -> Result<Vec<String>, Box<dyn std::error::Error>> {
    qemus_with(|qemu| matches!(qemu.process().has_syscall_filter(), Ok(false)))
}

/// Returns the names of the VMs that have a QEMU which Rekindle has started and for which `is_wanted`, sorted.
fn qemus_with(is_wanted: impl Fn(&Vmm) -> bool) -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let root = Host::open()?.root;
    let mut found = Vec::new();
    for name in RunDir::list(&root)? {
        let Some(state) = State::read(&RunDir::new(&root, &name))? else { continue };
        // The program that has started an attached QEMU is responsible for its sandbox.
        if state.attached.is_none() && state.qemus().any(&is_wanted) {
            found.push(name);
        }
    }
    Ok(found)
}

/// Checks that the disk servers and pagers of this user's VMs are confined, and that the kernel supports all of it.
fn check_helpers() -> Finding {
    const CHECK: &str = "confinement";
    let limited = |observation, hint| finding(CHECK, Level::Limited, observation, hint);
    match unconfined_helpers() {
        Err(e) => limited(format!("cannot list the helpers: {e}"), "repair what the error names"),
        Ok(unconfined) if !unconfined.is_empty() => limited(
            unconfined.join("; "),
            "remove confine_helpers from host.toml; make each file of these VMs belong to the user that runs them; \
             then end the helpers: rekindle watch restarts them",
        ),
        Ok(_) => match support().missing()[..] {
            [] => finding(CHECK, Level::Good, "disk servers and pagers are confined", ""),
            ref missing => {
                limited(format!("this kernel does not confine: {}", missing.join("; ")), "use a newer kernel")
            }
        },
    }
}

/// Describes the running disk servers and pagers that are not confined.
fn unconfined_helpers() -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let root = Host::open()?.root;
    let mut unconfined = Vec::new();
    for name in RunDir::list(&root)? {
        let rundir = RunDir::new(&root, &name);
        let confined =
            helpers::needed(&rundir)?.into_iter().filter(|helper| matches!(helper, Helper::Disk(_) | Helper::Pager));
        for helper in confined {
            // A helper that has just ended has no rights.
            let rights = helper.process(&rundir).and_then(|process| Rights::of(process).ok());
            if let Some(missing) = rights.and_then(|rights| rights.describe_missing()) {
                unconfined.push(format!("{helper} of {name}: {missing}"));
            }
        }
    }
    Ok(unconfined)
}

fn check_run_directory() -> Finding {
    match Host::open() {
        Ok(host) => {
            let root = host.root.display().to_string();
            let tmpfs = rustix::fs::statfs(&host.root).is_ok_and(|stat| stat.f_type as u64 == TMPFS_MAGIC);
            if tmpfs {
                finding("run directory", Level::Good, root, "")
            } else {
                let hint = "guests are stopped longer, for each synced write: set REKINDLE_RUN_DIR to one on a tmpfs";
                finding("run directory", Level::Limited, format!("{root} is not on a tmpfs"), hint)
            }
        }
        Err(e) => {
            let cause = std::error::Error::source(&e).map(|e| format!(": {e}")).unwrap_or_default();
            finding("run directory", Level::Bad, format!("{e}{cause}"), "set REKINDLE_RUN_DIR to a directory of yours")
        }
    }
}

fn check_memory() -> Finding {
    match available_memory() {
        Ok(bytes) => finding("memory", Level::Good, format!("{} MiB available", bytes >> 20), ""),
        Err(e) => finding("memory", Level::Bad, e.to_string(), "mount /proc"),
    }
}

/// Disk servers use `io_uring`: create a ring as they do, because the limits of this process may differ from theirs.
fn check_disk_servers() -> Finding {
    const CHECK: &str = "io_uring";
    let Err(e) = Ring::new(TEST_RING_ENTRIES) else {
        return finding(CHECK, Level::Good, "disks can have servers", "");
    };
    let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok();
    let (observation, hint) = explain_io_uring_error(&e, disabled.as_deref().map(str::trim));
    let hint = format!("{hint}; disks need `server = false` until then");
    finding(CHECK, Level::Limited, observation, hint)
}

/// Returns why the kernel rejects a ring, and a hint. `disabled` is the content of `kernel.io_uring_disabled`.
fn explain_io_uring_error(error: &io::Error, disabled: Option<&str>) -> (String, &'static str) {
    match (disabled, Errno::from_io_error(error)) {
        (Some("2"), _) => ("kernel.io_uring_disabled is 2".into(), "sysctl kernel.io_uring_disabled=0"),
        (Some("1"), _) => (
            "kernel.io_uring_disabled is 1".into(),
            "run as root or in the group of kernel.io_uring_group, or sysctl kernel.io_uring_disabled=0",
        ),
        (_, Some(Errno::PERM | Errno::ACCESS)) => (
            format!("{error}, although the kernel has not switched it off: a seccomp filter or a security module does"),
            "a container's: let it have io_uring_setup, io_uring_enter and io_uring_register (docker run --security-opt seccomp=PROFILE)",
        ),
        (_, Some(Errno::NOSYS)) => (
            format!("{error}: the kernel was built without it, or a seccomp filter hides it"),
            "a kernel with CONFIG_IO_URING, or a container that is let have io_uring_setup",
        ),
        (_, Some(Errno::NOMEM)) => (format!("{error}"), "raise the limit of locked memory (ulimit -l), or run as root"),
        _ => (format!("{error}"), "a kernel from Linux 5.11 on"),
    }
}

fn check_taps() -> Finding {
    let root = rustix::process::geteuid().is_root();
    match open_device(Path::new("/dev/net/tun")) {
        Ok(_) if root => finding("taps", Level::Good, "/dev/net/tun opens", ""),
        Ok(_) => finding("taps", Level::Limited, "not root", "run as root for `kind = \"tap\"`; `user` works"),
        Err(e) => {
            let denied = e.kind() == io::ErrorKind::PermissionDenied;
            let hint = if denied { "run as root for `kind = \"tap\"`" } else { "modprobe tun" };
            finding("taps", Level::Limited, format!("/dev/net/tun: {e}"), format!("{hint}; `kind = \"user\"` works"))
        }
    }
}

fn check_vhost_net() -> Finding {
    match vhost_net::open() {
        Ok(_) => finding("vhost-net", Level::Good, format!("{} opens", vhost_net::DEVICE), ""),
        Err(e) => finding("vhost-net", Level::Limited, e.to_string(), "only `vhost = true` in a definition needs it"),
    }
}

fn check_iproute2() -> Finding {
    match Command::new("ip").arg("-V").output() {
        Ok(output) => finding("iproute2", Level::Good, String::from_utf8_lossy(&output.stdout).trim(), ""),
        Err(e) => finding("iproute2", Level::Limited, format!("ip: {e}"), "apt-get install iproute2 for taps"),
    }
}

/// Rights to trace a process are required to read QEMU's memory and to duplicate its taps.
fn check_tracing_rights() -> Finding {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_else(|_| "0".into());
    let root = rustix::process::geteuid().is_root();
    match scope.trim() {
        "0" => finding("tracing", Level::Good, "a user may trace own processes", ""),
        "1" | "2" if root => finding("tracing", Level::Good, "root may trace", ""),
        scope => finding(
            "tracing",
            Level::Bad,
            format!("kernel.yama.ptrace_scope is {scope}"),
            "a warm reboot reads QEMU's memory: run as root, or set kernel.yama.ptrace_scope=0 in a file of /etc/sysctl.d",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_for_no_io_uring_is_named_with_a_hint() {
        let refused = |errno: Errno, disabled| explain_io_uring_error(&errno.into(), disabled);
        assert_eq!(refused(Errno::PERM, Some("2")).1, "sysctl kernel.io_uring_disabled=0");
        assert!(refused(Errno::PERM, Some("1")).1.contains("kernel.io_uring_group"));
        for disabled in [Some("0"), None] {
            let (observation, hint) = refused(Errno::PERM, disabled);
            assert!(observation.contains("seccomp") && hint.contains("io_uring_setup"), "{observation}: {hint}");
        }
        assert!(refused(Errno::NOSYS, None).0.contains("without it"));
        assert!(refused(Errno::NOMEM, Some("0")).1.contains("ulimit -l"));
        assert!(refused(Errno::INVAL, Some("0")).1.contains("Linux 5.11"));
    }

    #[test]
    fn the_finding_about_io_uring_is_what_a_server_would_find() {
        let finding = check_disk_servers();
        assert_eq!(finding.level == Level::Good, Ring::new(256).is_ok(), "{finding:?}");
        assert_eq!(finding.hint.is_empty(), finding.level == Level::Good, "{finding:?}");
    }
}
