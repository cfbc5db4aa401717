//! A TCP connection, and how it is opened. Sockets do not block: the request's deadline and the stop of the probe limit
//! every wait.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_linger, set_tcp_nodelay};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, ipproto, socket_with};

use crate::failure::{Failure, NoAnswer};
use crate::later;
use crate::target::Target;
use crate::waiter::{WaitResult, Waiter};

/// Receives notifications about connections.
pub(crate) trait Observer {
    /// A connection was established.
    fn opened(&self) {}
    /// An established connection ended, and the probe has not closed it.
    fn lost(&self) {}
    /// Bytes were received.
    fn received(&self, _bytes: u64) {}
}

/// The parameters of all waits of one request.
pub(crate) struct Io<'a> {
    pub(crate) waiter: &'a Waiter,
    pub(crate) observer: &'a dyn Observer,
    pub(crate) timeout: Duration,
    pub(crate) deadline: Instant,
}

impl<'a> Io<'a> {
    /// Returns the parameters for a request that starts now.
    pub(crate) fn begin(waiter: &'a Waiter, observer: &'a dyn Observer, timeout: Duration) -> Self {
        Self { waiter, observer, timeout, deadline: later(Instant::now(), timeout) }
    }

    /// Fails if the request has timed out or the probe is stopped.
    fn check_time(&self) -> Result<(), NoAnswer> {
        if self.waiter.is_stopped() {
            Err(NoAnswer::Stopped)
        } else if Instant::now() >= self.deadline {
            Err(self.timed_out())
        } else {
            Ok(())
        }
    }

    fn timed_out(&self) -> NoAnswer {
        Failure::Timeout(self.timeout).into()
    }
}

/// The error that a host has no address.
#[derive(Debug, thiserror::Error)]
#[error("{host}: no address found; check the name, or give the address itself")]
pub struct ResolveError {
    /// Host as given in the URL.
    pub host: String,
    /// Error of the resolver; `None` if it found the host but no address.
    pub source: Option<io::Error>,
}

/// Opens connections to a target whose name was resolved once at the start.
#[derive(Debug, Clone)]
pub(crate) struct Dialer {
    addresses: Vec<SocketAddr>,
    /// Time after which an unanswered attempt to connect is replaced by a new one.
    attempt_timeout: Duration,
    /// Index of the address to try first: the one that worked last.
    next_address: usize,
}

/// Outcome of an attempt to connect that did not succeed.
enum FailedAttempt {
    /// No answer yet: a new attempt may succeed.
    Silent,
    Final(NoAnswer),
}

impl Dialer {
    /// Resolves the target's name, in the caller's network namespace.
    pub(crate) fn resolve(target: &Target, attempt_timeout: Duration) -> Result<Self, ResolveError> {
        let host = target.host();
        match (host.as_str(), target.port()).to_socket_addrs() {
            Ok(addresses) => {
                let addresses: Vec<_> = addresses.collect();
                if addresses.is_empty() {
                    return Err(ResolveError { host, source: None });
                }
                Ok(Self { addresses, attempt_timeout, next_address: 0 })
            }
            Err(source) => Err(ResolveError { host, source: Some(source) }),
        }
    }

    /// Opens a connection. An unanswered attempt is replaced by a new one to the next address. When all addresses have
    /// failed in a row, returns the failure.
    pub(crate) fn dial(&mut self, io: &Io<'_>) -> Result<Wire, NoAnswer> {
        let mut failures_in_a_row = 0;
        loop {
            match self.connect_to(self.addresses[self.next_address], io) {
                Ok(wire) => {
                    io.observer.opened();
                    return Ok(wire);
                }
                Err(FailedAttempt::Silent) => {
                    failures_in_a_row = 0;
                    io.check_time()?;
                }
                Err(FailedAttempt::Final(NoAnswer::Stopped)) => return Err(NoAnswer::Stopped),
                Err(FailedAttempt::Final(failure)) => {
                    failures_in_a_row += 1;
                    if failures_in_a_row == self.addresses.len() {
                        return Err(failure);
                    }
                }
            }
            self.next_address = (self.next_address + 1) % self.addresses.len();
        }
    }

