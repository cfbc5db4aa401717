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
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::timeline::host_us;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

/// Longest line in bytes: a guest can send anything.
const MAX_LINE: usize = 256;
/// How long a guest may take to read an answer. Its pages are loaded on demand.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A connection to the port of one QEMU's guest.
#[derive(Debug)]
pub(super) struct PhasePort {
    stream: UnixStream,
    input: Vec<u8>,
}

impl PhasePort {
    /// Connects to the port. QEMU serves one connection at a time; a second one waits until the first is closed.
    pub(super) fn connect(vmm: &Vmm) -> io::Result<Self> {
        let stream = UnixStream::connect(vmm.directory().phase())?;
        stream.set_write_timeout(Some(READ_TIMEOUT))?;
        Ok(Self { stream, input: Vec::new() })
    }

    /// Waits up to `timeout` for the guest to announce a phase. Returns the phase, or `None` after the timeout.
    pub(super) fn next_phase(&mut self, timeout: Duration) -> io::Result<Option<String>> {
        let deadline = Instant::now() + timeout;
        loop {
            while let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.input.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                if let Some(name) = line.trim().strip_prefix("phase ") {
                    return Ok(Some(name.trim().to_owned()));
                }
            }
            if self.input.len() > MAX_LINE {
                self.input.clear();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut chunk = [0; MAX_LINE];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.input.extend_from_slice(chunk.get(..read).unwrap_or_default()),
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
pub(super) fn wait_read(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let deadline = Instant::now() + READ_TIMEOUT;
    while agent::is_port_open(qmp, "phase")? {
        if Instant::now() > deadline {
            return Ok(false);
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(true)
}
