//! Finds the QEMU process at the other end of a QMP connection.

use super::{AdoptError, MANAGER_MONITOR};
use crate::program::Program;
use crate::qmp::{Qmp, Version};
use rekindle_kernel::process::Process;
use rustix::net::sockopt::socket_peercred;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

/// Returns the QEMU at the other end of `qmp`, which is connected to `socket`.
pub(super) fn find_by_socket(qmp: &Qmp, socket: &Path) -> Result<Process, AdoptError> {
    let unknown = |why: String| AdoptError::Unknown { socket: socket.to_owned(), why };
    // The peer is the process that made the socket listen.
    let credentials =
        socket_peercred(qmp).map_err(|e| unknown(format!("the kernel does not report which process listens: {e}")))?;
    let pid = u32::try_from(credentials.pid.as_raw_nonzero().get()).ok();
    let listener = pid.and_then(|pid| Process::of(pid).ok());
    if let Some(listener) = listener {
        check_inspectable(listener)?;
        if is_qemu(listener, qmp.version()) {
            return Ok(listener);
        }
    }
    // Another process made the socket and passed it on: find the receiver.
    let inode = listening_inode(socket).ok_or_else(|| unknown("its listener is not in /proc/net/unix".into()))?;
    let qemus: Vec<_> = holders(inode).into_iter().filter(|&process| is_qemu(process, qmp.version())).collect();
    match qemus.as_slice() {
        [qemu] => Ok(*qemu),
        [first, second, ..] => {
            Err(unknown(format!("the QEMUs {} and {} both hold the listening socket", first.pid, second.pid)))
        }
        [] => Err(unknown(match listener {
            Some(process) => format!("process {} listens, which is no QEMU, and no QEMU holds the socket", process.pid),
            None => "its listener is in another PID namespace, or has ended".into(),
        })),
    }
}

/// Returns the QEMU of `version` that has these threads.
pub(super) fn find_by_threads(threads: &BTreeSet<u32>, version: &Version) -> Result<Process, AdoptError> {
    let unknown = |why: String| AdoptError::Unknown { socket: MANAGER_MONITOR.into(), why };
    let thread = threads.first().ok_or_else(|| unknown("it names no virtual CPUs".into()))?;
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let pid = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse::<u32>().ok());
    let process = pid.and_then(|pid| Process::of(pid).ok());
    process.map_or(Ok(()), check_inspectable)?;
    let process = process.filter(|&process| is_qemu(process, version));
    process.ok_or_else(|| {
        unknown(format!(
            "thread {thread}, its first virtual CPU, is no QEMU's here: is it in another PID namespace or host?"
        ))
    })
}

/// Fails if we may not inspect the process.
fn check_inspectable(process: Process) -> Result<(), AdoptError> {
    match fs::read_link(format!("/proc/{}/exe", process.pid)) {
        Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
            Err(AdoptError::Process { pid: process.pid, source })
        }
        _ => Ok(()),
    }
}

/// Returns whether the process runs the QEMU that answers. Decided by its program's content, not by its name or
/// arguments.
fn is_qemu(process: Process, version: &Version) -> bool {
    let is_qemu = Program::of(process).and_then(|program| program.is_qemu(version));
    is_qemu.unwrap_or_else(|e| {
        tracing::debug!("the program of process {}: {e}", process.pid);
        false
    }) && process.is_alive()
}

/// Returns the inode of the socket that listens at this path, from `/proc/net/unix`. Its lines are `Num RefCount
/// Protocol Flags Type St Inode Path`.
fn listening_inode(socket: &Path) -> Option<u64> {
    // `__SO_ACCEPTCON` of the kernel: the socket listens.
    const FLAG_LISTENING: u64 = 0x1_0000;
    let table = fs::read_to_string("/proc/net/unix").ok()?;
    let canonical = socket.canonicalize().unwrap_or_else(|_| socket.to_owned());
    // The first line is the header.
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let flags = u64::from_str_radix(fields.nth(3)?, 16).ok()?;
        // `nth` has taken Flags, so that the next fields are Type, St and Inode.
        let inode = fields.nth(2)?.parse().ok()?;
        let path = Path::new(fields.next()?);
        (flags & FLAG_LISTENING != 0 && (path == canonical || path == socket)).then_some(inode)
    })
}

/// Returns the processes that have a socket open.
fn holders(inode: u64) -> Vec<Process> {
    let socket_link = format!("socket:[{inode}]");
    let holds = |pid: u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut links = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
        links.any(|link| link.as_os_str() == socket_link.as_str())
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| holds(pid)).filter_map(|pid| Process::of(pid).ok()).collect()
}