    /// Makes one attempt to connect.
    fn connect_to(&self, address: SocketAddr, io: &Io<'_>) -> Result<Wire, FailedAttempt> {
        let stream =
            start_connecting(address).map_err(|errno| FailedAttempt::Final(connect_failure(errno.into()).into()))?;
        let deadline = io.deadline.min(later(Instant::now(), self.attempt_timeout));
        match io.waiter.wait_for(stream.as_fd(), PollFlags::OUT, deadline) {
            WaitResult::Stopped => return Err(FailedAttempt::Final(NoAnswer::Stopped)),
            WaitResult::DeadlinePassed => return Err(FailedAttempt::Silent),
            WaitResult::Ready => {}
        }
        match stream.take_error() {
            Ok(None) => {}
            Ok(Some(error)) | Err(error) => return Err(FailedAttempt::Final(connect_failure(error).into())),
        }
        // If no process listens on a port of the local host, the kernel may by chance choose the same port as the local
        // port. TCP then connects the socket to itself, and the socket echoes correctly.
        if stream.local_addr().is_ok_and(|local| local == address) {
            return Err(FailedAttempt::Final(Failure::Refused.into()));
        }
        Ok(Wire { stream })
    }
}

fn start_connecting(address: SocketAddr) -> Result<TcpStream, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    set_tcp_nodelay(&fd, true)?;
    match connect(&fd, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(TcpStream::from(fd)),
        Err(errno) => Err(errno),
    }
}

fn connect_failure(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Failure::Refused,
        _ => Failure::Unreachable(error),
    }
}

/// State of an open connection between two requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdleState {
    /// Ready for the next request.
    Quiet,
    /// The peer has ended the connection.
    Ended,
    /// Bytes were received that do not belong to an answer.
    Unasked,
}

/// An established connection.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
}

impl Wire {
    /// Checks the state of the connection between two requests.
    pub(crate) fn idle_state(&self) -> IdleState {
        loop {
            return match self.stream.peek(&mut [0]) {
                Ok(0) => IdleState::Ended,
                Ok(_) => IdleState::Unasked,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => IdleState::Quiet,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => IdleState::Ended,
            };
        }
    }

    /// Sends all of `bytes`.
    pub(crate) fn send(&mut self, mut bytes: &[u8], io: &Io<'_>) -> Result<(), NoAnswer> {
        while !bytes.is_empty() {
            io.check_time()?;
            match self.stream.write(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) => self.wait_or_fail(error, PollFlags::OUT, io)?,
            }
        }
        Ok(())
    }

    /// Receives some bytes. Returns 0 at the end of the stream.
    pub(crate) fn receive(&mut self, buffer: &mut [u8], io: &Io<'_>) -> Result<usize, NoAnswer> {
        loop {
            io.check_time()?;
            match self.stream.read(buffer) {
                Ok(received) => {
                    io.observer.received(received as u64);
                    return Ok(received);
                }
                Err(error) => self.wait_or_fail(error, PollFlags::IN, io)?,
            }
        }
    }

    fn wait_or_fail(&self, error: io::Error, events: PollFlags, io: &Io<'_>) -> Result<(), NoAnswer> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock => match io.waiter.wait_for(self.stream.as_fd(), events, io.deadline) {
                WaitResult::Ready => Ok(()),
                WaitResult::DeadlinePassed => Err(io.timed_out()),
                WaitResult::Stopped => Err(NoAnswer::Stopped),
            },
            _ => Err(Failure::Lost(error).into()),
        }
    }

    /// Closes the connection with a reset, so that its port does not stay in `TIME_WAIT`.
    pub(crate) fn abort(self) {
        if let Err(errno) = set_socket_linger(&self.stream, Some(Duration::ZERO)) {
            tracing::debug!(%errno, "cannot close with a reset");
        }
    }
}

/// Returns the failure of a connection that the peer closed before the answer was complete.
pub(crate) fn closed_early() -> NoAnswer {
    Failure::Lost(io::Error::new(io::ErrorKind::UnexpectedEof, "the other side closed it")).into()
}
