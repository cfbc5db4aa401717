//! The choice of the thread that makes a system call, and the properties of threads.

use super::InjectError;
use crate::process::Process;
use std::fs;
use std::io;

/// `io_pgetevents`, which the libc crate does not define.
const SYS_IO_PGETEVENTS: i64 = 333;

/// System calls that Linux does not restart after a stop (signal(7)), and that have had no effect when they return
/// `EINTR`. Receiving and sending belong to them if the socket has a time-out.
pub(super) const NEVER_RESTARTED: [i64; 17] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_io_getevents,
    SYS_IO_PGETEVENTS,
    libc::SYS_io_uring_enter,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
];

/// System calls in which event loops and workers wait, and that Linux restarts with the time that remains.
const RESTARTED_WITH_REMAINING_TIME: [i64; 12] = [
    libc::SYS_ppoll,
    libc::SYS_poll,
    libc::SYS_pselect6,
    libc::SYS_select,
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_wait4,
    libc::SYS_pause,
    libc::SYS_rt_sigsuspend,
    libc::SYS_read,
    libc::SYS_recvmsg,
];

/// How well a thread is suited for injection, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Suitability {
    /// Waits in a call that continues as if it had not been interrupted.
    WaitsRestartably,
    /// Runs in user mode.
    Runs,
    /// Is in any other call.
    OtherCall,
    /// Waits in a call whose time-out starts again from the beginning.
    RestartsTimeout,
    /// Waits for a disk or a page: may take long to stop.
    Blocked,
}

/// Returns the threads of a process, the best suited first.
pub(super) fn candidates(process: Process) -> Result<Vec<i32>, InjectError> {
    let pid = process.pid;
    let failed = |source| InjectError::Trace { pid, what: "list its threads", source };
    let listing = match fs::read_dir(format!("/proc/{pid}/task")) {
        Ok(listing) => listing,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(InjectError::Gone { pid }),
        Err(e) => return Err(failed(e)),
    };
    // Closes the directory: the limit of descriptors may not permit another file.
    let threads: Vec<i32> = listing.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let mut rated_threads = Vec::new();
    for tid in threads {
        rated_threads.extend(suitability_of(pid, tid).map_err(failed)?.map(|suitability| (suitability, tid)));
    }
    rated_threads.sort_unstable();
    Ok(rated_threads.into_iter().map(|(_, tid)| tid).collect())
}

/// Rates a thread. Returns `None` if it has ended, or cannot be traced.
///
/// # Errors
/// If it cannot be read, for instance because this process has too many files open.
fn suitability_of(pid: u32, tid: i32) -> io::Result<Option<Suitability>> {
    let stat = match fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")) {
        Ok(stat) => stat,
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(e) => return Err(e),
    };
    if is_kernel_worker(&stat) {
        return Ok(None);
    }
    let Some(state) = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) else { return Ok(None) };
    let call = fs::read_to_string(format!("/proc/{pid}/task/{tid}/syscall")).unwrap_or_default();
    Ok(suitability(state, &call))
}

/// Rates a thread by its state letter and `/proc/PID/task/TID/syscall`. Returns `None` if it has ended.
fn suitability(state: char, call: &str) -> Option<Suitability> {
    match (state, call.split_whitespace().next().map(str::parse::<i64>)) {
        ('Z' | 'X', _) => None,
        ('D', _) | (_, Some(Ok(-1))) => Some(Suitability::Blocked),
        // The file contains "running".
        (_, Some(Err(_))) => Some(Suitability::Runs),
        (_, Some(Ok(number))) if RESTARTED_WITH_REMAINING_TIME.contains(&number) => Some(Suitability::WaitsRestartably),
        (_, Some(Ok(number))) if NEVER_RESTARTED.contains(&number) => Some(Suitability::RestartsTimeout),
        _ => Some(Suitability::OtherCall),
    }
}

/// Returns whether a thread never leaves the kernel, by its `stat`: the workers of vhost and of io_uring are threads of
/// their process, have no registers of a program, and may not be traced.
fn is_kernel_worker(stat: &str) -> bool {
    /// `PF_IO_WORKER` and `PF_USER_WORKER` of `linux/sched.h`.
    const WORKER: u32 = 0x10 | 0x4000;
    flags(stat).is_some_and(|flags| flags & WORKER != 0)
}

