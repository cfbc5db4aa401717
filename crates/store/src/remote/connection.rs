//! A connection that carries frames of a type and a payload, with limits of size and time.
//!
//! ```text
//! length of the payload (4) | type (1) | payload
//! ```

use super::identity::LocalEnd;
use super::protocol::{Failure, Kind};
use crate::credentials::Identity;
use crate::error::{ConnectionError, Result, StoreError};
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
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the peer may neither send nor receive within a frame.
pub(crate) const MAX_SILENCE: Duration = Duration::from_secs(30);
/// Time limit for connecting, including the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a frame per second that must be transferred after [`MAX_SILENCE`]: 1 Mbit/s. A slower connection is useless
/// for checkpoints. With this limit, 4 MiB of pages may take a minute, and the largest frame 18 minutes.
const MIN_BYTES_PER_SECOND: u64 = 128 << 10;
/// Time limit for closing a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(100);
/// Bytes of a frame's header: length and type.
const HEADER_LEN: usize = 5;
/// Shorter frames are sent in one TLS record.
const SHORT_FRAME_BYTES: u32 = 8192;
/// How long a server may report that it is still working on a checkpoint, e.g. while its disk is slow. A guest may be
/// stopped meanwhile.
const MAX_WORK: Duration = Duration::from_secs(3600);
/// How long a server may report that it is still working on a whole store (verify, compact): enough for 8 TB at 100
/// MB/s.
const MAX_STORE_WORK: Duration = Duration::from_secs(24 * 3600);

/// Converts an error of the connection's streams.
fn connection_error(e: io::Error, end: &LocalEnd) -> ConnectionError {
    if let Some(explained) = end.explain(&e) {
        return explained;
    }
    let e = match e.downcast::<ConnectionError>() {
        Ok(timeout) => return timeout,
        Err(e) => e,
    };
    match e.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe => ConnectionError::Closed,
        _ => ConnectionError::Io(e),
    }
}

/// A TCP connection with two limits for each operation: the longest silence of the peer, and a deadline for the whole
/// operation. The deadline does not move when bytes are transferred.
struct TimedStream {
    tcp: TcpStream,
    max_silence: Duration,
    /// Time limit of the whole operation. `deadline` is the time at which it ends.
    time_limit: Duration,
    deadline: Instant,
    /// Bytes have been transferred since the start of the operation.
    has_transferred: bool,
}

impl TimedStream {
    fn new(tcp: TcpStream) -> std::result::Result<Self, ConnectionError> {
        tcp.set_nodelay(true).and_then(|()| tcp.set_nonblocking(true)).map_err(ConnectionError::Io)?;
        Ok(Self {
            tcp,
            max_silence: CONNECT_TIMEOUT,
            time_limit: CONNECT_TIMEOUT,
            deadline: Instant::now() + CONNECT_TIMEOUT,
            has_transferred: false,
        })
    }

    /// Starts an operation in which the peer may be silent for `max_silence`, and which may take `time_limit`.
    fn begin(&mut self, max_silence: Duration, time_limit: Duration) {
        (self.max_silence, self.time_limit, self.deadline) = (max_silence, time_limit, Instant::now() + time_limit);
        self.has_transferred = false;
    }

    /// Calls `transfer` until it returns anything but `WouldBlock`, and waits for `events` in between.
    fn transfer(
        &mut self,
        events: PollFlags,
        mut transfer: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let silent_until = Instant::now() + self.max_silence;
        loop {
            // Tries the transfer before polling, since data is usually available.
            let now = Instant::now();
            if now >= self.deadline {
                return Err(self.timeout_error(silent_until));
            }
            match transfer(&self.tcp) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                result => {
                    self.has_transferred = true;
                    return result;
                }
            }
            let remaining = silent_until.min(self.deadline).saturating_duration_since(now);
            let limit =
                Timespec { tv_sec: remaining.as_secs().cast_signed(), tv_nsec: remaining.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.tcp, events)], Some(&limit)) {
                Ok(0) => return Err(self.timeout_error(silent_until)),
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn timeout_error(&self, silent_until: Instant) -> io::Error {
        let cause = if self.has_transferred && silent_until > self.deadline {
            ConnectionError::Slow { after: self.time_limit }
        } else {
            ConnectionError::Silent { after: self.max_silence }
        };
        io::Error::new(io::ErrorKind::TimedOut, cause)
    }
}

