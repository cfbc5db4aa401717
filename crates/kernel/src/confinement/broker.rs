//! A child process that does a few fixed operations for a process that confines itself afterwards.
//!
//! The two share sockets only. A request is a fixed number of integers, a file name and at most one descriptor; an answer
//! is an integer and at most one descriptor. Each is one packet, so there is nothing to parse. The child ends when the
//! other process has closed all its ends, also when it was killed.

use super::capabilities::{self, CapabilitySet};
use super::{ConfinementError, check_single_thread};
use nix::errno::Errno;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, PoisonError, TryLockError};
use std::thread;

/// Integers of a request.
const NUMBERS: usize = 4;
/// Bytes of the integers of a request.
const NUMBER_BYTES: usize = NUMBERS * 8;
/// Bytes of an answer: error number, integer, number of descriptors.
const ANSWER_BYTES: usize = 24;
/// Most bytes of a file name (`NAME_MAX` of `linux/limits.h`).
const MAX_NAME_BYTES: usize = 255;

/// An operation that a broker does.
#[derive(Debug)]
pub struct Request {
    /// The operation and its parameters.
    pub numbers: [u64; NUMBERS],
    /// A file name, which may have any bytes; empty if the operation has none.
    pub name: OsString,
    /// An open file or socket.
    pub descriptor: Option<OwnedFd>,
}

/// The result of an operation.
#[derive(Debug, Default)]
pub struct Answer {
    /// Its meaning depends on the operation.
    pub number: u64,
    /// A file that the broker has opened.
    pub descriptor: Option<OwnedFd>,
}

impl From<u64> for Answer {
    fn from(number: u64) -> Self {
        Self { number, descriptor: None }
    }
}

impl From<()> for Answer {
    fn from((): ()) -> Self {
        Self::default()
    }
}

/// The connections to the child. Requests on different connections do not wait for each other.
#[derive(Debug)]
pub struct Broker {
    connections: Vec<Mutex<OwnedFd>>,
}

impl Broker {
    /// Starts a child that answers requests with `answer`, at most `connections` at a time. It keeps only the
    /// capabilities `kept`, standard output and standard error.
    ///
    /// # Errors
    /// [`ConfinementError`] if this process has several threads, or the child cannot be started.
    pub fn start(
        connections: usize,
        kept: CapabilitySet,
        answer: impl Fn(Request) -> io::Result<Answer> + Sync,
    ) -> Result<Self, ConfinementError> {
        let failed = |source: io::Error| ConfinementError::Io { doing: "starting its broker", source };
        check_single_thread()?;
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let pairs = (0..connections).map(|_| pair()).collect::<Result<Vec<_>, _>>().map_err(|e| failed(e.into()))?;
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        // The child of a child: it needs no parent that waits for its end.
        //
        // SAFETY: this process has one thread, so that the child can use everything that it has inherited.
        match unsafe { fork() }.map_err(|e| failed(e.into()))? {
            ForkResult::Parent { child } => loop {
                match waitpid(child, None) {
                    Err(Errno::EINTR) => {}
                    Ok(WaitStatus::Exited(_, 0)) | Err(Errno::ECHILD) => {
                        // Without a child, the kernel has waited for it: this process was started with SIGCHLD ignored.
                        return Ok(Self { connections: ours.into_iter().map(Mutex::new).collect() });
                    }
                    Ok(status) => return Err(failed(io::Error::other(format!("{status:?}")))),
                    Err(e) => return Err(failed(e.into())),
                }
            },
            // SAFETY: as above.
            ForkResult::Child => match unsafe { fork() } {
                Ok(ForkResult::Child) => {
                    drop(ours);
                    serve(&theirs, kept, &answer)
                }
                Ok(ForkResult::Parent { .. }) => exit(0),
                Err(_) => exit(1),
            },
        }
    }

    /// Ends this process when the child has ended: without it, the process can do only a part of its work.
    ///
    /// # Errors
    /// Errors of starting a thread.
    pub fn end_process_with_it(&self) -> io::Result<()> {
        let connection = self.connections.first().ok_or(io::ErrorKind::NotConnected)?;
        let connection = connection.lock().unwrap_or_else(PoisonError::into_inner).try_clone()?;
        let wait = move || {
            // Only the end of the connection is an event.
            while poll(&mut [PollFd::new(&connection, PollFlags::empty())], None) != Ok(1) {}
            tracing::error!("its broker has ended, so this process ends");
            std::process::exit(1)
        };
        thread::Builder::new().name("broker".into()).spawn(wait).map(drop)
    }

    #[cfg(test)]
    pub(super) fn close_all_but_first(&mut self) {
        self.connections.truncate(1);
    }

    /// Sends a request of integers, and waits for the answer.
    ///
    /// # Errors
    /// As for [`Broker::ask`].
    pub fn ask_number(&self, numbers: [u64; NUMBERS]) -> io::Result<u64> {
        Ok(self.ask(numbers, OsStr::new(""), None)?.number)
    }

