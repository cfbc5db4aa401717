//! A copy of libvirt's record of the domain, in the run directory of the operation. A daemon that is started while
//! neither QEMU answers forgets the domain; with the copy, the next one finds it again.

use super::status_file::{StatusFile, StatusFileError, write_pid_file};
use crate::error::RebootError;
use rekindle_vm::journal::LibvirtOperation;
use rekindle_vm::rundir::RunDir;
use std::io;
use std::path::PathBuf;

fn path(rundir: &RunDir) -> PathBuf {
    rundir.file("libvirt-status.xml")
}

/// Keeps a copy of `record`.
pub(super) fn keep(rundir: &RunDir, record: &StatusFile) -> Result<(), StatusFileError> {
    record.write_to(&path(rundir)).map(drop)
}

/// Restores the record from the copy if libvirt has removed it. The daemon must not run.
///
/// libvirt removes the monitor socket, too, when it takes a domain for ended. Then no daemon can connect to the QEMU, and
/// would end it because of the record: the record stays removed.
pub(super) fn restore_if_missing(rundir: &RunDir, libvirt: &LibvirtOperation) -> Result<(), RebootError> {
    if libvirt.status_file.exists() || !libvirt.monitor.exists() {
        return Ok(());
    }
    let record = match StatusFile::read(&path(rundir)) {
        Err(StatusFileError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(()),
        record => record?,
    };
    record.write_to(&libvirt.status_file)?;
    write_pid_file(&libvirt.status_file, record.parse()?.pid)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_vm::journal::{Absence, DaemonRecord};
    use std::fs;
    use tempfile::TempDir;

    const RECORD: &str = "<domstatus state='running' pid='11'><monitor path='/m' type='unix'/><qemuCaps/><devices/>
  <domain><name>web</name><uuid>863ab25c-2987-4faf-afb3-86947fec2f2e</uuid>
  <devices><emulator>/usr/bin/q</emulator></devices></domain></domstatus>";

    #[test]
    fn a_record_that_was_removed_is_restored_while_the_monitor_exists() {
        let directory = TempDir::new().unwrap();
        let rundir = RunDir::new(directory.path(), "web");
        rundir.create().unwrap();
        let (status_file, monitor) = (directory.path().join("web.xml"), directory.path().join("monitor"));
        let daemon = DaemonRecord {
            pid: 1,
            started: 1,
            command: Vec::new(),
            environment: Vec::new(),
            directory: "/".into(),
            pid_file: "/none".into(),
            unit: None,
        };
        let libvirt = LibvirtOperation {
            status_file: status_file.clone(),
            monitor: monitor.clone(),
            uuid: "863ab25c-2987-4faf-afb3-86947fec2f2e".parse().unwrap(),
            daemon,
            absence: Absence::Stopped,
            emulator: None,
            capabilities: None,
        };
        fs::write(&status_file, RECORD).unwrap();
        keep(&rundir, &StatusFile::read(&status_file).unwrap()).unwrap();
        fs::remove_file(&status_file).unwrap();
        restore_if_missing(&rundir, &libvirt).unwrap();
        assert!(!status_file.exists(), "no daemon could connect to the QEMU");
        fs::write(&monitor, "").unwrap();
        restore_if_missing(&rundir, &libvirt).unwrap();
        assert_eq!(fs::read_to_string(&status_file).unwrap(), RECORD);
        assert_eq!(fs::read_to_string(directory.path().join("web.pid")).unwrap(), "11");
        // A record that libvirt has is never replaced.
        fs::write(&status_file, "another").unwrap();
        restore_if_missing(&rundir, &libvirt).unwrap();
        assert_eq!(fs::read_to_string(&status_file).unwrap(), "another");
    }
}
