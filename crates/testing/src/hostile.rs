//! A hostile program: what an attacker tries after it has taken control of a process.

#![allow(unsafe_code, reason = "the attempts are raw system calls, in a child process of one thread")]

use nix::sched::{CloneFlags, unshare};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;

/// What the program tries.
#[derive(Debug, Clone)]
pub enum Attempt {
    /// Replace itself by a program.
    StartProgram(PathBuf),
    /// Start a process.
    Fork,
    /// Open a file for reading.
    Read(PathBuf),
    /// Open a file for writing.
    Write(PathBuf),
    /// Create a file.
    Create(PathBuf),
    /// Remove a file.
    Remove(PathBuf),
    /// Create a directory.
    CreateDirectory(PathBuf),
    /// Rename a directory.
    RenameDirectory(PathBuf, PathBuf),
    /// Make the kernel send signals about a descriptor to the process.
    SetSignalOwner(u32),
    /// Make this request (`ioctl`) of standard error, which rejects it with `ENOTTY`.
    Request(u64),
    /// List a directory.
    List(PathBuf),
    /// Connect to this address.
    ConnectTcp(SocketAddr),
    /// Connect to this socket.
    ConnectUnix(PathBuf),
    /// Open a socket of this family.
    Socket(i32),
    /// Read this address of the process.
    ReadMemory(u32, usize),
    /// Attach to the process as a debugger.
    Trace(u32),
    /// Send `SIGCONT`.
    Signal(u32),
    /// Enter a namespace of its own.
    Namespace(CloneFlags),
    /// Mount a file system there, in a mount namespace of its own.
    Mount(PathBuf),
    /// Make an io_uring, which could do system calls that a filter cannot see.
    Ring,
    /// Load a program into the kernel.
    Bpf,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The attempt has succeeded.
    Done,
    /// The attempt has failed with this error number.
    Failed(i32),
    /// The program was killed by this signal.
    Killed(i32),
}

/// Runs the program in a child of the calling thread: `confine`, then the attempt.
///
/// # Panics
/// If the program cannot be confined.
#[must_use]
#[track_caller]
pub fn run(attempt: &Attempt, confine: impl FnOnce()) -> Outcome {
    const ERROR: i32 = 200;
    // SAFETY: the C library makes memory usable in the child of a process with several threads; other locks are not
    // used by `confine` and the attempts.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            // A panic must not continue in the copy of the test.
            let performed = std::panic::catch_unwind(AssertUnwindSafe(|| {
                confine();
                attempt.perform()
            }));
            let status = match performed {
                Ok(Ok(())) => 0,
                Ok(Err(e)) => e.raw_os_error().filter(|errno| (1..ERROR).contains(errno)).unwrap_or(ERROR),
                Err(_) => ERROR,
            };
            // SAFETY: the call does not return and takes no pointer.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
            WaitStatus::Exited(_, 0) => Outcome::Done,
            WaitStatus::Exited(_, errno) if errno < ERROR => Outcome::Failed(errno),
            WaitStatus::Signaled(_, signal, _) => Outcome::Killed(signal as i32),
            other => panic!("{attempt:?}: {other:?}"),
        },
    }
}

impl Attempt {
    fn perform(&self) -> io::Result<()> {
        match self {
            Self::StartProgram(path) => {
                let path = CString::new(path.to_str().unwrap()).unwrap();
                nix::unistd::execv(&path, &[&path])?;
            }
            // SAFETY: the child ends immediately.
            Self::Fork => match unsafe { fork() }? {
                // SAFETY: the call does not return and takes no pointer.
                ForkResult::Child => unsafe { libc::_exit(0) },
                ForkResult::Parent { child } => drop(waitpid(child, None)?),
            },
            Self::Read(path) => drop(fs::File::open(path)?),
            Self::Write(path) => drop(OpenOptions::new().write(true).open(path)?),
            Self::Create(path) => drop(OpenOptions::new().write(true).create_new(true).open(path)?),
            Self::Remove(path) => fs::remove_file(path)?,
            Self::CreateDirectory(path) => fs::create_dir(path)?,
            Self::RenameDirectory(from, to) => fs::rename(from, to)?,
            Self::SetSignalOwner(process) => {
                let (socket, _other) = UnixStream::pair()?;
                // SAFETY: the command takes a number.
                checked(unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETOWN, *process) }.into())?;
            }
            Self::Request(request) => {
                // SAFETY: standard error is no device that reads its argument.
                checked(unsafe { libc::ioctl(2, *request, 0) }.into())?;
            }
            Self::List(path) => drop(fs::read_dir(path)?),
            Self::ConnectTcp(address) => drop(TcpStream::connect(address)?),
            Self::ConnectUnix(path) => drop(UnixStream::connect(path)?),
            Self::Socket(family) => {
                // SAFETY: the call takes no pointers.
                checked(unsafe { libc::socket(*family, libc::SOCK_RAW, 0) }.into())?;
            }
            Self::ReadMemory(process, address) => {
                let mut byte = [0];
                let remote = RemoteIoVec { base: *address, len: 1 };
                process_vm_readv(pid(*process), &mut [IoSliceMut::new(&mut byte)], &[remote])?;
            }
            Self::Trace(process) => {
                ptrace::seize(pid(*process), ptrace::Options::empty())?;
            }
            Self::Signal(process) => kill(pid(*process), Signal::SIGCONT)?,
            Self::Namespace(flags) => unshare(*flags)?,
            Self::Mount(at) => {
                unshare(CloneFlags::CLONE_NEWNS)?;
                mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
                mount("none", at, "tmpfs", MountFlags::empty(), None)?;
            }
            Self::Ring => {
                let mut parameters = [0u8; 120];
                // SAFETY: the kernel writes at most `struct io_uring_params`, which has 120 bytes.
                checked(unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) })?;
            }
            Self::Bpf => {
                const BPF_MAP_TYPE_ARRAY: u32 = 2;
                let attributes = [BPF_MAP_TYPE_ARRAY, 4, 4, 1, 0, 0, 0, 0];
                let size = size_of_val(&attributes);
                // SAFETY: BPF_MAP_CREATE reads `size` bytes.
                checked(unsafe { libc::syscall(libc::SYS_bpf, 0, attributes.as_ptr(), size) })?;
            }
        }
        Ok(())
    }
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(i32::try_from(number).unwrap())
}

fn checked(result: i64) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
