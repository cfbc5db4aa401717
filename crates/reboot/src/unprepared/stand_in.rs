//! Stand-ins at which a server of the destination listens until the source has been frozen. Then the source's listening
//! sockets take their places: connections that arrive meanwhile wait. After a failure the source continues with its own.

use super::preflight_error;
use crate::error::RebootError;
use rekindle_kernel::descriptor;
use rekindle_kernel::inject::Injector;
use rekindle_kernel::process::Process;
use rekindle_qemu::qmp::QmpError;
use rekindle_qemu::takeover_command::stand_in::{self, StandIn};
use rekindle_vm::causes::with_causes;
use rekindle_vm::journal::{PassedParts, PassedStandIn};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

/// Returns what the journal has of stand-ins.
pub(crate) fn passed(stand_ins: &[StandIn]) -> Vec<PassedStandIn> {
    let passed = |stand_in: &StandIn| PassedStandIn {
        listener: stand_in.listener,
        stand_in: PathBuf::from(&stand_in.path),
        is_removed: stand_in.is_removed,
    };
    stand_ins.iter().map(passed).collect()
}

/// Rejects a destination that does not listen at all of its stand-ins.
pub(crate) fn rehearse(name: &str, passed: &PassedParts, destination: Process) -> Result<(), RebootError> {
    for stand_ins in [&passed.vnc_stand_ins, &passed.spice_stand_ins] {
        if waiting(destination, stand_ins)?.len() < stand_ins.len() {
            let problem = "VNC or SPICE server: the new QEMU does not listen where the command line states it; \
                           choose another one (--qemu)";
            return Err(preflight_error(name, vec![problem.into()]));
        }
    }
    Ok(())
}

/// Returns the stand-ins that were not replaced: for each, the number of the real socket and that of the stand-in.
fn waiting(destination: Process, stand_ins: &[PassedStandIn]) -> Result<Vec<(RawFd, RawFd)>, RebootError> {
    let mut pairs = Vec::new();
    for stand_in in stand_ins {
        let number =
            stand_in::number(destination, &stand_in.stand_in, stand_in.is_removed).map_err(untraceable(destination))?;
        pairs.extend(number.map(|number| (stand_in.listener, number)));
    }
    Ok(pairs)
}

/// Puts the source's listening sockets into the places of the stand-ins of a `server`, VNC or SPICE, after `set_password`.
/// Can be repeated.
///
/// *Needs:* the source is frozen, or has ended.
///
/// # Errors
/// [`RebootError`] if QEMU does not answer or cannot be traced. If it rejects the password, the server remains off: see
/// [`accepted`].
pub(crate) fn pass(
    name: &str,
    server: &str,
    stand_ins: &[PassedStandIn],
    destination: Process,
    set_password: impl FnOnce() -> Result<(), QmpError>,
) -> Result<(), RebootError> {
    let waiting = waiting(destination, stand_ins)?;
    if !waiting.is_empty() {
        // The password comes first: no client may connect without.
        if !accepted(name, server, set_password())? {
            return Ok(());
        }
        let injector = Injector::new(destination).map_err(|e| untraceable(destination)(e.into()))?;
        descriptor::replace(injector, &waiting).map_err(untraceable(destination))?;
    }
    stand_ins.iter().try_for_each(remove)
}

/// Returns whether QEMU has accepted a command for a `server`, VNC or SPICE. If it answers with an error, the server remains
/// off: that is logged, because the guest runs and its manager must get it back.
pub(crate) fn accepted(name: &str, server: &str, answer: Result<(), QmpError>) -> Result<bool, RebootError> {
    match answer {
        Err(e @ QmpError::Refused { .. }) => {
            tracing::warn!("{name}: no {server} until the guest's next start: {}", with_causes(&e));
            Ok(false)
        }
        answer => Ok(answer.map(|()| true)?),
    }
}

fn untraceable(destination: Process) -> impl Fn(io::Error) -> RebootError {
    RebootError::file(Path::new(&format!("/proc/{}/fd", destination.pid)))
}

/// Removes the paths of all stand-ins. Can be repeated.
pub(crate) fn remove_all(passed: &PassedParts) -> Result<(), RebootError> {
    for stand_in in passed.spice_stand_ins.iter().chain(&passed.vnc_stand_ins) {
        remove(stand_in)?;
    }
    Ok(())
}

/// Removes the path of a stand-in, if there is one.
fn remove(stand_in: &PassedStandIn) -> Result<(), RebootError> {
    let removed: io::Result<()> = match fs::remove_file(&stand_in.stand_in) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    };
    removed.map_err(RebootError::file(&stand_in.stand_in))
}
