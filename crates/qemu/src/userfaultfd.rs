//! Hands the device `/dev/userfaultfd` to a QEMU of another user.
//!
//! Only root may make a userfaultfd, unless `vm.unprivileged_userfaultfd` is set. But a process that has the device
//! open may make one with it. Therefore a QEMU of another user is handed a descriptor of the device for as long as it
//! needs it.

use crate::qmp::{Qmp, QmpError};
use rekindle_kernel::process::Process;
use rekindle_kernel::userfault::remote::{DEVICE, device_in};
use rustix::fd::{AsFd, RawFd};
use serde_json::{Value, json};
use std::fs::{self, OpenOptions};

/// Name under which QEMU knows the descriptor.
const FD_NAME: &str = "rekindle-userfaultfd";

/// Hands QEMU a descriptor of the device if QEMU needs it and this process can open it. Returns its number in QEMU.
/// None: QEMU makes a userfaultfd by itself, or fails with an error.
///
/// # Errors
/// When QEMU does not answer or rejects the descriptor.
pub fn hand(qmp: &mut Qmp, process: Process) -> Result<Option<RawFd>, QmpError> {
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap_or_default();
    let effective_uid = status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().nth(1));
    if effective_uid == Some("0") {
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
