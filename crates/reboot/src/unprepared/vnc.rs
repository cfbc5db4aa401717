//! The VNC server of a guest. The destination starts with a server that listens nowhere, and with duplicates of the
//! source's listening sockets. Its server gets them when the source has been frozen: nothing is bound twice, connections
//! that arrive meanwhile wait, and a Unix socket keeps its path, owner and label. After a failure the source continues
//! with its own descriptors.
//!
//! Clients that are connected lose their connection with the source, and connect again.

use super::preflight_error;
use crate::error::{RebootError, with_causes};
use rekindle_kernel::descriptor;
use rekindle_kernel::process::Process;
use rekindle_libvirt::graphics_password::GraphicsPassword;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::takeover_command::{CommandLine, vnc};
use rekindle_vm::journal::PassedParts;
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;

/// Returns the numbers in the destination at which the listening sockets of its VNC server are open; `None` without a
/// server.
pub(crate) fn listeners(line: &CommandLine) -> Option<Vec<RawFd>> {
    line.vnc_server.as_ref().map(|server| server.listeners.clone())
}

/// Rejects a destination that cannot get listening sockets for VNC.
pub(crate) fn rehearse(name: &str, passed: &PassedParts, destination: &mut Qmp) -> Result<(), RebootError> {
    if passed.vnc.as_ref().is_some_and(|listeners| !listeners.is_empty()) && !vnc::can_listen(destination)? {
        let problem = "VNC server: the new QEMU cannot get its listening sockets (display-update is missing)";
        return Err(preflight_error(name, vec![problem.into()]));
    }
    Ok(())
}

/// Gives the destination's VNC server its `password`, then its listening sockets. Can be repeated.
///
/// *Needs:* the source is frozen, or has ended.
///
/// # Errors
/// [`RebootError`] if QEMU does not answer. If it answers with an error, VNC remains off: that is logged, because the
/// guest runs and its manager must get it back.
pub(crate) fn pass(
    name: &str,
    passed: &PassedParts,
    password: Option<&GraphicsPassword>,
    destination: Process,
    qmp: &mut Qmp,
) -> Result<(), RebootError> {
    let Some(listeners) = &passed.vnc else { return Ok(()) };
    // Again, QEMU would close the sockets that it has, and remove the path of a Unix socket.
    if vnc::servers(qmp)?.first().is_some_and(|server| !server.addresses.is_empty()) {
        return Ok(());
    }
    let untraceable = RebootError::file(Path::new(&format!("/proc/{}/fd", destination.pid)));
    let sockets: Result<Vec<OwnedFd>, _> =
        listeners.iter().map(|number| descriptor::take(destination, *number)).collect();
    let sockets = sockets.map_err(untraceable)?;
    match enable(password, &sockets, qmp) {
        Err(e @ QmpError::Refused { .. }) => {
            tracing::warn!("{name}: no VNC until the guest's next start: {}", with_causes(&e));
            Ok(())
        }
        enabled => Ok(enabled?),
    }
}

/// The password comes first: no client may connect without.
fn enable(password: Option<&GraphicsPassword>, sockets: &[OwnedFd], qmp: &mut Qmp) -> Result<(), QmpError> {
    if let Some(password) = password {
        vnc::set_password(qmp, &password.text, &password.qemu_expiry())?;
    }
    if sockets.is_empty() { Ok(()) } else { vnc::listen(qmp, sockets) }
}
