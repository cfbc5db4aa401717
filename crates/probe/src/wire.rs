//! One TCP connection, and how to get one. Sockets do not block: every wait is bounded by the request's deadline and by
//! the stop of the probe.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_linger, set_tcp_nodelay};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, ipproto, socket_with};

use crate::failure::{Broken, Failure};
use crate::later;
use crate::target::Target;
use crate::waiter::{Waiter, Woken};

/// Gets notified of what happens to connections.
pub(crate) trait Observer {
    /// A connection was established.
    fn opened(&self) {}
    /// An established connection ended, and not by us.
    fn lost(&self) {}
    /// Bytes came in.
    fn received(&self, _bytes: u64) {}
}

/// What every wait of one request needs.
pub(crate) struct Io<'a> {
    pub(crate) waiter: &'a Waiter,
    pub(crate) observer: &'a dyn Observer,
    pub(crate) timeout: Duration,
    pub(crate) deadline: Instant,
}

impl<'a> Io<'a> {
    /// A request that begins now.
    pub(crate) fn begin(waiter: &'a Waiter, observer: &'a dyn Observer, timeout: Duration) -> Self {
        Self { waiter, observer, timeout, deadline: later(Instant::now(), timeout) }
    }

    /// Fails once the request has had its time, or the probe is stopped.
    fn check_time(&self) -> Result<(), Broken> {
        if self.waiter.is_stopped() {
            Err(Broken::Stopped)
        } else if Instant::now() >= self.deadline {
            Err(self.timed_out())
        } else {
            Ok(())
        }
    }

    fn timed_out(&self) -> Broken {
        Failure::Timeout(self.timeout).into()
    }
}

/// A host that has no address.
#[derive(Debug, thiserror::Error)]
#[error("{host}: no address found; check the name, or give the address itself")]
pub struct ResolveError {
    /// The host, as in the URL.
    pub host: String,
    /// The resolver's message; nothing if it found the host, but no address.
    pub source: Option<io::Error>,
}

/// Opens connections to a target whose name was resolved once, at the start.
#[derive(Debug, Clone)]
pub(crate) struct Dialer {
    addresses: Vec<SocketAddr>,
    attempt: Duration,
    /// The address to try first: the one that worked last.
    next: usize,
}

/// How one attempt to connect went wrong.
enum Attempt {
    /// No answer yet: worth another one.
    Silent,
    Broken(Broken),
}

impl Dialer {
    /// Resolves the target's name, in the caller's network namespace.
    pub(crate) fn resolve(target: &Target, attempt: Duration) -> Result<Self, ResolveError> {
        let host = target.host();
        match (host.as_str(), target.port()).to_socket_addrs() {
            Ok(found) => {
                let addresses: Vec<_> = found.collect();
                if addresses.is_empty() {
                    return Err(ResolveError { host, source: None });
                }
                Ok(Self { addresses, attempt, next: 0 })
            }
            Err(source) => Err(ResolveError { host, source: Some(source) }),
        }
    }

    /// Opens a connection. An attempt that is not answered is replaced by a new one, to the next address; the host is
    /// abandoned when all its addresses have failed in a row.
    pub(crate) fn dial(&mut self, io: &Io<'_>) -> Result<Wire, Broken> {
        let mut failed = 0;
        loop {
            match self.attempt(self.addresses[self.next], io) {
                Ok(wire) => {
                    io.observer.opened();
                    return Ok(wire);
                }
                Err(Attempt::Silent) => {
                    failed = 0;
                    io.check_time()?;
                }
                Err(Attempt::Broken(Broken::Stopped)) => return Err(Broken::Stopped),
                Err(Attempt::Broken(broken)) => {
                    failed += 1;
                    if failed == self.addresses.len() {
                        return Err(broken);
                    }
                }
            }
            self.next = (self.next + 1) % self.addresses.len();
        }
    }

    fn attempt(&self, address: SocketAddr, io: &Io<'_>) -> Result<Wire, Attempt> {
        let stream =
            start_connecting(address).map_err(|errno| Attempt::Broken(connect_failure(errno.into()).into()))?;
        let deadline = io.deadline.min(later(Instant::now(), self.attempt));
        match io.waiter.wait_for(stream.as_fd(), PollFlags::OUT, deadline) {
            Woken::Stopped => return Err(Attempt::Broken(Broken::Stopped)),
            Woken::Late => return Err(Attempt::Silent),
            Woken::Ready => {}
        }
        match stream.take_error() {
            Ok(None) => {}
            Ok(Some(error)) | Err(error) => return Err(Attempt::Broken(connect_failure(error).into())),
        }
        // A port of this host on which no process listens can, by chance, be picked as the local port too: TCP then
        // connects the socket to itself, and it echoes perfectly.
        if stream.local_addr().is_ok_and(|local| local == address) {
            return Err(Attempt::Broken(Failure::Refused.into()));
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

/// What an open connection between two requests is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Idle {
    /// Ready for the next request.
    Quiet,
    /// The other side ended it.
    Ended,
    /// Bytes were received that are no part of an answer.
    Unasked,
}

/// An established connection.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
}

impl Wire {
    /// Checks the connection between two requests.
    pub(crate) fn idle(&self) -> Idle {
        loop {
            return match self.stream.peek(&mut [0]) {
                Ok(0) => Idle::Ended,
                Ok(_) => Idle::Unasked,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Idle::Quiet,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => Idle::Ended,
            };
        }
    }

    /// Sends all of `bytes`.
    pub(crate) fn send(&mut self, mut bytes: &[u8], io: &Io<'_>) -> Result<(), Broken> {
        while !bytes.is_empty() {
            io.check_time()?;
            match self.stream.write(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) => self.wait_or_fail(error, PollFlags::OUT, io)?,
            }
        }
        Ok(())
    }

    /// Receives some bytes; none at the end of the stream.
    pub(crate) fn receive(&mut self, buffer: &mut [u8], io: &Io<'_>) -> Result<usize, Broken> {
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

    fn wait_or_fail(&self, error: io::Error, events: PollFlags, io: &Io<'_>) -> Result<(), Broken> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock => match io.waiter.wait_for(self.stream.as_fd(), events, io.deadline) {
                Woken::Ready => Ok(()),
                Woken::Late => Err(io.timed_out()),
                Woken::Stopped => Err(Broken::Stopped),
            },
            _ => Err(Failure::Lost(error).into()),
        }
    }

    /// Closes the connection with a reset, which leaves no `TIME_WAIT` behind.
    pub(crate) fn abort(self) {
        if let Err(errno) = set_socket_linger(&self.stream, Some(Duration::ZERO)) {
            tracing::debug!(%errno, "cannot close with a reset");
        }
    }
}

/// The failure of a connection that the other side closed before the answer was whole.
pub(crate) fn closed_early() -> Broken {
    Failure::Lost(io::Error::new(io::ErrorKind::UnexpectedEof, "the other side closed it")).into()
}
