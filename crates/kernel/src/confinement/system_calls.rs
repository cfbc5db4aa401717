//! The system calls that a confined process may make. Any other kills it; with [`Calls::NETWORK`] it fails.
//!
//! The lists have what the C library of any supported distribution may use for the same function, not only what one
//! version was seen to use: a missing call would kill a helper in a rare moment.

use super::ConfinementError;
use crate::userfault::abi;
use bitflags::bitflags;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

bitflags! {
    /// Groups of system calls, in addition to those that each process makes: memory, threads, time, open descriptors.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Calls: u8 {
        /// Open, create, rename and remove files. Landlock restricts which.
        const FILES = 1;
        /// Accept connections at sockets that are open already.
        const CONNECTIONS = 2;
        /// Use an io_uring that is open already, and restricted to operations on open files.
        const RING = 4;
        /// Wait for missing pages of its own memory.
        const USERFAULTFD = 8;
        /// Supply the missing pages of another process, through a userfaultfd that is open already and registered.
        const MISSING_PAGES = 32;
        /// Connect to other hosts, with name resolution.
        const NETWORK = 16;
    }
}

const COMMON: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_lseek,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_eventfd2,
    // Connected sockets only: the filter denies the creation of others.
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fadvise64,
    libc::SYS_flock,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_clone3,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_brk,
    libc::SYS_memfd_create,
    libc::SYS_membarrier,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_time,
    libc::SYS_times,
    libc::SYS_getrusage,
    libc::SYS_getrlimit,
    libc::SYS_getrandom,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

const FILES: &[i64] = &[
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_statfs,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
];

const CONNECTIONS: &[i64] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_recvmmsg,
    libc::SYS_sendmmsg,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_shutdown,
];

const RING: &[i64] = &[libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

const USERFAULTFD: &[i64] = &[libc::SYS_userfaultfd];

const NETWORK: &[i64] = &[
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
];

/// Commands of `fcntl(2)`: none that sends signals to a process, as `F_SETOWN` does.
const FILE_COMMANDS: &[i32] = &[
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
    libc::F_GETPIPE_SZ,
    libc::F_SETPIPE_SZ,
];
/// Requests of `ioctl(2)` that the standard library makes, and the length of a block device.
const REQUESTS: &[u64] =
    &[libc::FIONBIO, libc::FIOCLEX, libc::FIONREAD, libc::TCGETS, libc::TCGETS2, libc::TIOCGWINSZ, BLKGETSIZE64];
const BLKGETSIZE64: u64 = 0x8008_1272;
/// Bits of a request's number that name the driver, and their value for userfaultfd.
const DRIVER_BITS: u64 = 0xff00;
const USERFAULTFD_DRIVER: u64 = 0xaa00;
/// `PR_SET_VMA` of `linux/prctl.h`: names a mapping.
const PR_SET_VMA: i32 = 0x5356_4d41;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Returns a rule for the low half of an argument.
fn low(argument: u8, operator: Op, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, Len::Dword, operator, value)
}

/// Returns rules of which one must apply.
fn any(conditions: impl IntoIterator<Item = SeccompCondition>) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    conditions.into_iter().map(|condition| SeccompRule::new(vec![condition])).collect()
}

