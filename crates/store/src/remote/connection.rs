//! A connection that carries frames of a type and a payload, with limits of size and time.
//!
//! ```text
//! length of the payload (4) | type (1) | payload
//! ```

use super::identity::{Identity, explain};
use super::protocol::{Failure, Kind};
use crate::error::{Result, StoreError};
use crate::url::Remote;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConfig, ServerConnection, StreamOwned};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the peer may neither send nor receive within a frame.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Time limit for connecting, including the handshake.
const CONNECT: Duration = Duration::from_secs(10);
/// Bytes of a frame per second that must be transferred after [`PATIENCE`]: 1 Mbit/s. A slower connection is useless
/// for checkpoints. With this limit, 4 MiB of pages may take a minute, and the largest frame 18 minutes.
const SLOWEST: u64 = 128 << 10;
/// How long a server may report that it is still working on a checkpoint, e.g. while its disk is slow. A guest may be
/// stopped meanwhile.
const WORK: Duration = Duration::from_secs(3600);
/// How long a server may report that it is still working on a whole store (verify, compact): enough for 8 TB at 100
/// MB/s.
const LONG_WORK: Duration = Duration::from_secs(24 * 3600);

/// Cause of a failed connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// A certificate or key file cannot be used.
    #[error("{what} {}: {why}", path.display())]
    File {
        path: PathBuf,
        /// Content that the file should have.
        what: &'static str,
        why: String,
    },
    /// A server was named, but no certificate was configured.
    #[error("a server requires a certificate: give --cert, --key and --ca")]
    NoIdentity,
    /// The server's name is not valid.
    #[error("`{host}` is neither a name nor an address of a server")]
    Host { host: String },
    /// Connecting to the server failed.
    #[error("{address} cannot be reached; is `rekindle store serve` running there?")]
    Connect {
        address: String,
        #[source]
        source: io::Error,
    },
    /// A certificate of the client or the server was rejected.
    #[error("{why}; {remedy}")]
    Certificate {
        why: String,
        /// Action that fixes the cause.
        remedy: &'static str,
    },
    /// The peer has neither sent nor received anything for too long.
    #[error("the other side has neither sent nor received anything for {} s", after.as_secs())]
    Silent {
        /// Limit that was exceeded.
        after: Duration,
    },
    /// The peer is too slow for a whole frame or operation.
    #[error("the other side is too slow: it has not finished within {} s", after.as_secs())]
    Slow {
        /// Limit that was exceeded.
        after: Duration,
    },
    /// The peer has closed the connection.
    #[error("the other side has closed the connection")]
    Closed,
    #[error("the connection failed")]
    Io(#[source] io::Error),
    /// The peer has violated the protocol.
    #[error("{what}")]
    Protocol { what: String },
}

impl ConnectionError {
    fn of(e: io::Error) -> Self {
        if let Some(explained) = explain(&e) {
            return explained;
        }
        let e = match e.downcast::<Self>() {
            Ok(late) => return late,
            Err(e) => e,
        };
        match e.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Io(e),
        }
    }

    pub(crate) fn protocol(what: impl Into<String>) -> Self {
        Self::Protocol { what: what.into() }
    }
}

/// A TCP connection with two limits for each operation: the longest silence of the peer, and a deadline for the whole
/// operation. The deadline does not move when bytes are transferred.
struct TimedStream {
    tcp: TcpStream,
    silence: Duration,
    /// Time limit of the whole operation. `deadline` is the time at which it ends.
    whole: Duration,
    deadline: Instant,
    /// Bytes have been transferred since the start of the operation.
    moved: bool,
}

impl TimedStream {
    fn new(tcp: TcpStream) -> std::result::Result<Self, ConnectionError> {
        tcp.set_nodelay(true).and_then(|()| tcp.set_nonblocking(true)).map_err(ConnectionError::Io)?;
        Ok(Self { tcp, silence: CONNECT, whole: CONNECT, deadline: Instant::now() + CONNECT, moved: false })
    }

