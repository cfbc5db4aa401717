//! The SPICE server of a guest. The destination's server listens at [stand-ins](super::stand_in).
//!
//! Clients that are connected lose their connection with the source, and connect again. A USB device that a client has
//! redirected prevents the replacement.

use super::stand_in;
use crate::error::RebootError;
use rekindle_kernel::process::Process;
use rekindle_libvirt::graphics_password::GraphicsPassword;
use rekindle_qemu::qmp::Qmp;
use rekindle_qemu::takeover_command::{CommandLine, spice};
use rekindle_vm::journal::{PassedParts, PassedStandIn};

/// Returns the stand-ins at which the destination's SPICE server listens.
pub(crate) fn stand_ins(line: &CommandLine) -> Vec<PassedStandIn> {
    line.spice_server.as_ref().map(|server| stand_in::passed(&server.stand_ins)).unwrap_or_default()
}

/// Gives the destination's SPICE server its `password`, then the listening sockets. Can be repeated.
///
/// *Needs:* the source is frozen, or has ended.
///
/// # Errors
/// [`RebootError`] if QEMU does not answer or cannot be traced. If it rejects the password, SPICE remains off: that is
/// logged, because the guest runs and its manager must get it back.
pub(crate) fn pass(
    name: &str,
    passed: &PassedParts,
    password: Option<&GraphicsPassword>,
    destination: Process,
    qmp: &mut Qmp,
) -> Result<(), RebootError> {
    let set_password =
        || password.map_or(Ok(()), |password| spice::set_password(qmp, &password.text, &password.qemu_expiry()));
    stand_in::pass(name, "SPICE", &passed.spice_stand_ins, destination, set_password)
}