/// Returns the flags (`PF_*`) of a thread: the ninth field of its `stat`.
fn flags(stat: &str) -> Option<u32> {
    // The name, which is the second field, may contain blanks and parentheses.
    stat.rsplit_once(") ")?.1.split(' ').nth(6)?.parse().ok()
}

/// Reads one numeric line of `/proc/PID/task/TID/status`.
fn numeric_status(pid: u32, tid: i32, name: &str) -> io::Result<Option<u32>> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    Ok(line.and_then(|value| value.trim().parse().ok()))
}

/// Returns whether a seccomp filter checks the thread's system calls.
pub(super) fn has_filter(process: Process, tid: i32) -> io::Result<bool> {
    Ok(numeric_status(process.pid, tid, "Seccomp")?.is_some_and(|mode| mode != 0))
}

/// Returns whether a thread is ending or has ended.
pub(super) fn is_ending(process: Process, tid: i32) -> bool {
    /// `PF_EXITING` of `linux/sched.h`.
    const EXITING: u32 = 4;
    let Ok(stat) = fs::read_to_string(format!("/proc/{}/task/{tid}/stat", process.pid)) else { return true };
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').next());
    matches!(state, Some("Z" | "X")) || flags(&stat).is_none_or(|flags| flags & EXITING != 0)
}

/// A process that traces a thread.
pub(super) struct Tracer {
    pub(super) pid: u32,
    /// Command name of the process.
    pub(super) name: String,
}

/// Returns the process that traces a thread.
pub(super) fn tracer_of(process: Process, tid: i32) -> Option<Tracer> {
    let tracing_thread = numeric_status(process.pid, tid, "TracerPid").ok()?.filter(|&thread| thread != 0)?;
    let pid = numeric_status(tracing_thread, i32::try_from(tracing_thread).ok()?, "Tgid").ok().flatten();
    let pid = pid.unwrap_or(tracing_thread);
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(Tracer { pid, name: name.trim_end().to_owned() })
}

/// Returns whether `tid` is a thread of `process`, which must still run.
pub(super) fn is_thread_of(process: Process, tid: i32) -> bool {
    process.is_alive() && fs::exists(format!("/proc/{}/task/{tid}", process.pid)).unwrap_or(false)
}

/// Returns whether the processor checks the process's return addresses against a shadow stack.
pub(super) fn has_shadow_stack(process: Process) -> io::Result<bool> {
    let text = fs::read_to_string(format!("/proc/{}/status", process.pid))?;
    let features = text.lines().find_map(|line| line.strip_prefix("x86_Thread_features:"));
    Ok(features.is_some_and(|features| features.split_whitespace().any(|feature| feature == "shstk")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_is_better_than_one_that_computes_and_than_one_whose_time_begins_anew() {
        let poll = suitability('S', "271 0x1 0x2 0x3 0x4 0x5 0x6 0x7 0x8").unwrap();
        let computes = suitability('R', "running\n").unwrap();
        let epoll = suitability('S', "232 0x1 0x2 0x3 0x4 0x5 0x6 0x7 0x8").unwrap();
        let disk = suitability('D', "0 0x1 0x2 0x3 0x4 0x5 0x6 0x7 0x8").unwrap();
        assert!(poll < computes && computes < epoll && epoll < disk);
        assert_eq!(suitability('Z', "0 0x0"), None);
    }

    #[test]
    fn workers_of_the_kernel_are_no_threads_of_the_program() {
        let stat = |name: &str, flags: u32| format!("704 ({name}) S 1 704 704 0 -1 {flags} 0 0 0 0 0 0");
        // As Linux 6.12 prints them for the threads of a QEMU with KVM and vhost-net.
        assert!(is_kernel_worker(&stat("vhost-704", 138_428_608)));
        assert!(is_kernel_worker(&stat("kvm-nx-lpage-re", 138_428_608)));
        assert!(!is_kernel_worker(&stat("qemu-system-x86", 138_412_416)));
        assert!(!is_kernel_worker(&stat("CPU 0/KVM) S 1", 4_194_368)));
        // A worker of io_uring.
        assert!(is_kernel_worker(&stat("iou-wrk-704", 0x0040_0050)));
        assert!(!is_kernel_worker("704 (qemu"));
    }
}
