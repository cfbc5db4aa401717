//! The seccomp filter, and the thread that answers its notifications (`seccomp_unotify(2)`).
//!
//! The supervised threads and the supervisor belong to one process, so they have the same open files.

#![allow(unsafe_code, reason = "no crate of the project installs a filter with a listener or answers it")]

use super::{FaultyFiles, Verdict};
use libc::c_long;
use rekindle_kernel::{memory, process::Process};
use rustix::event::{PollFd, PollFlags, poll};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::{env, fs, mem};

/// `AUDIT_ARCH_X86_64` of `linux/audit.h`.
const ARCHITECTURE: u32 = 0xc000_003e;
const PAGE_BYTES: u64 = 4096;

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    Content,
    Sync,
    NewName,
    RemovedName,
}

/// The file that a call is about, by the positions of its arguments.
#[derive(Debug, Clone, Copy)]
enum Target {
    Descriptor(usize),
    Path(usize),
    /// Descriptor of the directory, and the path.
    PathAt(usize, usize),
}

/// A system call that is supervised.
struct SupervisedCall {
    number: c_long,
    name: &'static str,
    class: Class,
    target: Target,
    /// The argument with flags of `open(2)`: the call is supervised only with `O_CREAT`.
    open_flags: Option<usize>,
}

const fn supervise(number: c_long, name: &'static str, class: Class, target: Target) -> SupervisedCall {
    SupervisedCall { number, name, class, target, open_flags: None }
}

const CALLS: [SupervisedCall; 24] = [
    supervise(libc::SYS_write, "write", Class::Content, Target::Descriptor(0)),
    supervise(libc::SYS_pwrite64, "pwrite64", Class::Content, Target::Descriptor(0)),
    supervise(libc::SYS_writev, "writev", Class::Content, Target::Descriptor(0)),
    supervise(libc::SYS_pwritev, "pwritev", Class::Content, Target::Descriptor(0)),
    supervise(libc::SYS_pwritev2, "pwritev2", Class::Content, Target::Descriptor(0)),
    supervise(libc::SYS_copy_file_range, "copy_file_range", Class::Content, Target::Descriptor(2)),
    supervise(libc::SYS_fallocate, "fallocate", Class::Content, Target::Descriptor(0)),
    supervise(libc::SYS_ftruncate, "ftruncate", Class::Content, Target::Descriptor(0)),
    supervise(libc::SYS_sync_file_range, "sync_file_range", Class::Content, Target::Descriptor(0)),
    supervise(libc::SYS_fsync, "fsync", Class::Sync, Target::Descriptor(0)),
    supervise(libc::SYS_fdatasync, "fdatasync", Class::Sync, Target::Descriptor(0)),
    SupervisedCall { open_flags: Some(1), ..supervise(libc::SYS_open, "open", Class::NewName, Target::Path(0)) },
    SupervisedCall {
        open_flags: Some(2),
        ..supervise(libc::SYS_openat, "openat", Class::NewName, Target::PathAt(0, 1))
    },
    supervise(libc::SYS_mkdir, "mkdir", Class::NewName, Target::Path(0)),
    supervise(libc::SYS_mkdirat, "mkdirat", Class::NewName, Target::PathAt(0, 1)),
    supervise(libc::SYS_link, "link", Class::NewName, Target::Path(1)),
    supervise(libc::SYS_linkat, "linkat", Class::NewName, Target::PathAt(2, 3)),
    supervise(libc::SYS_rename, "rename", Class::NewName, Target::Path(1)),
    supervise(libc::SYS_renameat, "renameat", Class::NewName, Target::PathAt(2, 3)),
    supervise(libc::SYS_renameat2, "renameat2", Class::NewName, Target::PathAt(2, 3)),
    supervise(libc::SYS_unlink, "unlink", Class::RemovedName, Target::Path(0)),
    supervise(libc::SYS_unlinkat, "unlinkat", Class::RemovedName, Target::PathAt(0, 1)),
    supervise(libc::SYS_rmdir, "rmdir", Class::RemovedName, Target::Path(0)),
    supervise(libc::SYS_creat, "creat", Class::NewName, Target::Path(0)),
];

/// A call that waits for its verdict.
#[derive(Debug)]
pub(super) struct Call {
    pub name: &'static str,
    pub class: Class,
    /// The file or directory.
    pub path: PathBuf,
    /// A path under which an open file can be opened again, also if its name was removed.
    pub open_path: PathBuf,
}