    /// Sends a request, and waits for its answer.
    ///
    /// # Errors
    /// The error of the operation; `InvalidInput` if the name is too long; `UnexpectedEof` or `BrokenPipe` if the child
    /// has ended.
    pub fn ask(&self, numbers: [u64; NUMBERS], name: &OsStr, descriptor: Option<BorrowedFd<'_>>) -> io::Result<Answer> {
        if name.len() > MAX_NAME_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let free = self.connections.iter().find_map(|connection| match connection.try_lock() {
            Ok(socket) => Some(socket),
            Err(TryLockError::Poisoned(socket)) => Some(socket.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        });
        let first = || Some(self.connections.first()?.lock().unwrap_or_else(PoisonError::into_inner));
        let socket = free.or_else(first).ok_or(io::ErrorKind::NotConnected)?;
        send(&socket, &[numbers.map(u64::to_ne_bytes).as_flattened(), name.as_bytes()], descriptor)?;
        let mut bytes = [0; ANSWER_BYTES];
        let (received, descriptor) = receive(&socket, &mut bytes)?;
        let ([errno, number, descriptors], ANSWER_BYTES) = (numbers_of(&bytes), received) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        match i32::try_from(errno) {
            Ok(0) if descriptors == u64::from(descriptor.is_some()) => Ok(Answer { number, descriptor }),
            Ok(0) => Err(io::Error::other(
                "a descriptor was lost on its way; raise the limit of open files (LimitNOFILE, ulimit -n)",
            )),
            Ok(errno) => Err(io::Error::from_raw_os_error(errno)),
            Err(_) => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Sends one packet.
fn send(socket: &OwnedFd, parts: &[&[u8]; 2], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor]);
    if let Some(descriptors) = &descriptors {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    rustix::io::retry_on_intr(|| sendmsg(socket, &parts.map(IoSlice::new), &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives one packet, up to the length of `bytes`. Returns its length, which is 0 at the end of the connection.
fn receive(socket: &OwnedFd, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    // Further descriptors are closed.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok((received.bytes, descriptors.flatten().next()))
}

/// Returns the integers at the beginning of a packet.
fn numbers_of<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut numbers = [0; N];
    for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks().0) {
        *number = u64::from_ne_bytes(*bytes);
    }
    numbers
}

/// Ends the child without the exit handlers of the other process.
fn exit(status: i32) -> ! {
    // SAFETY: the call does not return and takes no pointer.
    unsafe { libc::_exit(status) }
}

/// Answers requests until the other process has closed all connections. One that is closed earlier may belong to a process
/// that is about to end with an error of its own.
fn serve(connections: &[OwnedFd], kept: CapabilitySet, answer: &(impl Fn(Request) -> io::Result<Answer> + Sync)) -> ! {
    let kept_descriptors: Vec<RawFd> = connections.iter().map(AsRawFd::as_raw_fd).collect();
    show_as("rekindle broker");
    raise_descriptor_limit();
    if close_others(&kept_descriptors).is_err() || capabilities::reduce_to(kept, None).is_err() {
        exit(1);
    }
    thread::scope(|scope| {
        for connection in connections {
            let started = thread::Builder::new().spawn_scoped(scope, move || {
                let served = AssertUnwindSafe(|| answer_all(connection, answer));
                // An error or a panic ends the process: the other one must not wait for an answer.
                if !matches!(std::panic::catch_unwind(served), Ok(Ok(()))) {
                    exit(1);
                }
            });
            if started.is_err() {
                exit(1);
            }
        }
    });
    exit(0)
}

fn answer_all(connection: &OwnedFd, answer: impl Fn(Request) -> io::Result<Answer>) -> io::Result<()> {
    while answer_next(connection, &answer)? {}
    Ok(())
}

/// Returns false at the end of the connection.
fn answer_next(connection: &OwnedFd, answer: impl Fn(Request) -> io::Result<Answer>) -> io::Result<bool> {
    let mut bytes = [0; NUMBER_BYTES + MAX_NAME_BYTES];
    let (received, descriptor) = receive(connection, &mut bytes)?;
    if received == 0 {
        return Ok(false);
    }
    let request = bytes.get(..received).and_then(|packet| packet.split_at_checked(NUMBER_BYTES));
    let (numbers, name) = request.ok_or(io::ErrorKind::UnexpectedEof)?;
    let request = Request { numbers: numbers_of(numbers), name: OsString::from_vec(name.to_vec()), descriptor };
    // Also if the descriptor could not be sent: then nothing was sent.
    let sent = answer(request).and_then(|answer| send_answer(connection, 0, &answer));
    sent.or_else(|e| send_answer(connection, errno(&e), &Answer::default())).map(|()| true)
}

fn send_answer(connection: &OwnedFd, errno: i32, Answer { number, descriptor }: &Answer) -> io::Result<()> {
    let numbers = [i64::from(errno).to_ne_bytes(), number.to_ne_bytes(), u64::from(descriptor.is_some()).to_ne_bytes()];
    send(connection, &[numbers.as_flattened(), &[]], descriptor.as_ref().map(AsFd::as_fd))
}

/// Returns the number of an error. [`io::Error::from_raw_os_error`] gets the same kind of error from it.
fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(match error.kind() {
        io::ErrorKind::NotFound => libc::ENOENT,
        io::ErrorKind::PermissionDenied => libc::EACCES,
        io::ErrorKind::AlreadyExists => libc::EEXIST,
        io::ErrorKind::ResourceBusy => libc::EBUSY,
        io::ErrorKind::InvalidInput => libc::EINVAL,
        io::ErrorKind::DirectoryNotEmpty => libc::ENOTEMPTY,
        io::ErrorKind::Unsupported => libc::EOPNOTSUPP,
        _ => libc::EIO,
    })
}

/// Raises the limit of descriptors to the hard limit. The kernel compares it with the descriptors that all processes of the
/// user have sent and that were not received yet: another process could prevent answers.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
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

/// Closes all descriptors except standard output, standard error and `kept`: among them are the locks of the other
/// process. Standard input is a pipe whose end may be a signal.
fn close_others(kept: &[RawFd]) -> io::Result<()> {
    let open: Vec<RawFd> = fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|number| !(1..=2).contains(number) && !kept.contains(number))
        .collect();
    for number in open {
        // SAFETY: nothing in this process uses the descriptor any more: the child only runs `serve`.
        unsafe { libc::close(number) };
    }
    Ok(())
}