fn allowed(calls: Calls) -> Result<Rules, seccompiler::BackendError> {
    let mut numbers = COMMON.to_vec();
    let groups = [
        (Calls::FILES, FILES),
        (Calls::CONNECTIONS, CONNECTIONS),
        (Calls::RING, RING),
        (Calls::USERFAULTFD, USERFAULTFD),
        (Calls::NETWORK, NETWORK),
        (Calls::NETWORK, CONNECTIONS),
    ];
    for (_, group) in groups.iter().filter(|(flag, _)| calls.contains(*flag)) {
        numbers.extend_from_slice(group);
    }
    let mut rules: Rules = numbers.into_iter().map(|number| (number, Vec::new())).collect();
    // Threads, no processes. `clone3` is denied by another filter.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, any([low(0, Op::MaskedEq(thread), thread)?])?);
    let own = u64::from(std::process::id());
    for number in [libc::SYS_kill, libc::SYS_tgkill] {
        rules.insert(number, any([low(0, Op::Eq, own)?])?);
    }
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME, PR_SET_VMA];
    let names = names.into_iter().map(|option| low(0, Op::Eq, option as u64)).collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_prctl, any(names)?);
    // Reads limits, sets none.
    let unchanged = SeccompCondition::new(2, Len::Qword, Op::Eq, 0)?;
    rules.insert(libc::SYS_prlimit64, any([unchanged])?);
    let commands =
        FILE_COMMANDS.iter().map(|command| low(1, Op::Eq, *command as u64)).collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_fcntl, any(commands)?);
    let mut requests = REQUESTS.iter().map(|request| low(1, Op::Eq, *request)).collect::<Result<Vec<_>, _>>()?;
    if calls.contains(Calls::NETWORK) {
        // The resolver, for a name server with a link-local address.
        requests.push(low(1, Op::Eq, libc::SIOCGIFINDEX)?);
    }
    if calls.contains(Calls::MISSING_PAGES) {
        // Not `REGISTER`: with it, other memory of that process could be changed.
        for request in [abi::WAKE, abi::COPY, abi::ZEROPAGE, abi::UNREGISTER, abi::WRITEPROTECT] {
            requests.push(low(1, Op::Eq, request)?);
        }
    }
    if calls.contains(Calls::USERFAULTFD) {
        requests.push(low(1, Op::MaskedEq(DRIVER_BITS), USERFAULTFD_DRIVER)?);
    }
    rules.insert(libc::SYS_ioctl, any(requests)?);
    for number in [libc::SYS_mmap, libc::SYS_mprotect] {
        // Name resolution loads libraries.
        let is_any = calls.contains(Calls::NETWORK);
        let not_executable = any([low(2, Op::MaskedEq(libc::PROT_EXEC as u64), 0)?])?;
        rules.insert(number, if is_any { Vec::new() } else { not_executable });
    }
    Ok(rules)
}

/// Calls that fail with an error instead of killing the process, because libraries try them and have a fallback.
fn failing() -> Result<Vec<(Rules, i32)>, seccompiler::BackendError> {
    let internet = [libc::AF_INET, libc::AF_INET6].map(|family| low(0, Op::Ne, family as u64));
    let other_family = SeccompRule::new(internet.into_iter().collect::<Result<_, _>>()?)?;
    Ok(vec![
        // Its flags are in memory, which a filter cannot read. The C library falls back to `clone`.
        (Rules::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS),
        // Name resolution tries to reach daemons and to list interfaces.
        (Rules::from([(libc::SYS_socket, vec![other_family])]), libc::EAFNOSUPPORT),
    ])
}

/// Installs the filter in all threads.
pub(super) fn install(calls: Calls) -> Result<(), ConfinementError> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let mut programs = Vec::<BpfProgram>::new();
    for (rules, errno) in failing()? {
        let errno = SeccompAction::Errno(errno as u32);
        programs.push(SeccompFilter::new(rules, SeccompAction::Allow, errno, architecture)?.try_into()?);
    }
    // The first filters need `seccomp(2)`, which the last one denies.
    // Name resolution runs libraries of the host, which may try any call.
    let has_libraries = calls.contains(Calls::NETWORK);
    let deny = if has_libraries { SeccompAction::Errno(libc::EPERM as u32) } else { SeccompAction::KillProcess };
    let allow = SeccompAction::Allow;
    programs.push(SeccompFilter::new(allowed(calls)?, deny, allow, architecture)?.try_into()?);
    Ok(programs.iter().try_for_each(|program| seccompiler::apply_filter_all_threads(program))?)
}
