//! Hands the device `/dev/userfaultfd` to a QEMU of another user.
//!
//! Only root may make a userfaultfd, unless `vm.unprivileged_userfaultfd` is set. But a process that has the device
//! open may make one with it. Therefore a QEMU of another user is handed a descriptor of the device for as long as it
//! needs it. So is a QEMU of root, if this process has a system call filter, as the processes of a systemd unit may have:
//! such a process cannot suspend the filter of QEMU, and makes it only the calls that every process makes
//! ([`rekindle_kernel::inject`]), of which `userfaultfd(2)` is none.

use crate::qmp::{Qmp, QmpError};
use rekindle_kernel::descriptor;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::remote::{DEVICE, device_in};
use rustix::fd::{AsFd, RawFd};
use serde_json::{Value, json};
use std::fs::{self, OpenOptions};
use std::io;

/// Name under which QEMU knows the descriptor.
const FD_NAME: &str = "rekindle-userfaultfd";

/// Hands QEMU a descriptor of the device if QEMU needs it and this process can open it. Returns its number in QEMU.
/// None: QEMU makes a userfaultfd by itself, or fails with an error.
///
/// # Errors
/// When QEMU does not answer or rejects the descriptor.
pub fn hand(qmp: &mut Qmp, process: Process) -> Result<Option<RawFd>, QmpError> {
    if is_of_root(process) && !is_filtered() {
        return Ok(None);
    }
    if let Ok(descriptor @ Some(_)) = device_in(process) {
        return Ok(descriptor);
    }
    let device = match OpenOptions::new().read(true).write(true).open(DEVICE) {
        Ok(device) => device,
        Err(e) => {
            tracing::debug!("{DEVICE}: {e}");
            return Ok(None);
        }
    };
    qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": FD_NAME }), device.as_fd())?;
    Ok(device_in(process).ok().flatten())
}

/// Does the same as [`hand`] for a QEMU whose monitor another program uses. The caller closes the descriptor.
///
/// # Errors
/// When this process may not open the device, or QEMU does not receive the descriptor.
pub fn inject(injector: Injector) -> io::Result<Option<RawFd>> {
    if is_of_root(injector.process()) {
        return Ok(None);
    }
    let device = OpenOptions::new().read(true).write(true).open(DEVICE)?;
    descriptor::give(injector, device.as_fd()).map(Some)
}

/// Returns whether the process runs as root, so that it may make a userfaultfd by itself.
fn is_of_root(process: Process) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap_or_default();
    let effective_uid = status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().nth(1));
    effective_uid == Some("0")
}

/// Returns whether this process has a system call filter.
fn is_filtered() -> bool {
    Process::current().and_then(|process| process.has_syscall_filter()).unwrap_or(false)
}

/// Makes QEMU close the descriptor of [`hand`]. It is no error if QEMU does not have it.
///
/// # Errors
/// When QEMU does not answer.
pub fn take_back(qmp: &mut Qmp) -> Result<(), QmpError> {
    match qmp.execute::<Value>("closefd", json!({ "fdname": FD_NAME })) {
        Err(QmpError::Refused { .. }) => Ok(()),
        other => other.map(drop),
    }
}
