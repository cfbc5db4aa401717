//! Inspects a domain before anything is changed: everything that prevents the replacement is an error that names it.

use super::status_file::{DomainRecord, StatusFile, StatusFileError};
use super::{DomainOptions, daemon, graphics, obstacles};
use crate::error::RebootError;
use crate::unprepared::inspect::{self, Inspected, Subject, check_not_attached, check_run_directory};
use crate::unprepared::{DESTINATION_GENERATION, UnpreparedError, preflight_error};
use rekindle_qemu::binary::Binary;
use rekindle_qemu::monitor::Monitor;
use rekindle_qemu::takeover_command::{CommandLine, RunningFacts};
use rekindle_vm::definition::Name;
use rekindle_vm::host::Host;
use rekindle_vm::journal::DaemonRecord;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long libvirt may take to pass the first command on.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(30);

/// A domain whose QEMU can be replaced, as far as that is known without starting another one.
pub(super) struct DomainToReplace {
    pub name: Name,
    pub status_file: PathBuf,
    pub record: DomainRecord,
    pub daemon: DaemonRecord,
    /// Its connection to the source is through libvirt.
    pub inspected: Inspected,
}

/// Returns how to reach a domain's QEMU while libvirt's daemon runs.
pub(super) fn libvirt_monitor(name: &str) -> Monitor {
    Monitor::Libvirt { domain: name.into(), connect: Some("qemu:///system".into()) }
}

/// Inspects the domain `name`. The guest is not touched.
///
/// # Errors
/// [`RebootError::Preflight`] with everything that prevents the replacement; other errors if the domain cannot be
/// inspected.
pub(super) fn inspect(host: &Host, name: &str, options: &DomainOptions) -> Result<DomainToReplace, RebootError> {
    let vm_name: Name = name.parse().map_err(|e| preflight_error(name, vec![format!("its name: {e}")]))?;
    check_run_directory(host, name)?;
    let status_file = StatusFile::path_of(name);
    let status = StatusFile::read(&status_file)?;
    let record = status.parse()?;
    check_record(name, &record)?;
    let daemon = daemon::find()?;
    let (adopted, qmp) = libvirt_monitor(name).adopt(MONITOR_TIMEOUT).map_err(UnpreparedError::from)?;
    if adopted.pid != record.pid {
        return Err(UnpreparedError::Changed { name: name.into(), what: "it has another QEMU".into() }.into());
    }
    check_not_attached(host, name, adopted.process())?;
    let path = options.qemu.clone().unwrap_or_else(|| record.emulator.clone());
    let binary = Binary::probe_cached(&path, &host.binaries())?;
    let malformed =
        |e: roxmltree::Error| StatusFileError::Malformed { path: status_file.clone(), problem: e.to_string() };
    let problems = obstacles::of_status(name, status.text()).map_err(malformed)?;
    let subject = Subject {
        name,
        adopted,
        qmp,
        binary,
        label: format!("{}-{DESTINATION_GENERATION}", record.uuid),
        socket_directory: record.monitor.parent().map(Path::to_owned),
        prefers_in_place: options.in_place,
    };
    let of_manager = |line: &CommandLine, facts: &RunningFacts| {
        let mut problems = graphics::password_problems(name, line, &status)?;
        problems.extend(obstacles::logs(status.text(), &facts.plugged_ports).map_err(malformed)?);
        problems.extend(line.pid_file.iter().map(|path| format!("-pidfile {path}: libvirt does not use it")));
        Ok(problems)
    };
    let inspected = inspect::inspect(subject, problems, of_manager)?;
    Ok(DomainToReplace { name: vm_name, status_file, record, daemon, inspected })
}

fn check_record(name: &str, record: &DomainRecord) -> Result<(), RebootError> {
    let mut problems = Vec::new();
    if record.state != "running" {
        problems.push(format!("libvirt reports it as {}: resume it first (virsh resume {name})", record.state));
    }
    if let Some(job) = &record.job {
        problems.push(format!("libvirt is busy with it ({job}): wait until that has ended"));
    }
    if problems.is_empty() { Ok(()) } else { Err(preflight_error(name, problems)) }
}