impl Read for TimedStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.transfer(PollFlags::IN, |mut tcp| tcp.read(into))
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.transfer(PollFlags::OUT, |mut tcp| tcp.write(bytes))
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
    /// How long the peer may be silent before it begins a frame.
    max_silence: Duration,
    /// How long the peer may be silent within a frame.
    max_silence_in_frame: Duration,
    /// Bytes per second that must be transferred after `max_silence_in_frame`.
    min_bytes_per_second: u64,
    end: LocalEnd,
}

/// Header of a frame.
struct FrameHeader {
    kind: Kind,
    /// Bytes of the payload.
    len: usize,
}

impl FrameHeader {
    fn decode([a, b, c, d, code]: [u8; HEADER_LEN]) -> std::result::Result<Self, ConnectionError> {
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        let kind = Kind::from_code(code)
            .ok_or_else(|| ConnectionError::protocol(format!("a frame of the unknown type {code}")))?;
        if len > kind.limit() {
            let text = format!("a frame {kind:?} of {len} bytes, more than the {} it may have", kind.limit());
            return Err(ConnectionError::protocol(text));
        }
        Ok(Self { kind, len })
    }
}

/// Connects to the first address of a server that accepts the connection.
fn connect_tcp(server: &Remote) -> std::result::Result<TcpStream, ConnectionError> {
    let failed = |source| ConnectionError::Connect { address: format!("{}:{}", server.host, server.port), source };
    let mut last_error = io::Error::new(io::ErrorKind::NotFound, "it has no address");
    for address in (server.host.as_str(), server.port).to_socket_addrs().map_err(failed)? {
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(tcp) => return Ok(tcp),
            Err(e) => last_error = e,
        }
    }
    Err(failed(last_error))
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Closing lets the peer distinguish an end from a failure. The time limit is short, because the peer may not
        // receive any more.
        self.stream.timed().begin(CLOSE_TIMEOUT, CLOSE_TIMEOUT);
        self.stream.close();
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("max_silence", &self.max_silence).finish_non_exhaustive()
    }
}

