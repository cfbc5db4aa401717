//! The port by which a guest announces phases: lines.
//!
//! ```text
//! guest    phase NAME          its boot has come to this phase; it waits
//! host     saved               a candidate was taken
//!          kept                there is one already that may be used
//!          skipped WHY         there is none
//!          restored SECONDS    this guest goes on from the candidate; the host's time, since 1970
//! ```

use rekindle_qemu::agent;
use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_qemu::vmm::Vmm;
use rekindle_vm::timeline::host_us;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a line at most: a guest can say anything.
const LONGEST: usize = 256;
/// How long a guest may take to read an answer: its pages come on demand.
const READ: Duration = Duration::from_secs(5);
/// Between two looks at what cannot be waited for.
const LOOK: Duration = Duration::from_millis(2);

/// A connection to the port of one QEMU's guest.
#[derive(Debug)]
pub(super) struct Port {
    stream: UnixStream,
    input: Vec<u8>,
}

impl Port {
    /// Connect. QEMU has one connection at a time; a second one waits until the first has gone.
    pub(super) fn connect(vmm: &Vmm) -> io::Result<Self> {
        let stream = UnixStream::connect(vmm.directory().phase())?;
        stream.set_write_timeout(Some(READ))?;
        Ok(Self { stream, input: Vec::new() })
    }

    /// The phase that the guest announces next, if it does so within `patience`.
    pub(super) fn announced(&mut self, patience: Duration) -> io::Result<Option<String>> {
        let deadline = Instant::now() + patience;
        loop {
            while let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.input.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                if let Some(name) = line.trim().strip_prefix("phase ") {
                    return Ok(Some(name.trim().to_owned()));
                }
            }
            if self.input.len() > LONGEST {
                self.input.clear();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut chunk = [0; LONGEST];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.input.extend_from_slice(chunk.get(..read).unwrap_or_default()),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Answer.
    pub(super) fn answer(&mut self, text: &str) -> io::Result<()> {
        self.stream.write_all(format!("{text}\n").as_bytes())
    }

    /// Tell the guest that it goes on from a candidate.
    pub(super) fn restored(&mut self) -> io::Result<()> {
        self.answer(&format!("restored {}", host_us() / 1_000_000))
    }
}

/// Wait until the guest has read its answer and closed the port: to let go of it before would take the answer away. Whether it has.
pub(super) fn wait_read(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let deadline = Instant::now() + READ;
    while agent::is_open(qmp, "phase")? {
        if Instant::now() > deadline {
            return Ok(false);
        }
        thread::sleep(LOOK);
    }
    Ok(true)
}
