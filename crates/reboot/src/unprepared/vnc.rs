//! The VNC server of a guest. The destination starts with a server that listens nowhere, and with duplicates of the
//! source's listening sockets. Its server gets them when the source has been frozen: nothing is bound twice, connections
//! that arrive meanwhile wait, and a Unix socket keeps its path, owner and label. After a failure the source continues
//! with its own descriptors.
//!
//! QEMU accepts no descriptor for a websocket. A server with websockets starts at [stand-ins](super::stand_in).
//!
//! Clients that are connected lose their connection with the source, and connect again.

use super::{preflight_error, stand_in};
use crate::error::RebootError;
use rekindle_kernel::descriptor;
use rekindle_kernel::process::Process;
use rekindle_libvirt::graphics_password::GraphicsPassword;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::takeover_command::{CommandLine, vnc};
use rekindle_vm::journal::{PassedParts, PassedStandIn};
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;

/// Name of the server in messages.
const SERVER: &str = "VNC";

/// Returns the numbers in the destination at which the listening sockets of its VNC server are open; `None` without a
/// server.
pub(crate) fn listeners(line: &CommandLine) -> Option<Vec<RawFd>> {
    line.vnc_server.as_ref().map(|server| server.listeners.clone())
}

/// Returns the stand-ins at which the destination's VNC server listens.
pub(crate) fn stand_ins(line: &CommandLine) -> Vec<PassedStandIn> {
    line.vnc_server.as_ref().map(|server| stand_in::passed(&server.stand_ins)).unwrap_or_default()
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
    if !passed.vnc_stand_ins.is_empty() {
        return stand_in::pass(name, SERVER, &passed.vnc_stand_ins, destination, || set_password(password, qmp));
    }
    let Some(listeners) = &passed.vnc else { return Ok(()) };
    // Again, QEMU would close the sockets that it has, and remove the path of a Unix socket.
    if vnc::servers(qmp)?.first().is_some_and(|server| !server.addresses.is_empty()) {
        return Ok(());
    }
    let untraceable = RebootError::file(Path::new(&format!("/proc/{}/fd", destination.pid)));
    let sockets: Result<Vec<OwnedFd>, _> =
        listeners.iter().map(|number| descriptor::take(destination, *number)).collect();
    let sockets = sockets.map_err(untraceable)?;
    let listen = |qmp: &mut Qmp| if sockets.is_empty() { Ok(()) } else { vnc::listen(qmp, &sockets) };
    // The password comes first: no client may connect without.
    stand_in::accepted(name, SERVER, set_password(password, qmp).and_then(|()| listen(qmp))).map(drop)
}

fn set_password(password: Option<&GraphicsPassword>, qmp: &mut Qmp) -> Result<(), QmpError> {
    password.map_or(Ok(()), |password| vnc::set_password(qmp, &password.text, &password.qemu_expiry()))
}
