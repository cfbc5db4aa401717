//! Where the destination starts: the user, namespaces, cgroups and limits that its manager has set up for the source, and
//! the descriptors that the command line names.

use super::inspect::Inspected;
use command_fds::FdMapping;
use rekindle_handover::takeover::Taps;
use rekindle_handover::unprepared_ram::UnpreparedRam;
use rekindle_handover::{Environment, HandoverError};
use rekindle_kernel::descriptor;
use rekindle_kernel::process::Process;
use rekindle_kernel::surroundings::{Launch, RoleThread, ThreadRole};
use rekindle_kernel::vhost_net;
use rekindle_qemu::command::{Directory, Start};
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::takeover_command::Descriptor;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::rundir::RunDir;
use serde::Deserialize;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// The surroundings of a QEMU that Rekindle did not start.
pub(crate) struct UnpreparedEnvironment<'a> {
    pub rundir: &'a RunDir,
    pub inspected: &'a Inspected,
    pub ram: &'a UnpreparedRam,
    /// Where the source's log is, for error messages; `None` if that is not known.
    pub log: Option<&'a Path>,
}

impl Environment for UnpreparedEnvironment<'_> {
    fn spawn(&self, generation: u32, _start: Start, taps: Taps) -> Result<Vmm, HandoverError> {
        let failed = |source| HandoverError::File { path: self.rundir.vmm(generation).0, source };
        let directory = self.rundir.create_vmm(generation).map_err(failed)?;
        if let Some(log) = self.log {
            link_log(&directory, log).map_err(failed)?;
        }
        let arguments: Vec<OsString> = self.inspected.baseline.line.arguments.iter().map(OsString::from).collect();
        let binary = &self.inspected.binary.path;
        let descriptors = self.descriptors(&directory, taps).map_err(failed)?;
        let lock = directory.lock();
        let launch = Launch { program: binary, arguments: &arguments, descriptors, lock: Some(&lock) };
        let process = self.inspected.environment.spawn(launch).map_err(|e| failed(io::Error::other(e)))?;
        Ok(Vmm {
            binary: binary.clone(),
            pid: process.pid,
            started: process.started,
            directory: directory.0,
            monitor: None,
            direct_monitors: None,
        })
    }
}

impl UnpreparedEnvironment<'_> {
    /// Opens everything that the destination inherits, besides `taps`.
    fn descriptors(&self, directory: &Directory, taps: Taps) -> io::Result<Vec<FdMapping>> {
        let source = self.inspected.baseline.adopted.process();
        let mut mappings: Vec<_> =
            taps.into_iter().map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd }).collect();
        let mut add = |parent_fd: OwnedFd, child_fd: RawFd| mappings.push(FdMapping { parent_fd, child_fd });
        // Standard output and error are the log of the source, for libvirt a pipe of its logger: it continues.
        for number in [1, 2] {
            add(descriptor::take(source, number)?, number);
        }
        for (&number, wanted) in &self.inspected.baseline.line.descriptors {
            if let Some(opened) = self.open(directory, source, number, wanted)? {
                add(opened, number);
            }
        }
        for listener in &self.inspected.listeners {
            add(descriptor::take(source, listener.source)?, listener.spare);
        }
        Ok(mappings)
    }

    /// Opens one descriptor. `None` for a tap: those are in `Taps`.
    fn open(
        &self,
        directory: &Directory,
        source: Process,
        number: RawFd,
        wanted: &Descriptor,
    ) -> io::Result<Option<OwnedFd>> {
        let opened: OwnedFd = match wanted {
            Descriptor::Ram { block, .. } => {
                let supplied = self.ram.blocks().find(|supplied| supplied.id == *block);
                let missing = || io::Error::other(format!("RAM block {block} is not supplied"));
                supplied.ok_or_else(missing)?.file.try_clone()?.into()
            }
            Descriptor::OwnMonitor { name } => listen(&monitor_path(directory, name))?,
            Descriptor::Listener { .. } => listen(&directory.0.join(format!("stand-in-{number}")))?,
            Descriptor::Duplicate { source: number } => descriptor::take(source, *number)?,
            Descriptor::Tap { .. } => return Ok(None),
            Descriptor::VhostNet => vhost_net::open()?,
            Descriptor::TpmEmulator { .. } => {
                let missing = || io::Error::other("the TPM has no emulator");
                self.inspected.tpm.as_ref().ok_or_else(missing)?.connection()?
            }
        };
        Ok(Some(opened))
    }
}

fn listen(path: &Path) -> io::Result<OwnedFd> {
    Ok(UnixListener::bind(path)?.into())
}

fn monitor_path(directory: &Directory, name: &str) -> PathBuf {
    match name {
        "watch" => directory.watch(),
        "protect" => directory.protect(),
        "save" => directory.save(),
        _ => directory.qmp(),
    }
}

/// Makes `source_log` the log of the destination, for error messages.
fn link_log(directory: &Directory, source_log: &Path) -> io::Result<()> {
    let log = directory.log();
    match fs::remove_file(&log) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    symlink(source_log, log)
}

/// A virtual processor, as QEMU reports it.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Vcpu {
    pub cpu_index: u32,
    pub thread_id: u32,
}

pub(crate) fn vcpus(qmp: &mut Qmp) -> Result<Vec<Vcpu>, QmpError> {
    qmp.execute("query-cpus-fast", ())
}

/// Returns the threads that a manager may place one by one: those of the virtual processors, and I/O threads.
pub(crate) fn placed_threads(qmp: &mut Qmp) -> Result<Vec<RoleThread>, QmpError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct IoThread {
        id: String,
        thread_id: u32,
    }
    let io_threads: Vec<IoThread> = qmp.execute("query-iothreads", ())?;
    let of_vcpu = |vcpu: Vcpu| RoleThread { role: ThreadRole::Vcpu(vcpu.cpu_index), thread: vcpu.thread_id };
    let of_io = |thread: IoThread| RoleThread { role: ThreadRole::IoThread(thread.id), thread: thread.thread_id };
    Ok(vcpus(qmp)?.into_iter().map(of_vcpu).chain(io_threads.into_iter().map(of_io)).collect())
}