/// Installs the filter for this thread and those that it starts. Returns the listener.
pub(super) fn install_filter() -> io::Result<OwnedFd> {
    let load = |offset: usize| libc::sock_filter {
        code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16,
        jt: 0,
        jf: 0,
        k: offset as u32,
    };
    let equal = |value: u32, skip_if: u8, skip_otherwise: u8| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: skip_if,
        jf: skip_otherwise,
        k: value,
    };
    let answer =
        |action: u32| libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: action };
    let mut filter = vec![
        load(mem::offset_of!(libc::seccomp_data, arch)),
        equal(ARCHITECTURE, 1, 0),
        answer(libc::SECCOMP_RET_ALLOW),
        load(mem::offset_of!(libc::seccomp_data, nr)),
    ];
    for call in &CALLS {
        filter.push(equal(call.number as u32, 0, 1));
        filter.push(answer(libc::SECCOMP_RET_USER_NOTIF));
    }
    filter.push(answer(libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true)?;
    // SAFETY: the program and its instructions are alive during the call, which only reads them.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    if listener < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has returned a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(listener as i32) })
}

/// Answers the calls of the supervised threads until all of them have ended.
pub(super) fn run(listener: &OwnedFd, files: &FaultyFiles) {
    loop {
        let mut wanted = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut wanted, None) {
            Err(rustix::io::Errno::INTR) => continue,
            polled => polled.map(drop).unwrap(),
        }
        if !wanted[0].revents().contains(PollFlags::IN) {
            return;
        }
        // SAFETY: the structure has only integers, and the kernel requires that it is zero.
        let mut notification: libc::seccomp_notif = unsafe { mem::zeroed() };
        // SAFETY: the kernel writes the structure, which is as long as the request's number states.
        let received =
            unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut notification) };
        if received != 0 {
            // A signal has ended the call meanwhile.
            continue;
        }
        let verdict = decode(&notification.data).map_or(Verdict::Pass, |call| files.judge(call));
        let (error, flags) = match verdict {
            Verdict::Pass => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
            Verdict::Succeed => (0, 0),
            Verdict::Fail(errno) => (-errno.raw_os_error(), 0),
        };
        let mut response = libc::seccomp_notif_resp { id: notification.id, val: 0, error, flags };
        // A failure means that the thread no longer waits.
        // SAFETY: the kernel only reads the structure, which is as long as the request's number states.
        unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut response) };
    }
}

/// Returns what a call is to do; `None` if it changes no file by its name or descriptor.
fn decode(data: &libc::seccomp_data) -> Option<Call> {
    let call = CALLS.iter().find(|call| call.number == c_long::from(data.nr))?;
    if call.open_flags.is_some_and(|flags| data.args[flags] & libc::O_CREAT as u64 == 0) {
        return None;
    }
    let (path, open_path) = match call.target {
        Target::Descriptor(descriptor) => {
            let open_path = descriptor_path(data.args[descriptor]);
            (fs::read_link(&open_path).ok()?, open_path)
        }
        Target::Path(path) => {
            let path = env::current_dir().ok()?.join(read_path(data.args[path]).ok()?);
            (path.clone(), path)
        }
        Target::PathAt(directory, path) => {
            let directory = match data.args[directory] as i32 {
                libc::AT_FDCWD => env::current_dir().ok()?,
                _ => fs::read_link(descriptor_path(data.args[directory])).ok()?,
            };
            let path = directory.join(read_path(data.args[path]).ok()?);
            (path.clone(), path)
        }
    };
    Some(Call { name: call.name, class: call.class, path, open_path })
}

fn descriptor_path(descriptor: u64) -> PathBuf {
    Path::new("/proc/self/fd").join((descriptor as i32).to_string())
}

/// Reads a path of this process, which a thread passes to the kernel.
fn read_path(mut address: u64) -> io::Result<PathBuf> {
    let process = Process::current()?;
    let mut bytes = Vec::new();
    loop {
        // The next page may not be mapped.
        let mut piece = vec![0; (PAGE_BYTES - address % PAGE_BYTES) as usize];
        memory::read(process, address, &mut piece)?;
        address += piece.len() as u64;
        if let Some(end) = piece.iter().position(|byte| *byte == 0) {
            bytes.extend_from_slice(&piece[..end]);
            return Ok(OsStr::from_bytes(&bytes).into());
        }
        bytes.extend_from_slice(&piece);
    }
}
