//! Which process serves a QMP socket.

use super::{AdoptError, MANAGED};
use crate::program::Program;
use crate::qmp::{Qmp, Version};
use rekindle_kernel::process::Process;
use rustix::net::sockopt::socket_peercred;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

/// Returns the QEMU at the other end of `qmp`, which is connected to `socket`.
pub(super) fn process(qmp: &Qmp, socket: &Path) -> Result<Process, AdoptError> {
    let unknown = |why: String| AdoptError::Unknown { socket: socket.to_owned(), why };
    // The peer is the process that made the socket listen.
    let peer =
        socket_peercred(qmp).map_err(|e| unknown(format!("the kernel does not report which process listens: {e}")))?;
    let peer = u32::try_from(peer.pid.as_raw_nonzero().get()).ok().and_then(|pid| Process::of(pid).ok());
    if let Some(peer) = peer {
        may_inspect(peer)?;
        if is_qemu(peer, qmp.version()) {
            return Ok(peer);
        }
    }
    // Another process made the socket and passed it on: find the receiver.
    let inode = listening_inode(socket).ok_or_else(|| unknown("its listener is not in /proc/net/unix".into()))?;
    let mut holders = holders(inode).into_iter().filter(|&process| is_qemu(process, qmp.version()));
    match (holders.next(), holders.next()) {
        (Some(only), None) => Ok(only),
        (Some(one), Some(other)) => {
            Err(unknown(format!("the QEMUs {} and {} both hold the listening socket", one.pid, other.pid)))
        }
        (None, _) => Err(unknown(match peer {
            Some(peer) => format!("process {} listens, which is no QEMU, and no QEMU holds the socket", peer.pid),
            None => "its listener is in another PID namespace, or has ended".into(),
        })),
    }
}

/// Returns the QEMU of `version` that has these threads.
pub(super) fn of_threads(threads: &BTreeSet<u32>, version: &Version) -> Result<Process, AdoptError> {
    let unknown = |why: String| AdoptError::Unknown { socket: MANAGED.into(), why };
    let thread = threads.first().ok_or_else(|| unknown("it names no virtual CPUs".into()))?;
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let group = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    let process = group.and_then(|pid: u32| Process::of(pid).ok());
    process.map_or(Ok(()), may_inspect)?;
    let process = process.filter(|&process| is_qemu(process, version));
    process.ok_or_else(|| {
        unknown(format!(
            "thread {thread}, its first virtual CPU, is no QEMU's here: is it in another PID namespace or host?"
        ))
    })
}

/// Fails if we may not inspect the process.
fn may_inspect(process: Process) -> Result<(), AdoptError> {
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

/// Lines are `Num RefCount Protocol Flags Type St Inode Path`; flag 0x10000 marks a listening socket.
fn listening_inode(socket: &Path) -> Option<u64> {
    const LISTENS: u64 = 0x1_0000;
    let text = fs::read_to_string("/proc/net/unix").ok()?;
    let wanted = socket.canonicalize().unwrap_or_else(|_| socket.to_owned());
    text.lines().skip(1).find_map(|line| {
        let mut words = line.split_whitespace();
        let flags = u64::from_str_radix(words.nth(3)?, 16).ok()?;
        let inode = words.nth(2)?.parse().ok()?;
        let path = Path::new(words.next()?);
        (flags & LISTENS != 0 && (path == wanted || path == socket)).then_some(inode)
    })
}

fn holders(inode: u64) -> Vec<Process> {
    let link = format!("socket:[{inode}]");
    let holds = |pid: u32| {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        descriptors.into_iter().any(|entry| fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == link.as_str()))
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| holds(pid)).filter_map(|pid| Process::of(pid).ok()).collect()
}
