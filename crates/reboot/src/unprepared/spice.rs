//! The SPICE server of a guest. The destination's server listens at a [stand-in](super::stand_in).
//!
//! Clients that are connected lose their connection with the source, and connect again. A USB device that a client has
//! redirected prevents the replacement.

use super::stand_in;
use crate::error::{RebootError, with_causes};
use rekindle_kernel::process::Process;
use rekindle_libvirt::graphics_password::GraphicsPassword;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::takeover_command::{CommandLine, spice};
use rekindle_vm::journal::{PassedParts, PassedStandIn};
use std::path::PathBuf;
use std::slice;

/// Returns what the journal has of the guest's SPICE server; `None` without one.
pub(crate) fn server(line: &CommandLine) -> Option<PassedStandIn> {
    line.spice_server
        .as_ref()
        .map(|server| PassedStandIn { listener: server.listener, stand_in: PathBuf::from(&server.stand_in) })
}

/// Gives the destination's SPICE server its `password`, then the listening socket. Can be repeated.
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
    let Some(server) = &passed.spice else { return Ok(()) };
    let waiting = stand_in::waiting(destination, slice::from_ref(server))?;
    if !waiting.is_empty() {
        // The password comes first: no client may connect without.
        if let Some(password) = password {
            match spice::set_password(qmp, &password.text, &password.qemu_expiry()) {
                Err(e @ QmpError::Refused { .. }) => {
                    tracing::warn!("{name}: no SPICE until the guest's next start: {}", with_causes(&e));
                    return Ok(());
                }
                set => set?,
            }
        }
        stand_in::replace(destination, &waiting)?;
    }
    stand_in::remove(server)
}
