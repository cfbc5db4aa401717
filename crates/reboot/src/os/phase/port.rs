//! The port through which a guest announces phases. Messages are lines:
//!
//! ```text
//! guest    phase NAME          its boot has reached this phase; it waits
//! host     saved               a candidate was taken
//!          kept                a usable candidate exists already
//!          skipped WHY         no candidate was taken
//!          restored SECONDS    this guest continues from the candidate; the host's time, since 1970
//! ```

use rekindle_qemu::agent;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::socket;
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::timeline::host_us;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

/// Length of the longest line: a guest can send anything.
const MAX_LINE_BYTES: usize = 256;
/// How long a guest may take to read an answer. Its pages are loaded on demand.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A connection to the port of one QEMU's guest.
#[derive(Debug)]
pub(super) struct PhasePort {
    stream: UnixStream,
    /// Bytes that the guest has sent, without complete lines.
    unread: Vec<u8>,
}

impl PhasePort {
    /// Connects to the port. QEMU serves one connection at a time; a second one waits until the first is closed.
    pub(super) fn connect(vmm: &Vmm) -> io::Result<Self> {
        let stream = socket::connect(&vmm.directory().phase(), READ_TIMEOUT)?;
        stream.set_write_timeout(Some(READ_TIMEOUT))?;
        Ok(Self { stream, unread: Vec::new() })
    }

    /// Waits up to `timeout` for the guest to announce a phase. Returns the phase, or `None` after the timeout.
    pub(super) fn next_phase(&mut self, timeout: Duration) -> io::Result<Option<String>> {
        let deadline = Instant::now() + timeout;
        loop {
            while let Some(line_end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=line_end).collect();
                let line = String::from_utf8_lossy(&line);
                if let Some(name) = line.trim().strip_prefix("phase ") {
                    return Ok(Some(name.trim().to_owned()));
                }
            }
            if self.unread.len() > MAX_LINE_BYTES {
                self.unread.clear();
            }
            let remaining_time = deadline.saturating_duration_since(Instant::now());
            if remaining_time.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(remaining_time))?;
            let mut chunk = [0; MAX_LINE_BYTES];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.unread.extend_from_slice(chunk.get(..length).unwrap_or_default()),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    pub(super) fn answer(&mut self, text: &str) -> io::Result<()> {
        self.stream.write_all(format!("{text}\n").as_bytes())
    }

    /// Notifies the guest that it continues from a candidate.
    pub(super) fn notify_restored(&mut self) -> io::Result<()> {
        self.answer(&format!("restored {}", host_us() / 1_000_000))
    }
}

/// Waits until the guest has read its answer and closed the port. Returns whether it has. Closing the connection
/// earlier would discard the answer.
pub(super) fn wait_until_read(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let deadline = Instant::now() + READ_TIMEOUT;
    while agent::is_port_open(qmp, "phase")? {
        if Instant::now() > deadline {
            return Ok(false);
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(true)
}
