//! A thin QMP client (QEMU Machine Protocol, JSON lines over a Unix socket).
//!
//! A QMP socket serves one client at a time. QEMU accepts a second connection but does not greet it before the first
//! has ended; therefore the greeting has a time-out. Commands are answered in order. Events that arrive in between
//! are kept until the caller asks for them.
//!
//! A QEMU that its guest has compromised may send anything. Therefore the size of an answer is limited, each answer
//! has one deadline regardless of what arrives before it, and only the newest events of each kind are kept. A late
//! answer does not mean that QEMU has ended; it may only be busy. When such an answer arrives, it is not taken for
//! the answer to the next command.

mod error;
mod events;
mod message;

pub use error::QmpError;
pub use events::Event;

use crate::socket;
use events::{KeptEvents, Timestamp};
use message::{Message, ReceivedMessage, command_json};
use rekindle_kernel::lines::{LineError, Lines};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Default time limit for an answer. QEMU answers within milliseconds; while it writes a snapshot or waits for a
/// disk, it may take seconds.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// What a new connection waits for first, in errors.
const GREETING: &str = "greeting";
/// The command that enables all others.
const NEGOTIATION: &str = "qmp_capabilities";
/// Limit of an answer or an event, in bytes. The longest is the answer to `query-qmp-schema`, of 250 kB.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Class of an error that is not QEMU's: libvirt has not passed the command on.
pub(crate) const LIBVIRT_ERROR_CLASS: &str = "libvirt";
/// Limit of messages in one call: a QEMU may send them without end.
const MAX_MESSAGES_PER_READ: usize = 1024;

/// QEMU's version, as QEMU reports it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// First number: 10 in 10.0.2.
    pub major: u32,
    pub minor: u32,
    pub micro: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// A connection to a QEMU that has greeted.
#[derive(Debug)]
pub struct Qmp {
    lines: Lines<UnixStream>,
    events: KeptEvents,
    /// Number of answers that timed out and may still arrive.
    overdue_answers: usize,
    version: Version,
    timeout: Duration,
}

