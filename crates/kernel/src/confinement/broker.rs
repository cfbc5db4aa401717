//! A child process that does a few fixed operations for a process that confines itself afterwards.
//!
//! The two share sockets only. A request is a fixed number of integers, and the answer is one: there is nothing to
//! parse. The child ends when the other process has closed its ends, also when it was killed.

use super::capabilities::{self, CapabilitySet};
use super::{ConfinementError, check_single_thread};
use nix::errno::Errno;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork};
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError, TryLockError};
use std::thread;

/// The connections to the child. Requests on different connections do not wait for each other.
#[derive(Debug)]
pub struct Broker {
    connections: Vec<Mutex<UnixStream>>,
}

impl Broker {
    /// Starts a child that answers requests with `answer`, at most `connections` at a time. It keeps only the
    /// capabilities `kept` and no descriptor except the standard ones.
    ///
    /// # Errors
    /// [`ConfinementError`] if this process has several threads, or the child cannot be started.
    pub fn start<const N: usize>(
        connections: usize,
        kept: CapabilitySet,
        answer: impl Fn([u64; N]) -> io::Result<u64> + Sync,
    ) -> Result<Self, ConfinementError> {
        let failed = |source: io::Error| ConfinementError::Io { doing: "its broker cannot be started", source };
        check_single_thread()?;
        let pairs = (0..connections).map(|_| UnixStream::pair()).collect::<io::Result<Vec<_>>>().map_err(failed)?;
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        // The child of a child: it needs no parent that waits for its end.
        //
        // SAFETY: this process has one thread, so that the child can use everything that it has inherited.
        match unsafe { fork() }.map_err(|e| failed(e.into()))? {
            ForkResult::Parent { child } => {
                match waitpid(child, None) {
                    // The kernel has waited for it, if this process was started with SIGCHLD ignored.
                    Ok(_) | Err(Errno::ECHILD) => {}
                    Err(e) => return Err(failed(e.into())),
                }
                Ok(Self { connections: ours.into_iter().map(Mutex::new).collect() })
            }
            // SAFETY: as above.
            ForkResult::Child => match unsafe { fork() } {
                Ok(ForkResult::Child) => serve(&theirs, kept, &answer),
                _ => exit(),
            },
        }
    }

    /// Sends a request, and waits for its answer.
    ///
    /// # Errors
    /// The error of the operation; `UnexpectedEof` or `BrokenPipe` if the child has ended.
    pub fn ask<const N: usize>(&self, request: [u64; N]) -> io::Result<u64> {
        let free = self.connections.iter().find_map(|connection| match connection.try_lock() {
            Ok(stream) => Some(stream),
            Err(TryLockError::Poisoned(stream)) => Some(stream.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        });
        let first = || Some(self.connections.first()?.lock().unwrap_or_else(PoisonError::into_inner));
        let mut stream = free.or_else(first).ok_or(io::ErrorKind::NotConnected)?;
        stream.write_all(request.map(u64::to_ne_bytes).as_flattened())?;
        let [mut errno, mut value] = [[0; 8]; 2];
        stream.read_exact(&mut errno)?;
        stream.read_exact(&mut value)?;
        match i32::try_from(u64::from_ne_bytes(errno)) {
            Ok(0) => Ok(u64::from_ne_bytes(value)),
            Ok(errno) => Err(io::Error::from_raw_os_error(errno)),
            Err(_) => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Ends the child without the exit handlers of the other process.
fn exit() -> ! {
    // SAFETY: the call does not return and takes no pointer.
    unsafe { libc::_exit(0) }
}

/// Answers requests until a connection is closed.
fn serve<const N: usize>(
    connections: &[UnixStream],
    kept: CapabilitySet,
    answer: &(impl Fn([u64; N]) -> io::Result<u64> + Sync),
) -> ! {
    let kept_descriptors: Vec<RawFd> = connections.iter().map(AsRawFd::as_raw_fd).collect();
    show_as("rekindle broker");
    if close_others(&kept_descriptors).is_err() || capabilities::reduce_to(kept).is_err() {
        exit();
    }
    thread::scope(|scope| {
        for connection in connections {
            scope.spawn(move || {
                while answer_next(connection, answer).is_ok() {}
                exit()
            });
        }
    });
    exit()
}

fn answer_next<const N: usize>(
    mut connection: &UnixStream,
    answer: impl Fn([u64; N]) -> io::Result<u64>,
) -> io::Result<()> {
    let mut request = [[0; 8]; N];
    connection.read_exact(request.as_flattened_mut())?;
    let (errno, value) = match answer(request.map(u64::from_ne_bytes)) {
        Ok(value) => (0, value),
        Err(e) => (e.raw_os_error().unwrap_or(libc::EIO), 0),
    };
    connection.write_all([i64::from(errno).to_ne_bytes(), value.to_ne_bytes()].as_flattened())
}

/// Replaces the arguments that `ps` shows, which are those of the other process.
fn show_as(name: &str) {
    // Fields 48 and 49 of proc_pid_stat(5): the addresses of the arguments. The command may contain spaces.
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let addresses: Vec<usize> = fields.skip(45).take(2).filter_map(|field| field.parse().ok()).collect();
    let [start, end] = addresses[..] else { return };
    // SAFETY: the kernel has mapped the arguments there, writable, for the life of the process. This process has no
    // other thread, and does not read its arguments any more.
    let arguments = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, end.saturating_sub(start)) };
    arguments.fill(0);
    arguments.iter_mut().zip(name.bytes()).for_each(|(byte, new)| *byte = new);
}

/// Closes all descriptors except the standard ones and `kept`: among them are the locks of the other process.
fn close_others(kept: &[RawFd]) -> io::Result<()> {
    let open: Vec<RawFd> = fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|number| *number > 2 && !kept.contains(number))
        .collect();
    for number in open {
        // SAFETY: nothing in this process uses the descriptor any more: the child only runs `serve`.
        unsafe { libc::close(number) };
    }
    Ok(())
}
