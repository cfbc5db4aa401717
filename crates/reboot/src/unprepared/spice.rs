//! The SPICE server of a guest. The destination's server listens at a stand-in. When the
//! source has been frozen, the source's listening socket takes its place: connections that arrive meanwhile wait. After
//! a failure the source continues with its own socket.
//!
//! Clients that are connected lose their connection with the source, and connect again. A USB device that a client has
//! redirected prevents the replacement.

use crate::error::{RebootError, with_causes};
use rekindle_kernel::descriptor;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::process::Process;
use rekindle_libvirt::graphics_password::GraphicsPassword;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::takeover_command::{CommandLine, spice};
use rekindle_vm::journal::{PassedParts, PassedSpiceServer};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Returns what the journal has of the guest's SPICE server; `None` without one.
pub(crate) fn server(line: &CommandLine) -> Option<PassedSpiceServer> {
    line.spice_server
        .as_ref()
        .map(|server| PassedSpiceServer { listener: server.listener, stand_in: PathBuf::from(&server.stand_in) })
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
    let untraceable = RebootError::file(Path::new(&format!("/proc/{}/fd", destination.pid)));
    if let Some(number) = spice::stand_in_number(destination, &server.stand_in).map_err(&untraceable)? {
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
        let injector = Injector::new(destination).map_err(|e| untraceable(e.into()))?;
        descriptor::replace(injector, &[(server.listener, number)]).map_err(untraceable)?;
    }
    remove_stand_in(passed)
}

/// Removes the path of the stand-in, if there is one.
pub(crate) fn remove_stand_in(passed: &PassedParts) -> Result<(), RebootError> {
    let Some(server) = &passed.spice else { return Ok(()) };
    let removed: io::Result<()> = match fs::remove_file(&server.stand_in) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    };
    removed.map_err(RebootError::file(&server.stand_in))
}
