//! Programs that wait for the end of a QEMU: its parent process, or systemd. Such a program takes the replacement for the
//! end of the guest, and may start it a second time.

use crate::error::RebootError;
use crate::unprepared::pid_file;
use rekindle_kernel::process::Process;
use rekindle_kernel::systemd;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Returns the problem of a QEMU whose end another program would notice. `pid_file`: the file that will name its successor.
///
/// # Errors
/// When the process has ended, or systemd cannot be asked.
pub(super) fn problem(qemu: Process, pid_file: Option<&Path>) -> Result<Option<String>, RebootError> {
    let directory = PathBuf::from(format!("/proc/{}", qemu.pid));
    let failed = RebootError::file(&directory);
    let control_groups = fs::read_to_string(directory.join("cgroup")).map_err(&failed)?;
    if let Some(service) = service_of(&control_groups)
        && systemd::is_running()
    {
        let properties = systemd::show(service, &["MainPID", "Type", "PIDFile"]);
        let properties = properties.map_err(RebootError::file(Path::new("systemctl")))?;
        if let Some(problem) = problem_of_service(service, &properties, qemu.pid, pid_file) {
            return Ok(Some(problem));
        }
        if properties.get("MainPID") == Some(&qemu.pid.to_string()) {
            return Ok(None);
        }
    }
    let parent = parent_of(&directory).map_err(&failed)?;
    if parent <= 1 {
        return Ok(None);
    }
    let name = fs::read_to_string(format!("/proc/{parent}/comm")).unwrap_or_default();
    if name.trim() == "systemd" {
        return Ok(None);
    }
    Ok(Some(format!(
        "its parent, process {parent} ({}), would take the replacement for the end of the guest: start QEMU with \
         -daemonize, or as a service or scope of systemd",
        name.trim()
    )))
}

/// Returns the service of systemd in whose control group a process is; `None` in a scope, such as those of Proxmox.
fn service_of(control_groups: &str) -> Option<&str> {
    let paths = control_groups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let mut services = paths.filter_map(|path| {
        let unit = path.split('/').rfind(|part| part.ends_with(".service") || part.ends_with(".scope"))?;
        unit.ends_with(".service").then_some(unit)
    });
    services.next_back()
}

/// Returns the problem of a service whose main process is the QEMU. One of type `forking` reads its pid file again when
/// its main process ends, and continues with the process that it names.
fn problem_of_service(
    service: &str,
    properties: &BTreeMap<String, String>,
    qemu: u32,
    pid_file: Option<&Path>,
) -> Option<String> {
    let property = |name: &str| properties.get(name).map(String::as_str).unwrap_or_default();
    if property("MainPID") != qemu.to_string() {
        return None;
    }
    let reads_pid_file =
        pid_file.is_some_and(|path| Path::new(property("PIDFile")) == path && pid_file::names(path, qemu));
    if property("Type") == "forking" && reads_pid_file {
        return None;
    }
    Some(format!(
        "it is the main process of {service}: systemd would take the replacement for the end of the guest. Give the service \
         Type=forking and PIDFile=, and QEMU -daemonize and -pidfile with the same path"
    ))
}

fn parent_of(directory: &Path) -> io::Result<u32> {
    let status = fs::read_to_string(directory.join("status"))?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).and_then(|text| text.trim().parse().ok());
    parent.ok_or_else(|| io::Error::other("its status names no parent"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_found_in_both_versions_of_control_groups() {
        let unified = "0::/system.slice/vm@web.service\n";
        assert_eq!(service_of(unified), Some("vm@web.service"));
        let named = "5:memory:/x\n1:name=systemd:/system.slice/vm.service/qemu\n";
        assert_eq!(service_of(named), Some("vm.service"));
        assert_eq!(service_of("0::/qemu.slice/100.scope\n"), None);
        assert_eq!(service_of("0::/user.slice/user-0.slice/user@0.service/app.slice/run-1.scope\n"), None);
        assert_eq!(service_of("0::/\n"), None);
    }

    #[test]
    fn only_a_forking_service_with_the_same_pid_file_continues() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "7\n").unwrap();
        let path = file.path().to_str().unwrap();
        let problem = |properties: &[(&str, &str)], pid_file| {
            let properties = properties.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            problem_of_service("vm.service", &properties, 7, pid_file)
        };
        let forking = [("MainPID", "7"), ("Type", "forking"), ("PIDFile", path)];
        assert_eq!(problem(&forking, Some(file.path())), None);
        assert!(problem(&forking, None).unwrap().contains("vm.service"));
        assert!(problem(&[("MainPID", "7"), ("Type", "simple")], Some(file.path())).unwrap().contains("Type=forking"));
        // Another process of the service, which may be a supervisor, is checked as a parent.
        assert_eq!(problem(&[("MainPID", "8"), ("Type", "simple")], None), None);
    }
}