impl Connection {
    /// Connects to a server, including the TLS handshake.
    pub fn connect(server: &Remote, identity: Option<&Identity>) -> std::result::Result<Self, ConnectionError> {
        let identity = identity.ok_or(ConnectionError::NoIdentity)?;
        let (config, end) = (identity.client()?, LocalEnd::client(&identity.cert));
        let host = server.host.clone();
        let name = ServerName::try_from(host.clone()).map_err(|_| ConnectionError::Host { host: host.clone() })?;
        let tcp = connect_tcp(server)?;
        let connection = ClientConnection::new(config, name).map_err(|e| ConnectionError::protocol(e.to_string()))?;
        let mut stream = StreamOwned::new(connection, TimedStream::new(tcp)?);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).map_err(|e| connection_error(e, &end))?;
        }
        Ok(Self {
            stream: Box::new(stream),
            max_silence: MAX_SILENCE,
            max_silence_in_frame: MAX_SILENCE,
            min_bytes_per_second: MIN_BYTES_PER_SECOND,
            end,
        })
    }

    /// Accepts a client. `max_silence` limits the silence before its greeting and within each frame.
    pub fn accept(
        tcp: TcpStream,
        config: Arc<ServerConfig>,
        end: LocalEnd,
        max_silence: Duration,
    ) -> std::result::Result<Self, ConnectionError> {
        let connection = ServerConnection::new(config).map_err(|e| ConnectionError::protocol(e.to_string()))?;
        let mut stream = StreamOwned::new(connection, TimedStream::new(tcp)?);
        let greeting = max_silence.min(CONNECT_TIMEOUT);
        stream.sock.begin(greeting, greeting);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).map_err(|e| connection_error(e, &end))?;
        }
        Ok(Self {
            stream: Box::new(stream),
            max_silence,
            max_silence_in_frame: max_silence,
            min_bytes_per_second: MIN_BYTES_PER_SECOND,
            end,
        })
    }

    /// Sets how long the peer may be silent before it begins a frame.
    pub fn set_max_silence(&mut self, max_silence: Duration) {
        self.max_silence = max_silence;
    }

    /// Sets the limits within a frame.
    #[cfg(test)]
    pub fn limit(&mut self, max_silence_in_frame: Duration, min_bytes_per_second: u64) {
        (self.max_silence_in_frame, self.min_bytes_per_second) = (max_silence_in_frame, min_bytes_per_second);
    }

    /// Returns the time limit for a frame of `len` bytes.
    fn time_limit(&self, len: usize) -> Duration {
        self.max_silence_in_frame + Duration::from_secs(len as u64 / self.min_bytes_per_second.max(1))
    }

    /// Sends a frame. Its payload is the concatenation of `parts`.
    pub fn send(&mut self, kind: Kind, parts: &[&[u8]]) -> std::result::Result<(), ConnectionError> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let allowed = u32::try_from(len).ok().filter(|len| *len as usize <= kind.limit());
        let len = allowed.ok_or_else(|| ConnectionError::protocol(format!("{len} bytes are too many for {kind:?}")))?;
        let mut front = len.to_le_bytes().to_vec();
        front.push(kind.code());
        let mut separate_parts = parts;
        if len < SHORT_FRAME_BYTES {
            parts.iter().for_each(|part| front.extend_from_slice(part));
            separate_parts = &[];
        }
        let time_limit = self.time_limit(len as usize);
        self.stream.timed().begin(self.max_silence_in_frame, time_limit);
        self.write_parts(&front, separate_parts).map_err(|e| connection_error(e, &self.end))
    }

    fn write_parts(&mut self, front: &[u8], parts: &[&[u8]]) -> io::Result<()> {
        self.stream.write_all(front)?;
        for part in parts {
            self.stream.write_all(part)?;
        }
        self.stream.flush()
    }

    #[cfg(test)]
    pub fn send_raw(&mut self, bytes: &[u8]) -> std::result::Result<(), ConnectionError> {
        self.stream.timed().begin(MAX_SILENCE, MAX_SILENCE);
        self.stream.write_all(bytes).and_then(|()| self.stream.flush()).map_err(|e| connection_error(e, &self.end))
    }

    #[cfg(test)]
    pub fn receive_raw(&mut self, bytes: &mut [u8]) -> std::result::Result<usize, ConnectionError> {
        self.stream.timed().begin(MAX_SILENCE, MAX_SILENCE);
        self.stream.read(bytes).map_err(|e| connection_error(e, &self.end))
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
        self.receive_during_work(Duration::ZERO)
    }

    /// Receives the next frame from a server that may report for up to `max_work` that it is still working
    /// ([`Kind::Busy`]).
    pub fn receive_during_work(
        &mut self,
        max_work: Duration,
    ) -> std::result::Result<Option<(Kind, Vec<u8>)>, ConnectionError> {
        let deadline = Instant::now() + max_work;
        loop {
            let Some(FrameHeader { kind, len }) = self.receive_header()? else { return Ok(None) };
            let payload = self.receive_payload(len)?;
            if kind != Kind::Busy {
                return Ok(Some((kind, payload)));
            }
            if Instant::now() >= deadline {
                return Err(ConnectionError::Slow { after: max_work });
            }
        }
    }

    /// Receives the header of the next frame. Returns `None` if the peer has closed the connection before it.
    fn receive_header(&mut self) -> std::result::Result<Option<FrameHeader>, ConnectionError> {
        let mut header = [0; HEADER_LEN];
        let mut received = 0;
        self.stream.timed().begin(self.max_silence, self.max_silence);
        while let Some(missing) = header.get_mut(received..).filter(|missing| !missing.is_empty()) {
            match self.stream.read(missing) {
                Ok(0) if received == 0 => return Ok(None),
                Ok(0) => return Err(ConnectionError::Closed),
                Ok(count) => {
                    if received == 0 {
                        self.stream.timed().begin(self.max_silence_in_frame, self.max_silence_in_frame);
                    }
                    received += count;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(connection_error(e, &self.end)),
            }
        }
        FrameHeader::decode(header).map(Some)
    }

    fn receive_payload(&mut self, len: usize) -> std::result::Result<Vec<u8>, ConnectionError> {
        // The buffer grows with the received data, so that a large stated length alone uses no memory.
        let mut payload = Vec::new();
        let time_limit = self.time_limit(len);
        self.stream.timed().begin(self.max_silence_in_frame, time_limit);
        let read = (&mut self.stream).take(len as u64).read_to_end(&mut payload);
        read.map_err(|e| connection_error(e, &self.end))?;
        if payload.len() == len { Ok(payload) } else { Err(ConnectionError::Closed) }
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
        let concerns_checkpoint = matches!(expected, Kind::BlockNumbers | Kind::Committed);
        let max_work = if concerns_checkpoint { MAX_WORK } else { MAX_STORE_WORK };
        match self.receive_during_work(max_work).map_err(failed)? {
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
