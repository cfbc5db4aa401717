//! Rekindle's own monitors in a QEMU that libvirt manages.
//!
//! A replacement starts the QEMU with them, besides libvirt's. Their sockets outlive the run directory of the
//! replacement, in `ROOT/.monitors/PID-STARTED`, so that a protector need not go through libvirt, which passes on one
//! command at a time and takes longer. libvirt has its own monitor, and sees all events.

use crate::rundir::RunDir;
use rekindle_kernel::process::Process;
use rekindle_qemu::command::Directory;
use rekindle_qemu::vmm::Vmm;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Keeps the monitors of `vmm` when its run directory `rundir` is removed. Can be repeated.
///
/// # Errors
/// When a socket cannot be moved.
pub fn keep(rundir: &RunDir, vmm: &Vmm) -> io::Result<()> {
    let Some(root) = rundir.path().parent() else { return Ok(()) };
    remove_unused(root)?;
    let (from, to) = (vmm.directory(), directory_of(root, vmm.process()));
    DirBuilder::new().recursive(true).mode(0o700).create(&to.0)?;
    for (from, to) in sockets(&from).iter().zip(sockets(&to)) {
        match fs::rename(from, to) {
            // It was moved before.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            moved => moved?,
        }
    }
    Ok(())
}

/// Returns the directory with the monitors of a QEMU, if it has some.
#[must_use]
pub fn find(root: &Path, process: Process) -> Option<PathBuf> {
    let directory = directory_of(root, process);
    sockets(&directory).iter().all(|socket| socket.exists()).then_some(directory.0)
}

/// Removes the sockets of QEMUs that have ended.
fn remove_unused(root: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(root.join(PARENT)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if !process_of(&entry.file_name().to_string_lossy()).is_some_and(|process| process.is_alive()) {
            match fs::remove_dir_all(entry.path()) {
                // Another process has removed it.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                removed => removed?,
            }
        }
    }
    Ok(())
}

/// Name of the parent of these directories, adjacent to the run directories.
const PARENT: &str = ".monitors";

fn directory_of(root: &Path, Process { pid, started }: Process) -> Directory {
    Directory(root.join(PARENT).join(format!("{pid}-{started}")))
}

fn process_of(name: &str) -> Option<Process> {
    let (pid, started) = name.split_once('-')?;
    Some(Process { pid: pid.parse().ok()?, started: started.parse().ok()? })
}

fn sockets(directory: &Directory) -> [PathBuf; 4] {
    [directory.qmp(), directory.watch(), directory.protect(), directory.save()]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn vmm(rundir: &RunDir, process: Process) -> Vmm {
        let Process { pid, started } = process;
        Vmm { binary: "qemu".into(), pid, started, directory: rundir.vmm(1).0, monitor: None, direct_monitors: None }
    }

    fn with_sockets(root: &Path, process: Process) -> (RunDir, Vmm) {
        let rundir = RunDir::new(root, "web");
        let vmm = vmm(&rundir, process);
        fs::create_dir_all(&vmm.directory).unwrap();
        sockets(&vmm.directory()).iter().for_each(|socket| fs::write(socket, "").unwrap());
        (rundir, vmm)
    }

    #[test]
    fn the_sockets_of_a_live_qemu_outlive_its_run_directory_and_those_of_an_ended_one_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let live = Process::current().unwrap();
        let ended = Process { started: live.started + 1, ..live };
        let (rundir, vmm) = with_sockets(root.path(), ended);
        keep(&rundir, &vmm).unwrap();
        assert!(find(root.path(), ended).is_some());

        let (rundir, vmm) = with_sockets(root.path(), live);
        assert_eq!(find(root.path(), live), None);
        keep(&rundir, &vmm).unwrap();
        keep(&rundir, &vmm).unwrap();
        rundir.remove().unwrap();
        let kept = find(root.path(), live).unwrap();
        assert!(Directory(kept).save().exists());
        assert_eq!(find(root.path(), ended), None);
    }

    #[test]
    fn a_directory_without_all_sockets_is_not_used() {
        let root = tempfile::tempdir().unwrap();
        let live = Process::current().unwrap();
        let (rundir, vmm) = with_sockets(root.path(), live);
        fs::remove_file(vmm.directory().watch()).unwrap();
        keep(&rundir, &vmm).unwrap();
        assert_eq!(find(root.path(), live), None);
    }
}