impl Qmp {
    /// Connects to the QMP socket at `path`.
    ///
    /// On success: QEMU has greeted and accepts commands.
    ///
    /// # Errors
    /// [`QmpError::Connect`] immediately when no process listens; [`QmpError::NoGreeting`] after `timeout` when
    /// another client holds the socket.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        let stream = match socket::connect(path, timeout) {
            // A frozen QEMU accepts no connections, and its queue is short.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return Err(QmpError::NoGreeting { path: path.to_owned(), after: timeout });
            }
            other => other.map_err(|source| QmpError::Connect { path: path.to_owned(), source })?,
        };
        Self::over(stream, timeout).map_err(|e| match e {
            QmpError::Timeout { after, .. } => QmpError::NoGreeting { path: path.to_owned(), after },
            other => other,
        })
    }

    /// Starts QMP on a socket whose other end is a QEMU's monitor.
    ///
    /// # Errors
    /// As for [`Qmp::connect`].
    pub fn over(stream: UnixStream, timeout: Duration) -> Result<Self, QmpError> {
        // A peer that does not read lets the socket's buffer fill up: limit the time of a send.
        set_socket_timeout(&stream, Timeout::Send, Some(DEFAULT_TIMEOUT))
            .map_err(|e| QmpError::Io { during: GREETING.into(), source: e.into() })?;
        let mut qmp = Self {
            lines: Lines::new(stream, MAX_MESSAGE_BYTES),
            events: KeptEvents::default(),
            overdue_answers: 0,
            version: Version { major: 0, minor: 0, micro: 0 },
            timeout,
        };
        qmp.negotiate()?;
        qmp.timeout = DEFAULT_TIMEOUT;
        Ok(qmp)
    }

    /// Waits for the greeting, and enables commands.
    ///
    /// QEMU accepts a connection while it still executes a command of the client before, whose reply and events it
    /// then sends to this one. It executes one command at a time: everything that is not for this client arrives before
    /// the reply to this client's first command, which is recognized by its `id`.
    fn negotiate(&mut self) -> Result<(), QmpError> {
        let deadline = Instant::now() + self.timeout;
        self.version = self.first_message(GREETING, deadline, |message| match message {
            Message::Greeting { qmp: greeting } => Some(Ok(greeting.version.qemu)),
            _ => None,
        })?;
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let own_id = Value::from(format!("{}-{}", std::process::id(), since_1970.as_nanos()));
        self.write(NEGOTIATION, &command_json(NEGOTIATION, (), Some(&own_id))?, &[])?;
        self.first_message(NEGOTIATION, deadline, |message| match message {
            Message::Return { id, .. } if id == own_id => Some(Ok(())),
            Message::Error { id, error } if id == own_id => Some(Err(error.of(NEGOTIATION))),
            _ => None,
        })
    }

    /// Returns what `select` gives for the first message for which it gives something. The others are dropped.
    fn first_message<T>(
        &mut self,
        during: &str,
        deadline: Instant,
        select: impl Fn(Message) -> Option<Result<T, QmpError>>,
    ) -> Result<T, QmpError> {
        loop {
            if let Some(result) = select(self.next_message(during, deadline, self.timeout)?.message) {
                return result;
            }
            // QEMU may send events without end.
            if Instant::now() > deadline {
                return Err(QmpError::Timeout { during: during.into(), after: self.timeout });
            }
        }
    }

    /// Returns the version from QEMU's greeting.
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Runs `command` and returns its result.
    ///
    /// # Errors
    /// [`QmpError::Refused`] with QEMU's text; [`QmpError::Timeout`]; [`QmpError::Closed`] when QEMU has ended.
    pub fn execute<T: DeserializeOwned>(&mut self, command: &str, arguments: impl Serialize) -> Result<T, QmpError> {
        self.send(command, arguments, &[])?;
        self.reply(command)
    }

    /// Runs `command` and hands over a descriptor (for `getfd` and `add-fd`).
    ///
    /// # Errors
    /// As for [`Qmp::execute`].
    pub fn execute_with_fd<T: DeserializeOwned>(
        &mut self,
        command: &str,
        arguments: impl Serialize,
        fd: BorrowedFd<'_>,
    ) -> Result<T, QmpError> {
        self.send(command, arguments, &[fd])?;
        self.reply(command)
    }

    /// Runs a command of the human monitor and returns its output.
    ///
    /// # Errors
    /// As for [`Qmp::execute`]. The human monitor reports its own errors as text.
    pub fn human(&mut self, line: &str) -> Result<String, QmpError> {
        self.execute("human-monitor-command", serde_json::json!({ "command-line": line }))
    }

    /// Sends a command without waiting. Its reply must be fetched by [`Qmp::try_reply`] or [`Qmp::reply`] before the
    /// next command.
    ///
    /// # Errors
    /// [`QmpError::Io`] when the socket fails.
    pub fn send(&mut self, command: &str, arguments: impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<(), QmpError> {
        self.write(command, &command_json(command, arguments, None)?, fds)
    }

    /// Sends all of a command except its closing brace, which [`Qmp::fire`] sends.
    ///
    /// QEMU reads its monitor byte by byte, at some 5 µs each: a command of a hundred bytes takes half a millisecond
    /// to arrive. A staged command takes the time of one byte. A staged command that is never fired has no effect.
    ///
    /// # Errors
    /// [`QmpError::Io`] when the socket fails.
    pub fn stage(&mut self, command: &str, arguments: impl Serialize) -> Result<(), QmpError> {
        let json = command_json(command, arguments, None)?;
        let (_brace, without_brace) = json.split_last().unwrap_or((&b'}', &[]));
        self.write(command, without_brace, &[])
    }

    /// Sends the last byte of the staged command.
    ///
    /// # Errors
    /// [`QmpError::Io`] when the socket fails.
    pub fn fire(&mut self, command: &str) -> Result<(), QmpError> {
        self.write(command, b"}", &[])
    }

    fn write(&mut self, command: &str, mut unsent: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), QmpError> {
        let failed = |source: rustix::io::Errno| match source {
            rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => QmpError::Closed { during: command.into() },
            rustix::io::Errno::AGAIN => QmpError::Timeout { during: command.into(), after: DEFAULT_TIMEOUT },
            other => QmpError::Io { during: command.into(), source: other.into() },
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(QmpError::Protocol { during: command.into(), text: "too many descriptors".into() });
        }
        while !unsent.is_empty() {
            let sent = sendmsg(self.lines.stream(), &[IoSlice::new(unsent)], &mut ancillary, SendFlags::NOSIGNAL);
            unsent = unsent.get(sent.map_err(failed)?..).unwrap_or_default();
            ancillary.clear();
        }
        Ok(())
    }

    /// Waits for the reply to the last command.
    ///
    /// # Errors
    /// As for [`Qmp::execute`].
    pub fn reply<T: DeserializeOwned>(&mut self, command: &str) -> Result<T, QmpError> {
        self.reply_by(command, Instant::now() + self.timeout)
    }

    fn reply_by<T: DeserializeOwned>(&mut self, command: &str, deadline: Instant) -> Result<T, QmpError> {
        let timeout = self.timeout;
        loop {
            let message = self.next_message(command, deadline, timeout);
            match message.and_then(|message| self.reply_or_keep(command, message)) {
                Ok(Some(value)) => return Ok(value),
                Ok(None) if Instant::now() < deadline => {}
                Ok(None) | Err(QmpError::Timeout { .. }) => {
                    self.overdue_answers += 1;
                    return Err(QmpError::Timeout { during: command.into(), after: timeout });
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Returns the reply to the last command, if it has arrived.
    ///
    /// # Errors
    /// As for [`Qmp::execute`].
    pub fn try_reply<T: DeserializeOwned>(&mut self, command: &str) -> Result<Option<T>, QmpError> {
        for _ in 0..MAX_MESSAGES_PER_READ {
            let Some(message) = self.try_next_message(command)? else { break };
            if let Some(value) = self.reply_or_keep(command, message)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    /// Returns the value or error of a reply. Returns `None` for an event, which is kept, and for a late reply to an
    /// earlier command.
    fn reply_or_keep<T: DeserializeOwned>(
        &mut self,
        command: &str,
        received: ReceivedMessage,
    ) -> Result<Option<T>, QmpError> {
        match received.message {
            Message::Event { event, data, timestamp } => {
                self.keep_event(received.bytes, event, data, &timestamp);
                Ok(None)
            }
            Message::Error { .. } | Message::Return { .. } if self.overdue_answers > 0 => {
                self.overdue_answers -= 1;
                Ok(None)
            }
            Message::Error { error, .. } => Err(error.of(command)),
            Message::Return { value, .. } => serde_json::from_value(value.clone()).map(Some).map_err(|_| {
                QmpError::Protocol { during: command.into(), text: value.to_string().chars().take(200).collect() }
            }),
            Message::Greeting { .. } => {
                Err(QmpError::Protocol { during: command.into(), text: "a second greeting".into() })
            }
        }
    }

    fn keep_event(&mut self, bytes: usize, name: String, data: Value, timestamp: &Timestamp) {
        self.events.keep(bytes, Event { name, data, host_us: timestamp.host_us() });
    }

    /// Returns the first value that `select` gives for an event, kept or new. Events before it are dropped.
    ///
    /// # Errors
    /// [`QmpError::Timeout`] naming `what` when no such event arrives within `timeout`.
    pub fn wait_event<T>(
        &mut self,
        what: &str,
        timeout: Duration,
        mut select: impl FnMut(&Event) -> Option<T>,
    ) -> Result<T, QmpError> {
        let deadline = Instant::now() + timeout;
        let mut is_late = false;
        loop {
            while let Some(event) = self.events.take_oldest() {
                if let Some(value) = select(&event) {
                    return Ok(value);
                }
            }
            if is_late {
                return Err(QmpError::Timeout { during: what.into(), after: timeout });
            }
            let ReceivedMessage { bytes, message } = self.next_message(what, deadline, timeout)?;
            match message {
                Message::Event { event, data, timestamp } => self.keep_event(bytes, event, data, &timestamp),
                Message::Error { .. } | Message::Return { .. } if self.overdue_answers > 0 => self.overdue_answers -= 1,
                _ => return Err(QmpError::Protocol { during: what.into(), text: "a reply to no command".into() }),
            }
            // QEMU may send events without end: check the deadline after each.
            is_late = Instant::now() > deadline;
        }
    }

    /// Returns the events kept so far, oldest first. Unread ones are added when the next reply is read.
    pub fn kept_events(&self) -> impl Iterator<Item = &Event> {
        self.events.iter()
    }

    /// Drops the events kept so far.
    pub fn drop_events(&mut self) {
        self.events.clear();
    }

    /// Waits for the next message until `deadline`. `timeout` is only for the error.
    fn next_message(
        &mut self,
        during: &str,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<ReceivedMessage, QmpError> {
        match self.lines.next_by(deadline) {
            Ok(line) => ReceivedMessage::parse(during, &line),
            Err(LineError::Late) => Err(QmpError::Timeout { during: during.into(), after: timeout }),
            Err(e) => Err(line_error(during, e)),
        }
    }

    /// Returns the next message, if it has arrived.
    fn try_next_message(&mut self, during: &str) -> Result<Option<ReceivedMessage>, QmpError> {
        let line = self.lines.next_ready().map_err(|e| line_error(during, e))?;
        line.map(|line| ReceivedMessage::parse(during, &line)).transpose()
    }
}

fn line_error(during: &str, e: LineError) -> QmpError {
    let during = during.into();
    match e {
        LineError::Closed => QmpError::Closed { during },
        LineError::TooLong { .. } => QmpError::TooLong { during },
        LineError::Late | LineError::Io(_) => QmpError::Io { during, source: e.into() },
    }
}

impl AsFd for Qmp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.lines.stream().as_fd()
    }
}

#[cfg(test)]
mod tests;