    /// Starts an operation in which the peer may be silent for `silence`, and which may take `whole`.
    fn begin(&mut self, silence: Duration, whole: Duration) {
        (self.silence, self.whole, self.deadline) = (silence, whole, Instant::now() + whole);
        self.moved = false;
    }

    /// Calls `io` until it returns anything but `WouldBlock`, and waits for `events` in between.
    fn timed(&mut self, events: PollFlags, mut io: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
        let silent_at = Instant::now() + self.silence;
        loop {
            // Tries `io` before polling, since data is usually available.
            let now = Instant::now();
            if now >= self.deadline {
                return Err(self.late(silent_at));
            }
            match io(&self.tcp) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    self.moved = true;
                    return done;
                }
            }
            let left = silent_at.min(self.deadline).saturating_duration_since(now);
            let limit = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.tcp, events)], Some(&limit)) {
                Ok(0) => return Err(self.late(silent_at)),
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn late(&self, silent_at: Instant) -> io::Error {
        let late = if self.moved && silent_at > self.deadline {
            ConnectionError::Slow { after: self.whole }
        } else {
            ConnectionError::Silent { after: self.silence }
        };
        io::Error::new(io::ErrorKind::TimedOut, late)
    }
}

impl Read for TimedStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.timed(PollFlags::IN, |mut tcp| tcp.read(into))
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.timed(PollFlags::OUT, |mut tcp| tcp.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A TLS connection of a client or a server.
trait Stream: Read + Write + Send {
    fn timed(&mut self) -> &mut TimedStream;
    /// Closes the TLS connection, so that the peer can distinguish the end from a failure.
    fn close(&mut self);
}

impl Stream for StreamOwned<ClientConnection, TimedStream> {
    fn timed(&mut self) -> &mut TimedStream {
        &mut self.sock
    }

    fn close(&mut self) {
        self.conn.send_close_notify();
        let _ = self.conn.write_tls(&mut self.sock);
    }
}

impl Stream for StreamOwned<ServerConnection, TimedStream> {
    fn timed(&mut self) -> &mut TimedStream {
        &mut self.sock
    }

    fn close(&mut self) {
        self.conn.send_close_notify();
        let _ = self.conn.write_tls(&mut self.sock);
    }
}

/// One end of a connection between a client and a server.
pub(crate) struct Connection {
    stream: Box<dyn Stream>,
    /// How long the peer may wait before it begins a frame.
    patience: Duration,
    /// How long the peer may be silent within a frame.
    within: Duration,
    /// Bytes per second that must be transferred after `within`.
    slowest: u64,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Closing lets the peer distinguish an end from a failure. The time limit is short, because the peer may not
        // receive any more.
        let a_moment = Duration::from_millis(100);
        self.stream.timed().begin(a_moment, a_moment);
        self.stream.close();
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("patience", &self.patience).finish_non_exhaustive()
    }
}

