//! The passwords of a domain's VNC and SPICE servers. QEMU does not report them; libvirt's record may have them.

use super::status_file::{StatusFile, StatusFileError};
use rekindle_libvirt::graphics_password::{GraphicsPassword, Server};
use rekindle_qemu::takeover_command::CommandLine;

/// Returns the problems of servers whose password is unknown.
pub(super) fn password_problems(
    name: &str,
    line: &CommandLine,
    status: &StatusFile,
) -> Result<Vec<String>, StatusFileError> {
    let needs_password = [
        (Server::Vnc, line.vnc_server.as_ref().map(|server| server.needs_password)),
        (Server::Spice, line.spice_server.as_ref().map(|server| server.needs_password)),
    ];
    let mut problems = Vec::new();
    for (server, needs_password) in needs_password {
        // A password with a time that cannot be read is an error in any case.
        let password = GraphicsPassword::of(status, server)?;
        if password.is_none() && needs_password == Some(true) {
            problems.push(format!(
                "{} server: libvirt has recorded no password for it (the one of qemu.conf may have changed): give the \
                 domain its own, <graphics type='{}' passwd=...>, with: virsh update-device {name} FILE --live",
                server.name(),
                server.kind(),
            ));
        }
    }
    Ok(problems)
}
