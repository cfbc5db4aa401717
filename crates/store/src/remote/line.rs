//! A connection: frames of a type and a payload, with a limit for each, and an end to patience.
//!
//! ```text
//! length of the payload (4) | type (1) | payload
//! ```

use super::identity::{Identity, explain};
use super::protocol::{Failure, Kind};
use crate::error::{Result, StoreError};
use crate::url::Remote;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConfig, ServerConnection, StreamOwned};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How long the other side may stand still within something.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(10);

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
    fn of(e: io::Error, patience: Duration) -> Self {
        if let Some(explained) = explain(&e) {
            return explained;
        }
        match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Silent { after: patience },
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

/// What goes in both directions.
trait Stream: Read + Write + Send {
    /// Say that no more will come.
    fn close(&mut self);
}

impl Stream for StreamOwned<ClientConnection, TcpStream> {
    fn close(&mut self) {
        self.conn.send_close_notify();
        let _ = self.conn.write_tls(&mut self.sock);
    }
}

impl Stream for StreamOwned<ServerConnection, TcpStream> {
    fn close(&mut self) {
        self.conn.send_close_notify();
        let _ = self.conn.write_tls(&mut self.sock);
    }
}

/// One end of a connection.
pub(crate) struct Line {
    stream: Box<dyn Stream>,
    tcp: TcpStream,
    patience: Duration,
}

impl Drop for Line {
    fn drop(&mut self) {
        // So that the other side can tell an end from a break. It does not wait for a peer that takes nothing any more.
        let _ = self.tcp.set_write_timeout(Some(Duration::from_millis(100)));
        self.stream.close();
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Line({:?})", self.tcp.peer_addr().ok())
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
        let own = Self::prepare(&tcp)?;
        let mut stream = StreamOwned::new(connection, tcp);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).map_err(|e| LineError::of(e, CONNECT))?;
        }
        let mut line = Self { stream: Box::new(stream), tcp: own, patience: CONNECT };
        line.set_patience(PATIENCE)?;
        Ok(line)
    }

    /// Take a client in, with `patience` for the greeting and for each thing.
    pub fn accept(
        tcp: TcpStream,
        config: Arc<ServerConfig>,
        patience: Duration,
    ) -> std::result::Result<Self, LineError> {
        let own = Self::prepare(&tcp)?;
        own.set_read_timeout(Some(patience.min(CONNECT))).map_err(LineError::Io)?;
        own.set_write_timeout(Some(patience)).map_err(LineError::Io)?;
        let connection = ServerConnection::new(config).map_err(|e| LineError::protocol(e.to_string()))?;
        let mut stream = StreamOwned::new(connection, tcp);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).map_err(|e| LineError::of(e, patience.min(CONNECT)))?;
        }
        let mut line = Self { stream: Box::new(stream), tcp: own, patience: Duration::ZERO };
        line.set_patience(patience)?;
        Ok(line)
    }

    fn prepare(tcp: &TcpStream) -> std::result::Result<TcpStream, LineError> {
        let set = || {
            tcp.set_nodelay(true)?;
            tcp.set_read_timeout(Some(CONNECT))?;
            tcp.set_write_timeout(Some(PATIENCE))?;
            tcp.try_clone()
        };
        set().map_err(LineError::Io)
    }

    /// How long the other side may stand still from now on.
    pub fn set_patience(&mut self, patience: Duration) -> std::result::Result<(), LineError> {
        if self.patience != patience {
            self.tcp.set_read_timeout(Some(patience)).map_err(LineError::Io)?;
            self.patience = patience;
        }
        Ok(())
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
        let sent = self.stream.write_all(&front).and_then(|()| {
            rest.iter().try_for_each(|part| self.stream.write_all(part))?;
            self.stream.flush()
        });
        sent.map_err(|e| LineError::of(e, PATIENCE))
    }

    /// Send only the beginning of a frame.
    #[cfg(test)]
    pub fn send_length(&mut self, len: u32, code: u8) -> std::result::Result<(), LineError> {
        let front = [&len.to_le_bytes()[..], &[code]].concat();
        self.stream.write_all(&front).and_then(|()| self.stream.flush()).map_err(LineError::Io)
    }

    /// Send a frame whose payload is JSON.
    pub fn send_json(&mut self, kind: Kind, value: &impl Serialize) -> std::result::Result<(), LineError> {
        let text = serde_json::to_vec(value).map_err(|e| LineError::Io(e.into()))?;
        self.send(kind, &[&text])
    }

    /// The next frame. `None` when the line was closed in order, between two.
    pub fn receive(&mut self) -> std::result::Result<Option<(Kind, Vec<u8>)>, LineError> {
        loop {
            let mut front = [0; 5];
            let mut there = 0;
            while let Some(room) = front.get_mut(there..).filter(|room| !room.is_empty()) {
                match self.stream.read(room) {
                    Ok(0) if there == 0 => return Ok(None),
                    Ok(0) => return Err(LineError::Closed),
                    Ok(n) => there += n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(LineError::of(e, self.patience)),
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
            let mut rest = (&mut self.stream).take(len as u64);
            rest.read_to_end(&mut payload).map_err(|e| LineError::of(e, self.patience))?;
            if payload.len() != len {
                return Err(LineError::Closed);
            }
            if kind != Kind::Busy {
                return Ok(Some((kind, payload)));
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
        match self.receive().map_err(failed)? {
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