impl Connection {
    /// Connects to a server, including the TLS handshake.
    pub fn connect(server: &Remote, identity: Option<&Identity>) -> std::result::Result<Self, ConnectionError> {
        let config = identity.ok_or(ConnectionError::NoIdentity)?.client()?;
        let host = server.host.clone();
        let name = ServerName::try_from(host.clone()).map_err(|_| ConnectionError::Host { host: host.clone() })?;
        let address = format!("{}:{}", server.host, server.port);
        let failed = |source| ConnectionError::Connect { address: address.clone(), source };
        let mut last = io::Error::new(io::ErrorKind::NotFound, "it has no address");
        let found = (server.host.as_str(), server.port).to_socket_addrs().map_err(failed)?;
        let connected = found.into_iter().find_map(|to| match TcpStream::connect_timeout(&to, CONNECT) {
            Ok(tcp) => Some(tcp),
            Err(e) => {
                last = e;
                None
            }
        });
        let Some(tcp) = connected else { return Err(failed(last)) };
        let connection = ClientConnection::new(config, name).map_err(|e| ConnectionError::protocol(e.to_string()))?;
        let mut stream = StreamOwned::new(connection, TimedStream::new(tcp)?);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).map_err(ConnectionError::of)?;
        }
        Ok(Self { stream: Box::new(stream), patience: PATIENCE, within: PATIENCE, slowest: SLOWEST })
    }

    /// Accepts a client. `patience` limits the silence before its greeting and within each frame.
    pub fn accept(
        tcp: TcpStream,
        config: Arc<ServerConfig>,
        patience: Duration,
    ) -> std::result::Result<Self, ConnectionError> {
        let connection = ServerConnection::new(config).map_err(|e| ConnectionError::protocol(e.to_string()))?;
        let mut stream = StreamOwned::new(connection, TimedStream::new(tcp)?);
        let greeting = patience.min(CONNECT);
        stream.sock.begin(greeting, greeting);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).map_err(ConnectionError::of)?;
        }
        Ok(Self { stream: Box::new(stream), patience, within: patience, slowest: SLOWEST })
    }

    /// Sets how long the peer may wait before it begins a frame.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Sets the limits within a frame.
    #[cfg(test)]
    pub fn limit(&mut self, within: Duration, slowest: u64) {
        (self.within, self.slowest) = (within, slowest);
    }

    /// Returns the time limit for a frame of `len` bytes.
    fn whole(&self, len: usize) -> Duration {
        self.within + Duration::from_secs(len as u64 / self.slowest.max(1))
    }

    /// Sends a frame. Its payload is the concatenation of `parts`.
    pub fn send(&mut self, kind: Kind, parts: &[&[u8]]) -> std::result::Result<(), ConnectionError> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let short = u32::try_from(len).ok().filter(|len| *len as usize <= kind.limit());
        let len = short.ok_or_else(|| ConnectionError::protocol(format!("{len} bytes are too many for {kind:?}")))?;
        let mut front = len.to_le_bytes().to_vec();
        front.push(kind.code());
        // Sends a short frame in one TLS record.
        let mut rest = parts;
        if len < 8192 {
            parts.iter().for_each(|part| front.extend_from_slice(part));
            rest = &[];
        }
        let whole = self.whole(len as usize);
        self.stream.timed().begin(self.within, whole);
        let sent = self.stream.write_all(&front).and_then(|()| {
            rest.iter().try_for_each(|part| self.stream.write_all(part))?;
            self.stream.flush()
        });
        sent.map_err(ConnectionError::of)
    }

    #[cfg(test)]
    pub fn send_raw(&mut self, bytes: &[u8]) -> std::result::Result<(), ConnectionError> {
        self.stream.timed().begin(PATIENCE, PATIENCE);
        self.stream.write_all(bytes).and_then(|()| self.stream.flush()).map_err(ConnectionError::of)
    }

    #[cfg(test)]
    pub fn receive_raw(&mut self, bytes: &mut [u8]) -> std::result::Result<usize, ConnectionError> {
        self.stream.timed().begin(PATIENCE, PATIENCE);
        self.stream.read(bytes).map_err(ConnectionError::of)
    }

    /// Sends only the header of a frame.
    #[cfg(test)]
    pub fn send_length(&mut self, len: u32, code: u8) -> std::result::Result<(), ConnectionError> {
        self.send_raw(&[&len.to_le_bytes()[..], &[code]].concat())
    }

    /// Sends a frame whose payload is JSON.
    pub fn send_json(&mut self, kind: Kind, value: &impl Serialize) -> std::result::Result<(), ConnectionError> {
        let text = serde_json::to_vec(value).map_err(|e| ConnectionError::Io(e.into()))?;
        self.send(kind, &[&text])
    }

    /// Receives the next frame. Returns `None` if the peer has closed the connection between two frames.
    pub fn receive(&mut self) -> std::result::Result<Option<(Kind, Vec<u8>)>, ConnectionError> {
        self.receive_within(Duration::ZERO)
    }

    /// Receives the next frame from a server that may report for up to `work` that it is still working
    /// ([`Kind::Busy`]).
    pub fn receive_within(&mut self, work: Duration) -> std::result::Result<Option<(Kind, Vec<u8>)>, ConnectionError> {
        let worked = Instant::now() + work;
        loop {
            let mut front = [0; 5];
            let mut there = 0;
            self.stream.timed().begin(self.patience, self.patience);
            while let Some(room) = front.get_mut(there..).filter(|room| !room.is_empty()) {
                match self.stream.read(room) {
                    Ok(0) if there == 0 => return Ok(None),
                    Ok(0) => return Err(ConnectionError::Closed),
                    Ok(n) => {
                        if there == 0 {
                            self.stream.timed().begin(self.within, self.within);
                        }
                        there += n;
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(ConnectionError::of(e)),
                }
            }
            let [a, b, c, d, code] = front;
            let len = u32::from_le_bytes([a, b, c, d]) as usize;
            let kind = Kind::from_code(code)
                .ok_or_else(|| ConnectionError::protocol(format!("a frame of the unknown type {code}")))?;
            if len > kind.limit() {
                let text = format!("a frame {kind:?} of {len} bytes, more than the {} it may have", kind.limit());
                return Err(ConnectionError::protocol(text));
            }
            // The buffer grows with the received data, so that a large stated length alone uses no memory.
            let mut payload = Vec::new();
            let whole = self.whole(len);
            self.stream.timed().begin(self.within, whole);
            let mut rest = (&mut self.stream).take(len as u64);
            rest.read_to_end(&mut payload).map_err(ConnectionError::of)?;
            if payload.len() != len {
                return Err(ConnectionError::Closed);
            }
            if kind != Kind::Busy {
                return Ok(Some((kind, payload)));
            }
            if Instant::now() >= worked {
                return Err(ConnectionError::Slow { after: work });
            }
        }
    }

    /// Sends a request and waits for an answer of type `expected`.
    pub fn ask(&mut self, store: &str, kind: Kind, parts: &[&[u8]], expected: Kind) -> Result<Vec<u8>> {
        let failed = |source| StoreError::Connection { store: store.to_owned(), doing: kind.doing(), source };
        self.send(kind, parts).map_err(failed)?;
        self.answer(store, kind.doing(), expected)
    }

    /// Waits for the answer of type `expected` to a request.
    pub fn answer(&mut self, store: &str, doing: &'static str, expected: Kind) -> Result<Vec<u8>> {
        let failed = |source| StoreError::Connection { store: store.to_owned(), doing, source };
        let work = if matches!(expected, Kind::BlockNumbers | Kind::Committed) { WORK } else { LONG_WORK };
        match self.receive_within(work).map_err(failed)? {
            Some((kind, payload)) if kind == expected => Ok(payload),
            Some((Kind::Failure, payload)) => {
                let failure: Failure = serde_json::from_slice(&payload)
                    .map_err(|_| failed(ConnectionError::protocol("an error that cannot be read")))?;
                Err(failure.into_error(store))
            }
            Some((kind, _)) => {
                Err(failed(ConnectionError::protocol(format!("{kind:?} where {expected:?} was expected"))))
            }
            None => Err(failed(ConnectionError::Closed)),
        }
    }

    /// Sends a request in JSON and waits for an answer of type `expected` in JSON.
    pub fn ask_json<T: DeserializeOwned>(
        &mut self,
        store: &str,
        kind: Kind,
        value: &impl Serialize,
        expected: Kind,
    ) -> Result<T> {
        let failed = |source| StoreError::Connection { store: store.to_owned(), doing: kind.doing(), source };
        let text = serde_json::to_vec(value).map_err(|e| failed(ConnectionError::Io(e.into())))?;
        let answer = self.ask(store, kind, &[&text], expected)?;
        serde_json::from_slice(&answer)
            .map_err(|e| failed(ConnectionError::protocol(format!("{expected:?} that cannot be read: {e}"))))
    }
}
