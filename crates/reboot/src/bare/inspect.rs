//! What a guest with a QMP socket is, and what prevents the replacement of its QEMU.

use super::{BareOptions, supervision};
use crate::error::RebootError;
use crate::unprepared::inspect::{self, Inspected, Subject, check_not_attached, check_run_directory};
use crate::unprepared::{DESTINATION_GENERATION, UnpreparedError, preflight_error};
use rekindle_qemu::binary::Binary;
use rekindle_qemu::guest;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::takeover_command::{CommandLine, RunningFacts};
use rekindle_vm::definition::Name;
use rekindle_vm::host::Host;
use std::path::{PathBuf, absolute};
use std::time::Duration;

/// How long QEMU may take to greet. It serves one client at a time: another one may be connected.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(10);

/// A guest whose QEMU can be replaced, as far as that is known without starting another one.
pub(super) struct BareGuest {
    pub name: Name,
    pub monitor: Monitor,
    /// The file that must name the QEMU's process.
    pub pid_file: Option<PathBuf>,
    pub inspected: Inspected,
}

/// Inspects the guest `name`, which is not touched.
///
/// # Errors
/// [`RebootError::Preflight`] with everything that prevents the replacement; other errors if the guest cannot be
/// inspected.
pub(super) fn inspect(host: &Host, name: &str, options: &BareOptions) -> Result<BareGuest, RebootError> {
    let vm_name: Name = name.parse().map_err(|e| preflight_error(name, vec![format!("its name: {e}")]))?;
    check_run_directory(host, name)?;
    let path = absolute(&options.qmp).map_err(RebootError::file(&options.qmp))?;
    let monitor = Monitor::Socket { path };
    let (adopted, mut qmp) = monitor.adopt(MONITOR_TIMEOUT).map_err(UnpreparedError::from)?;
    check_not_attached(host, name, adopted.process())?;
    let binary = Binary::probe_cached(options.qemu.as_ref().unwrap_or(&adopted.binary), &host.binaries())?;
    let mut problems = Vec::new();
    let state = guest::run_state(&mut qmp)?;
    if state != "running" {
        problems.push(format!("the guest is {state}: resume it first"));
    }
    let process = adopted.process();
    let mut pid_file = None;
    let label = format!("{}-{}-{DESTINATION_GENERATION}", process.pid, process.started);
    let prefers_in_place = options.in_place;
    let subject = Subject { name, adopted, qmp, binary, label, socket_directory: None, prefers_in_place };
    let of_manager = |line: &CommandLine, _: &RunningFacts| {
        pid_file = line.pid_file.as_ref().map(PathBuf::from);
        let mut problems = password_problems(line);
        // It is relative to the directory in which QEMU was started, which is not known.
        if let Some(path) = pid_file.as_ref().filter(|path| path.is_relative()) {
            problems.push(format!("-pidfile {}: start QEMU with the full path", path.display()));
        }
        problems.extend(supervision::problem(process, pid_file.as_deref())?);
        Ok(problems)
    };
    let inspected = inspect::inspect(subject, problems, of_manager)?;
    Ok(BareGuest { name: vm_name, monitor, pid_file, inspected })
}

/// Returns the problems of servers with a password, which QEMU does not report.
fn password_problems(line: &CommandLine) -> Vec<String> {
    let needs_password = [
        ("VNC", line.vnc_server.as_ref().is_some_and(|server| server.needs_password)),
        ("SPICE", line.spice_server.as_ref().is_some_and(|server| server.needs_password)),
    ];
    let problem = |(server, _): (&str, bool)| {
        format!("{server} server: its password cannot be read: start the VM with password-secret=, or without one")
    };
    needs_password.into_iter().filter(|(_, needed)| *needed).map(problem).collect()
}
