//! A connection: frames of a type and a payload, with a limit for each, and an end to patience.
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

/// How long the other side may stand still within something.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// How long a connection may take to come about, with its handshake.
const CONNECT: Duration = Duration::from_secs(10);
/// Bytes of a frame that have to come in a second, or be taken, when [`PATIENCE`] is over: 1 Mbit/s. A slower line is of no use for
/// checkpoints. So 4 MiB of pages may take a minute, and the largest frame 18 minutes.
const SLOWEST: u64 = 128 << 10;
/// How long a server may report that it still works on a checkpoint: on what its disk has not yet written of it. A guest may be stopped
/// meanwhile.
const WORK: Duration = Duration::from_secs(3600);
/// The same of work on a whole store (verify, compact): 8 TB at 100 MB/s.
const LONG_WORK: Duration = Duration::from_secs(24 * 3600);

/// Why a line does not hold.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    /// A certificate or key file is no good.
    #[error("{what} {}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What it should be.
        what: &'static str,
        /// What is wrong.
        why: String,
    },
    /// No certificate was given.
    #[error("a server wants to see a certificate: give --cert, --key and --ca")]
    NoIdentity,
    /// The server's name is none.
    #[error("`{host}` is no name and no address of a server")]
    Host {
        /// That name.
        host: String,
    },
    /// Nobody there.
    #[error("{address} cannot be reached; is `rekindle store serve` running there?")]
    Connect {
        /// Where.
        address: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// One of the certificates does not fit.
    #[error("{why}; {mend}")]
    Certificate {
        /// What is wrong.
        why: String,
        /// What to do.
        mend: &'static str,
    },
    /// Nothing comes any more.
    #[error("the other side has not moved for {} s", after.as_secs())]
    Silent {
        /// How long was waited.
        after: Duration,
    },
    /// It moves, but too slowly.
    #[error("the other side is too slow: it has not finished within {} s", after.as_secs())]
    Slow {
        /// How long it had.
        after: Duration,
    },
    /// It is gone.
    #[error("the other side has closed the line")]
    Closed,
    /// The system fails.
    #[error("the line failed")]
    Io(#[source] io::Error),
    /// It says what makes no sense.
    #[error("{what}")]
    Protocol {
        /// What.
        what: String,
    },
}

impl LineError {
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

/// A TCP connection, each wait on which is bounded: by how long the other side may stand still, and by a deadline that no byte moves.
struct Timed {
    tcp: TcpStream,
    silence: Duration,
    /// How long what is under way may take in all, and when that is over.
    whole: Duration,
    deadline: Instant,
    /// The other side has moved since.
    moved: bool,
}

impl Timed {
    fn new(tcp: TcpStream) -> std::result::Result<Self, LineError> {
        tcp.set_nodelay(true).and_then(|()| tcp.set_nonblocking(true)).map_err(LineError::Io)?;
        Ok(Self { tcp, silence: CONNECT, whole: CONNECT, deadline: Instant::now() + CONNECT, moved: false })
    }

    /// From now on the other side may stand still for `silence`, and may take `whole` for all that it does.
    fn begin(&mut self, silence: Duration, whole: Duration) {
        (self.silence, self.whole, self.deadline) = (silence, whole, Instant::now() + whole);
        self.moved = false;
    }

    /// Does `io` once the connection is ready for `events`.
    fn timed(&mut self, events: PollFlags, mut io: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
        let silent_at = Instant::now() + self.silence;
        loop {
            // First, since more has come as a rule.
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
            LineError::Slow { after: self.whole }
        } else {
            LineError::Silent { after: self.silence }
        };
        io::Error::new(io::ErrorKind::TimedOut, late)
    }
}

impl Read for Timed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.timed(PollFlags::IN, |mut tcp| tcp.read(into))
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.timed(PollFlags::OUT, |mut tcp| tcp.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What goes in both directions.
trait Stream: Read + Write + Send {
    /// What it goes over.
    fn timed(&mut self) -> &mut Timed;
    /// Say that no more will come.
    fn close(&mut self);
}

impl Stream for StreamOwned<ClientConnection, Timed> {
    fn timed(&mut self) -> &mut Timed {
        &mut self.sock
    }

    fn close(&mut self) {
        self.conn.send_close_notify();
        let _ = self.conn.write_tls(&mut self.sock);
    }
}

impl Stream for StreamOwned<ServerConnection, Timed> {
    fn timed(&mut self) -> &mut Timed {
        &mut self.sock
    }

    fn close(&mut self) {
        self.conn.send_close_notify();
        let _ = self.conn.write_tls(&mut self.sock);
    }
}

/// One end of a connection.
pub(crate) struct Line {
    stream: Box<dyn Stream>,
    /// How long the other side may take until it begins a frame.
    patience: Duration,
    /// How long it may stand still within one.
    within: Duration,
    /// Bytes a second that it has to move within one, after that.
    slowest: u64,
}

impl Drop for Line {
    fn drop(&mut self) {
        // So that the other side can tell an end from a break. It does not wait for a peer that takes nothing any more.
        let a_moment = Duration::from_millis(100);
        self.stream.timed().begin(a_moment, a_moment);
        self.stream.close();
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("patience", &self.patience).finish_non_exhaustive()
    }
}

impl Line {
    /// Connect to a server.
    pub fn connect(server: &Remote, identity: Option<&Identity>) -> std::result::Result<Self, LineError> {
        let config = identity.ok_or(LineError::NoIdentity)?.client()?;
        let host = server.host.clone();
        let name = ServerName::try_from(host.clone()).map_err(|_| LineError::Host { host: host.clone() })?;
        let address = format!("{}:{}", server.host, server.port);
        let failed = |source| LineError::Connect { address: address.clone(), source };
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
        let connection = ClientConnection::new(config, name).map_err(|e| LineError::protocol(e.to_string()))?;
        let mut stream = StreamOwned::new(connection, Timed::new(tcp)?);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).map_err(LineError::of)?;
        }
        Ok(Self { stream: Box::new(stream), patience: PATIENCE, within: PATIENCE, slowest: SLOWEST })
    }

    /// Take a client in, with `patience` for the greeting and for each thing.
    pub fn accept(
        tcp: TcpStream,
        config: Arc<ServerConfig>,
        patience: Duration,
    ) -> std::result::Result<Self, LineError> {
        let connection = ServerConnection::new(config).map_err(|e| LineError::protocol(e.to_string()))?;
        let mut stream = StreamOwned::new(connection, Timed::new(tcp)?);
        let greeting = patience.min(CONNECT);
        stream.sock.begin(greeting, greeting);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).map_err(LineError::of)?;
        }
        Ok(Self { stream: Box::new(stream), patience, within: patience, slowest: SLOWEST })
    }

    /// How long the other side may take from now on until it begins a frame.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// The limits within a frame.
    #[cfg(test)]
    pub fn limit(&mut self, within: Duration, slowest: u64) {
        (self.within, self.slowest) = (within, slowest);
    }

    /// How long a frame of `len` bytes may take.
    fn whole(&self, len: usize) -> Duration {
        self.within + Duration::from_secs(len as u64 / self.slowest.max(1))
    }

    /// Send a frame; its payload in parts.
    pub fn send(&mut self, kind: Kind, parts: &[&[u8]]) -> std::result::Result<(), LineError> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let short = u32::try_from(len).ok().filter(|len| *len as usize <= kind.limit());
        let len = short.ok_or_else(|| LineError::protocol(format!("{len} bytes are too many for {kind:?}")))?;
        let mut front = len.to_le_bytes().to_vec();
        front.push(kind.code());
        // Short ones in one record.
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
        sent.map_err(LineError::of)
    }

    /// Send bytes as they are.
    #[cfg(test)]
    pub fn send_raw(&mut self, bytes: &[u8]) -> std::result::Result<(), LineError> {
        self.stream.timed().begin(PATIENCE, PATIENCE);
        self.stream.write_all(bytes).and_then(|()| self.stream.flush()).map_err(LineError::of)
    }

    /// Receive at most so many bytes, as they are.
    #[cfg(test)]
    pub fn receive_raw(&mut self, bytes: &mut [u8]) -> std::result::Result<usize, LineError> {
        self.stream.timed().begin(PATIENCE, PATIENCE);
        self.stream.read(bytes).map_err(LineError::of)
    }

    /// Send only the beginning of a frame.
    #[cfg(test)]
    pub fn send_length(&mut self, len: u32, code: u8) -> std::result::Result<(), LineError> {
        self.send_raw(&[&len.to_le_bytes()[..], &[code]].concat())
    }

    /// Send a frame whose payload is JSON.
    pub fn send_json(&mut self, kind: Kind, value: &impl Serialize) -> std::result::Result<(), LineError> {
        let text = serde_json::to_vec(value).map_err(|e| LineError::Io(e.into()))?;
        self.send(kind, &[&text])
    }

    /// The next frame. `None` when the line was closed in order, between two.
    pub fn receive(&mut self) -> std::result::Result<Option<(Kind, Vec<u8>)>, LineError> {
        self.receive_within(Duration::ZERO)
    }

    /// The same from a server that may report for as long as `work` that it is still at work.
    pub fn receive_within(&mut self, work: Duration) -> std::result::Result<Option<(Kind, Vec<u8>)>, LineError> {
        let worked = Instant::now() + work;
        loop {
            let mut front = [0; 5];
            let mut there = 0;
            self.stream.timed().begin(self.patience, self.patience);
            while let Some(room) = front.get_mut(there..).filter(|room| !room.is_empty()) {
                match self.stream.read(room) {
                    Ok(0) if there == 0 => return Ok(None),
                    Ok(0) => return Err(LineError::Closed),
                    Ok(n) => {
                        if there == 0 {
                            self.stream.timed().begin(self.within, self.within);
                        }
                        there += n;
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(LineError::of(e)),
                }
            }
            let [a, b, c, d, code] = front;
            let len = u32::from_le_bytes([a, b, c, d]) as usize;
            let kind = Kind::from_code(code)
                .ok_or_else(|| LineError::protocol(format!("a frame of the unknown type {code}")))?;
            if len > kind.limit() {
                let text = format!("a frame {kind:?} of {len} bytes, more than the {} it may have", kind.limit());
                return Err(LineError::protocol(text));
            }
            // As it comes, so that a length alone costs no memory.
            let mut payload = Vec::new();
            let whole = self.whole(len);
            self.stream.timed().begin(self.within, whole);
            let mut rest = (&mut self.stream).take(len as u64);
            rest.read_to_end(&mut payload).map_err(LineError::of)?;
            if payload.len() != len {
                return Err(LineError::Closed);
            }
            if kind != Kind::Busy {
                return Ok(Some((kind, payload)));
            }
            if Instant::now() >= worked {
                return Err(LineError::Slow { after: work });
            }
        }
    }

    /// Ask, and wait for an answer of type `wanted`.
    pub fn ask(&mut self, store: &str, kind: Kind, parts: &[&[u8]], wanted: Kind) -> Result<Vec<u8>> {
        let failed = |source| StoreError::Line { store: store.to_owned(), doing: kind.doing(), source };
        self.send(kind, parts).map_err(failed)?;
        self.answer(store, kind.doing(), wanted)
    }

    /// Wait for the answer of type `wanted` to what was asked.
    pub fn answer(&mut self, store: &str, doing: &'static str, wanted: Kind) -> Result<Vec<u8>> {
        let failed = |source| StoreError::Line { store: store.to_owned(), doing, source };
        let work = if matches!(wanted, Kind::Begun | Kind::Committed) { WORK } else { LONG_WORK };
        match self.receive_within(work).map_err(failed)? {
            Some((kind, payload)) if kind == wanted => Ok(payload),
            Some((Kind::Failure, payload)) => {
                let failure: Failure = serde_json::from_slice(&payload)
                    .map_err(|_| failed(LineError::protocol("an error that cannot be read")))?;
                Err(failure.into_error(store))
            }
            Some((kind, _)) => Err(failed(LineError::protocol(format!("{kind:?} where {wanted:?} was expected")))),
            None => Err(failed(LineError::Closed)),
        }
    }

    /// Ask in JSON, and be answered so.
    pub fn ask_json<T: DeserializeOwned>(
        &mut self,
        store: &str,
        kind: Kind,
        value: &impl Serialize,
        wanted: Kind,
    ) -> Result<T> {
        let failed = |source| StoreError::Line { store: store.to_owned(), doing: kind.doing(), source };
        let text = serde_json::to_vec(value).map_err(|e| failed(LineError::Io(e.into())))?;
        let answer = self.ask(store, kind, &[&text], wanted)?;
        serde_json::from_slice(&answer)
            .map_err(|e| failed(LineError::protocol(format!("{wanted:?} that cannot be read: {e}"))))
    }
}
